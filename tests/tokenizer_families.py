"""Small tokenizers of every supported family, trained by the tokenizers library with its rules: the oracles."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from hard_texts import HARD_TEXTS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmfromscratch import tokenizer
from llmfromscratch.text import tokenizer_files

# The rules as the models' own tokenizer.json files write them.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|im_end|><|im_end|>"]
KEPT = ["<think>", "</think>"]
CORPUS = [*HARD_TEXTS, "the quick brown fox jumps over the lazy dog, and then it's time to go there again. " * 3] * 3


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def begin(token: str = "<s>") -> Any:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, CONTROL.index(token))])


def byte_level(before: Any, ignore_merges: bool = False, form: Any = None, after: Any = None) -> tokenizers.Tokenizer:
    """Every byte, 500 merges, and with ignore_merges some words that no merge leads to."""
    other = tokenizers.Tokenizer(models.BPE())
    other.pre_tokenizer, other.decoder = before, decoders.ByteLevel()
    if form is not None:
        other.normalizer = form
    trainer = trainers.BpeTrainer(
        vocab_size=760,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=CONTROL,
        show_progress=False,
    )
    other.train_from_iterator(CORPUS, trainer)
    content = json.loads(other.to_str())
    if ignore_merges:
        content["model"]["ignore_merges"] = True
        for word in ("Ġquick", "Ġlazy", "ĠĠĠ", "123", "Hello", "Ã©"):
            content["model"]["vocab"].setdefault(word, len(content["model"]["vocab"]))
    other = tokenizers.Tokenizer.from_str(json.dumps(content))
    other.add_tokens([AddedToken(token, special=False, normalized=False) for token in KEPT])
    other.post_processor = after or processors.ByteLevel(trim_offsets=False)
    return other


def visible_spaces(normalizer: Any, before: Any, strip: bool = True, after: Any = None, words: bool = True) -> Any:
    """SentencePiece's way: byte tokens, an alphabet, 300 merges. words: no merge reaches into the next word."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        trained.normalizer = normalizer
    if words or normalizer is None:
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=words)
    coded = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 560, limit_alphabet=200, special_tokens=[*CONTROL, *coded], show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][: len(CONTROL)]
    content["pre_tokenizer"] = None
    other = tokenizers.Tokenizer.from_str(json.dumps(content))
    if before is not None:
        other.pre_tokenizer = before
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    other.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    other.post_processor = after or begin()
    return other


def prepend() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: byte_level(digits()),
    "llama-bpe": lambda: byte_level(
        split(LLAMA3_WORDS), ignore_merges=True, after=processors.Sequence([processors.ByteLevel(), begin()])
    ),
    "qwen2": lambda: byte_level(split(QWEN2_WORDS), form=normalizers.NFC()),
    "tekken": lambda: byte_level(split(TEKKEN_WORDS), ignore_merges=True),
    "Llama 2": lambda: visible_spaces(prepend(), None),
    "Llama 2, merges across words": lambda: visible_spaces(prepend(), None, words=False),
    "Mistral": lambda: visible_spaces(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "Metaspace always": lambda: visible_spaces(None, pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "Metaspace never": lambda: visible_spaces(
        None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False), strip=False
    ),
}
BYTE_LEVEL = ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"]
VISIBLE_SPACES = [name for name in FAMILIES if name not in BYTE_LEVEL]


@cache
def oracle(family: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a family."""
    return FAMILIES[family]()


def saved(other: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Its tokenizer.json, with a config that names the begin and end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    other.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder / "tokenizer.json"


def gguf_metadata(family: str) -> dict[str, Any]:
    """The metadata that a GGUF file of a byte-level family has."""
    model = json.loads(oracle(family).to_str())["model"]
    added = {KEPT[0]: 4, KEPT[1]: 4, **dict.fromkeys(CONTROL, 3)}
    vocab = {**model["vocab"], **{token: oracle(family).token_to_id(token) for token in KEPT}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert list(map(vocab.__getitem__, tokens)) == list(range(len(tokens)))
    fields = {
        "model": "gpt2",
        "pre": family,
        "tokens": tokens,
        "token_type": np.array([added.get(token, 1) for token in tokens], dtype=np.int32),
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": CONTROL.index("<s>"),
        "eos_token_id": CONTROL.index("</s>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def from_gguf(family: str) -> tokenizer.Tokenizer:
    """Ours, from GGUF metadata."""
    return tokenizer.Tokenizer(tokenizer_files.read_gguf_tokenizer(gguf_metadata(family), Path("model.gguf")))


def from_json(family: str, folder: Path) -> tokenizer.Tokenizer:
    """Ours, from the saved tokenizer.json."""
    return tokenizer.Tokenizer(tokenizer_files.read_json_tokenizer(saved(oracle(family), folder)))
