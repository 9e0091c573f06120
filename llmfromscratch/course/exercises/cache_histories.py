"""Histories of a cache (passes, rewinds, forks, releases), played on the engine's caches and on plain rows.

A learner's function is looked at alone first; then it stands in the place of the engine's own, and a whole cache has to
work with it. Every number tells where it belongs: token 103 is the third that request 1 brings; its key begins with
103.0 in layer 0 and with 1103.0 in layer 1, its value with the same and a minus. What nobody has written is NaN.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.batch import Batch
from llmfromscratch.course import differences
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.in_engine import in_engine

LAYERS = 2
EXACT = Tolerance(relative=0.0, absolute=0.0)  # what is stored comes back as it was
Step = Mapping[int, int] | tuple[Any, ...]  # {request: new tokens}, or (what, ...) as in `told`
# what happens beside passes; the plain caches share nothing between requests
_KINDS = {
    "ConcatKVCache": ("rewind", "release", "interrupted", "fork"),
    "StaticKVCache": ("rewind", "release", "interrupted", "fork"),
    "PagedKVCache": ("rewind", "release", "interrupted", "fork", "prompt"),
}
_LONGEST = 24  # tokens of a request; every cache has room for three such requests


def told(step: Step) -> str:
    """A step in words."""
    if isinstance(step, Mapping):
        return " and ".join(f"{new} token{'s' * (new > 1)} of request {request}" for request, new in step.items())
    what, request, *more = step
    if what == "interrupted":
        return f"{told(request)}, stopped after layer 0"
    if what == "prompt":
        return f"request {request} begins with {more[1]} tokens of request {more[0]} and has {more[2]} of its own"
    return {
        "rewind": f"request {request} goes back by {more[0] if more else 0}",
        "fork": f"request {more[0] if more else 0} is forked from request {request}",
        "release": f"request {request} is released",
    }[what]


def all_told(history: Sequence[Step]) -> str:
    """A short history in words; of a long one only its length."""
    return ", then ".join(map(told, history)) if len(history) <= 5 else f"a history of {len(history)} steps"


def rows_of(ids: Sequence[int], layer: int, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens, each [tokens, kv_heads, head_dim]."""
    numbers = torch.tensor(ids)[:, None, None] + 1000 * layer
    keys = numbers + torch.arange(heads[0])[:, None] / 4 + torch.arange(heads[1]) / 32
    return keys.to(dtype), -keys.to(dtype)


class PlainRows:
    """The oracle: every row of every request stands under its position in a dictionary."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        self._lengths: Counter[int] = Counter()

    def length(self, request_id: int) -> int:
        """Tokens of the passes that were complete."""
        return self._lengths[request_id]

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Nothing is shared: every row is computed."""
        return 0

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Notes every row under its position."""
        for span in batch.spans:
            rows = range(span.rows.start, span.rows.stop)
            mine = self._rows[layer, span.request_id]
            for position in [position for position in mine if position >= span.start]:
                del mine[position]
            mine.update({span.start + i: (keys[row], values[row]) for i, row in enumerate(rows)})
            if layer == LAYERS - 1:
                self._lengths[span.request_id] = span.start + span.length

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """All rows, in the order of their positions."""
        mine = self._rows[layer, request_id]
        pairs = [mine[position] for position in range(len(mine))]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def rewind(self, request_id: int, tokens: int) -> None:
        """Drops the newest rows in every layer."""
        self._lengths[request_id] -= tokens
        for layer in range(LAYERS):
            mine = self._rows[layer, request_id]
            for position in [position for position in mine if position >= self._lengths[request_id]]:
                del mine[position]

    def fork(self, request_id: int, new_request_id: int) -> None:
        """The new request has the same rows."""
        self._lengths[new_request_id] = self._lengths[request_id]
        for layer in range(LAYERS):
            self._rows[layer, new_request_id] = dict(self._rows[layer, request_id])

    def release(self, request_id: int) -> None:
        """Drops all rows."""
        del self._lengths[request_id]
        for layer in range(LAYERS):
            self._rows.pop((layer, request_id), None)


def play(
    make: Callable[[], Any],
    history: Sequence[Step],
    heads: tuple[int, int] = (1, 1),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """What a new cache says along a history: lengths, and the rows of every request in every layer."""
    cache = make()
    for stored in getattr(cache, "storage", ()):
        stored.fill_(torch.nan)
    player = _Player(cache, heads, dtype)
    for number, step in enumerate(history, 1):
        player.play(f"{number}. {told(step)}", step)
    return player.log


class _Player:
    """Plays a history on one cache and notes what it says."""

    def __init__(self, cache: Any, heads: tuple[int, int], dtype: torch.dtype):
        self.cache, self.heads, self.dtype = cache, heads, dtype
        self.log: dict[str, Any] = {}
        self.texts: dict[int, list[int]] = {}  # request -> token ids, of released ones too
        self.live: set[int] = set()
        self.torn: set[int] = set()  # what an interrupted pass has left is nobody's business until the next one
        self.brought: Counter[int] = Counter()

    def play(self, name: str, step: Step) -> None:
        """Does one step and looks at all requests."""
        if isinstance(step, Mapping):
            self._pass(name, {request: self._new(request, new) for request, new in step.items()}, LAYERS)
        else:
            getattr(self, f"_{step[0]}")(name, *step[1:])
        for request in sorted(self.live):
            self.log[f"{name}: length of request {request}"] = self.cache.length(request)
            for layer in range(LAYERS if request not in self.torn and self.texts[request] else 0):
                self._look(name, layer, request)
        self.log[f"{name}: audit"] = _audited(self.cache)

    def _new(self, request: int, number: int) -> list[int]:
        first = self.brought[request] + 1
        self.brought[request] += number
        return [100 * request + n for n in range(first, first + number)]

    def _pass(self, name: str, parts: Mapping[int, list[int]], layers: int) -> None:
        texts = {request: self.texts.get(request, []) if request in self.live else [] for request in parts}
        batch = Batch.of([(request, ids, len(texts[request])) for request, ids in parts.items()])
        for layer in range(layers):
            self.cache.write(layer, *rows_of(batch.token_ids.tolist(), layer, self.heads, self.dtype), batch)
            for request in parts:
                self._look(f"{name}, while it runs", layer, request)
        self.live |= set(parts)
        if layers < LAYERS:
            self.torn |= set(parts)
            self.texts |= texts
            return
        self.torn -= set(parts)
        self.texts |= {request: [*texts[request], *ids] for request, ids in parts.items()}

    def _look(self, name: str, layer: int, request: int) -> None:
        for kind, rows in zip(("keys", "values"), self.cache.read(layer, request), strict=True):
            self.log[f"{name}: {kind} of request {request}, layer {layer}"] = rows.clone()

    def _interrupted(self, name: str, step: Mapping[int, int]) -> None:
        self._pass(name, {request: self._new(request, new) for request, new in step.items()}, 1)

    def _rewind(self, name: str, request: int, tokens: int) -> None:
        self.cache.rewind(request, tokens)
        self.texts[request] = self.texts[request][: len(self.texts[request]) - tokens]

    def _fork(self, name: str, request: int, new: int) -> None:
        self.cache.fork(request, new)
        self.texts[new] = list(self.texts[request])
        self.live.add(new)
        self.torn |= {new} if request in self.torn else set()

    def _release(self, name: str, request: int) -> None:
        self.cache.release(request)
        self.live.discard(request)
        self.torn.discard(request)

    def _prompt(self, name: str, request: int, like: int, shared: int, own: int) -> None:
        ids = [*self.texts[like][:shared], *self._new(request, own)]
        matched = self.cache.match_prefix(request, ids)
        self.texts[request] = ids[:matched]
        self.live.add(request)
        self._pass(name, {request: ids[matched:]}, LAYERS)


def _audited(cache: Any) -> str:
    """What a cache that can count its blocks finds; the others have nothing to count."""
    try:
        getattr(cache, "audit", lambda: None)()
    except RuntimeError as error:
        return str(error)
    return "all adds up"


def random_history(seed: int, steps: int, longest: int, kinds: Sequence[str]) -> list[Step]:
    """A history for a cache with room for three requests of `longest` tokens; kinds: what happens beside passes."""
    generator = torch.Generator().manual_seed(seed)
    texts: dict[int, int] = {}
    history: list[Step] = []

    def pick(items: Sequence[Any]) -> Any:
        return items[int(torch.randint(len(items), (1,), generator=generator))]

    while len(history) < steps:
        what = pick(["pass", "pass", "pass", *kinds])
        step = _random_step(what, texts, longest, pick)
        if step is not None:
            history.append(step)
    return history


def _random_step(what: str, texts: dict[int, int], longest: int, pick: Callable[[Sequence[Any]], Any]) -> Step | None:
    """One step that can be taken now, noted in `texts` (request -> its length); None where this kind cannot."""
    unused = [request for request in (1, 2, 3) if request not in texts]
    if what in ("pass", "interrupted"):
        room = {request: longest - texts.get(request, 0) for request in (1, 2, 3)}
        chosen = [request for request in (3, 1, 2) if room[request] > 0 and pick((True, False))]
        parts = {request: min(room[request], pick((1, 1, 2, 3, 5))) for request in chosen}
        texts |= {request: texts.get(request, 0) + (what == "pass") * new for request, new in parts.items()}
        return (parts if what == "pass" else ("interrupted", parts)) if parts else None
    if not texts:
        return None
    request = pick(sorted(texts))
    if what == "release":
        del texts[request]
        return ("release", request)
    if what == "rewind":
        tokens = pick(range(texts[request] + 1))
        texts[request] -= tokens
        return ("rewind", request, tokens)
    if not unused:
        return None
    new = pick(unused)
    if what == "fork":
        texts[new] = texts[request]
        return ("fork", request, new)
    texts[new] = min(longest, texts[request] + 2)
    shared = min(texts[request], longest - 1)
    texts[new] = shared + min(2, longest - shared)
    return ("prompt", new, request, shared, texts[new] - shared)


# ---- the learner's own in the engine's cache ---------------------------------------------------------------------

_HISTORIES: dict[str, list[list[Step]]] = {
    "ConcatKVCache": [
        [{1: 3}],
        [{1: 3}, {1: 2}, {1: 1}],
        [{1: 2, 2: 1}, {2: 1, 1: 1}],
        [{1: 3}, ("interrupted", {1: 2}), {1: 1}],
        [{1: 3}, ("rewind", 1, 2), {1: 2}],
        [{1: 3}, ("fork", 1, 2), {1: 1}, {2: 2}],
    ],
    "PagedKVCache": [
        [{1: 3}],
        [{1: 3}, {1: 4}, {1: 1}],
        [{1: 2, 2: 3}, {2: 3, 1: 4}],
        [{1: 3}, ("interrupted", {1: 4}), {1: 6}],
        [{1: 3}, ("fork", 1, 2), {1: 1}, {2: 1}],
        [{1: 4}, ("fork", 1, 2), {1: 1, 2: 1}],
        [{1: 9}, ("release", 1), ("prompt", 2, 1, 8, 2)],
        [{1: 9}, {2: 9}, ("prompt", 3, 2, 8, 1)],
        [{1: 9}, ("prompt", 2, 1, 8, 1), ("rewind", 2, 5), {2: 2}],
        [{1: 8}, ("rewind", 1, 2), {1: 3}, ("prompt", 2, 1, 8, 1)],
    ],
}
_HISTORIES["StaticKVCache"] = _HISTORIES["ConcatKVCache"]


def check_in_engine(name: str, own: Any, cache: str) -> None:
    """Whole histories of one of the engine's caches, which uses the learner's OWN function or class NAME."""
    long = [random_history(seed, 40, _LONGEST, _KINDS[cache]) for seed in (5, 6)]
    with in_engine("kv_cache", name, own):
        compare(
            partial(played, cache),
            plainly,
            [
                *(Case(f"{cache}: {all_told(history)}", history) for history in _HISTORIES[cache]),
                Case(f"{cache}: a history of 40 steps, 3 heads of 4", long[0], heads=(3, 4), size=3),
                Case(f"{cache}: a history of 40 steps, bfloat16", long[1], heads=(2, 3), dtype=torch.bfloat16),
            ],
            expected=f"the engine's {cache} with your {name}: the rows of every request as they were written",
            diagnose=_of_audit,
            tolerance=EXACT,
            what="step",
        )


def played(
    cache: str,
    history: Sequence[Step],
    heads: tuple[int, int] = (1, 1),
    dtype: torch.dtype = torch.float32,
    size: int = 4,
) -> dict[str, Any]:
    """Plays a history on a cache of the engine's, by the name of its class; size: of its blocks, where it has any."""
    engine = learner_engine.reference("kv_cache")
    layout = engine.CacheLayout(LAYERS, *heads, dtype, (torch.device("cpu"),) * LAYERS)
    arguments = {
        "ConcatKVCache": (LAYERS,),
        "StaticKVCache": (layout, 3, _LONGEST),
        "PagedKVCache": (layout, 3 * -(-_LONGEST // size) + 1, size),
    }[cache]
    return play(partial(getattr(engine, cache), *arguments), history, heads, dtype)


def plainly(
    history: Sequence[Step], heads: tuple[int, int] = (1, 1), dtype: torch.dtype = torch.float32, size: int = 4
) -> dict[str, Any]:
    """Plays a history on plain rows, which have no blocks."""
    return play(PlainRows, history, heads, dtype)


def _of_audit(got: Any, want: Any) -> str:
    """What the first wrong entry of a log says, where it is the audit's."""
    wrong = next((name for name, right in want.items() if differences.find(got.get(name), right, EXACT)), "")
    return "the tables and the reference counts do not agree after this step" if wrong.endswith("audit") else ""
