"""The products that kernels here are compiled around, which stand higher up in the package, or are a learner's.

Compiled code cannot look up at each call what a function is by now. So whoever wants a kernel of AROUND chooses the
products first, and imports it afterwards; those that are loaded are loaded again when the choice changes.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# in the order in which one is compiled into another
AROUND = ("block_products", "packed_calls", "layer_weights", "decode_layer")
PARTS = ("words", "numba_words", "lane_words", "numba_lane_words", "block_kinds", "byte_rows", "paged_decode", *AROUND)

rows: Callable[..., Any] | None = None  # as optimization.multiply_rows
int8_rows: Callable[..., Any] | None = None  # as quantization.multiply_int8_rows
keep = False  # whether compiled code with them inside may be kept on disk
alive: list[Any] = []  # C functions whose addresses somebody may hold, however often a kernel is loaded again


def choose(multiply_rows: Callable[..., Any] | None, multiply_int8_rows: Callable[..., Any] | None) -> None:
    """Sets both, and loads what was compiled around others again.

    Numba takes no notice when another file changes, so only code around the package's own products is kept on disk.
    """
    global rows, int8_rows, keep
    if rows is multiply_rows and int8_rows is multiply_int8_rows:
        return
    rows, int8_rows = multiply_rows, multiply_int8_rows
    keep = is_own(rows) and is_own(int8_rows)
    for name in AROUND:
        module = sys.modules.get(f"{__package__}.{name}")
        if module is not None:
            importlib.reload(module)


def is_own(function: Callable[..., Any] | None) -> bool:
    """Whether a product is the package's, so that code around it alone may be kept on disk."""
    return function is None or Path(function.__code__.co_filename).parent == HERE.parent


def edition() -> int:
    """A number made of all sources that are compiled into a kernel of AROUND."""
    return edition_of(rows, int8_rows)


def edition_of(*products: Callable[..., Any] | None) -> int:
    """The same for a kernel that is compiled around these products, or none."""
    sources = {Path(each.__code__.co_filename) for each in products if each is not None}
    files = {HERE / f"{name}.py" for name in PARTS} | sources
    text = b"".join(file.read_bytes() for file in sorted(files) if file.is_file())
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
