"""The scripts in examples/ run as they stand, and what they show of one's own keeps what it promises."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import acting_engine
import pytest
import torch
from scripted_engine import scripted
from starlette.testclient import TestClient
from tiny_models import save_tiny

from llmfromscratch import LLM, SamplingParams, learner_engine, loading, tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = {file.stem for file in EXAMPLES.glob("*.py")}


def run(name: str, *arguments: object) -> str:
    """What an example prints, run as its first lines say, in a process and an environment of its own."""
    environment = {key: value for key, value in os.environ.items() if key != learner_engine.VARIABLE}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(name: str) -> ModuleType:
    """An example as a module, without its main."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here():
    tests = Path(__file__).read_text(encoding="utf-8")
    assert NAMES and all(re.search(rf'\b(run|read)\("{name}"', tests) for name in NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_example_says_what_it_is_for_and_how_to_run_it_and_is_short(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in text.split('"""')[1]
    assert len(text.splitlines()) <= 80


# an LLM in a script


@pytest.mark.model
@pytest.mark.slow
def test_a_script_gets_its_answers(smollm2_gguf):
    printed = run("llm_in_a_script")
    assert "Why is the sky blue?\n  The answer to this question lies in the intricate dance" in printed
    assert "The capital of France is Paris." in printed
    assert re.search(r"^\d+ tokens in [\d.]+ s of computing$", printed, flags=re.MULTILINE)


# an app of one's own


@pytest.fixture
def titles(tmp_path, monkeypatch):
    app = read("engine_in_a_fastapi_app")
    llm = scripted(tmp_path / "model", '"A title"', max_requests=2)
    monkeypatch.setattr(app, "LLM", lambda: llm)
    with TestClient(app.app) as client:
        yield client, llm


def test_an_app_of_ones_own_answers_many_at_once_from_one_engine(titles):
    client, llm = titles
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: client.post("/title", json={"note": f"Note {n}"}), range(8)))
    assert [answer.json() for answer in answers] == [{"title": "A title"}] * 8
    assert llm.metrics.finished == 8 and llm.metrics.batch_occupancy > 1
    assert llm.metrics.blocks_used == 0


def test_an_app_of_ones_own_says_what_is_wrong_with_a_request(titles):
    client, _ = titles
    answer = client.post("/title", json={"note": "x" * 3000})
    assert answer.status_code == 400 and re.search(r"3\d\d\d tokens; the context holds 2048", answer.json()["detail"])
    assert client.post("/title", json={"note": ""}).status_code == 422
    assert client.post("/title", json={"note": "short"}).json() == {"title": "A title"}


@pytest.mark.model
@pytest.mark.slow
def test_an_app_of_ones_own_titles_notes_with_the_real_model(smollm2_fp32, monkeypatch):
    app = read("engine_in_a_fastapi_app")
    monkeypatch.setattr(app, "LLM", lambda: smollm2_fp32)
    with TestClient(app.app) as client:
        title = client.post("/title", json={"note": "Buy milk, then call Ada."}).json()["title"]
    assert re.search("milk|ada", title, flags=re.IGNORECASE)


# LangChain


@pytest.mark.model
@pytest.mark.slow
def test_langchain_answers_whole_in_a_batch_and_streamed(smollm2_gguf):
    printed = run("langchain_chain")
    whole, streamed = re.search(r"^whole: (.+)$", printed, re.M)[1], re.search(r"^stream: (.+)$", printed, re.M)[1]
    assert whole == streamed and whole.startswith("A prism is")
    assert [text.split()[1] for text in re.findall(r"^batch: (.+)$", printed, re.M)] == ["lens", "mirror"]


# a scheduler of one's own


def test_the_example_scheduler_serves_everybody_one_at_a_time_the_shortest_first():
    one_at_a_time = read("own_scheduler").OneAtATime
    for prefix_sharing in (True, False):
        engine = acting_engine.Engine(acting_engine.paged(8, prefix_sharing=prefix_sharing), one_at_a_time)
        requests = [acting_engine.request(n, length) for n, length in enumerate((9, 3, 12, 3, 9))]
        engine.add(*requests)
        engine.run()
        for request in requests:
            assert request.token_ids == acting_engine.answer(request.prompt_token_ids, 4)
        assert all(len(plan) <= 1 for plan in engine.history)
        order = sorted(requests, key=lambda request: request.first_token)
        assert [request.request_id for request in order] == [1, 3, 0, 4, 2]
        assert engine.held_blocks() == 0


def test_the_example_scheduler_can_be_passed_in_and_lets_one_go_that_is_given_up(tmp_path):
    folder = save_tiny(tmp_path / "model")
    llm = LLM(folder, dtype="float64", device="cpu", scheduler=read("own_scheduler").OneAtATime)
    stock = LLM(folder, dtype="float64", device="cpu")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = ["abcdefgh", "abc", "abcdefghijklmnopqrstuvwxyz"]
    assert [a.token_ids for a in llm.generate(prompts, params)] == [
        a.token_ids for a in stock.generate(prompts, params)
    ]
    assert llm.metrics.batch_occupancy == 1
    stream, other = llm.stream("abc", params), llm.stream("abcd", params)
    next(stream)
    stream.close()
    assert len([piece for piece in other if piece.token_ids]) == 8
    other.close()
    llm.cache.audit()
    assert llm.metrics.blocks_used == 0 and llm.metrics.aborted == 1


def test_the_example_scheduler_refuses_what_can_never_fit():
    engine = acting_engine.Engine(acting_engine.paged(2), read("own_scheduler").OneAtATime)
    with pytest.raises(read("own_scheduler").OutOfMemory, match="12 tokens are needed, and the cache holds 8"):
        engine.add(acting_engine.request(0, 8))


@pytest.mark.model
@pytest.mark.slow
def test_the_example_with_a_scheduler_runs(smollm2_gguf):
    printed = run("own_scheduler")
    assert printed.count("[waited") == 2 and "Once upon a time, " in printed
    assert "1 request in a step" in printed


# a sampler of one's own


@pytest.mark.parametrize("target", [1.0, 2.0, 4.0])
def test_the_example_sampler_holds_the_surprise_near_its_target(target):
    """Zipf's law over 5,000 tokens has an entropy of about 9 bits, so that each of these takes a cut."""
    own = read("own_sampler").Mirostat(target)
    states = [own.start(SamplingParams(seed=seed), [1]) for seed in (0, 1, 0)]
    logits = -torch.log(torch.arange(1.0, 5001.0)).expand(3, -1)
    tokens = [own.sample(logits, states) for _ in range(1500)]
    for state in states:
        late = state.surprises[500:]
        assert sum(late) / len(late) == pytest.approx(target, abs=0.15)
    first, other, again = zip(*tokens, strict=True)
    assert first == again and first != other


def test_the_example_sampler_draws_as_the_model_says_where_nothing_is_cut_off():
    own = read("own_sampler").Mirostat(target=50.0)
    states = [own.start(SamplingParams(seed=1), [1])]
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    tokens = [own.sample(logits, states)[0] for _ in range(4000)]
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert tokens.count(token) / 4000 == pytest.approx(share, abs=0.03)


def test_the_example_sampler_can_be_passed_in_and_keeps_to_what_is_asked_of_the_answer(tmp_path):
    own = read("own_sampler").Mirostat(target=3.0)
    llm = LLM(save_tiny(tmp_path / "model"), dtype="float64", device="cpu", sampler=own)
    params = SamplingParams(max_tokens=20, seed=3, regex="[ab]{5,9}c")
    once, again = llm.generate(["abc", "abc"], params)
    assert once.text == again.text and re.fullmatch("[ab]{5,9}c", once.text) and once.finish_reason == "stop"
    assert [len(state.surprises) for state in own.states] == [len(once.token_ids)] * 2


@pytest.mark.model
@pytest.mark.slow
def test_the_example_with_a_sampler_is_more_surprising_where_it_should_be(smollm2_gguf):
    low, high = (float(value) for value in re.findall(r"observed ([\d.]+)", run("own_sampler")))
    assert low < 0.8 < 1.2 < high


# one module alone


def test_the_example_cuts_a_text_into_pieces_that_fit_and_joined_are_the_text(tmp_path):
    own = tokenizer.Tokenizer(loading.open_checkpoint(save_tiny(tmp_path / "model")).tokenizer_data())
    chunks = read("tokenizer_alone").chunks
    draw = random.Random(0)
    for _ in range(30):
        text = "".join(draw.choice(["a line\n", "\n", "ďábel 🧪 \r\n", "x" * 30 + "\n", "end"]) for _ in range(40))
        pieces = list(chunks(text, own, 50))
        assert "".join(pieces) == text
        # one byte is a token there, so the count has an oracle that is no tokenizer
        assert all(len(piece.encode()) <= 50 for piece in pieces if len(piece.splitlines()) > 1)
    assert list(chunks("", own, 50)) == []
    assert list(chunks("y" * 80, own, 50)) == ["y" * 80]


@pytest.mark.model
def test_the_example_with_the_tokenizer_loads_no_model(smollm2_gguf):
    printed = run("tokenizer_alone", EXAMPLES.parent / "README.md", 300)
    counts = [int(count) for count in re.findall(r"^ *\d+ +(\d+) tokens", printed, flags=re.MULTILINE)]
    assert len(counts) > 5 and all(200 < count <= 300 for count in counts[:-1])
    assert "# llmfromscratch" in printed.splitlines()[0]
