"""Makes the notebooks of the chapters from their sources (``make notebooks``; for authors, learners never need it).

::

    python -m llmfromscratch.course.authoring.builder    all chapters: build, run the solutions, write
        --chapters 01_loading    these only
        --no-execute             without running: outputs stay if no code changed
        --fresh                  measure again what prints times or hardware
        --check                  write nothing; say what a build would change

``chapters/source/NN_name.md`` becomes ``chapters/NN_name.ipynb`` (exercises blank, no outputs) and
``solutions/NN_name.ipynb`` (solved, executed, outputs kept). ``source.py`` describes the format of the sources.

- An exercise cell gets the real code of the package's object: in the solution its body stands between
  ``### BEGIN SOLUTION`` and ``### END SOLUTION``, in the chapter the body is ``# YOUR CODE HERE`` and
  ``raise NotImplementedError()``. Docstrings, given methods and decorators stay.
- A check cell gets the call ``check("1.3", name)`` below the lines of its fence. The two carry nbgrader's metadata.
- Where a package file has ``from __future__ import annotations``, the first code cell must begin with it too: IPython
  then applies it to every later cell, and the annotations mean the same in the notebook as in the package.
- A cell that prints times or hardware is tagged for nbval; it keeps its old outputs while no code of the chapter
  changes, so that building twice changes nothing (``--fresh`` measures again).
- Widget views are dropped from the outputs, the PNG and the text stay.

Everything that would make a bad chapter is refused with a sentence: what ``source.py`` does not allow, exercises out of
order or without their check, an object that does not exist, a name that no earlier cell defines, shell commands, star
imports, and what is beyond the limits below.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from llmfromscratch.course.authoring.cell_names import CellError, parse_cell, undefined_names
from llmfromscratch.course.authoring.exercise_code import (
    BEGIN_SOLUTION,
    END_SOLUTION,
    PACKAGE_FOLDER,
    ExerciseCode,
    ExerciseError,
    cut_exercise,
)
from llmfromscratch.course.authoring.solved_outputs import (
    RAISES_TAG,
    VOLATILE_TAG,
    SolutionError,
    carry_outputs,
    execute_notebook,
    is_volatile,
)
from llmfromscratch.course.authoring.source import SourceCell, SourceError, read_source

MIN_CELLS, MAX_CELLS = 45, 65
MAX_WORDS = 2500
MAX_CELL_LINES = 40
MAX_SOLUTION_LINES = 25

FUTURE_ANNOTATIONS = "from __future__ import annotations"
_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_CHAPTER_NAME = re.compile(r"(\d\d)_[a-z0-9_]+")


@dataclass(frozen=True)
class Notebooks:
    """A chapter's two notebooks, without outputs; `raises` names the exception of each cell that must raise, by id."""

    blank: NotebookNode
    solved: NotebookNode
    raises: dict[str, str]


@dataclass(frozen=True)
class _Exercise:
    code: ExerciseCode
    points: int


def build_notebooks(
    text: str, file: str, package_folder: Path = PACKAGE_FOLDER, chapter_limits: bool = True
) -> Notebooks:
    """The two notebooks of a source.

    text: the source; file: its name, shown in errors; package_folder: where the objects of exercises are looked up.
    chapter_limits: whether the limits on cells and words of a whole chapter apply (tests build small sources).
    Raises SourceError for everything that would make a bad chapter.
    """
    cells = read_source(text, file)
    exercises = _exercises(cells, file, package_folder)
    blank = [_notebook_cell(cell, exercises, solved=False) for cell in cells]
    solved = [_notebook_cell(cell, exercises, solved=True) for cell in cells]
    _refuse_bad_code(cells, solved, exercises, file)
    if chapter_limits:
        _refuse_bad_size(cells, file)
    raises = {cell.id: cell.attributes["raises"] for cell in cells if "raises" in cell.attributes}
    return Notebooks(_notebook(blank), _notebook(solved), raises)


def to_json(notebook: NotebookNode) -> str:
    """The notebook as the text of its file, the same for the same notebook."""
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


# --- exercises and their checks ---------------------------------------------------------------------------------------


def _exercises(cells: list[SourceCell], file: str, package_folder: Path) -> dict[str, _Exercise]:
    """The code of each exercise by its number; refuses numbers out of order, and an exercise or a check alone."""
    found: dict[str, _Exercise] = {}
    unchecked: str | None = None
    name = _CHAPTER_NAME.fullmatch(Path(file).stem)
    chapter = str(int(name[1])) if name else None
    for cell in cells:
        if number := cell.attributes.get("exercise"):
            chapter = chapter or number.split(".")[0]
            expected = f"{chapter}.{len(found) + 1}"
            if number != expected:
                reason = f"exercise {number} stands where {expected} should. Number the exercises 1, 2, 3 in a chapter."
                raise SourceError(reason, file, cell.line)
            if unchecked:
                reason = f"exercise {unchecked} has no check before exercise {number} begins. Add its check cell."
                raise SourceError(reason, file, cell.line)
            code = _exercise_code(cell, file, package_folder)
            found[number] = _Exercise(code, int(cell.attributes["points"]))
            unchecked = number
        elif number := cell.attributes.get("check"):
            if number != unchecked:
                reason = f"the check of {number} does not follow it. Each exercise has one check, after it."
                raise SourceError(reason, file, cell.line)
            unchecked = None
    if unchecked:
        raise SourceError(f"exercise {unchecked} has no check. Add its check cell.", file, cells[-1].line)
    return found


def _exercise_code(cell: SourceCell, file: str, package_folder: Path) -> ExerciseCode:
    number = cell.attributes["exercise"]
    if cell.text.strip():
        reason = f"the fence of exercise {number} is not empty. Empty it: the code comes from the package."
        raise SourceError(reason, file, cell.line)
    blanks = cell.attributes["blanks"].split(",") if "blanks" in cell.attributes else None
    try:
        code = cut_exercise(cell.attributes["object"], blanks, package_folder)
    except ExerciseError as error:
        raise SourceError(str(error), file, cell.line) from error
    if code.lines_to_write > MAX_SOLUTION_LINES:
        reason = (
            f"exercise {number} asks for {code.lines_to_write} lines of code, and {MAX_SOLUTION_LINES} is the limit. "
            "Split the object, or blank fewer methods."
        )
        raise SourceError(reason, file, cell.line)
    return code


# --- cells ------------------------------------------------------------------------------------------------------------


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    notebook = new_notebook(cells=cells, metadata=_METADATA)
    nbformat.validate(notebook)
    return notebook


def _notebook_cell(cell: SourceCell, exercises: dict[str, _Exercise], solved: bool) -> NotebookNode:
    if cell.kind == "markdown":
        return new_markdown_cell(cell.text, id=cell.id)
    source = cell.text
    metadata: dict[str, dict | list[str]] = {}
    if number := cell.attributes.get("exercise"):
        source = exercises[number].code.solved if solved else exercises[number].code.blank
        metadata = {"nbgrader": _nbgrader(cell.id, solution=True)}
    elif number := cell.attributes.get("check"):
        source = f'{source}\ncheck("{number}", {exercises[number].code.name})'.lstrip("\n")
        metadata = {"nbgrader": _nbgrader(cell.id, grade=True, locked=True, points=exercises[number].points)}
    tags = [tag for key, tag in (("volatile", VOLATILE_TAG), ("raises", RAISES_TAG)) if key in cell.attributes]
    if tags:
        metadata["tags"] = tags
    return new_code_cell(source, id=cell.id, metadata=metadata)


def _nbgrader(
    grade_id: str, grade: bool = False, solution: bool = False, locked: bool = False, points: int | None = None
) -> dict:
    metadata = {
        "grade": grade,
        "grade_id": grade_id,
        "locked": locked,
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    return metadata if points is None else metadata | {"points": points}


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse_bad_code(
    cells: list[SourceCell], solved: list[NotebookNode], exercises: dict[str, _Exercise], file: str
) -> None:
    """Refuses cells that are too long or hold what they must not, and names that no earlier cell defines."""
    code = [(cell, made.source) for cell, made in zip(cells, solved, strict=True) if cell.kind == "code"]
    trees = []
    for cell, source in code:
        lines = [line for line in source.split("\n") if line.strip() not in {BEGIN_SOLUTION, END_SOLUTION}]
        if len(lines) > MAX_CELL_LINES:
            reason = f"the cell {cell.id!r} has {len(lines)} lines; {MAX_CELL_LINES} is the limit. Split or shorten it."
            raise SourceError(reason, file, cell.line)
        try:
            trees.append(parse_cell(source))
        except CellError as error:
            raise SourceError(f"the cell {cell.id!r} cannot stand: {error}", file, cell.line) from error
    for (cell, _), names in zip(code, undefined_names(trees), strict=True):
        if names:
            raise SourceError(
                f"the cell {cell.id!r} uses {', '.join(names)}, which no earlier cell defines. "
                "Import or define it in a cell before.", file, cell.line,
            )  # fmt: skip
    needs_future = any(exercise.code.future_annotations for exercise in exercises.values())
    if needs_future and not code[0][1].startswith(FUTURE_ANNOTATIONS):
        reason = f"the first code cell must begin with `{FUTURE_ANNOTATIONS}`, as the files of the exercises do."
        raise SourceError(reason, file, code[0][0].line)


def _refuse_bad_size(cells: list[SourceCell], file: str) -> None:
    """Refuses a chapter with too few or too many cells, too many words, or too few outputs that are compared."""
    if not MIN_CELLS <= len(cells) <= MAX_CELLS:
        raise SourceError(f"the chapter has {len(cells)} cells; {MIN_CELLS} to {MAX_CELLS} are allowed.", file, 1)
    words = sum(count_words(cell.text) for cell in cells if cell.kind == "markdown")
    if words > MAX_WORDS:
        raise SourceError(f"the chapter has {words} words in its Markdown cells; {MAX_WORDS} are allowed.", file, 1)
    code = [cell for cell in cells if cell.kind == "code"]
    volatile = sum("volatile" in cell.attributes for cell in code)
    if 2 * volatile > len(code):
        reason = f"{volatile} of {len(code)} code cells are volatile; at least half of the outputs must be compared."
        raise SourceError(reason, file, 1)


def count_words(markdown: str) -> int:
    """Words of a Markdown text: what stands between white space and has a letter or digit."""
    return sum(any(letter.isalnum() for letter in word) for word in markdown.split())


# --- files ------------------------------------------------------------------------------------------------------------


def chapter_names(root: Path) -> list[str]:
    """The names of the chapters that have a source under root/chapters/source, in order."""
    return sorted(path.stem for path in (root / "chapters" / "source").glob("*.md"))


def build_files(
    root: Path, name: str, execute: bool = True, fresh: bool = False, chapter_limits: bool = True
) -> list[Path]:
    """Builds one chapter under root and gives the files that changed.

    execute: run the solution; otherwise its outputs stay where no code has changed, and are left out where it has.
    fresh: do not keep the old outputs of the cells that print times or hardware.
    Raises SourceError for a bad source and SolutionError for a solution that does not run; then no file is touched.
    """
    notebooks = _read_and_build(root, name, chapter_limits)
    blank_file, solved_file = _notebook_files(root, name)
    if execute:
        execute_notebook(notebooks.solved, solved_file.name, notebooks.raises)
    if solved_file.exists() and not (execute and fresh):
        old = nbformat.read(solved_file, as_version=nbformat.NO_CONVERT)
        carry_outputs(notebooks.solved, old, is_volatile if execute else lambda cell: True)
    changed = []
    for file, notebook in ((blank_file, notebooks.blank), (solved_file, notebooks.solved)):
        text = to_json(notebook)
        if not file.exists() or file.read_bytes() != text.encode("utf-8"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode("utf-8"))
            changed.append(file)
    return changed


def check_files(root: Path, name: str, chapter_limits: bool = True) -> list[str]:
    """What a build of one chapter would change, as sentences; nothing is run or written."""
    notebooks = _read_and_build(root, name, chapter_limits)
    blank_file, solved_file = _notebook_files(root, name)
    if missing := [file for file in (blank_file, solved_file) if not file.exists()]:
        return [f"{file.relative_to(root)} does not exist." for file in missing]
    problems = []
    if blank_file.read_bytes() != to_json(notebooks.blank).encode("utf-8"):
        problems.append(f"{blank_file.relative_to(root)} is not what its source makes.")
    old = nbformat.read(solved_file, as_version=nbformat.NO_CONVERT)
    carry_outputs(notebooks.solved, old, lambda cell: True)
    if solved_file.read_bytes() != to_json(notebooks.solved).encode("utf-8"):
        problems.append(f"{solved_file.relative_to(root)} is not what its source makes.")
    elif any(cell.cell_type == "code" and cell.execution_count is None for cell in old.cells):
        problems.append(f"{solved_file.relative_to(root)} was never run. Build it without --no-execute.")
    return problems


def _read_and_build(root: Path, name: str, chapter_limits: bool) -> Notebooks:
    file = root / "chapters" / "source" / f"{name}.md"
    if not _CHAPTER_NAME.fullmatch(name):
        raise SourceError("the file's name is not like 01_loading.md. Rename it.", str(file), 1)
    if not file.exists():
        have = ", ".join(chapter_names(root)) or "none"
        raise SourceError(f"there is no such source. Chapters with one: {have}.", str(file), 1)
    return build_notebooks(file.read_text(encoding="utf-8"), file.name, chapter_limits=chapter_limits)


def _notebook_files(root: Path, name: str) -> tuple[Path, Path]:
    return root / "chapters" / f"{name}.ipynb", root / "solutions" / f"{name}.ipynb"


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when all went well, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="llmfromscratch.course.authoring.builder", description="Build the chapters' notebooks."
    )
    parser.add_argument("--chapters", nargs="+", metavar="NN_name", help="build these only")
    parser.add_argument("--check", action="store_true", help="write nothing, say what a build would change")
    parser.add_argument("--no-execute", action="store_true", help="do not run the solutions")
    parser.add_argument("--fresh", action="store_true", help="measure again what prints times or hardware")
    parser.add_argument("--root", type=Path, default=PACKAGE_FOLDER.parent, help="the repository's folder")
    options = parser.parse_args(arguments)
    names = options.chapters or chapter_names(options.root)
    if not names:
        print(f"there are no sources in {options.root / 'chapters' / 'source'}", file=sys.stderr)
        return 1
    good = True
    for name in names:
        try:
            if options.check:
                lines = check_files(options.root, name)
                good = good and not lines
            else:
                changed = build_files(options.root, name, execute=not options.no_execute, fresh=options.fresh)
                lines = [f"wrote {file.relative_to(options.root)}" for file in changed]
            print("\n".join(lines) or f"{name}: nothing changes")
        except (SourceError, SolutionError) as error:
            print(error, file=sys.stderr)
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
