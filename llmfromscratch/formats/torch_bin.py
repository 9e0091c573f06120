"""PyTorch checkpoints (.bin, .pt, .pth) in the zip format, read without running what is pickled in them."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats import sharded
from llmfromscratch.formats.stored import PLAIN_DTYPES, StoredTensor, existing_file, plain_nbytes
from llmfromscratch.formats.torch_pickle import check_pickle

_DTYPE_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_DEEPEST_WRAPPER = 4
_METADATA = (str, int, float, bool, type(None))
_RESAVE = "re-save it with `torch.save(torch.load(path, weights_only=True), path)`, or as safetensors"


def read_torch(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a file written by `torch.save` (PyTorch 1.6 or newer), memory-mapped.

    A dictionary such as {"state_dict": {...}} is unwrapped; numbers and strings beside the tensors are left out.
    Raises CheckpointError for the old format without zip, for damaged files, for a pickle that asks for more than
    tensors (its code does not run), and for a tensor that claims more bytes than its storage has.
    """
    path = existing_file(path)
    _check_archive(path)
    found = _tensors(_load(path), path)
    return {name: _stored(name, tensor, path) for name, tensor in found.items()}


def read_sharded(index_path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of all shards named by a `pytorch_model.bin.index.json`; see `sharded.read_index`."""
    return sharded.read_index(index_path, read_torch)


def _check_archive(path: Path) -> None:
    """The zip's own promises and the pickle's program, checked before torch sees them."""
    try:
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                old = file.read(1) == b"\x80"  # how a bare pickle starts
            kind = "in PyTorch's old format without zip" if old else "not a whole PyTorch checkpoint"
            raise CheckpointError(f"This file is {kind}; {_RESAVE}.", file=path)
        with zipfile.ZipFile(path) as archive:
            check_pickle(archive.read(_pickle_entry(archive, path)), path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"The zip archive is damaged ({error}); fetch the file again.", file=path) from error


def _pickle_entry(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """The entry of the pickle, once all entries are known to be uncompressed and to fit into the file together."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(set(names)) != len(names):
        raise CheckpointError("Two entries of the zip archive have the same name.", file=path)
    packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
    if packed:
        raise CheckpointError(f"The entry {packed[0]!r} is compressed or encrypted; {_RESAVE}.", file=path)
    total, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if total > size or any(entry.header_offset + entry.file_size > size for entry in entries):
        raise CheckpointError(f"Its entries claim {total} bytes in a file of {size}; it is damaged.", file=path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError("This is a TorchScript program, not a checkpoint; save its state_dict.", file=path)
    pickles = [entry for entry in entries if entry.filename.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1:
        raise CheckpointError(f"A PyTorch checkpoint has one data.pkl, this archive has {len(pickles)}.", file=path)
    return pickles[0]


def _load(path: Path) -> Any:
    """What was saved, with its tensors mapped and on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler meets arbitrary bytes: whatever it raises means the same
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(f"torch cannot load this file ({type(error).__name__}: {reason}).", file=path) from error


def _tensors(saved: Any, path: Path) -> dict[str, torch.Tensor]:
    """The dictionary of tensors in what was saved, unwrapped and without metadata."""
    for _ in range(_DEEPEST_WRAPPER):
        inside = [key for key in _WRAPPERS if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping)]
        if len(inside) > 1:
            raise CheckpointError(f"It holds several models, under {' and '.join(inside)}; save one alone.", file=path)
        if not inside:
            break
        saved = saved[inside[0]]
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"It holds a {type(saved).__name__}; expected names mapped to tensors.", file=path)
    tensors = {}
    for name, value in saved.items():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            tensors[name] = value.detach()
        elif not isinstance(name, str) or not isinstance(value, _METADATA):
            reason = f"The entry {name!r} is a {type(value).__name__}; expected a name and a tensor."
            raise CheckpointError(reason, file=path)
    if not tensors:
        raise CheckpointError("There are no tensors in it; expected names mapped to tensors.", file=path)
    return tensors


def _stored(name: str, tensor: torch.Tensor, path: Path) -> StoredTensor:
    """One tensor as the common record, after its own claims have been checked."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _DTYPE_NAMES:
        reason = f"A {tensor.layout} tensor of type {tensor.dtype} is not supported; expected a dense one of "
        raise CheckpointError(reason + f"{', '.join(_DTYPE_NAMES.values())}.", file=path, tensor=name)
    dtype, shape = _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    nbytes, held = plain_nbytes(shape, dtype), tensor.untyped_storage().nbytes()
    if nbytes > held:
        raise CheckpointError(
            f"It claims {nbytes} bytes (shape {shape}), but its storage has {held}; it is damaged or an expanded view. "
            "Save it with `.contiguous()`.",
            file=path,
            tensor=name,
        )
    return StoredTensor(name, shape, dtype, nbytes, path, functools.partial(_itself, tensor))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    """Reading a tensor that torch has mapped already is handing it over."""
    return tensor
