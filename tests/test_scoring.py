"""How probable a text is: against transformers' own log-probabilities, whatever the chunks and whatever is cached."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import SHAPES, VOCAB, ours, random_ids, save_tiny, tiny_model, transformers_model

from llmfromscratch import LLM, SamplingParams, sampling, scoring
from llmfromscratch.errors import RequestError

TEXT = random_ids(40, 3)


def oracle(network, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens - 1, vocab] of what follows each token, by transformers."""
    with torch.inference_mode():
        return network(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(dim=-1)


def check(entries: list, ids: list[int], expected: torch.Tensor, top: int, tolerance: float) -> None:
    assert entries[0] is None
    assert len(entries) == len(ids)
    for entry, token, row in zip(entries[1:], ids[1:], expected, strict=True):
        assert entry.token_id == token
        assert entry.raw == pytest.approx(row[token].item(), abs=tolerance)
        assert entry.processed == entry.raw
        best = row.sort(descending=True, stable=True)
        assert [raw for _, raw, _ in entry.top] == pytest.approx(best.values[:top].tolist(), abs=tolerance)
        assert [row[other].item() for other, _, _ in entry.top] == pytest.approx(
            best.values[:top].tolist(), abs=tolerance
        )
        assert all(raw == processed for _, raw, processed in entry.top)


# ---- the function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_are_those_of_transformers(shape):
    network = transformers_model(shape)
    check(scoring.prompt_logprobs(ours(network), TEXT, top=3), TEXT, oracle(network, TEXT), 3, 1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 7, 38, 39, 40, 1000])
def test_chunks_of_any_size_give_the_same(chunk):
    network = tiny_model()
    expected = scoring.prompt_logprobs(network, TEXT, top=2)
    for entry, other in zip(scoring.prompt_logprobs(network, TEXT, 2, chunk)[1:], expected[1:], strict=True):
        assert entry.token_id == other.token_id
        assert entry.raw == pytest.approx(other.raw, abs=1e-6)
        assert [token for token, *_ in entry.top] == [token for token, *_ in other.top]


@pytest.mark.parametrize("top", [0, 1, VOCAB, VOCAB + 5])
def test_as_many_of_the_most_probable_are_listed_as_there_are(top):
    entries = scoring.prompt_logprobs(tiny_model(), TEXT, top)
    assert {len(entry.top) for entry in entries[1:]} == {min(top, VOCAB)}
    if top >= VOCAB:
        assert math.fsum(math.exp(raw) for _, raw, _ in entries[1].top) == pytest.approx(1, abs=1e-5)


def test_equal_ones_are_listed_by_id():
    network = tiny_model()
    with torch.no_grad():
        network.lm_head.weight = torch.nn.Parameter(torch.zeros_like(network.lm_head.weight))
    entry = scoring.prompt_logprobs(network, [5, 6], top=4)[1]
    assert [token for token, *_ in entry.top] == [0, 1, 2, 3]
    assert entry.raw == pytest.approx(-math.log(VOCAB), abs=1e-5)
    assert scoring.perplexity([None, entry]) == pytest.approx(VOCAB, rel=1e-5)


def test_a_perplexity_beyond_all_numbers_is_infinite():
    entries = [None, sampling.TokenLogprobs(5, -1e30, -1e30, ())]
    assert scoring.perplexity(entries) == math.inf


# ---- through an LLM ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, dtype="float64", device="cpu", block_size=4, max_batch_tokens=8)


def test_perplexity_is_the_exponential_of_transformers_loss(folder, llm):
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode("What is the loss of this?")
    with torch.inference_mode():
        loss = network(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert llm.perplexity("What is the loss of this?") == pytest.approx(loss.exp().item(), rel=1e-4)
    assert llm.perplexity(ids) == llm.perplexity("What is the loss of this?")


def prompt_logprobs(llm: LLM, prompt, **more) -> list:
    return llm.generate(prompt, SamplingParams(max_tokens=2, prompt_logprobs=2, ignore_eos=True, **more))[
        0
    ].prompt_logprobs


def test_a_requests_prompt_logprobs_are_those_of_the_text_also_where_the_cache_knows_it(llm):
    expected = llm.logprobs("abcdefghijkl", top=2)
    assert expected[0] is None
    assert [entry.token_id for entry in expected[1:]] == llm.tokenizer.encode("abcdefghijkl")[1:]
    answers = [llm.generate("abcdefghijkl", SamplingParams(max_tokens=2, prompt_logprobs=2))[0] for _ in range(2)]
    assert answers[1].metrics.prefix_hits >= 8
    assert [answer.prompt_logprobs for answer in answers] == [expected] * 2


@pytest.mark.parametrize("changes", [{"max_batch_tokens": 1}, {"max_batch_tokens": 5}, {"scheduler": "static"}])
def test_they_are_the_same_with_any_scheduler_and_any_budget(llm, changes):
    expected = prompt_logprobs(llm, "abcdefghijkl")
    try:
        llm.use_scheduler(**changes)
        assert prompt_logprobs(llm, "abcdefghijkl") == expected
    finally:
        llm.use_scheduler(max_batch_tokens=8)


def test_several_choices_are_scored_once_and_others_are_not_scored(llm, monkeypatch):
    calls = []
    original = scoring.prompt_logprobs
    monkeypatch.setattr(
        scoring, "prompt_logprobs", lambda *given, **named: calls.append(given) or original(*given, **named)
    )
    asked = SamplingParams(max_tokens=2, prompt_logprobs=0, n=3, temperature=1.0)
    several, plain = llm.generate(["abcdef", "xyz"], [asked, SamplingParams(max_tokens=2)])
    assert len(calls) == 1
    assert [choice.prompt_logprobs for choice in several.choices] == [several.prompt_logprobs] * 3
    assert len(several.prompt_logprobs) == 6
    assert (plain.prompt_logprobs, plain.logprobs) == (None, None)


def test_a_prompt_that_cannot_be_scored_ends_its_own_request(llm, monkeypatch, caplog):
    def broken(network, ids, top, like):
        raise ValueError("a weight fell off")

    monkeypatch.setattr(scoring, "prompt_logprobs", broken)
    bad, good = llm.generate(["abc", "xyz"], [SamplingParams(prompt_logprobs=0), SamplingParams(max_tokens=2)])
    assert (bad.finish_reason, bad.token_ids) == ("abort", [])
    assert bad.error == "the model failed on the prompt of this request: ValueError: a weight fell off"
    assert good.finish_reason in ("length", "stop")
    assert llm.cache.block_tables == {}


WRONG_TEXTS = [
    ("", "the text has 0 tokens; nothing predicts the first"),
    ("a", "the text has 1 tokens"),
    ([5], "the text has 1 tokens"),
    ([5, 259], "the text holds 259; token ids are whole numbers from 0 to 258"),
    (7, "a text is text or a list of token ids, not int"),
    (["ab", "cd"], "the text holds 'ab'"),
    ("x" * 97, "the text has 97 tokens; the context holds 96. Give it in parts."),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG_TEXTS)
def test_what_cannot_be_scored_is_refused_with_a_sentence(llm, text, sentence):
    with pytest.raises(RequestError) as refused:
        llm.perplexity(text)
    assert sentence in str(refused.value)


def test_a_text_may_fill_the_context_and_is_never_cut(folder, llm):
    assert len(llm.logprobs("x" * 96)) == 96
    cutting = LLM(folder, dtype="float64", device="cpu", max_length=5, truncation="left")
    assert cutting.perplexity("abcdefghij") == llm.perplexity("abcdefghij")
    with pytest.raises(RequestError, match="prompt_logprobs is -1"):
        llm.logprobs("abc", top=-1)


def test_a_broken_model_is_named_as_such(folder):
    llm = LLM(folder, dtype="float64", device="cpu")
    with torch.no_grad():
        llm.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        llm.perplexity("abc")


# ---- the real model ----------------------------------------------------------------------------------------------

PASSAGE = (
    "The tide was out, and the boats lay on their sides in the mud. Two children walked between them, counting: "
    "seven, eight, nine. At ten they stopped, because the tenth was theirs."
)


@pytest.mark.model
def test_on_the_real_model_logprobs_and_perplexity_are_those_of_transformers(smollm2_fp32, transformers_smollm2):
    ids = smollm2_fp32.tokenizer.encode(PASSAGE)
    check(smollm2_fp32.logprobs(PASSAGE, top=5), ids, oracle(transformers_smollm2, ids), 5, 2e-3)
    with torch.inference_mode():
        loss = transformers_smollm2(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert smollm2_fp32.perplexity(PASSAGE) == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.model
def test_on_the_real_model_the_logprobs_of_an_answer_are_those_of_transformers(smollm2_fp32, transformers_smollm2):
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3, logprobs=4, ignore_eos=True)
    answer = smollm2_fp32.generate(PASSAGE, params)[0]
    whole = [*answer.prompt_token_ids, *answer.token_ids]
    rows = oracle(transformers_smollm2, whole)[len(answer.prompt_token_ids) - 1 :]
    assert len(answer.logprobs) == 24
    for entry, token, row in zip(answer.logprobs, answer.token_ids, rows, strict=True):
        assert entry.token_id == token
        assert entry.raw == pytest.approx(row[token].item(), abs=2e-3)
        assert [raw for _, raw, _ in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=2e-3)
        # what was drawn from: heated, cut at 0.9, and scaled to 1 again
        heated = (row / 0.8).softmax(dim=-1).sort(descending=True)
        kept = heated.values.cumsum(dim=-1) - heated.values < 0.9
        drawn_from = torch.zeros_like(row).scatter(-1, heated.indices[kept], heated.values[kept])
        drawn_from /= drawn_from.sum()
        assert entry.processed == pytest.approx(drawn_from[token].log().item(), abs=5e-3)
