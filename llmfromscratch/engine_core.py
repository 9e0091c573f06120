"""The engine's step: plan, compute one ragged batch, pick a token for each request that gets one, see who has ended.

    add ─▶ scheduler ─ plan ─▶ one forward ─ logits ─▶ sampler ─ tokens ─▶ record, finish ─▶ (again while has_work)

Whoever wants answers adds requests, steps until they have ended, and reads them from the requests; `LLM` does so, and
`AsyncEngine` from a thread. Several threads may use one core: steps exclude each other. What goes wrong is kept small:
bad logits end one request, a forward pass that fails ends the requests of its step, and an interruption ends everything
in flight, so that the next request finds an engine without leftovers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from llmfromscratch import kv_cache, model, sampling, scheduler, scoring, stopping
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.metrics import EngineMetrics
from llmfromscratch.speculation import Draft, Feed, Speculation
from llmfromscratch.steps import StepRecord, blocks_in_use, plan_step

_BAD_LOGITS = "the model's logits are NaN or infinite: its weights or dtype are at fault."
_NOTHING_LEFT = "nothing is left to choose from: what was asked of the answer rules out every token; ask for less."
_log = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    request: scheduler.Request
    ends: frozenset[int]  # the token ids that end it
    row: Any  # what the sampler knows of it: kept here, it outlives a preemption


class _Letter(NamedTuple):
    request: scheduler.Request
    error: str | None  # why it is to end; None: it is to begin


class EngineCore:
    """Runs requests step by step over a model, a cache, a scheduler and a sampler.

    eos_token_ids: the model's own ends, of every request that does not ignore them. context_length: tokens of
    prompt and answer at most. clock: seconds; on_step is given the record of every step. speculation: what drafts
    tokens; without it every request gets one a step.
    """

    _followers: list[scheduler.Request]  # held back until the one they follow has a token

    def __init__(
        self,
        model: model.Model,
        cache: kv_cache.KVCache,
        scheduler: scheduler.Scheduler,
        sampler: sampling.Sampler,
        eos_token_ids: Sequence[int],
        context_length: int,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[StepRecord], None] | None = None,
        speculation: Speculation | None = None,
    ):
        self.model, self.cache, self.scheduler, self.sampler = model, cache, scheduler, sampler
        self.eos_token_ids, self.context_length = frozenset(eos_token_ids), context_length
        self.clock, self.on_step, self.speculation = clock, on_step, speculation or Speculation()
        self._lock = threading.Lock()
        self.metrics = EngineMetrics()
        self._in_flight: dict[int, _InFlight] = {}
        self._followers = []
        self._inbox: deque[_Letter] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._in_flight or self._followers or self._inbox)

    def add(self, request: scheduler.Request) -> None:
        """Takes a request in, now or, while a step is under way, after it. Never waits.

        One that can never be served ends with the reason in its `error`. No answer is longer than the context has room
        for: max_tokens is lowered to that. One that follows another waits until that one has a token, or has ended.
        Raises ValueError for the number of a request that is in flight.
        """
        if request.request_id in {*self._in_flight, *(held.request_id for held in self._followers)}:
            raise ValueError(f"request {request.request_id} is in flight already; give each a number of its own.")
        self._post(request, None)

    def abort(self, request: scheduler.Request, error: str) -> None:
        """Ends a request, wherever it stands, now or, while a step is under way, after it. Never waits."""
        self._post(request, error)

    def step(self) -> list[scheduler.Request]:
        """One step. Returns the requests that got a token or ended in it.

        Raises what interrupts it (KeyboardInterrupt), a NotImplementedError out of any part, and whatever a scheduler
        raises: then everything in flight has been aborted, and its memory is free.
        """
        with self.between_steps():
            try:
                self._read_inbox()
                served = self._step() if self._in_flight else []
            except BaseException as error:
                self._abort_everything(f"the engine was stopped by {_named(error)}")
                raise
            return served

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Holds steps off: for reading a request that other threads may be stepping for."""
        try:
            with self._lock:
                yield
        finally:
            self._open_inbox()

    def _post(self, request: scheduler.Request, error: str | None) -> None:
        self._inbox.append(_Letter(request, error))
        self._open_inbox()

    def _open_inbox(self) -> None:
        # not waiting for the lock: the garbage collector may drop a stream in the middle of a step of this very thread.
        # Whoever has the lock looks into the inbox after giving it back, so no letter is left lying there.
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._read_inbox()
            finally:
                self._lock.release()

    def _read_inbox(self) -> None:
        while self._inbox:
            request, error = self._inbox.popleft()
            if error is None:
                self._begin(request)
            else:
                self._abort(request, error)
        for request in [held for held in self._followers if not self._is_early(held)]:
            self._followers.remove(request)
            self._begin(request)
        self._settle()

    def _is_early(self, request: scheduler.Request) -> bool:
        """Whether the one it follows is under way and has no token: then its prompt is not yet there to be shared."""
        first = request.follows
        if first is None or first.ended or first.token_ids:
            return False
        return first.request_id in self._in_flight or first in self._followers

    def _begin(self, request: scheduler.Request) -> None:
        if self._is_early(request):
            self._followers.append(request)
            return
        prompt = len(request.prompt_token_ids)
        room = self.context_length - prompt
        try:
            if room < 1:
                raise OutOfMemory(
                    f"the prompt has {prompt} tokens; the context holds {self.context_length}, with answer."
                )
            if request.params.max_tokens > room:
                request.params = replace(request.params, max_tokens=room)
            held = _InFlight(request, stopping.end_ids(request.params, self.eos_token_ids), self._new_row(request))
            self.scheduler.add(request)
            self._in_flight[request.request_id] = held
        except (OutOfMemory, RequestError) as error:
            self._abort(request, str(error))
            self.metrics.count_end(request)
        except BaseException as error:
            self._abort(request, f"the engine was stopped by {_named(error)}")
            raise

    def _new_row(self, request: scheduler.Request) -> Any:
        """What the sampler keeps of a request. Raises RequestError where it cannot begin."""
        try:
            row = self.sampler.start(request.params, request.prompt_token_ids, request.constraint)
        except NotImplementedError:
            raise
        except Exception as error:
            _log.exception("The sampler could not begin a request, which is given up.")
            raise RequestError(f"the sampler failed: {_named(error)}") from error
        if request.params.logprobs is not None:
            request.logprobs = getattr(row, "logprobs", None)  # the sampler goes on writing into it
        return row

    def _step(self) -> list[scheduler.Request]:
        self._score_prompts()
        plan, record = plan_step(self.scheduler, self.cache, self.clock())
        served = self._settle()
        if not plan:
            if not served:
                raise RuntimeError(f"the scheduler plans nothing, and {len(self._in_flight)} requests are in flight.")
            return served
        feed = Feed.of(plan, self.speculation.propose(plan, self.cache, self.sampler, self.scheduler))
        logits = self._forward(feed)
        given = [] if logits is None else self._take_back(feed, self._choose(feed, logits))
        now = self.clock()
        tokens = sum(self._record(request, ids, now) for request, ids in given)
        record = record.ended(now)
        stood = sum(len(ids) - 1 for _, ids in given)
        self.metrics.count_step(record, tokens, feed.drafted, stood)
        served += [request for request, _ in given]
        served += [request for request in self._settle() if request not in served]
        if self.on_step is not None:
            self.on_step(record)
        return served

    def _forward(self, feed: Feed) -> Tensor | None:
        """Logits [rows of those that complete, vocab]; None if the pass failed, and all of the plan are aborted."""
        try:
            return self.speculation.compute(self.model, feed, self.cache)
        except NotImplementedError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it must not take down those who had no part in it
            self._give_up(feed.plan, error)
            return None

    def _take_back(
        self, feed: Feed, given: list[tuple[scheduler.Request, list[int]]]
    ) -> list[tuple[scheduler.Request, list[int]]]:
        """Takes what was fed for nothing out of the cache; `given` again, or nothing if that fails."""
        try:
            feed.take_back(self.cache, given)
        except NotImplementedError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(feed.plan, error)
            return []
        self.speculation.observe(feed, given)
        return given

    def _give_up(self, plan: Sequence[scheduler.Work], error: Exception) -> None:
        _log.error("A step failed; its requests are given up.", exc_info=error)
        for work in plan:
            self._abort(work.request, f"the model failed in a step of this request: {_named(error)}")

    def _score_prompts(self) -> None:
        """The log-probabilities of the prompts of those who ask for them and have just begun."""
        for held in self._in_flight.values():
            request, top = held.request, held.request.params.prompt_logprobs
            if top is None or request.prompt_logprobs is not None or request.ended:
                continue
            try:
                shared = request.follows.prompt_logprobs if request.follows is not None else None
                request.prompt_logprobs = shared or scoring.prompt_logprobs(
                    self.model, request.prompt_token_ids, top, like=self.cache
                )
            except NotImplementedError:
                raise
            except Exception as error:  # noqa: BLE001  the prompts of the others are others
                _log.exception("A prompt could not be scored; its request is given up.")
                self._abort(request, f"the model failed on the prompt of this request: {_named(error)}")

    def _choose(self, feed: Feed, logits: Tensor) -> list[tuple[scheduler.Request, list[int]]]:
        """The next tokens of each request that gets any: one, and more where drafts stand."""
        logits = logits.float()
        finite = (logits - logits).sum(dim=-1).eq(0).tolist()  # inf - inf is NaN: a tenth of the time of isfinite
        given: dict[scheduler.Request, list[int]] = {}
        single: list[tuple[scheduler.Request, int]] = []  # those without drafts, and their rows
        for request, rows in feed.rows:
            good = finite[rows]
            if not good[0]:
                self._abort(request, _BAD_LOGITS)
            elif len(good) > 1 and all(good):
                given[request] = self._verify(request, feed.drafts[request.request_id], logits[rows])
            else:
                single.append((request, rows.start))
        if len(single) < len(logits):
            logits = logits[[row for _, row in single]]
        given |= {request: [token] for request, token in self._sample([request for request, _ in single], logits)}
        return [(request, given[request]) for request, _ in feed.rows if given.get(request)]

    def _verify(self, request: scheduler.Request, draft: Draft, logits: Tensor) -> list[int]:
        """What a request gets whose drafts were in the pass; nothing where that fails, and it is aborted."""
        try:
            row = self._in_flight[request.request_id].row
            return self.speculation.verify(request, draft, logits, self.sampler, row)
        except NotImplementedError:
            raise
        except Exception as error:  # noqa: BLE001  the others have drafts of their own
            _log.exception("Drafts could not be verified; their request is given up.")
            self._abort(request, f"the sampler failed: {_named(error)}")
            return []

    def _sample(self, requests: Sequence[scheduler.Request], logits: Tensor) -> list[tuple[scheduler.Request, int]]:
        """One call of the sampler for all rows [requests, vocab]; if it fails, one each, to find who is at fault.

        What fails in `sampling.Sampler` (logits, constraints) does so before any row has drawn or noted anything.
        """
        if not requests:
            return []
        try:
            tokens = self.sampler.sample(logits, [self._in_flight[request.request_id].row for request in requests])
            chosen = list(zip(requests, tokens, strict=True))
        except NotImplementedError:
            raise
        except Exception as error:  # noqa: BLE001  the others have logits of their own
            if len(requests) > 1:
                alone = [self._sample([request], row) for request, row in zip(requests, logits.split(1), strict=True)]
                return [pair for pairs in alone for pair in pairs]
            _log.exception("The sampler failed; its request is given up.")
            self._abort(requests[0], f"the sampler failed: {_named(error)}")
            return []
        for request, token in chosen:
            if token is None:
                self._abort(request, _NOTHING_LEFT)
        return [(request, token) for request, token in chosen if token is not None]

    def _record(self, request: scheduler.Request, ids: Sequence[int], now: float) -> int:
        """Takes in a request's new tokens up to the one that ends it; returns how many those are."""
        for count, token in enumerate(ids, start=1):
            self._record_one(request, token, now)
            if request.ended:
                return count
        return len(ids)

    def _record_one(self, request: scheduler.Request, token: int, now: float) -> None:
        request.record(token, now)
        stop = token in self._in_flight[request.request_id].ends or self._stops(request, token)
        if not request.ended and (stop or len(request.token_ids) >= request.params.max_tokens):
            self.scheduler.finish(request, "stop" if stop else "length")
            if not request.ended:  # it would go on for ever
                raise RuntimeError(f"the scheduler's finish left request {request.request_id} {request.state.value}.")

    def _stops(self, request: scheduler.Request, token: int) -> bool:
        """Whether the text ends with the token, at a stop string."""
        try:
            return request.stops is not None and request.stops(token)
        except Exception as error:  # noqa: BLE001  this request's text is at fault, and nobody else's
            _log.exception("A token could not be turned into text; its request is given up.")
            self._abort(request, f"its tokens could not be turned into text: {_named(error)}")
            return False

    def _settle(self) -> list[scheduler.Request]:
        """Lets go of the requests that have ended, and looks how things stand."""
        ended = [held.request for held in self._in_flight.values() if held.request.ended]
        for request in ended:
            del self._in_flight[request.request_id]
            self.metrics.count_end(request)
        self.speculation.forget(ended)
        self.metrics.running, self.metrics.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.metrics.waiting += len(self._followers)
        self.metrics.blocks_used, self.metrics.blocks_total = blocks_in_use(self.cache)
        return ended

    def _abort(self, request: scheduler.Request, error: str) -> None:
        if request in self._followers:  # the scheduler has not seen it
            self._followers.remove(request)
            request.end("abort", error)
            self.metrics.count_end(request)
            return
        try:
            self.scheduler.abort(request, error)
        finally:
            if not request.ended:  # whoever waits for it would wait for ever
                request.state, request.finish_reason, request.error = scheduler.State.ABORTED, "abort", error
            if request not in self.scheduler.running:  # a scheduler that was interrupted may have lost sight of it
                self.cache.release(request.request_id)

    def _abort_everything(self, error: str) -> None:
        for request in [*self._followers, *(held.request for held in self._in_flight.values())]:
            try:
                self._abort(request, error)
            except Exception:  # noqa: BLE001  the error that led here is the one to be seen
                _log.exception("A request could not be aborted properly.")
        self._settle()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
