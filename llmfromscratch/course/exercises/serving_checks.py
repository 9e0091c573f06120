"""The check of chapter 4's loop: whole runs with a model that reads every text back, against known answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from llmfromscratch.batch import Batch
from llmfromscratch.course.calling import Case
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.serving_stage import (
    Endless,
    TextCache,
    about_names,
    engine,
    new_request,
    next_token,
    read_back,
)

_MOST_STEPS = 120
_PASSES = "forward passes in a step, at most"


@dataclass(frozen=True)
class Service:
    """What is to be served: (prompt, tokens asked for) of each request, and by which scheduler."""

    rows: tuple[tuple[int, int], ...]
    num_blocks: int = 64
    places: int = 4
    budget: int = 16
    static: bool = False
    end_tokens: tuple[int, ...] = ()

    @property
    def told(self) -> str:
        """In words."""
        rows = ", ".join(f"a prompt of {prompt} that gets {tokens}" for prompt, tokens in self.rows)
        kind = "static batches" if self.static else f"continuous, {self.budget} tokens a step"
        more = f", {self.num_blocks} blocks of 4" if self.num_blocks < 20 else ""
        if any(sum(row) > 4 * self.num_blocks for row in self.rows):
            more += ", which is too little for all of an answer: its request is aborted while a step is planned"
        ends = f", end tokens {self.end_tokens}" if self.end_tokens else ""
        return f"{rows}; {kind}, {self.places} place{'s' * (self.places > 1)}{more}{ends}"

    def opened(self) -> tuple[TextCache, Any, list[Any]]:
        """A new cache, the engine's scheduler over it, and the requests."""
        cache = TextCache(self.num_blocks)
        if self.static:
            planner = engine().StaticScheduler(cache, self.places)
        else:
            planner = engine().ContinuousScheduler(cache, self.places, self.budget)
        return cache, planner, [new_request(number, *row) for number, row in enumerate(self.rows)]


_SERVICES = (
    Service(((3, 1),)),
    Service(((3, 3),)),
    Service(((3, 2), (2, 4))),
    Service(((5, 2),), budget=2),
    Service(((5, 4), (9, 2)), budget=4),
    Service(((3, 2), (3, 2)), places=1),
    Service(((3, 2), (2, 4)), static=True),
    Service(((4, 3), (2, 1), (6, 5), (3, 2), (1, 4)), static=True, places=3),
    Service(((3, 8),), end_tokens=(1,)),
    Service(((3, 8), (4, 8), (2, 8), (6, 8)), end_tokens=(1, 4), places=3),
    Service(((3, 3),), end_tokens=(1,)),
    Service(((3, 9),), num_blocks=2),
    Service(((6, 7), (6, 7)), num_blocks=5, budget=8),
    Service(((6, 8), (5, 9), (7, 6)), num_blocks=6, budget=3),
    Service(tuple((1 + 7 * n % 11, 1 + 5 * n % 8) for n in range(12)), num_blocks=12, places=5, budget=7),
)


def check_serve(serve: Callable[..., int]) -> None:
    """Against the same loop without a model: the next token of a text is known."""
    compare(
        partial(_served, serve),
        partial(_served, _without_model),
        [Case(service.told, service) for service in _SERVICES],
        expected="every request with the answer it gets alone, at the right times, and finished when it has it",
        mistakes=combined(_serving, _MISTAKES, at_once=2),
        diagnose=_about_step,
        explain=_about_parts,
    )


class _Watched:
    """A scheduler that stops a loop without end, and a model that counts its steps."""

    def __init__(self, planner: Any):
        self._planner, self._left = planner, _MOST_STEPS
        self.finished: list[Any] = []
        self.passes, self.most_passes = 0, 1  # of the network, in this step and in any

    def schedule(self, now: float) -> list[Any]:
        """The planner's, for as long as a run may last."""
        self._left -= 1
        if self._left < 0:
            raise Endless
        self.passes = 0
        return self._planner.schedule(_in_seconds(now))

    def finish(self, request: Any, reason: str) -> None:
        """The planner's."""
        self.finished.append(request)
        self._planner.finish(request, reason)

    def network(self, batch: Batch, cache: TextCache) -> Tensor:
        """The model; how often it is called is counted."""
        self.passes += 1
        self.most_passes = max(self.passes, self.most_passes)
        return read_back(batch, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def _served(serve: Callable[..., Any], service: Service) -> NamedParts:
    """What became of every request, by the names a learner knows."""
    cache, planner, requests = service.opened()
    watched = _Watched(planner)
    try:
        steps = serve(watched.network, cache, watched, requests, service.end_tokens)
    except Endless:
        steps = f"no end after {_MOST_STEPS} steps"
    except ValueError as error:
        if any(request.finish_reason in ("stop", "length") and request not in watched.finished for request in requests):
            error.add_note(_UNTOLD)
        raise
    parts = NamedParts()
    for request in requests:
        name = f"request {request.request_id}"
        few = request.token_ids[:20]
        parts[f"{name}: tokens"] = few
        parts[f"{name}: why it ended"] = request.finish_reason or "it has not"
        clock = (request.first_scheduled, request.first_token, request.last_token)
        parts[f"{name}: begun, first token, last token at"] = tuple(map(_in_seconds, clock))
    parts["the number of steps"] = steps
    parts[_PASSES] = watched.most_passes
    return parts


def _about_step(got: NamedParts, want: NamedParts) -> str:
    """What is true of the shown case, whatever the others are."""
    if got["the number of steps"] is None:
        return _NOT_RETURNED
    passes_alone = got[_PASSES] != want[_PASSES] and {**got, _PASSES: 0} == {**want, _PASSES: 0}
    return "the weights are read once for each pass; put all of a step into one batch" if passes_alone else ""


def _in_seconds(time: Any) -> Any:
    """A time as a float; a clock that counts in whole numbers is as good. What is no number stays what it is."""
    return float(time) if isinstance(time, int) and not isinstance(time, bool) else time


def _without_model(
    network: Any, cache: TextCache, plan: Any, requests: Sequence[Any], end_tokens: Collection[int]
) -> int:
    """The oracle: stores what is planned and takes each next token from the request's own text."""
    for request in requests:
        plan.add(request)
    step = 0
    while True:
        work = plan.schedule(float(step))
        if not work:
            return step
        step += 1
        for one in work:
            cache.write(one.request.request_id, one.start, one.request.ids[one.start : one.start + one.tokens])
        for request in [one.request for one in work if one.completes]:
            token = next_token(request.ids)
            request.record(token, float(step))
            full = len(request.token_ids) == request.params.max_tokens
            if token in end_tokens or full:
                plan.finish(request, "stop" if token in end_tokens else "length")


_NOT_RETURNED = "the number of steps is not returned"
_WITHOUT_IDS = (
    "a piece of work without ids was put into the batch: in a static batch a row that has ended has 0 tokens, and the "
    "newest token stands in request.ids, not in the prompt"
)
_UNTOLD = (
    "nobody told the scheduler that a request has ended: plan.finish does, and sets the reason; until then the request "
    "keeps its place and its memory, and is planned again"
)
_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("each request has its own pass: the weights are read once for each; put all of a step into one batch",
     {"passes": "each"}),
    (_UNTOLD, {"finishes": "by hand"}),
    (_UNTOLD, {"finishes": "by hand", "exactly": True}),
    (_WITHOUT_IDS, {"unfiltered": True}),
    ("the logits are paired with all of the work, and a row that has ended has none: whoever stands behind it gets "
     "another one's", {"pairs": "all"}),
    ("the loop ends only when every request has ended: one that can never go on is aborted while a step is planned, "
     "and that step is empty. Repeat until the plan is empty", {"until": "ended"}),
    ("a token is recorded although the prompt is not complete: a chunk's last logits are no answer; `completes` tells",
     {"completes": lambda one: not one.request.ended}),
    ("a token is recorded as soon as the prompt is complete; after a preemption the answer has to be computed again "
     "too, and `completes` tells when all of it is",
     {"completes": lambda one: not one.request.ended and one.start + one.tokens >= len(one.request.prompt_token_ids)}),
    ("everything from `start` on is computed; a chunk ends after `tokens`", {"ids": lambda ids, one: ids[one.start :]}),
    ("the ids are taken from the front of the text; the chunk begins at `start`",
     {"ids": lambda ids, one: ids[: one.tokens]}),
    ("the ids end at `tokens`; they end at start + tokens", {"ids": lambda ids, one: ids[one.start : one.tokens]}),
    ("the newest ids are taken; the chunk begins at `start`", {"ids": lambda ids, one: ids[-one.tokens :]}),
    ("one id too few is computed", {"ids": lambda ids, one: ids[one.start : one.start + one.tokens - 1] or ids[-1:]}),
    ("the token is put into token_ids by hand; request.record keeps the times and the state as well",
     {"by_hand": True}),
    ("the end token is not recorded; it belongs to the answer, and decoding leaves it out later", {"unsaid": True}),
    ("`end_tokens` is not used", {"deaf": True}),
    ("`end_tokens` is looked at only once max_tokens is reached", {"late_end": True}),
    ("the last token that was asked for may be an end token too; then the reason is \"stop\"", {"length_first": True}),
    ("the reason is the same for both ends", {"reason": "stop"}),
    ("the reason is the same for both ends", {"reason": "length"}),
    ("one token too few: finished when one is still missing", {"extra": -1}),
    ("one token too few: finished when one is still missing", {"extra": -1, "exactly": True}),
    ("one token too many: finished after max_tokens + 1", {"extra": 1}),
    ("the prompt is counted in max_tokens; only the answer is", {"counts": lambda request: request.length}),
    ("nobody is finished: a request keeps its place and its memory after its last token, and goes on",
     {"finishes": "never"}),
    ("a request that ends with \"length\" is never finished: it keeps its place and its memory, and goes on",
     {"finishes": "stop"}),
    ("a request with its end token is never finished: it keeps its place and its memory, and goes on",
     {"finishes": "length"}),
    ("a request with its end token is never finished: it keeps its place and its memory, and goes on",
     {"finishes": "length", "exactly": True}),
    ("the tokens of step n are recorded at time n; they are there at n + 1, when it is done",
     {"recorded": lambda step: step}),
    ("step n is planned at time n + 1; the first one, number 0, is planned at 0", {"planned": lambda step: step + 1}),
    ("the clock begins at 1; the first step is planned at time 0",
     {"planned": lambda step: step + 1, "recorded": lambda step: step + 2}),
    ("every step is planned at time 0; the time is the number of steps so far", {"planned": lambda step: 0}),
    ("the clock stands still at 0", {"planned": lambda step: 0, "recorded": lambda step: 0}),
    ("the requests are served one after the other; add all of them before the first step", {"one_by_one": True}),
    ("every request gets the first row's logits; each part has its own row", {"row": lambda logits, n: logits[0]}),
    ("every request gets the last row's logits; each part has its own row", {"row": lambda logits, n: logits[-1]}),
    ("the smallest logit is taken; asked for is the largest", {"pick": lambda row: row.argmin()}),
    ("the largest logit itself is recorded; asked for is its place, the token", {"pick": lambda row: row.max()}),
    ("the last, empty plan is counted as a step", {"returns": lambda steps, requests: steps + 1}),
    ("the number of steps is asked for; this is the number of tokens",
     {"returns": lambda steps, requests: sum(len(request.token_ids) for request in requests)}),
    ("the clock comes out, a float; asked for is the number of steps, an int",
     {"returns": lambda steps, requests: float(steps)}),
    ("the requests come out; asked for is the number of steps", {"returns": lambda steps, requests: requests}),
    (_NOT_RETURNED, {"returns": lambda steps, requests: None}),
]  # fmt: skip


def _serving(**wrong: Any) -> Callable[[Service], Any]:
    return partial(_served, partial(_serve_wrongly, wrong))


def _serve_wrongly(
    wrong: dict[str, Any],
    network: Callable[[Batch, TextCache], Tensor],
    cache: TextCache,
    plan: Any,
    requests: Sequence[Any],
    end_tokens: Collection[int],
) -> Any:
    """The loop with mistakes switched on."""
    groups = [[request] for request in requests] if wrong.get("one_by_one") else [requests]
    steps = 0
    for group in groups:
        for request in group:
            plan.add(request)
        while True:
            if wrong.get("until") == "ended" and all(request.ended for request in group):
                break
            work = plan.schedule(float(wrong.get("planned", lambda step: step)(steps)))
            if not work and wrong.get("until") != "ended":
                break
            steps += 1
            todo = [one for one in work if one.tokens or wrong.get("unfiltered")]
            chunk = wrong.get("ids", lambda ids, one: ids[one.start : one.start + one.tokens])
            parts = [(one.request.request_id, chunk(one.request.ids, one), one.start) for one in todo]
            batches = [[part] for part in parts] if wrong.get("passes") == "each" else [parts]
            logits = [row for batch in batches for row in network(Batch.of(batch), cache)]
            now = float(wrong.get("recorded", lambda step: step + 1)(steps - 1))
            for number, one in enumerate(work[: len(logits)] if wrong.get("pairs") == "all" else todo):
                if wrong.get("completes", lambda one: one.completes)(one):
                    row = wrong.get("row", lambda logits, n: logits[n])(logits, number)
                    _take(
                        wrong, plan, one.request, int(wrong.get("pick", lambda row: row.argmax())(row)), now, end_tokens
                    )
    return wrong.get("returns", lambda steps, requests: steps)(steps, requests)


def _take(wrong: dict[str, Any], plan: Any, request: Any, token: int, now: float, end_tokens: Collection[int]) -> None:
    stops = token in end_tokens and not wrong.get("deaf")
    if wrong.get("by_hand"):
        request.token_ids.append(token)
    elif not (stops and wrong.get("unsaid")):
        request.record(token, now)
    count = wrong.get("counts", lambda request: len(request.token_ids))(request)
    most = request.params.max_tokens + wrong.get("extra", 0)
    full = count == most if wrong.get("exactly") else count >= most
    stops = stops and (full or not wrong.get("late_end"))
    if not (stops or full):
        return
    reason = "length" if not stops or (full and wrong.get("length_first")) else "stop"
    if wrong.get("finishes") == "by hand":
        request.end(wrong.get("reason", reason))
    elif wrong.get("finishes", reason) == reason:
        plan.finish(request, wrong.get("reason", reason))


def _about_parts(error: BaseException, case: Case) -> str:
    """What an error means that comes from `Batch.of`, or from a zip of unequal lengths."""
    if _UNTOLD in getattr(error, "__notes__", ()):
        return _UNTOLD
    if isinstance(error, ValueError) and "no new tokens" in str(error):
        return _WITHOUT_IDS
    if isinstance(error, ValueError) and "zip()" in str(error):
        return "there are as many rows of logits as parts in the batch: go through those that you put into it"
    return about_names(error)
