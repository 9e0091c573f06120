"""The residual stream turned, so that no channel of it stands out: the same function, weights that are easier to round.

    embed · Q      every product that reads the stream · Q      Qᵀ · every product that adds to it      head · Q

A few channels of the stream are far larger than all others, and so are weights that meet them. An orthogonal Q mixes
all channels evenly. RMSNorm divides by the length of a vector, which turning leaves alone; its gain does not commute
with Q, and moves into the products behind it first. The head takes the last norm's gain, which the embedding must not,
so a tied head gets weights of its own. Ashkboos et al. 2024, "QuaRot", section 4, for the stream alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import model
from llmfromscratch.errors import RequestError

_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


@torch.inference_mode(False)
@torch.no_grad()
def rotate(network: model.Model, seed: int = 0) -> None:
    """Turns the residual stream of a float network, in place, by a random orthogonal matrix.

    Weights are turned in float64 and rounded once to their dtype. A tied head is untied, in the network's config too:
    that costs the embedding's size once more. Raises RequestError for layers that are fused or quantized.
    """
    for index, layer in enumerate(network.layers):
        parts = [layer.get_submodule(name) for names in (*_READERS.values(), _WRITERS) for name in names]
        if hasattr(layer, "fuse") or any(not isinstance(part, nn.Linear) for part in parts):
            raise RequestError(f'layer {index} holds no float products; give a network of LLM(..., layers="plain").')
    turn = orthogonal(network.config.hidden_size, seed)
    for layer in network.layers:
        for norm, readers in _READERS.items():
            gain = _take_gain(layer.get_submodule(norm))
            for name in readers:
                _set(layer.get_submodule(name), "weight", lambda weight, gain=gain: (weight * gain) @ turn)
        for name in _WRITERS:
            part = layer.get_submodule(name)
            _set(part, "weight", lambda weight: turn.T @ weight)
            if part.bias is not None:
                _set(part, "bias", lambda bias: bias @ turn)
    gain = _take_gain(network.norm)
    _set(network.lm_head, "weight", lambda weight: (weight * gain) @ turn)
    _set(network.embed_tokens, "weight", lambda weight: weight @ turn)
    network.config = replace(network.config, tie_word_embeddings=False)


def orthogonal(size: int, seed: int = 0) -> Tensor:
    """A random rotation or reflection, float64 [size, size], all alike probable: from the QR of normal numbers."""
    numbers = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    turn, upper = torch.linalg.qr(numbers)
    return turn * upper.diagonal().sign()  # without it some would come more often. Mezzadri 2007, section 5


def _take_gain(norm: Any) -> Tensor:
    gain = norm.weight.detach().double().cpu()
    norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
    return gain


def _set(part: Any, name: str, change: Any) -> None:
    old = getattr(part, name)
    setattr(part, name, nn.Parameter(change(old.detach().double().cpu()).to(old), requires_grad=False))
