"""What may be asked of an answer: a parameter means over HTTP what it means offline, and nonsense costs a sentence."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from serving import Held, error_of, events, until
from websockets.sync.client import connect

from llmfromscratch import SamplingParams, constraints
from llmfromscratch.server import replies
from llmfromscratch.server.answering import check_entries
from llmfromscratch.server.errors import APIError
from llmfromscratch.server.translate import Job

TEXT, CHAT, PLAIN = "/v1/completions", "/v1/chat/completions", "/generate"
PATHS = [TEXT, CHAT, PLAIN]
USER = [{"role": "user", "content": "hello"}]
ASKED = {TEXT: {"prompt": "hello"}, CHAT: {"messages": USER}, PLAIN: {"prompt": "hello"}}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def ask(server, path, **body):
    response = server.post(path, {**ASKED[path], **body})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(path, answer, choice=0):
    one = answer["choices"][choice]
    return one["message"]["content"] if path == CHAT else one["text"]


def offline(llm, path, **params):
    prompt = llm.chat_prompt(USER) if path == CHAT else "hello"
    return llm.generate([prompt], SamplingParams(**params))[0]


def refusal(server, path, **body):
    began = time.monotonic()
    error = error_of(server.post(path, {**ASKED[path], **body}), 400)
    assert time.monotonic() - began < 10 and len(error["message"]) < 1200
    return error


# ---- every parameter of the engine -------------------------------------------------------------------------------

ABC = {"regex": "[abc]{20}"}
ENDS = {"logit_bias": {"2": 30.0}}  # the end token is by far the likeliest
EACH = {
    "top_k": 3, "top_p": 0.4, "min_p": 0.3, "typical_p": 0.3, "repetition_penalty": 1.7, "presence_penalty": 2.0,
    "frequency_penalty": 2.0, "logit_bias": {"70": 40.0}, "bad_words": ["a", "bb"], "stop": ["j", "k", "l", "m"],
    "ignore_eos": True, "stop_token_ids": [60, 61, 62, 63, 64], "regex": "[a-f]+ [0-9]{3}", "json_schema": OBJECT,
    "required_words": ["well"], "temperature": 3.0, "seed": 11, "max_tokens": 5,
}  # fmt: skip
# What the rest of the request has to be, for the parameter to change something.
REST = {
    "bad_words": ABC, "ignore_eos": ENDS, "required_words": ENDS,
    "stop": {"logit_bias": {str(token): 5.0 for token in range(60, 90)}},
    "stop_token_ids": {"logit_bias": {str(token): 5.0 for token in range(60, 90)}},
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", EACH)
def test_a_parameter_means_what_it_means_offline(server, llm, path, name):
    rest = {**DRAWN, **REST.get(name, {})}
    wanted, without = (offline(llm, path, **body) for body in ({**rest, name: EACH[name]}, rest))
    answer = ask(server, path, **{**rest, name: EACH[name]})
    assert text_of(path, answer) == wanted.text
    assert answer["choices"][0]["finish_reason"] == wanted.finish_reason
    assert wanted.token_ids != without.token_ids, "the parameter changes something"


def test_include_stop_and_the_schema_as_text_mean_it_too(server, llm):
    params = {**DRAWN, **REST["stop"], "stop": ["j", "k", "l"], "include_stop": True}
    text = text_of(TEXT, ask(server, TEXT, **params))
    assert text == offline(llm, TEXT, **params).text and text[-1] in "jkl"
    wanted = offline(llm, TEXT, **DRAWN, json_schema=OBJECT).text
    assert text_of(TEXT, ask(server, TEXT, **DRAWN, json_schema=json.dumps(OBJECT))) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_several_answers_are_those_of_the_engine_and_not_the_same(server, llm, path):
    answer = ask(server, path, **DRAWN, n=3)
    wanted = offline(llm, path, **DRAWN, n=3)
    texts = [text_of(path, answer, choice) for choice in range(3)]
    assert texts == [one.text for one in wanted.choices] and len(set(texts)) == 3


def test_a_top_k_of_minus_one_keeps_all_tokens(server, llm):
    assert text_of(TEXT, ask(server, TEXT, **DRAWN, top_k=-1)) == offline(llm, TEXT, **DRAWN).text


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5, "min_p": 0.2, "typical_p": 0.5, "top_p": 0.1}])
def test_filters_beside_a_temperature_of_0_change_nothing_for_openais_clients(server, llm, path, filters):
    answer = ask(server, path, temperature=0, max_tokens=8, **filters)
    assert text_of(path, answer) == offline(llm, path, max_tokens=8).text
    assert refusal(server, path, temperature=0, top_p=7)["param"] == "top_p"
    assert refusal(server, path, temperature=0, top_k=-2)["param"] == "top_k"


def test_filters_beside_a_temperature_of_0_are_told_to_who_uses_the_plain_form(server):
    error = refusal(server, PLAIN, top_p=0.9)
    assert error["param"] == "top_p" and "no effect at temperature 0" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [{"beam_width": 2}, {"beam_width": 1, "temperature": 0}, {"length_penalty": 0.5}])
def test_beams_are_refused_by_name(server, path, body):
    error = refusal(server, path, **body)
    assert (error["param"], error["code"]) == (next(iter(body)), "unsupported_parameter")
    assert "LLM.generate" in error["message"]
    assert ask(server, path, max_tokens=1, beam_width=None, length_penalty=1)


# ---- answers of a form -------------------------------------------------------------------------------------------


def test_a_response_format_of_text_asks_for_nothing(server, llm):
    answer = ask(server, CHAT, **DRAWN, response_format={"type": "text"})
    assert text_of(CHAT, answer) == offline(llm, CHAT, **DRAWN).text


def test_a_json_object_is_one(server):
    for seed in range(3):
        answer = ask(server, CHAT, seed=seed, max_tokens=40, response_format={"type": "json_object"})
        assert isinstance(json.loads(text_of(CHAT, answer)), dict)
        assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": False, "description": "x"}])
def test_a_json_schema_is_followed_strict_or_not(server, more):
    schema = {**OBJECT, "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}}, "required": ["ok", "n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
    for seed in range(3):
        text = text_of(CHAT, ask(server, CHAT, seed=seed, max_tokens=60, response_format=wanted))
        jsonschema.validate(json.loads(text), schema)


def test_a_streamed_answer_follows_an_expression_too(server):
    body = {"prompt": "x", "regex": "(yes|no), [a-z]{4}", "max_tokens": 30, "stream": True, "seed": 1}
    *parts, done = events(server.post(TEXT, body))
    assert done == "[DONE]"
    assert re.fullmatch(body["regex"], "".join(part["choices"][0]["text"] for part in parts))


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (TEXT, {"regex": "("}, "regex", "is no regular expression"),
        (PLAIN, {"regex": "a(?=b)"}, "regex", "is not supported"),
        (CHAT, {"regex": "a{1,100000}"}, "regex", "too large"),
        (TEXT, {"json_schema": {"type": "strin"}}, "json_schema", "strin"),
        (TEXT, {"json_schema": "{"}, "json_schema", "JSON schema"),
        (TEXT, {"json_schema": 3}, "json_schema", "json_schema is 3"),
        (TEXT, {"json_schema": {"enum": [0] * 5000}}, "json_schema", "an object of at most 5000 values"),
        (CHAT, {"response_format": named({"enum": [0] * 5000})}, "response_format.json_schema.schema", "5000 values"),
        (PLAIN, {"json_schema": {"not": {}}}, "json_schema", "the keyword 'not' is not supported"),
        (CHAT, {"response_format": named({"properties": 3})}, "response_format", "response_format, #"),
        (CHAT, {"response_format": FORMAT, "stop": "x"}, "stop", "the whole answer matches response_format"),
        (CHAT, {"response_format": FORMAT, "json_schema": OBJECT}, "response_format", "both given"),
        (CHAT, {"response_format": FORMAT, "regex": "x"}, "regex", "regex and response_format are both given"),
        (TEXT, {"regex": "x", "json_schema": OBJECT}, "regex", "both given"),
        (TEXT, {"regex": "x", "ignore_eos": True}, "ignore_eos", "go on past its end"),
        (TEXT, {"required_words": ["ab"], "bad_words": ["a"]}, "required_words", "Leave one of the two out"),
        (TEXT, {"bad_words": [""]}, "bad_words", "at least one character"),
        (TEXT, {"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 texts"),
        (CHAT, {"stop": [""]}, "stop", "at least one character"),
        (TEXT, {"include_stop": True}, "include_stop", "no stop text"),
        (TEXT, {"n": 2, "temperature": 0}, "n", "2 answers would be the same"),
        (TEXT, {"n": 0}, "n", "n is 0"),
        (TEXT, {"n": 65}, "n", "65 answers at once"),
        (CHAT, {"n": 65}, "n", "65 answers at once"),
        (PLAIN, {"n": 65, "temperature": 1}, "n", "65 answers at once"),
        (CHAT, {"n": 257}, "n", "from 1 to 256"),
        (PLAIN, {"n": 2**31 - 1, "temperature": 1.0}, "n", "from 1 to 256"),
        (TEXT, {"n": 10**30}, "n", "n is"),
        (TEXT, {"prompt": ["x"] * 40, "n": 2}, "n", "80 answers at once"),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias.x", "'x'"),
        (TEXT, {"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
        (CHAT, {"logit_bias": {"100000": 1}}, "logit_bias", "names token 100000"),
        (CHAT, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "logit_bias is"),
        (PLAIN, {"stop_token_ids": [100000]}, "stop_token_ids", "names token 100000"),
        (TEXT, {"top_p": 0}, "top_p", "use temperature 0"),
        (TEXT, {"top_k": 2**40}, "top_k", "top_k is"),
        (CHAT, {"presence_penalty": 101}, "presence_penalty", "from -100 to 100"),
        (TEXT, {"repetition_penalty": 0}, "repetition_penalty", "1 does nothing"),
        (TEXT, {"logprobs": 21}, "logprobs", "21"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        (PLAIN, {"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_a_sentence_that_names_it(server, llm, path, body, param, says):
    steps = llm.metrics.steps
    error = refusal(server, path, **body)
    assert error["param"] == param and says in error["message"]
    assert llm.metrics.steps == steps


def test_a_refusal_of_what_the_engine_reads_is_the_same_in_a_stream_and_over_a_socket(server):
    for path in PATHS:
        assert refusal(server, path, regex="(", stream=True)["param"] == "regex"
    with connect(server.url.replace("http", "ws") + "/ws") as socket:
        for body in ({"regex": "("}, {"beam_width": 2}, {"n": 500, "temperature": 1}):
            socket.send(json.dumps({"prompt": "x", **body}))
            assert json.loads(socket.recv(20))["error"]["param"] == next(iter(body))


def test_what_leaves_nothing_to_choose_from_is_the_askers_fault(server, llm):
    everything = [llm.tokenizer.decode([token], skip_special=False) for token in range(llm.config.vocab_size)]
    every = sorted({text for text in everything if "\ufffd" not in text})[:200]
    body = {"prompt": "x", "bad_words": every, "regex": "[ -~]{4}"}
    error = error_of(server.post(TEXT, body), 400)
    assert error["code"] == "impossible" and "nothing is left to choose from" in error["message"]
    wide = {f"k{number}": {"type": "string", "pattern": "(a|b)*c{1,9}"} for number in range(1200)}
    body = {"prompt": "x", "json_schema": {"type": "object", "properties": wide}, "max_tokens": 40, "temperature": 0}
    error = error_of(server.post(TEXT, body), 400)  # it gets too costly on the way
    assert error["code"] == "impossible" and "cannot be followed" in error["message"]
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200


# ---- what would cost too much ------------------------------------------------------------------------------------


def nest(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS = {
    "a large bias": {"logit_bias": {str(token): 1.0 for token in range(100_000)}},
    "many stops": {"stop": ["x"] * 100_000},
    "many bad words": {"bad_words": ["x"] * 100_000},
    "a deep schema": {"json_schema": nest(40)},
    "a deeper one": {"json_schema": nest(90)},
    "a wide schema": {"json_schema": {"properties": {f"k{number}": {"type": "string"} for number in range(60_000)}}},
    "many values": {"json_schema": {"enum": list(range(200_000))}},
    "a long text of a schema": {"json_schema": json.dumps({"enum": ["x" * 1_000_000]})},
    "many patterns": {"json_schema": {"allOf": [{"pattern": f"(.*{letter}){{20}}"} for letter in "abcdefghijkl"]}},
    "any of many": {"json_schema": {"anyOf": [nest(3 + number % 20) for number in range(60)]}},
    "references in a ring": {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "repetitions in repetitions": {"regex": "((a{1,100}){1,100}){1,100}"},
    "nested stars": {"regex": "((((a*)*)*)*)*b"},
    "states that double": {"regex": "[ab]*a[ab]{60}"},
    "many dots": {"regex": "(.*a){60}"},
    "many ways": {"regex": "|".join(f"word{number}[a-z]*x{number}" for number in range(5000))},
    "a long expression": {"regex": "a" * 1_000_000},
    "deep brackets": {"regex": "(" * 5000 + ")" * 5000},
    "every letter": {"regex": r"(\w+\s?){1,500}"},
    "many required words": {"required_words": [f"word {number}" for number in range(256)]},
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_meant_to_cost_much_costs_little(server, name):
    began = time.monotonic()
    response = server.post(TEXT, {"prompt": "x", "max_tokens": 4, **BOMBS[name]})
    assert time.monotonic() - began < 10
    if response.status_code != 200:
        assert len(error_of(response, 400)["message"]) < 1200


def test_what_is_compiled_for_one_holds_up_nobody_else(server, monkeypatch):
    compiling, done, own = threading.Event(), threading.Event(), constraints.of

    def slow(params, *rest):
        if params.regex is not None:
            compiling.set()
            assert done.wait(20)
        return own(params, *rest)

    monkeypatch.setattr(constraints, "of", slow)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.post, TEXT, {"prompt": "x", "regex": "a{3}"}) for _ in range(8)]
        assert compiling.wait(20)
        until(lambda: server.service.admission.answers == 8)
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 4}).status_code == 200
        assert server.http.get("/health").status_code == 200
        assert not any(one.done() for one in waiting)
        done.set()
        assert {one.result().json()["choices"][0]["text"] for one in waiting} == {"aaa"}


def test_who_goes_away_while_it_is_compiled_leaves_nothing(server, llm, monkeypatch):
    compiling, done, own = threading.Event(), threading.Event(), constraints.of

    def slow(*given):
        compiling.set()
        assert done.wait(20)
        return own(*given)

    monkeypatch.setattr(constraints, "of", slow)
    connection = server.begin(TEXT, {"prompt": "x", "regex": "a{3}"})
    assert compiling.wait(20)
    connection.close()
    until(lambda: server.service.admission.answers == 0)
    done.set()
    monkeypatch.undo()
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200


def test_each_of_several_answers_takes_a_place(server, llm):
    llm.sampler = held = Held()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, TEXT, {"prompt": "x", "n": 7, "temperature": 1.0, "max_tokens": 2})
        until(lambda: server.service.admission.answers == 7)
        held.let_all()
        assert len(asked.result().json()["choices"]) == 7
    assert server.service.admission.answers == 0


# ---- log-probabilities -------------------------------------------------------------------------------------------


def told(entries):
    """The engine's log-probabilities as /generate writes them."""
    return [
        entry
        and {
            "token_id": entry.token_id,
            "raw": entry.raw,
            "processed": entry.processed,
            "top": [{"token_id": token, "raw": raw, "processed": other} for token, raw, other in entry.top],
        }
        for entry in entries
    ]


def test_generate_tells_the_log_probabilities_of_prompt_and_answer(server, llm):
    body = {**DRAWN, "max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
    wanted = offline(llm, PLAIN, **body)
    answer = ask(server, PLAIN, **body)
    replies.GenerateReply.model_validate(answer)
    assert answer["logprobs"] == told(wanted.logprobs)
    assert answer["choices"][0]["logprobs"] == answer["logprobs"]
    assert answer["prompt_logprobs"][0] is None
    for one, other in zip(answer["prompt_logprobs"][1:], told(wanted.prompt_logprobs)[1:], strict=True):
        assert one["token_id"] == other["token_id"] and one["raw"] == pytest.approx(other["raw"], abs=1e-9)
    assert "logprobs" not in ask(server, PLAIN) and "prompt_logprobs" not in ask(server, PLAIN)


def test_lines_and_messages_tell_them_token_by_token_those_of_the_prompt_first(server):
    body = {"prompt": "hello", **DRAWN, "n": 2, "max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
    whole = server.post(PLAIN, body).json()
    lines = [json.loads(line) for line in server.post(PLAIN, {**body, "stream": True}).text.splitlines()]
    messages = []
    with connect(server.url.replace("http", "ws") + "/ws") as socket:
        socket.send(json.dumps(body))
        while sum(message["finish_reason"] is not None for message in messages) < 2:
            messages.append(json.loads(socket.recv(20)))
    for parts in (lines, messages):
        assert parts[0]["prompt_logprobs"] == whole["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in parts[1:])
        for index, choice in enumerate(whole["choices"]):
            own = [part for part in parts if part["index"] == index]
            assert [one for part in own for one in part["logprobs"]] == choice["logprobs"]


def test_what_cannot_be_drawn_is_told_as_a_number_that_json_has(server):
    answer = ask(server, PLAIN, **DRAWN, top_k=1, logprobs=3)
    assert answer["logprobs"][0]["top"][1]["processed"] == -9999.0
    assert answer["logprobs"][0]["top"][1]["raw"] > -100


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_tells_the_same_log_probabilities_as_the_whole(server, path):
    body = {**ASKED[path], **DRAWN, "logprobs": 2 if path == TEXT else True}
    if path == CHAT:
        body["top_logprobs"] = 2
    whole = server.post(path, body).json()["choices"][0]["logprobs"]
    *parts, _ = events(server.post(path, {**body, "stream": True}))
    found = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if path == TEXT else ("content",):
        assert [entry for one in found for entry in one[name]] == whole[name]


@pytest.mark.parametrize("prompt", ["hello", "héllo ☀", "x"])
def test_echo_with_logprobs_tells_how_likely_the_prompt_is(server, llm, prompt):
    body = {"prompt": prompt, **DRAWN, "max_tokens": 6, "echo": True, "logprobs": 2}
    wanted = llm.generate([prompt], SamplingParams(**DRAWN | {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 2}))[0]
    choice = server.post(TEXT, body).json()["choices"][0]
    found = replies.CompletionLogprobs.model_validate(choice["logprobs"])
    first, *others = [*wanted.prompt_logprobs, *wanted.logprobs]
    assert first is None and found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([one.raw for one in others], abs=1e-9)
    assert choice["text"] == prompt + wanted.text
    assert found.text_offset[0] == 0 and found.text_offset[len(wanted.prompt_token_ids)] == len(prompt)
    *parts, _ = events(server.post(TEXT, {**body, "stream": True}))
    streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert [value for one in streamed for value in one["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert [value for one in streamed for value in one["text_offset"]] == found.text_offset


def test_more_log_probabilities_of_prompts_than_memory_should_be_taken_for_are_refused(server):
    body = {"prompt": [[5] * 90] * 60, "echo": True, "logprobs": 20, "max_tokens": 1}
    assert server.post(TEXT, {**body, "logprobs": 0}).status_code == 200
    body["n"], body["prompt"] = 60, [5] * 90
    assert server.post(TEXT, body).status_code == 200
    with pytest.raises(APIError, match="525000 log-probabilities"):
        check_entries([Job([5] * 500, SamplingParams(), 20)] * 50)
