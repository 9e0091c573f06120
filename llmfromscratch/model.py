"""The decoder-only transformer: token ids in, a score for every possible next token out.

    ids -> embed -> [ norm -> attention -> + -> norm -> feed-forward -> + ] x layers -> norm -> head -> logits

The two additions are the residual stream: every layer reads it and adds to it, none replaces it. Parameter names are
the canonical ones of `loading.py`. One forward serves prompt chunks, decode steps and mixtures (`batch.Batch`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llmfromscratch import attention_backends, kv_cache, rope
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig


class RMSNorm(nn.Module):
    """Divides each vector by its root mean square, then scales every component by a learned weight.

    y = x / sqrt(mean(x²) + eps) * weight, the mean over the last dimension; same shape and dtype as x. Half precision
    is computed in float32 and rounded before the weight is applied. Zhang and Sennrich, "RMSNorm", section 4.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]; returns the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """The cosines and sines that rotate queries and keys by their position. Su et al., "RoFormer", section 3.4.2.

    Pair i of a head turns by `position * frequency[i]` radians. Computed in float32: half precision cannot tell
    position 2048 from 2049. The frequencies are no parameter, so that casting the model leaves them alone.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.frequencies, self.scale = rope.inverse_frequencies(config)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [tokens]. Returns cos and sin, each float32 [tokens, head_dim / 2]."""
        angles = positions[:, None].float() * self.frequencies.to(positions.device)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every head of x by its position's angles; pair i of a head is (x[i], x[i + head_dim / 2]).

    x: [tokens, heads, head_dim]; cos, sin: float32 [tokens, head_dim / 2]. Returns x's shape and dtype.
    (first, second) becomes (first * cos - second * sin, second * cos + first * sin).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Shazeer, "GLU Variants Improve Transformer", section 2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        wide, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, wide, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, wide, bias=bias)
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden]; returns [tokens, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query self-attention of one layer: project, rotate, remember, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.backend = "auto"  # one of attention_backends.KINDS
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """x: [tokens, hidden]; cos, sin: [tokens, head_dim / 2]; returns [tokens, hidden]; writes to the cache."""
        shape = (x.shape[0], -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(x).view(shape)), cos, sin)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        cache.write(self.layer, keys, self.v_proj(x).view(shape), batch)
        if hasattr(cache, "attend"):  # a cache that forgets knows best who may look at what is left
            mixed = cache.attend(queries, self.layer, batch)
        else:
            mixed = attention_backends.attend(queries, self.layer, batch, cache, self.backend)
        return self.o_proj(mixed.flatten(1))


class DecoderLayer(nn.Module):
    """One layer: attention, then feed-forward, each on a normalized copy and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """x: [tokens, hidden], as self.self_attn(x, cos, sin, batch, cache) and self.mlp(x) return it; so does this."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, batch, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The whole network. Build it under `torch.device("meta")` and assign loaded tensors: nothing is computed twice."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """Logits [rows that need one, vocab] for the batch; its keys and values are written to the cache.

        batch.token_ids, batch.positions: int64 [tokens]; self.rotary(positions) gives cos and sin for every layer.
        batch.logit_rows: the rows that need logits. Layers may lie on different devices: the stream follows them.
        """
        x = self.embed_tokens(batch.token_ids.to(self.embed_tokens.weight.device))
        cos, sin = self.rotary(batch.positions)
        for layer in self.layers:
            device = next(layer.parameters()).device
            x, cos, sin = x.to(device), cos.to(device), sin.to(device)
            x = layer(x, cos, sin, batch, cache)
        x = self.norm(x.to(self.norm.weight.device)[batch.logit_rows.to(self.norm.weight.device)])
        return self.lm_head(x.to(self.lm_head.weight.device))
