"""Runs of an engine or of a simulation as the serving figures read them, and their numbers in words.

The requests may come from a learner's scheduler: that they end, or have a clock that makes sense, is not taken for
granted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfromscratch.steps import StepRecord


@dataclass(frozen=True)
class ServingRun:
    """requests: with their clocks, in any state. steps: in the order of time. Times are seconds on one clock."""

    requests: Sequence[Any]
    steps: Sequence[StepRecord]

    @property
    def start(self) -> float:
        """When the first request arrived."""
        return min(request.arrival for request in self.requests)

    @property
    def end(self) -> float:
        """The end of the last step, or the last arrival if nothing was computed after it."""
        return max([*(record.end for record in self.steps[-1:]), *(request.arrival for request in self.requests)])

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, from the first arrival to the end of the last step."""
        return self.tokens / (self.end - self.start) if self.end > self.start else 0.0


def read_runs(runs: Any) -> dict[str, ServingRun]:
    """The runs by name. runs: name -> something with `requests` and `steps`, or a pair (requests, steps).

    A single run is taken too. Raises ValueError for no run at all, and for runs without a request.
    """
    named = dict(runs) if isinstance(runs, Mapping) else {"run": runs}
    if not named:
        raise ValueError("There is no run to draw; give at least one, as in {'continuous': simulate(...)}.")
    read = {str(name): _read(str(name), run) for name, run in named.items()}
    for name, run in read.items():
        if not run.requests:
            raise ValueError(f"The run {name!r} has no requests: there is nothing to draw.")
    return read


def _read(name: str, run: Any) -> ServingRun:
    if hasattr(run, "requests") and hasattr(run, "steps"):
        return ServingRun(list(run.requests), list(run.steps))
    try:
        requests, steps = run
    except (TypeError, ValueError):
        raise ValueError(
            f"The run {name!r} is a {type(run).__name__}; expected what `simulate` returns, or (requests, steps)."
        ) from None
    return ServingRun(list(requests), list(steps))


def percentile(values: Sequence[float], share: float, missing: int = 0) -> float:
    """The smallest of the values that `share` of them do not exceed (0.95: p95); nan without any.

    missing: so many more have no value, for what was waited for never came. They count as infinitely long.
    """
    ordered = sorted(values)
    rank = max(1, math.ceil(share * (len(ordered) + missing)))
    if not ordered and not missing:
        return math.nan
    return ordered[rank - 1] if rank <= len(ordered) else math.inf


def in_time(seconds: float) -> str:
    """A time in three digits: "12.3 s", "1.25 s", "850 ms", "0.42 ms"; "never" for infinity, "none" for nan."""
    if math.isnan(seconds) or math.isinf(seconds):
        return "none" if math.isnan(seconds) else "never"
    value, unit = (seconds, "s") if abs(seconds) >= 0.9995 or seconds == 0 else (1000 * seconds, "ms")
    digits = 0 if abs(value) >= 99.95 or value == 0 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def numbers(ids: Iterable[int], most: int = 8) -> str:
    """Numbers of requests in words: "request 3", "requests 3, 5 and 8", "requests 0, 1, ... and 12 more"."""
    found = [str(number) for number in ids]
    if len(found) > most:
        return f"requests {', '.join(found[:most])} and {len(found) - most} more"
    head, last = ", ".join(found[:-1]), found[-1]
    return f"requests {head} and {last}" if head else f"request {last}"
