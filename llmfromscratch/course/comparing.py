"""Comparing a learner's result with an oracle's, so that a failure says where, by how much, and what the mistake is.

    compare(unpermute, oracle, [Case("heads=2, head_dim=4", weight, 2), ...],
            expected="row 1 of the result is row 2 of head 0 in the file",
            mistakes=[("the halves are not swapped", wrong_order)])

Cases stand smallest first: the first that fails is the one that is shown. A mistake is a sentence and a function that
makes it; where its results are the learner's on every case, its sentence is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from llmfromscratch.course import differences
from llmfromscratch.course.calling import Case as Case
from llmfromscratch.course.calling import call_watched, detached, result_of
from llmfromscratch.course.differences import NamedParts as NamedParts
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.occasions import Occasion, joined, keep_occasion

# a sentence, or what gives it for the case that is shown ("" if it has none), and a function that makes the mistake
Mistake = tuple[str | Callable[[Case], str], Callable[..., Any]]
Outcome = tuple[Case, Any, Any]  # a case, what the learner's function gives on it, and what the oracle gives


def compare(
    function: Callable[..., Any],
    oracle: Callable[..., Any],
    cases: Sequence[Case],
    *,
    expected: str,
    mistakes: Iterable[Mistake] = (),
    diagnose: Callable[[Any, Any], str] | None = None,
    explain: Callable[[BaseException, Case], str] = lambda error, case: "",
    tolerance: Tolerance | None = None,
    check_dtype: bool = True,
    what: str = "the result",
) -> None:
    """Calls the learner's FUNCTION on every case and raises CheckFailed at the first result that is not the oracle's.

    Type, shape, dtype and values count, and so does leaving the arguments as they were. Tensors that ask for a
    gradient are compared without it, so a check hands on what a module gives, None included, as it is. What the
    learner's code raises goes through, with the case attached.
    expected: what holds, in words that do not give the code away. diagnose: (got, want) -> a sentence, or "" where it
    knows nothing; asked where no named mistake fits. explain: what an error of the learner's code means in this
    exercise, "" where that is not known. tolerance: by default what the dtype allows.
    """
    tolerance = tolerance or Tolerance(check_dtype=check_dtype)
    right: list[Outcome] = []
    for number, case in enumerate(cases):
        want = case.call(oracle)
        got = call_watched(function, case, expected, explain)
        difference = differences.find(got, want, tolerance)
        if difference is None:
            right.append((case, got, want))
            continue
        outcomes = [(later, result_of(function, later), later.call(oracle)) for later in cases[number:]]
        raise CheckFailed(
            expected,
            case=joined(case.text, difference.text(what)),
            mistake=_dtype_mistake(function, outcomes, tolerance)
            or _named_mistake([*outcomes, *right], mistakes, tolerance)
            or (diagnose(got, want) if diagnose else "")
            or _general_mistake(outcomes, tolerance),
        )


def expect_equal(
    got: Any,
    want: Any,
    *,
    expected: str,
    case: str = "",
    mistakes: Sequence[tuple[str, Any]] = (),
    diagnose: Callable[[Any, Any], str] | None = None,
    tolerance: Tolerance | None = None,
    check_dtype: bool = True,
    what: str = "the result",
) -> None:
    """Raises CheckFailed where a value that the check computed with the learner's object is not WANT.

    mistakes: sentences with the value that the mistake gives, or a function without arguments that computes it.
    """
    tolerance = tolerance or Tolerance(check_dtype=check_dtype)
    got, want = detached(got), detached(want)
    difference = differences.find(got, want, tolerance)
    if difference is None:
        return
    raise CheckFailed(
        expected,
        case=joined(case, difference.text(what)),
        mistake=differences.dtype_mistake(got, want, tolerance)
        or _named_value(got, mistakes, tolerance)
        or (diagnose(got, want) if diagnose else "")
        or differences.general_mistake(got, want),
    )


def expect_raises(action: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...], *, case: str) -> str:
    """Returns the message of what ACTION raises, where it is one of KINDS; raises CheckFailed where it raises nothing.

    Any other exception goes through, with the case attached.
    """
    names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        got = action()
    except BaseException as error:
        if isinstance(error, kinds) and not isinstance(error, NotImplementedError):  # that is a blank
            return str(error)
        keep_occasion(error, Occasion(case, f"{names} to be raised", refusal=True))
        raise
    raise CheckFailed(
        f"{names} to be raised", case=joined(case, f"got {differences.shown(got)}, and nothing was raised")
    )


def expect_type(got: Any, kind: type, what: str = "the result") -> None:
    """Raises CheckFailed where GOT is not of the type that was asked for."""
    difference = differences.find_type(got, kind)
    if difference is not None:
        raise CheckFailed(
            f"{what} as {differences.type_name(kind)}",
            case=difference.text(what),
            mistake=differences.MISSING_RETURN if got is None else "",
        )


def _dtype_mistake(function: Callable[..., Any], outcomes: Sequence[Outcome], tolerance: Tolerance) -> str:
    """What to say where nothing but the dtype is wrong, in every case that fails; else ""."""
    failing = [outcome for outcome in outcomes if differences.find(outcome[1], outcome[2], tolerance) is not None]
    said = [differences.dtype_mistake(got, want, tolerance, case.names(function)) for case, got, want in failing]
    return said[0] if said and all(said) else ""


def _named_mistake(outcomes: Sequence[Outcome], mistakes: Iterable[Mistake], tolerance: Tolerance) -> str:
    """The sentence of the first mistake that gives the learner's result on every one of the cases, else "".

    outcomes: the case that is shown first. A mistake that gives the dtype as well goes before those that give the
    values alone.
    """
    by_value = ""
    for sentence, wrong in mistakes:
        exact = by_value_too = True
        for case, got, _ in outcomes:
            result = result_of(wrong, case)
            exact = exact and differences.find(got, result, tolerance) is None
            by_value_too = exact or differences.find(got, result, tolerance.without_dtype()) is None
            if not by_value_too:
                break
        if not by_value_too or (by_value and not exact):
            continue
        said = sentence if isinstance(sentence, str) else sentence(outcomes[0][0])
        if exact and said:
            return said
        by_value = by_value or said
    return by_value


def _named_value(got: Any, mistakes: Sequence[tuple[str, Any]], tolerance: Tolerance) -> str:
    """The sentence of the first mistake that gives this value, else ""; values may be functions that compute them."""
    for sentence, wrong in mistakes:
        value = wrong() if callable(wrong) and not isinstance(wrong, torch.nn.Module) else wrong
        if differences.find(got, detached(value), tolerance.without_dtype()) is None:
            return sentence
    return ""


def _general_mistake(outcomes: Sequence[Outcome], tolerance: Tolerance) -> str:
    """A guess from the largest case that fails: a small one may look like anything."""
    for case, got, want in reversed(outcomes):
        if differences.find(got, want, tolerance) is not None:
            return differences.general_mistake(got, want, case.args)
    return ""
