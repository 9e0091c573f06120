"""Tokens that a user's text spells out, hidden while a chat template lays out the conversation around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import regex

from llmfromscratch.errors import TokenizerError

_ESCAPE, _FIRST = "\uf8ff", 0xE000  # private-use characters


class HiddenTokens:
    """Hides the first character of each of `texts` behind private-use ones, and shows it again.

    normal: the normalization that text goes through later; it is done before hiding, since it could spell out a token.
    """

    def __init__(self, texts: Iterable[str], normal: Callable[[str], str]):
        self._normal = normal
        spelled = {form: None for text in texts for form in (text, normal(text))}
        words = "|".join(map(regex.escape, spelled)) or r"(?!)"
        self._to_hide = regex.compile(f"(?s:(?={words}).)|{_ESCAPE}")
        self._hidden = {start: chr(_FIRST + i) for i, start in enumerate({text[0]: None for text in spelled})}
        self._shown = {_ESCAPE: _ESCAPE, **{hidden: start for start, hidden in self._hidden.items()}}

    def hide(self, value: Any) -> Any:
        """The same messages with every text in them hidden. Raises TokenizerError for what could smuggle text past."""
        if isinstance(value, str):
            return self._to_hide.sub(lambda match: _ESCAPE + self._hidden.get(match[0], _ESCAPE), self._normal(value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self.hide(inner) for inner in value]
        if value is None or isinstance(value, int | float):
            return value
        raise TokenizerError(f"a chat message may hold text, numbers, lists and mappings, not {type(value).__name__}.")

    def show(self, text: str) -> str:
        """The text as it was, normalized."""
        return self._normal(regex.sub(f"(?s:{_ESCAPE}(.))", lambda match: self._shown.get(match[1], match[0]), text))
