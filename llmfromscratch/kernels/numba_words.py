"""What `words` says, told to Numba; and how the kernels here are compiled. Imported only where something is compiled.

A compiled function is kept on disk, in __pycache__ or the user's cache folder. Numba compiles it anew when its own file
has changed; of functions in other files that it calls, it takes no notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array, populate_array

from llmfromscratch.kernels.words import LINE as LINE
from llmfromscratch.kernels.words import narrow, per_line, prefetch, widen

# sums may be reordered, as any product and any attention does; NaN and infinity keep their meaning
MATH = {"reassoc", "contract", "nsz", "arcp"}


def compiled(keep: bool = True, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """njit that keeps what it has compiled on disk, where it may and where there is a folder to keep it in."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(fastmath=MATH, nogil=True, cache=keep, **options)(function)
        except RuntimeError:  # neither beside this file nor in the user's cache folder can anything be written
            return njit(fastmath=MATH, nogil=True, **options)(function)

    return decorate


@overload(widen, inline="always")
def _widen_by_type(number):
    if number == types.uint16:
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


@overload(narrow)
def _narrow_by_type(number, rows):
    if rows.dtype == types.uint16:
        return _to_bfloat16
    return lambda number, rows: np.float32(number)


def _to_bfloat16(number, rows):
    bits = np.float32(number).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # rounding would turn some NaN into infinity
    return np.uint16(0x7FC0) if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint16(rounded)


@overload(per_line, inline="always")
def _per_line_by_type(rows):
    # a step that is known lets the loop over the lines be unrolled: a tenth of the time of a product
    numbers = LINE * 8 // rows.dtype.bitwidth
    return lambda rows: numbers


@intrinsic
def _array_at(typing_context, like, address):
    """An array as `like` is, of the numbers that begin at an address."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        source, found = make_array(kind)(context, builder, arguments[0]), make_array(kind)(context, builder)
        place = builder.inttoptr(arguments[1], found.data.type)
        shape, strides = (cgutils.unpack_tuple(builder, each, kind.ndim) for each in (source.shape, source.strides))
        populate_array(found, data=place, shape=shape, strides=strides, itemsize=source.itemsize, meminfo=None)
        return found._getvalue()

    return like(like, types.int64), generate


array_at: Any = _array_at


@intrinsic
def _prefetch_intrinsic(typing_context, rows, row, column):
    """Asks for the line of memory that holds rows[row, column], and does not wait for it."""

    def generate(context, builder, signature, arguments):
        array = make_array(signature.args[0])(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, signature.args[0], array, arguments[1:], wraparound=False)
        byte, whole = cgutils.voidptr_t, ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # to be read (0), soon and again (3), as data (1)
        builder.call(function, [builder.bitcast(place, byte), whole(0), whole(3), whole(1)])

    return types.void(rows, types.intp, types.intp), generate


_fetch: Any = _prefetch_intrinsic  # which a type checker would call with the first argument too


@overload(prefetch, inline="always")
def _prefetch_by_type(rows, row, column):
    return lambda rows, row, column: _fetch(rows, row, column)
