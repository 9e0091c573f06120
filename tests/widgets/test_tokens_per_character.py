"""Tokens per character: the bars against independent counts, and tokenizers that lose text are marked."""

from __future__ import annotations

import gc
import sys
import unicodedata
import weakref

import pytest
from matplotlib.colors import to_hex

from llmfromscratch.widgets import (
    byte_tokenizer,
    character_tokenizer,
    draw_tokens_per_character,
    tokens_per_character,
)
from llmfromscratch.widgets.glyphs import glyph
from llmfromscratch.widgets.sample_texts import CONTENT, LANGUAGES
from llmfromscratch.widgets.style import ALARM
from llmfromscratch.widgets.token_reading import PlainTokenizer
from llmfromscratch.widgets.tokens_per_character import MEASURES, SORTS, count

pytestmark = pytest.mark.filterwarnings("error")
GROUPS = {"languages, one meaning": LANGUAGES, "other content": CONTENT}
ALL = LANGUAGES | CONTENT


def in_threes(text):
    """Three characters a piece."""
    return [text[i : i + 3] for i in range(0, len(text), 3)]


def bars(figure):
    """The bars' lengths from the top down; barh puts them into the axes in rows."""
    return [patch.get_width() for patch in sorted(figure.axes[0].patches, key=lambda patch: patch.get_y())]


def names(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_samples_are_what_they_are_called():
    assert list(LANGUAGES) == ["English", "German", "French", "Greek", "Russian", "Arabic", "Hindi", "Chinese",
                               "Japanese", "Korean"]  # fmt: skip
    scripts = {"English": "LATIN", "German": "LATIN", "French": "LATIN", "Greek": "GREEK", "Russian": "CYRILLIC",
               "Arabic": "ARABIC", "Hindi": "DEVANAGARI", "Chinese": "CJK", "Japanese": "HIRAGANA",
               "Korean": "HANGUL"}  # fmt: skip
    for language, script in scripts.items():
        letters = [character for character in LANGUAGES[language] if character.isalpha()]
        share = sum(unicodedata.name(letter).startswith(script) for letter in letters) / len(letters)
        assert share > (0.5 if language == "Japanese" else 0.95), language
    compile(CONTENT["Python code"], "sample", "exec")
    assert sum(character.isspace() for character in CONTENT["white space"]) > len(CONTENT["white space"]) / 2
    assert sum(character.isdigit() for character in CONTENT["digits"]) > len(CONTENT["digits"]) / 2


def test_the_bars_are_tokens_per_character():
    figure = draw_tokens_per_character(count(in_threes, GROUPS))
    assert names(figure) == list(ALL)
    assert bars(figure) == pytest.approx([-(-len(text) // 3) / len(text) for text in ALL.values()])


def test_the_bars_are_bytes_per_token():
    figure = draw_tokens_per_character(count(in_threes, GROUPS), "bytes per token")
    assert bars(figure) == pytest.approx([len(text.encode()) / -(-len(text) // 3) for text in ALL.values()])


def test_the_same_meaning_is_compared_with_the_first_language_and_other_content_is_left_out():
    figure = draw_tokens_per_character(count(character_tokenizer(), GROUPS), "tokens for the same meaning")
    assert names(figure) == list(LANGUAGES)
    assert bars(figure) == pytest.approx([len(text) / len(LANGUAGES["English"]) for text in LANGUAGES.values()])
    assert "times the tokens of English" in figure.axes[0].get_xlabel()


@pytest.mark.parametrize("measure", MEASURES)
def test_a_byte_tokenizer_reaches_the_mark_exactly(measure):
    figure = draw_tokens_per_character(count(byte_tokenizer(), GROUPS), measure)
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines]
    if measure == "tokens for the same meaning":
        assert marks[0] == 1
    assert marks == pytest.approx(bars(figure))


@pytest.mark.parametrize("measure", MEASURES)
def test_the_orders_are_orders(measure):
    counts = count(in_threes, GROUPS)
    up = draw_tokens_per_character(counts, measure, "smallest first")
    down = draw_tokens_per_character(counts, measure, "largest first")
    assert bars(up) == sorted(bars(up))
    assert bars(down) == bars(up)[::-1]
    assert set(names(up)) == set(names(down))


def test_every_control_changes_the_picture():
    view = tokens_per_character(in_threes)
    pictures = [view.set(measure=measure, sort=sort).png() for measure in MEASURES for sort in SORTS]
    assert len(set(pictures)) == len(pictures)


def test_the_text_has_every_number():
    view = tokens_per_character(in_threes, {"a": "abcd", "b": "äöü"}, {"c": "123456"})
    assert view.text().splitlines() == [
        "Tokens per character",
        "  a  0.50   (2 tokens, 4 characters, 4 bytes)",
        "  b  0.33   (1 token, 3 characters, 6 bytes)",
        "  c  0.33   (2 tokens, 6 characters, 6 bytes)",
        "In all of them the tokens give back the text.",
    ]
    assert view.set(measure="tokens for the same meaning").text().splitlines()[:3] == [
        "Tokens for the same meaning (times the tokens of a)",
        "  a  1.00×   (2 tokens, 4 characters, 4 bytes)",
        "  b  0.50×   (1 token, 3 characters, 6 bytes)",
    ]


def test_a_tokenizer_that_loses_letters_is_marked_where_it_does():
    lossy = PlainTokenizer(lambda text: [b for b in text.encode() if b < 128 or b > 195], lambda i: bytes([i]), 256)
    view = tokens_per_character(lossy)
    assert "German: No token has" in view.text()
    assert "English: " not in view.text()
    figure = draw_tokens_per_character(count(lossy, GROUPS))
    wrong = {label.get_text() for label in figure.axes[0].get_yticklabels() if label.get_color() == ALARM}
    assert wrong == {name for name, text in ALL.items() if not text.isascii()}
    crossed = [patch for patch in figure.axes[0].patches if to_hex(patch.get_edgecolor()) == ALARM.lower()]
    assert len(crossed) == len(wrong)
    assert "And " in view.text()
    assert "more texts with something wrong." in view.text()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError(), "English: encode is not yet written."),
        (ValueError("no"), "encode raised ValueError: no."),
    ],
)
def test_a_tokenizer_that_raises_is_said_and_its_rows_are_empty(error, said):
    def encode(text):
        raise error

    broken = PlainTokenizer(encode, bytes, 1)
    for measure in MEASURES:
        view = tokens_per_character(broken).set(measure=measure)
        assert said in view.text()
        assert view.png().startswith(b"\x89PNG")
    assert set(bars(draw_tokens_per_character(count(broken, GROUPS)))) == {0}
    assert "no tokens" in view.text()


def test_a_tokenizer_that_fails_on_one_text_only_keeps_the_others():
    def encode(text):
        if "{" in text:
            raise KeyError("{")
        return list(text.encode())

    view = tokens_per_character(PlainTokenizer(encode, lambda i: bytes([i]), 256))
    assert view.text().endswith("JSON: encode raised KeyError: '{'.")


def test_ids_outside_the_vocabulary_are_named():
    bad = PlainTokenizer(lambda text: [*text.encode(), 300], lambda i: bytes([i]), 256)
    assert "English: Token id 300 is outside the vocabulary (0 to 255)." in tokens_per_character(bad).text()


@pytest.mark.parametrize(("texts", "said"), [({"a": ""}, "'a' is empty"), ({}, "there are none")])
def test_texts_that_cannot_be_counted_over_are_refused(texts, said):
    with pytest.raises(ValueError, match=said):
        tokens_per_character(in_threes, texts)


def test_without_texts_of_one_meaning_that_measure_is_not_offered():
    view = tokens_per_character(in_threes, content={"c": "123"})
    with pytest.raises(ValueError, match="measure cannot be 'tokens for the same meaning'"):
        view.set(measure="tokens for the same meaning")


@pytest.mark.parametrize("measure", MEASURES)
def test_only_characters_of_the_font_are_drawn_no_labels_overlap_and_nothing_leaves_the_figure(measure):
    lossy = PlainTokenizer(lambda text: list(text.encode())[:-1], lambda i: bytes([i]), 256)
    counts = count(lossy, {"languages, one meaning": LANGUAGES | {"日本語": "本"}, "other content": CONTENT})
    figure = draw_tokens_per_character(counts, measure)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts = [*axes.texts, *figure.texts, *axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label]
    texts = [text for text in [*texts, *axes.get_legend().get_texts()] if text.get_text()]
    assert all(glyph(character) for text in texts for character in text.get_text() if not character.isspace())
    inside = [text for text in texts if text not in axes.get_xticklabels()]
    boxes = [text.get_window_extent() for text in inside]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_figures_do_not_pile_up():
    seen = [weakref.ref(draw_tokens_per_character(count(in_threes, GROUPS), measure)) for measure in MEASURES]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


@pytest.mark.model
def test_the_real_tokenizer_is_counted_right(smollm2_fp32):
    tokenizer = smollm2_fp32.tokenizer
    view = tokens_per_character(tokenizer)
    assert view.text().endswith("In all of them the tokens give back the text.")
    for name, text in ALL.items():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert f"({len(ids)} tokens, {len(text)} characters, {len(text.encode())} bytes)" in next(
            line for line in view.text().splitlines() if line.strip().startswith(name)
        )
