"""The checks of chapter 1's second half: norm, rotation, feed-forward, layer, model.

A layer and the whole model are held against transformers with the same random weights; the rest against closed forms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance

CONFIG = ModelConfig(
    "llama", vocab_size=37, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=4, context_length=64, rms_norm_eps=1e-5,
)  # fmt: skip
_CLOSE = Tolerance(relative=1e-4)


def _random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- 1.6 RMSNorm -------------------------------------------------------------------------------------------------


def check_rms_norm(norm_class: type[nn.Module]) -> None:
    """Against the formula in float64, and its roundings in bfloat16."""

    def apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = norm_class(x.shape[-1], eps)
        norm.weight.data = weight
        return norm(x)

    one = torch.ones(2)
    compare(
        apply,
        _normed(lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()),
        [
            Case("x = [3, 4], weight 1, eps 1e-5", torch.tensor([[3.0, 4.0]]), one, 1e-5),
            Case("x = [3, 4], weight [1, 10]", torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 1e-5),
            Case("x = [0.003, 0.004], as small as eps = 1e-5 allows", torch.tensor([[3e-3, 4e-3]]), one, 1e-5),
            Case("random [2, 3, 8]", _random(2, 3, 8, seed=1), _random(8, seed=2), 1e-6),
            Case("float16, numbers of about 300", 300 * _random(2, 8, seed=5).half(), _random(8, seed=6).half(), 1e-5),
        ],
        expected="x / sqrt(mean(x²) + eps) * weight over the last dimension, in the dtype of x",
        mistakes=[
            ("epsilon is outside the root; it belongs to the mean square",
             _normed(lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps))),
            ("epsilon is missing", _normed(lambda x, eps: x / x.pow(2).mean(-1, keepdim=True).sqrt())),
            ("the mean is subtracted first: that is LayerNorm; RMSNorm does not centre",
             _normed(lambda x, eps: _centred(x) / (_centred(x).pow(2).mean(-1, keepdim=True) + eps).sqrt())),
            ("the squares are summed; their mean is asked for",
             _normed(lambda x, eps: x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt())),
            ("the mean runs over all dimensions; each vector has its own",
             _normed(lambda x, eps: x / (x.pow(2).mean() + eps).sqrt())),
            ("the weight is missing",
             lambda x, weight, eps: _normed(lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt())(
                 x, torch.ones_like(weight), eps)),
            ("the root is missing", _normed(lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps))),
            ("the square overflows float16; square in float32", _normed_in_half),
        ],
    )  # fmt: skip
    _check_roundings(apply)


def _check_roundings(apply: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """In bfloat16 every bit counts: float32 inside, one rounding before the weight and one after it."""
    compare(
        apply,
        _normed(lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()),
        [Case("bfloat16 [5, 576]", _random(5, 576, seed=3).bfloat16(), _random(576, seed=4).bfloat16(), 1e-5)],
        expected="computed in float32, rounded to the dtype of x, and then multiplied with the weight",
        mistakes=[
            (
                "the weight is multiplied before the result is rounded; round first, with .to(x.dtype)",
                _normed_rounded_last,
            ),
            ("everything is computed in bfloat16; make x float32 first", _normed_in_half),
        ],
        tolerance=Tolerance(relative=0.0, absolute=0.0),
    )


def _normed_rounded_last(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _normed_in_half(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _normed(formula: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    def apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * formula(x.double(), eps).to(torch.float32 if x.dtype.itemsize == 2 else x.dtype).to(x.dtype)

    return apply


# ---- 1.7 rotation ------------------------------------------------------------------------------------------------


def check_rotate(rotate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Against the multiplication of complex numbers: a pair is a point in the plane, the angle turns it."""
    quarter = torch.tensor([[0.0]]), torch.tensor([[1.0]])
    compare(
        rotate,
        _turned(),
        [
            Case("one pair [1, 0] turned by 90°", torch.tensor([[[1.0, 0.0]]]), *quarter),
            Case("two pairs [1, 2, 3, 4], the second one left alone", torch.tensor([[[1.0, 2, 3, 4]]]),
                 torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])),
            Case("5 tokens, 3 heads of 8", _random(5, 3, 8, seed=5), *_angles(5, 4)),
            Case("4 tokens, 4 heads of 6", _random(4, 4, 6, seed=6), *_angles(4, 3)),
            Case("bfloat16", _random(3, 2, 8, seed=7).bfloat16(), *_angles(3, 4)),
        ],
        expected="pair i, which is (x[i], x[i + head_dim/2]), turned by its token's angle i; same dtype as x",
        mistakes=[
            ("neighbours are paired (x[0] with x[1]); here with x[head_dim/2]", _turned(interleaved=True)),
            ("the pairs turn the other way: the sign of sin is exchanged", _turned(backwards=True)),
            ("cos and sin are exchanged", lambda x, cos, sin: _turned()(x, sin, cos)),
            ("the angles were taken by head, not by token", _turned_by_head),
            ("only the first half is turned", lambda x, cos, sin: _half(x, _turned()(x, cos, sin), 0)),
            ("nothing is turned", lambda x, cos, sin: x),
        ],
    )  # fmt: skip


def _angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * 0.7 ** torch.arange(pairs)
    return angles.cos(), angles.sin()


def _turned(interleaved: bool = False, backwards: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        wide = x.double()
        points = torch.complex(*((wide[..., ::2], wide[..., 1::2]) if interleaved else wide.split(half, dim=-1)))
        turned = points * torch.complex(cos.double(), -sin.double() if backwards else sin.double())[:, None]
        parts = torch.stack([turned.real, turned.imag], dim=-1 if interleaved else -2)
        return parts.flatten(-2).to(x.dtype)

    return turn


def _turned_by_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned()(x.transpose(0, 1), cos, sin).transpose(0, 1)


def _half(x: Tensor, turned: Tensor, which: int) -> Tensor:
    parts = [*x.chunk(2, dim=-1)]
    parts[which] = turned.chunk(2, dim=-1)[which]
    return torch.cat(parts, dim=-1)


# ---- 1.8 feed-forward --------------------------------------------------------------------------------------------


def check_feed_forward(feed_forward_class: type[nn.Module]) -> None:
    """Against the three products written out with plain matrices."""
    weights = [_random(40, 24, seed=8), _random(40, 24, seed=9), _random(24, 40, seed=10)]

    def apply(x: Tensor) -> Tensor:
        layer = feed_forward_class(CONFIG)
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        layer.load_state_dict(dict(zip(names, weights, strict=True)))
        return layer(x)

    def mixed(mix: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        gate, up, down = weights
        return lambda x: mix(x @ gate.T, x @ up.T) @ down.T

    compare(
        apply,
        mixed(lambda gate, up: gate / (1 + (-gate).exp()) * up),
        [Case("one token", _random(1, 24, seed=11)), Case("four tokens", _random(4, 24, seed=12))],
        expected="down(silu(gate(x)) * up(x)), with silu(z) = z * sigmoid(z)",
        mistakes=[
            ("gate and up are exchanged: silu belongs to the gate", mixed(lambda gate, up: gate * F.silu(up))),
            ("the gate is the sigmoid alone; silu is z * sigmoid(z)", mixed(lambda gate, up: gate.sigmoid() * up)),
            ("the activation is ReLU; SwiGLU uses silu", mixed(lambda gate, up: gate.relu() * up)),
            ("the activation is GELU; SwiGLU uses silu", mixed(lambda gate, up: F.gelu(gate) * up)),
            ("gate and up are added; they are multiplied", mixed(lambda gate, up: F.silu(gate) + up)),
            ("up is missing: that is a plain feed-forward layer", mixed(lambda gate, up: F.silu(gate))),
            ("the activation is missing", mixed(lambda gate, up: gate * up)),
            ("the activation comes after the product", mixed(lambda gate, up: F.silu(gate * up))),
        ],
        tolerance=_CLOSE,
    )


# ---- 1.9 one decoder layer ---------------------------------------------------------------------------------------


@cache
def _transformers_model() -> Any:
    """A small random Llama in transformers with the sizes of CONFIG: the oracle of the last two exercises."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # takes seconds: only these two checks pay for it

    with torch.random.fork_rng():
        torch.manual_seed(19)
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=CONFIG.vocab_size, hidden_size=CONFIG.hidden_size, head_dim=CONFIG.head_dim,
                intermediate_size=CONFIG.intermediate_size, num_hidden_layers=CONFIG.num_layers,
                num_attention_heads=CONFIG.num_heads, num_key_value_heads=CONFIG.num_kv_heads,
                max_position_embeddings=CONFIG.context_length, rms_norm_eps=CONFIG.rms_norm_eps,
                tie_word_embeddings=False,
            ),
            attn_implementation="eager",
        )  # fmt: skip
        for parameter in model.parameters():  # the usual 0.02 would leave every layer next to nothing to do
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def check_decoder_layer(layer_class: type[nn.Module]) -> None:
    """Against transformers' LlamaDecoderLayer with the same weights."""
    oracle = _transformers_model()
    weights = oracle.model.layers[0].state_dict()

    def apply(x: Tensor) -> Tensor:
        layer = layer_class(CONFIG, 0)
        layer.load_state_dict(weights)
        return _run_layer(layer, x)

    compare(
        apply,
        lambda x: oracle.model.layers[0](
            x[None], attention_mask=_causal_mask(len(x)), position_embeddings=_hf_angles(oracle, len(x))
        )[0].detach(),
        [Case("one token", _random(1, 24, seed=13)), Case("five tokens", _random(5, 24, seed=14))],
        expected="transformers' output with the same weights: two steps, each on a normalized copy, each added",
        mistakes=[
            ("the attention's result replaces the stream; it is added to it", _layer_with(_replaced_attention)),
            ("the feed-forward's result replaces the stream; it is added to it", _layer_with(_replaced_mlp)),
            ("the feed-forward reads the stream before the attention was added", _layer_with(_parallel)),
            ("the attention reads the stream itself, not its normalized copy", _layer_with(_no_first_norm)),
            ("the feed-forward reads the stream itself, not its normalized copy", _layer_with(_no_second_norm)),
            ("the two norms are exchanged", _layer_with(_exchanged_norms)),
            ("the sums are normalized (post-norm); here a copy is normalized first", _layer_with(_post_norm)),
            ("the normalized copy is added, not the stream", _layer_with(_normed_stream)),
        ],
        tolerance=_CLOSE,
    )


def _causal_mask(tokens: int) -> Tensor:
    return torch.full((1, 1, tokens, tokens), float("-inf")).triu(1)


def _hf_angles(oracle: Any, tokens: int) -> Any:
    return oracle.model.rotary_emb(torch.zeros(1), torch.arange(tokens)[None])


def _run_layer(layer: nn.Module, x: Tensor) -> Tensor:
    from llmfromscratch import model

    batch = Batch.of([(0, [0] * len(x), 0)])
    cos, sin = model.RotaryEmbedding(CONFIG)(batch.positions)
    return layer(x, cos, sin, batch, kv_cache.ConcatKVCache(1))


Step = Callable[[Tensor], Tensor]
Wiring = Callable[[Tensor, Step, Step, Step, Step], Tensor]


def _layer_with(wiring: Wiring) -> Step:
    """A layer of transformers' parts, wired in another way: wiring(x, norm1, attention, norm2, mlp)."""

    def apply(x: Tensor) -> Tensor:
        oracle = _transformers_model()
        layer = oracle.model.layers[0]
        angles = _hf_angles(oracle, len(x))

        def attention(x: Tensor) -> Tensor:
            return layer.self_attn(x[None], position_embeddings=angles, attention_mask=_causal_mask(len(x)))[0][0]

        with torch.no_grad():
            return wiring(x, layer.input_layernorm, attention, layer.post_attention_layernorm, layer.mlp)

    return apply


def _replaced_attention(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = attention(n1(x))
    return x + mlp(n2(x))


def _replaced_mlp(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    return mlp(n2(x + attention(n1(x))))


def _parallel(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    return x + attention(n1(x)) + mlp(n2(x))


def _no_first_norm(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = x + attention(x)
    return x + mlp(n2(x))


def _no_second_norm(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = x + attention(n1(x))
    return x + mlp(x)


def _exchanged_norms(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = x + attention(n2(x))
    return x + mlp(n1(x))


def _post_norm(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = n1(x + attention(x))
    return n2(x + mlp(x))


def _normed_stream(x: Tensor, n1: Step, attention: Step, n2: Step, mlp: Step) -> Tensor:
    x = n1(x)
    x = x + attention(x)
    x = n2(x)
    return x + mlp(x)


# ---- 1.10 the whole model ----------------------------------------------------------------------------------------

Steps = list[list[tuple[int, list[int], int]]]  # batches, one after another, as `Batch.of` takes them


class _Remembers:
    """A cache that takes whatever comes, also from a model that leaves layers out: its result will tell."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], Tensor] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, batch: Batch) -> None:
        """Appends the rows of every request."""
        for span in batch.spans:
            new, key = torch.stack([keys[span.rows], values[span.rows]]), (layer, span.request_id)
            self._pairs[key] = torch.cat([self._pairs[key], new], dim=1) if key in self._pairs else new

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """All rows of one request."""
        keys, values = self._pairs[layer, request_id]
        return keys, values


def check_model(model_class: type[nn.Module]) -> None:
    """Logits against transformers' LlamaForCausalLM, alone and with two requests in one batch."""
    oracle = _transformers_model()
    weights = {name.removeprefix("model."): tensor for name, tensor in oracle.state_dict().items()}
    network = model_class(CONFIG)
    network.load_state_dict(weights)

    def apply(steps: Steps, all_logits: bool) -> Tensor:
        cache = _Remembers()
        for parts in steps:
            logits = network(Batch.of(parts, all_logits=all_logits), cache)
        return logits

    three, five = [7, 1, 30], [2, 36, 11, 5, 8]
    compare(
        apply,
        _logits(),
        [
            Case("one token, its logits", [[(0, [4], 0)]], True),
            Case("three tokens, the last one's logits", [[(0, three, 0)]], False),
            Case("five tokens, all logits", [[(0, five, 0)]], True),
            Case("one token at position 3, after three in the cache", [[(0, three, 0)], [(0, [9], 3)]], False),
            Case("two requests in one batch, the last token of each", [[(0, three, 0), (1, five, 0)]], False),
        ],
        expected="transformers' logits [rows that need one, vocab] with the same weights",
        mistakes=[
            ("every row goes through the head; only batch.logit_rows need logits", _logits(every_row=True)),
            ("the norm before the head is missing", _logits(no_norm=True)),
            ("the layers are left out", _logits(layers=0)),
            ("the last layer is left out", _logits(layers=CONFIG.num_layers - 1)),
            ("these are probabilities; logits are asked for, before any softmax", _logits(softmax=True)),
            ("only the last row of the batch got logits; each request has one of its own", _logits(last_only=True)),
            ("positions are counted from 0 in every call; take batch.positions", _logits(from_zero=True)),
        ],
        tolerance=_CLOSE,
    )


def _logits(
    every_row: bool = False, no_norm: bool = False, layers: int = CONFIG.num_layers, softmax: bool = False,
    last_only: bool = False, from_zero: bool = False,
) -> Callable[[Steps, bool], Tensor]:  # fmt: skip
    """transformers' logits of the last batch, each request alone with all its tokens; the switches make mistakes."""

    def apply(steps: Steps, all_logits: bool) -> Tensor:
        rows = []
        for request, _, start in steps[-1]:
            ids = [token for parts in steps for other, ids, _ in parts if other == request for token in ids]
            positions = _positions(steps, request) if from_zero else torch.arange(len(ids))
            logits = _one_request(torch.tensor(ids), positions, layers, no_norm)[start:]
            rows.append(logits if all_logits or every_row else logits[-1:])
        result = torch.cat(rows)[-1:] if last_only else torch.cat(rows)
        return result.softmax(dim=-1) if softmax else result

    return apply


def _positions(steps: Steps, request: int) -> Tensor:
    """Where the tokens of a request stand when every batch counts from 0, all its requests in one row."""
    places = []
    for parts in steps:
        rows = [other for other, ids, _ in parts for _ in ids]
        places += [row for row, other in enumerate(rows) if other == request]
    return torch.tensor(places)


def _one_request(ids: Tensor, positions: Tensor, layers: int, no_norm: bool) -> Tensor:
    oracle = _transformers_model()
    with torch.no_grad():
        x = oracle.model.embed_tokens(ids[None])
        angles = oracle.model.rotary_emb(torch.zeros(1), positions[None])
        for layer in oracle.model.layers[:layers]:
            x = layer(x, attention_mask=_causal_mask(len(ids)), position_embeddings=angles)
        return oracle.lm_head(x if no_norm else oracle.model.norm(x))[0]
