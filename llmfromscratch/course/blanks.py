"""Recognises a blank that was reached: the NotImplementedError that every exercise's cell starts with."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from llmfromscratch.course import exercises, locating
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import NotYetWritten


def is_blank(error: BaseException) -> bool:
    """Whether the error was raised by a line of the learner's, as in a blank (torch raises it too, for its reasons)."""
    frames = locating.frames_of(error.__traceback__)
    return isinstance(error, NotImplementedError) and bool(frames) and locating.is_learners(frames[-1][0].f_code)


def owner(error: BaseException) -> Exercise | None:
    """The exercise whose blank raised the error, by the name of the function or class it stands in."""
    name = locating.frames_of(error.__traceback__)[-1][0].f_code.co_qualname.split(".")[0]
    return next((exercise for exercise in exercises.exercises() if exercise.name == name), None)


def not_yet_written(exercise: Exercise, needed_by: str = "") -> NotYetWritten:
    """What to say of a blank that something else ran into; needed_by names it where it is known."""
    return NotYetWritten(
        f"{exercise.name} written first: {needed_by} uses it" if needed_by else "",
        subject=f"{exercise.id} {exercise.title}",
        next_step=f'write {exercise.name}, run its cell, then check("{exercise.id}", {exercise.name})',
    )


def show_kindly() -> None:
    """In a notebook, a cell that runs into a blank shows that sentence from now on, and no traceback."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        shell.set_custom_exc((NotImplementedError,), _show)


def _show(shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: int | None = None) -> None:
    exercise = owner(error) if is_blank(error) else None
    if exercise is not None:
        said = not_yet_written(exercise)
        error.args = (str(said),)
        # asked by IPython before it makes a traceback
        error._render_traceback_ = said._render_traceback_  # type: ignore[attr-defined]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
