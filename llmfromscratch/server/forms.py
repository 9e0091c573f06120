"""What OpenAI's two shapes of an answer have in common: the heading, the tokens counted, events, log-probabilities."""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfromscratch import sampling
from llmfromscratch.answers import Piece
from llmfromscratch.server.answering import Form
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.schemas import OpenAIRequest
from llmfromscratch.server.service import Service
from llmfromscratch.server.translate import Job

_LEAST_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One answer as far as it is there. logprobs: as the engine gives them, one for each token, if asked for."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[sampling.TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def take(self, piece: Piece) -> None:
        """Takes in the next piece."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


class OpenAIForm(Form):
    """Gathers the answers' pieces; the subclasses say what a whole answer and an event look like."""

    kind, event_kind, prefix = "", "", ""

    def __init__(self, service: Service, body: OpenAIRequest, jobs: Sequence[Job]):
        self.tokenizer = service.llm.tokenizer
        self.wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.prompt_tokens = sum(len(job.prompt) for job in jobs)
        self.choices = [Choice() for _ in range(sum(job.answers for job in jobs))]
        self.heading = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": service.now(),
            "model": service.settings.model_name,
        }

    def take(self, choice: int, piece: Piece, stream: bool) -> bytes:
        """Takes in a piece, and gives its events."""
        begins = not self.choices[choice].token_ids
        self.choices[choice].take(piece)
        return self.events(choice, piece, begins) if stream else b""

    @abstractmethod
    def events(self, choice: int, piece: Piece, begins: bool) -> bytes:
        """What a client is told of a piece; begins: it is the first of its answer."""

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """One whole answer."""

    def whole(self) -> dict[str, Any]:
        """The answer as one JSON."""
        choices = [self.choice(index) for index in range(len(self.choices))]
        return {**self.heading, "object": self.kind, "choices": choices, "usage": self.usage()}

    def event(self, index: int, **content: Any) -> bytes:
        """One event about one of the answers."""
        body: dict[str, Any] = {"choices": [{"index": index, **content}]}
        if self.wants_usage:
            body["usage"] = None  # which comes at the end
        return self._data(body)

    def end(self) -> bytes:
        """The tokens, where they were asked for, and the end."""
        usage = self._data({"choices": [], "usage": self.usage()}) if self.wants_usage else b""
        return usage + DONE

    def fault(self, error: APIError) -> bytes:
        """The error as an event. No [DONE] follows: what is there is not the whole answer."""
        return _event(error.body())

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and all tokens that the model gave."""
        given = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": given,
            "total_tokens": self.prompt_tokens + given,
        }

    def token_text(self, index: int) -> str:
        """A token as text; of a character that is cut into several tokens, each part is U+FFFD."""
        return self.token_bytes(index).decode("utf-8", errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """A token's bytes; none where the tokenizer lacks it."""
        return self.tokenizer.token_bytes(index) if self.tokenizer and index in self.tokenizer else b""

    def _data(self, body: dict[str, Any]) -> bytes:
        return _event({**self.heading, "object": self.event_kind, **body})


def logprob(value: float) -> float:
    """A natural log-probability that JSON can hold."""
    return max(float(value), _LEAST_LOGPROB)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def check_model(service: Service, body: OpenAIRequest) -> None:
    """Raises APIError for a model that is not served here, and for options of a stream without a stream."""
    own = service.settings.model_name
    if body.model not in (None, own):
        raise APIError(
            404, f"the model {body.model!r} is not served here; this server has {own!r}.", "model_not_found", "model"
        )
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options was given without stream: true; leave it out.", param="stream_options")
