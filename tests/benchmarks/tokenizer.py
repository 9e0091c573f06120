"""Encoding and decoding a megabyte of text: ours and the tokenizers library on one thread, side by side in one run.

    python tests/benchmarks/tokenizer.py [--json] [--runs 5]

Both have the packaged model's vocabulary and rules. Seconds are processor time, the best of the runs, ours and theirs
in turn, so that another busy process counts for little. Encoding is measured twice: by a new tokenizer (cold: it has
seen no word yet; the library keeps its memory of words) and again (warm). speed: how many times as fast as the library
we are. linear: the time for a megabyte over that for a quarter of one, for each character; about 1 where time grows
with the length.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Named workloads and limits: what the project promises.
CHARACTERS = 1_000_000
MIN_SPEED = 0.5
MAX_LINEAR = 1.5


def english() -> str:
    """English prose about Python, from the standard library."""
    from pydoc_data import topics

    return _megabyte("\n".join(topics.topics.values()))


def code() -> str:
    """Python code, from the standard library."""
    import inspect
    import typing
    import unittest.mock

    return _megabyte("".join(map(inspect.getsource, (argparse, inspect, typing, unittest.mock, json))))


def no_spaces() -> str:
    """The letters of the English text alone: one word of a megabyte."""
    return _megabyte("".join(filter(str.isalpha, english())))


def digits() -> str:
    """Digits alone, which this model takes one by one."""
    return _megabyte("".join(str(7**n) for n in range(2000)))


WORKLOADS: dict[str, Callable[[], str]] = {"english": english, "code": code, "no spaces": no_spaces, "digits": digits}


def _megabyte(text: str) -> str:
    return (text * (CHARACTERS // len(text) + 1))[:CHARACTERS]


def tokenizers_of_the_packaged_model() -> tuple[Callable[[], Any], Any]:
    """A function that makes a new one of ours, and the library's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from llmfromscratch import hub, tokenizer
    from llmfromscratch.formats.gguf import read_gguf
    from llmfromscratch.text.tokenizer_files import read_gguf_tokenizer

    file = hub.resolve(hub.DEFAULT_MODEL)
    data = read_gguf_tokenizer(read_gguf(file).metadata, file)
    theirs = tokenizers.Tokenizer(models.BPE(vocab=data.vocab, merges=list(data.ranks)))
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.Sequence(words), decoders.ByteLevel()
    return lambda: tokenizer.Tokenizer(data), theirs


def best_seconds(tasks: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Processor time of each task, the best of the runs, the tasks taking turns."""
    best = dict.fromkeys(tasks, float("inf"))
    for _ in range(runs):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            best[name] = min(best[name], time.process_time() - start)
    return best


def measure(text: str, new: Callable[[], Any], theirs: Any, runs: int) -> dict[str, float]:
    """Figures of one workload."""
    warm = new()
    ids = theirs.encode(text).ids
    if warm.encode(text) != ids or warm.decode(ids) != text or theirs.decode(ids) != text:
        raise SystemExit("the two do not agree: no figures.")
    fresh = [new() for _ in range(runs)]
    quarter = [new() for _ in range(runs)]
    seconds = best_seconds(
        {
            "theirs_encode": lambda: theirs.encode(text),
            "cold_encode": lambda: fresh.pop().encode(text),
            "warm_encode": lambda: warm.encode(text),
            "quarter_encode": lambda: quarter.pop().encode(text[: len(text) // 4]),
            "theirs_decode": lambda: theirs.decode(ids),
            "decode": lambda: warm.decode(ids),
            "quarter_decode": lambda: warm.decode(ids[: len(ids) // 4]),
        },
        runs,
    )
    return {
        "tokens": len(ids),
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "cold_encode_speed": seconds["theirs_encode"] / seconds["cold_encode"],
        "warm_encode_speed": seconds["theirs_encode"] / seconds["warm_encode"],
        "decode_speed": seconds["theirs_decode"] / seconds["decode"],
        "encode_linear": seconds["cold_encode"] / seconds["quarter_encode"] / 4,
        "decode_linear": seconds["decode"] / seconds["quarter_decode"] / 4,
    }


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    new, theirs = tokenizers_of_the_packaged_model()
    figures = {name: measure(text(), new, theirs, arguments.runs) for name, text in WORKLOADS.items()}
    print(json.dumps(figures) if arguments.json else _as_text(figures))


def _as_text(figures: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{CHARACTERS:,} characters; speed as a multiple of the library's (promised: {MIN_SPEED}); "
        f"time per character against a quarter of the text (promised: {MAX_LINEAR})",
        f"{'':12}{'tokens':>9}{'cold':>7}{'warm':>7}{'decode':>8}{'linear: encode':>16}{'decode':>8}"
        f"{'seconds: theirs':>17}{'cold':>7}{'warm':>7}",
    ]
    for name, row in figures.items():
        lines.append(
            f"{name:12}{row['tokens']:9,}{row['cold_encode_speed']:7.2f}{row['warm_encode_speed']:7.2f}"
            f"{row['decode_speed']:8.2f}{row['encode_linear']:16.2f}{row['decode_linear']:8.2f}"
            f"{row['theirs_encode_seconds']:17.2f}{row['cold_encode_seconds']:7.2f}{row['warm_encode_seconds']:7.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
