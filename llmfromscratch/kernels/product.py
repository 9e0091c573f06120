"""The product that `decode_layer` is compiled around, which stands higher up in the package, or is a learner's.

Compiled code cannot look up at each call what a function is by now. So whoever wants the layers (`compiled_layers`)
chooses the product first, and loads `decode_layer` afterwards, again when the choice changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

rows: Callable[..., Any] | None = None  # as optimization.multiply_rows
keep = False  # whether compiled code with it inside may be kept on disk


def choose(multiply_rows: Callable[..., Any], kept: bool) -> None:
    """Sets both."""
    global rows, keep
    rows, keep = multiply_rows, kept


def edition() -> int:
    """A number made of all sources that are compiled into `decode_layer`."""
    files = {*Path(__file__).parent.glob("*words.py"), Path(__file__).with_name("paged_decode.py")}
    if rows is not None:
        files.add(Path(rows.__code__.co_filename))
    text = b"".join(file.read_bytes() for file in sorted(files) if file.is_file())
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
