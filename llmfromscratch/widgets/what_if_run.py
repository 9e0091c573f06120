"""A scheduler under a load: one simulation and what came of it, and how much the same scheduler could serve at most.

The most is measured with a queue that is never empty: all requests are there from the start, and what is counted is
how many were served until the last of them was begun. More load than that, and the queue grows for as long as it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfromscratch import scheduler, simulation
from llmfromscratch.simulation import CostModel, Workload
from llmfromscratch.widgets.serving_run import ServingRun, numbers, percentile

# names in the scheduler's module, where they are looked up when it runs, so that a built one counts
POLICIES = {"first come, first served": "FirstComeFirstServed", "shortest first": "ShortestFirst"}
NUM_BLOCKS = "num_blocks"


@dataclass(frozen=True)
class Question:
    """What is asked. make(cache, **settings) -> scheduler; a policy in the settings is a name of POLICIES.

    workload: the requests, with the load as its rate. cost: what a step takes. num_blocks: of the cache.
    """

    make: Callable[..., Any]
    settings: Mapping[str, Any]
    workload: Workload
    cost: CostModel
    num_blocks: int
    block_size: int = 16


@dataclass(frozen=True)
class Outcome:
    """What came of it. capacity: the most requests per second that could be served; nan if unknown.

    problem: why the simulation stopped before the end, or ""; then there are no steps.
    """

    question: Question
    run: ServingRun
    capacity: float
    problem: str = ""

    @property
    def load(self) -> float:
        """Requests per second that arrive."""
        return self.question.workload.rate

    @property
    def offered(self) -> float:
        """Those of them per second that were not refused at once."""
        return self.load * len(self._admitted()) / len(self.run.requests)

    @property
    def grows(self) -> bool:
        """Whether more arrives than can be served."""
        return self.offered > self.capacity

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token, or to the last arrival."""
        times = [request.last_token for request in self.run.requests if request.last_token is not None]
        return max([*times, self.run.end]) - self.run.start

    @property
    def last_arrival(self) -> float:
        """Seconds from the first arrival."""
        return max(request.arrival for request in self.run.requests) - self.run.start

    @property
    def finished(self) -> list[Any]:
        """The requests that have their answer."""
        return [request for request in self.run.requests if request.ended and request.finish_reason != "abort"]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.run.tokens / self.seconds if self.seconds else 0.0

    @property
    def preemptions(self) -> int:
        """Of all requests together."""
        return sum(request.preemptions for request in self.run.requests)

    def percentile(self, measure: str, share: float) -> float:
        """Of "ttft" or "tpot", in seconds; who has not ended and has none counts as infinitely long."""
        values = [getattr(request, measure) for request in self.run.requests]
        missing = sum(not request.ended and getattr(request, measure) is None for request in self.run.requests)
        return percentile([value for value in values if value is not None], share, missing)

    def percentile_of_gaps(self, share: float) -> float:
        """Of every request's longest time between two of its tokens, in seconds; nan if nobody has two."""
        return percentile(list(self.longest_gaps().values()), share)

    def longest_gaps(self) -> dict[int, float]:
        """Request number -> seconds that its user waited longest for a token after the first; who has two at least.

        From the steps, which alone know when every token came: a token comes when all that is known is in the cache.
        """
        lengths = {request.request_id: len(request.prompt_token_ids) for request in self.run.requests}
        stored, last, gaps = dict.fromkeys(lengths, 0), dict[int, float](), dict[int, float]()
        for record in self.run.steps:
            stored.update(dict.fromkeys(record.preempted, 0))
            for work in record.work:
                one = work.request_id
                stored[one] += work.tokens
                if not work.tokens or stored[one] != lengths[one]:
                    continue
                lengths[one] += 1
                if one in last:
                    gaps[one] = max(gaps.get(one, 0.0), record.end - last[one])
                last[one] = record.end
        return gaps

    def waiting(self) -> list[tuple[float, int]]:
        """(seconds, requests in the queue from then on): who has arrived and has not begun."""
        return _counted((request.arrival, _begun(request)) for request in self._admitted())

    def being_served(self) -> list[tuple[float, int]]:
        """(seconds, requests from then on): who has begun and has not ended. The preempted are among them."""
        spans = [(_begun(request), request.last_token if request.ended else None) for request in self._admitted()]
        return _counted((begun, end) for begun, end in spans if begun is not None)

    def mean_waiting(self) -> float:
        """The length of the queue until the last arrival, on average."""
        end = self.last_arrival + self.run.start
        waits = [min(end, _begun(request) or math.inf) - request.arrival for request in self._admitted()]
        return sum(waits) / self.last_arrival if self.last_arrival else 0.0

    def use_of_limits(self) -> dict[str, list[tuple[float, float, float]]]:
        """Limit -> (start, end, share in use) of every step. Only limits that this scheduler has."""
        start, settings = self.run.start, self.question.settings
        limits: dict[str, Callable[[Any], float]] = {}
        if most := settings.get("max_requests"):
            limits["places"] = lambda record: len(record.work) / most
        limits["blocks"] = lambda record: record.blocks_used / max(1, record.blocks_total)
        if budget := settings.get("max_batch_tokens"):
            limits["token budget"] = lambda record: sum(work.tokens + work.padding for work in record.work) / budget
        return {
            name: [(record.start - start, record.end - start, share(record)) for record in self.run.steps]
            for name, share in limits.items()
        }

    def use_while_waiting(self) -> dict[str, float]:
        """Limit -> mean share in use over the steps that leave somebody in the queue; empty if none does."""
        kept = [bool(record.waiting) for record in self.run.steps]
        means = {}
        for name, steps in self.use_of_limits().items():
            waited = [step for step, keep in zip(steps, kept, strict=True) if keep]
            seconds = sum(end - start for start, end, _ in waited)
            if seconds:
                means[name] = sum((end - start) * share for start, end, share in waited) / seconds
        return means

    def problems(self) -> list[str]:
        """What is wrong, as sentences."""
        found = [f"The simulation stopped: {self.problem}"] if self.problem else []
        left = [request.request_id for request in self.run.requests if not request.ended]
        if left:
            found.append(f"{len(left)} of {len(self.run.requests)} never end: {numbers(left)}.")
        aborted = [request for request in self.run.requests if request.finish_reason == "abort"]
        if aborted:
            found.append(
                f"{len(aborted)} of {len(self.run.requests)} are aborted: {numbers(r.request_id for r in aborted)}. "
                f"The first: {aborted[0].error}"
            )
        return found

    def _admitted(self) -> list[Any]:
        """All but those that were refused when they came."""
        return [request for request in self.run.requests if _begun(request) is not None or not request.ended]


def answer(question: Question, capacity: Callable[[Question], float]) -> Outcome:
    """Runs the workload, and asks for the capacity, as `find_capacity` knows it, if that came to its end."""
    run, problem = _simulate(question, question.workload.requests())
    return Outcome(question, run, math.nan if problem else capacity(question), problem)


def find_capacity(question: Question) -> float:
    """The most requests per second that can be served: how fast a queue goes down that holds all from the start.

    The load plays no part. nan where the simulation does not come to its end.
    """
    requests = [replace(request, arrival=0.0) for request in question.workload.requests()]
    run, problem = _simulate(question, requests)
    if problem:
        return math.nan
    until = max((record.end for record in run.steps if record.waiting), default=0.0)
    until = until or max((record.end for record in run.steps), default=0.0)
    return sum(_share_served(request, until) for request in requests) / until if until else math.nan


def _share_served(request: Any, until: float) -> float:
    """How much of the request's time between begin and end had passed."""
    begun, end = _begun(request), request.last_token
    if begun is None or end is None or request.finish_reason == "abort":
        return 0.0
    return min(1.0, max(0.0, (until - begun) / (end - begun))) if end > begun else float(until >= end)


def _begun(request: Any) -> float | None:
    return request.first_token if request.first_scheduled is None else request.first_scheduled


def _simulate(question: Question, requests: Sequence[Any]) -> tuple[ServingRun, str]:
    settings = dict(question.settings)
    if "policy" in settings:
        settings["policy"] = getattr(scheduler, POLICIES[settings["policy"]])()
    try:
        run = simulation.simulate(
            lambda cache: question.make(cache, **settings),
            requests,
            question.cost,
            question.num_blocks,
            question.block_size,
            max_steps=_enough_steps(requests, settings.get("max_batch_tokens", math.inf)),
        )
    except NotImplementedError:
        raise
    except RuntimeError as error:  # it stalls or never ends; what it did until then is in the requests
        return ServingRun(requests, []), str(error)
    return ServingRun(run.requests, run.steps), ""


def _enough_steps(requests: Sequence[Any], budget: float) -> int:
    """About what serving one request at a time takes: with more than that, nothing gets done."""
    chunks = sum(math.ceil(len(request.prompt_token_ids) / budget) for request in requests)
    return chunks + sum(request.params.max_tokens for request in requests) + 1000


def _counted(spans: Any) -> list[tuple[float, int]]:
    """How many of the spans (start, end or None) lie over each moment, as (moment, count from then on)."""
    changes: dict[float, int] = {}
    for start, end in spans:
        changes[start] = changes.get(start, 0) + 1
        if end is not None:
            changes[end] = changes.get(end, 0) - 1
    count, counts = 0, []
    for moment in sorted(changes):
        count += changes[moment]
        counts.append((moment, count))
    return counts
