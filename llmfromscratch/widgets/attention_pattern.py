"""Who looks at whom: the attention weights of one layer and head over a real text, with one query picked out.

A row is a query, a column a key; each row is what one token takes from those before it. Drawn from the engine's own
mask and attention: what they let through, or hide, against the rule is outlined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from llmfromscratch.widgets.attention_trace import MOST_TOKENS, Pattern, record_attention, token_labels
from llmfromscratch.widgets.controls import Control, Slider, Text
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened
from llmfromscratch.widgets.style import ALARM, BLUE, GREY, ICE, NAVY, ORANGE, PALE, SKY, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted

EXAMPLE = "The keys of the old house were in the garden. When Anna came home, she looked for the keys"
_COLOURS = LinearSegmentedColormap.from_list("weights", ["white", ICE, SKY, BLUE, NAVY])
_SCALE = PowerNorm(0.5, vmin=0, vmax=1)  # one scale for all heads; the root shows small weights beside a large one
_WIDTH, _LEFT, _MAP, _LABEL, _BARS = 10.0, 1.15, 5.75, 0.85, 1.05  # inches
_TOP, _GAP, _SIDE, _BOTTOM = 0.66, 0.22, 7.5, 0.25


def attention_pattern(
    source: Any,
    text: str = EXAMPLE,
    *,
    layer: int = 0,
    head: int = 0,
    cache: Callable[[int], Any] | None = None,
    grouped_attention: Callable[..., Any] | None = None,
    causal_mask: Callable[..., Any] | None = None,
) -> FigureForm:
    """The pattern with its controls: layer, head, which query, and the text.

    source: an LLM, or a pair (model, token ids), which has no text to change. The others are as in
    `record_attention`; what is not given comes from the engine's modules.
    """
    pair = isinstance(source, tuple)
    model = source[0] if pair else source.model
    parts = {"cache": cache, "attend": grouped_attention, "mask": causal_mask}
    known: dict[str, Pattern] = {}
    rows = min(len(source[1]), MOST_TOKENS) if pair else MOST_TOKENS

    def pattern(text: str = "") -> Pattern:
        if text not in known:
            ids = source[1] if pair else source.tokenizer.encode(text)
            labels = None if pair else token_labels(source.tokenizer, ids[:MOST_TOKENS])
            known[text] = record_attention(model, ids, labels, **parts)
        return known[text]

    controls: list[Control] = [
        Slider("layer", "Layer", 0, model.config.num_layers - 1, layer),
        Slider("head", "Head", 0, model.config.num_heads - 1, head),
        Slider("back", "Query: steps back from the newest", 0, rows - 1, 0),
    ]
    if not pair:
        controls.append(Text("text", f"Text (up to {MOST_TOKENS} tokens)", text))

    def draw(layer: int, head: int, back: int, text: str = "") -> Figure:
        return draw_attention_pattern(pattern(text), layer, head, back)

    def describe(layer: int, head: int, back: int, text: str = "") -> str:
        return describe_attention_pattern(pattern(text), layer, head, back)

    return FigureForm(draw, describe, controls)


def draw_attention_pattern(pattern: Pattern, layer: int = 0, head: int = 0, back: int = 0) -> Figure:
    """The weights of one head as a map, and those of one query, counted back from the newest token, as bars."""
    row = _row(pattern, back)
    problems = [in_font(problem) for problem in pattern.problems(layer, head)]
    below = _BOTTOM + _LABEL + problem_space(problems)
    height = _TOP + _BARS + _GAP + _MAP + below
    figure = Figure(figsize=(_WIDTH, height))

    def axes_at(left: float, bottom: float, width: float, high: float) -> Axes:
        return figure.add_axes((left / _WIDTH, bottom / height, width / _WIDTH, high / height))

    figure.text(0.3 / _WIDTH, 1 - 0.24 / height, _title(pattern, layer, head), fontsize=11, va="center")
    _draw_bars(axes_at(_LEFT, below + _MAP + _GAP, _MAP, _BARS), pattern, layer, head, row)
    _draw_map(axes_at(_LEFT, below, _MAP, _MAP), pattern, layer, head, row)
    _draw_side(axes_at(_SIDE, below, _WIDTH - _SIDE, _MAP), pattern, layer, head, row)
    bar = figure.colorbar(
        ScalarMappable(_SCALE, _COLOURS), cax=axes_at(_SIDE, below + 0.62, 2.1, 0.16), orientation="horizontal"
    )
    bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1], labels=["0", ".01", ".1", ".25", ".5", "1"])
    bar.set_label("attention weight; a row adds up to 1", fontsize=9)
    write_problems(figure, problems, 0.3)
    return figure


def describe_attention_pattern(pattern: Pattern, layer: int = 0, head: int = 0, back: int = 0) -> str:
    """The query in words: where it looks, how much of that goes to the first token, how spread it is."""
    row = _row(pattern, back)
    weights = pattern.weights[layer, head, row]
    return "\n".join([
        _title(pattern, layer, head),
        f"{_query(pattern, row)} looks most at {', '.join(_top(pattern, layer, head, row, 3))}",
        f"On the first token: {float(weights[0]):.3f}; {_spread(pattern, layer, head, row)}",
        *(pattern.problems(layer, head) or ["No query sees a later token, and all weights add up to 1."]),
    ])  # fmt: skip


def entropy(weights: Any) -> float:
    """Of weights that add up to 1, in bits: 0 if all lies on one token, log2(n) if n tokens share it evenly."""
    some = weights[weights > 0]
    return abs(float(-(some * some.log2()).sum()))


def _row(pattern: Pattern, back: int) -> int:
    return max(0, len(pattern.labels) - 1 - back)


def _title(pattern: Pattern, layer: int, head: int) -> str:
    passes = " + ".join(map(str, pattern.passes))
    rest = f"; {counted(pattern.left_out, 'more token')} left out" if pattern.left_out else ""
    return f"Layer {layer}, head {head}: {counted(len(pattern.labels), 'token')}, in passes of {passes}{rest}"


def _query(pattern: Pattern, row: int) -> str:
    step = ", the decode step," if row == len(pattern.labels) - 1 else ""
    return f"Query {row + 1}{step} {pattern.labels[row]!r}"


def _order(pattern: Pattern, layer: int, head: int, row: int) -> list[int]:
    """The keys by weight, largest first; the earlier one where two are equal."""
    return torch.sort(pattern.weights[layer, head, row], descending=True, stable=True).indices.tolist()


def _top(pattern: Pattern, layer: int, head: int, row: int, most: int) -> list[str]:
    weights = pattern.weights[layer, head, row]
    keys = [key for key in _order(pattern, layer, head, row)[:most] if weights[key] > 0]
    return [f"{key + 1} {pattern.labels[key]!r} {float(weights[key]):.3f}" for key in keys] or ["nothing"]


def _spread(pattern: Pattern, layer: int, head: int, row: int) -> str:
    seen = int(pattern.visible[row].sum())
    most = f"{torch.tensor(float(max(seen, 1))).log2():.2f}"
    bits = entropy(pattern.weights[layer, head, row])
    return f"entropy {bits:.2f} of at most {most} bits ({counted(seen, 'token')} visible)"


def _draw_bars(axes: Axes, pattern: Pattern, layer: int, head: int, row: int) -> None:
    weights = pattern.weights[layer, head, row].tolist()
    tokens = len(weights)
    axes.bar(range(tokens), weights, width=0.8, color=BLUE)
    high = max(0.1, *weights) if all(weight == weight for weight in weights) else 1.0
    axes.set(xlim=(-0.5, tokens - 0.5), ylim=(0, 1.2 * high), xticks=[])
    axes.set_ylabel("weight", fontsize=9)
    axes.locator_params(axis="y", nbins=3)
    for key in _order(pattern, layer, head, row)[:3]:
        if weights[key] > 0.03 * high:
            axes.text(key, weights[key] + 0.03 * high, f"{weights[key]:.2f}", fontsize=8, ha="center", va="bottom")
    label = shortened(pattern.labels[row], 1.2, 10)
    step = ", the decode step" if row == tokens - 1 else ""
    axes.set_title(f"Query {row + 1} (“{label}”){step}: the outlined row", fontsize=10, pad=4, parse_math=False)


def _draw_map(axes: Axes, pattern: Pattern, layer: int, head: int, row: int) -> None:
    """Keys to the right, queries down; hidden cells hatched, cells against the rule outlined."""
    tokens = len(pattern.labels)
    shown = pattern.weights[layer, head].masked_fill(~pattern.visible, float("nan"))
    axes.imshow(shown.numpy(), cmap=_COLOURS, norm=_SCALE, aspect="auto", interpolation="nearest", zorder=1)
    _draw_hidden(axes, pattern)
    may = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for query, key in (pattern.visible != may).nonzero().tolist():
        axes.add_patch(_cell(key, query, fill=False, edgecolor=ALARM, linewidth=1.2, zorder=4))
    axes.add_patch(
        Rectangle((-0.5, row - 0.5), tokens, 1, fill=False, edgecolor=ORANGE, linewidth=2.4, zorder=5, clip_on=False)
    )
    done = 0
    for count in pattern.passes[:-1]:
        done += count
        axes.axhline(done - 0.5, color=GREY, linewidth=0.9, linestyle=(0, (5, 3)), zorder=3)
    size = min(8.5, max(6.5, 0.8 * 72 * _MAP / tokens))
    names = [f"{shortened(label, _LABEL - 0.3, size)}  {number}" for number, label in enumerate(pattern.labels, 1)]
    axes.set(xlim=(-0.5, tokens - 0.5), ylim=(tokens - 0.5, -0.5))
    axes.set_xticks(range(tokens), names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(tokens), names, fontsize=size, parse_math=False)
    axes.tick_params(length=2, pad=2)
    for label, number in zip(axes.get_yticklabels(), range(tokens), strict=True):
        label.set_fontweight("bold" if number == row else "normal")
    axes.set_xlabel("key: the token that is looked at", fontsize=9)
    axes.set_ylabel("query: the token that looks", fontsize=9)


def _draw_hidden(axes: Axes, pattern: Pattern) -> None:
    """What the mask hides, in one rectangle for each run of neighbours, so that the hatch is not cut into cells."""
    for query, seen in enumerate(pattern.visible.tolist()):
        first = 0
        while first < len(seen):
            end = first
            while end < len(seen) and seen[end] == seen[first]:
                end += 1
            if not seen[first]:
                axes.add_patch(_cell(first, query, end - first, facecolor=PALE, edgecolor="#b5b5b5", hatch="///",
                                     linewidth=0, zorder=2))  # fmt: skip
            first = end


def _cell(key: int, query: int, wide: int = 1, **look: Any) -> Rectangle:
    return Rectangle((key - 0.5, query - 0.5), wide, 1, **look)


def _draw_side(axes: Axes, pattern: Pattern, layer: int, head: int, row: int) -> None:
    """The chosen query in numbers, the passes, and what the patterns mean."""
    axes.set(xlim=(0, _WIDTH - _SIDE), ylim=(_MAP, 0))
    axes.set_axis_off()
    weights = pattern.weights[layer, head, row].tolist()
    axes.text(0, 0.1, f"Query {row + 1} looks most at", fontsize=10, va="center")
    for place, key in enumerate(key for key in _order(pattern, layer, head, row)[:5] if weights[key] > 0):
        y = 0.4 + 0.25 * place
        axes.text(0, y, f"{weights[key]:.3f}", fontsize=9.5, va="center")
        axes.text(0.55, y, f"{key + 1}", fontsize=9.5, va="center", color="#555555")
        axes.text(0.85, y, shortened(pattern.labels[key], 1.3, 9.5), fontsize=9.5, va="center", parse_math=False)
    spread = _spread(pattern, layer, head, row).replace(" of at most", "\nof at most").replace(" (", "\n(")
    axes.text(0, 1.85, f"on the first token: {weights[0]:.3f}", fontsize=9.5, va="center")
    axes.text(0, 2.05, spread, fontsize=9.5, va="top", linespacing=1.35)
    about = "Dashed lines: where a new forward\npass begins. The last token comes\nalone, as in a decode step."
    axes.text(0, 3.1, about, fontsize=9, va="top", color="#555555", linespacing=1.35)
    handles: list[Any] = [
        Patch(facecolor=PALE, edgecolor="#b5b5b5", hatch="///", label="hidden by the mask"),
        Patch(fill=False, edgecolor=ORANGE, linewidth=2, label="the chosen query"),
    ]
    if (pattern.visible != torch.ones_like(pattern.visible).tril()).any():
        handles.append(Patch(fill=False, edgecolor=ALARM, linewidth=1.4, label="against the rule"))
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 0.17), fontsize=9, frameon=False,
                borderpad=0, handlelength=1.6)  # fmt: skip
