"""A SentencePiece model is read as sentencepiece itself reads it; a damaged or foreign one is refused in a sentence."""

from __future__ import annotations

import base64
import contextlib
import struct
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmfromscratch.errors import CheckpointError, TokenizerError
from llmfromscratch.formats.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, read_sentencepiece
from llmfromscratch.text import tokenizer_files

TEXTS = ["the quick brown fox jumps over the lazy dog", "ďábelské ódy, über alles, 中文 和 日本語"] * 40


def trained(folder: Path, **settings: object) -> Path:
    """A model file that sentencepiece has trained."""
    defaults: dict[str, object] = {
        "model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "minloglevel": 2, "num_threads": 1, "hard_vocab_limit": False,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), **{**defaults, **settings}
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("model"), user_defined_symbols=["<think>"], control_symbols=["<|end|>"])


def test_every_piece_score_and_kind_is_what_sentencepiece_says(model_file):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    ours = read_sentencepiece(model_file)
    assert len(ours.pieces) == theirs.vocab_size()
    for index, piece in enumerate(ours.pieces):
        assert (piece.text, piece.score) == (theirs.id_to_piece(index), theirs.get_score(index))
        assert (piece.kind == UNKNOWN) == theirs.is_unknown(index)
        assert (piece.kind == CONTROL) == theirs.is_control(index)
        assert (piece.kind == BYTE) == theirs.is_byte(index)
    assert {piece.kind for piece in ours.pieces} == {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}
    assert ours.pieces[theirs.piece_to_id("<think>")].kind == USER_DEFINED
    assert (ours.unk_id, ours.bos_id, ours.eos_id, ours.pad_id) == (0, 1, 2, None)
    assert (ours.kind, ours.byte_fallback, ours.normalizer, ours.has_charsmap) == ("BPE", True, "identity", False)
    assert (ours.add_dummy_prefix, ours.remove_extra_whitespaces, ours.escape_whitespaces) == (True, False, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pad_id": 3}, ("pad_id", 3)),
        ({"bos_id": -1}, ("bos_id", None)),
        ({"bos_id": -1, "eos_id": 1}, ("eos_id", 1)),
        ({"add_dummy_prefix": False}, ("add_dummy_prefix", False)),
        ({"byte_fallback": False}, ("byte_fallback", False)),
        ({"remove_extra_whitespaces": True}, ("remove_extra_whitespaces", True)),
        ({"treat_whitespace_as_suffix": True}, ("whitespace_as_suffix", True)),
        ({"model_type": "unigram"}, ("kind", "unigram")),
        ({"model_type": "char"}, ("kind", "character")),
        ({"normalization_rule_name": "nmt_nfkc"}, ("has_charsmap", True)),
    ],
)
def test_every_setting_is_read(tmp_path, changes, expected):
    assert getattr(read_sentencepiece(trained(tmp_path, **changes)), expected[0]) == expected[1]


REFUSED = [
    ({"model_type": "unigram"}, "the model of type 'unigram' is not supported"),
    ({"model_type": "char"}, "the model of type 'character' is not supported"),
    ({"normalization_rule_name": "nmt_nfkc"}, "the normalizer 'nmt_nfkc' is not supported"),
    ({"remove_extra_whitespaces": True}, "setting remove_extra_whitespaces True is not supported"),
    ({"treat_whitespace_as_suffix": True}, "setting treat_whitespace_as_suffix True is not supported"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_would_change_the_ids_and_is_not_followed_is_refused_by_name(tmp_path, changes, sentence):
    file = trained(tmp_path, **changes)
    with pytest.raises(TokenizerError, match=sentence) as caught:
        tokenizer_files.read_model_tokenizer(file)
    assert str(file) in str(caught.value)


# ---- damage ------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    head, rest = number & 0x7F, number >> 7
    return bytes([head | 0x80]) + varint(rest) if rest else bytes([head])


def field(number: int, value: int | float | bytes | str) -> bytes:
    """One field of a protocol-buffer message, by hand."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: str, score: float = 0.0, kind: int | None = None) -> bytes:
    return field(1, field(1, text) + field(2, score) + (b"" if kind is None else field(3, kind)))


SMALL = piece("<unk>", 0.0, UNKNOWN) + piece("<s>", 0.0, CONTROL) + piece("</s>", 0.0, CONTROL) + piece("a", -1.5)
BPE = field(2, field(3, 2))


def test_a_model_written_by_hand_is_read_with_the_defaults_of_the_format(tmp_path):
    file = tmp_path / "tokenizer.model"
    unknown_fields = field(99, b"later") + varint(98 << 3 | 1) + bytes(8)
    file.write_bytes(SMALL + unknown_fields)
    model = read_sentencepiece(file)
    assert [(p.text, p.score, p.kind) for p in model.pieces][-1] == ("a", -1.5, NORMAL)
    assert (model.kind, model.unk_id, model.bos_id, model.eos_id, model.pad_id) == ("unigram", 0, 1, 2, None)
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces, model.byte_fallback) == (True, True, False)
    file.write_bytes(SMALL + BPE + field(2, field(40, 0) + field(3, 2) + field(41, -1)))
    assert (read_sentencepiece(file).kind, read_sentencepiece(file).bos_id) == ("BPE", None)


DAMAGED = {
    "nothing": b"",
    "no pieces": BPE,
    "a text file": b"hello, world\n" * 9,
    "tiktoken's ranks": b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)),
    "a number without end": b"\xff" * 11,
    "a length beyond the end": SMALL + b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a group, which nobody writes": SMALL + varint(5 << 3 | 3),
    "a field of number 0": SMALL + b"\x02\x00",
    "a piece that is a number": SMALL + field(1, 7),
    "a piece without text": SMALL + piece(""),
    "a piece that is no UTF-8": SMALL + field(1, field(1, b"\xff")),
    "a piece of an unknown kind": SMALL + piece("b", 0.0, 9),
    "a score that is no number": SMALL + piece("b", float("nan")),
    "a score of 8 bytes": SMALL + field(1, field(1, "b") + varint(2 << 3 | 1) + bytes(8)),
    "a score that is a whole number": SMALL + field(1, field(1, "b") + field(2, 3)),
    "a special piece beyond the pieces": SMALL + field(2, field(41, 4)),
    "settings that are a number": SMALL + field(2, 5),
    "a setting that is text": SMALL + field(2, field(35, b"yes")),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_a_sentence_that_names_it(tmp_path, damage):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(DAMAGED[damage])
    with pytest.raises(CheckpointError, match="no SentencePiece model, or it is damaged") as caught:
        read_sentencepiece(file)
    assert str(file) in str(caught.value)
    # a list of ranks is no SentencePiece model, but it may be one of Llama 3's files, which are read
    said = "list of 256 ranks is not supported" if "ranks" in damage else "no SentencePiece model, or it is damaged"
    with pytest.raises(TokenizerError, match=said):
        tokenizer_files.read_model_tokenizer(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sentencepiece(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sentencepiece(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_with_any_bytes_changed_or_cut_off_is_read_or_refused_with_our_own_error(tmp_path, model_file, data):
    content = bytearray(model_file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(TokenizerError):
        tokenizer_files.read_model_tokenizer(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary(max_size=60))
@example(SMALL + BPE)
def test_any_bytes_are_read_or_refused_with_our_own_error(tmp_path, content):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with contextlib.suppress(TokenizerError):
        tokenizer_files.read_model_tokenizer(file)
