"""A passed check keeps the learner's source as it lives in the notebook, with what it needs; seen in a real kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_package import make_package, run_notebook, run_python

START = "from llmfromscratch.course import *\nstart()"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / ".llmfromscratch").touch()
    return tmp_path


def entries(course: Path) -> dict:
    return json.loads((course / "progress.json").read_text(encoding="utf-8"))["exercises"]


CLASS = '''
@dataclass
class Pair:
    left: int
    right: int = ZERO

class Base:
    """Holds a factor."""
    def __init__(self, factor):
        super().__init__()
        self._factor = factor

@announced
class Scaler(Base):
    LIMIT = 10**6

    def __init__(self, factor: int):
        super().__init__(factor)
        self.__secret = Pair(factor)

    @property
    def factor(self):
        return self.__secret.left + self.__secret.right

    @staticmethod
    def product(a, b):
        return sum(a for _ in range(b))

    def scale(self, number):
        return min(self.product(self.factor, number), self.LIMIT)
'''


def test_a_class_of_a_cell_is_kept_with_helpers_of_other_cells_constants_and_imports(packages: Path, course: Path):
    """Zero-argument super, private names, decorators, a base class, a dataclass without methods of its own."""
    ran = run_notebook(packages, course, [
        START,
        "import functools as ft\nfrom dataclasses import dataclass\nimport os.path as where\nZERO = 0\nunused = {1: 2}",
        "def announced(cls):\n    cls.name = ft.reduce(str.__add__, where.basename('/a/scaler'))\n    return cls",
        CLASS,
        'check("1.4", Scaler)',
        'build("loading")',
        "from llmfromscratch import loading\nprint(loading.Scaler(6).scale(7), loading.Scaler.name)",
    ])  # fmt: skip
    assert ran.text(4) == "✓ 1.4 scaling (3 points)\n", ran.error(4)
    assert ran.text(6) == "42 scaler\n"
    entry = entries(course)["1.4"]
    assert entry["source"].startswith("@announced\nclass Scaler(Base):\n    LIMIT = 10**6\n")
    assert set(entry["helpers"]) == {"announced", "Base", "Pair"}
    assert entry["helpers"]["Pair"] == "@dataclass\nclass Pair:\n    left: int\n    right: int = ZERO\n"
    assert entry["constants"] == {"ZERO": "0"}
    assert entry["imports"] == {
        "ft": "import functools as ft", "where": "from os import path as where",
        "dataclass": "from dataclasses import dataclass",
    }  # fmt: skip
    assert entry["points"] == 3 and len(entry["sha256"]) == len(entry["reference_hash"]) == 64


def test_the_newest_cell_counts_and_a_later_edit_counts_only_after_its_check(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "def add(a, b):\n    return a - b",
        "def double(n):\n    return add(n, n)",
        'check("1.2", double)',
        "def add(a, b):\n    return a + b",
        'check("1.2", double)',
        "def add(a, b):\n    return 'edited after the check'",
        "first = open('progress.json', encoding='utf-8').read()",
        "def double(n):\n    return add(n, n) if False else n * 2",
        'check("1.2", double)',
    ])  # fmt: skip
    assert "0: got 0" not in ran.error(3).evalue and "1: got 0, expected 2" in ran.error(3).evalue
    assert ran.error(5) is None and ran.error(9) is None
    assert entries(course)["1.2"]["helpers"] == {"add": "def add(a, b):\n    return 'edited after the check'\n"}
    assert entries(course)["1.2"]["source"] == "def double(n):\n    return add(n, n) if False else n * 2\n"


def test_an_edit_after_the_check_is_not_in_the_record(packages: Path, course: Path):
    run_notebook(packages, course, [
        START, "def add(a, b):\n    return a + b", "def double(n):\n    return add(n, n)", 'check("1.2", double)',
        "def add(a, b):\n    return 0", "def double(n):\n    return 0",
    ])  # fmt: skip
    assert entries(course)["1.2"]["helpers"] == {"add": "def add(a, b):\n    return a + b\n"}
    assert entries(course)["1.2"]["source"] == "def double(n):\n    return add(n, n)\n"


SCALER = """
class Scaler:
    def __init__(self, f):
        self.f = f

    def scale(self, n):
        return self.f * n
"""


def test_magics_around_a_definition_do_not_hide_its_source(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "%time zero = 0\nimport math\n!true\ndef double(n):\n    return int(math.fsum([n, n, zero]))\n%time double(3)",
        'check("1.2", double)',
        f"%%time\n{SCALER}",
        'check("1.4", Scaler)',
        "%%capture\ndef triple(n):\n    return double(n) + n",
        'check("1.3", triple)',
    ])  # fmt: skip
    assert [ran.error(index) for index in (2, 4, 6)] == [None] * 3
    assert entries(course)["1.2"]["source"] == "def double(n):\n    return int(math.fsum([n, n, zero]))\n"
    assert entries(course)["1.2"]["constants"] == {"zero": "0"} and entries(course)["1.2"]["imports"] == {}
    assert entries(course)["1.4"]["source"].startswith("class Scaler:\n")
    assert entries(course)["1.3"]["uses"] == ["1.2"] and entries(course)["1.3"]["helpers"] == {}


def test_wrapped_functions_recursion_and_local_names_are_understood(packages: Path, course: Path):
    """Locals that share a name with a global of the notebook are no dependency."""
    ran = run_notebook(packages, course, [
        START,
        "import functools\nn = open('some_file', 'w')\nhelper = object()",
        "def counted(f):\n    @functools.wraps(f)\n    def inner(*a):\n        return f(*a)\n    return inner",
        "@counted\n@functools.lru_cache(maxsize=None)\ndef double(n):\n    helper = [n for n in (n, n)]\n"
        "    return 0 if n == 0 else 2 + double(n - 1)",
        'check("1.2", double)',
        'build("loading")',
    ])  # fmt: skip
    assert ran.error(4) is None and ran.error(5) is None
    entry = entries(course)["1.2"]
    assert entry["source"].startswith("@counted\n@functools.lru_cache(maxsize=None)\ndef double(n):\n")
    assert list(entry["helpers"]) == ["counted"] and entry["constants"] == {}


CONSTANTS = """
import re
NUMBERS = [1, 2.5, -3, 1e400, True, None, 2j]
NESTED = {"a": (1,), b"b": {2}, 3: frozenset({4}), "empty": set()}
PATTERN = re.compile(r"[a-z]+'\\\\d", re.IGNORECASE)
TEXT = 'quotes " and \\' and \\n and ď'
"""


def test_constants_come_out_as_they_were(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START, CONSTANTS, "def double(n):\n    (NUMBERS, NESTED, PATTERN, TEXT)\n    return n + n",
        'check("1.2", double)', 'build("loading")',
        "from llmfromscratch import loading as l\n"
        "print(l.NUMBERS == NUMBERS, l.NESTED == NESTED, l.PATTERN == PATTERN, l.TEXT == TEXT)",
    ])  # fmt: skip
    assert ran.text(5) == "True True True True\n", ran.error(3)


def test_code_that_the_chapter_gives_is_left_where_it_is(packages: Path, course: Path):
    """The module's own helper and constant, shown in the notebook, are not taken along a second time."""
    given = (
        'import math\nBASE = 10\ndef root_of_nine() -> float:\n    """What the chapter does not teach."""\n'
        "    return math.sqrt(9.0)"
    )
    ran = run_notebook(packages, course, [
        "from __future__ import annotations\n" + START, given,
        "def double(n):\n    return 2 * n + int(root_of_nine()) - 3 + BASE - 10", 'check("1.2", double)',
    ])  # fmt: skip
    assert ran.error(3) is None
    entry = entries(course)["1.2"]
    assert (entry["helpers"], entry["constants"], entry["imports"]) == ({}, {}, {})

    imported = run_notebook(packages, course, [
        START, "from llmfromscratch import loading\nfrom llmfromscratch.loading import BASE, root_of_nine",
        "def double(n):\n    return 2 * n + int(root_of_nine()) - 3 + BASE - loading.BASE", 'check("1.2", double)',
        'build("loading")',
    ])  # fmt: skip
    assert imported.error(3) is None and imported.error(4) is None
    entry = entries(course)["1.2"]
    assert (entry["helpers"], entry["constants"]) == ({}, {})
    assert entry["imports"] == {"loading": "from llmfromscratch import loading"}


def test_what_ipython_puts_into_a_notebook_in_a_builtins_place_counts_as_the_builtin(packages: Path, course: Path):
    """open, exit and quit of a notebook are IPython's own; a function of the learner's called open is the learner's."""
    (course / "two.txt").write_text("2", encoding="utf-8")
    ran = run_notebook(packages, course, [
        START,
        "where = 'two.txt'",
        "def double(n):\n    if n is exit:\n        quit()\n    with open(where, 'rb') as f:\n"
        "        return int(f.read()) * n",
        'check("1.2", double)',
        "def open(n):\n    return n",
        "def triple(n):\n    return 3 * open(n)",
        'check("1.3", triple)',
    ])  # fmt: skip
    assert ran.text(3) == "✓ 1.2 doubling (2 points)\n", ran.error(3)
    assert (entries(course)["1.2"]["helpers"], entries(course)["1.2"]["imports"]) == ({}, {})
    assert entries(course)["1.2"]["constants"] == {"where": "'two.txt'"}
    assert entries(course)["1.3"]["helpers"] == {"open": "def open(n):\n    return n\n"}, ran.error(6)


def test_a_sketch_gets_its_points_and_is_kept_without_what_cannot_be_taken_along(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "import re\nclass Table:\n    colon = ':'\ntable = Table()\nSIDE = 0",
        "def first(parts):\n    return parts[SIDE]\ndef header(text):\n    return first(text.split(table.colon))",
        'check("1.1", header)',
        "board()",
        'check("1.1", lambda text: text.split(":")[0])',
        "def header(text):\n    return text.split(':')[0]",
        'check("1.1", header)',
    ])  # fmt: skip
    assert ran.text(3) == (
        "✓ 1.1 a header (1 point), not taken along, so grading would miss it: `table` is a __main__.Table that lives "
        "only in the notebook: make it inside the function, or pass it as an argument\n"
    )
    assert "1 / 1" in ran.text(4)
    assert ran.text(5).startswith("✓ 1.1 a header (1 point), not recorded: a lambda has no source")
    assert ran.text(7) == "✓ 1.1 a header (1 point)\n"
    assert "not_taken" not in entries(course)["1.1"]


REFUSALS = {
    "an open file": ("f = open('x.txt', 'w')", "f.name and n + n", "`f` is a _io.TextIOWrapper that lives only"),
    "an object": ("class A:\n    pass\na = A()", "(a, n + n)[1]", "`a` is a __main__.A that lives only in"),
    "a lambda": ("twice = lambda n: n + n", "twice(n)", "a lambda has no source that can be taken along"),
    "an array": ("import numpy as np\nT = np.ones(2)", "n + n + 0 * len(T)", "`T` is a numpy.ndarray that lives"),
    "a long list": ("L = list(range(9999))", "n + n + L[0]", "`L` is a list that is too long or holds more than"),
    "a closure": ("def make(k):\n    def inner(n):\n        return k * n\n    return inner\ng = make(2)", "g(n)",
                  "`inner` is a closure over `k`"),
    "a name of the module": ("BASE = 2", "BASE * n", "`BASE` means something else in llmfromscratch.loading"),
    "the course": ("from llmfromscratch.course import hint", "(hint, n + n)[1]", "`hint` comes from llmfromscratch"),
    "IPython": ("1", "(get_ipython(), n + n)[1]", "`get_ipython` exists only in a notebook"),
    "a generated function": ("exec('def h(n): return n')", "h(n) + n", "the source of `h` cannot be found"),
}  # fmt: skip


def test_what_cannot_be_taken_along_is_refused_by_name_though_the_values_are_right(packages: Path, course: Path):
    cells = [START]
    for setup, body, _ in REFUSALS.values():
        cells += [setup, f"def double(n):\n    return {body}", 'check("1.2", double)']
    ran = run_notebook(packages, course, cells)
    for number, (name, (_, _, said)) in enumerate(REFUSALS.items()):
        failure = ran.error(3 * number + 3)
        assert failure is not None and failure.ename == "CheckFailed", name
        assert said in failure.evalue, name
        assert "your values are right, but this cannot be taken into your engine yet" in failure.evalue
        assert 'next: change that, run the cell, then check("1.2", double) again' in failure.evalue
    assert not (course / "progress.json").exists()


def test_a_method_that_was_changed_from_outside_is_refused(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "class Scaler:\n    def __init__(self, f):\n        self.f = f\n    def scale(self, n):\n        return 0",
        "def scale(self, n):\n    return self.f * n\nScaler.scale = scale",
        'check("1.4", Scaler)',
        "def other(n):\n    return 2 * n",
        'check("1.2", other)',
    ])  # fmt: skip
    assert "change no method of it from outside" in ran.error(3).evalue
    assert "the definition is called `other`: call it `double`" in ran.error(5).evalue


def test_a_failure_in_a_notebook_shows_its_lines_and_nothing_else(packages: Path, course: Path):
    ran = run_notebook(packages, course, [
        START,
        "import warnings\ndef double(n):\n    warnings.warn('careful')\n    return n ** 2",
        'check("1.2", double)',
        "def triple(n):\n    # YOUR CODE HERE\n    raise NotImplementedError()",
        'check("1.3", triple)',
        "def double(n):\n    while True:\n        n += 1",
        'check("1.2", double)',
        "def double(n):\n    return [][n]",
        'check("1.2", double)',
    ])  # fmt: skip
    assert ran.stderr() == ""
    wrong, blank, endless, raised = (ran.error(index) for index in (2, 4, 6, 8))
    assert wrong.traceback == [
        "✗ 1.2 doubling: not right yet", "  expected: twice the number",
        "  smallest case that fails: 1: got 1, expected 2",
        "  likely mistake: the number is squared", '  next: hint("1.2")',
    ]  # fmt: skip
    assert "careful" in ran.text(2)
    assert blank.ename == "NotYetWritten" and blank.traceback[0] == "Exercise 1.3 is not yet written: tripling"
    assert endless.traceback[0].startswith("✗ 1.2 doubling: stopped after 2 s in line ")
    assert "of the cell, in double: `" in endless.traceback[0]
    assert raised.traceback[1] == "  your line: line 2 of the cell, in double: `return [][n]`"


def test_a_damaged_progress_file_is_set_aside_and_a_later_one_left_alone(packages: Path, course: Path):
    (course / "progress.json").write_text('{"version": 1, "exercises": {"1.2": {"source": 5}}}', encoding="utf-8")
    code = """
        from llmfromscratch.course import board, progress
        board()
        print(progress.current().load())
    """
    ran = run_python(packages, code, course)
    first = ran.stdout.splitlines()[0]
    assert first.startswith(
        "progress.json was damaged (its entry for exercise 1.2 is not whole). It is now progress.dam"
    )
    assert (course / "progress.damaged-1.json").exists() and "'exercises': {}" in ran.stdout
    (course / "progress.json").write_text("{", encoding="utf-8")
    assert "progress.damaged-2.json" in run_python(packages, code, course).stdout
    (course / "progress.json").write_text('{"version": 9}', encoding="utf-8")
    assert "was written by a later version of the course" in run_python(packages, code, course).stderr
    assert (course / "progress.json").read_text(encoding="utf-8") == '{"version": 9}'


def test_two_processes_that_record_at_once_lose_nothing(packages: Path, course: Path):
    ran = run_python(packages, """
        import multiprocessing
        from llmfromscratch.course import progress

        def note(start):
            for number in range(start, start + 15):
                progress.current().update(lambda content: content["hints"].update({str(number): 1}))

        if __name__ == "__main__":
            fork = multiprocessing.get_context("fork")
            processes = [fork.Process(target=note, args=(start,)) for start in (0, 100, 200)]
            [process.start() for process in processes]
            [process.join() for process in processes]
            print(len(progress.current().load()["hints"]))
    """, course)  # fmt: skip
    assert ran.stdout == "45\n", ran.stderr
