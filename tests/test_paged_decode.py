"""The compiled kernel sees what plain attention in float64 sees, wherever keys lie; without it all goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ours, transformers_model

from llmfromscratch import (
    LLM,
    SamplingParams,
    attention,
    attention_backends,
    attention_sdpa,
    compiled_decode,
    doctor,
    kv_cache,
    learner_engine,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

ROOT = Path(__file__).parent.parent
TOLERANCE = {torch.float32: (0, 2e-6), torch.bfloat16: (2**-8, 2e-6)}  # relative, absolute; bfloat16 is rounded to


def layout(kv_heads: int, head_dim: int, dtype: torch.dtype, layers: int = 1) -> kv_cache.CacheLayout:
    return kv_cache.CacheLayout(layers, kv_heads, head_dim, dtype, (torch.device("cpu"),) * layers)


def scattered(lengths: list[int], block_size: int, shape: kv_cache.CacheLayout, seed: int = 0) -> kv_cache.PagedKVCache:
    """A cache in whose unused places there is NaN, with so many tokens of each request in blocks of random order."""
    blocks = sum(-(-length // block_size) for length in lengths) + 2
    cache = kv_cache.PagedKVCache(shape, blocks, block_size, prefix_sharing=False)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    cache.allocator.free.clear()
    cache.allocator.free.extend(order)
    return filled(cache, lengths, shape, seed)


def in_rows(lengths: list[int], shape: kv_cache.CacheLayout, seed: int = 0) -> kv_cache.StaticKVCache:
    return filled(kv_cache.StaticKVCache(shape, len(lengths) + 1, max(lengths) + 3), lengths, shape, seed)


def filled(cache, lengths, shape, seed, scale=1.0):
    """Writes all tokens but the newest of each request in one pass, and the newest in another."""
    for stored in cache.storage:
        stored.fill_(float("nan"))
    generator = torch.Generator().manual_seed(seed)
    long = [(i, [7] * (length - 1), 0) for i, length in enumerate(lengths) if length > 1]
    for parts in (long, steps(lengths)):
        if parts:
            batch = Batch.of(parts)
            for layer in range(shape.num_layers):
                size = (2, len(batch.token_ids), shape.num_kv_heads, shape.head_dim)
                keys_and_values = torch.randn(size, generator=generator, dtype=torch.float64) * scale
                cache.write(layer, *keys_and_values.to(shape.dtype), batch)
    return cache


def steps(lengths: list[int]) -> list[tuple[int, list[int], int]]:
    return [(i, [7], length - 1) for i, length in enumerate(lengths)]


def queries_for(batch: Batch, heads: int, shape: kv_cache.CacheLayout, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    size = (len(batch.token_ids), heads, shape.head_dim)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(shape.dtype)


def plainly(queries: torch.Tensor, batch: Batch, cache, layer: int = 0) -> torch.Tensor:
    """The same in float64, one request after the other, over what the cache's own `read` gives."""
    rows = []
    for span in batch.spans:
        keys, values = (part.double() for part in cache.read(layer, span.request_id))
        visible = attention.causal_mask(span.start, span.length)
        rows.append(attention.grouped_attention(queries[span.rows].double(), keys, values, visible)[0])
    return torch.cat(rows)


def expect_equal(lengths, group, cache, shape, scale=1.0):
    batch = Batch.of(steps(lengths))
    queries = queries_for(batch, shape.num_kv_heads * group, shape, scale)
    found = compiled_decode.attend(queries, 0, batch, cache)
    assert found.dtype == shape.dtype and found.shape == queries.shape
    relative, absolute = TOLERANCE[shape.dtype]
    expected = plainly(queries, batch, cache)
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute * max(1, scale))


# ---- equal to plain attention ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 200)), min_size=1, max_size=6),
    block_size=st.integers(1, 32),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 4, 10, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 5),
)
def test_any_requests_in_any_blocks_equal_plain_attention(
    lengths, block_size, group, kv_heads, head_dim, dtype, threads, seed
):
    shape = layout(kv_heads, head_dim, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expect_equal(lengths, group, scattered(lengths, block_size, shape, seed), shape)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 3000])
def test_long_texts_equal_plain_attention_in_blocks_and_in_rows(length, dtype):
    shape = layout(3, 64, dtype)
    expect_equal([length], 3, scattered([length], 16, shape), shape)
    expect_equal([length], 3, in_rows([length], shape), shape)
    expect_equal([5, length, 2], 3, in_rows([5, length, 2], shape), shape)


@pytest.mark.parametrize("pieces", range(1, 12))
@pytest.mark.parametrize("lengths", [[1], [40], [1, 1, 1], [100, 1, 7, 64]])
def test_wherever_the_work_is_cut_the_parts_make_the_whole(lengths, pieces, monkeypatch):
    own = compiled_decode.Plan.of

    def cut(batch, cache, *mask):
        plan = own(batch, cache, *mask)
        return compiled_decode.Plan(**{**vars(plan), "pieces": pieces})

    monkeypatch.setattr(compiled_decode.Plan, "of", cut)
    if compiled_decode.max_threads() == 1:
        pytest.skip("Numba has no thread pool here that the kernel uses")
    shape = layout(2, 8, torch.float32)
    expect_equal(lengths, 3, scattered(lengths, 4, shape), shape)


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e3])
def test_huge_and_tiny_scores_neither_overflow_nor_vanish(scale):
    shape = layout(2, 16, torch.float32)
    cache = filled(kv_cache.PagedKVCache(shape, 40, 8), [150, 3], shape, seed=2)
    expect_equal([150, 3], 2, cache, shape, scale)


def test_a_score_that_grows_from_tile_to_tile_mends_what_was_summed_before():
    shape = layout(1, 4, torch.float32)
    cache = kv_cache.PagedKVCache(shape, 20, 16)
    keys = torch.linspace(-80, 80, 300)[:, None, None].expand(300, 1, 4).contiguous()
    for positions in (slice(0, 299), slice(299, 300)):
        batch = Batch.of([(0, [7] * len(keys[positions]), positions.start)])
        cache.write(0, keys[positions], keys[positions].sin(), batch)
    queries = torch.ones(1, 2, 4)
    found = compiled_decode.attend(queries, 0, batch, cache)
    torch.testing.assert_close(found.double(), plainly(queries, batch, cache), rtol=0, atol=1e-5)


def test_a_nan_that_was_stored_shows_and_one_in_an_unused_place_does_not():
    shape = layout(2, 8, torch.float32)
    cache = scattered([21, 30], 8, shape)
    batch = Batch.of(steps([21, 30]))
    queries = queries_for(batch, 4, shape)
    assert not compiled_decode.attend(queries, 0, batch, cache).isnan().any()
    for part in cache.read(0, 1):
        assert not part.isnan().any()
    slot = int(kv_cache.slots_of(cache.block_tables[1], 3, 1, 8))
    cache.storage[0].flatten(2, 3)[0, :, slot] = float("nan")
    found = compiled_decode.attend(queries, 0, batch, cache)
    assert found[1].isnan().all() and not found[0].isnan().any()


def test_powers_of_two_are_right_to_a_few_units_in_the_last_place():
    from llmfromscratch.kernels import paged_decode

    exponents = np.concatenate([np.linspace(-125.9, 0, 20001), -np.geomspace(1e-9, 1, 100)]).astype(np.float32)
    found = np.array([paged_decode.power_of_two(x) for x in exponents], dtype=np.float64)
    assert np.abs(found / 2.0 ** exponents.astype(np.float64) - 1).max() < 2e-7
    assert paged_decode.power_of_two(np.float32(-1e30)) < 2e-38
    assert np.isnan(paged_decode.power_of_two(np.float32("nan")))


def test_prompts_in_the_same_batch_go_through_plain_attention():
    shape = layout(2, 8, torch.float32)
    batch = Batch.of([(0, [5], 9), (2, [5] * 6, 0), (1, [5], 4)])
    generator = torch.Generator().manual_seed(1)
    cache = filled(kv_cache.PagedKVCache(shape, 20, 4), [9, 4], shape, seed=3)
    cache.write(0, *torch.randn(2, 8, 2, 8, generator=generator), batch)
    queries = queries_for(batch, 6, shape)
    found = compiled_decode.attend(queries, 0, batch, cache)
    torch.testing.assert_close(found.double(), plainly(queries, batch, cache), rtol=0, atol=2e-6)


def test_the_next_pass_sees_one_token_more_and_a_new_request_in_an_old_row_sees_its_own():
    for cache in (kv_cache.PagedKVCache(layout(1, 4, torch.float32, 2), 9, 2),
                  kv_cache.StaticKVCache(layout(1, 4, torch.float32, 2), 2, 9)):  # fmt: skip
        generator = torch.Generator().manual_seed(4)
        for request, start in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (1, 2)):
            if (request, start) == (1, 0):
                cache.release(0)
            batch = Batch.of([(request, [5] * (4 if (request, start) == (0, 3) else 1), 0 if start == 3 else start)])
            for layer in range(2):
                cache.write(layer, *torch.randn(2, len(batch.token_ids), 1, 4, generator=generator), batch)
                if len(batch.token_ids) == 1:
                    queries = torch.randn(1, 2, 4, generator=generator)
                    found = compiled_decode.attend(queries, layer, batch, cache)
                    expected = plainly(queries, batch, cache, layer)
                    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_a_plan_serves_its_own_batch_and_is_not_kept_for_longer_than_the_pass():
    shape = layout(1, 4, torch.float32)
    for cache in (scattered([12, 5], 4, shape), in_rows([12, 5], shape)):
        for part in steps([12, 5]):  # both were written in the newest pass; each is asked for alone
            batch = Batch.of([part])
            queries = queries_for(batch, 2, shape)
            found = compiled_decode.attend(queries, 0, batch, cache)
            torch.testing.assert_close(found.double(), plainly(queries, batch, cache), rtol=0, atol=2e-6)
        for _ in range(3):
            cache.rewind(0, 1)
            batch = Batch.of([(0, [7], 11)])
            cache.write(0, *torch.randn(2, 1, 1, 4), batch)
            compiled_decode.attend(queries_for(batch, 2, shape), 0, batch, cache)
        assert len(cache.gathers._made) == 1


# ---- who is asked ------------------------------------------------------------------------------------------------


def asked(monkeypatch, cache, parts, kind="auto", dtype=torch.float32) -> str:
    """Which backend serves a batch."""
    seen = []
    for module in (compiled_decode, attention_backends.decode_attention, attention_sdpa, attention):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "attend", lambda *_, name=name: seen.append(name))
    batch = Batch.of(parts)
    attention_backends.attend(torch.zeros(len(batch.token_ids), 2, 4, dtype=dtype), 0, batch, cache, kind)
    return seen[0]


def test_auto_compiles_decode_steps_over_blocks_and_rows_and_leaves_the_rest_to_torch(monkeypatch):
    shape = layout(1, 4, torch.float32)
    paged, rows = kv_cache.PagedKVCache(shape, 4, 4), kv_cache.StaticKVCache(shape, 2, 4)
    one, two, prompt = [(0, [5], 3)], [(0, [5], 3), (1, [5], 2)], [(0, [5, 6], 0)]
    for cache in (paged, rows):
        assert asked(monkeypatch, cache, one) == asked(monkeypatch, cache, two) == "compiled_decode"
        assert asked(monkeypatch, cache, prompt) == "attention_sdpa"
        assert asked(monkeypatch, cache, prompt, "compiled") == "attention"
    assert asked(monkeypatch, paged, one, "plain") == "attention"
    assert asked(monkeypatch, paged, two, "plain") == "decode_attention"
    assert asked(monkeypatch, kv_cache.ConcatKVCache(1), one) == "attention"


def test_other_dtypes_and_caches_derived_from_ours_are_left_alone(monkeypatch):
    class Own(kv_cache.PagedKVCache):
        pass

    assert asked(monkeypatch, Own(layout(1, 4, torch.float32), 4, 4), [(0, [5], 3)]) == "attention"
    for dtype in (torch.float64, torch.float16):
        cache = kv_cache.PagedKVCache(layout(1, 4, dtype), 4, 4)
        assert asked(monkeypatch, cache, [(0, [5], 3)], dtype=dtype) == "attention"


@pytest.mark.parametrize("name", ["attention", "kv_cache"])
def test_with_a_learners_module_the_learners_code_is_at_work(name, tmp_path, monkeypatch):
    source = learner_engine.reference_path(name).read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    try:
        learner_engine.activate(tmp_path)
        cache = kv_cache.PagedKVCache(layout(1, 4, torch.float32), 4, 4)
        assert asked(monkeypatch, cache, [(0, [5], 3)]) == "attention"
        assert asked(monkeypatch, cache, [(0, [5], 3)], "compiled") == "compiled_decode"
    finally:
        monkeypatch.undo()
        learner_engine.deactivate()


def test_a_backend_that_is_not_known_and_one_that_cannot_serve_are_refused():
    with pytest.raises(RequestError, match="attention is 'fast'; expected one of auto, plain, compiled"):
        LLM("nowhere", attention="fast")
    with pytest.raises(RequestError, match='attention="compiled" cannot be had: it reads a paged or a static cache'):
        prepare("compiled", kv_cache.ConcatKVCache(1))
    half = kv_cache.PagedKVCache(layout(1, 4, torch.float16), 4, 4)
    with pytest.raises(RequestError, match='attention="compiled" cannot be had: it reads a paged or a static cache'):
        prepare("compiled", half)
    prepare("auto", half)


def prepare(kind: str, cache) -> None:
    """As the engine does for a model of one layer."""
    layers = [SimpleNamespace(self_attn=SimpleNamespace())]
    attention_backends.use(kind, layers)
    attention_backends.prepare(layers, cache)


@pytest.fixture
def without_numba(monkeypatch):
    """As where Numba is not installed, or does not suit the other packages."""
    compiled_decode.unavailable.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setitem(sys.modules, "llmfromscratch.kernels.paged_decode", None)
    yield
    compiled_decode.unavailable.cache_clear()


def test_without_numba_pytorch_computes_and_the_doctor_says_so_in_a_sentence(without_numba, monkeypatch):
    cache = kv_cache.PagedKVCache(layout(1, 4, torch.float32), 4, 4)
    with pytest.raises(RequestError, match='attention="compiled" cannot be had: Numba cannot compile'):
        prepare("compiled", cache)
    prepare("auto", cache)
    check = doctor.check_kernels()
    assert check.status == "warn" and check.finding.endswith("so PyTorch computes it.")
    assert asked(monkeypatch, cache, [(0, [5], 3)]) == "attention"


def test_with_numba_the_doctor_says_how_many_threads_there_are():
    check = doctor.check_kernels()
    assert check.status == "ok" and "Numba compiles layers and decode attention, for up to" in check.finding


# ---- threads and processes ---------------------------------------------------------------------------------------


def test_the_kernel_leaves_torchs_and_numbas_numbers_of_threads_as_they_were():
    import numba

    shape = layout(2, 8, torch.float32)
    cache = scattered([400], 8, shape)
    before = torch.get_num_threads(), numba.get_num_threads()
    expect_equal([400], 2, cache, shape)
    assert (torch.get_num_threads(), numba.get_num_threads()) == before


def test_two_threads_of_python_may_attend_at_the_same_time():
    shape = layout(3, 16, torch.float32)
    caches = [scattered([300 + i], 8, shape, seed=i) for i in range(2)]
    failures: list[BaseException] = []

    def attend(i: int) -> None:
        try:
            for _ in range(200):
                caches[i].gathers.clear()
                expect_equal([300 + i], 3, caches[i], shape)
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    torch.set_num_threads(2)
    threads = [threading.Thread(target=attend, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


SCRIPT = """
import torch
from llmfromscratch import compiled_decode, kv_cache
from llmfromscratch.batch import Batch
print(compiled_decode.unavailable(torch.float32), compiled_decode.max_threads())
"""


def run(script: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_where_numba_has_only_its_workqueue_one_thread_computes():
    assert run(SCRIPT, NUMBA_THREADING_LAYER="workqueue") == "None 1"


@pytest.mark.slow
def test_where_nothing_can_be_kept_on_disk_the_kernel_is_compiled_all_the_same(tmp_path):
    """As in an installation that cannot be written, for a user without a cache folder."""
    folder = "from numba.core import caching; caching.CacheImpl._locator_classes = []\n"
    assert run(folder + SCRIPT).startswith("None ")


@pytest.mark.slow
def test_importing_the_package_and_its_model_does_not_import_numba():
    assert run("import sys, llmfromscratch.engine; print('numba' in sys.modules)") == "False"


# ---- whole models ------------------------------------------------------------------------------------------------


def test_a_tiny_model_in_float32_says_what_it_says_plainly():
    network = ours(transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon"), torch.float32)
    shape = kv_cache.CacheLayout.of(network.config)
    said = {}
    for kind in ("plain", "compiled"):
        attention_backends.use(kind, network.layers)
        for name, cache in (
            ("paged", kv_cache.PagedKVCache(shape, 40, 3)),
            ("rows", kv_cache.StaticKVCache(shape, 3, 60)),
        ):
            network(Batch.of([(0, list(range(20)), 0), (1, [4, 5, 6], 0)]), cache)
            logits = [network(Batch.of([(0, [9 + i], 20 + i), (1, [3], 3 + i)]), cache) for i in range(12)]
            said[kind, name] = torch.stack(logits)
    for name in ("paged", "rows"):
        torch.testing.assert_close(said["compiled", name], said["plain", name], rtol=0, atol=2e-4)
        assert torch.equal(said["compiled", name].argmax(-1), said["plain", name].argmax(-1))


@pytest.mark.model
def test_the_real_model_says_the_same_in_float32_by_every_backend_alone_and_together(smollm2_fp32):
    prompts = ["The capital of Italy is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,"]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    said = {}
    try:
        for kind in ("plain", "compiled"):
            attention_backends.use(kind, smollm2_fp32.model.layers)
            said[kind] = [out.token_ids for out in smollm2_fp32.generate(prompts, params)]
            assert smollm2_fp32.generate(prompts[0], params)[0].token_ids == said[kind][0]
    finally:
        attention_backends.use("auto", smollm2_fp32.model.layers)
    assert said["plain"] == said["compiled"]
