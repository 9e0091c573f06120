"""The streaming buffer: its steps against sums over bytes, and decoders that are wrong are seen to be."""

from __future__ import annotations

import codecs
import gc
import sys
import weakref

import pytest
from matplotlib.colors import to_hex

from llmfromscratch.course import exercises
from llmfromscratch.course.authoring.exercise_code import cut_exercise
from llmfromscratch.widgets import byte_tokenizer, draw_streaming_buffer, streaming_buffer
from llmfromscratch.widgets.glyphs import glyph
from llmfromscratch.widgets.streaming_buffer import EXAMPLES, describe_streaming_buffer
from llmfromscratch.widgets.streaming_trace import stream_of, trace, wrong_characters
from llmfromscratch.widgets.style import ALARM
from llmfromscratch.widgets.token_reading import PlainTokenizer

pytestmark = pytest.mark.filterwarnings("error")
BYTES = byte_tokenizer()
PAIRS = PlainTokenizer(  # two bytes a token
    lambda text: [int.from_bytes(text.encode()[i : i + 2]) for i in range(0, len(text.encode()), 2)],
    lambda index: index.to_bytes(2 if index > 255 else 1),
    65536,
)


class Right:
    """Waits until a character is complete."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoder = tokenizer, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index):
        special = index in self.tokenizer.special.values()
        return "" if special else self.decoder.decode(self.tokenizer.token_bytes(index))

    def flush(self):
        return self.decoder.decode(b"", final=True)


class Eager(Right):
    """Decodes every token by itself."""

    def push(self, index):
        return self.tokenizer.token_bytes(index).decode("utf-8", errors="replace")


class Lazy(Right):
    """Gives everything at the end."""

    held = ""

    def push(self, index):
        self.held += super().push(index)
        return ""

    def flush(self):
        return self.held + super().flush()


class Forgetful(Lazy):
    """Gives nothing at all."""

    def flush(self):
        return ""


class Repeating(Right):
    """Gives all text so far, again and again."""

    text = ""

    def push(self, index):
        self.text += super().push(index)
        return self.text


def steps(example, decoder=Right, tokenizer=BYTES):
    return trace(stream_of(example, tokenizer), decoder)


def fills(figure, colour):
    return [patch for patch in figure.axes[0].patches if patch.get_fill() and to_hex(patch.get_facecolor()) == colour]


def labels(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


@pytest.mark.parametrize("tokenizer", [BYTES, PAIRS])
@pytest.mark.parametrize("example", [example for example in EXAMPLES.values() if isinstance(example, str)])
def test_what_is_out_and_what_waits_are_the_bytes_that_came(example, tokenizer):
    done = steps(example, Right, tokenizer)
    for step in done:
        assert step.given.encode() + step.waiting == step.received
        assert step.problem == ""
    assert done[-1].received == example.encode()
    assert done[-1].given == example
    assert "".join(step.new for step in done) == example


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_right_decoder_has_nothing_wrong_at_any_step(name):
    stream = stream_of(EXAMPLES[name], BYTES)
    for step in range(1, len(stream.tokens) + 2):
        assert describe_streaming_buffer(stream, step, Right).endswith("Nothing is wrong so far.")


def test_every_control_changes_the_picture():
    view = streaming_buffer(decoder=Right)
    pictures = [view.png()]
    pictures += [view.set(step=step).png() for step in (2, 3, 4, 7, 16)]
    pictures += [view.set(step=3, example=name).png() for name in list(EXAMPLES)[1:]]
    assert len(set(pictures)) == len(pictures)


def test_a_step_beyond_the_flush_shows_the_flush():
    view = streaming_buffer(decoder=Right, examples={"short": "ab", "long": "abcdef"})
    flush = view.set(example="short", step=3).png()
    assert view.set(step=7).png() == flush
    assert "step 3, the flush" in view.text()
    with pytest.raises(ValueError, match="step cannot be 8; expected a whole number from 1 to 7"):
        view.set(step=8)


def test_the_text_says_what_came_what_waits_and_what_is_out():
    view = streaming_buffer(decoder=Right).set(step=5)
    assert view.text().splitlines() == [
        "Chinese: step 5 of 16, token 165 brings A5",
        "In the buffer: 2 bytes (E5 A5), of a character of 3 bytes; 1 to come",
        "Given out by this step: ''; so far: '你'",
        "Nothing is wrong so far.",
    ]


def test_the_stripe_shows_each_byte_as_out_waiting_or_to_come():
    figure = draw_streaming_buffer(stream_of("你好a", BYTES), 5, Right)
    # one field for each byte, one in the legend; a waiting byte has a box of its own as well
    assert len(fills(figure, "#a3dccb")) == 3 + 1
    assert len(fills(figure, "#f2b950")) == 2 + 1 + 2


def test_the_bits_of_waiting_bytes_are_shown_and_places_for_those_to_come():
    figure = draw_streaming_buffer(stream_of("👍", BYTES), 2, Right)
    bits = "".join(word for word in labels(figure) if word in ("0", "1", "x"))
    assert bits == f"{0xF0:08b}{0x9F:08b}" + "10xxxxxx" * 2
    assert labels(figure).count("to come") == 2


def test_a_decoder_that_is_too_early_lets_broken_characters_out_and_they_are_marked():
    view = streaming_buffer(decoder=Eager).set(step=2)
    lines = view.text().splitlines()
    assert lines[1].startswith("In the buffer: unknown, ")
    assert lines[1].endswith("the buffer ought to hold E4 BD")
    assert lines[3].startswith("Step 1: A broken character leaves the decoder")
    figure = draw_streaming_buffer(stream_of("你好", BYTES), 2, Eager)
    marked = [text for text in figure.axes[0].texts if text.get_text() == "U+FFFD"]
    assert [text.get_color() for text in marked] == [ALARM, ALARM]
    assert sum("BROKEN" in word for word in labels(figure)) == 2
    assert "wrong or lost" in labels(figure)
    assert view.png() != streaming_buffer(decoder=Right).set(step=2).png()


def test_broken_bytes_that_are_in_the_input_are_no_fault_of_the_decoder():
    view = streaming_buffer(decoder=Right).set(example="bytes that are no text", step=5)
    assert "so far: 'ok \ufffd\ufffd go'" in view.text()
    assert view.text().endswith("Nothing is wrong so far.")
    cut = streaming_buffer(decoder=Right, examples={"cut": [b"a\xe4", b"\xbd"]})
    assert "In the buffer: 2 bytes (E4 BD)" in cut.set(step=2).text()
    assert "so far: 'a\ufffd'" in cut.set(step=3).text()


def test_a_decoder_that_is_too_late_is_said_to_hold_back():
    view = streaming_buffer(decoder=Lazy).set(step=4)
    assert "In the buffer: 4 bytes (E4 BD A0 E5), more than an incomplete character" in view.text()
    assert view.text().endswith("Step 4: Held back, though certain: '你'.")
    assert view.set(step=16).text().endswith("Nothing is wrong so far.")


def test_what_the_flush_does_not_give_is_lost():
    text = streaming_buffer(decoder=Forgetful, examples={"it": "né"}).set(step=4).text()
    assert text.endswith("Step 4: The flush loses 'né'.")
    assert "3 bytes (6E C3 A9), and nothing gets them out any more" in text


def test_text_that_is_given_twice_is_quoted_with_the_step():
    text = streaming_buffer(decoder=Repeating, examples={"it": "abc"}).set(step=2).text()
    assert "Step 2: The decoder gives 'ab' where 'b' was expected." in text
    assert wrong_characters(steps("abc", Repeating)[1]) == {1, 2}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (NotImplementedError(), "Step 1: push(228) is not yet written."),
        (IndexError("list index out of range"), "Step 1: push(228) raised IndexError: list index out of range."),
        (None, "Step 1: push(228) returned None; a text was expected."),
        (b"x", "Step 1: push(228) returned b'x'; a text was expected."),
    ],
)
def test_a_decoder_that_fails_is_said_and_the_stream_is_still_drawn(result, said):
    class Failing(Right):
        def push(self, index):
            if isinstance(result, Exception):
                raise result
            return result

    view = streaming_buffer(decoder=Failing).set(step=9)
    assert view.text().splitlines()[-1] == said
    assert view.text().startswith("Chinese: step 1 of 16")
    assert "E4" in labels(draw_streaming_buffer(stream_of("你", BYTES), 1, Failing))


def test_a_decoder_that_cannot_be_made_is_a_sentence_in_the_pictures_place():
    def make(tokenizer):
        raise NotImplementedError

    assert streaming_buffer(decoder=make).text() == "make is not yet written; this figure is drawn with it."


def test_a_blank_of_the_chapter_is_called_by_its_exercise():
    names: dict = {}
    blank = cut_exercise(exercises.find("2.7").object).blank
    exec(compile("from __future__ import annotations\n" + blank, "<cell>", "exec"), names)
    view = streaming_buffer(decoder=names["IncrementalDecoder"])
    said = "Exercise 2.7 (IncrementalDecoder) is not yet written; this figure is drawn with it."
    assert view.text() == said
    assert view.png().startswith(b"\x89PNG")


def test_a_tokenizer_that_raises_is_a_sentence_in_the_pictures_place():
    def encode(text):
        raise ValueError("no such word")

    view = streaming_buffer(PlainTokenizer(encode, bytes, 3), decoder=Right)
    assert "ValueError: no such word" in view.text()
    assert view.png().startswith(b"\x89PNG")


def test_control_tokens_give_no_text_and_are_black():
    tokens = [b"<s>", b"n\xc3", b"\xa9", b"</s>"]
    tokenizer = PlainTokenizer(lambda text: [], tokens.__getitem__, 4, {"<s>": 0, "</s>": 3})
    view = streaming_buffer(tokenizer, decoder=Right, examples={"ids": [0, 1, 2, 3]})
    assert "token 0, a control token: it has no text" in view.set(step=1).text()
    assert "so far: 'né'" in view.set(step=5).text()
    assert view.text().endswith("Nothing is wrong so far.")
    figure = draw_streaming_buffer(stream_of([0, 1, 2, 3], tokenizer), 2, Right)
    assert len(fills(figure, "#222222")) == 2


def test_the_space_that_a_tokenizer_adds_by_rule_is_not_missed():
    class Stripping(Right):
        first = True

        def push(self, index):
            text, was_first = super().push(index), self.first
            self.first = False
            return text.removeprefix(" ") if was_first else text

    tokenizer = PlainTokenizer(lambda text: list(f" {text}".encode()), lambda i: bytes([i]), 256, {}, True)
    for example in ("hé", list(" hé".encode())):
        view = streaming_buffer(tokenizer, decoder=Stripping, examples={"it": example})
        for step in range(1, 6):
            assert view.set(step=step).text().endswith("Nothing is wrong so far.")
        assert "so far: 'hé'" in view.text()


def test_an_id_outside_the_vocabulary_is_named():
    text = streaming_buffer(BYTES, decoder=Right, examples={"it": [104, 300]}).set(step=2).text()
    assert "Step 2: push(300) raised ValueError" in text


def test_the_reference_is_looked_up_when_drawing_so_that_a_built_module_counts(monkeypatch):
    from llmfromscratch import tokenizer

    view = streaming_buffer()
    assert view.text().endswith("Nothing is wrong so far.")
    monkeypatch.setattr(tokenizer, "IncrementalDecoder", Eager)
    assert "A broken character leaves the decoder" in view.text()


def test_a_long_stream_is_shown_around_the_step():
    text = "".join(chr(ord("a") + i % 26) for i in range(200))
    figure = draw_streaming_buffer(stream_of(text, BYTES), 100, Right)
    assert labels(figure).count("…") == 2
    assert f"{ord(text[99]):02X}" in labels(figure)
    assert "Given out so far: 100 characters; the last 7 of them" in " ".join(labels(figure))


@pytest.mark.parametrize("decoder", [Right, Eager, Lazy])
@pytest.mark.parametrize("name", EXAMPLES)
def test_only_characters_of_the_font_are_drawn_no_labels_overlap_and_nothing_leaves_the_figure(name, decoder):
    stream = stream_of(EXAMPLES[name], BYTES)
    for step in range(1, len(stream.tokens) + 2, 3):
        figure = draw_streaming_buffer(stream, step, decoder, "名前")
        figure.draw_without_rendering()
        texts = [text for text in [*figure.axes[0].texts, *figure.texts] if text.get_text()]
        drawn = "".join(text.get_text() for text in texts)
        assert all(glyph(character[-1]) for character in drawn if not character.isspace())
        boxes = [text.get_window_extent() for text in texts if text.get_text() not in "01x"]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)


def test_no_example_at_all_is_refused_and_an_empty_one_is_drawn():
    with pytest.raises(ValueError, match="There is no example to draw"):
        streaming_buffer(examples={})
    view = streaming_buffer(decoder=Right, examples={"empty": ""})
    assert "step 1, the flush" in view.text()
    assert view.png().startswith(b"\x89PNG")


def test_figures_do_not_pile_up():
    stream = stream_of("你好", BYTES)
    seen = [weakref.ref(draw_streaming_buffer(stream, step, Right)) for step in range(1, 8)]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
