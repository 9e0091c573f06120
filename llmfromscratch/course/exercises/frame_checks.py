"""The check of chapter 7's frame of keys: what each channel of each head reaches to, channel after channel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.rounding_checks import Pair, in_pair

FRAME = Tolerance(relative=2e-6)


def channel_by_channel(keys: Tensor) -> NamedParts:
    """The middle and the spread of each channel of each head by itself."""
    middles: list[list[float]] = []
    spreads: list[list[float]] = []
    for head in range(keys.shape[1]):
        seen = [[float(number) for number in keys[:, head, channel]] for channel in range(keys.shape[2])]
        middles.append([(max(numbers) + min(numbers)) / 2 for numbers in seen])
        spreads.append([(max(numbers) - min(numbers)) / 2 or 1.0 for numbers in seen])
    return NamedParts(middle=torch.tensor(middles), spread=torch.tensor(spreads))


def _keys_case(text: str, keys: Any) -> Case:
    keys = keys if isinstance(keys, Tensor) else torch.tensor(keys)
    return Case(text or f"keys {differences.shown(keys)}", keys)


def frame_cases() -> list[Case]:
    """What `key_frame` is tried on: loud channels, heads that differ, a channel that never changes."""
    loud = random_numbers(6, 2, 4, seed=1)
    loud[:, 0, 2] = 40 * loud[:, 0, 2] + 100
    still = random_numbers(5, 2, 3, seed=2)
    still[:, 1, 0] = -7.5
    wide = torch.tensor([[[60000.0, 5.0]], [[20000.0, -5.0]], [[-60000.0, 0.0]]]).half()
    return [
        _keys_case("", [[[1.0]], [[5.0]]]),
        _keys_case("", [[[1.0, 8.0]], [[2.0, 0.0]], [[6.0, 3.0]]]),
        _keys_case("", [[[1.0], [-10.0]], [[4.0], [-2.0]]]),
        _keys_case("", [[[2.0, 4.0]], [[2.0, 9.0]]]),
        _keys_case("random keys [3, 3, 3]", random_numbers(3, 3, 3, seed=3)),
        _keys_case("random keys [6, 2, 4], channel 2 of head 0 far larger", loud),
        _keys_case("random keys [5, 2, 3], channel 0 of head 1 always -7.5", still),
        _keys_case("random keys [7, 1, 5]", 3 * random_numbers(7, 1, 5, seed=4) + 2),
        _keys_case("random keys [1, 2, 4], one token", random_numbers(1, 2, 4, seed=5)),
        _keys_case("random keys [20, 3, 8] in bfloat16", (5 * random_numbers(20, 3, 8, seed=6) + 3).bfloat16()),
        _keys_case("keys [3, 1, 2] in float16, up to 60000", wide),
    ]


def check_key_frame(key_frame: Pair) -> None:
    """Against one channel after the other."""
    compare(
        in_pair(_without_warnings(key_frame), "middle", "spread"),
        channel_by_channel,
        frame_cases(),
        expected="the middle and the spread of each channel of each head, float32 [kv_heads, head_dim]: all tokens' "
        "(key - middle) / spread lie between -1 and 1, and reach both",
        mistakes=combined(_framed, _FRAME_MISTAKES, at_once=2),
        diagnose=_of_frames,
        tolerance=FRAME,
    )


def _without_warnings(key_frame: Pair) -> Pair:
    """The function, without torch's own words on the deviation of one token: the check has better ones."""

    @functools.wraps(key_frame)
    def run(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*degrees of freedom")
            return key_frame(*arguments)

    return run


def _of_frames(got: Any, want: Any) -> str:
    if not isinstance(got, NamedParts) or not all(isinstance(part, Tensor) for part in got.values()):
        return ""
    if any(got[name].shape != want[name].shape for name in want):
        return "a number for each channel of each head: the ends are those over all tokens, dim=0"
    if not all(bool(torch.isfinite(part).all()) for part in got.values()):
        return "float16 ends at 65504: make the keys float32 before the ends are added"
    return _STILL if bool(((want["spread"] == 1) & (got["spread"] != 1)).any()) else ""


_STILL = "a channel that never changes has the spread 1, so that nothing is divided by 0"
_KEYS_IN_HALF = "the arithmetic is in the keys' own half precision; make them float32 first"
_MEAN_AND_DEVIATION = (
    "the mean and the standard deviation: what lies far out would be beyond -1 and 1; the ends are meant"
)
_DEVIATES = "the standard deviation is not the spread: what lies far out would be beyond -1 and 1"
_FROM_THERE = "the middle lies halfway between the ends, so that both are reached"


def _variance(keys: Tensor, correction: int) -> Tensor:
    """Not a number where there are too few tokens."""
    return keys.var(0, correction=correction) if len(keys) > correction else torch.full_like(keys[0], torch.nan)


def _reach(keys: Tensor, middle: Tensor) -> Tensor:
    """How far the farthest key lies from a middle."""
    return (keys - middle).abs().amax(0)


_DEVIATIONS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda low, high, keys: _variance(keys, 1).sqrt(),
    lambda low, high, keys: _variance(keys, 0).sqrt(),
    lambda low, high, keys: _variance(keys, 1).sqrt().nan_to_num(0),
    lambda low, high, keys: 2 * _variance(keys, 1).sqrt(),
    lambda low, high, keys: 3 * _variance(keys, 1).sqrt(),
]
_FRAME_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the ends are those of all heads; each head has channels of its own", {"over": (0, 1)}),
    ("the ends are those of a whole head; each of its channels has its own", {"over": (0, 2)}),
    ("the ends are those of all keys; each channel of each head has its own", {"over": (0, 1, 2)}),
    ("the ends are those of all heads; each head has channels of its own", {"over": (0, 1), "shared": True}),
    ("the ends are those of a whole head; each of its channels has its own", {"over": (0, 2), "shared": True}),
    ("the ends are those of all keys; each channel of each head has its own", {"over": (0, 1, 2), "shared": True}),
    ("the ends are those over the heads; a channel's are over all tokens, dim=0", {"over": (1,)}),
    ("the ends are those over the channels; a channel's are over all tokens, dim=0", {"over": (2,)}),
    *((_MEAN_AND_DEVIATION, {"middle": lambda low, high, keys: keys.mean(0), "spread": spread})
      for spread in _DEVIATIONS),
    (f"{_FROM_THERE}; the mean lies where most are",
     {"middle": lambda low, high, keys: keys.mean(0),
      "spread": lambda low, high, keys: _reach(keys, keys.mean(0))}),
    (f"{_FROM_THERE}; half of the keys lie on each side of the median, however far",
     {"middle": lambda low, high, keys: keys.median(0).values,
      "spread": lambda low, high, keys: _reach(keys, keys.median(0).values)}),
    ("the mean is not the middle: it lies where most are, not halfway between the ends",
     {"middle": lambda low, high, keys: keys.mean(0)}),
    ("the median is not the middle, which lies halfway between the ends",
     {"middle": lambda low, high, keys: keys.median(0).values}),
    *((_DEVIATES, {"spread": spread}) for spread in _DEVIATIONS),
    ("the spread is the variance; half of the range is meant", {"spread": lambda low, high, keys: _variance(keys, 1)}),
    ("the spread is the variance; half of the range is meant", {"spread": lambda low, high, keys: _variance(keys, 0)}),
    ("the spread is an average size; half of the range is meant, so that what lies far out stays within -1 and 1",
     {"spread": lambda low, high, keys: keys.square().mean(0).sqrt()}),
    ("the spread is an average size; half of the range is meant, so that what lies far out stays within -1 and 1",
     {"spread": lambda low, high, keys: keys.abs().mean(0)}),
    ("the spread is the average distance from the mean; what lies far out would be beyond -1 and 1",
     {"spread": lambda low, high, keys: (keys - keys.mean(0)).abs().mean(0)}),
    ("the spread is the whole range; half of it lies on each side of the middle",
     {"spread": lambda low, high, keys: high - low}),
    ("the spread is the largest size, as if the middle were 0",
     {"spread": lambda low, high, keys: torch.maximum(high, -low)}),
    ("the spread is half of the largest size, as if the other end were 0",
     {"spread": lambda low, high, keys: torch.maximum(high, -low) / 2}),
    ("the spread is a step of a grid already; half of the range is meant",
     {"spread": lambda low, high, keys: (high - low) / 255}),
    ("the spread is the largest number", {"spread": lambda low, high, keys: high}),
    ("the middle is the sum of both ends; half of it is meant", {"middle": lambda low, high, keys: high + low}),
    ("the middle is half of the range; it is half of the sum of both ends",
     {"middle": lambda low, high, keys: (high - low) / 2}),
    ("the middle is the smallest number; it lies halfway to the largest", {"middle": lambda low, high, keys: low}),
    ("the middle is the largest number; it lies halfway to the smallest", {"middle": lambda low, high, keys: high}),
    ("the middle is left at 0", {"middle": lambda low, high, keys: 0 * low}),
    ("the first token's keys are taken for the middle", {"middle": lambda low, high, keys: keys[0]}),
    (_STILL, {"guard": 0.0}),
    *((_STILL, {"guard": tiny}) for tiny in (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)),
    ("the spread is turned over: keys are divided by it", {"turned": True}),
    ("middle and spread are exchanged", {"exchanged": True}),
    (_KEYS_IN_HALF, {"wide": "never"}),
    (_KEYS_IN_HALF, {"wide": "late"}),
]  # fmt: skip


def _framed(
    over: tuple[int, ...] = (0,),
    shared: bool = False,
    middle: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda low, high, keys: (high + low) / 2,
    spread: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda low, high, keys: (high - low) / 2,
    guard: float = 1.0,
    turned: bool = False,
    exchanged: bool = False,
    wide: str = "first",
) -> Callable[..., NamedParts]:
    """The frame, with mistakes switched on. Ends over more than the tokens are given to all that share them, or not."""

    def run(keys: Tensor) -> NamedParts:
        keys = keys.float() if wide == "first" else keys
        low, high = keys.amin(over, keepdim=shared), keys.amax(over, keepdim=shared)
        low, high = (end.expand(1, *keys.shape[1:])[0] if shared else end for end in (low, high))
        half = spread(low, high, keys)
        half = torch.where(half == 0, guard, half)
        both = [middle(low, high, keys), 1 / half if turned else half]
        both = [part.float() for part in both] if wide == "late" else both
        return NamedParts(zip(("middle", "spread"), both[::-1] if exchanged else both, strict=True))

    return run
