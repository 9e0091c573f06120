"""The check of chapter 6's online softmax: one tile against sums number by number, all tiles against the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, Tolerance
from llmfromscratch.course.exercises.attention_checks import causal, random_numbers
from llmfromscratch.course.exercises.fusing_checks import in_parts
from llmfromscratch.course.exercises.in_engine import in_engine

_HIDDEN = -math.inf
_NAMES = ("mixed", "top", "total")

# ---- one tile ----------------------------------------------------------------------------------------------------


def nothing_yet(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """mixed, top and total before the first tile; shape: [..., rows, head_dim]."""
    mixed = torch.zeros(shape, dtype=dtype)
    return mixed, torch.full(shape[:-1], _HIDDEN, dtype=dtype), torch.zeros(shape[:-1], dtype=dtype)


def _case(text: str, state: tuple[Any, Any, Any], scores: Any, values: Any) -> Case:
    given = [part if isinstance(part, Tensor) else torch.tensor(part) for part in (*state, scores, values)]
    return Case(text, *given)


def _random_case(text: str, shape: tuple[int, ...], tile: int, scale: float, dtype: torch.dtype, seed: int) -> Case:
    """A tile after another one; shape: [..., rows, head_dim]."""
    scores = scale * random_numbers(*shape[:-1], 2 * tile, seed=seed).to(dtype)
    scores[random_numbers(*scores.shape, seed=seed + 1) > 0.8] = _HIDDEN
    scores[..., 0] = 0  # so every row has seen something when the second tile comes
    values = random_numbers(*shape[:-2], 2 * tile, shape[-1], seed=seed + 2).to(dtype)
    before = sum_by_sum(*nothing_yet(*shape, dtype=dtype), scores[..., :tile], values[..., :tile, :])
    return Case(text, *before.values(), scores[..., tile:], values[..., tile:, :])


def tile_cases() -> list[Case]:
    """What `fold_tile` is tried on: one fact of the online softmax after the other."""
    first = ([[10.0]], [1.0], [1.0])
    two = ([[10.0, 1.0], [4.0, 2.0]], [1.0, 5.0], [1.0, 2.0])
    unseen = ([[0.0]], [_HIDDEN], [0.0])
    return [
        _case("nothing so far, a tile of one: score 0, value 10", unseen, [[0.0]], [[10.0]]),
        _case("nothing so far, a tile of one: score 1, value 10", unseen, [[1.0]], [[10.0]]),
        _case("nothing so far, scores 1 and 3, values 10 and 20", unseen, [[1.0, 3.0]], [[10.0], [20.0]]),
        _case("top 1, total 1, mixed 10; then score 1, value 20", first, [[1.0]], [[20.0]]),
        _case("top 1, total 1, mixed 10; then score 3, value 20", first, [[3.0]], [[20.0]]),
        _case("top 3, total 1.135, mixed 21.35; then score 2, value 30", ([[21.35]], [3.0], [1.135]), [[2.0]],
              [[30.0]]),
        _case("top 1, total 1, mixed 10; then a hidden token (-inf), value 20", first, [[_HIDDEN]], [[20.0]]),
        _case("nothing so far, then a hidden token (-inf), value 20", unseen, [[_HIDDEN]], [[20.0]]),
        _case("top 1, total 1, mixed 10; then scores 2, 3 and -inf, values 20, 30, 40", first,
              [[2.0, 3.0, _HIDDEN]], [[20.0], [30.0], [40.0]]),
        _case("two rows with tops 1 and 5; then scores [2, 0] and [4, 6], values [1, 2] and [3, 4]", two,
              [[2.0, 0.0], [4.0, 6.0]], [[1.0, 2.0], [3.0, 4.0]]),
        _case("two rows with tops 1 and -inf (nothing seen); then scores [2, 3] and [-inf, -inf], values 20 and 30",
              ([[10.0], [0.0]], [1.0, _HIDDEN], [1.0, 0.0]), [[2.0, 3.0], [_HIDDEN, _HIDDEN]], [[20.0], [30.0]]),
        _case("top 900, total 1, mixed 10; then score 1000, value 20", ([[10.0]], [900.0], [1.0]), [[1000.0]],
              [[20.0]]),
        _case("top -1000, total 1, mixed 10; then score -1001, value 20", ([[10.0]], [-1000.0], [1.0]), [[-1001.0]],
              [[20.0]]),
        _random_case("2 heads of 3 rows, a tile of 4", (2, 3, 5), 4, 3.0, torch.float32, 1),
        _random_case("4 rows, a tile of 4 with a head dim of 4, float64", (4, 4), 4, 2.0, torch.float64, 4),
        _random_case("2 heads of 5 rows, a tile of 7, scores of some hundreds", (2, 5, 8), 7, 300.0, torch.float32, 7),
    ]  # fmt: skip


def check_fold_tile(fold_tile: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """Against sums in Python's numbers; then tile after tile in the engine's attention, against the softmax."""
    compare(
        in_parts(fold_tile, *_NAMES),
        sum_by_sum,
        tile_cases(),
        expected="mixed, top and total over the tokens so far and those of the tile, all powers measured from the new "
        "top",
        mistakes=combined(_folded, _TILE_MISTAKES, at_once=2),
        diagnose=_of_three,
        explain=_of_max,
        tolerance=Tolerance(),
    )
    with in_engine("optimization", "fold_tile", fold_tile) as engine:
        compare(
            engine.tiled_attention,
            in_one_go,
            attention_cases(),
            expected="attention in tiles, with your fold_tile in it, to be softmax(scores) @ values",
            tolerance=Tolerance(relative=2e-5),
        )


def sum_by_sum(mixed: Tensor, top: Tensor, total: Tensor, scores: Tensor, values: Tensor) -> NamedParts:
    """The three after the tile: what was so far counts as one token of the score top + log(total); every power is
    taken by itself, in Python's numbers."""
    rows = [sum_of_row(*row) for row in zip(*_rows(mixed, top, total, scores, values), strict=True)]
    found = [torch.tensor(part, dtype=torch.float64).to(mixed.dtype) for part in zip(*rows, strict=True)]
    return NamedParts(zip(_NAMES, [found[0].view(mixed.shape), *(f.view(top.shape) for f in found[1:])], strict=True))


def _rows(mixed: Tensor, top: Tensor, total: Tensor, scores: Tensor, values: Tensor) -> list[list[Any]]:
    each = values.unsqueeze(-3).expand(*scores.shape, values.shape[-1])
    return [
        mixed.reshape(-1, mixed.shape[-1]).tolist(), top.reshape(-1).tolist(), total.reshape(-1).tolist(),
        scores.reshape(-1, scores.shape[-1]).tolist(), each.reshape(-1, *each.shape[-2:]).tolist(),
    ]  # fmt: skip


def sum_of_row(
    mixed: list[float], top: float, total: float, scores: list[float], values: list[list[float]]
) -> tuple[list[float], float, float]:
    """One row: mixed, top, total after the tile."""
    new_top = max([top, *scores])
    factors = [(math.exp(top - new_top) if top > _HIDDEN else 0.0, mixed, total)]
    factors += [
        (math.exp(score - new_top), value, 1.0) for score, value in zip(scores, values, strict=True) if score > _HIDDEN
    ]
    sums = [math.fsum(factor * part[d] for factor, part, _ in factors) for d in range(len(mixed))]
    return sums, new_top, math.fsum(factor * count for factor, _, count in factors)


# ---- all tiles ---------------------------------------------------------------------------------------------------


def attention_cases() -> list[Case]:
    """What the engine's tiled attention is tried on: queries, keys, values, visible, tile."""

    def inputs(new: int, context: int, heads: int, kv: int, dim: int, seed: int, scale: float = 1.0) -> list[Tensor]:
        queries = random_numbers(new, heads, dim, seed=seed, scale=scale)
        return [queries, *random_numbers(2, context, kv, dim, seed=seed + 50, scale=scale)]

    late = torch.ones(2, 9, dtype=torch.bool)
    late[0, :5] = False  # the first row sees nothing in the first tiles that the second row sees
    return [
        Case("one head, one query on 4 tokens in tiles of 2", *inputs(1, 4, 1, 1, 4, 1), None, 2),
        Case("3 queries after 2 tokens, causal, in tiles of 2", *inputs(3, 5, 2, 2, 4, 2), causal(2, 3), 2),
        Case("a row that sees nothing until token 5, in tiles of 2", *inputs(2, 9, 2, 1, 4, 3), late, 2),
        Case("9 heads on 3 pairs, 10 queries, in tiles of 4", *inputs(10, 10, 9, 3, 8, 4), causal(0, 10), 4),
        Case("scores of thousands, in tiles of 3", *inputs(4, 11, 2, 1, 4, 5, 40.0), causal(7, 4), 3),
    ]


def in_one_go(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, tile: int) -> Tensor:
    """Attention by torch's softmax over all scores, in float64."""
    group = queries.shape[1] // keys.shape[1]
    wide = [part.double().repeat_interleave(group, 1) for part in (keys, values)]
    scores = torch.einsum("nhd,chd->hnc", queries.double(), wide[0]) / math.sqrt(queries.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, _HIDDEN)
    return torch.einsum("hnc,chd->nhd", scores.softmax(-1), wide[1]).to(queries.dtype)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def _of_three(got: Any, want: Any) -> str:
    if isinstance(got, Tensor | tuple | list):
        return "three things come back: mixed, top and total, in this order"
    if isinstance(got, dict) and any(part.isnan().any() for part in got.values() if isinstance(part, Tensor)):
        return _NAN
    return ""


def _of_max(error: BaseException, case: Case) -> str:
    text = str(error)
    if "return_types" in text:
        return "max along a dimension gives values and indices: take amax, or .values"
    if isinstance(error, RuntimeError) and ("must match" in text or "cannot be multiplied" in text):
        return "one number for each row meets a table: unsqueeze(-1) makes a column of it"
    return ""


_NAN = (
    "NaN for a row that has seen nothing: -inf minus -inf; take 0 in the place of a top that is -inf before you "
    "subtract it"
)
_NOT_SHRUNK = "is not shrunk when a larger score turns up: what was summed was measured from the old top"
_OWN_TOP = "the tile's powers are measured from the tile's own largest score; all are measured from the new top"
_TILE_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (f"mixed {_NOT_SHRUNK}", {"shrink_mixed": lambda old, new: torch.ones_like(old)}),
    (f"total {_NOT_SHRUNK}", {"shrink_total": lambda old, new: torch.ones_like(old)}),
    ("neither mixed nor total is shrunk when a larger score turns up: they were measured from the old top",
     {"shrink_mixed": lambda old, new: torch.ones_like(old), "shrink_total": lambda old, new: torch.ones_like(old)}),
    ("the sign is wrong: exp(new top - old top) lets the old sums grow; they shrink by exp(old top - new top)",
     {"shrink_mixed": lambda old, new: (new - old).exp(), "shrink_total": lambda old, new: (new - old).exp()}),
    ("the old sums shrink by exp(-new top); they are measured from the old top, so by exp(old top - new top)",
     {"shrink_mixed": lambda old, new: (-new).exp(), "shrink_total": lambda old, new: (-new).exp()}),
    ("the old sums shrink by the difference of the tops; by e to the power of it",
     {"shrink_mixed": lambda old, new: old - new, "shrink_total": lambda old, new: old - new}),
    ("top is the tile's largest score; the largest so far may be an older one",
     {"top": lambda top, scores: scores.amax(-1)}),
    ("top stays what it was; a larger score raises it", {"top": lambda top, scores: top}),
    ("the old top comes back; the powers are measured from the new one", {"returned": lambda old, new: old}),
    ("where nothing was seen top becomes 0; it stays -inf: a 0 would count as a score that somebody had",
     {"returned": lambda old, new: new.masked_fill(new == _HIDDEN, 0)}),
    ("one top is taken for all rows; each row has its own",
     {"top": lambda top, scores: torch.maximum(top, scores.amax()).amax().expand_as(top)}),
    ("one largest score of the tile is taken for all rows; each row has its own",
     {"top": lambda top, scores: torch.maximum(top, scores.amax())}),
    (_NAN, {"guard": False}),
    (_OWN_TOP, {"powers": lambda scores, seen, top: (scores - scores.amax(-1, keepdim=True)).exp()}),
    (_OWN_TOP, {"powers": lambda scores, seen, top: (scores - _finite(scores.amax(-1, keepdim=True))).exp()}),
    ("the tile's powers are measured from the old top; all are measured from the new one",
     {"powers": lambda scores, seen, top: (scores - _finite(top.unsqueeze(-1))).exp()}),
    ("the top is not taken off the scores: e**1000 is infinite",
     {"powers": lambda scores, seen, top: scores.exp()}),
    ("the tile gets a softmax of its own; only in the end is anything divided by a sum",
     {"powers": lambda scores, seen, top: scores.softmax(-1)}),
    ("powers of 2 in place of powers of e", {"powers": lambda scores, seen, top: (scores - seen).exp2()}),
    ("the sum runs over the rows; each row sums its own powers, along the last dimension",
     {"add": lambda powers, total: powers.sum(-2)}),
    ("the powers of all rows are summed; each row has its own sum", {"add": lambda powers, total: powers.sum()}),
    ("total counts the tokens; it sums their powers",
     {"add": lambda powers, total: torch.full_like(total, powers.shape[-1])}),
    ("total takes in the tile's largest power; it sums all of them", {"add": lambda powers, total: powers.amax(-1)}),
    ("the tile's powers are not added to total", {"add": lambda powers, total: 0 * total}),
    ("mixed and total come back as they were: the tile is not taken in",
     {"add": lambda powers, total: 0, "weigh": lambda powers, scores: 0 * powers,
      "shrink_mixed": lambda old, new: torch.ones_like(old), "shrink_total": lambda old, new: torch.ones_like(old)}),
    ("the tile's values are not added to mixed", {"weigh": lambda powers, scores: 0 * powers}),
    ("one number for each row meets the table of mixed: unsqueeze(-1) makes a column of it",
     {"column": lambda factor: factor}),
    ("total loses what was summed before", {"shrink_total": lambda old, new: 0 * _finite(old)}),
    ("mixed loses what was summed before", {"shrink_mixed": lambda old, new: 0 * _finite(old)}),
    ("mixed is divided by total in each tile; that comes once, in the end, or the next tile meets a mean, not a sum",
     {"finish": lambda mixed, total: mixed / total.unsqueeze(-1)}),
    ("mixed is divided by total in each tile; that comes once, in the end, or the next tile meets a mean, not a sum",
     {"finish": lambda mixed, total: mixed / total.unsqueeze(-1).clamp(min=1e-30)}),
    ("the values are weighed by the scores; by their powers", {"weigh": lambda powers, scores: scores}),
    ("top and total are exchanged: mixed, top, total is the order", {"order": (0, 2, 1)}),
    ("total comes first: mixed, top, total is the order", {"order": (2, 1, 0)}),
    ("top comes first: mixed, top, total is the order", {"order": (1, 0, 2)}),
    ("top comes first: mixed, top, total is the order", {"order": (1, 2, 0)}),
]  # fmt: skip


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == _HIDDEN, 0)


def _shrink(old: Tensor, new: Tensor) -> Tensor:
    return (old - new).exp()


def _folded(
    top: Callable[[Tensor, Tensor], Tensor] = lambda top, scores: torch.maximum(top, scores.amax(-1)),
    shrink_mixed: Callable[[Tensor, Tensor], Tensor] = _shrink,
    shrink_total: Callable[[Tensor, Tensor], Tensor] = _shrink,
    guard: bool = True,
    powers: Callable[..., Tensor] = lambda scores, seen, top: (scores - seen).exp(),
    add: Callable[[Tensor, Tensor], Tensor] = lambda powers, total: powers.sum(-1),
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda powers, scores: powers,
    finish: Callable[[Tensor, Tensor], Tensor] = lambda mixed, total: mixed,
    returned: Callable[[Tensor, Tensor], Tensor] = lambda old, new: new,
    column: Callable[[Tensor], Tensor] = lambda factor: factor.unsqueeze(-1),
    order: tuple[int, int, int] = (0, 1, 2),
) -> Callable[..., NamedParts]:
    """The fold, with mistakes switched on; a row that has seen nothing is guarded unless that is the mistake."""

    def run(mixed: Tensor, so_far: Tensor, total: Tensor, scores: Tensor, values: Tensor) -> NamedParts:
        new_top = top(so_far, scores)
        seen = _finite(new_top) if guard else new_top
        tile = powers(scores, seen.unsqueeze(-1), so_far)
        new_mixed = mixed * column(shrink_mixed(so_far, seen)) + weigh(tile, scores) @ values
        new_total = total * shrink_total(so_far, seen) + add(tile, total)
        found = finish(new_mixed, new_total), returned(so_far, new_top), new_total
        return NamedParts(zip(_NAMES, [found[place] for place in order], strict=True))

    return run
