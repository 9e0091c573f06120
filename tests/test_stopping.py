"""Every way an answer can end is told by its own name, and nothing of a stop string ever comes out."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny

from llmfromscratch import LLM, AsyncEngine, SamplingParams, sampling, stopping
from llmfromscratch.answers import Completion, Piece, Reader
from llmfromscratch.errors import RequestError
from llmfromscratch.scheduler import Request

END, OTHER_END, START = 2, 0, 1


class Scripted:
    """A sampler that says what it is told; the rest of the engine is real."""

    def __init__(self, *tokens: int):
        self.tokens = list(tokens)

    def start(self, params, prompt_token_ids, constraint=None):
        return params

    def sample(self, logits, rows):
        return [self.tokens.pop(0) for _ in rows]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LLM:
    return LLM(save_tiny(tmp_path_factory.mktemp("tiny")), dtype="float64", device="cpu", block_size=4)


@pytest.fixture
def llm(loaded) -> LLM:
    """The tiny model, its tokens bytes; afterwards no block is held and nothing is in flight."""
    loaded.sampler = sampling.Sampler()
    yield loaded
    loaded.cache.audit()
    assert loaded.cache.block_tables == {}
    assert not loaded.core.has_work


def say(llm: LLM, text: str, params: SamplingParams, *after: int) -> Completion:
    """What becomes of an answer that would be `text`, in one go; a stream of the same says the same."""
    tokens = [*llm.tokenizer.encode(text), *after]
    llm.sampler = Scripted(*tokens)
    answer = llm.generate("x", params)[0]
    left, llm.sampler = llm.sampler.tokens, Scripted(*tokens)
    pieces = list(llm.stream("x", params))
    assert llm.sampler.tokens == left
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
    assert (pieces[-1].finish_reason, pieces[-1].error) == (answer.finish_reason, answer.error)
    assert {piece.finish_reason for piece in pieces[:-1]} <= {None}
    assert answer.token_ids == tokens[: len(answer.token_ids)]
    assert len(left) == len(tokens) - len(answer.token_ids)  # nothing is computed behind the end
    return answer


# ---- each finish reason ------------------------------------------------------------------------------------------

ALPHABET = "ABCDEFGHIJKLMNOP"


def test_a_stop_string_ends_the_answer_at_once_and_stays_out_of_it(llm):  # field case 20
    answer = say(llm, ALPHABET, SamplingParams(stop=["DEFGHIJ"]))
    assert (answer.text, answer.finish_reason, answer.error) == ("ABC", "stop", None)
    assert answer.token_ids == llm.tokenizer.encode("ABCDEFGHIJ")


def test_a_stop_string_stays_where_that_was_asked_for(llm):
    answer = say(llm, ALPHABET, SamplingParams(stop=["DEFGHIJ"], include_stop=True))
    assert (answer.text, answer.finish_reason) == ("ABCDEFGHIJ", "stop")


def test_the_stop_string_that_is_complete_first_wins(llm):
    answer = say(llm, ALPHABET, SamplingParams(stop=["XYZ", "EFGHI", "FG"]))
    assert (answer.text, answer.finish_reason) == ("ABCDE", "stop")


def test_a_stop_string_that_is_only_begun_is_text(llm):
    answer = say(llm, "ABCD", SamplingParams(stop=["CDE"]), END)
    assert (answer.text, answer.finish_reason) == ("ABCD", "stop")
    answer = say(llm, ALPHABET, SamplingParams(stop=["CDE"], max_tokens=4))
    assert (answer.text, answer.finish_reason) == ("ABCD", "length")


def test_a_stop_string_with_the_last_token_allowed_is_a_stop(llm):
    answer = say(llm, ALPHABET, SamplingParams(stop=["CDE"], max_tokens=5))
    assert (answer.text, answer.finish_reason) == ("AB", "stop")


def test_stop_strings_work_beside_stop_tokens_and_whichever_comes_first_ends(llm):
    dot = llm.tokenizer.encode(".")
    params = SamplingParams(stop=["two"], stop_token_ids=dot)
    assert say(llm, "One. two", params).text == "One"
    assert say(llm, "One two.", params).text == "One "
    # the token that ends the answer is no text, so it completes no stop string
    assert say(llm, "ab.", SamplingParams(stop=["b."], stop_token_ids=dot)).text == "ab"


def test_a_stop_string_may_be_cut_inside_a_character(llm):
    answer = say(llm, "five € only", SamplingParams(stop=["€"]))
    assert (answer.text, answer.finish_reason) == ("five ", "stop")
    assert len(answer.token_ids) == len("five ") + 3


def test_a_stop_string_in_the_prompt_or_across_its_end_stops_nothing(llm):
    llm.sampler = Scripted(*llm.tokenizer.encode("bcd"))
    assert llm.generate("stop a", SamplingParams(stop=["stop", "ab"], max_tokens=3))[0].text == "bcd"


def test_stop_strings_stop_also_where_end_tokens_are_ignored(llm):
    answer = say(llm, "ab", SamplingParams(stop=["de"], ignore_eos=True), END, *llm.tokenizer.encode("cde"))
    assert (answer.text, answer.finish_reason) == ("abc", "stop")


def test_ids_that_the_tokenizer_lacks_do_not_break_a_stop_string(tmp_path):
    llm = LLM(save_tiny(tmp_path, vocab_size=264), dtype="float64", device="cpu")
    first, *rest = llm.tokenizer.encode("stop")
    answer = say(llm, "Now ", SamplingParams(stop=["stop"]), first, 260, *rest)
    assert (answer.text, answer.finish_reason) == ("Now ", "stop")


def with_padding(folder) -> LLM:
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**fields, "pad_token": "<|endoftext|>"}), encoding="utf-8")
    return LLM(folder, dtype="float64", device="cpu")


def test_a_padding_token_that_appears_ends_the_answer(tmp_path):
    folder = save_tiny(tmp_path, eos_token_id=END)
    plain = LLM(folder, dtype="float64", device="cpu")
    answer = say(plain, "ab", SamplingParams(max_tokens=4), OTHER_END, *plain.tokenizer.encode("cd"))
    assert (answer.text, answer.finish_reason) == ("abc", "length")
    padded = with_padding(folder)
    assert padded.config.eos_token_ids == (END,)
    assert padded.tokenizer_config.pad_id == OTHER_END
    answer = say(padded, "ab", SamplingParams(max_tokens=4), OTHER_END, *padded.tokenizer.encode("cd"))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    ignoring = SamplingParams(max_tokens=4, ignore_eos=True)
    answer = say(padded, "ab", ignoring, OTHER_END, *padded.tokenizer.encode("cd"))
    assert (answer.text, answer.finish_reason) == ("abc", "length")


def test_an_answer_that_may_say_nothing_more_is_aborted_with_a_sentence_and_keeps_its_text(llm):
    class Closed(Scripted):
        def sample(self, logits, rows):
            return super().sample(logits, rows) if self.tokens else [None]

    llm.sampler = Closed(*llm.tokenizer.encode("abc"))
    answer = llm.generate("x", SamplingParams(stop=["cd"]))[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("abc", "abort", 3)
    assert answer.error.startswith("nothing is left to choose from")


def test_a_ban_on_every_token_ends_one_request_and_the_others_go_on(llm):
    banned = SamplingParams(logit_bias=dict.fromkeys(range(259), float("-inf")), max_tokens=5)
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    alone = llm.generate("b", plain)[0]
    closed, open_ = llm.generate(["a", "b"], [banned, plain])
    assert (closed.finish_reason, closed.token_ids) == ("abort", [])
    assert closed.error.startswith("nothing is left to choose from")
    assert open_ == alone


def test_tokens_that_are_no_text_end_their_own_request_where_stop_strings_are_looked_for(llm, monkeypatch, caplog):
    own, bad = llm.tokenizer.token_bytes, llm.tokenizer.encode("~")[0]

    def broken(index):
        if index == bad:
            raise KeyError("no such token")
        return own(index)

    llm.sampler = Scripted(
        *[token for pair in zip(*map(llm.tokenizer.encode, ("a~b", "xyz")), strict=True) for token in pair]
    )
    stopping_at = SamplingParams(stop=["Q"], max_tokens=3)
    requests = [llm.request(prompt, stopping_at) for prompt in ("u", "v")]
    monkeypatch.setattr(llm.tokenizer, "token_bytes", broken)
    for request in requests:
        llm.core.add(request)
    llm.core.step()
    llm.core.step()
    assert requests[0].error == "its tokens could not be turned into text: KeyError: 'no such token'"
    llm.sampler.tokens.pop(0)  # the one that was meant for the aborted request
    llm.core.step()
    assert requests[1].finish_reason == "length"


def test_a_cancelled_answer_gives_its_blocks_back_and_says_why(llm):
    stream = llm.stream("x", SamplingParams(max_tokens=50, ignore_eos=True, stop=["\x00\x00"]))
    next(stream)
    assert llm.cache.block_tables != {}
    stream.close()
    assert llm.cache.block_tables == {}


# ---- through asyncio ---------------------------------------------------------------------------------------------


def test_an_async_stream_stops_at_a_stop_string_and_says_what_generate_says(llm):
    params = SamplingParams(stop=["DEF"], max_tokens=20)
    llm.sampler = Scripted(*llm.tokenizer.encode(ALPHABET), *llm.tokenizer.encode(ALPHABET))

    async def serve() -> tuple[list[Piece], Completion]:
        async with AsyncEngine(llm) as engine:
            pieces = [piece async for piece in engine.stream("x", params)]
            llm.core.sampler.tokens = llm.tokenizer.encode(ALPHABET)
            return pieces, await engine.generate("x", params)

    pieces, whole = asyncio.run(serve())
    assert "".join(piece.text for piece in pieces) == whole.text == "ABC"
    assert pieces[-1].finish_reason == whole.finish_reason == "stop"


# ---- however it is cut -------------------------------------------------------------------------------------------


class Cut:
    """A tokenizer whose tokens are the pieces of one text, in bytes: token i is piece i."""

    special: dict[str, int] = {}
    strip_first_space = False

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def __contains__(self, index: int) -> bool:
        return 0 <= index < len(self.pieces)

    def token_bytes(self, index: int) -> bytes:
        return self.pieces[index]


def expected_text(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The text up to the stop that is complete first, by looking at every beginning of it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@st.composite
def cut_texts(draw) -> tuple[str, list[bytes]]:
    """A text over a small alphabet, so that stop strings occur, and its bytes cut anywhere."""
    text = draw(st.text("aab€é", max_size=30))
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    edges = [0, *cuts, len(data)]
    return text, [data[start:end] for start, end in itertools.pairwise(edges)]


STOPS = st.lists(st.text("aab€é", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=300)
@given(cut=cut_texts(), stops=STOPS, include=st.booleans(), steps=st.lists(st.integers(1, 5), max_size=20))
def test_nothing_of_a_stop_string_comes_out_however_tokens_and_reading_cut_the_text(cut, stops, include, steps):
    text, pieces = cut
    own, params = Cut(pieces), SamplingParams(stop=stops, include_stop=include)
    watcher = stopping.StopWatcher(stopping.AnswerText.of(own, [], params))
    request = Request(0, [10**6], params, stops=watcher)
    wanted, stop = expected_text(text, stops, include)
    reader, told, reads = Reader(request, own), "", iter(steps)
    until_read = next(reads, 1)
    for token in range(len(pieces)):
        ended = watcher(token)
        request.record(token, 0.0)
        if ended or token == len(pieces) - 1:
            request.end("stop" if ended else "length")
            break
        until_read -= 1
        if until_read == 0:
            told += "".join(piece.text for piece in reader.new_pieces())
            until_read = next(reads, 1)
            assert wanted.startswith(told)  # also in the middle, nothing comes out that is to be taken back
    told += "".join(piece.text for piece in reader.new_pieces())
    assert (told, watcher.stopped) == (wanted, stop)
    assert request.finish_reason == ("stop" if stop else "length")
    if stop and not include:
        assert not any(one in told for one in stops)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    stops=st.lists(st.text("abcdefghij 0123", min_size=1, max_size=2), min_size=1, max_size=40),
)
def test_a_random_models_text_is_cut_where_it_would_have_held_a_stop_string(loaded, seed, stops):
    params = SamplingParams(max_tokens=25, temperature=1.5, seed=seed, ignore_eos=True)
    loaded.sampler = sampling.Sampler()
    whole = loaded.generate("Hi", params)[0]
    stopped = SamplingParams(max_tokens=25, temperature=1.5, seed=seed, ignore_eos=True, stop=stops)
    answer = loaded.generate("Hi", stopped)[0]
    wanted, stop = expected_text(whole.text, tuple(stops), include=False)
    assert (answer.text, answer.finish_reason) == (wanted, "stop" if stop else "length")
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert "".join(piece.text for piece in loaded.stream("Hi", stopped)) == answer.text


# ---- what cannot be meant ----------------------------------------------------------------------------------------


def test_without_a_tokenizer_what_is_about_text_is_refused_by_name(tmp_path):
    llm = LLM(save_tiny(tmp_path, with_tokenizer=False), dtype="float64", device="cpu")
    for name, value in (
        ("stop", ["a"]), ("bad_words", ["a"]), ("required_words", ["a"]), ("regex", "a"), ("json_schema", "{}"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=f"{name} is about text, and this checkpoint has no tokenizer"):
            llm.generate([5], SamplingParams(**{name: value}))
    assert len(llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    with pytest.raises(RequestError, match="there is no tokenizer, so stop strings cannot be found"):
        stopping.AnswerText(None, [], ["a"])
