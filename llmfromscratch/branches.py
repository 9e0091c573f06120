"""Several continuations of one prompt, side by side over one cache: beam and contrastive search grow them.

    prompt ── The sky is ─┬─ blue ── and        two branches: they share the blocks of `The sky is blue`,
                          │     └── because     and each has blocks of its own only for what it says alone
                          └─ (given up: released)

A branch is a request of its own in the cache. To branch is to fork, which copies nothing until one of the two writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from llmfromscratch import kv_cache, quantized_cache
from llmfromscratch.batch import Batch
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.errors import OutOfMemory

Made = TypeVar("Made")

_CHUNK = 512  # tokens of a prompt computed in one pass, so that its attention scores stay small
_NUMBERS = itertools.count(-2, -1)  # in the cache: below 0, where no request of the engine is, and never used twice


def take_turn(core: EngineCore, work: Callable[[kv_cache.KVCache], Made]) -> Made:
    """What `work` gives, computed between two steps of an engine with its model and in a cache.

    It is the engine's cache; with a static one, where a fork copies and each branch needs a whole row, a fresh one that
    shares. No step runs meanwhile: a scheduler that finds memory gone, and nobody who has it, gives requests up. If
    requests in flight hold so much that `work` finds no room, it lets go of all it has, and begins again when one of
    them has ended. Raises OutOfMemory when there are none.
    """
    while True:
        try:
            with core.between_steps():
                copies = isinstance(quantized_cache.below(core.cache), kv_cache.StaticKVCache)
                layers = core.model.config.num_layers
                return work(quantized_cache.growing(core.cache, layers) if copies else core.cache)
        except OutOfMemory:
            if not core.has_work:
                raise
        while core.has_work and not any(request.ended for request in core.step()):
            pass  # another thread's step may end one unseen: then this one waits for the next, or for the last


class Branches:
    """Texts that begin with one prompt, all of the same length. There is one at first: the prompt itself.

    network: computes a pass, a `model.Model` or what is called like one. share_prefix: take over what the cache holds
    of the prompt already. Close them in any case: what they hold in the cache is given back by nothing else.
    """

    def __init__(
        self,
        network: Callable[[Batch, kv_cache.KVCache], Tensor],
        cache: kv_cache.KVCache,
        prompt_ids: Sequence[int],
        share_prefix: bool = True,
    ):
        self.network, self.cache = network, cache
        self.texts = [list(prompt_ids)]
        self.requests = [next(_NUMBERS)]
        if share_prefix:
            cache.match_prefix(self.requests[0], self.texts[0])

    def logits(self) -> Tensor:
        """Logits [branches, vocab] of the token that follows each text; what the cache lacks of the texts is computed.

        Raises OutOfMemory where the cache has no room, FloatingPointError for logits that are NaN or infinite.
        """
        while not isinstance(self.cache, kv_cache.NoKVCache) and max(map(len, self._missing())) > _CHUNK:
            self._compute(_CHUNK, logits=False)
        logits = self._compute(None, logits=True)
        if not bool(logits.isfinite().all()):
            raise FloatingPointError("the model's logits are NaN or infinite: its weights or dtype are at fault.")
        return logits

    def _missing(self) -> list[list[int]]:
        pairs = zip(self.requests, self.texts, strict=True)
        return [text[self.cache.length(request) :] for request, text in pairs]

    def _compute(self, tokens: int | None, logits: bool) -> Tensor:
        missing = [ids[:tokens] for ids in self._missing()]
        lengths = map(self.cache.length, self.requests)
        parts = list(zip(self.requests, missing, lengths, strict=True))
        return self.network(Batch.of(parts, logits_at=None if logits else [None] * len(parts)), self.cache)

    def grow(self, ways: Sequence[tuple[int, int]]) -> None:
        """Branch i becomes (branch, token) = ways[i]: that branch as it stands, and one token more.

        A branch may go on in several ways, which share its memory, or in none, and then it is given up. Nothing is
        computed yet.
        """
        texts = [[*self.texts[parent], token] for parent, token in ways]
        self.keep([parent for parent, _ in ways])
        self.texts = texts

    def keep(self, parents: Sequence[int]) -> None:
        """Branch i becomes the branch parents[i] as it stands; those that nobody goes on from are given up."""
        old = self.requests
        self.texts = [self.texts[parent] for parent in parents]
        # the first that goes on from a branch stays the same request, the others are forks of it
        first = [parent not in parents[:place] for place, parent in enumerate(parents)]
        requests = [old[parent] if own else next(_NUMBERS) for parent, own in zip(parents, first, strict=True)]
        self.requests = list({*old, *requests})  # whatever interrupts this: `close` knows all that may be held
        for parent, request in enumerate(old):
            if parent not in parents:
                self.cache.release(request)
        for parent, request in zip(parents, requests, strict=True):
            if request != old[parent]:
                self.cache.fork(old[parent], request)
        self.requests = requests

    def close(self) -> None:
        """Gives back whatever they hold in the cache. Closing twice is fine."""
        for request in self.requests:
            self.cache.release(request)
