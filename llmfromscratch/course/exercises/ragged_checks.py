"""The check of chapter 3's ragged attention: every request on its own keys and values, wherever they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.batch import Batch, Span
from llmfromscratch.course import locating
from llmfromscratch.course.comparing import Case, compare, expect_equal
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import (
    CLOSE,
    Heads,
    causal,
    random_numbers,
    seen,
    torchs_attention,
)
from llmfromscratch.course.exercises.tensor_watch import TensorWatch


class _Memory:
    """Stands for a cache: every request's keys and values of every layer; each read overwrites what the last gave."""

    def __init__(self, batch: Batch, heads: Heads, like: Tensor, num_layers: int = 2):
        self.num_layers, self._starts = num_layers, {span.request_id: span.start for span in batch.spans}
        ends = {span.request_id: span.start + span.length for span in batch.spans}
        self._pairs = {
            (layer, request): random_numbers(2, heads[1], end, heads[2], seed=31 * request + 7 * layer + end).to(
                like.dtype
            )
            for layer in range(num_layers)
            for request, end in ends.items()
        }
        self._lent = like.new_empty(2 * heads[1] * max(ends.values()) * heads[2])

    def length(self, request_id: int) -> int:
        """Tokens that were stored before this pass."""
        return self._starts[request_id]

    def read(self, layer: int, request_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, kv_heads, head_dim], in memory that the next read overwrites."""
        pair = self._pairs[layer, request_id]
        lent = self._lent[: pair.numel()].view(pair.shape).copy_(pair)
        keys, values = lent.transpose(1, 2)
        return keys, values


Parts = Sequence[tuple[int, int, int]]  # (request, new tokens, tokens already stored)


def check_attend(attend: Callable[..., Tensor]) -> None:
    """Every request against torch's attention on its own keys and values."""
    compare(
        partial(_ragged, attend),
        partial(_ragged, _by_spans()),
        [
            _ragged_case([(7, 1, 0)], (1, 1, 2), 0),
            _ragged_case([(7, 3, 0)], (1, 1, 2), 0),
            _ragged_case([(4, 1, 3)], (2, 1, 2), 0),
            _ragged_case([(4, 2, 3)], (2, 1, 2), 0),
            _ragged_case([(7, 3, 0)], (3, 3, 4), 1),
            _ragged_case([(7, 2, 0), (4, 1, 3)], (2, 2, 4), 0),
            _ragged_case([(4, 1, 3), (7, 2, 0)], (2, 2, 4), 0),
            _ragged_case([(9, 1, 6), (2, 4, 0), (5, 3, 2), (1, 1, 1)], (9, 3, 8), 1),
            _ragged_case([(3, 2, 5), (8, 5, 1)], (6, 2, 6), 1, torch.float64),
        ],
        expected="every row's attention over the keys and values of its own request, in this layer",
        mistakes=[
            *(("every row looks at the first request's keys; each span names its own request",
               _spans_wrongly(request="first", mask=mask)) for mask in ("lower", "chunks")),
            ("the keys and values are read from layer 0; each layer has its own", _spans_wrongly(layer=0)),
            ("the keys are used as values", _spans_wrongly(values="keys")),
            ("nothing is hidden: the tokens of a chunk see those that come after them", _spans_wrongly(mask="none")),
            ("the mask begins at 0 in a chunk: its first row is the token at span.start", _spans_wrongly(mask="top")),
            ("nothing is hidden once tokens are stored; a chunk of several tokens needs a mask, too",
             _spans_wrongly(mask="prompts")),
            ("a request sees its new tokens only; those that are stored are keys and values too",
             _spans_wrongly(only="new")),
            *((sentence, _spans_wrongly(rows=rows, blank=blank)) for blank in (torch.nan, 0.0) for sentence, rows in (
                ("only the first request's rows are computed, the others are never written", "first"),
                ("only the last request's rows are computed, the others are never written", "last"),
                (_BY_POSITION, "position"), (_BY_POSITION, "position, refused where one is missing"))),
            ("all requests are read before the first is computed; what a read gives is overwritten by the next one",
             _spans_wrongly(late=True)),
            ("the weights come out; asked for is the output", _spans_wrongly(gives="weights")),
        ],
        diagnose=_of_missing_rows,
        explain=_of_request,
        tolerance=CLOSE,
        what="the output",
    )  # fmt: skip
    compare(
        partial(_ragged, attend),
        partial(_ragged, _by_spans()),
        [_ragged_case([(7, 3, 0), (4, 1, 3)], (4, 2, 4), 0, torch.bfloat16)],
        expected="the output in the dtype of the queries",
        tolerance=Tolerance(relative=4e-2),
        what="the output",
    )
    _check_device(attend)


def _check_device(attend: Callable[..., Tensor]) -> None:
    """On tensors without numbers, of the device "meta": which devices meet can be seen without a GPU."""
    case = _ragged_case([(7, 3, 0), (4, 2, 3)], (4, 2, 4), 0)
    elsewhere = case.args[0].to("meta"), *case.args[1:]
    with contextlib.suppress(Exception), TensorWatch() as watch:  # code that looks at numbers may fail there
        _ragged(attend, *elsewhere)
    expect_equal(
        watch.mixed,
        False,
        expected="a mask that lies where the queries do: on a GPU the CPU's are refused",
        case="queries, keys and values on another device than the CPU",
        mistakes=[("causal_mask is not told the device, so its mask lies on the CPU: queries.device says where", True)],
        what="a tensor of the CPU meets them",
    )


_BY_POSITION = "the rows are cut with `span.start`: start counts in the request's text, span.rows in the batch"


def _of_missing_rows(got: Any, want: Any) -> str:
    missing = isinstance(got, Tensor) and got.dim() == want.dim() and len(got) < len(want)
    return f"rows are missing; perhaps {_BY_POSITION}" if missing else ""


def _of_request(error: BaseException, case: Case) -> str:
    if isinstance(error, KeyError):
        return "nothing is stored under this: cache.read takes the layer first, then the request's number"
    if not locating.is_about_shapes(error):
        return ""
    if "0 elements" in str(error) or "(0)" in str(error):
        return f"no row is left of the queries; perhaps {_BY_POSITION}"
    if any(start and new > 1 for _, new, start in case.args[1]):
        return "keys and mask do not fit: both have a column for every stored token, and then one for every new token"
    return ""


def _ragged_case(parts: Parts, heads: Heads, layer: int, dtype: torch.dtype = torch.float32) -> Case:
    told = " and ".join(f"{new} after {start} of request {request}" for request, new, start in parts)
    rows = sum(new for _, new, _ in parts)
    queries = random_numbers(rows, heads[0], heads[2], seed=rows).to(dtype)
    return Case(f"tokens: {told}; layer {layer}", queries, parts, heads, layer)


def _ragged(attend: Callable[..., Tensor], queries: Tensor, parts: Parts, heads: Heads, layer: int) -> Tensor:
    batch = Batch.of([(request, [0] * new, start) for request, new, start in parts])
    with _unwritten_as_nan():
        return attend(queries, layer, batch, _Memory(batch, heads, queries))


@contextlib.contextmanager
def _unwritten_as_nan() -> Iterator[None]:
    """Within the block, memory from torch.empty is NaN until it is written, and not what was there before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _by_spans(
    request: str = "own", layer: int | None = None, mask: str = "lower", rows: str = "own", **wrong: Any
) -> Callable[..., Tensor]:
    """One request after the other, with torch's attention; one mistake switched on."""

    def run(queries: Tensor, asked: int, batch: Batch, memory: _Memory) -> Tensor:
        output, spans = torch.full_like(queries, wrong.get("blank", 0.0)), batch.spans
        number = asked if layer is None else layer
        pairs = [memory.read(number, spans[0].request_id if request == "first" else s.request_id) for s in spans]
        for place, span in enumerate(spans):
            if (rows == "first" and place > 0) or (rows == "last" and place < len(spans) - 1):
                continue
            keys, values = pairs[place]
            if not wrong.get("late"):
                keys, values = memory.read(number, spans[0].request_id if request == "first" else span.request_id)
            if wrong.get("only") == "new":
                keys, values = keys[span.start :], values[span.start :]
            mine = slice(span.start, span.start + span.length) if rows.startswith("position") else span.rows
            if rows.endswith("missing") and span.length > 1 and len(queries[mine]) < span.length:
                raise RuntimeError  # as most ways to write attention do when the mask has more rows than the queries
            found = torchs_attention(
                queries[mine],
                keys,
                keys if wrong.get("values") else values,
                _visible(mask, span, wrong.get("only", "")),
            )
            output[mine] = found[1].transpose(0, 1) if wrong.get("gives") == "weights" else found[0]
        return output

    return run


def _spans_wrongly(**wrong: Any) -> Callable[..., Tensor]:
    return partial(_ragged, _by_spans(**wrong))


def _visible(mask: str, span: Span, only: str = "") -> Tensor | None:
    """Who may look at whom in one request, by mistaken rules too."""
    if only == "new":
        return causal(0, span.length)
    if mask == "none" or (mask == "prompts" and span.start > 0) or (mask == "chunks" and span.length == 1):
        return None
    if mask == "top" and span.length > 1:
        return seen(lambda position, key, row: key <= row)(span.start, span.length)
    return causal(span.start, span.length)
