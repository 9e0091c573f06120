"""Safetensors files, through the safetensors library, which checks the header and maps the data."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats import sharded
from llmfromscratch.formats.stored import PLAIN_DTYPES, StoredTensor, existing_file, plain_nbytes


def read_safetensors(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of one `.safetensors` file, memory-mapped, in the order of their names.

    Raises CheckpointError for a damaged file (the library checks lengths, offsets and sizes against the file before
    it takes memory), for a name that appears twice, and for a type outside `PLAIN_DTYPES`.
    """
    path = existing_file(path)
    try:
        handle = safe_open(str(path), framework="pt", device="cpu")
        _refuse_duplicates(path)
        return {name: _stored(handle, name, path) for name in sorted(handle.keys())}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"This is not a valid safetensors file ({error}); fetch it again.", file=path) from error


def read_sharded(index_path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of all shards named by a `model.safetensors.index.json`; see `sharded.read_index`."""
    return sharded.read_index(index_path, read_safetensors)


def _refuse_duplicates(path: Path) -> None:
    """The library lets the last of two equal names win. It has checked the header's length, so we may read it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(length), object_pairs_hook=sharded.without_duplicates)


def _stored(handle: Any, name: str, path: Path) -> StoredTensor:
    """One tensor's entry; its values stay in the file."""
    entry = handle.get_slice(name)
    dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
    if dtype not in PLAIN_DTYPES:
        raise CheckpointError(
            f"The type {dtype} is not supported; expected one of {', '.join(PLAIN_DTYPES)}.", file=path, tensor=name
        )
    read = functools.partial(_read, handle, name, path)
    return StoredTensor(name, shape, dtype, plain_nbytes(shape, dtype), path, read)


def _read(handle: Any, name: str, path: Path) -> torch.Tensor:
    """The mapped tensor. The handle keeps the file open, so a later rename or removal does no harm."""
    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"Its values cannot be read ({error}).", file=path, tensor=name) from error
