"""The checks of chapter 3's first half: softmax, the mask, and attention, against torch's own in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llmfromscratch.batch import Batch, Span
from llmfromscratch.course.comparing import Case, compare, expect_equal
from llmfromscratch.course.differences import Tolerance

_HIDDEN = -torch.inf
_CLOSE = Tolerance(relative=1e-5)
Heads = tuple[int, int, int]  # query heads, key/value heads, head dim


def _random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- 3.1 softmax -------------------------------------------------------------------------------------------------


def check_softmax(softmax: Callable[[Tensor], Tensor]) -> None:
    """Against torch.softmax in float64, on scores that no power of e survives as well."""
    turned = _random(4, 3, seed=1).T  # the rows lie apart in memory
    compare(
        softmax,
        lambda scores: torch.softmax(scores.double(), dim=-1).to(scores.dtype),
        [
            Case("[0, 0]", torch.zeros(2)),
            Case("[0, ln 3]", torch.tensor([1.0, 3.0]).log()),
            Case("[0, 0, -inf]", torch.tensor([0.0, 0.0, _HIDDEN])),
            Case("[1000, 1000, -inf]", torch.tensor([1000.0, 1000.0, _HIDDEN])),
            Case("[-1000, -1001]", torch.tensor([-1000.0, -1001.0])),
            Case("two rows, [0, 1] and [2, 5]", torch.tensor([[0.0, 1.0], [2.0, 5.0]])),
            Case("two rows far apart, [0, 1] and [1000, 1001]", torch.tensor([[0.0, 1.0], [1000.0, 1001.0]])),
            Case("a row that sees one key, [5, -inf], above [1, 2]", torch.tensor([[5.0, _HIDDEN], [1.0, 2.0]])),
            Case("3 rows of 4, turned", turned),
            Case("random [2, 3, 2, 5]", _random(2, 3, 2, 5, seed=2, scale=4.0)),
            Case("float64", _random(2, 6, seed=3).double()),
            Case("bfloat16, scores of about 100", _random(2, 6, seed=4, scale=100.0).bfloat16()),
        ],
        expected="weights of each row that are e**score over the row's sum, in the dtype of `scores`",
        mistakes=[
            ("the largest score is not taken off first: e**1000 is infinite, e**-1000 is 0, and both end as NaN",
             lambda scores: scores.exp() / scores.exp().sum(-1, keepdim=True)),
            ("the weights of a column sum to 1; those of a row should", partial(torch.softmax, dim=0)),
            ("the powers of all rows are summed; each row has a sum of its own",
             lambda scores: _powers(scores) / _powers(scores).sum()),
            ("the powers are divided by the sums of the columns; each row has a sum of its own",
             lambda scores: _powers(scores) / _powers(scores).sum(0, keepdim=True)),
            ("the largest score of the whole tensor is taken off; in a row far below it every power is 0, and 0 / 0 "
             "is NaN", lambda scores: _shared(scores, scores.max())),
            ("the largest score of each column is taken off; the rows have one each",
             lambda scores: _shared(scores, scores.amax(0, keepdim=True))),
            ("the smallest score is taken off; the largest keeps every power at 1 or below",
             lambda scores: _shared(scores, scores.amin(-1, keepdim=True))),
            ("the mean is taken off; with a score of -inf it is -inf too",
             lambda scores: _shared(scores, scores.mean(-1, keepdim=True))),
            ("the powers are not divided by their sum", _powers),
            ("the scores are divided by their sum; the powers e**score should be",
             lambda scores: scores / scores.sum(-1, keepdim=True)),
            ("powers of 2 in place of powers of e",
             lambda scores: torch.softmax(scores.double() * torch.log(torch.tensor(2.0)), -1).to(scores.dtype)),
            ("these are the logarithms of the weights", partial(torch.log_softmax, dim=-1)),
        ],
    )  # fmt: skip


def _powers(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp()


def _shared(scores: Tensor, taken_off: Tensor) -> Tensor:
    powers = (scores - taken_off).exp()
    return powers / powers.sum(-1, keepdim=True)


# ---- 3.2 the mask ------------------------------------------------------------------------------------------------


def check_causal_mask(causal_mask: Callable[..., Tensor]) -> None:
    """Against the sentence itself, key by key: a token sees the keys at its own position and before."""
    compare(
        causal_mask,
        _seen(lambda position, key, row: key <= position),
        [
            Case(f"start {start}, new {new}", start, new)
            for start, new in ((0, 1), (0, 2), (0, 3), (2, 1), (2, 2), (1, 3), (5, 4))
        ],
        expected="bool [new, start + new]: row i is the token at position start + i, which sees all up to itself",
        mistakes=[
            ("the mask is aligned with the first key: row i is taken for the token at position i, but in a chunk it "
             "stands at start + i", _seen(lambda position, key, row: key <= row)),
            ("a token does not see itself; the first one of a text would see nothing at all",
             _seen(lambda position, key, row: key < position)),
            ("a token sees one key too many, the one after itself",
             _seen(lambda position, key, row: key <= position + 1)),
            ("True and False are exchanged: True means that a query may look",
             _seen(lambda position, key, row: key > position)),
            ("the tokens look ahead: they see themselves and what comes after",
             _seen(lambda position, key, row: key >= position)),
            ("all is visible; in a prompt the later tokens must be hidden", _seen(lambda position, key, row: True)),
            ("the stored tokens are hidden; all of them come before the new ones",
             lambda start, new: _seen(lambda position, key, row: start <= key <= position)(start, new)),
            ("a token sees nothing but itself", _seen(lambda position, key, row: key == position)),
            ("0 and -inf, to be added to scores; asked for are True and False",
             lambda start, new: torch.zeros(new, start + new).masked_fill(
                 _seen(lambda position, key, row: key > position)(start, new), _HIDDEN)),
            ("the columns of the stored tokens are missing; they are keys too",
             lambda start, new: torch.ones(new, new).tril().bool()),
            ("a row and a column for every token; only the new ones ask, so there are `new` rows",
             lambda start, new: torch.ones(start + new, start + new).tril().bool()),
            ("rows and columns are exchanged: the rows are queries",
             lambda start, new: _seen(lambda position, key, row: key <= position)(start, new).T),
        ],
    )  # fmt: skip
    expect_equal(
        causal_mask(1, 2, device="meta").device.type,
        "meta",
        expected="a mask that lies where `device` says: attention on a GPU cannot use one on the CPU",
        case='device="meta"',
        what="the mask's device",
    )


def _seen(rule: Callable[[int, int, int], bool]) -> Callable[[int, int], Tensor]:
    """The mask of a rule that is asked for every (position of the query, position of the key, row)."""

    def mask(start: int, new: int) -> Tensor:
        return torch.tensor([[rule(start + row, key, row) for key in range(start + new)] for row in range(new)])

    return mask


_causal = _seen(lambda position, key, row: key <= position)

# ---- 3.3 attention of one request --------------------------------------------------------------------------------


def _inputs(new: int, context: int, heads: Heads, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values; keys and values lie head by head in memory, as in a cache."""
    queries = _random(new, heads[0], heads[2], seed=seed, scale=scale)
    pair = _random(2, heads[1], context, heads[2], seed=seed + 100, scale=scale)
    return queries, pair[0].transpose(0, 1), pair[1].transpose(0, 1)


def _attention_cases() -> list[Case]:
    one, values = torch.ones(1, 1, 1), torch.tensor([10.0, 20.0]).view(2, 1, 1)
    loop = torch.tensor([[True, False, False, True, False], [True, False, False, True, True]])
    wide = (torch.tensor([[[2.0, 0, 0, 0]]]), torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 0, 0, 0]]]))
    return [
        Case("one head, two keys with equal scores, values 10 and 20", one, torch.ones(2, 1, 1), values, None),
        Case("the same, the second key hidden", one, torch.ones(2, 1, 1), values, torch.tensor([[True, False]])),
        Case("head_dim 4, scores 2 / √4 and 0", *wide, torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 1, 0, 0]]]), None),
        Case("one head, 2 queries on 2 keys, causal", *_inputs(2, 2, (1, 1, 4), 1), _causal(0, 2)),
        Case("one head, 2 queries, all 3 keys visible", *_inputs(2, 3, (1, 1, 4), 2), None),
        Case("3 heads with a pair each, one query", *_inputs(1, 4, (3, 3, 4), 3), None),
        Case("4 heads on 2 pairs, one query", *_inputs(1, 3, (4, 2, 5), 4), None),
        Case("9 heads on 3 pairs, 2 queries after 2 tokens", *_inputs(2, 4, (9, 3, 8), 5), _causal(2, 2)),
        Case("6 heads on 1 pair, 4 queries", *_inputs(4, 4, (6, 1, 3), 6), _causal(0, 4)),
        Case("a mask with a hole in it", *_inputs(2, 5, (4, 2, 4), 7), loop),
        Case("scores of many thousands", *_inputs(3, 7, (6, 2, 4), 8, scale=600.0), _causal(4, 3)),
        Case("float64, 5 heads on 5 pairs", *(x.double() for x in _inputs(3, 6, (5, 5, 6), 9)), _causal(3, 3)),
    ]


def check_grouped_attention(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Against torch's scaled_dot_product_attention, whose weights are what it makes of one-hot values."""
    compare(
        attention,
        _torchs,
        _attention_cases(),
        expected="(output, weights); the weights are softmax(query · key / √head_dim) over the visible keys",
        mistakes=[
            ("the scores are not divided by √head_dim", _attended(scale=lambda dim: 1.0)),
            ("the scores are divided by head_dim; its root is asked for", _attended(scale=lambda dim: 1 / dim)),
            ("the scores are multiplied by √head_dim; they are divided by it", _attended(scale=lambda dim: dim**0.5)),
            ("the pairs are dealt out in turn (heads 0, 2, 4, ... on pair 0); neighbours share: heads 0 and 1, then 2 "
             "and 3", _attended(pairs=lambda head, heads, kv: head % kv)),
            ("every head looks at the first pair", _attended(pairs=lambda head, heads, kv: 0)),
            ("keys are reshaped to [..., head_dim, context]; that mixes numbers of several keys, so transpose them",
             _attended(reshaped="product")),
            ("keys and values are reshaped to [kv_heads, context, head_dim]; that mixes the heads, so transpose them",
             _attended(reshaped="pairs")),
            ("queries are reshaped to [heads, new, head_dim]; that mixes heads and tokens, so transpose them",
             _attended(reshaped="queries")),
            ("the output is reshaped to [new, heads, head_dim]; that mixes heads and tokens, so transpose it",
             _attended(reshaped="output")),
            ("the softmax runs over the queries; each query shares 1 among its keys", _attended(dim=1)),
            ("the softmax runs over the heads; each query of each head shares 1 among its keys", _attended(dim=0)),
            ("the scores are mixed as they are: the softmax is missing", _attended(softmax=False)),
            ("`visible` is not used", _attended(mask=None)),
            ("the mask hides what it should show: True means that a query may look", _attended(mask="inverted")),
            ("the mask comes after the softmax, so the weights do not sum to 1; hide the scores before",
             _attended(mask="after")),
            ("a hidden score is set to 0, and e**0 is a weight; set it to -inf", _attended(mask="zero")),
            ("another mask than `visible` is used; the caller decides who may look at whom", _attended(mask="causal")),
            ("a mask of your own is used, in place of `visible` and where it is None too", _attended(mask="always")),
            ("something is hidden though `visible` is None: then every key counts", _attended(mask="unasked")),
            ("the softmax overflows: take the largest score of each row off before the powers",
             _attended(stable=False)),
            ("the values of the keys are mixed with the keys: `values` is not used", _attended(mixes="keys")),
            ("weights and output are exchanged: the output comes first", lambda *given: _torchs(*given)[::-1]),
            ("the output has the heads first; asked for is [new, heads, head_dim]",
             lambda *given: (_torchs(*given)[0].transpose(0, 1), _torchs(*given)[1])),
            ("the weights have the queries first; asked for is [heads, new, context]",
             lambda *given: (_torchs(*given)[0], _torchs(*given)[1].transpose(0, 1))),
            ("the weights are the mean over the heads; each head has its own",
             lambda *given: (_torchs(*given)[0], _torchs(*given)[1].mean(0))),
        ],
        tolerance=_CLOSE,
        what="(output, weights)",
    )  # fmt: skip
    _check_half_precision(attention)


def _check_half_precision(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """On scores that bfloat16 holds exactly, so that only the softmax can lose digits."""
    generator = torch.Generator().manual_seed(10)
    queries, keys, values = (
        torch.randint(-2, 3, shape, generator=generator).bfloat16() for shape in ((2, 4, 4), (300, 2, 4), (300, 2, 4))
    )
    compare(
        attention,
        _torchs,
        [Case("bfloat16, 2 queries on 300 keys", queries, keys, values, _causal(298, 2))],
        expected="the output in the dtype of the queries, and weights in float32, from a softmax in float32",
        mistakes=[
            ("the softmax is computed in bfloat16, which has three digits: make the scores float32 first",
             partial(_in_half, result=torch.float32)),
            ("the softmax is computed in bfloat16, which has three digits: make the scores float32 first",
             partial(_in_half, result=torch.bfloat16)),
        ],
        what="(output, weights)",
    )  # fmt: skip


def _in_half(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, result: torch.dtype) -> Any:
    """Weights in bfloat16, rounded after the powers and the sum as well."""
    group = queries.shape[1] // keys.shape[1]
    spread = keys.transpose(0, 1).repeat_interleave(group, 0)
    scores = (queries.transpose(0, 1) @ spread.transpose(1, 2) * queries.shape[-1] ** -0.5).masked_fill(
        ~visible, _HIDDEN
    )
    return _torchs(queries, keys, values, visible)[0], _shared(scores, scores.amax(-1, keepdim=True)).to(result)


def _torchs(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and weights by torch, in float64."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (queries, keys, values))
    attend = partial(F.scaled_dot_product_attention, q, k, attn_mask=visible, enable_gqa=True)
    one_hot = torch.eye(len(keys), dtype=torch.float64).expand(1, keys.shape[1], -1, -1)
    weights = attend(one_hot)[0].to(torch.promote_types(queries.dtype, torch.float32))
    return attend(v)[0].transpose(0, 1).to(queries.dtype), weights


def _attended(
    scale: Callable[[int], float] = lambda dim: dim**-0.5,
    pairs: Callable[[int, int, int], int] = lambda head, heads, kv: head // (heads // kv),
    mask: str | None = "visible",
    dim: int = 2,
    **wrong: Any,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention written out in float64, with one mistake switched on."""

    def run(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        (new, heads, head_dim), (context, kv, _) = queries.shape, keys.shape
        mixed = wrong.get("reshaped")
        q = queries.double().reshape(heads, new, head_dim) if mixed == "queries" else queries.double().transpose(0, 1)
        chosen = [pairs(head, heads, kv) for head in range(heads)]
        k, v = (
            (x.reshape(kv, context, -1) if mixed == "pairs" else x.transpose(0, 1)).double()[chosen]
            for x in (keys, keys if wrong.get("mixes") == "keys" else values)
        )
        turned = k.reshape(heads, head_dim, context) if mixed == "product" else k.transpose(1, 2)
        weights = _weights(q @ turned * scale(head_dim), visible, mask, dim, **wrong)
        output = weights @ v
        output = output.reshape(new, heads, head_dim) if mixed == "output" else output.transpose(0, 1)
        return output.to(queries.dtype), weights.to(torch.promote_types(queries.dtype, torch.float32))

    return run


def _weights(
    scores: Tensor,
    visible: Tensor | None,
    mask: str | None,
    dim: int,
    softmax: bool = True,
    stable: bool = True,
    **_: Any,
) -> Tensor:
    new, context = scores.shape[1:]
    if mask == "always" or mask == ("causal" if visible is not None else "unasked"):
        visible = _causal(context - new, new)
    shown = torch.ones(new, context, dtype=torch.bool) if visible is None or mask is None else visible
    shown = ~shown if mask == "inverted" and visible is not None else shown
    if mask != "after":
        scores = scores.masked_fill(~shown, 0.0 if mask == "zero" else _HIDDEN)
    if softmax:
        powers = scores.exp()
        scores = scores.softmax(dim) if stable else powers / powers.sum(dim, keepdim=True)
    return scores.masked_fill(~shown, 0.0) if mask == "after" else scores


# ---- 3.4 the ragged batch ----------------------------------------------------------------------------------------


class _Memory:
    """Stands for a cache: every request's keys and values of every layer; each read overwrites what the last gave."""

    def __init__(self, batch: Batch, heads: Heads, dtype: torch.dtype, num_layers: int = 2):
        self.num_layers, self._starts = num_layers, {span.request_id: span.start for span in batch.spans}
        ends = {span.request_id: span.start + span.length for span in batch.spans}
        self._pairs = {
            (layer, request): _random(2, heads[1], end, heads[2], seed=31 * request + 7 * layer + end).to(dtype)
            for layer in range(num_layers)
            for request, end in ends.items()
        }
        self._lent = torch.empty(2 * heads[1] * max(ends.values()) * heads[2], dtype=dtype)

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
            ("only the first request's rows are computed, the others stay 0", _spans_wrongly(rows="first")),
            ("only the last request's rows are computed, the others stay 0", _spans_wrongly(rows="last")),
            ("the rows are taken by position; `span.rows` says where a request's rows stand",
             _spans_wrongly(rows="position")),
            ("all requests are read before the first is computed; what a read gives is overwritten by the next one",
             _spans_wrongly(late=True)),
            ("the weights come out; asked for is the output", _spans_wrongly(gives="weights")),
        ],
        tolerance=_CLOSE,
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


def _ragged_case(parts: Parts, heads: Heads, layer: int, dtype: torch.dtype = torch.float32) -> Case:
    told = " and ".join(f"{new} after {start} of request {request}" for request, new, start in parts)
    rows = sum(new for _, new, _ in parts)
    queries = _random(rows, heads[0], heads[2], seed=rows).to(dtype)
    return Case(f"tokens: {told}; layer {layer}", queries, parts, heads, layer)


def _ragged(attend: Callable[..., Tensor], queries: Tensor, parts: Parts, heads: Heads, layer: int) -> Tensor:
    batch = Batch.of([(request, [0] * new, start) for request, new, start in parts])
    return attend(queries, layer, batch, _Memory(batch, heads, queries.dtype))


def _by_spans(
    request: str = "own", layer: int | None = None, mask: str = "lower", rows: str = "own", **wrong: Any
) -> Callable[..., Tensor]:
    """One request after the other, with torch's attention; one mistake switched on."""

    def run(queries: Tensor, asked: int, batch: Batch, memory: _Memory) -> Tensor:
        output, spans = torch.zeros_like(queries), batch.spans
        number = asked if layer is None else layer
        pairs = [memory.read(number, spans[0].request_id if request == "first" else s.request_id) for s in spans]
        for place, span in enumerate(spans):
            if (rows == "first" and place > 0) or (rows == "last" and place < len(spans) - 1):
                continue
            keys, values = pairs[place]
            if not wrong.get("late"):
                keys, values = memory.read(number, spans[0].request_id if request == "first" else span.request_id)
            mine = slice(span.start, span.start + span.length) if rows == "position" else span.rows
            found = _torchs(queries[mine], keys, keys if wrong.get("values") else values, _visible(mask, span))
            output[mine] = found[1].transpose(0, 1) if wrong.get("gives") == "weights" else found[0]
        return output

    return run


def _spans_wrongly(**wrong: Any) -> Callable[..., Tensor]:
    return partial(_ragged, _by_spans(**wrong))


def _visible(mask: str, span: Span) -> Tensor | None:
    """Who may look at whom in one request, by mistaken rules too."""
    if mask == "none" or (mask == "prompts" and span.start > 0) or (mask == "chunks" and span.length == 1):
        return None
    if mask == "top" and span.length > 1:
        return _seen(lambda position, key, row: key <= row)(span.start, span.length)
    return _causal(span.start, span.length)
