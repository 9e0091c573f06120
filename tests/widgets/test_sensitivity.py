"""The figure of what minds: marks at the damages that were measured, and each control shows others."""

from __future__ import annotations

import pytest

from llmfromscratch.sensitivity import OUTSIDE, PRODUCTS, Sensitivity
from llmfromscratch.widgets import draw_sensitivity, sensitivity
from llmfromscratch.widgets.sensitivity import EVERY, describe_sensitivity, marks_of

pytestmark = pytest.mark.filterwarnings("error")
DAMAGE = {
    f"layers.{layer}.{product}": {3: 0.01 * (layer + 1) * weight, 8: 0.001 * (layer + 1) * weight}
    for layer in range(3)
    for product, weight in (("self_attn.v_proj", 1), ("mlp.down_proj", 2.5))
} | {"embed_tokens": {3: 0.5, 8: 0.0}, "lm_head": {3: 0.5, 8: 0.00004}}
DAMAGES = Sensitivity(DAMAGE, dict.fromkeys(DAMAGE, 10))


def drawn(figure):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}


def test_each_product_has_its_damage_over_its_layers():
    found = drawn(draw_sensitivity(DAMAGES, 3))
    assert found["v_proj"] == ([0, 1, 2], pytest.approx([0.01, 0.02, 0.03]))
    assert found["down_proj"] == ([0, 1, 2], pytest.approx([0.025, 0.05, 0.075]))
    assert found["embed_tokens"] == ([-1], [0.5])
    assert found["lm_head"] == ([3], [0.5])  # not over the embedding


def test_no_damage_is_drawn_at_the_bottom_of_the_logarithmic_scale():
    figure = draw_sensitivity(DAMAGES, 8)
    assert drawn(figure)["embed_tokens"][1] == [1e-6]
    assert "less than 0.000001" in figure.axes[0].get_ylabel()
    assert "less than" not in draw_sensitivity(DAMAGES, 3).axes[0].get_ylabel()


def test_the_worst_parts_are_ranked_in_the_picture_and_in_words():
    figure = draw_sensitivity(DAMAGES, 3)
    ranks = {text.get_text(): tuple(text.xy) for text in figure.axes[0].texts}
    assert ranks["1"] == (-1, 0.5)
    assert ranks["2"] == (3, 0.5)
    assert ranks["3"] == (2, pytest.approx(0.075))
    assert "layer 2 down_proj" in figure.texts[0].get_text()
    assert "most: embed_tokens 0.5, lm_head 0.5, layers.2.mlp.down_proj 0.075," in describe_sensitivity(DAMAGES, 3)


def test_every_control_changes_the_picture_and_the_words():
    form = sensitivity(DAMAGES)
    assert form.state == {"bits": 3, "product": EVERY}
    before = form.png(), form.text()
    form.set(bits=8)
    other = form.png(), form.text()
    form.set(product="v_proj")
    third = form.png(), form.text()
    for first, second in ((before, other), (other, third)):
        assert first[0] != second[0]
        assert first[1] != second[1]


def test_one_product_is_shown_alone():
    assert {mark.product for mark in marks_of(DAMAGES, 3, "v_proj")} == {"v_proj"}
    assert list(drawn(draw_sensitivity(DAMAGES, 3, "v_proj"))) == ["v_proj"]


def test_the_list_of_the_worst_lies_beside_the_key_and_inside_the_picture():
    names = [*(f"layers.{layer}.{product}" for layer in (11, 29) for product in PRODUCTS), *OUTSIDE]
    figure = draw_sensitivity(Sensitivity({name: {3: 0.0000123} for name in names}, dict.fromkeys(names, 1)), 3)
    figure.canvas.draw()
    key, listed = figure.axes[0].get_legend().get_window_extent(), figure.texts[0].get_window_extent()
    assert not key.overlaps(listed)
    for box in (key, listed):
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
