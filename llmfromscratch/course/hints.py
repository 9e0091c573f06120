"""`hint("1.3")` gives the next of three hints, `solution("1.3")` shows the reference."""

from __future__ import annotations

import ast

from llmfromscratch import learner_engine
from llmfromscratch.course import exercises, progress
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.live_source import definition_text
from llmfromscratch.errors import LLMFromScratchError

_given_without_course: dict[str, int] = {}


def hint(exercise_id: str) -> None:
    """Prints the next hint for an exercise; after the third, all three again."""
    exercise = exercises.find(exercise_id)
    given = _given(exercise_id)
    if given >= len(exercise.hints):
        numbered = "\n".join(f"  {number}. {text}" for number, text in enumerate(exercise.hints, 1))
        print(
            f'{exercise.id} {exercise.title}, all three hints:\n{numbered}\nsolution("{exercise.id}") shows the code.'
        )
        return
    print(f"{exercise.id} {exercise.title}, hint {given + 1} of {len(exercise.hints)}: {exercise.hints[given]}")
    _remember(exercise_id, given + 1)


def solution(exercise_id: str) -> None:
    """Prints the reference's code for an exercise; write your own from it, since a check wants yours."""
    exercise = exercises.find(exercise_id)
    left = len(exercise.hints) - _given(exercise_id)
    if left > 0:
        print(f'# {left} of {len(exercise.hints)} hints were left: hint("{exercise.id}")')
    print(f"# {exercise.id} {exercise.title}, from {exercise.module}\n{reference_source(exercise)}", end="")


def reference_source(exercise: Exercise) -> str:
    """The text of the exercise's object in the package, whichever engine is active."""
    text = learner_engine.reference_path(exercise.module).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == exercise.name:
            return definition_text(text, node)
    raise LLMFromScratchError(
        f"{exercise.module} has no {exercise.name}: exercise {exercise.id} names what is not there"
    )


def _given(exercise_id: str) -> int:
    course = progress.current()
    number = course.load()["hints"].get(exercise_id, 0) if course else _given_without_course.get(exercise_id, 0)
    return number if isinstance(number, int) else 0


def _remember(exercise_id: str, number: int) -> None:
    course = progress.current()
    if course is None:
        _given_without_course[exercise_id] = number
    else:
        course.update(lambda content: content["hints"].update({exercise_id: number}))
