"""Decoder layers and products for few rows by compiled code: what `kernels/decode_layer.py` needs to be told.

A step of one request reads every weight for one row. PyTorch's product does that at a third of the memory's speed, and
thirty operations a layer each take a moment to begin. Compiled layers are one call, all of them where nobody looks in
between (`Stack`), whose products are `optimization.multiply_rows`, or read packed weights (`quantized_layers`): by
`quantization.multiply_int8_rows` and its kin for fewer bits; the learner's where there is one.

It serves passes of a few tokens over a paged or static cache on the CPU, in float32 or bfloat16: decode steps, drafts
that are verified, ends of prompts. What it does not serve goes through PyTorch (`fused_layers`).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache as once
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from llmfromscratch import (
    attention_backends,
    compiled_decode,
    kv_cache,
    learner_engine,
    optimization,
    quantization,
    quantized_cache,
)
from llmfromscratch.batch import Batch
from llmfromscratch.compiled_decode import frames_of, numbers
from llmfromscratch.kernels import block_kinds
from llmfromscratch.packed_weight import PackedWeight
from llmfromscratch.progress import progress_bar

if TYPE_CHECKING:
    from llmfromscratch.fused_layers import FusedLayer

MAX_ROWS = 12  # with more, PyTorch's products, which take rows together, are faster
MAX_PACKED_ROWS = 16  # with more, int8 weights are better widened first; those of 4 bits with more than 24
_FROM_DISK = 0.3  # seconds that a product takes at most that need not be compiled
_OWN_FILES = {str(learner_engine.reference_path(name)) for name in ("optimization", "quantization")}


def kernel() -> Any:
    """The module `kernels.decode_layer`, compiled around what multiply_rows and multiply_int8_rows are now."""
    from llmfromscratch.kernels import product

    product.choose(optimization.multiply_rows, quantization.multiply_int8_rows)
    return importlib.import_module("llmfromscratch.kernels.decode_layer")


def unavailable(dtype: torch.dtype, packed: bool = False) -> str | None:
    """Why compiled layers cannot be had for a dtype, in one sentence; None where they can. Compiles them first. packed:
    those whose weights are packed in few bits."""
    if dtype not in compiled_decode.DTYPES:
        return f"compiled layers compute in float32 or bfloat16, and the model's dtype is {str(dtype)[6:]}."
    return _lacking(dtype, quantization.multiply_int8_rows if packed else optimization.multiply_rows, packed)


@once
def _lacking(dtype: torch.dtype, product: Any, packed: bool) -> str | None:
    try:
        _try_out(dtype, packed)
    except Exception as error:  # noqa: BLE001 - a compiler that does not suit this machine can raise anything
        what = str(error).strip().splitlines() or [""]
        where = "" if product.__code__.co_filename in _OWN_FILES else f" around your {product.__name__}"
        return f"Numba cannot compile layers{where} here ({type(error).__name__}: {what[0]}), so PyTorch computes them."
    return None


# ---- products ----------------------------------------------------------------------------------------------------


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for few rows, summed in float32: x [rows, width], weight [outputs, width], of one dtype; so is the
    result [rows, outputs]."""
    output = torch.empty(len(x), len(weight))
    _product(x.detach().float().contiguous().numpy(), numbers(weight), numbers(weight[:0, 0]), output.numpy())
    return output.to(x.dtype)


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether `multiply` serves this product, and is the faster one."""
    return x.dtype == weight.dtype and fits(x, MAX_ROWS)


def fits(x: Tensor, most: int) -> bool:
    """Whether compiled code takes these rows, of which there may be so many."""
    fitting = x.dtype in compiled_decode.DTYPES and x.device.type == "cpu"
    return fitting and len(x) <= most and not torch.is_grad_enabled()


def _product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, output: np.ndarray) -> None:
    """output = x @ weight.T + bias; weight: float or packed, see `kernels.layer_weights`."""
    threads = _threads()
    if threads == 1:
        kernel().product_on_one_thread(x, weight, bias, output, 1)
    else:
        compiled_decode.in_threads(threads, kernel().product_on_threads, x, weight, bias, output, threads)


def _threads() -> int:
    return min(torch.get_num_threads(), compiled_decode.max_threads())


# ---- layers ------------------------------------------------------------------------------------------------------


Weight = Tensor | tuple[PackedWeight, ...]  # of a product: one float matrix, or packed parts


@dataclass
class Numbers:
    """A layer's weights as arrays, views of its tensors, and what else never changes. `source`: its first weight then,
    what it computed in, and what int8 was multiplied by.

    products: qkv, out, gate and up, down, each as `kernels.layer_weights` has them. rest: their biases; the gains of
    the norms before attention, of queries, of keys, and after; eps.
    """

    source: tuple[Any, ...]
    products: tuple[np.ndarray, ...]
    rest: tuple[Any, ...]
    kept: tuple[Any, ...] = ()  # what the products only say the address of
    read: tuple[Tensor, np.ndarray] | None = None  # the layer of a cache that was asked for last, and its rows

    @property
    def weights(self) -> tuple[Any, ...]:
        """All that a call is given of the layer."""
        return (*self.products, *self.rest)

    def rows_of(self, stored: Tensor) -> np.ndarray:
        """A layer of the cache as [rows, head_dim]."""
        read = self.read  # once: another thread may serve another cache
        if read is None or read[0] is not stored:
            read = self.read = stored, numbers(stored).reshape(-1, stored.shape[-1])
        return read[1]

    def __deepcopy__(self, memo: Any) -> Numbers:
        # a copy of the layer that shares its weights shares their views, and has a cache of its own
        return Numbers(self.source, self.products, self.rest, self.kept)


def numbers_of(layer: FusedLayer) -> Numbers:
    """The layer as arrays, made at the first use."""
    source, known = (layer.source, layer.dtype, quantization.multiply_int8_rows), layer.numbers
    if known is None or any(old is not new for old, new in zip(known.source, source, strict=True)):
        weights, biases = layer.operands()
        none = numbers(torch.empty(0, dtype=layer.dtype))
        gains = [getattr(norm, "weight", None) for norm in layer.norms()]
        rest = [none if each is None else numbers(each) for each in (*biases, *gains)]
        layer.numbers = known = Numbers(source, tuple(map(_operand, weights)), (*rest, np.float32(layer.eps)), weights)
    return known


def _operand(weight: Weight) -> np.ndarray:
    """A weight as compiled code takes it; packed parts stay the caller's to keep."""
    if isinstance(weight, Tensor):
        return numbers(weight)
    parts = [(block_kinds.NUMBERS[part.kind], part.data.numpy(), part.scales.numpy()) for part in weight]
    return kernel().packed_parts(parts)


class Stack:
    """All layers of a network, of which a pass of few rows is one call: what Python would do between two layers takes
    long there, as their weights drive all that it works with out of the processor's cache."""

    def __init__(self, layers: Sequence[FusedLayer]):
        self.layers = tuple(layers)
        self._known: list[tuple[Numbers, Tensor]] = []
        self._places: np.ndarray | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Stack:
        memo[id(self)] = copied = Stack(())  # the layers know their stack
        copied.layers = deepcopy(self.layers, memo)  # not the cache that was served last
        return copied

    def places(self, cache: Any) -> np.ndarray | None:
        """Where each layer has its rows and weights (`kernels.decode_layer`); None where a pass is not one call: layers
        that differ in shape or attention, that somebody watches, or that are not this cache's."""
        first = self.layers[0].attention.backend
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            if attention.layer != index or attention.backend != first or layer.is_stale() or layer.is_watched():
                return None
        if len(self.layers) != len(cache.storage):
            return None
        now = [(numbers_of(layer), stored) for layer, stored in zip(self.layers, cache.storage, strict=True)]
        known = len(self._known) == len(now) and all(
            own is old and stored is before for (own, stored), (old, before) in zip(now, self._known, strict=True)
        )
        if not known:
            read = [(own, own.rows_of(stored), frames_of(cache, i)) for i, (own, stored) in enumerate(now)]
            forms = [_forms(*each) for each in read]
            self._known = now
            self._places = None
            if all(each == forms[0] for each in forms):
                self._places = np.array([_places_of(*each) for each in read])
        return self._places


def _forms(own: Numbers, rows: np.ndarray, frames: np.ndarray) -> list[Any]:
    """What is alike in layers that one call serves: shapes and types, but not the kinds of packed parts."""
    forms: list[Any] = [own.rest[-1]]
    for each in (rows, *own.products, *own.rest[:-1], frames):
        packed = each.dtype == np.int64
        forms.append(each[:, kernel().ROWS].tolist() if packed else (each.shape, each.strides, each.dtype))
    return forms


def _places_of(own: Numbers, rows: np.ndarray, frames: np.ndarray) -> list[int]:
    return [place for each in (rows, *own.products, *own.rest[:-1], frames) for place in kernel().numbers_of(each)]


def serves(layer: FusedLayer, x: Tensor, cache: kv_cache.KVCache) -> bool:
    """Whether a pass can go through the compiled layer: few rows, a cache that it reads, and no other attention asked
    for."""
    attention: Any = layer.self_attn
    if layer.dtype != x.dtype or not fits(x, layer.most_rows) or not compiled_decode.fits(cache, attention.layer):
        return False
    kind, _ = attention_backends.read(attention.backend)
    asked = kind == "compiled" or (kind == "auto" and not attention_backends.is_learners())
    return asked and quantized_cache.dtype_of(cache, attention.layer) == x.dtype


@dataclass
class Pass:
    """What the layers of one pass share.

    cos, sin: float32 [tokens, head_dim / 2]. outputs: of each layer [tokens, hidden]; arrays: the same memory.
    decode: the module `kernels.decode_layer`. done: whether all outputs are there already.
    """

    decode: Any
    plan: compiled_decode.Plan
    cos: np.ndarray
    sin: np.ndarray
    outputs: tuple[Tensor, ...]
    arrays: np.ndarray
    done: bool = False

    @classmethod
    def of(cls, layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: Any) -> Pass:
        """What the layers of a pass over this batch share, made by the first of them."""
        _, mask = attention_backends.read(layer.self_attn.backend)
        plan = compiled_decode.Plan.of(batch, cache, mask, True)
        outputs = x.new_empty(len(cache.storage), *x.shape)
        return cls(kernel(), plan, cos.numpy(), sin.numpy(), outputs.unbind(), numbers(outputs))

    def input(self, x: Tensor, index: int) -> np.ndarray:
        """The layer's input as an array: mostly what the layer before has written."""
        if index and x is self.outputs[index - 1]:
            return self.arrays[index - 1]
        return numbers(x.contiguous())


def _key(attention: Any, batch: Batch) -> Hashable:
    """A pass; its plan holds on to its batch, so that no other batch can have the id."""
    return "layers", id(batch), attention.backend


def goes_on(layer: FusedLayer, x: Tensor, batch: Batch, cache: Any) -> bool:
    """Whether the layer before was served in this pass and x is what it has written: then so is this one, and `serves`
    need not be asked."""
    attention = layer.attention
    if not attention.layer or not hasattr(cache, "gathers"):
        return False
    one = cache.gathers.known(_key(attention, batch))
    return one is not None and x is one.outputs[attention.layer - 1] and layer.dtype == x.dtype


def forward(layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: Any) -> Tensor:
    """As the layer's own forward: x [tokens, hidden]; the same shape and dtype. Writes keys and values to the cache."""
    attention = layer.attention
    index = attention.layer
    if index == 0:
        cache.begin(batch)
    one: Pass = cache.gathers.once(_key(attention, batch), lambda: Pass.of(layer, x, cos, sin, batch, cache))
    if index == 0:
        one.done = _all_in_one_call(layer, one, x, cache)
    elif x is not one.outputs[index - 1]:  # somebody has changed it
        one.done = False
    if not one.done:
        read = numbers_of(layer).rows_of(cache.storage[index]), frames_of(cache, index)
        _run(layer, one, (one.input(x, index), one.cos, one.sin, *read), one.arrays[index])
    if isinstance(quantized_cache.below(cache), kv_cache.PagedKVCache):
        cache.end(index, batch)
    else:
        cache.counts.advance(index, batch)
    return one.outputs[index]


def _all_in_one_call(layer: FusedLayer, one: Pass, x: Tensor, cache: Any) -> bool:
    """The whole stack behind the first layer, if that can be; whether it was. Each layer then only gives its output."""
    if layer.stack is None or torch.autograd._profiler_enabled() or compiled_decode.max_threads() == 1:
        return False
    places = layer.stack.places(cache)
    if places is None:
        return False
    own = numbers_of(layer)
    read = own.rows_of(cache.storage[0]), frames_of(cache, 0)
    _call_all(one, (one.input(x, 0), one.cos, one.sin, *read), own.weights, places)
    return True


def _call_all(one: Pass, inputs: tuple[np.ndarray, ...], weights: tuple[Any, ...], places: np.ndarray) -> None:
    plan = one.plan
    where = (plan.numbers, plan.slots, plan.ends, plan.head_stride, plan.value_start, plan.pieces)
    arguments = (*inputs, *where, *weights, plan.kv_heads, places, one.arrays, plan.threads)
    compiled_decode.in_threads(plan.threads, one.decode.decode_layers_on_threads, *arguments)


def _run(layer: FusedLayer, one: Pass, inputs: tuple[np.ndarray, ...], output: np.ndarray) -> None:
    """The layer in one call, or, for a profile, in stages. inputs: x, cos, sin, the cache's rows and their frames."""
    plan = one.plan
    if torch.autograd._profiler_enabled():
        where = (*inputs[3:], plan.slots, plan.ends, plan.head_stride, plan.value_start)
        _in_stages(layer, inputs[:3], plan, where, output)
    else:
        _call(one.decode, plan, inputs, numbers_of(layer).weights, output)


def _call(
    decode: Any,
    plan: compiled_decode.Plan,
    inputs: tuple[np.ndarray, ...],
    weights: tuple[Any, ...],
    output: np.ndarray,
) -> None:
    where = (plan.numbers, plan.slots, plan.ends, plan.head_stride, plan.value_start)
    if compiled_decode.max_threads() == 1:
        decode.decode_layer_on_one_thread(*inputs, *where, 1, *weights, plan.kv_heads, output, 1)
        return
    arguments = (*inputs, *where, plan.pieces, *weights, plan.kv_heads, output, plan.threads)
    compiled_decode.in_threads(plan.threads, decode.decode_layer_on_threads, *arguments)


def _in_stages(
    layer: FusedLayer, inputs: tuple[np.ndarray, ...], plan: Any, where: tuple[Any, ...], output: np.ndarray
) -> None:
    """The compiled layer's stages one by one, each under the name that a profile shows."""
    decode, own = kernel(), numbers_of(layer)
    x, cos, sin = inputs
    qkv, out, gate_up, down = own.products
    qkv_bias, out_bias, gate_up_bias, down_bias, gain, query_gain, key_gain, gain_after, eps = own.rest
    tokens, head_dim = len(x), 2 * cos.shape[1]
    group = decode.rows_in(qkv) // (plan.kv_heads * head_dim) - 2
    queries = np.empty((tokens, plan.kv_heads, group, head_dim), "f4")
    stream, normed, attended = np.empty(x.shape, "f4"), np.empty(x.shape, "f4"), np.empty_like(queries)
    activated = np.empty((tokens, decode.rows_in(gate_up) // 2), "f4")
    with record_function("llm::norm"):
        decode.begin(x, gain, eps, stream, normed)
    mixed = _labelled_product(normed, qkv, qkv_bias)
    with record_function("llm::cache"):
        decode.place(mixed, query_gain, key_gain, eps, cos, sin, plan.numbers, *where, queries)
    with record_function("llm::attention"):
        compiled_decode.launch(plan, queries, *where, attended)
    stream += _labelled_product(attended.reshape(tokens, -1), out, out_bias)
    with record_function("llm::norm"):
        decode.normalize(stream, gain_after, eps, normed)
    gated = _labelled_product(normed, gate_up, gate_up_bias)
    with record_function("llm::product"):
        decode.activate(gated, activated, 0, activated.shape[1])
    stream += _labelled_product(activated, down, down_bias)
    decode.finish(stream, output)


def _labelled_product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    output = np.empty((len(x), kernel().rows_in(weight)), "f4")
    with record_function("llm::product"):
        _product(x, weight, bias, output)
    return output


# ---- trying out --------------------------------------------------------------------------------------------------


def _try_out(dtype: torch.dtype, packed: bool) -> None:
    """Compiles products and layers for a dtype: one computes 3 * 1 + 3 * 2, and one without weights adds nothing."""
    began = time.perf_counter()
    weight = torch.tensor([[1.0, 2.0]], dtype=dtype)
    operand: Weight = _packed(weight) if packed else weight
    found = np.zeros((1, 1), "f4")
    _product(np.full((1, 2), 3.0, "f4"), _operand(operand), numbers(weight[:0, 0]), found)
    if found.tolist() != [[9.0]]:
        raise ArithmeticError(f"3 * 1 + 3 * 2 came out as {found.item():g}")
    with _waiting() if time.perf_counter() - began > _FROM_DISK else nullcontext():
        _try_out_a_layer(dtype, packed)


def _packed(*weights: Tensor) -> tuple[PackedWeight, ...]:
    """Whole numbers as parts in int8, with scales of 1."""
    return tuple(
        PackedWeight("int8", each.shape[1], each.char().view(torch.uint8), torch.ones(len(each))) for each in weights
    )


def _waiting() -> AbstractContextManager[Any]:
    return progress_bar(total=1, description="compiling layers, once", bar_format="{desc} ({elapsed})", leave=False)


def _try_out_a_layer(dtype: torch.dtype, packed: bool) -> None:
    x, empty, angles = torch.tensor([[1.0, 2.0]], dtype=dtype), torch.empty(0, dtype=dtype), np.ones((1, 1), "f4")
    stored, outputs = numbers(torch.zeros(2, 2, dtype=dtype)), torch.zeros(2, *x.shape, dtype=dtype)
    parts = [torch.zeros(rows, 2, dtype=dtype) for rows in (2, 2, 2, 2, 2, 2, 2)]
    groups = [parts[:3], parts[3:4], parts[4:6], parts[6:]]
    weights: list[Weight] = [_packed(*group) if packed else torch.cat(group) for group in groups]
    vectors = [numbers(each) for each in (*[empty] * 4, x[0], empty, empty, x[0])]
    plan = compiled_decode.Plan(Batch.of([(0, [0], 0)]), None, np.arange(1), np.array([1]), 1, 1, 1, 1, 1)
    one = Pass(kernel(), plan, angles, angles, outputs.unbind(), numbers(outputs))
    own = Numbers((), tuple(map(_operand, weights)), (*vectors, np.float32(1)), tuple(weights))
    frames = compiled_decode.NO_FRAMES
    given = (numbers(x), angles, angles, stored, frames)
    _call(one.decode, plan, given, own.weights, one.arrays[0])
    if compiled_decode.max_threads() == 1:
        outputs[1] = outputs[0]
    else:
        _call_all(one, given, own.weights, np.array([_places_of(own, stored, frames)] * 2))
    if not torch.equal(outputs[1], x):
        raise ArithmeticError(f"layers that should add nothing made {outputs[1].tolist()[0]} of [1.0, 2.0]")
