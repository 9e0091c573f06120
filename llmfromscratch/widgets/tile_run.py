"""Attention in tiles, recorded tile by tile, on a problem that fits on a page: what `attention_tiles` draws.

What a fold gives is compared with its definition, computed here in float64 over all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOKENS, HEAD_DIM = 24, 6
QUERIES = tuple(range(2, TOKENS, 3))  # the positions of the tokens that look
SIZES = (2, 3, 4, 6, 12)  # tokens of a tile; all divide TOKENS
WINDOW = 12
SCORES = ("of random vectors", "rising", "falling", "in the hundreds")
MASKS = ("all before it", f"the newest {WINDOW}")
Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
_NAMES = ("mixed", "top", "total")
_CLOSE = 1e-4  # rounding is far smaller, mistakes are far larger


@dataclass(frozen=True)
class Sums:
    """mixed: [queries, head_dim], top and total: [queries], as in `optimization.fold_tile`."""

    mixed: Tensor
    top: Tensor
    total: Tensor

    @property
    def output(self) -> Tensor:
        """What attention gives for the tokens so far: [queries, head_dim]; NaN where nothing was seen."""
        return self.mixed / self.total.unsqueeze(-1)


@dataclass(frozen=True)
class TileRun:
    """scores: float32 [queries, tokens], -inf where a query may not look; values: float32 [tokens, head_dim].

    sums: after 0, 1, ... tiles, as the fold gave them; expected: the same in float64 by definition. problems: sentences
    on the first tile that went wrong, whose number is `wrong` (from 1), or 0.
    """

    size: int
    scores: Tensor
    values: Tensor
    sums: tuple[Sums, ...]
    expected: tuple[Sums, ...]
    wrong: int
    problems: tuple[str, ...]

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return TOKENS // self.size

    def raised(self, tile: int, query: int) -> bool:
        """Whether this tile (from 1) brought the query a larger score than it had seen before, its first ones aside."""
        before, now = self.sums[tile - 1].top[query], self.sums[tile].top[query]
        return bool(before > -torch.inf and now > before)


def run_tiles(fold_tile: Fold, scores: str = SCORES[0], mask: str = MASKS[1], size: int = 4) -> TileRun:
    """Folds tile after tile. scores, mask: of SCORES and MASKS. Raises ValueError for what a fold may not return."""
    shown, values = make_scores(scores, mask), make_values()
    sums = [Sums(torch.zeros(len(QUERIES), HEAD_DIM), *_nothing())]
    expected = [by_definition(shown, values, 0)]
    wrong, problems = 0, list[str]()
    for first in range(0, TOKENS, size):
        tile, part = first // size + 1, slice(first, first + size)
        sums.append(_folded(fold_tile, sums[-1], shown[:, part], values[part], tile))
        expected.append(by_definition(shown, values, first + size))
        if not problems:
            problems = _compare(sums[-2], sums[-1], expected[-1], shown[:, part], tile)
            wrong = tile if problems else 0
    return TileRun(size, shown, values, tuple(sums), tuple(expected), wrong, tuple(problems))


def make_scores(kind: str, mask: str) -> Tensor:
    """Scores [queries, tokens] of one of SCORES under one of MASKS; the same ones every time."""
    generator = torch.Generator().manual_seed(55)
    scores = 1.5 * torch.randn(len(QUERIES), TOKENS, generator=generator)
    positions = torch.tensor(QUERIES).unsqueeze(-1) - torch.arange(TOKENS)
    if kind == "in the hundreds":
        scores = 150 + 40 * scores
    elif kind != SCORES[0]:
        slope = torch.linspace(-3, 3, TOKENS) if kind == "rising" else torch.linspace(3, -3, TOKENS)
        scores = slope + 0.2 * scores
    hidden = (positions < 0) | ((positions >= WINDOW) if mask == MASKS[1] else torch.zeros(1, dtype=torch.bool))
    return scores.masked_fill(hidden, -torch.inf)


def make_values() -> Tensor:
    """Values [tokens, head_dim]: waves of different lengths, so that every token has its own."""
    tokens, waves = torch.arange(TOKENS).unsqueeze(-1), torch.arange(1, HEAD_DIM + 1)
    return torch.sin(tokens * waves * 0.4)


def by_definition(scores: Tensor, values: Tensor, tokens: int) -> Sums:
    """The sums over the first `tokens` tokens, all at once, in float64."""
    part = scores[:, :tokens].double()
    top = part.amax(dim=-1) if tokens else torch.full((len(scores),), -torch.inf, dtype=torch.float64)
    powers = torch.exp(part - top.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1))
    return Sums(powers @ values[:tokens].double(), top, powers.sum(dim=-1))


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.full((len(QUERIES),), -torch.inf), torch.zeros(len(QUERIES))


def _folded(fold_tile: Fold, before: Sums, scores: Tensor, values: Tensor, tile: int) -> Sums:
    given = [each.clone() for each in (before.mixed, before.top, before.total, scores, values)]
    returned: Any = fold_tile(*given)  # clones: a fold that writes into them must not change what is drawn
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise ValueError(f"fold_tile returned {_kind(returned)} at tile {tile}; mixed, top and total were expected.")
    for name, new, old in zip(_NAMES, returned, given, strict=False):
        if not isinstance(new, Tensor) or new.shape != old.shape:
            raise ValueError(f"fold_tile returned {_kind(new)} for {name} at tile {tile}; "
                             f"a tensor {list(old.shape)} was expected.")  # fmt: skip
    return Sums(*(each.detach().float().clone() for each in returned))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{len(value)} things" if isinstance(value, tuple | list) else f"{value!r:.40}"


# ---- what went wrong ---------------------------------------------------------------------------------------------


def _compare(before: Sums, got: Sums, expected: Sums, scores: Tensor, tile: int) -> list[str]:
    """A sentence for each of top, total and mixed that is not what its definition says."""
    said = []
    top = _differing(got.top, expected.top)
    if len(top):
        query = int(top[0])
        new, wanted = float(got.top[query]), float(expected.top[query])
        why = ", the largest score of this tile alone" if new == float(scores[query].amax()) else ""
        said.append(f"Tile {tile}, query {query + 1}: top is {new:.2f}{why}; "
                    f"the largest score so far is {wanted:.2f}{_more(top)}.")  # fmt: skip
    total = _differing(got.total, expected.total)
    if len(total):
        query = int(total[0])
        new, wanted = float(got.total[query]), float(expected.total[query])
        said.append(f"Tile {tile}, query {query + 1}: total is {_number(new)}; exp(score - top) over all tokens so far "
                    f"adds up to {wanted:.4g}{_cause(before, got, scores, query)}{_more(total)}.")  # fmt: skip
    mixed = _differing(got.mixed, expected.mixed)
    if len(mixed) and not len(top):
        query = int(mixed[0])
        said.append(f"Tile {tile}, query {query + 1}: mixed is not the sum of exp(score - top) * value over all "
                    f"tokens so far{_more(mixed)}.")  # fmt: skip
    return said


def _cause(before: Sums, got: Sums, scores: Tensor, query: int) -> str:
    """The likeliest mistake behind a total, as the end of a sentence."""
    old, new = before.total[query].double(), got.total[query].double()
    if before.top[query] == -torch.inf and scores[query].amax() == -torch.inf:
        return ": this query has seen nothing yet, and -inf minus -inf is NaN" if new.isnan() else ""
    top = max(float(before.top[query]), float(scores[query].amax()))
    powers = torch.exp(scores[query].double() - top).sum()
    if torch.isclose(new, old + powers, rtol=_CLOSE) and old > 0:
        return ": as if what was summed before had not shrunk by exp(old top - new top)"
    return ": as if only this tile counted" if torch.isclose(new, powers, rtol=_CLOSE) else ""


def _number(value: float) -> str:
    return "NaN" if value != value else f"{value:.4g}"


def _differing(got: Tensor, expected: Tensor) -> Tensor:
    """The queries at which two tensors part; infinities are equal to themselves, NaN to nothing."""
    same = (got.double() == expected) | ((got.double() - expected).abs() <= _CLOSE * (1 + expected.abs()))
    same &= expected.isfinite() | (got.double() == expected)
    return (~same.reshape(len(QUERIES), -1).all(dim=-1)).nonzero().flatten()


def _more(queries: Tensor) -> str:
    return f" (and for {len(queries) - 1} more)" if len(queries) > 1 else ""
