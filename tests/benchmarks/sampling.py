"""What one step of the sampler costs beside the forward that its logits come from.

    python tests/benchmarks/sampling.py [--json] [--runs 15] [--dtype bfloat16] [--requests 32] [--length 128]

A decode step of the packaged model at 32 requests and the sampler's step on its 32 x 49,152 logits take turns in one
run, and the best of the runs counts, so that another busy process counts for little. The logits are the model's own,
after texts of English, but for the cases that say otherwise. Promised: greedy costs less than 5 % of the forward,
temperature with top-k and top-p less than 30 %; the other cases are measured beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import LLM, SamplingParams, kv_cache, sampling
from llmfromscratch.batch import Batch

# Named workloads and limits: what the project promises.
MAX_SHARE = {"greedy": 0.05, "temperature, top-k, top-p": 0.30}  # of the forward
STANDARD = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
MIXED: Sequence[dict[str, Any]] = (
    {}, {"temperature": 1.0}, STANDARD, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "min_p": 0.05},
    {**STANDARD, **PENALTIES}, {"temperature": 1.0, "typical_p": 0.9, "top_k": 100}, {"repetition_penalty": 1.2},
)  # fmt: skip
# name -> (what the requests ask for, by turns; what is done to the model's logits)
CASES: dict[str, tuple[Sequence[dict[str, Any]], Callable[[Tensor], Tensor]]] = {
    "greedy": ([{}], Tensor.float),
    "temperature, top-k, top-p": ([STANDARD], Tensor.float),
    "the same, bfloat16 logits": ([STANDARD], Tensor.bfloat16),
    "the same, penalties": ([{**STANDARD, **PENALTIES}], Tensor.float),
    "the same, logit bias of 100": ([{**STANDARD, "logit_bias": dict.fromkeys(range(100), -1.0)}], Tensor.float),
    "the same, 5 logprobs": ([{**STANDARD, "logprobs": 5}], Tensor.float),
    "greedy, penalties": ([PENALTIES], Tensor.float),
    "temperature alone": ([{"temperature": 0.8}], Tensor.float),
    "top-p alone": ([{"temperature": 0.8, "top_p": 0.95}], Tensor.float),
    "min-p alone": ([{"temperature": 1.0, "min_p": 0.05}], Tensor.float),
    "each row its own": (MIXED, Tensor.float),
    "flat: temperature 2, top-p 0.99": ([{"temperature": 2.0, "top_p": 0.99}], Tensor.float),
    "flattest: equal logits, top-p 0.99": ([{"temperature": 1.0, "top_p": 0.99}], torch.zeros_like),
    "typical-p alone": ([{"temperature": 1.0, "typical_p": 0.9}], Tensor.float),
}


def prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Pieces of the standard library's English, each of `length` tokens."""
    from pydoc_data import topics

    ids = llm.tokenizer.encode("\n".join(topics.topics.values())[: 8 * count * length])
    return [ids[start : start + length] for start in range(0, count * length, length)]


def sampler_step(texts: Sequence[Sequence[int]], kinds: Sequence[dict[str, Any]], logits: Tensor) -> Callable[[], Any]:
    """A step of the sampler over requests whose answers so far are the second halves of the texts."""
    sampler, rows = sampling.Sampler(), []
    for place, text in enumerate(texts):
        half = len(text) // 2
        row = sampler.start(SamplingParams(**kinds[place % len(kinds)], seed=place), text[:half])
        row.token_ids.extend(text[half:])
        rows.append(row)

    def step() -> None:
        sampler.sample(logits.float(), rows)  # as the engine does
        for row in rows:
            row.token_ids.pop()

    return step


def measure(dtype: str, requests: int, length: int, runs: int) -> dict[str, Any]:
    """Best seconds of the forward and of the sampler in each case."""
    llm = LLM(dtype=dtype, device="cpu", kv_cache="none")
    layout = kv_cache.CacheLayout.of(llm.config, llm.model.embed_tokens.weight.dtype)
    cache = kv_cache.PagedKVCache(layout, requests * (length // 16 + 2), 16)
    texts = prompts(llm, requests, length)
    for request, text in enumerate(texts):
        llm.model(Batch.of([(request, text[:-1], 0)]), cache)
    decode = Batch.of([(request, text[-1:], length - 1) for request, text in enumerate(texts)])
    logits = llm.model(decode, cache)
    steps = {name: sampler_step(texts, kinds, change(logits)) for name, (kinds, change) in CASES.items()}
    best: dict[str, float] = {}
    for _ in range(runs):
        for name, step in steps.items():
            for request in range(requests):
                cache.rewind(request, 1)
            _time(best, "forward", lambda: llm.model(decode, cache))
            _time(best, name, step)
    forward = best.pop("forward")
    return {
        "dtype": dtype,
        "requests": requests,
        "length": length,
        "vocab": logits.shape[-1],
        "threads": torch.get_num_threads(),
        "forward_seconds": forward,
        "seconds": best,
        "share": {name: seconds / forward for name, seconds in best.items()},
    }


def _time(best: dict[str, float], key: str, task: Callable[[], Any]) -> None:
    start = time.perf_counter()
    task()
    best[key] = min(best.get(key, math.inf), time.perf_counter() - start)


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", help="of the model: the faster, the harder for the sampler")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens that each request has, at least 2")
    arguments = parser.parse_args()
    figures = measure(arguments.dtype, arguments.requests, arguments.length, arguments.runs)
    print(json.dumps(figures) if arguments.json else "\n".join(_as_text(figures)))


def _as_text(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"one decode step, {figures['requests']} requests of {figures['length']} tokens, {figures['dtype']}, "
        f"{figures['threads']} threads: {1e3 * figures['forward_seconds']:.1f} ms",
        f"the sampler's step, {figures['requests']} x {figures['vocab']:,} logits{'ms':>10}{'share':>10}",
    ]
    for name, seconds in figures["seconds"].items():
        share, most = figures["share"][name], MAX_SHARE.get(name)
        verdict = "" if most is None else f"   (promised: below {most:.0%}){'  ok' if share < most else '  NOT MET'}"
        lines.append(f"{name:42}{1e3 * seconds:10.2f}{share:10.1%}{verdict}")
    return lines


if __name__ == "__main__":
    main()
