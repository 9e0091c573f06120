"""The checks of chapter 2's second half: text while it comes, and where it stops.

The oracles look at the whole text that has come so far, anew for each piece: slow, and with nothing to remember.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llmfromscratch.course.comparing import Case, compare, expect_equal, expect_raises
from llmfromscratch.errors import RequestError, TokenizerError

# ---- 2.7 text as it becomes certain ------------------------------------------------------------------------------


class ToyTokenizer:
    """As much of a tokenizer as streaming needs: a token's id is its place in `tokens`; `control` lists control ids."""

    def __init__(self, tokens: Sequence[bytes], control: Sequence[int] = (), strip_first_space: bool = False):
        self.tokens, self.strip_first_space = list(tokens), strip_first_space
        self.special = {self.tokens[index].decode("ascii"): index for index in control}

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token; TokenizerError for an id that is none."""
        if not 0 <= index < len(self.tokens):
            raise TokenizerError(f"token id {index} is outside the vocabulary (0 to {len(self.tokens) - 1}).")
        return self.tokens[index]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """All at once, as Tokenizer.decode does it."""
        hidden = set(self.special.values()) if skip_special else set()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strip_first_space else text


def _streams() -> list[Case]:
    """(prompt tokens, answer tokens, settings); an answer's pieces are those of each push and the one of flush."""
    end, thumb = b"<end>", "👍🏽".encode()
    return [
        Case("the token b'a'", [], [b"a"]),
        Case("no tokens at all", [], []),
        Case("é in two tokens", [], [b"n", b"\xc3", b"\xa9!"]),
        Case("an emoji in one token", [], [thumb[:4]]),
        Case("an emoji cut into its four bytes", [], [thumb[i : i + 1] for i in range(4)]),
        Case("two code points, cut in the middle of each", [], [thumb[:2], thumb[2:6], thumb[6:]]),
        Case("a character that is never finished", [], [b"a", b"\xe2\x82"]),
        Case("U+FFFD, written by the model itself", [], [b"\xef\xbf\xbd", b"a"]),
        Case("a byte that no character begins with", [], [b"\xff", b"a"]),
        Case("a character that breaks off, and a letter", [], [b"\xe2\x82", b"a"]),
        Case("bytes that look like a beginning and are none", [], [b"\xe0", b"\x80", b"b"]),
        Case("a space at the beginning of a token", [], [b"a", b" b"]),
        Case("a space at the beginning of the text", [], [b" a", b" b"]),
        Case("a control token after the prompt b'hi'", [b"hi"], [b"a", end, b"b"], control=[end]),
        Case("a control token inside a character", [], [b"\xc3", end, b"\xa9"], control=[end]),
        Case("a control token with skip_special=False", [], [b"a", end], control=[end], skip_special=False),
        Case("a prompt that ends inside a character", [b"caf", b"\xc3"], [b"\xa9", b"s"]),
        Case("a character before and one after a cut prompt", [b"a\xc3"], [b"\xa9\xe2", b"\x82", b"\xac"]),
        Case("a tokenizer with strip_first_space", [], [b" a", b" b"], strip_first_space=True),
        Case("strip_first_space, the space a token alone", [], [b" ", b" b"], strip_first_space=True),
        Case("strip_first_space, a control token first", [], [end, b" a"], control=[end], strip_first_space=True),
        Case("strip_first_space, after a prompt", [b" a"], [b" b"], strip_first_space=True),
        Case("strip_first_space, no space at the beginning", [], [b"a", b" b"], strip_first_space=True),
        Case("strip_first_space, two spaces at the beginning", [], [b"  x"], strip_first_space=True),
        Case("strip_first_space, an empty token first", [], [b"", b" y"], strip_first_space=True),
    ]


def check_incremental_decoder(decoder_class: type) -> None:
    """On tokens that are cut inside characters, against bytes.decode on all that has come."""
    compare(
        partial(_stream, decoder_class),
        _streamed(),
        _streams(),
        expected="with each token the characters that it completes, and at the end what is left; joined, the decoding "
        "of all tokens together",
        mistakes=[
            ("each token is decoded on its own; a character may lie across two", _streamed(alone="replace")),
            ("bytes that are no character by themselves are dropped; they may be half of one",
             _streamed(alone="ignore")),
            ("broken bytes vanish; U+FFFD stands for them", _streamed(errors="ignore")),
            ("everything waits for ever once the bytes are no valid UTF-8; what is broken stays broken, whatever "
             "follows", _streamed(patient=True)),
            ("text that ends in U+FFFD is held back; the model may have written that character",
             _streamed(suspicious=True)),
            ("nothing comes out until the end", _streamed(late=True)),
            ("what is left of a half character at the end is lost; flush gives U+FFFD for it", _streamed(no_rest=True)),
            ("the text of the prompt comes out too", _streamed(prompt_out=True)),
            ("the answer loses its first space; the text began with the prompt", _streamed(strip="answer")),
            ("the prompt is forgotten; a character that it leaves half done comes out with the token that completes it",
             _streamed(no_prompt=True)),
            ("control tokens give their spelling though skip_special is True", _streamed(spell=True)),
            ("control tokens are silent though skip_special is False", _streamed(silent=True)),
            ("the first space that comes is removed, though text stood before it", _streamed(strip="found")),
            ("all spaces at the beginning go; only one should", _streamed(strip="all")),
            ("every token loses its first space; only the very beginning of the text does", _streamed(strip="every")),
            ("the first space stays; strip_first_space says that it goes", _streamed(strip="never")),
            ("a space goes though the tokenizer has no strip_first_space", _streamed(strip="always")),
        ],
        what="the texts of push, push, ..., flush",
    )  # fmt: skip
    _check_decoders_apart(decoder_class)
    outside = decoder_class(ToyTokenizer([b"a"]))
    expect_raises(partial(outside.push, 7), TokenizerError, case="token id 7 of a tokenizer with one token")


def _stream(
    decoder_class: type, prompt: list[bytes], answer: list[bytes], control: Sequence[bytes] = (), **settings: bool
) -> list[str]:
    tokens = [*prompt, *answer]
    strip = settings.pop("strip_first_space", False)
    tokenizer = ToyTokenizer(tokens, [tokens.index(token) for token in control], strip)
    decoder = decoder_class(tokenizer, list(range(len(prompt))), **settings)
    return [*(decoder.push(index) for index in range(len(prompt), len(tokens))), decoder.flush()]


def _check_decoders_apart(decoder_class: type) -> None:
    tokenizer = ToyTokenizer([b"\xc3", b"\xa9", b"a"])
    one, other = decoder_class(tokenizer), decoder_class(tokenizer)
    got = [one.push(0), other.push(2), one.push(1), other.flush(), one.flush()]
    expect_equal(
        got,
        ["", "a", "é", "", ""],
        expected="decoders that know nothing of each other: an engine has one for every request",
        case="two decoders in turn; the first gets b'\\xc3' and b'\\xa9', the second b'a' between them",
        mistakes=[("the bytes that wait belong to the class, not to each decoder", ["", "\ufffda", "\ufffd", "", ""])],
        what="the texts that came out",
    )


def _certain(data: bytes, errors: str = "replace") -> str:
    """The characters that no further bytes can change: all but an unfinished one at the end."""
    for length in range(min(3, len(data)), 0, -1):
        try:
            data[len(data) - length :].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[: len(data) - length].decode("utf-8", errors)
    return data.decode("utf-8", errors)


def _patient(data: bytes) -> str:
    for end in range(len(data), -1, -1):
        try:
            return data[:end].decode("utf-8")
        except UnicodeDecodeError:
            continue
    return ""


def _streamed(**wrong: Any) -> Callable[..., list[str]]:
    """Pieces as the growth of what is certain; `wrong` switches one mistake on."""

    def stream(
        prompt: list[bytes],
        answer: list[bytes],
        control: Sequence[bytes] = (),
        skip_special: bool = True,
        strip_first_space: bool = False,
    ) -> list[str]:
        silent = control if (skip_special and not wrong.get("spell")) or wrong.get("silent") else ()
        before, after = ([b"" if token in silent else token for token in tokens] for tokens in (prompt, answer))
        if wrong.get("no_prompt"):
            before = []
        strip = wrong.get("strip", "always" if strip_first_space else "never")
        if strip == "every" and strip_first_space:
            before, after = ([token.removeprefix(b" ") for token in tokens] for tokens in (before, after))
        if strip in ("found", "all") and strip_first_space:
            tokens = _stripped_wrongly([*before, *after], strip)
            before, after = tokens[: len(before)], tokens[len(before) :]
        if wrong.get("alone"):
            tokens = _stripped(after, not before and strip == "always")
            return [*(token.decode("utf-8", wrong["alone"]) for token in tokens), ""]
        if strip == "always" or (strip == "answer" and strip_first_space):
            tokens = _stripped([*before, *after], True) if strip == "always" else [*before, *_stripped(after, True)]
            before, after = tokens[: len(before)], tokens[len(before) :]
        return _growth(b"".join(before), after, wrong)

    return stream


def _stripped(tokens: list[bytes], strip: bool) -> list[bytes]:
    first = next((place for place, token in enumerate(tokens) if token), None)
    return [token.removeprefix(b" ") if strip and place == first else token for place, token in enumerate(tokens)]


def _stripped_wrongly(tokens: list[bytes], how: str) -> list[bytes]:
    found = (place for place, token in enumerate(tokens) if (token.startswith(b" ") if how == "found" else token))
    first = next(found, None)
    kept = [token.removeprefix(b" ") if how == "found" else token.lstrip(b" ") for token in tokens]
    return [kept[place] if place == first else token for place, token in enumerate(tokens)]


def _growth(prompt: bytes, answer: list[bytes], wrong: dict[str, Any]) -> list[str]:
    errors, before = wrong.get("errors", "replace"), _certain(prompt)

    def certain(data: bytes) -> str:
        if wrong.get("late"):
            return before
        if wrong.get("suspicious"):
            return data.decode("utf-8", "replace").rstrip("\ufffd")
        return _patient(data) if wrong.get("patient") else _certain(data, errors)

    data, given, pieces = prompt, "" if wrong.get("prompt_out") else before, []
    for token in answer:
        data += token
        pieces.append(certain(data)[len(given) :])
        given += pieces[-1]
    rest = "" if wrong.get("no_rest") else data.decode("utf-8", errors)[len(given) :]
    return [*pieces, rest]


# ---- 2.8 stop at a word ------------------------------------------------------------------------------------------


def _stopping() -> list[Case]:
    """(stop strings, pieces of text, include)."""
    cases: list[tuple[list[str], list[str], bool]] = [
        ([], ["ab"], False),
        (["x"], ["ab"], False),
        (["x"], ["axb"], False),
        (["x"], ["axb"], True),
        (["x"], ["a", "x", "b"], False),
        (["ab"], ["xa", "by"], False),
        (["ab"], ["xa", "by"], True),
        (["ab"], ["xa", "c"], False),
        (["ab"], ["xa"], False),
        (["aab"], ["aaab!"], False),
        (["aab"], ["xa", "a", "a", "b!"], False),
        (["aab"], ["xa", "a", "a", "b!"], True),
        (["abab!"], list("ababab!x"), False),
        (["END", "STOP"], ["a ST", "OR EN", "DED"], False),
        (["y", "x"], ["a x y"], False),
        (["b", "ab"], ["xa", "bc"], False),
        (["ab", "b"], ["xa", "bc"], True),
        (["abcd", "bc"], ["xa", "bc", "d"], False),
        (["bc", "abcd"], ["xabcd"], False),
        (["DEFGHIJ"], [" D", "E", "FGHI", "J", "KL"], False),
        (["\n\nUser:"], ["Hi.\n", "\nUse", "ful.\n\n", "\nUser: x"], False),
        (["👍🏽"], ["a👍", "b👍", "🏽c"], False),
    ]
    return [
        Case(f"stops {stops}, pieces {pieces}{', include=True' if include else ''}", stops, pieces, include)
        for stops, pieces, include in cases
    ]


def check_stop_matcher(matcher_class: type) -> None:
    """Against a search of the whole text after every character that has come."""
    compare(
        partial(_stop, matcher_class),
        _stops(),
        _stopping(),
        expected="with each piece the text that can be no part of a stop string any more, nothing after the first stop "
        "string that is complete, and at the end what was held back",
        mistakes=[
            ("after a character that does not fit, the search begins from zero; the text may still end with a shorter "
             "beginning of the stop string", _stops(from_zero=True)),
            ("each piece is searched on its own; a stop string may lie across several", _stops(alone=True)),
            ("each piece is searched on its own; what was held back of the last one belongs to the search",
             _stops(alone=True, holds=True)),
            ("the beginning of a stop string comes out before it is complete", _stops(hasty=True)),
            ("more is held back than can become part of a stop string", _stops(timid=True)),
            ("of several stop strings that end at one character the longest counts", _stops(choose="shortest")),
            ("of several stop strings the one listed first is taken, though another is complete earlier",
             _stops(choose="listed")),
            ("the stop string that begins first is taken, though another is complete before it",
             _stops(choose="begins")),
            ("include=True keeps the stop string as the end of the text", _stops(include=False)),
            ("the stop string comes out though include is False", _stops(include=True)),
            ("text still comes out after the stop", _stops(talkative=True)),
            ("what was held back is lost at the end; flush gives it", _stops(no_rest=True)),
            ("`stopped` stays None; it names the stop string that was met", _stops(nameless=True)),
            ("the stop strings are never met", _stops(deaf=True)),
        ],
    )  # fmt: skip
    for text, stops in (("an empty stop string", ["a", ""]), ("a text where a list of texts belongs", "ab")):
        expect_raises(partial(matcher_class, stops), RequestError, case=text)


def _stop(matcher_class: type, stops: list[str], pieces: list[str], include: bool) -> dict[str, Any]:
    matcher = matcher_class(stops, include=include)
    pushed = [matcher.push(piece) for piece in pieces]
    return {"push": pushed, "flush": matcher.flush(), "stopped": matcher.stopped}


def _found(text: str, stops: Sequence[str], choose: str) -> tuple[int, str] | None:
    """The end of the first stop string in a text, and which it is; `choose` orders them in a mistaken way."""
    places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    orders: dict[str, Callable[[tuple[int, str]], tuple[int, ...]]] = {
        "longest": lambda place: (place[0], -len(place[1])),
        "shortest": lambda place: (place[0], len(place[1])),
        "listed": lambda place: (list(stops).index(place[1]),),
        "begins": lambda place: (place[0] - len(place[1]),),
    }
    return min(places, key=orders[choose], default=None)


def _from_zero(text: str, stop: str) -> tuple[int, int]:
    """Where a search that starts again after each failure finds `stop` (or -1), and how much it has matched."""
    met = 0
    for place, character in enumerate(text):
        met = met + 1 if character == stop[met] else int(character == stop[0])
        if met == len(stop):
            return place + 1, 0
    return -1, met


def _held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    ends = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(ends, default=0)


def _stops(choose: str = "longest", include: bool | None = None, **wrong: bool) -> Callable[..., dict[str, Any]]:
    """Searches all the text so far after each piece; `wrong` switches one mistake on."""

    def search(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
        if wrong.get("deaf"):
            return None
        if wrong.get("from_zero"):
            ends = [(_from_zero(text, stop)[0], stop) for stop in stops]
            return min(((end, stop) for end, stop in ends if end >= 0), default=None)
        return _found(text, stops, choose)

    def held(text: str, stops: Sequence[str]) -> int:
        if wrong.get("hasty") or wrong.get("deaf") or (wrong.get("alone") and not wrong.get("holds")):
            return 0
        if wrong.get("timid"):
            return min(len(text), max((len(stop) - 1 for stop in stops), default=0))
        if wrong.get("from_zero"):
            return max((_from_zero(text, stop)[1] for stop in stops), default=0)
        return _held(text, stops)

    def run(stops: list[str], pieces: list[str], keep: bool) -> dict[str, Any]:
        text, given, pushed, stopped = "", 0, [], None
        keep = keep if include is None else include
        for piece in pieces:
            if stopped is not None:
                pushed.append(piece if wrong.get("talkative") else "")
                continue
            begin = len(text) if wrong.get("alone") else 0
            text += piece
            found = search(text[begin:], stops)
            until = len(text) - held(text[begin:], stops)
            if found is not None:
                stopped = found[1]
                until = begin + found[0] - (0 if keep else len(stopped))
                until = len(text) if wrong.get("talkative") else until
            pushed.append(text[given:until])
            given = max(given, until)
        rest = "" if stopped is not None or wrong.get("no_rest") else text[given:]
        return {"push": pushed, "flush": rest, "stopped": None if wrong.get("nameless") else stopped}

    return run
