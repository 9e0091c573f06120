"""The checks of chapter 1's first half: header, blocks, names, rows, key report. Oracles are closed forms."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.comparing import Case, NamedParts, compare, expect_raises, expect_type
from llmfromscratch.errors import CheckpointError
from llmfromscratch.key_report import KeyReport, probable_cause

Header = dict[str, tuple[str, tuple[int, ...], int, int]]

# ---- 1.1 the header of a safetensors file ------------------------------------------------------------------------


def check_header(read: Callable[[Path], Header]) -> None:
    """On files that the safetensors library writes; what is right follows from the format's definition."""
    with tempfile.TemporaryDirectory() as folder:
        files = _header_files(Path(folder))
        compare(
            read,
            _header,
            [Case(text, file) for text, file in files.items()],
            expected="each tensor's dtype, shape as a tuple, and first and end byte counted from the start of the file",
            mistakes=[
                ("the offsets count from the end of the header; add 8 and the header's length", _header_with(0, 0)),
                ("the 8 bytes of the length are missing from the offsets", _header_with(0, 1)),
                ("the header's length is missing from the offsets", _header_with(8, 0)),
                ("the header was cut after that many characters; the length counts bytes", _header_by_characters),
                ('"__metadata__" is no tensor; leave it out', _header_with_metadata),
                ("the second number is the size of the tensor, not its end", _header_with_sizes),
            ],
        )
        whole = files["two tensors and metadata"].read_bytes()
        for text, content in (
            ("only 5 bytes", whole[:5]),
            ("a header that is cut off", whole[:40]),
            ("a length of 1,000 and an empty header", (1000).to_bytes(8, "little") + b"{}"),
        ):
            short = Path(folder) / "short.safetensors"
            short.write_bytes(content)
            expect_raises(partial(read, short), ValueError, case=f"a file with {text}")


def _header_files(folder: Path) -> dict[str, Path]:
    contents: dict[str, tuple[dict[str, Tensor], dict[str, str] | None]] = {
        "one tensor of three float32": ({"a": torch.arange(3.0)}, None),
        "two tensors and metadata": ({"norm": torch.ones(3), "w": torch.ones(2, 3).half()}, {"format": "pt"}),
        "a name that is not ASCII": ({"größe": torch.ones(2, 2), "b": torch.zeros(4, dtype=torch.int64)}, None),
        "a scalar and an empty tensor": ({"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}, None),
    }
    files = {}
    for number, (text, (tensors, metadata)) in enumerate(contents.items()):
        files[text] = folder / f"{number}.safetensors"
        save_file(tensors, files[text], metadata=metadata)
    return files


def _raw_header(path: Path) -> tuple[int, dict[str, Any]]:
    content = Path(path).read_bytes()
    length = int.from_bytes(content[:8], "little")
    return length, json.loads(content[8 : 8 + length])


def _header_with(prefix: int, lengths: int, metadata: bool = False) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        length, header = _raw_header(path)
        kept = {name: entry for name, entry in header.items() if metadata or name != "__metadata__"}
        base = prefix + lengths * length
        return {
            name: (entry["dtype"], tuple(entry["shape"]), *(base + offset for offset in entry["data_offsets"]))
            if name != "__metadata__"
            else entry
            for name, entry in kept.items()
        }

    return read


_header = _header_with(8, 1)
_header_with_metadata = _header_with(8, 1, metadata=True)


def _header_by_characters(path: Path) -> Any:
    text = Path(path).read_bytes()[8:].decode("utf-8", errors="replace")
    return json.loads(text[: _raw_header(path)[0]])


def _header_with_sizes(path: Path) -> Any:
    return {name: (dtype, shape, begin, end - begin) for name, (dtype, shape, begin, end) in _header(path).items()}


# ---- 1.2 a block of Q4_1 -----------------------------------------------------------------------------------------


def check_q4_1(dequantize: Callable[[Tensor], Tensor]) -> None:
    """Against the definition of the block, one number at a time."""
    generator = torch.Generator().manual_seed(12)

    def random_blocks(count: int) -> Tensor:
        packed = torch.randint(0, 256, (count, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randn(count, 2, generator=generator).half().view(torch.uint8)
        return torch.cat([scales, packed], dim=1)

    example = torch.tensor(list(struct.pack("<ee", 0.5, -1.0)) + [0x3A] * 16, dtype=torch.uint8)[None]
    low = torch.tensor(list(struct.pack("<ee", 1.0, 0.0)) + list(range(16)), dtype=torch.uint8)[None]
    compare(
        dequantize,
        _q4_1(lambda d, m, q: d * q + m),
        [
            Case("d = 0.5, m = -1, sixteen bytes 0x3A", example),
            Case("d = 1, m = 0, bytes 0 to 15", low),
            Case("one random block", random_blocks(1)),
            Case("seven random blocks", random_blocks(7)),
            Case("no blocks at all", random_blocks(1)[:0]),
        ],
        expected="number i of a block is d times its code plus m, as float32 [n, 32]",
        mistakes=[
            ("the two halves of a byte are exchanged", _q4_1(lambda d, m, q: d * q + m, order=_HIGH_FIRST)),
            (
                "the two codes of a byte went side by side; the second belongs 16 places further",
                _q4_1(lambda d, m, q: d * q + m, order=_SIDE_BY_SIDE),
            ),
            ("the minimum is subtracted", _q4_1(lambda d, m, q: d * q - m)),
            ("d and m are exchanged", _q4_1(lambda d, m, q: m * q + d)),
            (
                "the codes are 0 to 15, not -8 to 7 as in Q4_0",
                _q4_1(lambda d, m, q: d * (q - 8) + m),
            ),
            ("the minimum is missing", _q4_1(lambda d, m, q: d * q)),
            ("the sum is multiplied: d times (code plus m)", _q4_1(lambda d, m, q: d * (q + m))),
            ("the high half was masked, not shifted down: x & 240 is 16 times too large", _q4_1_masked),
            ("d and m are multiplied in float16; make them float32 first", _q4_1_in_half),
        ],
    )
    for text, wrong in (
        ("blocks of 18 bytes", random_blocks(2)[:, :18]),
        ("int8 blocks", random_blocks(2).view(torch.int8)),
        ("a flat tensor", random_blocks(2).flatten()),
    ):
        expect_raises(partial(dequantize, wrong), CheckpointError, case=text)


_LOW_FIRST = [(i, 0) for i in range(16)] + [(i, 4) for i in range(16)]
_HIGH_FIRST = [(i, 4) for i in range(16)] + [(i, 0) for i in range(16)]
_SIDE_BY_SIDE = [(i, shift) for i in range(16) for shift in (0, 4)]


def _q4_1(combine: Callable[[float, float, int], float], order: list[tuple[int, int]] = _LOW_FIRST) -> Any:
    """Unpacks with plain integers; order: (byte, bits to shift) of each of the 32 codes."""

    def unpack(blocks: Tensor) -> Tensor:
        rows = []
        for block in blocks.tolist():
            d, m = struct.unpack("<ee", bytes(block[:4]))
            rows.append([combine(d, m, block[4 + byte] >> shift & 15) for byte, shift in order])
        return torch.tensor(rows, dtype=torch.float32).reshape(-1, 32)

    return unpack


def _q4_1_masked(blocks: Tensor) -> Tensor:
    numbers = _q4_1(lambda d, m, q: d * q + m)(blocks)
    minimum = blocks[:, 2:4].contiguous().view(torch.float16).float()
    return torch.cat([numbers[:, :16], (numbers[:, 16:] - minimum) * 16 + minimum], dim=1)


def _q4_1_in_half(blocks: Tensor) -> Tensor:
    d, m = blocks[:, :4].contiguous().view(torch.float16).split(1, dim=1)
    codes = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=1)
    return (codes * d + m).float()


# ---- 1.3 names ---------------------------------------------------------------------------------------------------

_NAMES = {
    "blk.0.attn_q.weight": "layers.0.self_attn.q_proj.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "layers.0.self_attn.q_proj.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.12.attention.wq.weight": "layers.12.self_attn.q_proj.weight",
    "layers.3.feed_forward.w3.weight": "layers.3.mlp.up_proj.weight",
    "tok_embeddings.weight": "embed_tokens.weight",
    "blk.29.ffn_norm.weight": "layers.29.post_attention_layernorm.weight",
    "blk.29.attn_q.bias": "layers.29.self_attn.q_proj.bias",
    "module.model.embed_tokens.weight": "embed_tokens.weight",
    "_orig_mod.module.model.layers.7.mlp.down_proj.weight": "layers.7.mlp.down_proj.weight",
    "base_model.model.model.norm.weight": "norm.weight",
    "rope.freqs": None,
    "rope_freqs.weight": None,
    "model.layers.4.self_attn.rotary_emb.inv_freq": None,
    "visual.patch_embed.weight": "visual.patch_embed.weight",
    "model.extra.weight": "model.extra.weight",
    "extra": "extra",
    "blk.0.ssm_conv.weight": "blk.0.ssm_conv.weight",
    "model.layers.0.mlp.experts.3.weight": "model.layers.0.mlp.experts.3.weight",
}


def check_names(rename: Callable[[str], str | None]) -> None:
    """Against a written table of names from the three worlds, prefixes, tables to ignore and strangers."""
    compare(
        rename,
        _NAMES.__getitem__,
        [Case(repr(name), name) for name in _NAMES],
        expected="the canonical name; None for tables that are computed; a stranger's name unchanged",
        mistakes=[
            ("prefixes come in any order and number: take them off until none is left",
             lambda name: name if _has_several_prefixes(name) else _NAMES[name]),
            ("a name that is not known comes back as None; it must be kept, so that the report can list it",
             lambda name: None if _NAMES[name] == name and _is_stranger(name) else _NAMES[name]),
            ("an unknown name comes back without its prefix; it must come back unchanged",
             _strangers_stripped),
            ("tables to ignore come back with a name; they should be None",
             lambda name: name if _NAMES[name] is None else _NAMES[name]),
            ("every name ends in .weight here; a bias must stay a bias",
             lambda name: re.sub(r"\.bias$", ".weight", _NAMES[name] or "") or None),
            ("the prefixes are left on",
             lambda name: name if name.startswith(_PREFIXES) and _NAMES[name] else _NAMES[name]),
        ],
    )  # fmt: skip


_PREFIXES = ("model.", "module.", "_orig_mod.", "base_model.")


def _is_stranger(name: str) -> bool:
    return any(word in name for word in ("visual", "extra", "ssm", "experts"))


def _strangers_stripped(name: str) -> str | None:
    if not _is_stranger(name):
        return _NAMES[name]
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _has_several_prefixes(name: str) -> bool:
    first = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return first is not None and name.removeprefix(first).startswith(_PREFIXES)


# ---- 1.4 rows ----------------------------------------------------------------------------------------------------


def check_unpermute(unpermute: Callable[[Tensor, int], Tensor]) -> None:
    """Row by row: row 2i of a head goes to i, row 2i + 1 to i + head_dim / 2."""
    generator = torch.Generator().manual_seed(14)
    compare(
        unpermute,
        _moved(lambda i, half: 2 * i if i < half else 2 * (i - half) + 1),
        [
            Case("one head of 6 rows (a bias)", torch.arange(6.0), 1),
            Case("two heads of 4 rows", torch.arange(24.0).reshape(8, 3), 2),
            Case("three heads of 8 rows", torch.randn(24, 5, generator=generator), 3),
            Case("nine heads of 4 rows, bfloat16", torch.randn(36, 36, generator=generator).bfloat16(), 9),
        ],
        expected="in each head first the rows 0, 2, 4, ... then the rows 1, 3, 5, ...",
        mistakes=[
            ("this is the way back, from half-split to interleaved",
             _moved(lambda i, half: i // 2 if i % 2 == 0 else half + i // 2)),
            ("the rows move across the borders of heads: all rows were taken as one head",
             lambda weight, heads: _moved(lambda i, half: 2 * i if i < half else 2 * (i - half) + 1)(weight, 1)),
            ("no row has moved", lambda weight, heads: weight.clone()),
            ("the halves are exchanged: the odd rows come first",
             _moved(lambda i, half: 2 * i + 1 if i < half else 2 * (i - half))),
            ("heads and pairs are exchanged in the reshape", _heads_and_pairs_exchanged),
        ],
    )  # fmt: skip
    for text, rows, heads in (("9 rows for 2 heads", 9, 2), ("6 rows for 2 heads of odd width", 6, 2)):
        expect_raises(partial(unpermute, torch.zeros(rows, 2), heads), CheckpointError, case=text)


def _moved(source: Callable[[int, int], int]) -> Callable[[Tensor, int], Tensor]:
    """Within each head, row i of the result is row source(i, head_dim // 2) of the weight."""

    def move(weight: Tensor, num_heads: int) -> Tensor:
        width = weight.shape[0] // num_heads
        rows = [head * width + source(i, width // 2) for head in range(num_heads) for i in range(width)]
        return weight[rows]

    return move


def _heads_and_pairs_exchanged(weight: Tensor, num_heads: int) -> Tensor:
    pairs = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


# ---- 1.5 the key report ------------------------------------------------------------------------------------------

_CONFIG = ModelConfig(
    "llama", vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, context_length=32,
)  # fmt: skip
_TIED = replace(_CONFIG, tie_word_embeddings=True)


def check_key_report(check_keys: Callable[[Mapping[str, tuple[int, ...]], ModelConfig], KeyReport]) -> None:
    """On small files with one thing wrong at a time; the right lists are built by going through names one by one."""

    def fields(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Any]:
        report = check_keys(found, config)
        expect_type(report, KeyReport)
        return _fields(report)

    compare(
        fields,
        _key_report(),
        _key_cases(),
        expected="what is missing, unexpected and of the wrong shape, each in its order, and whether the head is tied",
        mistakes=[
            ("a tied head is no hole: the file need not have it", _key_report(tied_is_missing=True)),
            ("a head that is not tied may not be absent", _key_report(head_may_be_absent=True)),
            ("tied comes from the config, not from what the file happens to hold", _key_report(tied_by_absence=True)),
            ("tensors that the config does not know are left out of the report", _key_report(no_unexpected=True)),
            ("shapes are not compared", _key_report(no_shapes=True)),
            ("the order of found and expected in wrong_shape is exchanged", _key_report(exchanged=True)),
            ("a tensor of the wrong shape is there, so it is not missing", _key_report(wrong_is_missing=True)),
            ("the names are sorted; keep the order of expected_shapes", _key_report(sorted_names=True)),
            (
                "probable_cause is given: its answer for the three lists and the config is a field of the report",
                _key_report(no_cause=True),
            ),
        ],
    )


def _key_cases() -> list[Case]:
    shapes = learner_engine.reference("loading").expected_shapes
    whole, headless = shapes(_CONFIG), {n: s for n, s in shapes(_CONFIG).items() if n != "lm_head.weight"}
    without = {n: s for n, s in whole.items() if n not in ("norm.weight", "layers.1.self_attn.k_proj.weight")}
    mixed = without | {"layers.0.mlp.up_proj.weight": (8, 12), "z.weight": (1,), "a.weight": (2, 2)}
    return [
        Case("a file with everything", whole, _CONFIG),
        Case("a tied head, and no lm_head.weight in the file", headless, _TIED),
        Case("a tied head, and lm_head.weight in the file as well", whole, _TIED),
        Case("no lm_head.weight, and the head is not tied", headless, _CONFIG),
        Case("two tensors missing", without, _CONFIG),
        Case("one tensor too many", whole | {"extra.weight": (3,)}, _CONFIG),
        Case("gate_proj transposed", whole | {"layers.0.mlp.gate_proj.weight": (8, 12)}, _CONFIG),
        Case("several things at once", mixed, _CONFIG),
        Case("an empty file", {}, _TIED),
    ]


def _fields(report: KeyReport) -> NamedParts:
    names = ("missing", "unexpected", "wrong_shape", "tied", "probable_cause")
    return NamedParts({name: getattr(report, name) for name in names})


def _key_report(**wrong: bool) -> Callable[[Mapping[str, tuple[int, ...]], ModelConfig], dict[str, Any]]:
    """The report by plain loops; `wrong` switches one mistake on."""

    def report(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Any]:
        expected = learner_engine.reference("loading").expected_shapes(config)
        tied = "lm_head.weight" not in found if wrong.get("tied_by_absence") else config.tie_word_embeddings
        excused = wrong.get("head_may_be_absent") or (tied and not wrong.get("tied_is_missing"))
        missing, wrong_shape, unexpected = [], [], []
        for name, shape in expected.items():
            if name in found:
                if tuple(found[name]) != shape and not wrong.get("no_shapes"):
                    pair = (shape, tuple(found[name])) if wrong.get("exchanged") else (tuple(found[name]), shape)
                    wrong_shape.append((name, *pair))
                    missing += [name] * wrong.get("wrong_is_missing", False)
            elif not (name == "lm_head.weight" and excused):
                missing.append(name)
        for name in () if wrong.get("no_unexpected") else found:
            unexpected += [name] * (name not in expected)
        if wrong.get("sorted_names"):
            missing, unexpected = sorted(missing), sorted(unexpected)
        lists = tuple(missing), tuple(unexpected), tuple(wrong_shape)
        return _fields(KeyReport(*lists, tied, "" if wrong.get("no_cause") else probable_cause(*lists, config)))

    return report
