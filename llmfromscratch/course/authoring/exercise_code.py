"""Cuts a function or class out of the package and blanks what a learner is to write.

The package file is parsed, never imported: the code in the notebooks is the reference's even while a learner's own
modules are in use, and no model library is loaded to build a chapter.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmfromscratch.errors import LLMFromScratchError

PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
BEGIN_SOLUTION = "### BEGIN SOLUTION"
END_SOLUTION = "### END SOLUTION"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Body = Callable[[list[str]], Iterator[str]]
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ExerciseError(LLMFromScratchError):
    """An object of the package cannot serve as an exercise; the message says why."""


@dataclass(frozen=True)
class ExerciseCode:
    """One exercise: its name, its solved and its blank cell, the lines of code to write, and whether its file has
    `from __future__ import annotations`, without which its annotations may not mean the same in a notebook."""

    name: str
    solved: str
    blank: str
    lines_to_write: int
    future_annotations: bool


def cut_exercise(dotted: str, blanks: list[str] | None = None, package_folder: Path = PACKAGE_FOLDER) -> ExerciseCode:
    """The exercise made of the object `dotted`, such as "llmfromscratch.loading.unpermute".

    blanks: of a class, the methods to blank; None blanks every method that has a body. A function is blanked whole.
    package_folder: the folder that the first part of `dotted` names.
    Raises ExerciseError when there is no such object, or it has no docstring or nothing to write.
    """
    file, name = _locate(dotted, package_folder)
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = [node for node in tree.body if isinstance(node, _DEFINITIONS) and node.name == name]
    if len(nodes) != 1:
        raise ExerciseError(
            f"{dotted} does not exist: {file.name} has {len(nodes)} functions or classes {name!r} at its top level, "
            "and an exercise needs exactly one."
        )
    node = nodes[0]
    if not ast.get_docstring(node):
        raise ExerciseError(f"{dotted} has no docstring, and the docstring is the exercise's contract. Write it.")
    lines = text.splitlines()
    if any("BEGIN SOLUTION" in line or "END SOLUTION" in line for line in lines):
        raise ExerciseError(f"{file.name} holds solution markers of its own. Remove them: the builder sets them.")
    regions = [_region(function, lines, dotted) for function in _functions_to_blank(node, blanks, dotted)]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = max([node.end_lineno or 0, *(end for _, end in regions)])
    return ExerciseCode(
        name=name,
        solved=_replace(lines, first, last, regions, _solved_body),
        blank=_replace(lines, first, last, regions, _blank_body),
        lines_to_write=sum(_is_line_of_code(lines[index]) for start, end in regions for index in range(start - 1, end)),
        future_annotations=any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body),
    )


def _locate(dotted: str, package_folder: Path) -> tuple[Path, str]:
    """The file that holds the object, and the object's name in it."""
    package, *inner, name = dotted.split(".")
    if package != package_folder.name or not inner:
        raise ExerciseError(f"{dotted} is not an object of a module of {package_folder.name}. Name one that is.")
    file = package_folder.joinpath(*inner).with_suffix(".py")
    if not file.is_file():
        raise ExerciseError(f"{dotted} does not exist: there is no file {'/'.join(inner)}.py in {package_folder.name}.")
    return file, name


def _functions_to_blank(node: ast.stmt, blanks: list[str] | None, dotted: str) -> list[_Function]:
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, _Function)
        if blanks is not None:
            raise ExerciseError(f"{dotted} is a function, which has no methods to choose from. Remove blanks.")
        return [node]
    methods = [statement for statement in node.body if isinstance(statement, _Function)]
    if unknown := sorted(set(blanks or []) - {method.name for method in methods}):
        raise ExerciseError(f"{dotted} has no method {', '.join(unknown)} to blank. It has {_names(methods)}.")
    chosen = [method for method in methods if _has_body(method) and (blanks is None or method.name in blanks)]
    if empty := sorted(set(blanks or []) - {method.name for method in chosen}):
        raise ExerciseError(f"{dotted}: the method {', '.join(empty)} has no body to write. Take it out of blanks.")
    if not chosen:
        raise ExerciseError(f"{dotted} has no method with a body, so there is nothing to write. Choose another object.")
    return chosen


def _names(methods: list[_Function]) -> str:
    return ", ".join(method.name for method in methods) or "none"


def _statements(function: _Function) -> list[ast.stmt]:
    """The function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body


def _has_body(function: _Function) -> bool:
    return any(
        not isinstance(statement, ast.Pass)
        and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in _statements(function)
    )


def _region(function: _Function, lines: list[str], dotted: str) -> tuple[int, int]:
    """First and last line (from 1) of what follows the docstring, with the comments that belong to it."""
    if not _has_body(function):
        raise ExerciseError(f"{dotted} has no body, so there is nothing to write. Choose another object.")
    documented = len(_statements(function)) < len(function.body)
    start = (function.body[0].end_lineno or 0) if documented else _end_of_header(function, lines)
    start += 1
    if _statements(function)[0].lineno < start:
        raise ExerciseError(f"{dotted}: the body of {function.name} begins on the line of its head. Give it its own.")
    while not lines[start - 1].strip():
        start += 1
    end = function.end_lineno or 0
    for number in range(end + 1, len(lines) + 1):
        line = lines[number - 1]
        if not line.strip():
            continue
        if not (line.lstrip().startswith("#") and _indentation(line) > function.col_offset):
            break
        end = number
    return start, end


def _end_of_header(function: _Function, lines: list[str]) -> int:
    """The line of the colon that ends the function's head."""
    text = "\n".join(lines[function.lineno - 1 :]) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            return function.lineno + token.end[0] - 1
    raise AssertionError("a parsed function has a head that ends")


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_line_of_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _replace(lines: list[str], first: int, last: int, regions: list[tuple[int, int]], body: _Body) -> str:
    """Lines first to last, with every region replaced by what `body` makes of its lines."""
    out: list[str] = []
    number = first
    for start, end in regions:
        out += lines[number - 1 : start - 1]
        out += body(lines[start - 1 : end])
        number = end + 1
    out += lines[number - 1 : last]
    return "\n".join(out)


def _solved_body(body: list[str]) -> Iterator[str]:
    indent = " " * _indentation(body[0])
    yield indent + BEGIN_SOLUTION
    yield from body
    yield indent + END_SOLUTION


def _blank_body(body: list[str]) -> Iterator[str]:
    indent = " " * _indentation(body[0])
    yield from (indent + line for line in STUB)
