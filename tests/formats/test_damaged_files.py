"""Whatever bytes a reader meets, it reads them or raises CheckpointError, within memory that the file's size bounds."""

from __future__ import annotations

import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.gguf import read_gguf
from llmfromscratch.formats.safetensors import read_safetensors
from llmfromscratch.formats.stored import StoredTensor
from llmfromscratch.formats.torch_bin import read_torch

Reader = Callable[[Path], dict[str, StoredTensor]]


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    return read_gguf(path).tensors


def a_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["one", "two", "three"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("flag", True)
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = np.ones((16, 18), dtype=np.uint8)  # 288 bytes: no padding at the end that a cut could take unseen
    writer.add_tensor("packed", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def a_safetensors(path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4).half()}, path, metadata={"format": "pt"})


def a_torch_file(path: Path) -> None:
    torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict(), "step": 3}, path)


KINDS = {
    "gguf": (gguf_tensors, a_gguf),
    "safetensors": (read_safetensors, a_safetensors),
    "torch": (read_torch, a_torch_file),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, bytes]:
    """A reader and the bytes of a sound file of its kind, with nothing loaded for the first time any more."""
    reader, write = KINDS[request.param]
    path = tmp_path_factory.mktemp("sound") / "file"
    write(path)
    assert reader(path)
    return reader, path.read_bytes()


def read_or_refuse(reader: Reader, content: bytes) -> bool:
    """Whether the bytes could be read; anything but a sound result or CheckpointError fails the test."""
    # The folder may outlive the test by its mapped files, which some systems do not let go.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about pickles it does not know
        path = Path(folder) / "file"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            for tensor in reader(path).values():
                values = tensor.read()
                assert values.numel() * values.element_size() == tensor.nbytes <= len(content)
                assert values.untyped_storage().nbytes() <= len(content)
        except CheckpointError as error:
            assert error.reason and str(path) in str(error)
            return False
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1_000_000 + 100 * len(content)
        return True


@settings(deadline=None, max_examples=150)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(kind: tuple[Reader, bytes], share: float) -> None:
    reader, content = kind
    assert not read_or_refuse(reader, content[: int(share * len(content))])


@settings(deadline=None, max_examples=300)
@given(share=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_file_with_one_byte_changed_is_read_or_refused(kind: tuple[Reader, bytes], share: float, flip: int) -> None:
    reader, content = kind
    place = int(share * len(content))
    read_or_refuse(reader, content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])


@settings(deadline=None, max_examples=150)
@given(share=st.floats(0, 1, exclude_max=True), number=st.integers(0, 2**64 - 1))
def test_a_file_with_an_absurd_number_anywhere_is_read_or_refused(
    kind: tuple[Reader, bytes], share: float, number: int
) -> None:
    reader, content = kind
    place = int(share * (len(content) - 8))
    read_or_refuse(reader, content[:place] + number.to_bytes(8, "little") + content[place + 8 :])


@settings(deadline=None, max_examples=100)
@given(rest=st.binary(max_size=200), kept=st.sampled_from([0, 4, 8, 24, 60]))
def test_noise_after_a_right_beginning_is_refused(kind: tuple[Reader, bytes], rest: bytes, kept: int) -> None:
    reader, content = kind
    assert not read_or_refuse(reader, content[:kept] + rest)
