"""What tests that run notebooks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmfromscratch.course.authoring import solved_outputs

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**solved_outputs.NO_PROGRESS_BARS, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def notebook_environment(monkeypatch):
    """For kernels: this package, no course and no engine of somebody's, no progress bars."""
    monkeypatch.delenv("LLMFROMSCRATCH_ENGINE", raising=False)
    monkeypatch.delenv("LLMFROMSCRATCH_COURSE", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
