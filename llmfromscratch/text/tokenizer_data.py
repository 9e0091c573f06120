"""What a tokenizer is made of, whatever kind of file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import regex

from llmfromscratch.text.splitting import SplittingRule

UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
PREFIXES = ("prepend", "always", "first", "never")

_SPACE_BEFORE, _SPACE_AFTER = regex.compile(r"\s+\Z"), regex.compile(r"\A\s+")
_WORD_CHARACTER = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")  # what Rust calls \w


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in trusted text as it stands, before the text is split into words.

    special: a control token, left out of decoded text. lstrip, rstrip: it swallows the white space before or after it.
    single_word: it counts only where no letter, digit or underscore touches it. normalized: it is looked for in the
    normalized text, and after those that are not.
    """

    text: str
    index: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerData:
    """Vocabulary, merges and rules of one tokenizer.

    vocab: ids by token. ranks: which two pieces may be joined, the lowest rank first. added: tokens found before
    anything else, among them the control tokens. splitting: see splitting.SplittingRule.
    byte_level: tokens are spelled in characters that stand for bytes. Else they are spelled in the characters of the
    text, spaces visible (▁), and prefix says where such a space is put before the text: "prepend" (before every
    stretch of text between added tokens), "always" (the same, unless one is there), "first" (only at the very
    beginning, unless one is there), "never". strip_first_space: decoding takes that space away again.
    unicode_form: the normalization of the text, or None. ignore_merges: a word that is a token stays whole.
    byte_fallback: a character that is no token becomes the tokens <0xNN> of its bytes; where that does not help
    either, the token unk_id, one for several such characters in a row with fuse_unknown, or nothing where it is None.
    add_bos, add_eos: bos_id stands before, the first of eos_ids after every text.
    chat_template: the model's, or several by their names.
    """

    vocab: dict[str, int]
    ranks: Mapping[tuple[str, str], float]
    added: tuple[AddedToken, ...] = ()
    splitting: SplittingRule = field(default_factory=SplittingRule)
    byte_level: bool = True
    prefix: str = "never"
    strip_first_space: bool = False
    unicode_form: str | None = None
    ignore_merges: bool = False
    byte_fallback: bool = False
    fuse_unknown: bool = False
    unk_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit each other."""
        texts = [token.text for token in self.added]
        if not all(isinstance(text, str) for text in [*self.vocab, *texts]):
            raise ValueError("tokens must be text")
        if (not self.vocab and not texts) or "" in texts:
            raise ValueError("there are no tokens, or an added token is empty")
        ids = {*self.vocab.values(), *(token.index for token in self.added)}
        for index in (self.unk_id, self.bos_id, *self.eos_ids, self.pad_id):
            if index is not None and index not in ids:
                raise ValueError(f"the unknown, begin, end or padding token {index} is outside the vocabulary")
        if min(ids) < 0:
            raise ValueError(f"the token id {min(ids)} is negative")
        if (self.add_bos and self.bos_id is None) or (self.add_eos and not self.eos_ids):
            raise ValueError("a begin or end token is to be added to every text, but there is none")
        self._check_rules()

    def _check_rules(self) -> None:
        if self.unicode_form not in (None, *UNICODE_FORMS) or self.prefix not in PREFIXES:
            raise ValueError(f"the normalization {self.unicode_form!r} or the prefix {self.prefix!r} is unknown")
        for left, right in self.ranks:
            if (
                not left
                or not right
                or left not in self.vocab
                or right not in self.vocab
                or left + right not in self.vocab
            ):
                raise ValueError(f"the merge of {left!r} and {right!r} needs a token that the vocabulary lacks")
        template = self.chat_template
        for text in [*template, *template.values()] if isinstance(template, Mapping) else [template]:
            if text is not None and not isinstance(text, str):
                raise ValueError(f"the chat template is a {type(text).__name__}, not text")


def respect_flags(
    parts: list[str | int], tokens: Mapping[int, AddedToken], found: Mapping[str, int]
) -> list[str | int]:
    """Text cut at added tokens, after their flags: some stay text (single_word), some swallow white space.

    found: the texts that the text was searched for, and their ids.
    """
    if not any(token.lstrip or token.rstrip or token.single_word for token in tokens.values()):
        return parts
    written = {index: text for text, index in found.items()}
    texts = [part if isinstance(part, str) else written[part] for part in parts]
    result: list[str | int] = []
    text, swallows = "", False  # the text since the last token, and whether that token swallows white space after it
    for place, part in enumerate(parts):
        beside = "".join(texts[place - 1 : place])[-1:], "".join(texts[place + 1 : place + 2])[:1]
        if isinstance(part, str) or (tokens[part].single_word and any(map(_WORD_CHARACTER.match, beside))):
            text += texts[place]
            continue
        result += [_swallowed(text, swallows, tokens[part].lstrip), part]
        text, swallows = "", tokens[part].rstrip
    return [part for part in [*result, _swallowed(text, swallows, False)] if part != ""]


def _swallowed(text: str, before: bool, after: bool) -> str:
    """Text between two tokens without the white space that the one before and the one after it swallow."""
    text = _SPACE_AFTER.sub("", text) if before else text
    return _SPACE_BEFORE.sub("", text) if after else text
