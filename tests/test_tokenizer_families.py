"""Every supported family gives the ids of the tokenizers library (or of sentencepiece), whichever file it is in."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizer_families as families
import tokenizers
from hard_texts import HARD_TEXTS, TEXTS
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from llmfromscratch import tokenizer
from llmfromscratch.errors import TokenizerError
from llmfromscratch.text import tokenizer_files

AROUND = " <s>x </s> y<|im_end|><|im_end|><think>hm</think> <unk>"


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def own(family, tmp_path_factory) -> tokenizer.Tokenizer:
    return families.from_json(family, tmp_path_factory.mktemp("json"))


@pytest.fixture(scope="module")
def oracle(family) -> tokenizers.Tokenizer:
    """The library, which recognizes control tokens in any text."""
    return families.oracle(family)


@pytest.fixture(scope="module")
def plain_oracle(oracle) -> tokenizers.Tokenizer:
    """The library, told that control tokens are text; kept tokens such as <think> it recognizes all the same."""
    other = tokenizers.Tokenizer.from_str(oracle.to_str())
    other.encode_special_tokens = True
    return other


def normalized_alike(text: str) -> bool:
    """The library's normal form C knows no combining mark newer than Unicode 9: 98 of them stay where they are."""
    return normalizers.NFC().normalize_str(text) == unicodedata.normalize("NFC", text)


# ---- text from a user --------------------------------------------------------------------------------------------


def test_hard_texts_have_the_ids_of_the_library(own, plain_oracle):
    for text in HARD_TEXTS:
        assert own.encode(text) == plain_oracle.encode(text).ids, text


@given(text=TEXTS)
def test_any_text_has_the_ids_of_the_library(own, plain_oracle, text):
    assume(normalized_alike(text))
    assert own.encode(text) == plain_oracle.encode(text).ids


def test_no_control_token_comes_from_a_users_text(own, family):
    for text in [*families.CONTROL, AROUND, "".join(families.CONTROL)]:
        assert not {*own.encode(text, add_bos=False)} & {*own.special.values()}
        assert not {*own.encode(text, add_bos=False)} & {*own.added}


# ---- trusted text ------------------------------------------------------------------------------------------------


def test_control_tokens_in_trusted_text_have_the_ids_of_the_library(own, oracle):
    for text in HARD_TEXTS:
        assert own.encode(text + AROUND, special=True) == oracle.encode(text + AROUND).ids, text


@given(parts=st.lists(TEXTS | st.sampled_from([*families.CONTROL, *families.KEPT]), max_size=6))
@example(["a", "<s>", " b", "<|im_end|><|im_end|><|im_end|>"])
def test_any_trusted_text_has_the_ids_of_the_library(own, oracle, parts):
    text = "x" + "".join(parts)
    assume(normalized_alike(text))
    assert own.encode(text, special=True) == oracle.encode(text).ids


def test_begin_stands_once_before_a_text_that_already_has_it(own, oracle):
    begin = [1] if own.add_bos else []
    assert own.encode("<s>hi", special=True) == oracle.encode("<s>hi").ids[len(begin) :]
    assert own.encode("<s>hi", special=True, add_bos=True)[:2].count(1) == 1
    assert own.encode("<s>hi", special=True, add_bos=False)[0] == 1
    assert own.encode("hi", add_bos=True) == [1, *own.encode("hi", add_bos=False)]
    assert own.encode("hi") == [*begin, *own.encode("hi", add_bos=False)]


FLAGGED = ["<a>", "<a><a>", "foo", "qé", "<b >", "_x", "zz", "foo bar", "\u00a0q"]
FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)


@given(
    flags=st.dictionaries(st.sampled_from(FLAGGED), FLAGS, min_size=1, max_size=5),
    parts=st.lists(
        st.sampled_from([*FLAGGED, *FLAGGED, "qe\u0301", " ", "\t", "\u00a0", "x", "9", ",", "<s>"]), max_size=8
    ),
)
def test_the_flags_of_added_tokens_mean_what_they_mean_in_the_library(family, tmp_path_factory, flags, parts):
    other = tokenizers.Tokenizer.from_str(families.oracle(family).to_str())
    for text, chosen in flags.items():
        (other.add_special_tokens if chosen["special"] else other.add_tokens)([AddedToken(text, **chosen)])
    file = families.saved(other, tmp_path_factory.mktemp("flags"))
    own, text = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(file)), "x" + "".join(parts)
    assert own.encode(text, special=True) == other.encode(text).ids


# ---- back to text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
def test_ids_decode_to_the_text_of_the_library(own, oracle, skip):
    for text in HARD_TEXTS:
        ids = oracle.encode(text + AROUND).ids
        assert own.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip), text


@given(text=TEXTS)
def test_any_ids_of_a_text_decode_to_the_text_of_the_library(own, oracle, text):
    ids = oracle.encode(text).ids
    assert own.decode(ids) == oracle.decode(ids)


@pytest.mark.parametrize("family", families.BYTE_LEVEL, indirect=True)
@given(text=TEXTS)
def test_byte_level_text_comes_back_in_its_normal_form(own, family, text):
    expected = unicodedata.normalize("NFC", text) if family == "qwen2" else text
    assert own.decode(own.encode(text)) == expected


@pytest.mark.parametrize("family", families.VISIBLE_SPACES, indirect=True)
@given(ids=st.lists(st.integers(0, 815), max_size=12))
@example([3 + 2 + 0xE4, 3 + 2 + 0xB8, 3 + 2 + 0xAD, 3 + 2 + 0xFF])
def test_broken_bytes_among_byte_tokens_spoil_no_whole_character_beside_them(own, oracle, ids):
    """The library gives up a whole run of byte tokens when one of them is broken; we stream: what is whole leaves."""
    expected = b"".join(map(own.token_bytes, ids)).decode("utf-8", errors="replace")
    assert own.decode(ids, False) == (expected.removeprefix(" ") if own.strip_first_space else expected)
    if "\ufffd" not in own.decode(ids, False):
        assert own.decode(ids, False) == oracle.decode(ids, skip_special_tokens=False)


def test_kept_tokens_stay_in_decoded_text_and_control_tokens_do_not():
    own = families.from_gguf("qwen2")
    ids = own.encode("<think>hm</think>yes<|im_end|>", special=True)
    assert own.decode(ids) == "<think>hm</think>yes"
    assert own.decode(ids, skip_special=False) == "<think>hm</think>yes<|im_end|>"


# ---- GGUF metadata -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.BYTE_LEVEL, indirect=True)
def test_gguf_metadata_gives_the_tokenizer_of_the_json_file(own, family):
    theirs = families.from_gguf(family)
    for text in HARD_TEXTS:
        assert theirs.encode(text) == own.encode(text)
        assert theirs.encode(text + AROUND, special=True) == own.encode(text + AROUND, special=True)
    apart = [f.name for f in fields(own._data) if getattr(own._data, f.name) != getattr(theirs._data, f.name)]
    assert apart == ["vocab"]  # GGUF lists added tokens among the others
    assert theirs.vocab_size == own.vocab_size


def test_a_whole_word_stays_whole_where_the_rule_says_so():
    words = {"Ġquick", "Ġlazy", "ĠĠĠ", "123", "Hello"}
    own = families.from_gguf("llama-bpe")
    found = {own._tokens[index] for index in own.encode("Hello quick lazy    123")}
    assert words <= found


# ---- SentencePiece models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte_fallback", "unknown"])
def model_file(request, tmp_path_factory) -> Path:
    """A model that sentencepiece itself has trained; as Llama 2's, or without byte tokens."""
    folder = tmp_path_factory.mktemp("model")
    texts = [line for text in families.CORPUS for line in text.split("\n") if line.strip()]
    (folder / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=700,
        byte_fallback=request.param == "byte_fallback", normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.98, minloglevel=2, num_threads=1,
        allow_whitespace_only_pieces=True, split_digits=True, user_defined_symbols=["<think>"],
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def processor(model_file) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(model_file))


@pytest.fixture(scope="module")
def from_model(model_file) -> tokenizer.Tokenizer:
    return tokenizer.Tokenizer(tokenizer_files.read_model_tokenizer(model_file))


def as_gguf(processor: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    """The metadata that a converted file has."""
    ids = range(processor.vocab_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    kinds[processor.piece_to_id("<think>")] = 4
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": np.array([processor.get_score(i) for i in ids], dtype=np.float32),
        "token_type": np.array(kinds, dtype=np.int32),
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def readable(text: str) -> str:
    """What sentencepiece does with a zero byte and with its user-defined symbols is another thing: leave them out."""
    return text.replace("\x00", "").replace("<think>", "think")


def test_a_sentencepiece_model_gives_the_ids_and_the_text_of_sentencepiece(from_model, processor):
    for text in map(readable, HARD_TEXTS):
        ids = processor.encode(text)
        assert from_model.encode(text) == [1, *ids], text
        known = [index for index in ids if index != processor.unk_id()]
        assert from_model.decode(ids) == processor.decode(known), text


@given(text=TEXTS)
def test_any_text_has_the_ids_of_sentencepiece(from_model, processor, text):
    text = readable(text)
    assert from_model.encode(text) == [1, *processor.encode(text)]


def test_gguf_metadata_with_scores_gives_the_tokenizer_of_the_model_file(from_model, processor):
    converted = tokenizer.Tokenizer(tokenizer_files.read_gguf_tokenizer(as_gguf(processor), Path("model.gguf")))
    for text in HARD_TEXTS:
        assert converted.encode(text) == from_model.encode(text)
        assert converted.encode(text + AROUND, special=True) == from_model.encode(text + AROUND, special=True)
    assert converted._data == from_model._data


@given(text=TEXTS)
def test_a_sentencepiece_model_converted_to_json_gives_the_same_ids(from_model, text):
    data = from_model._data
    merges = sorted(data.ranks, key=data.ranks.__getitem__)
    other = tokenizers.Tokenizer(
        models.BPE(data.vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=data.byte_fallback)
    )
    other.normalizer, other.decoder = families.prepend(), decoders.Fuse()
    assert from_model.encode(text, add_bos=False) == other.encode(text).ids


def test_without_a_dummy_prefix_none_is_put_there(processor):
    metadata = as_gguf(processor) | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    own = tokenizer.Tokenizer(tokenizer_files.read_gguf_tokenizer(metadata, Path("model.gguf")))
    ids = own.encode("the fox")
    assert own._tokens[ids[0]][0] != "▁"
    assert own.decode(ids) == "the fox"
    assert own.decode(own.encode(" the")) == " the"


# ---- chat templates ----------------------------------------------------------------------------------------------

TEMPLATES = {
    "ChatML": "{% for m in messages %}<|im_end|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n<think>\n{% endif %}",
    "begin and [INST]": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}",
}
CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "  Hi\n\n12345 ďábelské e\u0301 👍🏽 中文"},
        {"role": "assistant", "content": "Hello! "},
        {"role": "user", "content": "x != y\t  "},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_ids_that_transformers_gives_it(family, oracle, tmp_path, name, messages):
    file = families.saved(oracle, tmp_path, chat_template=TEMPLATES[name])
    own = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(file))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for generation in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert own.render_chat(messages, generation) == expected
    if "begin" in name:
        assert own.render_chat(messages)[:2].count(1) == 1
    text = theirs.apply_chat_template(messages, tokenize=False)
    if own.add_bos:  # a rendered text that goes through encode gets no second begin token
        assert own.encode(text, special=True)[:2].count(1) == 1


# ---- what stands around a text -----------------------------------------------------------------------------------


def with_processor(folder: Path, single: str, tokens: list[tuple[str, int]], **config) -> tokenizer.Tokenizer:
    other = tokenizers.Tokenizer.from_str(families.oracle("Llama 2").to_str())
    other.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    file = families.saved(other, folder, **config)
    own = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(file))
    assert own.encode("the fox") == other.encode("the fox").ids
    return own


def test_a_begin_and_an_end_token_around_every_text_are_those_of_the_file(tmp_path):
    own = with_processor(tmp_path, "<s> $A </s>", [("<s>", 1), ("</s>", 2)])
    assert (own.bos_id, own.eos_ids, own.add_bos) == (1, (2,), True)
    assert own.encode("the fox", add_bos=False) == own.encode("the fox")[1:-1]
    own = with_processor(tmp_path, "$A </s>", [("</s>", 2)])
    assert (own.add_bos, own.encode("a")[-1]) == (False, 2)
    own = with_processor(tmp_path, "$A", [])
    assert own.encode("a") == own.encode("a", add_bos=False)


def test_begin_and_end_tokens_need_not_be_named_twice(tmp_path):
    own = with_processor(tmp_path, "<s> $A </s>", [("<s>", 1), ("</s>", 2)], bos_token=None, eos_token=None)
    assert (own.bos_id, own.eos_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("single", "tokens"),
    [
        ("<unk> $A", [("<unk>", 0)]),
        ("$A <unk>", [("<unk>", 0)]),
        ("<s> <s> $A", [("<s>", 1)]),
        ("<s> $A </s> </s>", [("<s>", 1), ("</s>", 2)]),
    ],
)
def test_other_tokens_around_a_text_are_refused_by_name(tmp_path, single, tokens):
    with pytest.raises(TokenizerError, match=r"post.processor .*SpecialToken.* is not supported"):
        with_processor(tmp_path, single, tokens)


def test_every_end_token_of_generation_config_counts_once(tmp_path):
    file = families.saved(families.oracle("llama-bpe"), tmp_path, pad_token="<unk>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2, 4, 99_999]}), encoding="utf-8")
    own = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(file))
    assert (own.bos_id, own.eos_ids, own.pad_id) == (1, (2, 3, 4), 0)


def test_a_model_without_begin_token_gets_none(tmp_path):
    file = families.saved(families.oracle("qwen2"), tmp_path, bos_token=None)
    own = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(file))
    assert own.bos_id is None
    assert own.encode("hi") == own.encode("hi", add_bos=False)
    with pytest.raises(TokenizerError, match="no begin token"):
        own.encode("hi", add_bos=True)


def test_a_folder_is_read_from_the_best_file_in_it(tmp_path, model_file):
    assert tokenizer_files.read_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(model_file.read_bytes())
    assert tokenizer_files.read_tokenizer(tmp_path) == tokenizer_files.read_model_tokenizer(model_file)
    families.saved(families.oracle("qwen2"), tmp_path)
    assert not tokenizer_files.read_tokenizer(tmp_path).byte_fallback
