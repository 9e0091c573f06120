"""The frontier of size, speed and damage: every variant of a model, and those that no other one makes pointless.

To the left, megabytes against damage; to the right, tokens a second. On the line are the variants of which none is at
least as small (as fast) with no more damage; the others are pale. A budget of megabytes names the best that fits in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from llmfromscratch.evaluation import Table, Variant, dominated
from llmfromscratch.widgets.controls import Choice, Control, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.style import BLACK, GREY, ICE, NAVY, ORANGE, VERMILION


class Measure(NamedTuple):
    """A way to count damage: in words, its value for a variant (None: not measured), and the value as text."""

    words: str
    of: Callable[[Variant], float | None]
    shown: Callable[[float], str]


MEASURES: Mapping[str, Measure] = {
    "KL": Measure("KL (nats a token)", lambda each: each.kl, lambda x: "0" if x == 0 else f"{x:.2g}"),
    "top-1": Measure("tokens with another top choice (%)", lambda each: _missing(each.top1), lambda x: f"{x:.2g} %"),
    "perplexity": Measure("perplexity", lambda each: each.perplexity, lambda x: f"{x:.4g}"),
    "quiz": Measure("wrong answers in the quiz (%)", lambda each: _missing(each.quiz), lambda x: f"{x:.0f} %"),
}
SCALES = {"logarithmic": True, "linear": False}
_WIDTH, _HIGH, _TOP, _BELOW, _LEFT, _GAP, _RIGHT = 10.0, 3.9, 0.86, 0.98, 0.85, 0.35, 0.2  # inches
_PLOT = (_WIDTH - _LEFT - _GAP - _RIGHT) / 2
_LINE = 0.18  # inches from one label to the next
_DARK, _FAINT = "#555555", "#767676"


def _missing(share: float | None) -> float | None:
    return None if share is None else 100 * (1 - share)


def frontier(variants: Iterable[Variant], *, damage: str = "KL", log: bool = True, budget: float = 0) -> FigureForm:
    """The figure with its controls: how damage is counted, on which scale, and a budget in megabytes.

    variants: `evaluation.Variant`, all that there are. damage: of MEASURES; only what was measured for two variants at
    least can be chosen. budget: 0, or the size of a variant in megabytes, rounded up.
    """
    found = Table(variants).variants
    ways = [name for name, way in MEASURES.items() if sum(way.of(each) is not None for each in found) >= 2]
    if not ways:
        raise ValueError("A frontier needs two variants at least whose damage was measured; see evaluation.measure.")
    sizes = sorted({math.ceil(each.bytes / 1e6) for each in found})
    controls: list[Control] = [
        Choice("damage", "Damage", {MEASURES[name].words: name for name in ways}, damage),
        Choice("log", "Scale of damage", dict(SCALES), log),
        Stops("budget", "Budget", {"none": 0} | {f"{size:,} MB": size for size in sizes}, budget),
    ]
    return FigureForm(
        lambda damage, log, budget: draw_frontier(found, damage, log, budget),
        lambda damage, log, budget: describe_frontier(found, damage, budget),
        controls,
    )


class Point(NamedTuple):
    """A variant in one of the two plots. above: who dominates it, or None."""

    name: str
    x: float
    harm: float
    above: str | None


def points_of(variants: Sequence[Variant], damage: str, speed: bool) -> list[Point]:
    """The variants that have both figures: megabytes (or tokens a second) and damage."""
    found = []
    for each in variants:
        harm, x = MEASURES[damage].of(each), each.tokens_per_second if speed else each.bytes / 1e6
        if harm is not None and x is not None:
            found.append((each.name, x, harm))
    above = dominated([(name, -x if speed else x, harm) for name, x, harm in found])
    return [Point(name, x, harm, above[name]) for name, x, harm in found]


def best_within(variants: Sequence[Variant], damage: str, budget: float) -> Point | None:
    """The variant with the least damage in so many megabytes, the smallest of equals; None where nothing fits."""
    fitting = [point for point in points_of(variants, damage, speed=False) if math.ceil(point.x) <= budget]
    return min(fitting, key=lambda point: (point.harm, point.x)) if fitting else None


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_frontier(variants: Sequence[Variant], damage: str = "KL", log: bool = True, budget: float = 0) -> Figure:
    """Size against damage, and speed against damage; damage: of MEASURES, on a logarithmic scale or a linear one."""
    height = _TOP + _HIGH + _BELOW
    figure = Figure(figsize=(_WIDTH, height))
    best = best_within(variants, damage, budget) if budget else None
    both = [points_of(variants, damage, speed) for speed in (False, True)]
    harms = [point.harm for points in both for point in points]
    for place, points in enumerate(both):
        left = _LEFT + place * (_PLOT + _GAP)
        axes = figure.add_axes((left / _WIDTH, _BELOW / height, _PLOT / _WIDTH, _HIGH / height))
        floor = _set_axes(axes, points, harms, MEASURES[damage], log, speed=bool(place))
        if points:
            _draw_points(axes, points, floor, best, speed=bool(place))
        else:
            axes.text(0.5, 0.5, "no speed was measured", ha="center", va="center", color=_DARK,
                      transform=axes.transAxes)  # fmt: skip
        if budget and not place:
            axes.axvspan(budget, axes.get_xlim()[1], color="#f1f1f1", zorder=0)
            axes.axvline(budget, color=GREY, linewidth=1, linestyle=(0, (3, 2)), zorder=1)
    title, said = _headings(variants, damage, budget)
    figure.text(0.15 / _WIDTH, 1 - 0.26 / height, shortened(title, _WIDTH - 0.3, 11), fontsize=11, va="center",
                parse_math=False)  # fmt: skip
    figure.text(0.15 / _WIDTH, 1 - 0.51 / height, shortened(said, _WIDTH - 0.3, 9.5), fontsize=9.5, va="center",
                color=_DARK, parse_math=False)  # fmt: skip
    _draw_key(figure, bool(budget), best is not None)
    return figure


def _set_axes(
    axes: Axes, points: Sequence[Point], harms: Sequence[float], way: Measure, log: bool, speed: bool
) -> float:
    """Sets limits and ticks. Returns where damage of 0 is drawn: a logarithmic scale has no place for it."""
    positive = [harm for harm in harms if harm > 0] or [1.0]
    low, high, floor = min(positive), max(positive), 0.0
    if log:
        nothing = min(harms, default=1.0) <= 0
        floor = low / max(3.0, (high / low) ** 0.15) if nothing else low
        span = math.log(high / floor) or 1.0
        axes.set(yscale="log", ylim=(floor / math.exp(0.1 * span), high * math.exp(0.12 * span)))
        powers = [factor * 10.0**power for power in range(-9, 6) for factor in ((1,) if span > 4 else (1, 2, 3, 5))]
        ticks = [
            tick for tick in powers if (1.3 * floor if nothing else axes.get_ylim()[0]) < tick < axes.get_ylim()[1]
        ]
        axes.yaxis.set_major_locator(FixedLocator([floor, *ticks] if nothing else ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "0" if nothing and y == floor else f"{y:.6g}"))
    else:
        bottom = 0.0 if min(harms) < 0.5 * high else min(harms)
        axes.set_ylim(bottom - 0.07 * (high - bottom or 1), high + 0.1 * (high - bottom or 1))
    if speed:
        axes.yaxis.set_major_formatter(NullFormatter())
    else:
        axes.set_ylabel(way.words, fontsize=9.5)
    _set_across(axes, [point.x for point in points] or [1.0], speed)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return floor


def _set_across(axes: Axes, xs: Sequence[float], speed: bool) -> None:
    """Speeds on a linear scale, sizes on a logarithmic one: half the size is half the size wherever it is."""
    if speed:
        margin = 0.12 * ((max(xs) - min(xs)) or max(xs))
        axes.set_xlim(max(0.0, min(xs) - margin), max(xs) + 1.3 * margin)
        axes.set_xlabel("speed of one stream (tokens a second)", fontsize=9.5)
    else:
        factor = max(max(xs) / min(xs), 1.2)
        axes.set(xscale="log", xlim=(min(xs) / factor**0.1, max(xs) * factor**0.16))
        axes.set_xlabel("weights (MB)", fontsize=9.5)
    low, high = axes.get_xlim()
    # within a factor of 3 a logarithmic scale is nearly a linear one, and too short for its usual marks
    ticks = _even_marks(low, high) if speed or high < 3 * low else _log_marks(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))


def _even_marks(low: float, high: float) -> list[float]:
    """Multiples of a round step between low and high, of the finest step with six of them at most: three at least."""
    power = math.floor(math.log10(high - low)) - 1
    for size in (1, 2, 2.5, 5, 10, 20, 25, 50):
        step = size * 10.0**power
        first, last = math.floor(low / step) + 1, math.ceil(high / step) - 1
        if last - first < 6:
            break
    return [float(f"{count * step:.12g}") for count in range(first, last + 1)]


def _log_marks(low: float, high: float) -> list[float]:
    """Round numbers between low and high, few of each power of ten where there are many powers."""
    first, mark = math.floor(math.log10(low)), (1, 1.5, 2, 3, 4, 5, 7) if high < 70 * low else (1, 3)
    ticks = [each * 10.0**power for power in range(first, first + 9) for each in mark]
    return [tick for tick in ticks if low < tick < high]


def _draw_points(axes: Axes, points: Sequence[Point], floor: float, best: Point | None, speed: bool) -> None:
    def height(point: Point) -> float:
        return max(point.harm, floor) if floor else point.harm

    edge = sorted((point for point in points if point.above is None), key=lambda point: point.x, reverse=speed)
    (left, right), (_, top) = axes.get_xlim(), axes.get_ylim()
    xs = [edge[0].x, *(point.x for point in edge), left if speed else right]
    ys = [top, *(height(point) for point in edge), height(edge[-1])]
    axes.step(xs, ys, where="post", color=NAVY, linewidth=1.6, zorder=2)
    for point in points:
        on, chosen = point.above is None, best is not None and point.name == best.name
        axes.plot([point.x], [height(point)], marker="o" if on else "D", markersize=8.5 if on else 6.5,
                  color=ORANGE if chosen else NAVY if on else ICE, markeredgecolor=BLACK if on or chosen else GREY,
                  markeredgewidth=1.4 if chosen else 0.7, zorder=5 if on else 3)  # fmt: skip
    labels = [shortened(point.name, 2.0, 9) for point in points]
    placed = _places(axes, points, labels, height, list(zip(xs, ys, strict=True)))
    for point, label, (x, y, end) in zip(points, labels, placed, strict=True):
        on = point.above is None
        axes.plot([point.x, end], [height(point), y], color="#bbbbbb", linewidth=0.6, zorder=2.5)
        axes.text(x, y, label, fontsize=9, va="center", color=BLACK if on else _FAINT, parse_math=False, zorder=6,
                  weight="bold" if best is not None and best.name == point.name else "normal",
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5})  # fmt: skip


def _places(
    axes: Axes, points: Sequence[Point], labels: Sequence[str], height: Callable[[Point], float],
    corners: Sequence[tuple[float, float]],
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Of each label where it begins, at what height, and the x of the end that is nearer to its point.

    None lies over another, over a point, or over the frontier, whose steps turn at `corners`, as far as there is room;
    all lie inside the axes. Tried are the right and the left side, then places ever further up and down.
    """
    to_inches, back = _scales(axes)
    dots = [to_inches(point.x, height(point)) for point in points]
    taken = [(x - 0.07, x + 0.07, y, y) for x, y in dots]  # left, right, bottom, top
    lines = _steps([to_inches(*corner) for corner in corners])
    places: dict[int, tuple[float, float, float]] = {}
    for index in sorted(range(len(points)), key=lambda index: (-dots[index][1], dots[index][0])):
        (x, y), wide = dots[index], text_width(labels[index], 9) * 1.05
        spots = [(x + side, y + way * step * 0.06) for step in range(60) for way in (1, -1)
                 for side in (0.13, -0.13 - wide)]  # fmt: skip
        spots = [spot for spot in spots if 0.03 <= spot[0] <= _PLOT - wide and 0.1 <= spot[1] <= _HIGH - 0.1] or spots

        def clear(spot: tuple[float, float], boxes: Sequence[tuple[float, ...]], wide: float = wide) -> bool:
            left, at = spot
            return not any(left - 0.03 < end and begin < left + wide + 0.03 and low - _LINE < at < high + _LINE
                           for begin, end, low, high in boxes)  # fmt: skip

        others = [box for place, box in enumerate(taken) if place != index]
        free = [spot for spot in spots if clear(spot, others)]
        left, at = next((spot for spot in free if clear(spot, lines)), (free or spots)[0])
        taken.append((left, left + wide, at, at))
        begin, y = back(left, at)
        places[index] = begin, y, begin if left > x else back(left + wide, at)[0]
    return [places[index] for index in range(len(points))]


def _steps(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """The frontier's lines as narrow boxes: left, right, bottom, top. Labels come a little nearer to them."""
    boxes = []
    for (x, y), (next_x, next_y) in pairwise(corners):
        left, right, inset = min(x, next_x), max(x, next_x), _LINE - 0.1
        boxes.append((left, right, y + inset, y - inset))  # across
        boxes.append((next_x, next_x, min(y, next_y) + inset, max(y, next_y) - inset))  # and down
    return boxes


def _scales(axes: Axes) -> tuple[Callable[[float, float], tuple[float, float]], Callable[..., tuple[float, float]]]:
    """From data to inches within the axes, and back."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    logs = [scale == "log" for scale in (axes.get_xscale(), axes.get_yscale())]

    def wound(value: float, log: bool) -> float:
        return math.log(value) if log else value

    def unwound(value: float, log: bool) -> float:
        return math.exp(value) if log else value

    begin, end = wound(left, logs[0]), wound(right, logs[0])
    bottom, top = wound(low, logs[1]), wound(high, logs[1])

    def to_inches(x: float, y: float) -> tuple[float, float]:
        across, along = wound(x, logs[0]) - begin, wound(y, logs[1]) - bottom
        return _PLOT * across / (end - begin), _HIGH * along / (top - bottom)

    def back(x: float, y: float) -> tuple[float, float]:
        across, along = begin + x / _PLOT * (end - begin), bottom + y / _HIGH * (top - bottom)
        return unwound(across, logs[0]), unwound(along, logs[1])

    return to_inches, back


def _draw_key(figure: Figure, budget: bool, best: bool) -> None:
    def dot(marker: str, colour: str, edge: str, words: str) -> Line2D:
        return Line2D([], [], marker=marker, markersize=7.5, color=colour, markeredgecolor=edge, linestyle="none",
                      label=words)  # fmt: skip

    handles: list[Any] = [
        Line2D([], [], color=NAVY, linewidth=1.6, label="the frontier"),
        dot("o", NAVY, BLACK, "on it"),
        dot("D", ICE, GREY, "another one is no worse in both, and better in one"),
    ]
    if best:
        handles.append(dot("o", ORANGE, BLACK, "the least damage within the budget"))
    elif budget:
        handles.append(dot("o", "white", VERMILION, "nothing fits in"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / _WIDTH, 0), ncols=len(handles), fontsize=9,
                  frameon=False, columnspacing=1.3, handletextpad=0.4)  # fmt: skip


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_frontier(variants: Sequence[Variant], damage: str = "KL", budget: float = 0) -> str:
    """A line for each variant: its figures, and who is no worse in both and better in one."""
    title, said = _headings(variants, damage, budget)
    sizes, speeds = ({point.name: point for point in points_of(variants, damage, speed)} for speed in (False, True))
    lines = [title, f"  {said}"]
    for each in variants:
        harm = MEASURES[damage].of(each)
        shown = "damage not measured" if harm is None else f"{damage} {MEASURES[damage].shown(harm)}"
        speed = "" if each.tokens_per_second is None else f", {each.tokens_per_second:.0f} tokens a second"
        lines.append(f"  {each.name}: {each.bytes / 1e6:.1f} MB{speed}, {shown}; "
                     f"{_standing(sizes.get(each.name), speeds.get(each.name))}")  # fmt: skip
    return "\n".join(lines)


def _standing(size: Point | None, speed: Point | None) -> str:
    said = [f"{words}: {'on the frontier' if point.above is None else f'behind {point.above}'}"
            for words, point in (("size", size), ("speed", speed)) if point is not None]  # fmt: skip
    return ", ".join(said) or "in neither plot"


def _headings(variants: Sequence[Variant], damage: str, budget: float) -> tuple[str, str]:
    by_size, by_speed = (points_of(variants, damage, speed) for speed in (False, True))
    on = [sum(point.above is None for point in points) for points in (by_size, by_speed)]
    title = f"{len(variants)} variants by {damage}: {on[0]} on the frontier of size"
    title += f", {on[1]} on that of speed" if by_speed else ""
    if not budget:
        return title, "Lower is better; smaller is to the left, faster to the right"
    best = best_within(variants, damage, budget)
    if best is None:
        return title, f"Nothing fits into {budget:,} MB"
    shown = MEASURES[damage].shown(best.harm)
    return title, in_font(f"Within {budget:,} MB the least damage is that of {best.name}: {damage} {shown}")
