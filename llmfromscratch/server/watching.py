"""What the page watches: one picture of the engine as JSON, read without holding up its steps.

It holds numbers only. Prompts and answers belong to the clients that sent them, and are no part of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter

from llmfromscratch import scheduler
from llmfromscratch.engine import LLM

SECONDS = 60  # the past that the line of tokens per second shows
_LISTED = 64  # requests of which the numbers are given; the rest is counted


class Speedometer:
    """Tokens generated in each of the last seconds, whoever asked for them."""

    def __init__(self, llm: LLM, clock: Callable[[], float] = time.perf_counter):
        self.llm, self.clock = llm, clock
        self.rates: deque[float] = deque(maxlen=SECONDS)  # tokens per second, the oldest first
        self._then, self._tokens = clock(), llm.metrics.tokens

    def read(self) -> None:
        """Adds the rate since the last reading, once for each second between; nothing before a second has passed.

        An engine whose parts were exchanged counts from 0 again.
        """
        now, tokens = self.clock(), self.llm.metrics.tokens
        passed = now - self._then
        if passed < 0.99:  # a timer may be a little early
            return
        rate = max(0, tokens - self._tokens) / passed
        self.rates.extend([rate] * min(SECONDS, round(passed)))
        self._then, self._tokens = now, tokens

    async def run(self) -> None:
        """Reads once a second until it is cancelled."""
        while True:
            await asyncio.sleep(1)
            self.read()


def watch_router(llm: LLM) -> APIRouter:
    """GET /watch: a snapshot. The speed is also read while nobody looks, as long as the app is up (its lifespan)."""
    speed = Speedometer(llm)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        reading = asyncio.create_task(speed.run())
        yield
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    router = APIRouter(lifespan=lifespan)

    @router.get("/watch", summary="The engine as it stands: requests, blocks, tokens per second")
    async def watch() -> dict[str, Any]:
        """Numbers for whoever wants to see the engine at work; the page at / draws them."""
        speed.read()  # an app that is mounted in another one has no lifespan of its own
        return snapshot(llm, speed)

    return router


def snapshot(llm: LLM, speed: Speedometer) -> dict[str, Any]:
    """The engine as it stands.

    requests: those that run, the oldest first, then those that wait, in the order of the queue (as `request_numbers`),
    the first 64 of them; unlisted: how many more there are. blocks: as `block_numbers`.
    tokens_per_second: one number for each second past, the oldest first, at most 60. totals: since the engine was made.
    No lock is taken, which a long step would hold for its whole length: a request may be seen a step too early.
    """
    core = llm.core
    running = sorted(core.scheduler.running, key=lambda request: request.request_id)
    requests = [*running, *core.scheduler.waiting]
    metrics = core.metrics
    totals = ("tokens", "finished", "aborted", "preemptions", "prefix_hits", "steps")
    return {
        "running": len(running),
        "waiting": len(requests) - len(running),
        "requests": [request_numbers(request, core.cache, core.clock()) for request in requests[:_LISTED]],
        "unlisted": max(0, len(requests) - _LISTED),
        "blocks": block_numbers(core.cache),
        "tokens_per_second": [round(rate, 2) for rate in speed.rates],
        "totals": {name: getattr(metrics, name) for name in totals},
    }


def request_numbers(request: scheduler.Request, cache: Any, now: float) -> dict[str, Any]:
    """One request. computed_tokens: of prompt and answer, those that are in the cache; seconds: since it arrived."""
    return {
        "id": request.request_id,
        "state": request.state.value,
        "prompt_tokens": len(request.prompt_token_ids),
        "computed_tokens": cache.length(request.request_id),
        "tokens": len(request.token_ids),
        "max_tokens": request.params.max_tokens,
        "priority": request.params.priority,
        "preemptions": request.preemptions,
        "seconds": round(max(0.0, now - request.arrival), 3),
    }


def block_numbers(cache: Any) -> dict[str, int] | None:
    """Blocks of a paged cache; None for one that has none.

    held: requests read and write them. kept: nobody holds them, but a prompt that begins alike will find them.
    """
    allocator = getattr(cache, "allocator", None)
    if allocator is None:
        return None
    total, kept = len(allocator.ref_counts), len(allocator.kept)
    # the number available is free + kept, and the two may move between the looks: no part may fall below 0
    held = max(0, total - allocator.num_available)
    return {"total": total, "held": held, "kept": min(kept, total - held), "size": cache.block_size}
