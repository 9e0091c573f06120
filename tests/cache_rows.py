"""What the tests of caches write and expect: rows that follow from a text alone, kept in plain Python.

The keys of a token depend on every token before it, as a model's do. So two requests may share rows exactly when their
texts are equal from the beginning on, and a row taken from another text is a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4
LAYOUT = kv_cache.CacheLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.float64, (torch.device("cpu"),) * LAYERS)


def rows(text: Sequence[int], layer: int, start: int = 0) -> torch.Tensor:
    """Keys [len(text) - start, kv_heads, head_dim] of the tokens from `start` on; the values are their negatives."""
    digests, digest = [], 1
    for token in text:
        digest = (digest * 69069 + token + 1) % 2**31
        digests.append(float(digest))
    first = torch.tensor(digests[start:], dtype=torch.float64)[:, None, None]
    return first + layer / 4 + torch.arange(KV_HEADS)[:, None] / 32 + torch.arange(HEAD_DIM) / 256


def write(cache: Any, parts: dict[int, tuple[Sequence[int], Sequence[int]]], layers: int = LAYERS) -> None:
    """One forward pass over {request: (text so far, new tokens)}; fewer than LAYERS layers: it is interrupted.

    After each layer the new rows must be readable together with all before them.
    """
    batch = Batch.of([(request, list(new), len(old)) for request, (old, new) in parts.items()])
    for layer in range(layers):
        new_rows = torch.cat([rows([*old, *new], layer, len(old)) for old, new in parts.values()])
        cache.write(layer, new_rows, -new_rows, batch)
        for request, (old, new) in parts.items():
            assert_holds(cache, request, [*old, *new], layer)


def assert_holds(cache: Any, request: int, text: Sequence[int], layer: int, may_hold_more: bool = False) -> None:
    """A layer gives back the rows of this text; with may_hold_more there may be more behind them (interrupted)."""
    keys, values = cache.read(layer, request)
    if may_hold_more:
        keys, values = keys[: len(text)], values[: len(text)]
    expected = rows(text, layer)
    assert torch.equal(keys, expected), (
        f"keys of request {request}, layer {layer}: {keys[:, 0, 0]}, not {expected[:, 0, 0]}"
    )
    assert torch.equal(values, -expected), f"values of request {request}, layer {layer}"


def assert_texts(cache: Any, texts: dict[int, list[int]], may_hold_more: bool = False) -> None:
    """Every request has the length and, in every layer, the rows of its text."""
    for request, text in texts.items():
        assert cache.length(request) == len(text)
        for layer in range(LAYERS) if text else ():
            assert_holds(cache, request, text, layer, may_hold_more)


def prefill(cache: Any, request: int, text: Sequence[int], chunk: int = 1000) -> int:
    """What an engine does with a new request: match, then write the rest in chunks. Returns the tokens matched."""
    matched = cache.match_prefix(request, list(text))
    for start in range(matched, len(text), chunk):
        write(cache, {request: (text[:start], text[start : start + chunk])})
    return matched
