"""Numbers in words, and colours that stay apart for eyes that see no hue."""

from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.colors import to_rgb

from llmfromscratch.widgets.checkpoint_map import _KIND_LOOKS
from llmfromscratch.widgets.style import BLACK, GREEN, NAVY, YELLOW, first_that_fits, in_parameters, in_share, text_on


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0"), (1152, "1,152"), (9999, "9,999"), (110_592, "111 thousand"), (28_311_552, "28.3 million"),
     (999_600, "1.00 million"), (6_738_415_616, "6.74 billion")],
)  # fmt: skip
def test_parameters_in_words(count, words):
    assert in_parameters(count) == words


@pytest.mark.parametrize(
    ("part", "whole", "words"),
    [(0, 5, "0 %"), (0, 0, "0 %"), (1, 5000, "< 0.1 %"), (63, 1000, "6.3 %"), (1, 3, "33 %"), (3, 3, "100 %")],
)
def test_shares_in_words(part, whole, words):
    assert in_share(part, whole) == words


def _contrast(colour, other):
    def luminance(name):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(name)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    bright, dark = sorted((luminance(colour), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", [BLACK, NAVY, GREEN, YELLOW, "white", *(look[0] for look in _KIND_LOOKS.values())])
def test_text_on_every_colour_has_the_contrast_that_wcag_asks_for(colour):
    assert _contrast(text_on(colour), colour) >= 4.5


def test_kinds_that_touch_in_the_map_differ_in_lightness_or_hatch():
    stacked = [_KIND_LOOKS[kind] for kind in ("q", "k", "v", "o", "gate", "up", "down", "norms")]
    for (colour, hatch), (other, other_hatch) in pairwise(stacked):
        assert hatch != other_hatch or _contrast(colour, other) >= 1.5
    assert len(set(_KIND_LOOKS.values())) == len(_KIND_LOOKS)


def test_the_first_text_that_fits_is_taken():
    assert first_that_fits(["a long description", "short"], width=0.6, height=0.3) == "short"
    assert first_that_fits(["two\nlines", "one"], width=2.0, height=0.2) == "one"
    assert first_that_fits(["x"], width=0.05, height=1.0) == ""
