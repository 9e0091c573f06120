"""Reads a SentencePiece model (`tokenizer.model`): its pieces, its settings and the ids of its special pieces.

The file is one protocol-buffer message (sentencepiece_model.proto). The wire format is short enough to read by hand:
a field is a varint key (number and kind), then a varint, 4 or 8 bytes, or a length and as many bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmfromscratch.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_KINDS = {UNIGRAM: "unigram", BPE: "BPE", 3: "word", 4: "character"}
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10

Field = int | bytes  # a varint's value, or the bytes of any other field


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place. kind: one of the six constants above."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """pieces: by id. kind: "BPE", "unigram", "word" or "character". normalizer: the name of its rules; has_charsmap:
    whether these rules change any character. The ids are None where the model has no such piece.
    """

    pieces: tuple[Piece, ...]
    kind: str
    byte_fallback: bool
    whitespace_as_suffix: bool
    unk_id: int | None
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    normalizer: str
    has_charsmap: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a model file. Raises CheckpointError for one that is damaged or is no such file."""
    try:
        content = path.read_bytes()
        message = _grouped(content)
        pieces = tuple(map(_piece, message.get(1, [])))
        if not pieces:
            raise ValueError("it holds no pieces")
        trainer, normalizer = _last_message(message, 2), _last_message(message, 3)
        kind = _number(trainer, 3, UNIGRAM)
        return SentencePieceModel(
            pieces=pieces,
            kind=_KINDS.get(kind, f"number {kind}"),
            byte_fallback=bool(_number(trainer, 35, 0)),
            whitespace_as_suffix=bool(_number(trainer, 24, 0)),
            unk_id=_piece_id(trainer, 40, 0, len(pieces)),
            bos_id=_piece_id(trainer, 41, 1, len(pieces)),
            eos_id=_piece_id(trainer, 42, 2, len(pieces)),
            pad_id=_piece_id(trainer, 43, -1, len(pieces)),
            normalizer=_bytes(normalizer, 1).decode("utf-8"),
            has_charsmap=len(_bytes(normalizer, 2)) > 0,
            add_dummy_prefix=bool(_number(normalizer, 3, 1)),
            remove_extra_whitespaces=bool(_number(normalizer, 4, 1)),
            escape_whitespaces=bool(_number(normalizer, 5, 1)),
        )
    except OSError as error:
        raise CheckpointError(f"The file cannot be read ({error}).", file=path) from error
    except (ValueError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"This is no SentencePiece model, or it is damaged ({error}); fetch it again, or use tokenizer.json. "
            "A tokenizer.model in the format of tiktoken, as Llama 3 came with, is not supported.",
            file=path,
        ) from error


def _fields(message: bytes) -> Iterator[tuple[int, Field]]:
    """(field number, value) in the file's order. Raises ValueError where the bytes do not add up."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == _BYTES:
            length, position = _varint(message, position)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of kind {kind} before byte {position}")
        if number == 0 or length > len(message) - position:
            raise ValueError(f"field {number} at byte {position} should take {length} bytes of {len(message)}")
        yield number, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first; returns it and the position behind it."""
    value = 0
    for shift, byte in enumerate(message[position : position + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + shift + 1
    raise ValueError(f"a number at byte {position} has no end")


def _grouped(message: bytes) -> dict[int, list[Field]]:
    grouped: dict[int, list[Field]] = {}
    for number, value in _fields(message):
        grouped.setdefault(number, []).append(value)
    return grouped


def _last_message(message: dict[int, list[Field]], number: int) -> dict[int, list[Field]]:
    return _grouped(_bytes(message, number))


def _bytes(message: dict[int, list[Field]], number: int) -> bytes:
    value = message.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number where bytes should be")
    return value


def _number(message: dict[int, list[Field]], number: int, default: int) -> int:
    value = message.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {number} is bytes where a number should be")
    return value - (1 << 64) if value >> 63 else value


def _piece(content: Field) -> Piece:
    if not isinstance(content, bytes):
        raise ValueError("a piece is a number")
    fields = _grouped(content)
    (score,) = struct.unpack("<f", _bytes(fields, 2) or bytes(4))
    text, kind = _bytes(fields, 1).decode("utf-8"), _number(fields, 3, NORMAL)
    if not text or not math.isfinite(score) or kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
        raise ValueError(f"the piece {text!r} has score {score} and type {kind}")
    return Piece(text, score, kind)


def _piece_id(trainer: dict[int, list[Field]], number: int, default: int, count: int) -> int | None:
    """The id in a field; below zero there is none. Raises ValueError beyond the pieces."""
    index = _number(trainer, number, default)
    if index >= count:
        raise ValueError(f"the special piece {index} lies beyond the {count} pieces")
    return index if index >= 0 else None
