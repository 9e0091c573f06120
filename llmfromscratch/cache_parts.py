"""What stands around the caches of `kv_cache.py`: no cache at all, and what they count, look up and audit with.

Nothing here decides how a cache works, so chapter 3 gives it to the learner as it is.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from llmfromscratch.batch import Batch, Span
from llmfromscratch.config import ModelConfig

Made = TypeVar("Made")
Devices = str | torch.device | Sequence[str | torch.device]


@dataclass(frozen=True)
class CacheLayout:
    """The shape of what a cache stores. devices: one per layer; keys and values lie where their layer lies."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype = torch.float32, devices: Devices = "cpu") -> CacheLayout:
        """The layout for a model; devices: one for all layers, or one each. Raises ValueError for a wrong number."""
        each = [devices] * config.num_layers if isinstance(devices, str | torch.device) else devices
        if len(each) != config.num_layers:
            raise ValueError(f"{len(each)} devices were given for {config.num_layers} layers; give one, or one each.")
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, dtype, tuple(map(torch.device, each)))


def check_start(span: Span, length: int) -> None:
    """Raises ValueError unless a span begins where its request's stored tokens end."""
    if span.start != length:
        raise ValueError(
            f"request {span.request_id} goes on at {span.start}, but the cache holds {length} tokens of it; "
            f"feed the tokens from {length} on, or rewind first."
        )


def check_rewind(request_id: int, tokens: int, length: int) -> None:
    """Raises ValueError unless the newest `tokens` of a request of `length` tokens can be forgotten."""
    if not 0 <= tokens <= length:
        raise ValueError(f"cannot rewind {tokens} tokens: request {request_id} has {length}.")


def check_new(request_id: int, exists: bool) -> None:
    """Raises ValueError if a request that should begin now exists already."""
    if exists:
        raise ValueError(f"request {request_id} is in the cache already; release it first, or choose another number.")


class Unshared:
    """What caches answer whose requests share nothing. capacity: tokens that one request can have; None: any number."""

    capacity: int | None = None

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """0: nothing is taken over."""
        return 0

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """0: nothing would be taken over."""
        return 0


class NoKVCache(Unshared):
    """Remembers nothing between passes: the length is always 0, so every pass computes the whole text again."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self._layer = -1
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # of one layer, the one that attends next

    def length(self, request_id: int) -> int:
        """Always 0."""
        return 0

    def reserve(self, request_id: int, tokens: int) -> None:
        """There is nothing to reserve."""

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Holds one layer's keys and values [tokens, kv_heads, head_dim] until the next layer writes."""
        for span in batch.spans:
            check_start(span, 0)
        self._layer = layer
        self._pairs = {span.request_id: (keys[span.rows], values[span.rows]) for span in batch.spans}

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """What this pass has just written into this layer, each [tokens, kv_heads, head_dim]."""
        if layer != self._layer or request_id not in self._pairs:
            raise KeyError(f"request {request_id} has just written nothing into layer {layer}")
        return self._pairs[request_id]

    def rewind(self, request_id: int, tokens: int) -> None:
        """What was not kept need not be forgotten: the next pass is fed the shorter text."""

    def fork(self, request_id: int, new_request_id: int) -> None:
        """There is nothing to share."""

    def release(self, request_id: int) -> None:
        """Lets go of what the newest pass has left."""
        self._pairs.pop(request_id, None)


class TokenCounts:
    """Counts the stored tokens of each request for a cache that writes by position.

    A pass begins with layer 0 and counts when the last layer is written. An interrupted pass thus never counts, and the
    next one writes over what it left.
    """

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.stored: dict[int, int] = {}
        self._layer = -1  # the newest layer that the pass under way has written
        self._spans: tuple[Span, ...] = ()
        self._ends: dict[int, int] = {}  # request -> its tokens once that pass is complete

    def length(self, request_id: int) -> int:
        """Tokens that every layer has."""
        return self.stored.get(request_id, 0)

    def visible(self, layer: int, request_id: int) -> int:
        """Tokens that one layer has, those of the pass under way included."""
        ends = self._ends if layer <= self._layer else self.stored
        return ends.get(request_id) or self.length(request_id)

    def advance(self, layer: int, batch: Batch) -> bool:
        """Notes that a layer is written; True with the last one. Raises ValueError where a pass is not in order."""
        if layer == 0:
            self._layer, self._spans = -1, batch.spans
            self._ends = {span.request_id: span.start + span.length for span in batch.spans}
        if layer != self._layer + 1 or self._spans != batch.spans:
            raise ValueError(
                f"layer {layer} was written after layer {self._layer} of this batch; "
                "a forward pass writes one batch into layer 0, 1, ..., and ends when a request in it changes."
            )
        self._layer = layer
        complete = layer == self.num_layers - 1
        if complete:
            self.stored.update(self._ends)
            self._end_pass()
        return complete

    def set(self, request_id: int, length: int) -> None:
        """A request has so many tokens now. A pass that was under way was interrupted: it cannot go on."""
        self._end_pass()
        self.stored[request_id] = length

    def rewind(self, request_id: int, tokens: int) -> int:
        """Takes the newest `tokens` tokens off; returns how many are left. Raises ValueError if there are fewer."""
        keep = self.length(request_id) - tokens
        check_rewind(request_id, tokens, keep + tokens)
        if request_id in self.stored:
            self.set(request_id, keep)
        return keep

    def forget(self, request_id: int) -> None:
        """A request is gone."""
        self._end_pass()
        self.stored.pop(request_id, None)

    def _end_pass(self) -> None:
        self._layer, self._spans, self._ends = -1, (), {}


class BlockStates:
    """The state of numbered blocks: free (in the order they are handed out), held by so many, or kept.

    on_evict(block) is called before `allocate` hands out a kept block.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        self.free: deque[int] = deque(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that can still be handed out: the free and the kept ones."""
        return len(self.free) + len(self.kept)


class PrefixIndex:
    """Finds the block that holds the tokens of a key; a block has one key at most, and a key one block."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self.keys

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the first keys, up to the first one that is missing."""
        found: list[int] = []
        for key in keys:
            if key not in self.blocks:
                break
            found.append(self.blocks[key])
        return found

    def add(self, key: bytes, block: int) -> None:
        """Publishes a block. An entry that exists stays: requests may hold its block, and both hold the same."""
        if key not in self.blocks:
            self.blocks[key] = block
            self.keys[block] = key

    def forget(self, block: int) -> None:
        """Takes a block out, because it will be written; unknown ones are ignored."""
        if block in self.keys:
            del self.blocks[self.keys.pop(block)]


class Gathers:
    """What a paged cache needs to read: which blocks, looked up once a pass and not once a layer, and memory for them.

    The memory is kept between reads, one piece a device: fresh memory would take longer than the gather itself, because
    the system has to hand out and clear every page of it.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._buffers: dict[torch.device, Tensor] = {}

    def clear(self) -> None:
        """Block tables have changed, or a new pass begins."""
        self._made.clear()

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gives: made for the first layer of a pass that asks under this key, the same for the others."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def known(self, key: Hashable) -> Any:
        """What `once` has made under this key in the pass under way; None where it has made nothing."""
        return self._made.get(key)

    def index(self, table: Sequence[int], request_id: int, num_blocks: int, device: torch.device) -> slice | Tensor:
        """The first blocks of a request's table: a slice if they are neighbours in memory, else int64 [num_blocks]."""

        def look_up() -> slice | Tensor:
            first = table[0] if num_blocks else 0
            run = list(range(first, first + num_blocks))
            blocks = list(table[:num_blocks])
            return slice(first, first + num_blocks) if blocks == run else torch.tensor(blocks).to(device)

        return self.once((request_id, num_blocks, device), look_up)

    def room(self, stored: Tensor, num_blocks: int) -> Tensor:
        """[2, kv_heads, num_blocks, block_size, head_dim] of the dtype and device of `stored`, to be overwritten."""
        needed = stored[:, :, 0].numel() * num_blocks
        buffer = self._buffers.get(stored.device)
        if buffer is None or buffer.numel() < needed:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
                buffer = stored.new_empty(2 * needed)  # twice: not again for every block that a text grows by
            self._buffers[stored.device] = buffer
        return buffer[:needed].view(*stored.shape[:2], num_blocks, *stored.shape[3:])


def audit(
    allocator: BlockStates,
    index: PrefixIndex,
    tables: Mapping[int, Sequence[int]],
    keys: Mapping[int, Sequence[bytes]],
    covering: Mapping[int, int],
) -> None:
    """Raises RuntimeError with everything that does not add up in a paged cache.

    tables, keys: each request's blocks and the keys of its full ones; covering: how many blocks its tokens need.
    """
    faults = [*_faults_of_blocks(allocator, tables), *_faults_of_index(allocator, index)]
    for request_id, table in tables.items():
        found = _faults_of_request(allocator, index, table, keys[request_id], covering[request_id])
        faults += [f"request {request_id}: {fault}" for fault in found]
    if faults:
        raise RuntimeError("the cache does not add up: " + "; ".join(faults))


def _faults_of_blocks(allocator: BlockStates, tables: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Every block is free, kept or held, and is held as often as it is counted."""
    holders = [0] * len(allocator.ref_counts)
    for table in tables.values():
        for block in table:
            holders[block] += 1
    used = [block for block, count in enumerate(holders) if count]
    free, kept = sorted(allocator.free), sorted(allocator.kept)
    if sorted([*free, *used, *kept]) != list(range(len(holders))):
        yield f"free {free} + used {used} + kept {kept} are not the {len(holders)} blocks, each once"
    if holders != allocator.ref_counts:
        yield f"the reference counts are {allocator.ref_counts}, the holders are {holders}"


def _faults_of_index(allocator: BlockStates, index: PrefixIndex) -> Iterator[str]:
    """Keys and blocks agree, kept blocks are published, free ones are not."""
    if {block: key for key, block in index.blocks.items()} != index.keys:
        yield "the prefix index leads from a key to a block and back to another key"
    if unknown := sorted(set(allocator.kept) - set(index.keys)):
        yield f"the blocks {unknown} are kept, but no key leads to them"
    if published := sorted(set(allocator.free) & set(index.keys)):
        yield f"the blocks {published} are free, but a key leads to them"


def _faults_of_request(
    allocator: BlockStates, index: PrefixIndex, table: Sequence[int], keys: Sequence[bytes], covering: int
) -> Iterator[str]:
    """Its tokens have blocks, published under its own keys; blocks behind them are its own and unpublished."""
    if len(table) < covering:
        yield f"its tokens need {covering} blocks, its table has {len(table)}"
    for block in table[covering:]:
        if allocator.ref_counts[block] != 1 or block in index:
            yield f"block {block} will be written, but is shared or published"
    for block, key in zip(table, keys, strict=False):
        if index.keys.get(block, key) != key:
            yield f"block {block} is published under the key of another text"
