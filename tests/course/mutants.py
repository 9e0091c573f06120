"""What the chapters' tests of mutants share: a solution with one piece exchanged, as a learner's own code.

A mutant is the reference with one piece of its code exchanged, so it is the code a learner might well have written.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.authoring.exercise_code import BEGIN_SOLUTION, cut_exercise
from llmfromscratch.course.checking import check, run_check
from llmfromscratch.course.failures import CheckFailed, NotYetWritten

Mutants = dict[str, list[tuple[str, str, str]]]  # exercise: [(piece of the reference, instead, words of the diagnosis)]


def written(exercise_id: str, source: str) -> Any:
    """The object that a learner would have after running the exercise's cell with this source in it."""
    exercise = exercises.find(exercise_id)
    names = dict(vars(importlib.import_module(exercise.module)))
    names["__name__"] = "__main__"
    exec(compile("from __future__ import annotations\n" + source, "<cell>", "exec"), names)
    return names[exercise.name]


def code_of(exercise_id: str) -> str:
    """The solved cell."""
    return cut_exercise(exercises.find(exercise_id).object).solved


def cases_of(mutants: Mutants) -> list[tuple[str, str, str, str]]:
    """(exercise, piece, instead, diagnosis) of every mutant."""
    return [(exercise, *mutant) for exercise, listed in mutants.items() for mutant in listed]


def expect_pass(exercise_id: str) -> None:
    """The reference, written as the learner's own, passes."""
    run_check(exercises.find(exercise_id), written(exercise_id, code_of(exercise_id)))


def expect_rejection(exercise_id: str, piece: str, instead: str, diagnosis: str) -> None:
    """The mutant is rejected, with the diagnosis in what is said."""
    contract, marker, body = code_of(exercise_id).partition(BEGIN_SOLUTION)
    assert piece in body, f"the mutant no longer fits the reference: {piece!r}"
    mutant = written(exercise_id, contract + marker + body.replace(piece, instead, 1))
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find(exercise_id), mutant)
    assert not isinstance(caught.value, NotYetWritten)
    assert diagnosis in str(caught.value), str(caught.value)
    assert f'hint("{exercise_id}")' in str(caught.value)


def expect_refusal_of_the_engines_own(exercise_id: str) -> None:
    """Neither the engine's object nor a call of it, nor a class that inherits from it, passes."""
    exercise = exercises.find(exercise_id)
    module = importlib.import_module(exercise.module)
    own = getattr(module, exercise.name)
    with pytest.raises(CheckFailed, match="engine's own"):
        check(exercise_id, own)
    if inspect.isclass(own):
        delegate: object = type(exercise.name, (own,), {"__module__": "__main__"})
    else:

        def delegate(*arguments):
            return getattr(module, exercise.name)(*arguments)

    with pytest.raises(CheckFailed, match="engine's own"):
        check(exercise_id, delegate)


def expect_not_yet_written(exercise_id: str, blanks: list[str] | None = None) -> None:
    """The blank cell is told to be one; blanks: of a class, the methods to write."""
    blank = cut_exercise(exercises.find(exercise_id).object, blanks=blanks).blank
    with pytest.raises(NotYetWritten):
        run_check(exercises.find(exercise_id), written(exercise_id, blank))


def expect_enough(chapter: int, mutants: Mutants) -> None:
    """Every exercise of the chapter has at least five mutants."""
    assert {exercise.id for exercise in exercises.exercises(chapter)} == set(mutants)
    assert all(len(listed) >= 5 for listed in mutants.values())
