"""What a network sees while it reads a text, layer after layer, in the memory of one text's hidden states.

    windows of a text -> embed -> layer 0: look, change, go through -> layer 1: look, change, go through -> ...

Looking is a pass over the layer as it is that sums x xᵀ of what each product reads (`moments`); changing is somebody
else's work, who quantizes it, say; going through takes the hidden states on by the layer as it now is, so that every
layer is calibrated on what it will really read. Only the states before one layer are kept, and are overwritten.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import kv_cache, model
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError
from llmfromscratch.progress import progress_bar

LENGTH = 512  # tokens of a window: each is read by itself, from position 0
COUNT = 16  # windows that a method is calibrated on, where nothing else is said
SENTENCE = "The quick brown fox jumps over the lazy dog. "
_AT_ONCE = 2048  # tokens of a pass

# The seven products of a layer, those together that read the same input.
INPUTS: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PRODUCTS = tuple(name for names in INPUTS for name in names)  # in the order of the stream


# ---- texts -------------------------------------------------------------------------------------------------------


def topics() -> tuple[str, str]:
    """The Python manual's help topics, which every machine has, in two halves: to calibrate on, and to evaluate on.

    A paragraph that several topics share counts once: else much of what is evaluated on would have been seen before.
    """
    from pydoc_data.topics import topics as texts

    paragraphs = (part.strip("\n") for name in sorted(texts) for part in texts[name].split("\n\n"))
    whole = "\n\n".join(dict.fromkeys(paragraphs))
    middle = whole.index("\n\n", len(whole) // 2)
    return whole[:middle], whole[middle + 2 :]


def windows(tokenizer: Any, text: str | None = None, count: int = COUNT, length: int = LENGTH) -> Tensor:
    """Token ids of `count` windows of a text, spread over it evenly: int64 [count, length].

    tokenizer: anything with `encode`. text: None is the first half of `topics`. Raises RequestError where the text has
    fewer tokens than that: a window twice would teach nothing new.
    """
    ids = tokenizer.encode(topics()[0] if text is None else text)
    if len(ids) < count * length:
        raise RequestError(
            f"the calibration text has {len(ids)} tokens; {count} windows of {length} are {count * length}. "
            "Give a longer text, or ask for fewer windows."
        )
    starts = [round(i * (len(ids) - length) / max(count - 1, 1)) for i in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts])


def sources(tokenizer: Any, vocab: int, count: int = COUNT, length: int = LENGTH) -> dict[str, Tensor]:
    """Calibration windows of four kinds by name, equally many tokens each: what a method learns depends on what it saw.

    vocab: random ids are below it.
    """
    sentence = tokenizer.encode(SENTENCE)
    times = -(-count * length // len(sentence))
    dice = torch.Generator().manual_seed(0)
    return {
        "prose": windows(tokenizer, None, count, length),
        "code": windows(tokenizer, inspect.getsource(argparse), count, length),
        "random tokens": torch.randint(vocab, (count, length), generator=dice),
        "one sentence repeated": torch.tensor(sentence * times)[: count * length].view(count, length),
    }


def check(network: model.Model, windows: Tensor) -> None:
    """Raises RequestError for windows that are not ids of this network, or too few to say anything about its widths."""
    config, shape = network.config, list(windows.shape)
    if windows.dtype != torch.int64 or windows.dim() != 2 or not windows.numel():
        raise RequestError(
            f"the calibration windows are {windows.dtype} {shape}; give token ids, int64 [count, length]."
        )
    if windows.min() < 0 or windows.max() >= config.vocab_size:
        raise RequestError(f"the calibration windows hold ids that are not below {config.vocab_size}, the vocabulary.")
    if shape[1] > config.context_length:
        raise RequestError(f"windows of {shape[1]} tokens are longer than the context, {config.context_length}.")
    widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if windows.numel() < 2 * widest:
        raise RequestError(
            f"{windows.numel()} tokens to calibrate on are too few: products read {widest} numbers at once, and what "
            f"fewer than {2 * widest} tokens say about those is mostly chance. Give a longer text."
        )


# ---- layer by layer ----------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def layer_by_layer(
    network: model.Model, windows: Tensor, change: Callable[[int, dict[str, Tensor]], None], description: str
) -> None:
    """Calls change(layer, moments) for one layer after the other, each reading what those before, changed, make of it.

    windows: int64 [count, length]. moments: for the first of each row of INPUTS, float32 [width, width] on the CPU, the
    sum of x xᵀ over all tokens. Shows progress. Raises RequestError (`check`).
    """
    check(network, windows)
    states = network.embed_tokens(windows.to(network.embed_tokens.weight.device))
    for index in progress_bar(range(len(network.layers)), description, delay=1.0, leave=False, unit="layer"):
        layer = network.layers[index]
        moments: dict[str, Tensor] = {}
        with _watched(layer, moments):
            for _ in _passes(network, layer, states):
                pass
        for name, each in moments.items():
            if not each.isfinite().all():
                raise RequestError(
                    f"layers.{index}.{name} reads NaN or infinity in the calibration text: the network's weights are "
                    "damaged, or too large for its dtype; load it in float32."
                )
        change(index, {name: each.cpu() for name, each in moments.items()})
        if index + 1 < len(network.layers):  # nobody reads what comes after the last
            for rows, output in _passes(network, layer, states):
                states[rows] = output.to(states.device)


def _passes(network: model.Model, layer: Any, states: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some windows after the others through a layer: which they are, and their states after it."""
    count, length, hidden = states.shape
    device = next(layer.parameters()).device
    step = max(1, _AT_ONCE // length)
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        batch = Batch.of([(i, [0] * length, 0) for i in range(rows.stop - first)], device)  # a layer reads no ids
        cos, sin = network.rotary(batch.positions)
        cache = kv_cache.ConcatKVCache(len(network.layers))
        output = layer(states[rows].reshape(-1, hidden).to(device), cos, sin, batch, cache)
        yield rows, output.view(-1, length, hidden)


@contextmanager
def _watched(layer: Any, moments: dict[str, Tensor]) -> Iterator[None]:
    """Sums x xᵀ of what the products of a layer read, meanwhile."""

    def watch(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def add(part: Any, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].float()
            moments[name] = torch.addmm(moments[name], x.T, x) if name in moments else x.T @ x

        return add

    handles = [layer.get_submodule(names[0]).register_forward_pre_hook(watch(names[0])) for names in INPUTS]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
