"""Compiles every Triton kernel, just as its function launches it, for GPUs that need not be there.

    python tests/triton_targets.py 90:bfloat16:64

(compute capability, dtype, head_dim) prints, as JSON, a record of each kernel. TRITON_INTERPRET must not be set: then
there is nothing to compile.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmfromscratch.batch import Span
from llmfromscratch.kernels import triton_decode, triton_norm, triton_prefill, triton_rotary

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")
KERNELS = {
    "norm": (triton_norm, "rms_norm_kernel"),
    "rotary": (triton_rotary, "_rotate_and_write"),
    "decode": (triton_decode, "_decode"),
    "prefill": (triton_prefill, "_prefill"),
}
HIDDEN, HEADS, KV_HEADS, BLOCKS, SIZE = 576, 9, 3, 40, 16


class Compiling:
    """Stands in a kernel's place, and compiles it where it would be launched."""

    def __init__(self, kernel: Any, capability: int):
        self.kernel, self.capability = kernel, capability
        self.records: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *arguments: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        fixed = {each.name: given[each.name] for each in self.kernel.params if each.is_constexpr}
        signature = {name: "constexpr" if name in fixed else type_of(given[name]) for name in self.kernel.arg_names}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        code = made.asm["ptx"]
        self.records.append(
            {
                "shared": made.metadata.shared,
                "spilled": spilled(made.asm["cubin"]),
                "tensor_cores": "mma" in code,
                "machine_code": len(made.asm["cubin"]),
            }
        )


def type_of(value: Any) -> str:
    """How Triton calls the type of an argument."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def spilled(binary: bytes) -> int:
    """Bytes a thread keeps in memory because its registers did not suffice."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(binary)
        said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return sum(int(word.removeprefix("STACK:")) for word in said.split() if word.startswith("STACK:"))


def launch_all(dtype: torch.dtype, head_dim: int) -> None:
    """Calls the functions of all kernels, in the shapes of the packaged model but for the head_dim."""
    x, gain = torch.zeros(8, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    triton_norm.add_and_norm(x, x, gain, 1e-5)
    fused = torch.zeros(8, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    stored = torch.zeros(2, KV_HEADS, BLOCKS, SIZE, head_dim, dtype=dtype)
    queries, keys, values = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles, slots = torch.zeros(8, head_dim // 2), torch.arange(8)
    triton_rotary.rotate_and_write(queries, keys, values, angles, angles, stored, slots, BLOCKS * SIZE)
    queries, tables = queries.contiguous(), torch.zeros(8, BLOCKS, dtype=torch.int32)
    lengths, where = torch.full((8,), 600, dtype=torch.int32), (KV_HEADS, SIZE, BLOCKS * SIZE)
    triton_decode.attend_steps(queries, stored, tables, lengths, *where)
    triton_decode.attend_steps(queries, stored, tables, lengths, *where, 2, 512)
    for longest in (8, 500):
        rows = triton_prefill.rows_of(longest, head_dim, dtype.itemsize)
        tiles = torch.tensor(triton_prefill.tiles_of([Span(0, 0, 0, 8)], rows), dtype=torch.int32)
        triton_prefill.attend_tiles(queries, queries, stored, tiles, rows, tables, *where)


def compile_all(capability: int, dtype: torch.dtype, head_dim: int) -> dict[str, list[dict[str, Any]]]:
    """Kernel -> a record for each way in which it is launched."""
    compiling = {name: Compiling(getattr(*place), capability) for name, place in KERNELS.items()}
    for name, (module, kernel) in KERNELS.items():
        setattr(module, kernel, compiling[name])
    try:
        launch_all(dtype, head_dim)
    finally:
        for name, (module, kernel) in KERNELS.items():
            setattr(module, kernel, compiling[name].kernel)
    return {name: each.records for name, each in compiling.items()}


if __name__ == "__main__":
    found = {}
    for target in sys.argv[1:]:
        capability, dtype, head_dim = target.split(":")
        found[target] = compile_all(int(capability), getattr(torch, dtype), int(head_dim))
    print(json.dumps(found))
