"""A refusal of memory: was one request absurd, or did many small ones add up?"""

from __future__ import annotations

import re
from pathlib import Path

from llmfromscratch.course import limits
from llmfromscratch.course.failures import CheckFailed

_STATUS = Path("/proc/self/status")
_ASKED = re.compile(r"allocate (?P<number>[\d.]+) (?P<unit>[KMGTPEZY]i)?B", re.IGNORECASE)
_UNITS = {unit: 1024**power for power, unit in enumerate(["", "ki", "mi", "gi", "ti", "pi", "ei", "zi", "yi"])}
_OVERFLOW = "storage size calculation overflowed"  # more bytes than a number of 64 bits can count
_OF_TORCH = ("allocate memory", "not enough memory", "out of memory", _OVERFLOW)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a refusal of memory, by Python, numpy or torch."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _OF_TORCH)
    )


def address_space() -> tuple[int, int] | None:
    """Bytes of addresses that the process has, and the most that it ever had; None where the system does not tell."""
    if not _STATUS.exists():
        return None
    found = dict(re.findall(r"^(VmSize|VmPeak):\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"), re.MULTILINE))
    return (1024 * int(found["VmSize"]), 1024 * int(found["VmPeak"])) if len(found) == 2 else None


def failure(error: BaseException, line: str, before: tuple[int, int] | None) -> CheckFailed:
    """What the learner is told; before: the address space at the start of the check."""
    asked = asked_for(error)
    at_once = asked > limits.MEMORY / 2 if asked else _OVERFLOW in str(error).lower() or _grew_little(before)
    much = f"{asked:,} bytes at once" if asked and at_once else "too much memory"
    too_large = "a size that is too large by far: print it"
    growing = "a list that grows in a loop without end"
    return CheckFailed(
        f"at most {limits.MEMORY / 2**30:.0f} GB of memory above what the notebook has",
        line=line,
        verdict=f"stopped because it asked for {much}",
        mistake=f"{too_large}, or {growing}" if at_once is None else too_large if at_once else growing,
    )


def asked_for(error: BaseException) -> int:
    """The bytes of the request that was refused, where the message tells them, else 0."""
    found = _ASKED.search(str(error))
    return int(float(found["number"]) * _UNITS[(found["unit"] or "").lower()]) if found else 0


def _grew_little(before: tuple[int, int] | None) -> bool | None:
    """Whether the process had come nowhere near the limit, so that one request was too much; None: cannot be told."""
    now = address_space()
    if before is None or now is None:
        return None
    start, highest = before
    enough = start + limits.MEMORY // 2
    return None if highest > enough else now[1] < enough
