"""Beam search equals transformers', text for text and score for score, and leaves the cache as it found it."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from tiny_models import (
    CACHES,
    VOCAB,
    all_logits,
    new_cache,
    ours,
    random_ids,
    save_tiny,
    tiny_model,
    transformers_model,
)

from llmfromscratch import LLM, AsyncEngine, RequestError, SamplingParams, beam_search, branches, kv_cache
from llmfromscratch.beam_search import BeamSearch

PROMPTS = (
    "The sky is",
    "Once upon a time there was a little robot who",
    "def fibonacci(n):\n",
    "The capital of France is Paris. The capital of Italy is",
)


def oracle(network, prompt, width, max_tokens, ends, penalty, n):
    """[(token ids, score)] of transformers' beam search; what it fills up behind an end is cut off."""
    found = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=n,
        length_penalty=penalty,
        early_stopping=False,
        do_sample=False,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        texts.append(row[: end + 1])
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def assert_same(results, expected):
    assert [list(result.token_ids) for result in results] == [ids for ids, _ in expected]
    # a negative length penalty makes scores large
    assert [result.score for result in results] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)


def rounded(found):
    """(results, steps) without the last digits, which depend on the order of additions."""
    results, steps = found
    texts = [(result.token_ids, round(result.score, 9), result.finished) for result in results]
    ways = [
        [(*way[:2], *(round(score, 9) for score in way[2:])) for way in step.kept + step.finished] for step in steps
    ]
    return texts, ways


@pytest.fixture(scope="module")
def pairs():
    """Random models of transformers in float64, and ours with their weights."""
    networks = []
    for seed in range(4):
        network = transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon", seed)
        network.generation_config.eos_token_id = None
        networks.append((network.double(), ours(network, torch.float64)))
    return networks


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("ends", ["none", "two", "often"])
def test_random_models_give_the_texts_and_scores_of_transformers(pairs, seed, ends):
    network, own = pairs[seed % len(pairs)]
    prompt = random_ids(3 + seed % 7, seed)
    width, penalty = 2 + seed % 4, (1.0, 0.0, -1.0, 2.0, 0.5)[seed % 5]
    # every sixth token ends the text: most beams end soon
    end_ids = {"none": [], "two": [2, 5], "often": list(range(1 + seed % 6, VOCAB, 6))}[ends]
    expected = oracle(network, prompt, width, 12, end_ids, penalty, width)
    cache = new_cache("paged, blocks of 3", own)
    settings = {"max_tokens": 12, "ends": end_ids, "length_penalty": penalty, "n": width}
    results, _ = beam_search.beam_search(own, cache, prompt, width, **settings)
    assert_same(results, expected)
    cache.audit()
    assert not cache.block_tables


@pytest.mark.model
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_real_model_gives_the_texts_and_scores_of_transformers(smollm2_fp32, transformers_smollm2, prompt, width):
    llm, place = smollm2_fp32, PROMPTS.index(prompt)
    penalty = (1.0, 0.0, -1.0, 2.0)[(width + place) % 4]
    # "." ends a text as often as not; the last case goes on to max_tokens
    full_stop = llm.tokenizer.encode(".")
    ends = (llm.config.eos_token_ids, [*llm.config.eos_token_ids, *full_stop], full_stop, [])[(width // 2 + place) % 4]
    ids = llm.tokenizer.encode(prompt)
    expected = oracle(transformers_smollm2, ids, width, 16, ends, penalty, width)
    results, _ = beam_search.beam_search(
        llm.model, llm.cache, ids, width, max_tokens=16, ends=ends, length_penalty=penalty, n=width
    )
    assert_same(results, expected)
    llm.cache.audit()


@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_and_prompts_computed_before_give_the_same_beams(kind):
    own, prompt = tiny_model(3), random_ids(9, 3)
    expected = beam_search.beam_search(own, new_cache("concat", own), prompt, 4, max_tokens=10, ends=[2, 5], n=4)
    assert any(step.finished for step in expected[1][:-1])
    cache = new_cache(kind, own)
    for _ in range(2):  # the second time a cache that shares prefixes has some of it already
        found = beam_search.beam_search(own, cache, prompt, 4, max_tokens=10, ends=[2, 5], n=4)
        assert rounded(found) == rounded(expected)


def test_a_long_prompt_is_computed_in_pieces(monkeypatch):
    own, prompt = tiny_model(5), random_ids(30, 5)
    expected = beam_search.beam_search(own, new_cache("concat", own), prompt, 3, max_tokens=6)
    monkeypatch.setattr(branches, "_CHUNK", 7)
    sizes = []

    def network(batch, cache):
        sizes.append(len(batch.token_ids))
        return own(batch, cache)

    found = beam_search.beam_search(network, new_cache("concat", own), prompt, 3, max_tokens=6)
    assert rounded(found) == rounded(expected)
    assert sizes == [7, 7, 7, 7, 2, 3, 3, 3, 3, 3]
    sizes.clear()
    found = beam_search.beam_search(network, new_cache("none", own), prompt, 3, max_tokens=6)
    assert rounded(found) == rounded(expected)
    assert sizes[0] == 30


def test_a_width_of_one_is_greedy_decoding():
    own, ids = tiny_model(1), random_ids(5, 1)
    (result,), _ = beam_search.beam_search(own, new_cache("concat", own), ids, 1, max_tokens=8)
    text = list(ids)
    for _ in range(8):
        text.append(int(all_logits(own, text)[-1].argmax()))
    assert list(result.token_ids) == text[5:] and not result.finished


def test_the_widest_search_finds_the_most_probable_text_of_all():
    """With as many beams as there are texts nothing is dropped: a closed form, by going through all of them."""
    own, ids = tiny_model(2), random_ids(4, 2)
    first = all_logits(own, ids)[-1].log_softmax(-1)
    best = max(
        (float(first[token] + all_logits(own, [*ids, token])[-1].log_softmax(-1).max()), token)
        for token in range(VOCAB)
    )
    (result,), _ = beam_search.beam_search(own, new_cache("concat", own), ids, VOCAB, max_tokens=2, length_penalty=0.0)
    assert result.score == pytest.approx(best[0], abs=1e-9) and result.token_ids[0] == best[1]


def test_of_equal_ways_the_lower_beam_comes_first_then_the_lower_token():
    own = tiny_model(2, tie_word_embeddings=False)
    own.lm_head.weight.data.zero_()
    results, steps = beam_search.beam_search(own, new_cache("concat", own), [3, 4], 3, max_tokens=2, n=3)
    assert [way[:2] for way in steps[0].kept] == [(0, 0), (0, 1), (0, 2)]
    assert [result.token_ids for result in results] == [(0, 0), (0, 1), (0, 2)]
    assert [result.score for result in results] == pytest.approx([-math.log(VOCAB)] * 3)


def test_ways_to_go_on_are_found_although_all_of_the_most_probable_tokens_end_a_text():
    logits = torch.arange(40.0, 0.0, -1.0)  # token 0 is the most probable one everywhere

    def network(batch, cache):
        return logits.expand(len(batch.logit_rows), -1)

    settings = {"max_tokens": 2, "ends": range(6), "n": 2}
    results, (step,) = beam_search.beam_search(network, kv_cache.NoKVCache(1), [1], 2, **settings)
    assert [way[:2] for way in step.kept] == [(0, 6), (0, 7)]
    assert [ending[:2] for ending in step.finished] == [(0, 0), (0, 1)]
    # two texts have ended, and neither beam could still be better than them: the search is over
    assert [result.token_ids for result in results] == [(0,), (1,)] and all(one.finished for one in results)


def test_the_steps_tell_the_story_of_the_search():
    own, ids = tiny_model(0), random_ids(4, 0)
    ends = set(range(3, VOCAB, 6))
    results, steps = beam_search.beam_search(
        own, new_cache("concat", own), ids, 3, max_tokens=9, ends=ends, length_penalty=1.5, n=3
    )
    texts, found = [()], {}
    for length, step in enumerate(steps, start=1):
        assert [way.score for way in step.kept] == sorted((way.score for way in step.kept), reverse=True)
        for ending in step.finished:
            assert ending.token_id in ends or length == 9
            assert ending.final == pytest.approx(ending.score / length**1.5)
            found[(*texts[ending.parent], ending.token_id)] = ending.final
        texts = [(*texts[way.parent], way.token_id) for way in step.kept]
        for way, text in zip(step.kept, texts, strict=True):
            logits = all_logits(own, [*ids, *text]).log_softmax(-1)[len(ids) - 1 : -1]
            assert way.score == pytest.approx(float(logits[range(length), list(text)].sum()))
    best = sorted(found.items(), key=lambda pair: -pair[1])[:3]
    assert [(result.token_ids, result.score) for result in results] == best
    assert [result.finished for result in results] == [text[-1] in ends for text, _ in best]


@pytest.mark.parametrize(
    "kind", ["paged, blocks of 1", "paged, blocks of 3", "paged, blocks of 16", "paged, scattered"]
)
def test_the_cache_adds_up_after_each_step_and_what_beams_have_in_common_is_stored_once(kind):
    own, prompt = tiny_model(4), random_ids(20, 4)
    cache = new_cache(kind, own)
    free = cache.num_free_blocks
    with BeamSearch(own, cache, prompt, 5, max_tokens=30, ends=range(0, VOCAB, 7)) as search:
        while not search.done:
            search.step()
            cache.audit()
            assert len(cache.block_tables) == len(search.branches.requests) == len(search.steps[-1].kept) or search.done
            held = free - cache.num_free_blocks
            assert held == len(distinct_blocks(cache, search.branches.texts))
            full = len(prompt) // cache.block_size
            tables = [table[:full] for table in cache.block_tables.values()]
            assert all(table == tables[0] for table in tables)
    cache.audit()
    assert not cache.block_tables and cache.num_free_blocks == free


def distinct_blocks(cache, texts):
    """What blocks the beams have at least, before the newest token is stored: equal beginnings share theirs.

    A block is copied when one of its holders writes, so two beams that part inside of a block have one each.
    """
    size = cache.block_size
    found = set()
    for text in texts:
        stored = text[:-1]
        found |= {tuple(stored[:end]) for end in range(size, len(stored) + 1, size)}
        if len(stored) % size:
            found.add(tuple(stored))
    return found


def test_forks_share_every_block_until_one_of_them_writes():
    own, prompt = tiny_model(4), random_ids(10, 4)
    cache = kv_cache.PagedKVCache(kv_cache.CacheLayout.of(own.config, torch.float64), 32, 4)
    with BeamSearch(own, cache, prompt, 3, max_tokens=8) as search:
        search.step()
        tables = list(cache.block_tables.values())
        assert len(tables) == 3 and tables[0] == tables[1] == tables[2]
        assert [cache.allocator.ref_counts[block] for block in tables[0]] == [3, 3, 3]
        search.branches.logits()  # writes the first token of each
        tables = list(cache.block_tables.values())
        assert len({tuple(table[:2]) for table in tables}) == 1 and len({table[2] for table in tables}) == 3
        cache.audit()


def test_a_search_that_is_interrupted_gives_everything_back():
    own, prompt = tiny_model(6), random_ids(10, 6)
    for fails_at in range(1, 3 * 5):
        cache, writes = new_cache("paged, blocks of 3", own), []
        write, free = cache.write, cache.num_free_blocks

        def failing(layer, *rest, write=write, writes=writes, fails_at=fails_at):
            writes.append(layer)
            if len(writes) == fails_at:
                raise KeyboardInterrupt
            write(layer, *rest)

        cache.write = failing
        with pytest.raises(KeyboardInterrupt):
            beam_search.beam_search(own, cache, prompt, 4, max_tokens=5)
        cache.audit()
        assert not cache.block_tables and cache.num_free_blocks == free


def test_a_search_that_is_interrupted_while_it_branches_gives_everything_back():
    own, prompt = tiny_model(6), random_ids(10, 6)
    for fails_at in range(1, 4):
        cache, forks = new_cache("paged, blocks of 3", own), []
        fork = cache.fork

        def failing(*numbers, fork=fork, forks=forks, fails_at=fails_at):
            fork(*numbers)
            forks.append(numbers)
            if len(forks) == fails_at:
                raise KeyboardInterrupt

        cache.fork = failing
        with pytest.raises(KeyboardInterrupt):
            beam_search.beam_search(own, cache, prompt, 4, max_tokens=5)
        cache.audit()
        assert not cache.block_tables


def test_no_length_penalty_breaks_a_comparison():
    own, ids = tiny_model(1), random_ids(5, 1)
    for penalty in (-1e9, -50.0, 50.0, 1e9):
        found, _ = beam_search.beam_search(
            own, new_cache("concat", own), ids, 3, max_tokens=6, ends=[2], length_penalty=penalty, n=3
        )
        assert len(found) == 3 and all(math.isfinite(result.score) for result in found)


def test_logits_that_are_not_finite_are_named():
    own = tiny_model(1)
    own.norm.weight.data[0] = math.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        beam_search.beam_search(own, new_cache("concat", own), [1, 2], 3, max_tokens=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"width": 2, "n": 3}, "n=3 texts are asked of 2 beams"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(changes, message):
    own = tiny_model(1)
    settings = {"width": 2, "max_tokens": 4, **changes}
    with pytest.raises(RequestError, match=message):
        beam_search.beam_search(own, new_cache("concat", own), [1, 2], **settings)


# ---- through the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", device="cpu", block_size=4)


def directly(llm, ids, params):
    ends = () if params.ignore_eos else llm.core.eos_token_ids
    return beam_search.beam_search(
        llm.model,
        new_cache("concat", llm.model),
        ids,
        params.beam_width,
        max_tokens=params.max_tokens,
        ends={*ends, *params.stop_token_ids},
        length_penalty=params.length_penalty,
        n=params.n,
    )[0]


def test_generate_gives_the_n_best_texts_the_best_first_with_true_reasons(llm):
    ends = tuple(range(9, 259, 6))
    params = SamplingParams(beam_width=4, n=3, length_penalty=2.0, max_tokens=10, stop_token_ids=ends)
    reasons = set()
    for seed in range(5):
        ids = random_ids(6, seed)
        (answer,) = llm.generate([ids], params)
        expected = directly(llm, ids, params)
        assert [choice.token_ids for choice in answer.choices] == [list(result.token_ids) for result in expected]
        for choice, result in zip(answer.choices, expected, strict=True):
            assert choice.finish_reason == ("stop" if result.finished else "length")
            assert choice.text == llm.tokenizer.decode(choice.token_ids[: -1 if result.finished else None])
            assert choice.metrics.tokens == len(choice.token_ids) and choice.metrics.ttft >= choice.metrics.queue_time
            reasons.add(choice.finish_reason)
    assert reasons == {"stop", "length"}
    llm.cache.audit()
    assert not llm.cache.block_tables


def test_prompts_with_and_without_beams_go_side_by_side_and_come_back_in_order(llm):
    plain, beams = SamplingParams(max_tokens=7), SamplingParams(max_tokens=7, beam_width=3)
    prompts = [random_ids(5 + seed, seed) for seed in range(4)]
    mixed = [plain, beams, beams, plain]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, mixed, strict=True)]
    assert llm.generate(prompts, mixed) == alone
    assert list(alone[1].token_ids) == list(directly(llm, prompts[1], beams)[0].token_ids)


OTHER_CACHES = [{"kv_cache": "none"}, {"kv_cache": "concat"}, {"kv_cache": "static"}, {"window": 64}]


@pytest.mark.parametrize("settings", OTHER_CACHES, ids=str)
def test_llms_with_other_caches_find_the_same_texts(settings, llm, folder):
    other, params = (
        LLM(folder, dtype="float32", device="cpu", **settings),
        SamplingParams(beam_width=5, max_tokens=8),
    )
    for seed in range(3):
        ids = random_ids(9, seed)
        assert other.generate([ids], params)[0].token_ids == llm.generate([ids], params)[0].token_ids


def tight(folder, blocks):
    config = LLM(folder, dtype="float32", device="cpu", kv_cache="none").config
    token = kv_cache.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 4)
    return LLM(folder, dtype="float32", device="cpu", block_size=4, kv_cache_memory=blocks * 4 * token)


def test_a_search_waits_for_memory_that_streams_hold_and_no_stream_is_harmed(folder, llm):
    small, ids = tight(folder, 10), random_ids(10, 1)
    params = SamplingParams(beam_width=4, max_tokens=6, ignore_eos=True)
    expected = llm.generate([ids], params)[0]
    stream = small.stream(random_ids(8), SamplingParams(max_tokens=12, ignore_eos=True))
    first = next(stream)
    assert small.generate([ids], params)[0] == expected
    assert not small.core.has_work  # there was not enough for both: the stream's tokens were computed first
    pieces = [first, *stream]
    assert len(pieces) == 12 and pieces[-1].finish_reason == "length"
    small.cache.audit()
    assert not small.cache.block_tables and not small.core.has_work


def test_a_search_for_which_there_is_never_enough_memory_ends_with_the_reason_and_the_rest_goes_on(folder):
    small = tight(folder, 5)
    params = [SamplingParams(beam_width=4, n=2, max_tokens=9, ignore_eos=True), SamplingParams(max_tokens=3)]
    failed, fine = small.generate([random_ids(12), random_ids(5)], params)
    assert [choice.finish_reason for choice in failed.choices] == ["abort", "abort"] and "blocks" in failed.error
    assert len(fine.token_ids) == 3
    assert not small.cache.block_tables and small.metrics.aborted == 2


def test_searches_and_streams_in_several_threads_do_not_disturb_each_other(folder, llm):
    shared = LLM(folder, dtype="float32", device="cpu", block_size=4)
    prompts = [random_ids(6 + seed, seed) for seed in range(4)]
    kinds = [SamplingParams(beam_width=3, max_tokens=10), SamplingParams(max_tokens=10)] * 2
    expected = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, kinds, strict=True)]
    found = [None] * 4

    def ask(place):
        found[place] = shared.generate([prompts[place]], kinds[place])[0]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    shared.cache.audit()


def test_beams_are_refused_by_name_where_text_is_given_while_it_comes(llm):
    params = SamplingParams(beam_width=3)
    with pytest.raises(RequestError, match="beam_width is 3"):
        llm.stream("hello", params)
    with pytest.raises(RequestError, match="beam_width is 3"):
        llm.request("hello", params)

    async def ask():
        async with AsyncEngine(llm) as engine:
            with pytest.raises(RequestError, match="beam_width is 3"):
                engine.stream("hello", params)
            with pytest.raises(RequestError, match="beam_width is 3"):
                await engine.generate("hello", params)

    asyncio.run(ask())


def test_an_interrupted_generate_leaves_an_engine_that_works(folder):
    shared, ids = LLM(folder, dtype="float32", device="cpu", block_size=4), random_ids(9)
    params = SamplingParams(beam_width=3, max_tokens=6)
    expected, passes = shared.generate([ids], params), []

    def interrupt(*_):
        passes.append(None)
        if len(passes) == 3:
            raise KeyboardInterrupt

    hook = shared.model.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        shared.generate([ids], params)
    hook.remove()
    shared.cache.audit()
    assert not shared.cache.block_tables
    assert shared.generate([ids], params) == expected


def test_the_context_bounds_a_search(llm):
    ids = random_ids(llm.config.context_length - 3)
    (answer,) = llm.generate([ids], SamplingParams(beam_width=2, ignore_eos=True))
    assert len(answer.token_ids) == 3 and answer.finish_reason == "length"


def test_a_broken_model_ends_the_search_with_the_reason(folder):
    broken = LLM(folder, dtype="float32", device="cpu")
    broken.model.norm.weight.data[0] = math.nan
    (answer,) = broken.generate(["hello"], SamplingParams(beam_width=2))
    assert answer.finish_reason == "abort" and "NaN" in answer.error
    assert not broken.cache.block_tables


def test_an_exercise_that_is_not_written_yet_is_said_to_be_so(folder, monkeypatch):
    def blank(*_):
        raise NotImplementedError

    other = LLM(folder, dtype="float32", device="cpu")
    monkeypatch.setattr("llmfromscratch.sampling.best_beams", blank)
    with pytest.raises(NotImplementedError):
        other.generate(["hello"], SamplingParams(beam_width=2))
    assert not other.cache.block_tables
