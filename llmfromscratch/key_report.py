"""The report on a checkpoint's tensors against its config, and the guess at what lies behind a misfit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmfromscratch.config import ModelConfig

Shape = tuple[int, ...]
WrongShape = tuple[str, Shape, Shape]
# What a layer of this family may have, whether or not a config asks for it.
_PART_OF_A_LAYER = re.compile(
    r"layers\.(\d+)\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm)"
    r"\.(weight|bias)"
)


@dataclass(frozen=True)
class KeyReport:
    """How the tensors of a file compare with those of the config.

    missing, unexpected: canonical names. wrong_shape: (name, found, expected). tied: the head is the embedding.
    probable_cause: one sentence, or empty. notes: what was noticed and settled. str(report) is the message to show.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shape: tuple[WrongShape, ...] = ()
    tied: bool = False
    probable_cause: str = ""
    notes: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Unexpected tensors that a layer would use (a bias, a further layer): without them the answers are wrong."""
        return tuple(name for name in self.unexpected if _PART_OF_A_LAYER.fullmatch(name))

    @property
    def ok(self) -> bool:
        """Whether the model can run: no holes, no wrong shapes, nothing left out that a layer would use."""
        return not (self.missing or self.wrong_shape or self.left_out)

    def __str__(self) -> str:
        wrong = [f"{name} is {list(found)}, expected {list(wanted)}" for name, found, wanted in self.wrong_shape]
        groups = (("missing", self.missing), ("unexpected", self.unexpected), ("of the wrong shape", wrong))
        lines = [f"{len(items)} {what}: {_some(items)}" for what, items in groups if items] or ["Every tensor fits."]
        lines += [f"Probable cause: {self.probable_cause}"] if self.probable_cause else []
        lines += ["The head is tied to the embedding."] if self.tied else []
        return "\n".join([*lines, *self.notes])


def probable_cause(
    missing: Sequence[str], unexpected: Sequence[str], wrong_shape: Sequence[WrongShape], config: ModelConfig
) -> str:
    """One sentence on what most likely went wrong, or "" where nothing did or nothing comes to mind."""
    if wrong_shape:
        return _about_shapes(wrong_shape, config)
    if missing and unexpected and (prefix := _common_prefix(unexpected)):
        return f"all {len(unexpected)} unexpected names start with {prefix!r}, a prefix that is not known."
    if missing and unexpected and set(unexpected) <= {name[cut:] for name in missing for cut in range(1, 9)}:
        return f"names have lost their first letters ({unexpected[0]!r}): too much was taken off with a prefix."
    if tuple(missing) == ("lm_head.weight",):
        return "the file has no head and tie_word_embeddings is false; if this model's head is its embedding, set it."
    gone = {index for index in map(_layer, missing) if index is not None}
    if len(gone) == config.num_layers and unexpected and "norm.weight" in missing:
        return f"no name is known (the first is {unexpected[0]!r}): another kind of model, or another naming."
    if gone:
        return _about_layers(missing, gone, config.num_layers)
    return _about_left_out([name for name in unexpected if _PART_OF_A_LAYER.fullmatch(name)], config.num_layers)


def _about_shapes(wrong_shape: Sequence[WrongShape], config: ModelConfig) -> str:
    found = {name.removesuffix(".weight").split(".", 2)[-1]: (shape, want) for name, shape, want in wrong_shape}
    parts = found.keys()
    if all(set(shape) == set(want) and shape != want for shape, want in found.values()):
        return "rows and columns are exchanged: the matrices are stored transposed."
    if parts <= {"embed_tokens", "lm_head"} and all(s[1:] == w[1:] for s, w in found.values()):
        rows = next(iter(found.values()))[0][0]
        return f"vocab_size is {config.vocab_size} in the config, but the file has {rows} tokens."
    if parts <= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} and "mlp.gate_proj" in parts:
        rows = found["mlp.gate_proj"][0][0]
        return f"intermediate_size is {config.intermediate_size} in the config, but the file's is {rows}."
    kv = [part for part in parts if part.startswith(("self_attn.k_proj", "self_attn.v_proj"))]
    if kv and len(kv) == len(parts) and (rows := found[kv[0]][0][0]) % config.head_dim == 0:
        return (
            f"num_key_value_heads is {config.num_kv_heads} in the config, but the k and v rows are enough for "
            f"{rows // config.head_dim} heads of {config.head_dim}."
        )
    if "embed_tokens" in parts and len(found["embed_tokens"][0]) == 2:
        return f"hidden_size is {config.hidden_size} in the config, but the file's is {found['embed_tokens'][0][1]}."
    if parts <= {f"self_attn.{letter}_{kind}" for letter in "qkvo" for kind in ("proj", "norm", "proj.bias")}:
        return "num_attention_heads, num_key_value_heads or head_dim in the config are not those of the file."
    return "the config belongs to another model."


def _about_layers(missing: Sequence[str], gone: set[int], num_layers: int) -> str:
    kept = [index for index in range(num_layers) if index not in gone]
    whole = len(missing) >= len(gone) * 9  # a layer has at least nine tensors
    if whole and kept and kept == list(range(kept[0], kept[-1] + 1)):
        return (
            f"the file holds only layers {kept[0]}-{kept[-1]} of {num_layers}: a shard is missing, or the config's "
            "number of layers is wrong."
        )
    if whole:
        return f"whole layers are missing ({len(gone)} of {num_layers}): a shard is missing."
    kinds = {name.split(".", 2)[2] for name in missing if name.startswith("layers.")}
    if all(kind.endswith(".bias") for kind in kinds):
        return f"the config asks for biases ({', '.join(sorted(kinds)[:4])}) that the file does not have."
    return ""


def _about_left_out(names: Sequence[str], num_layers: int) -> str:
    beyond = [index for index in map(_layer, names) if index is not None and index >= num_layers]
    if beyond:
        return f"the file holds layer {max(beyond)}, but the config has {num_layers} layers."
    if names and all(name.endswith(".bias") for name in names):
        return "the file has biases that the config says are absent (attention_bias, mlp_bias)."
    if names:
        return f"the file's layers have parts that the config's model type does not use ({names[0]})."
    return ""


def _common_prefix(names: Sequence[str]) -> str:
    """What all names begin with, up to a dot."""
    parts = [name.split(".")[:-1] for name in names]
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return "".join(f"{column[0]}." for column in columns)


def _layer(name: str) -> int | None:
    match = re.match(r"layers\.([0-9]{1,6})\.", name)
    return int(match[1]) if match else None


def _some(items: Iterable[str], most: int = 4) -> str:
    items = list(items)
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
