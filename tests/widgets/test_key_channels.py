"""The figure of the keys' channels: ranges as they are, the learner's frame at work, and the error that it saves."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_tiny

from llmfromscratch import quantization
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.widgets import draw_key_channels, key_channels
from llmfromscratch.widgets.key_channels import channels_of, describe, outliers, record_keys

pytestmark = pytest.mark.filterwarnings("error")


def keys_with_an_outlier():
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(50, 2, 16, generator=generator)
    keys[:, 1, 5] = 40 + keys[:, 1, 5]
    return keys


def rounded_by_hand(rows, steps):
    low = rows.amin(dim=1, keepdim=True)
    step = (rows.amax(dim=1, keepdim=True) - low) / steps
    return ((rows - low) / step).round() * step + low


def bars(axes):
    return [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches if bar.get_width() == 0.8]


def test_bars_go_from_the_smallest_to_the_largest_number_of_each_channel():
    keys = keys_with_an_outlier()
    above, below, _ = draw_key_channels(channels_of(keys, quantization.key_frame, 1, 4), 0, 1, 4).axes
    low, high = keys[:, 1].amin(dim=0).tolist(), keys[:, 1].amax(dim=0).tolist()
    assert bars(above) == [pytest.approx(each, rel=1e-5) for each in zip(low, high, strict=True)]
    assert bars(below) == [pytest.approx((-1, 1), abs=1e-5)] * 16


def test_the_outlier_is_named_and_costs_what_rounding_by_hand_says():
    keys = keys_with_an_outlier()
    seen = channels_of(keys, quantization.key_frame, 1, 4)
    assert outliers(seen.plain) == [5]
    own = keys[:, 1]
    middle, spread = (own.amax(dim=0) + own.amin(dim=0)) / 2, (own.amax(dim=0) - own.amin(dim=0)) / 2
    power = (own - own.mean(dim=0)).square().sum()
    for name, rows, unit in (("as they are", own, torch.ones(16)), ("in the frame", (own - middle) / spread, spread)):
        error = ((rounded_by_hand(rows, 15) - rows) * unit).square().sum()
        assert seen.error[name] == pytest.approx(100 * float(error / power), rel=5e-3)
    assert seen.error["in the frame"] < 0.1 * seen.error["as they are"]
    assert "reaching far beyond the others: 5;" in describe(seen, 0, 1, 4)


def test_a_wrong_frame_shows():
    keys = keys_with_an_outlier()
    right = channels_of(keys, quantization.key_frame, 1, 4)
    wrong = channels_of(keys, lambda keys: (torch.zeros(2, 16), torch.ones(2, 16)), 1, 4)
    assert wrong.error["in the frame"] == pytest.approx(wrong.error["as they are"])
    assert describe(wrong, 0, 1, 4) != describe(right, 0, 1, 4)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (lambda keys: None, "gave NoneType; return two tensors"),
        (lambda keys: (keys[0, 0], keys[0]), r"middle of key_frame is \[16\]; return .* \[2, 16\]"),
        (
            lambda keys: (keys[0], keys.sum(dim=0) * float("nan")),
            "spread of key_frame holds what is not a finite number",
        ),
        (lambda keys: (keys[0], torch.zeros_like(keys[0])), "spread of key_frame is 0"),
    ],
)
def test_a_frame_that_no_key_fits_into_is_told_in_a_sentence(frame, said):
    with pytest.raises(RequestError, match=said):
        channels_of(keys_with_an_outlier(), frame, 1, 4)


def test_every_control_changes_the_picture_and_the_words(tmp_path):
    llm = LLM(save_tiny(tmp_path / "tiny"), dtype="float32", layers="plain")
    assert record_keys(llm)[0].shape[1:] == (llm.config.num_kv_heads, llm.config.head_dim)
    form = key_channels(llm, quantization.key_frame)
    for change in ({"layer": 1}, {"head": 1}, {"bits": 8}):
        before = form.png(), form.text()
        form.set(**change)
        assert (form.png(), form.text()) != before
        assert form.png() != before[0]
