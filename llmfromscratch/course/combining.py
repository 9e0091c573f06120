"""Mistakes that are made together: a first attempt rarely has one fault alone, and still gets a sentence that is true.

Two or three mistakes are made at once; what is said is the one that explains the case that is shown by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from llmfromscratch.course import differences
from llmfromscratch.course.calling import Case, result_of
from llmfromscratch.course.comparing import Mistake
from llmfromscratch.course.differences import Tolerance

Settings = Mapping[str, Any]


def combined(
    make: Callable[..., Callable[..., Any]], mistakes: Sequence[tuple[str, Settings]], at_once: int = 3
) -> Iterator[Mistake]:
    """Each mistake alone, then two, then three at once: for `compare`, which asks for them only when it needs one.

    make: called with a mistake's settings, or with those of several, gives the function that makes them.
    mistakes: sentences with their settings; those that set the same thing are not made together. A sentence may stand
    there several times, for several ways to make the mistake. at_once: how many are made together at most.
    """
    for number in range(1, at_once + 1):
        for chosen in combinations(mistakes, number):
            together = {name: value for _, settings in chosen for name, value in settings.items()}
            if len(together) == sum(len(settings) for _, settings in chosen):
                yield partial(_shown_first, make, chosen, together), make(**together)


def _shown_first(
    make: Callable[..., Callable[..., Any]],
    chosen: Sequence[tuple[str, Settings]],
    together: Settings,
    case: Case,
) -> str:
    """The sentence of the first of the mistakes that gives this case's result alone; of two that only give it together
    both; "" where it takes more."""
    result = result_of(make(**together), case)
    for sentence, settings in chosen:
        if differences.find(result_of(make(**settings), case), result, Tolerance()) is None:
            return sentence
    return "; and ".join(sentence for sentence, _ in chosen) if len(chosen) == 2 else ""
