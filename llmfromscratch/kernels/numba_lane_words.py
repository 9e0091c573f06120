"""What `lane_words` says, told to Numba: sixteen numbers are one LLVM vector, which LLVM fits to the processor's own.

No instruction is named here: a processor with registers of sixteen numbers holds a vector in one, another in two or
four. Vectors are read from and written to any address, as blocks of 18 or 20 bytes begin anywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, overload, register_model
from numba.np.arrayobj import make_array

from llmfromscratch.kernels.lane_words import LANES, half, lanes, look_up, put, real, signed_lanes, total, zeros
from llmfromscratch.kernels.numba_words import HAS_HALVES, by_arithmetic, read_bits

BYTE, WHOLE, FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
BYTES, WHOLES, FLOATS = (ir.VectorType(each, LANES) for each in (BYTE, WHOLE, FLOAT))
Generate = Callable[..., Any]  # (context, builder, signature, arguments) -> an LLVM value


class Lanes(types.Type):
    """Sixteen numbers of one type, as Numba knows them."""

    def __init__(self, number: types.Type):
        self.number = number
        super().__init__(name=f"Lanes({number})")


class Floats(Lanes):
    """Sixteen float32."""


class Wholes(Lanes):
    """Sixteen int32."""


floats, wholes = Floats(types.float32), Wholes(types.int32)


@register_model(Floats)
@register_model(Wholes)
class _Vector(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes):
        super().__init__(manager, kind, ir.VectorType(manager.lookup(kind.number).get_value_type(), LANES))


def _told(
    words: tuple[Callable[..., Any], ...], kinds: tuple[Any, ...], gives: Callable[..., types.Type]
) -> Callable[[Generate], Generate]:
    """Tells Numba what words of one meaning give for arguments of these kinds, and how that is generated."""

    def tell(generate: Generate) -> Generate:
        for word in words:

            class Told(AbstractTemplate):
                key = word

                def generic(self, given: tuple[types.Type, ...], _: Any) -> Any:
                    fits = len(given) == len(kinds) and all(map(isinstance, given, kinds))
                    return signature(gives(*given), *given) if fits else None

            infer_global(word)(Told)
            lower_builtin(word, *kinds)(generate)
        return generate

    return tell


# ---- memory ------------------------------------------------------------------------------------------------------


def _place(context: Any, builder: Any, kinds: Any, arguments: Any, vector: Any) -> Any:
    """The address of rows[row, column], as that of sixteen numbers."""
    rows = make_array(kinds[0])(context, builder, arguments[0])
    where = [context.cast(builder, arguments[i], kinds[i], types.intp) for i in (1, 2)]
    place = cgutils.get_item_pointer(context, builder, kinds[0], rows, where, wraparound=False)
    return builder.bitcast(place, vector.as_pointer())


def _as_stored(rows: types.Array, *_: Any) -> Lanes:
    return floats if rows.dtype == types.float32 else wholes


@_told((lanes,), (types.Array, types.Integer, types.Integer), _as_stored)
def _load(context, builder, signature, arguments):
    if signature.return_type == floats:
        return builder.load(_place(context, builder, signature.args, arguments, FLOATS), align=1)
    return builder.zext(builder.load(_place(context, builder, signature.args, arguments, BYTES), align=1), WHOLES)


@_told((signed_lanes,), (types.Array, types.Integer, types.Integer), lambda *_: wholes)
def _load_signed(context, builder, signature, arguments):
    return builder.sext(builder.load(_place(context, builder, signature.args, arguments, BYTES), align=1), WHOLES)


@intrinsic
def _halves(typing_context, bits):
    """Sixteen times a float16's bits, as float32, by the processor's own instruction."""

    def generate(context, builder, signature, arguments):
        bits = _spread(context, builder, types.uint16, arguments[0], Lanes(types.uint16))
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)

    return floats(types.uint16), generate


@intrinsic
def _same(typing_context, number):
    """Sixteen times a float32."""

    def generate(context, builder, signature, arguments):
        return _spread(context, builder, types.float32, arguments[0], floats)

    return floats(types.float32), generate


_convert: Any = _halves  # which a type checker would call with the first argument too
_repeat: Any = _same


@overload(half, inline="always")
def _half(rows, row, byte):
    if HAS_HALVES:
        return lambda rows, row, byte: _convert(read_bits(rows, row, byte))
    return lambda rows, row, byte: _repeat(by_arithmetic(read_bits(rows, row, byte)))


@_told((put,), (types.Array, types.Integer, types.Integer, Floats), lambda *_: types.none)
def _store(context, builder, signature, arguments):
    builder.store(arguments[3], _place(context, builder, signature.args, arguments, FLOATS), align=1)
    return context.get_dummy_value()


# ---- arithmetic --------------------------------------------------------------------------------------------------


def _spread(context: Any, builder: Any, kind: types.Type, value: Any, to: Lanes) -> Any:
    """Sixteen times a number; sixteen numbers as they are."""
    if isinstance(kind, Lanes):
        return value
    number = context.cast(builder, value, kind, to.number)
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), number, WHOLE(0))
    return builder.shuffle_vector(one, one, ir.Constant(WHOLES, [0] * LANES))


def _tell_operator(words: tuple[Callable[..., Any], ...], instruction: str, kind: type[Lanes], number: Any) -> None:
    """An operator between two vectors, or a vector and a number: one LLVM instruction."""
    result = floats if kind is Floats else wholes

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = (_spread(context, builder, *each, result) for each in zip(signature.args, arguments, strict=True))
        return getattr(builder, instruction)(*pair)

    for kinds in ((kind, kind), (kind, number), (number, kind)):
        _told(words, kinds, lambda *_: result)(generate)


for _name, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul")):
    _words = getattr(operator, _name), getattr(operator, f"i{_name}")
    _tell_operator(_words, _instruction, Floats, types.Float)
for _name, _instruction in (("and_", "and_"), ("or_", "or_"), ("lshift", "shl"), ("rshift", "ashr")):
    _tell_operator((getattr(operator, _name),), _instruction, Wholes, types.Integer)


@_told((zeros,), (), lambda: floats)
def _zeros(context, builder, signature, arguments):
    return ir.Constant(FLOATS, None)


@_told((real,), (Wholes,), lambda _: floats)
def _real(context, builder, signature, arguments):
    return builder.sitofp(arguments[0], FLOATS)


@_told((look_up,), (Floats, Wholes), lambda *_: floats)
def _look_up(context, builder, signature, arguments):
    # one by one: LLVM has no word for it, and finds the processor's instruction behind these where there is one
    places = builder.and_(arguments[1], ir.Constant(WHOLES, [15] * LANES))
    found = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        level = builder.extract_element(arguments[0], builder.extract_element(places, WHOLE(lane)))
        found = builder.insert_element(found, level, WHOLE(lane))
    return found


@_told((total,), (Floats,), lambda _: types.float32)
def _total(context, builder, signature, arguments):
    values, width = arguments[0], LANES
    while width > 1:  # the upper half onto the lower
        width //= 2
        places = (ir.Constant(ir.VectorType(WHOLE, width), list(range(at, at + width))) for at in (0, width))
        values = builder.fadd(*(builder.shuffle_vector(values, values, each) for each in places))
    return builder.extract_element(values, WHOLE(0))
