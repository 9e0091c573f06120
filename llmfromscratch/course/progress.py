"""The course folder and what it remembers: `progress.json`, written whole or not at all.

    {"version": 1, "exercises": {"1.3": entry}, "hints": {"1.3": 2}, "hunts": {"1.a": time}, "speeds": {"model": 41}}

An entry is what `recording.record` made of a learner's source, plus points and time.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmfromscratch import learner_engine
from llmfromscratch.errors import LLMFromScratchError

VARIABLE = "LLMFROMSCRATCH_COURSE"
MARKER = ".llmfromscratch"
VERSION = 1
_PARTS = ("exercises", "hints", "hunts", "speeds")
_TEXTS = ("source", "sha256", "reference_hash", "module", "name")
_MAPPINGS = ("helpers", "imports", "constants")


@dataclass(frozen=True)
class Course:
    """A learner's folder: notebooks, `my_engine/`, `progress.json`."""

    folder: Path

    @property
    def engine(self) -> Path:
        """Where built modules go: the active engine's folder, else `my_engine`."""
        return learner_engine.active_folder() or self.folder / "my_engine"

    @property
    def file(self) -> Path:
        """The file of the learner's progress."""
        return self.folder / "progress.json"

    def load(self) -> dict[str, Any]:
        """The progress so far; a damaged file is set aside, with a sentence, and an empty one takes its place."""
        try:
            return read(self.file)
        except ValueError as error:
            aside = free_name(self.folder, "progress.damaged-{}.json")
            self.file.replace(aside)
            print(f"progress.json was damaged ({error}). It is now {aside.name}, and your progress starts anew.")
            return _empty()

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Reads, changes and writes the progress, alone among all notebooks that are open."""
        try:
            with FileLock(self.folder / ".progress.lock"):
                content = self.load()
                change(content)
                write_whole(self.file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise LLMFromScratchError(
                f"your progress cannot be written to {self.folder} ({error.strerror or error}): "
                f"free some space, make the folder writable, or set {VARIABLE} to another one"
            ) from error

    def save_exercise(self, exercise_id: str, entry: dict[str, Any]) -> None:
        """Keeps the record of a check that passed."""
        self.update(lambda content: content["exercises"].update({exercise_id: entry}))


def read(file: Path) -> dict[str, Any]:
    """The content of a progress.json, an empty one where there is none; ValueError with the reason where it is damaged.

    A file of a later version is refused with LLMFromScratchError, so that nothing in it is lost.
    """
    if not file.exists():
        return _empty()
    content = json.loads(file.read_text(encoding="utf-8"))  # a JSONDecodeError is a ValueError, so is a wrong byte
    if not isinstance(content, dict) or not isinstance(content.get("version"), int):
        raise ValueError("it has no version")
    if content["version"] > VERSION:
        raise LLMFromScratchError(
            f"{file} was written by a later version of the course (format {content['version']}, this one reads "
            f"{VERSION}): update llmfromscratch"
        )
    content = {**_empty(), **content}
    for part in _PARTS:
        if not isinstance(content[part], dict):
            raise ValueError(f"its {part} are not a table")
    for exercise_id, entry in content["exercises"].items():
        _check_entry(exercise_id, entry)
    return content


def _check_entry(exercise_id: str, entry: Any) -> None:
    wrong = not isinstance(entry, dict) or not isinstance(entry.get("points"), int)
    wrong = wrong or not all(isinstance(entry.get(key), str) for key in _TEXTS)
    wrong = wrong or not isinstance(entry.get("uses"), list)
    wrong = wrong or not all(
        isinstance(entry.get(key), dict) and all(isinstance(value, str) for value in entry[key].values())
        for key in _MAPPINGS
    )
    if wrong:
        raise ValueError(f"its entry for exercise {exercise_id} is not whole")


def _empty() -> dict[str, Any]:
    return {"version": VERSION, **{part: {} for part in _PARTS}}


def now() -> str:
    """The time as it is recorded: ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_whole(file: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old content or the new one, never a part."""
    part = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def free_name(folder: Path, pattern: str) -> Path:
    """The first of pattern.format(1), pattern.format(2), ... that FOLDER does not have yet."""
    number = 1
    while (folder / pattern.format(number)).exists():
        number += 1
    return folder / pattern.format(number)


_active: Course | None = None


def use(course: Course | None) -> None:
    """Makes COURSE the one that check, build, hint and board work on."""
    global _active
    _active = course


def current() -> Course | None:
    """The course in use: what start() chose, else the one this process stands in; None where there is none."""
    return _active or find()


def find() -> Course | None:
    """The course named by LLMFROMSCRATCH_COURSE, else the one around the current folder; makes nothing."""
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named).expanduser().absolute()
        return Course(folder) if folder.is_dir() else None
    here = Path.cwd()
    return next((Course(folder) for folder in (here, *here.parents) if is_course(folder)), None)


def is_course(folder: Path) -> bool:
    """Whether FOLDER is a learner's course folder."""
    return (folder / MARKER).exists() or (folder / "progress.json").exists()


def make(folder: Path) -> Course:
    """Makes FOLDER a course folder, with a marker and an empty `my_engine`; one that is there is left as it is."""
    (folder / "my_engine").mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER).exists():
        write_whole(folder / MARKER, "This folder is a course of llmfromscratch; its progress is in progress.json.\n")
    return Course(folder)
