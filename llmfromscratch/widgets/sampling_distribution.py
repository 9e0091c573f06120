"""The next token's distribution under one's hands: what each control of sampling keeps, cuts and moves.

A row is a token. What is kept is solid, and wider by its share of what was cut; what is cut is hatched, and says by
which filter. The last setting stays as an outline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from llmfromscratch import sampling
from llmfromscratch.widgets.controls import Choice, Control, Slider, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.glyphs import in_font, shortened, text_width
from llmfromscratch.widgets.sampling_stages import (
    Part,
    Prompt,
    Stages,
    choose_parts,
    entropy_of,
    gained_and_lost,
    in_one_line,
    read_prompt,
    run_stages,
)
from llmfromscratch.widgets.style import (
    BLACK,
    BLUE,
    GREY,
    ICE,
    NAVY,
    ORANGE,
    PALE,
    SKY,
    problem_space,
    write_problems,
)
from llmfromscratch.widgets.token_reading import counted

PROMPTS = (
    "My favourite animal is the",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "My favourite animal is the elephant. My favourite animal is the",
)
ROWS = 20  # tokens drawn; the others are counted in words
_NAMES = {"top_k": "top-k", "top_p": "top-p", "min_p": "min-p", "": "the sampler"}
_HATCHES = {"top_k": "////", "top_p": "\\\\\\\\", "min_p": "....", "": "xxxx"}
_FAVOURITES = 5  # of the model, that keep a row however far they fall
_SEEN = "↺"
DARK = "#555555"
_WIDTH, _LEFT, _BARS, _GAP, _SUMS = 10.0, 1.55, 4.75, 0.75, 2.7  # inches
_ROW, _TOP, _BELOW = 0.225, 1.52, 0.9
_HIGHEST = 1.03  # of the running sum's axis
_LINES = (0.22, 0.5, 0.75, 0.98, 1.21)


def sampling_distribution(
    llm: Any,
    module: Any = None,
    prompts: Sequence[str] = PROMPTS,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.9,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    **parts: Part | None,
) -> FigureForm:
    """The distribution with its controls: the prompt, temperature, top-k, top-p, min-p and repetition penalty.

    llm: anything with `model` and `tokenizer`. module: something with the functions of `sampling`, which it is if None.
    parts: functions in the place of the module's, by their names, such as keep_top_p=my_keep_top_p.
    """
    own = choose_parts(parts)
    read: dict[str, Prompt] = {}
    past: list[tuple[Mapping[str, Any], Stages]] = []  # the last two settings that differ, the newer one last

    def stages(state: Mapping[str, Any]) -> tuple[Stages, Stages | None]:
        if not past or past[-1][0] != state:
            text = state["prompt"]
            read[text] = read.get(text) or read_prompt(llm, text)
            settings = {name: value for name, value in state.items() if name != "prompt"}
            past.append((state, run_stages(read[text], sampling.SamplingParams(**settings), own, module)))
            del past[:-2]
        now, before = past[-1][1], past[0][1]
        return now, before if before is not now and before.prompt is now.prompt else None

    start = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    return FigureForm(
        lambda **state: draw_sampling_distribution(*stages(state)),
        lambda **state: describe_sampling_distribution(*stages(state)),
        _controls(prompts, start),
    )


def _controls(prompts: Sequence[str], start: Mapping[str, Any]) -> list[Control]:
    counts = {"off": 0} | {f"{count:,}": count for count in sorted({*_COUNTS, start["top_k"]} - {0})}
    return [
        Choice("prompt", "Prompt", {_shown(text): text for text in prompts}, prompts[0]),
        Slider("temperature", "Temperature", 0.1, 2.5, float(start["temperature"]), 0.1),
        Stops("top_k", "Top-k (tokens)", counts, start["top_k"]),
        Slider("top_p", "Top-p (1 is off)", 0.05, 1.0, float(start["top_p"]), 0.05),
        Slider("min_p", "Min-p (0 is off)", 0.0, 0.5, float(start["min_p"]), 0.01),
        Slider(
            "repetition_penalty", "Repetition penalty (1 is off)", 1.0, 2.0, float(start["repetition_penalty"]), 0.05
        ),
    ]


def _shown(text: str) -> str:
    line = in_one_line(text)
    return line if len(line) < 70 else f"{line[:69]}…"


_COUNTS = (1, 2, 3, 5, 10, 20, 50, 100, 500)


# ---- the picture -------------------------------------------------------------------------------------------------


def draw_sampling_distribution(stages: Stages, before: Stages | None = None) -> Figure:
    """The most probable tokens, kept and cut, and the running sum. before: the last setting, drawn as outlines."""
    problems = [in_font(problem) for problem in stages.problems]
    places = shown_places(stages)
    below = _BELOW + problem_space(problems)
    height = _TOP + _ROW * (len(places) + 1) + below
    figure = Figure(figsize=(_WIDTH, height))
    lines = _heading(stages, before)
    lines += [] if before else ["When a control is moved, the last setting stays as an outline."]
    for text, y, size in zip(lines, _LINES, (11, 10, 9.5, 9.5, 9.5), strict=True):
        figure.text(0.2 / _WIDTH, 1 - y / height, shortened(text, _WIDTH - 0.4, size), fontsize=size, va="center",
                    color=BLACK if size > 9.5 else DARK, parse_math=False)  # fmt: skip

    def axes_at(left: float, wide: float) -> Axes:
        box = (left / _WIDTH, below / height, wide / _WIDTH, _ROW * (len(places) + 1) / height)
        return figure.add_axes(box)

    _draw_bars(axes_at(_LEFT, _BARS), stages, before, places)
    _draw_sums(axes_at(_LEFT + _BARS + _GAP, _SUMS), stages)
    _draw_key(figure, stages, before, problem_space(problems) / height)
    write_problems(figure, problems, 0.2)
    return figure


def shown_places(stages: Stages) -> list[int]:
    """The places of the ranking that get a row: the first ones, and at their end the model's favourites that fell."""
    count = min(ROWS, len(stages.ids))
    favourites = stages.model.topk(min(_FAVOURITES, count)).indices.tolist()
    fallen = sorted(place for place in favourites if place >= count)
    return [*range(count - len(fallen)), *fallen]


def _draw_bars(axes: Axes, stages: Stages, before: Stages | None, places: Sequence[int]) -> None:
    spread, final = stages.spread[places].tolist(), stages.final[places].tolist()
    ghosts = _probabilities_of(before, stages.ids[places]) if before else [0.0] * len(places)
    longest = max(*spread, *final, *ghosts)
    for row, place in enumerate(places):
        if final[row] > 0:
            axes.barh(row, final[row], height=0.74, color=SKY, zorder=2)
            axes.barh(row, min(spread[row], final[row]), height=0.74, color=BLUE, zorder=3)
        else:
            look: Any = {"color": PALE, "edgecolor": GREY, "hatch": _HATCHES[stages.cut_by(place)], "linewidth": 0.6}
            axes.barh(row, spread[row], height=0.74, zorder=2, **look)
        if ghosts[row] > 0:
            axes.add_patch(Rectangle((0, row - 0.37), ghosts[row], 0.74, fill=False, edgecolor=BLACK, linewidth=0.9,
                                     linestyle=(0, (3, 2)), zorder=4))  # fmt: skip
        end = max(spread[row], final[row], ghosts[row]) + 0.012 * longest
        words, colour = _row_in_words(stages, place, row), BLACK if final[row] > 0 else DARK
        axes.text(end, row, words, fontsize=8.5, va="center", color=colour, zorder=5)
    axes.text(0.012 * longest, len(places), _others(stages, places), fontsize=8.5, va="center", color=DARK)
    axes.set(xlim=(0, 1.3 * longest), ylim=(len(places) + 0.5, -0.5))
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= min(1.001, 1.3 * longest)])
    axes.set_xlabel("probability of being drawn; of what is cut, before the cut", fontsize=9)
    names = [*(_name(stages, place) for place in places), "all others"]
    axes.set_yticks(range(len(places) + 1), names, fontsize=9.5, parse_math=False)
    axes.tick_params(axis="y", length=0)


def _draw_sums(axes: Axes, stages: Stages) -> None:
    """The running sum over all tokens, as top-p is given it; the ranks that are kept are filled."""
    cut = next((cut for cut in stages.cuts if cut.name == "top_p"), None)
    given = stages.spread if cut is None else cut.before
    count = int(given.nonzero()[-1]) + 1
    sums, ranks = [0.0, *given.cumsum(-1)[:count].tolist()], list(range(1, count + 2))
    for first, end in _runs(stages.kept[:count].tolist()):
        axes.fill_between(ranks[first : end + 1], [*sums[first + 1 : end + 1], sums[end]], step="post", color=ICE,
                          linewidth=0, zorder=1)  # fmt: skip
    axes.step(ranks, [*sums[1:], sums[-1]], where="post", color=NAVY, linewidth=1.4, zorder=3)
    if cut is not None:
        axes.axhline(cut.value, color=ORANGE, linewidth=1.8, linestyle=(0, (5, 2)), zorder=2)
        _name_line(axes, cut.value, sums[1:], len(stages.ids) + 1, _ROW * (len(shown_places(stages)) + 1))
    axes.set_xscale("log")
    axes.set(xlim=(1, len(stages.ids) + 1), ylim=(0, _HIGHEST))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    of = " of what top-k left" if any(one.name == "top_k" for one in stages.cuts) else ""
    axes.set_xlabel("rank of the token (filled: kept)", fontsize=9)
    axes.set_ylabel(f"running sum{of}", fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _name_line(axes: Axes, level: float, sums: Sequence[float], end: int, high: float) -> None:
    """The name of the line of top-p, below or above it, on the right or on the left: where the running sum is not.

    end: where the axis of ranks ends; high: the inches of the axes.
    """
    name = f"top-p {level:g}"
    high = 0.16 * _HIGHEST / high
    wide = (text_width(name, 9) + 0.08) / _SUMS  # as a share of the axis, which is logarithmic
    spots = [(right, above) for right in (True, False) for above in (False, True)]
    crossed = []
    for right, above in spots:
        first, last = (end**share for share in ((1 - wide, 1.0) if right else (0.0, wide)))
        low = level + 0.008 if above else level - 0.008 - high
        passed = sums[max(0, math.floor(first) - 1) : math.ceil(last)]  # none behind the curve's end
        inside = bool(passed) and passed[0] < low + high and passed[-1] > low
        crossed.append(inside or low < 0 or low + high > _HIGHEST)
    right, above = spots[crossed.index(False) if False in crossed else 0]
    x = end ** (1 - 0.03 / _SUMS if right else 0.03 / _SUMS)
    y = level + (0.008 if above else -0.008)
    axes.text(x, y, name, fontsize=9, ha="right" if right else "left", va="bottom" if above else "top")


def _runs(kept: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, end) of each run of kept places."""
    starts = [place for place, stays in enumerate(kept) if stays and not (place and kept[place - 1])]
    ends = [place + 1 for place, stays in enumerate(kept) if stays and not (place + 1 < len(kept) and kept[place + 1])]
    return list(zip(starts, ends, strict=True))


def _draw_key(figure: Figure, stages: Stages, before: Stages | None, bottom: float) -> None:
    handles: list[Any] = [
        Patch(facecolor=BLUE, label="kept"),
        Patch(facecolor=SKY, label="+ its share of what was cut"),
        Patch(facecolor=PALE, edgecolor=GREY, hatch="////", linewidth=0.6, label="cut"),
    ]
    if before:
        handles.append(Patch(fill=False, edgecolor=BLACK, linestyle=(0, (3, 2)), label="last setting"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.2 / _WIDTH, bottom), ncols=len(handles),
                  fontsize=9, frameon=False, borderpad=0.3, columnspacing=1.6, handlelength=1.8)  # fmt: skip
    height = figure.get_size_inches()[1]
    figure.text(1 - 0.2 / _WIDTH, bottom + 0.165 / height, f"{_SEEN} stands in the prompt", fontsize=9, ha="right",
                va="center")  # fmt: skip


def _name(stages: Stages, place: int) -> str:
    label = shortened(stages.label(place), _LEFT - 0.5, 9.5)
    return f"{_SEEN} {label}" if stages.seen(place) else label


def _row_in_words(stages: Stages, place: int, row: int) -> str:
    rank = f", rank {place + 1:,}" if place > row else ""
    if stages.kept[place]:
        return f"{_share(float(stages.final[place]))}{rank}"
    return f"{_share(float(stages.spread[place]))}{rank}, cut by {_NAMES[stages.cut_by(place)]}"


def _probabilities_of(stages: Stages, ids: torch.Tensor) -> list[float]:
    by_id = torch.zeros_like(stages.final)
    by_id[stages.ids] = stages.final
    return by_id[ids].tolist()


# ---- in words ----------------------------------------------------------------------------------------------------


def describe_sampling_distribution(stages: Stages, before: Stages | None = None) -> str:
    """The setting, how many tokens are kept, the entropy, the most probable tokens, and what changed."""
    places = [place for place in range(min(5, len(stages.ids))) if stages.kept[place]]
    top = ", ".join(f"{stages.label(place)!r} {float(stages.final[place]):.3f}" for place in places)
    return "\n".join([*_heading(stages, before), f"Most probable: {top}", *stages.problems])


def _heading(stages: Stages, before: Stages | None) -> list[str]:
    kept, total = int(stages.kept.sum()), len(stages.ids)
    bits, alone = entropy_of(stages.final), entropy_of(stages.model)
    return [
        f"The token after “{in_one_line(stages.prompt.text)}”",
        f"{_setting(stages)}: {kept:,} of {counted(total, 'token')} kept",
        f"Entropy {bits:.2f} bits; of the model's own distribution {alone:.2f} bits",
        _cuts_in_words(stages),
        *([_change(stages, before)] if before else []),
    ]


def _setting(stages: Stages) -> str:
    params = stages.params
    said = [f"repetition penalty {params.repetition_penalty:g}"] if params.repetition_penalty != 1 else []
    said.append(f"temperature {params.temperature:g}")
    said += [f"{_NAMES[cut.name]} {cut.value:g}" for cut in stages.cuts]
    return ", ".join(said).capitalize()


def _cuts_in_words(stages: Stages) -> str:
    """What each filter took away, in their order; each is given what those before it left, scaled to 1."""
    said: list[str] = []
    left = torch.ones_like(stages.kept)
    for cut in stages.cuts:
        gone = left & ~cut.kept
        tokens, of = (
            (f"{int(gone.sum()):,}", "") if said else (counted(int(gone.sum()), "token"), " of the probability")
        )
        said.append(f"{tokens} by {_NAMES[cut.name]} ({_share(float(cut.before[gone].sum()))}{of})")
        left &= cut.kept
    return f"Cut: {', '.join(said)}" if said else "No filter is on: every token can be drawn"


def _share(probability: float) -> str:
    return "< 0.001" if 0 < probability < 0.0005 else f"{probability:.3f}"


def _change(stages: Stages, before: Stages) -> str:
    gained, lost = gained_and_lost(stages, before)
    bits = entropy_of(stages.final) - entropy_of(before.final)
    named = [f"{_several(stages, ids)} {verb}" for ids, verb in ((gained, "gained"), (lost, "lost")) if ids]
    return f"Against the last setting: {', '.join(named) or 'the same tokens are kept'}; entropy {bits:+.2f} bits"


def _several(stages: Stages, ids: Sequence[int]) -> str:
    names = ", ".join(repr(stages.prompt.label(index)) for index in ids[:3])
    return f"{counted(len(ids), 'token')} ({names}{', …' if len(ids) > 3 else ''})"


def _others(stages: Stages, places: Sequence[int]) -> str:
    rest = torch.ones_like(stages.kept)
    rest[places] = False
    kept, cut = rest & stages.kept, rest & ~stages.kept
    said = [f"{int(kept.sum()):,} kept with {_share(float(stages.final[kept].sum()))}"] if kept.any() else []
    said += [f"{int(cut.sum()):,} cut, before that {_share(float(stages.spread[cut].sum()))}"] if cut.any() else []
    return "; ".join(said) or "none"
