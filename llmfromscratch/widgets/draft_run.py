"""A greedy answer with drafts, recorded pass by pass: what `draft_timeline` draws.

What a learner's lookup proposes is compared with its definition, searched here place by place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from llmfromscratch import kv_cache
from llmfromscratch.course.sketches import ch06
from llmfromscratch.widgets.glyphs import VISIBLE
from llmfromscratch.widgets.sampling_stages import label_of
from llmfromscratch.widgets.token_reading import counted

Lookup = Callable[[Sequence[int], int, int], Sequence[int]]


@dataclass(frozen=True)
class Pass:
    """drafts: what was verified; tokens: what the pass gave, the drafts that stood and the model's own token."""

    drafts: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def stood(self) -> int:
        """How many drafts were right."""
        return sum(1 for draft, token in zip(self.drafts, self.tokens[:-1], strict=False) if draft == token)

    @property
    def fell(self) -> tuple[int, ...]:
        """The drafts that were rejected."""
        return self.drafts[self.stood :]


@dataclass(frozen=True)
class DraftRun:
    """longest, most: tokens of an ending and of a draft, at most. problems: sentences on what the lookup proposed."""

    prompt_ids: tuple[int, ...]
    longest: int
    most: int
    passes: tuple[Pass, ...]
    label: Callable[[int], str]
    problems: tuple[str, ...]

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        return [token for each in self.passes for token in each.tokens]

    @property
    def drafted(self) -> int:
        """Drafts in all passes."""
        return sum(len(each.drafts) for each in self.passes)

    @property
    def stood(self) -> int:
        """Drafts that stood in all passes."""
        return sum(each.stood for each in self.passes)

    def text(self, ids: Sequence[int]) -> str:
        """Tokens one after the other, with signs for all white space but spaces."""
        return "".join(map(self.label, ids)).replace(VISIBLE[" "], " ")


def record_drafts(
    llm: Any,
    prompt_ids: Sequence[int],
    lookup_draft: Lookup,
    longest: int = 3,
    most: int = 6,
    tokens: int = 40,
    cache: kv_cache.KVCache | None = None,
) -> DraftRun:
    """Runs `sketches.ch06.speculative_answer` on the model. most: drafts of a pass; with 0 nobody is asked for any.

    cache: one that this prompt has been run with before, so that it need not be computed again. Raises ValueError for
    what is no list of token ids.
    """
    prompt = [int(index) for index in prompt_ids]
    if not prompt:
        raise ValueError("There is nothing to continue; give a prompt of at least one token.")
    cache = cache or kv_cache.ConcatKVCache(llm.model.config.num_layers)
    cache.rewind(0, max(0, cache.length(0) - (len(prompt) - 1)))
    asked: list[list[int]] = []
    problems: list[str] = []

    def propose(ids: list[int]) -> list[int]:
        drafts = _checked(lookup_draft(list(ids), longest, most), llm.model.config.vocab_size) if most else []
        problems.extend(_problems(ids, drafts, longest, most, len(asked) + 1, label))
        asked.append(drafts)
        return drafts

    names: dict[int, str] = {}

    def label(index: int) -> str:
        names[index] = names.get(index) or label_of(llm.tokenizer, index)
        return names[index]

    answer, gained = ch06.speculative_answer(llm.model, cache, prompt, tokens, propose)
    passes = _passes(answer, gained, asked, llm.model.config.eos_token_ids)
    rest = [f"And so in {len(problems) - 2} more passes."] if len(problems) > 3 else problems[2:]
    return DraftRun(tuple(prompt), longest, most, tuple(passes), label, (*problems[:2], *rest))


def latest_place(ids: Sequence[int], longest: int) -> tuple[int, int]:
    """The length of the longest ending that occurs earlier, and where its latest such place ends; (0, 0) for none."""
    for length in range(min(longest, len(ids) - 1), 0, -1):
        ending = list(ids[-length:])
        for end in range(len(ids) - 1, length - 1, -1):
            if list(ids[end - length : end]) == ending:
                return length, end
    return 0, 0


def _passes(
    answer: Sequence[int], gained: Sequence[int], asked: Sequence[list[int]], ends: Collection[int]
) -> list[Pass]:
    """The passes up to the one whose tokens end the answer."""
    passes, start = [], 0
    for count, drafts in zip(gained, asked, strict=True):
        tokens = answer[start : start + count]
        passes.append(Pass(tuple(drafts[: len(answer) - start - 1]), tuple(tokens)))
        start += count
        if any(token in ends for token in tokens):
            break
    return passes


def _checked(drafts: Any, vocab_size: int) -> list[int]:
    try:
        ids = [operator.index(token) for token in drafts]
    except TypeError:
        raise ValueError(f"lookup_draft returned {drafts!r:.60}; a list of token ids was expected.") from None
    if unknown := [index for index in ids if not 0 <= index < vocab_size]:
        raise ValueError(f"lookup_draft returned the id {unknown[0]}; ids from 0 to {vocab_size - 1:,} were expected.")
    return ids


def _problems(
    ids: Sequence[int], drafts: Sequence[int], longest: int, most: int, number: int, label: Callable[[int], str]
) -> list[str]:
    """A sentence if the drafts of this pass are not what the text says."""
    length, place = latest_place(ids, longest)
    expected = list(ids[place : place + most]) if length else []
    if list(drafts) == expected:
        return []
    if len(drafts) > most:
        return [f"Pass {number}: lookup_draft returned {counted(len(drafts), 'token')}; {most} at most were asked for."]
    if not expected:
        return [f"Pass {number}: {_quoted(drafts, label)} was drafted, and the newest token occurs nowhere earlier."]
    found = _quoted(drafts, label) if drafts else "nothing"
    return [f"Pass {number}: after {_quoted(ids[-length:], label)} the text last went on with "
            f"{_quoted(expected, label)}; {found} was drafted."]  # fmt: skip


def _quoted(ids: Sequence[int], label: Callable[[int], str]) -> str:
    shown = "".join(map(label, ids[:6]))
    return f"“{shown}{'…' if len(ids) > 6 else ''}”"
