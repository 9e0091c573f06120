"""The pages of a cache at one moment of a run: who holds which block, the block tables, the free list, the waste.

Drawn from a `page_history.PageHistory`, which an allocator or a whole cache has left behind; a block that two requests
claim without sharing it, one that is lost, or one that is free and in use, is framed and named.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened
from llmfromscratch.widgets.page_history import PageHistory, Snapshot
from llmfromscratch.widgets.style import ALARM, BLACK, GREY, PALE, in_share, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted

# all light enough for black letters; the letters tell the requests apart, the colours help
_COLOURS = ("#56B4E9", "#E69F00", "#6CCBAE", "#F0E442", "#D9A0C2", "#F2A27A", "#B9C2F0", "#C9B38C")
_WIDTH, _MARGIN, _GRID_WIDTH, _SIDE = 10.0, 0.3, 5.6, 6.3  # inches
_TOP, _ROW, _BOX, _BOXES, _TABLES = 0.62, 0.28, 0.235, 10, 8
_WASTE_HIGH, _BAR_LEFT, _BAR_WIDTH = 1.25, 2.6, 4.9
_SOFT, _HATCH, _UNUSED = "#555555", "#b5b5b5", "////"


def page_grid(history: PageHistory, step: int | None = None) -> FigureForm:
    """The grid with its controls: the moment, and a request whose table is followed through the blocks.

    history: as `page_runs.record_pages` or `page_runs.record_allocations` give it. step: where the slider starts, the
    number of an event; the last one if not given, or if the run ended before.
    """
    last = len(history.snapshots) - 1
    requests = {"nobody": "", **{f"request {name}": name for name in history.requests}}
    controls: list[Control] = [
        Slider("step", "After event", 0, last, last if step is None else min(step, last)),
        Choice("follow", "Follow the table of", requests, ""),
    ]

    def draw(step: int, follow: str) -> Figure:
        return draw_page_grid(history, step, follow)

    def describe(step: int, follow: str) -> str:
        return describe_page_grid(history, step, follow)

    return FigureForm(draw, describe, controls)


def draw_page_grid(history: PageHistory, step: int, follow: str = "") -> Figure:
    """The pages after an event, counted from 0. follow: a request whose blocks are joined in the order of its table."""
    shot = history.snapshots[step]
    problems = [in_font(problem) for problem in _few(shot.problems)]
    columns = _columns(history.num_blocks)
    rows = -(-history.num_blocks // columns)
    cell = _GRID_WIDTH / columns, min(0.7, 4.2 / rows)
    grid_bottom = _TOP + max(0.8 + rows * cell[1], 3.6)
    height = grid_bottom + _WASTE_HIGH + problem_space(problems)
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    title = _title(history, step) + (f"; {follow} does not run now" if follow and follow not in shot.tables else "")
    axes.text(_MARGIN, 0.26, shortened(title, _WIDTH - 2 * _MARGIN, 11), fontsize=11, va="center", parse_math=False)
    _draw_blocks(axes, history, shot, columns, cell)
    if follow in shot.tables:
        _draw_path(axes, shot.tables[follow], columns, cell)
    _draw_legend(axes, _TOP + 0.25 + rows * cell[1] + 0.17)
    _draw_tables(axes, history, shot, follow)
    _draw_waste(axes, grid_bottom, history, shot)
    write_problems(figure, problems, _MARGIN)
    return figure


def describe_page_grid(history: PageHistory, step: int, follow: str = "") -> str:
    """The moment in words: the tables, the free and the kept blocks, the waste, and what does not add up."""
    shot = history.snapshots[step]
    names = [follow] if follow else list(shot.tables)
    tables = [
        f"{name}: {counted(shot.lengths[name], 'token')} in blocks {_listed(shot.tables[name])}"
        if name in shot.tables else f"{name} does not run now"
        for name in names
    ]  # fmt: skip
    shared = [f"{block} ({' and '.join(name for name, _ in those)})" for block, those in shot.holders().items()
              if len(those) > 1]  # fmt: skip
    return "\n".join([
        _title(history, step),
        *tables,
        f"Shared blocks: {', '.join(shared) or 'none'}",
        f"Free, next first: {_listed(shot.free)}; kept, oldest first: {_listed(shot.kept)}",
        *waste(history, shot).sentences(history),
        *(_few(shot.problems) or ["Every block is accounted for."]),
    ])  # fmt: skip


class Waste:
    """Slots, each for one token, that are taken and hold nothing: in pages, and if every request had a static row."""

    def __init__(self, allocated: int, used: int, static: int, tokens: int):
        self.allocated, self.used, self.static, self.tokens = allocated, used, static, tokens

    def sentences(self, history: PageHistory) -> list[str]:
        """Both in numbers."""
        unused, static_unused = self.allocated - self.used, self.static - self.tokens
        return [
            f"Pages: {unused} of {counted(self.allocated, 'allocated slot')} unused: "
            f"{in_share(unused, self.allocated)} waste",
            f"Static rows of {history.max_length}: {static_unused} of {counted(self.static, 'slot')} would be unused: "
            f"{in_share(static_unused, self.static)} waste",
        ]


def waste(history: PageHistory, shot: Snapshot) -> Waste:
    """The waste at one moment. A shared block counts once in pages; a static row holds one request alone."""
    filled = shot.filled(history.block_size)
    return Waste(
        len(filled) * history.block_size, sum(filled.values()),
        len(shot.tables) * history.max_length, sum(shot.lengths.values()),
    )  # fmt: skip


def _columns(num_blocks: int) -> int:
    return 8 if num_blocks <= 48 else 12


def _title(history: PageHistory, step: int) -> str:
    return f"After event {step} of {len(history.snapshots) - 1}: {in_font(history.snapshots[step].happened)}"


def _few(problems: Sequence[str]) -> list[str]:
    rest = len(problems) - 3
    return [*problems[:3], *([f"And {counted(rest, 'more fault')}."] if rest > 0 else [])]


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks)) or "none"


def _colour(history: PageHistory, request: str) -> str:
    return _COLOURS[history.requests.index(request) % len(_COLOURS)]


def _corner(block: int, columns: int, cell: tuple[float, float]) -> tuple[float, float]:
    return _MARGIN + block % columns * cell[0], _TOP + 0.25 + block // columns * cell[1]


def _draw_blocks(
    axes: Axes, history: PageHistory, shot: Snapshot, columns: int, cell: tuple[float, float]
) -> None:  # fmt: skip
    size = history.block_size
    heading = f"{history.num_blocks} blocks of {size} slots, each for a token; A2: entry 2 of A's table"
    axes.text(_MARGIN, _TOP, heading, fontsize=10, va="center")
    holders, filled = shot.holders(), shot.filled(size)
    for block in range(history.num_blocks):
        x, y = _corner(block, columns, cell)
        inner = (x + 0.03, y + 0.03, cell[0] - 0.06, cell[1] - 0.06)
        if block in holders:
            _draw_held(axes, history, inner, holders[block], filled[block] / size)
        else:
            _draw_idle(axes, inner, "kept" if block in shot.kept else "" if block in shot.free else "lost")
        axes.text(x + 0.07, y + 0.07, str(block), fontsize=6.5, color=BLACK if block in holders else _SOFT, va="top",
                  zorder=5)  # fmt: skip
        if block in shot.wrong:
            axes.add_patch(Rectangle(inner[:2], *inner[2:], fill=False, edgecolor=ALARM, linewidth=2.8, zorder=6))
            axes.text(x + cell[0] - 0.09, y + 0.08, "!", fontsize=11, color=ALARM, weight="bold", ha="right", va="top",
                      zorder=7)  # fmt: skip


def _draw_held(
    axes: Axes, history: PageHistory, box: tuple[float, float, float, float], those: Sequence[tuple[str, int]],
    share: float,
) -> None:  # fmt: skip
    """A block in use, filled as far as it holds tokens; a band for each of its requests, a thick frame if several."""
    x, y, wide, high = box
    axes.add_patch(Rectangle((x, y), wide, high, facecolor="white", hatch=_UNUSED, edgecolor=_HATCH, linewidth=0))
    shown = those[:3]
    band = high / len(shown)
    for number, (request, place) in enumerate(shown):
        top = y + number * band
        axes.add_patch(
            Rectangle((x, top), wide * share, band, facecolor=_colour(history, request), linewidth=0, zorder=2)
        )
        more = f" +{len(those) - 3}" if len(those) > 3 and number == 2 else ""
        size = 11 if len(shown) == 1 and wide > 0.5 else 8
        between = "·" if request[-1:].isdigit() else ""
        label = f"{shortened(request, wide - 0.24, size)}{between}{place}{more}"
        _label(axes, x + wide / 2 + 0.04, top + band / 2 + (0.03 if len(shown) == 1 else 0), label, size)
    edge, line = (BLACK, 2.0) if len(those) > 1 else (GREY, 0.8)
    axes.add_patch(Rectangle((x, y), wide, high, fill=False, edgecolor=edge, linewidth=line, zorder=4))


def _label(axes: Axes, x: float, y: float, text: str, size: float) -> None:
    axes.text(
        x, y, text, fontsize=size, weight="bold", ha="center", va="center", zorder=5, parse_math=False,
        bbox={"facecolor": "white", "alpha": 0.55, "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip


def _draw_idle(axes: Axes, box: tuple[float, float, float, float], word: str) -> None:
    """A block that nobody holds: free, kept for what is in it (word: "kept"), or "lost"."""
    x, y, wide, high = box
    look: Any = (
        {"facecolor": PALE, "hatch": "..."} if word == "kept" else {"facecolor": "white", "linestyle": (0, (3, 3))}
    )
    axes.add_patch(Rectangle((x, y), wide, high, edgecolor=GREY, linewidth=0.8, **look))
    if word and high > 0.3:
        colour = BLACK if word == "kept" else ALARM
        axes.text(x + wide / 2, y + high / 2 + 0.03, word, fontsize=8, color=colour, ha="center", va="center", zorder=5,
                  bbox={"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1})  # fmt: skip


def _draw_path(axes: Axes, table: Sequence[int], columns: int, cell: tuple[float, float]) -> None:
    """Arrows from block to block, in the lower part of the cells, where no text stands."""
    places = [(x + cell[0] / 2, y + 0.86 * cell[1]) for x, y in (_corner(block, columns, cell) for block in table)]
    look: Any = {"arrowstyle": "-|>", "color": BLACK, "linewidth": 1.4, "shrinkA": 3, "shrinkB": 3}
    for number, (start, end) in enumerate(pairwise(places)):
        bend = 0.12 if number % 2 else -0.12
        axes.annotate("", end, start, arrowprops={**look, "connectionstyle": f"arc3,rad={bend}"}, zorder=8)
    for x, y in places:
        axes.plot([x], [y], marker="o", markersize=4, color=BLACK, zorder=8)


def _draw_legend(axes: Axes, y: float) -> None:
    """How the four kinds of cells look."""
    boxes = [(x, y, 0.26, 0.17) for x in (_MARGIN + 0.03, _MARGIN + 1.63, _MARGIN + 3.28, _MARGIN + 4.28)]
    axes.add_patch(Rectangle(boxes[0][:2], 0.26, 0.17, facecolor="white", hatch=_UNUSED, edgecolor=_HATCH, linewidth=0))
    axes.add_patch(Rectangle(boxes[0][:2], 0.14, 0.17, facecolor=_COLOURS[0], linewidth=0, zorder=2))
    axes.add_patch(Rectangle(boxes[0][:2], 0.26, 0.17, fill=False, edgecolor=GREY, linewidth=0.8, zorder=4))
    axes.add_patch(Rectangle(boxes[1][:2], 0.26, 0.17, facecolor=_COLOURS[0], edgecolor=BLACK, linewidth=2))
    axes.add_patch(Rectangle((boxes[1][0], y + 0.085), 0.26, 0.085, facecolor=_COLOURS[1], linewidth=0))
    axes.add_patch(Rectangle(boxes[1][:2], 0.26, 0.17, fill=False, edgecolor=BLACK, linewidth=2, zorder=4))
    _draw_idle(axes, boxes[2], "")
    _draw_idle(axes, boxes[3], "kept")
    for box, word in zip(boxes, ("held, partly filled", "held by several", "free", "kept for a hit"), strict=True):
        axes.text(box[0] + 0.34, y + 0.09, word, fontsize=8.5, va="center")


def _draw_tables(axes: Axes, history: PageHistory, shot: Snapshot, follow: str) -> None:
    """The block tables, a line for each request, and beneath them the free list and the kept blocks."""
    axes.text(_SIDE, _TOP, "block tables" if shot.tables else "no block tables: nobody runs", fontsize=10, va="center")
    y = _TOP + 0.25
    for request in list(shot.tables)[:_TABLES]:
        _draw_table(axes, y, request, history, shot, request == follow)
        y += _ROW
    if len(shot.tables) > _TABLES:
        axes.text(_SIDE, y + 0.08, f"and {len(shot.tables) - _TABLES} more", fontsize=8.5, va="center")
        y += 0.2
    y += 0.15
    for title, blocks in (("free list, next first", shot.free), ("kept, oldest first", shot.kept)):
        axes.text(_SIDE, y + 0.08, f"{title}: {counted(len(blocks), 'block')}", fontsize=9, va="center")
        lines = textwrap.wrap("  ".join(map(str, blocks)), 54)
        lines = [lines[0], lines[1] + " …"] if len(lines) > 2 else lines
        axes.text(_SIDE, y + 0.2, "\n".join(lines), fontsize=8, va="top", color=_SOFT, linespacing=1.3)
        y += 0.32 + 0.16 * max(1, len(lines))


def _draw_table(axes: Axes, y: float, request: str, history: PageHistory, shot: Snapshot, followed: bool) -> None:
    """One request: its letter, its tokens, its blocks in order, as many as there is room for."""
    colour, line, middle = _colour(history, request), 2.2 if followed else 0.6, y + 0.115
    axes.add_patch(Rectangle((_SIDE, y), 0.3, 0.23, facecolor=colour, edgecolor=BLACK, linewidth=line))
    style: Any = {"fontsize": 8, "va": "center", "zorder": 4}
    name = shortened(request, 0.26, 9)
    axes.text(_SIDE + 0.15, middle, name, ha="center", weight="bold", parse_math=False, **{**style, "fontsize": 9})
    axes.text(_SIDE + 0.96, middle, counted(shot.lengths[request], "token"), ha="right", **style)
    table = shot.tables[request]
    few = table if len(table) <= _BOXES else table[: _BOXES - 1]
    x = _SIDE + 1.04
    for block in few:
        wrong = block in shot.wrong
        look: Any = {"edgecolor": ALARM, "linewidth": 1.8} if wrong else {"edgecolor": GREY, "linewidth": 0.7}
        axes.add_patch(Rectangle((x, y), _BOX, 0.23, facecolor="white", zorder=2 + wrong, **look))
        axes.text(x + _BOX / 2, middle, str(block), ha="center", **style)
        x += _BOX
    if len(few) < len(table):
        axes.text(x + 0.05, middle, f"+{len(table) - len(few)}", **style)


def _draw_waste(axes: Axes, top: float, history: PageHistory, shot: Snapshot) -> None:
    """Two bars in slots: what is in use, and what is taken for nothing; one scale for the whole run."""
    now = waste(history, shot)
    whole = max([1, *(max(one.static, one.allocated) for one in (waste(history, s) for s in history.snapshots))])
    scale = _BAR_WIDTH / whole
    axes.text(_MARGIN, top + 0.05, "waste: slots that are taken and hold no token (hatched)", fontsize=10, va="center")
    bars = (("in pages", now.allocated, now.used), (f"in static rows of {history.max_length}", now.static, now.tokens))
    for number, (word, taken, used) in enumerate(bars):
        y = top + 0.25 + 0.36 * number
        axes.text(_BAR_LEFT - 0.12, y + 0.13, word, fontsize=9, ha="right", va="center")
        axes.add_patch(Rectangle((_BAR_LEFT, y), taken * scale, 0.26, facecolor="white", hatch=_UNUSED,
                                 edgecolor=_HATCH, linewidth=0))  # fmt: skip
        axes.add_patch(Rectangle((_BAR_LEFT, y), used * scale, 0.26, facecolor="#0B3C5D", linewidth=0, zorder=2))
        axes.add_patch(
            Rectangle((_BAR_LEFT, y), taken * scale, 0.26, fill=False, edgecolor=GREY, linewidth=0.8, zorder=3)
        )
        said = (
            f"{taken - used} of {counted(taken, 'slot')}: {in_share(taken - used, taken)}" if taken else "nothing taken"
        )
        axes.text(_BAR_LEFT + taken * scale + 0.12, y + 0.13, said, fontsize=9, va="center")
