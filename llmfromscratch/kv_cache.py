"""Key/value caches: what a decoder remembers of the tokens it has seen, so that each is computed once.

The one picture to keep in mind is the page. A request sees its tokens in a row; its block table says in which block of
memory each stretch lies, and requests whose texts begin alike hold the same block (here of 4 tokens):

    request 7:  tokens 0..3 | 4..7 | 8..9      block table [2, 0, 5]      block 2 is held twice: reference count 2
    request 9:  tokens 0..3 | 4..6             block table [2, 3]         blocks 0, 3 and 5: reference count 1

The module goes there in the order of history: none, concatenated, allocated beforehand, blocks, shared prefixes, pages.
All caches offer one interface (`KVCache`). Queries are not kept: a token's query serves its own pass and never again.

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", section 4; vLLM's prefix caching.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from llmfromscratch import cache_parts
from llmfromscratch.batch import Batch, Span
from llmfromscratch.cache_parts import CacheLayout as CacheLayout
from llmfromscratch.cache_parts import NoKVCache as NoKVCache  # where it all begins: nothing is remembered
from llmfromscratch.errors import OutOfMemory


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Bytes that one token takes in a cache: every layer keeps a key and a value of every key/value head.

    layers x 2 x kv heads x head dim x bytes. A 7B Llama in half precision: 32 x 2 x 32 x 128 x 2 = 524288 bytes.
    """
    return num_layers * 2 * num_kv_heads * head_dim * bytes_per_number


class KVCache(Protocol):
    """Keys and values of every layer, kept per request. A request begins with its first match, reserve or write."""

    capacity: int | None  # tokens that one request can have, with the whole cache to itself; None: any number

    def length(self, request_id: int) -> int:
        """Tokens that every layer has stored: those of an interrupted forward pass do not count."""

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Tokens of a new request's prompt that are here already and that it takes over; 0 if nothing is shared.

        At most len(token_ids) - 1: the last one must be computed to get its logits.
        """

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """What `match_prefix` would answer; takes nothing over and counts nothing."""

    def reserve(self, request_id: int, tokens: int) -> None:
        """Makes room for `tokens` more, or raises OutOfMemory and changes nothing. Asked twice, it takes no more."""

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim]. Layer 0 reserves; the last one advances the lengths."""

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [length + what this pass has written, kv_heads, head_dim]; KeyError if unknown.

        They may be views of memory that the next call changes: use them at once.
        """

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens. Raises ValueError if there are fewer."""

    def fork(self, request_id: int, new_request_id: int) -> None:
        """A new request goes on from the same tokens. Raises ValueError if that number is in use."""

    def release(self, request_id: int) -> None:
        """Forgets a request and gives its memory back; unknown requests are ignored."""


def append_rows(stored: Tensor | None, start: int, new: Tensor) -> Tensor:
    """The first `start` rows of what is stored, then the new rows; a tensor of its own, and `stored` stays as it is.

    stored: [at least start, kv_heads, head_dim], or None where nothing is stored yet (start is 0 then). More than that
    is there after a forward pass that was interrupted: what it left behind the first `start` rows does not count.
    new: [tokens, kv_heads, head_dim], the caller's: it is copied even where nothing is stored.
    Returns [start + tokens, kv_heads, head_dim].
    """
    return new.clone() if stored is None else torch.cat([stored[:start], new])


class ConcatKVCache(cache_parts.Unshared):
    """The plainest cache: each step concatenates the new keys and values to the old ones, and so copies them all."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self._stored: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

    def length(self, request_id: int) -> int:
        """Tokens stored in the last layer: a forward pass that was interrupted half-way has not come so far."""
        last = self._stored.get(request_id, [None])[-1]
        return 0 if last is None else last[0].shape[0]

    def reserve(self, request_id: int, tokens: int) -> None:
        """Memory is taken as it is needed."""

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Appends keys and values [tokens, kv_heads, head_dim] to the `span.start` tokens that each request has."""
        for span in batch.spans:
            cache_parts.check_start(span, self.length(span.request_id))
            layers = self._stored.setdefault(span.request_id, [None] * self.num_layers)
            old_keys, old_values = layers[layer] or (None, None)
            layers[layer] = (
                append_rows(old_keys, span.start, keys[span.rows]),
                append_rows(old_values, span.start, values[span.rows]),
            )

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, each [length, kv_heads, head_dim]."""
        stored = self._stored[request_id][layer]
        if stored is None:
            raise KeyError(f"request {request_id} has written nothing into layer {layer}")
        return stored

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens in every layer."""
        keep = self.length(request_id) - tokens
        cache_parts.check_rewind(request_id, tokens, keep + tokens)
        if request_id in self._stored:
            layers = self._stored[request_id]
            self._stored[request_id] = [pair and (pair[0][:keep], pair[1][:keep]) for pair in layers]

    def fork(self, request_id: int, new_request_id: int) -> None:
        """Both requests keep the same tensors: the next write of either makes new ones."""
        cache_parts.check_new(new_request_id, new_request_id in self._stored)
        if request_id in self._stored:
            self._stored[new_request_id] = list(self._stored[request_id])

    def release(self, request_id: int) -> None:
        """Drops everything stored for the request."""
        self._stored.pop(request_id, None)


def write_positions(row: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
    """Writes new keys and values at the positions start, start + 1, ... of one request's row; nothing else changes.

    row: [2 (keys, values), kv_heads, max_length, head_dim], a view of the cache: it is written in place.
    keys, values: [tokens, kv_heads, head_dim]; start + tokens is at most max_length.
    """
    positions = slice(start, start + keys.shape[0])
    row[0, :, positions] = keys.transpose(0, 1)
    row[1, :, positions] = values.transpose(0, 1)


class StaticKVCache(cache_parts.Unshared):
    """One tensor a layer, allocated beforehand and written by position: no step copies what is there already.

    storage[layer]: [2 (keys, values), max_requests, kv_heads, max_length, head_dim]. Heads come before positions: so
    attention reads a head's keys in one piece. A request occupies a whole row, however short its text is.
    """

    def __init__(self, layout: CacheLayout, max_requests: int, max_length: int):
        self.max_requests, self.max_length, self.capacity = max_requests, max_length, max_length
        shape = (2, max_requests, layout.num_kv_heads, max_length, layout.head_dim)
        self.storage = [torch.empty(shape, dtype=layout.dtype, device=device) for device in layout.devices]
        self.rows: dict[int, int] = {}  # request -> its row
        self.free_rows = list(reversed(range(max_requests)))
        self.counts = cache_parts.TokenCounts(layout.num_layers)
        self.gathers = cache_parts.Gathers()

    def length(self, request_id: int) -> int:
        """Tokens that every layer has stored."""
        return self.counts.length(request_id)

    def reserve(self, request_id: int, tokens: int) -> None:
        """Gives a new request a row. Raises OutOfMemory when none is free or a row is too short."""
        needed = self.length(request_id) + tokens
        if needed > self.max_length:
            raise OutOfMemory(f"request {request_id} needs room for {needed} tokens; a row holds {self.max_length}.")
        if request_id not in self.rows:
            if not self.free_rows:
                raise OutOfMemory(f"request {request_id} needs a row; all {self.max_requests} are taken.")
            self.rows[request_id] = self.free_rows.pop()

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] at positions span.start, span.start + 1, ... of the rows.

        Before layer 0 `begin` checks the spans and reserves; after each layer, `counts.advance` notes that it is there.
        """
        if layer == 0:
            self.begin(batch)
        for span in batch.spans:
            row = self.storage[layer][:, self.rows[span.request_id]]
            write_positions(row, span.start, keys[span.rows], values[span.rows])
        self.counts.advance(layer, batch)

    def begin(self, batch: Batch) -> None:
        """Every span goes on where its request ends, and has room."""
        self.gathers.clear()
        for span in batch.spans:
            cache_parts.check_start(span, self.length(span.request_id))
            self.reserve(span.request_id, span.length)

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Views of the request's keys and values, each [counts.visible(layer, request_id), kv_heads, head_dim]."""
        length = self.counts.visible(layer, request_id)
        keys, values = self.storage[layer][:, self.rows[request_id], :, :length].transpose(1, 2)
        return keys, values

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens: only a number changes."""
        self.counts.rewind(request_id, tokens)

    def fork(self, request_id: int, new_request_id: int) -> None:
        """Copies the tokens into another row. Raises OutOfMemory when none is free."""
        cache_parts.check_new(new_request_id, new_request_id in self.rows)
        if request_id in self.rows:
            length = self.length(request_id)
            self.reserve(new_request_id, length)
            for stored in self.storage:
                stored[:, self.rows[new_request_id], :, :length] = stored[:, self.rows[request_id], :, :length]
            self.counts.set(new_request_id, length)

    def release(self, request_id: int) -> None:
        """Gives the row back."""
        if request_id in self.rows:
            self.free_rows.append(self.rows.pop(request_id))
            self.counts.forget(request_id)


class BlockAllocator(cache_parts.BlockStates):
    """Hands out numbered blocks. A block is free, held (ref_counts[block] > 0) or kept: nobody holds it, but what is in
    it may serve later requests. The attributes are there (cache_parts.BlockStates); the methods keep them right:

    free: deque of blocks, the next one to hand out first; a released block may go to either end of it.
    ref_counts: list, the number of holders of each block. kept: OrderedDict, block -> None, least recently used first.
    on_evict: None if nobody wants to know; else a function that `allocate` calls with a kept block that it is about to
    hand out, before it counts the new holder. Sharing a kept block evicts nothing: its content stays.
    """

    def allocate(self) -> int:
        """A block for one holder: the first free one, else the oldest kept one. Raises OutOfMemory if there is none."""
        if self.free:
            block = self.free.popleft()
        elif self.kept:
            block, _ = self.kept.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(block)
        else:
            raise OutOfMemory(f"a block is needed, and all {len(self.ref_counts)} are held.")
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is held or kept. Raises ValueError for a free one."""
        if self.ref_counts[block] == 0 and block not in self.kept:
            raise ValueError(f"block {block} is free: there is nothing in it to share.")
        self.kept.pop(block, None)
        self.ref_counts[block] += 1

    def release(self, block: int, keep: bool = False) -> None:
        """One holder less; without holders the block becomes kept (keep=True) or free. ValueError if freed twice."""
        if self.ref_counts[block] == 0:
            raise ValueError(f"block {block} is freed twice: nobody holds it.")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0 and keep:
            self.kept[block] = None
        elif self.ref_counts[block] == 0:
            self.free.appendleft(block)  # handed out first, so that memory which was never touched stays so


def block_keys(token_ids: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """One key per full block: key i is the SHA-256 digest of key i - 1 (first `parent`) and the block's ids, each as 8
    bytes, little endian. So equal keys mean equal tokens from the beginning of the text on; with a hash that can be
    made to collide, one request could be handed what another has written.
    """
    keys = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        ids = token_ids[end - block_size : end]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}q", *ids)).digest()
        keys.append(parent)
    return keys


def slots_of(table: Sequence[int], start: int, length: int, block_size: int) -> Tensor:
    """The slots of the positions start, start + 1, ..., start + length - 1 of a request: int64 [length].

    table: the request's blocks in the order of its text; position p lies in table[p // block_size], at the place
    p % block_size. Slots are counted through all blocks of the cache: block * block_size + place.
    """
    positions = torch.arange(start, start + length)
    return torch.tensor(table)[positions // block_size] * block_size + positions % block_size


def read_blocks(stored: Tensor, blocks: Tensor, length: int, room: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers a request's keys and values, each [length, kv_heads, head_dim], out of its blocks, in their order.

    stored: [2 (keys, values), kv_heads, num_blocks, block_size, head_dim], one layer of the cache.
    blocks: int64 [n], just enough for `length` tokens; what else is in the last one does not count.
    room: [2, kv_heads, n, block_size, head_dim], memory to gather into, with torch.index_select(..., out=room): new
    memory for every read would take about as long as the gathering itself. The results are views of it.
    """
    torch.index_select(stored, 2, blocks, out=room)
    keys, values = room.flatten(2, 3)[:, :, :length].transpose(1, 2)
    return keys, values


def make_writable(table: list[int], index: int, allocator: BlockAllocator, storage: Sequence[Tensor]) -> None:
    """Copy on write: afterwards table[index] is a block that nobody else holds, with the content it had.

    A block with other holders (ref_counts above 1) stays theirs: allocate one, copy the old one into it in the storage
    of every layer, put it into the table, release the old one. A block of this table alone stays where it is.
    storage: one tensor a layer, each [2, kv_heads, num_blocks, block_size, head_dim]. The table is changed in place.
    Raises OutOfMemory, as allocate does, and has changed nothing then.
    """
    old = table[index]
    if allocator.ref_counts[old] > 1:
        table[index] = allocator.allocate()
        for stored in storage:
            stored[:, :, table[index]] = stored[:, :, old]
        allocator.release(old)


class PagedKVCache:
    """Tokens live in blocks, and a request holds just the blocks that its text needs, listed in its block table.

    storage[layer]: [2 (keys, values), kv_heads, num_blocks, block_size, head_dim]. Position p of a request lies in slot
    block_table[p // block_size] * block_size + p % block_size, counted through all blocks. With prefix_sharing, full
    blocks are published under their keys, and stay when nobody holds them until their memory is needed.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, block_size: int = 16, prefix_sharing: bool = True):
        self.layout, self.block_size, self.prefix_sharing = layout, block_size, prefix_sharing
        self.capacity: int | None = num_blocks * block_size
        shape = (2, layout.num_kv_heads, num_blocks, block_size, layout.head_dim)
        # `empty` takes no memory yet: the system gives it, page by page, when a block is first written
        self.storage = [torch.empty(shape, dtype=layout.dtype, device=device) for device in layout.devices]
        self.index = cache_parts.PrefixIndex()
        self.allocator = BlockAllocator(num_blocks, on_evict=self.index.forget)
        self.block_tables: dict[int, list[int]] = {}
        self.counts = cache_parts.TokenCounts(layout.num_layers)
        self.slot_mapping: dict[torch.device, Tensor] = {}  # of the pass under way: int64 [tokens]
        self.gathers = cache_parts.Gathers()
        self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self._tokens: dict[int, list[int]] = {}  # request -> its stored token ids (with prefix_sharing)
        self._keys: dict[int, list[bytes]] = {}  # request -> the keys of its full blocks (with prefix_sharing)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that requests can still get: the free ones, and the kept ones that would be evicted for them."""
        return self.allocator.num_available

    def length(self, request_id: int) -> int:
        """Tokens that every layer has stored."""
        return self.counts.length(request_id)

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Takes over the published blocks that begin the prompt; returns their tokens, at most len(token_ids) - 1."""
        if not self.prefix_sharing:
            return 0
        cache_parts.check_new(request_id, request_id in self.block_tables)
        keys = block_keys(token_ids[:-1], self.block_size)  # the last token is computed in any case
        blocks = self.index.find(keys)
        matched = len(blocks) * self.block_size
        self.prefix_query_tokens += len(token_ids)
        self.prefix_hit_tokens += matched
        if blocks:
            self._add(request_id, matched, blocks, list(token_ids[:matched]), keys[: len(blocks)])
        return matched

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """What `match_prefix` would answer; takes nothing over and counts nothing."""
        found, key = 0, b""
        while self.prefix_sharing and found + self.block_size < len(token_ids):  # hashes no further than it finds
            key = block_keys(token_ids[found : found + self.block_size], self.block_size, key)[0]
            if key not in self.index.blocks:
                break
            found += self.block_size
        return found

    def blocks_needed(self, request_id: int, tokens: int) -> int:
        """Blocks to allocate before `tokens` more can be written: new ones, and a copy of a last one that is shared."""
        length, table = self.length(request_id), self.block_tables.get(request_id, [])
        new = max(0, self._blocks(length + tokens) - len(table))
        shared = tokens and length % self.block_size and self.allocator.ref_counts[table[length // self.block_size]] > 1
        return new + bool(shared)

    def reserve(self, request_id: int, tokens: int) -> None:
        """Extends the block table for `tokens` more. Raises OutOfMemory, changing nothing, when blocks are lacking."""
        needed = self.blocks_needed(request_id, tokens)
        if needed > self.num_free_blocks:
            have = f"{self.num_free_blocks} of {len(self.allocator.ref_counts)} are free"
            raise OutOfMemory(f"request {request_id} needs {needed} more blocks of {self.block_size} tokens; {have}.")
        if request_id not in self.block_tables:
            self._add(request_id, 0, [], [], [])
        self.gathers.clear()
        length, table = self.length(request_id), self.block_tables[request_id]
        if tokens and length % self.block_size:
            self._make_writable(table, length // self.block_size)
        while len(table) < self._blocks(length + tokens):
            table.append(self.allocator.allocate())

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] in the slots of their positions, with one index_copy_.

        Before layer 0 `begin` reserves, and sets slot_mapping[device] for all layers; after each layer comes `end`.
        """
        if layer == 0:
            self.begin(batch)
        new = torch.stack([keys, values]).transpose(1, 2)  # [2, kv_heads, tokens, head_dim]
        self.storage[layer].flatten(2, 3).index_copy_(2, self.slot_mapping[self.layout.devices[layer]], new)
        self.end(layer, batch)

    def begin(self, batch: Batch) -> None:
        """Every span goes on where its request ends, and has room; the slots of all tokens are computed once a pass."""
        for span in batch.spans:
            cache_parts.check_start(span, self.length(span.request_id))
            self.reserve(span.request_id, span.length)
        slots = torch.cat([self._slots_of(span) for span in batch.spans])
        self.slot_mapping = {device: slots.to(device) for device in set(self.layout.devices)}

    def end(self, layer: int, batch: Batch) -> None:
        """Notes that a layer is written; with the last one, blocks that have become full are published."""
        if not self.counts.advance(layer, batch) or not self.prefix_sharing:
            return
        token_ids = batch.token_ids.tolist()
        for span in batch.spans:
            tokens, keys = self._tokens[span.request_id], self._keys[span.request_id]
            tokens += token_ids[span.rows]
            known = len(keys)
            keys += block_keys(tokens[known * self.block_size :], self.block_size, keys[-1] if keys else b"")
            for key, block in zip(keys[known:], self.block_tables[span.request_id][known:], strict=False):
                self.index.add(key, block)

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a request, each [counts.visible(layer, request_id), kv_heads, head_dim].

        Blocks that are neighbours (`gathers.index` says slice) are views; others are gathered, keys and values in one
        index_select, into memory that `gathers.room` lends until the next read: attention has used them by then.
        """
        stored, length = self.storage[layer], self.counts.visible(layer, request_id)
        blocks = self.gathers.index(self.block_tables[request_id], request_id, self._blocks(length), stored.device)
        if isinstance(blocks, slice):
            keys, values = stored[:, :, blocks].flatten(2, 3)[:, :, :length].transpose(1, 2)
            return keys, values
        return read_blocks(stored, blocks, length, self.gathers.room(stored, len(blocks)))

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens and gives back the blocks that are no longer needed."""
        keep = self.counts.rewind(request_id, tokens)
        if request_id in self.block_tables:
            del self._tokens[request_id][keep:]
            del self._keys[request_id][keep // self.block_size :]
            self._shorten_table(request_id, self._blocks(keep))

    def fork(self, request_id: int, new_request_id: int) -> None:
        """Shares all blocks with a new request; whoever writes into a shared one first gets a copy of it."""
        cache_parts.check_new(new_request_id, new_request_id in self.block_tables)
        if request_id in self.block_tables:
            length, tokens, keys = self.length(request_id), self._tokens[request_id], self._keys[request_id]
            blocks = self.block_tables[request_id][: self._blocks(length)]
            self._add(new_request_id, length, blocks, tokens[:], keys[:])

    def release(self, request_id: int) -> None:
        """Gives all blocks back; published ones are kept."""
        if request_id in self.block_tables:
            self._shorten_table(request_id, 0)
            self.counts.forget(request_id)
            del self.block_tables[request_id], self._tokens[request_id], self._keys[request_id]

    def _slots_of(self, span: Span) -> Tensor:
        return slots_of(self.block_tables[span.request_id], span.start, span.length, self.block_size)

    def _make_writable(self, table: list[int], index: int) -> None:
        make_writable(table, index, self.allocator, self.storage)
        self.index.forget(table[index])  # its content will change

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)  # rounded up

    def _add(self, request_id: int, length: int, blocks: list[int], tokens: list[int], keys: list[bytes]) -> None:
        for block in blocks:
            self.allocator.share(block)
        self.block_tables[request_id], self._tokens[request_id], self._keys[request_id] = blocks, tokens, keys
        self.counts.set(request_id, length)

    def _shorten_table(self, request_id: int, num_blocks: int) -> None:
        self.gathers.clear()
        table = self.block_tables[request_id]
        while len(table) > num_blocks:  # from the end, so that the beginning, which can serve most, is evicted last
            block = table.pop()
            self.allocator.release(block, keep=block in self.index)

    def audit(self) -> None:
        """Raises RuntimeError naming what does not add up; tests call it after every step."""
        covering = {request_id: self._blocks(self.length(request_id)) for request_id in self.block_tables}
        cache_parts.audit(self.allocator, self.index, self.block_tables, self._keys, covering)
