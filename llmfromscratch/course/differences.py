"""Finds the first difference between two values and puts it into words; guesses at what may have caused it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

MISSING_RETURN = "the `return` is missing"
_FEW = 16  # values that are shown in full
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two numbers may lie apart; None: what the dtype allows (relative to the largest value of a tensor)."""

    relative: float | None = None
    absolute: float | None = None
    check_dtype: bool = True

    def without_dtype(self) -> Tolerance:
        """The same, for values of whatever dtype."""
        return dataclasses.replace(self, check_dtype=False)

    def allows(self, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """Element by element: near enough (NaN equals NaN); whole numbers and booleans must be equal. [...] -> bool."""
        if not want.is_floating_point() or not got.is_floating_point():
            return got == want
        g, w = got.double(), want.double()
        relative = _RELATIVE.get(want.dtype, 1e-5) if self.relative is None else self.relative
        finite = w[torch.isfinite(w)].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        absolute = relative * scale if self.absolute is None else self.absolute
        near = (g - w).abs() <= absolute + relative * w.abs()
        near &= torch.isfinite(w)  # any number lies within an infinite distance
        return near | (g == w) | (torch.isnan(g) & torch.isnan(w))


class NamedParts(dict):
    """Several values that a check got from the learner's object, each under the name that the learner knows it by.

    A difference is told by that name ("mask[0]: got 0, expected 1"), since the learner has returned no dict.
    """


@dataclasses.dataclass(frozen=True)
class Difference:
    """One difference: where ("" for the whole value), and what was got and expected, in words; part: of NamedParts.

    said: the whole of it in words, where "got ..., expected ..." does not read well.
    """

    where: str
    got: str
    want: str
    more: str = ""
    part: str = ""
    said: str = ""

    def text(self, what: str = "the result") -> str:
        """The difference as a sentence; WHAT names the value."""
        what = self.part or what
        place = f"{what}{self.where}: " if self.where or what != "the result" else ""
        return f"{place}{self.said or f'got {self.got}, expected {self.want}{self.more}'}"


def find(got: Any, want: Any, tolerance: Tolerance, where: str = "") -> Difference | None:
    """The first difference between two values (numbers, texts, tensors, containers, dataclasses), or None."""
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        return _find_in_fields(got, want, tolerance, where)
    wrong_type = find_type(got, type(want), where)
    if wrong_type is not None:
        return wrong_type
    if isinstance(want, torch.Tensor):
        return _find_in_tensor(got, want, tolerance, where)
    if isinstance(want, np.ndarray):
        return _find_in_array(got, want, tolerance, where)
    if isinstance(want, NamedParts):
        return _find_in_parts(got, want, tolerance)
    if isinstance(want, Mapping):
        return _find_in_mapping(got, want, tolerance, where)
    if isinstance(want, list | tuple):
        return _find_in_sequence(got, want, tolerance, where)
    if isinstance(want, float):
        same = bool(tolerance.allows(torch.tensor(got).double(), torch.tensor(want).double()))
    else:
        same = bool(got == want)
    return None if same else Difference(where, shown(got), shown(want))


def find_type(got: Any, kind: type, where: str = "") -> Difference | None:
    """A difference where GOT is not of type KIND; a bool is no int here, and a Parameter is a Tensor."""
    fits = isinstance(got, torch.Tensor) if issubclass(kind, torch.Tensor) else isinstance(got, kind)
    if fits and not (isinstance(got, bool) and kind is int):
        return None
    return Difference(where, f"{type_name(type(got))} ({shown(got)})" if got is not None else "None", type_name(kind))


def type_name(kind: type) -> str:
    """A type as the learner writes it: "torch.Tensor", "a list"."""
    if issubclass(kind, torch.Tensor):
        return "a torch.Tensor"
    if kind is type(None):
        return "None"
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{'an' if kind.__name__[0] in 'aeiou' and not module else 'a'} {module}{kind.__name__}"


def comparable(value: Any) -> bool:
    """Whether `find` compares this by value: not an object such as a module, whose equality says nothing."""
    return isinstance(value, torch.Tensor | np.ndarray | list | tuple | dict | int | float | str | bytes)


def _find_in_tensor(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, where: str) -> Difference | None:
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.shape != want.shape:
        return Difference(where, f"shape {list(got.shape)}", f"shape {list(want.shape)}")
    if tolerance.check_dtype and got.dtype != want.dtype:
        return Difference(where, f"dtype {got.dtype}", f"dtype {want.dtype}")
    wrong = ~tolerance.allows(got, want)
    if not wrong.any():
        return None
    count = f" ({int(wrong.sum())} of {wrong.numel()} values differ)" if wrong.numel() > 1 else ""
    if wrong.numel() <= _FEW:
        return Difference(where, shown(got), shown(want), count)
    place = [int(index) for index in wrong.nonzero()[0]]
    return Difference(f"{where}{place}", shown(got[tuple(place)]), shown(want[tuple(place)]), count)


def _find_in_array(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, where: str) -> Difference | None:
    if tolerance.check_dtype and got.dtype != want.dtype:
        return Difference(where, f"dtype {got.dtype}", f"dtype {want.dtype}")
    if want.dtype.kind not in "biuf" or got.dtype.kind not in "biuf":
        same = got.shape == want.shape and bool((got == want).all())
        return None if same else Difference(where, shown(got.tolist()), shown(want.tolist()))
    tensors = [torch.from_numpy(np.array(side)) for side in (got, want)]
    return _find_in_tensor(tensors[0], tensors[1], tolerance.without_dtype(), where)


def _find_in_mapping(got: Mapping, want: Mapping, tolerance: Tolerance, where: str) -> Difference | None:
    missing = [key for key in want if key not in got]
    extra = [key for key in got if key not in want]
    if missing or extra:
        parts = [f"key {shown(missing[0])} is missing"] if missing else []
        parts += [f"key {shown(extra[0])} should not be there"] if extra else []
        keys = [f"the keys {shown(list(side))}" for side in (got, want)]
        return Difference(where, keys[0], keys[1], said=", and ".join(parts))
    found = (find(got[key], value, tolerance, f"{where}[{key!r}]") for key, value in want.items())
    return next((difference for difference in found if difference is not None), None)


def _find_in_parts(got: NamedParts, want: NamedParts, tolerance: Tolerance) -> Difference | None:
    found = ((name, find(got[name], value, tolerance)) for name, value in want.items())
    return next((dataclasses.replace(difference, part=name) for name, difference in found if difference), None)


def _find_in_sequence(got: Sequence, want: Sequence, tolerance: Tolerance, where: str) -> Difference | None:
    simple = all(isinstance(item, int | float | str | bytes | None) for item in [*got, *want])
    if len(got) != len(want):
        values = (f" ({shown(got)})", f" ({shown(want)})") if simple else ("", "")
        return Difference(where, f"{_items(got)}{values[0]}", f"{_items(want)}{values[1]}")
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        difference = find(g, w, tolerance, f"{where}[{index}]")
        if difference is not None:
            return Difference(where, shown(got), shown(want)) if simple and len(want) <= _FEW else difference
    return None


def _items(sequence: Sequence) -> str:
    return f"{len(sequence)} item{'s' * (len(sequence) != 1)}"


def _find_in_fields(got: Any, want: Any, tolerance: Tolerance, where: str) -> Difference | None:
    if type(got).__name__ != type(want).__name__:
        return Difference(where, type_name(type(got)), f"a {type(want).__name__}")
    for field in dataclasses.fields(want):
        if not hasattr(got, field.name):
            return Difference(f"{where}.{field.name}", "no such attribute", shown(getattr(want, field.name)))
        difference = find(getattr(got, field.name), getattr(want, field.name), tolerance, f"{where}.{field.name}")
        if difference is not None:
            return difference
    return None


def shown(value: Any) -> str:
    """A value in a few words: small tensors in full, four significant digits, long things cut."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.numel() > _FEW:
            return f"a tensor of shape {list(value.shape)}"
        return _numbers(value.tolist())
    text = _numbers(value) if isinstance(value, float | list | tuple) else repr(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def _numbers(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if type(value) in (list, tuple):
        inner = ", ".join(_numbers(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def dtype_mistake(got: Any, want: Any, tolerance: Tolerance, arguments: Sequence[tuple[str, Any]] = ()) -> str:
    """What to say where nothing but the dtype is wrong, else ""; arguments: with their names, to tell whose it is."""
    if find(got, want, tolerance) is None or find(got, want, tolerance.without_dtype()) is not None:
        return ""
    kept = next((name for name, value in arguments if getattr(value, "dtype", None) == _dtype_of(want)), "")
    whose = f"bring the result back to the dtype of {kept}" if kept else f"the result should be {_dtype_of(want)}"
    return f"the values are right, the dtype is not{f': {whose}' if _dtype_of(want) else ''}"


def _dtype_of(value: Any) -> Any:
    return getattr(value, "dtype", None)


def general_mistake(got: Any, want: Any, args: Sequence[Any] = ()) -> str:
    """A guess that needs no knowledge of the exercise: missing return, zeros, a transpose, ...; "" where none fits."""
    if got is None and want is not None:
        return MISSING_RETURN
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return _right_until(got, want)
    loose = Tolerance(check_dtype=False)
    if want.dim() == 2 and got.shape == want.T.shape and find(got, want.T, loose) is None:
        return "the result is transposed"
    if got.shape != want.shape and got.numel() == want.numel():
        same = find(got.reshape(-1), want.reshape(-1), loose) is None
        return "the values are right, in another shape" if same else ""
    if got.shape != want.shape or find(got, want, loose) is None:
        return ""
    if bool(torch.isnan(got).any()) and not bool(torch.isnan(want).any()):
        return "the result has NaN in it (0 / 0, or infinity minus infinity)"
    if not bool(got.any()):
        return "the result is all zeros"
    if any(isinstance(arg, torch.Tensor) and find(got, arg, loose) is None for arg in args):
        return "the argument comes back unchanged"
    return _constant_factor(got, want) or _right_until(got, want)


def _constant_factor(got: torch.Tensor, want: torch.Tensor) -> str:
    if want.numel() < 2 or not bool(want.any()):
        return ""
    g, w = got.double().flatten(), want.double().flatten()
    top = int(w.abs().argmax())
    factor = float(g[top] / w[top])
    if math.isfinite(factor) and bool(torch.allclose(g, w * factor, rtol=1e-4, atol=1e-6 * float(g.abs().max()))):
        return (
            "every sign is wrong" if math.isclose(factor, -1.0) else f"every value is {factor:.4g} times the right one"
        )
    return ""


def _right_until(got: Any, want: Any) -> str:
    """ "right until item 3, then wrong", for tensors and lists of one length."""
    if isinstance(want, str) or not isinstance(got, type(want)) or not hasattr(want, "__len__"):
        return ""
    if isinstance(want, Mapping) or (isinstance(want, torch.Tensor) and want.dim() == 0) or len(got) != len(want):
        return ""
    loose = Tolerance(check_dtype=False)
    right = [find(g, w, loose) is None for g, w in zip(got, want, strict=True)]
    first = right.index(False) if False in right else 0
    if first == 0 or any(right[first:]):
        return ""
    return f"right until index {first - 1}, then wrong from index {first} on"
