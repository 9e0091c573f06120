"""Text read for its logits alone, as evaluations need it: cut into windows, and computed by whatever model there is.

    text -> ids -> windows that overlap -> logits of the tokens that no window before has counted

An `LLM` reads through its own layers, attention and cache, so that what any of them rounds is seen; a bare network, as
a chapter has it in the middle of an experiment, reads through a fresh cache that rounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import kv_cache, tokenizer
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError
from llmfromscratch.intake import Intake

SIZE = 512  # tokens of a window
_PASS = 512  # tokens computed at once
_NOBODY = -1  # a number that the engine gives to no request


@dataclass(frozen=True)
class Window:
    """Token ids that are read together, and the index of the first one that counts: those before are context."""

    ids: tuple[int, ...]
    first: int

    @property
    def counted(self) -> int:
        """How many of its tokens count."""
        return len(self.ids) - self.first


def windows(ids: Sequence[int], size: int = SIZE, stride: int | None = None) -> list[Window]:
    """Windows of `size` tokens, each beginning `stride` tokens after the one before; the last may be shorter.

    A token counts in the first window that can predict it, so all but the text's first count once, with at least
    size - stride tokens before them. stride: 1 to size; None: size, windows side by side, each of which then has a
    first token that nothing predicts. Raises RequestError for a text too short or sizes that cannot be meant.
    """
    stride = size if stride is None else stride
    if not isinstance(size, int) or size < 2 or not isinstance(stride, int) or not 1 <= stride <= size:
        raise RequestError(
            f"windows of {size!r} tokens, {stride!r} apart, cannot be meant: a size is at least 2, a stride 1 to size."
        )
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} tokens; nothing predicts the first, so give at least 2.")
    found, done = [], 0
    for start in range(0, len(ids), stride):
        end = min(start + size, len(ids))
        first = max(done - start, 1)
        if end - start > first:
            found.append(Window(tuple(ids[start:end]), first))
        done = end
        if end == len(ids):
            break
    return found


def windows_of(side: Any, text: Any, size: int = SIZE, stride: int | None = None) -> list[Window]:
    """The windows of a text for a model: text, token ids, or int64 [count, length], whose rows are windows already.

    side: an `LLM` or a `model.Model`, which takes no text. Raises RequestError, TokenizerError.
    """
    if isinstance(text, Sequence) and text and all(isinstance(each, Window) for each in text):
        return list(text)
    if isinstance(text, Tensor) and text.dim() == 2:
        return [found for row in text for found in windows_of(side, row, max(2, len(row)))]
    config = side.config
    given = text.tolist() if isinstance(text, Tensor) else text
    ids = Intake(config, getattr(side, "tokenizer", None), tokenizer.TokenizerConfig(), None).ids(given, "text")
    if min(size, len(ids)) > config.context_length:
        raise RequestError(f"windows of {size} tokens are longer than the context, {config.context_length}.")
    return windows(ids, size, stride)


@contextmanager
def opened(side: Any) -> Iterator[tuple[Any, kv_cache.KVCache]]:
    """The network that computes for a model, and the cache it reads through; what is written becomes nobody's prefix.

    Of an LLM it is its own cache, between two steps. Whoever writes releases.
    """
    if not hasattr(side, "core"):
        yield side, kv_cache.ConcatKVCache(side.config.num_layers)
        return
    with side.core.between_steps():
        cache = side.core.cache
        before = getattr(cache, "prefix_sharing", None)
        try:
            if before is not None:
                cache.prefix_sharing = False
            yield side.core.model, cache
        finally:
            if before is not None:
                cache.prefix_sharing = before


def logits_of(side: Any, window: Window) -> Tensor:
    """What a model expects in the place of each token of a window that counts: logits, float32 [counted, vocab].

    Raises OutOfMemory where an LLM's cache has no room for the window, ValueError for logits that are NaN or infinite.
    """
    ids, wanted = window.ids[:-1], range(window.first - 1, len(window.ids) - 1)  # the last predicts no token of it
    pieces = []
    with opened(side) as (network, cache):
        size = len(ids) if isinstance(cache, kv_cache.NoKVCache) else _PASS
        try:
            for start in range(0, len(ids), size):
                part = ids[start : start + size]
                rows = [row - start for row in wanted if start <= row < start + len(part)]
                pieces.append(network(Batch.of([(_NOBODY, part, start)], logits_at=[rows or None]), cache).float())
        finally:
            cache.release(_NOBODY)
    logits = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are NaN or infinite: its weights or dtype are at fault.")
    return logits
