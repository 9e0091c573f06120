"""Finds the learner's own line in a traceback, and says in words what an error means."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType, TracebackType

_PACKAGE = Path(__file__).resolve().parents[1]
_PREFIXES = {Path(sys.prefix), Path(sys.base_prefix)}
_LIBRARIES = {Path(path) for path in sysconfig.get_paths().values()} - _PREFIXES
_NOT_LEARNERS = tuple({_PACKAGE, *_LIBRARIES, *(path.resolve() for path in _LIBRARIES)})

_MEANINGS: dict[type[BaseException], str] = {
    UnboundLocalError: "a name is read before this function has given it a value",
    NameError: "a name is used that nothing defines: is it spelled right, and has the cell that defines it been run?",
    IndexError: "an index lies outside of what it indexes: compare it with the length or the shape",
    KeyError: "a key is looked up that is not there",
    AttributeError: "the object has no such attribute: is it of the type you think it is?",
    ZeroDivisionError: "a division by zero",
    OverflowError: "a number that is too large by far: print it",
    RecursionError: "a function calls itself without end",
    TypeError: "a value has another type than the operation needs, or a call has the wrong arguments",
    AssertionError: "one of your own assertions does not hold",
    UnicodeDecodeError: "bytes are decoded that are no whole characters of UTF-8: some are still to come, or `errors` "
    "has to say what stands for them",
    ImportError: "an import does not work here",
    StopIteration: "an iterator had no further item",
}


def is_learners(code: CodeType) -> bool:
    """Whether code comes from a notebook or a learner's file: not from the package, a library or Python itself."""
    name = code.co_filename
    if name.startswith("<frozen") or name == "<string>":
        return False
    if name.startswith("<"):
        return True
    path = Path(name)
    return not any(path.is_relative_to(folder) for folder in _NOT_LEARNERS)


def frames_of(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The frames of a traceback with their line numbers, outermost first."""
    return list(traceback.walk_tb(trace))


def learners_frame(trace: TracebackType | None) -> tuple[FrameType, int] | None:
    """The innermost frame of the learner's code, with its line number, or None where there is none."""
    own = [(frame, line) for frame, line in frames_of(trace) if is_learners(frame.f_code)]
    return own[-1] if own else None


def describe_line(trace: TracebackType | None) -> str:
    """The learner's own line in words: "line 3 of the cell, in unpermute: `return w[9]`"; "" where there is none."""
    found = learners_frame(trace)
    if found is None:
        return ""
    frame, line = found
    file = frame.f_code.co_filename
    text = linecache.getline(file, line).strip()
    place = f"line {line} of {'the cell' if is_cell(file) else Path(file).name}"
    function = "" if frame.f_code.co_name == "<module>" else f", in {frame.f_code.co_name}"
    return f"{place}{function}" + (f": `{text}`" if text else "")


def is_cell(file: str) -> bool:
    """Whether this file name of a code object stands for a notebook cell."""
    return file.startswith("<") or "ipykernel_" in file


def error_name(error: BaseException) -> str:
    """An exception's name as the learner would write it: `KeyError`, `CheckpointError`, but `struct.error`."""
    kind = type(error)
    module = kind.__module__.lstrip("_")
    known = module in ("builtins", "main__") or module.split(".")[0] == _PACKAGE.name
    return kind.__qualname__ if known else f"{module}.{kind.__qualname__}"


def error_text(error: BaseException) -> str:
    """Name and first line of the message: "KeyError: 'ssm_conv'"."""
    lines = str(error).strip().splitlines()
    return f"{error_name(error)}: {lines[0] if lines else 'no message'}"


def is_about_shapes(error: BaseException) -> bool:
    """Whether torch or numpy says that shapes do not go together."""
    return isinstance(error, RuntimeError | ValueError) and any(
        word in str(error).lower() for word in ("shape", "size of tensor", "sizes", "dimension")
    )


def meaning(error: BaseException) -> str:
    """What an error usually means, in half a sentence; "" where there is nothing more to say than its message."""
    if is_about_shapes(error):
        return "shapes that do not go together: print the shapes of both sides"
    if isinstance(error, AttributeError | TypeError) and "'NoneType' object" in str(error):
        before = "before the dot" if isinstance(error, AttributeError) else "here"
        return (
            f"something {before} is None: a search that found nothing (re.match, re.fullmatch, dict.get) gives None, "
            "and so does a function without `return`"
        )
    return next((text for kind, text in _MEANINGS.items() if isinstance(error, kind)), "")
