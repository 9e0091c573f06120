"""Two ways to run the events of `page_history`: an allocator alone, and a model on a paged cache.

Both take the learner's classes, so that what is drawn is what they hand out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.widgets.page_history import Event, PageHistory, check_events, run
from llmfromscratch.widgets.token_reading import counted

STORY: tuple[Event, ...] = (
    ("arrive", "A", 13), ("arrive", "B", 33), ("steps", 2), ("fork", "C", "A"), ("steps", 2), ("arrive", "D", 42),
    ("steps", 4), ("leave", "B"), ("arrive", "E", 35, "B", 26), ("leave", "A"), ("steps", 2), ("arrive", "F", 60),
    ("steps", 3), ("leave", "D"), ("arrive", "G", 75), ("steps", 4), ("leave", "C"), ("leave", "F"),
)  # fmt: skip
_LIBRARY = (
    "You are a patient librarian in a small town. Answer every question in one short sentence, and say on which shelf "
    "the book stands. "
)
PROMPTS = {
    "A": "The capital of France is Paris, and the capital of Italy is",
    "B": _LIBRARY + "Who wrote Faust?",
    "D": "Count slowly: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, "
    "fifteen, sixteen, seventeen, eighteen, nineteen, twenty,",
    "E": _LIBRARY + "Where are the maps of the old town?",
    "F": "A letter from the lake: this morning the fog lay on the water until nine, then the boats went out, one after "
    "the other, and at noon the whole village stood at the harbour to see what they had caught. There was",
    "G": "The recipe is my grandmother's. You need six apples, a cup of flour, a cup of sugar, two eggs, some butter "
    "and cinnamon. Peel the apples and cut them into slices. Mix the flour with the sugar, the eggs and the butter. "
    "Put everything into a pan, first the apples, then the dough, and",
}


def record_allocations(
    allocator_class: Callable[..., Any] | None = None,
    events: Sequence[Event] | None = None,
    *,
    num_blocks: int = 32,
    block_size: int = 8,
    max_length: int = 128,
) -> PageHistory:
    """An allocator alone at work; no model computes, and the block tables are kept here.

    allocator_class: called with the number of blocks and a function that is told of each block that is evicted;
    `kv_cache.BlockAllocator` if not given. events: as in `page_history`; STORY if not given.
    """
    events = STORY if events is None else events
    check_events(events, num_blocks)
    make = allocator_class or kv_cache.BlockAllocator
    frame = PageHistory((), num_blocks, block_size, max_length)
    return run(lambda: _AllocatorAlone(make, num_blocks, block_size), events, frame)


def record_pages(
    source: Any,
    prompts: Mapping[str, str | Sequence[int]] | None = None,
    events: Sequence[Event] | None = None,
    *,
    num_blocks: int = 32,
    block_size: int = 8,
    max_length: int = 128,
    allocator_class: Callable[..., Any] | None = None,
    cache_class: Callable[..., Any] | None = None,
) -> PageHistory:
    """Requests on a real model, all that run in one batch a step, on a paged cache of num_blocks blocks.

    source: an LLM, or a `model.Model`. prompts: request -> text (with an LLM) or token ids, PROMPTS for an LLM if not
    given; a request without one gets as many made-up ids as its event says. events: as in `page_history`; STORY if not
    given.
    allocator_class, cache_class: `kv_cache.BlockAllocator` and `kv_cache.PagedKVCache` if not given.
    """
    events = STORY if events is None else events
    check_events(events, num_blocks)
    network = getattr(source, "model", source)
    texts = PROMPTS if prompts is None and hasattr(source, "tokenizer") else prompts or {}
    ids = {name: source.tokenizer.encode(text) if isinstance(text, str) else list(text) for name, text in texts.items()}

    def make() -> _ModelAtWork:
        weights = network.embed_tokens.weight
        layout = kv_cache.CacheLayout.of(network.config, weights.dtype, weights.device)
        cache = (cache_class or kv_cache.PagedKVCache)(layout, num_blocks, block_size)
        if allocator_class is not None:
            cache.allocator = allocator_class(num_blocks, cache.allocator.on_evict)
        return _ModelAtWork(network, cache, ids)

    return run(make, events, PageHistory((), num_blocks, block_size, max_length))


@dataclass
class _AllocatorAlone:
    """Block tables around an allocator: as much of a paged cache as the allocator needs to be seen at work."""

    make: Callable[..., Any]
    num_blocks: int
    block_size: int
    tables: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[Hashable]] = field(default_factory=dict)
    published: dict[tuple[Hashable, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = self.make(self.num_blocks, self._evicted)

    def arrive(self, request: str, count: int, like: str = "", same: int = 0) -> str:
        """Takes a request in, with what is still here of its tokens."""
        prompt: list[Hashable] = [(like if place < same else request, place) for place in range(count)]
        table: list[int] = []
        try:
            for end in range(self.block_size, count, self.block_size):
                if (block := self.published.get(tuple(prompt[:end]))) is None:
                    break
                self.allocator.share(block)
                table.append(block)
            found = len(table) * self.block_size
            while len(table) * self.block_size < count:
                table.append(self._new())
        except OutOfMemory as error:
            self._give_back(table, [])
            return f"{request} is turned away: {error}"
        self.tables[request], self.tokens[request] = table, prompt
        self._publish(request)
        return f"{request} arrives with {counted(count, 'token')}" + (f", {found} of them still here" if found else "")

    def step(self) -> str:
        """One token for each request; who finds no room for it has to leave."""
        gone = [request for request in list(self.tables) if not self._grow(request)]
        ended = f"; out of memory: {', '.join(gone)} cannot go on and gives its blocks back" if gone else ""
        return f"a decode step: {', '.join(self.tables) or 'nobody'}, one token each{ended}"

    def fork(self, request: str, of: str) -> str:
        """Shares all blocks of one request with another."""
        for block in self.tables[of]:
            self.allocator.share(block)
        self.tables[request], self.tokens[request] = list(self.tables[of]), list(self.tokens[of])
        return f"{request} forks from {of}: same blocks, no copy"

    def leave(self, request: str) -> str:
        """Gives a request's blocks back."""
        self._give_back(self.tables.pop(request), self.tokens.pop(request))
        return f"{request} leaves and gives its blocks back"

    def _grow(self, request: str) -> bool:
        """Writes one token; a block that is shared is left to the others and replaced by a copy."""
        table, tokens = self.tables[request], self.tokens[request]
        try:
            if len(tokens) == len(table) * self.block_size:
                table.append(self._new())
            elif self.allocator.ref_counts[table[-1]] > 1:
                copy = self._new()
                self.allocator.release(table[-1])
                table[-1] = copy
        except OutOfMemory:
            self.leave(request)
            return False
        tokens.append((request, len(tokens)))
        self._publish(request)
        return True

    def _new(self) -> int:
        block = self.allocator.allocate()
        if not isinstance(block, int) or not 0 <= block < self.num_blocks:
            raise ValueError(f"allocate() returned {block!r}; a block from 0 to {self.num_blocks - 1} was expected")
        return block

    def _publish(self, request: str) -> None:
        tokens = self.tokens[request]
        for place, block in enumerate(self.tables[request][: len(tokens) // self.block_size]):
            self.published.setdefault(tuple(tokens[: (place + 1) * self.block_size]), block)

    def _give_back(self, table: Sequence[int], tokens: Sequence[Hashable]) -> None:
        """The last block first, so that the fronts of texts, which others may share, are evicted last."""
        for block in reversed(table):
            self.allocator.release(block, keep=block in self.published.values())

    def _evicted(self, block: int) -> None:
        self.published = {tokens: held for tokens, held in self.published.items() if held != block}


@dataclass
class _ModelAtWork:
    """A paged cache under a model that computes every token; greedy, but a fork begins with the second best token."""

    network: Any
    cache: Any
    prompts: Mapping[str, list[int]]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, torch.Tensor] = field(default_factory=dict)
    forked: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def allocator(self) -> Any:
        """The cache's own."""
        return self.cache.allocator

    @property
    def tables(self) -> dict[str, Sequence[int]]:
        """Request -> blocks."""
        return {request: self.cache.block_tables.get(self.numbers[request], ()) for request in self.tokens}

    def arrive(self, request: str, count: int, like: str = "", same: int = 0) -> str:
        """Prefills a prompt, as far as the cache does not hold its beginning."""
        number = self.numbers[request] = len(self.numbers)
        prompt = self.prompts.get(request) or self._made_up(request, count, like, same)
        try:
            found = self.cache.match_prefix(number, prompt)
            self.cache.reserve(number, len(prompt) - found)
        except OutOfMemory as error:
            self.cache.release(number)
            return f"{request} is turned away: {error}"
        self.logits[request] = self.network(Batch.of([(number, prompt[found:], found)]), self.cache)[0]
        self.tokens[request] = list(prompt)
        here = f", {found} of them still here" if found else ""
        return f"{request} arrives with {counted(len(prompt), 'token')}{here}"

    def step(self) -> str:
        """One token for each request, in one batch; who finds no room for it has to leave."""
        gone = [request for request in list(self.tokens) if not self._reserve(request)]
        parts = [(self.numbers[name], [self._next(name)], len(tokens)) for name, tokens in self.tokens.items()]
        logits = self.network(Batch.of(parts), self.cache) if parts else ()
        for request, (_, new, _), row in zip(self.tokens, parts, logits, strict=True):
            self.tokens[request] += new
            self.logits[request] = row
        ended = f"; out of memory: {', '.join(gone)} cannot go on and gives its blocks back" if gone else ""
        return f"a decode step: {', '.join(self.tokens) or 'nobody'}, one token each{ended}"

    def fork(self, request: str, of: str) -> str:
        """Lets a request go on from another's tokens, with another choice."""
        self.numbers[request] = len(self.numbers)
        self.cache.fork(self.numbers[of], self.numbers[request])
        self.tokens[request], self.logits[request] = list(self.tokens[of]), self.logits[of]
        self.forked.add(request)
        return f"{request} forks from {of}: same blocks, no copy"

    def leave(self, request: str) -> str:
        """Gives a request's blocks back."""
        self.cache.release(self.numbers[request])
        del self.tokens[request], self.logits[request]
        return f"{request} leaves and gives its blocks back"

    def _reserve(self, request: str) -> bool:
        try:
            self.cache.reserve(self.numbers[request], 1)
        except OutOfMemory:
            self.leave(request)
            return False
        return True

    def _next(self, request: str) -> int:
        best = self.logits[request].topk(2).indices.tolist()
        rank = int(request in self.forked)
        self.forked.discard(request)
        return best[rank]

    def _made_up(self, request: str, count: int, like: str, same: int) -> list[int]:
        """Ids that differ between requests at every place, but for those that begin like another."""
        names = [like if place < same else request for place in range(count)]
        vocabulary = self.network.config.vocab_size
        return [(sum(map(ord, name)) * 31 + place * 7) % vocabulary for place, name in enumerate(names)]
