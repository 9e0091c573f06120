"""The server under load: what 32 clients at once get, against `generate` on the same work, and what serving costs.

    python tests/benchmarks/server.py [--json] [--quick] [--requests 200] [--clients 32] [--rounds 3] [MODEL]

load: a real server in this process, 32 clients in another one. Prompts and answers of mixed lengths; streams and whole
answers, completions and turns of a chat; a tenth of the requests is cancelled half-way, a tenth malformed. Then the
same prompts through `LLM.generate`, in float32, greedy, as many at a time as there are clients; those that were
cancelled for as many tokens as the server computed. Both begin with an empty cache. Texts and seconds are compared.
cost: the same server and clients over an engine without its model, which says one word again and again. At full speed
that gives requests per second. Waiting between its steps, so that each token is an event of its own as with a model, it
gives the processor time a token takes beyond that of `generate` on the same engine.
memory: the resident size of the server's process after each round, the requests of which differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pydoc_data import topics
from typing import Any

import httpx
import psutil
import torch

from llmfromscratch import LLM, SamplingParams, kv_cache
from llmfromscratch.answers import Completion
from llmfromscratch.batch import Batch
from llmfromscratch.server.notebook import serve

# Named limits: what the project promises on its 2-core machine.
MIN_THROUGHPUT = 0.75  # of `generate` on the same work
MAX_GROWTH = 16e6  # bytes of resident memory from the first round to the last
MAX_LEFTOVER = 0  # requests, blocks and streams that outlive their clients
STEP_SECONDS = 0.02  # of a step without a model, where the cost of a token is measured
ROUNDS_WITHOUT_MODEL = 4

CACHE_BYTES = 320_000_000
_REST = 10.0  # seconds in which the engine must have let go of what nobody waits for


@dataclass(frozen=True)
class Workload:
    """How many requests, and between which lengths, in tokens; both are uniform."""

    name: str
    count: int
    clients: int
    prompts: tuple[int, int]
    answers: tuple[int, int]

    @property
    def odd(self) -> int:
        """A tenth of the requests."""
        return max(1, self.count // 10)


WORKLOADS = {
    "full": Workload("200 requests of 32 clients, prompts 8-64, answers 8-56", 200, 32, (8, 64), (8, 56)),
    "quick": Workload("30 requests of 8 clients, prompts 4-24, answers 4-16", 30, 8, (4, 24), (4, 16)),
}

_TURN = '{"messages": [{"role": "user", "content": "x"}], '
# What a client may get wrong: where, what, and the status it has to be answered with.
MALFORMED = (
    ("/v1/completions", '{"prompt": "half of a JS', 400),
    ("/v1/completions", '{"max_tokens": 8}', 400),
    ("/v1/completions", '{"prompt": "x", "max_tokens": "8"}', 400),
    ("/v1/completions", '{"prompt": "x", "max_tokens": -8, "stream": true}', 400),
    ("/v1/completions", '{"prompt": "x", "temprature": 0}', 400),
    ("/v1/completions", '{"prompt": "x", "model": "another"}', 404),
    ("/v1/completions", json.dumps({"prompt": [7] * 200_000}), 400),
    ("/v1/chat/completions", _TURN + '"tools": [{}]}', 400),
    ("/v1/chat/completions", '{"messages": [{"role": "nobody", "content": "x"}]}', 400),
    ("/v1/chat/completions", '{"messages": [], "stream": true}', 400),
)


# ---- the requests ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One request: `sent` as the clients take it, and for one that is well-formed what it asks of an engine."""

    kind: str  # "finished", "cancelled", "malformed"
    sent: dict[str, Any]
    ids: tuple[int, ...] = ()
    params: SamplingParams | None = None
    status: int = 200

    @property
    def number(self) -> int:
        """Which one it is."""
        return self.sent["number"]


class Texts:
    """Prompts of any length in tokens, no two alike, out of the standard library's English."""

    def __init__(self, llm: LLM, seed: int):
        self.llm, self.dice = llm, random.Random(seed)

    @cached_property
    def _ids(self) -> list[int]:
        return self.llm.tokenizer.encode("\n".join(topics.topics.values())[:100_000])

    def prompt(self, tokens: int, number: int) -> str:
        """A text of about so many tokens."""
        start = self.dice.randrange(len(self._ids) - tokens)
        return f"{number}. " + self.llm.tokenizer.decode(self._ids[start : start + tokens])


def requests(llm: LLM, workload: Workload, seed: int) -> list[Asked]:
    """A round's requests, the odd ones in the middle: at the ends, the first answers and an engine running empty
    would tell clients wrongly how long half an answer takes.
    """
    dice, texts = random.Random(seed), Texts(llm, seed)
    odd = ["cancelled"] * workload.odd + ["malformed"] * workload.odd
    usual = workload.count - len(odd)
    ends = min(workload.clients, usual // 2)
    middle = odd + ["finished"] * (usual - 2 * ends)
    dice.shuffle(middle)
    kinds = ["finished"] * ends + middle + ["finished"] * ends
    return [_request(llm, workload, kind, number, dice, texts) for number, kind in enumerate(kinds)]


def _request(llm: LLM, workload: Workload, kind: str, number: int, dice: random.Random, texts: Texts) -> Asked:
    if kind == "malformed":
        path, content, status = MALFORMED[number % len(MALFORMED)]
        sent = {"number": number, "path": path, "content": content, "stream": False, "leave": None}
        return Asked(kind, sent, status=status)
    text, answer = texts.prompt(dice.randint(*workload.prompts), number), dice.randint(*workload.answers)
    if kind == "cancelled":
        answer = max(answer, sum(workload.answers) // 2)  # long enough to have a half-way
    chat, stream = number % 4 >= 2, number % 2 == 0
    # half of the turns end where the model ends them
    params = SamplingParams(max_tokens=answer, ignore_eos=kind == "cancelled" or number % 8 < 6)
    body: dict[str, Any] = {"max_tokens": answer, "temperature": 0, "ignore_eos": params.ignore_eos, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
        ids = llm.chat_prompt(body["messages"])
    else:
        body["prompt"] = text
        ids = llm.request(text).prompt_token_ids
    path = "/v1/chat/completions" if chat else "/v1/completions"
    leave = answer // 2 if kind == "cancelled" else None
    sent = {"number": number, "path": path, "content": json.dumps(body), "stream": stream, "leave": leave}
    return Asked(kind, sent, tuple(ids), params)


# ---- one round ---------------------------------------------------------------------------------------------------


def ask(url: str, asked: Sequence[Asked], clients: int) -> dict[str, Any]:
    """What the clients' process saw."""
    program = Path(__file__).with_name("server_clients.py")
    given = {"url": url, "clients": clients, "requests": [one.sent for one in asked]}
    done = subprocess.run(
        [sys.executable, str(program)], input=json.dumps(given), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(f"the clients failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


@contextmanager
def noted(llm: LLM) -> Iterator[dict[tuple[int, ...], Any]]:
    """The engine's requests by their prompts, from now on: they tell how much was computed for whom."""
    seen, add = {}, llm.core.add

    def note(request: Any) -> None:
        seen[tuple(request.prompt_token_ids)] = request
        add(request)

    llm.core.add = note
    try:
        yield seen
    finally:
        llm.core.add = add


def empty(cache: kv_cache.PagedKVCache) -> None:
    """Gives up what is kept of earlier prompts: each block is held once, and holds nothing then."""
    cache.reserve(-1, cache.num_free_blocks * cache.block_size)
    cache.release(-1)


def leftovers(llm: LLM, url: str) -> int:
    """Requests, blocks and streams that are there although nobody waits. RuntimeError where the cache does not add up.

    Blocks that are kept for later prompts count as free.
    """
    until = time.monotonic() + _REST
    while (left := _in_use(llm, url)) and time.monotonic() < until:
        time.sleep(0.01)
    llm.cache.audit()
    return left


def _in_use(llm: LLM, url: str) -> int:
    blocks = len(llm.cache.allocator.ref_counts) - llm.cache.num_free_blocks
    told = httpx.get(f"{url}/metrics").text.splitlines()
    streams = next(int(float(line.split()[1])) for line in told if line.startswith("llmfromscratch_streams "))
    return blocks + streams + llm.metrics.running + llm.metrics.waiting + llm.core.has_work


def measure_round(llm: LLM, url: str, workload: Workload, seed: int) -> dict[str, Any]:
    """Serves a round's requests, then computes the same offline, and compares."""
    asked = requests(llm, workload, seed)
    empty(llm.cache)
    before = replace(llm.metrics)
    with noted(llm) as seen:
        began = time.process_time()
        served = ask(url, asked, workload.clients)
        processor = time.process_time() - began
    left = leftovers(llm, url)
    computed = {one.number: seen[one.ids] for one in asked if one.ids in seen}
    hits, preemptions = llm.metrics.prefix_hits - before.prefix_hits, llm.metrics.preemptions - before.preemptions
    began = time.process_time()
    offline, seconds = compute(llm, asked, {number: len(one.token_ids) for number, one in computed.items()})
    offline_processor = time.process_time() - began
    answers = {answer["number"]: answer for answer in served["answers"]}
    faults = [fault for one in asked if (fault := _fault(one, answers[one.number], offline, computed))]
    tokens = sum(len(one.token_ids) for one in computed.values())
    streams = [answers[one.number] for one in asked if one.kind == "finished" and one.sent["stream"]]
    return {
        "served_seconds": served["seconds"],
        "offline_seconds": seconds,
        "throughput": seconds / served["seconds"],
        "tokens": tokens,
        "served_processor_seconds": processor,
        "offline_processor_seconds": offline_processor,
        "clients_processor_seconds": served["processor_seconds"],
        "finished": sum(one.kind == "finished" for one in asked),
        "cancelled": sum(one.kind == "cancelled" for one in asked),
        "malformed": sum(one.kind == "malformed" for one in asked),
        "cancelled_after": _cancelled_after(asked, computed),
        "faults": faults,
        "leftovers": left,
        "prefix_hits": hits,
        "preemptions": preemptions,
        "ttft": [one["ttft"] for one in streams if "ttft" in one],
        "tpot": [one["tpot"] for one in streams if "tpot" in one],
    }


def compute(llm: LLM, asked: Sequence[Asked], lengths: dict[int, int]) -> tuple[dict[int, Completion], float]:
    """The same prompts offline, cancelled ones for `lengths` tokens: their answers by number, and the seconds."""
    empty(llm.cache)
    work = {one.number: one.params for one in asked if one.kind == "finished" and one.params}
    for one in asked:
        if one.kind == "cancelled" and one.params and lengths.get(one.number):
            work[one.number] = SamplingParams(max_tokens=lengths[one.number], ignore_eos=True)
    prompts = [list(one.ids) for one in asked if one.number in work]
    began = time.perf_counter()
    completions = llm.generate(prompts, [work[one.number] for one in asked if one.number in work])
    seconds = time.perf_counter() - began
    return dict(zip([one.number for one in asked if one.number in work], completions, strict=True)), seconds


def _cancelled_after(asked: Sequence[Asked], computed: dict[int, Any]) -> float | None:
    """Mean share of its tokens that a cancelled request got."""
    shares = [
        len(computed[one.number].token_ids) / one.params.max_tokens
        for one in asked
        if one.kind == "cancelled" and one.params and one.number in computed
    ]
    return statistics.mean(shares) if shares else None


def _fault(one: Asked, got: dict[str, Any], offline: dict[int, Completion], computed: dict[int, Any]) -> str | None:
    """What is wrong with an answer, in a sentence."""
    name = f"request {one.number} ({one.kind}, {'stream' if one.sent['stream'] else 'whole'}, {one.sent['path']})"
    if got["error"]:
        return f"{name} broke off: {got['error']}"
    if one.kind == "malformed":
        try:
            sentence = json.loads(got["body"])["error"]["message"].endswith(".")
        except (TypeError, ValueError, KeyError):
            sentence = False
        return None if got["status"] == one.status and sentence else f"{name} got {got['status']}: {got['body']!r:.200}"
    if one.kind == "cancelled":
        request = computed.get(one.number)
        if not got["left"] or request is None or request.finish_reason != "abort":
            return f"{name} was not cancelled half-way: the engine ended it with {request and request.finish_reason!r}."
        if one.sent["stream"] and not offline[one.number].text.startswith(got["text"]):
            return f"{name} says something else: {_parting(got['text'], offline[one.number].text)}."
        return None
    if got["status"] != 200:
        return f"{name} got {got['status']}: {got['body']!r:.200}"
    wanted = offline[one.number]
    theirs = (got["text"], got["finish_reason"], got["tokens"])
    ours = (wanted.text, wanted.finish_reason, len(wanted.token_ids))
    if theirs[0] != ours[0]:
        return f"{name} says something else: {_parting(theirs[0], ours[0])}."
    return None if theirs == ours else f"{name} ended with {theirs[1:]}; offline with {ours[1:]}."


def _parting(served: str, offline: str) -> str:
    """Where two texts part, and a little of both."""
    pairs = enumerate(zip(served, offline, strict=False))
    place = next((place for place, (a, b) in pairs if a != b), min(len(served), len(offline)))
    near = slice(max(0, place - 20), place + 20)
    return f"{served[near]!r}, and offline {offline[near]!r}, around character {place}"


# ---- what serving itself costs -----------------------------------------------------------------------------------


class Silent:
    """In the place of a model: notes tokens in the cache, computes nothing, and always says one word.

    seconds: that a step takes, asleep. Logits have `width` columns, so that choosing the word costs next to nothing.
    """

    def __init__(self, token: int, seconds: float, width: int = 512):
        self.seconds = seconds
        self.row = torch.zeros(1, width)
        self.row[0, token] = 1.0

    def __call__(self, batch: Batch, cache: kv_cache.PagedKVCache) -> torch.Tensor:
        time.sleep(self.seconds)
        cache.begin(batch)
        for layer in range(cache.layout.num_layers):
            cache.end(layer, batch)
        return self.row.expand(len(batch.logit_rows), -1)


@contextmanager
def without_model(llm: LLM, seconds: float) -> Iterator[None]:
    """The engine with everything but its model."""
    own = llm.core.model
    word = next(token for token in range(300, 0, -1) if token < llm.config.vocab_size and _is_word(llm, token))
    llm.core.model = Silent(word, seconds)
    try:
        yield
    finally:
        llm.core.model = own


def _is_word(llm: LLM, token: int) -> bool:
    return llm.tokenizer.decode([token]).isascii() and bool(llm.tokenizer.decode([token]).strip())


def measure_cost(llm: LLM, url: str, workload: Workload, seed: int) -> dict[str, Any]:
    """Requests per second without a model, and milliseconds of processor time a token."""
    with without_model(llm, 0.0):
        fast, memory = [], []
        for number in range(ROUNDS_WITHOUT_MODEL):
            asked = [one for one in requests(llm, workload, seed + number) if one.kind == "finished"]
            served = ask(url, asked, workload.clients)
            leftovers(llm, url)
            fast.append((len(asked) / served["seconds"], served))
            memory.append(resident())
    with without_model(llm, STEP_SECONDS):
        began = time.process_time()
        served = ask(url, asked, workload.clients)
        here = time.process_time() - began
        tokens = sum(answer["tokens"] for answer in served["answers"])
        began = time.process_time()
        llm.generate([list(one.ids) for one in asked], [one.params for one in asked])
        engine_alone = time.process_time() - began
    return {
        "requests_per_second": max(rate for rate, _ in fast),
        "tokens_per_second": max(sum(a["tokens"] for a in one["answers"]) / one["seconds"] for _, one in fast),
        "server_ms_per_token": 1e3 * (here - engine_alone) / tokens,
        "clients_ms_per_token": 1e3 * served["processor_seconds"] / tokens,
        "engine_ms_per_token": 1e3 * engine_alone / tokens,
        "resident": memory,
    }


def resident() -> int:
    """Bytes of memory that this process has."""
    gc.collect()
    return psutil.Process().memory_info().rss


# ---- the report --------------------------------------------------------------------------------------------------


def measure(llm: LLM, workload: Workload, rounds: int) -> dict[str, Any]:
    """All figures of a workload."""
    figures: dict[str, Any] = {"workload": workload.name, "rounds": [], "resident": []}
    for stored in llm.cache.storage:
        stored.zero_()  # all of its memory is there before anything is measured
    with serve(llm) as server:
        measure_round(llm, server.url, replace(workload, count=20, clients=8), 1000)
        for seed in range(rounds):
            figures["rounds"].append(measure_round(llm, server.url, workload, seed))
            figures["resident"].append(resident())
        figures["cost"] = measure_cost(llm, server.url, workload, 2000)
    return figures | verdicts(figures)


def verdicts(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that something is promised about."""
    rounds = figures["rounds"]
    grown = [sizes[-1] - sizes[0] for sizes in (figures["resident"], figures["cost"]["resident"])]
    return {
        "throughput": statistics.median(one["throughput"] for one in rounds),
        "faults": sum(len(one["faults"]) for one in rounds),
        "leftovers": max(one["leftovers"] for one in rounds),
        "growth": max(grown),
    }


def main() -> None:
    """Prints the figures, as text or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--quick", action="store_true", help="a small workload, to see that it runs")
    parser.add_argument("--requests", type=int, help="how many, instead of the workload's number")
    parser.add_argument("--clients", type=int, help="how many at once, instead of the workload's number")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    workload = WORKLOADS["quick" if arguments.quick else "full"]
    count, clients = arguments.requests or workload.count, arguments.clients or workload.clients
    if (count, clients) != (workload.count, workload.clients):
        workload = replace(workload, name=f"{workload.name}; {count} of {clients}", count=count, clients=clients)
    # as many places as clients: `generate` computes as many at a time as the clients ask for
    llm = LLM(arguments.model, dtype="float32", device="cpu", kv_cache_memory=CACHE_BYTES, max_requests=clients)
    figures = {"model": arguments.model} | measure(llm, workload, arguments.rounds)
    print(json.dumps(figures) if arguments.json else "\n".join(_as_text(figures)))


def _as_text(figures: dict[str, Any]) -> list[str]:
    rounds, cost = figures["rounds"], figures["cost"]
    lines = [f"{figures['model']}, float32: {figures['workload']}; {len(rounds)} rounds"]
    for one in rounds:
        lines.append(
            f"  served {one['served_seconds']:6.1f} s, offline {one['offline_seconds']:6.1f} s: "
            f"{one['tokens'] / one['served_seconds']:.1f} tokens/s, {one['throughput']:.1%}   {one['tokens']} tokens, "
            f"cancelled after {one['cancelled_after'] or 0:.0%}, {one['prefix_hits']} prefix hits, "
            f"{one['preemptions']} preemptions"
        )
        lines.append(
            f"    processor time {one['served_processor_seconds']:.1f} s, offline "
            f"{one['offline_processor_seconds']:.1f} s, the clients' {one['clients_processor_seconds']:.1f} s"
        )
    for fault in [fault for one in rounds for fault in one["faults"]][:10]:
        lines.append(f"  fault: {fault}")
    counts = ", ".join(f"{sum(one[kind] for one in rounds)} {kind}" for kind in ("finished", "cancelled", "malformed"))
    lines.append(f"  answers     {counts}: {figures['faults']} wrong{_verdict(figures['faults'] == 0)}")
    lines.append(
        f"  throughput  {figures['throughput']:.1%} of generate   (promised: {MIN_THROUGHPUT:.0%})"
        f"{_verdict(figures['throughput'] >= MIN_THROUGHPUT)}"
    )
    lines.append(
        f"  left over   {figures['leftovers']} requests or blocks   (promised: {MAX_LEFTOVER})"
        f"{_verdict(figures['leftovers'] <= MAX_LEFTOVER)}"
    )
    sizes = " | ".join(", ".join(f"{s / 1e6:.0f}" for s in each) for each in (figures["resident"], cost["resident"]))
    lines.append(
        f"  memory      {sizes} MB after each round, with and without a model: {figures['growth'] / 1e6:+.1f} MB   "
        f"(promised: at most {MAX_GROWTH / 1e6:+.0f}){_verdict(figures['growth'] <= MAX_GROWTH)}"
    )
    for name in ("ttft", "tpot"):
        seen = sorted(value for one in rounds for value in one[name])
        parts = ", ".join(f"{share:.0%} {1e3 * _percentile(seen, share):.0f} ms" for share in (0.5, 0.9, 0.95, 0.99))
        lines.append(f"  {name.upper()}        seen by streaming clients: {parts}")
    lines.append(
        f"  own cost    without a model {cost['requests_per_second']:.0f} requests/s, {cost['tokens_per_second']:.0f} "
        f"tokens/s; processor time a token: {cost['server_ms_per_token']:.3f} ms of the server, "
        f"{cost['clients_ms_per_token']:.3f} ms of the clients, {cost['engine_ms_per_token']:.3f} ms of the engine"
    )
    return lines


def _percentile(values: Sequence[float], share: float) -> float:
    return values[round(share * (len(values) - 1))]


def _verdict(holds: bool) -> str:
    return "  ok" if holds else "  NOT MET"


if __name__ == "__main__":
    main()
