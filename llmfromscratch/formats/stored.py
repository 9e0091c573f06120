"""What every reader returns: a tensor that still lies in its file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmfromscratch.errors import CheckpointError

# The types that need no unpacking, under the names of the safetensors format.
PLAIN_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: what it is, and how to get at its values.

    shape: rows first, as torch counts. dtype: the file's name for the type ("F32", "BF16", "Q4_1", ...).
    nbytes: bytes in the file. read(): for a plain type a tensor of that dtype and shape; for a quantized GGML type
    uint8 [blocks, bytes per block]. Plain ones are memory-mapped; raises CheckpointError if the values cannot be had.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path
    read: Callable[[], torch.Tensor]


def plain_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape in a plain type, as an integer that cannot overflow."""
    return math.prod(shape) * PLAIN_DTYPES[dtype].itemsize


def existing_file(path: str | Path) -> Path:
    """The path, if a regular file that is not empty is there; CheckpointError otherwise."""
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError("There is no such file; check the path.", file=path)
        if not path.is_file():
            raise CheckpointError("This is not a regular file; give the path of one model file.", file=path)
        if path.stat().st_size == 0:
            raise CheckpointError("The file is empty; fetch it again.", file=path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The file cannot be looked at ({error}).", file=path) from error
    return path
