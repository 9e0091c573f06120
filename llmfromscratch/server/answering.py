"""Making answers: admitted, computed, given as one JSON or as a stream, and given up when nobody waits any more.

    jobs ─▶ engine ─ pieces ─▶ form ─▶ one JSON, or events      (the form knows OpenAI's shapes, or the plain one)

A client that goes away, a time that has run out and a client that reads no more all end in the same place: the streams
of the engine are closed, and within a step the engine has the memory back. The engine never waits for a reader: pieces
that are not read yet are held here, as many as the answer has tokens.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmfromscratch import sampling
from llmfromscratch.answers import Piece
from llmfromscratch.errors import RequestError
from llmfromscratch.server.errors import APIError, as_api_error, json_response
from llmfromscratch.server.service import Service
from llmfromscratch.server.translate import Job

_Told = TypeVar("_Told")
_MOST_ENTRIES = 500_000  # log-probabilities of prompts in one answer: some 100 MB while it is written
# How the engine's sentences begin about an answer of which more was asked than it can be.
_NOTHING_LEFT, _NOT_FOLLOWED = "nothing is left to choose from", "the sampler failed: RequestError: "


class Form(ABC):
    """How an answer is told to a client."""

    media_type = "text/event-stream"
    # of each job's prompt, None for its first token; there before the first piece
    prompt_logprobs: Sequence[list[sampling.TokenLogprobs | None] | None] = ()

    @abstractmethod
    def take(self, choice: int, piece: Piece, stream: bool) -> bytes:
        """Takes in a piece of one of the answers. With `stream`: what a client is told of it."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer as one JSON, when all pieces are there."""

    @abstractmethod
    def end(self) -> bytes:
        """The end of the stream."""

    @abstractmethod
    def fault(self, error: APIError) -> bytes:
        """The end of a stream that breaks off."""


class Answer(Response):
    """The HTTP answer to a request: all of it happens when it is called."""

    def __init__(self, service: Service, jobs: Sequence[Job], form: Form, stream: bool):
        super().__init__()
        self.service, self.jobs, self.form, self.stream = service, jobs, form, stream
        self.started = False  # whether something of a stream has been sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, unless the client goes away. Raises APIError as long as nothing has been sent."""
        check_running(self.service)
        check_entries(self.jobs)
        with self.service.admission.admit(sum(job.answers for job in self.jobs), self.stream):
            make = self._as_stream(send) if self.stream else self._as_json(scope, receive, send)
            try:
                await while_connected(make, receive, self.service)
            except APIError:
                if not self.started:
                    raise

    async def _as_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.service.settings.request_timeout), aclosing(self._pieces()) as pieces:
                async for choice, piece in pieces:
                    self.form.take(choice, piece, stream=False)
                answer = await self._tell(lambda: json_response(self.form.whole()))
        except TimeoutError:
            raise out_of_time(self.service) from None
        await answer(scope, receive, send)

    async def _as_stream(self, send: Send) -> None:
        deadline = asyncio.timeout(self.service.settings.request_timeout)
        try:
            async with deadline, aclosing(self._pieces()) as pieces:
                async for choice, piece in pieces:
                    event = await self._tell(partial(self.form.take, choice, piece, stream=True))
                    if not self.started:  # until now an error could still have its own status
                        await self._send(send, self._start())
                        self.started = True
                    if event:
                        await self._send(send, _body(event))
                last = self.form.end()
        except SlowReader:
            self.service.figures.gone.labels("read no more").inc()
            return
        except Exception as error:  # noqa: BLE001  raised again, or told in the stream and logged where it is ours
            problem = out_of_time(self.service) if deadline.expired() else as_api_error(error)
            if not self.started:
                raise problem from None
            last = self.form.fault(problem)
        await self._send(send, {**_body(last), "more_body": False})

    async def _tell(self, make: Callable[[], _Told]) -> _Told:
        """What `make` writes; where whole prompts are told token by token, that would hold up the answers of others."""
        large = any(job.prompt_logprobs is not None for job in self.jobs)
        return await self.service.aside(make) if large else make()

    def _start(self) -> dict[str, Any]:
        headers = [
            (b"content-type", f"{self.form.media_type}; charset=utf-8".encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy would hold the events back
        ]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.service.settings.send_timeout) as patience:
                await send(message)
        except TimeoutError:
            if patience.expired():
                raise SlowReader from None
            raise

    def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        return counted(self.service, self.jobs, self.form)


class SlowReader(Exception):
    """The client has not taken what was sent to it."""


def check_running(service: Service) -> None:
    """Raises APIError 503 while the server is stopping."""
    if service.stopping:
        raise APIError(503, "the server is stopping; what runs is finished, and nothing new is begun.", "stopping")


def check_entries(jobs: Sequence[Job]) -> None:
    """Raises APIError 400 where more log-probabilities of prompts are asked for than memory should be taken for."""
    asked = sum(
        len(job.prompt) * (job.prompt_logprobs + 1) * job.answers for job in jobs if job.prompt_logprobs is not None
    )
    if asked > _MOST_ENTRIES:
        text = f"the request asks for {asked} log-probabilities of its prompts; {_MOST_ENTRIES} at most are told."
        raise APIError(400, text, "invalid_value", "logprobs")


def _body(event: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event, "more_body": True}


def out_of_time(service: Service) -> APIError:
    """The error of an answer that took longer than is allowed."""
    seconds = service.settings.request_timeout
    message = f"the answer was not done within {seconds:g} seconds, and was given up; ask for fewer tokens."
    return APIError(504, message, "timeout", headers={"X-Should-Retry": "false"})


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive, service: Service) -> None:
    """Awaits `work`, or cancels it when the client goes away. Raises what it raises, and APIError when it is ended."""
    making, gone = service.begin(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({making, gone}, return_when=asyncio.FIRST_COMPLETED)
        away = not making.done()
    finally:
        making.cancel()
        gone.cancel()
        await asyncio.gather(making, gone, return_exceptions=True)
    if away:
        service.figures.gone.labels("went away").inc()
    elif making.cancelled():
        raise APIError(503, "the server has stopped, and could not wait for the end of the answer.", "stopping")
    else:
        making.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def counted(service: Service, jobs: Sequence[Job], form: Form) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all answers, each with the answer's number, and their figures; `form` has the prompts by then.
    Raises APIError for one that is given up."""
    figures, began = service.figures, time.perf_counter()
    first: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for job in jobs:
        figures.prompt_tokens.observe(len(job.prompt))
    form.prompt_logprobs = [await prompt_logprobs(service, job) for job in jobs]
    async with aclosing(merged(service, jobs)) as pieces:
        async for choice, piece in pieces:
            now = time.perf_counter()
            tokens[choice] = tokens.get(choice, 0) + len(piece.token_ids)
            if choice not in first and piece.token_ids:
                first[choice] = now
                figures.ttft.observe(now - began)
            if piece.finish_reason is not None:
                figures.answers.labels(piece.finish_reason).inc()
                figures.answer_tokens.observe(tokens[choice])
                figures.duration.observe(now - began)
                service.admission.took(now - began)
                if tokens[choice] > 1:
                    figures.tpot.observe((now - first[choice]) / (tokens[choice] - 1))
            if piece.finish_reason == "abort":
                raise given_up(service, str(piece.error))
            yield choice, piece


def given_up(service: Service, why: str) -> APIError:
    """The error of an answer that the engine has given up, through the client's fault or not."""
    told = f"the answer was given up: {why.removeprefix(_NOT_FOLLOWED).rstrip('.')}."
    if why.startswith((_NOTHING_LEFT, _NOT_FOLLOWED)):
        return APIError(400, told, "impossible")
    return APIError(503 if service.stopping else 500, told, "aborted")


async def prompt_logprobs(service: Service, job: Job) -> list[sampling.TokenLogprobs | None] | None:
    """Those of a job's prompt, where it asks for them."""
    if job.prompt_logprobs is None:
        return None
    if len(job.prompt) == 1:
        return [None]
    return await service.aside(service.llm.logprobs, job.prompt, job.prompt_logprobs)


async def begun(service: Service, job: Job) -> AsyncGenerator[Piece, None]:
    """The engine's stream for a job, which begins with its first piece. Raises APIError for what the engine refuses."""
    try:
        if job.compiles:
            return await service.aside(service.engine.stream, job.prompt, job.params)
        return service.engine.stream(job.prompt, job.params)
    except RequestError as error:
        raise job.refused(error) from error


async def merged(service: Service, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all jobs as they come; the answers of a job follow those of the jobs before it in number."""
    waiting: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
    starts = [sum(job.answers for job in jobs[:place]) for place in range(len(jobs))]
    if len(jobs) == 1:
        async with aclosing(await begun(service, jobs[0])) as pieces:
            async for piece in pieces:
                yield piece.choice, piece
        return

    async def follow(job: Job, start: int) -> None:
        try:
            async with aclosing(await begun(service, job)) as pieces:
                async for piece in pieces:
                    waiting.put_nowait((start + piece.choice, piece))
        except Exception as error:  # noqa: BLE001  it is raised where the pieces are read
            waiting.put_nowait(error)
        waiting.put_nowait(None)

    tasks = [asyncio.create_task(follow(job, start)) for job, start in zip(jobs, starts, strict=True)]
    try:
        left = len(tasks)
        while left:
            found = await waiting.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
