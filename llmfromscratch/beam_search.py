"""Beam search: several continuations are kept side by side, and the most probable whole text wins.

Greedy decoding takes the best next token and never looks back. A beam search of width w carries the w best texts, tries
every next token of each, and keeps the w best of all these ways; a text whose next token is an end token leaves the
race with its final score. The beams are forks in the cache: what they have in common is stored once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from llmfromscratch import kv_cache, sampling, scheduler
from llmfromscratch.batch import Batch
from llmfromscratch.branches import Branches, take_turn
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.progress import progress_bar
from llmfromscratch.stopping import end_ids

_DELAY = 5.0  # seconds before a progress bar shows
_EXTREME = 690.0  # of the logarithm of what a score is divided by: neither 0 nor infinity comes of any length penalty
_log = logging.getLogger(__name__)


class Way(NamedTuple):
    """One way to go on: beam `parent` of the step before (0 for the prompt) with one more token.

    score: the log-probability of the whole answer up to this token.
    """

    parent: int
    token_id: int
    score: float


class Ending(NamedTuple):
    """A way that ended its text. final: its score divided by length ** length_penalty, by which texts are compared."""

    parent: int
    token_id: int
    score: float
    final: float


@dataclass(frozen=True)
class BeamStep:
    """What one step decided. kept: beam i of the next step is kept[i], the best first, at most `width` of them.

    finished: texts that ended in this step and counted, the best first: by an end token, or all at max_tokens (then
    `kept` is empty). One of them may still be pushed out of the n best by a later one.
    """

    kept: tuple[Way, ...]
    finished: tuple[Ending, ...]


@dataclass(frozen=True)
class BeamResult:
    """One finished text. token_ids: the answer, its end token included; score: as in Ending.final.

    finished: True where an end token ended it, False where max_tokens did.
    """

    token_ids: tuple[int, ...]
    score: float
    finished: bool


class BeamSearch:
    """A beam search in steps, for whoever has other work between them. `beam_search` takes all steps at once.

    network, cache: what computes a pass, and where the beams keep what they share. prompt_ids: what they go on from.
    max_tokens: tokens of an answer at most. ends: the token ids that end a text. length_penalty: texts are compared by
    score / length ** length_penalty, the length counting the answer's tokens and its end: 0 compares log-probabilities
    and so favours the short, 1 their mean, more than 1 favours the long.
    `close` it in any case, or use it in a `with`.
    """

    def __init__(
        self,
        network: Callable[[Batch, kv_cache.KVCache], Tensor],
        cache: kv_cache.KVCache,
        prompt_ids: Sequence[int],
        width: int,
        *,
        max_tokens: int,
        ends: Collection[int] = (),
        length_penalty: float = 1.0,
    ):
        self.width, self.max_tokens, self.length_penalty = width, max_tokens, length_penalty
        self.ends = frozenset(ends)
        self.branches = Branches(network, cache, prompt_ids)
        self.scores = [0.0]  # of each branch
        self.results: list[BeamResult] = []  # finished texts, the best first, at most `width`
        self.steps: list[BeamStep] = []
        self.done = False
        self._prompt = len(prompt_ids)

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def close(self) -> None:
        """Gives back what the beams hold in the cache."""
        self.branches.close()

    def step(self) -> BeamStep:
        """One more token for every beam. Raises OutOfMemory where the cache has no room."""
        ways = self._best_ways(self.branches.logits())
        length = len(self.steps) + 1
        last = length == self.max_tokens
        # what ends only counts among the best `width`: the ways behind them are there to take the places of ended ones
        ended = [way for way in ways[: self.width] if last or way.token_id in self.ends]
        kept = [] if last else [way for way in ways if way.token_id not in self.ends][: self.width]
        step = BeamStep(tuple(kept), tuple(Ending(*way, self._final(way.score, length)) for way in ended))
        self._finish(step.finished)
        self.branches.grow([(way.parent, way.token_id) for way in kept])
        self.scores = [way.score for way in kept]
        self.steps.append(step)
        self.done = not kept or self._is_decided(length)
        return step

    def _best_ways(self, logits: Tensor) -> list[Way]:
        """Enough of the best ways for `width` of them to go on, whichever tokens end a text."""
        wide = logits.to("cpu", torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        count = min(self.width * max(2, 1 + len(self.ends)), wide.numel())
        scores = torch.tensor(self.scores, dtype=torch.float64)  # sums over a whole text
        return [Way(beam, token, score) for score, beam, token in sampling.best_beams(scores, wide, count)]

    def _final(self, score: float, length: int) -> float:
        exponent = self.length_penalty * math.log(length)
        return score / math.exp(max(-_EXTREME, min(_EXTREME, exponent)))

    def _finish(self, endings: Sequence[Ending]) -> None:
        found = []
        for parent, token, _, final in endings:
            answer = (*self.branches.texts[parent][self._prompt :], token)
            found.append(BeamResult(answer, final, token in self.ends))
        self.results = sorted([*self.results, *found], key=lambda result: -result.score)[: self.width]

    def _is_decided(self, length: int) -> bool:
        """Whether the best beam, ending now, would not be among the `width` best texts: so transformers stops too.

        It is a guess: with a length penalty above 0 a beam may rise again as it grows longer.
        """
        full = len(self.results) == self.width
        return full and self._final(self.scores[0], length) <= self.results[-1].score


def beam_search(
    network: Callable[[Batch, kv_cache.KVCache], Tensor],
    cache: kv_cache.KVCache,
    prompt_ids: Sequence[int],
    width: int,
    *,
    max_tokens: int,
    ends: Collection[int] = (),
    length_penalty: float = 1.0,
    n: int = 1,
) -> tuple[list[BeamResult], list[BeamStep]]:
    """The n best texts, the best first, and what every step decided. The arguments are those of `BeamSearch`.

    Raises RequestError for arguments that cannot be meant, OutOfMemory where the cache has no room for the beams.
    What they hold in the cache is given back in any case.
    """
    _check(width, n, max_tokens, length_penalty)
    settings: Any = {"max_tokens": max_tokens, "ends": ends, "length_penalty": length_penalty}
    with BeamSearch(network, cache, prompt_ids, width, **settings) as search:
        while not search.done:
            search.step()
    return search.results[:n], search.steps


def _check(width: int, n: int, max_tokens: int, length_penalty: float) -> None:
    for name, value in (("width", width), ("n", n), ("max_tokens", max_tokens)):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1.")
    if n > width:
        raise RequestError(f"n={n} texts are asked of {width} beams; ask for no more than there are beams.")
    if not math.isfinite(length_penalty):
        raise RequestError(f"length_penalty is {length_penalty}; it must be a finite number.")


def answer(core: EngineCore, request: scheduler.Request) -> list[scheduler.Request]:
    """The params.n best texts for a request's prompt, the best first: the request itself and others like it, all ended.

    The beams live in the engine's cache, outside its scheduler: the whole search is computed between two of its steps
    (`branches.take_turn`). A token counts as given when the search is over: none is certain before. What goes wrong
    ends the requests with an error, as in the engine's own steps. The engine's metrics count the requests, not the
    steps.
    """
    choices = [request, *(replace(request, token_ids=[], choice=choice) for choice in range(1, request.params.n))]
    error = "the call that asked for it was interrupted."
    try:
        results = _search(core, request)
        error = f"the beam search found {len(results)} texts; there are no more of them."
        for choice, result in zip(choices, results, strict=False):
            for token in result.token_ids:
                choice.record(token, core.clock())
            choice.end("stop" if result.finished else "length")
    except NotImplementedError:
        raise
    except OutOfMemory as failure:
        error = str(failure)
    except Exception as failure:  # noqa: BLE001  other prompts have searches of their own
        _log.exception("A beam search failed; its requests are given up.")
        error = f"the beam search failed: {failure or type(failure).__name__}"
    finally:
        for choice in choices:
            choice.first_scheduled = request.first_scheduled
            if not choice.ended:
                choice.end("abort", error)
            core.metrics.count_end(choice)
    return choices


def refuse(params: sampling.SamplingParams | None) -> None:
    """Raises RequestError where beams are asked of requests that give text while it comes."""
    width = getattr(params, "beam_width", None)
    if width is not None:
        raise RequestError(
            f"beam_width is {width}, and no text of a beam search is certain before its end: it can neither be "
            "streamed nor run by AsyncEngine. Use LLM.generate, or leave beam_width out."
        )


def _search(core: EngineCore, request: scheduler.Request) -> list[BeamResult]:
    params, prompt = request.params, request.prompt_token_ids
    most = min(params.max_tokens, core.context_length - len(prompt))
    width = params.beam_width or 1
    _check(width, params.n, most, params.length_penalty)
    settings: Any = {"max_tokens": most, "ends": end_ids(params, core.eos_token_ids)}

    def work(cache: kv_cache.KVCache) -> list[BeamResult]:
        request.begin(core.clock())
        bar = progress_bar(total=most, description="beam search", delay=_DELAY, unit="token")
        with (
            bar,
            BeamSearch(core.model, cache, prompt, width, length_penalty=params.length_penalty, **settings) as search,
        ):
            while not search.done:
                search.step()
                bar.update()
        return search.results

    return take_turn(core, work)
