"""The second check: recorded sources alone, in a fresh process family, with an answer that only the check can sign."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import assembling, exercises
from llmfromscratch.course.failures import BuildFailed
from llmfromscratch.course.grading.private_place import private_place
from llmfromscratch.course.grading.process_group import ProcessGroup, Stopped

_IMPORT_SECONDS = 30.0  # for the student's module; each check has its own seconds on top


@dataclass(frozen=True)
class Verdict:
    """failure: "" where the check passed, else what it said; seconds: since the process was started."""

    failure: str
    seconds: float


def recheck(entries: Mapping[str, Mapping[str, Any]], memory: int) -> dict[str, Verdict]:
    """Checks entries (exercise id -> entry of progress.json) once more.

    Those of one module stand in one file, as they would after build(), and share a process. Those that do not pass
    there have another chance alone, with the exercises that they use: another one may have been in their way.
    """
    verdicts: dict[str, Verdict] = {}
    for module in dict.fromkeys(entry["module"] for entry in entries.values()):
        mine = {key: entry for key, entry in entries.items() if entry["module"] == module}
        verdicts |= _check(module, mine, list(mine), memory)
        for key in mine:
            if verdicts[key].failure and len(mine) > 1:
                verdicts |= _check(module, _with_used(key, mine), [key], memory)
    return {key: verdicts[key] for key in entries}


def _with_used(key: str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    chosen: dict[str, Mapping[str, Any]] = {}
    wanted = [key]
    while wanted:
        key = wanted.pop()
        if key in entries and key not in chosen:
            chosen[key] = entries[key]
            wanted.extend(entries[key]["uses"])
    return chosen


def _seconds(exercise_id: str) -> float:
    return exercises.find(exercise_id).seconds + 1


def _check(module: str, entries: Mapping[str, Mapping[str, Any]], ids: list[str], memory: int) -> dict[str, Verdict]:
    began = time.monotonic()
    try:
        text = assembling.assemble(module, entries)
    except (BuildFailed, SyntaxError) as error:
        return {key: Verdict(f"it cannot be put into {module}: {error}", 0.0) for key in ids}
    verdicts: dict[str, Verdict] = {}
    longest = max(_seconds(key) for key in ids)
    with private_place() as place:
        engine = place.work / "engine"
        engine.mkdir()
        file = engine / f"{module.removeprefix(f'{learner_engine.PACKAGE}.').replace('.', '_')}.py"
        file.write_text(text, encoding="utf-8", newline="\n")
        job = {"module": module, "file": str(file), "ids": ids}
        with ProcessGroup("llmfromscratch.course.grading.recheck", job, place.work, place.environment, memory) as group:
            ending = "the process ended before this check was through"
            try:
                for event in group.events(_IMPORT_SECONDS + len(ids) * longest, _IMPORT_SECONDS + longest):
                    key, failure = event["checked"]
                    verdicts[key] = Verdict(failure, time.monotonic() - began)
            except Stopped as stopped:
                ending = f"stopped in the second check: {stopped}"
            if group.forged:
                ending, verdicts = "something else than the check wrote where its results are read", {}
    return {key: verdicts.get(key, Verdict(ending, time.monotonic() - began)) for key in ids}
