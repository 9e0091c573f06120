"""Who computes attention: one place that chooses, so that the model need not know how many ways there are.

    "plain"      PyTorch: `attention.attend`, and decode steps of several requests together (`decode_attention`)
    "tiled"      `optimization.tiled_attention`, one pass in tiles, made to be read (FlashAttention's algorithm)
    "sdpa"       torch's own attention (`attention_sdpa`)
    "compiled"   decode steps by a kernel that Numba compiles (`compiled_decode`), prompts as in "plain"
    "flash"      the flash-attn package on CUDA (`attention_flash`)
    "triton"     our Triton kernels on CUDA, or interpreted (`attention_triton`)
    "auto"       what was measured to be faster: decode steps "compiled", prompts "sdpa" where that pays and can be had;
                 the rest "plain"

A backend is two functions (`Backend`). One that is asked for by name and cannot serve the engine's cache is refused,
in a sentence, when the engine is made. Another cache, as scoring a text has one, then goes the plain way. All of them
keep to a mask (`masks`), or refuse it.

A learner's own `attention.py` or `kv_cache.py` in the engine is what the learner wants to see at work. So "auto" is
"plain" then: prompts and single decode steps go through their `attend` and through their cache's `read`. That ends with
their `optimization.py`, which is about what comes after.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import (
    attention,
    attention_flash,
    attention_sdpa,
    compiled_decode,
    decode_attention,
    kv_cache,
    learner_engine,
    masks,
    optimization,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

_OWN_FILES = {name: str(learner_engine.reference_path(name)) for name in ("attention", "kv_cache", "optimization")}


@dataclass(frozen=True)
class Masked:
    """A kind of backend and the mask that it keeps to: what stands in a layer's `backend` when a mask is set."""

    kind: str
    mask: masks.Mask


@dataclass(frozen=True)
class Backend:
    """attend: as `attention.attend`, with a mask (or None) as one more argument. lacking: why it cannot serve a cache
    and a mask here, in one sentence, None where it can; it compiles what is to be compiled."""

    attend: Callable[[Tensor, int, Batch, Any, masks.Mask | None], Tensor]
    lacking: Callable[[kv_cache.KVCache, masks.Mask | None], str | None]


# ---- the backends that are short ---------------------------------------------------------------------------------


def _plain(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, mask: masks.Mask | None) -> Tensor:
    if mask is not None:
        return _each_request(queries, layer, batch, cache, mask, lambda *parts: attention.grouped_attention(*parts)[0])
    if decode_attention.applies(cache, batch):
        return decode_attention.attend(queries, layer, batch, cache)
    return attention.attend(queries, layer, batch, cache)


def _tiled(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, mask: masks.Mask | None) -> Tensor:
    return _each_request(queries, layer, batch, cache, mask, lambda *parts: optimization.tiled_attention(*parts))


def _each_request(
    queries: Tensor,
    layer: int,
    batch: Batch,
    cache: kv_cache.KVCache,
    mask: masks.Mask | None,
    compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """compute(queries, keys, values, visible) for one request after the other."""
    output = torch.empty_like(queries)
    for span in batch.spans:
        visible: Tensor | None = None  # a single newest token may look at everything there is
        if mask is not None:
            visible = masks.table(mask, span.start, span.length, queries.device)
        elif span.length > 1:
            visible = attention.causal_mask(span.start, span.length, queries.device)
        output[span.rows] = compute(queries[span.rows], *cache.read(layer, span.request_id), visible)
    return output


def _compiled(
    queries: Tensor, layer: int, batch: Batch, cache: Any, mask: masks.Mask | None, prompts: Any = _plain
) -> Tensor:
    if any(span.length == 1 for span in batch.spans):
        return compiled_decode.attend(queries, layer, batch, cache, mask, lambda *parts: prompts(*parts, mask))
    return prompts(queries, layer, batch, cache, mask)


def _compiled_lacks(cache: kv_cache.KVCache, mask: masks.Mask | None) -> str | None:
    if not compiled_decode.fits(cache, 0):
        return (
            "it reads a paged or a static cache in float32 or bfloat16 on the CPU, or in bytes for these, and this one "
            f"is a {type(cache).__name__} of another kind or dtype."
        )
    return compiled_decode.unavailable(cache.storage[0].dtype)


def _best_for_prompts(
    queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, mask: masks.Mask | None
) -> Tensor:
    compute = attention_sdpa.attend if attention_sdpa.pays(queries, batch) else _plain
    return compute(queries, layer, batch, cache, mask)


def _auto(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, mask: masks.Mask | None) -> Tensor:
    if is_learners():
        return _plain(queries, layer, batch, cache, mask)
    if compiled_decode.fits(cache, layer) and compiled_decode.unavailable(cache.storage[layer].dtype) is None:
        return _compiled(queries, layer, batch, cache, mask, _best_for_prompts)
    return _best_for_prompts(queries, layer, batch, cache, mask)


def _elsewhere(name: str) -> Backend:
    """A backend whose module needs what not everyone has: it is imported when it is asked for."""

    def module() -> Any:
        return importlib.import_module(f"llmfromscratch.{name}")

    return Backend(lambda *parts: module().attend(*parts), lambda *parts: module().lacking(*parts))


BACKENDS = {
    "auto": Backend(_auto, lambda cache, mask: None),
    "plain": Backend(_plain, lambda cache, mask: None),
    "compiled": Backend(_compiled, _compiled_lacks),
    "tiled": Backend(_tiled, lambda cache, mask: None),
    "sdpa": Backend(attention_sdpa.attend, attention_sdpa.lacking),
    "flash": Backend(attention_flash.attend, attention_flash.lacking),
    "triton": _elsewhere("attention_triton"),
}
KINDS = tuple(BACKENDS)


# ---- choosing ----------------------------------------------------------------------------------------------------


def check(kind: Any, mask: Any = None) -> None:
    """Raises RequestError for a backend that is not known, and for a mask that is none."""
    if kind not in KINDS:
        raise RequestError(f"attention is {kind!r}; expected one of {', '.join(KINDS)}.")
    masks.check(mask)


def lacking(kind: str, cache: kv_cache.KVCache, mask: masks.Mask | None = None) -> str | None:
    """Why this backend cannot serve a cache and a mask here, in one sentence; None where it can."""
    if hasattr(cache, "attend") and kind not in ("auto", "plain"):
        return f"a {type(cache).__name__} computes its attention itself."
    return BACKENDS[kind].lacking(cache, mask)


def prepare(layers: Iterable[Any], cache: kv_cache.KVCache) -> None:
    """Compiles what a model's layers will need over this cache, so that the first token need not wait for it.

    Raises RequestError where their backend was asked for by name and cannot be had with it, and for a mask over a cache
    that forgets.
    """
    for kind, mask in {read(layer.self_attn.backend) for layer in layers}:
        if mask is not None and hasattr(cache, "attend"):
            raise RequestError(
                f"mask={mask!r} cannot be kept over a {type(cache).__name__} (window=...): that decides itself what is "
                "seen, because it forgets the rest; leave one of them out."
            )
        reason = lacking(kind, cache, mask)
        if reason:
            raise RequestError(
                f'attention="{kind}" cannot be had: {reason} Without the argument, the best is taken that can.'
            )
        if kind == "auto" and not is_learners() and compiled_decode.fits(cache, 0):
            compiled_decode.unavailable(cache.storage[0].dtype)  # tries it out, and so compiles it


def use(kind: str, layers: Iterable[Any], mask: masks.Mask | None = None) -> None:
    """Lets the attention of a model's layers be computed by this backend from now on, under a mask or none."""
    for layer in layers:
        layer.self_attn.backend = kind if mask is None else Masked(kind, mask)


def read(backend: str | Masked) -> tuple[str, masks.Mask | None]:
    """The kind and the mask (or None) of what stands in a layer's `backend`."""
    return (backend.kind, backend.mask) if isinstance(backend, Masked) else (backend, None)


def attend(
    queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, backend: str | Masked = "auto"
) -> Tensor:
    """As `attention.attend`, by this backend: queries [tokens, heads, head_dim]; the same shape."""
    kind, mask = read(backend)
    unfit = kind not in ("auto", "plain") and lacking(kind, cache, mask) is not None
    return BACKENDS["plain" if unfit else kind].attend(queries, layer, batch, cache, mask)


def is_learners() -> bool:
    """Whether "auto" is plain: the engine has an attention.py or a kv_cache.py that is not the package's own, and no
    such optimization.py."""
    files = {"attention": attention.__file__, "kv_cache": kv_cache.__file__}
    if optimization.__file__ != _OWN_FILES["optimization"]:
        return False
    return any(file != _OWN_FILES[name] for name, file in files.items())
