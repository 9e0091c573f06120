"""Chapter 7's checks of grids, codes, packing and the int8 product accept what is right, however it is written."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course.checking import run_check
from llmfromscratch.course.exercises import find

GRID_GROUP_BY_GROUP = """
def grid_of(groups, bits, symmetric):
    shape = groups.shape[:-1]
    scales, minimums = [], []
    for numbers in groups.reshape(-1, groups.shape[-1]).tolist():
        if symmetric:
            half = 2 ** (bits - 1)
            scale = max(abs(x) for x in numbers) / (half - 1)
            scale = scale if scale else 1.0
            minimums.append(-half * scale)
        else:
            scale = (max(numbers) - min(numbers)) / (2**bits - 1)
            scale = scale if scale else 1.0
            minimums.append(min(numbers))
        scales.append(scale)
    return torch.tensor(scales).reshape(shape), torch.tensor(minimums).reshape(shape)
"""
GRID_BY_AMINMAX = """
def grid_of(groups, bits, symmetric):
    lowest, highest = torch.aminmax(groups.to(torch.float32), dim=-1)
    if symmetric:
        steps = (1 << (bits - 1)) - 1
        scales = torch.maximum(-lowest, highest) / steps
        scales[scales == 0] = 1
        return scales, -(steps + 1) * scales
    scales = (highest - lowest) / ((1 << bits) - 1)
    scales[scales == 0] = 1
    return scales, lowest
"""
GRID_IN_FLOAT64 = """
def grid_of(groups, bits, symmetric):
    wide = groups.double()
    least, most = wide.min(dim=-1).values, wide.max(dim=-1).values
    scales = wide.abs().max(dim=-1)[0] / (2 ** (bits - 1) - 1) if symmetric else (most - least) / (2**bits - 1)
    scales = scales.masked_fill(scales == 0, 1.0)
    minimums = scales * -(2 ** (bits - 1)) if symmetric else least
    return scales.float(), minimums.float()
"""
CODES_WITH_TIES_UP = """
def codes_of(groups, scales, minimums, bits):
    places = (groups.double() - minimums[..., None].double()) / scales[..., None].double()
    return torch.floor(places + 0.5).clamp(0, 2**bits - 1).byte()
"""
CODES_CLAMPED_FIRST = """
def codes_of(groups, scales, minimums, bits):
    places = (groups.float() - minimums.unsqueeze(-1)) * scales.reciprocal().unsqueeze(-1)
    return torch.round(torch.clip(places, 0, 2**bits - 1)).type(torch.uint8)
"""
CODES_BY_SEARCH = """
def codes_of(groups, scales, minimums, bits):
    levels = minimums[..., None] + scales[..., None] * torch.arange(2**bits)
    return (groups.float()[..., None] - levels[..., None, :]).abs().argmin(dim=-1).to(torch.uint8)
"""
QUANTIZE_IN_A_LOOP = """
def quantize(weight, bits, group, symmetric=False):
    rows, width = weight.shape
    size = width if group is None else group
    scales, minimums = grids_of(weight, bits, group, symmetric=symmetric)
    codes = torch.zeros(rows, width, dtype=torch.uint8)
    for number, start in enumerate(range(0, width, size)):
        part = weight[:, start : start + size]
        codes[:, start : start + size] = codes_of(part, scales[:, number], minimums[:, number], bits)
    return Quantized(codes, scales, minimums, bits=bits, group=size)
"""
QUANTIZE_COLUMN_BY_COLUMN = """
def quantize(weight, bits, group, symmetric=False):
    group_size = group or weight.shape[1]
    grids = grids_of(weight, bits, group, symmetric)
    scales, minimums = (g.repeat_interleave(group_size, dim=1)[:, : weight.shape[1]] for g in grids)
    codes = ((weight.float() - minimums) / scales).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Quantized(codes, *grids, bits, group_size)
"""
QUANTIZE_WITHOUT_THE_OTHERS = """
def quantize(weight, bits, group, symmetric=False):
    size = group or weight.shape[1]
    scales, minimums, codes = [], [], []
    for part in weight.split(size, dim=1):
        scale, minimum = grid_of(part, bits, symmetric)
        if group:
            scale, minimum = scale.half().float(), minimum.half().float()
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        scales.append(scale)
        minimums.append(minimum)
        codes.append(codes_of(part, scale, minimum, bits))
    return Quantized(torch.hstack(codes), torch.stack(scales, 1), torch.stack(minimums, 1), bits, size)
"""
PACK_BYTE_BY_BYTE = """
def pack_int4(codes):
    rows, width = codes.shape
    packed = torch.zeros(rows, width // 2, dtype=torch.uint8)
    for start in range(0, width, 32):
        for i in range(16):
            packed[:, start // 2 + i] = codes[:, start + i] + 16 * codes[:, start + 16 + i]
    return packed
"""
PACK_BY_CHUNKS = """
def pack_int4(codes):
    blocks = [block[:, :16] + block[:, 16:] * 16 for block in codes.split(32, dim=1)]
    return torch.cat(blocks, dim=1)
"""
PACK_THROUGH_WIDE_NUMBERS = """
def pack_int4(codes):
    halves = codes.reshape(codes.shape[0], codes.shape[1] // 32, 2, 16).long()
    return (halves[:, :, 0] ^ (halves[:, :, 1] << 4)).reshape(codes.shape[0], -1).to(torch.uint8)
"""
PRODUCT_WITH_A_GUARD = """
def multiply_int8_rows(x, codes, scales, output, first, end):
    for row in range(first, end):
        ahead = row + AHEAD
        if ahead < end:
            for column in range(0, codes.shape[1], 64):
                prefetch(codes, ahead, column)
        scale = scales[row]
        for m in range(x.shape[0]):
            total = np.float32(0)
            for i in range(x.shape[1]):
                total += np.float32(codes[row, i]) * x[m, i]
            output[m, row] = scale * total
"""
PRODUCT_FETCHING_THE_FIRST_TOO = """
def multiply_int8_rows(x, codes, scales, output, first, end):
    inputs, width = x.shape
    for row in range(first, min(first + AHEAD, end)):
        for column in range(0, width, per_line(codes)):
            prefetch(codes, row, column)
    for row in range(first, end):
        for column in range(0, width, per_line(codes)):
            prefetch(codes, min(row + AHEAD, len(codes) - 1), column)
        for m in range(inputs):
            total = np.float32(0.0)
            for i in range(width):
                total = total + x[m, i] * codes[row, i]
            output[m, row] = total * scales[row]
"""
PRODUCT_SEVERAL_INPUTS_AT_ONCE = """
AHEAD = 2


def multiply_int8_rows(x, codes, scales, output, first, end):
    inputs, width = x.shape
    last = codes.shape[0] - 1
    for row in range(first, end):
        for column in range(0, width, per_line(codes)):
            prefetch(codes, min(row + AHEAD, last), column)
        for m in range(inputs):
            output[m, row] = np.float32(0)
        for i in range(width):
            number = np.float32(codes[row, i])
            for m in range(inputs):
                output[m, row] += x[m, i] * number
        for m in range(inputs):
            output[m, row] *= scales[row]
"""
ROWS_ONE_BY_ONE = """
def quantize_rows(x):
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    for place, row in enumerate(x.double()):
        scale = float(row.abs().max()) / 127 or 1.0
        codes[place], scales[place] = torch.floor(row / scale + 0.5), scale
    return codes, scales
"""
ROWS_WITH_KEEPDIM = """
def quantize_rows(x):
    x = x.to(torch.float32)
    scales = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True) / 127
    scales = scales.masked_fill(scales == 0, 1)
    return (x / scales).round_().clamp_(-127, 127).char(), scales.squeeze(1)
"""
ROWS_BY_THE_RECIPROCAL = """
def quantize_rows(x):
    low, high = torch.aminmax(x.float(), dim=-1)
    largest = torch.maximum(high, -low)
    scales = torch.where(largest > 0, largest / 127.0, torch.ones(()))
    return torch.round(torch.einsum("rw,r->rw", x.float(), 1 / scales)).to(torch.int8), scales
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("7.1", GRID_GROUP_BY_GROUP),
        ("7.1", GRID_BY_AMINMAX),
        ("7.1", GRID_IN_FLOAT64),
        ("7.2", CODES_WITH_TIES_UP),
        ("7.2", CODES_CLAMPED_FIRST),
        ("7.2", CODES_BY_SEARCH),
        ("7.3", QUANTIZE_IN_A_LOOP),
        ("7.3", QUANTIZE_COLUMN_BY_COLUMN),
        ("7.3", QUANTIZE_WITHOUT_THE_OTHERS),
        ("7.4", PACK_BYTE_BY_BYTE),
        ("7.4", PACK_BY_CHUNKS),
        ("7.4", PACK_THROUGH_WIDE_NUMBERS),
        ("7.5", PRODUCT_WITH_A_GUARD),
        ("7.5", PRODUCT_FETCHING_THE_FIRST_TOO),
        ("7.5", PRODUCT_SEVERAL_INPUTS_AT_ONCE),
        ("7.6", ROWS_ONE_BY_ONE),
        ("7.6", ROWS_WITH_KEEPDIM),
        ("7.6", ROWS_BY_THE_RECIPROCAL),
    ],
)
def test_a_function_written_in_another_way_passes(exercise_id, source):
    run_check(find(exercise_id), mutants.written(exercise_id, source))


def test_quantize_passes_beside_a_grid_and_codes_of_the_learners_own():
    own = "\n\n".join([GRID_IN_FLOAT64, CODES_WITH_TIES_UP, mutants.code_of("7.3")])
    run_check(find("7.3"), mutants.written("7.3", own))
