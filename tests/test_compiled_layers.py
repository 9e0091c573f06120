"""Compiled layers and products are what PyTorch in float64 says they are; what they cannot serve goes another way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SHAPES, new_cache, ours, transformers_model
from torch.profiler import ProfilerActivity, profile

from llmfromscratch import (
    LLM,
    SamplingParams,
    attention_backends,
    compiled_decode,
    compiled_layers,
    doctor,
    fused_layers,
    kv_cache,
    layer_skipping,
    learner_engine,
    masks,
    model,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.kernels import words

ROOT = Path(__file__).parent.parent
TIED, NORMED = "llama, 9 heads on 3, tied, other rope base and epsilon", "qwen3, normalized heads"
DTYPES = [torch.float32, torch.bfloat16]
CACHES = ["static", "paged, blocks of 3", "paged, scattered"]


def network_of(shape: str, dtype: torch.dtype, kind: str = "compiled", layers: int = 2) -> model.Model:
    network = ours(transformers_model(shape, num_hidden_layers=layers), dtype)
    assert fused_layers.use(kind, network) == kind
    return network


PASSES = [
    [(0, list(range(40)), 0), (1, [4, 5, 6], 0)],  # too many rows
    [(0, [9], 40)],
    [(1, [8], 3), (0, [7], 41)],
    [(0, [7, 8, 9, 10], 42), (1, [3], 4)],  # drafts beside a step
    [(1, [3, 2, 1, 5, 6, 7], 5), (2, [30, 31], 0)],  # a chunk of a prompt beside the whole of a short one
]


def say(network: model.Model, cache: kv_cache.KVCache) -> torch.Tensor:
    return torch.cat([network(Batch.of(parts, all_logits=True), cache) for parts in PASSES])


def served(monkeypatch) -> list[int]:
    """Grows by the rows of each pass through a compiled layer."""
    rows: list[int] = []
    own = compiled_layers.forward
    monkeypatch.setattr(compiled_layers, "forward", lambda *given: rows.append(len(given[1])) or own(*given))
    return rows


# ---- words -------------------------------------------------------------------------------------------------------


def compiled(function):
    from numba import njit

    from llmfromscratch.kernels import numba_words  # noqa: F401 - tells Numba what the words mean

    return njit(function)


def test_every_bfloat16_is_widened_to_the_number_that_torch_reads():
    bits = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(bits).view(torch.bfloat16).float()
    widen = words.widen

    def all_of(numbers, output):
        for i in range(len(numbers)):
            output[i] = widen(numbers[i])

    for run in (all_of, compiled(all_of)):
        found = torch.empty(2**16)
        run(bits, found.numpy())
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert words.widen(np.float32(1.5)) == np.float32(1.5)


def test_a_float32_is_stored_as_torch_stores_it():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator, dtype=torch.int64).int()
    ties = (torch.arange(2000, dtype=torch.int64) << 16 | 0x8000).int()
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40]).view(torch.int32)
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32)
    numbers = torch.cat([bits, ties, ends, nan]).view(torch.float32)
    narrow = words.narrow

    def all_of(numbers, output):
        for i in range(len(numbers)):
            output[i] = narrow(numbers[i], output)

    for run in (all_of, compiled(all_of)):
        for dtype, stored in ((torch.bfloat16, torch.uint16), (torch.float32, torch.float32)):
            found = torch.zeros(len(numbers), dtype=stored)
            run(numbers.numpy(), found.numpy())
            torch.testing.assert_close(found.view(dtype), numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


# ---- products ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, compiled_layers.MAX_ROWS),
    width=st.integers(1, 200),
    outputs=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2]),
)
def test_any_product_of_few_rows_is_the_product_in_float64(rows, width, outputs, dtype, threads):
    generator = torch.Generator().manual_seed(width)
    x, weight = (torch.randn(size, width, generator=generator).to(dtype) for size in (rows, outputs))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = compiled_layers.multiply(x, weight)
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ weight.double().T
    assert found.dtype == dtype and found.shape == (rows, outputs)
    bound = 2e-5 if dtype == torch.float32 else 0.005 * expected.abs() + 1e-4
    assert ((found.double() - expected).abs() <= bound).all()


def test_what_is_not_a_product_of_few_rows_of_one_dtype_goes_to_pytorch():
    weight = torch.ones(3, 4)
    with torch.no_grad():
        assert compiled_layers.few(torch.ones(compiled_layers.MAX_ROWS, 4), weight)
        assert not compiled_layers.few(torch.ones(compiled_layers.MAX_ROWS + 1, 4), weight)
        assert not compiled_layers.few(torch.ones(1, 4), weight.bfloat16())
        assert not compiled_layers.few(torch.ones(1, 4).double(), weight.double())
        assert not compiled_layers.few(torch.ones(1, 4, device="meta"), weight.to("meta"))
    assert not compiled_layers.few(torch.ones(1, 4), weight)  # a gradient may be asked for


# ---- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_drafts_and_short_chunks_give_the_plain_layers_logits(shape, cache, monkeypatch):
    plain = network_of(shape, torch.float64, "plain")
    expected = say(plain, new_cache(cache, plain))
    rows = served(monkeypatch)
    network = network_of(shape, torch.float32)
    kept = new_cache(cache, network)
    found = say(network, kept)
    assert rows == [1, 1, 2, 2, 5, 5, 8, 8]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)
    assert [kept.length(request) for request in (0, 1, 2)] == [46, 11, 2]
    if isinstance(kept, kv_cache.PagedKVCache):
        kept.audit()


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_compiled_layers_are_no_further_from_the_truth_than_plain_ones(shape):
    exact = network_of(shape, torch.bfloat16, "plain").double()
    expected, error = say(exact, new_cache("static", exact)), {}
    for kind in ("plain", "compiled"):
        network = network_of(shape, torch.bfloat16, kind)
        error[kind] = (say(network, new_cache("paged, scattered", network)).double() - expected).pow(2).mean().sqrt()
    assert error["compiled"] < 1.1 * error["plain"]


@pytest.mark.parametrize("shape", [NORMED, "llama, wide heads, every bias"])
def test_two_threads_compute_what_one_does_also_over_a_long_text(shape):
    said = []
    before = torch.get_num_threads()
    network = network_of(shape, torch.float32)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = kv_cache.StaticKVCache(kv_cache.CacheLayout.of(network.config), 2, 700)
            network(Batch.of([(0, [i % 90 for i in range(600)], 0)]), cache)  # worth a thread for attention too
            said.append(network(Batch.of([(0, [5, 6], 600)], all_logits=True), cache))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_holds_what_plain_layers_would_have_written(dtype):
    stored = {}
    for kind in ("plain", "compiled"):
        network = network_of(TIED, dtype, kind)
        cache = new_cache("paged, scattered", network)
        say(network, cache)
        stored[kind] = [part.double() for request in (0, 1, 2) for part in cache.read(0, request)]
    for found, expected in zip(stored["compiled"], stored["plain"], strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6 if dtype == torch.bfloat16 else 1e-4, atol=0.05)


def test_a_step_that_has_no_room_changes_nothing():
    network = network_of(TIED, torch.float32)
    cache = kv_cache.PagedKVCache(kv_cache.CacheLayout.of(network.config), 1, 4)
    network(Batch.of([(0, [1, 2, 3, 4], 0)]), cache)
    with pytest.raises(OutOfMemory):
        network(Batch.of([(0, [5], 4)]), cache)
    assert cache.length(0) == 4
    cache.audit()
    with pytest.raises(ValueError, match="goes on at 3, but the cache holds 4 tokens"):
        network(Batch.of([(0, [5], 3)]), cache)


def test_what_compiled_layers_cannot_serve_goes_another_way_and_says_the_same(monkeypatch):
    class Own(kv_cache.StaticKVCache):
        pass

    network, rows = network_of(TIED, torch.float32), served(monkeypatch)
    shape = kv_cache.CacheLayout.of(network.config)
    expected = say(network, kv_cache.StaticKVCache(shape, 3, 60))
    assert len(rows) == 8
    half = kv_cache.CacheLayout.of(network.config, torch.bfloat16)
    for cache in (kv_cache.ConcatKVCache(2), Own(shape, 3, 60)):
        torch.testing.assert_close(say(network, cache), expected, rtol=0, atol=2e-4)
    for kind in ("plain", "tiled"):
        attention_backends.use(kind, network.layers)
        torch.testing.assert_close(say(network, kv_cache.StaticKVCache(shape, 3, 60)), expected, rtol=0, atol=2e-4)
    attention_backends.use("auto", network.layers)
    with torch.inference_mode():
        assert compiled_layers.serves(network.layers[0], torch.ones(1, 36), kv_cache.StaticKVCache(shape, 3, 60))
        assert not compiled_layers.serves(network.layers[0], torch.ones(1, 36), kv_cache.StaticKVCache(half, 3, 60))
    assert len(rows) == 8


def test_weights_that_are_loaded_later_are_at_work():
    network, other = network_of(NORMED, torch.float32), network_of(NORMED, torch.float64, "plain")
    say(network, new_cache("static", network))
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    network.load_state_dict(other.state_dict())
    found, expected = say(network, new_cache("static", network)), say(other, new_cache("static", other))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


def test_a_network_that_is_cast_after_its_first_steps_computes_in_the_new_dtype():
    network = network_of(NORMED, torch.bfloat16)
    say(network, new_cache("static", network))
    network.float()
    exact = network_of(NORMED, torch.bfloat16, "plain").double()
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_while_a_profiler_looks_the_stages_run_one_by_one_and_make_the_same(dtype):
    network = network_of(NORMED, dtype)
    whole = say(network, new_cache("static", network))
    cache = new_cache("static", network)
    said = [network(Batch.of(PASSES[0], all_logits=True), cache)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        said += [network(Batch.of(parts, all_logits=True), cache) for parts in PASSES[1:]]
    torch.testing.assert_close(torch.cat(said), whole, rtol=2**-6 if dtype == torch.bfloat16 else 0, atol=2e-4)
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("llm::")}
    layers = 2 * len(PASSES[1:])
    assert counts.pop("llm::head") == len(PASSES[1:])
    assert counts == {
        "llm::norm": 2 * layers, "llm::product": 5 * layers, "llm::cache": layers, "llm::attention": layers,
    }  # fmt: skip


def test_two_threads_of_python_may_step_at_the_same_time():
    network, said, failures = network_of(TIED, torch.float32), {}, []

    def steps(number: int) -> None:
        try:
            said[number] = torch.cat([say(network, new_cache("static", network)) for _ in range(20)])
        except BaseException as error:  # handed to the main thread
            failures.append(error)

    torch.set_num_threads(2)
    threads = [threading.Thread(target=steps, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=1e-4)


# ---- a learner's product -----------------------------------------------------------------------------------------


@pytest.fixture
def learner(tmp_path):
    """Puts a learner's optimization.py, the package's own with one text replaced, into the engine."""

    def activate(old: str, new: str) -> None:
        source = learner_engine.reference_path("optimization").read_text(encoding="utf-8")
        assert source.count(old) == 1
        (tmp_path / "optimization.py").write_text(source.replace(old, new), encoding="utf-8")
        learner_engine.activate(tmp_path)

    yield activate
    learner_engine.deactivate()


def test_the_product_that_is_compiled_in_is_the_learners_and_the_packages_again_afterwards(learner):
    from llmfromscratch.kernels import product

    x, weight = torch.ones(1, 5), torch.full((3, 5), 2.0)
    assert compiled_layers.multiply(x, weight).tolist() == [[10.0] * 3] and product.keep
    learner("output[m, row] = total", "output[m, row] = total + np.float32(1)")
    assert compiled_layers.multiply(x, weight).tolist() == [[11.0] * 3]
    assert not product.keep  # another learner's code with the same name may come next
    learner_engine.deactivate()
    assert compiled_layers.multiply(x, weight).tolist() == [[10.0] * 3] and product.keep


def test_a_learners_product_that_numba_cannot_compile_is_named_and_pytorch_computes(learner):
    learner("output[m, row] = total", "output[m, row] = torch.tensor(total)")
    lacking = compiled_layers.unavailable(torch.float32)
    assert lacking.startswith("Numba cannot compile layers around your multiply_rows here (")
    network = ours(transformers_model(TIED, num_hidden_layers=1))
    assert fused_layers.use("auto", network) == "fused"
    check = doctor.check_kernels()
    assert check.status == "warn" and "your multiply_rows" in check.finding


def test_code_on_disk_is_known_by_the_sources_that_are_in_it(tmp_path):
    from llmfromscratch.kernels import product

    before, own = product.edition(), (product.rows, product.int8_rows)
    space: dict = {}
    file = tmp_path / "other.py"
    for text in ("def rows():\n    return 1\n", "def rows():\n    return 2\n"):
        file.write_text(text, encoding="utf-8")
        exec(compile(text, str(file), "exec"), space)
        try:
            product.choose(space["rows"], own[1])
            assert product.edition() != before and not product.keep
            before = product.edition()
        finally:
            product.choose(*own)


# ---- where they run ----------------------------------------------------------------------------------------------


def test_numbers_of_threads_stay_as_they_were():
    import numba

    before = torch.get_num_threads(), numba.get_num_threads()
    network = network_of(TIED, torch.float32)
    say(network, new_cache("static", network))
    assert (torch.get_num_threads(), numba.get_num_threads()) == before


SCRIPT = """
import sys
sys.path.insert(0, "tests")
import torch
from llmfromscratch import compiled_decode
from test_compiled_layers import network_of, new_cache, say
torch.set_num_threads(2)
said = [say(network, new_cache("static", network)) for network in (network_of("qwen3, normalized heads", dtype, kind)
        for dtype, kind in ((torch.float64, "plain"), (torch.float32, "compiled")))]
print(compiled_decode.max_threads(), bool((said[0] - said[1]).abs().max() < 3e-4))
"""


@pytest.mark.slow
def test_where_numba_has_only_its_workqueue_one_thread_computes_the_same():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_THREADING_LAYER": "workqueue"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip
    assert done.stdout.strip() == "1 True", done.stderr


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_says_the_same_in_float32_by_plain_fused_and_compiled_layers(smollm2_gguf, smollm2_fp32):
    prompts = ["The capital of Italy is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,"]
    params, said = SamplingParams(max_tokens=12, ignore_eos=True), {}
    assert smollm2_fp32.layers == "compiled"
    for kind in ("plain", "compiled"):
        llm = smollm2_fp32 if kind == "compiled" else LLM(smollm2_gguf, dtype="float32", device="cpu", layers=kind)
        said[kind] = [answer.token_ids for answer in llm.generate(prompts, params)]
        assert llm.generate(prompts[0], params)[0].token_ids == said[kind][0]
    assert said["plain"] == said["compiled"]


# ---- all layers in one call --------------------------------------------------------------------------------------

in_threads = pytest.mark.skipif(compiled_decode.max_threads() == 1, reason="one thread goes layer by layer")


@pytest.fixture
def calls(monkeypatch):
    """How often one layer was called, and all of them at once."""
    counts = {"_call": 0, "_call_all": 0}
    for dtype in DTYPES:
        assert compiled_layers.unavailable(dtype) is None  # tries them out
    for name in counts:
        own = getattr(compiled_layers, name)

        def counted(*given, name=name, own=own):
            counts[name] += 1
            return own(*given)

        monkeypatch.setattr(compiled_layers, name, counted)
    return counts


def alone(network: model.Model) -> model.Model:
    """The same network, whose layers do not know each other."""
    for layer in network.layers:
        layer.stack = None
    return network


@in_threads
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_layers_in_one_call_give_what_they_give_one_by_one(shape, kind, dtype, calls):
    network = network_of(shape, dtype, layers=3)
    caches = new_cache(kind, network), new_cache(kind, network)
    for stored in (*caches[0].storage, *caches[1].storage):
        stored.zero_()
    together = say(network, caches[0])
    assert calls["_call_all"] > 0 and calls["_call"] == 0
    one_by_one = say(alone(network), caches[1])
    assert calls["_call"] > 0
    assert torch.equal(together, one_by_one)
    for left, right in zip(caches[0].storage, caches[1].storage, strict=True):
        assert torch.equal(left, right)


@in_threads
def test_who_changes_what_a_layer_gives_changes_all_that_follows(calls):
    network, batch = network_of(TIED, torch.float32, layers=4), Batch.of([(0, [5], 0)])
    network.layers[1].register_forward_hook(lambda layer, given, output: output + 1)
    found = network(batch, new_cache("paged, blocks of 3", network))
    assert calls == {"_call": 2, "_call_all": 1}
    assert torch.equal(found, alone(network)(batch, new_cache("paged, blocks of 3", network)))


@in_threads
def test_whoever_watches_a_part_an_exchanged_weight_and_another_mask_are_seen(calls):
    network, batch = network_of(TIED, torch.float32, layers=3), Batch.of([(0, [5], 0)])
    seen: list[torch.Tensor] = []
    watching = network.layers[2].mlp.down_proj.register_forward_hook(lambda part, given, output: seen.append(output))
    network(batch, new_cache("paged, blocks of 3", network))
    assert len(seen) == 1 and calls["_call_all"] == 0
    watching.remove()
    before = network(batch, new_cache("paged, blocks of 3", network))
    assert calls["_call_all"] == 1
    network.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros_like(network.layers[1].mlp.up_proj.weight))
    after = [network(batch, new_cache("paged, blocks of 3", network)) for _ in range(2)]
    assert calls["_call_all"] == 2  # in the first of them the layer was fused again
    assert torch.equal(after[0], after[1]) and not torch.allclose(after[0], before)
    network.layers[2].self_attn.backend = attention_backends.Masked("auto", masks.sliding(3))
    network(batch, new_cache("paged, blocks of 3", network))
    assert calls["_call_all"] == 2


@in_threads
def test_a_model_without_some_layers_goes_through_its_own_in_one_call(calls):
    network, batch = network_of(TIED, torch.float32, layers=4), Batch.of([(0, [5], 0)])
    smaller = layer_skipping.skip_layers(network, [0, 2, 3])
    found = smaller(batch, new_cache("paged, blocks of 3", smaller))
    network(batch, new_cache("paged, blocks of 3", network))
    assert calls == {"_call": 0, "_call_all": 2}
    assert torch.equal(found, alone(smaller)(batch, new_cache("paged, blocks of 3", smaller)))


@in_threads
def test_a_copy_of_a_network_that_has_served_a_cache_does_not_copy_the_cache(monkeypatch):
    network, batch = network_of(TIED, torch.float32, layers=4), Batch.of([(0, [5], 0)])
    cache, copied = new_cache("paged, blocks of 3", network), []
    network(batch, cache)
    own = torch.Tensor.__deepcopy__
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, memo: copied.append(tensor) or own(tensor, memo))
    smaller = layer_skipping.skip_layers(network, [0, 1, 3])
    assert not any(tensor is stored for tensor in copied for stored in cache.storage)
    others = new_cache("paged, blocks of 3", smaller)
    assert torch.equal(smaller(batch, others), alone(smaller)(batch, new_cache("paged, blocks of 3", smaller)))
