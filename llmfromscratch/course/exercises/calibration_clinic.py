"""Chapter 7's bug hunts of calibration and of half precision: one window again and again, and digits lost early."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare, expect_raises, expect_type
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed

# ---- 7.d ---------------------------------------------------------------------------------------------------------

TEXT_STORY = """
"GPTQ in 3 bits, calibrated on 64 windows of a long text. On these windows the output is nearly perfect. On the rest of
the same text it is worse than plain rounding, and more windows do not help." Below, for several numbers of windows: how
many of the 64 directions an input can have the windows show, and the error of the output in parts of plain rounding's,
on the windows themselves and on text that is in none of them.
"""
_WIDTH = 64
_LENGTH = 12


def calibration_windows(ids: Tensor, count: int, length: int) -> Tensor:
    """Pieces of a text to calibrate on, spread evenly over all of it, from near its beginning to near its end.

    Cut into `count` equal parts, the text has about one window in each. At most about one part's length of tokens is
    left over before the first window, and at most about as many behind the last.
    ids: int64 [tokens]. Returns int64 [count, length]: each row neighbours in the text, no token in two rows. Raises
    ValueError where the text is too short for that.
    """
    if len(ids) < count * length:
        raise ValueError(f"{len(ids)} tokens are too few for {count} windows of {length}.")
    return torch.stack([next(iter(ids.split(length))) for _ in range(count)])


def states_of(ids: Tensor) -> Tensor:
    """What a product reads of a text: each token's numbers, and half of those of the token before: [tokens, width]."""
    table = random_numbers(97, _WIDTH, seed=70) * (0.5 * random_numbers(_WIDTH, seed=71)).exp()
    numbers = table[ids % 97]
    return (numbers + 0.5 * numbers.roll(1, 0))[1:]


@cache
def _text() -> Tensor:
    """A long text: tokens that follow each other as chance has it."""
    return torch.randint(0, 97, (6000,), generator=torch.Generator().manual_seed(72))


def parts_of_plain(windows: Tensor) -> tuple[int, float, float]:
    """The rank of what the windows show, and GPTQ's error in parts of plain rounding's: on them, and on other text."""
    engine = learner_engine.reference("quantization")
    weight = random_numbers(48, _WIDTH, seed=73)
    seen = torch.cat([states_of(window) for window in windows])
    other = states_of(torch.randint(0, 97, (2000,), generator=torch.Generator().manual_seed(74)))
    calibrated, plain = engine.gptq(weight, seen.T @ seen, 3, 32), engine.quantize(weight, 3, 32)
    rates = [engine.output_error(weight, calibrated.dequantize(), x.T @ x)
             / engine.output_error(weight, plain.dequantize(), x.T @ x) for x in (seen, other)]  # fmt: skip
    return int(torch.linalg.matrix_rank(seen, rtol=1e-4)), rates[0], rates[1]


def show_text() -> None:
    """What the windows show, and what it does to the output."""
    print("windows   directions   error on them   error on other text   (plain rounding: 1)")
    for count in (1, 8, 64, 256):
        rank, own, other = parts_of_plain(calibration_windows(_text(), count, _LENGTH))
        print(f"{count:>7}   {rank:>4} of {_WIDTH}   {own:13.2f}   {other:19.2f}")


def check_text(mended: Callable[..., Tensor]) -> None:
    """Every window is a piece of the text, none shares a token with another, and they lie all over it."""
    for tokens, count, length in ((12, 3, 4), (20, 4, 5), (100, 4, 5), (1000, 16, 12), (1003, 7, 10), (64, 1, 8)):
        ids = 1000 + torch.arange(tokens)
        windows = mended(ids.clone(), count, length)
        expect_type(windows, torch.Tensor, "the windows")
        wrong = _of_windows(windows, tokens, count, length)
        if wrong:
            raise CheckFailed(
                "windows of neighbours that share no token and lie all over the text",
                case=f"{tokens} tokens, {count} windows of {length}: {_told(windows, tokens, count, length)}",
                mistake=wrong,
            )
    expect_raises(lambda: mended(torch.arange(11), 3, 4), ValueError, case="11 tokens, 3 windows of 4")


def _told(windows: Tensor, tokens: int, count: int, length: int) -> str:
    if windows.dim() != 2:
        return f"got shape {list(windows.shape)}"
    starts = [int(row[0]) - 1000 if row.numel() else -1 for row in windows]
    return f"got {list(windows.shape)}, the windows begin at tokens {differences.shown(starts)}"


def _of_windows(windows: Tensor, tokens: int, count: int, length: int) -> str:
    """What is wrong with windows of a text whose ids count up from 1000; "" where nothing is."""
    if list(windows.shape) != [count, length] or windows.dtype != torch.int64:
        return f"asked for are {count} rows of {length} ids, int64"
    rows = (windows - 1000).tolist()
    if any(row != list(range(row[0], row[0] + length)) for row in rows):
        return "a window's tokens are not neighbours in the text: what a model reads would be no text any more"
    starts = sorted(row[0] for row in rows)
    if len(set(starts)) < count:
        return "a window comes twice: it shows nothing new, and what it shows counts twice"
    if any(later - earlier < length for earlier, later in pairwise(starts)):
        return "windows overlap: most of their tokens are the same"
    return _of_spread(starts, tokens, count, length)


def _of_spread(starts: list[int], tokens: int, count: int, length: int) -> str:
    """A window may lie anywhere in its part; whoever counts in whole windows loses less than one more at an end."""
    part = tokens / count
    if count == 1:
        return ""
    before, behind = starts[0], tokens - starts[-1] - length
    if behind > tokens / 2:
        return "only the beginning of the text is shown: no window lies in its second half"
    if before > tokens / 2:
        return "only the end of the text is shown"
    if max(before, behind) > part + length:
        which, where = (behind, "behind the last window") if behind > before else (before, "before the first window")
        return f"{which} tokens lie {where}; in {count} equal parts of the text a window each, it is {part:.0f} at most"
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    return (
        "a large part of the text lies between two windows: they are to be spread evenly"
        if max(gaps) > 2 * part
        else ""
    )


# ---- 7.e ---------------------------------------------------------------------------------------------------------

HALF_STORY = """
"In float32 our quantized weights come back right. In bfloat16 the answers get worse, as if we had left out more bits,
and it is not bfloat16 itself: weights that were never quantized do well in it." Below, how far weights that come back
from their codes lie from their levels, as a share of these (rounding to bfloat16 costs 0.4 % at most, to float16
0.05 %), and the error of a product, beside that of the levels, each rounded once.
"""


def dequantized(codes: Tensor, scales: Tensor, minimums: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as numbers again, in the dtype that the model computes in, as near to its levels as that dtype has any.

    codes: uint8 [rows, width]; scales, minimums: float32 [rows, groups], of width / groups neighbours. Returns `dtype`
    [rows, width]: the level of each code is minimum + scale * code.
    """
    size = codes.shape[1] // scales.shape[1]
    scales = scales.to(dtype).repeat_interleave(size, dim=1)
    minimums = minimums.to(dtype).repeat_interleave(size, dim=1)
    return minimums + scales * codes.to(dtype)


def number_by_number(codes: Tensor, scales: Tensor, minimums: Tensor, dtype: torch.dtype) -> Tensor:
    """Each level in Python's own numbers, rounded once."""
    size = codes.shape[1] // scales.shape[1]
    grids = list(zip(scales.tolist(), minimums.tolist(), strict=True))
    rows = [
        [minimum[place // size] + scale[place // size] * code for place, code in enumerate(row)]
        for row, (scale, minimum) in zip(codes.tolist(), grids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


def _coded(rows: int, width: int, groups: int, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and grids of random weights; no level is 0 but for rounding."""
    weight = random_numbers(rows, groups, width // groups, seed=seed) + 0.3 * random_numbers(
        rows, groups, 1, seed=seed + 1
    )
    lowest = weight.amin(-1)
    scales = (weight.amax(-1) - lowest) / (2**bits - 1)
    codes = ((weight - lowest.unsqueeze(-1)) / scales.unsqueeze(-1)).round().to(torch.uint8)
    return codes.flatten(1), scales, lowest


def show_half() -> None:
    """How far numbers and a product are off, in each dtype."""
    print("                   off by more than 1 %   the product (rounded once)")
    x = random_numbers(16, 128, seed=5).double()
    for bits in (4, 8):
        codes, scales, minimums = _coded(64, 128, 4, bits, seed=bits)
        levels = number_by_number(codes, scales, minimums, torch.float64)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            got, once = dequantized(codes, scales, minimums, dtype).double(), levels.to(dtype).double()
            share = (got - levels).abs() / levels.abs()
            errors = [float(((part - levels) @ x.T).norm() / (levels @ x.T).norm()) for part in (got, once)]
            name = str(dtype).removeprefix("torch.")
            print(f"{bits} bits, {name:<8}   {int((share > 0.01).sum()):>5} of {share.numel()} numbers"
                    f"   {100 * errors[0]:14.3f} %   {100 * errors[1]:.3f} %")  # fmt: skip


# how far a number may lie from its level, as a share of it: one rounding to the dtype, and a little
_ONCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-5}


@cache
def half_cases(dtype: torch.dtype) -> tuple[Case, ...]:
    """What the mended numbers are tried on."""
    one = torch.tensor([[0, 7, 8, 15]], dtype=torch.uint8), torch.tensor([[0.1]]), torch.tensor([[-0.77]])
    fine = torch.tensor([[0, 100, 129, 255]], dtype=torch.uint8), torch.tensor([[0.01]]), torch.tensor([[-1.283]])
    two = torch.tensor([[1, 5, 2, 14]], dtype=torch.uint8), torch.tensor([[0.1, 3.0]]), torch.tensor([[-0.53, -8.0]])
    wide = torch.tensor([[0, 7, 9, 15]], dtype=torch.uint8), torch.tensor([[8001.0]]), torch.tensor([[-60000.0]])
    cases = [
        Case("codes [[0, 7, 8, 15]], scale 0.1, minimum -0.77", *one, dtype),
        Case("codes [[0, 100, 129, 255]], scale 0.01, minimum -1.283", *fine, dtype),
        Case("codes [[1, 5, 2, 14]], scales [[0.1, 3]], minimums [[-0.53, -8]]", *two, dtype),
        Case("codes [[0, 7, 9, 15]], scale 8001, minimum -60000", *wide, dtype),
        *(Case(f"random {bits}-bit codes {[rows, width]} in {groups} groups a row",
               *_coded(rows, width, groups, bits, seed), dtype)
          for rows, width, groups, bits, seed in (
              (1, 8, 1, 4, 1), (2, 8, 2, 3, 2), (3, 12, 3, 4, 3), (2, 64, 2, 8, 4))),
    ]  # fmt: skip
    return tuple(Case(f"{case.text}, {dtype}", *case.args) for case in cases)


def check_half(mended: Callable[..., Tensor]) -> None:
    """Against one number after the other, rounded once."""
    for dtype, share in _ONCE.items():
        compare(
            mended,
            number_by_number,
            half_cases(dtype),
            expected=f"the level of each code, minimum + scale * code, and of it the nearest number that {dtype} has",
            mistakes=combined(_widened, _HALF, at_once=2),
            explain=_of_groups,
            tolerance=Tolerance(relative=share, absolute=1e-7),
            what="the weight",
        )


def _of_groups(error: BaseException, case: Case) -> str:
    text = str(error)
    return "each grid serves several neighbours: repeat_interleave makes a number for each column" if (
        isinstance(error, RuntimeError) and "must match the size" in text) else ""  # fmt: skip


_TWICE = (
    "scale * code is rounded to the dtype before the minimum is added: both are large and cancel, and what is left is "
    "what rounding did"
)
_GRID_FIRST = (
    "scales and minimums are rounded to the dtype first: an error of the minimum is as large as several small weights, "
    "and one of the scale is multiplied by the code"
)
_HALF: list[tuple[str, dict[str, Any]]] = [
    ("the arithmetic is in the model's dtype: scale * code and the minimum are rounded, then cancel, and what is left "
     "is what rounding did", {"grid": True, "product": True}),
    (_GRID_FIRST, {"grid": True}),
    ("the minimum is rounded to the dtype before it is added: its error is as large as several small weights",
     {"minimum": True}),
    ("the scale is rounded to the dtype before it is multiplied: its error grows with the code", {"scale": True}),
    (_TWICE, {"product": True}),
    ("it is computed in float16 whatever the dtype", {"inner": torch.float16}),
    ("it is computed in bfloat16 whatever the dtype", {"inner": torch.bfloat16}),
    ("it goes through bfloat16, whatever the dtype", {"through": torch.bfloat16}),
    ("it goes through float16, which has no number beyond 65504", {"through": torch.float16}),
    ("the grids follow each other from column to column; each belongs to neighbours: repeat_interleave",
     {"spread": lambda part, size: part.repeat(1, size)}),
    ("the minimum is added to the code; it is added to scale * code",
     {"level": lambda minimum, scale, code: scale * (minimum + code)}),
    ("the minimum is taken off; it is added", {"level": lambda minimum, scale, code: scale * code - minimum}),
    ("the minimum is forgotten", {"level": lambda minimum, scale, code: scale * code}),
]  # fmt: skip


def _widened(
    inner: torch.dtype | None = None,
    through: torch.dtype | None = None,
    level: Callable[[Any, Any, Any], Any] | None = None,
    spread: Callable[[Tensor, int], Tensor] = lambda part, size: part.repeat_interleave(size, 1),
    **early: bool,
) -> Callable[..., Tensor]:
    """The numbers, with mistakes switched on: what is rounded early is named."""

    def run(codes: Tensor, scales: Tensor, minimums: Tensor, dtype: torch.dtype) -> Tensor:
        def kept(part: Tensor, *names: str) -> Tensor:
            part = part.to(inner) if inner else part
            return part.to(dtype).to(part.dtype) if any(early.get(name) for name in names) else part

        size = codes.shape[1] // scales.shape[1]
        scale = spread(kept(scales, "grid", "scale"), size)
        minimum = spread(kept(minimums, "grid", "minimum"), size)
        code = codes.to(scale.dtype)
        value = level(minimum, scale, code) if level else minimum + kept(scale * code, "product")
        return (value.to(through) if through else value).to(dtype)

    return run
