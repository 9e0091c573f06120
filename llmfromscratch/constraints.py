"""What narrows an answer from outside: a regular expression, a JSON schema, banned words, words that must come.

    text of the answer so far ─▶ which bytes may follow ─▶ which tokens begin so ─▶ a mask over the logits

The library llguidance follows expressions and schemas over the bytes of the tokens (chapter 5 builds the idea by hand,
for regular expressions). Each request has a follower of its own; what is compiled is kept for the next request that
asks for the same. A constraint looks at the answer alone, not at the prompt.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import llguidance
import torch
from torch import Tensor

from llmfromscratch import constraint_expressions, constraint_schemas
from llmfromscratch.constraint_endings import Budget, Endings, mask_into, reason
from llmfromscratch.constraint_words import BadWords, RequiredWords, Vocabulary
from llmfromscratch.errors import RequestError

if TYPE_CHECKING:
    from llmfromscratch import sampling, tokenizer

_MOST_KEPT = 32  # compiled grammars, for each tokenizer
_MOST_SPARE = 8  # tokens that the end of a JSON text may move away by at once: a new item, a new property
# One space, or a new line with its indentation: small models would go on with white space for ever.
_WHITE_SPACE = r"( |\n {0,20}|\n\t{1,5})"
# The library's own bounds on a grammar and on what one step may cost, tighter than it has them: about 20 ms a step.
_LIMITS: dict[str, Any] = {"max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}


def of(
    params: sampling.SamplingParams, tokenizer: tokenizer.Tokenizer | None, end_ids: Collection[int], vocab_size: int
) -> sampling.Constraint | None:
    """What the parameters demand of the answer's text, as a constraint for one request; None where it is nothing.

    end_ids: the tokens that end the answer. vocab_size: columns of the logits; ids that the tokenizer does not have are
    never allowed under an expression or a schema.

    An answer under an expression or a schema that nears max_tokens is brought to its end where a way to one is found,
    so that it is whole; not so together with bad_words.

    Raises RequestError for an expression or a schema that cannot be met, for what is not supported in it, by name, and
    for one that is too large; and where there is no tokenizer to tell what tokens say.
    """
    asked = params.regex is not None, params.json_schema is not None, params.bad_words, params.required_words
    if not any(asked):
        return None
    if tokenizer is None:
        raise RequestError("regex, json_schema, bad_words and required_words need a tokenizer; this model has none.")
    workshop = _workshop(tokenizer, vocab_size)
    ends = sorted({index for index in end_ids if 0 <= index < vocab_size})
    endings = None if params.bad_words else workshop.endings  # the way to an end may lead over a banned word
    room = params.max_tokens
    parts: list[_Part] = []
    if params.regex is not None:
        parts.append(Grammar(workshop.expression(params.regex), ends, vocab_size, room, endings))
    if params.json_schema is not None:
        spare = max(1, min(_MOST_SPARE, room // 8))
        parts.append(Grammar(workshop.schema(params.json_schema), ends, vocab_size, room, endings, spare))
    if params.bad_words:
        parts.append(BadWords(params.bad_words, workshop.vocabulary))
    if params.required_words:
        parts.append(RequiredWords(params.required_words, workshop.vocabulary, ends))
    return parts[0] if len(parts) == 1 else Joined(parts)


class _Part(Protocol):
    def allowed(self) -> Tensor: ...

    def advance(self, token_id: int) -> None: ...


class Joined:
    """Several constraints at once: what all of them allow."""

    def __init__(self, parts: Sequence[_Part]):
        self._parts = parts

    def allowed(self) -> Tensor:
        """bool [vocab]: the tokens that every part allows."""
        first, *others = (part.allowed() for part in self._parts)
        for mask in others:
            first = first & mask
        return first

    def advance(self, token_id: int) -> None:
        """The token was chosen."""
        for part in self._parts:
            part.advance(token_id)


class Grammar:
    """Follows an answer through an expression or a schema.

    matcher: the library's, at the beginning; it becomes this object's own. Its vocabulary has one more token than the
    model's, an end of its own: that one is allowed exactly where the text may end, and stands for all of end_ids. So an
    end token that has a text of its own is not taken for that text.
    room: max_tokens. endings: what finds a short way to an end, so that an answer that nears max_tokens is brought to
    it in time; None leaves it unfinished. spare: tokens kept in hand for that.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        end_ids: Sequence[int],
        vocab_size: int,
        room: int,
        endings: Endings | None = None,
        spare: int = 1,
    ):
        self._matcher, self._ends, self._vocab = matcher, list(end_ids), vocab_size
        self._endings, self._room = endings, room
        self._bits = torch.zeros(vocab_size // 32 + 1, dtype=torch.int32)
        self._mask: Tensor | None = None
        self._ended = False
        self._budget = Budget(spare)

    def allowed(self) -> Tensor:
        """bool [vocab]: the tokens that can go on or end. Raises RequestError where following gets too costly."""
        if self._mask is None:
            bits = mask_into(self._matcher, self._bits)
            if self._endings is not None and not self._ended:
                bits = self._budget.narrow(bits, self._matcher, self._endings, self._room)
            mask = bits[: self._vocab]
            mask[self._ends] = bits[self._vocab]
            self._mask = mask
        return self._mask

    def advance(self, token_id: int) -> None:
        """The token was chosen. Raises RequestError if it was not allowed."""
        self._mask = None
        self._room -= 1
        if token_id in self._ends or self._ended:
            self._ended = True
        elif not self._matcher.consume_token(token_id):
            raise RequestError(f"token {token_id} is not allowed here: {reason(self._matcher)}")


class _Workshop:
    """One model's vocabulary in the library's form, and what was compiled for it lately."""

    def __init__(self, tokenizer: tokenizer.Tokenizer, vocab_size: int):
        control = set(tokenizer.special.values())
        known = [index in tokenizer and index not in control for index in range(vocab_size)]
        tokens = [tokenizer.token_bytes(index) if known[index] else b"" for index in range(vocab_size)]
        self.vocabulary, self.endings = Vocabulary(tokens), Endings(tokens)
        # the wrapper asks for this shape; the library never asks ours to encode, as it is told not to force any tokens
        shape = _Tokens(tokens)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(shape), eos_token=vocab_size)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    def expression(self, expression: str) -> llguidance.LLMatcher:
        return self._compiled(f"/{constraint_expressions.translate(expression)}/", "regex")

    def schema(self, schema: Any) -> llguidance.LLMatcher:
        prepared = json.loads(constraint_schemas.prepare(schema))
        prepared["x-guidance"] = {"whitespace_pattern": _WHITE_SPACE}
        return self._compiled("%json " + json.dumps(prepared), "json_schema")

    def _compiled(self, rule: str, name: str) -> llguidance.LLMatcher:
        """A matcher of one's own for a rule in the library's language."""
        with self._lock:
            matcher = self._kept.get(rule)
            if matcher is None:
                matcher = self._compile(rule, name)
                self._kept[rule] = matcher
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(rule)
            return matcher.deep_copy()

    def _compile(self, rule: str, name: str) -> llguidance.LLMatcher:
        # forcing would leave one way only to cut what must come into tokens; here every way is as good as another
        text = f'%llguidance {{"no_forcing": true}}\nstart: {rule}'
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"{name} is not supported: {reason(matcher)}")
        bits = torch.zeros(len(self.vocabulary) // 32 + 1, dtype=torch.int32)
        if not mask_into(matcher, bits)[: len(self.vocabulary) + 1].any():
            raise RequestError(f"{name} cannot be met: no token can begin such an answer.")
        return matcher


class _Tokens:
    """A vocabulary in the shape that the library reads: one token more than the model has, to end with."""

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        return []


_workshops: WeakKeyDictionary[Any, dict[int, _Workshop]] = WeakKeyDictionary()
_workshops_lock = Lock()


def _workshop(tokenizer: tokenizer.Tokenizer, vocab_size: int) -> _Workshop:
    with _workshops_lock:
        workshops = _workshops.setdefault(tokenizer, {})
        if vocab_size not in workshops:
            workshops[vocab_size] = _Workshop(tokenizer, vocab_size)
        return workshops[vocab_size]
