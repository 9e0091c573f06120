"""Stand-ins of chapter 7: a model on which methods can be told apart, models that only pretend to have few bits, and a
cache without frames.

None of this is needed to run a quantized model; it is what the chapter compares methods with.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import LLM, calibrated, calibration, kv_cache, model, quantized_cache

LOWEST, HIGHEST = 0.8, 1.25  # the factors of `off_lattice`


# ---- the same function off the lattice ---------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def off_lattice(network: model.Model, seed: int = 0) -> model.Model:
    """A copy of a network with exactly the same function whose weights lie on no lattice.

    The packaged model's weights were rounded to 4 bits in groups of 32 before we got them. Asymmetric rounding with
    groups of 32 finds that lattice again and loses nothing, so there no method can be told from another. Here every
    input column of the layers' products is multiplied by a factor of its own, from LOWEST to HIGHEST, and what makes
    that input is divided by it: the gain of the norm before q, k, v and before gate and up; the rows of v before o; the
    rows of up before down. Embedding and head stay. network: float32 or float64, layers "plain"; half precision would
    be rounded again.
    """
    twin: Any = copy.deepcopy(network)
    config = network.config
    if config.tie_word_embeddings:
        twin.lm_head.weight = twin.embed_tokens.weight  # a deep copy of both parts them
    dice = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Tensor:
        return torch.rand(count, generator=dice, dtype=torch.float64) * (HIGHEST - LOWEST) + LOWEST

    layer: Any
    for layer in twin.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            columns = factors(config.hidden_size)
            norm.weight.div_(columns)
            for reader in readers:
                reader.weight.mul_(columns)
        # query heads that look at the same values share the factors of those
        rows = factors(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, 1, config.head_dim)
        columns = rows.expand(-1, config.num_heads // config.num_kv_heads, -1).flatten()
        _divide_rows(attention.v_proj, rows.flatten())
        attention.o_proj.weight.mul_(columns)
        columns = factors(config.intermediate_size)
        _divide_rows(mlp.up_proj, columns)
        mlp.down_proj.weight.mul_(columns)
    return twin


def _divide_rows(linear: nn.Linear, factors: Tensor) -> None:
    linear.weight.div_(factors[:, None])
    if linear.bias is not None:
        linear.bias.div_(factors)


# ---- pretending --------------------------------------------------------------------------------------------------


def simulated(
    network: model.Model, bits: int, group: int | None, method: str = "rounding", windows: Tensor | None = None
) -> model.Model:
    """A copy whose layers hold the numbers that few bits can say, in float: as wrong as if it had them, and no smaller.

    bits, group: as in `quantization.grids_of`; 8 bits are symmetric. method: "rounding", or one of calibrated.METHODS
    over the token ids in `windows`. Takes memory for a second model.
    """
    copied = copy.deepcopy(network)
    if method == "rounding":
        calibrated.round_off(copied, bits, group, symmetric=bits == 8)
    else:
        assert windows is not None, f"{method} needs windows of a text to calibrate on"
        calibrated.quantize(copied, method, windows, bits, group, simulate=True)
    return copied


def without_frames(llm: LLM) -> LLM:
    """The same LLM, with a cache of few bits, that keeps keys as they come from now on: no middle, no spread."""
    cache: Any = llm.core.cache
    layout = kv_cache.CacheLayout.of(llm.config, cache.codec.dtype)
    cache.codec = quantized_cache.Codec.unframed(cache.codec.bits, layout)
    return llm


def moments_of(network: model.Model, windows: Tensor, layer: int) -> dict[str, Tensor]:
    """The moments of what each product of a layer reads in a text, as `calibration.layer_by_layer` gives them."""
    found: dict[str, Tensor] = {}

    def look(index: int, moments: dict[str, Tensor]) -> None:
        if index == layer:
            found.update(moments)

    first = copy.copy(network)  # the same parts, fewer layers: those behind need not be computed
    first._modules = {**network._modules, "layers": network.layers[: layer + 1]}
    calibration.layer_by_layer(first, windows, look, "Moments")
    return found
