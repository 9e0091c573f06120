"""Running the app under uvicorn: started, stopped with what runs finished, or at once at the second signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from llmfromscratch.async_engine import AsyncEngine
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.server.app import create_app
from llmfromscratch.server.service import Service
from llmfromscratch.server.settings import ServerSettings

_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else [])]
_BACKLOG = 512  # connections that the system holds for us
_STRAGGLERS = 2  # seconds for connections to close after the answers; then what is left is cut off
_LOOK = 0.05  # seconds between two looks whether all answers are done


def run(
    engine: LLM | AsyncEngine,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServerSettings | None = None,
) -> bool:
    """Serves until the process gets a signal (Ctrl-C, SIGTERM); True if it stopped gracefully, False if at once.

    The first signal finishes the answers that are being made, for at most settings.stop_timeout seconds, and refuses
    new ones; a second one ends at once. Raises RequestError when the address cannot be had.
    """
    server = Server(create_app(engine, settings))
    server.run(sockets=[bind(host, port)])
    return not server.force_exit


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address, which is refused or known before anything else begins. port 0: any that is free.

    Nobody can connect before the server runs. Raises RequestError when the address cannot be had.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16:
        raise RequestError(f"port is {port!r}; it must be a whole number from 0 (any that is free) to 65535.")
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name != "nt":  # there it would let two programs have one port
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(place)
        except BaseException:
            taken.close()
            raise
        return taken
    except (OSError, UnicodeError) as error:
        raise RequestError(f"the server cannot listen at {host}, port {port}: {error}; name another one.") from error


def address(taken: socket.socket) -> str:
    """The address for this machine: a server on all interfaces is reached by the local one."""
    host, port = taken.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with our way to stop: `run(sockets=[bind(...)])` runs it, `begin_stop` may come from any thread."""

    def __init__(self, app: FastAPI, log_level: str = "warning"):
        self.service: Service = app.state.service
        config = uvicorn.Config(
            app,
            log_level=log_level,
            access_log=False,
            backlog=_BACKLOG,
            ws="websockets-sansio",
            ws_max_size=self.service.settings.max_body_bytes,
            ws_max_queue=1,
            server_header=False,
            timeout_graceful_shutdown=_STRAGGLERS,
        )
        super().__init__(config)

    def begin_stop(self) -> None:
        """The first call asks for a graceful stop, the second for one at once."""
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Any second signal ends at once, whichever it is."""
        self.begin_stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stop the server and nothing else: `run` returns, and the program decides what comes next."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only there can signals be listened for
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """New requests are refused with a sentence while the answers under way are finished; then all is closed."""
        self.service.stopping = True
        await self._until_done(self.service.settings.stop_timeout)
        self.service.give_up()
        await self._until_done(_STRAGGLERS)
        await super().shutdown(sockets)

    async def _until_done(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.service.admission.answers and not self.force_exit:
                    await asyncio.sleep(_LOOK)
