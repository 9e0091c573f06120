"""The numbers of a tensor and the few levels that are left of them: where the grid lies, and what it costs.

Above, how often each number occurs, before and after rounding; below it, the levels of the narrowest, a middle and the
widest group, with the group's own numbers. Then column by column how large the numbers are and how large their error
is: a column far above all others makes the grid coarse for whoever shares it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from llmfromscratch.widgets.controls import Choice, Control, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened
from llmfromscratch.widgets.rounding_run import BITS, CLIPS, GROUPS, NONE, Rounding, round_tensor
from llmfromscratch.widgets.style import BLACK, ICE, NAVY, SKY, VERMILION, problem_space, write_problems

KINDS = {"from the smallest number to the largest": False, "symmetric around 0": True}
_WIDTH, _LEFT, _MAIN = 10.0, 1.2, 5.75  # inches
_SIDE = _LEFT + _MAIN + 1.35
_TOP, _HIGH, _GRID, _GAP, _COLUMNS, _BELOW = 0.78, 1.75, 0.34, 0.72, 1.5, 0.86
_DARK = "#555555"
_FAR = 4.0  # times the middle column: from there on a column is named
_NAMES = {1: ("all",), 3: ("narrowest", "middle", "widest")}


def weight_histogram(
    tensors: Mapping[str, Tensor], *, bits: int = 4, group: int | str = 32, clip: str = NONE, symmetric: bool = False
) -> FigureForm:
    """The figure with its controls: which tensor, how many bits, who shares a grid, what is cut off, which grid.

    tensors: name -> float [rows, width], as `record_tensors` gives them. group, clip: of rounding_run's GROUPS, CLIPS.
    """
    if not tensors:
        raise ValueError("There is no tensor to draw; give some by name, such as record_tensors(llm, text).")
    controls: list[Control] = [
        Choice("tensor", "Tensor", {name: name for name in tensors}, next(iter(tensors))),
        Stops("bits", "Bits", {str(each): each for each in BITS}, bits),
        Stops("group", "Grids", dict(GROUPS), group),
        Choice("clip", "Cut off", {words: words for words in CLIPS}, clip),
        Choice("symmetric", "A grid goes", dict(KINDS), symmetric),
    ]
    known: dict[tuple[Any, ...], Rounding] = {}

    def rounding(state: Mapping[str, Any], group: Any) -> Rounding:
        key = state["tensor"], state["bits"], group, state["clip"], state["symmetric"]
        if key not in known:
            known[key] = round_tensor(tensors[key[0]], *key[1:])
        return known[key]

    def arguments(state: Mapping[str, Any]) -> tuple[Any, ...]:
        return rounding(state, state["group"]), {words: rounding(state, each) for words, each in GROUPS.items()}, state

    return FigureForm(
        lambda **state: draw_weight_histogram(*arguments(state)),
        lambda **state: describe_weight_histogram(*arguments(state)),
        controls,
    )


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_weight_histogram(run: Rounding, others: Mapping[str, Rounding], state: Mapping[str, Any]) -> Figure:
    """The picture of one rounding; others: the same tensor with each of GROUPS; state: what the controls say."""
    problems = [in_font(problem) for problem in run.problems]
    below, grids = _BELOW + problem_space(problems), _GRID * len(run.grids) + 0.12
    height = _TOP + _HIGH + grids + _GAP + _COLUMNS + below
    figure = Figure(figsize=(_WIDTH, height))
    title, numbers = _headings(run, state)
    figure.text(0.2 / _WIDTH, 1 - 0.24 / height, shortened(title, _WIDTH - 0.4, 11), fontsize=11, va="center",
                parse_math=False)  # fmt: skip
    figure.text(0.2 / _WIDTH, 1 - 0.48 / height, numbers, fontsize=9.5, va="center", color=_DARK)

    def axes_at(left: float, top: float, wide: float, tall: float) -> Axes:
        return figure.add_axes((left / _WIDTH, 1 - (top + tall) / height, wide / _WIDTH, tall / height))

    reach = _reach(run)
    _draw_numbers(axes_at(_LEFT, _TOP, _MAIN, _HIGH), run, reach)
    _draw_grids(axes_at(_LEFT, _TOP + _HIGH, _MAIN, grids), run, reach)
    _draw_others(axes_at(_SIDE, _TOP + 0.25, _WIDTH - _SIDE - 0.75, _HIGH + grids - 0.25), run, others)
    _draw_columns(axes_at(_LEFT, _TOP + _HIGH + grids + _GAP, _WIDTH - _LEFT - 0.2, _COLUMNS), run)
    _draw_key(figure, problem_space(problems) / height)
    write_problems(figure, problems, 0.2)
    return figure


def _reach(run: Rounding) -> tuple[float, float]:
    low, high = float(run.values.min()), float(run.values.max())
    margin = 0.04 * (high - low) or 1.0
    return low - margin, high + margin


def _draw_numbers(axes: Axes, run: Rounding, reach: tuple[float, float]) -> None:
    """How often the numbers occur, and how often what they were rounded to does; each bar counts, so no scale hides."""
    edges = np.linspace(*reach, 160)
    before, _ = np.histogram(run.values.numpy().ravel(), edges)
    after, _ = np.histogram(run.rounded.nan_to_num().numpy().ravel(), edges)
    axes.stairs(before, edges, fill=True, color=SKY, zorder=2)
    axes.stairs(after, edges, color=BLACK, linewidth=0.9, zorder=3)
    axes.set(yscale="log", xlim=reach, ylim=(0.7, 2.5 * max(before.max(), after.max())))
    axes.set_ylabel("numbers", fontsize=9.5)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_grids(axes: Axes, run: Rounding, reach: tuple[float, float]) -> None:
    """A row for each group shown: its levels, and above them its own numbers."""
    for row, grid in enumerate(run.grids):
        levels = grid.levels.clamp(reach[0], reach[1])
        axes.vlines(levels.tolist(), row - 0.02, row + 0.4, color=NAVY, linewidth=0.9 if len(levels) < 100 else 0.4)
        values = grid.values.sort().values
        values = torch.cat([values[:: -(-len(values) // 2000)], values[-1:]])
        axes.plot(values.tolist(), [row - 0.2] * len(values), linestyle="none", marker="o", markersize=2.6, color=SKY,
                  markeredgecolor="none", alpha=0.8)  # fmt: skip
    names = _NAMES.get(len(run.grids), ("",) * len(run.grids))
    axes.set_yticks(range(len(run.grids)), names, fontsize=9)
    axes.set(xlim=reach, ylim=(len(run.grids) - 0.45, -0.5))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("value, and the levels of " + ("the grid" if len(run.grids) == 1 else "three of the grids"),
                    fontsize=9.5)  # fmt: skip


def _draw_others(axes: Axes, run: Rounding, others: Mapping[str, Rounding]) -> None:
    """The error with each kind of grid, as a share of the power; the one shown is filled."""
    shares = [100 * each.relative for each in others.values()]
    places = range(len(shares))
    own = [place for place, each in enumerate(others.values()) if each is run]
    colours = [NAVY if place in own else ICE for place in places]
    axes.barh(places, [share if np.isfinite(share) else 0 for share in shares], height=0.62, color=colours,
              edgecolor=NAVY, linewidth=0.7)  # fmt: skip
    for place, share in enumerate(shares):
        axes.text(share if np.isfinite(share) else 0, place, f" {_percent(share)}", fontsize=9, va="center",
                  weight="bold" if place in own else "normal")  # fmt: skip
    axes.set_yticks(places, [words.replace("one for each", "each").replace("one grid for all", "all")
                             for words in others], fontsize=9)  # fmt: skip
    axes.set(ylim=(len(shares) - 0.4, -0.6))
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.set_title("error by grids, % of the power", fontsize=9.5, color=_DARK, loc="left", x=-0.55)


def _draw_columns(axes: Axes, run: Rounding) -> None:
    """The root mean square of each column's numbers and of their errors."""
    sizes, errors = _columns(run)
    places = torch.arange(len(sizes))
    shown = sizes > 0
    axes.plot(places[shown].tolist(), sizes[shown].tolist(), linestyle="none", marker="o", markersize=2.8, color=SKY,
              markeredgecolor="none", zorder=2)  # fmt: skip
    wrong = (errors > 0) & errors.isfinite()
    axes.plot(places[wrong].tolist(), errors[wrong].tolist(), linestyle="none", marker="x", markersize=2.8,
              color=VERMILION, markeredgewidth=0.7, zorder=3)  # fmt: skip
    axes.set(yscale="log", xlim=(-0.01 * len(sizes), 1.01 * len(sizes)))
    every = torch.cat([sizes[shown], errors[wrong], torch.tensor([1e-9]) if not bool(shown.any()) else sizes[:0]])
    axes.set_ylim(float(every.min()) / 1.6, float(every.max()) * 2.4)
    for column in outliers(run)[:3]:
        axes.annotate(f"{column}", (column, float(sizes[column])), xytext=(0, 3), textcoords="offset points",
                      fontsize=8.5, ha="center", color=BLACK)  # fmt: skip
    axes.set_ylabel("root mean square", fontsize=9.5)
    axes.set_xlabel("column (input channel)", fontsize=9.5)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def _columns(run: Rounding) -> tuple[Tensor, Tensor]:
    """The root mean square of each column's numbers, and of its errors."""
    return run.values.square().mean(dim=0).sqrt(), (run.rounded - run.values).square().mean(dim=0).sqrt()


def outliers(run: Rounding) -> list[int]:
    """The columns at least four times as large as the one in the middle, the largest first."""
    sizes, _ = _columns(run)
    middle = sizes.median()
    order = sizes.argsort(descending=True).tolist()
    return [column for column in order if middle > 0 and sizes[column] >= _FAR * middle]


def _draw_key(figure: Figure, bottom: float) -> None:
    handles: list[Any] = [
        Patch(facecolor=SKY, label="numbers"),
        Line2D([], [], color=BLACK, linewidth=0.9, label="rounded"),
        Line2D([], [], color=NAVY, marker="|", markersize=9, linestyle="none", label="a level"),
        Line2D(
            [], [], color=SKY, marker="o", markersize=4, linestyle="none", label="a group's number, a column's size"
        ),
        Line2D([], [], color=VERMILION, marker="x", markersize=4, linestyle="none", label="a column's error"),
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / _WIDTH, bottom), ncols=len(handles),
                  fontsize=9, frameon=False, columnspacing=1.4, handletextpad=0.4)  # fmt: skip


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_weight_histogram(run: Rounding, others: Mapping[str, Rounding], state: Mapping[str, Any]) -> str:
    """The error of this rounding, its worst number, what each kind of grid would make, the columns that stand out."""
    title, numbers = _headings(run, state)
    error, row, column = run.worst()
    sizes, errors = _columns(run)
    drowned = int((errors > 0.1 * sizes).sum())
    lines = [
        title,
        f"  {numbers}",
        f"  squared error {run.squared:.4g}; the worst is {error:.3g}, in row {row}, column {column}",
        "  error by grids, in percent of the power: " + ", ".join(f"{words} {_percent(100 * each.relative)}"
                                                   for words, each in others.items()),
        f"  columns whose error is above a tenth of their size: {drowned:,} of {len(sizes):,}",
    ]  # fmt: skip
    far = outliers(run)
    if far:
        middle = sizes.median()
        shown = ", ".join(f"{each} ({float(sizes[each] / middle):.0f} times the middle one)" for each in far[:3])
        lines.append(f"  columns that stand out: {len(far)}; {shown}")
    return "\n".join(lines + [f"  ! {problem}" for problem in run.problems])


def _headings(run: Rounding, state: Mapping[str, Any]) -> tuple[str, str]:
    rows, width = run.values.shape
    some = f"{rows:,}" if rows == run.rows else f"{rows:,} of {run.rows:,}"
    kind = "symmetric" if state["symmetric"] else "asymmetric"
    words = next(words for words, each in GROUPS.items() if each == state["group"])
    cut = "" if state["clip"] == NONE else f", cut off: {state['clip']}"
    title = f"{state['tensor']}: {some} rows of {width:,}, in {state['bits']} bits, {words}, {kind}{cut}"
    beyond = (
        f"{_percent(100 * run.cut)} of the numbers beyond their grid" if run.cut else "all numbers within their grid"
    )
    numbers = (
        f"Error {_percent(100 * run.relative)} of the power, worst {run.worst()[0]:.3g}; {beyond}; "
        f"{run.groups:,} {'grid' if run.groups == 1 else 'grids'}, {run.bits_each:.3g} bits a number with them"
    )
    return title[0].upper() + title[1:], numbers


def _percent(percent: float) -> str:
    return "not a number" if percent != percent else f"{percent:.3g} %"
