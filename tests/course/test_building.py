"""build(): the learner's module takes the place of the reference's, safely; seen in real kernels and processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_package import make_package, run_notebook, run_python

START = """
from llmfromscratch.course import *
start()
"""
DOUBLE = """
STEP = 1

def add(a, b):
    return a + b * STEP

def double(number: int) -> int:
    return add(number, number)
"""
SCALER = """
class Scaler:
    def __init__(self, factor):
        super().__init__()
        self.__factor = factor

    def scale(self, number):
        return self.__factor * number
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def course(tmp_path: Path) -> Path:
    folder = tmp_path / "my_course"
    folder.mkdir()
    (folder / ".llmfromscratch").touch()
    return folder


def test_a_learner_builds_and_the_engine_uses_it_at_once_and_after_a_restart(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "from llmfromscratch import loading, model\nbefore = loading\nprint(loading.__file__)",
        DOUBLE,
        'check("1.2", double)',
        SCALER,
        'check("1.4", Scaler)',
        'build("loading")',
        "print(loading is before, loading.double(4), loading.add(1, 2), model.sextuple(1), loading.__file__)\n"
        "print(model.is_scaler(loading.Scaler(2)), loading.double.__code__.co_filename)",
        "board()",
    ])  # fmt: skip
    assert ran.stderr() == ""
    assert [ran.error(index) for index in range(len(ran.cells))] == [None] * len(ran.cells)
    assert ran.text(3) == "✓ 1.2 doubling (2 points)\n"
    assert "yours: 1.2 double, 1.4 Scaler" in ran.text(6)
    assert "still the reference's: 1.3 triple" in ran.text(6)
    first, second = ran.text(7).splitlines()
    assert first == f"True 8 3 6 {course / 'my_engine' / 'loading.py'}"
    assert second == f"True {course / 'my_engine' / 'loading.py'}"
    assert "partly yours (2 of 3)" in ran.text(8)

    again = run_python(packages, """
        from llmfromscratch.course import start
        start()
        from llmfromscratch import loading, model
        print(loading.STEP, loading.root_of_nine(), model.sextuple(1))
    """, course)  # fmt: skip
    assert again.stderr == ""
    assert again.stdout.splitlines()[-1] == "1 3.0 6"

    by_variable = run_python(
        packages, "from llmfromscratch import loading\nprint(loading.STEP)", course.parent,
        LLMFROMSCRATCH_ENGINE=str(course / "my_engine"),
    )  # fmt: skip
    assert by_variable.stdout == "1\n"


def test_what_the_notebook_has_changed_since_its_check_is_not_built_and_said(packages: Path, course: Path):
    changed = "def double(number):\n    return number * 2 + 0"
    ran = run_notebook(packages, course, [
        START, DOUBLE, 'check("1.2", double)', SCALER, 'check("1.4", Scaler)', 'build("loading")',
        changed, 'build("loading")', "from llmfromscratch import loading\nprint(loading.add(1, 2))",
        'check("1.2", double)\nbuild("loading")', "STEP = 2", DOUBLE.replace("STEP = 1", ""), 'build("loading")',
    ])  # fmt: skip
    said = (
        "  the double in your notebook is another now: built is the version that last passed; "
        'check("1.2", double) and build again to take the new one\n'
    )
    assert "another now" not in ran.text(5) and "another now" not in ran.text(9)
    assert said in ran.text(7) and ran.text(7).count("another now") == 1
    assert ran.text(8) == "3\n"
    assert said in ran.text(12)


def test_nothing_is_said_of_a_notebook_that_has_not_defined_anything_yet(packages: Path, course: Path):
    run_notebook(packages, course, [START, DOUBLE, 'check("1.2", double)'])
    ran = run_notebook(packages, course, [
        START + "\nfrom llmfromscratch.loading import triple as double", 'build("loading")',
    ])  # fmt: skip
    assert "yours: 1.2 double" in ran.text(1) and "another now" not in ran.text(1)


def test_a_built_file_reads_like_the_reference_with_the_learners_code_in_it(packages: Path, course: Path):
    run_notebook(packages, course, [START, DOUBLE, 'check("1.2", double)', 'build("loading")'])
    text = (course / "my_engine" / "loading.py").read_text(encoding="utf-8")
    reference = (packages / "llmfromscratch" / "loading.py").read_text(encoding="utf-8")
    learners = (
        "STEP = 1\n\n\ndef add(a, b):\n    return a + b * STEP\n\n\n"
        "# exercise 1.2, yours\ndef double(number: int) -> int:\n    return add(number, number)\n"
    )
    theirs = 'def double(number: int) -> int:\n    """Twice the number."""\n    return 2 * number\n'
    assert text.partition("# ---- end of head ----\n")[2] == reference.replace(theirs, learners)


def test_a_file_edited_by_hand_is_kept_until_the_learner_says_otherwise(packages: Path, course: Path):
    file = course / "my_engine" / "loading.py"
    run_notebook(packages, course, [START, DOUBLE, 'check("1.2", double)', 'build("loading")'])
    edited = file.read_text(encoding="utf-8").replace("STEP = 1", "STEP = 1  # mine")
    file.write_text(edited, encoding="utf-8")
    ran = run_notebook(packages, course, [
        START, "board()", 'build("loading")', "from llmfromscratch import loading\nprint(loading.double(3))",
        f'print(open({str(file)!r}, encoding="utf-8").read().count("# mine"))',
        'build("loading", discard_edits=True)', "print(loading.double(3))",
    ])  # fmt: skip
    assert "edited by hand" in ran.text(1)
    assert "discard_edits=True" in ran.text(2)
    assert (ran.text(3), ran.text(4)) == ("6\n", "1\n")
    assert "Your edited file is now my_engine/loading.edited-1.py" in ran.text(5)
    assert (course / "my_engine" / "loading.edited-1.py").read_text(encoding="utf-8") == edited
    assert "# mine" not in file.read_text(encoding="utf-8")


def test_what_works_only_in_the_notebook_is_not_built_and_the_engine_stays_as_it_was(packages: Path, course: Path):
    """A helper that was changed in the record, and one whose check fails in the fresh process."""
    run_notebook(packages, course, [START, DOUBLE, 'check("1.2", double)', 'build("loading")'])
    before = (course / "my_engine" / "loading.py").read_bytes()
    progress = json.loads((course / "progress.json").read_text(encoding="utf-8"))
    progress["exercises"]["1.2"]["helpers"]["add"] = "def add(a, b):\n    return a * b\n"
    (course / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    ran = run_notebook(packages, course, [START, "from llmfromscratch import loading", 'build("loading")',
                                          "print(loading.double(4))"])  # fmt: skip
    failure = ran.error(2)
    assert failure.ename == "BuildFailed"
    assert "1.2 did not pass" in failure.evalue and "1: got 1, expected 2" in failure.evalue
    assert failure.traceback == failure.evalue.join(["✗ ", ""]).splitlines()
    assert ran.text(3) == "8\n"
    assert (course / "my_engine" / "loading.py").read_bytes() == before


def test_a_module_that_hangs_when_imported_is_killed_at_its_deadline(packages: Path, course: Path):
    run_notebook(packages, course, [START, DOUBLE, 'check("1.2", double)'])
    progress = json.loads((course / "progress.json").read_text(encoding="utf-8"))
    progress["exercises"]["1.2"]["helpers"]["add"] = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "open('../child.pid', 'w').write(str(child.pid)) and None\ntime.sleep(300)\n"
    )
    (course / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    ran = run_python(packages, """
        import pathlib, tempfile, time
        tempfile.tempdir = str(pathlib.Path("scratch").absolute())
        pathlib.Path("scratch").mkdir()
        from llmfromscratch.course import fresh, build
        from llmfromscratch.course.failures import BuildFailed
        fresh.START_SECONDS = 2.0
        started = time.monotonic()
        try:
            build("loading")
        except BuildFailed as error:
            print(error)
        print("took", time.monotonic() - started < 20)
        child = int(pathlib.Path("scratch/child.pid").read_text())
        status = pathlib.Path(f"/proc/{child}/stat")
        while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() - started < 30:
            time.sleep(0.05)  # a kill takes a moment to arrive
        print("child", status.read_text().split()[2] if status.exists() else "gone")
        print("left over", [p.name for p in pathlib.Path("scratch").iterdir() if p.is_dir()])
    """, course)  # fmt: skip
    assert "was stopped after 5 s" in ran.stdout, ran.stderr
    assert "took True" in ran.stdout and "left over []" in ran.stdout
    assert "child gone" in ran.stdout or "child Z" in ran.stdout
    assert not (course / "my_engine" / "loading.py").exists()


def test_two_versions_of_one_helper_are_refused_by_name(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START, DOUBLE, 'check("1.2", double)',
        "def add(a, b):\n    return b + a\n\ndef triple(number):\n    return add(add(number, number), number)",
        'check("1.3", triple)', 'build("loading")', 'check("1.2", double)', 'build("loading")',
    ])  # fmt: skip
    assert "exercises 1.2 and 1.3 use `add` in two versions" in ran.error(5).evalue
    assert "yours: 1.2 double, 1.3 triple" in ran.text(7)


def test_building_twice_within_a_second_loads_the_second_version(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START + "\nfrom llmfromscratch import loading",
        "def double(number):\n    return number + number", 'check("1.2", double)\nbuild("loading")',
        "def double(number):\n    return number * 2 + 0", 'check("1.2", double)\nbuild("loading")',
        "import dis\nprint('*' in [i.argrepr for i in dis.get_instructions(loading.double)])",
    ])  # fmt: skip
    assert ran.text(5) == "True\n"


def test_nothing_passed_means_nothing_built_and_says_so(packages: Path, course: Path):
    ran = run_notebook(packages, course, [START, 'build("loading")', 'build("engine")', 'build("model")'])
    assert ran.text(1).startswith("Nothing of loading.py is yours yet")
    assert "'engine' cannot be built: choose one of loading" in ran.error(2).evalue
    assert list((course / "my_engine").iterdir()) == []


def test_records_are_checked_again_from_their_source_alone(packages: Path, course: Path):
    """What grading calls: the sketch too, a forged record fails, and one bad record does not spoil the others."""
    run_notebook(packages, course, [
        START, DOUBLE, 'check("1.2", double)', SCALER, 'check("1.4", Scaler)',
        "def triple(number):\n    return double(number) + number", 'check("1.3", triple)',
        "def header(text):\n    return text[:text.index(':')]", 'check("1.1", header)',
    ])  # fmt: skip
    ran = run_python(packages, """
        import json
        from llmfromscratch.course import fresh, progress
        entries = progress.read(progress.current().file)["exercises"]
        print(json.dumps(fresh.recheck(entries)))
        entries["1.4"]["source"] = "class Scaler:\\n    def __init__(self, f): pass\\n    def scale(self, n): return 13"
        entries["1.2"]["source"] = "from llmfromscratch.loading import double"
        print(json.dumps(fresh.recheck(entries)))
        entries["1.2"]["source"] = "def double(n):\\n    return n + n"
        entries["1.4"]["source"] = "class Scaler(:"
        print(json.dumps(fresh.recheck(entries)))
    """, course)  # fmt: skip
    assert ran.stderr == ""
    right, forged, broken = (json.loads(line) for line in ran.stdout.splitlines())
    assert right == {"1.1": "", "1.2": "", "1.3": "", "1.4": ""}
    assert forged["1.1"] == "" and "got 13, expected 12" in forged["1.4"]
    assert "cannot import name 'double'" in forged["1.2"] and "cannot import name 'double'" in forged["1.3"]
    assert broken == {"1.1": "", "1.2": "", "1.3": "", "1.4": broken["1.4"]} and "SyntaxError" in broken["1.4"]
