"""The engine's sampler with a learner's function in it: a batch of requests, each with settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from llmfromscratch import learner_engine
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.in_engine import in_engine
from llmfromscratch.sampling_params import SamplingParams

_VOCAB, _STEPS = 300, 6  # more than the candidates that are ranked at first
_PROMPT = [3, 5, 5, 8]
_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 1e-6, "top_k": 1},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "typical_p": 0.7},
]


def check_in_sampler(name: str, own: Callable[..., Any]) -> None:
    """The engine's sampler with OWN in the place of its function NAME draws the tokens that it draws without."""
    compare(
        partial(_sampled, name, own),
        partial(_sampled, name, None),
        [Case(f"{len(_SETTINGS)} requests in one batch, each with settings of its own, {_STEPS} steps")],
        expected=f"the engine's sampler, with your {name} in it, to draw the same tokens as before",
        what="the tokens",
    )


def _sampled(name: str, own: Callable[..., Any] | None) -> NamedParts:
    """The tokens of every request, under its settings."""
    generator = torch.Generator().manual_seed(20)
    logits = 3 * torch.randn(_STEPS, _VOCAB, generator=generator)
    with in_engine("sampling", name, own) if own else nullcontext(learner_engine.reference("sampling")) as module:
        sampler = module.Sampler()
        rows = [
            sampler.start(SamplingParams(seed=seed, **settings), _PROMPT) for seed, settings in enumerate(_SETTINGS)
        ]
        for step in logits:
            sampler.sample(step.expand(len(rows), -1).clone(), rows)
    return NamedParts({_told(settings): row.token_ids for settings, row in zip(_SETTINGS, rows, strict=True)})


def _told(settings: dict[str, Any]) -> str:
    return "the tokens of the request with " + ", ".join(f"{name}={value}" for name, value in settings.items())
