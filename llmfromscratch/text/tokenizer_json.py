"""Reads tokenizer.json, the tokenizers library's file: what it says is followed to the letter or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmfromscratch.errors import TokenizerError
from llmfromscratch.text import splitting
from llmfromscratch.text.config_files import ConfigFiles, added_token, read_config_files, read_json
from llmfromscratch.text.splitting import SPACE
from llmfromscratch.text.tokenizer_data import UNICODE_FORMS, TokenizerData

DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_TO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_FROM_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class _Unsupported(Exception):
    """A part of the file that is whole, but not followed here; the message names it."""


def read_json_tokenizer(file: Path) -> TokenizerData:
    """From `tokenizer.json`, with `tokenizer_config.json` and `chat_template.jinja` beside it where they exist.

    Raises TokenizerError for a damaged one, and for what would change the ids and is not supported, by name.
    """
    try:
        content, config = read_json(file), read_config_files(file.parent)
        return _data(content, config)
    except _Unsupported as error:
        raise TokenizerError(f"{file}: {error} is not supported; byte-level BPE and SentencePiece's are.") from error
    except DAMAGED as error:
        raise TokenizerError(f"{file}: the tokenizer is damaged or incomplete ({error!r}).") from error


def _data(content: Mapping[str, Any], config: ConfigFiles) -> TokenizerData:
    model = content["model"]
    _check_model(model)
    vocab = {token: int(index) for token, index in model["vocab"].items()}
    added = tuple(added_token(entry, entry["id"]) for entry in content.get("added_tokens") or [])
    ids = {**vocab, **{token.text: token.index for token in added}}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
    return TokenizerData(
        vocab=vocab,
        ranks=ranks,
        added=added,
        ignore_merges=bool(model.get("ignore_merges")),
        fuse_unknown=bool(model.get("fuse_unk")),
        unk_id=None if model.get("unk_token") is None else ids[model["unk_token"]],
        chat_template=config.chat_template,
        **_rules(content, ranks),
        **_special_ids(content.get("post_processor"), ids, config),
    )


def _check_model(model: Mapping[str, Any]) -> None:
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise _Unsupported(f"a model of type {kind!r}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _Unsupported(f"{name} {model[name]!r}")


def _rules(content: Mapping[str, Any], ranks: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """How text is normalized, split and spelled, and how tokens are joined to text again."""
    form, prefix = _normalizer(content.get("normalizer"))
    before, fallback = content.get("pre_tokenizer"), bool(content["model"].get("byte_fallback"))
    if prefix is None and not (isinstance(before, dict) and before["type"] == "Metaspace"):
        if fallback:
            raise _Unsupported("byte_fallback in a byte-level tokenizer")
        if content.get("decoder") is None or content["decoder"]["type"] != "ByteLevel":
            raise _Unsupported(f"the decoder {content.get('decoder')!r}")
        try:
            return {"splitting": splitting.byte_level_rule(before), "unicode_form": form}
        except splitting.UnknownRule as error:
            raise _Unsupported(str(error)) from error
    whole, prefix = _metaspace(before, prefix)
    return {
        "splitting": splitting.spaces_rule(map("".join, ranks)) if whole else splitting.each_space_rule(),
        "byte_level": False,
        "prefix": prefix,
        "strip_first_space": _strips_first_space(content.get("decoder"), fallback),
        "unicode_form": form,
        "byte_fallback": fallback,
    }


def _normalizer(normalizer: Any) -> tuple[str | None, str | None]:
    """(Unicode form or None, "prepend" or "never" where spaces are made visible, else None)."""
    if normalizer is None:
        return None, None
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    form = steps[0]["type"] if steps and steps[0]["type"] in UNICODE_FORMS else None
    rest = steps[1:] if form else steps
    known: list[tuple[list[Any], str | None]] = [
        ([], None),
        ([_TO_SPACES], "never"),
        ([{"type": "Prepend", "prepend": SPACE}, _TO_SPACES], "prepend"),
    ]
    for pattern, prefix in known:
        if rest == pattern:
            return form, prefix
    raise _Unsupported(f"the normalizer {normalizer!r}")


def _metaspace(before: Any, prefix: str | None) -> tuple[bool, str]:
    """(whether words stay together, the prefix) of a tokenizer with visible spaces."""
    if before is None and prefix is not None:
        return True, prefix
    scheme = before.get("prepend_scheme", "always" if before.get("add_prefix_space", True) else "never")
    if prefix is not None or before["type"] != "Metaspace" or before["replacement"] != SPACE:
        raise _Unsupported(f"the splitting rule {before!r}")
    return not before.get("split", True), scheme


def _strips_first_space(decoder: Any, fallback: bool) -> bool:
    """Whether decoding takes away one space at the beginning; refuses decoders of another kind."""
    steps = [_FROM_SPACES, *([{"type": "ByteFallback"}] if fallback else []), {"type": "Fuse"}]
    found = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else None
    if found not in (steps, [*steps, _STRIP]):
        raise _Unsupported(f"the decoder {decoder!r}")
    return found[-1] == _STRIP


def _special_ids(processor: Any, ids: Mapping[str, int], config: ConfigFiles) -> dict[str, Any]:
    """The begin, end and padding tokens, and which of them stand around every text."""
    before, after = _around(processor)
    named = [ids.get(text) if text is not None else None for text in (config.bos, config.eos, config.pad)]
    bos = before if named[0] is None else named[0]
    ends = [after if named[1] is None else named[1], *config.more_eos_ids]
    eos_ids = tuple(dict.fromkeys(index for index in ends if index is not None and index in ids.values()))
    if before not in (None, bos) or after not in (None, *eos_ids[:1]):
        raise _Unsupported(f"the post-processor {processor!r}, which adds other tokens than begin and end,")
    return {
        "bos_id": bos,
        "eos_ids": eos_ids,
        "pad_id": named[2],
        "add_bos": before is not None,
        "add_eos": after is not None,
    }


def _around(processor: Any) -> tuple[int | None, int | None]:
    """The ids that a post-processor puts before and after every text."""
    if processor is None:
        return None, None
    steps = processor["processors"] if processor["type"] == "Sequence" else [processor]
    templates = [step for step in steps if step["type"] != "ByteLevel"]
    if not templates:
        return None, None
    if len(templates) > 1 or templates[0]["type"] != "TemplateProcessing":
        raise _Unsupported(f"the post_processor {processor!r}")
    found = [_template_part(part, templates[0]) for part in templates[0]["single"]]
    place = found.index(None) if found.count(None) == 1 else -1
    if place not in (0, 1) or len(found) - place not in (1, 2):
        raise _Unsupported(f"the post_processor {processor!r}")
    return found[0] if place else None, found[-1]


def _template_part(part: Mapping[str, Any], template: Mapping[str, Any]) -> int | None:
    """The id of a special token in a template; None for the text."""
    if "Sequence" in part:
        return None
    (index,) = template["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return int(index)
