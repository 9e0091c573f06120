"""Speculative decoding in the engine's step: cheap guesses, verified in the one pass that the step makes anyway.

    newest token + k drafts ─▶ one pass ─▶ k + 1 rows of logits ─▶ the drafts that stand, and one token more
                                                                 └▶ the others are rewound from the cache

A decode step reads every weight for one row, and a few rows more cost little. So what is right among the drafts comes
almost for free. The answer does not change: a draft stands if it is the token that the sampler chooses there, with the
same random numbers; where a drafter draws from a distribution of its own, if the rejection rule accepts it, and then
the answer changes but its distribution does not.

The scheduler knows nothing of it: drafts stand behind a request's planned tokens like padding, in memory that nobody
else needs in this step. Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmfromscratch import kv_cache, model, optimization, sampling, scheduler, sparse_cache
from llmfromscratch.batch import Batch
from llmfromscratch.drafters import Draft as Draft
from llmfromscratch.drafters import Drafter as Drafter
from llmfromscratch.drafters import is_plain
from llmfromscratch.errors import OutOfMemory

MAX_ROWS = 8  # of a step with drafts: few enough for the compiled layers, and more cost about what they gain
ROW_COST = 0.15  # of one row more in a pass, as a share of the pass with one row
_FADING = 0.7  # how much of what is known of a request's drafts still counts after the next ones
_LONGEST_REST = 32  # steps without drafts, where they do not pay
_FILLER = 0  # the token id of padding: its keys and values are computed and taken back, and nobody looks at them
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Feed:
    """What one pass computes: the plan of a step, the drafts behind it, and padding behind those.

    drafts: by request id. rows: of those who get a token, the rows of the logits behind 0, 1, ... of their drafts.
    """

    plan: Sequence[scheduler.Work]
    drafts: dict[int, Draft]
    batch: Batch
    rows: list[tuple[scheduler.Request, slice]]

    @classmethod
    def of(cls, plan: Sequence[scheduler.Work], drafts: dict[int, Draft]) -> Feed:
        """One ragged batch of all of it."""
        parts, wanted, rows, end = [], [], [], 0
        for work in plan:
            new = work.request.ids[work.start : work.start + work.tokens]
            guessed = drafts[work.request.request_id].token_ids if work.request.request_id in drafts else ()
            parts.append((work.request.request_id, [*new, *guessed, *[_FILLER] * work.padding], work.start))
            wanted.append(range(work.tokens - 1, work.tokens + len(guessed)) if work.completes else ())
            if work.completes:
                rows.append((work.request, slice(end, end + 1 + len(guessed))))
                end += 1 + len(guessed)
        return cls(plan, drafts, Batch.of(parts, logits_at=wanted), rows)

    @property
    def drafted(self) -> int:
        """Drafts in the pass."""
        return sum(len(draft.token_ids) for draft in self.drafts.values())

    def take_back(self, cache: kv_cache.KVCache, given: list[tuple[scheduler.Request, list[int]]]) -> None:
        """Rewinds padding and rejected drafts: they stood behind the requests' own tokens, so none has seen them."""
        stay = {request.request_id: len(tokens) - 1 for request, tokens in given}
        for work in self.plan:
            number = work.request.request_id
            fed = len(self.drafts[number].token_ids) if number in self.drafts else 0
            surplus = work.padding + fed - stay.get(number, 0)
            if surplus and cache.length(number):  # 0 where the request was aborted and holds nothing any more
                cache.rewind(number, surplus)


@dataclass(frozen=True)
class Verdict:
    """What became of one draft: `tokens` is what the pass gave, the drafts that stand and one more."""

    request_id: int
    drafts: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class Pace:
    """How many drafts a request should bring, by how its last ones fared.

    stood, fell: drafts that stood, and first ones that did not; older ones count less. At first it could go either way.
    rest: steps left without drafts; pause: how long the next rest is.
    """

    stood: float = 1.0
    fell: float = 1.0
    rest: int = 0
    pause: int = 1

    def count(self, most: int, cost: float) -> int:
        """The number of drafts, up to `most`, that promises the most tokens for the time; cost: of one, in passes.

        Where none would pay, one is tried now and then: a text that begins to copy should be noticed.
        """
        if self.rest:
            self.rest -= 1
            return 0
        chance = self.stood / (self.stood + self.fell)
        best = max(range(most + 1), key=lambda k: optimization.expected_tokens(chance, k) / (1 + cost * k))
        if best == 0 and most:
            self.rest, self.pause = self.pause, min(2 * self.pause, _LONGEST_REST)
            return 1
        return best

    def learn(self, drafted: int, stood: int) -> None:
        """Takes in how the newest drafts fared."""
        self.stood = _FADING * self.stood + stood
        self.fell = _FADING * self.fell + (stood < drafted)
        if stood:
            self.rest, self.pause = 0, 1


class Speculation:
    """Asks a drafter for guesses and verifies them. Without a drafter there are none, and steps are what they were.

    vocab_size: of the model; a draft that is no token of it is dropped.
    max_rows: rows of a step with drafts, those of all its requests together. row_cost: of one row more, in passes.
    on_verdict: called with what became of each draft, for pictures and tests.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        vocab_size: int = 0,
        max_rows: int = MAX_ROWS,
        row_cost: float = ROW_COST,
    ):
        self.drafter, self.vocab_size, self.max_rows, self.row_cost = drafter, vocab_size, max_rows, row_cost
        self.on_verdict: Callable[[Verdict], None] | None = None
        self._paces: dict[int, Pace] = {}
        self._hidden: Tensor | None = None  # what the head read in the newest pass: [rows of the logits, hidden]

    def propose(
        self, plan: Sequence[scheduler.Work], cache: kv_cache.KVCache, sampler: Any, planner: scheduler.Scheduler
    ) -> dict[int, Draft]:
        """The drafts of a step by request id; the cache has room for them, and nobody gave way for it."""
        if self.drafter is None or not _are_exact(cache, sampler):
            return {}
        asked = self._counts(plan, getattr(planner, "max_batch_tokens", None))
        if not asked:
            return {}
        try:
            drafts = self.drafter.propose([work.request for work, _ in asked], [count for _, count in asked])
            fitting = [self._checked(draft, count) for (_, count), draft in zip(asked, drafts, strict=True)]
        except NotImplementedError:
            raise
        except Exception:  # noqa: BLE001  whatever it is: the answers do not need it
            _log.exception("The drafter failed; this step has no drafts.")
            return {}
        pairs = zip(asked, fitting, strict=True)
        return {work.request.request_id: draft for (work, _), draft in pairs if _has_room(cache, work, draft)}

    def _counts(self, plan: Sequence[scheduler.Work], max_batch_tokens: int | None) -> list[tuple[scheduler.Work, int]]:
        """Who may bring how many drafts, 1 at least; what rows are left of the step is shared out evenly."""
        spare = self.max_rows - sum(1 if _decodes(work) else work.tokens + work.padding for work in plan)
        if max_batch_tokens is not None:
            spare = min(spare, max_batch_tokens - sum(work.tokens + work.padding for work in plan))
        able = [work for work in plan if spare > 0 and _may_be_drafted(work)]
        cost = self.row_cost + getattr(self.drafter, "cost", 0.0)
        asked = []
        for work in able:
            pace = self._paces.setdefault(work.request.request_id, Pace())
            left = work.request.params.max_tokens - len(work.request.token_ids) - 1  # the pass gives one token itself
            count = pace.count(min(left, spare, getattr(self.drafter, "tokens", spare)), cost)
            asked += [(work, count)] if count > 0 else []
        share = spare // max(1, len(asked))
        return [(work, min(count, share)) for work, count in asked if share > 0]

    def _checked(self, draft: Draft, count: int) -> Draft:
        """A draft of no more than it was asked for. Raises ValueError for one that the model could not be fed."""
        ids, probabilities = list(draft.token_ids), draft.probabilities
        if unknown := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"{unknown} are drafted; tokens are whole numbers from 0 to {self.vocab_size - 1}.")
        if probabilities is not None and probabilities.shape != (len(ids), self.vocab_size):
            raise ValueError(f"{len(ids)} drafts came with distributions of shape {tuple(probabilities.shape)}.")
        return Draft(ids[:count], None if probabilities is None else probabilities[:count])

    def verify(self, request: scheduler.Request, draft: Draft, logits: Tensor, sampler: Any, row: Any) -> list[int]:
        """The tokens that a pass gives a request: the drafts that stand, and one more.

        logits: float32 [drafts + 1, vocab], finite. row: what `sampling.Sampler` knows of the request; afterwards it
        is as if the tokens had been chosen one after the other.
        """
        if draft.probabilities is None or request.params.temperature == 0:
            tokens = _as_sampled(draft.token_ids, logits, sampler, row)
        else:
            tokens = _by_rejection(draft.token_ids, draft.probabilities, logits, row)
        stood = len(tokens) - 1
        request.drafted += len(draft.token_ids)
        request.accepted += stood
        self._paces[request.request_id].learn(len(draft.token_ids), stood)
        if self.on_verdict is not None:
            self.on_verdict(Verdict(request.request_id, tuple(draft.token_ids), tuple(tokens)))
        return tokens

    def compute(self, network: model.Model, feed: Feed, cache: kv_cache.KVCache) -> Tensor:
        """The model's logits [rows, vocab]; what its head reads is kept for a drafter that wants it."""
        if not getattr(self.drafter, "wants_hidden", False):
            return network(feed.batch, cache)

        def read(_: object, inputs: tuple[Tensor, ...]) -> None:
            self._hidden = inputs[0]

        self._hidden = None
        hook = network.lm_head.register_forward_pre_hook(read)
        try:
            return network(feed.batch, cache)
        finally:
            hook.remove()

    def observe(self, feed: Feed, given: list[tuple[scheduler.Request, list[int]]]) -> None:
        """Shows the drafter what each request's newest token was made of."""
        hidden, self._hidden = self._hidden, None
        if hidden is None or not given:
            return
        firsts = {request.request_id: rows.start for request, rows in feed.rows}
        places = [firsts[request.request_id] + len(tokens) - 1 for request, tokens in given]
        try:
            self.drafter.observe([request.request_id for request, _ in given], hidden[places])  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001  as above
            _log.exception("The drafter failed on a hidden state.")

    def forget(self, requests: Iterable[scheduler.Request]) -> None:
        """They have ended."""
        for request in requests:
            self._paces.pop(request.request_id, None)
            try:
                if self.drafter is not None:
                    self.drafter.forget(request.request_id)
            except Exception:  # noqa: BLE001  as above
                _log.exception("The drafter failed at the end of a request.")


def _are_exact(cache: kv_cache.KVCache, sampler: Any) -> bool:
    """Whether tokens verified side by side are those that would come one after the other.

    Another sampler may remember what it was asked; and what heavy hitters keep depends on how a text was cut.
    """
    return is_plain(sampler) and not isinstance(cache, sparse_cache.HeavyHitters)


def _decodes(work: scheduler.Work) -> bool:
    return work.completes and work.request.state is scheduler.State.DECODING


def _may_be_drafted(work: scheduler.Work) -> bool:
    """Penalties and constraints look at the tokens in between, which are not chosen yet; and log-probabilities are
    noted one after the other."""
    params = work.request.params
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    free = penalties == (1, 0, 0) and work.request.constraint is None and params.logprobs is None
    return free and _decodes(work)


def _has_room(cache: kv_cache.KVCache, work: scheduler.Work, draft: Draft) -> bool:
    """Whether there is a draft, and the cache has taken room for it beside what the scheduler has taken."""
    if not draft.token_ids:
        return False
    try:
        cache.reserve(work.request.request_id, work.tokens + len(draft.token_ids) + work.padding)
        return True
    except OutOfMemory:
        return False


def _as_sampled(drafts: Sequence[int], logits: Tensor, sampler: sampling.Sampler, row: sampling.Row) -> list[int]:
    """The drafts stand as long as they are what the sampler chooses; what it drew beyond that, it draws again."""
    known, state = len(row.token_ids), row.stream.get_state() if row.params.temperature > 0 else None
    chosen = sampler.sample(logits, [row] * len(logits))
    tokens = optimization.accept_greedy(drafts, chosen)  # type: ignore[arg-type]
    row.token_ids[known:] = tokens
    if state is not None:
        row.stream.set_state(state)
        sampling.uniforms([row.stream] * len(tokens))
    return tokens


def _by_rejection(drafts: Sequence[int], drafted: Tensor, logits: Tensor, row: sampling.Row) -> list[int]:
    wanted = sampling.distribution(logits, [row] * len(logits))
    numbers = sampling.uniforms([row.stream] * len(logits)).tolist()
    tokens = optimization.accept_drafts(drafts, drafted.to(wanted), wanted, numbers)
    row.token_ids += tokens
    return tokens
