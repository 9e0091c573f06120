"""hint() gives three hints one after the other and remembers; solution() shows the reference, whatever is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_package import make_package, run_python


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("has_course", [True, False])
def test_hints_come_one_by_one_then_all_together(packages: Path, tmp_path: Path, has_course: bool):
    if has_course:
        (tmp_path / ".llmfromscratch").touch()
    ran = run_python(packages, 'from llmfromscratch.course import hint\nfor _ in range(4):\n    hint("1.2")', tmp_path)
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "1.2 doubling, hint 1 of 3: think", "1.2 doubling, hint 2 of 3: think of two",
        "1.2 doubling, hint 3 of 3: add it to itself",
        "1.2 doubling, all three hints:", "  1. think", "  2. think of two", "  3. add it to itself",
        'solution("1.2") shows the code.',
    ]  # fmt: skip


def test_hints_are_remembered_over_a_restart_and_solution_says_how_many_were_left(packages: Path, tmp_path: Path):
    (tmp_path / ".llmfromscratch").touch()
    code = 'from llmfromscratch.course import hint, solution\nhint("1.2")\nsolution("1.2")'
    run_python(packages, code, tmp_path)
    second = run_python(packages, code, tmp_path)
    assert second.stdout.splitlines()[:3] == [
        "1.2 doubling, hint 2 of 3: think of two",
        '# 1 of 3 hints were left: hint("1.2")',
        "# 1.2 doubling, from llmfromscratch.loading",
    ]


def test_solution_shows_the_packages_own_code_whichever_engine_is_active(packages: Path, tmp_path: Path):
    (tmp_path / "my_engine").mkdir()
    (tmp_path / "my_engine" / "loading.py").write_text("def double(n):\n    return 'mine'\n", encoding="utf-8")
    code = 'from llmfromscratch.course import solution\nsolution("1.2")\nsolution("1.1")'
    ran = run_python(packages, code, tmp_path, LLMFROMSCRATCH_ENGINE="my_engine")
    assert 'def double(number: int) -> int:\n    """Twice the number."""\n    return 2 * number\n' in ran.stdout
    assert "def header(text: str) -> str:" in ran.stdout and "from llmfromscratch.course.sketches.ch01" in ran.stdout


def test_an_unknown_exercise_is_answered_with_those_that_exist(packages: Path, tmp_path: Path):
    ran = run_python(packages, 'from llmfromscratch.course import hint\nhint("1.7")', tmp_path)
    assert "there is no exercise '1.7': this chapter has 1.1, 1.2, 1.3, 1.4, 1.5" in ran.stderr
