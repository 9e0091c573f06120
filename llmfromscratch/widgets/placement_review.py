"""What a placement plan amounts to, counted again and independently: sizes, what is left, and what is wrong with it.

`placement_planner` draws it. The plan may come from a learner's `place_layers`; nothing in it is taken for granted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llmfromscratch import loading
from llmfromscratch.config import ModelConfig
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.placement import format_bytes, module_of

# Published sizes: the config.json of HuggingFaceTB/SmolLM2-135M-Instruct, and Touvron et al., "Llama 2", with the
# config.json of the 7B and 70B checkpoints.
PRESETS: dict[str, ModelConfig] = {
    "SmolLM2 135M": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tie_word_embeddings=True),
    "Llama 2 7B": ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5),
    "Llama 2 70B": ModelConfig("llama", 32000, 8192, 28672, 80, 64, 8, 128, 4096, 1e-5),
}
Place = Callable[[ModelConfig, str, Mapping[str, float]], Any]
Estimate = Callable[[float, str], float]


@dataclass(frozen=True)
class Review:
    """A plan, checked.

    parameters and sizes (bytes): by module, in the order of computation. budgets: device -> bytes. where: device ->
    its modules, for every device with a budget and any other that the plan names; empty where there is no plan.
    refusal: why there is no plan, or "". problems: sentences about what is wrong with the plan.
    """

    parameters: Mapping[str, int]
    sizes: Mapping[str, float]
    budgets: Mapping[str, float]
    where: Mapping[str, list[str]]
    refusal: str
    problems: list[str]

    @property
    def total(self) -> float:
        """Bytes of all weights."""
        return sum(self.sizes.values())

    @property
    def crossings(self) -> int:
        """How often the computation of one token goes from a device to another one."""
        devices = {module: device for device, modules in self.where.items() for module in modules}
        path = [devices[module] for module in self.sizes if module in devices]
        return sum(one != other for one, other in pairwise(path))

    def used(self, device: str) -> float:
        """Bytes of the modules on the device."""
        return sum(self.sizes[module] for module in self.where[device])

    def left(self, device: str) -> float:
        """Bytes of the device's budget that stay free; below zero where it is exceeded."""
        return self.budgets.get(device, 0) - self.used(device)


def review(
    config: ModelConfig,
    dtype: str,
    budgets: Mapping[str, float],
    place: Place | None = None,
    estimate: Estimate | None = None,
) -> Review:
    """Asks `place` for a plan and counts it again.

    place: like `loading.place_layers`, which it is by default; it may also return a plain mapping module -> device.
    estimate: like `loading.estimate_bytes`. budgets: device -> bytes; a device with 0 bytes is left out of the plan.
    """
    place, estimate = place or loading.place_layers, estimate or loading.estimate_bytes
    parameters = module_parameters(config)
    sizes = {module: estimate(count, dtype) for module, count in parameters.items()}
    for module, size in sizes.items():
        if not isinstance(size, int | float) or not 0 <= size < math.inf:
            raise TypeError(f"The estimate for {module} is {size!r}; expected a number of bytes.")
    if not any(sizes.values()):
        raise ValueError("The estimate is 0 bytes for every part of the model: there is nothing to place.")
    where: dict[str, list[str]] = {device: [] for device in budgets}
    try:
        plan = place(config, dtype, {device: size for device, size in budgets.items() if size})
    except OutOfMemory as error:
        return Review(parameters, sizes, budgets, where, str(error), [])
    devices = getattr(plan, "devices", plan)
    if not isinstance(devices, Mapping):
        raise TypeError(f"A plan says module -> device (a Placement or a mapping); this one is {plan!r:.100}.")
    for module in sizes:
        if module in devices:
            where.setdefault(str(devices[module]), []).append(module)
    checked = Review(parameters, sizes, budgets, where, "", [])
    checked.problems.extend(_problems(checked, devices, getattr(plan, "sizes", {})))
    return checked


def module_parameters(config: ModelConfig) -> dict[str, int]:
    """Module -> its number of parameters, in the order of computation; a tied head has none of its own."""
    counts: dict[str, int] = {}
    for name, shape in loading.expected_shapes(config).items():
        own = 0 if config.tie_word_embeddings and name == "lm_head.weight" else math.prod(shape)
        counts[module_of(name)] = counts.get(module_of(name), 0) + own
    return counts


def in_words(modules: list[str]) -> str:
    """ "embed_tokens", "layers.0", "layers.1", "lm_head" -> "embedding, layers 0 to 1, head"; runs are put together."""
    words: list[str] = []
    first = last = -2  # of the run of layers that the last word stands for
    for module in modules:
        number = layer_number(module)
        if number is None:
            words.append({"embed_tokens": "embedding", "lm_head": "head"}.get(module, module))
            first = last = -2
        elif number == last + 1:
            last = number
            words[-1] = f"layers {first} to {last}"
        else:
            first = last = number
            words.append(f"layer {number}")
    return ", ".join(words) or "nothing"


def layer_number(module: str) -> int | None:
    """3 for "layers.3", None for what is no layer."""
    head, _, number = module.partition(".")
    return int(number) if head == "layers" and number.isdecimal() else None


def _problems(checked: Review, devices: Mapping[str, Any], plan_sizes: Mapping[str, float]) -> list[str]:
    found = []
    missing = [module for module in checked.sizes if module not in devices]
    if missing:
        found.append(f"On no device: {in_words(missing)}.")
    unknown = [str(module) for module in devices if module not in checked.sizes]
    if unknown:
        found.append(f"Not part of the model: {', '.join(unknown[:5])}{' and more' * (len(unknown) > 5)}.")
    for device in checked.where:
        if not checked.budgets.get(device, 0) and checked.where[device]:
            found.append(f"{device} has no memory to give, but gets {in_words(checked.where[device])}.")
        elif checked.left(device) < 0:
            used, budget = format_bytes(checked.used(device)), format_bytes(checked.budgets[device])
            found.append(
                f"{device} is over its budget: {used} in {budget}, {format_bytes(-checked.left(device))} too much."
            )
    wrong = [module for module, size in checked.sizes.items() if plan_sizes and plan_sizes.get(module) != size]
    if wrong:
        counted, planned = checked.sizes[wrong[0]], plan_sizes.get(wrong[0])
        planned_text = "none" if planned is None else f"{planned:,} bytes"
        found.append(f"The plan's sizes are wrong, first {wrong[0]}: {planned_text}, counted {counted:,} bytes.")
    return found
