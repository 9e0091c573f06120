"""Speculative decoding: tokens per second with and without drafts, on texts that copy and on texts that do not.

    python tests/benchmarks/speculation.py [--json] [--runs 3] [--dtype bfloat16] [--only ENTRY ...] [--rows] [MODEL]

The workload is fixed: two sets of prompts, one stream, greedy. "copy" asks for a given text again, as it is or with a
small edit; "free" asks open questions. The entries are named and stay as they are:

plain         no drafts
lookup        drafts from the text itself
skip          drafts by the model without a fifth of its layers, where the engine expects them to pay
skip, always  the same wherever it can: what they cost on this model

The entries take turns, and the best of the runs counts: by the tokens behind the first of each answer ("decode"), and
by whole answers, prefill and tokenizer included. In float32 all entries must say the same, and the benchmark fails if
they do not. In half precision sums of another order may round to another token; from there on the answers are different
texts, so figures are tokens per second. Quote ratios within one run.

--rows prints what a decode pass takes with 1, 2, ... rows of one request: `speculation.ROW_COST` is made of that.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

NEW_TOKENS = 200  # at most: an answer that is a copy ends with it
ENTRIES = ("plain", "lookup", "skip", "skip, always")

_NOTES = """The harbour office opens at seven. Boats that arrive before that wait at the long pier, with their lamps on.
Each skipper writes the name of the boat, its length in metres and the number of people on board into the grey book.
The fee is four coins a night for boats under ten metres and seven coins for longer ones. Water is free. Electricity is
paid at the end of the stay. Dogs must be kept on a lead near the nets. Nobody may light a fire on the pier."""
_LETTER = """Dear Mrs Almeida,

thank you for your order of the third of March. The two oak shelves left our workshop this morning and should reach you
on Thursday between nine and twelve. Please check the boxes for damage before you sign. The screws are in the small bag
that is taped to the back of the lower shelf. If a part is missing, call the number on the invoice and we will send it
the same day. The oil for the wood will follow next week, because our supplier is late. You need not pay for it.

With kind regards,
Henrik Solberg"""
_TABLE = """name,town,age,visits
Maria Lindqvist,Uppsala,41,12
Tomas Okafor,Lagos,29,3
Ines Carvalho,Porto,35,8
Jonas Weber,Bremen,52,1
Aiko Tanaka,Nagoya,33,6
Peter Novak,Brno,47,9"""
PROMPTS: dict[str, list[str]] = {
    "copy": [
        f"Repeat the following text word for word, and write nothing else.\n\n{_NOTES}",
        f"Repeat the following letter word for word, and write nothing else.\n\n{_LETTER}",
        f"Copy this table exactly:\n\n{_TABLE}",
        f"Write this text again, but with the word coins replaced by euros:\n\n{_NOTES}",
    ],
    "free": [
        "Why is the sky dark at night, although there are so many stars?",
        "Tell me a story about a lighthouse keeper who finds a strange bottle.",
        "What should I think about before I buy a used bicycle?",
        "Explain to a child how bread rises.",
    ],
}


def engine(model: str, dtype: str, entry: str) -> Any:
    """An `LLM` for an entry; prefixes are not shared, or the second run would have no prefill."""
    from llmfromscratch import LLM, drafters

    drafter = {"plain": None, "skip, always": drafters.LayerSkip(cost=0.0)}.get(entry, entry)
    return LLM(model, dtype=dtype, device="cpu", prefix_sharing=False, speculative=drafter)


def answers(llm: Any, kind: str, count: int = NEW_TOKENS) -> list[Any]:
    """The completions to one set of prompts, one after the other."""
    from llmfromscratch import SamplingParams

    params = SamplingParams(max_tokens=count)
    return [llm.chat([{"role": "user", "content": prompt}], params) for prompt in PROMPTS[kind]]


def measure(engines: dict[str, Any], runs: int, same: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Of each set and entry: tokens per second, tokens per pass, and the share of the drafts that stood."""
    for llm in engines.values():
        answers(llm, "copy", 12)  # the first call may compile
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for kind in PROMPTS:
        figures[kind], said = {}, {}
        for _ in range(runs):
            for name, llm in engines.items():
                said[name], found = measure_once(llm, kind)
                best = figures[kind].setdefault(name, found)
                for speed in ("decode_tokens_per_second", "tokens_per_second"):
                    best[speed] = max(best[speed], found[speed])
        if same:
            differing = [name for name in said if said[name] != next(iter(said.values()))]
            assert not differing, f"{differing} say something else than without drafts"
    return figures


def measure_once(llm: Any, kind: str) -> tuple[list[Any], dict[str, float]]:
    """The answers to one set of prompts, and the figures of them."""
    steps, began = llm.metrics.steps, time.perf_counter()
    completions = answers(llm, kind)
    whole, steps = time.perf_counter() - began, llm.metrics.steps - steps
    metrics = [completion.metrics for completion in completions]
    tokens, drafted = sum(one.tokens for one in metrics), sum(one.drafted for one in metrics)
    return completions, {
        "decode_tokens_per_second": (tokens - len(metrics))
        / sum((one.tokens - 1) * (one.tpot or 0) for one in metrics),
        "tokens_per_second": tokens / whole,
        "tokens_per_pass": tokens / steps,
        "drafted": drafted,
        "acceptance_rate": sum(one.accepted for one in metrics) / drafted if drafted else 0.0,
    }


def rows(model: str, dtype: str, runs: int = 15) -> dict[int, float]:
    """Milliseconds of a pass with so many new tokens of one request behind 256 others; they take turns."""
    from llmfromscratch.batch import Batch

    llm = engine(model, dtype, "plain")
    ids = list(range(100, 356))
    llm.model(Batch.of([(-1, ids, 0)]), llm.cache)
    best = dict.fromkeys((1, 2, 3, 4, 6, 8, 9, 12, 16), float("inf"))
    for _ in range(runs):
        for count in best:
            batch = Batch.of([(-1, ids[:count], len(ids))], all_logits=True)
            began = time.perf_counter()
            llm.model(batch, llm.cache)
            best[count] = min(best[count], 1000 * (time.perf_counter() - began))
            llm.cache.rewind(-1, count)
    llm.cache.release(-1)
    return best


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--rows", action="store_true", help="only what a pass takes with more rows")
    arguments = parser.parse_args()
    if arguments.rows:
        passes = rows(arguments.model, arguments.dtype)
        lines = [f"{count:3} rows {milliseconds:7.2f} ms" for count, milliseconds in passes.items()]
        print(json.dumps(passes) if arguments.json else "\n".join(lines))
        return
    engines = {name: engine(arguments.model, arguments.dtype, name) for name in arguments.only}
    figures = measure(engines, arguments.runs, arguments.dtype == "float32")
    if arguments.json:
        print(json.dumps({"dtype": arguments.dtype, **figures}))
        return
    for kind, entries in figures.items():
        print(f"{kind}: {len(PROMPTS[kind])} prompts, {arguments.dtype}, {NEW_TOKENS} new tokens at most")
        base = next(iter(entries.values()))
        for name, row in entries.items():
            decode, whole = (f"{key}tokens_per_second" for key in ("decode_", ""))
            print(
                f"  {name:13} decode {row[decode]:6.1f} tokens/s, {row[decode] / base[decode]:.2f} times"
                f"   whole {row[whole]:6.1f}, {row[whole] / base[whole]:.2f} times"
                f"   {row['tokens_per_pass']:.2f} tokens a pass"
                f"   {row['drafted']:.0f} drafts, {row['acceptance_rate']:.0%} stood"
            )


if __name__ == "__main__":
    main()
