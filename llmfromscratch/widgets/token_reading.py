"""What a tokenizer makes of a text, read without trusting it: its tokens, their bytes, and where those differ.

A tokenizer here is anything with `encode(text) -> ids` and `token_bytes(id) -> bytes`, or a plain function that cuts
a text into pieces. What it raises or returns wrongly becomes a sentence, so that the rest can still be drawn.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmfromscratch.course import blanks


@dataclass(frozen=True)
class PlainTokenizer:
    """The smallest thing that the figures, and an incremental decoder, take for a tokenizer. Ids are below vocab_size.

    special: control token -> id. strip_first_space: the first space of all is not part of the text.
    """

    encode: Callable[[str], Sequence[int]]
    token_bytes: Callable[[int], bytes]
    vocab_size: int
    special: Mapping[str, int] = field(default_factory=dict)
    strip_first_space: bool = False


def byte_tokenizer() -> PlainTokenizer:
    """Every byte of the text in UTF-8 is a token, and its own id."""
    return PlainTokenizer(lambda text: list(to_bytes(text)), lambda index: bytes([index]), 256)


def character_tokenizer() -> PlainTokenizer:
    """Every character is a token; its id is its code point."""
    return PlainTokenizer(lambda text: [ord(c) for c in text], lambda index: to_bytes(chr(index)), 0x110000)


def to_bytes(text: str) -> bytes:
    """UTF-8; a lone surrogate, which is no character, counts as "?", as in `tokenizer.Tokenizer.encode`."""
    return text.encode("utf-8", errors="replace")


@dataclass(frozen=True)
class Token:
    """One token. id: None where the tokenizer gives pieces without numbers. content: None where it is not known.

    control: it stands for no text, like the beginning of a text. problem: what is wrong with it, or "".
    """

    id: int | None
    content: bytes | None
    control: bool = False
    problem: str = ""

    @property
    def cells(self) -> tuple[int | None, ...]:
        """Its bytes, each a place in the picture; a token without any takes one place, too."""
        return tuple(self.content) if self.content else (None,)


@dataclass(frozen=True)
class Reading:
    """The tokens of a text, laid beside the text's bytes.

    places: for each byte of the tokens its place in the text, or None if it is not in the text. wrong: the tokens, by
    number, that have such bytes against the rule or are no tokens at all. problems: sentences on what is wrong; note:
    what was added by rule, in words.
    """

    text: bytes
    tokens: tuple[Token, ...]
    places: tuple[int | None, ...]
    wrong: frozenset[int]
    problems: tuple[str, ...]
    note: str = ""

    @property
    def cells(self) -> list[int | None]:
        """The bytes of all tokens."""
        return [cell for token in self.tokens for cell in token.cells]

    @property
    def owners(self) -> list[int]:
        """For each of these bytes the number of its token."""
        return [number for number, token in enumerate(self.tokens) for _ in token.cells]

    @property
    def lost(self) -> list[tuple[int, int]]:
        """Runs of the text's bytes, (first, end), that no token has."""
        found = set(self.places)
        missing = [byte for byte in range(len(self.text)) if byte not in found]
        starts = [byte for byte in missing if byte - 1 not in missing]
        ends = [byte + 1 for byte in missing if byte + 1 not in missing]
        return list(zip(starts, ends, strict=True))


def read_tokens(tokenizer: Any, text: str) -> Reading:
    """The tokenizer's tokens for the text, checked against the text's own bytes."""
    content = to_bytes(text)
    try:
        tokens = _tokens(tokenizer, text)
    except Exception as error:  # noqa: BLE001 - a learner's code may raise anything: the picture says what it did
        return Reading(content, (), (), frozenset(), (f"encode {in_words(error)}.",))
    places = _lay_beside(tokens, content)
    reading = Reading(content, tokens, places, frozenset(), ())
    added = [number for number, place in zip(reading.owners, places, strict=True) if place is None]
    note = _added_by_rule(reading, added)
    wrong = frozenset(number for number in added if not note) | {i for i, token in enumerate(tokens) if token.problem}
    problems = _first_few(dict.fromkeys(token.problem for token in tokens if token.problem))
    problems += [] if note else _extra(reading, added)
    return replace(reading, wrong=wrong, problems=(*problems, *_missing(reading)), note=note)


def in_words(error: Exception) -> str:
    """What a function of a learner did, as the end of a sentence without its full stop."""
    if isinstance(error, NotImplementedError):
        blank = blanks.owner(error) if blanks.is_blank(error) else None
        return f"needs exercise {blank.id} ({blank.name}), which is not yet written" if blank else "is not yet written"
    return (
        f"raised {type(error).__name__}: {str(error).rstrip('.')}" if str(error) else f"raised {type(error).__name__}"
    )


def counted(number: int, what: str) -> str:
    """A number of things: "1 token", "1,200 tokens"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def piece_in_words(content: Sequence[int | None]) -> str:
    """Bytes as a quoted text where they are one, else in hexadecimal: "' the'", "<E4 BD>"."""
    known = bytes(byte for byte in content if byte is not None)
    if len(known) < len(content):
        return "<no bytes>"
    try:
        return repr(known.decode("utf-8"))
    except UnicodeDecodeError:
        return f"<{known.hex(' ').upper()}>"


def read_ids(tokenizer: Any, ids: Any) -> tuple[Token, ...]:
    """The tokens of ids, each with its bytes; what is wrong with one is its `problem`."""
    if ids is None or isinstance(ids, str | bytes):
        raise TypeError(f"a list of token ids was expected, not {ids!r:.40}")
    special = frozenset(getattr(tokenizer, "special", {}).values())
    size = getattr(tokenizer, "vocab_size", None)
    return tuple(_token(tokenizer, index, special, size) for index in ids)


def characters_of(cells: Sequence[int | None]) -> Iterator[tuple[int, int, str]]:
    """(first, end, character) over the bytes; a byte that belongs to no character comes alone, with ""."""
    at = 0
    while at < len(cells):
        for end in range(at + 1, min(at + 4, len(cells)) + 1):
            some = [cell for cell in cells[at:end] if cell is not None]
            if len(some) < end - at:
                continue
            try:
                character = bytes(some).decode("utf-8")
            except UnicodeDecodeError:
                continue
            yield at, end, character
            at = end
            break
        else:
            yield at, at + 1, ""
            at += 1


def _tokens(tokenizer: Any, text: str) -> tuple[Token, ...]:
    if hasattr(tokenizer, "encode"):
        return read_ids(tokenizer, tokenizer.encode(text))
    return tuple(_piece(piece) for piece in tokenizer(text))


def _piece(piece: Any) -> Token:
    if not isinstance(piece, str | bytes):
        return Token(None, None, problem=f"A piece is {piece!r:.40}; pieces are texts or bytes.")
    content = to_bytes(piece) if isinstance(piece, str) else piece
    return Token(None, content, problem="" if content else "A piece is empty.")


def _token(tokenizer: Any, index: Any, special: frozenset[int], size: int | None) -> Token:
    try:
        index = operator.index(index)
    except TypeError:
        return Token(None, None, problem=f"A token id is {index!r:.40}; ids are whole numbers.")
    if size is not None and not 0 <= index < size:
        return Token(index, None, problem=f"Token id {index} is outside the vocabulary (0 to {size - 1:,}).")
    try:
        content = tokenizer.token_bytes(index)
    except Exception as error:  # noqa: BLE001 - as above
        return Token(index, None, problem=f"token_bytes({index}) {in_words(error)}.")
    if not isinstance(content, bytes):
        return Token(index, None, problem=f"token_bytes({index}) returned {content!r:.40}; bytes were expected.")
    return Token(index, content, index in special)


def _lay_beside(tokens: Sequence[Token], text: bytes) -> tuple[int | None, ...]:
    """For each byte of the tokens its place in the text, or None. Little may be lost between two tokens."""
    places: list[int | None] = []
    at = 0
    for token in tokens:
        content = token.content or b""
        found = text.find(content, at, at + 8 + 5 * len(content)) if content else -1
        skipped = 0
        while content and found < 0 and skipped < len(content):  # perhaps a part of it: " Hello" where "Hello" stands
            skipped += 1
            found = at if skipped < len(content) and text.startswith(content[skipped:], at) else -1
        places += [None] * (skipped if content else 1)
        if found >= 0:
            places += range(found, found + len(content) - skipped)
            at = found + len(content) - skipped
    return tuple(places)


def _added_by_rule(reading: Reading, added: Sequence[int]) -> str:
    """Says that control tokens alone, or also one space at the front, were added; "" if nothing or something else."""
    places = reading.places
    first = next((i for i, place in enumerate(places) if place is not None), len(places))
    last = max((i for i, place in enumerate(places) if place is not None), default=-1)
    front, back, cells = reading.owners[:first], reading.owners[last + 1 :], reading.cells
    control = {number for number in added if reading.tokens[number].control}
    rest = [i for i, place in enumerate(places) if place is None and reading.owners[i] not in control]
    a_space = rest == [first - 1] and cells[first - 1] == 32
    outside = {number for number in control if number not in front and number not in back}
    if not added or outside or (rest and not a_space):
        return ""
    words = [piece_in_words(reading.tokens[number].cells) for number in sorted(control & set(front))]
    words = [" and ".join(words + ["a space"] * a_space) + " at the front"] if words or a_space else []
    ends = [piece_in_words(reading.tokens[number].cells) for number in sorted(control & set(back) - set(front))]
    return "adds " + ", ".join(words + ([" and ".join(ends) + " at the end"] if ends else []))


def _extra(reading: Reading, added: Sequence[int]) -> list[str]:
    numbers = [number for number in dict.fromkeys(added) if reading.tokens[number].content]
    if not numbers:
        return []
    token = reading.tokens[numbers[0]]
    which = f"token {numbers[0] + 1} ({piece_in_words(token.cells)})"
    if len(numbers) == 1:
        return [f"The text does not have the bytes of {which} there."]
    return [f"The text does not have the bytes of {len(numbers)} tokens there; the first is {which}."]


def _missing(reading: Reading) -> list[str]:
    lost = reading.lost
    if not lost:
        return []
    start, end = lost[0]
    what = piece_in_words(reading.text[start : min(end, start + 24)]) + (" …" if end > start + 24 else "")
    count = sum(end - start for start, end in lost)
    if len(lost) == 1:
        return [f"No token has {what}, which the text has at byte {start}."]
    return [f"No token has {count} of the text's bytes; the first: {what} at byte {start}."]


def _first_few(sentences: Mapping[str, Any], most: int = 2) -> list[str]:
    listed = list(sentences)
    rest = len(listed) - most
    return listed[:most] + ([f"And {rest} more of this kind."] if rest > 0 else [])
