"""`llmfromscratch lab` as a learner starts it, and a browser to use it with; neither leaves a process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from chromium import chromium
from notebook_page import NotebookPage

from llmfromscratch import learner_engine
from llmfromscratch.course import progress

ROOT = Path(__file__).resolve().parents[2]
EVERY_TWO_SECONDS = {"autosaveInterval": 2}  # JupyterLab's own interval is two minutes


# for the module: while Playwright runs, the main thread has an event loop, which tests of other modules would meet
@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium."""
    with chromium() as running:
        yield running


@pytest.fixture
def open_notebook(browser, tmp_path, smollm2_gguf) -> Iterator[Callable[[Path], NotebookPage]]:
    """Starts the lab on a course folder and opens one of its notebooks."""
    with ExitStack() as stack:

        def open_it(notebook: Path) -> NotebookPage:
            address = stack.enter_context(running_lab(notebook.parent, tmp_path / "jupyter"))
            page = stack.enter_context(browser.new_page(viewport={"width": 1400, "height": 1000}))
            stack.callback(page.screenshot, path=tmp_path / "last_view.png")  # to look at when a test has failed
            return NotebookPage(page, notebook, address)

        yield open_it


@contextmanager
def running_lab(course: Path, private: Path) -> Iterator[str]:
    """Runs `llmfromscratch lab` with settings, data and run-time files of its own; gives its address with the token."""
    settings = private / "config" / "lab" / "user-settings" / "@jupyterlab" / "docmanager-extension"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text(json.dumps(EVERY_TWO_SECONDS), encoding="utf-8")
    places = {f"JUPYTER_{kind.upper()}_DIR": str(private / kind) for kind in ("config", "data", "runtime")}
    command = [sys.executable, "-m", "llmfromscratch", "lab", "--no-browser", "--dir", str(course)]
    with (private / "log.txt").open("w", encoding="utf-8") as log:
        lab = psutil.Popen(command, cwd=ROOT, env=environment(places), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield wait_for_address(lab, private)
        finally:
            stop(lab)


def environment(places: dict[str, str]) -> dict[str, str]:
    """A learner's environment: nothing in it names a course or an engine."""
    kept = {
        name: value for name, value in os.environ.items() if name not in (learner_engine.VARIABLE, progress.VARIABLE)
    }
    return {**kept, **places}


def wait_for_address(lab: psutil.Popen, private: Path) -> str:
    """The server writes its port and token into a file when it listens."""
    until = time.monotonic() + 60
    while time.monotonic() < until and lab.poll() is None:
        for file in (private / "runtime").glob("jpserver-*.json"):
            try:
                server = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:  # not whole yet
                continue
            return f"{server['url']}lab/tree/{{}}?token={server['token']}"
        time.sleep(0.1)
    pytest.fail(f"the lab does not answer:\n{(private / 'log.txt').read_text(encoding='utf-8')}")


def stop(lab: psutil.Popen) -> None:
    """Asks the lab to end, as Ctrl-C or closing the terminal does, and ends what is left of it and its kernels."""
    family = [lab, *lab.children(recursive=True)] if lab.is_running() else []
    if lab.poll() is None:
        lab.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=20)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    assert not left, f"the lab left processes behind: {left}"
