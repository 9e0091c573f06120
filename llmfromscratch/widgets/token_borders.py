"""Where a text is cut into tokens: one tokenizer's line above another's, border above border.

Every byte of the text has its place from left to right, the same in all lines. What a tokenizer gives is checked
against the text; what is added, lost or changed is seen where it happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmfromscratch.widgets.borders_layout import Layout, Span, lay_out
from llmfromscratch.widgets.controls import Choice, Control, Text
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import VISIBLE, draw_character, glyph, hexadecimal, in_font, shortened, text_width
from llmfromscratch.widgets.style import ALARM, BLACK, problem_space, write_problems
from llmfromscratch.widgets.token_reading import Reading, Token, counted, piece_in_words, read_tokens

BENEATH = ("ids and bytes", "ids", "bytes", "nothing")
MOST_CHARACTERS, MOST_WORDS = 1000, 60
TONES = ("#9AD0F0", "#FFF0BF")  # as far apart in lightness as in hue
_WIDTH, _LEFT, _MARGIN, _TALLEST = 10.0, 1.4, 0.3, 9.0  # inches
_BAND, _LABEL, _GAP, _ROW_GAP, _LINE = 0.29, 0.15, 0.07, 0.14, 0.21
_TEXT_SIZE, _LABEL_SIZE = 11.0, 7.0


class TextBlock(Text):
    """A text of several lines."""

    def widget(self, ipywidgets: Any) -> Any:
        """A field of three lines."""
        layout, style = {"width": "700px"}, {"description_width": "initial"}
        return ipywidgets.Textarea(value=self.value, description=self.label, rows=3, layout=layout, style=style)


def token_borders(tokenizers: Mapping[str, Any], text: str, *, beneath: str = BENEATH[0]) -> FigureForm:
    """The borders with their controls: the text, what stands beneath the tokens, which tokenizers.

    tokenizers: name -> something with `encode(text) -> ids` and `token_bytes(id) -> bytes` (and perhaps `vocab_size`
    and `special`), or a function that cuts a text into pieces, e.g. `str.split`.
    """
    if not tokenizers:
        raise ValueError("There is no tokenizer to draw; give a mapping from names to tokenizers.")
    names = tuple(tokenizers)
    controls: list[Control] = [
        TextBlock("text", "Text", text),
        Choice("beneath", "Beneath the tokens", {name: name for name in BENEATH}, beneath),
    ]
    if len(names) > 1:
        options = {"all, one above the other": names} | {name: (name,) for name in names}
        controls.append(Choice("which", "Tokenizers", options, names))

    def chosen(which: Sequence[str]) -> dict[str, Any]:
        return {name: tokenizers[name] for name in which}

    def draw(text: str, beneath: str, which: Sequence[str] = names) -> Figure:
        return draw_token_borders(chosen(which), text, beneath)

    def describe(text: str, beneath: str, which: Sequence[str] = names) -> str:
        return describe_token_borders(chosen(which), text, beneath)

    return FigureForm(draw, describe, controls)


def draw_token_borders(tokenizers: Mapping[str, Any], text: str, beneath: str = BENEATH[0]) -> Figure:
    """The borders as a figure. beneath: one of BENEATH; a text beyond MOST_CHARACTERS is cut there."""
    readings = _read(tokenizers, text)
    layout = lay_out(list(readings.values()), _labels(beneath), _WIDTH - _LEFT - _MARGIN, _TEXT_SIZE, _LABEL_SIZE)
    line_height = _BAND + _LABEL * _labels(beneath).count(True) + _GAP
    row_height = line_height * len(readings) + _ROW_GAP
    rows = layout.rows[: max(1, int(_TALLEST / row_height))]
    titles = [in_font(title) for title in _titles(readings)]
    key, problems = _key(readings, layout), _problems(readings, text, layout, len(rows))
    above, below = 0.2 + _LINE * len(titles), 0.12 + 0.18 * len(key) + problem_space(problems)
    height = above + row_height * len(rows) + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    for number, title in enumerate(titles):
        size = 11 if number == 0 else 9.5
        axes.text(_MARGIN, 0.2 + _LINE * number, title, fontsize=size, va="center", parse_math=False)
    for row, (first, end) in enumerate(rows):
        for line, (name, reading) in enumerate(readings.items()):
            top = above + row * row_height + line * line_height
            _draw_margin(axes, top, name, beneath)
            _draw_line(axes, top, layout, reading, line, (first, end), beneath)
    for number, sentence in enumerate(key):
        y = height - below + 0.12 + 0.18 * number
        axes.text(_LEFT, y, sentence, fontsize=8, color="#555555", va="center", parse_math=False)
    write_problems(figure, problems, _MARGIN)
    return figure


def describe_token_borders(tokenizers: Mapping[str, Any], text: str, beneath: str = BENEATH[0]) -> str:
    """The tokens of each tokenizer in words, how many borders they share, and what is wrong."""
    readings = _read(tokenizers, text)
    titles = _titles(readings)
    lines = titles[:1]
    for title, reading in zip(titles[1:], readings.values(), strict=True):
        words = [_in_words(token, beneath) for token in reading.tokens[:MOST_WORDS]]
        rest = len(reading.tokens) - MOST_WORDS
        lines += [title, "  " + " | ".join(words) + (f" | and {rest:,} more" if rest > 0 else "")] if words else [title]
    if len(readings) == 2:
        one, other = (_borders(reading) for reading in readings.values())
        lines.append(f"Borders inside the text: {len(one)} and {len(other)}, {len(one & other)} of them shared.")
    problems = [f"{name}: {problem}" for name, reading in readings.items() for problem in reading.problems]
    return "\n".join([*lines, *(problems or ["The tokens of every line give back the text."])])


def _read(tokenizers: Mapping[str, Any], text: str) -> dict[str, Reading]:
    return {name: read_tokens(tokenizer, text[:MOST_CHARACTERS]) for name, tokenizer in tokenizers.items()}


def _labels(beneath: str) -> tuple[bool, bool]:
    """Whether ids and whether bytes are shown."""
    return beneath in ("ids and bytes", "ids"), beneath in ("ids and bytes", "bytes")


def _titles(readings: Mapping[str, Reading]) -> list[str]:
    content = next(iter(readings.values())).text
    characters = len(content.decode("utf-8"))
    titles = [f"{counted(characters, 'character')}, {counted(len(content), 'byte')} in UTF-8"]
    for name, reading in readings.items():
        count = len(reading.tokens)
        each = f", {characters / count:.1f} characters per token" if count else ""
        titles.append(f"{name}: {counted(count, 'token')}{each}{'; ' if reading.note else ''}{reading.note}")
    return titles


def _problems(readings: Mapping[str, Reading], text: str, layout: Layout, rows: int) -> list[str]:
    problems = [f"{name}: {problem}" for name, reading in readings.items() for problem in reading.problems]
    if rows < len(layout.rows):
        problems.append(f"The picture ends here: {len(layout.rows) - rows} more lines have no room.")
    if len(text) > MOST_CHARACTERS:
        problems.append(f"Only the first {MOST_CHARACTERS:,} of {len(text):,} characters are read.")
    return [in_font(problem) for problem in problems]


def _key(readings: Mapping[str, Reading], layout: Layout) -> list[str]:
    """What the signs in the picture mean; only those that occur."""
    spans = [span for line in layout.characters for span in line]
    seen = {span.character for span in spans}
    white = {" ": "space", "\n": "line break", "\t": "tab"}
    signs = [f"{VISIBLE[character]} {word}" for character, word in white.items() if character in seen]
    if any(character and not glyph(character) for character in seen):
        signs.append("digits in a frame: the code point of a character without a glyph in this figure's font")
    if any(span.shared for span in spans):
        signs.append("dashed: a character that several tokens share")
    if any(token.control for reading in readings.values() for token in reading.tokens):
        signs.append("black: a control token")
    if any(reading.wrong or reading.lost for reading in readings.values()):
        signs.append("crossed: not what the text says")
    lines = [""]
    for sign in signs:
        joined = f"{lines[-1]}      {sign}".strip()
        lines = [*lines[:-1], joined] if text_width(in_font(joined), 8) < _WIDTH - _LEFT - _MARGIN else [*lines, sign]
    return [line for line in lines if line]


def _draw_margin(axes: Axes, top: float, name: str, beneath: str) -> None:
    style: Any = {"ha": "right", "va": "center", "parse_math": False}
    axes.text(_LEFT - 0.12, top + _BAND / 2, shortened(name, _LEFT - 0.35, 9), fontsize=9, **style)
    for number, word in enumerate(word for word, is_shown in _words(beneath) if is_shown):
        y = top + _BAND + _LABEL * (number + 0.5)
        axes.text(_LEFT - 0.12, y, word, fontsize=_LABEL_SIZE, color="#555555", **style)


def _words(beneath: str) -> Iterator[tuple[str, bool]]:
    return zip(("id", "bytes (hex)"), _labels(beneath), strict=True)


def _draw_line(
    axes: Axes, top: float, layout: Layout, reading: Reading, line: int, row: tuple[int, int], beneath: str
) -> None:  # fmt: skip
    """One tokenizer's tokens between two places of the row: rectangles, characters, ids, bytes."""
    ids, hexes = _labels(beneath)
    shift = _LEFT - layout.x[row[0]]
    if not reading.tokens:
        axes.text(_LEFT, top + _BAND / 2, "no tokens", fontsize=9, color=ALARM, va="center")
        return
    for number, span in enumerate(layout.tokens[line]):
        start, end = max(span.start, row[0]), min(span.end, row[1])
        if start >= end:
            continue
        left, right = layout.x[start] + shift, layout.x[end] + shift
        colour = BLACK if span.control else TONES[number % 2]
        _draw_box(axes, (left, top, right, top + _BAND), colour, span.wrong)
        if ids and span.id is not None:
            label = f"{'…' if start > span.start else ''}{span.id}{'…' if end < span.end else ''}"
            _draw_label(axes, (left + right) / 2, top + _BAND + _LABEL / 2, label, span.wrong)
    for start, end in layout.lost[line]:
        if start < row[1] and end > row[0]:
            left, right = layout.x[max(start, row[0])] + shift, layout.x[min(end, row[1])] + shift
            _draw_box(axes, (left, top, right, top + _BAND), "white", True, "--")
    for span in layout.characters[line]:
        if row[0] <= span.start < row[1]:
            _draw_span(axes, layout, span, top, shift)
    for slot, byte in layout.bytes[line].items() if hexes else ():
        if row[0] <= slot < row[1]:
            x = (layout.x[slot] + layout.x[slot + 1]) / 2 + shift
            y = top + _BAND + _LABEL * (ids + 0.5)
            _draw_label(axes, x, y, hexadecimal([byte]), False)


def _draw_box(
    axes: Axes, corners: tuple[float, float, float, float], colour: Any, wrong: bool, linestyle: str = "-"
) -> None:  # fmt: skip
    left, top, right, bottom = corners
    box = Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor=BLACK, linewidth=0.9, zorder=1)
    axes.add_patch(box)
    if wrong:
        axes.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, hatch="xxx", edgecolor=ALARM, linewidth=2,
                      linestyle=linestyle, zorder=2)
        )  # fmt: skip


def _draw_span(axes: Axes, layout: Layout, span: Span, top: float, shift: float) -> None:
    """A character over its bytes. One that several tokens share gets a dashed frame that covers the borders inside."""
    left, right = layout.x[span.start] + shift, layout.x[span.end] + shift
    y = top + _BAND / 2
    colour = "white" if span.control else ALARM if span.wrong else BLACK
    if span.shared:
        axes.add_patch(
            Rectangle((left + 0.03, top + 0.025), right - left - 0.06, _BAND - 0.05, facecolor="white", edgecolor=BLACK,
                      linewidth=0.7, linestyle=(0, (3, 2)), zorder=3)
        )  # fmt: skip
    if span.character:
        back = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if span.wrong and not span.control else None
        draw_character(
            axes, (left + right) / 2, y, span.character, _TEXT_SIZE, colour, right - left - 0.1, zorder=4, bbox=back
        )
    elif span.bytes:
        axes.text((left + right) / 2, y, hexadecimal(span.bytes), fontsize=_LABEL_SIZE, color=ALARM, ha="center",
                  va="center", zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip


def _draw_label(axes: Axes, x: float, y: float, text: str, wrong: bool) -> None:
    colour = ALARM if wrong else BLACK
    axes.text(x, y, text, fontsize=_LABEL_SIZE, color=colour, ha="center", va="center", parse_math=False)


def _in_words(token: Token, beneath: str) -> str:
    ids, hexes = _labels(beneath)
    parts = [piece_in_words(token.cells)]
    if ids and token.id is not None:
        parts.append(str(token.id))
    if hexes and token.content:
        parts.append(token.content.hex().upper())
    return " ".join(parts)


def _borders(reading: Reading) -> set[int]:
    """The places in the text, in bytes from its start, at which a token ends and another begins."""
    pairs = zip(reading.owners, reading.places, strict=True)
    last = {number: place + 1 for number, place in pairs if place is not None}
    return set(last.values()) - {len(reading.text)}
