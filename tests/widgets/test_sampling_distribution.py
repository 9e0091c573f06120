"""The sampling distribution: its numbers against transformers and sums of our own, and wrong filters seen and named."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.path import Path
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmfromscratch import sampling
from llmfromscratch.widgets import draw_sampling_distribution, sampling_distribution
from llmfromscratch.widgets.sampling_distribution import ROWS, describe_sampling_distribution, shown_places
from llmfromscratch.widgets.sampling_stages import (
    Prompt,
    choose_parts,
    entropy_of,
    gained_and_lost,
    read_prompt,
    run_stages,
)
from llmfromscratch.widgets.token_reading import byte_tokenizer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("error")
PROMPTS = ("the cat", "a dog\n")


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(model=tiny_model(vocab_size=259), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def prompt(llm):
    return read_prompt(llm, "the cat")


def by_hand(probabilities, ids=()) -> Prompt:
    """A prompt with this distribution for its next token; tokens are called a, b, c, ..."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float()
    return Prompt("x", tuple(ids), logits, lambda index: "abcdefghijklmnopqrstuvwxyz"[index])


def params(**changes):
    return sampling.SamplingParams(**{"temperature": 1.0} | changes)


def stages_of(prompt, module=None, parts=None, **changes):
    return run_stages(prompt, params(**changes), parts, module)


def by_id(stages):
    found = torch.zeros_like(stages.final)
    found[stages.ids] = stages.final
    return found


def bars(figure):
    """Heights of the bars: {row: [widths]}, and the hatch of each."""
    found: dict[int, list] = {}
    for patch in figure.axes[0].patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        found.setdefault(row, []).append((patch.get_width(), patch.get_hatch(), patch.get_linestyle()))
    return found


def words(figure):
    return [text.get_text() for text in (*figure.texts, *(one for axes in figure.axes for one in axes.texts))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
)
def test_what_is_drawn_from_is_what_transformers_draws_from(prompt, changes):
    one = params(**changes)
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(one.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(one.temperature))
    chain.append(TopKLogitsWarper(one.top_k or 259))
    chain.extend([TopPLogitsWarper(one.top_p), MinPLogitsWarper(one.min_p)])
    expected = chain(torch.tensor([prompt.token_ids]), prompt.logits[None].clone()).softmax(-1)[0].double()
    own = {"keep_top_k": sampling.keep_top_k}  # with a part, the stages are joined by the figure itself
    for parts in (None, own):
        stages = run_stages(prompt, one, parts)
        torch.testing.assert_close(by_id(stages), expected, atol=1e-6, rtol=1e-4)
        assert stages.problems == ()


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=2, max_size=26, unique=True),
    top_k=st.integers(0, 8),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.2, 3.0),
)
def test_the_filters_keep_what_their_definitions_say(weights, top_k, top_p, min_p, temperature):
    stages = stages_of(by_hand(weights), top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    probabilities = np.sort((np.array(weights) / sum(weights)) ** (1 / temperature))[::-1]
    left = (probabilities / probabilities.sum())[: top_k or None]
    left = left / left.sum()
    left = left[: 1 + int((np.cumsum(left) < top_p - 1e-5).sum())]
    count = int((left >= (min_p - 1e-5) * left[0]).sum())
    assert abs(int(stages.kept.sum()) - count) <= 1  # where rounding decides, one token more or less
    assert stages.problems == ()
    assert float(stages.final.sum()) == pytest.approx(1)


def test_the_text_states_setting_counts_and_entropy():
    stages = stages_of(by_hand([0.4, 0.3, 0.2, 0.06, 0.04], ids=[1]), top_k=4, top_p=0.6, temperature=1.0)
    entropy = -sum(p * math.log2(p) for p in (4 / 7, 3 / 7))
    alone = -sum(p * math.log2(p) for p in (0.4, 0.3, 0.2, 0.06, 0.04))
    assert describe_sampling_distribution(stages).splitlines() == [
        "The token after “x”",
        "Temperature 1, top-k 4, top-p 0.6: 2 of 5 tokens kept",
        f"Entropy {entropy:.2f} bits; of the model's own distribution {alone:.2f} bits",
        "Cut: 1 token by top-k (0.040 of the probability), 2 by top-p (0.271)",
        "Most probable: 'a' 0.571, 'b' 0.429",
    ]


def test_entropy_is_zero_for_one_token_and_the_logarithm_for_an_even_share():
    assert entropy_of(torch.tensor([1.0, 0.0])) == 0
    assert entropy_of(torch.full((8,), 1 / 8)) == pytest.approx(3)


def test_kept_bars_are_solid_and_cut_ones_hatched_and_named():
    stages = stages_of(by_hand([0.4, 0.3, 0.2, 0.06, 0.04]), top_k=4, top_p=0.6)
    figure = draw_sampling_distribution(stages)
    drawn = bars(figure)
    assert [width for width, _, _ in drawn[0]] == pytest.approx([4 / 7, 0.4], rel=1e-4)  # with its share, and before
    assert all(hatch is None for _, hatch, _ in drawn[0] + drawn[1])
    assert drawn[2][0][0] == pytest.approx(0.2, rel=1e-4)
    assert drawn[2][0][1] == "\\\\\\\\" and drawn[4][0][1] == "////"
    assert {"0.571", "0.200, cut by top-p", "0.040, cut by top-k"} <= set(words(figure))


def test_the_running_sum_is_that_of_what_top_p_is_given():
    figure = draw_sampling_distribution(stages_of(by_hand([0.4, 0.3, 0.2, 0.1]), top_k=3, top_p=0.6))
    axes = figure.axes[1]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [4 / 9, 7 / 9, 1, 1], rtol=1e-5)
    assert axes.lines[1].get_ydata()[0] == 0.6
    assert "what top-k left" in axes.get_ylabel()
    filled = axes.collections[0].get_paths()[0].vertices
    assert filled[:, 0].max() == pytest.approx(3)  # the first two ranks, each from its place to the next


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0, 2.5])
@pytest.mark.parametrize("width", [1.0, 2.5, 4.0])
def test_the_name_of_the_line_of_top_p_stands_clear_of_the_running_sum(top_p, temperature, width):
    logits = width * torch.randn(49152, generator=torch.Generator().manual_seed(2))
    stages = stages_of(Prompt("x", (), logits, str), temperature=temperature, top_p=top_p)
    figure = draw_sampling_distribution(stages)
    figure.draw_without_rendering()
    axes = figure.axes[1]
    (label,) = [text for text in axes.texts if text.get_text() == f"top-p {top_p:g}"]
    box = label.get_window_extent()
    (curve,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    ranks, sums = curve.get_data()
    corners = [(x, y) for x, y, before in zip(ranks[1:], sums[1:], sums, strict=False) for y in (before, y)]
    path = Path([(ranks[0], sums[0]), *corners])
    assert not path.transformed(axes.transData).intersects_bbox(box, filled=False)
    assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
    line = axes.transData.transform((1, top_p))[1]
    assert min(abs(box.y0 - line), abs(box.y1 - line)) < box.height  # it stands beside its own line, and not on it
    assert not box.y0 < line < box.y1


def test_every_control_changes_the_picture(llm):
    view = sampling_distribution(llm, prompts=PROMPTS)
    pictures = [view.png(), view.set(temperature=1.5).png(), view.set(top_k=5).png(), view.set(top_p=0.5).png()]
    pictures += [view.set(min_p=0.3, top_p=1.0).png(), view.set(repetition_penalty=1.5).png()]
    pictures += [view.set(prompt=PROMPTS[1]).png()]
    assert len(set(pictures)) == 7
    with pytest.raises(ValueError, match="top_k cannot be 4"):
        view.set(top_k=4)


def test_what_was_gained_and_lost_is_what_the_sets_say(prompt):
    before, now = stages_of(prompt, top_k=10), stages_of(prompt, top_k=4, repetition_penalty=2.0)
    gained, lost = gained_and_lost(now, before)
    old, new = ({index for index, share in enumerate(by_id(one)) if share > 0} for one in (before, now))
    assert set(gained) == new - old and set(lost) == old - new and lost


def test_the_last_setting_is_compared_and_drawn_as_an_outline():
    view = sampling_distribution(SimpleNamespace(), temperature=1.0)  # nothing is read before it is asked for
    assert "cannot be drawn" in view.text()
    five = by_hand([0.4, 0.3, 0.2, 0.06, 0.04])
    before, now = stages_of(five, top_p=0.95), stages_of(five, top_p=0.5)
    assert "Against the last setting: 2 tokens ('c', 'd') lost; entropy" in describe_sampling_distribution(now, before)
    assert "2 tokens ('c', 'd') gained" in describe_sampling_distribution(before, now)
    outlines = {row: found[-1] for row, found in bars(draw_sampling_distribution(now, before)).items()}
    assert outlines[2][0] == pytest.approx(0.2 / 0.96, rel=1e-4)
    assert outlines[2][2] == (0, (3, 2))
    assert "the same tokens are kept; entropy +0.00" in describe_sampling_distribution(now, now)


def test_the_form_compares_with_the_setting_before_and_not_across_prompts(llm):
    view = sampling_distribution(llm, prompts=PROMPTS)
    first = view.text()
    assert "Against" not in first
    changed = view.set(top_p=0.3).text()
    assert "Against the last setting: " in changed and " lost" in changed
    assert view.text() == changed  # asked again, it says the same
    assert view.set(top_p=0.9).text().replace(" lost", "").count("gained") == 1
    assert "Against" not in view.set(prompt=PROMPTS[1]).text()


def test_a_favourite_of_the_model_keeps_its_row_when_a_penalty_throws_it_far_back():
    numbers = [100.0, *range(60, 35, -1)]
    prompt = by_hand([number / sum(numbers) for number in numbers], ids=[0])
    prompt = Prompt("x", (0,), prompt.logits - prompt.logits.min() + 1, prompt.label)  # above 0: division lowers it
    stages = stages_of(prompt, repetition_penalty=3.0)
    assert int((stages.ids == 0).nonzero()) == 25
    assert shown_places(stages) == [*range(ROWS - 1), 25]
    figure = draw_sampling_distribution(stages)
    assert any(word.endswith(", rank 26") for word in words(figure))
    assert figure.axes[0].get_yticklabels()[ROWS - 1].get_text() == "↺ a"


# ---- learners' own -------------------------------------------------------------------------------------------------


def loses_the_crossing(ranked, top_p):
    return ranked.cumsum(-1) <= top_p.unsqueeze(-1)


def keeps_one_more(ranked, top_p):
    before = ranked.cumsum(-1) - ranked
    return torch.cat([torch.ones_like(before[:, :1], dtype=torch.bool), (before < top_p.unsqueeze(-1))[:, :-1]], -1)


def divides_all(logits, seen, counts, repetition, presence, frequency):
    return torch.where(seen, logits / repetition.unsqueeze(-1), logits)


FIVE = by_hand([0.4, 0.3, 0.2, 0.06, 0.04], ids=[1, 1, 4])  # its logits are negative


@pytest.mark.parametrize(
    ("parts", "changes", "said"),
    [
        (
            {"keep_top_p": loses_the_crossing},
            {"top_p": 0.6},
            "keep_top_p keeps 1 token with 0.400 together, less than top_p 0.6: the token that crosses it, 'b', is",
        ),
        ({"keep_top_p": keeps_one_more}, {"top_p": 0.6}, "keeps 3 tokens; the first 2 reach top_p 0.6 already."),
        (
            {"keep_top_p": lambda r, p: ~keeps_one_more(r, p)},
            {"top_p": 0.6},
            "keep_top_p cuts 'a' and keeps 'e', which is less probable.",
        ),
        (
            {"keep_top_k": lambda r, k: torch.arange(r.shape[-1]) <= k.unsqueeze(-1)},
            {"top_k": 2},
            "keep_top_k keeps 3 tokens; top_k is 2.",
        ),
        (
            {"keep_min_p": lambda r, p: r >= p.unsqueeze(-1)},
            {"min_p": 0.35},
            "keep_min_p cuts 'b' with 0.300; the limit is 0.35 x 0.400 = 0.140 (1 more like this).",
        ),
        (
            {"keep_min_p": lambda r, p: r >= 0},
            {"min_p": 0.4},
            "keep_min_p keeps 'd' with 0.060; the limit is 0.4 x 0.400 = 0.160 (1 more like this).",
        ),
        (
            {"apply_penalties": divides_all},
            {"repetition_penalty": 1.5},
            "repetition_penalty 1.5 moves the logit of 'e', which stands in the text, from -3.22 to -2.15: "
            "it becomes likelier (1 more like this).",
        ),
        (
            {"apply_penalties": lambda lo, s, c, r, p, f: lo * r.unsqueeze(-1)},
            {"repetition_penalty": 1.5},
            "moves the logit of 'd', which is not in the text, from -2.81 to -4.22; -2.81 was expected",
        ),
        (
            {"apply_temperature": lambda logits, temperatures: logits * temperatures.unsqueeze(-1)},
            {"temperature": 2.0},
            "At temperature 2 the token with the largest logit has a probability of 0.",
        ),
    ],
)
def test_a_wrong_part_is_named(parts, changes, said):
    stages = stages_of(FIVE, parts=parts, **changes)
    assert said in "\n".join(stages.problems)
    figure = draw_sampling_distribution(stages)
    assert any(word.startswith("! ") for word in words(figure))
    right = stages_of(FIVE, **changes)
    assert right.problems == () and not by_id(right).equal(by_id(stages))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"keep_top_p": lambda r, p: r}, r"keep_top_p returned torch.float64 \[1, 5\]; a torch.bool tensor"),
        ({"keep_top_p": lambda r, p: r[0] > 0}, r"keep_top_p returned torch.bool \[5\]; .* = \[1, 5\] was expected"),
        ({"keep_top_p": lambda r, p: [True]}, r"keep_top_p returned \[True\]; "),
        ({"keep_top_p": lambda r, p: r > 1}, "keep_top_p keeps no token at top_p 0.5: there is nothing to draw from"),
        ({"apply_temperature": lambda lo, t: lo * torch.inf}, "apply_temperature at 1 gives logits that have no"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(parts, said):
    with pytest.raises(ValueError, match=said):
        stages_of(FIVE, parts=parts, top_p=0.5)


def test_a_name_that_is_no_part_is_refused(llm):
    with pytest.raises(TypeError, match="'keep_topp' is no part of this figure; expected some of apply_penalties"):
        sampling_distribution(llm, keep_topp=loses_the_crossing)
    assert choose_parts({"keep_top_p": None}) == {}


def test_what_is_not_yet_written_is_said(llm):
    def keep_top_p(ranked, top_p):
        raise NotImplementedError

    text = sampling_distribution(llm, prompts=PROMPTS, keep_top_p=keep_top_p).text()
    assert text == "keep_top_p is not yet written; this figure is drawn with it."


def test_the_engines_own_functions_are_drawn_and_a_wrong_one_shows(llm, monkeypatch):
    right = sampling_distribution(llm, prompts=PROMPTS, top_p=0.5)
    assert "keep_top_p" not in right.text()
    monkeypatch.setattr(sampling, "keep_top_p", loses_the_crossing)
    wrong = sampling_distribution(llm, prompts=PROMPTS, top_p=0.5)
    assert "less than top_p 0.5: the token that crosses it" in wrong.text()
    assert wrong.png() != right.png()


def test_a_distribution_that_is_not_what_its_stages_give_is_named(monkeypatch):
    monkeypatch.setattr(sampling, "distribution", lambda logits, rows: logits.double().softmax(-1))
    stages = stages_of(FIVE, top_k=2)
    assert stages.problems == ("sampling.distribution gives 'c' 0.200; its stages one after the other give 0.000.",)
    assert int(stages.kept.sum()) == 5  # what the sampler draws from is drawn
    monkeypatch.setattr(sampling, "distribution", lambda logits, rows: 2 * logits.double().softmax(-1))
    assert "add up to 2.000, not to 1." in stages_of(FIVE, top_k=2).problems[0]


def test_another_module_can_be_drawn(llm):
    module = SimpleNamespace(**vars(sampling) | {"keep_top_p": loses_the_crossing})
    assert "less than top_p" in sampling_distribution(llm, module, PROMPTS, top_p=0.5).text()
    assert "less than top_p" not in sampling_distribution(llm, sampling, PROMPTS, top_p=0.5).text()


@pytest.mark.parametrize("text", ["$x_1$ \\frac", "你好 👩\u200d🚀", "\x00\t\r\n  ", "word " * 60])
def test_any_prompt_is_drawn_without_a_warning(llm, text):
    view = sampling_distribution(llm, prompts=(text,))
    assert view.png()
    assert "cannot be drawn" not in view.text()


def test_an_empty_prompt_is_a_sentence(llm):
    assert "There is nothing to continue; give a prompt" in sampling_distribution(llm, prompts=("",)).text()


def test_ids_beyond_the_tokenizer_have_their_number_as_a_name(prompt):
    assert prompt.label(258) == "[258]" and prompt.label(10) == "↵" and prompt.label(32) == "␣"


@pytest.mark.model
def test_top_p_cuts_the_tail_of_a_flat_distribution_and_leaves_little_of_a_sharp_one(smollm2_fp32):
    view = sampling_distribution(smollm2_fp32, top_p=0.5)
    kept = [
        int(view.set(prompt=text).text().split(": ")[1].split(" of ")[0].replace(",", ""))
        for text in ("My favourite animal is the", "The capital of France is")
    ]
    assert kept[0] > 10 and kept[1] == 1
