"""Chapter 3's first bug hunts, around the model: a broken function, the symptom it causes, and its check each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.comparing import Case, compare


@cache
def _small_model() -> Callable[..., Tensor]:
    """A random model of two layers in float64, with weights large enough for every token to matter."""
    config = ModelConfig("llama", 61, 24, 40, 2, num_heads=6, num_kv_heads=2, head_dim=4, context_length=64)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = learner_engine.reference("model").Model(config).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model.requires_grad_(False).eval()


def _new_cache() -> Any:
    return learner_engine.reference("kv_cache").ConcatKVCache(2)


def _recomputed(model: Callable[..., Tensor], ids: Sequence[int], new_tokens: int) -> list[int]:
    """The same continuation without a cache: everything is computed again for every token."""
    text = list(ids)
    for _ in range(new_tokens):
        text.append(int(model(Batch.of([(0, text, 0)]), _new_cache())[0].argmax()))
    return text[len(ids) :]


# ---- 3.a ---------------------------------------------------------------------------------------------------------

PROMPT_STORY = """
"The model writes, but it does not answer. Whatever I ask, I get the same lines, as long as my question ends with the
same word." Below, three prompts go to a small random model, which knows no words, only ids.
"""


def continue_text(model: Callable[..., Tensor], cache: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """The `new_tokens` most likely ids after the prompt `ids`, one after the other, each token computed once.

    model(batch, cache) gives the logits of each request's last token; the cache is empty at the beginning.
    """
    token, answer = ids[-1], []
    for _ in range(new_tokens):
        logits = model(Batch.of([(0, [token], cache.length(0))]), cache)
        token = int(logits[0].argmax())
        answer.append(token)
    return answer


_PROMPTS = ([17, 8, 32], [5, 32], [58, 2, 19, 24, 32])


def show_prompt() -> None:
    """What three prompts with the same last token get, and what they get without a cache."""
    model = _small_model()
    for ids in _PROMPTS:
        print(f"prompt {ids}: {continue_text(model, _new_cache(), ids, 5)}")
        print(f"{'without a cache':>{len(str(ids)) + 7}}: {_recomputed(model, ids, 5)}")


def check_continue_text(mended: Callable[..., list[int]]) -> None:
    """Against the same model without a cache, and every token is to be computed once."""
    model = _small_model()
    compare(
        partial(_watched, mended),
        lambda ids, new: {"ids": _recomputed(model, ids, new), "every token is computed once": True},
        [
            Case(f"prompt {ids}, {new} new token{'s' * (new > 1)}", ids, new)
            for ids, new in (([32], 1), ([5, 32], 1), ([5, 32], 2), (_PROMPTS[0], 4), (_PROMPTS[2], 5))
        ],
        expected="the ids that the model finds without a cache, and every token given to it once",
        mistakes=[
            ("the model still sees the last token of the prompt only; the whole prompt has to go through it first",
             partial(_watched, continue_text)),
            ("the ids are right, but the whole text is computed again for every token: what is the cache for?",
             partial(_watched, _continued(again=True))),
            ("the last token of the prompt goes through the model twice, the second time a place further on",
             partial(_watched, _continued(twice=True))),
            ("the first new token is missing: the pass over the prompt has found it already",
             partial(_watched, _continued(first_lost=True))),
            ("the prompt comes out as well; asked for are the new ids", partial(_watched, _continued(prompt=True))),
            ("the last token of the prompt is never read", partial(_watched, _continued(without_last=True))),
            ("at every step the whole text goes in, behind what the cache holds already; only its newest token is new",
             partial(_watched, _continued(whole=True))),
        ],
        explain=_of_empty_part,
    )  # fmt: skip


def _of_empty_part(error: BaseException, case: Case) -> str:
    if isinstance(error, ValueError) and "no new tokens" in str(error):
        return "a prompt of one token has nothing before its last one, and a part without tokens is refused"
    return ""


def _watched(function: Callable[..., list[int]], ids: Sequence[int], new: int) -> dict[str, Any]:
    tokens = 0

    def model(batch: Batch, cache: Any) -> Tensor:
        nonlocal tokens
        tokens += len(batch.token_ids)
        return _small_model()(batch, cache)

    found = function(model, _new_cache(), ids, new)
    return {"ids": found, "every token is computed once": tokens <= len(ids) + new}


def _continued(**wrong: bool) -> Callable[..., list[int]]:
    """A loop that reads the prompt first, with one mistake switched on."""

    def run(model: Callable[..., Tensor], cache: Any, ids: Sequence[int], new: int) -> list[int]:
        text = list(ids)
        rest = text[: max(1, len(text) - bool(wrong.get("without_last")))]
        if wrong.get("twice"):
            model(Batch.of([(0, text, 0)]), cache)
            rest = text[-1:]
        for _ in range(new + bool(wrong.get("first_lost"))):
            if wrong.get("again"):
                cache.release(0)
                rest = text
            token = int(model(Batch.of([(0, rest, cache.length(0))]), cache)[0].argmax())
            text = [*text, token]
            rest = text if wrong.get("whole") else [token]
        return text[0 if wrong.get("prompt") else len(ids) + bool(wrong.get("first_lost")) :]

    return run


# ---- 3.b ---------------------------------------------------------------------------------------------------------

POSITION_STORY = """
"The first token after the prompt is always right. From the second on it is another text than without the cache."
Nothing is lost from the cache: keys and values of all tokens are there, and the mask is right.
"""
Parts = Sequence[tuple[int, Sequence[int], int]]  # (request, its new ids, how many of its tokens are stored)


def positions_of(parts: Sequence[tuple[int, Sequence[int], int]]) -> list[int]:
    """The position of every new token of a batch in its own text, for the rotary embedding.

    parts: (request, its new ids, how many of its tokens are in the cache already), one after the other.
    """
    return [position for _, ids, _ in parts for position in range(len(ids))]


def show_positions() -> None:
    """A prompt continued with these positions and with the right ones."""
    ids = _PROMPTS[0]
    for label, positions in (("these positions", positions_of), ("without a cache", None)):
        print(f"{label}: {_with_positions(positions, ids, 5) if positions else _recomputed(_small_model(), ids, 5)}")
    print(f"the positions of {len(ids)} tokens and of one more: {positions_of([(0, ids, 0)])}, "
          f"{positions_of([(0, [51], len(ids))])}")  # fmt: skip


def _with_positions(positions: Callable[[Parts], list[int]], ids: Sequence[int], new_tokens: int) -> list[int]:
    model, cache, rest, answer = _small_model(), _new_cache(), list(ids), list[int]()
    for _ in range(new_tokens):
        parts = [(0, rest, cache.length(0))]
        batch = dataclasses.replace(Batch.of(parts), positions=torch.tensor(positions(parts)))
        rest = [int(model(batch, cache)[0].argmax())]
        answer += rest
    return answer


def check_positions_of(mended: Callable[[Parts], list[int]]) -> None:
    """Token by token: a counter for each request that begins at what is stored."""

    def right(parts: Parts) -> list[int]:
        found = []
        for _, ids, stored in parts:
            for _ in ids:
                found.append(stored)
                stored += 1
        return found

    def rule(formula: Callable[[int, int, int, int, int], int]) -> Callable[[Parts], list[int]]:
        """Positions by a formula of (number in the part, stored, row, stored of the first part, new in the part)."""

        def run(parts: Parts) -> list[int]:
            rows = [(number, stored, len(ids)) for _, ids, stored in parts for number in range(len(ids))]
            return [formula(number, stored, row, parts[0][2], new) for row, (number, stored, new) in enumerate(rows)]

        return run

    compare(
        mended,
        right,
        [
            Case(f"parts {parts}", parts)
            for parts in (
                [(0, [5], 0)],
                [(0, [5, 6, 7], 0)],
                [(0, [5], 3)],
                [(0, [5, 6], 3)],
                [(1, [5, 6, 7], 0), (2, [8], 4)],
                [(1, [5], 9), (2, [6, 7], 0), (3, [8, 9], 4)],
            )
        ],
        expected="for each request the positions that follow what is stored of it",
        mistakes=[
            ("the positions begin at 0 in every pass, whatever is stored", positions_of),
            ("a single token stands where it should, a chunk of several begins at 0",
             rule(lambda number, stored, row, first, new: stored if new == 1 else number)),
            ("the positions run on through the whole batch; every request counts for itself",
             rule(lambda number, stored, row, first, new: row)),
            ("the positions run on through the whole batch, from where the first request stands; every request counts "
             "for itself", rule(lambda number, stored, row, first, new: first + row)),
            ("what is stored of the first request is counted for all",
             rule(lambda number, stored, row, first, new: first + number)),
            ("range(stored, len(ids)) ends too early: it counts to len(ids), and not that many from `stored` on",
             lambda parts: [position for _, ids, stored in parts for position in range(stored, len(ids))]),
            ("every token of a chunk has the position of the first",
             rule(lambda number, stored, row, first, new: stored)),
            ("one too far: with 3 tokens stored at 0, 1 and 2 the next stands at 3",
             rule(lambda number, stored, row, first, new: stored + number + (stored > 0))),
            ("one too far: the first token of a text stands at 0",
             rule(lambda number, stored, row, first, new: stored + number + 1)),
        ],
        what="the positions",
    )  # fmt: skip


# ---- 3.c ---------------------------------------------------------------------------------------------------------

CHUNK_STORY = """
"With the whole prompt at once the logits are right to the last digit. As soon as I send it in two halves, or generate
with the cache, they are not. I use torch's own attention, so it cannot be that." Below: which rows of a text of 6
tokens come out the same when it is computed in chunks.
"""


def chunk_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the newest tokens of a text: each sees itself and everything before it.

    queries: [new, heads, head_dim]; keys, values: [context, heads, head_dim], of all tokens, the new ones last.
    """
    q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def show_chunks() -> None:
    """Which rows are right, for a text of 6 tokens in chunks of 6, 3 and 1."""
    queries, keys, values = _text(6, 2)
    whole = _row_by_row(queries, keys, values)
    for size in (6, 3, 1):
        ends = range(size, 7, size)
        rows = torch.cat([chunk_attention(queries[end - size : end], keys[:end], values[:end]) for end in ends])
        right = [bool(torch.allclose(row, want, atol=1e-5)) for row, want in zip(rows, whole, strict=True)]
        print(
            f"chunks of {size}: " + ", ".join(f"token {n} {'right' if ok else 'wrong'}" for n, ok in enumerate(right))
        )


def _text(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = torch.randn(3, tokens, heads, 4, generator=torch.Generator().manual_seed(tokens)).unbind(0)
    return queries, keys, values


def _row_by_row(queries: Tensor, keys: Tensor, values: Tensor, seen: Callable[[int, int], int] | None = None) -> Tensor:
    """One query after the other, each on the keys it may see; seen: (row, new) -> how many those are."""
    new, start = len(queries), len(keys) - len(queries)
    rows = []
    for row, query in enumerate(queries):
        count = start + row + 1 if seen is None else seen(row, new)
        weights = torch.einsum("hd,khd->hk", query, keys[:count]).mul(query.shape[-1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, values[:count]))
    return torch.stack(rows)


def _inverted(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
    hidden = torch.ones(len(queries), len(keys)).triu(1 + len(keys) - len(queries)).bool()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden).transpose(0, 1)


def check_chunk_attention(mended: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Prompts, chunks and single steps, against one query after the other."""

    def case(new: int, context: int, heads: int = 1) -> Case:
        queries, keys, values = _text(context, heads)
        return Case(f"the last {new} of {context} tokens", queries[context - new :].clone(), keys, values)

    def by(rule: Callable[[int, int, int], int]) -> Callable[..., Tensor]:
        """Rows that see as many keys as a rule of (row, new, context) says."""
        return lambda q, k, v: _row_by_row(q, k, v, lambda row, new: rule(row, new, len(k)))

    compare(
        mended,
        _row_by_row,
        [case(1, 1), case(3, 3), case(1, 4), case(2, 4), case(5, 9, heads=3)],
        expected="each new token mixing the values of itself and of everything before it",
        mistakes=[
            ("a single token is right now, a chunk is not: its first row is still taken for the text's first token",
             by(lambda row, new, context: context if new == 1 else row + 1)),
            ("`is_causal=True` takes the first row for the first token of the text; give it a mask of your own",
             by(lambda row, new, context: row + 1)),
            ("with tokens stored nothing is hidden any more: the first tokens of a chunk see those after them",
             by(lambda row, new, context: row + 1 if new == context else context)),
            ("nothing is hidden any more: tokens see those that come after them",
             by(lambda row, new, context: context)),
            ("a token sees one key too many, the one after itself",
             by(lambda row, new, context: min(context, context - new + row + 2))),
            ("a token does not see itself", by(lambda row, new, context: context - new + row)),
            ("the mask is the wrong way round: True means that a query may look", _inverted),
        ],
    )  # fmt: skip
