"""Rotary frequencies: how fast each pair of dimensions turns with the position, and how long contexts stretch that.

Plain: Su et al., "RoFormer", section 3.2.2. Linear: Chen et al., "Extending Context Window of LLMs via Positional
Interpolation". YaRN: Peng et al., "YaRN", sections 3.2-3.4. llama3: Meta's Llama 3.1 reference code and model card.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmfromscratch.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, float32 [head_dim / 2], and the factor on cos and sin.

    The tensor is on the CPU even while a model is built on the meta device: it is computed, not loaded.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32, device="cpu"), 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config), _yarn_attention_factor(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow turns are stretched by the factor, fast ones kept, those between blended by their wavelength."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # full turns over the original context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = share.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Keeps what turns over beta_fast times in the original context, stretches what turns below beta_slow times."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    index = torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu")
    stretch = ((index - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """YaRN's temperature on the attention logits, put on cos and sin (section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
