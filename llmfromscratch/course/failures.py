"""What a learner sees when something is not right: a few lines, never a traceback through the machinery."""

from __future__ import annotations

import textwrap

from llmfromscratch.errors import LLMFromScratchError


class CheckFailed(LLMFromScratchError):
    """A check did not pass. A notebook shows only the lines of `str(error)`.

    expected: what should have come out, in words. case: the smallest case that fails, with both values.
    mistake: the likely mistake by name. next_step: what to do; `hint(...)` where none is given.
    line and error: the learner's own line and what it raised, where their code stopped.
    verdict: stands in the heading. subject: id and title; `check` fills it in.
    """

    def __init__(
        self,
        expected: str = "",
        *,
        case: str = "",
        mistake: str = "",
        next_step: str = "",
        line: str = "",
        error: str = "",
        verdict: str = "not right yet",
        subject: str = "",
    ):
        self.expected, self.case, self.mistake, self.next_step = expected, case, mistake, next_step
        self.line, self.error, self.verdict, self.subject = line, error, verdict, subject
        super().__init__(expected)

    def __str__(self) -> str:
        parts = {
            "your line": self.line,
            "error": self.error,
            "expected": self.expected,
            "smallest case that fails": self.case,
            "likely mistake": self.mistake,
            "next": self.next_step,
        }
        return "\n".join([self._heading(), *(f"  {label}: {text}" for label, text in parts.items() if text)])

    def _heading(self) -> str:
        return f"✗ {self.subject}: {self.verdict}" if self.subject else f"✗ {self.verdict}"

    def _render_traceback_(self) -> list[str]:
        # JupyterLab breaks a long line anywhere, in the middle of words too
        options = {"width": 100, "subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
        return [piece for line in str(self).splitlines() for piece in textwrap.wrap(line, **options)]  # type: ignore[arg-type]


class NotYetWritten(CheckFailed):
    """The blank of an exercise is still a blank."""

    def _heading(self) -> str:
        exercise_id, _, title = self.subject.partition(" ")
        return f"Exercise {exercise_id} is not yet written: {title}"


class BuildFailed(LLMFromScratchError):
    """A module could not be built; the engine is what it was before. A notebook shows only the sentence."""

    def _render_traceback_(self) -> list[str]:
        return f"✗ {self}".splitlines()
