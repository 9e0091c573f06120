"""Finds which files make up a checkpoint and reads them as they are: nothing is renamed or converted here.

`loading.py` turns the result into a Checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.gguf import read_gguf
from llmfromscratch.formats.safetensors import read_safetensors
from llmfromscratch.formats.safetensors import read_sharded as read_sharded_safetensors
from llmfromscratch.formats.stored import StoredTensor
from llmfromscratch.formats.torch_bin import read_sharded as read_sharded_torch
from llmfromscratch.formats.torch_bin import read_torch

# How Meta's model-parallel shards cut each matrix: the rows (0) of what fans out, the columns (1) of what joins again.
_META_CUTS = ((re.compile(r"(^output|\.(wq|wk|wv|w1|w3))\.weight$"), 0), (re.compile(r"\.(wo|w2)\.weight$"), 1))
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class RawCheckpoint:
    """What the files hold, under their own names.

    dialect: "huggingface", "gguf" or "meta", which says how to read `metadata` (config.json, the GGUF's own, or
    params.json) and `tensors`. generation: generation_config.json, or empty. file: where the metadata came from.
    """

    dialect: str
    metadata: Mapping[str, Any]
    tensors: dict[str, StoredTensor]
    generation: Mapping[str, Any]
    file: Path


def read_checkpoint(path: str | Path) -> RawCheckpoint:
    """Reads the tables of contents at path, a file or a folder; no weights yet.

    Raises CheckpointError where nothing is found (naming what was looked for) or a file is damaged.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _read_folder(path)
        if not path.is_file():
            raise CheckpointError("There is no such file or folder.", path)
        return _read_one(path)
    except OSError as error:
        raise CheckpointError(f"It cannot be read: {error.strerror or error}.", path) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for anything else, NaN and endless nesting included."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise CheckpointError(f"It cannot be read: {error.strerror or error}.", file) from error
    except ValueError as error:
        raise CheckpointError(f"It is not valid JSON: {error}.", file) from error
    except RecursionError as error:
        raise CheckpointError("It is not usable JSON: its values are nested too deeply.", file) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"It holds a {type(value).__name__}; expected an object of named fields.", file)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _read_folder(folder: Path) -> RawCheckpoint:
    if (folder / "config.json").is_file():
        weights = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
        weights = weights or _only(folder, "*.safetensors", "consolidated") or _only(folder, "*.pt")
        if weights:
            return _read_huggingface(weights)
    if (folder / "params.json").is_file():
        shards = sorted(folder.glob("consolidated*.pth")) or sorted(folder.glob("consolidated*.safetensors"))
        if shards:
            return _read_meta(shards)
    gguf = _only(folder, "*.gguf")
    if gguf:
        return _read_gguf(gguf)
    raise CheckpointError(
        f"No checkpoint was found in this folder. Looked for config.json with {', '.join(_WEIGHT_FILES)}, one "
        "*.safetensors or one *.pt; params.json with consolidated.NN.pth or consolidated.safetensors; one *.gguf.",
        folder,
    )


def _only(folder: Path, pattern: str, apart_from: str = " ") -> Path | None:
    """The one file of that kind; None without any. Which of several is meant cannot be known."""
    found = sorted(file for file in folder.glob(pattern) if not file.name.startswith(apart_from))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise CheckpointError(f"There are {len(found)} {pattern} files ({names}); name the one to open.", folder)
    return found[0] if found else None


def _read_one(file: Path) -> RawCheckpoint:
    if file.suffix == ".gguf":
        return _read_gguf(file)
    if file.suffix not in _SUFFIXES and not file.name.endswith(".index.json"):
        raise CheckpointError(f"It is not a kind of checkpoint known here ({', '.join(_SUFFIXES)} or a folder).", file)
    if file.with_name("config.json").is_file():
        return _read_huggingface(file)
    if file.with_name("params.json").is_file():
        return _read_meta([file])
    raise CheckpointError("There is no config.json (or Meta's params.json) beside it to say what model it is.", file)


def _read_huggingface(weights: Path) -> RawCheckpoint:
    config = weights.with_name("config.json")
    generation = weights.with_name("generation_config.json")
    extra = read_json(generation) if generation.is_file() else {}
    return RawCheckpoint("huggingface", read_json(config), _read_tensors(weights), extra, config)


def _read_tensors(weights: Path) -> dict[str, StoredTensor]:
    if weights.name.endswith(".safetensors.index.json"):
        return read_sharded_safetensors(weights)
    if weights.name.endswith(".index.json"):
        return read_sharded_torch(weights)
    return read_safetensors(weights) if weights.suffix == ".safetensors" else read_torch(weights)


def _read_gguf(file: Path) -> RawCheckpoint:
    gguf = read_gguf(file)
    parts = gguf.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(f"It is one of {parts} parts; join them first (llama-gguf-split --merge).", file)
    return RawCheckpoint("gguf", gguf.metadata, gguf.tensors, {}, file)


def _read_meta(shards: list[Path]) -> RawCheckpoint:
    params = shards[0].with_name("params.json")
    metadata = read_json(params)
    numbers = [int(match[1]) for shard in shards if (match := re.search(r"\.([0-9]+)\.\w+$", shard.name))]
    missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers)) if numbers else []
    if missing:
        raise CheckpointError(f"Shard {missing[0]:02d} of consolidated.NN is missing in this folder.", params.parent)
    tensors = merge_shards([_read_tensors(shard) for shard in shards], metadata.get("dim"))
    return RawCheckpoint("meta", metadata, tensors, {}, params)


def merge_shards(shards: list[dict[str, StoredTensor]], hidden_size: Any) -> dict[str, StoredTensor]:
    """Joins Meta's model-parallel shards: matrices are cut by rows or columns, norms are repeated in each.

    hidden_size tells how the embedding was cut: by columns where a shard's rows are narrower. The joined tensors are
    put together when they are read. Raises CheckpointError where the shards do not fit each other.
    """
    if len(shards) == 1:
        return shards[0]
    for shard in shards[1:]:
        for name in shard.keys() ^ shards[0].keys():
            raise CheckpointError("Some shards have this tensor and others do not.", tensor=name)
    return {name: _merge(name, [shard[name] for shard in shards], hidden_size) for name in shards[0]}


def _merge(name: str, parts: list[StoredTensor], hidden_size: Any) -> StoredTensor:
    first = parts[0]
    cut = next((dim for pattern, dim in _META_CUTS if pattern.search(name)), None)
    if name == "tok_embeddings.weight":
        cut = 0 if first.shape[-1] == hidden_size else 1
    for part in parts[1:]:
        if part.dtype != first.dtype or part.shape != first.shape or (cut is not None and len(part.shape) != 2):
            raise CheckpointError(
                f"Its shards do not fit: {first.dtype} {list(first.shape)} and {part.dtype} {list(part.shape)}.",
                part.file,
                name,
            )
    if cut is None:
        if name.endswith("norm.weight") and any(not torch.equal(first.read(), part.read()) for part in parts[1:]):
            raise CheckpointError("The shards repeat this norm with different values.", first.file, name)
        return first
    shape = list(first.shape)
    shape[cut] *= len(parts)
    return replace(
        first,
        shape=tuple(shape),
        nbytes=sum(part.nbytes for part in parts),
        read=lambda: torch.cat([part.read() for part in parts], dim=cut),
    )
