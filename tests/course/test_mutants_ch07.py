"""Chapter 7's checks of grids, codes, packing and the int8 product reject wrong solutions, and call the likely mistakes
by their names."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check
from llmfromscratch.course.exercises import packed_product_checks
from llmfromscratch.course.failures import CheckFailed, NotYetWritten
from llmfromscratch.kernels import words

_SIZE = "groups.abs().amax(dim=-1)"
_SYMMETRIC = f"scales = {_SIZE} / (half - 1)"
_GUARDED = "scales = torch.where(scales == 0, 1, scales)\n"
_WHOLE_SYMMETRIC = f"{_SYMMETRIC}\n        {_GUARDED}        return scales, -half * scales"
_LEVELS = "scales = (groups.amax(dim=-1) - lowest) / (2**bits - 1)"
_GRID = "return torch.where(scales == 0, 1, scales), lowest"
_STEPS = "(groups.float() - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)"
_CODES = "return steps.round().clamp(0, 2**bits - 1).to(torch.uint8)"
_GRIDS = "scales, minimums = grids_of(weight, bits, group, symmetric)"
_PARTS = "parts = weight.split(group or width, dim=1)"
_EACH = "codes_of(part, scales[:, i], minimums[:, i], bits)"
_LIST = f"codes = [{_EACH} for i, part in enumerate(parts)]"
_QUANTIZED = "return Quantized(torch.cat(codes, dim=1), scales, minimums, bits, group or width)"
_HALVES = "low, high = codes.view(len(codes), -1, 2, 16).unbind(dim=2)"
_BYTES = "return (low | (high << 4)).flatten(1)"
_PACK = f"{_HALVES}\n    {_BYTES}"
_LINES = "range(0, width, per_line(codes))"
_FETCH = "prefetch(codes, min(row + AHEAD, last), column)"
_FETCHES = f"        for column in {_LINES}:\n            {_FETCH}\n"
_BEGIN = "            total = np.float32(0)\n"
_TIMES = "x[m, i] * np.float32(codes[row, i])"
_PUT = "output[m, row] = total * scales[row]"
_FROM_TO = "range(first, end)"
_ROW_SIZE = "x.float().abs().amax(dim=-1)"
_ROW_SCALES = f"scales = {_ROW_SIZE} / 127"
_ROW_GUARD = "    scales = torch.where(scales == 0, 1, scales)\n"
_ROW_CODES = "(x.float() / scales.unsqueeze(-1)).round().to(torch.int8)"
_WHOLE_ROWS = f"{_ROW_SCALES}\n{_ROW_GUARD}    return {_ROW_CODES}, scales"
_RANGE_SCALES = f"scales = (x.float().amax(dim=-1) - x.float().amin(dim=-1)) / 255\n{_ROW_GUARD}"
_ON_A_GRID = "scales, minimums = grid_of(x, 8, True)\n    codes = codes_of(x, scales, minimums, 8)\n    return codes"
_ROWS = f"return {_ROW_CODES}, scales"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "7.1": [
        ("/ (2**bits - 1)", "/ 2**bits", "2**bits levels have 2**bits - 1 steps"),
        ("/ (2**bits - 1)", "/ (2 ** (bits - 1) - 1)", "half as many steps as there are"),
        ("/ (2**bits - 1)", "/ bits", "divided by the bits"),
        ("/ (half - 1)", "/ half", "one level fewer lies above 0"),
        ("/ (half - 1)", "/ (2**bits - 1)", "divided by all steps"),
        (_WHOLE_SYMMETRIC, f"scales = {_SIZE} / half\n        {_GUARDED}        return scales, -{_SIZE}",
         "divided by all 2**(bits - 1) steps below 0"),
        (_WHOLE_SYMMETRIC, f"scales = ({_SIZE} / half).clamp(min=1e-8)\n        return scales, -{_SIZE}",
         "divided by all 2**(bits - 1) steps below 0"),
        (_WHOLE_SYMMETRIC, f"scales = 2 * {_SIZE} / (2**bits - 1)\n        {_GUARDED}        return scales, -{_SIZE}",
         "likely mistake: symmetric, the levels lie evenly from the largest size to its negative, and 0 is none of "
         "them; level 2**(bits - 1) is to be 0\n"),
        (f"{_GUARDED}        return scales, -half * scales",
         "return torch.where(scales == 0, 1, scales), -half * scales", "of a group of zeros is taken before"),
        ("/ (half - 1)", "/ ((2**bits - 1) / 2)", "no whole number"),
        ("-half * scales", f"-{_SIZE}", "the largest size with its sign turned"),
        ("-half * scales", "half * scales", "its sign is missing"),
        ("-half * scales", "0 * scales", "the minimum is 0"),
        ("-half * scales", "torch.full_like(scales, -half)", "counted in steps"),
        ("-half * scales", "groups.amin(dim=-1)", "the group's smallest number; it is"),
        ("groups.abs().amax(dim=-1)", "groups.amax(dim=-1)", "the largest in size, whatever its sign"),
        (_SIZE, "groups.abs().max()", "the ends are those of the whole tensor"),
        (_LEVELS, "lowest = groups.min().expand(groups.shape[:-1])\n"
         "    scales = (groups.max().expand(groups.shape[:-1]) - lowest) / (2**bits - 1)",
         "the ends are those of the whole tensor"),
        (f"lowest = groups.amin(dim=-1)\n    {_LEVELS}",
         "lowest = groups.min()\n    scales = (groups.max() - lowest) / (2**bits - 1)",
         "the ends are those of the whole tensor"),
        ("groups.amin(dim=-1)", "groups.amin(dim=0)", "along the first dimension"),
        (_GRID, "return scales, lowest", "has the scale 1"),
        (_GRID, "return scales.clamp(min=1e-8), lowest", "has the scale 1"),
        (_GUARDED, "scales = scales + 0\n", "has the scale 1"),
        ("groups = groups.float()", "groups = groups", "half precision"),
        ("groups = groups.float()\n", "kind = groups.dtype\n", "half precision"),
        ("if symmetric:", "if False:", "all groups are treated as asymmetric"),
        ("if symmetric:", "if True:", "all groups are treated as symmetric"),
        ("if symmetric:", "if not symmetric:", "exchanged"),
        (_GRID, "return torch.where(scales == 0, 1, scales), groups.amax(dim=-1)", "the group's largest number"),
        (_GRID, "scales = torch.where(scales == 0, 1, scales)\n    return scales, (-lowest / scales).round()",
         "a zero point"),
        ("lowest = groups.amin(dim=-1)", "lowest = groups.amin(dim=-1).clamp(max=0)\n"
         "    groups = groups.clamp(min=0)", "stretched to hold 0"),
        (_GRID, "return lowest, torch.where(scales == 0, 1, scales)", "scales and minimums are exchanged"),
        (_GRID, "return 1 / torch.where(scales == 0, 1, scales), lowest", "the scale is turned over"),
        (_GRID, "return torch.where(scales == 0, 1, scales)", "return both"),
        ("    return torch", "    torch", "`return` is missing"),
    ],
    "7.2": [
        ("steps.round()", "steps.floor()", "the steps are cut down"),
        ("steps.round()", "steps", "the steps are cut down"),
        ("steps.round()", "steps.ceil()", "the steps are raised"),
        (".clamp(0, 2**bits - 1)", "", "numbers beyond the grid take its first or last level"),
        (".clamp(0, 2**bits - 1)", ".clamp(min=0)", "The upper end is not kept"),
        (".clamp(0, 2**bits - 1)", ".clamp(max=2**bits - 1)", "The lower end is not kept"),
        (".clamp(0, 2**bits - 1)", ".clamp(0, 2**bits)", "2**bits is let through"),
        (".clamp(0, 2**bits - 1)", ".clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)", "they begin at 0"),
        (_CODES, "return steps.round().to(torch.uint8).clamp(0, 2**bits - 1)", "by then what lay beyond"),
        ("torch.uint8", "torch.int8", "wrap around; uint8 goes to 255"),
        (".to(torch.uint8)", "", "the dtype is not"),
        (" - minimums.unsqueeze(-1)", "", "the minimum is not taken off"),
        (" - minimums.unsqueeze(-1)", " + minimums.unsqueeze(-1)", "the minimum is added"),
        (_STEPS, "groups.float() / scales.unsqueeze(-1) - minimums.unsqueeze(-1)", "taken off after the division"),
        (" / scales.unsqueeze(-1)", " * scales.unsqueeze(-1)", "multiplied by the scale"),
        (" / scales.unsqueeze(-1)", "", "the scale is not used"),
        (_STEPS, "(groups.float() - minimums) / scales", "one number for each group"),
        (_STEPS, "(groups.float() - minimums.item()) / scales.item()", "take one only"),
        (_CODES, "codes = steps.round().clamp(0, 2**bits - 1)\n"
         "    return minimums.unsqueeze(-1) + scales.unsqueeze(-1) * codes", "the level's number comes back"),
        (_STEPS, "groups.sub_(minimums.unsqueeze(-1)).div_(scales.unsqueeze(-1))", "in place"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "7.3": [
        (f"{_GRIDS}\n    {_PARTS}\n    {_LIST}\n    {_QUANTIZED}",
         "turned = weight.T\n    scales, minimums = grids_of(turned, bits, group, symmetric)\n"
         "    parts = turned.split(group or turned.shape[1], dim=1)\n"
         f"    {_LIST}\n    return Quantized(torch.cat(codes, dim=1).T, scales, minimums, bits, group or width)",
         "the groups run down the columns"),
        (f"{_GRIDS}\n    {_PARTS}\n    {_LIST}\n    {_QUANTIZED}",
         "turned = weight.T\n    scales, minimums = grids_of(turned, bits, group, symmetric)\n"
         "    parts = turned.split(group or turned.shape[1], dim=1)\n"
         f"    {_LIST}\n    return Quantized(torch.cat(codes, dim=1).T, scales.T, minimums.T, bits, group or width)",
         "the groups run down the columns"),
        (_PARTS, "parts = weight.split(group or len(weight), dim=0)", "on its own column of the grids"),
        (_GRIDS, f"{_GRIDS}\n    scales = scales.mean().expand_as(scales)", "the grids are wrong already"),
        (_GRIDS, "scales, minimums = grids_of(weight, bits, None, symmetric)\n"
         "    many = -(-width // (group or width))\n"
         "    scales, minimums = scales.repeat(1, many), minimums.repeat(1, many)", "one grid for a whole row"),
        (_GRIDS, "scales, minimums = grid_of(weight.flatten(), bits, symmetric)\n"
         "    many = -(-width // (group or width))\n"
         "    scales, minimums = scales.expand(len(weight), many), minimums.expand(len(weight), many)",
         "one grid for the whole weight"),
        (_EACH, "codes_of(part, scales[:, 0], minimums[:, 0], bits)", "on the grid of the first"),
        (_EACH, "codes_of(part, scales[:, -1], minimums[:, -1], bits)", "on the grid of the last"),
        (_GRIDS, "grids = [grid_of(part, bits, symmetric) for part in weight.split(group or width, dim=1)]\n"
         "    scales, minimums = (torch.stack(each, dim=1) for each in zip(*grids))", "stored in float16"),
        (_GRIDS, f"{_GRIDS}\n    scales, minimums = scales.half().float(), minimums.half().float()",
         "the grids of whole rows are rounded to float16 too"),
        (_EACH, "codes_of(part, *grid_of(part, bits, symmetric), bits)", "before they are rounded to float16"),
        (_PARTS, f"{_PARTS}\n    parts = [part for part in parts if part.shape[1] == (group or width)]",
         "a code for each number of the weight"),
        (f"{_GRIDS}\n    {_PARTS}", "size = group or width\n    weight = weight[:, : width // size * size]\n"
         f"    {_GRIDS}\n    parts = weight.split(size, dim=1)", "the last group is lost"),
        (f"{_GRIDS}\n    {_PARTS}", f"{_GRIDS}\n    parts = weight.view(len(weight), -1, group or width).unbind(1)",
         "the last group of a row may be shorter"),
        ("weight.split(group or width, dim=1)", "weight.split(group, dim=1)", "group None means whole rows"),
        (_GRIDS, "scales, minimums = grids_of(weight, bits, group)", "`symmetric` is not handed on"),
        ("bits, group or width)", "bits, group)", "of whole rows, `group` is their width"),
        ("bits, group or width)", "bits, group or 0)", "only `group` is not: of whole rows, `group` is their width"),
        ("bits, group or width)", "group or width, bits)", "bits and group are exchanged"),
        ("bits, group or width)", "8, group or width)", "`bits` is that of a code, as it was given"),
        ("scales, minimums, bits, group or", "minimums, scales, bits, group or", "scales and minimums are exchanged"),
        (_GRIDS, "scales, minimums = grids_of(weight, 8, group, symmetric)", "as many levels as 8 bits"),
        (_QUANTIZED, "return torch.cat(codes, dim=1), scales, minimums", "return Quantized"),
        (_QUANTIZED, "return Quantized(torch.cat(codes, dim=1).float(), scales, minimums, bits, group or width)",
         "dtype"),
        ("torch.cat(codes, dim=1)", "torch.cat(codes, dim=0)", "torch.cat with dim=1"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "7.4": [
        (_PACK, "low, high = codes[:, 0::2], codes[:, 1::2]\n    return low | (high << 4)", "neighbours share a byte"),
        (_PACK, "low, high = codes[:, 1::2], codes[:, 0::2]\n    return low | (high << 4)", "neighbours share a byte"),
        (_PACK, "low, high = codes.chunk(2, dim=1)\n    return low | (high << 4)",
         "the first half of a row shares its bytes with the second"),
        ("low | (high << 4)", "high | (low << 4)", "the halves of the bytes are exchanged"),
        ("low | (high << 4)", "(low << 4) | high", "the halves of the bytes are exchanged"),
        ("-1, 2, 16", "-1, 2, 8", "blocks of 16 columns are packed"),
        ("low | (high << 4)", "low | high", "the upper code is not moved"),
        ("low | (high << 4)", "low | (high << 8)", "only columns 0 to 15"),
        ("low | (high << 4)", "low | (high << 3)", "begins at bit 4"),
        ("low | (high << 4)", "low", "only columns 0 to 15"),
        ("low | (high << 4)", "high << 4", "only columns 16 to 31"),
        ("low | (high << 4)", "low & (high << 4)", "& keeps what both have"),
        (".flatten(1)", "", "the bytes of a row stand in a row"),
        (_BYTES, "return (low.int() | (high.int() << 4)).flatten(1)", "the dtype"),
        (_PACK, "return codes", "a code still takes a byte"),
        ("    return ", "    ", "`return` is missing"),
    ],
    "7.5": [
        (" * scales[row]", "", "the scale is forgotten"),
        ("scales[row]", "scales[0]", "the scale of the first row"),
        ("scales[row]", "scales[row - first]", "the scales are counted from first"),
        ("scales[row]", "scales[row - 1]", "the scale is that of another row"),
        ("total * scales[row]", "total / scales[row]", "divided by the scale"),
        (f"{_TIMES}\n            {_PUT}", f"scales[row] * {_TIMES}\n            output[m, row] = total",
         "the scale stands inside the sum"),
        (f"total += {_TIMES}\n            {_PUT}", f"total = (total + {_TIMES}) * scales[row]\n"
         "            output[m, row] = total", "at every step"),
        (_FROM_TO, "range(0, end)", "begin at 0 in place of first"),
        (_FROM_TO, "range(first, len(codes))", "The loop goes on to the last row"),
        (_FROM_TO, "range(len(codes))", "The loop goes through all rows"),
        (_FROM_TO, "range(first, end + 1)", "the last row to be written is end - 1"),
        (_FROM_TO, "range(first, end - 1)", "one row too few"),
        (_FROM_TO, "range(first + 1, end)", "the first row is left out"),
        (_FROM_TO, "range(end - first)", "counted from 0"),
        (_TIMES, "np.int8(x[m, i]) * codes[row, i]", "products of int8 wrap around"),
        (_TIMES, "np.int8(x[m, i]) * np.float32(codes[row, i])", "x is cut to whole numbers"),
        (_TIMES, "x[m, i] * np.float32(np.uint8(codes[row, i]))", "the codes are read as uint8"),
        ("range(inputs)", "range(1)", "only the first input"),
        ("x[m, i]", "x[0, i]", "the product of the first"),
        (f"        for m in range(inputs):\n{_BEGIN}",
         "        total = np.float32(0)\n        for m in range(inputs):\n", "from input to input"),
        (f"for row in {_FROM_TO}:\n{_FETCHES}        for m in range(inputs):\n{_BEGIN}", "total = np.float32(0)\n"
         f"    for row in {_FROM_TO}:\n{_FETCHES}        for m in range(inputs):\n", "from row to row"),
        ("output[m, row] =", "output[m, row] +=", "it takes its place"),
        ("output[m, row]", "output[m, row - first]", "counted from first"),
        ("output[m, row]", "output[row, m]", "output is [inputs, rows]"),
        ("total += x", "total = x", "only the last product"),
        ("range(width)", "range(width - 1)", "the last number of each row"),
        ("range(width)", _LINES, "the steps of per_line(codes) are for prefetch alone"),
        (_PUT, "total * scales[row]", "nothing was written"),
        (_FETCHES, "", "waits for memory"),
        ("min(row + AHEAD, last)", "row + AHEAD", "there is no row behind the last"),
        ("min(row + AHEAD, last)", "row", "8 rows before it is read"),
        (_LINES, "range(width)", "one call for every number"),
        (_LINES, "range(0, width, 128)", "some lines of a row are never asked for"),
        (_LINES, "range(1)", "only the first line"),
        ("prefetch(codes, ", "prefetch(x, ", "x and output are small and near"),
        (f"{_FETCHES}        for m in range(inputs):\n", "        for m in range(inputs):\n"
         f"            for column in {_LINES}:\n                {_FETCH}\n", "again for every input"),
        ("np.float32(0)", "0.0", "the sum in float32"),
        ("np.float32(0)", "0", "the sum in float32"),
        (_PUT, f"{_PUT}\n            output.tolist()", "Numba says"),
        ("inputs, width = x.shape", "inputs, width = x.size()", "numpy's arrays, not tensors"),
    ],
    "7.6": [
        ("/ 127", "/ 128", "128 in place of 127"),
        ("/ 127", "/ 255", "255 in place of 127"),
        ("/ 127", "/ 127.5", "127.5 in place of 127"),
        (f"/ 127\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1)).round()",
         f"/ 128\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1)).round().clamp(-128, 127)",
         "that it is kept at 127"),
        (f"/ 127\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1)).round()",
         "/ 128\n    return (x.float() / scales.unsqueeze(-1))", "128 in place of 127"),
        (f".abs().amax(dim=-1) / 127\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1)).round()",
         f".amax(dim=-1) / 127\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1)).round().clamp(-127, 127)",
         "the largest in size, whatever its sign"),
        (_WHOLE_ROWS, f"{_ON_A_GRID}, scales", "the number 0 is code 128: subtract 128 before they become int8"),
        (_WHOLE_ROWS, f"{_ON_A_GRID}.to(torch.int8), scales", "the number 0 is code 128: subtract 128"),
        (_WHOLE_ROWS, f"{_ON_A_GRID.replace('True', 'False')}, scales", "the scale comes of the whole range"),
        (_WHOLE_ROWS, f"{_ON_A_GRID.replace('True', 'False')}.to(torch.int8), scales",
         "the scale comes of the whole range"),
        (_WHOLE_ROWS, f"{_ON_A_GRID.replace('True', 'False').replace('return codes', 'return (codes.int() - 128)')}"
         ".to(torch.int8), scales", "the scale comes of the whole range"),
        (f"{_ROW_SCALES}\n{_ROW_GUARD}", _RANGE_SCALES, "the scale comes of the whole range"),
        (f"{_ROW_SCALES}\n{_ROW_GUARD}", _RANGE_SCALES.replace("255", "254"), "the scale comes of the whole range"),
        (f"{_ROW_SCALES}\n{_ROW_GUARD}    return {_ROW_CODES}",
         f"{_RANGE_SCALES}    return {_ROW_CODES.replace('.to(', '.clamp(-127, 127).to(')}",
         "the scale comes of the whole range"),
        (_ROW_SIZE, "x.float().abs().mean(dim=-1)", "the scale comes of an average"),
        (_ROW_SIZE, "x.float().std(dim=-1)", "the scale comes of an average"),
        (".round()", ".ceil()", "raised to the next whole number"),
        ("x.float() / scales.unsqueeze(-1)", "x.float()", "the scale is not used"),
        (f"{_ROW_SIZE} / 127", _ROW_SIZE, "the largest size itself"),
        (f"{_ROW_SCALES}\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1))",
         "scales = x.float().abs().max() / 127\n    return (x.float() / scales)", "one scale for the whole tensor"),
        (f"{_ROW_SIZE} /", "x.float().abs().max().expand(len(x)) /", "one scale for the whole tensor"),
        (f"{_ROW_SCALES}\n{_ROW_GUARD}    return (x.float() / scales.unsqueeze(-1))",
         "scales = x.float().abs().amax(dim=0) / 127\n    return (x.float() / scales)", "those of the columns"),
        (_ROW_GUARD, "", "a row of zeros has the scale 1"),
        (_ROW_GUARD, "    scales = scales.clamp(min=1e-8)\n", "a row of zeros has the scale 1"),
        (_ROW_GUARD, "    scales = scales + 1e-3\n", "scales: got [1.001]"),
        (".round()", "", "the codes are cut down"),
        (".abs()", "", "the largest in size, whatever its sign"),
        ("torch.int8", "torch.uint8", "no negative numbers"),
        (".to(torch.int8)", "", "the dtype is not"),
        ("x.float() / scales.unsqueeze(-1)", "x.float() * scales.unsqueeze(-1)", "multiplied by the scale"),
        ("x.float() / scales.unsqueeze(-1)", "x.float() / scales", "the scales meet the columns"),
        (_ROWS, f"return {_ROW_CODES}, 1 / scales", "turned over"),
        (_ROWS, f"return {_ROW_CODES}, scales.unsqueeze(-1)", "no column of them"),
        (_ROWS, f"return scales, {_ROW_CODES}", "exchanged"),
        (_ROWS, f"return {_ROW_CODES}", "return both"),
        (f"{_ROW_SCALES}\n", "x = x / 1\n    scales = x.abs().amax(dim=-1) / 127\n", "half precision"),
        ("    return ", "    ", "`return` is missing"),
    ],
}  # fmt: skip

WITH_A_HELPER = """
def dot(x, codes, m, row):
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[m, i] * np.float32(codes[row, i])
    return total


def multiply_int8_rows(x, codes, scales, output, first, end):
    for row in range(first, end):
        for column in range(0, x.shape[1], per_line(codes)):
            prefetch(codes, min(row + AHEAD, codes.shape[0] - 1), column)
        for m in range(x.shape[0]):
            output[m, row] = dot(x, codes, m, row) * scales[row]
"""
SUM_OF_ARRAYS = """
from numpy import dot as times


def multiply_int8_rows(x, codes, scales, output, first, end):
    for row in range(first, end):
        for column in range(0, x.shape[1], per_line(codes)):
            prefetch(codes, min(row + AHEAD, codes.shape[0] - 1), column)
        for m in range(x.shape[0]):
            output[m, row] = (SUM) * scales[row]
"""
NOTHING_AHEAD = """
def multiply_int8_rows(x, codes, scales, output, first, end):
    for row in range(first, end):
        for m in range(x.shape[0]):
            output[m, row] = (SUM) * scales[row]
"""
COMPILED_ALREADY = """
import numba


@numba.njit
def multiply_int8_rows(x, codes, scales, output, first, end):
    pass
"""


@pytest.mark.parametrize(
    ("source", "diagnosis"),
    [
        *(
            (SUM_OF_ARRAYS.replace("SUM", total), "the sum of a row is a loop, number by number: no @")
            for total in (
                "x[m] @ codes[row]",
                "x[m] @ codes[row].astype(np.float32)",
                "np.dot(x[m], codes[row])",
                "np.dot(x[m], codes[row].astype(np.float32))",
                "np.inner(x[m], codes[row])",
                "times(x[m], codes[row].astype(np.float32))",
            )
        ),
        (NOTHING_AHEAD.replace("SUM", "x[m] @ codes[row]"), "compiled code has no @ here"),
        (NOTHING_AHEAD.replace("SUM", "np.dot(x[m], codes[row])"), "compiled code has no @ here"),
        (WITH_A_HELPER, "a function of your own is called, which stays plain Python"),
        (COMPILED_ALREADY, "it is compiled already"),
        (f"AHEAD = 6\n\n\n{mutants.code_of('7.5').replace('row + AHEAD', 'row + 4')}", "6 rows before it is read"),
    ],
)
def test_what_numba_cannot_take_and_a_distance_of_ones_own_are_told(source, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find("7.5"), mutants.written("7.5", source))
    assert diagnosis in str(caught.value), str(caught.value)
    assert "scipy" not in str(caught.value), str(caught.value)


def test_prefetch_is_itself_again_after_a_check_of_the_int8_product_that_stopped_in_the_middle():
    before = words.prefetch.__code__

    def multiply_int8_rows(x, codes, scales, output, first, end):
        words.prefetch(codes, 0, 0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        packed_product_checks.noted(multiply_int8_rows, packed_product_checks.prefetch_cases()[0])
    assert words.prefetch.__code__ is before


@pytest.mark.parametrize(
    ("piece", "diagnosis"),
    [
        ("def codes_of(groups, scales, minimums, bits):\n"
         "    return ((groups - minimums[:, None]) / scales[:, None]).floor().clamp(0, 2**bits - 1).to(torch.uint8)\n",
         'codes_of, which it calls, is not: check("7.2", codes_of)'),
        ("def grids_of(weight, bits, group, symmetric=False):\n"
         "    grids = [grid_of(part, bits, symmetric) for part in weight.split(group or weight.shape[1], dim=1)]\n"
         "    return tuple(torch.stack(each, dim=1) for each in zip(*grids))\n", "grids_of, which it calls, is not"),
    ],
)  # fmt: skip
def test_where_a_piece_that_quantize_calls_is_wrong_that_piece_is_named(piece, diagnosis):
    quantize = mutants.written("7.3", f"{piece}\n\n{mutants.code_of('7.3')}")
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find("7.3"), quantize)
    assert f"quantize may be right, but {diagnosis}" in str(caught.value), str(caught.value)


def test_quantize_over_codes_that_are_still_a_blank_says_which_exercise_is_missing():
    piece = "def codes_of(groups, scales, minimums, bits):\n    raise NotImplementedError()\n"
    quantize = mutants.written("7.3", f"{piece}\n\n{mutants.code_of('7.3')}")
    with pytest.raises(NotYetWritten, match="Exercise 7.2 is not yet written"):
        run_check(exercises.find("7.3"), quantize)
