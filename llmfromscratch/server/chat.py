"""POST /v1/chat/completions: the model's next turn in a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmfromscratch import sampling
from llmfromscratch.answers import Piece
from llmfromscratch.server import replies
from llmfromscratch.server.answering import Answer, check_running
from llmfromscratch.server.completions import Priority
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.forms import OpenAIForm, check_model, logprob
from llmfromscratch.server.reading import SafeRoute
from llmfromscratch.server.schemas import ChatRequest, ObjectFormat, SchemaFormat
from llmfromscratch.server.service import Service, service_of
from llmfromscratch.server.translate import Job, chat_job, sampling_params

router = APIRouter(prefix="/v1/chat", route_class=SafeRoute, responses=replies.ERRORS)


@router.post(
    "/completions",
    summary="Answer in a conversation",
    response_class=Response,
    responses=replies.streamed(replies.ChatReply),
)
async def chat_completions(body: ChatRequest, request: Request, priority: Priority) -> Response:
    """Answers with n turns. Without a limit an answer may be as long as the context has room for."""
    service = service_of(request)
    check_running(service)
    check_model(service, body)
    schema, names = _schema(body)
    params = sampling_params(
        body,
        priority,
        names,
        openai=True,
        max_tokens=_max_tokens(body) or service.llm.config.context_length,
        logprobs=_logprobs(body),
        json_schema=schema,
    )
    jobs = [await chat_job(service, body.messages, params, names)]
    return Answer(service, jobs, ChatForm(service, body, jobs), bool(body.stream))


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise APIError(
            400, f"max_tokens is {old} and max_completion_tokens {new}; give one of them.", param="max_tokens"
        )
    return old if new is None else new


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs was given without logprobs: true.", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _schema(body: ChatRequest) -> tuple[Any, Mapping[str, str]]:
    """The JSON schema of the answer, and what the client calls it. It is followed whether `strict` is set or not."""
    if isinstance(body.response_format, SchemaFormat):
        schema = body.response_format.json_schema.schema_
    elif isinstance(body.response_format, ObjectFormat):
        schema = {"type": "object"}
    else:
        return body.json_schema, {}
    if body.json_schema is not None:
        both = "response_format and json_schema are both given; an answer can be held to one of them. Leave one out."
        raise APIError(400, both, "invalid_value", "response_format")
    return schema, {"json_schema": "response_format"}


class ChatForm(OpenAIForm):
    """Turns of the assistant."""

    kind, event_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, jobs: Sequence[Job]):
        super().__init__(service, body, jobs)
        self.wants_logprobs = bool(body.logprobs)

    def events(self, choice: int, piece: Piece, begins: bool) -> bytes:
        """The role first; then an event for each token that has become text; the reason of the end alone, last."""
        events = b""
        told = piece.logprobs if self.wants_logprobs else ()
        if begins:
            events += self._delta(choice, {"role": "assistant", "content": ""})
        if piece.text or told:
            events += self._delta(choice, {"content": piece.text}, self._logprobs(told) if told else None)
        if piece.finish_reason is not None:
            events += self._delta(choice, {}, reason=piece.finish_reason)
        return events

    def _delta(self, choice: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        return self.event(choice, delta=delta, logprobs=logprobs, finish_reason=reason)

    def choice(self, index: int) -> dict[str, Any]:
        """One whole turn."""
        own = self.choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": own.text, "refusal": None},
            "logprobs": self._logprobs(own.logprobs) if self.wants_logprobs else None,
            "finish_reason": own.finish_reason,
        }

    def _logprobs(self, told: Sequence[sampling.TokenLogprobs]) -> dict[str, Any]:
        """Of the model's own distribution, before any processing."""
        content = [
            {**self._entry(one.token_id, one.raw), "top_logprobs": [self._entry(i, raw) for i, raw, _ in one.top]}
            for one in told
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": logprob(value), "bytes": list(self.token_bytes(token))}
