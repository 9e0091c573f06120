"""Attention that goes over its keys once: tiles light up in their order, and a running maximum and sum are mended.

Above, who looks at whom: a cell is a score, and the darker it is, the more its token counts by now. Below, for one
query, its scores with the largest so far, and the sum: what was summed before shrinks when a larger score turns up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from llmfromscratch.widgets.controls import Choice, Control, Slider, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    BLUE,
    GREY,
    ICE,
    NAVY,
    ORANGE,
    PALE,
    problem_space,
    write_problems,
)
from llmfromscratch.widgets.tile_run import (
    HEAD_DIM,
    MASKS,
    QUERIES,
    SCORES,
    SIZES,
    TOKENS,
    Fold,
    Sums,
    TileRun,
    run_tiles,
)

DARK = "#555555"
_SHADES = LinearSegmentedColormap.from_list("counts", ["#F4FAFE", ICE, "#56B4E9", BLUE, NAVY])
_WIDTH, _LEFT, _CELLS = 10.0, 1.5, 5.64  # inches
_NUMBERS, _OUTPUT = _LEFT + _CELLS + 0.15, _LEFT + _CELLS + 0.95
_ROW, _TOP, _GAP, _SCORES_HIGH, _TOTALS_HIGH, _BELOW = 0.235, 0.98, 0.3, 1.25, 1.25, 0.82


def attention_tiles(
    fold_tile: Fold, *, tiles: int = 4, query: int = 6, size: int = 4, scores: str = SCORES[0], mask: str = MASKS[1]
) -> FigureForm:
    """The tiles with their controls: how many are folded in, which query is shown, the size of a tile, which scores.

    fold_tile: with the signature of `optimization.fold_tile`. query: from 1. scores, mask: of SCORES and MASKS.
    """
    controls: list[Control] = [
        Slider("tiles", "Tiles folded in", 0, TOKENS // SIZES[0], tiles),
        Slider("query", "Query", 1, len(QUERIES), query),
        Stops("size", "Tile (tokens)", {str(each): each for each in SIZES}, size),
        Choice("scores", "Scores", {kind: kind for kind in SCORES}, scores),
        Choice("mask", "A query may look at", {kind: kind for kind in MASKS}, mask),
    ]
    known: dict[tuple[Any, ...], TileRun] = {}

    def arguments(state: Mapping[str, Any]) -> tuple[TileRun, int, int]:
        key = state["scores"], state["mask"], state["size"]
        known[key] = known.get(key) or run_tiles(fold_tile, *key)
        return known[key], min(state["tiles"], known[key].tiles), state["query"]

    return FigureForm(
        lambda **state: draw_attention_tiles(*arguments(state)),
        lambda **state: describe_attention_tiles(*arguments(state)),
        controls,
    )


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_attention_tiles(run: TileRun, tiles: int, query: int = 1) -> Figure:
    """The first `tiles` of the run's tiles folded in, and the sums of a query (from 1) after each of them."""
    problems = [in_font(problem) for problem in run.problems] if tiles >= run.wrong else []
    below, row = _BELOW + problem_space(problems), query - 1
    high = _ROW * len(QUERIES)
    height = _TOP + high + _GAP + _SCORES_HIGH + _GAP + _TOTALS_HIGH + below
    figure = Figure(figsize=(_WIDTH, height))
    title, numbers = _heading(run, tiles, query)
    figure.text(0.2 / _WIDTH, 1 - 0.24 / height, title, fontsize=11, va="center")
    figure.text(0.2 / _WIDTH, 1 - 0.48 / height, f"{numbers}. The darker a cell, the more its token counts by now, "
                "exp(score − top)", fontsize=9.5, va="center", color=DARK)  # fmt: skip

    def axes_at(left: float, top: float, wide: float, tall: float) -> Axes:
        return figure.add_axes((left / _WIDTH, 1 - (top + tall) / height, wide / _WIDTH, tall / height))

    _draw_cells(axes_at(_LEFT, _TOP, _CELLS, high), run, tiles, row)
    _draw_numbers(axes_at(_NUMBERS, _TOP, _WIDTH - _NUMBERS - 0.1, high), run, tiles, row)
    middle = _TOP + high + _GAP
    _draw_scores(axes_at(_LEFT, middle, _CELLS, _SCORES_HIGH), run, tiles, row)
    bottom = middle + _SCORES_HIGH + _GAP
    _draw_totals(axes_at(_LEFT, bottom, _CELLS, _TOTALS_HIGH), run, tiles, row)
    _draw_output(axes_at(_OUTPUT, middle + 0.3, _WIDTH - _OUTPUT - 0.2, bottom - middle + _TOTALS_HIGH - 0.3), run,
                 tiles, row)  # fmt: skip
    _draw_key(figure, problem_space(problems) / height)
    write_problems(figure, problems, 0.2)
    return figure


def _draw_cells(axes: Axes, run: TileRun, tiles: int, row: int) -> None:
    """A row for each query, a column for each token; what is folded in is shaded by exp(score - top)."""
    end, weights = tiles * run.size, _weights(run, tiles)
    for at, position in enumerate(QUERIES):
        for token in range(TOKENS):
            if run.scores[at, token] == -torch.inf:
                axes.plot(token, at, marker=".", markersize=2, color="#bbbbbb", zorder=2)
                continue
            weight = float(weights[at, token]) if token < end else 0.0
            colour: Any = _SHADES(min(weight, 1.0)) if token < end else "white"
            broken = token < end and not 0 <= weight <= 1.001
            look: Any = {"facecolor": "white", "edgecolor": ALARM, "hatch": "xxxx"} if broken else {
                "facecolor": colour, "edgecolor": "#9fb6c6" if token < end else "#cccccc"}  # fmt: skip
            axes.add_patch(Rectangle((token - 0.46, at - 0.44), 0.92, 0.88, linewidth=0.6, zorder=2, **look))
        axes.text(-0.9, at, f"query {at + 1}, token {position + 1}", fontsize=8.5, ha="right", va="center",
                  weight="bold" if at == row else "normal")  # fmt: skip
    axes.add_patch(Rectangle((-0.54, row - 0.5), TOKENS + 0.08, 1, fill=False, edgecolor=BLACK, linewidth=1.1, zorder=4,
                             clip_on=False))  # fmt: skip
    if tiles:
        corner = (end - run.size - 0.5, -0.56)
        axes.add_patch(Rectangle(corner, run.size, len(QUERIES) + 0.12, fill=False, edgecolor=ORANGE, linewidth=2.4,
                                 zorder=5, clip_on=False))  # fmt: skip
    for tile in range(run.tiles):
        style: Any = {"color": BLACK, "weight": "bold"} if tile == tiles - 1 else {"color": DARK if tile < tiles
                                                                                    else "#aaaaaa"}  # fmt: skip
        axes.text((tile + 0.5) * run.size - 0.5, -0.95, f"tile {tile + 1}" if run.size > 2 else str(tile + 1),
                  fontsize=8.5, ha="center", va="center", **style)  # fmt: skip
    axes.set(xlim=(-0.5, TOKENS - 0.5), ylim=(len(QUERIES) - 0.5, -0.5))
    axes.set_axis_off()


def _draw_numbers(axes: Axes, run: TileRun, tiles: int, row: int) -> None:
    """Top and total of every query, and by what its sums have just shrunk."""
    now = run.sums[tiles]
    wrong = _wrong_queries(run, tiles)
    for x, title in ((0.55, "top"), (1.25, "total"), (1.42, "shrunk by")):
        axes.text(x, -0.95, title, fontsize=8.5, color=DARK, ha="left" if x == 1.42 else "right", va="center")
    for at in range(len(QUERIES)):
        colour, weight = ALARM if at in wrong else BLACK, "bold" if at == row else "normal"
        for x, number in ((0.55, now.top[at]), (1.25, now.total[at])):
            axes.text(x, at, _number(float(number)), fontsize=8.5, ha="right", va="center", color=colour, weight=weight)
        if tiles and run.raised(tiles, at):
            axes.text(1.42, at, f"▲ × {_shrink(run, tiles, at):.2g}", fontsize=8.5, va="center", color=BLACK,
                      weight=weight)  # fmt: skip
    wide = axes.get_position().width * _WIDTH
    axes.set(xlim=(0, wide), ylim=(len(QUERIES) - 0.5, -0.5))
    axes.set_axis_off()


def _draw_scores(axes: Axes, run: TileRun, tiles: int, row: int) -> None:
    """The query's scores, and the largest so far after each tile."""
    end, seen = tiles * run.size, run.scores[row].isfinite().nonzero().flatten().tolist()
    scores = run.scores[row].tolist()
    low, high = min(scores[token] for token in seen), max(scores[token] for token in seen)
    tops = [float(sums.top[row]) for sums in run.sums[: tiles + 1]]
    finite = [top for top in tops if math.isfinite(top)]
    low, high = min(low, *finite, high) if finite else low, max(high, *finite, low) if finite else high
    air = 0.12 * (high - low)
    for token in seen:
        look: Any = {"color": BLUE} if token < end else {"color": "white", "markeredgecolor": GREY}
        axes.plot([token], [scores[token]], marker="o", markersize=5, zorder=3, linestyle="none", **look)
        axes.plot([token] * 2, [low - air, scores[token]], color=BLUE if token < end else PALE, linewidth=1, zorder=2)
    for tile, top in enumerate(tops[1:]):
        if math.isfinite(top):
            span = [tile * run.size - 0.5, (tile + 1) * run.size - 0.5]
            axes.plot(span, [top] * 2, color=ORANGE, linewidth=2.4, zorder=4)
            if tile and math.isfinite(tops[tile]):
                axes.plot([span[0]] * 2, [tops[tile], top], color=ORANGE, linewidth=1.2, zorder=4)
    axes.set(xlim=(-0.5, TOKENS - 0.5), ylim=(low - air, high + air))
    axes.set_ylabel("score", fontsize=9)
    axes.set_xticks([])
    _borders(axes, run)


def _draw_totals(axes: Axes, run: TileRun, tiles: int, row: int) -> None:
    """The query's sum after each tile: what is left of the one before, what the tile adds, and what the fold says."""
    most = 1.0
    for tile in range(1, tiles + 1):
        before, now = run.sums[tile - 1], run.sums[tile]
        middle, wide = (tile - 0.5) * run.size - 0.5, 0.62 * run.size
        left, new = _parts(run, tile, row)
        axes.bar(middle, left, width=wide, color=ICE, edgecolor=BLUE, linewidth=0.8, zorder=2)
        axes.bar(middle, new, width=wide, bottom=left, color=ORANGE, hatch="....", edgecolor="white", linewidth=0,
                 zorder=2)  # fmt: skip
        if run.raised(tile, row):
            axes.bar(middle, float(before.total[row]), width=wide, fill=False, edgecolor=BLACK, linestyle=(0, (2, 2)),
                     linewidth=1.1, zorder=3)  # fmt: skip
        most = max(most, left + new, *(float(sums.total[row]) for sums in (before, now) if sums.total[row].isfinite()))
    for tile in range(1, tiles + 1):
        total, middle, wide = float(run.sums[tile].total[row]), (tile - 0.5) * run.size - 0.5, 0.62 * run.size
        colour = ALARM if row in _wrong_queries(run, tile) else BLACK
        level = total if math.isfinite(total) else 0.0
        axes.plot([middle - wide / 2, middle + wide / 2], [level] * 2, color=colour, linewidth=2, zorder=4)
        shown = [level, *(_parts(run, tile, row)[:1])] + (
            [float(run.sums[tile - 1].total[row])] if run.raised(tile, row) else []
        )
        above = max(each for each in [*shown, sum(_parts(run, tile, row))] if math.isfinite(each))
        axes.text(middle, above + 0.03 * most, _number(total), fontsize=8.5, ha="center", va="bottom", color=colour)
        if run.raised(tile, row):
            axes.text(middle, above + 0.17 * most, f"× {_shrink(run, tile, row):.2g}", fontsize=7.5, ha="center",
                      va="bottom", color=DARK)  # fmt: skip
    axes.set(xlim=(-0.5, TOKENS - 0.5), ylim=(0, 1.32 * most))
    axes.set_ylabel("total", fontsize=9)
    ticks = [token for token in range(TOKENS) if token == 0 or (token + 1) % 4 == 0]
    axes.set_xticks(ticks, [str(token + 1) for token in ticks])
    axes.set_xlabel("token", fontsize=9, labelpad=1)
    _borders(axes, run)


def _draw_output(axes: Axes, run: TileRun, tiles: int, row: int) -> None:
    """The query's mixed / total after these tiles, beside softmax over the tokens so far in one go."""
    got, wanted = run.sums[tiles].output[row], run.expected[tiles].output[row]
    for at in range(HEAD_DIM):
        number, right = float(got[at]), float(wanted[at])
        off = math.isfinite(right) and not abs(number - right) <= 1e-3
        if math.isfinite(number):
            axes.barh(at, max(-1.2, min(1.2, number)), height=0.62, color="white" if off else BLUE,
                      edgecolor=ALARM if off else BLUE, hatch="xxxx" if off else None, zorder=2)  # fmt: skip
        elif off or tiles:
            axes.text(1.18, at, _number(number), fontsize=9, ha="right", va="center", color=ALARM if off else DARK)
        if math.isfinite(right):
            axes.plot([right], [at], marker="D", markersize=5.5, color="white", markeredgecolor=BLACK, zorder=4)
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=1)
    axes.set(xlim=(-1.2, 1.2), ylim=(HEAD_DIM - 0.4, -0.6))
    axes.set_yticks(range(HEAD_DIM), [str(at + 1) for at in range(HEAD_DIM)])
    axes.set_ylabel("component", fontsize=9)
    axes.set_title(f"mixed / total of query {row + 1}", fontsize=9.5)
    axes.tick_params(axis="y", length=0)


def _borders(axes: Axes, run: TileRun) -> None:
    for tile in range(1, run.tiles):
        axes.axvline(tile * run.size - 0.5, color="#dddddd", linewidth=0.7, zorder=0)


def _draw_key(figure: Figure, bottom: float) -> None:
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor=ORANGE, linewidth=2, label="newest tile"),
        Line2D([], [], color=ORANGE, linewidth=2.4, label="top"),
        Patch(facecolor=ICE, edgecolor=BLUE, label="left of the sum before"),
        Patch(fill=False, edgecolor=BLACK, linestyle=(0, (2, 2)), label="before it shrank"),
        Patch(facecolor=ORANGE, hatch="....", edgecolor="white", linewidth=0, label="added by the tile"),
        Line2D([], [], color="white", marker="D", markeredgecolor=BLACK, label="softmax in one go"),
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / _WIDTH, bottom), ncols=len(handles),
                  fontsize=8.5, frameon=False, borderpad=0.3, columnspacing=1.3, handlelength=1.6)  # fmt: skip


# ---- numbers -----------------------------------------------------------------------------------------------------


def _weights(run: TileRun, tiles: int) -> torch.Tensor:
    """exp(score - top) with the fold's own top: [queries, tokens]."""
    return torch.exp(run.scores - run.sums[tiles].top.unsqueeze(-1))


def _shrink(run: TileRun, tile: int, row: int) -> float:
    """exp(old top - new top) of the fold's own tops; 0 before the first score."""
    change = float(run.sums[tile - 1].top[row] - run.sums[tile].top[row])
    return math.exp(min(change, 50.0)) if math.isfinite(change) else 0.0


def _parts(run: TileRun, tile: int, row: int) -> tuple[float, float]:
    """What should be left of the query's sum before this tile (from 1), and what the tile should add to it."""
    old, new = run.expected[tile - 1], run.expected[tile]
    change = float(old.top[row] - new.top[row])
    left = float(old.total[row]) * math.exp(change) if math.isfinite(change) else 0.0
    return left, float(new.total[row]) - left


def _wrong_queries(run: TileRun, tiles: int) -> set[int]:
    """The queries whose top or total is not what its definition says."""
    got, wanted = run.sums[tiles], run.expected[tiles]
    return {row for row in range(len(QUERIES)) if not _same(got, wanted, row)}


def _same(got: Sums, wanted: Sums, row: int) -> bool:
    pairs = ((got.top, wanted.top), (got.total, wanted.total))
    return all(bool(one[row] == two[row]) or math.isclose(one[row], two[row], rel_tol=1e-3, abs_tol=1e-3)
               for one, two in pairs)  # fmt: skip


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_attention_tiles(run: TileRun, tiles: int, query: int = 1) -> str:
    """The heading, the query's top and total after each tile, its output, and what is wrong."""
    row, lines = query - 1, _heading(run, tiles, query)
    for tile in range(1, tiles + 1):
        now = run.sums[tile]
        turn = f", what was summed before times {_shrink(run, tile, row):.2g}" if run.raised(tile, row) else ""
        lines.append(f"  tile {tile}: top {_number(float(now.top[row]))}, total {_number(float(now.total[row]))}{turn}")
    if tiles:
        got, wanted = run.sums[tiles].output[row], run.expected[tiles].output[row]
        equal = torch.allclose(got.double(), wanted, atol=1e-3, equal_nan=True)
        rest = "equal to" if equal else "and not"
        lines.append(f"mixed / total: {', '.join(_number(float(each)) for each in got)}; "
                     f"{rest} softmax(scores) @ values over these tokens")  # fmt: skip
    return "\n".join([*lines, *(run.problems if tiles >= run.wrong else ())])


def _heading(run: TileRun, tiles: int, query: int) -> list[str]:
    read = f"tokens 1 to {tiles * run.size}" if tiles else "nothing"
    now, row = run.sums[tiles], query - 1
    return [
        f"{tiles} of {run.tiles} tiles folded in: {read} of {TOKENS}",
        f"Query {query}, token {QUERIES[row] + 1}: top {_number(float(now.top[row]))}, "
        f"total {_number(float(now.total[row]))}",
    ]


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    shown = f"{value:.2f}" if abs(value) < 1000 else f"{value:.2g}"
    return shown.replace("-", "−") if shown.strip("-0.") else "0"
