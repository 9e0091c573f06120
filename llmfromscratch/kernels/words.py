"""What a kernel for processors wants to say and Python has no word for: read bfloat16, and fetch what comes next.

Here the words have their plain Python meaning, so that a kernel can be run and understood without a compiler. What they
become in compiled code is told to Numba in `numba_words`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = 64  # bytes that memory hands over at a time


def widen(number: Any) -> Any:
    """One stored number as float32; a row is gone through in a loop. Raises TypeError for an array.

    bfloat16, which numpy does not know, comes as uint16: the upper half of a float32.
    """
    if isinstance(number, np.ndarray):
        raise TypeError("widen takes one number, weight[row, i], and this is an array; go through it in a loop")
    if isinstance(number, np.uint16):
        return np.uint32(int(number) << 16).view(np.float32)
    return number


def narrow(number: Any, rows: np.ndarray) -> Any:
    """A float32 as `rows` stores it: as it is, or, where they are uint16, rounded to bfloat16, ties to even."""
    if rows.dtype != np.uint16:
        return np.float32(number)
    if np.isnan(number):
        return np.uint16(0x7FC0)
    bits = int(np.float32(number).view(np.uint32))
    return np.uint16(bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def per_line(rows: np.ndarray) -> int:
    """How many of the numbers in `rows` lie in a line of memory. Compiled code knows it before it runs."""
    return LINE // rows.itemsize


def prefetch(rows: np.ndarray, row: int, column: int) -> None:
    """Asks for the line of memory that holds rows[row, column], and does not wait for it. Nothing, in plain Python."""


def half(rows: np.ndarray, row: int, byte: int) -> Any:
    """The float16 that lies at an even or odd byte of a row of uint8, as float32."""
    return np.float32(rows[row, byte : byte + 2].view(np.float16)[0])
