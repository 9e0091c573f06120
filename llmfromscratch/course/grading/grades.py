"""What grading finds out: points for each exercise of a notebook, and why where there are none."""

from __future__ import annotations

from dataclasses import dataclass

PASSED, FAILED, BLANK, REFUSED = "passed", "failed", "blank", "refused"


@dataclass(frozen=True)
class ExerciseGrade:
    """One exercise.

    status: passed, failed, blank (not written), or refused (the code reaches for what no exercise needs, and a person
    has to look at it). message: why there are no points; it may hold text that came from the student's code.
    seconds: how long the second check took, its process's start included.
    """

    id: str
    title: str
    possible: int
    status: str
    message: str = ""
    seconds: float = 0.0

    @property
    def points(self) -> int:
        """All of them or none."""
        return self.possible if self.status == PASSED else 0


@dataclass(frozen=True)
class NotebookGrade:
    """One notebook.

    chapter: name of the chapter it is a copy of. restored: what was done to its locked cells, a sentence each.
    notes: what else an instructor should know. error: why it could not be graded; it then has no exercises.
    """

    file: str
    chapter: str = ""
    exercises: tuple[ExerciseGrade, ...] = ()
    restored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""

    @property
    def points(self) -> int:
        """Points got, of all exercises."""
        return sum(exercise.points for exercise in self.exercises)

    @property
    def possible(self) -> int:
        """Points that can be got."""
        return sum(exercise.possible for exercise in self.exercises)

    @property
    def passed(self) -> bool:
        """Whether it has all points."""
        return not self.error and self.points == self.possible
