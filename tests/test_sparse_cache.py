"""Caches that forget see exactly what they promise to see, and hold no more than they promise to hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, all_logits, random_ids, save_tiny, tiny_model

from llmfromscratch import LLM, SamplingParams, kv_cache, sparse_cache
from llmfromscratch.batch import Batch

NETWORK = tiny_model()
LAYERS = NETWORK.config.num_layers
TEXT = random_ids(40)
CUTS = st.lists(st.integers(1, 39), max_size=8).map(lambda cuts: sorted({0, *cuts, 40}))


class Masked(kv_cache.ConcatKVCache):
    """The oracle: keeps everything, and looks only where `may_see` (bool [queries, keys]) says."""

    def may_see(self, layer: int, request: int, queries: range, keys: range) -> torch.Tensor:
        raise NotImplementedError

    def looked(self, layer: int, request: int, queries: range, weights: torch.Tensor) -> None:
        """Called with the weights [heads, queries, keys]."""

    def attend(self, queries: torch.Tensor, layer: int, batch: Batch) -> torch.Tensor:
        output = torch.empty_like(queries)
        for span in batch.spans:
            keys, values = self.read(layer, span.request_id)
            group = queries.shape[1] // keys.shape[1]
            own, past = range(span.start, span.start + span.length), range(len(keys))
            scores = torch.einsum("qhd,khd->hqk", queries[span.rows], keys.repeat_interleave(group, 1))
            scores = scores / queries.shape[2] ** 0.5
            scores[:, ~self.may_see(layer, span.request_id, own, past)] = float("-inf")
            weights = scores.softmax(-1)
            self.looked(layer, span.request_id, own, weights)
            output[span.rows] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
        return output


class MaskedWindow(Masked):
    def __init__(self, window: int, sinks: int):
        super().__init__(LAYERS)
        self.window, self.sinks = window, sinks

    def may_see(self, layer, request, queries, keys):
        return torch.tensor([[k <= q and (k < self.sinks or k > q - self.window) for k in keys] for q in queries])


class SlowHeavyHitters(Masked):
    """Algorithm 1 with plain numbers: which positions are alive in each layer, and how much each was looked at."""

    def __init__(self, budget: int, recent: int):
        super().__init__(LAYERS)
        self.budget, self.recent = budget, recent
        self.alive: list[dict[int, float]] = [{} for _ in range(LAYERS)]

    def may_see(self, layer, request, queries, keys):
        alive = self.alive[layer]
        while len(alive) > self.budget:
            older = sorted(alive)[: -self.recent]
            del alive[min(older, key=alive.get)]
        alive |= dict.fromkeys(queries, 0.0)
        return torch.tensor([[k in alive and k <= q for k in keys] for q in queries])

    def looked(self, layer, request, queries, weights):
        for position in self.alive[layer]:
            self.alive[layer][position] += float(weights[:, :, position].sum())


def logits_in_chunks(cache: kv_cache.KVCache, text: list[int], edges: list[int], request: int = 0) -> torch.Tensor:
    """Logits [tokens, vocab] of every token, fed in chunks that end at the edges."""
    pieces = [
        NETWORK(Batch.of([(request, text[start:end], start)], all_logits=True), cache)
        for start, end in itertools.pairwise(edges)
    ]
    return torch.cat(pieces)


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


# ---- the window --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(edges=CUTS, window=st.integers(1, 45), sinks=st.integers(0, 5))
def test_a_window_is_full_attention_under_its_mask_for_any_chunking(edges, window, sinks):
    expected = logits_in_chunks(MaskedWindow(window, sinks), TEXT, [0, 40])
    close(logits_in_chunks(sparse_cache.SlidingWindow(LAYERS, window, sinks), TEXT, edges), expected)


def test_a_window_as_long_as_the_text_is_full_attention():
    close(logits_in_chunks(sparse_cache.SlidingWindow(LAYERS, 40, 0), TEXT, [0, 13, 40]), all_logits(NETWORK, TEXT))


def test_a_smaller_window_and_fewer_sinks_change_the_answer():
    full = all_logits(NETWORK, TEXT)[-1]
    with_sinks, without = (
        logits_in_chunks(sparse_cache.SlidingWindow(LAYERS, 8, sinks), TEXT, [0, 40])[-1] for sinks in (4, 0)
    )
    for left, right in itertools.combinations((full, with_sinks, without), 2):
        assert (left - right).abs().max() > 1e-3


def test_a_window_holds_its_sinks_and_the_newest_tokens_at_their_true_positions():
    cache = sparse_cache.SlidingWindow(LAYERS, window=6, sinks=2)
    logits_in_chunks(cache, TEXT, [0, 30, 31])
    for layer in range(LAYERS):
        # the newest query sees two sinks and six tokens, itself one of them
        assert cache.positions(layer, 0).tolist() == [0, 1, 25, 26, 27, 28, 29, 30]
    assert cache.length(0) == 31


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_a_window_never_holds_more_than_sinks_window_and_the_chunk_in_flight(chunk):
    cache = sparse_cache.SlidingWindow(LAYERS, window=6, sinks=2)
    for start in range(0, 90, chunk):
        NETWORK(Batch.of([(0, random_ids(chunk, seed=start), start)]), cache)
        for layer in range(LAYERS):
            keys, values = cache.read(layer, 0)
            assert len(keys) == len(values) <= 2 + 6 + chunk - 1


# ---- heavy hitters -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(edges=CUTS, budget=st.integers(1, 45), share=st.floats(0, 1))
def test_heavy_hitters_are_those_of_the_slow_algorithm(edges, budget, share):
    recent = max(1, round(share * budget))
    expected = logits_in_chunks(SlowHeavyHitters(budget, recent), TEXT, edges)
    close(logits_in_chunks(sparse_cache.HeavyHitters(LAYERS, budget, recent), TEXT, edges), expected)


@pytest.mark.parametrize("edges", [[0, 40], [0, 7, 8, 9, 40], list(range(41))])
def test_a_budget_longer_than_the_text_is_full_attention(edges):
    close(logits_in_chunks(sparse_cache.HeavyHitters(LAYERS, 40, 10), TEXT, edges), all_logits(NETWORK, TEXT))


def test_heavy_hitters_hold_their_budget_and_the_most_recent_are_among_it():
    cache = sparse_cache.HeavyHitters(LAYERS, budget=8, recent=3)
    logits_in_chunks(cache, TEXT, [0, 30, 31])
    chosen = [cache.positions(layer, 0).tolist() for layer in range(LAYERS)]
    for positions in chosen:
        assert positions == sorted(positions)
        assert len(positions) == 8 + 1  # the budget, and the newest query itself
        assert positions[-4:] == [27, 28, 29, 30]
    assert len({tuple(positions) for positions in chosen}) > 1, "every layer chooses for itself"


def test_what_tokens_looked_at_does_not_count_once_they_are_taken_back():
    plain, rewound = (sparse_cache.HeavyHitters(LAYERS, budget=8, recent=3) for _ in range(2))
    logits_in_chunks(plain, TEXT[:20], [0, 12, 20])
    logits_in_chunks(rewound, TEXT, [0, 12, 40])
    rewound.rewind(0, 20)
    for layer in range(LAYERS):
        counts = [cache._stored[0][layer].received.sum(dim=0) for cache in (plain, rewound)]
        close(counts[1], counts[0])


# ---- what both promise -------------------------------------------------------------------------------------------

FORGETTING = {
    "window": lambda: sparse_cache.SlidingWindow(LAYERS, window=6, sinks=2),
    "heavy hitters": lambda: sparse_cache.HeavyHitters(LAYERS, budget=8, recent=3),
}


@pytest.fixture(params=FORGETTING)
def cache(request):
    return FORGETTING[request.param]()


def test_requests_of_a_ragged_batch_do_not_touch_each_other(cache):
    texts = {request: random_ids(30, seed=request) for request in (1, 2, 3)}
    alone = {}
    for request, text in texts.items():
        alone[request] = logits_in_chunks(cache, text, [0, 12, 13, 20, 30], request)
        cache.release(request)
    for start, end in itertools.pairwise([0, 12, 13, 20, 30]):
        parts = [(request, text[start:end], start) for request, text in texts.items()]
        together = NETWORK(Batch.of(parts), cache)
        close(together, torch.stack([alone[request][end - 1] for request in texts]))


def test_tokens_that_were_taken_back_leave_no_trace(cache):
    expected = logits_in_chunks(type(cache)(*parameters(cache)), TEXT, [0, 20, 21, 22, 23, 40])
    found = [logits_in_chunks(cache, TEXT[:20], [0, 20])]
    for start, end in itertools.pairwise([20, 21, 22, 23, 40]):
        # as speculative decoding does: the right tokens and wrong ones behind them, which are then taken back
        wrong = [(TEXT[start] + step) % VOCAB for step in (1, 2, 3)]
        pass_of_both = Batch.of([(0, TEXT[start:end] + wrong, start)], all_logits=True)
        found.append(NETWORK(pass_of_both, cache)[: end - start])
        cache.rewind(0, 3)
        assert cache.length(0) == end
    close(torch.cat(found), expected)


def test_an_interrupted_pass_leaves_no_trace(cache):
    expected = logits_in_chunks(type(cache)(*parameters(cache)), TEXT, [0, 20, 30, 40])
    found = logits_in_chunks(cache, TEXT[:30], [0, 20, 30])
    handle = NETWORK.layers[LAYERS - 1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            NETWORK(Batch.of([(0, random_ids(9, seed=9), 30)]), cache)
    finally:
        handle.remove()
    assert cache.length(0) == 30
    last = NETWORK(Batch.of([(0, TEXT[30:], 30)], all_logits=True), cache)
    close(torch.cat([found, last]), expected)


def interrupt(*_):
    raise KeyboardInterrupt


def parameters(cache) -> tuple[int, int, int]:
    window = isinstance(cache, sparse_cache.SlidingWindow)
    return (LAYERS, cache.window, cache.sinks) if window else (LAYERS, cache.budget, cache.recent)


def test_what_is_forgotten_cannot_be_gone_back_to_and_a_refusal_changes_nothing(cache):
    logits_in_chunks(cache, TEXT, [0, 20, 30])
    before = cache.positions(0, 0).tolist()
    cache.rewind(0, 0)
    with pytest.raises(ValueError, match="cannot go back to 19 tokens: what the next token would see was forgotten"):
        cache.rewind(0, 11)
    with pytest.raises(ValueError, match="cannot rewind 31 tokens"):
        cache.rewind(0, 31)
    with pytest.raises(ValueError, match="cannot rewind -1 tokens"):
        cache.rewind(0, -1)
    assert (cache.length(0), cache.positions(0, 0).tolist()) == (30, before)
    cache.rewind(0, 10)
    assert cache.length(0) == 20


def test_a_window_that_has_forgotten_nothing_can_go_back_all_the_way():
    cache = sparse_cache.SlidingWindow(LAYERS, window=30, sinks=2)
    logits_in_chunks(cache, TEXT[:20], [0, 5, 10, 20])
    cache.rewind(0, 18)
    close(NETWORK(Batch.of([(0, TEXT[2:4], 2)], all_logits=True), cache), all_logits(NETWORK, TEXT[:4])[2:])


def test_a_fork_goes_on_from_the_same_tokens_and_each_goes_its_own_way(cache):
    logits_in_chunks(cache, TEXT[:25], [0, 25])
    cache.fork(0, 1)
    own = NETWORK(Batch.of([(0, random_ids(9, seed=5), 25)]), cache)
    other = NETWORK(Batch.of([(1, TEXT[25:34], 25)]), cache)
    fresh = type(cache)(*parameters(cache))
    close(other[0], logits_in_chunks(fresh, TEXT[:34], [0, 25, 34])[-1])
    assert (own - other).abs().max() > 1e-3
    cache.release(0)
    assert (cache.length(0), cache.length(1)) == (0, 34)
    with pytest.raises(ValueError, match="request 1 is in the cache already"):
        cache.fork(1, 1)


def test_nothing_is_shared_or_reserved_and_unknown_requests_are_nothing(cache):
    assert cache.match_prefix(3, TEXT) == 0
    cache.reserve(3, 10**9)
    cache.release(3)
    cache.rewind(3, 0)
    assert cache.length(3) == 0
    with pytest.raises(KeyError):
        cache.read(0, 3)
    with pytest.raises(ValueError, match="request 3 goes on at 5, but the cache holds 0"):
        NETWORK(Batch.of([(3, [1], 5)]), cache)
    assert cache.length(3) == 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sparse_cache.SlidingWindow(LAYERS, 0), "a window of 0 tokens behind 4 sinks: give at least 1"),
        (lambda: sparse_cache.SlidingWindow(LAYERS, 4, -1), "behind -1 sinks"),
        (lambda: sparse_cache.HeavyHitters(LAYERS, 4, 5), "5 recent tokens of a budget of 4"),
        (lambda: sparse_cache.HeavyHitters(LAYERS, 4, 0), "0 recent tokens of a budget of 4"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_the_engine_answers_through_a_window_as_the_masked_model_does(tmp_path):
    folder = save_tiny(tmp_path)
    llm = LLM(folder, dtype="float64", device="cpu", window=8)
    prompt, params = [5 + i % 90 for i in range(30)], SamplingParams(max_tokens=12, ignore_eos=True)
    answer = llm.generate(prompt, params)[0].token_ids
    layers = llm.config.num_layers
    llm.cache = MaskedWindow(8, 4)
    assert layers == LAYERS
    assert llm.generate(prompt, params)[0].token_ids == answer
    assert LLM(folder, dtype="float64", device="cpu").generate(prompt, params)[0].token_ids != answer
