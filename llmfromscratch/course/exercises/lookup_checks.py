"""The check of chapter 6's prompt lookup, against trying every ending at every place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare


def check_lookup_draft(lookup_draft: Callable[..., list[int]]) -> None:
    """Against every ending, the longest first, at every place, the latest first."""
    compare(
        lookup_draft,
        every_place,
        lookup_cases(),
        expected="up to `count` tokens that followed the latest earlier place of the longest ending, in a list",
        mistakes=combined(_looked_up, _LOOKUP, at_once=2),
        explain=_of_lookup,
        what="the draft",
    )


def lookup_cases() -> list[Case]:
    """Texts by hand, then random ones of few tokens, in which much is repeated."""
    listed = [
        ([5, 6, 7, 8, 5, 6], 3, 2),
        ([5, 6, 5], 3, 1),
        ([5, 6, 7], 3, 4),
        ([5], 3, 4),
        ([], 3, 4),
        ([5, 6, 7, 8, 5, 6], 3, 8),
        ([5, 6, 7, 5, 8, 9, 5], 1, 2),
        ([1, 5, 6, 7, 2, 5, 6, 8, 3, 5, 6], 2, 2),
        ([1, 5, 6, 7, 8, 2, 6, 9, 9, 5, 6], 2, 2),
        ([1, 5, 6, 7, 8, 2, 6, 9, 9, 5, 6], 1, 2),
        ([4, 1, 2, 3, 7, 9, 1, 2, 3, 8, 4, 1, 2, 3], 4, 3),
        ([4, 1, 2, 3, 7, 9, 1, 2, 3, 8, 4, 1, 2, 3], 3, 3),
        ([7, 7, 7], 2, 3),
        ([7, 7, 7, 7, 7], 3, 4),
        ([3, 7, 8, 7, 8, 7, 8], 4, 3),
        ([6, 5, 6, 7, 5, 6], 5, 3),
        ([5, 6, 7, 8], 3, 0),
        ([6, 6], 3, 2),
        ([1, 2, 3, 1, 2, 4, 9, 2], 4, 3),
        ([3, 5, 6, 7, 9, 5, 6, 8, 3, 5, 6], 1, 2),
    ]
    cases = [Case(f"{ids}, longest {longest}, count {count}", ids, longest, count) for ids, longest, count in listed]
    for seed, (kinds, length) in enumerate([(2, 8), (2, 14), (3, 10), (3, 20), (3, 40), (4, 60), (12, 80), (3, 200)]):
        ids = torch.randint(kinds, (length,), generator=torch.Generator().manual_seed(60 + seed)).tolist()
        for longest, count in ((3, 4), (1 + seed, 3), (2, 9)):
            shown = ids if length <= 20 else f"{length} tokens of {kinds} kinds"
            cases.append(Case(f"{shown}, longest {longest}, count {count}", ids, longest, count))
    return cases


def every_place(token_ids: Sequence[int], longest: int, count: int) -> list[int]:
    """Every length and every place, tried in the order in which they count."""
    ids = list(token_ids)
    for length in range(min(longest, len(ids)), 0, -1):
        for first in reversed(range(len(ids) - length)):
            if ids[first : first + length] == ids[len(ids) - length :]:
                return ids[first + length :][:count]
    return []


def _of_lookup(error: BaseException, case: Case) -> str:
    if isinstance(error, IndexError):
        return "a place is asked for that the text does not have: it may be empty, or shorter than `longest`"
    return ""


# ---- mistakes ----------------------------------------------------------------------------------------------------

_Place = tuple[int, int]  # where an earlier place begins, and its length


def _longest_latest(places: list[_Place], longest: int) -> _Place:
    return max(places, key=lambda place: (place[1], place[0]))


def _longest_earliest(places: list[_Place], longest: int) -> _Place:
    return max(places, key=lambda place: (place[1], -place[0]))


def _latest(places: list[_Place], longest: int) -> _Place:
    return max(places, key=lambda place: (place[0] + place[1], place[1]))


def _earliest(places: list[_Place], longest: int) -> _Place:
    return min(places, key=lambda place: (place[0] + place[1], -place[1]))


def _until_exact(places: list[_Place], longest: int) -> _Place:
    """From the end on, the longest of each place, up to the first that has just the length."""
    best = (0, 0)
    for end in sorted({first + length for first, length in places}, reverse=True):
        first, length = max((place for place in places if sum(place) == end), key=lambda place: place[1])
        best = (first, length) if length > best[1] else best
        if best[1] == longest:
            break
    return best


_OVERLAP = "an earlier place that overlaps the ending is refused; in a text that repeats itself it is the best there is"
_SHORT = "a place with fewer than `count` tokens behind it is passed over; a short draft is a draft too"
_FRONT = "the place at the very beginning of the text is left out"
_MORE = "endings of more than `longest` tokens are looked for"
_LOOKUP: list[tuple[str, dict[str, Any]]] = [
    ("of several places the earliest is taken; the latest counts", {"best": _longest_earliest}),
    ("the latest place of the last token decides; a longer ending that occurs further back tells more",
     {"best": _latest}),
    ("the earliest place of the last token decides; the longest ending goes first, and then the latest place",
     {"best": _earliest}),
    ("the text finds its own ending, behind which nothing has followed yet: the place must be an earlier one",
     {"itself": True}),
    ("the draft begins with the ending itself; what followed it is asked for",
     {"offset": lambda first, length, longest: first}),
    ("the draft begins one token too early, with the last one of the ending",
     {"offset": lambda first, length, longest: first + length - 1}),
    ("the draft begins one token too late", {"offset": lambda first, length, longest: first + length + 1}),
    ("the draft begins one token behind where the earlier place begins, however long the ending is",
     {"offset": lambda first, length, longest: first + 1}),
    ("the draft begins `longest` tokens behind where the place begins; the ending that was found may be shorter",
     {"offset": lambda first, length, longest: first + longest}),
    ("everything up to the end of the text comes back; at most `count` tokens do", {"count": lambda count: None}),
    ("one token more than `count` comes back", {"count": lambda count: count + 1}),
    ("one token less than `count` comes back", {"count": lambda count: max(count - 1, 0)}),
    *((sentence, {"fits": rule, "whole": whole})
      for whole in (False, True)
      for sentence, rule in (
          (_OVERLAP, lambda first, length, total, count: first + 2 * length <= total),
          (_SHORT, lambda first, length, total, count: first + length + count <= total),
          (_FRONT, lambda first, length, total, count: first > 0))),
    ("only an ending of exactly `longest` tokens is looked for; where it does not occur, a shorter one may",
     {"lengths": lambda longest: range(longest, longest + 1)}),
    ("endings of fewer than two tokens are left out; one token is an ending as well",
     {"lengths": lambda longest: range(2, longest + 1)}),
    ("an ending of `longest` tokens is not looked for, only shorter ones",
     {"lengths": lambda longest: range(1, longest)}),
    (_MORE, {"lengths": lambda longest: range(1, 1000)}),
    (_MORE, {"lengths": lambda longest: range(1, longest + 2)}),
    (_MORE, {"lengths": lambda longest: range(1, 1000), "best": _until_exact}),
    ("where nothing is found, something comes back all the same; asked for is []",
     {"nothing": lambda ids, count: ids[:count]}),
    ("where nothing is found, None comes back; asked for is []", {"nothing": lambda ids, count: None}),
    ("the draft is no list", {"gives": tuple}),
    ("the draft is no list", {"gives": torch.tensor}),
    ("the draft stands in the wrong order", {"gives": lambda draft: draft[::-1]}),
    ("the place comes back; asked for are the tokens that followed there", {"tokens": False}),
]  # fmt: skip


def _looked_up(
    best: Callable[[list[_Place], int], _Place] = _longest_latest,
    offset: Callable[[int, int, int], int] = lambda first, length, longest: first + length,
    count: Callable[[int], int | None] = lambda count: count,
    lengths: Callable[[int], range] = lambda longest: range(1, longest + 1),
    fits: Callable[[int, int, int, int], bool] = lambda first, length, total, count: True,
    **wrong: Any,
) -> Callable[..., Any]:
    """Collects all places at which some ending occurs, with mistakes switched on; whole: only the longest of each."""
    gives = wrong.get("gives", lambda draft: draft)

    def run(token_ids: Sequence[int], longest: int, asked: int) -> Any:
        ids, total = list(token_ids), len(token_ids)
        places = [
            (first, length)
            for length in lengths(longest)
            if length <= total
            for first in range(total - length + bool(wrong.get("itself")))
            if ids[first : first + length] == ids[total - length :]
        ]
        if wrong.get("whole"):
            places = list({first + length: (first, length) for first, length in places}.values())
        places = [place for place in places if fits(*place, total, asked)]
        if not places:
            found = wrong["nothing"](ids, asked) if "nothing" in wrong else []
            return (gives(found) if found is not None else None) if wrong.get("tokens", True) else 0
        begin = offset(*best(places, longest), longest)
        return gives(ids[begin:][: count(asked)]) if wrong.get("tokens", True) else begin

    return run
