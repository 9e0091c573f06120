"""Attention for many decode steps at once: a few products for all requests, instead of a few for each.

A decode step brings one query a request. `attention.attend` computes one request after the other, and with 32 of them
in each of 30 layers most of the time goes into beginning small operations. Here the blocks of several requests are
gathered behind each other, as wide as the longest of them, and one product serves the group:

    request 7   k k k k k ·        the dots are weightless: their scores are -inf, and their values 0
    request 4   k k k k k k

What stays equal: every weight and every sum, but for the order of additions. What it costs: the gather, and the dots;
so requests of like length go together, and a group is small enough for its keys and values to stay in the processor's
cache. It wins from two requests on, and most where contexts are short. Prompts, and caches without blocks, are left to
`attention.attend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from llmfromscratch import attention, kv_cache
from llmfromscratch.batch import Batch, Span

_GROUP_TOKENS = 3072  # keys and values of a group, padding included: of 1000 to 5000 tried, none is clearly better


def applies(cache: kv_cache.KVCache, batch: Batch) -> TypeGuard[kv_cache.PagedKVCache]:
    """Whether there is anything to win: two decode steps or more over a cache of blocks."""
    return isinstance(cache, kv_cache.PagedKVCache) and sum(span.length == 1 for span in batch.spans) > 1


@dataclass(frozen=True)
class Group:
    """Requests that are attended to together; the same for every layer of a pass.

    rows: int64 [requests], where their queries stand. blocks: int64 [requests * blocks of the longest], their tables
    behind each other, filled up with any block. hidden: bool [requests, width], True behind a request's newest token;
    padding: where that is in the flattened width, int64.
    """

    rows: Tensor
    blocks: Tensor
    hidden: Tensor
    padding: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], cache: kv_cache.PagedKVCache, device: torch.device) -> Group:
        """The group of these decode steps."""
        widest = -(-max(span.start + 1 for span in spans) // cache.block_size)
        tables = [cache.block_tables[span.request_id][:widest] for span in spans]
        blocks = [block for table in tables for block in [*table, *[0] * (widest - len(table))]]
        lengths = torch.tensor([span.start + 1 for span in spans], device=device)
        hidden = torch.arange(widest * cache.block_size, device=device) >= lengths[:, None]
        rows = torch.tensor([span.first_row for span in spans], device=device)
        return cls(rows, torch.tensor(blocks, device=device), hidden, hidden.flatten().nonzero().flatten())


def attend(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.PagedKVCache) -> Tensor:
    """As `attention.attend`: queries [tokens, heads, head_dim] over each row's own request; same shape."""
    others = tuple(span for span in batch.spans if span.length > 1)
    output = attention.attend(queries, layer, replace(batch, spans=others), cache)

    def plan() -> list[Group]:
        alone = [span for span in batch.spans if span.length == 1]
        return [Group.of(spans, cache, queries.device) for spans in groups(alone)]

    for group in cache.gathers.once((batch.spans, queries.device), plan):
        output[group.rows] = _attend_group(queries[group.rows], layer, group, cache)
    return output


def groups(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Requests of like length, as many as _GROUP_TOKENS hold when all are padded to the longest; at least one."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if group and (len(group) + 1) * (span.start + 1) > _GROUP_TOKENS:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _attend_group(queries: Tensor, layer: int, group: Group, cache: kv_cache.PagedKVCache) -> Tensor:
    """queries: [requests, heads, head_dim], one a request; returns the same shape."""
    requests, heads, head_dim = queries.shape
    keys, values = read_padded(layer, group, cache)
    kv_heads, width = keys.shape[0], keys.shape[2]
    grouped = (queries * head_dim**-0.5).view(requests, kv_heads, -1, head_dim).transpose(0, 1).flatten(0, 1)
    scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2)).view(kv_heads, requests, -1, width)
    scores.masked_fill_(group.hidden[:, None], float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    mixed = torch.bmm(weights.to(values.dtype).flatten(0, 1), values.flatten(0, 1))
    return mixed.view(kv_heads, requests, -1, head_dim).transpose(0, 1).reshape(requests, heads, head_dim)


def read_padded(layer: int, group: Group, cache: kv_cache.PagedKVCache) -> tuple[Tensor, Tensor]:
    """Keys and values of several requests, each [kv_heads, requests, width, head_dim].

    width: whole blocks, enough for the longest. Behind a request's newest token the keys are anything, and the values
    0, because nothing times NaN is NaN. Both lie in memory that `cache.gathers` lends: the next read overwrites it.
    """
    stored = cache.storage[layer]
    room = cache.gathers.room(stored, len(group.blocks))
    found = torch.index_select(stored, 2, group.blocks, out=room).flatten(2, 3)
    found[1].index_fill_(1, group.padding, 0)
    keys, values = found.view(2, stored.shape[1], *group.hidden.shape, stored.shape[-1])
    return keys, values
