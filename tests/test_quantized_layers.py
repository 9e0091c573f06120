"""Compiled layers over packed weights compute what the dequantized weights do in float64, whatever kinds are mixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_compiled_layers import CACHES, DTYPES, alone, in_threads, say, served
from test_compiled_layers import calls as calls
from tiny_models import new_cache, ours, transformers_model
from torch.profiler import ProfilerActivity, profile

from llmfromscratch import (
    LLM,
    SamplingParams,
    compiled_layers,
    fused_layers,
    kv_cache,
    layer_skipping,
    learner_engine,
    model,
    profile_events,
    quantization,
    quantized_layers,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError
from llmfromscratch.packed_weight import BLOCKS, PackedWeight
from llmfromscratch.quantized_linear import QuantizedLinear, W8A8Linear

# widths that are whole blocks; o_proj of the second is 30 wide, which only int8 can be
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "9 heads on 3": ("llama, 9 heads on 3, tied, other rope base and epsilon", {"hidden_size": 288}),
    "every bias": ("llama, wide heads, every bias", {"hidden_size": 160}),
    "biases on q, k and v": ("qwen2, biases on q, k and v", {"hidden_size": 224}),
    "normalized heads": ("qwen3, normalized heads", {"hidden_size": 192, "head_dim": 16}),
}
MIXED = ("int8", "int4", "nf4", "Q8_0", "int4")  # five, which is no divisor of the seven parts of a layer


def packed(weight: torch.Tensor, kind: str) -> PackedWeight:
    weight = weight.detach().float()
    if kind == "int8" or weight.shape[1] % 32:
        return PackedWeight.of(quantization.quantize(weight, 8, None, symmetric=True))
    if kind == "Q8_0":
        return PackedWeight.of(quantization.quantize(weight, 8, 32, symmetric=True))
    return PackedWeight.nf4(weight) if kind == "nf4" else PackedWeight.of(quantization.quantize(weight, 4, 32))


def random_blocks(rows: int, width: int, kind: str, seed: int) -> PackedWeight:
    """Any bytes are codes; the float16 of each block are made small numbers."""
    columns, nbytes = BLOCKS[kind]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows * width // columns, nbytes), generator=generator, dtype=torch.uint8)
    grids = 0.002 * torch.rand(len(blocks), 2, generator=generator).half()
    places, grids = ([208], grids / 64) if kind == "Q6_K" else ([0, 2], grids / 8)
    for place, grid in zip(places, grids.T, strict=False):
        blocks[:, place : place + 2] = grid.contiguous().view(torch.uint8).view(-1, 2)
    return PackedWeight(kind, width, blocks.view(rows, -1), torch.empty(0))


def exchange(network: model.Model, pack: Callable[[torch.Tensor], PackedWeight]) -> tuple[model.Model, model.Model]:
    """The network with packed weights in its layers, and one of their numbers in float64."""
    exact = deepcopy(network).double()
    dtype = network.embed_tokens.weight.dtype
    for layer, twin in zip(network.layers, exact.layers, strict=True):
        parts = zip(quantized_layers.parts_of(layer), quantized_layers.parts_of(twin), strict=True)
        for own, other in parts:
            weight = pack(own.weight)
            other.weight.data = weight.dequantize(torch.float64)
            replace(layer, own, QuantizedLinear(weight, own.bias, dtype))
    return network, exact


def replace(layer: Any, old: Any, new: Any) -> None:
    for owner in (layer.self_attn, layer.mlp):
        for name, part in owner.named_children():
            if part is old:
                setattr(owner, name, new)


def pair(
    shape: str = "9 heads on 3", kinds: Sequence[str] = MIXED, dtype: torch.dtype = torch.float32, layers: int = 2
) -> tuple[model.Model, model.Model]:
    """A quantized network in compiled layers, and what it says in float64."""
    name, sizes = SHAPES[shape]
    made = transformers_model(name, num_hidden_layers=layers, intermediate_size=64, **sizes)
    turns = itertools.cycle(kinds)
    with torch.no_grad():
        for weight in made.parameters():
            weight /= 3  # wider layers than other tests have
    network, exact = exchange(ours(made, dtype), lambda weight: packed(weight, next(turns)))
    assert fused_layers.use("auto", network) == "compiled"
    return network, exact


# ---- what they compute -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_drafts_and_prompts_give_the_logits_of_the_dequantized_weights(shape, cache, monkeypatch):
    network, exact = pair(shape)
    rows = served(monkeypatch)
    found, expected = say(network, new_cache(cache, network)), say(exact, new_cache(cache, exact))
    assert rows == [1, 1, 2, 2, 5, 5, 8, 8]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "Q8_0"])
def test_one_kind_alone_gives_them_too(kind):
    network, exact = pair(kinds=[kind])
    kept = new_cache("static", network)
    torch.testing.assert_close(say(network, kept).double(), say(exact, new_cache("static", exact)), rtol=0, atol=3e-4)


def test_blocks_of_256_columns_are_read_beside_others():
    name, turns = SHAPES["9 heads on 3"][0], itertools.count()
    made = transformers_model(
        name, num_hidden_layers=2, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=256
    )

    def pack(weight: torch.Tensor) -> PackedWeight:
        number = next(turns)
        kind = ("Q4_K", "Q6_K", "int4")[number % 3]
        return packed(weight, kind) if kind == "int4" else random_blocks(*weight.shape, kind, number)

    network, exact = exchange(ours(made), pack)
    assert fused_layers.use("compiled", network) == "compiled"
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", ["9 heads on 3", "every bias"])
def test_in_bfloat16_they_are_no_further_from_the_truth_than_the_parts_one_by_one(shape):
    error = {}
    for kind in ("plain", "compiled"):
        network, exact = pair(shape, dtype=torch.bfloat16)
        if kind == "plain":
            for layer in network.layers:
                layer.self_attn.q_proj.kernel = "plain"
        found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
        error[kind] = (found.double() - expected).pow(2).mean().sqrt()
    assert error["compiled"] < 1.1 * error["plain"]


# ---- one call ----------------------------------------------------------------------------------------------------


@in_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_different_kinds_in_one_call_give_what_they_give_one_by_one(shape, dtype, calls):
    network, _ = pair(shape, dtype=dtype, layers=3)
    assert [part.kind for part in quantized_layers.parts_of(network.layers[0])] != [
        part.kind for part in quantized_layers.parts_of(network.layers[1])
    ]
    caches = new_cache("paged, scattered", network), new_cache("paged, scattered", network)
    for stored in (*caches[0].storage, *caches[1].storage):
        stored.zero_()
    together = say(network, caches[0])
    assert calls["_call_all"] > 0 and calls["_call"] == 0
    assert torch.equal(together, say(alone(network), caches[1])) and calls["_call"] > 0
    for left, right in zip(caches[0].storage, caches[1].storage, strict=True):
        assert torch.equal(left, right)


@in_threads
def test_a_layer_left_in_float_is_a_compiled_layer_beside_the_others(calls, monkeypatch):
    made = transformers_model(SHAPES["9 heads on 3"][0], num_hidden_layers=3, hidden_size=288)
    network = ours(made)
    spared = deepcopy(network.layers[1])
    network, exact = exchange(network, lambda weight: packed(weight / 3, "int8"))
    network.layers[1], exact.layers[1] = spared, deepcopy(spared).double()
    fused_layers.use("compiled", network)
    rows = served(monkeypatch)
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    assert len(rows) == 12 and calls["_call_all"] == 0
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


@in_threads
def test_a_model_without_some_layers_and_a_copy_go_through_their_own_in_one_call(calls):
    network, _ = pair(layers=4)
    batch = Batch.of([(0, [5], 0)])
    network(batch, new_cache("static", network))
    for smaller in (layer_skipping.skip_layers(network, [0, 2, 3]), deepcopy(network)):
        smaller(batch, new_cache("static", smaller))  # what is new is looked at once
        before = calls["_call_all"]
        calls["_call"] = 0
        found = smaller(batch, new_cache("static", smaller))
        assert calls == {"_call": 0, "_call_all": before + 1}
        assert torch.equal(found, alone(deepcopy(smaller))(batch, new_cache("static", smaller)))


# ---- what is seen ------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_part_are_the_layers_operand_and_stay_under_their_names():
    network, _ = pair()
    batch = Batch.of([(0, [5], 0)])
    before = network(batch, new_cache("static", network))
    names = set(network.state_dict())
    assert {f"layers.0.self_attn.{part}_proj.data" for part in "qkvo"} <= names
    assert {f"layers.1.mlp.{part}_proj.data" for part in ("gate", "up", "down")} <= names
    for layer in network.layers:
        for part in quantized_layers.parts_of(layer):
            addresses = [row[2] for product in layer.numbers.products for row in product.tolist()]
            assert part.data.data_ptr() in addresses
    network.layers[1].mlp.down_proj.data.zero_()
    network.layers[1].mlp.down_proj.scales.zero_()
    assert not torch.allclose(network(batch, new_cache("static", network)), before)


def test_bytes_put_in_the_place_of_others_are_at_work_at_the_next_pass():
    network, exact = pair()
    say(network, new_cache("static", network))
    for own, twin in zip(network.layers, exact.layers, strict=True):
        own, twin = own.mlp.up_proj, twin.mlp.up_proj
        other = packed(own.weight.detach() * 1.5, "int4")
        own.put(other)
        twin.weight.data = other.dequantize(torch.float64)
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


def test_a_network_that_is_cast_after_its_first_steps_computes_in_the_new_dtype():
    network, exact = pair("every bias", dtype=torch.bfloat16)
    say(network, new_cache("static", network))
    network.float()
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


def test_whoever_watches_a_part_or_pins_its_kernel_sees_it_compute(monkeypatch):
    network, exact = pair()
    rows, seen, batch = served(monkeypatch), [], Batch.of([(0, [5], 0)])
    watching = network.layers[1].mlp.down_proj.register_forward_hook(lambda part, given, output: seen.append(output))
    network(batch, new_cache("static", network))
    assert len(seen) == 1 and len(rows) == 1
    watching.remove()
    for layer in network.layers:
        for part in quantized_layers.parts_of(layer):
            part.kernel = "plain"
    found, expected = say(network, new_cache("static", network)), say(exact, new_cache("static", exact))
    assert len(rows) == 1
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)


def test_under_a_profiler_the_stages_are_labelled_and_say_the_same():
    network, _ = pair("every bias")
    batches = [Batch.of([(0, [5, 6, 7], 0)]), Batch.of([(0, [9], 3)])]
    caches = new_cache("static", network), new_cache("static", network)
    whole = torch.cat([network(batch, caches[0]) for batch in batches])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        staged = torch.cat([network(batch, caches[1]) for batch in batches])
    torch.testing.assert_close(staged, whole, rtol=0, atol=1e-4)
    counts = {event.key: event.count for event in seen.key_averages() if event.key.startswith("llm::")}
    counts.pop("llm::head", None)
    assert counts == {"llm::norm": 8, "llm::product": 20, "llm::cache": 4, "llm::attention": 4}


def test_the_engines_profile_sees_the_stages_of_compiled_layers(monkeypatch):
    network, _ = pair("every bias")
    stages, own = [], compiled_layers._in_stages
    monkeypatch.setattr(compiled_layers, "_in_stages", lambda *given: stages.append(1) or own(*given))
    core, cache = SimpleNamespace(model=network), new_cache("static", network)
    core.cache = cache
    watched = profile_events.watch(lambda: core.model(Batch.of([(0, [5, 6, 7], 0)]), cache), core)
    assert len(stages) == 2  # hooks from outside would have sent the layers another way
    seconds = profile_events.add_up(watched.events).seconds
    assert all(seconds[kind] > 0 for kind in ("products", "attention", "norms", "cache", "head"))


def test_weights_and_biases_that_are_loaded_later_are_at_work():
    (network, _), (other, exact) = pair("every bias"), pair("every bias")
    for layer, twin in zip(other.layers, exact.layers, strict=True):
        for part, same in zip(quantized_layers.parts_of(layer), quantized_layers.parts_of(twin), strict=True):
            part.bias.data += 0.25
            same.bias.data += 0.25
    before = say(network, new_cache("static", network))
    network.load_state_dict(other.state_dict())
    found = say(network, new_cache("static", network))
    assert not torch.allclose(found, before, atol=0.1)
    torch.testing.assert_close(found.double(), say(exact, new_cache("static", exact)), rtol=0, atol=5e-4)


# ---- what is not served ------------------------------------------------------------------------------------------


def test_a_layer_with_another_order_or_integer_products_or_a_float_part_stays_as_it_was():
    for number in range(3):
        made = transformers_model(SHAPES["9 heads on 3"][0], num_hidden_layers=2, hidden_size=288)
        network, _ = exchange(ours(made), lambda weight: packed(weight / 3, "int8"))
        own = network.layers[0].mlp.down_proj
        others = [
            QuantizedLinear(own.packed(), order=torch.arange(own.in_features).flip(0)),
            W8A8Linear(own.packed()),
            torch.nn.Linear(own.in_features, own.out_features, bias=False),
        ]
        network.layers[0].mlp.down_proj = others[number]
        assert fused_layers.use("auto", network) == "compiled"
        kinds = [type(layer).__name__ for layer in network.layers]
        assert kinds == ["DecoderLayer", "QuantizedLayer"]
        found = say(network, new_cache("static", network))
        for layer in network.layers:
            layer.kind = "plain"
        torch.testing.assert_close(found, say(plain(network), new_cache("static", network)), rtol=0, atol=2e-3)


def plain(network: model.Model) -> model.Model:
    """The same parts in the model's own layers."""
    for index, layer in enumerate(network.layers):
        own = model.DecoderLayer(network.config, index)
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            setattr(own, name, getattr(layer, name))
        network.layers[index] = own
    return network


def test_layers_that_join_float_weights_are_refused_for_packed_ones():
    network, _ = pair()
    for kind in ("fused", "triton"):
        with pytest.raises(RequestError, match='the weights are quantized.*give layers="plain"'):
            fused_layers.use(kind, network)
    integers, _ = exchange(ours(transformers_model(num_hidden_layers=1)), lambda weight: packed(weight, "int8"))
    part = integers.layers[0].mlp.up_proj
    integers.layers[0].mlp.up_proj = W8A8Linear(part.packed())
    with pytest.raises(RequestError, match="no layer has only weights that compiled layers can read"):
        fused_layers.use("compiled", integers)
    assert fused_layers.use("auto", integers) == "plain"


def test_more_rows_than_pay_go_through_the_parts(monkeypatch):
    network, exact = pair()
    rows, most = served(monkeypatch), compiled_layers.MAX_PACKED_ROWS
    for count in (most, most + 1):
        batch = Batch.of([(0, [i % 90 for i in range(count)], 0)], all_logits=True)
        found, expected = network(batch, new_cache("static", network)), exact(batch, new_cache("static", exact))
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-4)
    assert rows == [most, most]


def test_a_cache_of_its_own_kind_is_served_by_the_parts(monkeypatch):
    network, exact = pair()
    rows = served(monkeypatch)
    found = say(network, kv_cache.ConcatKVCache(2))
    torch.testing.assert_close(found.double(), say(exact, kv_cache.ConcatKVCache(2)), rtol=0, atol=3e-4)
    assert rows == []


# ---- a learner's product -----------------------------------------------------------------------------------------


def test_the_learners_int8_product_is_the_one_in_the_layers(tmp_path):
    source = learner_engine.reference_path("quantization").read_text(encoding="utf-8")
    old = "output[m, row] = total * scales[row]"
    assert source.count(old) == 1
    text = source.replace(old, "output[m, row] = np.float32(2) * total * scales[row]")
    (tmp_path / "quantization.py").write_text(text, encoding="utf-8")
    learner_engine.activate(tmp_path)
    try:
        lacking = compiled_layers.unavailable(torch.float32, packed=True)
        assert "around your multiply_int8_rows here (ArithmeticError: 3 * 1 + 3 * 2 came out as 18)" in lacking
    finally:
        learner_engine.deactivate()
    assert compiled_layers.unavailable(torch.float32, packed=True) is None


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["int8", "int4", "native"])
def test_the_real_model_says_the_same_in_float32_by_compiled_layers_and_plain_parts(quantization, smollm2_gguf):
    said, params = {}, SamplingParams(max_tokens=8, ignore_eos=True)
    for layers in ("plain", "compiled"):
        llm = LLM(smollm2_gguf, dtype="float32", device="cpu", quantization=quantization, layers=layers)
        if layers == "plain":
            for part in llm.model.modules():
                if isinstance(part, QuantizedLinear):
                    part.kernel = "plain"
        assert llm.layers == layers
        said[layers] = llm.generate(["The capital of Italy is"], params)[0].token_ids
    assert said["plain"] == said["compiled"]
