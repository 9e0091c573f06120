"""Acts as a learner of a chapter: types bodies into its blanks, runs cells in a real kernel, starts new processes.

What is typed is the reference's body written in other words: every parameter and local variable gets a name of the
learner's own, and the first line is a marker. So each statement of theirs can be told from each of the reference's.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from toy_package import Ran

from llmfromscratch import learner_engine
from llmfromscratch.course import exercises
from llmfromscratch.course.exercise import Exercise

ROOT = Path(__file__).resolve().parents[2]
BLANK = re.compile(r"^( *)# YOUR CODE HERE\n\1raise NotImplementedError\(\)$", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


# ---- what is typed -----------------------------------------------------------------------------------------------


def marker(exercise: Exercise) -> str:
    """The line that stands first in every body that the learner writes."""
    return f"written_by = 'the learner, in exercise {exercise.id}'"


def typed(blank: str, exercise: Exercise, body: str | None = None) -> str:
    """The exercise's cell with its blanks filled: with BODY, or with the reference's bodies in the learner's words."""
    functions = iter(blanked_functions(blank))

    def fill(hole: re.Match[str]) -> str:
        theirs = definition(learner_engine.reference_path(exercise.module).read_text("utf-8"), exercise.name)
        words = body or in_own_words(function_in(theirs, next(functions).name), exercise)
        return textwrap.indent(words, hole[1])

    filled, holes = BLANK.subn(fill, blank)
    assert holes and "NotImplementedError" not in filled
    return filled


def blanked_functions(cell: str) -> list[Function]:
    """The functions and methods of a cell that end in a blank."""
    nodes = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, Function)]
    return [node for node in nodes if ast.unparse(node.body[-1]) == "raise NotImplementedError()"]


def in_own_words(function: Function, exercise: Exercise) -> str:
    """The body of a function of the reference with a marker, and other names for all that is local."""
    parameters = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    parameters = [name for name in parameters if name != "self"]
    body = ast.Module(statements(function), type_ignores=[])
    names = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and node.id in {*names, *parameters}:
            node.id = f"my_{node.id}"
    copies = "\n".join(f"my_{name} = {name}" for name in parameters)
    return f"{marker(exercise)}\n{copies}\n{ast.unparse(body)}"


def definition(text: str, name: str) -> Definition:
    """The one function or class NAME at the top level of a module's text."""
    (node,) = [node for node in ast.parse(text).body if isinstance(node, Definition) and node.name == name]
    return node


def function_in(node: Definition, name: str) -> Function:
    """The definition itself where it is a function, else the class's method NAME."""
    if isinstance(node, Function):
        return node
    (method,) = [part for part in node.body if isinstance(part, Function) and part.name == name]
    return method


def statements(function: Function) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


# ---- where it is run ---------------------------------------------------------------------------------------------


class Chapter:
    """A chapter as it was handed out: its code cells by id, and its exercises."""

    def __init__(self, name: str):
        notebook = nbformat.read(ROOT / "chapters" / f"{name}.ipynb", 4)
        self.cells = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}
        self.exercises = exercises.exercises(int(name[:2]))

    def blank(self, exercise: Exercise) -> str:
        return self.cells[cell_of(exercise)]

    def written(self, solved: Iterable[Exercise]) -> dict[str, str]:
        """All code cells by id, with the exercises that the learner has solved filled in."""
        return self.cells | {cell_of(exercise): typed(self.blank(exercise), exercise) for exercise in solved}


def cell_of(exercise: Exercise) -> str:
    """The id of an exercise's cell."""
    return f"exercise-{exercise.id.replace('.', '-')}"


def check_of(exercise: Exercise) -> str:
    """The id of the cell that checks an exercise."""
    return f"check-{exercise.id.replace('.', '-')}"


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that has nobody's engine or course in use."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LLMFROMSCRATCH")}
    return {**clean, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", **more}


def run_in_kernel(folder: Path, cells: Iterable[str]) -> Ran:
    """Runs cells in a new kernel that stands in FOLDER, going on after errors."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = NotebookClient(notebook, timeout=600, startup_timeout=300, kernel_name="python3", allow_errors=True)
    client.resources = {"metadata": {"path": str(folder)}}
    client.execute(env=environment())
    return Ran(notebook.cells)


def run_program(arguments: list[str], folder: Path, **variables: str) -> str:
    """Runs Python with arguments in FOLDER; returns what it printed."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment(**variables), capture_output=True, text=True, encoding="utf-8", timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


RESTART = """
import json, sys
opened = set()
sys.addaudithook(lambda event, arguments: opened.add(str(arguments[0])) if event == "open" else None)
from llmfromscratch import LLM, SamplingParams, loading, model
question = [{"role": "user", "content": "Why is the sky blue?"}]
answer = LLM(dtype="float32", device="cpu").chat(question, SamplingParams(max_tokens=20)).text
print(json.dumps({"answer": answer, "files": [loading.__file__, model.__file__], "opened": sorted(opened)}))
"""


def restart(engine: Path) -> dict:
    """Asks the engine in a new process; returns its answer, the files of its two modules, and all files it opened."""
    return json.loads(run_program(["-P", "-c", RESTART], engine.parent, LLMFROMSCRATCH_ENGINE=str(engine)))
