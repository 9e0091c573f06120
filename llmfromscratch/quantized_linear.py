"""Layers whose weights stay packed: a product that reads codes, an embedding that unpacks the rows it is asked for.

    kernel      few rows                                  more rows
    plain       PackedWeight.dequantize, F.linear         the same
    compiled    codes are read as they lie (`kernels`)    rows widened a tile at a time, then F.linear
    torch       PyTorch's own packed products, for int8 and int4; plain for other kinds
    auto        compiled where Numba can be had, else plain

The kernel of a layer is one of its attributes; `quantized_model.pin` sets that of a whole model, so that ways of
computing can be compared that round alike. Sums are float32 at least, and rounded once to the compute dtype, which is
that of `x`. In float64 everything is plain.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llmfromscratch import packed_products, quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.packed_weight import PackedWeight

KERNELS = ("auto", "compiled", "torch", "plain")
MAX_ROWS = 12  # with more, a weight that was widened once for all of them is faster
_TILE = 2**20  # numbers of a weight that are widened at a time
_EXACT = 1024  # columns: so many products of -128 * -128 are 2**24, and up to there float32 has every whole number
_scratch = threading.local()  # one tile for all layers of a thread


# ---- what a weight is asked for ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightView:
    """What may be asked of a Linear's weight, where it is packed. `detach()` unpacks it: a copy of its full size."""

    packed: PackedWeight
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the packed bytes lie."""
        return self.packed.data.device

    @property
    def shape(self) -> torch.Size:
        """[rows, width]."""
        return torch.Size((self.packed.rows, self.packed.width))

    @property
    def nbytes(self) -> int:
        """As it is, packed."""
        return self.packed.nbytes

    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of a number that is computed with."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.packed.rows

    def detach(self) -> Tensor:
        """The numbers, in the compute dtype: [rows, width]."""
        return self.packed.dequantize(self.dtype)


class _Packed(nn.Module):
    """A packed weight in buffers, with the dtype that its layer computes in."""

    data: Tensor
    scales: Tensor

    def __init__(self, packed: PackedWeight, dtype: torch.dtype):
        super().__init__()
        self.kind, self.dtype = packed.kind, dtype
        self.register_buffer("data", packed.data)
        self.register_buffer("scales", packed.scales)
        self._known = packed

    def packed(self) -> PackedWeight:
        """The weight, over the buffers as they are now."""
        known, data, scales = self._known, self.data, self.scales
        if known.data is not data or known.scales is not scales:
            known = self._known = PackedWeight(self.kind, known.width, data, scales)
        return known

    def put(self, packed: PackedWeight) -> None:
        """Another weight of the same shape in its place, such as a view of a fused one."""
        self.kind, self._known = packed.kind, packed
        self.data, self.scales = packed.data, packed.scales

    @property
    def weight(self) -> WeightView:
        """What a Linear's weight would say of itself."""
        return WeightView(self.packed(), self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the bytes where the module goes, and takes its dtype as the one to compute in: scales stay float32."""
        scales, data = self.scales, self.data
        like = fn(torch.empty(0, dtype=self.dtype, device=data.device))
        super()._apply(fn, recurse)
        self.dtype, self.data = like.dtype, data.to(like.device)
        self.scales = scales.to(like.device)
        return self

    def extra_repr(self) -> str:
        """The shape, and what it is packed as."""
        return f"{self._known.width}, {len(self.data)}, {self.kind}"


# ---- layers ------------------------------------------------------------------------------------------------------


class QuantizedLinear(_Packed):
    """nn.Linear over a packed weight: y = x @ weight.T + bias.

    in_features, out_features, bias, weight (a WeightView): as a Linear's. dtype: computed in, as that of x. kernel: one
    of KERNELS. order: int64 [in_features] or None, the columns of x in the order in which the weight has them.
    """

    order: Tensor | None

    def __init__(
        self,
        packed: PackedWeight,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        order: Tensor | None = None,
        kernel: str = "auto",
    ):
        super().__init__(packed, dtype)
        self.in_features, self.out_features, self.kernel = packed.width, packed.rows, kernel
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("order", order)
        self._for_torch: tuple[Tensor, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] in the compute dtype; returns [..., out_features] in the same."""
        if self.order is not None:
            x = x[..., self.order]
        rows = x.reshape(-1, self.in_features)
        output = self._for_rows(rows) if self.kernel == "torch" else product(rows, self.packed(), self.kernel)
        output = output if self.bias is None else output + self.bias
        return output.view(*x.shape[:-1], self.out_features)

    def _for_rows(self, x: Tensor) -> Tensor:
        packed = self.packed()
        if not _suits_torch(packed, x):
            return plain_product(x, packed)
        if self._for_torch is None or self._for_torch[0] is not packed.data:
            self._for_torch = packed.data, _TORCH_FORMS[packed.kind](packed)
        return _TORCH_PRODUCTS[packed.kind](x, *self._for_torch[1])


class QuantizedEmbedding(_Packed):
    """nn.Embedding over a packed weight, which a tied head may share: the rows that are asked for are unpacked."""

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return len(self.data)

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self._known.width

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [...]; returns [..., width] in the compute dtype."""
        rows = self.packed().take(ids.reshape(-1)).dequantize(self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)


class W8A8Linear(_Packed):
    """A product of integers: weights in int8, a scale a row; inputs in int8, a scale a token, found when they come.

    Sums are int32, exact; both scales come last. Attributes as of `QuantizedLinear`, without kernel and order.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype = torch.float32):
        if packed.kind != "int8":
            raise RequestError(f"products of integers need weights in int8; these are {packed.kind}.")
        super().__init__(packed, dtype)
        self.in_features, self.out_features = packed.width, packed.rows
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] in the compute dtype; returns [..., out_features] in the same."""
        rows = x.reshape(-1, self.in_features)
        wide = torch.promote_types(x.dtype, torch.float32)
        codes, scales = quantization.quantize_rows(rows)
        sums = integer_product(codes, self.data.view(torch.int8)).to(wide)
        output = (sums * scales.unsqueeze(1).to(wide) * self.scales.to(wide)).to(x.dtype)
        output = output if self.bias is None else output + self.bias
        return output.view(*x.shape[:-1], self.out_features)


def is_packed(part: Any) -> bool:
    """Whether a module is one of these layers."""
    return isinstance(part, _Packed)


def integer_product(codes: Tensor, weights: Tensor) -> Tensor:
    """codes int8 [tokens, width] times weights int8 [rows, width]: int32 [tokens, rows], exact.

    torch's own product of int8 is taken where it is exact and knows the shape: on processors that add four products of
    int8 in one step (VNNI and its like), and on a GPU for widths and rows that 8 divides and more than 16 tokens, to
    which rows of zeros are added. Else pieces of columns in float32, which counts without a gap as far as a piece gets.
    """
    if codes.device.type == "cpu" and _adds_exactly():
        return torch._int_mm(codes, weights.T)
    tokens, width = codes.shape
    if codes.device.type == "cuda" and width % 8 == 0 and len(weights) % 8 == 0:
        padded = F.pad(codes, (0, 0, 0, max(0, 32 - tokens)))
        return torch._int_mm(padded, weights.T)[:tokens]
    pairs = zip(codes.split(_EXACT, dim=1), weights.split(_EXACT, dim=1), strict=True)
    products = [(some.float() @ others.float().T).to(torch.int32) for some, others in pairs]
    return torch.stack(products).sum(dim=0, dtype=torch.int32)


@functools.cache
def _adds_exactly() -> bool:
    """Whether torch's products of int8 are exact on this processor: older ones stop pairs of them at int16's ends."""
    for tokens in (1, 64):  # few and many tokens may be computed in different ways
        codes = torch.full((tokens, 64), 127, dtype=torch.int8)
        if not (torch._int_mm(codes, codes[:1].expand(64, -1).T) == 64 * 127 * 127).all():
            return False
    return True


# ---- products ----------------------------------------------------------------------------------------------------


def product(x: Tensor, packed: PackedWeight, kernel: str = "auto") -> Tensor:
    """x @ weight.T by "auto", "compiled" or "plain": x [rows, width]; [rows, outputs] in x's dtype.

    Raises RequestError for "compiled" where it cannot be had.
    """
    if kernel == "plain" or (kernel == "auto" and not _is_compiled(x, packed)):
        return plain_product(x, packed)
    if kernel == "compiled":
        _check_compiled(x, packed)
    if len(x) <= MAX_ROWS:
        return packed_products.multiply(x, packed)
    return _in_tiles(x, packed, _widened)


def plain_product(x: Tensor, packed: PackedWeight) -> Tensor:
    """The same, every row unpacked by PyTorch."""
    return _in_tiles(x, packed, lambda piece, dtype: piece.dequantize(dtype))


def _in_tiles(x: Tensor, packed: PackedWeight, unpack: Callable[[PackedWeight, torch.dtype], Tensor]) -> Tensor:
    """A tile of the weight's rows after the other, so that the weight is never there whole."""
    step = max(1, _TILE // packed.width)
    if packed.rows <= step:
        return F.linear(x, unpack(packed, x.dtype))
    output = x.new_empty(len(x), packed.rows)
    for first in range(0, packed.rows, step):
        end = min(first + step, packed.rows)
        output[:, first:end] = F.linear(x, unpack(packed.part(first, end), x.dtype))
    return output


def _widened(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers in this thread's tile, which the next product overwrites."""
    tiles = vars(_scratch).setdefault("tiles", {})
    numbers = packed.rows * packed.width
    if dtype not in tiles or len(tiles[dtype]) < numbers:
        tiles[dtype] = torch.empty(max(_TILE, numbers), dtype=dtype)
    tile = tiles[dtype][:numbers].view(packed.rows, packed.width)
    packed_products.widen(packed, tile)
    return tile


def _is_compiled(x: Tensor, packed: PackedWeight) -> bool:
    fits = x.device.type == "cpu" and not torch.is_grad_enabled()
    return fits and packed_products.unavailable(packed.kind, x.dtype) is None


def _check_compiled(x: Tensor, packed: PackedWeight) -> None:
    lacking = packed_products.unavailable(packed.kind, x.dtype)
    if x.device.type != "cpu":
        lacking = f"compiled products compute on the CPU, and this layer lies on {x.device}."
    if lacking:
        raise RequestError(f'kernel="compiled" cannot be had: {lacking} Give "auto" or "plain".')


# ---- PyTorch's packed products -----------------------------------------------------------------------------------


def _suits_torch(packed: PackedWeight, x: Tensor) -> bool:
    """Whether PyTorch has a product for it: int8, and int4 of rows that 16 divides; on the CPU, not in float64."""
    kind = packed.kind == "int8" or (packed.kind == "int4" and packed.rows % 16 == 0)
    return kind and x.device.type == "cpu" and x.dtype != torch.float64


def _int8_for_torch(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    return packed.data.view(torch.int8), packed.scales


def _int4_for_torch(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """Codes repacked by PyTorch, and scales and zeros [blocks, rows, 2]: its value is (code - 8) * scale + zero."""
    blocks = packed.data.view(packed.rows, -1, 20)
    codes = quantization.unpack_int4(blocks[..., 4:].flatten(1)).int()
    scales, minimums = blocks[..., :4].contiguous().view(torch.float16).float().unbind(dim=-1)
    grids = torch.stack([scales, minimums + 8 * scales], dim=-1).transpose(0, 1).contiguous()
    return torch._convert_weight_to_int4pack_for_cpu(codes, 2), grids


def _torch_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))


def _torch_int4(x: Tensor, codes: Tensor, grids: Tensor) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(x, codes, 32, grids.to(x.dtype))


_TORCH_FORMS = {"int8": _int8_for_torch, "int4": _int4_for_torch}
_TORCH_PRODUCTS = {"int8": _torch_int8, "int4": _torch_int4}
