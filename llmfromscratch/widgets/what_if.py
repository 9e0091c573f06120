"""What if more came, or there were less memory? A scheduler in a simulation, its limits and the load on sliders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llmfromscratch.simulation import CostModel, Workload
from llmfromscratch.widgets.controls import Choice, Control, Slider, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.serving_run import in_time
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    BLUE,
    GREY,
    NAVY,
    ORANGE,
    PALE,
    VERMILION,
    problem_space,
    write_problems,
)
from llmfromscratch.widgets.what_if_run import NUM_BLOCKS, POLICIES, Outcome, Question, answer, find_capacity

WORKLOAD = Workload(count=200, prompt_tokens=(16, 1024))  # with long ones, so that chunks matter
_LOOKS: dict[str, tuple[str, Any]] = {  # of the limits: colour and dashes
    "places": (BLUE, "solid"),
    "blocks": (ORANGE, (0, (6, 1.5))),
    "token budget": (NAVY, (0, (1.2, 1.2))),
}
_BINS = 90  # of the time axis, for shares that jump with every step
_WIDTH, _LEFT, _AXES = 10.0, 0.75, 7.35  # inches
_CARD_PLACES = (0.12, 1.8, 3.52, 5.42, 6.94, 8.3)
_CARDS, _REQUESTS, _LIMITS, _ABOVE, _BETWEEN, _BELOW = 0.78, 2.1, 1.2, 0.62, 0.2, 0.55


def what_if(
    make_scheduler: Callable[..., Any], workload: Workload = WORKLOAD, cost: CostModel | None = None
) -> FigureForm:
    """The simulation with its controls: the load, the blocks of the cache, and every limit that the scheduler has.

    make_scheduler(cache, ...): a scheduler's class, or a function that makes one. A slider is given to each of the
    arguments max_requests, max_batch_tokens, policy and bucket that it takes. workload: the requests; the load takes
    the place of its rate. cost: what a step takes.
    """
    controls = _controls(make_scheduler)
    cost = CostModel() if cost is None else cost
    start = {control.name: control.value for control in controls}
    find = _remembering(find_capacity, lambda question: (question.num_blocks, tuple(question.settings.items())), 100)

    def ask(state: dict[str, Any]) -> Outcome:
        settings = {name: value for name, value in state.items() if name not in ("load", NUM_BLOCKS)}
        load, blocks = state["load"], state[NUM_BLOCKS]
        return answer(Question(make_scheduler, settings, replace(workload, rate=load), cost, blocks), find)

    outcome_of = _remembering(ask, lambda state: tuple(sorted(state.items())), 4)

    def draw(**state: Any) -> Figure:
        return draw_what_if(outcome_of(state), None if state == start else outcome_of(start))

    def describe(**state: Any) -> str:
        return describe_what_if(outcome_of(state))

    return FigureForm(draw, describe, controls)


def _remembering(function: Callable[[Any], Any], key: Callable[[Any], Hashable], most: int) -> Callable[[Any], Any]:
    """The function, which computes nothing twice: its last results are kept, at most so many."""
    results: dict[Hashable, Any] = {}

    def call(argument: Any) -> Any:
        found = results.pop(key(argument), None)
        results[key(argument)] = function(argument) if found is None else found
        if len(results) > most:
            del results[next(iter(results))]  # the one that was asked for the longest time ago
        return results[key(argument)]

    return call


def _controls(make: Callable[..., Any]) -> list[Control]:
    stops = {number: {f"{number:,}": number for number in numbers} for number, numbers in _STOPS.items()}
    known: dict[str, Control] = {
        "max_requests": Stops("max_requests", "Places (max_requests)", stops["max_requests"], 16),
        "max_batch_tokens": Stops(
            "max_batch_tokens", "Tokens a step (max_batch_tokens)", stops["max_batch_tokens"], 512
        ),
        "policy": Choice("policy", "Who goes first (policy)", {name: name for name in POLICIES}, next(iter(POLICIES))),
        "bucket": Choice("bucket", "Batches of like prompts (bucket)", {"no": False, "yes": True}, False),
    }
    parameters = list(inspect.signature(make).parameters.values())[1:]  # the first takes the cache
    kinds = inspect.Parameter
    for one in parameters:
        needed = one.default is kinds.empty and one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if needed and one.name not in known:
            raise ValueError(
                f"what_if cannot set {one.name!r}; it calls make_scheduler(cache, ...) with those of "
                f"{', '.join(known)} that it takes. Give {one.name!r} a default."
            )
    taken = [known[one.name] for one in parameters if one.name in known]
    blocks = Stops(NUM_BLOCKS, "Blocks of 16 tokens", stops[NUM_BLOCKS], 256)
    return [Slider("load", "Load (requests per second)", 0.25, 6.0, 0.75, 0.25), blocks, *taken]


_STOPS = {
    "max_requests": (1, 2, 4, 8, 16, 32, 64),
    "max_batch_tokens": (16, 32, 64, 128, 256, 512, 1024, 2048),
    NUM_BLOCKS: (24, 48, 64, 96, 128, 192, 256, 512, 1024),
}


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_what_if(outcome: Outcome, before: Outcome | None = None) -> Figure:
    """The outcome as a figure. before: another one whose numbers are to stand beside it, in grey."""
    problems = outcome.problems()
    below = _BELOW + problem_space(problems)
    height = _ABOVE + _CARDS + _REQUESTS + _BETWEEN + _LIMITS + below
    figure = Figure(figsize=(_WIDTH, height))
    figure.text(0.12 / _WIDTH, 1 - 0.24 / height, _heading(outcome), fontsize=11, va="center", parse_math=False)
    colour = ALARM if outcome.grows else BLACK
    figure.text(0.12 / _WIDTH, 1 - 0.48 / height, _verdict(outcome), fontsize=9.5, va="center", color=colour)
    _draw_cards(figure, outcome, before)
    axes = []
    for top, high in ((_ABOVE + _CARDS, _REQUESTS), (_ABOVE + _CARDS + _REQUESTS + _BETWEEN, _LIMITS)):
        box = (_LEFT / _WIDTH, 1 - (top + high) / height, _AXES / _WIDTH, high / height)
        axes.append(figure.add_axes(box))
        axes[-1].set_xlim(0, outcome.seconds or 1)
    _draw_requests(axes[0], outcome)
    _draw_limits(axes[1], outcome)
    write_problems(figure, problems, 0.12)
    return figure


def _draw_cards(figure: Figure, outcome: Outcome, before: Outcome | None) -> None:
    """The six numbers, and below each what it was before."""
    height = figure.get_size_inches()[1]
    now, then = _cards(outcome), _cards(before) if before else {}
    for place, (name, value) in zip(_CARD_PLACES, now.items(), strict=True):
        x = place / _WIDTH
        figure.text(x, 1 - (_ABOVE + 0.1) / height, name, fontsize=8.5, va="center")
        figure.text(x, 1 - (_ABOVE + 0.29) / height, value, fontsize=12, va="center", weight="bold")
        if then:
            text = f"at first {then[name]}"
            figure.text(x, 1 - (_ABOVE + 0.48) / height, text, fontsize=8.5, va="center", color="#595959")


def _cards(outcome: Outcome) -> dict[str, str]:
    return {
        "throughput": f"{outcome.tokens_per_second:,.1f} tokens/s",
        "time to first token, p95": in_time(outcome.percentile("ttft", 0.95)),
        "time per output token, p95": in_time(outcome.percentile("tpot", 0.95)),
        "longest gap, p95": in_time(outcome.percentile_of_gaps(0.95)),
        "preemptions": f"{outcome.preemptions:,}",
        "longest queue": _requests(_most(outcome.waiting())),
    }


def _draw_requests(axes: Axes, outcome: Outcome) -> None:
    """The queue and those that are being served, over time; a queue without end also as a straight line."""
    start, end = outcome.run.start, outcome.seconds
    waiting = _stairs(outcome.waiting(), start, end)
    served = _stairs(outcome.being_served(), start, end)
    axes.fill_between(*waiting, step="post", color=PALE, zorder=1)
    axes.step(*waiting, where="post", color=BLACK, linewidth=1.0, zorder=3)
    axes.step(*served, where="post", color=BLUE, linewidth=1.2, zorder=2)
    most = max(_most(outcome.waiting()), _most(outcome.being_served()), 1)
    axes.set(ylim=(0, 1.12 * most), ylabel="requests")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(labelbottom=False)
    axes.fill_between([], [], color=PALE, edgecolor=BLACK, linewidth=1.0, label="in the queue")
    axes.axvline(outcome.last_arrival, color=GREY, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    labels: list[tuple[str, str, Any]] = [("being served", BLUE, "solid"), ("last arrival", GREY, (0, (2, 2)))]
    if outcome.grows and math.isfinite(outcome.capacity):
        rate, last = outcome.offered - outcome.capacity, outcome.last_arrival
        axes.plot([0, last], [0, rate * last], color=VERMILION, linewidth=1.4, linestyle=(0, (8, 2, 1, 2)), zorder=4)
        labels.append((f"load - capacity:\n{rate:+.2f} a second", VERMILION, (0, (8, 2, 1, 2))))
    _legend(axes, labels)


def _draw_limits(axes: Axes, outcome: Outcome) -> None:
    """How much of each limit is in use, over time."""
    axes.set(ylim=(0, 108), ylabel="in use (%)", xlabel="seconds from the first arrival")
    axes.set_yticks([0, 50, 100])
    axes.axhline(100, color=GREY, linewidth=0.6, linestyle=(0, (1, 3)), zorder=1)
    if not outcome.run.steps:
        style: Any = {"transform": axes.transAxes, "ha": "center", "va": "center", "fontsize": 9}
        axes.text(0.5, 0.5, "not known: the simulation did not come to its end", **style)
        return
    labels = []
    for name, steps in outcome.use_of_limits().items():
        colour, dashes = _LOOKS[name]
        times, shares = _binned(steps, outcome.seconds)
        axes.step(times, shares, where="post", color=colour, linestyle=dashes, linewidth=1.6, zorder=3)
        labels.append((name, colour, dashes))
    _legend(axes, labels)


def _legend(axes: Axes, labels: Sequence[tuple[str, str, Any]]) -> None:
    for name, colour, dashes in labels:
        axes.plot([], [], color=colour, linestyle=dashes, linewidth=1.6, label=name)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.04), fontsize=8.5, frameon=False, handlelength=2.6, borderaxespad=0
    )


def _stairs(counts: Sequence[tuple[float, int]], start: float, end: float) -> tuple[list[float], list[int]]:
    times = [0.0, *(moment - start for moment, _ in counts), end]
    values = [0, *(count for _, count in counts)]
    return times, [*values, values[-1]]


def _binned(steps: Sequence[tuple[float, float, float]], end: float) -> tuple[list[float], list[float]]:
    """Means in percent over equal stretches of time; where no step runs, nothing is in use."""
    width = end / _BINS
    sums = [0.0] * _BINS
    for start, stop, share in steps:
        for place in range(int(start / width), min(_BINS, int(stop / width) + 1)):
            sums[place] += share * max(0.0, min(stop, (place + 1) * width) - max(start, place * width))
    shares = [100 * total / width for total in sums]
    return [place * width for place in range(_BINS + 1)], [*shares, shares[-1]]


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_what_if(outcome: Outcome) -> str:
    """The settings, the six numbers and some more, whether the queue grows, and what is wrong."""
    lines = [_heading(outcome), f"  {_settings(outcome)}"]
    rate = len(outcome.finished) / outcome.seconds if outcome.seconds else 0.0
    lines += [f"  throughput: {outcome.tokens_per_second:,.1f} tokens per second, {rate:.2f} requests per second"]
    for measure, words in (("ttft", "time to first token"), ("tpot", "time per output token")):
        middle, high = (in_time(outcome.percentile(measure, share)) for share in (0.5, 0.95))
        lines.append(f"  {words}: p50 {middle}, p95 {high}")
    middle, high = (in_time(outcome.percentile_of_gaps(share)) for share in (0.5, 0.95))
    lines.append(f"  longest time between two tokens of a request: p50 {middle}, p95 {high}")
    lines += [f"  preemptions: {outcome.preemptions:,}"]
    until = f"{outcome.mean_waiting():.1f} on average until the last arrival at {in_time(outcome.last_arrival)}"
    lines += [f"  queue: at most {_requests(_most(outcome.waiting()))}, {until}"]
    used = [f"{100 * share:.0f} % of the {name}" for name, share in outcome.use_while_waiting().items()]
    lines += [f"  in use while somebody waits: {', '.join(used)}"] if used else []
    return "\n".join([*lines, _verdict(outcome), *(f"! {problem}" for problem in outcome.problems())])


def _heading(outcome: Outcome) -> str:
    work = outcome.question.workload
    (shortest, longest), (least, most) = work.prompt_tokens, work.output_tokens
    words = f"{work.count} requests, {work.rate:g} a second, prompts of {shortest} to {longest} tokens and answers of "
    words += f"{least} to {most}"
    return words if outcome.problem else f"{words}, served in {in_time(outcome.seconds)}"


def _settings(outcome: Outcome) -> str:
    question = outcome.question
    said = [f"{NUM_BLOCKS} {question.num_blocks}", *(f"{name} {value}" for name, value in question.settings.items())]
    return "; ".join(said)


def _verdict(outcome: Outcome) -> str:
    offered, most = outcome.offered, outcome.capacity
    if math.isnan(most):
        return "How much could be served at most is not known: the simulation did not come to its end."
    arrive = f"{offered:g} arrive" if offered == outcome.load else f"{offered:.2f} arrive that can fit"
    can = f"at most {most:.2f} requests a second can be served, and {arrive}"
    if outcome.grows:
        return f"The queue grows without end: {can}. Each second it is longer by {offered - most:.2f}."
    near = " That is near the limit." if offered > 0.85 * most else ""
    return f"The queue does not grow for ever: {can}.{near}"


def _most(counts: Sequence[tuple[float, int]]) -> int:
    return max((count for _, count in counts), default=0)


def _requests(count: int) -> str:
    return f"{count:,} request{'s' * (count != 1)}"
