"""The check of chapter 5's streams: each request's random numbers, asked for one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, general_mistake
from llmfromscratch.course.exercises.drawing_checks import seeded
from llmfromscratch.course.exercises.sampler_runs import check_in_sampler

_FIRST = "the numbers of the first call"
_UNTOUCHED = "torch's own generator was left alone"


def check_uniforms(uniforms: Callable[[Sequence[torch.Generator]], Tensor]) -> None:
    """Against streams that are asked one at a time, and again afterwards; then in the engine's sampler."""
    compare(
        partial(_streamed, uniforms),
        _asked(),
        [
            Case(f"streams {told}", streams)
            for told, streams in (
                ("of seed 7", [(7, 0)]),
                ("of the seeds 7 and 8", [(7, 0), (8, 0)]),
                ("of the seeds 8 and 7", [(8, 0), (7, 0)]),
                ("of seed 7, of seed 8 after 3 numbers, and again of seed 7", [(7, 0), (8, 3), (7, 0)]),
                ("of 9 seeds, after 0 to 8 numbers", [(seed * seed, seed) for seed in range(9)]),
            )
        ],
        expected="float64 [streams]: the next number of each stream, in their order, and no stream used otherwise",
        mistakes=combined(_asked, _STREAM_MISTAKES, at_once=2),
        diagnose=_of_parts,
        explain=_of_streams,
    )
    check_in_sampler("uniforms", uniforms)


def _streamed(uniforms: Callable[..., Any], streams: list[tuple[int, int]]) -> NamedParts:
    """Two calls, what the streams give afterwards, and whether torch's own generator was used."""
    generators = [seeded(seed) for seed, _ in streams]
    for generator, (_, taken) in zip(generators, streams, strict=True):
        torch.rand(taken, generator=generator, dtype=torch.float64)
    before = torch.get_rng_state()
    first, second = uniforms(generators), uniforms(generators)
    return NamedParts(
        {
            _FIRST: first,
            "the numbers of the second call": second,
            "what the streams give afterwards": [
                torch.rand((), generator=generator, dtype=torch.float64).item() for generator in generators
            ],
            _UNTOUCHED: torch.equal(before, torch.get_rng_state()),
        }
    )


def _of_parts(got: Any, want: Any) -> str:
    if got[_UNTOUCHED] is False:
        return "torch's own generator is used: hand each stream to torch.rand as its `generator`"
    return general_mistake(got[_FIRST], want[_FIRST])


def _of_streams(error: BaseException, case: Case) -> str:
    if isinstance(error, TypeError) and "list" in str(error) and "rand" in str(error):
        return "torch.rand takes one generator: ask one stream after the other"
    return ""


def _each(streams: Sequence[torch.Generator], take: Callable[[torch.Generator], Tensor]) -> Tensor:
    return torch.cat([take(stream) for stream in streams])


def _one(stream: torch.Generator) -> Tensor:
    return _of_many(stream, 1)


def _two(stream: torch.Generator) -> Tensor:
    return _of_many(stream, 2)


def _of_many(stream: torch.Generator, count: int) -> Tensor:
    return torch.rand(count, generator=stream, dtype=torch.float64)


_SHORT = "float32 has too few digits for rare tokens: ask for float64 numbers"
_STREAM_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the first stream gives the numbers of all; each gives one of its own",
     {"ask": lambda streams, take: torch.cat([take(streams[0]) for _ in streams])}),
    ("the last stream gives the numbers of all; each gives one of its own",
     {"ask": lambda streams, take: torch.cat([take(streams[-1]) for _ in streams])}),
    ("the first stream's number is used for all; each gives one of its own",
     {"ask": lambda streams, take: take(streams[0]).expand(len(streams))}),
    ("two numbers are taken of a stream; a token takes exactly one", {"take": lambda one: _two(one)[1:]}),
    ("two numbers are taken of a stream; a token takes exactly one", {"take": lambda one: _two(one)[:1]}),
    ("two numbers are taken of a stream; a token takes exactly one", {"take": _two}),
    ("as many numbers are taken of each stream as there are streams; each gives one",
     {"ask": lambda streams, take: torch.cat([_of_many(one, len(streams))[:1] for one in streams])}),
    ("as many numbers are taken of each stream as there are streams; each gives one",
     {"ask": lambda streams, take: torch.stack([_of_many(one, len(streams)) for one in streams])}),
    (_SHORT, {"take": lambda one: torch.rand(1, generator=one)}),
    (_SHORT, {"take": lambda one: torch.rand(1, generator=one).double()}),
    ("float64 numbers are rounded to float32 on the way: torch.tensor and torch.zeros make float32 unless told",
     {"take": lambda one: torch.rand(1, generator=one, dtype=torch.float64).float()}),
    ("the streams begin anew in every call; they go on from where they were",
     {"take": lambda one: torch.rand(1, generator=one.manual_seed(one.initial_seed()), dtype=torch.float64)}),
    ("the numbers come from copies: the streams themselves do not go on",
     {"take": lambda one: torch.rand(1, generator=one.clone_state(), dtype=torch.float64)}),
    ("the numbers come from copies: the streams themselves do not go on",
     {"take": lambda one: torch.rand(1, generator=seeded(one.initial_seed()), dtype=torch.float64)}),
    ("the numbers are normally distributed; asked for are uniform ones, from 0 to below 1",
     {"take": lambda one: torch.randn(1, generator=one, dtype=torch.float64)}),
    ("the numbers stand in another order than the streams",
     {"ask": lambda streams, take: torch.cat([take(one) for one in streams]).flip(0)}),
    ("the numbers stand in another order than the streams",
     {"ask": lambda streams, take: torch.cat([take(one) for one in streams]).sort().values}),
    ("a list comes back; asked for is one tensor",
     {"ask": lambda streams, take: [take(one).item() for one in streams]}),
    ("a list comes back; asked for is one tensor", {"ask": lambda streams, take: [take(one) for one in streams]}),
]  # fmt: skip


def _asked(
    ask: Callable[..., Any] = _each,
    take: Callable[[torch.Generator], Tensor] = _one,
) -> Callable[..., NamedParts]:
    """One stream after the other, with mistakes switched on."""
    return partial(_streamed, lambda streams: ask(streams, take))
