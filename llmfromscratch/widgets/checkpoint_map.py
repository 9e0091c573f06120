"""A map of a checkpoint's bytes: a column for each block, as wide as it is big; in it its tensors, stacked.

Areas are exact: a tile's share of the map is the tensor's share of the file. A layer range narrower than the model
zooms in. What the map cannot place is shown, not dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from llmfromscratch.placement import format_bytes
from llmfromscratch.widgets import checkpoint_contents as contents
from llmfromscratch.widgets.checkpoint_contents import Entry
from llmfromscratch.widgets.controls import Choice, Control, Span
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ICE,
    NAVY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Look,
    first_that_fits,
    in_parameters,
    in_share,
    problem_space,
    text_on,
    write_problems,
)

COLOURINGS = ("kind", "dtype", "layer")
_KIND_LOOKS: dict[str, Look] = {
    contents.EMBEDDING: (GREEN, ""),
    "q": (NAVY, ""),
    "k": (BLUE, "//"),
    "v": (SKY, ""),
    "o": (ICE, "\\\\"),
    "gate": (VERMILION, ""),
    "up": (ORANGE, "//"),
    "down": (YELLOW, ""),
    contents.NORMS: (BLACK, ""),
    contents.HEAD: (PURPLE, ".."),
    contents.IGNORED: (GREY, "\\\\"),
    contents.UNKNOWN: ("white", "xxx"),
    contents.REST: (PALE, ""),
}
_DTYPE_LOOKS: tuple[Look, ...] = (
    (SKY, ""), (ORANGE, "//"), (BLACK, ""), (GREEN, "\\\\"), (YELLOW, ""), (PURPLE, ".."), (BLUE, "//"), (VERMILION, "")
)  # fmt: skip
_WIDTH, _LEFT, _MAP_WIDTH, _MAP_HEIGHT = 10.0, 0.8, 6.7, 3.3  # inches
_ABOVE, _BELOW = 0.85, 0.6
_THIN = 0.05
_WORDINGS = 7
_LAYER = "layer "
_SCALES = (
    ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")),
    ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")),
)


@dataclass(frozen=True)
class Tile:
    """One tensor's rectangle. x and width in the map's unit of size; y and height are shares of the column."""

    entry: Entry
    x: float
    y: float
    width: float
    height: float


def checkpoint_map(
    tensors: Any, *, rename: Callable[[str], str | None] | None = None, file_bytes: int | None = None
) -> FigureForm:
    """The map with its controls. tensors and rename are those of `checkpoint_contents.read_entries`.

    file_bytes: the file's size, so that the map shows also what no tensor covers; where the tensors know their files
    (a Checkpoint, StoredTensor), it is looked up.
    """
    if file_bytes is None:
        file_bytes = contents.bytes_of_files(tensors)
    entries = contents.read_entries(tensors, rename, file_bytes)
    numbers = contents.layer_numbers(entries)
    controls: list[Control] = [
        Choice("colour_by", "Colour by", {name: name for name in COLOURINGS}, "kind"),
        Choice("size", "Size", {name: name for name in contents.SIZES}, contents.SIZES[0]),
    ]
    if len(numbers) > 1:
        first, last = numbers[0], numbers[-1]
        controls.append(Span("layers", "Layers (narrow to zoom in)", first, last, (first, last)))

    def draw(**state: Any) -> Figure:
        return draw_checkpoint_map(entries, file_bytes=file_bytes, **state)

    def describe(**state: Any) -> str:
        return describe_checkpoint(entries, file_bytes=file_bytes, **state)

    return FigureForm(draw, describe, controls)


def select(entries: Sequence[Entry], layers: tuple[int, int] | None) -> list[Entry]:
    """All entries if the range is None or covers every layer, else those of the layers first to last, inclusive."""
    numbers = contents.layer_numbers(entries)
    if layers is None or not numbers or (layers[0] <= numbers[0] and layers[1] >= numbers[-1]):
        return list(entries)
    return [entry for entry in entries if isinstance(entry.block, int) and layers[0] <= entry.block <= layers[1]]


def lay_out(entries: Sequence[Entry], size: str = contents.SIZES[0]) -> list[Tile]:
    """The tiles, block after block: embedding, layers, norm, head, then what has no place. Areas are exact."""
    after = (contents.FINAL_NORM, contents.HEAD, contents.IGNORED, contents.UNKNOWN, contents.REST)
    order = [contents.EMBEDDING, *contents.layer_numbers(entries), *after]
    tiles, x = [], 0.0
    for block in order:
        column = [entry for entry in entries if entry.block == block]
        column.sort(key=lambda entry: (contents.KINDS.index(entry.kind), entry.name))
        width = sum(entry.measure(size) for entry in column)
        y = 0.0
        for entry in column:
            height = entry.measure(size) / width if width else 0.0
            tiles.append(Tile(entry, x, y, width, height))
            y += height
        x += width
    return [tile for tile in tiles if tile.height]


def draw_checkpoint_map(
    entries: Sequence[Entry],
    colour_by: str = "kind",
    size: str = contents.SIZES[0],
    layers: tuple[int, int] | None = None,
    file_bytes: int | None = None,
) -> Figure:
    """The map as a figure. colour_by: one of COLOURINGS; size: one of SIZES; layers: first and last to show."""
    shown = select(entries, layers)
    tiles = lay_out(shown, size)
    total = sum(entry.measure(size) for entry in shown)
    if not total:
        raise ValueError("There is nothing to draw: no tensor here has any size.")
    problems = contents.find_problems(entries, file_bytes)
    below = _BELOW + problem_space(problems)
    figure = Figure(figsize=(_WIDTH, _ABOVE + _MAP_HEIGHT + below))
    axes = _inch_axes(figure, _LEFT, below, _MAP_WIDTH, _MAP_HEIGHT)
    looks, groups = _groups(shown, colour_by)
    labels = _labels(tiles, size, total)
    for tile, label in zip(tiles, labels, strict=True):
        _draw_tile(axes, tile, looks[groups[tile.entry.source]], label)
    _label_axes(axes, tiles, size, total)
    _draw_legend(axes, shown, size, colour_by)
    _draw_title(figure, entries, shown, size)
    write_problems(figure, problems, _LEFT)
    return figure


def describe_checkpoint(
    entries: Sequence[Entry],
    colour_by: str = "kind",
    size: str = contents.SIZES[0],
    layers: tuple[int, int] | None = None,
    file_bytes: int | None = None,
) -> str:
    """The map in a few lines: what is shown, its parts in the present colouring, and what looks wrong."""
    shown = select(entries, layers)
    looks, groups = _groups(shown, colour_by)
    parts = [f"{name} {_amount(part, size)}" for name, part in _named_sums(_sums(shown, size, groups), looks)]
    tensors = [entry for entry in shown if entry.kind != contents.REST]
    what = f"{_range(shown)}: " if len(shown) < len(entries) else ""
    lines = [
        f"{what}{len(tensors):,} tensors, {sum(entry.parameters for entry in tensors):,} parameters, "
        f"{sum(entry.nbytes for entry in tensors):,} bytes in the file",
        f"{colour_by.capitalize()}, in {size}: {', '.join(parts)}",
    ]
    problems = contents.find_problems(entries, file_bytes)
    return "\n".join([*lines, *(problems or ["Every tensor has a canonical name and the bytes that its shape takes."])])


def _groups(entries: Sequence[Entry], colour_by: str) -> tuple[dict[str, Look], dict[str, str]]:
    """The looks of the legend's groups in their order, and the group of each tensor (by its name in the file)."""
    if colour_by == "kind":
        groups = {entry.source: entry.kind for entry in entries}
        return {kind: _KIND_LOOKS[kind] for kind in contents.KINDS if kind in groups.values()}, groups
    if colour_by == "dtype":
        groups = {entry.source: entry.kind if entry.kind == contents.REST else entry.dtype for entry in entries}
        sums = _sums(entries, contents.SIZES[0], groups)
        names = sorted(sums.keys() - {contents.REST}, key=lambda name: -sums[name])
        looks = {name: _DTYPE_LOOKS[index % len(_DTYPE_LOOKS)] for index, name in enumerate(names)}
        return looks | ({contents.REST: _KIND_LOOKS[contents.REST]} if contents.REST in sums else {}), groups
    groups = {entry.source: _title(entry.block) for entry in entries}
    numbers = contents.layer_numbers(entries)
    looks = {kind: _KIND_LOOKS[kind] for kind in (contents.EMBEDDING,) if kind in groups.values()}
    for place, number in enumerate(numbers):
        looks[_title(number)] = (colormaps["cividis"](place / max(1, len(numbers) - 1)), "")
    others = {contents.FINAL_NORM: contents.NORMS} | {kind: kind for kind in contents.KINDS[-4:]}
    return looks | {block: _KIND_LOOKS[kind] for block, kind in others.items() if block in groups.values()}, groups


def _sums(entries: Sequence[Entry], size: str, groups: Mapping[str, str]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for entry in entries:
        group = groups[entry.source]
        sums[group] = sums.get(group, 0) + entry.measure(size)
    return sums


def _inch_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def _draw_tile(axes: Axes, tile: Tile, look: Look, label: str) -> None:
    colour, hatch = look
    edge = GREY if tile.entry.kind == contents.UNKNOWN else "white"  # also the colour of the hatch
    corner = (tile.x, tile.y)
    line = 0.5 if tile.height * _MAP_HEIGHT > _THIN else 0  # a thin tile would be nothing but its edges
    axes.add_patch(
        Rectangle(corner, tile.width, tile.height, facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=line)
    )
    if tile.entry.problem and tile.entry.kind != contents.UNKNOWN:  # the unknown already have a look of their own
        axes.add_patch(Rectangle(corner, tile.width, tile.height, fill=False, edgecolor=ALARM, linewidth=2.5, zorder=3))
    if label:
        centre = tile.x + tile.width / 2, tile.y + tile.height / 2
        axes.text(
            *centre, label, ha="center", va="center", fontsize=9, color=text_on(colour), parse_math=False, zorder=4,
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.0} if hatch else None,
        )  # fmt: skip


def _labels(tiles: Sequence[Tile], size: str, total: float) -> list[str]:
    """A text for each tile, or "". The tiles of one column that are high enough for a line get the same wording."""
    texts = {tile.entry.source: _tile_texts(tile.entry, size) for tile in tiles}
    inches = {tile.entry.source: (tile.width / total * _MAP_WIDTH, tile.height * _MAP_HEIGHT) for tile in tiles}
    wordings: dict[int | str, list[int]] = {}
    for block in {tile.entry.block for tile in tiles}:
        column = [tile.entry.source for tile in tiles if tile.entry.block == block]
        column = [source for source in column if first_that_fits(["-"], 1.0, inches[source][1])]
        wordings[block] = [
            wording for wording in range(_WORDINGS)
            if all(first_that_fits([texts[source][wording]], inches[source][0], _MAP_HEIGHT) for source in column)
        ]  # fmt: skip
    return [
        first_that_fits(
            [texts[tile.entry.source][wording] for wording in wordings[tile.entry.block]], *inches[tile.entry.source]
        )
        for tile in tiles
    ]


def _tile_texts(entry: Entry, size: str) -> list[str]:
    """The wordings of a tile's label, the most telling first."""
    mark, amount = "! " if entry.problem else "", _amount(entry.measure(size), size)
    about = f"{entry.dtype} [{', '.join(f'{length:,}' for length in entry.shape)}]"
    name = mark + (entry.source if entry.kind == contents.UNKNOWN else entry.name)
    short = mark + (entry.name.split(".")[-2] if entry.kind == contents.NORMS else entry.kind)
    if entry.kind == contents.REST:
        return [f"{entry.name}\n{amount}", entry.name, *["rest"] * (_WORDINGS - 2)]
    return [
        f"{name}\n{about}\n{amount}", f"{name}  {about}  {amount}", f"{short}\n{about}\n{amount}",
        f"{short}  {about}  {amount}", f"{short} {amount}", f"{short}\n{amount}", short,
    ]  # fmt: skip


def _label_axes(axes: Axes, tiles: Sequence[Tile], size: str, total: float) -> None:
    axes.set(xlim=(0, total), ylim=(0, 1))
    scale, unit = next((step for step in _SCALES[size == "parameters"] if total >= step[0]), (1, size.split()[0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:,g}"))
    axes.set_xlabel(f"{size}, block beside block ({unit})")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axes.set_ylabel("share of the block")
    columns = {tile.entry.block: (tile.x, tile.width) for tile in tiles}
    inch = total / _MAP_WIDTH
    layers = [block for block in columns if isinstance(block, int)]
    narrowest = min((columns[block][1] for block in layers), default=inch)
    every = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * narrowest >= 0.26 * inch), 1000)
    for block, (x, width) in columns.items():
        fits = block % every == 0 if isinstance(block, int) else width >= 0.09 * len(block) * inch
        if fits:
            axes.text(x + width / 2, 1.02, str(block), ha="center", va="bottom", fontsize=9)
    if layers:
        x = columns[layers[0]][0]
        axes.text(x, 1.075, "layer", ha="left", va="bottom", fontsize=9)


def _draw_legend(axes: Axes, shown: Sequence[Entry], size: str, colour_by: str) -> None:
    looks, groups = _groups(shown, colour_by)
    sums = _sums(shown, size, groups)
    whole = sum(sums.values())
    names = [name for name in looks if sums[name]]
    layers = [name for name in names if name.startswith(_LAYER)]
    if len(layers) > 6:  # a few of them show the scale of colours
        kept = {layers[round(step * (len(layers) - 1) / 5)] for step in range(6)}
        names = [name for name in names if name in kept or not name.startswith(_LAYER)]
    patches = [
        Patch(
            facecolor=looks[name][0], hatch=looks[name][1], edgecolor=GREY if name == contents.UNKNOWN else "white",
            label=f"{name}  {_amount(sums[name], size)}, {in_share(sums[name], whole)}",
        )
        for name in names
    ]  # fmt: skip
    # from the bottom up, as the tiles are stacked
    axes.legend(
        handles=patches[::-1], title=f"{colour_by.capitalize()}: {size}", alignment="left", loc="upper left",
        bbox_to_anchor=(1.02, 1.02), borderaxespad=0, borderpad=0, handleheight=1.3, handlelength=1.8, labelspacing=0.4,
        fontsize=9, title_fontsize=10, frameon=False,
    )  # fmt: skip


def _draw_title(figure: Figure, entries: Sequence[Entry], shown: Sequence[Entry], size: str) -> None:
    wide, high = figure.get_size_inches()
    tensors = [entry for entry in shown if entry.kind != contents.REST]
    part, whole = (sum(entry.measure(size) for entry in some) for some in (tensors, entries))
    unit = "parameters" if size == "parameters" else size.removeprefix("bytes ")
    what = f"{len(tensors):,} tensors, {_amount(part, size)} {unit}"
    if len(shown) < len(entries):
        what = f"{_range(shown)}: {what}, {in_share(part, whole)} of the checkpoint"
        _draw_place(_inch_axes(figure, _LEFT + 1.02 * _MAP_WIDTH, high - 0.3, 2.2, 0.12), entries, shown, size)
    figure.text(_LEFT / wide, 1 - 0.24 / high, what, fontsize=11, va="center")


def _draw_place(axes: Axes, entries: Sequence[Entry], shown: Sequence[Entry], size: str) -> None:
    """A small bar of the whole checkpoint, in which the part that the map shows is black."""
    inside = {entry.source for entry in shown}
    tiles = lay_out(entries, size)
    end = tiles[-1].x + tiles[-1].width
    part = [tile for tile in tiles if tile.entry.source in inside]
    axes.add_patch(Rectangle((0, 0), end, 1, facecolor=PALE))
    axes.add_patch(Rectangle((part[0].x, 0), part[-1].x + part[-1].width - part[0].x, 1, facecolor=BLACK))
    axes.set(xlim=(0, end), ylim=(0, 1))
    axes.set_axis_off()
    axes.text(0, -0.3, "its place in the whole", fontsize=9, va="top")


def _named_sums(sums: Mapping[str, int], order: Iterable[str]) -> list[tuple[str, int]]:
    """What to call each group, and its size; layers of the same size that follow each other are put together."""
    runs: list[tuple[list[str], int]] = []
    for name in order:
        last = runs[-1] if runs else ([""], 0)
        if name.startswith(_LAYER) and last[0][0].startswith(_LAYER) and last[1] == sums[name]:
            last[0].append(name)
        elif sums[name]:
            runs.append(([name], sums[name]))
    return [
        (
            f"each of {names[0].replace(_LAYER, 'layers ')} to {names[-1].removeprefix(_LAYER)}"
            if len(names) > 1
            else names[0],
            size,
        )
        for names, size in runs
    ]


def _title(block: int | str) -> str:
    return f"{_LAYER}{block}" if isinstance(block, int) else block


def _range(entries: Sequence[Entry]) -> str:
    numbers = contents.layer_numbers(entries)
    return f"Layer {numbers[0]}" if len(numbers) == 1 else f"Layers {numbers[0]} to {numbers[-1]}"


def _amount(count: float, size: str) -> str:
    return in_parameters(count) if size == "parameters" else format_bytes(count)
