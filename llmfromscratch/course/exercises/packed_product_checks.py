"""The check of chapter 7's product with int8 codes: as plain Python first, then its prefetches, then compiled by Numba.

As chapter 6's product is checked; what is new is the scale of each row, and that codes are whole numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.exercises import product_checks
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.kernels import words

_EXPECTED = (
    "output[m, row] to be scales[row] * (x[m] · codes[row]) for every row from first to before end, and no other row "
    "touched"
)
Product = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int], None]


def check_multiply_int8_rows(multiply: Product) -> None:
    """Against products in float64; where the scale is used; the lines that are asked for; then as compiled code."""
    if hasattr(multiply, "py_func"):
        raise CheckFailed("a plain function", mistake="it is compiled already: the engine does that, so leave njit out")
    product_checks.refuse_products_of_arrays(multiply)
    compare(
        writing(multiply),
        row_by_row,
        plain_cases(),
        expected=_EXPECTED,
        mistakes=combined(_looped, _LOOP_MISTAKES, at_once=2),
        diagnose=product_checks.of_output,
        explain=_of_index,
        what="output",
    )
    _check_scales(multiply)
    product_checks.check_prefetches(multiply, noted, prefetch_cases(), "codes")
    product_checks.check_compiled(multiply, writing, row_by_row, compiled_cases(), _EXPECTED)


# ---- the numbers -------------------------------------------------------------------------------------------------


def _case(text: str, x: Any, codes: Any, scales: Any, first: int, end: int) -> Case:
    arrays = (np.asarray(x, np.float32), np.asarray(codes, np.int8), np.asarray(scales, np.float32))
    return Case(f"{text}, first {first}, end {end}", *arrays, first, end)


def _random(inputs: int, rows: int, width: int, first: int, end: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, width), generator=generator)
    text = f"{inputs} input{'s' * (inputs > 1)} of width {width}, {rows} rows"
    scales = 0.01 * (0.5 + torch.rand(rows, generator=generator))
    return _case(text, random_numbers(inputs, width, seed=seed), codes, scales, first, end)


def plain_cases() -> list[Case]:
    """What `multiply_int8_rows` is tried on as plain Python: small, with every index that may go wrong."""
    codes = [[1, 2], [3, 4], [-5, 100]]
    three = "codes [[1, 2], [3, 4], [-5, 100]], scales [1, 2, 0.5]"
    scales = [1.0, 2.0, 0.5]
    return [
        _case("x [[2]], codes [[3]], scales [1]", [[2.0]], [[3]], [1.0], 0, 1),
        _case("x [[2]], codes [[3]], scales [0.5]", [[2.0]], [[3]], [0.5], 0, 1),
        _case("x [[1, 10]], codes [[1, 2], [3, 4]], scales [1, 2]", [[1.0, 10.0]], codes[:2], scales[:2], 0, 2),
        _case(f"x [[1, 10]], {three}", [[1.0, 10.0]], codes, scales, 1, 3),
        _case(f"x [[1, 10]], {three}", [[1.0, 10.0]], codes, scales, 0, 0),
        _case(f"x [[1, 10], [0, 1.5]], {three}", [[1.0, 10.0], [0.0, 1.5]], codes, scales, 0, 3),
        _case("x [[3, 100]], codes [[100, 127]], scales [2]", [[3.0, 100.0]], [[100, 127]], [2.0], 0, 1),
        _random(2, 9, 5, 2, 7, seed=1),
        _random(3, 7, 70, 0, 7, seed=3),
        _random(1, 11, 130, 3, 11, seed=5),
    ]


def writing(multiply: Product) -> Callable[..., np.ndarray]:
    """What the function leaves in an output that was full of -7."""

    @functools.wraps(multiply)
    def run(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, first: int, end: int) -> np.ndarray:
        output = np.full((len(x), len(codes)), product_checks.UNTOUCHED, dtype=np.float32)
        multiply(x, codes, scales, output, first, end)
        return output

    return run


def row_by_row(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, first: int, end: int) -> np.ndarray:
    """The products by torch, in float64, of the numbers that the codes stand for."""
    numbers = torch.from_numpy(codes).double() * torch.from_numpy(scales).double().unsqueeze(-1)
    output = np.full((len(x), len(codes)), product_checks.UNTOUCHED, dtype=np.float32)
    output[:, first:end] = (torch.from_numpy(x).double() @ numbers[first:end].T).numpy()
    return output


def _of_index(error: BaseException, case: Case) -> str:
    shapes = "output is [inputs, rows], x is [inputs, width], codes is [rows, width], scales is [rows]"
    return product_checks.of_index(error, "codes", shapes)


def _wrapped(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers as int8 holds them."""
    return np.trunc(numbers).astype(np.int64).astype(np.uint8).view(np.int8).astype(np.float64)


_STEPS = "only the first code of each line is multiplied: the steps of per_line(codes) are for prefetch alone"
_IN_INT8 = "x is made int8, and products of int8 wrap around; the code is widened, np.float32(codes[row, i])"
_LOOP_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the scale is forgotten: codes count steps, and scales[row] is what a step of this row is worth",
     {"scale": lambda scales, row, first: 1.0}),
    ("the scale of the first row is taken for all; each row has its own, scales[row]",
     {"scale": lambda scales, row, first: scales[0]}),
    ("the scales are counted from first; row r's stands at r, whatever first is",
     {"scale": lambda scales, row, first: scales[row - first]}),
    ("the scale is that of another row: row r's is scales[r]",
     {"scale": lambda scales, row, first: scales[min(row + 1, len(scales) - 1)]}),
    ("the scale is that of another row: row r's is scales[r]", {"scale": lambda scales, row, first: scales[row - 1]}),
    ("divided by the scale; a code times the scale is the number",
     {"scale": lambda scales, row, first: 1 / scales[row]}),
    ("the scale is multiplied in twice", {"scale": lambda scales, row, first: scales[row] ** 2}),
    ("the scale is multiplied into the running sum at every step; once, behind the sum, is meant",
     {"compounded": True}),
    ("the codes are read as uint8: they have a sign", {"codes": lambda codes: codes.view(np.uint8)}),
    (_IN_INT8, {"times": lambda x, codes: _wrapped(_wrapped(x) * codes)}),
    ("each product is cut to int8; it is a float32", {"times": lambda x, codes: _wrapped(x * codes)}),
    ("x is cut to whole numbers; only the codes are whole", {"times": lambda x, codes: _wrapped(x) * codes}),
    ("the last number of each row is left out", {"columns": lambda width: slice(0, max(width - 1, 0))}),
    ("the first number of each row is left out", {"columns": lambda width: slice(1, width)}),
    (_STEPS, {"columns": lambda width: slice(0, width, words.LINE)}),
    ("only the last product stands there: the sum has to take in each, with +=",
     {"columns": lambda width: slice(width - 1, width)}),
    *product_checks.ROW_MISTAKES,
]  # fmt: skip


def _looped(
    scale: Callable[[np.ndarray, int, int], float] = lambda scales, row, first: scales[row],
    rows: Callable[[int, int, int], range] = lambda first, end, all_rows: range(first, end),
    codes: Callable[[np.ndarray], np.ndarray] = lambda codes: codes,
    times: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda x, codes: x * codes,
    inputs: Callable[[int], range] = range,
    input: Callable[[int], int] = lambda m: m,
    carried: str = "",
    added: bool = False,
    compounded: bool = False,
    column: Callable[[int, int], int | slice] = lambda row, first: row,
    columns: Callable[[int], slice] = lambda width: slice(width),
) -> Callable[..., np.ndarray]:
    """The loops, with mistakes switched on."""

    def run(x: np.ndarray, stored: np.ndarray, scales: np.ndarray, first: int, end: int) -> np.ndarray:
        output = np.full((len(x), len(stored)), product_checks.UNTOUCHED, dtype=np.float32)
        read, part, total = codes(stored).astype(np.float64), columns(x.shape[1]), 0.0
        for row in rows(first, end, len(stored)):
            factor = float(scale(scales.astype(np.float64), row, first))
            total = total if carried == "row" else 0.0
            for m in inputs(len(x)):
                total = total if carried else 0.0
                products = times(x[input(m), part].astype(np.float64), read[row, part])
                if compounded:
                    total = functools.reduce(lambda so_far, one: (so_far + one) * factor, products.tolist(), total)
                else:
                    total += float(products.sum())
                place = column(row, first)
                output[m, place] = total * (1 if compounded else factor) + (output[m, place] if added else 0)
        return output

    return run


# ---- where the scale is used -------------------------------------------------------------------------------------


class _Counting(np.ndarray):
    """An array that counts how often a number of it is read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


def _check_scales(multiply: Product) -> None:
    case = _random(2, 6, 16, 1, 6, seed=11)
    x, codes, scales, first, end = case.args
    counted = scales.view(_Counting)
    writing(multiply)(x, codes, counted, first, end)
    if counted.reads > 2 * len(x) * (end - first):
        raise CheckFailed(
            "the scale to be multiplied in once for each number of output: the whole row shares it",
            case=f"{case.text}: scales was read {counted.reads} times for {len(x) * (end - first)} numbers of output",
            mistake="the scale stands inside the sum: the result is right, and every code costs a product more",
        )


# ---- what is asked for ahead -------------------------------------------------------------------------------------


def prefetch_cases() -> list[Case]:
    """On what prefetches are looked at: rows that end within a line."""
    return [
        _random(1, 12, 64, 0, 12, seed=21), _random(2, 26, 200, 2, 20, seed=23), _random(3, 21, 150, 3, 21, seed=25),
    ]  # fmt: skip


def noted(multiply: Product, case: Case) -> tuple[product_checks.Notes, Case]:
    """The calls of prefetch in a run of the function, and the case as chapter 6's product would have it."""
    x, codes, scales, first, end = case.args
    unscaled = Case(case.text, x, codes, first, end)

    def with_scales(x: np.ndarray, codes: np.ndarray, output: np.ndarray, first: int, end: int) -> None:
        multiply(x, codes, scales, output, first, end)

    return product_checks.noted(with_scales, unscaled), unscaled


# ---- compiled ----------------------------------------------------------------------------------------------------


def compiled_cases() -> list[Case]:
    """What the compiled function is tried on: the shapes of the model's own products."""
    return [_random(1, 64, 576, 5, 64, seed=41), _random(5, 33, 100, 0, 17, seed=43)]
