"""Attention of decode steps, compiled by Numba: every key and value is read once, where it lies.

The plain attention first gathers a request's blocks, then makes three passes over them: scores, softmax, values. Here a
thread goes through the tokens once, TILE of them at a time, and keeps for each query three things that can be mended
when a larger score turns up: the largest score so far, the sum of the powers, and the mixed values (online softmax:
Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al., "FlashAttention").

The work is one row of tokens, all requests of head 0, then all of head 1, and so on, cut into as many pieces of like
size as there are threads. Where a cut falls into a request, its parts are merged afterwards (as in FlashDecoding):

    head 0              | head 1              | head 2
    req 7    req 4      | req 7    req 4      | req 7    req 4
    └──────────── piece 0 ───────────┴─────────── piece 1 ──────────┘

How a cache lies in memory is said by numbers of rows: `rows` is the whole of it as [rows, head_dim]; token t of a
request, head h, has its key in row `slots[t] + h * head_stride` and its value `value_start` rows behind. Rows may also
be bytes, codes of a few bits: then a tile of them is made into numbers first (`byte_rows`).

What makes it fast: the queries that share a key/value head are computed together; four tokens at a time, so that a
number that is loaded serves four times; and the rows that come next are prefetched, because a processor cannot guess
where the next block lies. Imported only when it is used: Numba takes a moment.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from llmfromscratch.kernels.byte_rows import TILE, as_numbers, room_for
from llmfromscratch.kernels.numba_words import LINE, MATH, compiled
from llmfromscratch.kernels.words import prefetch, widen

LOG2_E = math.log2(math.e)

# ---- powers ----------------------------------------------------------------------------------------------------------


@njit(fastmath=MATH, inline="always")
def power_of_two(x):
    """2**x for float32 x <= 0, to 2e-7 of it; below 2**-126 it stays there. Without branches: made for many at once.

    The whole part of x goes into the exponent's bits; the rest, within half of 0, into a polynomial (the one that meets
    2**x at seven Chebyshev nodes).
    """
    x = np.float32(-126) if x < np.float32(-126) else x  # this way round, so that NaN stays NaN
    whole = np.int32(x - np.float32(0.5))
    rest = x - np.float32(whole)
    power = np.float32(1.54614447e-4)
    power = power * rest + np.float32(1.34004282e-3)
    power = power * rest + np.float32(9.61805668e-3)
    power = power * rest + np.float32(5.55032723e-2)
    power = power * rest + np.float32(2.40226509e-1)
    power = power * rest + np.float32(6.93147207e-1)
    power = power * rest + np.float32(1)
    return power * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


# ---- one tile ----------------------------------------------------------------------------------------------------


@njit(fastmath=MATH)
def _score(queries, rows, slots, first, count, key, value, scores, tops):
    """scores[g, t] = queries[g] · key of token first + t, and the largest of each g into tops; fetches the values."""
    group, head_dim = queries.shape
    line, fours = LINE // rows.itemsize, count - count % 4
    for t in range(0, fours, 4):
        s0, s1, s2, s3 = slots[first + t], slots[first + t + 1], slots[first + t + 2], slots[first + t + 3]
        for d in range(0, head_dim, line):
            prefetch(rows, value + s0, d)
            prefetch(rows, value + s1, d)
            prefetch(rows, value + s2, d)
            prefetch(rows, value + s3, d)
        k0, k1, k2, k3 = key + s0, key + s1, key + s2, key + s3
        for g in range(group):
            a = b = c = e = np.float32(0)
            for d in range(head_dim):
                a += queries[g, d] * widen(rows[k0, d])
                b += queries[g, d] * widen(rows[k1, d])
                c += queries[g, d] * widen(rows[k2, d])
                e += queries[g, d] * widen(rows[k3, d])
            scores[g, t], scores[g, t + 1], scores[g, t + 2], scores[g, t + 3] = a, b, c, e
            tops[g] = max(tops[g], max(max(a, b), max(c, e)))
    for t in range(fours, count):
        k0 = key + slots[first + t]
        for g in range(group):
            a = np.float32(0)
            for d in range(head_dim):
                a += queries[g, d] * widen(rows[k0, d])
            scores[g, t] = a
            tops[g] = max(tops[g], a)


@njit(fastmath=MATH)
def _mix(weights, rows, slots, first, count, key, value, mixed):
    """mixed[g] += weights[g, t] * value of token first + t, summed over t; fetches the keys of the tile after."""
    group, head_dim = mixed.shape
    line, fours, last = LINE // rows.itemsize, count - count % 4, len(slots) - 1
    for t in range(0, fours, 4):
        for ahead in range(4):
            k0 = key + slots[min(first + t + ahead + TILE, last)]
            for d in range(0, head_dim, line):
                prefetch(rows, k0, d)
        v0, v1 = value + slots[first + t], value + slots[first + t + 1]
        v2, v3 = value + slots[first + t + 2], value + slots[first + t + 3]
        for g in range(group):
            a, b, c, e = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
            for d in range(head_dim):
                pair = a * widen(rows[v0, d]) + b * widen(rows[v1, d])
                mixed[g, d] += pair + (c * widen(rows[v2, d]) + e * widen(rows[v3, d]))
    for t in range(fours, count):
        v0 = value + slots[first + t]
        for g in range(group):
            for d in range(head_dim):
                mixed[g, d] += weights[g, t] * widen(rows[v0, d])


# ---- one piece ---------------------------------------------------------------------------------------------------


@njit(fastmath=MATH)
def _stretch(queries, rows, frames, head, slots, first, end, key, value, state, scores, room):
    """Attention of one request's query heads over some of its tokens, for one key/value head.

    queries: [group, head_dim], made ready by `attend_piece`. state: (mixed [group, head_dim], tops, sums, new tops), to
    be written, of each query g: tops[g], the largest score; sums[g], the sum of 2**(score - top); mixed[g], the values
    mixed with these powers. scores: [group, TILE], to work in; room: see `byte_rows.room_for`.
    """
    mixed, tops, sums, new_tops = state
    group, head_dim = mixed.shape
    for g in range(group):
        tops[g], new_tops[g], sums[g] = -np.inf, -np.inf, 0
        for d in range(head_dim):
            mixed[g, d] = 0
    for start in range(first, end, TILE):
        count = min(TILE, end - start)
        numbers, places, at, own, other = as_numbers(rows, frames, head, slots, start, count, key, value, room)
        _score(queries, numbers, places, at, count, own, other, scores, new_tops)
        for g in range(group):
            top, total = new_tops[g], np.float32(0)
            rescale = power_of_two(tops[g] - top)
            for t in range(count):
                power = power_of_two(scores[g, t] - top)
                scores[g, t] = power
                total += power
            tops[g], sums[g] = top, sums[g] * rescale + total
            for d in range(head_dim):
                mixed[g, d] *= rescale
        numbers, places, at, own, other = as_numbers(rows, frames, -1, slots, start, count, value, key, room)
        _mix(scores, numbers, places, at, count, other, own, mixed)


@njit(fastmath=MATH)
def attend_piece(number, pieces, queries, rows, frames, slots, ends, head_stride, value_start, output, owners, parts):
    """The piece `number` of all the work. Whole requests go to the output, the cut ones at its two ends to the parts.

    owners: int64 [2 * pieces], request * kv_heads + head that a part belongs to, -1 where there is none.
    parts: float32 [2 * pieces, group, head_dim + 2], of each query the mixed values, the top and the sum.
    """
    kv_heads, group, head_dim = queries.shape[1:]
    scaled, mixed = np.empty((group, head_dim), np.float32), np.empty((group, head_dim), np.float32)
    tops, sums, scores = np.empty(group, np.float32), np.empty(group, np.float32), np.empty((group, TILE), np.float32)
    state, room = (mixed, tops, sums, np.empty(group, np.float32)), room_for(rows, head_dim)
    scale = np.float32(LOG2_E / math.sqrt(head_dim))  # powers of two are cheaper than powers of e
    total, part = ends[-1], 2 * number
    place, end = kv_heads * total * number // pieces, kv_heads * total * (number + 1) // pieces
    owners[part] = owners[part + 1] = -1
    while place < end:
        head, start, request = place // total, place % total, 0
        while ends[request] <= start:
            request += 1
        first, stop = ends[request - 1] if request else 0, min(ends[request], start + end - place)
        for g in range(group):
            for d in range(head_dim):
                scaled[g, d] = queries[request, head, g, d] * scale
        key = head * head_stride
        _stretch(scaled, rows, frames, head, slots, start, stop, key, key + value_start, state, scores, room)
        whole = start == first and stop == ends[request]
        if not whole:
            owners[part] = request * kv_heads + head
        for g in range(group):
            target = output[request, head, g] if whole else parts[part, g]
            share = np.float32(1) / sums[g] if whole else np.float32(1)
            for d in range(head_dim):
                target[d] = mixed[g, d] * share
            if not whole:
                target[head_dim], target[head_dim + 1] = tops[g], sums[g]
        part += not whole
        place += stop - start


@njit(fastmath=MATH)
def merge_parts(output, owners, parts):
    """Joins the parts of each request that was cut: each counts as much as the powers in it, seen from one top."""
    kv_heads, group = output.shape[1:3]
    first = 0
    while first < len(owners):
        end = first + 1  # parts of one request lie next to each other, with gaps where a thread had only one part
        while end < len(owners) and owners[end] in (owners[first], -1):
            end += 1
        for g in range(group if owners[first] >= 0 else 0):
            mixed = output[owners[first] // kv_heads, owners[first] % kv_heads, g]
            _merge_one(mixed, owners[first:end], parts[first:end, g])
        first = end


@njit(fastmath=MATH)
def _merge_one(output, owners, parts):
    """One query's output [head_dim] from its parts [parts, head_dim + 2]."""
    head_dim = len(output)
    top, total = np.float32(-np.inf), np.float32(0)
    for part in range(len(parts)):
        if owners[part] >= 0:
            top = max(top, parts[part, head_dim])
    for d in range(head_dim):
        output[d] = 0
    for part in range(len(parts)):
        if owners[part] >= 0:
            share = power_of_two(parts[part, head_dim] - top)
            total += share * parts[part, head_dim + 1]
            for d in range(head_dim):
                output[d] += share * parts[part, d]
    for d in range(head_dim):
        output[d] /= total


# ---- all of it ---------------------------------------------------------------------------------------------------


@compiled(parallel=True)
def attend_on_threads(queries, rows, frames, slots, ends, head_stride, value_start, output, pieces):
    """Attention of one new token each for some requests, over all tokens that they have in one layer of a cache.

    queries: float32 [requests, kv_heads, group, head_dim]; output: the same, to be written.
    rows: float32 or uint16 (bfloat16) [rows, head_dim], the layer's keys and values, or int8 or uint8 (`byte_rows`),
    for which frames, float32 [frames, 2, kv_heads, head_dim], are those of the keys; slots: int64 [tokens], of all
    requests behind each other; ends: int64 [requests], where each one's end; none is empty. head_stride, value_start:
    see the module. pieces: into how many the work is cut.
    """
    owners = np.empty(2 * pieces, np.int64)
    parts = np.empty((2 * pieces, queries.shape[2], queries.shape[3] + 2), np.float32)
    where = (rows, frames, slots, ends, head_stride, value_start)
    for number in prange(pieces):
        attend_piece(number, pieces, queries, *where, output, owners, parts)
    merge_parts(output, owners, parts)


@compiled()
def attend_on_one_thread(queries, rows, frames, slots, ends, head_stride, value_start, output):
    """As `attend_on_threads`, by the calling thread alone: nothing is launched."""
    owners, parts = np.empty(2, np.int64), np.empty((2, 0, 0), np.float32)  # nothing is cut
    attend_piece(0, 1, queries, rows, frames, slots, ends, head_stride, value_start, output, owners, parts)
