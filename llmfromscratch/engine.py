"""The loop that joins the parts: prompt -> ids -> prefill -> sample -> decode, token by token -> text.

`LLM` owns a tokenizer, a model, a sampler and a cache. One request runs at a time here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmfromscratch import hub, kv_cache, kv_memory, loading, model, sampling, tokenizer
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory, RequestError, TokenizerError
from llmfromscratch.text.chat_template import check_messages

Prompt = str | Sequence[int]
Objects = Sequence[Mapping[str, Any]]  # messages, tools, documents
_PREFILL_CHUNK = 512  # tokens of a prompt per forward: attention scores take chunk x context numbers a head
_MORE_ROOM = (
    "Everything it held is free again. Give the cache more room (kv_cache_memory, or a smaller dtype), or ask for less "
    "(a shorter prompt, fewer max_tokens, fewer requests at a time)."
)


@dataclass(frozen=True)
class Completion:
    """One answer. finish_reason: "stop" (an end token), "length" (max_tokens or the context is full), or "abort"
    (then `error` says why). token_ids holds every token the model gave, the end token too; text leaves it out."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    error: str | None = None


@dataclass(frozen=True)
class Piece:
    """Text that has become certain while streaming; the last piece carries the finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None


class LLM:
    """A language model ready to answer.

    source: a known short name, a folder, a .gguf, a .safetensors, or a hub id.
    dtype: "auto" (bf16 where the processor is fast at it, else fp32), "float32", "bfloat16", "float16", a torch.dtype.
    device: "auto", "cpu", "cuda", "mps", or budgets in bytes such as {"cuda:0": 8e9, "cpu": 32e9}.
    kv_cache: "paged", "static", "concat", or "none", which computes the whole text again for every token: switch the
    cache off and compare, when answers look wrong. block_size: tokens in a block of the paged cache.
    kv_cache_memory: for the paged and the static cache, bytes, or a share (below 1) of what is free after loading;
    None takes a quarter of it at most. prefix_sharing: prompts that begin alike share the blocks of the paged cache.
    window: keep only the newest `window` tokens and the first four (memory stays bounded, the answer changes).
    sampler: anything with the methods of `sampling.Sampler`.
    max_length: tokens of a prompt at most; None is what the context holds beside one new token.
    truncation: what becomes of a longer prompt. None refuses it; "left", "right", "middle" cut that part out of its
        ids; "chat" drops the oldest turns of a conversation, and refuses a plain prompt, which has none.
    tokenizer_config: both, with the model's special tokens; tokenizer: None where the checkpoint brings none.
    Raises CheckpointError, TokenizerError, RequestError (arguments that cannot be meant), OutOfMemory (budgets or
    kv_cache_memory too small).
    """

    cache: kv_cache.KVCache

    def __init__(
        self,
        source: str | Path = "smollm2-135m-instruct",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | Mapping[str, float] = "auto",
        kv_cache: str = "paged",
        block_size: int = kv_memory.BLOCK_SIZE,
        kv_cache_memory: int | float | None = None,
        window: int | None = None,
        prefix_sharing: bool = True,
        sampler: sampling.Sampler | None = None,
        max_length: int | None = None,
        truncation: str | None = None,
    ):
        kv_memory.check(kv_cache, block_size, kv_cache_memory, window, prefix_sharing)
        checkpoint = loading.open_checkpoint(hub.resolve(source))
        self.config = checkpoint.config
        data = checkpoint.tokenizer_data()
        self.tokenizer = None if data is None else tokenizer.Tokenizer(data)
        own = self._require_tokenizer() if truncation == "chat" else self.tokenizer
        config = (own.config if own else tokenizer.TokenizerConfig)(max_length=max_length, truncation=truncation)
        self.tokenizer_config = config.within(self.config.context_length)
        with torch.device("meta"):
            self.model = model.Model(self.config)
        self.model.load_state_dict(checkpoint.load(dtype, device), assign=True)
        self.sampler = sampler or sampling.Sampler()
        self.cache = kv_memory.open_cache(
            kv_cache,
            self.config,
            self.model.embed_tokens.weight.dtype,
            [next(layer.parameters()).device for layer in self.model.layers],
            block_size=block_size,
            memory=kv_cache_memory,
            window=window,
            prefix_sharing=prefix_sharing,
        )
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: sampling.SamplingParams | Sequence[sampling.SamplingParams] | None = None,
    ) -> list[Completion]:
        """One Completion per prompt, in order. params: one for all, or one each. Raises RequestError."""
        batch: list[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[list-item,arg-type]
        each = list(params) if isinstance(params, Sequence) else [params] * len(batch)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts came with {len(each)} SamplingParams; give one, or one for each.")
        checked = [(self._token_ids(prompt), _params(one)) for prompt, one in zip(batch, each, strict=True)]
        return [self._complete(ids, one) for ids, one in checked]

    def chat(
        self,
        messages: Objects,
        params: sampling.SamplingParams | None = None,
        tools: Objects | None = None,
        documents: Objects | None = None,
    ) -> Completion:
        """The model's next message in a conversation. The arguments are those of `chat_prompt` and `generate`."""
        return self.generate([self.chat_prompt(messages, tools, documents)], params)[0]

    def chat_prompt(
        self, messages: Objects, tools: Objects | None = None, documents: Objects | None = None
    ) -> list[int]:
        """The conversation ({"role", "content"} each) as token ids in the model's chat template, ready for `generate`.

        tools, documents: see `Tokenizer.render_chat`. Raises RequestError, TokenizerError.
        """
        check_messages(messages)
        render = partial(self._require_tokenizer().render_chat, tools=tools, documents=documents)
        return render(tokenizer.truncate_chat(messages, lambda some: len(render(some)), self.tokenizer_config))

    def stream(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> Iterator[Piece]:
        """Yields pieces of text as they become certain. Checks the prompt at once, not at the first piece."""
        return self._pieces(self._token_ids(prompt), _params(params))

    def _complete(self, prompt: list[int], params: sampling.SamplingParams) -> Completion:
        pieces = list(self._pieces(prompt, params))
        token_ids = [token for piece in pieces for token in piece.token_ids]
        text = "".join(piece.text for piece in pieces)
        return Completion(text, token_ids, prompt, pieces[-1].finish_reason or "abort", pieces[-1].error)

    def _pieces(self, prompt: list[int], params: sampling.SamplingParams) -> Iterator[Piece]:
        own = self.tokenizer  # ids that it lacks, where an embedding is padded to a round number, are no text
        decoder = tokenizer.IncrementalDecoder(own, [index for index in prompt if index in own]) if own else None
        for token, reason, error in self._decode(prompt, params):
            text = ""
            if own and decoder and token is not None and token in own and reason != "stop":
                text = decoder.push(token)
            if reason and decoder:
                text += decoder.flush()
            yield Piece(text, [] if token is None else [token], reason, error)

    def _decode(
        self, ids: list[int], params: sampling.SamplingParams
    ) -> Iterator[tuple[int | None, str | None, str | None]]:
        """Yields (token, finish reason, error) per step: prefill in chunks, then one token at a time."""
        request, stream = next(self._request_ids), self.sampler.random_stream(params.seed)
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:  # Meta's own files name no end tokens; their tokenizer does
            ends.update(self.config.eos_token_ids or self.tokenizer_config.eos_ids)
        room = min(params.max_tokens, self.config.context_length - len(ids))
        text = list(ids)  # the prompt and what has been said so far
        try:
            self.cache.match_prefix(request, text)
            for count in range(1, room + 1):
                logits = self._forward(request, text)
                if not torch.isfinite(logits).all():
                    yield None, "abort", "the model's logits are NaN or infinite: its weights or dtype are at fault."
                    return
                token = self.sampler.sample(logits, params, stream)
                reason = "stop" if token in ends else "length" if count == room else None
                yield token, reason, None
                if reason:
                    return
                text.append(token)
        except OutOfMemory as error:  # this request cannot go on; the others keep theirs
            yield None, "abort", f"{error} {_MORE_ROOM}"
        finally:  # also when a stream is dropped half-way or interrupted
            self.cache.release(request)

    def _forward(self, request: int, text: list[int]) -> torch.Tensor:
        """Runs what the cache does not hold of a text, in chunks; returns the logits [vocab] after its last token."""
        done = self.cache.length(request)
        self.cache.reserve(request, len(text) - done)  # all or nothing: no half-computed prompt in a cache too small
        # without a cache there is nothing that a second chunk could look back at
        chunk = len(text) if isinstance(self.cache, kv_cache.NoKVCache) else _PREFILL_CHUNK
        for start in range(done, len(text), chunk):
            logits = self.model(Batch.of([(request, text[start : start + chunk], start)]), self.cache)
        return logits[0]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """Checks a prompt against the vocabulary and the context; text is encoded without control tokens."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}.")
        ids = self._require_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab, context = self.config.vocab_size, self.config.context_length
        if not ids:
            raise RequestError("the prompt is empty; there is nothing to continue.")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(f"the prompt holds {token!r}; token ids are whole numbers from 0 to {vocab - 1}.")
        if len(ids) >= context and self.tokenizer_config.truncation in (None, "chat"):
            raise RequestError(f"the prompt has {len(ids)} tokens; the context holds {context}, the answer included.")
        return tokenizer.truncate(ids, self.tokenizer_config)

    def _require_tokenizer(self) -> tokenizer.Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError("this checkpoint has no tokenizer; give prompts as token ids.")
        return self.tokenizer


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    return not several or (len(prompts) > 0 and isinstance(prompts[0], int))


def _params(params: sampling.SamplingParams | None) -> sampling.SamplingParams:
    if params is not None and not hasattr(params, "max_tokens"):
        raise RequestError(f"params is {params!r}; give a SamplingParams, or one for each prompt.")
    return params or sampling.SamplingParams()
