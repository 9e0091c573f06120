"""The solutions run and give the outputs that are saved in them (`test_blank_chapters` runs the chapters)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))


def name_of(notebook: Path) -> str:
    return notebook.stem


def test_there_is_a_solution_for_every_chapter():
    assert CHAPTERS and [path.name for path in CHAPTERS] == [path.name for path in SOLUTIONS]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("notebook_environment", "smollm2_gguf")
@pytest.mark.parametrize("solution", SOLUTIONS, ids=name_of)
def test_a_solution_gives_the_outputs_that_are_saved_in_it(solution, tmp_path):
    copy = shutil.copy(solution, tmp_path)
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", "-q", "--nbval-cell-timeout=600"]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-o", "addopts=", copy], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@pytest.mark.parametrize("solution", SOLUTIONS, ids=name_of)
def test_at_least_half_of_a_solutions_code_cells_are_compared(solution):
    code = [cell for cell in nbformat.read(solution, 4).cells if cell.cell_type == "code"]
    ignored = [cell for cell in code if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    assert len(ignored) <= len(code) / 2
