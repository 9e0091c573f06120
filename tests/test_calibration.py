"""Calibration texts become windows, and a network reads them layer by layer as it would in one go.

Oracles: whole forward passes of the network with hooks on its products, one window after the other.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import SHAPES, VOCAB, all_logits, ours, tiny_model, transformers_model

from llmfromscratch import calibration
from llmfromscratch.errors import RequestError


class Characters:
    """A tokenizer whose ids are characters' numbers."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def random_windows(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def seen_in_whole_passes(network, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """x xᵀ of what every product of every layer reads, summed over whole forward passes."""
    sums: dict[str, torch.Tensor] = {}

    def watch(name):
        def add(part, inputs):
            x = inputs[0].double()
            sums[name] = sums.get(name, 0) + x.T @ x

        return add

    products = [(name, part) for name, part in network.named_modules() if name.endswith("_proj")]
    handles = [part.register_forward_pre_hook(watch(name)) for name, part in products]
    for window in windows:
        all_logits(network, window.tolist())
    for handle in handles:
        handle.remove()
    return sums


# ---- texts -------------------------------------------------------------------------------------------------------


def test_windows_are_spread_over_the_text_from_its_beginning_to_its_end():
    text = "".join(map(chr, range(100, 1100)))
    windows = calibration.windows(Characters(), text, count=4, length=10)
    assert windows.dtype == torch.int64 and windows.tolist()[0] == list(range(100, 110))
    assert windows[:, 0].tolist() == [100, 430, 760, 1090] and windows[-1, -1] == 1099
    assert torch.equal(windows - windows[:, :1], torch.arange(10).expand(4, 10))
    assert calibration.windows(Characters(), text, 1, 10).tolist() == [list(range(100, 110))]


def test_a_text_too_short_for_the_windows_gets_a_sentence_with_both_numbers():
    with pytest.raises(RequestError, match=r"has 39 tokens; 4 windows of 10 are 40\. Give a longer text"):
        calibration.windows(Characters(), "x" * 39, 4, 10)
    assert len(calibration.windows(Characters(), "x" * 40, 4, 10)) == 4


def test_the_manual_comes_in_two_halves_that_share_nothing():
    first, second = calibration.topics()
    assert abs(len(first) - len(second)) < 0.05 * len(first) and len(first) > 100_000
    assert not set(first.split("\n\n")) & set(second.split("\n\n"))


def test_the_sources_are_equally_many_tokens_of_four_kinds():
    found = calibration.sources(Characters(), 500, count=3, length=100)
    assert list(found) == ["prose", "code", "random tokens", "one sentence repeated"]
    assert all(each.shape == (3, 100) and each.dtype == torch.int64 for each in found.values())
    assert found["random tokens"].max() < 500 and len(found["random tokens"].unique()) > 150
    said = "".join(map(chr, found["one sentence repeated"].flatten().tolist()))
    assert said == (calibration.SENTENCE * 10)[:300]
    assert "def " in "".join(map(chr, calibration.sources(Characters(), 500, 16, 512)["code"].flatten().tolist()))


# ---- layer by layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_an_unchanged_network_sees_what_it_sees_in_whole_passes(shape):
    network = ours(transformers_model(shape), torch.float64)
    windows = random_windows(5, 30)
    expected, found = seen_in_whole_passes(network, windows), []
    calibration.layer_by_layer(network, windows, lambda index, moments: found.append((index, moments)), "reading")
    assert [index for index, _ in found] == [0, 1, 2]
    for index, moments in found:
        assert set(moments) == {names[0] for names in calibration.INPUTS}
        for names in calibration.INPUTS:
            for name in names:  # products that stand together read the same
                theirs = expected[f"layers.{index}.{name}"].float()
                torch.testing.assert_close(moments[names[0]], theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_many_windows_are_read_some_at_a_time(monkeypatch):
    network, windows = tiny_model(), random_windows(7, 20)
    runs = []
    for at_once in (10**6, 45, 1):  # all, two at a time, one at a time
        monkeypatch.setattr(calibration, "_AT_ONCE", at_once)
        found = {}
        calibration.layer_by_layer(network, windows, found.__setitem__, "reading")
        runs.append(found)
    for other in runs[1:]:
        for index, name in ((0, "self_attn.q_proj"), (2, "mlp.down_proj")):
            torch.testing.assert_close(other[index][name], runs[0][index][name], rtol=1e-4, atol=1e-3)


def test_a_layer_reads_what_the_changed_layers_before_it_make():
    network, windows = tiny_model(), random_windows(4, 30)
    found = []

    def change(index, moments):
        found.append(moments)
        network.layers[index].mlp.down_proj.weight.data *= 0.5

    calibration.layer_by_layer(network, windows, change, "halving")
    expected = seen_in_whole_passes(network, windows)  # the last layer's own change comes after its inputs
    for index, moments in enumerate(found):
        theirs = expected[f"layers.{index}.self_attn.q_proj"].float()
        torch.testing.assert_close(moments["self_attn.q_proj"], theirs, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(
        found[1]["self_attn.q_proj"],
        seen_in_whole_passes(tiny_model(), windows)["layers.1.self_attn.q_proj"].float(),
        rtol=0.05,
    )


def test_nothing_of_the_network_changes_and_no_hook_stays():
    network, windows = tiny_model(), random_windows(4, 30)
    before = {name: value.clone() for name, value in network.state_dict().items()}

    def fail(index, moments):
        raise KeyboardInterrupt

    calibration.layer_by_layer(network, windows, lambda index, moments: None, "reading")
    with pytest.raises(KeyboardInterrupt):
        calibration.layer_by_layer(network, windows, fail, "reading")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(part._forward_pre_hooks for part in network.modules())


def test_no_more_than_one_copy_of_the_hidden_states_is_kept(monkeypatch):
    """The states before a layer are overwritten by those after it, a few windows at a time."""
    network, windows = tiny_model(), random_windows(6, 20)
    monkeypatch.setattr(calibration, "_AT_ONCE", 20)
    places = []
    real = calibration._passes
    monkeypatch.setattr(
        calibration, "_passes", lambda net, layer, states: places.append(states.data_ptr()) or real(net, layer, states)
    )
    calibration.layer_by_layer(network, windows, lambda index, moments: None, "reading")
    assert len(places) == 5 and len(set(places)) == 1


# ---- what cannot be calibrated on --------------------------------------------------------------------------------


def test_too_few_tokens_for_the_network_get_a_sentence():
    with pytest.raises(RequestError, match=r"79 tokens to calibrate on are too few: .* 40 numbers .* fewer than 80"):
        calibration.check(tiny_model(), random_windows(1, 79))
    calibration.check(tiny_model(), random_windows(1, 80))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (torch.zeros(4, 40), "are torch.float32 .4, 40.; give token ids, int64"),
        (torch.zeros(160, dtype=torch.int64), r"int64 .160.; give token ids, int64 .count, length"),
        (torch.zeros(0, 40, dtype=torch.int64), "give token ids"),
        (torch.full((4, 40), VOCAB), f"not below {VOCAB}"),
        (torch.full((4, 40), -1), f"not below {VOCAB}"),
        (torch.zeros(4, 97, dtype=torch.int64), "windows of 97 tokens are longer than the context, 96"),
    ],
)
def test_windows_that_are_none_get_a_sentence(windows, message):
    with pytest.raises(RequestError, match=message):
        calibration.check(tiny_model(), windows)


def test_inputs_that_are_no_numbers_are_named():
    network = tiny_model()
    network.layers[1].input_layernorm.weight.data[3] = 1e300
    with pytest.raises(RequestError, match=r"layers\.1\.self_attn\.q_proj reads NaN or infinity"):
        calibration.layer_by_layer(network, random_windows(4, 30), lambda index, moments: None, "reading")
