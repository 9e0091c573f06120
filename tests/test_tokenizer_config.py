"""Prompts cut and padded by the config alone: what is kept, what is refused, and that padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import tokenizers
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from llmfromscratch import tokenizer
from llmfromscratch.errors import RequestError
from llmfromscratch.text.tokenizer_data import TokenizerData

SIDES = ("left", "right")
IDS = st.lists(st.integers(0, 96), max_size=30)


def config(**fields: Any) -> tokenizer.TokenizerConfig:
    return tokenizer.TokenizerConfig(**fields)


# ---- the config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_length": 0}, "max_length is 0; it must be a whole number of at least 1"),
        ({"max_length": 10.0}, "max_length is 10.0"),
        ({"max_length": True}, "max_length is True"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0"),
        ({"pad_to_multiple_of": None}, "pad_to_multiple_of is None"),
        ({"pad_id": -1}, "pad_id is -1; it must be a whole number of at least 0"),
        ({"bos_id": "<s>"}, "bos_id is '<s>'"),
        ({"truncation": "top"}, "truncation is 'top'; choose one of None, 'left', 'right', 'middle', 'chat'"),
        ({"truncation": ["left"]}, "truncation is"),
        ({"padding_side": None}, "padding_side is None; choose one of 'left', 'right'"),
        ({"eos_ids": 2}, "eos_ids is 2"),
        ({"eos_ids": "12"}, "eos_ids is '12'"),
        ({"eos_ids": (2, -5)}, "eos_ids is"),
        ({"add_bos": True}, "add_bos is True and bos_id None"),
        ({"add_bos": 1, "bos_id": 1}, "add_bos is 1"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(RequestError) as refused:
        config(**fields)
    assert sentence in str(refused.value)


def test_several_end_tokens_are_kept_in_order_and_configs_can_be_compared():
    assert config(eos_ids=[2, 5]).eos_ids == (2, 5)
    assert config(eos_ids=[2, 5]) == config(eos_ids=(2, 5))
    assert len({config(pad_id=0), config(pad_id=0)}) == 1


def model_of(**fields: Any) -> tokenizer.Tokenizer:
    """A tokenizer of ten tokens, the special ones where the test puts them."""
    return tokenizer.Tokenizer(TokenizerData({chr(65 + index): index for index in range(10)}, {}, **fields))


def test_the_model_changes_the_config_and_the_code_stays():
    first = model_of(bos_id=1, eos_ids=(2, 5), pad_id=0, add_bos=True)
    second = model_of(bos_id=3, eos_ids=(4,))
    assert first.config() == config(bos_id=1, eos_ids=(2, 5), pad_id=0, add_bos=True)
    assert second.config() == config(bos_id=3, eos_ids=(4,), add_bos=False)
    assert model_of().config() == config()
    cut = [
        tokenizer.truncate(one.encode("ABCD"), one.config(max_length=3, truncation="left")) for one in (first, second)
    ]
    assert cut == [[1, 2, 3], [1, 2, 3]]
    assert tokenizer.truncate(first.encode("DEFG"), first.config(max_length=3, truncation="left")) == [1, 5, 6]
    assert tokenizer.pad([[7], [7, 8]], first.config())[0].tolist() == [[0, 7], [7, 8]]
    with pytest.raises(RequestError, match="pad_id is None"):
        tokenizer.pad([[7], [7, 8]], second.config())
    assert tokenizer.pad([[7], [7, 8]], second.config(pad_id=4))[0].tolist() == [[4, 7], [7, 8]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_len": 5}, "a TokenizerConfig has no max_len; it has max_length, truncation, padding_side,"),
        ({"b": 1, "a": 2, "pad_id": 3}, "has no a, b; it has"),
        ({"max_length": -1}, "max_length is -1"),
        ({"truncation": "chat"}, "truncation is 'chat', but this model has no chat template"),
    ],
)
def test_a_change_that_is_no_field_or_cannot_be_meant_is_refused(changes, sentence):
    with pytest.raises(RequestError) as refused:
        model_of().config(**changes)
    assert sentence in str(refused.value)
    assert model_of(chat_template="x").config(truncation="chat").truncation == "chat"


def test_within_a_context_a_prompt_leaves_room_for_one_new_token():
    assert config().within(96) == config(max_length=95)
    assert config(max_length=95, pad_id=1).within(96) == config(max_length=95, pad_id=1)
    assert config(max_length=1).within(96).max_length == 1
    with pytest.raises(RequestError, match="max_length is 96; the context leaves 95 tokens to a prompt"):
        config(max_length=96).within(96)


# ---- truncation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [
        ("right", 3, [1, 7, 8]),
        ("left", 3, [8, 9, 10]),
        ("middle", 3, [1, 9, 10]),
        ("middle", 4, [1, 7, 9, 10]),
        ("right", 1, [1]),
        ("left", 1, [10]),
        ("middle", 1, [10]),
    ],
)
def test_each_truncation_keeps_what_it_says(side, limit, kept):
    assert tokenizer.truncate([1, 7, 8, 9, 10], config(max_length=limit, truncation=side)) == kept


@given(ids=IDS, limit=st.integers(1, 20), side=st.sampled_from(["left", "right", "middle"]))
@example(ids=[1, 2, 3], limit=1, side="left")
def test_a_cut_prompt_is_as_long_as_may_be_and_made_of_its_two_ends(ids, limit, side):
    kept = tokenizer.truncate(ids, config(max_length=limit, truncation=side))
    assert len(kept) == min(len(ids), limit)
    assert kept in [ids[:first] + ids[len(ids) - len(kept) + first :] for first in range(len(kept) + 1)]


@given(ids=IDS, limit=st.integers(1, 20), side=st.sampled_from(SIDES))
def test_left_and_right_cut_like_transformers(ids, limit, side):
    letters = {f"t{index}": index for index in range(97)}
    words = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="t0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    other = PreTrainedTokenizerFast(tokenizer_object=words, truncation_side=side)
    text = " ".join(f"t{index}" for index in ids)
    expected = other(text, truncation=True, max_length=limit).input_ids
    assert tokenizer.truncate(ids, config(max_length=limit, truncation=side)) == expected


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_begin_token_stays_in_front_where_the_model_wants_one(side, limit):
    wanted = config(max_length=limit, truncation=side, bos_id=1, add_bos=True)
    cut = tokenizer.truncate([1, 7, 8, 9, 10], wanted)
    assert cut[0] == 1
    assert len(cut) == limit
    assert tokenizer.truncate([5, 7, 8, 9], config(max_length=2, truncation="left", bos_id=1, add_bos=True)) == [8, 9]
    assert tokenizer.truncate([1, 7, 8, 9], config(max_length=2, truncation="left", bos_id=1)) == [8, 9]


@pytest.mark.parametrize("truncation", [None, "chat"])
def test_a_prompt_too_long_is_refused_with_both_lengths(truncation):
    with pytest.raises(RequestError, match="the prompt has 5 tokens and the limit is 4"):
        tokenizer.truncate([1, 2, 3, 4, 5], config(max_length=4, truncation=truncation))
    assert tokenizer.truncate((1, 2, 3, 4), config(max_length=4, truncation=truncation)) == [1, 2, 3, 4]


def test_what_was_cut_is_the_callers_to_change():
    ids = [1, 2, 3]
    tokenizer.truncate(ids, config()).append(4)
    assert ids == [1, 2, 3]


# ---- chats -------------------------------------------------------------------------------------------------------


def message(text: str) -> dict[str, str]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
    return {"role": roles[text[0]], "content": text}


def shortened(chat: str, limit: int | None, truncation: str | None = "chat") -> str:
    """Each word of a chat is a message of ten tokens."""
    messages = [message(text) for text in chat.split()]
    wanted = config(max_length=limit, truncation=truncation)
    kept = tokenizer.truncate_chat(messages, lambda some: 10 * len(some), wanted)
    return " ".join(one["content"] for one in kept)


@pytest.mark.parametrize(
    ("chat", "limit", "kept"),
    [
        ("s u1 a1 u2 a2 u3", 60, "s u1 a1 u2 a2 u3"),
        ("s u1 a1 u2 a2 u3", 59, "s u2 a2 u3"),
        ("s u1 a1 u2 a2 u3", 40, "s u2 a2 u3"),
        ("s u1 a1 u2 a2 u3", 39, "s u3"),
        ("s u1 a1 u2 a2 u3", 20, "s u3"),
        ("u1 a1 u2", 20, "u2"),
        ("s u1 a1 t1 a1b u2", 50, "s u2"),
        ("s a0 u1 a1 u2", 40, "s u1 a1 u2"),  # an assistant's greeting goes first
        ("s u1 a1 s2 u2 a2 u3", 50, "s s2 u2 a2 u3"),  # instructions in between stay
        ("d u1 a1 u2", 30, "d u2"),
        ("s u1 u2 u3", 30, "s u2 u3"),
        ("s u1 a1", 30, "s u1 a1"),
        ("", 5, ""),
    ],
)
def test_the_oldest_turns_go_whole_and_the_system_message_stays(chat, limit, kept):
    assert shortened(chat, limit) == kept


@pytest.mark.parametrize(("chat", "length"), [("s u1 a1 u2", 20), ("s u1 a1 u2 a2 t2", 40), ("s s2", 20), ("u1", 10)])
def test_a_newest_turn_that_does_not_fit_is_refused_with_both_lengths(chat, length):
    with pytest.raises(RequestError, match=f"have {length} tokens and the limit is {length - 1}"):
        shortened(chat, length - 1)


@pytest.mark.parametrize("truncation", [None, "left", "right", "middle"])
def test_another_truncation_leaves_the_messages_to_be_cut_as_ids(truncation):
    assert shortened("s u1 a1 u2", 5, truncation) == "s u1 a1 u2"
    assert shortened("s u1 a1 u2", None) == "s u1 a1 u2"


@given(st.lists(st.tuples(st.sampled_from("suat"), st.integers(1, 9)), max_size=25), st.integers(1, 60))
def test_no_more_turns_are_dropped_than_must_be(chat, limit):
    messages = [{**message(role), "tokens": tokens} for role, tokens in chat]

    def length(some):
        return sum(one["tokens"] for one in some)

    def dropping(turns: int) -> list[dict]:
        starts = [i for i, one in enumerate(messages) if one["role"] == "user"]
        start = [0, *starts][turns]
        return [one for i, one in enumerate(messages) if one["role"] == "system" or i >= start]

    turns = sum(role == "u" for role, _ in chat)
    fitting = [some for n in range(turns + 1) if length(some := dropping(n)) <= limit]
    wanted = config(max_length=limit, truncation="chat")
    if fitting:
        assert tokenizer.truncate_chat(messages, length, wanted) == fitting[0]
    else:
        with pytest.raises(RequestError, match=f"the limit is {limit}"):
            tokenizer.truncate_chat(messages, length, wanted)


def test_a_chat_of_many_turns_is_counted_a_few_times_only():
    messages, asked = [message("s"), *[message("u"), message("a")] * 5000], []

    def length(some):
        asked.append(len(some))
        return len(some)

    kept = tokenizer.truncate_chat(messages, length, config(max_length=100, truncation="chat"))
    assert len(kept) == 99
    assert len(asked) < 20


# ---- padding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("right", [[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("left", [[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_rows_are_filled_on_the_side_that_was_chosen(side, ids, mask):
    found = tokenizer.pad([[5, 6, 7], [8]], config(pad_id=0, padding_side=side))
    assert [part.tolist() for part in found] == [ids, mask]
    assert all(part.dtype == torch.int64 for part in found)


@given(
    rows=st.lists(IDS, min_size=1, max_size=5),
    multiple=st.sampled_from([1, 2, 3, 8]),
    side=st.sampled_from(SIDES),
    pad_id=st.integers(0, 96),
)
def test_ids_and_mask_are_those_of_transformers(rows, multiple, side, pad_id):
    words = tokenizers.Tokenizer(models.WordLevel({f"t{index}": index for index in range(97)}, unk_token="t0"))
    other = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{pad_id}", padding_side=side)
    expected = other.pad({"input_ids": rows}, pad_to_multiple_of=multiple if multiple > 1 else None)
    ids, mask = tokenizer.pad(rows, config(pad_id=pad_id, padding_side=side, pad_to_multiple_of=multiple))
    assert ids.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["attention_mask"]


def test_a_row_that_looks_like_padding_is_real_all_the_same():
    ids, mask = tokenizer.pad([[0, 0], [0, 5, 0]], config(pad_id=0))
    assert ids.tolist() == [[0, 0, 0], [0, 5, 0]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_without_a_padding_id_only_what_needs_none_is_padded():
    assert tokenizer.pad([[1, 2], [3, 4]], config())[0].tolist() == [[1, 2], [3, 4]]
    for rows, multiple in (([[1, 2], [3]], 1), ([[1, 2], [3, 4]], 4)):
        with pytest.raises(RequestError, match="pad_id is None"):
            tokenizer.pad(rows, config(pad_to_multiple_of=multiple))


def test_no_rows_make_an_empty_batch():
    ids, mask = tokenizer.pad([], config(pad_id=0))
    assert ids.shape == mask.shape == (0, 0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "shape", ["llama, 9 heads on 3, tied, other rope base and epsilon", "qwen2, biases on q, k and v"]
)
@torch.no_grad()
def test_padding_changes_no_logit_of_a_real_token(shape, multiple, side):
    network = tiny_models.transformers_model(shape).double()
    own = tiny_models.ours(network, torch.float64)  # takes ragged batches: no padding anywhere
    rows = [tiny_models.random_ids(length, seed=length) for length in (11, 1, 4, 7)]
    ids, mask = tokenizer.pad(rows, config(pad_id=3, padding_side=side, pad_to_multiple_of=multiple))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = network(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    unmasked = network(input_ids=ids, position_ids=positions).logits
    for row, real in enumerate(rows):
        found = padded[row][mask[row].bool()]
        torch.testing.assert_close(found, network(torch.tensor([real])).logits[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(found, tiny_models.all_logits(own, real), rtol=0, atol=1e-5)
        if side == "left" and len(real) < ids.shape[1]:  # the test can fail: without the mask padding is seen
            assert (unmasked[row][mask[row].bool()] - found).abs().max() > 1e-3
