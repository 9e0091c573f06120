"""Why keys are hard to round: a few channels of a head are far larger than all others, in every token.

Above, each channel's numbers over a text, as they are; below, in the frame that `key_frame` makes, where all channels
have the same room. Beside them what rounding each token's key in few bits costs, without and with the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from llmfromscratch import cache_frames, kv_cache, quantization
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError
from llmfromscratch.widgets.controls import Control, Slider, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.style import BLACK, NAVY, PALE, SKY, VERMILION

Frame = Callable[[Tensor], tuple[Tensor, Tensor]]  # as quantization.key_frame
_TOKENS = cache_frames.STRETCH  # as many as share a frame in the engine
_BITS = (3, 4, 8)
_FAR = 3.0  # times the middle channel: from there on a channel is named


@dataclass(frozen=True)
class Channels:
    """The keys of a head. plain, framed: [tokens, head_dim]; error: by name, the rounding error in percent of the power
    that the keys have around their channels' means."""

    plain: Tensor
    framed: Tensor
    error: dict[str, float]


def key_channels(
    llm: Any, key_frame: Frame, *, layer: int = 0, head: int = 0, bits: int = 4, tokens: int = _TOKENS
) -> FigureForm:
    """The figure with its controls: layer, head, and bits. llm: an `LLM`, whose model reads the calibration text."""
    keys = record_keys(llm, tokens)
    controls: list[Control] = [
        Slider("layer", "Layer", 0, len(keys) - 1, layer),
        Slider("head", "Key head", 0, keys[0].shape[1] - 1, head),
        Stops("bits", "Bits", {str(each): each for each in _BITS}, bits),
    ]
    return FigureForm(
        lambda layer, head, bits: draw_key_channels(channels_of(keys[layer], key_frame, head, bits), layer, head, bits),
        lambda layer, head, bits: describe(channels_of(keys[layer], key_frame, head, bits), layer, head, bits),
        controls,
    )


@torch.inference_mode()
def record_keys(llm: Any, tokens: int = _TOKENS) -> list[Tensor]:
    """The keys of every layer for the first tokens of the calibration text: float32 [tokens, kv_heads, head_dim]."""
    ids = cache_frames.text_ids(llm.model, llm.tokenizer)[:tokens]
    cache = kv_cache.ConcatKVCache(llm.config.num_layers)
    llm.model(Batch.of([(0, ids, 0)]), cache)
    return [cache.read(layer, 0)[0].float().cpu() for layer in range(llm.config.num_layers)]


def channels_of(keys: Tensor, key_frame: Frame, head: int, bits: int) -> Channels:
    """What is drawn of a head of a layer. keys: [tokens, kv_heads, head_dim]."""
    middle, spread = _checked(key_frame(keys), keys.shape[1:])
    framed = (keys - middle) / spread
    power = (keys - keys.mean(dim=0)).square().sum(dim=(0, 2))[head]
    errors = {
        "as they are": _rounded(keys[:, head], bits) - keys[:, head],
        "in the frame": (_rounded(framed[:, head], bits) - framed[:, head]) * spread[head],
    }
    shares = {name: 100 * float(each.square().sum() / power) for name, each in errors.items()}
    return Channels(keys[:, head], framed[:, head], shares)


def _checked(frame: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The frame, if keys can be put into it. Raises RequestError: a picture of another would look like a result."""
    if not isinstance(frame, tuple | list) or [type(each) for each in frame] != [Tensor, Tensor]:
        raise RequestError(f"key_frame gave {type(frame).__name__}; return two tensors, the middle and the spread.")
    for name, each in zip(("middle", "spread"), frame, strict=True):
        if each.shape != shape:
            raise RequestError(
                f"The {name} of key_frame is {list(each.shape)}; return [kv_heads, head_dim], {list(shape)}."
            )
        if not each.isfinite().all():
            raise RequestError(
                f"The {name} of key_frame holds what is not a finite number; look at what it divides by."
            )
    if (frame[1] == 0).any():
        raise RequestError("A spread of key_frame is 0, and keys are divided by it; give channels that never change 1.")
    return frame[0], frame[1]


def _rounded(rows: Tensor, bits: int) -> Tensor:
    return quantization.quantize(rows, bits, None).dequantize()


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_key_channels(seen: Channels, layer: int, head: int, bits: int) -> Figure:
    """The picture of one head: ranges by channel, before and after, and the errors beside them."""
    figure = Figure(figsize=(10, 4.6))
    above, below = figure.add_axes((0.08, 0.575, 0.62, 0.325)), figure.add_axes((0.08, 0.115, 0.62, 0.325))
    above.set_title(f"Layer {layer}, key head {head}, {len(seen.plain)} tokens: channels as they are")
    _draw_ranges(above, seen.plain, "number in the key")
    for channel in outliers(seen.plain):
        edge = seen.plain[:, channel]
        place = float(edge.max() if edge.max() > -edge.min() else edge.min())
        above.annotate(str(channel), (channel, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    below.set_title("In the frame: (key - middle) / spread; one that fits fills -1 to 1")
    _draw_ranges(below, seen.framed, "in spreads")
    below.axhspan(-1, 1, color=PALE, zorder=0)
    below.set_xlabel("channel of the head")
    _draw_errors(figure.add_axes((0.82, 0.115, 0.15, 0.785)), seen, bits)
    return figure


def _draw_ranges(axes: Axes, keys: Tensor, label: str) -> None:
    low, high = keys.amin(dim=0), keys.amax(dim=0)
    colours = [VERMILION if channel in outliers(keys) else SKY for channel in range(keys.shape[1])]
    places = list(range(keys.shape[1]))
    axes.bar(places, (high - low).tolist(), bottom=low.tolist(), width=0.8, color=colours, zorder=2)
    axes.plot(places, keys.mean(dim=0).tolist(), linestyle="none", marker="_", color=BLACK, markersize=5, zorder=3)
    axes.axhline(0, color=BLACK, linewidth=0.6)
    axes.set_ylabel(label)
    axes.use_sticky_edges = False  # room below the bars too
    axes.margins(x=0.01, y=0.12)


def _draw_errors(axes: Axes, seen: Channels, bits: int) -> None:
    axes.set_title(f"Error in {bits} bits")
    for place, value in enumerate(seen.error.values()):
        axes.bar(place, value, width=0.6, color=NAVY if place else SKY)
        axes.annotate(_percent(value), (place, value), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_xticks(range(len(seen.error)), [name.replace(" ", "\n", 1) for name in seen.error])
    axes.set_ylim(0, 1.18 * max([*seen.error.values(), 1e-9]))
    axes.set_ylabel("squared error, % of the keys' variance")


def describe(seen: Channels, layer: int, head: int, bits: int) -> str:
    """What the picture shows, in words and numbers."""
    large = outliers(seen.plain)
    names = f"reaching far beyond the others: {', '.join(map(str, large))}" if large else "no channel stands out"
    errors = ", ".join(f"{name} {_percent(value)}" for name, value in seen.error.items())
    low, high = float(seen.framed.min()), float(seen.framed.max())
    return f"Layer {layer}, key head {head}: {names}; in the frame from {low:.2f} to {high:.2f}\n{bits} bits: {errors}"


def outliers(keys: Tensor) -> list[int]:
    """The channels whose largest number is over _FAR times that of the middle channel."""
    largest = keys.abs().amax(dim=0)
    return torch.nonzero(largest > _FAR * largest.median()).flatten().tolist()


def _percent(value: float) -> str:
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
