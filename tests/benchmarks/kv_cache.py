"""What each cache costs as a text grows, what sharing a prefix saves, and what forgetting costs in quality.

    python tests/benchmarks/kv_cache.py [steps] [prefix] [quality] [--json] [--runs 9] [--dtype float32]
                                        [--attention auto]

steps: seconds of one decode step of the packaged model at several lengths of text, fitted as a + b x length, beside
the cost of reading the same keys and values once and doing nothing with them (cold: after a sweep over other memory).
prefix: time to first token of a prompt whose beginning another prompt had, with and without sharing, hashing included,
in float32 and bfloat16. quality: perplexity of the standard library's English with caches that forget; not timed.
All kinds take turns in one run, and the best of the runs counts, so that another busy process counts for little.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmfromscratch import LLM, SamplingParams, attention_backends, kv_cache, kv_memory, sparse_cache
from llmfromscratch.batch import Batch

# Named workloads and limits: what the project promises.
LENGTHS = (128, 256, 512, 1024, 1536, 2048)
BLOCK_SIZE = 16
MAX_SLOPE = 2.0  # b of static and paged, as a multiple of the reading's
MAX_PAGED = 1.15  # a step of the paged cache at the longest text, as a multiple of the static one's
PREFIX, OWN = 512, 32  # tokens of a prompt that were there before, and its own
MIN_SAVING = 5.0  # time to first token without sharing, as a multiple of that with it
QUALITY_TOKENS, QUALITY_KEPT, QUALITY_CHUNK = 2048, 256, 16
SWEEP_BYTES = 256_000_000


# ---- decode steps ------------------------------------------------------------------------------------------------


def scatter(cache: kv_cache.PagedKVCache) -> None:
    """Every block is held once and given back in a random order: the free ones no longer follow each other."""
    count = cache.num_free_blocks
    for request in range(count):
        cache.reserve(-1 - request, cache.block_size)
    for request in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist():
        cache.release(-1 - request)


def filled(kind: str, layout: kv_cache.CacheLayout, length: int) -> kv_cache.KVCache:
    """A cache in which request 0 has `length` tokens of random keys and values, and room for some more."""
    cache: kv_cache.KVCache
    if kind == "concat":
        cache = kv_cache.ConcatKVCache(layout.num_layers)
    elif kind in ("static", "reading"):
        cache = kv_cache.StaticKVCache(layout, max_requests=1, max_length=length + BLOCK_SIZE)
    else:
        cache = kv_cache.PagedKVCache(layout, length // BLOCK_SIZE + 4, BLOCK_SIZE)
        if kind == "paged, scattered":
            scatter(cache)
    batch = Batch.of([(0, [7] * length, 0)])
    for layer in range(layout.num_layers):
        shape = (2, length, layout.num_kv_heads, layout.head_dim)
        cache.write(layer, *torch.randn(shape).to(layout.dtype), batch)
    return cache


def reading(cache: kv_cache.KVCache, num_layers: int) -> Callable[[], Any]:
    """Adds up all keys and values of request 0, as float32 whatever they are: the bytes count, not the sum."""

    def read() -> None:
        for layer in range(num_layers):
            for part in cache.read(layer, 0):
                part.transpose(0, 1).view(torch.float32).sum()

    return read


def decode_step(llm: LLM, cache: kv_cache.KVCache, length: int) -> Callable[[], Any]:
    """One token after `length` others."""
    return lambda: llm.model(Batch.of([(0, [7], length)]), cache)


def without_cache(llm: LLM, length: int) -> Callable[[], Any]:
    """One token after `length` others, all of them computed again."""
    cache = kv_cache.NoKVCache(llm.config.num_layers)
    return lambda: llm.model(Batch.of([(0, [7] * (length + 1), 0)]), cache)


def measure_steps(dtype: str, runs: int, attention: str) -> dict[str, Any]:
    """Best seconds of each kind at each length, the fits, and the ratios that are promised."""
    llm = LLM(dtype=dtype, device="cpu", kv_cache="none")
    attention_backends.use(attention, llm.model.layers)
    layout = kv_cache.CacheLayout.of(llm.config, llm.model.embed_tokens.weight.dtype)
    kinds = ("concat", "static", "paged, alone", "paged, scattered")
    caches = {(kind, length): filled(kind, layout, length) for kind in (*kinds, "reading") for length in LENGTHS}
    tasks = {key: decode_step(llm, cache, key[1]) for key, cache in caches.items() if key[0] != "reading"}
    sweep = torch.ones(SWEEP_BYTES // 4)
    best: dict[tuple[str, int], float] = {}
    for run in range(runs):
        for length in LENGTHS:
            for kind in kinds:
                _time(best, (kind, length), tasks[kind, length])
                caches[kind, length].rewind(0, 1)
            sweep.sum()
            _time(best, ("reading", length), reading(caches["reading", length], layout.num_layers))
            if run < 2:  # it takes seconds, so that a few milliseconds more or less do not matter
                _time(best, ("none", length), without_cache(llm, length))
    seconds = {kind: [best[kind, length] for length in LENGTHS] for kind in ("none", *kinds, "reading")}
    fits = {kind: line(LENGTHS, row) for kind, row in seconds.items()}
    return {
        "dtype": dtype,
        "attention": attention,
        "bytes_per_token": kv_memory.bytes_per_token(layout),
        "lengths": LENGTHS,
        "seconds": seconds,
        "a_seconds": {kind: fit[0] for kind, fit in fits.items()},
        "b_seconds_per_token": {kind: fit[1] for kind, fit in fits.items()},
        "slope_over_reading": {kind: fits[kind][1] / fits["reading"][1] for kind in ("none", *kinds)},
        "paged_over_static": {kind: seconds[kind][-1] / seconds["static"][-1] for kind in kinds if "paged" in kind},
    }


def _time(best: dict[Any, float], key: Any, task: Callable[[], Any]) -> None:
    start = time.perf_counter()
    task()
    best[key] = min(best.get(key, math.inf), time.perf_counter() - start)


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares: y = a + b x."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    b = sum((u - mean_x) * (v - mean_y) for u, v in zip(x, y, strict=True)) / sum((u - mean_x) ** 2 for u in x)
    return mean_y - b * mean_x, b


# ---- a shared prefix ---------------------------------------------------------------------------------------------


def measure_prefix(dtype: str, runs: int) -> dict[str, Any]:
    """Best seconds to the first token of prompts that begin alike and end differently."""
    llm = LLM(dtype=dtype, device="cpu")
    layout = kv_cache.CacheLayout.of(llm.config, llm.model.embed_tokens.weight.dtype)
    blocks = 4 * (PREFIX + OWN) // BLOCK_SIZE
    caches = {share: kv_cache.PagedKVCache(layout, blocks, BLOCK_SIZE, prefix_sharing=share) for share in (True, False)}
    generator = torch.Generator().manual_seed(0)
    ids = lambda count: torch.randint(100, llm.config.vocab_size, (count,), generator=generator).tolist()  # noqa: E731
    prefix, best = ids(PREFIX), {}
    for run in range(runs + 1):
        prompt = prefix + ids(OWN)
        for share, llm.cache in caches.items():
            seconds: dict[bool, float] = {}
            _time(seconds, share, lambda: next(llm.stream(prompt, SamplingParams(max_tokens=1))))  # noqa: B023
            if run:  # the first of all brings the prefix
                best[share] = min(best.get(share, math.inf), seconds[share])
    hits = caches[True].prefix_hit_tokens
    if hits != runs * PREFIX:
        raise SystemExit(f"{hits} tokens were shared instead of {runs * PREFIX}: no figures.")
    return {
        "dtype": dtype,
        "shared_seconds": best[True],
        "alone_seconds": best[False],
        "saving": best[False] / best[True],
    }


# ---- quality -----------------------------------------------------------------------------------------------------


def measure_quality(dtype: str) -> dict[str, Any]:
    """Perplexity of tokens that stand where a cache of QUALITY_KEPT tokens has forgotten some."""
    from pydoc_data import topics

    llm = LLM(dtype=dtype, device="cpu", kv_cache="none")
    layers = llm.config.num_layers
    ids = llm.tokenizer.encode("\n".join(topics.topics.values()))[:QUALITY_TOKENS]
    caches: dict[str, kv_cache.KVCache] = {
        "full": kv_cache.ConcatKVCache(layers),
        "window and 4 sinks": sparse_cache.SlidingWindow(layers, QUALITY_KEPT - 4, sinks=4),
        "window without sinks": sparse_cache.SlidingWindow(layers, QUALITY_KEPT, sinks=0),
        "heavy hitters, half recent": sparse_cache.HeavyHitters(layers, QUALITY_KEPT, recent=QUALITY_KEPT // 2),
    }
    found = {name: perplexity(llm, cache, ids) for name, cache in caches.items()}
    return {"dtype": dtype, "tokens": len(ids) - QUALITY_KEPT, "kept": QUALITY_KEPT, "perplexity": found}


def perplexity(llm: LLM, cache: kv_cache.KVCache, ids: list[int]) -> float:
    """exp of the mean surprise at the tokens from QUALITY_KEPT on, fed QUALITY_CHUNK at a time."""
    surprise = []
    for start in range(0, len(ids), QUALITY_CHUNK):
        chunk = ids[start : start + QUALITY_CHUNK]
        logits = llm.model(Batch.of([(0, chunk, start)], all_logits=True), cache).float()
        following = torch.tensor(ids[start + 1 : start + 1 + len(chunk)])
        surprise.append(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="none"))
    return torch.cat(surprise)[QUALITY_KEPT - 1 :].mean().exp().item()


# ---- the report --------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="any of steps, prefix, quality; default: steps and prefix")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dtype", default="float32", help="of steps and quality")
    parser.add_argument("--attention", default="auto", choices=attention_backends.KINDS, help="of steps")
    arguments = parser.parse_args()
    parts = arguments.parts or ["steps", "prefix"]
    if unknown := set(parts) - {"steps", "prefix", "quality"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected steps, prefix or quality")
    figures: dict[str, Any] = {}
    if "steps" in parts:
        figures["steps"] = measure_steps(arguments.dtype, arguments.runs, arguments.attention)
    if "prefix" in parts:
        figures["prefix"] = [measure_prefix(dtype, arguments.runs) for dtype in ("float32", "bfloat16")]
    if "quality" in parts:
        figures["quality"] = measure_quality(arguments.dtype)
    print(json.dumps(figures) if arguments.json else "\n".join(_as_text(figures)))


def _as_text(figures: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if "steps" in figures:
        lines += _steps_as_text(figures["steps"])
    for row in figures.get("prefix", ()):
        lines.append(
            f"time to first token, {PREFIX} shared + {OWN} own tokens, {row['dtype']}: {row['alone_seconds']:.3f} s "
            f"alone, {row['shared_seconds']:.3f} s shared, {row['saving']:.1f} times faster   "
            f"(promised: {MIN_SAVING:g}){_verdict(row['saving'] >= MIN_SAVING)}"
        )
    if "quality" in figures:
        row = figures["quality"]
        lines.append(f"perplexity of {row['tokens']} tokens of English, {row['kept']} kept, {row['dtype']}")
        lines += [f"  {name:28}{value:8.2f}" for name, value in row["perplexity"].items()]
    return lines


def _steps_as_text(row: dict[str, Any]) -> list[str]:
    lines = [
        f"one decode step, {row['dtype']}, attention {row['attention']}, ms; a + b x length; "
        f"{row['bytes_per_token']} bytes a token",
        f"{'':18}" + "".join(f"{length:9}" for length in row["lengths"]) + f"{'a ms':>9}{'b µs':>9}{'b / reading':>13}",
    ]
    for kind, seconds in row["seconds"].items():
        a, b = row["a_seconds"][kind], row["b_seconds_per_token"][kind]
        ratio = row["slope_over_reading"].get(kind, 1.0)
        bound = kind == "static" or kind.startswith("paged")
        lines.append(
            f"{kind:18}"
            + "".join(f"{1e3 * value:9.2f}" for value in seconds)
            + f"{1e3 * a:9.2f}{1e6 * b:9.3f}{ratio:13.2f}"
            + (f"   (promised: {MAX_SLOPE:g}){_verdict(ratio <= MAX_SLOPE)}" if bound else "")
        )
    for kind, ratio in row["paged_over_static"].items():
        lines.append(
            f"{kind}: {ratio:.2f} times the static step at {row['lengths'][-1]} tokens   "
            f"(promised: {MAX_PAGED:g}){_verdict(ratio <= MAX_PAGED)}"
        )
    return lines


def _verdict(holds: bool) -> str:
    return "  ok" if holds else "  NOT MET"


if __name__ == "__main__":
    main()
