"""Chapter 6's checks of the floor, the online softmax, fused products and buckets reject wrong solutions, and call the
likely mistakes by their names."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check
from llmfromscratch.course.exercises import product_checks
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.kernels import words

_HEADS = "(2 * queries + 2 * keys)"
_FFN = "feed_forward = 3 * hidden * config.intermediate_size"
_WEIGHTS = "weights = config.num_layers * (attention + feed_forward) + config.vocab_size * hidden"
_CACHED = "cached = config.num_layers * context * 2 * keys * config.head_dim"
_BYTES = "return weights * weight_bytes + cached * cache_bytes"
_TOP = "new_top = torch.maximum(top, scores.amax(dim=-1))"
_SEEN = "seen = new_top.masked_fill(new_top == -torch.inf, 0)"
_SHRINK = "shrink = torch.exp(top - seen)"
_POWERS = "powers = torch.exp(scores - seen.unsqueeze(-1))"
_MIXED = "mixed * shrink.unsqueeze(-1) + powers @ values"
_TOTAL = "total * shrink + powers.sum(dim=-1)"
_THREE = f"return {_MIXED}, new_top, {_TOTAL}"
_CAT = "fused = torch.cat(list(weights))"
_ROWS = "[len(weight) for weight in weights]"
_VIEWS = f"list(fused.split({_ROWS}))"
_FUSED = f"return fused, {_VIEWS}"
_FOLDED = "return weight * gain.to(weight.dtype)"
_LINES = "range(0, width, per_line(weight))"
_FETCH = "prefetch(weight, min(row + AHEAD, last), column)"
_FETCHES = f"        for column in {_LINES}:\n            {_FETCH}\n"
_BEGIN = "            total = np.float32(0)\n"
_ADD = "total += x[m, i] * widen(weight[row, i])"
_PUT = "output[m, row] = total"
_FROM_TO = "range(first, end)"
_LOOP = "while bucket < count:\n        bucket *= 2"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "6.1": [
        (" + config.vocab_size * hidden", "", "the head is missing"),
        ("+ config.vocab_size * hidden", "+ 2 * config.vocab_size * hidden", "besides the head"),
        (f"{_WEIGHTS}\n", f"{_WEIGHTS} * (1 if config.tie_word_embeddings else 2)\n    weights -= config.vocab_size * "
         "hidden * (config.tie_word_embeddings)\n", "the head is missing"),
        (_WEIGHTS, "weights = config.num_layers * (attention + feed_forward + config.vocab_size * hidden)",
         "once a layer"),
        (_FFN, "feed_forward = 2 * hidden * config.intermediate_size", "gate, up and down; one is missing"),
        (_FFN, "feed_forward = 0", "the feed-forward part is missing"),
        (_FFN, "feed_forward = 12 * hidden * hidden", "not 4 * hidden_size"),
        (_HEADS, "(4 * queries)", "num_heads in place of num_kv_heads"),
        ("2 * keys * config.head_dim", "2 * queries * config.head_dim", "This holds for the cache"),
        (_HEADS, "4 * queries", "num_heads in place of num_kv_heads"),
        ("hidden * config.head_dim * (2 * queries + 2 * keys)",
         "hidden * (2 * hidden + 2 * keys * config.head_dim)", "hidden_size stands where"),
        ("hidden, queries, keys = config.hidden_size, config.num_heads, config.num_kv_heads",
         "hidden, queries, keys = config.hidden_size, config.num_heads, config.num_kv_heads\n"
         "    object.__setattr__(config, 'head_dim', hidden // queries)", "a head_dim of its own"),
        ("hidden * config.head_dim * (", "hidden * (hidden // queries) * (", "a head_dim of its own"),
        ("hidden * config.head_dim * (", "hidden * (", "head_dim is missing in the products"),
        ("(2 * queries + 2 * keys)", "(queries + 2 * keys)", "the output product is missing"),
        ("(2 * queries + 2 * keys)", "(2 * queries + keys)", "the values' product is missing"),
        ("(2 * queries + 2 * keys)", "2 * queries", "the products of keys and values are missing"),
        ("context * 2 * keys", "context * keys", "keys without values"),
        (_CACHED, "cached = context * 2 * keys * config.head_dim", "every layer has its own"),
        (" + cached * cache_bytes", "", "are not counted"),
        ("* context * 2", "* 2", "the context does not count"),
        ("* context * 2", "* (context - 1) * 2", "one token too few"),
        ("* context * 2", "* (context + 1) * 2", "one token too many"),
        ("config.num_layers * (attention", "(attention", "one layer is counted"),
        (_BYTES, "return weights * cache_bytes + cached * weight_bytes", "are exchanged"),
        (_BYTES, "return (weights + cached) * cache_bytes", "cache_bytes is taken for the weights"),
        (_BYTES, "return (weights + cached) * weight_bytes", "weight_bytes is taken for the cache"),
        (_BYTES, "return weights + cached", "numbers, not bytes"),
        (_BYTES, "return 2 * weights + 2 * cached", "counted as 2 bytes"),
        (_BYTES, "return weights * int(weight_bytes) + cached * int(cache_bytes)", "may be a fraction"),
        (f"{_FFN}\n", "feed_forward = 2 * hidden * config.intermediate_size\n    queries = keys\n",
         "gate, up and down; one is missing"),
        ("config.num_kv_heads", "config.kv_heads", "a config has num_layers"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "6.2": [
        ("mixed * shrink.unsqueeze(-1)", "mixed", "mixed is not shrunk"),
        ("total * shrink", "total", "total is not shrunk"),
        (_THREE, "return mixed + powers @ values, new_top, total + powers.sum(dim=-1)",
         "neither mixed nor total is shrunk"),
        (_SHRINK, "shrink = torch.exp(seen - top)", "the sign is wrong"),
        (_SHRINK, "shrink = torch.exp(-seen)", "shrink by exp(-new top)"),
        (_SHRINK, "shrink = top - seen", "by e to the power of it"),
        (_TOP, "new_top = scores.amax(dim=-1)", "top is the tile's largest score"),
        (_TOP, "new_top = top", "top stays what it was"),
        (", new_top,", ", top,", "the old top comes back"),
        (", new_top,", ", seen,", "it stays -inf"),
        ("scores.amax(dim=-1)", "scores.amax()", "of the tile is taken for all rows"),
        (_SEEN, "seen = new_top", "-inf minus -inf"),
        (_SEEN, "seen = new_top.clamp(min=0)", "measured from the new top"),
        ("scores - seen.unsqueeze(-1)", "scores - scores.amax(dim=-1, keepdim=True)", "the tile's own largest score"),
        ("scores - seen.unsqueeze(-1)", "scores - scores.amax(-1, keepdim=True).clamp(min=-1e30)",
         "the tile's own largest score"),
        ("scores - seen.unsqueeze(-1)", "scores - top.unsqueeze(-1).clamp(min=-1e30)", "measured from the"),
        (_POWERS, "powers = torch.exp(scores)", "the top is not taken off"),
        (_POWERS, "powers = torch.softmax(scores, dim=-1)", "a softmax of its own"),
        (_POWERS, "powers = torch.exp2(scores - seen.unsqueeze(-1))", "powers of 2"),
        ("powers.sum(dim=-1)", "powers.sum(dim=-2)", "the sum runs over the rows"),
        ("powers.sum(dim=-1)", "powers.sum()", "the powers of all rows"),
        ("powers.sum(dim=-1)", "powers.shape[-1]", "total counts the tokens"),
        ("powers.sum(dim=-1)", "powers.amax(dim=-1)", "the tile's largest power"),
        (" + powers.sum(dim=-1)", "", "not added to total"),
        ("total * shrink + ", "", "total loses"),
        ("mixed * shrink.unsqueeze(-1) + ", "", "mixed loses"),
        (_THREE, f"total = {_TOTAL}\n    return ({_MIXED}) / total.unsqueeze(-1), new_top, total", "in each tile"),
        ("powers @ values", "scores @ values", "weighed by the scores"),
        (_THREE, f"return {_MIXED}, {_TOTAL}, new_top", "are exchanged"),
        (_THREE, f"return new_top, {_TOTAL}, {_MIXED}", "top comes first"),
        (_THREE, f"return {_MIXED}, {_TOTAL}", "three things come back"),
        (_THREE, f"return {_MIXED}", "three things come back"),
        ("mixed * shrink.unsqueeze(-1)", "mixed * shrink", "makes a column of it"),
        (_THREE, f"mixed *= shrink.unsqueeze(-1)\n    mixed += powers @ values\n    return mixed, new_top, {_TOTAL}",
         "in place"),
        (_THREE, f"top.copy_(new_top)\n    {_THREE}", "in place"),
        ("scores.amax(dim=-1)", "scores.max(dim=-1)", "values and indices"),
        ("powers @ values", "(powers.double() @ values.double())", "the dtype is not"),
        (_THREE, "return mixed, new_top, total\n", "the tile is not taken in"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "6.3": [
        (_VIEWS, f"[part.clone() for part in fused.split({_ROWS})]", "a copy in place of a view"),
        (_VIEWS, "list(weights)", "the old weights come back"),
        (_VIEWS, "[weight.clone() for weight in weights]", "a copy in place of a view"),
        (_CAT, "fused = torch.cat(list(weights)[::-1])", "in another order than they were given"),
        (_VIEWS, f"{_VIEWS}[::-1]", "in another order than the weights"),
        (_CAT, "fused = torch.cat(list(weights), dim=1)", "not as many rows"),
        (f"{_CAT}\n    {_FUSED}", "fused = torch.cat(list(weights), dim=1)\n"
         "    return fused, list(fused.split(fused.shape[1] // len(weights), dim=1))", "beside each other"),
        (_CAT, "fused = torch.stack(list(weights))", "in a new dimension"),
        (_VIEWS, "list(fused.chunk(len(weights)))", "of equal size"),
        (_VIEWS, "list(fused.split(len(weights[0])))", "of equal size"),
        (_VIEWS, "list(fused)", "one view for each row"),
        (_VIEWS, "[fused[: len(weight)] for weight in weights]", "begin at row 0"),
        (_VIEWS, _ROWS, "how many rows each weight has"),
        (_CAT, "fused = torch.cat([weight.float() for weight in weights])", "the dtype"),
        (_FUSED, "return fused", "a single tensor comes back"),
        (_FUSED, f"return {_VIEWS}", "the views alone come back"),
        (_FUSED, f"return {_VIEWS}, fused", "the views come first"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "6.4": [
        (_FOLDED, "return weight * gain.to(weight.dtype).unsqueeze(-1)", "the rows are multiplied"),
        (_FOLDED, "return gain.to(weight.dtype)[: len(weight), None] * weight", "the rows are multiplied"),
        (" * gain", " / gain", "divided by the gain"),
        (" * gain", " + gain", "the gain is added"),
        (_FOLDED, "return weight * (1 + gain.to(weight.dtype))", "1 + gain"),
        (" * gain", " @ gain", "the product of the weight with the gain"),
        (_FOLDED, "return weight * gain", "the dtype of `weight`"),
        (_FOLDED, "return (weight * gain).float()", "the result is rounded to float32"),
        (_FOLDED, "weight *= gain.to(weight.dtype)\n    return weight", "in place"),
        (_FOLDED, "return weight.mul_(gain)", "in place"),
        (_FOLDED, "return weight", "unchanged"),
        (_FOLDED, "return weight * gain.to(weight.dtype) ** 2", "applied twice"),
        (_FOLDED, "return weight * gain[0].to(weight.dtype)", "one number of the gain"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "6.5": [
        (_FROM_TO, "range(0, end)", "begin at 0 in place of first"),
        (_FROM_TO, "range(first, len(weight))", "The loop goes on to the last row"),
        (_FROM_TO, "range(len(weight))", "The loop goes through all rows"),
        (_FROM_TO, "range(first, min(end + 1, len(weight)))", "one row too many"),
        (_FROM_TO, "range(first, end + 1)", "the last row to be written is end - 1"),
        (_FROM_TO, "range(first, end - 1)", "one row too few"),
        (_FROM_TO, "range(first + 1, end)", "the first row is left out"),
        (_FROM_TO, "range(end - first)", "counted from 0"),
        ("widen(weight[row, i])", "weight[row, i]", "the bits of bfloat16"),
        ("widen(weight[row, i])", "np.float32(weight[row, i])", "the bits of bfloat16"),
        ("range(inputs)", "range(1)", "only the first input"),
        ("x[m, i]", "x[0, i]", "the product of the first"),
        (f"{_BEGIN}            for i", "            for i", "before this function has given it a value"),
        (f"for row in {_FROM_TO}:\n{_FETCHES}        for m in range(inputs):\n{_BEGIN}", "total = np.float32(0)\n"
         f"    for row in {_FROM_TO}:\n{_FETCHES}        for m in range(inputs):\n", "from row to row"),
        (f"        for m in range(inputs):\n{_BEGIN}",
         "        total = np.float32(0)\n        for m in range(inputs):\n", "from input to input"),
        (_PUT, "output[m, row] += total", "it takes its place"),
        (_PUT, "output[m, row - first] = total", "counted from first"),
        (_PUT, "output[row, m] = total", "output is [inputs, rows]"),
        (_PUT, "output[m] = total", "into all columns of output"),
        ("total += x", "total = x", "only the last product"),
        ("range(width)", "range(width - 1)", "the last number of each row"),
        ("range(width)", "range(0, width, per_line(weight))", "the steps of per_line(weight) are for prefetch alone"),
        (_PUT, "total", "nothing was written"),
        (_FETCHES, "", "waits for memory"),
        ("min(row + AHEAD, last)", "row + AHEAD", "there is no row behind the last"),
        ("min(row + AHEAD, last)", "row", "4 rows before it is read"),
        ("min(row + AHEAD, last)", "min(row + 1, last)", "4 rows before it is read"),
        (_LINES, "range(width)", "one call for every number"),
        (_LINES, "range(0, width, 64)", "64 is the bytes of a line"),
        (_LINES, "range(0, width * weight.itemsize, 64)", "columns count numbers, not bytes"),
        (_LINES, "range(0, width, 16)", "whose size is not always the same"),
        (_LINES, "range(0, width, 32)", "some lines of a row are never asked for"),
        (_LINES, "range(1)", "only the first line"),
        ("prefetch(weight, ", "prefetch(x, ", "x and output are small and near"),
        ("prefetch(weight, min(row + AHEAD, last), column)", "prefetch(weight[min(row + AHEAD, last)], 0, column)",
         "the whole weight first"),
        (f"{_FETCHES}        for m in range(inputs):\n", "        for m in range(inputs):\n"
         f"            for column in {_LINES}:\n                {_FETCH}\n", "again for every input"),
        ("np.float32(0)", "0.0", "the sum in float32"),
        ("np.float32(0)", "0", "the sum in float32"),
        ("np.float32(0)", "np.float64(0)", "the sum in float32"),
        (_PUT, f"{_PUT}\n            output.tolist()", "Numba says"),
        ("inputs, width = x.shape", "inputs, width = x.size()", "numpy's arrays, not tensors"),
        (_PUT, f"output[m, row] = {_FETCH}", "prefetch gives nothing back"),
    ],
    "6.6": [
        ("bucket = smallest", "bucket = 1", "`smallest` is not used"),
        (f"bucket = smallest\n    {_LOOP}\n    return bucket",
         "return max(1 << max(count - 1, 0).bit_length(), smallest)", "the smallest of them raised"),
        ("bucket *= 2", "bucket += smallest", "the buckets are multiples of smallest"),
        ("bucket < count", "bucket <= count", "just as large as count"),
        ("bucket < count", "2 * bucket <= count", "the bucket is smaller than count"),
        ("bucket < count", "2 * bucket < count", "the bucket is smaller than count"),
        ("return bucket", "return max(count, smallest)", "count itself comes back"),
        ("while bucket", "if bucket", "doubled once at most"),
        (f"{_LOOP}\n    return bucket", "import math\n    return smallest * 2 ** max(math.ceil(math.log2("
         "max(count, 1) / smallest)), 0)", "a logarithm is rounded"),
        (f"{_LOOP}\n    return bucket", "import math\n    return smallest * 2 ** max(math.ceil(math.log("
         "max(count, 1) / smallest, 2)), 0)", "a logarithm is rounded"),
        ("bucket = smallest\n", "bucket = 2 * smallest\n", "from 2 * smallest on"),
        (_LOOP, f"if count == 0:\n        return 0\n    {_LOOP}", "a count of 0"),
        ("bucket = smallest", "bucket = float(smallest)", "int"),
        ("return bucket", "return str(bucket)", "an int"),
        ("    return ", "    ", "`return` is missing"),
    ],
}  # fmt: skip


BEGUN_EARLY = """
AHEAD = 6


def multiply_rows(x, weight, output, first, end):
    width, last, step = x.shape[1], weight.shape[0] - 1, per_line(weight)
    for row in range(first, end):
        for column in range(0, width, step):
            prefetch(weight, min(row + 4, last), column)
        for m in range(x.shape[0]):
            total = np.float32(0)
            for i in range(width):
                total += x[m, i] * widen(weight[row, i])
            output[m, row] = total
"""
WITH_A_HELPER = """
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


@pytest.mark.parametrize(
    ("source", "diagnosis"),
    [
        (BEGUN_EARLY, "6 rows before it is read"),
        (WITH_A_HELPER, "a function of your own is called, which stays plain Python"),
        ("import numba\n\n\n@numba.njit\ndef multiply_rows(x, weight, output, first, end):\n    pass\n",
         "it is compiled already"),
    ],
)  # fmt: skip
def test_what_numba_cannot_take_and_a_distance_of_ones_own_are_told(source, diagnosis):
    exercise = exercises.find("6.5")
    with pytest.raises(CheckFailed) as caught:
        run_check(exercise, mutants.written("6.5", source))
    assert diagnosis in str(caught.value), str(caught.value)


def test_prefetch_is_itself_again_after_a_check_that_stopped_in_the_middle():
    before = words.prefetch.__code__

    def multiply_rows(x, weight, output, first, end):
        words.prefetch(weight, 0, 0)
        raise KeyError("x")

    case = product_checks.prefetch_cases()[0]
    with pytest.raises(KeyError):
        product_checks.noted(multiply_rows, case)
    assert words.prefetch.__code__ is before and words.prefetch(case.args[1], 0, 0) is None
