"""How long a decode step takes at each length, for each kind of cache: the numbers that `cost_curves` draws.

A kind is filled with one forward pass up to the first length; from there to the next lengths, made-up keys and values
are written into it, since the time does not depend on what they say. Without a cache, the whole text is one pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.widgets.token_reading import counted, in_words

KINDS = ("recompute", "concat", "static", "paged")
LENGTHS = (64, 256, 512, 1024, 2048, 4096)
_BLOCK = 16
_ROUNDS, _SECONDS = 3, 9.0  # a round measures everything once; in quick mode no new length begins after so long
_SECONDS_OF_RECOMPUTING = 5.0  # in quick mode; a whole pass over a long text takes seconds


@dataclass(frozen=True)
class Costs:
    """points: kind -> length in tokens -> milliseconds of a decode step. reading: length -> milliseconds to read the
    keys and values of so many tokens once, and nothing else. problems: kind -> what went wrong, as a sentence.
    """

    points: Mapping[str, Mapping[int, float]]
    reading: Mapping[int, float] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""


@dataclass(frozen=True)
class Line:
    """The straight line through some points: start + slope x length. start in milliseconds, slope in milliseconds a
    token."""

    start: float
    slope: float

    def at(self, length: float) -> float:
        """Milliseconds at a length in tokens."""
        return self.start + self.slope * length


def fitted(points: Mapping[int, float]) -> Line:
    """The line with the smallest sum of squared errors, each as a share of its time; through one point, a level one.

    A share, because times vary in proportion to themselves: otherwise the longest text alone would decide.
    """
    weights = {x: y**-2 for x, y in points.items()}
    whole = sum(weights.values())
    mean_x = sum(weight * x for x, weight in weights.items()) / whole
    mean_y = sum(weights[x] * y for x, y in points.items()) / whole
    spread = sum(weight * (x - mean_x) ** 2 for x, weight in weights.items())
    slope = sum(weights[x] * (x - mean_x) * (y - mean_y) for x, y in points.items()) / spread if spread else 0.0
    return Line(mean_y - slope * mean_x, slope)


def measure_costs(
    source: Any,
    kinds: Sequence[str] = KINDS,
    lengths: Sequence[int] | None = None,
    *,
    steps: int = 3,
    quick: bool = True,
    caches: Mapping[str, Callable[[Any, int], Any]] | None = None,
) -> Costs:
    """The time of a decode step at each length, one request alone: the faster quartile of the steps of three rounds.

    source: an LLM, or a `model.Model`. lengths: in tokens; those of LENGTHS that fit the context if not given. steps:
    in each round. quick: recomputing stops, and rounds end, after some seconds, so that all takes about 20.
    caches: kind -> makes a cache from (CacheLayout, tokens it must hold), in place of the engine's, or for a new kind.
    Raises ValueError for unknown kinds and for lengths that do not rise or do not fit the context.
    """
    network = getattr(source, "model", source)
    makers = {**_makers(), **(caches or {})}
    context = network.config.context_length
    lengths = [length for length in LENGTHS if length + steps < context] if lengths is None else lengths
    _check(kinds, lengths, steps, makers, context)
    run = _Run(network, tuple(lengths), steps, time.perf_counter() + (_SECONDS if quick else math.inf))
    problems: dict[str, str] = {}
    samples = run.decode_all({kind: makers[kind] for kind in kinds if kind != "recompute"}, problems)
    points = {kind: {length: _quiet(taken) for length, taken in of.items()} for kind, of in samples.items()}
    if "recompute" in kinds:
        with _said(problems, "recompute"):
            points["recompute"] = run.recompute(makers["recompute"], _SECONDS_OF_RECOMPUTING if quick else math.inf)
    problems.update(run.differences())
    return Costs({kind: points[kind] for kind in kinds if points.get(kind)}, run.reading(), problems, run.machine())


def _quiet(taken: Sequence[float]) -> float:
    """The faster quartile: what else the machine does can only add to a time, so the median would measure that too."""
    return sorted(taken)[len(taken) // 4]


def _makers() -> dict[str, Callable[[Any, int], Any]]:
    """Kind -> makes the engine's own cache; asked anew each time, for the engine may be a learner's."""
    return {
        "recompute": lambda layout, tokens: kv_cache.NoKVCache(layout.num_layers),
        "concat": lambda layout, tokens: kv_cache.ConcatKVCache(layout.num_layers),
        "static": lambda layout, tokens: kv_cache.StaticKVCache(layout, 1, tokens),
        "paged": lambda layout, tokens: kv_cache.PagedKVCache(layout, -(-tokens // _BLOCK), _BLOCK),
    }


class _Run:
    """One model, one text, and the clock."""

    def __init__(self, network: Any, lengths: tuple[int, ...], steps: int, deadline: float):
        weights = network.embed_tokens.weight
        self.network, self.lengths, self.steps, self.deadline = network, lengths, steps, deadline
        self.layout = kv_cache.CacheLayout.of(network.config, weights.dtype, weights.device)
        self.device, vocabulary = weights.device, network.config.vocab_size
        self.ids = [(17 + 29 * place) % vocabulary for place in range(lengths[-1] + steps + 1)]
        self.tolerance = 0.1 if weights.dtype.itemsize <= 2 else 0.005  # of the largest logit
        self.logits: dict[int, dict[str, torch.Tensor]] = {lengths[0]: {}, lengths[-1]: {}}

    def decode_all(
        self, makers: Mapping[str, Callable[[Any, int], Any]], problems: dict[str, str]
    ) -> dict[str, dict[int, list[float]]]:
        """Milliseconds of decode steps: kind -> length -> one for each step, from as many rounds as the time suffices.

        All kinds at one length before the next: what disturbs the machine disturbs them alike.
        """
        samples: dict[str, dict[int, list[float]]] = {kind: {} for kind in makers}
        for number in range(_ROUNDS):
            alive: dict[str, Any] = {}
            for kind in samples.keys() - problems.keys():
                with _said(problems, kind):
                    alive[kind] = makers[kind](self.layout, self.lengths[-1] + self.steps + 1)
                    if number == 0:
                        self._forward(alive[kind], self.ids[: self.lengths[0]], 0)
            for length in self.lengths:
                if number and time.perf_counter() > self.deadline:
                    return samples
                for kind in makers:
                    if kind in alive and kind not in problems:
                        with _said(problems, kind):
                            samples[kind].setdefault(length, []).extend(self._decode(alive[kind], length, kind))
        return samples

    def _decode(self, cache: Any, length: int, kind: str) -> list[float]:
        """Milliseconds of each decode step at a length; the cache is filled up to there first."""
        self._fill(cache, length)
        taken = []
        for step in range(self.steps + 1):
            begin = time.perf_counter()
            logits = self._forward(cache, [self.ids[length + step]], length + step)
            taken.append(1000 * (time.perf_counter() - begin))
            if step == 0 and length in self.logits:
                self.logits[length].setdefault(kind, logits)
        return taken[1:]  # the first one warms up

    def recompute(self, make: Callable[[Any, int], Any], seconds: float) -> dict[int, float]:
        """Milliseconds of a step that computes the whole text again; as far as the time suffices."""
        points: dict[int, float] = {}
        started = time.perf_counter()
        for length in self.lengths:
            begin = time.perf_counter()
            logits = self._forward(make(self.layout, length + 1), self.ids[: length + 1], 0)
            points[length] = 1000 * (time.perf_counter() - begin)
            if length == self.lengths[0]:
                self.logits[length]["recompute"] = logits
            spent = time.perf_counter() - started
            if spent + 2 * points[length] / 1000 > seconds:
                break
        return points

    def reading(self) -> dict[int, float]:
        """Milliseconds to read as many bytes as the keys and values of a text have, from memory, once."""
        layout = self.layout
        # float32 whatever the cache has: the bytes count, and the fastest sum there is
        numbers = 2 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize // 4
        layers = [torch.ones(self.lengths[-1], numbers, device=self.device) for _ in range(layout.num_layers)]
        points = {}
        for length in self.lengths:
            taken = []
            for _ in range(5):
                begin = time.perf_counter()
                for layer in layers:
                    layer[:length].sum()
                self._wait()
                taken.append(1000 * (time.perf_counter() - begin))
            points[length] = _quiet(taken)
        return points

    def differences(self) -> dict[str, str]:
        """Kinds whose decode steps give other logits than the first kind that is right; recomputing is always right."""
        said: dict[str, str] = {}
        for length, logits in self.logits.items():
            order = [kind for kind in dict.fromkeys(["recompute", *logits]) if kind in logits and kind not in said]
            for kind in order[1:]:
                right, off = logits[order[0]], float((logits[kind] - logits[order[0]]).abs().max())
                if not off <= self.tolerance * float(right.abs().max()):
                    said[kind] = (
                        f"at {length} tokens it gives other logits than {order[0]}, by up to {off:.3g}; "
                        "its times are those of a wrong answer."
                    )
        return said

    def machine(self) -> str:
        """What computed, in words."""
        threads = f", {counted(torch.get_num_threads(), 'thread')}" if self.device.type == "cpu" else ""
        return f"{str(self.layout.dtype).removeprefix('torch.')} on {self.device.type}{threads}"

    def _fill(self, cache: Any, length: int) -> None:
        start = cache.length(0)
        if start > length:
            raise ValueError(f"the cache says it holds {start} tokens; {length} or fewer were written")
        if start < length:
            batch = Batch.of([(0, self.ids[start:length], start)])
            shape = (length - start, self.layout.num_kv_heads, self.layout.head_dim)
            new = torch.randn(shape, generator=torch.Generator().manual_seed(start)).to(self.layout.dtype)
            with torch.inference_mode():
                for layer, device in enumerate(self.layout.devices):
                    cache.write(layer, new.to(device), new.to(device), batch)

    def _forward(self, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
        logits = self.network(Batch.of([(0, ids, start)]), cache)[0].float()
        self._wait()
        return logits

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()


@contextmanager
def _said(problems: dict[str, str], kind: str) -> Iterator[None]:
    """Turns what a learner's cache raises into a sentence about its kind, so that the others are still measured."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - as said
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        function = "it" if trace is None else trace.tb_frame.f_code.co_name
        problems[kind] = f"{function} {in_words(error)}."


def _check(kinds: Sequence[str], lengths: Sequence[int], steps: int, makers: Mapping[str, Any], context: int) -> None:
    for kind in kinds:
        if kind not in makers:
            raise ValueError(f"{kind!r} is no kind of cache; expected some of {', '.join(makers)}.")
    apart = all(a + steps < b for a, b in pairwise(lengths))
    if not lengths or lengths[0] < 1 or steps < 1 or not apart:
        raise ValueError(
            f"lengths are {list(lengths)} with {steps} steps at each; expected at least one step, and lengths that "
            "rise by more than the steps."
        )
    if lengths[-1] + steps + 1 > context:
        raise ValueError(f"{lengths[-1]} tokens and {steps + 1} steps do not fit the context of {context}.")
