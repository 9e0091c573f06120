"""The figures of a request and of an engine are what their definitions say."""

from __future__ import annotations

import pytest

from llmfromscratch import SamplingParams
from llmfromscratch.metrics import EngineMetrics, RequestMetrics
from llmfromscratch.scheduler import Request
from llmfromscratch.steps import StepRecord, WorkRecord


def request(**changes) -> Request:
    fresh = Request(0, [5, 6, 7], SamplingParams(), arrival=10.0)
    for name, value in changes.items():
        setattr(fresh, name, value)
    return fresh


def test_times_are_counted_from_the_arrival_and_between_tokens():
    served = request(first_scheduled=12.0, preemptions=2, prefix_hits=16)
    for token, now in ((7, 13.0), (8, 14.0), (9, 18.0)):
        served.record(token, now)
    assert RequestMetrics.of(served) == RequestMetrics(
        queue_time=2.0, ttft=3.0, tpot=2.5, tokens=3, preemptions=2, prefix_hits=16
    )


def test_what_has_not_happened_has_no_time():
    assert RequestMetrics.of(request()) == RequestMetrics(None, None, None, 0, 0, 0)
    one = request(first_scheduled=10.5)
    one.record(7, 11.0)
    assert RequestMetrics.of(one) == RequestMetrics(0.5, 1.0, None, 1, 0, 0)


def step(start: float, end: float, *phases: str, preempted: tuple[int, ...] = ()) -> StepRecord:
    work = tuple(WorkRecord(number, phase, 1, 0) for number, phase in enumerate(phases))
    return StepRecord(start, end, work, preempted=preempted, scheduling_seconds=0.25)


def test_an_engines_figures_are_sums_over_its_steps_and_requests():
    figures = EngineMetrics()
    assert (figures.batch_occupancy, figures.tokens_per_second) == (0.0, 0.0)
    figures.count_step(step(0.0, 2.0, "prefill", "prefill", "decode"), tokens=2)
    figures.count_step(step(5.0, 7.0, "decode", "idle", preempted=(4, 5)), tokens=1)
    assert (figures.steps, figures.tokens, figures.busy_seconds) == (2, 3, 4.0)
    assert (figures.scheduling_seconds, figures.preemptions) == (0.5, 2)
    assert figures.batch_occupancy == 2.0  # three, then one: a row that only pads is of no use
    assert figures.tokens_per_second == pytest.approx(0.75)
    for reason in ("stop", "length", "abort", "stop"):
        figures.count_end(request(finish_reason=reason, prefix_hits=4))
    assert (figures.finished, figures.aborted, figures.prefix_hits) == (3, 1, 16)
