"""The checks of chapter 3's plain caches: rows behind rows, the bytes of a token, rows at their positions.

Each function is looked at alone, against plain loops, and then at work in the engine's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, NamedParts, compare, expect_equal
from llmfromscratch.course.exercises.cache_histories import EXACT, check_in_engine


def rows_of_numbers(numbers: Sequence[int], heads: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows [tokens, kv_heads, head_dim] that begin with these numbers; every element of a row is another one."""
    first = torch.tensor(numbers, dtype=torch.float64)[:, None, None]
    return (first + torch.arange(heads[0])[:, None] / 4 + torch.arange(heads[1]) / 32).to(dtype)


# ---- 3.5 rows behind rows ----------------------------------------------------------------------------------------


def check_append_rows(append_rows: Callable[[Tensor | None, int, Tensor], Tensor]) -> None:
    """Against one row after the other; then whose memory the result is, and histories of the engine's ConcatKVCache."""
    compare(
        append_rows,
        _row_by_row,
        _append_cases(),
        expected="the first `start` rows of `stored`, then all rows of `new`",
        mistakes=combined(_appended, _APPEND_MISTAKES),
        explain=_of_stored,
        tolerance=EXACT,
    )
    for told, stored, start in (("nothing stored", None, 0), ("two rows stored", torch.ones(2, 1, 1), 2)):
        new = torch.full((1, 1, 1), 10.0)
        found = append_rows(stored, start, new)
        mine = found.untyped_storage().data_ptr()
        expect_equal(
            mine not in [rows.untyped_storage().data_ptr() for rows in (stored, new) if rows is not None],
            True,
            expected="a tensor of its own: `new` is part of a batch whose memory its owner may use for something else",
            case=told,
            mistakes=[("`new` itself comes out, or a view of what was given (clone makes a copy)", False)],
            what="the result has memory of its own",
        )
    check_in_engine("append_rows", append_rows, "ConcatKVCache")


def _append_cases() -> list[Case]:
    """What is stored, how many rows of it count, and what is new; the longer ones lie apart in memory."""
    small: list[tuple[list[int] | None, int, list[int]]] = [
        (None, 0, [10]),
        (None, 0, [10, 20, 30]),
        ([1], 1, [10]),
        ([1, 2], 2, [10, 20]),
        ([1, 2, 3], 3, [10, 20]),
        ([1, 2, 3, 4, 5], 3, [10]),
        ([1, 2, 3, 4, 5], 3, [10, 20]),
        ([1, 2, 3, 4, 5], 1, [10, 20]),
        ([1, 2], 0, [10, 20]),
        ([1, 2, 3], 0, [10]),
        ([], 0, [10, 20]),
    ]
    cases = [
        Case(
            f"rows of one number: stored {stored}, start {start}, new {new}",
            None if stored is None else rows_of_numbers(stored, (1, 1), torch.float32),
            start,
            rows_of_numbers(new, (1, 1), torch.float32),
        )
        for stored, start, new in small
    ]
    for stored_rows, start, new_rows, heads, dtype in (
        (2, 2, 2, (2, 3), torch.float32),
        (9, 6, 4, (3, 4), torch.float32),
        (7, 7, 1, (2, 2), torch.bfloat16),
        (5, 4, 5, (5, 4), torch.float64),
    ):
        stored = rows_of_numbers(range(1, stored_rows + 1), heads, dtype)
        new = rows_of_numbers(range(20, 20 + new_rows), heads, dtype)
        told = f"{stored_rows} rows of {heads[0]} heads stored, start {start}, {new_rows} new, {str(dtype)[6:]}"
        cases.append(Case(told, stored, start, new))
    return cases


def _row_by_row(stored: Tensor | None, start: int, new: Tensor) -> Tensor:
    rows = [] if stored is None else [stored[position] for position in range(start)]
    return torch.stack([*rows, *new])


def _of_stored(error: BaseException, case: Case) -> str:
    if "Boolean value of Tensor" in str(error):
        return "a tensor of several numbers is neither true nor false: ask whether `stored is None`"
    if case.args[0] is None and isinstance(error, TypeError | AttributeError):
        return "`stored` is None where nothing is stored yet: there is nothing to cut or to join then"
    return ""


def _appended(
    kept: Callable[[int, int, int], slice] = lambda rows, start, new: slice(start),
    parts: tuple[str, ...] = ("stored", "new"),
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    into: Callable[[Tensor, int, Tensor], Tensor] | None = None,
) -> Callable[[Tensor | None, int, Tensor], Tensor]:
    """Joins with mistakes; kept: which of the stored rows, from (rows stored, start, new rows); into: does it all."""

    def append(stored: Tensor | None, start: int, new: Tensor) -> Tensor:
        if stored is None:
            return new
        if into is not None:
            return into(stored.clone(), start, new)
        pieces = {"stored": stored[kept(len(stored), start, len(new))], "new": new}
        return join([pieces[part] for part in parts])

    return append


def _assigned(stored: Tensor, start: int, new: Tensor) -> Tensor:
    stored[start:] = new
    return stored


_APPEND_MISTAKES: list[tuple[str, Settings]] = [
    ("what an interrupted pass has left stays in the way: the stored rows count only up to `start`",
     {"kept": lambda rows, start, new: slice(None)}),
    ("what an interrupted pass has left stays in the way: the stored rows count only up to `start`",
     {"kept": lambda rows, start, new: slice(None if start else 0)}),
    ("the new rows stand before the old ones", {"parts": ("new", "stored")}),
    ("the new rows take the place of the old ones; they belong behind them", {"parts": ("new",)}),
    ("the new rows are lost once something is stored", {"parts": ("stored",)}),
    ("what an interrupted pass has left still stands behind the new rows",
     {"into": lambda stored, start, new: torch.cat([stored[:start], new, stored[start + len(new):]])}),
    ("assigning to a slice puts the new rows over stored ones, and makes no tensor longer", {"into": _assigned}),
    ("the rows are added up, number by number; cat puts them behind each other", {"join": lambda rows: sum(rows)}),
    ("the stored rows are cut one too early: the first `start` rows are 0 to start - 1",
     {"kept": lambda rows, start, new: slice(max(0, start - 1))}),
    ("the stored rows are cut one too early: the first `start` rows are 0 to start - 1",
     {"kept": lambda rows, start, new: slice(start - 1)}),
    ("one row too many is kept: the first `start` rows are 0 to start - 1",
     {"kept": lambda rows, start, new: slice(start + 1)}),
    ("the rows from `start` on are kept; those before it count", {"kept": lambda rows, start, new: slice(start, None)}),
    ("the newest `start` rows are kept; the first ones count", {"kept": lambda rows, start, new: slice(-start, None)}),
    ("as many rows are cut off as come in; those up to `start` count",
     {"kept": lambda rows, start, new: slice(rows - new)}),
    ("as many rows are cut off as come in; those up to `start` count", {"kept": lambda rows, start, new: slice(-new)}),
    ("the rows are joined along another dimension; tokens are dimension 0", {"join": partial(torch.cat, dim=1)}),
    ("the rows are joined along another dimension; tokens are dimension 0", {"join": partial(torch.cat, dim=-1)}),
    ("stack puts the rows into a new dimension; cat puts them behind each other", {"join": torch.stack}),
    ("what an interrupted pass has left counts although `start` is 0 (a test such as `if start` or `start or` takes 0 "
     "for nothing said)", {"kept": lambda rows, start, new: slice(start or None)}),
]  # fmt: skip


# ---- 3.6 the bytes of a token ------------------------------------------------------------------------------------


_SIZES = ((1, 1, 1, 1), (3, 1, 1, 1), (1, 5, 1, 1), (1, 1, 7, 1), (1, 1, 1, 4), (30, 3, 64, 2), (80, 8, 128, 2))


def check_bytes_per_token(bytes_per_token: Callable[[int, int, int, int], int]) -> None:
    """Against the size that torch gives for a tensor of that shape, which takes no memory on the device "meta"."""
    sizes = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

    def right(layers: int, heads: int, head_dim: int, width: int) -> int:
        return torch.empty(2, layers, heads, head_dim, dtype=sizes[width], device="meta").nbytes

    def without(*left_out: int) -> Callable[..., int]:
        return lambda *sizes: right(*(1 if place in left_out else size for place, size in enumerate(sizes)))

    compare(
        bytes_per_token,
        right,
        [
            Case(f"layers {layers}, key/value heads {heads}, head_dim {head_dim}, bytes per number {width}", *case)
            for case in _SIZES
            for layers, heads, head_dim, width in [case]
        ],
        expected="bytes of one token's keys and values in all layers, a whole number",
        mistakes=[
            ("keys or values alone are counted; both are stored", lambda *sizes: right(*sizes) // 2),
            ("numbers are counted, not bytes", without(3)),
            ("one layer is counted", without(0)),
            ("one head is counted", without(1)),
            ("one number of each head is counted", without(2)),
            ("these are bits: `bytes_per_number` is in bytes already", lambda *sizes: 8 * right(*sizes)),
            ("these are kilobytes", lambda *sizes: right(*sizes) / 1024),
            ("the queries are counted as well; they are not stored", lambda *sizes: right(*sizes) // 2 * 3),
        ],
    )  # fmt: skip


# ---- 3.7 rows at their positions ---------------------------------------------------------------------------------


def check_write_positions(write_positions: Callable[[Tensor, int, Tensor, Tensor], None]) -> None:
    """Against single assignments, into a row that holds other numbers; then histories of the engine's StaticKVCache."""
    compare(
        partial(_written, write_positions),
        partial(_written, _position_by_position),
        [
            Case(
                f"a row of {length} positions in {heads[0]} head{'s' * (heads[0] > 1)} of {heads[1]}, start {start}, "
                f"{tokens} token{'s' * (tokens > 1)}",
                *(length, start, tokens, heads, dtype),
            )
            for length, start, tokens, heads, dtype in (
                (4, 0, 1, (1, 1), torch.float32),
                (4, 0, 2, (2, 1), torch.float32),
                (4, 0, 2, (1, 1), torch.float32),
                (4, 2, 1, (1, 1), torch.float32),
                (4, 1, 2, (1, 1), torch.float32),
                (4, 2, 2, (1, 1), torch.float32),
                (4, 1, 2, (2, 1), torch.float32),
                (4, 0, 2, (2, 2), torch.float32),
                (4, 1, 1, (2, 2), torch.float32),
                (5, 1, 3, (2, 2), torch.float32),
                (9, 4, 5, (3, 4), torch.float32),
                (7, 0, 7, (2, 3), torch.bfloat16),
                (6, 3, 1, (5, 2), torch.float64),
            )
        ],
        expected="the new keys in row[0] and the new values in row[1], at the positions from `start` on, and nothing "
        "else changed",
        mistakes=combined(_wrongly_written, _POSITION_MISTAKES),
        explain=_of_shapes,
        tolerance=EXACT,
        what="afterwards",
    )
    check_in_engine("write_positions", write_positions, "StaticKVCache")


def _written(
    write: Callable[..., Any], length: int, start: int, tokens: int, heads: tuple[int, int], dtype: torch.dtype
) -> NamedParts:
    """The row after the call. Before it position p holds p + 1 in its keys, and -p - 1 in its values."""
    old = rows_of_numbers(range(1, length + 1), heads, dtype).transpose(0, 1)
    storage = torch.stack([old, -old])[:, None].repeat(1, 3, 1, 1, 1)  # the row of this request is the middle one
    before = storage.clone()
    keys = rows_of_numbers(range(20, 20 + tokens), heads, dtype)
    values = -keys
    given = keys.clone(), values.clone()
    write(storage[:, 1], start, keys, values)
    parts = {
        "row[0], the keys [kv_heads, max_length, head_dim]": storage[0, 1],
        "row[1], the values [kv_heads, max_length, head_dim]": storage[1, 1],
        "the rows of other requests are as they were": torch.equal(storage[:, ::2], before[:, ::2]),
        "`keys` and `values` are as they were": all(map(torch.equal, given, (keys, values))),
    }
    return NamedParts(parts)


def _position_by_position(row: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
    for n in range(len(keys)):
        for head in range(row.shape[1]):
            row[0, head, start + n] = keys[n, head]
            row[1, head, start + n] = values[n, head]


def _of_shapes(error: BaseException, case: Case) -> str:
    shapes = "`keys` is [tokens, kv_heads, head_dim], a row [kv_heads, max_length, head_dim]"
    return f"shapes that do not go together: {shapes}" if isinstance(error, RuntimeError) else ""


def _wrongly_written(
    positions: Callable[[int, int], slice] = lambda start, new: slice(start, start + new),
    turn: Callable[[Tensor], Tensor] = lambda rows: rows.transpose(0, 1),
    kinds: tuple[int | None, int | None] = (0, 1),
    zeroed: Callable[[int, int], slice] = lambda start, new: slice(0),
    taken: Callable[[Tensor], Tensor] = lambda rows: rows,
    headwise: bool = False,
    flattened: bool = False,
) -> Callable[..., NamedParts]:
    """What a row is after a call with mistakes; kinds: what is written into row[0] and into row[1]."""

    def write(row: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        row = row.flatten(0, 1).view(row.shape) if flattened else row
        for kind, source in enumerate(kinds):
            if source is not None:
                place = positions(start, len(keys))
                row[(kind, place) if headwise else (kind, slice(None), place)] = taken(turn((keys, values)[source]))
            row[kind, :, zeroed(start, len(keys))] = 0

    return partial(_written, write)


_POSITION_MISTAKES: list[tuple[str, Settings]] = [
    ("the rows are written from position 0 on; they belong at start, start + 1, ...",
     {"positions": lambda start, new: slice(new)}),
    ("the rows are written one position too far: the first new one stands at `start`",
     {"positions": lambda start, new: slice(start + 1, start + 1 + new)}),
    ("the rows are written one position too early: the first new one stands at `start`",
     {"positions": lambda start, new: slice(start - 1, start - 1 + new)}),
    ("the rows are written at the end of the row; they belong at start, start + 1, ...",
     {"positions": lambda start, new: slice(-new, None)}),
    ("every position from `start` on is written; the new rows are as many as `keys` has",
     {"positions": lambda start, new: slice(start, None)}),
    ("the slice picks heads, not positions: in row[0] the heads come first", {"headwise": True}),
    ("all rows are written at `start`, one over the other",
     {"positions": lambda start, new: slice(start, start + 1), "taken": lambda rows: rows[:, -1:]}),
    ("only the first of the new rows is written",
     {"positions": lambda start, new: slice(start, start + 1), "taken": lambda rows: rows[:, :1]}),
    ("only the last of the new rows is written",
     {"positions": lambda start, new: slice(start + new - 1, start + new), "taken": lambda rows: rows[:, -1:]}),
    ("heads and tokens are exchanged: `keys` is [tokens, kv_heads, head_dim], a row has the heads first",
     {"turn": lambda rows: rows}),
    ("reshape (or view) mixes the heads: transpose exchanges heads and tokens",
     {"turn": lambda rows: rows.reshape(rows.shape[1], rows.shape[0], -1)}),
    ("the keys are written as values too", {"kinds": (0, 0)}),
    ("the values are written as keys too", {"kinds": (1, 1)}),
    ("keys and values are exchanged", {"kinds": (1, 0)}),
    ("the keys are written, the values are not", {"kinds": (0, None)}),
    ("the values are written, the keys are not", {"kinds": (None, 1)}),
    ("nothing is written: what you assign to is a copy of the row (clone, contiguous, reshape of a transposed tensor "
     "and an operation without _ make one)", {"kinds": (None, None)}),
    ("as soon as there are several heads, what you assign to is a copy of the row: flatten and reshape copy where no "
     "view can be had", {"flattened": True}),
    ("the positions behind the new rows are changed too", {"zeroed": lambda start, new: slice(start + new, None)}),
    ("the positions before `start` are changed too", {"zeroed": lambda start, new: slice(start)}),
]  # fmt: skip
