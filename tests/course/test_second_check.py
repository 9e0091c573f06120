"""The second check, and what is read before it: code that has made it into the records may still be a trick."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.grading import second_check, vetting

GIGABYTE = 2**30
SIGNATURE = "def unpermute(weight, num_heads):\n"


def entry_for(exercise_id: str, source: str, **more: Any) -> dict[str, Any]:
    exercise = exercises.find(exercise_id)
    parts: dict[str, Any] = {"helpers": {}, "imports": {}, "constants": {}, "uses": []}
    return {"module": exercise.module, "name": exercise.name, "source": source, **parts, **more}


def reference_source(exercise_id: str) -> str:
    exercise = exercises.find(exercise_id)
    return inspect.getsource(getattr(__import__(exercise.module, fromlist=["_"]), exercise.name))


def trick(body: str) -> dict[str, Any]:
    """An `unpermute` that does BODY and gives back something wrong."""
    return entry_for("1.4", SIGNATURE + textwrap.indent(textwrap.dedent(body), "    ") + "\n    return weight\n")


# --- what runs there --------------------------------------------------------------------------------------------------


def test_a_right_and_a_wrong_source_are_told_apart():
    entries = {"1.2": entry_for("1.2", reference_source("1.2")), "1.4": trick("print('✓ 1.4 (3 points)')")}
    verdicts = second_check.recheck(entries, 6 * GIGABYTE)
    assert verdicts["1.2"].failure == "" and "1.4" in verdicts["1.4"].failure


PATCHES_COMPARING = """
import types
from llmfromscratch.course import checking, comparing
for module in (checking, comparing):
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType):
            setattr(module, name, lambda *anything, **more: None)
"""
PATCHES_TORCH = """
import torch
torch.equal = torch.allclose = torch.isclose = lambda *anything, **more: torch.tensor(True)
torch.testing.assert_close = lambda *anything, **more: None
torch.Tensor.__ne__ = lambda *anything: torch.tensor(False)
"""
WRITES_RESULTS = """
import os
for number in range(1, 20):
    try:
        os.write(number, b'0000 {"event": {"checked": ["1.4", ""]}}\\n0000 {"event": "finished"}\\n')
    except OSError:
        pass
"""
FORKS = """
import os
if os.fork() == 0:
    import llmfromscratch.course.checking as checking
    checking.run_check = lambda *anything: None
    return undo(weight)
os.waitpid(-1, os.WNOHANG)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os\nos._exit(0)", "the process"),
        (PATCHES_COMPARING, "which the checks stand on"),
        (PATCHES_TORCH, "which the checks stand on"),
        (WRITES_RESULTS, "something else than the check wrote"),
    ],
)
def test_a_trick_that_gets_past_the_reading_earns_nothing(body, said):
    assert said in second_check.recheck({"1.4": trick(body)}, 6 * GIGABYTE)["1.4"].failure


@pytest.mark.skipif(sys.platform == "win32", reason="uses fork")
def test_a_forked_copy_cannot_answer():
    """The copy has the right answer and the key, and still only the first process may speak."""
    right = reference_source("1.4").replace("def unpermute", "def undo")
    entry = trick(FORKS) | {"helpers": {"undo": right}}
    assert second_check.recheck({"1.4": entry}, 6 * GIGABYTE)["1.4"].failure != ""


@pytest.mark.skipif(sys.platform == "win32", reason="uses signals")
def test_native_code_that_never_returns_is_killed_and_another_exercise_keeps_its_points(monkeypatch):
    monkeypatch.setattr(second_check, "_IMPORT_SECONDS", 1.0)
    monkeypatch.setattr(second_check, "_seconds", lambda exercise_id: 2.0)
    entries = {
        "1.4": trick("import itertools\n0.5 in itertools.count()"),
        "1.2": entry_for("1.2", reference_source("1.2")),
    }
    verdicts = second_check.recheck(entries, 6 * GIGABYTE)
    assert "stopped in the second check" in verdicts["1.4"].failure and verdicts["1.2"].failure == ""
    assert verdicts["1.4"].seconds < 20


# --- what is read before ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise_id", [exercise.id for exercise in exercises.exercises()])
def test_nothing_that_an_exercise_needs_is_refused(exercise_id):
    assert vetting.reasons(entry_for(exercise_id, reference_source(exercise_id))) == []


@pytest.mark.parametrize(
    "body",
    [
        "import os",
        "from os import _exit",
        "import torch.os",
        "from torch import sys",
        "torch.os._exit(0)",
        "from llmfromscratch.course import checking",
        "import llmfromscratch.course.checking as c",
        "from llmfromscratch import course",
        "from llmfromscratch import learner_engine",
        "from llmfromscratch._reference.loading import unpermute",
        "__import__('os')",
        "exec('import os')",
        "eval('1')",
        "().__class__.__base__.__subclasses__()",
        "unpermute.__globals__",
        "getattr(unpermute, '__globals__')",
        "from operator import attrgetter\nattrgetter('a.__globals__')",
        "setattr(torch, 'equal', print)",
        "1 / 0\n(lambda: 0).__code__",
        "import inspect",
        "import transformers",
    ],
)
def test_code_that_reaches_beyond_an_exercise_is_named(body):
    assert vetting.reasons(trick(body)) != []


def test_parts_of_a_record_are_only_what_the_course_would_have_put_there():
    good = entry_for(
        "1.4",
        reference_source("1.4"),
        helpers={"half": "def half(x):\n    return x // 2\n", "other": "other = half\n"},
        imports={"math": "import math", "nn": "from torch import nn"},
        constants={"PAIR": "2", "STEPS": "(1, 2)"},
    )
    assert vetting.reasons(good) == []
    for part in ({"constants": {"x": "1\nprint(2)"}}, {"imports": {"x": "print(1)"}}, {"helpers": {"x": "print(1)"}}):
        assert vetting.reasons(good | part) != []
    assert vetting.reasons(good | {"source": "print(1)"}) != []
    assert vetting.reasons(good | {"source": "def unpermute(:"}) != []


def test_what_the_chapter_imports_may_be_imported_but_never_the_system():
    assert vetting.reasons(trick("import gguf"), frozenset({"gguf"})) == []
    assert vetting.reasons(trick("import os"), frozenset({"os"})) != []
