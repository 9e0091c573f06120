"""Decode steps through the compiled kernel: what `kernels/paged_decode.py` needs to know of a cache, told once a pass.

A step's one query a request goes over that request's keys and values where they lie, in blocks or in a row of its own:
nothing is gathered, nothing is padded, and each key is read once for all query heads that share it. Scores and sums are
computed in float32, whatever the cache stores. Prompts are left to `attention.attend`.

What it needs: Numba, a CPU, a paged or static cache in float32, bfloat16, or bytes that stand for these
(`quantized_cache`). `unavailable` says what is lacking, in one sentence; the package works without. What it costs: some
seconds of compiling at the first use of all (kept on disk).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache as once
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from llmfromscratch import attention, kv_cache, masks, quantized_cache
from llmfromscratch.batch import Batch, Span

DTYPES = (torch.float32, torch.bfloat16)
NO_FRAMES = np.empty((1, 2, 0, 0), np.float32)
_LEAST = 256  # tokens of a head that are worth a thread: they take it about as long as beginning and ending together


@once
def unavailable(dtype: torch.dtype) -> str | None:
    """Why the kernel cannot be used here, in one sentence; None where it can. Compiles it, where that is to be done."""
    try:
        _try_out(dtype)
    except Exception as error:  # noqa: BLE001 - a compiler that does not suit this machine can raise anything
        what = str(error).strip().splitlines() or [""]
        return f"Numba cannot compile attention here ({type(error).__name__}: {what[0]}), so PyTorch computes it."
    return None


@once
def max_threads() -> int:
    """Threads that one call may use: 1 where Numba has only its workqueue, which is slow to begin and not safe.

    Its OpenMP layer runs in the threads that torch computes with, and TBB's sleep when they have nothing to do.
    """
    import numba

    threads = torch.get_num_threads()
    most = numba.get_num_threads()  # chooses the layer; OpenMP's then tells torch a number of threads too
    torch.set_num_threads(threads)
    return most if numba.threading_layer() in ("omp", "tbb") else 1


def fits(cache: kv_cache.KVCache, layer: int) -> TypeGuard[kv_cache.PagedKVCache | kv_cache.StaticKVCache]:
    """Whether the kernel can read a layer of this cache. A cache derived from one of ours may read in a way of its own,
    and is left alone.
    """
    rows = quantized_cache.below(cache)
    if type(rows) not in (kv_cache.PagedKVCache, kv_cache.StaticKVCache):
        return False
    stored: Tensor = rows.storage[layer]
    return quantized_cache.dtype_of(cache, layer) in DTYPES and stored.device.type == "cpu"


def frames_of(cache: Any, layer: int) -> np.ndarray:
    """The frames of a layer's keys where rows are bytes, float32 [frames, 2, kv_heads, head_dim]; empty for others."""
    quantized = isinstance(cache, quantized_cache.QuantizedKVCache)
    return cache.codec.frames[layer].numpy() if quantized else NO_FRAMES


@dataclass(frozen=True)
class Plan:
    """Where the decode steps of a pass read; the same for every layer.

    batch: whose plan it is. rows: int64 [steps], where their queries stand, or None for all rows of the batch. slots:
    int64 [tokens], of all their tokens, behind each other; ends: int64 [steps]. head_stride, value_start: rows of the
    cache from a head to the next, and from a key to its value. pieces: into how many the work is cut, for `threads`.
    numbers: int64 [steps], of the frames that their keys are in, where the cache has rows of bytes.
    """

    batch: Batch
    rows: Tensor | None
    slots: np.ndarray
    ends: np.ndarray
    kv_heads: int
    head_stride: int
    value_start: int
    pieces: int
    threads: int
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    @classmethod
    def of(
        cls,
        batch: Batch,
        cache: kv_cache.PagedKVCache | kv_cache.StaticKVCache,
        mask: masks.Mask | None = None,
        every_row: bool = False,
    ) -> Plan:
        """The plan for the decode steps of a batch whose keys and values are in the cache, or about to be. With a mask,
        only what it shows has a slot: the rest is not read. every_row: each row of the batch is a step of its own.
        """
        spans = [span for span in batch.spans if every_row or span.length == 1]
        of_spans, kv_heads, head_stride, value_start = _slots(spans, cache)
        positions = [span.start + row for span in spans for row in range(span.length)]
        slots = [of_one[: span.start + row + 1] for of_one, span in of_spans for row in range(span.length)]
        if mask is not None:
            slots = [each[masks.seen_from(mask, position)] for each, position in zip(slots, positions, strict=True)]
        ends = np.cumsum([len(each) for each in slots])
        rows = None if len(spans) == len(batch.spans) else torch.tensor([span.first_row for span in spans])
        threads = min(torch.get_num_threads(), max_threads())
        pieces = max(1, min(threads, kv_heads * int(ends[-1]) // _LEAST))
        numbers = _numbers_of_frames(cache, positions)
        return cls(
            batch, rows, np.concatenate(slots), ends, kv_heads, head_stride, value_start, pieces, threads, numbers
        )


def _numbers_of_frames(cache: Any, positions: list[int]) -> np.ndarray:
    if isinstance(cache, quantized_cache.QuantizedKVCache):
        return cache.codec.numbers_at(torch.tensor(positions)).numpy()
    return np.zeros(len(positions), np.int64)


def _slots(
    spans: list[Span], cache: kv_cache.PagedKVCache | kv_cache.StaticKVCache
) -> tuple[list[tuple[np.ndarray, Span]], int, int, int]:
    """Of each span the slots of all tokens up to its last one, and the span; kv heads, head_stride, value_start."""
    cache = quantized_cache.below(cache)
    if isinstance(cache, kv_cache.PagedKVCache):
        _, kv_heads, num_blocks, block_size, _ = cache.storage[0].shape
        head_stride = num_blocks * block_size
        slots = [(_slots_of_blocks(span, cache), span) for span in spans]
        return slots, kv_heads, head_stride, kv_heads * head_stride
    _, max_requests, kv_heads, head_stride, _ = cache.storage[0].shape
    slots = []
    for span in spans:
        first = cache.rows[span.request_id] * kv_heads * head_stride
        slots.append((np.arange(first, first + span.start + span.length), span))
    return slots, kv_heads, head_stride, max_requests * kv_heads * head_stride


def _slots_of_blocks(span: Span, cache: kv_cache.PagedKVCache) -> np.ndarray:
    """As `kv_cache.slots_of` for all tokens up to a span's last, int64 [start + length], which numpy makes sooner."""
    length, size = span.start + span.length, cache.block_size
    table = np.array(cache.block_tables[span.request_id][: -(-length // size)])
    return (table[:, None] * size + np.arange(size)).ravel()[:length]


def attend(
    queries: Tensor,
    layer: int,
    batch: Batch,
    cache: kv_cache.PagedKVCache | kv_cache.StaticKVCache,
    mask: masks.Mask | None = None,
    prompts: Callable[[Tensor, int, Batch, Any], Tensor] | None = None,
) -> Tensor:
    """As `attention.attend`: queries [tokens, heads, head_dim] over each row's own request; same shape and dtype.

    mask: who sees whom; None shows everything before. prompts: who computes the other rows, `attention.attend` if None.
    """
    # the plan holds on to its batch, so that no other batch can have its id
    plan = cache.gathers.once(("compiled", id(batch), mask), lambda: Plan.of(batch, cache, mask))
    if plan.rows is None:
        return _attend_steps(queries, cache.storage[layer], plan, frames_of(cache, layer))
    others = tuple(span for span in batch.spans if span.length > 1)
    output = (prompts or attention.attend)(queries, layer, replace(batch, spans=others), cache)
    output[plan.rows] = _attend_steps(queries[plan.rows], cache.storage[layer], plan, frames_of(cache, layer))
    return output


def _attend_steps(queries: Tensor, stored: Tensor, plan: Plan, frames: np.ndarray) -> Tensor:
    """queries: [steps, heads, head_dim]; returns the same shape and dtype."""
    steps, _, head_dim = queries.shape
    asked = queries.detach().float().contiguous().view(steps, plan.kv_heads, -1, head_dim)
    output = torch.empty_like(asked)
    where = (plan.slots, plan.ends, plan.head_stride, plan.value_start)
    launch(plan, asked.numpy(), numbers(stored).reshape(-1, stored.shape[-1]), frames, *where, output.numpy())
    return output.view(queries.shape).to(queries.dtype)


def numbers(tensor: Tensor) -> np.ndarray:
    """The same memory as an array: float32 as it is, bfloat16, which numpy does not know, as its bits in uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def launch(plan: Plan, *arguments: Any) -> None:
    """Runs the kernel in the plan's threads."""
    from llmfromscratch.kernels import paged_decode

    if max_threads() == 1:
        paged_decode.attend_on_one_thread(*arguments)
    else:
        in_threads(plan.threads, paged_decode.attend_on_threads, *arguments, plan.pieces)


def in_threads(threads: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a compiled function that may use so many threads; how many others get stays as it was."""
    import numba

    before = numba.get_num_threads()
    if before == threads:
        return function(*arguments)
    numba.set_num_threads(threads)
    try:
        return function(*arguments)
    finally:
        numba.set_num_threads(before)


def _try_out(dtype: torch.dtype) -> None:
    """Compiles the kernel for a dtype of rows, and lets it compute the mean of 1 and 3."""
    keys_and_values = torch.tensor([[0.0], [0.0], [1.0], [3.0]]).expand(4, 8).contiguous()
    stored = quantized_cache.rows_of(keys_and_values, dtype)
    frames = quantized_cache.no_frames(1, 8, [stored.device])[0].numpy()
    plan = Plan(Batch.of([(0, [0], 1)]), None, np.arange(2), np.array([2]), 1, 2, 2, pieces=1, threads=1)
    found = _attend_steps(torch.ones(1, 1, 8), stored, plan, frames)
    if not torch.equal(found, torch.full_like(found, 2.0)):
        raise ArithmeticError(f"the mean of 1 and 3 came out as {found[0, 0, 0].item():g}")
