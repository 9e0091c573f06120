"""The server in a notebook, in one line: it runs in a thread of its own, and the next cell can talk to it.

server = serve(llm)     # shows a link to the page, where the engine can be watched
server.stop()
"""

from __future__ import annotations

import html
import threading
import time

from llmfromscratch.async_engine import AsyncEngine
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.server.app import create_app
from llmfromscratch.server.running import Server, address, bind
from llmfromscratch.server.settings import ServerSettings

_START = 30.0  # seconds in which a server listens, or something is wrong
_PATIENCE = 5.0  # seconds in which a thread that is told to end at once does so


def serve(
    engine: LLM | AsyncEngine, host: str = "127.0.0.1", port: int = 0, settings: ServerSettings | None = None
) -> RunningServer:
    """Serves an engine from a background thread, and returns when it can be asked.

    port: 0 takes one that is free. What is shown is a link to the page at /; `url` is for clients.
    The same `LLM` may be used in the notebook meanwhile: its requests are computed with those that come in.
    Raises RequestError where the port cannot be had.
    """
    return RunningServer(engine, host, port, settings or ServerSettings())


class RunningServer:
    """A server that runs in the background until `stop`, the end of a `with` block, or the end of the program."""

    def __init__(self, engine: LLM | AsyncEngine, host: str, port: int, settings: ServerSettings):
        self._server = Server(create_app(engine, settings))
        self._socket = bind(host, port)
        self.url = address(self._socket)
        self._thread = threading.Thread(target=self._run, name="llmfromscratch-server", daemon=True)
        self._thread.start()
        try:
            self._wait_until_started()
        except BaseException:  # also an interrupted cell leaves no server behind
            self.stop()
            raise

    @property
    def running(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive() and not self._server.should_exit

    def stop(self) -> None:
        """Lets what runs finish, for `settings.stop_timeout` seconds at most, and ends. Stopping twice is fine.

        Interrupting it (Ctrl-C, or the notebook's stop button) ends the server at once.
        """
        if self.running:
            self._server.begin_stop()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._server.begin_stop()
            self._thread.join(_PATIENCE)
            raise

    def __enter__(self) -> RunningServer:
        """The server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops."""
        self.stop()

    def __repr__(self) -> str:
        return f"<server at {self.url}, {'running' if self.running else 'stopped'}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: a link while it runs."""
        if not self.running:
            return "<p>The server has stopped.</p>"
        url = html.escape(self.url)
        link = f'<a href="{url}/" target="_blank" rel="noopener">{url}/</a>'
        return (
            f"<p>The server runs: chat with the model and watch the engine at {link}. "
            f"OpenAI's clients take <code>base_url=&quot;{url}/v1&quot;</code>. <code>.stop()</code> ends it.</p>"
        )

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def _wait_until_started(self) -> None:
        until = time.monotonic() + _START
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RequestError(f"the server did not start in {_START:.0f} seconds; its log says why.")
            time.sleep(0.01)
