"""Reads a student's recorded code before it is checked again, and refuses what reaches beyond an exercise.

In the second check the code shares a process with what judges it, so Python cannot fence it in. What can be seen is
whether it tries: an exercise computes, and has no need of the system, of other frames, of the course or of `exec`.
This keeps out plain tricks, not a determined attacker (grading.py says what else is done and what is not).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from llmfromscratch import learner_engine


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# modules that compute and hold, beside torch, numpy and what the chapter and the reference import themselves
_HARMLESS = _words(
    "__future__ abc array bisect collections contextlib copy dataclasses decimal enum fractions functools heapq io "
    "itertools json math numbers operator pathlib random re statistics string struct textwrap time typing unicodedata "
    "warnings numpy torch tqdm"
)
_FORBIDDEN_NAMES = _words(
    "exec eval compile __import__ __builtins__ __loader__ __spec__ globals locals breakpoint setattr delattr"
)
_FORBIDDEN_ATTRIBUTES = _words(
    "__globals__ __builtins__ __code__ __closure__ __subclasses__ __bases__ __mro__ __import__ __loader__ __spec__ "
    "f_back f_locals f_globals f_builtins tb_frame tb_next gi_frame cr_frame ag_frame _getframe _current_frames "
    "os sys gc ctypes builtins inspect importlib subprocess signal threading multiprocessing socket"
)
_COURSE = f"{learner_engine.PACKAGE}.course"
_MACHINERY = (_COURSE, f"{learner_engine.PACKAGE}.learner_engine", f"{learner_engine.PACKAGE}._reference")


def reasons(entry: Mapping[str, Any], known_imports: frozenset[str] = frozenset()) -> list[str]:
    """What in an entry of progress.json reaches beyond an exercise, a sentence part each; empty where nothing does.

    known_imports: top-level modules that the chapter and the reference import too.
    """
    found: list[str] = []
    for part, text in _texts(entry):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            found.append(f"{part} that is not Python")
            continue
        found += _wrong_kind(part, tree)
        for node in ast.walk(tree):
            found += _reaches(node, known_imports)
    return list(dict.fromkeys(found))


def imported_modules(source: str) -> set[str]:
    """The top-level modules that a text imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    return {name.partition(".")[0] for node in ast.walk(tree) for name in _imports(node)}


def _texts(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "a definition", entry["source"]
    for part, kind in (("helpers", "a helper"), ("imports", "an import"), ("constants", "a constant")):
        for text in entry[part].values():
            yield kind, text


def _wrong_kind(part: str, tree: ast.Module) -> list[str]:
    """Whether a part of an entry is what the course would have recorded there."""
    kinds: dict[str, tuple[type[ast.stmt], ...]] = {
        "a definition": (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
        "a helper": (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign),
        "an import": (ast.Import, ast.ImportFrom),
        "a constant": (ast.Expr,),
    }
    fits = len(tree.body) == 1 and isinstance(tree.body[0], kinds[part])
    return [] if fits else [f"{part} that the course did not record"]


def _imports(node: ast.AST) -> list[str]:
    """Dotted names that an import statement may load."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _reaches(node: ast.AST, known_imports: frozenset[str]) -> list[str]:
    if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
        return [f"`{node.id}`"]
    if isinstance(node, ast.Attribute) and node.attr in _FORBIDDEN_ATTRIBUTES:
        return [f"`.{node.attr}`"]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [f"`{name}` in a text" for name in _FORBIDDEN_ATTRIBUTES if "_" in name and name in node.value]
    return [f"an import of `{name}`" for name in _imports(node) if not _may_import(name, known_imports)]


def _may_import(name: str, known_imports: frozenset[str]) -> bool:
    top, _, rest = name.partition(".")
    if top == learner_engine.PACKAGE:
        return not name.startswith(_MACHINERY)
    if rest.rpartition(".")[2] in _FORBIDDEN_ATTRIBUTES:
        return False  # from torch import os
    return top in _HARMLESS | (known_imports - _FORBIDDEN_ATTRIBUTES)
