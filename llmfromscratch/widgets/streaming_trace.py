"""A decoder fed token by token, beside what a right one would give: the facts that `streaming_buffer` draws.

The right text comes from Python's own incremental UTF-8 decoder: a character is certain when its last byte is there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmfromscratch.widgets.token_reading import PlainTokenizer, Token, in_words, read_ids, to_bytes

BROKEN = "\ufffd"


@dataclass(frozen=True)
class Step:
    """What one call of the decoder did. token: what was pushed; None for the flush at the end.

    received: the bytes of all tokens so far; given: all text so far; new: this call's part of it; certain: what a right
    decoder would have given by now; problem: what is wrong with this call, as a sentence, or "".
    """

    token: Token | None
    received: bytes
    given: str
    new: str
    certain: str
    problem: str = ""

    @property
    def waiting(self) -> bytes | None:
        """The bytes that came and were not given out; None if the text given out is not the text of the bytes."""
        if not self.certain.startswith(self.given):
            return None
        return self.certain[len(self.given) :].encode("utf-8") + self.owed

    @property
    def right_bytes(self) -> int:
        """How many bytes came for the text that was given out rightly, up to the first difference."""
        return len(self.certain[: _agreement(self.given, self.certain)].encode("utf-8"))

    @property
    def held_back(self) -> bool:
        """Whether all that is wrong is that something certain has not been given out yet."""
        return self.token is not None and self.given != self.certain and self.certain.startswith(self.given)

    @property
    def owed(self) -> bytes:
        """The bytes that ought to wait: those of a character that is not complete, if no flush has come."""
        return b"" if self.token is None else _unfinished(self.received)


@dataclass(frozen=True)
class Stream:
    """Tokens on their way into a decoder. skip: bytes at the front that are not part of the text by rule."""

    tokenizer: Any
    tokens: tuple[Token, ...]
    skip: int = 0


def stream_of(example: Any, tokenizer: Any) -> Stream:
    """The stream of a text, of ids, or of tokens as bytes, for which a tokenizer of their own is made."""
    given = tokenizer.encode(example) if isinstance(example, str) else list(example)
    if not isinstance(example, str) and given and all(isinstance(token, bytes) for token in given):
        tokenizer, given = PlainTokenizer(lambda text: [], given.__getitem__, len(given)), range(len(given))
    tokens = read_ids(tokenizer, given)
    content = b"".join(token.content or b"" for token in tokens if not token.control)
    strips = content.startswith(b" ") and bool(getattr(tokenizer, "strip_first_space", False))
    added = isinstance(example, str) and content == b" " + to_bytes(example)
    return Stream(tokenizer, tokens, int(strips or added))


def trace(stream: Stream, make: Callable[[Any], Any]) -> list[Step]:
    """All steps of a new decoder, made by make(tokenizer): a push for each id, then the flush.

    Ends early at a call that raises, or that returns no text. Raises what making the decoder raises.
    """
    skip = stream.skip
    decoder, right = make(stream.tokenizer), codecs.getincrementaldecoder("utf-8")(errors="replace")
    steps: list[Step] = []
    received, given, certain = b"", "", ""
    for token in [*stream.tokens, None]:
        content = b"" if token is None or token.control else token.content or b""
        content, skip = content[skip:], max(0, skip - len(content))
        received += content
        certain += right.decode(content, final=token is None)
        call = "flush()" if token is None else f"push({token.id})"
        try:
            new = decoder.flush() if token is None else decoder.push(token.id)
        except Exception as error:  # noqa: BLE001 - a learner's code may raise anything: the picture says what it did
            new, problem = "", f"{call} {in_words(error)}."
        else:
            problem = "" if isinstance(new, str) else f"{call} returned {new!r:.40}; a text was expected."
        stop = bool(problem)
        new = new if isinstance(new, str) else ""
        before = steps[-1].given if steps else ""
        given += new
        last = token is None
        problem = problem or (token.problem if token else "") or _problem(before, new, given, certain, last)
        steps.append(Step(token, received, given, new, certain, problem))
        if stop:
            break
    return steps


def wrong_characters(step: Step) -> set[int]:
    """Which characters of the given text are wrong: broken ones that ought to be whole, else all after a difference."""
    start = _agreement(step.given, step.certain)
    if start == len(step.given):
        return set()
    broken = {i for i, character in enumerate(step.given) if character == BROKEN and i >= start}
    return broken if broken and BROKEN not in step.certain else set(range(start, len(step.given)))


def _problem(before: str, new: str, given: str, certain: str, last: bool) -> str:
    """What is wrong with this call; a difference is said once, by the call that made it."""
    if given == certain:
        return ""
    if certain.startswith(given):
        rest = certain[len(given) :]
        return f"The flush loses {rest!r}." if last else f"Held back, though certain: {rest!r}."
    start = _agreement(given, certain)
    if start < len(before):
        return "A broken character leaves the decoder." if BROKEN in new and BROKEN not in certain else ""
    if BROKEN in new and given[start] == BROKEN:
        return "A broken character leaves the decoder: its bytes had not all come, or came alone."
    what = f"{certain[start:]!r} was expected" if certain[start:] else "nothing was expected"
    return f"The decoder gives {given[start:]!r} where {what}."


def _agreement(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _unfinished(content: bytes) -> bytes:
    """The bytes at the end that may still become a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(content)
    return decoder.getstate()[0]
