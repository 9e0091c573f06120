"""The built wheel, installed into an environment that has never seen this folder, works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(command: list[str], cwd: Path) -> str:
    """Standard output of a command that must succeed, run outside of this folder and without its learner's engine."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LLMFROMSCRATCH_ENGINE")
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the build leaves nothing behind here."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "llmfromscratch", source / "llmfromscratch", ignore=shutil.ignore_patterns("__pycache__"))
    for other in ["tests", "chapters", "solutions", "my_course"]:
        (source / other).mkdir()
        (source / other / "stray.py").write_text("", encoding="utf-8")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)], source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a new environment. It sees what we depend on, but not our own editable install:
    a folder that a .pth file names is searched for modules, and its own .pth files are not read."""
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    places = {"base": str(home), "platbase": str(home)}
    programs = Path(sysconfig.get_path("scripts", "venv", places))
    python = programs / ("python.exe" if os.name == "nt" else "python")
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], home)
    packages = Path(sysconfig.get_path("purelib", "venv", places))
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def test_the_wheel_holds_every_module_and_the_typing_marker_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = (path for path in (ROOT / "llmfromscratch").rglob("*") if "__pycache__" not in path.parts)
    sources = (
        path for path in files if path.suffix in {".py", ".json", ".html", ".css", ".js"} or path.name == "py.typed"
    )
    expected = {path.relative_to(ROOT).as_posix() for path in sources}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_the_metadata_says_license_python_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert any(name.endswith("LICENSE") for name in archive.namelist())
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert {"course", "hub", "serve", "gpu", "dev"} == set(metadata.get_all("Provides-Extra") or [])


def test_importing_the_installed_package_is_light_and_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import sys, llmfromscratch; print(llmfromscratch.__file__); print(*sys.modules)"
    file, modules = run([str(installed / "python"), "-c", code], tmp_path).splitlines()
    assert Path(file).is_relative_to(installed.parent)
    heavy = {"torch", "numpy", "transformers", "matplotlib", "IPython", "jinja2", "regex", "safetensors", "tqdm"}
    assert heavy & set(modules.split()) == set()


def test_the_public_names_can_be_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import llmfromscratch as l; print([getattr(l, name).__name__ for name in l.__all__] == list(l.__all__))"
    assert run([str(installed / "python"), "-c", code], tmp_path).strip() == "True"


def test_the_doctor_of_the_wheel_runs_anywhere(installed: Path, tmp_path: Path, smollm2_gguf: Path) -> None:
    assert "model" in run([str(installed / "llmfromscratch"), "doctor"], tmp_path)


@pytest.mark.model
def test_the_installed_program_answers_with_the_real_model(installed: Path, tmp_path: Path, smollm2_gguf: Path) -> None:
    command = ["generate", "Why is the sky blue?", "--max-tokens", "12", "--dtype", "float32"]
    answer = run([str(installed / "llmfromscratch"), *command], tmp_path)
    assert answer.startswith("The answer to this question lies in the intricate dance")
    assert answer == run([str(installed / "python"), "-m", "llmfromscratch", *command], tmp_path)
