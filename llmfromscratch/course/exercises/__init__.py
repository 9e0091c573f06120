"""The registry: a file per chapter (`ch01.py`, ...), each with EXERCISES and, where it has any, CLINIC.

A new chapter is a new file; it is found by its name and imported when something of it is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType
from typing import TypeVar

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.errors import LLMFromScratchError

T = TypeVar("T")


class UnknownExercise(LLMFromScratchError):
    """No exercise or bug hunt has this id; the sentence lists those of the chapter."""

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


def chapters() -> list[int]:
    """Numbers of the chapters that have exercises, in order."""
    names = (re.fullmatch(r"ch(\d\d)", module.name) for module in pkgutil.iter_modules(__path__))
    return sorted(int(name[1]) for name in names if name)


def load(chapter: int) -> ModuleType:
    """The file of one chapter."""
    return importlib.import_module(f"{__name__}.ch{chapter:02d}")


def exercises(chapter: int | None = None) -> list[Exercise]:
    """The exercises of one chapter, or of all, in the order they are taught."""
    numbers = chapters() if chapter is None else [chapter]
    return [exercise for number in numbers for exercise in load(number).EXERCISES]


def hunts(chapter: int | None = None) -> list[BugHunt]:
    """The bug hunts of one chapter, or of all."""
    numbers = chapters() if chapter is None else [chapter]
    return [hunt for number in numbers for hunt in getattr(load(number), "CLINIC", [])]


def exercises_of(module: str) -> list[Exercise]:
    """All exercises whose objects stand in MODULE (a dotted path), in the order they are taught."""
    return [exercise for exercise in exercises() if exercise.module == module]


def find(exercise_id: str) -> Exercise:
    """The exercise with this id; raises UnknownExercise with the ids that exist."""
    return _pick(exercise_id, {e.id: e for e in exercises(_chapter_of(exercise_id))}, "exercise")


def find_hunt(hunt_id: str) -> BugHunt:
    """The bug hunt with this id; raises UnknownExercise with the ids that exist."""
    return _pick(hunt_id, {h.id: h for h in hunts(_chapter_of(hunt_id))}, "bug hunt")


def _pick(wanted: str, known: dict[str, T], kind: str) -> T:
    if wanted not in known:
        raise UnknownExercise(f"there is no {kind} {wanted!r}: this chapter has {', '.join(known) or 'none'}")
    return known[wanted]


def _chapter_of(item_id: object) -> int:
    known = chapters()
    found = re.match(r"(\d+)\.", item_id) if isinstance(item_id, str) else None
    if found is None:
        raise UnknownExercise(f"an exercise is named by a text such as '1.3', not by {item_id!r}")
    if int(found[1]) not in known:
        raise UnknownExercise(f"there is no chapter {found[1]} with exercises: {', '.join(map(str, known)) or 'none'}")
    return int(found[1])
