"""Keys and values in 8 and 4 bits: rows against a slow writer, and the equality chain over caches of bytes."""

from __future__ import annotations

import copy
import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import (
    LLM,
    attention,
    attention_backends,
    cache_frames,
    cli,
    compiled_decode,
    kv_cache,
    kv_memory,
    quantization,
    quantized_cache,
    scoring,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.memory_report import memory
from llmfromscratch.quantized_cache import Codec, QuantizedKVCache
from llmfromscratch.sampling_params import SamplingParams
from tests.tiny_models import random_ids, save_tiny, scatter, tiny_model

SIZES = (6, 16, 24, 64)
CPU = torch.device("cpu")
FIELDS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def codec_of(bits: int, head_dim: int, kv_heads: int = 1, dtype=torch.float32, seed: int | None = None) -> Codec:
    """A codec for one layer, with a frame drawn at random, or none."""
    if seed is None:
        return Codec(bits, head_dim, dtype, quantized_cache.no_frames(kv_heads, head_dim, [CPU]))
    dice = torch.Generator().manual_seed(seed)
    middle = 10 * torch.randn(3, kv_heads, head_dim, generator=dice)
    spread = 0.1 + 5 * torch.rand(3, kv_heads, head_dim, generator=dice)
    return Codec(bits, head_dim, dtype, (torch.stack([middle, spread], dim=1),), stretch=20)


# ---- one row -----------------------------------------------------------------------------------------------------


def slow_row(numbers: np.ndarray, bits: int, frame: int = 0) -> bytes:
    """The bytes of a head's numbers, float32 [head_dim], one after the other as the module's picture has them."""
    size, one = len(numbers), np.float32
    group = size if bits == 8 else 16
    codes, scales, minimums = [], b"", b""
    for start in range(0, size, group):
        part = [max(min(x, one(65504)), one(-65504)) for x in numbers[start : start + group]]
        scale = np.float16((max(part) - min(part)) / one(2**bits - 1) or one(1))
        scale, minimum = scale if scale else np.float16(1), np.float16(min(part))
        codes += [int(max(0, min(2**bits - 1, np.rint((x - one(minimum)) / one(scale))))) for x in part]
        scales, minimums = scales + struct.pack("<e", scale), minimums + struct.pack("<e", minimum)
    if bits == 4:
        codes += [0] * (-size % 32)
        codes = [codes[i] | codes[i + 16] << 4 for start in range(0, size, 32) for i in range(start, start + 16)]
    return bytes(codes) + scales + minimums + bytes([frame])


def places(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count)


@st.composite
def heads(draw) -> np.ndarray:
    """Numbers of one head: of any size, equal ones, zeros, one that stands out."""
    size = draw(st.sampled_from(SIZES))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = dice.normal(size=size) * 10.0 ** draw(st.integers(-9, 7)) + draw(st.sampled_from([0, 1, -300, 1e6]))
    kind = draw(st.sampled_from(["any", "equal", "zero", "outlier", "few levels"]))
    if kind == "equal":
        numbers[:] = numbers[0]
    if kind == "zero":
        numbers[:] = 0
    if kind == "outlier":
        numbers[dice.integers(size)] *= 10.0 ** draw(st.integers(1, 12))
    if kind == "few levels":  # many numbers half-way between two levels
        numbers = dice.integers(0, 2 * 15 + 1, size=size) / 2
        numbers[: min(size, 2)] = [0, 15][: min(size, 2)]
    return numbers.astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=150, deadline=None)
@given(numbers=heads())
def test_a_row_is_what_a_slow_writer_makes_of_it_and_no_number_moves_far(bits, numbers):
    codec = codec_of(bits, len(numbers))
    given_rows = torch.from_numpy(numbers)[None, None]
    rows = codec.encode(0, given_rows, -given_rows, places(1))
    assert [bytes(each.view(torch.uint8).flatten().tolist()) for each in rows] == [
        slow_row(numbers, bits), slow_row(-numbers, bits)
    ]  # fmt: skip
    assert rows[0].shape == (1, 1, codec.row_bytes)
    assert rows[0].dtype == {8: torch.int8, 4: torch.uint8}[bits]
    cut = np.clip(numbers.astype(np.float64), -65504, 65504)
    group = len(numbers) if bits == 8 else 16
    for found, expected in zip(codec.decode(0, *rows), (cut, -cut), strict=True):
        for start in range(0, len(cut), group):
            part = expected[start : start + group]
            step = (part.max() - part.min()) / (2**bits - 1)
            # half a step, and what float16 takes off the minimum and the scale
            most = 0.5 * step + 2**-10 * (abs(part.min()) + 2**bits * step) + 2**-24 * 2**bits
            assert np.abs(found[0, 0, start : start + group].double().numpy() - part).max() <= most


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_company(bits):
    codec = codec_of(bits, 24, kv_heads=3, seed=1)
    keys, values = torch.randn(2, 40, 3, 24, generator=torch.Generator().manual_seed(0)) * 20
    together = codec.encode(0, keys, values, places(40))
    alone = [codec.encode(0, keys[i : i + 1], values[i : i + 1], places(1, i)) for i in range(40)]
    for side in (0, 1):
        assert torch.equal(together[side], torch.cat([one[side] for one in alone]))


def test_float64_and_bfloat16_come_back_in_their_own_dtype():
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        codec = codec_of(8, 16, dtype=dtype, seed=2)
        numbers = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        found = codec.decode(0, *codec.encode(0, numbers, numbers, places(5)))
        assert [each.dtype for each in found] == [dtype, dtype]
        torch.testing.assert_close(found[1].float(), numbers.float(), rtol=0.01, atol=0.02)


def test_the_frame_saves_small_channels_beside_large_ones():
    """With one channel of 300 beside others of 1, a grid of 16 levels over all has no levels left for those."""
    keys = torch.randn(400, 1, 64, generator=torch.Generator().manual_seed(0))
    keys[:, :, 7] = 300 + 20 * keys[:, :, 7]
    framed = Codec(4, 64, torch.float32, (torch.stack(quantization.key_frame(keys[:200]))[None],))
    error = {}
    for name, codec in {"framed": framed, "plain": codec_of(4, 64)}.items():
        found, _ = codec.decode(0, *codec.encode(0, keys[200:], keys[200:], places(200)))
        error[name] = (found - keys[200:])[:, 0, [0, 1, 2, 3, 8, 9]]  # those that share the large one's grid
    assert error["framed"].pow(2).mean() < 0.01 * error["plain"].pow(2).mean()


# ---- compiled ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel() -> Any:
    """Rows written and read one after the other by compiled code."""
    numba = pytest.importorskip("numba")
    from llmfromscratch.kernels import byte_rows

    @numba.njit
    def write(numbers, frames, places, rows):
        for row in range(len(numbers)):
            byte_rows.into_frame(numbers[row], frames, places[row], 0, rows)
            byte_rows.write_row(numbers[row], rows, row, places[row])

    @numba.njit
    def read(rows, output):
        for row in range(len(rows)):
            byte_rows.read_row(rows, row, output[row])

    return write, read


def rows_of_every_kind(head_dim: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(head_dim)
    numbers = torch.randn(600, head_dim, generator=dice) * torch.logspace(-9, 8, 600)[:, None]
    numbers[0], numbers[1], numbers[2] = 0, 3, torch.arange(head_dim) / 2
    numbers[3, 2], numbers[4, 3], numbers[5, 0] = torch.inf, -torch.inf, 1e30
    numbers[6:60, 1] *= 1e4
    return numbers


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_code_writes_and_reads_the_same_bits(bits, head_dim, kernel):
    codec = codec_of(bits, head_dim, seed=3)
    numbers = rows_of_every_kind(head_dim)
    at = places(len(numbers)) // 12
    keys, _ = codec.encode(0, numbers[:, None], numbers[:, None], at)
    assert keys[:, 0, -1].unique().tolist() == [0, 1, 2]
    write, read = kernel
    rows = np.zeros((len(numbers), codec.row_bytes), np.int8 if bits == 8 else np.uint8)
    write(numbers.numpy().copy(), codec.frames[0].numpy(), codec.numbers_at(at).numpy(), rows)
    assert torch.equal(torch.from_numpy(rows), keys[:, 0])
    output = np.zeros((len(numbers), head_dim), np.float32)
    read(rows, output)
    assert torch.equal(torch.from_numpy(output), codec.decode(0, keys, keys)[1][:, 0])


def test_a_nan_stays_one(kernel):
    numbers = torch.ones(1, 16)
    numbers[0, 3] = torch.nan
    for bits in (8, 4):
        codec = codec_of(bits, 16)
        keys, values = codec.decode(0, *codec.encode(0, numbers[:, None], numbers[:, None], places(1)))
        assert keys.isnan().all() and values.isnan().all()
        rows, output = np.zeros((1, codec.row_bytes), np.int8 if bits == 8 else np.uint8), np.zeros((1, 16), "f4")
        kernel[0](numbers.numpy().copy(), codec.frames[0].numpy(), np.zeros(1, np.int64), rows)
        kernel[1](rows, output)
        assert np.isnan(output).all()


def test_every_float16_is_rounded_to_itself_and_what_lies_between_to_even():
    pytest.importorskip("numba")
    from llmfromscratch.kernels.byte_rows import to_half

    bits = np.arange(0x7C00, dtype=np.uint16)
    every = bits.view(np.float16).astype(np.float32)
    between = (every[:-1].astype(np.float64) + every[1:]) / 2
    for numbers in (every, between.astype(np.float32), np.nextafter(between.astype(np.float32), np.float32(np.inf))):
        sample = numbers[:: 1 if len(numbers) < 100 else 7]
        found = np.array([to_half(x) for x in sample], np.uint16)
        assert (found == sample.astype(np.float16).view(np.uint16)).all()
        below = np.array([to_half(-x) for x in sample], np.uint16)
        assert (below == (-sample).astype(np.float16).view(np.uint16)).all()


# ---- caches of bytes ---------------------------------------------------------------------------------------------

CACHES = ("concat", "static", "paged", "paged, scattered")


def framed(network: Any, bits: int) -> Codec:
    """The codec that an engine would make for a network without a tokenizer."""
    kind = {8: "int8", 4: "int4"}[bits]
    found = cache_frames.codec(kind, network, None)
    assert found is not None
    return found


def cache_of(kind: str, network: Any, codec: Codec, tokens: int = 300) -> QuantizedKVCache:
    layout = codec.layout(kv_cache.CacheLayout.of(network.config, codec.dtype))
    if kind == "concat":
        return QuantizedKVCache(kv_cache.ConcatKVCache(layout.num_layers), codec)
    if kind == "static":
        return QuantizedKVCache(kv_cache.StaticKVCache(layout, 4, tokens), codec)
    inner = kv_cache.PagedKVCache(layout, tokens, 3)
    if kind == "paged, scattered":
        scatter(inner)
    return QuantizedKVCache(inner, codec)


class Rounding(kv_cache.ConcatKVCache):
    """The oracle: keys and values as numbers, each rounded by the slow writer's bytes, read back by hand."""

    def __init__(self, num_layers: int, codec: Codec):
        super().__init__(num_layers)
        self.codec = codec

    def write(self, layer, keys, values, batch):
        frames = torch.stack([self.codec.frames[layer][int(p) // self.codec.stretch] for p in batch.positions])
        middle, spread = frames[:, 0], frames[:, 1]
        keys = self._rounded((keys.float() - middle) / spread) * spread + middle
        super().write(layer, keys.to(values.dtype), self._rounded(values.float()).to(values.dtype), batch)

    def _rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = [self._read(slow_row(row, self.codec.bits)) for row in numbers.flatten(0, 1).numpy()]
        return torch.tensor(np.array(rows)).view(numbers.shape)

    def _read(self, row: bytes) -> list[np.float32]:
        size, bits = self.codec.head_dim, self.codec.bits
        count = 1 if bits == 8 else -(-size // 16)
        grids = struct.unpack(f"<{2 * count}e", row[-1 - 4 * count : -1])
        found = []
        for i in range(size):
            byte = row[i] if bits == 8 else row[i // 32 * 16 + i % 16] >> (4 if i % 32 > 15 else 0) & 15
            group = 0 if bits == 8 else i // 16
            found.append(np.float32(grids[count + group]) + np.float32(grids[group]) * np.float32(byte))
        return found


TEXTS = {0: random_ids(40, 1), 1: random_ids(23, 2), 2: random_ids(31, 3)}


def say(network: Any, cache: Any, chunk: int) -> torch.Tensor:
    """Logits of all tokens of three texts that grow side by side, `chunk` tokens of each a pass."""
    found: dict[int, list[torch.Tensor]] = {request: [] for request in TEXTS}
    for start in range(0, 40, chunk):
        parts = [(request, ids[start : start + chunk], start) for request, ids in TEXTS.items() if start < len(ids)]
        logits = network(Batch.of(parts, all_logits=True), cache)
        for (request, _, _), part in zip(parts, logits.split([len(ids) for _, ids, _ in parts]), strict=True):
            found[request].append(part)
    return torch.cat([torch.cat(found[request]) for request in TEXTS])


@pytest.mark.parametrize("bits", [8, 4])
def test_whatever_the_cache_and_the_chunks_the_logits_are_those_of_rows_rounded_by_hand(bits):
    network = tiny_model(**FIELDS)
    codec = framed(network, bits)
    expected = say(network, Rounding(3, codec), 40)
    exact = say(network, kv_cache.ConcatKVCache(3), 40)
    assert (expected - exact).abs().max() > 1e-3  # rounding is seen
    for kind in CACHES:
        for chunk in (1, 7, 40):
            cache = cache_of(kind, network, codec)
            torch.testing.assert_close(say(network, cache, chunk), expected, rtol=0, atol=1e-9)
            if kind.startswith("paged"):
                cache.audit()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("head_dim", [4, 16, 40])
@pytest.mark.parametrize("backend", [kind for kind in attention_backends.KINDS if kind not in ("flash", "triton")])
def test_every_backend_attends_to_what_is_stored(backend, head_dim, bits):
    if backend == "compiled":
        pytest.importorskip("numba")
    codec = codec_of(bits, head_dim, kv_heads=2, seed=4)
    for kind in ("static", "paged, scattered"):
        cache = filled(kind, codec, [70, 1, 33])
        batch = Batch.of([(0, [1], 69), (1, [1], 0), (2, [1] * 5, 28)])
        queries = torch.randn(7, 6, head_dim, generator=torch.Generator().manual_seed(1))
        stored = kv_cache.ConcatKVCache(1)
        stored._stored = {request: [cache.read(0, request)] for request in range(3)}
        expected = attention.attend(queries, 0, batch, stored)
        found = attention_backends.attend(queries, 0, batch, cache, backend)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def filled(kind: str, codec: Codec, lengths: list[int]) -> QuantizedKVCache:
    layout = codec.layout(kv_cache.CacheLayout(1, 2, codec.head_dim, codec.dtype, (CPU,)))
    inner: Any = kv_cache.StaticKVCache(layout, len(lengths), 90)
    if kind != "static":
        inner = kv_cache.PagedKVCache(layout, 60, 4)
        scatter(inner)
    cache = QuantizedKVCache(inner, codec)
    for request, length in enumerate(lengths):
        keys, values = torch.randn(2, length, 2, codec.head_dim, generator=torch.Generator().manual_seed(request))
        keys = 3 * keys + codec.frames[0][0, 0]
        cache.write(0, keys, values, Batch.of([(request, [1] * length, 0)]))
    return cache


def test_a_fork_goes_its_own_way_and_a_rewound_text_is_what_it_was_before():
    network = tiny_model(**FIELDS)
    codec = framed(network, 4)
    for kind in CACHES:
        cache = cache_of(kind, network, codec)
        network(Batch.of([(0, TEXTS[0][:20], 0)]), cache)
        cache.fork(0, 9)
        network(Batch.of([(9, TEXTS[1][:5], 20)]), cache)
        network(Batch.of([(0, TEXTS[2][:5], 20)]), cache)
        cache.rewind(0, 7)
        found = network(Batch.of([(0, TEXTS[0][18:30], 18)]), cache)
        straight = network(Batch.of([(5, TEXTS[0][:30], 0)]), cache_of("concat", network, codec))
        torch.testing.assert_close(found, straight, rtol=0, atol=1e-9)
        forked = network(Batch.of([(9, [3], 25)]), cache)
        text = [*TEXTS[0][:20], *TEXTS[1][:5], 3]
        straight = network(Batch.of([(5, text, 0)]), cache_of("concat", network, codec))
        torch.testing.assert_close(forked, straight, rtol=0, atol=1e-9)
        for request in (0, 9):
            cache.release(request)
        assert cache.length(0) == 0


def test_a_cache_without_room_changes_nothing():
    network = tiny_model(**FIELDS)
    codec = framed(network, 8)
    layout = codec.layout(kv_cache.CacheLayout.of(network.config, torch.float64))
    cache = QuantizedKVCache(kv_cache.PagedKVCache(layout, 2, 4), codec)
    network(Batch.of([(0, [1] * 8, 0)]), cache)
    with pytest.raises(OutOfMemory):
        network(Batch.of([(0, [1], 8)]), cache)
    assert cache.length(0) == 8 and cache.capacity == 8
    cache.audit()


def test_a_copy_of_a_cache_stands_by_itself():
    codec = codec_of(8, 16, kv_heads=2)
    cache = filled("paged", codec, [5])
    copied = copy.deepcopy(cache)
    cache.release(0)
    assert copied.length(0) == 5 and cache.length(0) == 0
    with pytest.raises(AttributeError):
        _ = filled("static", codec, [5]).prefix_sharing


# ---- the frame ---------------------------------------------------------------------------------------------------


def test_the_frames_cover_keys_of_the_same_text_wherever_it_stands():
    """In layer 0, where a key depends on its token alone, and with a text that nothing is left out of."""
    network = tiny_model(**FIELDS)
    ids = [*[1] * 4, *random_ids(12, 7)]
    frames = cache_frames.frames(network, ids, stretch=16)
    assert [(each.shape, each.dtype) for each in frames] == [((6, 2, 2, 16), torch.float32)] * 3
    cache = kv_cache.ConcatKVCache(3)
    network(Batch.of([(0, ids * 6, 0)]), cache)
    keys, _ = cache.read(0, 0)
    for place in range(6):
        framed = (keys[16 * place + 4 : 16 * place + 16].float() - frames[0][place, 0]) / frames[0][place, 1]
        assert framed.abs().max() < 1.001
        if place:  # and no wider than that
            torch.testing.assert_close(framed.amax(dim=0), torch.ones(2, 16), rtol=0, atol=1e-3)
            torch.testing.assert_close(framed.amin(dim=0), -torch.ones(2, 16), rtol=0, atol=1e-3)


def test_keys_further_on_are_those_that_the_model_would_compute_there():
    network = tiny_model(**FIELDS)
    keys = {}
    for start in (0, 40):
        cache = kv_cache.ConcatKVCache(3)
        network(Batch.of([(0, [*[1] * start, 7, 8, 9], 0)]), cache)
        keys[start] = cache.read(0, 0)[0][start:].float()
    for here, there, way in ((0, 40, 40), (40, 0, -40)):
        found = cache_frames.further_on(network, keys[here], torch.full((3,), way))
        torch.testing.assert_close(found, keys[there], rtol=0, atol=1e-4)


def test_a_context_longer_than_a_byte_can_count_has_longer_stretches():
    network = tiny_model(**FIELDS)
    network.config = dataclasses.replace(network.config, context_length=128 * 300)
    codec = framed(network, 8)
    assert codec.stretch == 150 and len(codec.frames[0]) == 256
    assert codec.numbers_at(torch.tensor([0, 149, 150, 38399, 99999])).tolist() == [0, 0, 1, 255, 255]


def test_the_same_network_gets_the_same_frame():
    network = tiny_model(**FIELDS)
    one, other = (framed(network, 4).frames for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the engine --------------------------------------------------------------------------------------------------

PROMPTS = ["the quick brown fox jumps over", "the quick brown fox sleeps", "a", "the quick brown fox jumps over the"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), **FIELDS)


def tokens_of(llm: LLM, **params: Any) -> list[list[int]]:
    settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, **params}
    return [choice.token_ids for choice in llm.generate(PROMPTS, SamplingParams(**settings))]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tokens_are_equal_whatever_the_engines_parts(kind, folder):
    plain = LLM(folder, dtype="float32", kv_cache_dtype=kind, kv_cache="concat", attention="plain", layers="plain")
    expected = tokens_of(plain)
    ways: list[dict[str, Any]] = [
        {"attention": "plain", "layers": "plain"},
        {"kv_cache": "static"},
        {},
        {"layers": "fused", "block_size": 5},
        {"attention": "sdpa", "layers": "plain"},
        {"attention": "tiled", "layers": "plain", "kv_cache": "static"},
        {"prefix_sharing": False, "max_batch_tokens": 3},
        {"scheduler": "static"},
        {"speculative": "lookup"},
        {"max_requests": 1},
    ]
    for way in ways:
        llm = LLM(folder, dtype="float32", kv_cache_dtype=kind, **way)
        assert tokens_of(llm) == expected, way
        assert tokens_of(llm) == expected, ("with what the first call has left", way)
        if way.get("kv_cache") != "static":
            llm.cache.audit()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_prefix_that_is_found_and_a_request_that_gives_way_change_no_token(kind, folder):
    usual = LLM(folder, dtype="float32", kv_cache_dtype=kind, block_size=4, attention="plain", layers="plain")
    expected = tokens_of(usual)
    before = usual.cache.prefix_hit_tokens
    assert tokens_of(usual) == expected
    assert usual.cache.prefix_hit_tokens > before
    bytes_of_block = sum(stored[:, :, 0].nbytes for stored in usual.cache.storage)
    tight = LLM(folder, dtype="float32", kv_cache_dtype=kind, block_size=4, kv_cache_memory=15 * bytes_of_block)
    assert len(tight.cache.allocator.ref_counts) == 15
    assert tokens_of(tight) == expected
    assert tight.metrics.preemptions > 0
    tight.cache.audit()


def test_several_answers_and_beams_are_equal_over_paged_and_static_caches(folder):
    said = []
    for way in ({}, {"kv_cache": "static"}, {"kv_cache": "concat"}):
        llm = LLM(folder, dtype="float32", kv_cache_dtype="int4", seed=1, attention="plain", layers="plain", **way)
        beams = llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, beam_width=3))[0]
        several = llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, n=3, temperature=1, seed=5))[0]
        said.append((beams.token_ids, [choice.token_ids for choice in several.choices]))
    assert said[0] == said[1] == said[2]


def test_probabilities_of_a_text_are_those_of_rounded_keys_and_values(folder):
    llm = LLM(folder, dtype="float32", kv_cache_dtype="int4", layers="plain")
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = scoring.prompt_logprobs(llm.model, ids, like=llm.cache, chunk=4)
    exact = scoring.prompt_logprobs(llm.model, ids)
    found = llm.logprobs(PROMPTS[0])
    raw = [[entry.raw for entry in entries[1:]] for entries in (found, expected, exact)]
    torch.testing.assert_close(torch.tensor(raw[0]), torch.tensor(raw[1]), rtol=0, atol=1e-4)
    assert (torch.tensor(raw[0]) - torch.tensor(raw[2])).abs().max() > 1e-3


def test_a_model_without_a_tokenizer_has_a_frame_too(tmp_path):
    llm = LLM(save_tiny(tmp_path, with_tokenizer=False, **FIELDS), dtype="float32", kv_cache_dtype="int8")
    assert (llm.cache.codec.frames[0][:, 1] != 1).any()
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].token_ids) > 0


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "share"), [(8, 0.54), (4, 0.385)])
def test_rows_of_bytes_take_a_share_of_bfloat16(bits, share):
    numbers = kv_cache.CacheLayout(30, 3, 64, torch.bfloat16, (CPU,) * 30)
    rows = Codec.unframed(bits, numbers).layout(numbers)
    assert kv_memory.bytes_per_token(rows) <= share * kv_memory.bytes_per_token(numbers)
    blocks = {name: kv_memory.blocks_for(5e7, each, 16, 8192, 32) for name, each in (("n", numbers), ("b", rows))}
    assert blocks["b"] >= int(blocks["n"] / share)
    cache = kv_cache.PagedKVCache(rows, 10, 16)
    assert sum(stored.nbytes for stored in cache.storage) == 160 * kv_memory.bytes_per_token(rows)


def test_the_same_memory_holds_about_twice_the_tokens_and_the_report_counts_them(tmp_path):
    wide = save_tiny(tmp_path, **{**FIELDS, "head_dim": 64})
    size = 16 * 3 * 2 * 2 * 64 * 2 * 40
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": size}
    llms = {kind: LLM(wide, kv_cache_dtype=kind, **settings) for kind in (None, "int8", "int4")}
    blocks = {kind: len(llm.cache.allocator.ref_counts) for kind, llm in llms.items()}
    assert blocks == {None: 40, "int8": 40 * 128 // 69, "int4": 40 * 128 // 49}
    report = memory(llms["int8"], tokens=20)
    owners = [owner for owner in report.owners if owner.group == "cache"]
    assert sum(owner.allotted for owner in owners if owner.name != "working memory") == 74 * 16 * 3 * 2 * 2 * 69
    llms["int8"].generate("abc", SamplingParams(max_tokens=2))
    assert memory(llms["int8"], tokens=20).of("cache", "free").allotted < report.of("cache").allotted + 1


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype is 'int3'; expected one of int8, int4, or None"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype is 8; expected one of int8, int4"),
        ({"kv_cache_dtype": ["int8"]}, "kv_cache_dtype is "),
        ({"kv_cache_dtype": "int8", "window": 8}, "window=8 keeps so few tokens"),
        ({"kv_cache_dtype": "int8", "kv_cache": "none"}, "kv_cache='none' remembers nothing"),
        ({"kv_cache_dtype": "int8", "compile": True}, "graphs read a paged or a static cache"),
        ({"kv_cache_dtype": "int8", "attention": "triton"}, 'attention="triton" cannot be had'),
        ({"kv_cache_dtype": "int8", "attention": "flash"}, 'attention="flash" cannot be had'),
    ],
)
def test_what_cannot_be_meant_gets_a_sentence(arguments, sentence, folder):
    with pytest.raises(RequestError) as refused:
        LLM(folder, dtype="float32", **arguments)
    assert sentence in str(refused.value)


def test_the_compiled_kernel_leaves_other_numbers_alone():
    for dtype, fits in ((torch.float32, True), (torch.bfloat16, True), (torch.float64, False), (torch.float16, False)):
        cache = filled("static", codec_of(8, 16, kv_heads=2, dtype=dtype), [3])
        assert compiled_decode.fits(cache, 0) is fits


def test_the_command_line_hands_the_kind_on(folder, monkeypatch, capsys):
    from llmfromscratch import engine

    asked = []
    original = engine.LLM.__init__
    monkeypatch.setattr(
        engine.LLM, "__init__", lambda self, *given, **named: (asked.append(named), original(self, *given, **named))[1]
    )
    options = ["--kv-cache-dtype", "int4", "--max-tokens", "3", "--dtype", "float32"]
    cli.main(["generate", "abc", "--model", str(folder), *options])
    assert asked[0]["kv_cache_dtype"] == "int4"


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.0015), ("int4", 0.027)])
def test_on_the_real_model_the_damage_is_small(kind, most, smollm2_fp32):
    network = smollm2_fp32.model
    codec = cache_frames.codec(kind, network, smollm2_fp32.tokenizer)
    from llmfromscratch import calibration

    ids = smollm2_fp32.tokenizer.encode(calibration.topics()[1][40000:43000])[:512]
    batch = Batch.of([(0, ids, 0)], all_logits=True)
    exact = network(batch, kv_cache.ConcatKVCache(network.config.num_layers))
    plain = Codec.unframed(codec.bits, kv_cache.CacheLayout.of(network.config))
    found = []
    for each in (codec, plain):
        cache = QuantizedKVCache(kv_cache.ConcatKVCache(network.config.num_layers), each)
        found.append(float(quantization.divergence(exact, network(batch, cache)).mean()))
    assert found[0] < most
    assert found[0] < found[1]
