"""GET /watch: the engine in numbers, true, complete, and without anything of what clients have written."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from types import SimpleNamespace

import fastapi
import pytest
from scripted_engine import scripted
from starlette.testclient import TestClient

from llmfromscratch import AsyncEngine, SamplingParams
from llmfromscratch.server import create_app, serve
from llmfromscratch.server.watching import SECONDS, Speedometer, snapshot


@pytest.fixture
def llm(tmp_path):
    return scripted(tmp_path / "model", "a" * 500, max_requests=2, max_batch_tokens=24)


def add(llm, prompt: str, **params):
    request = llm.request(prompt, SamplingParams(**params))
    llm.core.add(request)
    return request


def look(llm) -> dict:
    return snapshot(llm, Speedometer(llm))


def numbers(llm, *names: str) -> list[tuple]:
    return [tuple(request[name] for name in names) for request in look(llm)["requests"]]


def test_each_request_is_where_it_says(llm):
    add(llm, "x" * 10, max_tokens=50)
    add(llm, "y" * 60, max_tokens=70, priority=3)
    add(llm, "z" * 5, max_tokens=7)
    llm.core.step()  # 24 tokens a step: a part of the most important prompt
    where = "id", "state", "computed_tokens", "tokens"
    assert numbers(llm, *where) == [(1, "prefilling", 24, 0), (0, "waiting", 0, 0), (2, "waiting", 0, 0)]
    llm.core.step()
    llm.core.step()  # its last 12 tokens, and the 10 of the other prompt
    assert numbers(llm, *where) == [(0, "decoding", 10, 1), (1, "decoding", 60, 1), (2, "waiting", 0, 0)]
    given = "prompt_tokens", "max_tokens", "priority"
    assert numbers(llm, *given) == [(10, 50, 0), (60, 70, 3), (5, 7, 0)]
    seen = look(llm)
    assert (seen["running"], seen["waiting"], seen["unlisted"]) == (2, 1, 0)


def test_what_has_ended_is_in_the_totals_and_its_blocks_are_kept_for_others(llm):
    llm.generate(["x" * 40] * 2, SamplingParams(max_tokens=10))
    llm.core.abort(add(llm, "y", max_tokens=5), "enough.")
    seen = look(llm)
    # the second began when the first had computed a part of the prompt: what of it was found depends on the steps
    hits = seen["totals"].pop("prefix_hits")
    assert hits == llm.metrics.prefix_hits
    assert seen["totals"] == {"tokens": 20, "finished": 2, "aborted": 1, "preemptions": 0, "steps": llm.metrics.steps}
    assert seen["requests"] == [] and seen["blocks"]["held"] == 0
    assert seen["blocks"]["kept"] == len(llm.cache.allocator.kept) >= 3  # 49 tokens of 16 each
    assert seen["blocks"]["total"] == len(llm.cache.allocator.ref_counts) and seen["blocks"]["size"] == 16


def test_a_preemption_shows(tmp_path):
    # 12 blocks: two requests of 80 tokens and more outgrow them together
    llm = scripted(tmp_path / "model", "a" * 500, kv_cache_memory=12 * 16 * 2 * 3 * 3 * 4 * 4)
    assert look(llm)["blocks"]["total"] == 12
    add(llm, "x" * 60, max_tokens=100)
    add(llm, "y" * 60, max_tokens=100)
    while not look(llm)["totals"]["preemptions"]:
        llm.core.step()
    assert numbers(llm, "id", "state", "computed_tokens", "preemptions")[1] == (1, "preempted", 0, 1)


@pytest.mark.parametrize("kind", ["static", "concat", "none"])
def test_a_cache_without_blocks_has_none_to_show(kind, tmp_path):
    memory = {"kv_cache_memory": None if kind != "static" else 4_000_000}
    llm = scripted(tmp_path / "model", "a" * 50, kv_cache=kind, **memory)
    add(llm, "x" * 10, max_tokens=20)
    llm.core.step()
    seen = look(llm)
    assert seen["blocks"] is None
    assert seen["requests"][0]["tokens"] == 1


def test_a_long_queue_is_counted_and_not_listed_to_its_end(llm):
    for _ in range(100):
        add(llm, "x", max_tokens=2)
    seen = look(llm)
    assert (seen["waiting"], len(seen["requests"]), seen["unlisted"]) == (100, 64, 36)
    llm.core.step()
    assert look(llm)["running"] == 2 and [request["id"] for request in look(llm)["requests"]] == list(range(64))


def test_nothing_of_prompts_or_answers_is_told(llm):
    add(llm, "the secret is 4711", max_tokens=30)
    for _ in range(5):
        llm.core.step()
    told = look(llm)
    assert all(isinstance(value, int | float | str) for request in told["requests"] for value in request.values())
    assert "secret" not in json.dumps(told) and "aaa" not in json.dumps(told)


def test_looking_waits_for_no_step(llm):
    async def ask_and_look(server) -> dict:
        async with AsyncEngine(llm) as engine:
            llm.core.model.stopped = True  # the step that begins now ends when we say so
            asking = asyncio.create_task(engine.generate("x" * 10, SamplingParams(max_tokens=3)))
            try:
                while not llm.core.scheduler.running:
                    await asyncio.sleep(0.01)
                return await asyncio.to_thread(watch, server)
            finally:
                llm.core.model.stopped = False
                await asking

    with serve(llm) as server:
        assert asyncio.run(ask_and_look(server))["running"] == 1


def watch(server) -> dict:
    with urllib.request.urlopen(server.url + "/watch", timeout=10) as answer:
        return json.loads(answer.read())


# tokens per second


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def speed():
    return Speedometer(SimpleNamespace(metrics=SimpleNamespace(tokens=40)), Clock())


def later(speed: Speedometer, seconds: float, tokens: int) -> list[float]:
    speed.clock.now += seconds
    speed.llm.metrics.tokens += tokens
    speed.read()
    return list(speed.rates)


def test_the_speed_is_that_of_each_second(speed):
    assert later(speed, 1.0, 30) == [30]
    assert later(speed, 1.0, 0) == [30, 0]
    assert later(speed, 1.25, 50) == [30, 0, 40]  # a timer that came late


def test_readings_that_come_too_soon_count_with_the_next(speed):
    assert later(speed, 0.5, 30) == []
    assert later(speed, 0.5, 10) == [40]


def test_a_while_in_which_nobody_read_is_filled_with_its_mean(speed):
    assert later(speed, 4.0, 100) == [25] * 4
    assert later(speed, 5000.0, 5000) == [1] * SECONDS


def test_an_engine_whose_parts_were_exchanged_has_no_negative_speed(speed):
    assert later(speed, 1.0, -40) == [0]
    assert later(speed, 1.0, 7) == [0, 7]


def test_the_server_reads_the_speed_while_nobody_looks(llm):
    with serve(llm) as server:
        llm.generate("x", SamplingParams(max_tokens=40))
        time.sleep(3.2)
        rates = watch(server)["tokens_per_second"]
    assert len(rates) >= 2 and max(rates) > 0
    assert rates[-1] == 0  # one mean over the whole time would not be


def test_an_app_that_is_mounted_in_another_shows_the_speed_too(llm):
    outer = fastapi.FastAPI()
    outer.mount("/llm", create_app(llm))  # its lifespan does not run there
    with TestClient(outer) as client:
        llm.generate("x", SamplingParams(max_tokens=40))
        time.sleep(1.1)
        assert max(client.get("/llm/watch").json()["tokens_per_second"]) > 0
        assert client.get("/llm/").text.startswith("<!doctype html>")
