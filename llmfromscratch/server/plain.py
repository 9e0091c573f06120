"""The plain form: POST /generate, /tokenize and /detokenize."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llmfromscratch import sampling
from llmfromscratch.answers import Piece
from llmfromscratch.errors import TokenizerError
from llmfromscratch.server import replies
from llmfromscratch.server.answering import Answer, Form, check_running
from llmfromscratch.server.completions import Priority
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.forms import Choice, logprob
from llmfromscratch.server.reading import SafeRoute
from llmfromscratch.server.schemas import DetokenizeRequest, GenerateRequest, TokenizeRequest
from llmfromscratch.server.service import Service, service_of
from llmfromscratch.server.translate import Job, chat_job, conversation_ids, encode, sampling_params, text_job

router = APIRouter(route_class=SafeRoute, responses=replies.ERRORS)


@router.post(
    "/generate",
    summary="Continue a text or answer in a conversation, plainly",
    response_class=Response,
    responses=replies.streamed(replies.GenerateReply, "application/x-ndjson"),
)
async def generate(body: GenerateRequest, request: Request, priority: Priority) -> Response:
    """Takes the fields of SamplingParams with their usual values: greedy unless a temperature is given.

    With stream: true the answer comes in lines of JSON, one for each token; the last has the reason of the end.
    """
    service = service_of(request)
    check_running(service)
    job = await plain_job(service, body, priority)
    return Answer(service, [job], PlainForm([job]), bool(body.stream))


async def plain_job(service: Service, body: GenerateRequest, priority: int | None) -> Job:
    """What a plain request asks of the engine."""
    params = sampling_params(body, priority, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs)
    if body.messages is not None:
        return await chat_job(service, body.messages, params)
    assert body.prompt is not None  # one of the two is there
    return await text_job(service, body.prompt, params)


class PlainForm(Form):
    """JSON without ceremony."""

    media_type = "application/x-ndjson"

    def __init__(self, jobs: Sequence[Job]):
        self.prompt_tokens = sum(len(job.prompt) for job in jobs)
        self.choices = [Choice() for _ in range(sum(job.answers for job in jobs))]
        self.wants_logprobs = any(job.params.logprobs is not None for job in jobs)
        self._begun = False

    def take(self, choice: int, piece: Piece, stream: bool) -> bytes:
        """A line for each piece."""
        self.choices[choice].take(piece)
        return _line(self.part(choice, piece)) if stream else b""

    def part(self, choice: int, piece: Piece) -> dict[str, Any]:
        """A piece as JSON."""
        told = {"index": choice, "text": piece.text, "token_ids": piece.token_ids, "finish_reason": piece.finish_reason}
        prompt, self._begun = {} if self._begun else self._prompt(), True
        return {**told, **self._logprobs(piece.logprobs), **prompt}

    def whole(self) -> dict[str, Any]:
        """The first answer, and all of them."""
        choices = [
            {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                **self._logprobs(one.logprobs),
            }
            for one in self.choices
        ]
        return {**choices[0], "prompt_tokens": self.prompt_tokens, **self._prompt(), "choices": choices}

    def _prompt(self) -> dict[str, Any]:
        """What is told of the prompt: beside the first answer, or in the first line."""
        told = self.prompt_logprobs[0] if self.prompt_logprobs else None
        return {} if told is None else {"prompt_logprobs": [one and _told(one) for one in told]}

    def _logprobs(self, told: Sequence[sampling.TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": [_told(one) for one in told]} if self.wants_logprobs else {}

    def end(self) -> bytes:
        """Nothing: the last line has said that it is the last."""
        return b""

    def fault(self, error: APIError) -> bytes:
        """The error as the last line."""
        return _line(error.body())


def _told(one: sampling.TokenLogprobs) -> dict[str, Any]:
    """A token's log-probabilities by the names that they have in the engine."""
    found = _entry(one.token_id, one.raw, one.processed)
    return {**found, "top": [_entry(*likely) for likely in one.top]}


def _entry(token: int, raw: float, processed: float) -> dict[str, Any]:
    return {"token_id": token, "raw": logprob(raw), "processed": logprob(processed)}


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, allow_nan=False).encode() + b"\n"


@router.post("/tokenize", summary="Text to token ids", response_model=replies.TokenizeReply)
async def tokenize(body: TokenizeRequest, request: Request, _: Priority) -> dict[str, Any]:
    """The ids of a text as the engine would take it, or of a conversation in the model's chat template."""
    service = service_of(request)
    tokenizer = _tokenizer(service)
    if body.text is None:
        ids = await conversation_ids(service, body.messages or [])
    else:
        ids = await encode(tokenizer, body.text)
    tokens = [tokenizer.token_bytes(index).decode("utf-8", errors="replace") for index in ids]
    length = service.llm.config.context_length
    return {"token_ids": ids, "tokens": tokens, "count": len(ids), "context_length": length}


@router.post("/detokenize", summary="Token ids to text", response_model=replies.DetokenizeReply)
async def detokenize(body: DetokenizeRequest, request: Request, _: Priority) -> dict[str, str]:
    """The text of token ids. Bytes that are no valid UTF-8 become U+FFFD."""
    tokenizer = _tokenizer(service_of(request))
    try:
        return {"text": tokenizer.decode(body.token_ids, skip_special=body.skip_special)}
    except TokenizerError as error:
        raise APIError(400, str(error), "invalid_value", "token_ids") from error


def _tokenizer(service: Service) -> Any:
    if service.llm.tokenizer is None:
        raise APIError(400, "this model has no tokenizer; give prompts as token ids.", "no_tokenizer")
    return service.llm.tokenizer
