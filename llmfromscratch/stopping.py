"""When an answer is over: end tokens, a padding token, stop tokens, and stop strings however they are cut into tokens.

    tokens ─▶ IncrementalDecoder ─▶ StopMatcher ─▶ text that is certain, up to the first stop string

The core watches, so that no token is computed behind a stop string (`StopWatcher`); whoever reads the answer turns its
tokens into text the same way (`AnswerText`), so that nothing of a stop string comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmfromscratch import sampling, tokenizer
from llmfromscratch.errors import RequestError


def end_ids(params: sampling.SamplingParams, own: Iterable[int]) -> frozenset[int]:
    """The tokens that end a request: its stop tokens, and the model's `own` ends unless it ignores them."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(own))


class AnswerText:
    """The text of one answer while its tokens come, cut at the first stop string.

    own: the tokenizer; without one there is no text. prompt_ids: the tokens before the answer. Ids that the tokenizer
    lacks, where an embedding is padded to a round number, are no text. Raises RequestError for stop strings without a
    tokenizer: nothing could find them.
    """

    def __init__(
        self,
        own: tokenizer.Tokenizer | None,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        include: bool = False,
    ):
        if stops and own is None:
            raise RequestError("there is no tokenizer, so stop strings cannot be found; give stop_token_ids.")
        self._own, self._decoder = own, None
        if own is not None:
            known = [index for index in prompt_ids if index in own]
            self._decoder = tokenizer.IncrementalDecoder(own, known)
        self._matcher = tokenizer.StopMatcher(stops, include)

    @classmethod
    def of(
        cls, own: tokenizer.Tokenizer | None, prompt_ids: Sequence[int], params: sampling.SamplingParams
    ) -> AnswerText:
        """The text of an answer with these parameters."""
        return cls(own, prompt_ids, params.stop, params.include_stop)

    @property
    def stopped(self) -> str | None:
        """The stop string that was met; after it no text comes out."""
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """The text that one more token makes certain."""
        if self._decoder is None or self._own is None or token not in self._own:
            return ""
        return self._matcher.push(self._decoder.push(token))

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        rest = self._decoder.flush() if self._decoder and self.stopped is None else ""
        return self._matcher.push(rest) + self._matcher.flush()


class StopWatcher:
    """Called with each new token of a request; True once the text holds one of its stop strings."""

    def __init__(self, text: AnswerText):
        self._text = text

    @property
    def stopped(self) -> str | None:
        """The stop string that was met."""
        return self._text.stopped

    def __call__(self, token: int) -> bool:
        """Takes the token in; whether the answer ends with it."""
        self._text.push(token)
        return self.stopped is not None
