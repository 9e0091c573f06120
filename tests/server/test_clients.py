"""The clients that people have work unchanged: openai, langchain-openai, and curl."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from typing import Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from serving import LONG, Held, Script, Serving, until

from llmfromscratch import SamplingParams

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def offline(llm, tokens: int = 8) -> str:
    return llm.chat(USER, SamplingParams(max_tokens=tokens)).text


# ---- openai ------------------------------------------------------------------------------------------------------


def test_openai_lists_the_model(llm, client):
    assert [model.id for model in client.models.list()] == ["llmfromscratch"]
    assert client.models.retrieve("llmfromscratch").owned_by == "llmfromscratch"


def test_openai_chats(llm, client):
    answer = client.chat.completions.create(model="llmfromscratch", messages=USER, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == offline(llm)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_an_answer_of_openais_client_may_be_sent_back(llm, client):
    llm.sampler = Script(llm.tokenizer.encode("fine"))
    answer = client.chat.completions.create(model="llmfromscratch", messages=USER)
    for sent in (answer.choices[0].message, answer.choices[0].message.model_dump()):
        more = client.chat.completions.create(
            model="llmfromscratch", messages=[*USER, sent, {"role": "user", "content": "x"}], max_tokens=4
        )
        assert more.choices[0].message.content == "fine"


def test_openai_streams(llm, client):
    stream = client.chat.completions.create(
        model="llmfromscratch", messages=USER, temperature=0, max_tokens=8, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == offline(llm)
    assert parts[-1].usage.completion_tokens == 8 and parts[-2].choices[0].finish_reason == "length"


def test_openai_gathers_a_stream_into_a_whole_answer(llm, client):
    with client.chat.completions.stream(model="llmfromscratch", messages=USER, temperature=0, max_tokens=8) as stream:
        stream.until_done()
        assert stream.current_completion_snapshot.choices[0].message.content == offline(llm)


def test_openai_completes_texts(llm, client):
    answer = client.completions.create(model="llmfromscratch", prompt=["a", "b"], temperature=0, max_tokens=8)
    texts = [one.text for one in llm.generate(["a", "b"], SamplingParams(max_tokens=8))]
    assert [choice.text for choice in answer.choices] == texts
    parts = client.completions.create(model="llmfromscratch", prompt="a", temperature=0, max_tokens=8, stream=True)
    assert "".join(part.choices[0].text for part in parts) == texts[0]


def test_our_own_parameters_go_through_extra_body(llm, client):
    answer = client.completions.create(
        model="llmfromscratch", prompt="a", temperature=0, max_tokens=40, extra_body={"ignore_eos": True, "priority": 3}
    )
    assert answer.usage.completion_tokens == 40


def test_openais_client_raises_its_own_errors(llm, client):
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(
            model="llmfromscratch", messages=USER, tools=[{"type": "function", "function": {"name": "x"}}]
        )
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


def test_openais_client_sees_keys_queues_and_faults_as_what_they_are(llm):
    llm.sampler = held = Held()
    with Serving(llm, api_keys={"secret": 0}, max_queue=0) as server:
        base = f"{server.url}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as other,
            pytest.raises(openai.AuthenticationError),
        ):
            other.models.list()
        with openai.OpenAI(base_url=base, api_key="secret", max_retries=0) as own:
            waiting = [server.begin("/v1/completions", LONG, "secret") for _ in range(4)]
            until(lambda: server.service.admission.answers == 4)
            with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
                own.completions.create(model="llmfromscratch", prompt="x")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            held.let_all()
            for connection in waiting:
                while not connection.recv(65536).endswith(b"}"):
                    pass
                connection.close()
            llm.sampler = Failing()
            with pytest.raises(openai.APIError, match="no luck"):
                list(own.completions.create(model="llmfromscratch", prompt="x", stream=True))


class Failing(Held):
    def __init__(self):
        super().__init__()
        self.left = 3

    def sample(self, logits, rows):
        self.left -= 1
        if self.left == 0:
            raise ValueError("no luck")
        self.open = True
        return super().sample(logits, rows)


def test_openais_async_client_may_break_off_and_others_go_on(llm, shared):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
            stream = await client.completions.create(
                model="llmfromscratch", prompt="x", stream=True, max_tokens=80, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            many = [
                client.chat.completions.create(model="llmfromscratch", messages=USER, temperature=0, max_tokens=8)
                for _ in range(6)
            ]
            return await asyncio.gather(*many)

    assert {answer.choices[0].message.content for answer in asyncio.run(ask())} == {offline(llm)}


def test_openai_asks_for_all_that_it_can(llm, client):
    answer = client.chat.completions.create(
        model="llmfromscratch", messages=USER, max_tokens=8, n=2, seed=1, top_p=0.9, stop=["zzz"], logprobs=True,
        top_logprobs=3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"70": -100},
    )  # fmt: skip
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 3


def test_openai_tells_log_probabilities_of_texts_and_of_an_echoed_prompt(llm, client):
    answer = client.completions.create(
        model="llmfromscratch", prompt="ab", temperature=0, top_p=0.9, max_tokens=2, logprobs=1, echo=True
    )
    told = answer.choices[0].logprobs
    (wanted,) = llm.generate("ab", SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1))
    assert told.token_logprobs[2:] == [one.raw for one in wanted.logprobs]
    assert told.token_logprobs[:2] == [None, pytest.approx(wanted.prompt_logprobs[1].raw)]


class Weather(BaseModel):
    """What the model is to answer."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-9, le=9)


def test_openai_parses_an_answer_into_a_class(llm, client):
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="llmfromscratch", messages=USER, response_format=Weather, seed=seed, max_tokens=60
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
    with pytest.raises(openai.BadRequestError, match="not supported") as caught:
        client.chat.completions.create(
            model="llmfromscratch",
            messages=USER,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert caught.value.param == "response_format"


def test_openais_client_asks_for_what_only_the_engine_knows(llm, client):
    own = {"regex": "[ab]{4}", "top_k": 50, "min_p": 0.01, "typical_p": 0.99, "repetition_penalty": 1.1, "priority": 1}
    answer = client.chat.completions.create(model="llmfromscratch", messages=USER, seed=3, extra_body=own)
    params = SamplingParams(**own, temperature=1.0, seed=3, max_tokens=llm.config.context_length)
    assert answer.choices[0].message.content == llm.chat(USER, params).text
    assert set(answer.choices[0].message.content) <= {"a", "b"}


@pytest.mark.model
def test_the_real_model_answers_openais_client_as_it_answers_offline(smollm2_fp32):
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    with Serving(smollm2_fp32, model_name="smollm2") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
        stream = client.chat.completions.create(
            model="smollm2", messages=question, temperature=0, max_tokens=34, stream=True
        )
        text = "".join(part.choices[0].delta.content or "" for part in stream)
        client.close()
    assert text.startswith("The answer to this question lies in the intricate dance of light and color.")
    assert text == smollm2_fp32.chat(question, SamplingParams(max_tokens=34)).text


# ---- langchain ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(shared):
    return ChatOpenAI(
        base_url=f"{shared.url}/v1", api_key="any", model="llmfromscratch", temperature=0, max_tokens=8, max_retries=0
    )


def test_langchain_invokes_and_streams(llm, chain):
    answer = chain.invoke([("system", "short"), ("user", "hello")])
    messages = [{"role": "system", "content": "short"}, *USER]
    assert answer.content == llm.chat(messages, SamplingParams(max_tokens=8)).text
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(part.content for part in chain.stream("hello")) == offline(llm)


def test_langchain_answers_many_at_once(llm, chain):
    answers = chain.batch([f"question {number}" for number in range(5)])
    each = [[{"role": "user", "content": f"question {number}"}] for number in range(5)]
    assert [answer.content for answer in answers] == [llm.chat(one, SamplingParams(max_tokens=8)).text for one in each]


def test_langchain_gets_an_answer_of_a_class(llm, shared):
    model = ChatOpenAI(
        base_url=f"{shared.url}/v1", api_key="any", model="llmfromscratch", seed=2, max_tokens=60, max_retries=0
    )
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke("hello"), Weather)
    assert isinstance(model.with_structured_output(Weather.model_json_schema(), method="json_mode").invoke("x"), dict)


# ---- curl --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None and "CI" not in os.environ, reason="needs curl")
def test_curl_sees_each_token_when_it_comes(llm, shared):
    class Spelling(Held):
        left = llm.tokenizer.encode("abcd")

        def sample(self, logits, rows):
            super().sample(logits, rows)
            return [self.left.pop(0) for _ in rows]

    llm.sampler = held = Spelling()
    body = json.dumps({**LONG, "stream": True, "max_tokens": 4})
    command = ["curl", "-sN", f"{shared.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as curl:
        for letter in "abcd":
            held.let(1)
            line = next(line for line in curl.stdout if line.strip())  # it comes before the next one is made
            assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == letter
        assert [line.strip() for line in curl.stdout if line.strip()] == ["data: [DONE]"]
    assert curl.returncode == 0
