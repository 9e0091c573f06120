"""`diverges_at` names the first layer and operation at fault, and nothing where there is no fault."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tiny_models import SHAPES, VOCAB, all_logits, ours, random_ids, save_tiny, tiny_model, transformers_model

from llmfromscratch import LLM, diverges_at, kv_cache, model
from llmfromscratch.errors import RequestError

IDS = random_ids(12)


@pytest.fixture
def pair() -> tuple[model.Model, model.Model]:
    """Two equal models of four layers."""
    network = tiny_model(num_hidden_layers=4, tie_word_embeddings=False)
    return network, copy.deepcopy(network)


def test_equal_models_part_nowhere(pair):
    assert diverges_at(*pair, IDS) is None
    assert diverges_at(pair[0], pair[0], IDS) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_our_model_and_transformers_part_nowhere_either_way_round(shape):
    reference = transformers_model(shape)
    own = ours(reference)
    for ids in (IDS, IDS[:1]):
        assert diverges_at(own, reference, ids) is None
        assert diverges_at(reference, own, ids) is None


FAULTS = {
    "embed_tokens": ("embed_tokens", None),
    "layers.0.input_layernorm": ("layers.0.input_layernorm", 0),
    "layers.3.mlp.up_proj": ("layers.3.mlp.up_proj", 3),
    "layers.2.mlp.down_proj": ("layers.2.mlp.down_proj", 2),
    "layers.1.self_attn.v_proj": ("layers.1.self_attn.v_proj", 1),
    "layers.2.self_attn.o_proj": ("layers.2.self_attn.o_proj", 2),
    "layers.2.post_attention_layernorm": ("layers.2.post_attention_layernorm", 2),
    "norm": ("norm", None),
    "lm_head": ("lm_head", None),
}


@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.parametrize("against_transformers", [False, True])
def test_one_wrong_weight_is_found_where_it_is(place, against_transformers):
    fields = {"num_hidden_layers": 4, "tie_word_embeddings": False}
    reference = transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon", **fields)
    faulty = ours(reference)
    with torch.no_grad():
        weight = faulty.get_parameter(f"{place}.weight")
        weight[(IDS[0],) if place == "embed_tokens" else (0,) * weight.dim()] += 1.0
    found = diverges_at(reference if against_transformers else ours(reference), faulty, IDS)
    assert (found.operation, found.layer) == FAULTS[place]
    assert 0 < found.difference < 100 * found.scale


def test_rows_of_q_in_interleaved_order_are_found_at_the_projection(pair):
    right, wrong = pair
    heads, size = right.config.num_heads, right.config.head_dim
    with torch.no_grad():
        weight = wrong.layers[1].self_attn.q_proj.weight
        weight.copy_(weight.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(weight.shape))
    found = diverges_at(right, wrong, IDS)
    assert (found.operation, found.layer, found.position) == ("layers.1.self_attn.q_proj", 1, 0)


def test_a_wrong_epsilon_is_found_at_the_norm_that_has_it(pair):
    right, wrong = pair
    wrong.layers[2].post_attention_layernorm.eps *= 4
    found = diverges_at(right, wrong, IDS, tolerance=1e-9)
    assert (found.operation, found.layer) == ("layers.2.post_attention_layernorm", 2)


def test_a_wrong_rotation_is_found_before_the_output_projection_from_the_second_token_on(pair):
    right, wrong = pair
    wrong.rotary.frequencies = wrong.rotary.frequencies * 2
    found = diverges_at(right, wrong, IDS)
    assert found.operation == "layers.0.self_attn: rotary embedding and attention, before o_proj"
    # the first token sees itself only, whatever the rotation
    assert (found.layer, found.position) == (0, 1)


def test_a_wrong_activation_is_found_before_the_down_projection(pair, monkeypatch):
    reference = transformers_model("llama, 3 heads on 1")
    own = ours(reference)
    monkeypatch.setattr(model.F, "silu", torch.nn.functional.gelu)
    found = diverges_at(own, transformers_with_silu(reference), IDS)
    assert (found.operation, found.layer) == ("layers.0.mlp: activation times up, before down_proj", 0)


def transformers_with_silu(reference):
    """silu is patched for both, since both take it from torch; the oracle's is written out."""

    class Silu(torch.nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    for layer in reference.model.layers:
        layer.mlp.act_fn = Silu()
    return reference


def test_the_first_token_that_differs_is_named(pair):
    right, wrong = pair
    odd = next(token for token in range(VOCAB) if token not in IDS)
    with torch.no_grad():
        wrong.embed_tokens.weight[odd] += 1.0
    found = diverges_at(right, wrong, [*IDS[:7], odd, *IDS[7:]])
    assert (found.operation, found.position) == ("embed_tokens", 7)


def test_nan_on_one_side_counts_as_a_difference(pair):
    right, wrong = pair
    with torch.no_grad():
        wrong.layers[1].mlp.gate_proj.weight[0, 0] = float("nan")
    for sides in ((right, wrong), (wrong, right)):
        assert diverges_at(*sides, IDS).operation == "layers.1.mlp.gate_proj"


def test_results_of_different_shape_are_named_with_both_shapes():
    small, large = tiny_model(intermediate_size=40), tiny_model(intermediate_size=44)
    large.load_state_dict({**large.state_dict(), **{k: v for k, v in small.state_dict().items() if "mlp" not in k}})
    found = diverges_at(small, large, IDS)
    assert found.operation == "layers.0.mlp.gate_proj (shape [12, 40] against [12, 44])"


def test_the_tolerance_is_relative_to_the_largest_value(pair):
    right, wrong = pair
    with torch.no_grad():
        wrong.embed_tokens.weight *= 1 + 1e-5
    assert diverges_at(right, wrong, IDS, tolerance=1e-4) is None
    assert diverges_at(right, wrong, IDS, tolerance=1e-6).operation == "embed_tokens"


def test_models_of_another_kind_share_no_operation(pair):
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = dataclasses.replace(pair[0].config)
            self.layers = torch.nn.ModuleList()
            self.words = torch.nn.Embedding(VOCAB, 4)

        def forward(self, batch, cache):
            return self.words(batch.token_ids)

    with pytest.raises(RequestError, match="no operation of the same name"):
        diverges_at(pair[0], Other(), IDS)


def test_tracing_leaves_the_models_as_they_were(pair):
    before = all_logits(pair[0], IDS)
    diverges_at(*pair, IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in pair[0].modules())
    assert torch.equal(all_logits(pair[0], IDS), before)


def test_an_engine_can_be_compared_by_text_and_the_finding_reads_as_a_sentence(tmp_path):
    folder = save_tiny(tmp_path)
    right, wrong = LLM(folder, dtype="float32", device="cpu"), LLM(folder, dtype="float32", device="cpu")
    assert diverges_at(right, wrong, "Hello") is None
    with torch.no_grad():
        weight = wrong.model.layers[1].mlp.up_proj
        weight.weight = torch.nn.Parameter(weight.weight.clone())
        weight.weight[0] += 1.0
    found = diverges_at(right, wrong.model, "Hello")
    assert str(found).startswith(
        "the two part in layer 1, at layers.1.mlp.up_proj, first at token 0: largest difference"
    )
    with pytest.raises(RequestError, match="neither model has a tokenizer"):
        diverges_at(right.model, wrong.model, "Hello")


@pytest.mark.model
def test_the_real_model_and_transformers_part_nowhere_until_a_weight_is_wrong(smollm2_fp32, transformers_smollm2):
    text = "Why is the sky blue?"
    assert diverges_at(smollm2_fp32, transformers_smollm2, text) is None
    weight = smollm2_fp32.model.layers[3].mlp.up_proj.weight
    with torch.inference_mode():
        kept = weight[5].clone()
        weight[5, :] += 0.05
        try:
            found = diverges_at(transformers_smollm2, smollm2_fp32, text)
        finally:
            weight[5] = kept
    assert (found.operation, found.layer) == ("layers.3.mlp.up_proj", 3)


@pytest.mark.parametrize("settings", [{"block_size": 4}, {"kv_cache": "static"}, {"kv_cache": "concat"}])
def test_two_engines_with_different_caches_part_nowhere_and_leave_nothing_behind(tmp_path, settings):
    folder = save_tiny(tmp_path)
    plain = LLM(folder, dtype="float64", device="cpu", kv_cache="none")
    cached = LLM(folder, dtype="float64", device="cpu", **settings)
    for ids in (IDS, IDS[:1], IDS[:2], IDS[:3]):
        assert diverges_at(plain, cached, ids) is None
    assert cached.cache.length(-1) == 0
    with pytest.raises(KeyError):
        cached.cache.read(0, -1)


def test_a_cache_that_goes_wrong_is_found_where_it_does_when_it_is_held_against_none(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path)
    plain = LLM(folder, dtype="float64", device="cpu", kv_cache="none")
    cached = LLM(folder, dtype="float64", device="cpu", block_size=4)
    slots = kv_cache.slots_of
    # the position restarts at zero after a prefill: the first pass is right, and no later one
    monkeypatch.setattr(kv_cache, "slots_of", lambda table, start, length, size: slots(table, 0, length, size))
    found = diverges_at(plain, cached, IDS)
    assert (found.layer, found.position) == (0, len(IDS) // 2)
    assert "attention" in found.operation
