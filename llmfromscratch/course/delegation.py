"""Keeps a check honest: the engine's own object may not do the learner's work.

While a check runs, the code inside the engine's object is swapped for one that trips, so that every name the learner
may have for it is caught, an alias in another cell too. Oracles come from `learner_engine.reference` and are private
copies, which this does not touch.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import CheckFailed

_trips: list[str] = []


class Tripped(BaseException):
    """Raised where the learner's code calls the engine's own object; no Exception, so that it gets through."""


def trip() -> None:
    """Called from the swapped code of the engine's object."""
    _trips.append("tripped")
    raise Tripped


def _tripwire(*args: Any, **kwargs: Any) -> Any:
    # this code runs with the globals of the engine's module, hence the import
    from llmfromscratch.course.delegation import trip

    trip()


def refuse_engines_own(exercise: Exercise, obj: Any) -> None:
    """Raises CheckFailed where OBJ is not the learner's: an object of the package, or a class that inherits from it."""
    bases = [base for base in getattr(obj, "__mro__", ())[1:] if base.__name__ == exercise.name and _is_packages(base)]
    if _is_packages(obj):
        raise CheckFailed(
            f"the {exercise.name} that you wrote in the notebook, not one that comes from the package",
            next_step=f'write it in the exercise\'s cell, run that cell, then check("{exercise.id}", {exercise.name})',
            verdict=f"this is the engine's own {exercise.name}",
        )
    if bases:
        raise CheckFailed(
            "a class that does the work itself",
            next_step="inherit from what the exercise's cell names",
            verdict=f"this inherits from the engine's own {exercise.name}",
        )


def _is_packages(obj: Any) -> bool:
    module = getattr(obj, "__module__", None) or ""
    return module == learner_engine.PACKAGE or module.startswith(f"{learner_engine.PACKAGE}.")


@contextlib.contextmanager
def guarded(exercise: Exercise, obj: Any) -> Iterator[Callable[[], bool]]:
    """Trips calls of the engine's own object within the block; yields a function that tells whether one happened."""
    _trips.clear()
    theirs = _engines_object(exercise)
    with contextlib.ExitStack() as swaps:
        if theirs is not None and theirs is not obj:
            for swap in _swaps(theirs):
                swaps.enter_context(swap)
        yield lambda: bool(_trips)


def _engines_object(exercise: Exercise) -> Any:
    try:
        return getattr(importlib.import_module(exercise.module), exercise.name)
    except learner_engine.LearnerEngineError:
        return None  # a built file that is broken can do nobody's work


def _swaps(theirs: Any) -> Iterator[contextlib.AbstractContextManager[None]]:
    if inspect.isclass(theirs):
        methods = [name for name, value in vars(theirs).items() if isinstance(value, FunctionType)]
        # a class without an __init__ of its own gets one for the time of the check
        return (_attribute(theirs, name) for name in {*methods, "__init__"})
    return (_code(function) for function in [inspect.unwrap(theirs)] if isinstance(function, FunctionType))


@contextlib.contextmanager
def _code(function: FunctionType) -> Iterator[None]:
    own = function.__code__
    function.__code__ = _tripwire.__code__
    try:
        yield
    finally:
        function.__code__ = own


@contextlib.contextmanager
def _attribute(cls: type, name: str) -> Iterator[None]:
    missing = object()
    own = vars(cls).get(name, missing)
    setattr(cls, name, _tripwire)
    try:
        yield
    finally:
        if own is missing:
            delattr(cls, name)
        else:
            setattr(cls, name, own)


def delegated(exercise: Exercise) -> CheckFailed:
    """What to say when the wire was tripped."""
    return CheckFailed(
        f"{exercise.name} to do the work itself",
        next_step="write the steps out; the worked example above the cell goes through them",
        verdict=f"this calls the engine's own {exercise.name}",
    )
