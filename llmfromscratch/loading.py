"""Chapter 1: from a file full of bytes to tensors with the names, the shapes and the order that the model expects.

One picture to keep in mind: a checkpoint is a table of contents and a heap of bytes.

    name in the file       shape          packed as   where its bytes are
    token_embd.weight      [49152, 576]   Q8_0        the first 30,081,024 of the heap
    blk.0.attn_q.weight    [576, 576]     Q4_1        207,360 further down
    ...

`open_checkpoint` reads the table only: it translates the names, compares them with what the config promises, and
refuses a model with holes. `Checkpoint.load` then works through the heap, two megabytes of numbers at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import checkpoint_files, devices
from llmfromscratch.config import ModelConfig, RopeScaling, end_tokens
from llmfromscratch.errors import CheckpointError, OutOfMemory, RequestError
from llmfromscratch.formats import ggml
from llmfromscratch.formats.stored import StoredTensor
from llmfromscratch.key_report import KeyReport, probable_cause
from llmfromscratch.placement import Placement, format_bytes, module_of
from llmfromscratch.progress import progress_bar
from llmfromscratch.text.tokenizer_data import TokenizerData
from llmfromscratch.text.tokenizer_files import read_gguf_tokenizer, read_tokenizer

# ---- What the bytes mean: numbers in blocks ----------------------------------------------------------------------


def dequantize_q4_1(blocks: Tensor) -> Tensor:
    """Unpacks 4-bit blocks: 20 bytes become 32 numbers.

    blocks: uint8 [n, 20], each row laid out as
        bytes 0-1    float16 scale d          bytes 2-3    float16 minimum m
        bytes 4-19   two 4-bit codes each: byte 4 + i holds code i in its low half and code 16 + i in its high half
    Returns float32 [n, 32]: number i = d * code i + m.

    Example: d = 0.5, m = -1 and byte 4 = 0x3A (low half 10, high half 3) give number 0 = 4.0 and number 16 = 0.5.
    Raises CheckpointError unless blocks is uint8 of that shape.
    """
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != 20:
        raise CheckpointError(f"Q4_1 blocks are uint8 [n, 20], not {blocks.dtype} {list(blocks.shape)}.")
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    packed = blocks[:, 4:]
    codes = torch.cat([packed & 15, packed >> 4], dim=1)
    return codes * scale + minimum


# ---- What the tensors are called ---------------------------------------------------------------------------------

STRAY_PREFIXES = ("model.", "module.", "_orig_mod.", "base_model.")
TOP_NAMES = {
    "embed_tokens": "embed_tokens", "token_embd": "embed_tokens", "tok_embeddings": "embed_tokens",
    "norm": "norm", "output_norm": "norm",
    "lm_head": "lm_head", "output": "lm_head",
}  # fmt: skip
# A layer's parts: the name in Hugging Face's files, in GGUF, in Meta's.
LAYER_PARTS = (
    ("input_layernorm", "attn_norm", "attention_norm"),
    ("self_attn.q_proj", "attn_q", "attention.wq"),
    ("self_attn.k_proj", "attn_k", "attention.wk"),
    ("self_attn.v_proj", "attn_v", "attention.wv"),
    ("self_attn.o_proj", "attn_output", "attention.wo"),
    ("self_attn.q_norm", "attn_q_norm", "attention.q_norm"),
    ("self_attn.k_norm", "attn_k_norm", "attention.k_norm"),
    ("post_attention_layernorm", "ffn_norm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate", "feed_forward.w1"),
    ("mlp.up_proj", "ffn_up", "feed_forward.w3"),
    ("mlp.down_proj", "ffn_down", "feed_forward.w2"),
)
LAYER_NAMES = {name: names[0] for names in LAYER_PARTS for name in names}
LAYER_PATTERN = re.compile(r"(?:layers|blk)\.(0|[1-9][0-9]*)\.(.+)\.(weight|bias)")
# Tables that are computed from the config, though some files hold them.
IGNORED_PATTERN = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope\.freqs|rope_freqs\.weight)$")


def canonical_name(name: str) -> str | None:
    """The name that this package uses for a tensor: Hugging Face's, without the leading "model.".

    Takes Hugging Face, GGUF and Meta names, with any pile of STRAY_PREFIXES before them. None for tables that can be
    ignored (rotary frequencies). A name that is not known comes back unchanged, so that the key report lists it.

    Examples: "blk.0.attn_q.weight", "layers.0.attention.wq.weight" and "module.model.layers.0.self_attn.q_proj.weight"
    are all "layers.0.self_attn.q_proj.weight"; "output.weight" is "lm_head.weight"; "rope.freqs" is None.
    """
    if IGNORED_PATTERN.search(name):
        return None
    bare = name
    while prefix := next((prefix for prefix in STRAY_PREFIXES if bare.startswith(prefix)), None):
        bare = bare.removeprefix(prefix)
    if match := LAYER_PATTERN.fullmatch(bare):
        index, part, kind = match.groups()
        return f"layers.{index}.{LAYER_NAMES[part]}.{kind}" if part in LAYER_NAMES else name
    module, _, kind = bare.rpartition(".")
    return f"{TOP_NAMES[module]}.{kind}" if module in TOP_NAMES and kind in ("weight", "bias") else name


# ---- In which order the rows are ---------------------------------------------------------------------------------


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Puts the rows of a query or key projection from interleaved into half-split order, head by head.

    Rotary embedding turns pairs of rows. GGUF files of Llama models, and Meta's own, put the two of a pair side by
    side; our model, like Hugging Face's, keeps the first ones in the upper half of the head, the second ones below.

    weight: [num_heads * head_dim, ...] (a bias has this one dimension only). Returns a new tensor of the same shape.
    Example: one head of 6 rows, interleaved [a0, b0, a1, b1, a2, b2], becomes [a0, a1, a2, b0, b1, b2].
    Raises CheckpointError where the number of rows is no multiple of 2 * num_heads, or there are none.
    """
    rows = weight.shape[0] if weight.ndim else 0
    if rows == 0 or num_heads < 1 or rows % (2 * num_heads):
        raise CheckpointError(f"{rows} rows cannot be {num_heads} heads of an even width; check the number of heads.")
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


# ---- Is everything there? ----------------------------------------------------------------------------------------


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape (rows first) of every tensor of the model: the keys of Model(config).state_dict()."""
    width, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": ((queries, width), config.attention_bias),
        "self_attn.k_proj": ((keys, width), config.attention_bias),
        "self_attn.v_proj": ((keys, width), config.attention_bias),
        "self_attn.o_proj": ((width, queries), config.output_bias),
        "mlp.gate_proj": ((ffn, width), config.mlp_bias),
        "mlp.up_proj": ((ffn, width), config.mlp_bias),
        "mlp.down_proj": ((width, ffn), config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    for part, (shape, bias) in matrices.items():
        layer |= {f"{part}.weight": shape} | ({f"{part}.bias": shape[:1]} if bias else {})
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, width)}
    shapes |= {f"layers.{i}.{part}": shape for i in range(config.num_layers) for part, shape in layer.items()}
    return shapes | {"norm.weight": (width,), "lm_head.weight": (config.vocab_size, width)}


def check_keys(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> KeyReport:
    """Compares the tensors found in a file with those that the config promises.

    found: canonical name -> shape. Everything `expected_shapes(config)` lists must be there, in that shape. The one
    exception is a tied head: with config.tie_word_embeddings the report says tied, and "lm_head.weight" may be absent.
    missing and unexpected are tuples of names, wrong_shape of (name, found, expected). missing and wrong_shape keep the
    order of expected_shapes, unexpected that of found. probable_cause: what the given function of that name answers.

    Example: with tie_word_embeddings, a file without "norm.weight" and "lm_head.weight" but with "extra.weight" gives
    KeyReport(missing=("norm.weight",), unexpected=("extra.weight",), wrong_shape=(), tied=True, probable_cause=...),
    the last one from probable_cause(missing, unexpected, wrong_shape, config). Never raises.
    """
    expected = expected_shapes(config)
    tied = config.tie_word_embeddings
    missing = tuple(name for name in expected if name not in found and not (tied and name == "lm_head.weight"))
    unexpected = tuple(name for name in found if name not in expected)
    wrong_shape = tuple(
        (name, tuple(found[name]), shape)
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    )
    return KeyReport(missing, unexpected, wrong_shape, tied, probable_cause(missing, unexpected, wrong_shape, config))


# ---- How much memory, and where ----------------------------------------------------------------------------------

BITS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}


def estimate_bytes(num_parameters: float, dtype: str | torch.dtype) -> int:
    """Bytes that this many weights take in a dtype: a name in BITS, or the torch dtype of that name. Rounded up.

    Weights only: the KV cache and the scales of a quantization come on top.
    Example: 7e9 weights in "float16" are 14,000,000,000 bytes (14 GB), in "int4" 3,500,000,000.
    Raises RequestError for an unknown dtype or a count that is negative or not finite.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in BITS:
        raise RequestError(f"dtype is {dtype!r}; expected one of {', '.join(BITS)}.")
    if not 0 <= num_parameters < math.inf:
        raise RequestError(f"The number of parameters is {num_parameters!r}; expected a number from 0 up.")
    return math.ceil(num_parameters * BITS[name] / 8)


def module_sizes(config: ModelConfig, dtype: str | torch.dtype) -> dict[str, int]:
    """Module -> bytes of its weights, in the order in which the model computes: "embed_tokens", "layers.0", ...,
    "norm", "lm_head". A tied head has 0 bytes of its own."""
    counts: dict[str, int] = {}
    for name, shape in expected_shapes(config).items():
        own = 0 if config.tie_word_embeddings and name == "lm_head.weight" else math.prod(shape)
        counts[module_of(name)] = counts.get(module_of(name), 0) + own
    return {module: estimate_bytes(count, dtype) for module, count in counts.items()}


def place_layers(config: ModelConfig, dtype: str | torch.dtype, budgets: Mapping[str, float]) -> Placement:
    """Shares the modules out over devices with limited memory.

    budgets: device -> bytes for weights. Modules come in the order of `module_sizes`, devices in the order of budgets.
    A device takes modules until the next one does not fit; then it is closed and the next device goes on, so that the
    computation crosses each border once. A tied head goes where the embedding is, since it is the same tensor.

    Example: an embedding of 4 MB, three layers of 3 MB and a tied head over {"cuda:0": 8e6, "cpu": 100e6} give
    "cuda:0" the embedding, layer 0 and the head, "cpu" the rest. Raises OutOfMemory, with the numbers, where it does
    not fit.
    """
    sizes = module_sizes(config, dtype)
    order = list(budgets)
    room = dict(budgets)
    places: dict[str, str] = {}
    for module, size in sizes.items():
        if module == "lm_head" and config.tie_word_embeddings:
            places[module] = places["embed_tokens"]
            continue
        while order and not size <= room[order[0]]:  # a budget of NaN holds nothing
            order.pop(0)
        if not order:
            limits = ", ".join(f"{device}: {format_bytes(budget)}" for device, budget in budgets.items())
            raise OutOfMemory(
                f"{module} ({format_bytes(size)}) and what follows have no room left: the weights take "
                f"{format_bytes(sum(sizes.values()))} in {dtype}, the budgets are {limits or 'empty'}."
            )
        places[module] = order[0]
        room[order[0]] -= size
    return Placement(places, sizes, dict(budgets))


# ---- From the heap of bytes to tensors ---------------------------------------------------------------------------

_CHUNK_NUMBERS = 2**19  # unpacked at once: 2 MB of float32, which stay in the processor's cache
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _decoder(stored: StoredTensor) -> Callable[[Tensor], Tensor]:
    """The function that unpacks this tensor's blocks. Raises CheckpointError where its type is not one of weights."""
    decoders = {**ggml.DEQUANTIZERS, "Q4_1": dequantize_q4_1}
    if stored.dtype not in decoders:
        known = ", ".join([*_FLOATS, *decoders])
        raise CheckpointError(f"It has type {stored.dtype}; weights have one of {known}.", stored.file, stored.name)
    return decoders[stored.dtype]


def decoded_chunks(stored: StoredTensor) -> Iterator[Tensor]:
    """The numbers of a tensor in flat pieces of 2^19: plain ones in their own dtype, quantized ones in float32."""
    values = stored.read()
    if stored.dtype in _FLOATS:
        yield from values.reshape(-1).split(_CHUNK_NUMBERS)
        return
    decode = _decoder(stored)
    for blocks in values.split(_CHUNK_NUMBERS // ggml.BLOCK_SIZES[stored.dtype][0]):
        yield decode(blocks).reshape(-1)


def load_tensor(stored: StoredTensor, dtype: torch.dtype, device: torch.device, heads: int | None = None) -> Tensor:
    """One tensor in memory, its rows un-permuted for that many heads unless heads is None.

    A tensor that is already what is asked for stays mapped to the file. Others are converted piece by piece into
    their final place, so that no second copy of the whole is made.
    """
    if _stays_mapped(stored, dtype, device) and heads is None:
        return stored.read()
    target = torch.empty(stored.shape, dtype=dtype, device=device)
    flat, start = target.view(-1), 0
    for values in decoded_chunks(stored):
        flat[start : start + len(values)] = values
        start += len(values)
    return target if heads is None else unpermute(target, heads)


def _stays_mapped(stored: StoredTensor, dtype: torch.dtype, device: torch.device) -> bool:
    return _FLOATS.get(stored.dtype) == dtype and device.type == "cpu"


# ---- All of it: open, then load ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: everything is known and checked, no weights are in memory yet.

    tensors: canonical name -> where it lies. dialect: "huggingface", "gguf" or "meta". metadata: what the file says
    about the model, in its own words. source: the path that was opened.
    """

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    report: KeyReport
    dialect: str
    metadata: Mapping[str, Any]
    source: Path

    @property
    def num_parameters(self) -> int:
        """Weights of the model; those of a tied head count once."""
        return sum(math.prod(stored.shape) for stored in self.tensors.values())

    def tokenizer_data(self) -> TokenizerData | None:
        """What came with the weights about a tokenizer, or None. Raises TokenizerError where it cannot be used."""
        if self.dialect == "gguf":
            known = "tokenizer.ggml.model" in self.metadata
            return read_gguf_tokenizer(self.metadata, self.source) if known else None
        return read_tokenizer(self.source if self.source.is_dir() else self.source.parent)

    def load(
        self,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | Placement | Mapping[str, float] = "auto",
    ) -> dict[str, Tensor]:
        """Canonical name -> tensor, all in one dtype, ready for Model.load_state_dict.

        dtype: "auto" (see devices.fast_dtype), a name, a torch dtype, or "keep" for the one that most of the file's
        weights are stored in (float32 where they are quantized). device: one for all, a Placement, or budgets in bytes
        for place_layers. A tied head is the embedding's tensor itself. Tensors that need no conversion stay mapped to
        the file: do not write to them, and leave the file unchanged while they are in use.
        Raises RequestError (unknown dtype or device), OutOfMemory (before anything is allocated), CheckpointError.
        """
        kind = self._dtype(dtype, device)
        plan = place_layers(self.config, kind, device) if isinstance(device, Mapping) else device
        places = {
            name: devices.resolve_device(plan.device_of(name) if isinstance(plan, Placement) else plan)
            for name in self.tensors
        }
        self._check_memory(kind, places)
        weights = {}
        for name, stored in progress_bar(self.tensors.items(), "Loading", delay=1.0, leave=False, unit="tensor"):
            weights[name] = load_tensor(stored, kind, places[name], self._interleaved_heads(name))
        if self.report.tied:
            weights["lm_head.weight"] = weights["embed_tokens.weight"]
        return weights

    def _dtype(self, dtype: str | torch.dtype, device: Any) -> torch.dtype:
        if dtype == "keep":
            kinds = [_FLOATS.get(stored.dtype, torch.float32) for stored in self.tensors.values()]
            sizes = [stored.nbytes for stored in self.tensors.values()]
            return max(kinds, key=lambda kind: sum(size for size, its in zip(sizes, kinds, strict=True) if its == kind))
        budgets = device.budgets if isinstance(device, Placement) else device
        return devices.resolve_dtype(dtype, next(iter(budgets), "cpu") if isinstance(budgets, Mapping) else device)

    def _interleaved_heads(self, name: str) -> int | None:
        """The number of heads whose rows lie interleaved in this file, or None where no row has to move."""
        gguf_llama = self.dialect == "gguf" and self.metadata["general.architecture"] == "llama"
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}
        return heads.get(name.split(".")[-2]) if gguf_llama or self.dialect == "meta" else None

    def _check_memory(self, dtype: torch.dtype, places: Mapping[str, torch.device]) -> None:
        for device in set(places.values()):
            here = [stored for name, stored in self.tensors.items() if places[name] == device]
            count = sum(math.prod(stored.shape) for stored in here if not _stays_mapped(stored, dtype, device))
            needed, free = estimate_bytes(count, dtype), devices.available_memory(device)
            if needed > free:
                raise OutOfMemory(
                    f"The weights need {format_bytes(needed)} on {device} in {dtype}, but {format_bytes(free)} are "
                    "free; choose a smaller dtype, or budgets for several devices."
                )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads what a checkpoint holds and checks it against its config.

    path: a .gguf; a .safetensors, .bin or .pt with its config.json beside it; or a folder with one of these, with
    shards and an index, or with Meta's params.json and consolidated.NN.pth.
    Raises CheckpointError where nothing is found, something is damaged or not supported, or the model has holes.
    """
    return assemble(checkpoint_files.read_checkpoint(path), Path(path))


def assemble(raw: checkpoint_files.RawCheckpoint, path: Path, config: ModelConfig | None = None) -> Checkpoint:
    """The same for files that were read already; config: None reads it out of raw's metadata."""
    tensors = _renamed(raw.tensors)
    config, notes = _settle_head(config or _read_config(raw, tensors), tensors)
    if config.num_layers > len(tensors):
        raise CheckpointError(f"The config has {config.num_layers} layers, but there are {len(tensors)} tensors.", path)
    report = check_keys({name: stored.shape for name, stored in tensors.items()}, config)
    report = replace(report, notes=notes)
    if not report.ok:
        raise CheckpointError(f"The checkpoint does not fit its config.\n{report}", path)
    wanted = [name for name in expected_shapes(config) if not (report.tied and name == "lm_head.weight")]
    for name in wanted:
        if tensors[name].dtype not in _FLOATS:
            _decoder(tensors[name])
    return Checkpoint(config, {name: tensors[name] for name in wanted}, report, raw.dialect, raw.metadata, path)


def _renamed(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    renamed: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        canonical = canonical_name(name)
        if canonical in renamed:
            twin = renamed[canonical].name
            raise CheckpointError(f"It and {twin!r} would both be {canonical!r}; only one may be.", stored.file, name)
        if canonical is not None:
            renamed[canonical] = stored
    return renamed


def _read_config(raw: checkpoint_files.RawCheckpoint, tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    """The config, completed by the tensors where the file's own words leave it open (biases, a tied head)."""
    if raw.dialect == "huggingface":
        config = ModelConfig.from_hf(raw.metadata, raw.file)
        with _blaming(raw.file.with_name("generation_config.json")):
            ends = [*config.eos_token_ids, *end_tokens(raw.generation, "eos_token_id")]
            return replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))
    if raw.dialect == "meta":
        embedding = tensors.get("embed_tokens.weight")
        config = ModelConfig.from_meta(raw.metadata, raw.file, embedding.shape[0] if embedding else None)
    else:
        config = ModelConfig.from_gguf(raw.metadata, raw.file)
        config = replace(config, tie_word_embeddings="lm_head.weight" not in tensors)
    config = replace(
        config,
        attention_bias=config.attention_bias or "layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
    )
    factors = raw.tensors.get("rope_freqs.weight") if raw.dialect == "gguf" else None
    if factors is None:
        return config
    with _blaming(factors.file, factors.name):
        return replace(config, rope_scaling=_stored_factors(factors, config))


@contextmanager
def _blaming(file: Path, tensor: str | None = None) -> Iterator[None]:
    """Adds the place to errors that do not know theirs."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(error.reason, file, tensor) from error


def _stored_factors(stored: StoredTensor, config: ModelConfig) -> RopeScaling:
    """The divisors that a GGUF file keeps for the rotary frequencies; a linear scaling multiplies them."""
    if stored.dtype != "F32" or stored.shape != (config.head_dim // 2,):
        found, wanted = f"{stored.dtype} {list(stored.shape)}", f"F32 [{config.head_dim // 2}]"
        raise CheckpointError(f"It is {found}; expected {wanted}.")
    linear = config.rope_scaling
    if linear is not None and linear.kind != "linear":
        raise CheckpointError(f"It cannot be combined with {linear.kind} rope scaling.")
    factor = linear.factor if linear else 1.0
    return RopeScaling("factors", factor, config.context_length, factors=tuple((stored.read() * factor).tolist()))


def _settle_head(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> tuple[ModelConfig, tuple[str, ...]]:
    """Decides between a tied head and one of its own, where the config says tied and the file holds one as well."""
    embedding, head = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    if not (config.tie_word_embeddings and embedding and head):
        return config, ()
    if embedding.shape == head.shape and all(map(_equal, decoded_chunks(embedding), decoded_chunks(head))):
        return config, ("The file repeats the embedding as lm_head.weight; it is loaded once.",)
    return replace(config, tie_word_embeddings=False), (
        "The config says that the head is tied to the embedding, but the file's lm_head.weight differs: it is used.",
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.double(), other.double())
