"""A matrix in few bits, as bytes that lie in a row: what layers keep, kernels read and files hold.

    kind     columns   bytes   a block                                                         value
    int8           1       1   a code, int8; one float32 scale for the row stands beside       scale * code
    int4          32      20   scale, minimum (float16), 16 bytes of `quantization.pack_int4`  minimum + scale * code
    int3          32      16   scale, minimum, 8 bytes of two low bits, 4 of high bits         minimum + scale * code
    nf4           32      18   scale (float16), 16 bytes packed the same way                   scale * NF4_LEVELS[code]
    Q4_0, Q8_0, Q4_K, Q6_K     as GGUF has them (`formats.ggml`)

int4 is GGUF's Q4_1, byte for byte. Groups of 64 or 128 columns repeat their grid in each of their blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfromscratch import quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.formats import ggml
from llmfromscratch.kernels import block_kinds
from llmfromscratch.kernels.block_kinds import NF4_LEVELS

GGML_KINDS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
# kind -> columns and bytes of a block
BLOCKS: dict[str, tuple[int, int]] = {**block_kinds.BLOCKS, "int3": (32, 16)}
_AT_ONCE = 2**19  # numbers unpacked at a time, so that the float32 between stays in the processor's cache


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """kind: of BLOCKS. width: columns. data: uint8 [rows, bytes of a row], contiguous. scales: float32 [rows] for int8;
    [0] where blocks bring their own. Raises RequestError where these do not fit each other."""

    kind: str
    width: int
    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        columns, nbytes = _block(self.kind)
        if self.width % columns:
            raise RequestError(_does_not_divide(self.kind, self.width, columns))
        shape, wanted = list(self.data.shape), [self.rows, self.width // columns * nbytes]
        if self.data.dtype != torch.uint8 or shape != wanted:
            raise RequestError(
                f"packed rows of {self.width} columns in {self.kind} are uint8 {wanted}, not {self.data.dtype} {shape}."
            )
        scales = self.rows if self.kind == "int8" else 0
        if self.scales.dtype != torch.float32 or list(self.scales.shape) != [scales]:
            raise RequestError(
                f"scales of {self.kind} are float32 [{scales}], not {self.scales.dtype} {list(self.scales.shape)}."
            )

    @property
    def rows(self) -> int:
        """Outputs of the product."""
        return len(self.data)

    @property
    def nbytes(self) -> int:
        """All that it takes, scales included."""
        return self.data.nbytes + self.scales.nbytes

    def part(self, first: int, end: int) -> PackedWeight:
        """The rows from `first` to before `end`: views of the same memory."""
        return PackedWeight(self.kind, self.width, self.data[first:end], self.scales[first:end])

    def take(self, rows: Tensor) -> PackedWeight:
        """Copies of the rows int64 [n], in that order; they may come twice."""
        scales = self.scales[rows] if self.kind == "int8" else self.scales
        return PackedWeight(self.kind, self.width, self.data[rows], scales)

    def to(self, device: str | torch.device) -> PackedWeight:
        """The same on another device."""
        return PackedWeight(self.kind, self.width, self.data.to(device), self.scales.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32, first: int = 0, end: int | None = None) -> Tensor:
        """The numbers of the rows from `first` to before `end` (None: the last), [rows, width].

        Computed in float32 and rounded once, to dtype; a piece at a time, so that float32 is never there whole.
        """
        end = self.rows if end is None else end
        values = torch.empty(max(0, end - first), self.width, dtype=dtype, device=self.data.device)
        step = max(1, _AT_ONCE // self.width)
        for start in range(first, end, step):
            piece = self.part(start, min(start + step, end))
            values[start - first : start - first + piece.rows] = _DEQUANTIZERS[self.kind](piece)
        return values

    @staticmethod
    def cat(parts: Sequence[PackedWeight]) -> PackedWeight:
        """Under each other; all of one kind and width. Raises RequestError."""
        kinds = {(part.kind, part.width) for part in parts}
        if len(kinds) != 1:
            found = ", ".join(f"{kind} of width {width}" for kind, width in sorted(kinds)) or "nothing"
            raise RequestError(f"weights are joined that are of one kind and width, and these are {found}.")
        scales = torch.cat([part.scales for part in parts])
        return PackedWeight(parts[0].kind, parts[0].width, torch.cat([part.data for part in parts]), scales)

    @staticmethod
    def of(quantized: quantization.Quantized, compact: bool = False) -> PackedWeight:
        """What `quantization` has rounded, packed.

        8 bits, symmetric, a grid a row: int8. 8 bits, symmetric, groups: Q8_0. Up to 4 bits: int4, and 3 bits with
        `compact` int3, which takes a fifth less and has no compiled product. Groups are multiples of 32 columns, or
        rows; a group's grid is rounded to float16 (`quantization.grids_of` has done so).
        Raises RequestError for what has no kind: other bits, an 8-bit grid that is not symmetric, narrower groups, a
        width that 32 does not divide, a grid beyond float16.
        """
        if quantized.bits == 8:
            return _pack_8_bits(quantized)
        if quantized.bits > 4:
            raise RequestError(f"{quantized.bits} bits have no packed form; give 8, or up to 4.")
        grids = _grids_of_blocks(quantized, "int4")
        if compact and quantized.bits <= 3:
            return _joined("int3", quantized.codes, grids, _pack_int3(quantized.codes))
        return _joined("int4", quantized.codes, grids, quantization.pack_int4(quantized.codes))

    @staticmethod
    def nf4(weight: Tensor) -> PackedWeight:
        """A float matrix [rows, width], rounded to NF4's nearest levels in blocks of 32 columns. Raises RequestError
        where 32 does not divide the width, or a number lies beyond float16."""
        rows, width = weight.shape
        if width % 32:
            raise RequestError(_does_not_divide("nf4", width, 32))
        groups = weight.float().view(rows, -1, 32)
        scales = _half(groups.abs().amax(dim=-1))
        wide = scales.float().unsqueeze(-1)
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(groups / torch.where(wide == 0, 1, wide), middles).to(torch.uint8).view(rows, width)
        return _joined("nf4", codes, [scales], quantization.pack_int4(codes))


def _block(kind: str) -> tuple[int, int]:
    if kind not in BLOCKS:
        raise RequestError(f"kind is {kind!r}; packed weights are of one of {', '.join(BLOCKS)}.")
    return BLOCKS[kind]


def _does_not_divide(kind: str, width: int, columns: int) -> str:
    return f"a width of {width} is not a multiple of the {columns} columns of a block of {kind}; int8 takes any width."


# ---- packing -----------------------------------------------------------------------------------------------------


def _pack_8_bits(quantized: quantization.Quantized) -> PackedWeight:
    # that of a group is rounded to float16, whose smallest numbers lie apart
    if not torch.allclose(quantized.minimums, -128 * quantized.scales, rtol=1e-3, atol=1e-7):
        raise RequestError("8 bits are packed as int8, whose grid is symmetric, and this one is not; round it so.")
    codes = quantized.codes ^ 128  # code - 128 as int8, by its bits
    width = codes.shape[1]
    if quantized.scales.shape[1] == 1:
        return PackedWeight("int8", width, codes, quantized.scales[:, 0].contiguous())
    scales, _ = _grids_of_blocks(quantized, "Q8_0")
    return _joined("Q8_0", codes, [scales], codes)


def _grids_of_blocks(quantized: quantization.Quantized, kind: str) -> list[Tensor]:
    """Scales and minimums, float16 [rows, blocks]: those of each block's group."""
    width, group = quantized.codes.shape[1], quantized.group
    if width % 32:
        raise RequestError(_does_not_divide(kind, width, 32))
    if group % 32:
        raise RequestError(f"groups of {group} columns cannot be packed: blocks have 32; give a multiple of 32.")
    owners = torch.arange(0, width, 32, device=quantized.codes.device) // group
    return [_half(grid[:, owners]) for grid in (quantized.scales, quantized.minimums)]


def _half(numbers: Tensor) -> Tensor:
    halves = numbers.half()
    if not halves.isfinite().all():
        raise RequestError(
            f"a grid with {numbers.abs().max():.3g} cannot be packed: blocks hold float16, which ends at 65504."
        )
    return halves


def _joined(kind: str, codes: Tensor, grids: Sequence[Tensor], packed: Tensor) -> PackedWeight:
    """Blocks of a grid and packed codes, side by side in each row."""
    rows, blocks = grids[0].shape
    parts = [grid.unsqueeze(-1).contiguous().view(torch.uint8) for grid in grids] + [packed.view(rows, blocks, -1)]
    none = torch.empty(0, device=codes.device)
    return PackedWeight(kind, codes.shape[1], torch.cat(parts, dim=-1).flatten(1), none)


def _pack_int3(codes: Tensor) -> Tensor:
    """uint8 [rows, width], each below 8, to [rows, width / 32 * 12]: byte i of the first 8 holds the two low bits of
    columns i, i + 8, i + 16, i + 24; byte i of the last 4 the high bits of columns i, i + 4, ... i + 28."""
    blocks = codes.view(len(codes), -1, 32)
    low = _gather_bits(blocks & 3, 4, 2)
    return torch.cat([low, _gather_bits(blocks >> 2, 8, 1)], dim=-1).flatten(1)


def _gather_bits(numbers: Tensor, count: int, bits: int) -> Tensor:
    """[..., 32] of so many bits each, `count` of them a byte, to [..., 32 / count]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device).view(count, 1)
    return (numbers.unflatten(-1, (count, -1)) << shifts).sum(dim=-2, dtype=torch.uint8)


def _spread_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse of `_gather_bits`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(count, 1)
    return ((packed.unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-2)


# ---- unpacking ---------------------------------------------------------------------------------------------------


def _blocks(piece: PackedWeight) -> Tensor:
    return piece.data.reshape(-1, BLOCKS[piece.kind][1])


def _half_at(blocks: Tensor, byte: int) -> Tensor:
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def _read_int8(piece: PackedWeight) -> Tensor:
    return piece.data.view(torch.int8).float() * piece.scales.unsqueeze(1)


def _read_int3(piece: PackedWeight) -> Tensor:
    blocks = _blocks(piece)
    codes = _spread_bits(blocks[:, 4:12], 4, 2) | (_spread_bits(blocks[:, 12:], 8, 1) << 2)
    return (_half_at(blocks, 2) + _half_at(blocks, 0) * codes).view(piece.rows, piece.width)


def _read_nf4(piece: PackedWeight) -> Tensor:
    blocks = _blocks(piece)
    levels = torch.tensor(NF4_LEVELS, device=blocks.device)[quantization.unpack_int4(blocks[:, 2:].contiguous()).long()]
    return (_half_at(blocks, 0) * levels).view(piece.rows, piece.width)


def _read_ggml(piece: PackedWeight) -> Tensor:
    decode = _decode_q4_1 if piece.kind == "int4" else ggml.DEQUANTIZERS[piece.kind]
    return decode(_blocks(piece)).view(piece.rows, piece.width)


_DEQUANTIZERS: dict[str, Callable[[PackedWeight], Tensor]] = {
    "int8": _read_int8,
    "int3": _read_int3,
    "nf4": _read_nf4,
    **dict.fromkeys(("int4", *GGML_KINDS), _read_ggml),
}


def _decode_q4_1(blocks: Tensor) -> Tensor:
    """The reader's, or a learner's; imported now, as what computes does without the readers of files."""
    from llmfromscratch import loading

    return loading.dequantize_q4_1(blocks)
