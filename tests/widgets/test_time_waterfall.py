"""The waterfall of a step's time: bars as long as the times, changes that add up, a learner's slow product seen."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Polygon, Rectangle

from llmfromscratch.machine_limits import Limits
from llmfromscratch.profile_events import KINDS
from llmfromscratch.profiling import DECODE, PREFILL, Cost, Profile, StepProfile
from llmfromscratch.widgets import draw_time_waterfall, time_waterfall
from llmfromscratch.widgets.profile_reading import LOOKS, read_profiles
from llmfromscratch.widgets.style import VERMILION
from llmfromscratch.widgets.time_waterfall import changes, comparisons, describe_time_waterfall

pytestmark = pytest.mark.filterwarnings("error")
LIMITS = Limits(50e9, {"bfloat16": 8e11}, "cpu, 2 threads")


def step(name=DECODE, gained=1, **milliseconds):
    work = {"products": (212e6, 0.212e9), "head": (57e6, 57e6), "attention": (3e6, 9e6)}
    costs = {kind: Cost(taken / 1000, *work.get(kind, ())) for kind, taken in milliseconds.items()}
    seconds = sum(milliseconds.values()) / 1000
    tokens = 128 if name == PREFILL else 1
    return StepProfile(name, costs, seconds, seconds, tokens, gained, 128, "bfloat16", "2 threads")


PLAIN = step(products=12.5, attention=2.0, norms=1.0, head=2.5, Python=2.0)
FUSED = step(products=12.0, attention=2.0, norms=0.4, head=2.5, Python=1.1)
FAST = step(products=4.5, attention=0.4, norms=0.4, head=1.25, sampling=0.25, Python=1.2)
PROMPT = step(PREFILL, products=50.0, attention=9.0, Python=5.0)
NAMED = [("plain", Profile(PROMPT, PLAIN)), ("fused", Profile(PROMPT, FUSED)), ("compiled", Profile(PROMPT, FAST))]


def bars(figure):
    """(row, left, width, colour, edge) of the bars, from the top down and from the left."""
    return sorted(
        (round(patch.get_y() + patch.get_height() / 2), patch.get_x(), patch.get_width(), to_hex(patch.get_facecolor()),
         to_hex(patch.get_edgecolor()))
        for patch in figure.axes[0].patches if isinstance(patch, Rectangle)
    )  # fmt: skip


def test_every_bar_is_as_long_as_its_time_and_they_stand_behind_each_other():
    figure = draw_time_waterfall([("plain", PLAIN), ("fast", FAST)])
    for row, profile in enumerate((PLAIN, FAST)):
        own = [bar for bar in bars(figure) if bar[0] == row]
        kinds = [kind for kind in LOOKS if kind in profile.costs]
        assert [bar[2] for bar in own] == pytest.approx([1000 * profile.costs[kind].seconds for kind in kinds])
        assert [bar[3] for bar in own] == [to_hex(LOOKS[kind].colour) for kind in kinds]
        ends = [0.0]
        for _, left, width, *_ in own:
            assert left == pytest.approx(ends[-1])
            ends.append(left + width)
        assert ends[-1] == pytest.approx(1000 * profile.seconds)


def test_bands_join_the_kinds_of_neighbouring_rows():
    figure = draw_time_waterfall([("plain", PLAIN), ("fast", FAST)])
    bands = [patch for patch in figure.axes[0].patches if isinstance(patch, Polygon)]
    assert len(bands) == 6  # five kinds, and sampling, which only the second has
    products = bands[0].get_xy()
    assert sorted({round(float(x), 6) for x, _ in products}) == [0, 4.5, 12.5]


def test_in_shares_every_row_is_as_long_as_the_axis():
    figure = draw_time_waterfall([("plain", PLAIN), ("fast", FAST)], unit="share")
    for row in (0, 1):
        assert sum(bar[2] for bar in bars(figure) if bar[0] == row) == pytest.approx(100)


def test_the_waterfall_goes_from_the_one_time_to_the_other():
    figure = draw_time_waterfall([("plain", PLAIN), ("fast", FAST)], pair=True)
    levels, level = [], 20.0
    for _, change in changes(PLAIN, FAST):
        levels.append((min(level, level + change), abs(change)))
        level += change
    assert level == pytest.approx(8.0)
    drawn = [bar[1:3] for bar in bars(figure) if 0 < bar[0] <= len(levels)]
    assert [pytest.approx(each) for each in levels] == drawn
    costs = [bar for bar in bars(figure) if bar[4] == VERMILION.lower()]
    assert [(bar[2], bar[3]) for bar in costs] == [(pytest.approx(0.25), to_hex(LOOKS["sampling"].colour))]


def test_changes_add_up_to_the_difference_and_begin_with_what_saved_most():
    found = changes(PLAIN, FAST)
    assert [kind for kind, _ in found] == ["products", "attention", "head", "Python", "norms", "sampling"]
    assert sum(change for _, change in found) == pytest.approx(8.0 - 20.0)
    assert changes(PLAIN, PLAIN) == []


def test_the_text_says_times_speeds_and_the_least():
    assert time_waterfall(NAMED, LIMITS).text().splitlines() == [
        "Where the time goes: decode step, 1 token at 128 of context, bfloat16, 2 threads",
        "  plain: 20.0 ms, 50 tokens/s: products 12.5, head 2.5, attention 2.0, Python 2.0, norms 1.0",
        "  fused: 18.0 ms, 56 tokens/s: products 12.0, head 2.5, attention 2.0, Python 1.1, norms 0.40",
        "  compiled: 8.0 ms, 125 tokens/s: products 4.5, head 1.2, Python 1.2, attention 0.40, norms 0.40, "
        "sampling 0.25",
        # 272 MB at 50 GB/s
        "At least, by bytes and operations: plain 5.4 ms, fused 5.4 ms, compiled 5.4 ms",
    ]
    view = time_waterfall(NAMED).set(compare="plain → compiled")
    assert view.text().splitlines() == [
        "Decode step, plain → compiled: 20.0 → 8.0 ms, 50 → 125 tokens/s, 2.50 times as fast",
        "  products: 12.5 → 4.5 ms (−8.0 ms)",
        "  attention: 2.0 → 0.40 ms (−1.6 ms)",
        "  head: 2.5 → 1.2 ms (−1.2 ms)",
        "  Python: 2.0 → 1.2 ms (−0.80 ms)",
        "  norms: 1.0 → 0.40 ms (−0.60 ms)",
        "  sampling: 0 → 0.25 ms (+0.25 ms)",
    ]
    assert "  products: 12.5 → 4.5 ms (−40.0 %)" in view.set(unit="share").text()
    assert time_waterfall(NAMED).set(unit="share").text().splitlines()[1].endswith(
        "products 62 %, head 12 %, attention 10 %, Python 10 %, norms 5.0 %"
    )  # fmt: skip


def test_slower_and_equally_fast_are_said():
    assert "2.50 times as slow" in describe_time_waterfall([("a", FAST), ("b", PLAIN)], pair=True)
    assert describe_time_waterfall([("a", PLAIN), ("b", PLAIN)], pair=True).endswith("equally fast")


def test_every_control_changes_the_picture():
    view = time_waterfall(NAMED, LIMITS)
    pictures = [view.png(), view.set(part=PREFILL).png(), view.set(unit="share").png()]
    for words in list(comparisons(["plain", "fused", "compiled"]))[1:]:
        pictures.append(view.set(compare=words, part=DECODE, unit="share").png())
        pictures.append(view.set(unit="ms").png())
    assert len(set(pictures)) == len(pictures)
    assert time_waterfall(NAMED).png() != time_waterfall(NAMED, LIMITS).png()


def test_neighbours_and_the_ends_can_be_compared():
    assert list(comparisons(["a", "b", "c"])) == ["all of them", "a → b", "b → c", "a → c"]
    assert list(comparisons(["a", "b"])) == ["all of them", "a → b"]
    assert list(comparisons(["a"])) == ["all of them"]


def test_a_learners_slow_product_is_seen():
    slow = step(products=40.0, attention=2.0, norms=1.0, head=2.5, Python=2.0)
    view = time_waterfall([("before", PLAIN), ("mine", slow)]).set(compare="before → mine")
    assert "  products: 12.5 → 40.0 ms (+27.5 ms)" in view.text()
    assert "2.38 times as slow" in view.text()
    assert any(bar[4] == VERMILION.lower() for bar in bars(draw_time_waterfall([("a", PLAIN), ("b", slow)], pair=True)))


def test_kinds_differ_in_colour_and_the_pale_and_similar_ones_in_hatch_too():
    assert LOOKS.keys() == KINDS.keys()
    assert len({(look.colour, look.hatch) for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.marker for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize("unit", ["ms", "share"])
def test_words_stay_inside_their_bars_and_totals_inside_the_figure(unit):
    for pair in (False, True):
        figure = draw_time_waterfall(
            [("plain, with a long name of its own", PLAIN), ("fast", FAST)], pair, unit, LIMITS
        )
        figure.canvas.draw()
        axes = figure.axes[0]
        drawn = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, Rectangle)]
        for text in axes.texts:
            box = text.get_window_extent()
            assert box.x1 <= figure.bbox.x1 - 2, text.get_text()
            if text.get_text() and text.get_position()[0] != 1.02:
                assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 for bar in drawn), text.get_text()


def test_one_profile_alone_and_single_parts_are_drawn():
    assert time_waterfall({"only": PLAIN}).png()
    assert "plain: 64.0 ms, 2,000 tokens/s" in time_waterfall({"plain": PROMPT}).text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "there is no profile to draw"),
        ([PLAIN], "is no named profile; give pairs such as"),
        ([("plain", 3)], r"\('plain', 3\) is no named profile"),
    ],
)
def test_what_is_no_named_profile_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        read_profiles(given)


def test_parts_that_do_not_match_and_unknown_units_are_refused():
    with pytest.raises(ValueError, match="the profiles have no part in common"):
        time_waterfall([("a", PLAIN), ("b", PROMPT)])
    with pytest.raises(ValueError, match="unit cannot be 'hours'; expected one of ms, share"):
        draw_time_waterfall([("plain", PLAIN)], unit="hours")
    assert "the peak in bfloat16 was not measured" in time_waterfall(NAMED, Limits(50e9, {"float32": 2e11})).text()
