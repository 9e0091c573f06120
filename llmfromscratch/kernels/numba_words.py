"""What `words` says, told to Numba; and how the kernels here are compiled. Imported only where something is compiled.

A compiled function is kept on disk, in __pycache__ or the user's cache folder. Numba compiles it anew when its own file
has changed; of functions in other files that it calls, it takes no notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array, populate_array

from llmfromscratch.kernels.words import LINE as LINE
from llmfromscratch.kernels.words import half, narrow, per_line, prefetch, widen

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
def _bytes_at(typing_context, address, rows, row_bytes):
    """uint8 [rows, row_bytes] that begins at an address; rows lie one behind the other."""
    return types.Array(types.uint8, 2, "C")(address, rows, row_bytes), _generate_at


@intrinsic
def _floats_at(typing_context, address, count):
    """float32 [count] that begins at an address."""
    return types.Array(types.float32, 1, "C")(address, count), _generate_at


@intrinsic
def _matrix_at(typing_context, address, rows, width):
    """float32 [rows, width], the same."""
    return types.Array(types.float32, 2, "C")(address, rows, width), _generate_at


def _generate_at(context, builder, signature, arguments):
    kind = signature.return_type
    found = make_array(kind)(context, builder)
    strides = [context.get_constant(types.intp, kind.dtype.bitwidth // 8)]
    for length in reversed(arguments[2:]):
        strides.insert(0, builder.mul(strides[0], length))
    place = builder.inttoptr(arguments[0], found.data.type)
    populate_array(found, data=place, shape=arguments[1:], strides=strides, itemsize=strides[-1], meminfo=None)
    return found._getvalue()


bytes_at: Any = _bytes_at
floats_at: Any = _floats_at
matrix_at: Any = _matrix_at


@intrinsic
def _call_at(typing_context, address, arguments):
    """Calls the C function at an address, which takes so many int64 and gives one."""

    def generate(context, builder, signature, values):
        whole = ir.IntType(64)
        given = cgutils.unpack_tuple(builder, values[1])
        function = ir.FunctionType(whole, [whole] * len(given))
        return builder.call(builder.inttoptr(values[0], function.as_pointer()), given)

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), generate


call_at: Any = _call_at


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


@intrinsic
def _read_bits(typing_context, rows, row, byte):
    """The two bytes from rows[row, byte] on, as uint16, wherever they lie."""

    def generate(context, builder, signature, arguments):
        rows = make_array(signature.args[0])(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, signature.args[0], rows, arguments[1:], wraparound=False)
        return builder.load(builder.bitcast(place, ir.IntType(16).as_pointer()), align=1)

    return types.uint16(rows, types.intp, types.intp), generate


@intrinsic
def _convert(typing_context, bits):
    """A float16's bits as float32, by the processor's own instruction."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def from_half(bits):
    """A float16's bits (uint16) as float32, for processors without an instruction for that.

    Exponent and fraction lie 13 bits higher in a float32, whose exponent counts from 112 lower: 2**112 makes up for it,
    also where the exponent is 0. Infinity and NaN have the highest exponent in both.
    """
    size = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    special = np.uint32(size | np.uint32(0x7F800000)).view(np.float32)
    value = special if size >= np.uint32(0x0F800000) else size.view(np.float32) * np.float32(2.0**112)
    return -value if bits & np.uint16(0x8000) else value


read_bits: Any = _read_bits
_by_instruction: Any = _convert
by_arithmetic = njit(from_half)
HAS_HALVES = binding.get_process_triple().startswith(("aarch64", "arm64")) or binding.get_host_cpu_features().get(
    "f16c"
)


@overload(half, inline="always")
def _half(rows, row, byte):
    if HAS_HALVES:
        return lambda rows, row, byte: _by_instruction(read_bits(rows, row, byte))
    return lambda rows, row, byte: by_arithmetic(read_bits(rows, row, byte))
