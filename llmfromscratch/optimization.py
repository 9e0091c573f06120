"""Why a token takes as long as it does, and four ways to make it take less.

    read fewer bytes     a decode step reads every weight once, so bytes set the floor      decode_bytes
    make fewer passes    attention in one pass over its keys, products that are fused       fold_tile, fuse_rows
    read at full speed   a product that memory limits, and not the processor                multiply_rows
    read once for many   guess several tokens cheaply, and check them in one pass           lookup_draft, accept_drafts

The ideas are here, each a small function. What runs them stands elsewhere: `attention_backends` (tiles), `fused_layers`
and `kernels/` (products), `compiled_graph` (static shapes), `speculation` (drafts).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llmfromscratch import sampling
from llmfromscratch.config import ModelConfig
from llmfromscratch.kernels.words import per_line, prefetch, widen

TILE = 64  # tokens of a tile: its keys and values stay in the innermost cache
AHEAD = 4  # rows of weights that are fetched before they are needed

# ---- what must be read and computed ------------------------------------------------------------------------------


def decode_bytes(config: ModelConfig, context: int, weight_bytes: float, cache_bytes: float) -> float:
    """Bytes that a decode step of one request has to read from memory, at least.

    context: tokens in the cache, the newest included. weight_bytes, cache_bytes: bytes of one weight and of one stored
    key or value component (2 for bfloat16; it may be a fraction). Counted are the seven products of each layer (query,
    key, value, output; gate, up, down), the head (vocab_size rows), and the keys and values of every layer. Norms,
    biases and the one row of the embedding are left out: together they are less than a thousandth.

    config has hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim and vocab_size.
    """
    hidden, queries, keys = config.hidden_size, config.num_heads, config.num_kv_heads
    attention = hidden * config.head_dim * (2 * queries + 2 * keys)
    feed_forward = 3 * hidden * config.intermediate_size
    weights = config.num_layers * (attention + feed_forward) + config.vocab_size * hidden
    cached = config.num_layers * context * 2 * keys * config.head_dim
    return weights * weight_bytes + cached * cache_bytes


def least_seconds(nbytes: float, operations: float, bandwidth: float, peak: float) -> float:
    """The roofline: reading and computing go on side by side, and the slower of them decides.

    bandwidth: bytes a second; peak: operations a second. Williams et al. 2009, "Roofline", section 3.
    """
    return max(nbytes / bandwidth, operations / peak)


# ---- attention in one pass ---------------------------------------------------------------------------------------


def fold_tile(
    mixed: Tensor, top: Tensor, total: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the online softmax: takes a tile of keys and values into what was computed so far.

    mixed: [..., rows, head_dim], the sum of exp(score - top) * value over the tokens so far; top: [..., rows], the
    largest score so far, -inf before the first; total: [..., rows], the sum of exp(score - top).
    scores: [..., rows, tile], -inf where a row may not look; values: [..., tile, head_dim].

    Returns the new mixed, top and total, and leaves its arguments as they are. When a larger score turns up, what was
    summed for the old one shrinks by exp(old top - new top). A row that has seen nothing yet (its top is still -inf)
    keeps sums of 0: -inf minus -inf would be NaN. In the end mixed / total is softmax(scores) @ values. Milakov and
    Gimelshein 2018, algorithm 3; Dao et al. 2022, "FlashAttention", section 3.1.
    """
    new_top = torch.maximum(top, scores.amax(dim=-1))
    seen = new_top.masked_fill(new_top == -torch.inf, 0)
    shrink = torch.exp(top - seen)
    powers = torch.exp(scores - seen.unsqueeze(-1))
    return mixed * shrink.unsqueeze(-1) + powers @ values, new_top, total * shrink + powers.sum(dim=-1)


def tiled_attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, tile: int = TILE) -> Tensor:
    """`attention.grouped_attention`'s output in one pass over the keys, without ever holding all scores.

    queries: [new, heads, head_dim]; keys, values: [context, kv_heads, head_dim]; visible: bool [new, context] or None.
    Returns [new, heads, head_dim]. Needs memory for one tile of scores, and skips tiles that no row may see.
    """
    new, heads, head_dim = queries.shape
    context, kv_heads, _ = keys.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = (queries.to(wide) * head_dim**-0.5).view(new, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    mixed, total = torch.zeros_like(rows), rows.new_zeros(rows.shape[:2])
    top = torch.full_like(total, -torch.inf)
    for first in range(0, context, tile):
        part = slice(first, first + tile)
        if visible is not None and not visible[:, part].any():
            continue
        scores = rows @ keys[part].to(wide).permute(1, 2, 0)
        if visible is not None:
            scores.view(kv_heads, -1, new, scores.shape[-1]).masked_fill_(~visible[:, part], -torch.inf)
        mixed, top, total = fold_tile(mixed, top, total, scores, values[part].to(wide).transpose(0, 1))
    output = (mixed / total.unsqueeze(-1)).view(heads, new, head_dim).transpose(0, 1)
    return output.to(queries.dtype)


# ---- fused products ----------------------------------------------------------------------------------------------


def fuse_rows(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Weights that are multiplied with the same vector, under each other in one: one product gives all results.

    weights: [rows of its own, width] each, of one dtype. Returns the fused one [all rows, width] and, for each of the
    old, a view of its part: the same memory, so that nobody needs a second copy.
    """
    fused = torch.cat(list(weights))
    return fused, list(fused.split([len(weight) for weight in weights]))


def fold_gain(weight: Tensor, gain: Tensor) -> Tensor:
    """A norm's weight folded into the product that follows it: fold_gain(W, g) @ x equals W @ (g * x).

    weight: [rows, width]; gain: [width]. Returns [rows, width] in the weight's dtype. Exact but for rounding, which in
    half precision happens once more than before.
    """
    return weight * gain.to(weight.dtype)


# ---- products that read at full speed ----------------------------------------------------------------------------


def multiply_rows(x: np.ndarray, weight: np.ndarray, output: np.ndarray, first: int, end: int) -> None:
    """output[m, row] = x[m] · weight[row], for the rows from `first` to before `end`: one thread's part of y = W x.

    x: float32 [inputs, width], few; weight: [rows, width], float32, or bfloat16 as its bits in uint16: either way
    widen(weight[row, i]) is the number in float32. output: float32 [inputs, rows]; only these rows are written. The
    sum is kept in float32: begin it with np.float32(0), as 0.0 is a float64 for Numba.

    Before a row is read, the row AHEAD of it is asked for: prefetch(weight, row, column) tells memory to send the line
    that holds that number, and does not wait. A line holds per_line(weight) numbers, so one call for so many columns.
    There is no row behind the weight's last: ask for that one then.

    The engine compiles this function with Numba: plain loops over numbers, no tensors, no lists.
    """
    inputs, width = x.shape
    last = weight.shape[0] - 1
    for row in range(first, end):
        for column in range(0, width, per_line(weight)):
            prefetch(weight, min(row + AHEAD, last), column)
        for m in range(inputs):
            total = np.float32(0)
            for i in range(width):
                total += x[m, i] * widen(weight[row, i])
            output[m, row] = total


# ---- static shapes -----------------------------------------------------------------------------------------------


def bucket_of(count: int, smallest: int = 1) -> int:
    """The smallest of smallest, 2 * smallest, 4 * smallest, ... that holds `count`.

    A graph is compiled for fixed shapes. Rounding shapes up to buckets keeps the number of graphs at a logarithm of
    what may come, and what is computed in vain below one half.
    """
    bucket = smallest
    while bucket < count:
        bucket *= 2
    return bucket


# ---- speculative decoding ----------------------------------------------------------------------------------------


def lookup_draft(token_ids: Sequence[int], longest: int, count: int) -> list[int]:
    """A guess at the next tokens: what followed the last time that the text stood as it stands now.

    Looks for the longest ending of token_ids, of at most `longest` tokens, that occurs earlier too; of several places
    the latest counts. Returns up to `count` tokens that followed there, [] where not even the last token occurs
    earlier. The earlier place may overlap the ending. Saxena 2023, "Prompt Lookup Decoding".

    Example: [5, 6, 7, 8, 5, 6] with longest 3, count 2 gives [7, 8].
    """
    ids = list(token_ids)
    best, place = 0, 0
    for end in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(longest, end) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length > best:
            best, place = length, end
        if best == longest:
            break
    return ids[place : place + count] if best else []


def accept_greedy(drafts: Sequence[int], best: Sequence[int]) -> list[int]:
    """The tokens that greedy decoding would have given: the drafts as far as they are right, and one more.

    drafts: k ids; best: k + 1 ids, best[i] the model's most probable token behind i drafts. Returns 1 to k + 1 ids.
    """
    right = 0
    while right < len(drafts) and drafts[right] == best[right]:
        right += 1
    return [*drafts[:right], best[right]]


def accept_drafts(drafts: Sequence[int], drafted: Tensor, wanted: Tensor, uniforms: Sequence[float]) -> list[int]:
    """The rejection rule: tokens distributed as if the model had drawn each of them itself.

    drafts: k ids. drafted: float64 [k, vocab], the distribution that each draft was drawn from (1 at the draft itself
    where nothing was drawn). wanted: float64 [k + 1, vocab], the model's behind 0, 1, ... k drafts. uniforms: k + 1
    numbers from 0 to below 1.

    Draft i stands if uniforms[i] * drafted[i, draft] < wanted[i, draft]. The first that does not is replaced by a draw
    from what the draft left over, max(wanted[i] - drafted[i], 0), and nothing after it counts; if all stand, one more
    is drawn from wanted[k]. Both draws use the last uniform. sampling.draw(probabilities [1, vocab], uniforms
    float64 [1]) draws; rows need not add up to 1. Returns 1 to k + 1 ids. Leviathan et al. 2023, section 2.3.
    """
    number = torch.tensor([uniforms[-1]], dtype=torch.float64)
    for place, draft in enumerate(drafts):
        if uniforms[place] * drafted[place, draft] >= wanted[place, draft]:
            left = (wanted[place] - drafted[place]).clamp(min=0)
            return [*drafts[:place], int(sampling.draw(left.unsqueeze(0), number))]
    return [*drafts, int(sampling.draw(wanted[-1:], number))]


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a pass over `drafts` drafts gives on average, if each stands with the same probability.

    1 + acceptance + acceptance**2 + ... + acceptance**drafts. Leviathan et al. 2023, equation 1.
    """
    return sum(acceptance**place for place in range(drafts + 1))
