"""From what a caller asks for to requests that the core can run: prompts become checked ids, parameters are held
against the model, and several answers to one prompt become several requests that share it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmfromscratch import constraints, sampling, scheduler, stopping, tokenizer
from llmfromscratch.config import ModelConfig
from llmfromscratch.errors import RequestError, TokenizerError

Prompt = str | Sequence[int]


class Intake:
    """Makes requests for one model.

    own: its tokenizer, or None. limits: how long prompts may be, and its special tokens. seed: what the seeds of
    requests that have none are made of, together with their numbers; None leaves them without.
    """

    def __init__(
        self, config: ModelConfig, own: tokenizer.Tokenizer | None, limits: tokenizer.TokenizerConfig, seed: int | None
    ):
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise RequestError(f"seed is {seed!r}; give a whole number, or None for other draws each time.")
        self.config, self.tokenizer, self.limits, self.seed = config, own, limits, seed
        self._numbers = itertools.count()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's own ends: its end tokens, and the padding token, behind which no text can come."""
        ends = self.config.eos_token_ids or self.limits.eos_ids  # Meta's own config files name none
        return ends if self.limits.pad_id is None else (*ends, self.limits.pad_id)

    def requests(
        self, prompt: Prompt, params: sampling.SamplingParams | None, arrival: float, sharing: bool = False
    ) -> list[scheduler.Request]:
        """The requests for params.n answers, the first choice first; one for beams, which are computed together.

        arrival: in seconds, on the engine's clock. sharing: the others wait for the first one's prompt, to share it.
        """
        if params is not None and not hasattr(params, "max_tokens"):
            raise RequestError(f"params is {params!r}; give a SamplingParams, or one for each prompt.")
        ids, params = self.prompt_ids(prompt), params or sampling.SamplingParams()
        self._check(params)
        room = self.config.context_length - len(ids)
        if params.max_tokens > room:  # as the core does it too; but a grammar has to know in time
            params = replace(params, max_tokens=room)
        made: list[scheduler.Request] = []
        for choice in range(params.n if params.beam_width is None else 1):
            number = next(self._numbers)
            seed = self._seed(params, made[0].request_id if made else number, choice)
            own = params if seed == params.seed else replace(params, seed=seed)
            made.append(scheduler.Request(number, ids, own, arrival=arrival, choice=choice))
            made[-1].follows = made[0] if sharing and choice else None
            made[-1].constraint = self._constraint(own)
            if own.stop:
                made[-1].stops = stopping.StopWatcher(stopping.AnswerText.of(self.tokenizer, ids, own))
        return made

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Checks a prompt against the vocabulary and the context, and cuts it where that was chosen."""
        ids, context = self.ids(prompt, "prompt"), self.config.context_length
        if not ids:
            raise RequestError("the prompt is empty; there is nothing to continue.")
        if len(ids) >= context and self.limits.truncation in (None, "chat"):
            raise RequestError(f"the prompt has {len(ids)} tokens; the context holds {context}, the answer included.")
        return tokenizer.truncate(ids, self.limits)

    def text_ids(self, text: Prompt) -> list[int]:
        """Checks a text whose own tokens are to be predicted: it is never cut, and may fill the context."""
        ids, context = self.ids(text, "text"), self.config.context_length
        if len(ids) > context:
            raise RequestError(f"the text has {len(ids)} tokens; the context holds {context}. Give it in parts.")
        if len(ids) < 2:
            raise RequestError(f"the text has {len(ids)} tokens; nothing predicts the first, so give at least 2.")
        return ids

    def ids(self, given: Prompt, kind: str) -> list[int]:
        """The token ids of a prompt or text, each in the vocabulary; text is encoded without control tokens."""
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise RequestError(f"a {kind} is text or a list of token ids, not {type(given).__name__}.")
        ids = required(self.tokenizer).encode(given) if isinstance(given, str) else list(given)
        vocab = self.config.vocab_size
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(f"the {kind} holds {token!r}; token ids are whole numbers from 0 to {vocab - 1}.")
        return ids

    def _check(self, params: sampling.SamplingParams) -> None:
        """What only the model and its tokenizer can tell about parameters."""
        most = self.config.vocab_size - 1
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if not 0 <= token <= most:
                    raise RequestError(f"{name} names token {token}; token ids are whole numbers from 0 to {most}.")
        for name in ("stop", "bad_words", "regex", "json_schema", "required_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(f"{name} is about text, and this checkpoint has no tokenizer; leave it out.")

    def _constraint(self, params: sampling.SamplingParams) -> Any:
        ends = stopping.end_ids(params, self.end_ids)
        return constraints.of(params, self.tokenizer, ends, self.config.vocab_size)

    def _seed(self, params: sampling.SamplingParams, number: int, choice: int) -> int | None:
        """The first choice has the seed it would have alone, the others seeds made of it."""
        seed = params.seed
        if seed is None and self.seed is not None:
            seed = _mixed(self.seed, number)
        return seed if seed is None or not choice else _mixed(seed, choice)


def required(own: tokenizer.Tokenizer | None) -> tokenizer.Tokenizer:
    """The tokenizer, where there is one. Raises TokenizerError."""
    if own is None:
        raise TokenizerError("this checkpoint has no tokenizer; give prompts as token ids.")
    return own


def _mixed(seed: int, number: int) -> int:
    """A seed from 0 to below 2**63; other pairs of numbers practically never give the same."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little") >> 1
