"""Chapter 1's sketch: a safetensors header read by hand. The engine leaves this to the safetensors library."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def read_safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Reads where every tensor of a safetensors file lies, without reading the tensors.

    The file begins with 8 bytes: the header's length, an unsigned little-endian integer. Then the header itself, UTF-8
    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, and maybe an entry
    "__metadata__", which is no tensor. The offsets count from the first byte after the header.

    Returns name -> (dtype, shape as a tuple, first byte, end byte), both bytes counted from the start of the file.
    Raises ValueError for a file that is shorter than its header says, or shorter than those 8 bytes.
    """
    with Path(path).open("rb") as file:
        size = Path(path).stat().st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path}: {size} bytes are too few for the header")
        header = json.loads(file.read(length).decode("utf-8"))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), begin, end)
    return tensors
