"""Each check is made to fail, and must say what is wrong and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from llmfromscratch import attention_triton, devices, doctor, hub
from llmfromscratch.doctor import Check

Version = namedtuple("Version", "major minor micro releaselevel serial")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMFROMSCRATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_this_environment_passes_and_every_problem_has_a_remedy(smollm2_gguf: Path) -> None:
    found = doctor.checks()
    assert [check for check in found if check.status == "fail"] == []
    assert all(check.remedy for check in found if check.status != "ok")
    names = [check.name for check in found]
    assert len(set(names)) == len(names) == 13


def test_the_report_shows_each_finding_with_its_remedy_and_counts_them() -> None:
    found = [Check("a", "ok", "is fine"), Check("long", "warn", "odd", "look"), Check("b", "fail", "broken", "mend it")]
    assert doctor.report(found).splitlines() == [
        "✓ a     is fine",
        "! long  odd",
        "        -> look",
        "✗ b     broken",
        "        -> mend it",
        "3 checks: 1 failed, 1 to look at.",
    ]
    assert doctor.report(found[:1]).endswith("All is well.")


def test_only_a_failed_check_makes_the_exit_code_nonzero() -> None:
    assert doctor.exit_code([Check("a", "ok", ""), Check("b", "warn", "", "x")]) == 0
    assert doctor.exit_code([Check("a", "ok", ""), Check("b", "fail", "", "x")]) == 1


def test_an_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python().status == "ok"
    monkeypatch.setattr(sys, "version_info", Version(3, 10, 9, "final", 0))
    check = doctor.check_python()
    assert check.status == "fail" and "3.11 or newer" in check.remedy


def test_a_32_bit_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    check = doctor.check_python()
    assert check.status == "fail" and "64-bit" in check.remedy


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "regex" else object())
    check = doctor.check_packages()
    assert (check.status, check.finding, check.remedy) == ("fail", "missing: regex", "pip install regex")


def test_a_missing_torch_is_a_finding_and_the_other_checks_still_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {check.name: check for check in doctor.checks()}
    assert found["torch"].status == "fail" and "pip install" in found["torch"].remedy
    assert {"python", "packages", "model", "compiler", "engine", "course"} <= set(found)
    assert "bf16" not in found


def test_a_torch_whose_library_does_not_load_is_a_finding(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    check = doctor.check_torch()
    assert check.status == "fail" and "OSError: libc10.so: cannot open" in check.finding


def test_an_old_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    check = doctor.check_torch()
    assert check.status == "fail" and "torch>=2.6" in check.remedy


@pytest.mark.parametrize(("cuda", "build"), [(None, "build"), ("12.8", "CUDA 12.8 build")])
def test_the_build_of_torch_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str | None, build: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    check = doctor.check_torch()
    assert check.status == "ok" and check.finding.startswith(f"torch {torch.__version__}") and build in check.finding


@pytest.mark.parametrize(
    ("threads", "cores", "omp", "status", "remedy"),
    [
        (2, 2, None, "ok", ""),
        (4, 8, None, "ok", ""),
        (8, 2, None, "warn", "OMP_NUM_THREADS=2"),
        (1, 8, "1", "warn", "Unset OMP_NUM_THREADS"),
        (1, 8, None, "warn", "OMP_NUM_THREADS=4"),
        (2, 2, "many", "warn", "not a number"),
        (2, 2, "0", "warn", "not a number"),
        (2, 2, "2,1", "ok", ""),
    ],
)
def test_threads_that_do_not_fit_the_cores_are_named(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, omp: str | None, status: str, remedy: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    check = doctor.check_threads()
    assert check.status == status and remedy in check.remedy and bool(check.remedy) == bool(remedy)


def test_a_container_s_share_of_the_processor_counts_as_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for text, cores in [("150000 100000\n", 2), ("max 100000\n", 8), ("10000 100000\n", 1), ("nonsense", 8)]:
        monkeypatch.setattr(doctor.Path, "read_text", lambda self, encoding, text=text: text)
        assert doctor.usable_cores() == cores


def test_bf16_that_measures_slow_although_it_should_be_fast_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "fast_dtype", lambda device: (torch.bfloat16, "A reason."))
    monkeypatch.setattr(doctor, "_bf16_speedup", lambda: 0.5)
    check = doctor.check_bf16()
    assert check.status == "warn" and "float32" in check.remedy
    assert "bfloat16 on the CPU: A reason." in check.finding and "2.00 times as long" in check.finding
    monkeypatch.setattr(doctor, "_bf16_speedup", lambda: 2.0)
    assert doctor.check_bf16().status == "ok"
    monkeypatch.setattr(devices, "fast_dtype", lambda device: (torch.float32, "No such instructions."))
    monkeypatch.setattr(doctor, "_bf16_speedup", lambda: 0.1)
    assert doctor.check_bf16().status == "ok"


def test_the_measured_ratio_is_a_positive_number() -> None:
    assert 0 < doctor._bf16_speedup() < 1000


def test_an_accelerator_is_named_and_a_driver_that_torch_cannot_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.check_accelerator() == Check("gpu", "ok", "none; everything runs on the CPU")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    check = doctor.check_accelerator()
    assert check.status == "warn" and "TORCH_BUILD=default" in check.remedy
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    check = doctor.check_accelerator()
    assert check.status == "warn" and "driver" in check.remedy
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert doctor.check_accelerator().finding.startswith("MPS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(devices, "fast_dtype", lambda device: (torch.bfloat16, "a reason"))
    monkeypatch.setattr(attention_triton, "unavailable", lambda device, dtype: None)
    found = "CUDA: card 0, card 1; Triton compiles kernels for it"
    assert doctor.check_accelerator() == Check("gpu", "ok", found)
    monkeypatch.setattr(attention_triton, "unavailable", lambda device, dtype: f"no {dtype} on {device}.")
    check = doctor.check_accelerator()
    assert check.status == "warn" and check.finding == "CUDA: card 0, card 1; no torch.bfloat16 on cuda."


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda device: 400_000_000)
    check = doctor.check_memory()
    assert check.status == "fail" and check.finding.startswith("0.4 GB free") and "Close" in check.remedy


def test_a_cache_folder_that_cannot_be_written_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_cache_folder().status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check = doctor.check_cache_folder()
    assert check.status == "fail" and str(cache) in check.finding and "LLMFROMSCRATCH_CACHE" in check.remedy


def test_a_full_disk_fails_unless_the_model_is_there_already(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5_000_000))
    check = doctor.check_cache_folder()
    assert check.status == "fail" and "Make room for 284 MB" in check.remedy
    monkeypatch.setattr(hub, "is_cached", lambda model: True)
    assert doctor.check_cache_folder().status == "ok"


def test_a_model_that_is_missing_is_a_warning_and_one_that_is_damaged_fails(cache: Path) -> None:
    model = hub.known_models()[hub.DEFAULT_MODEL]
    check = doctor.check_model()
    assert check.status == "warn" and "llmfromscratch models --fetch smollm2-135m-instruct" in check.remedy
    model.folder.mkdir(parents=True)
    model.file.write_bytes(b"GGUF and then nothing")
    check = doctor.check_model()
    assert check.status == "fail" and "damaged" in check.finding and f"Delete {model.file}" in check.remedy
    model.file.unlink()
    model.hub_folder.mkdir()
    assert doctor.check_model().status == "ok"


def test_a_missing_compiler_is_a_warning_and_cxx_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for system, remedy in [("linux", "install g++"), ("darwin", "xcode-select"), ("win32", "Visual Studio")]:
        monkeypatch.setattr(sys, "platform", system)
        check = doctor.check_compiler()
        assert check.status == "warn" and remedy in check.remedy
    monkeypatch.setenv("CXX", "my-compiler")
    assert "CXX=my-compiler is not on the PATH" in doctor.check_compiler().finding
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert doctor.check_compiler() == Check("compiler", "ok", "/bin/my-compiler")


def test_an_engine_variable_that_points_nowhere_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMFROMSCRATCH_ENGINE", raising=False)
    assert doctor.check_engine_variable().status == "ok"
    monkeypatch.setenv("LLMFROMSCRATCH_ENGINE", str(tmp_path / "gone"))
    check = doctor.check_engine_variable()
    assert check.status == "fail" and "Unset LLMFROMSCRATCH_ENGINE" in check.remedy
    monkeypatch.setenv("LLMFROMSCRATCH_ENGINE", str(tmp_path))
    (tmp_path / "engine.py").write_text("", encoding="utf-8")
    check = doctor.check_engine_variable()
    assert check.status == "warn" and "no module that can replace ours" in check.finding
    (tmp_path / "kv_cache.py").write_text("", encoding="utf-8")
    check = doctor.check_engine_variable()
    assert check.status == "ok" and check.finding.startswith("kv_cache from ")


def test_missing_course_packages_are_a_warning_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "matplotlib" else object())
    check = doctor.check_course()
    assert check.status == "warn" and check.finding == "missing: matplotlib" and "make lab" in check.remedy


def test_the_doctor_itself_needs_neither_torch_nor_any_other_package() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'tqdm', 'filelock', 'platformdirs', 'psutil'])); "
    code += "from llmfromscratch import doctor; print(doctor.report(doctor.checks()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "✗ torch" in done.stdout
