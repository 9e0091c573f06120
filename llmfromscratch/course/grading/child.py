"""The child's side of a ProcessGroup: its limits, its job, and the line it answers on."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from llmfromscratch.course.grading.process_group import sign

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_LARGEST_FILE = 4 * 2**30


def begin() -> tuple[dict[str, Any], Callable[[Any], None]]:
    """Limits this process and reads its job; returns the job and the function that answers.

    The answers go out on a copy of standard output that no other program inherits; whatever else is printed is lost.
    """
    job = json.loads(sys.stdin.buffer.readline())
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.close(nothing)
    _adopt_orphans()
    _limit(job["memory"])
    return job, _answering(channel, bytes.fromhex(job.pop("key")))


def wait_for_the_end() -> None:
    """Stays until the parent kills this process with all that it started."""
    sys.stdin.buffer.read()


def _answering(channel: int, key: bytes) -> Callable[[Any], None]:
    count, me = 0, os.getpid()

    def answer(event: Any) -> None:
        nonlocal count
        if os.getpid() != me:  # a copy that the student's code has forked off
            os._exit(1)
        text = json.dumps({"event": event}).encode("ascii")
        line = memoryview(sign(key, count, text).encode("ascii") + b" " + text + b"\n")
        while line:
            line = line[os.write(channel, line) :]
        count += 1

    return answer


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _limit(memory: int) -> None:
    """Bounds address space and file sizes of this process and its children, where the system can."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
