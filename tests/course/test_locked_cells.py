"""A submission is put back together on the chapter's own cells."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from llmfromscratch.course.grading import locked_cells

BLANK = "def f(x):\n    # YOUR CODE HERE\n    raise NotImplementedError()"


def chapter() -> NotebookNode:
    cells = [
        new_markdown_cell("# Title", id="title"),
        new_code_cell("import math", id="imports"),
        new_code_cell(BLANK, id="exercise-1-1", metadata={"nbgrader": {"grade_id": "exercise-1-1"}}),
        new_code_cell("check('1.1', f)", id="check-1-1", metadata={"nbgrader": {"grade_id": "check-1-1", "points": 2}}),
    ]
    return new_notebook(cells=cells)


def sources(made: locked_cells.Restored) -> list[str]:
    return [cell.source for cell in made.notebook.cells]


def test_the_students_code_stays_and_everything_else_is_the_chapters():
    handed_in = chapter()
    handed_in.cells[0].source, handed_in.cells[1].source = "# Mine", "import os"
    handed_in.cells[2].source = "def f(x):\n    return x"
    handed_in.cells[3].source = "print('✓')"
    made = locked_cells.restore(handed_in, chapter())
    assert sources(made) == ["import math", "def f(x):\n    return x", "check('1.1', f)"]
    assert made.own == {"exercise-1-1"} and made.blank == set()
    assert [change.split()[3] for change in made.changes] == ["imports", "check-1-1"]


def test_removed_cells_are_back_in_their_place_and_an_exercise_without_a_cell_is_blank():
    handed_in = new_notebook(cells=[new_code_cell("mine = 1", id="mine")])
    made = locked_cells.restore(handed_in, chapter())
    assert sources(made) == ["mine = 1", "import math", BLANK, "check('1.1', f)"]
    assert made.blank == {"1.1"} and len(made.changes) == 3


def test_added_cells_stay_behind_the_cell_they_follow_also_where_two_have_one_id():
    handed_in = chapter()
    handed_in.cells.insert(3, new_code_cell("helper = 1", id="imports"))
    handed_in.cells.append(new_code_cell("after = 1", id="after"))
    made = locked_cells.restore(handed_in, chapter())
    assert sources(made) == ["import math", BLANK, "helper = 1", "check('1.1', f)", "after = 1"]
    assert len({cell.id for cell in made.notebook.cells}) == 5 and made.changes == []
    assert made.own == {"added-1", "added-2"}


def test_a_program_that_lost_the_ids_is_forgiven_for_the_cells_that_nbgrader_names():
    handed_in = chapter()
    for number, cell in enumerate(handed_in.cells):
        cell.id = f"random{number}"
    handed_in.cells[2].source = "def f(x):\n    return x"
    made = locked_cells.restore(handed_in, chapter())
    assert made.own >= {"exercise-1-1"} and sources(made).count("check('1.1', f)") == 1


@pytest.mark.parametrize("same", [BLANK + "\n\n", BLANK.replace("    # YOUR CODE HERE\n", "")])
def test_white_space_and_comments_do_not_make_an_answer(same):
    handed_in = chapter()
    handed_in.cells[2].source = same
    assert locked_cells.restore(handed_in, chapter()).blank == {"1.1"}


def test_the_chapter_is_found_by_its_cells_and_not_by_its_name(tmp_path: Path):
    other = new_notebook(cells=[new_code_cell("", id="exercise-2-1"), new_code_cell("", id="check-2-1")])
    nbformat.write(chapter(), tmp_path / "01_loading.ipynb")
    nbformat.write(other, tmp_path / "02_tokenizer.ipynb")
    assert locked_cells.find_chapter(other, tmp_path) == tmp_path / "02_tokenizer.ipynb"
    assert locked_cells.find_chapter(new_notebook(cells=[new_code_cell("1")]), tmp_path) is None
    assert locked_cells.points_of(chapter()) == {"1.1": 2}


def test_definitions_are_the_same_whatever_their_layout_and_found_below_a_magic():
    (one,) = locked_cells.definitions(["def f( x ):\n    return (x)   # done"])
    assert one in locked_cells.definitions(["%%time\ndef f(x):\n    return x", "broken(", "%matplotlib inline\ny = 1"])
    assert (
        locked_cells.definitions(["text = 'def f(x): return x'", "if True:\n    def f(x):\n        return x"]) == set()
    )
