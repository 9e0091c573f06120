"""Key/value caches: what a decoder remembers of the tokens it has seen, so that each is computed once.

Every cache offers the same small interface (`KVCache`), so any of them serves under the one model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from llmfromscratch.batch import Batch


class KVCache(Protocol):
    """Keys and values of every layer, kept per request."""

    def length(self, request_id: int) -> int:
        """Tokens of this request that every layer has stored."""

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Appends the batch's new keys and values, each [tokens, kv_heads, head_dim], request by request."""

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a request in one layer, each [length, kv_heads, head_dim]."""

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens of a request."""

    def release(self, request_id: int) -> None:
        """Forgets a request and gives its memory back; unknown requests are ignored."""


class ConcatKVCache:
    """The plainest cache: each step concatenates the new keys and values to the old ones (and so copies them)."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self._stored: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

    def length(self, request_id: int) -> int:
        """Tokens stored in the last layer: a forward pass that was interrupted half-way does not count."""
        last = self._stored.get(request_id, [None])[-1]
        return 0 if last is None else last[0].shape[0]

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Appends [tokens, kv_heads, head_dim] to what `batch.spans` say was there before."""
        for span in batch.spans:
            layers = self._stored.setdefault(span.request_id, [None] * self.num_layers)
            new_keys, new_values = keys[span.rows], values[span.rows]
            old = layers[layer]
            stored = 0 if old is None else old[0].shape[0]
            if span.start > stored:
                raise ValueError(
                    f"request {span.request_id} goes on at {span.start}, layer {layer} has {stored} tokens"
                )
            if old is not None:
                # cutting at `start` drops what an interrupted forward pass may have left behind
                new_keys = torch.cat([old[0][: span.start], new_keys])
                new_values = torch.cat([old[1][: span.start], new_values])
            layers[layer] = (new_keys, new_values)

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, each [length, kv_heads, head_dim]."""
        stored = self._stored[request_id][layer]
        if stored is None:
            raise KeyError(f"request {request_id} has written nothing into layer {layer}")
        return stored

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens in every layer."""
        keep = self.length(request_id) - tokens
        if tokens < 0 or keep < 0:
            raise ValueError(f"cannot rewind {tokens} tokens: request {request_id} has {self.length(request_id)}")
        if request_id in self._stored:
            layers = self._stored[request_id]
            self._stored[request_id] = [pair and (pair[0][:keep], pair[1][:keep]) for pair in layers]

    def release(self, request_id: int) -> None:
        """Drops everything stored for the request."""
        self._stored.pop(request_id, None)
