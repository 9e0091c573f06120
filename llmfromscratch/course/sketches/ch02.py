"""Chapter 2's sketch: byte-pair merges, the plain way. The engine's `merge_pieces` gives the same, in less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def merge_plain(pieces: Sequence[str], ranks: Mapping[tuple[str, str], float]) -> list[str]:
    """Joins neighbours, one pair at a time, until no pair of them has a rank.

    ranks: pairs of pieces, the best lowest; 0 is a rank like any other, and a pair that is not there is never joined.
    Each time the pair of the lowest rank is joined, of several with that rank the leftmost; then all the pairs are
    looked at again, because the new piece may make a better one with its neighbours. `pieces` stays as it is.

    Example: "t", "h", "e" with ranks {("h", "e"): 0, ("t", "h"): 1, ("t", "he"): 2} is "the"; without the last of the
    three it is "t", "he".
    """
    pieces = list(pieces)
    while ranked := [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]:
        _, place = min(ranked)  # of equal ranks the smallest place, which is the leftmost
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return pieces
