"""Chapter 7's cache without frames is the engine's, but for the frames."""

from __future__ import annotations

import pytest
import torch

from llmfromscratch import LLM, calibration, evaluation
from llmfromscratch.course.sketches.ch07 import without_frames


@pytest.mark.model
def test_without_frames_keys_are_kept_as_they_come_and_the_damage_is_larger(smollm2_gguf):
    llm = LLM(smollm2_gguf, dtype="float32", layers="plain", kv_cache_dtype="int4")
    text = calibration.windows(llm.tokenizer, calibration.topics()[1], count=1, length=256)
    reference = evaluation.Reference(LLM(smollm2_gguf, dtype="float32", layers="plain"), text)
    framed = evaluation.damage(reference, llm).kl
    assert without_frames(llm) is llm
    codec = llm.core.cache.codec
    for frames in codec.frames:
        middle, spread = frames.unbind(1)
        assert not middle.any() and (spread == 1).all()
    keys = torch.randn(5, llm.config.num_kv_heads, llm.config.head_dim, generator=torch.Generator().manual_seed(0))
    rows = codec.encode(3, keys, keys, torch.arange(5))
    assert torch.equal(*codec.decode(3, *rows))  # keys are treated as values are
    assert evaluation.damage(reference, llm).kl > 1.5 * framed
