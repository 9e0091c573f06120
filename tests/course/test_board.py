"""board(): each module's owner, points, what is open; a table in a notebook, stable text elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_package import make_package, run_notebook, run_python

BLANK = """\
module                        engine     points  open exercises
---------------------------------------------------------------
sketches (for learning only)  -          0 / 1   1.1
loading                       reference  0 / 6   1.2, 1.3, 1.4
model                         reference  0 / 2   1.5
all                                      0 / 9
7 modules of later chapters: reference
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


def line(text: str, module: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(module))


def test_the_board_of_nobody_is_all_reference(packages: Path, tmp_path: Path):
    ran = run_python(packages, "from llmfromscratch.course import board\nprint(board())", tmp_path)
    assert [line for line in ran.stdout.splitlines() if line.strip("-")] == [
        line for line in BLANK.splitlines() if line.strip("-")
    ], ran.stderr


def test_a_module_of_a_later_chapter_has_a_row_once_it_is_built_or_measured(packages: Path, tmp_path: Path):
    (tmp_path / ".llmfromscratch").touch()
    (tmp_path / "my_engine").mkdir()
    (tmp_path / "my_engine" / "sampling.py").write_text("x = 1\n", encoding="utf-8")
    ran = run_python(packages, """
        from llmfromscratch.course import board
        from llmfromscratch.course.board import record_speed
        print(board())
        record_speed("kv_cache", 7)
        print(board())
        print(board()._repr_html_())
    """, tmp_path)  # fmt: skip
    first, second = ran.stdout.split("module  ")[1:3]
    assert line(first, "sampling").split() == ["sampling", "edited", "by", "hand", "-", "-"], ran.stderr
    assert "tok/s" not in first and "6 modules of later chapters: reference" in first
    assert line(second, "kv_cache").split() == ["kv_cache", "reference", "-", "-", "7.0"]
    assert line(second, "sampling").split()[-1] == "-" and "tok/s" in second.splitlines()[0]
    assert "5 modules of later chapters: reference" in second
    assert "colspan='5'>5 modules of later chapters: reference</td>" in ran.stdout


def test_the_board_follows_checks_builds_measures_and_edits(packages: Path, tmp_path: Path):
    (tmp_path / ".llmfromscratch").touch()
    ran = run_notebook(packages, tmp_path, [
        "from llmfromscratch.course import *\nfrom llmfromscratch.course.board import record_speed\nstart()",
        "def double(n):\n    return n + n", 'check("1.2", double)', "board()", 'build("loading")', "board()",
        "def triple(n):\n    return 3 * n\nclass Scaler:\n    def __init__(self, f):\n        self.f = f\n"
        "    def scale(self, n):\n        return n * self.f",
        'check("1.3", triple)\ncheck("1.4", Scaler)\nbuild("loading")\nrecord_speed("loading", 41.25)', "board()",
        "with open('my_engine/loading.py', 'a', encoding='utf-8') as f:\n    f.write('# mine')", "board()",
    ])  # fmt: skip
    assert ran.stderr() == ""
    assert line(ran.text(3), "loading").split("  ")[1:] != []
    assert 'reference, build("loading") makes it yours' in line(ran.text(3), "loading")
    assert "2 / 6" in line(ran.text(3), "loading") and "1.3, 1.4" in line(ran.text(3), "loading")
    assert "partly yours (1 of 3)" in line(ran.text(5), "loading")
    assert line(ran.text(8), "loading").split() == ["loading", "yours", "6", "/", "6", "-", "41.2"]
    assert "edited by hand" in line(ran.text(10), "loading")
    assert line(ran.text(10), "all").split() == ["all", "6", "/", "9"]
    shown = [output for output in ran.cells[3].outputs if "data" in output]
    assert len(shown) == 1 and "<table>" in shown[0].data["text/html"]
    assert "build(&quot;loading&quot;)" in shown[0].data["text/html"]
    first = [output for output in ran.cells[0].outputs if "data" in output]
    assert len(first) == 1 and "<table>" in first[0].data["text/html"], "start() shows it, once"
