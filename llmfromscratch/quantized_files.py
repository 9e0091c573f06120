"""Quantized checkpoints: opened, made into a network, saved.

    LLM(..., quantization="int4") ─▶ save ─▶ folder ─▶ open_checkpoint ─▶ fill ─▶ LLM(folder), with the same tokens

Read are AutoGPTQ's and GPTQModel's checkpoints, AutoAWQ's, bitsandbytes', and our own (`quantized_parts`).
Saved is what runs, bit by bit: the packed bytes, the remaining weights in their dtype, and the tokenizer's files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llmfromscratch import checkpoint_files, devices, hub, loading
from llmfromscratch.config import ModelConfig, RopeScaling
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.progress import progress_bar
from llmfromscratch.quantized_layouts import Part
from llmfromscratch.quantized_linear import QuantizedEmbedding, QuantizedLinear, W8A8Linear
from llmfromscratch.quantized_parts import OURS, VERSION, StoredPart, gather, read_settings
from llmfromscratch.text.tokenizer_data import TokenizerData
from llmfromscratch.text.tokenizer_files import GGUF_COPY

_log = logging.getLogger(__name__)
# where programs before `quantization_config` was a field of config.json put the same settings
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_TOKENIZER_FILES = [pattern for pattern in hub.HUB_FILES if pattern != "config.json"] + [GGUF_COPY]


# ---- opening -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """As a `loading.Checkpoint`, of a model whose matrices are quantized in the file.

    numbers: all tensors under their canonical names; those of quantized matrices are made when they are read. parts:
    canonical module name ("layers.0.self_attn.q_proj") -> the same, packed. method: one of `quantized_parts.METHODS`.
    """

    numbers: loading.Checkpoint
    parts: Mapping[str, StoredPart]
    method: str

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self.numbers.config

    @property
    def dialect(self) -> str:
        """ "huggingface": whose names and config these files have."""
        return self.numbers.dialect

    def tokenizer_data(self) -> TokenizerData | None:
        """What came with the weights about a tokenizer, or None."""
        return self.numbers.tokenizer_data()

    def load(self, dtype: Any = "auto", device: Any = "auto") -> dict[str, Tensor]:
        """As of a Checkpoint: every matrix as numbers."""
        return self.numbers.load(dtype, device)


def open_checkpoint(path: str | Path) -> loading.Checkpoint | QuantizedCheckpoint:
    """As `loading.open_checkpoint`, for checkpoints that say themselves how they are quantized as well.

    Raises CheckpointError where the way is not known here, by name, and where tensors are missing or do not fit.
    """
    path = Path(path)
    said, config_file = _said_about_quantization(path)
    raw = None if said is None else checkpoint_files.read_checkpoint(path)
    if raw is None or raw.dialect != "huggingface":
        return loading.open_checkpoint(path)
    settings = read_settings(said, config_file)
    found = gather(raw.tensors, settings)
    packed = {stored.name for part in found.values() for stored in part.tensors.values()}
    tensors = {name: stored for name, stored in raw.tensors.items() if name not in packed}
    for stored in map(StoredPart.stand_in, found.values()):
        if stored.name in tensors:
            raise CheckpointError("It is there both quantized and not; only one may be.", stored.file, stored.name)
        tensors[stored.name] = stored
    metadata = {key: value for key, value in raw.metadata.items() if key != "quantization_config"}
    config = _our_config(said, metadata, config_file) if settings.method == OURS else None
    numbers = loading.assemble(replace(raw, tensors=tensors, metadata=metadata), path, config)
    parts = {_module(base): part for base, part in found.items()}
    parts = {
        name: part for name, part in parts.items() if f"{name}.weight" in numbers.tensors
    }  # a repeated head is not
    return QuantizedCheckpoint(numbers, parts, settings.method)


def _module(base: str) -> str:
    """The canonical name of the module that a file calls `base`."""
    return str(loading.canonical_name(f"{base}.weight")).removesuffix(".weight")


def _said_about_quantization(path: Path) -> tuple[Any, Path]:
    """The quantization_config of the checkpoint at path and the file that has it; None where there is none."""
    config = path / "config.json" if path.is_dir() else path.with_name("config.json")
    if path.suffix == ".gguf" or not config.is_file():
        return None, config
    said = checkpoint_files.read_json(config).get("quantization_config")
    for name, method in _BESIDE.items():
        if said is None and config.with_name(name).is_file():
            config = config.with_name(name)
            said = {"quant_method": method, **checkpoint_files.read_json(config)}
    return said, config


def _our_config(said: Mapping[str, Any], metadata: Mapping[str, Any], file: Path) -> ModelConfig:
    """The model's config: that of the fields, and what Hugging Face has no fields for."""
    config = ModelConfig.from_hf(metadata, file)
    more = said.get("config", {})
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    try:
        if not isinstance(more, Mapping) or not more.keys() <= names:
            raise TypeError("it holds fields of no config")
        rope = more.get("rope_scaling", dataclasses.asdict(config)["rope_scaling"])
        for name in more:
            if isinstance(getattr(config, name), bool) and not isinstance(more[name], bool):
                raise TypeError(f"{name} is {more[name]!r}, neither true nor false")
        lists = {name: tuple(value) for name, value in more.items() if isinstance(value, list)}
        scaling = None if rope is None else RopeScaling(**{**rope, "factors": tuple(rope["factors"])})
        numbers = [] if scaling is None else [scaling.factor, *scaling.factors]
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ValueError("rope_scaling holds numbers that are not above 0")
        return replace(config, **{**more, **lists, "rope_scaling": scaling})
    except CheckpointError as error:
        raise CheckpointError(error.reason, file) from error
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"quantization_config.config cannot be used: {error}.", file) from error


# ---- a network ---------------------------------------------------------------------------------------------------


def fill(
    network: nn.Module,
    checkpoint: QuantizedCheckpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | Mapping[str, float] = "auto",
) -> None:
    """Gives a network made on the meta device the weights of a checkpoint, its matrices packed as they are.

    dtype: of the other weights, and computed in. device: as for `Checkpoint.load`. One sentence in the log names parts
    that no kind of `packed_weight` can hold: they are numbers in dtype. Raises what `Checkpoint.load` does.
    """
    numbers, parts = checkpoint.numbers, checkpoint.parts
    tied, packed = numbers.report.tied, [f"{name}.weight" for name in parts]
    tensors = {name: stored for name, stored in numbers.tensors.items() if name not in packed}
    report = replace(numbers.report, tied=tied and "embed_tokens" not in parts)
    weights = replace(numbers, tensors=tensors, report=report).load(dtype, device)
    kind = weights["norm.weight"].dtype
    notes: dict[str, list[str]] = {}
    for name, stored in progress_bar(parts.items(), "Loading", delay=1.0, leave=False, unit="part"):
        part, place = stored.read(), _place(checkpoint.config, kind, device, name)
        names = [name, "lm_head"] if tied and name == "embed_tokens" else [name]
        if isinstance(part.weight, Tensor):
            weights |= dict.fromkeys([f"{each}.weight" for each in names], part.weight.to(place, kind))
            notes.setdefault(part.note, []).append(name)
            continue
        module = _module_of(part.to(place), stored.kind, weights.pop(f"{name}.bias", None), kind, name)
        network.set_submodule(name, module)
        if len(names) > 1:
            network.set_submodule("lm_head", QuantizedLinear(module.packed(), dtype=kind))
    network.load_state_dict(weights, strict=False, assign=True)  # the packed parts have theirs
    for note, names in notes.items():
        _log.warning("%d quantized matrices run as %s numbers (%s, ...): %s.", len(names), kind, names[0], note)


def refuse(checkpoint: QuantizedCheckpoint, kind: Any) -> None:
    """Raises RequestError where a quantized checkpoint shall be quantized in another way."""
    if kind is not None:
        raise RequestError(
            f"the checkpoint is quantized already ({checkpoint.method}), and runs as it is; leave quantization out, or "
            "take the unquantized checkpoint."
        )


def _place(config: ModelConfig, dtype: torch.dtype, device: Any, name: str) -> torch.device:
    if isinstance(device, Mapping):
        return devices.resolve_device(loading.place_layers(config, dtype, device).device_of(name))
    return devices.resolve_device(device)


def _module_of(part: Part, said: str, bias: Tensor | None, dtype: torch.dtype, name: str) -> Any:
    weight: Any = part.weight
    if name == "embed_tokens":
        if part.order is not None:
            raise CheckpointError("An embedding has no order of columns.", tensor=f"{name}.order")
        return QuantizedEmbedding(weight, dtype)
    if said == "w8a8":
        return W8A8Linear(weight, bias, dtype)
    return QuantizedLinear(weight, bias, dtype, part.order)


# ---- saving ------------------------------------------------------------------------------------------------------


def save(network: Any, folder: str | Path, source: str | Path) -> Path:
    """Writes a quantized network (or an LLM with one) into a new folder that `LLM(folder)` loads. Returns the folder.

    source: the checkpoint that it came from (a name, a path, a hub id), whose tokenizer is taken along. The folder
    appears whole or not at all. Raises RequestError where it is there already, or nothing in the network is quantized.
    """
    folder, network = Path(folder), getattr(network, "model", network)
    check_new(folder)
    tensors, kinds = _tensors_of(network)
    if not kinds:
        raise RequestError("nothing in this network is quantized; quantize it first (LLM(..., quantization=...)).")
    raw = checkpoint_files.read_checkpoint(hub.resolve(source))
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(tensors, private / "model.safetensors", metadata={"format": "pt"})
        _write_json(private / "config.json", _config_fields(network.config, kinds, tensors))
        _copy_tokenizer(raw, private)
        private.chmod(0o777 & ~_umask())
        private.rename(folder)
    except BaseException:
        shutil.rmtree(private, ignore_errors=True)
        raise
    return folder


def check_new(folder: Path) -> None:
    """Raises RequestError where something is there already."""
    if folder.exists() or folder.is_symlink():
        raise RequestError(f"{folder} is there already, and nothing is overwritten; give a new folder.")


def _tensors_of(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What goes into the file, under Hugging Face's names, and the kind of each packed part."""
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, str] = {}
    config: ModelConfig = network.config  # type: ignore[assignment]
    for name in loading.expected_shapes(config):
        base, _, field = name.rpartition(".")
        if config.tie_word_embeddings and base == "lm_head":
            continue
        module: Any = network.get_submodule(base)
        outer = base if base == "lm_head" else f"model.{base}"
        if not hasattr(module, "packed") or field == "bias":
            tensors[f"{outer}.{field}"] = _own(getattr(module, field))
            continue
        packed = module.packed()
        kinds[base] = "w8a8" if isinstance(module, W8A8Linear) else packed.kind
        buffers = {"data": packed.data, "scales": packed.scales, "order": getattr(module, "order", None)}
        tensors |= {f"{outer}.{name}": _own(x) for name, x in buffers.items() if x is not None and len(x)}
    return tensors, kinds


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own: safetensors refuses views of each other's."""
    tensor = tensor.detach().cpu()
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)


def _config_fields(config: ModelConfig, kinds: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """config.json in Hugging Face's words, with our quantization_config."""
    fields: dict[str, Any] = {
        "architectures": [f"{config.model_type.capitalize()}ForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "sliding_window": None,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": str(tensors["model.norm.weight"].dtype).removeprefix("torch."),
    }
    read, ours = (dataclasses.asdict(one) for one in (ModelConfig.from_hf(fields), config))
    more = {name: value for name, value in ours.items() if value != read[name]}
    said = {"quant_method": OURS, "version": VERSION, "parts": dict(kinds)} | ({"config": more} if more else {})
    return {**fields, "quantization_config": said}


def _copy_tokenizer(raw: checkpoint_files.RawCheckpoint, folder: Path) -> None:
    """The files of a tokenizer beside the source; of a GGUF file, what it says of its tokenizer, as JSON."""
    if raw.dialect == "gguf":
        fields = {key: value for key, value in raw.metadata.items() if key.startswith("tokenizer.")}
        if fields:
            _write_json(folder / GGUF_COPY, {key: _plain(value) for key, value in fields.items()})
        return
    for pattern in _TOKENIZER_FILES:
        for file in raw.file.parent.glob(pattern):
            target = folder / file.relative_to(raw.file.parent)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _umask() -> int:
    """The permissions that new files are refused; mkdtemp refuses more."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
