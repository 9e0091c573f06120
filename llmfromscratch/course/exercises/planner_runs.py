"""Whole runs of the engine's ContinuousScheduler with a learner's function in it, looked at after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from llmfromscratch.course.exercises.in_engine import in_engine
from llmfromscratch.course.exercises.serving_stage import (
    Endless,
    TextCache,
    about_names,
    answer,
    counted,
    new_request,
    next_token,
    prompt_of,
)
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.occasions import Occasion, keep_occasion

_MOST_STEPS = 400


@dataclass(frozen=True)
class Load:
    """Requests for a whole run: (arrival in steps, prompt, tokens asked for, priority) each, and what serves them."""

    text: str
    num_blocks: int
    rows: Sequence[tuple[int, int, int, int]]
    places: int = 4
    budget: int = 8
    shared: int = 0  # tokens at the front of every prompt that are the same

    def requests(self) -> list[Any]:
        """New ones, numbered from 0 on in the order of arrival."""
        found = []
        for number, (arrival, prompt, tokens, priority) in enumerate(sorted(self.rows)):
            ids = prompt_of(1000, self.shared)[:prompt] + prompt_of(number, prompt)[self.shared :]
            found.append(new_request(number, ids, tokens, float(arrival), priority))
        return found


def random_load(text: str, seed: int, count: int, num_blocks: int, **more: Any) -> Load:
    """Requests at random; no one alone needs more than the cache has."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, 10_000, (count, 4), generator=generator).tolist()
    most = num_blocks * 4
    rows = [(a % (2 * count), 1 + p % (most * 2 // 3), 1 + t % (most // 3), q % 3) for a, p, t, q in draws]
    return Load(text, num_blocks, rows, **more)


@dataclass
class Run:
    """A load under a ContinuousScheduler of MODULE, looked at after every step."""

    module: ModuleType
    load: Load
    cache: TextCache = field(init=False)
    planner: Any = field(init=False)

    def trouble(self) -> str:
        """What goes wrong, in a sentence; "" where nothing does."""
        load = self.load
        self.cache = TextCache(load.num_blocks)
        self.planner = self.module.ContinuousScheduler(self.cache, load.places, load.budget)
        requests = load.requests()
        arriving = list(requests)
        for step in range(_MOST_STEPS):
            while arriving and arriving[0].arrival <= step:
                self.planner.add(arriving.pop(0))
            if not (arriving or self.planner.waiting or self.planner.running):
                return self._left_behind(requests)
            if said := self._step(step):
                return f"step {step}: {said}"
        late = [request.request_id for request in requests if not request.ended]
        return f"after {_MOST_STEPS} steps requests {late} have not ended"

    def _step(self, step: int) -> str:
        planner, before = self.planner, list(self.planner.running)
        self.cache.refused, self.cache.granted = 0, (0, 0, 0)
        busy = bool(planner.waiting or planner.running)
        try:
            plan = planner.schedule(float(step))
        except Endless:
            return "somebody gives way, or memory is asked for, again and again without end"
        if said := self._broken_rule(plan, before, busy):
            return said
        for work in plan:
            request = work.request
            self.cache.write(request.request_id, work.start, request.ids[work.start : work.start + work.tokens])
        for work in [work for work in plan if work.completes]:
            work.request.record(next_token(self.cache.texts[work.request.request_id]), step + 1.0)
            if len(work.request.token_ids) == work.request.params.max_tokens:
                planner.finish(work.request, "length")
        return ""

    def _broken_rule(self, plan: Sequence[Any], before: Sequence[Any], busy: bool) -> str:
        planner, load = self.planner, self.load
        tokens = sum(work.tokens for work in plan)
        if busy and not plan:
            return "nothing is planned, although there is work"
        if tokens > load.budget:
            return f"the plan has {counted(tokens)}, and the budget is {load.budget}"
        if len(planner.running) > load.places:
            return f"{len(planner.running)} requests run, and there are {load.places} places"
        wrong = (self._wrong_work(work) for work in plan)
        return next(filter(None, wrong), "") or self._wrong_order(plan, before, load.budget - tokens)

    def _wrong_work(self, work: Any) -> str:
        number, end = work.request.request_id, work.start + work.tokens
        if work.request not in self.planner.running:
            return f"request {number} is planned, and does not run"
        if work.start != self.cache.length(number):
            return f"request {number} goes on at {work.start}, and {self.cache.length(number)} tokens of it are stored"
        if not 0 < work.tokens <= work.request.length - work.start:
            return f"request {number} computes {counted(work.tokens)}, and has {work.request.length - work.start} left"
        if end > self.cache.room(number):
            return f"request {number} computes up to token {end}, and has memory for {self.cache.room(number)}"
        return ""

    def _wrong_order(self, plan: Sequence[Any], before: Sequence[Any], left: int) -> str:
        planner = self.planner
        if before and min(before, key=planner.seniority) not in planner.running:
            return f"request {min(before, key=planner.seniority).request_id}, the oldest that runs, lost its memory"
        place = planner._place
        begun = max((request for request in planner.running if request not in before), key=place, default=None)
        first = min(planner.waiting, key=place, default=None)
        if begun and first and place(first) < place(begun):
            return f"request {begun.request_id} has begun, although request {first.request_id} stands before it"
        if any(request not in planner.running for request in before) or not left:
            return ""
        done = {work.request.request_id: work.start + work.tokens for work in plan}
        short = [r.request_id for r in planner.running if done.get(r.request_id) != r.length]
        if short:
            return f"request {short[0]} gets too little, although {left} tokens of the budget are left"
        return self._kept_waiting(first)

    def _kept_waiting(self, first: Any) -> str:
        if first is None or len(self.planner.running) >= self.load.places:
            return ""
        size = self.cache.block_size
        needed = -(-first.length // size) - self.cache.find_prefix(first.ids) // size
        fits = needed <= self.cache.free
        return f"request {first.request_id} waits, although there are a place, budget and memory" if fits else ""

    def _left_behind(self, requests: Sequence[Any]) -> str:
        for request in requests:
            number, want = request.request_id, answer(request.prompt_token_ids, request.params.max_tokens)
            if request.token_ids != want:
                return f"request {number} answers {request.token_ids}; alone it answers {want}"
        held = self.cache.held()
        return f"at the end memory is still held: {held}" if held else ""


def check_runs(name: str, own: Callable[..., Any]) -> None:
    """Whole runs of the engine's ContinuousScheduler with the learner's function in it."""
    expected = (
        f"a whole run of the engine's scheduler with your {name}: budget and places kept, nobody overtaken, each "
    )
    expected += "request with the answer it gets alone, and all memory back at the end"
    with in_engine("scheduler", name, own) as module:
        for load in _LOADS:
            try:
                said = Run(module, load).trouble()
            except BaseException as error:
                keep_occasion(error, Occasion(load.text, expected, meaning=about_names(error)))
                raise
            if said:
                raise CheckFailed(expected, case=f"{load.text}: {said}")


_LOADS = (
    Load("two requests one after the other in 4 blocks of 4", 4, ((0, 5, 3, 0), (0, 3, 2, 0)), places=1),
    Load("three prompts in chunks, 4 tokens a step", 40, ((0, 9, 3, 0), (0, 5, 4, 0), (1, 2, 6, 0)), budget=4),
    Load("two requests that outgrow 4 blocks of 4 together", 4, ((0, 6, 7, 0), (0, 6, 7, 0))),
    Load("a large request and small ones behind it, 5 blocks of 4", 5,
         ((0, 7, 6, 0), (0, 16, 2, 0), (1, 2, 2, 0), (2, 2, 2, 0), (3, 2, 2, 0))),
    Load("an important request that comes late, 6 blocks of 4", 6, ((0, 8, 8, 0), (1, 8, 8, 0), (3, 6, 6, 2))),
    Load("prompts that begin alike, 8 blocks of 4", 8, ((0, 10, 4, 0), (2, 12, 4, 0), (3, 11, 6, 0)), shared=8),
    random_load("20 requests at random, 7 blocks of 4", 1, 20, 7, budget=5),
    random_load("20 requests at random, 12 blocks of 4, 3 tokens a step", 2, 20, 12, places=6, budget=3),
    random_load("20 requests at random that begin alike, 9 blocks of 4", 3, 20, 9, shared=8, budget=9),
)  # fmt: skip
