"""The places of `token_borders`: which byte stands where, in which row, so that equal places stand above each other.

Places ("slots") are counted from the left over all rows. Each byte of the text has one; what a tokenizer adds to the
text gets places of its own, before the byte where it was added. x gives each place's left end in inches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmfromscratch.widgets.glyphs import character_width, hexadecimal, text_width
from llmfromscratch.widgets.token_reading import Reading, characters_of

_NARROWEST = 0.05  # inches a place takes at least
_AIR = 0.035  # inches beside a character or a label
_FULL_ENOUGH = 0.5  # of a row: a shorter one is only ended where no token needs to be cut


@dataclass(frozen=True)
class Span:
    """Something over the places start to end (exclusive): a token (id), or a character.

    character: "" for bytes that are none. shared: several tokens have a part of it. bytes: of a character, its own.
    """

    start: int
    end: int
    id: int | None = None
    character: str = ""
    bytes: tuple[int, ...] = ()
    control: bool = False
    wrong: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Layout:
    """One entry for each tokenizer in tokens, characters, bytes (place -> byte) and lost (text that no token has)."""

    x: list[float]
    rows: list[tuple[int, int]]
    tokens: list[list[Span]]
    characters: list[list[Span]]
    bytes: list[dict[int, int]]
    lost: list[list[tuple[int, int]]]


def lay_out(
    readings: Sequence[Reading], labels: tuple[bool, bool], row_width: float, text_size: float, label_size: float
) -> Layout:  # fmt: skip
    """The layout for rows of row_width inches. labels: whether ids and whether bytes are written beneath."""
    extras = _extras(readings)
    begin = _begins(len(readings[0].text), extras)
    slots = [_slots(reading, begin) for reading in readings]
    tokens = [_tokens(*pair) for pair in zip(readings, slots, strict=True)]
    characters = [_characters(*pair) for pair in zip(readings, slots, strict=True)]
    places = [
        {slot: cell for slot, cell in zip(at, reading.cells, strict=True) if cell is not None}
        for reading, at in zip(readings, slots, strict=True)
    ]
    needs = [(span.start, span.end, _text_need(span, text_size)) for line in characters for span in line]
    if labels[0]:
        needs += [
            (span.start, span.end, text_width(str(span.id), label_size) + 2 * _AIR)
            for line in tokens for span in line if span.id is not None
        ]  # fmt: skip
    if labels[1]:
        wide = text_width("DD", label_size) + _AIR
        needs += [(slot, slot + 1, wide) for line in places for slot in line]
    x = _positions(begin[-1], needs)
    newlines = {span.end for line in characters for span in line if span.character == "\n"}
    rows = list(_rows(x, row_width, tokens, characters, newlines))
    lost = [[(begin[start], begin[end - 1] + 1) for start, end in reading.lost] for reading in readings]
    return Layout(x, rows, tokens, characters, places, lost)


def _before(reading: Reading) -> list[int]:
    """For each byte of the tokens that the text does not have: before which byte of the text it stands."""
    before, at = [], 0
    for place in reading.places:
        if place is None:
            before.append(at)
        else:
            at = place + 1
    return before


def _extras(readings: Sequence[Reading]) -> dict[int, int]:
    """Byte of the text -> how many places are needed before it for what some tokenizer adds there."""
    extras: dict[int, int] = {}
    for reading in readings:
        for byte, count in Counter(_before(reading)).items():
            extras[byte] = max(extras.get(byte, 0), count)
    return extras


def _begins(length: int, extras: dict[int, int]) -> list[int]:
    """The place of each byte of the text, and at the end the number of places."""
    begins, slot = [], 0
    for byte in range(length + 1):
        slot += extras.get(byte, 0)
        begins.append(slot)
        slot += 1
    return begins


def _slots(reading: Reading, begin: Sequence[int]) -> list[int]:
    """The place of each byte of the tokens; what is added stands right before what follows it."""
    before = _before(reading)
    left, added = Counter(before), iter(before)
    slots = []
    for place in reading.places:
        if place is not None:
            slots.append(begin[place])
            continue
        byte = next(added)
        slots.append(begin[byte] - left[byte])
        left[byte] -= 1
    return slots


def _tokens(reading: Reading, slots: Sequence[int]) -> list[Span]:
    spans, at = [], 0
    for number, token in enumerate(reading.tokens):
        end = at + len(token.cells)
        spans.append(
            Span(slots[at], slots[end - 1] + 1, token.id, control=token.control, wrong=number in reading.wrong)
        )
        at = end
    return spans


def _characters(reading: Reading, slots: Sequence[int]) -> list[Span]:
    """The characters that the tokens' bytes form, whichever token they come from."""
    owners, cells = reading.owners, reading.cells
    spans = []
    for start, end, character in characters_of(cells):
        known = tuple(cell for cell in cells[start:end] if cell is not None)
        wrong = not character or any(owner in reading.wrong for owner in owners[start:end])
        spans.append(
            Span(slots[start], slots[end - 1] + 1, character=character, bytes=known, wrong=wrong,
                 control=reading.tokens[owners[start]].control, shared=owners[start] != owners[end - 1])
        )  # fmt: skip
    return spans


def _text_need(span: Span, size: float) -> float:
    wide = character_width(span.character, size) if span.character else text_width(hexadecimal(span.bytes), 0.65 * size)
    return wide + _AIR + (0.1 if span.shared else 0)


def _positions(count: int, needs: Sequence[tuple[int, int, float]]) -> list[float]:
    """The left end of each place: as narrow as the needs (first, end, inches) allow, the rest spread evenly."""
    widths = [_NARROWEST] * count
    for start, end, need in sorted(needs, key=lambda need: (need[1] - need[0], need)):
        more = need - sum(widths[start:end])
        if more > 0:
            widths[start:end] = [width + more / (end - start) for width in widths[start:end]]
    x = [0.0]
    for width in widths:
        x.append(x[-1] + width)
    return x


def _rows(
    x: Sequence[float], width: float, tokens: Sequence[Sequence[Span]], characters: Sequence[Sequence[Span]],
    newlines: set[int],
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Rows of places: ended where a token of every line ends, or else between two characters."""
    last = len(x) - 1
    lines = [line for line in tokens if line]
    between = _common([line for line in characters if line]) | {last}
    whole = _common(lines) & between | {last}
    first = 0
    while first < last:
        reach = [end for end in range(first + 1, last + 1) if x[end] - x[first] <= width]
        ends = [end for end in reach if end in whole]
        good = [end for end in ends if x[end] - x[first] >= _FULL_ENOUGH * width or end == last]
        any_end = [end for end in reach if end in between] or reach or [first + 1]
        end = min((end for end in ends if end in newlines), default=0) or (good or any_end)[-1]
        yield first, end
        first = end


def _common(lines: Sequence[Sequence[Span]]) -> set[int]:
    return set.intersection(*({span.end for span in line} for line in lines)) if lines else set()
