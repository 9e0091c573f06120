"""Chapter 5's checks of draws, filters, penalties and streams accept what is right, however it is written."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises

DRAW_BY_LOOPS = """
def draw(probabilities, uniforms):
    drawn = []
    for row, number in zip(probabilities.tolist(), uniforms.tolist()):
        total = 0.0
        for p in row:
            total += p
        running, chosen = 0.0, 0
        for column, p in enumerate(row):
            if p == 0:
                continue
            running, chosen = running + p, column
            if running > number * total:
                break
        drawn.append(chosen)
    return torch.tensor(drawn)
"""
DRAW_BY_COUNTING = """
def draw(probabilities, uniforms):
    sums = torch.cumsum(probabilities.to(torch.float64), 1)
    passed = sums <= uniforms[:, None] * sums[:, -1:]
    return passed.sum(dim=1)
"""
DRAW_THAT_DIVIDES = """
def draw(probabilities, uniforms):
    wide = probabilities.double()
    sums = (wide / wide.sum(-1, keepdim=True)).cumsum(-1)
    sums[sums >= sums[:, -1:]] = 1
    return (sums > uniforms[:, None]).long().argmax(-1)
"""
DRAW_THAT_DIVIDES_AND_SEARCHES = """
def draw(probabilities, uniforms):
    shares = probabilities.double() / probabilities.double().sum(-1, keepdim=True)
    drawn = torch.searchsorted(shares.cumsum(-1), uniforms.unsqueeze(1), right=True)[:, 0]
    last = [int(row.nonzero()[-1]) for row in probabilities]
    return torch.minimum(drawn, torch.tensor(last))
"""
DRAW_WITH_NUMPY = """
import numpy

def draw(probabilities, uniforms):
    sums = numpy.cumsum(probabilities.numpy().astype(float), axis=1)
    found = [numpy.searchsorted(row, u * row[-1], side="right") for row, u in zip(sums, uniforms.numpy())]
    return torch.from_numpy(numpy.array(found))
"""
GUMBEL_RACE = """
def gumbel_draw(logits, uniforms):
    u = torch.where(uniforms == 0, torch.finfo(uniforms.dtype).tiny, uniforms)
    return torch.argmax(logits.double().softmax(-1) / -u.log(), dim=-1)
"""
GUMBEL_BY_LOOPS = """
import math

def gumbel_draw(logits, uniforms):
    drawn = []
    for row, numbers in zip(logits, uniforms):
        values = [x - math.log(-math.log(max(u, 1e-37))) for x, u in zip(row.tolist(), numbers.tolist())]
        drawn.append(values.index(max(values)))
    return torch.tensor(drawn)
"""
GUMBEL_ON_LOGARITHMS = """
def gumbel_draw(logits, uniforms):
    tiny = torch.nextafter(torch.zeros((), dtype=uniforms.dtype), torch.ones((), dtype=uniforms.dtype))
    gumbel = -torch.log(-torch.log(torch.maximum(uniforms, tiny)))
    return torch.max(logits.log_softmax(-1) + gumbel, 1)[1]
"""
TEMPERATURE_IN_FLOAT64 = """
def apply_temperature(logits, temperatures):
    largest = logits.max(dim=1).values[:, None]
    limits = torch.finfo(torch.float32)
    return ((logits - largest).double() / temperatures.double()[:, None].clamp(limits.tiny, limits.max)).float()
"""
TEMPERATURE_CLAMPED_LATE = """
def apply_temperature(logits, temperatures):
    t = temperatures.float().clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    return torch.stack([(row - row.max()) / one for row, one in zip(logits, t)])
"""
TEMPERATURE_WITHOUT_CLAMP = """
def apply_temperature(logits, temperatures):
    return ((logits - logits.amax(-1, keepdim=True)) / temperatures.double().unsqueeze(1)).float()
"""
TOP_K_BY_LOOPS = """
def keep_top_k(ranked, top_k):
    kept = torch.zeros(ranked.shape, dtype=torch.bool)
    for row, k in enumerate(top_k.tolist()):
        kept[row, : k or None] = True
    return kept
"""
TOP_K_WITH_WHERE = """
def keep_top_k(ranked, top_k):
    candidates = ranked.size(1)
    limits = torch.where(top_k == 0, candidates, top_k).view(-1, 1)
    return torch.ones_like(ranked).cumsum(1) <= limits
"""
TOP_P_BY_COUNTING = """
def keep_top_p(ranked, top_p):
    needed = (ranked.cumsum(-1) < top_p[:, None]).sum(-1) + 1
    return torch.arange(ranked.shape[-1]) < needed[:, None]
"""
TOP_P_BY_SUBTRACTION = """
def keep_top_p(ranked, top_p):
    before = ranked.cumsum(dim=1) - ranked
    return ~(before >= top_p.reshape(-1, 1))
"""
TOP_P_SHIFTED = """
def keep_top_p(ranked, top_p):
    below = ranked.double().cumsum(-1) < top_p[:, None]
    kept = torch.ones_like(below)
    kept[:, 1:] = below[:, :-1]
    return kept
"""
TOP_P_BY_LOOPS = """
def keep_top_p(ranked, top_p):
    table = []
    for row, p in zip(ranked.tolist(), top_p.tolist()):
        total, kept = 0.0, []
        for probability in row:
            kept.append(total < p)
            total += probability
        table.append(kept)
    return torch.tensor(table)
"""
TOP_P_ALL_AT_1 = """
def keep_top_p(ranked, top_p):
    before = torch.cat([torch.zeros_like(ranked[:, :1]), ranked.cumsum(-1)[:, :-1]], dim=-1)
    return torch.logical_or(before < top_p[:, None], top_p[:, None] >= 1)
"""
PENALTIES_BY_LOOPS = """
def apply_penalties(logits, seen, counts, repetition, presence, frequency):
    out = logits.clone()
    for row in range(logits.shape[0]):
        for token in range(logits.shape[1]):
            if seen[row, token]:
                out[row, token] = out[row, token] / repetition[row] if out[row, token] > 0 else (
                    out[row, token] * repetition[row])
            if counts[row, token]:
                out[row, token] -= presence[row] + frequency[row] * counts[row, token]
    return out
"""
PENALTIES_BY_MASKS = """
def apply_penalties(logits, seen, counts, repetition, presence, frequency):
    column = repetition[:, None].expand_as(logits)
    out = logits.clone()
    up, down = seen & (out >= 0), seen & (out < 0)
    out[up] /= column[up]
    out[down] *= column[down]
    out -= (counts >= 1).to(out.dtype) * presence[:, None]
    return out.sub_(counts * frequency[:, None])
"""
PENALTIES_BY_A_POWER = """
def apply_penalties(logits, seen, counts, repetition, presence, frequency):
    power = torch.where(seen, -torch.sign(logits), 0)
    scaled = logits.double() * repetition.unsqueeze(1) ** power
    lost = torch.einsum("r,rv->rv", presence, counts.clamp(max=1).float()) + counts.mul(frequency.unsqueeze(1))
    return (scaled - lost).float()
"""
UNIFORMS_BY_A_LOOP = """
def uniforms(streams):
    numbers = torch.empty(len(streams), dtype=torch.float64)
    for place, stream in enumerate(streams):
        numbers[place].uniform_(generator=stream)
    return numbers
"""
UNIFORMS_STACKED = """
def uniforms(streams):
    return torch.stack([torch.rand((), generator=one, dtype=torch.float64) for one in streams])
"""
UNIFORMS_AS_NUMBERS = """
def uniforms(streams):
    numbers = [torch.rand(1, generator=one, dtype=torch.double).item() for one in streams]
    return torch.tensor(numbers, dtype=torch.float64)
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("5.1", DRAW_BY_LOOPS),
        ("5.1", DRAW_BY_COUNTING),
        ("5.1", DRAW_THAT_DIVIDES),
        ("5.1", DRAW_THAT_DIVIDES_AND_SEARCHES),
        ("5.1", DRAW_WITH_NUMPY),
        ("5.2", GUMBEL_RACE),
        ("5.2", GUMBEL_BY_LOOPS),
        ("5.2", GUMBEL_ON_LOGARITHMS),
        ("5.3", TEMPERATURE_IN_FLOAT64),
        ("5.3", TEMPERATURE_CLAMPED_LATE),
        ("5.3", TEMPERATURE_WITHOUT_CLAMP),
        ("5.4", TOP_K_BY_LOOPS),
        ("5.4", TOP_K_WITH_WHERE),
        ("5.5", TOP_P_BY_COUNTING),
        ("5.5", TOP_P_BY_SUBTRACTION),
        ("5.5", TOP_P_SHIFTED),
        ("5.5", TOP_P_BY_LOOPS),
        ("5.5", TOP_P_ALL_AT_1),
        ("5.6", PENALTIES_BY_LOOPS),
        ("5.6", PENALTIES_BY_MASKS),
        ("5.6", PENALTIES_BY_A_POWER),
        ("5.7", UNIFORMS_BY_A_LOOP),
        ("5.7", UNIFORMS_STACKED),
        ("5.7", UNIFORMS_AS_NUMBERS),
    ],
)
def test_a_function_written_in_another_way_passes(exercise_id, source):
    exercises.find(exercise_id).check(mutants.written(exercise_id, source))
