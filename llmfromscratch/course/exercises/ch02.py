"""Chapter 2, tokenizing: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    special_checks,
    stopping_checks,
    streaming_checks,
    tokenizer_checks,
    tokenizer_clinic,
)

EXERCISES = [
    Exercise(
        id="2.1",
        object="llmfromscratch.tokenizer.byte_characters",
        title="a character for every byte",
        points=2,
        minutes=8,
        check=tokenizer_checks.check_byte_characters,
        hints=(
            "Two kinds of bytes: those in the three printable stretches, and the other 68. Which kind is byte 0?",
            "chr(number) is the character of a code point. Remember that range leaves out its end.",
            "Go through 0 to 255 in order. A printable byte b is chr(b); the others take chr(256), chr(257), ... as "
            "they come: a counter, or next() on an iterator.",
        ),
    ),
    Exercise(
        id="2.2",
        object="llmfromscratch.tokenizer.split_words",
        title="cut text into words",
        points=2,
        minutes=10,
        check=tokenizer_checks.check_split_words,
        hints=(
            "Begin with a list that holds the whole text, and let every step make a new list of pieces out of the old.",
            "step.split(piece) gives matches and what lies between them, in order, because of the group around the "
            "expression. Try it on one piece and look for what should not be there.",
            "One loop over rule.steps; in it, all parts of all pieces that are not empty. A text without characters "
            "has no pieces at all, so look at what you begin with.",
        ),
    ),
    Exercise(
        id="2.3",
        object="llmfromscratch.course.sketches.ch02.merge_plain",
        title="merge, the plain way",
        points=3,
        minutes=15,
        check=tokenizer_checks.check_merge_plain,
        hints=(
            "Write one round first: list all neighbours that have a rank, choose one, join it. Then repeat the round.",
            "itertools.pairwise(pieces) gives the neighbours. min() of (rank, place) tuples takes the lowest rank, and "
            "of equal ranks the smallest place.",
            "pieces[place : place + 2] = [joined] puts one piece in the place of two; do it on a list of your own. "
            'Test with `pair in ranks`: a rank of 0 is "false" to Python.',
        ),
    ),
    Exercise(
        id="2.4",
        object="llmfromscratch.tokenizer.split_special",
        title="control tokens, for trusted text only",
        points=3,
        minutes=15,
        check=special_checks.check_split_special,
        hints=(
            "Walk from left to right and ask at each place: which tokens begin here? Or let one regular expression "
            "that knows all the tokens do the walking.",
            "In an expression a|b the first alternative that fits wins, so their order matters; regex.escape makes "
            "characters such as | and . stand for themselves. What should no tokens at all match?",
            "regex.finditer gives matches with start(), end() and group(); the text between is text[end of the last : "
            'start of this one], and after the loop the rest remains. Leave out what equals "", not what is false.',
        ),
    ),
    Exercise(
        id="2.5",
        object="llmfromscratch.tokenizer.truncate",
        title="a prompt that is too long",
        points=2,
        minutes=12,
        check=tokenizer_checks.check_truncate,
        hints=(
            "Three questions in order: does it fit? may it be cut at all? how many of the first and how many of the "
            "last tokens stay?",
            "All three ways keep `first` ids of the beginning and max_length - first of the end; only `first` differs. "
            "A begin token that must stay is a `first` of at least 1, but only where ids[0] is that token.",
            "Take the end with ids[len(ids) - last:]. With ids[-last:] you would get everything where last is 0.",
        ),
    ),
    Exercise(
        id="2.6",
        object="llmfromscratch.tokenizer.pad",
        title="a rectangle of prompts",
        points=2,
        minutes=12,
        check=tokenizer_checks.check_pad,
        hints=(
            "Find the width first, refuse what cannot be filled, then lay out the rows: ids and mask in the same way.",
            "Rounding n up to a multiple of m is -(-n // m) * m. The mask follows from the rows' lengths alone: a real "
            "token may well have the padding's id.",
            "torch.full((rows, width), pad_id, dtype=torch.int64) and torch.zeros_like of it; then put each row at its "
            "place, from column 0 or from width - len(row) on.",
        ),
    ),
    Exercise(
        id="2.7",
        object="llmfromscratch.tokenizer.IncrementalDecoder",
        title="text as it becomes certain",
        points=3,
        minutes=20,
        check=streaming_checks.check_incremental_decoder,
        hints=(
            "Take the example: after each of the three pushes, which bytes have come, which are out as text, and which "
            "wait? What waits has to be kept in the decoder from one push to the next. Then: what has come before the "
            "first push?",
            'codecs.getincrementaldecoder("utf-8")(errors="replace") makes an object whose decode(data) keeps what is '
            'unfinished; decode(b"", final=True) gives the rest. tokenizer.token_bytes(index) are a token\'s bytes.',
            "In __init__, push the prompt's tokens and drop what comes out: their unfinished bytes then wait already. "
            'A control token counts as b"" with skip_special; the first space goes from the first data that is not '
            "empty, then never again.",
        ),
    ),
    Exercise(
        id="2.8",
        object="llmfromscratch.tokenizer.StopMatcher",
        title="stop at a word",
        points=4,
        minutes=30,
        check=stopping_checks.check_stop_matcher,
        hints=(
            "__init__ has prepared a table for each stop string (self._stops) and how much of each the text ends with "
            "(self._lengths). What must happen to both for one more character?",
            "_matched(stop, table, length, character) gives the new length. A stop string is complete when its length "
            "is len(stop). Append the piece to self._held, and count where in it you are, held text included.",
            "_take(n) gives the first n characters of what is held and keeps the rest. Complete at `position`: take up "
            "to there, less the stop string unless it is included. Nothing complete: keep the longest of the lengths.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="2.a",
        title="the space that was there",
        story=tokenizer_clinic.SPACE_STORY,
        run=tokenizer_clinic.show_spaces,
        broken=tokenizer_clinic.text_of,
        check=tokenizer_clinic.check_text_of,
    ),
    BugHunt(
        id="2.b",
        title="the stop string that is overlooked",
        story=tokenizer_clinic.STOP_STORY,
        run=tokenizer_clinic.show_stop,
        broken=tokenizer_clinic.until_stop,
        check=tokenizer_clinic.check_until_stop,
    ),
    BugHunt(
        id="2.c",
        title="begun twice",
        story=tokenizer_clinic.BEGIN_STORY,
        run=tokenizer_clinic.show_begin,
        broken=tokenizer_clinic.chat_ids,
        check=tokenizer_clinic.check_chat_ids,
    ),
    BugHunt(
        id="2.d",
        title="the rule that is forgotten",
        story=tokenizer_clinic.SYSTEM_STORY,
        run=tokenizer_clinic.show_system,
        broken=tokenizer_clinic.newest_that_fit,
        check=tokenizer_clinic.check_newest_that_fit,
    ),
]
