"""Stops a learner's code that loops or eats memory, as far as a running kernel allows.

On POSIX, in the main thread, an alarm interrupts; elsewhere a watchdog thread raises in the thread that is checked.
Neither can stop a long call into native code before it returns; only a process of its own can (see fresh.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

MEMORY = 4 * 2**30  # bytes that a check may add to what the process has
_PER_THREAD = 2**27  # addresses that a new thread reserves for its stack and its heap


class TimeUp(BaseException):
    """Raised in the learner's code when its time is over; no Exception, so that `except Exception` lets it through."""


@contextlib.contextmanager
def limited(seconds: float, memory: int = MEMORY) -> Iterator[None]:
    """Runs the block for at most SECONDS (TimeUp) and with at most MEMORY more bytes (MemoryError, on Linux)."""
    in_main = threading.current_thread() is threading.main_thread()
    timer = _alarm(seconds) if in_main and hasattr(signal, "setitimer") else _watchdog(seconds)
    with _address_space(memory), timer:
        yield


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    rings = 0

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rings
        rings += 1
        if rings > 1:  # a bare `except:` swallowed the last one: now every line raises
            _raise_on_every_line(frame)
        raise TimeUp

    tracer = sys.gettrace()
    old_handler = signal.signal(signal.SIGALRM, ring)
    old_delay, old_interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if rings > 1:
            sys.settrace(tracer)
        if old_delay:  # someone else's alarm goes on with what is left of it
            left = old_delay - (time.monotonic() - started)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001), old_interval)


def _raise_on_every_line(frame: FrameType | None) -> None:
    """From now on each line of the frames that are running raises, those of an `except:` block too."""
    own = str(Path(__file__).parent)

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if event == "line":
            raise TimeUp
        return trace

    while frame is not None and not frame.f_code.co_filename.startswith(own):
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(lambda frame, event, argument: None)  # frames trace only while a tracer is set


@contextlib.contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    thread = threading.get_ident()
    finished = threading.Event()

    def watch() -> None:
        wait = seconds
        while not finished.wait(wait):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeUp))
            wait = 0.5

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


@contextlib.contextmanager
def _address_space(memory: int) -> Iterator[None]:
    """Bounds the process's address space at what it has now plus MEMORY bytes, where it can."""
    statm = Path("/proc/self/statm")
    if sys.platform != "linux" or not statm.exists() or Path("/dev/nvidiactl").exists():
        yield  # CUDA reserves far more addresses than it uses, so that no bound on them would mean anything
        return
    import resource

    used = int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    used += _PER_THREAD * (os.cpu_count() or 1)  # torch may start its threads in the block
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bounds = [used + memory, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
