"""How long requests waited, as distributions: for each run the share of requests that waited at most so long.

A curve that ends below 100 % belongs to a run in which some requests never got what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llmfromscratch.widgets.controls import Choice, Control
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import shortened
from llmfromscratch.widgets.serving_run import ServingRun, in_time, numbers, percentile, read_runs
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PURPLE,
    VERMILION,
    problem_space,
    write_problems,
)

MEASURES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "queue_time": "time in the queue",
    "whole": "time to the last token",
}
SCALES = ("linear", "log")
SHARES = {"p50": (0.5, "o"), "p95": (0.95, "s"), "p99": (0.99, "D")}
_LINES = (  # colour, dashes; told apart by the dashes alone
    (ORANGE, "solid"),
    (BLUE, (0, (6, 1.5))),
    (GREEN, (0, (1.2, 1.2))),
    (VERMILION, (0, (6, 1.5, 1.2, 1.5))),
    (PURPLE, (0, (3, 3))),
    (NAVY, (0, (8, 2, 1, 2, 1, 2))),
)
_WIDTH, _LEFT, _AXES, _HIGH, _ABOVE, _ROW = 10.0, 0.75, 9.0, 3.1, 0.45, 0.24  # inches
_COLUMNS = (0.12, 3.9, 5.0, 6.1, 7.2, 8.3, 9.85)  # of the table: where each begins, and for numbers ends, in inches


@dataclass(frozen=True)
class Sample:
    """One run, measured. values: seconds, in rising order. missing: requests that did not get what is measured.

    problems: what is wrong with the numbers, as sentences.
    """

    name: str
    values: tuple[float, ...]
    missing: tuple[int, ...]
    aborted: int
    tokens_per_second: float
    problems: tuple[str, ...]

    @property
    def count(self) -> int:
        """Requests that have the value or ought to have it."""
        return len(self.values) + len(self.missing)

    def percentile(self, share: float) -> float:
        """The seconds that `share` of the requests did not exceed; infinite where they never got it."""
        return percentile(self.values, share, len(self.missing))


def latency_distribution(runs: Any) -> FigureForm:
    """The distributions with their controls: what is measured, and the scale of time.

    runs: name -> what `simulate` returned, or (requests, steps) where an engine's `on_step` has collected the steps.
    """
    read_runs(runs)
    controls: list[Control] = [
        Choice("measure", "Measure", {words: name for name, words in MEASURES.items()}, "ttft"),
        Choice("scale", "Scale of time", {name: name for name in SCALES}, SCALES[0]),
    ]
    return FigureForm(
        lambda measure, scale: draw_latency_distribution(runs, measure, scale),
        lambda measure, scale: describe_latency_distribution(runs, measure, scale),
        controls,
    )


def measure_runs(runs: Any, measure: str = "ttft") -> list[Sample]:
    """Every run, measured. measure: one of MEASURES. Requests that were aborted are counted and left out."""
    if measure not in MEASURES:
        raise ValueError(f"The measure cannot be {measure!r}; expected one of {', '.join(MEASURES)}.")
    return [_sample(name, run, measure) for name, run in read_runs(runs).items()]


def draw_latency_distribution(runs: Any, measure: str = "ttft", scale: str = SCALES[0]) -> Figure:
    """The distributions as a figure. measure: one of MEASURES; scale: one of SCALES."""
    if scale not in SCALES:
        raise ValueError(f"The scale cannot be {scale!r}; expected one of {', '.join(SCALES)}.")
    samples = measure_runs(runs, measure)
    problems = [f"{sample.name}: {problem}" for sample in samples for problem in sample.problems]
    table = _ROW * (len(samples) + 1)
    height = _ABOVE + _HIGH + 0.62 + table + 0.12 + problem_space(problems)
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((_LEFT / _WIDTH, 1 - (_ABOVE + _HIGH) / height, _AXES / _WIDTH, _HIGH / height))
    _set_time(axes, samples, scale, measure)
    for sample, look in zip(samples, _looks(samples), strict=True):
        _draw_curve(axes, sample, look)
    for share, _ in SHARES.values():
        axes.axhline(100 * share, color=GREY, linewidth=0.6, linestyle=(0, (1, 3)), zorder=1)
    axes.set(ylim=(0, 103), ylabel="requests (%)")
    axes.set_yticks([0, 25, 50, 75, 95])
    title = f"Share of the requests whose {MEASURES[measure]} was at most so long"
    figure.text(0.12 / _WIDTH, 1 - 0.27 / height, title, fontsize=11)
    _draw_table(figure, samples, _ABOVE + _HIGH + 0.62)
    write_problems(figure, problems, 0.12)
    return figure


def describe_latency_distribution(runs: Any, measure: str = "ttft", scale: str = SCALES[0]) -> str:
    """A line for each run with its percentiles, its throughput, and who is missing; then what is wrong."""
    samples = measure_runs(runs, measure)
    heading = f"{MEASURES[measure].capitalize()}, on a {scale} scale:"
    lines = []
    for sample in samples:
        cells = ", ".join(f"{name} {in_time(sample.percentile(share))}" for name, (share, _) in SHARES.items())
        counted = f"{sample.count} request{'s' * (sample.count != 1)}"
        lines.append(f"  {sample.name}: {cells} ({counted}); {sample.tokens_per_second:,.1f} tokens per second")
        if sample.aborted:
            lines.append(f"    {sample.aborted} aborted, not counted")
        lines += [f"    ! {problem}" for problem in sample.problems]
    return "\n".join([heading, *lines])


def _sample(name: str, run: ServingRun, measure: str) -> Sample:
    values: dict[int, float] = {}
    missing: list[int] = []
    aborted = [request for request in run.requests if request.finish_reason == "abort"]
    for request in run.requests:
        value = _value(request, measure)
        if request.finish_reason == "abort":
            continue
        if value is not None:
            values[request.request_id] = value
        elif not request.ended or measure != "tpot":  # an answer of one token has no time between tokens
            missing.append(request.request_id)
    problems = []
    if missing:
        share = f"{len(missing)} of {len(values) + len(missing)} requests"
        problems.append(f"{share} have no {MEASURES[measure]} and count as infinitely long: {numbers(missing)}.")
    below = [number for number, value in values.items() if value < 0]
    if below:
        problems.append(f"The {MEASURES[measure]} of {numbers(below)} is below zero: {in_time(values[below[0]])}.")
    return Sample(
        name, tuple(sorted(values.values())), tuple(missing), len(aborted), run.tokens_per_second, tuple(problems)
    )


def _value(request: Any, measure: str) -> float | None:
    if measure == "whole":
        return None if request.last_token is None or not request.ended else request.last_token - request.arrival
    value = getattr(request, measure)
    if value is not None and (not isinstance(value, int | float) or math.isnan(value)):
        raise TypeError(f"Request {request.request_id} has a {measure} of {value!r}; expected seconds or None.")
    return value


# ---- drawing -----------------------------------------------------------------------------------------------------


def _looks(samples: Sequence[Sample]) -> list[tuple[str, Any]]:
    return [_LINES[place % len(_LINES)] for place in range(len(samples))]


def _set_time(axes: Axes, samples: Sequence[Sample], scale: str, measure: str) -> None:
    values = [value for sample in samples for value in sample.values]
    longest = max([*values, 0.0]) or 1.0
    shortest = min([value for value in values if value > 0], default=longest)
    low = shortest / 1.3 if scale == "log" else min([*values, 0.0])
    high = longest * 1.3 if scale == "log" else longest * 1.04
    axes.set_xscale(scale)
    axes.set_xlim(low, high)
    unit, factor = ("ms", 1000) if longest < 1 else ("s", 1)
    if scale == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:,.6g}"))
    axes.set_xlabel(f"{MEASURES[measure]} ({unit}{', log scale' * (scale == 'log')})")


def _draw_curve(axes: Axes, sample: Sample, look: tuple[str, Any]) -> None:
    """Stairs from the left edge on; they stay below 100 % where requests are missing."""
    colour, dashes = look
    low, high = axes.get_xlim()
    values = [max(value, low) for value in sample.values]
    heights = [100 * (place + 1) / sample.count for place in range(len(values))]
    axes.step(
        [low, *values, high], [0, *heights, *heights[-1:]] if heights else [0, 0], where="post", color=colour,
        linestyle=dashes, linewidth=2, zorder=3, label=sample.name,
    )  # fmt: skip
    for share, marker in SHARES.values():
        value = sample.percentile(share)
        if math.isfinite(value):
            axes.plot(
                [max(value, low)], [100 * share], marker=marker, markersize=6.5, color=colour,
                markeredgecolor="white", markeredgewidth=0.8, linestyle="none", zorder=4,
            )  # fmt: skip


def _draw_table(figure: Figure, samples: Sequence[Sample], top: float) -> None:
    """A row for each run, with its line in front and its numbers behind."""
    height = figure.get_size_inches()[1]
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.axis("off")
    heads = ["run", "requests", *SHARES, "aborted", "tokens per second"]
    for place, head in enumerate(heads):
        x = _COLUMNS[place]
        axes.text(x, top + _ROW / 2, head, fontsize=9, color=BLACK, va="center", ha="right" if place else "left")
    for place, (_, marker) in enumerate(SHARES.values()):
        axes.plot([_COLUMNS[place + 2] - 0.4], [top + _ROW / 2], marker=marker, markersize=5.5, color=BLACK)
    axes.plot([0.12, _COLUMNS[-1]], [top + _ROW, top + _ROW], color=GREY, linewidth=0.7)
    for row, (sample, (colour, dashes)) in enumerate(zip(samples, _looks(samples), strict=True)):
        y = top + (row + 1.5) * _ROW
        axes.plot([0.12, 0.72], [y, y], color=colour, linestyle=dashes, linewidth=2)
        cells = [shortened(sample.name, 2.3, 9), f"{sample.count:,}"]
        cells += [in_time(sample.percentile(share)) for share, _ in SHARES.values()]
        cells += [f"{sample.aborted:,}", f"{sample.tokens_per_second:,.1f}"]
        for place, cell in enumerate(cells):
            axes.text(
                _COLUMNS[place] if place else 0.85, y, cell, fontsize=9, va="center", ha="right" if place else "left",
                color=ALARM if cell == "never" else BLACK, parse_math=False,
            )  # fmt: skip
