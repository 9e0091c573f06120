"""How packed weights lie in memory, as numbers that compiled code is given: one compilation serves all kinds.

A row of a packed weight is a row of blocks, each with its own scale. All but the K kinds hold 32 columns:

    int8   a code for each column, int8; the scales stand elsewhere, one for each row
    int4   float16 scale, float16 minimum, 16 bytes of codes            minimum + scale * code     (GGUF's Q4_1)
    nf4    float16 scale, 16 bytes of codes                             scale * NF4_LEVELS[code]
    Q4_0   float16 scale, 16 bytes of codes                             scale * (code - 8)
    Q8_0   float16 scale, 32 int8 codes                                 scale * code
    Q4_K   256 columns in eight runs with scales and minimums of 6 bits, see `formats.ggml`
    Q6_K   256 columns in sixteen runs with scales of 8 bits, see `formats.ggml`

16 bytes of codes: byte i holds column i in its lower half and column i + 16 in its upper one (quantization.pack_int4).
"""

from __future__ import annotations

INT8, INT4, NF4, Q4_0, Q8_0, Q4_K, Q6_K = range(7)
NUMBERS = {"int8": INT8, "int4": INT4, "nf4": NF4, "Q4_0": Q4_0, "Q8_0": Q8_0, "Q4_K": Q4_K, "Q6_K": Q6_K}

# kind -> (columns, bytes) of a block
BLOCKS = {
    "int8": (1, 1),
    "int4": (32, 20),
    "nf4": (32, 18),
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}

# The levels of "normal float": quantiles of the normal distribution, scaled so that the outermost are -1 and 1, with a
# 0 among them. Dettmers et al. 2023, "QLoRA", appendix E.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def row_bytes(kind: str, width: int) -> int:
    """Bytes of a row of `width` columns. Raises ValueError for a width that is not whole blocks."""
    columns, size = BLOCKS[kind]
    if width % columns:
        raise ValueError(f"a row of {kind} is made of blocks of {columns} columns, and {width} are not whole blocks.")
    return width // columns * size
