"""The clients of `server.py`, in a process of their own, so that what they cost is not the server's.

    python tests/benchmarks/server_clients.py < ASKED > ANSWERS

ASKED, one JSON: {"url", "clients", "requests": [...]}; each client takes the next request when its last one is over.
A request: {"number", "path", "content", "stream", "leave"}. leave: None, or how much of its answer a client waits for:
so many events of a stream, or the time that so many events have taken lately.
ANSWERS, one JSON: {"seconds", "processor_seconds", "answers": [...]}, imports not counted. An answer: {"number",
"status", "text", "finish_reason", "tokens", "body" of an error, "ttft", "tpot", "left", "error"}.

httpx, and not the openai client: that one makes objects of every event, takes half as much time again, on the same
cores as the server, and sends nothing malformed. That it works with this server, other tests show.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx

_PATIENCE = 300.0  # seconds without a byte


class Clients:
    """Several clients who share a list of requests, and what they have seen."""

    def __init__(self, url: str, requests: list[dict[str, Any]]):
        self.requests: Iterator[dict[str, Any]] = iter(requests)
        self.answers: list[dict[str, Any]] = []
        self.http = httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=httpx.Limits(max_connections=None))
        self._gaps: deque[float] = deque(maxlen=200)  # seconds between two events of a stream, of late

    async def run(self, clients: int) -> None:
        """Asks until all is asked and answered."""
        async with self.http, asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._one())

    async def _one(self) -> None:
        for request in self.requests:
            answer: dict[str, Any] = {"number": request["number"], "left": False, "error": None}
            self.answers.append(answer)
            try:
                await (self._stream if request["stream"] else self._whole)(request, answer)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                answer["error"] = f"{type(error).__name__}: {error}"

    async def _whole(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        leave = request["leave"]
        patience = leave * sum(self._gaps) / max(1, len(self._gaps)) if leave else None
        try:
            async with asyncio.timeout(patience):
                response = await self.http.post(request["path"], content=request["content"], headers=_HEADERS)
        except TimeoutError:
            answer["left"] = True
            return
        answer |= {"status": response.status_code, "body": None}
        if response.status_code != 200:
            answer["body"] = response.text
            return
        body = response.json()
        choice = body["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        tokens = body["usage"]["completion_tokens"]
        answer |= {"text": text, "finish_reason": choice["finish_reason"], "tokens": tokens}

    async def _stream(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        began, done, times, texts = time.perf_counter(), False, [], []
        answer |= {"finish_reason": None, "tokens": None, "body": None}
        async with self.http.stream("POST", request["path"], content=request["content"], headers=_HEADERS) as response:
            answer["status"] = response.status_code
            if response.status_code != 200:
                answer["body"] = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                done = done or line == "data: [DONE]"
                if done or not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                answer["tokens"] = (event.get("usage") or {}).get("completion_tokens")
                for choice in event["choices"]:
                    text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                    if text:
                        texts.append(text)
                        times.append(time.perf_counter())
                        if len(times) > 1:
                            self._gaps.append(times[-1] - times[-2])
                    answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
                if request["leave"] and len(times) >= request["leave"]:
                    answer["left"] = True
                    break
        if not done and not answer["left"]:
            raise ValueError("the stream ended without [DONE].")
        answer["text"] = "".join(texts)
        if times:
            answer["ttft"] = times[0] - began
        if len(times) > 1:
            answer["tpot"] = (times[-1] - times[0]) / (len(times) - 1)


_HEADERS = {"content-type": "application/json"}


def main() -> None:
    """Reads what is to be asked, asks, and writes what came back."""
    asked = json.load(sys.stdin)
    clients = Clients(asked["url"], asked["requests"])
    began, processor = time.perf_counter(), time.process_time()
    asyncio.run(clients.run(asked["clients"]))
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    json.dump({"seconds": seconds, "processor_seconds": processor, "answers": clients.answers}, sys.stdout)


if __name__ == "__main__":
    main()
