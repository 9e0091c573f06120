"""A whole network in few bits: which kind each of its parts gets, and the exchange of the parts, layer after layer.

    native            a GGUF's own blocks, as they lie in the file (`native_weights`)
    int8              a scale a row                    int4, nf4    a grid for each 32 columns
    w8a8              int8, and inputs in int8 too     gptq, awq, awq+gptq    int4, calibrated on a text (`calibrated`)

The embedding and the head are int8 beside all of them, one weight for both where they are tied. Parts have the names of
`loading.py` ("layers.3.mlp.down_proj"), whoever wrote the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import loading, model, quantization, quantized_files
from llmfromscratch.calibration import PRODUCTS
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.packed_weight import BLOCKS, PackedWeight
from llmfromscratch.placement import format_bytes
from llmfromscratch.progress import progress_bar
from llmfromscratch.quantized_linear import KERNELS, QuantizedEmbedding, QuantizedLinear, W8A8Linear, is_packed

METHODS = ("round", "gptq", "awq", "awq+gptq")
KINDS = ("native", "int8", "int4", "nf4", "w8a8", *METHODS[1:])
PART_KINDS = ("keep", "int8", "int4", "int3", "nf4", "w8a8")  # of a part; "keep": as it is, in float
GROUPS = (32, 64, 128)
_BITS = {3: "int3", 4: "int4", 8: "int8", 16: "keep"}
_AT_ONCE = 2**21  # numbers that are rounded at a time


# ---- what is asked for -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which part becomes what: kinds are of PART_KINDS.

    products: the seven products of every layer. embed_tokens, lm_head: these; a head of None is as the embedding, with
    which a tied one shares its weight. parts: exceptions by name; of "layers.3.mlp.down_proj", "layers.3" and
    "mlp.down_proj" the first that is there counts. method: of METHODS; all but "round" make int4 of every product.
    group: columns that share a grid, for int4 and int3. text: to calibrate on; None is the one of `calibration`.
    Raises RequestError for what is not one of these.
    """

    products: str = "int4"
    embed_tokens: str = "int8"
    lm_head: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    method: str = "round"
    group: int = 32
    text: str | None = None

    def __post_init__(self) -> None:
        for name, kind in {"products": self.products, **self.parts}.items():
            _check_kind(name, kind, PART_KINDS)
        _check_kind("embed_tokens", self.embed_tokens, PART_KINDS[:-1])
        _check_kind("lm_head", self.lm_head, (*PART_KINDS, None))
        _check_kind("method", self.method, METHODS)
        if self.group not in GROUPS:
            raise RequestError(f"group is {self.group!r}; expected one of {', '.join(map(str, GROUPS))}.")
        if self.method != "round" and (self.products != "int4" or self.parts):
            raise RequestError(f'method="{self.method}" makes int4 of every product; leave products and parts out.')

    @classmethod
    def of(cls, kind: str | Plan) -> Plan:
        """The plan behind one of KINDS but "native", which needs none; a Plan is itself."""
        if isinstance(kind, Plan):
            return kind
        _check_kind("quantization", kind, KINDS[1:])
        return cls(method=kind) if kind in METHODS else cls(kind)

    @classmethod
    def within(cls, budget: float, damage: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int]) -> Plan:
        """The plan that `quantization.choose_bits` finds for a budget in bytes, its steps being of 3, 4, 8 or 16 bits.

        damage: part -> bits -> what these cost, as `sensitivity` measures it; sizes: part -> its weights. They count as
        they are packed: 4 bits are 5 with their grids. Norms, biases and the scales of int8's rows, less than a
        hundredth together, come on top. Raises RequestError where the fewest bits do not fit.
        """
        unknown = sorted({bits for each in damage.values() for bits in each} - set(_BITS))
        if unknown or damage.keys() != sizes.keys():
            raise RequestError(f"damage is of other parts than sizes, or of {unknown} bits; give 3, 4, 8 or 16 bits.")
        costs: Any = [{_taken(bits): each[bits] for bits in sorted(each)} for each in damage.values()]
        kinds = {_taken(bits): kind for bits, kind in _BITS.items()}
        try:
            chosen = quantization.choose_bits(costs, list(sizes.values()), 8 * budget)
        except ValueError as error:
            least = sum(min(each) * size for each, size in zip(costs, sizes.values(), strict=True)) / 8
            raise RequestError(
                f"the parts take {format_bytes(least)} at their fewest bits, and the budget is {format_bytes(budget)}; "
                "give more, or measure fewer bits too."
            ) from error
        parts = {name: kinds[bits] for name, bits in zip(damage, chosen, strict=True)}
        embed_tokens, lm_head = parts.pop("embed_tokens", cls.embed_tokens), parts.pop("lm_head", None)
        return cls(parts=parts, embed_tokens=embed_tokens, lm_head=lm_head)

    def kind_of(self, layer: int, product: str) -> str:
        """What becomes of a product of a layer."""
        names = (f"layers.{layer}.{product}", f"layers.{layer}", product)
        return next((self.parts[name] for name in names if name in self.parts), self.products)


def _taken(bits: int) -> float:
    """Bits that a weight takes, packed."""
    columns, nbytes = BLOCKS.get(_BITS[bits], (1, bits // 8))
    return 8 * nbytes / columns


def _check_kind(name: str, kind: Any, kinds: tuple[Any, ...]) -> None:
    if kind not in kinds:
        known = ", ".join(str(each) for each in kinds)
        raise RequestError(f"{name} is {kind!r}; expected one of {known}.")


def check(quantization: Any, device: Any, compile: bool) -> None:
    """Raises RequestError for an argument of `LLM` that cannot be meant, before anything is loaded."""
    if quantization is None or isinstance(quantization, Plan):
        pass
    elif not isinstance(quantization, str) or quantization not in KINDS:
        raise RequestError(f"quantization is {quantization!r}; expected a Plan, None, or one of {', '.join(KINDS)}.")
    elif quantization == "native" and isinstance(device, Mapping):
        raise RequestError('quantization="native" puts the blocks of a file on one device; name that one.')
    if quantization is not None and compile:
        raise RequestError("compile=True makes graphs of float weights, and these are quantized; leave one out.")


# ---- loading -----------------------------------------------------------------------------------------------------


def load(
    network: model.Model,
    checkpoint: loading.Checkpoint | quantized_files.QuantizedCheckpoint,
    dtype: str | torch.dtype,
    device: Any,
    kind: str | Plan | None,
    tokenizer: Any = None,
) -> None:
    """Gives a network made on the meta device its weights, and quantizes them. Arguments as of `LLM`; tokenizer: of the
    calibration text. Raises as `Checkpoint.load` and `quantize` do."""
    from llmfromscratch import native_weights  # which needs what is here

    if isinstance(checkpoint, quantized_files.QuantizedCheckpoint):
        quantized_files.refuse(checkpoint, kind)
        quantized_files.fill(network, checkpoint, dtype, device)
        return
    if kind == "native":
        native_weights.load(network, checkpoint, dtype, device)
        return
    network.load_state_dict(checkpoint.load(dtype, device), assign=True)
    if kind is not None:
        plan = Plan.of(kind)
        quantize(network, plan, None if plan.method == "round" else _windows(network, tokenizer, plan))


def _windows(network: model.Model, tokenizer: Any, plan: Plan) -> Tensor:
    from llmfromscratch import calibration

    if tokenizer is None:
        raise RequestError(
            f'"{plan.method}" reads a text, and the checkpoint brings no tokenizer; put its files beside it, or take '
            "int4, which reads none."
        )
    return calibration.windows(tokenizer, plan.text, length=min(calibration.LENGTH, network.config.context_length))


# ---- exchanging --------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def quantize(network: model.Model, plan: str | Plan, calibration: Tensor | None = None) -> None:
    """Exchanges the parts of a float network for quantized ones, in place, one layer after the other.

    plan: a Plan, or one of KINDS but "native". calibration: for methods that read a text, its token windows, int64
    [count, length]. Float weights are given up one by one, so that those of one layer alone are there twice.
    Raises RequestError (a network that is quantized already, a width that does not divide into blocks, no or too little
    text), CheckpointError (NaN or infinite weights).
    """
    plan = Plan.of(plan)
    if is_quantized(network):
        raise RequestError("the network is quantized already; load it anew, and quantize that.")
    _check_parts(plan, len(network.layers))
    if plan.method != "round":
        _calibrate(network, plan, calibration)
    else:
        for index, layer in enumerate(progress_bar(network.layers, "Quantizing", delay=1.0, leave=False, unit="layer")):
            for name in PRODUCTS:
                exchange(layer, name, plan.kind_of(index, name), plan.group, f"layers.{index}.{name}")
    _exchange_ends(network, plan)


def _check_parts(plan: Plan, layers: int) -> None:
    """Raises RequestError for exceptions that would be none."""
    of_layers = [f"layers.{index}" for index in range(layers)]
    known = {*PRODUCTS, *of_layers, *(f"{layer}.{name}" for layer in of_layers for name in PRODUCTS)}
    unknown = [name for name in plan.parts if name not in known]
    if unknown:
        raise RequestError(
            f"the plan names {', '.join(unknown)}, and the network has no such part; names are as in "
            '"layers.0.mlp.down_proj", "layers.0" and "mlp.down_proj".'
        )


def _calibrate(network: model.Model, plan: Plan, windows: Tensor | None) -> None:
    from llmfromscratch import calibrated

    if windows is None:
        raise RequestError(f'"{plan.method}" reads a text; give its token windows as calibration.')
    calibrated.quantize(network, plan.method, windows, bits=4, group=plan.group)


def exchange(owner: nn.Module, name: str, kind: str, group: int, called: str) -> None:
    """Puts a quantized product in the place of a Linear of `owner`. called: its name in errors."""
    linear: Any = owner.get_submodule(name)
    if kind != "keep":
        place(owner, name, _linear(kind, _pack(linear.weight, kind, group, called), linear))


def place(owner: nn.Module, name: str, part: nn.Module | nn.Parameter) -> None:
    """Puts a part in the place of the one of that dotted name."""
    above, _, own = name.rpartition(".")
    setattr(owner.get_submodule(above), own, part)


def _linear(kind: str, packed: PackedWeight, linear: Any) -> nn.Module:
    made = W8A8Linear if kind == "w8a8" else QuantizedLinear
    return made(packed, getattr(linear, "bias", None), linear.weight.dtype)


def _exchange_ends(network: model.Model, plan: Plan) -> None:
    """Embedding and head; a tied head shares the embedding's weight."""
    embedding, head = network.embed_tokens, network.lm_head
    of_head = plan.lm_head or plan.embed_tokens
    tied = network.config.tie_word_embeddings
    if tied and of_head != plan.embed_tokens and (plan.embed_tokens, of_head) != ("int8", "w8a8"):
        raise RequestError(
            f"the head is tied to the embedding, so both are of one kind; the plan has {plan.embed_tokens} for the "
            f"embedding and {of_head} for the head. Leave lm_head out."
        )
    packed = None
    if plan.embed_tokens != "keep":
        packed = _pack(embedding.weight, plan.embed_tokens, plan.group, "embed_tokens")
        network.embed_tokens = QuantizedEmbedding(packed, embedding.weight.dtype)  # type: ignore[assignment]
    if of_head != "keep":
        if not tied or packed is None:
            packed = _pack(head.weight, of_head, plan.group, "lm_head")
        network.lm_head = _linear(of_head, packed, head)  # type: ignore[assignment]


def _pack(weight: Tensor, kind: str, group: int, name: str) -> PackedWeight:
    """A float matrix [rows, width], rounded and packed, some rows after the others. Raises CheckpointError,
    RequestError, with the name."""
    step = max(1, _AT_ONCE // weight.shape[1])
    round_ = _ROUNDED[kind]
    try:
        return PackedWeight.cat(
            [round_(finite(rows.detach(), f"{name}.weight").float(), group) for rows in weight.split(step)]
        )
    except RequestError as error:
        raise RequestError(f"{name} cannot be {kind}: {error} Name another kind for it in a Plan's parts.") from error


def finite(weight: Tensor, name: str) -> Tensor:
    """The weight itself. Raises CheckpointError where some of it is NaN or infinite; name: of the tensor."""
    if not weight.isfinite().all():
        raise CheckpointError(
            "it holds NaN or infinity, which no grid can hold; fetch the file again, or load it without quantization.",
            tensor=name,
        )
    return weight


def _rounded(bits: int, weight: Tensor, group: int) -> PackedWeight:
    symmetric = bits == 8
    rounded = quantization.quantize(weight, bits, None if symmetric else group, symmetric)
    return PackedWeight.of(rounded, compact=True)


_ROUNDED: dict[str, Callable[[Tensor, int], PackedWeight]] = {
    "int8": partial(_rounded, 8),
    "w8a8": partial(_rounded, 8),
    "int4": partial(_rounded, 4),
    "int3": partial(_rounded, 3),
    "nf4": lambda weight, group: PackedWeight.nf4(weight),
}


# ---- what a network is -------------------------------------------------------------------------------------------


def is_quantized(network: nn.Module) -> bool:
    """Whether a part of it is packed."""
    return any(map(is_packed, network.modules()))


def pin(network: nn.Module, kernel: str) -> None:
    """Lets all packed products of a network be computed by one of `quantized_linear.KERNELS`. Raises RequestError."""
    _check_kind("kernel", kernel, KERNELS)
    for part in network.modules():
        if isinstance(part, QuantizedLinear):
            part.kernel = kernel


def nbytes(network: nn.Module) -> int:
    """Bytes of all weights; memory that several share counts once."""
    covered, total = 0, 0
    for start, end in sorted(_spans(network)):
        total += max(0, end - max(start, covered))
        covered = max(covered, end)
    return total


def _spans(network: nn.Module) -> Iterator[tuple[int, int]]:
    for part in network.modules():
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            yield tensor.data_ptr(), tensor.data_ptr() + math.prod(tensor.shape) * tensor.element_size()
