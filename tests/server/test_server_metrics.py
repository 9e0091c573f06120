"""/metrics: what Prometheus reads is what has happened."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import LONG, Held, Serving, until


def figures(server) -> dict[str, float]:
    response = server.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith("llmfromscratch_") and family.documentation.endswith(".")
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[sample.name.removeprefix("llmfromscratch_") + (f"[{labels}]" if labels else "")] = sample.value
    return found


@pytest.fixture
def server(llm):
    with Serving(llm, max_queue=2) as found:
        yield found


def test_answers_are_counted_and_timed(server, llm):
    before = figures(server)
    assert before["ttft_seconds_count"] == before["answers_total[length]"] == before["refused_total[queue]"] == 0
    for _ in range(3):
        server.post("/v1/completions", {"prompt": "hello", "max_tokens": 5, "ignore_eos": True})
    server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1, "ignore_eos": True, "stream": True})
    now = figures(server)
    assert now["answers_total[length]"] == now["ttft_seconds_count"] == now["answer_seconds_count"] == 4
    assert now["tpot_seconds_count"] == 3  # one token has no time between tokens
    assert now["answer_tokens_sum"] == 16 and now["prompt_tokens_sum"] == 20
    assert now["tokens_total"] - before["tokens_total"] == 16
    assert now["finished_total"] - before["finished_total"] == 4
    assert now["prefix_hits_total"] == llm.metrics.prefix_hits
    assert 0 < now["ttft_seconds_sum"] <= now["answer_seconds_sum"]


def test_what_runs_and_waits_shows_while_it_does(server, llm):
    llm.sampler = held = Held()
    asked = [server.begin("/v1/completions", {**LONG, "stream": True}) for _ in range(6)]
    until(lambda: server.service.admission.answers == 6)
    held.let(8)
    until(lambda: figures(server)["running"] == 4)
    now = figures(server)
    assert now["waiting"] == 2 and now["streams"] == 6
    assert 0 < now["blocks_used"] < now["blocks_total"] == len(llm.cache.allocator.ref_counts)
    server.post("/v1/completions", {"prompt": "x"})
    assert figures(server)["refused_total[queue]"] == 1
    for connection in asked:
        connection.close()
    until(lambda: figures(server)["clients_gone_total[went away]"] == 6)
    held.let_all()
    until(lambda: figures(server)["running"] == 0)
    now = figures(server)
    assert now["waiting"] == now["streams"] == now["blocks_used"] == 0


def test_preemptions_are_the_engines(server, llm):
    llm.metrics.preemptions = 7
    assert figures(server)["preemptions_total"] == 7
    llm.use_scheduler(max_requests=4)  # another engine core, whose figures begin anew
    assert figures(server)["preemptions_total"] == 0


def test_two_servers_in_one_process_count_for_themselves(server, llm):
    with Serving(llm) as other:
        other.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert figures(other)["ttft_seconds_count"] == 1 and figures(server)["ttft_seconds_count"] == 0
