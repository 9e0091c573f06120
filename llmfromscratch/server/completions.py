"""POST /v1/completions: continues texts. GET /v1/models: the one model that is served."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from llmfromscratch import sampling
from llmfromscratch.answers import Piece
from llmfromscratch.server import replies
from llmfromscratch.server.answering import Answer, check_running
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.forms import OpenAIForm, check_model, logprob
from llmfromscratch.server.limits import caller_priority
from llmfromscratch.server.reading import SafeRoute
from llmfromscratch.server.schemas import CompletionRequest
from llmfromscratch.server.service import Service, service_of
from llmfromscratch.server.translate import Job, sampling_params, text_job

router = APIRouter(prefix="/v1", route_class=SafeRoute, responses=replies.ERRORS)
_MAX_TOKENS = 16  # OpenAI's default for this route
Priority = Annotated[int | None, Depends(caller_priority)]


@router.get("/models", summary="The model that is served", response_model=replies.ModelList)
async def models(request: Request, _: Priority) -> dict[str, Any]:
    """A list of one."""
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/models/{name:path}", summary="One model", response_model=replies.Model)
async def model(name: str, request: Request, _: Priority) -> dict[str, Any]:
    """The model of that name."""
    service = service_of(request)
    if name != service.settings.model_name:
        raise APIError(404, f"the model {name[:100]!r} is not served here.", "model_not_found", "model")
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    name, length = service.settings.model_name, service.llm.config.context_length
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "llmfromscratch",
        "context_length": length,
    }  # fmt: skip


@router.post(
    "/completions",
    summary="Continue a text",
    response_class=Response,
    responses=replies.streamed(replies.CompletionReply),
)
async def completions(body: CompletionRequest, request: Request, priority: Priority) -> Response:
    """Continues each prompt with n texts; choices are numbered prompt by prompt."""
    service = service_of(request)
    check_running(service)
    check_model(service, body)
    params = sampling_params(
        body,
        priority,
        openai=True,
        max_tokens=body.max_tokens or _MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = _prompts(body)
    service.admission.check(len(prompts) * params.n)  # before all of them are encoded
    jobs = [await text_job(service, prompt, params) for prompt in prompts]
    return Answer(service, jobs, CompletionForm(service, body, jobs), bool(body.stream))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class CompletionForm(OpenAIForm):
    """Texts, with the prompts before them where echo asks for it."""

    kind = event_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, jobs: Sequence[Job]):
        super().__init__(service, body, jobs)
        self.wants_logprobs = body.logprobs is not None
        self.echoes = [""] * len(self.choices)
        if body.echo:
            texts = zip(_prompts(body), jobs, strict=True)
            self.echoes = [self._echo(prompt) for prompt, job in texts for _ in range(job.answers)]
        self.prompts = [(place, job.prompt) for place, job in enumerate(jobs) for _ in range(job.answers)]
        # where each text stands, to tell where its next token begins
        self._offsets = [0] * len(self.choices)
        self._readers = [codecs.getincrementaldecoder("utf-8")("ignore") for _ in self.choices]

    def _echo(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(self.token_bytes(token) for token in prompt).decode("utf-8", errors="replace")

    def events(self, choice: int, piece: Piece, begins: bool) -> bytes:
        """One event; none for a token that has not become text yet, unless it has something else to tell."""
        text = (self.echoes[choice] if begins else "") + piece.text
        told = self._entries(choice, piece.logprobs, begins)
        if not text and not told and piece.finish_reason is None:
            return b""
        logprobs = self._logprobs(choice, told) if told else None
        return self.event(choice, text=text, logprobs=logprobs, finish_reason=piece.finish_reason)

    def choice(self, index: int) -> dict[str, Any]:
        """One whole text."""
        own = self.choices[index]
        return {
            "index": index,
            "text": self.echoes[index] + own.text,
            "logprobs": self._logprobs(index, self._entries(index, own.logprobs)) if self.wants_logprobs else None,
            "finish_reason": own.finish_reason,
        }

    def _entries(
        self, choice: int, told: Sequence[sampling.TokenLogprobs], begins: bool = True
    ) -> Sequence[tuple[int, sampling.TokenLogprobs | None]]:
        """Tokens and what is told of them: those of an echoed prompt first, where the answer begins."""
        if not self.wants_logprobs:
            return ()
        place, prompt = self.prompts[choice]
        echoed = self.prompt_logprobs[place] if begins and self.prompt_logprobs else None
        echo = [] if echoed is None else list(zip(prompt, echoed, strict=True))
        return [*echo, *((one.token_id, one) for one in told)]

    def _logprobs(self, choice: int, told: Sequence[tuple[int, sampling.TokenLogprobs | None]]) -> dict[str, Any]:
        """Of the model's own distribution, before any processing."""
        offsets = []
        for token, _ in told:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(self._readers[choice].decode(self.token_bytes(token)))
        return {
            "tokens": [self.token_text(token) for token, _ in told],
            "token_logprobs": [one and logprob(one.raw) for _, one in told],
            "top_logprobs": [one and self._top(one) for _, one in told],
            "text_offset": offsets,
        }

    def _top(self, one: sampling.TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that stands there; of several with one text, the likeliest."""
        top = [*((token, raw) for token, raw, _ in one.top), (one.token_id, one.raw)]
        found: dict[str, float] = {}
        for token, raw in top:
            found.setdefault(self.token_text(token), logprob(raw))
        return found
