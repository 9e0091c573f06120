"""Where drafts come from: the text, the model without layers, a second model; and what each says of bad arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCAB, all_logits, random_ids, tiny_model

from llmfromscratch import SamplingParams, drafters, kv_cache, layer_skipping, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.drafters import DraftModel, LayerSkip, Lookup
from llmfromscratch.errors import RequestError
from llmfromscratch.scheduler import Request

NETWORK = tiny_model()
LLM = SimpleNamespace(model=NETWORK, config=NETWORK.config, tokenizer=None)


def request(number: int, prompt: list[int], said: list[int] | None = None, **params) -> Request:
    one = Request(number, prompt, SamplingParams(**params))
    one.token_ids = list(said or [])
    return one


def attached(drafter, llm=LLM):
    drafter.attach(llm)
    return drafter


def greedy(network, ids: list[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(int(all_logits(network, text)[-1].argmax()))
    return text[len(ids) :]


def drafted(drafter, *pairs) -> list[list[int]]:
    requests, counts = zip(*pairs, strict=True)
    return [list(draft.token_ids) for draft in drafter.propose(requests, counts)]


# ---- lookup --------------------------------------------------------------------------------------------------------


def test_lookup_finds_in_prompt_and_answer_what_followed_the_last_time():
    texts = request(0, [5, 6, 7, 8], [9, 5, 6]), request(1, [1, 2, 3]), request(2, [4, 4, 7, 4])
    assert drafted(Lookup(), *((one, 2) for one in texts)) == [[7, 8], [], [7, 4]]


@pytest.mark.parametrize("settings", [{"longest": 0}, {"tokens": 0}, {"longest": True}, {"tokens": 2.5}])
def test_lookup_refuses_counts_that_are_none(settings):
    with pytest.raises(RequestError, match="must be a whole number of at least 1"):
        Lookup(**settings)


# ---- models that draft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipped, kept", [(None, [0, 2]), (1, [0, 2]), (2, [2]), ([0], [1, 2]), ((2, 1), [0])])
def test_what_is_left_of_the_model_drafts_its_own_greedy_tokens(skipped, kept):
    smaller = layer_skipping.skip_layers(NETWORK, kept)
    drafter = attached(LayerSkip(skipped))
    one, other = request(0, random_ids(9)), request(1, random_ids(4, 1), random_ids(3, 2))
    assert drafted(drafter, (one, 4), (other, 2)) == [greedy(smaller, one.ids, 4), greedy(smaller, other.ids, 2)]
    assert drafter.cost == pytest.approx(len(kept) / 3)


def test_a_drafting_model_follows_the_text_whatever_became_of_its_drafts():
    smaller = layer_skipping.skip_layers(NETWORK, [0, 2])
    drafter, one = attached(LayerSkip()), request(0, random_ids(9))
    for said in ([], [3], [3, 4, 5], [3, 4, 5, *greedy(smaller, [*one.ids, 3, 4, 5], 3)], [7], [7, 8]):
        one.token_ids = list(said)
        assert drafted(drafter, (one, 3)) == [greedy(smaller, one.ids, 3)]
        drafter._drafting.cache.audit()
    drafter.forget(0)
    assert drafter._drafting.cache.block_tables == {}
    drafter.forget(0)


def test_a_drafting_model_computes_what_it_has_not_seen_and_no_more(monkeypatch):
    fed: list[int] = []
    drafter, one = attached(LayerSkip()), request(0, random_ids(9))
    network = drafter._drafting.network
    drafter._drafting.network = lambda batch, cache: fed.append(len(batch.token_ids)) or network(batch, cache)
    drafter._drafting.network.config = NETWORK.config
    drafts = drafted(drafter, (one, 3))[0]
    one.token_ids = [drafts[0], (drafts[1] + 1) % VOCAB]  # the first stood, the second did not
    drafted(drafter, (one, 2))
    assert fed == [9, 1, 1, 1, 1]


def test_a_drafting_model_reads_long_prompts_in_chunks(monkeypatch):
    monkeypatch.setattr(drafters, "_CHUNK", 4)
    smaller, one = layer_skipping.skip_layers(NETWORK, [0, 2]), request(0, random_ids(19))
    assert drafted(attached(LayerSkip()), (one, 2)) == [greedy(smaller, one.ids, 2)]


def test_who_was_not_drafted_for_the_longest_makes_room_and_nobody_of_the_same_step(monkeypatch):
    monkeypatch.setattr(drafters, "_CONTEXTS", 1)  # 96 tokens
    smaller, drafter = layer_skipping.skip_layers(NETWORK, [0, 2]), attached(LayerSkip())
    first, second, third = (request(number, random_ids(40, number)) for number in range(3))
    for one in (first, second, third, first):
        assert drafted(drafter, (one, 2)) == [greedy(smaller, one.ids, 2)]
    assert set(drafter._drafting.cache.block_tables) == {0, 2}
    # two of 48 fill the cache, one is left out
    assert sorted(len(draft) for draft in drafted(drafter, (first, 3), (second, 3), (third, 3))) == [0, 3, 3]


def test_nothing_is_drafted_beyond_the_context():
    assert drafted(attached(LayerSkip()), (request(0, random_ids(94)), 2), (request(1, random_ids(95)), 2))[1] == []


def test_a_drawn_draft_brings_the_distribution_that_it_was_drawn_from():
    smaller = layer_skipping.skip_layers(NETWORK, [0, 2])
    one = request(0, random_ids(9), temperature=0.9, top_k=5, seed=3)
    (draft,) = attached(LayerSkip()).propose([one], [3])
    cache = kv_cache.ConcatKVCache(2)
    logits = smaller(Batch.of([(0, [*one.ids, *draft.token_ids[:2]], 0)], logits_at=[range(8, 11)]), cache)
    row = sampling.Row(one.params, sampling.random_stream(0), one.ids)
    expected = sampling.distribution(logits.float(), [row] * 3)
    torch.testing.assert_close(draft.probabilities, expected)
    assert all(float(draft.probabilities[place, token]) > 0 for place, token in enumerate(draft.token_ids))
    again = attached(LayerSkip()).propose([one], [3])[0]
    assert again.token_ids == draft.token_ids  # by its seed


def test_drafts_are_not_drawn_with_the_requests_own_random_numbers():
    # with the same numbers a draft would be what the model draws, or not, for the wrong reason
    params = SamplingParams(temperature=1.0, seed=3)
    drafter = attached(LayerSkip())
    drafter.propose([Request(0, [4], params)], [1])
    stream = sampling.random_stream(drafter._drafting._rows[0].stream.initial_seed())
    assert sampling.uniforms([stream]) != sampling.uniforms([sampling.random_stream(3)])


@pytest.mark.parametrize("skipped", [[3], [-1], 0.5, [0, 1, 2], 3])
def test_layers_that_cannot_be_skipped_are_refused(skipped):
    with pytest.raises(RequestError, match="layers|skipped"):
        attached(LayerSkip(skipped))


def test_a_drafter_without_a_model_says_what_to_do():
    with pytest.raises(RequestError, match=r"give it to LLM\(speculative=...\)"):
        LayerSkip().propose([request(0, [1])], [1])


# ---- a second model ------------------------------------------------------------------------------------------------


def test_a_second_model_drafts_its_own_tokens_and_leaves_its_own_cache_alone():
    small = tiny_model(seed=5, num_hidden_layers=1)
    other = SimpleNamespace(model=small, config=small.config, tokenizer=None)
    drafter, one = attached(DraftModel(other)), request(0, random_ids(6))
    assert drafted(drafter, (one, 3)) == [greedy(small, one.ids, 3)]
    assert 0 < drafter.cost < 1


def test_a_second_model_with_other_tokens_is_refused():
    small = tiny_model(vocab_size=50)
    other = SimpleNamespace(model=small, config=small.config, tokenizer=None)
    with pytest.raises(RequestError, match="a vocabulary of 50 tokens, the model one of 97"):
        attached(DraftModel(other))

    class Says(dict):
        def token_bytes(self, index):
            return self[index]

    llm = SimpleNamespace(model=NETWORK, config=NETWORK.config, tokenizer=Says({0: b"a", 1: b"b"}))
    same, swapped = ({0: b"a", 1: b"b"}, {0: b"b", 1: b"a"})
    attached(DraftModel(SimpleNamespace(model=NETWORK, config=NETWORK.config, tokenizer=Says(same))), llm)
    with pytest.raises(RequestError, match="say something else"):
        attached(DraftModel(SimpleNamespace(model=NETWORK, config=NETWORK.config, tokenizer=Says(swapped))), llm)


# ---- what LLM takes ------------------------------------------------------------------------------------------------


def test_every_way_to_ask_for_drafts_gives_a_drafter():
    small = tiny_model(seed=5, num_hidden_layers=1)
    other = SimpleNamespace(model=small, config=small.config, tokenizer=None)
    own = Lookup(2)
    for choice in (None, "lookup", "skip", other, own):
        drafters.check(choice, None)
    kinds = [type(drafters.of(choice, LLM)) for choice in (None, "lookup", "skip", other)]
    assert kinds == [type(None), Lookup, LayerSkip, DraftModel]
    assert drafters.of(own, LLM) is own


@pytest.mark.parametrize("choice", ["medusa", 3, True, object(), Lookup])
def test_what_cannot_draft_is_refused_by_name(choice):
    with pytest.raises(RequestError, match="speculative is|propose"):
        drafters.check(choice, None)


def test_drafts_and_a_sampler_of_ones_own_contradict_each_other():
    class Own(sampling.Sampler):
        pass

    drafters.check("lookup", sampling.Sampler())
    drafters.check(None, Own())
    with pytest.raises(RequestError, match="sampler is a Own; leave one of the two out"):
        drafters.check("lookup", Own())
