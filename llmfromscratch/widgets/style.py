"""What all figures share: colours that stay apart without colour vision, sizes in words, text that fits its place."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

Look = tuple[Any, str]  # a colour and a hatch

# Okabe and Ito, "Color Universal Design" (2008), and shades of it; neighbours also differ in lightness.
BLACK, GREY, PALE = "#222222", "#8c8c8c", "#e8e8e8"
GREEN, PURPLE, VERMILION, ORANGE, YELLOW = "#009E73", "#CC79A7", "#D55E00", "#E69F00", "#F0E442"
NAVY, BLUE, SKY, ICE = "#0B3C5D", "#0072B2", "#56B4E9", "#BFE3F7"
ALARM = "#A61E00"  # text and outlines that say that something is wrong; always with words beside the colour

STYLE: Any = {  # settings of matplotlib
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "hatch.linewidth": 0.6,
}


def in_parameters(count: float) -> str:
    """A number of parameters in three digits: 28,311,552 -> "28.3 million"; below 10,000 exactly."""
    for size, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= 0.9995 * size and count >= 10_000:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:,.0f}"


def in_share(part: float, whole: float) -> str:
    """The part in percent of the whole: "31 %", "0.4 %"; what is there but tiny is "< 0.1 %"."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent < 9.95 and percent else f"{percent:.0f} %"


def text_on(colour: Any) -> str:
    """Black or white, whichever has more contrast on the colour (relative luminance, WCAG 2.1)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return "white" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179 else "black"


def first_that_fits(texts: list[str], width: float, height: float, font_size: float = 9) -> str:
    """The first of the texts (lines split by newlines) that fits into width x height inches, or "".

    Takes 0.62 of the font size for a character, about the mean of DejaVu Sans, and a margin of half a character.
    """
    for text in texts:
        lines = text.split("\n")
        wide = (max(len(line) for line in lines) + 1) * 0.62 * font_size / 72
        if wide <= width and (len(lines) * 1.25 + 0.3) * font_size / 72 <= height:
            return text
    return ""


def problem_space(problems: Sequence[str]) -> float:
    """Inches that `write_problems` takes at the bottom of the figure."""
    return 0.19 * len(_problem_lines(problems))


def write_problems(figure: Figure, problems: Sequence[str], left: float) -> None:
    """The sentences at the bottom of a figure 10 inches wide, from left inches on, each with a mark before it."""
    wide, high = figure.get_size_inches()
    lines = _problem_lines(problems)
    for row, line in enumerate(lines):
        y = (0.19 * (len(lines) - row) - 0.03) / high
        figure.text(left / wide, y, line, color=ALARM, fontsize=9, va="top", parse_math=False)


def _problem_lines(problems: Sequence[str]) -> list[str]:
    return [line for problem in problems for line in textwrap.wrap(f"! {problem}", 130, subsequent_indent="   ")]


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
