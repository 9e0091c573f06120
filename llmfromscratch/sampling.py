"""From logits to a token: what is allowed, what is probable, and a draw from what is left.

    logits ─▶ bias, bans ─▶ penalties ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ typical-p ─▶ draw ─▶ token

This is the declared order; a row with temperature 0 takes the largest logit after the penalties. Each row of a batch
has its own parameters and its own random numbers, so its tokens do not depend on who shares the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from llmfromscratch.errors import RequestError
from llmfromscratch.sampling_params import PRESETS as PRESETS
from llmfromscratch.sampling_params import SamplingParams as SamplingParams

_FEW = 256  # candidates ranked at first: nearly always enough, and far cheaper than putting a whole vocabulary in order
_ROWS = 8  # sampled at a time on a CPU: what is computed on the way then stays in its cache

# ---- from probabilities to a draw --------------------------------------------------------------------------------


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one column of each row by the inverse of the cumulative distribution.

    probabilities: float [rows, columns], not negative; a row need not add up to 1, its sum counts as 1.
    uniforms: float64 [rows], from 0 to below 1. Returns int64 [rows]: the first column at which the running sum of the
    row exceeds uniform x sum. A column of probability 0 is never drawn. The sums are kept in float64.

    Example: probabilities [[0.2, 0.0, 0.5, 0.3]] gives 0 for uniforms below 0.2, 2 from 0.2 on, 3 from 0.7 on.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    targets = uniforms.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True)
    # with tiny sums rounding can lift a uniform just below 1 to the whole sum: the last column with any is meant
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(drawn, last).squeeze(-1)


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits divided by the temperature of their row, the largest of the row being taken off first.

    logits: float32 [rows, vocab]; temperatures: float [rows], above 0, which may be float64. Returns float32
    [rows, vocab], at most 0. The softmax does not see what is taken off, and a tiny temperature then gives 0 and -inf,
    where a plain division would give two infinities. Temperatures beyond the normal float32 numbers count as the
    nearest of them.
    """
    limits = torch.finfo(torch.float32)
    divisors = temperatures.clamp(min=limits.tiny, max=limits.max).to(logits)
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisors.unsqueeze(-1)


# ---- which candidates stay ---------------------------------------------------------------------------------------


def rank(log_probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their token ids, both [rows, count]: largest first, equal ones by id.

    log_probabilities: float [rows, vocab]. With fewer than the whole vocabulary, which ones of several equal to the
    last are among them is left open.
    """
    if count < log_probabilities.shape[-1]:
        ids = log_probabilities.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, order = log_probabilities.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        return values, ids.gather(-1, order)
    if log_probabilities.device.type != "cpu" or log_probabilities.dtype != torch.float32:
        values, ids = log_probabilities.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # The bits of a float, those below the sign turned round where it is negative, are in its order as an integer. With
    # the id behind them no two keys are equal, so any sorting will do: numpy's is many times faster than torch's.
    bits = (log_probabilities + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    descending = (bits ^ (bits >> 31 & 0x7FFFFFFF)).bitwise_not_().long()
    keys = descending << 32 | torch.arange(log_probabilities.shape[-1])
    ids = torch.from_numpy(np.sort(keys.numpy(), axis=-1)) & 0xFFFFFFFF
    return log_probabilities.gather(-1, ids), ids


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `rank`, but exact: of several equal to the last, those with the lowest ids are among them."""
    best, ids = rank(values, count + 1)
    if 0 < count < best.shape[-1] and (best[:, count - 1] == best[:, count]).any():
        best, ids = rank(values, values.shape[-1])
    return best[:, :count], ids[:, :count]


def keep_top_k(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Which candidates are among the k most probable.

    ranked: float [rows, candidates], probabilities, the largest first; top_k: int [rows], 0 keeps all.
    Returns bool [rows, candidates]. A k beyond the candidates keeps all of them.
    """
    places = torch.arange(ranked.shape[-1], device=ranked.device)
    return (places < top_k.unsqueeze(-1)) | (top_k == 0).unsqueeze(-1)


def keep_top_p(ranked: Tensor, top_p: Tensor) -> Tensor:
    """Which candidates are in the nucleus: the smallest set of the most probable ones that reaches p.

    ranked: float [rows, candidates], probabilities, the largest first; top_p: float [rows], above 0, at most 1.
    Returns bool [rows, candidates]: a candidate stays while those before it have less than p together. So the one that
    crosses p stays, and the first always does.

    Example: [[0.4, 0.3, 0.2, 0.1]] with top_p [0.6] keeps the first two: before the second there is 0.4.
    """
    before = torch.nn.functional.pad(ranked.cumsum(dim=-1), (1, -1))
    return before < top_p.unsqueeze(-1)


def keep_min_p(ranked: Tensor, min_p: Tensor) -> Tensor:
    """Which candidates have at least min_p times the probability of the first. Shapes as in `keep_top_p`."""
    return ranked >= min_p.unsqueeze(-1) * ranked[:, :1]


def keep_typical_p(ranked: Tensor, typical_p: Tensor) -> Tensor:
    """Which candidates are typical: their surprise -log(p) is closest to the entropy, until they reach typical_p.

    Shapes as in `keep_top_p`; of equally typical ones the more probable stays. 1 keeps all.
    """
    surprise = -ranked.log()
    entropy = torch.where(ranked > 0, ranked * surprise, 0).cumsum(dim=-1)[:, -1:]
    _, order = rank(-(surprise - entropy).abs().float(), ranked.shape[-1])
    kept = keep_top_p(ranked.gather(-1, order), typical_p)
    return torch.zeros_like(kept).scatter(-1, order, kept) | (typical_p >= 1).unsqueeze(-1)


def apply_filters(ranked: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [rows, candidates] after top-k, top-p, min-p and typical-p, in this order; what is cut becomes 0.

    ranked: float64, as the filters take it. Each filter looks at what the ones before it have left of its row, scaled
    to a sum of 1 again.
    """
    filters = (("top_k", keep_top_k), ("top_p", keep_top_p), ("min_p", keep_min_p), ("typical_p", keep_typical_p))
    for name, keep in filters:
        neutral, dtype = getattr(SamplingParams, name), torch.int64 if name == "top_k" else torch.float64
        setting = torch.tensor([getattr(one, name) for one in params], dtype=dtype, device=ranked.device)
        cuts = (setting != neutral).unsqueeze(-1)
        if cuts.any():
            left = ranked.masked_fill(cuts & ~keep(ranked, setting), 0)
            # a row that is not cut keeps its scale: the candidates at hand may be fewer than all. A running sum gives
            # the same however many zeros follow.
            ranked = left / torch.where(cuts, left.cumsum(dim=-1)[:, -1:], 1)
    return ranked


def survivors(
    log_probabilities: Tensor, params: Sequence[SamplingParams]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """What the filters leave of each row, in groups: (rows, token ids, probabilities), the latter [rows, candidates].

    A filter that keeps the first so many of a ranking needs no more of it than one candidate that it cuts: whatever
    comes later is cut as well. So a few candidates are ranked first, and all of them only for rows that cut too few.
    Rows without filters are not ranked at all. Probabilities are float64; what is cut has 0.
    """
    vocab = log_probabilities.shape[-1]
    free = [place for place, one in enumerate(params) if not _has_filter(one)]
    waiting = [place for place, one in enumerate(params) if _has_filter(one)]
    if free:
        ids = torch.arange(vocab, device=log_probabilities.device).expand(len(free), -1)
        yield free, ids, _wide(log_probabilities[free].exp())
    for count in (min(_FEW, vocab), vocab):
        if waiting:
            some = [params[place] for place in waiting]
            values, ids = rank(log_probabilities[waiting], count)
            left = apply_filters(_wide(values.exp()), some)
            proven = _proven(values, left, some, vocab)
            done = [at for at, enough in enumerate(proven) if enough]
            if done:
                yield [waiting[at] for at in done], ids[done], left[done]
            waiting = [place for place, enough in zip(waiting, proven, strict=True) if not enough]


def _proven(values: Tensor, left: Tensor, params: Sequence[SamplingParams], vocab: int) -> list[bool]:
    """Whether ranking the whole vocabulary would have left the same of each row.

    values, left: [rows, candidates], log-probabilities and what the filters have left. It would if nothing as probable
    as the last candidate was kept: of its equals others may have been left out. typical-p keeps no beginning of a
    ranking, so it has to see all that top-k leaves.
    """
    count = values.shape[-1]
    same = ~((left > 0).to(values.device) & (values == values[:, -1:])).any(dim=-1)
    sees_all = (one.typical_p == 1 or 0 < one.top_k < count for one in params)
    return [count == vocab or (cut and sees) for cut, sees in zip(same.tolist(), sees_all, strict=True)]


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def _wide(probabilities: Tensor) -> Tensor:
    """In float64, on the CPU where the device has no such numbers."""
    return probabilities.cpu().double() if probabilities.device.type == "mps" else probabilities.double()


# ---- penalties ---------------------------------------------------------------------------------------------------


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits after the three penalties on what has been said.

    logits: float32 [rows, vocab]. seen: bool [rows, vocab], tokens of prompt or answer. counts: int [rows, vocab], how
    often the answer alone holds each. repetition, presence, frequency: float [rows]; 1, 0 and 0 do nothing.
    repetition makes a seen token less likely whatever its sign: a positive logit is divided, a negative one multiplied.
    presence is taken off once if the answer holds the token, frequency once for each time. Returns [rows, vocab].
    Repetition acts first, then the other two.
    """
    factor = repetition.unsqueeze(-1)
    repelled = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repelled, logits)
    return logits - presence.unsqueeze(-1) * (counts > 0) - frequency.unsqueeze(-1) * counts


# ---- random numbers of one's own ---------------------------------------------------------------------------------


def random_stream(seed: int | None) -> torch.Generator:
    """A request's own random numbers: the same for the same seed, different each time for None."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def uniforms(streams: Sequence[torch.Generator]) -> Tensor:
    """One number of each stream, of which there is at least one: float64 [streams], from 0 to below 1.

    No stream notices the others.
    """
    return torch.cat([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])


# ---- the sampler -------------------------------------------------------------------------------------------------


class Constraint(Protocol):
    """What narrows the next token from outside: a grammar, banned words, words that must come first."""

    def allowed(self) -> Tensor:
        """bool [vocab], on the CPU: the tokens that may come next; end tokens are among them where the text may end."""

    def advance(self, token_id: int) -> None:
        """The token was chosen."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one place of a text.

    raw: in the model's own distribution. processed: after all the processors, in the distribution that was drawn from;
    -inf for a token that was cut, or whose probability is too small for a float32. top: (token id, raw, processed) of
    the most probable ones by the model.
    """

    token_id: int
    raw: float
    processed: float
    top: tuple[tuple[int, float, float], ...]


@dataclass
class Row:
    """What the sampler knows of one request; it outlives preemptions."""

    params: SamplingParams
    stream: torch.Generator
    prompt_token_ids: Sequence[int]
    constraint: Constraint | None = None
    token_ids: list[int] = field(default_factory=list)  # the answer so far
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of them, if they were asked for
    advanced: int = 0  # tokens of the answer that the constraint knows


def adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits [rows, vocab] after bias, bans and penalties, before the temperature. Without any they are not copied."""
    narrowed = [place for place, row in enumerate(rows) if row.params.logit_bias or row.constraint is not None]
    penalized = [place for place, row in enumerate(rows) if _is_penalized(row)]
    if not narrowed and not penalized:
        return logits
    logits, device = logits.clone(), logits.device
    for place in narrowed:
        bias, constraint = rows[place].params.logit_bias, rows[place].constraint
        if bias:
            logits[place, torch.tensor(list(bias), device=device)] += torch.tensor(list(bias.values()), device=device)
        if constraint is not None:
            logits[place].masked_fill_(~_allowed(rows[place], constraint).to(device), -torch.inf)
    if penalized:
        _penalize(logits, penalized, [rows[place] for place in penalized])
    return logits


def _allowed(row: Row, constraint: Constraint) -> Tensor:
    """What the constraint allows after the answer so far. It learns of a token here, not when the token is drawn: if it
    fails, nothing has been drawn in this step, and the other rows can be sampled without this one."""
    for token in row.token_ids[row.advanced :]:
        constraint.advance(token)
        row.advanced += 1
    return constraint.allowed()


def _penalize(logits: Tensor, places: Sequence[int], rows: Sequence[Row]) -> None:
    """Applies the penalties of `rows` to their `places` of logits [rows, vocab], in place, where tokens were seen."""
    tables = [dict.fromkeys(row.prompt_token_ids, 0) | Counter(row.token_ids) for row in rows]
    width = max(len(table) for table in tables)
    # a row that has seen fewer tokens than another repeats them: what is written twice is the same
    ids = torch.tensor([list(islice(cycle(table), width)) for table in tables], device=logits.device)
    counts = torch.tensor([list(islice(cycle(table.values()), width)) for table in tables], device=logits.device)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    settings = torch.tensor([[getattr(row.params, name) for row in rows] for name in names], device=logits.device)
    at = torch.tensor(places, device=logits.device).unsqueeze(-1), ids
    logits[at] = apply_penalties(logits[at], torch.ones_like(ids, dtype=torch.bool), counts, *settings.to(logits))


def _is_penalized(row: Row) -> bool:
    """Whether the row has a penalty, and has seen a token."""
    settings = row.params.repetition_penalty, row.params.presence_penalty, row.params.frequency_penalty
    return settings != (1, 0, 0) and len(row.prompt_token_ids) + len(row.token_ids) > 0


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The next token of each row: the largest of its logits at temperature 0, else a draw from what the filters leave.

    logits: float32 [rows, vocab], with bias and penalties in them. rows: what is known of each request; here
    `params.temperature` and `stream` matter, and draw_filtered takes the params. Returns int64 [rows]. Only rows that
    draw take a number from their stream, one each.
    """
    tokens = logits.argmax(dim=-1)
    drawing = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    if not drawing:
        return tokens
    params = [rows[place].params for place in drawing]
    temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float64)
    log_probabilities = apply_temperature(logits[drawing], temperatures).log_softmax(dim=-1)
    numbers = uniforms([rows[place].stream for place in drawing])
    tokens[drawing] = draw_filtered(log_probabilities, params, numbers)
    return tokens


def draw_filtered(log_probabilities: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Draws a token of each row from what its filters leave: int64 [rows].

    log_probabilities: float32 [rows, vocab], the temperature being applied. params: one for each row, with its filters.
    numbers: float64 [rows], from 0 to below 1.
    """
    tokens = torch.empty(len(params), dtype=torch.int64, device=log_probabilities.device)
    for places, ids, probabilities in survivors(log_probabilities, params):
        drawn = draw(probabilities, numbers[places]).to(ids.device)
        tokens[places] = ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    return tokens


class Sampler:
    """Picks the next token of every row of a batch. A project's own sampler needs these two methods."""

    def start(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], constraint: Constraint | None = None
    ) -> Row:
        """What is to be known of a request from step to step; handed back with its logits."""
        return Row(params, random_stream(params.seed), prompt_token_ids, constraint)

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[int | None]:
        """The next token of each row, and None where nothing is left to choose from.

        logits: float32 [rows, vocab], finite; ValueError names rows whose logits are not. Ties go to the lowest id
        under greedy decoding. The tokens are noted in the rows, with log-probabilities where those were asked for.
        """
        if not rows:
            return []
        logits = logits.float()
        _refuse_broken(logits)
        adjusted = adjust(logits, rows)
        left: Sequence[int] = range(len(rows))
        if adjusted is not logits:
            left = (adjusted.amax(dim=-1) > -torch.inf).nonzero().flatten().tolist()
            if len(left) < len(rows):
                logits, adjusted = logits[left], adjusted[left]
        some, tokens = [rows[place] for place in left], list[int]()
        step = _ROWS if logits.device.type == "cpu" else max(1, len(some))
        for start in range(0, len(some), step):
            tokens += choose(adjusted[start : start + step], some[start : start + step]).tolist()
        chosen: list[int | None] = [None] * len(rows)
        for at, (place, row, token) in enumerate(zip(left, some, tokens, strict=True)):
            if row.params.logprobs is not None:
                row.logprobs.append(_logprobs(logits[at : at + 1], adjusted[at : at + 1], row, token))
            row.token_ids.append(token)
            chosen[place] = token
        return chosen


def _refuse_broken(logits: Tensor) -> None:
    if logits.sum().isfinite():  # one pass; NaN and infinities do not vanish in a sum, though it may overflow itself
        return
    broken = [str(place) for place, fine in enumerate(logits.isfinite().all(dim=-1).tolist()) if not fine]
    if broken:
        raise ValueError(
            f"The model's logits of row {', '.join(broken)} are not all finite numbers; this is an error of the model "
            "or of its weights, and nothing can be drawn from them. Check the model's files, and try dtype='float32'."
        )


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The probabilities that the next draw of each row is made from: float64 [rows, vocab], in the order of the ids.

    logits as `Sampler.sample` takes them. A row with temperature 0 has 1 at the token it takes. RequestError names rows
    where nothing is left to choose from.
    """
    adjusted = adjust(logits.float(), rows)
    closed = (adjusted.amax(dim=-1) == -torch.inf).nonzero().flatten().tolist()
    if closed:
        raise RequestError(
            f"Nothing is left to choose from in row {', '.join(map(str, closed))}: every token is banned."
        )
    return _distribution(adjusted, rows)


def _distribution(adjusted: Tensor, rows: Sequence[Row]) -> Tensor:
    """`distribution` of logits that went through `adjust`."""
    whole = torch.zeros_like(_wide(adjusted))
    greedy = [place for place, row in enumerate(rows) if row.params.temperature == 0]
    whole[greedy, adjusted[greedy].argmax(dim=-1).to(whole.device)] = 1
    drawing = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    if drawing:
        params = [rows[place].params for place in drawing]
        temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float64)
        log_probabilities = apply_temperature(adjusted[drawing], temperatures).log_softmax(dim=-1)
        for places, ids, left in survivors(log_probabilities, params):
            at = torch.tensor([drawing[place] for place in places], dtype=torch.int64, device=whole.device)
            whole[at.unsqueeze(-1), ids.to(whole.device)] = left / left.cumsum(dim=-1)[:, -1:]
    return whole


def _logprobs(logits: Tensor, adjusted: Tensor, row: Row, token: int) -> TokenLogprobs:
    """What is said of a token chosen from [1, vocab] logits, before and after `adjust`."""
    raw = logits.log_softmax(dim=-1)
    _, best = largest(raw, row.params.logprobs or 0)
    ids = torch.cat([torch.tensor([[token]], device=best.device), best], dim=-1)
    processed = _distribution(adjusted, [row])
    processed = processed.gather(-1, ids.to(processed.device)).log()
    (_, of_model, of_draw), *top = zip(
        *(part[0].tolist() for part in (ids, raw.gather(-1, ids), processed)), strict=True
    )
    return TokenLogprobs(token, of_model, of_draw, tuple(top))


# ---- beams -------------------------------------------------------------------------------------------------------


def best_beams(scores: Tensor, log_probabilities: Tensor, count: int) -> list[tuple[float, int, int]]:
    """The `count` best ways to go on with any of the beams, as (score, beam, token), the best first.

    scores: float [beams], the log-probability of each beam so far; log_probabilities: float [beams, vocab], of its next
    token. The score of a way is their sum. Of equal ones the lower beam comes first, then the lower token.
    """
    total = (scores.unsqueeze(-1) + log_probabilities).flatten()
    values, places = (best[0].tolist() for best in largest(total.unsqueeze(0), count))
    vocab = log_probabilities.shape[-1]
    return [(value, place // vocab, place % vocab) for value, place in zip(values, places, strict=True)]
