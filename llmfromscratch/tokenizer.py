"""Text <-> token ids: byte-pair encoding, special tokens, lengths, and text that can be streamed and stopped.

    text -> (added tokens cut out) -> normalized -> words -> bytes as printable characters -> merges by rank -> ids

Byte-level BPE: Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.2; merges: Sennrich
et al., "Neural Machine Translation of Rare Words with Subword Units", section 3.2; visible spaces and byte fallback:
Kudo and Richardson, "SentencePiece", section 3. The ids are those of the tokenizers library.
"""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import regex
import torch
from torch import Tensor

from llmfromscratch.errors import RequestError, TokenizerError
from llmfromscratch.text import chat_template
from llmfromscratch.text.hidden_tokens import HiddenTokens
from llmfromscratch.text.long_words import merge_long
from llmfromscratch.text.spelling import Spelling
from llmfromscratch.text.splitting import SplittingRule
from llmfromscratch.text.tokenizer_config import TokenizerConfig
from llmfromscratch.text.tokenizer_data import TokenizerData, respect_flags

_LONGEST_REMEMBERED, _MOST_REMEMBERED = 64, 100_000  # a word's characters, words: a long-running process must not grow


def byte_characters() -> list[str]:
    """The printable character that stands for each byte: 256 of them, all different, in the order of the bytes.

    A byte that is a printable character of Latin-1 stands for itself: 33 to 126, 161 to 172 and 174 to 255. The other
    68, in their order, are the characters from U+0100 on. So a vocabulary of bytes can be written down as text.

    Example: byte 65 is "A"; byte 32, the space, is "Ġ" (U+0120), since 32 others that cannot be printed come first.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def split_words(text: str, rule: SplittingRule) -> list[str]:
    """Cuts text into the words that merges stay inside of; joined, they are the text again.

    rule.steps: compiled regular expressions, used one after the other. Each cuts every piece that the steps before it
    left: what it matches is a piece, and so is what lies between two matches (never an empty one). Each expression has
    one group around the whole of it, so that its `split` keeps what it matches. An empty text has no words.

    Example: with the steps (\\p{N}) and then GPT-2's rule, "it's  42" is "it", "'s", "  ", "4", "2". The digits must
    stand alone before GPT-2's rule looks for the end of the spaces: without the first step, "it", "'s", " ", " 42".
    """
    pieces = [text] if text else []
    for step in rule.steps:
        pieces = [part for piece in pieces for part in step.split(piece) if part]
    return pieces


def merge_pieces(pieces: Sequence[str], ranks: Mapping[tuple[str, str], float]) -> list[str]:
    """Joins neighbours until no pair of them has a rank: always the pair of the lowest rank, the leftmost of equals.

    ranks: pairs of pieces, the best lowest. Pieces are a chain: a heap gives the best pair, and joining it changes its
    two neighbours only, so n pieces take O(n log n). An entry of the heap that has been overtaken is passed over.

    Example: "t h e" with ranks {("h", "e"): 0, ("t", "h"): 1, ("t", "he"): 2} is "the"; without the last, "t", "he".
    """
    pieces = ["", *pieces, ""]  # two that have no rank with anything, so that the ends are like the middle
    after, before = list(range(1, len(pieces) + 1)), list(range(-1, len(pieces) - 1))
    rank_at = [*map(ranks.get, pairwise(pieces)), None]  # of the pair that begins at each place, as it is now
    heap = [(rank, left) for left, rank in enumerate(rank_at) if rank is not None]
    heapify(heap)
    while heap:
        best, left = heappop(heap)
        if rank_at[left] != best:
            continue  # one of the two has been joined to another since
        right = after[left]
        pieces[left], pieces[right], rank_at[right] = pieces[left] + pieces[right], "", None
        after[left], before[after[right]] = after[right], left
        for place in (before[left], left):
            rank = rank_at[place] = ranks.get((pieces[place], pieces[after[place]]))
            if rank is not None:
                heappush(heap, (rank, place))
    return [piece for piece in pieces if piece]


def split_special(text: str, special: Mapping[str, int]) -> list[str | int]:
    """Finds control tokens in text that is trusted: their ids where they stand, and the text between them.

    From left to right; of two tokens that begin at the same character the longest counts. No empty text comes out.
    There may be no tokens at all: then the text, if there is any.
    Tokens are plain text, no expressions, and 0 is an id like any other. Text from a user must never pass through here:
    whoever can write a control token can speak with the system's voice.

    Example: {"<a>": 1, "<a><a>": 2} and "x<a><a>y<a>" give ["x", 2, "y", 1].
    """
    longest_first = sorted(special, key=len, reverse=True)
    pattern = regex.compile("|".join(map(regex.escape, longest_first)) or r"(?!)")
    parts: list[str | int] = []
    end = 0
    for match in pattern.finditer(text):
        parts += [text[end : match.start()], special[match.group()]]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part != ""]


class Tokenizer:
    """Encodes and decodes with one model's vocabulary; stateless but for a memory of words it has seen.

    special: ids of the control tokens by their text; added: all tokens that are found in trusted text before it is
    split, by id. strip_first_space: decoding takes one space away at the very beginning of a text.

    What the vocabulary cannot express: a character that is neither a token nor can be spelled in byte tokens becomes
    the unknown token where the model has one, else nothing, as in the tokenizers library; no text makes this fail. A
    lone surrogate, which is no character, counts as "?". Bytes that are no valid UTF-8 decode to U+FFFD.
    """

    def __init__(self, data: TokenizerData):
        self.bos_id, self.eos_ids, self.pad_id, self.add_bos = data.bos_id, data.eos_ids, data.pad_id, data.add_bos
        self.chat_template, self.strip_first_space = data.chat_template, data.strip_first_space
        self.added = {token.index: token for token in data.added}
        self.special = {token.text: token.index for token in data.added if token.special}
        control = set(self.special.values())
        self.vocab = {token: index for token, index in data.vocab.items() if index not in control}
        self._data, self._ranks = data, _without_control_tokens(data.ranks, data.vocab.keys() - self.vocab.keys())
        self._spelling = Spelling(data, byte_characters(), self.vocab)
        self._id_of = {**self.vocab, **self._spelling.unknown}
        self._raw = {token.text: token.index for token in data.added if not token.normalized}
        self._normal = {self._spelling.normalize(t.text): t.index for t in data.added if t.normalized}
        self._hidden = HiddenTokens([token.text for token in data.added], self._spelling.in_unicode_form)
        self._tokens = {
            index: token for token, index in [*data.vocab.items(), *((t.text, t.index) for t in data.added)]
        }
        self._bytes = {i: self._spelling.token_bytes(text, i in self.added) for i, text in self._tokens.items()}
        self._visible_bytes = {**self._bytes, **dict.fromkeys(control, b"")}
        self._known: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokens) + 1

    def encode(self, text: str, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids. Control and other added tokens are recognized only with `special`: text from a user stays text.

        add_bos: None does as the model does (a begin token, with some models an end token too); True puts the begin
        token first, False adds nothing. A text that already begins with it gets no second one. Raises TokenizerError
        for add_bos=True with a model that has no begin token.
        """
        ids = self._encode_trusted(text, str) if special else self._encode_words(self._spelling.normalize(text), True)
        if add_bos and self.bos_id is None:
            raise TokenizerError("this model has no begin token; leave add_bos out.")
        begin = [self.bos_id] if self.bos_id is not None and (self.add_bos if add_bos is None else add_bos) else []
        end = [self.eos_ids[0]] if self._data.add_eos and add_bos is None else []
        return [*(begin if ids[:1] != begin else []), *ids, *end]

    def _encode_trusted(self, text: str, show: Callable[[str], str]) -> list[int]:
        """Added tokens by their ids, the text between them through `show` and the merges."""
        ids: list[int] = []
        for place, part in enumerate(self._cut(text, self._raw)):
            inner = [part] if isinstance(part, int) else self._cut(self._spelling.normalize(part), self._normal)
            for inner_place, piece in enumerate(inner):
                at_start = place == inner_place == 0
                ids += [piece] if isinstance(piece, int) else self._encode_words(show(piece), at_start)
        return ids

    def _cut(self, text: str, tokens: Mapping[str, int]) -> list[str | int]:
        if not tokens:
            return [text] if text else []
        return respect_flags(split_special(text, tokens), self.added, tokens)

    def _encode_words(self, text: str, at_start: bool) -> list[int]:
        """Ids of normalized text without added tokens; at_start: it is the beginning of the whole text."""
        ids: list[int] = []
        for word in split_words(self._spelling.before_splitting(text, at_start), self._data.splitting):
            ids += self._known.get(word) or self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        characters = self._spelling.characters(word)
        if self._data.ignore_merges and characters in self.vocab:
            ids = [self.vocab[characters]]
        else:
            pieces = merge_long(self._spelling.pieces(characters), self._ranks, merge_pieces)
            ids = [self._id_of[piece] for piece in pieces]
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        if len(word) <= _LONGEST_REMEMBERED:
            self._known[word] = ids
        return ids

    def __contains__(self, index: object) -> bool:
        """Whether the vocabulary has this id. A model may say others, if its embedding is padded with empty rows."""
        return index in self._tokens

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for. Raises TokenizerError for an id outside the vocabulary."""
        try:
            return self._bytes[index]
        except KeyError as error:
            raise TokenizerError(f"token id {index} is outside the vocabulary (0 to {self.vocab_size - 1}).") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids, without control tokens unless asked for; other added tokens are text.

        Bytes that are no valid UTF-8 become U+FFFD, one for each sequence that breaks off (as Unicode recommends).
        Raises TokenizerError for an id outside the vocabulary.
        """
        shown = self._visible_bytes if skip_special else self._bytes
        try:
            text = b"".join([shown[index] for index in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            self.token_bytes(error.args[0])
            raise
        return text.removeprefix(" ") if self.strip_first_space else text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each) in the model's own chat template.

        tools: JSON schemas of functions that the model may call. documents: {"title", "text"} each. template: the name
        of one of several; without it "tool_use" for tools, "rag" for documents, where there are such, or "default".

        A begin token is there as often as the template puts it. Added tokens written inside a message, a tool or a
        document stay text: their first character is hidden behind private-use ones before rendering, and shown again
        when the template's own have been found.

        Raises TokenizerError where there is no template, none of that name, or it refuses the messages; RequestError
        for tools or documents that are no lists of mappings, or that the template does not show to the model.
        """
        program = chat_template.choose(self.chat_template, template, tools, documents)
        chat_template.check_shown(program, tools=tools, documents=documents)
        hidden = {"tools": self._hidden.hide(tools), "documents": self._hidden.hide(documents)}
        bos = self._tokens[self.bos_id] if self.bos_id is not None else ""
        eos = self._tokens[self.eos_ids[0]] if self.eos_ids else ""
        text = chat_template.render(
            program, self._hidden.hide(messages), add_generation_prompt, **hidden, bos_token=bos, eos_token=eos
        )
        return self._encode_trusted(text, self._hidden.show)

    def config(self, **changes: Any) -> TokenizerConfig:
        """The TokenizerConfig of this model: padding, begin and end tokens, and whether texts begin with one.

        changes: fields of TokenizerConfig, such as max_length; they count before the model's own. Raises RequestError
        for a name that is no field, a value that cannot be meant, and truncation="chat" without a chat template.
        """
        names = [field.name for field in fields(TokenizerConfig)]
        if unknown := changes.keys() - set(names):
            raise RequestError(f"a TokenizerConfig has no {', '.join(sorted(unknown))}; it has {', '.join(names)}.")
        if changes.get("truncation") == "chat" and not self.chat_template:
            raise RequestError("truncation is 'chat', but this model has no chat template; choose another.")
        own: dict[str, Any] = {
            "pad_id": self.pad_id,
            "bos_id": self.bos_id,
            "eos_ids": self.eos_ids,
            "add_bos": self.add_bos,
        }
        return TokenizerConfig(**{**own, **changes})


def _without_control_tokens(
    ranks: Mapping[tuple[str, str], float], control: Set[str]
) -> Mapping[tuple[str, str], float]:
    """The merges, less those that would make a control token out of ordinary text, should a file have such."""
    if not any(left + right in control for left, right in ranks):
        return ranks
    return {pair: rank for pair, rank in ranks.items() if pair[0] + pair[1] not in control}


_CUTS = ("left", "right", "middle")


def truncate(ids: Sequence[int], config: TokenizerConfig) -> list[int]:
    """Cuts a prompt to config.max_length tokens; one that fits, or has no limit, comes back whole.

    config.truncation names what is dropped: "right" keeps the first max_length ids, "left" the last ones, "middle" the
    first max_length // 2 and as many of the last as there is room for. Where config.add_bos holds and ids[0] is
    config.bos_id, that token stays, whichever part goes; a prompt that begins otherwise is cut as usual.

    Example: [1, 7, 8, 9, 10] cut to 3 is [1, 7, 8] (right), [8, 9, 10] (left), [1, 9, 10] (middle, and left when 1 is
    bos_id and add_bos holds).

    Raises RequestError, naming both lengths, when the prompt is too long and truncation is None or "chat": "chat" drops
    whole messages before they become ids (`truncate_chat`).
    """
    limit = config.max_length
    if limit is None or len(ids) <= limit:
        return list(ids)
    if config.truncation not in _CUTS:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the limit is {limit}; "
            f"shorten it, raise max_length, or choose a truncation: {', '.join(_CUTS)}."
        )
    first = {"left": 0, "right": limit, "middle": limit // 2}[config.truncation]
    if config.add_bos and ids[0] == config.bos_id:
        first = max(first, 1)
    last = limit - first
    return [*ids[:first], *ids[len(ids) - last :]]


def truncate_chat(
    messages: Sequence[Mapping[str, Any]],
    count_tokens: Callable[[Sequence[Mapping[str, Any]]], int],
    config: TokenizerConfig,
) -> list[Mapping[str, Any]]:
    """Drops the oldest turns of a conversation, whole ones, until it fits; system (developer) messages and the newest
    turn stay, wherever they stand.

    A turn begins with a message of the user and goes on to the next one: answers, tool calls and their results go
    together. count_tokens: the length in tokens of a conversation as the model would see it; fewer messages must not
    take more. It is asked about log2(turns) times, so a very long conversation costs little more than a short one.
    Where config.truncation is not "chat" the messages come back as they are, and `truncate` sees to their ids.

    Example: system, user 1, answer 1, user 2, answer 2, user 3 becomes system, user 2, answer 2, user 3 when that fits.

    Raises RequestError, naming both lengths, when not even the system messages and the newest turn fit.
    """
    limit = config.max_length
    if config.truncation != "chat" or limit is None or count_tokens(messages) <= limit:
        return list(messages)
    roles = [message.get("role") for message in messages]

    def kept(start: int) -> list[Mapping[str, Any]]:
        return [message for i, message in enumerate(messages) if i >= start or roles[i] in ("system", "developer")]

    starts = [i for i, role in enumerate(roles) if role == "user"] or [0]
    first = bisect.bisect_left(starts, True, key=lambda start: count_tokens(kept(start)) <= limit)
    if first == len(starts):
        raise RequestError(
            f"the system message and the newest turn alone have {count_tokens(kept(starts[-1]))} tokens and the limit "
            f"is {limit}; shorten them or raise max_length."
        )
    return kept(starts[first])


def pad(sequences: Sequence[Sequence[int]], config: TokenizerConfig) -> tuple[Tensor, Tensor]:
    """Makes a rectangle of prompts of different lengths, for a model that wants one.

    sequences: token ids, a list for each row. The width is the longest row's, rounded up to a multiple of
    config.pad_to_multiple_of; shorter rows are filled with config.pad_id on config.padding_side.

    Returns (ids, mask), both int64 [batch, width]; the mask is 1 at real tokens and 0 at padding. A model must be given
    the mask, and positions that count real tokens only (`mask.cumsum(-1) - 1`): then no padding changes a real
    token's logits.

    Example: [[5, 6, 7], [8]] with pad_id 0 is ids [[5, 6, 7], [8, 0, 0]] and mask [[1, 1, 1], [1, 0, 0]] on the right,
    and [[5, 6, 7], [0, 0, 8]] with [[1, 1, 1], [0, 0, 1]] on the left.

    Raises RequestError when a row must be filled and config.pad_id is None.
    """
    multiple = config.pad_to_multiple_of
    width = -(-max(map(len, sequences), default=0) // multiple) * multiple
    if config.pad_id is None and any(len(sequence) < width for sequence in sequences):
        raise RequestError("pad_id is None and the rows differ in length; set it, to an end token if need be.")
    ids = torch.full((len(sequences), width), config.pad_id or 0, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        start = width - len(sequence) if config.padding_side == "left" else 0
        ids[row, start : start + len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


class IncrementalDecoder:
    """Turns tokens into text while they come: a character leaves as soon as all of its bytes are there.

    A token may end inside a character (UTF-8 takes up to four bytes for one), so bytes wait until theirs is complete.
    What has left is never taken back, and all pieces joined are the decoding of all tokens at once, also where the
    bytes are no UTF-8 at all: then U+FFFD stands for what is broken, as soon as it is certain to be broken.

    prompt_ids: the tokens before the first that is pushed. Their text does not come out; a character that they leave
        half done does, with the token that completes it. So the pieces joined are the decoding of prompt and answer
        together, less the complete characters of the prompt.
    tokenizer.token_bytes(id) gives a token's bytes; tokenizer.special maps the texts of control tokens to their ids.
    skip_special: control tokens give no text; False gives their spelling.
    tokenizer.strip_first_space (some families put a space before every text when they encode): one space goes at the
        very beginning of the whole text, prompt included.

    Example: the tokens b"n", b"\\xc3", b"\\xa9!" give "n", "", "é!". An emoji of several code points (a thumb and its
    colour) may leave one code point at a time; each is a whole character to Unicode.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special: bool = True):
        self._tokenizer = tokenizer
        self._silent = frozenset(tokenizer.special.values()) if skip_special else frozenset()
        self._strip_space = tokenizer.strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for index in prompt_ids:
            self.push(index)

    def push(self, index: int) -> str:
        """The text that one more token makes certain. Raises TokenizerError for an id outside the vocabulary."""
        data = b"" if index in self._silent else self._tokenizer.token_bytes(index)
        if data and self._strip_space:
            data, self._strip_space = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest, when no more tokens come: U+FFFD for a character that was left half done, else nothing."""
        return self._decoder.decode(b"", final=True)


def fallbacks(stop: str) -> list[int]:
    """For each beginning stop[:n + 1]: how long a shorter beginning of `stop` it ends with (Knuth, Morris, Pratt).

    Example: "aab" gives [0, 1, 0], because "aa" ends with "a". Who has read "aa" and meets another "a" has still read
    "aa", and need not start from zero.
    """
    table = [0]
    for character in stop[1:]:
        table.append(_matched(stop, table, table[-1], character))
    return table


def _matched(stop: str, table: Sequence[int], length: int, character: str) -> int:
    """How much of `stop` the text ends with after one more character, when it ended with `length` before."""
    while length and stop[length] != character:
        length = table[length - 1]
    return length + (stop[length] == character)


def checked_stops(stops: Sequence[str]) -> Sequence[str]:
    """The stop strings, if they are a list of texts that are not empty; RequestError otherwise."""
    listed = isinstance(stops, Sequence) and not isinstance(stops, str)
    if not listed or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop strings are {stops!r}; give a list of texts.")
    if "" in stops:
        raise RequestError("a stop string is empty and would end every text; leave it out.")
    return stops


class StopMatcher:
    """Ends a text at the first stop string, however text and stop strings are cut into pieces.

    The stop that is complete first wins; of several that end at the same character, the longest. include: keep it.
    `push` gives what can no longer become part of a stop string and holds back the rest: the longest end of the text
    that begins one. `stopped` is None, or the stop that was met; after that nothing more comes out. `flush` gives what
    is held back when the text ends. checked_stops refuses what is no list of texts.

    Example: with ["aab"], push("xa") gives "x", push("a") "", push("a") "a" (of "aaa" the first is in no "aab"),
    push("b!") "", and stopped is "aab". With include=True the last push gives "aab".
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self.stopped: str | None = None
        self._stops = {stop: fallbacks(stop) for stop in checked_stops(stops)}
        self._lengths = dict.fromkeys(self._stops, 0)  # how much of each the text ends with
        self._include, self._held = include, ""

    def push(self, text: str) -> str:
        """The text that became certain with this piece."""
        if self.stopped is not None:
            return ""
        held, self._held = len(self._held), self._held + text
        for position, character in enumerate(text, start=held + 1):
            for stop, table in self._stops.items():
                self._lengths[stop] = _matched(stop, table, self._lengths[stop], character)
            complete = [stop for stop, length in self._lengths.items() if length == len(stop)]
            if complete:
                self.stopped = max(complete, key=len)
                return self._take(position if self._include else position - len(self.stopped))
        return self._take(len(self._held) - max(self._lengths.values(), default=0))

    def flush(self) -> str:
        """What was held back, when no more text comes; nothing after a stop."""
        self._lengths = dict.fromkeys(self._stops, 0)
        return "" if self.stopped is not None else self._take(len(self._held))

    def _take(self, length: int) -> str:
        certain, self._held = self._held[:length], self._held[length:]
        return certain
