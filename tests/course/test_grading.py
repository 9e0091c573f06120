"""`llmfromscratch grade`: whole notebooks, from honest ones to those of students who try it on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from short_chapter import POINTS, build, hand_in

from llmfromscratch.cli import main
from llmfromscratch.course.authoring import builder
from llmfromscratch.course.grading import grade as grading
from llmfromscratch.course.grading import reports as grade_reports
from llmfromscratch.course.grading.grades import ExerciseGrade, NotebookGrade

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> builder.Notebooks:
    return build(tmp_path_factory.getbasetemp() / "short_chapters")


@pytest.fixture(scope="module")
def chapters(short: builder.Notebooks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "short_chapters"


def source_of(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    return next(cell.source for cell in notebook.cells if cell.id == cell_id)


def statuses(grade: NotebookGrade) -> dict[str, str]:
    return {exercise.id: exercise.status for exercise in grade.exercises}


def messages(grade: NotebookGrade) -> dict[str, str]:
    return {exercise.id: exercise.message for exercise in grade.exercises}


# --- honest students --------------------------------------------------------------------------------------------------


def test_a_right_notebook_has_all_points_even_with_its_locked_cells_spoilt(short, chapters, tmp_path, capsys):
    """Edited and removed given cells, `check` used as a name, a helper and a constant in an added cell."""
    solved = short.solved
    cells = {
        "check-1-1": "pass  # a student's accident",
        "check-1-3": None,
        "name-tables": "LAYER_PATTERN = None",
        "exercise-1-4": "def unpermute(weight, num_heads):\n    return by_heads(weight, num_heads)",
    }
    helper = (
        "PAIR = 2\ndef by_heads(weight, num_heads):\n"
        "    if num_heads < 1 or weight.ndim == 0 or weight.shape[0] % (PAIR * num_heads) or not weight.shape[0]:\n"
        "        raise CheckpointError('no heads of an even width')\n"
        "    rows = weight.reshape(num_heads, -1, PAIR, *weight.shape[1:])\n"
        "    return rows.transpose(1, 2).reshape(weight.shape).contiguous()\n"
        "check = 5"
    )
    file = hand_in(solved, tmp_path / "anna (1).ipynb", cells, {"check-1-2": helper})
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    report, junit = tmp_path / "grades.json", tmp_path / "grades.xml"
    arguments = ["grade", str(file), "--chapters", str(chapters), "--json", str(report), "--junit", str(junit)]
    assert main(arguments) == 0
    assert f"{POINTS} of {POINTS} points" in capsys.readouterr().out
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before and len(list(tmp_path.iterdir())) == 3
    (graded,) = json.loads(report.read_text(encoding="utf-8"))["files"]
    assert (graded["chapter"], graded["points"], graded["passed"]) == ("01_short", POINTS, True)
    assert [sentence.split(" was ")[0] for sentence in graded["restored"]] == [
        "the locked cell name-tables", "the locked cell check-1-1", "the locked cell check-1-3",
    ]  # fmt: skip
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert suite is not None and suite.attrib["tests"] == "4" and suite.attrib["failures"] == "0"


def test_what_is_blank_or_wrong_costs_its_own_points_only_whatever_the_outputs_say(short, chapters, tmp_path):
    right = source_of(short.solved, "exercise-1-2")
    assert "* scale" in right or "scale *" in right, "the wrong answer below is made of the right one"
    notebook = nbformat.from_dict(short.solved)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id.startswith("check-"):
            cell.outputs = [new_output("stream", name="stdout", text=f"✓ {cell.id} (100 points)\n")]
    cells = {
        "exercise-1-1": source_of(short.blank, "exercise-1-1"),
        "exercise-1-2": right.replace("* scale", "- scale").replace("scale *", "scale -"),
        "exercise-1-4": "def unpermute(weight, num_heads):\n    return missing",
    }
    grade = grading.grade(hand_in(notebook, tmp_path / "b.ipynb", cells), chapters)
    assert statuses(grade) == {"1.1": "blank", "1.2": "failed", "1.3": "passed", "1.4": "failed"}
    assert grade.points == 3 and grading.exit_code([grade]) == 1
    assert "not right yet" in messages(grade)["1.2"] and "NameError" in messages(grade)["1.4"]


def test_a_file_that_is_no_copy_of_a_chapter_gives_exit_code_2_and_does_not_stop_the_others(chapters, tmp_path, capsys):
    other, text = tmp_path / "other.ipynb", tmp_path / "text.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1")]), other)
    text.write_text("{}", encoding="utf-8")
    arguments = [
        "grade",
        str(other),
        str(text),
        str(tmp_path / "none.ipynb"),
        "--chapters",
        str(chapters),
        "--json",
        "-",
    ]
    assert main(arguments) == 2
    files = json.loads(capsys.readouterr().out)["files"]
    assert [file["passed"] for file in files] == [False] * 3
    for file, said in zip(files, ["no copy of a chapter", "is not a notebook", "cannot be read"], strict=True):
        assert said in file["error"]


# --- students who try it on -------------------------------------------------------------------------------------------

LIAR = """
import json, os, sys, inspect
import llmfromscratch.course as course
from llmfromscratch.course import checking, comparing, progress
from llmfromscratch.course.exercises import loading_checks
from llmfromscratch import loading

checking.run_check = lambda *anything: None
checking.delegation.refuse_engines_own = lambda *anything: None
print(json.dumps({"event": {"checked": ["1.2", ""]}}))
os.write(1, b'{"passed": true, "points": 11}\\n')

right = inspect.getsource(loading.dequantize_q4_1)
entry = {
    "source": right, "sha256": "", "reference_hash": "", "module": "llmfromscratch.loading", "name": "dequantize_q4_1",
    "helpers": {}, "imports": {}, "constants": {}, "uses": [], "points": 1000,
}
folder = progress.current()
folder.save_exercise("1.2", entry)
folder.save_exercise("1.9", entry)
"""


def test_patched_checks_printed_json_and_a_progress_file_written_by_hand_earn_nothing(short, chapters, tmp_path):
    cells = {
        "exercise-1-1": "def read_safetensors_header(path):\n    return {}",
        "exercise-1-3": "course.check = lambda *anything: print('✓')\ndef canonical_name(name):\n    return name",
    }
    file = hand_in(
        short.solved, tmp_path / "liar.ipynb", cells, {"set-up": LIAR, "exercise-1-2": "del dequantize_q4_1"}
    )
    blank_1_2 = {"exercise-1-2": source_of(short.blank, "exercise-1-2")}
    grade = grading.grade(hand_in(nbformat.read(file, as_version=4), file, blank_1_2), chapters)
    assert statuses(grade) == {"1.1": "failed", "1.2": "refused", "1.3": "failed", "1.4": "failed"}
    assert "in a fresh process" in messages(grade)["1.1"]
    assert "does not stand in the notebook" in messages(grade)["1.2"]
    assert messages(grade)["1.4"] == "its check recorded nothing"


def test_code_that_patches_the_course_when_it_is_checked_is_refused(short, chapters, tmp_path):
    patch = (
        "def unpermute(weight, num_heads):\n"
        "    from llmfromscratch.course import comparing\n"
        "    for name in list(vars(comparing)):\n"
        "        setattr(comparing, name, lambda *a, **k: None)\n"
        "    return weight"
    )
    cells = {"exercise-1-4": patch, "exercise-1-1": "import os\nos._exit(0)"}
    grade = grading.grade(hand_in(short.solved, tmp_path / "e.ipynb", cells), chapters)
    assert statuses(grade)["1.2"] == statuses(grade)["1.3"] == "passed"
    assert statuses(grade)["1.4"] in {"refused", "failed"} and statuses(grade)["1.1"] == "failed"
    assert "ended the kernel" in messages(grade)["1.1"]


# --- reports ----------------------------------------------------------------------------------------------------------

GRADES = [
    NotebookGrade(
        "a.ipynb",
        "01_loading",
        (
            ExerciseGrade("1.1", "first <&> one", 2, "passed", seconds=1.5),
            ExerciseGrade("1.2", "second", 3, "failed", "expected 1\nnot 2 ]]> \"'<"),
        ),
        seconds=2.25,
    ),
    NotebookGrade("b.ipynb", error="b.ipynb is not a notebook"),
]


def test_the_junit_file_says_what_ci_programs_read():
    root = ElementTree.fromstring(grade_reports.as_junit(GRADES).encode("utf-8"))
    assert root.tag == "testsuites" and root.attrib["tests"] == "3" and root.attrib["failures"] == "1"
    first, second = root
    assert {key: first.attrib[key] for key in ("name", "tests", "failures", "errors", "skipped", "time")} == {
        "name": "a.ipynb", "tests": "2", "failures": "1", "errors": "0", "skipped": "0", "time": "2.250",
    }  # fmt: skip
    passed, failed = first
    assert passed.attrib == {"classname": "01_loading", "name": "1.1 first <&> one", "time": "1.500"}
    assert [child.tag for child in (*passed, *failed)] == ["failure"]
    assert failed[0].attrib["message"] == "failed: expected 1" and failed[0].text == GRADES[0].exercises[
        1
    ].message.join(["failed: ", ""])
    assert second.attrib["errors"] == "1" and second[0][0].tag == "error"


def test_the_table_has_a_line_for_each_exercise_and_the_sum():
    text = grade_reports.as_text(GRADES)
    assert "✓ 1.1" in text and "✗ 1.2" in text and "2 of 5 points" in text and "not graded" in text


def test_text_of_a_students_making_cannot_steer_a_terminal():
    assert grading._clean("\x1b[2Jgone\x00\x08 ✓ \ud800") == "gone ✓ "
