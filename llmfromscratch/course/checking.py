"""`check("1.3", unpermute)`: runs an exercise's check on the learner's object, contained, and records what passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmfromscratch.course import (
    containing,
    delegation,
    exercises,
    explaining,
    limits,
    memory_errors,
    progress,
    recording,
)
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import CheckFailed


def check(exercise_id: str, obj: Any) -> None:
    """Checks your object for an exercise: prints one ✓ line, or raises CheckFailed with what is wrong.

    obj: the function or class itself, `check("1.3", unpermute)`, not its name and not a call of it.
    What passes is recorded in the course folder, for `build()`.
    """
    exercise = exercises.find(exercise_id)
    subject = f"{exercise.id} {exercise.title}"
    _insist_on_definition(exercise, obj)
    contained(lambda: delegation.refuse_engines_own(exercise, obj), subject, exercise)
    run_check(exercise, obj)
    note = _record(exercise, obj, subject)
    points = "1 point" if exercise.points == 1 else f"{exercise.points} points"
    print(f"✓ {subject} ({points}){note}")


def run_check(exercise: Exercise, obj: Any) -> None:
    """The check alone, contained, whoever's object it is; raises CheckFailed."""
    subject = f"{exercise.id} {exercise.title}"
    with delegation.guarded(exercise, obj) as tripped:
        try:
            contained(lambda: exercise.check(obj), subject, exercise)
        except CheckFailed:
            if not tripped():
                raise
        if not tripped():
            return
    raise _complete(delegation.delegated(exercise), subject, exercise)


def contained(action: Callable[[], Any], subject: str, exercise: Exercise | None = None, seconds: float = 10.0) -> None:
    """Runs ACTION under limits; whatever the learner's code does there ends in a CheckFailed or in silence.

    Only KeyboardInterrupt passes. What the code printed is shown first, on stdout.
    """
    seconds = exercise.seconds if exercise else seconds
    failure: CheckFailed | None = None
    memory = memory_errors.address_space()
    with containing.fixed_seeds(), containing.caught_output() as output:
        try:
            with limits.limited(seconds, limits.MEMORY):
                action()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - sys.exit() and the like must not end the kernel
            failure = explaining.explained(error, exercise, seconds, memory)
    if output.getvalue():
        print(f"your code printed:\n{output.shown().rstrip()}")
    if failure is not None:
        raise _complete(failure, subject, exercise)


def _complete(failure: CheckFailed, subject: str, exercise: Exercise | None) -> CheckFailed:
    failure.subject = failure.subject or subject
    if not failure.next_step and exercise is not None:
        failure.next_step = f'hint("{exercise.id}")'
    return failure.with_traceback(None)


def _insist_on_definition(exercise: Exercise, obj: Any) -> None:
    if not callable(obj):
        raise CheckFailed(
            f'the object itself, as in check("{exercise.id}", {exercise.name})',
            verdict=f"check got {described(obj)} instead of a function or a class",
            subject=f"{exercise.id} {exercise.title}",
        )


def described(obj: Any) -> str:
    """A value that was handed in where a definition was asked for, in a few words: "int '5'"."""
    return f"{type(obj).__name__} {str(obj)[:40]!r}"


def _record(exercise: Exercise, obj: Any, subject: str) -> str:
    """Records a passed check; returns what to add to the ✓ line."""
    course = progress.current()
    if course is None:
        return ", not recorded: no course folder here, call start() first"
    try:
        entry = recording.record(exercise, obj)
    except recording.NotRecordable as error:
        reason = str(error)
    else:
        course.save_exercise(exercise.id, entry)
        left = "; ".join(entry.get("not_taken", ()))
        return f", not taken along, so grading would miss it: {left}" if left else ""
    if exercise.replaceable is None:
        return f", not recorded: {reason}"
    raise CheckFailed(
        "code that stands on its own in a file",
        mistake=reason,
        next_step=f'change that, run the cell, then check("{exercise.id}", {exercise.name}) again',
        verdict="your values are right, but this cannot be taken into your engine yet",
        subject=subject,
    )
