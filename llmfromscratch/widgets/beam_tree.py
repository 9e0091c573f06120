"""A beam search as a tree: what each step kept, what it dropped, which ways died out, and which text won.

Columns are steps, from left to right. A box is a token on a way; its number is the log-probability of the answer up
to there. The best text is picked out, and compared with that of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from llmfromscratch.widgets.beam_record import CUT, ENDED, KEPT, Node, Tree, grow_tree
from llmfromscratch.widgets.controls import Choice, Control, Slider
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.sampling_stages import in_one_line
from llmfromscratch.widgets.style import BLACK, BLUE, GREY, ICE, ORANGE, PALE, problem_space, write_problems
from llmfromscratch.widgets.token_reading import counted

PROMPTS = ("The three primary colours are", "The capital of France is", "My favourite animal is the")
_DARK = "#555555"
_LOOKS: dict[str, dict[str, Any]] = {  # of boxes: each alone differs in fill, line and dashes
    "best": {"facecolor": "#FBDFA8", "edgecolor": ORANGE, "linewidth": 2.4},
    "kept": {"facecolor": ICE, "edgecolor": BLUE, "linewidth": 1.1},
    "died out": {"facecolor": PALE, "edgecolor": GREY, "linewidth": 1.1},
    "dropped": {"facecolor": "white", "edgecolor": GREY, "linewidth": 0.9, "linestyle": (0, (2, 2))},
}
_WIDTH, _SIDE, _ROOT = 10.0, 0.2, 0.55  # inches
_ROW, _BOX, _TOP, _LINE = 0.47, 0.36, 0.95, 0.23
_MOST_RESULTS = 5
Spots = list[list[float]]  # for each column the y of its nodes, downwards in inches


def beam_tree(
    llm: Any,
    prompts: Sequence[str] = PROMPTS,
    *,
    width: int = 3,
    length_penalty: float = 1.0,
    steps: int = 6,
    ends: Collection[int] | None = None,
    best_beams: Callable[..., Any] | None = None,
) -> FigureForm:
    """The tree with its controls: the prompt, the number of beams, the length penalty, and the number of steps.

    llm: anything with `model` and `tokenizer`. ends: token ids that end a text; None takes the model's own and that of
    a full stop. best_beams: in the place of `sampling.best_beams`.
    """
    known: dict[Hashable, Tree] = {}

    def tree(prompt: str, width: int, length_penalty: float, steps: int) -> Tree:
        key = prompt, width, length_penalty, steps
        if key not in known:
            known[key] = grow_tree(llm, prompt, width, length_penalty, steps, ends, best_beams)
        return known[key]

    controls: list[Control] = [
        Choice("prompt", "Prompt", {in_one_line(text): text for text in prompts}, prompts[0]),
        Slider("width", "Beams (width)", 1, 5, width),
        Slider("length_penalty", "Length penalty", -1.0, 3.0, float(length_penalty), 0.25),
        Slider("steps", "Steps (tokens at most)", 2, 8, steps),
    ]
    return FigureForm(
        lambda **state: draw_beam_tree(tree(**state)), lambda **state: describe_beam_tree(tree(**state)), controls
    )


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_beam_tree(tree: Tree) -> Figure:
    """The tree, and below it the texts that were found, the best first."""
    problems = [in_font(problem) for problem in tree.problems]
    order, spots = _places(tree)
    high = max(max(column, default=0.0) for column in spots) + _ROW / 2
    lines = _results(tree)
    below = 0.45 + _LINE * len(lines) + problem_space(problems)
    height = _TOP + high + below
    figure = Figure(figsize=(_WIDTH, height))
    axes = figure.add_axes((0, below / height, 1, (high + 0.32) / height), xlim=(0, _WIDTH), ylim=(high, -0.32))
    axes.set_axis_off()
    pitch = min(2.4, (_WIDTH - 2 * _SIDE - _ROOT - 0.05) / len(tree.columns))
    for text, y, size in ((_title(tree), 0.22, 11), (_setting(tree), 0.48, 9.5)):
        figure.text(_SIDE / _WIDTH, 1 - y / height, shortened(text, _WIDTH - 0.4, size), fontsize=size, va="center",
                    color=BLACK if size > 10 else _DARK, parse_math=False)  # fmt: skip
    _draw_nodes(axes, tree, order, spots, pitch)
    _draw_key(figure, 1 - (_TOP + high + 0.18) / height, height)
    for number, line in enumerate(lines):
        y = 1 - (_TOP + high + 0.52 + _LINE * number) / height
        figure.text(_SIDE / _WIDTH, y, shortened(line, _WIDTH - 0.4, 9.5), fontsize=9.5, va="center",
                    weight="bold" if number == 0 and tree.results else "normal", parse_math=False)  # fmt: skip
    write_problems(figure, problems, _SIDE)
    return figure


def _places(tree: Tree) -> tuple[list[list[int]], Spots]:
    """The order in each column, children of one node together so that no lines cross, and y of each node in inches."""
    rows = max(len(column) for column in tree.columns)
    orders: list[list[int]] = []
    rank = {0: 0}
    for column in tree.columns:
        order = sorted(range(len(column)), key=lambda n: (rank.get(column[n].parent, 0), -column[n].score, n))
        rank = {node: place for place, node in enumerate(order)}
        orders.append(order)
    spots = []
    for order in orders:
        top = (rows - len(order)) / 2
        at = {node: _ROW * (top + place + 0.5) for place, node in enumerate(order)}
        spots.append([at[node] for node in range(len(order))])
    return orders, spots


def _draw_nodes(axes: Axes, tree: Tree, order: Sequence[Sequence[int]], spots: Spots, pitch: float) -> None:
    middle = (max(max(ys) for ys in spots) + min(min(ys) for ys in spots)) / 2
    wide = min(1.25, pitch - 0.34)
    axes.text(_SIDE, middle, "prompt", fontsize=9, va="center")
    for number, column in enumerate(tree.columns):
        x = _SIDE + _ROOT + pitch * number + (pitch - wide)
        axes.text(x + wide / 2, -0.2, f"step {number + 1}", fontsize=9, ha="center", va="center", color=_DARK)
        for node in order[number]:
            one, look = column[node], _look(tree, number, node)
            y = spots[number][node]
            start = x - (pitch - wide) + (0.02 if number else -0.02)
            _draw_line(axes, (start, spots[number - 1][one.parent] if number else middle), (x, y), look)
            _draw_box(axes, tree, one, (x, y, wide), look)


def _look(tree: Tree, column: int, node: int) -> str:
    if tree.best[column : column + 1] == (node,):
        return "best"
    if tree.columns[column][node].kind == CUT:
        return "dropped"
    return "kept" if tree.goes_on(column, node) else "died out"


def _draw_line(axes: Axes, start: tuple[float, float], end: tuple[float, float], look: str) -> None:
    bend = (start[0] + end[0]) / 2
    curve = Path([start, (bend, start[1]), (bend, end[1]), end], [Path.MOVETO, *[Path.CURVE4] * 3])
    style = {key: value for key, value in _LOOKS[look].items() if key != "facecolor"}
    axes.add_patch(PathPatch(curve, fill=False, zorder=3 if look == "best" else 1, **style))


def _draw_box(axes: Axes, tree: Tree, node: Node, place: tuple[float, float, float], look: str) -> None:
    x, y, wide = place
    low, high = y - _BOX / 2, _BOX
    shape = "round,pad=0,rounding_size=0.06" if node.kind != ENDED else "square,pad=0"
    axes.add_patch(FancyBboxPatch((x, low), wide, high, boxstyle=shape, zorder=4, **_LOOKS[look]))
    colour = _DARK if look == "dropped" else BLACK
    weight: Any = "bold" if look == "best" else "normal"
    name = shortened(tree.label(node.token_id), (wide - 0.1) / (1.1 if look == "best" else 1), 9)
    axes.text(x + wide / 2, y - 0.075, name, fontsize=9, ha="center", va="center", color=colour, weight=weight,
              zorder=5, parse_math=False)  # fmt: skip
    axes.text(x + wide / 2, y + 0.09, f"{node.score:.2f}", fontsize=8, ha="center", va="center", color=colour, zorder=5)
    if node.kind == ENDED:
        axes.plot([x + wide, x + wide], [low - 0.04, low + high + 0.04], color=BLACK, linewidth=3, zorder=6)


def _draw_key(figure: Figure, y: float, height: float) -> None:
    entries = [("best", "best text"), ("kept", "kept"), ("died out", "kept, then died out"), ("dropped", "dropped")]
    x = _SIDE
    for look, words in entries:
        box = FancyBboxPatch((x / _WIDTH, y - 0.06 / height), 0.26 / _WIDTH, 0.12 / height, boxstyle="square,pad=0",
                             transform=figure.transFigure, **_LOOKS[look])  # fmt: skip
        figure.add_artist(box)
        figure.text((x + 0.34) / _WIDTH, y, words, fontsize=9, va="center")
        x += 0.64 + text_width(words, 9)
    figure.text(x / _WIDTH, y, "▌", fontsize=9, va="center", color=BLACK)
    figure.text((x + 0.13) / _WIDTH, y, "the text ends", fontsize=9, va="center")
    note = "number: log-probability of the answer so far"
    figure.text(1 - _SIDE / _WIDTH, y, note, fontsize=9, va="center", ha="right", color=_DARK)


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_beam_tree(tree: Tree) -> str:
    """The setting, each step's ways with their scores, and the texts that were found."""
    lines = [_title(tree), _setting(tree)]
    for number, column in enumerate(tree.columns, start=1):
        said = []
        for kind in (KEPT, ENDED, CUT):
            nodes = [node for node in column if node.kind == kind]
            if nodes:
                said.append(f"{kind} " + ", ".join(f"{tree.label(node.token_id)!r} {node.score:.2f}" for node in nodes))
        lines.append(f"Step {number}: {'; '.join(said)}")
    return "\n".join([*lines, *_results(tree), *tree.problems])


def _title(tree: Tree) -> str:
    return f"Beam search after “{in_one_line(tree.prompt)}”"


def _setting(tree: Tree) -> str:
    ends = " or ".join(f"“{tree.label(index)}”" for index in tree.ends) or "nothing"
    power = {"0": "", "1": " / length"}.get(f"{tree.length_penalty:g}", f" / length^{tree.length_penalty:g}")
    return (
        f"{counted(tree.width, 'beam')}, at most {counted(tree.steps, 'token')}; a text ends with {ends}; "
        f"texts are compared by their score = log-probability{power}"
    )


def _results(tree: Tree) -> list[str]:
    """The texts found, the best first, and what greedy decoding finds."""
    lines = []
    for place, result in enumerate(tree.results[:_MOST_RESULTS], start=1):
        cut = "" if result.finished else f", cut after {counted(len(result.token_ids), 'token')}"
        lines.append(f"{place}. “{tree.text(result.token_ids)}”  score {result.score:.3f}{cut}")
    if not lines:
        return ["No text was found."]
    if len(tree.columns) < tree.steps:
        lines.append(f"The search ended after {counted(len(tree.columns), 'step')}: no beam scores above these texts.")
    if tree.greedy.token_ids == tree.results[0].token_ids:
        return [*lines, "Greedy decoding finds the same best text."]
    return [*lines, f"Greedy decoding finds “{tree.text(tree.greedy.token_ids)}”  score {tree.greedy.score:.3f}"]
