"""Latency distributions: curves and percentiles against counts of their own, and schedulers that starve are seen to."""

from __future__ import annotations

import gc
import math
import re
import sys
import weakref
from itertools import combinations, pairwise

import pytest
from serving_runs import Starving, asked, continuous, play, simulated, static, workload

from llmfromscratch.widgets import draw_latency_distribution, latency_distribution
from llmfromscratch.widgets.latency_distribution import (
    _LINES,
    MEASURES,
    SCALES,
    describe_latency_distribution,
    measure_runs,
)
from llmfromscratch.widgets.serving_run import in_time, percentile

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def runs():
    return {
        "static": simulated(static, workload(30)),
        "continuous": simulated(continuous, workload(30)),
        "starving": play(lambda cache: Starving(cache, 6), workload(30), 2000),
    }


def measured(run, measure):
    """Straight from the clocks of the requests."""
    of = {
        "ttft": lambda one: one.first_token - one.arrival,
        "tpot": lambda one: (one.last_token - one.first_token) / (len(one.token_ids) - 1),
        "queue_time": lambda one: one.first_scheduled - one.arrival,
        "whole": lambda one: one.last_token - one.arrival,
    }[measure]
    return sorted(of(request) for request in run.requests if request.ended)


def curve(figure, name):
    line = next(line for line in figure.axes[0].lines if line.get_label() == name)
    return line.get_xdata(), line.get_ydata()


@pytest.mark.parametrize("measure", MEASURES)
def test_a_curve_rises_by_its_share_at_the_value_of_every_request(runs, measure):
    figure = draw_latency_distribution(runs, measure)
    for name, run in runs.items():
        values = measured(run, measure)
        x, y = curve(figure, name)
        assert list(x[1:-1]) == pytest.approx(values)
        assert list(y[1:-1]) == pytest.approx([100 * (place + 1) / 30 for place in range(len(values))])


@pytest.mark.parametrize("measure", MEASURES)
def test_percentiles_are_the_smallest_values_that_the_share_does_not_exceed(runs, measure):
    for sample, run in zip(measure_runs(runs, measure), runs.values(), strict=True):
        values = measured(run, measure)
        for share in (0.5, 0.95, 0.99):
            found = sample.percentile(share)
            if math.isfinite(found):
                assert sum(value <= found for value in values) >= share * 30 - 1e-9
                assert sum(value < found for value in values) < share * 30
            else:
                assert len(values) < share * 30


def test_the_95th_percentile_is_the_one_that_a_run_knows(runs):
    run = runs["static"]
    sample = measure_runs({"static": run})[0]
    assert sample.percentile(0.95) == run.ttft(0.95)
    assert sample.percentile(0.5) == run.ttft(0.5)


def test_marks_stand_on_the_curves_at_the_percentiles(runs):
    figure = draw_latency_distribution({"static": runs["static"]})
    values = measured(runs["static"], "ttft")
    marks = [line for line in figure.axes[0].lines if line.get_marker() in ("o", "s", "D")]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marks] == [
        (pytest.approx(values[14]), pytest.approx(50)),
        (pytest.approx(values[28]), pytest.approx(95)),
        (pytest.approx(values[29]), pytest.approx(99)),
    ]


def test_the_text_has_percentiles_and_throughput(runs):
    run = runs["continuous"]
    values = measured(run, "ttft")
    tokens = sum(len(request.token_ids) for request in run.requests)
    speed = tokens / (run.steps[-1].end - min(request.arrival for request in run.requests))
    assert describe_latency_distribution({"mine": run}).splitlines() == [
        "Time to first token, on a linear scale:",
        f"  mine: p50 {1000 * values[14]:.0f} ms, p95 {1000 * values[28]:.0f} ms, p99 {values[29]:.2f} s "
        f"(30 requests); {speed:.1f} tokens per second",
    ]


def test_requests_that_never_got_it_keep_the_curve_below_the_top_and_are_named(runs):
    figure = draw_latency_distribution(runs)
    assert max(curve(figure, "starving")[1]) == pytest.approx(100 * 28 / 30)
    assert max(curve(figure, "static")[1]) == pytest.approx(100)
    text = describe_latency_distribution({"starving": runs["starving"]})
    assert "p95 never, p99 never" in text
    assert "! 2 of 30 requests have no time to first token and count as infinitely long: requests 3 and 5." in text
    assert any("requests 3 and 5" in one.get_text() for one in figure.texts)


def test_a_clock_that_runs_backwards_is_said():
    run = simulated(continuous, workload(5))
    run.requests[2].arrival += 1000
    assert "The time to first token of request 2 is below zero: -1,000 s." in describe_latency_distribution(run)


def test_what_is_no_number_of_seconds_is_a_sentence_in_the_pictures_place():
    class Wordy(type(asked(0, 1, 1))):
        ttft = "soon"

    run = simulated(continuous, [Wordy(0, [1], asked(0, 1, 2).params)])
    assert "Request 0 has a ttft of 'soon'; expected seconds or None." in latency_distribution(run).text()


def test_an_unwritten_clock_is_a_sentence_in_the_pictures_place():
    class Unwritten(type(asked(0, 1, 1))):
        @property
        def ttft(self):
            raise NotImplementedError

    run = simulated(continuous, [Unwritten(0, [1], asked(0, 1, 2).params)])
    assert latency_distribution(run).text() == "ttft is not yet written; this figure is drawn with it."


def test_one_token_has_no_time_between_tokens_and_is_not_missed():
    run = simulated(continuous, [asked(0, 3, 1), asked(1, 3, 3)])
    sample = measure_runs(run, "tpot")[0]
    assert (sample.count, sample.missing) == (1, ())


def test_aborted_requests_are_counted_apart():
    run = simulated(continuous, [asked(0, 3, 3), asked(1, 900, 3)], num_blocks=4)
    assert [(one.count, one.aborted) for one in measure_runs(run)] == [(1, 1)]
    assert "1 aborted, not counted" in describe_latency_distribution(run)


def test_every_control_changes_the_picture_and_the_text(runs):
    view = latency_distribution(runs)
    states = [(measure, scale) for measure in MEASURES for scale in SCALES]
    pictures = [view.set(measure=measure, scale=scale).png() for measure, scale in states]
    texts = [view.set(measure=measure, scale=scale).text() for measure, scale in states]
    assert len(set(pictures)) == len(set(texts)) == len(states)


@pytest.mark.parametrize("scale", SCALES)
def test_labels_carry_the_unit_of_what_the_ticks_say(runs, scale):
    figure = draw_latency_distribution(runs, "tpot", scale)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert "(ms" in axes.get_xlabel()
    for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        assert float(label.get_text().replace(",", "")) == pytest.approx(1000 * at, rel=1e-4, abs=1e-6)
    assert "(s" in draw_latency_distribution(runs, "ttft", scale).axes[0].get_xlabel()


def test_no_time_at_all_can_be_drawn_on_both_scales():
    run = simulated(continuous, [asked(0, 3, 3)])
    for scale in SCALES:
        view = latency_distribution(run).set(measure="queue_time", scale=scale)
        assert "p50 0 s" in view.text()
        assert view.png().startswith(b"\x89PNG")


def test_curves_differ_in_their_dashes():
    assert len({str(dashes) for _, dashes in _LINES}) == len(_LINES)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (0.00042, "0.42 ms"), (0.0123, "12.3 ms"), (0.85, "850 ms"), (1.254, "1.25 s"), (12.34, "12.3 s"),
     (1234, "1,234 s"), (math.inf, "never"), (math.nan, "none")],
)  # fmt: skip
def test_times_in_words(seconds, words):
    assert in_time(seconds) == words


def test_percentiles_of_little():
    assert math.isnan(percentile([], 0.5))
    assert percentile([], 0.5, missing=2) == math.inf
    assert percentile([3.0, 1.0], 0.5) == 1.0
    assert percentile([3.0, 1.0], 0.51) == 3.0
    assert percentile([1.0], 0.95, missing=1) == math.inf


def test_what_is_not_known_is_refused(runs):
    with pytest.raises(ValueError, match=re.escape("cannot be 'speed'; expected one of ttft, tpot")):
        draw_latency_distribution(runs, "speed")
    with pytest.raises(ValueError, match="cannot be 'square'; expected one of linear, log"):
        draw_latency_distribution(runs, "ttft", "square")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("measure", MEASURES)
def test_no_labels_overlap_and_nothing_leaves_the_figure(runs, measure, scale):
    figure = draw_latency_distribution({**runs, "a name that is too long for the table it stands in": runs["static"]},
                                       measure, scale)  # fmt: skip
    figure.draw_without_rendering()
    plot, table = figure.axes
    texts = [*figure.texts, *table.texts, plot.xaxis.label, plot.yaxis.label]
    low, high = plot.get_xlim()
    texts += [one for at, one in zip(plot.get_xticks(), plot.get_xticklabels(), strict=True) if low <= at <= high]
    texts += plot.get_yticklabels()
    drawn = [(one.get_text(), one.get_window_extent()) for one in texts if one.get_text()]
    for (text, one), (other_text, other) in combinations(drawn, 2):
        assert not one.overlaps(other), (text, other_text)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= -1 for _, box in drawn)


def test_figures_do_not_pile_up(runs):
    seen = [weakref.ref(draw_latency_distribution(runs, measure)) for measure in MEASURES]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_curves_never_fall(runs):
    for name in runs:
        _, y = curve(draw_latency_distribution(runs), name)
        assert all(one <= other for one, other in pairwise(y))
