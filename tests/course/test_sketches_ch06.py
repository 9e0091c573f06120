"""Chapter 6's sketches: the loop that guesses ahead, and the count of what makes a GPU wait."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import kv_cache, optimization
from llmfromscratch.course.sketches import ch06


def lookup(ids):
    return optimization.lookup_draft(ids, longest=3, count=6)


@pytest.mark.parametrize("kind", [kind for kind in tiny_models.CACHES if kind != "none"])
@pytest.mark.parametrize("propose", [lookup, lambda ids: [], lambda ids: ids[-3:], lambda ids: [1] * 9])
def test_the_answer_is_the_plain_one_over_every_cache_and_with_any_drafts(kind, propose):
    network, prompt = tiny_models.tiny_model(), tiny_models.random_ids(7)
    plain = ch06.plain_answer(network, tiny_models.new_cache(kind, network), prompt, 20)
    cache = tiny_models.new_cache(kind, network)
    answer, gained = ch06.speculative_answer(network, cache, prompt, 20, propose)
    assert answer == plain and sum(gained) == 20
    assert cache.length(0) == 7 + 20 - 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 12), st.data())
def test_whatever_is_proposed_the_answer_has_just_so_many_tokens(count, length, data):
    network = tiny_models.tiny_model()
    drafts = st.lists(st.integers(0, tiny_models.VOCAB - 1), max_size=5)
    answer, gained = ch06.speculative_answer(
        network, kv_cache.ConcatKVCache(3), tiny_models.random_ids(length), count, lambda ids: data.draw(drafts)
    )
    assert len(answer) == count == sum(gained)
    assert all(one >= 1 for one in gained)


def test_right_drafts_save_passes():
    network, prompt = tiny_models.tiny_model(), tiny_models.random_ids(5)
    plain = ch06.plain_answer(network, kv_cache.ConcatKVCache(3), prompt, 16)
    _, gained = ch06.speculative_answer(
        network, kv_cache.ConcatKVCache(3), prompt, 16, lambda ids: plain[len(ids) - 5 :][:3]
    )
    assert gained == [4, 4, 4, 4]


@pytest.mark.model
def test_the_real_model_copies_in_fewer_passes_and_says_the_same(smollm2_fp32):
    text = "The copper kettle stands beside the blue lantern. The garden chair stands beside the copper kettle."
    prompt = smollm2_fp32.chat_prompt([{"role": "user", "content": f"Copy this text exactly:\n{text}"}])
    network, layers = smollm2_fp32.model, smollm2_fp32.config.num_layers
    plain = ch06.plain_answer(network, kv_cache.ConcatKVCache(layers), prompt, 20)
    answer, gained = ch06.speculative_answer(network, kv_cache.ConcatKVCache(layers), prompt, 20, lookup)
    assert answer == plain
    assert smollm2_fp32.tokenizer.decode(answer).startswith(text[:60])
    assert len(gained) < 10


X = torch.tensor([1.0, 2.0, -3.0])


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (lambda: X.max().item(), "_local_scalar_dense"),
        (lambda: float(X[0]), "_local_scalar_dense"),
        (lambda: 1 if X.sum() > 0 else 2, "_local_scalar_dense"),
        (lambda: bool((X > 1).any()), "_local_scalar_dense"),
        (lambda: X[torch.tensor(1)], "_local_scalar_dense"),
        (lambda: X.tolist(), "tolist"),
        (lambda: X.numpy(), "numpy"),
        (lambda: X.cpu(), "cpu"),
        (lambda: X[X > 1], "index by a mask"),
        (lambda: X.nonzero(), "nonzero"),
        (lambda: torch.equal(X, X), "equal"),
        (lambda: torch.masked_select(X, X > 1), "masked_select"),
    ],
)
def test_what_hands_a_number_to_python_is_counted(look, name):
    with ch06.counted_waits() as waits:
        look()
    assert waits.by_name == {name: 1}
    assert waits.total == 1


def test_what_stays_in_the_queue_is_not_counted():
    with ch06.counted_waits() as waits:
        y = torch.where(X > 1, X, 0.0).clamp(-1, 1).masked_fill(X < 0, 5.0)
        y = torch.maximum(y, X.max()) @ X
        assert y.shape == () and len(X) == 3 and X[0:2].shape == (2,) and X[torch.tensor([0, 1])].dim() == 1
    assert waits.total == 0
    X.sum().item()
    assert waits.total == 0
