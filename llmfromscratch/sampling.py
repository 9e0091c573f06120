"""From logits to a token: greedy, or drawn from the softmax at a temperature."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    max_tokens: new tokens at most, at least 1.
    temperature: 0 takes the most probable token; above 0 the logits are divided by it before the draw.
    stop_token_ids: ids that end the text besides the model's own end tokens.
    ignore_eos: go on past the model's end tokens, until max_tokens.
    seed: makes the draws of this request repeatable; None draws differently each time.
    priority: who is served first when not all can be: the larger, the more important. 0 is usual, below 0 can wait.

    Raises RequestError for a value that cannot be meant.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens!r}; it must be a whole number of at least 1.")
        number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature <= sys.float_info.max:  # NaN fails the comparison
            raise RequestError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or a positive number.")
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False.")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            raise RequestError(f"seed is {self.seed!r}; it must be None or a whole number from 0 to 2**63 - 1.")
        if not _is_int(self.priority) or abs(self.priority) > 1000:  # more would drown the clock it is set off against
            raise RequestError(f"priority is {self.priority!r}; it must be a whole number from -1000 to 1000.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: Any) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else (value,)
    if not all(_is_int(token) and token >= 0 for token in found) or _is_int(value):
        raise RequestError(f"stop_token_ids is {value!r}; it must be a list of token ids, whole numbers from 0 on.")
    return found


class Sampler:
    """Picks the next token of each row; every request draws from a random stream of its own."""

    def random_stream(self, seed: int | None) -> torch.Generator:
        """A request's own random numbers: the same for the same seed, whoever else is being served."""
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return generator

    def sample(self, logits: Tensor, params: SamplingParams, stream: torch.Generator) -> int:
        """logits: [vocab], finite. Returns the chosen token id; ties go to the lowest id under greedy decoding."""
        if params.temperature == 0:
            return int(logits.argmax())
        # the largest logit is taken off first: a tiny temperature would turn it into infinity. On the CPU and in
        # float64, which some GPUs lack: float32 rounds the tiniest temperatures to 0.
        wide = logits.cpu().double()
        scaled = (wide - wide.max()) / params.temperature
        return int(torch.multinomial(scaled.softmax(dim=-1), num_samples=1, generator=stream))
