"""Which part of a model lies on which device, and how full that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """A plan for the weights, made by `loading.place_layers`; print(placement) shows it as a table.

    devices: module ("embed_tokens", "layers.0", ..., "norm", "lm_head") -> device. sizes: module -> bytes (0 for a head
    that is tied to the embedding). budgets: device -> bytes for weights.
    """

    devices: Mapping[str, str]
    sizes: Mapping[str, int]
    budgets: Mapping[str, float]

    def device_of(self, tensor: str) -> str:
        """The device of a tensor, by its canonical name."""
        return self.devices[module_of(tensor)]

    def used(self, device: str) -> int:
        """Bytes of weights on that device."""
        return sum(size for module, size in self.sizes.items() if self.devices[module] == device)

    def __str__(self) -> str:
        lines = [f"{'device':<10} {'weights':>10} {'budget':>10}  modules"]
        for device, budget in self.budgets.items():
            modules = [module for module, place in self.devices.items() if place == device]
            layers = [module for module in modules if module.startswith("layers.")]
            names = [module for module in modules if module not in layers[1:]]
            if len(layers) > 1:
                names[names.index(layers[0])] += f" to {layers[-1].removeprefix('layers.')}"
            used = format_bytes(self.used(device))
            lines.append(f"{device:<10} {used:>10} {format_bytes(budget):>10}  {', '.join(names)}".rstrip())
        return "\n".join(lines)


def module_of(tensor: str) -> str:
    """The part of the model that a tensor belongs to: "layers.3" for "layers.3.mlp.up_proj.weight", else its head."""
    parts = tensor.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def format_bytes(count: float) -> str:
    """A number of bytes for people, in powers of ten: 13.5 GB, 98.4 MB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
