"""Checks a student's recorded code in a process of its own, away from the notebook that it came from.

Job: {"module": dotted path, "file": the assembled text's place, "ids": exercises}. Events: {"checked": [id, failure]}.
The check and the code share this process, so what the checks stand on is compared before and after.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import checking, exercises
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.grading import child as grade_child

_LIBRARIES = (
    "builtins", "math", "operator", "json", "numpy", "numpy.testing", "torch", "torch.testing", "torch.nn.functional",
)  # fmt: skip
_CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"))
_TORCH = Path(getattr(find_spec("torch"), "origin", "torch")).parent
_LONGEST_TEXT = 4000


def main() -> None:
    """Imports the module of the job, runs the checks, and tells of each."""
    job, answer = grade_child.begin()
    file = Path(job["file"])
    learner_engine.activate(file.parent, may_be_empty=True)
    known = [exercises.find(exercise_id) for exercise_id in job["ids"]]
    before = foundations()
    answer("ready")
    failure, module = "", None
    try:
        module = _imported(job["module"], file)
    except BaseException as error:  # noqa: BLE001 - whatever a student's code raises when it is imported
        failure = f"it cannot be imported in a fresh process: {type(error).__name__}: {error}"
    for exercise in known:
        said = failure or _check(exercise, module)
        if changed := changes(before):
            said = failure = f"the code changed {', '.join(changed[:3])}, which the checks stand on"
        answer({"checked": [exercise.id, said[:_LONGEST_TEXT]]})
    answer("finished")
    grade_child.wait_for_the_end()


def _imported(module: str, file: Path) -> ModuleType:
    """The assembled module: one of the engine's under its own name, a sketch under a name that nothing else has."""
    if module.removeprefix(f"{learner_engine.PACKAGE}.") in learner_engine.REPLACEABLE:
        return importlib.import_module(module)
    spec = spec_from_file_location(f"{learner_engine.PACKAGE}_sketch", file)
    assert spec is not None and spec.loader is not None, file
    loaded = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _check(exercise: Exercise, module: ModuleType | None) -> str:
    try:
        checking.run_check(exercise, getattr(module, exercise.name))
    except CheckFailed as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the code may have changed the check itself
        return f"its check could not be run: {type(error).__name__}: {error}"
    return ""


def foundations() -> dict[str, Any]:
    """What the checks stand on: the course, the reference and the functions they compare with, by dotted name."""
    for library in _LIBRARIES:
        importlib.import_module(library)
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        ours = name.startswith((f"{learner_engine.PACKAGE}.course", f"{learner_engine.PACKAGE}._reference"))
        if ours or name in _LIBRARIES:
            found |= _parts(name, module, deep=ours)
    for module_name, class_name in _CLASSES:
        found |= _parts(f"{module_name}.{class_name}", getattr(sys.modules[module_name], class_name), deep=False)
    return found


def _parts(name: str, owner: Any, deep: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in list(vars(owner).items()):
        if isinstance(value, FunctionType):
            found[f"{name}.{key}"] = (value, value.__code__, value.__defaults__)
        elif deep and isinstance(value, type) and value.__module__ == name:
            found[f"{name}.{key}"] = value
            found |= _parts(f"{name}.{key}", value, deep=False)
        elif callable(value):
            found[f"{name}.{key}"] = value
    return found


def changes(before: dict[str, Any]) -> list[str]:
    """The names among BEFORE that now mean something else."""
    now = foundations()
    return [name for name, value in before.items() if not _same(value, now.get(name))]


def _same(old: Any, new: Any) -> bool:
    if not isinstance(new, tuple):
        return old is new
    if isinstance(old, tuple) and all(x is y for x, y in zip(old, new, strict=True)):
        return True
    # torch wraps some of its own functions when a part of it is first imported
    return Path(new[1].co_filename).is_relative_to(_TORCH)


if __name__ == "__main__":
    main()
