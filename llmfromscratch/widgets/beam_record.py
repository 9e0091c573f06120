"""A beam search on a model, step by step, with the ways that it dropped: what `beam_tree` draws.

What each step kept is compared with the best ways of all, ranked here in float64 from the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import beam_search, kv_cache
from llmfromscratch.widgets.sampling_stages import label_of

DROPPED = 2  # ways a step that are drawn though they were not kept: the best of these
_SLACK = 1e-3  # of sums of log-probabilities in single precision
KEPT, ENDED, CUT = "kept", "ended", "dropped"


@dataclass(frozen=True)
class Node:
    """A token on a way. parent: which node of the column before, or 0 for the prompt. kind: KEPT, ENDED or CUT.

    score: log-probability of the answer up to here; final: what the text is compared by, where it ended.
    """

    parent: int
    token_id: int
    score: float
    kind: str
    final: float | None = None


@dataclass(frozen=True)
class Tree:
    """columns: the nodes of each step; a kept one comes before those that are not. best: the index of the best text's
    node in each column. greedy: the text of the most probable token each time, and its score as in results.
    """

    prompt: str
    width: int
    length_penalty: float
    steps: int
    ends: tuple[int, ...]
    columns: tuple[tuple[Node, ...], ...]
    best: tuple[int, ...]
    results: tuple[beam_search.BeamResult, ...]
    greedy: beam_search.BeamResult
    label: Callable[[int], str]
    problems: tuple[str, ...]

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens one after the other, white space made visible."""
        return "".join(map(self.label, token_ids))

    def goes_on(self, column: int, node: int) -> bool:
        """Whether this node leads on: to a token where a text ends, or to one that the last step kept."""
        kind = self.columns[column][node].kind
        if kind != KEPT or column + 1 >= len(self.columns):
            return kind != CUT
        following = enumerate(self.columns[column + 1])
        return any(one.parent == node and self.goes_on(column + 1, place) for place, one in following)


class _Watched(beam_search.BeamSearch):
    """A beam search that remembers log-probabilities, and takes a learner's choice of ways if it is given one."""

    def __init__(self, *arguments: Any, best_beams: Callable[..., Any] | None, **settings: Any):
        super().__init__(*arguments, **settings)
        self.seen: list[Tensor] = []
        self._own = best_beams

    def _best_ways(self, logits: Tensor) -> list[beam_search.Way]:
        wide = logits.float().cpu().log_softmax(dim=-1)
        self.seen.append(wide)
        if self._own is None:
            return super()._best_ways(logits)
        count = min(self.width * max(2, 1 + len(self.ends)), wide.numel())
        ways = self._own(torch.tensor(self.scores, dtype=torch.float64), wide, count)
        return [beam_search.Way(*_checked(way, wide.shape)) for way in ways]


def _checked(way: Any, shape: torch.Size) -> tuple[int, int, float]:
    """(beam, token, score) of a way as `best_beams` gives it. Raises ValueError for what is no way."""
    try:
        score, beam, token = float(way[0]), int(way[1]), int(way[2])
    except (TypeError, ValueError, IndexError):
        raise ValueError(f"best_beams gave {way!r:.60}; (score, beam, token) was expected.") from None
    if not (0 <= beam < shape[0] and 0 <= token < shape[1]):
        raise ValueError(
            f"best_beams gave beam {beam}, token {token}; there are {shape[0]} beams (from 0) and {shape[1]:,} tokens."
        )
    return beam, token, score


def grow_tree(
    llm: Any,
    prompt: str,
    width: int,
    length_penalty: float,
    steps: int,
    ends: Collection[int] | None = None,
    best_beams: Callable[..., Any] | None = None,
) -> Tree:
    """Runs the search. ends: token ids that end a text; None takes the model's own and that of a full stop.

    best_beams: in the place of `sampling.best_beams`.
    """
    ids = [int(index) for index in llm.tokenizer.encode(prompt)]
    if not ids:
        raise ValueError("There is nothing to continue; give a prompt of at least one character.")
    stops = frozenset(_ends(llm) if ends is None else ends)
    search = _run(llm, ids, width, length_penalty, steps, stops, best_beams)
    greedy = search if width == 1 else _run(llm, ids, 1, length_penalty, steps, stops, best_beams)
    columns = _columns(search, stops)
    result = search.results[0] if search.results else None
    names: dict[int, str] = {}

    def label(index: int) -> str:
        return names.setdefault(index, label_of(llm.tokenizer, index))

    return Tree(
        prompt, width, length_penalty, steps, tuple(sorted(stops)), columns, _path(columns, result),
        tuple(search.results), greedy.results[0], label, tuple(_doubts(search, stops, label)),
    )  # fmt: skip


def _ends(llm: Any) -> list[int]:
    stop = llm.tokenizer.encode(".")
    return [*llm.model.config.eos_token_ids, *(stop if len(stop) == 1 else [])]


def _run(
    llm: Any, ids: Sequence[int], width: int, penalty: float, steps: int, ends: Collection[int], best_beams: Any
) -> _Watched:
    cache = kv_cache.ConcatKVCache(llm.model.config.num_layers)
    settings = {"max_tokens": steps, "ends": ends, "length_penalty": penalty, "best_beams": best_beams}
    with _Watched(llm.model, cache, ids, width, **settings) as search:
        while not search.done:
            search.step()
    return search


def _columns(search: _Watched, ends: Collection[int]) -> tuple[tuple[Node, ...], ...]:
    columns = []
    for number, (step, seen) in enumerate(zip(search.steps, search.seen, strict=True)):
        before = search.steps[number - 1].kept if number else ()
        nodes = [Node(*way, KEPT) for way in step.kept]
        nodes += [Node(one.parent, one.token_id, one.score, ENDED, one.final) for one in step.finished]
        taken = {(node.parent, node.token_id) for node in nodes}
        scores = torch.tensor([way.score for way in before] or [0.0], dtype=torch.float64)
        best = _ranked(scores, seen, len(nodes) + DROPPED)
        nodes += [Node(beam, token, score, CUT) for score, beam, token in best if (beam, token) not in taken][:DROPPED]
        columns.append(tuple(nodes))
    return tuple(columns)


def _ranked(scores: Tensor, log_probabilities: Tensor, count: int) -> list[tuple[float, int, int]]:
    total = (scores.unsqueeze(-1) + log_probabilities.double()).flatten()
    values, places = total.topk(min(count, len(total)))
    vocab = log_probabilities.shape[-1]
    return [
        (value, place // vocab, place % vocab) for value, place in zip(values.tolist(), places.tolist(), strict=True)
    ]


def _path(columns: Sequence[Sequence[Node]], result: beam_search.BeamResult | None) -> tuple[int, ...]:
    """The nodes of a text, from its last token back to the prompt; none if there is no such text."""
    if result is None:
        return ()
    length = len(result.token_ids)
    for last, node in enumerate(columns[length - 1]):
        if node.kind != ENDED:
            continue
        path = [last]
        for column in range(length - 1, 0, -1):
            path.append(columns[column][path[-1]].parent)
        path.reverse()
        if all(
            columns[n][at].token_id == token for n, (at, token) in enumerate(zip(path, result.token_ids, strict=True))
        ):
            return tuple(path)
    return ()


def _doubts(search: _Watched, ends: Collection[int], label: Callable[[int], str]) -> list[str]:
    """What a step kept though there was better, and scores that are not the sum of their log-probabilities."""
    said, scores = [], torch.zeros(1, dtype=torch.float64)  # of the beams, added up here
    for number, (step, seen) in enumerate(zip(search.steps, search.seen, strict=True), start=1):
        total = scores.unsqueeze(-1) + seen.double()
        for parent, token, score in _taken(step):
            right = float(total[parent, token])
            if abs(score - right) > _SLACK * (1 + abs(right)):
                said.append(
                    f"Step {number} gives {label(token)!r} a score of {score:.2f}; the log-probabilities of its answer "
                    f"add up to {right:.2f}."
                )
        said += _better_ones(number, step, total, ends, label)
        scores = torch.stack([total[way.parent, way.token_id] for way in step.kept]) if step.kept else scores
    return said[:1] + [f"{len(said) - 1} more like this." for _ in said[1:2]]


def _taken(step: beam_search.BeamStep) -> list[tuple[int, int, float]]:
    kept = [(way.parent, way.token_id, way.score) for way in step.kept]
    return kept + [(one.parent, one.token_id, one.score) for one in step.finished]


def _better_ones(
    number: int, step: beam_search.BeamStep, total: Tensor, ends: Collection[int], label: Callable[[int], str]
) -> list[str]:
    """The best way that goes on and was not taken, if it is better than one that was."""
    taken = {(parent, token) for parent, token, _ in _taken(step)}
    pairs = [(way.parent, way.token_id) for way in step.kept] or list(taken)
    if len(taken) < len(step.kept) + len(step.finished):
        return [f"Step {number} takes a way twice."]
    for value, beam, token in _ranked(total.new_zeros(len(total)), total, 2 * len(taken) + len(ends) * len(total) + 1):
        if (beam, token) in taken or (step.kept and token in ends):
            continue
        worst = min(pairs, key=lambda pair: float(total[pair]))
        least = float(total[worst])
        if value <= least + _SLACK * (1 + abs(least)):
            return []
        return [
            f"Step {number} takes {label(worst[1])!r} ({least:.2f}) and drops {label(token)!r} on beam "
            f"{beam + 1} ({value:.2f}), which is more probable."
        ]
    return []
