"""Reads the tokenizer.model of Llama 3: a line for each token, its bytes in base64 and its rank, and nothing else.

Two pieces may be joined when their bytes together are a token, the lowest rank first; a rank is an id as well. How text
is split and which control tokens there are stands in the code that such files come with, so one of another size than
Llama 3's is refused instead of guessed at. Rules and control tokens: Grattafiori et al., "The Llama 3 Herd of Models",
and the models' own prompt format; 3.1's names where 3 only reserved an id.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import regex

from llmfromscratch.errors import TokenizerError
from llmfromscratch.text.splitting import NAMED_RULES
from llmfromscratch.text.tokenizer_data import AddedToken, TokenizerData

_LARGEST_FILE, _LONGEST_TOKEN = 16_000_000, 512  # bytes; every way to cut a token in two is looked at
_LINE = regex.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})\r?\n?")
_TOKENS, _CONTROL_TOKENS = 128_000, 256
_NAMED = {
    0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id",
    8: "eom_id", 9: "eot_id", 10: "python_tag",
}  # fmt: skip
_BEGIN, _PAD, _ENDS = 0, 4, (1, 8, 9)
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}


def is_list_of_ranks(file: Path) -> bool:
    """Whether a tokenizer.model begins like a list of ranks: SentencePiece's are binary."""
    with file.open("rb") as opened:
        return _LINE.fullmatch(opened.readline(1000)) is not None


def read_ranks(file: Path) -> TokenizerData:
    """Llama 3's tokenizer. Raises ValueError for a damaged file, TokenizerError for a vocabulary that is another's."""
    if file.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"it has {file.stat().st_size} bytes; {_LARGEST_FILE} are the limit")
    tokens = _tokens(file.read_bytes().splitlines(keepends=True))
    if len(tokens) != _TOKENS:
        raise TokenizerError(
            f"{file}: a list of {len(tokens)} ranks is not supported, since it does not say how text is split; "
            f"Llama 3's, with {_TOKENS}, is. The model's folder with its tokenizer.json may work."
        )
    spelled = _spelled(tokens)
    vocab = {token: rank for rank, token in enumerate(spelled)}
    pairs = ((token[:cut], token[cut:], rank) for rank, token in enumerate(spelled) for cut in range(1, len(token)))
    rule = NAMED_RULES["llama3"]
    return TokenizerData(
        vocab=vocab,
        ranks={(left, right): rank for left, right, rank in pairs if left in vocab and right in vocab},
        added=tuple(AddedToken(text, _TOKENS + place) for place, text in enumerate(_control_tokens())),
        splitting=rule.splitting,
        ignore_merges=rule.ignore_merges,
        bos_id=_TOKENS + _BEGIN,
        eos_ids=tuple(_TOKENS + place for place in _ENDS),
        pad_id=_TOKENS + _PAD,
        add_bos=rule.add_bos,
    )


def _tokens(lines: Sequence[bytes]) -> list[bytes]:
    """The tokens in the order of their ranks, which are 0, 1, 2, ... without a gap."""
    by_rank: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} is {line[:80]!r}; expected base64, a space and a rank")
        token, rank = base64.b64decode(found[1], validate=True), int(found[2])
        if len(token) > _LONGEST_TOKEN or rank >= len(lines) or rank in by_rank:
            raise ValueError(f"line {number} has a token of {len(token)} bytes and the rank {rank}, of {len(lines)}")
        by_rank[rank] = token
    tokens = [by_rank[rank] for rank in range(len(lines))]
    missing = {bytes([byte]) for byte in range(256)}.difference(tokens)
    if missing or len(set(tokens)) < len(tokens):
        raise ValueError(f"{len(missing)} bytes are no tokens, {len(tokens) - len(set(tokens))} tokens come twice")
    return tokens


def _spelled(tokens: Sequence[bytes]) -> list[str]:
    """Tokens in the printable characters that stand for bytes in every other file (see chapter 2)."""
    others = iter(range(256, 512))
    characters = "".join(chr(byte) if byte in _PRINTABLE else chr(next(others)) for byte in range(256))
    return [token.decode("latin-1").translate(characters) for token in tokens]


def _control_tokens() -> list[str]:
    """The texts of the ids after the ranks."""
    names = []
    for place in range(_CONTROL_TOKENS):
        reserved = place - sum(named < place for named in _NAMED)
        names.append(f"<|{_NAMED.get(place, f'reserved_special_token_{reserved}')}|>")
    return names
