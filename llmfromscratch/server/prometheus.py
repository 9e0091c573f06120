"""The server's figures for /metrics: the engine's own, read when asked for, and what clients saw of the server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmfromscratch.engine import LLM

_PREFIX = "llmfromscratch"
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # seconds
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
ENDS, LIMITS, WHYS = ("stop", "length", "abort"), ("queue", "streams"), ("went away", "read no more")
_NOW = {
    "running": "Requests that are being computed.",
    "waiting": "Requests in the engine's queue.",
    "blocks_used": "Blocks of the cache that requests hold.",
    "blocks_total": "Blocks of the cache.",
}
_TOTALS = {
    "steps": "Steps of the engine.",
    "busy_seconds": "Seconds that the engine's steps took.",
    "scheduling_seconds": "Seconds of them that planning took.",
    "tokens": "Tokens generated.",
    "finished": "Requests that got their answer.",
    "aborted": "Requests that were given up.",
    "preemptions": "Times that a request lost its memory to others.",
    "prefix_hits": "Prompt tokens that were found in the cache.",
}


class Figures:
    """The figures of one server, in a registry of its own: several may run in one process.

    ttft, tpot, duration: histograms in seconds, as the server saw them: from a request's admission, its time in the
    queue included. The engine's totals begin anew when one of its parts is exchanged, as a restarted server's do.
    """

    def __init__(self, llm: LLM):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm))
        self.ttft = self._histogram("ttft_seconds", "Time to first token.", _TTFT)
        self.tpot = self._histogram("tpot_seconds", "Time per output token after the first.", _TPOT)
        self.duration = self._histogram("answer_seconds", "Time to the end of an answer.", _WHOLE)
        self.prompt_tokens = self._histogram("prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.answer_tokens = self._histogram("answer_tokens", "Tokens of an answer.", _TOKENS)
        self.answers = self._counter("answers", "Answers by how they ended.", "finish_reason", ENDS)
        self.refused = self._counter("refused", "Requests refused for want of room, by the limit.", "limit", LIMITS)
        self.gone = self._counter("clients_gone", "Answers given up for their client, by what it did.", "why", WHYS)
        self.streams = Gauge(f"{_PREFIX}_streams", "Answers that are being streamed.", registry=self.registry)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", says, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, says: str, label: str, values: tuple[str, ...]) -> Counter:
        counter = Counter(f"{_PREFIX}_{name}", says, [label], registry=self.registry)
        for value in values:
            counter.labels(value)  # from the beginning at 0, so that a first rise is seen as one
        return counter


class _EngineCollector(Collector):
    """Reads `LLM.metrics` at the moment of asking."""

    def __init__(self, llm: LLM):
        self.llm = llm

    def collect(self) -> Iterator[Metric]:
        metrics = self.llm.metrics
        for name, says in _NOW.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", says, value=getattr(metrics, name))
        for name, says in _TOTALS.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", says, value=getattr(metrics, name))
