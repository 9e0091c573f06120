"""start(): finds the learner's folder, or makes it where it belongs, and chooses the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_package import make_package, run_notebook, run_python

START = "from llmfromscratch.course import start\nstart()\n"
WHERE = "from llmfromscratch.course import progress\nprint(progress.current().folder)\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


def course_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / ".llmfromscratch").touch()
    return folder


def test_the_folder_around_the_notebook_is_found_from_below_it(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    (course / "deep" / "down").mkdir(parents=True)
    ran = run_python(packages, START + WHERE, course / "deep" / "down")
    assert ran.stdout.splitlines()[-1] == str(course), ran.stderr
    assert (course / "my_engine").is_dir()


def test_a_variable_names_another_folder_which_is_made(packages: Path, tmp_path: Path):
    course_in(tmp_path / "my_course")
    other = tmp_path / "other" / "course"
    ran = run_python(packages, START + WHERE, tmp_path / "my_course", LLMFROMSCRATCH_COURSE=str(other))
    assert ran.stdout.splitlines()[-1] == str(other)
    assert (other / ".llmfromscratch").exists() and (other / "my_engine").is_dir()


def test_in_a_plain_clone_my_course_is_made_once_and_found_again(packages: Path, tmp_path: Path):
    for name in ("chapters", "llmfromscratch"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        ran = run_python(packages, START + WHERE, tmp_path / "chapters")
        assert ran.stdout.splitlines()[-1] == str(tmp_path / "my_course"), ran.stderr
        assert ran.stdout.startswith("Your work goes to the folder my_course of this clone.")
    assert (tmp_path / "my_course" / ".llmfromscratch").exists()


@pytest.mark.parametrize("place", ["solutions", "elsewhere"])
def test_among_the_solutions_and_elsewhere_progress_lasts_for_the_session_only(packages: Path, tmp_path: Path, place):
    names = ("chapters", "llmfromscratch", "solutions") if place == "solutions" else ("elsewhere",)
    for name in names:
        (tmp_path / name).mkdir()
    ran = run_python(packages, START + "start()\n" + WHERE, tmp_path / place)
    folder = Path(ran.stdout.splitlines()[-1])
    assert "progress is kept for this session only" in ran.stdout and ran.stderr == ""
    assert str(folder.parent) not in "".join(ran.stdout.splitlines(keepends=True)[:-1]), "no path in saved outputs"
    assert not folder.is_relative_to(tmp_path) and not folder.exists()
    assert not (tmp_path / "my_course").exists()


def test_the_engine_is_the_courses_unless_another_is_named(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    for folder, word in ((course / "my_engine", "the course's"), (tmp_path / "friends", "a friend's")):
        folder.mkdir()
        (folder / "loading.py").write_text(f'def double(n):\n    return "{word}"\n', encoding="utf-8")
    code = "\nfrom llmfromscratch import loading\nprint(loading.double(1))"
    assert run_python(packages, START + code, course).stdout.splitlines()[-1] == "the course's"
    friends = START.replace("start()", 'start("01_loading", engine="../friends")')
    assert run_python(packages, friends + code, course).stdout.splitlines()[-1] == "a friend's"
    by_variable = run_python(packages, START + code, course, LLMFROMSCRATCH_ENGINE=str(tmp_path / "friends"))
    assert by_variable.stdout.splitlines()[-1] == "a friend's"


def test_the_course_folder_and_the_engine_in_use_are_said(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    said = run_python(packages, START, course).stdout.splitlines()
    assert said[:2] == [f"Course folder: {course}", "Engine: its my_engine (nothing built there yet)"]
    (course / "my_engine" / "loading.py").write_text("def double(n):\n    return 2 * n\n", encoding="utf-8")
    said = run_python(packages, START, course).stdout.splitlines()
    assert said[1] == "Engine: its my_engine (loading from there, the rest the reference's)"
    friends = tmp_path / "friends"
    (course / "my_engine").rename(friends)
    said = run_python(packages, START, course, LLMFROMSCRATCH_ENGINE=str(friends)).stdout.splitlines()
    assert said[1] == f"Engine: {friends} (loading from there, the rest the reference's)"


def test_a_file_edited_by_hand_is_taken_up_when_start_is_called_again(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    ran = run_python(packages, START + """
from pathlib import Path
from llmfromscratch import loading
Path("my_engine/loading.py").write_text("def double(n):\\n    return 'by hand'\\n")
start()
print(loading.double(1))
Path("my_engine/loading.py").unlink()
start()
print(loading.double(1))
""", course)  # fmt: skip
    assert [line for line in ran.stdout.splitlines() if line in ("by hand", "2")] == ["by hand", "2"], ran.stderr


def test_a_reference_that_changed_since_the_build_is_told(packages: Path, tmp_path: Path):
    mine = make_package(tmp_path / "later")
    course = course_in(tmp_path / "my_course")
    run_notebook(mine, course, [
        "from llmfromscratch.course import *\nstart()", "def double(n):\n    return n + n",
        'check("1.2", double)\nbuild("loading")',
    ])  # fmt: skip
    assert "older version" not in run_python(mine, START, course).stdout
    file = mine / "llmfromscratch" / "loading.py"
    file.write_text(file.read_text(encoding="utf-8") + "\nNEW = 1\n", encoding="utf-8")
    ran = run_python(mine, START, course)
    assert "my_engine/loading.py was built on an older version of the engine's loading.py" in ran.stdout
    assert "partly yours (1 of 3), on an older reference" in ran.stdout
    again = run_python(mine, START + "from llmfromscratch.course import build\nbuild('loading')\nstart()\n"
                       "from llmfromscratch import loading\nprint(loading.NEW)", course)  # fmt: skip
    assert again.stdout.splitlines()[-1] == "1" and again.stdout.count("older version") == 1


@pytest.mark.parametrize(("chapter", "said"), [("09_none", "there is 01"), ("loading", "expected its name")])
def test_a_chapter_that_is_not_there_is_answered_with_a_sentence(packages: Path, tmp_path: Path, chapter, said):
    ran = run_python(packages, f'from llmfromscratch.course import start\nstart("{chapter}")', tmp_path)
    assert said in ran.stderr.splitlines()[-1]


def test_a_cell_that_runs_into_a_blank_says_so_kindly_and_other_errors_are_left_alone(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    ran = run_notebook(packages, course, [
        START, "def double(n):\n    # YOUR CODE HERE\n    raise NotImplementedError()", "print(double(2))",
        "def mine(n):\n    raise NotImplementedError('not by the course')\nmine(1)", "1 / 0",
    ])  # fmt: skip
    assert ran.error(2).traceback == [
        "Exercise 1.2 is not yet written: doubling", '  next: write double, run its cell, then check("1.2", double)',
    ]  # fmt: skip
    assert ran.error(2).evalue == "\n".join(ran.error(2).traceback) and ran.error(2).ename == "NotImplementedError"
    assert "Traceback" in "".join(ran.error(3).traceback) and ran.error(3).evalue == "not by the course"
    assert ran.error(4).ename == "ZeroDivisionError" and ran.stderr() == ""


def test_a_broken_built_file_is_told_in_a_notebook_without_a_traceback(packages: Path, tmp_path: Path):
    course = course_in(tmp_path / "my_course")
    (course / "my_engine").mkdir()
    (course / "my_engine" / "loading.py").write_text("x = (\n", encoding="utf-8")
    ran = run_notebook(packages, course, [
        START, "from llmfromscratch import loading", "def double(n):\n    return n * 2",
        'from llmfromscratch.course import check\ncheck("1.2", double)',
    ])  # fmt: skip
    assert ran.error(0) is None and "edited by hand" in ran.text(0)
    assert len(ran.error(1).traceback) == 1
    assert "my_engine/loading.py, line 1: your loading.py cannot be imported (SyntaxError" in ran.error(1).traceback[0]
    assert ran.text(3) == "✓ 1.2 doubling (2 points)\n", "the notebook's own object can still be checked"
