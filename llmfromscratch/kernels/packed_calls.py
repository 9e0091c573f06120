"""Products over packed weights as C functions, which other compiled code calls by their address.

What is compiled into a layer is compiled again for each stage and each dtype of it; these are compiled once for all. So
a layer costs no more to compile for packed weights than for float ones, and knows nothing of what a learner makes of
`quantization.multiply_int8_rows`, which alone is compiled again then.
"""

from __future__ import annotations

from functools import cache as once
from typing import Any

from numba import cfunc, njit
from numba.core import types

from llmfromscratch.kernels import block_products
from llmfromscratch.kernels import product as chosen
from llmfromscratch.kernels.block_kinds import INT8
from llmfromscratch.kernels.numba_words import MATH, bytes_at, floats_at, matrix_at

_SIGNATURE = types.int64(*[types.int64] * 13)
_multiply_int8: Any = njit(fastmath=MATH, nogil=True)(chosen.int8_rows)
_multiply_packed: Any = block_products.multiply_packed


@once
def address_of(kind: int) -> int:
    """Where the product for a kind (a number of `block_kinds`) begins; compiled at the first use.

    All take int64 numbers: kind; x: address, inputs, width; data: address, rows, bytes of a row; scales: address, how
    many; output: address, length of a row; the first row and the last one's end. See `block_products.multiply_packed`.
    """
    return int(_of_int8().address if kind == INT8 else _of_blocks().address)


@once
def _of_int8() -> Any:
    return _compiled(_multiplying_int8(chosen.edition()), chosen.keep)


@once
def _of_blocks() -> Any:
    # what a learner made of int8 is in it too, and never called
    return _compiled(_multiplying_blocks(chosen.edition_of()), True)


def _compiled(function: Any, keep: bool) -> Any:
    try:
        made = cfunc(_SIGNATURE, cache=keep)(function)
    except RuntimeError:  # there is no folder to keep it in
        made = cfunc(_SIGNATURE)(function)
    chosen.alive.append(made)
    return made


# Each gives a number back that it closes over: what a function closes over is part of what Numba knows code on disk by.


def _multiplying_int8(number):
    def multiply_int8(
        kind, x, inputs, width, data, rows, row_bytes, scales, scale_count, output, length, first, end
    ):  # fmt: skip
        codes = bytes_at(data, rows, row_bytes).view(types.int8)
        wide = matrix_at(output, inputs, length)
        _multiply_int8(matrix_at(x, inputs, width), codes, floats_at(scales, scale_count), wide, first, end)
        return number

    return multiply_int8


def _multiplying_blocks(number):
    def multiply_blocks(
        kind, x, inputs, width, data, rows, row_bytes, scales, scale_count, output, length, first, end
    ):  # fmt: skip
        blocks, wide = bytes_at(data, rows, row_bytes), matrix_at(output, inputs, length)
        _multiply_packed(
            kind, matrix_at(x, inputs, width), blocks, floats_at(scales, scale_count), wide, first, end
        )  # fmt: skip
        return number

    return multiply_blocks
