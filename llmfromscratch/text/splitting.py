"""Splitting rules: how text is cut into words before byte-pair merges, which never reach from one word into the next.

A model computes well only with the words it was trained on, so a rule is taken from its files by name or by its exact
regular expression, and one that is not in the tables here is refused by name. Each expression is held against the
tokenizers library by test: its engine and ours read regular expressions a little differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

SPACE = "▁"  # U+2581: SentencePiece's visible space

_DIGIT, _DIGITS = r"\p{N}", r"\p{N}+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS, _WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2's rule as its authors wrote it down means the same as the one above.
_GPT2_IN_FILES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_IN_FILES = {_GPT2_IN_FILES: _GPT2, **{one: one for one in (_GPT2, _LLAMA3, _QWEN2, _TEKKEN, _DIGIT, _DIGITS)}}


class UnknownRule(Exception):
    """A splitting rule that is not in the tables here; the message names it."""


@dataclass(frozen=True)
class SplittingRule:
    """Regular expressions, without groups of their own; each cuts every piece that those before it left.

    What an expression matches is a piece, and so is what lies between two matches. No expression: the text is one word.
    steps: the expressions compiled, each with one group around the whole of it: so `split` returns the matches too.
    """

    expressions: tuple[str, ...] = ()
    steps: tuple[Any, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        compiled = tuple(regex.compile(f"({expression})") for expression in self.expressions)
        object.__setattr__(self, "steps", compiled)

    @classmethod
    def of(cls, *expressions: str) -> SplittingRule:
        """The rule of these expressions, in this order."""
        return cls(expressions)


@dataclass(frozen=True)
class NamedRule:
    """What a rule's name in a GGUF file stands for, beside the splitting: things that tokenizer.json spells out.

    unicode_form: the normalization of the text before it is split, or None. ignore_merges: a word that is a token as a
    whole stays whole. add_bos: a begin token stands before every text, unless the file says otherwise.
    """

    splitting: SplittingRule
    unicode_form: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3_RULE = NamedRule(SplittingRule.of(_LLAMA3), ignore_merges=True, add_bos=True)

# Keyed by the values of `tokenizer.ggml.pre`.
NAMED_RULES: dict[str, NamedRule] = {
    "gpt-2": NamedRule(SplittingRule.of(_GPT2)),
    "smollm": NamedRule(SplittingRule.of(_DIGIT, _GPT2)),
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": NamedRule(SplittingRule.of(_QWEN2), unicode_form="NFC"),
    "tekken": NamedRule(SplittingRule.of(_TEKKEN), ignore_merges=True),
}


def byte_level_rule(pre_tokenizer: Any) -> SplittingRule:
    """The rule of a tokenizer.json whose pre-tokenizer ends in byte level.

    Raises UnknownRule, which names it, for one that is not known here.
    """
    steps = _steps(pre_tokenizer)
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise UnknownRule(f"the splitting rule {pre_tokenizer!r}, which does not end in plain byte level,")
    known = [_expression(step) for step in steps[:-1]]
    return SplittingRule.of(*known, *([_GPT2] if last.get("use_regex", True) else []))


def _steps(pre_tokenizer: Any) -> list[Mapping[str, Any]]:
    if not isinstance(pre_tokenizer, Mapping):
        raise UnknownRule(f"the splitting rule {pre_tokenizer!r}")
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _expression(step: Mapping[str, Any]) -> str:
    """Our expression for one step before byte level."""
    if step["type"] == "Digits":
        return _DIGIT if step["individual_digits"] else _DIGITS
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
        found = _IN_FILES.get(step["pattern"].get("Regex"))
        if found is not None:
            return found
    raise UnknownRule(f"the step {step!r} of the splitting rule")


def spaces_rule(tokens: Iterable[str]) -> SplittingRule:
    """The rule for text with visible spaces that no file writes down: a word begins with the spaces before it.

    The merges of such a tokenizer may reach over the whole text. As long as none of the tokens that they make has a
    space after another character, none does, and cutting there changes no id but lets words be remembered.
    """
    inside = regex.compile(f"[^{SPACE}]{SPACE}")
    return SplittingRule() if any(map(inside.search, tokens)) else SplittingRule.of(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


def each_space_rule() -> SplittingRule:
    """The rule of a Metaspace pre-tokenizer that splits: every visible space begins a word."""
    return SplittingRule.of(f"{SPACE}[^{SPACE}]*|[^{SPACE}]+")
