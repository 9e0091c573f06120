"""The plain form: /generate, /tokenize, /detokenize, and the same over the WebSocket /ws."""

from __future__ import annotations

import json

import pytest
from serving import Held, Script, Serving, error_of, nothing_left, until
from tiny_models import save_tiny
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from llmfromscratch import LLM, SamplingParams
from llmfromscratch.server import replies

USER = [{"role": "user", "content": "hello"}]
LONG = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}


# ---- /generate ---------------------------------------------------------------------------------------------------


def test_generate_is_greedy_unless_it_is_asked_otherwise(server, llm):
    response = server.post("/generate", {"prompt": "hello", "max_tokens": 8})
    (offline,) = llm.generate("hello", SamplingParams(max_tokens=8))
    answer = replies.GenerateReply.model_validate(response.json())
    assert (answer.text, answer.token_ids, answer.finish_reason) == (offline.text, offline.token_ids, "length")
    assert answer.prompt_tokens == 5 and answer.choices[0].text == offline.text
    drawn = server.post("/generate", {"prompt": "hello", "max_tokens": 8, "temperature": 1.0, "seed": 7}).json()
    assert drawn["text"] == llm.generate("hello", SamplingParams(max_tokens=8, temperature=1.0, seed=7))[0].text


def test_generate_takes_ids_and_conversations_and_the_engines_own_parameters(server, llm):
    ids = llm.tokenizer.encode("hello")
    by_text, by_ids = (
        server.post("/generate", {"prompt": prompt, "max_tokens": 8}).json() for prompt in ("hello", ids)
    )
    assert by_text == by_ids
    chat = server.post("/generate", {"messages": USER, "max_tokens": 8}).json()
    assert chat["text"] == llm.chat(USER, SamplingParams(max_tokens=8)).text
    end = by_text["token_ids"][2]
    ended = server.post("/generate", {"prompt": "hello", "max_tokens": 8, "stop_token_ids": [end]}).json()
    assert (ended["token_ids"], ended["finish_reason"]) == (by_text["token_ids"][:3], "stop")


def test_generate_streams_lines_of_json(server, llm):
    response = server.post("/generate", {"prompt": "hello", "max_tokens": 8, "stream": True})
    assert response.headers["content-type"] == "application/x-ndjson; charset=utf-8"
    lines = [json.loads(line) for line in response.text.splitlines()]
    (offline,) = llm.generate("hello", SamplingParams(max_tokens=8))
    assert "".join(line["text"] for line in lines) == offline.text
    assert [token for line in lines for token in line["token_ids"]] == offline.token_ids
    assert [line["finish_reason"] for line in lines] == [None] * 7 + ["length"]


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": USER}, {"prompt": None}])
def test_generate_wants_a_prompt_or_a_conversation(server, body):
    assert "either prompt or messages" in error_of(server.post("/generate", body), 400)["message"]


# ---- /tokenize and /detokenize -----------------------------------------------------------------------------------


def test_text_goes_to_ids_and_back(server, llm):
    text = "héllo <|end|> 火"
    told = server.post("/tokenize", {"text": text}).json()
    replies.TokenizeReply.model_validate(told)
    assert told["token_ids"] == llm.tokenizer.encode(text) and told["count"] == len(told["token_ids"])
    assert told["context_length"] == 96 and told["tokens"][0] == "h"
    assert server.post("/detokenize", {"token_ids": told["token_ids"]}).json() == {"text": text}


def test_a_conversation_has_the_ids_that_the_model_would_see(server, llm):
    told = server.post("/tokenize", {"messages": USER}).json()
    assert told["token_ids"] == llm.chat_prompt(USER)
    shown = server.post("/detokenize", {"token_ids": told["token_ids"], "skip_special": False}).json()["text"]
    assert shown == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


def test_ids_that_are_no_tokens_are_refused(server):
    error = error_of(server.post("/detokenize", {"token_ids": [5, 999]}), 400)
    assert error["param"] == "token_ids" and "999" in error["message"]


def test_without_a_tokenizer_ids_are_served_and_text_is_refused(tmp_path):
    llm = LLM(save_tiny(tmp_path, with_tokenizer=False), dtype="float64", device="cpu")
    with Serving(llm) as server:
        answer = server.post("/generate", {"prompt": [5, 6], "max_tokens": 4}).json()
        assert answer["token_ids"] == llm.generate([5, 6], SamplingParams(max_tokens=4))[0].token_ids
        for path, body in [
            ("/generate", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"text": "x"}),
            ("/tokenize", {"messages": USER}), ("/detokenize", {"token_ids": [5]}), ("/generate", {"messages": USER}),
        ]:  # fmt: skip
            assert "tokenizer" in error_of(server.post(path, body), 400)["message"]


def test_a_long_text_is_read_without_holding_up_the_others(server, llm):
    text = "word " * 20_000
    told = server.post("/tokenize", {"text": text}).json()
    assert told["count"] == len(text)


# ---- /ws ---------------------------------------------------------------------------------------------------------


def open_socket(server, **given):
    return connect(server.url.replace("http", "ws") + "/ws", **given)


def ask(socket, **body):
    socket.send(json.dumps(body))
    return read(socket)


def read(socket):
    """The messages of one answer."""
    told = []
    while not told or ("error" not in told[-1] and told[-1]["finish_reason"] is None):
        told.append(json.loads(socket.recv(20)))
    return told


def test_a_socket_answers_one_request_after_another(server, llm):
    with open_socket(server) as socket:
        for prompt in ("hello", "and more"):
            told = ask(socket, prompt=prompt, max_tokens=8)
            assert "".join(part["text"] for part in told) == llm.generate(prompt, SamplingParams(max_tokens=8))[0].text
            assert told[-1]["finish_reason"] == "length" and told[0]["index"] == 0
        told = ask(socket, messages=USER, max_tokens=8)
        assert "".join(part["text"] for part in told) == llm.chat(USER, SamplingParams(max_tokens=8)).text


def test_a_socket_tells_errors_in_the_same_shape_and_stays_open(server):
    with open_socket(server) as socket:
        for body, says in [
            ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"), ({}, "either prompt or messages"),
            ({"prompt": "x" * 200}, "200 tokens"), ({"prompt": "x", "zz": 1}, "zz is not a parameter"),
            ({"prompt": "x", "stream": False}, "always streams"),
        ]:  # fmt: skip
            (told,) = ask(socket, **body)
            assert says in told["error"]["message"] and set(told["error"]) == {"message", "type", "param", "code"}
        for text in ("{", "[]", '"\\ud800"', "[" * 5000, "null"):
            socket.send(text)
            (told,) = read(socket)
            assert told["error"]["type"] == "invalid_request_error"
        assert ask(socket, prompt="x", max_tokens=2)[-1]["finish_reason"] == "length"


def test_an_answer_may_be_cancelled_and_the_next_one_asked_for(server, llm):
    llm.sampler = held = Held()
    with open_socket(server) as socket:
        socket.send(json.dumps(LONG))
        held.let(2)
        assert json.loads(socket.recv(20))["finish_reason"] is None
        socket.send(json.dumps({"cancel": True}))
        assert read(socket)[-1]["finish_reason"] == "abort"
        held.let_all()
        nothing_left(llm)
        assert ask(socket, prompt="x", max_tokens=2)[-1]["finish_reason"] == "length"


def test_a_cancel_right_after_the_request_is_not_lost(server, llm):
    with open_socket(server) as socket:
        for _ in range(20):
            socket.send(json.dumps(LONG))
            socket.send(json.dumps({"cancel": True}))
            assert read(socket)[-1]["finish_reason"] == "abort"
        nothing_left(llm)


def test_a_request_that_comes_during_an_answer_is_served_after_it(server, llm):
    llm.sampler = Script(llm.tokenizer.encode("well"))
    with open_socket(server) as socket:
        for _ in range(5):
            socket.send(json.dumps(LONG))
        answers = [read(socket) for _ in range(5)]
    assert {"".join(part["text"] for part in one) for one in answers} == {"well"}


def test_a_socket_that_is_closed_gives_its_blocks_back_within_one_step(llm):
    llm.sampler = held = Held()
    with Serving(llm) as server:
        with open_socket(server) as socket:
            socket.send(json.dumps(LONG))
            held.let(3)
            socket.recv(20)
        gone = server.service.figures.gone.labels("went away")
        until(lambda: gone._value.get() == 1 and server.service.admission.answers == 0)
        steps = llm.metrics.steps
        held.let(1)
        until(lambda: not llm.core.has_work)
        assert llm.metrics.steps <= steps + 1
        held.let_all()


def test_a_socket_asks_for_a_key_where_there_are_keys(llm):
    with Serving(llm, api_keys={"secret": 3}) as server:
        with open_socket(server) as socket:
            assert ask(socket, prompt="x", max_tokens=2)[0]["error"]["code"] == "invalid_api_key"
            assert ask(socket, prompt="x", max_tokens=2, api_key="wrong")[0]["error"]["code"] == "invalid_api_key"
            assert ask(socket, prompt="x", max_tokens=2, api_key=3)[0]["error"]["code"] == "invalid_api_key"
            assert ask(socket, prompt="x", max_tokens=2, api_key="secret")[-1]["finish_reason"] == "length"
        with open_socket(server, additional_headers={"Authorization": "Bearer secret"}) as socket:
            assert ask(socket, prompt="x", max_tokens=2)[-1]["finish_reason"] == "length"


def test_a_page_of_another_site_may_not_open_a_socket(server):
    with pytest.raises(InvalidStatus, match="403"):
        open_socket(server, origin="https://elsewhere.example").recv(5)
    with open_socket(server, origin=server.url) as socket:
        assert ask(socket, prompt="x", max_tokens=2)[-1]["finish_reason"] == "length"


def test_a_message_that_is_too_large_ends_the_connection(llm):
    with Serving(llm, max_body_bytes=1000) as server, open_socket(server) as socket:
        socket.send(json.dumps({"prompt": "x" * 2000}))
        with pytest.raises(ConnectionClosed, match="1009"):
            socket.recv(10)
