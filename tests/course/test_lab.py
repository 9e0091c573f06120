"""`llmfromscratch lab`: the learner's copies are made once and never overwritten, and JupyterLab opens on them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from llmfromscratch.cli import main
from llmfromscratch.course import lab, progress
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER


def contents(folder: Path) -> dict[str, str]:
    """The hash of each notebook in the folder."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.ipynb")}


@pytest.fixture
def chapters(tmp_path: Path) -> Path:
    folder = tmp_path / "chapters"
    folder.mkdir()
    (folder / "01_loading.ipynb").write_bytes(b"first version\r\n")
    (folder / "02_tokenizer.ipynb").write_bytes(b"second chapter")
    return folder


def test_each_chapter_is_copied_once_byte_for_byte(chapters, tmp_path):
    mine = tmp_path / "my_course"
    assert len(lab.prepare(mine, chapters)) == 2
    assert contents(mine) == contents(chapters) and progress.is_course(mine)
    assert lab.prepare(mine, chapters) == []


@pytest.mark.parametrize("written", [True, False])
def test_a_new_version_of_a_chapter_goes_beside_the_copy_once_and_says_so(chapters, tmp_path, written):
    """A copy in which nothing was written yet is the learner's all the same."""
    mine = tmp_path / "my_course"
    lab.prepare(mine, chapters)
    if written:
        (mine / "01_loading.ipynb").write_bytes(b"first version and my answers")
    before = contents(mine)
    (chapters / "01_loading.ipynb").write_bytes(b"new version")
    name = f"01_loading.new-{hashlib.sha256(b'new version').hexdigest()[:8]}.ipynb"
    (said,) = lab.prepare(mine, chapters)
    assert name in said and "Yours is as it was" in said
    assert contents(mine) == before | {name: hashlib.sha256(b"new version").hexdigest()}
    assert lab.prepare(mine, chapters) == []
    (mine / name).unlink()  # looked at, and thrown away
    assert lab.prepare(mine, chapters) == [] and contents(mine) == before


def test_neither_answers_nor_an_edited_new_version_are_overwritten_when_the_memory_is_lost(chapters, tmp_path):
    mine = tmp_path / "my_course"
    lab.prepare(mine, chapters)
    (mine / "01_loading.ipynb").write_bytes(b"my answers")
    (chapters / "01_loading.ipynb").write_bytes(b"new version")
    lab.prepare(mine, chapters)
    beside = next(mine.glob("01_loading.new-*.ipynb"))
    beside.write_bytes(b"my answers in the new version")
    before = contents(mine)
    for memory in ("", "[]", '{"01_loading.ipynb": 3}', None):
        if memory is None:
            (mine / ".chapters.json").unlink()
        else:
            (mine / ".chapters.json").write_text(memory, encoding="utf-8")
        lab.prepare(mine, chapters)
        assert contents(mine) == before


def test_a_copy_that_the_learner_threw_away_is_made_again(chapters, tmp_path):
    mine = tmp_path / "my_course"
    lab.prepare(mine, chapters)
    (mine / "02_tokenizer.ipynb").unlink()
    (said,) = lab.prepare(mine, chapters)
    assert said.startswith("02_tokenizer.ipynb is your copy") and contents(mine) == contents(chapters)


def test_an_empty_course_is_a_course(tmp_path):
    (tmp_path / "chapters").mkdir()
    assert lab.prepare(tmp_path / "my_course", tmp_path / "chapters") == []
    assert progress.is_course(tmp_path / "my_course")


def test_without_a_clone_one_sentence_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(lab, "PACKAGE_FOLDER", tmp_path / "site-packages" / "llmfromscratch")
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "--no-browser"]) == 1
    said = capsys.readouterr().err
    assert "clone the repository" in said and len(said.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named_in_a_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["lab", "--no-browser", "--dir", str(tmp_path / "file" / "my_course")]) == 1
    assert "--dir" in capsys.readouterr().err


def test_the_folder_is_the_one_named_then_the_variables_then_the_one_around_us_then_the_clones(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    assert lab.course_folder() == PACKAGE_FOLDER.parent / "my_course"
    inside = progress.make(tmp_path / "theirs").folder / "deeper"
    inside.mkdir()
    monkeypatch.chdir(inside)
    assert lab.course_folder() == tmp_path / "theirs"
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "by_variable"))
    assert lab.course_folder() == tmp_path / "by_variable"
    assert lab.course_folder(tmp_path / "named") == tmp_path / "named"


def test_the_board_prints_the_course_of_a_folder_and_makes_nothing(tmp_path, capsys):
    assert main(["board", "--dir", str(tmp_path / "none")]) == 0
    assert "loading" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


# --- the real thing ---------------------------------------------------------------------------------------------------


class Lab:
    """`llmfromscratch lab` in a home and a terminal of its own."""

    def __init__(self, home: Path, cache: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "LLMFROM"))}
        environment |= {"HOME": str(home), "JUPYTER_TOKEN": "secret", "LLMFROMSCRATCH_CACHE": str(cache)}
        environment["PYTHONPATH"] = str(PACKAGE_FOLDER.parent)
        command = [sys.executable, "-m", "llmfromscratch", "lab", "--no-browser", "--port", str(self.port)]
        self.terminal, theirs = os.openpty()
        self.process = subprocess.Popen(
            [*command, "--dir", str(home / "my_course")],
            env=environment,
            cwd=home,
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)
        self.output = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal's end
            while piece := os.read(self.terminal, 4096):
                self.output += piece

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode("utf-8"))

    def ask(self, path: str, data: bytes | None = None, token: str = "secret") -> dict:
        address = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(address, data, {"Authorization": f"token {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def wait_until_up(self) -> None:
        for _ in range(300):
            try:
                self.ask("/api/status")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.said()
                time.sleep(0.2)
        raise AssertionError(self.said())

    def said(self) -> str:
        return self.output.decode("utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        for _ in range(100):
            if text in self.said():
                return
            time.sleep(0.1)
        raise AssertionError(self.said())


def kernel_says(runtime: Path, kernel: str, code: str) -> str:
    """What a running kernel prints for a line of code."""
    from jupyter_client.blocking import BlockingKernelClient

    client = BlockingKernelClient(connection_file=str(runtime / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels()
    printed: list[str] = []
    try:
        client.wait_for_ready(timeout=60)
        hook = lambda message: printed.append(message["content"].get("text", ""))  # noqa: E731
        client.execute_interactive(code, timeout=60, output_hook=hook)
    finally:
        client.stop_channels()
    return "".join(printed).strip()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal of POSIX")
def test_a_real_jupyterlab_opens_on_the_copies_and_ends_with_ctrl_c(tmp_path, smollm2_gguf):
    running = Lab(tmp_path, smollm2_gguf.parents[2])
    try:
        running.wait_until_up()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            running.ask("/api/contents", token="guess")
        listed = {entry["name"] for entry in running.ask("/api/contents")["content"]}
        copies = {file.name for file in (PACKAGE_FOLDER.parent / "chapters").glob("*.ipynb")}
        assert copies <= listed
        plugin = running.ask("/lab/api/settings/@jupyter-widgets/jupyterlab-manager:plugin")
        assert plugin["schema"]["properties"]["saveState"]["default"] is True
        kernel = running.ask("/api/kernels", b"{}")["id"]
        (runtime,) = tmp_path.rglob("kernel-*.json")
        code = "import sys, llmfromscratch; print(sys.executable, llmfromscratch.__file__)"
        assert kernel_says(runtime.parent, kernel, code) == f"{sys.executable} {PACKAGE_FOLDER / '__init__.py'}"
        running.type("\x03")
        running.wait_for("Shut down this Jupyter server")
        running.type("y\n")
        assert running.process.wait(30) == 0
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
    assert not runtime.exists(), "the kernel outlived the lab"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", running.port)) != 0
    assert "Traceback" not in running.said(), running.said()
    assert not list(tmp_path.rglob("jupyter_*config*")), "the user's own configuration was written to"
