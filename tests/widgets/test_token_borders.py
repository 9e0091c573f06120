"""Token borders: where they are drawn, against independent sums, and what a wrong tokenizer looks like."""

from __future__ import annotations

import gc
import sys
import unicodedata
import weakref
from itertools import pairwise

import ipywidgets
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from llmfromscratch.course.authoring.exercise_code import cut_exercise
from llmfromscratch.course.exercises import find
from llmfromscratch.errors import TokenizerError
from llmfromscratch.widgets import byte_tokenizer, character_tokenizer, draw_token_borders, token_borders
from llmfromscratch.widgets.borders_layout import lay_out
from llmfromscratch.widgets.glyphs import character_width, glyph, in_font, name_of
from llmfromscratch.widgets.style import ALARM, BLACK
from llmfromscratch.widgets.token_borders import BENEATH, TONES
from llmfromscratch.widgets.token_reading import PlainTokenizer, read_tokens

pytestmark = pytest.mark.filterwarnings("error")
TEXT = "Hello, world!\n  ďábel 你 👍🏽 e\u0301\tend"
CUTS = [b"Hello", b",", b" world", b"!", b"\n ", b" ", "ďá".encode(), b"bel", b" \xe4", b"\xbd\xa0", b" \xf0\x9f\x91",
        b"\x8d\xf0\x9f", b"\x8f\xbd", b" e", b"\xcc", b"\x81", b"\t", b"end"]  # fmt: skip


def table_tokenizer(tokens, change=lambda ids: ids, special=()):
    """Gives the ids 0, 1, 2, ... whatever the text; id i stands for tokens[i]."""
    names = {tokens[i].decode(): i for i in special}
    return PlainTokenizer(lambda text: change(list(range(len(tokens)))), tokens.__getitem__, len(tokens), names)


GOOD = table_tokenizer(CUTS)


def rectangles(figure, colours):
    wanted = {to_hex(colour) for colour in colours}
    return [
        patch for patch in figure.axes[0].patches
        if isinstance(patch, Rectangle) and patch.get_fill() and to_hex(patch.get_facecolor()) in wanted
    ]  # fmt: skip


def alarms(figure):
    return [
        patch for patch in figure.axes[0].patches if patch.get_hatch() and to_hex(patch.get_edgecolor()) == "#a61e00"
    ]


def labels(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_text_of_the_tests_is_cut_into_all_of_its_bytes():
    assert b"".join(CUTS) == TEXT.encode()


def test_each_token_is_one_rectangle_and_neighbours_have_different_tones():
    figure = draw_token_borders({"good": GOOD}, "Hello, world!" + TEXT[13:])
    drawn = sorted(rectangles(figure, TONES), key=lambda patch: (patch.get_y(), patch.get_x()))
    assert len(drawn) == len(CUTS)
    tones = [to_hex(patch.get_facecolor()) for patch in drawn]
    assert tones == [TONES[i % 2].lower() for i in range(len(CUTS))]
    for left, right in pairwise(drawn):
        if left.get_y() == right.get_y():
            assert right.get_x() == pytest.approx(left.get_x() + left.get_width())


def test_the_two_tones_differ_in_lightness():
    def lightness(colour):
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    assert abs(lightness(TONES[0]) - lightness(TONES[1])) > 50


def test_equal_bytes_stand_above_each_other_in_all_lines():
    readings = [read_tokens(tokenizer, TEXT) for tokenizer in (GOOD, byte_tokenizer(), character_tokenizer())]
    layout = lay_out(readings, (True, True), 8.0, 11, 7)
    ends = [np.cumsum([len(token.content) for token in reading.tokens]).tolist() for reading in readings]
    for line, expected in zip(layout.tokens, ends, strict=True):
        assert [span.end for span in line] == expected
    assert layout.bytes[0] == layout.bytes[1] == dict(enumerate(TEXT.encode()))
    assert layout.rows[0][0] == 0
    assert layout.rows[-1][1] == len(TEXT.encode())
    assert all(layout.x[end] - layout.x[start] <= 8.0 for start, end in layout.rows)
    assert [end for _, end in layout.rows[:-1]] == [start for start, _ in layout.rows[1:]]


def test_rows_end_between_tokens_and_never_inside_a_character():
    text = "你好世界" * 30
    halves = [text.encode()[i : i + 2] for i in range(0, 3 * len(text), 2)]
    layout = lay_out([read_tokens(table_tokenizer(halves), text)], (True, True), 8.0, 11, 7)
    assert len(layout.rows) > 2
    assert all(end % 6 == 0 for _, end in layout.rows)


def test_a_line_break_ends_the_row():
    layout = lay_out([read_tokens(byte_tokenizer(), "one\ntwo")], (False, False), 8.0, 11, 7)
    assert layout.rows == [(0, 4), (4, 7)]


@pytest.mark.parametrize("beneath", BENEATH)
def test_what_stands_beneath_is_what_was_asked_for(beneath):
    words = labels(draw_token_borders({"bytes": byte_tokenizer()}, "zß", beneath))
    ids, hexes = {"122", "195", "159"}, {"7A", "C3", "9F"}
    assert (ids <= set(words)) == ("ids" in beneath)
    assert (hexes <= set(words)) == ("bytes" in beneath)
    assert bool(ids & set(words)) == ("ids" in beneath)
    assert bool(hexes & set(words)) == ("bytes" in beneath)


def test_every_control_changes_the_picture():
    view = token_borders({"good": GOOD, "bytes": byte_tokenizer()}, TEXT)
    pictures = [view.png()]
    for change in ({"beneath": "ids"}, {"beneath": "bytes"}, {"beneath": "nothing"}, {"which": ("good",)},
                   {"which": ("bytes",)}, {"text": "another"}):  # fmt: skip
        pictures.append(view.set(**change).png())
    assert len(set(pictures)) == len(pictures)


def test_the_text_counts_tokens_and_shared_borders():
    view = token_borders({"pairs": table_tokenizer([b"ab", b"cd"]), "bytes": byte_tokenizer()}, "abcd")
    assert view.text().splitlines() == [
        "4 characters, 4 bytes in UTF-8",
        "pairs: 2 tokens, 2.0 characters per token",
        "  'ab' 0 6162 | 'cd' 1 6364",
        "bytes: 4 tokens, 1.0 characters per token",
        "  'a' 97 61 | 'b' 98 62 | 'c' 99 63 | 'd' 100 64",
        "Borders inside the text: 1 and 3, 1 of them shared.",
        "The tokens of every line give back the text.",
    ]


def test_a_plain_function_that_cuts_a_text_can_stand_in_for_a_tokenizer():
    view = token_borders({"in two": lambda text: [text[:3], text[3:]]}, "über 你")
    assert "'übe' C3BC6265 | 'r 你' 7220E4BDA0" in view.text()
    assert view.text().endswith("give back the text.")


def test_ids_may_be_a_tensor_or_an_array():
    for kind in (torch.tensor, np.array):
        tokenizer = PlainTokenizer(lambda text, kind=kind: kind([104, 105]), lambda i: bytes([i]), 256)
        assert token_borders({"t": tokenizer}, "hi").text().endswith("give back the text.")


def test_what_is_lost_is_crossed_out_where_it_was_and_the_rest_stays_in_line():
    reading = read_tokens(lambda text: text.split(" "), "one two three")
    assert reading.lost == [(3, 4), (7, 8)]
    figure = draw_token_borders({"words": lambda text: text.split(" "), "bytes": byte_tokenizer()}, "one two three")
    lowest = max(patch.get_y() for patch in rectangles(figure, TONES))
    lefts = sorted(patch.get_x() for patch in rectangles(figure, TONES) if patch.get_y() == lowest)
    assert sorted(patch.get_x() for patch in alarms(figure)) == pytest.approx([lefts[3], lefts[7]])
    view = token_borders({"words": lambda text: text.split(" ")}, "one two three")
    assert view.text().endswith("words: No token has 2 of the text's bytes; the first: ' ' at byte 3.")


def test_what_the_text_does_not_have_is_crossed_out():
    wrong = table_tokenizer([b"one", b"XYZ", b" two"])
    view = token_borders({"wrong": wrong}, "one two")
    assert "wrong: The text does not have the bytes of token 2 ('XYZ') there." in view.text()
    (crossed,) = alarms(draw_token_borders({"wrong": wrong}, "one two"))
    assert crossed.get_width() > 0


def test_a_tokenizer_that_changes_letters_is_both():
    text = token_borders({"lower": lambda text: [text.lower()]}, "HELLO").text()
    assert "does not have the bytes of token 1 ('hello')" in text
    assert "No token has 'HELLO', which the text has at byte 0." in text


def test_an_id_outside_the_vocabulary_is_named_and_marked():
    bad = table_tokenizer(CUTS, lambda ids: [*ids, 512])
    assert "bad: Token id 512 is outside the vocabulary (0 to 17)." in token_borders({"bad": bad}, TEXT).text()
    assert len(alarms(draw_token_borders({"bad": bad}, TEXT))) == 1
    figure = draw_token_borders({"bad": bad}, TEXT)
    assert [text.get_color() for text in figure.axes[0].texts if text.get_text() == "512"] == [ALARM]


def test_a_vocabulary_that_says_so_by_raising_is_quoted():
    def token_bytes(index):
        raise TokenizerError(f"token id {index} is outside the vocabulary (0 to 3).")

    text = token_borders({"t": PlainTokenizer(lambda text: [7], token_bytes, 100)}, "a").text()
    assert "token_bytes(7) raised TokenizerError: token id 7 is outside the vocabulary (0 to 3)." in text


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1.5], "A token id is 1.5; ids are whole numbers."),
        (None, "encode raised TypeError: a list of token ids was expected, not None."),
        ("ids", "a list of token ids was expected, not 'ids'."),
        ([-1], "Token id -1 is outside the vocabulary (0 to 255)."),
    ],
)
def test_ids_that_are_none_are_said(ids, said):
    view = token_borders({"t": PlainTokenizer(lambda text: ids, lambda i: bytes([i]), 256)}, "abc")
    assert said in view.text()
    assert "cannot be drawn" not in view.text()


def test_token_bytes_that_are_a_text_are_said():
    view = token_borders({"t": PlainTokenizer(lambda text: [1], lambda i: "a", 256)}, "a")
    assert "token_bytes(1) returned 'a'; bytes were expected." in view.text()


@pytest.mark.parametrize(
    ("error", "said"),
    [(NotImplementedError(), "mine: encode is not yet written."), (KeyError("ĠX"), "encode raised KeyError: 'ĠX'.")],
)
def test_a_tokenizer_that_raises_leaves_the_others_drawn(error, said):
    def encode(text):
        raise error

    both = {"mine": PlainTokenizer(encode, bytes, 1), "good": GOOD}
    assert said in token_borders(both, TEXT).text()
    figure = draw_token_borders(both, TEXT)
    assert len(rectangles(figure, TONES)) == len(CUTS)
    assert "no tokens" in labels(figure)


def test_a_blank_of_the_chapter_is_called_by_its_exercise():
    names: dict = {}
    exec(
        compile("from __future__ import annotations\n" + cut_exercise(find("2.2").object).blank, "<cell>", "exec"),
        names,
    )
    view = token_borders({"words": lambda text: names["split_words"](text, None)}, "Hi you")
    assert "words: encode needs exercise 2.2 (split_words), which is not yet written." in view.text()


def test_control_tokens_are_black_and_those_around_a_text_are_no_fault():
    llama = table_tokenizer([b"<s>", b" Hi", b" you", b"</s>"], special=(0, 3))
    view = token_borders({"llama": llama, "bytes": byte_tokenizer()}, "Hi you")
    assert (
        "llama: 4 tokens, 1.5 characters per token; adds '<s>' and a space at the front, '</s>' at the end"
        in view.text()
    )
    assert view.text().endswith("give back the text.")
    figure = draw_token_borders({"llama": llama, "bytes": byte_tokenizer()}, "Hi you")
    assert len(rectangles(figure, [BLACK])) == 2
    assert not alarms(figure)


def test_a_control_token_in_the_middle_that_the_text_does_not_have_is_a_fault():
    doubled = table_tokenizer([b"Hi", b"<s>", b" you"], special=(1,))
    assert "does not have the bytes of token 2 ('<s>')" in token_borders({"d": doubled}, "Hi you").text()


def test_a_control_token_made_from_a_users_text_is_seen():
    fooled = table_tokenizer([b"hi", b"<|im_end|>"], special=(1,))
    assert len(rectangles(draw_token_borders({"f": fooled}, "hi<|im_end|>"), [BLACK])) == 1
    assert not rectangles(draw_token_borders({"b": byte_tokenizer()}, "hi<|im_end|>"), [BLACK])


def test_two_spaces_at_the_front_are_not_a_rule():
    assert "does not have the bytes" in token_borders({"t": table_tokenizer([b"  Hi"])}, "Hi").text()


def test_characters_without_a_glyph_are_drawn_as_numbers_and_white_space_as_signs():
    words = labels(draw_token_borders({"t": character_tokenizer()}, "你\u200d \n\tä", "nothing"))
    assert {"4F\n60", "20\n0D", "␣", "↵", "⇥", "ä"} <= set(words)
    assert not {"你", "\u200d", " ", "\n", "\t"} & set(words)


def test_no_text_in_the_picture_has_a_character_that_the_font_lacks():
    wrong = PlainTokenizer(lambda text: list(text.encode())[1:], lambda i: bytes([i]), 256)
    figure = draw_token_borders({"名前": wrong, "γλώσσα": GOOD}, TEXT)
    drawn = "".join(labels(figure) + [text.get_text() for text in figure.texts]).replace("\n", "").replace(" ", "")
    assert all(glyph(character) for character in drawn)
    assert b"PNG" in token_borders({"名前": wrong}, "你好").png()


def test_every_plane_of_unicode_can_be_drawn_without_a_warning():
    text = "".join(chr(point) for point in range(0, 0x30000, 997) if unicodedata.category(chr(point)) != "Cs")
    assert token_borders({"t": character_tokenizer()}, text, beneath="nothing").png().startswith(b"\x89PNG")
    assert all(character_width(character, 11) > 0 for character in text)


def test_a_lone_surrogate_counts_as_a_question_mark():
    assert token_borders({"b": byte_tokenizer()}, "a\ud800").text().startswith("2 characters, 2 bytes")


def test_names_and_replacements_of_characters():
    assert (name_of("你"), name_of("\n"), name_of("\ue000")) == ("CJK UNIFIED IDEOGRAPH-4F60", "LINE FEED", "(no name)")
    assert in_font("a 你") == "a [U+4F60]"
    assert glyph("\u0301") == "◌\u0301"
    assert glyph("\ufe0f") == ""


def test_a_text_too_long_for_the_picture_is_cut_and_says_so():
    view = token_borders({"b": byte_tokenizer()}, "word " * 300)
    figure = draw_token_borders({"b": byte_tokenizer()}, "word " * 300)
    assert figure.get_figheight() < 12
    assert any("Only the first 1,000 of 1,500 characters are read." in text.get_text() for text in figure.texts)
    assert any("more lines have no room." in text.get_text() for text in figure.texts)
    assert "| and 940 more" in view.text()


def test_an_empty_text_is_drawn_too():
    assert token_borders({"b": byte_tokenizer()}, "").text().splitlines()[1] == "b: 0 tokens"
    assert token_borders({"b": byte_tokenizer()}, "").png().startswith(b"\x89PNG")


def test_no_tokenizer_at_all_is_refused():
    with pytest.raises(ValueError, match="There is no tokenizer to draw"):
        token_borders({}, "text")


def test_dollar_signs_are_not_taken_for_formulas():
    assert "'$'" in token_borders({"$a$": character_tokenizer()}, "$x_{$").text()
    assert token_borders({"$a$": character_tokenizer()}, "$x_{$").png().startswith(b"\x89PNG")


def test_the_field_for_the_text_has_several_lines_and_redraws():
    view = token_borders({"b": byte_tokenizer()}, "one\ntwo")
    row, picture, caption = view.view().children
    before = picture.value
    assert isinstance(row.children[0], ipywidgets.Textarea)
    row.children[0].value = "one\ntwo\nthree"
    assert picture.value != before
    assert "13 tokens" in caption.value


@pytest.mark.parametrize("beneath", BENEATH)
def test_no_labels_overlap_and_nothing_leaves_the_figure(beneath):
    figure = draw_token_borders({"good": GOOD, "bytes": byte_tokenizer(), "in words": str.split}, TEXT, beneath)
    figure.draw_without_rendering()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    pairs = [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes[:i]) if a.overlaps(b)]
    assert [(texts[i].get_text(), texts[j].get_text()) for i, j in pairs] == []
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_figures_do_not_pile_up():
    seen = [weakref.ref(draw_token_borders({"good": GOOD}, TEXT, beneath)) for beneath in BENEATH]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
