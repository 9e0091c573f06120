"""The figure of masks: its cells against the rule, its layers against paths, its numbers against counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from llmfromscratch import masks, optimization
from llmfromscratch.widgets.attention_mask import (
    TILE,
    TOKENS,
    attention_mask,
    describe_attention_mask,
    draw_attention_mask,
    look_through,
    mask_of,
    reads,
)
from llmfromscratch.widgets.style import ALARM, ORANGE

pytestmark = pytest.mark.filterwarnings("error")


def blind(queries, keys, values, visible, tile):
    """Attention that takes no notice of the mask, but for what lies ahead."""
    return optimization.tiled_attention(queries, keys, values, torch.ones_like(visible).tril(), tile)


def outlined(figure, colour):
    return [patch for patch in figure.axes[0].patches if to_hex(patch.get_edgecolor()) == colour.lower()]


def test_what_is_drawn_is_who_sees_whom():
    mask = masks.sliding(5) | masks.global_tokens(2)
    shown = draw_attention_mask(look_through(mask)).axes[0].images[0].get_array()
    for query in range(TOKENS):
        for key in range(TOKENS):
            seen = key <= query and (key > query - 5 or key < 2)
            assert shown[query, key] == (2 if seen else 1 if key <= query else 0)


def test_the_weights_are_shared_evenly_among_what_is_seen():
    pattern = look_through(masks.dilated(3, 4))
    assert pattern.weights[20].nonzero().flatten().tolist() == [11, 14, 17, 20]
    torch.testing.assert_close(pattern.weights[20, 11], torch.tensor(0.25, dtype=torch.float64))
    assert pattern.problems() == []


def test_tiles_that_nobody_looks_into_are_not_outlined():
    corners = {(rect.get_x() + 0.5, rect.get_y() + 0.5) for rect in outlined(
        draw_attention_mask(look_through(masks.blocks(TILE))), ORANGE)}  # fmt: skip
    assert corners == {(place, place) for place in range(0, TOKENS, TILE)}
    text = describe_attention_mask(look_through(masks.blocks(TILE) | masks.global_tokens(1)))
    assert "Tiles of 8 x 8: 7 of 10 are computed" in text


@pytest.mark.parametrize("mask", [masks.sliding(6), masks.dilated(4, 3), masks.blocks(8, 1), None], ids=repr)
def test_news_needs_as_many_layers_as_the_shortest_path_has_steps(mask):
    pattern = look_through(mask)
    # walks of n steps from the newest token, counted by multiplying its matrix n times
    steps, paths = np.zeros(TOKENS, dtype=int), np.eye(TOKENS)[-1]
    for layer in range(1, TOKENS + 1):
        paths = np.minimum(paths @ pattern.visible.double().numpy(), 1)
        steps[(steps == 0) & (paths > 0)] = layer
    assert pattern.layers_until_heard() == steps.tolist()


def test_a_decode_step_reads_what_the_mask_shows_it():
    assert reads(None, 8192) == 8192
    assert reads(masks.sliding(256) | masks.global_tokens(4), 8192) == 260
    assert reads(masks.blocks(64), 8192) == 64 and reads(masks.blocks(64), 65) == 1
    assert "A decode step at 8,192 tokens reads 6 keys" in attention_mask().text()


def test_every_control_changes_the_picture():
    form = attention_mask()
    states = [
        {},
        {"window": 9},
        {"stride": 3},
        {"first": 2},
        {"kind": "blocks"},
        {"kind": "random"},
        {"kind": "causal"},
    ]
    assert len({form.set(**state).png() for state in states}) == len(states)


@pytest.mark.parametrize("kind", ["window", "random", "blocks", "causal"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_every_state_of_the_controls_is_a_mask_that_attention_takes(kind, stride, first):
    mask = mask_of(kind, 5, stride, first)
    masks.check(mask)
    assert mask is None or ("global_tokens(2)" in repr(mask)) == (first == 2)
    assert look_through(mask).problems() == []


def test_an_attention_that_ignores_the_mask_is_seen_and_named():
    pattern = look_through(masks.sliding(6), blind)
    assert pattern.problems() == [
        # in each row from 6 on all weights are too small, and those of the hidden keys are not 0
        f"Query 6 gives token 0 the weight 0.143, where the mask says 0 ({sum(range(7, 33)) - 1} more cells like this)."
    ]
    figure = draw_attention_mask(pattern)
    assert len(outlined(figure, ALARM)) == sum(range(27))
    assert "where the mask says 0" in attention_mask(blind).text()


def test_an_attention_that_cannot_be_run_is_a_sentence():
    def unwritten(*parts):
        raise NotImplementedError

    assert "unwritten is not yet written" in attention_mask(unwritten).text()
