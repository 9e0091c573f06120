"""What is wrong with this environment, and how to mend it: one small check for each thing that has to be right.

A check never raises: what it cannot find out is itself a finding. What may be missing or broken is imported inside the
check that names it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from llmfromscratch.errors import CheckpointError

ENGINE_VARIABLE = "LLMFROMSCRATCH_ENGINE"
OLDEST_PYTHON = (3, 11)
MEMORY_NEEDED = 1_000_000_000  # bytes: the model in float32 (538 MB), its conversion, caches and torch's own
NEEDED = [
    "numpy",
    "safetensors",
    "regex",
    "jinja2",
    "llguidance",
    "tqdm",
    "filelock",
    "platformdirs",
    "psutil",
    "numba",
]
FOR_THE_COURSE = ["jupyterlab", "ipykernel", "ipywidgets", "matplotlib", "nbformat", "nbclient", "jupytext"]
FOR_THE_COURSE += ["triton"] * (sys.platform == "linux")  # it is there for no other system
REPLACEABLE = [
    "loading", "tokenizer", "kv_cache", "scheduler", "sampling", "optimization", "quantization", "model", "attention",
]  # fmt: skip
SIGNS = {"ok": "✓", "warn": "!", "fail": "✗"}


@dataclass(frozen=True)
class Check:
    """One finding. "warn" works but could be better or will be missed later; "fail" does not work."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    remedy: str = ""


def checks() -> list[Check]:
    """All findings about this machine, from the ground up. Takes a few seconds, most of them to import torch."""
    found = [check_python(), packages := check_packages(), torch := check_torch()]
    if torch.status != "fail":
        found += [check_threads(), check_bf16(), check_accelerator(), check_memory()]
    if packages.status != "fail" and torch.status != "fail":
        found.append(check_kernels())
    if packages.status != "fail":
        found += [check_cache_folder(), check_model()]
    return [*found, check_compiler(), check_engine_variable(), check_course()]


def report(found: list[Check]) -> str:
    """The findings as lines for a terminal, each problem with its remedy below it, and a summary."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{SIGNS[check.status]} {check.name:<{width}}  {check.finding}")
        if check.remedy:
            lines.append(f"  {'':<{width}}  -> {check.remedy}")
    failed = sum(check.status == "fail" for check in found)
    warned = sum(check.status == "warn" for check in found)
    lines.append(f"{len(found)} checks: {failed} failed, {warned} to look at." if failed or warned else "All is well.")
    return "\n".join(lines)


def exit_code(found: list[Check]) -> int:
    """1 when something does not work, else 0: warnings alone do not count."""
    return int(any(check.status == "fail" for check in found))


def check_python() -> Check:
    """Python is new enough, and not a 32-bit build."""
    finding = f"Python {platform.python_version()} in {sys.prefix}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "fail", finding, "Use Python 3.11 or newer, for example: make lab PYTHON=python3.12")
    if sys.maxsize < 2**32:
        return Check("python", "fail", f"{finding}, a 32-bit build", "Install a 64-bit Python; torch has no other.")
    return Check("python", "ok", finding)


def check_packages() -> Check:
    """Everything that the package imports is installed (torch has a check of its own)."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("packages", "ok", f"{len(NEEDED)} needed packages are installed")


def check_torch() -> Check:
    """torch can be imported; which version and build it is."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken install raises anything, and to name it is the purpose
        remedy = "Install it again: pip install --force-reinstall --no-deps torch (see constraints.txt for the version)"
        return Check("torch", "fail", f"cannot be imported: {type(error).__name__}: {error}", remedy)
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda} build"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip} build"
    else:
        build = "CPU build" if sys.platform != "darwin" else "macOS build"
    finding = f"torch {torch.__version__} ({build})"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        return Check("torch", "fail", finding, "Install a newer one: pip install 'torch>=2.6'")
    return Check("torch", "ok", finding)


def check_threads() -> Check:
    """torch computes with as many threads as there are cores for this process."""
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    finding = f"torch computes with {threads} threads; this process may use {cores} cores"
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is not None:
        finding += f" (OMP_NUM_THREADS={asked})"
        if not asked.split(",")[0].strip().isdecimal() or int(asked.split(",")[0]) == 0:
            return Check("threads", "warn", finding, f"OMP_NUM_THREADS is not a number; set it to {cores} or unset it.")
    if threads > cores:
        remedy = f"Threads that wait for each other slow everything down: set OMP_NUM_THREADS={cores}"
        return Check("threads", "warn", finding, remedy)
    # Half is right: torch counts real cores, and the system shows two logical ones for each.
    if threads * 2 < cores:
        remedy = "Unset OMP_NUM_THREADS" if asked else f"Set OMP_NUM_THREADS={cores // 2}"
        return Check("threads", "warn", finding, f"{remedy} to use the rest of the processor.")
    return Check("threads", "ok", finding)


def check_bf16() -> Check:
    """What dtype="auto" means here, why, and whether a short measurement agrees."""
    import torch

    from llmfromscratch import devices

    dtype, reason = devices.fast_dtype("cpu")
    speedup = _bf16_speedup()
    finding = f"dtype='auto' is {str(dtype).removeprefix('torch.')} on the CPU: {reason} "
    finding += f"Measured just now: a bf16 product takes {1 / speedup:.2f} times as long as one in fp32."
    if dtype == torch.bfloat16 and speedup < 0.8:
        remedy = "Pass dtype='float32' (--dtype float32) if this stays so while the machine is quiet."
        return Check("bf16", "warn", finding, remedy)
    return Check("bf16", "ok", finding)


def check_accelerator() -> Check:
    """A GPU that torch can use, or one that it cannot although it is there."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return _with_triton(f"CUDA: {', '.join(names)}")
    if torch.backends.mps.is_available():
        return Check("gpu", "ok", "MPS: Apple's GPU")
    if shutil.which("nvidia-smi") is None:
        return Check("gpu", "ok", "none; everything runs on the CPU")
    if torch.version.cuda is None:
        remedy = "To use it, remove .venv and run: make lab TORCH_BUILD=default"
        return Check("gpu", "warn", "there is an NVIDIA driver, but torch is a build without CUDA", remedy)
    remedy = "Run nvidia-smi: the driver must be loaded and new enough for this build's CUDA."
    return Check("gpu", "warn", f"torch is built for CUDA {torch.version.cuda} but finds no GPU", remedy)


def _with_triton(finding: str) -> Check:
    """A GPU, and whether Triton's kernels can be had on it."""
    from llmfromscratch import attention_triton, devices

    lacking = attention_triton.unavailable("cuda", devices.fast_dtype("cuda")[0])
    if lacking:
        remedy = (
            'PyTorch computes; for layers="triton" install triton in the version of constraints.txt, and a C compiler.'
        )
        return Check("gpu", "warn", f"{finding}; {lacking}", remedy)
    return Check("gpu", "ok", f"{finding}; Triton compiles kernels for it")


def check_kernels() -> Check:
    """Whether layers and decode attention can be compiled here, for what dtype="auto" means; for how many threads."""
    from llmfromscratch import compiled_decode, compiled_layers, devices

    dtype = devices.fast_dtype("cpu")[0]
    lacking = compiled_decode.unavailable(dtype) or compiled_layers.unavailable(dtype)
    if lacking:
        remedy = "Slower, but right; to have it, install numba again in the version of constraints.txt."
        if "your multiply_rows" in lacking:
            remedy = "Slower, but right; to have it, write multiply_rows in plain loops over numbers (exercise 6.5)."
        return Check("kernels", "warn", lacking, remedy)
    threads = compiled_decode.max_threads()
    finding = f"Numba compiles layers and decode attention, for up to {threads} thread{'s' * (threads > 1)}"
    return Check("kernels", "ok", finding)


def check_memory() -> Check:
    """Enough free memory to load the packaged model in float32."""
    from llmfromscratch import devices

    free = devices.available_memory("cpu")
    finding = f"{free / 1e9:.1f} GB free; the packaged model needs about {MEMORY_NEEDED / 1e9:.0f} GB"
    if free < MEMORY_NEEDED:
        return Check("memory", "fail", finding, "Close other programs or notebooks (each kernel holds a model).")
    return Check("memory", "ok", finding)


def check_cache_folder() -> Check:
    """The cache folder can be written, and has room for what is not there yet."""
    from llmfromscratch import hub

    folder = hub.cache_folder()
    existing = next(place for place in [folder, *folder.parents] if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        remedy = f"Set {hub.CACHE_VARIABLE} to a folder that you may write to."
        return Check("cache folder", "fail", f"{folder} cannot be written", remedy)
    model, free = hub.known_models()[hub.DEFAULT_MODEL], shutil.disk_usage(existing).free
    finding = f"{folder}, {free / 1e9:.1f} GB free"
    if not hub.is_cached(model) and free < model.space_needed:
        remedy = f"Make room for {model.space_needed / 1e6:.0f} MB, or set {hub.CACHE_VARIABLE} to another folder."
        return Check("cache folder", "fail", finding, remedy)
    return Check("cache folder", "ok", finding)


def check_model() -> Check:
    """The packaged model is in the cache, whole and unaltered."""
    from llmfromscratch import hub

    model = hub.known_models()[hub.DEFAULT_MODEL]
    if not model.file.is_file() and model.hub_folder.is_dir():
        return Check("model", "ok", f"{model.name} came from the hub and is in {model.hub_folder}")
    if not model.file.is_file():
        remedy = f"It is fetched at first use; now: llmfromscratch models --fetch {model.name}"
        return Check("model", "warn", f"{model.name} has not been fetched yet", remedy)
    try:
        path = hub.verify(model)
    except (CheckpointError, OSError) as error:
        remedy = f"Delete {model.file}, then: llmfromscratch models --fetch {model.name}"
        return Check("model", "fail", str(error), remedy)
    return Check("model", "ok", f"{path.name} is whole ({model.member_bytes / 1e6:.0f} MB, SHA-256 as expected)")


def check_compiler() -> Check:
    """A C++ compiler, for the parts that are compiled on this machine."""
    named = os.environ.get("CXX")
    tried = [named] if named else ["c++", "g++", "clang++", "cl"]
    found = next((path for name in tried if (path := shutil.which(name))), None)
    if found:
        return Check("compiler", "ok", found)
    finding = f"CXX={named} is not on the PATH" if named else "no C++ compiler on the PATH"
    remedy = {
        "darwin": "xcode-select --install",
        "win32": "install the Build Tools for Visual Studio (C++)",
    }.get(sys.platform, "install g++, for example: apt-get install g++")
    return Check("compiler", "warn", f"{finding}; only torch.compile needs one", f"Optional: {remedy}")


def check_engine_variable() -> Check:
    """LLMFROMSCRATCH_ENGINE, when set, names a folder that has at least one module of a learner's."""
    named = os.environ.get(ENGINE_VARIABLE)
    if not named:
        return Check("engine", "ok", "the reference (LLMFROMSCRATCH_ENGINE is not set)")
    remedy = f"Unset {ENGINE_VARIABLE}, or set it to the my_engine folder that build() writes."
    folder = Path(named).expanduser()
    if not folder.is_dir():
        return Check("engine", "fail", f"{ENGINE_VARIABLE}={named} is not a folder", remedy)
    modules = [name for name in REPLACEABLE if (folder / f"{name}.py").is_file()]
    if not modules:
        return Check("engine", "warn", f"{ENGINE_VARIABLE}={named} has no module that can replace ours", remedy)
    return Check("engine", "ok", f"{', '.join(modules)} from {folder}, the rest from the reference")


def check_course() -> Check:
    """The packages that the notebooks need."""
    missing = [name for name in FOR_THE_COURSE if find_spec(name) is None]
    if missing:
        remedy = "For the course: pip install 'llmfromscratch[course]', or in a clone: make lab"
        return Check("course", "warn", f"missing: {', '.join(missing)}", remedy)
    return Check("course", "ok", "JupyterLab and what the chapters need are installed")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's share of processor time on Linux."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores  # no such limit here
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def _bf16_speedup() -> float:
    """Time of a product in fp32 over its time in bf16, for the shape of one feed-forward layer over 128 tokens.

    One thread, both formats in turn: with several, any other busy program makes them wait for each other.
    """
    import torch

    left, right = torch.randn(128, 576), torch.randn(576, 1536)
    low_left, low_right = left.bfloat16(), right.bfloat16()
    in_fp32, in_bf16 = [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(30):
            in_fp32.append(_seconds(lambda: left @ right))
            in_bf16.append(_seconds(lambda: low_left @ low_right))
    finally:
        torch.set_num_threads(threads)
    return min(in_fp32) / min(in_bf16)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
