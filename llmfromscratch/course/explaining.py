"""What the learner is told about an error that came out of a check: their line, the case, and what it means."""

from __future__ import annotations

import re

from llmfromscratch.course import blanks, limits, locating, memory_errors
from llmfromscratch.course.exercise import Exercise
from llmfromscratch.course.failures import CheckFailed, NotYetWritten
from llmfromscratch.course.occasions import Occasion, joined, occasion_of

_NOT_USABLE = "a result of the kind that the exercise asks for"


def explained(
    error: BaseException, exercise: Exercise | None, seconds: float, memory: tuple[int, int] | None
) -> CheckFailed:
    """The failure to show for an error; memory: the process's address space when the check began."""
    if isinstance(error, CheckFailed):
        return error
    if blanks.is_blank(error):
        return _not_written(error, exercise)
    line, occasion = locating.describe_line(error.__traceback__), occasion_of(error)
    if isinstance(error, limits.TimeUp):
        failure = _timed_out(line, seconds)
    elif memory_errors.is_out_of_memory(error):
        failure = memory_errors.failure(error, line, memory)
    elif not isinstance(error, Exception):
        failure = _left(error, line)
    else:
        return _raised(error, line, occasion)
    failure.case = occasion.case if occasion else ""
    return failure


def _timed_out(line: str, seconds: float) -> CheckFailed:
    place = f" in {line}" if line else ""
    return CheckFailed(
        f"a result within {seconds:g} s",
        verdict=f"stopped after {seconds:g} s{place}",
        mistake="a loop that never ends, or one over more than it needs" if line else "",
    )


def _left(error: BaseException, line: str) -> CheckFailed:
    name = locating.error_name(error)
    return CheckFailed(
        "a function that returns its result",
        line=line,
        verdict=f"stopped because your code raised {name} (sys.exit() does that)",
    )


def _raised(error: Exception, line: str, occasion: Occasion | None) -> CheckFailed:
    """An exception of the learner's code, or (without a line) of the check that could not go on with its result."""
    text = locating.error_text(error)
    if occasion is None and line:
        return CheckFailed(
            line=line, error=text, mistake=locating.meaning(error), verdict="your code stopped with an error"
        )
    if occasion is None:
        return CheckFailed(_NOT_USABLE, error=text, mistake=_of_result(error), verdict=_verdict(error, line))
    return CheckFailed(
        occasion.expected or _NOT_USABLE,
        line=line,
        case=joined(occasion.case, f"your code raised {text}" if line else text),
        mistake=_in_case(error, occasion) if line else _of_result(error),
        verdict="your code raised another error than was asked for"
        if occasion.refusal and line
        else _verdict(error, line),
    )


def _verdict(error: Exception, line: str) -> str:
    if line:
        return "your code stopped with an error"
    if _is_wrong_call(error):
        return "your code cannot be called the way the exercise calls it"
    return "the check could not use what your code gave it"


def _of_result(error: Exception) -> str:
    """What an error in the check's own code says about the object or the result that it worked on."""
    if _is_wrong_call(error):
        return "the parameters are not those of the exercise's cell"
    return "your code gave None: is a `return` missing?" if "'NoneType' object" in str(error) else ""


def _is_wrong_call(error: Exception) -> bool:
    return isinstance(error, TypeError) and re.search(r"\(\) (takes|missing|got an unexpected)", str(error)) is not None


def _in_case(error: Exception, occasion: Occasion) -> str:
    if occasion.refusal:
        return "this case is worked on before it is looked at, or another kind of error is raised for it"
    if occasion.meaning:
        return occasion.meaning
    meaning = locating.meaning(error)
    return f"{meaning}; here {occasion.shapes}" if occasion.shapes and locating.is_about_shapes(error) else meaning


def _not_written(error: BaseException, exercise: Exercise | None) -> NotYetWritten | CheckFailed:
    """Names the blank that was reached: this exercise's, or an earlier one that this one builds on."""
    blank = blanks.owner(error)
    if exercise is None or blank is None or blank.id == exercise.id:
        return NotYetWritten()
    return blanks.not_yet_written(blank, needed_by=exercise.name)
