"""Text that leaves token by token: never half a character, never a piece of a stop string, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmfromscratch import tokenizer
from llmfromscratch.errors import RequestError, TokenizerError


class Bytes:
    """A tokenizer of tokens that the test writes down; control tokens are those in `control`."""

    def __init__(self, tokens: Sequence[bytes], control: Sequence[int] = (), strip_first_space: bool = False):
        self.tokens, self.strip_first_space = list(tokens), strip_first_space
        self.special = {self.tokens[index].decode(): index for index in control}

    def token_bytes(self, index: int) -> bytes:
        if not 0 <= index < len(self.tokens):
            raise TokenizerError(f"token id {index} is outside the vocabulary.")
        return self.tokens[index]


Cut = TypeVar("Cut", bytes, str)


def cut(whole: Cut, places: Sequence[int]) -> list[Cut]:
    """The bytes or the text in pieces, cut at the given places; a place that comes twice gives an empty piece."""
    borders = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(borders)]


def pieces(tokens: Sequence[bytes], prompt: Sequence[bytes] = (), **rules: bool) -> list[str]:
    """What a stream of these tokens gives, token by token, and at its end."""
    ids = range(len(prompt) + len(tokens))
    stream = tokenizer.IncrementalDecoder(Bytes([*prompt, *tokens], **rules), list(ids)[: len(prompt)])
    return [*map(stream.push, ids[len(prompt) :]), stream.flush()]


def whole(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


HARD = [
    "ďábelské",  # field case 9
    "中文没有空格，也没有停顿。",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 1️⃣ 🇩🇪",
    "e\u0301 a\u0308\u0323 नमस्ते שָׁלוֹם",
    "\U0010ffff\ufffd\ufeff\x00\x7f\x80\u07ff\u0800\uffff\U00010000",
    "",
]
PLACES = st.lists(st.integers(0, 200), max_size=30)
# bytes that begin, go on and break off characters, beside any others
AWKWARD = st.lists(
    st.sampled_from([b"\xf0", b"\x9f", b"\x98\x80", b"\xe4\xb8", b"\xad", b"\xc3", b"\xa9", b"\xed\xa0\x80", b"a"])
    | st.sampled_from([b"\xe0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xff", b"\xef\xbf\xbd", b" ", b"\xf0\x80"])
    | st.binary(max_size=3),
    max_size=12,
)  # fmt: skip
BROKEN = AWKWARD.map(b"".join)


# ---- IncrementalDecoder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_character_leaves_when_its_last_byte_has_come_and_not_before(text, length):
    data, shown = text.encode(), ""
    stream = tokenizer.IncrementalDecoder(Bytes([data[i : i + length] for i in range(0, len(data), length)]))
    for index in range(-(-len(data) // length)):
        shown += stream.push(index)
        assert shown == data[: (index + 1) * length].decode("utf-8", errors="ignore")
    assert stream.flush() == ""
    assert shown == text


@given(text=st.text() | st.sampled_from(HARD), places=PLACES)
def test_no_broken_character_ever_leaves_however_a_text_is_cut(text, places):
    text, shown = text.encode(errors="replace").decode(), ""
    for piece in pieces(cut(text.encode(), places)):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@given(data=BROKEN, places=PLACES)
@example(b"\xf0\x9f\x98", [1, 2])
@example(b"\xf0\x9fa", [1])
@example(b"\xed\xa0\x80", [1, 2])
def test_pieces_joined_are_the_whole_decoding_for_every_sequence_of_bytes(data, places):
    assert "".join(pieces(cut(data, places))) == whole(data)


@given(data=BROKEN, places=PLACES)
def test_what_has_left_is_certain_whatever_comes_next(data, places):
    tokens, shown = cut(data, places), ""
    for count, piece in enumerate(pieces(tokens)[:-1], start=1):
        shown += piece
        for more in (b"", b"a", b"\x80", b"\xbf\xbf\xbf", b"\xff"):
            assert whole(b"".join(tokens[:count]) + more).startswith(shown)


def test_a_replacement_character_that_the_model_writes_leaves_at_once():
    assert pieces(["\ufffd".encode(), b"a"]) == ["\ufffd", "a", ""]


def test_what_is_left_of_a_character_comes_at_the_end_and_once():
    stream = tokenizer.IncrementalDecoder(Bytes([b"\xf0\x9f", b"\x98"]))
    assert [stream.push(0), stream.push(1)] == ["", ""]
    assert [stream.flush(), stream.flush()] == ["\ufffd", ""]


def test_an_emoji_of_several_code_points_leaves_one_whole_code_point_at_a_time():
    assert pieces(["👍".encode(), *cut("🏽".encode(), [2])]) == ["👍", "", "🏽", ""]


def half_done(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character that other bytes could complete."""
    for count in range(min(3, len(data)), 0, -1):
        for more in (b"\x80", b"\xa0", b"\x90\x80", b"\x80\x80", b"\xa0\x80", b"\x90\x80\x80", b"\x80\x80\x80"):
            text = whole(data[-count:] + more)
            if len(text) == 1 and text.encode() == data[-count:] + more:
                return count
    return 0


@given(prompt=BROKEN, data=BROKEN, places=PLACES)
@example(b"ab\xf0\x9f", b"\x98\x80!", [])
@example(b"ab\xf0\x9f", b"x", [])
@example(b"ab\xf0\x9f", b"", [])
def test_a_prompt_gives_nothing_but_the_character_it_leaves_half_done(prompt, data, places):
    complete = whole(prompt[: len(prompt) - half_done(prompt)])
    expected = whole(prompt + data)[len(complete) :]
    assert "".join(pieces(cut(data, places), prompt=cut(prompt, places))) == expected


def test_a_prompt_that_ends_inside_a_character_yields_only_new_text():
    assert pieces([b"\x98\x80", b"!"], prompt=[b"so \xf0", b"\x9f"]) == ["😀", "!", ""]
    assert pieces([b"o"], prompt=["né ".encode()]) == ["o", ""]


def test_control_tokens_are_silent_even_inside_a_character_or_spelled_out_on_demand():
    own = Bytes([b"\xc3", b"<end>", b"\xa9"], control=[1])
    stream = tokenizer.IncrementalDecoder(own)
    assert [stream.push(index) for index in (0, 1, 2)] == ["", "", "é"]
    spelled = tokenizer.IncrementalDecoder(own, skip_special=False)
    assert "".join([*map(spelled.push, (0, 1, 2)), spelled.flush()]) == whole(b"\xc3<end>\xa9")


@given(
    words=st.lists(st.sampled_from([b" a", b" ", b"  b", b"c", b"<s>", b"", b"\xc3", b"\xa9"])), split=st.integers(0, 9)
)
@example([b"<s>", b" a", b" a"], 0)
@example([b" ", b" a"], 1)
def test_one_space_is_lost_at_the_beginning_of_the_whole_text_where_the_family_adds_one(words, split):
    own = Bytes([b" a", b" ", b"  b", b"c", b"<s>", b"", b"\xc3", b"\xa9"], control=[4], strip_first_space=True)
    ids = [own.tokens.index(word) for word in words]
    streamed = tokenizer.IncrementalDecoder(own, ids[:split])
    told = tokenizer.IncrementalDecoder(own)
    complete = "".join(map(told.push, ids[:split]))
    text = whole(b"".join(word for word in words if word != b"<s>").removeprefix(b" "))
    assert complete + "".join([*map(streamed.push, ids[split:]), streamed.flush()]) == text


def test_an_id_outside_the_vocabulary_is_refused_in_the_prompt_too():
    stream = tokenizer.IncrementalDecoder(Bytes([b"a"]))
    with pytest.raises(TokenizerError, match="token id 1 "):
        stream.push(1)
    with pytest.raises(TokenizerError, match="token id 7 "):
        tokenizer.IncrementalDecoder(Bytes([b"a"]), [0, 7])


# ---- StopMatcher -------------------------------------------------------------------------------------------------


def naive(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """The whole text looked through: the stop string whose end is first, the longest of them where several end."""
    found = [
        (end, -len(stop), stop)
        for end in range(len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]  # fmt: skip
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def stream(parts: Sequence[str], stops: Sequence[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = tokenizer.StopMatcher(stops, include)
    return [*map(matcher.push, parts), matcher.flush()], matcher.stopped


FEW = st.text("ab", max_size=40) | st.text("abc", max_size=25) | st.text("é😀 \n", max_size=20)
STOP = st.text("ab", min_size=1, max_size=7) | st.text("abc", min_size=1, max_size=3) | st.text("é😀 \n", min_size=1)
STOPS = st.lists(STOP, max_size=4)


@given(text=FEW, stops=STOPS, places=PLACES, include=st.booleans())
@example("aaab", ["aab"], [1, 2, 3], False)
@example("ababac", ["abac", "babc"], [], False)
@example("abcdef", ["abcdef", "bcd"], [1, 2, 3, 4, 5], False)
@example("xabcd", ["bcd", "abcd", "cd"], [2, 3], True)
@example("abc", ["ab", "abc"], [1, 2], False)
def test_the_text_ends_where_a_search_of_the_whole_text_ends_it(text, stops, places, include):
    found, stopped = stream(cut(text, places), stops, include)
    assert ("".join(found), stopped) == naive(text, stops, include)


@given(text=FEW, stops=STOPS, places=PLACES)
def test_exactly_what_could_become_a_stop_string_is_held_back(text, stops, places):
    matcher, shown, seen = tokenizer.StopMatcher(stops), "", ""
    for part in cut(text, places):
        shown, seen = shown + matcher.push(part), seen + part
        if matcher.stopped is not None:
            break
        held = seen[len(shown) :]
        beginnings = [seen[i:] for i in range(len(seen)) if any(stop.startswith(seen[i:]) for stop in stops)]
        assert held == max(beginnings, key=len, default="")


@given(text=FEW, stops=STOPS, places=PLACES, include=st.booleans())
def test_the_pieces_do_not_depend_on_the_order_of_the_stop_strings(text, stops, places, include):
    parts = cut(text, places)
    assert stream(parts, stops, include) == stream(parts, [*reversed(stops), *stops], include)


@pytest.mark.parametrize("length", range(1, 11))
def test_nothing_of_the_alphabets_stop_string_reaches_the_client(length):  # field case 20
    text = "DEFGHIJKLMNOP"
    parts = [text[i : i + length] for i in range(0, len(text), length)]
    assert "".join(stream(parts, ["DEFGHIJ"])[0]) == ""
    assert "".join(stream(parts, ["DEFGHIJ"], include=True)[0]) == "DEFGHIJ"


def test_a_matcher_that_falls_back_does_not_restart_from_zero():
    assert stream(["xa", "a", "a", "b!"], ["aab"]) == (["x", "", "a", "", ""], "aab")
    assert stream(list("aabaabaaf"), ["aabaaf"]) == (["", "", "", "", "", "aab", "", "", "", ""], "aabaaf")


def test_nothing_comes_out_after_the_stop():
    matcher = tokenizer.StopMatcher(["\n\n"])
    assert matcher.push("one\n\ntwo\n\nthree") == "one"
    assert [matcher.push("four"), matcher.push("\n\n"), matcher.flush()] == ["", "", ""]
    assert matcher.stopped == "\n\n"


def test_what_was_held_back_comes_at_the_end_and_the_next_text_begins_anew():
    matcher = tokenizer.StopMatcher(["abc"])
    assert [matcher.push("xab"), matcher.flush(), matcher.flush()] == ["x", "ab", ""]
    assert [matcher.push("c"), matcher.stopped] == ["c", None]


def test_without_stop_strings_everything_comes_at_once():
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], None)


def test_characters_are_compared_as_they_are():
    assert stream(["cafe\u0301"], ["caf\u00e9"]) == (["cafe\u0301", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1], [None], None, 5, [b"a"], b"ab"])
def test_stop_strings_that_are_none_are_refused(stops):
    with pytest.raises(RequestError, match="stop string"):
        tokenizer.StopMatcher(stops)


class Counted(str):
    compared = 0

    def __getitem__(self, index):
        Counted.compared += 1
        return str.__getitem__(self, index)


def test_work_grows_with_the_text_and_not_with_the_length_of_the_stop_strings():
    def work(characters: int, length: int) -> int:
        matcher = tokenizer.StopMatcher([Counted("a" * length + "b"), Counted("a" * length + "c")])
        Counted.compared = 0
        text = ("a" * length + "x") * (characters // length + 1)
        for i in range(0, characters, 3):
            matcher.push(text[i : i + 3])
        return Counted.compared

    short = work(20_000, 10)
    assert work(40_000, 10) <= 2.1 * short
    assert work(20_000, 5_000) <= 1.5 * short
    assert short <= 2 * 3 * 20_000


def test_the_fallback_table_is_the_longest_shorter_beginning_that_ends_there():
    for stop in ("aab", "a", "abab", "aabaaf", "aaaa", "abcabcabd"):
        naive_table = [
            max(k for k in range(n + 1) if stop[:k] == stop[n + 1 - k : n + 1]) for n in range(len(stop))
        ]  # fmt: skip
        assert tokenizer.fallbacks(stop) == naive_table


# ---- both, as the engine joins them ------------------------------------------------------------------------------


@given(text=FEW, stops=STOPS, places=PLACES)
def test_tokens_through_both_end_where_the_whole_text_ends(text, stops, places):
    tokens = cut(text.encode(), places)
    decoder, matcher = tokenizer.IncrementalDecoder(Bytes(tokens)), tokenizer.StopMatcher(stops)
    shown = "".join(matcher.push(decoder.push(index)) for index in range(len(tokens)))
    shown += matcher.push(decoder.flush()) + matcher.flush()
    assert (shown, matcher.stopped) == naive(text, stops)
