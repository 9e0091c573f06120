"""PyTorch checkpoints are read without running what is pickled in them."""

from __future__ import annotations

import collections
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats.torch_bin import read_sharded, read_torch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pytorch_model.bin"


def saved(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_torch(path)
    assert caught.value.file == path
    return caught.value


def with_pickle(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A checkpoint of one 16-byte storage whose pickle is replaced."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")
    return path


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00K\x04\x85K\x01\x85\x89"
    b"ccollections\nOrderedDict\n)RtR"
)
SOUND = b"\x80\x02}X\x01\x00\x00\x00w" + TENSOR + b"s."


def test_every_plain_type_arrives_with_shape_and_values(path: Path) -> None:
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
    found = read_torch(saved(tensors, path))
    assert list(found) == list(tensors)
    for name, expected in tensors.items():
        tensor = found[name]
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.file) == (name, name, tuple(expected.shape), path)
        assert tensor.nbytes == expected.numel() * expected.element_size()
        assert tensor.read().dtype == expected.dtype
        assert torch.equal(tensor.read(), expected)


def test_views_parameters_and_shared_storages_keep_their_values(path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    model = torch.nn.Linear(2, 2)
    found = read_torch(saved({"t": base.t(), "row": base[1], "base": base, **dict(model.named_parameters())}, path))
    assert torch.equal(found["t"].read(), base.t())
    assert torch.equal(found["row"].read(), base[1])
    assert torch.equal(found["weight"].read(), model.weight)
    assert not found["weight"].read().requires_grad


@pytest.mark.parametrize("keys", [[], ["state_dict"], ["model"], ["model_state_dict"], ["model", "state_dict"]])
def test_a_state_dict_is_found_in_what_wraps_it(keys: list[str], path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    value: dict = model.state_dict()
    for key in reversed(keys):
        value = {"epoch": 3, key: value, "optimizer": {"lr": [0.1, torch.zeros(1)]}}
    found = read_torch(saved(value, path))
    assert list(found) == list(model.state_dict())
    assert torch.equal(found["0.weight"].read(), model[0].weight)


def test_numbers_and_strings_beside_tensors_are_left_out_and_anything_else_is_named(path: Path) -> None:
    assert list(read_torch(saved({"w": torch.ones(1), "step": 7, "note": "x", "best": None}, path))) == ["w"]
    assert "'layers' is a list" in refusal(saved({"w": torch.ones(1), "layers": [torch.ones(1)]}, path)).reason
    assert "3" in refusal(saved({3: torch.ones(1)}, path)).reason


def test_a_file_without_one_clear_set_of_tensors_is_refused(path: Path) -> None:
    assert "no tensors" in refusal(saved({}, path)).reason
    assert "no tensors" in refusal(saved({"state_dict": {"step": 3}}, path)).reason
    assert "holds a list" in refusal(saved([torch.ones(1)], path)).reason
    assert "holds a Tensor" in refusal(saved(torch.ones(1), path)).reason
    both = {"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}
    assert "state_dict and model" in refusal(saved(both, path)).reason


class Bomb:
    """Pickled, this is a call that makes a folder where it is loaded."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_code_in_a_pickle_is_named_and_does_not_run(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "it ran"
    saved({"w": torch.ones(1), "x": Bomb(target)}, path)
    error = refusal(path)
    assert "mkdir" in error.reason and "nothing in it was run" in error.reason
    assert not target.exists()
    torch.load(path, weights_only=False)  # the bomb is real
    assert target.exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R", "builtins.bytearray"),
        (b"ctorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85R", "UntypedStorage"),
        (b"\x8c\x05posix\x8c\x05mkdir\x93", "SHORT_BINUNICODE"),
        (b"(iposix\nsystem\n", "INST"),
        (b"}q\x00ccollections\nOrderedDict\nh\x00\x85R", "copy of other data"),
        (b"ccollections\nOrderedDict\nq\x01)R0h\x01h\x00\x85R", "uses the operation POP"),
        (b"ccollections\nOrderedDict\nq\x01)Rh\x01}\x85R", "copy of other data"),
        (b"ccollections\nOrderedDict\n)R}b" * 65, "64 objects"),
        (b"(" + b"K\x01" * 1000 + b"t", "tuple of"),
        (b"X\xff\xff\xff\x7f", "damaged"),
        (b"", "damaged"),
    ],
)
def test_a_pickle_that_would_take_memory_or_run_code_is_refused_before_torch_sees_it(
    program: bytes, words: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    assert words in refusal(with_pickle(path, b"\x80\x02" + program + (b"." if program else b""))).reason


def test_the_hand_made_pickle_of_these_tests_is_otherwise_sound(path: Path) -> None:
    found = read_torch(with_pickle(path, SOUND))
    assert found["w"].read().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x04\x85K\x01\x85", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85K\x00\x85"),
        (b"K\x04\x85K\x01\x85", b"K\x05\x85K\x01\x85"),
        (b"\x000X\x03", b"\x009X\x03"),
    ],
    ids=["terabytes by stride 0", "one element too many", "a storage that is not there"],
)
def test_a_tensor_larger_than_its_storage_is_refused(old: bytes, new: bytes, path: Path) -> None:
    assert SOUND.count(old) == 1
    refusal(with_pickle(path, SOUND.replace(old, new)))


def test_a_storage_that_claims_terabytes_gets_no_more_than_the_file_has(path: Path) -> None:
    claim = SOUND.replace(b"cpuK\x04t", b"cpu\x8a\x06\x00\x00\x00\x00\x00\x01t")
    assert claim != SOUND
    values = read_torch(with_pickle(path, claim))["w"].read()
    assert values.tolist() == [0, 0, 0, 0]
    assert values.untyped_storage().nbytes() <= path.stat().st_size


def test_an_expanded_view_is_refused_by_name(path: Path) -> None:
    error = refusal(saved({"w": torch.ones(1).expand(10**12)}, path))
    assert (error.tensor, "claims 4000000000000 bytes" in error.reason) == ("w", True)


def test_types_and_layouts_that_we_do_not_compute_with_are_refused(path: Path) -> None:
    assert "ComplexFloatStorage" in refusal(saved({"w": torch.ones(1, dtype=torch.complex64)}, path)).reason
    assert "sparse" in refusal(saved({"w": torch.eye(2).to_sparse()}, path)).reason


def test_the_old_format_without_zip_is_refused_with_the_way_out(path: Path) -> None:
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    error = refusal(path)
    assert "old format" in error.reason and "re-save" in error.reason
    path.write_bytes(b"version https")
    assert "not a whole" in refusal(path).reason


def test_compressed_entries_are_refused(path: Path) -> None:
    assert "compressed" in refusal(with_pickle(path, SOUND, zipfile.ZIP_DEFLATED)).reason


def claiming(content: bytes, entry: bytes, size: int) -> bytes:
    """An archive whose directory gives another size for one entry (the sizes lie 20 bytes into its 46-byte record)."""
    start = content.rindex(entry) - 46
    return content[: start + 20] + size.to_bytes(4, "little") * 2 + content[start + 28 :]


def test_entries_that_claim_more_than_the_file_are_refused_one_by_one_and_together(path: Path) -> None:
    content = with_pickle(path, SOUND).read_bytes()
    path.write_bytes(claiming(content, b"archive/data/0", 2**31))
    assert "in a file of" in refusal(path).reason
    path.write_bytes(claiming(content, b"archive/data.pkl", len(content)))
    assert "in a file of" in refusal(path).reason


def test_an_archive_with_two_entries_of_one_name_is_refused(path: Path) -> None:
    with zipfile.ZipFile(with_pickle(path, SOUND), "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data/0", bytes(16))
    assert "same name" in refusal(path).reason


def test_an_archive_that_is_no_checkpoint_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert "one data.pkl" in refusal(path).reason
    with zipfile.ZipFile(with_pickle(path, SOUND), "a") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    assert "save its state_dict" in refusal(path).reason


def test_shards_are_read_through_the_same_index_logic(tmp_path: Path) -> None:
    saved(collections.OrderedDict(a=torch.ones(2)), tmp_path / "pytorch_model-1.bin")
    saved({"b": torch.zeros(1)}, tmp_path / "pytorch_model-2.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert {name: tensor.read().tolist() for name, tensor in read_sharded(index).items()} == {"a": [1, 1], "b": [0]}
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-2\.bin"):
        read_sharded(index)
