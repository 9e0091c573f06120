"""A network in few bits: every part becomes what the plan says, in place, and the engine goes on working around it."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tiny_models import all_logits, random_ids, save_tiny, tiny_model

from llmfromscratch import LLM, SamplingParams, cli, loading, medusa, quantization, quantized_model
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.memory_report import memory
from llmfromscratch.packed_weight import PackedWeight
from llmfromscratch.quantized_linear import QuantizedEmbedding, QuantizedLinear, W8A8Linear
from llmfromscratch.quantized_model import KINDS, PRODUCTS, Plan, nbytes, pin, quantize

SIZES = {"hidden_size": 288, "intermediate_size": 96, "num_hidden_layers": 3}  # 9 heads of 32; blocks divide all widths
STEPS = SamplingParams(max_tokens=6, ignore_eos=True)


def network(**changes):
    return tiny_model(**{**SIZES, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), **SIZES)


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The same by `quantization` alone, which has its own tests; NF4 by `PackedWeight`, which has."""
    if kind == "nf4":
        return PackedWeight.nf4(weight).dequantize()
    bits = int(kind[-1])
    group = None if bits == 8 else 32
    return quantization.quantize(weight.float(), bits, group, symmetric=bits == 8).dequantize()


def float_twin(float_network, kind: str, ends: str = "int8"):
    """A float network whose weights are the rounded ones."""
    twin = copy.deepcopy(float_network)
    for name, weight in twin.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            weight.data = rounded(weight.data, kind).to(weight.dtype)
        elif module in ("embed_tokens", "lm_head"):
            weight.data = rounded(weight.data, ends).to(weight.dtype)
    return twin


# ---- what it computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_network_computes_what_a_float_one_with_the_rounded_weights_computes(kind, tied):
    own = network(tie_word_embeddings=tied)
    wanted, before = all_logits(float_twin(own, kind), random_ids(20)), all_logits(own, random_ids(20))
    quantize(own, kind)
    found = all_logits(own, random_ids(20))
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)  # grids are float32, the network float64
    assert (found - before).abs().max() > 0.1  # not nothing
    assert isinstance(own.lm_head, QuantizedLinear) and isinstance(own.embed_tokens, QuantizedEmbedding)
    assert (own.lm_head.data.data_ptr() == own.embed_tokens.data.data_ptr()) is tied


def test_w8a8_makes_integer_products_of_the_layers_and_leaves_the_head_its_inputs():
    own = network()
    wanted = all_logits(float_twin(own, "int8"), random_ids(20))
    quantize(own, "w8a8")
    assert all(isinstance(layer.get_submodule(name), W8A8Linear) for layer in own.layers for name in PRODUCTS)
    assert isinstance(own.lm_head, QuantizedLinear)
    found = all_logits(own, random_ids(20))
    assert 1e-3 < (found - wanted).norm() / wanted.norm() < 0.6  # near, and rounded once more


def test_a_plan_s_exceptions_count_from_the_narrowest_name_to_the_widest():
    plan = Plan("int4", parts={"layers.1.mlp.down_proj": "int8", "layers.1": "nf4", "mlp.down_proj": "keep"})
    own = network()
    quantize(own, plan)
    kinds = {
        (index, name): getattr(own.layers[index].get_submodule(name), "kind", "keep")
        for index in range(3)
        for name in PRODUCTS
    }
    for (index, name), kind in kinds.items():
        if name == "mlp.down_proj":
            assert kind == ("int8" if index == 1 else "keep")
        else:
            assert kind == ("nf4" if index == 1 else "int4")


def test_three_bits_are_packed_and_embedding_and_head_may_be_left_alone():
    own = network()
    quantize(own, Plan("int3", embed_tokens="keep"))
    assert own.layers[0].mlp.up_proj.kind == "int3" and isinstance(own.lm_head, torch.nn.Linear)
    twin = network()
    for layer in twin.layers:
        for name in PRODUCTS:
            weight = layer.get_submodule(name).weight
            weight.data = rounded(weight.data, "int3").to(weight.dtype)
    torch.testing.assert_close(all_logits(own, [1, 2, 3]), all_logits(twin, [1, 2, 3]), rtol=0, atol=5e-3)


def test_biases_stay():
    own = network(attention_bias=True, mlp_bias=True)
    wanted = all_logits(float_twin(own, "int8"), random_ids(9))
    quantize(own, "int8")
    torch.testing.assert_close(all_logits(own, random_ids(9)), wanted, rtol=0, atol=5e-3)


def test_channels_of_zeros_come_out_as_zeros():
    own = network()
    own.layers[0].mlp.up_proj.weight.data[5] = 0
    for kind in ("int8", "int4", "nf4", "w8a8"):
        copied = copy.deepcopy(own)
        quantize(copied, kind)
        up = copied.layers[0].mlp.up_proj
        assert (up.packed().dequantize()[5] == 0).all() and all_logits(copied, [1, 2]).isfinite().all()


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_calibrated_methods_make_int4_of_every_product(method):
    own = network()
    windows = torch.tensor([random_ids(64, seed) for seed in range(12)])
    quantize(own, method, windows)
    assert all(layer.get_submodule(name).kind == "int4" for layer in own.layers for name in PRODUCTS)
    assert own.lm_head.kind == "int8" and all_logits(own, [1, 2]).isfinite().all()


# ---- memory ------------------------------------------------------------------------------------------------------


def test_float_weights_are_given_up_layer_by_layer(monkeypatch):
    own = network(num_hidden_layers=4)
    weights = [[weakref.ref(layer.get_submodule(name).weight) for name in PRODUCTS] for layer in own.layers]
    seen = []

    def watched(items, *args, **options):
        for item in items:
            gc.collect()
            seen.append([sum(ref() is not None for ref in layer) for layer in weights])
            yield item

    monkeypatch.setattr(quantized_model, "progress_bar", watched)
    quantize(own, "int8")
    assert seen == [[0] * index + [7] * (4 - index) for index in range(4)]


def test_nbytes_counts_what_is_shared_once():
    own = network()
    quantize(own, "int4")
    layers = sum(
        layer.get_submodule(name).out_features * layer.get_submodule(name).in_features * 20 / 32
        for layer in own.layers
        for name in PRODUCTS
    )
    vocab, hidden = own.config.vocab_size, own.config.hidden_size
    norms = 8 * (2 * 3 * hidden + hidden)  # float64
    assert nbytes(own) == layers + norms + vocab * hidden + 4 * vocab


def test_int8_takes_at_most_54_percent_of_bfloat16():
    # an embedding as wide as the real one: a scale a row is 4 bytes for 576 codes
    own = network()
    whole = sum(loading.module_sizes(own.config, "bfloat16").values())
    quantize(own.bfloat16(), "int8")
    assert nbytes(own) <= 0.54 * whole


@pytest.mark.model
def test_the_real_model_in_int8_takes_at_most_54_percent_of_bfloat16_and_still_reads(smollm2_gguf):
    llm = LLM(smollm2_gguf, dtype="bfloat16", device="cpu", quantization="int8", kv_cache_memory=2**26)
    assert nbytes(llm.model) <= 0.54 * sum(loading.module_sizes(llm.config, "bfloat16").values())
    # 12.4 unrounded, 11.8 here; a broken model is surprised by every word, some hundred times as much
    assert llm.perplexity("The sky appears blue because of a phenomenon known as Rayleigh scattering.") < 14


# ---- choosing for a budget ---------------------------------------------------------------------------------------


def test_a_plan_within_a_budget_is_the_one_that_choosing_finds():
    sizes = {"layers.0.mlp.up_proj": 3200, "layers.0.mlp.down_proj": 6400, "embed_tokens": 12800}
    damage = {
        "layers.0.mlp.up_proj": {3: 0.5, 4: 0.2, 8: 0.01},
        "layers.0.mlp.down_proj": {3: 0.9, 4: 0.1, 8: 0.02},
        "embed_tokens": {4: 0.3, 8: 0.0},
    }
    taken = {"int3": 4, "int4": 5, "int8": 8}
    for budget in (13000, 14000, 17000, 20000, 30000):
        plan = Plan.within(budget, damage, sizes)
        kinds = {**plan.parts, "embed_tokens": plan.embed_tokens}
        assert sum(sizes[name] * taken[kind] for name, kind in kinds.items()) <= 8 * budget
        # nothing that fits is left: no part could take its next step in what remains
        left = 8 * budget - sum(sizes[name] * taken[kind] for name, kind in kinds.items())
        for name, kind in kinds.items():
            more = [taken[f"int{bits}"] for bits in damage[name] if taken[f"int{bits}"] > taken[kind]]
            assert all(sizes[name] * (bits - taken[kind]) > left for bits in more)
    assert Plan.within(10**6, damage, sizes).parts == dict.fromkeys(list(sizes)[:2], "int8")


def test_a_plan_within_a_budget_takes_no_more_bytes_than_it_says():
    sizes = {f"layers.{i}.{name}": 0 for i, name in itertools.product(range(3), PRODUCTS)}
    own = network()
    for name in sizes:
        sizes[name] = own.get_submodule(name).weight.numel()
    damage = {name: {3: 1.0, 4: 0.3, 8: 0.1 / (1 + number)} for number, name in enumerate(sizes)}
    budget = sum(sizes.values()) * 6 / 8
    plan = Plan.within(budget, damage, sizes)
    assert set(plan.parts.values()) >= {"int4", "int8"}
    quantize(own, plan)
    parts = [own.get_submodule(name) for name in sizes]
    scales = sum(part.scales.nbytes for part in parts)
    assert budget * 0.9 < sum(part.packed().nbytes for part in parts) - scales <= budget


def test_a_budget_that_nothing_fits_is_refused_with_both_numbers():
    with pytest.raises(RequestError, match="take 1.6 kB at their fewest bits, and the budget is 1.5 kB"):
        Plan.within(1500, {"layers.0.mlp.up_proj": {3: 1.0, 8: 0.0}}, {"layers.0.mlp.up_proj": 3200})
    with pytest.raises(RequestError, match=r"of \[5\] bits"):
        Plan.within(1500, {"layers.0.mlp.up_proj": {5: 1.0}}, {"layers.0.mlp.up_proj": 3200})


# ---- in the engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "w8a8"])
def test_the_engine_quantizes_what_it_loads(folder, kind):
    llm = LLM(folder, dtype="float64", device="cpu", quantization=kind)
    by_hand = LLM(folder, dtype="float64", device="cpu", layers="plain")
    quantize(by_hand.model, kind)
    prompt = random_ids(12)
    assert llm.generate([prompt], STEPS)[0].token_ids == by_hand.generate([prompt], STEPS)[0].token_ids
    assert quantized_model.is_quantized(llm.model) and llm.model.embed_tokens.weight.dtype == torch.float64


def test_the_engine_calibrates_on_a_text_of_ones_own(folder):
    text = "".join(chr(ord(" ") + number % 90) for number in range(9000))
    llm = LLM(folder, dtype="float32", device="cpu", quantization=Plan(method="awq", text=text))
    assert llm.model.layers[0].mlp.up_proj.kind == "int4"
    assert len(llm.generate([random_ids(5)], STEPS)[0].token_ids) == 6


@pytest.mark.parametrize("settings", [{"kv_cache": "none"}, {"kv_cache": "static"}, {"speculative": "skip"}])
def test_other_parts_of_the_engine_go_on_working(folder, settings):
    plain = LLM(folder, dtype="float32", device="cpu", quantization="int8", layers="plain")
    llm = LLM(folder, dtype="float32", device="cpu", quantization="int8", layers="plain", **settings)
    pin(plain.model, "plain")
    pin(llm.model, "plain")
    prompt = random_ids(12)
    assert llm.generate([prompt], STEPS)[0].token_ids == plain.generate([prompt], STEPS)[0].token_ids
    assert llm.perplexity(prompt) == pytest.approx(plain.perplexity(prompt), rel=1e-5)


def test_the_memory_report_counts_packed_weights(folder):
    llm = LLM(folder, dtype="float32", device="cpu", quantization="int4")
    assert memory(llm).of("weights").allotted == nbytes(llm.model)


def test_a_quantized_model_may_draft_for_a_float_one(folder):
    draft = LLM(folder, dtype="float32", device="cpu", quantization="int8")
    llm = LLM(folder, dtype="float32", device="cpu", speculative=draft)
    alone = LLM(folder, dtype="float32", device="cpu")
    # what a draft costs is what it reads
    assert llm.core.speculation.drafter.cost == pytest.approx(nbytes(draft.model) / nbytes(alone.model))
    prompt = random_ids(12)
    assert llm.generate([prompt], STEPS)[0].token_ids == alone.generate([prompt], STEPS)[0].token_ids


def test_medusa_heads_take_the_rows_of_a_packed_head(folder):
    llm = LLM(folder, dtype="float32", device="cpu", quantization="int8", layers="plain")
    width, words = llm.config.hidden_size, torch.tensor([3, 8, 9])
    drafter = medusa.Medusa(medusa.Heads(torch.zeros(2, width, width), torch.zeros(2, width), words))
    drafter.attach(llm)
    assert torch.equal(drafter._rows, llm.model.lm_head.packed().dequantize()[words])
    weights = LLM(folder, dtype="float32", device="cpu", layers="plain").model.state_dict()
    count = sum(weight.numel() for name, weight in weights.items() if name != "lm_head.weight")
    assert drafter.cost == pytest.approx((2 * width * width + 3 * width) / count / 2)


def test_a_model_that_a_learner_wrote_is_quantized_by_its_parts_names(folder, tmp_path):
    shutil.copy(Path(loading.__file__).with_name("model.py"), tmp_path / "model.py")
    code = (
        "import sys; from llmfromscratch import LLM, SamplingParams, model\n"
        "llm = LLM(sys.argv[1], dtype='float32', device='cpu', quantization='int8')\n"
        "assert model.__file__.startswith(sys.argv[2]), model.__file__\n"
        "assert llm.layers == 'plain' and type(llm.model.layers[0].mlp.up_proj).__name__ == 'QuantizedLinear'\n"
        "print(llm.generate([[1, 5, 9]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids)\n"
    )
    environment = {**os.environ, "LLMFROMSCRATCH_ENGINE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    llm = LLM(folder, dtype="float32", device="cpu", quantization="int8", layers="plain")
    assert done.stdout.strip() == str(llm.generate([[1, 5, 9]], STEPS)[0].token_ids)


def test_the_command_line_quantizes(folder, capsys):
    arguments = ["generate", "--raw", "hello", "--model", str(folder), "--dtype", "float32", "--max-tokens", "5"]
    assert cli.main([*arguments, "--quantization", "w8a8", "--ignore-eos"]) == 0
    llm = LLM(folder, dtype="float32", quantization="w8a8")
    wanted = llm.generate(["hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0].text
    assert capsys.readouterr().out == wanted + "\n"
    assert cli.main([*arguments, "--quantization", "native"]) == 1
    assert "keeps the blocks of a GGUF file" in capsys.readouterr().err


def test_the_server_s_command_takes_the_same(folder, monkeypatch):
    command, asked = pytest.importorskip("llmfromscratch.server.command"), {}

    def stop(model, **settings):
        asked.update(settings)
        raise RequestError("far enough")

    monkeypatch.setattr(command, "LLM", stop)
    assert cli.main(["serve", str(folder), "--port", "0", "--quantization", "int4"]) == 1
    assert asked["quantization"] == "int4"


def test_every_packed_product_of_a_network_is_pinned():
    own = network()
    quantize(own, "int4")
    pin(own, "plain")
    assert {part.kernel for part in own.modules() if isinstance(part, QuantizedLinear)} == {"plain"}
    with pytest.raises(RequestError, match="kernel is 'fast'; expected one of auto, compiled, torch, plain"):
        pin(own, "fast")


# ---- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "w8a8"])
@pytest.mark.parametrize("where", ["layers.1.mlp.up_proj", "embed_tokens"])
def test_weights_that_are_no_numbers_are_refused_by_name(kind, wrong, where):
    own = network()
    own.get_submodule(where).weight.data[3, 7] = wrong
    with pytest.raises(CheckpointError, match=f"'{where}.weight': it holds NaN or infinity"):
        quantize(own, kind)


def test_a_width_that_is_no_whole_blocks_is_refused_by_name_and_int8_takes_it():
    own = network(intermediate_size=40)
    with pytest.raises(RequestError, match="layers.0.mlp.down_proj cannot be int4: a width of 40 .* int8 takes any"):
        quantize(own, "int4")
    other = network(intermediate_size=40)
    quantize(other, Plan("int4", parts={"mlp.down_proj": "int8"}))
    assert all_logits(other, [1, 2]).isfinite().all()


def test_what_is_quantized_cannot_be_quantized_again():
    own = network()
    quantize(own, "int8")
    with pytest.raises(RequestError, match="quantized already"):
        quantize(own, "int4")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"products": "int5"}, "products is 'int5'; expected one of keep, int8"),
        ({"parts": {"layers.0": "fp8"}}, "layers.0 is 'fp8'"),
        ({"embed_tokens": "w8a8"}, "embed_tokens is 'w8a8'"),
        ({"method": "magic"}, "method is 'magic'; expected one of round, gptq, awq"),
        ({"group": 48}, "group is 48; expected one of 32, 64, 128"),
        ({"method": "gptq", "products": "int8"}, "makes int4 of every product"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(settings, words):
    with pytest.raises(RequestError, match=words):
        Plan(**settings)


def test_a_tied_head_cannot_be_of_another_kind_than_the_embedding():
    with pytest.raises(RequestError, match="the head is tied to the embedding, so both are of one kind"):
        quantize(network(), Plan(lm_head="int4"))
    own = network(tie_word_embeddings=False)
    quantize(own, Plan(lm_head="int4"))
    assert (own.embed_tokens.kind, own.lm_head.kind) == ("int8", "int4")


def test_names_in_a_plan_that_fit_no_part_are_refused():
    with pytest.raises(RequestError, match=r"the plan names mlp.dwon_proj, layers.7, and the network has no such part"):
        quantize(network(), Plan(parts={"mlp.dwon_proj": "int8", "layers.7": "int8"}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int5"}, f"'int5'; expected a Plan, None, or one of {re.escape(', '.join(KINDS))}"),
        ({"quantization": 8}, "quantization is 8"),
        ({"quantization": "native", "device": {"cpu": 1e9}}, "native.* puts the blocks of a file on one device"),
        ({"quantization": "int8", "compile": True}, "compile=True makes graphs of float weights"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_loaded(settings, words):
    with pytest.raises(RequestError, match=words):
        LLM("there is no such file", **settings)


def test_budgets_for_devices_hold_and_quantize_where_the_layers_lie(folder):
    llm = LLM(folder, dtype="float32", device={"cpu": 1e9}, quantization="int8")
    assert len(llm.generate([random_ids(5)], STEPS)[0].token_ids) == 6


def test_a_calibrated_method_without_a_tokenizer_or_with_too_little_text_is_refused(tmp_path, folder):
    bare = save_tiny(tmp_path / "bare", with_tokenizer=False, **SIZES)
    with pytest.raises(RequestError, match='"gptq" reads a text, and the checkpoint brings no tokenizer'):
        LLM(bare, dtype="float32", device="cpu", quantization="gptq")
    with pytest.raises(RequestError, match="tokens"):
        LLM(folder, dtype="float32", device="cpu", quantization=Plan(method="gptq", text="too short"))
    with pytest.raises(RequestError, match="give its token windows"):
        quantize(network(), "gptq")
