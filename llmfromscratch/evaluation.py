"""What quantization costs: how far a model is from the one it was made of, in numbers that can be compared.

    perplexity   how much a text surprises the model            needs no reference
    KL           how far each next-token distribution has moved   sees what perplexity averages away
    top-1        how often the most probable token is the same    what greedy answers will notice
    quiz         how often the right answer wins (`quiz`)         what somebody who asks will notice

Perplexity alone can be lucky: a damaged model may find a text no more surprising. So KL decides, and the others say
what it means. Sizes, speeds and damage of several variants make a `Table`; its frontier says which are worth having.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmfromscratch import quantization, quantized_model, quiz, sampling
from llmfromscratch.engine import LLM
from llmfromscratch.errors import RequestError
from llmfromscratch.progress import progress_bar
from llmfromscratch.reading import SIZE, Window, logits_of, windows, windows_of
from llmfromscratch.sensitivity import Sensitivity, sensitivity

__all__ = [
    "Damage", "Frontier", "Reference", "Sensitivity", "Table", "Variant", "Window",
    "damage", "frontier", "measure", "measure_speed", "perplexity", "sensitivity", "weight_bytes", "windows",
]  # fmt: skip

_ROWS = 128  # tokens whose distributions are compared at once
_DELAY = 1.0  # seconds before a progress bar shows
_NOT_MEASURED = "–"


# ---- perplexity --------------------------------------------------------------------------------------------------


def perplexity(side: Any, text: Any, window: int = SIZE, stride: int = SIZE // 2) -> float:
    """exp of the mean surprise of a text's tokens, each read with up to `window` tokens before it.

    side: an `LLM`, whatever its parts, or a `model.Model`. text: text, token ids, or windows. A window begins `stride`
    tokens after the one before, and only tokens not counted before count: with more overlap each has more context, and
    it takes longer. Raises RequestError.
    """
    found = windows_of(side, text, window, min(stride, window))
    surprise = 0.0
    for each in _shown(found, "perplexity"):
        logs = logits_of(side, each).log_softmax(dim=-1)
        surprise += _surprise(logs, each)
    return _exp(surprise / sum(each.counted for each in found))


def _surprise(logs: Tensor, window: Window) -> float:
    """The sum of -log p over a window's tokens that count."""
    targets = torch.tensor(window.ids[window.first :], device=logs.device)
    return -float(logs.gather(-1, targets.unsqueeze(-1)).double().sum())


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def _shown(items: Sequence[Any], description: str) -> Any:
    return progress_bar(items, description, unit="window", delay=_DELAY)


# ---- damage ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """How far a model is from its reference. kl: nats a token, on average. top1: share of tokens at which both have the
    same most probable one. perplexity, reference_perplexity: of the two, on the same tokens, `tokens` many."""

    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    tokens: int

    @property
    def ratio(self) -> float:
        """The perplexity as a multiple of the reference's."""
        return self.perplexity / self.reference_perplexity

    def __str__(self) -> str:
        return (
            f"KL {_nats(self.kl)} nats a token, top-1 agreement {self.top1:.1%}, perplexity {self.perplexity:.2f} "
            f"({self.ratio:.3f} of {self.reference_perplexity:.2f}), over {self.tokens:,} tokens"
        )


class _Read(NamedTuple):
    """What a model made of a window: log-probabilities [counted, vocab], the most probable tokens, the surprise."""

    logs: Tensor
    best: Tensor
    surprise: float


class Reference:
    """What a model expects over a text, kept, so that many variants can be held against it and it may be gone by then.

    side, text, window, stride: as in `damage`. Log-probabilities are kept in half precision, 2 bytes for each token and
    word of the vocabulary (`nbytes`), which moves a KL by less than 1e-5; the rest is exact.
    """

    def __init__(self, side: Any, text: Any, window: int = SIZE, stride: int | None = None):
        self.windows = windows_of(side, text, window, stride)
        self._reads = []
        for each in _shown(self.windows, "reference"):
            read = _read(side, each)
            self._reads.append(read._replace(logs=read.logs.half()))

    @property
    def tokens(self) -> int:
        """The tokens that count."""
        return sum(each.counted for each in self.windows)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(read.logs.nbytes for read in self._reads)

    @property
    def perplexity(self) -> float:
        """The model's own."""
        return _exp(sum(read.surprise for read in self._reads) / self.tokens)

    def read(self, place: int) -> _Read:
        """What was kept of the window in this place."""
        return self._reads[place]


def damage(reference: Any, other: Any, text: Any = None, window: int = SIZE, stride: int | None = None) -> Damage:
    """How far `other` is from `reference` over a text, window by window: memory holds the logits of one at a time.

    reference: a `Reference`, which brings its text along (give none), or an `LLM` or `model.Model` like other; each
    computes in its own dtype. text: text, token ids, or int64 [count, length]. stride: None lets windows lie side by
    side. Raises RequestError.
    """
    kept = reference if isinstance(reference, Reference) else None
    if (kept is None) == (text is None):
        raise RequestError("give a text, unless the reference is a Reference, which brings its own.")
    found = kept.windows if kept else windows_of(reference, text, window, stride)
    words = other.config.vocab_size
    kl, same, ours, theirs, tokens = 0.0, 0, 0.0, 0.0, sum(each.counted for each in found)
    for place, each in enumerate(_shown(found, "damage")):
        expected = kept.read(place) if kept else _read(reference, each)
        if expected.logs.shape[1] != words:
            raise RequestError(f"the reference has {expected.logs.shape[1]} tokens to choose from, the other {words}.")
        got = _read(other, each)
        kl += _divergence(expected.logs, got.logs)
        same += int((expected.best == got.best).sum())
        ours, theirs = ours + expected.surprise, theirs + got.surprise
    return Damage(kl / tokens, same / tokens, _exp(theirs / tokens), _exp(ours / tokens), tokens)


def _read(side: Any, window: Window) -> _Read:
    logs = logits_of(side, window).cpu().log_softmax(dim=-1)
    return _Read(logs, logs.argmax(dim=-1), _surprise(logs, window))


def _divergence(logs: Tensor, other: Tensor) -> float:
    """The sum over tokens. Logarithms of probabilities are logits too."""
    pairs = zip(logs.split(_ROWS), other.split(_ROWS), strict=True)
    return sum(float(quantization.divergence(ours.float(), theirs).double().sum()) for ours, theirs in pairs)


# ---- size and speed ----------------------------------------------------------------------------------------------


def weight_bytes(side: Any) -> int:
    """Bytes of a model's weights; memory that several tensors share (a tied head, views of a fused weight) counts once.

    side: an `LLM` or its network.
    """
    return quantized_model.nbytes(getattr(side, "model", side))


def measure_speed(llm: LLM, tokens: int = 64, prompt: int = 16, repeats: int = 3) -> float:
    """Tokens a second of one stream while it decodes, the best of some runs, after one that counts for nothing.

    prompt: tokens before the first; the cache is short, so this is the speed of the weights. Raises RequestError.
    """
    if tokens < 2:
        raise RequestError(f"a speed is measured between tokens, so over at least 2, not {tokens}.")
    ids = [place % llm.config.vocab_size for place in range(1, prompt + 1)]
    params = sampling.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    times = []
    for _ in range(repeats + 1):
        answer = llm.generate([ids], params)[0]
        if answer.metrics is None or not answer.metrics.tpot:
            raise RequestError(f"no speed could be measured: {answer.error or 'the answer ended at once.'}")
        times.append(answer.metrics.tpot)
    return 1 / min(times[1:])


# ---- variants ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A model in one precision. bytes: of its weights. tokens_per_second: of one stream. kl, top1, perplexity: as in
    `Damage`. quiz: share of right answers. None where something was not measured."""

    name: str
    bytes: int
    tokens_per_second: float | None = None
    kl: float | None = None
    top1: float | None = None
    perplexity: float | None = None
    quiz: float | None = None


def measure(
    name: str, llm: LLM, reference: Reference, questions: Sequence[quiz.Question] | None = quiz.QUESTIONS,
    tokens: int = 64,
) -> Variant:  # fmt: skip
    """All columns of a variant. questions: None leaves the quiz out. tokens: of the stream measured; 0: none."""
    found = damage(reference, llm)
    right = quiz.accuracy(llm, questions).share if questions else None
    speed = measure_speed(llm, tokens) if tokens else None
    return Variant(name, weight_bytes(llm), speed, found.kl, found.top1, found.perplexity, right)


@dataclass(frozen=True)
class Frontier:
    """Which variants are worth having. by_size, by_speed: of each name, that of a variant which is at least as small
    (as fast) and does no more damage, one of both strictly; None for those on the frontier. Variants that lack a figure
    are left out."""

    by_size: dict[str, str | None]
    by_speed: dict[str, str | None]


def frontier(variants: Iterable[Variant]) -> Frontier:
    """Who is dominated, in bytes and KL, and in speed and KL. Raises RequestError where two have one name."""
    found = _named(variants)
    sized = [(each.name, float(each.bytes), each.kl) for each in found if each.kl is not None]
    speeds = [(each.name, -each.tokens_per_second, each.kl) for each in found
              if each.kl is not None and each.tokens_per_second is not None]  # fmt: skip
    return Frontier(dominated(sized), dominated(speeds))


def dominated(points: Sequence[tuple[str, float, float]]) -> dict[str, str | None]:
    """Of points (name, cost, damage), less of each being better: who dominates each, None where nobody does.

    Of several, it is the one with the least damage, then the least cost.
    """
    answer: dict[str, str | None] = {}
    for name, cost, harm in points:
        above = [(h, c, n) for n, c, h in points if c <= cost and h <= harm and (c < cost or h < harm)]
        answer[name] = min(above)[2] if above else None
    return answer


def _named(variants: Iterable[Variant]) -> list[Variant]:
    found = list(variants)
    names = [each.name for each in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"several variants are called {twice[0]!r}; give each a name of its own.")
    return found


class Table:
    """Variants in rows, in the order given; print it, or let it be the last line of a notebook cell."""

    HEAD = ("variant", "MB", "of first", "tok/s", "KL", "top-1", "perplexity", "quiz", "dominated by")

    def __init__(self, variants: Iterable[Variant]):
        self.variants = _named(variants)

    def rows(self) -> list[tuple[str, ...]]:
        """The cells as text. The last says which variant is no larger, and which no slower, without more damage."""
        edge = frontier(self.variants)
        return [(*_cells(each, self.variants[0]), _above(edge, each.name)) for each in self.variants]

    def _shown(self) -> list[tuple[str, ...]]:
        """The head and the rows, without columns that nobody measured."""
        columns = zip(*[self.HEAD, *self.rows()], strict=True)
        return list(zip(*(each for each in columns if set(each[1:]) != {_NOT_MEASURED}), strict=True))

    def __str__(self) -> str:
        table = self._shown()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        left = (0, len(widths) - 1)
        lines = []
        for row in table:
            cells = zip(range(len(row)), row, widths, strict=True)
            lines.append("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, c, w in cells).rstrip())
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        head, *rows = self._shown()
        lines = [head, ("---", *["---:"] * (len(head) - 2), "---"), *rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def _cells(variant: Variant, first: Variant) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return _NOT_MEASURED if value is None else format(value, form)

    return (
        variant.name,
        f"{variant.bytes / 1e6:.1f}",
        f"{variant.bytes / first.bytes:.0%}" if first.bytes else _NOT_MEASURED,
        shown(variant.tokens_per_second, ".0f"),
        _NOT_MEASURED if variant.kl is None else _nats(variant.kl),
        shown(variant.top1, ".1%"),
        shown(variant.perplexity, ".2f"),
        shown(variant.quiz, ".0%"),
    )


def _nats(kl: float) -> str:
    """Three digits down to 0.0001; below that only how small it is."""
    return "0" if kl == 0 else f"{kl:.1e}" if abs(kl) < 1e-4 else f"{kl:.4f}" if abs(kl) < 0.1 else f"{kl:.3g}"


def _above(edge: Frontier, name: str) -> str:
    size, speed = edge.by_size.get(name), edge.by_speed.get(name)
    if size is not None and size == speed:
        return size
    said = [f"{what}: {other}" for what, other in (("size", size), ("speed", speed)) if other is not None]
    return "; ".join(said)
