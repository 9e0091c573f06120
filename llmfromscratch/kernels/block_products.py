"""Products that read packed weights, and what makes numbers of them again, for all kinds of `block_kinds`.

A step of one request reads every weight once, so a weight of a quarter of the bytes may take a quarter of the time, if
the processor keeps up: it has five cycles for a block of 32 columns. So blocks are made numbers in registers, sixteen
at a time (`lane_words`), and multiplied there; the sixteen sums of a row become one when the row is done.

int8, which needs nothing of this, is `quantization.multiply_int8_rows`, or what a learner made of it: what `product`
holds when this module is loaded is compiled in, and the module is loaded again when that has changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from llmfromscratch.kernels import numba_lane_words  # noqa: F401 - tells Numba what the words mean
from llmfromscratch.kernels import product as chosen
from llmfromscratch.kernels.block_kinds import BLOCKS, INT4, INT8, NF4, NF4_LEVELS, Q4_0, Q4_K, Q6_K, Q8_0
from llmfromscratch.kernels.lane_words import half, lanes, look_up, put, real, signed_lanes, total, zeros
from llmfromscratch.kernels.numba_words import LINE, MATH, compiled
from llmfromscratch.kernels.words import narrow, prefetch

MULTIPLY_INT8_ROWS = chosen.int8_rows  # the one that is compiled in
_multiply_int8: Any = njit(fastmath=MATH, nogil=True)(MULTIPLY_INT8_ROWS)
_inlined = njit(fastmath=MATH, nogil=True, forceinline=True)

TILE = 32  # columns that are made numbers at once
FEW = 4  # rows that are multiplied side by side with several inputs
AHEAD = 8192  # bytes of weights that are fetched before they are needed
LEVELS = np.array([NF4_LEVELS], np.float32)


# ---- 32 columns of each kind: two times sixteen numbers ------------------------------------------------------------


@_inlined
def int4(data, row, at, tile):
    """Each block is a tile."""
    scale, minimum, both = half(data, row, at), half(data, row, at + 2), lanes(data, row, at + 4)
    return real(both & 15) * scale + minimum, real(both >> 4) * scale + minimum


@_inlined
def nf4(data, row, at, tile):
    """Each block is a tile."""
    scale, both, levels = half(data, row, at), lanes(data, row, at + 2), lanes(LEVELS, 0, 0)
    return look_up(levels, both) * scale, look_up(levels, both >> 4) * scale


@_inlined
def q4_0(data, row, at, tile):
    """Each block is a tile."""
    scale, both = half(data, row, at), lanes(data, row, at + 2)
    return (real(both & 15) - np.float32(8)) * scale, (real(both >> 4) - np.float32(8)) * scale


@_inlined
def q8_0(data, row, at, tile):
    """Each block is a tile."""
    scale = half(data, row, at)
    return real(signed_lanes(data, row, at + 2)) * scale, real(signed_lanes(data, row, at + 18)) * scale


@_inlined
def q4_k(data, row, at, tile):
    """A tile is one of a block's eight runs; two of them share 32 bytes. Scales: see `ggml._six_bit_scales`."""
    scales, place = at + 4, tile % 4
    first, second, third = data[row, scales + place], data[row, scales + 4 + place], data[row, scales + 8 + place]
    if tile < 4:
        scale, minimum = first & 63, second & 63
    else:
        scale, minimum = third & 15 | first >> 6 << 4, third >> 4 | second >> 6 << 4
    scale = half(data, row, at) * np.float32(scale)
    minimum = half(data, row, at + 2) * -np.float32(minimum)
    codes, shift = at + 16 + 32 * (tile // 2), 4 * (tile % 2)
    left, right = lanes(data, row, codes) >> shift & 15, lanes(data, row, codes + 16) >> shift & 15
    return real(left) * scale + minimum, real(right) * scale + minimum


@_inlined
def q6_k(data, row, at, tile):
    """A tile is one of the four runs of a block's half, see `ggml.dequantize_q6_k`."""
    part, run = tile // 4, tile % 4
    low, high = at + 64 * part + 32 * (run % 2), at + 128 + 32 * part
    shift, lift, whole = 4 * (run // 2), 2 * run, half(data, row, at + 208)
    scales = at + 192 + 2 * tile
    left = lanes(data, row, low) >> shift & 15 | (lanes(data, row, high) >> lift & 3) << 4
    right = lanes(data, row, low + 16) >> shift & 15 | (lanes(data, row, high + 16) >> lift & 3) << 4
    a, b = whole * np.float32(np.int8(data[row, scales])), whole * np.float32(np.int8(data[row, scales + 1]))
    return (real(left) - np.float32(32)) * a, (real(right) - np.float32(32)) * b


# ---- rows of a kind ----------------------------------------------------------------------------------------------


@_inlined
def _fetch_ahead(data, row):
    ahead = min(row + max(1, AHEAD // data.shape[1]), data.shape[0] - 1)
    for byte in range(0, data.shape[1], LINE):
        prefetch(data, ahead, byte)


def _rows_of(kind, values):
    """For a kind, whose 32 columns `values` makes numbers: the product with one row, and a row made numbers."""
    columns, size = BLOCKS[kind]

    @njit(fastmath=MATH, nogil=True)
    def multiply_one(x, data, output, first, end):
        """output[0, row] = x[0] · row."""
        for row in range(first, end):
            _fetch_ahead(data, row)
            one, other = zeros(), zeros()
            for block in range(x.shape[1] // columns):
                for tile in range(columns // TILE):
                    left, right = values(data, row, size * block, tile)
                    one += left * lanes(x, 0, columns * block + TILE * tile)
                    other += right * lanes(x, 0, columns * block + TILE * tile + 16)
            output[0, row] = total(one + other)

    @njit(fastmath=MATH, nogil=True)
    def widen_rows(data, first, end, output):
        """output[0], ... = rows `first` to before `end` as float32."""
        for row in range(first, end):
            _fetch_ahead(data, row)
            for block in range(output.shape[1] // columns):
                for tile in range(columns // TILE):
                    left, right = values(data, row, size * block, tile)
                    put(output, row - first, columns * block + TILE * tile, left)
                    put(output, row - first, columns * block + TILE * tile + 16, right)

    return multiply_one, widen_rows


_one_int4, _widen_int4 = _rows_of("int4", int4)
_one_nf4, _widen_nf4 = _rows_of("nf4", nf4)
_one_q4_0, _widen_q4_0 = _rows_of("Q4_0", q4_0)
_one_q8_0, _widen_q8_0 = _rows_of("Q8_0", q8_0)
_one_q4_k, _widen_q4_k = _rows_of("Q4_K", q4_k)
_one_q6_k, _widen_q6_k = _rows_of("Q6_K", q6_k)


@njit(fastmath=MATH, nogil=True)
def _multiply_one(kind, x, data, output, first, end):
    """The product with one row of x."""
    if kind == INT4:
        _one_int4(x, data, output, first, end)
    elif kind == NF4:
        _one_nf4(x, data, output, first, end)
    elif kind == Q4_0:
        _one_q4_0(x, data, output, first, end)
    elif kind == Q8_0:
        _one_q8_0(x, data, output, first, end)
    elif kind == Q4_K:
        _one_q4_k(x, data, output, first, end)
    elif kind == Q6_K:
        _one_q6_k(x, data, output, first, end)


@njit(fastmath=MATH, nogil=True)
def _widen_few(kind, data, first, end, output):
    """output[0], ... = rows `first` to before `end` as float32."""
    if kind == INT4:
        _widen_int4(data, first, end, output)
    elif kind == NF4:
        _widen_nf4(data, first, end, output)
    elif kind == Q4_0:
        _widen_q4_0(data, first, end, output)
    elif kind == Q8_0:
        _widen_q8_0(data, first, end, output)
    elif kind == Q4_K:
        _widen_q4_k(data, first, end, output)
    elif kind == Q6_K:
        _widen_q6_k(data, first, end, output)


@njit(fastmath=MATH, nogil=True)
def _multiply_widened(x, rows, count, output, first):
    """output[m, first + i] = x[m] · rows[i] for `count` rows, at most FEW; what lies in the others does not count."""
    for m in range(0, x.shape[0], 2):
        n = min(m + 1, x.shape[0] - 1)  # the last one twice where their number is odd
        a = b = c = d = e = f = g = h = np.float32(0)
        for i in range(x.shape[1]):
            left, right = x[m, i], x[n, i]
            a += left * rows[0, i]
            b += left * rows[1, i]
            c += left * rows[2, i]
            d += left * rows[3, i]
            e += right * rows[0, i]
            f += right * rows[1, i]
            g += right * rows[2, i]
            h += right * rows[3, i]
        lefts, rights = (a, b, c, d), (e, f, g, h)
        for i in range(count):
            output[m, first + i], output[n, first + i] = lefts[i], rights[i]


# ---- all kinds ---------------------------------------------------------------------------------------------------


@njit(fastmath=MATH, nogil=True)
def multiply_packed(kind, x, data, scales, output, first, end):
    """output[m, row] = x[m] · row `row` of a packed weight, for the rows from `first` to before `end`.

    kind: int64, see `block_kinds`. x: float32 [inputs, width], few. data: uint8 [rows, bytes of a row]; scales: float32
    [rows], of int8, or [0]. output: float32 [inputs, rows]; only these rows are written.
    """
    if kind == INT8:
        _multiply_int8(x, data.view(np.int8), scales, output, first, end)
    elif x.shape[0] == 1:
        _multiply_one(kind, x, data, output, first, end)
    else:
        rows = np.zeros((FEW, x.shape[1]), np.float32)
        for start in range(first, end, FEW):
            count = min(FEW, end - start)
            _widen_few(kind, data, start, start + count, rows)
            _multiply_widened(x, rows, count, output, start)


@njit(fastmath=MATH, nogil=True)
def widen_packed(kind, data, scales, output, first, end):
    """output[row] = row `row` of a packed weight, for the rows from `first` to before `end`.

    kind, data, scales: as `multiply_packed` takes them. output: float32 or bfloat16 (uint16) [rows, width].
    """
    codes, one = data.view(np.int8), np.empty((1, output.shape[1]), np.float32)
    for row in range(first, end):
        if kind == INT8:
            for i in range(output.shape[1]):
                output[row, i] = narrow(np.float32(codes[row, i]) * scales[row], output)
        else:
            _widen_few(kind, data, row, row + 1, one)
            for i in range(output.shape[1]):
                output[row, i] = narrow(one[0, i], output)


# The functions that are called from outside give a number back that they close over: what a function closes over is
# part of what Numba knows code on disk by, so code with old sources inside is not taken for new.


def _product(number):
    def product(kind, x, data, scales, output, pieces):
        """The whole of `multiply_packed`, cut into so many pieces."""
        rows = data.shape[0]
        for piece in prange(pieces):
            multiply_packed(kind, x, data, scales, output, rows * piece // pieces, rows * (piece + 1) // pieces)
        return number

    return product


def _widening(number):
    def widening(kind, data, scales, output, pieces):
        """The whole of `widen_packed`, cut into so many pieces."""
        rows = data.shape[0]
        for piece in prange(pieces):
            widen_packed(kind, data, scales, output, rows * piece // pieces, rows * (piece + 1) // pieces)
        return number

    return widening


def _parallel(make, parallel):
    """What `make` makes, compiled with or without threads."""
    return compiled(chosen.keep, parallel=parallel)(make(2 * chosen.edition() + parallel))


product_on_threads, product_on_one_thread = _parallel(_product, True), _parallel(_product, False)
widen_on_threads, widen_on_one_thread = _parallel(_widening, True), _parallel(_widening, False)
