"""Where a step's time goes, kind by kind, in one engine after the other: what each change saved, and where it cost.

All engines below each other, their kinds of work joined by bands; or two of them as a waterfall: from the time of the
one, down by what each kind saved and up by what it cost, to the time of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Polygon

from llmfromscratch import optimization
from llmfromscratch.machine_limits import Limits
from llmfromscratch.profiling import StepProfile
from llmfromscratch.widgets.controls import Choice, Control
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.profile_reading import LOOKS, in_ms, milliseconds, parts_of, read_profiles, speed_of
from llmfromscratch.widgets.style import ALARM, BLACK, GREY, PALE, VERMILION, in_share, text_on

UNITS = ("ms", "share")
ALL = "all of them"
_WIDTH, _LEFT, _RIGHT = 10.0, 1.75, 1.75  # inches
_ROW, _BAR, _TOP, _BELOW = 0.86, 0.5, 0.62, 0.92
_STEP_ROW, _STEP_BAR = 0.36, 0.68  # of a waterfall: inches of a row, and the share of it that the bar takes
_DARK = "#555555"
_BARS = _WIDTH - _LEFT - _RIGHT


def time_waterfall(profiles: Any, limits: Limits | None = None) -> FigureForm:
    """The figure with its controls: which engines, which part of a run, in milliseconds or shares.

    profiles: pairs of a name and a `profiling.Profile`, in the order in which the engine changed. limits: of the
    machine (`machine_limits.measure()`); with them a line shows the least time that bytes and operations need.
    """
    named = read_profiles(profiles)
    compared = comparisons([name for name, _ in named])
    controls: list[Control] = [
        Choice("compare", "Compare", {words: words for words in compared}, ALL),
        Choice("part", "Part of a run", {part: part for part in parts_of(named)}, parts_of(named)[0]),
        Choice("unit", "In", {"milliseconds": "ms", "shares": "share"}, UNITS[0]),
    ]

    def steps(compare: str, part: str) -> list[tuple[str, StepProfile]]:
        return [(named[place][0], named[place][1][part]) for place in compared[compare]]

    return FigureForm(
        lambda compare, part, unit: draw_time_waterfall(steps(compare, part), compare != ALL, unit, limits),
        lambda compare, part, unit: describe_time_waterfall(steps(compare, part), compare != ALL, unit, limits),
        controls,
    )


def comparisons(names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """What can be compared, in words, and the places of the engines: all, neighbours, the first and the last."""
    pairs = [*pairwise(range(len(names))), *([(0, len(names) - 1)] if len(names) > 2 else [])]
    return {ALL: tuple(range(len(names)))} | {f"{names[old]} → {names[new]}": (old, new) for old, new in pairs}


def changes(old: StepProfile, new: StepProfile) -> list[tuple[str, float]]:
    """(kind, milliseconds more or, below zero, less), what saved most first; kinds without a change are left out."""
    before, after = milliseconds(old), milliseconds(new)
    found = [(kind, after[kind] - before[kind]) for kind in LOOKS if abs(after[kind] - before[kind]) >= 0.005]
    return sorted(found, key=lambda change: change[1])


def least_ms(step: StepProfile, limits: Limits) -> float:
    """Milliseconds that the bytes and operations of a step need on this machine."""
    total = step.total
    peak = limits.peak(step.dtype)
    return 1000 * optimization.least_seconds(total.nbytes, total.operations, limits.bandwidth, peak)


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_time_waterfall(
    steps: Sequence[tuple[str, StepProfile]], pair: bool = False, unit: str = UNITS[0], limits: Limits | None = None
) -> Figure:
    """The engines below each other, or with `pair` the first and the last of them as a waterfall. unit: of UNITS."""
    if unit not in UNITS:
        raise ValueError(f"The unit cannot be {unit!r}; expected one of {', '.join(UNITS)}.")
    turns = changes(steps[0][1], steps[-1][1]) if pair else []
    high = _STEP_ROW * (len(turns) + 2) + 0.2 if pair else _ROW * len(steps) - 0.1
    height = _TOP + high + _BELOW
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((_LEFT / _WIDTH, _BELOW / height, _BARS / _WIDTH, high / height))
    if pair:
        _draw_pair(axes, steps, turns, unit, limits)
    else:
        _draw_all(axes, steps, unit, limits)
    figure.text(0.15 / _WIDTH, 1 - 0.28 / height, in_font(_heading(steps, pair)), fontsize=11, va="center",
                parse_math=False)  # fmt: skip
    _draw_key(figure, steps, limits is not None)
    return figure


def _draw_all(axes: Axes, steps: Sequence[tuple[str, StepProfile]], unit: str, limits: Limits | None) -> None:
    sums = [sum(milliseconds(step).values()) for _, step in steps]
    longest = max(sums)
    places: list[dict[str, tuple[float, float]]] = []
    for row, ((_, step), total) in enumerate(zip(steps, sums, strict=True)):
        scale = 1.0 if unit == "ms" else 100 / total
        places.append(
            _draw_stack(axes, row, _BAR / _ROW, step, unit, scale, (longest if unit == "ms" else 100) / _BARS)
        )
        if limits is not None:
            _draw_least(axes, row, _BAR / _ROW, least_ms(step, limits) * scale)
    half = _BAR / _ROW / 2
    for row, (above, below) in enumerate(pairwise(places)):
        for kind, look in LOOKS.items():
            if above[kind][1] > above[kind][0] or below[kind][1] > below[kind][0]:
                corners = [(above[kind][0], row + half), (above[kind][1], row + half),
                           (below[kind][1], row + 1 - half), (below[kind][0], row + 1 - half)]  # fmt: skip
                axes.add_patch(Polygon(corners, facecolor=look.colour, alpha=0.25, linewidth=0, zorder=1))
    for row, ((_, step), total) in enumerate(zip(steps, sums, strict=True)):
        axes.text(1.02, row - 0.13, f"{in_ms(total)} ms", fontsize=10.5, weight="bold", va="center",
                  transform=axes.get_yaxis_transform())  # fmt: skip
        faster = f", {sums[0] / total:.1f} ×" if row else ""
        axes.text(1.02, row + 0.17, f"{speed_of(step)}{faster}", fontsize=9, va="center", color=_DARK,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set(xlim=(0, longest if unit == "ms" else 100), ylim=(len(steps) - 1 + half + 0.1, -half - 0.06))
    _set_axes(axes, [name for name, _ in steps], unit, "time of a step")


def _draw_pair(
    axes: Axes, steps: Sequence[tuple[str, StepProfile]], turns: Sequence[tuple[str, float]], unit: str,
    limits: Limits | None,
) -> None:  # fmt: skip
    (old_name, old), (new_name, new) = steps[0], steps[-1]
    before, after = (sum(milliseconds(step).values()) for step in (old, new))
    scale = 1.0 if unit == "ms" else 100 / before
    levels = [before]
    for _, change in turns:
        levels.append(levels[-1] + change)
    end = 1.02 * max(levels) * scale
    for row, (step, total) in ((0, (old, before)), (len(turns) + 1, (new, after))):
        _draw_stack(axes, row, _STEP_BAR, step, unit, scale, end / _BARS)
        axes.text(1.02, row, _amount(total, unit, scale), fontsize=9.5, weight="bold",
                  va="center", transform=axes.get_yaxis_transform())  # fmt: skip
        if limits is not None:
            _draw_least(axes, row, _STEP_BAR, least_ms(step, limits) * scale)
    for row, ((kind, change), level) in enumerate(zip(turns, levels, strict=False), 1):
        look, low = LOOKS[kind], min(level, level + change) * scale
        edge, wide = (VERMILION, 1.8) if change > 0 else (BLACK, 0.6)
        axes.barh(row, abs(change) * scale, left=low, height=_STEP_BAR, color=look.colour, hatch=look.hatch,
                  edgecolor=edge, linewidth=wide, zorder=3)  # fmt: skip
        axes.text(1.02, row, _amount(change, unit, scale, signed=True), fontsize=9.5, va="center",
                  color=ALARM if change > 0 else BLACK, transform=axes.get_yaxis_transform())  # fmt: skip
    for row, level in enumerate(levels):
        axes.plot([level * scale] * 2, [row - _STEP_BAR / 2, row + 1 + _STEP_BAR / 2], color=BLACK, linewidth=0.7,
                  linestyle=(0, (2, 2)), zorder=2)  # fmt: skip
    axes.set(xlim=(0, end), ylim=(len(turns) + 1.6, -0.6))
    names = [old_name, *(f"{'more' if change > 0 else 'less'} for {kind}" for kind, change in turns), new_name]
    _set_axes(axes, names, unit, f"time of a step, in shares of {old_name}" if unit == "share" else "time of a step")


def _draw_stack(
    axes: Axes, row: float, high: float, step: StepProfile, unit: str, scale: float, per_inch: float
) -> dict[str, tuple[float, float]]:
    """A row of the kinds behind each other; returns where each begins and ends. per_inch: units in an inch."""
    places, left = {}, 0.0
    for kind, taken in milliseconds(step).items():
        wide, look = taken * scale, LOOKS[kind]
        places[kind] = left, left + wide
        if wide > 0:
            axes.barh(row, wide, left=left, height=high, color=look.colour, hatch=look.hatch, edgecolor="white",
                      linewidth=0.6, zorder=3)  # fmt: skip
            amount = f"{in_ms(taken)} ms" if unit == "ms" else f"{wide:.0f} %"
            wordings = [f"{kind}\n{amount}"] if high == _BAR / _ROW else [f"{kind} {amount}"]
            room = wide / per_inch - 0.1
            words = next((each for each in [*wordings, kind, amount] if _width(each) <= room), "")
            back = {"facecolor": look.colour, "edgecolor": "none", "pad": 1.0} if words else None
            axes.text(left + wide / 2, row, words, fontsize=9, ha="center", va="center", linespacing=1.1,
                      color=text_on(look.colour), zorder=6, bbox=back)  # fmt: skip
        left += wide
    return places


def _width(words: str) -> float:
    return max(text_width(line, 9) for line in words.split("\n"))


def _draw_least(axes: Axes, row: float, high: float, place: float) -> None:
    """A line through the row, with a tip at each end: words on the bars may hide the line, but not the tips."""
    top, end = row - high / 2 - 0.02, row + high / 2 + 0.02
    axes.plot([place] * 2, [top, end], color="white", linewidth=3.2, zorder=4)
    axes.plot([place] * 2, [top, end], color=ALARM, linewidth=1.6, zorder=5)
    for y, marker in ((top, "v"), (end, "^")):
        axes.plot([place], [y], marker=marker, markersize=7, color=ALARM, markeredgecolor="white", zorder=5,
                  clip_on=False)  # fmt: skip


def _set_axes(axes: Axes, names: Sequence[str], unit: str, label: str) -> None:
    axes.set_yticks(range(len(names)), [shortened(name, _LEFT - 0.2, 10) for name in names], fontsize=10,
                    parse_math=False)  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(in_font(f"{label} ({'ms' if unit == 'ms' else '%'})"), fontsize=9.5, parse_math=False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_key(figure: Figure, steps: Sequence[tuple[str, StepProfile]], least: bool) -> None:
    shown = [kind for kind in LOOKS if any(milliseconds(step)[kind] > 0 for _, step in steps)]
    handles: list[Any] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=GREY if look.colour == PALE else "white",
              linewidth=0.5, label=kind) for kind, look in LOOKS.items() if kind in shown
    ]  # fmt: skip
    if least:
        handles.append(Line2D([], [], color=ALARM, marker="v", linewidth=1.6, label="least time"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / _WIDTH, 0), ncols=len(handles), fontsize=9,
                  frameon=False, columnspacing=1.2, handlelength=1.6)  # fmt: skip


def _amount(ms: float, unit: str, scale: float, signed: bool = False) -> str:
    sign = ("+" if ms > 0 else "−") if signed else ""
    return f"{sign}{in_ms(abs(ms))} ms" if unit == "ms" else f"{sign}{abs(ms) * scale:.1f} %"


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_time_waterfall(
    steps: Sequence[tuple[str, StepProfile]], pair: bool = False, unit: str = UNITS[0], limits: Limits | None = None
) -> str:
    """A line for each engine, or with `pair` for each kind of work that changed."""
    lines = [_heading(steps, pair)]
    if pair:
        (_, old), (_, new) = steps[0], steps[-1]
        whole = sum(milliseconds(old).values())
        for kind, change in changes(old, new):
            before, after = milliseconds(old)[kind], milliseconds(new)[kind]
            amount = _amount(change, unit, 100 / whole, signed=True)
            lines.append(f"  {kind}: {in_ms(before)} → {in_ms(after)} ms ({amount})")
    else:
        lines += [f"  {name}: {_in_words(step, unit)}" for name, step in steps]
    if limits is not None:
        least = ", ".join(f"{name} {in_ms(least_ms(step, limits))} ms" for name, step in _ends(steps, pair))
        lines.append(f"At least, by bytes and operations: {least}")
    return "\n".join(lines)


def _ends(steps: Sequence[tuple[str, StepProfile]], pair: bool) -> Sequence[tuple[str, StepProfile]]:
    return [steps[0], steps[-1]] if pair else steps


def _heading(steps: Sequence[tuple[str, StepProfile]], pair: bool) -> str:
    (old_name, old), (new_name, new) = steps[0], steps[-1]
    if not pair:
        return f"Where the time goes: {old.title()}"
    before, after = (sum(milliseconds(step).values()) for step in (old, new))
    ratio = before / after
    faster = f"{ratio:.2f} times as fast" if ratio >= 1.005 else f"{1 / ratio:.2f} times as slow"
    faster = "equally fast" if 0.995 < ratio < 1.005 else faster
    speeds = f"{old.speed:,.0f} → {speed_of(new)}"
    return f"{old.name.capitalize()}, {old_name} → {new_name}: {in_ms(before)} → {in_ms(after)} ms, {speeds}, {faster}"


def _in_words(step: StepProfile, unit: str) -> str:
    taken: Mapping[str, float] = milliseconds(step)
    whole = sum(taken.values())
    ranked = sorted((kind for kind in taken if taken[kind] > 0), key=lambda kind: -taken[kind])
    cells = [f"{kind} {in_ms(taken[kind]) if unit == 'ms' else in_share(taken[kind], whole)}" for kind in ranked]
    return f"{in_ms(whole)} ms, {speed_of(step)}: {', '.join(cells)}"
