"""The checks of chapter 4's first half: what a static batch wastes, buckets, a padded step, and the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from llmfromscratch.course.calling import Case
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.in_engine import in_engine
from llmfromscratch.course.exercises.serving_stage import (
    TextCache,
    about_names,
    answer,
    engine,
    new_request,
    work_told,
)

Lengths = Sequence[int]


def _random_lengths(count: int, longest: int, seed: int) -> list[int]:
    return torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---- 4.1 waste ---------------------------------------------------------------------------------------------------


def check_static_waste(static_waste: Callable[[Lengths, Lengths], tuple[int, int]]) -> None:
    """Against the batch run step by step, token by token."""
    compare(
        static_waste,
        _step_by_step,
        [
            Case("prompts [3], answers [1]", [3], [1]),
            Case("prompts [1], answers [4]", [1], [4]),
            Case("prompts [2, 4], answers [1, 1]", [2, 4], [1, 1]),
            Case("prompts [2, 2], answers [3, 1]", [2, 2], [3, 1]),
            Case("prompts [2, 4], answers [3, 1]", [2, 4], [3, 1]),
            Case("prompts [5, 1, 2], answers [2, 6, 1]", [5, 1, 2], [2, 6, 1]),
            Case("16 requests", _random_lengths(16, 60, 1), _random_lengths(16, 30, 2)),
        ],
        expected="(needed, computed): the tokens of every request, the last one aside, and those of the rectangle",
        mistakes=combined(_wasted, _WASTE_MISTAKES),
        what="(needed, computed)",
    )


def _step_by_step(prompts: Lengths, answers: Lengths) -> tuple[int, int]:
    """Steps of a batch until the longest answer is there; who still wants tokens needs what it computes."""
    needed = computed = 0
    for step in range(max(answers)):
        for prompt, wanted in zip(prompts, answers, strict=True):
            computed += 1 if step else max(prompts)
            needed += 0 if step >= wanted else 1 if step else prompt
    return needed, computed


_WASTE_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the prompts are not padded: every row of the rectangle begins with as many as the longest has",
     {"width": lambda prompts: sum(prompts) / len(prompts)}),
    ("the prompts are padded to the shortest of them", {"width": min}),
    ("the last token of an answer is counted as computed: nobody asks what comes after it, so it never is",
     {"last": 0}),
    ("the last token is counted in what is needed: it comes out of a step and goes into none", {"needs_last": 0}),
    ("one token is taken off for all together; each request has a last token that need not be computed",
     {"needs_once": True}),
    ("one token is taken off for all together; each row of the rectangle has a last token that need not be computed",
     {"computes_once": True}),
    ("the last token is counted in the rectangle: it comes out of a step and goes into none", {"computes_last": 0}),
    ("rows leave when their answer is done; in a static batch each goes on until the longest is",
     {"height": lambda answers: sum(answers) / len(answers)}),
    ("the answers are left out of the rectangle", {"height": lambda answers: 1}),
    ("the rectangle is as long as its longest request; the longest prompt and the longest answer may not be the same "
     "request's, and both set its size", {"longest": True}),
    ("the rectangle has as many rows as there are requests; this is one of them", {"rows": 1}),
    ("the first step is counted as well: it computes the prompts, and gives the first token with them", {"last": -1}),
    ("this is what is wasted; asked for is what is computed, the useful part included",
     {"gives": lambda needed, computed: (needed, computed - needed)}),
    ("the two have changed places: what is needed comes first", {"gives": lambda needed, computed: (computed, needed)}),
    ("this is a percentage; asked for are two numbers of tokens",
     {"gives": lambda needed, computed: 100 * (computed - needed) / computed}),
    ("this is a share of the whole; asked for are two numbers of tokens",
     {"gives": lambda needed, computed: (computed - needed) / computed}),
    ("this is a share of the whole; asked for are two numbers of tokens",
     {"gives": lambda needed, computed: needed / computed}),
    ("these are the wasted tokens alone; asked for are two numbers, needed and computed",
     {"gives": lambda needed, computed: computed - needed}),
    ("a list; asked for is a tuple, as in `return needed, computed`",
     {"gives": lambda needed, computed: [needed, computed]}),
]  # fmt: skip


def _wasted(
    width: Callable[[Lengths], float] = max,
    height: Callable[[Lengths], float] = max,
    last: int = 1,
    gives: Callable[[int, int], Any] = lambda needed, computed: (needed, computed),
    **wrong: Any,
) -> Callable[[Lengths, Lengths], Any]:
    """The formula, with mistakes switched on."""

    def run(prompts: Lengths, answers: Lengths) -> Any:
        needed = sum(prompts) + sum(answers)
        needed -= 1 if wrong.get("needs_once") else len(prompts) * wrong.get("needs_last", last)
        side = width(prompts) + height(answers)
        if wrong.get("longest"):
            side = max(p + a for p, a in zip(prompts, answers, strict=True))
        once = wrong.get("computes_once", False)
        side -= 0 if once else wrong.get("computes_last", last)
        return gives(needed, round(wrong.get("rows", len(prompts)) * side) - once)

    return run


# ---- 4.2 buckets -------------------------------------------------------------------------------------------------


def check_buckets(buckets: Callable[[Lengths, int], list[list[int]]]) -> None:
    """Against picking the shortest that is left, again and again."""
    like = [5, 3, 5, 3, 5, 3]
    compare(
        buckets,
        _picked(),
        [
            Case("lengths [4], groups of 1", [4], 1),
            Case("lengths [4, 2], groups of 2", [4, 2], 2),
            Case("lengths [9, 2, 8], groups of 1", [9, 2, 8], 1),
            Case("lengths [9, 2, 8], groups of 2", [9, 2, 8], 2),
            Case("lengths [5, 5, 5], groups of 2: all alike", [5, 5, 5], 2),
            Case(f"lengths {like}, groups of 4", like, 4),
            Case("lengths [9, 2, 8, 3, 7], groups of 2", [9, 2, 8, 3, 7], 2),
            Case("lengths [7, 1], groups of 5", [7, 1], 5),
            Case("no lengths, groups of 3", [], 3),
            Case("20 lengths, groups of 6", _random_lengths(20, 12, 3), 6),
        ],
        expected="groups of places in `lengths`, the shortest requests in the first group, `size` in each but the last",
        mistakes=combined(_picked, _BUCKET_MISTAKES, at_once=2),
        what="the groups",
    )


_BUCKET_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("these are the lengths; asked for are their places in the list, so that one knows whose they are",
     {"named": lambda places, lengths: [lengths[place] for place in places]}),
    ("`index` finds the first of equal lengths again and again, so that others are in no group",
     {"named": lambda places, lengths: [lengths.index(lengths[place]) for place in places]}),
    ("the numbers say where a length comes in the sorted list; asked for is where it stands in `lengths`",
     {"named": lambda places, lengths: [places.index(place) for place in range(len(places))]}),
    ("the requests are grouped as they come; sort the places by length first", {"order": lambda place, length: place}),
    ("the longest come first; asked for are the shortest first", {"order": lambda place, length: (-length, place)}),
    ("the longest come first; asked for are the shortest first", {"order": lambda place, length: (-length, -place)}),
    ("of equal lengths the later place comes first; the earlier one should",
     {"order": lambda place, length: (length, -place)}),
    ("the last group is lost where it is not full: its requests would never run",
     {"cut": lambda places, size: [places[n : n + size] for n in range(0, len(places) - size + 1, size)]}),
    ("the first group is the one that is not full; it should be the last",
     {"cut": lambda places, size: _cut(places, size, -(-len(places) % size))}),
    ("`size` is the number of groups here; it is how many a group has",
     {"cut": lambda places, size: _cut(places, max(1, -(-len(places) // size)))}),
    ("the requests are dealt out in turn, so that each group has short and long ones; neighbours belong together",
     {"cut": lambda places, size: [places[n :: -(-len(places) // size)] for n in range(-(-len(places) // size))]}),
    ("the places are dealt out in steps of `size`, so that each group has short and long ones; neighbours belong "
     "together: a slice [first : first + size]",
     {"cut": lambda places, size: [places[n::size] for n in range(size)]}),
    ("the places are dealt out in steps of `size`, so that each group has short and long ones; neighbours belong "
     "together: a slice [first : first + size]",
     {"cut": lambda places, size: [places[n::size] for n in range(0, len(places), size)]}),
    ("the places are dealt out in steps of `size`, so that each group has short and long ones; neighbours belong "
     "together: a slice [first : first + size]",
     {"cut": lambda places, size: [places[n::size] for n in range(min(size, len(places)))]}),
    ("every group begins one further on, so requests stand in several groups",
     {"cut": lambda places, size: [places[n : n + size] for n in range(len(places))]}),
    ("every group has only its first member",
     {"cut": lambda places, size: [places[n : n + 1] for n in range(0, len(places), size)]}),
    ("within a group the places are sorted again; they should stay in the order of length",
     {"inside": sorted}),
    ("one list of all; asked for is a list of groups",
     {"gives": lambda groups: [place for group in groups for place in group]}),
    ("the groups are tuples; asked for are lists", {"gives": lambda groups: [tuple(group) for group in groups]}),
]  # fmt: skip


def _cut(places: list[int], size: int, begin: int = 0) -> list[list[int]]:
    return [places[max(0, first) : first + size] for first in range(begin, len(places), size)]


def _picked(
    order: Callable[[int, int], Any] = lambda place, length: (length, place),
    named: Callable[[list[int], list[int]], list[int]] = lambda places, lengths: places,
    cut: Callable[[list[int], int], list[list[int]]] | None = None,
    inside: Callable[[list[int]], list[int]] = lambda group: group,
    gives: Callable[[list[list[int]]], Any] = lambda groups: groups,
) -> Callable[[Lengths, int], Any]:
    """Takes the shortest that is left, then the next, and begins a group where the last one is full."""

    def run(lengths: Lengths, size: int) -> Any:
        left, places, groups = list(enumerate(lengths)), list[int](), list[list[int]]()
        while left:
            best = min(left, key=lambda pair: order(*pair))
            left.remove(best)
            places.append(best[0])
        places = named(places, list(lengths))
        if cut is not None:
            return gives([inside(group) for group in cut(places, size)])
        for place in places:
            if not groups or len(groups[-1]) == size:
                groups.append([])
            groups[-1].append(place)
        return gives([inside(group) for group in groups])

    return run


# ---- 4.3 a padded step -------------------------------------------------------------------------------------------

Spec = tuple[int, int, int, bool]  # tokens of the prompt, of the answer so far, stored ones, and whether it has ended


def check_padded_step(padded_step: Callable[..., list[Any]]) -> None:
    """Against the rectangle filled in column by column; then a whole batch of the engine's StaticScheduler."""
    compare(
        partial(_stepped, padded_step),
        _column_by_column,
        [
            _rows((3, 0, 0, False)),
            _rows((3, 1, 3, False)),
            _rows((3, 0, 0, False), (3, 0, 0, False)),
            _rows((5, 0, 0, False), (2, 0, 0, False)),
            _rows((5, 1, 5, False), (2, 1, 2, False)),
            _rows((5, 2, 6, False), (2, 1, 2, True)),
            _rows((2, 1, 2, True), (5, 3, 7, False), (4, 3, 6, False)),
            Case("no rows", ()),
            _rows((2, 0, 0, False), (6, 0, 0, True)),
            _rows((9, 0, 4, False), (7, 0, 4, False), (6, 1, 6, False)),
            _rows((5, 3, 4, False), (5, 2, 6, False)),
        ],
        expected="for every row its work: from its length in the cache on, what is not computed yet, and as much "
        "padding as the longest of the step has more",
        mistakes=combined(_padded, _PADDING_MISTAKES, at_once=2),
        explain=_about_rows,
        what="the step",
    )
    _check_whole_batch(padded_step)


def _rows(*specs: Spec) -> Case:
    told = [
        f"prompt of {prompt}, {known} of the answer, {stored} in the cache"
        + (", ended" if known else ", aborted") * ended
        for prompt, known, stored, ended in specs
    ]
    return Case("; ".join(f"row {number}: {text}" for number, text in enumerate(told)), specs)


def _stepped(padded_step: Callable[..., Any], specs: Sequence[Spec]) -> Any:
    cache, rows = TextCache(64), []
    for number, (prompt, known, stored, ended) in enumerate(specs):
        row = new_request(number, prompt, 9)
        row.token_ids = answer(row.prompt_token_ids, known)
        cache.reserve(number, stored)
        cache.write(number, 0, row.ids[:stored])
        if ended:
            row.end("stop" if known else "abort")
        rows.append(row)
    found = padded_step(rows, cache)
    return type(found)(map(work_told, found)) if isinstance(found, list | tuple) else found


def _column_by_column(specs: Sequence[Spec]) -> list[str]:
    """A column goes on for as long as some row has a token for it; the others get padding there."""
    todo = [[] if ended else list(range(stored, prompt + known)) for prompt, known, stored, ended in specs]
    counts = [[0, 0] for _ in specs]
    column = 0
    while any(len(tokens) > column for tokens in todo):
        for tokens, count in zip(todo, counts, strict=True):
            count[len(tokens) <= column] += 1
        column += 1
    work = engine().Work
    requests = [new_request(number, 1) for number in range(len(specs))]
    return [
        work_told(work(request, spec[2], *count)) for request, spec, count in zip(requests, specs, counts, strict=True)
    ]


_NO_ROWS = "there is no largest of nothing: without rows there is no work, and the step is empty"
_PADDING_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("rows that have ended are left out; in a static batch they stay, with 0 tokens and padding", {"ended": "dropped"}),
    ("a row that has ended still computes its last token; it has 0 tokens, and the rest is padding",
     {"ended": "computes"}),
    ("a row that has ended still computes its last token; it has 0 tokens, and the rest is padding",
     {"ended": "computes aside"}),
    ("a row that was aborted still computes; it has ended too (`ended` tells)", {"ended": "aborted"}),
    ("a row that has ended gets no padding; it stands in the rectangle like the others", {"ended": "bare"}),
    ("a row that has ended still counts for the width of the step", {"ended": "counts"}),
    ("every row begins at 0; what is in the cache already is not computed again", {"start": lambda length, stored: 0}),
    ("the work begins behind all tokens; it begins at the row's length in the cache",
     {"start": lambda length, stored: length}),
    ("the tokens are reckoned from the prompt alone; `length` counts the answer so far as well, and all of it that is "
     "not in the cache is to be computed",
     {"new": lambda length, stored, prompt: max(1, prompt - stored)}),
    ("the tokens are reckoned from the prompt alone; `length` counts the answer so far as well, and all of it that is "
     "not in the cache is to be computed",
     {"new": lambda length, stored, prompt: prompt - stored}),
    ("the tokens are reckoned from the prompt alone; `length` counts the answer so far as well, and all of it that is "
     "not in the cache is to be computed",
     {"new": lambda length, stored, prompt: max(0, prompt - stored)}),
    ("the whole text is computed again in every step; what is in the cache is done",
     {"new": lambda length, stored, prompt: length}),
    ("one token is planned for every row; in the first step it is the whole prompt",
     {"new": lambda length, stored, prompt: 1}),
    ("one token is planned as soon as anything is stored; where a part of the prompt is, the rest is still "
     "to be computed",
     {"new": lambda length, stored, prompt: 1 if stored else length}),
    ("the padding makes whole texts equally long; asked for is that this step's new tokens are",
     {"padding": lambda new, width, length, longest, prompts: longest - length}),
    ("the padding is that of the prompts in later steps too; each step is as wide as its own longest row",
     {"padding": lambda new, width, length, longest, prompts: max(0, prompts - new)}),
    ("nothing is padded", {"padding": lambda new, width, length, longest, prompts: 0}),
    ("the padding is the whole width of the step; the row's own tokens fill part of it",
     {"padding": lambda new, width, length, longest, prompts: width}),
    ("the padding is counted among the tokens: `tokens` are the row's own alone", {"counted": True}),
    ("the padding is counted among the tokens: `tokens` are the row's own alone", {"counted": "twice"}),
    (_NO_ROWS, {"empty": True}),
    ("the rows are padded to the shortest of them", {"widest": min}),
]  # fmt: skip


def _padded(
    ended: str = "padded",
    start: Callable[[int, int], int] = lambda length, stored: stored,
    new: Callable[[int, int, int], int] = lambda length, stored, prompt: length - stored,
    padding: Callable[[int, int, int, int, int], int] = lambda new, width, length, longest, prompts: width - new,
    **wrong: Any,
) -> Callable[[Sequence[Spec]], Any]:
    """The formula, with mistakes switched on."""

    def run(specs: Sequence[Spec]) -> Any:
        lengths = [prompt + known for prompt, known, _, _ in specs]
        if wrong.get("empty") and not specs:
            raise ValueError(_NO_ROWS)
        full = [new(length, spec[2], spec[0]) for length, spec in zip(lengths, specs, strict=True)]
        computing = [ended == "computes" or (ended == "aborted" and not spec[1]) for spec in specs]
        todo = [0 if spec[3] and not on else one for one, spec, on in zip(full, specs, computing, strict=True)]
        width = wrong.get("widest", max)(full if ended == "counts" else todo) if specs else 0
        todo = full if ended == "computes aside" else todo
        found = []
        for number, (spec, length, tokens) in enumerate(zip(specs, lengths, todo, strict=True)):
            more = padding(tokens, width, length, max(lengths), max(prompt for prompt, *_ in specs))
            more = 0 if spec[3] and ended == "bare" else more
            own = tokens + more * bool(wrong.get("counted"))
            filler = 0 if wrong.get("counted") is True else more
            work = engine().Work(new_request(number, 1), start(length, spec[2]), own, filler)
            found += [] if spec[3] and ended == "dropped" else [work_told(work)]
        return found

    return run


def _about_rows(error: BaseException, case: Case) -> str:
    return _NO_ROWS if not case.args[0] and isinstance(error, ValueError) else about_names(error)


def _check_whole_batch(padded_step: Callable[..., Any]) -> None:
    """One batch from beginning to end; the counts have closed forms."""
    prompts, answers = [5, 2, 9, 4], [3, 6, 1, 4]

    def run(prompts: Lengths, answers: Lengths) -> NamedParts:
        with in_engine("scheduler", "padded_step", padded_step) as module:
            cache = TextCache(64)
            planner = module.StaticScheduler(cache, len(prompts))
            requests = [new_request(n, *pair) for n, pair in enumerate(zip(prompts, answers, strict=True))]
            for request in requests:
                planner.add(request)
            for now in range(20):
                for work in planner.schedule(float(now)):
                    ids = work.request.ids[work.start : work.start + work.tokens]
                    cache.write(work.request.request_id, work.start, ids)
                    if work.completes:
                        work.request.record(answer(work.request.ids, 1)[0], now + 1.0)
                for request in requests:
                    if len(request.token_ids) == request.params.max_tokens:
                        planner.finish(request, "length")
        counts = (planner.useful_tokens, planner.padding_tokens, planner.idle_tokens)
        return NamedParts({"useful, padding and idle tokens": counts, "the answers": [r.token_ids for r in requests]})

    def closed(prompts: Lengths, answers: Lengths) -> NamedParts:
        useful = sum(prompts) + sum(answers) - len(prompts)
        padding = sum(max(prompts) - prompt for prompt in prompts)
        idle = sum(max(answers) - wanted for wanted in answers)
        said = [
            answer(new_request(n, p).prompt_token_ids, a) for n, (p, a) in enumerate(zip(prompts, answers, strict=True))
        ]
        return NamedParts({"useful, padding and idle tokens": (useful, padding, idle), "the answers": said})

    compare(
        run,
        closed,
        [Case(f"a StaticScheduler with your padded_step, prompts {prompts}, answers {answers}", prompts, answers)],
        expected="a batch that runs to its end, its rows padded in the first step and idle after their last token",
        explain=lambda error, case: about_names(error),
    )  # fmt: skip
