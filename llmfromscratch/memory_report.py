"""Where the memory is: weights, keys and values, what a step needs for a moment, and the rest of the process.

    print(memory(llm))        MB, by owner, in one table

What is asked for and what is there are two things. A cache is allotted at once, but the system gives its pages when
they are first written; weights read from a file may lie there still. So each owner has two columns: `allotted` and
`resident`, and the resident ones add up to the memory of the process (on CUDA: to what torch has allocated there).
What a step needs comes and goes: its peak is measured in a step, and stands beside the sum.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from llmfromscratch import kv_cache, quantized_cache
from llmfromscratch.batch import Batch
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError

_NOBODY = -1  # a number that the engine gives to no request
_PARTS = (  # what of a weight's name tells the part of the model that it belongs to; the first that fits
    ("embed_tokens", "embedding and head"),
    ("lm_head", "embedding and head"),
    ("self_attn.", "attention"),
    ("qkv", "attention"),
    ("mlp.", "feed-forward"),
    ("gate_up", "feed-forward"),
    ("norm", "norms"),
)
_HEAD = ("", "", "allotted, MB", "resident, MB", "share")


@dataclass(frozen=True)
class Owner:
    """Bytes of one owner. group: "weights", "cache", "step" (for a moment only: not part of the sum) or "rest".

    resident: bytes of it that are in memory now; where the system does not tell, what has been in use.
    """

    group: str
    name: str
    allotted: int
    resident: int


@dataclass(frozen=True)
class MemoryReport:
    """owners: in the order of the table. total: the resident bytes of the process, or what torch has allocated on CUDA.
    where: the device, in words."""

    owners: tuple[Owner, ...]
    total: int
    where: str

    def of(self, group: str, name: str | None = None) -> Owner:
        """A group's sum, or one owner of it; 0 where there is none."""
        found = [owner for owner in self.owners if owner.group == group and name in (None, owner.name)]
        sums = (sum(owner.allotted for owner in found), sum(owner.resident for owner in found))
        return Owner(group, name or "together", *sums)

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows as text: group, owner, MB allotted, MB resident, share of the total."""
        rows, last = [], ""
        for owner in self.owners:
            momentary = owner.group == "step"
            share = "" if momentary or not self.total else f"{owner.resident / self.total:.1%}"
            resident = "" if momentary else _megabytes(owner.resident)
            rows.append(
                (owner.group if owner.group != last else "", owner.name, _megabytes(owner.allotted), resident, share)
            )
            last = owner.group
        return [*rows, ("sum", self.where, "", _megabytes(self.total), "100.0%")]

    def __str__(self) -> str:
        table = [_HEAD, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
        lines = []
        for row in table:
            cells = [
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        rows = [_HEAD, ("---", "---", "---:", "---:", "---:"), *self.rows()]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def memory(llm: LLM, tokens: int = 128) -> MemoryReport:
    """Where an engine's memory is now, and what a prefill of so many tokens and a decode step behind it need.

    The step is a real one, in the engine's own cache, which forgets it again. Raises RequestError for layers on several
    devices, OutOfMemory where the cache has no room for the step.
    """
    devices = {weight.device for weight in llm.model.parameters()}
    if len(devices) > 1:
        raise RequestError(f"the model lies on {len(devices)} devices; its memory is reported for one alone.")
    device = next(iter(devices))
    with llm.core.between_steps():
        peaks = _peaks_of_steps(llm, tokens, device)
        named = [*_weights(llm.model, device), *_cache(llm.cache, device)]
        total, rest = _the_rest(device, sum(owner.resident for owner in named))
    return MemoryReport((*named, *peaks, *rest), total, _in_words(device))


# ---- weights and cache -------------------------------------------------------------------------------------------


def _weights(network: torch.nn.Module, device: torch.device) -> Iterator[Owner]:
    """By parts of the model. Memory that several tensors share (a tied head, views of a fused weight) counts once."""
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _part(name)) for name, tensor in tensors)
    allotted: dict[str, int] = {}
    resident: dict[str, int] = {}
    covered = 0
    for start, end, part in spans:
        start = max(start, covered)
        if start < end:
            allotted[part] = allotted.get(part, 0) + end - start
            resident[part] = resident.get(part, 0) + _resident(start, end, device)
            covered = end
    for part in sorted(allotted, key=lambda part: -allotted[part]):
        yield Owner("weights", part, allotted[part], resident[part])


def _part(name: str) -> str:
    return next((part for mark, part in _PARTS if mark in name), "other")


def _cache(cache: Any, device: torch.device) -> Iterator[Owner]:
    """Keys and values by whether somebody holds them; then whatever else the cache keeps in tensors."""
    storage = list(getattr(cache, "storage", []))
    if storage:
        allotted = sum(stored.nbytes for stored in storage)
        resident = sum(_resident(stored.data_ptr(), stored.data_ptr() + stored.nbytes, device) for stored in storage)
        in_use, kept = (int(allotted * share) for share in _shares(cache))
        yield Owner("cache", "in use", in_use, min(in_use, resident))
        if kept:
            yield Owner("cache", "kept for prefixes", kept, min(kept, resident - min(in_use, resident)))
        free = allotted - in_use - kept
        yield Owner("cache", "free", free, max(0, resident - in_use - kept))
    counted = {stored.data_ptr() for stored in storage}
    others = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors_in(vars(cache))}
    working = sum(nbytes for address, nbytes in others.items() if address not in counted)
    if working:
        yield Owner("cache", "working memory" if storage else "in use", working, working)


def _shares(cache: Any) -> tuple[float, float]:
    """What share of a cache's storage requests hold, and what share is kept for prefixes that may come again."""
    if isinstance(quantized_cache.below(cache), kv_cache.PagedKVCache):
        blocks = len(cache.allocator.ref_counts)
        held = sum(count > 0 for count in cache.allocator.ref_counts)
        return held / blocks, len(cache.allocator.kept) / blocks
    return len(getattr(cache, "rows", ())) / getattr(cache, "max_requests", 1), 0.0


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in attributes, lists and dicts, a few levels down."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inner: Any = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        elif type(value).__module__.startswith("llmfromscratch"):
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
        for part in inner:
            yield from _tensors_in(part, depth - 1)


def _resident(start: int, end: int, device: torch.device) -> int:
    """How many bytes of an address range are in memory. Linux tells (Documentation/admin-guide/mm/pagemap): bit 63 of a
    page's entry. Elsewhere, and on a GPU, it is all of them."""
    table = Path("/proc/self/pagemap")
    if device.type != "cpu" or start >= end or not table.exists():
        return end - start
    first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    with table.open("rb") as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read((last - first) * 8), dtype=np.uint64)
    present = int((entries >> np.uint64(63)).sum())
    return min(end - start, present * mmap.PAGESIZE)


# ---- a step ------------------------------------------------------------------------------------------------------


def _peaks_of_steps(llm: LLM, tokens: int, device: torch.device) -> Iterator[Owner]:
    cache: Any = llm.cache
    tokens = min(tokens, llm.config.context_length - 1, (cache.capacity or tokens + 1) - 1)
    owners = []
    with _unshared(cache):
        try:
            for name, new in ((f"peak of a prefill, {tokens} tokens", tokens), ("peak of a decode step", 1)):
                batch = Batch.of([(_NOBODY, [0] * new, cache.length(_NOBODY))])
                peak = _peak(lambda batch=batch: llm.core.model(batch, cache), device)  # type: ignore[misc]
                owners.append(Owner("step", name, peak, 0))
        finally:
            cache.release(_NOBODY)
    return iter(owners)


@contextmanager
def _unshared(cache: Any) -> Iterator[None]:
    """Nothing that is computed meanwhile becomes a prefix that others may share."""
    before = getattr(cache, "prefix_sharing", None)
    try:
        if before is not None:
            cache.prefix_sharing = False
        yield
    finally:
        if before is not None:
            cache.prefix_sharing = before


def _peak(compute: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that torch had allocated at once, beyond what it had before."""
    if device.type == "cuda":
        compute()  # what is allocated once and kept should not count
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        compute()
    results = watched.profiler.kineto_results if watched.profiler is not None else None
    held = most = 0
    for event in sorted(results.events() if results is not None else (), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# ---- the rest ----------------------------------------------------------------------------------------------------


def _the_rest(device: torch.device, named: int) -> tuple[int, list[Owner]]:
    """The total that the owners are to add up to, and what is left of it for nobody in particular."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, everything = torch.cuda.mem_get_info(device)
        rest = [
            Owner("rest", "other tensors", allocated - named, allocated - named),
            Owner("rest", "held free by torch", reserved - allocated, reserved - allocated),
            Owner("rest", "CUDA and other processes", *[everything - free - reserved] * 2),
        ]
        return everything - free, rest
    total = psutil.Process().memory_info().rss
    left = total - named
    return total, [Owner("rest", "Python, libraries and what they hold", left, left)]


def _in_words(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "resident memory of the process"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"
