"""The engine's first law holds for quantized models: greedy tokens are the same whichever way they are computed.

A kernel is pinned, so that the same arithmetic is compared: "plain" in float64, where no near tie can decide, and
"compiled" in float32, where tokens are compared that are far from one.
"""

from __future__ import annotations

import pytest
import torch
from checkpoint_writers import FAMILIES, TYPES, random_model, write_gguf
from test_equality_chain import anew, greedy, same, side_by_side
from tiny_models import CACHES, new_cache, save_tiny, tiny_model
from transformers import LlamaConfig

from llmfromscratch import LLM, SamplingParams, attention_backends, drafters, fused_layers, model
from llmfromscratch.quantized_model import pin, quantize

KINDS = ("int8", "int4", "nf4", "w8a8", "native")
TINY = {"hidden_size": 288, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
STEPS = SamplingParams(max_tokens=6, ignore_eos=True)


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    sizes = {**FAMILIES["llama"].to_dict(), "head_dim": 16, "tie_word_embeddings": True}
    kinds = {"v_proj": TYPES.Q8_0, "gate_proj": TYPES.Q4_0}

    def type_of(name, array):
        return next((kind for part, kind in kinds.items() if part in name), TYPES.Q4_1)

    network = random_model(LlamaConfig(**sizes))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" not in name:
                weight.mul_(0.3)  # so that layers add to the stream, and do not drown it
    write_gguf(path, network, type_of)
    return path


def network_of(kind: str, file, dtype: torch.dtype) -> model.Model:
    if kind == "native":
        return LLM(file, dtype=dtype, device="cpu", quantization="native", layers="plain", kv_cache="none").model
    own = tiny_model(dtype=dtype, **TINY)
    quantize(own, kind)
    return own


@pytest.fixture(scope="module")
def networks(gguf_file) -> dict[str, model.Model]:
    found = {kind: network_of(kind, gguf_file, torch.float64) for kind in KINDS}
    for network in found.values():
        pin(network, "plain")
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_in_any_chunks_says_what_is_said_without(networks, kind, cache):
    network = networks[kind]
    for seed, cuts in ((0, ()), (1, (1,)), (2, (5, 20, 23)), (3, range(3, 26, 3))):
        prompt = ids(26, seed)
        same(greedy(network, new_cache(cache, network), prompt, cuts=cuts), anew(network, prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["concat", "static", "paged, blocks of 3", "paged, scattered"])
def test_alone_and_in_any_ragged_batch_say_the_same(networks, kind, cache):
    network, late = networks[kind], [0, 2, 2, 3]
    prompts = [ids(length, seed) for seed, length in enumerate((17, 1, 30, 8))]
    prompts[3] = prompts[0][:12] + prompts[3]  # shares a prefix
    said = side_by_side(network, new_cache(cache, network), prompts, 4, late)
    for one, prompt in zip(said, prompts, strict=True):
        same(one, anew(network, prompt))


WAYS = {
    "paged": {},
    "blocks of 3": {"block_size": 3},
    "static cache": {"kv_cache": "static"},
    "no cache": {"kv_cache": "none"},
    "static scheduler": {"scheduler": "static"},
    "chunks of 5": {"max_batch_tokens": 5},
    "two at a time": {"max_requests": 2},
    "so little memory that requests are preempted": {"block_size": 4},
    "drafts": {"speculative": "lookup", "max_requests": 1},
    "drafts of fewer layers": {"speculative": drafters.LayerSkip(1, cost=0), "max_requests": 1},
}


@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8", "native"])
def test_every_way_of_the_engine_says_the_same(kind, gguf_file, tmp_path):
    folder = gguf_file if kind == "native" else save_tiny(tmp_path, **{**TINY, "vocab_size": 259})
    prompts = [ids(20), ids(20), ids(3, 1) * 6, ids(1, 2), ids(20)[:10] + ids(4, 3)]
    answers, metrics = {}, {}
    for name, settings in WAYS.items():
        if "preempted" in name:
            of_a_token = 2 * 2 * (2 * 16 if kind == "native" else 3 * 32) * 8
            settings = {**settings, "kv_cache_memory": 40 * of_a_token}
        llm = LLM(folder, dtype="float64", device="cpu", quantization=kind, **settings)
        pin(llm.model, "plain")
        llm.core.speculation.row_cost = 0.0  # drafts wherever they may be
        said = llm.generate(prompts, STEPS)
        answers[name], metrics[name] = [one.token_ids for one in said], [one.metrics for one in said]
    expected = [anew(llm.model, prompt, 6)[0] for prompt in prompts]
    assert answers == dict.fromkeys(WAYS, expected)
    # and what the ways are named after has happened
    assert sum(one.preemptions for one in metrics["so little memory that requests are preempted"]) > 0
    assert sum(one.prefix_hits for one in metrics["chunks of 5"]) > 0
    assert sum(one.drafted for one in metrics["drafts of fewer layers"]) > 0


# integer products have no compiled layers
@pytest.mark.parametrize(
    ("layers", "kind"),
    [*(("plain", kind) for kind in KINDS), *(("compiled", kind) for kind in KINDS if kind != "w8a8")],
)
def test_compiled_kernels_and_layers_say_the_same_in_float32(networks, gguf_file, kind, layers):
    network = network_of(kind, gguf_file, torch.float32)
    fused_layers.use(layers, network)
    pin(network, "auto" if kind == "w8a8" else "compiled")
    for seed, cuts in ((3, ()), (4, (5, 20, 23))):
        prompt = ids(26, seed)
        expected = anew(networks[kind], prompt)
        top = expected[1].topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 5e-3, "a near tie would tell nothing; choose another seed"
        for attention in ("auto", "plain"):
            attention_backends.use(attention, network.layers)
            for cache in ("concat", "static", "paged, blocks of 8", "paged, scattered"):
                said = greedy(network, new_cache(cache, network), prompt, cuts=cuts)
                assert said[0] == expected[0], (attention, cache)
                if kind != "w8a8":  # whose inputs may round to another code
                    torch.testing.assert_close(said[1].double(), expected[1], rtol=0, atol=5e-3)
