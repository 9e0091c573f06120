"""Greedy texts with and without a penalty, and which tokens repeat a passage: what `repetition_curve` draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import kv_cache, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.widgets.sampling_stages import doubts_about_penalties, label_of

WINDOW = 24  # tokens over which the share of repeats is taken


@dataclass(frozen=True)
class Continuation:
    """A greedy answer. labels: its tokens, readable; ended: whether the model ended it; problems: of the penalty."""

    params: Any
    token_ids: tuple[int, ...]
    labels: tuple[str, ...]
    ended: bool
    problems: tuple[str, ...] = ()


def repeats(token_ids: Sequence[int], length: int) -> list[bool]:
    """For each token whether the passage of so many tokens that it ends was there before, in these tokens alone."""
    known: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(token_ids) + 1):
        passage = tuple(token_ids[max(0, end - length) : end])
        found.append(len(passage) == length and passage in known)
        known.add(passage)
    return found


def covered(repeated: Sequence[bool], length: int) -> list[bool]:
    """For each token whether it lies in a passage that was there before."""
    return [any(repeated[place : place + length]) for place in range(len(repeated))]


def shares(repeated: Sequence[bool], window: int = WINDOW) -> list[float]:
    """For each token which part of the last `window` tokens, or of all if there are fewer, repeat: 0 to 1."""
    return [sum(repeated[max(0, end - window) : end]) / min(end, window) for end in range(1, len(repeated) + 1)]


def continue_texts(
    llm: Any, prompt: str, settings: Sequence[Any], apply_penalties: Callable[..., Tensor] | None = None
) -> list[Continuation]:
    """Greedy texts for several SamplingParams, computed together: max_tokens of each, or up to an end token.

    llm: anything with `model` and `tokenizer`. apply_penalties: in the place of `sampling.apply_penalties`; without it
    `sampling.Sampler` picks the tokens.
    """
    ids = [int(index) for index in llm.tokenizer.encode(prompt)]
    if not ids:
        raise ValueError("There is nothing to continue; give a prompt of at least one character.")
    texts = [_Text(ids, params, apply_penalties) for params in settings]
    cache = kv_cache.ConcatKVCache(llm.model.config.num_layers)
    ends = llm.model.config.eos_token_ids
    while going := [number for number, text in enumerate(texts) if text.goes_on]:
        parts = [(number, texts[number].new, texts[number].done) for number in going]
        logits = llm.model(Batch.of(parts), cache).float().cpu()
        for number, row in zip(going, logits, strict=True):
            texts[number].grow(row, ends, llm.tokenizer)
    return [text.continuation(llm.tokenizer) for text in texts]


class _Text:
    """An answer that grows. new: tokens that the cache lacks, after `done` others."""

    def __init__(self, prompt: Sequence[int], params: Any, apply: Callable[..., Tensor] | None):
        self._prompt, self._params = prompt, params
        self._pick = _Engine(params, prompt) if apply is None else _Own(params, prompt, apply)
        self._answer: list[int] = []
        self._problems: list[str] = []
        self._ended = False
        self.new, self.done = list(prompt), 0

    @property
    def goes_on(self) -> bool:
        """Whether another token is wanted."""
        return not self._ended and len(self._answer) < self._params.max_tokens

    def grow(self, logits: Tensor, ends: Sequence[int], tokenizer: Any) -> None:
        """One more token. logits: [vocab]."""
        after, token = self._pick(logits.unsqueeze(0))
        if not self._problems:
            self._problems = self._doubts(logits, after[0], tokenizer)
        self.done += len(self.new)
        self.new = [token]
        self._ended = token in ends
        if not self._ended:
            self._answer.append(token)

    def _doubts(self, logits: Tensor, after: Tensor, tokenizer: Any) -> list[str]:
        seen, counts = _what_was_said(self._prompt, self._answer, len(logits))
        said = doubts_about_penalties(logits, after, seen, counts, self._params, lambda one: label_of(tokenizer, one))
        return [f"Token {len(self._answer) + 1}: {problem}" for problem in said]

    def continuation(self, tokenizer: Any) -> Continuation:
        """What has grown."""
        labels = tuple(label_of(tokenizer, token) for token in self._answer)
        return Continuation(self._params, tuple(self._answer), labels, self._ended, tuple(self._problems))


class _Engine:
    """The sampler of the engine."""

    def __init__(self, params: Any, prompt_ids: Sequence[int]):
        self._sampler = sampling.Sampler()
        self._row = self._sampler.start(params, prompt_ids)

    def __call__(self, logits: Tensor) -> tuple[Tensor, int]:
        """The logits [1, vocab] after the penalties, and the token that is taken."""
        after = sampling.adjust(logits, [self._row])
        token = self._sampler.sample(logits, [self._row])[0]
        if token is None:
            raise ValueError("sampling.Sampler found nothing to choose from.")
        return after, token


class _Own:
    """The largest logit after a learner's penalties."""

    def __init__(self, params: Any, prompt_ids: Sequence[int], apply: Callable[..., Tensor]):
        self._apply, self._prompt_ids = apply, list(prompt_ids)
        self._strengths = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._answer: list[int] = []

    def __call__(self, logits: Tensor) -> tuple[Tensor, int]:
        """As that of the engine's sampler."""
        seen, counts = _what_was_said(self._prompt_ids, self._answer, logits.shape[-1])
        settings = (torch.tensor([float(strength)]) for strength in self._strengths)
        after = self._apply(logits, seen.unsqueeze(0), counts.unsqueeze(0), *settings)
        if not isinstance(after, Tensor) or after.shape != logits.shape:
            shape = list(after.shape) if isinstance(after, Tensor) else f"{after!r:.40}"
            raise ValueError(f"apply_penalties returned {shape}; logits [rows, vocab] = {list(logits.shape)} expected.")
        token = int(after.argmax())
        self._answer.append(token)
        return after, token


def _what_was_said(prompt: Sequence[int], answer: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """seen: bool [vocab], of both; counts: int64 [vocab], of the answer."""
    counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab)
    seen = counts > 0
    seen[list(prompt)] = True
    return seen, counts
