"""Medusa heads: they learn what the model says, guess nothing that changes an answer, and come back from a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import random_ids, save_tiny
from torch.nn import functional as F

from llmfromscratch import LLM, SamplingParams, medusa
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.scheduler import Request

PROMPTS = [random_ids(length, length) for length in (3, 5, 8, 13)]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float64", device="cpu")


@pytest.fixture(scope="module")
def heads(llm):
    return medusa.train(llm, PROMPTS, heads=3, steps=500, tokens=24, rows=64, learning_rate=1e-2)


def fresh(vocabulary=(0, 1, 2, 5), count=2, hidden=36, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = 0.3 * torch.randn(count, hidden, hidden, generator=generator)
    return medusa.Heads(weight, 0.3 * torch.randn(count, hidden, generator=generator), torch.tensor(vocabulary))


def drafting(folder, heads, **settings):
    llm = LLM(folder, dtype="float64", device="cpu", speculative=medusa.Medusa(heads), **settings)
    llm.core.speculation.row_cost = 0.0  # drafts wherever they may be
    return llm


def test_a_head_is_a_residual_block_of_its_own():
    heads, hidden = fresh(), torch.randn(5, 36, generator=torch.Generator().manual_seed(1))
    for index in range(2):
        expected = hidden + F.silu(F.linear(hidden, heads.weight[index], heads.bias[index]))
        torch.testing.assert_close(heads(hidden)[:, index], expected)
    assert heads(hidden, 1).shape == (5, 1, 36)
    untrained = medusa.Heads(torch.zeros(2, 36, 36), torch.zeros(2, 36), torch.tensor([0]))
    torch.testing.assert_close(untrained(hidden), hidden.unsqueeze(1).expand(5, 2, 36))


def test_examples_are_the_states_that_gave_the_answer_and_what_came_after(llm):
    hidden, targets = medusa._examples(llm, PROMPTS[:2], 2, 9)
    answers = [answer.token_ids for answer in llm.generate(PROMPTS[:2], SamplingParams(max_tokens=9))]
    gave = (hidden.double() @ llm.model.lm_head.weight.T).argmax(dim=-1).tolist()
    assert gave == [token for ids in answers for token in ids]
    expected = [[ids[at + ahead] if at + ahead < len(ids) else -100 for ahead in (1, 2)]
                for ids in answers for at in range(len(ids))]  # fmt: skip
    assert targets.tolist() == expected


def test_the_losses_are_those_of_the_definition():
    heads, generator = fresh(), torch.Generator().manual_seed(2)
    head, hidden = torch.randn(4, 36, generator=generator), torch.randn(3, 36, generator=generator)
    targets = torch.tensor([[0, 1], [3, -100], [2, -100]])
    losses = medusa.heads_losses(heads, head, hidden, targets)
    for index in range(2):
        chances = torch.softmax((hidden + F.silu(hidden @ heads.weight[index].T + heads.bias[index])) @ head.T, dim=-1)
        known = [row for row in range(3) if targets[row, index] >= 0]
        expected = -sum(chances[row, targets[row, index]].log() for row in known) / len(known)
        torch.testing.assert_close(losses[index], expected)


def test_training_teaches_what_the_model_says(llm, heads):
    hidden, targets = medusa._examples(llm, PROMPTS, 3, 24)
    drafter = medusa.Medusa(heads)
    drafter.attach(llm)
    requests = [Request(number, [1], LONG) for number in range(len(hidden))]
    drafter.observe([request.request_id for request in requests], hidden)
    drafts = drafter.propose(requests, [3] * len(requests))
    for ahead in range(3):
        known = [row for row in range(len(hidden)) if targets[row, ahead] >= 0]
        right = sum(drafts[row].token_ids[ahead] == int(targets[row, ahead]) for row in known)
        assert right / len(known) > 0.9, f"head {ahead + 1} knows {right} of {len(known)}"
    as_they_began = torch.zeros_like(heads.weight), torch.zeros_like(heads.bias), heads.vocabulary
    untrained = medusa.Medusa(medusa.Heads(*as_they_began))
    untrained.attach(llm)
    untrained.observe([0], hidden[:1])
    assert drafter.propose(requests[:1], [3]) != untrained.propose(requests[:1], [3])


def test_the_same_seed_gives_the_same_heads_and_the_model_is_left_alone(llm):
    before = [weight.clone() for weight in llm.model.parameters()]
    small = {"heads": 2, "steps": 3, "tokens": 6, "rows": 8}
    one, two, other = (medusa.train(llm, PROMPTS[:2], **small, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)
    assert not torch.equal(one.weight, other.weight)
    assert not any(weight.requires_grad for weight in one.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, llm.model.parameters(), strict=True))


@pytest.mark.parametrize("seed", [None, 7])
def test_answers_are_the_same_with_heads_and_right_ones_are_accepted(folder, llm, heads, seed):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0 if seed is None else 0.7, seed=seed)
    fast = drafting(folder, heads)
    plain = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
    assert [answer.token_ids for answer in fast.generate(PROMPTS, params)] == plain
    assert fast.metrics.drafted > 0
    assert seed or fast.metrics.accepted > 0.7 * fast.metrics.drafted
    assert fast.core.speculation.drafter._hidden == {}  # forgotten with the requests


def test_wrong_heads_change_nothing_but_the_speed(folder, llm):
    fast = drafting(folder, fresh(vocabulary=(7, 11)))
    plain = [answer.token_ids for answer in llm.generate(PROMPTS, LONG)]
    assert [answer.token_ids for answer in fast.generate(PROMPTS, LONG)] == plain
    assert fast.metrics.drafted > 0


def test_drafts_are_the_vocabularys_and_no_more_than_asked_for(llm):
    heads = fresh(vocabulary=(9, 40, 77), count=3)
    drafter = medusa.Medusa(heads)
    drafter.attach(llm)
    hidden = torch.randn(2, 36, generator=torch.Generator().manual_seed(3))
    drafter.observe([5, 6], hidden.double())
    requests = [Request(number, [1], LONG) for number in (6, 4, 5)]
    drafts = drafter.propose(requests, [1, 3, 2])
    logits = (heads(hidden) @ llm.model.lm_head.weight.float().T).detach()
    for number, draft, count in ((1, drafts[0], 1), (0, drafts[2], 2)):
        expected = [max((9, 40, 77), key=lambda token: float(logits[number, ahead, token])) for ahead in range(count)]
        assert list(draft.token_ids) == expected and draft.probabilities is None
    assert list(drafts[1].token_ids) == []  # nothing was seen of it
    drafter.forget(6)
    drafter.forget(99)
    assert [len(draft.token_ids) for draft in drafter.propose(requests, [3, 3, 3])] == [0, 0, 3]


def test_heads_come_back_from_a_file(tmp_path, heads):
    heads.save(tmp_path / "heads.safetensors")
    again = medusa.Heads.load(tmp_path / "heads.safetensors")
    assert all(torch.equal(getattr(heads, name), getattr(again, name)) for name in ("weight", "bias", "vocabulary"))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight": torch.zeros(2, 3, 3)}, "it holds weight; weight, bias, vocabulary were expected"),
        (
            {"weight": torch.zeros(2, 3, 4), "bias": torch.zeros(2, 3), "vocabulary": torch.tensor([1])},
            "no Medusa heads",
        ),
        ({"weight": torch.zeros(2, 3, 3), "bias": torch.zeros(2, 3), "vocabulary": torch.ones(1)}, "no Medusa heads"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, tensors, said):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=said):
        medusa.Heads.load(tmp_path / "x.safetensors")


def test_a_file_that_is_damaged_or_missing_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    for name in ("x.safetensors", "y.safetensors"):
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            medusa.Heads.load(tmp_path / name)


@pytest.mark.parametrize("strange", [fresh(hidden=20), fresh(vocabulary=(1, 259)), fresh(vocabulary=(-1, 2))])
def test_the_heads_of_another_model_are_refused(folder, strange):
    with pytest.raises(RequestError, match="Train heads for this model"):
        LLM(folder, device="cpu", speculative=medusa.Medusa(strange))


def test_a_drafter_of_no_model_says_so():
    with pytest.raises(RequestError, match="belongs to no model yet"):
        medusa.Medusa(fresh()).propose([], [])


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([], {}, "prompts gives nothing to learn from"),
        (PROMPTS[:1], {"heads": 0}, "heads is 0; it must be a whole number of at least 1"),
        (PROMPTS[:1], {"steps": 1.5}, "steps is 1.5"),
        (PROMPTS[:1], {"tokens": 1}, "nothing behind it there is nothing to learn"),
    ],
)
def test_what_cannot_be_learned_is_said(llm, prompts, settings, said):
    with pytest.raises(RequestError, match=said):
        medusa.train(llm, prompts, **settings)


@pytest.mark.model
def test_heads_of_the_real_model_learn_and_change_no_answer(smollm2_fp32, smollm2_gguf):
    questions = ("Why is the sky blue?", "What is a lighthouse for?")
    prompts = [smollm2_fp32.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    heads = medusa.train(smollm2_fp32, prompts, heads=2, steps=60, tokens=20, rows=64)
    fast = LLM(smollm2_gguf, dtype="float32", device="cpu", speculative=medusa.Medusa(heads))
    params = SamplingParams(max_tokens=20)
    plain = [answer.token_ids for answer in smollm2_fp32.generate(prompts, params)]
    assert [answer.token_ids for answer in fast.generate(prompts, params)] == plain
    assert fast.metrics.accepted > 0.5 * fast.metrics.drafted > 0  # it has read these very answers
