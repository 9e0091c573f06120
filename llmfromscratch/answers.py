"""What comes back for a request: text in pieces while it runs, or the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmfromscratch import sampling, scheduler, tokenizer
from llmfromscratch.metrics import RequestMetrics
from llmfromscratch.stopping import AnswerText


@dataclass(frozen=True)
class Completion:
    """One answer. finish_reason: "stop" (an end or padding token, a stop token, a stop string), "length" (max_tokens or
    the context is full), or "abort" (then `error` says why). token_ids holds every token the model gave, the end token
    too; text leaves it out, and ends before a stop string, or behind it where include_stop asks for that.
    logprobs, prompt_logprobs: one entry a token, where they were asked for (None for the prompt's first token).
    others: the other answers to its prompt, where n asked for several. metrics: how long it waited and took. Two
    answers that say the same are equal whatever they took, and whatever the others say."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    error: str | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    logprobs: list[sampling.TokenLogprobs] | None = None
    prompt_logprobs: list[sampling.TokenLogprobs | None] | None = None
    others: tuple[Completion, ...] = field(default=(), compare=False, repr=False)

    @property
    def choices(self) -> list[Completion]:
        """All answers to the prompt, this one first."""
        return [self, *self.others]

    @classmethod
    def of(cls, requests: Sequence[scheduler.Request], texts: Sequence[str]) -> Completion:
        """The answer to the first of some requests that have ended, the others being other choices for its prompt."""
        request, *more = requests
        return cls(
            texts[0],
            list(request.token_ids),
            request.prompt_token_ids,
            request.finish_reason or "abort",
            request.error,
            RequestMetrics.of(request),
            None if request.logprobs is None else request.logprobs[: len(request.token_ids)],
            request.prompt_logprobs,
            tuple(cls.of([other], [text]) for other, text in zip(more, texts[1:], strict=True)),
        )

    @classmethod
    def read(cls, requests: Sequence[scheduler.Request], own: tokenizer.Tokenizer | None) -> Completion:
        """The same, the texts being read with a tokenizer."""
        readers = [Reader(request, own) for request in requests]
        return cls.of(requests, ["".join(piece.text for piece in reader.new_pieces()) for reader in readers])


@dataclass(frozen=True)
class Piece:
    """Text that has become certain while streaming; the last piece of a choice carries its finish reason.

    choice: which answer it belongs to, where n asks for several. logprobs: one entry for each of token_ids, where asked
    for."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    choice: int = 0
    logprobs: tuple[sampling.TokenLogprobs, ...] = ()


class Reader:
    """Turns the tokens of one request into pieces of text while they come, up to a stop string."""

    def __init__(self, request: scheduler.Request, own: tokenizer.Tokenizer | None):
        self.request, self._read = request, 0
        self._text = AnswerText.of(own, request.prompt_token_ids, request.params)

    def new_pieces(self) -> list[Piece]:
        """What has come since the last call, a piece for each token; the last carries the finish reason.

        No step may be under way meanwhile, or a last token would not be known as such.
        """
        reason, new = self.request.finish_reason, self.request.token_ids[self._read :]
        pieces = []
        for place, token in enumerate(new, start=1):
            last = reason if place == len(new) and reason != "abort" else None
            # an end token is no text; one that completes a stop string is
            text = "" if last == "stop" and not self._met_stop_string() else self._text.push(token)
            text += self._text.flush() if last else ""
            pieces.append(self._piece(text, [token], last))
            self._read += 1
        if reason == "abort":
            pieces.append(self._piece(self._text.flush(), [], reason, self.request.error))
        return pieces

    def _met_stop_string(self) -> bool:
        return getattr(self.request.stops, "stopped", None) is not None

    def _piece(self, text: str, tokens: list[int], reason: str | None, error: str | None = None) -> Piece:
        logprobs = (self.request.logprobs or [])[self._read : self._read + len(tokens)]
        return Piece(text, tokens, reason, error, self.request.choice, tuple(logprobs))
