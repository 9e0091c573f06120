"""Text that streams out of tokens, step by step: the bytes that come, those that wait, the characters that are out.

Drawn from a decoder's own `push` and `flush`. What it gives out too early, too late or wrong is seen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmfromscratch import tokenizer as tokenizer_module
from llmfromscratch.course import blanks
from llmfromscratch.errors import LLMFromScratchError
from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import code_point, draw_character, glyph, hexadecimal, in_font, name_of, text_width
from llmfromscratch.widgets.streaming_trace import BROKEN, Step, Stream, stream_of, trace, wrong_characters
from llmfromscratch.widgets.style import ALARM, BLACK, GREY, PALE, YELLOW, Look, problem_space, write_problems
from llmfromscratch.widgets.token_reading import Token, byte_tokenizer, characters_of, counted

EXAMPLES: dict[str, str | Sequence[bytes]] = {
    "Chinese": "你好，世界",
    "emoji: skin tone, joined": "👍🏽 👩\u200d🚀",
    "accents, written both ways": "ďábel cafe\u0301",
    "plain English": "Hello, world!",
    "bytes that are no text": [b"ok ", b"\xe4\xbd", b"\xff", b" go"],
}
_WIDTH, _LEFT, _MARGIN = 10.0, 1.6, 0.3  # inches
_BAND, _CARD, _CARD_HIGH = 0.27, 1.17, 1.2
_STREAM_WIDTH, _WIDEST, _SLOTS, _CARDS, _WAITING = 7.9, 0.44, 30, 7, 6
_STATES: dict[str, Look] = {
    "given out": ("#A3DCCB", ""),
    "in the buffer": ("#F2B950", "///"),
    "still to come": ("white", ""),
}
_WRONG, _WRONG_LOOK = "wrong or lost", ("white", "xxxx")
_SOFT = "#555555"


def streaming_buffer(
    tokenizer: Any = None,
    *,
    decoder: Callable[[Any], Any] | None = None,
    examples: Mapping[str, str | Sequence[int] | Sequence[bytes]] | None = None,
) -> FigureForm:
    """The buffer with its controls: which example, and after which step.

    tokenizer: something with `encode` and `token_bytes`; without one, every byte is a token. decoder: called with the
    tokenizer, makes something with `push(id) -> str` and `flush() -> str`; `tokenizer.IncrementalDecoder` if not given.
    examples: name -> a text, token ids, or tokens as bytes; EXAMPLES if not given.
    """
    source = byte_tokenizer() if tokenizer is None else tokenizer
    shown = dict(EXAMPLES if examples is None else examples)
    if not shown:
        raise ValueError("There is no example to draw; give a mapping from names to texts, ids or bytes.")
    first = next(iter(shown))
    longest = max(_length(example, source) for example in shown.values())
    controls: list[Control] = [
        Choice("example", "Example", {name: name for name in shown}, first),
        Slider("step", "After step", 1, longest + 1, 1),  # a long label would leave no room for the slider
    ]

    def draw(example: str, step: int) -> Figure:
        return draw_streaming_buffer(stream_of(shown[example], source), step, decoder, example)

    def describe(example: str, step: int) -> str:
        return describe_streaming_buffer(stream_of(shown[example], source), step, decoder, example)

    return FigureForm(draw, describe, controls)


def draw_streaming_buffer(
    stream: Stream, step: int, decoder: Callable[[Any], Any] | None = None, name: str = "stream"
) -> Figure:
    """The buffer after a step, counted from 1; the step after the last token, and any later one, is the flush."""
    steps = _trace(stream, decoder)
    now = min(step, len(steps)) - 1
    problems = [in_font(problem) for problem in _problems(steps, now)]
    height = 4.3 + problem_space(problems)
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(_MARGIN, 0.24, f"{in_font(name)}: {_happening(steps, now, stream)}", fontsize=11, va="center",
              parse_math=False)  # fmt: skip
    _draw_stream(axes, 0.68, stream, steps[now], now)
    _draw_waiting(axes, 1.97, steps[now])
    _draw_given(axes, 2.87, steps[now])
    write_problems(figure, problems, _MARGIN)
    return figure


def describe_streaming_buffer(
    stream: Stream, step: int, decoder: Callable[[Any], Any] | None = None, name: str = "stream"
) -> str:
    """The step in words: what came, what waits, what is out, and what is wrong so far."""
    steps = _trace(stream, decoder)
    now = min(step, len(steps)) - 1
    this = steps[now]
    return "\n".join([
        f"{name}: {_happening(steps, now, stream)}",
        _waiting_title(this),
        f"Given out by this step: {this.new!r}; so far: {this.given!r}",
        *(_problems(steps, now) or ["Nothing is wrong so far."]),
    ])  # fmt: skip


def _trace(stream: Stream, decoder: Callable[[Any], Any] | None) -> list[Step]:
    try:
        return trace(stream, tokenizer_module.IncrementalDecoder if decoder is None else decoder)
    except NotImplementedError as error:
        blank = blanks.owner(error) if blanks.is_blank(error) else None
        if blank is None:
            raise
        what = f"Exercise {blank.id} ({blank.name}) is not yet written; this figure is drawn with it."
        raise LLMFromScratchError(what) from error


def _length(example: Any, tokenizer: Any) -> int:
    try:
        return len(stream_of(example, tokenizer).tokens)
    except Exception:  # noqa: BLE001 - the picture will say what is wrong with it
        return 1


def _happening(steps: Sequence[Step], now: int, stream: Stream) -> str:
    this = steps[now]
    if this.token is None:
        return f"step {now + 1}, the flush: no more tokens come"
    of = f"step {now + 1} of {len(stream.tokens) + 1}, token {this.token.id}"
    if this.token.control:
        return f"{of}, a control token: it has no text"
    return f"{of} brings {hexadecimal(this.token.content or b'') or 'no bytes'}"


def _problems(steps: Sequence[Step], now: int) -> list[str]:
    """The first thing that went wrong, and the latest if it is this step; holding back counts in its own step only."""
    wrong = [
        (number, step.problem)
        for number, step in enumerate(steps[: now + 1])
        if step.problem and (number == now or not step.held_back)
    ]
    said = [f"Step {number + 1}: {problem}" for number, problem in dict.fromkeys([*wrong[:1], *wrong[-1:]])]
    return said + ([f"{len(wrong)} steps are wrong up to here."] if len(wrong) > 2 else [])


def _waiting_title(step: Step) -> str:
    waiting = step.waiting
    if waiting is None:
        owed = hexadecimal(step.owed)
        rest = f"the buffer ought to hold {owed}" if owed else "the buffer ought to be empty"
        return f"In the buffer: unknown, for what is out is not the text of the bytes; {rest}"
    if not waiting:
        return "In the buffer: nothing"
    shown = hexadecimal(waiting[:12]) + (" …" if len(waiting) > 12 else "")
    return f"In the buffer: {counted(len(waiting), 'byte')} ({shown}){_what_waits(waiting, step)}"


def _what_waits(waiting: bytes, step: Step) -> str:
    if step.token is None:
        return ", and nothing gets them out any more"
    if waiting != step.owed:
        return ", more than an incomplete character"
    needed = _announced(waiting[0])
    return f", of a character of {needed} bytes; {needed - len(waiting)} to come"


def _announced(byte: int) -> int:
    """How many bytes the character has that begins with this one (RFC 3629)."""
    return 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1


@dataclass(frozen=True)
class _Window:
    """The part of the stream that has room: bytes first to last (exclusive), each `slot` inches wide."""

    first: int
    last: int
    slot: float

    def x(self, place: int) -> float:
        """The left end of a byte's place, in inches."""
        return _LEFT + (place - self.first) * self.slot


def _draw_stream(axes: Axes, top: float, stream: Stream, step: Step, now: int) -> None:
    """The bytes in their tokens, and beneath them the characters they form; the part around the present step."""
    ends = [0, *accumulate(len(_cells(token)) for token in stream.tokens)]
    first = max(0, min(ends[min(now, len(ends) - 1)] - _SLOTS // 2, ends[-1] - _SLOTS))
    last = min(ends[-1], first + _SLOTS)
    window = _Window(first, last, min(_WIDEST, _STREAM_WIDTH / max(1, last - first)))
    _margin(axes, top + _BAND / 2, "bytes of the tokens")
    for number, token in enumerate(stream.tokens):
        _draw_token(axes, top, token, ends[number], number - now, window)
    _margin(axes, top + _BAND + 0.08, "id")
    _margin(axes, top + 1.5 * _BAND + 0.16, "their characters")
    _draw_characters(axes, top + _BAND + 0.16, stream, step, window)
    for x, more in ((window.x(first) - 0.09, first > 0), (window.x(last) + 0.09, ends[-1] > last)):
        axes.text(x, top + _BAND / 2, "…" if more else "", ha="center", va="center", fontsize=9)
    for number, word in enumerate([*_STATES, *[_WRONG] * (step.waiting is None)]):
        x = _LEFT + 1.35 * number
        _fill(axes, (x, top + 0.86), 0.22, 0.13, word)
        axes.add_patch(Rectangle((x, top + 0.86), 0.22, 0.13, fill=False, edgecolor=GREY, linewidth=0.7))
        axes.text(x + 0.3, top + 0.925, word, fontsize=8.5, va="center")


def _draw_token(axes: Axes, top: float, token: Token, start: int, when: int, window: _Window) -> None:
    """One token from a byte on; when: 0 for the present one, below for those before it."""
    first, last = max(start, window.first), min(start + len(_cells(token)), window.last)
    if first >= last:
        return
    x, width, y = window.x(first), (last - first) * window.slot, top + _BAND / 2
    colour = BLACK if token.control else YELLOW if when == 0 else PALE if when < 0 else "white"
    edge, line = (BLACK, 2) if when == 0 else (BLACK if when < 0 else GREY, 0.8)
    axes.add_patch(
        Rectangle((x, top), width, _BAND, facecolor=colour, edgecolor=edge, linewidth=line, zorder=1 + (when == 0))
    )
    ink = "white" if token.control else ALARM if token.problem else BLACK if when <= 0 else _SOFT
    style: Any = {"color": ink, "ha": "center", "va": "center", "zorder": 3}
    if token.control:
        axes.text(x + width / 2, y, "control" if width > 0.5 else "c", fontsize=7.5, **style)
    for place in range(first, last) if not token.control else ():
        byte = token.cells[place - start]
        text = "?" if byte is None else hexadecimal([byte])
        axes.text(window.x(place) + window.slot / 2, y, text, fontsize=7.5, **style)
    if text_width(str(token.id), 6.5) <= width:
        axes.text(x + width / 2, top + _BAND + 0.08, str(token.id), fontsize=6.5, color=_SOFT, ha="center", va="center")
    if when == 0:
        axes.text(x + width / 2, top - 0.1, "▼", fontsize=9, ha="center", va="center")


def _draw_characters(axes: Axes, top: float, stream: Stream, step: Step, window: _Window) -> None:
    """The characters under their bytes, in the colour of what has become of each byte."""
    cells = [cell for token in stream.tokens for cell in _cells(token)]
    order = [place for place, cell in enumerate(cells) if cell is not None][stream.skip :]
    come = len(step.received)
    out, then = (step.right_bytes, _WRONG) if step.waiting is None else (come - len(step.waiting), "in the buffer")
    for number, place in enumerate(order):
        if window.first <= place < window.last:
            state = "given out" if number < out else then if number < come else "still to come"
            _fill(axes, (window.x(place), top), window.slot, _BAND, state)
    back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if step.waiting is None else None
    for start, end, character in characters_of(cells):
        if start < window.first or end > window.last or start not in order:
            continue
        x, width = window.x(start), (end - start) * window.slot
        axes.add_patch(Rectangle((x, top), width, _BAND, fill=False, edgecolor=BLACK, linewidth=0.8, zorder=2))
        if character:
            draw_character(axes, x + width / 2, top + _BAND / 2, character, 10, room=width - 0.06, bbox=back)
        else:
            style: Any = {"fontsize": 6.5, "ha": "center", "va": "center", "zorder": 3}
            axes.text(x + width / 2, top + _BAND / 2, "none", **style)


def _cells(token: Token) -> tuple[int | None, ...]:
    """The places that the token takes: one for each byte; two for a control token, whose bytes are not text."""
    return (None, None) if token.control else token.cells


def _fill(axes: Axes, corner: tuple[float, float], width: float, height: float, state: str) -> None:
    colour, hatch = _STATES.get(state, _WRONG_LOOK)
    edge = ALARM if state == _WRONG else "white"  # the hatch's colour
    axes.add_patch(
        Rectangle(corner, width, height, facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0, zorder=1)
    )


def _draw_waiting(axes: Axes, top: float, step: Step) -> None:
    """The buffer: each byte with its bits, those that say its role in bold, and a place for each byte to come."""
    axes.text(
        _MARGIN, top, _waiting_title(step), fontsize=10, va="center", color=BLACK if step.waiting is not None else ALARM
    )
    waiting = step.waiting or b""
    missing = _announced(waiting[0]) - len(waiting) if waiting and waiting == step.owed else 0
    x = _MARGIN
    for byte in waiting[:_WAITING]:
        _fill(axes, (x, top + 0.17), 1.1, 0.44, "in the buffer")
        axes.add_patch(Rectangle((x + 0.06, top + 0.22), 0.98, 0.34, facecolor="white", linewidth=0))
        axes.text(x + 0.55, top + 0.31, hexadecimal([byte]), fontsize=10, ha="center", va="center")
        _draw_bits(axes, x + 0.55, top + 0.46, f"{byte:08b}")
        x += 1.2
    for _ in range(missing):
        axes.add_patch(
            Rectangle((x, top + 0.17), 1.1, 0.44, fill=False, edgecolor=GREY, linewidth=1, linestyle=(0, (4, 3)))
        )
        axes.text(x + 0.55, top + 0.31, "to come", fontsize=9, color=_SOFT, ha="center", va="center")
        _draw_bits(axes, x + 0.55, top + 0.46, "10xxxxxx")
        x += 1.2
    if len(waiting) > _WAITING:
        axes.text(x, top + 0.39, f"… and {len(waiting) - _WAITING} more", fontsize=9, va="center")


def _draw_bits(axes: Axes, x: float, y: float, bits: str) -> None:
    """Eight bits around x; the ones at the front and the zero behind them say how many bytes belong together."""
    role = bits.index("0") + 1 if "0" in bits else 8
    for place, bit in enumerate(bits):
        axes.text(
            x + (place - 3.5) * 0.075, y, bit, fontsize=8, ha="center", va="center",
            weight="bold" if place < role else "normal", color=BLACK if place < role else _SOFT,
        )  # fmt: skip


def _draw_given(axes: Axes, top: float, step: Step) -> None:
    """The last characters that were given out, each on a card with its number and its name."""
    count, wrong = len(step.given), wrong_characters(step)
    hidden = max(0, count - _CARDS)
    earlier = f"; the last {_CARDS} of them" if hidden else ""
    title = f"Given out so far: {counted(count, 'character')}{earlier} (thick frame: by this step)"
    axes.text(_MARGIN, top, title if count else "Given out so far: nothing", fontsize=10, va="center")
    for place, character in enumerate(step.given[hidden:]):
        is_new = hidden + place >= count - len(step.new)
        _draw_card(axes, _MARGIN + place * (_CARD + 0.1), top + 0.16, character, is_new, hidden + place in wrong)


def _draw_card(axes: Axes, x: float, top: float, character: str, is_new: bool, is_wrong: bool) -> None:
    colour = ALARM if is_wrong else BLACK
    axes.add_patch(
        Rectangle((x, top), _CARD, _CARD_HIGH, facecolor="white", edgecolor=colour if is_wrong or is_new else GREY,
                  linewidth=2.2 if is_new else 1, hatch="xxx" if is_wrong else "", zorder=1)
    )  # fmt: skip
    if is_wrong:
        inside = (x + 0.08, top + 0.08), _CARD - 0.16, _CARD_HIGH - 0.16
        axes.add_patch(Rectangle(*inside, facecolor="white", linewidth=0, zorder=2))
    middle = x + _CARD / 2
    if glyph(character):
        draw_character(axes, middle, top + 0.29, character, 20, colour)
    else:
        axes.text(middle, top + 0.29, "(no glyph here)", fontsize=7.5, color=_SOFT, ha="center", va="center", zorder=3)
    axes.text(middle, top + 0.62, code_point(character), fontsize=9.5, color=colour, ha="center", va="center", zorder=3)
    about = "BROKEN: no character of the text" if is_wrong and character == BROKEN else name_of(character)
    lines = textwrap.wrap(about, 16)
    name = "\n".join([*lines[:3], "…"] if len(lines) > 4 else lines)
    axes.text(
        middle, top + 0.77, name, fontsize=6.5, color=colour if is_wrong else _SOFT, ha="center", va="top", zorder=3
    )


def _margin(axes: Axes, y: float, word: str) -> None:
    axes.text(_LEFT - 0.2, y, word, fontsize=8, color=_SOFT, ha="right", va="center")
