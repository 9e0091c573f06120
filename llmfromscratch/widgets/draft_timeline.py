"""Drafts over a text: which tokens were guessed and stood, which the model gave itself, and what was guessed in vain.

Above, the answer, pass by pass, with the rejected drafts beneath the token that came in their place. Below, a bar for
each pass: upwards what it gave, downwards the drafts that fell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from llmfromscratch import kv_cache
from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.draft_run import DraftRun, Lookup, record_drafts
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import FONT, in_font, shortened, text_width
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    GREY,
    PALE,
    SKY,
    VERMILION,
    in_share,
    problem_space,
    write_problems,
)
from llmfromscratch.widgets.token_reading import counted

DARK = "#555555"
GIVEN = "the given prompt"
TEXTS = {  # more prompts to choose from: one that repeats itself, and one that nobody can guess
    "a list that repeats itself": "- Monday: open the gate, feed the hens, water the beans\n"
    "- Tuesday: open the gate, feed the hens, mend the fence\n"
    "- Wednesday: open the gate, feed the hens, pick the plums\n- Thursday:",
    "free text": "The old lighthouse keeper looked out over the water and thought of",
}
MOST, LONGEST = 12, 6  # what the controls offer
_WIDTH, _MARGIN, _LEFT, _RIGHT = 10.0, 0.25, 0.75, 0.25  # inches
_BOX, _NUMBER, _FALLEN, _LINE_GAP, _AIR, _BETWEEN = 0.27, 0.17, 0.2, 0.12, 0.05, 0.1
_TOP, _GAP, _BARS, _BELOW = 0.98, 0.22, 1.5, 0.8
_SIZE, _SMALL = 10.0, 8.0


def draft_timeline(
    llm: Any, prompt_ids: Sequence[int], lookup_draft: Lookup, *, most: int = 6, longest: int = 3, tokens: int = 40
) -> FigureForm:
    """The timeline with its controls: which text, how many drafts a pass has at most, how long the ending is.

    llm: anything with `model` and `tokenizer`, best in float32. lookup_draft: as `optimization.lookup_draft`. tokens:
    of the answer. The model answers greedily, anew for each state that was not shown before.
    """
    prompts: dict[str, Any] = {GIVEN: prompt_ids, **TEXTS}
    caches: dict[str, kv_cache.KVCache] = {}  # each holds its prompt, which need not be computed again
    runs: dict[tuple[str, int, int], DraftRun] = {}

    def run(state: Mapping[str, Any]) -> DraftRun:
        name, drafts, ending = key = state["text"], state["most"], state["longest"]
        if key not in runs:
            ids = llm.tokenizer.encode(prompts[name]) if isinstance(prompts[name], str) else prompts[name]
            caches[name] = caches.get(name) or kv_cache.ConcatKVCache(llm.model.config.num_layers)
            runs[key] = record_drafts(llm, ids, lookup_draft, ending, drafts, tokens, caches[name])
        return runs[key]

    controls: list[Control] = [
        Choice("text", "Text", {name: name for name in prompts}, GIVEN),
        Slider("most", "Drafts a pass, at most (0: none)", 0, MOST, most),
        Slider("longest", "Longest ending (tokens)", 1, LONGEST, longest),
    ]
    return FigureForm(
        lambda **state: draw_draft_timeline(run(state)), lambda **state: describe_draft_timeline(run(state)), controls
    )


# ---- the picture -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """A token of the answer in the picture: left end and width in inches, line and pass from 0.

    beneath: the drafts that fell at its place, shortened, and how many more there were.
    """

    x: float
    width: float
    line: int
    number: int
    text: str
    stood: bool
    beneath: tuple[str, str] = ("", "")


def draw_draft_timeline(run: DraftRun) -> Figure:
    """The answer's tokens pass by pass, and what each pass gave."""
    cells = _lay_out(run)
    problems = [in_font(problem) for problem in run.problems]
    line_high = _NUMBER + _BOX + _FALLEN + _LINE_GAP
    text_high = line_high * (cells[-1].line + 1)
    below = _BELOW + problem_space(problems)
    height = _TOP + text_high + _GAP + _BARS + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    for text, y, size in zip([*_heading(run), _prompt_end(run)], (0.26, 0.5, 0.76), (11, 9.5, 9.5), strict=True):
        axes.text(_MARGIN, y, text, fontsize=size, va="center", color=BLACK if size > 9.5 else DARK, parse_math=False)
    for cell in cells:
        _draw_cell(axes, cell, _TOP + cell.line * line_high)
    _draw_numbers(axes, cells, line_high)
    box = (_LEFT / _WIDTH, below / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _BARS / height)
    _draw_bars(figure.add_axes(box), run)
    _draw_key(figure, problem_space(problems) / height)
    write_problems(figure, problems, _MARGIN)
    return figure


def _lay_out(run: DraftRun) -> list[_Cell]:
    """Pass after pass, a pass on one line where it fits; never empty."""
    end, x, line = _WIDTH - _MARGIN, _MARGIN, 0
    cells: list[_Cell] = []
    for number, each in enumerate(run.passes):
        group = []
        for place, token in enumerate(each.tokens):
            last = place == len(each.tokens) - 1
            beneath = _beneath(run, each.fell) if last else ("", "")
            text = shortened(run.label(token), 1.6, _SIZE)
            wide = max(text_width(text, _SIZE) + 2 * _AIR, 0.16)
            below = sum(text_width(part, _SMALL) for part in beneath) + 0.08 if each.fell and last else 0.0
            group.append((wide, max(wide, below), text, place < each.stood, beneath))
        if x > _MARGIN and x + sum(slot for _, slot, *_ in group) > end:
            x, line = _MARGIN, line + 1
        for wide, slot, text, stood, beneath in group:
            if x > _MARGIN and x + slot > end:
                x, line = _MARGIN, line + 1
            cells.append(_Cell(x, wide, line, number, text, stood, beneath))
            x += slot + 0.02
        x += _BETWEEN
    return cells


def _beneath(run: DraftRun, fell: Sequence[int]) -> tuple[str, str]:
    if not fell:
        return "", ""
    return shortened(run.label(fell[0]), 0.9, _SMALL), f" +{len(fell) - 1}" if len(fell) > 1 else ""


def _draw_cell(axes: Axes, cell: _Cell, top: float) -> None:
    top += _NUMBER
    look: Any = {"facecolor": SKY, "edgecolor": SKY} if cell.stood else {"facecolor": "white", "edgecolor": BLACK}
    axes.add_patch(Rectangle((cell.x, top), cell.width, _BOX, linewidth=0.9, zorder=2, **look))
    axes.text(cell.x + cell.width / 2, top + _BOX / 2, cell.text, fontsize=_SIZE, ha="center", va="center_baseline",
              family=FONT, zorder=3, parse_math=False)  # fmt: skip
    word, rest = cell.beneath
    if not word:
        return
    y, wide = top + _BOX + 0.11, text_width(word, _SMALL)
    axes.text(cell.x + 0.02, y, word, fontsize=_SMALL, va="center_baseline", color=ALARM, family=FONT, zorder=3,
              parse_math=False)  # fmt: skip
    axes.plot([cell.x, cell.x + wide + 0.04], [y, y], color=VERMILION, linewidth=0.8, zorder=2)
    axes.text(cell.x + 0.02 + wide, y, rest, fontsize=_SMALL, va="center_baseline", color=ALARM, family=FONT, zorder=3)


def _draw_numbers(axes: Axes, cells: Sequence[_Cell], line_high: float) -> None:
    """A bracket over what a pass gave, and its number."""
    spans: dict[tuple[int, int], list[_Cell]] = {}
    for cell in cells:
        spans.setdefault((cell.number, cell.line), []).append(cell)
    named = set()
    for (number, line), group in spans.items():
        left, right, y = group[0].x, group[-1].x + group[-1].width, _TOP + line * line_high + _NUMBER - 0.05
        axes.plot([left, right], [y, y], color=GREY, linewidth=0.9, zorder=2)
        if number not in named:
            axes.text(left, y - 0.025, str(number + 1), fontsize=6.5, color=DARK, va="bottom", zorder=3)
            named.add(number)


def _draw_bars(axes: Axes, run: DraftRun) -> None:
    """Upwards the drafts that stood and the model's own token, downwards the drafts that fell."""
    for number, each in enumerate(run.passes, 1):
        own = len(each.tokens) - each.stood
        axes.bar(number, each.stood, width=0.7, color=SKY, zorder=2)
        axes.bar(number, own, width=0.7, bottom=each.stood, facecolor="white", edgecolor=BLACK, linewidth=0.9, zorder=2)
        axes.bar(number, -len(each.fell), width=0.7, facecolor=PALE, edgecolor=VERMILION, hatch="////", linewidth=0.6,
                 zorder=2)  # fmt: skip
    most = max(len(each.tokens) for each in run.passes)
    least = max(len(each.fell) for each in run.passes)
    axes.axhline(0, color=BLACK, linewidth=0.9, zorder=3)
    axes.set(xlim=(0.4, max(len(run.passes), 12) + 0.6), ylim=(-max(least, 1) - 0.4, max(most, 2) + 0.4))
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):.0f}")
    axes.set_xlabel("pass", fontsize=9, labelpad=1)
    axes.set_ylabel("tokens", fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_key(figure: Figure, bottom: float) -> None:
    handles: list[Any] = [
        Patch(facecolor=SKY, label="a draft that stood"),
        Patch(facecolor="white", edgecolor=BLACK, linewidth=0.9, label="the model's own token"),
        Patch(facecolor=PALE, edgecolor=VERMILION, hatch="////", linewidth=0.6,
              label="drafts that fell (in the text: the first of them, and how many more)"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.15 / _WIDTH, bottom), ncols=len(handles),
                  fontsize=9, frameon=False, borderpad=0.3, columnspacing=1.6, handlelength=1.8)  # fmt: skip


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_draft_timeline(run: DraftRun) -> str:
    """The heading, the answer, the tokens of each pass, and what is wrong with the drafts."""
    gained = " ".join(str(len(each.tokens)) for each in run.passes)
    answer = in_font(run.text(run.tokens))
    return "\n".join([*_heading(run), _prompt_end(run), f"Answer: {answer}", f"Tokens of each pass: {gained}",
                      *run.problems])  # fmt: skip


def _heading(run: DraftRun) -> list[str]:
    tokens, passes = len(run.tokens), len(run.passes)
    limit = f"up to {counted(run.most, 'draft')} each, found by endings of up to {counted(run.longest, 'token')}"
    rows = run.drafted + passes
    share = f" ({in_share(run.stood, run.drafted)})" if run.drafted else ""
    return [
        f"{counted(tokens, 'token')} in {passes} {'pass' if passes == 1 else 'passes'}, {tokens / passes:.1f} a pass: "
        + (limit if run.most else "no drafts"),
        f"{run.stood} of {counted(run.drafted, 'draft')} stood{share}; {counted(rows, 'row')} computed, "
        f"{run.drafted - run.stood} of them in vain",
    ]


def _prompt_end(run: DraftRun) -> str:
    """The end of the prompt, as much of it as a line holds."""
    text, front = in_font(run.text(run.prompt_ids)), "The prompt ends: "
    cut = next(at for at in range(len(text) + 1)
               if text_width(f"{front}…{text[at:]}", 9.5) <= _WIDTH - 2 * _MARGIN)  # fmt: skip
    return f"{front}{'…' if cut else ''}{text[cut:]}"
