"""How a greedy text falls into a loop, and what a penalty does: repeated passages over time, and both texts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llmfromscratch import sampling
from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.repetition_run import WINDOW, Continuation, continue_texts, covered, repeats, shares
from llmfromscratch.widgets.sampling_stages import in_one_line, penalties_in_words
from llmfromscratch.widgets.style import BLACK, GREY, NAVY, VERMILION, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted

PROMPTS = (
    "I went to the market and bought",
    "The best way to learn a language is",
    "The most important thing in life is",
)
_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_DARK = "#555555"
_PALE = ("#F7D3BE", "#C9DDF0")  # behind repeated passages: of the text without, and with a penalty
_LOOKS: tuple[tuple[str, Any], ...] = ((VERMILION, (0, (5, 1.5))), (NAVY, "solid"))
_WIDTH, _LEFT, _RIGHT, _CURVE, _RUG, _TOP = 10.0, 0.8, 1.85, 2.2, 0.42, 0.75  # inches
_MARGIN, _LINE, _SIZE, _HEAD, _MOST_LINES = 0.2, 0.225, 9.5, 0.34, 7


def repetition_curve(
    llm: Any,
    prompts: Sequence[str] = PROMPTS,
    *,
    repetition_penalty: float = 1.2,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    length: int = 4,
    tokens: int = 64,
    apply_penalties: Callable[..., Any] | None = None,
) -> FigureForm:
    """The curve with its controls: the prompt, the three penalties as `SamplingParams` has them, a passage's length.

    llm: anything with `model` and `tokenizer`. tokens: of each text at most. apply_penalties: in the place of
    `sampling.apply_penalties`. A text is generated once for each setting.
    """
    known: dict[Hashable, Continuation] = {}

    def both(prompt: str, **penalties: float) -> tuple[Continuation, Continuation]:
        rounded = {name: round(value, 4) for name, value in penalties.items()}
        changes: dict[str, Any] = {name: value for name, value in rounded.items() if value != _OFF[name]}
        wanted = {(prompt, *setting.items()): setting for setting in ({}, changes)}
        missing = {key: setting for key, setting in wanted.items() if key not in known}
        params = [sampling.SamplingParams(max_tokens=tokens, **setting) for setting in missing.values()]
        if missing:
            known.update(zip(missing, continue_texts(llm, prompt, params, apply_penalties), strict=True))
        plain, penalized = (known[(prompt, *setting.items())] for setting in ({}, changes))
        return plain, penalized

    controls: list[Control] = [
        Choice("prompt", "Prompt", {in_one_line(text): text for text in prompts}, prompts[0]),
        Slider("repetition_penalty", "Repetition penalty (1 is off)", 1.0, 2.0, float(repetition_penalty), 0.1),
        Slider("presence_penalty", "Presence penalty (0 is off)", 0.0, 2.0, float(presence_penalty), 0.1),
        Slider("frequency_penalty", "Frequency penalty (0 is off)", 0.0, 2.0, float(frequency_penalty), 0.1),
        Slider("length", "Length of a passage (tokens)", 1, 8, length),
    ]
    return FigureForm(
        lambda length, **state: draw_repetition(state["prompt"], *both(**state), length),
        lambda length, **state: describe_repetition(state["prompt"], *both(**state), length),
        controls,
    )


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_repetition(prompt: str, without: Continuation, penalized: Continuation, length: int = 4) -> Figure:
    """The shares of repeated tokens over time, and both texts with their repeated passages marked."""
    texts = (without, penalized)
    problems = [in_font(problem) for problem in penalized.problems]
    flows = [flow(text.labels, _WIDTH - 2 * _MARGIN) for text in texts]
    rows = [min(_MOST_LINES, len(lines)) for lines in flows]
    below = sum(_HEAD + _LINE * count for count in rows) + 0.14 + problem_space(problems)
    height = _TOP + _CURVE + _RUG + 0.5 + below
    figure = Figure(figsize=(_WIDTH, height))
    for line, y, size in ((_title(prompt), 0.22, 11), (_summary(texts, length), 0.48, 9.5)):
        figure.text(_MARGIN / _WIDTH, 1 - y / height, shortened(line, _WIDTH - 0.4, size), fontsize=size, va="center",
                    color=BLACK if size > 10 else _DARK, parse_math=False)  # fmt: skip

    def axes_at(left: float, top: float, wide: float, high: float) -> Axes:
        return figure.add_axes((left / _WIDTH, 1 - (top + high) / height, wide / _WIDTH, high / height))

    wide = _WIDTH - _LEFT - _RIGHT
    _draw_curve(axes_at(_LEFT, _TOP, wide, _CURVE), texts, length)
    _draw_rug(axes_at(_LEFT, _TOP + _CURVE, wide, _RUG), texts, length)
    top = _TOP + _CURVE + _RUG + 0.5
    for number, (text, lines, count) in enumerate(zip(texts, flows, rows, strict=True)):
        high = _HEAD + _LINE * count
        axes = axes_at(0, top, _WIDTH, high)
        axes.set(xlim=(0, _WIDTH), ylim=(high, 0))
        axes.set_axis_off()
        _draw_text(axes, number, text, lines[:count], length)
        top += high
    write_problems(figure, problems, _MARGIN)
    return figure


def _draw_curve(axes: Axes, texts: Sequence[Continuation], length: int) -> None:
    longest = max(*(len(text.token_ids) for text in texts), 2)
    ends = []
    for text, (colour, dashes) in zip(texts, _LOOKS, strict=True):
        heights = [100 * share for share in shares(repeats(text.token_ids, length))]
        axes.plot(range(1, len(heights) + 1), heights, color=colour, linestyle=dashes, linewidth=2, clip_on=False)
        ends.append((heights or [0.0])[-1])
    for text, y, (colour, _) in zip(texts, _apart(ends), _LOOKS, strict=True):
        parts = _name(text).split(" and ")
        name = parts[0] if len(parts) == 1 else f"{len(parts)} penalties"
        axes.text(1.012 * longest, y, name, fontsize=9, va="center", color=colour, weight="bold")
    axes.set(xlim=(1, longest), ylim=(-4, 104), xticks=[])
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel(f"repeats among the\nlast {WINDOW} tokens (%)", fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_visible(False)


def _apart(ends: Sequence[float], distance: float = 11.0) -> list[float]:
    """Where two names stand whose lines end at these heights: beside them, but not on each other."""
    first, second = ends
    push = max(0.0, distance - abs(first - second)) / 2
    first, second = (first + push, second - push) if first >= second else (first - push, second + push)
    lift = max(0.0, 2.0 - min(first, second))
    return [first + lift, second + lift]


def _draw_rug(axes: Axes, texts: Sequence[Continuation], length: int) -> None:
    """A tick for each token that repeats, in a row for each text."""
    longest = max(*(len(text.token_ids) for text in texts), 2)
    for row, (text, (colour, _)) in enumerate(zip(texts, _LOOKS, strict=True)):
        at = [place + 1 for place, again in enumerate(repeats(text.token_ids, length)) if again]
        axes.vlines(at, row + 0.12, row + 0.88, color=colour, linewidth=2.0)
        axes.text(1.012 * longest, row + 0.5, counted(len(at), "repeat"), fontsize=8.5, va="center", color=colour)
    axes.set(xlim=(1, longest), ylim=(2, 0), yticks=[])
    axes.set_xlabel("token of the answer (a tick for each that ends a repeated passage)", fontsize=9)
    axes.spines["left"].set_visible(False)


def flow(labels: Sequence[str], width: float) -> list[list[tuple[int, float, str]]]:
    """Lines of (number of the token, x in inches, text): tokens one after the other, broken before a space if possible.

    A space is a space, and not drawn at the beginning of a line; other white space keeps its sign.
    """
    lines: list[list[tuple[int, float, str]]] = []
    line: list[tuple[int, float, str]] = []
    x = 0.0
    for word in _words(labels):
        for number, shown in word:
            body = shown.lstrip(" ")
            whole = sum(text_width(part.lstrip(" ") if part is shown else part, _SIZE) for _, part in word)
            start = x + text_width(" ", _SIZE) * (len(shown) - len(body))
            begins = number == word[0][0]
            if line and start + (whole if begins else text_width(body, _SIZE)) > width:
                lines.append(line)
                line, start = [], 0.0
            if not line:
                start = 0.0
            line.append((number, start, body))
            x = start + text_width(body, _SIZE)
    return [*lines, line] if line else lines


def _words(labels: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Tokens that belong together: a word begins with a space or after the sign of a new line."""
    words: list[list[tuple[int, str]]] = []
    for number, label in enumerate(labels):
        shown = in_font(label.replace("␣", " "))
        if not words or shown.startswith(" ") or words[-1][-1][1].endswith("↵"):
            words.append([])
        words[-1].append((number, shown))
    return words


def _draw_text(
    axes: Axes, which: int, text: Continuation, lines: Sequence[Sequence[tuple[int, float, str]]], length: int
) -> None:
    marked = covered(repeats(text.token_ids, length), length)
    colour, _ = _LOOKS[which]
    axes.text(_MARGIN, 0.2, _name(text), fontsize=9.5, weight="bold", color=colour, va="center")
    for row, line in enumerate(lines):
        y = _HEAD + _LINE * (row + 0.5)
        for place, (number, x, shown) in enumerate(line):
            end = x + text_width(shown, _SIZE)
            joined = place + 1 < len(line) and marked[number] and marked[line[place + 1][0]]
            if marked[number]:
                wide = (line[place + 1][1] if joined else end) - x
                axes.add_patch(Rectangle((_MARGIN + x, y - 0.1), wide, 0.2, facecolor=_PALE[which], linewidth=0))
                axes.plot([_MARGIN + x, _MARGIN + x + wide], [y + 0.1] * 2, color=colour, linewidth=1.0)
            axes.text(_MARGIN + x, y, shown, fontsize=_SIZE, va="center_baseline", color=BLACK, parse_math=False)
    shown_tokens = lines[-1][-1][0] + 1 if lines and lines[-1] else 0
    rest = len(text.labels) - shown_tokens
    note = f"… and {counted(rest, 'more token')}" if rest else "the model ends the text here" if text.ended else ""
    axes.text(_WIDTH - _MARGIN, 0.2, note, fontsize=8.5, va="center", ha="right", color=GREY)


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_repetition(prompt: str, without: Continuation, penalized: Continuation, length: int = 4) -> str:
    """How much repeats in each text, where they part, and the texts."""
    texts = (without, penalized)
    lines = [_title(prompt), _summary(texts, length), _parting(without, penalized)]
    for text in texts:
        words = "".join(text.labels).replace("␣", " ")
        lines.append(f"{_name(text)}: {words!r}{' (the model ends it)' if text.ended else ''}")
    return "\n".join([*lines, *penalized.problems])


def _title(prompt: str) -> str:
    return f"Greedy decoding after “{in_one_line(prompt)}”"


def _name(text: Continuation) -> str:
    return penalties_in_words(text.params)


def _summary(texts: Sequence[Continuation], length: int) -> str:
    counts = [(sum(repeats(text.token_ids, length)), len(text.token_ids)) for text in texts]
    said = [f"{_name(text)}: {count:,} of {total:,}" for text, (count, total) in zip(texts, counts, strict=True)]
    said[0] += f" tokens {'were' if length == 1 else f'end a passage of {length} that was'} there before"
    return "; ".join(said)


def _parting(without: Continuation, penalized: Continuation) -> str:
    pairs = enumerate(zip(without.token_ids, penalized.token_ids, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), None)
    if at is not None:
        return f"They part at token {at + 1}: {without.labels[at]!r} becomes {penalized.labels[at]!r}"
    if len(without.token_ids) != len(penalized.token_ids):
        return "One text is the beginning of the other"
    return "Both texts are the same"
