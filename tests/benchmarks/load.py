"""From file to ready tensors: time and memory, ours and (on request) transformers' in the same run.

    python tests/benchmarks/load.py [--json] [--transformers] [--runs 5] [FILE.gguf]

Time: opening (the file's table, the config, the checks) and loading in bf16 on the CPU; the median of the runs; imports
are not counted. Memory: the highest resident size of a fresh process above what it had after its imports, as a ratio to
the bytes of the loaded weights; the pages of the mapped file count in it. Without FILE: the packaged model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Named limits: what the project promises on its 2-core machine.
WORKLOAD = "smollm2-135m-instruct, Q4_1 GGUF to bfloat16 on the CPU"
MAX_SECONDS = 1.5
MAX_MEMORY_RATIO = 1.6


def time_ours(file: Path, runs: int) -> dict[str, float]:
    """Median seconds to open the file and to load it in bf16."""
    from llmfromscratch import loading

    opened, loaded = [], []
    for _ in range(runs):
        start = time.perf_counter()
        checkpoint = loading.open_checkpoint(file)
        between = time.perf_counter()
        weights = checkpoint.load("bfloat16", "cpu")
        end = time.perf_counter()
        del weights
        opened.append(between - start)
        loaded.append(end - between)
    total = [one + two for one, two in zip(opened, loaded, strict=True)]
    return {
        "open_seconds": statistics.median(opened),
        "load_seconds": statistics.median(loaded),
        "total_seconds": statistics.median(total),
    }


def time_transformers(file: Path) -> dict[str, float]:
    """Seconds that transformers takes for the same file and dtype; once, since it takes about half a minute."""
    import torch
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    return {"transformers_seconds": time.perf_counter() - start}


def measure_memory(file: Path) -> dict[str, float]:
    """Runs one load in a fresh process and reads how far its resident size rose."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--one-load", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def load_once(file: Path) -> dict[str, float]:
    """One load in this process, which has done nothing else: bytes of the weights, and the rise of the memory peak."""
    import psutil

    from llmfromscratch import loading

    before = psutil.Process().memory_info().rss
    weights = loading.open_checkpoint(file).load("bfloat16", "cpu")
    peak = _peak_memory()
    size = sum(tensor.nbytes for name, tensor in weights.items() if name != "lm_head.weight" or not _tied(weights))
    return {"weight_bytes": size, "peak_bytes": peak - before, "memory_ratio": (peak - before) / size}


def _tied(weights: dict[str, Any]) -> bool:
    return weights["lm_head.weight"] is weights["embed_tokens.weight"]


def _peak_memory() -> int:
    """The highest resident size of this process so far, in bytes."""
    import psutil

    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the process that this one was forked from
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return info.peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file; default: the packaged model")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--transformers", action="store_true", help="time transformers on the same file too")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--one-load", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.file is None:
        from llmfromscratch import hub

        arguments.file = Path(hub.resolve(hub.DEFAULT_MODEL))
    if arguments.one_load:
        print(json.dumps(load_once(arguments.file)))
        return
    figures: dict[str, Any] = {"workload": WORKLOAD if "SmolLM2" in arguments.file.name else arguments.file.name}
    figures |= measure_memory(arguments.file) | time_ours(arguments.file, arguments.runs)
    if arguments.transformers:
        figures |= time_transformers(arguments.file)
    print(json.dumps(figures) if arguments.json else _as_text(figures))


def _as_text(figures: dict[str, Any]) -> str:
    lines = [
        figures["workload"],
        f"  open    {figures['open_seconds']:7.3f} s",
        f"  load    {figures['load_seconds']:7.3f} s",
        f"  total   {figures['total_seconds']:7.3f} s   (promised: {MAX_SECONDS} s)",
        f"  memory  {figures['memory_ratio']:7.2f} x the weights' {figures['weight_bytes'] / 1e6:.0f} MB   "
        f"(promised: {MAX_MEMORY_RATIO})",
    ]
    if "transformers_seconds" in figures:
        theirs = figures["transformers_seconds"]
        ratio = theirs / figures["total_seconds"]
        lines.append(f"  transformers on the same file {theirs:.1f} s: {ratio:.0f} times as long")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
