"""A fresh process: imports modules that were assembled from a learner's records and runs the exercises' checks there.

Only a process of its own can be stopped whatever it does, and only there is a module surely whole: nothing of the
notebook is left to lean on. `build` uses it before it moves a file into place, and grading to check records again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import assembling, checking, exercises, locating
from llmfromscratch.course.failures import BuildFailed, CheckFailed

START_SECONDS = 60.0  # for the imports; each check has its own seconds on top
_CHILD = "import sys; from llmfromscratch.course import fresh; fresh.run_in_child(sys.argv[1])"


def recheck(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Checks recorded entries (exercise id -> entry of progress.json) again, trusting nothing but their source.

    Returns exercise id -> "" where it passed, else the text of what failed. Exercises of one module are assembled
    together, so that one may use another; what fails there is tried again with only those it uses, so that one bad
    record spoils no other.
    """
    results: dict[str, str] = {}
    for module in dict.fromkeys(entry["module"] for entry in entries.values()):
        mine = {key: entry for key, entry in entries.items() if entry["module"] == module}
        try:
            together = check_text(module, assembling.assemble(module, mine), list(mine))
        except BuildFailed as error:
            together = dict.fromkeys(mine, str(error))
        results |= {key: said and _recheck_alone(module, key, mine) for key, said in together.items()}
    return {key: results[key] for key in entries}


def _recheck_alone(module: str, exercise_id: str, entries: Mapping[str, Mapping[str, Any]]) -> str:
    wanted, chosen = [exercise_id], {}
    while wanted:
        key = wanted.pop()
        if key in entries and key not in chosen:
            chosen[key] = entries[key]
            wanted.extend(entries[key]["uses"])
    try:
        return check_text(module, assembling.assemble(module, chosen), [exercise_id])[exercise_id]
    except BuildFailed as error:
        return str(error)


def check_text(module: str, text: str, exercise_ids: Sequence[str], engine: Path | None = None) -> dict[str, str]:
    """Imports TEXT as MODULE in a fresh process and runs the checks there: exercise id -> "" or what failed.

    engine: a folder of built modules that serve beside the new one. The process is killed at its deadline.
    """
    with tempfile.TemporaryDirectory(prefix="llmfromscratch-") as name:
        folder = Path(name)
        short = module.removeprefix(f"{learner_engine.PACKAGE}.")
        for other in learner_engine.learner_files(engine) if engine else ():
            (folder / f"{other}.py").write_bytes((engine / f"{other}.py").read_bytes())  # type: ignore[operator]
        file = folder / f"{short.replace('.', '_')}.py"
        file.write_text(text, encoding="utf-8", newline="\n")
        job = {"module": module, "file": str(file), "ids": list(exercise_ids)}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        deadline = START_SECONDS + sum(exercises.find(key).seconds + 1 for key in exercise_ids)
        ending = _run(folder, deadline)
        return _results(folder, exercise_ids, ending)


def _run(folder: Path, deadline: float) -> str:
    """Runs the child in a process group of its own; returns in words how it ended, "" where it ended well."""
    environment = {key: value for key, value in os.environ.items() if key != learner_engine.VARIABLE}
    paths = [str(Path(learner_engine.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, str(folder)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            return f"the fresh process was stopped after {deadline:.0f} s"
        finally:
            _kill_group(process)
    if code == 0:
        return ""
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").strip()
    last = text.splitlines()[-1] if text else "it said nothing"
    return f"the fresh process ended with code {code}: {last}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and what it started; what is over already is over."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _results(folder: Path, exercise_ids: Sequence[str], ending: str) -> dict[str, str]:
    results = {}
    file = folder / "results.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        exercise_id, failure = json.loads(line)
        results[exercise_id] = failure
    return {key: results.get(key, ending or "the fresh process ended before this check") for key in exercise_ids}


def run_in_child(folder_name: str) -> None:
    """What the fresh process does: import the module of job.json, run its checks, a line of results.jsonl for each."""
    folder = Path(folder_name)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    learner_engine.activate(folder, may_be_empty=True)
    with (folder / "results.jsonl").open("w", encoding="utf-8") as results, _as_failure(job["ids"]) as failures:
        module = _import(job["module"], Path(job["file"]))
        for exercise_id in job["ids"]:
            exercise = exercises.find(exercise_id)
            failure = ""
            try:
                checking.run_check(exercise, getattr(module, exercise.name))
            except CheckFailed as error:
                failure = str(error)
            results.write(json.dumps([exercise_id, failure]) + "\n")
            results.flush()
    if failures:
        (folder / "results.jsonl").write_text(
            "".join(json.dumps([key, failures[0]]) + "\n" for key in job["ids"]), encoding="utf-8"
        )


@contextlib.contextmanager
def _as_failure(exercise_ids: Sequence[str]) -> Iterator[list[str]]:
    """Turns an error of the import into the result of every exercise."""
    failures: list[str] = []
    try:
        yield failures
    except Exception as error:  # noqa: BLE001 - whatever a learner's module raises when it is imported
        cause = error.__cause__ or error  # the engine's own sentence speaks of a file that is gone in a moment
        line = locating.describe_line(cause.__traceback__)
        said = f"the assembled module cannot be imported: {locating.error_name(cause)}: {cause}"
        failures.append(f"{said}, in {line}" if line else said)


def _import(module: str, file: Path) -> ModuleType:
    if module.removeprefix(f"{learner_engine.PACKAGE}.") in learner_engine.REPLACEABLE:
        return importlib.import_module(module)
    spec = spec_from_file_location(f"{learner_engine.PACKAGE}_sketch", file)  # a sketch: no module of the engine
    if spec is None or spec.loader is None:
        raise BuildFailed(f"{file} cannot be read")
    loaded = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
