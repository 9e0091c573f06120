"""Clients that go away and servers that stop: blocks come back within a step, and what runs is finished."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from serving import LONG, Held, Serving, error_of, events, nothing_left, until
from tiny_models import save_tiny
from websockets.sync.client import connect

import llmfromscratch
from llmfromscratch import SamplingParams

TEXT = "/v1/completions"
needs_signals = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")


def count(server: Serving, why: str) -> float:
    return server.service.figures.gone.labels(why)._value.get()


# ---- clients that go away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/generate"])
def test_a_client_that_goes_away_gives_its_blocks_back_within_one_step(llm, path, stream):
    llm.sampler = held = Held()
    asked = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 60, "stream": stream}
    with Serving(llm) as server:
        connection = server.begin(path, LONG | {"stream": stream} if path == TEXT else asked)
        held.let(3)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: llm.metrics.tokens % 60 and held.waiting and llm.cache.block_tables)
        connection.close()
        until(lambda: count(server, "went away") == 1)
        assert server.service.admission.answers == server.service.admission.streams == 0
        steps = llm.metrics.steps
        held.let(1)  # the step that was under way; a second one would stand still for ever
        until(lambda: not llm.core.has_work)
        assert llm.metrics.steps <= steps + 1
        nothing_left(llm)


def test_a_client_that_goes_away_takes_nobody_with_it(llm):
    llm.sampler = held = Held()
    with Serving(llm) as server, ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, TEXT, {**LONG, "temperature": 0, "prompt": "other"})
        connection = server.begin(TEXT, LONG)
        until(lambda: server.service.admission.answers == 2)
        held.let(4)
        connection.close()
        until(lambda: count(server, "went away") == 1)
        held.let_all()
        (offline,) = llm.generate("other", SamplingParams(max_tokens=60, ignore_eos=True))
        assert other.result().json()["choices"][0]["text"] == offline.text


def test_a_client_that_goes_away_while_it_waits_in_the_queue_leaves_it(llm):
    llm.sampler = held = Held()
    with Serving(llm, max_queue=1) as server:
        running = [server.begin(TEXT, LONG) for _ in range(4)]
        until(lambda: server.service.admission.answers == 4)
        fifth = server.begin(TEXT, LONG)
        until(lambda: server.service.admission.answers == 5)
        fifth.close()
        until(lambda: server.service.admission.answers == 4)
        for connection in running:
            connection.close()
        until(lambda: count(server, "went away") == 5)
        held.let_all()
        nothing_left(llm)


def test_a_half_sent_request_that_goes_away_was_nothing(llm):
    with Serving(llm) as server:
        connection = server.connect()
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        connection.close()
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert server.service.admission.answers == 0


def test_a_reader_that_does_not_read_holds_no_blocks_and_is_not_waited_for(llm):
    with Serving(llm, send_timeout=0.5, max_queue=200) as server:
        server.taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.taken.getsockname())
        content = json.dumps({**LONG, "prompt": ["x"] * 64, "max_tokens": 90, "stream": True}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        finished = llm.metrics.finished + 64
        until(lambda: count(server, "read no more") == 1, seconds=60)  # about a megabyte of events was for it
        until(lambda: server.service.admission.answers == server.service.admission.streams == 0)  # it unwinds first
        until(lambda: llm.metrics.finished + llm.metrics.aborted >= finished)
        nothing_left(llm)
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200
        connection.close()


# ---- servers that stop -------------------------------------------------------------------------------------------


def test_a_stop_finishes_what_runs_and_refuses_what_comes(llm):
    llm.sampler = held = Held()
    with Serving(llm) as server, ThreadPoolExecutor(3) as pool, ExitStack() as open_sockets:
        asked = [pool.submit(server.post, TEXT, {**LONG, "stream": stream}) for stream in (True, False)]
        socket = open_sockets.enter_context(connect(server.url.replace("http", "ws") + "/ws"))
        socket.send(json.dumps(LONG))
        until(lambda: server.service.admission.answers == 3)
        assert server.http.get("/ready").json() == {"status": "ready"}
        server.server.begin_stop()
        until(lambda: server.service.stopping)
        assert error_of(server.post(TEXT, LONG), 503)["code"] == "stopping"
        error_of(server.http.get("/ready"), 503)
        assert server.http.get("/health").status_code == 200
        held.let_all()
        assert events(asked[0].result())[-1] == "[DONE]"
        assert asked[1].result().json()["usage"]["completion_tokens"] == 60
        assert [json.loads(socket.recv(10)) for _ in range(60)][-1]["finish_reason"] == "length"


def test_a_stop_does_not_wait_for_ever(llm):
    llm.sampler = held = Held()
    with Serving(llm, stop_timeout=0.3) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, TEXT, LONG)
        until(lambda: held.waiting)
        broken = server.begin(TEXT, {**LONG, "stream": True})
        held.let(8)  # two a step, or one until the second request is there
        assert broken.recv(20).startswith(b"HTTP/1.1 200")
        server.server.begin_stop()
        assert "has stopped" in error_of(asked.result(), 503)["message"]
        held.let_all()
        rest = b""
        while part := broken.recv(65536):
            rest += part
        assert b"[DONE]" not in rest
        broken.close()


SLOW_MODEL = """

_forward = Model.forward


def _slowly(self, *arguments, **named):
    import time

    time.sleep(0.1)
    return _forward(self, *arguments, **named)


Model.forward = _slowly
"""


class Process:
    """`llmfromscratch serve` as a person runs it, with a model.py of its own that takes 0.1 s a step."""

    def __init__(self, folder: Path):
        engine = folder / "engine"
        engine.mkdir()
        own = Path(llmfromscratch.__file__).with_name("model.py").read_text(encoding="utf-8")
        (engine / "model.py").write_text(own + SLOW_MODEL, encoding="utf-8")
        command = ["serve", str(save_tiny(folder / "tiny")), "--port", "0", "--dtype", "float32", "--device", "cpu"]
        self.run = subprocess.Popen(
            [sys.executable, "-m", "llmfromscratch", *command, "--engine", str(engine)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        line = next(line for line in self.run.stdout if line.startswith("Serving"))
        self.said, self.url = line, re.search(r"http://\S+", line).group()
        until(self.answers)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def begin(self):
        """A stream of which the first event has come."""
        client = httpx.Client(base_url=self.url, timeout=20)
        asked = client.build_request("POST", TEXT, json={**LONG, "stream": True})
        self.open = client, client.send(asked, stream=True)
        lines = self.open[1].iter_lines()
        assert next(lines).startswith("data: ")
        return lines


@pytest.fixture
def process(tmp_path):
    found = Process(tmp_path)
    yield found
    found.run.kill()
    found.run.wait(10)
    found.run.stdout.close()


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_what_runs(process, number):
    assert "Serving tiny at" in process.said
    lines = process.begin()
    process.run.send_signal(number)
    *_, last = [line for line in lines if line]
    assert last == "data: [DONE]"
    assert process.run.wait(10) == 0, process.run.stdout.read()


@needs_signals
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(process, second):
    lines = process.begin()
    process.run.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{process.url}/ready").status_code == 503)
    began = time.monotonic()
    process.run.send_signal(second)
    assert process.run.wait(10) == 130, process.run.stdout.read()
    assert time.monotonic() - began < 4  # the answer would have taken 6 seconds
    with pytest.raises(httpx.RemoteProtocolError):
        list(lines)


@needs_signals
def test_an_idle_server_stops_quickly(process):
    began = time.monotonic()
    process.run.send_signal(signal.SIGTERM)
    assert process.run.wait(10) == 0 and time.monotonic() - began < 20
    assert "Traceback" not in process.run.stdout.read()
