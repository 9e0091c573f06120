"""What every test may ask for: the real model, fetched once and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from llmfromscratch import hub

_THREADS = pytest.StashKey[int]()

# Beside another worker one thread: threads that wait for each other would take minutes.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# No GPU: numpy runs the Triton kernels, if this is said before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged model's GGUF file, its content checked against the known SHA-256."""
    hub.resolve(hub.DEFAULT_MODEL)
    return hub.verify(hub.known_models()[hub.DEFAULT_MODEL])


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_gguf):
    """The real model in our engine, in float32, so that equal things come out equal."""
    from llmfromscratch import LLM

    return LLM(smollm2_gguf, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def transformers_smollm2(smollm2_gguf):
    """The oracle: the same file in transformers, in float32. Takes about 30 seconds to load."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tiny models compute on one thread: several would spend their time waiting for each other on a busy machine."""
    torch = sys.modules.get("torch")
    if torch is not None:
        item.config.stash.setdefault(_THREADS, torch.get_num_threads())
        tiny = item.get_closest_marker("model") is None
        torch.set_num_threads(1 if tiny else item.config.stash[_THREADS])
