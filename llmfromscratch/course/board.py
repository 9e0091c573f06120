"""`board()`: whose each module of the engine is, points got, what is open, and how fast it went when last measured.

A module has a row once a chapter teaches it or something was built or measured; the others share one line below.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course import assembling, exercises, progress
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.errors import LLMFromScratchError

_HEADINGS = ("module", "engine", "points", "open exercises", "tok/s")
# in the order of the chapters that write them
_MODULES = (
    "loading", "model", "tokenizer", "kv_cache", "attention", "scheduler", "sampling", "optimization", "quantization",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One module: whose it is, points got and possible, open exercises, tokens per second (None: not measured)."""

    module: str
    engine: str
    got: int
    possible: int
    open: tuple[str, ...]
    speed: float | None

    def cells(self) -> tuple[str, ...]:
        """The row as texts, in the order of the headings."""
        points = f"{self.got} / {self.possible}" if self.possible else "-"
        speed = "-" if self.speed is None else f"{self.speed:.1f}"
        return self.module, self.engine, points, ", ".join(self.open) or "-", speed


@dataclass(frozen=True)
class Board:
    """The learner's board: a table in a notebook, aligned text elsewhere.

    later: how many modules have no row yet.
    """

    rows: tuple[Row, ...]
    chapter: int | None = None
    later: int = 0

    @classmethod
    def of(cls, course: progress.Course | None, chapter: int | None = None) -> Board:
        """The board of a course; without one, everything is the reference's and open."""
        content: dict[str, Any] = course.load() if course else {"exercises": {}, "speeds": {}}
        engine = course.engine if course else learner_engine.active_folder()
        known = exercises.exercises()
        rows = []
        sketches = [exercise for exercise in known if exercise.replaceable is None]
        if sketches:
            rows.append(_row("sketches (for learning only)", "-", sketches, content))
        for name in _MODULES:
            mine = [exercise for exercise in known if exercise.replaceable == name]
            if mine or _file(name, engine) or name in content["speeds"]:
                rows.append(_row(name, _state(name, engine, mine, content["exercises"]), mine, content))
        shown = {row.module for row in rows}
        return cls(tuple(rows), chapter, later=len([name for name in _MODULES if name not in shown]))

    def _table(self) -> list[tuple[str, ...]]:
        """Headings, rows and total, without the speeds while there is none."""
        got, possible = sum(row.got for row in self.rows), sum(row.possible for row in self.rows)
        table = [_HEADINGS, *(row.cells() for row in self.rows), ("all", "", f"{got} / {possible}", "", "")]
        measured = any(row.speed is not None for row in self.rows)
        return table if measured else [line[:-1] for line in table]

    def _rest(self) -> str:
        modules = "1 module" if self.later == 1 else f"{self.later} modules"
        return f"{modules} of later chapters: reference" if self.later else ""

    def __str__(self) -> str:
        table = self._table()
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in table]
        rest = [self._rest()] if self.later else []
        return "\n".join(line.rstrip() for line in [lines[0], "-" * sum(widths), *lines[1:], *rest])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = self._table()
        cells = "".join(f"<th style='text-align:left'>{text}</th>" for text in head)
        rows = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in line) + "</tr>"
            for line in body
        )
        if self.later:
            rows += f"<tr><td style='text-align:left' colspan='{len(head)}'>{self._rest()}</td></tr>"
        return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"


def _row(module: str, engine: str, mine: list[Exercise], content: dict[str, Any]) -> Row:
    passed = content["exercises"]
    return Row(
        module,
        engine,
        got=sum(exercise.points for exercise in mine if exercise.id in passed),
        possible=sum(exercise.points for exercise in mine),
        open=tuple(exercise.id for exercise in mine if exercise.id not in passed),
        speed=content["speeds"].get(module),
    )


def _file(name: str, engine: Path | None) -> Path | None:
    """The module's file in the learner's engine, where there is one."""
    file = engine / f"{name}.py" if engine else None
    return file if file is not None and file.is_file() else None


def _state(name: str, engine: Path | None, mine: list[Exercise], passed: dict[str, Any]) -> str:
    """Whose the module is, in a few words."""
    file = _file(name, engine)
    if file is None:
        waiting = any(exercise.id in passed for exercise in mine)
        return f'reference, build("{name}") makes it yours' if waiting else "reference"
    head = assembling.read_head(file.read_text(encoding="utf-8", errors="replace"))
    if head.edited:
        return "edited by hand"
    whole = set(head.yours) >= {exercise.id for exercise in mine}
    state = "yours" if whole else f"partly yours ({len(head.yours)} of {len(mine)})"
    return state if head.reference_hash == learner_engine.reference_hash(name) else f"{state}, on an older reference"


def board() -> Board:
    """The board of the course that this process stands in; the last line of a cell shows it."""
    return Board.of(progress.current())


def record_speed(module: str, tokens_per_second: float) -> None:
    """Keeps a measured speed for the board; module: one of the nine names."""
    if module not in learner_engine.REPLACEABLE:
        raise LLMFromScratchError(f"{module!r} is not one of {', '.join(learner_engine.REPLACEABLE)}")
    course = progress.current()
    if course is not None:
        course.update(lambda content: content["speeds"].update({module: float(tokens_per_second)}))
