"""Where guesses at the next tokens come from: the text itself, the model without some of its layers, a smaller model.

    Lookup      what followed the last time that the text stood like this: costs nothing, right where the text copies
    LayerSkip   the same model without its middle layers: no second model in memory, but hardly quicker than the whole
    DraftModel  any second `LLM` with the same vocabulary: pays where it is many times smaller

A drafter may guess anything: what it says is verified (`speculation`), so it changes the speed and never the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmfromscratch import kv_cache, layer_skipping, model, optimization, quantized_model, sampling, scheduler
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory, RequestError

KINDS = ("lookup", "skip")
_CHUNK = 512  # tokens of a prompt that a drafting model computes in one pass
_CONTEXTS = 2  # that its cache holds; who has not been drafted for the longest makes room
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Draft:
    """A guess at the next tokens of one request.

    probabilities: float64 [tokens, vocab], the distribution that each was drawn from; None where nothing was drawn.
    """

    token_ids: Sequence[int]
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """What makes drafts. Beside these methods it may have:

    tokens: int, drafts that it makes at most for a request. cost: float, what one costs, as a share of the model's
    pass; 0 where it is missing. attach(llm): called once with the `LLM` that it drafts for.
    wants_hidden: True, and observe(request_ids, hidden [n, hidden]), called after each pass with what the model's head
    read to give each request's newest token.
    """

    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """A draft for each request, of no more than so many tokens (1 at least); empty where nothing comes to mind."""

    def forget(self, request_id: int) -> None:
        """The request has ended; another one may have its number later. It may be unknown."""


def check(choice: Any, sampler: Any) -> None:
    """Raises RequestError for LLM(speculative=choice, sampler=sampler) that cannot be meant, before anything is loaded.

    Drafts are verified side by side, by what `sampling.Sampler` would choose behind each. Whether another sampler may
    be asked for tokens that do not come, only its author knows.
    """
    if choice is None:
        return
    if not (choice in KINDS if isinstance(choice, str) else _is_drafter(choice) or _is_llm(choice)):
        raise RequestError(
            f'speculative is {choice!r}; give "lookup", "skip", a second LLM, a drafter (an object with the methods '
            "propose and forget), or None."
        )
    if sampler is not None and not is_plain(sampler):
        raise RequestError(
            f"speculative verifies several tokens at once by the package's own sampler, and sampler is a "
            f"{type(sampler).__name__}; leave one of the two out."
        )


def is_plain(sampler: Any) -> bool:
    """Whether a sampler is `sampling.Sampler` itself and no other class, a subclass for instance.

    By its name: a `build` reloads the module, and a sampler made before is of the class that had the name then.
    """
    kind = type(sampler)
    return (kind.__module__, kind.__qualname__) == (sampling.__name__, "Sampler")


def of(choice: Any, llm: Any) -> Drafter | None:
    """The drafter that LLM(speculative=choice) asks for, attached to that LLM. Raises RequestError."""
    named = {"lookup": Lookup, "skip": LayerSkip}
    drafter = named[choice]() if isinstance(choice, str) else choice
    if drafter is not None and not _is_drafter(drafter):
        drafter = DraftModel(drafter)
    if hasattr(drafter, "attach"):
        drafter.attach(llm)
    return drafter


def _is_drafter(choice: Any) -> bool:
    methods = callable(getattr(choice, "propose", None)) and callable(getattr(choice, "forget", None))
    return methods and not isinstance(choice, type)


def _is_llm(choice: Any) -> bool:
    return all(hasattr(choice, name) for name in ("model", "config", "tokenizer"))


class Lookup:
    """Prompt lookup: the text continues as it did the last time its newest tokens (`longest` at most) stood there.

    tokens: drafts at most. Saxena 2023, "Prompt Lookup Decoding".
    """

    def __init__(self, longest: int = 3, tokens: int = 8):
        _check_count("longest", longest)
        _check_count("tokens", tokens)
        self.longest, self.tokens = longest, tokens

    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """By `optimization.lookup_draft`, each request in its own text."""
        pairs = zip(requests, counts, strict=True)
        return [Draft(optimization.lookup_draft(request.ids, self.longest, count)) for request, count in pairs]

    def forget(self, request_id: int) -> None:
        """Nothing was kept."""


class LayerSkip:
    """The model itself without its middle layers; the weights are shared. Zhang et al. 2024, "Draft & Verify".

    skipped: how many layers are left out, or which; None leaves out a fifth. tokens: drafts at most. cost: as in
    `Drafter`; None is the share of the layers that stay. With it the engine drafts only where that pays, and without
    training for it a model seldom agrees with itself often enough; cost=0 drafts all the same.
    """

    def __init__(self, skipped: int | Sequence[int] | None = None, tokens: int = 4, cost: float | None = None):
        _check_count("tokens", tokens)
        self.skipped, self.tokens, self._cost = skipped, tokens, cost
        self.cost = cost or 0.0
        self._drafting: _DraftingNetwork | None = None

    def attach(self, llm: Any) -> None:
        """Makes the smaller model. Raises RequestError for layers that it does not have."""
        layers = llm.config.num_layers
        kept = self._kept(layers)
        try:
            smaller = layer_skipping.skip_layers(llm.model, kept)
        except ValueError as error:
            raise RequestError(f"skipped={self.skipped!r} leaves no model: {error}") from error
        self.cost = len(kept) / layers if self._cost is None else self._cost
        self._drafting = _DraftingNetwork(smaller)

    def _kept(self, layers: int) -> list[int]:
        if not (self.skipped is None or isinstance(self.skipped, int | Sequence)):
            raise RequestError(f"skipped is {self.skipped!r}; give a number of layers, or a list of them.")
        skipped = max(1, layers // 5) if self.skipped is None else self.skipped
        if isinstance(skipped, int):
            return layer_skipping.without_middle(layers, skipped)
        if unknown := sorted(set(skipped) - set(range(layers))):
            raise RequestError(f"skipped names the layers {unknown}; the model has layers 0 to {layers - 1}.")
        return [layer for layer in range(layers) if layer not in skipped]

    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """What the smaller model would say, drawn with each request's own parameters."""
        return _attached(self._drafting).propose(requests, counts)

    def forget(self, request_id: int) -> None:
        """Gives back what the smaller model's cache holds of it."""
        _attached(self._drafting).forget(request_id)


class DraftModel:
    """A second `LLM` with the same vocabulary, best one that is many times smaller. It may be used elsewhere meanwhile:
    its drafts have a cache of their own.

    tokens: drafts at most. cost: as in `Drafter`; None is the share of its weights in the large model's.
    """

    def __init__(self, llm: Any, tokens: int = 4, cost: float | None = None):
        _check_count("tokens", tokens)
        self.llm, self.tokens, self._cost = llm, tokens, cost
        self.cost = cost or 0.0
        self._drafting = _DraftingNetwork(llm.model)

    def attach(self, llm: Any) -> None:
        """Raises RequestError unless both models mean the same by a token id."""
        own, other = self.llm.config.vocab_size, llm.config.vocab_size
        if own != other:
            raise RequestError(
                f"the draft model has a vocabulary of {own} tokens, the model one of {other}; they must be the same."
            )
        tokenizers = self.llm.tokenizer, llm.tokenizer
        if None not in tokenizers and _tokens(tokenizers[0], own) != _tokens(tokenizers[1], own):
            raise RequestError("the draft model's tokens say something else than the model's; take one of its family.")
        sizes = [quantized_model.nbytes(one.model) for one in (self.llm, llm)]
        self.cost = sizes[0] / sizes[1] if self._cost is None else self._cost

    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """What the draft model would say, drawn with each request's own parameters."""
        return self._drafting.propose(requests, counts)

    def forget(self, request_id: int) -> None:
        """Gives back what the draft model's cache holds of it."""
        self._drafting.forget(request_id)


class _DraftingNetwork:
    """A model that drafts one token after the other, for several requests at once, with a cache of its own.

    The cache follows the requests' texts: drafts that were rejected are rewound when the next ones are asked for.
    """

    def __init__(self, network: model.Model):
        self.network, config = network, network.config
        devices = [next(layer.parameters()).device for layer in network.layers]
        layout = kv_cache.CacheLayout.of(config, network.embed_tokens.weight.dtype, devices)
        blocks = -(-_CONTEXTS * config.context_length // _BLOCK_SIZE)
        self.cache = kv_cache.PagedKVCache(layout, blocks, _BLOCK_SIZE, prefix_sharing=False)
        self._fed: dict[int, list[int]] = {}  # what the cache holds of each request; the newest last
        self._rows: dict[int, sampling.Row] = {}

    def propose(self, requests: Sequence[scheduler.Request], counts: Sequence[int]) -> list[Draft]:
        """Draws with random numbers of its own, so that those of the verification owe nothing to them."""
        ids: dict[int, list[int]] = {request.request_id: [] for request in requests}
        probabilities: dict[int, list[Tensor]] = {request.request_id: [] for request in requests}
        pairs = list(zip(requests, counts, strict=True))
        able = [(request, count) for request, count in pairs if self._catch_up(request, count, ids)]
        for place in range(max((count for _, count in able), default=0)):
            going = [request for request, count in able if count > place]
            texts = {request.request_id: request.ids + ids[request.request_id] for request in going}
            for request, logits in zip(going, self._compute(texts).split(1), strict=True):
                token, drawn_from = self._draw(request, logits)
                ids[request.request_id].append(token)
                probabilities[request.request_id] += [] if drawn_from is None else [drawn_from]
        return [_draft(ids[request.request_id], probabilities[request.request_id]) for request in requests]

    def forget(self, request_id: int) -> None:
        """Gives back what the cache holds of a request; an unknown one is ignored."""
        self.cache.release(request_id)
        self._fed.pop(request_id, None)
        self._rows.pop(request_id, None)

    def _catch_up(self, request: scheduler.Request, count: int, busy: Collection[int]) -> bool:
        """Brings the cache to the request's text, all but its last chunk; False where there is no room for drafts.

        busy: the requests that nobody may take room from."""
        number, ids = request.request_id, request.ids
        fed = self._fed.pop(number, [])
        common = _common(fed, ids)
        self.cache.rewind(number, self.cache.length(number) - common)
        self._fed[number] = fed[:common]
        if len(ids) + count > self.network.config.context_length or not self._reserve(number, len(ids) + count, busy):
            return False
        while len(ids) - self.cache.length(number) > _CHUNK:
            self._compute({number: ids[: self.cache.length(number) + _CHUNK]})
        return True

    def _reserve(self, number: int, tokens: int, busy: Collection[int]) -> bool:
        while True:
            try:
                self.cache.reserve(number, tokens - self.cache.length(number))
                return True
            except OutOfMemory:
                oldest = next((other for other in self._fed if other not in busy), None)
                if oldest is None:
                    return False
                self.cache.release(oldest)  # its random numbers go on where they were
                del self._fed[oldest]

    def _compute(self, texts: dict[int, list[int]]) -> Tensor:
        """Logits [requests, vocab] behind the texts; what the cache lacks of them is computed."""
        lengths = {number: self.cache.length(number) for number in texts}
        parts = [(number, ids[lengths[number] :], lengths[number]) for number, ids in texts.items()]
        logits = self.network(Batch.of(parts), self.cache)
        self._fed |= texts
        return logits.float()

    def _draw(self, request: scheduler.Request, logits: Tensor) -> tuple[int, Tensor | None]:
        """The next draft, and the distribution [1, vocab] it was drawn from; None where it was the best one."""
        params = request.params
        if request.request_id not in self._rows:
            stream = sampling.random_stream(None if params.seed is None else _other_seed(params.seed))
            self._rows[request.request_id] = sampling.Row(params, stream, request.prompt_token_ids)
        row = self._rows[request.request_id]
        if params.temperature == 0:
            return int(sampling.choose(sampling.adjust(logits, [row]), [row])), None
        drawn_from = sampling.distribution(logits, [row])
        return int(sampling.draw(drawn_from, sampling.uniforms([row.stream]))), drawn_from


def _draft(ids: list[int], probabilities: list[Tensor]) -> Draft:
    return Draft(ids, torch.cat(probabilities) if probabilities else None)


def _common(fed: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens of a text the cache may keep: as far as it was fed the same, and all but the last."""
    most = min(len(fed), len(ids) - 1)
    if fed[:most] == ids[:most]:
        return most
    return next(place for place in range(most) if fed[place] != ids[place])


def _other_seed(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"draft {seed}".encode()).digest()[:8], "little") >> 1


def _tokens(own: Any, vocab_size: int) -> list[bytes]:
    return [own.token_bytes(index) if index in own else b"" for index in range(vocab_size)]


def _attached(drafting: _DraftingNetwork | None) -> _DraftingNetwork:
    if drafting is None:
        raise RequestError("this LayerSkip belongs to no model yet; give it to LLM(speculative=...).")
    return drafting


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1.")
