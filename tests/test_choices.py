"""Several answers to one prompt share its blocks, each draws its own numbers, and every seed repeats."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import asdict

import pytest
from tiny_models import save_tiny

from llmfromscratch import LLM, AsyncEngine, SamplingParams, kv_cache
from llmfromscratch.answers import Completion
from llmfromscratch.errors import RequestError
from llmfromscratch.scheduler import State

PROMPT = "The quick brown fox jumps"  # 25 tokens of one byte: 6 blocks of 4, and one token more
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder) -> LLM:
    return LLM(folder, dtype="float64", device="cpu", block_size=BLOCK)


@pytest.fixture
def llm(loaded) -> LLM:
    """The tiny model over an empty cache; afterwards no block is held and nothing is in flight."""
    loaded.use_scheduler()
    loaded.cache = kv_cache.PagedKVCache(loaded.cache.layout, 200, BLOCK)
    yield loaded
    loaded.cache.audit()
    assert loaded.cache.block_tables == {}
    assert not loaded.core.has_work


def warm(n: int = 1, seed: int | None = 5, max_tokens: int = 12, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.2, n=n, seed=seed, ignore_eos=True, **more)


def alone(llm: LLM, prompt, params: SamplingParams) -> Completion:
    return llm.generate(prompt, params)[0]


# ---- the answers -------------------------------------------------------------------------------------------------


def test_the_first_choice_is_what_is_said_alone_and_the_others_differ(llm):
    one, several = alone(llm, PROMPT, warm()), alone(llm, PROMPT, warm(4))
    assert several == one
    assert several.choices[0] is several
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 4
    assert [choice.prompt_token_ids for choice in several.choices] == [one.prompt_token_ids] * 4
    assert [len(choice.token_ids) for choice in several.choices] == [12] * 4
    assert one.choices == [one]
    again = alone(llm, PROMPT, warm(4))
    assert again.choices == several.choices
    assert alone(llm, PROMPT, warm(2)).choices == several.choices[:2]
    assert alone(llm, PROMPT, warm(4, seed=6)).choices[1:] != several.choices[1:]


def test_without_a_seed_choices_differ_from_each_other_and_from_run_to_run(llm):
    runs = [alone(llm, PROMPT, warm(3, seed=None)) for _ in range(2)]
    assert len({tuple(choice.token_ids) for run in runs for choice in run.choices}) == 6


def test_an_answer_with_choices_can_be_copied_as_data_and_pickled(llm):
    answer = alone(llm, PROMPT, warm(2, max_tokens=2))
    assert len(asdict(answer)["others"]) == 1
    assert pickle.loads(pickle.dumps(answer)).choices == answer.choices
    assert "others" not in repr(answer)


def test_prompts_with_choices_and_without_are_answered_together_in_order(llm):
    each = [warm(3), warm(1, seed=8), warm(2, seed=9)]
    prompts = [PROMPT, "b", PROMPT + "!"]
    together = llm.generate(prompts, each)
    for answer, prompt, params in zip(together, prompts, each, strict=True):
        assert answer.choices == alone(llm, prompt, params).choices
        assert len(answer.choices) == params.n


@pytest.mark.parametrize("kind", ["concat", "static", "none", "paged, nothing shared"])
@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_choices_are_the_same_over_any_cache_and_scheduler(llm, kind, planner):
    expected = alone(llm, PROMPT, warm(3, max_tokens=5)).choices
    usual, layers = llm.cache, llm.config.num_layers
    llm.use_scheduler(planner, max_requests=3)
    llm.cache = {
        "concat": lambda: kv_cache.ConcatKVCache(layers),
        "static": lambda: kv_cache.StaticKVCache(usual.layout, 3, 96),
        "none": lambda: kv_cache.NoKVCache(layers),
        "paged, nothing shared": lambda: kv_cache.PagedKVCache(usual.layout, 60, BLOCK, prefix_sharing=False),
    }[kind]()
    try:
        assert alone(llm, PROMPT, warm(3, max_tokens=5)).choices == expected
        if planner == "static" or kind != "paged":
            assert llm.core.metrics.prefix_hits == 0
    finally:
        llm.cache = usual


def test_static_batching_over_a_shared_cache_serves_choices_in_one_batch(llm):
    expected = alone(llm, PROMPT, warm(3)).choices
    llm.use_scheduler("static")
    assert alone(llm, PROMPT, warm(3)).choices == expected
    assert llm.metrics.steps == 12  # one batch: nobody waited for a prefix that nobody would have looked for


# ---- what is shared ----------------------------------------------------------------------------------------------


def test_choices_share_the_full_blocks_of_the_prompt_by_reference_counts(llm):
    requests = llm.requests(PROMPT, warm(4, max_tokens=2))
    for request in requests:
        llm.core.add(request)
    llm.core.step()
    assert [request.state for request in requests] == [State.DECODING, *[State.WAITING] * 3]
    assert llm.metrics.waiting == 3
    llm.core.step()
    tables = [llm.cache.block_tables[request.request_id] for request in requests[1:]]
    first = requests[0]
    assert first.ended  # of two tokens the second has come
    full = len(PROMPT) // BLOCK
    assert [table[:full] for table in tables] == [tables[0][:full]] * 3
    assert [llm.cache.allocator.ref_counts[block] for block in tables[0][:full]] == [3] * full
    used = len(llm.cache.allocator.ref_counts) - llm.cache.num_free_blocks
    assert used == full + 3  # the prompt's once, and a last one for each
    assert [request.prefix_hits for request in requests] == [0, *[full * BLOCK] * 3]
    while llm.core.has_work:
        llm.core.step()
        llm.cache.audit()


def test_n_choices_take_the_prompts_blocks_once_however_long_they_run(llm):
    requests = llm.requests(PROMPT, warm(5, max_tokens=20))
    for request in requests:
        llm.core.add(request)
    most = 0
    while llm.core.has_work:
        llm.core.step()
        llm.cache.audit()
        most = max(most, len(llm.cache.allocator.ref_counts) - llm.cache.num_free_blocks)
    own = -(-(len(PROMPT) + 20) // BLOCK) - len(PROMPT) // BLOCK
    assert most <= len(PROMPT) // BLOCK + 5 * own
    assert most > 5 * (own - 1)


def test_choices_follow_in_the_step_after_the_first_ones_prompt_is_done_in_chunks(llm):
    llm.use_scheduler(max_batch_tokens=10)
    requests = llm.requests(PROMPT, warm(2, max_tokens=3))
    for request in requests:
        llm.core.add(request)
    seen = []
    while llm.core.has_work:
        llm.core.step()
        seen.append([request.state for request in requests])
    waits = [second for _, second in seen].count(State.WAITING)
    assert waits == 3  # 25 tokens in chunks of 10
    assert requests[1].prefix_hits == 24


@pytest.mark.parametrize("moment", range(5))
def test_when_the_first_is_aborted_the_others_go_on(llm, moment):
    expected = alone(llm, PROMPT, warm(3)).choices
    llm.cache = kv_cache.PagedKVCache(llm.cache.layout, 200, BLOCK)
    llm.use_scheduler(max_batch_tokens=10)
    requests = llm.requests(PROMPT, warm(3))
    for request in requests:
        llm.core.add(request)
    for _ in range(moment):
        llm.core.step()
    llm.core.abort(requests[0], "not wanted any more")
    while llm.core.has_work:
        llm.core.step()
        llm.cache.audit()
    assert requests[0].finish_reason == "abort"
    assert [request.token_ids for request in requests[1:]] == [choice.token_ids for choice in expected[1:]]


def test_a_choice_that_waits_can_be_aborted_and_is_counted(llm):
    requests = llm.requests(PROMPT, warm(3))
    for request in requests:
        llm.core.add(request)
    before = llm.metrics.aborted
    llm.core.abort(requests[1], "not wanted")
    assert (requests[1].finish_reason, requests[1].error, llm.metrics.aborted) == ("abort", "not wanted", before + 1)
    with pytest.raises(ValueError, match=f"request {requests[2].request_id} is in flight already"):
        llm.core.add(requests[2])
    while llm.core.has_work:
        llm.core.step()
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]


def test_an_interruption_ends_also_the_choices_that_wait(llm):
    class Interrupting(type(llm.sampler)):
        def sample(self, logits, rows):
            raise KeyboardInterrupt

    usual, llm.sampler = llm.sampler, Interrupting()
    requests = llm.requests(PROMPT, warm(3))
    for request in requests:
        llm.core.add(request)
    with pytest.raises(KeyboardInterrupt):
        llm.core.step()
    llm.sampler = usual
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert all("KeyboardInterrupt" in request.error for request in requests)


def test_choices_that_are_preempted_again_and_again_say_the_same(llm):
    expected = alone(llm, PROMPT, warm(4)).choices
    llm.cache = kv_cache.PagedKVCache(llm.cache.layout, 14, BLOCK)
    several = alone(llm, PROMPT, warm(4))
    assert several.choices == expected
    assert sum(choice.metrics.preemptions for choice in several.choices) > 0


def test_one_that_follows_a_request_which_is_not_in_flight_begins_at_once(llm):
    stranger, request = llm.requests("abc", warm())[0], llm.requests("abc", warm(max_tokens=2))[0]
    request.follows = stranger
    llm.core.add(request)
    while llm.core.has_work:
        llm.core.step()
    assert request.finish_reason == "length"


# ---- streams -----------------------------------------------------------------------------------------------------


def joined(pieces, choice: int) -> tuple[str, list[int], list, str | None]:
    mine = [piece for piece in pieces if piece.choice == choice]
    assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
    tokens = [token for piece in mine for token in piece.token_ids]
    return (
        "".join(piece.text for piece in mine),
        tokens,
        [one for p in mine for one in p.logprobs],
        mine[-1].finish_reason,
    )


def check_stream(pieces, expected: Completion) -> None:
    assert {piece.choice for piece in pieces} == set(range(len(expected.choices)))
    for number, choice in enumerate(expected.choices):
        assert joined(pieces, number) == (choice.text, choice.token_ids, choice.logprobs, choice.finish_reason)


def test_a_stream_gives_the_choices_side_by_side(llm):
    params = warm(3, logprobs=1, stop=["e"])
    expected = alone(llm, PROMPT, params)
    llm.cache = kv_cache.PagedKVCache(llm.cache.layout, 200, BLOCK)
    pieces = list(llm.stream(PROMPT, params))
    check_stream(pieces, expected)
    firsts = [next(place for place, piece in enumerate(pieces) if piece.choice == choice) for choice in range(3)]
    lasts = [max(place for place, piece in enumerate(pieces) if piece.choice == choice) for choice in range(3)]
    assert max(firsts) < min(lasts)
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


def test_an_async_stream_and_an_async_answer_give_all_choices(llm):
    params = warm(3, logprobs=0)
    expected = alone(llm, PROMPT, params)

    async def serve():
        async with AsyncEngine(llm) as engine:
            return [piece async for piece in engine.stream(PROMPT, params)], await engine.generate(PROMPT, params)

    pieces, whole = asyncio.run(serve())
    check_stream(pieces, expected)
    assert whole.choices == expected.choices


@pytest.mark.parametrize("asynchronous", [False, True])
def test_leaving_a_stream_gives_up_all_choices(llm, asynchronous):
    params = warm(4, max_tokens=60)

    async def leave():
        async with AsyncEngine(llm) as engine:
            stream = engine.stream(PROMPT, params)
            await anext(stream)
            await stream.aclose()
            while llm.core.has_work:
                await asyncio.sleep(0.001)

    if asynchronous:
        asyncio.run(leave())
    else:
        stream = llm.stream(PROMPT, params)
        next(stream)
        stream.close()
    assert llm.cache.block_tables == {}
    assert not llm.core.has_work


# ---- logprobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [200, 14])
def test_every_choice_has_one_entry_for_each_token_also_after_preemptions(llm, blocks):
    expected = alone(llm, PROMPT, warm(4, logprobs=2))
    llm.cache = kv_cache.PagedKVCache(llm.cache.layout, blocks, BLOCK)
    answer = alone(llm, PROMPT, warm(4, logprobs=2))
    assert (sum(choice.metrics.preemptions for choice in answer.choices) > 0) == (blocks == 14)
    for choice, other in zip(answer.choices, expected.choices, strict=True):
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids == other.token_ids
        assert {len(entry.top) for entry in choice.logprobs} == {2}
        assert [entry.raw for entry in choice.logprobs] == pytest.approx(
            [entry.raw for entry in other.logprobs], abs=1e-6
        )
    scored = llm.logprobs([*answer.prompt_token_ids, *answer.token_ids])[len(PROMPT) :]
    assert [entry.raw for entry in scored] == pytest.approx([entry.raw for entry in answer.logprobs], abs=1e-6)


@pytest.mark.model
def test_on_the_real_model_choices_share_the_prompt_stop_at_their_strings_and_begin_with_the_answer_alone(smollm2_fp32):
    llm = smollm2_fp32
    prompt = llm.chat_prompt([{"role": "user", "content": "Write one sentence about the sea, then a second one."}])
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11, n=4, stop=[". "], logprobs=0)
    several = llm.generate(prompt, params)[0]
    one = llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11, stop=[". "]))[0]
    assert (several.text, several.token_ids) == (one.text, one.token_ids)
    assert len({choice.text for choice in several.choices}) == 4
    assert [choice.metrics.prefix_hits for choice in several.choices[1:]] == [(len(prompt) - 1) // 16 * 16] * 3
    assert any(choice.finish_reason == "stop" for choice in several.choices)
    for choice in several.choices:
        assert ". " not in choice.text
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
        assert (choice.finish_reason == "length") == (len(choice.token_ids) == 40)


# ---- seeds of a whole run ----------------------------------------------------------------------------------------


def unseeded_run(folder, seed) -> list[list[list[int]]]:
    llm = LLM(folder, dtype="float64", device="cpu", seed=seed)
    calls = [llm.generate(["a", "a", PROMPT], warm(2, seed=None, max_tokens=6)), llm.generate("a", warm(1, None, 6))]
    calls.append(llm.generate("a", warm(1, 7, 6)))
    return [[choice.token_ids for choice in answer.choices] for call in calls for answer in call]


def test_a_seed_for_the_whole_run_repeats_it_and_requests_still_differ(folder, llm):
    run = unseeded_run(folder, 3)
    assert unseeded_run(folder, 3) == run
    assert unseeded_run(folder, 4)[:-1] != run[:-1]
    assert unseeded_run(folder, None)[:-1] != run[:-1]
    assert run[-1] == [alone(llm, "a", warm(1, 7, 6)).token_ids]  # a seed of its own counts for more
    same_prompt = [tuple(choice) for answer in (run[0], run[1], run[3]) for choice in answer]
    assert len(set(same_prompt)) == len(same_prompt) == 5


# ---- what cannot be meant ----------------------------------------------------------------------------------------


def test_a_single_request_for_several_answers_is_refused(llm):
    with pytest.raises(RequestError, match="params asks for several answers"):
        llm.request("x", warm(2))
    assert [request.choice for request in llm.requests("x", warm(2))] == [0, 1]


@pytest.mark.parametrize("seed", ["x", 1.5, True])
def test_a_seed_of_the_engine_that_is_no_whole_number_is_refused(folder, seed):
    with pytest.raises(RequestError, match="seed is .*give a whole number, or None"):
        LLM(folder, dtype="float64", device="cpu", seed=seed)


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(llm, name):
    value = {259: 1.0} if name == "logit_bias" else [259]
    with pytest.raises(RequestError, match=f"{name} names token 259; token ids are whole numbers from 0 to 258"):
        llm.generate("x", SamplingParams(**{name: value}))
    with pytest.raises(RequestError, match=f"{name} names token 259"):
        llm.stream("x", SamplingParams(**{name: value}))


def test_another_sampler_is_refused_while_requests_of_the_old_one_are_in_flight(llm):
    stream = llm.stream("x", warm())
    next(stream)
    with pytest.raises(RequestError, match="requests are in flight"):
        llm.sampler = type(llm.sampler)()
    stream.close()
    llm.sampler = type(llm.sampler)()
