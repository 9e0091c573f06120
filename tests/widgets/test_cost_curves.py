"""The cost curves: the fitted lines against numpy, the measurement on tiny models, and wrong caches named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmfromscratch import kv_cache
from llmfromscratch.widgets import cost_measurement
from llmfromscratch.widgets.cost_curves import cost_curves, describe_costs, draw_costs
from llmfromscratch.widgets.cost_measurement import Costs, fitted, measure_costs
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("error")
LENGTHS = (64, 256, 1024, 4096)
COSTS = Costs(
    {
        "recompute": {length: 40 + 2.2 * length for length in LENGTHS[:3]},
        "concat": {length: 41 + 0.0121 * length for length in LENGTHS},
        "static": {length: 40 + 0.004 * length for length in LENGTHS},
        "paged": {length: 40.5 + 0.0044 * length for length in LENGTHS},
    },
    {length: 0.2 + 0.002 * length for length in LENGTHS},
    {},
    "float32 on cpu, 2 threads",
)


@pytest.fixture(scope="module")
def network():
    return tiny_model(max_position_embeddings=256)


class LosesToken(kv_cache.StaticKVCache):
    """Reads zeros in the place of a token."""

    def read(self, layer, request_id):
        keys, values = super().read(layer, request_id)
        values = values.clone()
        values[3] = 0
        return keys, values


class NotWritten(kv_cache.PagedKVCache):
    def write(self, layer, keys, values, batch):
        raise NotImplementedError


def test_the_line_is_the_one_of_least_squares_of_relative_errors():
    points = {64: 41.3, 200: 40.9, 777: 55.5, 3000: 61.0}
    slope, start = np.polyfit(list(points), list(points.values()), 1, w=1 / np.array(list(points.values())))
    line = fitted(points)
    assert (line.start, line.slope) == pytest.approx((start, slope))
    assert line.at(500) == pytest.approx(start + 500 * slope)
    assert fitted({5: 7.0}).at(100) == 7.0


def test_the_text_states_start_and_slope_of_each_kind():
    assert cost_curves(COSTS).text().splitlines() == [
        "Time of a decode step against the length of the text (float32 on cpu, 2 threads)",
        "recompute: 40.0 ms + 2,200 µs a token, 1,100.0 times reading alone; "
        "measured at 64 to 1,024 tokens, 2,292.8 ms at 1,024",
        "concat: 41.0 ms + 12.10 µs a token, 6.0 times reading alone; measured at 64 to 4,096 tokens, 90.6 ms at 4,096",
        "static: 40.0 ms + 4.00 µs a token, 2.0 times reading alone; measured at 64 to 4,096 tokens, 56.4 ms at 4,096",
        "paged: 40.5 ms + 4.40 µs a token, 2.2 times reading alone; measured at 64 to 4,096 tokens, 58.5 ms at 4,096",
        "reading keys and values once: 2.00 µs a token",
    ]


def test_every_control_changes_the_picture():
    view = cost_curves(COSTS)
    pictures = [view.png(), view.set(scale="linear").png()]
    names = ["without recompute", "static and paged", "recompute alone", "concat alone", "static alone", "paged alone"]
    pictures += [view.set(kinds=name).png() for name in names]
    pictures.append(view.set(scale="logarithmic").png())
    assert len(set(pictures)) == len(pictures)
    assert [line.split(":")[0] for line in view.set(kinds="static and paged").text().splitlines()[1:]] == [
        "static", "paged", "reading keys and values once",
    ]  # fmt: skip


@pytest.mark.parametrize("scale", ["logarithmic", "linear"])
def test_points_are_drawn_where_they_were_measured_and_lines_where_they_were_fitted(scale):
    axes = draw_costs(COSTS, scale).axes[0]
    drawn = [line for line in axes.lines if line.get_transform() is not axes.transAxes and len(line.get_xdata()) > 2]
    points = [line for line in drawn if line.get_marker() != "None"]
    for line, (kind, measured) in zip(points, COSTS.points.items(), strict=True):
        assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == measured, kind
    lines = [line for line in drawn if line.get_marker() == "None"]
    assert len(lines) == 5  # four kinds, and reading alone
    assert max(lines[0].get_xdata()) == pytest.approx(1024)  # recomputing is not drawn where it was not measured
    for line, start, slope in zip(lines, (40, 41, 40, 40.5, 40), (2.2, 0.0121, 0.004, 0.0044, 0.002), strict=True):
        np.testing.assert_allclose(line.get_ydata(), start + slope * np.array(line.get_xdata()))


def test_kinds_differ_in_colour_marker_and_dashes():
    axes = draw_costs(COSTS).axes[0]
    points = [line for line in axes.lines if line.get_marker() != "None" and len(line.get_xdata()) > 1]
    assert len({line.get_marker() for line in points}) == len({line.get_color() for line in points}) == 4


def test_all_kinds_are_measured_at_all_lengths(network):
    costs = measure_costs(network, lengths=(16, 40, 100), steps=2)
    assert list(costs.points) == ["recompute", "concat", "static", "paged"]
    assert all(list(points) == [16, 40, 100] for points in costs.points.values())
    assert all(0 < time < 5000 for points in costs.points.values() for time in points.values())
    assert list(costs.reading) == [16, 40, 100]
    assert costs.problems == {}
    assert costs.machine == "float64 on cpu, 1 thread"
    assert cost_curves(costs).png()


def test_lengths_that_do_not_fit_the_context_are_left_out_if_none_are_asked_for(network):
    assert list(measure_costs(network, ["static"]).points["static"]) == [64]


def test_a_decode_step_feeds_one_token_and_no_pass_but_the_first_is_a_prefill(network):
    fed = []

    class Watching(kv_cache.StaticKVCache):
        def write(self, layer, keys, values, batch):
            if layer == 0:
                fed.append((batch.spans[0].start, keys.shape[0]))
            super().write(layer, keys, values, batch)

    measure_costs(network, ["static"], (16, 40), steps=2,
                  caches={"static": lambda layout, tokens: Watching(layout, 1, tokens)})  # fmt: skip
    steps = [(16, 1), (17, 1), (18, 1), (19, 21), (40, 1), (41, 1), (42, 1)]
    assert fed == [(0, 16), *steps] * 3


def test_in_quick_mode_recomputing_stops_when_its_time_is_up(network, monkeypatch):
    monkeypatch.setattr(cost_measurement, "_SECONDS_OF_RECOMPUTING", 0.0)
    assert list(measure_costs(network, ["recompute"], (16, 40, 100)).points["recompute"]) == [16]
    assert list(measure_costs(network, ["recompute"], (16, 40, 100), quick=False).points["recompute"]) == [16, 40, 100]


def test_a_cache_that_gives_wrong_answers_is_named_and_drawn_hollow(network):
    costs = measure_costs(
        network, lengths=(16, 40), caches={"static": lambda layout, tokens: LosesToken(layout, 1, tokens)}
    )
    assert list(costs.problems) == ["static"]
    assert costs.problems["static"].startswith("at 16 tokens it gives other logits than recompute, by up to ")
    assert "static: at 16 tokens it gives other logits" in describe_costs(costs)
    hollow = [line.get_fillstyle() for line in draw_costs(costs).axes[0].lines if len(line.get_xdata()) == 2
              and line.get_marker() != "None"]  # fmt: skip
    assert hollow == ["full", "full", "none", "full"]


def test_a_cache_that_goes_wrong_later_is_named_too(network, monkeypatch):
    right = kv_cache.slots_of
    monkeypatch.setattr(kv_cache, "slots_of", lambda *arguments: right(*arguments) % 48)
    costs = measure_costs(network, lengths=(16, 100))
    assert costs.problems["paged"].startswith("at 100 tokens it gives other logits than concat")


def test_a_cache_that_is_not_yet_written_is_named_and_the_others_are_measured(network):
    costs = measure_costs(
        network, lengths=(16, 40), caches={"paged": lambda layout, tokens: NotWritten(layout, -(-tokens // 16), 16)}
    )
    assert costs.problems == {"paged": "write is not yet written."}
    assert list(costs.points) == ["recompute", "concat", "static"]
    view = cost_curves(costs)
    assert view.text().endswith("paged: write is not yet written.")
    assert view.png()


def test_a_kind_of_ones_own_is_measured_beside_the_others(network):
    mine = {"mine": lambda layout, tokens: kv_cache.ConcatKVCache(layout.num_layers)}
    costs = measure_costs(network, ["static", "mine"], (16, 40), caches=mine)
    assert list(costs.points) == ["static", "mine"]
    assert "mine: " in cost_curves(costs).set(kinds="mine alone").text()


def test_without_a_single_time_the_picture_says_why():
    costs = Costs({}, {}, {"paged": "write is not yet written."})
    assert cost_curves(costs).text().splitlines()[1:] == ["paged: write is not yet written."]
    assert "nothing was measured" in [text.get_text() for text in draw_costs(costs).axes[0].texts]


def test_a_single_length_is_drawn_without_a_line():
    costs = Costs({"static": {64: 30.0}}, {64: 1.0})
    assert cost_curves(costs).png()
    assert cost_curves(costs).set(scale="linear").png()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kinds": ["statik"]}, "'statik' is no kind of cache; expected some of recompute, concat, static, paged"),
        ({"lengths": [64, 32]}, "expected at least one step, and lengths that rise by more than the steps"),
        ({"lengths": []}, "lengths are"),
        ({"lengths": [253]}, "253 tokens and 4 steps do not fit the context of 256"),
    ],
)
def test_what_cannot_be_measured_is_refused(network, arguments, said):
    with pytest.raises(ValueError, match=said):
        measure_costs(network, **arguments)


def test_the_engines_own_caches_are_measured(network, monkeypatch):
    monkeypatch.setattr(kv_cache, "StaticKVCache", LosesToken)
    assert list(measure_costs(network, ["recompute", "static"], (16, 40)).problems) == ["static"]
    assert torch.is_inference_mode_enabled() is False
