"""`build("loading")`: makes the learner's own module of the engine out of what passed its checks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import assembling, exercises, fresh, live_source, progress, recording
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import BuildFailed

_RECORDED = ("source", "helpers", "constants", "imports")


def build(module: str, *, discard_edits: bool = False) -> None:
    """Writes my_engine/MODULE.py: the reference with your definitions in the place of its own, and switches to it.

    module: one of the nine replaceable names, e.g. "loading". What is built is the version of each definition that last
    passed its check; one that the notebook has changed since is named. Exercises without a passed check stay the
    reference's, and are named. The new file is imported and checked in a fresh process before it takes the place of the
    old one. A file that you have edited by hand is never overwritten: `discard_edits=True` moves it aside first.
    Raises BuildFailed; the engine is then what it was.
    """
    course = _course_for(module)
    known = exercises.exercises_of(f"{learner_engine.PACKAGE}.{module}")
    recorded = course.load()["exercises"]
    entries = {e.id: recorded[e.id] for e in known if e.id in recorded}
    target = course.engine / f"{module}.py"
    if not entries:
        print(f"Nothing of {module}.py is yours yet: pass a check first. The engine keeps what it has.")
        return
    if not _may_write(target, module, discard_edits):
        return
    text = _checked_text(module, entries, course.engine)
    _set_aside_edits(target)
    _put_in_place(target, text, module)
    _tell(module, entries, [f"{e.id} {e.name}" for e in known if e.id not in entries])


def _course_for(module: str) -> progress.Course:
    if module not in learner_engine.REPLACEABLE:
        raise BuildFailed(f"{module!r} cannot be built: choose one of {', '.join(learner_engine.REPLACEABLE)}")
    course = progress.current()
    if course is None:
        raise BuildFailed("there is no course folder here to build in: call start() first")
    course.engine.mkdir(parents=True, exist_ok=True)
    return course


def _may_write(target: Path, module: str, discard_edits: bool) -> bool:
    """Whether the file may be replaced; says so where a hand has been at it."""
    if not target.exists() or discard_edits or not assembling.read_head(_text(target)).edited:
        return True
    print(
        f"my_engine/{module}.py was edited by hand, so it stays as it is and nothing was built. The engine uses your "
        f'edited file. build("{module}", discard_edits=True) moves it aside and builds from the notebook.'
    )
    return False


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _checked_text(module: str, entries: Mapping[str, Mapping[str, Any]], engine: Path) -> str:
    """The new file's text, after it passed in a fresh process."""
    dotted = f"{learner_engine.PACKAGE}.{module}"
    text = assembling.assemble(dotted, entries)
    failed = {key: said for key, said in fresh.check_text(dotted, text, list(entries), engine).items() if said}
    if failed:
        said = "\n".join(dict.fromkeys(failed.values()))
        raise BuildFailed(
            f"{module}.py was not built: in a fresh process, without your notebook's cells, "
            f"{', '.join(failed)} did not pass. The engine is what it was before.\n{said}\n"
            "Run the cells of these exercises and their checks again, in order, then build."
        )
    return text


def _set_aside_edits(target: Path) -> None:
    if target.exists() and assembling.read_head(_text(target)).edited:
        aside = progress.free_name(target.parent, f"{target.stem}.edited-{{}}.py")
        target.replace(aside)
        print(f"Your edited file is now my_engine/{aside.name}.")


def _put_in_place(target: Path, text: str, module: str) -> None:
    """Replaces the file and reloads the module; after an error both are what they were."""
    old = target.read_bytes() if target.exists() else None
    progress.write_whole(target, text)
    Path(cache_from_source(str(target))).unlink(missing_ok=True)
    try:
        if learner_engine.active_folder() is None:
            learner_engine.activate(target.parent)
        elif f"{learner_engine.PACKAGE}.{module}" in sys.modules:
            learner_engine.reload_in_place([module])
    except BaseException:
        if old is None:
            target.unlink()
        else:
            target.write_bytes(old)
        raise


def _tell(module: str, entries: Mapping[str, Mapping[str, Any]], theirs: list[str]) -> None:
    yours = ", ".join(f"{key} {entry['name']}" for key, entry in entries.items())
    print(f"Built my_engine/{module}.py, checked in a fresh process.\n  yours: {yours}")
    for key, entry in entries.items():
        if _changed_since(exercises.find(key), entry):
            print(
                f"  the {entry['name']} in your notebook is another now: built is the version that last passed; "
                f'check("{key}", {entry["name"]}) and build again to take the new one'
            )
    if theirs:
        print(f"  still the reference's: {', '.join(theirs)}")
    print("A new LLM(...) uses it; one that exists keeps the code it was made with.")


def _changed_since(exercise: Exercise, entry: Mapping[str, Any]) -> bool:
    """Whether the notebook has a definition of this exercise, and not the one that was recorded."""
    live = vars(sys.modules["__main__"]).get(exercise.name)
    if live is None or not live_source.own_functions(live):
        return False  # nothing of the learner's: not run in this session, or imported from the engine
    try:
        now = recording.record(exercise, live)
    except recording.NotRecordable:
        return True
    return any(now[part] != entry[part] for part in _RECORDED)
