"""The histogram of a tensor over the levels of its grids: errors that are right, and a wrong module that shows."""

from __future__ import annotations

import re

import pytest
import torch
from tiny_models import random_ids, tiny_model

from llmfromscratch import quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.widgets import record_tensors, weight_histogram
from llmfromscratch.widgets.rounding_run import CLIPS, GROUPS, LEAST, NONE, ROW, TENSOR, round_tensor
from llmfromscratch.widgets.weight_histogram import draw_weight_histogram, outliers

pytestmark = pytest.mark.filterwarnings("error")
TENSORS = {
    "weights": torch.randn(40, 100, generator=torch.Generator().manual_seed(3)),
    "activations": torch.randn(30, 96, generator=torch.Generator().manual_seed(4))
    * torch.where(torch.arange(96) == 17, 30.0, 1.0),
}


def looped(values: torch.Tensor, bits: int, size: int, symmetric: bool) -> float:
    """The squared error of rounding, number by number in float64."""
    total = 0.0
    for row in values.double():
        for group in row.split(size):
            if symmetric:
                step = float(group.abs().max()) / (2 ** (bits - 1) - 1)
                levels = [step * k for k in range(-(2 ** (bits - 1)), 2 ** (bits - 1))]
            else:
                low, high = float(group.min()), float(group.max())
                levels = [low + (high - low) / (2**bits - 1) * k for k in range(2**bits)]
            total += sum(min((float(x) - level) ** 2 for level in levels) for x in group)
    return total


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 64), (2, 128), (4, ROW), (3, TENSOR)])
def test_the_error_is_that_of_the_nearest_level(bits, group, symmetric):
    values = TENSORS["weights"][:8]
    run = round_tensor(values, bits, group, NONE, symmetric)
    flat = values.reshape(1, -1) if group == TENSOR else values
    size = group if isinstance(group, int) else flat.shape[1]
    assert run.squared == pytest.approx(looped(flat, bits, size, symmetric), rel=1e-4)
    assert run.relative == pytest.approx(run.squared / float(values.square().sum()))
    error, row, column = run.worst()
    assert error == pytest.approx(float((run.rounded - values).abs().max()))
    assert abs(float(run.rounded[row, column] - values[row, column])) == error
    assert (run.problems, run.cut) == ((), 0)


def test_the_grids_shown_are_the_narrowest_the_middle_and_the_widest():
    run = round_tensor(TENSORS["activations"], 4, 32)
    ranges = [float(grid.values.max() - grid.values.min()) for grid in run.grids]
    every = torch.stack([part.amax(1) - part.amin(1) for part in TENSORS["activations"].split(32, dim=1)]).flatten()
    assert ranges == pytest.approx([float(every.min()), float(every.sort().values[45]), float(every.max())])
    for grid in run.grids:
        row, first, last = (int(number) for number in re.findall(r"\d+", grid.place))
        assert torch.equal(grid.values, TENSORS["activations"][row, first : last + 1])
        assert len(grid.levels) == 16
        assert float(grid.levels[0]) == pytest.approx(float(grid.values.min()), abs=1e-5)
        assert float(grid.levels[-1]) == pytest.approx(float(grid.values.max()), abs=1e-5)
    assert run.groups == 90
    assert run.bits_each == 5  # a scale and a minimum of 16 bits for 32 numbers
    assert len(round_tensor(TENSORS["activations"], 4, TENSOR).grids) == 1


def test_clipping_cuts_off_and_least_squares_never_gets_worse():
    plain = round_tensor(TENSORS["activations"], 3, ROW)
    assert round_tensor(TENSORS["activations"], 3, ROW, LEAST).squared <= plain.squared
    cut = round_tensor(TENSORS["activations"], 3, ROW, "beyond 99 % of a group")
    assert cut.cut > 0
    assert not cut.problems


def test_a_column_that_stands_out_is_named():
    assert outliers(round_tensor(TENSORS["activations"])) == [17]
    assert outliers(round_tensor(TENSORS["weights"])) == []
    view = weight_histogram(TENSORS).set(tensor="activations")
    assert re.search(r"columns that stand out: 1; 17 \((2|3)\d times the middle one\)", view.text())


def test_every_control_changes_the_picture():
    view = weight_histogram(TENSORS, bits=3)
    before = view.png()
    moves = [{"tensor": "activations"}, *({"bits": bits} for bits in (2, 4, 8)), {"symmetric": True}]
    moves += [{"group": group} for group in GROUPS.values()]
    moves += [{"clip": clip} for clip in CLIPS if clip != NONE]
    for move in moves:
        after = view.set(**move).png()
        assert after != before, move
        before = after
    with pytest.raises(ValueError, match="bits cannot be 7"):
        view.set(bits=7)


def test_the_text_gives_the_error_and_what_other_grids_would_make():
    run = round_tensor(TENSORS["weights"], 4, 64)
    lines = weight_histogram(TENSORS, group=64).text().splitlines()
    assert lines[0] == "Weights: 40 rows of 100, in 4 bits, groups of 64, asymmetric"
    error, worst = 100 * run.relative, run.worst()[0]
    assert lines[1].startswith(f"  Error {error:.3g} % of the power, worst {worst:.3g}; all numbers")
    assert lines[2].startswith(f"  squared error {run.squared:.4g}; the worst is")
    for words, group in GROUPS.items():
        assert f"{words} {100 * round_tensor(TENSORS['weights'], 4, group).relative:.3g} %" in lines[3]


def test_large_tensors_are_sampled_and_it_says_so():
    assert "200 of 600 rows of 2,000" in weight_histogram({"large": torch.randn(600, 2000)}, group=TENSOR).text()


def test_the_histogram_counts_every_number_before_and_after():
    state = weight_histogram(TENSORS).state
    run = round_tensor(TENSORS["weights"], 4, 32)
    figure = draw_weight_histogram(run, {"groups of 32": run}, state)
    before, after = figure.axes[0].patches
    assert before.get_data().values.sum() == after.get_data().values.sum() == 4000


def floor_codes(groups, scales, minimums, bits):
    steps = (groups - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)
    return steps.floor().clamp(0, 2**bits - 1).to(torch.uint8)


def half_grid(groups, bits, symmetric):
    return groups.abs().amax(-1) / 2**bits, -groups.abs().amax(-1) / 2


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("codes_of", floor_codes, "codes_of: .* though levels are .* a nearer one is there"),
        ("codes_of", lambda groups, *_: groups.round(), "codes are float32"),
        ("codes_of", lambda groups, *_: groups[:1].to(torch.uint8), "codes_of gave \\[1, 32\\] codes for groups"),
        ("grid_of", half_grid, "grid_of: numbers lie beyond the ends"),
        ("grid_of", lambda g, *_: (g.amax(-1) * 0, g.amin(-1)), "grid_of: a scale is 0"),
        ("grid_of", lambda g, *_: (g.amax(-1) * torch.nan, g.amin(-1)), "grid_of: a scale is nan"),
        ("grid_of", lambda g, *_: (g.max(), g.min()), "grid_of gave \\[\\] scales"),
    ],
)
def test_a_wrong_module_shows(monkeypatch, name, wrong, said):
    right = weight_histogram(TENSORS).png()
    monkeypatch.setattr(quantization, name, wrong)
    view = weight_histogram(TENSORS)
    assert re.search(said, view.text()), view.text()
    assert view.png() != right


def test_a_symmetric_grid_without_a_zero_shows(monkeypatch):
    right = quantization.grid_of
    monkeypatch.setattr(quantization, "grid_of", lambda groups, bits, symmetric: right(groups, bits, False))
    assert "of a symmetric grid is" in weight_histogram(TENSORS, symmetric=True).text()


def test_what_cannot_be_drawn_is_a_sentence():
    for tensor, said in ((torch.full((2, 3), torch.nan), "NaN or infinite"), (torch.ones(3), "expected a matrix")):
        assert said in weight_histogram({"x": tensor}).text()
    with pytest.raises(ValueError, match="There is no tensor to draw"):
        weight_histogram({})
    assert weight_histogram({"zeros": torch.zeros(4, 64)}).png()


def test_tensors_of_a_model_are_its_weights_and_what_its_products_read():
    network, ids = tiny_model(dtype=torch.float32), random_ids(40)
    found = record_tensors(network, ids)
    assert [name for name in found if name.startswith("layer 1")] == [
        *(f"layer 1, weight of {name}" for name in ("q", "k", "v", "o", "gate", "up", "down")),
        "layer 1, what q, k and v read", "layer 1, what o reads", "layer 1, what gate and up read",
        "layer 1, what down reads",
    ]  # fmt: skip
    assert torch.equal(found["layer 2, weight of up"], network.layers[2].mlp.up_proj.weight)
    assert found["layer 0, what down reads"].shape == (39, 40)
    embedded = network.embed_tokens.weight[torch.tensor(ids[:-1])]
    expected = network.layers[0].input_layernorm(embedded)
    assert torch.allclose(found["layer 0, what q, k and v read"], expected, atol=1e-6)
    assert not network.layers[0].mlp.down_proj._forward_pre_hooks
    with pytest.raises(RequestError, match="the model has layers 0 to 2"):
        record_tensors(network, ids, [3])
