"""A turned residual stream computes the same, and has no channels that stand out."""

from __future__ import annotations

import pytest
import torch
from test_calibrated import logits
from test_calibration import random_windows
from tiny_models import SHAPES, ours, tiny_model, transformers_model

from llmfromscratch import calibrated, fused_layers, rotation
from llmfromscratch.errors import RequestError


@pytest.mark.parametrize("shape", SHAPES)
def test_the_function_stays_and_the_weights_do_not(shape):
    network = ours(transformers_model(shape), torch.float64)
    before, old = logits(network), [part.weight.clone() for part in network.modules() if hasattr(part, "weight")]
    rotation.rotate(network)
    torch.testing.assert_close(logits(network), before, rtol=1e-9, atol=1e-9)
    heads = {"q_norm", "k_norm"}  # norms of heads do not see the stream
    named = [(name, part) for name, part in network.named_modules() if hasattr(part, "weight")]
    for (name, part), weight in zip(named, old, strict=True):
        assert torch.equal(part.weight, weight) == (name.rpartition(".")[2] in heads)


def test_a_tied_head_is_untied_and_the_config_says_so():
    network = tiny_model()
    assert network.config.tie_word_embeddings
    rotation.rotate(network)
    assert not network.config.tie_word_embeddings
    assert not torch.allclose(network.lm_head.weight, network.embed_tokens.weight)


def test_a_channel_that_stood_out_does_so_no_more():
    network = tiny_model()
    network.embed_tokens.weight.data[:, 5] *= 100
    rotation.rotate(network)
    sizes = network.embed_tokens.weight.square().mean(dim=0).sqrt()
    assert sizes.max() < 5 * sizes.median()


def test_turns_are_orthogonal_and_made_by_their_seed():
    turn = rotation.orthogonal(36, 1)
    torch.testing.assert_close(turn @ turn.T, torch.eye(36, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.equal(turn, rotation.orthogonal(36, 1)) and not torch.equal(turn, rotation.orthogonal(36, 2))


def test_a_turned_network_can_be_calibrated_and_a_fused_or_packed_one_not_turned():
    network = ours(transformers_model(hidden_size=96, intermediate_size=64))
    rotation.rotate(network)
    calibrated.quantize(network, "gptq", random_windows(6, 40))
    assert logits(network).isfinite().all()
    fused = tiny_model()
    fused_layers.use("fused", fused)
    for other in (network, fused):
        with pytest.raises(RequestError, match="layer 0 holds no float products"):
            rotation.rotate(other)
