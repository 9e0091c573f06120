"""Which weights mind: the damage that each product of each layer does when it alone is rounded.

A layer stands over its number, a mark for each product; the higher, the worse. What is far above the others deserves
more bits, and what lies at the bottom would not notice fewer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llmfromscratch.sensitivity import OUTSIDE, Sensitivity
from llmfromscratch.widgets.controls import Choice, Control, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.style import BLACK, BLUE, GREEN, GREY, NAVY, ORANGE, PURPLE, SKY, VERMILION, in_share

EVERY = "every product"
_LOOKS = {
    "q_proj": (SKY, "v"), "k_proj": (BLUE, "^"), "v_proj": (NAVY, "s"), "o_proj": (GREEN, "D"),
    "gate_proj": (ORANGE, "o"), "up_proj": (PURPLE, "P"), "down_proj": (VERMILION, "X"),
    "embed_tokens": (BLACK, "*"), "lm_head": (BLACK, "h"),
}  # fmt: skip
_NAMED = 5  # parts that are named in the picture
_LEAST = 1e-6  # nats; what does less, or nothing, is drawn here


@dataclass(frozen=True)
class Mark:
    """A part in the picture. layer: the embedding stands before the first, the head behind the last; product:
    "down_proj"; kl: nats a token."""

    name: str
    layer: int
    product: str
    kl: float


def sensitivity(damages: Sensitivity, *, bits: int | None = None, product: str = EVERY) -> FigureForm:
    """The figure with its controls: in how many bits, and which product. bits: None is the fewest that were tried."""
    tried = damages.bits
    products = dict.fromkeys(mark.product for mark in marks_of(damages, tried[0], EVERY))
    controls: list[Control] = [
        Stops("bits", "Bits", {str(each): each for each in tried}, min(tried) if bits is None else bits),
        Choice("product", "Show", {name: name for name in (EVERY, *products)}, product),
    ]
    return FigureForm(
        lambda bits, product: draw_sensitivity(damages, bits, product),
        lambda bits, product: describe_sensitivity(damages, bits, product),
        controls,
    )


def marks_of(damages: Sensitivity, bits: int, product: str) -> list[Mark]:
    """The parts of a product, or of all, in the order of the network."""
    places = {name: re.match(r"layers\.(\d+)\.", name) for name in damages.damage}
    behind = 1 + max((int(place[1]) for place in places.values() if place), default=0)
    found = []
    for name, by_bits in damages.damage.items():
        place, kind = places[name], name.rpartition(".")[2]
        layer = int(place[1]) if place else behind if kind == "lm_head" else -1
        if product in (EVERY, kind):
            found.append(Mark(name, layer, kind, by_bits[bits]))
    return found


def draw_sensitivity(damages: Sensitivity, bits: int, product: str = EVERY) -> Figure:
    """The picture: KL in nats a token over the layer, on a logarithmic scale; the worst parts by name."""
    marks = marks_of(damages, bits, product)
    figure = Figure(figsize=(10, 3.9))
    axes = figure.add_axes((0.09, 0.14, 0.68, 0.71))
    for kind in dict.fromkeys(mark.product for mark in marks):
        own = [mark for mark in marks if mark.product == kind]
        colour, marker = _LOOKS.get(kind, (GREY, "*"))
        axes.plot([mark.layer for mark in own], [max(mark.kl, _LEAST) for mark in own], color=colour, marker=marker,
                  markersize=8 if kind in OUTSIDE else 5.5, linewidth=0.7, markeredgecolor="white",
                  markeredgewidth=0.5, label=kind)  # fmt: skip
    for rank, mark in enumerate(_worst(marks), 1):
        axes.annotate(str(rank), (mark.layer, max(mark.kl, _LEAST)), (0, 5), textcoords="offset points", ha="center",
                      fontsize=8.5, color=BLACK)  # fmt: skip
    listed = [f"{rank}  {_place(mark)}  {mark.kl:.2g}" for rank, mark in enumerate(_worst(marks), 1)]
    figure.text(0.782, 0.14, "most damage\n" + "\n".join(listed), fontsize=8.5, linespacing=1.5, color=BLACK)
    axes.set_yscale("log")
    axes.margins(x=0.03, y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    outside = {"embed_tokens": "-1: the embedding", "lm_head": "the last: the head"}
    shown = [words for kind, words in outside.items() if any(mark.product == kind for mark in marks)]
    axes.set_xlabel("layer" + (f" ({', '.join(shown)})" if shown else ""))
    least = any(mark.kl < _LEAST for mark in marks)
    axes.set_ylabel("damage: KL, nats a token" + (f"\n(less than {_LEAST:.6f} as that)" if least else ""))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(_heading(marks, bits))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.05), frameon=False, fontsize=9, labelspacing=0.35)
    return figure


def describe_sensitivity(damages: Sensitivity, bits: int, product: str = EVERY) -> str:
    """What the picture shows, in words and numbers."""
    marks = marks_of(damages, bits, product)
    worst = ", ".join(f"{mark.name} {mark.kl:.3g}" for mark in _worst(marks))
    return f"{_heading(marks, bits)}\nmost: {worst} nats a token"


def _place(mark: Mark) -> str:
    return mark.product if mark.product in OUTSIDE else f"layer {mark.layer} {mark.product}"


def _worst(marks: Sequence[Mark]) -> list[Mark]:
    return sorted(marks, key=lambda mark: -mark.kl)[:_NAMED]


def _heading(marks: Sequence[Mark], bits: int) -> str:
    whole = sum(mark.kl for mark in marks)
    worst = _worst(marks)
    share = in_share(sum(mark.kl for mark in worst), whole)
    return (
        f"{len(marks)} parts, each alone in {bits} bits: added up {whole:.3g} nats a token, "
        f"{share} of it from the {len(worst)} worst"
    )
