"""Decode steps through torch.compile say what the model says, over any cache, and are compiled once a bucket.

Most tests run the layer that is compiled as it stands, without compiling it: what it computes is the same. The others
compile, which takes seconds each, the first time on a machine.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, new_cache, ours, random_ids, save_tiny, transformers_model

from llmfromscratch import LLM, SamplingParams, attention_backends, compiled_graph, kv_cache, masks, model, optimization
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

SHAPES = (
    "llama, 3 heads on 1",
    "llama, 9 heads on 3, tied, other rope base and epsilon",
    "llama, wide heads, every bias",
    "qwen3, normalized heads",
)
CACHES = ("static", "paged, blocks of 16", "paged, scattered")
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def uncompiled(monkeypatch):
    """The layer as it stands, in the place of its compiled form."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def network_of(shape: str = SHAPES[1], dtype: torch.dtype = torch.float64) -> model.Model:
    return ours(transformers_model(shape, num_hidden_layers=2), dtype)


def graphed(network: model.Model, kind: str, **options) -> tuple[compiled_graph.GraphedModel, kv_cache.KVCache]:
    """A model over a cache in whose unused places there is NaN."""
    cache, graph = new_cache(kind, network), compiled_graph.GraphedModel(network, smallest_context=16, **options)
    for stored in cache.storage:
        stored.fill_(float("nan"))
    graph.prepare(cache)
    for stored in cache.storage:
        stored.fill_(float("nan"))
    return graph, cache


def same_steps(graph, cache, texts: list[list[int]], steps: int, tolerance: float = 1e-9) -> None:
    """All texts are prefilled and then stepped on side by side; every step's logits are those of a pass without cache
    over the whole text."""
    parts = [(request, ids[:-1], 0) for request, ids in enumerate(texts) if len(ids) > 1]
    if parts:
        graph(Batch.of(parts), cache)
    texts = [list(text) for text in texts]
    for _ in range(steps):
        found = graph(Batch.of([(request, [text[-1]], len(text) - 1) for request, text in enumerate(texts)]), cache)
        for text, row in zip(texts, found, strict=True):
            whole = Batch.of([(0, text, 0)])
            expected = graph.network(whole, kv_cache.ConcatKVCache(graph.network.config.num_layers))[0]
            torch.testing.assert_close(row, expected, rtol=0, atol=tolerance)
            text.append(int(row.argmax()))
        if isinstance(cache, kv_cache.PagedKVCache):
            cache.audit()


# ---- what it computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=6)
@given(
    shape=st.sampled_from(SHAPES),
    texts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=6),
)
def test_steps_of_any_requests_over_any_cache_say_what_is_said_without_a_cache(kind, shape, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: function)
        same_steps(*graphed(network_of(shape), kind), texts, steps=3)


@pytest.mark.parametrize("mask", [masks.sliding(5), masks.dilated(3, 2) | masks.global_tokens(2)], ids=repr)
def test_a_mask_is_kept_to(uncompiled, mask):
    network = network_of()
    attention_backends.use("plain", network.layers, mask)
    same_steps(*graphed(network, "paged, scattered"), [random_ids(30), random_ids(7)], steps=4)


def test_masked_steps_read_only_what_is_seen(uncompiled):
    network = network_of()
    attention_backends.use("plain", network.layers, masks.sliding(5))
    graph, cache = graphed(network, "static")
    same_steps(graph, cache, [random_ids(60)], steps=2)
    assert set(graph.seconds) == {(1, 16)}  # 5 tokens are seen of 60


def test_half_precision_is_nearer_to_float64_than_the_models_own_steps(uncompiled):
    exact, network = network_of(), network_of(dtype=torch.bfloat16)
    text = random_ids(20)
    expected = exact(Batch.of([(0, text, 0)]), kv_cache.ConcatKVCache(2))[0]
    errors = {}
    for name in ("graph", "network"):
        graph, cache = graphed(network, "paged, blocks of 16")
        graph(Batch.of([(0, text[:-1], 0)]), cache)
        computing = graph if name == "graph" else network
        errors[name] = (computing(Batch.of([(0, text[-1:], 19)]), cache)[0] - expected).abs().max().item()
    assert errors["graph"] < 1.5 * errors["network"] + 0.05


def test_speculative_decoding_and_graphs_go_together(uncompiled, tmp_path):
    folder = save_tiny(tmp_path)
    prompts = [[5, 6, 7, 8] * 5, [9, 4]]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = [answer.token_ids for answer in LLM(folder, dtype="float64", device="cpu").generate(prompts, params)]
    llm = LLM(folder, dtype="float64", device="cpu", compile=True, speculative="lookup")
    assert [answer.token_ids for answer in llm.generate(prompts, params)] == expected
    assert llm.metrics.drafted and llm.core.model.seconds


# ---- which passes go through it ----------------------------------------------------------------------------------


def test_prompts_and_too_many_requests_go_through_the_models_layers(uncompiled):
    graph, cache = graphed(network_of(), "paged, blocks of 16", most_rows=2)
    same_steps(graph, cache, [random_ids(9, seed) for seed in range(3)], steps=2)
    assert set(graph.seconds) == {(1, 16)}  # the one that is made at the beginning
    for request in (0, 1, 2):
        cache.release(request)
    same_steps(graph, cache, [random_ids(9, seed) for seed in range(2)], steps=2)
    assert set(graph.seconds) == {(1, 16), (2, 16)}


def test_another_cache_than_the_engines_goes_through_the_models_layers(uncompiled):
    graph, _ = graphed(network_of(), "static")
    same_steps(graph, kv_cache.ConcatKVCache(2), [random_ids(5)], steps=2)


def test_logits_are_given_for_the_rows_that_ask(uncompiled):
    graph, cache = graphed(network_of(), "static")
    parts = [(0, [3], 0), (1, [4], 0), (2, [5], 0)]
    some, everything = Batch.of(parts, logits_at=[0, None, 0]), Batch.of(parts)
    found = graph(some, cache)
    for request in range(3):
        cache.rewind(request, 1)
    torch.testing.assert_close(found, graph(everything, cache)[[0, 2]], rtol=0, atol=1e-12)


def test_buckets_are_those_of_the_engines_optimization_module(uncompiled, monkeypatch):
    monkeypatch.setattr(optimization, "bucket_of", lambda count, smallest=1: 3 * max(count, smallest))
    graph, cache = graphed(network_of(), "static")
    same_steps(graph, cache, [random_ids(5), random_ids(3)], steps=1)
    assert set(graph.seconds) == {(3, 48), (6, 48)}
    monkeypatch.setattr(optimization, "bucket_of", lambda count, smallest=1: smallest)
    with pytest.raises(ValueError, match=r"bucket_of gives \(1, 16\) for 1 requests of 30 tokens"):
        graph.compile(1, 30)


def test_a_pass_that_fails_half_way_has_stored_nothing(uncompiled, monkeypatch):
    graph, cache = graphed(network_of(), "paged, blocks of 16")
    same_steps(graph, cache, [random_ids(5)], steps=1)
    monkeypatch.setattr(graph._graphs[1, 16], "layer", lambda *inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        graph(Batch.of([(0, [1], cache.length(0))]), cache)
    assert cache.length(0) == 5
    cache.audit()


def test_a_graph_can_be_compiled_beforehand_and_leaves_no_trace(uncompiled):
    for kind in CACHES:
        graph, cache = graphed(network_of(), kind)
        graph.compile(3, 40)
        assert set(graph.seconds) == {(1, 16), (4, 64)}
        same_steps(graph, cache, [random_ids(5)], steps=1)
        assert all(graph.seconds[bucket] > 0 for bucket in graph.seconds)


# ---- what cannot be had ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"compile": "yes"}, "compile is 'yes'; it must be True or False"),
        ({"compile": True, "layers": "compiled"}, "layers='compiled' has kernels of its own"),
        ({"compile": True, "attention": "triton"}, "attention='triton' has kernels of its own"),
        ({"compile": True, "kv_cache": "concat"}, "this one is a ConcatKVCache"),
        ({"compile": True, "window": 8}, "this one is a SlidingWindow"),
    ],
)
def test_what_contradicts_compiling_is_refused_in_a_sentence(tmp_path, arguments, sentence):
    with pytest.raises(RequestError, match=sentence):
        LLM(save_tiny(tmp_path), device="cpu", dtype="float64", **arguments)


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch, tmp_path):
    from torch._inductor import cpp_builder, exc

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(RequestError, match=r"compile=True cannot be had: .* C\+\+ compiler: install g\+\+"):
        LLM(save_tiny(tmp_path), device="cpu", dtype="float64", compile=True)


def test_what_torch_says_of_a_graph_that_it_cannot_compile_is_handed_on(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *inputs: 1 / 0)
    with pytest.raises(RequestError, match=r"torch.compile failed \(ZeroDivisionError: division by zero\)\. Leave it"):
        graphed(network_of(), "static")


def test_a_bucket_that_cannot_be_compiled_later_goes_through_the_layers_and_is_told_of_once(
    uncompiled, monkeypatch, caplog
):
    graph, cache = graphed(network_of(), "paged, scattered")
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *inputs: 1 / 0)
    with caplog.at_level(logging.WARNING):
        same_steps(graph, cache, [random_ids(5), random_ids(7)], steps=3)
    assert len(caplog.messages) == 1
    assert "torch.compile failed" in caplog.text
    assert "through the model's own layers" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_computes_something_else_is_refused(uncompiled, monkeypatch, dtype):
    # as a learner's model.py may: then the graph would silently answer for another model
    monkeypatch.setattr(model.FeedForward, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    with pytest.raises(RequestError, match="differ by .* from those of model.py"):
        graphed(network_of(dtype=dtype), "static")


def test_quantized_or_other_products_are_refused_by_name():
    network = network_of()
    network.layers[1].mlp.up_proj = torch.nn.Identity()
    reason = compiled_graph.lacking(network, new_cache("static", network))
    assert reason == "graphs multiply with plain weights, and up_proj is a Identity without them."


# ---- compiled for real -------------------------------------------------------------------------------------------


def test_compiled_steps_say_the_same_and_nothing_is_compiled_twice():
    graph, cache = graphed(network_of("qwen3, normalized heads"), "paged, scattered")
    texts = [random_ids(3), random_ids(9, seed=1)]
    same_steps(graph, cache, texts, steps=2)
    assert set(graph.seconds) == {(1, 16), (2, 16)}
    for request in (0, 1):
        cache.release(request)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        same_steps(graph, cache, [random_ids(11, seed=2), random_ids(2, seed=3)], steps=4)
        cache.release(1)
        cache.rewind(0, cache.length(0) - 3)
        graph(Batch.of([(0, [5], 3)]), cache)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made


def test_more_shapes_than_torch_allows_for_one_function_are_all_compiled(monkeypatch):
    def little(x, cos, sin, slots, counts, newest, rows, weights, sizes):
        return x + slots.shape[1]

    monkeypatch.setattr(compiled_graph, "_layer", little)
    monkeypatch.setattr(compiled_graph.GraphedModel, "_differs", lambda graph, cache: None)
    graph, cache = graphed(network_of(), "static")
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(recompile_limit=2) if limit > 2 else nullcontext():
        for context in (10, 30, 60, 100):
            graph.compile(1, context)
    assert len(graph.seconds) == 4
    assert cache.length(-1) == 0


def test_the_engine_answers_the_same_with_compiled_steps(tmp_path):
    folder, prompts = save_tiny(tmp_path), [random_ids(9), random_ids(30, seed=1)]
    plain = LLM(folder, dtype="float32", device="cpu", layers="plain", attention="plain", kv_cache_memory=10**7)
    llm = LLM(folder, dtype="float32", device="cpu", compile=True, kv_cache_memory=10**7)
    for prompt in prompts:
        assert llm.generate(prompt, PARAMS)[0].token_ids == plain.generate(prompt, PARAMS)[0].token_ids
    assert set(llm.core.model.seconds) == {(1, compiled_graph.SMALLEST_CONTEXT)}


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_answers_the_same_with_compiled_steps(smollm2_gguf, smollm2_fp32):
    llm = LLM(smollm2_gguf, dtype="float32", device="cpu", compile=True, kv_cache_memory=10**8)
    prompt = llm.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}])
    params = SamplingParams(max_tokens=12, temperature=0)
    assert llm.generate([prompt], params)[0].token_ids == smollm2_fp32.generate([prompt], params)[0].token_ids


@pytest.mark.gpu
def test_a_recorded_pass_says_the_same_on_cuda(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder, prompts = save_tiny(tmp_path), [random_ids(9), random_ids(30, seed=1)]
    plain = LLM(folder, dtype="float64", device="cuda", layers="plain", attention="plain", kv_cache_memory=10**7)
    llm = LLM(folder, dtype="float64", device="cuda", compile=True, kv_cache_memory=10**7)
    expected = [answer.token_ids for answer in plain.generate(prompts, PARAMS)]
    assert [answer.token_ids for answer in llm.generate(prompts, PARAMS)] == expected
