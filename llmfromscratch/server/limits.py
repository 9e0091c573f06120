"""Who may ask, how much, and how many at once: API keys, the size of a body, the length of the queue."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmfromscratch.engine import LLM
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.prometheus import Figures
from llmfromscratch.server.settings import ServerSettings

_LONGEST_WAIT = 60  # seconds that a client is asked to wait at most
_WITH_BODY = {"POST", "PUT", "PATCH"}


# ---- who asks ----------------------------------------------------------------------------------------------------


async def caller_priority(request: HTTPConnection) -> int | None:
    """A route's dependency: the priority of the key that a request came with; None where no keys are asked for."""
    return priority_of(request.headers, request.app.state.service.settings)


def priority_of(headers: Mapping[str, str], settings: ServerSettings, key: str | None = None) -> int | None:
    """The priority of the key in the Authorization header, or of `key`. Raises APIError 401 without a valid one."""
    if not settings.api_keys:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    offered = key if key is not None else given.strip() if scheme.lower() == "bearer" else ""
    found = None
    for known, priority in settings.api_keys.items():  # all are compared, so that the time tells nothing
        if hmac.compare_digest(known.encode(), offered.encode()):
            found = priority
    if found is None:
        what = "the API key is not one of this server's" if offered else "this server asks for an API key"
        header = {"WWW-Authenticate": "Bearer"}
        raise APIError(401, f"{what}; send `Authorization: Bearer KEY`.", "invalid_api_key", headers=header)
    return found


# ---- how many at once --------------------------------------------------------------------------------------------


class Admission:
    """Counts the answers that are being made, and refuses what would wait behind a full queue.

    The engine serves some at a time (the scheduler's max_requests), and settings.max_queue more may wait.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, figures: Figures):
        self.llm, self.settings, self.figures = llm, settings, figures
        self.answers = self.streams = 0
        self._seconds = 1.0  # that an answer takes, of late

    @property
    def places(self) -> int:
        """How many the engine serves at a time. A scheduler that does not say counts as one."""
        return getattr(self.llm.core.scheduler, "max_requests", 1)

    @property
    def room(self) -> int:
        """How many answers may be made or wait."""
        return self.places + self.settings.max_queue

    def check(self, answers: int) -> None:
        """Raises APIError 400 for more answers than one request may ask for."""
        most = min(self.room, self.settings.max_choices)
        if answers > most:
            raise APIError(400, f"the request asks for {answers} answers at once; {most} are allowed.", param="n")

    @contextmanager
    def admit(self, answers: int, stream: bool) -> Iterator[None]:
        """Takes places for the answers to one request, and gives them back. Raises APIError 400 or 429."""
        self.check(answers)
        room = self.room
        if self.answers + answers > room:
            waiting = f"{self.answers} answers are being made or wait, and no more than {room} may"
            raise self._refusal("queue", f"the queue is full: {waiting}; try again later.", "queue_full")
        if stream and self.streams >= self.settings.max_streams:
            many = f"{self.streams} answers are being streamed, and no more may be; try again later."
            raise self._refusal("streams", many, "too_many_streams")
        self.answers, self.streams = self.answers + answers, self.streams + stream
        try:
            yield
        finally:
            self.answers, self.streams = self.answers - answers, self.streams - stream

    def took(self, seconds: float) -> None:
        """Learns from an answer how long one takes."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def _refusal(self, limit: str, message: str, code: str) -> APIError:
        self.figures.refused.labels(limit).inc()
        # the queue moves on by one place each time that one of those being served is done
        wait = math.ceil(self._seconds / self.places)
        return APIError(429, message, code, headers={"Retry-After": str(min(max(1, wait), _LONGEST_WAIT))})


# ---- how large a body --------------------------------------------------------------------------------------------


class BoundedBody:
    """ASGI: reads a request's body before the app does, and answers itself where it is too large, slow or not JSON.

    A body without a length (chunked) is counted while it comes in. What is held of it never exceeds the limit by more
    than one message of the server.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on to the app a body that is there and in order."""
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                body = await self._read(scope, receive)
        except TimeoutError:
            slow = f"the body did not come within {self.settings.body_timeout:g} seconds."
            await self._refuse(APIError(408, slow, "slow_body"), scope, receive, send)
        except APIError as error:
            await self._refuse(error, scope, receive, send)
        else:
            if body is not None:
                await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the client went away before it was there."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        most = self.settings.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise APIError(413, f"the body has {length[:20]} bytes; this server takes {most} at most.", "too_large")
        _check_type(headers.get("content-type", ""))
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > most:
                raise APIError(413, f"the body has more than {most} bytes, which this server takes.", "too_large")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error.response()
        # the rest of the body would be taken for the connection's next request
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def _check_type(given: str) -> None:
    """A page of another site may send a browser's text or forms here without being asked, but not JSON."""
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, f"the body is of type {given[:80]!r}; send application/json.", "not_json")


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return waiting.pop() if waiting else await receive()

    return replayed
