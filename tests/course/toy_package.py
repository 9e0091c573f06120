"""A small copy of the package for tests: the real course machinery around a made-up `loading`, `model` and chapter 1.

It runs in processes of their own (plain Python, or a real kernel through nbclient), where nothing of the real engine
is reached and no torch is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient

import llmfromscratch

REAL = Path(llmfromscratch.__file__).parent

INIT = """
import sys
# an editable install of the real package would answer for every module that this one lacks
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
from llmfromscratch import learner_engine
learner_engine.activate_from_environment()
"""

LOADING = '''
"""A made-up module of the engine."""

from __future__ import annotations

import math

BASE = 10

def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def triple(number: int) -> int:
    """Three times the number, by way of double."""
    return double(number) + number


class Scaler:
    """Multiplies by a factor."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def scale(self, number: int) -> int:
        """The number times the factor."""
        return self.factor * number


def root_of_nine() -> float:
    """What the chapter does not teach."""
    return math.sqrt(9.0)
'''

MODEL = '''
"""Stands above loading and uses it through the module."""

from __future__ import annotations

from llmfromscratch import loading


def sextuple(number: int) -> int:
    """Six times the number."""
    return loading.double(loading.triple(number))


def is_scaler(value: object) -> bool:
    """Whether this is what loading calls a Scaler now."""
    return isinstance(value, loading.Scaler)
'''

SKETCHES = '''
"""Code that only teaches."""

from __future__ import annotations


def header(text: str) -> str:
    """What stands before the first colon."""
    return text.split(":")[0]
'''

CHAPTER = '''
"""The made-up chapter's exercises."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.failures import CheckFailed


def _header(header):
    if header("a:b:c") != "a":
        raise CheckFailed("what stands before the first colon", case=f"'a:b:c': got {header('a:b:c')!r}")


def _double(double):
    for number in (0, 1, 5):
        got = double(number)
        if got != 2 * number:
            mistake = "the number is squared" if got == number**2 else ""
            raise CheckFailed("twice the number", case=f"{number}: got {got}, expected {2 * number}", mistake=mistake)


def _triple(triple):
    if triple(5) != 15:
        raise CheckFailed("three times the number", case=f"5: got {triple(5)}, expected 15")


def _scaler(Scaler):
    if Scaler(3).scale(4) != 12:
        raise CheckFailed("the number times the factor", case=f"3, 4: got {Scaler(3).scale(4)}, expected 12")


def _sextuple(sextuple):
    if sextuple(2) != 12:
        raise CheckFailed("six times the number", case=f"2: got {sextuple(2)}, expected 12")


HINTS = ("think", "think of two", "add it to itself")
OBJECT = "llmfromscratch.loading."
EXERCISES = [
    Exercise("1.1", "llmfromscratch.course.sketches.ch01.header", "a header", 1, _header, HINTS, 5),
    Exercise("1.2", OBJECT + "double", "doubling", 2, _double, HINTS, 5, seconds=2),
    Exercise("1.3", OBJECT + "triple", "tripling", 1, _triple, HINTS, 5, seconds=2),
    Exercise("1.4", OBJECT + "Scaler", "scaling", 3, _scaler, HINTS, 5, seconds=2),
    Exercise("1.5", "llmfromscratch.model.sextuple", "six times", 2, _sextuple, HINTS, 5, seconds=2),
]


def halve(number):
    return number // 3


def _mended(halve):
    if halve(8) != 4:
        raise CheckFailed("half of it", case=f"8: got {halve(8)}, expected 4")


def _symptom():
    print("half of 9 is", halve(9))


CLINIC = [BugHunt("1.a", "a poor half", "Halves come out small.", _symptom, halve, _mended)]
'''


def make_package(folder: Path) -> Path:
    """Writes the toy package below FOLDER; returns the folder to put on PYTHONPATH."""
    package = folder / "packages" / "llmfromscratch"
    keep_out = shutil.ignore_patterns("__pycache__", "exercises", "sketches")
    shutil.copytree(REAL / "course", package / "course", ignore=keep_out)
    for name in ("errors.py", "learner_engine.py"):
        shutil.copyfile(REAL / name, package / name)
    files = {
        "__init__.py": INIT, "loading.py": LOADING, "model.py": MODEL,
        "course/exercises/ch01.py": CHAPTER, "course/sketches/ch01.py": SKETCHES, "course/sketches/__init__.py": "",
        "course/exercises/__init__.py": (REAL / "course/exercises/__init__.py").read_text(encoding="utf-8"),
    }  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text.lstrip("\n"), encoding="utf-8")
    return package.parent


def environment(packages: Path, **more: str) -> dict[str, str]:
    """Variables of a process that sees the toy package and nobody's course."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LLMFROMSCRATCH")}
    return {**clean, "PYTHONPATH": str(packages), **more}


def run_python(packages: Path, code: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs code in plain Python, as a file of its own, in the folder CWD."""
    file = cwd / "learner_script.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-P", str(file)],
        cwd=cwd, env=environment(packages, **more), capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip


class Ran:
    """A notebook that was run: what each cell gave."""

    def __init__(self, cells: list):
        self.cells = cells

    def text(self, index: int) -> str:
        """What the cell printed on stdout, and the plain text of what it displayed."""
        outputs = self.cells[index].outputs
        parts = [o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"]
        return "".join(parts + [o.data.get("text/plain", "") for o in outputs if "data" in o])

    def stderr(self) -> str:
        """What any cell wrote on stderr."""
        streams = [o for cell in self.cells for o in cell.outputs if o.output_type == "stream"]
        return "".join(o.text for o in streams if o.name == "stderr")

    def error(self, index: int):
        """The error output of the cell, or None."""
        return next((o for o in self.cells[index].outputs if o.output_type == "error"), None)


def run_notebook(packages: Path, cwd: Path, cells: list[str], **more: str) -> Ran:
    """Runs cells in a real kernel, standing in CWD, going on after errors."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(c).strip()) for c in cells])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True)
    client.resources = {"metadata": {"path": str(cwd)}}
    client.execute(env=environment(packages, **more))
    return Ran(notebook.cells)
