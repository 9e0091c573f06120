"""What the chapters' tests of bug hunts share: the symptom, and a broken piece mended as a learner would."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.failures import CheckFailed


def expect_symptom(hunt_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The hunt shows something, and names the fault of its own broken piece."""
    hunt = exercises.find_hunt(hunt_id)
    hunt.run()
    assert capsys.readouterr().out
    with pytest.raises(CheckFailed, match="likely mistake"):
        hunt.check(hunt.broken)


def repaired(hunt_id: str, pairs: list[tuple[str, str]], **names: Any) -> Any:
    """The broken piece with pieces of its source exchanged; names: what its notebook has imported."""
    broken = exercises.find_hunt(hunt_id).broken
    source = inspect.getsource(broken)
    for piece, instead in pairs:
        assert piece in source, f"the repair no longer fits the broken piece: {piece!r}"
        source = source.replace(piece, instead, 1)
    exec(compile("from __future__ import annotations\n" + source, "<cell>", "exec"), names)
    return names[broken.__name__]
