"""What answers look like, for the OpenAPI description. The server writes these as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Reason = Literal["stop", "length"]


class ErrorDetails(BaseModel):
    """message: a sentence; param: the parameter at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error has this shape."""

    error: ErrorDetails


class Usage(BaseModel):
    """Tokens of the prompts and of the answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """For each token: its text, its natural log-probability, the likeliest ones, and where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None


class CompletionReply(BaseModel):
    """The answer of /v1/completions, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token that was likely at some place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and what was likely in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """The model's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatReply(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    """The model that is served. context_length: tokens of prompt and answer at most."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class TokenizeReply(BaseModel):
    """Ids and the text of each; a character may be cut into several tokens."""

    token_ids: list[int]
    tokens: list[str]
    count: int
    context_length: int


class DetokenizeReply(BaseModel):
    """The text of the ids."""

    text: str


class GenerateTop(BaseModel):
    """A token, and its natural log-probability to the model, and in the distribution that was drawn from."""

    token_id: int
    raw: float
    processed: float


class GenerateLogprob(GenerateTop):
    """The token that stands there; top: the likeliest ones."""

    top: list[GenerateTop]


class GenerateChoice(BaseModel):
    """One answer. token_ids holds every token that the model gave, its end token too.

    logprobs: one entry a token, where they were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: Reason
    logprobs: list[GenerateLogprob] | None = None


class GenerateReply(GenerateChoice):
    """The answer of /generate; choices: all of them, the first among them.

    prompt_logprobs: one entry a token of the prompt, where they were asked for; null for its first.
    """

    prompt_tokens: int
    prompt_logprobs: list[GenerateLogprob | None] | None = None
    choices: list[GenerateChoice]


class StatusReply(BaseModel):
    """How the server is."""

    status: str


_ERROR = {"model": ErrorReply, "description": "An error, in OpenAI's shape."}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def streamed(whole: type[BaseModel], stream: str = "text/event-stream") -> dict[int | str, dict[str, Any]]:
    """An answer that comes as one JSON, or with `stream: true` in parts."""
    return {200: {"model": whole, "content": {stream: {}}, "description": "The answer, whole or streamed."}}
