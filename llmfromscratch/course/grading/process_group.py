"""Runs one of our own modules in a process that can be killed with everything it started, whatever that does.

    with ProcessGroup("llmfromscratch.course.grading.runner", job, folder, memory=6 * 2**30) as group:
        for event in group.events(seconds=600, quiet_seconds=200): ...

The child gets the job on its standard input and answers with signed lines on its standard output (grade_child.py). The
time between two answers and the time of all are limited, and so is the memory that the whole family holds; at the end
all of the family is killed. On Linux the child adopts orphans, so none of its offspring can leave; elsewhere, and
should the child itself be killed, they are known by a word in their environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

FAMILY_VARIABLE = "_LLMFROMSCRATCH_GRADING"
_LONGEST_LINE = 1 << 20
START_SECONDS = 60.0  # for the imports
_LOOK_EVERY = 0.2  # seconds between two looks at the family's memory


class Stopped(Exception):
    """The family was stopped before it had finished; the text says why."""


class ProcessGroup:
    """A child process and all that comes of it."""

    def __init__(self, module: str, job: Mapping[str, Any], folder: Path, environment: Mapping[str, str], memory: int):
        """module: run with `python -m`; folder: where it starts; memory: bytes, for each process and for all."""
        self.memory, self.forged, self._count = memory, 0, 0
        self._key, self._word = secrets.token_bytes(32), secrets.token_hex(16)
        self._lines: queue.Queue[bytes | None] = queue.Queue(maxsize=1000)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - kill() closes it
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            cwd=folder, env={**environment, FAMILY_VARIABLE: self._word},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        letter = {"key": self._key.hex(), "memory": memory, **job}
        with contextlib.suppress(BrokenPipeError):  # a child that is dead already is seen at its first event
            self.process.stdin.write(json.dumps(letter).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def events(self, seconds: float, quiet_seconds: float) -> Iterator[Any]:
        """What the child says, from "ready" to "finished", these two left out.

        Raises Stopped when it takes longer than SECONDS once it is ready, says nothing for QUIET_SECONDS, holds too
        much memory, or ends.
        """
        self._next(time.monotonic() + START_SECONDS, START_SECONDS)
        deadline = time.monotonic() + seconds
        while True:
            event = self._next(deadline, quiet_seconds)
            if event == "finished":
                return
            yield event

    def _next(self, deadline: float, quiet_seconds: float) -> Any:
        quiet = time.monotonic() + quiet_seconds
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_LOOK_EVERY)
                if line is None:
                    raise Stopped(f"the process ended by itself{self._last_words()}")
                if (letter := self._opened(line)) is not None:
                    return letter["event"]
            now = time.monotonic()
            if now > min(quiet, deadline):
                what = f"it ran for more than {quiet_seconds:.0f} s" if quiet < deadline else "the time was over"
                raise Stopped(what)
            if self._held() > self.memory:
                raise Stopped(f"it held more than {self.memory / 2**30:.1f} GB of memory")

    def _opened(self, line: bytes) -> dict[str, Any] | None:
        """The letter in a line that the child signed; None for one that something else wrote."""
        signature, _, text = line.rstrip(b"\n").partition(b" ")
        expected = sign(self._key, self._count, text).encode("ascii")
        if not hmac.compare_digest(signature, expected):
            self.forged += 1
            return None
        self._count += 1
        return dict(json.loads(text))

    def _read(self, pipe: IO[bytes]) -> None:
        while line := pipe.readline(_LONGEST_LINE):
            self._lines.put(line)
        self._lines.put(None)

    def _held(self) -> int:
        total = 0
        for member in self._family():
            with contextlib.suppress(psutil.Error):
                total += member.memory_info().rss
        return total

    def _last_words(self) -> str:
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - 1000, 0))
        lines = self._said.read().decode("utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _family(self, thorough: bool = False) -> list[psutil.Process]:
        """The child and its offspring that run; thorough: also those known only by the word in their environment."""
        found: set[psutil.Process] = set()
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(self.process.pid)
            found |= {child, *child.children(recursive=True)}
        for other in psutil.process_iter() if thorough else ():
            with contextlib.suppress(psutil.Error, OSError):
                if other.environ().get(FAMILY_VARIABLE) == self._word:
                    found.add(other)
        return [member for member in found if _runs(member)]

    def kill(self) -> None:
        """Ends all of the family. It is stopped first, so that none can start another while the others are killed."""
        for act, spared in ((psutil.Process.suspend, None), (psutil.Process.kill, self.process.pid)):
            seen: set[psutil.Process] = set()
            while new := {p for p in self._family(thorough=True) if p.pid != spared} - seen:
                for member in new:
                    with contextlib.suppress(psutil.Error):
                        act(member)
                seen |= new
        self.process.kill()  # the last, for orphans come to it
        self.process.wait()
        self._close()

    def _close(self) -> None:
        until = time.monotonic() + 5
        while self._reader.is_alive() and time.monotonic() < until:  # it may wait for room in the queue
            with contextlib.suppress(queue.Empty):
                self._lines.get(timeout=0.05)
        # closing a pipe that another thread still reads from would wait for it
        for file in (self.process.stdin, self._said, *([] if self._reader.is_alive() else [self.process.stdout])):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def sign(key: bytes, count: int, text: bytes) -> str:
    """The signature of the line number COUNT of a child."""
    return hmac.new(key, b"%d " % count + text, hashlib.sha256).hexdigest()
