"""Every attention backend against sums over the visible keys one by one, over any cache, batch and mask."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_ids, save_tiny

from llmfromscratch import (
    LLM,
    SamplingParams,
    attention,
    attention_backends,
    attention_flash,
    attention_sdpa,
    compiled_decode,
    kv_cache,
    learner_engine,
    masks,
    optimization,
    sparse_cache,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

KINDS = ("auto", "plain", "compiled", "tiled", "sdpa")  # those that any machine has
MASKS = [
    None,
    masks.sliding(5),
    masks.dilated(3, 4) | masks.global_tokens(2),
    masks.blocks(8, 1) & masks.sliding(12),
    masks.random_blocks(4, 2) | masks.sliding(1),
]
TOLERANCE = {torch.float64: (0, 1e-12), torch.float32: (0, 3e-6), torch.bfloat16: (2**-6, 2e-2)}


def layout(kv_heads: int, head_dim: int, dtype: torch.dtype) -> kv_cache.CacheLayout:
    return kv_cache.CacheLayout(1, kv_heads, head_dim, dtype, (torch.device("cpu"),))


def new_cache(kind: str, shape: kv_cache.CacheLayout, tokens: int = 400) -> kv_cache.KVCache:
    if kind == "concat":
        return kv_cache.ConcatKVCache(1)
    if kind == "static":
        return kv_cache.StaticKVCache(shape, 6, tokens)
    return kv_cache.PagedKVCache(shape, tokens, int(kind.removeprefix("paged ")), prefix_sharing=False)


def ready(cache: kv_cache.KVCache, parts, shape: kv_cache.CacheLayout, seed: int = 0) -> Batch:
    """The cache with (start, new) tokens of each request written, the new ones in the batch that is returned."""
    generator = torch.Generator().manual_seed(seed)
    before = Batch.of([(i, [7] * start, 0) for i, (start, _) in enumerate(parts) if start])
    batch = Batch.of([(i, [7] * new, start) for i, (start, new) in enumerate(parts)])
    for each in (before, batch):
        size = (2, len(each.token_ids), shape.num_kv_heads, shape.head_dim)
        if len(each.token_ids):
            cache.write(0, *torch.randn(size, generator=generator, dtype=torch.float64).to(shape.dtype), each)
    return batch


def queries_for(batch: Batch, heads: int, shape: kv_cache.CacheLayout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    size = (len(batch.token_ids), heads, shape.head_dim)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(shape.dtype)


def one_by_one(queries, batch: Batch, cache, mask) -> torch.Tensor:
    """In float64, each query alone over a list of the keys that it may see."""
    output = torch.empty(queries.shape, dtype=torch.float64)
    for span in batch.spans:
        keys, values = (part.double().clone() for part in cache.read(0, span.request_id))
        group = queries.shape[1] // keys.shape[1]
        for row in range(span.first_row, span.first_row + span.length):
            position = span.start + row - span.first_row
            seen = [key for key in range(position + 1) if mask is None or bool(mask.visible(position, key))]
            for head in range(queries.shape[1]):
                scores = keys[seen, head // group] @ queries[row, head].double() / math.sqrt(queries.shape[2])
                powers = (scores - scores.max()).exp()
                output[row, head] = powers @ values[seen, head // group] / powers.sum()
    return output


def masked(kind: str, mask):
    return kind if mask is None else attention_backends.Masked(kind, mask)


def expect_equal(kind, cache_kind, parts, mask, dtype, kv_heads=2, group=3, head_dim=8):
    shape = layout(kv_heads, head_dim, dtype)
    cache = new_cache(cache_kind, shape)
    batch = ready(cache, parts, shape)
    queries = queries_for(batch, kv_heads * group, shape)
    found = attention_backends.attend(queries, 0, batch, cache, masked(kind, mask))
    assert found.dtype == dtype and found.shape == queries.shape
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), one_by_one(queries, batch, cache, mask), rtol=relative, atol=absolute)


# ---- equal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["paged 4", "static", "concat"])
@settings(deadline=None, max_examples=12)
@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 7, 20])), min_size=1, max_size=4),
    mask=st.sampled_from(MASKS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    group=st.integers(1, 3),
)
def test_any_batch_over_any_cache_under_any_mask_is_the_sum_over_the_visible_keys(
    kind, cache, parts, mask, dtype, group
):
    expect_equal(kind, cache, parts, mask, dtype, group=group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_texts_of_several_tiles_are_the_same_sums(kind, mask):
    expect_equal(kind, "paged 16", [(150, 1), (100, 33), (0, 130)], mask, torch.float32, kv_heads=1, group=2)


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_neither_overflow_nor_vanish(kind):
    shape = layout(1, 4, torch.float32)
    cache = new_cache("paged 4", shape)
    batch = ready(cache, [(90, 3), (70, 1)], shape)
    queries = 60 * queries_for(batch, 2, shape)
    found = attention_backends.attend(queries, 0, batch, cache, masked(kind, MASKS[2]))
    torch.testing.assert_close(found.double(), one_by_one(queries, batch, cache, MASKS[2]), rtol=0, atol=1e-4)


# ---- what is not read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_kind", ["paged 4", "static"])
def test_compiled_decode_steps_do_not_touch_what_nobody_sees(cache_kind):
    mask, shape = masks.dilated(2, 5) | masks.global_tokens(1), layout(1, 4, torch.float32)
    cache = new_cache(cache_kind, shape)
    batch = ready(cache, [(60, 1), (31, 1)], shape)
    queries = queries_for(batch, 2, shape)
    expected = attention_backends.attend(queries, 0, batch, cache, masked("plain", mask))
    for request, length in ((0, 61), (1, 32)):
        keys, values = cache.read(0, request)  # views here, as the blocks are neighbours
        hidden = sorted(set(range(length)) - set(masks.seen_from(mask, length - 1).tolist()))
        keys[hidden], values[hidden] = float("nan"), float("nan")
    found = attention_backends.attend(queries, 0, batch, cache, masked("compiled", mask))
    torch.testing.assert_close(found, expected)
    plan = compiled_decode.Plan.of(batch, cache, mask)
    assert plan.ends.tolist() == [6, 12]  # 5 in the window and token 0, of each


def test_tiles_that_no_row_sees_are_skipped(monkeypatch):
    folded = []
    own = optimization.fold_tile
    monkeypatch.setattr(optimization, "fold_tile", lambda *parts: folded.append(1) or own(*parts))
    expect_equal("tiled", "paged 16", [(300, 4)], masks.sliding(20) | masks.global_tokens(3), torch.float64)
    assert len(folded) == 2  # of 5: the first, and the one with the newest tokens
    folded.clear()
    expect_equal("tiled", "paged 16", [(300, 4)], None, torch.float64)
    assert len(folded) == 5


# ---- which way it goes -------------------------------------------------------------------------------------------


def asked_of_torch(monkeypatch, kind, parts, dtype, mask=None) -> list[tuple[int, bool]]:
    """The calls of torch's attention: new tokens, and whether the whole square below the diagonal was asked for."""
    calls = []
    own = torch.nn.functional.scaled_dot_product_attention

    def noted(query, *rest, **settings):
        calls.append((query.shape[-2], settings["is_causal"]))
        return own(query, *rest, **settings)

    monkeypatch.setattr(attention_sdpa.F, "scaled_dot_product_attention", noted)
    expect_equal(kind, "paged 16", parts, mask, dtype, kv_heads=1, group=1)
    return calls


def test_torchs_attention_gets_one_half_precision_query_of_nobody(monkeypatch):
    assert asked_of_torch(monkeypatch, "sdpa", [(20, 1), (0, 9), (5, 4)], torch.bfloat16) == [(9, True), (4, False)]
    assert asked_of_torch(monkeypatch, "sdpa", [(20, 1)], torch.float32) == [(1, False)]
    assert asked_of_torch(monkeypatch, "sdpa", [(0, 9)], torch.float32, masks.sliding(3)) == [(9, False)]


def test_auto_takes_torchs_attention_for_prompts_where_it_was_measured_to_be_faster(monkeypatch):
    assert asked_of_torch(monkeypatch, "auto", [(0, 30)], torch.float32) == [(30, True)]
    assert asked_of_torch(monkeypatch, "auto", [(9, 30), (40, 1)], torch.float32) == [(30, False)]
    assert asked_of_torch(monkeypatch, "auto", [(0, 30)], torch.bfloat16) == []
    monkeypatch.setattr(attention_sdpa, "_MANY_SCORES", 29 * 30)
    assert asked_of_torch(monkeypatch, "auto", [(0, 30)], torch.bfloat16) == [(30, True)]
    assert asked_of_torch(monkeypatch, "plain", [(0, 30)], torch.float32) == []


def test_a_learners_optimization_ends_the_turn_of_their_attention(tmp_path, monkeypatch):
    for name in ("attention", "optimization"):
        source = learner_engine.reference_path(name).read_text(encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    for names, plain in ((("attention",), True), (("attention", "optimization"), False), (("optimization",), False)):
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
        try:
            learner_engine.activate(folder)
            assert attention_backends.is_learners() is plain
        finally:
            learner_engine.deactivate()
    assert not attention_backends.is_learners()


def test_a_learners_tiles_are_at_work_when_asked_for(tmp_path):
    source = learner_engine.reference_path("optimization").read_text(encoding="utf-8")
    changed = source.replace(
        "    output = (mixed / total.unsqueeze(-1))", "    output = 0 * (mixed / total.unsqueeze(-1))"
    )
    assert changed != source
    (tmp_path / "optimization.py").write_text(changed, encoding="utf-8")
    shape = layout(1, 4, torch.float64)
    cache = new_cache("paged 4", shape)
    batch = ready(cache, [(5, 3)], shape)
    try:
        learner_engine.activate(tmp_path)
        found = attention_backends.attend(queries_for(batch, 2, shape), 0, batch, cache, "tiled")
        assert not found.any()
    finally:
        learner_engine.deactivate()


# ---- refused -----------------------------------------------------------------------------------------------------


def refusal(kind: str, cache, mask=None) -> str:
    layers = [SimpleNamespace(self_attn=SimpleNamespace())]
    attention_backends.use(kind, layers, mask)
    with pytest.raises(RequestError) as caught:
        attention_backends.prepare(layers, cache)
    return str(caught.value)


def test_what_cannot_be_had_is_refused_in_a_sentence_that_says_why():
    shape = layout(1, 4, torch.float32)
    paged = kv_cache.PagedKVCache(shape, 4, 4)
    for kind, cache, sentence in (
        ("flash", paged, 'attention="flash" cannot be had: it computes on CUDA alone'),
        ("flash", kv_cache.ConcatKVCache(1), "it reads a paged or a static cache, and this one is a ConcatKVCache"),
        ("compiled", kv_cache.NoKVCache(1), "it reads a paged or a static cache in float32 or bfloat16 on the CPU"),
        ("tiled", sparse_cache.SlidingWindow(1, 8), "a SlidingWindow computes its attention itself"),
        ("sdpa", sparse_cache.HeavyHitters(1, 8, 8), "a HeavyHitters computes its attention itself"),
    ):
        said = refusal(kind, cache)
        assert sentence in said and said.endswith("Without the argument, the best is taken that can.")


def test_the_kinds_are_named_when_one_is_not_known():
    expected = "attention is 'xformers'; expected one of auto, plain, compiled, tiled, sdpa, flash, triton."
    with pytest.raises(RequestError, match=expected):
        LLM("nowhere", attention="xformers")


def test_a_cache_that_a_backend_cannot_serve_goes_the_plain_way_in_the_middle_of_things():
    """Scoring a text runs the engine's model over a cache of its own."""
    expect_equal("compiled", "concat", [(5, 1), (0, 4)], MASKS[1], torch.float64)
    expect_equal("flash", "concat", [(5, 1), (0, 4)], MASKS[1], torch.float64)


@pytest.mark.parametrize("kind", ["tiled", "sdpa", "plain"])
def test_an_engine_says_the_same_by_every_backend(kind, tmp_path):
    folder = save_tiny(tmp_path)
    prompts = [random_ids(30, seed=1), random_ids(11, seed=2)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    said = [
        [out.token_ids for out in LLM(folder, dtype="float64", device="cpu", attention=each).generate(prompts, params)]
        for each in ("auto", kind)
    ]
    assert said[0] == said[1]


# ---- flash-attn, by a stand-in -----------------------------------------------------------------------------------


def stand_in(query, k_cache, v_cache, *, cache_seqlens, causal, window_size, block_table=None, cache_batch_idx=None):
    """What flash_attn_with_kvcache does, from its documentation, for what it is asked here: query [batch, new, heads,
    head_dim]; caches [blocks, block size, kv_heads, head_dim] with a block_table, else [rows, length, kv_heads,
    head_dim]; causal at the lower right; window_size: tokens to the left and right, -1 for any."""
    assert causal and window_size[1] in (0, -1) and cache_seqlens.dtype == torch.int32
    output = torch.empty_like(query)
    for i, length in enumerate(cache_seqlens.tolist()):
        if block_table is not None:
            keys, values = (part[block_table[i].long()].flatten(0, 1)[:length] for part in (k_cache, v_cache))
        else:
            keys, values = (part[cache_batch_idx[i].item()][:length] for part in (k_cache, v_cache))
        back = torch.arange(length - query.shape[1], length)[:, None] - torch.arange(length)
        visible = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        output[i] = attention.grouped_attention(query[i], keys, values, visible)[0]
    return output


@pytest.fixture
def flash(monkeypatch):
    """As if the package were there, and its kernel could compute on the CPU, in any dtype."""
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = stand_in
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    attention_flash._kernel.cache_clear()
    yield module
    attention_flash._kernel.cache_clear()


@pytest.mark.parametrize("cache_kind", ["paged 4", "paged 256", "static"])
@pytest.mark.parametrize("mask", [None, masks.sliding(6)], ids=repr)
def test_flash_attn_is_called_as_its_documentation_says(flash, cache_kind, mask):
    shape = layout(2, 8, torch.float32)
    cache = new_cache(cache_kind, shape, tokens=40)
    batch = ready(cache, [(9, 1), (0, 13), (21, 1), (7, 4)], shape)
    queries = queries_for(batch, 6, shape)
    found = attention_flash.attend(queries, 0, batch, cache, mask)
    torch.testing.assert_close(found.double(), one_by_one(queries, batch, cache, mask), rtol=0, atol=3e-6)


def test_flash_attn_says_what_it_lacks_one_thing_after_the_other(flash, monkeypatch):
    def of(device="cuda", dtype=torch.bfloat16, block_size=256, mask=None):
        cache = kv_cache.PagedKVCache(layout(1, 8, torch.float32), 1, block_size)
        cache.storage = [SimpleNamespace(device=torch.device(device), dtype=dtype)]
        return attention_flash.lacking(cache, mask)

    assert of() is None and of(mask=masks.sliding(8)) is None
    assert "computes on CUDA alone" in of(device="cpu")
    assert "in half precision, and the cache is in torch.float32" in of(dtype=torch.float32)
    assert 'give block_size=256, or kv_cache="static"' in of(block_size=16)
    assert "no mask like sliding(8) | global_tokens(1)" in of(mask=masks.sliding(8) | masks.global_tokens(1))
    assert "no mask like dilated(2, 8)" in of(mask=masks.dilated(2, 8))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention_flash._kernel.cache_clear()
    assert "flash_attn cannot be imported (ModuleNotFoundError" in of()
