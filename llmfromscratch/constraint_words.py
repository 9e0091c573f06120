"""Words that an answer must not contain, and words that it must contain before it may end, whatever tokens spell them.

All is done on bytes. A token can complete a word in two ways: the whole word lies inside it, or the text ends with the
first bytes of the word and the token begins with all of the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from llmfromscratch.errors import RequestError

MAX_WORDS, MAX_WORD = 1000, 256  # so many words, of so many bytes


class Vocabulary:
    """The bytes of all tokens, and where in the vocabulary some bytes are found.

    tokens: by id; empty for control tokens and for ids without a token, which say nothing.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _sorted(self) -> tuple[list[bytes], Tensor]:
        order = sorted(range(len(self.tokens)), key=self.tokens.__getitem__)
        return [self.tokens[index] for index in order], torch.tensor(order)

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """All tokens in a row, and where each begins: to look for some bytes in all of them at once."""
        return b"".join(self.tokens), [0, *accumulate(map(len, self.tokens))]

    def starting_with(self, prefix: bytes) -> Tensor:
        """Ids of the tokens that begin with these bytes, at least one: neighbours in the order of the bytes."""
        texts, ids = self._sorted
        first = bisect_left(texts, prefix)
        end = bisect_right(texts, prefix, lo=first, key=lambda text: text[: len(prefix)])
        return ids[first:end]

    def containing(self, word: bytes) -> list[int]:
        """Ids of the tokens that these bytes lie in."""
        text, starts = self._joined
        found, place = [], text.find(word)
        while place >= 0:
            index = bisect_right(starts, place) - 1
            if place + len(word) <= starts[index + 1]:
                found.append(index)
                place = text.find(word, starts[index + 1])  # one place in a token is enough
            else:
                place = text.find(word, place + 1)
        return found


class BadWords:
    """Lets no token pass that would complete one of the words in the answer's text."""

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary):
        encoded = _encoded("bad_words", words)
        self._vocabulary, self._longest = vocabulary, max(map(len, encoded))
        self._anywhere = torch.ones(len(vocabulary), dtype=torch.bool)
        self._anywhere[[index for word in encoded for index in vocabulary.containing(word)]] = False
        self._rests: dict[bytes, list[bytes]] = {}  # the beginning of a word -> what would complete it
        for word in dict.fromkeys(encoded):
            for cut in range(1, len(word)):
                self._rests.setdefault(word[:cut], []).append(word[cut:])
        self._tail = b""  # as much of the answer as may be the beginning of a word

    def allowed(self) -> Tensor:
        """bool [vocab]: the tokens that complete none of the words."""
        begun = [self._tail[start:] for start in range(len(self._tail))]
        rests = {rest for beginning in begun for rest in self._rests.get(beginning, ())}
        if not rests:
            return self._anywhere
        mask = self._anywhere.clone()
        for rest in rests:
            mask[self._vocabulary.starting_with(rest)] = False
        return mask

    def advance(self, token_id: int) -> None:
        """The token was chosen."""
        keep = self._longest - 1
        self._tail = (self._tail + self._vocabulary.tokens[token_id])[-keep:] if keep else b""


class RequiredWords:
    """Keeps the answer from ending before its text has held every one of the words."""

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary, end_ids: Iterable[int]):
        self._missing = set(_encoded("required_words", words))
        self._vocabulary, self._longest = vocabulary, max(map(len, self._missing))
        self._all = torch.ones(len(vocabulary), dtype=torch.bool)
        self._no_end = self._all.clone()
        self._no_end[list(end_ids)] = False
        self._tail = b""

    def allowed(self) -> Tensor:
        """bool [vocab]: all tokens, without the end tokens as long as a word is missing."""
        return self._no_end if self._missing else self._all

    def advance(self, token_id: int) -> None:
        """The token was chosen."""
        if self._missing:
            text = self._tail + self._vocabulary.tokens[token_id]
            self._missing = {word for word in self._missing if word not in text}
            self._tail = text[max(0, len(text) - self._longest + 1) :]


def _encoded(name: str, words: Sequence[str]) -> list[bytes]:
    """The words as bytes. Raises RequestError for too many, for one too long or empty, and for half characters."""
    if len(words) > MAX_WORDS:
        raise RequestError(f"{name} has {len(words)} words; at most {MAX_WORDS} are supported.")
    encoded = []
    for word in words:
        try:
            encoded.append(word.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(f"{name} holds {word!r}, which is no valid text: {error.reason}.") from error
        if not 0 < len(encoded[-1]) <= MAX_WORD:
            raise RequestError(
                f"{name} holds a word of {len(encoded[-1])} bytes; a word has 1 to {MAX_WORD}: {word[:40]!r}."
            )
    return encoded
