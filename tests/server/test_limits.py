"""Limits: who may ask, how much, how many at once, and for how long; each refusal is a sentence and costs no step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import LONG, Held, Serving, error_of, events, nothing_left, until

from llmfromscratch import sampling
from llmfromscratch.errors import RequestError
from llmfromscratch.server import ServerSettings
from llmfromscratch.server.limits import Admission
from llmfromscratch.server.prometheus import Figures

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"prompt": "x", "max_tokens": 2}


# ---- keys --------------------------------------------------------------------------------------------------------

GUARDED = [
    ("POST", TEXT, ASK), ("POST", CHAT, {"messages": [{"role": "user", "content": "x"}]}), ("POST", "/generate", ASK),
    ("POST", "/tokenize", {"text": "x"}), ("POST", "/detokenize", {"token_ids": [5]}), ("GET", "/v1/models", None),
    ("GET", "/v1/models/llmfromscratch", None),
]  # fmt: skip


@pytest.fixture(scope="module")
def keyed(loaded):
    with Serving(loaded, api_keys={"usual": 0, "urgent": 5, "batch": -5}) as server:
        yield server


@pytest.mark.parametrize(("method", "path", "body"), GUARDED)
def test_with_keys_nobody_is_served_without_one(llm, keyed, method, path, body):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "usual"},
        {"Authorization": "Basic usual"},
    ):
        response = keyed.http.request(method, path, json=body, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer" and "usual" not in response.text
    assert keyed.http.request(method, path, json=body, headers={"Authorization": "Bearer usual"}).status_code == 200


def test_the_page_and_what_watches_the_process_ask_for_no_key(llm, keyed):
    for path in ("/", "/health", "/ready", "/metrics", "/openapi.json", "/watch"):
        assert keyed.http.get(path).status_code == 200, path


class Noting(sampling.Sampler):
    def __init__(self):
        self.priorities = []

    def sample(self, logits, rows):
        self.priorities += [row.params.priority for row in rows]
        return super().sample(logits, rows)


@pytest.mark.parametrize(
    ("key", "asked", "got"),
    [("urgent", None, 5), ("urgent", 1, 1), ("usual", 5, 0), ("usual", -3, -3), ("batch", None, -5)],
)
def test_a_key_has_a_priority_and_no_request_is_more_important_than_its_key(llm, keyed, key, asked, got):
    llm.sampler = Noting()
    keyed.post(TEXT, {**ASK, "priority": asked}, Authorization=f"Bearer {key}").raise_for_status()
    assert set(llm.sampler.priorities) == {got}


def test_without_keys_a_request_says_its_priority_itself(llm, server):
    llm.sampler = Noting()
    server.post(TEXT, {**ASK, "priority": 7}).raise_for_status()
    assert set(llm.sampler.priorities) == {7}


# ---- the queue ---------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_the_next_and_serves_all_that_it_took(llm):
    llm.sampler = Held()
    with Serving(llm, max_queue=3) as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.post, TEXT, ASK) for _ in range(7)]  # four places, and three that wait
        until(lambda: server.service.admission.answers == 7)
        response = server.post(TEXT, ASK)
        error = error_of(response, 429)
        assert error["code"] == "queue_full" and "7 answers" in error["message"]
        assert 1 <= int(response.headers["retry-after"]) <= 60
        llm.sampler.let_all()
        assert [one.result().status_code for one in asked] == [200] * 7
        assert server.post(TEXT, ASK).status_code == 200


def test_a_request_of_several_answers_counts_as_many_and_is_taken_whole_or_not_at_all(llm):
    with Serving(llm, max_queue=2, max_choices=5) as server:
        error = error_of(server.post(TEXT, {**ASK, "prompt": ["x"] * 6}), 400)
        assert "6 answers" in error["message"] and "5 are allowed" in error["message"]
        assert server.post(TEXT, {**ASK, "prompt": ["x"] * 5}).status_code == 200
        llm.sampler = Held()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.post, TEXT, {**ASK, "prompt": ["x"] * 3})
            until(lambda: server.service.admission.answers == 3)
            error_of(server.post(TEXT, {**ASK, "prompt": ["x"] * 4}), 429)
            assert server.service.admission.answers == 3
            llm.sampler.let_all()
            assert first.result().status_code == 200


def test_so_many_streams_and_no_more(llm):
    llm.sampler = Held()
    with Serving(llm, max_streams=1) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, TEXT, {**ASK, "stream": True})
        until(lambda: server.service.admission.streams == 1)
        response = server.post(TEXT, {**ASK, "stream": True})
        assert error_of(response, 429)["code"] == "too_many_streams" and response.headers["retry-after"]
        whole = pool.submit(server.post, TEXT, ASK)  # which is no stream
        llm.sampler.let_all()
        assert first.result().status_code == whole.result().status_code == 200
        assert server.post(TEXT, {**ASK, "stream": True}).status_code == 200


def test_the_wait_that_is_asked_for_follows_from_how_long_answers_take(llm):
    admission = Admission(llm, ServerSettings(max_queue=0), Figures(llm))

    def wait() -> int:
        with admission.admit(4, stream=False):
            try:
                with admission.admit(1, stream=False):
                    raise AssertionError
            except Exception as error:
                return int(error.headers["Retry-After"])

    assert wait() == 1
    for _ in range(200):
        admission.took(20.0)
    assert wait() == 5  # four places: one becomes free every 5 seconds
    for _ in range(200):
        admission.took(1e6)
    assert wait() == 60
    assert admission.answers == 0


# ---- bodies ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(loaded):
    with Serving(loaded, max_body_bytes=1000, body_timeout=0.5, max_prompt_tokens=20) as server:
        yield server


def answer_on(connection) -> bytes:
    """All that the server says before it closes the connection."""
    said = b""
    while part := connection.recv(65536):
        said += part
    connection.close()
    return said


def test_a_body_that_is_said_to_be_too_large_is_refused_before_it_comes(llm, narrow):
    connection = narrow.connect()
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
    )
    said = answer_on(connection)
    assert said.startswith(b"HTTP/1.1 413 ") and b"99999999999 bytes; this server takes 1000 at most" in said


def test_a_chunked_body_is_counted_while_it_comes(llm, narrow):
    connection = narrow.connect()
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(3):
        connection.sendall(b"190\r\n" + b" " * 400 + b"\r\n")
    said = answer_on(connection)
    assert said.startswith(b"HTTP/1.1 413 ") and b"more than 1000 bytes" in said


def test_a_chunked_body_within_the_limit_is_fine(llm, narrow):
    pieces = (part for part in (b'{"prompt": ', b'"x", ', b'"max_tokens": 2}'))
    response = narrow.http.post("/generate", content=pieces, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text


def test_a_body_that_does_not_come_is_not_waited_for(llm, narrow):
    connection = narrow.connect()
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    began = time.monotonic()
    said = answer_on(connection)
    assert said.startswith(b"HTTP/1.1 408 ") and b"within 0.5 seconds" in said
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_is_not_called_json_is_not_read(llm, narrow, kind):
    response = narrow.http.post("/generate", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert error_of(response, 415)["code"] == "not_json"


def test_json_with_a_charset_is_fine(llm, narrow):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert narrow.http.post("/tokenize", content=b'{"text": "x"}', headers=headers).status_code == 200


def test_a_prompt_may_be_limited_further_than_the_context(llm, narrow):
    error = error_of(narrow.post("/generate", {"prompt": "x" * 21, "max_tokens": 1}), 400)
    assert "21 tokens" in error["message"] and "20 at most" in error["message"]
    assert narrow.post("/generate", {"prompt": "x" * 20, "max_tokens": 1}).status_code == 200


# ---- time --------------------------------------------------------------------------------------------------------


class Slow(sampling.Sampler):
    def sample(self, logits, rows):
        time.sleep(0.02)
        return super().sample(logits, rows)


def test_an_answer_that_takes_too_long_is_given_up(llm):
    with Serving(llm, request_timeout=0.3) as server:
        assert server.post(TEXT, ASK).status_code == 200
        llm.sampler = Slow()
        response = server.post(TEXT, LONG)
        assert "0.3 seconds" in error_of(response, 504)["message"]
        assert response.headers["x-should-retry"] == "false"
        nothing_left(llm)


def test_a_stream_that_takes_too_long_breaks_off_with_an_error(llm):
    with Serving(llm, request_timeout=0.3) as server:
        llm.sampler = Slow()
        *parts, last = events(server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True,
                                                 "ignore_eos": True}))  # fmt: skip
        assert len(parts) > 2 and last["error"]["code"] == "timeout"
        nothing_left(llm)


def test_a_stream_that_takes_too_long_to_begin_has_a_status(llm):
    with Serving(llm, request_timeout=0.2) as server:
        llm.sampler = held = Held()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, TEXT, {**LONG, "stream": True})
            assert error_of(asked.result(), 504)["code"] == "timeout"
            held.let_all()


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", " "), ("model_name", 3), ("api_keys", ["x"]), ("api_keys", {"": 0}), ("api_keys", {"a b": 0}),
        ("api_keys", {"é": 0}), ("api_keys", {"x": True}), ("api_keys", {"x": 1001}), ("max_queue", -1),
        ("max_queue", 1.5), ("max_streams", 0), ("max_choices", True), ("max_body_bytes", 0), ("max_prompt_tokens", 0),
        ("request_timeout", 0), ("request_timeout", float("nan")), ("body_timeout", None), ("send_timeout", "1"),
        ("stop_timeout", -1),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused_by_name(field, value):
    name = "API key" if field == "api_keys" and isinstance(value, dict) else field
    with pytest.raises(RequestError, match=name):
        ServerSettings(**{field: value})


def test_settings_keep_keys_of_their_own():
    keys = {"x": 0}
    settings = ServerSettings(api_keys=keys, max_queue=0, request_timeout=None)
    keys["y"] = 1
    assert settings.api_keys == {"x": 0}
