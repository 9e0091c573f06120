"""clinic(): tells of a fault, shows it, and knows whether the repair is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_package import make_package, run_notebook


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_package(tmp_path_factory.mktemp("toy"))


def test_a_hunt_is_told_shown_and_its_repair_checked(packages: Path, tmp_path: Path):
    (tmp_path / ".llmfromscratch").touch()
    ran = run_notebook(packages, tmp_path, [
        "from llmfromscratch.course import *\nfrom llmfromscratch.course.exercises import ch01\nstart()",
        'clinic("1.a")',
        "def halve(number):\n    return number // 4",
        'clinic("1.a", halve)',
        "def halve(number):\n    while True:\n        number += 1",
        "import dataclasses\n"
        "ch01.CLINIC[0] = dataclasses.replace(ch01.CLINIC[0], seconds=0.3)\n" 'clinic("1.a", halve)',
        'clinic("1.a", ch01.halve)',
        "def halve(number):\n    return number // 2",
        'clinic("1.a", halve)',
        'clinic("1.b")',
        'clinic("1.a", halve(8))',
    ])  # fmt: skip
    assert ran.stderr() == ""
    shown = ran.text(1)
    assert shown.startswith("1.a a poor half\n\nHalves come out small.\n\nhalf of 9 is 3\n")
    assert "def halve(number):\n    return number // 3\n" in shown
    assert 'Copy it into a cell, mend it, and call clinic("1.a", halve).' in shown
    assert ran.error(3).traceback == [
        "✗ 1.a a poor half: not right yet", "  expected: half of it",
        "  smallest case that fails: 8: got 2, expected 4",
        '  next: clinic("1.a") shows the symptom again',
    ]  # fmt: skip
    assert "stopped after 0.3 s in line" in ran.error(5).evalue
    assert "this is still the broken one" in ran.error(6).evalue
    assert ran.text(8) == "✓ 1.a a poor half: found and mended\n"
    assert "there is no bug hunt '1.b': this chapter has 1.a" in ran.error(9).evalue
    assert ran.error(10).traceback == [
        "✗ 1.a a poor half: clinic got int '4' instead of a function",
        '  expected: the mended function itself, not its name and not what a call of it gives: clinic("1.a",',
        "    halve)",
        '  next: clinic("1.a") shows the code with the fault; mend a copy of it and hand that in',
    ]
    assert list(json.loads((tmp_path / "progress.json").read_text(encoding="utf-8"))["hunts"]) == ["1.a"]
