"""The checks of chapter 4's continuous scheduler: who goes first, who gives way, what is planned.

Each function plays on a planner made by hand first, where every mistake has its own result; then it stands in the
engine's scheduler, and whole runs with tiny caches must keep what a scheduler promises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llmfromscratch.course.calling import Case
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.planner_runs import check_runs
from llmfromscratch.course.exercises.serving_stage import (
    ENDLESS,
    Endless,
    Fault,
    Planner,
    Row,
    Scene,
    about_names,
    counted,
    engine,
    new_request,
    plan_told,
)
from llmfromscratch.errors import OutOfMemory

# ---- 4.5 who goes first ------------------------------------------------------------------------------------------


def check_first_come(policy_class: Callable[..., Any]) -> None:
    """Against the rule in two sums, for requests at several times and with several priorities."""
    times = ((2.0, 0, 10.0), (12.0, 1, 10.0), (0.0, 1, 10.0), (12.0, 2, 10.0), (7.5, -1, 4.0), (30.0, 3, 0.5),
             (3.25, 1, 0.0), (100.0, 7, 12.5))  # fmt: skip
    compare(
        partial(_key_of, policy_class),
        lambda arrival, priority, ageing: arrival - sum([ageing] * priority) + sum([ageing] * -priority),
        [
            Case(f"arrival at {arrival:g} s, priority {priority}, ageing {ageing:g} s", arrival, priority, ageing)
            for arrival, priority, ageing in times
        ],
        expected="the time of arrival, earlier by `ageing` seconds for each level of priority",
        mistakes=[
            ("the sign is turned round: the smallest key goes first, so a higher priority has to make it smaller",
             lambda arrival, priority, ageing: arrival + priority * ageing),
            ("`ageing` is not used: a level is worth one second here",
             lambda arrival, priority, ageing: arrival - priority),
            ("a level is always worth 10 seconds; it is worth `self.ageing`",
             lambda arrival, priority, ageing: arrival - priority * 10.0),
            ("the priority is not used", lambda arrival, priority, ageing: arrival),
            ("the arrival is not used: among equals nobody is first, and whoever waits does not grow older",
             lambda arrival, priority, ageing: -priority * ageing),
            ("the priority alone decides, so the others starve; the times have to count beside it",
             lambda arrival, priority, ageing: (-priority, arrival)),
            ("the priority alone decides, so the others starve; the times have to count beside it",
             lambda arrival, priority, ageing: -float(priority)),
            ("the newest would go first: an earlier arrival has to give a smaller key",
             lambda arrival, priority, ageing: priority * ageing - arrival),
            ("the newest would go first: an earlier arrival has to give a smaller key",
             lambda arrival, priority, ageing: -arrival - priority * ageing),
            ("`ageing` is taken off once, whatever the priority; it counts for each level",
             lambda arrival, priority, ageing: arrival - ageing * (priority > 0)),
            ("`ageing` is taken off of everyone; it counts for each level of priority",
             lambda arrival, priority, ageing: arrival - ageing),
            ("the priority is divided by `ageing`; a level is worth that many seconds",
             lambda arrival, priority, ageing: arrival - priority / ageing),
        ],
        explain=lambda error, case: about_names(error),
        what="the key",
    )  # fmt: skip


def _key_of(policy_class: Callable[..., Any], arrival: float, priority: int, ageing: float) -> Any:
    key = policy_class(ageing=ageing).key(new_request(1, 3, 4, arrival, priority))
    return float(key) if isinstance(key, int) and not isinstance(key, bool) else key  # whole seconds are as good


# ---- 4.6 make room -----------------------------------------------------------------------------------------------


def check_make_room(make_room: Callable[..., bool]) -> None:
    """Against counting the blocks that come back; then whole runs."""
    young = Row(3, 4, 1, 4, arrival=1.0)
    middle = Row(7, 3, 1, 3, arrival=2.0)
    old = Row(5, 6, 2, 7, arrival=3.0)
    compare(
        partial(_roomed, make_room),
        partial(_roomed, _by_counting),
        [
            _room_case(5, 5, 1, 2, old),
            _room_case(3, 5, 1, 5, old),
            _room_case(3, 5, 1, 2, young, old),
            _room_case(4, 5, 1, 5, old, middle, young),
            _room_case(4, 5, 1, 5, young, old, middle),
            _room_case(4, 5, 1, 9, middle, old, young),
            _room_case(4, 7, 2, 2, middle, old, young),
            _room_case(4, 7, 1, 6, old, young, middle),
            _room_case(4, 3, 1, 2, middle, young, old),
            _room_case(4, 3, 1, 6, young, middle, old),
            _room_case(2, 5, 1, 9, old),
            _room_case(4, 5, 1, 2, young, old, faulty=True),
            _room_case(6, 7, 1, 6, Row(9, 4, 0, 0, 4), middle, Row(4, 9, 0, 4, 4), old, elders=(7, 5, 4, 9)),
        ],
        expected="memory for the request, taken from the youngest by `seniority` one after the other, and True; or, "
        "where the request is itself the youngest of those left, False",
        mistakes=combined(_made, _ROOM_MISTAKES, at_once=2),
        explain=_about_memory,
    )  # fmt: skip
    check_runs("make_room", make_room)


def _room_case(
    num_blocks: int,
    number: int,
    step: int,
    tokens: int,
    *running: Row,
    elders: tuple[int, ...] = (5, 7, 3),
    faulty: bool = False,
) -> Case:
    ranked = tuple(n for n in elders if any(row.number == n for row in running))
    scene = Scene(num_blocks, running, (), ranked, faulty=faulty)
    ranks = ", ".join(map(str, scene.elders))
    who = f"; the most senior first: {ranks}" if len(running) > 1 else ""
    return Case(f"{scene.told}{who}; request {number} asks for {tokens} more", scene, number, tokens)


def _roomed(make_room: Callable[..., Any], scene: Scene, number: int, tokens: int) -> NamedParts:
    planner = Planner(scene)
    request = planner.find(number)
    said: Any
    try:
        said = make_room(planner, request, tokens)
    except Endless:
        said = ENDLESS
    except Fault:
        said = "the ValueError of the cache comes out"
    return NamedParts(
        {
            "who gave way, in this order": planner.gave_way[:8],
            "the answer": said,
            "blocks held": planner.cache.held(),
            "who runs": sorted(one.request_id for one in planner.running),
            "who waits": sorted(one.request_id for one in planner.waiting),
        }
    )


def _by_counting(planner: Planner, request: Any, tokens: int) -> bool:
    """Counts beforehand how many have to go: each one's blocks come back."""
    blocks = {one: len(planner.cache.blocks.get(one.request_id, ())) for one in planner.running}
    needed = -(-(planner.cache.length(request.request_id) + tokens) // 4) - blocks[request]
    needed = 0 if planner.scene.faulty else needed
    youngest_first = sorted(planner.running, key=planner.seniority, reverse=True)
    gone: list[Any] = []
    while needed > planner.cache.free + sum(blocks[one] for one in gone) and request not in gone:
        gone.append(youngest_first[len(gone)])
    for one in gone:
        planner.preempt(one)
    if request in gone:
        return False
    planner.cache.reserve(request.request_id, tokens)
    return True


_RETURNS_NOTHING = (
    "cache.reserve returns nothing, so there is no answer to look at: where it returns the memory is there, and where "
    "there is too little it raises OutOfMemory"
)
_ROOM_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the oldest gives way; `seniority` is smallest for who may keep its memory longest",
     {"last": lambda p, r: min(p.running, key=p.seniority)}),
    ("the first of `running` gives way; the list is in no order, `seniority` tells who is the youngest",
     {"last": lambda p, r: p.running[0]}),
    ("the last of `running` gives way; the list is in no order, `seniority` tells who is the youngest",
     {"last": lambda p, r: p.running[-1]}),
    ("the newest arrival gives way; the order is that of `seniority`, which counts priority too",
     {"last": lambda p, r: max(p.running, key=lambda one: one.arrival)}),
    ("the highest number gives way; the order is that of `seniority`",
     {"last": lambda p, r: max(p.running, key=lambda one: one.request_id)}),
    ("the longest gives way; the order is that of `seniority`",
     {"last": lambda p, r: max(p.running, key=lambda one: one.length)}),
    ("the request that asks always gives way itself, although younger ones run", {"last": lambda p, r: r}),
    ("the request that asks never gives way itself, so older ones lose their memory to it",
     {"last": lambda p, r: max([one for one in p.running if one is not r] or [r], key=p.seniority)}),
    ("the request that asks never gives way itself, so older ones lose their memory to it",
     {"last": lambda p, r: max([one for one in p.running if one is not r], key=p.seniority)}),
    ("the answer is False at once; somebody younger may give way first", {"turns": 0}),
    ("only one gives way, though one may not be enough: ask for the memory again, and again somebody gives way",
     {"turns": 1}),
    ("after somebody gave way the memory is not asked for again: True is said, and nothing is reserved",
     {"again": False}),
    ("all who are younger give way at once; ask for the memory again after each", {"all": True}),
    ("the request gave way itself, and the loop goes on: there its answer is False", {"stops": "never"}),
    ("the request gave way itself, and True is said: it has no memory now", {"stops": True}),
    ("the request gave way itself, and nothing is returned: there the answer is False", {"stops": None}),
    ("there is memory, and nothing is returned: there the answer is True", {"done": None}),
    ("the answers are turned round: True means that the memory is there", {"stops": True, "done": False}),
    ("memory is reserved for one token too few", {"tokens": lambda tokens, request, stored: tokens - 1}),
    ("memory is reserved for one token, whatever was asked for", {"tokens": lambda tokens, request, stored: 1}),
    ("memory for the whole text is reserved on top of what is stored; asked for are `tokens` more",
     {"tokens": lambda tokens, request, stored: request.length}),
    ("memory for what is stored is reserved once more; reserve is told how many tokens are to come, `tokens`",
     {"tokens": lambda tokens, request, stored: stored + tokens}),
    ("memory for the whole text is reserved on top of what is stored; asked for are `tokens` more",
     {"tokens": lambda tokens, request, stored: request.length + tokens}),
    (_RETURNS_NOTHING, {"reads": "not"}),
    (_RETURNS_NOTHING, {"reads": "if"}),
    ("every error is caught: one that is no OutOfMemory means that something is broken, and has to come out; until "
     "then nobody gives way for it", {"catches": True}),
    ("the request is the last itself, and keeps its memory: it gives way like any other, by planner.preempt, and then "
     "the answer is False", {"yields": False}),
    ("the request is the only one left, and keeps its memory: it gives way like any other, by planner.preempt, and "
     "then the answer is False", {"yields": "others"}),
    ("the memory is released, but nobody tells the planner: planner.preempt does both", {"way": "release"}),
    ("who gives way is taken out of `running` by hand, so planner.preempt finds no memory to take; it does both",
     {"way": "remove first"}),
    ("who gives way stands in the queue twice: planner.preempt has put it there already", {"way": "twice"}),
    ("nobody gives way, and the loop goes on: planner.preempt takes the memory of the one that was found",
     {"way": "none"}),
    ("who gives way is taken out of `running` and keeps its memory; planner.preempt does both", {"way": "remove"}),
]  # fmt: skip


def _made(
    last: Callable[[Planner, Any], Any] = lambda planner, request: max(planner.running, key=planner.seniority),
    tokens: Callable[[int, Any, int], int] = lambda tokens, request, stored: tokens,
    **wrong: Any,
) -> Callable[..., NamedParts]:
    """The loop, with mistakes switched on."""
    caught = () if wrong.get("reads") == "not" else Exception if wrong.get("catches") else OutOfMemory

    def run(planner: Planner, request: Any, asked: int) -> Any:
        for turn in range(200):
            stored = planner.cache.length(request.request_id)
            try:
                planner.cache.reserve(request.request_id, tokens(asked, request, stored))
                if wrong.get("reads") is None:
                    return wrong.get("done", True)
                if wrong["reads"] == "not" and request in _give_way(planner, request, last(planner, request), wrong):
                    return False
            except caught:
                if turn == wrong.get("turns"):
                    return False
                if _keeps(planner, request, wrong.get("yields")):
                    return False
                gone = _give_way(planner, request, last(planner, request), wrong)
                if request in gone and wrong.get("stops") != "never":
                    return wrong.get("stops", False)
                if wrong.get("again") is False:
                    return True
        raise Endless

    return partial(_roomed, run)


def _keeps(planner: Planner, request: Any, how: Any) -> bool:
    """Whether a request that does not yield as it should keeps its memory and gives up."""
    if how == "others":
        return len(planner.running) == 1
    return how is False and max(planner.running, key=planner.seniority) is request


def _give_way(planner: Planner, request: Any, chosen: Any, wrong: dict[str, Any]) -> list[Any]:
    younger = [one for one in planner.running if planner.seniority(one) > planner.seniority(request)]
    gone = sorted(younger, key=planner.seniority, reverse=True) if wrong.get("all") and younger else [chosen]
    for one in gone:
        if wrong.get("way") == "release":
            planner.cache.release(one.request_id)
        if wrong.get("way") in ("remove", "remove first"):
            planner.running.remove(one)
        if wrong.get("way") in (None, "remove first", "twice"):
            planner.preempt(one)
        planner.waiting += [one] * (wrong.get("way") == "twice")
    return gone


def _about_memory(error: BaseException, case: Case) -> str:
    if isinstance(error, OutOfMemory):
        return "cache.reserve raises this where there is too little memory: catch it, and let somebody give way"
    if isinstance(error, ValueError) and ("empty" in str(error) or "not in list" in str(error)):
        return "nobody is left to give way: the request may be the last itself, and gives way; then the answer is False"
    return about_names(error)


# ---- 4.7 plan ----------------------------------------------------------------------------------------------------


def check_plan_next(plan_next: Callable[..., None]) -> None:
    """Against dealing out the budget token by token; then whole runs."""
    planned = Row(4, 6, 1, 6, 1)
    compare(
        partial(_planned, plan_next),
        partial(_planned, token_by_token),
        [
            _plan_case(9, 2, Row(2, 3)),
            _plan_case(9, 2, Row(2, 8)),
            _plan_case(9, 2, Row(2, 9), budget=3),
            _plan_case(9, 2, Row(2, 9, stored=3)),
            _plan_case(9, 2, Row(2, 9, stored=3), budget=4),
            _plan_case(9, 2, Row(2, 5, 1, 5)),
            _plan_case(9, 2, Row(2, 5, 4, 4), budget=9),
            _plan_case(9, 2, Row(2, 5, 4), budget=6),
            _plan_case(9, 2, planned, Row(2, 9, stored=4), budget=5),
            _plan_case(2, 2, Row(2, 5, 4, 8), elders=(2,)),
            _plan_case(3, 2, Row(1, 4, 0, 4), Row(2, 5, 4, 8), elders=(1, 2)),
            _plan_case(4, 1, Row(1, 8, 1, 8), planned, elders=(1, 4)),
            _plan_case(5, 1, Row(1, 20, 1, 12), planned, elders=(1, 4), budget=6),
        ],
        expected="the tokens that are not in the cache yet, as many as the budget has, with memory for them: in "
        "planner.plan and off planner.budget; or, where there is no memory, nothing planned",
        mistakes=combined(_plans, _PLAN_MISTAKES, at_once=2),
        diagnose=lambda got, want: _PADDED if ", padding" in str(got["planner.plan"]) else "",
        explain=_about_memory,
    )
    check_runs("plan_next", plan_next)


def _plan_case(num_blocks: int, number: int, *running: Row, elders: tuple[int, ...] = (), budget: int = 8) -> Case:
    scene = Scene(num_blocks, running, (), elders or tuple(row.number for row in running), budget)
    left = budget - sum(row.planned for row in running)
    told = f"{scene.told}; request {number} is to be planned, the budget has {counted(left)} left"
    return Case(told, scene, number)


def _planned(plan_next: Callable[..., Any], scene: Scene, number: int) -> NamedParts:
    planner = Planner(scene)
    try:
        plan_next(planner, planner.find(number))
    except Endless:
        planner.plan = {number: ENDLESS}
    return NamedParts(
        {
            "planner.plan": plan_told(planner.plan),
            "planner.budget": planner.budget,
            "who gave way": planner.gave_way[:8],
            "blocks held": planner.cache.held(),
        }
    )


def token_by_token(planner: Planner, request: Any) -> None:
    """Hands out the budget one by one, while something is left to compute."""
    start, tokens = len(planner.cache.texts.get(request.request_id, [])), 0
    for _ in range(planner.budget):
        tokens += start + tokens < len(request.prompt_token_ids) + len(request.token_ids)
    if _by_counting(planner, request, tokens):
        planner.plan[request.request_id] = engine().Work(request, start, tokens)
        planner.budget -= tokens


_PADDED = "padding is given; only a static batch is a rectangle"
_PLAN_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the budget is not looked at: the whole rest is planned at once, and everybody else waits for it",
     {"tokens": lambda left, budget, request: left}),
    ("planner.budget is not lowered, so the next one gets as much again", {"spent": lambda tokens: 0}),
    ("planner.budget is lowered by 1; the work takes more of it", {"spent": lambda tokens: 1}),
    ("planner.budget is set to 0 although something of it is left", {"spent": "all"}),
    ("the budget that came back when somebody planned gave way is lost: take the tokens off what planner.budget is by "
     "then", {"spent": "old"}),
    ("one token is planned for a request that has some of its answer; after a preemption its whole text has to be "
     "computed again", {"tokens": lambda left, budget, request: 1 if request.token_ids else min(left, budget)}),
    ("only one token is planned; a prompt may have as many as the budget has",
     {"tokens": lambda left, budget, request: min(1, budget)}),
    ("the budget is planned whether or not so many tokens are left", {"tokens": lambda left, budget, request: budget}),
    ("the number of tokens is reckoned from the whole text; those in the cache are done",
     {"tokens": lambda left, budget, request: min(request.length, budget)}),
    ("only the prompt is planned; the tokens of the answer have to be in the cache as well",
     {"tokens": lambda left, budget, request: min(max(0, left - len(request.token_ids)), budget)}),
    ("only the prompt is planned; the tokens of the answer have to be in the cache as well",
     {"tokens": lambda left, budget, request: min(left - len(request.token_ids), budget)}),
    ("a text that is larger than the budget is not planned at all, and never would be: plan the part that fits",
     {"tokens": lambda left, budget, request: left if left <= budget else None}),
    ("a text that is larger than the budget is not planned at all, and never would be: plan the part that fits",
     {"tokens": lambda left, budget, request: left if left <= budget else 0}),
    ("planner.max_batch_tokens is what a step has in all; planner.budget is what is left of it", {"in_all": True}),
    (_PADDED, {"padding": lambda tokens, left, budget: budget - tokens}),
    (_PADDED, {"padding": lambda tokens, left, budget: left - tokens}),
    ("the number of tokens is reckoned once more after make_room: the budget may be larger by then, and memory was "
     "asked for the smaller chunk", {"again": True}),
    ("memory for what is stored is asked for once more; make_room is told how many tokens are to come",
     {"asks": lambda tokens, left, request: request.length - left + tokens}),
    ("make_room is not asked: the work is planned without memory for it", {"asks": lambda tokens, left, request: 0}),
    ("the work is planned although make_room said that there is no memory", {"heeds": False}),
    ("memory is asked for the whole rest; this step needs it for its own tokens",
     {"asks": lambda tokens, left, request: left}),
    ("memory is asked for the whole text; this step needs it for its own tokens",
     {"asks": lambda tokens, left, request: request.length}),
    ("the work begins at 0; it begins at what is in the cache", {"start": lambda start, request: 0}),
    ("the work begins behind the prompt; it begins at what is in the cache",
     {"start": lambda start, request: len(request.prompt_token_ids)}),
    ("the work begins at the last token; it begins at what is in the cache",
     {"start": lambda start, request: request.length - 1}),
    ("the plan of the others is lost: add to planner.plan", {"keeps": False}),
    ("the work is not put into planner.plan", {"puts": "nothing"}),
    ("the work stands in planner.plan under the request itself; asked for is its number", {"puts": "by request"}),
    ("planner.plan holds the number of tokens; asked for is a Work", {"puts": "tokens"}),
    ("without memory nothing is planned, and yet the budget is lowered", {"pays": True}),
]  # fmt: skip


def _plans(
    tokens: Callable[[int, int, Any], int | None] = lambda left, budget, request: min(left, budget),
    start: Callable[[int, Any], int] = lambda start, request: start,
    asks: Callable[[int, int, Any], int] = lambda tokens, left, request: tokens,
    spent: Any = None,
    **wrong: Any,
) -> Callable[..., NamedParts]:
    """The formula, with mistakes switched on."""

    def run(planner: Planner, request: Any) -> None:
        stored = planner.cache.length(request.request_id)
        left, budget = request.length - stored, planner.max_batch_tokens if wrong.get("in_all") else planner.budget
        new = tokens(left, budget, request)
        if new is None:
            return
        asked = asks(new, left, request)
        roomy = not asked or _by_counting(planner, request, asked)
        if not roomy and wrong.get("heeds", True):
            planner.budget -= new if wrong.get("pays") else 0
            return
        new = min(left, planner.budget) if wrong.get("again") else new
        padding = wrong.get("padding", lambda tokens, left, budget: 0)(new, left, planner.budget)
        work = engine().Work(request, start(stored, request), new, padding)
        planner.plan = planner.plan if wrong.get("keeps", True) else {}
        puts = wrong.get("puts")
        if puts != "nothing":
            planner.plan[request if puts == "by request" else request.request_id] = new if puts == "tokens" else work
        if spent in ("all", "old"):
            planner.budget = 0 if spent == "all" else budget - new
        else:
            planner.budget -= new if spent is None else spent(new)

    return partial(_planned, run)
