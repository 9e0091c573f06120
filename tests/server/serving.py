"""A real server for tests: uvicorn in a thread, on a port of its own; and samplers that can be held and steered."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from llmfromscratch import LLM, AsyncEngine, SamplingParams, sampling
from llmfromscratch.server import ServerSettings, create_app
from llmfromscratch.server.running import Server, address, bind

LONG = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}


class Serving:
    """A server that runs as long as the `with` block."""

    def __init__(self, engine: LLM | AsyncEngine, **settings: Any):
        self.server = Server(create_app(engine, ServerSettings(**settings)))
        self.service = self.server.service
        self.taken = bind("127.0.0.1", 0)
        self.url = address(self.taken)
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._thread = threading.Thread(target=self.server.run, args=([self.taken],), daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.server.begin_stop()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def connect(self) -> socket.socket:
        """A bare connection, for clients that behave badly."""
        return socket.create_connection(self.taken.getsockname(), timeout=20)

    def begin(self, path: str, body: Any, key: str = "any") -> socket.socket:
        """A bare connection on which a request was sent; nothing of the answer has been read."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        head += f"\r\nAuthorization: Bearer {key}"
        connection = self.connect()
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        return connection


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits for what another thread brings about."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def nothing_left(llm: LLM) -> None:
    """Nothing is in flight, and no block is held."""
    until(lambda: not llm.core.has_work)
    llm.cache.audit()
    assert llm.cache.block_tables == {}


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream of server-sent events; "[DONE]" as it is."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "each event ends with an empty line"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response; its shape is OpenAI's, and its message a sentence."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith(".")
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    assert body["error"]["type"] == kind.get(status, "invalid_request_error" if status < 500 else "server_error")
    return body["error"]


class Held(sampling.Sampler):
    """A sampler that lets tokens through one by one: each `let(n)` is worth n."""

    def __init__(self):
        self.tokens = threading.Semaphore(0)
        self.waiting = False  # whether a step stands still for the next one
        self.open = False

    def let(self, number: int) -> None:
        self.tokens.release(number)

    def let_all(self) -> None:
        self.open = True
        self.tokens.release(1000)

    def sample(self, logits, rows):
        for _ in rows:
            if not self.open:
                self.waiting = True
                assert self.tokens.acquire(timeout=20), "nobody let the sampler go on"
                self.waiting = False
        return super().sample(logits, rows)


@dataclass
class Speaking:
    """What `Script` keeps of a request: what it has left to say."""

    params: SamplingParams
    left: Iterator[int]


class Script:
    """A sampler that says the given ids to every request, then end tokens."""

    def __init__(self, ids: Sequence[int], end: int = 2):
        self.ids, self.end = ids, end

    def start(self, params, prompt_token_ids, constraint=None):
        return Speaking(params, iter(self.ids))

    def sample(self, logits, rows):
        return [next(row.left, self.end) for row in rows]
