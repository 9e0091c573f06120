"""The check of chapter 5's allowed tokens, against all texts that an automaton can be walked along."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.sketches import ch05

Arrows = Sequence[Mapping[int, int]]

_DIGITS = dict.fromkeys(b"0123456789", 1)
_TWO_DIGITS: Arrows = [_DIGITS, dict.fromkeys(_DIGITS, 2), {}]
_THREE_DIGITS: Arrows = [*_TWO_DIGITS[:2], dict.fromkeys(_DIGITS, 3), {}]
_AROUND: Arrows = [{ord("a"): 1}, {ord("b"): 0, ord("c"): 2}, {ord("d"): 2}]  # (ab)*acd*
_ACCENT: Arrows = [{0xC3: 1, 0xE2: 3}, {0xA9: 2}, {}, {0x82: 4}, {0xAC: 2}]  # é or €, in UTF-8
_NUMBERS = [b"7", b"42", b"", b"123", b"4a", b"a4", b"a"]
_LETTERS = [
    b"ab",
    b"a",
    b"b",
    b"",
    b"aba",
    b"abab",
    b"ac",
    b"acd",
    b"bb",
    b"cd",
    b"c",
    b"ba",
    b"bac",
    b"xa",
    b"ax",
    b"aa",
]
_PIECES = [b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe2\x82", b"\x82\xac", b"\xe2\xac", b"\xc3\xac", "é€".encode(), b"e", b""]


def check_allowed_tokens(allowed_tokens: Callable[..., Tensor]) -> None:
    """Automata made by hand and compiled ones, each from several of its states."""
    compare(
        partial(_given_automaton, allowed_tokens),
        along_all_texts,
        _cases(),
        expected="bool [vocab]: True for the tokens that have bytes and whose bytes, one after the other from `state` "
        "on, all have an arrow",
        mistakes=combined(_walked, _MISTAKES, at_once=2),
        diagnose=_of_tokens,
        explain=_about_walks,
        what="what is allowed",
    )


def _given_automaton(
    allowed_tokens: Callable[..., Any],
    arrows: Arrows,
    accepting: Sequence[int],
    state: int,
    vocabulary: Sequence[bytes],
) -> Any:
    return allowed_tokens(ch05.Automaton(arrows, set(accepting)), state, vocabulary)  # type: ignore[arg-type]


def _cases() -> list[Case]:
    phone, chosen = ch05.compile_expression("[0-9]{3}-[0-9]{4}"), random.Random(5)
    pieces = [bytes(chosen.choices(b"0159-", k=chosen.randint(0, 5))) for _ in range(150)]
    cases = [
        ('"[0-9]{2}", at its beginning', _TWO_DIGITS, [2], 0, [b"7", b"a"]),
        ('"[0-9]{2}", at its beginning', _TWO_DIGITS, [2], 0, _NUMBERS),
        ('"[0-9]{2}" after b"4"', _TWO_DIGITS, [2], 1, _NUMBERS),
        ('"[0-9]{2}" after b"42": the text is complete', _TWO_DIGITS, [2], 2, _NUMBERS),
        ('"[0-9]{1,3}" after b"4", where the text may end', _THREE_DIGITS, [1, 2, 3], 1, _NUMBERS),
        ('"(ab)*acd*", where an arrow leads back to state 0', _AROUND, [2], 0, _LETTERS),
        ('"(ab)*acd*" after b"a"', _AROUND, [2], 1, _LETTERS),
        ('"(ab)*acd*" after b"ac"', _AROUND, [2], 2, _LETTERS),
        ("é or €, whose bytes may come in several tokens", _ACCENT, [2], 0, _PIECES),
        ("é or €, after the first byte of é", _ACCENT, [2], 1, _PIECES),
    ]
    for begin in (b"", b"55", b"555", b"555-019"):
        state = phone.next_state(0, begin) or 0
        cases.append((f"a phone number after {begin!r}", phone.arrows, sorted(phone.accepting), state, pieces))
    return [
        Case(f"{text}, state {state}, {_told(words)}", list(map(dict, arrows)), accepting, state, words)
        for text, arrows, accepting, state, words in cases
    ]  # fmt: skip


def _told(vocabulary: Sequence[bytes]) -> str:
    return f"tokens {', '.join(map(repr, vocabulary))}" if len(vocabulary) < 20 else f"{len(vocabulary)} tokens"


def along_all_texts(arrows: Arrows, accepting: Sequence[int], state: int, vocabulary: Sequence[bytes]) -> Tensor:
    """Writes down every text of at most so many bytes that leads somewhere, and looks the tokens up among them."""
    longest, texts, ends = max(map(len, vocabulary)), set[bytes](), {b"": state}
    for _ in range(longest):
        ends = {text + bytes([byte]): end for text, at in ends.items() for byte, end in arrows[at].items()}
        texts |= set(ends)
    return torch.tensor([text in texts for text in vocabulary])


def _of_tokens(got: Any, want: Tensor) -> str:
    """What is wrong with the table, where no mistake by name explains it."""
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != torch.bool:
        return ""
    if not got.any():
        return "no token at all is allowed"
    refused, let_in = bool((want & ~got).any()), bool((got & ~want).any())
    said = ["tokens are refused that may come next"] * refused + ["tokens are allowed that may not come next"] * let_in
    return " and ".join(said)


def _about_walks(error: BaseException, case: Case) -> str:
    if isinstance(error, UnicodeError):
        return "a token's bytes need not be a text: it may hold a part of a character. Walk along the bytes themselves"
    if isinstance(error, KeyError):
        return "a byte without an arrow is looked up: arrows[state][byte] raises KeyError there, .get(byte) gives None"
    if isinstance(error, TypeError) and "NoneType" in str(error):
        return (
            "a walk that has led nowhere (None) is continued: there are no arrows from None. If it is that "
            f"of the token before: {_OWN_VARIABLE}"
        )
    if isinstance(error, UnboundLocalError | IndexError):
        return "a token may have no bytes at all"
    return ""


# ---- mistakes ----------------------------------------------------------------------------------------------------

_OWN_VARIABLE = "all of them begin at `state`, so walk with a variable of your own"
_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("only the first byte is looked at; all bytes of a token have to lead on", {"part": lambda text: text[:1]}),
    ("only the last byte is looked at; all bytes of a token have to lead on", {"part": lambda text: text[-1:]}),
    ("the last byte is not looked at", {"part": lambda text: text[:-1]}),
    ("the token has to end in an accepting state here; it need not, since more may follow: the beginnings of a text "
     "must stay allowed", {"end": lambda at, accepting: at in accepting}),
    ("a token may not end in an accepting state here; it may",
     {"end": lambda at, accepting: at is not None and at not in accepting}),
    ("tokens without bytes are allowed: an answer could be made of them without end", {"empty": True}),
    ("a walk that breaks off still counts: a token whose last bytes lead nowhere is not allowed", {"broken": True}),
    *((f"each token's walk begins where the last one's ended: {_OWN_VARIABLE}",
       {"carried": how}) for how in ("ended", "broken off", "nowhere")),
    ("every walk begins in state 0; it begins at `state`", {"begin": lambda state: 0}),
    ("state 0 counts as nowhere: 0 is false, so ask for `is None`", {"zero": "nowhere"}),
    ("state 0 counts as nowhere: 0 is false, so ask for `is None`", {"zero": "nowhere at all"}),
    ("a token that ends in state 0 is not allowed: 0 is false, so ask for `is not None`", {"ends_in_0": False}),
    ("each byte is looked up at `state` itself; the second stands where the first one leads", {"stays": True}),
    ("a byte that has an arrow somewhere counts, whatever the state", {"anywhere": True}),
    ("nothing is allowed where the text may end; it may also go on", {"complete": "closed"}),
    ("everything is allowed where the text may end", {"complete": "open"}),
    ("True and False are exchanged: True means that a token may come next", {"gives": lambda found: ~found}),
    ("these are the ids of the allowed tokens; asked for is True or False for each",
     {"gives": lambda found: found.nonzero().flatten()}),
    ("these are the ids of the allowed tokens; asked for is True or False for each",
     {"gives": lambda found: found.nonzero().flatten().tolist()}),
    ("a list; asked for is a tensor", {"gives": lambda found: found.tolist()}),
    ("these are 0 and -inf, to be added to logits; asked for are True and False",
     {"gives": lambda found: torch.zeros(len(found)).masked_fill(~found, -torch.inf)}),
]  # fmt: skip


def _walked(
    part: Callable[[bytes], bytes] = lambda text: text,
    end: Callable[[int | None, Sequence[int]], bool] = lambda at, accepting: at is not None,
    begin: Callable[[int], int] = lambda state: state,
    gives: Callable[[Tensor], Any] = lambda found: found,
    **wrong: Any,
) -> Callable[..., Any]:
    """The walk, with mistakes switched on."""

    def run(arrows: Arrows, accepting: Sequence[int], state: int, vocabulary: Sequence[bytes]) -> Any:
        first: int | None = begin(state)
        found = []
        for text in vocabulary:
            at = None if first is None else _end_of_walk(arrows, first, part(text), wrong)
            ok = end(at, accepting) and not (at == 0 and text and not wrong.get("ends_in_0", True))
            if wrong.get("anywhere"):
                ok = all(any(byte in one for one in arrows) for byte in text)
            if wrong.get("complete") and state in accepting:
                ok = wrong["complete"] == "open"
            found.append(ok and (len(text) > 0 or bool(wrong.get("empty"))))
            if at is not None or wrong.get("carried") == "nowhere":
                first = at if wrong.get("carried") else first
            elif first is not None and wrong.get("carried") == "broken off":
                first = _end_of_walk(arrows, first, part(text), {"broken": True})
        return gives(torch.tensor(found, dtype=torch.bool))

    return run


def _end_of_walk(arrows: Arrows, first: int, text: bytes, wrong: Mapping[str, Any]) -> int | None:
    at: int | None = first
    blind = wrong.get("zero") == "nowhere"
    for number, byte in enumerate(text):
        lost = at is None or (at == 0 and (wrong.get("zero") == "nowhere at all" or (blind and number > 0)))
        following = None if lost else arrows[first if wrong.get("stays") else at or 0].get(byte)
        if following is None and wrong.get("broken"):
            return at
        at = following
    return at
