"""Merging a very long word (a megabyte without spaces) block by block, with the ids of merging it at once.

A block's lists stay in the processor's cache, which halves the time. Why it is exact: merges are done in the order of
(rank, place), and those of two neighbouring tokens take the same course alone and inside a longer text, up to the first
that reaches across a border. So tokens in a row are the merges of their whole text if and only if each two neighbours
are the merges of theirs. Inside a block all neighbours are; where two blocks meet, as much as need be is merged anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

Ranks = Mapping[tuple[str, str], float]
Merge = Callable[[Sequence[str], Ranks], list[str]]

BLOCK = 4096  # pieces


def merge_long(pieces: Sequence[str], ranks: Ranks, merge: Merge) -> list[str]:
    """What merge(pieces, ranks) returns, for any number of pieces; none of them may be empty."""
    if len(pieces) <= BLOCK:
        return merge(pieces, ranks)
    ends = list(accumulate(map(len, pieces), initial=0))

    def merged(start: int, end: int) -> list[str]:
        """The tokens of the text between two characters, where pieces begin and end."""
        return merge(pieces[bisect_left(ends, start) : bisect_left(ends, end)], ranks)

    tokens: list[str] = []
    for first in range(0, len(pieces), BLOCK):
        block = merge(pieces[first : first + BLOCK], ranks)
        if tokens:
            _append(tokens, block, ends[first], merged)
        else:
            tokens = block
    return tokens


def _append(tokens: list[str], block: list[str], border: int, merged: Callable[[int, int], list[str]]) -> None:
    """Adds the tokens of the next block, which begins at the character `border`, to those before it."""
    left = right = 1  # so many tokens on either side of the border are merged anew
    while True:
        start, end = border - sum(map(len, tokens[-left:])), border + sum(map(len, block[:right]))
        middle = merged(start, end)
        before, after = tokens[-left - 1 : -left], block[right : right + 1]
        left_holds = not before or merged(start - len(before[0]), start + len(middle[0])) == [before[0], middle[0]]
        right_holds = not after or merged(end - len(middle[-1]), end + len(after[0])) == [middle[-1], after[0]]
        if left_holds and right_holds:
            tokens[-left:] = [*middle, *block[right:]]
            return
        left, right = left if left_holds else 2 * left, right if right_holds else 2 * right
