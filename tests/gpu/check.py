"""Checks every way of computing against the plain one on a CUDA device, and prints how fast each is there.

    python tests/gpu/check.py            in a clone, with nothing installed but torch and triton; takes minutes
    python tests/gpu/check.py --device cpu      the same in small, by Triton's interpreter (TRITON_INTERPRET=1)

Weights are random, shapes are real: those of SmolLM2-135M. Where flash-attn is installed it is checked too. Ends with 0
when everything agrees, 1 when something does not, 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmfromscratch import attention, attention_backends, fused_layers, kv_cache, model, optimization, triton_layers
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.errors import RequestError
from llmfromscratch.kernels import triton_norm, triton_rotary

BACKENDS = ("plain", "tiled", "sdpa", "triton", "flash")
# layers, attention; "graphs" are decode steps under torch.compile
WAYS = (("plain", "plain"), ("fused", "sdpa"), ("fused", "flash"), ("triton", "triton"), ("graphs", "plain"))
EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of one rounding, a little more for sums in float32


@dataclass(frozen=True)
class Sizes:
    """What is computed: requests x context of the decode steps, tokens of a prompt, repetitions of what is timed."""

    config: ModelConfig
    decode: tuple[tuple[int, int], ...]
    prompt: int
    repeats: int
    tokens: int  # decoded by a whole model
    dtypes: tuple[torch.dtype, ...]


def smollm2(**changes: Any) -> ModelConfig:
    """The shapes of SmolLM2-135M."""
    fields = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30,
        "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "context_length": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


REAL = Sizes(smollm2(), ((1, 512), (1, 8000), (32, 2000)), 2048, 30, 64, (torch.float32, torch.bfloat16))
SMALL = Sizes(
    smollm2(vocab_size=100, hidden_size=72, intermediate_size=40, num_layers=2, head_dim=8),
    ((1, 40), (3, 20)), 24, 1, 3, (torch.float32,),
)  # fmt: skip


class Report:
    """Prints a line for each finding, and remembers whether all was well."""

    def __init__(self) -> None:
        self.failed = 0

    def line(self, name: str, error: float, bound: float, speed: str = "") -> None:
        """A finding: how far it is from the plain result, and how far it may be."""
        well = error <= bound  # not so for NaN
        self.failed += not well
        print(f"{'ok  ' if well else 'FAIL'}  {name:<58} error {error:.1e} (<= {bound:.0e})  {speed}", flush=True)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """A part that raises is a finding too, and the others go on."""
        try:
            yield
        except RequestError as error:
            print(f"--    {name:<58} {error}", flush=True)
        except Exception as error:
            self.failed += 1
            print(f"FAIL  {name:<58} {type(error).__name__}: {error}", flush=True)


def seconds(compute: Callable[[], Any], repeats: int, device: str) -> float:
    """What one call takes, on average, after a first one that compiles."""
    compute()
    if device != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            compute()
        return (time.perf_counter() - began) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        compute()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def speed(took: float, nbytes: float) -> str:
    """Microseconds, and the bandwidth that comes of them."""
    return f"{took * 1e6:9.1f} us {nbytes / took / 1e9:8.1f} GB/s"


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest error, relative to the largest number."""
    return ((found.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


# ---- single kernels ----------------------------------------------------------------------------------------------


def check_norm(sizes: Sizes, dtype: torch.dtype, device: str, report: Report) -> None:
    """RMSNorm with the addition before it."""
    norm = model.RMSNorm(sizes.config.hidden_size, 1e-5).to(device, torch.float64)
    x, added = torch.randn(2, sizes.prompt, sizes.config.hidden_size, device=device).to(dtype)
    torch.nn.init.normal_(norm.weight)
    norm.weight.data = norm.weight.data.to(dtype).double()
    weight = norm.weight.detach().to(dtype)
    stream, normed = triton_norm.add_and_norm(x, added, weight, 1e-5)
    error = max(distance(stream, x.double() + added.double()), distance(normed, norm(stream.double())))
    took = seconds(lambda: triton_norm.add_and_norm(x, added, weight, 1e-5), sizes.repeats, device)
    report.line(f"norm + residual, {sizes.prompt} rows, {dtype}", error, 4 * EPS[dtype], speed(took, 4 * x.nbytes))


def check_rotary(sizes: Sizes, dtype: torch.dtype, device: str, report: Report) -> None:
    """Rotary embedding with the cache write."""
    config, tokens = sizes.config, sizes.prompt
    widths = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    fused = torch.randn(tokens, sum(widths), config.head_dim, device=device).to(dtype)
    queries, keys, values = fused.split(widths, dim=1)
    angles = 9 * torch.rand(tokens, config.head_dim // 2, device=device)
    stored = torch.zeros(2, config.num_kv_heads, tokens, config.head_dim, dtype=dtype, device=device)
    slots = torch.randperm(tokens, device=device)
    arguments = (queries, keys, values, angles.cos(), angles.sin(), stored, slots, tokens)
    found = triton_rotary.rotate_and_write(*arguments)
    cos, sin = angles.double().cos(), angles.double().sin()
    errors = [
        distance(found, model.rotate(queries.double(), cos, sin)),
        distance(stored[0][:, slots].transpose(0, 1), model.rotate(keys.double(), cos, sin)),
        distance(stored[1][:, slots].transpose(0, 1), values),
    ]
    took = seconds(lambda: triton_rotary.rotate_and_write(*arguments), sizes.repeats, device)
    report.line(
        f"rotary + cache write, {tokens} tokens, {dtype}", max(errors), 4 * EPS[dtype], speed(took, 2 * fused.nbytes)
    )


# ---- attention ---------------------------------------------------------------------------------------------------


def filled(config: ModelConfig, requests: int, context: int, dtype: torch.dtype, device: str) -> Any:
    """A paged cache of one layer, with so many tokens of each request; the blocks of different requests take turns."""
    layout = kv_cache.CacheLayout(1, config.num_kv_heads, config.head_dim, dtype, (torch.device(device),))
    cache = kv_cache.PagedKVCache(layout, requests * (context // 256 + 2), 256, prefix_sharing=False)
    for start in range(0, context, 256):
        write(cache, [(i, [0] * min(256, context - start), start) for i in range(requests)], device)
    return cache


def write(cache: Any, parts: list[tuple[int, list[int], int]], device: str) -> Batch:
    """Random keys and values for these tokens; the batch that they come in."""
    batch, layout = Batch.of(parts, device), cache.layout
    keys, values = torch.randn(2, len(batch.token_ids), layout.num_kv_heads, layout.head_dim, device=device)
    cache.write(0, keys.to(layout.dtype), values.to(layout.dtype), batch)
    return batch


def in_float64(queries: Tensor, batch: Batch, cache: Any) -> Tensor:
    """Attention of each request by itself, all scores at once."""
    output = torch.empty_like(queries, dtype=torch.float64)
    for span in batch.spans:
        visible = attention.causal_mask(span.start, span.length, queries.device)
        keys, values = (part.double() for part in cache.read(0, span.request_id))
        output[span.rows] = attention.grouped_attention(queries[span.rows].double(), keys, values, visible)[0]
    return output


def check_attention(name: str, cache: Any, batch: Batch, sizes: Sizes, device: str, report: Report) -> None:
    """Every backend over this batch, held against float64."""
    config, dtype = sizes.config, cache.layout.dtype
    queries = torch.randn(len(batch.token_ids), config.num_heads, config.head_dim, device=device).to(dtype)
    exact = in_float64(queries, batch, cache)
    tokens = sum(span.start + span.length for span in batch.spans)
    nbytes = 2 * tokens * config.num_kv_heads * config.head_dim * dtype.itemsize
    for kind in BACKENDS:
        label = f"attention {kind}, {name}, {dtype}"
        with report.guarded(label):
            if reason := attention_backends.lacking(kind, cache):
                raise RequestError(reason)
            found = attention_backends.attend(queries, 0, batch, cache, kind)
            took = seconds(lambda: attention_backends.attend(queries, 0, batch, cache, kind), sizes.repeats, device)  # noqa: B023
            report.line(label, distance(found, exact), 32 * EPS[dtype], speed(took, nbytes))


def check_backends(sizes: Sizes, dtype: torch.dtype, device: str, report: Report) -> None:
    """Decode steps, a prompt, a chunk that goes on, and all of them in one batch."""
    for requests, context in sizes.decode:
        cache = filled(sizes.config, requests, context, dtype, device)
        batch = write(cache, [(i, [0], context) for i in range(requests)], device)
        check_attention(f"decode {requests} x {context}", cache, batch, sizes, device, report)
    prompt = sizes.prompt
    cache = filled(sizes.config, 3, prompt, dtype, device)
    batch = write(cache, [(7, [0] * prompt, 0)], device)
    check_attention(f"prompt of {prompt}", cache, batch, sizes, device, report)
    cache.release(7)
    batch = write(
        cache, [(0, [0], prompt), (1, [0] * (prompt // 2), prompt), (2, [0] * 5, prompt), (8, [0] * 9, 0)], device
    )
    check_attention("all kinds together", cache, batch, sizes, device, report)


# ---- whole models ------------------------------------------------------------------------------------------------


def random_model(config: ModelConfig, dtype: torch.dtype, device: str) -> model.Model:
    """Random weights, the same each time; the head is the embedding's."""
    torch.manual_seed(0)
    network = model.Model(config)
    for name, weight in network.named_parameters():
        torch.nn.init.normal_(weight, 1 if "norm" in name else 0, 0.1)
    network.lm_head.weight = network.embed_tokens.weight
    return network.to(device, dtype)


@torch.inference_mode(False)  # fused layers watch their weights, which inference tensors do not allow
def made(layers: str, kind: str, sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """A model whose layers and attention are of these kinds, and a cache for it. Raises RequestError."""
    network = random_model(sizes.config, dtype, device)
    layout = kv_cache.CacheLayout.of(sizes.config, dtype, device)
    cache = kv_cache.PagedKVCache(layout, 2 + (sizes.prompt + sizes.tokens) // 256, 256)
    attention_backends.use(kind, network.layers)
    if layers == "graphs":
        if device != "cuda":
            raise RequestError("graphs are left to CUDA here: compiling them takes long.")
        try:
            from llmfromscratch import compiled_graph
        except ImportError as error:
            raise RequestError(f"compiled graphs need one more package: {error}.") from error
        if reason := compiled_graph.lacking(network, cache):
            raise RequestError(reason)
        network = compiled_graph.GraphedModel(network)
        network.prepare(cache)
        return network, cache
    if layers == "triton":
        triton_layers.use(network)
    elif layers == "fused":
        fused_layers.fuse(network, "fused")
    attention_backends.use(kind, network.layers)
    attention_backends.prepare(network.layers, cache)
    return network, cache


def decode(network: Any, cache: Any, sizes: Sizes, device: str, tokens: list[int]) -> tuple[Tensor, float, float]:
    """Logits [steps, vocab] behind a prompt and each of the given tokens; seconds of the prompt and of a step."""
    prompt = list(range(1, sizes.config.vocab_size, max(1, sizes.config.vocab_size // sizes.prompt)))[: sizes.prompt]
    for again in range(2):  # the first time compiles
        cache.release(again - 1)
        began = time.perf_counter()
        logits = [network(Batch.of([(again, prompt, 0)], device), cache)]
        logits[0].argmax().item()  # waits for the device
        prefilled = time.perf_counter()
        for step, token in enumerate(tokens):
            logits.append(network(Batch.of([(again, [token], len(prompt) + step)], device), cache))
            logits[-1].argmax().item()  # as an engine does for each token
        ended = time.perf_counter()
    return torch.cat(logits), prefilled - began, (ended - prefilled) / len(tokens)


def check_models(sizes: Sizes, device: str, report: Report) -> None:
    """Each way of computing a whole model: in float32 held against plain, in bfloat16 no further from it than plain."""
    tokens = [1 + step % (sizes.config.vocab_size - 1) for step in range(sizes.tokens)]
    exact, error_of_plain = torch.empty(0), 0.0
    for dtype in sizes.dtypes:
        for layers, kind in WAYS:
            label = f"model, layers {layers}, attention {kind}, {dtype}"
            with report.guarded(label):
                network, cache = made(layers, kind, sizes, dtype, device)
                logits, of_prompt, of_step = decode(network, cache, sizes, device, tokens)
                if dtype == torch.float32 and (layers, kind) == WAYS[0]:
                    exact = logits
                error = distance(logits, exact)
                if (layers, kind) == WAYS[0]:
                    error_of_plain = error
                bound = 1e-3 if dtype == torch.float32 else 2 * error_of_plain + EPS[dtype]
                context = sizes.prompt + sizes.tokens / 2
                nbytes = optimization.decode_bytes(sizes.config, int(context), dtype.itemsize, dtype.itemsize)
                text = f"{1 / of_step:7.1f} tokens/s {nbytes / of_step / 1e9:7.1f} GB/s"
                report.line(label, error, bound, f"{text}, prompt {sizes.prompt / of_prompt:9.0f} tokens/s")


# ---- all of it ---------------------------------------------------------------------------------------------------


def check(sizes: Sizes, device: str) -> int:
    """All checks; the number of those that failed."""
    report, began = Report(), time.perf_counter()
    torch.manual_seed(0)
    with torch.inference_mode():
        for dtype in sizes.dtypes:
            for part in (check_norm, check_rotary, check_backends):
                with report.guarded(f"{part.__name__}, {dtype}"):
                    part(sizes, dtype, device, report)
        check_models(sizes, device, report)
    print(f"{report.failed} failed; took {time.perf_counter() - began:.0f} s.")
    return report.failed


def main(words: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description="Checks every way of computing against the plain one on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args(words).device
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device that torch can use here, so nothing was checked.")
        return 2
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return int(check(REAL if device == "cuda" else SMALL, device) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
