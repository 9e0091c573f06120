"""The scheduler: which requests compute in the next step, and how many tokens of each.

    waiting ──admitted──▶ prefilling ──▶ decoding ──▶ finished
       ▲                      │              │
       └────── preempted ◀────┴──────────────┘          (and from anywhere: aborted)

A step is one forward pass over a ragged batch (`batch.Batch`). A scheduler plans it as a list of `Work`, the engine
computes it, and `finish` or `abort` tell the scheduler what has ended. It alone takes memory in the cache and gives it
back. It never looks at a clock: times come with requests and calls, so that a simulation and the engine plan alike.

Yu et al., "Orca", section 4 (iteration-level scheduling); Kwon et al., "PagedAttention", section 4.5 (preemption);
Agrawal et al., "Sarathi-Serve", section 4 (chunked prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmfromscratch import kv_cache
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.request import Request as Request
from llmfromscratch.request import State as State
from llmfromscratch.request import Work as Work
from llmfromscratch.request import check_limits, check_new, never_fits


class Scheduler(Protocol):
    """What the engine asks of a scheduler, and all that it asks."""

    waiting: list[Request]
    running: list[Request]

    def add(self, request: Request) -> None:
        """Takes a request in. Raises OutOfMemory for one that can never fit, ValueError for a number that is in use."""

    def schedule(self, now: float) -> list[Work]:
        """The next step; empty only if nothing is left to run. Who can never go on is aborted, with the reason."""

    def finish(self, request: Request, reason: str) -> None:
        """The request has its answer."""

    def abort(self, request: Request, error: str) -> None:
        """The request ends here, wherever it stands; what has ended already stays as it is."""


# ---- static batching ---------------------------------------------------------------------------------------------


def padded_step(rows: Sequence[Request], cache: kv_cache.KVCache) -> list[Work]:
    """One step of a static batch: for every row all that is not in the cache yet, padded to the longest of them.

    A row's work begins at its length in the cache, and what a request has to compute are the tokens behind that: its
    whole prompt in the first step, one token in every later one. A row that has ended stays in the rectangle: it has 0
    tokens to compute, and padding like the others. Without rows there is no work.
    """
    starts = [cache.length(row.request_id) for row in rows]
    todo = [0 if row.ended else row.length - start for row, start in zip(rows, starts, strict=True)]
    width = max(todo, default=0)
    return [Work(row, start, new, width - new) for row, start, new in zip(rows, starts, todo, strict=True)]


class StaticScheduler:
    """Static batching: collect requests, run them together until the last has ended, then collect again.

    Prompts are padded to the longest of the batch, and a row that has ended computes for nothing until all have:
    `padding_tokens` and `idle_tokens` count that waste beside `useful_tokens`. Memory for the longest possible answer
    is held from the beginning. bucket: a batch is made of the prompts that are most like the oldest one in length.
    """

    def __init__(self, cache: kv_cache.KVCache, max_requests: int = 32, bucket: bool = False):
        check_limits(max_requests)
        self.cache, self.max_requests, self.bucket = cache, max_requests, bucket
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.useful_tokens = self.padding_tokens = self.idle_tokens = 0

    def add(self, request: Request) -> None:
        """Takes a request in. Raises OutOfMemory for one whose longest answer could not be held."""
        check_new(request, [*self.waiting, *self.running], self._most(request), self.cache.capacity)
        self.waiting.append(request)

    def schedule(self, now: float) -> list[Work]:
        """The prompts of a new batch, padded to the longest of them; in later steps one token of every row."""
        if not self.running:
            self._collect(now)
        plan = padded_step(self.running, self.cache)
        # who forgets padding gives back the memory behind it as well
        self._hold(self.running, max((work.tokens + work.padding for work in plan), default=0))
        return self._count(plan)

    def _collect(self, now: float) -> None:
        """Moves requests from the queue into the batch, as many as there are places and memory for.

        In the order of the queue, or with `bucket` the nearest in length of prompt to the first in the queue, which so
        is always among them. Whoever is left over keeps its place.
        """
        candidates = list(self.waiting)
        if self.bucket and candidates:
            oldest = len(candidates[0].prompt_token_ids)
            candidates.sort(key=lambda request: abs(len(request.prompt_token_ids) - oldest))
        for request in candidates:
            if len(self.running) == self.max_requests or not self._join(request, now):
                return

    def _join(self, request: Request, now: float) -> bool:
        """Takes a waiting request into the batch; False if the cache cannot hold them all."""
        batch = [*self.running, request]
        try:
            self._hold(batch, max(len(row.prompt_token_ids) for row in batch))
        except OutOfMemory as error:
            if self.running:
                return False
            self.abort(request, str(error))  # what keeps it out is none of ours and may stay for ever
            return True
        self.waiting.remove(request)
        self.running.append(request)
        request.begin(now)
        return True

    def _hold(self, batch: list[Request], width: int) -> None:
        """Reserves every row's longest answer, and at least `width` tokens for the next step."""
        for request in batch:
            left = self._most(request) - self.cache.length(request.request_id)
            self.cache.reserve(request.request_id, max(width, left))

    def _most(self, request: Request) -> int:
        return len(request.prompt_token_ids) + request.params.max_tokens

    def _count(self, plan: list[Work]) -> list[Work]:
        self.useful_tokens += sum(work.tokens for work in plan)
        self.padding_tokens += sum(work.padding for work in plan if not work.request.ended)
        self.idle_tokens += sum(work.padding for work in plan if work.request.ended)
        return plan

    def finish(self, request: Request, reason: str) -> None:
        """The request has its answer; its row stays occupied until the whole batch has ended."""
        self._end(request, reason)

    def abort(self, request: Request, error: str) -> None:
        """The request ends here; one that is computing keeps its row until the whole batch has ended."""
        self._end(request, "abort", error)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        if not request.ended:
            request.end(reason, error)
            if request in self.waiting:
                self.waiting.remove(request)
        # also for one that had ended before: whatever interrupted the releases then, they are made up for now
        if all(row.ended for row in self.running):
            for row in self.running:
                self.cache.release(row.request_id)
            self.running = []


# ---- who goes first ----------------------------------------------------------------------------------------------


class Policy(Protocol):
    """The order in which waiting requests are admitted: the smallest key first, and of equal ones the smaller id.

    Keys are seconds on the clock of arrivals. What sets a request back must be bounded, or small requests would starve
    large ones for ever.
    """

    @property
    def ageing(self) -> float:
        """The seconds of waiting that one level of priority is worth; finite."""

    def key(self, request: Request) -> float:
        """Where the request stands in the queue."""


@dataclass(frozen=True)
class FirstComeFirstServed:
    """In the order of arrival, one level of priority being worth `ageing` seconds of waiting.

    A request of priority 1 goes before those of priority 0 that came less than `ageing` seconds before it. Older ones
    go first, whatever their priority: they have aged. So no queue starves, and the order of two requests never changes.
    """

    ageing: float = 10.0

    def key(self, request: Request) -> float:
        """The time of arrival in seconds, moved by `ageing` for each level of priority. The smallest key goes first."""
        return request.arrival - request.params.priority * self.ageing


@dataclass(frozen=True)
class ShortestFirst:
    """Little work first: each token of prompt and answer sets a request back by `seconds_per_token`."""

    seconds_per_token: float = 0.05
    ageing: float = 10.0

    def key(self, request: Request) -> float:
        """The time of arrival, later by the work it may cause, earlier for its priority."""
        tokens = len(request.prompt_token_ids) + request.params.max_tokens
        return request.arrival + tokens * self.seconds_per_token - request.params.priority * self.ageing


@dataclass(frozen=True)
class LongestPrefixMatch:
    """What the cache holds first, before it is evicted: each token found counts like `seconds_per_token` of waiting."""

    cache: kv_cache.KVCache
    seconds_per_token: float = 0.01
    ageing: float = 10.0

    def key(self, request: Request) -> float:
        """The time of arrival, earlier by what need not be computed and for its priority."""
        found = self.cache.find_prefix(request.prompt_token_ids)
        return request.arrival - found * self.seconds_per_token - request.params.priority * self.ageing


# ---- continuous batching -----------------------------------------------------------------------------------------


def plan_next(planner: ContinuousScheduler, request: Request) -> None:
    """Plans the next tokens of a running request: all that are not in the cache yet, as far as the budget goes.

    Prompt and answer alike: who decodes has one such token, the newest. planner.cache.length says how many are stored.
    If there is room for them in the cache (`make_room`), the work goes into planner.plan, under the request's number,
    and its tokens are taken off planner.budget; if not, nothing is planned. Who gives way loses its part in the step,
    so planner.budget may be larger after make_room than before; the chunk is not made larger for that.
    """
    start = planner.cache.length(request.request_id)
    tokens = min(request.length - start, planner.budget)
    if make_room(planner, request, tokens):
        planner.plan[request.request_id] = Work(request, start, tokens)
        planner.budget -= tokens


def make_room(planner: ContinuousScheduler, request: Request, tokens: int) -> bool:
    """Reserves memory for more tokens of a running request; True if it has it.

    planner.cache.reserve takes the memory, or raises OutOfMemory and changes nothing. While there is too little, the
    last of planner.running in the order of planner.seniority (the largest) gives way: planner.preempt takes what it
    holds. One after the other, and no more than it takes. The last may be the request itself: it gives way like any
    other, and then the answer is False.
    """
    while True:
        try:
            planner.cache.reserve(request.request_id, tokens)
            return True
        except OutOfMemory:
            last = max(planner.running, key=planner.seniority)
            planner.preempt(last)
            if last is request:
                return False


def admit(planner: ContinuousScheduler, now: float) -> None:
    """Begins requests in the order of planner.waiting while there are places (max_requests), budget, and memory.

    What the cache holds of a text already (prompt and answer: one that was preempted has both) is taken over:
    planner.cache.match_prefix gives the number of tokens. Memory is reserved for all the rest of the text, also where
    the budget is enough for its first chunk only; nobody who runs gives way for it. Who has the memory begins:
    planner.begin(request, now, hits) moves it from the queue to those who run. Then it is planned (`plan_next`).
    The first that does not fit gives back what it took over (planner.cache.release), and nobody else begins: nobody
    overtakes, or a large request would wait for ever. now: seconds, for planner.begin.
    """
    while planner.waiting and planner.budget > 0 and len(planner.running) < planner.max_requests:
        request = planner.waiting[0]
        hits = planner.cache.match_prefix(request.request_id, request.ids)
        try:
            planner.cache.reserve(request.request_id, request.length - hits)
        except OutOfMemory:
            planner.cache.release(request.request_id)
            return
        planner.begin(request, now, hits)
        plan_next(planner, request)


class ContinuousScheduler:
    """Continuous batching: every step is planned anew, so a place that becomes free is taken in the next step.

    A step computes at most `max_batch_tokens` tokens: first one of every request that decodes, then chunks of prompts
    with what is left of the budget, so that a long prompt delays nobody for long. When the cache has no room left, the
    least important and youngest request is preempted: it gives everything back and is computed again later, in its old
    place in the queue. `policy` orders those who wait. A cache that keeps nothing needs a budget for whole texts.

    What make_room, plan_next and admit use of it, beside cache and max_requests:
    waiting, running: lists of requests; those who run are exactly those who hold memory, in no order.
    plan, budget: of the step that is being planned: {request id: Work}, and tokens that it may still compute.
    seniority(request): the smaller, the longer it keeps its memory. preempt(request) takes its memory and its part in
    the step, and puts it back into the queue. begin(request, now, hits): out of the queue, to those who run; hits:
    tokens that it took over from the cache.
    """

    def __init__(
        self,
        cache: kv_cache.KVCache,
        max_requests: int = 32,
        max_batch_tokens: int = 512,
        policy: Policy | None = None,
    ):
        check_limits(max_requests, max_batch_tokens)
        self.cache, self.max_requests, self.max_batch_tokens = cache, max_requests, max_batch_tokens
        self.policy: Policy = FirstComeFirstServed() if policy is None else policy
        self.elders: Policy = FirstComeFirstServed(self.policy.ageing)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # exactly those who hold memory
        self.plan: dict[int, Work] = {}  # of the step that is being planned, by request id
        self.budget = 0  # tokens that this step may still compute

    def add(self, request: Request) -> None:
        """Takes a request in. Raises OutOfMemory for one whose prompt could never be held."""
        known = [*self.waiting, *self.running]
        check_new(request, known, len(request.prompt_token_ids), self.cache.capacity)
        self.waiting.append(request)

    def schedule(self, now: float) -> list[Work]:
        """The next step: those who run, decoding first; then those who wait, unless somebody had to give way."""
        self.plan, self.budget = {}, self.max_batch_tokens
        self._end_outgrown()
        turns = sorted(self.running, key=self._turn)
        for request in turns:
            if request.state is not State.PREEMPTED and self.budget > 0:  # it may have given way to one before it
                plan_next(self, request)
        gave_way = any(request.state is State.PREEMPTED for request in turns)
        if not self.running or (not gave_way and self.budget > 0 and len(self.running) < self.max_requests):
            self.waiting.sort(key=self._place)
            admit(self, now)
            while self.waiting and not self.running:
                self._give_up(self.waiting[0])
                admit(self, now)
        return list(self.plan.values())

    def begin(self, request: Request, now: float, hits: int) -> None:
        """Moves a request from the queue to those who run; hits: tokens that it took over from the cache."""
        self.waiting.remove(request)
        self.running.append(request)
        request.begin(now, hits)

    def preempt(self, request: Request) -> None:
        """Takes a running request's memory and its part in the step; it waits again, in its old place."""
        self._remove(request)
        if work := self.plan.pop(request.request_id, None):
            self.budget += work.tokens
        request.state = State.PREEMPTED
        request.preemptions += 1
        self.waiting.append(request)  # the queue is put in order before the next admission

    def _end_outgrown(self) -> None:
        """Aborts who has outgrown the whole cache, before others give way to it for nothing."""
        for request in list(self.running):
            if reason := never_fits(request, request.length, self.cache.capacity):
                self.abort(request, reason)

    def _give_up(self, request: Request) -> None:
        """Aborts a request that does not fit although nothing runs: what is in its way is none of ours."""
        needed = f"request {request.request_id} needs room for {request.length} tokens"
        self.abort(request, f"{needed}, and the cache has not so much free, although nothing else runs.")

    def _place(self, request: Request) -> tuple[float, int]:
        return self.policy.key(request), request.request_id

    def seniority(self, request: Request) -> tuple[float, int]:
        """The order in which memory is kept: whatever the policy, the oldest of those who run never loses it."""
        return self.elders.key(request), request.request_id

    def _turn(self, request: Request) -> tuple[bool, float, int]:
        return request.state is State.PREFILLING, *self.seniority(request)

    def finish(self, request: Request, reason: str) -> None:
        """The request has its answer and gives back what it held."""
        self._end(request, reason)

    def abort(self, request: Request, error: str) -> None:
        """The request ends here, wherever it stands; one that has ended already stays as it is."""
        self._end(request, "abort", error)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        if not request.ended:
            self._remove(request)
            request.end(reason, error)

    def _remove(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)
