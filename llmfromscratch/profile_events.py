"""The events of torch's profiler, sorted into kinds of work: who labels them, how they add up, what they cost.

Events are nested: the label of a stage holds operations, which hold operations. An operation belongs to the innermost
label around it; moments outside all operations and kernels are Python's:

    profile::step ──────────────────────────────────────────────────
       profile::products ─────────        llm::attention ───────
          aten::linear ──────                (a compiled kernel)
              aten::addmm
    Python │ Python │ products │ Python   │ attention │ Python

Fused and compiled layers label their stages themselves ("llm::product"). Plain layers, a learner's too, are labelled
from outside: for the duration of a run, hooks go around their modules, `rotate`, and the cache's `read` and `write`. A
compiled kernel is no operation that the profiler could see: a label of the engine's own without any operation in it
counts as a whole, and so do the calls through which kernels are launched among operations.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache as once
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import profile as torch_profile
from torch.autograd.profiler import record_function

from llmfromscratch import compiled_decode, compiled_layers, fused_layers, model
from llmfromscratch.batch import Batch
from llmfromscratch.engine_core import EngineCore

PYTHON, GRAPH = "Python", "graph"
KINDS = {
    "products": "matrix products of the layers, with what is fused into them",
    "attention": "scores, softmax, mixing",
    "norms": "all norms",
    "cache": "queries and keys rotated, keys and values written, and gathered where that is done",
    GRAPH: "layers as one compiled graph, which the profiler cannot divide",
    "head": "the product that gives the logits",
    "sampling": "from logits to a token",
    "other": "embedding, angles, residual additions, index tensors, drafts",
    PYTHON: "nothing is computed: the interpreter and what it calls, launching",
}
OWN_LABELS = {
    "llm::product": "products", "llm::attention": "attention", "llm::norm": "norms", "llm::cache": "cache",
    "llm::head": "head", "llm::graph": GRAPH,
}  # fmt: skip
_HOOK = "profile::"
_STEP, _KERNEL = f"{_HOOK}step", f"{_HOOK}kernel"
# where compiled kernels are launched among operations of torch
_LAUNCHERS = ((compiled_decode, "launch"), (compiled_layers, "_product"))


# what compiled code computes in, whoever watches; and the kinds of work in it
_CALLS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (compiled_layers, "_call", ("products", "attention", "norms", "cache")),
    (compiled_layers, "_call_all", ("products", "attention", "norms", "cache")),
    (fused_layers.Head, "forward", ("head",)),
)


# ---- labels ------------------------------------------------------------------------------------------------------


class Watched(NamedTuple):
    """One run under the profiler. seconds: its wall time; batches: what the model was given."""

    seconds: float
    events: Sequence[Any]
    batches: Sequence[Batch]


def watch(run: Callable[[], Any], core: EngineCore) -> Watched:
    """Runs steps of an engine under the profiler, with labels around what has none of its own."""
    device = core.model.embed_tokens.weight.device
    with ExitStack() as stack:
        labels = stack.enter_context(_labelled(core))
        watching = stack.enter_context(_profiler(device.type))
        with record_function(_STEP):
            began = time.perf_counter()
            run()
            wait(device)
            seconds = time.perf_counter() - began
            labels.close()
    return Watched(seconds, watching.function_events or [], labels.batches)


def _profiler(device: str = "cpu") -> torch_profile:
    # quiet from the first use on, or it writes two lines to stderr each time
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return torch_profile(use_kineto=True, use_device=device if device == "cuda" else None)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


class _Labels:
    """The labels that are open now, the innermost last."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self.batches: list[Batch] = []

    def enter(self, name: str) -> None:
        label = record_function(name)
        label.__enter__()
        self._open.append(label)

    def leave(self) -> None:
        if self._open:  # a forward pass that failed half-way has closed fewer than it opened
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        while self._open:
            self.leave()

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function, with a label around each call."""

        def labelled(*arguments: Any, **named: Any) -> Any:
            with record_function(name):
                return function(*arguments, **named)

        return labelled


class _Passes:
    """A model whose passes are noted. What is computed behind a pass is computed for the sampler."""

    def __init__(self, network: Any, labels: _Labels):
        self._network, self._labels = network, labels

    def __call__(self, batch: Batch, cache: Any) -> Any:
        self._labels.close()
        self._labels.batches.append(batch)
        logits = self._network(batch, cache)
        self._labels.enter(f"{_HOOK}sampling")
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


@contextmanager
def _labelled(core: EngineCore) -> Iterator[_Labels]:
    """Labels around everything that has none of its own, until the end of the context."""
    labels, network, cache = _Labels(), core.model, core.cache
    with ExitStack() as stack:
        stack.callback(labels.close)
        stack.enter_context(_exchanged(core, "model", _Passes(network, labels)))
        own = getattr(network, "network", network)
        labelling = {
            part for layer in own.layers if isinstance(layer, fused_layers.FusedLayer) for part in layer.modules()
        }
        for name, module in own.named_modules():
            kind = kind_of_module(name)
            if kind is not None and module not in labelling:
                before = module.register_forward_pre_hook(_entering(labels, kind))
                behind = module.register_forward_hook(lambda *_: labels.leave(), always_call=True)
                stack.callback(before.remove)
                stack.callback(behind.remove)
        for name in ("read", "write"):
            if hasattr(cache, name):
                stack.enter_context(_exchanged(cache, name, labels.around(getattr(cache, name), f"{_HOOK}cache")))
        if hasattr(model, "rotate"):  # which fused layers do together with the writing
            stack.enter_context(_exchanged(model, "rotate", labels.around(model.rotate, f"{_HOOK}cache")))
        for module_of, name in _LAUNCHERS:
            stack.enter_context(_exchanged(module_of, name, labels.around(getattr(module_of, name), _KERNEL)))
        yield labels


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, until the end of the context; a method of the class is seen again then."""
    own = vars(owner).get(name, owner)  # no attribute is its own owner
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _entering(labels: _Labels, kind: str) -> Callable[..., None]:
    return lambda *_: labels.enter(_HOOK + kind)


def kind_of_module(name: str) -> str | None:
    """What a module of the network computes, by its canonical name; None where its parts say so."""
    last = name.rpartition(".")[2]
    if last.endswith("norm"):
        return "norms"
    if last.endswith("_proj") or last == "mlp":
        return "products"
    return {"self_attn": "attention", "lm_head": "head"}.get(last)


# ---- adding up ---------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """seconds: kind -> time under the profiler; added up, the step's. costs: (kind, sort of event) -> how many events
    of that sort fell into the time of that kind."""

    seconds: Mapping[str, float]
    costs: Mapping[tuple[str, str], int]


class _Open(NamedTuple):
    end: float
    kind: str
    counts: bool  # its time counts for its kind, not for Python


def add_up(events: Iterable[Any]) -> Sums:
    """The time of a step by kinds, from the events of its thread.

    On an accelerator operations only launch: there the time of a kind is the time of its kernels, and Python's is the
    time in which none runs.
    """
    ours, step = _of_the_step(events)
    seconds, costs, stack = dict.fromkeys(KINDS, 0.0), Counter[tuple[str, str]](), list[_Open]()
    on_device, whole = any(event.kernels for event in ours), _whole_labels(ours)
    for place, event in enumerate(ours):
        start, end = event.time_range.start, event.time_range.end
        while stack and start >= stack[-1].end:
            stack.pop()
        around = stack[-1] if stack else _Open(step.time_range.end, "other", False)
        sort, kind = _sort_of(event.name, around.kind)
        costs[around.kind if around.counts else PYTHON, sort] += 1
        counts = sort == "operation" or place in whole or around.counts
        if on_device:
            seconds[kind] += sum(kernel.duration for kernel in event.kernels) / 1e6
        elif counts:
            seconds[kind] += (end - start) / 1e6
            seconds[around.kind] -= (end - start) / 1e6 if around.counts else 0.0
        stack.append(_Open(end, kind, counts and not on_device))
    length = (step.time_range.end - step.time_range.start) / 1e6
    seconds[PYTHON] = max(0.0, length - sum(seconds.values()))
    return Sums(seconds, costs)


def _of_the_step(events: Iterable[Any]) -> tuple[list[Any], Any]:
    """The events inside the step's own label, each before those inside it; and that label."""
    everything = list(events)
    step = next(event for event in everything if event.name == _STEP)
    start, end = step.time_range.start, step.time_range.end
    ours = [
        event for event in everything
        if event is not step and event.thread == step.thread and event.device_type == step.device_type
        and start <= event.time_range.start and event.time_range.end <= end
    ]  # fmt: skip
    return sorted(ours, key=lambda event: (event.time_range.start, -event.time_range.end)), step


def _whole_labels(ours: Sequence[Any]) -> set[int]:
    """The places of the labels that count as a whole: launches of kernels, graphs, and the engine's own labels without
    any operation in them."""
    whole, open_ones = set[int](), list[int]()
    for place, event in enumerate(ours):
        while open_ones and event.time_range.start >= ours[open_ones[-1]].time_range.end:
            open_ones.pop()
        if event.name == _KERNEL or event.name in OWN_LABELS:
            whole.add(place)
        elif not event.name.startswith(_HOOK):
            whole -= {one for one in open_ones if OWN_LABELS.get(ours[one].name) not in (None, GRAPH)}
        open_ones.append(place)
    return whole


def _sort_of(name: str, around: str) -> tuple[str, str]:
    """The sort of an event, and the kind of work that it belongs to."""
    if name in OWN_LABELS:
        return "label", OWN_LABELS[name]
    if name == _KERNEL:
        return "label", around
    if name.startswith(_HOOK):
        return "hook", name.removeprefix(_HOOK)
    return "operation", around


def corrected(sums: Sums, whole: float, calls: Mapping[str, float] | None = None) -> dict[str, float]:
    """Seconds of each kind in a step that nobody watches and that takes `whole` seconds.

    What the events cost is taken off where they fell; the rest of the difference is spread over all kinds alike. calls:
    what compiled code was seen to take in steps without the profiler (`timed_calls`). That is not stretched: the stages
    of a layer then say only how its time is shared out.
    """
    prices, calls = event_prices(), calls or {}
    left = dict(sums.seconds)
    for (kind, sort), count in sums.costs.items():
        left[kind] = max(0.0, left[kind] - count * prices[sort])
    known: dict[str, float] = {}
    for _, name, kinds in _CALLS:
        inside = {kind: left[kind] for kind in kinds if left.get(kind)}
        if calls.get(name):
            known |= {kind: seconds * calls[name] / sum(inside.values()) for kind, seconds in inside.items()}
    others = {kind: seconds for kind, seconds in left.items() if kind not in known}
    scale = max(0.0, whole - sum(known.values())) / sum(others.values()) if sum(others.values()) else 0.0
    return known | {kind: seconds * scale for kind, seconds in others.items()}


@contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """Seconds that each of the _CALLS takes meanwhile, by its name."""
    taken = {name: 0.0 for _, name, _ in _CALLS}
    with ExitStack() as stack:
        for owner, name, _ in _CALLS:
            stack.enter_context(_exchanged(owner, name, _timed(getattr(owner, name), taken, name)))
        yield taken


def _timed(run: Callable[..., Any], taken: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*given)
        finally:
            taken[name] += time.perf_counter() - began

    return timed


@once
def event_prices() -> Mapping[str, float]:
    """Seconds that one event costs under the profiler here: an operation, a label, a label by hooks of a module."""
    number, bare, hooked = torch.ones(8), nn.Identity(), nn.Identity()
    labels = _Labels()
    hooked.register_forward_pre_hook(_entering(labels, "price"))
    hooked.register_forward_hook(lambda *_: labels.leave(), always_call=True)

    def labelled() -> None:
        with record_function("llm::price"):
            pass

    alone = {run: _each(run) for run in (number.neg, lambda: bare(number))}
    with _profiler():
        operation = _each(number.neg)
        label, hook = _each(labelled), _each(lambda: hooked(number))
    of_operation, of_module = alone.values()
    return {"operation": max(0.0, operation - of_operation), "label": label, "hook": max(0.0, hook - of_module)}


def _each(run: Callable[[], Any], times: int = 300) -> float:
    """Seconds of one call, of several rounds the quickest."""
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(times):
            run()
        rounds.append((time.perf_counter() - began) / times)
    return min(rounds)
