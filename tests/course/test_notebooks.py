"""The notebooks run: solutions give the outputs that are saved in them, chapters fail only with "not yet written"."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from llmfromscratch.course.authoring import solved_outputs

ROOT = Path(__file__).resolve().parents[2]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
ENVIRONMENT = {**solved_outputs.NO_PROGRESS_BARS, "PYTHONPATH": str(ROOT)}


def name_of(notebook: Path) -> str:
    return notebook.stem


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("LLMFROMSCRATCH_ENGINE", raising=False)
    monkeypatch.delenv("LLMFROMSCRATCH_COURSE", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_there_is_a_solution_for_every_chapter():
    assert CHAPTERS and [path.name for path in CHAPTERS] == [path.name for path in SOLUTIONS]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("environment", "smollm2_gguf")
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


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("environment", "smollm2_gguf")
@pytest.mark.parametrize("chapter", CHAPTERS, ids=name_of)
def test_a_blank_chapter_fails_only_where_something_is_not_yet_written(chapter, tmp_path):
    notebook = nbformat.read(chapter, 4)
    client = NotebookClient(
        notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3"
    )
    client.execute(env=dict(os.environ))
    failed = [
        (cell.id, output)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]
    checks = [cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.id.startswith("check-")]
    assert {cell_id for cell_id, _ in failed} >= set(checks)
    for cell_id, output in failed:
        shown = "\n".join(output.traceback)
        assert "not yet written" in shown, f"{cell_id}: {output.ename}: {output.evalue}\n{shown}"
        assert "Traceback" not in shown and len(output.traceback) <= 4, f"{cell_id}:\n{shown}"
