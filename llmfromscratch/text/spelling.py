"""Between text and the pieces that merges join: normalization, visible spaces, byte tokens; and a token's bytes."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from llmfromscratch.text.splitting import SPACE
from llmfromscratch.text.tokenizer_data import TokenizerData

_BYTE_TOKEN = regex.compile(r"<0x([0-9A-F]{2})>")


class Spelling:
    """How one vocabulary spells text.

    characters: the 256 that stand for bytes. vocab: the tokens that text may become. unknown: the token and id that
    stand for a character that cannot be spelled; empty where nothing does.
    """

    def __init__(self, data: TokenizerData, characters: Sequence[str], vocab: Mapping[str, int]):
        self._data, self._vocab = data, vocab
        self._character_of = "".join(characters)
        self._byte_of = {character: byte for byte, character in enumerate(characters)}
        known = [*data.vocab.items(), *((token.text, token.index) for token in data.added)]
        self.unknown = {token: index for token, index in known if index == data.unk_id}

    def in_unicode_form(self, text: str) -> str:
        """Text in the tokenizer's Unicode form, as Python's own tables of Unicode have it."""
        form: Any = self._data.unicode_form
        return unicodedata.normalize(form, text) if form else text

    def normalize(self, text: str) -> str:
        """What is done to text before it is searched for normalized tokens; a lone surrogate becomes "?"."""
        text = self.in_unicode_form(text.encode("utf-8", errors="replace").decode("utf-8"))
        return SPACE + text.replace(" ", SPACE) if self._data.prefix == "prepend" and text else text

    def before_splitting(self, text: str, at_start: bool) -> str:
        """Normalized text as the splitting rule wants it; at_start: it is the beginning of the whole text."""
        if self._data.byte_level or not text:
            return text
        text = text.replace(" ", SPACE)
        missing = self._data.prefix == "always" or (self._data.prefix == "first" and at_start)
        return SPACE + text if missing and not text.startswith(SPACE) else text

    def characters(self, word: str) -> str:
        """A word in the characters of the vocabulary."""
        if not self._data.byte_level:
            return word
        return word.encode("utf-8").decode("latin-1").translate(self._character_of)

    def pieces(self, characters: str) -> list[str]:
        """The characters that are tokens; for the others their byte tokens, the unknown token or nothing."""
        missing = set(characters).difference(self._vocab)
        if not missing:
            return list(characters)
        stand_ins = {character: self._stand_in(character) for character in missing}
        pieces = [piece for character in characters for piece in stand_ins.get(character, (character,))]
        if not self._data.fuse_unknown:
            return pieces
        return [piece for i, piece in enumerate(pieces) if not (i and piece in self.unknown and piece == pieces[i - 1])]

    def _stand_in(self, character: str) -> list[str]:
        if self._data.byte_fallback:
            coded = [f"<0x{byte:02X}>" for byte in character.encode("utf-8")]
            if all(token in self._vocab for token in coded):
                return coded
        return list(self.unknown)[:1]

    def token_bytes(self, token: str, added: bool) -> bytes:
        """What a token is in decoded text; an added token is itself."""
        if not added and self._data.byte_level and all(character in self._byte_of for character in token):
            return bytes(map(self._byte_of.__getitem__, token))
        if not added and self._data.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        shown = token if self._data.byte_level else token.replace(SPACE, " ")
        return shown.encode("utf-8", errors="replace")
