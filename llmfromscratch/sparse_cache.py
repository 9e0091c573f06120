"""Caches that forget: memory that stays bounded however long the text grows, at a price in quality.

What a query may see depends on what was kept, so these caches bring their own `attend`, and the model uses it.

    SlidingWindow   the first few tokens and the newest ones      0 1 2 3 · · · · ·  9 10 11 12
    HeavyHitters    the newest ones and the most looked at        0 · 2 · · 5 6 · ·  · 10 11 12

Both keep every token at its true position: nothing is renumbered. Both copy what they keep in each step, a constant
cost, since what they keep is bounded. A pass brings a chunk of any size, and all of it stays until the request's next
pass: only then is it certain that no layer was interrupted and that nobody takes tokens back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmfromscratch import attention, cache_parts
from llmfromscratch.batch import Batch, Span


@dataclass(frozen=True)
class Kept:
    """What one layer still has of one request, in the order of the text.

    positions: int64 [kept]; keys, values: [kept, kv_heads, head_dim].
    length: tokens seen so far, the forgotten ones too; floor: the shortest length that can still be gone back to.
    received: [1 + n, kept], attention weight that each token got, summed over heads: from all passes before the newest
    together, and from each of the n queries of the newest. n is 0 where nobody counts.
    """

    positions: Tensor
    keys: Tensor
    values: Tensor
    length: int
    floor: int
    received: Tensor

    def take(self, which: Tensor) -> Kept:
        """Only the tokens that `which` (bool [kept] or int64 [n]) names."""
        return replace(
            self,
            positions=self.positions[which],
            keys=self.keys[which],
            values=self.values[which],
            received=self.received[:, which],
        )

    def cut(self, length: int) -> Kept:
        """Only the tokens before position `length`, and what their queries looked at. ValueError below `floor`."""
        if length < self.floor:
            raise ValueError(
                f"cannot go back to {length} tokens: what the next token would see was forgotten when the text had "
                f"{self.floor}; take back fewer tokens, or compute the request anew"
            )
        queries = self.received.shape[0] - 1 - (self.length - length)
        short = replace(self, length=length, received=self.received[: 1 + max(0, queries)])
        return short.take(self.positions < length) if length < self.length else short


class _Forgetting(cache_parts.Unshared):
    """What both caches share: the bookkeeping of `kv_cache.KVCache`, with one `Kept` per request and layer.

    What is kept of a text depends on all of it, so no other request can take it over.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self._stored: dict[int, list[Kept | None]] = {}

    def length(self, request_id: int) -> int:
        """Tokens that every layer has seen, kept or forgotten: the position of the next one."""
        last = self._stored.get(request_id, [None])[-1]
        return 0 if last is None else last.length

    def reserve(self, request_id: int, tokens: int) -> None:
        """Nothing to do: what a request may hold is bounded from the start."""

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Forgets what no longer fits, then appends keys and values, each [tokens, kv_heads, head_dim]."""
        for span in batch.spans:
            cache_parts.check_start(span, self.length(span.request_id))
            layers = self._stored.setdefault(span.request_id, [None] * self.num_layers)
            old = layers[layer]
            new = _kept(keys[span.rows], values[span.rows], span)
            # cutting at `start` drops what an interrupted forward pass may have left behind
            layers[layer] = new if old is None else _joined(self._forget(old.cut(span.start)), new)

    def _forget(self, old: Kept) -> Kept:
        """What is left of `old` for the query at position old.length."""
        raise NotImplementedError

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """The keys and values that are kept, each [kept, kv_heads, head_dim], in the order of the text."""
        kept = self._kept(layer, request_id)
        return kept.keys, kept.values

    def positions(self, layer: int, request_id: int) -> Tensor:
        """Where the kept tokens stand in the text: int64 [kept], rising."""
        return self._kept(layer, request_id).positions

    def rewind(self, request_id: int, tokens: int) -> None:
        """Takes the newest `tokens` back. ValueError where that needs what has been forgotten; nothing changes then."""
        length = self.length(request_id) - tokens
        cache_parts.check_rewind(request_id, tokens, length + tokens)
        if request_id in self._stored:
            layers = self._stored[request_id]
            self._stored[request_id] = [kept and kept.cut(min(length, kept.length)) for kept in layers]

    def fork(self, request_id: int, new_request_id: int) -> None:
        """The new request goes on from the same tokens; no step writes in place, so both may hold the same tensors."""
        cache_parts.check_new(new_request_id, new_request_id in self._stored)
        if request_id in self._stored:
            self._stored[new_request_id] = list(self._stored[request_id])

    def release(self, request_id: int) -> None:
        """Drops everything stored for the request; unknown ones are ignored."""
        self._stored.pop(request_id, None)

    def _kept(self, layer: int, request_id: int) -> Kept:
        kept = self._stored[request_id][layer]
        if kept is None:
            raise KeyError(f"request {request_id} has written nothing into layer {layer}")
        return kept


def _kept(keys: Tensor, values: Tensor, span: Span) -> Kept:
    """The new tokens of a span alone."""
    end = span.start + span.length
    positions = torch.arange(span.start, end, device=keys.device)
    received = torch.zeros(1, span.length, dtype=torch.promote_types(keys.dtype, torch.float32), device=keys.device)
    return Kept(positions, keys, values, end, 0, received)


def _joined(old: Kept, new: Kept) -> Kept:
    return Kept(
        torch.cat([old.positions, new.positions]),
        torch.cat([old.keys, new.keys]),
        torch.cat([old.values, new.values]),
        new.length,
        old.floor,
        torch.cat([old.received, new.received], dim=1),
    )


class SlidingWindow(_Forgetting):
    """The first `sinks` tokens and the newest `window` ones. Xiao et al., "Efficient Streaming Language Models".

    A query at position q sees the key at position k when k <= q and (k < sinks or k > q - window): the window counts
    the query itself. This equals full attention under that mask, for any chunking. The sinks are there because a
    softmax has to put its weight somewhere, and models learn to leave what they do not need on the first tokens.
    The paper renumbers what it keeps; here positions stay true, so the model's context length still holds.
    """

    def __init__(self, num_layers: int, window: int, sinks: int = 4):
        if window < 1 or sinks < 0:
            raise ValueError(f"a window of {window} tokens behind {sinks} sinks: give at least 1 and at least 0.")
        super().__init__(num_layers)
        self.window, self.sinks = window, sinks

    def _forget(self, old: Kept) -> Kept:
        stays = (old.positions < self.sinks) | (old.positions > old.length - self.window)
        return old if bool(stays.all()) else replace(old.take(stays), floor=old.length)

    def attend(self, queries: Tensor, layer: int, batch: Batch) -> Tensor:
        """Attention of queries [tokens, heads, head_dim] over sinks and window; same shape."""
        output = torch.empty_like(queries)
        for span in batch.spans:
            kept = self._kept(layer, span.request_id)
            own, past = kept.positions[-span.length :, None], kept.positions[None]
            visible = (past <= own) & ((past < self.sinks) | (past > own - self.window))
            output[span.rows] = attention.grouped_attention(queries[span.rows], kept.keys, kept.values, visible)[0]
        return output


class HeavyHitters(_Forgetting):
    """The `recent` newest tokens and those that were looked at most, `budget` in all. Zhang et al., "H2O", algorithm 1.

    How much a token was looked at is the attention weight it got, summed over all heads and all queries so far; the
    paper chooses per head, here the heads of a layer share one choice. Before each pass all but `budget` tokens are
    forgotten; within it every query sees those and the pass's own tokens up to itself, so what is kept depends on how
    a prompt was cut. With a budget no shorter than the text this is full attention.
    Only tokens of the newest pass can be taken back: what older queries looked at is one sum.
    """

    def __init__(self, num_layers: int, budget: int, recent: int):
        if not 1 <= recent <= budget:
            raise ValueError(f"{recent} recent tokens of a budget of {budget}: give 1 <= recent <= budget.")
        super().__init__(num_layers)
        self.budget, self.recent = budget, recent

    def _forget(self, old: Kept) -> Kept:
        old = replace(old, floor=old.length, received=old.received.sum(dim=0, keepdim=True))
        kept = old.positions.shape[0]
        if kept <= self.budget:
            return old
        heavy = old.received[0, : kept - self.recent].topk(self.budget - self.recent).indices.sort().values
        return old.take(torch.cat([heavy, torch.arange(kept - self.recent, kept, device=heavy.device)]))

    def attend(self, queries: Tensor, layer: int, batch: Batch) -> Tensor:
        """Attention of queries [tokens, heads, head_dim] over what is kept, counting where they look; same shape."""
        output = torch.empty_like(queries)
        for span in batch.spans:
            kept = self._kept(layer, span.request_id)
            visible = kept.positions[None] <= kept.positions[-span.length :, None]
            found, weights = attention.grouped_attention(queries[span.rows], kept.keys, kept.values, visible)
            output[span.rows] = found
            received = torch.cat([kept.received, weights.sum(dim=0)])
            self._stored[span.request_id][layer] = replace(kept, received=received)
        return output
