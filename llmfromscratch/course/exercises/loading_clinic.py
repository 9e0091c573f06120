"""Chapter 1's bug hunts: each a broken function, the symptom it causes on a real or small model, and its check."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.config import ModelConfig
from llmfromscratch.course.comparing import Case, compare

# ---- 1.a ---------------------------------------------------------------------------------------------------------

NONSENSE_STORY = """
A user has written the loading of a GGUF file. Every tensor has its name and its shape, nothing complains, and the model
writes English. It just makes no sense. The function below settles the order of the rows of every tensor.

How to find it: compare with a model that is right, operation by operation. `diverges_at` does that; its answer stands
below the two texts. Everything before the place it names is right.
"""


def settle_rows(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Rows of a GGUF Llama tensor, under its canonical name, in the order that the model expects.

    Queries have config.num_heads heads, keys config.num_kv_heads; other tensors come back as they are.
    """
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def show_nonsense() -> None:
    """The right model and one whose rows went through `settle_rows` continue a text; and where the two part."""
    from llmfromscratch import LLM, SamplingParams, diverges_at

    right, wrong = LLM(dtype="float32"), LLM(dtype="float32")
    with torch.no_grad():
        for name, parameter in wrong.model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.copy_(settle_rows(name, _interleaved(name, parameter, right.config), right.config))
    prompt = "Once upon a time"
    for label, llm in (("right", right), ("broken", wrong)):
        print(f"{label}: {llm.generate(prompt, SamplingParams(max_tokens=24))[0].text!r}")
    print(f"\ndiverges_at: {diverges_at(right, wrong, prompt)}")


def _interleaved(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """The rows in the file's order again."""
    heads = config.num_heads if "q_proj" in name else config.num_kv_heads
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def check_settle_rows(settle: Callable[[str, Tensor, ModelConfig], Tensor]) -> None:
    """Every tensor of one layer, in the sizes of a small model with fewer key heads than query heads."""
    config = ModelConfig("llama", 32, 24, 40, 1, num_heads=6, num_kv_heads=2, head_dim=4, context_length=32)
    loading = learner_engine.reference("loading")
    shapes = {n: s for n, s in loading.expected_shapes(config).items() if n.startswith("layers.0.")}

    def right(name: str, weight: Tensor, config: ModelConfig) -> Tensor:
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        return weight if heads is None else loading.unpermute(weight, heads)

    compare(
        settle,
        right,
        [Case(name, name, torch.randn(*shape), config) for name, shape in shapes.items()],
        expected="the rows of every query and key head in half-split order, all other tensors untouched",
        mistakes=[
            ("no row moves: the function never meets the names it waits for", settle_rows),
            ("the rows of k are still as they were in the file; rotary embedding turns keys as well",
             lambda name, weight, config: weight if "k_proj" in name else right(name, weight, config)),
            ("the rows of q are still as they were in the file",
             lambda name, weight, config: weight if "q_proj" in name else right(name, weight, config)),
        ],
    )  # fmt: skip


# ---- 1.b ---------------------------------------------------------------------------------------------------------

NORM_STORY = """
"My RMSNorm agrees with the reference on random numbers, to five digits. In the model the answers are a little worse,
and on one embedding it is far off." Look at which inputs it goes wrong for.
"""


def normalize(x: Tensor, eps: float = 1e-5) -> Tensor:
    """x divided by its root mean square over the last dimension."""
    mean_square = x.pow(2).mean(dim=-1, keepdim=True)
    return x / (mean_square.sqrt() + eps)


def show_norm() -> None:
    """The relative error of `normalize` for inputs of falling size."""
    torch.manual_seed(0)
    x = torch.randn(4, 576)
    print("size of the input   relative error")
    for size in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
        want = _normalized(size * x)
        error = (normalize(size * x) - want).abs().max() / want.abs().max()
        print(f"{size:17g}   {error:.1e}")


def _normalized(x: Tensor, eps: float = 1e-5) -> Tensor:
    return (x.double() * (x.double().pow(2).mean(dim=-1, keepdim=True) + eps) ** -0.5).to(x.dtype)


def check_normalize(mended: Callable[[Tensor], Tensor]) -> None:
    """On inputs of all sizes."""
    generator = torch.Generator().manual_seed(3)
    compare(
        mended,
        _normalized,
        [
            Case(f"numbers of about {size:g}", size * torch.randn(2, 64, generator=generator))
            for size in (1, 1e-3, 1e-5)
        ],
        expected="x / sqrt(mean(x²) + eps), also where mean(x²) is as small as eps",
        mistakes=[
            ("epsilon is still outside the root", normalize),
            ("epsilon is gone; without it a vector of zeros becomes NaN, and small ones are blown up",
             lambda x: x / x.pow(2).mean(dim=-1, keepdim=True).sqrt()),
        ],
    )  # fmt: skip


# ---- 1.c ---------------------------------------------------------------------------------------------------------

PREFIX_STORY = """
"The file surely holds everything, other programs load it. My loader says that half of it is missing." The key report
lists what is missing and what is unexpected. Put the two lists side by side.
"""
_SAVED_NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


def without_prefix(name: str) -> str:
    """A name from a Hugging Face file without the leading "model."."""
    return name.lstrip("model.")


def show_prefix() -> None:
    """The key report on a small model whose names went through `without_prefix`."""
    config = ModelConfig("llama", 32, 24, 40, 1, num_heads=6, num_kv_heads=2, head_dim=4, context_length=32)
    loading = learner_engine.reference("loading")
    saved = {
        name if name == "lm_head.weight" else f"model.{name}": s for name, s in loading.expected_shapes(config).items()
    }
    print(loading.check_keys({without_prefix(name): shape for name, shape in saved.items()}, config))


def check_without_prefix(mended: Callable[[str], str]) -> None:
    """On names whose next letters are in the prefix as well."""
    compare(
        mended,
        lambda name: name[6:] if name[:6] == "model." else name,
        [Case(repr(name), name) for name in (*_SAVED_NAMES, "lm_head.bias", "model.model.norm.weight", "modelling.x")],
        expected='the name without one leading "model.", and nothing else taken away',
        mistakes=[
            ("str.lstrip takes a set of letters, not a prefix", without_prefix),
            ('"model." is taken out wherever it stands', lambda name: name.replace("model.", "")),
            ("six characters are cut from every name, whatever they are", lambda name: name[6:]),
        ],
    )
