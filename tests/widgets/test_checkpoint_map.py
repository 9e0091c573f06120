"""The map of a checkpoint's bytes: its areas against independent sums, and what is wrong in the input is seen."""

from __future__ import annotations

import json
import struct
from collections import Counter

import pytest
import torch
from matplotlib.patches import Rectangle

from llmfromscratch import loading
from llmfromscratch.course.sketches.ch01 import read_safetensors_header
from llmfromscratch.formats.gguf import read_gguf
from llmfromscratch.widgets import checkpoint_contents as contents
from llmfromscratch.widgets import checkpoint_map
from llmfromscratch.widgets.checkpoint_map import draw_checkpoint_map, lay_out, select
from llmfromscratch.widgets.style import ALARM

WIDTH, FFN, VOCAB, LAYERS = 64, 128, 320, 3


def plain_tensors():
    """name -> (dtype, shape, bytes) of a small model: bfloat16 matrices, float32 norms."""
    tensors = {"embed_tokens.weight": ("BF16", (VOCAB, WIDTH), VOCAB * WIDTH * 2)}
    for layer in range(LAYERS):
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{part}.weight"] = ("F32", (WIDTH,), WIDTH * 4)
        for part in "qkvo":
            tensors[f"layers.{layer}.self_attn.{part}_proj.weight"] = ("BF16", (WIDTH, WIDTH), WIDTH * WIDTH * 2)
        for part, shape in {"gate": (FFN, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN)}.items():
            tensors[f"layers.{layer}.mlp.{part}_proj.weight"] = ("BF16", shape, FFN * WIDTH * 2)
    tensors["norm.weight"] = ("F32", (WIDTH,), WIDTH * 4)
    tensors["lm_head.weight"] = ("BF16", (VOCAB, WIDTH), VOCAB * WIDTH * 2)
    return tensors


def areas(entries, size="bytes in the file", layers=None, draw=draw_checkpoint_map):
    """The area of every filled rectangle in the drawn map, in the unit of its x axis."""
    axes = draw(entries, size=size, layers=layers).axes[0]
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    return [patch.get_width() * patch.get_height() for patch in patches]


def outlined(form_or_entries):
    axes = draw_checkpoint_map(form_or_entries).axes[0]
    return [patch for patch in axes.patches if not patch.get_fill()]


def test_the_areas_drawn_add_up_to_the_bytes_of_all_tensors():
    tensors = plain_tensors()
    drawn = areas(contents.read_entries(tensors))
    assert len(drawn) == len(tensors)
    assert sum(drawn) == pytest.approx(sum(nbytes for *_, nbytes in tensors.values()))
    assert sorted(drawn) == pytest.approx(sorted(nbytes for *_, nbytes in tensors.values()))


def test_with_the_files_size_the_areas_add_up_to_the_whole_file():
    entries = contents.read_entries(plain_tensors(), file_bytes=1_000_000)
    assert sum(areas(entries)) == pytest.approx(1_000_000)
    rest = [entry for entry in entries if entry.kind == "rest of file"]
    assert rest[0].nbytes == 1_000_000 - sum(nbytes for *_, nbytes in plain_tensors().values())


@pytest.mark.parametrize(("size", "factor"), [("parameters", 1), ("bytes in bfloat16", 2)])
def test_other_sizes_count_parameters(size, factor):
    parameters = 2 * VOCAB * WIDTH + LAYERS * (4 * WIDTH * WIDTH + 3 * FFN * WIDTH + 2 * WIDTH) + WIDTH
    entries = contents.read_entries(plain_tensors(), file_bytes=1_000_000)
    assert sum(areas(entries, size)) == pytest.approx(factor * parameters)


def test_columns_stand_side_by_side_without_gap_or_overlap():
    tiles = lay_out(contents.read_entries(plain_tensors()))
    columns = list(dict.fromkeys((tile.x, tile.width) for tile in tiles))
    ends = [x + width for x, width in columns]
    assert [x for x, _ in columns] == [0.0, *ends[:-1]]
    for x, _ in columns:
        stack = [tile for tile in tiles if tile.x == x]
        assert [tile.y for tile in stack[1:]] == pytest.approx([tile.y + tile.height for tile in stack[:-1]])
        assert stack[-1].y + stack[-1].height == pytest.approx(1)
    assert [tile.entry.block for tile in tiles if tile.y == 0] == ["embedding", 0, 1, 2, "norm", "head"]


def test_a_narrower_range_shows_those_layers_only():
    entries = contents.read_entries(plain_tensors())
    assert {entry.block for entry in select(entries, (1, 2))} == {1, 2}
    assert select(entries, (0, LAYERS - 1)) == entries
    one_layer = sum(nbytes for name, (*_, nbytes) in plain_tensors().items() if name.startswith("layers.1."))
    assert sum(areas(entries, layers=(1, 1))) == pytest.approx(one_layer)


def test_every_control_changes_the_picture():
    form = checkpoint_map(plain_tensors())
    pictures = [form.png()]
    for change in ({"colour_by": "dtype"}, {"colour_by": "layer"}, {"size": "parameters"},
                   {"size": "bytes in bfloat16"}, {"layers": (0, 1)}, {"layers": (1, 1)}):  # fmt: skip
        pictures.append(form.set(**change).png())
    assert len(set(pictures)) == len(pictures)


def test_the_text_says_the_sums_by_kind_and_dtype():
    form = checkpoint_map(plain_tensors())
    total = sum(nbytes for *_, nbytes in plain_tensors().values())
    lines = form.text().splitlines()
    assert lines[0].startswith(f"{len(plain_tensors())} tensors, ")
    assert lines[0].endswith(f"{total:,} bytes in the file")
    assert "embedding 41.0 kB, q 24.6 kB" in lines[1]  # 320 * 64 * 2 and 3 * 64 * 64 * 2
    assert "norms 1.8 kB, head 41.0 kB" in lines[1]  # 7 * 64 * 4
    assert lines[2] == "Every tensor has a canonical name and the bytes that its shape takes."
    # 2 * 320 * 64 * 2 + 3 * (4 * 64 * 64 + 3 * 128 * 64) * 2 = 327,680
    assert "Dtype, in bytes in the file: BF16 327.7 kB, F32 1.8 kB" in form.set(colour_by="dtype").text()
    assert "each of layers 0 to 2 82.4 kB" in form.set(colour_by="layer").text()


def test_names_that_are_not_canonical_are_in_a_band_of_their_own():
    tensors = {f"model.{name}" if ".1." in name else name: about for name, about in plain_tensors().items()}
    entries = contents.read_entries(tensors)
    unknown = [entry for entry in entries if entry.kind == "unknown"]
    assert {entry.name for entry in unknown} == {name for name in tensors if name.startswith("model.")}
    assert sum(areas(entries)) == pytest.approx(sum(nbytes for *_, nbytes in tensors.values()))
    text = checkpoint_map(tensors).text()
    assert "9 tensors have names that are not canonical: model.layers.1.input_layernorm.weight" in text
    assert "No tensor at all in layer 1." in text


def test_renaming_places_them_and_the_reference_leaves_nothing_unknown():
    tensors = {f"module.model.{name}": about for name, about in plain_tensors().items()}
    form = checkpoint_map(tensors, rename=loading.canonical_name)
    assert form.text() == checkpoint_map(plain_tensors()).text()


def test_a_rename_that_swallows_half_the_names_is_seen():
    def rename(name):
        return name.replace("layers.2", "layers.0")

    entries = contents.read_entries(plain_tensors(), rename)
    assert len(outlined(entries)) == sum(name.startswith("layers.2.") for name in plain_tensors())
    problems = contents.find_problems(entries)
    assert problems == [
        "9 tensors are wrong, first: 'layers.0.input_layernorm.weight' and 'layers.2.input_layernorm.weight' both "
        "become 'layers.0.input_layernorm.weight'."
    ]


@pytest.mark.parametrize(
    ("error", "said"), [(NotImplementedError(), "is not yet written"), (KeyError("x"), "raised KeyError")]
)
def test_a_rename_that_raises_is_named_and_the_map_is_still_drawn(error, said):
    def rename(name):
        raise error

    form = checkpoint_map(plain_tensors(), rename=rename)
    assert f"rename('embed_tokens.weight') {said}." in form.text()
    assert "unknown" in form.text()


def test_a_rename_that_is_not_written_at_all_leaves_a_map_without_outlines():
    def rename(name):
        raise NotImplementedError

    # each outline is wider than most tiles are high: the map would be one red area
    assert not outlined(contents.read_entries(plain_tensors(), rename))


def test_the_title_counts_the_tensors_and_not_the_rest_of_the_file():
    entries = contents.read_entries(plain_tensors(), None, 10**9)
    title = draw_checkpoint_map(entries, file_bytes=10**9).texts[0].get_text()
    assert title.startswith(f"{len(plain_tensors())} tensors, ") and "GB" not in title


def test_names_that_may_be_ignored_have_their_own_kind():
    tensors = plain_tensors() | {"layers.0.self_attn.rotary_emb.inv_freq": ("F32", (32,), 128)}
    form = checkpoint_map(tensors, rename=loading.canonical_name)
    assert "ignored 128 bytes" in form.text()
    assert "not canonical" not in form.text()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (("BF16", (VOCAB, WIDTH), 17), "BF16 [320, 64] takes 40,960 bytes, but 17 are given."),
        (("F32", (VOCAB, WIDTH), VOCAB * WIDTH * 2), "F32 [320, 64] takes 81,920 bytes, but 40,960 are given."),
        (("Q4_1", (VOCAB, 48), 9600), "Q4_1 needs rows of a multiple of 32, its shape is [320, 48]."),
    ],
)
def test_bytes_that_do_not_follow_from_dtype_and_shape_are_marked(about, said):
    tensors = plain_tensors() | {"embed_tokens.weight": about}
    entries = contents.read_entries(tensors)
    assert [patch.get_edgecolor() for patch in outlined(entries)] == [pytest.approx((0.651, 0.118, 0, 1), abs=0.01)]
    assert ALARM == "#A61E00"
    assert f"embed_tokens.weight: {said}" in checkpoint_map(tensors).text()


def test_layers_that_lack_a_part_are_named():
    tensors = plain_tensors()
    del tensors["layers.1.self_attn.k_proj.weight"]
    assert contents.find_problems(contents.read_entries(tensors)) == ["Incomplete: layer 1 has no 'k'."]


def test_tensors_bigger_than_their_file_are_a_problem():
    text = checkpoint_map(plain_tensors(), file_bytes=1000).text()
    assert "but the file has only 1,000." in text


def test_a_dtype_that_is_not_known_is_said_not_to_be_checked():
    tensors = plain_tensors() | {"norm.weight": ("IQ9", (WIDTH,), 7)}
    assert "IQ9 takes is not known here: not checked." in checkpoint_map(tensors).text()


def test_a_safetensors_header_and_its_offsets_can_be_given_as_they_are(tmp_path):
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in plain_tensors().items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    text = json.dumps(header).encode("utf-8")
    file = tmp_path / "small.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))
    header_form = checkpoint_map(header)
    assert header_form.text() == checkpoint_map(plain_tensors()).text()
    parsed = checkpoint_map(read_safetensors_header(file), file_bytes=file.stat().st_size)
    assert "rest of file" in parsed.text()
    assert parsed.text().splitlines()[0] == header_form.text().splitlines()[0]


def test_loaded_tensors_can_be_given_too():
    weights = {"norm.weight": torch.ones(8, dtype=torch.bfloat16), "embed_tokens.weight": torch.ones(4, 8)}
    text = checkpoint_map(weights).text()
    assert "2 tensors, 40 parameters, 144 bytes in the file" in text
    assert "Every tensor" in text


@pytest.mark.parametrize(
    "tensors", [42, {"a": 3}, {"a": ("F32", (2,))}, {"a": ("F32", (2.5,), 10)}, {"a": ("F32", (2,), -8)}]
)
def test_what_is_no_description_of_tensors_is_refused_with_a_sentence(tensors):
    with pytest.raises(TypeError, match=r"^The map wants .*\.$"):
        checkpoint_map(tensors)


def test_a_checkpoint_without_any_size_says_so_in_the_pictures_place():
    assert "There is nothing to draw" in checkpoint_map({}).text()


@pytest.mark.parametrize("layers", [1, 2, 80])
def test_no_label_leaves_its_tile_and_no_two_column_numbers_touch(layers):
    tensors = {
        f"layers.{layer}.{name.split('.', 2)[2]}": about
        for layer in range(layers)
        for name, about in plain_tensors().items()
        if name.startswith("layers.0.")
    } | {"embed_tokens.weight": plain_tensors()["embed_tokens.weight"]}
    figure = draw_checkpoint_map(contents.read_entries(tensors))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
    whole = figure.bbox
    legend = axes.get_legend().get_window_extent()
    assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1 for box in [*boxes, legend])
    assert legend.x0 > axes.get_window_extent().x1


@pytest.mark.model
def test_the_real_models_map_is_its_file_to_the_byte(smollm2_gguf):
    tensors = read_gguf(smollm2_gguf).tensors
    form = checkpoint_map(tensors, rename=loading.canonical_name)
    entries = contents.read_entries(tensors, loading.canonical_name, smollm2_gguf.stat().st_size)
    assert sum(areas(entries)) == pytest.approx(smollm2_gguf.stat().st_size)
    # 49152 x 576 in blocks of 34 bytes for 32 weights; 30 layers of norms, and the last one
    expected = Counter(embedding=49152 * 576 // 32 * 34, norms=(30 * 2 + 1) * 576 * 4, q=30 * 576 * 576 // 32 * 20)
    found = Counter()
    for entry in entries:
        found[entry.kind] += entry.nbytes
    assert {kind: found[kind] for kind in expected} == dict(expected)
    assert form.text().startswith("272 tensors, 134,515,008 parameters")
    assert form.text().endswith("Every tensor has a canonical name and the bytes that its shape takes.")
    assert checkpoint_map(loading.open_checkpoint(smollm2_gguf)).png() == form.png()


def test_a_dtype_that_is_a_number_is_not_taken_for_a_layer():
    tensors = plain_tensors() | {"norm.weight": (3, (WIDTH,), 40)}
    text = checkpoint_map(tensors).set(colour_by="dtype").text()
    assert "3 40 bytes" in text
    assert "layer 3" not in text
