"""Where a right function fails because of an earlier one that it calls, its check names that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

Known = dict[str, tuple[Callable[[Any], None], str]]  # name: (its check, what to do about it)


def pieces_at_fault(function: Callable[..., Any], known: Known) -> Iterator[str]:
    """Of what a function calls, by the names it has for them, what does not pass a check of its own."""
    used, names = _names_in(getattr(function, "__code__", None)), getattr(function, "__globals__", {})
    for name, (check, advice) in known.items():
        piece = names.get(name) or getattr(names.get("quantization"), name, None)
        if name in used and callable(piece):
            try:
                check(piece)
            except NotImplementedError:
                raise
            except Exception:  # noqa: BLE001 - a piece may fail in any way
                yield f"{function.__name__} may be right, but {name}, which it calls, is not: {advice}"


def _names_in(code: CodeType | None) -> set[str]:
    """The names that a function looks up, its comprehensions' too."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names_in(part) for part in code.co_consts if isinstance(part, CodeType)))
