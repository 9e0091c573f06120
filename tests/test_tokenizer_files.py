"""GGUF metadata and tokenizer.json give the same tokenizer; damaged ones give a TokenizerError, nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmfromscratch import tokenizer
from llmfromscratch.errors import TokenizerError
from llmfromscratch.formats.gguf import read_gguf
from llmfromscratch.text import splitting, tokenizer_files

BYTES = tokenizer.byte_characters()
TOKENS = ["<|endoftext|>", "<|start|>", "<|end|>", *BYTES, "th", "Ġth", "Ġthe", "ĠĠ", "12"]
MERGES = [("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("Ġ", "Ġ"), ("1", "2")]
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
TEXT = "the  the 12 thé\n"
FILE = Path("some/model.gguf")


def metadata(**changes: object) -> dict[str, object]:
    """The tokenizer's part of a small GGUF file; keys are changed without their prefix, None takes one out."""
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": list(TOKENS),
        "token_type": np.array([3, 3, 3] + [1] * (len(TOKENS) - 3), dtype=np.int32),
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    return {**named, "tokenizer.chat_template": TEMPLATE}


def library(split_digits: bool = True) -> tokenizers.Tokenizer:
    other = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, MERGES))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level]) if digits else byte_level
    other.decoder = decoders.ByteLevel()
    other.add_special_tokens(["<|endoftext|>", "<|start|>", "<|end|>"])
    return other


def folder_of(path: Path, tokenizer_json: object, config: object = None) -> Path:
    file = path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json), encoding="utf-8")
    default = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(default if config is None else config), encoding="utf-8")
    return file


def as_json(split_digits: bool = True) -> dict:
    return json.loads(library(split_digits).to_str())


@pytest.mark.parametrize("split_digits", [True, False])
def test_both_kinds_of_files_give_the_ids_of_the_tokenizers_library(tmp_path, split_digits):
    rule = "smollm" if split_digits else "gpt-2"
    from_gguf = tokenizer_files.read_gguf_tokenizer(metadata(pre=rule), FILE)
    from_json = tokenizer_files.read_json_tokenizer(folder_of(tmp_path, as_json(split_digits)))
    expected = library(split_digits).encode(TEXT).ids
    assert tokenizer.Tokenizer(from_gguf).encode(TEXT) == expected
    assert tokenizer.Tokenizer(from_json).encode(TEXT) == expected
    assert (TOKENS.index("12") in expected) == (not split_digits)
    assert from_gguf == from_json


def test_ends_special_tokens_and_template_are_found_in_both_kinds_of_files(tmp_path):
    expected = tokenizer_files.read_gguf_tokenizer(metadata(), FILE)
    assert (expected.bos_id, expected.eos_ids, expected.chat_template) == (1, (2,), TEMPLATE)
    assert {token.text: token.index for token in expected.added} == {"<|endoftext|>": 0, "<|start|>": 1, "<|end|>": 2}
    assert all(token.special for token in expected.added)
    assert tokenizer_files.read_json_tokenizer(folder_of(tmp_path, as_json())) == expected


def test_old_json_files_write_a_merge_as_one_string(tmp_path):
    old = as_json()
    old["model"]["merges"] = [" ".join(pair) for pair in MERGES]
    found = tokenizer_files.read_json_tokenizer(folder_of(tmp_path, old)).ranks
    assert found == {pair: rank for rank, pair in enumerate(MERGES)}


def test_a_template_may_stand_in_a_file_of_its_own_or_in_a_list_of_several(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    file = folder_of(tmp_path, as_json(), {"chat_template": several})
    assert tokenizer_files.read_json_tokenizer(file).chat_template == {"tool_use": "no", "default": "yes"}
    (tmp_path / "chat_template.jinja").write_text("ünïcode", encoding="utf-8")
    assert tokenizer_files.read_json_tokenizer(file).chat_template == "ünïcode"


@pytest.mark.parametrize("templates", ["alone", {"default": "a", "tool_use": "b", "rag": "ç"}])
def test_templates_are_found_where_transformers_saves_them(tmp_path, templates):
    fast = PreTrainedTokenizerFast(tokenizer_object=library(), chat_template=templates)
    fast.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    assert tokenizer_files.read_json_tokenizer(tmp_path / "tokenizer.json").chat_template == templates


def test_named_templates_of_a_gguf_stand_beside_the_default():
    named = {**metadata(), "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    found = tokenizer_files.read_gguf_tokenizer(named, FILE).chat_template
    assert found == {"default": TEMPLATE, "tool_use": "{{ tools }}"}
    with pytest.raises(TokenizerError, match="chat template is a int, not text"):
        tokenizer_files.read_gguf_tokenizer({**named, "tokenizer.chat_template.rag": 5}, FILE)


def test_without_the_files_beside_it_a_tokenizer_json_still_encodes(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(as_json()), encoding="utf-8")
    found = tokenizer_files.read_json_tokenizer(file)
    assert (found.bos_id, found.eos_ids, found.chat_template) == (None, (), None)
    assert tokenizer.Tokenizer(found).encode(TEXT) == library().encode(TEXT).ids


def test_every_end_token_of_a_gguf_counts_once():
    found = tokenizer_files.read_gguf_tokenizer(metadata(eot_token_id=0, eom_token_id=2), FILE)
    assert found.eos_ids == (2, 0)


@pytest.mark.model
def test_the_real_models_tokenizer_is_what_facts_about_it_say(smollm2_gguf):
    found = tokenizer_files.read_gguf_tokenizer(read_gguf(smollm2_gguf).metadata, smollm2_gguf)
    assert (len(found.vocab), len(found.ranks), found.add_bos) == (49152, 48900, False)
    assert found.splitting == splitting.NAMED_RULES["smollm"].splitting
    assert (found.bos_id, found.eos_ids, found.pad_id) == (1, (2,), 2)
    special = {token.text: token.index for token in found.added if token.special}
    assert (special["<|im_start|>"], special["<|im_end|>"], special["<|endoftext|>"]) == (1, 2, 0)
    assert found.chat_template.startswith("{% for message in messages %}")


UNSUPPORTED_GGUF = [
    ({"model": "bert"}, "the tokenizer 'bert' is not supported"),
    ({"model": None}, "the tokenizer None is not supported"),
    ({"pre": "mpt"}, "the splitting rule 'mpt' .tokenizer.ggml.pre. is not supported"),
    ({"pre": "default"}, "the splitting rule 'default'"),
    ({"pre": None}, "the splitting rule None"),  # llama.cpp guesses here, and warns that answers will be bad
]


@pytest.mark.parametrize(("changes", "sentence"), UNSUPPORTED_GGUF)
def test_a_gguf_tokenizer_of_another_kind_is_refused_by_name(changes, sentence):
    with pytest.raises(TokenizerError, match=sentence) as caught:
        tokenizer_files.read_gguf_tokenizer(metadata(**changes), FILE)
    assert str(FILE) in str(caught.value)


DAMAGED_GGUF = {
    "no tokens": {"tokens": None},
    "no types": {"token_type": None},
    "no merges": {"merges": None},
    "empty tokens": {"tokens": [], "token_type": np.array([], dtype=np.int32)},
    "fewer types than tokens": {"token_type": np.array([3, 3], dtype=np.int32)},
    "more types than tokens": {"token_type": np.full(1000, 3, dtype=np.int32)},
    "types that are no numbers": {"token_type": ["control"] * len(TOKENS)},
    "types that are infinite": {"token_type": np.full(len(TOKENS), np.inf)},
    "tokens that are numbers": {"tokens": np.arange(len(TOKENS))},
    "tokens that are a list of numbers": {"tokens": list(range(len(TOKENS)))},
    "tokens that are one text": {"tokens": "x" * len(TOKENS)},
    "a control token without text": {"tokens": ["", *TOKENS[1:]]},
    "merges without a space": {"merges": ["th"]},
    "merges of three parts": {"merges": ["t h e"]},
    "merges that are numbers": {"merges": np.arange(3)},
    "a begin token outside the vocabulary": {"bos_token_id": 100_000},
    "a begin token below zero": {"bos_token_id": -1},
    "a merge to a token that is not there": {"merges": ["t 12"]},
    "a begin token to add, and none there": {"bos_token_id": None, "add_bos_token": True},
    "an end token to add, and none there": {"eos_token_id": None, "add_eos_token": True},
    "an end token outside the vocabulary": {"eos_token_id": 100_000},
    "an end token that is text": {"eos_token_id": "end"},
    "an end token that is not finite": {"eos_token_id": float("inf")},
    "end tokens in an array": {"eos_token_id": np.array([1, 2])},
}


@pytest.mark.parametrize("damage", DAMAGED_GGUF)
def test_damaged_gguf_metadata_is_a_tokenizer_error_that_names_the_file(damage):
    with pytest.raises(TokenizerError, match="some.model.gguf: the tokenizer metadata is damaged or incomplete"):
        tokenizer.Tokenizer(tokenizer_files.read_gguf_tokenizer(metadata(**DAMAGED_GGUF[damage]), FILE))


def test_a_template_that_is_no_text_is_a_tokenizer_error():
    with pytest.raises(TokenizerError, match="chat template is a list, not text"):
        tokenizer_files.read_gguf_tokenizer({**metadata(), "tokenizer.chat_template": ["{{ x }}"]}, FILE)


def changed(*path: str, to: object) -> dict:
    result = as_json()
    place = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return result


def split(pattern: dict, behavior: str = "Isolated", invert: bool = False) -> dict:
    step = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [step, as_json(False)["pre_tokenizer"]]}


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
UNSUPPORTED_JSON = [
    (changed("model", "type", to="Unigram"), "a model of type 'Unigram'"),
    (changed("model", "byte_fallback", to=True), "byte_fallback in a byte-level tokenizer"),
    (changed("model", "dropout", to=0.1), "dropout 0.1"),
    (changed("model", "end_of_word_suffix", to="</w>"), "end_of_word_suffix '</w>'"),
    (changed("model", "continuing_subword_prefix", to="##"), "continuing_subword_prefix '##'"),
    (changed("normalizer", to={"type": "Lowercase"}), "normalizer {'type': 'Lowercase'}"),
    (changed("normalizer", to={"type": "Sequence", "normalizers": [SPACES, {"type": "NFC"}]}), "the normalizer"),
    (changed("normalizer", to={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}]}), "Prepend"),
    (changed("normalizer", to=SPACES), "the splitting rule {'type': 'Sequence'"),
    ({**changed("pre_tokenizer", to=None), "normalizer": SPACES}, "the decoder {'type': 'ByteLevel'"),
    (changed("decoder", to=None), "the decoder None"),
    (changed("decoder", to={"type": "WordPiece"}), "the decoder {'type': 'WordPiece'}"),
    (changed("post_processor", to={"type": "BertProcessing"}), "post_processor {'type': 'BertProcessing'}"),
    (changed("pre_tokenizer", to=None), "splitting rule None"),
    (changed("pre_tokenizer", "pretokenizers", to=[]), "splitting rule {'type': 'Sequence', 'pretokenizers': []}"),
    (changed("pre_tokenizer", to=METASPACE), "the decoder {'type': 'ByteLevel'"),
    (changed("pre_tokenizer", to={**METASPACE, "replacement": "_"}), "splitting rule {'type': 'Metaspace'"),
    (changed("pre_tokenizer", "pretokenizers", to=[{"type": "Whitespace"}, {"type": "ByteLevel"}]), "splitting rule"),
    (changed("pre_tokenizer", "pretokenizers", to=as_json()["pre_tokenizer"]["pretokenizers"][::-1]), "splitting rule"),
    (changed("pre_tokenizer", to=split({"Regex": r"\\w+"})), r"{'Regex': '\\\\w+'}"),
    (changed("pre_tokenizer", to=split({"String": " "})), "{'String': ' '}"),
    (changed("pre_tokenizer", to=split({"Regex": r"\\p{N}"}, behavior="Removed")), "'Removed'"),
    (changed("pre_tokenizer", to=split({"Regex": r"\\p{N}"}, invert=True)), "'invert': True"),
    (changed("pre_tokenizer", to={**as_json(False)["pre_tokenizer"], "add_prefix_space": True}), "splitting rule"),
]


@pytest.mark.parametrize(("content", "sentence"), UNSUPPORTED_JSON)
def test_a_json_tokenizer_of_another_kind_is_refused_by_name(tmp_path, content, sentence):
    with pytest.raises(TokenizerError, match="is not supported") as caught:
        tokenizer_files.read_json_tokenizer(folder_of(tmp_path, content))
    assert sentence in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


DAMAGED_JSON = {
    "a list": [],
    "a number": 3,
    "no model": {},
    "no vocabulary": changed("model", "vocab", to=None),
    "an empty vocabulary": {**changed("model", "vocab", to={}), "added_tokens": []},
    "ids that are text": changed("model", "vocab", to={"a": "b"}),
    "ids that are infinite": changed("model", "vocab", to={"a": 1e400}),
    "ids below zero": changed("model", "vocab", to={"a": -1}),
    "merges that are numbers": changed("model", "merges", to=[1, 2]),
    "merges of pairs of numbers": changed("model", "merges", to=[[1, 2]]),
    "merges of three": changed("model", "merges", to=[["a", "b", "c"]]),
    "added tokens without an id": changed("added_tokens", to=[{"content": "x"}]),
    "added tokens without text": changed("added_tokens", to=[{"content": "", "id": 1}]),
    "added tokens whose text is a number": changed("added_tokens", to=[{"content": 5, "id": 1}]),
    "a merge to a token that is not there": changed("model", "merges", to=[["t", "12"]]),
    "an unknown token that is not there": changed("model", "unk_token", to="<nowhere>"),
    "steps that are no objects": changed("pre_tokenizer", "pretokenizers", to=[1, 2]),
    "a post-processor that is a number": changed("post_processor", to=7),
}


@pytest.mark.parametrize("damage", DAMAGED_JSON)
def test_a_damaged_tokenizer_json_is_a_tokenizer_error_that_names_the_file(tmp_path, damage):
    with pytest.raises(TokenizerError, match="tokenizer.json: the tokenizer is damaged or incomplete"):
        tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(folder_of(tmp_path, DAMAGED_JSON[damage])))


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": ', b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}'])
def test_what_is_no_json_is_a_tokenizer_error(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(TokenizerError, match="damaged or incomplete"):
        tokenizer_files.read_json_tokenizer(file)
    with pytest.raises(TokenizerError, match="damaged or incomplete"):
        tokenizer_files.read_json_tokenizer(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "config", [[], 5, {"chat_template": 5}, {"chat_template": [{"name": "other"}]}, {"bos_token": []}]
)
def test_a_damaged_config_beside_it_is_a_tokenizer_error(tmp_path, config):
    with pytest.raises(TokenizerError, match="damaged or incomplete"):
        tokenizer_files.read_json_tokenizer(folder_of(tmp_path, as_json(), config))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths to all values in a JSON tree, long lists and tables by their first entries."""
    found = [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(inside)[:8]:
        found += places(inner, (*path, key))
    return found


PLACES = places(as_json())[1:]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.sampled_from(PLACES), junk=JUNK)
def test_junk_anywhere_in_a_tokenizer_json_is_read_or_refused_with_our_own_error(tmp_path, place, junk):
    content = copy.deepcopy(as_json())
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = junk
    try:
        own = tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(folder_of(tmp_path, content)))
        own.decode(own.encode(TEXT, special=True))
        own.render_chat([{"role": "user", "content": TEXT}])
        own.config()
    except TokenizerError:
        pass


@given(
    kind=st.sampled_from(["gpt2", "llama"]),
    field=st.sampled_from(
        ["tokens", "token_type", "scores", "unknown_token_id", "merges", "bos_token_id", "eos_token_id", "eot_token_id"]
    ),
    junk=JUNK,
)
def test_junk_in_gguf_metadata_is_read_or_refused_with_our_own_error(kind, field, junk):
    try:
        own = tokenizer.Tokenizer(
            tokenizer_files.read_gguf_tokenizer(
                metadata(**{"model": kind, "scores": np.arange(len(TOKENS)), field: junk}), FILE
            )
        )
        own.decode(own.encode(TEXT, special=True))
        own.render_chat([{"role": "user", "content": TEXT}])
        own.config()
    except TokenizerError:
        pass
