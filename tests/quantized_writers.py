"""Files in other programs' quantized layouts, written one code at a time from the layouts' descriptions.

A `Grid` is a matrix before it is written: codes, zeros and scales. `numbers` says what it stands for, `as_packed` the
same in the arithmetic of our int4 blocks, whose minimum is float16. Nothing here knows how the package reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
FP4 = [*FP4, *(-level for level in FP4)]


@dataclass
class Grid:
    """codes: [rows, width]; zeros, scales (float16): [rows, groups]; group_of: of each column; bits of a code."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_of: list[int]
    bits: int

    def numbers(self) -> torch.Tensor:
        """scale * (code - zero) in float32."""
        return self._each(lambda scale, zero, code: scale * np.float32(int(code) - int(zero)))

    def as_packed(self) -> torch.Tensor:
        """code * scale + minimum in float32, the minimum -scale * zero rounded to float16 before."""
        return self._each(
            lambda scale, zero, code: np.float32(code) * scale + np.float32(np.float16(-scale * np.float32(zero)))
        )

    def steps(self) -> torch.Tensor:
        """scale * zero of each number: what the minimum is made of."""
        return self._each(lambda scale, zero, code: scale * np.float32(zero))

    def _each(self, value) -> torch.Tensor:
        rows, width = self.codes.shape
        result = np.zeros((rows, width), dtype=np.float32)
        for row in range(rows):
            for column in range(width):
                group = self.group_of[column]
                scale = np.float32(self.scales[row, group])
                result[row, column] = value(scale, self.zeros[row, group], self.codes[row, column])
        return torch.from_numpy(result)


def random_grid(rows, width, bits=4, group=None, symmetric=False, mixed=False, seed=0) -> Grid:
    """mixed: columns belong to groups in no order, each group having as many as without."""
    random = np.random.default_rng(seed)
    size = group or width
    groups = -(-width // size)
    owners = [column // size for column in range(width)]
    if mixed:
        random.shuffle(owners)
    zeros = np.full((rows, groups), 2 ** (bits - 1)) if symmetric else random.integers(0, 2**bits, (rows, groups))
    scales = random.uniform(0.001, 0.05, (rows, groups)).astype(np.float16)
    return Grid(random.integers(0, 2**bits, (rows, width)), zeros, scales, owners, bits)


def words_of(codes, bits) -> list[int]:
    """Codes in a stream of bits, the lowest bits first, cut into 32-bit words."""
    stream = 0
    for index, code in enumerate(codes):
        stream |= int(code) << (bits * index)
    count = len(codes) * bits // 32
    assert count * 32 == len(codes) * bits, "the codes fill whole words"
    return [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(count)]


def signed(words) -> torch.Tensor:
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32)


def gptq_tensors(grid: Grid, less_one=True, with_index=True) -> dict[str, torch.Tensor]:
    """AutoGPTQ's layout: words of codes down the inputs, words of zeros along the outputs."""
    rows, width = grid.codes.shape
    by_output = [words_of([grid.codes[row, column] for column in range(width)], grid.bits) for row in range(rows)]
    words = [[by_output[row][index] for row in range(rows)] for index in range(len(by_output[0]))]
    zeros = []
    for group in range(grid.zeros.shape[1]):
        kept = [(int(grid.zeros[row, group]) - (1 if less_one else 0)) % 2**grid.bits for row in range(rows)]
        zeros.append(words_of(kept, grid.bits))
    tensors = {
        "qweight": signed(words),
        "qzeros": signed(zeros),
        "scales": torch.from_numpy(np.ascontiguousarray(grid.scales.T)),
    }
    return tensors | ({"g_idx": torch.tensor(grid.group_of, dtype=torch.int32)} if with_index else {})


def awq_tensors(grid: Grid) -> dict[str, torch.Tensor]:
    """AutoAWQ's GEMM layout: a word of eight outputs, places 0 to 7 holding outputs 0 2 4 6 1 3 5 7."""

    def along_outputs(codes) -> list[int]:
        words = []
        for first in range(0, len(codes), 8):
            word = 0
            for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                word |= int(codes[first + output]) << (4 * place)
            words.append(word)
        return words

    width = grid.codes.shape[1]
    return {
        "qweight": signed([along_outputs(grid.codes[:, column]) for column in range(width)]),
        "qzeros": signed([along_outputs(grid.zeros[:, group]) for group in range(grid.zeros.shape[1])]),
        "scales": torch.from_numpy(np.ascontiguousarray(grid.scales.T)),
    }


def state_json(**said) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode("utf-8")), dtype=torch.uint8)


@dataclass
class Blocks:
    """A matrix of bitsandbytes in 16 levels: its tensors, and its absmax for each block, float32."""

    tensors: dict[str, torch.Tensor]
    codes: np.ndarray
    absmax: list[np.float32]
    levels: list[float]
    block: int

    def numbers(self, rounded=None) -> torch.Tensor:
        """level * absmax in float32, one after the other; rounded: a type that the absmax goes through before."""
        rows, width = self.codes.shape
        result = np.zeros((rows, width), dtype=np.float32)
        for row in range(rows):
            for column in range(width):
                scale = self.absmax[(row * width + column) // self.block]
                scale = scale if rounded is None else np.float32(rounded(scale))
                result[row, column] = scale * np.float32(self.levels[self.codes[row, column]])
        return torch.from_numpy(result)


def random_blocks(rows, width, block=64, nested=False, levels=NF4, kind="nf4", seed=0) -> Blocks:
    """Codes in the order of the rows, two a byte, the first in the upper half; absmax as it is, or coded in 256 levels
    less its mean ("double quantization"), in blocks of 256."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (rows, width))
    flat = [int(code) for code in codes.reshape(-1)]
    flat += [0] * (len(flat) % 2)
    packed = [[flat[index] << 4 | flat[index + 1]] for index in range(0, len(flat), 2)]
    count = -(-rows * width // block)
    said = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, width]}
    tensors = {
        "weight": torch.tensor(packed, dtype=torch.uint8),
        "weight.quant_map": torch.tensor(levels, dtype=torch.float32),
    }
    if nested:
        coded = random.integers(0, 256, count)
        map_of_256 = np.sort(random.uniform(-1, 1, 256).astype(np.float32))
        maximums = random.uniform(0.005, 0.01, -(-count // 256)).astype(np.float32)
        offset = 0.02
        absmax = [map_of_256[coded[index]] * maximums[index // 256] + np.float32(offset) for index in range(count)]
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors["weight.absmax"] = torch.tensor(coded, dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.from_numpy(maximums)
        tensors["weight.nested_quant_map"] = torch.from_numpy(map_of_256)
    else:
        absmax = list(random.uniform(0.01, 0.05, count).astype(np.float32))
        tensors["weight.absmax"] = torch.tensor(np.array(absmax))
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = state_json(**said)
    return Blocks(tensors, codes, absmax, levels, block)


def random_bytes(rows, width, seed=0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """LLM.int8's tensors, and the numbers: code * (SCB / 127) in float32."""
    random = np.random.default_rng(seed)
    codes = random.integers(-127, 128, (rows, width))
    maximums = random.uniform(0.05, 0.2, rows).astype(np.float32)
    numbers = np.zeros((rows, width), dtype=np.float32)
    for row in range(rows):
        for column in range(width):
            numbers[row, column] = np.float32(codes[row, column]) * (maximums[row] / np.float32(127))
    tensors = {
        "weight": torch.tensor(codes, dtype=torch.int8),
        "SCB": torch.from_numpy(maximums),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, torch.from_numpy(numbers)
