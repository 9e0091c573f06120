"""What comes back for a request: text in pieces while it runs, or the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmfromscratch import scheduler, tokenizer
from llmfromscratch.metrics import RequestMetrics


@dataclass(frozen=True)
class Completion:
    """One answer. finish_reason: "stop" (an end token), "length" (max_tokens or the context is full), or "abort"
    (then `error` says why). token_ids holds every token the model gave, the end token too; text leaves it out.
    metrics: how long it waited and took; two answers that say the same are equal whatever they took."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    error: str | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)

    @classmethod
    def of(cls, request: scheduler.Request, text: str) -> Completion:
        """The answer to a request that has ended."""
        return cls(
            text,
            list(request.token_ids),
            request.prompt_token_ids,
            request.finish_reason or "abort",
            request.error,
            RequestMetrics.of(request),
        )


@dataclass(frozen=True)
class Piece:
    """Text that has become certain while streaming; the last piece carries the finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None


class Reader:
    """Turns the tokens of one request into pieces of text while they come.

    Ids that the tokenizer lacks, where an embedding is padded to a round number, are no text.
    """

    def __init__(self, request: scheduler.Request, own: tokenizer.Tokenizer | None):
        self.request, self._own, self._read = request, own, 0
        prompt = [index for index in request.prompt_token_ids if own and index in own]
        self._decoder = tokenizer.IncrementalDecoder(own, prompt) if own else None

    def new_pieces(self) -> list[Piece]:
        """What has come since the last call, a piece for each token; the last carries the finish reason.

        No step may be under way meanwhile, or a last token would not be known as such.
        """
        reason, new = self.request.finish_reason, self.request.token_ids[self._read :]
        self._read += len(new)
        pieces = []
        for place, token in enumerate(new, start=1):
            last = reason if place == len(new) and reason != "abort" else None
            text = "" if last == "stop" else self._push(token)
            pieces.append(Piece(text + (self._flush() if last else ""), [token], last))
        if reason == "abort":
            pieces.append(Piece(self._flush(), [], reason, self.request.error))
        return pieces

    def _push(self, token: int) -> str:
        return self._decoder.push(token) if self._decoder and self._own and token in self._own else ""

    def _flush(self) -> str:
        return self._decoder.flush() if self._decoder else ""
