"""Who computes attention: one place that chooses, so that the model need not know how many ways there are.

    "plain"      PyTorch: `attention.attend`, and decode steps of several requests together (`decode_attention`)
    "compiled"   decode steps by the compiled kernel (`compiled_decode`), prompts as in "plain"
    "auto"       "compiled" where it can be had, as it was faster wherever it was measured; else "plain"

A backend is a function: attend(queries, layer, batch, cache) -> output. What a backend cannot serve (another dtype,
device or cache; a batch of prompts alone) goes the plain way.

A learner's own `attention.py` or `kv_cache.py` in the engine is what the learner wants to see at work. So "auto" is
"plain" then: prompts and single decode steps go through their `attend` and through their cache's `read`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from llmfromscratch import attention, compiled_decode, decode_attention, kv_cache, learner_engine
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

KINDS = ("auto", "plain", "compiled")
_OWN_FILES = tuple(str(learner_engine.reference_path(name)) for name in ("attention", "kv_cache"))


def check(kind: Any) -> None:
    """Raises RequestError for a backend that is not known."""
    if kind not in KINDS:
        raise RequestError(f"attention is {kind!r}; expected one of {', '.join(KINDS)}.")


def prepare(kind: str, cache: kv_cache.KVCache) -> None:
    """Compiles what a model with this cache will need, so that the first token need not wait for it.

    Raises RequestError where "compiled" is asked for and cannot be had.
    """
    if kind == "plain" or (kind == "auto" and _is_learners()):
        return
    if not compiled_decode.fits(cache, 0):
        if kind == "compiled":
            raise RequestError(
                'attention="compiled" reads a paged or a static cache in float32 or bfloat16 on the CPU, and this one '
                f'is a {type(cache).__name__} of another kind or dtype; leave it out, or give attention="plain".'
            )
        return
    lacking = compiled_decode.unavailable(cache.storage[0].dtype)
    if kind == "compiled" and lacking:
        raise RequestError(f'attention="compiled" cannot be had: {lacking}')


def use(kind: str, layers: Iterable[Any]) -> None:
    """Lets the attention of a model's layers be computed by this backend from now on."""
    for layer in layers:
        layer.self_attn.backend = kind


def attend(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, kind: str = "auto") -> Tensor:
    """As `attention.attend`, by the backend of this kind: queries [tokens, heads, head_dim]; the same shape."""
    if kind == "compiled" or (kind == "auto" and not _is_learners()):
        steps = any(span.length == 1 for span in batch.spans)
        if steps and compiled_decode.fits(cache, layer) and compiled_decode.unavailable(queries.dtype) is None:
            return compiled_decode.attend(queries, layer, batch, cache)
    if decode_attention.applies(cache, batch):
        return decode_attention.attend(queries, layer, batch, cache)
    return attention.attend(queries, layer, batch, cache)


def _is_learners() -> bool:
    """Whether the engine has an attention.py or a kv_cache.py that is not the package's own."""
    return (attention.__file__, kv_cache.__file__) != _OWN_FILES
