"""The course around the engine: what a notebook calls.

Nothing here imports the engine's replaceable modules: `start()` chooses first whose they are.
"""

from __future__ import annotations

from llmfromscratch.course.board import board
from llmfromscratch.course.building import build
from llmfromscratch.course.checking import check
from llmfromscratch.course.clinic import clinic
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.hints import hint, solution
from llmfromscratch.course.starting import start

__all__ = ["CheckFailed", "board", "build", "check", "clinic", "hint", "solution", "start"]
