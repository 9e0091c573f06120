"""Running what cannot be trusted: nothing gets out, nothing stays, everything ends in time.

The notebooks here are tiny and have nothing of the course in them, so that each runs in a few seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from llmfromscratch.course.grading import notebook_run
from llmfromscratch.course.grading.notebook_run import Run, run_notebook

GIGABYTE = 2**30
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="uses fork and signals")
pytestmark = pytest.mark.slow
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")


def run(*sources: str, seconds: float = 60.0, memory: float = 2.0) -> Run:
    cells = [new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources, 1)]
    return run_notebook(new_notebook(cells=cells), seconds, int(memory * GIGABYTE))


def alive(pid_file: Path) -> list[int]:
    pids = [int(word) for word in pid_file.read_text(encoding="utf-8").split()]
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_cell_that_raises_does_not_keep_the_next_from_running():
    made = run("1 / 0", "raise ValueError('seen')", "raise SystemExit(3)", "exit()", "raise KeyError('last')")
    assert made.raised["cell-1"][0] == "ZeroDivisionError" and made.raised["cell-2"] == ("ValueError", "seen")
    assert made.raised["cell-5"][0] == "KeyError" and made.over == ""


@posix_only
def test_a_cell_that_cannot_be_interrupted_is_killed_and_the_others_run():
    deaf = "import signal, itertools\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})\n"
    began = time.monotonic()
    made = run(
        "x = 1", deaf + "0.5 in itertools.count()  # native code that never ends", "raise ValueError(x)", seconds=15
    )
    assert time.monotonic() - began < 25
    assert made.stopped == {"cell-2": "it ran for more than 5 s"} and made.raised["cell-3"] == ("ValueError", "1")


def test_a_cell_that_ends_the_kernel_is_left_out_of_another_run():
    made = run("import os\nos._exit(0)", "raise ValueError('still here')")
    assert made.stopped == {"cell-1": "it ended the kernel"} and made.raised["cell-2"][1] == "still here"


@posix_only
def test_a_cell_that_kills_the_process_above_the_kernel_costs_its_own_work_only():
    made = run(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)", "raise ValueError('here')"
    )
    assert list(made.stopped) == ["cell-1"] and made.raised["cell-2"][1] == "here"


def test_asking_for_too_much_memory_fails_in_its_cell():
    made = run("x = bytearray(1 << 42)", "raise ValueError('still here')")
    assert made.raised["cell-1"][0] == "MemoryError" and made.raised["cell-2"][1] == "still here"


@posix_only
def test_memory_spread_over_many_processes_is_counted_together():
    bomb = (
        "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = b'x' * (200 << 20)\n        time.sleep(60)\n        os._exit(0)\ntime.sleep(60)"
    )
    made = run(bomb, "raise ValueError('still here')", memory=1.0)
    assert made.stopped == {"cell-1": "it held more than 1.0 GB of memory"}
    assert made.raised["cell-2"][1] == "still here"


@linux_only
def test_no_process_outlives_the_run_however_it_hides(tmp_path):
    """Double fork, a session of its own, no environment: still the family's."""
    pids, sleeper = tmp_path / "pids", tmp_path / "sleeper.py"
    sleeper.write_text(
        f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(600)", "utf-8"
    )
    sleep = [sys.executable, str(sleeper)]
    hide = (
        "import os, subprocess, time\n"
        f"subprocess.Popen({sleep}, start_new_session=True, env={{}})\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        subprocess.Popen({sleep}, env={{}})\n        time.sleep(600)\n    os._exit(0)\n"
        f"while not os.path.exists({str(pids)!r}) or len(open({str(pids)!r}).read().split()) < 2:\n    time.sleep(0.1)"
    )
    made = run(hide)
    assert made.over == "" and not made.raised and len(pids.read_text(encoding="utf-8").split()) == 2
    assert alive(pids) == []


@posix_only
def test_a_fork_bomb_is_put_out():
    bomb = "import os\nfor _ in range(6):\n    os.fork()\nwhile True:\n    pass"
    before = len(psutil.pids())
    made = run(bomb, seconds=9)
    assert list(made.stopped) == ["cell-1"]
    deadline = time.monotonic() + 30  # the dead have to be collected, which takes the system a moment under load
    while len(psutil.pids()) >= before + 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(psutil.pids()) < before + 20


def test_the_notebook_sees_nothing_of_the_one_who_grades_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write = "import pathlib\npathlib.Path('here.txt').touch()\n(pathlib.Path.home() / 'there.txt').touch()"
    seen = "[*os.environ.values(), os.path.expanduser('~'), tempfile.gettempdir()]"
    made = run(write, f"import os, tempfile\nraise ValueError('|'.join({seen}))")
    assert list(made.raised) == ["cell-2"], made.raised
    *others, home, temporary = made.raised["cell-2"][1].split("|")
    assert "hunter2" not in others and str(Path.home()) not in others
    assert home.startswith(str(tmp_path)) and temporary.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _deep(file: Path) -> None:
    file.write_text("[" * 100_000, encoding="utf-8")


def _half(file: Path) -> None:
    file.write_text('{"version": 1, "exercises": {"1.1": {"source": 3}}}', encoding="utf-8")


def _later(file: Path) -> None:
    file.write_text('{"version": 99}', encoding="utf-8")


@posix_only
@pytest.mark.parametrize("trap", [_fifo, _endless, _deep, _half, _later])
def test_a_progress_file_that_is_a_trap_is_not_stepped_into(trap, tmp_path):
    trap(tmp_path / "progress.json")
    assert notebook_run._recorded(tmp_path) == {}
