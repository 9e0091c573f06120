"""Heads that guess several tokens ahead from the state in which the model chose its newest one.

    h, from which the head reads the next token
    ├─▶ h + silu(W1 h + b1) ─▶ the same head ─▶ the token after the next
    ├─▶ h + silu(W2 h + b2) ─▶ the same head ─▶ the one after that
    └─▶ ...

The model stays as it is: only the small W and b are trained, on texts that the model wrote itself. So drafting takes no
pass of its own, and the drafts are about what this model likes to say. Cai et al. 2024, "Medusa: Simple LLM Inference
Acceleration Framework with Multiple Decoding Heads", section 2.1 (their Medusa-1); drafts in one chain, without a tree.
The heads choose among the tokens of their training texts only, which spares reading most of the large head: Zhao et
al. 2025, "FR-Spec". A token that they do not know is one that they cannot guess, no more.

    heads = medusa.train(llm, prompts)
    fast = LLM(speculative=medusa.Medusa(heads))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from llmfromscratch import kv_cache, loading, sampling, scheduler
from llmfromscratch.batch import Batch
from llmfromscratch.drafters import Draft
from llmfromscratch.errors import CheckpointError, RequestError
from llmfromscratch.progress import progress_bar

_UNKNOWN = -100  # a target that does not count: the text ended before it, which `F.cross_entropy` knows by this number
_LESS = 0.8  # how much the loss of a head counts against that of the one before it: Medusa, section 2.2.1
_NAMES = ("weight", "bias", "vocabulary")


class Heads(nn.Module):
    """A residual block for each token ahead; at first each leaves the state as it is.

    weight: float32 [heads, hidden, hidden]; bias: [heads, hidden]. vocabulary: int64 [words], rising, the token ids
    that they choose among.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    vocabulary: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, vocabulary: Tensor):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.register_buffer("vocabulary", vocabulary)

    @property
    def count(self) -> int:
        """How many tokens they look ahead."""
        return len(self.weight)

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """[rows, count, hidden]: for each state float32 [rows, hidden] what the head should read, one token further
        ahead each. count: only the first ones."""
        weight, bias = self.weight[:count], self.bias[:count]
        steps = torch.einsum("khj,nj->nkh", weight, hidden) + bias
        return hidden.unsqueeze(1) + F.silu(steps)

    def save(self, file: str | Path) -> None:
        """Writes them as safetensors."""
        save_file({name: getattr(self, name).detach().cpu().contiguous() for name in _NAMES}, file)

    @classmethod
    def load(cls, file: str | Path) -> Heads:
        """What `save` has written. Raises CheckpointError."""
        try:
            with safe_open(file, framework="pt") as stored:
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  it is no mapping
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"it cannot be read as safetensors: {error}", file) from error
        if set(tensors) != set(_NAMES):
            raise CheckpointError(f"it holds {', '.join(sorted(tensors))}; {', '.join(_NAMES)} were expected.", file)
        weight, bias, vocabulary = (tensors[name] for name in _NAMES)
        square = weight.dim() == 3 and weight.shape[1] == weight.shape[2] and len(weight) > 0
        kinds = weight.dtype == bias.dtype == torch.float32 and vocabulary.dtype == torch.int64
        if not (square and kinds and bias.shape == weight.shape[:2] and vocabulary.dim() == 1 and len(vocabulary)):
            shapes = ", ".join(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}" for name in _NAMES)
            raise CheckpointError(f"these are no Medusa heads: {shapes}.", file)
        return cls(weight, bias, vocabulary)


class Medusa:
    """A drafter of these heads, for LLM(speculative=...): the same model that they were trained on, in any dtype.

    tokens: drafts at most. cost: of one draft, in passes of the model.
    """

    wants_hidden = True

    def __init__(self, heads: Heads):
        self.heads, self.tokens, self.cost = heads, heads.count, 0.0
        self._rows: Tensor | None = None
        self._hidden: dict[int, Tensor] = {}

    def attach(self, llm: Any) -> None:
        """Takes the rows of the model's head that the heads need. Raises RequestError for another model's heads."""
        hidden, words = self.heads.weight.shape[-1], int(self.heads.vocabulary.max()) + 1
        if hidden != llm.config.hidden_size or words > llm.config.vocab_size or int(self.heads.vocabulary.min()) < 0:
            raise RequestError(
                f"the heads are for a hidden size of {hidden} and token ids below {words}; the model has "
                f"{llm.config.hidden_size} and {llm.config.vocab_size}. Train heads for this model."
            )
        head = llm.model.lm_head.weight
        self.heads = self.heads.to(head.device)
        self._rows = head.detach()[self.heads.vocabulary].float()
        read = self.heads.weight.numel() + self._rows.numel()
        numbers = sum(loading.module_sizes(llm.config, "int8").values())  # as many as there would be bytes
        self.cost = read / numbers / self.heads.count
        self._hidden.clear()

    def observe(self, request_ids: Sequence[int], hidden: Tensor) -> None:
        """Keeps the states [n, hidden] that gave the requests' newest tokens."""
        self._hidden |= dict(zip(request_ids, hidden.to(self.heads.weight).unbind(), strict=True))

    @torch.inference_mode()
    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """The most probable token of each head; none for a request of which nothing was seen yet."""
        if self._rows is None:
            raise RequestError("this Medusa belongs to no model yet; give it to LLM(speculative=...).")
        known = [request.request_id for request in requests if request.request_id in self._hidden]
        if not known:
            return [Draft([]) for _ in requests]
        states = self.heads(torch.stack([self._hidden[number] for number in known]), max(counts))
        best = self.heads.vocabulary[(states @ self._rows.T).argmax(dim=-1)].tolist()
        drafts = dict(zip(known, best, strict=True))
        pairs = zip(requests, counts, strict=True)
        return [Draft(drafts.get(request.request_id, [])[:count]) for request, count in pairs]

    def forget(self, request_id: int) -> None:
        """Drops its state."""
        self._hidden.pop(request_id, None)


# ---- training ----------------------------------------------------------------------------------------------------


def train(
    llm: Any,
    prompts: Sequence[Any],
    heads: int = 3,
    steps: int = 300,
    *,
    tokens: int = 96,
    rows: int = 256,
    learning_rate: float = 2e-3,
    seed: int = 0,
) -> Heads:
    """Heads for a model, from its own greedy answers to these prompts; the model itself does not change.

    llm: an `LLM`; prompts: as for its `generate`, best of the kind that will be asked later. tokens: of an answer, at
    most. rows: states of a training step. The same arguments give the same heads. Raises RequestError where nothing
    could be learned.

    How well they guess is a matter of how much they have read. On SmolLM2-135M, 50 answers of 80 tokens teach the first
    head two thirds of what comes in these very answers, and a quarter in others of their kind: enough for a program
    that asks much the same again and again, and too little for texts of any kind, which takes thousands of answers.
    """
    for name, value in (("heads", heads), ("steps", steps), ("tokens", tokens), ("rows", rows)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    hidden, targets = _examples(llm, list(prompts), heads, tokens)
    vocabulary, places = targets.unique(return_inverse=True)
    if vocabulary[0] == _UNKNOWN:
        vocabulary, places = vocabulary[1:], torch.where(targets == _UNKNOWN, _UNKNOWN, places - 1)
    if not len(vocabulary):
        raise RequestError("the answers have one token each; with nothing behind it there is nothing to learn.")
    width = hidden.shape[-1]
    learned = Heads(torch.zeros(heads, width, width), torch.zeros(heads, width), vocabulary).to(hidden.device)
    head = llm.model.lm_head.weight.detach()[vocabulary].float()
    _fit(learned, head, hidden, places, steps, rows, learning_rate, torch.Generator().manual_seed(seed))
    return learned.requires_grad_(False)


def _fit(
    heads: Heads, head: Tensor, hidden: Tensor, targets: Tensor, steps: int, rows: int, rate: float,
    generator: torch.Generator,
) -> None:  # fmt: skip
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    share = _LESS ** torch.arange(heads.count, device=hidden.device)
    bar = progress_bar(range(steps), "Training heads", unit="step", leave=False)
    for _ in bar:
        some = torch.randint(len(hidden), (rows,), generator=generator).to(hidden.device)
        losses = heads_losses(heads, head, hidden[some], targets[some])
        optimizer.zero_grad()
        (losses * share).sum().backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{losses[0].item():.2f}", refresh=False)


def heads_losses(heads: Heads, head: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-probability of what came, for each head: [heads].

    head: [words, hidden], the rows of the vocabulary; hidden: [rows, hidden]; targets: [rows, heads], places in the
    vocabulary, -100 where none came.
    """
    logits = heads(hidden) @ head.T
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_UNKNOWN, reduction="none")
    counted = (targets != _UNKNOWN).sum(dim=0).clamp(min=1)
    return each.view(targets.shape).sum(dim=0) / counted


def _examples(llm: Any, prompts: list[Any], heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    """States float32 [places, hidden] that gave the answers' tokens, and what came after those [places, heads]."""
    answers = llm.generate(prompts, sampling.SamplingParams(max_tokens=tokens)) if prompts else []
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise RequestError(f"a prompt cannot be learned from: {failed}")
    if not any(answer.token_ids for answer in answers):
        raise RequestError("prompts gives nothing to learn from; give some that the model answers.")
    hidden, targets = [], []
    for answer in progress_bar(answers, "States to learn from", unit="answer", leave=False):
        ids = list(answer.token_ids)
        hidden.append(_states(llm.model, list(answer.prompt_token_ids), ids))
        ahead = [[*ids[1 + head :], *[_UNKNOWN] * (1 + head)][: len(ids)] for head in range(heads)]
        targets.append(torch.tensor(ahead, dtype=torch.int64).reshape(heads, -1).T)
    return torch.cat(hidden), torch.cat(targets).to(hidden[0].device)


def _states(network: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """What the model's head read to give each token of the answer: float32 [answer, hidden], in one pass."""
    seen: list[Tensor] = []
    hook = network.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        rows = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        batch = Batch.of([(0, [*prompt, *answer[:-1]], 0)], logits_at=[rows])
        network(batch, kv_cache.ConcatKVCache(network.config.num_layers))
    finally:
        hook.remove()
    return seen[0].float().clone()  # a copy from outside of inference mode: gradients may be taken of it
