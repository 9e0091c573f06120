"""Llama 3's tokenizer.model, a list of tokens and ranks: the ids of the tokenizers library, or an error of our own."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import tokenizer_families as families
import tokenizers
from checkpoint_writers import FAMILIES, random_model, write_meta
from hard_texts import HARD_TEXTS, TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from llmfromscratch import LLM, SamplingParams, tokenizer
from llmfromscratch.errors import TokenizerError
from llmfromscratch.text import tokenizer_files

SIZE = 128_000
# Bytes that are in no UTF-8 text: tokens made of them fill a vocabulary up and change no id.
NEVER = [bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]


def trained_tokens() -> list[bytes]:
    """The single bytes and the merges of a small vocabulary, the best first, then words that no merge leads to."""
    vocab = json.loads(families.oracle("llama-bpe").to_str())["model"]["vocab"]
    byte_of = {character: byte for byte, character in enumerate(tokenizer.byte_characters())}
    spelled = [token for token in sorted(vocab, key=vocab.__getitem__) if all(c in byte_of for c in token)]
    return [bytes(byte_of[character] for character in token) for token in spelled if token not in families.CONTROL]


def whole_vocabulary() -> list[bytes]:
    tokens = trained_tokens()
    fill = (b"".join(parts) for length in (3, 4, 5) for parts in itertools.product(NEVER, repeat=length))
    return [*tokens, *itertools.islice(fill, SIZE - len(tokens))]


def written(tokens: list[bytes], end: bytes = b"\n") -> bytes:
    return b"".join(base64.b64encode(token) + b" %d" % rank + end for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    return whole_vocabulary()


@pytest.fixture(scope="module")
def file(tmp_path_factory, tokens) -> Path:
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(written(tokens))
    return path


@pytest.fixture(scope="module")
def own(file) -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer(tokenizer_files.read_tokenizer(file.parent))


@pytest.fixture(scope="module")
def oracle(tokens) -> tokenizers.Tokenizer:
    """The library's model with the merges that the models' converted tokenizer.json has: every way to cut a token."""
    characters = tokenizer.byte_characters()
    vocab = {"".join(characters[byte] for byte in token): rank for rank, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    other = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    other.pre_tokenizer, other.decoder = families.split(families.LLAMA3_WORDS), decoders.ByteLevel()
    return other


def merged(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """The rule by itself: a word that is a token is one; else the two neighbours of the lowest rank are joined."""
    parts = [word] if word in ranks else [bytes([byte]) for byte in word]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        place = min(found)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_hard_texts_have_the_ids_of_the_library_and_come_back(own, oracle):
    for text in HARD_TEXTS:
        ids = own.encode(text, add_bos=False)
        assert ids == oracle.encode(text).ids, text
        assert own.decode(ids) == text


@settings(deadline=None)
@given(text=TEXTS)
def test_any_text_has_the_ids_of_the_library(own, oracle, text):
    assert own.encode(text, add_bos=False) == oracle.encode(text).ids


@settings(deadline=None)
@given(word=st.text("aeintho T", min_size=1, max_size=30))
def test_neighbours_are_joined_by_the_rank_of_their_bytes_together(own, tokens, word):
    ranks = {token: rank for rank, token in enumerate(tokens)}
    words = tokenizer.split_words(word, own._data.splitting)
    assert own.encode(word, add_bos=False) == [index for part in words for index in merged(part.encode(), ranks)]


# The ids of the models' own tokenizer.json, which users of either file meet.
SPECIAL = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|reserved_special_token_0|>": 128002,
    "<|finetune_right_pad_id|>": 128004,
    "<|reserved_special_token_2|>": 128005,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
    "<|reserved_special_token_3|>": 128011,
    "<|reserved_special_token_247|>": 128255,
}


def test_control_tokens_stand_after_the_ranks_where_the_models_have_them(own, oracle):
    assert SPECIAL.items() <= own.special.items()
    assert (len(own.special), own.vocab_size, own.bos_id) == (256, 128256, 128000)
    assert (own.eos_ids, own.pad_id, own.add_bos) == ((128001, 128008, 128009), 128004, True)
    text = "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    other = tokenizers.Tokenizer.from_str(oracle.to_str())
    other.add_special_tokens([AddedToken(token) for token in sorted(own.special, key=own.special.__getitem__)])
    assert own.encode(text, special=True) == [128000, *other.encode(text).ids]
    assert not set(own.encode(text)[1:]) & set(own.special.values())
    assert own.encode(text, add_bos=False) == oracle.encode(text).ids


def test_the_spelling_of_bytes_is_the_one_that_chapter_2_teaches(own, tokens):
    assert [own.token_bytes(rank) for rank in range(SIZE)] == tokens


def test_the_config_beside_it_counts(file, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    config = {
        "eos_token": "<|eot_id|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "add_bos_token": 0,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    found = tokenizer.Tokenizer(tokenizer_files.read_tokenizer(tmp_path))
    assert (found.eos_ids, found.add_bos) == ((128009,), False)
    assert found.config().eos_ids == (128009,)
    assert found.render_chat([{"role": "user", "content": "hi"}]) == [128000, *found.encode("hi")]


def test_windows_line_ends_and_no_line_end_at_the_end_are_fine(file, tokens, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(written(tokens, b"\r\n")[:-2])
    assert tokenizer_files.read_tokenizer(tmp_path) == tokenizer_files.read_tokenizer(file.parent)


def test_metas_own_folder_opens_and_answers(file, tmp_path):
    write_meta(tmp_path, random_model(FAMILIES["llama"]))
    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    llm = LLM(tmp_path, dtype="float32", device="cpu", truncation="left", max_length=4)
    llm.tokenizer.add_bos = False  # the model of this test has 64 tokens only
    prompt = "+!" * 5
    answer = llm.generate(prompt, SamplingParams(max_tokens=3))[0]
    assert answer.prompt_token_ids == llm.tokenizer.encode(prompt)[-4:]
    assert answer.text == llm.tokenizer.decode(answer.token_ids) != ""
    with pytest.raises(TokenizerError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


# ---- what cannot be meant ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [256, 1000])
def test_a_list_of_another_size_is_refused_since_its_splitting_rule_is_not_in_the_file(tmp_path, tokens, size):
    (tmp_path / "tokenizer.model").write_bytes(written(tokens[:size]))
    with pytest.raises(TokenizerError, match=f"a list of {size} ranks is not supported, .*Llama 3's, with 128000, is"):
        tokenizer_files.read_tokenizer(tmp_path)


BYTES = [bytes([byte]) for byte in range(256)]
LINES = written(BYTES)
DAMAGED = {
    "a line that is something else": LINES + b"what is this\n",
    "a line without a rank": LINES + b"YWI=\n",
    "a token that is empty": LINES + b" 256\n",
    "base64 that is cut off": LINES + b"YWI 256\n",
    "base64 of another alphabet": LINES + b"YW-_ 256\n",
    "a rank below zero": LINES + b"YWI= -1\n",
    "a rank with an underscore": LINES + b"YWI= 2_56\n",
    "a rank of many digits": LINES + b"YWI= " + b"9" * 10_000 + b"\n",
    "a rank that is left out": LINES + b"YWI= 257\n",
    "a rank that comes twice": LINES + b"YWI= 255\n",
    "a token that comes twice": LINES + b"YQ== 256\n",
    "an empty line": LINES + b"\n",
    "a byte without a token": written(BYTES[:255]),
    "a token that is very long": LINES + base64.b64encode(b"x" * 513) + b" 256\n",
    "two tokens in a line": LINES + b"YWI= 256 YWM= 257\n",
    "binary after the lines": LINES + bytes(range(256)),
    "one line only": b"YWI= 0\n",
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_list_is_a_tokenizer_error_that_names_the_file(tmp_path, damage):
    (tmp_path / "tokenizer.model").write_bytes(DAMAGED[damage])
    with pytest.raises(TokenizerError, match="tokenizer.model: the tokenizer is damaged or incomplete"):
        tokenizer_files.read_tokenizer(tmp_path)


def test_a_file_without_measure_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "tokenizer.model").open("wb") as opened:
        opened.write(LINES)
        opened.truncate(10**12)
    with pytest.raises(TokenizerError, match="it has 1000000000000 bytes; 16000000 are the limit"):
        tokenizer_files.read_tokenizer(tmp_path)


@settings(deadline=None)
@given(place=st.integers(0, len(LINES) - 1), new=st.binary(max_size=3), cut=st.booleans())
def test_changed_bytes_are_refused_with_our_own_error(tmp_path_factory, place, new, cut):
    path = tmp_path_factory.mktemp("changed") / "tokenizer.model"
    path.write_bytes(LINES[:place] + new + (b"" if cut else LINES[place + 1 :]))
    with pytest.raises(TokenizerError):
        tokenizer_files.read_tokenizer(path.parent)
