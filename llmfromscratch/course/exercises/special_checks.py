"""The check of exercise 2.4, control tokens. Its oracle tries every token at every character."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import regex

from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, compare

Parts = list[str | int]
_PLAIN, _NESTED = {"<a>": 1, "<b>": 0}, {"<a>": 1, "<a><a>": 2}
_OVERLAP = {"bc": 7, "ab": 8, "abc|": 9, "|": 5}


def _texts() -> list[Case]:
    """(text, control tokens)."""
    cases: list[tuple[str, Mapping[str, int]]] = [
        ("hi", _PLAIN),
        ("<a>", _PLAIN),
        ("x<a>y", _PLAIN),
        ("<b>x", _PLAIN),
        (" x <a><a>", _PLAIN),
        ("x<a><a>y<a>", _NESTED),
        ("abc", {"ab": 1, "a": 2, "abc": 3}),
        ("abc", {"ab": 1, "abc": 3, "a": 2}),
        ("axb a.b", {"a.b": 3}),
        ("abc", _OVERLAP),
        ("aabc|b", _OVERLAP),
        ("<b>\n<a>", _PLAIN),
        ("", _PLAIN),
        ("hi", {}),
        ("", {}),
    ]
    return [Case(f"{text!r} with {dict(special)}", text, dict(special)) for text, special in cases]


def check_split_special(split_special: Callable[[str, Mapping[str, int]], Parts]) -> None:
    """Against a scan that tries every token at every character."""
    compare(
        split_special,
        _parted(),
        _texts(),
        expected="ids where tokens stand, from left to right and the longest first, and the text between them",
        mistakes=combined(_parted, _MISTAKES),
        explain=_no_token,
    )


def _no_token(error: BaseException, case: Case) -> str:
    """What it means where something was looked up as a token that an expression has found and that is none."""
    special, key = case.args[1], error.args[0] if isinstance(error, KeyError) and error.args else None
    if key == "" and not special:
        return (
            "'' is looked up as a token: an expression without alternatives matches everywhere, and nothing may match"
        )
    meant = [token for token in special if isinstance(key, str) and regex.fullmatch(token, key)]
    if key in special or not meant:
        return ""
    return f"{key!r} is no token: tokens are plain text, but in an expression {meant[0]!r} also matches that; escape it"


def _parted(choose: str = "longest", find: str = "scan", **wrong: bool) -> Callable[[str, Mapping[str, int]], Parts]:
    """Cuts at the places of the tokens; what is not left at its default makes a mistake."""

    def part(text: str, special: Mapping[str, int]) -> Parts:
        if find == "unguarded" and not special:
            return list(text)
        parts: Parts = []
        end = 0
        for start, token in _FINDERS[find](text, _ORDERS[choose](special)):
            if token not in special and wrong.get("looked_up"):
                raise KeyError(token)
            parts += [text[end:start], token if wrong.get("spelled") else special.get(token, token)]
            end = start + len(token)
        parts += [] if wrong.get("no_rest") else [text[end:]]
        if wrong.get("strip"):
            parts = [part.strip() if isinstance(part, str) else part for part in parts]
        if wrong.get("no_texts"):
            parts = [part for part in parts if isinstance(part, int)]
        return [p for p in parts if (p != "" or wrong.get("empty")) and (p != 0 or not wrong.get("no_zero"))]

    return part


Found = list[tuple[int, str]]  # where each token stands in the text
_ORDERS: dict[str, Callable[[Mapping[str, int]], list[str]]] = {  # which of two tokens wins that begin together
    "longest": lambda special: sorted(special, key=len, reverse=True),
    "shortest": lambda special: sorted(special, key=len),
    "listed": list,
    "last listed": lambda special: list(special)[::-1],
}


def _scanned(text: str, tokens: list[str]) -> Found:
    found, place = [], 0
    while place < len(text):
        token = next((token for token in tokens if text.startswith(token, place)), "")
        found += [(place, token)] if token else []
        place += len(token) or 1
    return found


def _matched(text: str, tokens: list[str]) -> Found:
    """The tokens as one expression in which nothing is escaped."""
    return [(match.start(), match[0]) for match in regex.finditer("|".join(tokens) or r"(?!)", text)]


def _matched_all_but_bars(text: str, tokens: list[str]) -> Found:
    return _matched(text, [token.replace("|", r"\|") for token in tokens])


def _one_by_one(text: str, tokens: list[str]) -> Found:
    """All places of the first token, then of the next in what is left of the text."""
    found: Found = []
    left = text
    for token in tokens:
        while (place := left.find(token)) >= 0:
            found.append((place, token))
            left = left[:place] + "\0" * len(token) + left[place + len(token) :]
    return sorted(found)


_FINDERS: dict[str, Callable[[str, list[str]], Found]] = {
    "scan": _scanned,
    "unguarded": _scanned,
    "unescaped": _matched,
    "bars escaped": _matched_all_but_bars,
    "one by one": _one_by_one,
}
_UNESCAPED = "tokens are plain text; a character such as the dot has to be escaped in an expression"
_MISTAKES: list[tuple[str, Settings]] = [
    ("0 is an id like any other; only empty text is left out", {"no_zero": True}),
    ("of two tokens that begin at the same place the shortest is taken; the longest counts", {"choose": "shortest"}),
    ("of two tokens that begin at the same place the one listed first is taken; the longest counts",
     {"choose": "listed"}),
    ("of two tokens that begin at the same place the one listed last is taken; the longest counts",
     {"choose": "last listed"}),
    ("the tokens are cut out one after the other; one that stands further left comes first", {"find": "one by one"}),
    ("the tokens are cut out one after the other, as they are listed; the leftmost comes first, then the longest",
     {"find": "one by one", "choose": "listed"}),
    (_UNESCAPED, {"find": "unescaped", "looked_up": True}),
    (_UNESCAPED, {"find": "unescaped"}),
    (_UNESCAPED, {"find": "bars escaped"}),
    ("an expression without alternatives matches everywhere; with no tokens nothing may match",
     {"find": "unguarded"}),
    ("the spelling of a token stands in the result where its id belongs", {"spelled": True}),
    ("empty text comes out", {"empty": True}),
    ("the text after the last token is lost", {"no_rest": True}),
    ("the text between the tokens is lost", {"no_texts": True}),
    ("white space around the pieces of text is taken off; it is text", {"strip": True}),
]  # fmt: skip
