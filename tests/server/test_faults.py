"""Faults stay small: a bad body costs its sender a sentence, a failed step its own requests, and the server goes on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from serving import LONG, Held, Script, error_of, until

from llmfromscratch import SamplingParams

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}

# ---- bodies that nobody should send ------------------------------------------------------------------------------

BODIES = {
    "nothing": b"",
    "no JSON": b"{prompt: x}",
    "half": b'{"prompt": "x"',
    "two": b'{"prompt": "x"} {"prompt": "y"}',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "a control character": b'{"prompt": "\x01"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "deep lists": b'{"prompt": ' + b"[" * 100_000,
    "deep objects": b'{"prompt": ' + b'{"a":' * 100_000,
    "deep, and closed": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a long number": b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "a large number": b'{"prompt": "x", "max_tokens": 99999999999999999999}',
    "a large exponent": b'{"prompt": "x", "temperature": 1e999999}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "a strange name": json.dumps({"prompt": "x", "\x00\ud7ff" * 1000: 1}).encode(),
    "a very wrong value": json.dumps({"prompt": {"a" * 100_000: 1}}).encode(),
}


@pytest.mark.parametrize("path", [TEXT, CHAT, "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_makes_no_sense_is_refused_in_few_words(server, path, name):
    response = server.http.post(path, content=BODIES[name], headers=JSON)
    assert len(error_of(response, 400)["message"]) < 1000


def test_text_may_hold_anything_that_unicode_has(server, llm):
    text = "\x00\u200b\ufffd\U0010ffff é\u202e"
    answer = server.post(TEXT, {"prompt": text, "max_tokens": 2, "echo": True})
    assert answer.json()["choices"][0]["text"].startswith(text)


def test_an_extra_deep_schema_is_refused(server):
    schema = {"type": "object"}
    for _ in range(300):
        schema = {"properties": {"a": schema}}
    body = {"prompt": "x", "json_schema": schema}
    response = server.http.post("/generate", content=json.dumps(body), headers=JSON)
    error_of(response, 400)


@pytest.mark.parametrize("path", ["/%ff", "/%00", "/v1/models/%2e%2e", "/v1/models/" + "x" * 5000, "/page/..%2fapp.py"])
def test_strange_addresses_are_not_found(server, path):
    assert len(error_of(server.http.get(path), 404)["message"]) < 1000


def test_what_is_no_http_at_all_hurts_nobody(server):
    for noise in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
        connection = server.connect()
        connection.sendall(noise)
        connection.shutdown(1)
        connection.recv(65536)
        connection.close()
    assert server.http.get("/health").status_code == 200


# ---- what fails inside -------------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_requests_by_name_and_the_engine_goes_on(server, llm, monkeypatch):
    own, llm.sampler = llm.core.model, Held()
    broken = threading.Event()

    def fails(*given):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("a cosmic ray")
        return own(*given)

    monkeypatch.setattr(llm.core, "model", fails)
    with ThreadPoolExecutor(2) as pool:
        struck = [pool.submit(server.post, TEXT, LONG) for _ in range(2)]
        until(lambda: server.service.admission.answers == 2)
        broken.set()
        llm.sampler.let_all()
        messages = [error_of(one.result(), 500)["message"] for one in struck if one.result().status_code != 200]
    assert messages and all("RuntimeError: a cosmic ray" in message for message in messages)
    (offline,) = llm.generate("x", SamplingParams(max_tokens=60, ignore_eos=True))
    after = server.post(TEXT, {**LONG, "temperature": 0})
    assert after.json()["choices"][0]["text"] == offline.text


def test_a_failure_in_one_request_touches_no_other(server, llm):
    class OnlyUnlucky(Script):
        def sample(self, logits, rows):
            if any(row.params.priority == 13 for row in rows):
                raise ValueError("unlucky")
            return super().sample(logits, rows)

    llm.sampler = OnlyUnlucky(llm.tokenizer.encode("well"))
    bodies = [{"prompt": "x", "max_tokens": 20, "priority": 13 if number == 3 else 0} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: server.post(TEXT, body), bodies))
    assert "unlucky" in error_of(answers.pop(3), 500)["message"]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["well"] * 7


def test_one_of_several_prompts_that_fails_gives_the_others_up(server, llm):
    class FailsForOne(Held):
        victim = None

        def sample(self, logits, rows):
            self.open, self.victim = True, self.victim or rows[0]
            if any(row is self.victim for row in rows):
                raise ValueError("one of three")
            return super().sample(logits, rows)

    llm.sampler = FailsForOne()
    assert "one of three" in error_of(server.post(TEXT, {**LONG, "prompt": ["a", "b", "c"]}), 500)["message"]
    until(lambda: not llm.core.has_work)


def test_a_fault_of_the_server_itself_keeps_its_details_to_the_log(server, llm, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("a secret path")

    monkeypatch.setattr(llm, "request", broken)
    response = server.post(TEXT, {"prompt": "x"})
    assert error_of(response, 500)["code"] == "internal_error" and "secret" not in response.text
    assert "a secret path" in caplog.text


# ---- the server's own description of itself ----------------------------------------------------------------------


def test_the_description_tells_of_every_route(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        TEXT, CHAT, "/v1/models", "/v1/models/{name}", "/generate", "/tokenize", "/detokenize", "/health", "/ready",
        "/metrics", "/watch",
    }  # fmt: skip
    for path in (TEXT, CHAT):
        answers = paths[path]["post"]["responses"]
        assert set(answers) == {"200", "4XX", "5XX"}
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}


@pytest.mark.slow
@pytest.mark.parametrize("path", [TEXT, CHAT, "/generate", "/tokenize", "/detokenize"])
def test_no_request_that_follows_or_breaks_the_description_makes_the_server_fail(server, path):
    load_all_checks()
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path]["POST"]
    seen = Counter()

    def ask(case):
        response = case.call()
        seen[response.status_code] += 1
        case.validate_response(response, checks=[not_a_server_error])

    few = settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        few(given(case=operation.as_strategy(generation_mode=mode))(ask))()
    assert seen[200] and seen[400], "both kinds were tried"
