"""The check of exercise 2.8, where text stops. Its oracle searches the whole text anew after each piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmfromscratch.course import locating
from llmfromscratch.course.combining import Settings, combined
from llmfromscratch.course.comparing import Case, NamedParts, compare, expect_raises
from llmfromscratch.errors import RequestError

_MISTAKES: list[tuple[str, Settings]] = [
    ("after a character that does not fit, the search begins from zero; the text may still end with a shorter "
     "beginning of the stop string", {"from_zero": True, "hold": "from zero"}),
    ("each piece is searched on its own; a stop string may lie across several", {"alone": True, "hold": "nothing"}),
    ("each piece is searched on its own; what was held back of the last one belongs to the search", {"alone": True}),
    ("the beginning of a stop string comes out before it is complete", {"hold": "nothing"}),
    ("the beginning of a stop string comes out before it is complete", {"hold": "nothing", "from_end": True}),
    ("more is held back than can become part of a stop string", {"hold": "lengths"}),
    ("nothing comes out until a stop string is complete or the text ends; only what may belong to one is held back",
     {"hold": "everything"}),
    ("of several stop strings the one that has begun least decides what is held back; the one that has begun most "
     "should", {"hold": "least"}),
    ("of several stop strings the one that has begun least decides what is held back; the one that has begun most "
     "should", {"hold": "least", "from_end": True}),
    ("the shortest end of the text that begins a stop string is held back; a longer one may begin it too",
     {"hold": "shortest"}),
    ("the shortest end of the text that begins a stop string is held back; a longer one may begin it too",
     {"hold": "shortest", "from_end": True}),
    ("only the first stop string in the list decides what is held back", {"hold": "first"}),
    ("only the first stop string in the list decides what is held back", {"hold": "first", "from_end": True}),
    ("only the last stop string in the list decides what is held back", {"hold": "last"}),
    ("only the last stop string in the list decides what is held back", {"hold": "last", "from_end": True}),
    ("one character more is held back than begins a stop string", {"hold": "one more"}),
    ("one character more is held back than begins a stop string", {"hold": "one more", "from_end": True}),
    ("one character less is held back than begins a stop string", {"hold": "one less"}),
    ("one character less is held back than begins a stop string", {"hold": "one less", "from_end": True}),
    ("how much of a stop string was read is forgotten with every character", {"forgets": True, "hold": "one"}),
    ("of several stop strings that end at one character the longest counts", {"choose": "shortest"}),
    ("of several stop strings that end at one character the one listed first is taken; the longest counts",
     {"choose": "listed of equals"}),
    ("of several stop strings the one listed first is taken, though another is complete earlier",
     {"choose": "listed"}),
    ("the stop string that begins first is taken, though another is complete before it", {"choose": "begins"}),
    ("include=True keeps the stop string as the end of the text", {"include": False}),
    ("the stop string comes out though include is False", {"include": True}),
    ("the place of the stop is counted in the piece, and used in what is held back and the piece together",
     {"in_piece": True}),
    ("what was held back is lost when the next piece comes; it stands before it", {"lost": True}),
    ("what was held back is lost when the next piece comes; it stands before it", {"lost": True, "from_end": True}),
    ("text that came out before comes out again", {"again": True}),
    ("each push gives all of the text so far; only what is new in it should come", {"all_anew": True}),
    ("text still comes out after the stop: the rest of the piece that it stands in, and later pieces",
     {"tail": True, "later": True}),
    ("text still comes out after the stop: the rest of the piece that it stands in", {"tail": True}),
    ("pieces that come after the stop still come out; once `stopped` is set, nothing does", {"later": True}),
    ("after a stop, flush gives what was still held; nothing comes out after a stop", {"rest": "held"}),
    ("after a stop, flush gives the text behind the stop string; nothing comes out after a stop", {"rest": "behind"}),
    ("after a stop, flush gives the stop string; nothing comes out after a stop", {"rest": "stop"}),
    ("what was held back is lost at the end; flush gives it", {"rest": "nothing"}),
    ("`stopped` stays None; it names the stop string that was met", {"nameless": True}),
    ("the stop strings are never met", {"deaf": True, "hold": "nothing"}),
    ("the stop strings are never met", {"deaf": True}),
]  # fmt: skip


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
        (["STOP", "END"], ["a ST", "OR EN", "DED"], False),
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
    """Against a search of the whole text after every piece that has come."""
    compare(
        partial(_stop, matcher_class),
        _stops(),
        _stopping(),
        expected="with each piece the text that can be no part of a stop string any more, nothing after the first stop "
        "string that is complete, and at the end what was held back",
        mistakes=combined(_stops, _MISTAKES, at_once=4),
        diagnose=_diagnosed,
        explain=_explained,
    )
    for text, stops in (("an empty stop string", ["a", ""]), ("a text where a list of texts belongs", "ab")):
        expect_raises(partial(matcher_class, stops), RequestError, case=text)


def _stop(matcher_class: type, stops: list[str], pieces: list[str], include: bool) -> NamedParts:
    matcher = matcher_class(stops, include=include)
    pushed = [matcher.push(piece) for piece in pieces]
    return _told(pushed, matcher.flush(), matcher.stopped)


def _told(pushed: list[str], flushed: str, stopped: str | None) -> NamedParts:
    return NamedParts({"the texts of push": pushed, "the text of flush": flushed, "`stopped`": stopped})


def _diagnosed(got: NamedParts, want: NamedParts) -> str:
    pushed, flushed, stopped = got.values()
    if None in pushed or flushed is None:
        return f"{'push' if None in pushed else 'flush'} gives None: is a `return` missing?"
    if stopped is None and want["`stopped`"] is not None:
        return "`stopped` stays None; it names the stop string that was met"
    return ""


def _explained(error: BaseException, case: Case) -> str:
    """What it means where `_matched` was asked to go on with a stop string that was complete already."""
    frame = locating.frames_of(error.__traceback__)[-1][0]
    stop, length = (frame.f_locals.get(name) for name in ("stop", "length"))
    if frame.f_code.co_name != "_matched" or not isinstance(stop, str) or length != len(stop):
        return ""
    return (
        f"`_matched` is called again after {stop!r} is complete: its length is {length} already, and there is no "
        f"{stop!r}[{length}]. Leave the loop when a stop string is complete, and let push do nothing once `stopped` "
        "is set"
    )


# ---- the oracle, and its mistakes --------------------------------------------------------------------------------


def _found(text: str, stops: Sequence[str], choose: str) -> tuple[int, str] | None:
    """The end of the first stop string in a text, and which it is; `choose` orders them in a mistaken way."""
    places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    orders: dict[str, Callable[[tuple[int, str]], tuple[int, ...]]] = {
        "longest": lambda place: (place[0], -len(place[1])),
        "shortest": lambda place: (place[0], len(place[1])),
        "listed": lambda place: (list(stops).index(place[1]),),
        "listed of equals": lambda place: (place[0], list(stops).index(place[1])),
        "begins": lambda place: (place[0] - len(place[1]),),
    }
    return min(places, key=orders[choose], default=None)


def _found_from_zero(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    ends = [(_from_zero(text, stop)[0], stop) for stop in stops]
    return min(((end, stop) for end, stop in ends if end >= 0), default=None)


def _from_zero(text: str, stop: str) -> tuple[int, int]:
    """Where a search that starts again after each failure finds `stop` (or -1), and how much it has matched."""
    met = 0
    for place, character in enumerate(text):
        met = met + 1 if character == stop[met] else int(character == stop[0])
        if met == len(stop):
            return place + 1, 0
    return -1, met


def _begun(text: str, stop: str) -> list[int]:
    """The lengths of all ends of the text that a stop string begins with, the shortest first."""
    return [n for n in range(1, len(stop)) if text.endswith(stop[:n])]


def _longest(text: str, stops: Sequence[str]) -> int:
    return max((n for stop in stops for n in _begun(text, stop)), default=0)


_HELD: dict[str, Callable[[str, Sequence[str]], int]] = {  # how much of the end of a text waits; all but one mistaken
    "longest": _longest,
    "nothing": lambda text, stops: 0,
    "everything": lambda text, stops: len(text),
    "lengths": lambda text, stops: min(len(text), max((len(stop) - 1 for stop in stops), default=0)),
    "least": lambda text, stops: min((_longest(text, [stop]) for stop in stops), default=0),
    "one": lambda text, stops: max((1 for stop in stops if 1 in _begun(text, stop)), default=0),
    "one more": lambda text, stops: _longest(text, stops) + 1,
    "one less": lambda text, stops: max(0, _longest(text, stops) - 1),
    "shortest": lambda text, stops: min((n for stop in stops for n in _begun(text, stop)), default=0),
    "first": lambda text, stops: _longest(text, stops[:1]),
    "last": lambda text, stops: _longest(text, stops[-1:]),
    "from zero": lambda text, stops: max((_from_zero(text, stop)[1] for stop in stops), default=0),
}


def _stops(
    choose: str = "longest", include: bool | None = None, hold: str = "longest", rest: str = "", **wrong: bool
) -> Callable[[list[str], list[str], bool], NamedParts]:
    """Searches all the text so far after each piece; what is not left at its default makes a mistake."""

    def search(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
        if wrong.get("deaf"):
            return None
        if wrong.get("forgets"):
            stops = [stop for stop in stops if len(stop) == 1]
        return _found_from_zero(text, stops) if wrong.get("from_zero") else _found(text, stops, choose)

    def run(stops: list[str], pieces: list[str], keep: bool) -> NamedParts:
        keep = keep if include is None else include
        text, given, end, pushed, stopped = "", 0, 0, [], None
        for piece in pieces:
            if stopped is not None:
                pushed.append(piece if wrong.get("later") else "")
                continue
            before = len(text)
            begin = before if wrong.get("alone") else 0
            text += piece
            given = max(given, before) if wrong.get("lost") else given
            found = search(text[begin:], stops)
            until = len(text) - _HELD[hold](text[begin:], stops)
            if found is not None:
                end, stopped = begin + found[0], found[1]
                until = end - (0 if keep else len(stopped)) - (before - given if wrong.get("in_piece") else 0)
                until = len(text) if wrong.get("tail") else until
            pushed.append(_cut(text, given, until, found is not None, wrong))
            given = given + len(pushed[-1]) if wrong.get("from_end") else max(given, until)
        ends = {"held": text[given:], "behind": text[end:], "stop": stopped, "nothing": ""}
        flushed = ends.get(rest, "") if stopped is not None else text[given:] if rest != "nothing" else ""
        return _told(pushed, flushed or "", None if wrong.get("nameless") else stopped)

    return run


def _cut(text: str, given: int, until: int, met: bool, wrong: Settings) -> str:
    """What a push gives out of the text so far. from_end: Python counts a negative place from the end."""
    if wrong.get("all_anew") or (wrong.get("again") and met):
        return text[: max(0, until)]
    if wrong.get("from_end") or wrong.get("in_piece"):
        return text[given:][: until - given]
    return text[given : max(0, until)]
