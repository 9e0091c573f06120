"""Which tensors of a quantized checkpoint make up a matrix, whether they fit each other, and how to read it.

The config says how (`Settings`), the tensors' names which (`layers.0.self_attn.q_proj` + `.qweight`, `.scales`, ...).
Everything that can be seen without the values is checked before any are read: what is missing, shapes and types.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import quantized_layouts
from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.stored import PLAIN_DTYPES, StoredTensor
from llmfromscratch.packed_weight import BLOCKS, PackedWeight
from llmfromscratch.quantized_layouts import Part

OURS, VERSION = "llmfromscratch", 1
METHODS = ("gptq", "awq", "bitsandbytes", OURS)
_FLOATS = ("F16", "BF16", "F32")
_STATE = "weight.quant_state.bitsandbytes__"
# of each method, what a name ends with where it belongs to a quantized matrix
_SUFFIXES = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "bitsandbytes": (
        "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
        f"{_STATE}nf4", f"{_STATE}fp4", "SCB", "weight_format",
    ),
    OURS: ("data", "scales", "order"),
}  # fmt: skip


# ---- what the config says ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a config says about all quantized matrices of a checkpoint.

    bits, group (columns; None: the whole width), act_order: of gptq and awq. by_shape: parts may have other bits than
    these, which their shapes tell. zeros_less_one: see `quantized_layouts.gptq`. kinds: part -> kind, ours only.
    """

    method: str
    bits: int = 4
    group: int | None = None
    act_order: bool = False
    by_shape: bool = False
    zeros_less_one: bool = True
    kinds: Mapping[str, str] = field(default_factory=dict)


def read_settings(said: Any, file: Path | None = None) -> Settings:
    """Reads a quantization_config. Raises CheckpointError for what cannot be read here, by name."""
    try:
        if not isinstance(said, Mapping):
            raise CheckpointError(f"quantization_config is a {type(said).__name__}; expected an object of settings.")
        method = said.get("quant_method")
        if method is None and ("load_in_4bit" in said or "load_in_8bit" in said):
            method = "bitsandbytes"  # its first versions did not say
        if method not in METHODS:
            raise CheckpointError(
                f"Its weights are quantized by {method!r}, which cannot be read here; what can be read is "
                f"{', '.join(METHODS)}, a GGUF file, or the unquantized checkpoint."
            )
        return _READERS[method](said)
    except CheckpointError as error:
        raise CheckpointError(error.reason, file) from None


def _gptq_settings(said: Mapping[str, Any]) -> Settings:
    bits = _one_of(said, "bits", (2, 3, 4, 8))
    form = _one_of(said, "checkpoint_format" if "checkpoint_format" in said else "format", ("gptq", "gptq_v2"), "gptq")
    _one_of(said, "is_marlin_format", (False,), False)
    _one_of(said, "pack_dtype", ("int32",), "int32")
    return Settings(
        method="gptq",
        bits=bits,
        group=_group(said, "group_size"),
        act_order=_one_of(said, "desc_act", (False, True), False),
        by_shape=bool(said.get("dynamic")),
        zeros_less_one=form == "gptq",
    )


def _awq_settings(said: Mapping[str, Any]) -> Settings:
    bits, group = ("w_bit", "q_group_size") if "w_bit" in said else ("bits", "group_size")
    form = next((name for name in ("version", "checkpoint_format", "format") if name in said), "version")
    _one_of({form: str(said.get(form, "gemm")).lower()}, form, ("gemm",))
    _one_of(said, "zero_point", (True,), True)
    return Settings("awq", _one_of(said, bits, (4,)), _group(said, group))


def _our_settings(said: Mapping[str, Any]) -> Settings:
    _one_of(said, "version", (VERSION,))
    kinds = said.get("parts")
    if not isinstance(kinds, Mapping):
        raise CheckpointError(f"quantization_config.parts is {kinds!r}; expected an object of kinds by part.")
    for name in kinds:
        _one_of(kinds, name, ("w8a8", *BLOCKS))
    return Settings(OURS, kinds=kinds)


_READERS: dict[Any, Callable[[Mapping[str, Any]], Settings]] = {
    "gptq": _gptq_settings,
    "awq": _awq_settings,
    "bitsandbytes": lambda said: Settings("bitsandbytes"),
    OURS: _our_settings,
}


def _one_of(said: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    value = said.get(name, default)
    if not any(value is one or (value == one and type(value) is type(one)) for one in allowed):
        known = ", ".join(map(repr, allowed))
        raise CheckpointError(f"quantization_config.{name} is {value!r}; what can be read is {known}.")
    return value


def _group(said: Mapping[str, Any], name: str) -> int | None:
    size = said.get(name)
    if type(size) is not int or not (size == -1 or size >= 1):
        raise CheckpointError(f"quantization_config.{name} is {size!r}; expected a number of columns, or -1 for all.")
    return None if size == -1 else size


# ---- which tensors belong together -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPart:
    """A matrix that lies in a file in several tensors. name: of its module, in the file. tensors: by what their names
    end with. shape: (rows, width). kind: what the config calls it, ours only. read(): the matrix as it will run;
    raises CheckpointError where the values do not fit."""

    name: str
    tensors: Mapping[str, StoredTensor]
    shape: tuple[int, int]
    read: Callable[[], Part]
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def stand_in(self) -> StoredTensor:
        """One tensor with the numbers of the matrix, as an unquantized file would have it."""
        first = next(iter(self.tensors.values()))
        read = lambda: self.read().dequantize()  # noqa: E731
        return StoredTensor(f"{self.name}.weight", self.shape, "F32", self.nbytes, first.file, read)


def gather(tensors: Mapping[str, StoredTensor], settings: Settings) -> dict[str, StoredPart]:
    """The quantized matrices among the tensors of a file, by the names of their modules there.

    Raises CheckpointError naming the tensor that is missing, or has a type or a shape that does not fit.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        base, suffix = _cut(name, settings.method)
        if suffix:
            groups.setdefault(base, {})[suffix] = stored
    if settings.method == "bitsandbytes":
        for name, stored in tensors.items():
            base = name.removesuffix(".weight")
            if base != name and (base in groups or stored.dtype in ("I8", "U8")):
                groups.setdefault(base, {})["weight"] = stored
    lost = next((name for name in settings.kinds if not any(_is_named(base, name) for base in groups)), None)
    if lost:
        raise CheckpointError("The config says that it is quantized, and its codes are missing.", tensor=f"{lost}.data")
    return {base: _LAYOUTS[settings.method](base, group, settings) for base, group in groups.items()}


def _cut(name: str, method: str) -> tuple[str, str]:
    suffix = next((suffix for suffix in _SUFFIXES[method] if name.endswith(f".{suffix}")), "")
    return name.removesuffix(f".{suffix}"), suffix


def _is_named(base: str, name: str) -> bool:
    return base == name or base == f"model.{name}"


class _Checks:
    """The tensors of one matrix, asked for one after the other; what does not fit is named."""

    def __init__(self, base: str, tensors: Mapping[str, StoredTensor]):
        self.base, self.tensors = base, tensors

    def get(self, suffix: str) -> StoredTensor:
        if suffix not in self.tensors:
            other = next(iter(self.tensors.values()))
            raise CheckpointError(
                f"It is missing, while {other.name!r} is there; both are needed for the numbers of this matrix.",
                other.file,
                f"{self.base}.{suffix}",
            )
        return self.tensors[suffix]

    def fits(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> StoredTensor:
        """None in a shape stands for any size but 0."""
        stored = self.get(suffix)
        sizes = len(stored.shape) == len(shape) and all(
            has == wanted or (wanted is None and has > 0) for has, wanted in zip(stored.shape, shape, strict=True)
        )
        if stored.dtype not in dtypes or not sizes:
            wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"It is {stored.dtype} {list(stored.shape)}; expected {' or '.join(dtypes)} [{wanted_shape}].",
                stored.file,
                stored.name,
            )
        return stored

    def part(self, shape: tuple[int, int], unpack: Callable[[dict[str, Tensor]], Part], kind: str = "") -> StoredPart:
        def read() -> Part:
            try:
                return unpack({suffix: stored.read() for suffix, stored in self.tensors.items()})
            except CheckpointError as error:
                first = next(iter(self.tensors.values()))
                raise CheckpointError(error.reason, first.file, f"{self.base}.{error.tensor}") from error

        return StoredPart(self.base, self.tensors, shape, read, kind)

    def wrong(self, suffix: str, reason: str) -> CheckpointError:
        stored = self.tensors[suffix]
        return CheckpointError(reason, stored.file, stored.name)


# ---- GPTQ and AWQ ------------------------------------------------------------------------------------------------


def _gptq_part(base: str, tensors: Mapping[str, StoredTensor], settings: Settings) -> StoredPart:
    its = _Checks(base, tensors)
    words, rows = its.fits("qweight", ("I32",), (None, None)).shape
    if settings.act_order:
        its.get("g_idx")
    bits = settings.bits
    if settings.by_shape and "g_idx" in tensors:
        (width,) = its.fits("g_idx", ("I32", "I64"), (None,)).shape
        bits = words * 32 // width
        if bits not in (2, 3, 4, 8) or words * 32 != bits * width:
            raise its.wrong(
                "qweight", f"{words} rows of 32 bits are no codes for {width} columns of 2, 3, 4 or 8 bits."
            )
    if words * 32 % bits or rows * bits % 32:
        raise its.wrong("qweight", f"Its shape {[words, rows]} does not hold whole words of {bits}-bit codes.")
    width = words * 32 // bits
    group = width if settings.group is None else settings.group
    groups = its.fits("scales", _FLOATS, (None, rows)).shape[0]
    if "g_idx" in tensors:
        its.fits("g_idx", ("I32", "I64"), (width,))
    elif groups != -(-width // group):
        raise its.wrong("scales", f"It has {groups} groups; {width} columns in groups of {group} have another number.")
    its.fits("qzeros", ("I32",), (groups, rows * bits // 32))

    def unpack(read: dict[str, Tensor]) -> Part:
        group_of = read.get("g_idx", torch.arange(width) // group)
        lowest, highest = int(group_of.min()), int(group_of.max())
        if lowest < 0 or highest >= groups:
            raise CheckpointError(f"It names groups {lowest} to {highest}; there are {groups}.", tensor="g_idx")
        packed = (read["qweight"], read["qzeros"], read["scales"])
        return quantized_layouts.gptq(*packed, group_of, bits, settings.zeros_less_one)

    return its.part((rows, width), unpack)


def _awq_part(base: str, tensors: Mapping[str, StoredTensor], settings: Settings) -> StoredPart:
    its = _Checks(base, tensors)
    width, words = its.fits("qweight", ("I32",), (None, None)).shape
    group = width if settings.group is None else settings.group
    groups, rows = -(-width // group), words * 8
    its.fits("scales", _FLOATS, (groups, rows))
    its.fits("qzeros", ("I32",), (groups, words))

    def unpack(read: dict[str, Tensor]) -> Part:
        return quantized_layouts.awq(read["qweight"], read["qzeros"], read["scales"], torch.arange(width) // group)

    return its.part((rows, width), unpack)


# ---- bitsandbytes ------------------------------------------------------------------------------------------------


def _bitsandbytes_part(base: str, tensors: Mapping[str, StoredTensor], settings: Settings) -> StoredPart:
    its = _Checks(base, tensors)
    weight = its.get("weight")
    if "SCB" in tensors or weight.dtype == "I8":
        return _bytes_part(its)
    name = next((name for name in tensors if name.startswith(_STATE)), f"{_STATE}nf4")
    state = _State.read(its.fits(name, ("U8",), (None,)))
    rows, width = state.shape
    wanted, blocks = -(-rows * width // 2), -(-rows * width // state.block)
    if weight.nbytes != wanted or weight.dtype not in PLAIN_DTYPES:
        raise its.wrong("weight", f"It has {weight.nbytes} bytes; {rows} x {width} codes of 4 bits take {wanted}.")
    its.fits("weight.quant_map", ("F32",), (16,))
    nested = "weight.nested_absmax" in tensors or its.get("weight.absmax").dtype == "U8"
    if nested:
        its.fits("weight.absmax", ("U8",), (blocks,))
        its.fits("weight.nested_absmax", ("F32",), (-(-blocks // state.nested_block),))
        its.fits("weight.nested_quant_map", ("F32",), (256,))
    else:
        its.fits("weight.absmax", ("F32",), (blocks,))

    def unpack(read: dict[str, Tensor]) -> Part:
        absmax = read["weight.absmax"]
        if nested:
            levels, maximums = read["weight.nested_quant_map"], read["weight.nested_absmax"]
            absmax = quantized_layouts.block_maximums(absmax, levels, maximums, state.nested_block, state.offset)
        packed = read["weight"].contiguous().view(torch.uint8).flatten()
        return quantized_layouts.four_bits(packed, absmax, read["weight.quant_map"], state.shape, state.block)

    return its.part(state.shape, unpack)


def _bytes_part(its: _Checks) -> StoredPart:
    rows, width = its.fits("weight", ("I8",), (None, None)).shape
    its.fits("SCB", ("F32", "F16", "BF16"), (rows,))

    def unpack(read: dict[str, Tensor]) -> Part:
        form = int(read["weight_format"]) if "weight_format" in read else 0
        if form:
            raise CheckpointError(
                f"It is {form}: rows reordered for one kind of GPU; what can be read is 0, plain rows.",
                tensor="weight_format",
            )
        return quantized_layouts.eight_bits(read["weight"], read["SCB"])

    if "weight_format" in its.tensors:
        its.fits("weight_format", ("U8", "I8", "I32", "I64"), ())
    return its.part((rows, width), unpack)


@dataclass(frozen=True)
class _State:
    """The JSON that bitsandbytes keeps as bytes in a tensor beside a 4-bit matrix."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float

    @classmethod
    def read(cls, stored: StoredTensor) -> _State:
        try:
            said = json.loads(bytes(stored.read().tolist()).decode("utf-8"))
            shape, numbers = said["shape"], (said["blocksize"], said.get("nested_blocksize", 256))
            offset = said.get("nested_offset", 0.0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"It is not the JSON of a 4-bit matrix ({error!r})."
            raise CheckpointError(reason, stored.file, stored.name) from error
        sizes = [*shape, *numbers] if isinstance(shape, list) and len(shape) == 2 else [None]
        whole = all(type(size) is int and 0 < size < 2**40 for size in sizes)
        if not whole or not isinstance(offset, float | int) or not math.isfinite(offset):
            raise CheckpointError(
                f"It says shape {shape}, blocks of {numbers[0]} and {numbers[1]}, offset {offset}; expected two sizes, "
                "whole numbers above 0, and a number.",
                stored.file,
                stored.name,
            )
        return cls((shape[0], shape[1]), *numbers, float(offset))


# ---- our own -----------------------------------------------------------------------------------------------------


def _our_part(base: str, tensors: Mapping[str, StoredTensor], settings: Settings) -> StoredPart:
    its = _Checks(base, tensors)
    said = next((kind for name, kind in settings.kinds.items() if _is_named(base, name)), None)
    if said is None:
        first = next(iter(tensors.values()))
        raise CheckpointError("quantization_config.parts does not say of which kind it is.", first.file, first.name)
    kind = "int8" if said == "w8a8" else said
    columns, nbytes = BLOCKS[kind]
    rows, row_bytes = its.fits("data", ("U8",), (None, None)).shape
    if row_bytes % nbytes:
        raise its.wrong("data", f"Rows of {row_bytes} bytes are no blocks of {kind}, which have {nbytes}.")
    width = row_bytes // nbytes * columns
    if kind == "int8":
        its.fits("scales", ("F32",), (rows,))
    if "order" in tensors:
        its.fits("order", ("I64",), (width,))

    def unpack(read: dict[str, Tensor]) -> Part:
        order = read.get("order")
        if order is not None and not torch.equal(order.sort().values, torch.arange(width)):
            raise CheckpointError("It does not name each column once.", tensor="order")
        return Part(PackedWeight(kind, width, read["data"], read.get("scales", torch.empty(0))), order)

    return its.part((rows, width), unpack, said)


_LAYOUTS: dict[str, Callable[[str, Mapping[str, StoredTensor], Settings], StoredPart]] = {
    "gptq": _gptq_part,
    "awq": _awq_part,
    "bitsandbytes": _bitsandbytes_part,
    OURS: _our_part,
}
