"""The chapters in JupyterLab, in a real browser: solutions with their figures, and a learner who errs and is right."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from notebook_page import NotebookPage, errors
from playwright.sync_api import Locator, expect

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
FIGURES = {  # chapter: (the label of a figure's cell, how many controls it has)
    "01_loading": (("checkpoint-map", 4), ("placement-planner", 4)),
    "02_tokenizer": (("token-borders", 3), ("streaming-buffer", 2), ("tokens-per-character", 2)),
    "03_kv_cache": (("attention-pattern", 4), ("page-grid", 2), ("cost-curves", 2)),
    "04_scheduler": (("gantt", 3), ("latencies", 2), ("what-if", 5)),
    "05_sampling": (("distribution", 6), ("beam-tree", 4), ("repetition", 4)),
    "06_optimization": (("waterfall", 5), ("tiles", 5), ("drafts-and-masks", 7)),
    "07_quantization": (("histogram", 5), ("damage-figures", 8)),
}
BROKEN = "Error displaying widget"
MENUS = ["File", "Edit", "View", "Run", "Kernel", "Tabs", "Settings", "Help"]
BLANK = "raise NotImplementedError()"
WRONG = "return weight.clone()"
RIGHT = [
    'if len(weight) % (2 * num_heads): raise CheckpointError("these rows are no heads of even width")',
    "pairs = weight.unflatten(0, (num_heads, -1, 2))",
    "return pairs.transpose(1, 2).reshape(weight.shape)",
]


def test_a_solution_runs_and_every_control_changes_its_figure(open_notebook, tmp_path):
    lab = run_solution("01_loading", open_notebook, tmp_path)
    lab.restart_kernel()
    expect_whole_figures("01_loading", lab)
    lab.wait_until_saved()
    lab.reload()
    expect_whole_figures("01_loading", lab)


@pytest.mark.parametrize("chapter", [chapter for chapter in FIGURES if chapter != "01_loading"])
def test_a_later_chapters_solution_runs_and_every_control_changes_its_figure(chapter, open_notebook, tmp_path):
    lab = run_solution(chapter, open_notebook, tmp_path)
    expect_whole_figures(chapter, lab)


def run_solution(chapter: str, open_notebook: Callable[[Path], NotebookPage], folder: Path) -> NotebookPage:
    """Runs all cells of a copy of the solution, in a course of its own, and moves every control of its figures."""
    (folder / "course").mkdir()
    lab = open_notebook(shutil.copy(SOLUTIONS / f"{chapter}.ipynb", folder / "course" / "solution.ipynb"))
    lab.run_all()
    lab.wait_until_all_ran()
    lab.wait_until_saved()
    assert not errors(lab.saved())
    assert all(cell.execution_count for cell in lab.saved().cells if cell.cell_type == "code" and cell.source)
    for figure, controls in FIGURES[chapter]:
        assert move_every_control(lab, lab.cell(figure)) >= controls
        lab.cell(figure).screenshot(path=folder / f"{figure}.png")  # to look at
    return lab


def move_every_control(lab: NotebookPage, cell: Locator) -> int:
    """Moves each control of a figure by one step with the keyboard; every move must change the picture."""
    cell.scroll_into_view_if_needed()
    expect(cell.locator(".jp-OutputArea-output img").first).to_be_visible()
    controls = cell.locator("select, textarea, input[type=text], .noUi-handle").all()
    picture = lab.picture(cell)
    for control in controls:
        move(control)
        picture = lab.expect_changed_picture(cell, picture, name_of(control))
    return len(controls)


def move(control: Locator) -> None:
    """The next entry of a list, or one step of a slider, back where it is at its end; a word more in a text."""
    before, kind = value_of(control), control.evaluate("e => e.tagName")
    if kind in ("TEXTAREA", "INPUT"):
        control.press("End")
        control.press_sequentially(" more")
        if kind == "INPUT":  # a text of one line may count only when it is complete
            control.press("Enter")
    elif kind == "SELECT":
        last = control.evaluate("e => e.selectedIndex === e.options.length - 1")
        for key in ("Space", "ArrowUp" if last else "ArrowDown", "Enter"):
            control.press(key)
    else:
        control.press("ArrowRight")
        if value_of(control) == before:
            control.press("ArrowLeft")
    assert value_of(control) != before


def value_of(control: Locator) -> str:
    return control.evaluate("e => e.value ?? e.getAttribute('aria-valuetext')")


def name_of(control: Locator) -> str:
    return control.evaluate("e => e.closest('.widget-inline-hbox').querySelector('.widget-label').textContent")


def expect_whole_figures(chapter: str, lab: NotebookPage) -> None:
    for figure, _ in FIGURES[chapter]:
        cell = lab.cell(figure)
        cell.scroll_into_view_if_needed()
        expect(cell.locator(".jp-OutputArea-output img").first).to_be_visible()
    expect(lab.page.locator(".jp-Notebook")).not_to_contain_text(BROKEN)


def test_a_learner_is_told_what_is_wrong_until_it_is_right(open_notebook, tmp_path):
    lab = open_notebook(tmp_path / "course" / "01_loading.ipynb")
    exercise, check = lab.cell("exercise-1-4"), lab.cell("check-1-4")
    assert re.search(r"^loading\treference\t0 / 12", lab.run(lab.cell("set-up")), re.MULTILINE)
    for needed in ("the-file", "stored-tensors"):
        lab.run(lab.cell(needed))

    lab.run(exercise)
    assert lab.run(check).startswith("Exercise 1.4 is not yet written")

    lab.replace_line(exercise, BLANK, [WRONG])
    assert lab.run(exercise) == ""
    told = lab.run(check)
    assert told.startswith("✗ 1.4") and "likely mistake: no row has moved" in told
    assert "Traceback" not in told and len(told.splitlines()) <= 6

    lab.replace_line(exercise, WRONG, RIGHT)
    assert lab.run(exercise) == ""
    told = lab.run(check)
    assert told.startswith("✓ 1.4") and "(3 points)" in told
    board = lab.run(lab.new_cell_below(check, "board()"))
    assert re.search(r"^loading\t.*\t3 / 12\t1.2, 1.3, 1.5", board, re.MULTILINE)

    lab.wait_until_saved()
    lab.reload()
    lab.select(lab.cell("exercise-1-4"))  # the editor makes only those lines that can be seen
    for line in RIGHT:
        expect(lab.cell("exercise-1-4").locator(".cm-content")).to_contain_text(line)
    expect(lab.cell("check-1-4").locator(".jp-OutputArea-output")).to_contain_text("✓ 1.4")
    # nothing but the course: no menu of nbgrader, no question about news
    expect(lab.page.locator(".lm-MenuBar-itemLabel")).to_have_text(MENUS)
    expect(lab.page.locator(".Toastify__toast")).to_have_count(0)
