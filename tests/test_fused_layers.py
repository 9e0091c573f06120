"""Fused layers are the same function as the plain ones and take no more memory; who gets which kind of layers."""

from __future__ import annotations

import sys

import pytest
import torch
from tiny_models import SHAPES, all_logits, new_cache, ours, save_tiny, transformers_model
from torch.profiler import ProfilerActivity, profile

from llmfromscratch import (
    LLM,
    SamplingParams,
    compiled_layers,
    divergence,
    fused_layers,
    kv_cache,
    layer_skipping,
    learner_engine,
    model,
    optimization,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

BIASED, NORMED = "llama, wide heads, every bias", "qwen3, normalized heads"
TIED = "llama, 9 heads on 3, tied, other rope base and epsilon"


def network_of(shape: str, dtype: torch.dtype, kind: str = "plain", layers: int = 2) -> model.Model:
    network = ours(transformers_model(shape, num_hidden_layers=layers), dtype)
    assert fused_layers.use(kind, network) == kind
    return network


def passes(network: model.Model, cache: kv_cache.KVCache) -> torch.Tensor:
    """Logits of prompts, of single steps, and of a step beside a prompt's chunk; a cache that forgets gets prompts."""
    said = [network(Batch.of([(0, list(range(19)), 0), (1, [4, 5, 6], 0)], all_logits=True), cache)]
    if not isinstance(cache, kv_cache.NoKVCache):
        said.append(network(Batch.of([(0, [9], 19), (1, [8], 3)]), cache))
        said.append(network(Batch.of([(0, [7], 20), (1, [3, 2, 1], 4)], all_logits=True), cache))
    return torch.cat(said)


def bytes_of(network: model.Model) -> int:
    """What a network holds, each piece of memory counted once, whoever looks at it."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ---- the same function -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["none", "concat", "static", "paged, scattered"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_layers_of_every_shape_give_the_plain_ones_logits_over_every_cache(shape, cache):
    plain, fused = (network_of(shape, torch.float64, kind) for kind in ("plain", "fused"))
    found, expected = (passes(network, new_cache(cache, network)) for network in (fused, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [TIED, BIASED, NORMED])
def test_in_bfloat16_fused_layers_are_no_further_from_the_truth_than_plain_ones(shape):
    exact = network_of(shape, torch.bfloat16).double()
    expected = passes(exact, new_cache("concat", exact))
    error = {}
    for kind in ("plain", "fused"):
        network = network_of(shape, torch.bfloat16, kind)
        error[kind] = (passes(network, new_cache("concat", network)).double() - expected).pow(2).mean().sqrt()
    assert error["fused"] < 1.2 * error["plain"]


@pytest.mark.parametrize("shape", [TIED, BIASED, NORMED])
def test_the_parts_of_a_fused_layer_still_compute_what_the_layer_does(shape):
    network = network_of(shape, torch.float64, "fused")
    batch, x = Batch.of([(0, [1, 2, 3], 0)]), torch.randn(3, network.config.hidden_size, dtype=torch.float64)
    angles = network.rotary(batch.positions)
    with torch.inference_mode():
        layer = network.layers[0]
        found = layer(x, *angles, batch, new_cache("concat", network))
        half = x + layer.self_attn(layer.input_layernorm(x), *angles, batch, new_cache("concat", network))
        expected = half + layer.mlp(layer.post_attention_layernorm(half))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# ---- weights -----------------------------------------------------------------------------------------------------


def test_the_old_weights_are_views_of_the_fused_ones_so_no_memory_is_taken_twice():
    for shape in SHAPES:
        for kind in ("fused", "compiled"):
            plain, network = network_of(shape, torch.float32), network_of(shape, torch.float32, kind)
            assert bytes_of(network) == bytes_of(plain)
            layer = network.layers[1]
            for name, part in layer.self_attn.named_parameters():
                fused = {"weight": layer.qkv, "bias": layer.qkv_bias}.get(name.split(".")[1])
                if name[:6] in ("q_proj", "k_proj", "v_proj"):
                    assert part.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
            assert layer.mlp.up_proj.weight.data_ptr() == layer.gate_up[network.config.intermediate_size :].data_ptr()


def test_never_more_than_one_layer_is_in_memory_twice(monkeypatch):
    network = ours(transformers_model(TIED, num_hidden_layers=4))
    whole, extra, own = bytes_of(network), [], optimization.fuse_rows

    def watched(weights):
        extra.append(bytes_of(network) - whole)
        return own(weights)

    monkeypatch.setattr(optimization, "fuse_rows", watched)
    fused_layers.fuse(network, "fused")
    assert len(extra) == 8 and max(extra) == 0


def test_the_names_of_the_weights_stay_and_weights_loaded_later_are_at_work():
    plain = network_of(NORMED, torch.float64)
    fused = ours(transformers_model(NORMED, seed=1, num_hidden_layers=2), torch.float64)
    fused_layers.use("fused", fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    for assign in (False, True):
        fused.load_state_dict({name: weight.clone() for name, weight in plain.state_dict().items()}, assign=assign)
        torch.testing.assert_close(all_logits(fused, [1, 2, 3]), all_logits(plain, [1, 2, 3]), rtol=0, atol=1e-9)
        assert fused.layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr() == fused.layers[0].qkv.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gains_are_folded_in_full_precision_only_and_never_into_a_tied_head(dtype):
    plain, fused = network_of(TIED, dtype), network_of(TIED, dtype, "fused")
    wide = dtype in (torch.float32, torch.float64)
    gain, before, after = plain.layers[0].input_layernorm.weight, plain.layers[0], fused.layers[0]
    expected = before.self_attn.q_proj.weight * (gain if wide else 1)
    assert torch.equal(after.self_attn.q_proj.weight, expected)
    assert torch.equal(after.input_layernorm.weight, torch.ones_like(gain) if wide else gain)
    assert torch.equal(fused.embed_tokens.weight, plain.embed_tokens.weight)
    assert torch.equal(fused.norm.weight, plain.norm.weight)


def test_a_network_moved_to_another_dtype_computes_in_that():
    plain, fused = network_of(NORMED, torch.bfloat16).double(), network_of(NORMED, torch.bfloat16, "fused").double()
    torch.testing.assert_close(all_logits(fused, [1, 2, 3]), all_logits(plain, [1, 2, 3]), rtol=0, atol=1e-9)


def test_the_functions_of_optimization_do_the_fusing(monkeypatch):
    calls = []
    for name in ("fuse_rows", "fold_gain"):
        own = getattr(optimization, name)
        monkeypatch.setattr(optimization, name, lambda *given, n=name, f=own: calls.append(n) or f(*given))
    network_of(TIED, torch.float32, "fused")
    assert calls.count("fuse_rows") == 2 * 2 and calls.count("fold_gain") == 2 * 5


# ---- what works with layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "compiled"])
def test_a_smaller_model_out_of_fused_layers_shares_their_memory(kind):
    network = network_of(TIED, torch.float32, kind, layers=4)
    plain = layer_skipping.skip_layers(network_of(TIED, torch.float32, layers=4), [0, 3])
    passes(network, new_cache("static", network))  # so that views of the weights have been made
    smaller = layer_skipping.skip_layers(network, [0, 3])
    assert smaller.layers[1].qkv is network.layers[3].qkv
    assert {t.data_ptr() for t in smaller.parameters()} <= {t.data_ptr() for t in network.parameters()}
    found, expected = (passes(each, new_cache("static", each)) for each in (smaller, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["fused", "compiled"])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_the_part_that_is_wrong_is_found(kind, part):
    plain, network = network_of(NORMED, torch.float32), network_of(NORMED, torch.float32, kind)
    assert divergence.diverges_at(plain, network, list(range(9))) is None
    with torch.no_grad():
        network.get_submodule(f"layers.1.{part}").weight[3] += 0.5
    assert divergence.diverges_at(plain, network, list(range(9))).operation == f"layers.1.{part}"


@pytest.mark.parametrize("kind", ["fused", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_that_is_given_another_weight_or_gain_computes_with_it(kind, dtype):
    plain = network_of(BIASED, dtype)
    network = ours(transformers_model(BIASED, num_hidden_layers=2), dtype)
    fused_layers.fuse(network, kind)
    passes(network, new_cache("static", network))
    for each in (plain, network):
        layer = each.layers[1]
        with torch.no_grad():
            layer.post_attention_layernorm.weight *= 1.5
        for linear, name in ((layer.self_attn.k_proj, "weight"), (layer.mlp.down_proj, "weight")):
            setattr(linear, name, torch.nn.Parameter(getattr(linear, name) + 0.25 * (linear is layer.mlp.down_proj)))
        layer.self_attn.q_proj.bias = torch.nn.Parameter(layer.self_attn.q_proj.bias + 0.25)
    found, expected = (passes(each, new_cache("static", each)) for each in (network, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 if dtype == torch.float32 else 1e-9)


def test_a_profile_names_what_a_fused_layer_does():
    network = network_of(TIED, torch.float64, "fused")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        all_logits(network, [1, 2, 3])
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("llm::")}
    assert counts == {"llm::norm": 4, "llm::product": 10, "llm::cache": 2, "llm::attention": 2}


# ---- who gets which ----------------------------------------------------------------------------------------------


def test_auto_is_compiled_in_float32_and_bfloat16_on_the_cpu_and_fused_in_other_dtypes():
    for dtype, kind in (
        (torch.float32, "compiled"), (torch.bfloat16, "compiled"), (torch.float64, "fused"), (torch.float16, "fused"),
    ):  # fmt: skip
        network = ours(transformers_model(TIED, num_hidden_layers=1), dtype)
        assert fused_layers.use("auto", network) == kind == network.layers[0].kind


def test_what_cannot_be_had_is_refused_in_a_sentence():
    with pytest.raises(RequestError, match="layers is 'quick'; expected one of auto, plain, fused, compiled, triton"):
        LLM("nowhere", layers="quick")
    wide = ours(transformers_model(TIED, num_hidden_layers=1), torch.float64)
    with pytest.raises(RequestError, match='layers="compiled" cannot be had: .* the model\'s dtype is float64'):
        fused_layers.use("compiled", wide)
    with torch.device("meta"):
        elsewhere = model.Model(wide.config)
    with pytest.raises(RequestError, match="compute on the CPU, and some of the model's lie on meta"):
        fused_layers.use("compiled", elsewhere)
    assert type(wide.layers[0]) is model.DecoderLayer


@pytest.fixture
def without_numba(monkeypatch):
    """As where Numba is not installed, or does not suit the other packages."""
    compiled_layers._lacking.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("llmfromscratch.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    compiled_layers._lacking.cache_clear()


def test_without_numba_auto_is_fused_and_compiled_is_refused(without_numba):
    network = ours(transformers_model(TIED, num_hidden_layers=1))
    with pytest.raises(RequestError, match='layers="compiled" cannot be had: Numba cannot compile layers here'):
        fused_layers.use("compiled", network)
    assert fused_layers.use("auto", network) == "fused"


@pytest.mark.parametrize(
    "names, kind",
    [
        (["model"], "plain"),
        (["attention"], "plain"),
        (["kv_cache"], "plain"),
        (["optimization"], "fused"),
        (["model", "attention", "kv_cache", "optimization"], "fused"),
        (["sampling"], "fused"),
    ],
)
def test_a_learners_newest_module_decides_what_auto_is(names, kind, tmp_path):
    for name in names:
        source = learner_engine.reference_path(name).read_text(encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    try:
        learner_engine.activate(tmp_path)
        network = ours(transformers_model(TIED, num_hidden_layers=1), torch.float64)  # which nothing is compiled for
        assert fused_layers.use("auto", network) == kind
        assert torch.isfinite(all_logits(network, [1, 2, 3])).all()
    finally:
        learner_engine.deactivate()


def test_an_engine_says_which_layers_it_has_and_answers_the_same_with_each(tmp_path):
    source, said = save_tiny(tmp_path), {}
    for kind in ("plain", "fused", "compiled", "auto"):
        llm = LLM(source, dtype="float32", device="cpu", layers=kind)
        assert llm.layers == ("compiled" if kind == "auto" else kind)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        said[kind] = [answer.token_ids for answer in llm.generate([[5, 6, 7], [9] * 11], params)]
        llm.cache.audit()
    assert said["plain"] == said["fused"] == said["compiled"] == said["auto"]


@pytest.mark.parametrize("kind", ["fused", "compiled"])
def test_an_engine_made_where_no_gradients_are_kept_works_like_any_other(tmp_path, kind):
    save_tiny(tmp_path)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    usual = LLM(tmp_path, dtype="float32", device="cpu", layers=kind).generate([[1, 2, 3]], params)
    with torch.inference_mode():
        made = LLM(tmp_path, dtype="float32", device="cpu", layers=kind)
        assert made.generate([[1, 2, 3]], params)[0].token_ids == usual[0].token_ids
    assert made.generate([[1, 2, 3]], params)[0].token_ids == usual[0].token_ids


@pytest.mark.parametrize("shape", [TIED, BIASED, NORMED])
def test_the_parameters_of_a_fused_layer_come_in_the_order_of_their_names(shape):
    layer = network_of(shape, torch.float32, "fused").layers[0]
    named = [parameter for _, parameter in layer.named_parameters()]
    assert len(named) == len(list(layer.parameters()))
    assert all(one is other for one, other in zip(layer.parameters(), named, strict=True))
