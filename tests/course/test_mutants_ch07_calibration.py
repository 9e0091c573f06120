"""Chapter 7's checks of damage, calibration, keys and budgets reject wrong solutions, and call the likely mistakes by
their names."""

from __future__ import annotations

import warnings

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check
from llmfromscratch.course.failures import CheckFailed

_LOGS = "ours, theirs = logits.float().log_softmax(dim=-1), other.float().log_softmax(dim=-1)"
_KL = "return (ours.exp() * (ours - theirs)).sum(dim=-1)"
_SIZE = "size = moments.diagonal().clamp(min=0).sqrt().float() if size is None else size"
_ALIVE = "size = torch.where(alive, size, size[alive].min() if alive.any() else 1)\n"
_POWER = "scale = size ** (step / steps)"
_NORMAL = "scale = scale / (scale.max() * scale.min()).sqrt()"
_BACK = "quantize(weight * scale, bits, group).dequantize() / scale"
_ERROR = f"error = output_error(weight, {_BACK}, moments)"
_BEST = "    return best"
_STEPS = "range(steps + 1)"
_ORDER = "order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(width)"
_DAMPED = (
    "damped = moments.double() + (0.01 * diagonal.double().mean() + 1e-12) * torch.eye(width, dtype=torch.float64)"
)
_MEAN = "(0.01 * diagonal.double().mean() + 1e-12)"
_INVERSE = "inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))"
_FACTOR = "factor = torch.linalg.cholesky(inverse, upper=True).float()"
_GRID = "column, grid = order[place], order[place] // (group or width)"
_LOST = "(left[:, place] - rounded) / factor[place, place]"
_INSIDE = "left[:, place:end] -= errors[:, place - start, None] * factor[place, place:end]"
_BEYOND = "        left[:, end:] -= errors @ factor[start:end, end:]\n"
_LAST = "return Quantized(codes, scales, minimums, bits, group or width)"
_OWN_CODES = "codes[:, column] = codes_of(left[:, place, None]"
_ENDS = "highest, lowest = keys.float().amax(dim=0), keys.float().amin(dim=0)"
_SPREAD = "spread = (highest - lowest) / 2"
_FRAME = "return (highest + lowest) / 2, torch.where(spread == 0, 1, spread)"
_GUARDED = "torch.where(spread == 0, 1, spread)"
_RATE = "/ (sizes[part] * (bits - now))"
_FITS = "spent + sizes[part] * (bits - now) <= budget"
_WINS = " and damage[part][bits] < damage[part][now]"
_END = "        if not steps:\n            return chosen\n"
_TAKE = "_, negative, bits = max(steps)"
_SPENT = "spent += sizes[-negative] * (bits - chosen[-negative])"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "7.7": [
        (_KL, "return (theirs.exp() * (theirs - ours)).sum(dim=-1)", "p and q are exchanged"),
        (_KL, "return (theirs.exp() * (ours - theirs)).sum(dim=-1)", "the differences are weighted with q"),
        ("ours - theirs", "theirs - ours", "the sign is turned"),
        (_KL, "import math\n    return (ours.exp() * (ours - theirs)).sum(dim=-1) / math.log(2)", "this is in bits"),
        (".sum(dim=-1)", ".sum(dim=-1).mean()", "one mean of all tokens"),
        (".sum(dim=-1)", ".sum()", "one sum of all tokens"),
        (".sum(dim=-1)", ".mean(dim=-1)", "the mean over the vocabulary"),
        (".sum(dim=-1)", ".mean()", "one mean of everything"),
        (".sum(dim=-1)", ".sum(dim=0)", "the sum goes over the tokens"),
        (".sum(dim=-1)", "", "one number for each token"),
        (_LOGS, _LOGS.replace("dim=-1", "dim=0"), "softmax goes over the tokens"),
        (_LOGS, "ours, theirs = logits.float().softmax(dim=-1).log(), other.float().softmax(dim=-1).log()",
         "a probability has become 0"),
        (_LOGS, "ours, theirs = ((x.float().softmax(dim=-1) + 1e-9).log() for x in (logits, other))",
         "something small is added"),
        ("(ours - theirs)", "-theirs", "the cross-entropy"),
        ("(ours - theirs)", "-ours", "p's own entropy"),
        ("(ours - theirs)", "(ours.exp() - theirs.exp())", "the differences are of probabilities"),
        ("(ours - theirs)", "(ours - theirs).abs()", "every difference counts as positive"),
        ("(ours - theirs)", "(ours - theirs) ** 2", "squared"),
        ("ours.exp() * ", "", "the terms are not weighted"),
        ("ours.exp() * ", "ours * ", "weighted with log p"),
        (_KL, "both = (ours.exp() - theirs.exp()) * (ours - theirs)\n    return both.sum(dim=-1) / 2",
         "the mean of both directions"),
        (_LOGS, "ours, theirs = logits.float(), other.float()\n    return (logits.float().softmax(dim=-1) * "
         "(ours - theirs)).sum(dim=-1)", "logits are taken for logarithms"),
        (_LOGS, "ours, theirs = logits.log_softmax(dim=-1), other.log_softmax(dim=-1)", "half precision"),
        (_LOGS, "ours, theirs = logits.log_softmax(dim=-1).float(), other.log_softmax(dim=-1).float()",
         "not right yet"),
        (f"{_LOGS}\n    {_KL}", "ours, theirs = logits.log_softmax(dim=-1), other.log_softmax(dim=-1)\n"
         "    return (ours.exp() * (ours - theirs)).sum(dim=-1).float()", "half precision"),
        (_KL, f"{_KL}.tolist()", "a torch.Tensor"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "7.8": [
        ("size ** (step / steps)", "size ** 1.0", "α is 1 always"),
        ("size ** (step / steps)", "size ** 0.5", "α is 1/2 always"),
        ("size ** (step / steps)", "size**step", "α is the step itself"),
        ("size ** (step / steps)", "size ** (step / 20)", "the factors"),
        (_STEPS, "range(1, steps + 1)", "α = 0, plain rounding, is not tried"),
        (_STEPS, "range(steps)", "α = 1 is not tried"),
        (_STEPS, "range(21)", "the factors"),
        (_STEPS, "range(0)", "α is 0 always"),
        ("best, best_error = torch.ones_like(size), torch.inf", "best, best_error = torch.ones_like(size), -1.0",
         "α is 0 always"),
        ("error < best_error:\n            best, best_error = scale, error",
         "-error < best_error:\n            best, best_error = scale, -error", "the worst exponent is taken"),
        ("error < best_error", "error <= best_error", "of equal ones the last is taken"),
        ("error < best_error:\n            best, best_error = scale, error", "True:\n            best = scale",
         "α is 1 always"),
        (_BACK, "quantize(weight * scale, bits, group).dequantize()", "not taken back after rounding"),
        (_BACK, "quantize(weight * scale, bits, group).dequantize() * scale", "α is 0 always"),
        (_BACK, "quantize(weight / scale, bits, group).dequantize() * scale", "would be made smaller"),
        (_BACK, "quantize(weight * scale, bits, None).dequantize() / scale", "`group` is not handed on"),
        (_BACK, "quantize(weight * scale, 4, group).dequantize() / scale", "4 bits are tried"),
        (_ERROR, f"error = float(({_BACK} - weight).square().sum())", "the error of the weights"),
        (_ERROR, f"error = float((({_BACK} - weight).square() * moments.diagonal()).sum())", "only the diagonal"),
        (_SIZE, "size = moments.diagonal().float() if size is None else size", "its root is how large"),
        (_SIZE, "size = weight.square().mean(dim=0).sqrt() if size is None else size", "the weight's columns"),
        (_SIZE, "size = weight.abs().mean(dim=0) if size is None else size", "the weight's columns"),
        (_SIZE, "size = moments.abs().amax(dim=0).float() if size is None else size", "largest moment of a column"),
        (_SIZE, "size = moments.diagonal().sqrt().float()", "`size` is not used"),
        (_NORMAL, "scale = scale / 1", "right up to a factor that all columns share"),
        (_NORMAL, "scale = scale / scale.mean()", "right up to a factor that all columns share"),
        (_NORMAL, "pass", "likely mistake: right up to a factor that all columns share"),
        (_NORMAL, "scale = scale / scale.norm()", "likely mistake: right up to a factor that all columns share"),
        (_NORMAL, "scale = scale / scale.median()", "likely mistake: right up to a factor that all columns share"),
        (_NORMAL, "scale = scale / scale.max()", "right up to a factor that all columns share"),
        (_ALIVE, "size = size / 1\n", "a column without any input has the size 0"),
        (_ALIVE, "size = size.clamp(min=1e-8)\n", "a column without any input has the size 0"),
        (_ALIVE, "size = torch.where(alive, size, 1)\n", "counts as one of size 1"),
        (_ALIVE, "size = torch.where(alive, size, size[alive].min())\n", "all of them count alike"),
        (_BEST, "    return 1 / best", "turned over"),
        (_BEST, "    return best_error", "not the exponent, and not its error"),
        (_BEST, "    return weight * best", "a factor for each column"),
        (_BEST, "    return best.double()", "the dtype is not"),
        (_BEST, "    best", "`return` is missing"),
    ],
    "7.9": [
        (_INSIDE, "pass", "do not hear of each other's errors"),
        (f"{_INSIDE}\n{_BEYOND}", "pass\n", "plain rounding"),
        (_LAST, "return quantize(weight, bits, group)", "plain rounding"),
        (_BEYOND, "", "inside a block only"),
        (_BEYOND, "        left[:, end:] -= errors[:, -1:] @ factor[end - 1 : end, end:]\n", "only of its last"),
        ("place:end] -= errors[:, place - start, None] * factor[place, place:end]",
         "place:] -= errors[:, place - start, None] * factor[place, place:]", "twice"),
        (_LOST, "(rounded - left[:, place]) / factor[place, place]", "the sign is turned"),
        (_INSIDE, _INSIDE.replace("-=", "+="), "the sign is turned inside a block only"),
        (_BEYOND, _BEYOND.replace("-=", "+="), "the sign is turned beyond a block only"),
        (_LOST, "(weight[:, column] - rounded) / factor[place, place]", "errors are those of the weight as it came"),
        (_LOST, "(left[:, place] - rounded) / factor[place, place] ** 2", "by the diagonal of the factor twice"),
        ("factor[place, place:end]", "factor[place, place:end] / factor[place, place]", "diagonal of the factor twice"),
        ("damped[order][:, order]", "damped[order]", "mistake: what is handed to cholesky has to be symmetric"),
        ("damped[order][:, order]", "damped[:, order]", "mistake: what is handed to cholesky has to be symmetric"),
        (_LOST, "left[:, place] - rounded", "not divided by the diagonal"),
        (_LOST, "(left[:, place] - rounded) / factor[place, place] ** 2", "not right yet"),
        (_LOST, "(left[:, place] - rounded) * factor[place, place]", "they are divided by it"),
        (_FACTOR, "factor = torch.linalg.cholesky(inverse).float()", "plain rounding"),
        (_FACTOR, "factor = torch.linalg.cholesky(damped[order][:, order], upper=True).float()", "that of the moments"),
        (_FACTOR, "factor = torch.linalg.inv(torch.linalg.cholesky(damped[order][:, order])).T.float()",
         "the inverse of the moments' own factor"),
        (_FACTOR, "factor = inverse.float()", "by the inverse of all columns"),
        (_FACTOR, "factor = damped[order][:, order].float()", "the moments themselves"),
        (_ORDER, "order = torch.arange(width)", "from left to right"),
        (_ORDER, "order = diagonal.argsort(descending=True)", "the loudest columns go first always"),
        (" if act_order else", " if not act_order else", "turned round"),
        ("descending=True, ", "", "the quietest columns go first"),
        ("codes[:, column] =", "codes[:, place] =", "not right yet"),
        (_LAST, "return Quantized(codes[:, order], scales, minimums, bits, group or width)",
         "in the order of their turns"),
        (_LAST, "return Quantized(codes[:, order][:, order], scales, minimums, bits, group or width)",
         "the wrong way round"),
        (_GRID, "column, grid = order[place], place // (group or width)", "here it is that of its turn"),
        ("damped[order][:, order]", "damped", "the moments are not"),
        ("weight.float()[:, order]", "weight.float().clone()", "the weight is not"),
        (_MEAN, "0", "1 % of the mean of"),
        (_MEAN, "(0.1 * diagonal.double().mean())", "this is 10 %"),
        (_MEAN, "diagonal.double().mean()", "this is all of it"),
        (_MEAN, "0", "it is missing"),
        (_MEAN, "1e-6", "it is missing, or far too small"),
        (_MEAN, "(0.05 * diagonal.double().mean())", "this is another share"),
        (_MEAN, "(0.001 * diagonal.double().mean())", "this is another share"),
        (_MEAN, "0.01", "here it is 0.01 whatever the moments are"),
        (_MEAN, "1.0", "here it is 1 whatever the moments are"),
        (_MEAN, "(0.01 * diagonal.double().median())", "not of its median"),
        (_MEAN, "(0.01 * moments.double().mean())", "not of all numbers"),
        (f"{_MEAN} * torch.eye(width, dtype=torch.float64)", "0.01 * torch.diag(diagonal.double())",
         "not 1 % of each column's own"),
        (_MEAN, "(0.01 * diagonal.double().max())", "not of its largest"),
        (_MEAN, "(0.01 * diagonal.double().sum())", "not of its sum"),
        (f"{_MEAN} * torch.eye(width, dtype=torch.float64)", _MEAN, "to every number of the moments"),
        ("grids_of(weight, bits, group)", "grids_of(weight, bits, group, True)", "the grids are symmetric"),
        ("left[:, place, None]", "weight[:, column, None]", "or its codes do not know of it"),
        ("dtype=torch.uint8", "dtype=torch.int8", "dtype torch.uint8"),
        ("scales, minimums, bits, group or width)", "minimums, scales, bits, group or width)", "are exchanged"),
        ("bits, group or width)", "bits, group)", "of whole rows, `group` is their width"),
        ("// (group or width)", "// group", "group None means whole rows"),
        ("weight.float()[:, order], torch", "weight, torch", "left as they were"),
        (_LAST, "return codes, scales, minimums", "return Quantized"),
        (_LAST, "Quantized(codes, scales, minimums, bits, group or width)", "`return` is missing"),
    ],
    "7.10": [
        (_ENDS, "highest, lowest = keys.float().amax(dim=(0, 1)), keys.float().amin(dim=(0, 1))", "those of all heads"),
        (_ENDS, "highest, lowest = keys.float().amax(dim=(0, 1)).expand(keys.shape[1:]), "
         "keys.float().amin(dim=(0, 1)).expand(keys.shape[1:])", "those of all heads"),
        (_ENDS, "highest, lowest = (x.expand(keys.shape[1:]) for x in (keys.float().amax(dim=(0, 2))[:, None], "
         "keys.float().amin(dim=(0, 2))[:, None]))", "those of a whole head"),
        (_ENDS, "highest, lowest = keys.float().max(), keys.float().min()", "those of all keys"),
        (_ENDS, "highest, lowest = keys.float().amax(dim=-1), keys.float().amin(dim=-1)", "those over the channels"),
        (_ENDS, "highest, lowest = keys.float().amax(dim=1), keys.float().amin(dim=1)", "those over the heads"),
        (_ENDS, "highest, lowest = keys.amax(dim=0), keys.amin(dim=0)", "half precision"),
        ((f"{_ENDS}\n    {_SPREAD}"), "highest, lowest = keys.amax(dim=0), keys.amin(dim=0)\n"
         "    spread = ((highest - lowest) / 2).float()", "half precision"),
        (_FRAME, "return keys.float().mean(dim=0), keys.float().std(dim=0)", "the mean and the standard deviation"),
        ("(highest + lowest) / 2", "keys.float().mean(dim=0)", "the mean is not the middle"),
        ("(highest + lowest) / 2", "keys.float().median(dim=0).values", "the median is not the middle"),
        (_SPREAD, "spread = keys.float().std(dim=0)", "the standard deviation is not the spread"),
        (_SPREAD, "spread = keys.float().std(dim=0, correction=0)", "the standard deviation is not the spread"),
        (_FRAME, "return keys.float().mean(dim=0), keys.float().std(dim=0, correction=0)",
         "the mean and the standard deviation"),
        (_FRAME, "middle = keys.float().mean(dim=0)\n    spread = (keys.float() - middle).abs().amax(dim=0)\n"
         "    return middle, torch.where(spread == 0, 1, spread)", "the mean lies where most are"),
        (_SPREAD, "spread = keys.float().var(dim=0)", "the spread is the variance"),
        (_SPREAD, "spread = keys.float().square().mean(dim=0).sqrt()", "the spread is an average size"),
        (_SPREAD, "spread = keys.float().abs().amax(dim=0) / 2", "half of the largest size"),
        (_SPREAD, "spread = (highest - lowest) / 255", "a step of a grid already"),
        (_SPREAD, "spread = highest - lowest", "the spread is the whole range"),
        (_SPREAD, "spread = torch.maximum(highest, -lowest)", "as if the middle were 0"),
        (_SPREAD, "spread = highest / 1", "the spread is the largest number"),
        ("(highest + lowest) / 2", "highest + lowest", "the middle is the sum of both ends"),
        ("(highest + lowest) / 2", "spread", "the middle is half of the range"),
        ("(highest + lowest) / 2", "lowest", "the middle is the smallest number"),
        ("(highest + lowest) / 2", "torch.zeros_like(spread)", "the middle is left at 0"),
        (_GUARDED, "spread", "a channel that never changes"),
        (_GUARDED, "spread.clamp(min=1e-6)", "a channel that never changes"),
        (_GUARDED, "1 / torch.where(spread == 0, 1, spread)", "turned over"),
        (_FRAME, "return torch.where(spread == 0, 1, spread), (highest + lowest) / 2", "exchanged"),
        (_FRAME, "return (highest + lowest) / 2", "return both"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "7.11": [
        (_RATE, "/ (bits - now)", "the sizes do not count in what a bit wins"),
        (_RATE, "/ 1", "whatever it costs"),
        (_RATE, "/ sizes[part]", "for a weight is taken"),
        (_RATE, "* (sizes[part] * (bits - now))", "multiplied by the bits"),
        ("max(steps)", "min(steps)", "wins least for a bit"),
        ("bits > now and " + _FITS, "bits > now", "the budget is not looked at"),
        (_FITS, "spent + (bits - now) <= budget", "the bits"),
        (_FITS, "spent + sizes[part] * bits <= budget", "the bits"),
        (_FITS, "spent + sizes[part] * (bits - now) < budget", "a step that just fits is not taken"),
        (_FITS, "spent <= budget", "one step too many"),
        (_FITS, "(spent + sizes[part] * (bits - now)) / sum(sizes) <= budget", "the bits of a weight, on average"),
        ("spent = sum(", "budget = budget * sum(sizes)\n    spent = sum(", "the bits of a weight, on average"),
        ("spent = sum(size * bits for size, bits in zip(sizes, chosen, strict=True))", "spent = 0",
         "what the fewest bits take belongs to what is spent"),
        (_RATE, "", "the step that wins most is taken, whatever it costs"),
        ("chosen = [min(each) for each in damage]", "chosen = [next(iter(each)) for each in damage]",
         "its own fewest, min(part)"),
        ("chosen = [min(each) for each in damage]", "chosen = [max(each) for each in damage]",
         "its own fewest, min(part)"),
        ("(damage[part][now] - damage[part][bits]) / (sizes[part] * (bits - now))", "damage[part][now]",
         "the part that is damaged most goes first"),
        ("(damage[part][now] - damage[part][bits]) / (sizes[part] * (bits - now))", "-damage[part][bits]",
         "the step that leaves least damage goes first"),
        (_FITS, "spent < budget", "the bits"),
        ("size * bits for size, bits in", "bits for size, bits in", "the bits"),
        ("chosen[-negative] = bits", "chosen[-negative] = bits\n        return chosen", "after the first step nothing"),
        (f" and {_FITS}", "", "the budget is not looked at"),
        (_SPENT, "spent += sizes[-negative] * bits", "all its bits are counted again"),
        (_SPENT, "pass", "is not added to what is spent"),
        ("for bits in damage[part]", "for bits in sorted(b for b in damage[part] if b > now)[:1]",
         "only the next number of bits is tried"),
        ("for bits in damage[part]", "for bits in [max(damage[part])]", "a part goes to its most bits at once"),
        (_WINS, "", "a step that makes it worse is taken"),
        ("min(each) for each in damage", "max(each) for each in damage", "the fewest bits fit here"),
        ("chosen = [min(each) for each in damage]", "chosen = [3 for each in damage]", "go through its keys"),
        ("raise ValueError", "print", "a ValueError says so"),
        ("if spent > budget", "if spent >= budget", "a budget that they just reach is enough"),
        (_END, "", "a point at which no step fits"),
        ("return chosen", "return tuple(chosen)", "a list"),
        ("            return chosen", "            return", "`return` is missing"),
    ],
}  # fmt: skip

STUCK = """
def choose_bits(damage, sizes, budget):
    bits = [min(each) for each in damage]
    while True:
        steps = [((damage[p][b] - damage[p][o]) / (sizes[p] * (o - b)), -p, o)
                 for p, b in enumerate(bits) for o in damage[p] if o > b and damage[p][o] < damage[p][b]]
        if not steps:
            return bits
        _, p, o = max(steps)
        if sum(s * b for s, b in zip(sizes, bits)) + sizes[-p] * (o - bits[-p]) > budget:
            return bits
        bits[-p] = o
"""
IN_WEIGHTS = """
def choose_bits(damage, sizes, budget):
    bits = [min(each) for each in damage]
    if sum(s * b for s, b in zip(sizes, bits)) > budget:
        raise ValueError("too small")
    spent = sum(sizes)
    while True:
        steps = [((damage[p][b] - damage[p][o]) / (sizes[p] * (o - b)), -p, o) for p, b in enumerate(bits)
                 for o in damage[p] if o > b and damage[p][o] < damage[p][b] and spent + sizes[p] <= budget]
        if not steps:
            return bits
        _, p, o = max(steps)
        spent, bits[-p] = spent + sizes[-p], o
"""
GOING_DOWN = """
def choose_bits(damage, sizes, budget):
    bits = [max(each) for each in damage]
    if sum(s * min(each) for s, each in zip(sizes, damage)) > budget:
        raise ValueError("too small")
    while sum(s * b for s, b in zip(sizes, bits)) > budget:
        _, p, o = min(((damage[p][o] - damage[p][b]) / (sizes[p] * (b - o)), p, o)
                      for p, b in enumerate(bits) for o in damage[p] if o < b)
        bits[p] = o
    return bits
"""
FIRST_KEYS = mutants.code_of("7.11").replace("[min(each) for each in damage]", "[next(iter(each)) for each in damage]")
FIRST_KEYS = FIRST_KEYS.replace("if spent > budget:", "if sum(s * min(p) for s, p in zip(sizes, damage)) > budget:")
LAST_OF_EQUALS = """
def choose_bits(damage, sizes, budget):
    bits = [min(each) for each in damage]
    spent = sum(s * b for s, b in zip(sizes, bits))
    if spent > budget:
        raise ValueError("too small")
    while True:
        steps = [((damage[p][b] - damage[p][o]) / (sizes[p] * (o - b)), p, o) for p, b in enumerate(bits)
                 for o in damage[p] if o > b and damage[p][o] < damage[p][b] and spent + sizes[p] * (o - b) <= budget]
        if not steps:
            return bits
        _, p, o = max(steps)
        spent, bits[p] = spent + sizes[p] * (o - bits[p]), o
"""
FRESH_GRIDS = mutants.code_of("7.9").replace(
    "            codes[:, column] =",
    "            if column % (group or width) == 0:\n"
    "                now = left[:, order.argsort()][:, column : column + (group or width)]\n"
    "                fresh = grids_of(now, bits, group)\n"
    "                scales[:, grid], minimums[:, grid] = fresh[0][:, 0], fresh[1][:, 0]\n"
    "            codes[:, column] =",
)


@pytest.mark.parametrize(
    ("exercise_id", "source", "diagnosis"),
    [
        ("7.11", STUCK, "it ends when the best step does not fit"),
        ("7.11", IN_WEIGHTS, "weights are counted: a step costs size * (bits more)"),
        ("7.11", GOING_DOWN, "it begins with the most bits and goes down"),
        ("7.11", FIRST_KEYS, "a part begins with the first of its keys"),
        ("7.11", LAST_OF_EQUALS, "of equal steps the last is taken"),
        ("7.9", FRESH_GRIDS, "what its columns have become"),
    ],
)
def test_a_wrong_way_that_needs_more_than_one_piece_is_told(exercise_id, source, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find(exercise_id), mutants.written(exercise_id, source))
    assert diagnosis in str(caught.value), str(caught.value)


WRONG_QUANTIZE = """
def quantize(weight, bits, group, symmetric=False):
    scales, minimums = grids_of(weight, bits, group)
    size = group or weight.shape[1]
    wide = [x.repeat_interleave(size, 1)[:, : weight.shape[1]] for x in (scales, minimums)]
    return Quantized(((weight - wide[1]) / wide[0]).floor().to(torch.uint8), scales, minimums, bits, size)
"""
WRONG_CODES = """
def codes_of(groups, scales, minimums, bits):
    steps = (groups.float() - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)
    return steps.floor().clamp(0, 2**bits - 1).to(torch.uint8)
"""


@pytest.mark.parametrize(
    ("exercise_id", "piece", "diagnosis"),
    [
        ("7.8", WRONG_QUANTIZE, 'quantize, which it calls, is not: check("7.3"'),
        ("7.9", WRONG_CODES, 'codes_of, which it calls, is not: check("7.2"'),
    ],
)
def test_a_piece_of_the_learners_own_that_is_at_fault_is_named(exercise_id, piece, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find(exercise_id), mutants.written(exercise_id, piece + mutants.code_of(exercise_id)))
    assert diagnosis in str(caught.value), str(caught.value)


def test_torch_does_not_complain_of_the_deviation_of_one_token_beside_the_check():
    deviating = mutants.written(
        "7.10", "def key_frame(keys):\n    return keys.float().mean(dim=0), keys.float().std(0)\n"
    )
    with warnings.catch_warnings(record=True) as told, pytest.raises(CheckFailed, match="standard deviation"):
        warnings.simplefilter("always")
        run_check(exercises.find("7.10"), deviating)
    assert not told, [str(each.message) for each in told]
