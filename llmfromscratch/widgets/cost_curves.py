"""The time of a decode step against the length of the text, for each way to keep keys and values.

Recomputing, and copying the whole cache at each step, cost a fixed time and much for every token before; a cache that
is only read costs the same fixed time and little more. The grey line is that little: reading the keys and values once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from llmfromscratch.widgets.controls import Choice
from llmfromscratch.widgets.cost_measurement import Costs, Line, fitted
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font
from llmfromscratch.widgets.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    problem_space,
    write_problems,
)

SCALES = ("logarithmic", "linear")
_LOOKS = {  # colour, marker, dashes: each alone tells the kinds apart
    "recompute": (VERMILION, "X", (0, (6, 2))),
    "concat": (ORANGE, "^", (0, (4, 1.5, 1, 1.5))),
    "static": (NAVY, "s", "solid"),
    "paged": (SKY, "o", (0, (1.5, 1))),
}
_MORE_LOOKS = ((GREEN, "D", "solid"), (PURPLE, "v", (0, (4, 2))), (BLUE, "P", (0, (2, 2))), (BLACK, "*", "solid"))
_WIDTH, _LEFT, _RIGHT, _PLOT, _TOP, _BELOW = 10.0, 0.95, 2.95, 3.9, 0.6, 0.72  # inches


def cost_curves(costs: Costs, scale: str = SCALES[0], kinds: str = "all") -> FigureForm:
    """The curves with their controls: the scale of both axes, and which kinds to show.

    costs: as `cost_measurement.measure_costs` gives them.
    """
    shown = _choices(list(costs.points))
    controls = [
        Choice("scale", "Scale of both axes", {name: name for name in SCALES}, scale),
        Choice("kinds", "Show", {name: name for name in shown}, kinds),
    ]

    def draw(scale: str, kinds: str) -> Figure:
        return draw_costs(costs, scale, shown[kinds])

    def describe(scale: str, kinds: str) -> str:
        return describe_costs(costs, shown[kinds])

    return FigureForm(draw, describe, controls)


def draw_costs(costs: Costs, scale: str = SCALES[0], kinds: Sequence[str] | None = None) -> Figure:
    """The measured times as points, and the fitted lines. scale: one of SCALES; kinds: those to show, all if None."""
    shown = _shown(costs, kinds)
    problems = [in_font(problem) for problem in _problems(costs)]
    below = _BELOW + problem_space(problems)
    height = _TOP + _PLOT + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((_LEFT / _WIDTH, below / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _PLOT / height))
    lengths = sorted({length for points in shown.values() for length in points})
    times = [time for points in shown.values() for time in points.values()]
    _set_axes(axes, scale, lengths, times)
    for kind, points in shown.items():
        _draw_kind(axes, kind, points, lengths, _look(kind, costs), kind in costs.problems)
    line = _reading(costs, shown)
    if line and lengths:
        _draw_line(axes, line, lengths, {"color": GREY, "linewidth": 1.2, "linestyle": (0, (1, 2)), "zorder": 1})
    _draw_key(axes, costs, shown)
    figure.text(0.3 / _WIDTH, 1 - 0.26 / height, _title(costs), fontsize=11, va="center", parse_math=False)
    write_problems(figure, problems, 0.3)
    return figure


def describe_costs(costs: Costs, kinds: Sequence[str] | None = None) -> str:
    """Each kind's line in numbers, beside what reading the keys and values alone takes."""
    floor = fitted(costs.reading).slope if len(costs.reading) > 1 else 0.0
    lines = [_title(costs)]
    for kind, points in _shown(costs, kinds).items():
        line = fitted(points)
        times = f", {line.slope / floor:,.1f} times reading alone" if floor > 0 else ""
        last = max(points)
        lines.append(
            f"{kind}: {line.start:.1f} ms + {_slope(line)}{times}; "
            f"measured at {min(points):,} to {last:,} tokens, {points[last]:,.1f} ms at {last:,}"
        )
    if floor > 0:
        lines.append(f"reading keys and values once: {_slope(fitted(costs.reading))}")
    return "\n".join([*lines, *_problems(costs)])


def _choices(kinds: Sequence[str]) -> dict[str, Sequence[str]]:
    """Name -> kinds: all, all that do not recompute, and each beside the last one."""
    choices: dict[str, Sequence[str]] = {"all": list(kinds)}
    caches = [kind for kind in kinds if kind != "recompute"]
    flat = [kind for kind in caches if kind != "concat"]
    for name, some in (("without recompute", caches), (" and ".join(flat), flat)):
        if 1 < len(some) < len(kinds):
            choices[name] = some
    return {**choices, **{f"{kind} alone": [kind] for kind in kinds if len(kinds) > 1}}


def _shown(costs: Costs, kinds: Sequence[str] | None) -> Mapping[str, Mapping[int, float]]:
    return {kind: points for kind, points in costs.points.items() if kinds is None or kind in kinds}


def _look(kind: str, costs: Costs) -> tuple[str, str, Any]:
    others = [name for name in costs.points if name not in _LOOKS]
    return _LOOKS.get(kind) or _MORE_LOOKS[others.index(kind) % len(_MORE_LOOKS)]


def _title(costs: Costs) -> str:
    return "Time of a decode step against the length of the text" + (f" ({costs.machine})" if costs.machine else "")


def _slope(line: Line) -> str:
    return f"{1000 * line.slope:,.{0 if abs(line.slope) >= 0.1 else 2}f} µs a token"


def _problems(costs: Costs) -> list[str]:
    return [f"{kind}: {problem}" for kind, problem in costs.problems.items()]


def _reading(costs: Costs, shown: Mapping[str, Mapping[int, float]]) -> Line | None:
    """The line of a cache that is read once and nothing more: the lowest fixed time among those shown."""
    starts = [fitted(points).start for kind, points in shown.items() if kind != "recompute"]
    if len(costs.reading) < 2 or not starts:
        return None
    return Line(min(starts), fitted(costs.reading).slope)


def _set_axes(axes: Axes, scale: str, lengths: Sequence[int], times: Sequence[float]) -> None:
    axes.set_xlabel("length of the text in tokens", fontsize=9.5)
    axes.set_ylabel("time of a decode step in ms", fontsize=9.5)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if not lengths:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        return
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.3g}")
    if scale == SCALES[0]:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(xlim=(lengths[0] / 1.2, lengths[-1] * 1.2), ylim=(min(times) / 1.5, max(times) * 1.5))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(lengths)
    else:
        axes.set(xlim=(0, lengths[-1] * 1.05), ylim=(0, max(times) * 1.12))
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)


def _draw_kind(
    axes: Axes, kind: str, points: Mapping[int, float], lengths: Sequence[int], look: tuple[str, str, Any], wrong: bool
) -> None:
    colour, marker, dashes = look
    marks = _marker(wrong)
    axes.plot(
        list(points),
        list(points.values()),
        linestyle="none",
        marker=marker,
        color=colour,
        zorder=4,
        clip_on=False,
        **marks,
    )
    if len(points) > 1:
        _draw_line(axes, fitted(points), [length for length in lengths if length <= max(points)],
                   {"color": colour, "linestyle": dashes, "linewidth": 2.0, "zorder": 3})  # fmt: skip


def _marker(wrong: bool) -> dict[str, Any]:
    """Hollow for a kind whose answer is wrong."""
    fill = "none" if wrong else "full"
    return {"markersize": 8, "markeredgecolor": BLACK, "markeredgewidth": 0.7, "fillstyle": fill}


def _draw_line(axes: Axes, line: Line, lengths: Sequence[int], look: Mapping[str, Any]) -> None:
    """The line as far as there are lengths; many points, because on logarithmic axes it is a curve."""
    first, last = lengths[0], lengths[-1]
    xs = [first * (last / first) ** (part / 60) for part in range(61)]
    axes.plot(xs, [line.at(x) if line.at(x) > 0 else float("nan") for x in xs], **look)


def _draw_key(axes: Axes, costs: Costs, shown: Mapping[str, Mapping[int, float]]) -> None:
    """Right of the plot: marker, name and line of each kind, those that cost most for a token first."""
    style: Any = {"transform": axes.transAxes, "va": "center", "clip_on": False}
    y = 0.97
    for kind in sorted(shown, key=lambda kind: -fitted(shown[kind]).slope):
        line = fitted(shown[kind])
        colour, marker, dashes = _look(kind, costs)
        look: Any = {"color": colour, "transform": axes.transAxes, "clip_on": False}
        axes.plot([1.03, 1.10], [y, y], linestyle=dashes, linewidth=2, **look)
        axes.plot([1.065], [y], marker=marker, **_marker(kind in costs.problems), **look)
        axes.text(1.125, y, kind, fontsize=10, weight="bold", **style)
        axes.text(1.125, y - 0.065, f"{line.start:.1f} ms", fontsize=9, **style)
        axes.text(1.125, y - 0.12, f"+ {_slope(line)}", fontsize=9, **style)
        y -= 0.21
    if _reading(costs, shown):
        axes.plot([1.03, 1.10], [y, y], color=GREY, linestyle=(0, (1, 2)), linewidth=1.4, transform=axes.transAxes,
                  clip_on=False)  # fmt: skip
        axes.text(1.125, y, "reading keys and values", fontsize=9, **style)
        axes.text(1.125, y - 0.055, f"once: {_slope(fitted(costs.reading))}", fontsize=9, **style)
