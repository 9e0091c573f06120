"""Runs a restored notebook in a process family of its own, and brings back what the course recorded there."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from llmfromscratch.course import progress
from llmfromscratch.course.grading.private_place import private_place
from llmfromscratch.course.grading.process_group import ProcessGroup, Stopped
from llmfromscratch.errors import LLMFromScratchError

_RUNS = 4  # at most; each but the first leaves out one more cell that ended the run before
_LARGEST_PROGRESS = 20 * 2**20


@dataclass
class Run:
    """What came of it, none of it to be trusted.

    entries: recorded sources by exercise. raised: what a cell raised, as (name, text). stopped: cells that ended a run,
    and how. over: why the last run came to no end, "" where it did.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    raised: dict[str, tuple[str, str]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    over: str = ""


def run_notebook(notebook: NotebookNode, seconds: float, memory: int) -> Run:
    """Runs all cells for SECONDS at most, a single one for a third of that, with MEMORY bytes for everything.

    A cell that takes too long or too much, or ends the kernel, is left out of another run.
    """
    made, deadline = Run(), time.monotonic() + seconds
    for _ in range(_RUNS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        guilty = _run_once(_without(notebook, set(made.stopped)), made, left, min(left, seconds / 3), memory)
        if guilty is None:
            break
    return made


def _without(notebook: NotebookNode, left_out: set[str]) -> NotebookNode:
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.id in left_out:
            cell.source = ""
    return notebook


def _run_once(notebook: NotebookNode, made: Run, seconds: float, cell_seconds: float, memory: int) -> str | None:
    """One run into MADE; returns the cell that ended it, None where it came to its end or its time was over."""
    running, ending = "", ""
    deadline = time.monotonic() + seconds
    with private_place() as place:
        made.raised.clear()
        job = {"notebook": notebook}
        with ProcessGroup("llmfromscratch.course.grading.runner", job, place.work, place.environment, memory) as group:
            try:
                for event in group.events(seconds, cell_seconds):
                    match event:
                        case {"running": cell_id}:
                            running = cell_id
                        case {"raised": [cell_id, name, text]}:
                            made.raised[cell_id] = (name, text)
                        case {"died": cell_id}:
                            ending = "it ended the kernel"
            except Stopped as stopped:
                ending = str(stopped)
        for exercise_id, entry in _recorded(place.course).items():
            made.entries.setdefault(exercise_id, entry)
    made.over = ending
    if not ending or not running or time.monotonic() > deadline:
        return None
    made.stopped[running] = ending
    return running


def _recorded(course: Path) -> dict[str, Any]:
    """The entries of a progress.json that a stranger's code had its hands on; none if it is not as it should be."""
    file = course / "progress.json"
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST_PROGRESS:
            return {}
        return dict(progress.read(file)["exercises"])
    except (OSError, ValueError, RecursionError, LLMFromScratchError):
        return {}
