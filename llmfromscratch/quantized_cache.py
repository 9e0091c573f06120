"""Keys and values in 8 or 4 bits: any of the caches, with rows of bytes in the place of rows of numbers.

    key, 64 numbers  ──▶ (key - middle) / spread ──▶ ┌ codes ───┬ scales ┬ minimums ┬ frame ┐    8 bits: 69 bytes
    value            ──────────────────────────────▶ └──────────┴────────┴──────────┴───────┘    4 bits: 49 bytes

A row is rounded by itself when it is written, on a grid of its own (`quantization.quantize`), and is never touched
again. So nothing depends on how a text was cut into passes, and blocks are shared, copied, rewound and evicted as
before, by the cache below, which knows of bytes only. Attention always reads what was stored, a prompt's own tokens
included.

Middle and spread are the keys' frame (`quantization.key_frame`), measured once for each stretch of positions
(`cache_frames`): keys turn with their position, and what is the middle of a slowly turning channel here is its end two
thousand tokens on, where one frame for all would do more harm than none. A row says which frame its key lies in. In 4
bits each 16 neighbours have a grid of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import cache_parts, kv_cache, quantization
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

KINDS = {"int8": 8, "int4": 4}
GROUP = 16  # numbers that share a grid in 4 bits
_PACKED = 32  # codes that quantization.pack_int4 takes at a time
_DTYPES = {8: torch.int8, 4: torch.uint8}  # of the rows; compiled code tells them apart by it
_LARGEST = 65504.0  # of float16: numbers beyond are cut off
_GRID = 4  # bytes: scale and minimum, in float16
MOST_FRAMES = 256  # as many as a byte can tell apart


def check(kind: Any, kv_cache: str, window: Any) -> None:
    """Raises RequestError for LLM(kv_cache_dtype=...) that cannot be meant, alone or beside the other two."""
    if kind is None:
        return
    if kind not in tuple(KINDS):
        raise RequestError(
            f"kv_cache_dtype is {kind!r}; expected one of {', '.join(KINDS)}, or None for the model's own."
        )
    if window is not None:
        raise RequestError(
            f"window={window} keeps so few tokens that it has no rows of bytes; leave it or kv_cache_dtype out."
        )
    if kv_cache == "none":
        raise RequestError(f"kv_cache='none' remembers nothing that {kind} could make smaller; leave one of them out.")


@dataclass(frozen=True)
class Codec:
    """How the keys and values of a head become rows of bytes, and numbers again.

    bits: 8 or 4. dtype: what comes in and what goes out. frames: of each layer float32 [frames, 2 (middle, spread),
    kv_heads, head_dim], where that layer lies. stretch: positions for which a frame is; the last one is for all beyond.
    """

    bits: int
    head_dim: int
    dtype: torch.dtype
    frames: tuple[Tensor, ...]
    stretch: int = 1

    @classmethod
    def unframed(cls, bits: int, layout: cache_parts.CacheLayout) -> Codec:
        """One that takes keys as they are: with the middles 0 and the spreads 1."""
        return cls(bits, layout.head_dim, layout.dtype, no_frames(layout.num_kv_heads, layout.head_dim, layout.devices))

    @property
    def group(self) -> int:
        """Numbers that share a grid; the last ones of a head may be fewer."""
        return self.head_dim if self.bits == 8 else GROUP

    @property
    def code_bytes(self) -> int:
        """Bytes of a row before its scales: one a number, or half of that, for whole packs."""
        return self.head_dim if self.bits == 8 else -(-self.head_dim // _PACKED) * _PACKED // 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a head's key, or of its value."""
        return self.code_bytes + _GRID * self.grids + 1

    @property
    def grids(self) -> int:
        """Of a head."""
        return -(-self.head_dim // self.group)

    def numbers_at(self, positions: Tensor) -> Tensor:
        """Of the frames of these positions, int64."""
        return (positions // self.stretch).clamp(max=len(self.frames[0]) - 1)

    def layout(self, numbers: cache_parts.CacheLayout) -> cache_parts.CacheLayout:
        """The layout of the cache of bytes, in the place of one of numbers."""
        kind = _DTYPES[self.bits]
        return cache_parts.CacheLayout(numbers.num_layers, numbers.num_kv_heads, self.row_bytes, kind, numbers.devices)

    def encode(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] as rows, each [tokens, kv_heads, row_bytes]."""
        places = self.numbers_at(positions).to(keys.device)
        middle, spread = self.frames[layer][places].unbind(1)
        numbers = torch.stack([(keys.float() - middle) / spread, values.float()]).clamp(-_LARGEST, _LARGEST)
        rounded = quantization.quantize(numbers.view(-1, self.head_dim), self.bits, self.group)
        codes = rounded.codes if self.bits == 8 else _packed(rounded.codes)
        grids = [each.half().contiguous().view(torch.uint8) for each in (rounded.scales, rounded.minimums)]
        last = places.to(torch.uint8)[None, :, None].expand(numbers.shape[:-1]).reshape(-1, 1)
        rows = torch.cat([codes, *grids, last], dim=1).view(_DTYPES[self.bits])
        encoded = rows.view(*numbers.shape[:-1], self.row_bytes)
        return encoded[0], encoded[1]

    def decode(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse, but for what rounding has lost; computed in float32, given in the model's dtype."""
        places = keys[:, 0, -1].view(torch.uint8).long()
        middle, spread = self.frames[layer][places].unbind(1)
        numbers = self._numbers(torch.stack([keys, values]))
        return (numbers[0] * spread + middle).to(self.dtype), numbers[1].to(self.dtype)

    def _numbers(self, rows: Tensor) -> Tensor:
        """float32 [..., head_dim] of rows [..., row_bytes]; the keys in their frame."""
        flat = rows.view(torch.uint8).view(-1, self.row_bytes)
        codes = flat[:, : self.code_bytes]
        grids = flat[:, self.code_bytes : -1].contiguous().view(torch.float16)
        if self.bits == 4:
            codes = quantization.unpack_int4(codes.contiguous())[:, : self.head_dim]
        scales, minimums = grids.float().chunk(2, dim=1)
        found = quantization.Quantized(codes, scales, minimums, self.bits, self.group).dequantize()
        return found.view(*rows.shape[:-1], self.head_dim)


def _packed(codes: Tensor) -> Tensor:
    """Two in a byte; heads that are no whole packs are filled up with 0."""
    missing = -codes.shape[1] % _PACKED
    return quantization.pack_int4(torch.nn.functional.pad(codes, (0, missing)) if missing else codes)


def no_frames(kv_heads: int, head_dim: int, devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
    """For each layer, on its device, the one frame that changes nothing."""
    shape = (1, kv_heads, head_dim)
    return tuple(torch.stack([torch.zeros(shape), torch.ones(shape)], dim=1).to(device) for device in devices)


def rows_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [rows, head_dim] as a cache keeps them that stores this dtype: numbers, or bytes without a frame."""
    bits = {kind: bits for bits, kind in _DTYPES.items()}.get(dtype)
    if bits is None:
        return numbers.to(dtype)
    head_dim = numbers.shape[1]
    codec = Codec(bits, head_dim, torch.float32, no_frames(1, head_dim, [numbers.device]))
    return codec.encode(0, numbers[:, None], numbers[:, None], torch.arange(len(numbers)))[1][:, 0]


class QuantizedKVCache:
    """A cache whose rows are bytes, and what makes numbers of them. As any `kv_cache.KVCache`; what else the cache
    below offers (blocks, tables, counts, storage) is found here too.

    inner: made for `codec.layout(...)`; it may be any that keeps rows as they come.
    """

    def __init__(self, inner: kv_cache.KVCache, codec: Codec):
        self.inner: Any = inner
        self.codec = codec

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy that is being made has nothing yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def capacity(self) -> int | None:
        """Tokens that one request can have."""
        return self.inner.capacity

    @capacity.setter
    def capacity(self, tokens: int | None) -> None:
        self.inner.capacity = tokens

    @property
    def prefix_sharing(self) -> bool:
        """Whether blocks are shared; AttributeError for a cache without."""
        return self.inner.prefix_sharing

    @prefix_sharing.setter
    def prefix_sharing(self, shares: bool) -> None:
        self.inner.prefix_sharing = shares

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim], rounded."""
        self.inner.write(layer, *self.codec.encode(layer, keys, values, batch.positions), batch)

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """What is stored of a request as numbers, each [length, kv_heads, head_dim]."""
        return self.codec.decode(layer, *self.inner.read(layer, request_id))

    def length(self, request_id: int) -> int:
        """Tokens that every layer has stored."""
        return self.inner.length(request_id)

    def match_prefix(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Tokens that a new request takes over: rows are alike where texts are."""
        return self.inner.match_prefix(request_id, token_ids)

    def find_prefix(self, token_ids: Sequence[int]) -> int:
        """What `match_prefix` would answer."""
        return self.inner.find_prefix(token_ids)

    def reserve(self, request_id: int, tokens: int) -> None:
        """Makes room for `tokens` more."""
        self.inner.reserve(request_id, tokens)

    def rewind(self, request_id: int, tokens: int) -> None:
        """Forgets the newest `tokens` tokens."""
        self.inner.rewind(request_id, tokens)

    def fork(self, request_id: int, new_request_id: int) -> None:
        """A new request goes on from the same tokens."""
        self.inner.fork(request_id, new_request_id)

    def release(self, request_id: int) -> None:
        """Forgets a request."""
        self.inner.release(request_id)


def below(cache: Any) -> Any:
    """The cache that manages rows: the one below, where these are bytes; else the cache itself."""
    return cache.inner if isinstance(cache, QuantizedKVCache) else cache


def growing(cache: Any, num_layers: int) -> kv_cache.KVCache:
    """A new cache without a bound, that rounds as this one does."""
    fresh = kv_cache.ConcatKVCache(num_layers)
    return QuantizedKVCache(fresh, cache.codec) if isinstance(cache, QuantizedKVCache) else fresh


def dtype_of(cache: Any, layer: int) -> torch.dtype:
    """Of the numbers that a cache with storage gives."""
    return cache.codec.dtype if isinstance(cache, QuantizedKVCache) else cache.storage[layer].dtype
