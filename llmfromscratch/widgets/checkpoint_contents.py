"""What lies in a checkpoint, as plain numbers: which tensor belongs to which block and kind, and what looks wrong.

`checkpoint_map` draws it. Everything here takes names, types, shapes and sizes only, no weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfromscratch.config import MAX_LAYERS
from llmfromscratch.formats.ggml import BLOCK_SIZES
from llmfromscratch.formats.stored import PLAIN_DTYPES

EMBEDDING, FINAL_NORM, HEAD, IGNORED, UNKNOWN, REST = "embedding", "norm", "head", "ignored", "unknown", "rest of file"
NORMS = "norms"
KINDS = (EMBEDDING, "q", "k", "v", "o", "gate", "up", "down", NORMS, HEAD, IGNORED, UNKNOWN, REST)
SIZES = ("bytes in the file", "bytes in bfloat16", "parameters")

_PARTS = (
    (re.compile(r"embed_tokens\.weight"), EMBEDDING, EMBEDDING),
    (re.compile(r"norm\.weight"), FINAL_NORM, NORMS),
    (re.compile(r"lm_head\.(?:weight|bias)"), HEAD, HEAD),
)
_LAYER = re.compile(
    r"layers\.(\d{1,4})\.(?:self_attn\.([qkvo])_proj\.(?:weight|bias)|mlp\.(gate|up|down)_proj\.(?:weight|bias)"
    r"|(?:input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight)"
)
_TORCH_NAMES = {str(dtype): name for name, dtype in PLAIN_DTYPES.items()}
# Of a plain type, the block is one number. BOOL and U8 are no GGML types.
_BLOCKS = {name: (1, dtype.itemsize) for name, dtype in PLAIN_DTYPES.items()} | BLOCK_SIZES


@dataclass(frozen=True)
class Entry:
    """One tensor of the map.

    name: what it is called after renaming; source: before. block: a layer's number, or the part it stands in outside
    the layers. kind: one of KINDS. problem: what is wrong with it, as a sentence, or "".
    """

    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block: int | str
    kind: str
    problem: str = ""

    @property
    def parameters(self) -> int:
        """Numbers in the tensor; what belongs to no tensor has none."""
        return 0 if self.kind == REST else math.prod(self.shape)

    def measure(self, size: str) -> int:
        """The tensor's size in one of SIZES."""
        if size == "bytes in the file":
            return self.nbytes
        return self.parameters * (2 if size == "bytes in bfloat16" else 1)


def read_entries(
    tensors: Any, rename: Callable[[str], str | None] | None = None, file_bytes: int | None = None
) -> list[Entry]:
    """Entries of a Checkpoint or a mapping, in its order; with file_bytes, what no tensor covers comes last.

    The mapping's values may be StoredTensor, torch.Tensor, (dtype, shape, bytes), (dtype, shape, first byte, end byte),
    or an entry of a safetensors header.
    rename gives canonical names (None: may be ignored), e.g. `loading.canonical_name`. Raises TypeError where a value
    is none of these; what can be drawn although it is wrong becomes an entry's `problem`.
    """
    tensors = getattr(tensors, "tensors", tensors)
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"The map wants a Checkpoint or a mapping from name to (dtype, shape, bytes), not {type(tensors).__name__}."
        )
    described = {name: _describe(name, value) for name, value in tensors.items() if name != "__metadata__"}
    seen: dict[str, str] = {}
    entries = [_entry(str(name), *about, rename, seen) for name, about in described.items()]
    if file_bytes is None:
        return entries
    free = file_bytes - sum(entry.nbytes for entry in entries)
    return [*entries, Entry("header and padding", "", "none", (), free, REST, REST)] if free > 0 else entries


def bytes_of(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes that a tensor takes, from its type and shape; None for a type that is not known here.

    Raises ValueError where the type's blocks do not fit the rows.
    """
    if dtype not in _BLOCKS:
        return None
    weights, size = _BLOCKS[dtype]
    if shape and shape[-1] % weights:
        raise ValueError(f"{dtype} needs rows of a multiple of {weights}")
    return math.prod(shape) * size // weights


def bytes_of_files(tensors: Any) -> int | None:
    """The size of all files that a Checkpoint or mapping of StoredTensor lies in; None where no file is known."""
    tensors = getattr(tensors, "tensors", tensors)
    values = tensors.values() if isinstance(tensors, Mapping) else []
    files = {getattr(value, "file", None) for value in values}
    if not files or not all(isinstance(file, Path) and file.is_file() for file in files):
        return None
    return sum(file.stat().st_size for file in files if file is not None)


def find_problems(entries: Sequence[Entry], file_bytes: int | None = None) -> list[str]:
    """Sentences about everything that looks wrong, at most one per sort of fault; empty where nothing does."""
    unknown = [entry for entry in entries if entry.kind == UNKNOWN]
    found = []
    if unknown:
        verb = "tensor has a name that is" if len(unknown) == 1 else "tensors have names that are"
        found.append(f"{len(unknown):,} {verb} not canonical: {_some(entry.source for entry in unknown)}.")
    wrong = [entry.problem for entry in entries if entry.problem]
    if wrong:
        found.append(wrong[0] if len(wrong) == 1 else f"{len(wrong):,} tensors are wrong, first: {wrong[0]}")
    found += _gaps(entries)
    strange = {entry.dtype for entry in entries if entry.kind != REST and entry.dtype not in _BLOCKS}
    if strange:
        found.append(f"How many bytes a number of {_some(sorted(strange))} takes is not known here: not checked.")
    covered = sum(entry.nbytes for entry in entries)
    if file_bytes is not None and covered > file_bytes:
        found.append(f"The tensors claim {covered:,} bytes, but the file has only {file_bytes:,}.")
    return found


def layer_numbers(entries: Iterable[Entry]) -> list[int]:
    """The numbers of the layers that have a tensor, in order."""
    return sorted({entry.block for entry in entries if isinstance(entry.block, int)})


def _describe(name: Any, value: Any) -> tuple[str, tuple[int, ...], int]:
    """(dtype, shape, bytes) of one value of the mapping."""
    if isinstance(value, Mapping) and {"dtype", "shape", "data_offsets"} <= value.keys():
        first, last = value["data_offsets"]
        dtype, shape, nbytes = value["dtype"], value["shape"], last - first
    elif isinstance(value, tuple | list) and len(value) == 3:
        dtype, shape, nbytes = value
    elif isinstance(value, tuple | list) and len(value) == 4:
        dtype, shape, nbytes = value[0], value[1], value[3] - value[2]
    elif all(hasattr(value, attribute) for attribute in ("dtype", "shape", "nbytes")):
        dtype, shape, nbytes = value.dtype, value.shape, value.nbytes
    else:
        raise TypeError(
            f"The map wants (dtype, shape, bytes) or (dtype, shape, first byte, end byte) for each name; {name!r} has "
            f"{value!r:.100}."
        )
    counts = [nbytes, *shape] if isinstance(shape, Sequence) else []
    if not counts or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TypeError(
            f"The map wants a shape of whole numbers and a number of bytes, none negative; {name!r} has "
            f"shape {shape!r:.100} and bytes {nbytes!r:.100}."
        )
    return _TORCH_NAMES.get(str(dtype), str(dtype)), tuple(shape), nbytes


def _entry(
    source: str,
    dtype: str,
    shape: tuple[int, ...],
    nbytes: int,
    rename: Callable[[str], str | None] | None,
    seen: dict[str, str],
) -> Entry:
    """One entry. seen: the canonical names so far and where they came from; this one is added."""
    problem = _size_problem(source, dtype, shape, nbytes)
    try:
        name = rename(source) if rename else source
    except Exception as error:  # noqa: BLE001 - a learner's function may raise anything: the map shows what it did
        what = "is not yet written" if isinstance(error, NotImplementedError) else f"raised {type(error).__name__}"
        call = f"{getattr(rename, '__name__', 'rename')}({source!r})"
        return Entry(source, source, dtype, shape, nbytes, UNKNOWN, UNKNOWN, f"{call} {what}.")
    if name is None:
        return Entry(source, source, dtype, shape, nbytes, IGNORED, IGNORED, problem)
    block, kind = _place(str(name))
    if name in seen:
        problem = f"{seen[name]!r} and {source!r} both become {name!r}."
    seen.setdefault(name, source)
    return Entry(str(name), source, dtype, shape, nbytes, block, kind, problem)


def _place(name: str) -> tuple[int | str, str]:
    """Block and kind of a canonical name."""
    for pattern, block, kind in _PARTS:
        if pattern.fullmatch(name):
            return block, kind
    match = _LAYER.fullmatch(name)
    if match and int(match[1]) < MAX_LAYERS:
        return int(match[1]), match[2] or match[3] or NORMS
    return UNKNOWN, UNKNOWN


def _size_problem(source: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> str:
    try:
        right = bytes_of(dtype, shape)
    except ValueError as error:
        return f"{source}: {error}, its shape is {list(shape)}."
    if right is None or right == nbytes:
        return ""
    return f"{source}: {dtype} {list(shape)} takes {right:,} bytes, but {nbytes:,} are given."


def _gaps(entries: Sequence[Entry]) -> list[str]:
    """Layers that are missing as a whole, or that lack what others have."""
    numbers = layer_numbers(entries)
    if not numbers:
        return []
    missing = sorted(set(range(numbers[-1])) - set(numbers))
    found = [f"No tensor at all in {_some(f'layer {number}' for number in missing)}."] if missing else []
    kinds = {(entry.block, entry.kind) for entry in entries if isinstance(entry.block, int)}
    usual = [kind for kind in KINDS if any((number, kind) in kinds for number in numbers)]
    lacking = [f"layer {number} has no '{kind}'" for number in numbers for kind in usual if (number, kind) not in kinds]
    return found + ([f"Incomplete: {_some(lacking)}."] if lacking else [])


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown:,} more" if len(names) > shown else "")
