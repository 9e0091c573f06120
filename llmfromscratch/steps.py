"""What happened in one step of an engine or of a simulation: the figures of a run and its metrics are made of these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmfromscratch import scheduler


class WorkRecord(NamedTuple):
    """One request's part in a step. phase: "prefill", "decode", or "idle" for a row that computes for nothing."""

    request_id: int
    phase: str
    tokens: int
    padding: int


@dataclass(frozen=True)
class StepRecord:
    """One step from `start` to `end`, seconds on the clock of the run.

    work: who computed what. waiting: who was left in the queue. preempted: who lost its memory in this step.
    blocks_used, blocks_total: blocks that are held while the step computes; 0 where the cache has none.
    scheduling_seconds: what planning took, by the wall clock; runs that are alike differ in it, so it is not compared.
    """

    start: float
    end: float
    work: tuple[WorkRecord, ...]
    waiting: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    blocks_used: int = 0
    blocks_total: int = 0
    scheduling_seconds: float = field(default=0.0, compare=False)

    def ended(self, now: float) -> StepRecord:
        """The same step, over at `now`."""
        return replace(self, end=now)


def plan_step(planner: scheduler.Scheduler, cache: object, now: float) -> tuple[list[scheduler.Work], StepRecord]:
    """Lets a scheduler plan its next step; the record ends at `now` until `StepRecord.ended` says otherwise."""
    before = list(planner.running)
    began = time.perf_counter()
    plan = planner.schedule(now)
    seconds = time.perf_counter() - began
    preempted = [request.request_id for request in before if request.state is scheduler.State.PREEMPTED]
    waiting = [request.request_id for request in planner.waiting]
    used, total = blocks_in_use(cache)
    return plan, StepRecord(
        now, now, work_records(plan), tuple(waiting), tuple(preempted), used, total, scheduling_seconds=seconds
    )


def work_records(plan: Sequence[scheduler.Work]) -> tuple[WorkRecord, ...]:
    """The plan as numbers. Call it before the step's tokens are recorded: they move requests to their next state."""
    return tuple(WorkRecord(work.request.request_id, _phase(work), work.tokens, work.padding) for work in plan)


def blocks_in_use(cache: object) -> tuple[int, int]:
    """Blocks that requests hold, and blocks in all; (0, 0) for a cache without blocks."""
    allocator = getattr(cache, "allocator", None)
    if allocator is None:
        return 0, 0
    total = len(allocator.ref_counts)
    return total - allocator.num_available, total


def _phase(work: scheduler.Work) -> str:
    if work.request.ended:
        return "idle"
    return "decode" if work.request.state is scheduler.State.DECODING else "prefill"
