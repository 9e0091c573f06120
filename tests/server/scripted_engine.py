"""An LLM whose answers are known beforehand: a tiny model computes, caches and takes its time, and a script speaks."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from tiny_models import CHAT_TEMPLATE, save_tiny

from llmfromscratch import LLM
from llmfromscratch.batch import Batch

END = 2  # of the tiny checkpoints: "<|end|>"
__all__ = ["CHAT_TEMPLATE", "scripted"]


class Scripted(torch.nn.Module):
    """In the place of a model: computes like it, then makes the next token of the script the likeliest.

    seconds: that a step takes at least. stopped: the steps wait as long as it is set.
    """

    def __init__(self, model: torch.nn.Module, script: list[int], seconds: float):
        super().__init__()
        self.model, self.script, self.seconds = model, script, seconds
        self.stopped = False
        self.given: dict[int, int] = {}  # request id -> tokens that it has got

    def forward(self, batch: Batch, cache) -> torch.Tensor:
        while self.stopped:
            time.sleep(0.005)
        time.sleep(self.seconds)
        logits = torch.zeros_like(self.model(batch, cache))
        wanted = set(batch.logit_rows.tolist())
        speaking = [span.request_id for span in batch.spans if span.first_row + span.length - 1 in wanted]
        for row, request in enumerate(speaking):
            place = self.given.get(request, 0)
            self.given[request] = place + 1
            logits[row, self.script[place] if place < len(self.script) else END] = 100.0
        return logits


def scripted(folder: Path, text: str, seconds: float = 0.0, **arguments) -> LLM:
    """An LLM that says `text` to everybody, one byte a token, and then ends."""
    save_tiny(folder, max_position_embeddings=2048)
    llm = LLM(folder, dtype="float32", device="cpu", **{"kv_cache_memory": 4_000_000, **arguments})
    llm.core.model = Scripted(llm.model, llm.tokenizer.encode(text), seconds)
    return llm
