"""The checks of chapter 3's pages: in which slot a token lies, and how a request's blocks are read.

Each function is looked at alone, against plain loops, and then at work in the engine's own PagedKVCache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, compare, expect_equal
from llmfromscratch.course.exercises.cache_checks import rows_of_numbers
from llmfromscratch.course.exercises.cache_histories import EXACT, check_in_engine
from llmfromscratch.course.exercises.tensor_watch import watched

Pair = tuple[Tensor, Tensor]

# ---- 3.10 slots --------------------------------------------------------------------------------------------------


def check_slots_of(slots_of: Callable[[list[int], int, int, int], Tensor]) -> None:
    """Against the rule, position by position; then histories of the engine's PagedKVCache."""
    compare(
        slots_of,
        _slots(),
        [
            Case(f"table {table}, start {start}, length {length}, block_size {size}", table, start, length, size)
            for table, start, length, size in (
                ([0], 0, 1, 4),
                ([2], 0, 3, 4),
                ([2], 1, 2, 4),
                ([5, 2], 6, 1, 4),
                ([5, 2], 0, 8, 4),
                ([3, 4], 2, 4, 4),
                ([6, 1, 0, 7], 1, 10, 3),
                ([9, 8, 7], 0, 3, 1),
                ([1, 0], 15, 3, 16),
                ([4, 0, 7], 3, 33, 16),
            )
        ],
        expected="for each position its block * block_size + its place in the block, int64 [length]",
        mistakes=combined(_slots, _SLOT_MISTAKES),
        explain=_of_index,
        what="slots",
    )
    check_in_engine("slots_of", slots_of, "PagedKVCache")


def _of_index(error: BaseException, case: Case) -> str:
    if isinstance(error, TypeError) and "converted to an index" in str(error):
        return "a list takes one number as its index, not a tensor of them: torch.tensor(table) takes both"
    return "/ gives fractions, // whole numbers" if "used as indices must be long" in str(error) else ""


def _slots(
    block: Callable[[list[int], int, int, int], int] = lambda table, p, size, start: table[p // size],
    place: Callable[[int, int, int], int] = lambda p, size, start: p % size,
    scale: Callable[[list[int], int], int] = lambda table, size: size,
    order: Callable[[list[int]], list[int]] = list,
    asked: Callable[[int, int], range] = lambda start, length: range(start, start + length),
    more: int = 0,
) -> Callable[[list[int], int, int, int], Tensor]:
    """Slots by a rule that is asked for one position p after the other; what is not at its default makes a mistake."""

    def slots(table: list[int], start: int, length: int, size: int) -> Tensor:
        blocks = order(table)
        factor = scale(blocks, size)
        numbers = [block(blocks, p, size, start) * factor + place(p, size, start) + more for p in asked(start, length)]
        return torch.tensor(numbers, dtype=torch.int64)

    return slots


_SLOT_MISTAKES: list[tuple[str, Settings]] = [
    ("these are the positions themselves; the table says in which block each of them lies",
     {"block": lambda table, p, size, start: p // size}),
    ("this is the number of the block alone; a slot is counted through all blocks, `block_size` in each",
     {"scale": lambda table, size: 1, "place": lambda p, size, start: 0}),
    ("every token lies at the beginning of its block: the place in the block is forgotten",
     {"place": lambda p, size, start: 0}),
    ("these are the places in the blocks alone; the table says which blocks they are",
     {"scale": lambda table, size: 0}),
    ("block and place are added; a block begins at its number * block_size", {"scale": lambda table, size: 1}),
    ("the positions are counted from 0; they begin at `start`",
     {"asked": lambda start, length: range(length)}),
    ("the positions end at `length`; there are `length` of them, from `start` on",
     {"asked": lambda start, length: range(start, max(start, length))}),
    ("one position too many: there are `length` of them",
     {"asked": lambda start, length: range(start, start + length + 1)}),
    ("the place in the block is counted from `start`; it is the position % block_size",
     {"place": lambda p, size, start: (p - start) % size}),
    ("right in the first block, then wrong: the place begins again, but the table goes on to its next block",
     {"block": lambda table, p, size, start: table[0]}),
    ("right in the first block, then wrong: the next one is taken for its neighbour in memory; the table says where "
     "the text goes on", {"block": lambda table, p, size, start: table[0] + p // size}),
    ("right in the block of `start`, then wrong: the next one is taken for its neighbour in memory; the table says "
     "where the text goes on",
     {"block": lambda table, p, size, start: table[start // size] + p // size - start // size}),
    ("right in the block of `start`, then wrong: all tokens are put into that one block",
     {"block": lambda table, p, size, start: table[start // size]}),
    ("the blocks are taken in the order of their numbers; the text goes through them in the order of the table",
     {"order": sorted}),
    ("block and place have changed their roles: a block begins at its number * block_size",
     {"scale": lambda table, size: 1, "place": lambda p, size, start: p % size * size}),
    ("the numbers of the blocks are multiplied by how many there are; each has `block_size` slots",
     {"scale": lambda table, size: len(table)}),
    ("one too far: positions and places are counted from 0", {"more": 1}),
]  # fmt: skip


# ---- 3.11 reading ------------------------------------------------------------------------------------------------


def check_read_blocks(read_blocks: Callable[[Tensor, Tensor, int, Tensor], Pair]) -> None:
    """Against single rows; then whose memory the results are, and histories of the engine's PagedKVCache."""
    compare(
        partial(_gathered, read_blocks),
        partial(_gathered, _place_by_place),
        _reading_cases(),
        expected="(keys, values) of a request, each [length, kv_heads, head_dim], its blocks in the order of `blocks`",
        mistakes=combined(_wrongly_gathered, _READING_MISTAKES, at_once=2),
        explain=_of_dimension,
        tolerance=EXACT,
        what="(keys, values)",
    )
    _check_room(read_blocks)
    check_in_engine("read_blocks", read_blocks, "PagedKVCache")


def _reading_cases() -> list[Case]:
    return [
        _reading_case(table, length, size, heads, dtype)
        for table, length, size, heads, dtype in (
            ([0], 4, 4, (1, 1), torch.float32),
            ([2], 3, 4, (1, 1), torch.float32),
            ([1, 2], 4, 2, (1, 1), torch.float32),
            ([3, 1], 4, 2, (1, 1), torch.float32),
            ([5, 2], 6, 4, (1, 1), torch.float32),
            ([2, 5, 3], 9, 4, (1, 1), torch.float32),
            ([1, 0], 4, 2, (2, 2), torch.float32),
            ([5, 2, 0], 7, 3, (3, 2), torch.float32),
            ([5, 1, 4], 8, 3, (2, 3), torch.bfloat16),
            ([2, 1, 4, 0, 5], 5, 1, (2, 4), torch.float64),
            ([4, 0], 17, 16, (3, 4), torch.float32),
        )
    ]


def _reading_case(table: list[int], length: int, size: int, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    """A layer of six blocks: the token at position p is p + 1 in its keys and -p - 1 in its values, the rest 99."""
    shape = (heads[0], 6, size, heads[1])
    keys = torch.full(shape, 99.0, dtype=dtype)
    for position, row in enumerate(rows_of_numbers(range(1, length + 1), heads, dtype)):
        keys[:, table[position // size], position % size] = row
    told = f"blocks of {size}, {heads[0]} head{'s' * (heads[0] > 1)} of {heads[1]}, blocks {table}, length {length}"
    return Case(told, torch.stack([keys, -keys]), torch.tensor(table), length)


def _new_room(stored: Tensor, blocks: Tensor) -> Tensor:
    return stored.new_full((*stored.shape[:2], len(blocks), *stored.shape[3:]), torch.nan)


def _gathered(read: Callable[..., Any], stored: Tensor, blocks: Tensor, length: int) -> Any:
    """What comes out, copied: the room that it lies in is used for this one read only."""
    found = read(stored, blocks, length, _new_room(stored, blocks))
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in found) if isinstance(found, tuple) else found


def _place_by_place(stored: Tensor, blocks: Tensor, length: int, room: Tensor) -> Pair:
    size, table = stored.shape[3], blocks.tolist()
    places = [(table[position // size], position % size) for position in range(length)]
    keys, values = (torch.stack([kind[:, block, place] for block, place in places]) for kind in stored)
    return keys, values


def _check_room(read_blocks: Callable[..., Any]) -> None:
    case = _reading_case([5, 2, 0], 7, 3, (3, 2), torch.float32)
    stored, blocks, length = case.args
    room = _new_room(stored, blocks)
    memory = room.untyped_storage().data_ptr()
    watch, found = watched(partial(read_blocks, stored, blocks, length, room))
    expect_equal(
        [rows.untyped_storage().data_ptr() == memory for rows in found],
        [True, True],
        expected="results that are views of `room`: the cache lends it so that no read has to take new memory",
        case=case.text,
        mistakes=[
            ("new memory was taken, and `room` is not used (an index in brackets, clone, contiguous, cat and reshape "
             "of a transposed tensor take some; so does index_select without out=room)", [False, False]),
        ],
        what="keys and values lie in `room`",
    )  # fmt: skip
    expect_equal(
        watch.largest < room.nbytes,
        True,
        expected="blocks that are gathered into `room` at once, without new memory of its size on the way",
        case=case.text,
        mistakes=[
            ("an index in brackets (or index_select without out=room) gathers into new memory as large as `room`, and "
             "the assignment copies it a second time", False),
        ],
        what="no new memory is taken",
    )  # fmt: skip


def _of_dimension(error: BaseException, case: Case) -> str:
    if "out of DATA bounds" in str(error) or "index out of range" in str(error):
        return "the numbers in `blocks` are looked for in a shorter dimension: the blocks of `stored` are dimension 2"
    return ""


def _wrongly_gathered(
    chosen: Callable[[Tensor], Tensor] = lambda blocks: blocks,
    cut: Callable[[int, int], slice] = lambda length, size: slice(length),
    turn: Callable[[Tensor], Tensor] = lambda rows: rows.transpose(1, 2),
    flat: Callable[[Tensor], Tensor] = lambda rows: rows.flatten(2, 3),
    kinds: tuple[int, int] = (0, 1),
    dimension: int | None = 2,
) -> Callable[..., Any]:
    """Keys and values gathered with mistakes; cut: the rows to take, from (length, block_size)."""

    def read(stored: Tensor, blocks: Tensor, length: int, room: Tensor) -> Pair:
        found = room if dimension is None else torch.index_select(stored, dimension, chosen(blocks))
        rows = turn(flat(found)[:, :, cut(length, stored.shape[3])])
        return rows[kinds[0]], rows[kinds[1]]

    return partial(_gathered, read)


_READING_MISTAKES: list[tuple[str, Settings]] = [
    ("`blocks` is not used: the first blocks of the storage come out",
     {"chosen": lambda blocks: torch.arange(len(blocks))}),
    ("the blocks come out in the order of their numbers; the text is in the order of `blocks`",
     {"chosen": lambda blocks: blocks.sort().values}),
    ("the blocks after the first are taken for its neighbours; `blocks` says where the text goes on",
     {"chosen": lambda blocks: (blocks[0] + torch.arange(len(blocks))) % 6}),
    ("the blocks come out from the last to the first", {"chosen": lambda blocks: blocks.flip(0)}),
    ("the first block comes out for every one", {"chosen": lambda blocks: blocks[:1].expand(len(blocks))}),
    ("whole blocks come out; only `length` tokens are the request's, what lies behind them is nobody's",
     {"cut": lambda length, size: slice(None)}),
    ("the last block is left out where it is not full", {"cut": lambda length, size: slice(length // size * size)}),
    ("the newest token is left out", {"cut": lambda length, size: slice(length - 1)}),
    ("the rest of the last block comes out in place of the first tokens: cut behind `length`",
     {"cut": lambda length, size: slice(-length, None)}),
    ("the heads stand first; asked for is [length, kv_heads, head_dim]", {"turn": lambda rows: rows}),
    ("reshape (or view) mixes the heads: transpose them",
     {"turn": lambda rows: rows.reshape(2, rows.shape[2], rows.shape[1], -1)}),
    ("reshape (or view) mixes the heads: transpose them",
     {"flat": lambda rows: rows.reshape(2, -1, rows.shape[1], rows.shape[4]).transpose(1, 2)}),
    ("blocks and places are exchanged before they are put behind each other: a block's tokens are neighbours",
     {"flat": lambda rows: rows.transpose(2, 3).flatten(2, 3)}),
    ("blocks and places are still two dimensions; all tokens belong behind each other", {"flat": lambda rows: rows}),
    ("the keys come out as values too", {"kinds": (0, 0)}),
    ("the values come out as keys too", {"kinds": (1, 1)}),
    ("keys and values are exchanged: `stored` has the keys first", {"kinds": (1, 0)}),
    ("`room` comes out as it was: nothing has been gathered into it", {"dimension": None}),
    ("the places in the blocks are chosen by `blocks`; the blocks are another dimension", {"dimension": 3}),
]  # fmt: skip
