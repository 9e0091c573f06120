"""`llmfromscratch lab`: JupyterLab on the learner's own copies of the chapters.

A copy is made once. When its chapter changes later, the new version is put beside it under a name of its own; nothing
in the learner's folder is ever overwritten. JupyterLab's settings come from a folder of this package that is put on its
search path, so that the user's own configuration stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from llmfromscratch import hub
from llmfromscratch.course import progress
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER
from llmfromscratch.errors import CheckpointError, LLMFromScratchError

FOLDER = "my_course"
_MEMORY = ".chapters.json"
_CLONE = ("chapters", "llmfromscratch", "pyproject.toml")
_CONFIG = Path(__file__).parent / "lab_config"


class LabError(LLMFromScratchError):
    """The lab cannot be opened; the sentence says why and what to do."""


def find_clone() -> Path | None:
    """The clone of the repository that this package or the current folder stands in."""
    places = (PACKAGE_FOLDER.parent, Path.cwd(), *Path.cwd().parents)
    return next((place for place in places if all((place / part).exists() for part in _CLONE)), None)


def course_folder(named: Path | None = None) -> Path:
    """The learner's folder, there or not: the one named, the one we stand in, or my_course in the clone or here."""
    if named is not None:
        return named.expanduser().absolute()
    if os.environ.get(progress.VARIABLE):
        return Path(os.environ[progress.VARIABLE]).expanduser().absolute()
    found = progress.find()
    return found.folder if found else (find_clone() or Path.cwd()) / FOLDER


def prepare(folder: Path, chapters: Path) -> list[str]:
    """Gives the learner's folder a copy of each chapter that it has none of; returns a sentence for each thing done.

    A chapter that has changed since it was copied comes as `01_loading.new-<hash>.ipynb` beside the copy, once.
    """
    progress.make(folder)
    seen = _read_memory(folder / _MEMORY)
    done = []
    for chapter in sorted(chapters.glob("*.ipynb")):
        content = chapter.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        copy = folder / chapter.name
        if _write_new(copy, content):
            done.append(f"{chapter.name} is your copy of the chapter: write in it, it is never overwritten.")
        elif digest not in seen.get(chapter.name, []) and copy.read_bytes() != content:
            beside = folder / f"{chapter.stem}.new-{digest[:8]}{chapter.suffix}"
            _write_new(beside, content)
            done.append(f"{chapter.name} has a new version: it is beside yours as {beside.name}. Yours is as it was.")
        seen[chapter.name] = list(dict.fromkeys([*seen.get(chapter.name, []), digest]))
    progress.write_whole(folder / _MEMORY, json.dumps(seen, indent=1) + "\n")
    return done


def _write_new(file: Path, content: bytes) -> bool:
    """Writes a file that is not there yet; False, and nothing done, where it is."""
    try:
        with file.open("xb") as target:
            target.write(content)
    except FileExistsError:
        return False
    return True


def _read_memory(file: Path) -> dict[str, list[str]]:
    """Which versions of each chapter the learner has been given, as SHA-256; nothing where that was lost."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and all(isinstance(v, list) for v in content.values()) else {}


def open_lab(folder: Path, browser: bool = True, port: int | None = None) -> int:
    """Prepares the folder, fetches the model, and runs JupyterLab until it ends; returns its exit code.

    port: where to listen; the next free one where it is taken. Raises LabError.
    """
    if find_spec("jupyterlab") is None:
        raise LabError('JupyterLab is not installed: pip install "llmfromscratch[course]"')
    clone = find_clone()
    if clone is None and not progress.is_course(folder):
        raise LabError("there are no chapters here: clone the repository of llmfromscratch, and call this in the clone")
    try:
        for sentence in prepare(folder, clone / "chapters") if clone else []:
            print(sentence)
    except OSError as error:
        raise LabError(f"your course cannot be kept in {folder} ({error}): name another folder with --dir") from error
    notebooks = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        print(f"There is no chapter yet: {folder} is an empty course.")
    _fetch_model()
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    command += [f"--LabApp.default_url=/lab/tree/{notebooks[0].name}"] if notebooks else []
    command += [] if browser else ["--no-browser"]
    command += [f"--port={port}"] if port is not None else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        print("You are root here, as in many containers, so JupyterLab runs as root too.")
        command.append("--allow-root")
    return _run(command, folder)


def _fetch_model() -> None:
    try:
        hub.resolve(hub.DEFAULT_MODEL)
    except CheckpointError as error:
        print(f"The lab opens without its model: {error}", file=sys.stderr)


def environment() -> dict[str, str]:
    """Variables for JupyterLab: our settings on its search path, this Python's kernel first, this package found."""
    made = dict(os.environ)
    made["JUPYTER_CONFIG_PATH"] = _joined(str(_CONFIG), made.get("JUPYTER_CONFIG_PATH"))
    made["PYTHONPATH"] = _joined(str(PACKAGE_FOLDER.parent), made.get("PYTHONPATH"))
    made["JUPYTER_PREFER_ENV_PATH"] = "1"
    return made


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join([first, rest]) if rest else first


def _run(command: list[str], folder: Path) -> int:
    """Runs a program in the foreground. Ctrl-C is its own affair, and a request to end is passed on to it."""
    process = subprocess.Popen(command, cwd=folder, env=environment())
    with _handed_over(process):
        return process.wait()


@contextmanager
def _handed_over(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, frame: FrameType | None) -> None:
        process.terminate()

    # the terminal sends Ctrl-C to both of us: JupyterLab asks and ends, and we wait for it
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
