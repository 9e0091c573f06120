"""Decoder layers in fewer passes over memory: weights that meet the same vector are one product.

    plain   norm · q · k · v · rotate q · rotate k · write · attend · o · +  norm · gate · up · silu · * · down · +
    fused   norm · q,k,v     · rotate q,k           · write · attend · o+    norm · gate,up · silu* ·     down+

    "plain"      the model's own layers, one operation after the other
    "fused"      this, in PyTorch, on any device
    "compiled"   this, and what has few rows by compiled code (`compiled_layers`): whole layers where it can be
    "triton"     our Triton kernels (`triton_layers`)
    "auto"       "compiled" where it can be had, else "fused"

A model's layers are exchanged in place; the parts of a layer stay where they were, under their names, and their weights
become views of the fused ones. A quantized model's are "plain" or "compiled", without fusing (`quantized_layers`).
A learner's own `model.py`, `attention.py` or `kv_cache.py` is what the learner wants to see at work, so "auto" is
"plain" then, until there is an `optimization.py` of theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from llmfromscratch import attention_backends, compiled_layers, kv_cache, learner_engine, model, optimization
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

KINDS = ("auto", "plain", "fused", "compiled", "triton")
_FOLDED = (torch.float32, torch.float64)  # half precision would be rounded once more


# ---- choosing ----------------------------------------------------------------------------------------------------


def check(kind: Any) -> None:
    """Raises RequestError for a kind that is not known."""
    if kind not in KINDS:
        raise RequestError(f"layers is {kind!r}; expected one of {', '.join(KINDS)}.")


def use(kind: str, network: model.Model) -> str:
    """Exchanges a model's layers for those of this kind, in place; returns the kind that "auto" came to.

    Raises RequestError where one is asked for by name and cannot be had.
    """
    lacking = _lacking(kind, network)
    quantized = _quantized_layers().is_quantized(network)
    second = "plain" if quantized else "fused"
    if lacking:
        raise RequestError(f'layers="{kind}" cannot be had: {lacking} Or leave it out, or give layers="{second}".')
    if kind == "auto":
        kind = "plain" if is_learners() else second if _lacking("compiled", network) else "compiled"
    if kind == "triton":
        importlib.import_module("llmfromscratch.triton_layers").use(network)
    elif quantized and kind != "plain":
        _quantized_layers().use(network)
    elif kind != "plain":
        fuse(network, kind)
    return kind


def is_learners() -> bool:
    """Whether "auto" is plain: a model.py, attention.py or kv_cache.py is a learner's, and optimization.py is not."""
    if _is_learners("optimization", optimization):
        return False
    return _is_learners("model", model) or attention_backends.is_learners()


def _is_learners(name: str, module: Any) -> bool:
    return module.__file__ != str(learner_engine.reference_path(name))


def _quantized_layers() -> Any:
    return importlib.import_module("llmfromscratch.quantized_layers")


def _lacking(kind: str, network: model.Model) -> str | None:
    if _quantized_layers().is_quantized(network):
        return _quantized_layers().lacking(kind, network)
    if kind == "triton":
        return importlib.import_module("llmfromscratch.triton_layers").lacking(network)
    if kind != "compiled":
        return None
    elsewhere = {weight.device.type for weight in network.layers.parameters()} - {"cpu"}
    if elsewhere:
        return f"compiled layers compute on the CPU, and some of the model's lie on {', '.join(sorted(elsewhere))}."
    return compiled_layers.unavailable(network.embed_tokens.weight.dtype)


# ---- fusing ------------------------------------------------------------------------------------------------------


def fuse(network: model.Model, kind: str) -> None:
    """Exchanges every layer for a `FusedLayer`, in place; with "compiled", the head's product too.

    One layer after the other, so that never more than one of them is there twice.
    """
    for index in range(len(network.layers)):
        network.layers[index] = FusedLayer(network.layers[index], network.config, kind)
    if kind == "compiled":
        network.lm_head = Head(network.lm_head)
        stack(network)


def stack(network: model.Model) -> None:
    """Lets the layers know each other, so that a pass of few rows can be one call."""
    if all(isinstance(layer, FusedLayer) for layer in network.layers):
        together = compiled_layers.Stack(list(network.layers))  # type: ignore[arg-type]
        for layer in network.layers:
            layer.stack = together  # type: ignore[assignment]


def _join(linears: Sequence[Any], norm: Any, folding: bool) -> tuple[Tensor, Tensor | None]:
    """Fused weight and bias of products of the same input; the old ones become views of them. With `folding`, the gain
    of the norm before goes into the weights, and the norm itself then has a gain of 1.
    """
    weights = [linear.weight.detach() for linear in linears]
    if folding:
        gain = norm.weight.detach()
        weights = [optimization.fold_gain(weight, gain) for weight in weights]
        norm.weight.data = torch.ones_like(gain)
    fused, parts = optimization.fuse_rows(weights)
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part
    if linears[0].bias is None:
        return fused, None
    bias = torch.cat([linear.bias.detach() for linear in linears])
    for linear, part in zip(linears, bias.split([len(linear.bias) for linear in linears]), strict=True):
        linear.bias.data = part
    return fused, bias


class FusedLayer(nn.Module):
    """A decoder layer made of the parts of another: the same function, the same names, fewer passes over memory.

    qkv: [(heads + 2 * kv heads) * head_dim, hidden]; gate_up: [2 * intermediate, hidden]; and their biases or None.
    They are no parameters: those are the parts' own weights, which are views of them; when one of those is exchanged
    for another, all is fused again. folded: whether the norms' gains are in them.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    most_rows = compiled_layers.MAX_ROWS

    def __init__(self, layer: Any, config: Any, kind: str):
        super().__init__()
        self.kind = kind
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps: float = config.rms_norm_eps
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = (attention,)  # no module looks long for what stands in a tuple
        self.stack: compiled_layers.Stack | None = None
        for name in ("qkv", "qkv_bias", "gate_up", "gate_up_bias"):
            self.register_buffer(name, None, persistent=False)
        self._projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._gates = (mlp.gate_proj, mlp.up_proj)
        parts = (*self._projections, attention.o_proj, *self._gates, mlp.down_proj)
        # looked up once: a step has no time to ask seven modules in each of thirty layers
        tensors = [held for part in (*self.norms(), *parts) for held in (part._parameters, part._buffers)]
        self._held = [held for held in tensors if held]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self.fuse()
        self.register_load_state_dict_post_hook(_fuse_again)

    @torch.inference_mode(False)
    def fuse(self) -> None:
        """Makes the fused weights of what the parts hold now."""
        self.folded = self._projections[0].weight.dtype in _FOLDED
        self.qkv, self.qkv_bias = _join(self._projections, self.input_layernorm, self.folded)
        self.gate_up, self.gate_up_bias = _join(self._gates, self.post_attention_layernorm, self.folded)
        self._note()

    def _note(self) -> None:
        """Keeps in mind what the parts hold now."""
        self._known = [(held, name, value) for held in self._held for name, value in held.items()]
        gains = (self.input_layernorm.weight, self.post_attention_layernorm.weight)
        self._versions = [(gain, _version(gain)) for gain in gains]
        self.numbers: compiled_layers.Numbers | None = None

    def is_stale(self) -> bool:
        """Whether a part was given another weight or bias since `fuse`, or a norm's gain was changed in place."""
        for held, name, value in self._known:
            if held[name] is not value:
                return True
        return any(_version(gain) != version for gain, version in self._versions)

    def is_watched(self) -> bool:
        """Whether somebody has hooks on its parts."""
        return any(self._hooks)

    @property
    def source(self) -> Tensor:
        """What is another tensor when the layer's weights have become others."""
        return self.qkv

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.qkv.dtype

    def operands(self) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
        """The weights of its products as `compiled_layers` takes them (qkv, out, gate and up, down); their biases."""
        out: Any = self.self_attn.o_proj
        down: Any = self.mlp.down_proj
        biases = (self.qkv_bias, out.bias, self.gate_up_bias, down.bias)
        return (self.qkv, out.weight, self.gate_up, down.weight), biases

    @property
    def attention(self) -> Any:
        """`self_attn`, sooner."""
        return self._attention[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As every module's; the first comes at once, since a model asks for it to know where the layer lies."""
        first: Any = self._held[0]["weight"]
        yield first
        yield from (each for each in super().parameters(recurse) if each is not first)

    def norms(self) -> tuple[Any, ...]:
        """The norms before attention, of queries, of keys, and before the feed-forward; what is none has no weight."""
        heads = (getattr(self.self_attn, name, None) for name in ("q_norm", "k_norm"))
        return self.input_layernorm, *heads, self.post_attention_layernorm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """As `model.DecoderLayer`: x [tokens, hidden]; returns the same; writes to the cache."""
        if self.is_stale():
            self.fuse()
        compiled = self.kind == "compiled" and not self.is_watched()
        if compiled and (compiled_layers.goes_on(self, x, batch, cache) or compiled_layers.serves(self, x, cache)):
            return compiled_layers.forward(self, x, cos, sin, batch, cache)
        first, _, _, second = self.norms()
        x = x + self._attend(self._normalize(x, first), cos, sin, batch, cache)
        return x + self._feed_forward(self._normalize(x, second))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: Any) -> Tensor:
        heads = self._of_qkv(x).view(len(x), -1, self.head_dim)
        with _label("llm::cache"):
            turned = self._rotated(heads[:, : self.heads + self.kv_heads], cos, sin)
            queries, keys = turned.split([self.heads, self.kv_heads], dim=1)
            cache.write(self.self_attn.layer, keys, heads[:, self.heads + self.kv_heads :], batch)
        with _label("llm::attention"):
            if hasattr(cache, "attend"):  # a cache that forgets knows best who may look at what is left
                mixed = cache.attend(queries, self.self_attn.layer, batch)
            else:
                backend = self.self_attn.backend
                mixed = attention_backends.attend(queries, self.self_attn.layer, batch, cache, backend)
        return self._of(mixed.flatten(1), self.self_attn.o_proj)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys [tokens, heads + kv heads, head_dim], normalized where they have norms, and turned."""
        _, of_queries, of_keys, _ = self.norms()
        if hasattr(of_queries, "weight"):
            queries, keys = x.split([self.heads, self.kv_heads], dim=1)
            x = torch.cat([self._normalized(queries, of_queries.weight), self._normalized(keys, of_keys.weight)], dim=1)
        return model.rotate(x, cos, sin)

    def _feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self._of_gate_up(x).chunk(2, dim=-1)
        with _label("llm::product"):
            activated = F.silu(gate) * up
        return self._of(activated, self.mlp.down_proj)

    def _of_qkv(self, x: Tensor) -> Tensor:
        """Queries, keys and values of x, side by side."""
        self._show(x, *self._projections)
        return self._product(x, self.qkv, self.qkv_bias)

    def _of_gate_up(self, x: Tensor) -> Tensor:
        self._show(x, *self._gates)
        return self._product(x, self.gate_up, self.gate_up_bias)

    def _of(self, x: Tensor, part: Any) -> Tensor:
        """The product of a part that stands alone."""
        self._show(x, part)
        return self._product(x, part.weight, part.bias)

    def _normalize(self, x: Tensor, norm: Any) -> Tensor:
        with _label("llm::norm"):
            return self._normalized(x, None if self.folded else norm.weight)

    def _normalized(self, x: Tensor, gain: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)
        return scaled if gain is None else scaled * gain

    def _show(self, x: Tensor, *parts: Any) -> None:
        """Lets whoever watches the parts see what they compute; nothing while nobody does."""
        if self.is_watched():
            for part in parts:
                part(x)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with _label("llm::product"):
            return product(x, weight, bias, self.kind)


def _version(tensor: Any) -> int | None:
    """How often a tensor was changed in place; None where nobody counts: it was made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _fuse_again(layer: FusedLayer, incompatible: Any) -> None:
    layer.fuse()


class Head(nn.Linear):
    """The product for the logits, few rows of it by compiled code. It shares the weight of the one it replaces."""

    def __init__(self, head: nn.Linear):
        super().__init__(head.in_features, head.out_features, bias=False, device="meta")
        self.weight = head.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, hidden]; returns [rows, vocab]."""
        with _label("llm::head"):
            return product(x, self.weight, None, "compiled")


def product(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """x @ weight.T + bias: by compiled code where the kind is that and there are few rows, else by PyTorch."""
    if kind != "compiled" or not compiled_layers.few(x, weight):
        return F.linear(x, weight, bias)
    output = compiled_layers.multiply(x, weight)
    return output if bias is None else output + bias


def _label(name: str) -> AbstractContextManager[Any]:
    """A name that torch's profiler shows for what is inside; nothing while there is none."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
