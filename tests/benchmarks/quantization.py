"""What each way of quantizing costs: KL to the unquantized model in nats a token, on its twin and on its own weights.

    python tests/benchmarks/quantization.py [--only ENTRY ...] [--windows 8] [--calibration 16] [--seed 0]
                                            [--results FILE] [--list] [MODEL]

The packaged weights lie on a lattice of 4 bits in groups of 32 already, which rounding in groups of 32 finds again. So
methods are told apart on its twin (`sketches.ch07.off_lattice`): the same function, weights off the lattice. All is
computed in float32, as bfloat16 alone costs 0.0012. Texts: two halves of the standard library's help topics, one to
calibrate on, one to evaluate on, in windows of 512 tokens. 128 does not divide the width 576: there the last group of a
row is shorter. Embedding and head stay as they are. "int4 a group of 32" is what `quantization="int4"` packs.

Calibrated entries take a minute or two each; with --results, what has been measured is kept, and a later run goes on
from there. In brackets what a plain trial reached, on other windows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch

from llmfromscratch import (
    LLM,
    calibrated,
    calibration,
    evaluation,
    kv_cache,
    quantization,
    quantized_model,
    rotation,
)
from llmfromscratch.batch import Batch
from llmfromscratch.course.sketches.ch07 import off_lattice

Change = Callable[[Any, torch.Tensor], Any]  # of a network, calibration windows at hand; what it returns is evaluated


def rounding(bits: int, group: int | str | None, symmetric: bool = False) -> Change:
    """Plain rounding of all products of the layers."""
    return lambda network, windows: calibrated.round_off(network, bits, group, symmetric)


def method(name: str, bits: int, group: int) -> Change:
    """A calibrated method, its values put into float weights."""
    return lambda network, windows: calibrated.quantize(network, name, windows, bits, group, simulate=True)


def w8a8(network: Any, windows: torch.Tensor) -> None:
    """Products of integers, really run."""
    quantized_model.quantize(network, quantized_model.Plan("w8a8", embed_tokens="keep"))


def nothing(network: Any, windows: torch.Tensor) -> None:
    """The network as it is."""


def rotated(change: Change) -> Change:
    """The same after the residual stream was turned."""

    def both(network: Any, windows: torch.Tensor) -> None:
        rotation.rotate(network)
        change(network, windows)

    return both


def packed(kind: str) -> Change:
    """As LLM(quantization=kind) has it: really packed, embedding and head in int8."""
    return lambda network, windows: quantized_model.quantize(network, kind, windows)


class RoundedCache(kv_cache.ConcatKVCache):
    """Keys and values with a grid for each token and head, nothing done about channels that lie far out."""

    def __init__(self, num_layers: int, bits: int):
        super().__init__(num_layers)
        self.bits = bits

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> None:
        """Stores what rounding leaves."""
        keys, values = (quantization.quantize(each.flatten(0, 1), self.bits, None).dequantize().view_as(each)
                        for each in (keys, values))  # fmt: skip
        super().write(layer, keys, values, batch)


@dataclass(frozen=True)
class Entry:
    """change: of a copy of the network. target: KL at most, on the twin; None: shown beside others. trial: what a plain
    trial reached. cache: of what the evaluation reads through, instead of an exact one."""

    change: Change
    target: float | None = None
    trial: str = ""
    cache: Any = None


ENTRIES: dict[str, Entry] = {
    "nothing": Entry(nothing, 1e-6, "1e-9"),
    "int8 a row": Entry(rounding(8, None, True), 0.005, "0.003"),
    "int8 a matrix": Entry(rounding(8, calibrated.TENSOR, True), None, "0.056"),
    "w8a8": Entry(w8a8, 0.045, "0.032"),
    "int4 a group of 32": Entry(rounding(4, 32), None, "0.26"),
    "int4 a group of 32, gptq": Entry(method("gptq", 4, 32), 0.16, "0.12"),
    "int4 a group of 32, awq": Entry(method("awq", 4, 32), 0.11, "0.08"),
    "int4 a group of 32, awq+gptq": Entry(method("awq+gptq", 4, 32)),
    "int4 a group of 128": Entry(rounding(4, 128), None, "0.53"),
    "int4 a group of 128, gptq": Entry(method("gptq", 4, 128)),
    "int4 a group of 128, awq": Entry(method("awq", 4, 128), 0.22, "0.17"),
    "int4 a group of 128, awq+gptq": Entry(method("awq+gptq", 4, 128), 0.13, "0.10"),
    "int3 a group of 64": Entry(rounding(3, 64), None, "3.1"),
    "int3 a group of 64, awq+gptq": Entry(method("awq+gptq", 3, 64), 0.52, "0.40"),
    "int4 a group of 128, rotated": Entry(rotated(rounding(4, 128))),
    "int4 a group of 128, rotated, gptq": Entry(rotated(method("gptq", 4, 128))),
    "int3 a group of 64, rotated, gptq": Entry(rotated(method("gptq", 3, 64))),
    "int8 keys and values": Entry(nothing, 0.0015, "0.0009", "int8"),
    "int4 keys and values": Entry(nothing, 0.027, "0.020", "int4"),
    "int4 keys and values, a grid a head": Entry(nothing, None, "0.14 to 0.35", partial(RoundedCache, bits=4)),
    "packed int8": Entry(packed("int8")),
    "packed int4": Entry(packed("int4")),
    "packed nf4": Entry(packed("nf4")),
    "packed awq+gptq": Entry(packed("awq+gptq")),
}


class Bench:
    """The model, its twin, and the texts."""

    def __init__(self, model: str, count: int, calibrating: int, seed: int):
        self.model = model
        self.llm = LLM(model, dtype="float32", device="cpu", layers="plain")
        first, second = calibration.topics()
        self.calibration = calibration.windows(self.llm.tokenizer, first, calibrating)
        self.reference = evaluation.Reference(self.llm.model, calibration.windows(self.llm.tokenizer, second, count))
        self.networks = {"twin": off_lattice(self.llm.model, seed), "packaged": self.llm.model}

    def measure(self, entry: Entry, weights: str) -> dict[str, Any]:
        """An entry's damage and the seconds that its change took."""
        network = deepcopy(self.networks[weights])
        began = time.perf_counter()
        entry.change(network, self.calibration)
        seconds = time.perf_counter() - began
        found = evaluation.damage(self.reference, self.reading(network, entry.cache))
        return {**asdict(found), "ratio": found.ratio, "seconds": seconds}

    def reading(self, network: Any, cache: Any) -> Any:
        """A network, or an engine that reads through a cache of few bits; keys are the same in a twin."""
        if cache is None:
            return network
        kind = cache if isinstance(cache, str) else None
        llm = LLM(self.model, dtype="float32", device="cpu", layers="plain", kv_cache_dtype=kind)
        llm.model.load_state_dict(network.state_dict())
        if kind is None:
            llm.cache = cache(llm.config.num_layers)
        return llm


def line(name: str, entry: Entry, results: dict[str, dict[str, Any]]) -> str:
    """A row of the table."""
    on_twin, packaged = (results.get(f"{weights}: {name}") for weights in ("twin", "packaged"))
    target = f"{entry.target:g}" if entry.target else ""
    if entry.target and on_twin:
        target += " met" if on_twin["kl"] <= entry.target else " MISSED"
    shown = f"{name:36} {target:>13} {f'[{entry.trial}]' if entry.trial else '':>15}"
    for found in (on_twin, packaged):
        if found is None:
            shown += f" {'':>10} {'':>7} {'':>7}"
        else:
            shown += f" {found['kl']:>10.5f} {found['top1']:>7.1%} {found['ratio']:>7.3f}"
    return shown + (f" {on_twin['seconds']:>7.0f}" if on_twin else "")


def head() -> str:
    """The table's first line."""
    columns = "".join(f" {f'{weights} KL':>10} {'top-1':>7} {'ppl x':>7}" for weights in ("twin", "file"))
    return f"{'entry':36} {'target':>13} {'[trial]':>15}{columns} {'seconds':>7}"


def memory(llm: Any) -> str:
    """What int8 weights take beside bfloat16's."""
    wide = evaluation.weight_bytes(llm.model) / 2
    network = deepcopy(llm.model)
    quantized_model.quantize(network, "int8")
    share = evaluation.weight_bytes(network) / wide
    return f"int8 weights take {share:.1%} of bfloat16's bytes (target: 54 % at most)"


def conclusions(results: dict[str, dict[str, Any]]) -> list[str]:
    """What is to be shown by comparing entries."""
    kl = {name.removeprefix("twin: "): found["kl"] for name, found in results.items() if name.startswith("twin: ")}
    said = []
    if {"int8 a row", "int8 a matrix"} <= kl.keys():
        said.append(
            f"int8 with a grid a matrix costs {kl['int8 a matrix'] / kl['int8 a row']:.1f} times (target: over 10)"
        )
    wide = {name: kl[name] for name in kl if name.startswith("int4 a group of 128") and "rotated" not in name}
    if len(wide) == 4:
        said.append(f"the best in groups of 128 is {min(wide, key=lambda name: wide[name])!r} (target: awq+gptq)")
    return said


def run(options: argparse.Namespace) -> None:
    """Measures what was asked for and is not known yet, and prints the table."""
    file = Path(options.results) if options.results else None
    results = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    bench = Bench(options.model, options.windows, options.calibration, options.seed)
    chosen = options.only or list(ENTRIES)
    print(f"{bench.reference.tokens:,} tokens evaluated, {bench.calibration.numel():,} to calibrate on")
    print(head())
    for name in chosen:
        for weights in ("twin", "packaged"):
            if f"{weights}: {name}" not in results and weights in options.weights:
                results[f"{weights}: {name}"] = bench.measure(ENTRIES[name], weights)
                if file:
                    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(line(name, ENTRIES[name], results), flush=True)
    print(*conclusions(results), *([] if options.only else [memory(bench.llm)]), sep="\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", choices=ENTRIES, help="these alone")
    parser.add_argument("--weights", nargs="+", choices=("twin", "packaged"), default=["twin", "packaged"])
    parser.add_argument("--windows", type=int, default=8, help="windows of 512 tokens to evaluate on")
    parser.add_argument("--calibration", type=int, default=16, help="windows of 512 tokens to calibrate on")
    parser.add_argument("--seed", type=int, default=0, help="of the twin's factors")
    parser.add_argument("--results", metavar="FILE", help="JSON that keeps what was measured")
    parser.add_argument("--list", action="store_true", help="names the entries")
    options = parser.parse_args()
    if options.list:
        print("\n".join(ENTRIES))
    else:
        run(options)


if __name__ == "__main__":
    main()
