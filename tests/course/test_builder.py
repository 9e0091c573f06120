"""The builder: from a chapter's source to its blank and its solved notebook.

Independent oracles: nbgrader's own metadata validator and ClearSolutions, Python's parser, jupyter's schema.
"""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path

import nbformat
import pytest
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.preprocessors import ClearSolutions
from toy_chapter import CHECK, SOURCE, built, cells_by_id, chapter, exercise, write_toys

from llmfromscratch.course.authoring import builder
from llmfromscratch.course.authoring.builder import build_files, check_files, to_json
from llmfromscratch.course.authoring.exercise_code import PACKAGE_FOLDER, ExerciseError, cut_exercise
from llmfromscratch.course.authoring.solved_outputs import SolutionError, execute_notebook
from llmfromscratch.course.authoring.source import read_source

ROOT = PACKAGE_FOLDER.parent


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    return write_toys(tmp_path)


# --- what is built ----------------------------------------------------------------------------------------------------


def test_a_function_is_solved_between_markers_and_blank_below_its_docstring(toys):
    notebooks = built(SOURCE, toys)
    head = 'def area(radius: float) -> float:\n    """The area of a circle.\n\n    radius: in metres.\n    """\n\n'
    assert cells_by_id(notebooks.solved)["exercise-1-1"].source == head + (
        "    ### BEGIN SOLUTION\n"
        "    # half-way comments are part of the answer\n"
        "    square = radius * radius\n"
        "    return math.pi * square\n"
        "    # and so are last ones\n"
        "    ### END SOLUTION"
    )
    blank = cells_by_id(notebooks.blank)["exercise-1-1"].source
    assert blank == head + "    # YOUR CODE HERE\n    raise NotImplementedError()"


def test_a_class_stays_whole_and_only_the_named_methods_are_blank(toys):
    blank = cells_by_id(built(SOURCE, toys).blank)["exercise-1-2"].source
    assert blank == (
        '@dataclass\nclass Box:\n    """A box of one width."""\n\n    width: float = 1.0  # metres\n\n'
        "    def double(\n        self,\n        times: int = 1,\n    ) -> Box:\n"
        "        # YOUR CODE HERE\n        raise NotImplementedError()\n\n"
        "    @property\n    def size(self) -> float:\n"
        '        """The width, in metres."""\n        return self.width\n\n'
        '    def later(self) -> None:\n        """Nothing yet."""'
    )


def test_without_blanks_every_method_with_a_body_is_blank(toys):
    code = cut_exercise("toys.shapes.Box", None, toys)
    assert code.blank.count("raise NotImplementedError()") == 2
    assert "return self.width" not in code.blank
    assert code.blank.endswith('"""Nothing yet."""')
    assert code.lines_to_write == 4


def test_a_check_cell_ends_with_the_call_on_the_learners_own_object(toys):
    cells = cells_by_id(built(SOURCE, toys).blank)
    assert cells["check-1-1"].source == 'radius = 3\ncheck("1.1", area)'
    assert cells["check-1-2"].source == 'check("1.2", Box)'


def test_nbgrader_accepts_the_metadata_and_finds_the_points(toys):
    for notebook in (built(SOURCE, toys).blank, built(SOURCE, toys).solved):
        MetadataValidator().validate_nb(notebook)
        grader = {cell.id: cell.metadata.nbgrader for cell in notebook.cells if "nbgrader" in cell.metadata}
        assert list(grader) == ["exercise-1-1", "check-1-1", "exercise-1-2", "check-1-2"]
        assert all(value.grade_id == name for name, value in grader.items())
        flags = [(value.solution, value.grade, value.locked, value.get("points")) for value in grader.values()]
        assert flags == [
            (True, False, False, None),
            (False, True, True, 2),
            (True, False, False, None),
            (False, True, True, 3),
        ]


def test_nbgrader_clears_the_solved_notebook_to_the_blank_one(toys):
    notebooks = built(SOURCE, toys)
    cleared, _ = ClearSolutions().preprocess(copy.deepcopy(notebooks.solved), {})
    assert to_json(cleared) == to_json(notebooks.blank)


def test_the_notebooks_carry_no_trace_of_jupytext_and_a_fixed_kernel(toys):
    metadata = built(SOURCE, toys).blank.metadata
    assert metadata == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    tags = {cell.id: cell.metadata for cell in built(SOURCE, toys).blank.cells if "nbgrader" not in cell.metadata}
    assert {name: value for name, value in tags.items() if value} == {"time": {"tags": ["nbval-ignore-output"]}}


def package_objects() -> list[str]:
    """Every documented function and class of the package that has something to write."""
    found = []
    for file in sorted(PACKAGE_FOLDER.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                found.append(f"llmfromscratch.{file.stem}.{node.name}")
    return found


@pytest.mark.parametrize("dotted", package_objects())
def test_whatever_the_package_holds_is_cut_without_changing_its_meaning(dotted):
    try:
        code = cut_exercise(dotted)
    except ExerciseError as error:
        assert "body" in str(error)  # a class of fields alone
        return
    module, name = dotted.removeprefix("llmfromscratch.").rsplit(".", 1)
    tree = ast.parse((PACKAGE_FOLDER / f"{module}.py").read_text(encoding="utf-8"))
    original = next(node for node in tree.body if getattr(node, "name", None) == name)
    assert ast.dump(ast.parse(code.solved).body[0]) == ast.dump(original)
    assert ast.get_docstring(ast.parse(code.blank).body[0]) == ast.get_docstring(original)
    cell = nbformat.v4.new_code_cell(code.solved, metadata={"nbgrader": {"solution": True}})
    ClearSolutions().preprocess_cell(cell, {"language": "python"}, 0)
    assert cell.source == code.blank


# --- ids --------------------------------------------------------------------------------------------------------------


def ids(text: str) -> list[str]:
    return [cell.id for cell in read_source(text, "toys.md")]


def test_ids_come_from_numbers_labels_headings_or_the_cell_before():
    assert ids(SOURCE) == [
        "toys", "imports", "circles", "exercise-1-1", "check-1-1", "check-1-1-text", "exercise-1-2", "check-1-2",
        "time",
    ]  # fmt: skip


def test_inserting_a_cell_changes_no_other_id():
    inserted = '```python label="extra"\nprint(1)\n```\n\n## Circles'
    new = ids(SOURCE.replace("## Circles", inserted))
    assert [name for name in new if name != "extra"] == ids(SOURCE)


def test_a_label_comment_names_a_markdown_cell_and_stays_out_of_the_notebook():
    cells = read_source("# Título é çe: 1.2 & more!\n\nA\n\n\n<!-- label: second -->\nB\n\nC\n", "toys.md")
    assert [(cell.id, cell.text) for cell in cells] == [
        ("titulo-e-ce-1-2-more", "# Título é çe: 1.2 & more!\n\nA"),
        ("second", "B\n\nC"),
    ]


def test_a_long_heading_is_cut_at_a_word_and_stays_a_valid_id():
    assert ids("# " + "word " * 30) == ["word-word-word-word-word-word-word-word"]


# --- executing and files ----------------------------------------------------------------------------------------------

RUNS = """\
# Runs

```python label="one"
import sys
import time
print("one")
print("two")
```

```python label="fails" raises="ValueError"
raise ValueError("on purpose")
```

```python label="picture"
class Picture:
    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/html": "<b>x</b>"}
        return data | {"image/png": "aGk=", "text/plain": "a picture"}

Picture()
```

```python label="now" volatile="true"
print(time.perf_counter_ns())
```
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    source = tmp_path / "chapters" / "source"
    source.mkdir(parents=True)
    (source / "01_runs.md").write_text(RUNS, encoding="utf-8")
    return tmp_path


def build(root: Path, **options: bool) -> list[str]:
    return [file.relative_to(root).as_posix() for file in build_files(root, "01_runs", chapter_limits=False, **options)]


def problems(root: Path) -> list[str]:
    return check_files(root, "01_runs", chapter_limits=False)


def solved_cells(root: Path) -> dict[str, nbformat.NotebookNode]:
    return cells_by_id(nbformat.read(root / "solutions" / "01_runs.ipynb", as_version=4))


BOTH = ["chapters/01_runs.ipynb", "solutions/01_runs.ipynb"]


def test_the_executed_solution_keeps_only_outputs_that_last(root):
    assert build(root) == BOTH
    notebook = json.loads((root / "solutions" / "01_runs.ipynb").read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert all("execution" not in cell["metadata"] for cell in notebook["cells"])
    cells = solved_cells(root)
    assert [cells[name].execution_count for name in ("one", "fails", "picture", "now")] == [1, 2, 3, 4]
    assert [output.text for output in cells["one"].outputs] == ["one\ntwo\n"]
    assert cells["picture"].outputs[0].data == {"image/png": "aGk=", "text/plain": "a picture"}
    assert cells["fails"].outputs[0].ename == "ValueError"
    blank = nbformat.read(root / "chapters" / "01_runs.ipynb", as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in blank.cells if cell.cell_type == "code")


def test_building_twice_changes_nothing_with_and_without_running(root):
    build(root)
    assert build(root) == []
    assert build(root, execute=False) == []
    assert problems(root) == []


def test_volatile_outputs_are_measured_again_only_when_asked_or_when_code_changes(root):
    build(root)
    first = solved_cells(root)["now"].outputs[0].text
    source = root / "chapters" / "source" / "01_runs.md"
    source.write_text(RUNS.replace("# Runs", "# Runs\n\nMore words."), encoding="utf-8")
    assert build(root) == BOTH
    assert solved_cells(root)["now"].outputs[0].text == first
    assert build(root, fresh=True) == BOTH[1:]
    second = solved_cells(root)["now"].outputs[0].text
    assert second != first
    source.write_text(RUNS.replace('print("two")', 'print("three")'), encoding="utf-8")
    build(root)
    assert solved_cells(root)["now"].outputs[0].text != second


def test_check_says_what_is_missing_stale_or_never_run(root):
    assert problems(root) == ["chapters/01_runs.ipynb does not exist.", "solutions/01_runs.ipynb does not exist."]
    build(root, execute=False)
    assert problems(root) == ["solutions/01_runs.ipynb was never run. Build it without --no-execute."]
    source = root / "chapters" / "source" / "01_runs.md"
    source.write_text(RUNS.replace("# Runs", "# Runs\n\nMore."), encoding="utf-8")
    assert problems(root) == [f"{file} is not what its source makes." for file in BOTH]


def test_without_running_a_change_of_code_leaves_no_old_output(root):
    build(root)
    source = root / "chapters" / "source" / "01_runs.md"
    source.write_text(RUNS.replace('print("two")', 'print("three")'), encoding="utf-8")
    build(root, execute=False)
    assert all(not cell.outputs for cell in solved_cells(root).values() if cell.cell_type == "code")


def test_a_solution_that_does_not_run_writes_nothing_and_the_command_fails(root, capsys, monkeypatch):
    monkeypatch.setattr(builder, "MIN_CELLS", 1)
    source = root / "chapters" / "source" / "01_runs.md"
    source.write_text(RUNS.replace('print("two")', "print(1 / 0)"), encoding="utf-8")
    assert builder.main(["--root", str(root)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert not (root / "chapters" / "01_runs.ipynb").exists()


def test_the_command_builds_what_it_is_told_and_then_finds_nothing_to_change(root, capsys, monkeypatch):
    monkeypatch.setattr(builder, "MIN_CELLS", 1)
    assert builder.main(["--root", str(root), "--chapters", "01_other"]) == 1
    assert "Chapters with one: 01_runs" in capsys.readouterr().err
    assert builder.main(["--root", str(root), "--check"]) == 1
    assert "does not exist" in capsys.readouterr().out
    assert builder.main(["--root", str(root), "--no-execute", "--chapters", "01_runs"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {Path(file)}" for file in BOTH]
    assert builder.main(["--root", str(root), "--no-execute"]) == 0
    assert "nothing changes" in capsys.readouterr().out


CHECKS = chapter(exercise("1.1"), CHECK.format("1.1")).replace("from llmfromscratch.course import check", "{check}")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("def check(number, thing): print(number, thing(1) > 3)", None),
        ("def check(number, thing): return 1", "has a value"),
        ("def check(number, thing): import sys; print('x', file=sys.stderr)", "writes on stderr"),
        ("def check(number, thing): raise ValueError(number)", "does not run"),
    ],
)
def test_a_solved_check_cell_must_pass_without_value_and_without_stderr(toys, check, reason):
    notebooks = built(CHECKS.replace("{check}", check), toys)
    if reason is None:
        execute_notebook(notebooks.solved, "toys.ipynb", notebooks.raises)
        assert cells_by_id(notebooks.solved)["check-1-1"].outputs[0].text == "1.1 True\n"
        return
    with pytest.raises(SolutionError, match=reason):
        execute_notebook(notebooks.solved, "toys.ipynb", notebooks.raises)


@pytest.mark.parametrize(("body", "found"), [("pass", "ended without an exception"), ("1 / 0", "raised ZeroDivision")])
def test_a_cell_that_says_it_raises_must_raise_just_that(toys, body, found):
    notebooks = built(f'# Top\n\n```python label="a" raises="ValueError"\n{body}\n```\n', toys)
    with pytest.raises(SolutionError, match=found):
        execute_notebook(notebooks.solved, "toys.ipynb", notebooks.raises)


# --- the real chapters ------------------------------------------------------------------------------------------------


def test_the_committed_notebooks_are_exactly_what_their_sources_make():
    names = builder.chapter_names(ROOT)
    assert names, "there is no chapter"
    assert [problem for name in names for problem in check_files(ROOT, name)] == []


def test_every_committed_notebook_has_a_source():
    notebooks = {file.stem for folder in ("chapters", "solutions") for file in (ROOT / folder).glob("*.ipynb")}
    assert notebooks <= set(builder.chapter_names(ROOT))


def test_the_sources_and_the_registry_of_checks_name_the_same_exercises_and_points():
    from llmfromscratch.course.exercises import exercises  # here: the rest of this file needs no check to be loaded

    in_sources = []
    for name in builder.chapter_names(ROOT):
        text = (ROOT / "chapters" / "source" / f"{name}.md").read_text(encoding="utf-8")
        keys = [cell.attributes for cell in read_source(text, name) if "exercise" in cell.attributes]
        in_sources += [(key["exercise"], key["object"], int(key["points"])) for key in keys]
    assert in_sources == [(entry.id, entry.object, entry.points) for entry in exercises()]
