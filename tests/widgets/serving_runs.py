"""Runs for the serving figures: a plain loop around a scheduler that ends after so many steps; wrong schedulers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmfromscratch import SamplingParams, scheduler, simulation, steps
from llmfromscratch.scheduler import Request
from llmfromscratch.simulation import Run, SimulatedCache, Workload


def play(make: Callable, requests: list[Request], most: int = 300, num_blocks: int = 512) -> Run:
    """As `simulation.simulate`, which refuses schedulers that come to no end; this one stops there."""
    cache = SimulatedCache(num_blocks)
    planner = make(cache)
    now, records, arriving = 0.0, [], sorted(requests, key=lambda request: request.arrival)
    while (arriving or planner.waiting or planner.running) and len(records) < most:
        while arriving and arriving[0].arrival <= now:
            planner.add(arriving.pop(0))
        plan, record = steps.plan_step(planner, cache, now)
        if not plan and not arriving:
            break
        if not plan:
            now = arriving[0].arrival
            continue
        now += 0.03 + 0.002 * sum(work.tokens + work.padding for work in plan)
        for work in plan:
            cache.advance(work.request.request_id, work.tokens)
        for work in plan:
            if work.completes:
                work.request.record(0, now)
                if len(work.request.token_ids) == work.request.params.max_tokens:
                    planner.finish(work.request, "length")
        records.append(record.ended(now))
    return Run(requests, records)


def workload(count: int = 12, seed: int = 4, **changes) -> list[Request]:
    """Short requests that come quickly."""
    settings = {"rate": 3.0, "prompt_tokens": (16, 200), "output_tokens": (8, 60), **changes}
    return Workload(count, seed=seed, **settings).requests()


def asked(number: int, prompt: int, answer: int, arrival: float = 0.0, priority: int = 0) -> Request:
    """One request."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True, priority=priority)
    return Request(number, [1] * prompt, params, arrival=arrival)


def static(cache, places: int = 6):
    """The right static scheduler."""
    return scheduler.StaticScheduler(cache, places)


def continuous(cache, places: int = 6, budget: int = 512):
    """The right continuous scheduler."""
    return scheduler.ContinuousScheduler(cache, places, budget)


class KeepsPlaces(scheduler.ContinuousScheduler):
    """Who has ended keeps place and memory."""

    def finish(self, request, reason):
        request.end(reason)


class Starving(scheduler.ContinuousScheduler):
    """Never begins requests 3 and 5."""

    def schedule(self, now):
        held = [request for request in self.waiting if request.request_id in (3, 5)]
        self.waiting = [request for request in self.waiting if request not in held]
        plan = super().schedule(now)
        self.waiting += held
        return plan


class StaysInTheQueue(scheduler.ContinuousScheduler):
    """Request 4 is begun and waits on."""

    def schedule(self, now):
        before = list(self.running)
        plan = super().schedule(now)
        self.waiting += [request for request in self.running if request.request_id == 4 and request not in before]
        return plan


class LosesAToken(scheduler.ContinuousScheduler):
    """Who was preempted is computed again from its second token on."""

    def schedule(self, now):
        plan = super().schedule(now)
        for place, work in enumerate(plan):
            if work.request.preemptions and work.start == 0:
                self.cache.lengths[work.request.request_id] = 1
                plan[place] = replace(work, start=1, tokens=work.tokens - 1)
        return plan


def simulated(make: Callable, requests: list[Request], **settings) -> Run:
    """The package's own simulation."""
    return simulation.simulate(make, requests, **settings)
