"""Answers over SSE: the pieces joined are the whole, in OpenAI's events; and a stream that breaks off says so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import Script, error_of, events

from llmfromscratch import SamplingParams, sampling

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
BODIES = {CHAT: {"messages": USER}, TEXT: {"prompt": "hello"}}


def stream(server, path, **body):
    response = server.post(path, {**BODIES[path], "temperature": 0, "max_tokens": 8, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response)


def text_of(event) -> str:
    return "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in event["choices"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_pieces_joined_are_the_answer_that_comes_whole(server, path):
    *parts, done = stream(server, path)
    whole = server.post(path, {**BODIES[path], "temperature": 0, "max_tokens": 8}).json()["choices"][0]
    assert done == "[DONE]"
    assert "".join(map(text_of, parts)) == (whole["text"] if path == TEXT else whole["message"]["content"])
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [whole["finish_reason"]]


def test_the_events_of_a_chat_are_openais(server):
    *parts, _ = stream(server, CHAT, max_tokens=3)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1]["choices"][0]["delta"] == {}
    assert len({part["id"] for part in parts}) == 1
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert all("usage" not in part for part in parts)


def test_the_events_of_a_completion_are_openais(server):
    *parts, _ = stream(server, TEXT, max_tokens=3)
    assert {part["object"] for part in parts} == {"text_completion"}
    assert set(parts[0]["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_comes_last_where_it_is_asked_for(server, path):
    *parts, usage, done = stream(server, path, max_tokens=3, stream_options={"include_usage": True})
    assert done == "[DONE]" and usage["choices"] == []
    assert all(part["usage"] is None for part in parts)
    whole = server.post(path, {**BODIES[path], "temperature": 0, "max_tokens": 3}).json()
    assert usage["usage"] == whole["usage"] and usage["usage"]["completion_tokens"] == 3


def test_characters_of_several_tokens_come_whole(server, llm):
    text = "ďábelské 👩‍🚀 火"
    llm.sampler = Script(llm.tokenizer.encode(text))
    *parts, _ = stream(server, CHAT, max_tokens=60)
    pieces = [text_of(part) for part in parts]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert "火" in pieces


def test_a_character_that_is_cut_off_by_the_limit_is_flushed(server, llm):
    llm.sampler = Script(llm.tokenizer.encode("a火")[:-1])
    *parts, _ = stream(server, TEXT, max_tokens=3)
    assert "".join(map(text_of, parts)) == "a\ufffd"


def test_several_prompts_are_streamed_side_by_side(server, llm):
    prompts = ["one", "two and more", "x"]
    *parts, _ = stream(server, TEXT, prompt=prompts)
    texts = ["", "", ""]
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [answer.text for answer in llm.generate(prompts, SamplingParams(max_tokens=8))]
    assert sum(part["choices"][0]["finish_reason"] is not None for part in parts) == 3


def test_many_streams_at_once_each_get_their_own_answer(server, llm):
    prompts = [f"question {number}" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda prompt: stream(server, TEXT, prompt=prompt, max_tokens=20), prompts))
    offline = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert ["".join(map(text_of, parts)) for *parts, _ in found] == [answer.text for answer in offline]


class FailsAt(sampling.Sampler):
    def __init__(self, at: int):
        self.left = at

    def sample(self, logits, rows):
        self.left -= 1
        if self.left == 0:
            raise ValueError("no luck")
        return super().sample(logits, rows)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(server, llm, path):
    llm.sampler = FailsAt(4)
    *parts, last = stream(server, path, ignore_eos=True)
    assert len(parts) >= 2
    assert last["error"]["type"] == "server_error" and "ValueError: no luck" in last["error"]["message"]
    assert stream(server, path)[-1] == "[DONE]"


def test_what_fails_before_the_first_token_has_a_status_of_its_own(server, llm):
    llm.sampler = FailsAt(1)
    response = server.post(TEXT, {"prompt": "x", "stream": True})
    assert "no luck" in error_of(response, 500)["message"]


def test_nothing_of_a_stop_string_reaches_the_client(server, llm):
    (free,) = llm.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True))
    stop = free.text[6:9]
    *parts, _ = stream(server, TEXT, max_tokens=30, ignore_eos=True, stop=[stop])
    assert "".join(map(text_of, parts)) == free.text[: free.text.index(stop)]
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_n_answers_are_streamed_side_by_side_with_their_logprobs(server):
    *parts, _ = stream(server, CHAT, n=3, temperature=1.0, seed=5, logprobs=True, top_logprobs=1)
    assert {part["choices"][0]["index"] for part in parts} == {0, 1, 2}
    assert sum(part["choices"][0]["finish_reason"] is not None for part in parts) == 3
    told = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert all(entry["top_logprobs"] for one in told for entry in one["content"])
