"""nbgrader itself, as an instructor runs it on chapter 1: release version, submissions, points.

The solved notebook is what nbgrader calls the source. To keep this short it is cut behind its last check, and the cells
that let the whole model answer are left out; no exercise builds on them.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config

from llmfromscratch.course import exercises
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),  # nbgrader's own affair
]
POINTS = {exercise.id: exercise.points for exercise in exercises.exercises(1)}


def shortened(notebook: NotebookNode) -> NotebookNode:
    notebook = copy.deepcopy(notebook)
    last = max(index for index, cell in enumerate(notebook.cells) if cell.id.startswith("check-"))
    notebook.cells = [
        cell for cell in notebook.cells[: last + 1] if cell.cell_type != "code" or "LLM(" not in cell.source
    ]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def chapter(folder: str) -> NotebookNode:
    return shortened(nbformat.read(PACKAGE_FOLDER.parent / folder / "01_loading.ipynb", as_version=4))


class Classroom:
    """A course folder of nbgrader with the assignment ch1 in it."""

    def __init__(self, root: Path):
        self.root = root
        settings = Config()
        settings.CourseDirectory.root = str(root)
        settings.CourseDirectory.course_id = "course"
        settings.CourseDirectory.db_url = f"sqlite:///{root / 'gradebook.db'}"
        settings.ExecutePreprocessor.timeout = settings.Execute.timeout = 240
        self.api = NbGraderAPI(CourseDirectory(config=settings), config=settings)
        self.put(root / "source" / "ch1", chapter("solutions"))
        self.succeed(self.api.generate_assignment("ch1"))
        self.release = nbformat.read(root / "release" / "ch1" / "01_loading.ipynb", as_version=4)

    @staticmethod
    def put(folder: Path, notebook: NotebookNode) -> None:
        folder.mkdir(parents=True)
        nbformat.write(notebook, folder / "01_loading.ipynb")

    @staticmethod
    def succeed(result: dict) -> None:
        assert result["success"], result.get("error") or result.get("log")

    def grade(self, student: str, write: Callable[[NotebookNode], str | None]) -> dict[str, float]:
        """Points by exercise of what a student hands in; write: the new code of a cell, None to leave it as it is."""
        notebook = copy.deepcopy(self.release)
        for cell in notebook.cells:
            if cell.cell_type == "code" and (code := write(cell)) is not None:
                cell.source = code
        self.put(self.root / "submitted" / student / "ch1", notebook)
        self.succeed(self.api.autograde("ch1", student))
        with Gradebook(f"sqlite:///{self.root / 'gradebook.db'}") as book:
            grades = book.find_submission_notebook("01_loading", "ch1", student).grades
            assert not any(grade.needs_manual_grade for grade in grades)
            return {grade.cell.name.removeprefix("check-").replace("-", "."): grade.score for grade in grades}


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path):
    with pytest.MonkeyPatch.context() as patch:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # nbgrader calls alembic
        patch.setenv("PATH", programs)
        for name in ("LLMFROMSCRATCH_COURSE", "LLMFROMSCRATCH_ENGINE"):
            patch.delenv(name, raising=False)
        root = tmp_path_factory.mktemp("nbgrader")
        patch.chdir(root)
        yield Classroom(root)


@pytest.fixture(scope="module")
def solved() -> dict[str, str]:
    return {cell.id: cell.source for cell in chapter("solutions").cells if cell.id.startswith("exercise-")}


def code_cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    return [(cell.id, cell.source.strip()) for cell in notebook.cells if cell.cell_type == "code"]


def test_the_release_version_is_the_chapter_that_learners_get(classroom):
    assert code_cells(classroom.release) == code_cells(chapter("chapters"))


def test_a_right_submission_gets_full_points(classroom, solved):
    assert classroom.grade("right", lambda cell: solved.get(cell.id)) == POINTS


def test_a_blank_submission_gets_none_even_with_its_checks_taken_out(classroom):
    got = classroom.grade("blank", lambda cell: "pass" if cell.id.startswith("check-") else None)
    assert got == dict.fromkeys(POINTS, 0)


def test_a_wrong_submission_loses_what_is_wrong_and_keeps_the_rest(classroom, solved):
    wrong = solved | {
        "exercise-1-2": "def dequantize_q4_1(blocks):\n    return torch.zeros(len(blocks), 32)",
        "exercise-1-4": "def unpermute(weight, num_heads):\n    return weight",
        "exercise-1-7": solved["exercise-1-7"].replace("### BEGIN", "return x\n    ### BEGIN"),
    }
    got = classroom.grade("wrong", lambda cell: wrong.get(cell.id))
    lost = {key for key, points in POINTS.items() if got[key] != points}
    assert {"1.2", "1.4", "1.7"} <= lost <= {"1.2", "1.4", "1.7", "1.9", "1.10"}
    assert all(got[key] == 0 for key in lost)
