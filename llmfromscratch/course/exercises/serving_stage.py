"""What chapter 4's checks play on: a cache that keeps texts, a model that reads them back, a planner made by hand.

The next token depends on every token of a text and on its place. So a token that is lost, doubled or written into
somebody else's text changes the answer, and `answer` says what each request must say, whoever is served beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory

VOCABULARY = 11
_LOST = 5  # stands where nobody has written
_PATIENCE = 100
ENDLESS = "a loop without end"  # what a result says of it


class Endless(BaseException):
    """Raised in a loop of the learner's that has gone on for too long; no Exception, so that no `except` takes it."""


def engine() -> ModuleType:
    """The engine's own scheduler module, a private copy."""
    return learner_engine.reference("scheduler")


def next_token(text: Sequence[int]) -> int:
    """What the model says after a text."""
    state = 0
    for place, token in enumerate(text):
        state = (3 * state + token + place + 1) % 97
    return state % VOCABULARY


def answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """What a request must get that asks for so many tokens."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


def prompt_of(number: int, tokens: int) -> list[int]:
    """Another prompt for each number, so that nothing is shared by accident."""
    return [(31 * number + 7 * place) % 89 for place in range(tokens)]


def new_request(
    number: int, prompt: Sequence[int] | int, max_tokens: int = 4, arrival: float = 0.0, priority: int = 0
) -> Any:
    """A request that has not begun; prompt: the ids, or how many."""
    ids = prompt_of(number, prompt) if isinstance(prompt, int) else list(prompt)
    params = learner_engine.reference("sampling").SamplingParams(max_tokens=max_tokens, priority=priority)
    return engine().Request(number, ids, params, arrival)


class TextCache:
    """A paged cache with the ids of tokens in the place of keys and values.

    Requests that begin alike share their full blocks for as long as one of them holds them.
    """

    def __init__(self, num_blocks: int, block_size: int = 4):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.capacity = num_blocks * block_size
        self.texts: dict[int, list[int]] = {}
        self.blocks: dict[int, list[object]] = {}  # of each request, in the order of its text
        self.known: dict[tuple[int, ...], object] = {}  # a beginning of full blocks, and the last of them
        self.refused, self.faulty = 0, False
        self.granted = (0, 0, 0)  # who reserved how much last, and how many times on end

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - len({id(block) for blocks in self.blocks.values() for block in blocks})

    def held(self) -> dict[str, int]:
        """How many blocks each request holds."""
        return {f"request {number}": len(blocks) for number, blocks in sorted(self.blocks.items()) if blocks}

    def room(self, request_id: int) -> int:
        """Tokens that the request's blocks can hold."""
        return len(self.blocks.get(request_id, ())) * self.block_size

    def length(self, request_id: int) -> int:
        """Tokens computed so far."""
        _check_number(request_id)
        return len(self.texts.get(request_id, ()))

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """Tokens at the front that lie in full blocks of others; never all of them."""
        end = 0
        while end + self.block_size < len(token_ids) and tuple(token_ids[: end + self.block_size]) in self.known:
            end += self.block_size
        return end

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Takes over what `find_prefix` finds. Raises ValueError for a request that is in the cache already."""
        _check_number(request_id)
        if request_id in self.blocks:
            raise ValueError(f"request {request_id} is in the cache already; release it first.")
        hits = self.find_prefix(token_ids)
        ends = range(self.block_size, hits + 1, self.block_size)
        self.blocks[request_id] = [self.known[tuple(token_ids[:end])] for end in ends]
        self.texts[request_id] = list(token_ids[:hits])
        return hits

    def reserve(self, request_id: int, tokens: int) -> None:
        """Blocks for `tokens` more. Raises OutOfMemory, changing nothing, when they are lacking; if faulty, Fault."""
        _check_number(request_id)
        mine = self.blocks.get(request_id, [])
        lacking = -(-(self.length(request_id) + tokens) // self.block_size) - len(mine)
        if lacking > self.free or self.faulty:
            self.refused += 1
            if self.refused > _PATIENCE:
                raise Endless
            if self.faulty:
                raise Fault("a block is held by two owners.")
            raise OutOfMemory(f"request {request_id} needs {lacking} more blocks; {self.free} are free.")
        self.blocks[request_id] = [*mine, *(object() for _ in range(lacking))]
        *last, times = self.granted
        self.granted = (request_id, tokens, times + 1 if last == [request_id, tokens] else 0)
        if times > _PATIENCE:
            raise Endless

    def write(self, request_id: int, start: int, ids: Sequence[int]) -> None:
        """Puts ids into a text from `start` on."""
        self.granted = (0, 0, 0)
        text = self.texts.get(request_id, [])[:start]
        self.texts[request_id] = text = [*text, *[_LOST] * (start - len(text)), *ids]
        for number, block in enumerate(self.blocks.get(request_id, []), 1):
            if number * self.block_size <= len(text):
                self.known.setdefault(tuple(text[: number * self.block_size]), block)

    def release(self, request_id: int) -> None:
        """Gives all blocks back; unknown requests are ignored."""
        _check_number(request_id)
        self.texts.pop(request_id, None)
        self.blocks.pop(request_id, None)
        held = {id(block) for blocks in self.blocks.values() for block in blocks}
        self.known = {text: block for text, block in self.known.items() if id(block) in held}


def _check_number(request_id: Any) -> None:
    if not isinstance(request_id, int):
        raise TypeError(f"the cache knows requests by their numbers, and got a {type(request_id).__name__}.")


class Fault(ValueError):
    """What a faulty cache raises: no lack of memory, so nobody has to give way for it."""


def read_back(batch: Batch, cache: TextCache) -> Tensor:
    """A "model": writes the batch into the cache and reads every text back. Logits [rows asked for, VOCABULARY]."""
    ids = batch.token_ids.tolist()
    found = []
    for span in batch.spans:
        cache.write(span.request_id, span.start, ids[span.rows])
        text = cache.texts[span.request_id]
        found += [next_token(text[:end]) for end in range(span.start + 1, span.start + span.length + 1)]
    wanted = torch.tensor(found, dtype=torch.int64)[batch.logit_rows]
    return torch.nn.functional.one_hot(wanted, VOCABULARY).float() * 3 - 1


# ---- a planner made by hand --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A request as a case names it: tokens of its prompt and of its answer so far, those stored, and those planned.

    shared: tokens at the front of its prompt that are those of request `like`. arrival: seconds.
    """

    number: int
    prompt: int
    answer: int = 0
    stored: int = 0
    planned: int = 0
    like: int = 0
    shared: int = 0
    arrival: float = 0.0

    @property
    def request(self) -> Any:
        """The request, with its answer so far."""
        own = prompt_of(self.number, self.prompt)
        ids = prompt_of(self.like, self.prompt)[: self.shared] + own[self.shared :]
        request = new_request(self.number, ids, 20, self.arrival)
        request.token_ids = answer(ids, self.answer)
        return request

    @property
    def told(self) -> str:
        """In words."""
        blocks = -(-(self.stored + self.planned) // 4)
        parts = [f"a prompt of {self.prompt}", f"{self.answer} of its answer" if self.answer else ""]
        parts += [f"its first {self.shared} as in request {self.like}" if self.shared else ""]
        parts += [f"{self.stored} in the cache" if self.stored else "", f"{self.planned} planned" * (self.planned > 0)]
        parts += [f"holds {blocks} block{'s' * (blocks > 1)}" if blocks else ""]
        return f"request {self.number} ({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class Scene:
    """How a planner stands. running, waiting: in the order of its lists; elders: numbers, the most senior first.

    faulty: from here on the cache raises another error than OutOfMemory.
    """

    num_blocks: int
    running: tuple[Row, ...] = ()
    waiting: tuple[Row, ...] = ()
    elders: tuple[int, ...] = ()
    budget: int = 8
    places: int = 4
    faulty: bool = False

    @property
    def told(self) -> str:
        """In words."""
        rows = [f"running: {' and '.join(row.told for row in self.running)}"] if self.running else []
        rows += [f"waiting: {', then '.join(row.told for row in self.waiting)}"] if self.waiting else []
        rows += ["the cache is broken and raises a ValueError"] * self.faulty
        return "; ".join([f"{self.num_blocks} blocks of 4 tokens", *rows])


class Planner:
    """Stands for a ContinuousScheduler: what the taught functions use of it, and notes of what they do."""

    def __init__(self, scene: Scene):
        self.scene, self.cache = scene, TextCache(scene.num_blocks)
        self.max_requests, self.max_batch_tokens, self.budget = scene.places, scene.budget, scene.budget
        self.running, self.waiting = ([row.request for row in rows] for rows in (scene.running, scene.waiting))
        self.plan: dict[int, Any] = {}
        self.gave_way: list[int] = []
        self.begun: list[str] = []
        for row, request in zip(scene.running, self.running, strict=True):
            self.cache.reserve(row.number, row.stored + row.planned)
            self.cache.write(row.number, 0, request.ids[: row.stored])
            decodes = row.answer > 0 and row.stored == request.length - 1
            request.state = engine().State.DECODING if decodes else engine().State.PREFILLING
            if row.planned:
                self.plan[row.number] = engine().Work(request, row.stored, row.planned)
                self.budget -= row.planned
        self.cache.faulty = scene.faulty

    def find(self, number: int) -> Any:
        """The request of this number."""
        return next(request for request in [*self.running, *self.waiting] if request.request_id == number)

    def seniority(self, request: Any) -> tuple[int, int]:
        """By the scene's list; who does not stand there is the youngest."""
        elders, number = self.scene.elders, request.request_id
        return elders.index(number) if number in elders else len(elders), number

    def preempt(self, request: Any) -> None:
        """As the scheduler's."""
        self.gave_way.append(request.request_id)
        if len(self.gave_way) > _PATIENCE:
            raise Endless
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)
        if work := self.plan.pop(request.request_id, None):
            self.budget += work.tokens
        request.state = engine().State.PREEMPTED
        request.preemptions += 1
        self.waiting.append(request)

    def begin(self, request: Any, now: float, hits: int) -> None:
        """As the scheduler's."""
        self.waiting.remove(request)
        self.running.append(request)
        request.begin(now, hits)
        self.begun.append(f"request {request.request_id} at {now:g} s, {counted(hits)} taken over")


def work_told(work: Any) -> str:
    """A piece of work in words."""
    if not isinstance(work, engine().Work):
        return f"{work!r}, which is no Work"
    padding = f", padding {work.padding}" if work.padding else ""
    return f"request {work.request.request_id}: {counted(work.tokens)} from {work.start} on{padding}"


def counted(tokens: int) -> str:
    """So many tokens, in words."""
    return f"{tokens} token{'s' * (tokens != 1)}"


def plan_told(plan: Any) -> Any:
    """A plan by the numbers of its requests, in words."""
    if not isinstance(plan, dict):
        return plan
    return {key if isinstance(key, int) else f"a {type(key).__name__}": work_told(work) for key, work in plan.items()}


# ---- what an error means -----------------------------------------------------------------------------------------

_REQUEST = (
    "a request has request_id, prompt_token_ids, token_ids, ids, length, ended, finish_reason, arrival, state, "
    "params.priority, params.max_tokens, and record(token, now)"
)
_WORK = "a piece of work has request, start, tokens, padding, completes"
_PLANNER = (
    "a planner has cache, waiting, running, plan, budget, max_requests, and seniority(request), preempt(request), "
    "begin(request, now, hits)"
)
_NAMES = {
    "Request": _REQUEST,
    "Work": _WORK,
    "Planner": _PLANNER,
    "ContinuousScheduler": "a scheduler has add(request), schedule(now), finish(request, reason)",
    "StaticScheduler": "a scheduler has add(request), schedule(now), finish(request, reason)",
    "TextCache": "the cache has length, match_prefix, reserve, release",
    "SamplingParams": "request.params has priority and max_tokens",
}


def about_names(error: BaseException) -> str:
    """What names there are, where one was used that is not there; "" for other errors."""
    if isinstance(error, AttributeError) and type(error.obj).__name__ in _NAMES:
        return f"there is no `{error.name}`; {_NAMES[type(error.obj).__name__]}"
    if isinstance(error, TypeError) and "requests by their numbers" in str(error):
        return "give the cache the request's number: request.request_id"
    return ""
