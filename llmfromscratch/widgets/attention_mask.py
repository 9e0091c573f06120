"""Sparse patterns of attention: who looks at whom under a mask, how far news travels, and what a step has to read.

A row is a query, a column a key. What is drawn is what attention really mixes: it runs over keys that are all alike and
values that say where they come from, so its output is its weights. A tile that nobody looks into is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from llmfromscratch import masks, optimization
from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font
from llmfromscratch.widgets.style import ALARM, BLUE, GREY, ICE, ORANGE, PALE, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted

TOKENS, TILE = 32, 8
_CONTEXTS = [2**power for power in range(4, 14)]  # tokens; the last is SmolLM2's whole context
_WIDTH, _LEFT, _MAP, _TOP, _BARS, _GAP, _SIDE = 10.0, 0.7, 5.2, 0.62, 1.0, 0.62, 6.75  # inches
_KINDS = {"window": "window", "window and random blocks": "random", "blocks": "blocks", "everything before": "causal"}


@dataclass(frozen=True)
class MaskPattern:
    """weights: float64 [tokens, tokens], a query a row, as attention gave them; visible: bool, as the mask says."""

    mask: masks.Mask | None
    weights: Tensor
    visible: Tensor

    @property
    def computed(self) -> Tensor:
        """Which tiles of TILE x TILE hold anything that a query sees: bool [tiles, tiles]."""
        tiles = self.visible.shape[0] // TILE
        return self.visible.view(tiles, TILE, tiles, TILE).any(dim=3).any(dim=1)

    def layers_until_heard(self) -> list[int]:
        """For each token, how many layers its news needs to get to the newest one; 0 where it never gets there."""
        reach = self.visible[-1].clone()
        layers = reach.to(torch.int64)
        for layer in range(2, len(reach) + 1):
            reach = reach | self.visible[reach].any(dim=0)
            layers[(layers == 0) & reach] = layer
        return layers.tolist()

    def problems(self) -> list[str]:
        """Where attention did not keep to the mask, as sentences."""
        even = self.visible / self.visible.sum(-1, keepdim=True)
        wrong = ~torch.isclose(self.weights, even.to(self.weights.dtype), atol=1e-6)
        if not wrong.any():
            return []
        query, key = wrong.nonzero()[0].tolist()
        more = int(wrong.sum()) - 1
        found, wanted = float(self.weights[query, key]), float(even[query, key])
        rest = f" ({counted(more, 'more cell')} like this)." if more else "."
        return [f"Query {query} gives token {key} the weight {found:.3g}, where the mask says {wanted:.3g}{rest}"]


def look_through(mask: masks.Mask | None, attend: Callable[..., Any] | None = None) -> MaskPattern:
    """Runs attention over TOKENS tokens under a mask (None: everything before).

    attend: a function like `optimization.tiled_attention`, which it is if not given.
    """
    every = torch.arange(TOKENS)
    visible = every[:, None] >= every if mask is None else mask.visible(every[:, None], every)
    alike = torch.zeros(TOKENS, 1, TOKENS, dtype=torch.float64)
    where = torch.eye(TOKENS, dtype=torch.float64).unsqueeze(1)
    weights = (attend or optimization.tiled_attention)(alike, alike, where, visible, TILE)
    return MaskPattern(mask, weights[:, 0].clone(), visible)


def attention_mask(attend: Callable[..., Any] | None = None) -> FigureForm:
    """The figure with its controls: the kind of mask, its window, stride and global tokens. attend: see above."""
    controls: list[Control] = [
        Choice("kind", "Who is seen", _KINDS, "window"),
        Slider("window", "Window or block (tokens)", 1, 16, 6),
        Slider("stride", "Stride (tokens)", 1, 4, 1),
        Slider("first", "Global tokens", 0, 4, 0),
    ]

    def draw(**state: Any) -> Figure:
        return draw_attention_mask(look_through(mask_of(**state), attend))

    def describe(**state: Any) -> str:
        return describe_attention_mask(look_through(mask_of(**state), attend))

    return FigureForm(draw, describe, controls)


def mask_of(kind: str = "window", window: int = 6, stride: int = 1, first: int = 0) -> masks.Mask | None:
    """The mask that a state of the controls means."""
    if kind == "causal" and stride == 1:
        return None
    mask = masks.dilated(stride, _CONTEXTS[-1] // stride if kind == "causal" else window)
    if kind == "blocks":
        mask = masks.blocks(window) if stride == 1 else masks.blocks(window) & mask
    elif kind == "random":
        mask = mask | masks.random_blocks(4, 1)
    return mask | masks.global_tokens(first) if first else mask


def draw_attention_mask(pattern: MaskPattern) -> Figure:
    """The pattern as a map with its tiles, the layers that news needs below, and what a decode step reads beside it."""
    problems = [in_font(problem) for problem in pattern.problems()]
    below = _GAP + problem_space(problems)
    height = _TOP + _MAP + 0.12 + _BARS + below
    figure = Figure(figsize=(_WIDTH, height))

    def axes_at(left: float, bottom: float, width: float, high: float) -> Axes:
        return figure.add_axes((left / _WIDTH, bottom / height, width / _WIDTH, high / height))

    figure.text(0.3 / _WIDTH, 1 - 0.27 / height, _title(pattern), fontsize=11, va="center", parse_math=False)
    _draw_map(axes_at(_LEFT, below + _BARS + 0.12, _MAP, _MAP), pattern)
    _draw_layers(axes_at(_LEFT, below, _MAP, _BARS), pattern)
    _draw_reads(axes_at(_SIDE, below + _BARS + 0.12, 2.95, 2.7), pattern)
    handles = [
        Patch(facecolor=BLUE, label="seen"),
        Patch(facecolor=PALE, label="hidden by the mask"),
        Patch(facecolor="white", edgecolor=ORANGE, linewidth=1.6, label=f"tile of {TILE} x {TILE} that is computed"),
    ]
    if problems:
        handles.append(Patch(fill=False, edgecolor=ALARM, linewidth=1.4, label="not as the mask says"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=((_SIDE - 0.1) / _WIDTH, 1 - _TOP / height),
                  fontsize=9, frameon=False)  # fmt: skip
    write_problems(figure, problems, 0.3)
    return figure


def describe_attention_mask(pattern: MaskPattern) -> str:
    """The pattern in numbers."""
    layers = pattern.layers_until_heard()
    heard = [each for each in layers if each]
    tiles = len(pattern.computed)
    return "\n".join([
        _title(pattern),
        f"The newest of {TOKENS} tokens sees {int(pattern.visible[-1].sum())} of them in one layer; through "
        f"{counted(max(heard), 'layer')} it hears of {len(heard)}",
        f"Tiles of {TILE} x {TILE}: {int(pattern.computed.sum())} of {tiles * (tiles + 1) // 2} are computed",
        f"A decode step at {_CONTEXTS[-1]:,} tokens reads {reads(pattern.mask, _CONTEXTS[-1]):,} keys",
        *(pattern.problems() or ["Attention gave weight to what the mask shows, and to nothing else."]),
    ])  # fmt: skip


def reads(mask: masks.Mask | None, context: int) -> int:
    """Keys that the newest of `context` tokens sees."""
    return context if mask is None else len(masks.seen_from(mask, context - 1))


def _title(pattern: MaskPattern) -> str:
    cells = TOKENS * (TOKENS + 1) // 2
    named = "No mask" if pattern.mask is None else str(pattern.mask)
    return f"{named}: queries see a key in {int(pattern.visible.sum())} of the {cells} places that lie not ahead"


def _draw_map(axes: Axes, pattern: MaskPattern) -> None:
    """Queries down, keys to the right: seen, hidden by the mask, ahead; tiles that are computed outlined."""
    seen, ahead = pattern.weights.numpy() > 0, ~np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
    shown = np.where(seen, 2, np.where(ahead, 0, 1))
    axes.imshow(shown, cmap=ListedColormap(["white", PALE, BLUE]), vmin=0, vmax=2, interpolation="nearest", zorder=1)
    axes.set_xticks(np.arange(-0.5, TOKENS), minor=True)
    axes.set_yticks(np.arange(-0.5, TOKENS), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8, zorder=2)
    axes.tick_params(which="both", length=0)
    for row, column in pattern.computed.nonzero().tolist():
        corner = (column * TILE - 0.5, row * TILE - 0.5)
        axes.add_patch(Rectangle(corner, TILE, TILE, fill=False, edgecolor=ORANGE, linewidth=1.6, zorder=3))
    for query, key in (torch.from_numpy(seen) != pattern.visible).nonzero().tolist():
        axes.add_patch(Rectangle((key - 0.5, query - 0.5), 1, 1, fill=False, edgecolor=ALARM, linewidth=1.4, zorder=4))
    axes.set(xlim=(-0.5, TOKENS - 0.5), ylim=(TOKENS - 0.5, -0.5), xticks=[], yticks=range(0, TOKENS, 4))
    axes.set_ylabel("query: position of the token that looks", fontsize=9)
    axes.spines[:].set_visible(False)


def _draw_layers(axes: Axes, pattern: MaskPattern) -> None:
    """Below each key, how many layers its news needs to the newest query; a cross where it never arrives."""
    layers = pattern.layers_until_heard()
    axes.bar(range(TOKENS), layers, width=0.8, color=ICE, edgecolor=BLUE, linewidth=0.6)
    for key, each in enumerate(layers):
        if not each:
            axes.text(key, 0.1, "×", color=GREY, ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(-0.5, TOKENS - 0.5), ylim=(0, max(*layers, 1) * 1.15), xticks=range(0, TOKENS, 4))
    axes.locator_params(axis="y", nbins=4, integer=True)
    axes.set_ylabel("layers", fontsize=9)
    axes.set_xlabel("key: position; bars: layers until the newest token has heard of it (×: never)", fontsize=9)


def _draw_reads(axes: Axes, pattern: MaskPattern) -> None:
    """Keys that a decode step reads, over the length of the text, beside those without a mask."""
    axes.loglog(_CONTEXTS, _CONTEXTS, color=GREY, linestyle="--", label="without a mask")
    axes.loglog(_CONTEXTS, [reads(pattern.mask, context) for context in _CONTEXTS], color=BLUE, marker="o",
                markersize=4, label="under the mask")  # fmt: skip
    axes.set(ylim=(0.8, 1.4 * _CONTEXTS[-1]))
    axes.set_xlabel("tokens of the text", fontsize=9)
    axes.set_ylabel("keys read by a decode step", fontsize=9)
    axes.legend(fontsize=9, frameon=False, loc="upper left")
