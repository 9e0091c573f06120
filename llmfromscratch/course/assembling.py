"""The text of a built module: the reference's source with the learner's definitions in the place of its own.

The head of the file says what it was built from, so that a later edit by hand, or a reference that has changed since,
can be told without anything else at hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import exercises
from llmfromscratch.course.failures import BuildFailed
from llmfromscratch.course.live_source import definition_lines

_HEAD_END = "# ---- end of head ----\n"


@dataclass(frozen=True)
class Head:
    """What the head of a built file says: `edited` where the rest is no longer what was built."""

    reference_hash: str
    yours: tuple[str, ...]
    edited: bool


def read_head(text: str) -> Head:
    """The head of a file in my_engine; one without a head was written by hand and counts as edited."""
    head, mark, body = text.partition(_HEAD_END)
    said = dict(re.findall(r"^# (reference sha256|body sha256|yours): (.*)$", head, re.MULTILINE))
    if not mark or len(said) < 3:
        return Head("", (), edited=True)
    ids = tuple(part.split()[0] for part in said["yours"].split(", "))
    return Head(said["reference sha256"], ids, edited=said["body sha256"] != learner_engine.text_hash(body))


def assemble(module: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The source of MODULE (a dotted path) with the recorded ENTRIES (exercise id -> entry) in it, head included.

    Raises BuildFailed where two entries need two versions of one helper, or the reference no longer has a definition.
    """
    text = learner_engine.reference_path(module).read_text(encoding="utf-8")
    body = _body(text, entries)
    return _head(module, text, body, entries) + body


def _head(module: str, text: str, body: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    known = exercises.exercises_of(module)
    yours = ", ".join(f"{e.id} {e.name}" for e in known if e.id in entries)
    theirs = ", ".join(f"{e.id} {e.name}" for e in known if e.id not in entries)
    return (
        "# Built from your notebook by build(); a change made here by hand is kept; its better place is the notebook.\n"
        f"# yours: {yours}\n# still the reference's: {theirs or 'none of the exercises'}\n"
        f"# reference sha256: {learner_engine.text_hash(text)}\n"
        f"# body sha256: {learner_engine.text_hash(body)}\n{_HEAD_END}"
    )


def _body(text: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    lines, tree = text.rstrip("\n").split("\n"), ast.parse(text)
    nodes = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    placed = []
    for exercise_id, entry in entries.items():
        if entry["name"] not in nodes:
            raise BuildFailed(
                f"the engine has no {entry['name']} any more (exercise {exercise_id}): take the new version of the "
                "chapter, write the exercise there, and build again"
            )
        placed.append((*definition_lines(nodes[entry["name"]]), exercise_id, entry))
    written: dict[str, tuple[str, str]] = {}
    edits = [(_after_imports(tree), _after_imports(tree), _needed("imports", entries, written))]
    for first, last, exercise_id, entry in sorted(placed, key=lambda place: place[0]):
        edits.append((first - 1, last, _definition(exercise_id, entry, written)))
    for first, last, new in reversed(edits):
        lines[first:last] = new
    return "\n".join(lines) + "\n"


def _after_imports(tree: ast.Module) -> int:
    """The number of lines up to the end of the imports (or the docstring) that the module starts with."""
    end = 0
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, ast.Import | ast.ImportFrom) and not is_docstring:
            break
        end = node.end_lineno or end
    return end


def _definition(exercise_id: str, entry: Mapping[str, Any], written: dict[str, tuple[str, str]]) -> list[str]:
    """The lines of one exercise: the constants and helpers it is first to use, then the learner's definition."""
    one = {exercise_id: entry}
    lines = _needed("constants", one, written)
    for helper in _needed("helpers", one, written):
        lines += ["", "", *helper.strip("\n").split("\n")] if lines else helper.strip("\n").split("\n")
    lines += ["", ""] if lines else []
    return [*lines, f"# exercise {exercise_id}, yours", *entry["source"].strip("\n").split("\n")]


def _needed(part: str, entries: Mapping[str, Mapping[str, Any]], written: dict[str, tuple[str, str]]) -> list[str]:
    """What the entries ask for that is not written yet; one name with two meanings is refused."""
    new = []
    for exercise_id, entry in entries.items():
        for name, text in entry[part].items():
            earlier, earlier_id = written.get(name, (None, ""))
            if earlier is None:
                written[name] = (text, exercise_id)
                new.append(f"{name} = {text}" if part == "constants" else text)
            elif earlier != text:
                raise BuildFailed(
                    f"exercises {earlier_id} and {exercise_id} use `{name}` in two versions: run both cells as they "
                    f'are now, then check("{earlier_id}", ...) and check("{exercise_id}", ...), and build again'
                )
    return new
