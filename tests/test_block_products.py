"""Products over packed weights are the products over the numbers that the blocks stand for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine, optimization, quantization
from llmfromscratch.kernels import block_kinds, lane_words, product, words
from llmfromscratch.kernels.block_kinds import BLOCKS, NF4_LEVELS, NUMBERS

ROOT = Path(__file__).parent.parent
KINDS = list(NUMBERS)
BLOCKED = [kind for kind in KINDS if kind != "int8"]
SEEDS = st.integers(0, 2**32 - 1)
# where a block has its float16 fields
FIELDS = {"int4": (0, 2), "nf4": (0,), "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
TYPES = {"int4": "Q4_1", "Q4_0": "Q4_0", "Q8_0": "Q8_0", "Q4_K": "Q4_K", "Q6_K": "Q6_K"}


def kernel():
    product.choose(optimization.multiply_rows, quantization.multiply_int8_rows)
    from llmfromscratch.kernels import block_products

    return block_products


def packed(kind: str, rows: int, width: int, random: np.random.Generator, wild: bool = False):
    """Random bytes as a weight: data and scales. Its float16 fields are ordinary numbers, or any at all."""
    data = random.integers(0, 256, (rows, block_kinds.row_bytes(kind, width)), dtype=np.uint8)
    blocks = data.reshape(rows, -1, BLOCKS[kind][1])
    for byte in () if wild or kind == "int8" else FIELDS[kind]:
        field = random.normal(0, 0.1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., byte : byte + 2] = field.view(np.uint8)
    return data, random.normal(size=rows).astype(np.float32) if kind == "int8" else np.empty(0, np.float32)


def numbers_of(kind: str, data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What a weight stands for, by gguf's own dequantization or by its definition."""
    if kind == "int8":
        return data.view(np.int8).astype(np.float32) * scales[:, None]
    with np.errstate(all="ignore"):  # infinity times 0
        if kind == "nf4":
            blocks = data.reshape(len(data), -1, 18)
            codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
            return (np.array(NF4_LEVELS, np.float32)[codes] * blocks[..., :2].view(np.float16)).reshape(len(data), -1)
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[TYPES[kind]])


def widened(kind: str, data: np.ndarray, scales: np.ndarray, width: int, dtype=np.float32) -> np.ndarray:
    output = np.full((len(data), width), 7, dtype)
    kernel().widen_on_one_thread(NUMBERS[kind], data, scales, output, 1)
    return output


def multiplied(kind: str, x: np.ndarray, data: np.ndarray, scales: np.ndarray, pieces: int = 1) -> np.ndarray:
    output = np.full((len(x), len(data)), 7, np.float32)
    kernel().product_on_one_thread(NUMBERS[kind], x, data, scales, output, pieces)
    return output


def assert_near(found: np.ndarray, wanted: np.ndarray, size: np.ndarray | float) -> None:
    """Within rounding of what was added up on the way, whose size is given; infinite where infinite is right."""
    ordinary = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~ordinary], wanted[~ordinary])
    error = np.abs(found[ordinary].astype(np.float64) - wanted[ordinary])
    assert (error <= 1e-6 * np.broadcast_to(size, wanted.shape)[ordinary]).all()


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, rows=st.integers(1, 6), blocks=st.integers(1, 5), wild=st.booleans())
def test_a_weight_made_numbers_is_what_its_format_says_whatever_its_bytes(kind, seed, rows, blocks, wild):
    width = blocks * max(BLOCKS[kind][0], 7)  # int8 needs no blocks
    data, scales = packed(kind, rows, width, np.random.default_rng(seed), wild)
    wanted = numbers_of(kind, data, scales)
    sizes = np.nan_to_num(np.abs(wanted), posinf=0).max(axis=1, keepdims=True)
    assert_near(widened(kind, data, scales, width), wanted, np.maximum(sizes, 1e-30))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_the_float32_number_rounded(kind):
    data, scales = packed(kind, 9, 512, np.random.default_rng(3))
    exact = widened(kind, data, scales, 512)
    expected = [[words.narrow(number, np.empty(0, np.uint16)) for number in row] for row in exact]
    np.testing.assert_array_equal(widened(kind, data, scales, 512, np.uint16), expected)


def test_scales_far_too_small_and_infinite_ones_are_taken_as_they_are():
    data = np.zeros((3, 34), np.uint8)
    data[:, 2] = 3
    data[:, :2] = np.array([[2.0**-24], [np.inf], [-(2.0**-14)]], np.float16).view(np.uint8)
    assert widened("Q8_0", data, np.empty(0, np.float32), 32)[:, 0].tolist() == [3 * 2.0**-24, np.inf, -3 * 2.0**-14]


def test_nf4_has_sixteen_rising_levels_with_zero_and_both_ends_among_them():
    # Dettmers et al., appendix E: quantiles of the normal distribution, eight above 0 and seven below
    offset, quantile = (1 - 1 / 30 + 1 - 1 / 32) / 2, NormalDist().inv_cdf
    upper = [quantile(share) for share in np.linspace(offset, 0.5, 9)[:-1].tolist()]
    lower = [-quantile(share) for share in np.linspace(offset, 0.5, 8)[:-1].tolist()]
    levels = np.sort([*upper, 0, *lower]) / max(upper)
    np.testing.assert_allclose(NF4_LEVELS, levels, atol=1e-6)


def test_a_width_that_is_not_whole_blocks_is_named():
    with pytest.raises(ValueError, match="blocks of 256 columns, and 288 are not whole blocks"):
        block_kinds.row_bytes("Q4_K", 288)


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    seed=SEEDS, rows=st.integers(1, 11), blocks=st.integers(1, 4), inputs=st.integers(1, 12), pieces=st.integers(1, 4)
)
def test_a_product_is_that_of_the_numbers(kind, seed, rows, blocks, inputs, pieces):
    random = np.random.default_rng(seed)
    width = blocks * max(BLOCKS[kind][0], 7)
    data, scales = packed(kind, rows, width, random)
    weight = numbers_of(kind, data, scales).astype(np.float64)
    x = random.normal(size=(inputs, width)).astype(np.float32)
    found = multiplied(kind, x, data, scales, pieces)
    assert_near(found, x @ weight.T, np.abs(x) @ np.abs(weight).T + 1e-30)


@pytest.mark.parametrize("inputs", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_rows_asked_for_are_written(kind, inputs):
    random = np.random.default_rng(5)
    data, scales = packed(kind, 13, 256, random)
    x = random.normal(size=(inputs, 256)).astype(np.float32)
    whole, part = multiplied(kind, x, data, scales), np.full((inputs, 13), 7, np.float32)
    kernel().multiply_packed(NUMBERS[kind], x, data, scales, part, 2, 9)
    np.testing.assert_array_equal(part[:, 2:9], whole[:, 2:9])
    assert (part[:, :2] == 7).all() and (part[:, 9:] == 7).all()
    numbers = np.full((13, 256), 7, np.float32)
    kernel().widen_packed(NUMBERS[kind], data, scales, numbers, 2, 9)
    np.testing.assert_array_equal(numbers[2:9], widened(kind, data, scales, 256)[2:9])
    assert (numbers[:2] == 7).all() and (numbers[9:] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_compute_what_one_thread_does(kind):
    random = np.random.default_rng(6)
    data, scales = packed(kind, 37, 256, random)
    x = random.normal(size=(1, 256)).astype(np.float32)
    found, numbers = np.empty((1, 37), np.float32), np.empty((37, 256), np.float32)
    kernel().product_on_threads(NUMBERS[kind], x, data, scales, found, 3)
    kernel().widen_on_threads(NUMBERS[kind], data, scales, numbers, 3)
    np.testing.assert_array_equal(found, multiplied(kind, x, data, scales))
    np.testing.assert_array_equal(numbers, widened(kind, data, scales, 256))


def test_one_compilation_serves_all_kinds():
    compiled = kernel().product_on_one_thread
    for kind in KINDS:
        data, scales = packed(kind, 2, 256, np.random.default_rng(1))
        multiplied(kind, np.ones((1, 256), np.float32), data, scales)
    assert len(compiled.signatures) == 1


PLAIN = """
import numpy as np
import sys
sys.path.insert(0, "tests")
from test_block_products import *

random = np.random.default_rng(9)
for kind in KINDS:
    data, scales = packed(kind, 3, 256, random)
    weight = numbers_of(kind, data, scales).astype(np.float64)
    assert_near(widened(kind, data, scales, 256), weight, np.abs(weight).max())
    for inputs in (1, 3):
        x = random.normal(size=(inputs, 256)).astype(np.float32)
        assert_near(multiplied(kind, x, data, scales, 2), x @ weight.T, np.abs(x) @ np.abs(weight).T)
print(type(kernel().multiply_packed).__name__)
"""


def test_without_a_compiler_the_same_source_computes_the_same():
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PLAIN]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "function"), done.stderr


# ---- words -------------------------------------------------------------------------------------------------------


def compiled(function):
    from numba import njit

    from llmfromscratch.kernels import numba_lane_words  # noqa: F401 - tells Numba what the words mean

    return njit(function)


ALL_HALVES = np.arange(2**16, dtype=np.uint16)


def test_every_float16_is_read_as_numpy_reads_it_with_the_processors_instruction_and_without():
    from llmfromscratch.kernels import numba_words

    def at_odd_bytes(rows, output):
        for i in range(len(output)):
            output[i] = words.half(rows, 0, 2 * i + 1)

    def sixteen_times(rows, output):
        for i in range(len(output)):
            lane_words.put(output, i, 0, lane_words.half(rows, 0, 2 * i + 1))

    def by_arithmetic(bits, output):
        for i in range(len(bits)):
            output[i] = numba_words.by_arithmetic(bits[i])

    wanted = ALL_HALVES.view(np.float16).astype(np.float32)
    rows = np.concatenate([[0], ALL_HALVES.view(np.uint8), [0]]).astype(np.uint8)[None]
    found, without, many = np.empty(2**16, "f4"), np.empty(2**16, "f4"), np.empty((2**16, 16), "f4")
    compiled(at_odd_bytes)(rows, found)
    compiled(sixteen_times)(rows, many)
    compiled(by_arithmetic)(ALL_HALVES, without)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(many, np.repeat(wanted[:, None], 16, axis=1))
    np.testing.assert_array_equal(without, wanted)
    assert [words.half(rows, 0, byte) for byte in (1, 513)] == [wanted[0], wanted[256]]


def test_a_processor_without_float16_is_served_too(monkeypatch):
    from llmfromscratch.kernels import numba_lane_words, numba_words

    monkeypatch.setattr(numba_words, "HAS_HALVES", False)
    monkeypatch.setattr(numba_lane_words, "HAS_HALVES", False)

    def read(rows, output):
        lane_words.put(output, 0, 0, lane_words.half(rows, 0, 1))
        output[0, 0] = words.half(rows, 0, 3)

    rows, output = (
        np.array([[0, *np.array([1.5, -3], np.float16).view(np.uint8), 0]], np.uint8),
        np.empty((1, 16), "f4"),
    )
    compiled(read)(rows, output)
    assert output.tolist() == [[-3.0, *[1.5] * 15]]


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS, shift=st.integers(0, 7), mask=st.integers(0, 255))
def test_sixteen_numbers_at_once_compute_what_arrays_do(seed, shift, mask):
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (2, 40), dtype=np.uint8)
    x = random.normal(size=(2, 40)).astype(np.float32)
    plain, found = np.zeros((9, 16), np.float32), np.zeros((9, 16), np.float32)
    every_word(data, x, shift, mask, plain)
    EVERY_WORD(data, x, shift, mask, found)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)


def every_word(data, x, shift, mask, output):
    codes, values, others = lane_words.lanes(data, 1, 3), lane_words.lanes(x, 0, 5), lane_words.lanes(x, 1, 24)
    lane_words.put(output, 0, 0, lane_words.real(codes >> shift & mask))
    lane_words.put(output, 1, 0, lane_words.real(codes << shift | mask))
    lane_words.put(output, 2, 0, lane_words.real(lane_words.signed_lanes(data, 0, 24) | codes))
    lane_words.put(output, 3, 0, values * others + np.float32(2))
    lane_words.put(output, 4, 0, (values - others) * np.float32(3))
    lane_words.put(output, 5, 0, lane_words.look_up(values, codes))
    running = lane_words.zeros()
    running += values
    running += others
    lane_words.put(output, 6, 0, running)
    output[7, 0] = lane_words.total(values)
    lane_words.put(output, 8, 0, np.float32(1) - values)


EVERY_WORD = compiled(every_word)


# ---- a learner's product -----------------------------------------------------------------------------------------


def test_the_int8_product_that_is_compiled_in_is_the_learners_and_the_packages_again_afterwards(tmp_path):
    data, scales = np.ones((3, 5), np.uint8), np.full(3, 2, np.float32)
    x = np.ones((1, 5), np.float32)
    assert multiplied("int8", x, data, scales).tolist() == [[10.0] * 3] and product.keep
    source = learner_engine.reference_path("quantization").read_text(encoding="utf-8")
    old = "output[m, row] = total * scales[row]"
    assert source.count(old) == 1
    (tmp_path / "quantization.py").write_text(source.replace(old, old + " + np.float32(1)"), encoding="utf-8")
    learner_engine.activate(tmp_path)
    try:
        assert multiplied("int8", x, data, scales).tolist() == [[11.0] * 3]
        assert not product.keep  # another learner's code with the same name may come next
    finally:
        learner_engine.deactivate()
    assert multiplied("int8", x, data, scales).tolist() == [[10.0] * 3] and product.keep


def test_code_on_disk_is_known_by_every_source_that_is_in_it(tmp_path, monkeypatch):
    kernel()
    shutil.copytree(product.HERE, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(product, "HERE", tmp_path / "kernels")
    editions = {product.edition()}
    for name in product.PARTS:
        with (tmp_path / "kernels" / f"{name}.py").open("a", encoding="utf-8") as file:
            file.write("\n# another\n")
        editions.add(product.edition())
    assert len(editions) == len(product.PARTS) + 1


def test_what_is_compiled_in_names_all_files_that_it_is_made_of():
    """Every module of ours that block_products imports from, directly or not, is part of the edition."""
    import ast

    found, waiting = set(), ["block_products"]
    while waiting:
        name = waiting.pop()
        found.add(name)
        tree = ast.parse((product.HERE / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmfromscratch.kernels"):
                inner = node.module.split(".")[2:] or [each.name for each in node.names]
                waiting += set(inner) - found
    assert found - {"product"} <= set(product.PARTS)
