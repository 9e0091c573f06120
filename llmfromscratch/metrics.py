"""What a request and an engine have been through, in numbers: for `Completion.metrics` and `LLM.metrics`."""

from __future__ import annotations

from dataclasses import dataclass

from llmfromscratch import scheduler
from llmfromscratch.steps import StepRecord


class _Drafted:
    """What can be said of drafts: how many there were, and how many stood."""

    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """The share of the drafts that stood; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class RequestMetrics(_Drafted):
    """One request's figures; times in seconds, None where it did not come so far.

    queue_time: from arrival to the first step it took part in. ttft: to its first token. tpot: between two tokens after
    the first, on average. tokens: generated. preemptions: how often it lost its memory. prefix_hits: tokens that were
    in the cache already, counted anew each time it began. drafted, accepted: tokens that were guessed for it
    (speculative decoding), and those among them that stood.
    """

    queue_time: float | None
    ttft: float | None
    tpot: float | None
    tokens: int
    preemptions: int
    prefix_hits: int
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, request: scheduler.Request) -> RequestMetrics:
        """The figures of a request as it stands."""
        return cls(
            request.queue_time,
            request.ttft,
            request.tpot,
            len(request.token_ids),
            request.preemptions,
            request.prefix_hits,
            request.drafted,
            request.accepted,
        )


@dataclass
class EngineMetrics(_Drafted):
    """An engine's figures: how it stands now, and totals since it was made.

    running, waiting: requests now. blocks_used, blocks_total: of the cache, now; 0 where it has no blocks.
    steps, busy_seconds: how many, and how long they took together; scheduling_seconds: the planning among it.
    drafted, accepted: tokens that were guessed in all steps, and those among them that stood.
    tokens: generated. finished, aborted, preemptions, prefix_hits: of all requests, as in `RequestMetrics`.
    """

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    tokens: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    drafted: int = 0
    accepted: int = 0
    useful_rows: int = 0  # requests that computed something of use, summed over the steps

    @property
    def batch_occupancy(self) -> float:
        """Mean number of requests that a step computed something of use for; 0 before the first step."""
        return self.useful_rows / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of computing; 0 before the first step."""
        return self.tokens / self.busy_seconds if self.busy_seconds else 0.0

    def count_step(self, record: StepRecord, tokens: int, drafted: int = 0, accepted: int = 0) -> None:
        """Takes in a step that is over and gave so many tokens, having verified so many drafts."""
        self.drafted += drafted
        self.accepted += accepted
        self.steps += 1
        self.tokens += tokens
        self.busy_seconds += record.end - record.start
        self.scheduling_seconds += record.scheduling_seconds
        self.preemptions += len(record.preempted)
        self.useful_rows += sum(part.phase != "idle" for part in record.work)

    def count_end(self, request: scheduler.Request) -> None:
        """Takes in a request that has ended."""
        if request.finish_reason == "abort":
            self.aborted += 1
        else:
            self.finished += 1
        self.prefix_hits += request.prefix_hits
