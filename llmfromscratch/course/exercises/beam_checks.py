"""The check of chapter 5's best beams, against a sorted list of all ways, and in a search over every text."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance


def check_best_beams(best_beams: Callable[..., Any]) -> None:
    """Against a sorted list of all ways; then a small search that looks at every text there is."""
    compare(
        best_beams,
        all_ways,
        _forks(),
        expected="the `count` ways with the largest sums, as (score, beam, token), the best first; of equal ones the "
        "lower beam, then the lower token",
        mistakes=combined(_ranked, _RANKED, at_once=2),
        diagnose=_of_ways,
        explain=_of_columns,
        tolerance=Tolerance(relative=1e-6),
    )
    _check_a_search(best_beams)


def _forks() -> list[Case]:
    example = torch.tensor([[-3.0, -4.0, -5.0], [-0.5, -6.0, -1.0]])
    tied = torch.tensor([[-2.0, -1.0, -2.0, -1.0], [-1.5, -0.5, -1.5, -0.5], [-1.0, -1.0, -4.0, -1.0]])
    closed = torch.tensor([[-math.inf, -0.25, -1.5], [-0.75, -math.inf, -0.75]])
    return [
        Case("one beam, the 2 best of 3 tokens", torch.tensor([0.0]), torch.tensor([[-2.0, -0.5, -1.0]]), 2),
        Case("the worked example, scores -1 and -2, the 2 best", torch.tensor([-1.0, -2.0]), example, 2),
        Case("the same, the 3 best", torch.tensor([-1.0, -2.0]), example, 3),
        Case("the same, the best one", torch.tensor([-1.0, -2.0]), example, 1),
        Case("equal scores, some ways equal, the 4 best", torch.tensor([0.0, -0.5, -0.5]), tied, 4),
        Case("equal scores, some ways equal, the 7 best", torch.tensor([0.0, -0.5, -0.5]), tied, 7),
        Case("all 12 ways equal, the 5 best", torch.zeros(3), torch.full((3, 4), -1.25), 5),
        Case("5 beams of 60 tokens, all 300 ways equal, the 8 best", torch.zeros(5), torch.full((5, 60), -4.0), 8),
        Case("5 beams of 60 tokens, many of the 300 ways equal, the 9 best", -torch.arange(5.0), _steps(5, 60), 9),
        Case("a token of probability 0 in each beam, the 4 best", torch.tensor([-1.0, -0.5]), closed, 4),
        Case("3 beams of 7 tokens, the 3 best", *_beams(3, 7, 21), 3),
        Case("4 beams of 50 tokens, the 8 best", *_beams(4, 50, 22), 8),
        Case("5 beams of 3 tokens, the 6 best", *_beams(5, 3, 23), 6),
        Case("6 beams of 500 tokens, float64, the 12 best", *(one.double() for one in _beams(6, 500, 24)), 12),
    ]


def _beams(beams: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(beams, vocab + 1, generator=torch.Generator().manual_seed(seed)) * 2
    return -numbers[:, 0].abs(), numbers[:, 1:].log_softmax(dim=-1)


def _steps(beams: int, vocab: int) -> Tensor:
    """Whole numbers from -5 to -2."""
    generator = torch.Generator().manual_seed(25)
    return -torch.randint(2, 6, (beams, vocab), generator=generator).float()


def all_ways(scores: Tensor, log_probabilities: Tensor, count: int) -> list[tuple[float, int, int]]:
    """Every way in a list, sorted by Python."""
    ways = [
        (score + value, beam, token)
        for beam, (score, row) in enumerate(zip(scores.tolist(), log_probabilities.tolist(), strict=True))
        for token, value in enumerate(row)
    ]
    return sorted(ways, key=lambda way: (-way[0], way[1], way[2]))[:count]


_EQUALS = (
    "the scores are right; of equal ways the wrong ones are taken, or in the wrong order: topk, and sort without "
    "stable=True, promise nothing about equals"
)
_TENSORS = "the numbers are still tensors; .tolist() and .item() give plain ones"
_COLUMN = "a score belongs to all tokens of its beam, a row of the table: make a column [beams, 1] of the scores"


def _of_columns(error: BaseException, case: Case) -> str:
    return _COLUMN if isinstance(error, RuntimeError) and "must match the size of tensor" in str(error) else ""


def _of_ways(got: Any, want: list[tuple[float, int, int]]) -> str:
    try:
        if any(isinstance(part, Tensor) for way in got for part in way):
            return _TENSORS
        same = [way[0] for way in got] == [way[0] for way in want]
        places = [(way[1], way[2]) for way in got] != [(way[1], way[2]) for way in want]
    except (TypeError, IndexError):
        return ""
    if same and places and all(isinstance(way, tuple) for way in got):
        return _EQUALS
    return ""


def _check_a_search(best_beams: Callable[..., Any]) -> None:
    """A language of three tokens in which the best text does not begin with the best token."""
    language = torch.tensor([[0.52, 0.41, 0.07], [0.35, 0.34, 0.31], [0.02, 0.93, 0.05]]).log()
    first = torch.tensor([[0.48, 0.11, 0.41]]).log()

    def search(first: Tensor, language: Tensor, width: int) -> list[list[int]]:
        ways = best_beams(torch.zeros(1).double(), first, 3)
        texts, scores = [[token] for _, _, token in ways], [score for score, _, _ in ways]
        for _ in range(2):
            rows = language[[text[-1] for text in texts]]
            ways = best_beams(torch.tensor(scores).double(), rows, min(width, rows.numel()))
            texts, scores = [[*texts[beam], token] for _, beam, token in ways], [score for score, _, _ in ways]
        return texts

    def every_text(first: Tensor, language: Tensor, width: int) -> list[list[int]]:
        odds = {
            text: float(first[0, text[0]] + language[text[0], text[1]] + language[text[1], text[2]])
            for text in product(range(3), repeat=3)
        }
        return [list(text) for text in sorted(odds, key=lambda text: -odds[text])[:width]]

    compare(
        search,
        every_text,
        [Case("a search of three steps with your best_beams, wide enough for every text", first, language, 27)],
        expected="the most probable texts of all, the best first",
        what="the texts",
    )


# ---- mistakes ----------------------------------------------------------------------------------------------------


def _still(*places: int) -> Callable[[list[Any]], list[Any]]:
    """Makes tensors of some of a way's three numbers."""
    return lambda ways: [tuple(torch.tensor(one) if at in places else one for at, one in enumerate(w)) for w in ways]


_STILL_TENSORS = (_still(0, 1, 2), _still(0), _still(1, 2))
_RANKED: list[tuple[str, dict[str, Any]]] = [
    ("the scores of the beams are not added: a way's score is that of its whole text",
     {"score": lambda score, value: value}),
    ("only the scores of the beams count here; the next token's log-probability is added to them",
     {"score": lambda score, value: score}),
    ("probabilities are added to the scores; it is the logarithms that are added",
     {"score": lambda score, value: score + math.exp(value)}),
    ("the score is a probability; its logarithm is meant, which is the sum of the logarithms",
     {"score": lambda score, value: math.exp(score) * math.exp(value)}),
    ("scores and log-probabilities are multiplied; they are added",
     {"score": lambda score, value: score * value}),
    ("the scores are taken off; they are added", {"score": lambda score, value: value - score}),
    ("the score that is returned is that of the last token alone; the whole text's is meant",
     {"said": lambda score, value: value}),
    ("the score that is returned is that of the beam before this token", {"said": lambda score, value: score}),
    ("only the best token of each beam is looked at; a good beam may have several of the best ways",
     {"pool": lambda ways: [max((way for way in ways if way[1] == beam), key=lambda way: way[0])
                             for beam in sorted({way[1] for way in ways})]}),
    ("only the first beam goes on; all of them may", {"pool": lambda ways: [way for way in ways if way[1] == 0]}),
    ("the ways that do not go on are taken: scores nearer to 0 are better", {"key": lambda s, b, t: (s, b, t)}),
    ("of equal ways the later ones come first", {"key": lambda s, b, t: (-s, -b, -t)}),
    ("of equal ways the higher beam comes first", {"key": lambda s, b, t: (-s, -b, t)}),
    ("of equal ways of one beam the higher token comes first", {"key": lambda s, b, t: (-s, b, -t)}),
    ("of equal ways the lower token comes first; the lower beam should", {"key": lambda s, b, t: (-s, t, b)}),
    ("the right ways, the worst first", {"arranged": lambda ways: ways[::-1]}),
    ("the ways are put in the order of the beams; the best come first, whoever they belong to",
     {"arranged": lambda ways: sorted(ways, key=lambda way: way[1])}),
    ("the ways are put in the order of the beams; the best come first, whoever they belong to",
     {"arranged": lambda ways: sorted(ways, key=lambda way: (way[1], way[2]))}),
    ("beam and token are exchanged: (score, beam, token)", {"named": lambda beam, token, beams, vocab: (token, beam)}),
    ("the places are divided by the number of beams; each beam's row has `vocab` of them",
     {"named": lambda beam, token, beams, vocab: divmod(beam * vocab + token, beams)}),
    ("the place in the whole table stands for the token; its rest after division by the vocabulary is meant",
     {"named": lambda beam, token, beams, vocab: (beam, beam * vocab + token)}),
    ("the table is laid out column by column, and read row by row",
     {"named": lambda beam, token, beams, vocab: divmod(token * beams + beam, vocab)}),
    ("as many ways as there are beams; asked for are `count`", {"cut": lambda ways, count, beams: ways[:beams]}),
    ("one way too few", {"cut": lambda ways, count, beams: ways[: count - 1]}),
    ("one way too many", {"cut": lambda ways, count, beams: ways[: count + 1]}),
    ("`count` ways of each beam; asked for are `count` of all together",
     {"cut": lambda ways, count, beams: [w for w in ways if sum(v[1] == w[1] for v in ways[: ways.index(w)]) < count]}),
    ("each way is a list; asked for is a tuple", {"gives": lambda ways: [list(way) for way in ways]}),
    ("three lists; asked for is a list of ways",
     {"gives": lambda ways: tuple(list(part) for part in zip(*ways, strict=True))}),
    *((_TENSORS, {"gives": some}) for some in _STILL_TENSORS),
    (_COLUMN, {"column": False}),
    *((f"{_TENSORS}. And {_COLUMN}", {"gives": some, "column": False}) for some in _STILL_TENSORS),
]  # fmt: skip


def _ranked(
    score: Callable[[float, float], float] = lambda score, value: score + value,
    said: Callable[[float, float], float] | None = None,
    key: Callable[[float, int, int], Any] = lambda score, beam, token: (-score, beam, token),
    named: Callable[[int, int, int, int], tuple[int, int]] = lambda beam, token, beams, vocab: (beam, token),
    **wrong: Any,
) -> Callable[[Tensor, Tensor, int], Any]:
    """The sorted list, with mistakes switched on."""

    def run(scores: Tensor, log_probabilities: Tensor, count: int) -> Any:
        beams, vocab = log_probabilities.shape
        if not wrong.get("column", True):
            log_probabilities, scores = scores + log_probabilities, torch.zeros(beams)  # fails where shapes do not fit
        before, table = scores.tolist(), log_probabilities.tolist()
        ways = [(score(before[b], table[b][t]), b, t) for b in range(beams) for t in range(vocab)]
        ways = wrong.get("pool", list)(ways)
        ways = sorted(ways, key=lambda way: key(*way))
        ways = wrong.get("cut", lambda ways, count, beams: ways[:count])(ways, count, beams)
        ways = wrong.get("arranged", list)(ways)
        found = [(said(before[b], table[b][t]) if said else s, *named(b, t, beams, vocab)) for s, b, t in ways]
        return wrong.get("gives", list)(found)

    return run
