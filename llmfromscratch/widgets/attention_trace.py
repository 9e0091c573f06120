"""The attention weights of every layer and head for a short text: what `attention_pattern` draws.

The model runs with a cache that keeps the weights of each pass: the prompt in two chunks, then its last token alone,
as in a decode step. So the mask is seen with and without earlier tokens before the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import attention, kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.widgets.glyphs import VISIBLE
from llmfromscratch.widgets.token_reading import counted

MOST_TOKENS = 32  # more rows would be too thin to read


@dataclass(frozen=True)
class Pattern:
    """weights: float64 [layers, heads, tokens, tokens], a query a row; visible: bool [tokens, tokens], the mask.

    labels: the tokens as they can be read; passes: how many tokens each forward pass took; left_out: tokens of the
    text beyond MOST_TOKENS.
    """

    labels: tuple[str, ...]
    weights: Tensor
    visible: Tensor
    passes: tuple[int, ...]
    left_out: int = 0

    def problems(self, layer: int, head: int) -> list[str]:
        """What cannot be right in the mask or in this head's weights, as sentences."""
        weights, tokens = self.weights[layer, head], len(self.labels)
        may = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        ahead, hidden = self.visible & ~may, ~self.visible & may
        said = [_cells("sees {key}, which comes after it", ahead), _cells("does not see {key}", hidden)]
        leaks = torch.where(self.visible, torch.zeros_like(weights), weights) != 0
        said.append(_cells("gives weight to {key}, which the mask hides from it", leaks))
        wrong = torch.isclose(weights.sum(-1), torch.ones(tokens, dtype=weights.dtype), atol=0.02).logical_not()
        if wrong.any():
            row = int(wrong.nonzero()[0])
            said.append(
                f"The weights of query {row + 1} add up to {float(weights[row].sum()):.3g}; those of a query make 1."
            )
        return [problem for problem in said if problem]


class RecordingCache:
    """A cache around another one that does the attention itself and keeps the weights.

    attend, mask: functions like `attention.grouped_attention` and `attention.causal_mask`. One request at a time.
    """

    def __init__(self, inner: Any, attend: Callable[..., Any], mask: Callable[..., Any]):
        self._inner, self._attend, self._mask = inner, attend, mask
        self.weights: dict[int, list[Tensor]] = {}
        self.visible: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attend(self, queries: Tensor, layer: int, batch: Batch) -> Tensor:
        """Attention of queries [tokens, heads, head_dim], span by span; the same shape. Keeps [heads, new, context]."""
        output = torch.empty_like(queries)
        for span in batch.spans:
            keys, values = self._inner.read(layer, span.request_id)
            shape = (span.length, span.start + span.length)
            visible = torch.as_tensor(self._mask(span.start, span.length, queries.device))
            if visible.shape != shape or visible.dtype != torch.bool:
                raise ValueError(
                    f"causal_mask({shape[1] - shape[0]}, {shape[0]}) is {visible.dtype} {list(visible.shape)}; "
                    f"a torch.bool mask {list(shape)} was expected, a row for each new token"
                )
            output[span.rows], weights = self._attend(queries[span.rows], keys, values, visible)
            if weights.shape != (queries.shape[1], *shape):
                raise ValueError(
                    f"grouped_attention returned weights {list(weights.shape)}; "
                    f"[heads, new, context] = {[queries.shape[1], *shape]} was expected"
                )
            self.weights.setdefault(layer, []).append(weights.detach().double().cpu())
            if layer == 0:
                self.visible.append(visible.cpu())
        return output


def record_attention(
    model: Any,
    ids: Sequence[int],
    labels: Sequence[str] | None = None,
    *,
    cache: Callable[[int], Any] | None = None,
    attend: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
) -> Pattern:
    """Runs the first MOST_TOKENS of ids through the model and returns its attention.

    cache: called with the number of layers, `kv_cache.ConcatKVCache` if not given; attend and mask:
    `attention.grouped_attention` and `attention.causal_mask` if not given. Raises ValueError for no ids.
    """
    shown = [int(index) for index in ids[:MOST_TOKENS]]
    if not shown:
        raise ValueError("There is no token to draw; give a text of at least one character.")
    recording = RecordingCache(
        (cache or kv_cache.ConcatKVCache)(model.config.num_layers),
        attend or attention.grouped_attention,
        mask or attention.causal_mask,
    )
    first = len(shown) // 2
    chunks = [chunk for chunk in (shown[:first], shown[first:-1], shown[-1:]) if chunk]
    start = 0
    for chunk in chunks:
        model(Batch.of([(0, chunk, start)]), recording)
        start += len(chunk)
    if len(recording.weights) < model.config.num_layers:
        raise ValueError("The model does not ask its cache for `attend`; `model.Attention.forward` ought to.")
    weights = torch.stack([_joined(recording.weights[layer]) for layer in sorted(recording.weights)])
    named = tuple(labels or map(str, shown))[: len(shown)]
    return Pattern(
        named, weights, _joined(recording.visible), tuple(len(chunk) for chunk in chunks), len(ids) - len(shown)
    )


def token_labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as text with its white space made visible, or as bytes, like <E4 BD>, where it is no whole text."""
    labels = []
    for index in ids:
        content = tokenizer.token_bytes(index)
        try:
            labels.append("".join(VISIBLE.get(character, character) for character in content.decode("utf-8")))
        except UnicodeDecodeError:
            labels.append(f"<{content.hex(' ').upper()}>")
    return labels


def _joined(passes: Sequence[Tensor]) -> Tensor:
    """[..., new, context] of each pass, one below the other; what a pass could not know of is zero."""
    tokens = passes[-1].shape[-1]
    return torch.cat([torch.nn.functional.pad(one, (0, tokens - one.shape[-1])) for one in passes], dim=-2)


def _cells(what: str, cells: Tensor) -> str:
    """A sentence on the first of the cells that are set, and how many more there are; "" if none is."""
    found = cells.nonzero().tolist()
    if not found:
        return ""
    query, key = found[0]
    more = f" ({counted(len(found) - 1, 'more cell')} like this)" if len(found) > 1 else ""
    return f"Query {query + 1} {what.format(key=f'token {key + 1}')}{more}."
