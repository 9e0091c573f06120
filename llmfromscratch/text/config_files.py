"""The small files beside a tokenizer: tokenizer_config.json, generation_config.json and the chat templates'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfromscratch.text.tokenizer_data import AddedToken


@dataclass(frozen=True)
class ConfigFiles:
    """bos, eos, pad: the texts of these tokens, or None. more_eos_ids: end tokens that generation_config.json names.

    add_bos, add_eos: what is put around every text; None where the files do not say. added: tokens by their flags.
    chat_template: the template, or several by their names.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    more_eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    added: tuple[AddedToken, ...] = ()
    chat_template: str | Mapping[str, str] | None = None


def read_config_files(folder: Path) -> ConfigFiles:
    """What the files in a folder say; those that are not there say nothing.

    Raises ValueError and the like for damaged ones.
    """
    config, generation = read_json(folder / "tokenizer_config.json"), read_json(folder / "generation_config.json")
    ends = generation.get("eos_token_id")
    decoder = config.get("added_tokens_decoder") or {}
    return ConfigFiles(
        bos=_text(config.get("bos_token")),
        eos=_text(config.get("eos_token")),
        pad=_text(config.get("pad_token")),
        more_eos_ids=tuple(int(index) for index in (ends if isinstance(ends, list) else [ends]) if index is not None),
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
        added=tuple(added_token(entry, index) for index, entry in decoder.items()),
        chat_template=_templates(config, folder),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file. Raises ValueError for anything else."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} holds a {type(content).__name__} where an object should be")
    return content


def added_token(entry: Mapping[str, Any], index: Any) -> AddedToken:
    """An added token as tokenizer.json and tokenizer_config.json write it down."""
    flags = {
        name: bool(entry.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
    }
    return AddedToken(entry["content"], int(index), **flags)


def _text(token: Any) -> str | None:
    """A special token in tokenizer_config.json is its text, or an object that holds it."""
    text = token["content"] if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the special token {text!r} is no text")
    return text


def _templates(config: Mapping[str, Any], folder: Path) -> Any:
    """The chat template, or several by name: files of their own, or in the config, where older ones list them."""
    named = config.get("chat_template")
    if isinstance(named, list):
        named = {entry["name"]: entry["template"] for entry in named}
    alone = folder / "chat_template.jinja"
    if alone.exists():
        named = alone.read_text(encoding="utf-8")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not more:
        return named
    default = {} if named is None else named if isinstance(named, dict) else {"default": named}
    return {**default, **{file.stem: file.read_text(encoding="utf-8") for file in more}}
