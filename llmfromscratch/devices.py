"""Where to compute and in which number format: the choices behind "auto", with their reasons.

The doctor prints the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from llmfromscratch.errors import RequestError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else Apple's MPS, else the CPU.

    Raises RequestError for a device that is unknown or not in this machine.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RequestError(f"device is {device!r}; expected auto, cpu, cuda, cuda:N or mps.") from error
    if found.type not in ("cpu", "cuda", "mps"):
        raise RequestError(f"device is {device!r}; expected auto, cpu, cuda, cuda:N or mps.")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError("device is 'mps', but torch finds no Apple GPU here; use cpu.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RequestError(f"device is {str(found)!r}, but torch finds {count} CUDA devices here; use cpu or another.")
    return found


def resolve_dtype(dtype: str | torch.dtype = "auto", device: str | torch.device = "auto") -> torch.dtype:
    """The torch dtype of that name for weights on that device; "auto" is what `fast_dtype` finds.

    Raises RequestError for anything but auto, float32, bfloat16, float16 and float64.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return fast_dtype(device)[0]
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise RequestError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)} or one of these torch dtypes.")
    return found


def fast_dtype(device: str | torch.device = "auto") -> tuple[torch.dtype, str]:
    """bfloat16 where the processor multiplies it at full speed, else float32; and the reason as one sentence."""
    kind = resolve_device(device).type
    if kind == "mps":
        return torch.bfloat16, "Apple's GPU computes in bfloat16."
    if kind == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "This GPU computes in bfloat16."
        return torch.float32, "This GPU has no bfloat16 arithmetic."
    found = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if _cpu_capabilities().get(name)]
    if found:
        return torch.bfloat16, f"This processor multiplies bfloat16 itself ({', '.join(found)})."
    return torch.float32, "This processor has no bfloat16 instructions: float32 is faster than emulating them."


def available_memory(device: str | torch.device = "auto") -> int:
    """Bytes that can still be allocated on the device. On the CPU: free memory, at most what the container may use."""
    found = resolve_device(device)
    if found.type == "cuda":
        return torch.cuda.mem_get_info(found)[0]
    if found.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    free = psutil.virtual_memory().available
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))  # of a container on Linux; "max" where there is none
    if limit is None:
        return free
    return max(0, min(free, limit - psutil.Process().memory_info().rss))


def _cpu_capabilities() -> Mapping[str, Any]:
    """Instruction sets by name, as torch or (for an older torch) Linux names them."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return {}  # not Linux, and nobody else to ask: float32 is right everywhere
    return dict.fromkeys(words, True)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
