"""GGUF files (versions 2 and 3), by a reader of our own over the mapped file.

The picture to keep in mind: header (magic, version, two counts), then metadata as key, type, value, then one entry
per tensor (name, dimensions, type, offset), then, aligned, the tensors' bytes. Every length and count is checked
against the bytes that remain before anything is taken. Source: the GGUF specification in ggml's documentation.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats import ggml
from llmfromscratch.formats.stored import PLAIN_DTYPES, StoredTensor, existing_file

# Metadata types: number of the type -> struct code; strings and arrays have no fixed size.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_KEY_VALUE = 8 + 4 + 1  # an empty key, its type, one byte
_SMALLEST_TENSOR_ENTRY = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, type, offset
_DEEPEST_ARRAY = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file holds: metadata (string arrays are lists of str, numeric ones numpy arrays) and tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    version: int
    file: Path


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor's entry in the header. dimensions: as in the file, fastest first. offset: from the data's start."""

    name: str
    dimensions: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def read_gguf(path: str | Path) -> GGUFFile:
    """Metadata and memory-mapped tensors of a GGUF file.

    Raises CheckpointError for what is truncated, damaged or contradicts itself, for version 1 and big-endian files,
    and for a tensor of a type outside `ggml.BLOCK_SIZES`, which it names.
    """
    path = existing_file(path)
    reader = _Reader(_map(path), path)
    version = _version(reader)
    tensor_count = reader.count(_SMALLEST_TENSOR_ENTRY, "tensors")
    metadata = _metadata(reader)
    entries = [_tensor_entry(reader) for _ in range(tensor_count)]
    alignment = _alignment(metadata, path)
    data_start = -(-reader.position // alignment) * alignment
    _check_places(entries, data_start, alignment, reader)
    tensors = {entry.name: _stored(entry, reader, data_start) for entry in entries}
    return GGUFFile(metadata, tensors, version, path)


def _map(path: Path) -> mmap.mmap:
    """The whole file, mapped copy-on-write: torch wants memory that it could write, and the file must not change."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The file cannot be mapped into memory ({error}).", file=path) from error


class _Reader:
    """A position in the mapped file; a step beyond the end raises CheckpointError before any memory is taken."""

    def __init__(self, data: mmap.mmap, file: Path):
        self.data, self.file, self.size, self.position = data, file, len(data), 0

    def fail(self, reason: str, tensor: str | None = None) -> CheckpointError:
        """The error to raise for this file."""
        return CheckpointError(reason, file=self.file, tensor=tensor)

    def take(self, length: int, what: str) -> int:
        """Step over `length` bytes; returns where they start."""
        start = self.position
        if length > self.size - start:
            raise self.fail(
                f"At byte {start}, {what} should take {length} bytes, but {self.size - start} are left; "
                "the file is truncated or damaged, fetch it again."
            )
        self.position = start + length
        return start

    def number(self, code: str, what: str) -> Any:
        """One little-endian number; code is struct's letter for it."""
        form = "<" + code
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A 64-bit count of things that take at least `smallest` bytes each: no more than the file has room for."""
        count = self.number("Q", f"the number of {what}")
        if count > (self.size - self.position) // smallest:
            raise self.fail(
                f"The file claims {count} {what}, with {self.size - self.position} bytes left; "
                "it is truncated or damaged, fetch it again."
            )
        return count

    def string(self, what: str) -> str:
        """A 64-bit length and as many bytes of UTF-8."""
        start = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"At byte {start}, {what} is not valid UTF-8 ({error.reason}).") from error

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in one loop without calls of our own: a vocabulary has a hundred thousand of them."""
        data, size, position = self.data, self.size, self.position
        length_at, result = struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(data, position)[0]
                if position > size:
                    raise self.fail(f"A string of {what} at byte {start} ends beyond the file; the file is damaged.")
                result.append(data[start:position].decode("utf-8"))
        except (struct.error, UnicodeDecodeError) as error:
            raise self.fail(f"A string of {what} near byte {position} is damaged ({error}).") from error
        self.position = position
        return result


def _version(reader: _Reader) -> int:
    """The format's version, 2 or 3, after the magic."""
    if reader.data[:4] != b"GGUF":
        raise reader.fail(f"A GGUF file starts with the bytes GGUF, this one with {reader.data[:4]!r}.")
    reader.take(4, "the magic")
    version = reader.number("I", "the version")
    if version & 0xFFFF == 0:
        raise reader.fail("This GGUF file is big-endian; only little-endian files are supported, convert it.")
    if version not in (2, 3):
        raise reader.fail(f"This is version {version} of GGUF; versions 2 and 3 are supported, convert the file.")
    return version


def _metadata(reader: _Reader) -> dict[str, Any]:
    """All keys and values, in the file's order. The count of tensors has been read, that of the keys comes next."""
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(_SMALLEST_KEY_VALUE, "metadata entries")):
        key = reader.string("a metadata key")
        if key in metadata:
            raise reader.fail(f"The metadata key {key!r} appears twice.")
        metadata[key] = _value(reader, reader.number("I", f"the type of {key!r}"), key, depth=0)
    return metadata


def _value(reader: _Reader, kind: int, key: str, depth: int) -> Any:
    """One metadata value of the given type number."""
    if kind == _STRING:
        return reader.string(f"the value of {key!r}")
    if kind == _ARRAY:
        return _array(reader, key, depth + 1)
    if kind not in _SCALARS:
        raise reader.fail(
            f"The metadata key {key!r} has the unknown type {kind}; the file is damaged or newer than us."
        )
    value = reader.number(_SCALARS[kind], f"the value of {key!r}")
    if kind != _BOOL:
        return value
    if value > 1:
        raise reader.fail(f"The metadata key {key!r} is a boolean of value {value}; expected 0 or 1.")
    return bool(value)


def _array(reader: _Reader, key: str, depth: int) -> Any:
    """An array: list of str, numpy array, or (for an array of arrays) list of these."""
    if depth > _DEEPEST_ARRAY:
        raise reader.fail(f"The metadata key {key!r} nests arrays deeper than {_DEEPEST_ARRAY}; the file is damaged.")
    kind = reader.number("I", f"the element type of {key!r}")
    if kind == _STRING:
        return reader.strings(reader.count(8, f"strings in {key!r}"), repr(key))
    if kind == _ARRAY:
        return [_array(reader, key, depth + 1) for _ in range(reader.count(12, f"arrays in {key!r}"))]
    if kind not in _SCALARS:
        raise reader.fail(f"The metadata key {key!r} is an array of the unknown type {kind}; the file is damaged.")
    return _numbers(reader, np.dtype("<" + _SCALARS[kind]), kind == _BOOL, key)


def _numbers(reader: _Reader, dtype: np.dtype, is_bool: bool, key: str) -> np.ndarray:
    """A numeric array in one step; a copy, so that it is aligned and does not keep the file mapped."""
    count = reader.count(dtype.itemsize, f"numbers in {key!r}")
    start = reader.take(count * dtype.itemsize, f"the array {key!r}")
    values = np.frombuffer(reader.data, dtype, count, start).copy()
    if not is_bool:
        return values
    if count and values.max() > 1:
        raise reader.fail(f"The boolean array {key!r} holds {values.max()}; expected 0 and 1 only.")
    return values.astype(np.bool_)


def _tensor_entry(reader: _Reader) -> _TensorEntry:
    """Name, dimensions, type and offset of the next tensor, with the bytes that these ask for."""
    name = reader.string("a tensor's name")
    rank = reader.number("I", f"the rank of {name!r}")
    if not 1 <= rank <= 4:
        raise reader.fail(f"It has {rank} dimensions; expected 1 to 4.", name)
    dimensions = tuple(reader.number("Q", f"a dimension of {name!r}") for _ in range(rank))
    type_number = reader.number("I", f"the type of {name!r}")
    offset = reader.number("Q", f"the offset of {name!r}")
    dtype = ggml.TYPE_NAMES.get(type_number, f"number {type_number}")
    if dtype not in ggml.BLOCK_SIZES:
        raise reader.fail(
            f"The GGML type {dtype} is not supported; supported are {', '.join(ggml.BLOCK_SIZES)}. "
            "Convert the model to one of these.",
            name,
        )
    if 0 in dimensions:
        raise reader.fail(f"A dimension of {dimensions} is zero; expected at least 1.", name)
    per_block, bytes_per_block = ggml.BLOCK_SIZES[dtype]
    if dimensions[0] % per_block:
        raise reader.fail(
            f"Its width {dimensions[0]} is not a multiple of the {per_block} weights of a {dtype} block.", name
        )
    return _TensorEntry(name, dimensions, dtype, offset, math.prod(dimensions) // per_block * bytes_per_block)


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    """Alignment of the tensors in bytes. The specification asks for a multiple of 8, which float64 needs anyway."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment is {alignment!r}; expected a power of two from 8 up.", file=path)
    return alignment


def _check_places(entries: list[_TensorEntry], data_start: int, alignment: int, reader: _Reader) -> None:
    """Raise CheckpointError unless every tensor has its own name and its own aligned place inside the file."""
    names: set[str] = set()
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.name in names:
            raise reader.fail("Two tensors have this name.", entry.name)
        names.add(entry.name)
        if entry.offset % alignment:
            raise reader.fail(f"Its offset {entry.offset} is not a multiple of the alignment {alignment}.", entry.name)
        if entry.offset < end:
            raise reader.fail(
                f"Its bytes from offset {entry.offset} overlap the tensor before, up to {end}.", entry.name
            )
        end = entry.offset + entry.nbytes
        if data_start + end > reader.size:
            raise reader.fail(
                f"Its {entry.nbytes} bytes should end at byte {data_start + end}, but the file has {reader.size}; "
                "it is truncated or damaged, fetch it again.",
                entry.name,
            )


def _stored(entry: _TensorEntry, reader: _Reader, data_start: int) -> StoredTensor:
    """The entry as the common record; torch counts dimensions the other way round."""
    shape = entry.dimensions[::-1]
    start = data_start + entry.offset
    if entry.dtype in PLAIN_DTYPES:
        read = functools.partial(_map_plain, reader.data, start, entry.dtype, shape)
    else:
        read = functools.partial(_read_blocks, reader.file, start, entry)
    return StoredTensor(entry.name, shape, entry.dtype, entry.nbytes, reader.file, read)


def _map_plain(data: mmap.mmap, start: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of the mapped bytes in the tensor's shape."""
    return torch.frombuffer(data, dtype=PLAIN_DTYPES[dtype], count=math.prod(shape), offset=start).view(shape)


def _read_blocks(file: Path, start: int, entry: _TensorEntry) -> torch.Tensor:
    """The blocks, uint8 [blocks, bytes per block]: read, not mapped, because they are unpacked at once, and mapped
    pages would stay in memory beside the result."""
    try:
        blocks = np.fromfile(file, np.uint8, count=entry.nbytes, offset=start)
    except OSError as error:
        raise CheckpointError(f"The file cannot be read any more ({error}).", file, entry.name) from error
    if len(blocks) < entry.nbytes:
        raise CheckpointError("The file has become shorter since it was opened; fetch it again.", file, entry.name)
    return torch.from_numpy(blocks).view(-1, ggml.BLOCK_SIZES[entry.dtype][1])
