"""What joins the parts: prompt -> ids -> request -> steps of the engine -> tokens -> text.

`LLM` owns a tokenizer, a model, a cache, a scheduler and a sampler. The steps themselves are in `engine_core`: they
serve all requests in flight at once, whoever asks for them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmfromscratch import (
    attention_backends,
    beam_search,
    cache_frames,
    compiled_graph,
    drafters,
    fused_layers,
    hub,
    kv_cache,
    kv_memory,
    masks,
    model,
    quantized_files,
    quantized_model,
    sampling,
    scheduler,
    scoring,
    speculation,
    tokenizer,
)
from llmfromscratch.answers import Completion, Piece, Reader
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.errors import RequestError
from llmfromscratch.intake import Intake, Prompt, required
from llmfromscratch.metrics import EngineMetrics
from llmfromscratch.progress import progress_bar
from llmfromscratch.text.chat_template import check_messages

Objects = Sequence[Mapping[str, Any]]  # messages, tools, documents
_Planning = tuple[str | Callable[[Any], Any] | None, int, int]  # scheduler, max_requests, max_batch_tokens
# seconds before a progress bar shows: at once would be noise for what is done at once
_DELAY, _DELAY_OF_ONE = 1.0, 5.0


class LLM:
    """A language model ready to answer.

    source: a known short name, a folder, a .gguf, a .safetensors, or a hub id.
    dtype: "auto" (bf16 where the processor is fast at it, else fp32), "float32", "bfloat16", "float16", a torch.dtype.
    device: "auto", "cpu", "cuda", "mps", or budgets in bytes such as {"cuda:0": 8e9, "cpu": 32e9}.
    quantization: weights in few bits, which are less to read (`quantized_model`): "int8", "int4", "nf4", "w8a8"; a
    GGUF's own, "native"; "gptq", "awq", "awq+gptq" read a text and take minutes; or a `quantized_model.Plan`. dtype is
    what is computed in. None: as the checkpoint has them.
    kv_cache: "paged", "static", "concat", or "none", which computes the whole text again for every token: switch the
    cache off and compare, when answers look wrong. block_size: tokens in a block of the paged cache.
    kv_cache_memory: for the paged and the static cache, bytes, or a share (below 1) of what is free after loading;
    None takes a quarter of it at most. prefix_sharing: prompts that begin alike share the blocks of the paged cache.
    window: keep only the newest `window` tokens and the first four (memory stays bounded, the answer changes).
    kv_cache_dtype: "int8" or "int4": keys and values in fewer bits (`quantized_cache`); None: in the model's dtype.
    layers: a kind of `fused_layers`: "plain", "fused", "compiled", "triton"; "auto" takes the fastest that can be had.
    attention: a backend of `attention_backends`: "plain", "compiled", "tiled", "sdpa", "flash", "triton"; "auto" takes
    what was measured to be faster and can be had here. mask: who may look at whom, made of the words in `masks`, such
    as masks.sliding(256) | masks.global_tokens(4); None: everyone at everything before.
    compile: decode steps through torch.compile (`compiled_graph`), seconds for each new bucket of shapes; layers and
    attention then serve prompts.
    scheduler: "continuous" (also None), "static", or a function that makes one for a cache: scheduler(cache) gives
    anything with the methods of `scheduler.Scheduler`. max_requests: served at a time. max_batch_tokens: computed in
    one step of the continuous scheduler, prompts being cut to fit; without a cache they are not cut.
    speculative: drafts of several tokens, verified in one pass, which change the speed and not the answer: "lookup"
    (in the text itself), "skip" (the model without some layers), a second LLM, or a drafter (`drafters`); None: none.
    sampler: anything with the methods of `sampling.Sampler`. seed: requests without a seed of their own get one made of
    this and their number, so that the same calls in the same order give the same answers.
    max_length: tokens of a prompt at most; None is what the context holds beside one new token.
    truncation: what becomes of a longer prompt. None refuses it; "left", "right", "middle" cut that part out of its
        ids; "chat" drops the oldest turns of a conversation, and refuses a plain prompt, which has none.
    tokenizer_config: both, with the model's special tokens; tokenizer: None where the checkpoint brings none.
    `generate`, `stream` and `AsyncEngine` may be used side by side, from several threads too. Requests are computed
    together: in float32 greedy answers do not depend on the company; in half precision sums of another order may round
    to another token.
    Raises CheckpointError, TokenizerError, RequestError (arguments that cannot be meant), OutOfMemory (budgets or
    kv_cache_memory too small).
    """

    def __init__(
        self,
        source: str | Path = "smollm2-135m-instruct",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | Mapping[str, float] = "auto",
        quantization: str | quantized_model.Plan | None = None,
        kv_cache: str = "paged",
        block_size: int = kv_memory.BLOCK_SIZE,
        kv_cache_memory: int | float | None = None,
        window: int | None = None,
        prefix_sharing: bool = True,
        kv_cache_dtype: str | None = None,
        layers: str = "auto",
        attention: str = "auto",
        mask: masks.Mask | None = None,
        compile: bool = False,
        scheduler: str | Callable[[Any], Any] | None = None,
        max_requests: int = kv_memory.MAX_REQUESTS,
        max_batch_tokens: int = 512,
        speculative: Any = None,
        sampler: sampling.Sampler | None = None,
        seed: int | None = None,
        max_length: int | None = None,
        truncation: str | None = None,
    ):
        kv_memory.check(kv_cache, block_size, kv_cache_memory, window, prefix_sharing, kv_cache_dtype)
        _check_planning(scheduler, max_requests, max_batch_tokens)
        fused_layers.check(layers)
        attention_backends.check(attention, mask)
        compiled_graph.check(compile, layers, attention)
        drafters.check(speculative, sampler)
        quantized_model.check(quantization, device, compile)
        checkpoint = quantized_files.open_checkpoint(hub.resolve(source))
        self.config = checkpoint.config
        data = checkpoint.tokenizer_data()
        self.tokenizer = None if data is None else tokenizer.Tokenizer(data)
        own = required(self.tokenizer) if truncation == "chat" else self.tokenizer
        config = (own.config if own else tokenizer.TokenizerConfig)(max_length=max_length, truncation=truncation)
        self.tokenizer_config = config.within(self.config.context_length)
        self._intake = Intake(self.config, self.tokenizer, self.tokenizer_config, seed)
        with torch.device("meta"):
            self.model = model.Model(self.config)
        quantized_model.load(self.model, checkpoint, dtype, device, quantization, self.tokenizer)
        self.layers = fused_layers.use(layers, self.model)
        cache = kv_memory.open_cache(
            kv_cache,
            self.config,
            self.model.embed_tokens.weight.dtype,
            [next(layer.parameters()).device for layer in self.model.layers],
            block_size=block_size,
            memory=kv_cache_memory,
            window=window,
            prefix_sharing=prefix_sharing,
            max_requests=max_requests,
            codec=cache_frames.codec(kv_cache_dtype, self.model, self.tokenizer),
        )
        attention_backends.use(attention, self.model.layers, mask)
        self._network = compiled_graph.of(compile, self.model)
        self._planning, self._drafter = (scheduler, max_requests, max_batch_tokens), drafters.of(speculative, self)
        self.core = self._join(cache, self._planning, sampler or sampling.Sampler())

    @property
    def cache(self) -> kv_cache.KVCache:
        """The key/value cache. Another one may be set while no request is in flight."""
        return self.core.cache

    @cache.setter
    def cache(self, cache: kv_cache.KVCache) -> None:
        self._exchange(cache, self._planning)

    @property
    def sampler(self) -> sampling.Sampler:
        """What picks the tokens. Another one may be set while no request is in flight: it knows nothing of those."""
        return self.core.sampler

    @sampler.setter
    def sampler(self, sampler: sampling.Sampler) -> None:
        self._check_idle()
        drafters.check(self._drafter, sampler)
        self.core.sampler = sampler

    @property
    def metrics(self) -> EngineMetrics:
        """The engine's own figures: requests running and waiting, blocks in use, tokens per second, totals."""
        return self.core.metrics

    def use_scheduler(
        self,
        scheduler: str | Callable[[Any], Any] | None = None,
        max_requests: int = kv_memory.MAX_REQUESTS,
        max_batch_tokens: int = 512,
    ) -> None:
        """Plans with another scheduler from now on; arguments as in `LLM`. Raises RequestError with work in flight."""
        _check_planning(scheduler, max_requests, max_batch_tokens)
        self._exchange(self.cache, (scheduler, max_requests, max_batch_tokens))

    def _exchange(self, cache: kv_cache.KVCache, planning: _Planning) -> None:
        self._check_idle()
        self.core, self._planning = self._join(cache, planning, self.sampler), planning

    def _check_idle(self) -> None:
        if self.core.has_work:
            raise RequestError("requests are in flight; finish or close their streams before a part is exchanged.")

    def _join(self, cache: kv_cache.KVCache, planning: _Planning, sampler: sampling.Sampler) -> EngineCore:
        """The parts in one engine, its figures beginning anew."""
        attention_backends.prepare(self.model.layers, cache)
        compiled_graph.prepare(self._network, cache)
        planner = _open_scheduler(cache, *planning)
        guessing = speculation.Speculation(self._drafter, self.config.vocab_size)
        ends, context = self._intake.end_ids, self.config.context_length
        return EngineCore(self._network, cache, planner, sampler, ends, context, speculation=guessing)

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
        asked = [self._requests(prompt, one) for prompt, one in zip(batch, each, strict=True)]
        beams = [choices for choices in asked if choices[0].params.beam_width is not None]
        requests = [request for choices in asked if choices not in beams for request in choices]
        try:
            for request in requests:
                self.core.add(request)
            self._run(requests)
        finally:
            self._give_up(requests, "the call that asked for it was interrupted.")
        for choices in beams:
            choices[:] = beam_search.answer(self.core, choices[0])
        return [Completion.read(choices, self.tokenizer) for choices in asked]

    def request(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> scheduler.Request:
        """The one request for a prompt, as in `requests`. Raises RequestError, also where several answers are asked."""
        if getattr(params, "n", 1) != 1:
            raise RequestError("params asks for several answers, which are several requests; take them of `requests`.")
        return self.requests(prompt, params)[0]

    def requests(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> list[scheduler.Request]:
        """Checked requests with numbers of their own, for `core.add` and for `AsyncEngine`: one for each of params.n
        answers. Raises RequestError, also for beams."""
        beam_search.refuse(params)
        return self._requests(prompt, params)

    def _requests(self, prompt: Prompt, params: sampling.SamplingParams | None) -> list[scheduler.Request]:
        """The same; one request where beams are asked for."""
        # static batching looks for no prefix, so nothing would be gained by waiting for one
        sharing = getattr(self.cache, "prefix_sharing", False) and self._planning[0] != "static"
        return self._intake.requests(prompt, params, self.core.clock(), sharing)

    def logprobs(self, text: Prompt, top: int = 0) -> list[sampling.TokenLogprobs | None]:
        """How probable the model finds each token of a text, and its `top` most probable ones there; None for the first
        token. No step runs meanwhile. Raises RequestError."""
        top = sampling.SamplingParams(prompt_logprobs=top).prompt_logprobs or 0
        ids = self._intake.text_ids(text)
        with self.core.between_steps():
            return scoring.prompt_logprobs(self.model, ids, top, like=self.cache)

    def perplexity(self, text: Prompt) -> float:
        """exp of the mean negative log-probability of a text's tokens but the first: so many equally likely tokens
        would surprise as much (Jelinek et al. 1977). Raises RequestError."""
        return scoring.perplexity(self.logprobs(text))

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
        render = partial(required(self.tokenizer).render_chat, tools=tools, documents=documents)
        return render(tokenizer.truncate_chat(messages, lambda some: len(render(some)), self.tokenizer_config))

    def stream(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> Iterator[Piece]:
        """Yields pieces of text as they become certain, those of several answers (params.n) side by side. Checks the
        prompt at once, not at the first piece."""
        return self._pieces(self.requests(prompt, params))

    def _pieces(self, requests: Sequence[scheduler.Request]) -> Iterator[Piece]:
        """Steps when there is nothing left to give: what others have stepped for is given first."""
        readers = [Reader(request, self.tokenizer) for request in requests]
        try:
            for request in requests:
                request.arrival = self.core.clock()  # nothing has begun before the first piece is asked for
                self.core.add(request)
            while readers:
                with self.core.between_steps():
                    pieces = [piece for reader in readers for piece in reader.new_pieces()]
                yield from pieces
                over = {piece.choice for piece in pieces if piece.finish_reason is not None}
                readers = [reader for reader in readers if reader.request.choice not in over]
                if not pieces:
                    self.core.step()
        finally:  # also when a stream is dropped half-way or interrupted
            self._give_up(requests, "its stream was closed.")

    def _run(self, requests: Sequence[scheduler.Request]) -> None:
        """Steps until all have ended, showing how far they are when it takes a while."""
        delay = _DELAY if len(requests) > 1 else _DELAY_OF_ONE
        began = time.perf_counter()
        with progress_bar(total=len(requests), description="answers", delay=delay, miniters=0, unit="") as bar:
            while not all(request.ended for request in requests):
                self.core.step()
                speed = sum(len(request.token_ids) for request in requests) / (time.perf_counter() - began)
                bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                bar.update(sum(request.ended for request in requests) - bar.n)

    def _give_up(self, requests: Sequence[scheduler.Request], error: str) -> None:
        for request in requests:
            if not request.ended:
                self.core.abort(request, error)


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes)
    return not several or (len(prompts) > 0 and isinstance(prompts[0], int))


def _check_planning(kind: Any, max_requests: Any, max_batch_tokens: Any) -> None:
    if not (kind in (None, "static", "continuous") or callable(kind)):
        raise RequestError(f'scheduler is {kind!r}; give "continuous", "static", or a function that takes a cache.')
    for name, value in (("max_requests", max_requests), ("max_batch_tokens", max_batch_tokens)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1.")


def _open_scheduler(
    cache: kv_cache.KVCache, kind: str | Callable[[Any], Any] | None, max_requests: int, max_batch_tokens: int
) -> scheduler.Scheduler:
    if callable(kind):
        return kind(cache)
    if kind == "static":
        return scheduler.StaticScheduler(cache, max_requests)
    # without a cache there is nothing that a second chunk could look back at
    tokens = sys.maxsize if isinstance(cache, kv_cache.NoKVCache) else max_batch_tokens
    return scheduler.ContinuousScheduler(cache, max_requests, tokens)
