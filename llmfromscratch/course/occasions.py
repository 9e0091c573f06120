"""What a check was about when the learner's code raised: the exception carries along which input it was.

So `check` can say it beside the learner's line, although the error itself knows nothing of cases.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmfromscratch.course.failures import CheckFailed

_OCCASION = "_occasion_of_the_check"


@dataclass(frozen=True)
class Occasion:
    """What a check was about when the learner's code raised.

    case: names the input. expected: what should have come out. refusal: an error was asked for, of another kind.
    shapes: of the tensors among the arguments. meaning: what the error means here, where the exercise knows it.
    """

    case: str
    expected: str
    refusal: bool = False
    shapes: str = ""
    meaning: str = ""


def occasion_of(error: BaseException) -> Occasion | None:
    """What the check was about when this was raised, where that is known."""
    found = vars(error).get(_OCCASION)
    return found if isinstance(found, Occasion) else None


def keep_occasion(error: BaseException, occasion: Occasion) -> None:
    """Lets an error carry along what it happened on; a CheckFailed raised within the call learns its case."""
    if isinstance(error, CheckFailed):
        error.case = joined(occasion.case, error.case)
    else:
        vars(error)[_OCCASION] = occasion


def joined(case: str, text: str) -> str:
    """The words for a case and what is said of it: "two heads: got 3", or one of them where the other is empty."""
    return f"{case}: {text}" if case and text else case or text
