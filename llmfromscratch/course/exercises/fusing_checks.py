"""The checks of chapter 6's fused products, row by row and number by number; views are told from copies by memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.comparing import Case, compare, expect_equal
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed

# ---- 6.3 weights under each other --------------------------------------------------------------------------------

_PARTS = ("the fused weight", "the views")


def _weights(*rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random_numbers(many, width, seed=seed + place).to(dtype) for place, many in enumerate(rows)]


def fusing_cases() -> list[Case]:
    """What `fuse_rows` is tried on: lists of weights."""
    two = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]
    return [
        Case("two weights of one row, [[1, 2]] and [[3, 4]]", two),
        Case("two weights, of 2 rows and of 1", [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]),
        Case("a single weight [2, 3]", _weights(2, width=3, seed=1)),
        Case("three weights, of 4, 2 and 2 rows of 3", _weights(4, 2, 2, width=3, seed=2)),
        Case("three weights of 3 rows of 3", _weights(3, 3, 3, width=3, seed=3)),
        Case("two weights, of 1 and 5 rows of 4, float64", _weights(1, 5, width=4, seed=4, dtype=torch.float64)),
        Case("three weights, of 6, 2 and 2 rows of 8, bfloat16", _weights(6, 2, 2, width=8, seed=5,
                                                                          dtype=torch.bfloat16)),
    ]  # fmt: skip


def check_fuse_rows(fuse_rows: Callable[[Sequence[Tensor]], tuple[Tensor, list[Tensor]]]) -> None:
    """Against the rows in a list; then by writing into the fused weight, which its views have to show."""
    compare(
        in_parts(fuse_rows, *_PARTS),
        row_under_row,
        fusing_cases(),
        expected="the rows of all weights under each other, and for each of the weights its rows of that",
        mistakes=_FUSING_MISTAKES,
        diagnose=_of_rows,
        explain=_of_cat,
    )
    for case in fusing_cases()[:4]:
        weights = [weight.clone() for weight in case.args[0]]
        fused, views = fuse_rows(weights)
        _insist_on_views(fused, list(views), weights, case.text)
    one = torch.ones(3, 4)
    x = random_numbers(4, seed=6)
    fused, views = fuse_rows([one, 2 * one])
    expect_equal(
        (fused @ x, list(views)[1] @ x),
        (torch.cat([one @ x, 2 * one @ x]), 2 * one @ x),
        expected="the product with the fused weight to give all results, and that with a view its part of them",
        case="weights of 3 rows of ones and 3 rows of twos",
    )


def in_parts(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function, with the values of the tuple that it gives under their names, tuples in it as lists."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        result = function(*arguments)
        if not isinstance(result, tuple | list) or len(result) != len(names):
            return result
        parts = [list(part) if isinstance(part, tuple) else part for part in result]
        return NamedParts(zip(names, parts, strict=True))

    return run


def row_under_row(weights: Sequence[Tensor]) -> NamedParts:
    """One row after the other."""
    rows = [row for weight in weights for row in weight]
    return NamedParts({"the fused weight": torch.stack(rows), "the views": [weight.clone() for weight in weights]})


def _insist_on_views(fused: Tensor, views: list[Tensor], weights: list[Tensor], text: str) -> None:
    """Each part has to lie in the fused weight's memory, at its rows."""
    row = 0
    for place, (view, weight) in enumerate(zip(views, weights, strict=True)):
        expected = f"views[{place}] to be a part of the fused weight, in the same memory"
        if len(weights) > 1 and view.data_ptr() == weight.data_ptr():
            raise CheckFailed(
                expected, case=f"{text}: it lies in the memory of weights[{place}]",
                mistake="the old weights come back; they would stay in memory beside the fused one",
            )  # fmt: skip
        fused[row : row + len(weight)] += 1
        if not torch.equal(view, fused[row : row + len(weight)]):
            raise CheckFailed(
                expected, case=f"{text}: a change of the fused weight does not show in it",
                mistake="a copy in place of a view: clone, contiguous, torch.tensor and indexing by a list copy; "
                "slices and split do not",
            )  # fmt: skip
        row += len(weight)


def _of_cat(error: BaseException, case: Case) -> str:
    text = str(error)
    if "expected Tensor as element" in text or "must be tuple of Tensors, not" in text:
        return "torch.cat takes a list of tensors"
    if "split_with_sizes expects" in text:
        return "the fused weight has not as many rows as all of them together: rows go under rows, along dimension 0"
    if "Sizes of tensors must match" in text or "stack expects each tensor to be equal size" in text:
        return "the weights differ in their numbers of rows: they go under each other, along dimension 0"
    return ""


def _of_rows(got: Any, want: Any) -> str:
    if isinstance(got, Tensor):
        return "a single tensor comes back; asked for are two things: the fused weight, and the list of its views"
    if isinstance(got, tuple | list) and len(got) != 2:
        return "two things are asked for: the fused weight, and the list of its views"
    return ""


def _fused(
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    cut: Callable[[Tensor, list[int]], Sequence[Tensor]] = lambda fused, rows: fused.split(rows),
) -> Callable[[Sequence[Tensor]], NamedParts]:
    def run(weights: Sequence[Tensor]) -> NamedParts:
        fused = join(list(weights))
        return NamedParts(
            {"the fused weight": fused, "the views": list(cut(fused, [len(weight) for weight in weights]))}
        )

    return run


_FUSING_MISTAKES: list[tuple[str, Callable[..., Any]]] = [
    ("the weights lie beside each other; under each other, along dimension 0, every row stays whole",
     _fused(lambda weights: torch.cat(weights, 1), lambda fused, rows: fused.split(rows, 1))),
    ("the weights lie beside each other; under each other, along dimension 0, every row stays whole",
     _fused(lambda weights: torch.cat(weights, 1))),
    ("the weights lie beside each other; under each other, along dimension 0, every row stays whole",
     _fused(lambda weights: torch.cat(weights, 1), lambda fused, rows: fused.chunk(len(rows), 1))),
    ("the weights are stacked in a new dimension; rows go under rows, [all rows, width]",
     _fused(lambda weights: torch.stack(weights), lambda fused, rows: list(fused))),
    ("the weights are stacked in a new dimension; rows go under rows, [all rows, width]",
     _fused(lambda weights: torch.stack(weights))),
    ("the weights are in another order than they were given", _fused(lambda weights: torch.cat(weights[::-1]))),
    ("the weights are in another order than they were given",
     _fused(lambda weights: torch.cat(weights[::-1]), lambda fused, rows: fused.split(rows[::-1])[::-1])),
    ("the weights are in another order than they were given",
     _fused(lambda weights: torch.cat(weights[::-1]), lambda fused, rows: fused.split(rows[::-1]))),
    ("the views are in another order than the weights", _fused(cut=lambda fused, rows: fused.split(rows)[::-1])),
    ("the views are of equal size; each should have as many rows as its weight",
     _fused(cut=lambda fused, rows: fused.chunk(len(rows)))),
    ("the views are of equal size; each should have as many rows as its weight",
     _fused(cut=lambda fused, rows: fused.split(rows[0]))),
    ("one view for each row; asked for is one for each weight", _fused(cut=lambda fused, rows: list(fused))),
    ("the views begin at row 0, all of them; each begins where the one before ended",
     _fused(cut=lambda fused, rows: [fused[:many] for many in rows])),
    ("the second thing is how many rows each weight has; asked for are the views",
     lambda weights: NamedParts({"the fused weight": torch.cat(list(weights)),
                                 "the views": [len(weight) for weight in weights]})),
    ("the views alone come back; asked for are two things: the fused weight, and the list of its views",
     in_parts(lambda weights: list(torch.cat(list(weights)).split([len(weight) for weight in weights])), *_PARTS)),
    ("the views come first; the fused weight does",
     in_parts(lambda weights: (torch.cat(list(weights)).split([len(weight) for weight in weights]),
                               torch.cat(list(weights))), *_PARTS)),
    ("the fused weight is float32, whatever dtype the weights have",
     _fused(lambda weights: torch.cat([weight.float() for weight in weights]))),
]  # fmt: skip

# ---- 6.4 the norm's weight ---------------------------------------------------------------------------------------


def gain_cases() -> list[Case]:
    """What `fold_gain` is tried on: weights and gains."""
    square = random_numbers(4, 4, seed=11), random_numbers(4, seed=12)
    wide = random_numbers(5, 8, seed=13), 1 + random_numbers(8, seed=14)
    return [
        Case("weight [[1, 1], [1, 1]], gain [2, 3]", torch.ones(2, 2), torch.tensor([2.0, 3.0])),
        Case("weight [[1, 2, 3]], gain [1, 10, 100]", torch.tensor([[1.0, 2, 3]]), torch.tensor([1.0, 10, 100])),
        Case("weight [[1, 2], [3, 4]], gain [0, 1]", torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([0.0, 1])),
        Case("a random weight [4, 4]", *square),
        Case("a random weight [5, 8]", *wide),
        Case("a weight [5, 8] in float64, a gain in float32", wide[0].double(), wide[1]),
        Case("a weight [5, 8] in float32, a gain in float64", wide[0], wide[1].double()),
        Case("a weight [5, 8] in bfloat16, a gain in float32", wide[0].bfloat16(), wide[1]),
    ]


def check_fold_gain(fold_gain: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against one number after the other; then as a product with a vector."""
    compare(
        fold_gain,
        number_by_number,
        gain_cases(),
        expected="W[row, i] times g[i], in the weight's dtype",
        mistakes=_GAIN_MISTAKES,
        explain=lambda error, case: _of_columns(error),
    )
    weight, gain, x = random_numbers(6, 9, seed=21), random_numbers(9, seed=22), random_numbers(9, seed=23)
    expect_equal(
        fold_gain(weight, gain) @ x,
        weight @ (gain * x),
        expected="fold_gain(W, g) @ x to be W @ (g * x)",
        case="a random weight [6, 9]",
    )


def number_by_number(weight: Tensor, gain: Tensor) -> Tensor:
    """Each number of each row by itself, in float64."""
    gains = gain.tolist()
    table = [[number * one for number, one in zip(row, gains, strict=True)] for row in weight.tolist()]
    return torch.tensor(table, dtype=torch.float64).to(weight.dtype)


def _of_columns(error: BaseException) -> str:
    if isinstance(error, RuntimeError) and "must match the size of tensor" in str(error):
        return "the gain meets the rows here; it has one number for each column"
    return ""


def _in_its_dtype(wrong: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A mistake, with its result in the weight's dtype."""
    return lambda weight, gain: wrong(weight, gain.to(weight.dtype)).to(weight.dtype)


_ROWS = "the rows are multiplied; gain[i] belongs to x[i], and so to column i"
_GAIN_MISTAKES: list[tuple[str, Callable[..., Any]]] = [
    (sentence, _in_its_dtype(wrong))
    for sentence, wrong in [
        (_ROWS, lambda weight, gain: weight * gain.unsqueeze(-1)),  # where rows and columns are not as many, it fails
        (_ROWS, lambda weight, gain: torch.diag(gain) @ weight),
        (_ROWS, lambda weight, gain: weight * gain[: len(weight)].unsqueeze(-1)),
        ("divided by the gain; the norm multiplies with it", lambda weight, gain: weight / gain),
        ("the gain is added; the norm multiplies with it", lambda weight, gain: weight + gain),
        ("1 + gain is taken, as some models store it; here the gain is the factor itself",
         lambda weight, gain: weight * (1 + gain)),
        ("this is the product of the weight with the gain; asked for is a weight, [rows, width]",
         lambda weight, gain: weight @ gain),
        ("the gain is applied twice", lambda weight, gain: weight * gain * gain),
        ("the weight is normalized as well; only the norm's weight is folded, the norm itself stays",
         lambda weight, gain: weight * gain * torch.rsqrt(weight.pow(2).mean(-1, keepdim=True))),
        ("one number of the gain is used for all columns", lambda weight, gain: weight * gain[0]),
        ("one number of the gain is used for all columns", lambda weight, gain: weight * gain.mean()),
        ("the result is rounded to float32; it keeps the weight's dtype", lambda weight, gain: (weight * gain).float()),
    ]
]  # fmt: skip
