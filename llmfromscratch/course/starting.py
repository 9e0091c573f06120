"""`start("01_loading")`: finds the learner's course folder, chooses the engine, and shows where they stand."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from llmfromscratch import learner_engine
from llmfromscratch.course import assembling, blanks, exercises, progress
from llmfromscratch.course.board import Board
from llmfromscratch.course.showing import show
from llmfromscratch.errors import LLMFromScratchError

_temporary: list[tempfile.TemporaryDirectory[str]] = []


def start(chapter: str = "01_loading", engine: str | Path | None = None) -> None:
    """Opens a chapter: finds the course folder, serves your built modules from its my_engine, shows the board.

    chapter: the notebook's name without its ending. engine: another folder of built modules.
    The folder is the one around the notebook, or LLMFROMSCRATCH_COURSE; in a plain clone `my_course` is made. Elsewhere
    (and among the solutions) progress is kept for the session only. Calling it again takes up files edited since.
    """
    number = _number(chapter)
    course = _find_or_make()
    progress.use(course)
    blanks.show_kindly()
    _choose_engine(course, engine)
    if course.folder != _session_folder():
        print(_where(course))
    for warning in _warnings(course):
        print(warning)
    show(Board.of(course, number))


def _number(chapter: str) -> int:
    found = re.match(r"(\d+)", chapter)
    if found is None:
        raise LLMFromScratchError(f'chapter {chapter!r}: expected its name, as in start("01_loading")')
    if int(found[1]) not in exercises.chapters():
        known = ", ".join(f"{number:02d}" for number in exercises.chapters())
        raise LLMFromScratchError(f"there is no chapter {chapter!r}: there is {known or 'none yet'}")
    return int(found[1])


def _find_or_make() -> progress.Course:
    named = os.environ.get(progress.VARIABLE)
    if named:
        return progress.make(Path(named).expanduser().absolute())
    found = progress.find()
    if found is not None:
        return progress.make(found.folder)
    clone = _clone_around(Path.cwd())
    if clone is not None and not Path.cwd().is_relative_to(clone / "solutions"):
        print("Your work goes to the folder my_course of this clone.")
        return progress.make(clone / "my_course")
    print("There is no course folder here, so progress is kept for this session only (llmfromscratch lab makes one).")
    if not _temporary:
        _temporary.append(tempfile.TemporaryDirectory(prefix="llmfromscratch-course-"))
    return progress.make(Path(_temporary[0].name))


def _session_folder() -> Path | None:
    """The folder whose name is never said: it lasts for the session, and saved outputs should be the same next time."""
    return Path(_temporary[0].name) if _temporary else None


def _where(course: progress.Course) -> str:
    """Which course folder and which engine are in use."""
    engine = course.engine
    mine = learner_engine.learner_files(engine)
    place = f"its {engine.name}" if engine.parent == course.folder else str(engine)
    whose = f"{', '.join(mine)} from there, the rest the reference's" if mine else "nothing built there yet"
    return f"Course folder: {course.folder}\nEngine: {place} ({whose})"


def _clone_around(folder: Path) -> Path | None:
    """The clone of the repository that FOLDER stands in."""
    return next(
        (f for f in (folder, *folder.parents) if (f / "chapters").is_dir() and (f / "llmfromscratch").is_dir()), None
    )


def _choose_engine(course: progress.Course, engine: str | Path | None) -> None:
    if engine is not None:
        learner_engine.activate(engine)
    elif os.environ.get(learner_engine.VARIABLE):
        learner_engine.activate(os.environ[learner_engine.VARIABLE])
    else:
        learner_engine.activate(course.folder / "my_engine", may_be_empty=True)


def _warnings(course: progress.Course) -> list[str]:
    """A sentence for each built file whose reference has changed since."""
    warnings = []
    for name in learner_engine.learner_files(course.engine):
        head = assembling.read_head((course.engine / f"{name}.py").read_text(encoding="utf-8", errors="replace"))
        if head.reference_hash and head.reference_hash != learner_engine.reference_hash(name):
            warnings.append(
                f"my_engine/{name}.py was built on an older version of the engine's {name}.py: "
                f'build("{name}") puts your code into the new one.'
            )
    return warnings
