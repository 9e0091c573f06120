"""Puts a submitted notebook back together: the chapter's cells as the chapter has them, the student's code as it is.

The chapter is the skeleton. Its exercise cells take the student's code, all its other code cells are the chapter's
again (found by cell id, so an edited cell is known, and a removed one is missed), and cells that the student added keep
their place behind the cell they follow. Nothing else of the submission is used: no outputs, no metadata, no texts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

EXERCISE, CHECK, _ADDED = "exercise-", "check-", "added-"


@dataclass(frozen=True)
class Restored:
    """The notebook to run: its code cells, the chapter's and the student's.

    changes: a sentence for each locked cell that was not as it should be. own: ids of cells with the student's code.
    blank: numbers of the exercises, such as "1.3", that are as empty as the chapter has them.
    """

    notebook: NotebookNode
    changes: list[str]
    own: set[str]
    blank: set[str]


def exercise_number(cell_id: str) -> str:
    """ "1.3" of "exercise-1-3" and of "check-1-3"."""
    return cell_id.split("-", 1)[1].replace("-", ".")


def points_of(chapter: NotebookNode) -> dict[str, int]:
    """The points of each exercise of a chapter, in order, as its check cells say."""
    return {
        exercise_number(cell.id): cell.metadata.nbgrader.points
        for cell in chapter.cells
        if cell.id.startswith(CHECK) and "nbgrader" in cell.metadata
    }


def find_chapter(submission: NotebookNode, folder: Path) -> Path | None:
    """The chapter in FOLDER that shares most exercise cells with a submission, whatever its file is called."""
    ids = {name for cell in submission.cells for name in _names(cell)}
    shared = {}
    for file in sorted(folder.glob("*.ipynb")):
        chapter = nbformat.read(file, as_version=4)
        shared[file] = sum(cell.id in ids for cell in chapter.cells if cell.id.startswith((EXERCISE, CHECK)))
    best = max(shared, key=lambda file: shared[file], default=None)
    return best if best is not None and shared[best] else None


def restore(submission: NotebookNode, chapter: NotebookNode) -> Restored:
    """The submission with its locked cells as the chapter has them."""
    submitted, followers = _sorted_out(submission, chapter)
    made = Restored(new_notebook(metadata=chapter.metadata), [], set(), set())
    cells = made.notebook.cells
    cells.extend(followers.pop("", []))
    for cell in (cell for cell in chapter.cells if cell.cell_type == "code"):
        place = _place_exercise if cell.id.startswith(EXERCISE) else _place_locked
        source = place(cell, submitted.get(cell.id), made)
        cells.append(new_code_cell(source, id=cell.id))
        cells.extend(followers.pop(cell.id, []))
    made.own.update(cell.id for cell in cells if cell.id.startswith(_ADDED))
    return made


def _place_exercise(cell: NotebookNode, theirs: str | None, made: Restored) -> str:
    """The code of an exercise cell: the student's, or the blank where there is none."""
    if theirs is not None and not _same_code(theirs, cell.source):
        made.own.add(cell.id)
        return theirs
    if theirs is None:
        made.changes.append(f"the exercise cell {cell.id} was removed; its blank stands in its place")
    made.blank.add(exercise_number(cell.id))
    return cell.source


def _place_locked(cell: NotebookNode, theirs: str | None, made: Restored) -> str:
    """The code of a cell that is the chapter's own."""
    if theirs is None:
        made.changes.append(f"the locked cell {cell.id} was removed; it is back")
    elif theirs.rstrip() != cell.source.rstrip():
        made.changes.append(f"the locked cell {cell.id} was edited; it is as the chapter has it again")
    return cell.source


def _names(cell: NotebookNode) -> list[str]:
    """What a cell may be found by: its id, and nbgrader's name for it, which survives programs that drop ids."""
    return [cell.get("id", ""), str(cell.metadata.get("nbgrader", {}).get("grade_id", ""))]


def _sorted_out(
    submission: NotebookNode, chapter: NotebookNode
) -> tuple[dict[str, str], dict[str, list[NotebookNode]]]:
    """The submitted code of each of the chapter's cells, and the cells added after each of them ("": at the top)."""
    known = {cell.id for cell in chapter.cells if cell.cell_type == "code"}
    submitted: dict[str, str] = {}
    followers: dict[str, list[NotebookNode]] = {}
    last, added = "", 0
    for cell in submission.cells:
        if cell.cell_type != "code":
            continue
        name = next((name for name in _names(cell) if name in known and name not in submitted), None)
        if name is None:
            added += 1
            followers.setdefault(last, []).append(new_code_cell(cell.source, id=f"{_ADDED}{added}"))
        else:
            submitted[name] = cell.source
            last = name
    return submitted, followers


def _same_code(a: str, b: str) -> bool:
    if a.rstrip() == b.rstrip():
        return True
    try:
        return ast.dump(ast.parse(a)) == ast.dump(ast.parse(b))
    except (SyntaxError, ValueError):
        return False


def definitions(sources: Iterable[str]) -> set[str]:
    """The functions and classes at the left margin of these cells, each as the text of its syntax tree."""
    found = set()
    for source in sources:
        lines = source.split("\n")
        while lines and (not lines[0].strip() or lines[0].startswith("%%")):
            lines.pop(0)  # what stands below a cell magic is code too
        text = "\n".join("" if line.startswith(("%", "!")) else line for line in lines)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        found |= {ast.dump(node) for node in tree.body if isinstance(node, kinds)}
    return found
