"""Chapter 3's sketch: the softmax written out. The engine lets torch do it, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor) -> Tensor:
    """Turns each row of scores into weights that are positive and sum to 1: e**score, divided by the row's sum.

    scores: a floating-point tensor [..., context], of any number of dimensions; every row has a number in it, and
    -inf stands for "may not look": its weight is 0. Returns the same shape and dtype; `scores` stays as it is.

    e**100 is beyond float32. Subtracting the row's largest score first changes no weight, because numerator and
    denominator shrink by the same factor, and keeps every power at 1 or below. Milakov and Gimelshein, "Online
    normalizer calculation for softmax", section 2.

    Example: [0.0, 0.0, -inf] is [0.5, 0.5, 0.0], and so is [1000.0, 1000.0, -inf].
    """
    powers = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return powers / powers.sum(dim=-1, keepdim=True)
