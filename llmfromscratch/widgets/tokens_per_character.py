"""What a text costs in tokens, by its language and by its kind: bars over sample texts, counted with a tokenizer.

The mark on each row is what a tokenizer would need that gives every byte a token: no byte-level tokenizer needs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from llmfromscratch.widgets.controls import Choice, Control
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened
from llmfromscratch.widgets.sample_texts import CONTENT, LANGUAGES
from llmfromscratch.widgets.style import ALARM, BLACK, BLUE, ORANGE, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted, read_tokens

MEASURES = ("tokens per character", "bytes per token", "tokens for the same meaning")
SORTS = ("as listed", "smallest first", "largest first")
_LANGUAGE, _CONTENT = "languages, one meaning", "other content"
_LOOKS = {_LANGUAGE: (BLUE, ""), _CONTENT: (ORANGE, "//")}
_WIDTH, _LEFT, _BARS_WIDTH, _ROW, _ABOVE, _BELOW = 10.0, 1.35, 6.8, 0.3, 0.68, 0.62  # inches


@dataclass(frozen=True)
class Count:
    """One text, counted. problems: what is wrong with its tokens; with any, the count means little."""

    name: str
    kind: str
    characters: int
    nbytes: int
    tokens: int
    problems: tuple[str, ...]

    def measure(self, measure: str, whole: int) -> float:
        """The bar's length in one of MEASURES. whole: the tokens of the text that meanings are compared with."""
        if measure == "tokens per character":
            return self.tokens / self.characters
        if measure == "bytes per token":
            return self.nbytes / self.tokens if self.tokens else 0.0
        return self.tokens / whole if whole else 0.0

    def one_byte_each(self, measure: str, whole: int) -> float:
        """The same if every byte were a token."""
        if measure == "tokens per character":
            return self.nbytes / self.characters
        return 1.0 if measure == "bytes per token" else self.nbytes / whole if whole else 0.0


def tokens_per_character(
    tokenizer: Any, texts: Mapping[str, str] | None = None, content: Mapping[str, str] | None = None
) -> FigureForm:
    """The bars with their controls: the measure, and the order.

    tokenizer: as in `token_borders`. texts: name -> texts of the same meaning, the first is what the others are
    compared with; content: name -> other texts. Without both, those of `sample_texts` are taken.
    """
    if texts is None and content is None:
        texts, content = LANGUAGES, CONTENT
    groups = {_LANGUAGE: dict(texts or {}), _CONTENT: dict(content or {})}
    empty = [name for group in groups.values() for name, text in group.items() if not text]
    if empty or not any(groups.values()):
        which = f"{empty[0]!r} is empty" if empty else "there are none"
        raise ValueError(f"Tokens are counted over texts of at least one character; {which}.")
    controls: list[Control] = [
        Choice("measure", "Measure", {name: name for name in MEASURES if texts or name != MEASURES[2]}, MEASURES[0]),
        Choice("sort", "Order", {name: name for name in SORTS}, SORTS[0]),
    ]

    def draw(measure: str, sort: str) -> Figure:
        return draw_tokens_per_character(count(tokenizer, groups), measure, sort)

    def describe(measure: str, sort: str) -> str:
        return describe_tokens_per_character(count(tokenizer, groups), measure, sort)

    return FigureForm(draw, describe, controls)


def count(tokenizer: Any, groups: Mapping[str, Mapping[str, str]]) -> list[Count]:
    """The counts of all texts, kind -> name -> text, in their order."""
    counts = []
    for kind, texts in groups.items():
        for name, text in texts.items():
            reading = read_tokens(tokenizer, text)
            counts.append(Count(name, kind, len(text), len(reading.text), len(reading.tokens), reading.problems))
    return counts


def draw_tokens_per_character(counts: Sequence[Count], measure: str = MEASURES[0], sort: str = SORTS[0]) -> Figure:
    """The bars as a figure. measure: one of MEASURES; sort: one of SORTS."""
    shown, whole = _shown(counts, measure, sort), _whole(counts)
    problems = [in_font(problem) for problem in _problems(shown)]
    below = _BELOW + problem_space(problems)
    height = _ABOVE + _ROW * len(shown) + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((_LEFT / _WIDTH, below / height, _BARS_WIDTH / _WIDTH, _ROW * len(shown) / height))
    for row, one in enumerate(shown):
        _draw_bar(axes, row, one, measure, whole)
    longest = max(max(one.measure(measure, whole), one.one_byte_each(measure, whole)) for one in shown)
    axes.set(xlim=(0, 1.03 * longest or 1), ylim=(len(shown) - 0.5, -0.5), xlabel=_axis_label(measure, counts))
    axes.set_yticks(range(len(shown)), [shortened(one.name, _LEFT - 0.25, 9) for one in shown])
    axes.tick_params(axis="y", length=0)
    for row, one in enumerate(shown):
        if one.problems:
            axes.get_yticklabels()[row].set_color(ALARM)
    _draw_legend(axes, shown)
    figure.text(0.3 / _WIDTH, 1 - 0.24 / height, _heading(shown, measure), fontsize=11, va="center", parse_math=False)
    write_problems(figure, problems, 0.3)
    return figure


def describe_tokens_per_character(counts: Sequence[Count], measure: str = MEASURES[0], sort: str = SORTS[0]) -> str:
    """A line for each bar with its numbers, then what is wrong."""
    shown, whole = _shown(counts, measure, sort), _whole(counts)
    width = max(len(one.name) for one in shown)
    lines = [
        f"  {one.name:{width}}  {_value(one, measure, whole)}   ({counted(one.tokens, 'token')}, "
        f"{counted(one.characters, 'character')}, {counted(one.nbytes, 'byte')})"
        for one in shown
    ]
    problems = _problems(shown) or ["In all of them the tokens give back the text."]
    label = _axis_label(measure, counts)
    return "\n".join([label[0].upper() + label[1:], *lines, *problems])


def _shown(counts: Sequence[Count], measure: str, sort: str) -> list[Count]:
    """The counts in their order; where meanings are compared, only the texts that have one in common."""
    shown = [one for one in counts if measure != MEASURES[2] or one.kind == _LANGUAGE]
    if sort == "as listed":
        return shown
    whole = _whole(counts)
    return sorted(shown, key=lambda one: one.measure(measure, whole), reverse=sort == "largest first")


def _whole(counts: Sequence[Count]) -> int:
    """The tokens of the first text of those with the same meaning."""
    return next((one.tokens for one in counts if one.kind == _LANGUAGE), 0)


def _draw_bar(axes: Axes, row: int, one: Count, measure: str, whole: int) -> None:
    colour, hatch = _LOOKS[one.kind]
    value, limit = one.measure(measure, whole), one.one_byte_each(measure, whole)
    edge, line = (ALARM, 2.0) if one.problems else ("white", 0.0)
    if one.problems:
        colour, hatch = "white", "xxx"
    axes.barh(row, value, height=0.72, color=colour, hatch=hatch, edgecolor=edge, linewidth=line, zorder=2)
    axes.plot([limit, limit], [row - 0.42, row + 0.42], color=BLACK, linewidth=1.6, zorder=3)
    style: Any = {"transform": axes.get_yaxis_transform(), "fontsize": 9, "va": "center", "ha": "right"}
    style["color"] = ALARM if one.problems else BLACK
    axes.text(1.09, row, _value(one, measure, whole), **style)
    axes.text(1.22, row, counted(one.tokens, "token") if one.tokens else "", **style)


def _value(one: Count, measure: str, whole: int) -> str:
    if not one.tokens:
        return "no tokens"
    unit = "×" if measure == MEASURES[2] else ""
    return f"{one.measure(measure, whole):.2f}{unit}"


def _axis_label(measure: str, counts: Sequence[Count]) -> str:
    if measure != MEASURES[2]:
        return measure
    first = next((one.name for one in counts if one.kind == _LANGUAGE), "the first")
    return f"{measure} (times the tokens of {in_font(first)})"


def _heading(shown: Sequence[Count], measure: str) -> str:
    better = "more text in a token" if measure == "bytes per token" else "more tokens for one character"
    better = "more tokens for the same meaning" if measure == MEASURES[2] else better
    tokens = sum(one.tokens for one in shown)
    return f"{counted(len(shown), 'text')}, {counted(tokens, 'token')}; a longer bar is {better}"


def _draw_legend(axes: Axes, shown: Sequence[Count]) -> None:
    kinds = dict.fromkeys(one.kind for one in shown)
    handles: list[Any] = [
        Patch(facecolor=_LOOKS[kind][0], hatch=_LOOKS[kind][1], edgecolor="white", label=kind) for kind in kinds
    ]
    handles.append(Line2D([], [], color=BLACK, linewidth=1.6, marker="|", linestyle="none", markersize=11,
                          label="if every byte were a token"))  # fmt: skip
    if any(one.problems for one in shown):
        handles.append(Patch(facecolor="white", hatch="xxx", edgecolor=ALARM, label="not to be trusted"))
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.005), ncols=len(handles), borderaxespad=0.2,
        borderpad=0, handlelength=1.5, columnspacing=1.6, fontsize=9, frameon=False,
    )  # fmt: skip


def _problems(shown: Sequence[Count]) -> list[str]:
    """One sentence for each text with something wrong, the first three of them."""
    said = [f"{one.name}: {one.problems[0]}" for one in shown if one.problems]
    rest = len(said) - 3
    return said[:3] + ([f"And {rest} more texts with something wrong."] if rest > 0 else [])
