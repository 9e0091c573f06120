"""Decode steps as compiled graphs: `torch.compile` sees a whole layer and writes one function for it.

    rows -> 1 2 4 8     A graph is compiled for fixed shapes. Batches and contexts are rounded up to buckets, and each
    256     ■ · · ·     bucket (■) is compiled when a step first needs it. One layer is compiled and called for all of
    512     ■ ■ · ·     them with their own weights, so a bucket takes seconds, not minutes; the code is kept on disk.
    1024    · · · ·

What stays equal: every number, but for the order of additions. Where it wins: steps of few requests, where beginning
operations and writing down what lies between them takes long. What it costs: seconds at each new bucket, a context
that is read up to the end of its bucket, and a C++ compiler on the machine (on CUDA torch brings one, Triton).

Served are passes with one token a request over a paged or static cache. Prompts, drafts that are verified, and more
requests than the largest bucket has go through the model's own layers, whichever those are. Embedding, last norm and
head stay the model's own too. A learner's `model.py` is welcome: the first graph is held against its forward pass.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from llmfromscratch import attention_backends, kv_cache, masks, model, optimization
from llmfromscratch.batch import Batch, Span
from llmfromscratch.errors import RequestError
from llmfromscratch.progress import progress_bar

SMALLEST_CONTEXT = 256  # tokens: below, attention takes so little that more buckets would not pay
MOST_ROWS = {"cpu": 8, "cuda": 64}  # requests; on a processor PyTorch's products, which take rows together, win then
_SUMMED = {"cpu": 4, "cuda": 1}  # rows up to which a product is written as sums: 1.5 to 2.5 times as fast there
_STRIDE = 16  # see _attend; of 4 to 64 none is clearly better
_NOBODY = -1  # a number that the engine gives to no request
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest logit; half precision: 0.2
_log = logging.getLogger(__name__)


# ---- choosing ----------------------------------------------------------------------------------------------------


def check(compile: Any, layers: str, attention: str) -> None:
    """Raises RequestError for a value of LLM(compile=...) that cannot be meant, alone or beside the other two."""
    if not isinstance(compile, bool):
        raise RequestError(f"compile is {compile!r}; it must be True or False.")
    for name, kind in (("layers", layers), ("attention", attention)):
        if compile and kind in ("compiled", "triton", "flash"):
            raise RequestError(
                f"compile=True gives decode steps to torch.compile, and {name}={kind!r} has kernels of its own for "
                f'them; leave one of the two out, or give {name}="auto", which then serves the rest.'
            )


def of(compile: bool, network: model.Model) -> Any:
    """What the engine calls in the place of a model: the model itself, or one whose decode steps are compiled."""
    return GraphedModel(network) if compile else network


def prepare(network: Any, cache: kv_cache.KVCache) -> None:
    """See `GraphedModel.prepare`; nothing for any other model."""
    if isinstance(network, GraphedModel):
        network.prepare(cache)


def lacking(network: Any, cache: kv_cache.KVCache) -> str | None:
    """Why the decode steps of a model over a cache cannot be compiled, in one sentence; None where nothing is known
    against it. A cache derived from one of ours may read in a way of its own, and is none of those that can be served.
    """
    if type(cache) not in (kv_cache.PagedKVCache, kv_cache.StaticKVCache):
        return f"graphs read a paged or a static cache, and this one is a {type(cache).__name__}."
    devices = {weight.device for weight in network.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in MOST_ROWS:
        names = ", ".join(sorted(map(str, devices)))
        return f"graphs are compiled for one device, the CPU or CUDA, and the model lies on {names}."
    for layer in network.layers:
        for name, part in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
            weight = getattr(part, "weight", None)
            if name.endswith("_proj") and not (isinstance(weight, Tensor) and weight.is_floating_point()):
                return f"graphs multiply with plain weights, and {name} is a {type(part).__name__} without them."
    if len(set(map(_mask_of_layer, network.layers))) > 1:
        return "all layers of a graph are one function, and these have different masks."
    return _no_compiler() if next(iter(devices)).type == "cpu" else None


def _mask_of_layer(layer: Any) -> masks.Mask | None:
    return attention_backends.read(layer.self_attn.backend)[1]


def _no_compiler() -> str | None:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:  # another version of torch; compiling the first graph will tell
        return None
    try:
        get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
        remedy = "on the CPU torch.compile needs a C++ compiler: install g++, or name yours in the variable CXX"
        return f"{remedy} ({type(error).__name__})."
    return None


# ---- what is compiled --------------------------------------------------------------------------------------------


class LayerWeights(NamedTuple):
    """A layer's weights as its modules have them; what a layer lacks is None."""

    first_gain: Tensor
    second_gain: Tensor
    query_gain: Tensor | None
    key_gain: Tensor | None
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """The tensors themselves: nothing is copied."""
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
        parts: list[Any] = [_own(norm, "weight") for norm in norms]
        return cls(*parts, *map(_weight_and_bias, (*products, mlp.gate_proj, mlp.up_proj, mlp.down_proj)))


def _weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight.detach(), _own(linear, "bias")


def _own(module: Any, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.detach()


class Sizes(NamedTuple):
    """What is fixed for all layers. head_stride, value_start: rows of the cache from a head to the next one, and from a
    key to its value. summed: see _SUMMED."""

    heads: int
    kv_heads: int
    head_stride: int
    value_start: int
    eps: float
    summed: int


def _layer(
    x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, counts: Tensor, newest: Tensor,
    rows: Tensor, weights: LayerWeights, sizes: Sizes,
) -> Tensor:  # fmt: skip
    """One decoder layer for the newest token of each request; its key and value are written to the cache.

    x: [requests, hidden]; returns the same. slots: int64 [requests, context], where the tokens that it sees lie for the
    first head, of which the first `counts` (int64 [requests]) count; newest: int64 [requests], where its own goes.
    rows: [all rows of a layer's cache, head_dim].
    """
    asked = _normalize(x, weights.first_gain, sizes.eps)
    queries, keys, values = (
        _product(asked, *part, sizes.summed).view(len(x), -1, rows.shape[1])
        for part in (weights.query, weights.key, weights.value)
    )
    if weights.query_gain is not None and weights.key_gain is not None:
        queries = _normalize(queries, weights.query_gain, sizes.eps)
        keys = _normalize(keys, weights.key_gain, sizes.eps)
    of_heads = torch.arange(sizes.kv_heads, device=x.device) * sizes.head_stride
    own = newest[:, None] + of_heads
    rows[own] = model.rotate(keys, cos, sin).to(rows.dtype)
    rows[own + sizes.value_start] = values.to(rows.dtype)
    mixed = _attend(model.rotate(queries, cos, sin), slots[:, None] + of_heads[:, None], counts, rows, sizes)
    x = x + _product(mixed, *weights.output, sizes.summed)
    asked = _normalize(x, weights.second_gain, sizes.eps)
    activated = F.silu(_product(asked, *weights.gate, sizes.summed)) * _product(asked, *weights.up, sizes.summed)
    return x + _product(activated, *weights.down, sizes.summed)


def _attend(queries: Tensor, where: Tensor, counts: Tensor, rows: Tensor, sizes: Sizes) -> Tensor:
    """queries: [requests, heads, head_dim]; where: int64 [requests, kv_heads, context], rows of the keys. Returns
    [requests, heads * head_dim]."""
    requests, kv_heads, context = where.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    hidden = (torch.arange(context, device=where.device) >= counts[:, None])[:, None, None]
    asked = (queries.to(wide) * queries.shape[-1] ** -0.5).view(requests, kv_heads, -1, 1, queries.shape[-1])
    scores = (asked * rows[where].to(wide).unsqueeze(2)).sum(-1).masked_fill(hidden, -torch.inf)
    values = rows[where + sizes.value_start].to(wide)
    # every _STRIDE-th token is summed first: in one sum over all, the compiler makes the tokens its innermost loop, and
    # picks single numbers out of the cache, instead of whole rows: four times as slow
    stride = math.gcd(context, _STRIDE)
    weights = scores.softmax(dim=-1).view(requests, kv_heads, -1, context // stride, stride, 1)
    mixed = (weights * values.view(requests, kv_heads, 1, context // stride, stride, -1)).sum(3).sum(3)
    return mixed.reshape(requests, -1).to(queries.dtype)


def _normalize(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, summed: int) -> Tensor:
    """x @ weight.T + bias. Few rows are sums over products, which are compiled into one loop over the weight."""
    if len(x) > summed:
        return F.linear(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    output = torch.stack([(row.to(wide) * weight.to(wide)).sum(-1) for row in x])
    return (output if bias is None else output + bias).to(x.dtype)


class _Graph:
    """The compiled layer of one bucket over one cache, and on CUDA the whole pass as one recorded sequence."""

    def __init__(self, name: str, weights: Sequence[LayerWeights], rows: Sequence[Tensor], sizes: Sizes):
        self.weights, self.rows, self.sizes = weights, rows, sizes
        # torch.compile keeps what it has made with a function's code, and gives up after some shapes of one code; it is
        # told to keep shapes apart (dynamic=False), so each bucket brings code of its own
        own = FunctionType(_layer.__code__.replace(co_name=name), _layer.__globals__, name)
        self.layer = torch.compile(own, dynamic=False, fullgraph=True)
        self._replay: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """inputs: x, cos, sin, slots, counts, newest, as for `_layer`. Returns the stream behind the last layer."""
        if inputs[0].device.type != "cuda":
            return self._compute(*inputs)
        if self._replay is None:
            self._replay = _record(self._compute, inputs)
        return self._replay(*inputs)

    def _compute(self, x: Tensor, *others: Tensor) -> Tensor:
        for weights, rows in zip(self.weights, self.rows, strict=True):
            x = self.layer(x, *others, rows, weights, self.sizes)
        return x


def _record(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """A CUDA graph of `compute`: the GPU gets its hundreds of kernels in one piece, without the processor in between.

    It reads and writes the same memory each time, so inputs are copied there, and the result holds until the next call.
    """
    held = [tensor.clone() for tensor in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and settles what is allocated; what it writes is written again later
        compute(*held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compute(*held)

    def replay(*new: Tensor) -> Tensor:
        for place, tensor in zip(held, new, strict=True):
            place.copy_(tensor)
        graph.replay()
        return output

    return replay


# ---- the model that the engine calls -----------------------------------------------------------------------------


class GraphedModel:
    """A model whose decode steps are compiled graphs; the rest of it, and what is asked of it, is the model's own.

    smallest_context, most_rows: of the buckets. seconds: (rows, context) -> how long its graph took to compile.
    """

    def __init__(self, network: model.Model, smallest_context: int = SMALLEST_CONTEXT, most_rows: int | None = None):
        self.network, self.smallest_context = network, smallest_context
        device = network.embed_tokens.weight.device.type
        self.most_rows = MOST_ROWS.get(device, 1) if most_rows is None else most_rows
        self.seconds: dict[tuple[int, int], float] = {}
        self._summed = _SUMMED.get(device, 1)
        self._mask: masks.Mask | None = None
        self._weights: list[LayerWeights] = []
        self._cache: Any = None  # the one that the graphs are compiled over
        self._rows: list[Tensor] = []
        self._graphs: dict[tuple[int, int], _Graph | None] = {}  # None: it could not be compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: Any) -> Tensor:
        """As `model.Model`: logits [rows that need one, vocab]; keys and values are written to the cache."""
        fits = len(batch.spans) <= self.most_rows and all(span.length == 1 for span in batch.spans)
        if cache is not self._cache or not fits:
            return self.network(batch, cache)
        cache.begin(batch)
        try:
            logits = self._step(batch)
        except _CannotCompileError as error:
            if str(error):  # it is said once
                _log.warning("%s; such steps go through the model's own layers.", error)
            return self.network(batch, cache)
        end = cache.end if hasattr(cache, "end") else cache.counts.advance
        for layer in range(len(self._rows)):  # only now: a pass that failed half-way has stored nothing
            end(layer, batch)
        return logits

    @torch.inference_mode()
    def prepare(self, cache: kv_cache.KVCache) -> None:
        """Compiles the smallest graph over a cache, which is the one that steps are served over from now on, and holds
        its logits against those of the model's forward pass.

        No request may be in flight. Raises RequestError where graphs cannot be had.
        """
        if cache is self._cache:
            return
        reason = lacking(self.network, cache)
        if reason is None:
            self._bind(cache)
            try:
                reason = self._differs(cache)
            except _CannotCompileError as error:
                reason = f"{error}."
        if reason is not None:
            self._cache, self._graphs = None, {}
            raise RequestError(f"compile=True cannot be had: {reason} Leave it out, and the model's layers compute.")

    @torch.inference_mode()
    def compile(self, requests: int, context: int) -> None:
        """Compiles the graph for steps of so many requests of so many tokens now, so that none has to wait for it.

        Call it after `prepare`, while no request is in flight: one block or row of the cache is borrowed.
        """
        bucket = self._bucket(requests, context)
        self._cache.reserve(_NOBODY, 1)
        try:
            self._run(bucket, *self._inputs(Batch.of([(_NOBODY, [0], 0)]), bucket))
        except _CannotCompileError as error:
            raise RequestError(f"{error}.") from error
        finally:
            self._cache.release(_NOBODY)

    def _bind(self, cache: Any) -> None:
        self._cache, self._graphs = cache, {}
        self._mask = _mask_of_layer(self.network.layers[0])
        self._weights = [LayerWeights.of(layer) for layer in self.network.layers]
        with torch.inference_mode(False):
            self._rows = [stored.view(-1, stored.shape[-1]) for stored in cache.storage]

    def _differs(self, cache: Any) -> str | None:
        """A sentence if three steps through the smallest graph and one pass of the model give other logits."""
        config = self.network.config
        # words from the middle: control tokens, the first ids, bring some models to the edge of half precision
        ids = [config.vocab_size * quarter // 4 for quarter in (1, 2, 3)][: cache.capacity]
        expected = self.network(Batch.of([(_NOBODY, ids, 0)]), kv_cache.ConcatKVCache(config.num_layers))[0]
        found = torch.full_like(expected, math.nan)
        cache.reserve(_NOBODY, len(ids))
        try:
            for position, token in enumerate(ids):
                found = self._step(Batch.of([(_NOBODY, [token], position)]))[0]
        finally:
            cache.release(_NOBODY)
        largest, apart = float(expected.abs().max()), float((found - expected).abs().max())
        if not math.isfinite(largest) or apart <= _TOLERANCE.get(expected.dtype, 0.2) * largest:
            return None
        return f"its logits differ by {apart:.3g} from those of model.py, which reach {largest:.3g}."

    def _step(self, batch: Batch) -> Tensor:
        """The logits of a pass whose tokens have room in the cache. Raises _CannotCompileError."""
        seen = [self._seen(span) for span in batch.spans]
        bucket = self._bucket(len(seen), max(map(len, seen)))
        x = self._run(bucket, *self._inputs(batch, bucket, seen))[: len(seen)]
        return self.network.lm_head(self.network.norm(x[batch.logit_rows.to(x.device)]))

    def _bucket(self, requests: int, context: int) -> tuple[int, int]:
        bucket = optimization.bucket_of(requests), optimization.bucket_of(context, self.smallest_context)
        if bucket[0] < requests or bucket[1] < context:
            raise ValueError(f"bucket_of gives {bucket} for {requests} requests of {context} tokens: they do not fit.")
        return bucket

    def _seen(self, span: Span) -> np.ndarray:
        """The slots, for the first head, of the tokens that a step sees: int64 [tokens], its own the last."""
        cache, length = self._cache, span.start + 1
        if isinstance(cache, kv_cache.PagedKVCache):
            table = np.array(cache.block_tables[span.request_id][: -(-length // cache.block_size)])
            slots = (table[:, None] * cache.block_size + np.arange(cache.block_size)).ravel()[:length]
        else:
            _, _, kv_heads, max_length, _ = cache.storage[0].shape
            slots = cache.rows[span.request_id] * kv_heads * max_length + np.arange(length)
        return slots if self._mask is None else slots[masks.seen_from(self._mask, span.start)]

    def _inputs(self, batch: Batch, bucket: tuple[int, int], seen: Sequence[np.ndarray] = ()) -> tuple[Tensor, ...]:
        """What a graph takes. Places for requests that are not there repeat the last one: they compute and write what
        it does. Places for tokens repeat a request's first one, with a weight of 0: where nobody has written there may
        be NaN, and no weight silences that."""
        seen = seen or [self._seen(span) for span in batch.spans]
        slots = np.empty(bucket, dtype=np.int64)
        for row, own in enumerate(seen):
            slots[row, : len(own)], slots[row, len(own) :] = own, own[0]
        slots[len(seen) :] = slots[len(seen) - 1]
        picked = np.minimum(np.arange(bucket[0]), len(seen) - 1)
        counts = np.array([len(own) for own in seen])[picked]
        newest = np.array([own[-1] for own in seen])[picked]
        device = self.network.embed_tokens.weight.device
        rows = torch.from_numpy(picked)
        x = self.network.embed_tokens(batch.token_ids[rows].to(device))
        cos, sin = self.network.rotary(batch.positions[rows].to(device))
        return x, cos, sin, *(torch.from_numpy(array).to(device) for array in (slots, counts, newest))

    def _run(self, bucket: tuple[int, int], *inputs: Tensor) -> Tensor:
        """The stream behind the last layer, [rows of the bucket, hidden]; compiles the graph if it is new."""
        if bucket not in self._graphs:
            return self._run_first(bucket, *inputs)
        if (graph := self._graphs[bucket]) is None:
            raise _CannotCompileError("")
        with record_function("llm::graph"):
            return graph(*inputs)

    def _run_first(self, bucket: tuple[int, int], *inputs: Tensor) -> Tensor:
        self._graphs[bucket] = None
        graph = _Graph("layer_{}x{}".format(*bucket), self._weights, self._rows, self._sizes())
        described = "compiling decode steps of {} x {} tokens".format(*bucket)
        began = time.perf_counter()
        try:
            with progress_bar(total=1, description=described, leave=False) as bar:
                output = graph(*inputs)
                bar.update()
        except Exception as error:
            what = str(error).strip().splitlines() or [""]
            raise _CannotCompileError(f"torch.compile failed ({type(error).__name__}: {what[0]})") from error
        self.seconds[bucket] = time.perf_counter() - began
        self._graphs[bucket] = graph
        return output

    def _sizes(self) -> Sizes:
        config, shape = self.network.config, self._cache.storage[0].shape
        if isinstance(self._cache, kv_cache.PagedKVCache):
            _, kv_heads, num_blocks, block_size, _ = shape
            head_stride, value_start = num_blocks * block_size, kv_heads * num_blocks * block_size
        else:
            _, max_requests, kv_heads, head_stride, _ = shape
            value_start = max_requests * kv_heads * head_stride
        return Sizes(config.num_heads, kv_heads, head_stride, value_start, config.rms_norm_eps, self._summed)


class _CannotCompileError(Exception):
    """The sentence says why, without its full stop."""
