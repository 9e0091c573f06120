"""Many consumers over one engine: each gets its own answer, whoever else comes, reads slowly, or goes away."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from tiny_models import save_tiny

import llmfromscratch
from llmfromscratch import LLM, AsyncEngine, Request, SamplingParams, sampling
from llmfromscratch.errors import RequestError

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LLM:
    return LLM(save_tiny(tmp_path_factory.mktemp("tiny")), dtype="float64", device="cpu", max_requests=8)


@pytest.fixture
def llm(loaded) -> LLM:
    """The tiny model; afterwards nothing is in flight, no block is held, and no thread is left."""
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    loaded.use_scheduler(max_requests=8)
    loaded.sampler = sampling.Sampler()
    yield loaded
    assert not set(threading.enumerate()) - before
    nothing_left(loaded)


def nothing_left(llm: LLM) -> None:
    llm.cache.audit()
    assert llm.cache.block_tables == {}
    assert not llm.core.has_work


class Slow(sampling.Sampler):
    """A sampler that gives the event loop time between steps."""

    def sample(self, logits, rows):
        threading.Event().wait(0.002)
        return super().sample(logits, rows)


async def collect(stream) -> list:
    return [piece async for piece in stream]


async def until(true, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.001)


# ---- serving -----------------------------------------------------------------------------------------------------


def test_many_consumers_at_once_each_get_what_they_would_get_alone(llm):
    prompts = [f"Question number {number}" for number in range(20)]
    each = [
        SamplingParams(max_tokens=3 + number % 7, temperature=number % 2, seed=number, ignore_eos=True)
        for number in range(20)
    ]
    alone = [llm.generate(prompt, params)[0] for prompt, params in zip(prompts, each, strict=True)]

    async def serve():
        async with AsyncEngine(llm) as engine:
            streams = [collect(engine.stream(p, s)) for p, s in zip(prompts[::2], each[::2], strict=True)]
            answers = [engine.generate(p, s) for p, s in zip(prompts[1::2], each[1::2], strict=True)]
            return await asyncio.gather(*streams), await asyncio.gather(*answers)

    streamed, answered = asyncio.run(serve())
    assert answered == alone[1::2]
    for pieces, answer in zip(streamed, alone[::2], strict=True):
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [answer.finish_reason]


def test_they_are_served_side_by_side_and_not_one_after_another(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            await asyncio.gather(*[engine.generate("x", LONG) for _ in range(8)])

    asyncio.run(serve())
    assert llm.metrics.steps < 2 * LONG.max_tokens
    assert llm.metrics.batch_occupancy > 4


def test_a_request_that_comes_while_others_run_is_done_before_them(llm):
    llm.sampler = Slow()

    async def serve():
        ended = []

        async def ask(name, params):
            await engine.generate(name, params)
            ended.append(name)

        async with AsyncEngine(llm) as engine:
            first = asyncio.create_task(ask("long", LONG))
            await until(lambda: llm.metrics.steps > 3)
            await ask("short", SHORT)
            await first
        return ended

    assert asyncio.run(serve()) == ["short", "long"]


def test_a_slow_reader_stops_nobody_and_loses_nothing(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            slow = engine.stream("slow", LONG)
            pieces = [await anext(slow)]
            quick = await engine.generate("quick", LONG)  # nobody reads the slow one meanwhile
            await until(lambda: llm.metrics.finished == 2)
            return quick, pieces + [piece async for piece in slow]

    quick, pieces = asyncio.run(serve())
    assert quick == llm.generate("quick", LONG)[0]
    assert [token for piece in pieces for token in piece.token_ids] == llm.generate("slow", LONG)[0].token_ids


def test_an_answer_tells_what_it_went_through(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            return await engine.generate("x", SHORT)

    figures = asyncio.run(serve()).metrics
    assert figures.tokens == 6
    assert 0 <= figures.queue_time < figures.ttft < 10
    assert 0 < figures.tpot < 10


def test_wrong_prompts_are_refused_to_the_one_who_asks_and_at_once(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            with pytest.raises(RequestError, match="the prompt is empty"):
                engine.stream("")
            with pytest.raises(RequestError, match="the prompt holds 999"):
                await engine.generate([999])
            return await engine.generate("x", SHORT)

    assert asyncio.run(serve()).finish_reason == "length"


def test_the_llm_itself_may_be_used_meanwhile(llm):
    expected = llm.generate(["a", "b"], LONG)

    async def serve():
        async with AsyncEngine(llm) as engine:
            asked = asyncio.create_task(engine.generate("a", LONG))
            await asyncio.sleep(0)
            answer = llm.generate("b", LONG)[0]  # blocks this event loop, and the worker goes on
            return [await asked, answer]

    assert asyncio.run(serve()) == expected


def test_the_face_of_the_package_shows_the_engine_and_its_requests(llm):
    assert isinstance(llm.request("x"), Request)
    assert {"AsyncEngine", "Request"} <= set(llmfromscratch.__all__)


# ---- consumers that go away --------------------------------------------------------------------------------------


def test_a_consumer_that_is_cancelled_gives_its_blocks_back_and_the_others_go_on(llm):
    llm.sampler = Slow()

    async def serve():
        async with AsyncEngine(llm) as engine:
            other = asyncio.create_task(engine.generate("other", LONG))
            leaving = asyncio.create_task(engine.generate("leaving", LONG))
            await until(lambda: llm.metrics.running == 2)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            steps = llm.metrics.steps
            await until(lambda: llm.metrics.aborted == 1)
            assert llm.metrics.steps <= steps + 2
            assert len(llm.cache.block_tables) == 1
            return await other

    answer = asyncio.run(serve())
    llm.sampler = sampling.Sampler()
    assert answer == llm.generate("other", LONG)[0]


@pytest.mark.parametrize("way", ["break", "close", "drop"])
def test_a_stream_that_is_left_half_way_ends_its_request(llm, way):
    llm.sampler = Slow()

    async def serve():
        async with AsyncEngine(llm) as engine:
            stream = engine.stream("leaving", LONG)
            if way == "break":
                async for _ in stream:
                    break
            else:
                await anext(stream)
            if way == "close":
                await stream.aclose()
            del stream
            gc.collect()
            await until(lambda: llm.metrics.aborted == 1)
            assert llm.cache.block_tables == {}
            return await engine.generate("x", SHORT)

    assert asyncio.run(serve()).finish_reason == "length"


def test_a_request_may_be_cancelled_before_its_first_token(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            tasks = [asyncio.create_task(engine.generate("x" * 60, LONG)) for _ in range(30)]
            await asyncio.sleep(0)  # they have asked, and have nothing yet
            for task in tasks[:-1]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: llm.metrics.aborted == 29)
            return results

    results = asyncio.run(serve())
    assert [type(result) for result in results[:-1]] == [asyncio.CancelledError] * 29
    assert results[-1].finish_reason == "length"


def test_a_stream_that_nobody_begins_asks_for_nothing(llm):
    async def serve():
        async with AsyncEngine(llm) as engine:
            engine.stream("never read", LONG)
            await engine.generate("x", SHORT)

    asyncio.run(serve())
    assert llm.metrics.finished == 1


# ---- faults ------------------------------------------------------------------------------------------------------


class Failing(sampling.Sampler):
    """A sampler that fails for one request, from the n-th call on."""

    def __init__(self, error: BaseException, at: int):
        self.error, self.left, self.victim = error, at, None

    def sample(self, logits, rows):
        self.left -= 1
        if self.left == 0:
            self.victim = rows[0]
        if any(row is self.victim for row in rows):
            raise self.error
        return super().sample(logits, rows)


@pytest.mark.parametrize("error", [ValueError("no luck"), NotImplementedError("not yet written"), SystemExit(3)])
def test_an_error_in_the_worker_reaches_the_consumers_and_the_next_request_is_served(llm, error, caplog):
    llm.sampler = Failing(error, at=7)

    async def serve():
        async with AsyncEngine(llm) as engine:
            struck = await asyncio.gather(*[engine.generate("x", LONG) for _ in range(3)])
            return struck, await engine.generate("y", SHORT)

    struck, after = asyncio.run(serve())
    aborted = [answer for answer in struck if answer.finish_reason == "abort"]
    assert len(aborted) == (1 if isinstance(error, ValueError) else 3)
    assert all(type(error).__name__ in answer.error and str(error) in answer.error for answer in aborted)
    assert after.finish_reason == "length"
    assert str(error) in caplog.text


def test_tokens_that_are_no_text_end_their_own_request(llm, monkeypatch):
    own = llm.tokenizer.token_bytes
    bad = llm.generate("x", SHORT)[0].token_ids[2]
    good = llm.tokenizer.encode("y")[0]
    assert bad != good

    def broken(index):
        if index == bad:
            raise KeyError("no such token")
        return own(index)

    class Yes(sampling.Sampler):
        def sample(self, logits, rows):
            tokens = super().sample(logits, rows)
            return [good if row.params.priority else token for row, token in zip(rows, tokens, strict=True)]

    llm.sampler = Yes()
    monkeypatch.setattr(llm.tokenizer, "token_bytes", broken)

    async def serve():
        async with AsyncEngine(llm) as engine:
            steady = SamplingParams(max_tokens=20, ignore_eos=True, priority=1)
            return await asyncio.gather(engine.generate("x", LONG), engine.generate("yy", steady))

    first, second = asyncio.run(serve())
    assert (first.finish_reason, "no such token" in first.error) == ("abort", True)
    assert (second.text, second.finish_reason) == ("y" * 20, "length")


# ---- beginning and ending ----------------------------------------------------------------------------------------


def test_closing_ends_what_is_in_flight_and_says_so(llm):
    llm.sampler = Slow()

    async def serve():
        engine = AsyncEngine(llm)
        tasks = [asyncio.create_task(engine.generate("x", LONG)) for _ in range(12)]
        await until(lambda: llm.metrics.running == 8)
        await engine.close()
        nothing_left(llm)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(serve())
    assert {(answer.finish_reason, answer.error) for answer in answers} == {("abort", "the AsyncEngine was closed.")}


def test_closing_twice_or_unused_is_fine(llm):
    async def serve():
        engine = AsyncEngine(llm)
        await engine.close()
        await engine.close()
        engine.start()
        await engine.generate("x", SHORT)
        await asyncio.gather(engine.close(), engine.close())

    asyncio.run(serve())


def test_a_closed_engine_refuses_until_it_is_started_again(llm):
    async def serve():
        engine = AsyncEngine(llm)
        for _ in range(3):
            async with engine:
                assert (await engine.generate("x", SHORT)).finish_reason == "length"
            with pytest.raises(RequestError, match=r"closed; start\(\) it again"):
                await engine.generate("x", SHORT)

    asyncio.run(serve())


def test_it_is_not_started_while_it_is_closing(llm):
    llm.sampler = Slow()

    async def serve():
        engine = AsyncEngine(llm)
        task = asyncio.create_task(engine.generate("x", LONG))
        await until(lambda: llm.metrics.running == 1)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="is closing"):
            engine.start()
        await closing
        await task

    asyncio.run(serve())


def test_event_loops_one_after_the_other_and_side_by_side_are_served(llm):
    engine, answers = AsyncEngine(llm), {}
    expected = llm.generate("x", LONG)[0]

    def ask(number: int) -> None:
        answers[number] = asyncio.run(engine.generate("x", LONG))

    ask(0)
    ask(1)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(engine.close())
    assert answers == dict.fromkeys(range(6), expected)


def test_an_event_loop_that_ends_under_its_stream_ends_the_request(llm):
    llm.sampler = Slow()
    engine = AsyncEngine(llm)
    loop = asyncio.new_event_loop()
    stream = engine.stream("x", LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until(lambda: llm.metrics.aborted == 1))
    nothing_left(llm)
    asyncio.run(engine.close())
