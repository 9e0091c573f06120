"""The check of chapter 5's choice of tokens for a batch, against draws in plain numbers, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import MISSING_RETURN, NamedParts
from llmfromscratch.course.exercises.in_engine import in_engine

Settings = Mapping[str, Any]  # of one row: what SamplingParams takes, and its seed
Weights = list[tuple[int, float]]  # (token, how probable it is), in the order of the draw

_TOKENS, _TAKEN, _NOTED = "the tokens", "numbers taken of each row's stream", "token_ids of the rows afterwards"


def _logits(*shape: int, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def check_choose(choose: Callable[..., Tensor]) -> None:
    """Against draws in plain numbers, row by row; then a whole batch of the engine's sampler."""
    compare(
        partial(_chosen, choose),
        by_hand,
        _batches(),
        expected="the largest logit of each row with temperature 0, and for every other row a draw from what its own "
        "temperature and filters leave, with one number of its own stream",
        mistakes=combined(_choosing, _CHOOSING, at_once=2),
        diagnose=_of_parts,
        explain=_about_rows,
    )
    _check_in_the_sampler(choose)


def _batches() -> list[Case]:
    banned = torch.tensor([[-math.inf, 1.0, 1.0, -math.inf], [0.0, -math.inf, 0.5, 0.5]])
    greedy: Settings = {"seed": 3}
    some: Settings = {"temperature": 1.0, "seed": 4}
    cold: Settings = {"temperature": 0.3, "top_p": 0.8, "seed": 5}
    hot: Settings = {"temperature": 4.0, "top_p": 0.5, "seed": 6}
    narrow: Settings = {"temperature": 2.0, "top_k": 3, "seed": 7}
    mixed = [narrow, greedy, hot, {"temperature": 1.5, "min_p": 0.2, "seed": 8}, greedy, cold]
    return [
        _batch("logits [1, 3, 2]", [torch.tensor([[1.0, 3.0, 2.0]])], greedy),
        _batch("logits [2, 5, 5]", [torch.tensor([[2.0, 5.0, 5.0]])], greedy),
        _batch("logits [0, 0, 0, 0], three steps", [torch.zeros(1, 4)] * 3, some),
        _batch("three greedy rows", [_logits(3, 5, seed=1)], greedy, greedy, greedy),
        _batch("a greedy row and one that draws", [torch.tensor([[0.0, 0, 2, 0, 1], [0.0, 1, 0, 1, 0]])], greedy, some),
        _batch("one that draws and a greedy row", [torch.tensor([[0.0, 1, 0, 1, 0], [0.0, 0, 2, 0, 2]])], some, greedy),
        _batch("two temperatures", [_logits(2, 6, seed=2)] * 3, some, {"temperature": 0.2, "seed": 9}),
        _batch("two temperatures", [_logits(2, 6, seed=3)] * 3, {"temperature": 5.0, "seed": 9}, some),
        _batch("a small temperature and top-p", [_logits(1, 8, seed=4)] * 3, cold),
        _batch("a large temperature and top-p", [_logits(1, 8, seed=5)] * 3, hot),
        _batch("top-k 1 leaves one, and takes its number all the same", [_logits(1, 6, seed=6)] * 2,
               {"temperature": 3.0, "top_k": 1, "seed": 10}),
        _batch("other filters in each row", [_logits(3, 9, seed=7)] * 3, hot, narrow, cold),
        _batch("two rows with the same seed", [_logits(1, 6, seed=8).expand(2, 6)] * 3, some, some),
        _batch("banned tokens, whose logits are -inf", [banned] * 3, some, greedy),
        _batch("tiny and huge temperatures", [_logits(2, 6, seed=9)] * 3, {"temperature": 1e-50, "seed": 11},
               {"temperature": 1e50, "seed": 12}),
        _batch("six rows of six kinds, four steps", list(_logits(4, 6, 12, seed=10)), *mixed),
        _batch("400 tokens", list(_logits(2, 3, 400, seed=11, scale=1.0)),
               {"temperature": 1.2, "top_p": 0.95, "seed": 13}, greedy, some),
    ]  # fmt: skip


def _batch(text: str, steps: list[Tensor], *requests: Settings) -> Case:
    told = [
        ", ".join(f"{name} {value:g}" for name, value in one.items() if name != "seed") or "temperature 0"
        for one in requests
    ]
    rows = "; ".join(f"row {number}: {one}" for number, one in enumerate(told))
    return Case(f"{text} ({rows})", steps, [dict(one) for one in requests])


def _chosen(choose: Callable[..., Any], logits: Sequence[Tensor], requests: Sequence[Settings]) -> NamedParts:
    engine = learner_engine.reference("sampling")
    rows = [engine.Row(engine.SamplingParams(**one), engine.random_stream(one["seed"]), []) for one in requests]
    tokens = [choose(step, rows) for step in logits]
    return _parts(tokens, requests, [row.stream for row in rows], [row.token_ids for row in rows])


def _parts(
    tokens: Sequence[Any], requests: Sequence[Settings], streams: Sequence[torch.Generator], noted: Sequence[list[int]]
) -> NamedParts:
    named = {_TOKENS if len(tokens) == 1 else f"step {step}: the tokens": one for step, one in enumerate(tokens, 1)}
    taken = [_taken(stream, one["seed"]) for stream, one in zip(streams, requests, strict=True)]
    return NamedParts({**named, _TAKEN: taken, _NOTED: list(noted)})


def _taken(stream: torch.Generator, seed: int) -> int:
    """How many float64 numbers of a stream were taken since it was seeded; -1 where it was used in another way."""
    again = torch.Generator().manual_seed(seed)
    for count in range(64):
        if torch.equal(stream.get_state(), again.get_state()):
            return count
        torch.rand(1, generator=again, dtype=torch.float64)
    return -1


def by_hand(logits: Sequence[Tensor], requests: Sequence[Settings]) -> NamedParts:
    """Row by row in Python's own numbers: powers of e, a sorted list, and a walk along it."""
    streams = [torch.Generator().manual_seed(one["seed"]) for one in requests]
    steps = []
    for step in logits:
        tokens = []
        for row, one, stream in zip(step.tolist(), requests, streams, strict=True):
            if "temperature" in one:
                number = float(torch.rand(1, generator=stream, dtype=torch.float64))
                tokens.append(walk_to(number, left_by_filters(probabilities(row, one["temperature"]), one)))
            else:
                tokens.append(row.index(max(row)))
        steps.append(torch.tensor(tokens))
    return _parts(steps, requests, streams, [[] for _ in requests])


def probabilities(row: Sequence[float], temperature: float) -> list[float]:
    """The softmax of a row at a temperature."""
    top = max(row)
    powers = [math.exp((logit - top) / temperature) for logit in row]
    return [power / sum(powers) for power in powers]


def left_by_filters(row: Sequence[float], one: Settings) -> Weights:
    """What top-k, top-p and min-p leave. Where there is a filter, the most probable stand first."""
    weights = list(enumerate(row))
    if not any(name in one for name in ("top_k", "top_p", "min_p")):
        return weights
    weights.sort(key=lambda pair: -pair[1])  # equal ones stay in the order of their ids
    weights = weights[: one.get("top_k", len(weights))]
    total, before, nucleus = sum(weight for _, weight in weights), 0.0, []
    for token, weight in weights:
        if before < one.get("top_p", 2.0) * total:
            nucleus.append((token, weight))
        before += weight
    return [(token, weight) for token, weight in nucleus if weight >= one.get("min_p", 0.0) * nucleus[0][1]]


def walk_to(number: float, weights: Weights) -> int:
    """The token at which the running sum exceeds NUMBER times the whole."""
    running, total = 0.0, sum(weight for _, weight in weights)
    for token, weight in weights:
        running += weight
        if running > number * total:
            return token
    return weights[-1][0]


def _of_parts(got: NamedParts, want: NamedParts) -> str:
    tokens = [(one, want[name]) for name, one in got.items() if isinstance(want[name], Tensor)]
    if any(one is None for one, _ in tokens):
        return MISSING_RETURN
    if any(isinstance(mine, Tensor) and mine.numel() == theirs.numel() and mine.dim() != 1 for mine, theirs in tokens):
        return "asked for is one number a row, int64 [rows]"
    if got[_NOTED] != want[_NOTED]:
        return "the tokens are noted in the rows; the sampler does that, and they would be there twice"
    pairs = list(zip(got[_TAKEN], want[_TAKEN], strict=True))
    if any(mine < 0 for mine, _ in pairs):
        return "a stream is used, but not for one float64 number a token; `uniforms` takes it so"
    if any(theirs for _, theirs in pairs) and not any(mine for mine, _ in pairs):
        return (
            "no number is taken from a row's own stream: whatever else you draw with, the request's seed is not in it"
        )
    if any(mine > theirs == 0 for mine, theirs in pairs):
        return "a row that does not draw takes a number"
    return "a row takes more than one number for a token" if any(mine > theirs for mine, theirs in pairs) else ""


def _about_rows(error: BaseException, case: Case) -> str:
    _, requests = case.args
    if "'Row' object has no attribute" in str(error):
        return "a row has params, stream, prompt_token_ids and token_ids; the temperature is one of its params"
    if isinstance(error, RuntimeError | ValueError) and not any("temperature" in one for one in requests):
        return "no row draws here, so there are no streams to take numbers from"
    if isinstance(error, IndexError | ValueError | RuntimeError) and not all("temperature" in one for one in requests):
        return "draw_filtered wants as many params and numbers as rows: those of the rows that draw, and no others"
    return ""


def _check_in_the_sampler(choose: Callable[..., Tensor]) -> None:
    """Eleven requests with bias, bans and penalties: what each says, against the engine's own sampler."""
    kinds: list[Settings] = [{}, {"temperature": 0.9, "top_p": 0.9},
                             {"temperature": 1.4, "logit_bias": {2: -math.inf, 4: 1.5}},
             {"temperature": 1.0, "repetition_penalty": 1.3, "top_k": 5}]  # fmt: skip
    requests = [{**kinds[number % 4], "seed": number} for number in range(11)]
    logits = _logits(3, 11, 16, seed=12)

    def run(logits: Tensor, requests: Sequence[Settings]) -> NamedParts:
        with in_engine("sampling", "choose", choose) as module:
            return _sampled(module, logits, requests)

    compare(
        run,
        lambda logits, requests: _sampled(learner_engine.reference("sampling"), logits, requests),
        [Case("eleven requests in the engine's Sampler with your choose", logits, requests)],
        expected="the tokens that each request would get alone",
    )


def _sampled(module: Any, logits: Tensor, requests: Sequence[Settings]) -> NamedParts:
    sampler = module.Sampler()
    rows = [sampler.start(module.SamplingParams(**one), [1, 3, 3, 7]) for one in requests]
    return NamedParts({f"step {number}": sampler.sample(step, rows) for number, step in enumerate(logits, 1)})


# what a mistake is about, and what it makes of it: see `_choosing`
_CHOOSING: list[tuple[str, dict[str, Any]]] = [
    ("nothing is drawn: every row takes its largest logit", {"drawing": lambda temperatures: []}),
    ("every row draws; at temperature 0 the largest logit is meant, of equal ones the first, and no number is taken",
     {"drawing": lambda temperatures: list(range(len(temperatures)))}),
    ("greedy rows take a number of their stream too; only rows that draw do", {"takes": "all"}),
    ("greedy rows take a number of their stream too; only rows that draw do", {"takes": "all where one draws"}),
    ("two numbers are taken for a token; one is enough", {"takes": "two"}),
    ("the first stream's number is used for every row, and the others' are not: each row has a stream of its own",
     {"stream": lambda at, place, drawing: drawing[0]}),
    ("the streams of the first rows are used; those of the rows that draw are meant",
     {"stream": lambda at, place, drawing: at}),
    ("a new stream is made of the seed for every token, so that every token gets the same number: rows keep theirs in "
     "`stream`", {"takes": "fresh"}),
    ("the temperature of the first row that draws is used for all of them",
     {"temperature": lambda at, place, drawing: drawing[0]}),
    ("the temperature of the first row is used for all of them", {"temperature": lambda at, place, drawing: 0}),
    ("the temperatures of the first rows are used; those of the rows that draw are meant",
     {"temperature": lambda at, place, drawing: at}),
    ("the temperature is not used", {"heat": lambda temperature: 1.0}),
    ("the logits are multiplied by the temperature", {"heat": lambda temperature: 1 / temperature}),
    ("the temperature is applied twice", {"heat": lambda temperature: temperature**2}),
    ("the filters cut before the temperature has acted; the declared order is the other way round", {"early": True}),
    ("the filters are not used; draw_filtered takes them from the params",
     {"filters": lambda at, place, drawing: None}),
    ("the filters of the first row that draws are used for all of them",
     {"filters": lambda at, place, drawing: drawing[0]}),
    ("the filters of the first rows are used; those of the rows that draw are meant",
     {"filters": lambda at, place, drawing: at}),
    ("the logits of the first rows are drawn from; those of the rows that draw are meant",
     {"source": lambda at, place, drawing: at}),
    ("what was drawn is put into the first rows; it belongs into those that drew",
     {"target": lambda at, place, drawing: at}),
    ("the most probable of what the filters leave is taken; a draw is asked for", {"most": True}),
    ("logits are taken for log-probabilities: the filters need a softmax first", {"handed": "logits"}),
    ("probabilities are handed on where log-probabilities are asked for", {"handed": "probabilities"}),
    ("only what was drawn is returned; every row gets a token",
     {"gives": lambda tokens, drawing: tokens[drawing] if drawing else tokens}),
]  # fmt: skip


def _above_0(temperatures: Sequence[float]) -> list[int]:
    return [place for place, temperature in enumerate(temperatures) if temperature > 0]


def _own(at: int, place: int, drawing: Sequence[int]) -> int:
    """Which row's setting is used for the row at PLACE, number AT of those that draw: its own."""
    return place


def _choosing(
    gives: Callable[[Tensor, list[int]], Any] = lambda tokens, drawing: tokens,
    **wrong: Any,
) -> Callable[[Sequence[Tensor], Sequence[Settings]], NamedParts]:
    """The draws, with mistakes switched on."""
    source, target = wrong.get("source", _own), wrong.get("target", _own)

    def run(logits: Sequence[Tensor], requests: Sequence[Settings]) -> NamedParts:
        streams = [torch.Generator().manual_seed(one["seed"]) for one in requests]
        temperatures = [one.get("temperature", 0.0) for one in requests]
        places, steps = wrong.get("drawing", _above_0)(temperatures), list[Tensor]()
        for step in logits:
            numbers = _numbers(places, requests, streams, wrong)
            tokens = step.argmax(dim=-1)
            for at, place in enumerate(places):
                row = step[source(at, place, places)].tolist()
                weights = _weights(row, at, place, places, requests, wrong)
                most = max(weights, key=lambda pair: pair[1])[0]
                tokens[target(at, place, places)] = most if wrong.get("most") else walk_to(numbers[at], weights)
            steps.append(tokens)
        return _parts([gives(step, places) for step in steps], requests, streams, [[] for _ in requests])

    return run


def _numbers(
    places: list[int], requests: Sequence[Settings], streams: Sequence[torch.Generator], wrong: Settings
) -> list[float]:
    """One number for each row that draws."""
    takes, stream = wrong.get("takes"), wrong.get("stream", _own)
    if takes == "fresh":
        streams = [torch.Generator().manual_seed(one["seed"]) for one in requests]
    asked = [stream(at, place, places) for at, place in enumerate(places)]
    all_of_them = takes == "all" or (takes == "all where one draws" and len(places) > 0)
    asking = range(len(streams)) if all_of_them else sorted(set(asked))
    numbers = {n: float(torch.rand(1, generator=streams[n], dtype=torch.float64)) for n in asking}
    if takes == "two":
        numbers = {n: float(torch.rand(1, generator=streams[n], dtype=torch.float64)) for n in asking}
    return [numbers[n] for n in asked]


def _weights(
    row: list[float], at: int, place: int, places: list[int], requests: Sequence[Settings], wrong: Settings
) -> Weights:
    """What one row draws from."""
    whose, whose_filters = wrong.get("temperature", _own), wrong.get("filters", _own)(at, place, places)
    temperature = max(requests[whose(at, place, places)].get("temperature", 0.0), 1e-30)
    temperature = min(max(wrong.get("heat", float)(temperature), 1e-30), 1e30)
    filters = {} if whose_filters is None else requests[whose_filters]
    if wrong.get("early"):
        kept = left_by_filters(probabilities(row, 1.0), filters)
        tempered = probabilities(row, temperature)
        return [(token, tempered[token]) for token, _ in kept]
    found = probabilities(row, temperature)
    if wrong.get("handed") == "probabilities":
        found = [math.exp(one) for one in found]
    if wrong.get("handed") and "top_k" not in filters and "top_p" in filters:  # top-p takes their sum for 1
        total = sum(found) if wrong["handed"] == "probabilities" else 1 / max(found)  # of logits the largest weighs 1
        filters = {**filters, "top_p": filters["top_p"] / total}
    return left_by_filters(found, filters)
