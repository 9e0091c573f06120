"""Checkpoints cut into several files: an index says which tensor lies in which shard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.stored import StoredTensor, existing_file

ShardReader = Callable[[Path], dict[str, StoredTensor]]


def read_index(index_path: str | Path, read_shard: ShardReader) -> dict[str, StoredTensor]:
    """The tensors of all shards named by a `*.index.json` file, in the order of the index.

    read_shard: reads one shard. Raises CheckpointError if the index is malformed, if a shard is missing, or if index
    and shards disagree about what lies where. Format: the `weight_map` of Hugging Face's sharded checkpoints.
    """
    index_path = existing_file(index_path)
    weight_map = _weight_map(index_path)
    shard_names = sorted(set(weight_map.values()))
    missing = [name for name in shard_names if not (index_path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shard_names)} shards named by the index are missing: {', '.join(missing)}; "
            "fetch them into the same folder.",
            file=index_path,
        )
    shards = {name: read_shard(index_path.parent / name) for name in shard_names}
    _check_agreement(weight_map, shards, index_path)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _weight_map(index_path: Path) -> dict[str, str]:
    """tensor name -> shard file name, checked to stay inside the index's own folder."""
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index is not valid JSON ({error}); fetch it again.", file=index_path) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("The index has no `weight_map` from tensor names to shard files.", file=index_path)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(
                f"The index names the shard {shard!r}; expected the name of a file in the index's own folder.",
                file=index_path,
                tensor=tensor,
            )
    return weight_map


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads`, which lets the last of two equal keys win; this one raises ValueError."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _is_plain_name(name: str) -> bool:
    """Whether a shard's name has no way out of its folder, on any system: no separator, drive, `..` or control."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set('/\\:<>|?*"')


def _check_agreement(weight_map: dict[str, str], shards: dict[str, dict[str, StoredTensor]], index_path: Path) -> None:
    """Raise CheckpointError unless every tensor lies in exactly the shard that the index gives for it."""
    absent = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in shards[shard]]
    if absent:
        raise CheckpointError(
            f"The index promises tensors that are not in their shards: {_some(absent)}; "
            "index and shards come from different versions, fetch them together.",
            file=index_path,
        )
    unlisted = [f"{name} ({shard})" for shard, held in shards.items() for name in held if weight_map.get(name) != shard]
    if unlisted:
        raise CheckpointError(
            f"Shards hold tensors that the index does not place there: {_some(unlisted)}; "
            "index and shards come from different versions, fetch them together.",
            file=index_path,
        )


def _some(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")
