"""The checks of chapter 3's softmax, mask and attention of one request, against torch's own in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llmfromscratch.course.comparing import Case, compare, expect_equal
from llmfromscratch.course.differences import Tolerance

_HIDDEN = -torch.inf
CLOSE = Tolerance(relative=1e-5)
Heads = tuple[int, int, int]  # query heads, key/value heads, head dim


def random_numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """A float32 tensor of normally distributed numbers, the same ones for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- 3.1 softmax -------------------------------------------------------------------------------------------------


def check_softmax(softmax: Callable[[Tensor], Tensor]) -> None:
    """Against torch.softmax in float64, on scores that no power of e survives as well."""
    transposed = random_numbers(4, 3, seed=1).T  # the rows lie apart in memory
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
            Case("3 rows of 4, transposed", transposed),
            Case("random [2, 3, 2, 5]", random_numbers(2, 3, 2, 5, seed=2, scale=4.0)),
            Case("float64", random_numbers(2, 6, seed=3).double()),
            Case("bfloat16, scores of about 100", random_numbers(2, 6, seed=4, scale=100.0).bfloat16()),
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
            *((_WITHOUT_KEEPDIM, _without_keepdim(largest, total))
              for largest, total in ((False, True), (True, False), (False, False))),
        ],
        explain=_of_max,
    )  # fmt: skip


_WITHOUT_KEEPDIM = "without keepdim=True amax and sum lose the last dimension, and a row's number meets a column"


def _without_keepdim(largest: bool, total: bool) -> Callable[[Tensor], Tensor]:
    """The softmax with keepdim in `amax` (largest) and in `sum` (total), or without."""

    def run(scores: Tensor) -> Tensor:
        powers = (scores - scores.amax(-1, keepdim=largest)).exp()
        return powers / powers.sum(-1, keepdim=total)

    return run


def _of_max(error: BaseException, case: Case) -> str:
    pair = "return_types" in str(error)  # the name of what torch's max gives
    return "max along a dimension gives values and indices: take amax, or .values" if pair else ""


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
        seen(lambda position, key, row: key <= position),
        [
            Case(f"start {start}, new {new}", start, new)
            for start, new in ((0, 1), (0, 2), (0, 3), (2, 1), (2, 2), (1, 3), (5, 4))
        ],
        expected="bool [new, start + new]: row i is the token at position start + i, which sees all up to itself",
        mistakes=[
            ("the mask is aligned with the first key: row i is taken for the token at position i, but in a chunk it "
             "stands at start + i", seen(lambda position, key, row: key <= row)),
            ("a token does not see itself; the first one of a text would see nothing at all",
             seen(lambda position, key, row: key < position)),
            ("a token sees one key too many, the one after itself",
             seen(lambda position, key, row: key <= position + 1)),
            ("True and False are exchanged: True means that a query may look",
             seen(lambda position, key, row: key > position)),
            ("the tokens look ahead: they see themselves and what comes after",
             seen(lambda position, key, row: key >= position)),
            ("all is visible; in a prompt the later tokens must be hidden", seen(lambda position, key, row: True)),
            ("the stored tokens are hidden; all of them come before the new ones",
             lambda start, new: seen(lambda position, key, row: start <= key <= position)(start, new)),
            ("a token sees nothing but itself", seen(lambda position, key, row: key == position)),
            ("0 and -inf, to be added to scores; asked for are True and False",
             lambda start, new: torch.zeros(new, start + new).masked_fill(
                 seen(lambda position, key, row: key > position)(start, new), _HIDDEN)),
            ("the columns of the stored tokens are missing; they are keys too",
             lambda start, new: torch.ones(new, new).tril().bool()),
            ("a row and a column for every token; only the new ones ask, so there are `new` rows",
             lambda start, new: torch.ones(start + new, start + new).tril().bool()),
            ("rows and columns are exchanged: the rows are queries",
             lambda start, new: seen(lambda position, key, row: key <= position)(start, new).T),
        ],
    )  # fmt: skip
    expect_equal(
        causal_mask(1, 2, device="meta").device.type,
        "meta",
        expected="a mask that lies where `device` says: attention on a GPU cannot use one on the CPU",
        case='device="meta"',
        what="the mask's device",
    )


def seen(rule: Callable[[int, int, int], bool]) -> Callable[[int, int], Tensor]:
    """The mask of a rule that is asked for every (position of the query, position of the key, row)."""

    def mask(start: int, new: int) -> Tensor:
        return torch.tensor([[rule(start + row, key, row) for key in range(start + new)] for row in range(new)])

    return mask


causal = seen(lambda position, key, row: key <= position)

# ---- 3.3 attention of one request --------------------------------------------------------------------------------


def _inputs(new: int, context: int, heads: Heads, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values; keys and values lie head by head in memory, as in a cache."""
    queries = random_numbers(new, heads[0], heads[2], seed=seed, scale=scale)
    pair = random_numbers(2, heads[1], context, heads[2], seed=seed + 100, scale=scale)
    return queries, pair[0].transpose(0, 1), pair[1].transpose(0, 1)


def _attention_cases() -> list[Case]:
    one, values = torch.ones(1, 1, 1), torch.tensor([10.0, 20.0]).view(2, 1, 1)
    far = torch.tensor([-1.0, 1.0]).view(2, 1, 1)
    loop = torch.tensor([[True, False, False, True, False], [True, False, False, True, True]])
    wide = (torch.tensor([[[2.0, 0, 0, 0]]]), torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 0, 0, 0]]]))
    return [
        Case("one head, two keys with equal scores, values 10 and 20", one, torch.ones(2, 1, 1), values, None),
        Case("the same, the second key hidden", one, torch.ones(2, 1, 1), values, torch.tensor([[True, False]])),
        Case("a visible score of -10**12, a hidden one of 10**12", 1e6 * one, 1e6 * far, values, far[:, 0].T < 0),
        Case("head_dim 4, scores 2 / √4 and 0", *wide, torch.tensor([[[1.0, 0, 0, 0]], [[0.0, 1, 0, 0]]]), None),
        Case("one head, 2 queries on 2 keys, causal", *_inputs(2, 2, (1, 1, 4), 1), causal(0, 2)),
        Case("one head, 2 queries, all 3 keys visible", *_inputs(2, 3, (1, 1, 4), 2), None),
        Case("3 heads with a pair each, one query", *_inputs(1, 4, (3, 3, 4), 3), None),
        Case("4 heads on 2 pairs, one query", *_inputs(1, 3, (4, 2, 5), 4), None),
        Case("9 heads on 3 pairs, 2 queries after 2 tokens", *_inputs(2, 4, (9, 3, 8), 5), causal(2, 2)),
        Case("6 heads on 1 pair, 4 queries", *_inputs(4, 4, (6, 1, 3), 6), causal(0, 4)),
        Case("a mask with a hole in it", *_inputs(2, 5, (4, 2, 4), 7), loop),
        Case("scores of many thousands", *_inputs(3, 7, (6, 2, 4), 8, scale=600.0), causal(4, 3)),
        Case("float64, 5 heads on 5 pairs", *(x.double() for x in _inputs(3, 6, (5, 5, 6), 9)), causal(3, 3)),
    ]


def check_grouped_attention(attention: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Against torch's scaled_dot_product_attention, whose weights are what it makes of one-hot values."""
    compare(
        attention,
        torchs_attention,
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
            *((f"a finite number stands for -inf, and is a score like any other; give hidden scores {_HIDDEN}",
               _attended(mask="number", hidden=-number)) for number in (1e2, 1e3, 1e4, 1e5, 1e6, 1e9)),
            ("another mask than `visible` is used; the caller decides who may look at whom", _attended(mask="causal")),
            ("a mask of your own is used, in place of `visible` and where it is None too", _attended(mask="always")),
            ("something is hidden though `visible` is None: then every key counts", _attended(mask="unasked")),
            ("the softmax overflows: take the largest score of each row off before the powers",
             _attended(stable=False)),
            ("the values of the keys are mixed with the keys: `values` is not used", _attended(mixes="keys")),
            ("weights and output are exchanged: the output comes first", lambda *given: torchs_attention(*given)[::-1]),
            ("the output has the heads first; asked for is [new, heads, head_dim]",
             lambda *given: (torchs_attention(*given)[0].transpose(0, 1), torchs_attention(*given)[1])),
            ("the weights have the queries first; asked for is [heads, new, context]",
             lambda *given: (torchs_attention(*given)[0], torchs_attention(*given)[1].transpose(0, 1))),
            ("the weights are the mean over the heads; each head has its own",
             lambda *given: (torchs_attention(*given)[0], torchs_attention(*given)[1].mean(0))),
        ],
        diagnose=_of_pair,
        explain=_of_dtypes,
        tolerance=CLOSE,
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
        torchs_attention,
        [Case("bfloat16, 2 queries on 300 keys", queries, keys, values, causal(298, 2))],
        expected="the output in the dtype of the queries, and weights in float32, from a softmax in float32",
        mistakes=[
            ("the softmax is computed in bfloat16, which has three digits: make the scores float32 first",
             partial(_in_half, result=torch.float32)),
            ("the softmax is computed in bfloat16, which has three digits: make the scores float32 first",
             partial(_in_half, result=torch.bfloat16)),
        ],
        diagnose=_of_pair,
        explain=_of_dtypes,
        what="(output, weights)",
    )  # fmt: skip


def _of_pair(got: Any, want: Any) -> str:
    return "one tensor comes out; asked for are two, (output, weights)" if isinstance(got, Tensor) else ""


def _of_dtypes(error: BaseException, case: Case) -> str:
    if isinstance(error, RuntimeError) and ("same dtype" in str(error) or "scalar type" in str(error)):
        return "two dtypes meet in one product (weights in float32 and values in bfloat16?): convert one of them first"
    return ""


def _in_half(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, result: torch.dtype) -> Any:
    """Weights in bfloat16, rounded after the powers and the sum as well."""
    group = queries.shape[1] // keys.shape[1]
    spread = keys.transpose(0, 1).repeat_interleave(group, 0)
    scores = (queries.transpose(0, 1) @ spread.transpose(1, 2) * queries.shape[-1] ** -0.5).masked_fill(
        ~visible, _HIDDEN
    )
    return torchs_attention(queries, keys, values, visible)[0], _shared(scores, scores.amax(-1, keepdim=True)).to(
        result
    )


def torchs_attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
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
        across = k.reshape(heads, head_dim, context) if mixed == "product" else k.transpose(1, 2)
        weights = _weights(q @ across * scale(head_dim), visible, mask, dim, **wrong)
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
    hidden: float = 0.0,
    **_: Any,
) -> Tensor:
    new, context = scores.shape[1:]
    if mask == "always" or mask == ("causal" if visible is not None else "unasked"):
        visible = causal(context - new, new)
    shown = torch.ones(new, context, dtype=torch.bool) if visible is None or mask is None else visible
    shown = ~shown if mask == "inverted" and visible is not None else shown
    if mask != "after":
        scores = scores.masked_fill(~shown, hidden if mask in ("zero", "number") else _HIDDEN)
    if softmax:
        powers = scores.exp()
        scores = scores.softmax(dim) if stable else powers / powers.sum(dim, keepdim=True)
    return scores.masked_fill(~shown, 0.0) if mask == "after" else scores
