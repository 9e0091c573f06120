"""The Triton kernels compute what plain PyTorch computes in float64, whatever the shapes and wherever keys lie.

Without a GPU Triton's interpreter runs them (conftest sets TRITON_INTERPRET=1); that they are more than that is shown
by compiling each of them for GPUs that need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SHAPES, new_cache, ours, save_tiny, transformers_model

from llmfromscratch import (
    LLM,
    SamplingParams,
    attention,
    attention_backends,
    attention_triton,
    fused_layers,
    kv_cache,
    masks,
    model,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

triton_norm = pytest.importorskip("llmfromscratch.kernels.triton_norm", reason="Triton is not installed")

from llmfromscratch.kernels import triton_decode, triton_prefill, triton_rotary  # noqa: E402

ROOT = Path(__file__).parent.parent
TARGETS = str(Path(__file__).parent / "triton_targets.py")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In bfloat16 the interpreter cuts numbers off where a GPU rounds them: off by up to a whole last place, not by half.
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(CLOSE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def expect_close(found: torch.Tensor, expected: torch.Tensor, times: float = 1) -> None:
    """expected: float64. Relative to the larger numbers: what small ones are made of has been rounded before."""
    bound = times * CLOSE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


# ---- RMSNorm and the addition before it --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (5, 24), (3, 1), (2, 1024), (1, 1025)])
def test_the_sum_and_its_norm_are_those_of_the_model(rows, width, dtype):
    x, added, weight = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1), random(width, seed=2)
    stream, normed = triton_norm.add_and_norm(x, added, weight.to(dtype), 1e-3)
    expect_close(stream, x.double() + added.double())
    wide = stream.double()  # the norm goes on with the sum as it is stored
    norm = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    expect_close(normed, norm * weight.to(dtype).double(), times=2)
    plain = model.RMSNorm(width, 1e-3).to(DEVICE)
    plain.weight.data = weight
    if dtype == torch.float32:
        torch.testing.assert_close(normed, plain(x + added), rtol=0, atol=2e-6)


def test_without_an_addition_the_stream_stays_and_no_rows_give_none():
    x, weight = random(4, 36), random(36, seed=1)
    stream, normed = triton_norm.add_and_norm(x, None, weight, 0.1)
    plain = model.RMSNorm(36, 0.1).to(DEVICE)
    plain.weight.data = weight
    assert stream is x
    torch.testing.assert_close(normed, plain(x))
    assert triton_norm.add_and_norm(x[:0], x[:0], weight, 0.1)[1].shape == (0, 36)


def test_epsilon_stands_inside_the_root_and_keeps_zeros_finite():
    zeros, ones = torch.zeros(1, 10, device=DEVICE), torch.ones(10, device=DEVICE)
    assert torch.equal(triton_norm.add_and_norm(zeros, zeros, ones, 1e-5)[1], zeros)
    tiny = ones[None] * 1e-3
    torch.testing.assert_close(triton_norm.add_and_norm(tiny, None, ones, 3e-6)[1], tiny / (4e-6**0.5))


# ---- rotary embedding and cache write ----------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As complex numbers, which `model.rotate` does not use."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 5, 6), (4, 1, 10), (1, 1, 2)])
def test_queries_are_rotated_and_keys_and_values_lie_in_their_slots_and_nowhere_else(heads, kv_heads, head_dim, dtype):
    tokens, blocks, size = 4, 3, 5
    fused = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)  # as one product gives them
    parts = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    queries, keys, values = (part.view(tokens, -1, head_dim) for part in parts)
    angles = 9 * random(tokens, head_dim // 2, seed=1)
    stored = torch.full((2, kv_heads, blocks, size, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.tensor([11, 12, 0, 4], device=DEVICE)
    found = triton_rotary.rotate_and_write(
        queries, keys, values, angles.cos(), angles.sin(), stored, slots, blocks * size
    )
    expect_close(found, rotated(queries, angles.cos(), angles.sin()), times=2)
    flat = stored.flatten(2, 3)
    expect_close(flat[0][:, slots].transpose(0, 1), rotated(keys, angles.cos(), angles.sin()), times=2)
    assert torch.equal(flat[1][:, slots].transpose(0, 1), values)
    assert flat.isnan().sum() == 2 * kv_heads * (blocks * size - tokens) * head_dim


# ---- attention ---------------------------------------------------------------------------------------------------


def filled(kind: str, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, size: int = 7):
    """A cache that holds so many tokens of each request, written in turns, and NaN wherever nobody has written."""
    layout = kv_cache.CacheLayout(1, kv_heads, head_dim, dtype, (torch.device(DEVICE),))
    if kind == "paged":
        cache = kv_cache.PagedKVCache(layout, sum(lengths) // size + 40, size)
    else:
        cache = kv_cache.StaticKVCache(layout, len(lengths) + 1, max(lengths) + 80)
        cache.reserve(99, 1)  # so that no request has row 0
    cache.storage[0].fill_(float("nan"))
    for start in range(0, max(lengths), 5):
        parts = [(i, [7] * min(5, end - start), start) for i, end in enumerate(lengths) if start < end]
        write(cache, parts, seed=start)
    return cache


def write(cache, parts, seed: int = 1) -> Batch:
    batch = Batch.of(parts, DEVICE)
    dtype, head_dim = cache.storage[0].dtype, cache.storage[0].shape[-1]
    kv_heads = cache.storage[0].shape[1 if isinstance(cache, kv_cache.PagedKVCache) else 2]
    shape = (len(batch.token_ids), kv_heads, head_dim)
    cache.write(0, random(*shape, dtype=dtype, seed=seed), random(*shape, dtype=dtype, seed=seed + 1000), batch)
    return batch


def in_float64(queries: torch.Tensor, batch: Batch, cache) -> torch.Tensor:
    """One request after the other, every score at once."""
    output = torch.empty_like(queries, dtype=torch.float64)
    for span in batch.spans:
        keys, values = cache.read(0, span.request_id)
        visible = attention.causal_mask(span.start, span.length, queries.device)
        asked, keys, values = queries[span.rows].double(), keys.double(), values.double()
        output[span.rows] = attention.grouped_attention(asked, keys, values, visible)[0]
    return output


HEADS = [(9, 3, 64), (4, 4, 6), (5, 1, 10)]  # heads, kv_heads, head_dim


@pytest.mark.parametrize("kind", ["paged", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_decode_steps_prompts_and_chunks_in_one_batch_see_their_own_past_and_nothing_else(
    heads, kv_heads, head_dim, dtype, kind
):
    starts, new = [130, 12, 40, 33, 63], [1, 20, 3, 1, 1]
    cache = filled(kind, starts, kv_heads, head_dim, dtype)
    batch = write(cache, [(i, [5] * new[i], start) for i, start in enumerate(starts)])
    queries = random(len(batch.token_ids), heads, head_dim, dtype=dtype, seed=7)
    found = attention_triton.attend(queries, 0, batch, cache)
    assert found.dtype == dtype
    expect_close(found, in_float64(queries, batch, cache))


@settings(deadline=None, max_examples=12)
@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 20)), min_size=1, max_size=4),
    size=st.integers(1, 20),
    wanted=st.sampled_from([1, 40]),
)
def test_any_lengths_blocks_and_splits_give_what_float64_gives(requests, size, wanted):
    cache = filled("paged", [start for start, _ in requests], 2, 8, torch.float32, size)
    batch = write(cache, [(i, [5] * new, start) for i, (start, new) in enumerate(requests)])
    queries = random(len(batch.token_ids), 6, 8, seed=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton, "_wanted_programs", lambda device: wanted)
        patch.setattr(triton_decode, "LEAST", 16)
        found = attention_triton.attend(queries, 0, batch, cache)
    expect_close(found, in_float64(queries, batch, cache))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_that_is_split_counts_every_token_once_though_splits_of_short_ones_stay_empty(dtype):
    cache = filled("paged", [600, 3, 300], 3, 16, dtype)
    batch = write(cache, [(0, [5], 600), (1, [5], 3), (2, [5], 300)])
    queries = 3 * random(3, 6, 16, dtype=dtype, seed=7)
    plan = attention_triton.Plan.of(batch, cache, queries.device)
    where = (cache.storage[0], plan.step_tables, plan.lengths, 3, 7, plan.layout.head_stride)
    for splits, tokens in [(1, 2**30), (2, 320), (3, 256), (40, 16)]:
        found = triton_decode.attend_steps(queries, *where, splits, tokens)
        expect_close(found, in_float64(queries, batch, cache), times=2)


@pytest.mark.parametrize(
    ("programs", "longest", "wanted", "expected"),
    [
        (3, 4000, 264, (8, 512)),
        (3, 100_000, 264, (79, 1280)),
        (300, 100_000, 264, (1, 100_096)),
        (3, 300, 264, (1, 512)),
        (3, 1, 264, (1, 256)),
        (1, 1025, 1000, (3, 512)),
    ],
)
def test_a_text_is_split_where_programs_are_lacking_and_each_part_is_worth_one(programs, longest, wanted, expected):
    splits, tokens = triton_decode.cut(programs, longest, wanted)
    assert (splits, tokens) == expected
    assert (splits - 1) * tokens < longest <= splits * tokens


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_large_scores_far_behind_do_not_overflow_and_rows_of_a_last_tile_are_not_written(rows):
    cache = filled("paged", [70], 1, 8, torch.float32)
    batch = write(cache, [(0, [5] * 37, 70)])
    queries = 400 * random(40, 3, 8, seed=7)
    output = torch.full_like(queries, 5.0)
    plan = attention_triton.Plan.of(batch, cache, queries.device)
    tiles = torch.tensor(triton_prefill.tiles_of(batch.spans, rows), dtype=torch.int32, device=DEVICE)
    triton_prefill.attend_tiles(
        queries, output, cache.storage[0], tiles, rows, plan.span_tables, 1, 7, plan.layout.head_stride
    )
    expect_close(output[:37], in_float64(queries[:37], batch, cache), times=200)
    assert (output[37:] == 5).all()


# ---- chosen by name ----------------------------------------------------------------------------------------------


def test_the_plan_is_made_once_a_pass_and_anew_for_the_next(monkeypatch):
    cache, made = filled("paged", [10], 1, 4, torch.float32), []
    own = attention_triton.Plan.of
    monkeypatch.setattr(attention_triton.Plan, "of", lambda *parts: made.append(1) or own(*parts))
    for start in (10, 11):
        batch = write(cache, [(0, [5], start)])
        queries = random(1, 2, 4)
        for _ in range(3):
            found = attention_backends.attend(queries, 0, batch, cache, "triton")
            expect_close(found, in_float64(queries, batch, cache))
    assert len(made) == 2


def test_what_the_kernels_cannot_serve_is_refused_in_one_sentence():
    paged = filled("paged", [3], 1, 4, torch.float32)
    assert attention_triton.lacking(paged, None) is None
    assert "know no mask" in attention_triton.lacking(paged, masks.sliding(4))
    assert "is a ConcatKVCache" in attention_triton.lacking(kv_cache.ConcatKVCache(1), None)
    wide = filled("paged", [3], 1, 4, torch.float64)
    assert "and this is float64" in attention_triton.lacking(wide, None)
    assert "on mps" in attention_triton.unavailable("mps", torch.float32)
    with pytest.raises(RequestError, match='attention="triton" cannot be had: the Triton kernels compute in float32'):
        layer = type("Layer", (), {"self_attn": type("Attention", (), {"backend": "triton"})})
        attention_backends.prepare([layer], wide)


def run(script: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.strip()


REASON = "import torch; from llmfromscratch import attention_triton as a; print(a.unavailable('cpu', torch.float32))"


def test_without_the_interpreter_the_sentence_says_how_to_have_it_on_the_cpu():
    assert "set TRITON_INTERPRET=1 in the environment before Python starts" in run(REASON)
    assert run(REASON, TRITON_INTERPRET="1") == "None"
    late = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'\n"
    assert "Triton cannot compile or run its kernels here" in run(late + REASON)


def test_without_triton_the_sentence_says_so():
    hidden = "import sys; sys.modules['triton'] = None\n"
    assert run(hidden + REASON) == "Triton is not installed; on Linux: pip install triton."


# ---- compiled for GPUs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, list[dict[str, int]]]]:
    """Target -> kernel -> what came of it in each of the ways in which it is launched."""
    targets = ["80:float32:64", "90:bfloat16:64", "90:bfloat16:128", "100:bfloat16:64"]
    return json.loads(
        run(f"import sys, runpy; sys.argv[1:] = {targets}; runpy.run_path({TARGETS!r}, run_name='__main__')")
    )


@pytest.mark.slow
def test_every_kernel_compiles_to_machine_code_for_gpus_that_are_not_here(compiled):
    for target, kernels in compiled.items():
        assert {name: len(records) for name, records in kernels.items()} == {
            "norm": 1, "rotary": 1, "decode": 2, "prefill": 2,
        }, target  # fmt: skip
        assert all(record["machine_code"] > 0 for records in kernels.values() for record in records)


@pytest.mark.slow
def test_half_precision_is_multiplied_on_tensor_cores_and_float32_is_not_rounded_for_them(compiled):
    for target, kernels in compiled.items():
        for name in ("decode", "prefill"):
            assert {record["tensor_cores"] for record in kernels[name]} == {"bfloat16" in target}, (target, name)


@pytest.mark.slow
def test_what_a_program_needs_fits_into_its_registers_and_into_shared_memory_of_any_gpu(compiled):
    for target, kernels in compiled.items():
        for name, records in kernels.items():
            assert max(record["shared"] for record in records) <= 48 * 1024, (target, name)
            assert max(record["spilled"] for record in records) <= 128, (target, name)


# ---- whole models ------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch) -> Counter:
    """Counts how often each kernel is launched, trying out aside."""
    assert attention_triton.unavailable(DEVICE, torch.float32) is None
    counted: Counter = Counter()
    for module, name in [
        (triton_norm, "rms_norm_kernel"),
        (triton_rotary, "_rotate_and_write"),
        (triton_decode, "_decode"),
        (triton_prefill, "_prefill"),
    ]:
        monkeypatch.setattr(module, name, Counting(getattr(module, name), name, counted))
    return counted


class Counting:
    def __init__(self, kernel, name: str, counted: Counter):
        self.kernel, self.name, self.counted = kernel, name, counted

    def __getitem__(self, grid):
        self.counted[self.name] += 1
        return self.kernel[grid]


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_every_shape_give_the_logits_of_the_plain_ones_whatever_the_cache(shape, launches):
    said: dict[tuple[str, str], torch.Tensor] = {}
    for kind in ("plain", "triton"):
        network = ours(transformers_model(shape, num_hidden_layers=2)).to(DEVICE)
        assert fused_layers.use(kind, network) == kind
        for cache_kind in ("paged, scattered", "static", "concat"):
            cache = new_cache(cache_kind, network, 60)
            first = network(Batch.of([(0, list(range(19)), 0), (1, [4, 5, 6], 0)], DEVICE, all_logits=True), cache)
            mixed = network(Batch.of([(0, [9], 19), (1, [3, 2, 1], 3)], DEVICE, all_logits=True), cache)
            said[kind, cache_kind] = torch.cat([first, mixed])
            assert cache.length(0) == 20 and cache.length(1) == 6
    for cache_kind in ("paged, scattered", "static", "concat"):
        torch.testing.assert_close(said["triton", cache_kind], said["plain", cache_kind], rtol=0, atol=2e-4)
    # two layers, two passes, two caches that the kernels read, and one that they do not
    assert launches == {"rms_norm_kernel": 2 * 2 * 2 * 3, "_rotate_and_write": 8, "_prefill": 8, "_decode": 4}


def test_a_part_that_is_given_another_weight_computes_with_it():
    said = []
    for kind in ("plain", "triton"):
        network = ours(transformers_model("llama, 3 heads on 1", num_hidden_layers=1)).to(DEVICE)
        fused_layers.use(kind, network)
        for name in ("self_attn.k_proj", "mlp.up_proj"):
            part = network.layers[0].get_submodule(name)
            # gains may be in the weights already, so the new weight is made of the one that is there
            part.weight = torch.nn.Parameter(part.weight.detach() * 1.5, requires_grad=False)
        said.append(network(Batch.of([(0, list(range(9)), 0)], DEVICE), new_cache("static", network, 20)))
    torch.testing.assert_close(*said, rtol=0, atol=2e-4)


def test_an_engine_with_triton_layers_answers_as_the_plain_one_and_its_cache_adds_up(tmp_path, launches):
    source = save_tiny(tmp_path, num_hidden_layers=2)
    prompts = ["abcabcabc", "x", "the same beginning, the end", "the same beginning, another end"]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    said = {}
    for layers, attention_kind in [("plain", "plain"), ("triton", "triton"), ("triton", "auto"), ("fused", "triton")]:
        llm = LLM(
            source, dtype="float32", device=DEVICE, layers=layers, attention=attention_kind,
            block_size=4, kv_cache_memory=2**20, max_batch_tokens=24,
        )  # fmt: skip
        said[layers, attention_kind] = [out.token_ids for out in llm.generate(prompts, params)]
        llm.cache.audit()
    assert len(set(map(str, said.values()))) == 1
    assert set(launches) == {"rms_norm_kernel", "_rotate_and_write", "_decode", "_prefill"}


def test_layers_that_cannot_be_had_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(RequestError, match='layers="triton" cannot be had: .* and this is float64'):
        LLM(save_tiny(tmp_path), dtype="float64", device=DEVICE, layers="triton", kv_cache_memory=2**20)


@pytest.mark.model
def test_the_real_model_says_in_float32_through_all_four_kernels_what_it_says_plainly(
    smollm2_gguf, smollm2_fp32, launches
):
    llm = LLM(smollm2_gguf, dtype="float32", device=DEVICE, layers="triton", attention="triton", kv_cache_memory=2**24)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (found,), (expected,) = (each.generate("The capital of Italy is", params) for each in (llm, smollm2_fp32))
    assert found.text == expected.text and found.token_ids == expected.token_ids
    layers = llm.config.num_layers
    # one prompt and three steps: each layer norms twice, and the norm before the head stays PyTorch's
    expected_launches = {"rms_norm_kernel": 8 * layers, "_rotate_and_write": 4 * layers}
    assert launches == expected_launches | {"_prefill": layers, "_decode": 3 * layers}
