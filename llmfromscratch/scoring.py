"""How probable a text is to the model: log-probabilities of its tokens, and its perplexity.

The passes are their own, beside those that generate: a request that asks for prompt_logprobs pays a second prefill for
them. In return they are the same whatever the scheduler, the chunks, and the prefixes that the cache has kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from llmfromscratch import kv_cache, model, quantized_cache, sampling
from llmfromscratch.batch import Batch

CHUNK = 128  # tokens a pass: the logits of as many rows over the whole vocabulary are in memory at once
_REQUEST = 0  # the cache is private, so any number will do


def prompt_logprobs(
    network: model.Model,
    ids: Sequence[int],
    top: int = 0,
    chunk: int = CHUNK,
    like: kv_cache.KVCache | None = None,
) -> list[sampling.TokenLogprobs | None]:
    """One entry a token; None for the first, which nothing predicts.

    top: how many of the most probable tokens are listed with each, ties by id. Nothing is drawn here, so `processed` is
    `raw`. like: an engine's cache; keys and values are rounded as they are there. Raises ValueError where the logits
    are NaN or infinite.
    """
    cache = quantized_cache.growing(like, network.config.num_layers)
    entries: list[sampling.TokenLogprobs | None] = [None]
    for start in range(0, len(ids) - 1, chunk):
        part, following = ids[start : start + chunk], ids[start + 1 : start + chunk + 1]
        logits = network(Batch.of([(_REQUEST, part[: len(following)], start)], all_logits=True), cache)
        entries += _entries(logits, following, top)
    return entries


def perplexity(entries: Sequence[sampling.TokenLogprobs | None]) -> float:
    """The exponential of the mean negative log-probability of the tokens that have one; at least one must."""
    surprises = [-entry.raw for entry in entries if entry is not None]
    mean = math.fsum(surprises) / len(surprises)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def _entries(logits: Tensor, ids: Sequence[int], top: int) -> list[sampling.TokenLogprobs]:
    """Entries of the tokens `ids`, each predicted by its row of the logits [tokens, vocab]."""
    logits = logits.float()
    if not logits.isfinite().all():
        raise ValueError("the model's logits are NaN or infinite: its weights or dtype are at fault.")
    log_probabilities = logits.log_softmax(dim=-1)
    chosen = log_probabilities.gather(-1, torch.tensor(ids, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    values, tokens = (part.tolist() for part in sampling.largest(log_probabilities, top))
    entries = []
    for token, raw, *best in zip(ids, chosen, tokens, values, strict=True):
        listed = tuple((other, value, value) for other, value in zip(*best, strict=True))
        entries.append(sampling.TokenLogprobs(token, raw, raw, listed))
    return entries
