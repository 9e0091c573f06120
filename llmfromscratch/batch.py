"""The ragged batch: what one forward pass computes, without padding.

Prompt chunks and single decode steps stand one after another in flat tensors; `spans` says which rows belong to whom:

    request 7 (3 prompt tokens)   request 4 (1 new token)
    ids       [12, 905, 33,       271]
    positions [ 0,   1,  2,        57]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The rows of one request: `length` new tokens that follow `start` tokens already in the cache."""

    request_id: int
    first_row: int
    start: int
    length: int

    @property
    def rows(self) -> slice:
        """The rows of the flat tensors that belong to this request."""
        return slice(self.first_row, self.first_row + self.length)


@dataclass(frozen=True)
class Batch:
    """token_ids, positions: int64 [tokens]; logit_rows: int64 [rows that need logits], in the order of `spans`."""

    token_ids: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    logit_rows: Tensor

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[int, Sequence[int], int]],
        device: str | torch.device = "cpu",
        all_logits: bool = False,
        logits_at: Sequence[int | Sequence[int] | None] | None = None,
    ) -> Batch:
        """Joins (request id, new token ids, tokens already cached) to one batch.

        Logits are asked for the last token of each part, or for every token with `all_logits`. logits_at: where else,
        one entry for each part: the index within its new tokens, several of them, or None for a part whose logits
        nobody needs.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        spans = []
        for request_id, ids, start in parts:
            if not ids:
                raise ValueError(f"request {request_id} has no new tokens")
            spans.append(Span(request_id, len(token_ids), start, len(ids)))
            token_ids.extend(ids)
            positions.extend(range(start, start + len(ids)))
        if all_logits:
            rows = list(range(len(token_ids)))
        else:
            wanted = [span.length - 1 for span in spans] if logits_at is None else logits_at
            rows = [_row(span, index) for span, some in zip(spans, wanted, strict=True) for index in _indices(some)]
        return cls(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            tuple(spans),
            torch.tensor(rows, dtype=torch.int64, device=device),
        )


def _indices(some: int | Sequence[int] | None) -> Sequence[int]:
    if some is None:
        return ()
    return (some,) if isinstance(some, int) else some


def _row(span: Span, index: int) -> int:
    if not 0 <= index < span.length:
        raise ValueError(
            f"request {span.request_id} has {span.length} new tokens; there is no logit at {index} of them"
        )
    return span.first_row + index
