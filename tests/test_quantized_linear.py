"""Packed layers compute what a float layer with the unpacked weight computes, whichever kernel does it.

The oracle is a product in float64 with `PackedWeight.dequantize`, which test_packed_weight.py holds against others.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional as F

from llmfromscratch import packed_products, quantization, quantized_linear
from llmfromscratch.errors import RequestError
from llmfromscratch.packed_weight import BLOCKS, PackedWeight
from llmfromscratch.quantized_linear import (
    KERNELS,
    MAX_ROWS,
    QuantizedEmbedding,
    QuantizedLinear,
    W8A8Linear,
    integer_product,
)

WIDTH, ROWS = 256, 48


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_of(kind: str, rows: int = ROWS, width: int = WIDTH) -> PackedWeight:
    weight = numbers(rows, width, seed=3)
    if kind == "int8":
        return PackedWeight.of(quantization.quantize(weight, 8, None, symmetric=True))
    if kind == "Q8_0":
        return PackedWeight.of(quantization.quantize(weight, 8, 32, symmetric=True))
    if kind in ("int4", "int3"):
        return PackedWeight.of(quantization.quantize(weight, int(kind[-1]), 32), compact=True)
    if kind == "nf4":
        return PackedWeight.nf4(weight)
    columns, nbytes = BLOCKS[kind]  # GGUF's others: any bytes, with a scale that is a small number
    data = torch.randint(256, (rows, width // columns, nbytes), generator=torch.Generator().manual_seed(1))
    data = data.to(torch.uint8)
    place = 208 if kind == "Q6_K" else 0
    data[:, :, place : place + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if kind == "Q4_K":
        data[:, :, 2:4] = data[:, :, 0:2]
    return PackedWeight(kind, width, data.flatten(1), torch.empty(0))


def expected(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return x.double() @ packed.dequantize(torch.float64).T


def close(found: torch.Tensor, wanted: torch.Tensor, unit: float) -> None:
    """Within so many parts of the largest number."""
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=unit * wanted.abs().max().item())


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", BLOCKS)
@torch.inference_mode()
def test_every_kernel_multiplies_every_kind_for_few_and_for_many_rows(kind, kernel):
    packed = packed_of(kind)
    for dtype, unit in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)):
        layer = QuantizedLinear(packed, dtype=dtype, kernel=kernel)
        for rows in (1, 2, MAX_ROWS, MAX_ROWS + 1, 40):
            x = numbers(rows, WIDTH, seed=rows).to(dtype)
            if kernel == "compiled" and (kind == "int3" or dtype in (torch.float16, torch.float64)):
                with pytest.raises(RequestError, match='kernel="compiled" cannot be had'):
                    layer(x)
                continue
            found = layer(x)
            assert found.dtype == dtype
            close(found, expected(x, packed), unit)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@torch.inference_mode()
def test_few_rows_of_bfloat16_are_summed_in_float32_and_rounded_once(kind):
    packed, x = packed_of(kind), numbers(1, WIDTH).bfloat16()
    exact = expected(x, packed)
    found = QuantizedLinear(packed, dtype=torch.bfloat16, kernel="compiled")(x)
    # half a unit of bfloat16's last place, and a little for float32's own rounding
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@torch.inference_mode()
def test_weights_are_never_rounded_to_the_compute_dtype_before_float32_has_been_left():
    # a scale of 1 + 2**-10 does not exist in bfloat16: rounded by itself, it would be 1
    scales = torch.full((2,), 1 + 2**-10)
    packed = PackedWeight("int8", 32, torch.full((2, 32), 127, dtype=torch.uint8), scales)
    assert packed.dequantize(torch.bfloat16)[0, 0] == torch.tensor(127 * (1 + 2**-10)).bfloat16()
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    compiled = QuantizedLinear(packed, dtype=torch.bfloat16, kernel="compiled")(x)
    assert compiled[0, 0] == torch.tensor(32 * 127 * (1 + 2**-10)).bfloat16()


@torch.inference_mode()
def test_bias_order_and_leading_dimensions_are_a_linear_s():
    packed, bias, order = packed_of("int4"), numbers(ROWS), torch.randperm(WIDTH)
    x = numbers(2, 3, WIDTH)
    layer = QuantizedLinear(packed, bias, order=order)
    wanted = F.linear(x[..., order].double(), packed.dequantize(torch.float64), bias.double())
    close(layer(x), wanted, 2e-6)
    assert layer.in_features == WIDTH and layer.out_features == ROWS and torch.equal(layer.bias, bias)


@pytest.mark.parametrize("kernel", ["auto", "plain"])
@torch.inference_mode()
def test_a_weight_larger_than_a_tile_is_computed_in_tiles(kernel, monkeypatch):
    monkeypatch.setattr(quantized_linear, "_TILE", 7 * WIDTH)
    packed = packed_of("int4")
    for rows in (3, 40):
        x = numbers(rows, WIDTH)
        close(QuantizedLinear(packed, kernel=kernel)(x), expected(x, packed), 2e-6)


def test_threads_that_compute_at_once_widen_into_tiles_of_their_own():
    packed, other = packed_of("int4"), packed_of("nf4")
    mine, others = quantized_linear._widened(packed, torch.float32), []
    thread = threading.Thread(target=lambda: others.append(quantized_linear._widened(other, torch.float32)))
    thread.start()
    thread.join()
    assert torch.equal(mine, packed.dequantize()) and torch.equal(others[0], other.dequantize())


@torch.inference_mode()
def test_without_numba_everything_is_plain_and_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(packed_products, "_lacking", lambda *around: "Numba is not here, so PyTorch computes them.")
    packed, x = packed_of("int8"), numbers(2, WIDTH)
    assert torch.equal(QuantizedLinear(packed)(x), F.linear(x, packed.dequantize()))
    with pytest.raises(RequestError, match='"compiled" cannot be had: Numba is not here'):
        QuantizedLinear(packed, kernel="compiled")(x)


@torch.inference_mode()
def test_a_pinned_kernel_is_the_one_that_computes(monkeypatch):
    packed, x = packed_of("int8"), numbers(2, WIDTH)
    called = []
    monkeypatch.setattr(packed_products, "multiply", lambda x, packed: called.append("compiled") or expected(x, packed))
    monkeypatch.setattr(quantized_linear, "plain_product", lambda x, packed: called.append("plain") or x @ x.T)
    monkeypatch.setitem(quantized_linear._TORCH_PRODUCTS, "int8", lambda x, *form: called.append("torch") or x)
    layer = QuantizedLinear(packed)
    for kernel in ("auto", "compiled", "plain", "torch"):
        layer.kernel = kernel
        with contextlib.suppress(RuntimeError):  # what was put in gives other shapes; that it was asked counts
            layer(x)
    assert called == ["compiled", "compiled", "plain", "torch"]


# ---- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_embedding_unpacks_the_rows_it_is_asked_for(kind):
    packed = packed_of(kind)
    layer = QuantizedEmbedding(packed, torch.bfloat16)
    ids = torch.tensor([[5, 0], [47, 5]])
    assert torch.equal(layer(ids), packed.dequantize(torch.bfloat16)[ids])
    assert (layer.num_embeddings, layer.embedding_dim) == (ROWS, WIDTH)


# ---- integers ----------------------------------------------------------------------------------------------------


def test_sums_of_integer_products_are_exact_where_int8_and_int16_would_wrap():
    # 4096 products of 127 * 127 are 66 million: beyond int16, and odd, which float32 could not hold
    codes = torch.randint(-127, 128, (5, 4096), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weights = torch.randint(-127, 128, (9, 4096), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    codes[0], weights[0], weights[1] = 127, 127, -127
    codes[0, -1] = 126
    sums = integer_product(codes, weights)
    assert sums.dtype == torch.int32
    assert torch.equal(sums.long(), codes.long() @ weights.long().T)
    assert sums[0, 0] == 127 * 127 * 4095 + 126 * 127 and sums[0, 1] == -sums[0, 0]


@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 1, 1), (1, 7, 33), (3, 16, 20), (17, 5, 64), (33, 9, 31)])
def test_integer_products_take_any_shape(tokens, rows, width):
    codes, weights = (torch.randint(-127, 128, (n, width)).to(torch.int8) for n in (tokens, rows))
    assert torch.equal(integer_product(codes, weights).long(), codes.long() @ weights.long().T)


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE", "DEFAULT"])
def test_integer_products_are_exact_on_processors_without_vnni_too(instructions):
    # without it oneDNN adds pairs of products in int16, which stops at 32,767
    script = (
        "import torch\n"
        "from llmfromscratch.quantized_linear import integer_product\n"
        "for tokens, width in ((1, 64), (1, 3000), (40, 576), (40, 3000)):\n"
        "    for code, weight in ((127, 127), (127, -127), (-128, -128), (-127, 126)):\n"
        "        codes = torch.full((tokens, width), code, dtype=torch.int8)\n"
        "        weights = torch.full((24, width), weight, dtype=torch.int8)\n"
        "        assert (integer_product(codes, weights) == width * code * weight).all(), (tokens, width, code)\n"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_w8a8_is_integers_times_both_scales(dtype):
    packed, bias = packed_of("int8"), numbers(ROWS, seed=9).to(dtype)
    x = numbers(2, 5, WIDTH).to(dtype)
    x[0, 1] = 0  # a token of zeros
    layer = W8A8Linear(packed, bias, dtype)
    rows = x.reshape(-1, WIDTH).float()
    scales = rows.abs().amax(dim=1) / 127
    scales[scales == 0] = 1
    codes = (rows / scales[:, None]).round().long()
    sums = codes @ packed.data.view(torch.int8).long().T
    wanted = sums.double() * scales[:, None].double() * packed.scales.double()
    found = layer(x)
    assert found.dtype == dtype and found.shape == (2, 5, ROWS)
    unit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    close(found.view(-1, ROWS) - bias, wanted, unit)
    # and near to the product of the numbers themselves
    close(found.view(-1, ROWS) - bias, expected(x.reshape(-1, WIDTH), packed), 3e-2)


@torch.inference_mode()
def test_a_token_of_w8a8_does_not_depend_on_its_company():
    layer, x = W8A8Linear(packed_of("int8")), numbers(30, WIDTH)
    x[7] *= 1000  # a scale for all rows would leave the others nothing
    assert torch.equal(layer(x)[3:4], layer(x[3:4]))


def test_w8a8_wants_int8():
    with pytest.raises(RequestError, match="need weights in int8; these are nf4"):
        W8A8Linear(packed_of("nf4"))


# ---- as a module -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
@torch.inference_mode()
def test_what_a_linear_s_weight_is_asked_for_is_answered(kind):
    packed = packed_of(kind)
    weight = QuantizedLinear(packed, dtype=torch.bfloat16).weight
    assert weight.shape == (ROWS, WIDTH) and len(weight) == ROWS and weight.numel() == ROWS * WIDTH
    assert (weight.dtype, weight.device.type, weight.element_size()) == (torch.bfloat16, "cpu", 2)
    assert weight.nbytes == packed.nbytes and torch.equal(weight.detach(), packed.dequantize(torch.bfloat16))


@pytest.mark.parametrize("make", [QuantizedLinear, W8A8Linear, QuantizedEmbedding])
@torch.inference_mode()
def test_a_cast_changes_what_is_computed_in_and_leaves_codes_and_scales_alone(make):
    packed = packed_of("int8")
    layer = make(packed, dtype=torch.float32)
    scales = packed.scales.clone()
    layer.to(torch.bfloat16)
    assert layer.dtype == layer.weight.dtype == torch.bfloat16
    assert layer.scales.dtype == torch.float32 and torch.equal(layer.scales, scales)
    assert torch.equal(layer.packed().dequantize(), packed.dequantize())
    x = torch.tensor([1, 2]) if make is QuantizedEmbedding else numbers(2, WIDTH).bfloat16()
    assert layer(x).dtype == torch.bfloat16


@torch.inference_mode()
def test_copies_and_saved_states_compute_the_same():
    layer, x = QuantizedLinear(packed_of("int4"), numbers(ROWS)), numbers(3, WIDTH)
    wanted = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), wanted)
    zeros = PackedWeight("int4", WIDTH, torch.zeros_like(layer.data), torch.empty(0))
    other = QuantizedLinear(zeros, numbers(ROWS, seed=5))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), wanted)
    assert sorted(layer.state_dict()) == ["bias", "data", "scales"]


@torch.inference_mode()
def test_another_weight_may_be_put_in_the_place():
    layer, x = QuantizedLinear(packed_of("int4")), numbers(3, WIDTH)
    for kernel in KERNELS:
        layer.kernel = kernel
        for kind in ("nf4", "int8", "int4"):
            other = packed_of(kind)
            layer.put(other)
            close(layer(x), expected(x, other), 2e-6)
