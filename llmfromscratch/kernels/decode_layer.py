"""A whole decoder layer for a few tokens, compiled by Numba: a step of one request has nothing to wait for but memory.

In PyTorch a layer is about thirty operations, and each product of one row goes at a third of what memory could give.
Here it is one call, and threads meet five times in it, where a result is needed whole:

    norm, query-key-value product | rotary, cache, attention | output product, + | norm, gate and up, silu | down, +

Weights are float, or packed in few bits (`layer_weights`): the same code is compiled for either, for the packed ones
when a network first has them. What a learner made of the products is compiled in: this module is loaded again when
`product` has changed.

Numbers are float32 from the beginning of a layer to its end, whatever the weights, the stream and the cache store. Each
row is a token with keys and values of its own to look at, as `paged_decode` has them: several requests, or several
tokens of one, which see each other as far as their slots say so, because all keys are written before any is read.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from llmfromscratch.kernels import layer_weights
from llmfromscratch.kernels import product as chosen
from llmfromscratch.kernels.byte_rows import into_frame, write_row
from llmfromscratch.kernels.layer_weights import multiply, part_of, parts_in, places_of, rows_in, weight_at
from llmfromscratch.kernels.numba_words import MATH, array_at, compiled
from llmfromscratch.kernels.paged_decode import LOG2_E, attend_piece, merge_parts, power_of_two
from llmfromscratch.kernels.words import narrow, widen

numbers_of, packed_parts, ROWS = layer_weights.numbers_of, layer_weights.packed_parts, layer_weights.ROWS


# ---- what stands between the products ----------------------------------------------------------------------------


@njit(fastmath=MATH)
def normalize(x, gain, eps, output):
    """RMS norm of each row of float32 [rows, size], as `model.RMSNorm`. gain: [size], as it is stored."""
    rows, size = x.shape
    for row in range(rows):
        squares = np.float32(0)
        for i in range(size):
            squares += x[row, i] * x[row, i]
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            output[row, i] = x[row, i] * scale * widen(gain[i])


@njit(fastmath=MATH)
def begin(x, gain, eps, stream, normed):
    """Widens the layer's input into the stream, and normalizes it."""
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            stream[row, i] = widen(x[row, i])
    normalize(stream, gain, eps, normed)


@njit(fastmath=MATH)
def _rotate_head(head, gain, eps, cos, sin):
    """Normalizes one head where there is a gain for it, and turns it by its position's angles, in place."""
    half = len(head) // 2
    if len(gain):
        squares = np.float32(0)
        for d in range(len(head)):
            squares += head[d] * head[d]
        scale = np.float32(1) / np.sqrt(squares / np.float32(len(head)) + eps)
        for d in range(len(head)):
            head[d] = head[d] * scale * widen(gain[d])
    for d in range(half):
        first, second = head[d], head[half + d]
        head[d] = first * cos[d] - second * sin[d]
        head[half + d] = second * cos[d] + first * sin[d]


@njit(fastmath=MATH)
def place(
    mixed, query_gain, key_gain, eps, cos, sin, numbers, rows, frames, slots, ends, head_stride, value_start, queries
):  # fmt: skip
    """Rotates queries and keys, copies the queries out, and writes keys and values to each token's own slot.

    mixed: float32 [tokens, (heads + 2 * kv heads) * head_dim], the product of queries, keys and values.
    query_gain, key_gain: of their norms, [head_dim] or [0]. frames: of the keys, where rows are bytes (`byte_rows`);
    numbers: int64 [tokens], which of them each token's key is in. The others: see `decode_layer`.
    """
    kv_heads, group, head_dim = queries.shape[1:]
    keys = kv_heads * group * head_dim
    values = keys + kv_heads * head_dim
    for token in range(queries.shape[0]):
        slot = slots[ends[token] - 1]
        for head in range(kv_heads):
            for g in range(group):
                start = (head * group + g) * head_dim
                query = mixed[token, start : start + head_dim]
                _rotate_head(query, query_gain, eps, cos[token], sin[token])
                for d in range(head_dim):
                    queries[token, head, g, d] = query[d]
            start, row = head * head_dim, slot + head * head_stride
            key = mixed[token, keys + start : keys + start + head_dim]
            _rotate_head(key, key_gain, eps, cos[token], sin[token])
            into_frame(key, frames, numbers[token], head, rows)
            write_row(key, rows, row, numbers[token])
            write_row(mixed[token, values + start : values + start + head_dim], rows, row + value_start, numbers[token])


@njit(fastmath=MATH)
def _share(x, weight, bias, output, part, parts, number, pieces):
    """One piece of one part of x @ weight.T + bias: a share of its rows; gives the first of them and the last's end."""
    start, rows = part_of(weight, part, parts)
    first, end = rows * number // pieces, rows * (number + 1) // pieces
    multiply(x, weight, part, start, output, first, end)
    add_bias(output, bias, start + first, start + end)
    return start + first, start + end


@njit(fastmath=MATH)
def _product(x, weight, bias, output, number, pieces):
    """One piece of x @ weight.T + bias: a share of each part."""
    for part in range(parts_in(weight)):
        _share(x, weight, bias, output, part, parts_in(weight), number, pieces)


@njit(fastmath=MATH)
def add_bias(output, bias, first, end):
    """Adds a share of a bias, as it is stored, to the same columns of every row; nothing where it is empty."""
    if len(bias):
        for token in range(output.shape[0]):
            for row in range(first, end):
                output[token, row] += widen(bias[row])


@njit(fastmath=MATH)
def _add_product(x, weight, bias, output, stream, number, pieces):
    """The same for a weight of one part, added to the residual stream."""
    first, end = _share(x, weight, bias, output, 0, 1, number, pieces)
    for token in range(x.shape[0]):
        for row in range(first, end):
            stream[token, row] += output[token, row]


@njit(fastmath=MATH)
def _gated_product(x, weight, bias, output, activated, number, pieces):
    """A share of gate(x) and up(x), whose weights stand under each other, and of activated = silu(gate) * up."""
    for part in range(2):
        _share(x, weight, bias, output, part, 2, number, pieces)
    wide = activated.shape[1]
    activate(output, activated, wide * number // pieces, wide * (number + 1) // pieces)


@njit(fastmath=MATH)
def activate(gated, activated, first, end):
    """silu(gate) * up for a share of the columns; gated: float32 [tokens, 2 * wide], the gates before the ups."""
    wide = activated.shape[1]
    for token in range(activated.shape[0]):
        for column in range(first, end):
            gate = gated[token, column]
            small = power_of_two(-abs(gate) * np.float32(LOG2_E))  # exp(-|gate|), which cannot overflow
            share = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            activated[token, column] = gate * share * gated[token, wide + column]


@njit(fastmath=MATH)
def finish(stream, output):
    """Rounds the stream to what the next layer is given."""
    for row in range(stream.shape[0]):
        for i in range(stream.shape[1]):
            output[row, i] = narrow(stream[row, i], output)


# ---- all of it ---------------------------------------------------------------------------------------------------
# The functions that are called from outside give a number back that they close over: what a function closes over is
# part of what Numba knows code on disk by, so code with old sources inside is not taken for new.


def _layer(number):
    def decode_layer(
        x, cos, sin, rows, frames, numbers, slots, ends, head_stride, value_start, attention_pieces,
        qkv, out, gate_up, down, qkv_bias, out_bias, gate_up_bias, down_bias,
        gain, query_gain, key_gain, gain_after, eps, kv_heads, output, pieces,
    ):  # fmt: skip
        """One layer for float32 or bfloat16 (uint16) x [tokens, hidden]; output, the same, is written; so are rows.

        cos, sin: float32 [tokens, head_dim / 2]. rows, slots, ends, head_stride, value_start: the cache, see
        `paged_decode`; a token's own slot is the last of its slots; frames, numbers: see `place`. attention_pieces,
        pieces: into how many the attention and the products are cut. qkv, out, gate_up, down: the weights, as
        `layer_weights` has them, qkv and gate_up of one part or of three and two; the biases: as long, or [0]. gain,
        gain_after: of the norms before attention and feed-forward [hidden]; query_gain, key_gain: see `place`; eps:
        float32, of all norms.
        """
        tokens, hidden = x.shape
        head_dim, wide = 2 * cos.shape[1], rows_in(gate_up) // 2
        group = rows_in(qkv) // (kv_heads * head_dim) - 2
        stream, normed = np.empty((tokens, hidden), np.float32), np.empty((tokens, hidden), np.float32)
        mixed = np.empty((tokens, rows_in(qkv)), np.float32)
        queries = np.empty((tokens, kv_heads, group, head_dim), np.float32)
        attended = np.empty((tokens, kv_heads, group, head_dim), np.float32)
        owners = np.empty(2 * attention_pieces, np.int64)
        parts = np.empty((2 * attention_pieces, group, head_dim + 2), np.float32)
        gated, activated = np.empty((tokens, 2 * wide), np.float32), np.empty((tokens, wide), np.float32)
        begin(x, gain, eps, stream, normed)
        for piece in prange(pieces):
            _product(normed, qkv, qkv_bias, mixed, piece, pieces)
        where = (rows, frames, slots, ends, head_stride, value_start)
        place(mixed, query_gain, key_gain, eps, cos, sin, numbers, *where, queries)
        if attention_pieces == 1:
            attend_piece(0, 1, queries, *where, attended, owners, parts)
        else:
            for piece in prange(attention_pieces):
                cut = (piece, attention_pieces)
                attend_piece(*cut, queries, *where, attended, owners, parts)
            merge_parts(attended, owners, parts)
        joined = attended.reshape((tokens, kv_heads * group * head_dim))
        for piece in prange(pieces):
            _add_product(joined, out, out_bias, normed, stream, piece, pieces)
        normalize(stream, gain_after, eps, normed)
        for piece in prange(pieces):
            _gated_product(normed, gate_up, gate_up_bias, gated, activated, piece, pieces)
        for piece in prange(pieces):
            _add_product(activated, down, down_bias, normed, stream, piece, pieces)
        finish(stream, output)
        return number

    return decode_layer


def _whole_product(number):
    def product(x, weight, bias, output, pieces):
        """output = x @ weight.T + bias, as in `decode_layer`, cut into so many pieces."""
        for piece in prange(pieces):
            _product(x, weight, bias, output, piece, pieces)
        return number

    return product


def _parallel(make, parallel):
    """What `make` makes, compiled with or without threads."""
    return compiled(chosen.is_own(chosen.rows), parallel=parallel)(make(2 * chosen.edition_of(chosen.rows) + parallel))


decode_layer_on_threads, product_on_threads = _parallel(_layer, True), _parallel(_whole_product, True)
decode_layer_on_one_thread, product_on_one_thread = _parallel(_layer, False), _parallel(_whole_product, False)


def _layers(number):
    def decode_layers(
        x, cos, sin, rows, frames, numbers, slots, ends, head_stride, value_start, attention_pieces,
        qkv, out, gate_up, down, qkv_bias, out_bias, gate_up_bias, down_bias,
        gain, query_gain, key_gain, gain_after, eps, kv_heads, places, outputs, pieces,
    ):  # fmt: skip
        """Layer after layer, each as `decode_layer`, so that Python is not asked in between.

        rows, frames and the weights: those of any layer. All have their shapes, but for the rows of packed parts, which
        may be of other kinds and lengths. places: int64 [layers, ...], where in memory each layer has its rows and its
        weights, in the order above, as layer_weights.numbers_of says, and last its frames. outputs: [layers, tokens,
        hidden], to be written.
        """
        at_out = 1 + places_of(qkv)
        at_gate_up = at_out + places_of(out)
        at_down = at_gate_up + places_of(gate_up)
        rest = at_down + places_of(down)
        for layer in range(len(outputs)):
            at = places[layer]
            decode_layer_on_threads(
                x, cos, sin, array_at(rows, at[0]), array_at(frames, at[rest + 8]), numbers,
                slots, ends, head_stride, value_start, attention_pieces,
                weight_at(qkv, at, 1), weight_at(out, at, at_out), weight_at(gate_up, at, at_gate_up),
                weight_at(down, at, at_down), array_at(qkv_bias, at[rest]), array_at(out_bias, at[rest + 1]),
                array_at(gate_up_bias, at[rest + 2]), array_at(down_bias, at[rest + 3]), array_at(gain, at[rest + 4]),
                array_at(query_gain, at[rest + 5]), array_at(key_gain, at[rest + 6]),
                array_at(gain_after, at[rest + 7]), eps, kv_heads, outputs[layer], pieces,
            )  # fmt: skip
            x = outputs[layer]
        return number

    return decode_layers


decode_layers_on_threads = _parallel(_layers, False)  # what is parallel is inside a layer
