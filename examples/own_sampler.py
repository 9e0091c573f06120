"""A sampler of one's own, passed in: Mirostat, which holds the surprise of a text near a target, in bits a token.

After each token it moves its threshold: tokens that are more surprising than that are cut off before the draw.
Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", algorithm 2.

    python examples/own_sampler.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import LLM, SamplingParams


@dataclass
class State:
    """One request's own: its random numbers, its threshold in bits, and what its tokens were."""

    draws: torch.Generator
    threshold: float
    constraint: Any = None  # what a regex or a schema allows of the answer, and nothing else
    surprises: list[float] = field(default_factory=list)


class Mirostat:
    """The two methods that the engine needs of a sampler; this one leaves a request's temperature aside."""

    def __init__(self, target: float, rate: float = 0.1):
        self.target, self.rate = target, rate
        self.states: list[State] = []  # to look at afterwards

    def start(self, params: SamplingParams, prompt_token_ids: Sequence[int], constraint: Any = None) -> State:
        """A request begins. What is returned comes back with its logits."""
        draws = torch.Generator()
        draws.seed() if params.seed is None else draws.manual_seed(params.seed)
        self.states.append(State(draws, 2 * self.target, constraint))
        return self.states[-1]

    def sample(self, logits: Tensor, states: Sequence[State]) -> list[int | None]:
        """The next token of each request in the step, None where nothing is allowed; logits: [requests, vocab]."""
        return [self.draw(row, state) for row, state in zip(logits, states, strict=True)]

    def draw(self, logits: Tensor, state: State) -> int | None:
        """The next token of one request; logits: [vocab]."""
        if state.constraint is not None:
            logits = logits.masked_fill(~state.constraint.allowed(), -math.inf)
        if logits.max() == -math.inf:
            return None
        surprise = -logits.double().log_softmax(dim=-1) / math.log(2)  # [vocab], bits
        kept = surprise <= max(state.threshold, float(surprise.min()))  # the likeliest stays in any case
        probabilities = torch.where(kept, torch.exp2(-surprise), 0.0)
        token = int(torch.multinomial(probabilities, 1, generator=state.draws))
        observed = float(surprise[token] + probabilities.sum().log2())  # after what was cut off
        state.threshold -= self.rate * (observed - self.target)
        state.surprises.append(observed)
        if state.constraint is not None:
            state.constraint.advance(token)
        return token


def main() -> None:
    """The same beginning, with little surprise and with more."""
    for target in (0.5, 3.0):
        sampler = Mirostat(target)
        llm = LLM(sampler=sampler)
        answer = llm.generate("Once upon a time", SamplingParams(max_tokens=60, seed=7))[0]
        surprises = sampler.states[0].surprises
        print(f"target {target} bits, observed {sum(surprises) / len(surprises):.2f}: {answer.text!r}")


if __name__ == "__main__":
    main()
