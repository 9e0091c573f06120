"""Runs a notebook cell by cell, in the process that grading starts for it; says which cell runs and what it raised.

Job: {"notebook": nbformat, version 4}. Events: {"running": id}, {"raised": [id, name, text]}, {"died": id}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from llmfromscratch.course.grading import child as grade_child

_LONGEST_TEXT = 4000


def main() -> None:
    """Runs the notebook of the job, tells of each cell, and waits to be ended."""
    job, answer = grade_child.begin()
    run(nbformat.from_dict(job["notebook"]), answer)
    answer("finished")
    grade_child.wait_for_the_end()


def run(notebook: nbformat.NotebookNode, answer: Callable[[Any], None]) -> None:
    """Runs the cells in order; one that raises does not keep the next from running."""
    client = NotebookClient(notebook, timeout=None, kernel_name="python3", allow_errors=True, store_widget_state=False)
    client.reset_execution_trackers()
    with client.setup_kernel():
        answer("ready")
        for index, cell in enumerate(notebook.cells):
            answer({"running": cell.id})
            try:
                client.execute_cell(cell, index)
            except DeadKernelError:
                answer({"died": cell.id})
                return
            for output in cell.outputs:
                if output.output_type == "error":
                    answer({"raised": [cell.id, output.ename, output.evalue[:_LONGEST_TEXT]]})
        answer("finished")
        grade_child.wait_for_the_end()  # a kernel that is shut down in peace could take its time


if __name__ == "__main__":
    main()
