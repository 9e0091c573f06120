"""Rows of a cache that keeps keys and values in 8 or 4 bits (`quantized_cache`): written and read inside compiled code.

    8 bits, int8 rows     a byte a number                              | scale | minimum | frame
    4 bits, uint8 rows    as quantization.pack_int4, 16 bytes for 32   | scales | minimums | frame   of 16 numbers each

Scales and minimums are float16; the frame is a byte, the number of the frame that a key lies in. What is written is
what `quantized_cache.Codec` writes, to the bit: so nothing here may be reordered, unlike in the rest of the kernels.
Which rows they are is known by their type before the code runs; rows of float32 and bfloat16 go the short way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload

from llmfromscratch.kernels.numba_words import by_arithmetic
from llmfromscratch.kernels.words import half, narrow, prefetch

GROUP = 16  # numbers that share a grid in 4 bits
TILE = 64  # tokens: the keys and values of a tile stay in the innermost cache
_LARGEST = np.float32(65504)  # of float16
_AHEAD = 4  # rows that are fetched before they are needed
_exact: Any = njit(error_model="numpy")  # and no fastmath


# ---- float16 -----------------------------------------------------------------------------------------------------


@_exact
def to_half(number):
    """The bits of a float32 rounded to float16, ties to even."""
    bits = np.float32(number).view(np.uint32)
    sign, size = np.uint16((bits >> np.uint32(16)) & np.uint32(0x8000)), np.uint32(bits & np.uint32(0x7FFFFFFF))
    if size >= np.uint32(0x47800000):  # beyond float16, or NaN
        return sign | np.uint16(0x7E00 if size > np.uint32(0x7F800000) else 0x7C00)
    if size < np.uint32(0x38800000):  # beside 0.5 a float32 has the steps that the smallest float16 have
        beside = np.float32(np.uint32(size).view(np.float32) + np.float32(0.5))
        return sign | np.uint16(beside.view(np.uint32) - np.uint32(0x3F000000))
    odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
    return sign | np.uint16(((size + np.uint32(0x0FFF) + odd) >> np.uint32(13)) - np.uint32(112 << 10))


@_exact
def _put_half(bits, rows, row, byte):
    rows[row, byte] = bits & np.uint16(255)
    rows[row, byte + 1] = bits >> np.uint16(8)


# ---- writing -----------------------------------------------------------------------------------------------------


@_exact
def _put_grid(numbers, first, end, steps, rows, row, at_scale, at_minimum):
    """Cuts numbers off where float16 ends, and stores their grid; gives it as it will be read."""
    lowest, highest = np.float32(np.inf), np.float32(-np.inf)
    for i in range(first, end):
        number = min(max(numbers[i], -_LARGEST), _LARGEST) if numbers[i] == numbers[i] else numbers[i]
        numbers[i] = number
        lowest = number if number < lowest or number != number else lowest
        highest = number if number > highest or number != number else highest
    scale = (highest - lowest) / steps
    of_scale, of_minimum = to_half(np.float32(1) if scale == 0 else scale), to_half(lowest)
    of_scale = np.uint16(0x3C00) if of_scale == np.uint16(0) else of_scale  # 1, where float16 has nothing so small
    _put_half(of_scale, rows, row, at_scale)
    _put_half(of_minimum, rows, row, at_minimum)
    return by_arithmetic(of_scale), by_arithmetic(of_minimum)


@_exact
def _code(number, scale, minimum, steps):
    code = np.rint((number - minimum) / scale)
    code = code if code > np.float32(0) else np.float32(0)
    return np.uint8(code if code < steps else steps)


@_exact
def _write_8(numbers, rows, row, frame):
    size, steps = len(numbers), np.float32(255)
    rows[row, size + 4] = frame
    scale, minimum = _put_grid(numbers, 0, size, steps, rows, row, size, size + 2)
    for i in range(size):
        rows[row, i] = _code(numbers[i], scale, minimum, steps)


@_exact
def _write_4(numbers, rows, row, frame):
    size, steps = len(numbers), np.float32(15)
    groups, base = -(-size // GROUP), GROUP * -(-size // (2 * GROUP))
    rows[row, base + 4 * groups] = frame
    for byte in range(base):
        rows[row, byte] = 0
    for group in range(groups):
        first, end = GROUP * group, min(GROUP * (group + 1), size)
        at = base + 2 * group
        scale, minimum = _put_grid(numbers, first, end, steps, rows, row, at, at + 2 * groups)
        for i in range(first, end):
            byte = GROUP * (group // 2) + i - first
            rows[row, byte] |= _code(numbers[i], scale, minimum, steps) << np.uint8(4 * (group % 2))


def write_row(numbers, rows, row, frame):
    """Stores a head's numbers, float32 [head_dim], which it may change, and the number of the frame they are in."""


@overload(write_row)
def _write_by_type(numbers, rows, row, frame):
    if rows.dtype == types.int8:
        return lambda numbers, rows, row, frame: _write_8(numbers, rows, row, frame)
    if rows.dtype == types.uint8:
        return lambda numbers, rows, row, frame: _write_4(numbers, rows, row, frame)
    return _narrow_row


def _narrow_row(numbers, rows, row, frame):
    for d in range(len(numbers)):
        rows[row, d] = narrow(numbers[d], rows)


def into_frame(key, frames, frame, head, rows):
    """A key, float32 [head_dim], as rows of bytes keep it, in place. frames: float32 [frames, 2 (middle, spread),
    kv_heads, head_dim], not read for other rows."""


@overload(into_frame)
def _frame_by_type(key, frames, frame, head, rows):
    if rows.dtype in (types.int8, types.uint8):
        return lambda key, frames, frame, head, rows: _into_frame(key, frames[frame, 0, head], frames[frame, 1, head])
    return lambda key, frames, frame, head, rows: None


@_exact
def _into_frame(key, middle, spread):
    for d in range(len(key)):
        key[d] = (key[d] - middle[d]) / spread[d]


# ---- reading -----------------------------------------------------------------------------------------------------


@_exact
def _read_8(rows, row, output):
    size = len(output)
    scale, minimum = half(rows, row, size), half(rows, row, size + 2)
    for i in range(size):
        output[i] = minimum + scale * np.float32(np.uint8(rows[row, i]))


@_exact
def _read_4(rows, row, output):
    size = len(output)
    groups, base = -(-size // GROUP), GROUP * -(-size // (2 * GROUP))
    for group in range(groups):
        at, first, shift = base + 2 * group, GROUP * (group // 2), np.uint8(4 * (group % 2))
        scale, minimum = half(rows, row, at), half(rows, row, at + 2 * groups)
        for i in range(min(GROUP, size - GROUP * group)):
            code = np.uint8((rows[row, first + i] >> shift) & np.uint8(15))
            output[GROUP * group + i] = minimum + scale * np.float32(code)


def read_row(rows, row, output):
    """The numbers of a row of bytes, float32 [head_dim]."""


@overload(read_row)
def _read_by_type(rows, row, output):
    if rows.dtype == types.int8:
        return lambda rows, row, output: _read_8(rows, row, output)
    return lambda rows, row, output: _read_4(rows, row, output)


def room_for(rows, head_dim):
    """Where a tile of keys or values is made into numbers, float32 [tokens, head_dim], and the tokens' places in it."""


@overload(room_for)
def _room_by_type(rows, head_dim):
    if rows.dtype in (types.int8, types.uint8):
        return lambda rows, head_dim: (np.empty((TILE, head_dim), np.float32), np.arange(TILE))
    return lambda rows, head_dim: (np.empty((0, 0), np.float32), np.empty(0, np.int64))


@_exact
def _out_of_frame(key, middle, spread):
    for d in range(len(key)):
        key[d] = key[d] * spread[d] + middle[d]


def as_numbers(rows, frames, head, slots, first, count, own, other, room):
    """A tile of rows as the kernel reads it, by (rows, slots, first, own, other): as it is, or made into numbers in the
    room. head: whose keys they are; -1: they are values. own: the row of slot 0 of what is read now; other: of what is
    read next."""


@overload(as_numbers)
def _numbers_by_type(rows, frames, head, slots, first, count, own, other, room):
    if rows.dtype in (types.int8, types.uint8):
        return _made
    return lambda rows, frames, head, slots, first, count, own, other, room: (rows, slots, first, own, other)


def _made(rows, frames, head, slots, first, count, own, other, room):
    numbers, places = room
    last = rows.shape[1] - 1
    for t in range(count):
        ahead = other + slots[first + t]
        prefetch(rows, ahead, 0)
        prefetch(rows, own + slots[min(first + t + _AHEAD, len(slots) - 1)], 0)
        row = own + slots[first + t]
        read_row(rows, row, numbers[t])
        if head >= 0:
            frame = np.uint8(rows[row, last])
            _out_of_frame(numbers[t], frames[frame, 0, head], frames[frame, 1, head])
    return numbers, places, 0, 0, 0
