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

import torch
from torch import Tensor

from llmfromscratch import kv_cache, model, sampling, scheduler
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.metrics import EngineMetrics
from llmfromscratch.steps import StepRecord, blocks_in_use, plan_step

_FILLER = 0  # the token id of padding: its keys and values are computed and taken back, and nobody looks at them
_BAD_LOGITS = "the model's logits are NaN or infinite: its weights or dtype are at fault."
_log = logging.getLogger(__name__)


class _InFlight(NamedTuple):
    request: scheduler.Request
    ends: frozenset[int]  # the token ids that end it
    stream: Any  # its random numbers: kept here, they outlive a preemption


class _Letter(NamedTuple):
    request: scheduler.Request
    error: str | None  # why it is to end; None: it is to begin


class EngineCore:
    """Runs requests step by step over a model, a cache, a scheduler and a sampler.

    eos_token_ids: end every request that does not ignore them. context_length: tokens of prompt and answer at most.
    clock: seconds; on_step is given the record of every step.
    """

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
    ):
        self.model, self.cache, self.scheduler, self.sampler = model, cache, scheduler, sampler
        self.eos_token_ids, self.context_length = frozenset(eos_token_ids), context_length
        self.clock, self.on_step = clock, on_step
        self._lock = threading.Lock()
        self.metrics = EngineMetrics()
        self._in_flight: dict[int, _InFlight] = {}
        self._inbox: deque[_Letter] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._in_flight or self._inbox)

    def add(self, request: scheduler.Request) -> None:
        """Takes a request in, now or, while a step is under way, after it. Never waits.

        One that can never be served ends with the reason in its `error`. No answer is longer than the context has room
        for: max_tokens is lowered to that. Raises ValueError for the number of a request that is in flight.
        """
        if request.request_id in self._in_flight:
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
        self._settle()

    def _begin(self, request: scheduler.Request) -> None:
        params, prompt = request.params, len(request.prompt_token_ids)
        room = self.context_length - prompt
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        try:
            if room < 1:
                raise OutOfMemory(
                    f"the prompt has {prompt} tokens; the context holds {self.context_length}, with answer."
                )
            request.params = replace(params, max_tokens=min(params.max_tokens, room))
            held = _InFlight(request, ends, self.sampler.random_stream(params.seed))
            self.scheduler.add(request)
            self._in_flight[request.request_id] = held
        except OutOfMemory as error:
            self._abort(request, str(error))
            self.metrics.count_end(request)
        except BaseException as error:
            self._abort(request, f"the engine was stopped by {_named(error)}")
            raise

    def _step(self) -> list[scheduler.Request]:
        plan, record = plan_step(self.scheduler, self.cache, self.clock())
        served = self._settle()
        if not plan:
            if not served:
                raise RuntimeError(f"the scheduler plans nothing, and {len(self._in_flight)} requests are in flight.")
            return served
        tokens = self._choose(plan, self._forward(plan))
        now = self.clock()
        for request, token in tokens:
            self._record(request, token, now)
        record = record.ended(now)
        self.metrics.count_step(record, len(tokens))
        served += [request for request, _ in tokens]
        served += [request for request in self._settle() if request not in served]
        if self.on_step is not None:
            self.on_step(record)
        return served

    def _forward(self, plan: Sequence[scheduler.Work]) -> Tensor | None:
        """Logits [rows of those that complete, vocab]; None if the pass failed, and all of the plan are aborted."""
        parts, wanted = [], []
        for work in plan:
            new = work.request.ids[work.start : work.start + work.tokens]
            parts.append((work.request.request_id, new + [_FILLER] * work.padding, work.start))
            wanted.append(work.tokens - 1 if work.completes else None)
        try:
            logits = self.model(Batch.of(parts, logits_at=wanted), self.cache)
            for work in plan:
                if work.padding:  # it stood behind the request's own tokens, so none of them has seen it
                    self.cache.rewind(work.request.request_id, work.padding)
            return logits
        except NotImplementedError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, it must not take down those who had no part in it
            _log.exception("A step failed; its requests are given up.")
            for work in plan:
                self._abort(work.request, f"the model failed in a step of this request: {_named(error)}")
            return None

    def _choose(self, plan: Sequence[scheduler.Work], logits: Tensor | None) -> list[tuple[scheduler.Request, int]]:
        """The next token of each request that gets one."""
        if logits is None:
            return []
        chosen = []
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # once, instead of in every look at a row
        finite = (logits - logits).sum(dim=-1).eq(0).tolist()  # inf - inf is NaN: a tenth of the time of isfinite
        for work, row, good in zip(filter(lambda work: work.completes, plan), logits, finite, strict=True):
            request = work.request
            stream = self._in_flight[request.request_id].stream
            if not good:
                self._abort(request, _BAD_LOGITS)
                continue
            try:
                chosen.append((request, self.sampler.sample(row, request.params, stream)))
            except NotImplementedError:
                raise
            except Exception as error:  # noqa: BLE001  the others have logits of their own
                _log.exception("The sampler failed; its request is given up.")
                self._abort(request, f"the sampler failed: {_named(error)}")
        return chosen

    def _record(self, request: scheduler.Request, token: int, now: float) -> None:
        request.record(token, now)
        stop = token in self._in_flight[request.request_id].ends
        if stop or len(request.token_ids) >= request.params.max_tokens:
            self.scheduler.finish(request, "stop" if stop else "length")
            if not request.ended:  # it would go on for ever
                raise RuntimeError(f"the scheduler's finish left request {request.request_id} {request.state.value}.")

    def _settle(self) -> list[scheduler.Request]:
        """Lets go of the requests that have ended, and looks how things stand."""
        ended = [held.request for held in self._in_flight.values() if held.request.ended]
        for request in ended:
            del self._in_flight[request.request_id]
            self.metrics.count_end(request)
        self.metrics.running, self.metrics.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.metrics.blocks_used, self.metrics.blocks_total = blocks_in_use(self.cache)
        return ended

    def _abort(self, request: scheduler.Request, error: str) -> None:
        try:
            self.scheduler.abort(request, error)
        finally:
            if not request.ended:  # whoever waits for it would wait for ever
                request.state, request.finish_reason, request.error = scheduler.State.ABORTED, "abort", error
            if request not in self.scheduler.running:  # a scheduler that was interrupted may have lost sight of it
                self.cache.release(request.request_id)

    def _abort_everything(self, error: str) -> None:
        for held in list(self._in_flight.values()):
            try:
                self._abort(held.request, error)
            except Exception:  # noqa: BLE001  the error that led here is the one to be seen
                _log.exception("A request could not be aborted properly.")
        self._settle()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
