"""A figure with controls: a drawing function, a description of its arguments, and three ways to show the result.

    FigureForm(draw, describe, controls)  ->  a widget where there is ipywidgets, a PNG, a few lines of text

Drawing functions build `matplotlib.figure.Figure` themselves and leave pyplot alone: nobody else's backend, style or
open figures are touched, and nothing has to be closed. What goes wrong while drawing is shown as a sentence in the
picture's place, since the figure is often fed by code that is still being written.
"""

from __future__ import annotations

import asyncio
import html
import io
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from llmfromscratch.errors import LLMFromScratchError
from llmfromscratch.widgets import glyphs
from llmfromscratch.widgets.controls import Control
from llmfromscratch.widgets.style import ALARM, STYLE

try:
    import ipywidgets
except ModuleNotFoundError:
    ipywidgets = None

DOTS_PER_INCH = 120
# JupyterLab breaks lines inside words otherwise
_CAPTION = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; line-height: 1.4"
SECONDS_OF_QUIET = 0.15  # a slider sends dozens of values a second: draw when it rests
# matplotlib's settings are global, and a notebook may handle controls in a thread of their own
_one_at_a_time = threading.Lock()


class FigureForm:
    """A figure that can be explored. The last line of a notebook cell shows it.

    draw(**state) -> Figure and describe(**state) -> a few lines of text that say in words and numbers what the figure
    shows; state has a value for each of the controls. The text must be the same for the same state: it is compared.
    """

    def __init__(self, draw: Callable[..., Figure], describe: Callable[..., str], controls: Sequence[Control]):
        self._draw, self._describe = draw, describe
        self._controls = {control.name: control for control in controls}
        self.state: dict[str, Any] = {}
        self._widgets: dict[str, Any] = {}
        self._view: Any = None
        self._waiting: asyncio.TimerHandle | None = None
        self.set(**{control.name: control.value for control in controls})

    def set(self, **values: Any) -> FigureForm:
        """Sets controls by name, as if moved by hand, and returns the form. Raises ValueError for what they refuse."""
        for name, value in values.items():
            if name not in self._controls:
                raise ValueError(f"This figure has no control {name!r}; it has {', '.join(self._controls)}.")
            if not self._controls[name].allows(value):
                raise ValueError(f"{name} cannot be {value!r}; expected {self._controls[name].expects()}.")
        self.state.update(values)
        for name in values.keys() & self._widgets.keys():
            self._widgets[name].value = values[name]
        return self

    def png(self) -> bytes:
        """The figure for the present state, or a picture of the sentence that says why it cannot be drawn."""
        return self._render()[0]

    def text(self) -> str:
        """What the figure shows, in words and numbers."""
        return self._render()[1]

    def view(self) -> Any:
        """The controls above the picture, as one ipywidgets object; the same one every time."""
        if self._view is None:
            self._picture = ipywidgets.Image(format="png", layout={"max_width": "100%", "width": "1080px"})
            self._caption = ipywidgets.HTML()
            for name, control in self._controls.items():
                self._widgets[name] = control.widget(ipywidgets)
                self._widgets[name].value = self.state[name]
                self._widgets[name].observe(partial(self._moved, name), names="value")
            _align_sliders(list(self._widgets.values()))
            row = ipywidgets.HBox(
                list(self._widgets.values()), layout={"flex_flow": "row wrap", "grid_gap": "4px 24px"}
            )
            self._view = ipywidgets.VBox([row, self._picture, self._caption])
            self._redraw()
        return self._view

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        png, text = self._render()
        view = self.view()._repr_mimebundle_() if ipywidgets else {}
        return {**view, "image/png": png, "text/plain": text}

    def _moved(self, name: str, change: Any) -> None:
        self.state[name] = change["new"]
        if self._waiting is not None:
            self._waiting.cancel()
        try:
            self._waiting = asyncio.get_running_loop().call_later(SECONDS_OF_QUIET, self._redraw)
        except RuntimeError:  # no event loop, as in a script: there is nothing to wait for
            self._redraw()

    def _redraw(self) -> None:
        self._picture.value, text = self._render()
        self._caption.value = f'<pre style="{_CAPTION}">{html.escape(text)}</pre>'

    def _render(self) -> tuple[bytes, str]:
        with _one_at_a_time, matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            try:
                figure, text = self._draw(**self.state), self._describe(**self.state)
            except Exception as error:  # noqa: BLE001 - a learner's code is called, and can raise anything
                text = sentence(error)
                figure = _picture_of(text)
            png = io.BytesIO()
            # without the version of matplotlib in the file, the same picture is the same bytes
            figure.savefig(png, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
            figure.clear()  # a figure holds itself in circles: let its parts go now
        return png.getvalue(), text


def _align_sliders(widgets: list[Any]) -> None:
    """Labels of one width, so that sliders below each other begin at the same place."""
    sliders = [widget for widget in widgets if not isinstance(widget, ipywidgets.Dropdown | ipywidgets.Text)]
    for slider in sliders:
        slider.style.description_width = f"{max(len(other.description) for other in sliders)}ch"


def sentence(error: Exception) -> str:
    """What to show for an exception: the package's own text, or its kind, its message and the line that raised it."""
    if isinstance(error, LLMFromScratchError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, NotImplementedError):
        return f"{where.name} is not yet written; this figure is drawn with it."
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"The figure cannot be drawn. {what} (in {where.name}, line {where.lineno}: {where.line})"


def _picture_of(text: str) -> Figure:
    paragraphs = [glyphs.in_font(paragraph.expandtabs()) for paragraph in text.splitlines()]
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, 100)]
    figure = Figure(figsize=(10, 0.6 + 0.22 * len(lines)))
    figure.text(0.02, 0.5, "\n".join(lines), color=ALARM, va="center", parse_math=False)
    return figure
