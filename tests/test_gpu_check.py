"""The script for a machine with a GPU works before it gets there: in small, by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).parent / "gpu" / "check.py"
# what the package needs besides torch and Triton, and what these bring along
ELSEWHERE = [
    "numba", "llvmlite", "llguidance", "safetensors", "regex", "tqdm", "platformdirs", "psutil", "tokenizers",
    "transformers", "gguf",
]  # fmt: skip
ALONE = f"import runpy, sys; sys.modules.update(dict.fromkeys({ELSEWHERE})); sys.argv[1:] = ['--device', 'cpu']\n"
RUN = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"


def run(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_with_torch_and_triton_alone_every_kernel_and_every_way_is_checked_and_agrees():
    done = run(ALONE + RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("0 failed")
    agreed = [line[6:] for line in lines if line.startswith("ok")]
    for begin in ("norm + residual", "rotary + cache write", "attention triton, prompt", "attention triton, decode"):
        assert any(line.startswith(begin) for line in agreed), begin
    ways = {line.split(", torch")[0] for line in agreed if line.startswith("model")}
    assert ways == {
        "model, layers plain, attention plain",
        "model, layers fused, attention sdpa",
        "model, layers triton, attention triton",
    }
    left_out = [line for line in lines if line.startswith("--")]
    assert all("flash" in line or "graphs" in line for line in left_out) and left_out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("from llmfromscratch.kernels import triton_decode as t; own = t.attend_steps\n"
         "t.attend_steps = lambda *parts: own(*parts) * 1.001\n", "attention triton, decode 1 x 40"),
        ("from llmfromscratch.kernels import triton_norm as t\n"
         "t.add_and_norm = lambda x, *rest: (_ for _ in ()).throw(ValueError('broken'))\n", "check_norm"),
    ],
)  # fmt: skip
def test_what_is_wrong_by_a_thousandth_or_raises_is_named_and_the_rest_is_checked_all_the_same(fault, found):
    done = run(ALONE + f"sys.path.insert(0, {str(SCRIPT.parents[2])!r})\n" + fault + RUN)
    assert done.returncode == 1
    failed = [line[6:] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert any(line.startswith(found) for line in failed), done.stdout + done.stderr
    assert f"{len(failed)} failed" in done.stdout
    assert "ok    rotary + cache write" in done.stdout and "ok    model, layers fused" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_it_says_so_in_one_sentence_and_ends_with_2():
    done = run(f"import runpy, sys; sys.argv[1:] = []\n{RUN}")
    assert done.returncode == 2 and done.stderr == ""
    assert done.stdout == "There is no CUDA device that torch can use here, so nothing was checked.\n"
