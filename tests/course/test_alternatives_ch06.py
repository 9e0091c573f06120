"""Chapter 6's checks of the floor, the online softmax, fused products and buckets accept what is right, however it is
written."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course.checking import run_check
from llmfromscratch.course.exercises import find

BYTES_PRODUCT_BY_PRODUCT = """
def decode_bytes(config, context, weight_bytes, cache_bytes):
    c = config
    total = c.vocab_size * c.hidden_size * weight_bytes
    for layer in range(c.num_layers):
        for rows in [c.num_heads * c.head_dim] * 2 + [c.num_kv_heads * c.head_dim] * 2 + [c.intermediate_size] * 3:
            total += rows * c.hidden_size * weight_bytes
        for token in range(context):
            total += cache_bytes * c.num_kv_heads * c.head_dim
            total += cache_bytes * c.num_kv_heads * c.head_dim
    return total
"""
BYTES_IN_ONE_LINE = """
def decode_bytes(config, context, weight_bytes, cache_bytes):
    kv = config.num_kv_heads * config.head_dim
    return float(
        weight_bytes * config.hidden_size * (config.vocab_size + config.num_layers * (
            2 * (config.num_heads * config.head_dim + kv) + 3 * config.intermediate_size))
        + 2 * cache_bytes * kv * context * config.num_layers)
"""
TILE_WITH_WHERE = """
def fold_tile(mixed, top, total, scores, values):
    new_top = torch.max(top, scores.max(dim=-1).values)
    nothing = new_top == float("-inf")
    shrink = torch.where(nothing, 0, torch.exp(top - new_top))
    powers = torch.where(nothing[..., None], 0, torch.exp(scores - new_top[..., None]))
    return shrink[..., None] * mixed + torch.matmul(powers, values), new_top, shrink * total + powers.sum(-1)
"""
TILE_WITH_NAN_TO_NUM = """
def fold_tile(mixed, top, total, scores, values):
    new_top = torch.cat([top.unsqueeze(-1), scores], dim=-1).amax(-1)
    shrink = (top - new_top).exp().nan_to_num(nan=0.0)
    powers = (scores - new_top.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
    mixed = mixed * shrink.unsqueeze(-1) + torch.einsum("...rt,...td->...rd", powers, values)
    return mixed, new_top, total * shrink + torch.einsum("...rt->...r", powers)
"""
TILE_TOKEN_BY_TOKEN = """
def fold_tile(mixed, top, total, scores, values):
    for token in range(scores.shape[-1]):
        score, value = scores[..., token], values[..., token : token + 1, :]
        new = torch.maximum(top, score)
        safe = torch.where(torch.isinf(new), torch.zeros_like(new), new)
        old, power = (top - safe).exp(), (score - safe).exp()
        mixed = mixed * old.unsqueeze(-1) + power.unsqueeze(-1) * value
        total = total * old + power
        top = new
    return mixed, top, total
"""
TILE_OF_ITS_OWN_THEN_MERGED = """
def fold_tile(mixed, top, total, scores, values):
    largest = scores.amax(-1)
    own = torch.exp(scores - largest.clamp(min=-1e30).unsqueeze(-1))
    both = torch.maximum(top, largest)
    floor = both.clamp(min=-1e30)
    a, b = torch.exp(top - floor), torch.exp(largest - floor)
    return mixed * a.unsqueeze(-1) + (own @ values) * b.unsqueeze(-1), both, total * a + own.sum(-1) * b
"""
FUSE_BY_FILLING = """
def fuse_rows(weights):
    fused = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=weights[0].dtype)
    views, start = [], 0
    for weight in weights:
        views.append(fused[start : start + weight.shape[0]])
        views[-1].copy_(weight)
        start += weight.shape[0]
    return fused, views
"""
FUSE_WITH_VSTACK = """
def fuse_rows(weights):
    fused = torch.vstack(tuple(weights))
    return fused, fused.split([weight.size(0) for weight in weights], dim=0)
"""
FUSE_WITH_NARROW = """
def fuse_rows(weights):
    ends = torch.tensor([len(weight) for weight in weights]).cumsum(0).tolist()
    fused = torch.concat([*weights], dim=0)
    return fused, [fused.narrow(0, end - len(weight), len(weight)) for end, weight in zip(ends, weights)]
"""
GAIN_BY_A_DIAGONAL = """
def fold_gain(weight, gain):
    return weight @ torch.diag(gain.to(weight.dtype))
"""
GAIN_IN_FLOAT64 = """
def fold_gain(weight, gain):
    return (weight.double() * gain.double()).to(weight.dtype)
"""
GAIN_BY_EINSUM = """
def fold_gain(weight, gain):
    return torch.einsum("rw,w->rw", weight, gain.type_as(weight))
"""
GAIN_ON_A_COPY = """
def fold_gain(weight, gain):
    folded = weight.clone()
    for column in range(gain.shape[0]):
        folded[:, column] *= gain[column]
    return folded
"""
MULTIPLY_WITH_A_GUARD = """
def multiply_rows(x, weight, output, first, end):
    step = 64 // weight.itemsize
    for row in range(first, end):
        ahead = row + AHEAD
        if ahead < end:
            for column in range(0, weight.shape[1], step):
                prefetch(weight, ahead, column)
        for m in range(x.shape[0]):
            total = np.float32(0)
            for i in range(x.shape[1]):
                total += widen(weight[row, i]) * x[m, i]
            output[m, row] = total
"""
MULTIPLY_FETCHING_THE_FIRST_TOO = """
def multiply_rows(x, weight, output, first, end):
    inputs, width = x.shape
    step_of_a_line = 64 // weight.itemsize
    lines = (width + step_of_a_line - 1) // step_of_a_line
    for row in range(first, min(first + AHEAD, end)):
        for line in range(lines):
            prefetch(weight, row, line * step_of_a_line)
    for row in range(first, end):
        for line in range(lines):
            prefetch(weight, min(row + AHEAD, len(weight) - 1), line * step_of_a_line)
        for m in range(inputs):
            total = np.float32(0.0)
            for i in range(width):
                total = total + np.float32(x[m, i] * widen(weight[row, i]))
            output[m, row] = total
"""
MULTIPLY_SEVERAL_INPUTS_AT_ONCE = """
AHEAD = 2


def multiply_rows(x, weight, output, first, end):
    inputs, width = x.shape
    last = weight.shape[0] - 1
    for row in range(first, end):
        for column in range(0, width, per_line(weight)):
            prefetch(weight, min(row + AHEAD, last), column)
        for m in range(inputs):
            output[m, row] = np.float32(0)
        for i in range(width):
            number = widen(weight[row, i])
            for m in range(inputs):
                output[m, row] += x[m, i] * number
"""
MULTIPLY_TWO_SUMS = """
def multiply_rows(x, weight, output, first, end):
    inputs, width = x.shape
    for row in range(first, end):
        target = row + AHEAD if row + AHEAD < weight.shape[0] else weight.shape[0] - 1
        for column in range(0, width, per_line(weight)):
            prefetch(weight, target, column)
        for m in range(inputs):
            even = odd = np.float32(0)
            for i in range(0, width - 1, 2):
                even += x[m, i] * widen(weight[row, i])
                odd += x[m, i + 1] * widen(weight[row, i + 1])
            if width % 2:
                even += x[m, width - 1] * widen(weight[row, width - 1])
            output[m, row] = even + odd
"""
MULTIPLY_WITH_A_COMPILED_HELPER = """
import numba


@numba.njit
def dot(x, weight, m, row):
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[m, i] * widen(weight[row, i])
    return total


def multiply_rows(x, weight, output, first, end):
    for row in range(first, end):
        for column in range(0, x.shape[1], per_line(weight)):
            prefetch(weight, min(row + AHEAD, weight.shape[0] - 1), column)
        for m in range(x.shape[0]):
            output[m, row] = dot(x, weight, m, row)
"""
BUCKET_BY_BITS = """
def bucket_of(count, smallest=1):
    return smallest << max(-(-count // smallest) - 1, 0).bit_length()
"""
BUCKET_BY_RECURSION = """
def bucket_of(count, smallest=1):
    return smallest if count <= smallest else bucket_of(count, 2 * smallest)
"""
BUCKET_BY_COUNTING = """
import itertools


def bucket_of(count, smallest=1):
    return next(smallest * 2**power for power in itertools.count() if smallest * 2**power >= count)
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("6.1", BYTES_PRODUCT_BY_PRODUCT),
        ("6.1", BYTES_IN_ONE_LINE),
        ("6.2", TILE_WITH_WHERE),
        ("6.2", TILE_WITH_NAN_TO_NUM),
        ("6.2", TILE_TOKEN_BY_TOKEN),
        ("6.2", TILE_OF_ITS_OWN_THEN_MERGED),
        ("6.3", FUSE_BY_FILLING),
        ("6.3", FUSE_WITH_VSTACK),
        ("6.3", FUSE_WITH_NARROW),
        ("6.4", GAIN_BY_A_DIAGONAL),
        ("6.4", GAIN_IN_FLOAT64),
        ("6.4", GAIN_BY_EINSUM),
        ("6.4", GAIN_ON_A_COPY),
        ("6.5", MULTIPLY_WITH_A_GUARD),
        ("6.5", MULTIPLY_FETCHING_THE_FIRST_TOO),
        ("6.5", MULTIPLY_SEVERAL_INPUTS_AT_ONCE),
        ("6.5", MULTIPLY_TWO_SUMS),
        ("6.5", MULTIPLY_WITH_A_COMPILED_HELPER),
        ("6.6", BUCKET_BY_BITS),
        ("6.6", BUCKET_BY_RECURSION),
        ("6.6", BUCKET_BY_COUNTING),
    ],
)
def test_a_function_written_in_another_way_passes(exercise_id, source):
    run_check(find(exercise_id), mutants.written(exercise_id, source))
