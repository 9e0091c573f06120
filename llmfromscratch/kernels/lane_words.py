"""Words for sixteen numbers at once, as a processor's vector registers hold them: half a block of a packed weight.

Here they have their plain Python meaning: sixteen numbers are a numpy array of 16, with its +, -, *, &, |, << and >>.
In compiled code (`numba_lane_words`) they are one value that stays in a register, which a loop over numbers cannot
promise where each block has a scale of its own: a compiler adds up every block's sums before it goes on to the next.
"""

from __future__ import annotations

import numpy as np

LANES = 16


def lanes(rows: np.ndarray, row: int, column: int) -> np.ndarray:
    """rows[row, column : column + 16]: float32 as they are, bytes as int32 from 0 to 255."""
    values = rows[row, column : column + LANES]
    return values.astype(np.int32 if rows.dtype == np.uint8 else np.float32)


def signed_lanes(rows: np.ndarray, row: int, column: int) -> np.ndarray:
    """The same for bytes that mean -128 to 127, in two's complement."""
    return rows[row, column : column + LANES].view(np.int8).astype(np.int32)


def half(rows: np.ndarray, row: int, byte: int) -> np.ndarray:
    """Sixteen times the float16 that lies at an even or odd byte of a row of uint8, as float32."""
    return np.full(LANES, rows[row, byte : byte + 2].view(np.float16)[0], np.float32)


def put(rows: np.ndarray, row: int, column: int, values: np.ndarray) -> None:
    """rows[row, column : column + 16] = values, both float32."""
    rows[row, column : column + LANES] = values


def zeros() -> np.ndarray:
    """Sixteen times 0, float32."""
    return np.zeros(LANES, np.float32)


def real(values: np.ndarray) -> np.ndarray:
    """int32 as float32."""
    return values.astype(np.float32)


def look_up(levels: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """levels[code] for codes of which only the lower four bits count. levels: sixteen float32."""
    return levels[codes & 15]


def total(values: np.ndarray) -> np.float32:
    """The sum of sixteen float32."""
    return values.sum(dtype=np.float32)
