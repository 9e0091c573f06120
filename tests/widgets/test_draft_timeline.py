"""Drafts over a text: the run is the model's own greedy answer, the picture counts right, wrong lookups are seen."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from llmfromscratch import kv_cache, optimization
from llmfromscratch.course.sketches.ch06 import plain_answer
from llmfromscratch.widgets.draft_run import DraftRun, Pass, latest_place, record_drafts
from llmfromscratch.widgets.draft_timeline import (
    GIVEN,
    TEXTS,
    describe_draft_timeline,
    draft_timeline,
    draw_draft_timeline,
)
from llmfromscratch.widgets.style import PALE, SKY
from llmfromscratch.widgets.token_reading import byte_tokenizer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.filterwarnings("error")
COUNT = 24


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(model=tiny_model(vocab_size=259, max_position_embeddings=512), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def plain(llm):
    return plain_answer(llm.model, kv_cache.ConcatKVCache(3), list(b"a cat, a"), COUNT)


@pytest.fixture(scope="module")
def half_right(llm, plain):
    """Drafts the answer with a mistake at every fourth place."""

    def lookup_draft(ids, longest, count):
        done = len(ids) - 8
        right = plain[done : done + count]
        return [token ^ ((done + place) % 4 == 3) for place, token in enumerate(right)]

    return lookup_draft


def by_hand(*passes, problems=()):
    """A run with these passes of (drafts, tokens), each token a letter."""
    made = tuple(Pass(tuple(map(ord, drafts)), tuple(map(ord, tokens))) for drafts, tokens in passes)
    return DraftRun((65, 66), 3, 6, made, chr, problems)


def words(figure):
    return [text.get_text() for text in (*figure.texts, *(one for axes in figure.axes for one in axes.texts))]


def repeated(ids, longest, count):
    return optimization.lookup_draft(ids, longest, count)


def test_the_run_is_the_models_own_answer_whatever_is_drafted(llm, plain, half_right):
    ends = [place for place, token in enumerate(plain) if token in llm.model.config.eos_token_ids]
    assert not ends, "the tiny model ends its answer: take another prompt"
    for lookup, most in ((half_right, 6), (half_right, 2), (repeated, 6), (half_right, 0), (lambda *_: [7] * 6, 6)):
        run = record_drafts(llm, list(b"a cat, a"), lookup, 3, most, COUNT)
        assert run.tokens == plain
        assert all(each.stood == len(each.tokens) - 1 for each in run.passes)
        assert run.drafted == sum(len(each.drafts) for each in run.passes)
    assert len(record_drafts(llm, list(b"a cat, a"), half_right, 3, 6, COUNT).passes) == COUNT / 4
    assert len(record_drafts(llm, list(b"a cat, a"), half_right, 3, 0, COUNT).passes) == COUNT


def test_a_cache_that_knows_the_prompt_changes_nothing(llm, half_right):
    cache = kv_cache.ConcatKVCache(3)
    runs = [record_drafts(llm, list(b"a cat, a"), half_right, 3, most, COUNT, cache).tokens for most in (6, 1, 6)]
    assert runs[0] == runs[1] == runs[2]
    assert cache.length(0) == 8 + COUNT - 1


def test_the_run_ends_where_the_answer_ends(llm, plain, half_right):
    network = SimpleNamespace(config=SimpleNamespace(num_layers=3, vocab_size=259, eos_token_ids=(plain[9],)))
    model = type("Network", (), {"config": network.config, "__call__": lambda _, *given: llm.model(*given)})()
    run = record_drafts(SimpleNamespace(model=model, tokenizer=llm.tokenizer), list(b"a cat, a"), half_right, 3, 3, 24)
    first = plain.index(plain[9])
    assert first < len(run.tokens) <= first + 4 and run.tokens == plain[: len(run.tokens)]


@pytest.mark.parametrize("ids", [[5, 6, 7, 8, 5, 6], [1, 1, 1, 1], [1, 2, 3], [4], [2, 9, 2, 8, 2], [3, 4, 3, 4, 3]])
@pytest.mark.parametrize("longest", [1, 2, 3])
def test_the_definition_finds_what_the_packages_lookup_finds(ids, longest):
    length, place = latest_place(ids, longest)
    assert (ids[place : place + 2] if length else []) == optimization.lookup_draft(ids, longest, 2)


def test_the_text_counts_passes_drafts_and_rows():
    run = by_hand(("bxyz", "bc"), ("", "d"), ("ef", "efg"))
    assert describe_draft_timeline(run).splitlines() == [
        "6 tokens in 3 passes, 2.0 a pass: up to 6 drafts each, found by endings of up to 3 tokens",
        "3 of 6 drafts stood (50 %); 9 rows computed, 3 of them in vain",
        "The prompt ends: AB",
        "Answer: bcdefg",
        "Tokens of each pass: 2 1 3",
    ]


def test_what_stood_is_filled_and_what_fell_is_struck_out_beneath():
    figure = draw_draft_timeline(by_hand(("bxyz", "bc"), ("", "d"), ("ef", "efg")))
    text, bars = figure.axes
    filled = [patch for patch in text.patches if to_hex(patch.get_facecolor()) == SKY.lower()]
    places = {one.get_text(): one.get_position()[0] for one in text.texts if len(one.get_text()) == 1}
    assert len(filled) == 3
    for patch, token in zip(filled, "bef", strict=True):
        assert patch.get_x() < places[token] < patch.get_x() + patch.get_width()
    assert {"x", " +2"} <= set(words(figure)) and "y" not in words(figure)
    assert places["c"] - 0.2 < places["x"] <= places["c"]
    heights = [(round(bar.get_x() + 0.35), bar.get_height()) for bar in bars.patches if bar.get_height()]
    assert heights == [(1, 1), (1, 1), (1, -3), (2, 1), (3, 2), (3, 1)]
    fell = [bar for bar in bars.patches if bar.get_height() < 0]
    assert all(bar.get_hatch() == "////" and to_hex(bar.get_facecolor()) == PALE for bar in fell)


def test_every_control_changes_the_picture(llm, half_right):
    view = draft_timeline(llm, list(b"a cat, a"), repeated, tokens=8)
    mine = draft_timeline(llm, list(b"a cat, a"), half_right, tokens=8)
    assert mine.png() != view.png()
    pictures = [mine.png(), mine.set(most=1).png(), mine.set(most=0).png()]
    pictures.append(mine.set(most=6, longest=1).png())
    assert len(set(pictures)) == 4 and pictures[0].startswith(b"\x89PNG")
    assert mine.set(most=6, longest=3).png() == pictures[0] and mine.text() == mine.text()
    for name in TEXTS:
        assert view.set(text=name).text().count("Answer: ") == 1
    assert len({view.set(text=name).png() for name in (GIVEN, *TEXTS)}) == 1 + len(TEXTS)
    with pytest.raises(ValueError, match="most cannot be 13"):
        view.set(most=13)


@pytest.mark.parametrize(
    "run",
    [
        by_hand(("", "a")),
        by_hand(*[("zzzzzz", "a")] * 40),
        by_hand(*[("abcdefghijkl", "abcdefghijklm")] * 3),
        by_hand(("abcdefghijkl" * 20, "abcdefghijkl" * 20 + "x"), ("q" * 200, "a")),
    ],
)
def test_runs_of_any_length_fit_the_picture(run):
    figure = draw_draft_timeline(run)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in (*figure.texts, *figure.axes[0].texts) if text.get_text()]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    cells = sorted((round(patch.get_y(), 3), patch.get_x(), patch.get_width()) for patch in figure.axes[0].patches)
    for (line, left, wide), (next_line, right, _) in pairwise(cells):
        assert line != next_line or left + wide <= right


@pytest.mark.parametrize(
    ("lookup", "said"),
    [
        (lambda ids, longest, count: [], "the text last went on with “␣cat,␣”; nothing was drafted."),
        (lambda ids, longest, count: [65] * 9, "Pass 1: lookup_draft returned 9 tokens; 6 at most were asked for."),
        (lambda ids, longest, count: ids[2:4], "after “␣a” the text last went on with"),
    ],
)
def test_a_wrong_lookup_is_named_in_the_picture(llm, lookup, said):
    run = record_drafts(llm, list(b" a cat, a"), lookup, 2, 6, 6)
    assert any(said in problem for problem in run.problems), run.problems
    assert any(word.startswith("! Pass") for word in words(draw_draft_timeline(run)))
    assert record_drafts(llm, list(b" a cat, a"), repeated, 2, 6, 6).problems == ()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "lookup_draft returned None; a list of token ids was expected."),
        (["a"], r"lookup_draft returned \['a'\]; a list of token ids was expected."),
        ([300], "lookup_draft returned the id 300; ids from 0 to 258 were expected."),
    ],
)
def test_what_is_no_draft_is_a_sentence(llm, returned, said):
    with pytest.raises(ValueError, match=said):
        record_drafts(llm, [1, 2], lambda *_: returned, 3, 6, 4)
    assert "cannot be drawn" in draft_timeline(llm, [1, 2], lambda *_: returned, tokens=4).text()


def test_what_is_not_yet_written_is_said(llm):
    def lookup_draft(ids, longest, count):
        raise NotImplementedError

    text = draft_timeline(llm, [1, 2], lookup_draft).text()
    assert text == "lookup_draft is not yet written; this figure is drawn with it."


@pytest.mark.model
def test_a_list_that_repeats_itself_takes_the_real_model_a_fraction_of_the_passes(smollm2_fp32):
    ids = smollm2_fp32.tokenizer.encode(TEXTS["a list that repeats itself"])
    run = record_drafts(smollm2_fp32, ids, optimization.lookup_draft, tokens=24)
    assert run.problems == ()
    assert run.tokens == plain_answer(smollm2_fp32.model, kv_cache.ConcatKVCache(30), ids, 24)
    assert len(run.passes) <= 12
