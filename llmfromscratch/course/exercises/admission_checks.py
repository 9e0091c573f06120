"""The check of chapter 4's admission: who is let in, on a planner made by hand and in whole runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llmfromscratch.course.calling import Case
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.planner_runs import check_runs
from llmfromscratch.course.exercises.scheduler_checks import token_by_token
from llmfromscratch.course.exercises.serving_stage import (
    ENDLESS,
    Endless,
    Fault,
    Planner,
    Row,
    Scene,
    about_names,
    counted,
    plan_told,
)
from llmfromscratch.errors import OutOfMemory


def check_admit(admit: Callable[..., None]) -> None:
    """Against a queue that is emptied from its front; then whole runs."""
    small, large, medium = Row(3, 2, arrival=2.0), Row(1, 20, arrival=1.0), Row(6, 5, arrival=3.0)
    like = Row(8, 11, like=2, shared=8)
    holder = Row(2, 8, 1, 8)
    compare(
        partial(_admitted, admit),
        partial(_admitted, _from_the_front),
        [
            _admit_case(9, (), ()),
            _admit_case(9, (), (medium,)),
            _admit_case(9, (), (medium, small)),
            _admit_case(9, (), (Row(6, 9), small), budget=4),
            _admit_case(9, (), (Row(6, 8), small), budget=8),
            _admit_case(9, (), (medium,), budget=0),
            _admit_case(9, (), (medium, small, Row(4, 1), Row(9, 3)), places=3),
            _admit_case(9, (holder,), (medium, small), places=2),
            _admit_case(9, (holder,), (small, Row(4, 1), Row(9, 1)), places=2),
            _admit_case(9, (holder,), (small,), places=1),
            _admit_case(4, (holder,), (large, small)),
            _admit_case(5, (holder,), (medium, large, small), budget=20),
            _admit_case(9, (holder,), (like,)),
            _admit_case(4, (holder,), (like,)),
            _admit_case(3, (holder,), (like, Row(5, 1))),
            _admit_case(9, (), (Row(6, 5, 4),), budget=12),
            _admit_case(9, (holder,), (Row(8, 8, 1, like=2, shared=8),)),
            _admit_case(9, (holder,), (medium, small), faulty=True),
            _admit_case(3, (), (Row(6, 9, 4),), budget=4),
            _admit_case(3, (), (Row(6, 12), small), budget=4),
            _admit_case(5, (holder,), (Row(8, 15, like=2, shared=8), small), budget=3),
        ],
        expected="requests begun from the front of the queue while there are places, budget, and memory for their "
        "whole texts, each planned at once; the first that does not fit gives back what it took over and ends it",
        mistakes=combined(_admits, _ADMIT_MISTAKES, at_once=2),
        diagnose=_about_scene,
        explain=_about_admission,
    )
    check_runs("admit", admit)


def _admit_case(
    num_blocks: int,
    running: tuple[Row, ...],
    waiting: tuple[Row, ...],
    budget: int = 8,
    places: int = 4,
    faulty: bool = False,
) -> Case:
    scene = Scene(num_blocks, running, waiting, tuple(row.number for row in running), budget, places, faulty)
    room = f"{places} place{'s' * (places != 1)}"
    return Case(f"{scene.told}; {room}, the budget has {counted(budget)} left", scene)


def _admitted(admit: Callable[..., Any], scene: Scene) -> NamedParts:
    planner = _Watched(scene)
    try:
        admit(planner, 12.0)
    except Endless:
        planner.begun.append(ENDLESS)
    except Fault:
        planner.begun.append("the ValueError of the cache comes out")
    return NamedParts(
        {
            "who began": planner.begun,
            "planner.plan": plan_told(planner.plan),
            "planner.budget": planner.budget,
            "who gave way": planner.gave_way[:8],
            "blocks held": planner.cache.held(),
            "known to the cache": sorted(planner.cache.blocks) if not scene.faulty else [],
            "who waits, in this order": [one.request_id for one in planner.waiting],
            "who runs": sorted(one.request_id for one in planner.running),
            "looked up in the cache with no place or no budget left": sorted(planner.too_late),
        }
    )


class _Watched(Planner):
    """A planner that notes for whom the cache is asked although nobody can begin."""

    def __init__(self, scene: Scene):
        super().__init__(scene)
        self.too_late: set[int] = set()
        match_prefix = self.cache.match_prefix

        def noted(request_id: int, token_ids: Sequence[int]) -> int:
            if self.budget < 1 or len(self.running) >= self.max_requests:
                self.too_late.add(request_id)
            return match_prefix(request_id, token_ids)

        self.cache.match_prefix = noted  # type: ignore[method-assign]


def _from_the_front(planner: Planner, now: float) -> None:
    """Looks beforehand whether the first fits; takes over and reserves only then."""
    for request in list(planner.waiting):
        shared = planner.cache.find_prefix(request.ids)
        needed = -(-len(request.ids) // 4) - shared // 4
        full = len(planner.running) >= planner.max_requests
        if full or planner.budget < 1 or needed > planner.cache.free:
            return
        planner.cache.match_prefix(request.request_id, request.ids)
        planner.cache.reserve(request.request_id, len(request.ids) - shared)
        planner.begin(request, now, shared)
        token_by_token(planner, request)


_LATE = (
    "the requests are planned when all have begun: until then none takes its tokens off the budget, and too many "
    "begin; plan each one at once"
)
_KEEPS = "who does not fit keeps what it took over, and with it memory: release it"
_NOW = "`now` is not handed on: it is the time at which the request begins"
_ADMIT_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("who does not fit is skipped for a smaller one behind it: a large request would wait for ever", {"skips": True}),
    ("what was taken over from the cache is not subtracted: memory is asked for the whole text on top of it",
     {"asks": lambda request, hits, budget: request.length}),
    ("memory is reserved for the first chunk alone; it is reserved for all the rest of the text, or the request would "
     "take it from others half-way", {"asks": lambda request, hits, budget: min(request.length - hits, budget)}),
    ("memory is reserved for the prompt alone; what was answered before a preemption is computed again, too",
     {"asks": lambda request, hits, budget: len(request.prompt_token_ids) - hits}),
    ("memory is reserved for one token too few", {"asks": lambda request, hits, budget: request.length - hits - 1}),
    ("no memory is reserved before a request begins", {"asks": lambda request, hits, budget: 0}),
    ("what the cache holds already is not taken over: match_prefix is not asked", {"matches": "never"}),
    ("the cache is asked for the prompt alone; what was answered before a preemption belongs to the text too",
     {"matches": "prompt"}),
    (_KEEPS, {"releases": False}),
    ("one request too many runs: there are `max_requests` places", {"places": 1}),
    ("a place is left empty: there are `max_requests` places", {"places": -1}),
    ("the places are not looked at", {"places": 1000}),
    ("`max_requests` are begun beside those who run already; they count too", {"counts": "new"}),
    ("a request is begun although no budget is left for it", {"broke": True}),
    ("a request begins only where the budget is enough for all of its text; it can begin with a chunk, and a prompt "
     "larger than the budget has no other way", {"whole": True}),
    ("a request is begun and not planned in the same step: plan_next does that", {"plans": False}),
    ("the order is not that of planner.waiting: the last one begins first", {"order": lambda waiting: waiting[-1]}),
    ("the order is not that of planner.waiting: the shortest one begins first",
     {"order": lambda waiting: min(waiting, key=lambda one: one.length)}),
    ("the order is not that of planner.waiting: the earliest arrival begins first, whatever the policy",
     {"order": lambda waiting: min(waiting, key=lambda one: one.arrival)}),
    ("the order is not that of planner.waiting: whoever is first by `seniority` begins first, which is the order of "
     "those who run", {"order": lambda waiting: min(waiting, key=lambda one: one.request_id)}),
    *[("the places and the budget are looked at only after the cache was asked: it may have thrown out what others "
       "could use, for one that cannot begin", {"late": how}) for how in ("released", "kept")],
    ("who does not fit has begun already: begin only once the memory is reserved", {"begins": "first"}),
    *[(_LATE, {"plans": f"after{more}"}) for more in ("", ", if all fit", ", guarded", ", if all fit, guarded")],
    ("every error is caught: one that is no OutOfMemory means that something is broken, and has to come out",
     {"catches": True}),
    ("only one request begins; go on while there are places, budget, and memory", {"most": 1}),
    ("every second one is left out: begin takes a request out of the queue while the loop goes over it",
     {"every_second": True}),
    ("planner.begin is not told how many tokens were taken over", {"hits": lambda hits: 0}),
    (_NOW, {"now": lambda now: 0.0}),
    ("somebody who runs gives way to one who waits: reserve the memory in the cache, without make_room",
     {"pushes": True}),
    ("planner.begin is not called: the request is still in the queue, and holds memory", {"begins": False}),
]  # fmt: skip


def _admits(**wrong: Any) -> Callable[[Scene], NamedParts]:
    """The loop, with mistakes switched on."""

    def run(planner: Planner, now: float) -> None:
        left = list(planner.waiting)
        before = len(planner.running) if wrong.get("counts") == "new" else 0
        begun, late = 0, list[Any]()
        while left and begun < wrong.get("most", 1000):
            full = len(planner.running) - before >= planner.max_requests + wrong.get("places", 0)
            full = full or (planner.budget <= 0 and not wrong.get("broke"))
            if full and not wrong.get("late"):
                break
            request = wrong.get("order", lambda waiting: waiting[0])(left)
            skipped = left.index(request) + 1
            left.remove(request)
            if _let_in(planner, request, now, wrong, full):
                begun += 1
                late += [request] * (wrong.get("plans", True) is not True and bool(wrong["plans"]))
                del left[skipped - 1 : skipped - 1 + bool(wrong.get("every_second"))]
            elif not wrong.get("skips"):
                late = [] if "if all fit" in str(wrong.get("plans")) else late
                break
        for request in late:
            if planner.budget > 0 or "guarded" not in wrong["plans"]:
                token_by_token(planner, request)

    return partial(_admitted, run)


def _let_in(planner: Planner, request: Any, now: float, wrong: dict[str, Any], full: bool) -> bool:
    if wrong.get("whole") and planner.budget < request.length:
        return False
    number, cache, matches = request.request_id, planner.cache, wrong.get("matches")
    text = request.prompt_token_ids if matches == "prompt" else request.ids
    hits = 0 if matches == "never" else cache.match_prefix(number, text)
    asked = wrong.get("asks", lambda request, hits, budget: request.length - hits)(request, hits, planner.budget)
    begins = wrong.get("begins", True)
    caught: type[Exception] = Exception if wrong.get("catches") else OutOfMemory
    start = partial(planner.begin, request, wrong.get("now", lambda now: now)(now))
    if begins == "first":
        start(wrong.get("hits", lambda hits: hits)(hits))
    while True:
        try:
            cache.reserve(number, asked)
            break
        except caught:
            if wrong.get("pushes") and planner.running:
                planner.preempt(max(planner.running, key=planner.seniority))
                continue
            if wrong.get("releases", True):
                cache.release(number)
            return False
    if full:
        if wrong["late"] == "released":
            cache.release(number)
        return False
    if begins is True:
        start(wrong.get("hits", lambda hits: hits)(hits))
    if wrong.get("plans", True) is True:
        planner.running += [request] * (not begins)
        token_by_token(planner, request)
        planner.running[:] = [one for one in planner.running if one is not request or begins]
    return True


def _about_scene(got: NamedParts, want: NamedParts) -> str:
    """What is true of the shown case, whatever the others are: who is known to the cache, and when requests begin."""
    known = set(got["known to the cache"]) - set(want["known to the cache"])
    if known and known <= {*got["who waits, in this order"]} and got["who began"] == want["who began"]:
        return _KEEPS
    sides = [[re.sub(r" at \S+ s,", "", line) for line in side["who began"]] for side in (got, want)]
    return _NOW if sides[0] == sides[1] and got["who began"] != want["who began"] else ""


def _about_admission(error: BaseException, case: Case) -> str:
    if isinstance(error, OutOfMemory):
        return "cache.reserve raises this where there is too little memory: nobody else begins in this step then"
    if isinstance(error, ValueError) and "not in list" in str(error):
        return "a request is taken out of planner.waiting before it begins: planner.begin takes it out itself"
    if isinstance(error, ValueError) and "in the cache already" in str(error):
        return (
            "the same request is looked up in the cache twice: one that begins leaves the queue (planner.begin), and "
            "one that does not fit ends the admission"
        )
    if isinstance(error, ValueError) and "empty" in str(error):
        return (
            "make_room takes memory from those who run, and this request waits: reserve in the cache itself, and catch "
            "OutOfMemory"
        )
    return about_names(error)
