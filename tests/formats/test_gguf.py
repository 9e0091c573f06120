"""The GGUF reader gives what the gguf package's writer wrote, and names what it cannot accept."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from llmfromscratch.errors import CheckpointError
from llmfromscratch.formats import ggml
from llmfromscratch.formats.gguf import read_gguf

F32, Q4_0, IQ2_XXS = 0, 2, 16
Entry = tuple[str, tuple[int, ...], int, int]  # name, dimensions, type, offset


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def hand_made(
    path: Path,
    entries: list[Entry],
    data: bytes = bytes(64),
    metadata: bytes = b"",
    keys: int = 0,
    version: int = 3,
    tensor_count: int | None = None,
) -> Path:
    """A file written field by field, as no well-behaved writer would."""
    count = len(entries) if tensor_count is None else tensor_count
    header = b"GGUF" + struct.pack("<IQQ", version, count, keys) + metadata
    for name, dimensions, kind, offset in entries:
        header += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert caught.value.file == path
    return caught.value


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return tmp_path / "bad.gguf"


def test_metadata_of_every_type_arrives_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "größer 🙂")
    writer.add_array("words", ["a", "", "Ġfünf"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert (file.version, file.file, file.tensors) == (3, path, {})
    metadata = file.metadata
    for bits in (8, 16, 32, 64):
        assert (metadata[f"u{bits}"], metadata[f"i{bits}"]) == (2**bits - 1, -(2 ** (bits - 1)))
    assert (metadata["f32"], metadata["f64"], metadata["text"]) == (1.5, 0.1, "größer 🙂")
    assert metadata["yes"] is True and metadata["no"] is False
    assert metadata["words"] == ["a", "", "Ġfünf"]
    assert metadata["numbers"].dtype == np.int32 and metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["floats"].dtype == np.float32 and metadata["floats"].tolist() == [0.5, 0.25]
    assert metadata["flags"].dtype == np.bool_ and metadata["flags"].tolist() == [True, False]


def test_arrays_of_arrays_are_read_up_to_a_bounded_depth(bad: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    nested = struct.pack("<IQ", 9, 2) + inner + inner
    file = read_gguf(hand_made(bad, [], metadata=text("key") + struct.pack("<I", 9) + nested, keys=1))
    assert [row.tolist() for row in file.metadata["key"]] == [[7, 8], [7, 8]]
    deep = struct.pack("<IQ", 9, 1) * 2000 + struct.pack("<IQ", 4, 0)
    error = refusal(hand_made(bad, [], metadata=text("key") + struct.pack("<I", 9) + deep, keys=1))
    assert "nests arrays deeper" in error.reason


def test_plain_tensors_arrive_with_type_shape_and_values(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    random = np.random.default_rng(0)
    arrays = {
        "F32": random.normal(size=(3, 5)).astype(np.float32),
        "F16": random.normal(size=(2, 3, 4)).astype(np.float16),
        "F64": random.normal(size=(7,)),
        "I8": random.integers(-128, 127, (3, 2), dtype=np.int8),
        "I16": random.integers(-999, 999, (5,), dtype=np.int16),
        "I32": random.integers(-999, 999, (5,), dtype=np.int32),
        "I64": random.integers(-999, 999, (2, 2, 2, 2), dtype=np.int64),
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    halves = torch.randn(4, 6).bfloat16()
    writer.add_tensor("BF16", halves.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_gguf(path).tensors
    for name, array in arrays.items():
        tensor = tensors[name]
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (name, array.shape, array.nbytes)
        assert torch.equal(tensor.read(), torch.from_numpy(array))
    assert (tensors["BF16"].dtype, tensors["BF16"].nbytes) == ("BF16", 48)
    assert torch.equal(tensors["BF16"].read(), halves)


@pytest.mark.parametrize("dtype", [name for name, (weights, _) in ggml.BLOCK_SIZES.items() if weights > 1])
def test_a_quantized_tensor_arrives_as_its_blocks(dtype: str, tmp_path: Path) -> None:
    weights, size = ggml.BLOCK_SIZES[dtype]
    rows = np.random.default_rng(1).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", rows, raw_dtype=gguf.GGMLQuantizationType[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf(path).tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, (3, 2 * weights), rows.nbytes)
    assert torch.equal(tensor.read(), torch.from_numpy(rows).view(6, size))


def test_writing_to_a_tensor_that_was_read_leaves_the_file_alone(bad: Path) -> None:
    path = hand_made(bad, [("w", (4,), F32, 0)])
    before = path.read_bytes()
    read_gguf(path).tensors["w"].read().fill_(1)
    assert path.read_bytes() == before


def test_version_2_is_read_like_version_3(bad: Path) -> None:
    file = read_gguf(hand_made(bad, [("w", (4,), F32, 0)], version=2))
    assert file.version == 2
    assert file.tensors["w"].read().tolist() == [0, 0, 0, 0]


def test_an_own_alignment_moves_the_tensors(bad: Path) -> None:
    metadata = text("general.alignment") + struct.pack("<II", 4, 64)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + metadata + text("w") + struct.pack("<IQIQ", 1, 2, F32, 64)
    bad.write_bytes(header + bytes(-len(header) % 64 + 64) + struct.pack("<2f", 3, 4))
    assert read_gguf(bad).tensors["w"].read().tolist() == [3, 4]


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_and_byte_orders_are_named(version: int, words: str, bad: Path) -> None:
    assert words in refusal(hand_made(bad, [], version=version)).reason


def test_a_type_that_is_not_supported_is_named_with_its_tensor(bad: Path) -> None:
    error = refusal(hand_made(bad, [("fine", (4,), F32, 0), ("blk.0.ffn_up.weight", (256,), IQ2_XXS, 32)]))
    assert error.tensor == "blk.0.ffn_up.weight"
    assert "IQ2_XXS" in error.reason
    assert "number 999" in refusal(hand_made(bad, [("w", (4,), 999, 0)])).reason


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (("w", (), F32, 0), "0 dimensions"),
        (("w", (1, 1, 1, 1, 1), F32, 0), "5 dimensions"),
        (("w", (4, 0), F32, 0), "is zero"),
        (("w", (4,), F32, 8), "multiple of the alignment"),
        (("w", (17,), F32, 0), "Its 68 bytes"),
        (("w", (4,), F32, 64), "but the file has"),
        (("w", (4,), F32, 2**64 - 32), "but the file has"),
        (("w", (2**63, 2**63, 4), F32, 0), "but the file has"),
        (("w", (48,), Q4_0, 0), "not a multiple of the 32 weights"),
    ],
)
def test_a_tensor_with_an_impossible_shape_or_place_is_named(entry: Entry, words: str, bad: Path) -> None:
    error = refusal(hand_made(bad, [entry]))
    assert error.tensor == "w"
    assert words in error.reason


def test_overlapping_tensors_are_refused_in_whatever_order_they_stand(bad: Path) -> None:
    for entries in ([("a", (12,), F32, 0), ("b", (4,), F32, 32)], [("b", (4,), F32, 32), ("a", (12,), F32, 0)]):
        error = refusal(hand_made(bad, entries))
        assert (error.tensor, "overlap" in error.reason) == ("b", True)


def test_a_name_or_key_that_stands_twice_is_refused(bad: Path) -> None:
    assert "this name" in refusal(hand_made(bad, [("w", (4,), F32, 0), ("w", (4,), F32, 32)])).reason
    key = text("key") + struct.pack("<IB", 0, 1)
    assert "'key' appears twice" in refusal(hand_made(bad, [], metadata=key + key, keys=2)).reason


ABSURD = 2**60


@pytest.mark.parametrize(
    ("keys", "metadata"),
    [
        (ABSURD, b""),
        (1, struct.pack("<Q", ABSURD)),
        (1, text("k") + struct.pack("<IQ", 8, ABSURD)),
        (1, text("k") + struct.pack("<IIQ", 9, 8, ABSURD)),
        (1, text("k") + struct.pack("<IIQQ", 9, 8, 1, ABSURD)),
        (1, text("k") + struct.pack("<IIQ", 9, 5, ABSURD)),
        (1, text("k") + struct.pack("<IIQ", 9, 9, ABSURD)),
    ],
)
def test_absurd_lengths_and_counts_are_refused_before_memory_is_taken(keys: int, metadata: bytes, bad: Path) -> None:
    path = hand_made(bad, [], metadata=metadata, keys=keys)
    tracemalloc.start()
    try:
        refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_an_absurd_number_of_tensors_is_refused(bad: Path) -> None:
    assert f"{ABSURD} tensors" in refusal(hand_made(bad, [], tensor_count=ABSURD)).reason


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (struct.pack("<I", 77), "unknown type 77"),
        (struct.pack("<IIQ", 9, 77, 1), "unknown type 77"),
        (struct.pack("<IB", 7, 2), "expected 0 or 1"),
        (struct.pack("<IIQB", 9, 7, 1, 2), "expected 0 and 1 only"),
        (struct.pack("<IQB", 8, 1, 0xFF), "not valid UTF-8"),
        (struct.pack("<IIQQB", 9, 8, 1, 1, 0xFF), "damaged"),
    ],
)
def test_a_metadata_value_that_cannot_be_is_refused(metadata: bytes, words: str, bad: Path) -> None:
    error = refusal(hand_made(bad, [], metadata=text("some.key") + metadata, keys=1))
    assert words in error.reason and "some.key" in error.reason


@pytest.mark.parametrize(
    "alignment", [struct.pack("<II", 4, value) for value in (0, 4, 24)] + [struct.pack("<Id", 12, 32)]
)
def test_an_alignment_that_is_no_power_of_two_from_eight_up_is_refused(alignment: bytes, bad: Path) -> None:
    error = refusal(hand_made(bad, [], metadata=text("general.alignment") + alignment, keys=1))
    assert "general.alignment" in error.reason


def test_what_is_not_a_gguf_file_is_refused_by_its_path(tmp_path: Path, bad: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.gguf").reason
    assert "not a regular file" in refusal(tmp_path).reason
    bad.write_bytes(b"")
    assert "empty" in refusal(bad).reason
    bad.write_bytes(b"PK\x03\x04 and more")
    assert "starts with the bytes GGUF" in refusal(bad).reason


def test_a_file_that_became_shorter_after_it_was_opened_is_named(tmp_path):
    file = tmp_path / "shrinks.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("a", np.zeros((4, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    stored = read_gguf(file).tensors["a"]
    assert stored.read().shape == (4, 34)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="become shorter"):
        stored.read()
