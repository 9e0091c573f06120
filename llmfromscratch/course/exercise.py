"""What an exercise and a bug hunt are: the entries that the files in `exercises/` list."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmfromscratch import learner_engine


@dataclass(frozen=True)
class Exercise:
    """One object of the package that a learner writes.

    id: chapter and number, "1.3". object: dotted path of a top-level function or class of a replaceable module or of
    the chapter's sketches. check: takes the learner's object and raises CheckFailed where it is wrong. hints: three,
    each saying more than the one before. minutes: what it takes to write. seconds: how long the check may run.
    """

    id: str
    object: str
    title: str
    points: int
    check: Callable[[Any], None]
    hints: tuple[str, str, str]
    minutes: int
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*\.[1-9]\d*", self.id):
            raise ValueError(f"exercise id {self.id!r}: expected chapter and number, as in '1.3'")
        if len(self.hints) != 3:
            raise ValueError(f"exercise {self.id} has {len(self.hints)} hints: give three")
        if self.points < 1:
            raise ValueError(f"exercise {self.id} gives {self.points} points: give at least one")

    @property
    def module(self) -> str:
        """Dotted path of the module, e.g. "llmfromscratch.loading"."""
        return self.object.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The object's own name, e.g. "unpermute"."""
        return self.object.rpartition(".")[2]

    @property
    def replaceable(self) -> str | None:
        """Short name of the replaceable module it belongs to, or None for a sketch."""
        short = self.module.removeprefix(f"{learner_engine.PACKAGE}.")
        return short if short in learner_engine.REPLACEABLE else None


@dataclass(frozen=True)
class BugHunt:
    """A broken piece to find and mend.

    id: chapter and letter, "1.a". story: what a user reports. run: shows the symptom (prints, draws). broken: the
    object with the fault, or its source as text, shown to the learner. check: takes the mended object and raises
    CheckFailed where the fault is still there.
    """

    id: str
    title: str
    story: str
    run: Callable[[], Any]
    broken: Any
    check: Callable[[Any], None]
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*\.[a-z]", self.id):
            raise ValueError(f"bug hunt id {self.id!r}: expected chapter and letter, as in '1.a'")
