"""`LLM(speculative=...)`: the same answers through every door, several tokens a step, figures that say how it went."""

from __future__ import annotations

import asyncio

import pytest
from tiny_models import save_tiny

from llmfromscratch import LLM, AsyncEngine, SamplingParams, drafters, sampling
from llmfromscratch.errors import RequestError

TWELVE = SamplingParams(max_tokens=12, ignore_eos=True)
BLOCK = 16 * 3 * 2 * 3 * 4 * 4  # bytes of 16 tokens: 3 layers, keys and values, 3 heads of 4 numbers of 4 bytes
PROMPTS = ["abcabcabcab", "one two one two one", "x", "abcabcabcabcabc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return new_llm(folder)


def new_llm(folder, **settings) -> LLM:
    if settings.get("kv_cache", "paged") in ("paged", "static") and "window" not in settings:
        settings = {"kv_cache_memory": 4e6} | settings
    return LLM(folder, **{"dtype": "float32", "device": "cpu", "attention": "plain"} | settings)


class Copies:
    """Drafts what another engine says: all right, but for every fifth token."""

    def __init__(self, llm: LLM, tokens: int = 6):
        self.llm, self.tokens = llm, tokens

    def propose(self, requests, counts):
        return [self._draft(request, count) for request, count in zip(requests, counts, strict=True)]

    def _draft(self, request, count):
        done = len(request.token_ids)
        params = SamplingParams(max_tokens=done + count, ignore_eos=True, seed=request.params.seed)
        said = self.llm.generate([request.prompt_token_ids], params)[0].token_ids
        return drafters.Draft([token if (done + at) % 5 else 9 for at, token in enumerate(said[done:])])

    def forget(self, request_id):
        pass


SPECULATIVE = {
    "lookup": lambda plain: "lookup",
    "skip": lambda plain: "skip",
    "skip, whatever it costs": lambda plain: drafters.LayerSkip(cost=0),
    "a second LLM": lambda plain: plain,
    "a drafter": Copies,
}
SETTINGS = {
    "paged": {},
    "static": {"kv_cache": "static", "scheduler": "static"},
    "concat": {"kv_cache": "concat"},
    "none": {"kv_cache": "none"},
    "a window": {"window": 8},
    "hardly room for two": {"kv_cache_memory": 4 * BLOCK, "max_batch_tokens": 16},
}


@pytest.mark.parametrize("kind", SPECULATIVE)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_answers_are_those_without_drafts(folder, plain, kind, setting):
    if setting == "a window":
        plain = new_llm(folder, window=8)
    llm = new_llm(folder, speculative=SPECULATIVE[kind](plain), **SETTINGS[setting])
    both = llm.generate(PROMPTS, TWELVE), plain.generate(PROMPTS, TWELVE)
    assert both[0] == both[1]
    assert [llm.generate(prompt, TWELVE)[0] for prompt in PROMPTS] == both[1]
    assert llm.metrics.drafted > 0
    assert llm.metrics.accepted > 0 or kind != "a drafter"
    assert llm.metrics.preemptions > 0 or setting != "hardly room for two"
    if hasattr(llm.cache, "audit"):
        llm.cache.audit()
        assert llm.cache.block_tables == {}


def test_figures_say_how_many_drafts_stood(folder, plain):
    llm = new_llm(folder, speculative=Copies(plain))
    metrics = llm.generate(PROMPTS[0], TWELVE)[0].metrics
    assert 0 < metrics.accepted < metrics.drafted
    assert metrics.acceptance_rate == metrics.accepted / metrics.drafted
    assert (llm.metrics.drafted, llm.metrics.accepted) == (metrics.drafted, metrics.accepted)
    assert llm.metrics.acceptance_rate == metrics.acceptance_rate
    assert llm.metrics.steps == 12 - metrics.accepted
    assert plain.generate("x", TWELVE)[0].metrics.acceptance_rate == plain.metrics.acceptance_rate == 0


def test_several_tokens_of_a_step_are_several_pieces(folder, plain):
    llm = new_llm(folder, speculative=Copies(plain))
    pieces = list(llm.stream(PROMPTS[0], TWELVE))
    assert pieces == list(plain.stream(PROMPTS[0], TWELVE))
    assert llm.metrics.steps < len(pieces) == 12


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_is_met_in_the_middle_of_a_step_ends_the_answer_there(folder, plain, include):
    text = plain.generate(PROMPTS[0], TWELVE)[0].text
    stop = next(text[at : at + 2] for at in range(3, len(text)) if text.find(text[at : at + 2]) == at)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop=[stop], include_stop=include)
    llm = new_llm(folder, speculative=Copies(plain))
    assert llm.generate(PROMPTS[0], params) == plain.generate(PROMPTS[0], params)
    assert "".join(piece.text for piece in llm.stream(PROMPTS[0], params)) == llm.generate(PROMPTS[0], params)[0].text
    llm.cache.audit()


def test_drawn_answers_are_those_without_drafts_where_drafts_are_not_drawn(folder, plain):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=4, n=2)
    llm = new_llm(folder, speculative=Copies(plain))
    (one,), (other,) = llm.generate(PROMPTS[0], params), plain.generate(PROMPTS[0], params)
    assert one.choices == other.choices
    assert llm.metrics.drafted > 0


def test_the_asynchronous_engine_serves_several_tokens_a_step(folder, plain):
    llm = new_llm(folder, speculative="lookup")

    async def ask():
        async def streamed(prompt):
            return [piece async for piece in engine.stream(prompt, TWELVE)]

        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(streamed(prompt) for prompt in PROMPTS), engine.generate(PROMPTS[0], TWELVE))

    *streams, whole = asyncio.run(ask())
    assert [list(plain.stream(prompt, TWELVE)) for prompt in PROMPTS] == streams
    assert whole == plain.generate(PROMPTS[0], TWELVE)[0]


def test_beams_and_prompt_logprobs_go_their_own_ways(folder, plain):
    llm = new_llm(folder, speculative="lookup")
    for params in (
        SamplingParams(max_tokens=6, beam_width=3),
        SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=6, regex="[a-c]{4}"),
    ):
        assert llm.generate(PROMPTS, params) == plain.generate(PROMPTS, params)


def test_what_contradicts_drafts_is_refused(folder, plain):
    class Own(sampling.Sampler):
        pass

    with pytest.raises(RequestError, match="speculative is 'medusa'"):
        new_llm(folder, speculative="medusa")
    with pytest.raises(RequestError, match="leave one of the two out"):
        new_llm(folder, speculative="lookup", sampler=Own())
    llm = new_llm(folder, speculative="lookup")
    with pytest.raises(RequestError, match="leave one of the two out"):
        llm.sampler = Own()
    with pytest.raises(RequestError, match="skipped names the layers"):
        new_llm(folder, speculative=drafters.LayerSkip([7]))


def test_drafts_go_on_after_the_sampling_module_was_reloaded(folder, plain, monkeypatch):
    llm = new_llm(folder, speculative="lookup")
    monkeypatch.setattr(sampling, "Sampler", type("Sampler", (sampling.Sampler,), {}))
    assert llm.generate(PROMPTS, TWELVE) == plain.generate(PROMPTS, TWELVE)
    assert llm.metrics.drafted > 0


def test_drafts_go_on_after_a_part_was_exchanged(folder, plain):
    llm = new_llm(folder, speculative="lookup")
    llm.use_scheduler("static")
    assert llm.generate(PROMPTS, TWELVE) == plain.generate(PROMPTS, TWELVE)
    assert llm.metrics.drafted > 0


# ---- the real model ------------------------------------------------------------------------------------------------

COPY = "Repeat this text word for word: The fee is four coins a night for boats under ten metres."


@pytest.mark.model
@pytest.mark.parametrize("drafter", [drafters.Lookup(), drafters.LayerSkip(3, cost=0)], ids=["lookup", "skip"])
def test_the_real_model_says_the_same_in_fewer_passes(smollm2_fp32, drafter):
    from llmfromscratch.engine_core import EngineCore
    from llmfromscratch.speculation import Speculation

    own = smollm2_fp32
    drafter.attach(own) if hasattr(drafter, "attach") else None
    prompt, params = own.chat_prompt([{"role": "user", "content": COPY}]), SamplingParams(max_tokens=24)
    expected = own.generate([prompt], params)[0]
    ends, guessing = own._intake.end_ids, Speculation(drafter, own.config.vocab_size)
    core = EngineCore(
        own.model, own.cache, own.core.scheduler, own.sampler, ends, own.config.context_length, speculation=guessing
    )
    request = own.request(prompt, params)
    core.add(request)
    while core.has_work:
        core.step()
        own.cache.audit()
    assert request.token_ids == expected.token_ids
    assert core.metrics.accepted >= 8
    assert core.metrics.steps < len(request.token_ids) - 5
