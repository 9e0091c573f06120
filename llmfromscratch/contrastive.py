"""Two ways to choose a token by contrast, both without chance.

Contrastive search asks a candidate whether it says something new: a token whose hidden state resembles one before it is
marked down, so that the text does not go round in circles. Su et al., "A Contrastive Framework for Neural Text
Generation" (2022), section 3.2.

Contrastive decoding asks what the model knows better than a worse one: both rate the next token, and the one wins whose
probability rises most from the amateur to the expert. Li et al., "Contrastive Decoding: Open-ended Text Generation as
Optimization" (2022), section 3. The amateur here is the model itself without some of its layers.

Both are for experiments with an `LLM`: they take one prompt at a time, in turns with the engine's own steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from llmfromscratch import kv_cache, layer_skipping, model, sampling
from llmfromscratch.answers import Completion
from llmfromscratch.batch import Batch
from llmfromscratch.branches import Branches, take_turn
from llmfromscratch.engine import LLM, Prompt
from llmfromscratch.errors import OutOfMemory, RequestError
from llmfromscratch.progress import progress_bar
from llmfromscratch.stopping import end_ids

_DELAY = 5.0  # seconds before a progress bar shows


def contrastive_search(
    llm: LLM,
    prompt: Prompt,
    *,
    top_k: int = 4,
    alpha: float = 0.6,
    max_tokens: int = 256,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
) -> Completion:
    """An answer by contrastive search: of the top_k most probable tokens the one with the largest

        (1 - alpha) * probability - alpha * (largest cosine of its hidden state with one of the text before it)

    alpha: from 0, which is greedy decoding, to 1, which looks at the hidden states alone. They are what the head reads.
    Every token costs a pass of top_k tokens, one a candidate; the one chosen is not computed again.
    Raises RequestError for arguments that cannot be meant.
    """
    _check_share("alpha", alpha)
    if not isinstance(top_k, int) or not 1 <= top_k <= llm.config.vocab_size:
        raise RequestError(
            f"top_k is {top_k!r}; it must be a number from 1 to the vocabulary's {llm.config.vocab_size}."
        )
    params = sampling.SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop_token_ids), ignore_eos=ignore_eos)
    return _answer(llm, prompt, params, lambda cache, ids: ContrastiveSearch(llm.model, cache, ids, top_k, alpha))


def contrastive_decoding(
    llm: LLM,
    prompt: Prompt,
    *,
    amateur: model.Model | None = None,
    alpha: float = 0.1,
    amateur_temperature: float = 1.0,
    max_tokens: int = 256,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
) -> Completion:
    """An answer by contrastive decoding: of the plausible tokens the one with the largest

        log(probability) - log(the amateur's probability)

    Plausible is what has at least alpha times the probability of the most probable token: without this, the amateur's
    oddest mistakes would win. amateur: a model with the same vocabulary; None: the model without a fifth of its layers.
    amateur_temperature: divides the amateur's logits; below 1 it is contradicted more where it is sure.
    The paper searches for the best sum with beams; here each token is the best at its place.
    Raises RequestError for arguments that cannot be meant.
    """
    _check_share("alpha", alpha)
    if not 0 < amateur_temperature < math.inf:
        raise RequestError(f"amateur_temperature is {amateur_temperature!r}; it must be above 0 and finite.")
    other = default_amateur(llm.model) if amateur is None else amateur
    if other.config.vocab_size != llm.config.vocab_size:
        theirs, own = other.config.vocab_size, llm.config.vocab_size
        raise RequestError(f"the amateur has a vocabulary of {theirs}, the model one of {own}; they must be the same.")
    params = sampling.SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop_token_ids), ignore_eos=ignore_eos)
    pair, settings = (llm.model, other), (alpha, amateur_temperature)
    return _answer(llm, prompt, params, lambda cache, ids: ContrastiveDecoding(*pair, cache, ids, *settings))


def default_amateur(network: model.Model) -> model.Model:
    """The model without a fifth of its layers, at least one, in the middle; the weights are shared."""
    layers = network.config.num_layers
    if layers < 2:
        raise RequestError("a model of one layer has none to leave out; give contrastive_decoding an amateur.")
    return layer_skipping.skip_layers(network, layer_skipping.without_middle(layers, max(1, layers // 5)))


class Search(Protocol):
    """What chooses one token after the other."""

    def step(self) -> int:
        """The next token. Raises OutOfMemory where the cache has no room."""

    def close(self) -> None:
        """Gives back what it holds in the cache."""


def _answer(
    llm: LLM,
    prompt: Prompt,
    params: sampling.SamplingParams,
    begin: Callable[[kv_cache.KVCache, Sequence[int]], Search],
) -> Completion:
    request, core = llm.request(prompt, params), llm.core
    ids, ends = request.prompt_token_ids, end_ids(params, core.eos_token_ids)
    most = min(params.max_tokens, llm.config.context_length - len(ids))

    def work(cache: kv_cache.KVCache) -> None:
        request.begin(core.clock())
        request.token_ids.clear()  # of a turn that found no room
        bar = progress_bar(total=most, description="contrast", delay=_DELAY, unit="token")
        with bar, closing(begin(cache, ids)) as search:
            while not request.ended:
                token = search.step()
                request.record(token, core.clock())
                if token in ends or len(request.token_ids) == most:
                    request.end("stop" if token in ends else "length")
                bar.update()

    try:
        take_turn(core, work)
    except (OutOfMemory, FloatingPointError) as error:
        request.end("abort", str(error))
    return Completion.read([request], llm.tokenizer)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:  # NaN fails the comparison
        raise RequestError(f"{name} is {value!r}; it must be from 0 to 1.")


class WithHiddenStates:
    """A model that also keeps what its head reads: the hidden states behind the last norm, of every token of a pass.

    Called like the model; the head still computes only the logits that were asked for.
    """

    def __init__(self, network: model.Model):
        self.network = network
        self._kept: list[Tensor] = []

    def __call__(self, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
        """Logits [rows that need one, vocab]."""
        seen = []

        def read(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            seen.append(inputs[0])
            return (inputs[0][batch.logit_rows.to(inputs[0].device)],)

        every = torch.arange(len(batch.token_ids), device=batch.logit_rows.device)
        hook = self.network.lm_head.register_forward_pre_hook(read)
        try:
            logits = self.network(replace(batch, logit_rows=every), cache)
        finally:
            hook.remove()
        self._kept += seen  # only of a pass that was completed
        return logits

    def take(self) -> Tensor:
        """The hidden states of all passes since the last call, [tokens, hidden], in float32 at least, of length 1."""
        hidden = torch.cat(self._kept)
        self._kept = []
        return F.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), dim=-1)


class ContrastiveSearch:
    """Contrastive search in steps. Close it in any case.

    The candidates are branches: each is computed as the text's next token, and all but the chosen one are given up. So
    what a candidate's hidden state was computed for is there for the next step.
    """

    def __init__(
        self, network: model.Model, cache: kv_cache.KVCache, prompt_ids: Sequence[int], top_k: int, alpha: float
    ):
        self.top_k, self.alpha = top_k, alpha
        self.states = WithHiddenStates(network)
        # what is taken over of a prompt is not computed, and so has no hidden states
        self.branches = Branches(self.states, cache, prompt_ids, share_prefix=False)
        self._logits = self._text = torch.empty(0)  # [vocab], of the next token; [tokens, hidden], of the text so far

    def step(self) -> int:
        """The next token. Raises OutOfMemory where the cache has no room."""
        if not len(self._text):
            self._logits = self.branches.logits()[0]
            self._text = self.states.take()
        probabilities, candidates = _log_probabilities(self._logits).exp().topk(self.top_k)
        self.branches.grow([(0, token) for token in candidates.tolist()])
        logits = self.branches.logits()
        # without a cache a pass computes the whole texts again; the candidates are their last tokens
        hidden = self.states.take().view(self.top_k, -1, self._text.shape[-1])[:, -1]
        likeness = (hidden @ self._text.T).amax(dim=-1)
        scores = (1 - self.alpha) * probabilities.to(likeness.device) - self.alpha * likeness
        chosen = int(scores.argmax())
        self.branches.keep([chosen])
        self._logits, self._text = logits[chosen], torch.cat([self._text, hidden[chosen : chosen + 1]])
        return int(candidates[chosen])

    def close(self) -> None:
        """Gives back what the branches hold in the cache."""
        self.branches.close()


class ContrastiveDecoding:
    """Contrastive decoding in steps. Close it in any case. The amateur has a cache of its own, outside the engine's."""

    def __init__(
        self,
        expert: model.Model,
        amateur: model.Model,
        cache: kv_cache.KVCache,
        prompt_ids: Sequence[int],
        alpha: float,
        amateur_temperature: float,
    ):
        self.alpha, self.amateur_temperature = alpha, amateur_temperature
        self.expert = Branches(expert, cache, prompt_ids)
        own = kv_cache.ConcatKVCache(amateur.config.num_layers)
        self.amateur = Branches(amateur, own, prompt_ids)

    def step(self) -> int:
        """The next token. Raises OutOfMemory where the cache has no room."""
        expert = _log_probabilities(self.expert.logits()[0])
        amateur = _log_probabilities(self.amateur.logits()[0] / self.amateur_temperature).to(expert.device)
        plausible = expert >= expert.max() + (math.log(self.alpha) if self.alpha else -math.inf)
        token = int((expert - amateur).masked_fill(~plausible, -math.inf).argmax())
        for branches in (self.expert, self.amateur):
            branches.grow([(0, token)])
        return token

    def close(self) -> None:
        """Gives back what the texts hold in the caches."""
        self.expert.close()
        self.amateur.close()


def _log_probabilities(logits: Tensor) -> Tensor:
    """In float32 at least, whatever the model computes in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
