"""One stream: tokens per second of prefill and decode, of this engine and of what it is measured against, in one run.

    python tests/benchmarks/decode.py [--json] [--runs 3] [--dtype bfloat16] [--transformers] [--only ENTRY ...] [MODEL]

The workload is fixed: a prompt of 128 token ids, 128 more taken greedily, end tokens ignored. The entries are named
engines that later ones are compared with, and stay as they are:

chapter 5     plain PyTorch layers and attention, nothing fused, nothing compiled: what a learner has after chapter 5
fused         fused layers in PyTorch, decode attention compiled
now           `LLM` as it comes
int8, int4    the same with weights rounded to so many bits; "native": with those of the file as they lie
transformers  its `generate`, with --transformers; it reads the same file, which takes half a minute

The entries take turns, and the best of the runs counts. Quote ratios within one run: absolute figures differ from
machine to machine, and on 2 cores any other busy process ruins them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, SEED = 128, 128, 8
ENTRIES: dict[str, dict[str, Any]] = {
    "chapter 5": {"attention": "plain", "layers": "plain"},
    "fused": {"layers": "fused"},
    "now": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "native": {"quantization": "native"},
}
Generate = Callable[[int], Any]  # how many tokens are to be generated


def prompt(vocab: int) -> list[int]:
    """The ids of the workload's prompt: the same on every machine."""
    dice = random.Random(SEED)
    return [dice.randrange(100, vocab) for _ in range(PROMPT_TOKENS)]


def ours(model: str, dtype: str, settings: dict[str, Any]) -> Generate:
    """This engine with an entry's settings; prefixes are not shared, or the second run would have no prefill."""
    from llmfromscratch import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, device="cpu", prefix_sharing=False, **settings)
    ids = prompt(llm.config.vocab_size)

    def generate(count: int) -> Any:
        return llm.generate([ids], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids

    return generate


def theirs(model: str, dtype: str) -> Generate:
    """transformers on the same file."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from llmfromscratch import hub

    logging.set_verbosity_error()
    file = hub.resolve(model)
    network = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    ids = torch.tensor([prompt(network.config.vocab_size)])

    def generate(count: int) -> Any:
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.inference_mode():
            return network.generate(ids, attention_mask=torch.ones_like(ids), **settings)

    return generate


def seconds(generate: Generate, count: int) -> float:
    """What generating so many tokens takes."""
    began = time.perf_counter()
    generate(count)
    return time.perf_counter() - began


def measure(engines: dict[str, Generate], runs: int) -> dict[str, dict[str, float]]:
    """Of each engine the tokens per second of prefill and of decode; they take turns."""
    for generate in engines.values():
        generate(4)  # the first call may compile
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    wholes: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(runs):
        for name, generate in engines.items():
            firsts[name].append(seconds(generate, 1))
            wholes[name].append(seconds(generate, NEW_TOKENS))
    return {
        name: {
            "prefill_tokens_per_second": PROMPT_TOKENS / min(firsts[name]),
            "decode_tokens_per_second": (NEW_TOKENS - 1) / (min(wholes[name]) - min(firsts[name])),
        }
        for name in engines
    }


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    arguments = parser.parse_args()
    engines = {name: ours(arguments.model, arguments.dtype, ENTRIES[name]) for name in arguments.only}
    if arguments.transformers:
        engines["transformers"] = theirs(arguments.model, arguments.dtype)
    figures = measure(engines, arguments.runs)
    if arguments.json:
        print(json.dumps({"dtype": arguments.dtype, **figures}))
        return
    base = next(iter(figures.values()))["decode_tokens_per_second"]
    print(f"one stream, {arguments.dtype}, {PROMPT_TOKENS} tokens of prompt and {NEW_TOKENS} new ones")
    for name, row in figures.items():
        prefill, decode = row["prefill_tokens_per_second"], row["decode_tokens_per_second"]
        print(f"  {name:14} prefill {prefill:7.0f} tokens/s   decode {decode:6.1f} tokens/s, {decode / base:.2f} times")


if __name__ == "__main__":
    main()
