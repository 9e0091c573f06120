"""The learner's own function among the engine's: for checks that let whole parts of the engine run with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from llmfromscratch import learner_engine


@contextlib.contextmanager
def in_engine(module: str, name: str, own: Any) -> Iterator[ModuleType]:
    """One of the engine's modules, a private copy, with OWN in the place of its object NAME within the block."""
    copy = learner_engine.reference(module)
    theirs = getattr(copy, name)
    setattr(copy, name, own)
    try:
        yield copy
    finally:
        setattr(copy, name, theirs)
