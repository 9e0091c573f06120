"""Brings an answer under a grammar to its end before max_tokens cuts it off in the middle.

A model can go on for ever where a grammar lets it: with digits behind a point, with one more item. So, once the tokens
that are left become few, a short way to an end is looked for, and the answer is kept to tokens from which it fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
import torch
from torch import Tensor

from llmfromscratch.errors import RequestError

_LONGEST = 200  # tokens of a way to an end; longer ones are not looked for
_TRIES = 200  # masks that one step may take to try tokens one by one
_CLOSING, _SIMPLE = frozenset(b'"}]'), (b"null", b"true", b"false")


class Endings:
    """Finds a short way to an end, a token after the other, without looking ahead: closing brackets and quotes first,
    then the shortest values, long pieces of text before short ones, and what opens something new last.

    tokens: the bytes of all tokens by id; one more, behind them, stands for the end.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self._end = len(tokens)
        order = [self._end, *sorted(range(len(tokens)), key=lambda index: _preference(tokens[index]))]
        self._rank = torch.empty(len(order), dtype=torch.int32)
        self._rank[torch.tensor(order)] = torch.arange(len(order), dtype=torch.int32)
        self._bits = torch.zeros(len(tokens) // 32 + 1, dtype=torch.int32)

    def way(self, matcher: llguidance.LLMatcher, most: int) -> list[int] | None:
        """Tokens from where the matcher stands to an end, that included, at most so many; None if none is found."""
        walker, way = matcher.deep_copy(), []
        for _ in range(min(most, _LONGEST)):
            bits = mask_into(walker, self._bits)[: self._end + 1]
            if not bits.any():
                return None
            way.append(int(self._rank.masked_fill(~bits, len(self._rank)).argmin()))
            if way[-1] == self._end:
                return way
            walker.consume_token(way[-1])
        return None

    def fitting(self, matcher: llguidance.LLMatcher, bits: Tensor, way: Sequence[int], room: int) -> Tensor:
        """Of the allowed tokens, those after which an end fits into the room, as far as that can be tried: bool."""
        tried = bits[: self._end + 1].nonzero().flatten().tolist()
        kept = torch.zeros_like(bits)
        kept[way[0]] = True
        for token in tried if len(tried) * len(way) <= _TRIES else ():
            if token == self._end:
                kept[token] = True
                continue
            walker = matcher.deep_copy()
            kept[token] |= walker.consume_token(token) and self.way(walker, room - 1) is not None
        return kept


class Budget:
    """How far an answer may still wander: it looks for the end again only when it may have become too far.

    spare: tokens kept in hand at first: so much further may one token move the end away.
    """

    def __init__(self, spare: int) -> None:
        self._look_at: int | None = None  # as soon as no more tokens than these are left
        self._last: tuple[int, int] | None = None  # tokens that were left, and length of the way, when it last looked
        self._spare = spare

    def narrow(self, bits: Tensor, matcher: llguidance.LLMatcher, endings: Endings, room: int) -> Tensor:
        """The allowed tokens, or as few of them as it takes for the end to fit into `room` tokens."""
        if self._look_at is not None and room > self._look_at:
            return bits
        way = endings.way(matcher, _LONGEST)
        if way is None or len(way) > room:
            self._look_at = room // 2  # none that is short enough to be found: perhaps later
            return bits
        if self._last is not None and self._last[0] == room + 1:
            self._spare = max(self._spare, len(way) + 1 - self._last[1])
        self._last = room, len(way)
        left_over = room - len(way) - self._spare
        self._look_at = room - max(1, left_over // 4)
        return bits if left_over > 0 else endings.fitting(matcher, bits, way, room)


def mask_into(matcher: llguidance.LLMatcher, bits: Tensor) -> Tensor:
    """The library's bit mask as bools, one a token, through the room in `bits` (int32). Raises RequestError."""
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * bits.element_size())
    if matcher.is_error():
        raise RequestError(f"the constraint cannot be followed: {reason(matcher)}")
    return torch.from_numpy(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").view(bool))


def reason(matcher: llguidance.LLMatcher) -> str:
    """The library's own words, on one line."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    return " ".join(line for line in lines if line and line != "<non-verbose/>")[:300]


def _preference(text: bytes) -> tuple[int, int]:
    """The smaller, the better to end with."""
    if text and _CLOSING.issuperset(text):
        return (0 if text[:1] == b'"' else 1), -len(text)
    if text in _SIMPLE or text.isdigit():
        return 2, len(text)
    if text.isalnum() and text.isascii():
        return 3, -len(text)
    return (5 if b"{" in text or b"[" in text else 4), len(text)
