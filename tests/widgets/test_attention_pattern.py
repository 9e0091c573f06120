"""The attention pattern: its weights against transformers, its numbers against sums, wrong masks and softmaxes seen."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from llmfromscratch import attention, kv_cache
from llmfromscratch.widgets.attention_pattern import (
    attention_pattern,
    describe_attention_pattern,
    draw_attention_pattern,
    entropy,
)
from llmfromscratch.widgets.attention_trace import MOST_TOKENS, Pattern, record_attention, token_labels
from llmfromscratch.widgets.style import ALARM
from llmfromscratch.widgets.token_reading import byte_tokenizer
from tests.tiny_models import ours, random_ids, tiny_model, transformers_model

pytestmark = pytest.mark.filterwarnings("error")
IDS = random_ids(9, seed=3)


@pytest.fixture(scope="module")
def network():
    return tiny_model(vocab_size=259)


@pytest.fixture(scope="module")
def llm(network):
    return SimpleNamespace(model=network, tokenizer=byte_tokenizer())


def top_left(start, new, device="cpu"):
    """The mask of `is_causal`, which forgets that a cache stands before the new tokens."""
    return torch.ones(new, start + new, dtype=torch.bool, device=device).tril()


def all_seeing(start, new, device="cpu"):
    return torch.ones(new, start + new, dtype=torch.bool, device=device)


def softmax_over_queries(queries, keys, values, visible):
    output, weights = attention.grouped_attention(queries, keys, values, visible)
    return output, weights / weights.sum(-2, keepdim=True)


def outlines(figure):
    return [patch for axes in figure.axes for patch in axes.patches if to_hex(patch.get_edgecolor()) == ALARM.lower()]


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_weights_are_those_of_transformers_in_every_layer_and_head():
    oracle = transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon", attn_implementation="eager")
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS]), output_attentions=True).attentions
    pattern = record_attention(ours(oracle), IDS)
    assert pattern.weights.shape == (3, 9, 9, 9)
    torch.testing.assert_close(pattern.weights, torch.cat(expected).double(), atol=1e-5, rtol=1e-4)
    assert pattern.passes == (4, 4, 1)
    assert pattern.visible.equal(torch.ones(9, 9).tril().bool())


def test_the_text_says_where_the_decode_step_looks(network):
    pattern = record_attention(network, IDS)
    weights = pattern.weights[2, 5, 8].numpy()
    order = np.argsort(-weights)[:3]
    bits = -sum(float(w) * math.log2(w) for w in weights)
    lines = describe_attention_pattern(pattern, 2, 5).splitlines()
    assert lines[0] == "Layer 2, head 5: 9 tokens, in passes of 4 + 4 + 1"
    top = ", ".join(f"{key + 1} '{IDS[key]}' {weights[key]:.3f}" for key in order)
    assert lines[1] == f"Query 9, the decode step, '{IDS[8]}' looks most at {top}"
    assert lines[2] == (
        f"On the first token: {weights[0]:.3f}; "
        f"entropy {bits:.2f} of at most {math.log2(9):.2f} bits (9 tokens visible)"
    )
    assert lines[3] == "No query sees a later token, and all weights add up to 1."


def test_entropy_is_zero_for_one_token_and_the_logarithm_for_an_even_share():
    assert entropy(torch.tensor([0.0, 1.0, 0.0])) == 0
    assert entropy(torch.full((8,), 1 / 8)) == pytest.approx(3)
    assert entropy(torch.tensor([0.5, 0.25, 0.25])) == pytest.approx(1.5)


def test_the_bars_are_the_weights_of_the_chosen_query(network):
    pattern = record_attention(network, IDS)
    for back in (0, 3, 8):
        bars = draw_attention_pattern(pattern, 1, 4, back).axes[0].patches
        heights = torch.tensor([bar.get_height() for bar in bars], dtype=torch.float64)
        torch.testing.assert_close(heights, pattern.weights[1, 4, 8 - back])


def test_hidden_cells_are_not_drawn_as_zero(network):
    axes = draw_attention_pattern(record_attention(network, IDS)).axes[1]
    drawn = np.ma.getmaskarray(np.ma.masked_invalid(axes.images[0].get_array()))
    assert (drawn == ~np.tril(np.ones((9, 9), dtype=bool))).all()
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert sum(patch.get_width() for patch in hatched) == 9 * 8 / 2


def test_every_control_changes_the_picture(llm):
    view = attention_pattern(llm, "some text")
    pictures = [view.png()]
    pictures += [view.set(layer=2).png(), view.set(head=7).png(), view.set(back=4).png(), view.set(text="others").png()]
    assert len(set(pictures)) == 5


def test_the_newest_query_is_the_decode_step_and_others_are_counted_back_from_it(llm):
    view = attention_pattern(llm, "abcdefgh")
    assert "Query 8, the decode step, 'h' looks most at" in view.text()
    assert "Query 6 'f' looks most at" in view.set(back=2).text()
    assert "Query 1 'a' looks most at 1 'a' 1.000" in view.set(back=31).text()


def test_a_pair_of_model_and_ids_has_no_text_to_change(network):
    view = attention_pattern((network, IDS))
    assert f"Query 9, the decode step, '{IDS[8]}'" in view.text()
    with pytest.raises(ValueError, match="no control 'text'; it has layer, head, back"):
        view.set(text="x")
    with pytest.raises(ValueError, match="a whole number from 0 to 8"):
        view.set(back=9)


def test_a_long_text_is_cut_and_that_is_said(llm):
    view = attention_pattern(llm, "x" * (MOST_TOKENS + 8))
    assert view.text().startswith("Layer 0, head 0: 32 tokens, in passes of 16 + 15 + 1; 8 more tokens left out")


@pytest.mark.parametrize(("text", "passes"), [("a", "1 token, in passes of 1"), ("ab", "2 tokens, in passes of 1 + 1")])
def test_very_short_texts_are_drawn(llm, text, passes):
    view = attention_pattern(llm, text)
    assert passes in view.text()
    assert view.png()


def test_an_empty_text_is_a_sentence(llm):
    assert "There is no token to draw; give a text" in attention_pattern(llm, "").text()


def test_labels_are_safe_for_any_token():
    labels = token_labels(byte_tokenizer(), [32, 10, 36, 0xE4, 95])
    assert labels == ["␣", "↵", "$", "<E4>", "_"]


def test_any_text_is_drawn_without_a_warning(llm):
    for text in ("你好 👩\u200d🚀 $x_1$ \\frac", "\x00\t\r\n  ", "ďábel cafe\u0301 مرحبا"):
        view = attention_pattern(llm, text)
        assert view.png()
        assert "cannot be drawn" not in view.text()


def test_a_mask_that_forgets_the_cached_tokens_is_seen_and_named(llm, network):
    text = attention_pattern(llm, "abcdefgh", causal_mask=top_left).text()
    # passes of 4 + 3 + 1: 4 keys too few for each of three queries, 7 for the last one
    assert "Query 5 does not see token 2 (18 more cells like this)." in text
    assert "Query 8, the decode step, 'h' looks most at 1 'a' 1.000\n" in text
    assert "(1 token visible)" in text
    figure = draw_attention_pattern(record_attention(network, IDS[:8], mask=top_left))
    assert len([one for one in outlines(figure) if one.get_width() == 1]) == 19
    assert "against the rule" in [text.get_text() for text in figure.axes[2].get_legend().get_texts()]


def test_a_mask_that_lets_tokens_look_ahead_is_seen_and_named(llm):
    view = attention_pattern(llm, "abcdefgh", causal_mask=all_seeing)
    assert "Query 1 sees token 2, which comes after it (8 more cells like this)." in view.text()
    assert view.png() != attention_pattern(llm, "abcdefgh").png()


def test_an_attention_that_ignores_the_mask_is_named(network):
    pattern = record_attention(
        network, IDS, attend=lambda q, k, v, visible: attention.grouped_attention(q, k, v, torch.ones_like(visible))
    )
    # within each of the passes of 4 tokens, 3 + 2 + 1 keys lie ahead
    assert pattern.problems(0, 0) == [
        "Query 1 gives weight to token 2, which the mask hides from it (11 more cells like this)."
    ]


def test_weights_that_do_not_add_up_to_one_are_named(network):
    pattern = record_attention(network, IDS, attend=softmax_over_queries)
    total = float(pattern.weights[0, 0, 0].sum())
    assert pattern.problems(0, 0)[-1] == (f"The weights of query 1 add up to {total:.3g}; those of a query make 1.")


def test_weights_that_are_not_numbers_are_drawn_and_named(network):
    weights = torch.full((1, 1, 3, 3), float("nan"), dtype=torch.float64)
    pattern = Pattern(("a", "b", "c"), weights, torch.ones(3, 3).tril().bool(), (1, 1, 1))
    assert draw_attention_pattern(pattern)
    assert "The weights of query 1 add up to nan" in describe_attention_pattern(pattern)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"causal_mask": lambda start, new, device: torch.ones(start + new, new).bool()},
         "causal_mask(4, 3) is torch.bool [7, 3]; a torch.bool mask [3, 7] was expected, a row for each new token"),
        ({"causal_mask": lambda start, new, device: torch.ones(new, start + new)},
         "causal_mask(0, 4) is torch.float32"),
        ({"grouped_attention": lambda q, k, v, visible: (q, torch.ones(1, *visible.shape))},
         "grouped_attention returned weights [1, 4, 4]; [heads, new, context] = [9, 4, 4] was expected"),
    ],
)  # fmt: skip
def test_wrong_shapes_are_said_in_a_sentence(llm, parts, said):
    text = attention_pattern(llm, "abcdefgh", **parts).text()
    assert said in text


def test_what_is_not_yet_written_is_said(llm):
    def causal_mask(start, new, device):
        raise NotImplementedError

    text = attention_pattern(llm, "abcd", causal_mask=causal_mask).text()
    assert text == "causal_mask is not yet written; this figure is drawn with it."


def test_without_parts_the_modules_of_the_engine_are_drawn(llm, monkeypatch):
    monkeypatch.setattr(attention, "causal_mask", top_left)
    assert "Query 5 does not see token 2" in attention_pattern(llm, "abcdefgh").text()
    monkeypatch.undo()
    assert "does not see" not in attention_pattern(llm, "abcdefgh").text()


def test_a_cache_that_keeps_wrong_keys_changes_the_pattern(llm):
    class Zeros(kv_cache.ConcatKVCache):
        def read(self, layer, request_id):
            keys, values = super().read(layer, request_id)
            return torch.zeros_like(keys), values

    text = attention_pattern(llm, "abcdefgh", cache=Zeros).text()
    assert re.search(r"entropy 3.00 of at most 3.00 bits", text)  # all keys alike: an even share for each


def test_a_model_that_does_not_ask_its_cache_is_told(llm, monkeypatch):
    from llmfromscratch import model

    def forward(self, x, cos, sin, batch, cache):
        return x

    monkeypatch.setattr(model.Attention, "forward", forward)
    assert "The model does not ask its cache for `attend`" in attention_pattern(llm, "abcd").text()


@pytest.mark.model
def test_the_real_model_puts_much_weight_on_the_first_token(smollm2_fp32):
    view = attention_pattern(smollm2_fp32)
    sinks = [float(re.search(r"first token: ([\d.]+)", view.set(layer=layer, head=head).text())[1])
             for layer in range(10, 30, 3) for head in range(9)]  # fmt: skip
    assert sum(sinks) / len(sinks) > 5 / 21  # five times an even share of the 21 tokens
