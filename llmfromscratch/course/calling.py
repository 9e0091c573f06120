"""Calls of a learner's code within a check: a case, copies of its arguments, and whether the call changed them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmfromscratch.course import differences
from llmfromscratch.course.differences import NamedParts, Tolerance
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.occasions import Occasion, joined, keep_occasion

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Case:
    """Arguments for one call, and the words that name them to the learner."""

    def __init__(self, text: str, *args: Any, **kwargs: Any):
        self.text, self.args, self.kwargs = text, args, kwargs

    def call(self, function: Callable[..., Any]) -> Any:
        """The function's result on copies of the arguments; tensors in it carry no gradient."""
        args, kwargs = _copied((self.args, self.kwargs))
        return detached(function(*args, **kwargs))

    def names(self, function: Callable[..., Any]) -> list[tuple[str, Any]]:
        """The arguments by the names that the function has for them, "argument 2" where it tells none."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        known = [parameter.name for parameter in parameters if parameter.kind in _BY_PLACE]
        numbered = [f"argument {number}" for number in range(1, len(self.args) + 1)]
        names = [f"`{name}`" for name in known[: len(self.args)]] + numbered[len(known) :]
        return [*zip(names, self.args, strict=True), *((f"`{key}`", value) for key, value in self.kwargs.items())]

    def shapes(self, function: Callable[..., Any]) -> str:
        """The shapes of the tensors among the arguments: "`x` is [5, 3, 8], `cos` is [5, 4]"; "" without tensors."""
        return ", ".join(
            f"{name} is {list(value.shape)}"
            for name, value in self.names(function)
            if isinstance(value, torch.Tensor | np.ndarray)
        )


def call_watched(
    function: Callable[..., Any],
    case: Case,
    expected: str,
    explain: Callable[[BaseException, Case], str] = lambda error, case: "",
) -> Any:
    """The learner's result on copies of the arguments; raises CheckFailed where the call changed them.

    explain: what an error of the learner's code means in this exercise, "" where that is not known.
    """
    args, kwargs = _copied((case.args, case.kwargs))
    try:
        got = function(*args, **kwargs)
    except BaseException as error:
        occasion = Occasion(case.text, expected, shapes=case.shapes(function), meaning=explain(error, case))
        keep_occasion(error, occasion)
        raise
    _refuse_changes(function, case, [*args, *kwargs.values()])
    return detached(got)


def result_of(function: Callable[..., Any], case: Case) -> Any:
    """What a call gives; an exception counts as a result of its own, since only one case needs to be shown."""
    try:
        return case.call(function)
    except Exception as error:  # noqa: BLE001 - the learner's code may fail on a later case in any way
        return type(error).__name__


def _refuse_changes(function: Callable[..., Any], case: Case, now: Sequence[Any]) -> None:
    for (name, original), mine in zip(case.names(function), now, strict=True):
        difference = differences.find(mine, original, Tolerance(0.0, 0.0)) if differences.comparable(original) else None
        if difference is not None:
            place = f"its value at {difference.where}" if difference.where else "it"
            raise CheckFailed(
                "the arguments to be left as they were: someone else may still need them",
                case=joined(
                    case.text,
                    f"the call changed {name}: {place} was {difference.want}, then {difference.got}{difference.more}",
                ),
                mistake="an operation in place (a name ending in _ such as mul_, +=, or an assignment to a slice)",
            )


def detached(value: Any) -> Any:
    """The value, with tensors that ask for a gradient (in lists, tuples and dicts too) cut off from it."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (list, tuple):
        return type(value)(detached(item) for item in value)
    if type(value) in (dict, NamedParts):
        return type(value)({key: detached(item) for key, item in value.items()})
    return value


def _copied(value: Any) -> Any:
    """A copy of tensors, arrays and containers of them; anything else (a module, a function) is passed as it is."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value
