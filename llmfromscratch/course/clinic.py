"""`clinic("1.a")` tells of a fault and shows it; `clinic("1.a", mended)` checks the repair."""

from __future__ import annotations

import inspect
from typing import Any

from llmfromscratch.course import exercises, progress
from llmfromscratch.course.checking import contained, described
from llmfromscratch.course.exercise import BugHunt
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.showing import show

_NOTHING = object()


def clinic(hunt_id: str, mended: Any = _NOTHING) -> None:
    """Without MENDED: the story, the symptom, and the code with the fault in it. With it: checks your repair.

    Prints one ✓ line where the fault is gone, else raises CheckFailed.
    """
    hunt = exercises.find_hunt(hunt_id)
    if mended is _NOTHING:
        _present(hunt)
        return
    subject = f"{hunt.id} {hunt.title}"
    _insist_on_definition(hunt, mended)
    if mended is hunt.broken:
        raise CheckFailed(
            "the code with the fault mended", verdict="this is still the broken one", subject=subject,
            next_step="copy it into a cell, mend it there, and hand yours in",
        )  # fmt: skip
    try:
        contained(lambda: hunt.check(mended), subject, seconds=hunt.seconds)
    except CheckFailed as failure:
        failure.next_step = failure.next_step or f'clinic("{hunt.id}") shows the symptom again'
        raise
    course = progress.current()
    if course is not None:
        course.update(lambda content: content["hunts"].update({hunt.id: progress.now()}))
    print(f"✓ {subject}: found and mended")


def _present(hunt: BugHunt) -> None:
    print(f"{hunt.id} {hunt.title}\n\n{hunt.story.strip()}\n")
    shown = hunt.run()
    if shown is not None:
        show(shown)
    source = hunt.broken if isinstance(hunt.broken, str) else inspect.getsource(hunt.broken)
    print(f"\nThe code, with the fault in it:\n\n{source.rstrip()}")
    print(f"\nCopy it into a cell, mend it, and call {_right_call(hunt)}.")


def _right_call(hunt: BugHunt) -> str:
    return f'clinic("{hunt.id}", {getattr(hunt.broken, "__name__", "mended")})'


def _insist_on_definition(hunt: BugHunt, mended: Any) -> None:
    if callable(hunt.broken) and not callable(mended):
        kind = "class" if inspect.isclass(hunt.broken) else "function"
        raise CheckFailed(
            f"the mended {kind} itself, not its name and not what a call of it gives: {_right_call(hunt)}",
            verdict=f"clinic got {described(mended)} instead of a {kind}",
            subject=f"{hunt.id} {hunt.title}",
            next_step=f'clinic("{hunt.id}") shows the code with the fault; mend a copy of it and hand that in',
        )
