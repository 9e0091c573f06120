"""The checks of chapter 2 on bytes, words, merges and lengths. Oracles are plain scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course.comparing import Case, NamedParts, compare, expect_raises, expect_type
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.errors import RequestError
from llmfromscratch.text.splitting import NAMED_RULES, SplittingRule

# ---- 2.1 a character for every byte ------------------------------------------------------------------------------


def check_byte_characters(byte_characters: Callable[[], list[str]]) -> None:
    """What is printable is asked of Python: Latin-1's first 256 code points are those of Unicode."""
    compare(
        byte_characters,
        _characters(),
        [Case("all 256 bytes, in their order")],
        expected="256 different characters: a printable byte's own, for the others those from U+0100 on in their order",
        mistakes=[
            ("a byte that cannot be printed gets the next unused character, not 256 plus its own number",
             lambda: [chr(b if _printable(b) else 256 + b) for b in range(256)]),
            ("the characters stand in the order of a list that has the printable ones first; place 32 belongs to "
             "byte 32", _printable_first),
            ("the space stands for itself; it would fall apart where a vocabulary is written down",
             _characters(also=(32,))),
            ("byte 127 is a control character, not a printable one", _characters(also=(127,))),
            ("byte 160 is a space that does not break; it cannot be seen", _characters(also=(160,))),
            ("byte 173 is a soft hyphen; it cannot be seen", _characters(also=(173,))),
            ("the end of a range is not in it: the last of each printable stretch is missing",
             _characters(without=(126, 172, 255))),
            ("only ASCII counts as printable; Latin-1 has letters and signs above it too",
             _characters(without=range(128, 256))),
            ("bytes stand for themselves, printable or not", lambda: [chr(b) for b in range(256)]),
            ("the others begin at U+0101; the first of them is U+0100", _characters(first=257)),
        ],
    )  # fmt: skip


def _printable(byte: int) -> bool:
    return byte != 32 and chr(byte).isprintable()


def _characters(also: Sequence[int] = (), without: Sequence[int] = (), first: int = 256) -> Callable[[], list[str]]:
    """The table; `also` and `without` are bytes that a mistake takes for printable, or does not."""

    def table() -> list[str]:
        own = [(_printable(byte) or byte in also) and byte not in without for byte in range(256)]
        return [chr(b) if own[b] else chr(first + own[:b].count(False)) for b in range(256)]

    return table


def _printable_first() -> list[str]:
    table = _characters()()
    return [table[b] for b in sorted(range(256), key=lambda b: not _printable(b))]


# ---- 2.2 text into words -----------------------------------------------------------------------------------------

_DASH, _TWO_STEPS = SplittingRule(("-",)), SplittingRule(("-", "b|-c"))
_DIGITS_ALONE, _GPT2 = NAMED_RULES["smollm"].splitting, NAMED_RULES["gpt-2"].splitting
# (text, rule): the words, written out by hand
_WORDS: dict[tuple[str, SplittingRule], list[str]] = {
    ("ab", SplittingRule()): ["ab"],
    ("a-b", _DASH): ["a", "-", "b"],
    ("-a--b", _DASH): ["-", "a", "-", "-", "b"],
    ("abc", _TWO_STEPS): ["a", "b", "c"],
    ("a-cbd", _TWO_STEPS): ["a", "-", "c", "b", "d"],
    ("it's  so", _GPT2): ["it", "'s", " ", " so"],
    ("in 1984", _GPT2): ["in", " 1984"],
    ("in 1984", _DIGITS_ALONE): ["in", " ", "1", "9", "8", "4"],
    ("it's  42", _DIGITS_ALONE): ["it", "'s", "  ", "4", "2"],
    ("x1 = y2\n\n  # né", _DIGITS_ALONE): ["x", "1", " =", " y", "2", "\n\n ", " #", " né"],
    ("", _DASH): [],
    ("", SplittingRule()): [],
}


def check_split_words(split_words: Callable[[str, SplittingRule], list[str]]) -> None:
    """On two toy rules, whose words anyone can see, on GPT-2's rule, and on that one with digits alone."""
    names = {_DASH: '"-"', _TWO_STEPS: '"-", then "b|-c"', _GPT2: "GPT-2's", _DIGITS_ALONE: "a digit, then GPT-2's"}
    compare(
        split_words,
        lambda text, rule: _WORDS[text, rule],
        [Case(f"{text!r}, rule: {names.get(rule, 'no step')}", text, rule) for text, rule in _WORDS],
        expected="the pieces that all the steps leave, none of them empty; joined, they are the text again",
        mistakes=[
            ("only the first step is used", lambda text, rule: _by_steps(text, rule.steps[:1])),
            ("only the last step is used: digits do not stand alone",
             lambda text, rule: _by_steps(text, rule.steps[-1:])),
            ("the steps run from the last to the first", lambda text, rule: _by_steps(text, rule.steps[::-1])),
            ("what lies between two matches is lost", partial(_by_rule, gaps=False)),
            ("what an expression matches is lost; it is a piece of its own", partial(_by_rule, matches=False)),
            ("empty pieces come out, where a match stands at an end of a piece or next to another match",
             partial(_by_rule, empty=True)),
            ("a text of no characters has no words; an empty one comes out",
             lambda text, rule: _by_rule(text, rule) or [""]),
            ("white space is taken off the pieces; then they are not the text any more",
             lambda text, rule: [p.strip() for p in _by_rule(text, rule) if p.strip()]),
            ("every step cuts the whole text; it should cut the pieces that the step before it left",
             lambda text, rule: [p for step in rule.steps for p in _by_steps(text, [step])] or [text] * bool(text)),
        ],
    )  # fmt: skip


def _by_steps(
    text: str, steps: Sequence[Any], gaps: bool = True, matches: bool = True, empty: bool = False
) -> list[str]:
    """Pieces by the places of the matches, in place of `split`."""
    pieces = [text] if text else []
    for step in steps:
        parts: list[str] = []
        for piece in pieces:
            end = 0
            for match in step.finditer(piece):
                parts += [piece[end : match.start()]] * gaps + [match[0]] * matches
                end = match.end()
            parts += [piece[end:]] * gaps
        pieces = [part for part in parts if part or empty]
    return pieces


def _by_rule(text: str, rule: SplittingRule, **wrong: bool) -> list[str]:
    return _by_steps(text, rule.steps, **wrong)


# ---- 2.3 merges --------------------------------------------------------------------------------------------------

Ranks = Mapping[tuple[str, str], float]
_THE = {("h", "e"): 0, ("t", "h"): 1, ("t", "he"): 2}
_BETTER_LATER = {("a", "b"): 3, ("ab", "a"): 1, ("ab", "ab"): 2}
_EQUAL = {("a", "b"): 1, ("b", "c"): 1}


def check_merge_plain(merge: Callable[[Sequence[str], Ranks], list[str]]) -> None:
    """On words of a few letters; the right order of joins is found by sorting all the pairs again each time."""
    cases: list[tuple[str, Ranks]] = [
        ("", _THE),
        ("t", _THE),
        ("he", {("h", "e"): 5}),
        ("xyz", _THE),
        ("he", {("h", "e"): 0}),
        ("the", {("h", "e"): 0, ("t", "h"): 1}),
        ("the", _THE),
        ("abc", _EQUAL),
        ("aaa", {("a", "a"): 1}),
        ("aaaa", {("a", "a"): 1, ("aa", "aa"): 2}),
        ("abab", _BETTER_LATER),
        ("abcab", {("a", "b"): 2.5, ("b", "c"): 2, ("bc", "a"): 4, ("a", "bc"): 3, ("abc", "ab"): 7.5}),
    ]
    compare(
        merge,
        _merged(min),
        [Case(f"{list(text)} with ranks {ranks}", list(text), ranks) for text, ranks in cases],
        expected="the pieces after all joins, at every step of the lowest-ranked pair of all, the leftmost of equals",
        mistakes=[
            ("rank 0 counts as no rank; ask whether the pair is there", _merged(min, zero=False)),
            ("the highest rank goes first; the lowest is the best",
             _merged(lambda found: max(found, key=lambda pair: (pair[0], -pair[1])))),
            ("the first pair from the left that has a rank is joined, whatever its rank",
             _merged(lambda found: min(found, key=lambda pair: pair[1]))),
            ("all places of a pair are joined at once; after one join a better pair may stand beside it",
             _merged_all_places),
            ("of equal ranks the rightmost is joined; the leftmost is asked for",
             _merged(lambda found: min(found, key=lambda pair: (pair[0], -pair[1])))),
            ("only one pair is joined; go on until none has a rank", _merged(min, rounds=1)),
            ("the ranks are gone through once, best first; a join can make a pair of a rank that was passed",
             _merged_in_one_pass),
            ("the pieces are returned as they came", _merged(min, rounds=0)),
            ("everything is joined, whether the pair has a rank or not",
             lambda pieces, ranks: ["".join(pieces)] if pieces else []),
        ],
    )  # fmt: skip


def _merged(choose: Callable[[list[tuple[float, int]]], tuple[float, int]], rounds: int = 99, zero: bool = True) -> Any:
    """choose: picks a (rank, place) of all that are possible."""

    def merge(pieces: Sequence[str], ranks: Ranks) -> list[str]:
        pieces = list(pieces)
        for _ in range(rounds):
            pairs = [(pieces[i], pieces[i + 1]) for i in range(len(pieces) - 1)]
            found = [(ranks[p], i) for i, p in enumerate(pairs) if p in ranks and (zero or ranks[p])]
            if not found:
                break
            i = choose(found)[1]
            pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]
        return pieces

    return merge


def _joined_everywhere(pieces: Sequence[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    i = 0
    while i < len(pieces):
        step = 2 if tuple(pieces[i : i + 2]) == pair else 1
        result.append("".join(pieces[i : i + step]))
        i += step
    return result


def _merged_all_places(pieces: Sequence[str], ranks: Ranks) -> list[str]:
    while found := [pair for pair in pairwise(pieces) if pair in ranks]:
        pieces = _joined_everywhere(pieces, min(found, key=ranks.__getitem__))
    return list(pieces)


def _merged_in_one_pass(pieces: Sequence[str], ranks: Ranks) -> list[str]:
    for pair in sorted(ranks, key=ranks.__getitem__):
        pieces = _joined_everywhere(pieces, pair)
    return list(pieces)


# ---- 2.5 a prompt that is too long -------------------------------------------------------------------------------


def _config(**settings: Any) -> Any:
    return learner_engine.reference("tokenizer").TokenizerConfig(**settings)


def check_truncate(truncate: Callable[[list[int], Any], list[int]]) -> None:
    """Every way of cutting on prompts of a few tokens; what is kept is counted off one token at a time."""
    begin = {"bos_id": 1, "add_bos": True}
    settings: list[tuple[list[int], dict[str, Any]]] = [
        ([7, 8, 9], {}),
        ([7, 8, 9], {"max_length": 3}),
        ([7, 8, 9], {"truncation": "left"}),
        ([1, 7, 8, 9, 10], {"max_length": 3, "truncation": "right"}),
        ([1, 7, 8, 9, 10], {"max_length": 3, "truncation": "left"}),
        ([1, 7, 8, 9, 10], {"max_length": 3, "truncation": "middle"}),
        ([5, 7, 8, 9, 10], {"max_length": 1, "truncation": "middle"}),
        ([1, 7, 8, 9, 10], {"max_length": 4, "truncation": "middle"}),
        ([1, 7, 8, 9, 10], {"max_length": 3, "truncation": "left", **begin}),
        ([5, 7, 8, 9, 10], {"max_length": 3, "truncation": "left", **begin}),
        ([1, 7, 8, 9, 10], {"max_length": 3, "truncation": "left", "bos_id": 1}),
        ([1, 7, 8], {"max_length": 1, "truncation": "left", **begin}),
        ([1, 7, 8], {"max_length": 1, "truncation": "middle", **begin}),
        ([1, *range(20, 30)], {"max_length": 5, "truncation": "middle", **begin}),
    ]
    compare(
        truncate,
        _kept(),
        [Case(f"{ids} with {_said(setting)}", ids, _config(**setting)) for ids, setting in settings],
        expected="exactly max_length tokens from the ends that truncation names, the begin token among them",
        mistakes=[
            ("left and right are exchanged: the name says which end is dropped", _kept(exchanged=True)),
            ("the begin token is dropped with the beginning; config.add_bos says that it stays", _kept(begin=False)),
            ("the begin token is kept where config.add_bos does not ask for it", _kept(always=True)),
            ("a begin token is put before a prompt that has none; only one that is there stays", _kept(forced=True)),
            ("the begin token comes on top: the result is one token too long", _kept(on_top=True)),
            ("middle keeps max_length // 2 of the first and the rest of the last; the odd token is at the wrong end",
             _kept(odd_first=True)),
            ("middle keeps max_length // 2 at both ends; an odd length has room for one more", _kept(both_half=True)),
            ("ids[-0:] is the whole list, not an empty one", _kept(minus_zero=True)),
            ("nothing is cut", lambda ids, config: list(ids)),
        ],
    )  # fmt: skip
    expect_type(truncate((7, 8), _config()), list)  # type: ignore[arg-type]
    for truncation in (None, "chat"):
        text = f"5 tokens with max_length 3 and truncation {truncation!r}"
        refuse = partial(truncate, [1, 7, 8, 9, 10], _config(max_length=3, truncation=truncation))
        message = expect_raises(refuse, RequestError, case=text)
        if not all(length in message for length in "53"):
            raise CheckFailed(
                "a message that names both lengths, so that its reader knows how much is too much",
                case=f"{text}: the message is {message!r}",
            )


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "no limit"


def _kept(**wrong: bool) -> Callable[[list[int], Any], list[int]]:
    """The places that stay, chosen one at a time; `wrong` switches one mistake on."""

    def cut(ids: list[int], config: Any) -> list[int]:
        limit, n = config.max_length, len(ids)
        if limit is None or n <= limit:
            return list(ids)
        half = (limit + 1) // 2 if wrong.get("odd_first") else limit // 2
        last = half if wrong.get("both_half") else limit - half
        way = config.truncation
        if wrong.get("exchanged"):
            way = {"left": "right", "right": "left"}.get(way, way)
        middle = [*range(half), *range(n - last, n)]
        kept = {"right": [*range(limit)], "left": [*range(n - limit, n)], "middle": middle}[way]
        starts = ids[0] == config.bos_id
        asked = config.add_bos and wrong.get("begin", True) and (starts or wrong.get("forced"))
        if (asked or (wrong.get("always") and starts)) and (0 not in kept or not starts):
            tail = kept if wrong.get("on_top") else kept[1:]
            if wrong.get("minus_zero") and not tail:
                tail = [*range(n)]
            return [config.bos_id, *(ids[place] for place in tail)]
        return [ids[place] for place in kept]

    return cut


# ---- 2.6 a rectangle of prompts ----------------------------------------------------------------------------------


def check_pad(pad: Callable[[list[list[int]], Any], tuple[Tensor, Tensor]]) -> None:
    """Against rectangles that are laid out as lists, one row at a time."""

    def both(sequences: list[list[int]], config: Any) -> NamedParts:
        result = pad(sequences, config)
        expect_type(result, tuple)
        if len(result) != 2:
            raise CheckFailed("two tensors, ids and mask", case=f"got a tuple of {len(result)}")
        return NamedParts(zip(("ids", "mask"), result, strict=True))

    settings: list[tuple[list[list[int]], dict[str, Any]]] = [
        ([[5]], {"pad_id": 9}),
        ([[5, 6], [7]], {"pad_id": 9, "padding_side": "right"}),
        ([[5, 6], [7]], {"pad_id": 9, "padding_side": "left"}),
        ([[5, 9], [9]], {"pad_id": 9, "padding_side": "right"}),
        ([[5, 6, 7], [8]], {"pad_id": 0}),
        ([[5, 6, 7], [8]], {"pad_id": 9, "pad_to_multiple_of": 2}),
        ([[5, 6, 7, 8], [8]], {"pad_id": 9, "pad_to_multiple_of": 4, "padding_side": "right"}),
        ([[3, 9], [4], [5, 6, 7, 8, 1]], {"pad_id": 9, "pad_to_multiple_of": 4}),
        ([[3, 9], [4]], {"pad_id": 0, "pad_to_multiple_of": 4}),
        ([[5, 6], []], {"pad_id": 9}),
    ]
    compare(
        both,
        _rectangle(),
        [Case(f"{rows} with {_said(setting)}", rows, _config(**setting)) for rows, setting in settings],
        expected="two int64 tensors [batch, width]: ids filled with pad_id on padding_side, and 1 at real tokens only",
        mistakes=[
            ("the padding is on the other side", _rectangle(other_side=True)),
            ("the mask is 0 wherever pad_id stands; a real token may have that id too", _rectangle(by_id=True)),
            ("the mask is 1 at padding and 0 at real tokens", _rectangle(inverted=True)),
            ("the mask is 1 everywhere", _rectangle(all_ones=True)),
            ("the mask is right, but the padding of the ids is on the other side", _rectangle(ids_other_side=True)),
            ("the width is the longest row's; pad_to_multiple_of is left out", _rectangle(no_multiple=True)),
            ("a width that is a multiple already is made wider", _rectangle(always_wider=True)),
            ("the padding is 0, not pad_id", _rectangle(zeros=True)),
            ("the width is fixed at pad_to_multiple_of or more and not rounded up to a multiple",
             _rectangle(at_least=True)),
        ],
    )  # fmt: skip
    rows, unset = [[5, 6], [7, 8]], _config(pad_id=None)
    compare(
        both,
        _rectangle(),
        [Case(f"{rows} and no pad_id", rows, unset)],
        expected="rows of one length as they are: where nothing is filled, no pad_id is needed",
    )
    expect_raises(partial(pad, [[5, 6], [7]], unset), RequestError, case="two lengths and no pad_id to fill with")
    wider = _config(pad_id=None, pad_to_multiple_of=4)
    case = f"{rows} with pad_to_multiple_of=4 and no pad_id: rows of equal length are filled too"
    expect_raises(partial(pad, rows, wider), RequestError, case=case)


def _rectangle(**wrong: bool) -> Callable[[list[list[int]], Any], NamedParts]:
    """Rows laid out as lists; `wrong` switches one mistake on."""

    def lay_out(sequences: list[list[int]], config: Any) -> NamedParts:
        multiple, width = config.pad_to_multiple_of, max(len(row) for row in sequences)
        if wrong.get("at_least"):
            width = max(width, multiple)
        elif wrong.get("always_wider"):
            width = (width // multiple + 1) * multiple
        elif not wrong.get("no_multiple"):
            while width % multiple:
                width += 1
        filler = 0 if wrong.get("zeros") or config.pad_id is None else config.pad_id
        left = (config.padding_side == "left") != wrong.get("other_side", False)
        ids_left = left != wrong.get("ids_other_side", False)
        ids, mask = [], []
        for row in sequences:
            empty = width - len(row)
            ids.append([filler] * empty + row if ids_left else row + [filler] * empty)
            mask.append([0] * empty + [1] * len(row) if left else [1] * len(row) + [0] * empty)
        if wrong.get("by_id"):
            mask = [[int(index != filler) for index in row] for row in ids]
        if wrong.get("inverted") or wrong.get("all_ones"):
            mask = [[1 if wrong.get("all_ones") else 1 - value for value in row] for row in mask]
        return NamedParts(ids=torch.tensor(ids), mask=torch.tensor(mask))

    return lay_out
