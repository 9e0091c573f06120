"""A made-up registry within the test's own process: exercises of a module that lives in memory only."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from llmfromscratch.course import exercises, progress
from llmfromscratch.course.exercise import Exercise

MODULE = "llmfromscratch.toy"
SOURCE = """
def double(number):
    return 2 * number

def decorated(number):
    return double(number)

class Scaler:
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def scale(self, number):
        return self.factor * number
"""


def engines_module() -> types.ModuleType:
    """The engine's own module of the made-up exercises."""
    module = types.ModuleType(MODULE)
    exec(compile(SOURCE, "/nowhere/llmfromscratch/toy.py", "exec"), vars(module))
    return module


def exercise(check: Callable[[Any], None], name: str = "double", exercise_id: str = "1.3", **more: Any) -> Exercise:
    return Exercise(exercise_id, f"{MODULE}.{name}", "doubling", 2, check, ("a", "b", "c"), 5, **more)


def install(monkeypatch: pytest.MonkeyPatch, *listed: Exercise) -> types.ModuleType:
    """Makes LISTED the registry, and no course folder the current one; returns the engine's module."""
    module = engines_module()
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(exercises, "chapters", lambda: [1])
    monkeypatch.setattr(exercises, "load", lambda chapter: types.SimpleNamespace(EXERCISES=list(listed), CLINIC=[]))
    monkeypatch.setattr(progress, "current", lambda: None)
    return module
