"""The roofline figure: the roof where the machine's limits are, dots where the work is, labels that can be read."""

from __future__ import annotations

from itertools import combinations

import pytest

from llmfromscratch import optimization
from llmfromscratch.machine_limits import Limits
from llmfromscratch.profiling import DECODE, PREFILL, Cost, Profile, StepProfile
from llmfromscratch.widgets import draw_roofline, roofline
from llmfromscratch.widgets.roofline import EVERY, describe_roofline, dots_of

pytestmark = pytest.mark.filterwarnings("error")
LIMITS = Limits(50e9, {"bfloat16": 8e11, "float32": 2e11}, "cpu, 2 threads")


def step(name=DECODE, rows=1, scale=1.0, dtype="bfloat16"):
    costs = {
        "products": Cost(0.0125 * scale, 212e6, rows * 212e6), "attention": Cost(0.002 * scale, 3e6, rows * 9e6),
        "norms": Cost(0.001, rows * 1e5, rows * 14e4), "head": Cost(0.0025 * scale, 57e6, 57e6), "Python": Cost(0.002),
    }  # fmt: skip
    seconds = sum(cost.seconds for cost in costs.values())
    return StepProfile(name, costs, seconds, seconds, rows, 1, 128, dtype, "2 threads")


NAMED = [
    ("plain", Profile(step(PREFILL, 128, 5), step())),
    ("compiled", Profile(step(PREFILL, 128, 4), step(scale=0.36))),
]


def lines_of(figure):
    return figure.axes[0].lines


def drawn_dots(figure):
    """(intensity, GFLOP/s) of the dots."""
    return [
        (line.get_xdata()[0], line.get_ydata()[0]) for line in lines_of(figure)
        if line.get_marker() not in ("None", None, "") and len(line.get_xdata()) == 1
    ]  # fmt: skip


def test_the_roof_is_the_smaller_of_bandwidth_times_intensity_and_peak():
    figure = draw_roofline([("plain", step())], LIMITS)
    roof = lines_of(figure)[0]
    for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):
        assert y == pytest.approx(min(50 * x, 800))
    assert roof.get_xdata()[1] == pytest.approx(16)
    other = draw_roofline([("plain", step(dtype="float32"))], LIMITS)
    assert lines_of(other)[0].get_ydata()[-1] == pytest.approx(200)


def test_a_dot_stands_at_its_operations_a_byte_and_a_second():
    found = drawn_dots(draw_roofline([("plain", step())], LIMITS))
    costs = step().costs
    kinds = ["products", "attention", "norms", "head"]
    expected = [(costs[k].operations / costs[k].nbytes, costs[k].operations / costs[k].seconds / 1e9) for k in kinds]
    whole = (sum(costs[k].operations for k in kinds) / sum(costs[k].nbytes for k in kinds), None)
    assert found[:4] == [pytest.approx(each) for each in expected]
    assert found[4][0] == pytest.approx(whole[0])


def test_how_far_a_dot_is_from_the_roof_is_what_it_reaches():
    for name, dot in dots_of([("plain", step()), ("plain", step(PREFILL, 128, 5))], LIMITS, False):
        roof = min(dot.intensity * 50e9, 8e11)
        assert dot.speed / roof == pytest.approx(dot.reached), (name, dot.kind)


def test_the_text_says_where_each_dot_is_and_what_holds_it():
    assert describe_roofline([("plain", step())], LIMITS).splitlines() == [
        "The work of plain under this machine's roof (cpu, 2 threads, bfloat16): the ridge is at 16 operations a byte",
        "  plain, decode step, products: 1 operations a byte; 12.5 ms of at least 4.2 ms, 34 % of what memory allows",
        "  plain, decode step, attention: 3 operations a byte; 2.0 ms of at least 0.06 ms, 3.0 % of what memory allows",
        "  plain, decode step, norms: 1.4 operations a byte; 1.0 ms of at least 0.002 ms, 0.2 % of what memory allows",
        "  plain, decode step, head: 1 operations a byte; 2.5 ms of at least 1.1 ms, 46 % of what memory allows",
        "  plain, decode step, whole: 1.02 operations a byte; 20.0 ms of at least 5.4 ms, 27 % of what memory allows",
    ]
    prefill = describe_roofline([("plain", step(PREFILL, 128, 5))], LIMITS).splitlines()
    assert prefill[1].endswith("62.5 ms of at least 33.9 ms, 54 % of what computing allows")


def test_every_control_changes_the_picture():
    view = roofline(NAMED, LIMITS)
    pictures = []
    for engine in ("plain", "compiled", EVERY):
        for part in ("both", DECODE, PREFILL):
            pictures.append(view.set(engine=engine, part=part).png())
    assert len(set(pictures)) == len(pictures)
    assert view.set(engine=EVERY, part="both").text().count("whole") == 4
    with pytest.raises(ValueError, match="engine cannot be 'other'"):
        view.set(engine="other")


def test_it_begins_with_the_last_engine_and_both_parts():
    assert roofline(NAMED, LIMITS).state == {"engine": "compiled", "part": "both"}
    alone = roofline({"only": step()}, LIMITS)
    assert alone.state == {"engine": "only", "part": DECODE}
    assert alone.png()


@pytest.mark.parametrize("whole", [False, True])
def test_labels_lie_neither_over_each_other_nor_outside(whole):
    named = [*NAMED, ("graph", Profile(step(PREFILL, 128, 4.1), step(scale=0.37)))]
    shown = [(name, of) for name, profile in named for of in (profile.prefill, profile.decode)]
    figure = draw_roofline(shown if whole else shown[:2], LIMITS, whole)
    figure.canvas.draw()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().endswith("%")]
    assert len(boxes) == (6 if whole else 10)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0
        assert box.y1 <= axes.bbox.y1
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)


def test_prefills_are_hollow_and_decode_steps_filled():
    figure = draw_roofline([("a", step()), ("a", step(PREFILL, 128, 5))], LIMITS)
    dots = [line for line in lines_of(figure) if line.get_marker() not in ("None", None, "")]
    assert [line.get_color() == "white" for line in dots] == [False] * 5 + [True] * 5
    assert len({line.get_marker() for line in dots[:5]}) == 5


def test_a_learners_roofline_is_the_one_that_is_drawn(monkeypatch):
    monkeypatch.setattr(optimization, "least_seconds", lambda nbytes, operations, bandwidth, peak: nbytes / peak)
    assert "12.5 ms of at least 0.27 ms" in describe_roofline([("plain", step())], LIMITS)


def test_limits_without_the_dtype_are_a_sentence_in_the_pictures_place():
    shown = roofline(NAMED, Limits(50e9, {"float32": 2e11}))
    assert "the peak in bfloat16 was not measured, only in float32" in shown.text()
    assert shown.png()
