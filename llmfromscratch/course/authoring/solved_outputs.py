"""Runs a solved notebook and leaves in it only outputs that are the same next time and show without a kernel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER
from llmfromscratch.errors import LLMFromScratchError

SECONDS_PER_CELL = 600
VOLATILE_TAG = "nbval-ignore-output"
RAISES_TAG = "raises-exception"
# A progress bar is never the same twice: ours, and those of the Hugging Face libraries.
NO_PROGRESS_BARS = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Kept of an output that has a widget view: what a reader without a kernel can see.
KEPT_OF_WIDGETS = ("image/png", "text/plain")


class SolutionError(LLMFromScratchError):
    """A solved notebook does not run as it should; the message gives the cell and what it raised or wrote."""


def execute_notebook(notebook: NotebookNode, name: str, raises: dict[str, str]) -> None:
    """Runs the notebook in place, in an empty folder, with the reference package in the place of a learner's modules.

    raises: of each cell that must raise, by id, the exception's name.
    Raises SolutionError when a cell raises otherwise or takes too long, or a check cell has a value or uses stderr.
    """
    learners = ("LLMFROMSCRATCH_ENGINE", "LLMFROMSCRATCH_COURSE")
    environment = {key: value for key, value in os.environ.items() if key not in learners}
    path = [str(PACKAGE_FOLDER.parent), environment.get("PYTHONPATH", "")]
    environment |= NO_PROGRESS_BARS
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            store_widget_state=False,
            record_timing=False,
            coalesce_streams=True,
        )
        metadata = notebook.metadata.copy()
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError) as error:
            raise SolutionError(f"{name}: a solved cell does not run. {error}") from error
        notebook.metadata = metadata  # nbclient adds the exact Python version, which differs from machine to machine
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _tidy(cell)
            _refuse_unwanted(cell, name, raises.get(cell.id))


def carry_outputs(new: NotebookNode, old: NotebookNode, wanted: Callable[[NotebookNode], bool]) -> None:
    """Copies the outputs of the old notebook's code cells to the wanted ones of the new, if all code is the same."""
    new_code, old_code = (
        [cell for cell in notebook.cells if cell.cell_type == "code"] for notebook in (new, old)
    )  # fmt: skip
    if [(cell.id, cell.source) for cell in new_code] != [(cell.get("id"), cell.source) for cell in old_code]:
        return
    for cell, before in zip(new_code, old_code, strict=True):
        if wanted(cell) and before.execution_count is not None:
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def is_volatile(cell: NotebookNode) -> bool:
    """Whether the cell prints times or hardware, so that its output is not compared."""
    return VOLATILE_TAG in cell.metadata.get("tags", [])


def _tidy(cell: NotebookNode) -> None:
    cell.metadata.pop("execution", None)
    for output in cell.outputs:
        if WIDGET_VIEW in output.get("data", {}):
            output.data = NotebookNode({key: output.data[key] for key in KEPT_OF_WIDGETS if key in output.data})
    cell.outputs = [output for output in cell.outputs if "data" not in output or output.data]


def _refuse_unwanted(cell: NotebookNode, name: str, raises: str | None) -> None:
    errors = [output.ename for output in cell.outputs if output.output_type == "error"]
    if raises and errors != [raises]:
        found = f"raised {errors[0]}" if errors else "ended without an exception"
        raise SolutionError(f"{name}: the cell {cell.id!r} says that it raises {raises}, but it {found}.")
    if not cell.metadata.get("nbgrader", {}).get("grade"):
        return
    for output in cell.outputs:
        # nbgrader gives no points for a check cell with stderr, and reads a value as a number of points.
        if output.output_type == "execute_result" or output.get("name") == "stderr":
            what = "has a value" if output.output_type == "execute_result" else "writes on stderr"
            raise SolutionError(f"{name}: the check cell {cell.id!r} {what}, which nbgrader would misread. Prevent it.")
