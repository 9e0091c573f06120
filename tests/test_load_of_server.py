"""The load test of the server notices what goes wrong: tried on a tiny model, with faults put into the server."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from benchmarks import server as benchmark
from tiny_models import save_tiny

from llmfromscratch import LLM, AsyncEngine, sampling
from llmfromscratch.server.forms import Choice
from llmfromscratch.server.notebook import serve

WORKLOAD = replace(benchmark.WORKLOADS["quick"], clients=8, answers=(40, 60))


class Slow(sampling.Sampler):
    """So that there is a half-way."""

    def sample(self, logits, rows):
        time.sleep(0.008)
        return super().sample(logits, rows)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    return LLM(folder, dtype="float64", device="cpu", max_requests=8, kv_cache_memory=8_000_000, sampler=Slow())


@pytest.fixture(scope="module")
def url(llm):
    with serve(llm) as server:
        yield server.url


def test_all_answers_are_those_of_generate_and_nothing_is_left(llm, url):
    figures = benchmark.measure_round(llm, url, WORKLOAD, seed=0)
    assert figures["faults"] == []
    assert (figures["finished"], figures["cancelled"], figures["malformed"]) == (24, 3, 3)
    assert figures["leftovers"] == 0
    assert 0.2 < figures["cancelled_after"] < 0.8
    assert len(figures["ttft"]) == len(figures["tpot"]) > 0


def test_a_wrong_text_is_noticed_in_every_whole_answer(llm, url, monkeypatch):
    monkeypatch.setattr(Choice, "text", property(lambda self: "".join(self.texts) + "!"))
    figures = benchmark.measure_round(llm, url, WORKLOAD, seed=1)
    asked = benchmark.requests(llm, WORKLOAD, seed=1)
    whole = sum(one.kind == "finished" and not one.sent["stream"] for one in asked)
    assert whole > 5 and len(figures["faults"]) == whole
    assert all("(finished, whole" in fault and "says something else" in fault for fault in figures["faults"])


def test_a_request_that_goes_on_without_its_client_is_noticed(llm, url, monkeypatch):
    monkeypatch.setattr(AsyncEngine, "_dismiss", lambda self, consumer: None)
    figures = benchmark.measure_round(llm, url, WORKLOAD, seed=2)
    assert len(figures["faults"]) == figures["cancelled"] == 3
    assert all("was not cancelled half-way" in fault for fault in figures["faults"])


def test_blocks_that_nobody_gives_back_are_counted(llm, url, monkeypatch):
    monkeypatch.setattr(benchmark, "_REST", 0.1)
    llm.cache.reserve(-7, 3 * llm.cache.block_size)
    try:
        assert benchmark.leftovers(llm, url) == 3
    finally:
        llm.cache.release(-7)
    assert benchmark.leftovers(llm, url) == 0


def test_the_cost_of_serving_is_measured_without_the_model(llm, url, monkeypatch):
    monkeypatch.setattr(benchmark, "ROUNDS_WITHOUT_MODEL", 1)
    monkeypatch.setattr(benchmark, "STEP_SECONDS", 0.002)
    own = llm.core.model
    figures = benchmark.measure_cost(llm, url, replace(WORKLOAD, answers=(4, 8)), seed=3)
    assert figures["requests_per_second"] > 1
    assert figures["server_ms_per_token"] > 0 and figures["clients_ms_per_token"] > 0
    assert llm.core.model is own
    assert benchmark.leftovers(llm, url) == 0
