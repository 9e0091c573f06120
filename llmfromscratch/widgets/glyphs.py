"""Any character in a picture: by its glyph where matplotlib's own font has one, by its code point where it has not.

The font that matplotlib brings along knows Latin, Greek, Cyrillic and Arabic, but no Chinese and few emoji. Fonts of
the machine are left alone, so that a picture is the same everywhere; a character without a glyph, or an invisible one,
becomes a small frame with its number in it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle

from llmfromscratch.widgets.style import BLACK, GREY

FONT = "DejaVu Sans"
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}  # what stands for white space
_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")  # categories of Unicode: control, format, ..., spaces
_CONTROL_NAMES = {"\n": "LINE FEED", "\t": "TABULATION", "\r": "CARRIAGE RETURN", "\0": "NULL"}
_FRAME = 0.05  # inches around the digits of a frame


def glyph(character: str) -> str:
    """What to draw for one character, or "" if only its number can be drawn. A combining mark gets a circle."""
    if character in VISIBLE:
        return VISIBLE[character]
    category = unicodedata.category(character)
    selector = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    if category in _UNSEEN or selector or ord(character) not in _known():
        return ""
    return "◌" + character if category in ("Mn", "Me") else character


def code_point(character: str) -> str:
    """The character's number as Unicode writes it, e.g. "U+4F60"."""
    return f"U+{ord(character):04X}"


def name_of(character: str) -> str:
    """The character's name in Unicode, e.g. "ZERO WIDTH JOINER"."""
    return unicodedata.name(character, _CONTROL_NAMES.get(character, "(no name)"))


def in_font(text: str) -> str:
    """The text with a number, like [U+4F60], in the place of each character that the font cannot draw."""
    return "".join(c if c in " \n" or (glyph(c) and c not in VISIBLE) else f"[{code_point(c)}]" for c in text)


def hexadecimal(content: Sequence[int]) -> str:
    """Bytes as pairs of digits: "E4 BD A0"."""
    return " ".join(f"{byte:02X}" for byte in content)


@cache
def text_width(text: str, font_size: float) -> float:
    """Inches that the text takes in a line (without kerning)."""
    font = _font()
    return sum(font.load_char(ord(character)).linearHoriAdvance for character in text) / 65536 * font_size / 100 / 72


def shortened(text: str, width: float, font_size: float) -> str:
    """The text as the font can draw it, cut with an ellipsis where it would take more than width inches."""
    shown = in_font(text)
    while len(shown) > 1 and text_width(shown, font_size) > width:
        shown = shown.rstrip("…")[:-1] + "…"
    return shown


def character_width(character: str, font_size: float) -> float:
    """Inches that `draw_character` takes."""
    drawn = glyph(character)
    if drawn:
        return text_width(drawn[:1], font_size)
    return max(text_width(line, _small(font_size)) for line in _digits(character)) + _FRAME


def draw_character(
    axes: Axes, x: float, y: float, character: str, font_size: float, colour: Any = BLACK, room: float = 0.0,
    zorder: float = 3, bbox: Any = None,
) -> None:  # fmt: skip
    """Draws it centred on x, y of axes whose unit is the inch. room: inches that a number may take, if they suffice.

    bbox: what `Axes.text` puts behind a glyph.
    """
    drawn = glyph(character)
    style: Any = {"ha": "center", "color": colour, "family": FONT, "parse_math": False, "zorder": zorder}
    if drawn:
        axes.text(x, y, drawn, va="center_baseline", fontsize=font_size, bbox=bbox, **style)
        return
    number, size = code_point(character), 0.75 * font_size
    width, height = text_width(number, size) + 0.08, 1.3 * size / 72
    if width > room:
        number, size = "\n".join(_digits(character)), _small(font_size)
        width, height = character_width(character, font_size), 2.3 * size / 72 + 0.04
    corner = x - width / 2, y - height / 2
    axes.add_patch(Rectangle(corner, width, height, facecolor="white", edgecolor=GREY, linewidth=0.6, zorder=zorder))
    axes.text(x, y, number, va="center", fontsize=size, linespacing=0.95, **style)


def _small(font_size: float) -> float:
    return 0.52 * font_size


def _digits(character: str) -> tuple[str, str]:
    """The number in two lines of equal length."""
    digits = f"{ord(character):04X}"
    digits = digits if len(digits) == 4 else digits.zfill(6)
    return digits[: len(digits) // 2], digits[len(digits) // 2 :]


@cache
def _font() -> FT2Font:
    font = FT2Font(findfont(FONT))  # one of our own: its size is changed, and matplotlib's are shared
    font.set_size(100, 72)
    return font


@cache
def _known() -> frozenset[int]:
    return frozenset(_font().get_charmap())
