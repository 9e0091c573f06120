"""Regular expressions as Python means them, written out in plain terms for the library that follows them.

The text is read by Python's own parser of regular expressions. What comes out has only characters, sets of characters
as ranges of code points, sequences, alternatives and repetitions, so that both sides mean the same by it. What only a
backtracking matcher can do (looking around, back references, ...) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from re import _parser  # type: ignore[attr-defined]  # no stubs; there since Python 3.11, and the only faithful reader
from typing import Any

from llmfromscratch.errors import RequestError

MAX_SIZE = 10_000  # characters and sets, each as often as bounded repetitions write it out
MAX_TEXT = 200_000  # what may come out
_MAX_DEPTH = 50
_LAST = 0x10FFFF
_ANYTHING = ((0, _LAST),)
_SURROGATES = (0xD800, 0xDFFF)  # no characters: no text holds them
_OPEN = r"[\x{0}-\x{10ffff}]*"
_REFUSED = {
    "ASSERT": "looking ahead or behind",
    "ASSERT_NOT": "looking ahead or behind",
    "GROUPREF": "a reference back to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
    "FAILURE": "looking ahead or behind",
}

Ranges = Sequence[tuple[int, int]]  # of code points, both ends included; sorted, apart


def translate(expression: str, search: bool = False) -> str:
    """The same expression in plain terms: it matches exactly what `re.fullmatch` matches.

    search: what contains a match is meant, as JSON schema has it; "^" and "$" then tie it to the ends. \\d, \\w and \\s
    are those of ASCII there, their opposites leave out all of Unicode's: the narrower of what JSON schema and Python
    say.

    Raises RequestError for what is no expression, for features that are not supported, and for one that is too large.
    """
    if len(expression) > MAX_TEXT:
        raise RequestError(f"the expression has {len(expression)} characters; at most {MAX_TEXT} are read.")
    try:
        parsed = _parser.parse(expression)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise RequestError(f"{_shown(expression)} is no regular expression: {error}.") from error
    writer = _Writer(expression, search)
    return writer.whole(parsed)


class _Writer:
    """Writes a parsed expression out, and counts how large it is."""

    def __init__(self, expression: str, search: bool):
        self.expression, self.search = expression, search
        self._length = 0

    def whole(self, parsed: Any) -> str:
        flags = parsed.state.flags
        self._check_flags(flags)
        text, size = self._sequence(list(parsed), flags, (True, True), 0)
        if size > MAX_SIZE:
            raise self._too_large(size)
        return text

    def _sequence(self, items: list[Any], flags: int, ends: tuple[bool, bool], depth: int) -> tuple[str, int]:
        """Text and size. ends: whether the sequence begins, and whether it ends, where the whole expression does."""
        if depth > _MAX_DEPTH:
            raise RequestError(f"{_shown(self.expression)} is nested more than {_MAX_DEPTH} deep; make it flatter.")
        first, last = ends
        while items and first and _is_at(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            items, first = items[1:], first and not self.search
        while items and last and _is_at(items[-1], "AT_END", "AT_END_STRING"):
            items, last = items[:-1], last and not self.search
        # in a search, an end that no anchor ties is open: alternatives and groups that stand alone say so themselves
        alone = len(items) == 1 and str(items[0][0]) in ("BRANCH", "SUBPATTERN")
        before, after = (_OPEN if self.search and end and not alone else "" for end in (first, last))
        parts, size = [before], 0
        for place, item in enumerate(items):
            inner = first and not before and place == 0, last and not after and place == len(items) - 1
            text, more = self._item(item, flags, inner, depth)
            parts.append(text)
            size += more
        return "".join([*parts, after]), size

    def _item(self, item: Any, flags: int, ends: tuple[bool, bool], depth: int) -> tuple[str, int]:
        name, value = str(item[0]), item[1]
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._counted(_class(self._ranges(name, value, flags))), 1
        if name == "BRANCH":
            found = [self._sequence(list(branch), flags, ends, depth + 1) for branch in value[1]]
            return "(?:" + "|".join(text for text, _ in found) + ")", sum(size for _, size in found) + 1
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            self._check_flags(added)
            text, size = self._sequence(list(inner), (flags | added) & ~removed, ends, depth + 1)
            return f"(?:{text})", size
        if name in ("MAX_REPEAT", "MIN_REPEAT"):  # how eagerly does not matter: the whole text decides
            return self._repeated(value, flags, depth)
        if name == "AT":
            raise self._refusal("an anchor or a word boundary inside the expression")
        raise self._refusal(_REFUSED.get(name, name))

    def _repeated(self, value: Any, flags: int, depth: int) -> tuple[str, int]:
        least, most, inner = value
        text, size = self._sequence(list(inner), flags, (False, False), depth + 1)
        endless = most is _parser.MAXREPEAT
        size *= max(1, least + 1 if endless else most)
        if size > MAX_SIZE:
            raise self._too_large(size)
        return f"(?:{text}){{{least},{'' if endless else most}}}", size

    def _ranges(self, name: str, value: Any, flags: int) -> Ranges:
        """The characters that one item of a parsed expression stands for."""
        if name == "LITERAL":
            return ((value, value),)
        if name == "NOT_LITERAL":
            return _complement(((value, value),))
        if name == "ANY":
            return _ANYTHING if flags & re.DOTALL else _complement(((10, 10),))
        negated = str(value[0][0]) == "NEGATE"
        ranges: list[tuple[int, int]] = []
        for kind, what in value[negated:]:
            if str(kind) == "CATEGORY":
                ranges += self._category(str(what), flags, negated)
            else:
                ranges.append((what, what) if str(kind) == "LITERAL" else what)
        return _complement(_joined(ranges)) if negated else _joined(ranges)

    def _category(self, name: str, flags: int, negated: bool) -> Ranges:
        letter = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[name.split("_")[-1]]
        opposite = "_NOT_" in name
        ascii_only = (self.search and opposite == negated) or bool(flags & re.ASCII)
        ranges = _characters(letter, ascii_only)
        return _complement(ranges) if opposite else ranges

    def _check_flags(self, flags: int) -> None:
        if flags & re.IGNORECASE:
            raise self._refusal("ignoring case, (?i),", "Write the letters of both cases: [aA]")

    def _counted(self, text: str) -> str:
        self._length += len(text)
        if self._length > MAX_TEXT:
            raise RequestError(f"{_shown(self.expression)} is too large: it has too many sets of characters.")
        return text

    def _refusal(self, feature: str, remedy: str = "Write it without") -> RequestError:
        return RequestError(f"{_shown(self.expression)}: {feature} is not supported in an expression. {remedy}.")

    def _too_large(self, size: int) -> RequestError:
        return RequestError(
            f"{_shown(self.expression)} is too large: with its repetitions written out it has {size} characters, "
            f"and at most {MAX_SIZE} are followed. Give smaller bounds, or *."
        )


def _is_at(item: Any, *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _shown(expression: str) -> str:
    return repr(expression if len(expression) <= 60 else expression[:57] + "...")


@cache
def _characters(letter: str, ascii_only: bool) -> Ranges:
    """What \\d, \\w or \\s stands for in the Python that runs."""
    everything = map(chr, [*range(_SURROGATES[0]), *range(_SURROGATES[1] + 1, _LAST + 1)])
    text = "".join(islice(everything, 128) if ascii_only else everything)
    found = re.finditer(rf"\{letter}+", text, re.ASCII if ascii_only else 0)
    return _joined((ord(match[0][0]), ord(match[0][-1])) for match in found)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same characters, sorted, no two ranges touching."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    lows = [0, *(high + 1 for _, high in ranges)]
    highs = [*(low - 1 for low, _ in ranges), _LAST]
    return [(low, high) for low, high in zip(lows, highs, strict=True) if low <= high]


def _is_surrogate(code: int) -> bool:
    return _SURROGATES[0] <= code <= _SURROGATES[1]


def _class(ranges: Ranges) -> str:
    """A set of characters as text, without surrogates; a set of nothing is written as one that no text can be in."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and not _is_surrogate(ranges[0][0]):
        return f"\\x{{{ranges[0][0]:x}}}"
    parts = []
    for low, high in ranges:
        for start, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if start <= end:
                parts.append(f"\\x{{{start:x}}}-\\x{{{end:x}}}")
    return f"[{''.join(parts)}]" if parts else r"[^\x{0}-\x{10ffff}]"
