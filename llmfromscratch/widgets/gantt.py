"""The Gantt chart of a scheduler: a row a request, what it did when, and below it how full the engine was.

Runs stand one above the other on the same axis of time, each from its first arrival on. What holds a place is a thick
bar, and what does not is a thin one; hatched is what was computed for nothing, and what lost its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from llmfromscratch.widgets.controls import Choice, Control, Span
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.gantt_rows import (
    DECODE,
    HELD,
    NOTHING,
    PREEMPTED,
    PREFILL,
    WAITING,
    Chart,
    Row,
    read_chart,
)
from llmfromscratch.widgets.glyphs import shortened
from llmfromscratch.widgets.serving_run import in_time, percentile, read_runs
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    BLUE,
    GREY,
    NAVY,
    ORANGE,
    PALE,
    SKY,
    VERMILION,
    Look,
    in_share,
    problem_space,
    write_problems,
)

ORDERS = ("arrival", "end")
# colour and hatch; then the colour of the hatch, and how much of the row's height it takes
LOOKS: dict[str, tuple[Look, Any, float]] = {
    WAITING: (("#c4c4c4", ""), "white", 0.3),
    PREFILL: ((NAVY, ""), "white", 0.84),
    DECODE: ((SKY, ""), "white", 0.84),
    NOTHING: (("white", "//////"), VERMILION, 0.84),
    HELD: ((PALE, "...."), BLACK, 0.84),
    PREEMPTED: ((ORANGE, "xxxxxx"), BLACK, 0.46),
}
MOST_ROWS = 48
_WIDTH, _LEFT, _AXES = 10.0, 0.95, 7.65  # inches
_TITLE, _GAP, _PLACES, _BLOCKS, _BETWEEN, _ABOVE, _BELOW = 0.32, 0.07, 0.5, 0.42, 0.16, 0.42, 0.52


@dataclass(frozen=True)
class Window:
    """From and to, in seconds from the first arrival of each run."""

    low: float
    high: float

    def overlap(self, start: float, end: float) -> float:
        """Seconds of [start, end) inside."""
        return max(0.0, min(end, self.high) - max(start, self.low))


def gantt(runs: Any, places: int | None = None) -> FigureForm:
    """The chart with its controls: the window of time, and the order of the rows.

    runs: name -> what `simulate` returned, or (requests, steps) where an engine's `on_step` has collected the steps.
    places: the scheduler's max_requests, where it is to be marked.
    """
    longest = max(run.end - run.start for run in read_runs(runs).values())
    unit, second = ("s", 1) if longest >= 20 else ("ms", 1000)
    last = max(1, math.ceil(longest * second))
    controls: list[Control] = [
        Span("window", f"Time shown ({unit})", 0, last, (0, last)),
        Choice("order", "Rows in the order of", {name: name for name in ORDERS}, ORDERS[0]),
    ]

    def draw(window: tuple[int, int], order: str) -> Figure:
        return draw_gantt(runs, (window[0] / second, window[1] / second), order, places)

    def describe(window: tuple[int, int], order: str) -> str:
        return describe_gantt(runs, (window[0] / second, window[1] / second), order, places)

    return FigureForm(draw, describe, controls)


def draw_gantt(
    runs: Any, window: tuple[float, float] | None = None, order: str = ORDERS[0], places: int | None = None
) -> Figure:
    """The chart as a figure. window: seconds from the first arrival, None for all; order: one of ORDERS.

    places: the scheduler's max_requests, where it is to be marked.
    """
    charts, view = _charts(runs), _window(runs, window)
    shown = {name: _rows_shown(chart, view, order) for name, chart in charts.items()}
    problems = [f"{name}: {problem}" for name, chart in charts.items() for problem in chart.problems]
    heights = {name: _row_height(len(rows)) * max(1, len(rows)) for name, rows in shown.items()}
    below = _BELOW + problem_space(problems)
    panel = _TITLE + _GAP + _PLACES + _GAP + _BLOCKS + _BETWEEN
    height = _ABOVE + sum(heights.values()) + panel * len(charts) - _BETWEEN + below
    figure = Figure(figsize=(_WIDTH, height))
    most = max((len(record.work) for chart in charts.values() for record in chart.run.steps), default=1)
    most = max(most, places or 1)
    top = _ABOVE
    for name, chart in charts.items():
        top += _TITLE
        figure.text(0.12 / _WIDTH, 1 - (top - 0.13) / height, _title(name, chart), fontsize=10, parse_math=False)
        axes = [_axes(figure, top, heights[name], view)]
        top += heights[name] + _GAP
        axes.append(_axes(figure, top, _PLACES, view))
        top += _PLACES + _GAP
        axes.append(_axes(figure, top, _BLOCKS, view))
        top += _BLOCKS + _BETWEEN
        _draw_rows(axes[0], shown[name], chart, view)
        _draw_places(axes[1], chart, view, most, places)
        _draw_blocks(axes[2], chart, view)
    axes[-1].tick_params(labelbottom=True)
    axes[-1].set_xlabel("seconds from the first arrival")
    _draw_legend(figure, shown.values(), height)
    write_problems(figure, problems, 0.12)
    return figure


def describe_gantt(
    runs: Any, window: tuple[float, float] | None = None, order: str = ORDERS[0], places: int | None = None
) -> str:
    """For every run its totals, what its requests and places did in the window, and what is wrong."""
    charts, view = _charts(runs), _window(runs, window)
    lines = [f"From {in_time(view.low)} to {in_time(view.high)} after the first arrival, in the order of {order}:"]
    for name, chart in charts.items():
        rows = _rows_shown(chart, view, order)
        lines += [_title(name, chart), f"  rows: {_row_words(rows)}"]
        mean, last = _waits(chart)
        lines += [f"  time to first token: mean {in_time(mean)}, p95 {in_time(last)}"]
        lines += [f"  time of the requests: {_time_words(chart, view)}"]
        lines += [f"  {words}" for words in (_place_words(chart, view, places), _token_words(chart, view)) if words]
        lines += [f"  {note}" for note in chart.notes]
        lines += [f"  ! {problem}" for problem in chart.problems]
    return "\n".join(lines)


def _charts(runs: Any) -> dict[str, Chart]:
    return {name: read_chart(run) for name, run in read_runs(runs).items()}


def _window(runs: Any, window: tuple[float, float] | None) -> Window:
    longest = max(run.end - run.start for run in read_runs(runs).values())
    return Window(*window) if window else Window(0.0, longest)


def _rows_shown(chart: Chart, view: Window, order: str) -> list[Row]:
    """The rows with something in the window, in order; of too many those with something wrong, and some of the rest."""
    if order not in ORDERS:
        raise ValueError(f"The order of the rows cannot be {order!r}; expected one of {', '.join(ORDERS)}.")
    inside = [
        row
        for row in chart.rows
        if any(view.overlap(piece.start, piece.end) > 0 for piece in row.pieces) or view.low <= row.arrival <= view.high
    ]
    inside.sort(key=lambda row: (row.arrival if order == "arrival" else _last(row), row.arrival, row.number))
    if len(inside) <= MOST_ROWS:
        return inside
    wrong = [place for place, row in enumerate(inside) if row.wrong][:MOST_ROWS]
    right = [place for place, row in enumerate(inside) if not row.wrong]
    room = MOST_ROWS - len(wrong)
    spread = [right[number * len(right) // room] for number in range(room)]
    return [inside[place] for place in sorted([*wrong, *spread])]


def _last(row: Row) -> float:
    return math.inf if row.end is None else row.end


def _row_height(count: int) -> float:
    """Inches."""
    return min(0.11, 2.9 / max(1, count))


# ---- drawing -----------------------------------------------------------------------------------------------------


def _axes(figure: Figure, top: float, high: float, view: Window) -> Axes:
    height = figure.get_size_inches()[1]
    axes = figure.add_axes((_LEFT / _WIDTH, 1 - (top + high) / height, _AXES / _WIDTH, high / height))
    axes.set_xlim(view.low, max(view.high, view.low + 1e-9))
    axes.tick_params(labelbottom=False, length=2.5, pad=2, labelsize=8)
    return axes


def _draw_rows(axes: Axes, rows: Sequence[Row], chart: Chart, view: Window) -> None:
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    for what, ((colour, hatch), line, high) in LOOKS.items():
        boxes = [
            _box(piece.start, piece.end, place - high / 2, place + high / 2)
            for place, row in enumerate(rows)
            for piece in row.pieces
            if piece.what == what and view.overlap(piece.start, piece.end) > 0
        ]
        width = 0.4 if what == PREFILL else 0.0
        axes.add_collection(
            PolyCollection(boxes, facecolor=colour, hatch=hatch, edgecolor=line, linewidth=width, label=what, zorder=2),
            autolim=False,
        )
    _draw_marks(axes, rows, view)
    every = math.ceil(0.1 / _row_height(len(rows)))
    named = [place for place, row in enumerate(rows) if place % every == 0 or row.wrong]
    axes.set_yticks(named, [_name(rows[place], chart) for place in named], fontsize=6.5)
    axes.tick_params(axis="y", length=0, pad=2)
    for place, label in zip(named, axes.get_yticklabels(), strict=True):
        label.set_color(ALARM if rows[place].wrong else BLACK)
        label.set_fontweight("bold" if rows[place].wrong else "normal")
    style: Any = {"transform": axes.transAxes, "fontsize": 8, "va": "top", "linespacing": 1.3}
    axes.text(-0.07, 1.0, "request", rotation=90, ha="right", **style)
    hidden = len(chart.rows) - len(rows)
    counts = f"{len(rows)} of {len(chart.rows)}\nrequests shown\n" if hidden else ""
    mean, last = _waits(chart)
    axes.text(1.012, 1.0, f"{counts}TTFT:\nmean {in_time(mean)}\np95 {in_time(last)}", **style)


def _draw_marks(axes: Axes, rows: Sequence[Row], view: Window) -> None:
    """Ends as strokes, aborted ones as crosses, and what is wrong as a filled cross where it is so first."""
    style: Any = {"linestyle": "none", "zorder": 4, "clip_on": False}
    ends = [(row.end, place, row.request.error) for place, row in enumerate(rows) if row.end is not None]
    ends = [end for end in ends if view.low <= end[0] <= view.high]
    for marker, size, edge, gone in (("|", 6, 1.1, False), ("x", 4.5, 1.3, True)):
        at = [(time, place) for time, place, error in ends if bool(error) == gone]
        axes.plot(*_columns(at), marker=marker, markersize=size, markeredgewidth=edge, color=BLACK, **style)
    wrong = [(time, place) for place, row in enumerate(rows) for time in row.wrong if view.low <= time <= view.high]
    axes.plot(*_columns(wrong), marker="X", markersize=7, color=ALARM, markeredgecolor="white", **style)


def _draw_places(axes: Axes, chart: Chart, view: Window, most: int, places: int | None) -> None:
    """How many requests each step computed for, and how many rows for nothing on top of them."""
    steps = _steps(chart, view)
    for what, (colour, hatch), line in (("useful", (BLUE, ""), BLUE), (NOTHING, *LOOKS[NOTHING][:2])):
        boxes = []
        for start, end, useful, idle, _ in steps:
            low, high = (0, useful) if what == "useful" else (useful, useful + idle)
            if high > low:
                boxes.append(_box(start, end, low, high))
        axes.add_collection(
            PolyCollection(boxes, facecolor=colour, hatch=hatch, edgecolor=line, linewidth=0, zorder=2), autolim=False
        )
    axes.set_ylim(0, max(1, most) * 1.05)
    axes.set_yticks([0, max(1, most)])
    if places:
        axes.axhline(places, color=BLACK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3)
    mean, wasted = _mean(chart, view, 2), _mean(chart, view, 3)
    _side(axes, "places", f"mean {mean + wasted:.1f}" + (f"\n{mean:.1f} useful" if wasted else ""))


def _draw_blocks(axes: Axes, chart: Chart, view: Window) -> None:
    """Blocks in use while each step computes, and how many there are."""
    total = max((record.blocks_total for record in chart.run.steps), default=0)
    axes.set_ylim(0, 1.12 * max(1, total))
    if not total:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "this cache has no blocks", transform=axes.transAxes, ha="center", va="center", fontsize=8)
        _side(axes, "blocks", "")
        return
    boxes = [_box(start, end, 0, used) for start, end, _, _, used in _steps(chart, view) if used]
    axes.add_collection(PolyCollection(boxes, facecolor=GREY, edgecolor=GREY, linewidth=0, zorder=2), autolim=False)
    axes.axhline(total, color=BLACK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3)
    axes.set_yticks([0, total])
    peak = max((used for *_, used in _steps(chart, view)), default=0)
    _side(axes, "blocks", f"at most\n{peak:,} of {total:,}")


def _side(axes: Axes, name: str, words: str) -> None:
    style: Any = {"transform": axes.transAxes, "fontsize": 8, "va": "center"}
    axes.text(-0.07, 0.5, name, rotation=90, ha="right", **style)
    axes.text(1.012, 0.5, words, linespacing=1.3, **style)


def _draw_legend(figure: Figure, shown: Iterable[Sequence[Row]], height: float) -> None:
    rows = [row for some in shown for row in some]
    there = {piece.what for row in rows for piece in row.pieces}
    handles: list[Any] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=line, linewidth=0, label=what)
        for what, ((colour, hatch), line, _) in LOOKS.items()
        if what in there
    ]
    marks: list[tuple[str, float, str, str, bool]] = [
        ("|", 8, BLACK, "end", any(row.end is not None and not row.request.error for row in rows))
    ]
    marks += [("x", 6, BLACK, "aborted", any(row.request.error for row in rows))]
    marks += [("X", 7, ALARM, "wrong", any(row.wrong for row in rows))]
    handles += [
        Line2D([], [], color=colour, marker=marker, markersize=size, linestyle="none", label=word)
        for marker, size, colour, word, is_there in marks
        if is_there
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.02 / _WIDTH, 1 - 0.06 / height), ncols=len(handles),
        fontsize=8.5, frameon=False, handlelength=1.6, columnspacing=1.3, handletextpad=0.5, borderaxespad=0,
    )  # fmt: skip


def _box(left: float, right: float, low: float, high: float) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _columns(points: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [x for x, _ in points], [y for _, y in points]


def _name(row: Row, chart: Chart) -> str:
    priorities = {other.request.params.priority for other in chart.rows}
    return f"{row.number} (p{row.request.params.priority})" if len(priorities) > 1 else str(row.number)


# ---- numbers -----------------------------------------------------------------------------------------------------


def _steps(chart: Chart, view: Window) -> list[tuple[float, float, int, int, int]]:
    """(start, end, rows with useful work, rows for nothing, blocks in use) of every step in the window."""
    found = []
    for record in chart.run.steps:
        start, end = record.start - chart.run.start, record.end - chart.run.start
        if view.overlap(start, end) > 0:
            idle = sum(work.phase == "idle" for work in record.work)
            found.append((start, end, len(record.work) - idle, idle, record.blocks_used))
    return found


def _mean(chart: Chart, view: Window, column: int) -> float:
    """Of a column of `_steps`, over the time that steps take in the window."""
    steps = _steps(chart, view)
    seconds = sum(view.overlap(step[0], step[1]) for step in steps)
    return sum(step[column] * view.overlap(step[0], step[1]) for step in steps) / seconds if seconds else 0.0


def _title(name: str, chart: Chart) -> str:
    run, count = chart.run, len(chart.rows)
    return (
        f"{shortened(name, 3.0, 10)}: {count} request{'s' * (count > 1)} in {in_time(run.end - run.start)}, "
        f"{run.tokens_per_second:,.1f} tokens per second, {len(run.steps):,} steps"
    )


def _waits(chart: Chart) -> tuple[float, float]:
    """The mean and the 95th percentile of the time to first token; infinite where one never came."""
    times = [request.ttft for request in chart.run.requests if request.ttft is not None]
    missing = sum(request.ttft is None and not request.error for request in chart.run.requests)
    mean = math.inf if missing else sum(times) / len(times) if times else math.nan
    return mean, percentile(times, 0.95, missing)


def _row_words(rows: Sequence[Row]) -> str:
    said = [str(row.number) for row in rows]
    return ", ".join(said[:12] + (["..."] if len(said) > 12 else [])) or "none"


def _time_words(chart: Chart, view: Window) -> str:
    """The share of each kind of piece in the time of all requests, in the window."""
    spent = dict.fromkeys(LOOKS, 0.0)
    for row in chart.rows:
        for piece in row.pieces:
            spent[piece.what] += view.overlap(piece.start, piece.end)
    whole = sum(spent.values())
    return ", ".join(f"{what} {in_share(time, whole)}" for what, time in spent.items() if time) or "none"


def _place_words(chart: Chart, view: Window, places: int | None) -> str:
    steps = _steps(chart, view)
    if not steps:
        return "no step"
    useful, idle = _mean(chart, view, 2), _mean(chart, view, 3)
    most = max(step[2] + step[3] for step in steps)
    words = f"places in use: {useful + idle:.1f} on average, {useful:.1f} of them useful, at most {most}"
    words += f" of {places}" * bool(places)
    total = max(record.blocks_total for record in chart.run.steps)
    return words + (f"; blocks in use: at most {max(step[4] for step in steps):,} of {total:,}" if total else "")


def _token_words(chart: Chart, view: Window) -> str:
    """Tokens of the steps that begin in the window."""
    counts = {"useful": 0, "padding": 0, "idle": 0}
    preemptions = 0
    for record in chart.run.steps:
        if view.low <= record.start - chart.run.start < view.high:
            preemptions += len(record.preempted)
            for work in record.work:
                idle = work.phase == "idle"
                counts["idle"] += (work.tokens + work.padding) * idle
                counts["useful"] += work.tokens * (not idle)
                counts["padding"] += work.padding * (not idle)
    whole = sum(counts.values())
    nothing = counts["padding"] + counts["idle"]
    words = f"tokens computed: {whole:,}, {in_share(nothing, whole)} of them for nothing"
    if nothing:
        words += f" ({counts['padding']:,} padding, {counts['idle']:,} in rows that had ended)"
    return words + f"; preemptions: {preemptions}"
