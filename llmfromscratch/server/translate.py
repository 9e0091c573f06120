"""From what a client asks to what the engine takes: token ids and `SamplingParams`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llmfromscratch import sampling, tokenizer
from llmfromscratch.errors import RequestError
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.schemas import Message, Sampling
from llmfromscratch.server.service import Service

_AT_ONCE = 2000  # characters: a longer text is encoded in a thread, so that the streams of others go on
_Result = TypeVar("_Result")
_NAMES = frozenset(Sampling.model_fields)
_FILTERS = ("top_k", "top_p", "min_p", "typical_p")
_TEXTS = ("regex", "json_schema", "bad_words", "required_words")  # what has to be compiled


@dataclass(frozen=True)
class Job:
    """One prompt for the engine.

    prompt_logprobs: as in SamplingParams; params have none, as the engine's streams do not bring them.
    names: what the client calls parameters that it does not call as SamplingParams does.
    """

    prompt: list[int]
    params: sampling.SamplingParams
    prompt_logprobs: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def answers(self) -> int:
        """How many answers come back."""
        return self.params.n

    @property
    def compiles(self) -> bool:
        """Whether the engine has something to compile before it can begin."""
        return any(getattr(self.params, name) for name in _TEXTS)

    def refused(self, error: RequestError) -> APIError:
        """What the engine finds wrong with the parameters, in the client's words."""
        given = [name for name in _TEXTS if getattr(self.params, name)]
        return _refusal(error, self.names, given[0] if given else None)


def sampling_params(
    body: Sampling,
    priority: int | None,
    names: Mapping[str, str] | None = None,
    *,
    openai: bool = False,
    **more: Any,
) -> sampling.SamplingParams:
    """The parameters of a request. priority: of its key; more: fields that the request calls otherwise; names: how.

    openai: as OpenAI's clients expect it, the temperature is 1 where none is given, and filters do not contradict a
    temperature of 0. Raises APIError, naming the parameter.
    """
    given = {name: getattr(body, name) for name in _NAMES} | more
    if given["temperature"] is None and openai:
        given["temperature"] = 1.0
    if priority is not None:
        asked = given["priority"]
        given["priority"] = priority if asked is None else min(priority, asked)
    if given["seed"] is not None:
        given["seed"] %= 2**63  # OpenAI's may be negative
    if given["top_k"] == -1:
        given["top_k"] = 0  # other servers' way to say that all tokens are kept
    values = {name: value for name, value in given.items() if value is not None}
    try:
        if openai and values["temperature"] == 0:
            # Clients send a top_p along with it. The likeliest token passes every filter, so greedy decoding is the
            # same without them; a value that cannot be meant is refused all the same.
            filters = {name: values.pop(name) for name in _FILTERS if name in values}
            sampling.SamplingParams(temperature=1.0, **filters)
        return sampling.SamplingParams(**values)
    except RequestError as error:
        raise _refusal(error, names or {}) from error


def _refusal(error: RequestError, names: Mapping[str, str], usual: str | None = None) -> APIError:
    """The sentences of the engine begin with the parameter; where one begins with its value, `usual` is meant."""
    first, text = str(error).partition(" ")[0].strip(":,"), str(error)
    param = first if hasattr(sampling.SamplingParams, first) else usual
    for name, called in names.items():
        text = text.replace(name, called)
        param = called if param == name else param
    return APIError(400, text.rstrip(".") + ".", "invalid_value", param)  # a library's may have no full stop


async def text_job(
    service: Service, prompt: str | list[int], params: sampling.SamplingParams, names: Mapping[str, str] | None = None
) -> Job:
    """A plain prompt, text or ids. Raises APIError, naming both lengths where the prompt is too long."""
    size = len(prompt) if isinstance(prompt, str) else 0
    return await _off_loop(size, _job, service, prompt, params, "prompt", names or {})


async def chat_job(
    service: Service,
    messages: Sequence[Message],
    params: sampling.SamplingParams,
    names: Mapping[str, str] | None = None,
) -> Job:
    """A conversation in the model's chat template. Raises APIError as `text_job` does."""
    ids = await conversation_ids(service, messages)
    return _job(service, ids, params, "messages", names or {})


async def conversation_ids(service: Service, messages: Sequence[Message]) -> list[int]:
    """A conversation in the model's chat template, as ids."""
    plain = [message.plain() for message in messages]
    size = sum(len(message["content"]) for message in plain)
    return await _off_loop(size, service.llm.chat_prompt, plain)


async def encode(own: tokenizer.Tokenizer, text: str) -> list[int]:
    """A text as ids."""
    return await _off_loop(len(text), own.encode, text)


async def _off_loop(size: int, work: Callable[..., _Result], *arguments: Any) -> _Result:
    return work(*arguments) if size <= _AT_ONCE else await asyncio.to_thread(work, *arguments)


def _job(
    service: Service,
    prompt: str | list[int],
    params: sampling.SamplingParams,
    param: str,
    names: Mapping[str, str],
) -> Job:
    """Checks the prompt; the answer may be as long as context and cache have room for, and no longer."""
    try:
        # the engine's own rules decide what a prompt is, and whether one that is too long is cut or refused
        ids = service.llm.request(prompt).prompt_token_ids
    except RequestError as error:
        code = "context_length_exceeded" if "the context holds" in str(error) else "invalid_value"
        raise APIError(400, str(error), code, param) from error
    most, capacity = service.settings.max_prompt_tokens, service.llm.cache.capacity
    context = service.llm.config.context_length
    room = min(context, context if capacity is None else capacity)
    limit = None
    if most is not None and len(ids) > most:
        limit = f"this server takes {most} at most"
    elif len(ids) >= room:
        limit = f"the cache holds {room}, the answer included"
    if limit is not None:
        message = f"the prompt has {len(ids)} tokens; {limit}."
        raise APIError(400, message, "context_length_exceeded", param)
    own = replace(params, max_tokens=min(params.max_tokens, room - len(ids)), prompt_logprobs=None)
    return Job(ids, own, params.prompt_logprobs, names)
