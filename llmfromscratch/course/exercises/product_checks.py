"""The check of chapter 6's product for few rows: as plain Python first, then its prefetches, then compiled by Numba.

First as plain Python, where an index beyond a weight is an error and not somebody else's memory; what passes there is
compiled as the engine compiles it.
"""

from __future__ import annotations

import dis
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.kernels import words

UNTOUCHED = np.float32(-7)  # stands in the output before the call
_AHEAD = 4
_EXPECTED = "output[m, row] to be x[m] · weight[row] for every row from first to before end, and no other row touched"
Product = Callable[[np.ndarray, np.ndarray, np.ndarray, int, int], None]


def check_multiply_rows(multiply_rows: Product) -> None:
    """Against products in float64; the lines that are asked for, by address; then all again as compiled code."""
    if hasattr(multiply_rows, "py_func"):
        raise CheckFailed("a plain function", mistake="it is compiled already: the engine does that, so leave njit out")
    refuse_products_of_arrays(multiply_rows)
    compare(
        writing(multiply_rows),
        row_by_row,
        plain_cases(),
        expected=_EXPECTED,
        mistakes=combined(_looped, _LOOP_MISTAKES, at_once=2),
        diagnose=of_output,
        explain=_of_index,
        what="output",
    )
    check_prefetches(multiply_rows, lambda multiply, case: (noted(multiply, case), case), prefetch_cases(), "weight")
    check_compiled(multiply_rows, writing, row_by_row, compiled_cases(), _EXPECTED)


# ---- the numbers -------------------------------------------------------------------------------------------------


def as_bits(weight: torch.Tensor) -> np.ndarray:
    """bfloat16 as numpy can hold it: its bits in uint16."""
    return weight.bfloat16().view(torch.uint16).numpy()


def _case(text: str, x: Any, weight: Any, first: int, end: int, bits: bool = False) -> Case:
    tensor = torch.as_tensor(weight, dtype=torch.float32)
    stored = as_bits(tensor) if bits else tensor.numpy()
    return Case(f"{text}, first {first}, end {end}", np.asarray(x, dtype=np.float32), stored, first, end)


def _random(inputs: int, rows: int, width: int, first: int, end: int, seed: int, bits: bool = False) -> Case:
    kind = "bfloat16" if bits else "float32"
    text = f"{inputs} input{'s' * (inputs > 1)} of width {width}, {rows} rows in {kind}"
    x, weight = random_numbers(inputs, width, seed=seed), random_numbers(rows, width, seed=seed + 1)
    return _case(text, x.numpy(), weight, first, end, bits)


def plain_cases() -> list[Case]:
    """What `multiply_rows` is tried on as plain Python: small, with every index that may go wrong."""
    three = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    return [
        _case("x [[2]], weight [[3]]", [[2.0]], [[3.0]], 0, 1),
        _case("x [[1, 10]], weight [[1, 2]]", [[1.0, 10.0]], three[:1], 0, 1),
        _case("x [[1, 10]], weight [[1, 2], [3, 4]]", [[1.0, 10.0]], three[:2], 0, 2),
        _case("x [[1, 10]], weight [[1, 2], [3, 4], [5, 6]]", [[1.0, 10.0]], three, 1, 2),
        _case("x [[1, 10]], weight [[1, 2], [3, 4], [5, 6]]", [[1.0, 10.0]], three, 0, 0),
        _case("x [[1, 10], [0, 1]], weight [[1, 2], [3, 4], [5, 6]]", [[1.0, 10.0], [0.0, 1.0]], three, 0, 3),
        _case("x [[1, 1]], weight [[1.5, -0.25]] in bfloat16", [[1.0, 1.0]], [[1.5, -0.25]], 0, 1, bits=True),
        _random(2, 9, 5, 2, 7, seed=1),
        _random(3, 7, 40, 0, 7, seed=3),
        _random(1, 11, 35, 3, 11, seed=5, bits=True),
        _random(4, 6, 80, 1, 6, seed=7, bits=True),
    ]


def writing(multiply: Product) -> Callable[..., np.ndarray]:
    """What the function leaves in an output that was full of -7."""

    @functools.wraps(multiply)
    def run(x: np.ndarray, weight: np.ndarray, first: int, end: int) -> np.ndarray:
        output = np.full((len(x), len(weight)), UNTOUCHED, dtype=np.float32)
        multiply(x, weight, output, first, end)
        return output

    return run


def row_by_row(x: np.ndarray, weight: np.ndarray, first: int, end: int) -> np.ndarray:
    """The products by torch, in float64."""
    numbers = torch.from_numpy(weight)
    wide = (numbers.view(torch.bfloat16) if numbers.dtype == torch.uint16 else numbers).double()
    output = np.full((len(x), len(weight)), UNTOUCHED, dtype=np.float32)
    output[:, first:end] = (torch.from_numpy(x).double() @ wide[first:end].T).numpy()
    return output


def of_output(got: Any, want: Any) -> str:
    """What is told of an output that was not written, or not with numbers."""
    if isinstance(got, np.ndarray) and (got == UNTOUCHED).all():
        return "nothing was written into output: output[m, row] = ... puts a number there; nothing has to be returned"
    if isinstance(got, np.ndarray) and np.isnan(got).any():
        return "NaN: a name that holds no number is put there; prefetch gives nothing back"
    return ""


def _of_index(error: BaseException, case: Case) -> str:
    return of_index(error, "weight", "output is [inputs, rows], x is [inputs, width], weight is [rows, width]")


def of_index(error: BaseException, name: str, shapes: str) -> str:
    """What is told of an exception. name: of the matrix; shapes: what the arrays are."""
    text = str(error)
    if isinstance(error, IndexError):
        return (
            f"an index beyond an array. {shapes}; the last row to be written is end - 1, and row + AHEAD may lie "
            "behind the last one"
        )
    if isinstance(error, TypeError) and "NoneType" in text:
        return "prefetch gives nothing back: it only asks memory to send something"
    if "numpy.ndarray" in text or "'int' object is not callable" in text:
        return f"these are numpy's arrays, not tensors: x.shape, {name}.itemsize, {name}[row, i]"
    return ""


_TOO_MANY_ROWS = "rows outside of first to end - 1 are written: they are another thread's"
# Of every product of rows by loops; other mistakes depend on what is read.
ROW_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the rows begin at 0 in place of first: those before it are another thread's",
     {"rows": lambda first, end, all_rows: range(end)}),
    (f"{_TOO_MANY_ROWS}. The loop goes on to the last row",
     {"rows": lambda first, end, all_rows: range(first, all_rows)}),
    (f"{_TOO_MANY_ROWS}. The loop goes through all rows", {"rows": lambda first, end, all_rows: range(all_rows)}),
    ("one row too many is written: end itself is the next thread's",
     {"rows": lambda first, end, all_rows: range(first, min(end + 1, all_rows))}),
    ("one row too few is written: the last is end - 1", {"rows": lambda first, end, all_rows: range(first, end - 1)}),
    ("the first row is left out", {"rows": lambda first, end, all_rows: range(first + 1, end)}),
    ("as many rows as there should be, but counted from 0", {"rows": lambda first, end, all_rows: range(end - first)}),
    ("only the first input is multiplied; x has several rows", {"inputs": lambda inputs: range(1)}),
    ("every input gets the product of the first", {"input": lambda m: 0}),
    ("the sum goes on from row to row: it begins at 0 for each", {"carried": "row"}),
    ("the sum goes on from input to input: it begins at 0 for each", {"carried": "input"}),
    ("the sum is added to what stands in output; it takes its place", {"added": True}),
    ("output's columns are counted from first; row r stands in column r, whatever first is",
     {"column": lambda row, first: row - first}),
    ("the product goes into all columns of output; row r's into column r alone",
     {"column": lambda row, first: slice(None)}),
]  # fmt: skip
_LOOP_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    *ROW_MISTAKES,
    ("the bits of bfloat16 are taken for a number: widen(weight[row, i]) is the number that they mean",
     {"number": lambda weight: weight.astype(np.float32)}),
    ("the bits of bfloat16 are read as float16: widen(weight[row, i]) is the number that they mean",
     {"number": lambda weight: weight.view(np.float16).astype(np.float32) if weight.dtype == np.uint16 else weight}),
    ("the last number of each row is left out", {"columns": lambda width, size: slice(0, max(width - 1, 0))}),
    ("the first number of each row is left out", {"columns": lambda width, size: slice(1, width)}),
    ("only the first number of each line is multiplied: the steps of per_line(weight) are for prefetch alone",
     {"columns": lambda width, size: slice(0, width, words.LINE // size)}),
    ("only the first number of each line is multiplied: the steps of per_line(weight) are for prefetch alone",
     {"columns": lambda width, size: slice(0, width, words.LINE)}),
    ("only the last product stands there: the sum has to take in each, with +=",
     {"columns": lambda width, size: slice(width - 1, width)}),
]  # fmt: skip


def _looped(
    rows: Callable[[int, int, int], range] = lambda first, end, all_rows: range(first, end),
    number: Callable[[np.ndarray], np.ndarray] | None = None,
    inputs: Callable[[int], range] = range,
    input: Callable[[int], int] = lambda m: m,
    carried: str = "",
    added: bool = False,
    column: Callable[[int, int], int | slice] = lambda row, first: row,
    columns: Callable[[int, int], slice] = lambda width, size: slice(width),
) -> Callable[..., np.ndarray]:
    """The loops, with mistakes switched on."""

    def run(x: np.ndarray, weight: np.ndarray, first: int, end: int) -> np.ndarray:
        output = np.full((len(x), len(weight)), UNTOUCHED, dtype=np.float32)
        read, part, total = (number or _numbers)(weight), columns(x.shape[1], weight.itemsize), 0.0
        for row in rows(first, end, len(weight)):
            total = total if carried == "row" else 0.0
            for m in inputs(len(x)):
                total = total if carried else 0.0
                total += float(((x[input(m), part] * read[row, part]).astype(np.float64)).sum())
                output[m, column(row, first)] = total + (output[m, column(row, first)] if added else 0)
        return output

    return run


def _numbers(weight: np.ndarray) -> np.ndarray:
    return (weight.astype(np.uint32) << 16).view(np.float32) if weight.dtype == np.uint16 else weight


# ---- what is asked for ahead -------------------------------------------------------------------------------------


class _Watched(np.ndarray):
    """A weight that notes which of its rows were read."""

    def __getitem__(self, key: Any) -> Any:
        row = key[0] if isinstance(key, tuple) and key else key
        if self.ndim == 2 and isinstance(row, int | np.integer) and _notes is not None:
            _notes.read(self, int(row))
        return super().__getitem__(key)


@dataclass
class Call:
    """A call of prefetch: with what, and the last row that had been read by then."""

    rows: Any
    row: int
    column: int
    read: int


@dataclass
class Notes:
    """What was asked for of a weight and read of it, in order."""

    weight: np.ndarray
    calls: list[Call] = field(default_factory=list)
    furthest: int = -1

    def read(self, rows: np.ndarray, row: int) -> None:
        """Notes that a row was read."""
        self.furthest = max(self.furthest, self.line(rows, row, 0)[0])

    def line(self, rows: np.ndarray, row: int, column: int) -> tuple[int, int]:
        """Row and line of the weight, told by the address: a part of the weight is as good as the whole."""
        start = rows.__array_interface__["data"][0] - self.weight.__array_interface__["data"][0]
        place = start + row * rows.strides[0] + column * rows.strides[1]
        return place // self.weight.strides[0], place % self.weight.strides[0] // words.LINE


_notes: Notes | None = None


def note(rows: Any, row: Any, column: Any) -> None:
    """Called from the swapped code of `words.prefetch`."""
    if _notes is not None:
        _notes.calls.append(Call(rows, int(row), int(column), _notes.furthest))


def _noting(rows: Any, row: Any, column: Any) -> None:
    # this code runs with the globals of another module, hence the import
    from llmfromscratch.course.exercises.product_checks import note

    note(rows, row, column)


def noted(multiply_rows: Product, case: Case) -> Notes:
    """Runs the function; notes every call of `words.prefetch`, by whatever name it is called, and every read."""
    global _notes
    x, weight, first, end = case.args
    own = words.prefetch.__code__
    words.prefetch.__code__ = _noting.__code__
    _notes = made = Notes(weight)
    try:
        writing(multiply_rows)(x, weight.view(_Watched), first, end)
    finally:
        words.prefetch.__code__, _notes = own, None
    return made


def prefetch_cases() -> list[Case]:
    """On what prefetches are looked at: rows that end within a line, in either kind of number."""
    return [
        _random(1, 12, 16, 0, 12, seed=21), _random(2, 13, 80, 2, 9, seed=23), _random(3, 21, 90, 3, 21, seed=25),
        _random(1, 14, 80, 0, 14, seed=27, bits=True), _random(2, 19, 100, 4, 19, seed=29, bits=True),
    ]  # fmt: skip


def check_prefetches(
    multiply: Any, noted: Callable[[Any, Case], tuple[Notes, Case]], cases: Iterable[Case], name: str
) -> None:
    """What a product asks for ahead, case by case. noted: see `noted`; name: of the matrix, in what is told."""
    ahead = getattr(multiply, "__globals__", {}).get("AHEAD", _AHEAD)
    ahead = ahead if type(ahead) is int and ahead > 0 else _AHEAD
    for case in cases:
        found = complaint(*noted(multiply, case), ahead)
        if found:
            raise CheckFailed(
                f"before a row is read, every line of the row {ahead} further on to be asked for, once",
                case=f"{case.text}: {found[0]}",
                mistake=found[1].replace("per_line(weight)", f"per_line({name})"),
            )


def complaint(notes: Notes, case: Case, ahead: int) -> tuple[str, str] | None:
    """What is wrong with the calls of prefetch, and the mistake behind it; None where nothing is.

    Which lines a thread asks for behind its own last row is left to it, as long as they are the weight's; so is
    whether it asks for the first rows too, and for a row earlier than it must.
    """
    x, _, first, end = case.args
    per_line = words.LINE // notes.weight.itemsize
    lines = -(-notes.weight.shape[1] // per_line)
    if not notes.calls:
        return "prefetch was never called", "no row is fetched ahead: the product is right, and waits for memory"
    for call in notes.calls:
        outside = _outside(call, notes.weight)
        if outside:
            return f"prefetch was called for row {call.row}, column {call.column}", outside
    asked: dict[tuple[int, int], int] = {}
    for call in notes.calls:
        asked.setdefault(notes.line(call.rows, call.row, call.column), call.read)
    for row in range(first + ahead, end):
        for line in range(lines):
            columns = f"{line * per_line} to {min((line + 1) * per_line, notes.weight.shape[1]) - 1}"
            if (row, line) not in asked:
                return f"nobody asked for row {row}, columns {columns}", _why_missing(notes, ahead)
            if asked[row, line] > row - ahead:
                return f"row {row} was asked for when row {asked[row, line]} had been read", _LATE.format(ahead)
    if len(notes.calls) > (end - first + ahead) * lines:
        return f"{len(notes.calls)} calls for {(end - first) * lines} lines", _why_many(notes, len(x))
    return None


_LATE = "a row has to be asked for {} rows before it is read (row + AHEAD), so that it has time to come"


def _outside(call: Call, weight: np.ndarray) -> str:
    """What to say of a call that asks for something else than a number of the weight, else ""."""
    if not isinstance(call.rows, np.ndarray) or call.rows.ndim != 2:
        return "prefetch takes the whole weight first, then a row and a column of it"
    if not np.shares_memory(call.rows, weight):
        return "the weight is what comes from far away; x and output are small and near"
    if not 0 <= call.row < len(call.rows):
        return "there is no row behind the last: ask for the last one then"
    if not 0 <= call.column < call.rows.shape[1]:
        return "columns count numbers, not bytes, and end with the row: a line holds per_line(weight) of them"
    return ""


def _why_missing(notes: Notes, ahead: int) -> str:
    columns = sorted({call.column for call in notes.calls})
    if columns == [0] and notes.weight.shape[1] * notes.weight.itemsize > words.LINE:
        return "only the first line of a row is asked for: a call for each line, of per_line(weight) columns"
    if len(columns) > 1 and columns[1] - columns[0] == words.LINE:
        return "64 is the bytes of a line: in columns it is per_line(weight)"
    if len(columns) > 1 and columns[1] - columns[0] > words.LINE // notes.weight.itemsize:
        return "some lines of a row are never asked for: a call for every per_line(weight) columns"
    return f"every row but the first {ahead} is asked for by the one {ahead} before it, to the end of the row"


def _why_many(notes: Notes, inputs: int) -> str:
    per_line = words.LINE // notes.weight.itemsize
    columns = sorted({call.column for call in notes.calls})
    if len(columns) > 1 and columns[1] - columns[0] == 1:
        return "one call for every number; a call brings a whole line, per_line(weight) numbers"
    if len(columns) > 1 and columns[1] - columns[0] < per_line:
        return "several calls for one line: it holds per_line(weight) numbers, whose size is not always the same"
    if inputs > 1 and min(Counter((call.row, call.column) for call in notes.calls).values()) >= inputs:
        return "the same lines are asked for again for every input; once for each row is enough"
    return "lines are asked for several times; a call brings the whole line, and it stays"


# ---- compiled ----------------------------------------------------------------------------------------------------


def compiled_cases() -> list[Case]:
    """What the compiled function is tried on: the shapes of the model's own products."""
    return [
        _random(1, 64, 576, 5, 64, seed=41), _random(5, 33, 100, 0, 17, seed=43),
        _random(1, 64, 576, 0, 64, seed=45, bits=True), _random(4, 33, 100, 9, 33, seed=47, bits=True),
    ]  # fmt: skip


def check_compiled(
    multiply: Any, writing: Callable[..., Any], right: Callable[..., Any], cases: Sequence[Case], expected: str
) -> None:
    """A product compiled by Numba. writing: makes of it what gives its output, as `right` does; expected: in words."""
    import numba

    from llmfromscratch.kernels import numba_words

    function = numba_words.compiled(keep=False)(multiply)
    try:
        compare(
            writing(function),
            right,
            cases,
            expected=f"compiled by Numba, {expected}",
            diagnose=lambda got, want: "as plain Python it is right: does a name mean something else to Numba?",
            tolerance=Tolerance(relative=2e-5),
            what="output",
        )
    except (numba.core.errors.NumbaError, ImportError) as error:
        raise refusal_of(error) from None
    wide = wide_names(function)
    if wide:
        raise CheckFailed(
            "the sum in float32: of these numbers a processor adds twice as many at a time",
            case=f"compiled, `{wide[0]}` is a float64",
            mistake="0 and 0.0 make it a float64 for Numba, though plain Python goes on in float32: np.float32(0)",
        )


_NO_ARRAYS = "compiled code has no @ here, nor any other product of arrays"
_LOOP_ONLY = "the sum of a row is a loop, number by number: no @, np.dot or the like on arrays"
_COMPILES = "a function that Numba can compile: loops over numbers, no tensors, no lists"
_PRODUCTS = {"dot", "matmul", "inner", "vdot", "einsum", "tensordot"}


def refuse_products_of_arrays(multiply: Any) -> None:
    """Raises CheckFailed where the function multiplies arrays: its sums have to be written anew, so it comes first."""
    code = getattr(multiply, "__code__", None)
    for step in dis.get_instructions(code) if code else ():
        called = step.argval in _PRODUCTS and step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if called or "MATRIX_MULTIPLY" in step.opname or (step.opname == "BINARY_OP" and step.argrepr in ("@", "@=")):
            raise CheckFailed(_COMPILES, case=_NO_ARRAYS, mistake=_LOOP_ONLY)


def refusal_of(error: Exception) -> CheckFailed:
    """What is said where Numba does not compile a function that is right as plain Python.

    For products of arrays Numba asks for scipy, which is an ImportError where it is missing.
    """
    if isinstance(error, ImportError):
        if "scipy" not in str(error):
            raise error
        return CheckFailed(_COMPILES, case=_NO_ARRAYS, mistake=_LOOP_ONLY)
    return CheckFailed(
        _COMPILES,
        case=f"as plain Python it is right, but Numba says: {_told(error)}",
        mistake=_of_numba(str(error)),
    )


def wide_names(function: Any) -> list[str]:
    """The learner's names that Numba keeps in float64."""
    kinds = [made.type_annotation.typemap for made in function.overloads.values()]
    found = (name for typemap in kinds for name, kind in typemap.items() if "float64" in str(kind))
    return sorted({name.partition(".")[0] for name in found if re.match(r"[A-Za-z_]\w*(\.\d+)?$", name)})


def _told(error: Exception) -> str:
    """The line that says what is wrong, and the learner's line."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()]
    said = next(
        (line for line in lines if line and not line.startswith(("Failed in nopython", "No implementation"))), ""
    )
    code = next((lines[place - 1] for place, line in enumerate(lines) if line and set(line) == {"^"}), "")
    return f"{said[:200]}" + (f" (`{code}`)" if code else "")


def _of_numba(text: str) -> str:
    if "Untyped global name" in text:
        return "a function of your own is called, which stays plain Python: write it out here"
    if any(word in text for word in ("@", "matmul", "np.dot", "np_dot", "scipy", "unsupported NumPy function")):
        return _LOOP_ONLY
    if "Cannot unify" in text:
        return "a name is of one type at first and of another later: Numba needs one, such as np.float32"
    return ""
