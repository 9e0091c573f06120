"""The check of exercise 2.7, text while it comes.

Its oracle looks at all the bytes that have come so far, anew for each token: slow, and with nothing to remember.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, compare, expect_equal, expect_raises
from llmfromscratch.errors import TokenizerError


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


_MISTAKES: list[tuple[str, Settings]] = [
    ("each token is decoded on its own; a character may lie across two", {"alone": "replace"}),
    ("bytes that are no character by themselves are dropped; they may be half of one", {"alone": "ignore"}),
    ("broken bytes vanish, as with errors=\"ignore\"; U+FFFD stands for them", {"errors": "ignore"}),
    ("everything waits for ever once the bytes are no valid UTF-8; what is broken stays broken, whatever follows",
     {"hold": "patient"}),
    ("the bytes that wait are decoded all together or not at all; a complete character need not wait for the next one, "
     "and broken bytes would wait for ever", {"hold": "whole"}),
    ("text that ends in U+FFFD is held back; the model may have written that character", {"hold": "suspicious"}),
    ("nothing comes out until the end", {"hold": "late"}),
    ("each push gives all of the text so far; only what is new in it should come", {"all_anew": True}),
    ("what is left of a half character at the end is lost; flush gives U+FFFD for it", {"no_rest": True}),
    ("the text of the prompt comes out too", {"prompt_out": True}),
    ("the answer loses its first space; the text began with the prompt", {"strip": "answer"}),
    ("the prompt is forgotten; a character that it leaves half done comes out with the token that completes it",
     {"no_prompt": "before the space"}),
    ("the prompt is forgotten; a character that it leaves half done comes out with the token that completes it",
     {"no_prompt": "after the space"}),
    ("control tokens give their spelling though skip_special is True. (`special` maps texts to ids: an id is one of "
     "its values, never one of its keys)", {"spell": True}),
    ("control tokens are silent though skip_special is False", {"silent": True}),
    ("the first space that comes is removed, though text stood before it", {"strip": "found"}),
    ("all spaces at the beginning go; only one should", {"strip": "all"}),
    ("every token loses its first space; only the very beginning of the text does", {"strip": "every"}),
    ("the first space stays; strip_first_space says that it goes", {"strip": "never"}),
    ("a token without text counts as the beginning of the text; the first space goes from the first bytes that come",
     {"strip": "first token"}),
    ("a space goes though the tokenizer has no strip_first_space", {"strip": "always"}),
]  # fmt: skip


def _diagnosed(got: list[Any], want: list[str]) -> str:
    if None not in got:
        return ""
    return f"{'push' if None in got[:-1] else 'flush'} gives None: is a `return` missing?"


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
        mistakes=combined(_streamed, _MISTAKES, at_once=4),
        diagnose=_diagnosed,
        what="the texts of push, push, ..., flush",
    )
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
        if wrong.get("no_prompt") == "before the space":
            before = []
        strip = wrong.get("strip", "always" if strip_first_space else "never")
        if strip == "every" and strip_first_space:
            before, after = ([token.removeprefix(b" ") for token in tokens] for tokens in (before, after))
        if strip in ("found", "all", "first token") and strip_first_space:
            tokens = _stripped_wrongly([*before, *after], strip)
            before, after = tokens[: len(before)], tokens[len(before) :]
        if wrong.get("alone"):
            tokens = _stripped(after, not before and strip == "always")
            return [*(token.decode("utf-8", wrong["alone"]) for token in tokens), ""]
        if strip == "always" or (strip == "answer" and strip_first_space):
            tokens = _stripped([*before, *after], True) if strip == "always" else [*before, *_stripped(after, True)]
            before, after = tokens[: len(before)], tokens[len(before) :]
        return _growth(before, after, wrong)

    return stream


def _stripped(tokens: list[bytes], strip: bool) -> list[bytes]:
    first = next((place for place, token in enumerate(tokens) if token), None)
    return [token.removeprefix(b" ") if strip and place == first else token for place, token in enumerate(tokens)]


def _stripped_wrongly(tokens: list[bytes], how: str) -> list[bytes]:
    counts: dict[str, Callable[[bytes], bool]] = {"found": lambda token: token.startswith(b" "), "all": bool}
    first = next((place for place, token in enumerate(tokens) if counts.get(how, lambda _: True)(token)), None)
    kept = [token.lstrip(b" ") if how == "all" else token.removeprefix(b" ") for token in tokens]
    return [kept[place] if place == first else token for place, token in enumerate(tokens)]


def _growth(prompt: list[bytes], answer: list[bytes], wrong: dict[str, Any]) -> list[str]:
    prompt = [] if wrong.get("no_prompt") else prompt
    errors, data, given = wrong.get("errors", "replace"), b"", ""
    pieces: list[str] = []
    for number, token in enumerate([*prompt, *answer]):
        if number == len(prompt) and wrong.get("prompt_out"):
            given = ""
        data += token
        late = wrong.get("hold") == "late" and number < len(prompt)
        so_far = _certain(data, errors) if late or "hold" not in wrong else _held_wrongly(data, given, wrong["hold"])
        pieces.append(so_far if wrong.get("all_anew") else so_far[len(given) :])
        given += so_far[len(given) :]
    rest = "" if wrong.get("no_rest") else data.decode("utf-8", errors)[len(given) :]
    return [*pieces[len(prompt) :], rest]


def _held_wrongly(data: bytes, given: str, how: str) -> str:
    """All text that is out after these bytes, where the mistake is in what waits; given: what was out before."""
    if how == "late":
        return given
    if how == "suspicious":
        return data.decode("utf-8", "replace").rstrip("\ufffd")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return _patient(data) if how == "patient" else given
