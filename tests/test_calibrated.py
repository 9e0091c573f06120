"""Networks are calibrated layer by layer: AWQ's factors change nothing by themselves, and both methods beat rounding.

The oracle of a rounded layer is the taught module on what whole forward passes have seen; of a packed network, the one
that only holds the rounded values.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from test_calibration import random_windows, seen_in_whole_passes
from tiny_models import SHAPES, all_logits, ours, random_ids, tiny_model, transformers_model

from llmfromscratch import calibrated, calibration, fused_layers, model, quantization
from llmfromscratch.course.sketches.ch07 import off_lattice
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.quantized_linear import QuantizedLinear

PRODUCTS = [name for names in calibration.INPUTS for name in names]


def network_of_blocks(dtype: torch.dtype = torch.float32, shape: str = "llama, 3 heads on 1") -> model.Model:
    """Widths that blocks of 32 divide: 96, and 64 in the feed-forward."""
    return ours(transformers_model(shape, hidden_size=96, intermediate_size=64), dtype)


def logits(network: model.Model) -> torch.Tensor:
    return all_logits(network, random_ids(40, seed=9)).double()


def damage(reference: model.Model, network: model.Model, windows: torch.Tensor) -> float:
    each = [
        quantization.divergence(all_logits(reference, ids.tolist()), all_logits(network, ids.tolist()))
        for ids in windows
    ]
    return torch.cat(each).mean().item()


# ---- the same function -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_computes_the_same_with_other_weights(shape):
    network = ours(transformers_model(shape), torch.float64)
    other = off_lattice(network)
    torch.testing.assert_close(logits(other), logits(network), rtol=1e-9, atol=1e-9)
    for own, theirs in zip(network.layers, other.layers, strict=True):
        for name in PRODUCTS:
            ratio = theirs.get_submodule(name).weight / own.get_submodule(name).weight
            assert 0.8 / 1.25 <= ratio.min() < ratio.max() - 0.1 and ratio.max() <= 1.25 / 0.8
    assert torch.equal(other.embed_tokens.weight, network.embed_tokens.weight)
    tied = other.lm_head.weight.data_ptr() == other.embed_tokens.weight.data_ptr()
    assert tied == network.config.tie_word_embeddings


def test_the_twin_is_made_by_its_seed():
    network = tiny_model()
    first, again, other = (off_lattice(network, seed).layers[0].mlp.up_proj.weight for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("names", calibration.INPUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_folded_factors_change_weights_and_not_the_function(shape, names):
    network = ours(transformers_model(shape), torch.float64)
    before, layer = logits(network), network.layers[1]
    tensors = {name: value.detach() for name, value in layer.named_parameters()}
    factors = torch.rand(layer.get_submodule(names[0]).in_features, dtype=torch.float64) * 3 + 0.2
    if names[0] == "self_attn.o_proj":  # equal for the query heads of a key/value head
        config = network.config
        shared = factors.view(config.num_kv_heads, -1, config.head_dim)
        factors = shared[:, :1].expand_as(shared).flatten()
    calibrated.fold(network.config, tensors, names, factors)
    for name, value in tensors.items():
        owner, _, own = name.rpartition(".")
        setattr(layer.get_submodule(owner), own, torch.nn.Parameter(value))
    torch.testing.assert_close(layer.get_submodule(names[0]).weight, tensors[f"{names[0]}.weight"])
    torch.testing.assert_close(logits(network), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_protection_alone_leaves_the_function_and_moves_the_moments(shape):
    """With AWQ's own factors, all inputs of a layer at once."""
    network = ours(transformers_model(shape), torch.float64)
    before, windows = logits(network), random_windows(6, 40)
    found = {}

    def protect(index, moments):
        layer = network.layers[index]
        tensors = {name: value.detach() for name, value in layer.named_parameters()}
        calibrated.protect(network.config, tensors, moments, 3, 8)
        for name, value in tensors.items():
            layer.get_parameter(name).data = value.double()
        found[index] = moments

    calibration.layer_by_layer(network, windows, protect, "protecting")
    torch.testing.assert_close(logits(network), before, rtol=1e-6, atol=1e-6)
    seen = seen_in_whole_passes(network, windows)
    for names in calibration.INPUTS:
        theirs = seen[f"layers.1.{names[0]}"].float()
        torch.testing.assert_close(found[1][names[0]], theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


# ---- rounding ----------------------------------------------------------------------------------------------------


def test_gptq_of_a_layer_is_the_taught_one_of_what_the_layer_reads():
    network, windows = tiny_model(), random_windows(6, 40)
    seen, weights = seen_in_whole_passes(network, windows), deepcopy(network.layers[0])
    calibrated.quantize(network, "gptq", windows, bits=3, group=16, simulate=True)
    for name in PRODUCTS:
        weight, moments = weights.get_submodule(name).weight.detach(), seen[f"layers.0.{name}"].float()
        expected = quantization.gptq(weight, moments, 3, 16).dequantize()
        found = network.layers[0].get_submodule(name).weight.float()
        assert torch.isclose(found, expected, atol=1e-5).float().mean() > 0.99  # near ties may fall either way


def test_awq_rounds_weights_times_factors_and_the_makers_take_the_inverse():
    network, windows = tiny_model(), random_windows(6, 40)
    old, seen = deepcopy(network.layers[0]), seen_in_whole_passes(network, windows)
    calibrated.quantize(network, "awq", windows, bits=3, group=16, simulate=True)
    new = network.layers[0]
    gain = (old.post_attention_layernorm.weight / new.post_attention_layernorm.weight).float()
    together = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight]).detach()
    expected = quantization.awq_scale(together.float(), seen["layers.0.mlp.gate_proj"].float(), 3, 16)
    torch.testing.assert_close(gain, expected, rtol=1e-3, atol=1e-3)
    assert (gain - 1).abs().max() > 0.05
    rounded = quantization.quantize(old.mlp.gate_proj.weight.float() * gain, 3, 16).dequantize()
    assert torch.isclose(new.mlp.gate_proj.weight.float(), rounded, atol=1e-4).float().mean() > 0.99


def test_each_method_does_less_damage_than_rounding():
    """Added up over models of all shapes: random weights are kind to rounding, and one alone may be lucky."""
    done = dict.fromkeys(("plain", *calibrated.METHODS), 0.0)
    windows, others = random_windows(12, 90), random_windows(6, 90, seed=1)
    for shape in SHAPES:
        reference = ours(transformers_model(shape))
        for method in done:
            network = deepcopy(reference)
            if method == "plain":
                calibrated.round_off(network, 4, 8)
            else:
                calibrated.quantize(network, method, windows, 4, 8, simulate=True)
            done[method] += damage(reference, network, others)
    assert all(done[method] < 0.95 * done["plain"] for method in calibrated.METHODS)


@pytest.mark.parametrize("method", calibrated.METHODS)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 32), (4, 64)])
def test_a_packed_network_computes_what_the_rounded_values_say(method, bits, group):
    windows, packed, simulated = random_windows(6, 40), network_of_blocks(), network_of_blocks()
    calibrated.quantize(packed, method, windows, bits, group)
    calibrated.quantize(simulated, method, windows, bits, group, simulate=True)
    # layers after the first read what another order of sums has made
    for name in PRODUCTS:
        layer = packed.layers[0].get_submodule(name)
        assert isinstance(layer, QuantizedLinear)
        torch.testing.assert_close(layer.weight.detach(), simulated.layers[0].get_submodule(name).weight.detach())
    torch.testing.assert_close(logits(packed), logits(simulated), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shape", ["llama, wide heads, every bias", "qwen2, biases on q, k and v"])
def test_biases_go_along_and_take_the_inverse_where_their_rows_do(shape):
    sizes = {"hidden_size": 96, "intermediate_size": 64}
    changes = {**sizes, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    network = ours(transformers_model(shape, **changes))
    simulated, windows = deepcopy(network), random_windows(6, 40)
    calibrated.quantize(simulated, "awq", windows, 4, 32, simulate=True)
    old = deepcopy(network.layers[0])
    calibrated.quantize(network, "awq", windows, 4, 32)
    torch.testing.assert_close(logits(network), logits(simulated), rtol=0.05, atol=0.05)
    attention = network.layers[0].self_attn
    assert torch.equal(attention.q_proj.bias, old.self_attn.q_proj.bias)
    assert not torch.equal(attention.v_proj.bias, old.self_attn.v_proj.bias)


def test_a_network_in_half_precision_stays_in_it():
    network = network_of_blocks(torch.bfloat16)
    calibrated.quantize(network, "awq+gptq", random_windows(6, 40))
    assert network.layers[0].input_layernorm.weight.dtype == torch.bfloat16
    assert network.layers[0].mlp.up_proj.dtype == torch.bfloat16
    assert all_logits(network, random_ids(20)).dtype == torch.bfloat16
    assert not any(tensor.is_inference() for tensor in (*network.parameters(), *network.buffers()))


def test_plain_rounding_has_a_grid_for_groups_for_rows_or_for_a_whole_matrix():
    network = tiny_model(dtype=torch.float32)
    old = deepcopy(network.layers[2])
    runs = {group: deepcopy(network) for group in (16, None, calibrated.TENSOR)}
    for group, other in runs.items():
        calibrated.round_off(other, 4, group, symmetric=True)
    for name in PRODUCTS:
        weight = old.get_submodule(name).weight.detach()
        found = {group: other.layers[2].get_submodule(name).weight for group, other in runs.items()}
        for group in (16, None):
            assert torch.equal(found[group], quantization.quantize(weight, 4, group, symmetric=True).dequantize())
        scale = weight.abs().max() / 7
        torch.testing.assert_close(found[calibrated.TENSOR], (weight / scale).round() * scale)
    assert torch.equal(runs[16].layers[2].input_layernorm.weight, old.input_layernorm.weight)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("simulate", [False, True])
def test_an_interrupted_call_leaves_a_network_that_works(monkeypatch, simulate):
    network, untouched = network_of_blocks(), network_of_blocks()
    real, calls = quantization.gptq, []

    def interrupted(*parts):
        calls.append(None)
        if len(calls) == 7:  # the third product of the second layer
            raise KeyboardInterrupt
        return real(*parts)

    monkeypatch.setattr(quantization, "gptq", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrated.quantize(network, "awq+gptq", random_windows(6, 40), simulate=simulate)
    first, second = network.layers[0].mlp.down_proj, network.layers[1].mlp.down_proj
    assert isinstance(first, torch.nn.Linear if simulate else QuantizedLinear)
    assert not torch.equal(first.weight.detach(), untouched.layers[0].mlp.down_proj.weight)
    for name, value in untouched.layers[1].state_dict().items():
        assert torch.equal(network.layers[1].state_dict()[name], value)
    assert isinstance(second, torch.nn.Linear)
    whole, mixed = logits(untouched).log_softmax(-1), logits(network)
    assert mixed.isfinite().all()
    assert quantization.divergence(whole, mixed).mean() < 0.5 * quantization.divergence(whole, -mixed).mean()


def test_an_unknown_method_gets_a_sentence():
    with pytest.raises(RequestError, match="method is 'quip'; expected one of gptq, awq, awq.gptq"):
        calibrated.quantize(tiny_model(), "quip", random_windows(6, 40))


def test_too_little_text_gets_a_sentence():
    with pytest.raises(RequestError, match="tokens to calibrate on are too few"):
        calibrated.quantize(network_of_blocks(), "gptq", random_windows(2, 20))


@pytest.mark.parametrize("name", ["mlp.up_proj.weight", "input_layernorm.weight"])
def test_weights_that_are_no_numbers_are_named_and_nothing_is_changed(name):
    for spoil, damaged in ((float("nan"), 0), (float("inf"), 2)):
        network = network_of_blocks()
        network.layers[damaged].get_parameter(name).data.view(-1)[3] = spoil
        with pytest.raises(CheckpointError, match=rf"layers\.{damaged}\.{name}.*NaN or infinity"):
            calibrated.quantize(network, "gptq", random_windows(6, 40))
        with pytest.raises(CheckpointError, match=rf"layers\.{damaged}\.{name}"):
            calibrated.round_off(network, 4, 32)
        assert all(isinstance(layer.mlp.up_proj, torch.nn.Linear) for layer in network.layers)


def test_channels_that_are_all_zero_are_no_trouble():
    network = network_of_blocks()
    network.layers[0].mlp.up_proj.weight.data[5] = 0  # a row, and so a column of down's input
    network.layers[1].self_attn.q_proj.weight.data[:, 7] = 0
    for method in calibrated.METHODS:
        other = deepcopy(network)
        calibrated.quantize(other, method, random_windows(6, 40))
        assert logits(other).isfinite().all()
        assert (other.layers[0].mlp.up_proj.weight.detach()[5] == 0).all()


def test_layers_that_hold_no_float_products_are_refused():
    fused = network_of_blocks()
    fused_layers.use("fused", fused)
    with pytest.raises(RequestError, match=r'layer 0 is fused; give a network as LLM\(..., layers="plain"\)'):
        calibrated.quantize(fused, "gptq", random_windows(6, 40))
    twice = network_of_blocks()
    calibrated.quantize(twice, "gptq", random_windows(6, 40))
    with pytest.raises(RequestError, match="layer 0 is quantized already"):
        calibrated.quantize(twice, "gptq", random_windows(6, 40))


def test_a_width_that_blocks_do_not_divide_is_refused_before_anything_is_changed():
    network = tiny_model(dtype=torch.float32)  # of width 36
    with pytest.raises(RequestError, match="a width of 36 is not a multiple of the 32 columns"):
        calibrated.quantize(network, "awq", random_windows(6, 40))
    assert isinstance(network.layers[0].self_attn.q_proj, torch.nn.Linear)
    calibrated.quantize(network, "awq", random_windows(6, 40), simulate=True)


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_on_the_twin_of_the_real_model_awq_and_gptq_beat_rounding(smollm2_gguf):
    """Two layers of it, with the embedding and the head: a model of its own, which says nothing sensible."""
    from llmfromscratch import LLM, layer_skipping

    llm = LLM(smollm2_gguf, dtype="float32", device="cpu", layers="plain")
    reference = layer_skipping.skip_layers(llm.model, [0, 1])
    network = off_lattice(reference)
    first, second = calibration.topics()
    evaluation = calibration.windows(llm.tokenizer, second, 1, 128)
    assert damage(reference, network, evaluation) < 1e-6
    plain = deepcopy(network)
    calibrated.round_off(plain, 3, 64)
    calibrated.quantize(network, "awq+gptq", calibration.windows(llm.tokenizer, first, 6), 3, 64, simulate=True)
    assert damage(reference, network, evaluation) < 0.7 * damage(reference, plain, evaluation)
