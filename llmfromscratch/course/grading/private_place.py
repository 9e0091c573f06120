"""A place where a stranger's code may run: a folder with a home of its own, and an environment without the caller's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmfromscratch import hub
from llmfromscratch.course import progress
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER
from llmfromscratch.errors import CheckpointError

_PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SYSTEMROOT", "COMSPEC",
    "PATHEXT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX",
)  # fmt: skip
_HOMES = (
    "HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR",
    "MPLCONFIGDIR", "HF_HOME",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """work: the empty folder to start in; course: the course folder; environment: variables for the process."""

    work: Path
    course: Path
    environment: dict[str, str]


@contextmanager
def private_place() -> Iterator[Place]:
    """Makes a place and removes it afterwards, whatever was left in it."""
    folder = Path(tempfile.mkdtemp(prefix="llmfromscratch-grade-"))
    try:
        work, course, home = folder / "work", folder / "course", folder / "home"
        for new in (work, course, home):
            new.mkdir()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        for name in _HOMES:
            environment[name] = str(home)
        environment |= {
            "PYTHONPATH": str(PACKAGE_FOLDER.parent),
            "PYTHONNOUSERSITE": "1",
            "JUPYTER_PREFER_ENV_PATH": "1",
            "HF_HUB_OFFLINE": "1",
            hub.CACHE_VARIABLE: str(_models(folder / "models")),
            progress.VARIABLE: str(course),
        }
        yield Place(work, course, environment)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _models(copy: Path) -> Path:
    """A cache folder with a copy of the course's model, so that the user's own cannot be spoilt."""
    known = hub.known_models()[hub.DEFAULT_MODEL]
    try:
        hub.resolve(hub.DEFAULT_MODEL)
    except CheckpointError:
        return copy  # a notebook that needs the model says so where it does
    inside = copy / known.folder.relative_to(hub.cache_folder())
    if known.file.is_file():
        inside.mkdir(parents=True)
        shutil.copyfile(known.file, inside / known.file.name)
    else:
        shutil.copytree(known.folder, inside)
    return copy
