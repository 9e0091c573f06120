"""Chapter 7's checks of damage, calibration, keys and budgets accept what is right, however it is written."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course.checking import run_check
from llmfromscratch.course.exercises import find

DIVERGENCE_BY_KL_DIV = """
def divergence(logits, other):
    ours, theirs = (torch.nn.functional.log_softmax(x, dim=-1, dtype=torch.float32) for x in (logits, other))
    return torch.nn.functional.kl_div(theirs, ours, reduction="none", log_target=True).sum(-1)
"""
DIVERGENCE_AS_CROSS_ENTROPY_LESS_ENTROPY = """
def divergence(logits, other):
    p = logits.double().softmax(-1)
    cross = -(p * other.double().log_softmax(-1)).sum(-1)
    entropy = -(p * logits.double().log_softmax(-1)).sum(-1)
    return (cross - entropy).to(torch.float32)
"""
DIVERGENCE_BY_LOGSUMEXP = """
def divergence(logits, other):
    logits, other = logits.float(), other.float()
    difference = logits - other
    p = torch.exp(logits - logits.logsumexp(1, keepdim=True))
    return torch.einsum("tv,tv->t", p, difference) - logits.logsumexp(1) + other.logsumexp(1)
"""
AWQ_WITH_A_LIST = """
def awq_scale(weight, moments, bits, group, size=None, steps=20):
    if size is None:
        size = torch.diag(moments).float() ** 0.5
    size = size.float()
    alive = size[size > 0]
    size = size.masked_fill(size <= 0, alive.min().item() if len(alive) else 1.0)
    tried = []
    for step in range(steps + 1):
        factors = size.pow(step / steps)
        factors = factors / torch.sqrt(factors.amax() * factors.amin())
        rounded = quantize(weight * factors, bits, group).dequantize() / factors
        tried.append((output_error(weight, rounded, moments), step, factors))
    return min(tried, key=lambda each: each[:2])[2]
"""
AWQ_IN_LOGARITHMS = """
def awq_scale(weight, moments, bits, group, size=None, steps=20):
    loud = (moments.diagonal().sqrt() if size is None else size).double()
    loud[loud == 0] = loud[loud > 0].min() if (loud > 0).any() else 1.0
    logs = loud.log()
    logs = logs - (logs.max() + logs.min()) / 2
    best, least = None, float("inf")
    for alpha in torch.linspace(0, 1, steps + 1, dtype=torch.float64):
        factors = (alpha * logs).exp()
        lost = weight.double() - quantize(weight * factors, bits, group).dequantize().double() / factors
        error = torch.einsum("ri,ij,rj->", lost, moments.double(), lost).item()
        if error < least:
            best, least = factors.float(), error
    return best
"""
AWQ_NORMALIZED_AT_THE_END = """
def awq_scale(weight, moments, bits, group, size=None, steps=20):
    size = moments.diagonal().sqrt() if size is None else size
    alive = size > 0
    size = torch.where(alive, size, size[alive].min() if alive.any() else 1)
    best, least = None, float("inf")
    for step in range(steps + 1):
        factors = size ** (step / steps)
        error = output_error(weight, quantize(weight * factors, bits, group).dequantize() / factors, moments)
        if error < least:
            best, least = factors, error
    return best / (best.max() * best.min()).sqrt()
"""
AWQ_FROM_PLAIN_ROUNDING_ON = """
def awq_scale(weight, moments, bits, group, size=None, steps=20):
    if size is None:
        size = moments.diagonal().float().sqrt()
    if not (size > 0).any():
        return torch.ones(weight.shape[1])
    size = torch.where(size > 0, size, size[size > 0].min())
    best = torch.ones(weight.shape[1])
    error = output_error(weight, quantize(weight, bits, group).dequantize(), moments)
    for step in range(1, steps + 1):
        s = size ** (step / steps) / ((size.max() * size.min()) ** (step / steps)) ** 0.5
        now = output_error(weight * s, quantize(weight * s, bits, group).dequantize(), moments / s[:, None] / s)
        if now < error:
            best, error = s, now
    return best
"""
GPTQ_WITHOUT_BLOCKS = """
def gptq(weight, moments, bits, group, act_order=True):
    width = weight.shape[1]
    size = group or width
    scales, minimums = grids_of(weight, bits, group)
    order = torch.argsort(-moments.diagonal()) if act_order else torch.arange(width)
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(width).double()
    factor = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True)
    left = weight.double()[:, order]
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    for place, column in enumerate(order.tolist()):
        scale, minimum = scales[:, column // size], minimums[:, column // size]
        codes[:, place] = codes_of(left[:, place : place + 1], scale, minimum, bits).squeeze(1)
        error = (left[:, place] - (minimum + scale * codes[:, place])) / factor[place, place]
        left -= error[:, None] * factor[place]
    return Quantized(codes[:, order.argsort()], scales, minimums, bits, size)
"""
GPTQ_IN_FLOAT32 = """
def gptq(weight, moments, bits, group, act_order=True):
    width = weight.shape[1]
    scales, minimums = grids_of(weight, bits, group)
    order = moments.diagonal().argsort(descending=True) if act_order else torch.arange(width)
    moments = moments.float()
    moments = moments + torch.eye(width) * 0.01 * moments.diagonal().mean()
    inverse = torch.linalg.inv(moments[order][:, order])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2).T
    left, codes = weight.float()[:, order], torch.empty(weight.shape, dtype=torch.uint8)
    for place in range(width):
        column, grid = order[place], order[place] // (group or width)
        codes[:, column] = codes_of(left[:, place, None], scales[:, grid], minimums[:, grid], bits)[:, 0]
        error = left[:, place] - minimums[:, grid] - scales[:, grid] * codes[:, column]
        left[:, place + 1 :] -= torch.outer(error / factor[place, place], factor[place, place + 1 :])
    return Quantized(codes, scales, minimums, bits, group or width)
"""
GPTQ_AS_BRAIN_SURGERY = """
def gptq(weight, moments, bits, group, act_order=True):
    width = weight.shape[1]
    size = width if group is None else group
    scales, minimums = grids_of(weight, bits, group)
    diagonal = moments.diagonal()
    rest = diagonal.argsort(descending=True).tolist() if act_order else list(range(width))
    moments = moments.double() + torch.eye(width, dtype=torch.float64) * diagonal.double().mean() / 100
    now, codes = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.uint8)
    while rest:
        inverse = torch.linalg.inv(moments[rest][:, rest])
        column = rest[0]
        scale, minimum = scales[:, column // size], minimums[:, column // size]
        codes[:, column] = codes_of(now[:, column].unsqueeze(-1), scale, minimum, bits)[:, 0]
        error = now[:, column] - (minimum + scale * codes[:, column])
        now[:, rest] -= torch.outer(error, inverse[0] / inverse[0, 0])
        rest = rest[1:]
    return Quantized(codes, scales, minimums, bits, size)
"""
GPTQ_IN_SMALL_BLOCKS = (
    mutants.code_of("7.9")
    .replace("range(0, width, BLOCK)", "range(0, width, 3)")
    .replace("min(start + BLOCK, width)", "min(start + 3, width)")
)
FRAME_BY_AMINMAX = """
def key_frame(keys):
    lowest, highest = torch.aminmax(keys.to(torch.float32), dim=0)
    spread = (highest - lowest).mul(0.5)
    spread[spread == 0] = 1
    return lowest + (highest - lowest) / 2, spread
"""
FRAME_IN_FLOAT64 = """
def key_frame(keys):
    keys = keys.double()
    top, bottom = keys.max(0).values, keys.min(0).values
    middle = 0.5 * top + 0.5 * bottom
    spread = top - middle
    return middle.float(), spread.masked_fill(top == bottom, 1.0).float()
"""
FRAME_AS_THE_FARTHEST_FROM_THE_MIDDLE = """
def key_frame(keys):
    keys = keys.float()
    middle = (keys.amax(0) + keys.amin(0)) / 2
    spread = (keys - middle).abs().amax(0)
    return middle, torch.where(spread > 0, spread, torch.ones_like(spread))
"""
FRAME_CHANNEL_BY_CHANNEL = """
def key_frame(keys):
    tokens, heads, size = keys.shape
    middle, spread = torch.zeros(heads, size), torch.ones(heads, size)
    for head in range(heads):
        for channel in range(size):
            numbers = keys[:, head, channel].tolist()
            middle[head, channel] = (max(numbers) + min(numbers)) / 2
            if max(numbers) > min(numbers):
                spread[head, channel] = (max(numbers) - min(numbers)) / 2
    return middle, spread
"""
BITS_STEP_BY_STEP = """
def choose_bits(damage, sizes, budget):
    chosen = [sorted(part)[0] for part in damage]
    left = budget - sum(size * bits for size, bits in zip(sizes, chosen))
    if left < 0:
        raise ValueError("the budget is too small")
    while True:
        best = None
        for part in range(len(damage)):
            for bits, then in damage[part].items():
                cost = sizes[part] * (bits - chosen[part])
                if 0 < cost <= left:
                    rate = (damage[part][chosen[part]] - then) / cost
                    if rate > 0 and (best is None or rate > best[0]):
                        best = rate, part, bits, cost
        if best is None:
            return chosen
        chosen[best[1]] = best[2]
        left -= best[3]
"""
BITS_RECURSIVELY = """
def choose_bits(damage, sizes, budget, chosen=None):
    chosen = chosen or [min(part) for part in damage]
    spent = sum(s * b for s, b in zip(sizes, chosen))
    if spent > budget:
        raise ValueError(f"{spent} bits are needed, {budget} allowed")
    steps = []
    for i, part in enumerate(damage):
        for bits in sorted(part):
            more = (bits - chosen[i]) * sizes[i]
            if bits > chosen[i] and spent + more <= budget and part[bits] < part[chosen[i]]:
                steps.append((-(part[chosen[i]] - part[bits]) / more, i, bits))
    if not steps:
        return chosen
    _, i, bits = sorted(steps, key=lambda step: step[0])[0]
    return choose_bits(damage, sizes, budget, [*chosen[:i], bits, *chosen[i + 1 :]])
"""
BITS_IN_FRACTIONS = """
from fractions import Fraction


def choose_bits(damage, sizes, budget):
    now = [min(part) for part in damage]
    spent = sum(map(int.__mul__, sizes, now))
    if spent > budget:
        raise ValueError
    while True:
        steps = {}
        for i, part in enumerate(damage):
            for bits, loss in part.items():
                cost = sizes[i] * (bits - now[i])
                gain = Fraction(part[now[i]]) - Fraction(loss)
                if cost > 0 and gain > 0 and spent + cost <= budget:
                    steps[i, bits, cost] = gain / cost
        if not steps:
            return now
        i, bits, cost = max(steps, key=steps.get)
        now[i], spent = bits, spent + cost
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("7.7", DIVERGENCE_BY_KL_DIV),
        ("7.7", DIVERGENCE_AS_CROSS_ENTROPY_LESS_ENTROPY),
        ("7.7", DIVERGENCE_BY_LOGSUMEXP),
        ("7.8", AWQ_WITH_A_LIST),
        ("7.8", AWQ_IN_LOGARITHMS),
        ("7.8", AWQ_NORMALIZED_AT_THE_END),
        ("7.8", AWQ_FROM_PLAIN_ROUNDING_ON),
        ("7.9", GPTQ_WITHOUT_BLOCKS),
        ("7.9", GPTQ_IN_FLOAT32),
        ("7.9", GPTQ_AS_BRAIN_SURGERY),
        ("7.9", GPTQ_IN_SMALL_BLOCKS),
        ("7.10", FRAME_BY_AMINMAX),
        ("7.10", FRAME_IN_FLOAT64),
        ("7.10", FRAME_AS_THE_FARTHEST_FROM_THE_MIDDLE),
        ("7.10", FRAME_CHANNEL_BY_CHANNEL),
        ("7.11", BITS_STEP_BY_STEP),
        ("7.11", BITS_RECURSIVELY),
        ("7.11", BITS_IN_FRACTIONS),
    ],
)
def test_a_function_written_in_another_way_passes(exercise_id, source):
    run_check(find(exercise_id), mutants.written(exercise_id, source))
