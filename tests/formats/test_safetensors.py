"""The safetensors reader gives what the library wrote, and every damaged file is a CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.safetensors import read_safetensors, read_sharded

ONE = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


def hand_made(path: Path, header: str, data: bytes = b"", length: int | None = None) -> Path:
    encoded = header.encode()
    path.write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded + data)
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert caught.value.file == path
    return caught.value


def test_every_plain_type_arrives_with_shape_and_values(tmp_path: Path) -> None:
    tensors = {
        "F64": torch.randn(3, dtype=torch.float64),
        "F32": torch.randn(2, 3),
        "F16": torch.randn(4, 1).half(),
        "BF16": torch.randn(2, 2, 2).bfloat16(),
        "I64": torch.tensor([-1, 2**62]),
        "I32": torch.tensor([[1], [2]], dtype=torch.int32),
        "I16": torch.tensor([-5], dtype=torch.int16),
        "I8": torch.tensor([-128, 127], dtype=torch.int8),
        "U8": torch.tensor(200, dtype=torch.uint8),
        "BOOL": torch.tensor([True, False]),
    }
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = read_safetensors(path)
    assert list(found) == sorted(tensors)
    for name, expected in tensors.items():
        tensor = found[name]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.file) == (name, name, tuple(expected.shape), path)
        assert tensor.nbytes == expected.numel() * expected.element_size()
        assert tensor.read().dtype == expected.dtype
        assert torch.equal(tensor.read(), expected)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ('{"a":' + ONE + ',"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12)),
        ('{"a":{"dtype":"Q32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', bytes(8)),
        ('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}', bytes(8)),
        ('{"a":' + ONE + "}", bytes(7)),
        ('{"a":' + ONE, bytes(8)),
        ('{"a":' * 5000 + "}" * 5000, bytes(8)),
    ],
    ids=["overlap", "unknown type", "wrong size", "overflow", "truncated", "no JSON", "nested"],
)
def test_a_header_that_contradicts_the_file_is_refused(header: str, data: bytes, tmp_path: Path) -> None:
    assert "not a valid safetensors file" in refusal(hand_made(tmp_path / "bad.safetensors", header, data)).reason


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8, 1000])
def test_an_absurd_header_length_is_refused(length: int, tmp_path: Path) -> None:
    refusal(hand_made(tmp_path / "bad.safetensors", "{}", length=length))


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    error = refusal(hand_made(tmp_path / "bad.safetensors", '{"a":' + ONE + ',"a":' + ONE + "}", bytes(8)))
    assert "'a' appears twice" in error.reason


def test_a_type_that_we_do_not_compute_with_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, path)
    error = refusal(path)
    assert (error.tensor, "F8_E4M3" in error.reason) == ("w", True)


def test_what_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.safetensors").reason
    assert "not a regular file" in refusal(tmp_path).reason
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert "empty" in refusal(tmp_path / "empty.safetensors").reason


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Three tensors in two shards, with a right index."""
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((4,), 2.0)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {
        "c": "model-00002-of-00002.safetensors",
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
    }
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": weight_map}), encoding="utf-8")
    return path


def index_refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_sharded(path)
    return caught.value


def with_map(index: Path, **changes: object) -> Path:
    """The index with some entries changed, or taken out where the change is None."""
    content = json.loads(index.read_text(encoding="utf-8"))
    changed = {**content["weight_map"], **changes}
    content["weight_map"] = {name: shard for name, shard in changed.items() if shard is not None}
    index.write_text(json.dumps(content), encoding="utf-8")
    return index


def test_shards_are_read_as_one_checkpoint_in_the_order_of_the_index(index: Path) -> None:
    found = read_sharded(index)
    assert list(found) == ["c", "a", "b"]
    assert found["c"].read().tolist() == [2, 2, 2, 2]
    assert found["a"].file == index.parent / "model-00001-of-00002.safetensors"


def test_all_missing_shards_are_named(index: Path) -> None:
    error = index_refusal(with_map(index, d="model-00003.safetensors", e="model-00004.safetensors"))
    assert "model-00003.safetensors, model-00004.safetensors" in error.reason
    assert "2 of 4 shards" in error.reason


def test_tensors_that_are_not_where_the_index_says_are_named(index: Path) -> None:
    error = index_refusal(with_map(index, lost="model-00001-of-00002.safetensors"))
    assert "lost (model-00001-of-00002.safetensors)" in error.reason
    error = index_refusal(with_map(index, lost=None, b=None))
    assert "b (model-00001-of-00002.safetensors)" in error.reason


def test_a_damaged_shard_is_named_and_not_the_index(index: Path) -> None:
    shard = index.parent / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert index_refusal(index).file == shard


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..\\a", "C:a", "..", "", "a\0b", 7, ["x"]]
)
def test_a_shard_outside_the_folder_is_refused_even_if_it_is_there(shard: object, index: Path) -> None:
    save_file({"c": torch.ones(1)}, index.parent.parent / "secret.safetensors")
    error = index_refusal(with_map(index, c=shard))
    assert error.tensor == "c"
    assert "index's own folder" in error.reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "no map", "list as map", "empty map", "twice", "not UTF-8", "nested"],
)
def test_an_index_of_another_form_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    assert index_refusal(path).file == path
