"""A GGUF's own blocks, kept as they lie in the file: nothing is unpacked that can be computed with packed.

    Q4_1                        "int4", which is the same byte for byte
    Q4_0, Q8_0, Q4_K, Q6_K      under their own names
    F32, F16, BF16, Q5_*        numbers in the compute dtype: norms, biases, and what has no product of its own

Tensor after tensor is read straight into its place, so that never more than the file's size is in memory. Rows of
queries and keys that lie interleaved are moved as they are, bytes and all: a block never reaches into another row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import devices, loading, model
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.formats.stored import StoredTensor
from llmfromscratch.packed_weight import GGML_KINDS, PackedWeight
from llmfromscratch.placement import format_bytes
from llmfromscratch.progress import progress_bar
from llmfromscratch.quantized_linear import QuantizedEmbedding, QuantizedLinear
from llmfromscratch.quantized_model import place

_log = logging.getLogger(__name__)
_KINDS = {"Q4_1": "int4", **{kind: kind for kind in GGML_KINDS}}


def load(
    network: model.Model, checkpoint: loading.Checkpoint, dtype: str | torch.dtype, device: str | torch.device
) -> None:
    """Gives a network made on the meta device the weights of a GGUF file, its blocks as they are.

    dtype: computed in, and of what is not packed. Raises RequestError for another kind of checkpoint, or one of several
    devices, OutOfMemory, CheckpointError.
    """
    if checkpoint.dialect != "gguf":
        raise RequestError(
            f'quantization="native" keeps the blocks of a GGUF file, and this is a {checkpoint.dialect} checkpoint; '
            "take int8 or int4, which round its weights, or leave quantization out."
        )
    wanted, where = devices.resolve_dtype(dtype, device), devices.resolve_device(device)
    _check_memory(checkpoint.tensors, wanted, where)
    numbers: dict[str, Tensor] = {}
    for name, stored in progress_bar(checkpoint.tensors.items(), "Loading", delay=1.0, leave=False, unit="tensor"):
        module, _, what = name.rpartition(".")
        if _stays_packed(stored) and what == "weight":
            packed = _read(stored, checkpoint._interleaved_heads(name)).to(where)
            place(network, module, _part(network, module, packed, wanted))
        else:
            numbers[name] = loading.load_tensor(stored, wanted, where, checkpoint._interleaved_heads(name))
    if checkpoint.report.tied:
        _tie(network, numbers, wanted)
    network.load_state_dict(numbers, strict=False, assign=True)
    _tell_unpacked(checkpoint.tensors)


def _stays_packed(stored: StoredTensor) -> bool:
    return stored.dtype in _KINDS and len(stored.shape) == 2


def _read(stored: StoredTensor, heads: int | None) -> PackedWeight:
    """The blocks of a matrix, a row of it in each row; rows un-permuted for so many heads."""
    rows, width = stored.shape
    data = stored.read().view(rows, -1)
    return PackedWeight(
        _KINDS[stored.dtype], width, data if heads is None else loading.unpermute(data, heads), torch.empty(0)
    )


def _part(network: model.Model, name: str, packed: PackedWeight, dtype: torch.dtype) -> nn.Module:
    """The packed part in the place of the one of this name. A bias, which comes later, has its place already."""
    if name == "embed_tokens":
        return QuantizedEmbedding(packed, dtype)
    bias: Any = getattr(network.get_submodule(name), "bias", None)
    return QuantizedLinear(packed, bias, dtype)


def _tie(network: model.Model, numbers: dict[str, Tensor], dtype: torch.dtype) -> None:
    embedding: Any = network.embed_tokens
    if isinstance(embedding, QuantizedEmbedding):
        place(network, "lm_head", QuantizedLinear(embedding.packed(), None, dtype))
    else:
        numbers["lm_head.weight"] = numbers["embed_tokens.weight"]


def _check_memory(tensors: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device) -> None:
    plain = sum(torch.Size(stored.shape).numel() for stored in tensors.values() if not _stays_packed(stored))
    packed = sum(stored.nbytes for stored in tensors.values() if _stays_packed(stored))
    needed, free = packed + plain * dtype.itemsize, devices.available_memory(device)
    if needed > free:
        raise OutOfMemory(
            f"The weights need {format_bytes(needed)} on {device} as the file has them, and {format_bytes(free)} are "
            "free; close other programs, or take a smaller model."
        )


def _tell_unpacked(tensors: Mapping[str, StoredTensor]) -> None:
    """One sentence for what takes more memory than in the file."""
    matrices = [stored for stored in tensors.values() if len(stored.shape) == 2]
    unpacked = [stored for stored in matrices if not _stays_packed(stored)]
    if unpacked:
        kinds = ", ".join(sorted({stored.dtype for stored in unpacked}))
        _log.warning(
            "%d of %d matrices (%s) have no packed product, and were unpacked.", len(unpacked), len(matrices), kinds
        )
