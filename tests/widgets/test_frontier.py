"""The frontier figure: dots where the figures are, the line where nobody is better, labels that can be read."""

from __future__ import annotations

from itertools import combinations, pairwise, zip_longest

import pytest

from llmfromscratch.evaluation import Variant
from llmfromscratch.widgets import draw_frontier, frontier
from llmfromscratch.widgets.frontier import best_within, describe_frontier, points_of

pytestmark = pytest.mark.filterwarnings("error")

VARIANTS = [
    Variant("float32", 538_000_000, 39, 0.0, 1.0, 12.01, 0.75),
    Variant("bf16", 269_000_000, 156, 0.0012, 0.985, 12.03, 0.75),
    Variant("int8", 135_000_000, 270, 0.003, 0.97, 12.05, 0.725),
    Variant("int8 per tensor", 135_000_000, 268, 0.056, 0.89, 12.7, 0.7),
    Variant("int4 rounded", 84_300_000, 262, 0.26, 0.78, 15.0, 0.65),
    Variant("int4 AWQ", 84_300_000, 259, 0.08, 0.87, 12.9, None),
    Variant("3 bits", 62_000_000, None, 0.4, 0.74, 17.6, 0.6),
]


def dots(axes):
    """(x, y, on the frontier) of what stands for a variant."""
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker() == "o")
            for line in axes.lines if line.get_marker() in ("o", "D")]  # fmt: skip


def test_a_dot_stands_at_its_megabytes_and_its_speed():
    size, speed = draw_frontier(VARIANTS).axes
    for axes, expected in (
        (size, [(each.bytes / 1e6, each.kl) for each in VARIANTS]),
        (speed, [(each.tokens_per_second, each.kl) for each in VARIANTS if each.tokens_per_second]),
    ):
        found = dots(axes)
        assert [x for x, _, _ in found] == [x for x, _ in expected]
        assert [y for _, y, _ in found[1:]] == [y for _, y in expected[1:]]
        assert 0 < found[0][1] < 0.0012  # no damage has no place on a logarithmic scale: below all others
    assert "0" in [label.get_text() for label in size.get_yticklabels()]


SIZES = [(81, 135), (62, 538), (80, 84.3), (100, 190), (5, 5), (1_000, 1_900), (84.3, 269), (0.2, 0.39), (99, 298)]
SPEEDS = [(190, 215), (150, 220), (39, 270), (200, 200), (3.1, 3.4), (0.5, 5_000), (1_010, 1_090)]


@pytest.mark.parametrize(("sizes", "speeds"), list(zip_longest(SIZES, SPEEDS, fillvalue=(100, 150))))
def test_an_axis_shows_some_round_numbers_and_their_labels_stand_apart(sizes, speeds):
    both = zip(sizes, speeds, strict=True)
    figure = draw_frontier([Variant(f"{place}", round(1e6 * size), speed, 0.1 + place)
                            for place, (size, speed) in enumerate(both)])  # fmt: skip
    figure.canvas.draw()
    for axes, ends in zip(figure.axes, (sizes, speeds), strict=True):
        low, high = axes.get_xlim()
        shown = [label for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
                 if low < tick < high]  # fmt: skip
        assert 3 <= len(shown) <= (6 if high < 3 * low or ends is speeds else 9)
        assert all(float(label.get_text().replace(",", "")) == pytest.approx(tick)
                   for label, tick in zip(shown, axes.get_xticks(), strict=True))  # fmt: skip
        boxes = [label.get_window_extent() for label in shown]
        assert all(one.x1 + 4 < other.x0 for one, other in pairwise(boxes))


def test_the_numbers_of_a_short_axis_are_those_one_would_write():
    def marks(xs, speed):
        variants = [Variant(f"{x}", round(1e6 * x), x, 0.1) for x in xs]
        return list(draw_frontier(variants).axes[speed].get_xticks())

    assert marks((81, 135), speed=False) == [80, 100, 120, 140]
    assert marks((150, 220), speed=True) == [160, 180, 200, 220]
    assert marks((190, 215), speed=True) == [190, 195, 200, 205, 210, 215]


def test_the_line_joins_those_that_nobody_dominates():
    size, speed = draw_frontier(VARIANTS, "KL", log=False).axes
    line = next(line for line in size.lines if line.get_drawstyle() == "steps-post")
    assert list(line.get_xdata())[1:-1] == [62, 84.3, 135, 269, 538]
    assert list(line.get_ydata())[1:-1] == [0.4, 0.08, 0.003, 0.0012, 0]
    line = next(line for line in speed.lines if line.get_drawstyle() == "steps-post")
    assert list(line.get_xdata())[1:-1] == [270, 156, 39]
    assert {x for x, _, on in dots(speed) if on} == {270, 156, 39}


def test_every_control_changes_the_picture():
    view = frontier(VARIANTS)
    pictures = {view.png()}
    for damage in ("top-1", "perplexity", "quiz", "KL"):
        for log in (True, False):
            pictures.add(view.set(damage=damage, log=log).png())
    assert len(pictures) == 8
    pictures |= {view.set(budget=size).png() for size in (62, 85, 135)}
    assert len(pictures) == 11
    with pytest.raises(ValueError, match="budget cannot be 1"):
        view.set(budget=1)


def test_only_measures_that_exist_can_be_chosen():
    few = [Variant("a", 5_000_000, None, 0.1), Variant("b", 6_000_000, None, 0.01), Variant("c", 7_000_000)]
    view = frontier(few)
    with pytest.raises(ValueError, match="damage cannot be 'quiz'; expected one of 'KL'"):
        view.set(damage="quiz")
    assert "c: 7.0 MB, damage not measured; in neither plot" in view.text()
    assert any("no speed was measured" in text.get_text() for text in draw_frontier(few).axes[1].texts)
    with pytest.raises(ValueError, match="two variants at least"):
        frontier(few[:1])


def test_a_budget_names_the_least_damage_that_fits():
    assert best_within(VARIANTS, "KL", 85).name == "int4 AWQ"
    assert best_within(VARIANTS, "quiz", 85).name == "int4 rounded"  # the other was not asked
    assert best_within(VARIANTS, "KL", 61) is None
    assert (
        frontier(VARIANTS, budget=135).text().splitlines()[1]
        == "  Within 135 MB the least damage is that of int8: KL 0.003"
    )
    assert "Nothing fits into 10 MB" in describe_frontier(VARIANTS, "KL", 10)


def test_the_text_says_who_stands_before_whom():
    lines = describe_frontier(VARIANTS).splitlines()
    assert lines[0] == "7 variants by KL: 5 on the frontier of size, 3 on that of speed"
    assert lines[5] == (
        "  int8 per tensor: 135.0 MB, 268 tokens a second, KL 0.056; size: behind int8, speed: behind int8"
    )
    assert lines[7] == ("  int4 AWQ: 84.3 MB, 259 tokens a second, KL 0.08; size: on the frontier, speed: behind int8")
    assert lines[8] == "  3 bits: 62.0 MB, KL 0.4; size: on the frontier"


@pytest.mark.parametrize("damage", ["KL", "top-1", "perplexity", "quiz"])
@pytest.mark.parametrize("log", [True, False])
def test_labels_lie_neither_over_each_other_nor_outside(damage, log):
    figure = draw_frontier(VARIANTS, damage, log)
    figure.canvas.draw()
    for axes, speed in zip(figure.axes, (False, True), strict=True):
        assert len(axes.texts) == len(points_of(VARIANTS, damage, speed))
        boxes = [text.get_window_extent() for text in axes.texts]
        for box in boxes:
            assert axes.bbox.x0 <= box.x0
            assert box.x1 <= axes.bbox.x1 + 2
            assert axes.bbox.y0 <= box.y0
            assert box.y1 <= axes.bbox.y1
        for one, other in combinations(boxes, 2):
            assert not one.overlaps(other)


def test_one_variant_that_is_best_in_all_and_equal_ones_can_be_drawn():
    best = [Variant("a", 5_000_000, 9.0, 0.1), Variant("b", 5_000_000, 9.0, 0.1), Variant("c", 6_000_000, 8.0, 0.2)]
    figure = draw_frontier(best)
    assert [on for _, _, on in dots(figure.axes[0])] == [True, True, False]
    assert draw_frontier([Variant("a", 5_000_000, 9.0, 0.0), Variant("b", 5_000_000, 9.0, 0.0)], log=True).axes
