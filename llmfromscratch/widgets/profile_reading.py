"""Profiles as the figures take them: named, of both parts of a run, and with one look for each kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmfromscratch.profiling import DECODE, PREFILL, Profile, StepProfile
from llmfromscratch.widgets.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NAVY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    YELLOW,
)


class Look(NamedTuple):
    """How a kind of work is drawn: colour and hatch of its bars, marker of its dots."""

    colour: str
    hatch: str
    marker: str


LOOKS = {
    "products": Look(BLUE, "", "o"),
    "graph": Look(NAVY, "", "p"),
    "head": Look(SKY, "....", "s"),
    "attention": Look(ORANGE, "", "^"),
    "cache": Look(PURPLE, "\\\\\\\\", "v"),
    "norms": Look(GREEN, "....", "D"),
    "sampling": Look(YELLOW, "", "P"),
    "other": Look(GREY, "", "X"),
    "Python": Look(PALE, "////", "h"),
}
WHOLE = Look(BLACK, "", "*")

Named = Sequence[tuple[str, Mapping[str, StepProfile]]]


def read_profiles(profiles: Any) -> Named:
    """(name, part -> its profile) of each engine, in order.

    profiles: name -> profile, or pairs of them; a profile is a `profiling.Profile` or one `StepProfile`. Raises
    ValueError for anything else, and where there is none.
    """
    pairs = list(profiles.items() if isinstance(profiles, Mapping) else profiles)
    named = []
    for pair in pairs:
        name, of = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
        if not isinstance(name, str) or not isinstance(of, Profile | StepProfile):
            raise ValueError(f"{_short(pair)} is no named profile; give pairs such as ('fused', profile(llm)).")
        named.append((name, {PREFILL: of.prefill, DECODE: of.decode} if isinstance(of, Profile) else {of.name: of}))
    if not named:
        raise ValueError("there is no profile to draw; give pairs such as ('fused', profile(llm)).")
    return named


def parts_of(named: Named) -> list[str]:
    """The parts that all have, the decode step first."""
    found = [part for part in (DECODE, PREFILL) if all(part in parts for _, parts in named)]
    others = [part for part in named[0][1] if part not in found and all(part in parts for _, parts in named)]
    if not found + others:
        raise ValueError("the profiles have no part in common; give those of one part, or whole ones.")
    return found + others


def milliseconds(step: StepProfile) -> dict[str, float]:
    """Kind -> milliseconds, for every kind."""
    return {kind: 1000 * step.costs[kind].seconds if kind in step.costs else 0.0 for kind in LOOKS}


def in_ms(number: float) -> str:
    """Milliseconds in two or three digits."""
    size = abs(number)
    if size >= 0.95:
        return f"{number:,.0f}" if size >= 99.95 else f"{number:.1f}"
    return f"{number:.2f}" if size >= 0.095 else f"{number:.2g}"


def speed_of(step: StepProfile) -> str:
    """Tokens a second."""
    return f"{step.speed:,.0f} tokens/s"


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) < 60 else f"{text[:59]}…"
