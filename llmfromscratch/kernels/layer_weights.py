"""What the weight of a product can be in a compiled layer, chosen by its type before the layer is compiled.

    float     a matrix [rows, width] in float32 or bfloat16 (uint16), multiplied by `optimization.multiply_rows`
    packed    parts that stand under each other, int64 [parts, 7]: of each the address of its product, its kind,
              where its bytes and scales lie and how many they are; multiplied by `packed_calls`

The weights of queries, keys and values are one float matrix, or three packed parts: those of a file need not be of one
kind, and stay where they lie. Kinds are read when the layer runs, so one compilation serves them all.
What is compiled around is in `product`; this module is loaded again when that has changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import overload

from llmfromscratch.kernels import product as chosen
from llmfromscratch.kernels.numba_words import MATH, array_at, call_at

MULTIPLY_ROWS = chosen.rows  # the one that is compiled in
PRODUCT, KIND, DATA, ROWS, ROW_BYTES, SCALES, SCALE_COUNT = range(7)
_multiply_rows: Any = njit(fastmath=MATH, nogil=True)(MULTIPLY_ROWS)


def packed_parts(parts: Any) -> np.ndarray:
    """The packed weight of parts (kind's number, data uint8 [rows, bytes of a row], scales float32 [n]), which the
    caller keeps alive."""
    from llmfromscratch.kernels.packed_calls import address_of

    return np.array([
        (address_of(kind), kind, data.ctypes.data, *data.shape, scales.ctypes.data, len(scales))
        for kind, data, scales in parts
    ], np.int64)  # fmt: skip


def _is_packed(weight: types.Array) -> bool:
    return weight.dtype == types.int64


def parts_in(weight):
    """How many parts a weight has: 1 for a float one."""
    return len(weight) if weight.dtype == np.int64 else 1


@overload(parts_in, inline="always")
def _parts_in_by_type(weight):
    if _is_packed(weight):
        return lambda weight: weight.shape[0]
    return lambda weight: 1


def part_of(weight, part, parts):
    """The first row and the number of rows of a part; a float weight is seen as so many parts of one size."""


@overload(part_of)
def _part_of_by_type(weight, part, parts):
    if _is_packed(weight):
        return lambda weight, part, parts: (weight[:part, ROWS].sum(), weight[part, ROWS])
    return lambda weight, part, parts: (part * (weight.shape[0] // parts), weight.shape[0] // parts)


@njit(fastmath=MATH)
def rows_in(weight):
    """The rows of all parts: how long a product is."""
    start, rows = part_of(weight, parts_in(weight) - 1, parts_in(weight))
    return start + rows


def multiply(x, weight, part, start, output, first, end):
    """output[:, start + row] = x · row of the part, for its rows from `first` to before `end`. start: the part's."""


@overload(multiply)
def _multiply_by_type(x, weight, part, start, output, first, end):
    if not _is_packed(weight):
        return lambda x, weight, part, start, output, first, end: _multiply_rows(
            x, weight, output, start + first, start + end
        )

    def of_packed(x, weight, part, start, output, first, end):
        of = weight[part]
        given = (np.int64(x.ctypes.data), x.shape[0], x.shape[1])
        where = (of[DATA], of[ROWS], of[ROW_BYTES], of[SCALES], of[SCALE_COUNT])
        wanted = (np.int64(output[0, start:].ctypes.data), output.shape[1], first, end)
        call_at(of[PRODUCT], (of[KIND], *given, *where, *wanted))

    return of_packed


# ---- from layer to layer -----------------------------------------------------------------------------------------


def weight_at(like, places, number):
    """A weight made as `like` is: a float one lies at the address places[number], a packed one is in the places."""


@overload(weight_at)
def _weight_at_by_type(like, places, number):
    if _is_packed(like):
        return lambda like, places, number: places[number : number + like.size].reshape(like.shape)
    return lambda like, places, number: array_at(like, places[number])


def places_of(weight):
    """How many places a weight takes for `weight_at`."""


@overload(places_of, inline="always")
def _places_of_by_type(weight):
    if _is_packed(weight):
        return lambda weight: weight.size
    return lambda weight: 1


def numbers_of(array: np.ndarray) -> list[int]:
    """What stands in the places of a weight, or of any other array."""
    return array.ravel().tolist() if array.dtype == np.int64 else [array.ctypes.data]
