"""The roofline with our dots: what each kind of work computes in a second, under what memory and processor allow.

To the right the work does more with each byte that it reads. Up to the ridge memory is the limit, the slope; behind it
the processor, the ceiling. How far a dot lies below the roof is how much time it wastes, or how much of its data came
out of a cache, where it lies above. Williams et al. 2009, "Roofline".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from llmfromscratch import profiling
from llmfromscratch.machine_limits import Limits
from llmfromscratch.profiling import Dot, StepProfile
from llmfromscratch.widgets.controls import Choice, Control
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.profile_reading import LOOKS, WHOLE, Look, in_ms, parts_of, read_profiles
from llmfromscratch.widgets.style import BLACK, GREY, ICE, NAVY, PALE, in_share

EVERY = "all of them, whole steps"
BOTH = "both"
_WIDTH, _HIGH, _LEFT, _RIGHT, _TOP, _BELOW = 10.0, 4.6, 0.85, 0.25, 0.62, 0.98  # inches
_PLOT = _WIDTH - _LEFT - _RIGHT
_DARK = "#555555"
_LINE = 0.19  # inches from one label to the next

Shown = Sequence[tuple[str, StepProfile]]


def roofline(profiles: Any, limits: Limits) -> FigureForm:
    """The figure with its controls: one engine by kinds of work, or all by their whole steps; which part of a run.

    profiles: pairs of a name and a `profiling.Profile`; limits: of the machine, from `machine_limits.measure()`.
    """
    named = read_profiles(profiles)
    parts = parts_of(named)
    engines = {name: name for name, _ in named}
    controls: list[Control] = [
        Choice("engine", "Engine", engines | ({EVERY: EVERY} if len(named) > 1 else {}), named[-1][0]),
        Choice("part", "Part of a run", {part: part for part in ([BOTH, *parts] if len(parts) > 1 else parts)},
               BOTH if len(parts) > 1 else parts[0]),
    ]  # fmt: skip

    def shown(engine: str, part: str) -> Shown:
        return [
            (name, of[each]) for each in parts if part in (BOTH, each) for name, of in named if engine in (EVERY, name)
        ]

    return FigureForm(
        lambda engine, part: draw_roofline(shown(engine, part), limits, engine == EVERY),
        lambda engine, part: describe_roofline(shown(engine, part), limits, engine == EVERY),
        controls,
    )


def dots_of(steps: Shown, limits: Limits, whole: bool) -> list[tuple[str, Dot]]:
    """(name of the engine, dot): of each step all kinds that read and compute, or the whole step alone."""
    found = []
    for name, step in steps:
        dots = profiling.roofline(step, limits).dots
        found += [(name, dot) for dot in dots if not whole or dot.kind == "whole"]
    return found


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_roofline(steps: Shown, limits: Limits, whole: bool = False) -> Figure:
    """The roof and the dots of some steps, each with its engine's name; `whole`: only those of whole steps."""
    dots, dtype = dots_of(steps, limits, whole), steps[0][1].dtype
    height = _TOP + _HIGH + _BELOW
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((_LEFT / _WIDTH, _BELOW / height, _PLOT / _WIDTH, _HIGH / height))
    _set_axes(axes, [dot for _, dot in dots], limits, dtype)
    _draw_roof(axes, limits, dtype)
    labels = [_name(name, dot, whole) for name, dot in dots]
    for (_, dot), (x, y), text in zip(dots, _places(axes, dots, labels), labels, strict=True):
        _draw_dot(axes, dot, limits, dtype)
        axes.plot([dot.intensity, x], [dot.speed / 1e9, y], color=GREY, linewidth=0.7, zorder=3.5)
        axes.text(x, y, text, fontsize=9, va="center", parse_math=False, zorder=6,
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip
    figure.text(0.15 / _WIDTH, 1 - 0.28 / height, in_font(_heading(steps, limits, whole)), fontsize=11, va="center",
                parse_math=False)  # fmt: skip
    _draw_key(figure, dots)
    return figure


def _set_axes(axes: Axes, dots: Sequence[Dot], limits: Limits, dtype: str) -> None:
    ridge, peak = limits.ridge(dtype), limits.peak(dtype) / 1e9
    intensities = [dot.intensity for dot in dots] or [ridge]
    speeds = [dot.speed / 1e9 for dot in dots] or [peak]
    low, high = min(*intensities, 1.0) / 2.5, max(*intensities, ridge) * 12
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min([*speeds, low * limits.bandwidth / 1e9]) / 2.5, max([*speeds, peak]) * 2.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("intensity (operations for each byte of memory)", fontsize=9.5)
    axes.set_ylabel("speed (GFLOP/s)", fontsize=9.5)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_roof(axes: Axes, limits: Limits, dtype: str) -> None:
    (low, high), ridge, peak = axes.get_xlim(), limits.ridge(dtype), limits.peak(dtype) / 1e9
    bottom, top = axes.get_ylim()
    slope = [low * limits.bandwidth / 1e9, peak]
    axes.plot([low, ridge, high], [*slope, peak], color=NAVY, linewidth=2.4, zorder=3)
    axes.fill_between([low, ridge], slope, bottom, color=ICE, alpha=0.35, linewidth=0, zorder=0)
    axes.fill_between([ridge, high], [peak, peak], bottom, color=PALE, alpha=0.6, linewidth=0, zorder=0)
    axes.plot([ridge] * 2, [bottom, peak], color=NAVY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    steep = _HIGH / math.log(top / bottom) / (_PLOT / math.log(high / low))
    middle = math.exp((2 * math.log(ridge) + math.log(low)) / 3)
    up = math.exp(0.16 * math.log(top / bottom) / _HIGH * math.hypot(1, steep))
    axes.text(middle, middle * limits.bandwidth / 1e9 * up, f"memory: {_rounded(limits.bandwidth / 1e9)} GB/s",
              fontsize=9.5, color=NAVY, rotation=math.degrees(math.atan(steep)), ha="center", va="center")  # fmt: skip
    axes.text(high * 0.97, peak * 1.09, f"products in {dtype}: {_rounded(peak)} GFLOP/s", fontsize=9.5, color=NAVY,
              ha="right", va="bottom")  # fmt: skip
    for x, words, side in ((ridge / 1.08, "memory is the limit", "right"), (ridge * 1.08, "computing is", "left")):
        axes.text(x, bottom * 1.12, words, fontsize=9, color=_DARK, ha=side, va="bottom")


def _draw_dot(axes: Axes, dot: Dot, limits: Limits, dtype: str) -> None:
    """The dot, and how far it is to the roof above it."""
    look, speed = _look(dot.kind), dot.speed / 1e9
    roof = min(dot.intensity * limits.bandwidth, limits.peak(dtype)) / 1e9
    axes.plot([dot.intensity] * 2, [speed, roof], color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=2)
    hollow = dot.step == profiling.PREFILL
    size = {"whole": 15.0, "products": 12.0}.get(dot.kind, 8.5)  # dots on each other stay visible: the large ones below
    axes.plot([dot.intensity], [speed], marker=look.marker, markersize=size,
              color="white" if hollow else look.colour, markeredgecolor=look.colour if hollow else BLACK,
              markeredgewidth=2.2 if hollow else 0.7, linestyle="none", zorder=5 - size / 100)  # fmt: skip


def _places(axes: Axes, dots: Sequence[tuple[str, Dot]], labels: Sequence[str]) -> list[tuple[float, float]]:
    """Where the labels stand: right of their dots, none over another, and inside the axes.

    Labels are set from the highest dot down; one that would lie over another moves down, away from the roof.
    """
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    across, along = _PLOT / math.log(high / low), _HIGH / math.log(top / bottom)  # inches for each factor e
    taken: list[tuple[float, float, float]] = []  # left, right and middle, in inches
    places: dict[int, tuple[float, float]] = {}
    for index in sorted(range(len(dots)), key=lambda index: -dots[index][1].speed):
        dot, wide = dots[index][1], text_width(labels[index], 9)
        left = min(across * math.log(dot.intensity / low) + 0.22, _PLOT - wide - 0.05)
        y = along * math.log(dot.speed / 1e9 / bottom)
        while any(left < end + 0.05 and begin < left + wide + 0.05 and abs(y - at) < _LINE for begin, end, at in taken):
            y -= 0.02
        taken.append((left, left + wide, y))
        places[index] = low * math.exp(left / across), bottom * math.exp(y / along)
    return [places[index] for index in range(len(dots))]


def _draw_key(figure: Figure, dots: Sequence[tuple[str, Dot]]) -> None:
    kinds = [kind for kind in [*LOOKS, "whole"] if any(dot.kind == kind for _, dot in dots)]
    handles = [_sample(kind, _look(kind), False) for kind in kinds]
    parts = {dot.step for _, dot in dots}
    if profiling.PREFILL in parts:
        handles.append(_sample(f"{profiling.PREFILL} (hollow)", Look(BLACK, "", "o"), True))
    if parts - {profiling.PREFILL}:
        handles.append(_sample(f"{profiling.DECODE} (filled)", Look(BLACK, "", "o"), False))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / _WIDTH, 0), ncols=len(handles), fontsize=9,
                  frameon=False, columnspacing=1.3, handletextpad=0.2)  # fmt: skip


def _sample(words: str, look: Look, hollow: bool) -> Line2D:
    return Line2D([], [], marker=look.marker, markersize=8, color="white" if hollow else look.colour, label=words,
                  markeredgecolor=look.colour if hollow else BLACK, markeredgewidth=1.8 if hollow else 0.7,
                  linestyle="none")  # fmt: skip


def _look(kind: str) -> Look:
    return LOOKS.get(kind, WHOLE)


def _name(name: str, dot: Dot, whole: bool) -> str:
    return f"{shortened(name, 2.4, 9) if whole else dot.kind} {in_share(dot.reached, 1)}"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_roofline(steps: Shown, limits: Limits, whole: bool = False) -> str:
    """A line for each dot: its intensity, its time, the least time, and what sets that."""
    lines = [_heading(steps, limits, whole)]
    for name, dot in dots_of(steps, limits, whole):
        times = f"{in_ms(1000 * dot.cost.seconds)} ms of at least {in_ms(1000 * dot.least)} ms"
        reached = f"{in_share(dot.reached, 1)} of what {dot.bound} allows"
        lines.append(f"  {name}, {dot.step}, {dot.kind}: {dot.intensity:.3g} operations a byte; {times}, {reached}")
    return "\n".join(lines)


def _heading(steps: Shown, limits: Limits, whole: bool) -> str:
    what, dtype = "Whole steps" if whole else f"The work of {steps[0][0]}", steps[0][1].dtype
    where = f" ({limits.where}, {dtype})" if limits.where else f" ({dtype})"
    return f"{what} under this machine's roof{where}: the ridge is at {limits.ridge(dtype):.3g} operations a byte"
