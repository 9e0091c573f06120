"""The chapters run as a learner gets them, and fail only with "not yet written".

Apart from the solutions, so that both can run at the same time.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

CHAPTERS = sorted((Path(__file__).resolve().parents[2] / "chapters").glob("*.ipynb"))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("notebook_environment", "smollm2_gguf")
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
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
