"""Products over packed weights by compiled code: what `kernels/block_products.py` needs to be told.

int8 goes through `quantization.multiply_int8_rows`, the learner's where there is one. `unavailable` says what is
lacking, in one sentence; the package works without.
"""

from __future__ import annotations

import importlib
from functools import cache as once
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmfromscratch import compiled_decode, optimization, quantization
from llmfromscratch.compiled_decode import numbers
from llmfromscratch.kernels import block_kinds
from llmfromscratch.kernels import product as chosen
from llmfromscratch.packed_weight import PackedWeight


def kernel() -> Any:
    """The module `kernels.block_products`, compiled around what the two products are now."""
    chosen.choose(optimization.multiply_rows, quantization.multiply_int8_rows)
    return importlib.import_module("llmfromscratch.kernels.block_products")


def unavailable(kind: str, dtype: torch.dtype) -> str | None:
    """Why a kind has no compiled product for inputs of this dtype, in one sentence; None where it has one."""
    if dtype not in compiled_decode.DTYPES:
        return f"compiled products compute in float32 or bfloat16, and the input's dtype is {str(dtype)[6:]}."
    if kind not in block_kinds.NUMBERS:
        return f"there is no compiled product for {kind}."
    return _lacking(optimization.multiply_rows, quantization.multiply_int8_rows)


@once
def _lacking(*around: Any) -> str | None:
    try:
        _try_out()
    except Exception as error:  # noqa: BLE001 - a compiler that does not suit this machine can raise anything
        what = str(error).strip().splitlines() or [""]
        return f"Numba cannot compile packed products here ({type(error).__name__}: {what[0]}); PyTorch computes them."
    return None


def multiply(x: Tensor, packed: PackedWeight) -> Tensor:
    """x @ weight.T for few rows, summed in float32: x [rows, width]; [rows, outputs] in x's dtype."""
    output = torch.empty(len(x), packed.rows)
    inputs = x.detach().float().contiguous().numpy()
    kind, data, scales = _arrays(packed)
    _in_threads("product", kind, inputs, data, scales, output.numpy())
    return output.to(x.dtype)


def widen(packed: PackedWeight, output: Tensor) -> None:
    """Writes the numbers of a weight into [rows, width], float32 or bfloat16."""
    _in_threads("widen", *_arrays(packed), numbers(output))


def _arrays(packed: PackedWeight) -> tuple[int, np.ndarray, np.ndarray]:
    return block_kinds.NUMBERS[packed.kind], packed.data.detach().numpy(), packed.scales.detach().numpy()


def _in_threads(name: str, *arguments: Any) -> None:
    threads = min(torch.get_num_threads(), compiled_decode.max_threads())
    if threads == 1:
        getattr(kernel(), f"{name}_on_one_thread")(*arguments, 1)
    else:
        compiled_decode.in_threads(threads, getattr(kernel(), f"{name}_on_threads"), *arguments, threads)


def _try_out() -> None:
    """Compiles them: 3 * 1 + 3 * 2 with scales of 1, and the numbers 1 and 2 themselves."""
    weight = PackedWeight("int8", 2, torch.tensor([[1, 2]], dtype=torch.uint8), torch.ones(1))
    found, wide = multiply(torch.full((1, 2), 3.0), weight), torch.zeros(1, 2, dtype=torch.bfloat16)
    widen(weight, wide)
    if found.tolist() != [[9.0]] or wide.tolist() != [[1.0, 2.0]]:
        raise ArithmeticError(f"3 * 1 + 3 * 2 came out as {found.item():g}, and 1 and 2 as {wide.tolist()[0]}")
