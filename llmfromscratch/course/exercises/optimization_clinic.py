"""Chapter 6's bug hunts: code that is slow or wrong in a way that only measuring shows, and its check each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.tensor_watch import watched
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.sketches import ch06

# ---- 6.a ---------------------------------------------------------------------------------------------------------

FAST_PATH_STORY = """
"We threw our own attention out and took torch's fused one. Prompts are faster since. Answers are slower, and the longer
the text, the slower, though a step has one query only." Below: one layer's attention for one new token, by this code
and by plain products in float32, at three lengths.
"""


def attend_once(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One new token's attention in one layer, over everything that is stored.

    query: bfloat16 [heads, head_dim]; keys, values: bfloat16 [kv_heads, context, head_dim]. Query head h looks at pair
    h // (heads // kv_heads). Returns bfloat16 [heads, head_dim]: softmax(query · key / sqrt(head_dim)) times values.
    """
    q, k, v = query[None, :, None], keys[None], values[None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]


def plain_products(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same by two products in float32: what the mended one is held against, for its speed."""
    rows = (query.float() * query.shape[-1] ** -0.5).view(keys.shape[0], -1, query.shape[-1])
    weights = torch.bmm(rows, keys.float().transpose(1, 2)).softmax(dim=-1)
    return torch.bmm(weights, values.float()).view_as(query).to(query.dtype)


def _stored(context: int, heads: int = 9, kv_heads: int = 3, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(context)
    query = torch.randn(heads, head_dim, generator=generator)
    keys, values = torch.randn(2, kv_heads, context, head_dim, generator=generator).unbind(0)
    return (2 * query).bfloat16(), keys.bfloat16(), values.bfloat16()


def fastest(functions: Sequence[Callable[..., Any]], arguments: Sequence[Any], rounds: int = 30) -> list[float]:
    """Seconds of each function's fastest call, taken in turns: what disturbs the machine disturbs all of them."""
    seconds = [float("inf")] * len(functions)
    for _ in range(rounds):
        for number, function in enumerate(functions):
            begin = time.perf_counter()
            function(*arguments)
            seconds[number] = min(seconds[number], time.perf_counter() - begin)
    return seconds


def show_fast_path() -> None:
    """Microseconds of both, and how far they lie apart."""
    for context in (256, 1024, 2048):
        ours, plain = fastest([attend_once, plain_products], _stored(context))
        print(f"{context:>5} tokens: this code {ours * 1e6:5.0f} us, plain products {plain * 1e6:5.0f} us, "
              f"{ours / plain:.1f} times as long")  # fmt: skip


def check_fast_path(mended: Callable[..., Tensor]) -> None:
    """Right in float64's eyes, and then clearly faster than what it was, or about as fast as plain products."""
    shapes = ((1, 9, 3, 64), (5, 9, 3, 64), (300, 9, 3, 64), (40, 4, 4, 8), (33, 6, 1, 16))
    compare(
        mended,
        _in_float64(),
        [Case(f"{context} tokens, {heads} heads on {pairs}, head_dim {size}", *_stored(context, heads, pairs, size))
         for context, heads, pairs, size in shapes],
        expected="bfloat16 [heads, head_dim]: the same attention as before, up to bfloat16's digits",
        mistakes=combined(_in_float64, _ATTENTION, at_once=2),
        tolerance=Tolerance(relative=2e-2),
    )  # fmt: skip
    arguments = _stored(1024)
    ours, broken, plain = fastest([mended, attend_once, plain_products], arguments)
    if ours > max(0.6 * broken, 1.6 * plain):
        raise CheckFailed(
            "one query's attention over 1024 tokens clearly faster than before",
            case=f"1024 tokens: the broken one {broken * 1e6:.0f} us, plain products {plain * 1e6:.0f} us, "
            f"yours {ours * 1e6:.0f} us",
            mistake=_slow(mended, arguments),
        )


def _slow(mended: Callable[..., Tensor], arguments: Sequence[Tensor]) -> str:
    """Why it may be slow still: by what it calls."""
    watch, _ = watched(lambda: mended(*arguments))
    if watch.largest > 5 * arguments[1].numel():  # in float32 they take 4 bytes each
        return (
            "keys and values are copied for every query head: heads that look at one pair can stand as rows of one "
            "product"
        )
    with _Called() as called:
        mended(*arguments)
    if "scaled_dot_product_attention" in called.names:
        return (
            "it is torch's fused attention still, with a single bfloat16 query for each head: the path is slow for that"
        )
    return "profile it: which operation takes the time?"


class _Called(TorchFunctionMode):
    """The names of torch's functions that are called within the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


_ATTENTION: list[tuple[str, dict[str, Any]]] = [
    ("the scores are not divided by sqrt(head_dim)", {"scale": lambda size: 1.0}),
    ("the scores are divided by head_dim; its square root is meant", {"scale": lambda size: 1 / size}),
    ("the scores are divided by sqrt(head_dim) twice", {"scale": lambda size: 1 / size}),
    ("the heads are dealt out one by one; neighbours share a pair: h // (heads // kv_heads)",
     {"pair": lambda head, heads, pairs: head % pairs}),
    ("all heads look at the first pair", {"pair": lambda head, heads, pairs: 0}),
    ("the softmax is missing", {"weigh": lambda scores: scores}),
    ("powers are not divided by their sum", {"weigh": lambda scores: scores.exp()}),
    ("float32 comes back: the rest of the layer goes on in bfloat16", {"dtype": torch.float32}),
    ("the mean of the values comes back, whatever the query is", {"weigh": lambda scores: scores.mul(0).softmax(-1)}),
]  # fmt: skip


def _in_float64(
    scale: Callable[[int], float] = lambda size: size**-0.5,
    pair: Callable[[int, int, int], int] = lambda head, heads, pairs: head // (heads // pairs),
    weigh: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[..., Tensor]:
    """Head by head in float64, with mistakes switched on."""

    def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mixed = []
        for head, row in enumerate(query.double()):
            own = pair(head, len(query), len(keys))
            weights = weigh(keys[own].double() @ row * scale(len(row)))
            mixed.append(weights @ values[own].double())
        return torch.stack(mixed).to(dtype)

    return run


# ---- 6.b ---------------------------------------------------------------------------------------------------------

WAITING_STORY = """
"Each layer takes the GPU 40 microseconds, and there are thirty of them. The step takes five milliseconds. The profiler
shows a processor that is busy all the time and a GPU that is not." Below, how often Python looks at a number of a
tensor, for stacks of several layers. On a GPU each time costs a wait until everything queued is done.
"""
LIMIT = 64.0
Layers = Sequence[Callable[[Tensor], Tensor]]


def through_layers(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The residual stream behind all layers; each layer adds to it, and behind each it is kept within ±64.

    x: float [tokens, hidden], left as it is. layer(x) gives what the layer adds.
    """
    for layer in layers:
        x = x + layer(x)
        if x.abs().max() > 64.0:  # rare, so there is nothing to be done as a rule
            x = x.clamp(-64.0, 64.0)
    return x


def _layers(count: int, gain: float = 1.0, hidden: int = 8) -> list[Callable[[Tensor], Tensor]]:
    weights = torch.randn(count, hidden, hidden, generator=torch.Generator().manual_seed(9)) * gain
    return [partial(torch.matmul, other=weight) for weight in weights]


def _stream(tokens: int = 3, hidden: int = 8) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens))


def show_waiting() -> None:
    """Looks at numbers, by operation."""
    for count in (1, 4, 30):
        with ch06.counted_waits() as waits:
            through_layers(_stream(), _layers(count, 0.1))
        print(f"layers: {count:>2}   waits: {waits.total:>2} {waits.by_name}")


def check_waiting(mended: Callable[..., Tensor]) -> None:
    """The stream first, against layers that are kept within the limit in another way; then what was looked at."""
    cases = [
        Case("1 layer that adds little", _stream(), 1, 0.01),
        Case("1 layer that goes beyond the limit", _stream(), 1, 60.0),
        Case("3 layers, the stream goes beyond the limit in each", _stream(), 3, 20.0),
        Case("no layers", _stream(), 0, 1.0),
        Case("30 layers that add little", _stream(), 30, 0.01),
        Case("30 layers, the stream goes beyond the limit now and then", _stream(5), 30, 0.35),
    ]
    compare(
        partial(_behind, mended),
        partial(_behind, _kept()),
        cases,
        expected="the same stream as before, within the limit behind every layer",
        mistakes=combined(lambda **wrong: partial(_behind, _kept(**wrong)), _WAITING, at_once=2),
    )
    for case in cases:
        with ch06.counted_waits() as waits:
            case.call(partial(_behind, mended))
        if waits.total:
            raise CheckFailed(
                "no wait on a GPU, however many layers there are",
                case=f"{case.text}: {waits.total} wait{'s' * (waits.total > 1)}, {_named(waits.by_name)}",
                mistake=_LOOKED,
            )


def _behind(function: Callable[..., Tensor], x: Tensor, count: int, gain: float) -> Any:
    return function(x, _layers(count, gain))


def _named(by_name: dict[str, int]) -> str:
    return ", ".join(f"{name} {count} times" if count > 1 else f"{name} once" for name, count in by_name.items())


_LOOKED = (
    "a number of a tensor is looked at: .item(), float(...), bool(...), `if` and `while` over a tensor, min and max of "
    "Python, .tolist() and x[mask] all have to wait for it. What must be done can be done without asking"
)
_WAITING: list[tuple[str, dict[str, Any]]] = [
    ("the stream is not kept within the limit any more", {"keep": lambda x: x}),
    ("the stream is kept within the limit behind the last layer only; the layers between see what goes beyond it",
     {"last_only": True}),
    ("each layer's own part is kept within the limit; the sum is meant", {"part": True}),
    ("the stream is kept within the limit before each layer, and not behind the last", {"before": True}),
    ("the limit is another one", {"keep": lambda x: x.clamp(-1, 1)}),
    ("only what is too large is brought back, not what is too small", {"keep": lambda x: x.clamp(max=LIMIT)}),
    ("the stream is scaled to the limit; only the numbers beyond it are to be changed",
     {"keep": lambda x: x * (LIMIT / x.abs().max().clamp(min=LIMIT))}),
    ("numbers beyond the limit become 0; they are brought back to the limit",
     {"keep": lambda x: x.masked_fill(x.abs() > LIMIT, 0)}),
    ("numbers below the limit lose their sign", {"keep": lambda x: x.masked_fill(x.abs() > LIMIT, LIMIT)}),
    ("what the layers add is not added to the stream, but takes its place", {"residual": False}),
    ("every layer gets the stream as it was at the beginning", {"first": True}),
]  # fmt: skip


def _kept(
    keep: Callable[[Tensor], Tensor] = lambda x: torch.minimum(
        torch.maximum(x, x.new_tensor(-LIMIT)), x.new_tensor(LIMIT)
    ),
    **wrong: bool,
) -> Callable[[Tensor, Layers], Tensor]:
    """Layer by layer, with mistakes switched on; nothing is looked at."""

    def run(x: Tensor, layers: Layers) -> Tensor:
        first = x
        for layer in layers:
            x = keep(x) if wrong.get("before") else x
            added = layer(first if wrong.get("first") else x)
            added = keep(added) if wrong.get("part") else added
            x = x + added if wrong.get("residual", True) else added
            x = x if wrong.get("last_only") or wrong.get("part") or wrong.get("before") else keep(x)
        return keep(x) if wrong.get("last_only") and layers else x

    return run


# ---- 6.c ---------------------------------------------------------------------------------------------------------

RESCALING_STORY = """
"Attention in tiles, so that long texts fit. With short texts it is right to the last digit. With long ones the answers
drift, some by a lot, and others not at all." Below, one query over texts in tiles of 4 tokens, and where its largest
score stands.
"""


def attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, tile: int) -> Tensor:
    """One query's attention in one pass over keys and values, without ever holding all scores.

    query: float [head_dim]; keys, values: float [context, head_dim]; returns float [head_dim]. tile: tokens at a time.
    """
    top = torch.tensor(-torch.inf)
    total, mixed = torch.zeros(()), torch.zeros_like(query)
    for first in range(0, len(keys), tile):
        scores = keys[first : first + tile] @ query * len(query) ** -0.5
        top = torch.maximum(top, scores.max())
        powers = torch.exp(scores - top)
        total = total + powers.sum()
        mixed = mixed + powers @ values[first : first + tile]
    return mixed / total


def _text(context: int, peak: int, height: float = 4.0, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """A query, keys and values; the largest score stands at `peak`, that much above the others'."""
    generator = torch.Generator().manual_seed(context)
    query, (keys, values) = torch.ones(size), torch.randn(2, context, size, generator=generator)
    keys = 0.2 * keys
    keys[peak] += height * size**-0.5
    return query, keys, values


def show_rescaling() -> None:
    """How far off the results are."""
    for context, peak in ((4, 2), (16, 0), (16, 6), (16, 14)):
        query, keys, values = _text(context, peak)
        off = (attend_in_tiles(query, keys, values, 4) - _whole(query, keys, values)).abs().max()
        print(f"{context:>2} tokens, the largest score at {peak:>2}, in tile {peak // 4}: off by {float(off):.6f}")


def _whole(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    weights = (keys.double() @ query.double() * len(query) ** -0.5).softmax(0)
    return (weights @ values.double()).to(query.dtype)


def check_rescaling(mended: Callable[..., Tensor]) -> None:
    """Against the softmax over all scores in float64; then a long text, for the memory that is taken."""
    compare(
        mended,
        lambda query, keys, values, tile: _whole(query, keys, values),
        [
            Case(f"{context} tokens in tiles of {tile}, the largest score ({height:g} above the others) at {peak}",
                 *_text(context, peak, height), tile)
            for context, tile, peak, height in (
                (3, 4, 1, 4.0), (8, 4, 1, 4.0), (8, 4, 6, 4.0), (2, 1, 1, 4.0), (16, 4, 14, 4.0), (12, 4, 6, 4.0),
                (13, 4, 12, 4.0), (9, 2, 8, 300.0), (9, 2, 5, 300.0), (9, 2, 0, 300.0), (40, 7, 33, 20.0),
            )
        ],
        expected="softmax(scores) @ values, as if all scores had been there at once",
        mistakes=combined(_folded, _RESCALING, at_once=2),
        diagnose=_of_powers,
    )  # fmt: skip
    long = _text(20_000, 15_000)
    watch, _ = watched(lambda: mended(*long, 64))
    if watch.largest > 2 * 20_000:
        raise CheckFailed(
            "one pass, tile by tile: never all scores at once",
            case=f"20000 tokens in tiles of 64: one operation takes {watch.largest} bytes of new memory",
            mistake="all scores are computed at once, or all keys are copied. The sums can be mended where they "
            "are made",
        )


def _of_powers(got: Any, want: Any) -> str:
    if isinstance(got, Tensor) and bool((~torch.isfinite(got)).any()):
        return "an exponential overflows, or all of them are 0: the largest score so far has to be taken off"
    return ""


_RESCALING: list[tuple[str, dict[str, Any]]] = [
    ("what was summed before a larger score turned up is not rescaled: those powers were taken with another top",
     {"total": 0, "mixed": 0}),
    ("the sum of the powers is rescaled, the sum of the values is not", {"mixed": 0}),
    ("the sum of the values is rescaled, the sum of the powers is not", {"total": 0}),
    *(("the old sums grow where they should shrink: the factor is exp(old top - new top)",
       {"total": -1, "mixed": -1, "guarded": guarded}) for guarded in (True, False)),
    ("the old sums are rescaled twice", {"total": 2, "mixed": 2}),
    ("the new powers are rescaled with the old ones; they have the new top already", {"new": 1}),
    ("each tile's own largest score is taken off, and the old sums are not brought to it",
     {"tops": "own", "total": 0, "mixed": 0}),
    ("the top is that of the newest tile; it has to be the largest of all so far", {"tops": "own"}),
    ("the top stays that of the first tile: a much larger score overflows", {"tops": "first", "total": 0, "mixed": 0}),
    ("nothing is taken off: large scores overflow", {"tops": "none", "total": 0, "mixed": 0}),
    ("each tile is divided by its own sum, and the tiles are averaged", {"tops": "averaged"}),
    ("the factor is e to the new top; only the difference of old and new counts",
     {"factor": lambda old, new: torch.exp(-new)}),
    ("the sums are multiplied by the ratio of the tops; it is their difference, as a power of e",
     {"factor": lambda old, new: torch.where(torch.isinf(old), torch.zeros(()), old / new)}),
    ("the division by the sum is missing", {"divided": False}),
]  # fmt: skip


def _chosen(tops: str, top: Tensor, scores: Tensor) -> Tensor:
    """What is taken off a tile's scores."""
    if tops == "none":
        return torch.zeros(())
    if tops == "largest":
        return torch.maximum(top, scores.max())
    return top if tops == "first" and not torch.isinf(top) else scores.max()


def _folded(
    tops: str = "largest",
    total: int = 1,
    mixed: int = 1,
    new: int = 0,
    factor: Callable[[Tensor, Tensor], Tensor] = lambda old, new: torch.exp(old - new),
    divided: bool = True,
    guarded: bool = True,
) -> Callable[..., Tensor]:
    """Tile by tile, with mistakes switched on; total, mixed and new: how many times each is rescaled."""

    def run(query: Tensor, keys: Tensor, values: Tensor, tile: int) -> Tensor:
        top, sums, mix, parts = torch.tensor(-torch.inf), torch.zeros(()), torch.zeros_like(query), []
        for first in range(0, len(keys), tile):
            scores = keys[first : first + tile] @ query * len(query) ** -0.5
            chosen = _chosen(tops, top, scores)
            shrink = factor(top, chosen)
            powers = torch.exp(scores - chosen) * (shrink**new if first else 1.0)
            parts.append(powers @ values[first : first + tile] / powers.sum())
            before = torch.ones(()) if guarded and not first else shrink
            sums = sums * before**total + powers.sum()
            mix = mix * before**mixed + powers @ values[first : first + tile]
            top = chosen
        if tops == "averaged":
            return torch.stack(parts).mean(0)
        return mix / sums if divided else mix

    return run
