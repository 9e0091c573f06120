"""The set-up files agree with each other, make does what README says, and it mends what it finds broken.

make runs here with a script in Python's place, which records what it was asked to install: nothing is installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llmfromscratch import cli, doctor

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")

# How conda-forge calls what the Python package index calls otherwise, and what conda-forge does not have.
CONDA_NAMES = {"torch": "pytorch", "build": "python-build"}
FROM_PIP = {"playwright", "triton"}  # the latter is there for Linux alone

needs_make = pytest.mark.skipif(
    os.name == "nt" or (shutil.which("make") is None and "CI" not in os.environ), reason="needs make and a POSIX shell"
)


def wanted(*extras: str) -> dict[str, Requirement]:
    """Name -> requirement, of the base and the extras in pyproject.toml."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "only exact pins, and nothing local"
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_every_wanted_package_is_pinned_within_its_range() -> None:
    pinned = pins()
    for name, requirement in wanted("course", "serve", "dev").items():
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} is not met by {name}=={pinned[name]}"


def test_torch_is_no_build_requirement_and_flash_attention_stands_in_the_gpu_extra_alone() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert [Requirement(line).name for line in build] == ["setuptools"]
    having = [name for name, lines in PROJECT["optional-dependencies"].items() if "flash-attn" in " ".join(lines)]
    assert having == ["gpu"]


def test_conda_users_get_the_same_packages_in_the_same_ranges() -> None:
    lines = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (from_pip,) = [line["pip"] for line in lines if isinstance(line, dict)]
    from_conda = [Requirement(line) for line in lines if isinstance(line, str)]
    got = {canonicalize_name(each.name): each.specifier for each in from_conda}
    assert got.pop("pip") == "" and got.pop("python") == PROJECT["requires-python"]
    assert from_pip.pop() == "-e ."
    expected = wanted("course", "serve", "dev")
    assert {Requirement(line) for line in from_pip} == {expected.pop(name) for name in FROM_PIP}
    assert got == {CONDA_NAMES.get(name, name): each.specifier for name, each in expected.items()}


def test_the_oldest_python_is_the_same_everywhere() -> None:
    assert PROJECT["requires-python"] == ">=3.11" and doctor.OLDEST_PYTHON == (3, 11)
    assert "sys.version_info < (3, 11)" in MAKEFILE and "Python 3.11 or newer" in README


def test_the_doctor_looks_for_the_packages_that_pyproject_names() -> None:
    assert {*doctor.NEEDED, "torch"} == set(wanted())
    assert set(doctor.FOR_THE_COURSE) <= {Requirement(line).name for line in PROJECT["optional-dependencies"]["course"]}


def test_no_set_up_file_names_a_host() -> None:
    for name in ["Makefile", "constraints.txt", "environment.yml", "pyproject.toml", ".ci/run", ".gitignore"]:
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_license_is_the_whole_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 195
    assert PROJECT["license"] == "Apache-2.0"


# README


def commands_in_readme() -> list[list[str]]:
    blocks = re.findall(r"^```console\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [re.findall(r'"[^"]*"|\S+', line) for line in lines if line]


def make_targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (help .*)$", MAKEFILE, flags=re.MULTILINE)
    return set(phony.split())


def test_every_command_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    commands = commands_in_readme()
    assert ["make", "lab"] in commands and ["make", "test"] in commands
    for program, first, *rest in commands:
        if program == "make":
            assert first in make_targets() and rest == []
        elif program == "llmfromscratch":
            with pytest.raises(SystemExit) as ended:
                cli.main([first, "--help"])
            assert ended.value.code == 0
            shown = capsys.readouterr().out
            assert all(word in shown for word in rest if word.startswith("--"))
        else:
            assert program == "conda"
    for target in re.findall(r"`make (\w+)", README):
        assert target in make_targets()


def test_every_variable_of_the_makefile_and_the_package_is_in_the_readme_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    of_make = set(re.findall(r"^(\w+) \?=", MAKEFILE, flags=re.MULTILINE))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "llmfromscratch").rglob("*.py")]
    of_package = {name for text in sources for name in re.findall(r'"(LLMFROMSCRATCH_[A-Z_]+)"', text)}
    assert documented == of_make | of_package


def test_the_readme_names_seven_chapters_and_their_modules() -> None:
    rows = re.findall(r"^\| (\d) \| .* \| (`.*`) \|$", README, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    named = {name for _, cell in rows for name in re.findall(r"`(\w+)\.py`", cell)}
    assert named == set(doctor.REPLACEABLE)


@pytest.mark.model
def test_the_python_examples_of_the_readme_run(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(ast.parse(example), "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith("The answer to this question lies in")


# make

FAKE_PYTHON = """\
#!{python}
import os, pathlib, shutil, sys
words = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
    log.write(" ".join(words) + "\\n")
if words[0] == "-c" and "version_info" in words[1]:
    sys.exit(os.environ.get("FAKE_OLD"))
if words[0] == "-c":
    print("runs")
if words[:2] == ["-m", "venv"]:
    shutil.rmtree(words[-1], ignore_errors=True)
    bin = pathlib.Path(words[-1], "bin")
    bin.mkdir(parents=True)
    for name in ["python", "llmfromscratch"]:
        shutil.copy(__file__, bin / name)
if words[:3] == ["-m", "pip", "install"] and words[-1].endswith("+cpu") and os.environ.get("FAKE_PIP_ERROR"):
    sys.exit("ERROR: " + os.environ["FAKE_PIP_ERROR"])
"""


class Clone:
    """A folder with our set-up files, where `make` finds a recording script in Python's place."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder.parent / "log.txt"
        folder.mkdir()
        for name in ["Makefile", "constraints.txt", "pyproject.toml"]:
            shutil.copy(ROOT / name, folder)
        fake = folder.parent / "python"
        fake.write_text(FAKE_PYTHON.format(python=sys.executable), encoding="utf-8")
        fake.chmod(0o755)

    def make(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs make, and keeps in `self.asked` what Python was asked for."""
        self.log.write_text("", encoding="utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_", "EXTRAS"))}
        done = subprocess.run(
            ["make", f"PYTHON={self.folder.parent / 'python'}", *words],
            cwd=self.folder,
            env={**clean, "FAKE_LOG": str(self.log), **environment},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        self.asked = self.log.read_text(encoding="utf-8").splitlines()
        return done

    def installs(self) -> list[str]:
        """What pip was asked to install, call by call."""
        return [line.split(" -c constraints.txt ")[1].strip() for line in self.asked if " install " in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "a clone")


TORCH = f"torch=={pins()['torch']}"
REST = ["setuptools", "--no-build-isolation -e .[course,serve,dev]"]


@needs_make
@pytest.mark.parametrize("target", ["lab", "test", "notebooks"])
def test_each_target_alone_sets_up_fetches_the_model_and_does_its_work(clone: Clone, target: str) -> None:
    plan = clone.make("-n", target).stdout
    steps = [" -m venv ", "torch==", '-e ".[course,serve,dev]"', "models --fetch smollm2-135m-instruct"]
    steps.append({"lab": "llmfromscratch lab", "test": "-m pytest", "notebooks": "authoring.builder"}[target])
    places = [plan.index(step) for step in steps]
    assert places == sorted(places)


@needs_make
def test_make_alone_explains_itself_and_installs_nothing(clone: Clone) -> None:
    done = clone.make()
    assert done.returncode == 0 and clone.asked == []
    assert all(f"make {target}" in done.stdout for target in ["lab", "test", "notebooks"])


@needs_make
def test_the_first_set_up_asks_for_the_pinned_cpu_build_and_the_second_for_nothing(clone: Clone) -> None:
    assert clone.make("setup").returncode == 0
    assert clone.installs() == [f"{TORCH}+cpu", *REST]
    assert clone.make("setup").returncode == 0
    assert clone.installs() == []


@needs_make
def test_an_index_without_a_cpu_build_leads_to_the_default_build_of_the_same_version(clone: Clone) -> None:
    done = clone.make("setup", FAKE_PIP_ERROR="No matching distribution found for torch")
    assert done.returncode == 0 and "offers no CPU build of torch" in done.stdout
    assert clone.installs() == [f"{TORCH}+cpu", TORCH, *REST]


@needs_make
def test_any_other_failure_of_pip_stops_the_set_up_and_shows_it(clone: Clone) -> None:
    done = clone.make("setup", FAKE_PIP_ERROR="no space left on device")
    assert done.returncode != 0 and "no space left on device" in done.stderr
    assert clone.installs() == [f"{TORCH}+cpu"]
    assert clone.make("setup").returncode == 0, "and it can be taken up again"


@needs_make
def test_the_build_and_the_index_of_torch_and_the_extras_can_be_chosen(clone: Clone) -> None:
    clone.make("setup", "TORCH_BUILD=default", "TORCH_INDEX=some-address", "EXTRAS=course")
    extra_index = "--extra-index-url some-address"
    assert clone.installs() == [f"{extra_index} {TORCH}", "setuptools", "--no-build-isolation -e .[course]"]


@needs_make
def test_changed_pins_are_installed(clone: Clone) -> None:
    clone.make("setup")
    later = (clone.folder / ".venv" / "ready.txt").stat().st_mtime + 5
    os.utime(clone.folder / "constraints.txt", (later, later))
    clone.make("setup")
    assert len(clone.installs()) == 3 and not any("-m venv" in line for line in clone.asked)


@needs_make
def test_an_old_python_is_refused_in_one_sentence(clone: Clone) -> None:
    done = clone.make("setup", FAKE_OLD="1")
    assert done.returncode != 0 and "is not a Python 3.11 or newer; name one: make PYTHON=python3.12" in done.stderr
    assert clone.installs() == []


@needs_make
def test_a_python_that_does_not_exist_is_named(clone: Clone) -> None:
    done = clone.make("setup", "PYTHON=no-such-python")
    assert done.returncode != 0 and "'no-such-python' is not a Python 3.11 or newer" in done.stderr


@needs_make
def test_a_venv_that_was_moved_with_its_folder_is_made_anew(clone: Clone) -> None:
    clone.make("setup")
    clone.folder = clone.folder.rename(clone.folder.parent / "moved")
    (clone.folder / ".venv" / "old").write_text("", encoding="utf-8")
    done = clone.make("setup")
    assert done.returncode == 0 and ".venv was set up in another folder" in done.stdout
    assert len(clone.installs()) == 3 and not (clone.folder / ".venv" / "old").exists()
    clone.make("setup")
    assert clone.installs() == []


@needs_make
def test_a_venv_whose_python_is_gone_is_made_anew(clone: Clone) -> None:
    clone.make("setup")
    (clone.folder / ".venv" / "bin" / "python").unlink()
    done = clone.make("setup")
    assert done.returncode == 0 and ".venv has a Python that does not run any more" in done.stdout
    assert len(clone.installs()) == 3


def test_ci_runs_make_test_and_stops_at_the_first_error() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and text.rstrip().endswith("make test")


def test_this_environment_has_the_package_and_its_typing_marker() -> None:
    assert importlib.util.find_spec("llmfromscratch") is not None
    assert (ROOT / "llmfromscratch" / "py.typed").is_file()
    assert importlib.metadata.version("llmfromscratch") == PROJECT["version"]
