"""What a checkpoint says about its model: one ModelConfig, whichever way the file writes it down.

Three dialects say the same: Hugging Face's config.json, the metadata of a GGUF file, and params.json beside Meta's
original weights. Every number is checked here, before anything is computed or allocated with it, and whatever this
engine cannot compute exactly is refused by name. The defaults for absent fields are those of transformers.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmfromscratch.errors import CheckpointError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MAX_LAYERS = 1024
_CONTEXT_DEFAULTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
# The least and the greatest value that can be meant; a file beyond them is damaged or hostile.
_LIMITS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_layers": (1, MAX_LAYERS),
    "num_heads": (1, 2**14),
    "num_kv_heads": (1, 2**14),
    "head_dim": (2, 2**14),
    "context_length": (1, 2**31),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the context that the model was first trained on.

    kind: "linear" divides every frequency by factor; "llama3" divides the slow ones and blends in between
    (low_freq_factor, high_freq_factor); "yarn" blends by rotations (beta_fast, beta_slow) and scales cos and sin by
    attention_factor, which is computed from factor, mscale and mscale_all_dim where it is None; "factors" divides
    frequency i by factors[i] (a GGUF file stores them so). original_context is that first context in tokens.
    Source: transformers' modeling_rope_utils; YaRN is arXiv 2309.00071.
    """

    kind: str
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder-only transformer of the Llama family.

    Widths are in numbers of elements, context_length is in tokens. attention_bias: q, k and v have biases; output_bias:
    the attention's output projection has one; mlp_bias: gate, up and down have them; qk_norm: q and k heads are
    normalized (Qwen3). eos_token_ids: every id that ends a text. Raises CheckpointError where a field is out of range
    or fields contradict each other.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise _unsupported("model_type", self.model_type, MODEL_TYPES)
        for name, (low, high) in _LIMITS.items():
            _integer(name, getattr(self, name), low, high)
        _real("rms_norm_eps", self.rms_norm_eps, 1e-20, 1.0)
        # YaRN divides by the logarithm of the base: a base of 1, at which nothing differs in speed, is no base
        _real("rope_theta", self.rope_theta, 1.001, 1e15)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads is {self.num_heads}, which is not a multiple of num_kv_heads = {self.num_kv_heads}; each "
                "key head must serve the same number of query heads."
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}, but rotary embeddings turn pairs: it must be even.")
        if self.rope_scaling is not None and self.rope_scaling.kind == "factors":
            _check_factors(self.rope_scaling.factors, self.head_dim)
        for name, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_ids", self.eos_token_ids)):
            for token in ids:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise CheckpointError(
                        f"{name} holds {token}, which is outside the vocabulary of {self.vocab_size} tokens."
                    )

    @classmethod
    def from_hf(cls, source: Mapping[str, Any], file: str | Path | None = None) -> ModelConfig:
        """Reads the object in a config.json of transformers 4 or 5. Raises CheckpointError naming field and value."""
        return _build(_hf_fields, source, file)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: str | Path | None = None) -> ModelConfig:
        """Reads the metadata of a GGUF file.

        What only the tensors can tell (biases, a tied head, stored rope factors) is filled in by open_checkpoint.
        """
        return _build(_gguf_fields, metadata, file)

    @classmethod
    def from_meta(
        cls, params: Mapping[str, Any], file: str | Path | None = None, vocab_size: int | None = None
    ) -> ModelConfig:
        """Reads Meta's params.json; vocab_size is the number of rows of the embedding (the file often says -1).

        params.json does not hold a context length: it follows from the generation that the rope settings belong to.
        """
        if vocab_size is not None and isinstance(params, Mapping):
            params = {**params, "vocab_size": vocab_size}
        return _build(_meta_fields, params, file)


def _build(read: Any, source: Any, file: str | Path | None) -> ModelConfig:
    """read(source) as a ModelConfig; errors name the file."""
    try:
        if not isinstance(source, Mapping):
            raise CheckpointError(f"The config is a {type(source).__name__}; it must be an object of named fields.")
        return ModelConfig(**read(source))
    except CheckpointError as error:
        raise CheckpointError(error.reason, file) from None


# ---- Hugging Face ------------------------------------------------------------------------------------------------


def _hf_fields(source: Mapping[str, Any]) -> dict[str, Any]:
    kind = _choice(source, "model_type", MODEL_TYPES)
    _refuse_unsupported_hf(source)
    sizes = {
        "vocab_size": _size(source, "vocab_size", "vocab_size"),
        "hidden_size": _size(source, "hidden_size", "hidden_size"),
        "intermediate_size": _size(source, "intermediate_size", "intermediate_size"),
        "num_layers": _size(source, "num_hidden_layers", "num_layers"),
        "num_heads": _size(source, "num_attention_heads", "num_heads"),
        "context_length": _size(source, "max_position_embeddings", "context_length", _CONTEXT_DEFAULTS[kind]),
    }
    sizes["num_kv_heads"] = _size(source, "num_key_value_heads", "num_kv_heads", sizes["num_heads"])
    head_dim = 128 if kind == "qwen3" else _per_head(sizes["hidden_size"], sizes["num_heads"], source.get("head_dim"))
    sizes["head_dim"] = _size(source, "head_dim", "head_dim", head_dim)
    theta, scaling = _hf_rope(source, sizes["context_length"])
    # A causal window changes nothing until the text is longer than the window: up to there the full attention that we
    # compute is exact, so the context ends there.
    window = _hf_window(source, kind, sizes["num_layers"])
    sizes["context_length"] = min(sizes["context_length"], window or sizes["context_length"])
    attention_bias = _flag(source, "attention_bias", False) if kind in ("llama", "qwen3") else False
    return {
        **sizes,
        "model_type": kind,
        "rms_norm_eps": _number(source, "rms_norm_eps", 1e-20, 1.0, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": _flag(source, "tie_word_embeddings", False),
        "attention_bias": attention_bias or kind == "qwen2",
        "output_bias": attention_bias,
        "mlp_bias": _flag(source, "mlp_bias", False) if kind == "llama" else False,
        "qk_norm": kind == "qwen3",
        "bos_token_id": _token(source, "bos_token_id"),
        "eos_token_ids": end_tokens(source, "eos_token_id"),
        "pad_token_id": _token(source, "pad_token_id"),
    }


def _refuse_unsupported_hf(source: Mapping[str, Any]) -> None:
    _choice(source, "hidden_act", ("silu", "swish"), "silu")  # two names of one function
    if source.get("quantization_config") is not None:
        raise CheckpointError(
            "The config has a quantization_config: its weights are packed in a way this reader does not know. Use the "
            "unquantized checkpoint or a GGUF of it."
        )
    layer_types = source.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if layer_types is not None and not (isinstance(layer_types, list) and all(kind in known for kind in layer_types)):
        raise _unsupported("layer_types", layer_types, known)


def _hf_window(source: Mapping[str, Any], kind: str, num_layers: int) -> int | None:
    """The attention window in tokens, or None where every layer sees the whole text."""
    if kind == "llama":
        return None
    if kind != "mistral":
        layer_types = source.get("layer_types")
        if layer_types is not None:
            slides = "sliding_attention" in layer_types
        else:
            slides = _size(source, "max_window_layers", "max_window_layers", 28, (0, 2**31)) < num_layers
        if not (_flag(source, "use_sliding_window", False) and slides):
            return None
    if "sliding_window" in source and source["sliding_window"] is None:
        return None
    return _size(source, "sliding_window", "sliding_window", 4096, (1, 2**31))


def _hf_rope(source: Mapping[str, Any], context: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, from transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    name = "rope_scaling" if source.get("rope_scaling") else "rope_parameters"
    rope = source.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(f"{name} is {_shown(rope)}; expected one flat object of rotary settings.")
    theta = _number(rope, "rope_theta", 1.0, 1e15, _number(source, "rope_theta", 1.0, 1e15, 10000.0))
    partial = _number(rope, "partial_rotary_factor", 0.0, 1.0, _number(source, "partial_rotary_factor", 0.0, 1.0, 1.0))
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {partial}; only whole heads (1.0) can be rotated here.")
    key = "rope_type" if "rope_type" in rope else "type"
    kind = _choice(rope, key, ("default", "linear", "llama3", "yarn"), "default")
    if kind == "default":
        return theta, None
    inner = _size(rope, "original_max_position_embeddings", "context_length", context)
    original = _size(source, "original_max_position_embeddings", "context_length", inner)
    if kind == "linear":
        return theta, RopeScaling("linear", _number(rope, "factor", 1.0, 1e6), original)
    if kind == "llama3":
        return theta, _llama3(rope, _number(rope, "factor", 1.0, 1e6), original)
    return theta, _hf_yarn(rope, context, original)


def _llama3(rope: Mapping[str, Any], factor: float, original: int) -> RopeScaling:
    low = _number(rope, "low_freq_factor", 0.0, 1e6)
    high = _number(rope, "high_freq_factor", 0.0, 1e6)
    if not high > low > 0:
        raise CheckpointError(
            f"high_freq_factor is {high} and low_freq_factor is {low}; expected both above 0 and the first the greater."
        )
    return RopeScaling("llama3", factor, original, low, high)


def _hf_yarn(rope: Mapping[str, Any], context: int, original: int) -> RopeScaling:
    # Zero means "not set" for these in transformers, and so it does here.
    optional = {
        name: _number(rope, name, 0.0, 1e6, 0.0) or None for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    if rope.get("attention_factor") == 0:
        raise CheckpointError("attention_factor is 0, which would erase every query; leave it out to have it computed.")
    return _yarn(
        factor=_number(rope, "factor", 1.0, 1e6, context / original),
        original_context=original,
        beta_fast=_number(rope, "beta_fast", 0.0, 1e6, 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 0.0, 1e6, 1.0) or 1.0,
        truncate=_flag(rope, "truncate", True),
        **optional,
    )


def _yarn(factor: float, original_context: int, beta_fast: float, beta_slow: float, **rest: Any) -> RopeScaling:
    if beta_fast < beta_slow:
        raise CheckpointError(f"beta_fast is {beta_fast} and beta_slow is {beta_slow}; the first must be the greater.")
    return RopeScaling("yarn", factor, original_context, beta_fast=beta_fast, beta_slow=beta_slow, **rest)


# ---- GGUF --------------------------------------------------------------------------------------------------------


def _gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    arch = _choice(metadata, "general.architecture", ("llama", "qwen2", "qwen3"))  # Mistral's files say llama
    if _size(metadata, f"{arch}.expert_count", "expert_count", 0, (0, 2**20)) > 0:
        raise CheckpointError(f"{arch}.expert_count is not 0: mixtures of experts are not supported.")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    sizes = {
        "hidden_size": _size(metadata, f"{arch}.embedding_length", "hidden_size"),
        "intermediate_size": _size(metadata, f"{arch}.feed_forward_length", "intermediate_size"),
        "num_layers": _size(metadata, f"{arch}.block_count", "num_layers"),
        "num_heads": _size(metadata, f"{arch}.attention.head_count", "num_heads"),
        "context_length": _size(metadata, f"{arch}.context_length", "context_length"),
    }
    counted = len(tokens) if isinstance(tokens, list) and tokens else None
    sizes["vocab_size"] = _size(metadata, f"{arch}.vocab_size", "vocab_size", counted)
    sizes["num_kv_heads"] = _size(metadata, f"{arch}.attention.head_count_kv", "num_kv_heads", sizes["num_heads"])
    sizes["head_dim"] = _gguf_head_dim(metadata, arch, sizes["hidden_size"], sizes["num_heads"])
    scaling = _gguf_rope_scaling(metadata, arch, sizes["context_length"])
    # As in _hf_fields: full attention is exact up to the window.
    window = _size(metadata, f"{arch}.attention.sliding_window", "sliding_window", 0, (0, 2**31))
    sizes["context_length"] = min(sizes["context_length"], window or sizes["context_length"])
    ends = [end_tokens(metadata, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        **sizes,
        "model_type": arch,
        "rms_norm_eps": _number(metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-20, 1.0),
        "rope_theta": _number(metadata, f"{arch}.rope.freq_base", 1.0, 1e15, 10000.0),
        "rope_scaling": scaling,
        "attention_bias": arch == "qwen2",
        "qk_norm": arch == "qwen3",
        "bos_token_id": _token(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(token for group in ends for token in group)),
        "pad_token_id": _token(metadata, "tokenizer.ggml.padding_token_id"),
    }


def _gguf_head_dim(metadata: Mapping[str, Any], arch: str, hidden_size: int, num_heads: int) -> int:
    keys = f"{arch}.attention.key_length"
    rotated = f"{arch}.rope.dimension_count"
    if arch == "llama" and metadata.get(keys) is None and metadata.get(rotated) is not None:
        keys = rotated  # older files name only this one
    head_dim = _size(metadata, keys, "head_dim", _per_head(hidden_size, num_heads, metadata.get(keys)))
    for name in (f"{arch}.attention.value_length", rotated):
        length = _size(metadata, name, "head_dim", head_dim)
        if length != head_dim:
            raise CheckpointError(
                f"{name} is {length} while heads are {head_dim} wide; only equal widths, rotated whole, are supported."
            )
    return head_dim


def _gguf_rope_scaling(metadata: Mapping[str, Any], arch: str, context: int) -> RopeScaling | None:
    prefix = f"{arch}.rope.scaling."
    legacy = f"{arch}.rope.scale_linear"
    default = "none" if metadata.get(legacy) is None else "linear"
    kind = _choice(metadata, f"{prefix}type", ("none", "linear", "yarn"), default)
    if kind == "none":
        return None
    factor = _number(metadata, f"{prefix}factor", 1.0, 1e6, _number(metadata, legacy, 1.0, 1e6, 1.0))
    original = _size(metadata, f"{prefix}original_context_length", "context_length", context)
    if kind == "linear":
        return RopeScaling("linear", factor, original) if factor != 1.0 else None
    for name, usual in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        if _number(metadata, f"{prefix}{name}", -1e6, 1e6, usual) != usual:
            raise CheckpointError(f"{prefix}{name} is {metadata[f'{prefix}{name}']}; only {usual} is supported.")
    # llama.cpp multiplies the usual YaRN temperature by these two.
    temperatures = (f"{prefix}attn_factor", f"{prefix}yarn_attn_factor")
    extra = math.prod(_number(metadata, name, 1e-6, 1e6, 1.0) for name in temperatures)
    return _yarn(
        factor=factor,
        original_context=original,
        beta_fast=_number(metadata, f"{prefix}yarn_beta_fast", 0.0, 1e6, 32.0) or 32.0,
        beta_slow=_number(metadata, f"{prefix}yarn_beta_slow", 0.0, 1e6, 1.0) or 1.0,
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
    )


# ---- Meta --------------------------------------------------------------------------------------------------------


def _meta_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size = _size(params, "dim", "hidden_size")
    num_heads = _size(params, "n_heads", "num_heads")
    head_dim = _size(params, "head_dim", "head_dim", _per_head(hidden_size, num_heads, params.get("head_dim")))
    theta = _number(params, "rope_theta", 1.0, 1e15, 10000.0)
    scaled = _flag(params, "use_scaled_rope", False)
    for name in ("moe", "quantization_args", "lora_args"):
        if params.get(name) is not None:
            raise CheckpointError(f"{name} is set: this kind of checkpoint is not supported.")
    # Meta's code takes the context as an argument: Llama 3.1 ran to 131,072 tokens, 3 to 8,192, the first one to 2,048
    # (Llama 2's files cannot be told from it by what params.json says).
    context = _size(params, "max_seq_len", "context_length", 131072 if scaled else 8192 if theta >= 5e5 else 2048)
    window = _size(params, "sliding_window", "sliding_window", 0, (0, 2**31))
    # use_scaled_rope stands for the constants in Meta's own code.
    scaling = RopeScaling("llama3", _number(params, "rope_scaling_factor", 1.0, 1e6, 8.0), 8192) if scaled else None
    return {
        "model_type": "llama",
        "vocab_size": _size(params, "vocab_size", "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _meta_ffn_width(params, hidden_size),
        "num_layers": _size(params, "n_layers", "num_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _size(params, "n_kv_heads", "num_kv_heads", num_heads),
        "head_dim": head_dim,
        "context_length": min(context, window or context),
        "rms_norm_eps": _number(params, "norm_eps", 1e-20, 1.0, 1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _meta_ffn_width(params: Mapping[str, Any], hidden_size: int) -> int:
    """Two thirds of four times the width, scaled, then up to a multiple; Mistral's params.json names it instead."""
    multiple = _size(params, "multiple_of", "multiple_of", 256, (1, 2**20))
    multiplier = _number(params, "ffn_dim_multiplier", 0.0, 1024.0, 1.0)
    width = int(multiplier * int(2 * (4 * hidden_size) / 3))
    return _size(params, "hidden_dim", "intermediate_size", multiple * math.ceil(width / multiple))


# ---- single values -----------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """A short form of any value: untrusted ones may be long or nested without end."""
    return reprlib.repr(value)


def _unsupported(name: str, value: Any, known: tuple[str, ...]) -> CheckpointError:
    return CheckpointError(f"{name} is {_shown(value)}, which is not supported; known: {', '.join(known)}.")


def _choice(source: Mapping[str, Any], name: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = source.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or value not in known:
        raise _unsupported(name, value, known)
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    # bool counts as an integer in Python; in a config it is a mistake.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise CheckpointError(f"{name} is {_shown(value)}; expected a whole number from {low:,} to {high:,}.")
    return int(value)


def _real(name: str, value: Any, low: float, high: float) -> float:
    # NaN fails every comparison, so it ends here too. An integer may be too long for float(): compare it as it is.
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise CheckpointError(f"{name} is {_shown(value)}; expected a number from {low:g} to {high:g}.")
    return float(value)


def _size(
    source: Mapping[str, Any], name: str, field: str, default: Any = None, limits: tuple[int, int] | None = None
) -> int:
    """The whole number under name, within the limits of that field; default where it is absent or null."""
    value = source.get(name)
    if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
        value = value.flat[0]  # some GGUF files give one value a layer
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{name} is missing; the model cannot be built without it.")
    return _integer(name, value, *(limits or _LIMITS[field]))


def _number(source: Mapping[str, Any], name: str, low: float, high: float, default: float | None = None) -> float:
    """The finite number under name; default where it is absent or null."""
    value = source.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{name} is missing; the model cannot be built without it.")
    return _real(name, value, low, high)


def _flag(source: Mapping[str, Any], name: str, default: bool) -> bool:
    value = source.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} is {_shown(value)}; expected true or false.")
    return value


def _token(source: Mapping[str, Any], name: str) -> int | None:
    """A token id, or None where it is absent, null or -1 (some files write none so)."""
    if source.get(name) is None:
        return None
    token = _integer(name, source[name], -1, _LIMITS["vocab_size"][1])
    return None if token == -1 else token


def end_tokens(source: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The token ids under name: one, a list of them, or none. Raises CheckpointError for anything else."""
    value = source.get(name)
    ids = value if isinstance(value, list) else [value]
    found = [_token({name: token}, name) for token in ids]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _per_head(hidden_size: int, num_heads: int, stated: Any) -> int:
    """The usual head width, an equal share of the hidden width. It must come out even only if none is stated."""
    if stated is None and hidden_size % num_heads:
        raise CheckpointError(
            f"The hidden width {hidden_size} is not a multiple of the {num_heads} heads, and no head width is given."
        )
    return hidden_size // num_heads


def _check_factors(factors: tuple[float, ...], head_dim: int) -> None:
    if len(factors) != head_dim // 2:
        raise CheckpointError(f"There are {len(factors)} rope factors; heads of {head_dim} need {head_dim // 2}.")
    for factor in factors:
        _real("a rope factor", factor, 1e-6, 1e6)
