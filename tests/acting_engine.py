"""An engine without a model, for the tests of schedulers: it computes what is planned into a real cache and looks on.

Its "model" reads the whole text of a request back out of the cache, and the next token depends on every token and its
place there. So a token that is lost, doubled or written into somebody else's memory changes the answer, and `answer`
says what the answer must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from llmfromscratch import kv_cache, sampling, scheduler, simulation
from llmfromscratch.batch import Batch

FILLER = 99


def next_token(text: Sequence[int]) -> int:
    return sum((place + 1) * (token + 3) for place, token in enumerate(text)) % 7


def answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """What a request must get that asks for so many tokens."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(next_token(text))
    return text[len(prompt) :]


def layout() -> kv_cache.CacheLayout:
    return kv_cache.CacheLayout(1, 1, 1, torch.float64, (torch.device("cpu"),))


def paged(num_blocks: int, block_size: int = 4, prefix_sharing: bool = True) -> kv_cache.PagedKVCache:
    return kv_cache.PagedKVCache(layout(), num_blocks, block_size, prefix_sharing)


def request(
    number: int, prompt: int | Sequence[int], max_tokens: int = 4, arrival: float = 0.0, priority: int = 0
) -> scheduler.Request:
    """prompt: the ids, or how many (different ones for each request, so that nothing is shared by accident)."""
    ids = [(number * 31 + place) % 89 for place in range(prompt)] if isinstance(prompt, int) else list(prompt)
    params = sampling.SamplingParams(max_tokens=max_tokens, ignore_eos=True, priority=priority)
    return scheduler.Request(number, ids, params, arrival)


class Engine:
    """Steps a scheduler over a cache; one step takes one second. `history` has each step's plan."""

    def __init__(self, cache, make_scheduler: Callable[..., scheduler.Scheduler]):
        self.cache, self.scheduler, self.now = cache, make_scheduler(cache), 0.0
        self.history: list[list[scheduler.Work]] = []

    def add(self, *requests: scheduler.Request) -> None:
        for one in requests:
            self.scheduler.add(one)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[scheduler.Work]:
        plan = self.scheduler.schedule(self.now)
        self.history.append(plan)
        self.now += 1
        completes = [work.completes for work in plan]
        tokens = self.compute(plan)
        for work, ends, token in zip(plan, completes, tokens, strict=True):
            if ends:
                work.request.record(token, self.now)
                if len(work.request.token_ids) == work.request.params.max_tokens:
                    self.scheduler.finish(work.request, "length")
        if hasattr(self.cache, "audit"):
            self.cache.audit()
        return plan

    def run(self, most: int = 1000) -> None:
        for _ in range(most):
            if not self.busy:
                return
            self.step()
        raise AssertionError(f"after {most} steps there is still something to do")

    def compute(self, plan: Sequence[scheduler.Work]) -> list[int]:
        """Each request's next token, as far as its text is in the cache."""
        if isinstance(self.cache, simulation.SimulatedCache):
            for work in plan:
                self.cache.advance(work.request.request_id, work.tokens)
            return [next_token(work.request.ids) for work in plan]
        parts = [(work.request.request_id, self.fed(work), work.start) for work in plan]
        if not parts:
            return []
        rows = torch.tensor([token for _, ids, _ in parts for token in ids], dtype=torch.float64)[:, None, None]
        self.cache.write(0, rows, -rows, Batch.of(parts))
        tokens = []
        for work in plan:
            keys, values = self.cache.read(0, work.request.request_id)
            assert torch.equal(keys, -values)
            text = [int(key) for key in keys[: work.start + work.tokens, 0, 0]]
            assert text == work.request.ids[: work.start + work.tokens]
            tokens.append(next_token(text))
        for work in plan:
            self.cache.rewind(work.request.request_id, work.padding)
        return tokens

    def fed(self, work: scheduler.Work) -> list[int]:
        return work.request.ids[work.start : work.start + work.tokens] + [FILLER] * work.padding

    def held_blocks(self) -> int:
        return len(self.cache.allocator.ref_counts) - self.cache.allocator.num_available
