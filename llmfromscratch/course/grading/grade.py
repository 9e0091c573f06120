"""Grades a submitted notebook without trusting anything it says.

1. The chapter's own cells are put back (locked_cells.py).
2. The notebook runs, up to its last check, in a process family of its own (process_group.py, notebook_run.py): on a
   copy, in an empty folder, with a home of its own, without the caller's environment, with limits on time and memory
   that kill. A cell that hangs or kills the kernel is left out of another run, so that the others still get their
   points. Of the run only what the course recorded is used: sources. What the notebook printed may explain a failure,
   and never earns a point.
3. A recorded source counts when it stands in the notebook as a definition, and asks for nothing that an exercise has no
   need of (vetting.py).
4. It is checked again in a fresh process family (second_check.py), whose answers are signed with a key that was never
   in the notebook's processes.

What this does not keep out: the student's code runs as the user who grades. It can read that user's files, fill the
disk, use the network, kill the grader (then there are no points), and change installed libraries (a change of this
package is noticed). In the second check it shares a process with the check, and someone who knows Python's insides well
enough to get past vetting.py can forge the result there. Code that was copied is the student's for all that is known
here. Grade strangers in a container or as a user of its own, and look at what was refused.
"""

from __future__ import annotations

import copy
import hashlib
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from llmfromscratch import learner_engine
from llmfromscratch.course import exercises
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.grading import locked_cells, notebook_run, second_check, vetting
from llmfromscratch.course.grading.grades import BLANK, FAILED, PASSED, REFUSED, ExerciseGrade, NotebookGrade
from llmfromscratch.course.grading.locked_cells import CHECK, EXERCISE, Restored
from llmfromscratch.errors import LLMFromScratchError

SECONDS, MEMORY = 600.0, 6 * 2**30
CHAPTERS = PACKAGE_FOLDER.parent / "chapters"
_LARGEST_NOTEBOOK = 100 * 2**20
_SHADOWED = "from llmfromscratch.course import check\n"  # in case the student's code has used the name
_NOT_SHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n\t -~\u00a0-\ud7ff\ue000-\ufffd]")


class GradingError(LLMFromScratchError):
    """A file cannot be graded: the sentence says what it is, or what went wrong."""


def grade(file: Path, chapters: Path = CHAPTERS, seconds: float = SECONDS, memory: int = MEMORY) -> NotebookGrade:
    """Grades one notebook.

    chapters: folder with the chapters as they were handed out; seconds: for one run of the notebook; memory: bytes, for
    each process and for all of a run together. Raises GradingError.
    """
    began = time.monotonic()
    submission = _read(file)
    chapter_file = locked_cells.find_chapter(submission, chapters) if chapters.is_dir() else None
    if chapter_file is None:
        raise GradingError(f"{file} is no copy of a chapter in {chapters}: it has none of their exercise cells")
    chapter = nbformat.read(chapter_file, as_version=4)
    wanted = {number: exercises.find(number) for number in locked_cells.points_of(chapter)}
    ours = _fingerprint()
    restored = locked_cells.restore(submission, chapter)
    run = notebook_run.run_notebook(_to_run(restored), seconds, memory) if restored.own else notebook_run.Run()
    grader = _Grader(chapter, restored, run)
    verdicts = second_check.recheck({key: run.entries[key] for key in wanted if grader.countable(wanted[key])}, memory)
    if _fingerprint() != ours:
        raise GradingError(
            f"{file}: files of llmfromscratch changed while it was graded. If nobody else was at work there, the "
            "notebook did it: look at it, install the package again, and grade it in a container"
        )
    grades = tuple(grader.grade(exercise, verdicts.get(key)) for key, exercise in wanted.items())
    notes = [f"the cell {cell} was left out of another run: {why}" for cell, why in run.stopped.items()]
    if run.over and not run.stopped:
        notes.append(f"the notebook did not run to its end: {run.over}")
    spent = time.monotonic() - began
    return NotebookGrade(str(file), chapter_file.stem, grades, tuple(restored.changes), tuple(notes), spent)


def grade_all(files: Iterable[Path], chapters: Path, seconds: float, memory: int) -> list[NotebookGrade]:
    """Grades several notebooks, one after the other; one that cannot be graded does not keep the next from it."""
    grades = []
    for file in files:
        try:
            grades.append(grade(file, chapters, seconds, memory))
        except LLMFromScratchError as error:
            grades.append(NotebookGrade(str(file), error=_clean(str(error))))
    return grades


def exit_code(grades: Sequence[NotebookGrade]) -> int:
    """0 where all have all points, 1 where points are missing, 2 where a file could not be graded."""
    if any(grade.error for grade in grades):
        return 2
    return int(not all(grade.passed for grade in grades))


def _read(file: Path) -> NotebookNode:
    try:
        if file.stat().st_size > _LARGEST_NOTEBOOK:
            raise GradingError(f"{file} has {file.stat().st_size:,} bytes, which no notebook of this course has")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cells without ids, and other things that do not matter here
            notebook = nbformat.read(file, as_version=4)
        if not all(isinstance(cell.source, str) and isinstance(cell.metadata, dict) for cell in notebook.cells):
            raise TypeError("a cell whose code is no text")
    except OSError as error:
        raise GradingError(f"{file} cannot be read: {error.strerror or error}") from error
    except GradingError:
        raise
    except Exception as error:  # nbformat raises many kinds, AttributeError and KeyError among them
        raise GradingError(f"{file} is not a notebook: {type(error).__name__}: {str(error)[:200]}") from error
    return notebook


def _fingerprint() -> str:
    """Hash over the package's own sources."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE_FOLDER.rglob("*.py")):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _to_run(restored: Restored) -> NotebookNode:
    """What is worth running: all up to the last check, and behind it only what the student wrote."""
    notebook = copy.deepcopy(restored.notebook)
    checks = [index for index, cell in enumerate(notebook.cells) if cell.id.startswith(CHECK)]
    notebook.cells = [c for index, c in enumerate(notebook.cells) if index <= checks[-1] or c.id in restored.own]
    for cell in notebook.cells:
        if cell.id.startswith(CHECK):
            cell.source = _SHADOWED + cell.source
    return notebook


class _Grader:
    """Holds a run against the notebook and the chapter, exercise by exercise."""

    def __init__(self, chapter: NotebookNode, restored: Restored, run: notebook_run.Run):
        self.restored, self.run = restored, run
        sources = [cell.source for cell in restored.notebook.cells if cell.id in restored.own]
        self.written = locked_cells.definitions(sources)
        self.given = frozenset().union(*(vetting.imported_modules(cell.source) for cell in chapter.cells))

    def countable(self, exercise: Exercise) -> bool:
        """Whether a source was recorded that may be checked again."""
        return exercise.id in self.run.entries and not self._objection(exercise)

    def grade(self, exercise: Exercise, verdict: second_check.Verdict | None) -> ExerciseGrade:
        """The grade of one exercise; verdict: of the second check, None where there was none."""
        if verdict is not None:
            status, message = (FAILED, f"in a fresh process: {verdict.failure}") if verdict.failure else (PASSED, "")
        elif exercise.id in self.run.entries:
            status, message = REFUSED, self._objection(exercise)
        elif exercise.id in self.restored.blank:
            status, message = BLANK, "not yet written"
        else:
            status, message = FAILED, self._what_happened(exercise.id)
        seconds = verdict.seconds if verdict else 0.0
        return ExerciseGrade(exercise.id, exercise.title, exercise.points, status, _clean(message), seconds)

    def _objection(self, exercise: Exercise) -> str:
        entry = self.run.entries[exercise.id]
        if (entry["module"], entry["name"]) != (exercise.module, exercise.name):
            return "what was recorded belongs to another exercise"
        if not self._stands_in_notebook(entry):
            return "what was recorded does not stand in the notebook as a definition"
        reference = learner_engine.reference_path(exercise.module).read_text(encoding="utf-8")
        found = vetting.reasons(entry, self.given | vetting.imported_modules(reference))
        if found:
            return f"it reaches beyond the exercise with {', '.join(found)}; do without, or have a person look at it"
        return ""

    def _stands_in_notebook(self, entry: Mapping[str, Any]) -> bool:
        needed = locked_cells.definitions([entry["source"], *entry["helpers"].values()])
        return bool(needed) and needed <= self.written

    def _what_happened(self, number: str) -> str:
        place = number.replace(".", "-")
        for cell_id in (EXERCISE + place, CHECK + place):
            if cell_id in self.run.stopped:
                return f"its cell was stopped: {self.run.stopped[cell_id]}"
        for cell_id in (CHECK + place, EXERCISE + place):
            if cell_id in self.run.raised:
                name, text = self.run.raised[cell_id]
                return text if name == "CheckFailed" else f"{name}: {text}"
        return self.run.over or "its check recorded nothing"


def _clean(text: str) -> str:
    """Text of a stranger's making, without what terminals and XML readers would act on, and not too long."""
    return _NOT_SHOWN.sub("", text)[:4000]
