"""Attention in tiles: its numbers against softmax in one go, and folds that are wrong seen and named."""

from __future__ import annotations

import math
import re

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from llmfromscratch import optimization
from llmfromscratch.widgets.attention_tiles import attention_tiles, describe_attention_tiles, draw_attention_tiles
from llmfromscratch.widgets.style import ALARM, ORANGE
from llmfromscratch.widgets.tile_run import MASKS, QUERIES, SCORES, SIZES, TOKENS, make_scores, make_values, run_tiles

pytestmark = pytest.mark.filterwarnings("error")


def powers_of(top, scores):
    seen = torch.maximum(top, scores.amax(dim=-1))
    safe = seen.masked_fill(seen == -torch.inf, 0)
    return seen, torch.exp(top - safe).unsqueeze(-1), torch.exp(scores - safe.unsqueeze(-1))


def not_shrunk(mixed, top, total, scores, values):
    new_top, _, powers = powers_of(top, scores)
    return mixed + powers @ values, new_top, total + powers.sum(dim=-1)


def top_of_the_tile(mixed, top, total, scores, values):
    new_top = scores.amax(dim=-1)
    safe = new_top.masked_fill(new_top == -torch.inf, 0)
    shrink, powers = torch.exp(top - safe), torch.exp(scores - safe.unsqueeze(-1))
    return mixed * shrink.unsqueeze(-1) + powers @ values, new_top, total * shrink + powers.sum(dim=-1)


def forgets_the_unseen(mixed, top, total, scores, values):
    new_top = torch.maximum(top, scores.amax(dim=-1))
    shrink, powers = torch.exp(top - new_top), torch.exp(scores - new_top.unsqueeze(-1))
    return mixed * shrink.unsqueeze(-1) + powers @ values, new_top, total * shrink + powers.sum(dim=-1)


def only_this_tile(mixed, top, total, scores, values):
    new_top, _, powers = powers_of(top, scores)
    return powers @ values, new_top, powers.sum(dim=-1)


def mixed_not_shrunk(mixed, top, total, scores, values):
    _, new_top, new_total = optimization.fold_tile(mixed, top, total, scores, values)
    return mixed + powers_of(top, scores)[2] @ values, new_top, new_total


def without_a_maximum(mixed, top, total, scores, values):
    powers = torch.exp(scores)
    return mixed + powers @ values, torch.zeros_like(top), total + powers.sum(dim=-1)


def in_place(mixed, top, total, scores, values):
    new_top, shrink, powers = powers_of(top, scores)
    mixed.mul_(shrink).add_(powers @ values)
    total.mul_(shrink.squeeze(-1)).add_(powers.sum(dim=-1))
    return mixed, top.copy_(new_top), total


def words(figure):
    return [text.get_text() for text in (*figure.texts, *(one for axes in figure.axes for one in axes.texts))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scores", SCORES)
def test_after_the_last_tile_it_is_softmax_in_one_go(scores, mask, size):
    run = run_tiles(optimization.fold_tile, scores, mask, size)
    assert run.problems == () and run.wrong == 0
    expected = torch.softmax(make_scores(scores, mask).double(), dim=-1) @ make_values().double()
    torch.testing.assert_close(run.sums[-1].output.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run.expected[-1].output, expected)
    assert len(run.sums) == 1 + TOKENS // size


def test_a_query_sees_what_its_mask_says():
    for mask, most in zip(MASKS, (TOKENS, 12), strict=True):
        seen = make_scores(SCORES[0], mask).isfinite()
        for row, position in enumerate(QUERIES):
            expected = range(max(0, position - most + 1), position + 1)
            assert seen[row].nonzero().flatten().tolist() == list(expected)


def test_the_text_is_the_online_softmax_by_hand():
    run = run_tiles(optimization.fold_tile)
    scores = [float(score) for score in run.scores[5] if math.isfinite(score)]  # tokens 7 to 18
    lines = describe_attention_tiles(run, 3, 6).splitlines()
    total = sum(math.exp(score - max(scores[:6])) for score in scores[:6])
    assert lines[0] == "3 of 6 tiles folded in: tokens 1 to 12 of 24"
    assert lines[2] == "  tile 1: top −∞, total 0"
    shrunk = math.exp(max(scores[:2]) - max(scores[:6]))
    assert (
        lines[4] == f"  tile 3: top {max(scores[:6]):.2f}, total {total:.2f}, what was summed before times {shrunk:.2g}"
    )
    assert "equal to softmax(scores) @ values" in lines[5] and len(lines) == 6


def test_bars_cells_and_frame_are_what_was_folded():
    run = run_tiles(optimization.fold_tile)
    figure = draw_attention_tiles(run, 4, 6)
    cells, _, _, totals, _ = figure.axes
    frames = [patch for patch in cells.patches if to_hex(patch.get_edgecolor()) == ORANGE.lower()]
    assert [(frame.get_x(), frame.get_width()) for frame in frames] == [(11.5, 4)]
    left, new = (patch.get_height() for patch in totals.patches if patch.get_x() > 12 and patch.get_fill())
    old = run.sums[3]
    shrunk = float(old.total[5] * torch.exp(old.top[5] - run.sums[4].top[5]))
    assert left == pytest.approx(shrunk, rel=1e-4)
    assert left + new == pytest.approx(float(run.sums[4].total[5]), rel=1e-4)
    assert f"× {math.exp(old.top[5] - run.sums[4].top[5]):.2g}" in words(figure)
    darkest = max((patch for patch in cells.patches if patch.get_y() == pytest.approx(5 - 0.44)),
                  key=lambda patch: -sum(patch.get_facecolor()[:3]) if patch.get_fill() else -9)  # fmt: skip
    assert darkest.get_x() + 0.46 == pytest.approx(int(run.scores[5, :16].argmax()))


def test_every_control_changes_the_picture_and_nothing_else_does():
    view = attention_tiles(optimization.fold_tile)
    pictures = [view.png(), view.set(tiles=2).png(), view.set(query=3).png(), view.set(size=6).png()]
    pictures += [view.set(scores="rising").png(), view.set(mask=MASKS[0]).png()]
    assert len(set(pictures)) == 6 and pictures[-1].startswith(b"\x89PNG")
    assert view.png() == pictures[-1] and view.text() == view.text()
    assert view.set(size=12, tiles=12).text().startswith("2 of 2 tiles")  # there are no more
    with pytest.raises(ValueError, match="size cannot be 5"):
        view.set(size=5)


@pytest.mark.parametrize("size", [min(SIZES), max(SIZES)])
@pytest.mark.parametrize("tiles", [0, 12])
@pytest.mark.parametrize("scores", SCORES)
def test_nothing_is_cut_off_or_written_over_something(scores, tiles, size):
    run = run_tiles(optimization.fold_tile, scores, MASKS[1], size)
    figure = draw_attention_tiles(run, min(tiles, run.tiles), 8)
    figure.draw_without_rendering()
    texts = [text for text in (*figure.texts, *(one for axes in figure.axes for one in axes.texts)) if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    for at, box in enumerate(boxes):
        hit = [texts[other].get_text() for other in range(at) if box.shrunk(0.9, 0.7).overlaps(boxes[other])]
        assert not hit, (texts[at].get_text(), hit)


@pytest.mark.parametrize(
    ("fold", "said"),
    [
        (not_shrunk, r"total is .*as if what was summed before had not shrunk by exp\(old top - new top\)"),
        (
            top_of_the_tile,
            "Tile 2, query 1: top is -inf, the largest score of this tile alone; the largest",
        ),
        (forgets_the_unseen, "total is NaN; .*this query has seen nothing yet, and -inf minus -inf is NaN"),
        (only_this_tile, "adds up to .*: as if only this tile counted"),
        (mixed_not_shrunk, r"^Tile 2, query 2: mixed is not the sum of exp\(score - top\) \* value"),
        (without_a_maximum, "Tile 1, query 1: top is 0.00; the largest score so far"),
    ],
)
def test_a_wrong_fold_is_named_and_seen(fold, said):
    run = run_tiles(fold)
    assert run.wrong in (1, 2)
    text = describe_attention_tiles(run, 4, 6)
    assert re.search(said, text, re.MULTILINE), text
    figure = draw_attention_tiles(run, 4, 6)
    assert any(word.startswith("! Tile") for word in words(figure))
    assert describe_attention_tiles(run, 0, 6).count("Tile") == 0  # not before it happens
    right = attention_tiles(optimization.fold_tile)
    assert attention_tiles(fold).png() != right.png()


def test_a_wrong_output_is_hatched_and_said():
    figure = draw_attention_tiles(run_tiles(not_shrunk, mask=MASKS[0]), 6, 6)
    bars = [patch for patch in figure.axes[4].patches if isinstance(patch, Rectangle)]
    assert any(to_hex(bar.get_edgecolor()) == ALARM.lower() and bar.get_hatch() for bar in bars)
    assert "and not softmax(scores) @ values" in attention_tiles(mixed_not_shrunk, query=2).text()


def test_a_fold_that_overflows_without_a_maximum_is_seen_where_scores_are_large():
    run = run_tiles(without_a_maximum, "in the hundreds")
    assert not run.sums[-1].output.isfinite().all()
    assert "∞" in attention_tiles(without_a_maximum, scores="in the hundreds").text()


def test_a_fold_that_works_in_place_does_not_change_what_is_drawn():
    run = run_tiles(in_place)
    assert run.problems == ()
    assert attention_tiles(in_place).png() == attention_tiles(optimization.fold_tile).png()


@pytest.mark.parametrize(
    ("fold", "said"),
    [
        (lambda *given: None, "fold_tile returned None at tile 1; mixed, top and total were expected."),
        (lambda *given: given[:2], "fold_tile returned 2 things at tile 1; mixed, top and total were expected."),
        (
            lambda mixed, top, total, scores, values: (mixed, top, total.unsqueeze(-1)),
            r"fold_tile returned a tensor \[8, 1\] for total at tile 1; a tensor \[8\] was expected.",
        ),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(fold, said):
    with pytest.raises(ValueError, match=said):
        run_tiles(fold)
    assert "cannot be drawn" in attention_tiles(fold).text()


def test_what_is_not_yet_written_is_said():
    def fold_tile(mixed, top, total, scores, values):
        raise NotImplementedError

    assert attention_tiles(fold_tile).text() == "fold_tile is not yet written; this figure is drawn with it."
