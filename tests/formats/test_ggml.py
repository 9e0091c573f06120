"""GGML blocks become the numbers that the gguf package makes of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from llmfromscratch.formats import ggml
from llmfromscratch.formats.gguf import read_gguf

# Where a block of each type holds float16 numbers; any other byte may have any value.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def random_blocks(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes whose scales are finite, negative ones and zeros among them."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, ggml.BLOCK_SIZES[dtype][1]), dtype=np.uint8)
    for byte in HALVES[dtype]:
        scales = random.normal(0, 0.1, count).astype(np.float16)
        scales[0] = 0
        blocks[:, byte : byte + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def oracle(blocks: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype]))


def test_a_dequantizer_stands_for_every_quantized_type_but_the_one_that_chapter_1_teaches() -> None:
    quantized = {name for name, (weights, _) in ggml.BLOCK_SIZES.items() if weights > 1}
    assert set(ggml.DEQUANTIZERS) == quantized - {"Q4_1"} == set(HALVES)


def test_block_sizes_and_type_numbers_are_those_of_the_gguf_package() -> None:
    for name, sizes in ggml.BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes
    for kind in gguf.GGMLQuantizationType:
        assert ggml.TYPE_NAMES[kind.value] == kind.name


@pytest.mark.parametrize("dtype", ggml.DEQUANTIZERS)
def test_random_blocks_become_exactly_what_the_gguf_package_makes_of_them(dtype: str) -> None:
    blocks = random_blocks(dtype, 300)
    values = ggml.DEQUANTIZERS[dtype](torch.from_numpy(blocks))
    assert values.dtype == torch.float32
    assert torch.equal(values, oracle(blocks, dtype))


@pytest.mark.parametrize("dtype", ggml.DEQUANTIZERS)
def test_a_chunk_of_blocks_is_dequantized_without_changing_the_blocks(dtype: str) -> None:
    blocks = random_blocks(dtype, 20)
    given = torch.from_numpy(blocks.copy())
    chunk = ggml.DEQUANTIZERS[dtype](given[3:11])
    assert torch.equal(chunk, oracle(blocks[3:11], dtype))
    assert torch.equal(given, torch.from_numpy(blocks))


@pytest.mark.parametrize("dtype", ggml.DEQUANTIZERS)
def test_no_blocks_become_no_numbers(dtype: str) -> None:
    weights, size = ggml.BLOCK_SIZES[dtype]
    assert ggml.DEQUANTIZERS[dtype](torch.empty(0, size, dtype=torch.uint8)).shape == (0, weights)


def test_every_tensor_of_the_packaged_model_is_what_the_gguf_package_reads(smollm2_gguf: Path) -> None:
    ours = read_gguf(smollm2_gguf).tensors
    theirs = gguf.GGUFReader(smollm2_gguf).tensors
    assert list(ours) == [tensor.name for tensor in theirs]
    for expected in theirs:
        tensor = ours[expected.name]
        assert tensor.dtype == expected.tensor_type.name
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.nbytes == expected.n_bytes
        values = tensor.read()
        if tensor.dtype == "Q8_0":
            decoded = ggml.DEQUANTIZERS["Q8_0"](values).view(tensor.shape)
            assert torch.equal(decoded, oracle(expected.data, "Q8_0"))
        else:
            raw = values if tensor.dtype == "Q4_1" else values.reshape(-1).view(torch.uint8)
            assert raw.numpy().tobytes() == expected.data.tobytes()
