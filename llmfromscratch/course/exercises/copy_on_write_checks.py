"""The check of chapter 3's copy on write: a block that others hold is copied before it is written.

The function is looked at alone, on a table, an allocator and a storage made for it, and then at work in the engine's
own PagedKVCache.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, NamedParts, compare
from llmfromscratch.course.exercises.cache_checks import rows_of_numbers
from llmfromscratch.course.exercises.cache_histories import EXACT, LAYERS, check_in_engine
from llmfromscratch.errors import OutOfMemory

_SIZE, _HEADS = 2, (2, 1)


def check_make_writable(make_writable: Callable[[list[int], int, Any, Sequence[Tensor]], None]) -> None:
    """Against what the docstring promises; then histories of the engine's PagedKVCache with forks in them."""
    compare(
        partial(_made_writable, make_writable),
        _promised,
        [
            Case(
                f"table {table}, index {index}: block {table[index]} has {others[index] or 'no'} other "
                f"holder{'s' * (others[index] != 1)}, {blocks - len(table)} of {blocks} blocks "
                f"{'is' if blocks - len(table) == 1 else 'are'} free",
                *(table, index, others, blocks),
            )
            for table, index, others, blocks in (
                ([0], 0, [0], 3),
                ([2], 0, [1], 4),
                ([0], 0, [1], 3),
                ([1], 0, [2], 3),
                ([1, 0], 0, [1, 0], 4),
                ([1, 0], 1, [1, 1], 4),
                ([3, 0, 2], 1, [1, 1, 1], 6),
                ([3, 0, 2], 1, [1, 0, 1], 6),
                ([3, 0, 2], 2, [0, 0, 3], 4),
                ([1, 0], 0, [0, 0], 2),
                ([1, 0], 0, [1, 1], 2),
                ([0], 0, [1], 1),
            )
        ],
        expected="a block of its own at this place of the table, with the rows it had, and nothing changed for anyone "
        "else; OutOfMemory and no change at all where a block is lacking",
        mistakes=combined(_wrongly_made, _MISTAKES, at_once=2),
        explain=_of_storage,
        tolerance=EXACT,
        what="afterwards",
    )
    check_in_engine("make_writable", make_writable, "PagedKVCache")


def _of_storage(error: BaseException, case: Case) -> str:
    if "indices must be integers or slices, not tuple" in str(error):
        return "`storage` is a list with one tensor a layer: every one of them has its part of the block"
    if isinstance(error, IndexError) and re.search("for dimension [01]", str(error)):
        return "a layer's tensor has keys and values first, then the heads; its blocks are dimension 2"
    return ""


def _content(block: int, layer: int) -> Tensor:
    """What a block holds: keys and values [2, kv_heads, block_size, head_dim] from 20 on in block 1."""
    first = 100 * layer + 10 * (block + 1)
    keys = rows_of_numbers(range(first, first + _SIZE), _HEADS, torch.float32).transpose(0, 1)
    return torch.stack([keys, -keys])


def _made_writable(
    make_writable: Callable[..., Any], table: list[int], index: int, others: list[int], blocks: int
) -> NamedParts:
    """What table, allocator and storage are after the call; others: how many more hold each block of the table."""
    allocator = learner_engine.reference("kv_cache").BlockAllocator(blocks)
    for block, more in zip(table, others, strict=True):
        allocator.free.remove(block)
        allocator.ref_counts[block] = 1 + more
    storage = [torch.stack([_content(block, layer) for block in range(blocks)], dim=2) for layer in range(LAYERS)]
    mine = list(table)
    try:
        make_writable(mine, index, allocator, storage)
        raised = "nothing"
    except OutOfMemory:
        raised = "OutOfMemory"
    return _state(raised, table, mine, index, allocator, storage)


def _state(
    raised: str, table: list[int], mine: list[int], index: int, allocator: Any, storage: Sequence[Tensor]
) -> NamedParts:
    """In words where numbers may differ: it is no matter which free block is taken."""
    old, now = table[index], mine[index]
    contents = {
        f"layer {layer}, the {kind} in the block that it has there now": stored[place, :, now].clone()
        for layer, stored in enumerate(storage)
        for place, kind in enumerate(("keys", "values"))
    }
    kept = [block for block in range(len(allocator.ref_counts)) if block != now]
    parts = {
        "raised": raised,
        "the block at this place of the table": "the old one" if now == old else "another one",
        "the table, this place left out": [*mine[:index], *mine[index + 1 :]],
        "holders of the block that it had there": allocator.ref_counts[old],
        "holders of the block that it has there now": allocator.ref_counts[now],
        "free blocks": len(allocator.free),
        **contents,
        "all other blocks hold what they held": all(
            torch.equal(stored[:, :, block], _content(block, layer))
            for layer, stored in enumerate(storage)
            for block in kept
        ),
    }
    return NamedParts(parts)


def _promised(table: list[int], index: int, others: list[int], blocks: int) -> NamedParts:
    """What the docstring promises, from nothing but the numbers of the case."""
    shared, free = others[index] > 0, blocks - len(table)
    copied = shared and free > 0
    contents = {
        f"layer {layer}, the {kind} in the block that it has there now": _content(table[index], layer)[place]
        for layer in range(LAYERS)
        for place, kind in enumerate(("keys", "values"))
    }
    parts = {
        "raised": "OutOfMemory" if shared and not free else "nothing",
        "the block at this place of the table": "another one" if copied else "the old one",
        "the table, this place left out": [*table[:index], *table[index + 1 :]],
        "holders of the block that it had there": 1 + others[index] - copied,
        "holders of the block that it has there now": 1 if copied else 1 + others[index],
        "free blocks": free - copied,
        **contents,
        "all other blocks hold what they held": True,
    }
    return NamedParts(parts)


def _wrongly_made(
    table: str = "own",
    layers: slice = slice(None),
    kinds: slice = slice(None),
    heads: slice = slice(None),
    backwards: bool = False,
    new_block: Callable[[Any], int] = lambda allocator: allocator.allocate(),
    before: Callable[[Any, int], None] = lambda allocator, old: None,
    after: Callable[[Any, int, int], None] = lambda allocator, old, new: allocator.release(old),
    copies: Callable[[int], bool] = lambda count: count > 1,
    block: Callable[[list[int], int], int] = lambda mine, index: mine[index],
    copied: Callable[[int, int, int], int] = lambda old, new, index: old,
    places: Callable[[list[int], int], Sequence[int]] = lambda mine, index: [index],
    counted: Callable[[int, int], int] = lambda old, index: old,
    swallowed: bool = False,
) -> Callable[..., NamedParts]:
    """Copy on write with mistakes; before, after: what the allocator is told before and after the copy."""

    def copy(mine: list[int], index: int, allocator: Any, storage: Sequence[Tensor]) -> None:
        old = block(mine, index)
        if not copies(allocator.ref_counts[counted(old, index)]):
            return
        before(allocator, old)
        new = new_block(allocator)
        for stored in storage[layers]:
            target = old if backwards else new
            stored[kinds, heads, target] = stored[kinds, heads, new if backwards else copied(old, new, index)]
        if table == "own":
            mine[index] = new
        elif table != "old":
            mine.insert({"behind": len(mine), "before": index}[table], new)
        after(allocator, old, new)

    def make_writable(mine: list[int], index: int, allocator: Any, storage: Sequence[Tensor]) -> None:
        with contextlib.suppress(*[OutOfMemory] * swallowed):
            for place in places(mine, index):
                copy(mine, place, allocator, storage)

    return partial(_made_writable, make_writable)


def _twice(allocator: Any, old: int, new: int) -> None:
    allocator.release(old)
    allocator.release(old)


def _shared_too(allocator: Any, old: int, new: int) -> None:
    allocator.release(old)
    allocator.share(new)


_MISTAKES: list[tuple[str, Settings]] = [
    ("the shared block stays: the request will write into it, and the text of the others changes",
     {"copies": lambda count: False}),
    ("a copy is made, but the table still names the old block", {"table": "old"}),
    ("the new block is put behind the table; it takes the place of the old one", {"table": "behind"}),
    ("the new block is put in front of the old one; it takes its place", {"table": "before"}),
    ("the new block is empty: the tokens that were in the old one are not copied", {"layers": slice(0)}),
    ("only the last layer is copied; every layer has its part of the block", {"layers": slice(-1, None)}),
    ("only layer 0 is copied; every layer has its part of the block", {"layers": slice(1)}),
    ("only the keys are copied", {"kinds": slice(1)}),
    ("only the values are copied", {"kinds": slice(1, None)}),
    ("only the first head is copied", {"heads": slice(1)}),
    ("the copy goes from the new block to the old one, and everyone's tokens are lost", {"backwards": True}),
    ("the old block still counts this request as a holder, and will never be free",
     {"after": lambda allocator, old, new: None}),
    ("the old block is released more than once; others hold it", {"after": _twice}),
    ("the new block is released; it is the old one that this request no longer holds",
     {"after": lambda allocator, old, new: allocator.release(new)}),
    ("the new block has two holders: `allocate` has counted this request already", {"after": _shared_too}),
    ("the new block is taken out of `free` without being counted; `allocate` does both",
     {"new_block": lambda allocator: allocator.free.popleft()}),
    ("the old block is released before there is a new one: where none is left, a holder is missing afterwards",
     {"before": lambda allocator, old: allocator.release(old), "after": lambda allocator, old, new: None}),
    ("a block that belongs to this table alone is copied too; who else should mind that it changes?",
     {"copies": lambda count: True}),
    ("it is the other way round: the block with other holders is copied, the one of this table alone stays",
     {"copies": lambda count: count == 1}),
    ("a block with one other holder stays; one is enough to be hurt", {"copies": lambda count: count > 2}),
    ("the last block of the table is made writable; `index` says which is asked for",
     {"places": lambda mine, index: [len(mine) - 1]}),
    ("the first block of the table is made writable; `index` says which is asked for",
     {"places": lambda mine, index: [0]}),
    ("all shared blocks of the table are copied; `index` says which is asked for",
     {"places": lambda mine, index: range(len(mine))}),
    ("`index` is taken for the number of a block; it is a place in the table",
     {"block": lambda mine, index: index}),
    ("the holders of the block with the number `index` are counted; `index` is a place in the table, and the block "
     "there is table[index]", {"counted": lambda old, index: index}),
    ("where no block is left nothing is raised, and the caller will write into the shared one: let OutOfMemory through",
     {"swallowed": True}),
    ("the block with the number `index` is copied; the one at this place of the table should be",
     {"copied": lambda old, new, index: index}),
    ("the new block is copied onto itself: the table named it already when the old one was looked up",
     {"copied": lambda old, new, index: new}),
]  # fmt: skip
