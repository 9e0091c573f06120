"""A scheduler of one's own, passed in: one request at a time, the shortest prompt first.

Worth it where each answer is to come as fast as it can, undisturbed, and nobody minds waiting. It has what
`llmfromscratch.scheduler.Scheduler` lists, and inherits nothing.

    python examples/own_scheduler.py
"""

from __future__ import annotations

from llmfromscratch import LLM, OutOfMemory, SamplingParams
from llmfromscratch.kv_cache import KVCache
from llmfromscratch.scheduler import Request, Work


class OneAtATime:
    """Plans the whole prompt of one request, then token after token of it, then the next request."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Takes a request in, or says why it can never be served."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        if self.cache.capacity is not None and longest > self.cache.capacity:
            raise OutOfMemory(f"{longest} tokens are needed, and the cache holds {self.cache.capacity}.")
        self.waiting.append(request)

    def schedule(self, now: float) -> list[Work]:
        """The next step: all that is not in the cache yet of the one that runs."""
        if not self.running and self.waiting:
            request = min(self.waiting, key=lambda one: (len(one.prompt_token_ids), one.request_id))
            hits = self.cache.match_prefix(request.request_id, request.ids)  # begun like an earlier one: not again
            self.waiting.remove(request)
            self.running.append(request)
            request.begin(now, hits)
        for request in self.running:
            stored = self.cache.length(request.request_id)
            self.cache.reserve(request.request_id, request.length - stored)
            return [Work(request, stored, request.length - stored)]
        return []

    def finish(self, request: Request, reason: str) -> None:
        """It has its answer."""
        self._end(request, reason)

    def abort(self, request: Request, error: str) -> None:
        """It ends here, wherever it stands."""
        self._end(request, "abort", error)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        if request.ended:
            return
        (self.running if request in self.running else self.waiting).remove(request)
        self.cache.release(request.request_id)
        request.end(reason, error)


def main() -> None:
    """The second prompt is shorter, so the first waits."""
    llm = LLM(scheduler=OneAtATime)  # called with the cache
    prompts = ["The three longest rivers of the world, beginning with the longest, are", "Once upon a time"]
    for prompt, answer in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=12)), strict=True):
        print(f"{prompt}{answer.text}  [waited {answer.metrics.queue_time:.2f} s]")
    print(f"{llm.metrics.batch_occupancy:.0f} request in a step")


if __name__ == "__main__":
    main()
