"""What the files say about a tokenizer: vocabulary, merges, special tokens, splitting rule, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfromscratch.errors import TokenizerError

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class TokenizerData:
    """vocab: ids by token string; merges: pairs, best first; special: ids of control tokens by their text.

    split_digits: each digit is a pre-token of its own, before GPT-2's splitting rule.
    """

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    special: dict[str, int]
    split_digits: bool
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit each other."""
        tokens = {**self.vocab, **self.special}
        if not all(isinstance(token, str) for token in [*tokens, *(half for pair in self.merges for half in pair)]):
            raise ValueError("tokens and merges must be text")
        if not tokens or "" in self.special:
            raise ValueError("there are no tokens, or a control token is empty")
        ids = set(tokens.values())
        for index in (self.bos_id, *self.eos_ids):
            if index is not None and index not in ids:
                raise ValueError(f"the begin or end token {index} is outside the vocabulary")
        if min(ids) < 0:
            raise ValueError(f"the token id {min(ids)} is negative")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError(f"the chat template is a {type(self.chat_template).__name__}, not text")


def read_gguf_tokenizer(metadata: Mapping[str, Any], file: Path) -> TokenizerData:
    """From GGUF metadata `tokenizer.*`. Raises TokenizerError for a damaged one or a kind not supported."""
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or rule not in ("gpt-2", "smollm"):
        raise TokenizerError(
            f"{file}: tokenizer {kind!r} with splitting rule {rule!r} is not supported yet; "
            "supported: 'gpt2' with 'gpt-2' or 'smollm'."
        )
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise TokenizerError(f"{file}: a begin token before every text (add_bos_token) is not supported yet.")
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        types = [int(kind) for kind in metadata["tokenizer.ggml.token_type"]]
        if not isinstance(tokens, list) or len(tokens) != len(types):
            raise ValueError(f"{len(types)} token types for {len(tokens)} tokens")
        merges = [(left, right) for left, right in (pair.split(" ") for pair in metadata["tokenizer.ggml.merges"])]
        named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        ids = {name: int(index) for name, index in named.items() if index is not None}
        return TokenizerData(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            special={tokens[index]: index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)},
            split_digits=rule == "smollm",
            bos_id=ids.get("bos"),
            eos_ids=tuple(dict.fromkeys(index for name, index in ids.items() if name != "bos")),
            chat_template=metadata.get("tokenizer.chat_template"),
        )
    except _DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer metadata is damaged or incomplete ({error!r}).") from error


def read_json_tokenizer(file: Path) -> TokenizerData:
    """From `tokenizer.json`, with `tokenizer_config.json` and `chat_template.jinja` beside it where they exist."""
    try:
        data, config = _json(file), _json(file.with_name("tokenizer_config.json"))
        kind = data["model"]
        _refuse_other_rules(data, file)
        special = {entry["content"]: int(entry["id"]) for entry in data.get("added_tokens", [])}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in kind["merges"]]
        bos, eos = (special.get(_content(config.get(key))) for key in ("bos_token", "eos_token"))
        template = file.with_name("chat_template.jinja")
        return TokenizerData(
            vocab={str(token): int(index) for token, index in kind["vocab"].items()},
            merges=[(left, right) for left, right in pairs],
            special=special,
            split_digits=_splits_digits(data.get("pre_tokenizer"), file),
            bos_id=bos,
            eos_ids=() if eos is None else (eos,),
            chat_template=template.read_text(encoding="utf-8") if template.exists() else _default(config),
        )
    except _DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer is damaged or incomplete ({error!r}).") from error


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _content(token: Any) -> Any:
    """A special token in tokenizer_config.json is its text, or an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _default(config: Mapping[str, Any]) -> Any:
    """The chat template; older files list several by name."""
    templates = config.get("chat_template")
    if not isinstance(templates, list):
        return templates
    return {entry["name"]: entry["template"] for entry in templates}["default"]


def _refuse_other_rules(data: Mapping[str, Any], file: Path) -> None:
    """Refuses by name what would change the ids and is not followed here."""
    kind, after = data["model"], data.get("post_processor") or {"type": "ByteLevel"}
    found = {"a model of type": None if kind["type"] == "BPE" else kind["type"], "normalizer": data.get("normalizer")}
    found["post_processor"] = None if after["type"] == "ByteLevel" else after["type"]
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        found[name] = kind.get(name)
    for name, value in found.items():
        if value:
            raise TokenizerError(f"{file}: {name} {value!r} is not supported yet; plain byte-level BPE is.")


def _splits_digits(rule: Any, file: Path) -> bool:
    """Whether digits are split one by one; refuses splitting rules other than GPT-2's byte level after that."""
    steps = rule.get("pretokenizers", [rule]) if isinstance(rule, dict) else [{}]
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    byte_level = {"use_regex": True, **steps[-1]}
    digits = [step for step in steps[:-1] if step.get("type") == "Digits" and step.get("individual_digits")]
    if any(byte_level.get(key) != value for key, value in wanted.items()) or len(digits) < len(steps) - 1:
        raise TokenizerError(
            f"{file}: the splitting rule {rule!r} is not supported yet; supported is GPT-2's byte level, "
            "with or without splitting digits one by one."
        )
    return bool(digits)
