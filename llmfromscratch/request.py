"""A request on its way to an answer: its life cycle, its clock, and what a step computes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llmfromscratch import sampling
from llmfromscratch.errors import OutOfMemory, RequestError


class State(Enum):
    """Where a request stands in its life."""

    WAITING = "waiting"  # not begun: it holds nothing
    PREFILLING = "prefilling"  # its prompt is being computed, in one chunk or several
    DECODING = "decoding"  # one token a step
    PREEMPTED = "preempted"  # lost its memory to others and waits to be computed again
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer, with its clock: seconds on whatever clock the engine reads.

    request_id: its number in the cache, which no other request has at the same time; rising, it settles all ties.
    prompt_token_ids: the prompt. token_ids: what was generated, the end token included.
    params.max_tokens: no more than the context has room for behind the prompt; the engine lowers it to that.
    arrival, first_scheduled, first_token, last_token: when; None until it happens.
    prefix_hits: tokens that were found in the cache, each time it was begun. preemptions: how often it lost its memory.
    finish_reason: "stop", "length" or "abort", and then `error` says why.
    constraint: what narrows its tokens from outside (`sampling.Constraint`). stops: called once with every new token;
    True ends the request with "stop".
    logprobs, prompt_logprobs: of its tokens and its prompt's, where asked for; nothing predicts the prompt's first.
    follows: the request whose prompt it shares; it begins when that one has its first token, or has ended.
    choice: its number among the answers to one prompt.
    drafted, accepted: tokens that were guessed for it, and those among them that stood.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: sampling.SamplingParams
    arrival: float = 0.0
    state: State = State.WAITING
    token_ids: list[int] = field(default_factory=list)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prefix_hits: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    constraint: Any = None
    stops: Callable[[int], bool] | None = None
    logprobs: list[sampling.TokenLogprobs] | None = None
    prompt_logprobs: list[sampling.TokenLogprobs | None] | None = None
    follows: Request | None = None
    choice: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def ids(self) -> list[int]:
        """Prompt and answer so far: all of it must be in the cache, or computed now, to get the next token."""
        return self.prompt_token_ids + self.token_ids

    @property
    def length(self) -> int:
        """How many tokens `ids` has."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def ended(self) -> bool:
        """Finished or aborted: it takes part in no later step."""
        return self.finish_reason is not None

    def begin(self, now: float, hits: int = 0) -> None:
        """A place and memory are taken; `hits` of its tokens were in the cache already. After a preemption: again."""
        self.state = State.PREFILLING
        self.first_scheduled = now if self.first_scheduled is None else self.first_scheduled
        self.prefix_hits += hits

    def end(self, reason: str, error: str | None = None) -> None:
        """The request is over: finished for "stop" or "length", or aborted for "abort"; then `error` says why."""
        self.state = State.ABORTED if reason == "abort" else State.FINISHED
        self.finish_reason, self.error = reason, error

    def record(self, token: int, now: float) -> None:
        """Takes in the token that a step has given, at the time `now`; the request decodes from here on."""
        self.token_ids.append(token)
        self.first_token = now if self.first_token is None else self.first_token
        self.last_token = now
        self.state = State.DECODING

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step it took part in."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds between tokens after the first; None with fewer than two."""
        if self.first_token is None or self.last_token is None or len(self.token_ids) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.token_ids) - 1)


@dataclass(frozen=True)
class Work:
    """What one request computes in a step: its ids [start, start + tokens), and `padding` more for nothing.

    Padding is fed behind the ids and forgotten after the step. A row that has ended computes padding alone.
    """

    request: Request
    start: int
    tokens: int
    padding: int = 0

    @property
    def completes(self) -> bool:
        """Whether the step gives the next token: the work reaches the end of what is known."""
        return not self.request.ended and self.start + self.tokens == self.request.length


def never_fits(request: Request, needed: int, capacity: int | None) -> str | None:
    """Why a request that needs `needed` tokens of cache can never have them, however long it waits; None if it can."""
    if capacity is None or needed <= capacity:
        return None
    return (
        f"request {request.request_id} (a prompt of {len(request.prompt_token_ids)} tokens, at most "
        f"{request.params.max_tokens} more) needs room for {needed} tokens, and the whole cache holds {capacity}. "
        "Give the cache more memory (kv_cache_memory), or shorten the request."
    )


def check_new(request: Request, known: Iterable[Request], needed: int, capacity: int | None) -> None:
    """What every `add` refuses: ValueError for a number in use, OutOfMemory for a request that can never fit."""
    if request.state is not State.WAITING or any(other.request_id == request.request_id for other in known):
        raise ValueError(
            f"request {request.request_id} is {request.state.value}, or another one of that number has not ended; "
            "add each request once, under a number of its own."
        )
    if reason := never_fits(request, needed, capacity):
        raise OutOfMemory(reason)


def check_limits(max_requests: int, max_batch_tokens: int = 1) -> None:
    """Raises RequestError for limits under which nothing could ever run."""
    if max_requests < 1 or max_batch_tokens < 1:
        raise RequestError(f"max_requests={max_requests}, max_batch_tokens={max_batch_tokens}: give at least 1 each.")
