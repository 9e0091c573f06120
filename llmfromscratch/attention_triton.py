"""Attention by our own Triton kernels: `kernels/triton_decode.py` for decode steps, `triton_prefill.py` for the rest.

They read a paged or a static cache where it lies, keys and values once for all query heads that share them, and compute
scores and sums in float32. What they need to know of a cache is planned once a pass and is the same for every layer.

On CUDA they are compiled at their first use (seconds, kept on disk). Without a GPU Triton's interpreter runs them, one
program after the other in numpy: very slow, but the same code, for reading and testing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from llmfromscratch import kv_cache, masks
from llmfromscratch.batch import Batch, Span

if TYPE_CHECKING:
    Cache = kv_cache.PagedKVCache | kv_cache.StaticKVCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 2  # that shall be there for each processor of a GPU: one computes while the other waits for memory


@once
def unavailable(device: str, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot be used on a device ("cuda", "cpu", ...), in one sentence; None where they can."""
    if dtype not in DTYPES:
        return f"the Triton kernels compute in float32, bfloat16 and float16, and this is {str(dtype)[6:]}."
    try:
        from llmfromscratch.kernels.triton_tiles import INTERPRETED
    except ImportError:
        return "Triton is not installed; on Linux: pip install triton."
    if device != "cuda" and not (device == "cpu" and INTERPRETED):
        return (
            f"Triton's kernels run on CUDA, and this model is on {device}; to see them at work on the CPU, slowly, set "
            "TRITON_INTERPRET=1 in the environment before Python starts."
        )
    try:
        _try_out(device, dtype)
    except Exception as error:  # noqa: BLE001 - a compiler that does not suit this machine can raise anything
        what = str(error).strip().splitlines() or [""]
        return f"Triton cannot compile or run its kernels here ({type(error).__name__}: {what[0]})."
    return None


def lacking(cache: kv_cache.KVCache, mask: masks.Mask | None) -> str | None:
    """Why these kernels cannot serve a cache and a mask here, in one sentence; None where they can."""
    if mask is not None:
        return "the Triton kernels know no mask."
    if type(cache) not in (kv_cache.PagedKVCache, kv_cache.StaticKVCache):
        return f"the Triton kernels read a paged or a static cache, and this one is a {type(cache).__name__}."
    # layers are placed in their order, so what does not fit onto the GPU is at the end
    first, last = cache.storage[0], cache.storage[-1]  # type: ignore[attr-defined]
    return unavailable(first.device.type, first.dtype) or unavailable(last.device.type, last.dtype)


def fits(cache: kv_cache.KVCache) -> TypeGuard[Cache]:
    """Whether the kernels can read and write this cache."""
    return lacking(cache, None) is None


@dataclass(frozen=True)
class Layout:
    """A layer of a cache as the kernels see it: [2, kv_heads, blocks, block_size, head_dim], or as if it were so, a row
    of a static cache being one long block. head_stride: rows (of head_dim numbers) from a head to the next."""

    kv_heads: int
    block_size: int
    head_stride: int

    @classmethod
    def of(cls, cache: Cache) -> Layout:
        """The layout of a cache."""
        if isinstance(cache, kv_cache.PagedKVCache):
            _, kv_heads, blocks, size, _ = cache.storage[0].shape
            return cls(kv_heads, size, blocks * size)
        _, _, kv_heads, max_length, _ = cache.storage[0].shape
        return cls(kv_heads, max_length, max_length)


def table_of(cache: Cache, span: Span) -> list[int]:
    """The blocks that hold a request's tokens, those of the span included, in the order of its text."""
    if isinstance(cache, kv_cache.PagedKVCache):
        return cache.block_tables[span.request_id][: -(-(span.start + span.length) // cache.block_size)]
    return [cache.rows[span.request_id] * Layout.of(cache).kv_heads]


def slots_of(cache: Cache, batch: Batch, device: torch.device) -> Tensor:
    """Where the keys and values of a batch go: int64 [tokens], the row of head 0 in a layer. Planned once a pass."""
    if isinstance(cache, kv_cache.PagedKVCache):
        return cache.slot_mapping[device]

    def look_up() -> Tensor:
        size = Layout.of(cache).block_size
        firsts = [table_of(cache, span)[0] * size + span.start for span in batch.spans]
        places = [torch.arange(first, first + span.length) for first, span in zip(firsts, batch.spans, strict=True)]
        return torch.cat(places).to(device)

    return cache.gathers.once(("triton slots", id(batch), device), look_up)


@dataclass(frozen=True)
class Plan:
    """What a pass reads, on the device of a layer. batch: whose plan it is.

    steps: int64 [steps], the rows of the decode steps; None: all rows are. step_tables: int32 [steps, most blocks];
    lengths: int32 [steps]; splits, tokens_per_split: see `triton_decode.cut`. tiles: int32 [tiles, 4] of the other
    spans, of at most tile_rows rows each; span_tables: int32 [spans, most blocks].
    """

    batch: Batch
    layout: Layout
    steps: Tensor | None
    step_tables: Tensor
    lengths: Tensor
    splits: int
    tokens_per_split: int
    tiles: Tensor
    tile_rows: int
    span_tables: Tensor

    @classmethod
    def of(cls, batch: Batch, cache: Cache, device: torch.device) -> Plan:
        """The plan for a batch whose keys and values are in the cache."""
        from llmfromscratch.kernels import triton_decode, triton_prefill

        layout = Layout.of(cache)
        steps = [span for span in batch.spans if span.length == 1]
        others = [span for span in batch.spans if span.length > 1]
        longest = max((span.start + 1 for span in steps), default=1)
        cut = triton_decode.cut(max(1, len(steps)) * layout.kv_heads, longest, _wanted_programs(device))
        rows = triton_prefill.rows_of(max((span.length for span in others), default=1), *_head(cache))
        return cls(
            batch,
            layout,
            _whole([span.first_row for span in steps], device).long() if others else None,
            _padded([table_of(cache, span) for span in steps], device),
            _whole([span.start + 1 for span in steps], device),
            *cut,
            _whole(triton_prefill.tiles_of(others, rows), device),
            rows,
            _padded([table_of(cache, span) for span in others], device),
        )


def attend(queries: Tensor, layer: int, batch: Batch, cache: Cache, mask: masks.Mask | None = None) -> Tensor:
    """As `attention.attend`: queries [tokens, heads, head_dim] over each row's own request; same shape and dtype."""
    from llmfromscratch.kernels import triton_decode, triton_prefill

    assert mask is None  # `lacking` has refused it
    device = queries.device
    # the plan holds on to its batch, so that no other batch can have its id
    plan = cache.gathers.once(("triton", id(batch), device), lambda: Plan.of(batch, cache, device))
    queries, stored = queries.contiguous(), cache.storage[layer]
    where = (plan.layout.kv_heads, plan.layout.block_size, plan.layout.head_stride)
    cut = (plan.splits, plan.tokens_per_split)
    with torch.cuda.device_of(queries):  # Triton launches on the current device
        if plan.steps is None:
            return triton_decode.attend_steps(queries, stored, plan.step_tables, plan.lengths, *where, *cut)
        output = torch.empty_like(queries)
        triton_prefill.attend_tiles(queries, output, stored, plan.tiles, plan.tile_rows, plan.span_tables, *where)
        if len(plan.steps):
            asked = queries[plan.steps]
            output[plan.steps] = triton_decode.attend_steps(asked, stored, plan.step_tables, plan.lengths, *where, *cut)
    return output


def _head(cache: Cache) -> tuple[int, int]:
    """Numbers of a head, and the bytes of one."""
    return cache.storage[0].shape[-1], cache.storage[0].element_size()


def _wanted_programs(device: torch.device) -> int:
    """How many programs keep a device busy. The interpreter runs one at a time."""
    if device.type != "cuda":
        return 1
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _whole(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device)


def _padded(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Block tables under each other, int32, the shorter ones filled up: what is there is not read."""
    width = max(map(len, tables), default=0)
    return _whole([[*table, *[0] * (width - len(table))] for table in tables], device)


def _try_out(device: str, dtype: torch.dtype) -> None:
    """Compiles the smallest kernel, and lets it norm the vector (1, 7), whose root mean square is 5."""
    from llmfromscratch.kernels import triton_norm

    vector, ones = torch.tensor([[1.0, 7.0]], dtype=dtype, device=device), torch.ones(2, dtype=dtype, device=device)
    found = triton_norm.add_and_norm(vector, None, ones, 0.0)[1].float()
    if not torch.allclose(found, torch.tensor([[0.2, 1.4]], device=device), rtol=0, atol=0.02):
        raise ArithmeticError(f"the norm of (1, 7) came out as {found.tolist()[0]}")
