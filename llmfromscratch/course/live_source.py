"""The source text of a function or class that lives in a notebook.

`inspect.getsource` fails for classes of notebook cells. What works is to look at the code objects of the live methods,
to find their cell in `linecache`, and to accept a definition there only if it compiles to the very code that lives.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from llmfromscratch.course import locating

# the flag of code compiled under `from __future__ import annotations`
_STRING_ANNOTATIONS = annotations.compiler_flag


class NoSource(Exception):
    """The source cannot be found, or is no longer what the live object was made from; the text is a sentence."""


@dataclass(frozen=True)
class Definition:
    """A definition as it was typed, decorators included, and the namespace that its global names live in."""

    name: str
    source: str
    namespace: dict[str, Any]


def find_definition(obj: Any) -> Definition:
    """The definition of a live function or class; raises NoSource where there is none to be trusted."""
    name = getattr(obj, "__name__", type(obj).__name__)
    if name == "<lambda>":
        raise NoSource("a lambda has no source that can be taken along: write it with def")
    functions = own_functions(obj)
    if not functions and isinstance(_undecorated(obj), FunctionType):
        raise NoSource(_why_not(name, obj))
    if not functions and not inspect.isclass(obj):
        raise NoSource(f"`{name}` is a {type(obj).__name__}, not a function or class written with def or class")
    if inspect.isclass(obj):
        namespace = vars(sys.modules[obj.__module__])
    else:
        namespace, name = functions[0].__globals__, functions[0].__code__.co_name
        _refuse_closure(name, functions[0])
    for text in _texts(functions):
        for source in _definitions(text, name):
            if _is_source_of(source, obj, functions):
                return Definition(name, source, namespace)
    raise NoSource(_why_not(name, obj))


def _why_not(name: str, obj: Any) -> str:
    if inspect.isclass(obj):
        return (
            f"the source of class `{name}` cannot be found as it is now: write the whole class in one cell, at the "
            "left margin, change no method of it from outside, and run that cell again"
        )
    return f"the source of `{name}` cannot be found: write it with def in a cell of the notebook, at its left margin"


def own_functions(obj: Any) -> list[FunctionType]:
    """The plain functions behind a function (under its decorators) or in a class's own body.

    Methods that a decorator or a metaclass generated are left out: they have no source.
    """
    values = list(vars(obj).values()) if inspect.isclass(obj) else [obj]
    found = [_undecorated(part) for value in values for part in _parts(value)]
    functions = [function for function in found if isinstance(function, FunctionType)]
    return [function for function in functions if locating.is_learners(function.__code__)]


def _parts(value: Any) -> Iterator[Any]:
    """A method, or what stands behind a property, a cached property, a static or a class method."""
    yield getattr(value, "__func__", value)
    for name in ("fget", "fset", "fdel", "func"):
        yield getattr(value, name, None)


def _undecorated(value: Any) -> Any:
    return inspect.unwrap(value) if callable(value) else value


def _refuse_closure(name: str, function: FunctionType) -> None:
    free = [variable for variable in function.__code__.co_freevars if variable != "__class__"]
    if free:
        raise NoSource(
            f"`{name}` is a closure over {', '.join(f'`{variable}`' for variable in free)}: define it at the left "
            "margin of a cell, not inside another function (and give a decorator's inner function functools.wraps)"
        )


def _texts(functions: list[FunctionType]) -> Iterator[str]:
    """Where to look: the files that the code objects name, then every notebook cell, the newest first."""
    files = list(dict.fromkeys(function.__code__.co_filename for function in functions))
    for file in files:
        linecache.checkcache(file)
        yield "".join(linecache.getlines(file))
    for file in reversed(list(linecache.cache)):
        if locating.is_cell(file):
            yield "".join(linecache.getlines(file))


def _definitions(text: str, name: str) -> Iterator[str]:
    """The top-level definitions of NAME in a text, in the body of a cell magic too (`%%time` compiles that itself)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            yield definition_text(text, node)
        for call in ast.walk(node) if isinstance(node, ast.Expr) else ():
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "run_cell_magic":
                body = call.args[-1]
                yield from _definitions(str(body.value), name) if isinstance(body, ast.Constant) else ()


def definition_text(text: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The lines of a definition, from its first decorator to its end."""
    first, last = definition_lines(node)
    return "\n".join(text.split("\n")[first - 1 : last]) + "\n"


def definition_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[int, int]:
    """First and last line of a definition, counted from 1, decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first, node.end_lineno or node.lineno


def _is_source_of(source: str, obj: Any, functions: list[FunctionType]) -> bool:
    flags = functions[0].__code__.co_flags & _STRING_ANNOTATIONS if functions else 0
    try:
        compiled = compile(source, "<recorded>", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    parts = _codes(compiled)
    if inspect.isclass(obj) and not _same_names(source, obj, functions):
        return False
    return all(any(_same_code(function.__code__, part) for part in parts) for function in functions)


def _codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return inner + [deeper for part in inner for deeper in _codes(part)]


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects do the same, places in files aside."""
    if (a.co_code, a.co_names, a.co_varnames, a.co_freevars, a.co_name) != (
        b.co_code, b.co_names, b.co_varnames, b.co_freevars, b.co_name,
    ):  # fmt: skip
        return False
    if len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else repr(x) == repr(y) or x == y
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _same_names(source: str, cls: type, functions: list[FunctionType]) -> bool:
    """Whether the class body in SOURCE declares the fields of the live class, and all its methods are live ones."""
    node = ast.parse(source).body[0]
    body = node.body if isinstance(node, ast.ClassDef) else []
    methods = {part.name for part in body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = {part.target.id for part in body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
    return methods <= {function.__code__.co_name for function in functions} and fields == set(
        inspect.get_annotations(cls)
    )
