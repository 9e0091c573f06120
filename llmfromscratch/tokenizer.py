"""Text <-> token ids: byte-level byte-pair encoding, special tokens and the chat template.

    text -> (special tokens cut out) -> pre-tokens -> bytes as printable characters -> merges by rank -> ids

Byte-level BPE: Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.2; merges: Sennrich
et al., "Neural Machine Translation of Rare Words with Subword Units", section 3.2.
"""

from __future__ import annotations

import codecs
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from llmfromscratch import chat_template
from llmfromscratch.errors import TokenizerError
from llmfromscratch.tokenizer_files import TokenizerData

_GPT2_WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_ESCAPE, _HIDDEN = "\uf8ff", 0xE000  # private-use characters: they hide control tokens that a user's text spells out


def byte_characters() -> list[str]:
    """The printable character that stands for each byte: itself where printable, else one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class Tokenizer:
    """Encodes and decodes with one model's vocabulary; stateless but for a memory of words it has seen."""

    def __init__(self, data: TokenizerData):
        self.bos_id, self.eos_ids, self.chat_template = data.bos_id, data.eos_ids, data.chat_template
        self.vocab, self.special, self.split_digits = data.vocab, data.special, data.split_digits
        self._ranks = {pair: rank for rank, pair in enumerate(data.merges)}
        self._characters = byte_characters()
        self._bytes = {character: byte for byte, character in enumerate(self._characters)}
        self._tokens = {index: token for token, index in [*self.vocab.items(), *self.special.items()]}
        longest_first = sorted(self.special, key=len, reverse=True)
        words = "|".join(map(regex.escape, longest_first)) or r"(?!)"
        self._special_words, self._to_hide = regex.compile(words), regex.compile(f"(?s:(?={words}).)|{_ESCAPE}")
        self._hidden = {start: chr(_HIDDEN + i) for i, start in enumerate({token[0]: 0 for token in longest_first})}
        self._known: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokens) + 1

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids. Control tokens are recognized only with `special`, so that text from a user stays text.

        A lone surrogate, which is no character, counts as "?". Raises TokenizerError where the vocabulary has a gap.
        """
        return self._encode_marked(text, str) if special else self._encode_plain(text)

    def _encode_marked(self, text: str, clean: Callable[[str], str]) -> list[int]:
        """Control tokens by their ids, the text between them through `clean` and the merges."""
        ids, end = [], 0
        for match in self._special_words.finditer(text):
            ids += [*self._encode_plain(clean(text[end : match.start()])), self.special[match.group()]]
            end = match.end()
        return ids + self._encode_plain(clean(text[end:]))

    def _encode_plain(self, text: str) -> list[int]:
        parts = regex.split(r"(\p{N})", text) if self.split_digits else [text]
        return [index for part in parts for word in _GPT2_WORDS.findall(part) for index in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        if word in self._known:
            return self._known[word]
        pieces = self._merge([self._characters[byte] for byte in word.encode("utf-8", errors="replace")])
        try:
            ids = [self.vocab[piece] for piece in pieces]
        except KeyError as error:
            missing = bytes(self._bytes[character] for character in error.args[0])
            raise TokenizerError(f"the vocabulary has no token for the bytes {missing!r} in {word[:40]!r}.") from error
        if len(word) <= 64 and len(self._known) < 100_000:  # a long-running process must not grow for ever
            self._known[word] = ids
        return ids

    def _merge(self, pieces: list[str]) -> list[str]:
        """Joins the neighbours of the lowest rank, leftmost first, until none is left: O(n log n) with a heap."""
        following = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        heap: list[tuple[int, int, str, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and (rank := self._ranks.get((pieces[left], pieces[right]))) is not None:
                heapq.heappush(heap, (rank, left, pieces[left], pieces[right]))

        for left in range(len(pieces) - 1):
            offer(left, left + 1)
        while heap:
            _, left, first, second = heapq.heappop(heap)
            right = following[left]
            if right < 0 or (pieces[left], pieces[right]) != (first, second):
                continue  # one of the two has been merged since
            pieces[left], pieces[right] = first + second, ""
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        return [piece for piece in pieces if piece]

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for. Raises TokenizerError for an id outside the vocabulary."""
        token = self._tokens.get(index)
        if token is None:
            raise TokenizerError(f"token id {index} is outside the vocabulary (0 to {self.vocab_size - 1}).")
        if token in self.special or not all(character in self._bytes for character in token):
            return token.encode("utf-8", errors="replace")
        return bytes(self._bytes[character] for character in token)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        special = set(self.special.values()) if skip_special else set()
        return b"".join(self.token_bytes(i) for i in ids if i not in special).decode("utf-8", errors="replace")

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each) in the model's own chat template.

        Control tokens written inside a message stay text: their first character is hidden behind private-use ones
        before rendering, and shown again when the template's own control tokens have been found.
        """
        if not self.chat_template:
            raise TokenizerError("this model has no chat template; use generate with a plain prompt.")
        bos = self._tokens[self.bos_id] if self.bos_id is not None else ""
        eos = self._tokens[self.eos_ids[0]] if self.eos_ids else ""
        text = chat_template.render(
            self.chat_template, self._hide(messages), add_generation_prompt, bos_token=bos, eos_token=eos
        )
        return self._encode_marked(text, self._show)

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._to_hide.sub(lambda match: _ESCAPE + self._hidden.get(match[0], _ESCAPE), value)
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(inner) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self._hide(inner) for inner in value]
        if value is None or isinstance(value, int | float):
            return value
        raise TokenizerError(f"a chat message may hold text, numbers, lists and mappings, not {type(value).__name__}.")

    def _show(self, text: str) -> str:
        shown = {_ESCAPE: _ESCAPE, **{hidden: start for start, hidden in self._hidden.items()}}
        return regex.sub(f"(?s:{_ESCAPE}(.))", lambda match: shown.get(match[1], match[0]), text)


class IncrementalDecoder:
    """Text as it becomes certain: bytes wait until the character they belong to is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special.values())
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """The text that one more token completes; control tokens give none."""
        return "" if index in self._special else self._decoder.decode(self._tokenizer.token_bytes(index))

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return self._decoder.decode(b"", final=True)
