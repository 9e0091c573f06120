"""The machine's limits: measured once, asked for by dtype, and plausible beside other ways to read and multiply."""

from __future__ import annotations

import time

import pytest
import torch

from llmfromscratch import machine_limits
from llmfromscratch.machine_limits import Limits, measure


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(machine_limits, "_BYTES", {"cpu": 16 * 1024**2})
    monkeypatch.setattr(machine_limits, "_SIDES", {"cpu": (128, 256)})
    monkeypatch.setattr(machine_limits, "_SECONDS", 0.05)
    monkeypatch.setattr(machine_limits, "_known", {})


def test_no_reading_and_no_product_is_quicker_than_the_limits_say(quick):
    """Within a wide margin: other programs may run."""
    limits = measure(dtypes=[torch.float32])
    numbers, left = torch.ones(4 * 1024**2), torch.ones(256, 256)
    reading, computing = [], []
    for _ in range(20):
        began = time.perf_counter()
        numbers.max()
        reading.append(time.perf_counter() - began)
        began = time.perf_counter()
        left @ left
        computing.append(time.perf_counter() - began)
    assert numbers.nbytes / min(reading) < 4 * limits.bandwidth < 4e13
    assert 2 * 256**3 / min(computing) < 4 * limits.peaks["float32"] < 4e16


def test_limits_are_measured_once_for_a_number_of_threads(quick):
    first = measure()
    assert list(first.peaks) == ["float32", "bfloat16"]
    assert measure() is first
    again = measure(again=True)
    assert again is not first
    assert measure() is again
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        other = measure()
        assert other is not again
        assert other.where == f"cpu, {before + 1} threads"
    finally:
        torch.set_num_threads(before)


def test_another_dtype_is_measured_beside_the_known_ones(quick):
    first = measure(dtypes=[torch.float32])
    both = measure(dtypes=[torch.float64])
    assert list(both.peaks) == ["float32", "float64"]
    assert (both.bandwidth, both.peaks["float32"]) == (first.bandwidth, first.peaks["float32"])


def test_a_limit_is_asked_for_by_dtype_or_by_its_name():
    limits = Limits(50e9, {"float32": 2e11, "bfloat16": 8e11}, "cpu, 2 threads")
    assert limits.peak(torch.bfloat16) == limits.peak("bfloat16") == limits.peak("torch.bfloat16") == 8e11
    assert limits.ridge(torch.float32) == pytest.approx(4.0)
    assert str(limits) == (
        "cpu, 2 threads: memory is read at 50 GB/s; products reach float32 200 GFLOP/s, bfloat16 800 GFLOP/s"
    )
    with pytest.raises(ValueError, match=r"the peak in float16 was not measured, only in float32, bfloat16; measure"):
        limits.peak(torch.float16)


def test_a_device_that_is_not_there_is_torchs_error():
    with pytest.raises(RuntimeError):
        measure("no such device")
