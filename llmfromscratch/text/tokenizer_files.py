"""What the files say about a tokenizer: tokenizer.json, GGUF metadata, or tokenizer.model of either kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmfromscratch.errors import CheckpointError, TokenizerError
from llmfromscratch.formats.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_sentencepiece,
)
from llmfromscratch.text import splitting
from llmfromscratch.text.config_files import ConfigFiles, read_config_files, read_json
from llmfromscratch.text.tokenizer_data import AddedToken, TokenizerData
from llmfromscratch.text.tokenizer_json import DAMAGED, read_json_tokenizer
from llmfromscratch.text.tokenizer_ranks import is_list_of_ranks, read_ranks

__all__ = ["TokenizerData", "read_gguf_tokenizer", "read_json_tokenizer", "read_model_tokenizer", "read_tokenizer"]

GGUF_COPY = "tokenizer_gguf.json"  # what a GGUF file says of its tokenizer, beside weights that came out of one
_ADDED_TYPES = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}  # GGUF has SentencePiece's types; is it special?


def read_tokenizer(folder: Path) -> TokenizerData | None:
    """From tokenizer.json in a folder, else from tokenizer.model, else from GGUF_COPY; None where none is there.

    Raises TokenizerError for a damaged one, and for a rule that is not known here, by name.
    """
    if (folder / "tokenizer.json").is_file():
        return read_json_tokenizer(folder / "tokenizer.json")
    model = folder / "tokenizer.model"
    if model.is_file():
        return read_model_tokenizer(model)
    copy = folder / GGUF_COPY
    return read_gguf_tokenizer(_read_copy(copy), copy) if copy.is_file() else None


def _read_copy(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer is damaged or incomplete ({error!r}).") from error


def read_gguf_tokenizer(metadata: Mapping[str, Any], file: Path) -> TokenizerData:
    """From GGUF metadata `tokenizer.*`. Raises TokenizerError for a damaged one, or a kind or rule not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    readers = {"gpt2": _gguf_byte_level, "llama": _gguf_sentencepiece}
    if kind not in readers:
        raise TokenizerError(f"{file}: the tokenizer {kind!r} is not supported; supported are 'gpt2' and 'llama'.")
    rule = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and rule not in splitting.NAMED_RULES:
        raise TokenizerError(
            f"{file}: the splitting rule {rule!r} (tokenizer.ggml.pre) is not supported; supported are "
            f"{', '.join(splitting.NAMED_RULES)}. The model's own folder, with its tokenizer.json, may work."
        )
    try:
        fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        tokens, types = fields["tokens"], [int(kind) for kind in fields["token_type"]]
        if not isinstance(tokens, list) or len(tokens) != len(types):
            raise ValueError(f"{len(types)} token types for {len(tokens)} tokens")
        return readers[kind](fields, tokens, types)
    except DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer metadata is damaged or incomplete ({error!r}).") from error


def _gguf_byte_level(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> TokenizerData:
    rule = splitting.NAMED_RULES[fields["pre"]]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in fields["merges"])]
    return TokenizerData(
        vocab={token: index for index, token in enumerate(tokens)},
        ranks={pair: rank for rank, pair in enumerate(merges)},
        added=_added(tokens, types),
        splitting=rule.splitting,
        unicode_form=rule.unicode_form,
        ignore_merges=rule.ignore_merges,
        add_bos=bool(fields.get("add_bos_token", rule.add_bos)),
        **_gguf_special(fields),
    )


def _gguf_sentencepiece(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> TokenizerData:
    prefix = bool(fields.get("add_space_prefix", True))
    special = _gguf_special(fields)
    unknown = fields.get("unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None)
    return TokenizerData(
        **_by_score(tokens, types, [float(score) for score in fields["scores"]]),
        prefix="prepend" if prefix else "never",
        strip_first_space=prefix,
        byte_fallback=BYTE in types,
        unk_id=None if unknown is None else int(unknown),
        add_bos=bool(fields.get("add_bos_token", True)) and special["bos_id"] is not None,
        **special,
    )


def _gguf_special(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: fields.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    ids = {name: int(index) for name, index in named.items() if index is not None}
    return {
        "bos_id": ids.get("bos"),
        "eos_ids": tuple(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids)),
        "pad_id": ids.get("padding"),
        "add_eos": bool(fields.get("add_eos_token", False)),
        "chat_template": _gguf_templates(fields),
    }


def _gguf_templates(fields: Mapping[str, Any]) -> Any:
    """The template under `tokenizer.chat_template`, and those under `tokenizer.chat_template.NAME` where there are."""
    default, prefix = fields.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    return {**({} if default is None else {"default": default}), **named} if named else default


def _added(tokens: Sequence[str], types: Sequence[int]) -> tuple[AddedToken, ...]:
    return tuple(
        AddedToken(token, index, special=_ADDED_TYPES[kind])
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in _ADDED_TYPES
    )


def _by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> dict[str, Any]:
    """Vocabulary and merges of pieces with scores: two pieces may be joined to a third, those of high score first."""
    normal = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL and token
    }
    places = {score: rank for rank, score in enumerate(sorted(set(normal.values()), reverse=True))}
    ranks = {
        (token[:cut], token[cut:]): places[score]
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    }
    return {
        "vocab": {token: index for index, token in enumerate(tokens)},
        "ranks": ranks,
        "added": _added(tokens, types),
        "splitting": splitting.spaces_rule(normal),
        "byte_level": False,
        "fuse_unknown": True,
    }


def read_model_tokenizer(file: Path) -> TokenizerData:
    """From tokenizer.model, a SentencePiece model of type BPE or Llama 3's list of ranks, with tokenizer_config.json
    beside it where there is one.

    Raises TokenizerError for a damaged one, and for settings that are not supported, by name.
    """
    try:
        config = read_config_files(file.parent)
        return _configured(read_ranks(file) if is_list_of_ranks(file) else _sentencepiece(file), config)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    except DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer is damaged or incomplete ({error!r}).") from error


def _sentencepiece(file: Path) -> TokenizerData:
    model = read_sentencepiece(file)
    found = {
        "model of type": None if model.kind == "BPE" else model.kind,
        "normalizer": (model.normalizer or "without a name") if model.has_charsmap else None,
        "setting remove_extra_whitespaces": model.remove_extra_whitespaces,
        "setting treat_whitespace_as_suffix": model.whitespace_as_suffix,
        "setting escape_whitespaces": not model.escape_whitespaces,
        "unused piece": next((piece.text for piece in model.pieces if piece.kind == UNUSED), None),
    }
    for name, value in found.items():
        if value:
            raise TokenizerError(f"{file}: the {name} {value!r} is not supported; plain BPE is.")
    tokens, types = [piece.text for piece in model.pieces], [piece.kind for piece in model.pieces]
    return TokenizerData(
        **_by_score(tokens, types, [piece.score for piece in model.pieces]),
        prefix="prepend" if model.add_dummy_prefix else "never",
        strip_first_space=model.add_dummy_prefix,
        byte_fallback=model.byte_fallback,
        unk_id=model.unk_id,
        bos_id=model.bos_id,
        eos_ids=() if model.eos_id is None else (model.eos_id,),
        pad_id=model.pad_id,
    )


def _configured(data: TokenizerData, config: ConfigFiles) -> TokenizerData:
    """With what tokenizer_config.json says: more added tokens, which tokens begin and end, what is put around text."""
    known = {token.index for token in data.added}
    data = replace(data, added=(*data.added, *(token for token in config.added if token.index not in known)))
    ids: dict[str | None, int] = dict([*data.vocab.items(), *((token.text, token.index) for token in data.added)])
    bos, pad = ids.get(config.bos, data.bos_id), ids.get(config.pad, data.pad_id)
    eos_ids = (ids[config.eos],) if config.eos in ids else data.eos_ids
    more_ends = [index for index in config.more_eos_ids if index in set(ids.values())]
    return replace(
        data,
        chat_template=config.chat_template,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *more_ends])),
        pad_id=pad,
        add_bos=bos is not None if config.add_bos is None else bool(config.add_bos),
        add_eos=bool(config.add_eos),
    )
