"""Schedulers without a model: a thousand requests in about a second, to see what a policy does before paying for it.

The schedulers are the engine's own. What is imitated is what surrounds them: a cache that only counts blocks, a clock
that moves by what a step is reckoned to cost, and requests that arrive at random and say how long their answers will
be. The same seed gives the same run.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfromscratch import kv_cache, sampling, scheduler, steps
from llmfromscratch.errors import OutOfMemory


class SimulatedCache:
    """A paged cache without keys and values: blocks are handed out and counted, nothing is stored or shared.

    It has what schedulers use of `kv_cache.KVCache`, and `advance` in the place of the model's writes.
    """

    def __init__(self, num_blocks: int, block_size: int = 16):
        self.block_size = block_size
        self.capacity = num_blocks * block_size
        self.allocator = kv_cache.BlockAllocator(num_blocks)
        self.block_tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def length(self, request_id: int) -> int:
        """Tokens computed so far."""
        return self.lengths.get(request_id, 0)

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Nothing is shared."""
        return 0

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """Nothing is found."""
        return 0

    def reserve(self, request_id: int, tokens: int) -> None:
        """Blocks for `tokens` more. Raises OutOfMemory, changing nothing, when they are lacking."""
        table = self.block_tables.get(request_id, [])
        needed = math.ceil((self.length(request_id) + tokens) / self.block_size) - len(table)
        if needed > self.allocator.num_available:
            raise OutOfMemory(
                f"request {request_id} needs {needed} more blocks of {self.block_size} tokens; "
                f"{self.allocator.num_available} of {len(self.allocator.ref_counts)} are free."
            )
        table += [self.allocator.allocate() for _ in range(needed)]
        self.block_tables[request_id] = table

    def advance(self, request_id: int, tokens: int) -> None:
        """Notes that a step has computed `tokens` more. Raises ValueError for tokens without a place to lie."""
        length = self.length(request_id) + tokens
        room = len(self.block_tables.get(request_id, [])) * self.block_size
        if length > room:
            raise ValueError(f"request {request_id} computes its token {length}, and has reserved room for {room}.")
        self.lengths[request_id] = length

    def release(self, request_id: int) -> None:
        """Gives all blocks back; unknown requests are ignored."""
        for block in self.block_tables.pop(request_id, []):
            self.allocator.release(block)
        self.lengths.pop(request_id, None)

    def audit(self) -> None:
        """Raises RuntimeError unless every block is either free or held by exactly one request."""
        held = [block for table in self.block_tables.values() for block in table]
        if sorted([*held, *self.allocator.free]) != list(range(len(self.allocator.ref_counts))):
            raise RuntimeError(f"held {sorted(held)} + free {sorted(self.allocator.free)} is not all blocks")


@dataclass(frozen=True)
class CostModel:
    """What a step takes, in seconds: fixed + per_token x tokens computed + per_context x tokens looked back at.

    A step reads all weights, however few tokens it computes: that is the fixed part, and why batches pay. The defaults
    have the proportions of a small model on a laptop's processor; `fit` takes them from a run that was measured.
    """

    fixed: float = 0.03
    per_token: float = 0.002
    per_context: float = 0.0

    @classmethod
    def fit(cls, records: Sequence[steps.StepRecord]) -> CostModel:
        """The straight line nearest to measured steps, by least squares. They must differ in their tokens."""
        tokens = [sum(work.tokens + work.padding for work in record.work) for record in records]
        line = statistics.linear_regression(tokens, [record.end - record.start for record in records])
        return cls(max(0.0, line.intercept), max(0.0, line.slope))

    def seconds(self, plan: Sequence[scheduler.Work]) -> float:
        """What a planned step will take; padding costs what other tokens cost."""
        widths = [(work.start, work.tokens + work.padding) for work in plan]
        tokens = sum(width for _, width in widths)
        context = sum(width * start + width * (width + 1) // 2 for start, width in widths) if self.per_context else 0
        return self.fixed + self.per_token * tokens + self.per_context * context


@dataclass(frozen=True)
class Workload:
    """Requests at random, the same for the same seed. Arrivals are a Poisson process of `rate` requests a second.

    Lengths lie between two bounds, both included, spread evenly over the orders of magnitude: many short, few long.
    priorities: one is drawn for each request. vocab_size: of the token ids in the prompts.
    """

    count: int = 1000
    rate: float = 2.0
    prompt_tokens: tuple[int, int] = (16, 512)
    output_tokens: tuple[int, int] = (8, 256)
    priorities: tuple[int, ...] = (0,)
    vocab_size: int = 256
    seed: int = 0

    def requests(self) -> list[scheduler.Request]:
        """New requests, numbered in the order of arrival; each goes on to the end of its max_tokens."""
        draw = random.Random(self.seed)
        now, found = 0.0, []
        for number in range(self.count):
            now += draw.expovariate(self.rate)
            prompt = draw.choices(range(self.vocab_size), k=_length(draw, *self.prompt_tokens))
            params = sampling.SamplingParams(
                max_tokens=_length(draw, *self.output_tokens),
                ignore_eos=True,
                priority=draw.choice(self.priorities),
            )
            found.append(scheduler.Request(number, prompt, params, arrival=now))
        return found


def _length(draw: random.Random, shortest: int, longest: int) -> int:
    return min(longest, int(math.exp(draw.uniform(math.log(shortest), math.log(longest + 1)))))


@dataclass(frozen=True)
class Run:
    """What came of a simulation: the requests with their clocks, and every step."""

    requests: list[scheduler.Request]
    steps: list[steps.StepRecord]

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last step."""
        return self.steps[-1].end - min(request.arrival for request in self.requests) if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests per second of the run."""
        return sum(len(request.token_ids) for request in self.requests) / self.seconds if self.steps else 0.0

    def ttft(self, share: float) -> float:
        """The time to first token in seconds that `share` of the requests that got one did not exceed (0.95: p95)."""
        times = sorted(request.ttft for request in self.requests if request.ttft is not None)
        return times[max(0, math.ceil(share * len(times)) - 1)] if times else math.nan


def simulate(
    make_scheduler: Callable[[Any], scheduler.Scheduler],
    requests: Sequence[scheduler.Request],
    cost: CostModel | None = None,
    num_blocks: int = 512,
    block_size: int = 16,
    max_steps: int = 1_000_000,
) -> Run:
    """Runs new requests through the scheduler that `make_scheduler` gives for a cache, until all have ended.

    Every step that reaches the end of a text gives a token (id 0), and a request has its answer after max_tokens.
    Raises RuntimeError for a scheduler that plans nothing while there is work, or has not ended after `max_steps`.
    """
    cost = CostModel() if cost is None else cost
    cache = SimulatedCache(num_blocks, block_size)
    planner = make_scheduler(cache)
    arriving = deque(sorted(requests, key=lambda request: request.arrival))
    now = 0.0
    records: list[steps.StepRecord] = []
    while arriving or planner.waiting or planner.running:
        if not planner.waiting and not planner.running:
            now = max(now, arriving[0].arrival)
        while arriving and arriving[0].arrival <= now:
            _add(planner, arriving.popleft())
        plan, record = steps.plan_step(planner, cache, now)
        now += cost.seconds(plan) if plan else 0.0
        _compute(planner, cache, plan, now)
        if plan:
            if records and records[-1].waiting == record.waiting:  # as a rule: one tuple serves both, and memory lasts
                record = replace(record, waiting=records[-1].waiting)
            records.append(record.ended(now))
        elif planner.waiting or planner.running:
            raise RuntimeError(
                f"the scheduler plans nothing, and {len(planner.waiting)} requests wait, {len(planner.running)} run."
            )
        if len(records) > max_steps:
            raise RuntimeError(f"after {max_steps} steps {len(planner.waiting) + len(planner.running)} have not ended.")
    return Run(list(requests), records)


def _add(planner: scheduler.Scheduler, request: scheduler.Request) -> None:
    try:
        planner.add(request)
    except OutOfMemory as error:  # it alone ends, as in the engine
        planner.abort(request, str(error))


def _compute(planner: scheduler.Scheduler, cache: SimulatedCache, plan: Sequence[scheduler.Work], now: float) -> None:
    for work in plan:
        cache.advance(work.request.request_id, work.tokens)
    for work in plan:
        if work.completes:
            work.request.record(0, now)
            if len(work.request.token_ids) == work.request.params.max_tokens:
                planner.finish(work.request, "length")
