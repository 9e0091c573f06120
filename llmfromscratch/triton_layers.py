"""Decoder layers whose small work is done by our Triton kernels, for CUDA: what stands between the products.

    norm     · q,k,v · rotate q, rotate k, write · attend · o · +, norm        · gate,up · silu* · down · +
    triton_    torch   triton_rotary               triton_    torch triton_norm   torch             torch
    norm                                           decode, triton_prefill

The products stay torch's, and their weights are fused as in `fused_layers`. On a GPU a decode step's products take
microseconds, so what counts is how many kernels there are and how often the stream of a few hundred numbers travels.
On the CPU Triton's interpreter runs the kernels (TRITON_INTERPRET=1): right, and only for reading and testing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmfromscratch import attention_backends, attention_triton, fused_layers, kv_cache, model
from llmfromscratch.batch import Batch


def lacking(network: model.Model) -> str | None:
    """Why a model cannot have these layers here, in one sentence; None where it can."""
    kinds = {(weight.device.type, weight.dtype) for weight in network.layers.parameters()}
    return next((reason for kind in sorted(kinds, key=str) if (reason := attention_triton.unavailable(*kind))), None)


def use(network: model.Model) -> None:
    """Exchanges every layer for a `TritonLayer`, in place, one after the other."""
    for index in range(len(network.layers)):
        network.layers[index] = TritonLayer(network.layers[index], network.config, "triton")


class TritonLayer(fused_layers.FusedLayer):
    """A fused layer of which norms and additions, rotary embedding and cache write, and attention are Triton kernels.

    The attention is theirs where it is left to choose ("auto") or asked for; a cache that they cannot read is served as
    in `fused_layers`.
    """

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """As `model.DecoderLayer`: x [tokens, hidden]; returns the same; writes to the cache."""
        if self.is_stale():  # a part was given other weights
            self.fuse()
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _, normed = self._add_and_norm(x, None, self.input_layernorm)
            mixed = self._attend(normed, cos, sin, batch, cache)
            x, normed = self._add_and_norm(x, mixed, self.post_attention_layernorm)
            return x + self._feed_forward(normed)

    def _add_and_norm(self, x: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        from llmfromscratch.kernels import triton_norm

        with fused_layers._label("llm::norm"):
            return triton_norm.add_and_norm(x.contiguous(), added, norm.weight, float(self.eps))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: Any) -> Tensor:
        if not attention_triton.fits(cache):
            return super()._attend(x, cos, sin, batch, cache)
        self._show(x, *self._projections)
        heads = self._product(x, self.qkv, self.qkv_bias).view(len(x), -1, self.head_dim)
        with fused_layers._label("llm::cache"):
            queries = self._write(heads, cos, sin, batch, cache)
        index, backend = self.self_attn.layer, self.self_attn.backend
        with fused_layers._label("llm::attention"):
            if backend == "auto" and not attention_backends.is_learners():
                mixed = attention_triton.attend(queries, index, batch, cache)
            else:
                mixed = attention_backends.attend(queries, index, batch, cache, backend)
        out: Any = self.self_attn.o_proj
        self._show(mixed.flatten(1), out)
        return self._product(mixed.flatten(1), out.weight, out.bias)

    def _write(self, heads: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: attention_triton.Cache) -> Tensor:
        """Rotates, and writes to the cache as its own `write` would; the rotated queries [tokens, heads, head_dim]."""
        from llmfromscratch.kernels import triton_rotary

        index = self.self_attn.layer
        if index == 0:
            cache.begin(batch)
        queries, keys, values = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        _, of_queries, of_keys, _ = self.norms()
        if hasattr(of_queries, "weight"):
            queries = self._normalized(queries, of_queries.weight).contiguous()
            keys = self._normalized(keys, of_keys.weight).contiguous()
        slots = attention_triton.slots_of(cache, batch, heads.device)
        head_stride = attention_triton.Layout.of(cache).head_stride
        stored = cache.storage[index]
        rotated = triton_rotary.rotate_and_write(queries, keys, values, cos, sin, stored, slots, head_stride)
        if isinstance(cache, kv_cache.PagedKVCache):
            cache.end(index, batch)
        else:
            cache.counts.advance(index, batch)
        return rotated
