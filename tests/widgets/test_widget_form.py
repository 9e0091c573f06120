"""A figure's form: what it shows, how its controls redraw it, and what it leaves alone."""

from __future__ import annotations

import asyncio
import gc
import io
import subprocess
import sys
import warnings
import weakref

import ipywidgets
import matplotlib
import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient
from PIL import Image

from llmfromscratch.errors import OutOfMemory
from llmfromscratch.widgets import FigureForm, form
from llmfromscratch.widgets.controls import Choice, Slider, Span, Stops, Text

VIEW = "application/vnd.jupyter.widget-view+json"


class Recorder:
    """A drawing function that remembers the states it was called with, and the figures it made."""

    def __init__(self):
        self.states, self.figures = [], []

    def draw(self, height=1, word="one"):
        self.states.append((height, word))
        figure = Figure(figsize=(4, 2))
        figure.add_subplot().bar([word], [height])
        self.figures.append(weakref.ref(figure))
        return figure

    def form(self):
        controls = [Slider("height", "Height (m)", 1, 9, 1), Choice("word", "Word", {"1": "one", "2": "two"}, "one")]
        return FigureForm(self.draw, lambda height, word: f"{word}: {height} m", controls)


@pytest.fixture
def recorder():
    return Recorder()


def test_the_bundle_holds_the_widget_view_a_png_and_the_text(recorder):
    bundle = recorder.form()._repr_mimebundle_()
    assert set(bundle) == {VIEW, "image/png", "text/plain"}
    assert bundle["text/plain"] == "one: 1 m"
    assert Image.open(io.BytesIO(bundle["image/png"])).size == (4 * form.DOTS_PER_INCH, 2 * form.DOTS_PER_INCH)


def test_without_ipywidgets_the_bundle_holds_png_and_text(recorder, monkeypatch):
    monkeypatch.setattr(form, "ipywidgets", None)
    assert set(recorder.form()._repr_mimebundle_()) == {"image/png", "text/plain"}


def test_the_package_can_be_imported_where_ipywidgets_is_missing():
    code = (
        "import sys; sys.modules['ipywidgets'] = None; from llmfromscratch import widgets; "
        "print(sorted(widgets.placement_planner()._repr_mimebundle_()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['image/png', 'text/plain']"


def test_the_same_state_gives_the_same_bytes_and_another_state_others(recorder):
    shown = recorder.form()
    first = shown.png()
    assert shown.png() == first
    assert shown.set(height=2).png() != first
    assert shown.set(height=1).png() == first


def test_the_displayed_object_in_plain_python_is_its_text(recorder):
    assert repr(recorder.form().set(word="two", height=3)) == "two: 3 m"


def test_moving_a_control_changes_picture_and_caption(recorder):
    shown = recorder.form()
    row, picture, caption = shown.view().children
    before = picture.value
    row.children[0].value = 5
    assert recorder.states[-1] == (5, "one")
    assert picture.value != before
    assert "one: 5 m" in caption.value
    row.children[1].value = "two"
    assert shown.text() == "two: 5 m"


def test_sliders_below_each_other_begin_at_the_same_place():
    controls = [Slider("height", "Height", 1, 9, 1), Slider("width", "Width of it all", 1, 9, 1)]
    row, *_ = FigureForm(lambda **_: Figure(), lambda **_: "", controls).view().children
    assert {live.style.description_width for live in row.children} == {"15ch"}


def test_setting_a_control_from_code_moves_the_live_one(recorder):
    shown = recorder.form()
    row, picture, _ = shown.view().children
    before = picture.value
    shown.set(height=7)
    assert row.children[0].value == 7
    assert picture.value != before


def test_the_view_is_made_once_and_starts_from_the_present_state(recorder):
    shown = recorder.form().set(height=4)
    assert shown.view() is shown.view()
    assert shown.view().children[0].children[0].value == 4


def test_a_burst_of_moves_is_drawn_once_with_the_last_values(recorder, monkeypatch):
    monkeypatch.setattr(form, "SECONDS_OF_QUIET", 0.05)
    row, picture, _ = recorder.form().view().children
    before, drawn = picture.value, len(recorder.states)

    async def drag():
        for height in range(2, 9):
            row.children[0].value = height
            await asyncio.sleep(0.001)
        during = len(recorder.states)
        await asyncio.sleep(0.5)
        return during

    assert asyncio.run(drag()) == drawn
    assert recorder.states[drawn:] == [(8, "one")]
    assert picture.value != before


def test_what_a_control_refuses_is_refused_with_what_it_expects(recorder):
    shown = recorder.form()
    with pytest.raises(ValueError, match="height cannot be 10; expected a whole number from 1 to 9"):
        shown.set(height=10)
    with pytest.raises(ValueError, match="word cannot be 'three'; expected one of 'one', 'two'"):
        shown.set(word="three")
    with pytest.raises(ValueError, match="no control 'width'; it has height, word"):
        shown.set(width=1)
    assert shown.state == {"height": 1, "word": "one"}


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemory("The weights have no room."), "The weights have no room."),
        (NotImplementedError(), "_raise is not yet written; this figure is drawn with it."),
        (KeyError("layers.3"), "The figure cannot be drawn. KeyError: 'layers.3' (in _raise, line"),
        (AssertionError(), "The figure cannot be drawn. AssertionError (in _raise, line"),
    ],
)
def test_an_error_while_drawing_is_a_sentence_in_the_pictures_place(error, said):
    shown = FigureForm(lambda: _raise(error), lambda: "never", [])
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"].startswith(said)
    assert Image.open(io.BytesIO(bundle["image/png"])).size[1] < 200
    assert said.split("'")[0] in shown.view().children[2].value.replace("&#x27;", "'")


def test_after_an_error_the_next_state_is_drawn_again():
    def draw(height):
        if height == 2:
            raise ZeroDivisionError("nothing there")
        return Recorder().draw(height)

    shown = FigureForm(draw, lambda height: f"{height} m", [Slider("height", "Height", 1, 3, 1)])
    good = shown.png()
    assert "nothing there" in shown.set(height=2).text()
    assert shown.set(height=1).png() == good


def test_an_interrupt_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        FigureForm(lambda: _raise(KeyboardInterrupt()), lambda: "", []).png()


def test_dollar_signs_in_an_error_are_not_taken_for_formulas():
    shown = FigureForm(lambda: _raise(OutOfMemory("it costs $5 and $_{")), lambda: "", [])
    assert shown.text() == "it costs $5 and $_{"
    assert shown.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("quoted", ["你好 👍🏽", "\x07 \u200d \ue000", "\ud800", "\tré́"])
def test_an_error_that_quotes_what_the_font_lacks_is_drawn_without_a_warning(quoted):
    shown = FigureForm(lambda: _raise(OutOfMemory(f"no room for {quoted}")), lambda: "", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shown.png().startswith(b"\x89PNG")
    assert shown.text() == f"no room for {quoted}"


def test_figures_do_not_pile_up(recorder):
    shown = recorder.form()
    for height in range(1, 10):
        shown.set(height=height).png()
    gc.collect()
    assert len(recorder.figures) == 9
    assert [figure for figure in recorder.figures if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_the_users_settings_of_matplotlib_neither_change_the_picture_nor_are_changed(recorder):
    shown = recorder.form()
    plain = shown.png()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "savefig.dpi": 20}):
        before = dict(matplotlib.rcParams)
        assert shown.png() == plain
        assert dict(matplotlib.rcParams) == before


def test_drawing_does_not_load_pyplot_or_choose_a_backend():
    code = (
        "import sys; from llmfromscratch import widgets; widgets.placement_planner().png(); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


CONTROLS = [
    (Choice("a", "A", {"small": 1, "big": 10}, 1), 10, 2),
    (Stops("a", "A", {"none": 0.0, "8 GB": 8e9}, 0.0), 8e9, 1e9),
    (Slider("a", "A", 0, 5, 2), 5, 6),
    (Slider("a", "A", 0, 5, 2), 3, 2.5),
    (Slider("a", "A", 0.0, 1.0, 0.5, 0.25), 0.75, True),
    (Span("a", "A", 0, 29, (0, 29)), (3, 5), (5, 3)),
    (Span("a", "A", 0, 29, (0, 29)), (3, 3), (3, 30)),
    (Text("a", "A", ""), "hello", 5),
]


@pytest.mark.parametrize(("control", "good", "bad"), CONTROLS)
def test_a_control_knows_its_values_and_its_live_form_has_them_too(control, good, bad):
    assert control.allows(control.value)
    assert control.allows(good)
    assert not control.allows(bad)
    assert control.expects()
    live = control.widget(ipywidgets)
    assert live.value == control.value
    live.value = good
    assert live.value == good
    assert live.description == "A"
    assert live.style.description_width == "initial"


@pytest.mark.slow
def test_in_a_notebook_the_output_is_stable_needs_no_widget_state_and_moves_are_drawn():
    cells = [
        "from llmfromscratch import widgets\nform = widgets.placement_planner()\nform",
        "form.set(dtype='int8')\nbefore = bytes(form.view().children[1].value)",
        "import asyncio\nawait asyncio.sleep(1)\nprint(before != bytes(form.view().children[1].value))",
    ]
    outputs = []
    for _ in range(2):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        NotebookClient(notebook, kernel_name="python3", store_widget_state=False, timeout=120).execute()
        assert "widgets" not in notebook.metadata
        assert notebook.cells[2].outputs[0].text == "True\n"
        outputs.append(notebook.cells[0].outputs[0].data)
    assert VIEW in outputs[0]
    assert outputs[0]["text/plain"] == outputs[1]["text/plain"]
    assert outputs[0]["image/png"] == outputs[1]["image/png"]
    assert outputs[0]["text/plain"].startswith("Llama 2 7B: 6.74 billion parameters in bfloat16 are 13.5 GB")
