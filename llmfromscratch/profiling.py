"""Where the time of a step goes: torch's profiler, its hundreds of events added up to a few kinds of work.

    profile(llm)               one prefill and one decode step, each as a table: milliseconds, bytes, operations
    roofline(profile, limits)  the same beside what the machine can do (`machine_limits`)

Which events belong to which kind is decided in `profile_events`: the engine's own layers label their stages, and plain
layers, a learner's too, are given labels from outside while they are watched.

A profile adds up to the wall time of a step that nobody watched. Each event costs some time of its own, which is
measured apart and taken off where it fell; what then still differs is spread over all kinds alike. Compiled code is
timed in the steps that nobody watches (`profile_events.corrected`).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmfromscratch import optimization, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.machine_limits import Limits, name_of
from llmfromscratch.profile_events import GRAPH, KINDS, Watched, add_up, corrected, timed_calls, wait, watch

PREFILL, DECODE = "prefill", "decode step"
_HEAD = ("", "ms", "share", "MB", "GB/s", "GFLOP", "GFLOP/s")
_numbers = itertools.count()  # no two prompts are alike, or the second would find the first one's keys


# ---- what a profile says -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one kind of work takes. nbytes: that have to come from memory or go there, at least (weights, keys and
    values, logits; activations stay in the processor's caches); operations: at least, a multiplication and an addition
    being two. 0 where they are not counted."""

    seconds: float
    nbytes: float = 0.0
    operations: float = 0.0


@dataclass(frozen=True)
class StepProfile:
    """One step by kinds of work. costs: kind -> Cost, in the order of KINDS; their seconds add up to `seconds`.

    seconds: wall time of the step when nobody watches; watched: under the profiler. tokens: computed in it; gained:
    tokens of answers that it gave; context: tokens in the cache behind it, of all requests. where: the machine.
    """

    name: str
    costs: Mapping[str, Cost]
    seconds: float
    watched: float
    tokens: int
    gained: float
    context: int
    dtype: str
    where: str = ""

    @property
    def total(self) -> Cost:
        """All kinds together."""
        costs = self.costs.values()
        return Cost(self.seconds, sum(cost.nbytes for cost in costs), sum(cost.operations for cost in costs))

    @property
    def slowdown(self) -> float:
        """How much longer the step takes while it is watched: 0.1 is a tenth."""
        return self.watched / self.seconds - 1

    @property
    def speed(self) -> float:
        """Tokens a second: in a decode step those that it gives, in a prefill those that it computes."""
        return (self.gained if self.name == DECODE else self.tokens) / self.seconds

    def __str__(self) -> str:
        rows = [_HEAD, *(_row(kind, cost, self.seconds) for kind, cost in self.costs.items())]
        rows.append(_row("all", self.total, self.seconds))
        return "\n".join([f"{self.title()}: {1000 * self.seconds:.1f} ms", *_aligned(rows), self.remark()])

    def title(self) -> str:
        """What was computed, and where."""
        where = f", {self.where}" if self.where else ""
        counted = f"{self.tokens:,} token{'s' * (self.tokens != 1)}"
        return f"{self.name}, {counted} at {self.context:,} of context, {self.dtype}{where}"

    def remark(self) -> str:
        """Its speed, and what watching cost."""
        longer = f"{100 * self.slowdown:.0f} % longer, which is taken off" if self.slowdown >= 0.005 else "no longer"
        return f"{self.speed:,.0f} tokens/s; under the profiler the step takes {longer}"


@dataclass(frozen=True)
class Profile:
    """A prefill and a decode step of one engine."""

    prefill: StepProfile
    decode: StepProfile

    def __str__(self) -> str:
        return f"{self.prefill}\n\n{self.decode}"


def _row(kind: str, cost: Cost, whole: float) -> tuple[str, ...]:
    cells = [kind, f"{1000 * cost.seconds:.1f}", f"{100 * cost.seconds / whole:.0f} %"]
    for amount in (cost.nbytes / 1e6, cost.operations / 1e9):
        shown = amount > 0 and cost.seconds > 0
        rate = amount * (1 / 1000 if amount == cost.nbytes / 1e6 else 1) / cost.seconds if shown else 0.0
        cells += [_digits(amount), _digits(rate)] if shown else ["", ""]
    return tuple(cells)


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 0.95 else f"{number:.2g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines


# ---- beside the machine's limits ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """One kind of work on the roofline. least: seconds that the machine needs for it; bound: what sets them."""

    step: str
    kind: str
    cost: Cost
    least: float
    bound: str

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.cost.operations / self.cost.nbytes

    @property
    def speed(self) -> float:
        """Operations a second."""
        return self.cost.operations / self.cost.seconds

    @property
    def reached(self) -> float:
        """The share of what the machine could do."""
        return self.least / self.cost.seconds


@dataclass(frozen=True)
class Roofline:
    """Kinds of work beside the limits of the machine, in one dtype."""

    dots: tuple[Dot, ...]
    limits: Limits
    dtype: str

    def __str__(self) -> str:
        head = ("", "ops/byte", "ms", "at least", "reached", "limited by")
        rows = [head, *(
            (f"{dot.step}, {dot.kind}", _digits(dot.intensity), f"{1000 * dot.cost.seconds:.1f}",
             f"{1000 * dot.least:.1f}", f"{100 * dot.reached:.0f} %", dot.bound) for dot in self.dots
        )]  # fmt: skip
        ridge = f"below {self.limits.ridge(self.dtype):.0f} operations a byte memory is the limit"
        return "\n".join([f"{self.limits}; in {self.dtype}, {ridge}", *_aligned(rows)])


def roofline(steps: Profile | StepProfile | Sequence[StepProfile], limits: Limits) -> Roofline:
    """Each kind of work that both reads and computes, and the step as a whole, beside what the machine can do.

    Raises ValueError where the limits lack the dtype of a step, and for steps in several dtypes. Williams et al. 2009.
    """
    if isinstance(steps, Profile):
        steps = (steps.prefill, steps.decode)
    steps = (steps,) if isinstance(steps, StepProfile) else tuple(steps)
    dtypes = sorted({step.dtype for step in steps})
    if len(dtypes) != 1:
        raise ValueError(f"a roofline shows steps of one dtype, and these have {', '.join(dtypes) or 'none'}.")
    peak, dots = limits.peak(dtypes[0]), []
    for step in steps:
        for kind, cost in {**step.costs, "whole": step.total}.items():
            if cost.nbytes > 0 and cost.operations > 0 and cost.seconds > 0:
                least = optimization.least_seconds(cost.nbytes, cost.operations, limits.bandwidth, peak)
                memory = cost.nbytes / limits.bandwidth > cost.operations / peak
                dots.append(Dot(step.name, kind, cost, least, "memory" if memory else "computing"))
    return Roofline(tuple(dots), limits, dtypes[0])


# ---- measuring ---------------------------------------------------------------------------------------------------


def profile(
    llm: LLM, prompt_tokens: int = 128, context: int | None = None, streams: int = 1, steps: int = 6
) -> Profile:
    """Profiles one prefill of `prompt_tokens`, and decode steps from `context` tokens on (None: the prompt's length).

    streams: requests side by side. steps: measured with the profiler, and as many without, in turns; the faster half of
    each counts. A compiled layer is one call otherwise, and is called in stages while it is watched. The engine has to
    be idle; its metrics count these requests too. Raises RequestError, also where a step fails.
    """
    context = prompt_tokens if context is None else context
    _check(llm, prompt_tokens, context, streams, steps)
    prefill = _measure(llm, PREFILL, lambda: _prefill(llm, prompt_tokens, streams), (steps + 1) // 2)
    requests = _begin(llm, context, streams, 2 * (steps + 1) + 1)
    try:
        while any(not request.token_ids and not request.ended for request in requests):
            llm.core.step()
        decode = _measure(llm, DECODE, llm.core.step, steps, lambda: not all(request.ended for request in requests))
    finally:
        for request in requests:
            if not request.ended:
                llm.core.abort(request, "its profile was interrupted.")
    _refuse_failed(requests)
    return Profile(prefill, decode)


def _check(llm: LLM, prompt_tokens: int, context: int, streams: int, steps: int) -> None:
    if llm.core.has_work:
        raise RequestError("requests are in flight, and their work would be profiled too; finish them first.")
    for name, value in (("prompt_tokens", prompt_tokens), ("context", context), ("streams", streams), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    needed, room = max(prompt_tokens, context) + 2 * steps + 4, llm.cache.capacity
    room = llm.config.context_length if room is None else min(room, llm.config.context_length)
    if needed > room:
        raise RequestError(
            f"the profile needs {needed} tokens a request, and there is room for {room}; ask for less context or steps."
        )


def _begin(llm: LLM, prompt_tokens: int, streams: int, max_tokens: int) -> list[Any]:
    """Requests of random tokens, handed to the engine."""
    params = sampling.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = []
    for _ in range(streams):
        dice = random.Random(f"profile {next(_numbers)}")
        ids = [dice.randrange(llm.config.vocab_size) for _ in range(prompt_tokens)]
        requests.append(llm.request(ids, params))
        llm.core.add(requests[-1])
    return requests


def _prefill(llm: LLM, prompt_tokens: int, streams: int) -> None:
    """Prompts from the first step to their first tokens."""
    requests = _begin(llm, prompt_tokens, streams, 1)
    while not all(request.ended for request in requests):
        llm.core.step()
    _refuse_failed(requests)


def _refuse_failed(requests: Sequence[Any]) -> None:
    for request in requests:
        if request.finish_reason == "abort":
            raise RequestError(f"a step that was to be profiled failed: {request.error}")


def _measure(
    llm: LLM, name: str, run: Callable[[], Any], times: int, goes_on: Callable[[], bool] = lambda: True
) -> StepProfile:
    """Runs in turns without and with the profiler, after one of each that does not count."""
    network, alone, watched = llm.model, list[tuple[float, dict[str, float]]](), list[Watched]()
    steps, tokens = llm.metrics.steps, llm.metrics.tokens
    for _ in range(times + 1):
        if goes_on():
            with timed_calls() as calls:
                alone.append((_seconds(run, network.embed_tokens.weight.device), calls))
        if goes_on():
            watched.append(watch(run, llm.core))
    if len(watched) < 2:
        raise RequestError("the requests ended before their step could be profiled; ask for more steps.")
    unwatched = _faster_half(alone[1:])
    seconds = statistics.mean(whole for whole, _ in unwatched)
    calls = {owner: statistics.mean(each[owner] for _, each in unwatched) for owner in unwatched[0][1]}
    fast = sorted(watched[1:], key=lambda one: one.seconds)[: len(watched) // 2]
    parts = [corrected(add_up(one.events), seconds, calls) for one in fast]
    work = _least_work(llm, fast[0].batches)
    if any(part[GRAPH] > 0 for part in parts):  # one function for all that a layer does
        inside = [work.pop(kind) for kind in ("products", "attention", "norms", "cache")]
        work[GRAPH] = sum(nbytes for nbytes, _ in inside), sum(operations for _, operations in inside)
    costs = {kind: Cost(statistics.mean(part[kind] for part in parts), *work.get(kind, ())) for kind in KINDS}
    spans = fast[0].batches[-1].spans
    return StepProfile(
        name,
        {kind: cost for kind, cost in costs.items() if cost.seconds > 0},
        seconds,
        statistics.mean(one.seconds for one in fast),
        sum(len(batch.token_ids) for batch in fast[0].batches),
        (llm.metrics.tokens - tokens) / (llm.metrics.steps - steps),
        sum(span.start + span.length for span in spans),
        name_of(network.embed_tokens.weight.dtype),
        _machine(network.embed_tokens.weight.device),
    )


def _faster_half(taken: Sequence[tuple[float, dict[str, float]]]) -> list[tuple[float, dict[str, float]]]:
    """What else the machine does can only add to a time."""
    return sorted(taken, key=lambda each: each[0])[: (len(taken) + 1) // 2]


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def _machine(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else str(device)


# ---- what has to be read and computed ----------------------------------------------------------------------------


def _least_work(llm: LLM, batches: Sequence[Batch]) -> dict[str, tuple[float, float]]:
    """Kind -> (bytes, operations), at least, of the passes over these batches; as `optimization.decode_bytes` counts,
    from the weights as they are, and with norms and logits."""
    network, config, passes = llm.model, llm.config, len(batches)
    rows, answers = (sum(map(len, each)) for each in zip(*((b.token_ids, b.logit_rows) for b in batches), strict=True))
    products = [module for name, module in network.layers.named_modules() if name.endswith("_proj")]
    stored = getattr(llm.core.cache, "storage", None)
    width = network.embed_tokens.weight.element_size()
    row = stored[0].shape[-1] * stored[0].element_size() if stored else config.head_dim * width
    pair = 2 * config.num_kv_heads * row
    heads = config.num_heads * config.head_dim
    spans = [span for batch in batches for span in batch.spans]
    read = sum(span.start + span.length for span in spans)
    # pairs of a query and a key that it sees
    seen = sum(span.length * span.start + span.length * (span.length + 1) // 2 for span in spans)
    normed = _normed(network, config, rows, answers)
    return {
        "products": (passes * sum(map(_nbytes, products)), 2 * rows * sum(map(_size, products))),
        "attention": (config.num_layers * read * pair, 4 * config.num_layers * seen * heads),
        "norms": (2 * width * normed, 4 * normed),
        "cache": (config.num_layers * rows * pair, 0),
        "head": (passes * _nbytes(network.lm_head) if answers else 0, 2 * answers * _size(network.lm_head)),
        "sampling": (4 * answers * config.vocab_size, 0),
    }  # fmt: skip


def _normed(network: Any, config: ModelConfig, rows: int, answers: int) -> int:
    """Numbers that go through a norm: those of every row, but behind the last layer only of those that need logits."""
    per_row = {"q_norm": config.num_heads * rows, "k_norm": config.num_kv_heads * rows, "norm": answers}
    count = 0
    for name, module in network.named_modules():
        if name.endswith("norm") and hasattr(module, "weight"):
            count += module.weight.numel() * per_row.get(name.rpartition(".")[2], rows)
    return count


def _size(module: Any) -> int:
    """Numbers in the matrix of a product, however they are stored."""
    return module.in_features * module.out_features


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
