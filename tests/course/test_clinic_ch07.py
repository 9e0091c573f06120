"""Chapter 7's bug hunts: each shows its symptom, a mended piece passes, a half repair is told what is wrong still."""

from __future__ import annotations

import hunts
import pytest
import torch

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import contained
from llmfromscratch.course.failures import CheckFailed

_HUNTS = [hunt.id for hunt in exercises.hunts(7)]


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_piece(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


def repaired(hunt_id: str, pairs: list[tuple[str, str]]):
    return hunts.repaired(hunt_id, pairs, torch=torch, F=torch.nn.functional)


_SCALES = "    scales = weight.abs().amax(dim=0) / 127\n"
_ROUNDED = "    codes = (weight / scales).round().to(torch.int8)\n"
_TIMES = "    return (x @ codes.float().T) * scales\n"
_ROWS = "    scales = weight.abs().amax(dim=1) / 127\n    scales = torch.where(scales == 0, 1, scales)\n"
_BY_ROWS = (_ROUNDED, "    codes = (weight / scales.unsqueeze(-1)).round().to(torch.int8)\n")
_ENDS = "    lowest, highest = numbers.amin(dim=-1), numbers.amax(dim=-1)\n"
_WITH_ZERO = "    lowest, highest = numbers.amin(dim=-1).clamp(max=0), numbers.amax(dim=-1).clamp(min=0)\n"
_STEP = "    scales = (highest - lowest) / 15\n"
_GUARD = f"{_STEP}    scales = torch.where(scales == 0, 1, scales)\n"
_ZEROS = "zeros = (-lowest / scales).round().to(torch.uint8)"
_SUMS = "    sums = codes @ weight_codes.T\n"
_BACK = "    return sums.float() * scales.unsqueeze(-1) * weight_scales\n"
_WINDOWS = "    return torch.stack([next(iter(ids.split(length))) for _ in range(count)])\n"
_TOO_SHORT = "    if len(ids) < count * length:\n"
_SCALE = "    scales = scales.to(dtype).repeat_interleave(size, dim=1)\n"
_LOW = "    minimums = minimums.to(dtype).repeat_interleave(size, dim=1)\n"
_LEVELS = "    return minimums + scales * codes.to(dtype)\n"
_WIDE = [(_SCALE, _SCALE.replace(".to(dtype)", "")), (_LOW, _LOW.replace(".to(dtype)", ""))]


def int_mm_is_exact() -> bool:
    """On processors without VNNI the sums of two products inside of it stop at int16's ends."""
    codes = torch.full((1, 64), 127, dtype=torch.int8)
    return int(torch._int_mm(codes, codes.T)) == 64 * 127 * 127


# hunt: repairs, each of which ends it
MENDED = {
    "7.a": [
        [(_SCALES, _ROWS), _BY_ROWS],
        [(_SCALES, "    scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127\n"),
         (_TIMES, "    return (x @ codes.float().T) * scales.T\n")],
        [(_SCALES, _ROWS), _BY_ROWS, (_TIMES, "    return x @ (codes.float() * scales[:, None]).T\n")],
    ],
    "7.b": [
        [(_ENDS, _WITH_ZERO), (_STEP, _GUARD)],
        [(_ENDS, _WITH_ZERO), (_STEP, _GUARD), (".clamp(0, 15)", "")],  # there is nothing left to be kept
        [(_ENDS, "    padded = F.pad(numbers, (0, 1))\n    lowest, highest = torch.aminmax(padded, dim=-1)\n"),
         (_STEP, f"{_STEP}    scales[scales == 0] = 1\n")],
    ],
    "7.c": [
        [(_SUMS, "    sums = codes.int() @ weight_codes.int().T\n")],
        [(_SUMS, "    sums = codes.long() @ weight_codes.long().T\n")],
        [(_SUMS, "    sums = codes.double() @ weight_codes.double().T\n")],  # exact up to 2^53
        [(_SUMS, "    sums = (codes.int().unsqueeze(1) * weight_codes).sum(-1)\n")],
        [(_SUMS, "    sums = (codes.short().unsqueeze(1) * weight_codes).sum(-1, dtype=torch.int32)\n")],
        *([[(_SUMS, "    sums = torch._int_mm(codes.contiguous(), weight_codes.T)\n")]] if int_mm_is_exact() else []),
    ],
    "7.d": [
        [(_WINDOWS, "    starts = [i * len(ids) // count for i in range(count)]\n"
                    "    return torch.stack([ids[start : start + length] for start in starts])\n")],
        [(_WINDOWS, "    starts = [round(i * (len(ids) - length) / max(count - 1, 1)) for i in range(count)]\n"
                    "    return torch.stack([ids[start : start + length] for start in starts])\n")],
        [(_WINDOWS, "    whole = ids.split(length)[: len(ids) // length]\n"
                    "    return torch.stack([whole[i * len(whole) // count] for i in range(count)])\n")],
        [(_WINDOWS, "    step = len(ids) // count\n    return ids[: count * step].view(count, step)[:, :length]\n")],
        [(_WINDOWS, "    starts = torch.linspace(0, len(ids) - length, count).long().tolist()\n"
                    "    return torch.stack([ids[start : start + length] for start in starts])\n")],
        [(_WINDOWS, "    return torch.stack([part[-length:] for part in ids.tensor_split(count)])\n")],
        [(_WINDOWS, "    parts = ids.tensor_split(count)\n    middles = [(len(part) - length) // 2 for part in parts]\n"
                    "    return torch.stack([part[at : at + length] for part, at in zip(parts, middles)])\n")],
        *([(_WINDOWS, f"    chance, step = torch.Generator().manual_seed({seed}), len(ids) // count\n"
                      "    places = torch.randint(step - length + 1, (count,), generator=chance)\n"
                      "    starts = (step * torch.arange(count) + places).tolist()\n"
                      "    return torch.stack([ids[start : start + length] for start in starts])\n")]
          for seed in range(5)),  # by chance, one in each part
    ],
    "7.e": [
        [*_WIDE, (_LEVELS, "    return (minimums + scales * codes).to(dtype)\n")],
        [(_SCALE, _SCALE.replace("to(dtype)", "double()")), (_LOW, _LOW.replace("to(dtype)", "double()")),
         (_LEVELS, "    return (minimums + scales * codes.double()).to(dtype)\n")],
        [(_SCALE, ""), (_LOW, ""), (_LEVELS, "    levels = codes.float().unflatten(1, (-1, size))\n    levels = "
         "levels * scales.unsqueeze(-1) + minimums.unsqueeze(-1)\n    return levels.flatten(1).to(dtype)\n")],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("hunt_id", "pairs"), [(hunt, pairs) for hunt, repairs in MENDED.items() for pairs in repairs])
def test_a_mended_piece_ends_the_bug_hunt(hunt_id, pairs):
    exercises.find_hunt(hunt_id).check(repaired(hunt_id, pairs))


# hunt: [(pieces of the broken code with what stands there instead, words of the diagnosis)]
HALF = {
    "7.a": [
        ([(_SCALES, _ROWS)], "are divided into columns"),
        ([(_SCALES, _ROWS), _BY_ROWS, (_TIMES, "    return x @ codes.float().T\n")], "not multiplied by the scales"),
        ([(_SCALES, _ROWS), _BY_ROWS, (_TIMES, "    return (x @ codes.float().T) * scales.unsqueeze(-1)\n")],
         "the product is [tokens, rows]"),
        ([(_SCALES, _ROWS.replace("    scales = torch.where(scales == 0, 1, scales)\n", "")),
          (_ROUNDED, "    codes = (weight / scales.unsqueeze(-1)).round()\n")], "0 / 0 is NaN"),
        ([(_SCALES, "    scales = weight.abs().max() / 127\n")], "one scale for the whole weight"),
        ([(_TIMES, "    return (x * scales) @ codes.float().T\n")], "a scale for each column"),
        ([(_SCALES, _ROWS), (_ROUNDED, "    codes = (weight / scales.unsqueeze(-1)).to(torch.int8)\n")],
         "the steps are cut down"),
        ([(_SCALES, _ROWS.replace("127", "128")), _BY_ROWS], "int8 has no 128"),
        ([(_SCALES, _ROWS), (_ROUNDED, "    codes = weight / scales.unsqueeze(-1)\n")], "not rounded any more"),
        ([(_SCALES, _ROWS), _BY_ROWS, (_TIMES, "    return (x @ codes.float().T) * scales * scales\n")], "twice"),
    ],
    "7.b": [
        ([(_ZEROS, "zeros = (-lowest / scales).round().to(torch.int16)")], "a wider type holds any zero point"),
        ([(_ZEROS, "zeros = (-lowest / scales).round()")], "a wider type holds any zero point"),
        ([(_ZEROS, "zeros = (-lowest / scales).round().clamp(0, 15).to(torch.uint8)")], "it fits, and means another"),
        ([(_ENDS, _WITH_ZERO.replace(".clamp(min=0)", ""))], "those of negative ones are not"),
        ([(_ENDS, _WITH_ZERO.replace(".clamp(max=0)", ""))], "those of positive ones are not"),
        ([(_ENDS, "    highest = numbers.abs().amax(dim=-1)\n    lowest = -highest\n"), (_STEP, _GUARD)],
         "half of them lie where there are no numbers"),
        ([(_ENDS, _WITH_ZERO)], "0 / 0 is NaN"),
        ([("to(torch.uint8), scales, zeros", "to(torch.uint8), scales")], "codes, scales and zeros"),
    ],
    "7.c": [
        ([(_SUMS, "    sums = (codes @ weight_codes.T).int()\n")], "int8 still"),
        ([(_SUMS, "    sums = (codes.unsqueeze(1) * weight_codes).sum(-1)\n")], "each product is int8 still"),
        ([(_SUMS, "    sums = (codes.unsqueeze(1) * weight_codes).sum(-1, dtype=torch.int32)\n")],
         "each product is int8 still"),
        ([(_SUMS, "    sums = codes.short() @ weight_codes.short().T\n")], "int16 holds two products"),
        ([(_SUMS, "    sums = codes.half() @ weight_codes.half().T\n")], "is not exact beyond 2048"),
        ([(_SUMS, "    sums = codes.bfloat16() @ weight_codes.bfloat16().T\n")],
         "bfloat16 is exact up to 256 only"),
        ([(_SUMS, "    sums = codes.float() @ weight_codes.float().T\n")], "float32 holds every whole number up to"),
        ([(_SUMS, "    sums = F.linear(codes.float(), weight_codes.float())\n")], "int32 holds 133,144 of them"),
        ([(_SUMS, "    sums = (codes.float().unsqueeze(1) * weight_codes).sum(-1)\n")], "the sums are not exact"),
        ([(_SUMS, "    sums = torch.einsum('tw,rw->tr', codes.float(), weight_codes.float())\n")],
         "the sums are not exact"),
        ([(_SUMS, "    sums = (codes.int() @ weight_codes.int().T).clamp(-128, 127)\n")], "from -128 to 127"),
        ([(_SUMS, "    sums = codes.int() @ weight_codes.T\n")], "of one type"),
        ([(_SUMS, "    sums = codes.int() @ weight_codes.int().T\n"), (" * weight_scales", "")], "the rows' scales"),
        ([(_SUMS, "    sums = codes.int() @ weight_codes.int().T\n"), (" * scales.unsqueeze(-1)", "")],
         "the vectors' scales"),
    ],
    "7.d": [
        ([(_WINDOWS, "    return torch.stack(ids.split(length)[:count])\n")], "only the beginning of the text"),
        ([(_WINDOWS, "    return ids[-count * length :].view(count, length)\n")], "only the end of the text"),
        ([(_WINDOWS, "    return torch.stack([ids[i : i + length] for i in range(count)])\n")], "windows overlap"),
        ([(_WINDOWS, "    return ids[torch.randperm(len(ids))[: count * length]].view(count, length)\n")],
         "not neighbours in the text"),
        ([(_WINDOWS, "    starts = torch.randint(len(ids) - length + 1, (count,)).tolist()\n"
                     "    return torch.stack([ids[start : start + length] for start in starts])\n")], "window"),
        ([(_WINDOWS, "    return ids.split(length)[:count]\n")], "the windows as a torch.Tensor"),
        ([(_WINDOWS, "    return ids[: count * length].view(length, count)\n")], "rows of"),
        ([(_TOO_SHORT, "    if False:\n"), (_WINDOWS, "    starts = [i * len(ids) // count for i in range(count)]\n"
          "    return torch.stack([ids[start : start + length] for start in starts])\n")], "not right yet"),
        ([(_WINDOWS, "    half = count // 2\n    parts = ids[: half * length], ids[-(count - half) * length :]\n"
                     "    return torch.cat(parts).view(count, length)\n")], "between two windows"),
        ([(_WINDOWS, "    step = max(length, len(ids) // (count + 1))\n"
                     "    return torch.stack([ids[i * step : i * step + length] for i in range(count)])\n")],
         "35 tokens lie behind the last window; in 4 equal parts of the text a window each, it is 25 at most"),
        ([(_WINDOWS, "    step = max(length, len(ids) // (count + 1))\n    ends = [len(ids) - i * step for i in "
                     "range(count)]\n    return torch.stack([ids[end - length : end] for end in ends])\n")],
         "35 tokens lie before the first window"),
        ([(_WINDOWS, "    ids = ids[: max(count * length, len(ids) * 4 // 5)]\n"
                     "    starts = [i * (len(ids) - length) // max(count - 1, 1) for i in range(count)]\n"
                     "    return torch.stack([ids[start : start + length] for start in starts])\n")],
         "200 tokens lie behind the last window"),
    ],
    "7.e": [
        ([*_WIDE, (_LEVELS, "    return minimums + (scales * codes).to(dtype)\n")], "before the minimum is added"),
        ([*_WIDE, (_LEVELS, "    return ((scales * codes).to(dtype) + minimums).to(dtype)\n")],
         "before the minimum is added"),
        ([(_LEVELS, "    return (minimums.float() + scales.float() * codes).to(dtype)\n")],
         "scales and minimums are rounded to the dtype first"),
        ([_WIDE[0], (_LEVELS, "    return (minimums.float() + scales * codes).to(dtype)\n")],
         "the minimum is rounded to the dtype before"),
        ([_WIDE[1], (_LEVELS, "    return (minimums + scales.float() * codes).to(dtype)\n")],
         "the scale is rounded to the dtype before"),
        ([*_WIDE, (_LEVELS, "    return minimums + scales * codes\n")], "the dtype is not"),
        ([*_WIDE, (_LEVELS, "    return (minimums + scales * codes).half().to(dtype)\n")], "beyond 65504"),
        ([(_SCALE, "    scales = scales.repeat(1, size)\n"), (_LOW, "    minimums = minimums.repeat(1, size)\n"),
          (_LEVELS, "    return (minimums + scales * codes).to(dtype)\n")], "repeat_interleave"),
        ([*_WIDE, (_LEVELS, "    return (scales * (codes + minimums)).to(dtype)\n")], "it is added to scale * code"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("hunt_id", "pairs", "diagnosis"), [(hunt, *half) for hunt, halves in HALF.items() for half in halves]
)
def test_a_half_repair_is_told_what_is_still_wrong(hunt_id, pairs, diagnosis):
    mended = repaired(hunt_id, pairs)
    with pytest.raises(CheckFailed) as caught:
        contained(lambda: exercises.find_hunt(hunt_id).check(mended), hunt_id)
    assert diagnosis in str(caught.value), str(caught.value)
