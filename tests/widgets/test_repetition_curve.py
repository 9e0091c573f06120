"""The repetition curve: its counts against sets of passages, its texts against the engine, wrong penalties named."""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import kv_cache, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.widgets import draw_repetition, repetition_curve
from llmfromscratch.widgets.repetition_curve import PROMPTS, describe_repetition, flow
from llmfromscratch.widgets.repetition_run import Continuation, continue_texts, covered, repeats, shares
from llmfromscratch.widgets.token_reading import byte_tokenizer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(model=tiny_model(vocab_size=256, eos_token_id=[255]), tokenizer=byte_tokenizer())


def params(**changes):
    return sampling.SamplingParams(max_tokens=20, **changes)


def text_of(letters, **changes):
    """An answer in which every letter is a token."""
    return Continuation(params(**changes), tuple(map(ord, letters)), tuple(letters.replace(" ", "␣")), False)


def slow_repeats(ids, length):
    """By the definition: the passage that ends here begins earlier, too."""
    found = []
    for end in range(1, len(ids) + 1):
        start = end - length
        found.append(start >= 0 and any(ids[other : other + length] == ids[start:end] for other in range(start)))
    return found


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6))
def test_repeats_are_the_passages_that_were_there_before(ids, length):
    found = repeats(ids, length)
    assert found == slow_repeats(ids, length)
    passages = [tuple(ids[start : start + length]) for start in range(len(ids) - length + 1)]
    assert sum(found) == len(passages) - len(set(passages))


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9))
def test_shares_are_means_of_the_last_tokens(repeated, window):
    expected = [np.mean(repeated[max(0, end - window) : end]) for end in range(1, len(repeated) + 1)]
    assert shares(repeated, window) == pytest.approx(expected)


def test_all_tokens_of_a_repeated_passage_are_covered():
    assert covered(repeats("abcdxabcy", 3), 3) == [False] * 5 + [True] * 3 + [False]
    assert covered(repeats("abababa", 2), 2) == [False, False] + [True] * 5


def greedy(llm, prompt, count, repetition=1.0, presence=0.0, frequency=0.0):
    """Recomputed from the start for every token, with the penalties written out one token at a time."""
    ids, answer = llm.tokenizer.encode(prompt), []
    for _ in range(count):
        cache = kv_cache.ConcatKVCache(llm.model.config.num_layers)
        logits = llm.model(Batch.of([(0, ids + answer, 0)]), cache)[-1].clone()
        for token in set(ids + answer):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(answer):
            logits[token] -= presence + frequency * answer.count(token)
        token = int(logits.argmax())
        if token == 255:
            break
        answer.append(token)
    return tuple(answer)


@pytest.mark.parametrize(
    ("changes", "penalties"),
    [
        ({"repetition_penalty": 1.5}, {"repetition": 1.5}),
        ({"presence_penalty": 1.0}, {"presence": 1.0}),
        ({"frequency_penalty": 2.0}, {"frequency": 2.0}),
    ],
)
@pytest.mark.parametrize("own", [None, sampling.apply_penalties])
def test_the_texts_are_greedy_ones_with_and_without_the_penalty(llm, changes, penalties, own):
    plain, penalized = continue_texts(llm, "the sea", [params(), params(**changes)], own)
    assert plain.token_ids == greedy(llm, "the sea", 20)
    assert penalized.token_ids == greedy(llm, "the sea", 20, **penalties)
    assert plain.token_ids != penalized.token_ids
    assert plain.problems == penalized.problems == ()


def test_an_end_token_ends_the_text(llm):
    first = greedy(llm, "the sea", 3)[2]
    config = SimpleNamespace(num_layers=llm.model.config.num_layers, eos_token_ids=(first,))
    ends = SimpleNamespace(model=_With(llm.model, config), tokenizer=llm.tokenizer)
    found = continue_texts(ends, "the sea", [params()])[0]
    assert found.ended and first not in found.token_ids and len(found.token_ids) <= 2
    assert describe_repetition("x", found, found).count("(the model ends it)") == 2


class _With:
    """The model with another config."""

    def __init__(self, model, config):
        self.model, self.config = model, config

    def __call__(self, *arguments):
        return self.model(*arguments)


def test_the_text_counts_and_says_where_the_texts_part():
    one, other = text_of("abcabcabc"), text_of("abcabxyzw", presence_penalty=0.5)
    assert describe_repetition("go", one, other, 3).splitlines() == [
        "Greedy decoding after “go”",
        "no penalty: 4 of 9 tokens end a passage of 3 that was there before; presence_penalty 0.5: 0 of 9",
        "They part at token 6: 'c' becomes 'x'",
        "no penalty: 'abcabcabc'",
        "presence_penalty 0.5: 'abcabxyzw'",
    ]
    assert "no penalty: 6 of 9 tokens were there before; " in describe_repetition("go", one, other, 1)
    assert "Both texts are the same" in describe_repetition("go", one, one)
    assert "One text is the beginning of the other" in describe_repetition("go", one, text_of("abc"))


def test_the_curve_and_the_ticks_are_those_of_the_repeats():
    one, other = text_of("abcabcabc"), text_of("abcabxyzw", presence_penalty=0.5)
    curve, rug, *texts = draw_repetition("go", one, other, 3).axes
    for line, text in zip(curve.lines, (one, other), strict=True):
        np.testing.assert_allclose(line.get_ydata(), [100 * share for share in shares(repeats(text.token_ids, 3))])
        assert list(line.get_xdata()) == list(range(1, 10))
    assert curve.lines[0].get_color() != curve.lines[1].get_color()
    assert curve.lines[0].get_linestyle() != curve.lines[1].get_linestyle()
    ticks = [[segment[0][0] for segment in each.get_segments()] for each in rug.collections]
    assert ticks == [[6, 7, 8, 9], []]
    assert len(texts[0].patches) == 6 and not texts[1].patches  # a mark behind each letter of abcabc


def test_the_names_of_the_curves_lie_inside_the_picture():
    for changes in ({"frequency_penalty": 0.3}, {"repetition_penalty": 1.9, "presence_penalty": 1.5}):
        figure = draw_repetition("go", text_of("abcabc"), text_of("abcabx", **changes), 3)
        figure.draw_without_rendering()
        curve = figure.axes[0]
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in curve.texts)
    assert curve.texts[1].get_text() == "2 penalties"


def test_lines_are_broken_before_words_and_white_space_is_shown():
    labels = ["␣one", "␣t", "wo", "↵", "three"]
    (line,) = flow(labels, 5.0)
    assert [shown for _, _, shown in line] == ["one", "t", "wo", "↵", "three"]
    assert line[0][1] == 0 and all(a[1] < b[1] for a, b in pairwise(line))
    lines = flow(labels, 0.45)
    assert [[shown for _, _, shown in line] for line in lines] == [["one"], ["t", "wo", "↵"], ["three"]]
    assert [number for line in lines for number, _, _ in line] == [0, 1, 2, 3, 4]
    assert [[number for number, _, _ in line] for line in flow(["abc", "def", "ghi"], 0.3)] == [[0], [1], [2]]


def test_every_control_changes_the_picture(llm):
    view = repetition_curve(llm, ("the sea", "a dog"), tokens=12, repetition_penalty=1.5, length=1)
    pictures = [
        view.png(),
        view.set(repetition_penalty=1.0).png(),
        view.set(frequency_penalty=2.0).png(),
        view.set(presence_penalty=1.0).png(),
    ]
    pictures += [view.set(length=2).png(), view.set(prompt="a dog").png()]
    assert len(set(pictures)) == 6


def test_a_text_is_generated_once_for_each_setting(llm, monkeypatch):
    calls = []

    def counting(batch, cache):
        calls.append(len(batch.spans))
        return llm.model(batch, cache)

    counted = SimpleNamespace(model=_With(counting, llm.model.config), tokenizer=llm.tokenizer)
    view = repetition_curve(counted, ("the sea",), tokens=5)
    view.png(), view.text()
    assert calls == [2] * 5  # both texts together
    view.set(repetition_penalty=1.7).png()
    assert calls == [2] * 5 + [1] * 5
    view.set(repetition_penalty=1.2).set(length=7).png()
    view.set(repetition_penalty=1.0).png()
    assert len(calls) == 10


def test_the_controls_read_as_the_penalties_are_called_and_said(llm):
    view = repetition_curve(llm, ("the sea",), tokens=8)
    assert view.state["repetition_penalty"] == 1.2 and "repetition_penalty 1.2: 0 of 8" in view.text()
    view.set(repetition_penalty=1.0)
    assert "Both texts are the same" in view.text()
    view.set(presence_penalty=0.5, frequency_penalty=0.25)
    assert "presence_penalty 0.5 and frequency_penalty 0.25: " in view.text()
    with pytest.raises(ValueError, match="repetition_penalty cannot be 0.2; expected a number from 1.0 to 2.0"):
        view.set(repetition_penalty=0.2)


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        (
            lambda lo, s, c, r, p, f: lo + p.unsqueeze(-1) * (c > 0),
            "presence_penalty",
            r"Token 2: presence_penalty 0.5 moves the logit of '.*', which stands in the text, .*: it becomes likelier",
        ),
        (
            lambda lo, s, c, r, p, f: lo - f.unsqueeze(-1) * (c > 0),
            "frequency_penalty",
            r"Token \d+: frequency_penalty 0.5 moves the logit of '.*', which stands in the text, from .* was expected",
        ),
        (
            lambda lo, s, c, r, p, f: torch.where(s, lo / r.unsqueeze(-1), lo),
            "repetition_penalty",
            r"Token 1: repetition_penalty 1.5 moves the logit of '.*', which stands in the text, .*: it becomes",
        ),
    ],
)
def test_a_wrong_penalty_is_named_whether_given_or_built(llm, monkeypatch, wrong, kind, said):
    strengths = {"repetition_penalty": 1.0, kind: 1.5 if kind == "repetition_penalty" else 0.5}
    given = repetition_curve(llm, ("the sea ",), tokens=40, **strengths, apply_penalties=wrong)
    assert re.search(said, given.text())
    assert given.png()
    assert not re.search(said, repetition_curve(llm, ("the sea ",), **strengths).text())
    monkeypatch.setattr(sampling, "apply_penalties", wrong)
    built = repetition_curve(llm, ("the sea ",), tokens=40, **strengths)
    assert re.search(said, built.text())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda *settings: settings[0][0], r"apply_penalties returned \[256\]; logits \[rows, vocab\] = \[1, 256\]"),
        (lambda *settings: None, "apply_penalties returned None; logits"),
    ],
)
def test_wrong_shapes_are_said_in_a_sentence(llm, wrong, said):
    with pytest.raises(ValueError, match=said):
        continue_texts(llm, "x", [params(presence_penalty=1.0)], wrong)


def test_what_is_not_yet_written_and_an_empty_prompt_are_said(llm):
    def apply_penalties(*settings):
        raise NotImplementedError

    text = repetition_curve(llm, ("x",), apply_penalties=apply_penalties).text()
    assert text == "apply_penalties is not yet written; this figure is drawn with it."
    assert "There is nothing to continue" in repetition_curve(llm, ("",)).text()


def test_odd_tokens_and_very_short_texts_are_drawn():
    odd = Continuation(params(), (1, 2, 3), ("$x_1$\\frac", "<E4 BD>", "🚀⇥你"), True)
    assert draw_repetition("\n$", odd, Continuation(params(), (), (), True))
    assert "no penalty: '$x_1$" in describe_repetition("x", odd, text_of("a"))


def test_long_texts_are_cut_and_that_is_said():
    long = text_of("many words " * 100)
    figure = draw_repetition("x", long, text_of("a"))
    notes = [text.get_text() for text in figure.axes[2].texts if "more tokens" in text.get_text()]
    drawn = len(figure.axes[2].texts) - 2
    assert notes == [f"… and {1100 - drawn:,} more tokens"]


@pytest.mark.model
def test_the_real_model_loops_and_a_penalty_breaks_the_loop(smollm2_fp32):

    long = sampling.SamplingParams(max_tokens=48)
    plain, penalized = continue_texts(
        smollm2_fp32, PROMPTS[0], [long, sampling.SamplingParams(max_tokens=48, repetition_penalty=1.3)]
    )
    assert plain.token_ids == tuple(smollm2_fp32.generate(PROMPTS[0], long)[0].token_ids)
    assert sum(repeats(plain.token_ids, 4)) > 20 > 5 > sum(repeats(penalized.token_ids, 4))
