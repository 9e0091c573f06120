"""Which layer goes where: the weights of a model, cut into modules and laid into the memory of up to three devices.

The first bar is all that has to be placed, the others are the devices, on one scale. The plan comes from
`loading.place_layers` or from a function that is given; what is wrong with it is seen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from llmfromscratch.config import ModelConfig
from llmfromscratch.placement import format_bytes
from llmfromscratch.widgets.controls import Choice, Control, Stops
from llmfromscratch.widgets.form import FigureForm
from llmfromscratch.widgets.placement_review import (
    PRESETS,
    Estimate,
    Place,
    Review,
    in_words,
    layer_number,
    review,
)
from llmfromscratch.widgets.style import (
    ALARM,
    BLACK,
    GREEN,
    GREY,
    PALE,
    PURPLE,
    Look,
    first_that_fits,
    in_parameters,
    problem_space,
    text_on,
    write_problems,
)

DTYPES = ("float32", "bfloat16", "int8", "int4")
GIGABYTES = (0, 0.1, 0.25, 0.5, 1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 256, 512)
DEFAULT_BUDGETS = {"GPU 0": 8e9, "GPU 1": 4e9, "CPU": 16e9}
_OWN = "the given config"
_MODULE_LOOKS: dict[str, Look] = {"embed_tokens": (GREEN, ""), "norm": (BLACK, ""), "lm_head": (PURPLE, "..")}
_WIDTH, _LEFT, _BARS_WIDTH = 10.0, 0.3, 9.4  # inches
_ROW, _BAR, _ABOVE, _BELOW = 0.74, 0.40, 0.45, 0.95


def placement_planner(
    config: ModelConfig | None = None,
    *,
    dtype: str = "bfloat16",
    budgets: Mapping[str, float] | None = None,
    place: Place | None = None,
    estimate: Estimate | None = None,
) -> FigureForm:
    """The planner with its controls: the model, the dtype, and the memory of each device.

    config: a model beside the PRESETS, shown first. budgets: device -> bytes at the start, one to three devices.
    place, estimate: functions in the place of `loading.place_layers` and `loading.estimate_bytes`.
    """
    budgets = dict(DEFAULT_BUDGETS if budgets is None else budgets)
    if not 1 <= len(budgets) <= 3:
        raise ValueError(f"The planner has room for one to three devices; {len(budgets)} budgets were given.")
    models = ({_OWN: config} if config is not None else {}) | PRESETS
    model = _OWN if config is not None else "Llama 2 7B"
    stops = sorted({gigabytes * 1e9 for gigabytes in GIGABYTES} | set(budgets.values()))
    options = {f"{stop / 1e9:g} GB" if stop else "none": stop for stop in stops}
    controls: list[Control] = [
        Choice("model", "Model", {name: name for name in models}, model),
        Choice("dtype", "Dtype of the weights", {name: name for name in DTYPES}, dtype),
        *(
            Stops(f"budget_{i}", f"Memory of {device}", options, size)
            for i, (device, size) in enumerate(budgets.items())
        ),
    ]

    def arguments(model: str, dtype: str, **sizes: float) -> tuple[ModelConfig, str, dict[str, float]]:
        return models[model], dtype, {device: sizes[f"budget_{i}"] for i, device in enumerate(budgets)}

    def draw(**state: Any) -> Figure:
        return draw_placement(*arguments(**state), place, estimate, state["model"])

    def describe(**state: Any) -> str:
        return describe_placement(*arguments(**state), place, estimate, state["model"])

    return FigureForm(draw, describe, controls)


def draw_placement(
    config: ModelConfig,
    dtype: str,
    budgets: Mapping[str, float],
    place: Place | None = None,
    estimate: Estimate | None = None,
    name: str = _OWN,
) -> Figure:
    """The plan as a figure; the arguments are those of `placement_review.review`, name is the model's in the title."""
    plan = review(config, dtype, budgets, place, estimate)
    problems = _shortage(plan) if plan.refusal else plan.problems
    below = _BELOW + problem_space(problems)
    height = _ABOVE + _ROW * (1 + len(plan.where)) + below
    figure = Figure(figsize=(_WIDTH, height))
    bars_height = height - _ABOVE - below
    axes = figure.add_axes((_LEFT / _WIDTH, below / height, _BARS_WIDTH / _WIDTH, bars_height / height))
    end = 1.04 * max(plan.total, *(plan.used(device) for device in plan.where))
    looks = _looks(plan)
    axes.set(xlim=(0, end), ylim=(_ROW * (1 + len(plan.where)), 0))
    _draw_row(axes, 0, f"To be placed: {format_bytes(plan.total)}", list(plan.sizes), plan, looks)
    memory = sum(plan.budgets.values())
    if plan.refusal and memory < plan.total:
        _cross_out(axes, 0, memory, plan.total)
    for row, (device, modules) in enumerate(plan.where.items(), start=1):
        _draw_budget(axes, row, plan, device)
        _draw_row(axes, row, _row_title(plan, device), modules, plan, looks)
    _draw_scale(axes, end)
    _draw_legend(figure, plan, looks, y=(below - 0.72) / height)
    figure.text(_LEFT / _WIDTH, 1 - 0.22 / height, _heading(plan, name, dtype), fontsize=11, va="center")
    write_problems(figure, problems, _LEFT)
    return figure


def describe_placement(
    config: ModelConfig,
    dtype: str,
    budgets: Mapping[str, float],
    place: Place | None = None,
    estimate: Estimate | None = None,
    name: str = _OWN,
) -> str:
    """The plan in a few lines: the model's size, what each device holds and has left, and what is wrong."""
    plan = review(config, dtype, budgets, place, estimate)
    lines = [_heading(plan, name, dtype), *(_row_title(plan, device) for device in plan.where)]
    if plan.refusal:
        return "\n".join([*lines, *_shortage(plan)])
    times = {0: "stays on one device", 1: "changes the device once"}
    return "\n".join([
        *lines,
        f"The computation of a token {times.get(plan.crossings, f'changes the device {plan.crossings} times')}.",
        *plan.problems,
    ])  # fmt: skip


def _heading(plan: Review, name: str, dtype: str) -> str:
    count = sum(plan.parameters.values())
    tied = " (the head is the embedding)" if plan.sizes.get("lm_head") == 0 else ""
    return f"{name}: {in_parameters(count)} parameters in {dtype} are {format_bytes(plan.total)} of weights{tied}"


def _row_title(plan: Review, device: str) -> str:
    budget, left = plan.budgets.get(device, 0), plan.left(device)
    if plan.refusal or (not budget and not plan.where[device]):
        return f"{device}: {format_bytes(budget)} of memory" if budget else f"{device}: no memory"
    rest = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} TOO MUCH"
    used = format_bytes(plan.used(device)) if plan.where[device] else "nothing"
    holds = f": {in_words(plan.where[device])}" if plan.where[device] else ""
    return f"{device}: {used} of {format_bytes(budget)} used, {rest}{holds}"


def _shortage(plan: Review) -> list[str]:
    """Why the weights do not fit, in numbers: the sum, or the pieces."""
    budget = sum(plan.budgets.values())
    if plan.total > budget:
        need = f"{format_bytes(plan.total)} of weights in {format_bytes(budget)} of memory"
        return [f"It does not fit: {need}, {format_bytes(plan.total - budget)} short.", plan.refusal]
    largest = max(plan.sizes, key=lambda module: plan.sizes[module])
    piece = f"{in_words([largest])} alone is {format_bytes(plan.sizes[largest])}"
    return [f"It does not fit, though the sum would: modules are not cut, and {piece}.", plan.refusal]


def _looks(plan: Review) -> dict[str, Look]:
    last = max((number for module in plan.sizes if (number := layer_number(module)) is not None), default=0)
    looks: dict[str, Look] = {}
    for module in plan.sizes:
        number = layer_number(module)
        shade = colormaps["cividis"]((number or 0) / max(1, last))
        looks[module] = _MODULE_LOOKS.get(module, (GREY, "")) if number is None else (shade, "")
    return looks


def _draw_row(
    axes: Axes, row: int, title: str, modules: list[str], plan: Review, looks: Mapping[str, Look]
) -> None:  # fmt: skip
    top, inch = _ROW * (row + 1) - _BAR - 0.04, axes.get_xlim()[1] / _BARS_WIDTH
    wrong = "TOO MUCH" in title
    title = textwrap.shorten(title, 120, placeholder=" …")
    axes.text(0, top - 0.05, title, va="bottom", fontsize=9.5, color=ALARM if wrong else BLACK, parse_math=False)
    x = 0.0
    for module in modules:
        size, (colour, hatch) = plan.sizes[module], looks[module]
        edge = "white" if size > 0.03 * inch else "none"
        axes.add_patch(
            Rectangle((x, top), size, _BAR, facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.6, zorder=2)
        )
        number = layer_number(module)
        texts = [in_words([module])] if number is None else [f"layer {number}", str(number)]
        text = first_that_fits(texts, size / inch, _BAR)
        box = {"facecolor": colour, "edgecolor": "none", "pad": 1.0} if hatch else None
        axes.text(
            x + size / 2, top + _BAR / 2, text, ha="center", va="center", fontsize=9, color=text_on(colour),
            bbox=box if text else None, zorder=3,
        )  # fmt: skip
        x += size


def _draw_budget(axes: Axes, row: int, plan: Review, device: str) -> None:
    """The device's memory as a pale box, open at the right where it goes on; what is beyond it is crossed out."""
    top, end = _ROW * (row + 1) - _BAR - 0.04, axes.get_xlim()[1]
    budget, used = plan.budgets.get(device, 0), plan.used(device)
    axes.add_patch(Rectangle((0, top), min(budget, end), _BAR, facecolor=PALE, edgecolor="none", zorder=1))
    frame = [(0, top), (min(budget, end), top)], [(0, top + _BAR), (min(budget, end), top + _BAR)]
    for (x0, y0), (x1, y1) in frame:
        axes.plot([x0, x1], [y0, y1], color=BLACK, linewidth=1, zorder=4)
    if budget <= end:
        axes.plot([budget, budget], [top, top + _BAR], color=BLACK, linewidth=2.5, zorder=5, clip_on=False)
    else:
        texts = [f"goes on to {format_bytes(budget)} ▸ ", "▸ "]
        text = first_that_fits(texts, (end - used) / end * _BARS_WIDTH, _BAR)
        axes.text(end, top + _BAR / 2, text, ha="right", va="center", fontsize=9, zorder=1.5)
    if used > budget:
        _cross_out(axes, row, budget, used)


def _cross_out(axes: Axes, row: int, start: float, end: float) -> None:
    """Marks the part of a bar from start to end (bytes) as more than there is memory for."""
    corner = start, _ROW * (row + 1) - _BAR - 0.04
    axes.add_patch(
        Rectangle(corner, end - start, _BAR, fill=False, hatch="xxx", edgecolor=ALARM, linewidth=2, zorder=4)
    )


def _draw_scale(axes: Axes, end: float) -> None:
    scale, unit = (1e9, "GB") if end >= 1e9 else (1e6, "MB") if end >= 1e6 else (1e3, "kB")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:,g}"))
    axes.set_xlabel(f"weights ({unit})")
    axes.yaxis.set_visible(False)
    axes.spines["left"].set_visible(False)


def _draw_legend(figure: Figure, plan: Review, looks: Mapping[str, Look], y: float) -> None:
    shown = [module for module in plan.sizes if plan.sizes[module] and (layer_number(module) is None)]
    layers = [module for module in plan.sizes if layer_number(module) is not None]
    shown[1:1] = [layers[0], layers[-1]] if len(layers) > 1 else layers
    patches = [
        Patch(facecolor=looks[module][0], hatch=looks[module][1], edgecolor="white",
              label=f"{in_words([module])}, {format_bytes(plan.sizes[module])}")
        for module in shown
    ]  # fmt: skip
    patches.append(Patch(facecolor=PALE, edgecolor=BLACK, label="free"))
    patches.append(Patch(facecolor="white", hatch="xxx", edgecolor=ALARM, label="no room"))
    figure.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(_LEFT / _WIDTH, y), ncols=len(patches), borderaxespad=0,
        borderpad=0, handlelength=1.6, handleheight=1.2, columnspacing=1.4,
        fontsize=9, frameon=False,
    )  # fmt: skip
