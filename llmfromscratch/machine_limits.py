"""What this machine can do at best: bytes that it reads from memory in a second, and operations that it computes.

No engine is faster than these two numbers allow, so a measured time means something only beside them (`profiling`).
They are measured, not looked up: what counts is what this process gets, with its threads, on the machine as it is now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16)
_BYTES = {"cpu": 256 * 1024**2, "cuda": 2 * 1024**3}  # to be read: far more than any cache holds
_SIDES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}  # of the square matrices: the best of them counts
_SECONDS = 0.6  # for each number
_known: dict[tuple[str, int], Limits] = {}  # device and threads -> what was measured in this process


@dataclass(frozen=True)
class Limits:
    """bandwidth: bytes a second that can be read from memory. peaks: name of a dtype -> operations a second in products
    of matrices (a multiplication and an addition are two). where: the machine in words."""

    bandwidth: float
    peaks: Mapping[str, float]
    where: str = ""

    def peak(self, dtype: str | torch.dtype) -> float:
        """Operations a second in this dtype. Raises ValueError where it was not measured."""
        name = name_of(dtype)
        if name not in self.peaks:
            raise ValueError(
                f"the peak in {name} was not measured, only in {', '.join(self.peaks)}; "
                f"measure it: machine_limits.measure(dtypes=[torch.{name}])."
            )
        return self.peaks[name]

    def ridge(self, dtype: str | torch.dtype) -> float:
        """Operations for each byte at which reading and computing take equally long. Below it, memory decides."""
        return self.peak(dtype) / self.bandwidth

    def __str__(self) -> str:
        peaks = ", ".join(f"{dtype} {_rounded(peak / 1e9)} GFLOP/s" for dtype, peak in self.peaks.items())
        where = f"{self.where}: " if self.where else ""
        return f"{where}memory is read at {_rounded(self.bandwidth / 1e9)} GB/s; products reach {peaks}"


def measure(device: str | torch.device = "cpu", dtypes: Sequence[torch.dtype] = DTYPES, again: bool = False) -> Limits:
    """The limits of a device, in two seconds; once in this process for a number of threads, unless `again` is asked.

    Other programs that run meanwhile lower them. Raises RuntimeError where torch has no such device, or cannot multiply
    in one of the dtypes.
    """
    device = torch.device(device)
    key = str(device), torch.get_num_threads()
    known = None if again else _known.get(key)
    peaks = dict(known.peaks) if known else {}
    for dtype in dtypes:
        if name_of(dtype) not in peaks:
            peaks[name_of(dtype)] = _peak(device, dtype)
    if known is None or peaks != known.peaks:
        _known[key] = Limits(known.bandwidth if known else _bandwidth(device), peaks, _in_words(device))
    return _known[key]


def name_of(dtype: str | torch.dtype) -> str:
    """A dtype's name without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _bandwidth(device: torch.device) -> float:
    """Bytes a second while a sum is taken over an array that no cache can hold: each byte is read once."""
    nbytes = _BYTES.get(device.type, _BYTES["cpu"])
    # filled, not only allocated: pages that nobody has written yet are one and the same page of zeros
    numbers = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    return nbytes / _best(lambda: numbers.sum(), device)


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in the product of two square matrices, of the sizes the best."""
    sides = _SIDES.get(device.type, _SIDES["cpu"])

    def speed(side: int) -> float:
        left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
        return 2 * side**3 / _best(lambda: left @ right, device, len(sides))

    return max(map(speed, sides))


def _best(run: Callable[[], torch.Tensor], device: torch.device, parts: int = 1) -> float:
    """Seconds of the quickest of many runs: what else the machine does can only add to a time."""
    run()
    _wait(device)
    taken, end = list[float](), time.perf_counter() + _SECONDS / parts
    while len(taken) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _wait(device: torch.device) -> None:
    """Until the device has done what it was given: processors outside the CPU work on their own."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads != 1)}"


def _rounded(number: float) -> str:
    """Three digits, which is more than such a measurement repeats."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
