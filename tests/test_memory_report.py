"""The memory report adds up: every byte has one owner, shared ones count once, and looking leaves no trace."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from tiny_models import random_ids, save_tiny

from llmfromscratch import LLM, SamplingParams, kv_cache, memory_report
from llmfromscratch.errors import RequestError
from llmfromscratch.memory_report import memory

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def engine(folder: Path, **settings) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", **{"kv_cache_memory": 10**6, **settings})


@pytest.mark.parametrize("layers", ["plain", "fused"])
def test_weights_that_share_memory_count_once(folder, layers):
    llm = engine(folder, layers=layers)
    config = llm.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    expected = {
        "embedding and head": config.vocab_size * config.hidden_size,  # the head is tied
        "attention": config.num_layers * config.hidden_size * (2 * queries + 2 * keys),
        "feed-forward": config.num_layers * config.hidden_size * 3 * config.intermediate_size,
        "norms": (2 * config.num_layers + 1) * config.hidden_size,
    }
    report = memory(llm, tokens=8)
    assert {owner.name: owner.allotted for owner in report.owners if owner.group == "weights"} == {
        name: 4 * numbers for name, numbers in expected.items()
    }


def test_the_cache_is_what_requests_hold_what_is_kept_and_what_is_free(folder):
    llm = engine(folder)
    config = llm.config
    block = 16 * 4 * kv_cache.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 1)
    report = memory(llm, tokens=8)
    assert report.of("cache", "free").allotted == len(llm.cache.allocator.ref_counts) * block
    stream = llm.stream(random_ids(40), PARAMS)
    next(stream)
    report = memory(llm, tokens=8)
    assert report.of("cache", "in use").allotted == pytest.approx(3 * block, abs=1)
    stream.close()
    report = memory(llm, tokens=8)
    assert report.of("cache", "in use").allotted == 0
    assert report.of("cache", "kept for prefixes").allotted == pytest.approx(2 * block, abs=1)  # the full ones


def test_the_resident_bytes_of_all_owners_are_those_of_the_process(folder):
    report = memory(engine(folder), tokens=8)
    assert sum(owner.resident for owner in report.owners if owner.group != "step") == report.total
    assert report.of("rest").resident > 10**7  # torch alone
    assert all(owner.resident <= owner.allotted for owner in report.owners)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="only Linux tells")
def test_memory_that_nobody_has_written_is_allotted_and_not_resident():
    # fresh memory of the system: what torch hands out may have been somebody's before
    stored = torch.frombuffer(mmap.mmap(-1, 32 * 2**20), dtype=torch.uint8)
    start = stored.data_ptr()
    assert memory_report._resident(start, start + stored.nbytes, CPU) < 4 * 2**20
    stored[: 16 * 2**20] = 1
    found = memory_report._resident(start, start + stored.nbytes, CPU)
    assert 16 * 2**20 <= found < 20 * 2**20  # whole pages, which may be large ones


def test_the_peak_of_a_step_is_what_is_held_at_once():
    def compute():
        first = torch.empty(1_000_000, dtype=torch.uint8)
        second = torch.empty(2_000_000, dtype=torch.uint8)
        del first
        third = torch.empty(500_000, dtype=torch.uint8)
        return second, third

    assert memory_report._peak(compute, CPU) == 3_000_000


def test_a_longer_prefill_needs_more_for_a_moment(folder):
    llm = engine(folder)
    peaks = [
        memory(llm, tokens=tokens).of("step", f"peak of a prefill, {tokens} tokens").allotted for tokens in (8, 64)
    ]
    vocab = 4 * llm.config.vocab_size
    assert peaks[1] > 2 * peaks[0] > 2 * vocab


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache": "static"},
        {"kv_cache": "concat", "kv_cache_memory": None},
        {"window": 8, "kv_cache_memory": None},
    ],
    ids=str,
)
def test_looking_leaves_no_trace_in_any_cache(folder, settings):
    llm, prompt = engine(folder, **settings), random_ids(30)
    before = llm.generate(prompt, PARAMS)[0].token_ids
    free, kept = [getattr(getattr(llm.cache, "allocator", None), name, None) for name in ("free", "kept")]
    stood = (list(free or ()), list(kept or ()))
    report = memory(llm, tokens=20)
    assert (list(free or ()), list(kept or ())) == stood
    assert llm.cache.length(-1) == 0
    assert getattr(llm.cache, "prefix_sharing", True)
    assert report.of("cache").allotted > 0 or not stood[0]
    assert llm.generate(prompt, PARAMS)[0].token_ids == before
    if not settings:
        llm.cache.audit()


def test_the_table_has_a_line_for_each_owner_and_one_for_the_sum(folder):
    report = memory(engine(folder), tokens=8)
    lines = str(report).splitlines()
    assert len(lines) == len(report.owners) + 2
    assert lines[0].split() == ["allotted,", "MB", "resident,", "MB", "share"]
    assert lines[-1].startswith("sum ") and lines[-1].endswith("100.0%")
    assert max(map(len, lines)) < 100
    marked = report._repr_markdown_().splitlines()
    assert len(marked) == len(lines) + 1
    assert {line.count("|") for line in marked} == {6}


def test_layers_on_several_devices_are_refused_in_a_sentence(folder):
    llm = engine(folder, layers="plain")
    llm.model.layers[0].to("meta")
    with pytest.raises(RequestError, match="the model lies on 2 devices"):
        memory(llm)
