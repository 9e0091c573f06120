"""Who may look at whom, said in a few words: the sparse patterns of long texts, as masks for any attention backend.

    sliding(3)          dilated(2, 3)       sliding(2) | global_tokens(1)      blocks(3)
    ■ · · · · ·         ■ · · · · ·         ■ · · · · ·                        ■ · · · · ·
    ■ ■ · · · ·         · ■ · · · ·         ■ ■ · · · ·                        ■ ■ · · · ·
    ■ ■ ■ · · ·         ■ · ■ · · ·         ■ ■ ■ · · ·                        ■ ■ ■ · · ·
    · ■ ■ ■ · ·         · ■ · ■ · ·         ■ · ■ ■ · ·                        · · · ■ · ·
    · · ■ ■ ■ ·         ■ · ■ · ■ ·         ■ · · ■ ■ ·                        · · · ■ ■ ·
    · · · ■ ■ ■         · ■ · ■ · ■         ■ · · · ■ ■                        · · · ■ ■ ■

`a | b` sees what either sees, `a & b` what both see. A decoder never looks ahead: that is implied in every mask. All go
by positions in the text, so that a prompt may come in any chunks. What stays: every key and value is kept, unlike with
`LLM(window=...)`. What is won: what nobody looks at is not read. What it costs: the model was trained to see all.

Beltagy et al. 2020, "Longformer", section 3.1; Zaheer et al. 2020, "BigBird", section 2; Child et al. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmfromscratch.errors import RequestError


@dataclass(frozen=True, repr=False)
class Mask:
    """What all masks can do. Two masks made alike are equal; `repr` is the expression that makes one.

    sees_itself: whether every token is certain to see itself, as attention needs: it could mix nothing out of nothing.
    """

    sees_itself = False

    def rule(self, queries: Any, keys: Any) -> Any:
        """`visible`, but for what lies ahead, which may be anything."""
        raise NotImplementedError

    def visible(self, queries: Any, keys: Any) -> Any:
        """Whether the query at a position sees the key at a position: numbers, or integer tensors or arrays that
        broadcast; bool of the joint shape."""
        return (keys <= queries) & self.rule(queries, keys)

    def __or__(self, other: Mask) -> Mask:
        return Either(_parts(self, Either) + _parts(other, Either)) if isinstance(other, Mask) else NotImplemented

    def __and__(self, other: Mask) -> Mask:
        return Both(_parts(self, Both) + _parts(other, Both)) if isinstance(other, Mask) else NotImplemented


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """See `dilated`."""

    stride: int
    window: int
    sees_itself = True

    def rule(self, queries: Any, keys: Any) -> Any:
        """Whole strides back, less than `window` of them."""
        back = queries - keys
        return (back % self.stride == 0) & (back < self.stride * self.window)

    def __repr__(self) -> str:
        return f"dilated({self.stride}, {self.window})" if self.stride > 1 else f"sliding({self.window})"


@dataclass(frozen=True, repr=False)
class GlobalTokens(Mask):
    """See `global_tokens`."""

    count: int

    def rule(self, queries: Any, keys: Any) -> Any:
        """The first ones."""
        return keys < self.count

    def __repr__(self) -> str:
        return f"global_tokens({self.count})"


@dataclass(frozen=True, repr=False)
class Blocks(Mask):
    """See `blocks`."""

    size: int
    before: int
    sees_itself = True

    def rule(self, queries: Any, keys: Any) -> Any:
        """Blocks that are near enough."""
        return queries // self.size - keys // self.size <= self.before

    def __repr__(self) -> str:
        return f"blocks({self.size}, {self.before})" if self.before else f"blocks({self.size})"


@dataclass(frozen=True, repr=False)
class RandomBlocks(Mask):
    """See `random_blocks`."""

    size: int
    count: int
    seed: int

    def rule(self, queries: Any, keys: Any) -> Any:
        """The blocks that chance gave to the query's block."""
        own, asked = queries // self.size, keys // self.size
        found = asked == self._drawn(own, 0)
        for number in range(1, self.count):
            found = found | (asked == self._drawn(own, number))
        return found

    def _drawn(self, block: Any, number: int) -> Any:
        """One of the blocks 0 ... block: two steps of Lehmer's generator, so that any machine and any chunk agree."""
        start = (block * 7919 + number * 104729 + self.seed % 1000003 * 1299709) % 2147483646 + 1
        return start * 48271 % 2147483647 * 48271 % 2147483647 % (block + 1)

    def __repr__(self) -> str:
        return f"random_blocks({self.size}, {self.count}{f', {self.seed}' if self.seed else ''})"


@dataclass(frozen=True, repr=False)
class Either(Mask):
    """What at least one of the parts sees."""

    parts: tuple[Mask, ...]

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        """One part that is certain suffices."""
        return any(part.sees_itself for part in self.parts)

    def rule(self, queries: Any, keys: Any) -> Any:
        """Joined by or."""
        found = self.parts[0].rule(queries, keys)
        for part in self.parts[1:]:
            found = found | part.rule(queries, keys)
        return found

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class Both(Mask):
    """What all parts see."""

    parts: tuple[Mask, ...]

    @property
    def sees_itself(self) -> bool:  # type: ignore[override]
        """Every part has to be certain."""
        return all(part.sees_itself for part in self.parts)

    def rule(self, queries: Any, keys: Any) -> Any:
        """Joined by and."""
        found = self.parts[0].rule(queries, keys)
        for part in self.parts[1:]:
            found = found & part.rule(queries, keys)
        return found

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Either) else repr(part) for part in self.parts)


# ---- the words ---------------------------------------------------------------------------------------------------


def sliding(window: int) -> Mask:
    """The newest `window` tokens, the own one counted. Through n layers, words travel n * (window - 1) tokens far."""
    return Dilated(1, _whole("sliding: window", window))


def dilated(stride: int, window: int) -> Mask:
    """Every `stride`-th token back from the own one, `window` of them: as much to read as sliding(window), and `stride`
    times as far to see."""
    return Dilated(_whole("dilated: stride", stride), _whole("dilated: window", window))


def global_tokens(count: int) -> Mask:
    """The first `count` tokens of the text, for everyone. Too little alone: later tokens would not see themselves."""
    return GlobalTokens(_whole("global_tokens: count", count))


def blocks(size: int, before: int = 0) -> Mask:
    """The text in blocks of `size` tokens: the own block, and so many before it."""
    return Blocks(_whole("blocks: size", size), _whole("blocks: before", before, least=0))


def random_blocks(size: int, count: int, seed: int = 0) -> Mask:
    """`count` blocks of `size` tokens, drawn for each block of queries from it and all before; fewer where two draws
    agree. Short cuts through a long text, to be joined with a window and global tokens (BigBird)."""
    sizes = _whole("random_blocks: size", size), _whole("random_blocks: count", count)
    return RandomBlocks(*sizes, _whole("random_blocks: seed", seed, least=0))


def check(mask: Any) -> None:
    """Raises RequestError for what is no mask, and for one that may leave a token with nothing to look at."""
    if mask is None:
        return
    if not isinstance(mask, Mask):
        raise RequestError(f"mask is {mask!r}; expected one made of masks.sliding, masks.blocks and the like, or None.")
    if not mask.sees_itself:
        raise RequestError(
            f"mask={mask!r} may leave a token without anything to look at; every token has to see itself at least: "
            "join it with a window, as in ... | masks.sliding(1)."
        )


# ---- for the backends --------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def table(mask: Mask, start: int, new: int, device: torch.device) -> Tensor:
    """As `attention.causal_mask`, under a mask: bool [new, start + new]. Not to be written: all layers get the same."""
    with torch.inference_mode(False):  # what is kept must be good for later calls, whatever mode they come in
        queries = torch.arange(start, start + new, device=device)
        return mask.visible(queries[:, None], torch.arange(start + new, device=device))


def seen_from(mask: Mask, position: int) -> np.ndarray:
    """The positions that the query at a position sees, rising: int64 [seen]."""
    return np.flatnonzero(mask.visible(position, np.arange(position + 1)))


def _parts(mask: Mask, kind: type) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)  # type: ignore[attr-defined]


def _whole(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return value
