"""Nine names may come from a learner's folder, and nothing else; the engine is whole before, during and after."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_package import make_package, run_python

MINE = """
STEP = 1

class Scaler:
    pass

def double(number):
    return "mine"

triple = double
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "my_engine"
    folder.mkdir()
    (folder / "loading.py").write_text(MINE, encoding="utf-8")
    return folder


def test_only_the_nine_names_are_taken_from_the_folder(packages: Path, engine: Path):
    for name in ("errors", "learner_engine", "course", "engine", "config"):
        (engine / f"{name}.py").write_text("raise SystemExit('a stray file was imported')", encoding="utf-8")
    (engine / "loading.py").write_text(MINE, encoding="utf-8")
    ran = run_python(packages, """
        from llmfromscratch import errors, loading, model
        import llmfromscratch.course, llmfromscratch
        print(loading.double(1), model.sextuple(1), hasattr(model, "sextuple"), loading.__name__)
        try:
            import llmfromscratch.config
        except ModuleNotFoundError as error:
            print(error)
    """, engine.parent, LLMFROMSCRATCH_ENGINE="my_engine")  # fmt: skip
    assert ran.stderr == ""
    assert ran.stdout == "mine mine True llmfromscratch.loading\nNo module named 'llmfromscratch.config'\n"


def test_importing_the_course_imports_no_replaceable_module_and_no_torch(packages: Path, tmp_path: Path):
    ran = run_python(packages, """
        import sys
        import llmfromscratch.course
        from llmfromscratch import learner_engine
        names = {f"llmfromscratch.{name}" for name in learner_engine.REPLACEABLE}
        print(sorted(names & set(sys.modules)), "torch" in sys.modules, "numpy" in sys.modules)
    """, tmp_path)  # fmt: skip
    assert ran.stdout == "[] False False\n", ran.stderr


def test_modules_imported_before_are_reloaded_in_place_and_put_back(packages: Path, engine: Path):
    ran = run_python(packages, """
        from llmfromscratch import learner_engine, loading, model
        old = loading.Scaler(2)
        learner_engine.activate("my_engine")
        print(loading.double(1), model.sextuple(1), hasattr(loading, "root_of_nine"), hasattr(loading, "BASE"))
        print(model.is_scaler(loading.Scaler()), model.is_scaler(old), learner_engine.active_folder().name)
        learner_engine.deactivate()
        print(loading.double(1), model.sextuple(1), loading.root_of_nine(), hasattr(loading, "STEP"))
        print(learner_engine.active_folder())
    """, engine.parent)  # fmt: skip
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["mine mine False False", "True False my_engine", "2 6 3.0 False", "None"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def double(:\n", "loading.py, line 1: your loading.py cannot be imported (SyntaxError: invalid syntax)"),
        ("X = 1\nY = 1 / 0\n", "loading.py, line 2: your loading.py cannot be imported (ZeroDivisionError"),
        ("import no_such_thing\n", "line 1: your loading.py cannot be imported (ModuleNotFoundError: No module named"),
        ("X = '\0'\n", "your loading.py cannot be imported (SyntaxError: source code string cannot contain null"),
    ],
)
def test_a_broken_file_is_named_with_its_line_and_the_engine_stays_as_it_was(packages, engine, text, said):
    (engine / "loading.py").write_text(text, encoding="utf-8")
    ran = run_python(packages, """
        from llmfromscratch import learner_engine, loading
        double = loading.double
        try:
            learner_engine.activate("my_engine")
        except ImportError as error:
            print(error)
        print(loading.double is double, loading.root_of_nine(), learner_engine.active_folder())
    """, engine.parent)  # fmt: skip
    assert said in ran.stdout and 'run build("loading", discard_edits=True)' in ran.stdout, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "True 3.0 None"
    fresh = run_python(packages, "from llmfromscratch import loading", engine.parent, LLMFROMSCRATCH_ENGINE=str(engine))
    assert fresh.returncode == 1 and said in fresh.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("folder", "said"),
    [("nowhere", "is not a folder, so no engine"), ("empty", "holds none of loading.py, tokenizer.py")],
)
def test_a_missing_or_wrong_folder_is_answered_with_one_sentence(packages: Path, tmp_path: Path, folder, said):
    (tmp_path / "empty").mkdir()
    code = "import llmfromscratch.learner_engine; print('the doctor can work'); from llmfromscratch import loading"
    ran = run_python(packages, code, tmp_path, LLMFROMSCRATCH_ENGINE=folder)
    assert ran.returncode == 1 and ran.stdout == "the doctor can work\n"
    assert said in ran.stderr.splitlines()[-1] and "LLMFROMSCRATCH_ENGINE" in ran.stderr.splitlines()[-1]


def test_a_file_rewritten_within_the_same_second_is_read_again(packages: Path, engine: Path):
    """Same size and same time stamp, with a bytecode file beside it: the trap of Python's own cache."""
    ran = run_python(packages, """
        import os, pathlib, py_compile
        from llmfromscratch import learner_engine
        learner_engine.activate("my_engine")
        from llmfromscratch import loading
        file = pathlib.Path("my_engine/loading.py")
        stamp = file.stat().st_mtime_ns
        py_compile.compile(str(file))
        file.write_text(file.read_text().replace("mine", "ours"))
        os.utime(file, ns=(stamp, stamp))
        learner_engine.reload_in_place(["loading"])
        print(loading.double(1))
    """, engine.parent)  # fmt: skip
    assert ran.stdout == "ours\n", ran.stderr


def test_the_reference_can_be_had_privately_whichever_engine_is_active(packages: Path, engine: Path):
    ran = run_python(packages, """
        from llmfromscratch import learner_engine
        learner_engine.activate("my_engine")
        from llmfromscratch import loading, model
        private = learner_engine.reference("model")
        print(private.sextuple(1), model.sextuple(1), private is learner_engine.reference("model"))
        print(private.loading is learner_engine.reference("loading"), private.loading is loading)
        print(learner_engine.reference_path("loading").parent.name, learner_engine.reference_hash("loading"))
    """, engine.parent)  # fmt: skip
    import hashlib

    lines = ran.stdout.splitlines()
    assert lines[:2] == ["6 mine True", "True False"], ran.stderr
    digest = hashlib.sha256((packages / "llmfromscratch" / "loading.py").read_bytes()).hexdigest()
    assert lines[2] == f"llmfromscratch {digest}"
