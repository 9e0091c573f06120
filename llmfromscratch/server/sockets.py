"""The WebSocket /ws: the plain form, one request after another over one connection.

A client sends what /generate takes, as JSON, with the API key in the Authorization header or, as a browser must, under
"api_key" beside the rest. It gets one message for each token, as /generate streams them, or {"error": ...}, and may ask
again. {"cancel": true} gives up the answer under way, which then ends with the finish_reason "abort"; closing the
connection does so too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import ValidationError
from pydantic_core import from_json

from llmfromscratch.server.answering import check_entries, check_running, counted, out_of_time
from llmfromscratch.server.errors import APIError, as_api_error, from_validation
from llmfromscratch.server.limits import priority_of
from llmfromscratch.server.plain import PlainForm, plain_job
from llmfromscratch.server.schemas import GenerateRequest
from llmfromscratch.server.service import service_of

router = APIRouter()
_AHEAD = 1  # requests that may come while an answer is under way; later ones wait in the network

_GIVEN_UP = {"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}


@router.websocket("/ws")
async def socket(socket: WebSocket) -> None:
    """Answers until the client goes."""
    if not same_origin(socket):
        await socket.close(1008)  # before it is accepted: the client sees status 403
        return
    await socket.accept()
    talk = _Talk(socket)
    tasks = [asyncio.create_task(talk.read()), asyncio.create_task(talk.answer_all())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def same_origin(socket: WebSocket) -> bool:
    """Whether the page that opens the connection is this server's own; programs name no page, and are welcome.

    Browsers let any site open a WebSocket to any address, one on this very machine among them.
    """
    origin = socket.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == socket.headers.get("host")


class _Talk:
    """One connection: what is asked is read while an answer is written, so that it can be given up."""

    def __init__(self, socket: WebSocket):
        self.socket, self.service = socket, service_of(socket)
        self.asked: asyncio.Queue[Any] = asyncio.Queue(_AHEAD)
        self.work: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Reads until the client goes."""
        while True:
            message = await self.socket.receive()
            if message["type"] == "websocket.disconnect":
                if self.work is not None:
                    self.service.figures.gone.labels("went away").inc()
                return
            given = self._parse(message)
            if isinstance(given, dict) and given.get("cancel") is True:
                await self._cancel()
            else:
                await self.asked.put(given)

    async def _cancel(self) -> None:
        if self.work is not None:
            self.work.cancel()
        elif not self.asked.empty():  # it has not begun yet
            self.asked.get_nowait()
            await self._send(_GIVEN_UP)

    def _parse(self, message: Mapping[str, Any]) -> Any:
        text, most = message.get("text") or message.get("bytes") or "", self.service.settings.max_body_bytes
        if len(text) > most:
            return APIError(413, f"the message is longer than {most}, which this server takes.", "too_large")
        try:
            return from_json(text, allow_inf_nan=False)
        except ValueError as error:
            return APIError(400, f"the message is not JSON that can be read: {error}.", "invalid_json")

    async def answer_all(self) -> None:
        """Answers one request after another."""
        while True:
            given = await self.asked.get()
            self.work = self.service.begin(self._answer(given))
            try:
                await asyncio.wait({self.work})
            finally:
                self.work.cancel()
            work, self.work = self.work, None
            if work.cancelled():
                await self._send(_GIVEN_UP)
            else:
                work.result()  # a client that is gone, or that reads no more, ends the connection

    async def _answer(self, given: Any) -> None:
        try:
            if isinstance(given, APIError):
                raise given
            await self._tell(given)
        except (WebSocketDisconnect, _SlowReader):
            raise
        except ValidationError as error:
            await self._send(from_validation(error).body())
        except Exception as error:  # noqa: BLE001  it is told to the client, and logged where it is ours
            await self._send(as_api_error(error).body())

    async def _tell(self, given: Any) -> None:
        key = given.pop("api_key", None) if isinstance(given, dict) else None
        priority = priority_of(self.socket.headers, self.service.settings, key if isinstance(key, str) else None)
        check_running(self.service)
        body = GenerateRequest.model_validate(given)
        if body.stream is False:
            raise APIError(400, "stream is false; a WebSocket always streams, so leave it out.", param="stream")
        job = await plain_job(self.service, body, priority)
        check_entries([job])
        form = PlainForm([job])
        deadline = asyncio.timeout(self.service.settings.request_timeout)
        try:
            with self.service.admission.admit(job.answers, stream=True):
                async with deadline, aclosing(counted(self.service, [job], form)) as pieces:
                    async for choice, piece in pieces:
                        await self._send(form.part(choice, piece))
        except TimeoutError:
            raise out_of_time(self.service) from None

    async def _send(self, told: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.service.settings.send_timeout) as patience:
                await self.socket.send_text(json.dumps(told, allow_nan=False))
        except TimeoutError:
            if not patience.expired():
                raise
            self.service.figures.gone.labels("read no more").inc()
            raise _SlowReader from None


class _SlowReader(Exception):
    """The client has not taken what was sent to it."""
