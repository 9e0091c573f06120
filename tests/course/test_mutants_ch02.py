"""Chapter 2's checks reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

from itertools import chain

import hunts
import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.failures import CheckFailed

_TRUNCATED = "return [*ids[:first], *ids[len(ids) - last :]]"
_KEEPS_BEGIN = "if config.add_bos and ids[0] == config.bos_id:"
_INIT = "        self._tokenizer = tokenizer\n"
_DECODE = "return self._decoder.decode(data)"
_STEPPED = "pieces = [part for piece in pieces for part in step.split(piece) if part]"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "2.1": [
        ("chr(next(others))", "chr(256 + byte)", "next unused character"),
        ("for byte in range(256)]", "for byte in sorted(range(256), key=lambda b: b not in printable)]",
         "printable ones first"),
        ("range(33, 127)", "range(32, 127)", "space stands for itself"),
        ("range(33, 127)", "range(33, 128)", "control character"),
        ("range(161, 173)", "range(160, 173)", "does not break"),
        ("*range(161, 173), *range(174, 256)", "*range(161, 256)", "soft hyphen"),
        ("range(33, 127), *range(161, 173), *range(174, 256)", "range(33, 126), *range(161, 172), *range(174, 255)",
         "end of a range"),
        (", *range(161, 173), *range(174, 256)", "", "only ASCII"),
        ("chr(byte) if byte in printable else chr(next(others))", "chr(byte)", "printable or not"),
        ("range(256, 512)", "range(257, 512)", "U+0101"),
        ("return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]",
         "return {byte: chr(byte) for byte in range(256)}", "a dict"),
    ],
    "2.2": [
        ("rule.steps:", "rule.steps[:1]:", "only the first step"),
        ("rule.steps:", "rule.steps[-1:]:", "digits do not stand alone"),
        ("rule.steps:", "reversed(rule.steps):", "from the last to the first"),
        ("step.split(piece) if part", "step.findall(piece) if part", "between two matches is lost"),
        ("step.split(piece)", "step.split(piece)[::2]", "matches is lost"),
        (" if part]", "]", "empty pieces"),
        ("[text] if text else []", "[text]", ""),
        ("    return pieces", '    return pieces or [""]', "an empty one comes out"),
        ("    return pieces", "    return [p.strip() for p in pieces if p.strip()]", "white space"),
        (_STEPPED, "pieces = pieces + [part for part in step.split(text) if part]", ""),
        ("    return pieces", "    return [p for s in rule.steps for p in s.split(text) if p] or pieces",
         "cuts the whole text"),
        ("    return pieces", "    return tuple(pieces)", "a list"),
    ],
    "2.3": [
        ("if pair in ranks]", "if ranks.get(pair)]", "rank 0"),
        ("min(ranked)", "max(ranked, key=lambda pair: (pair[0], -pair[1]))", "the lowest is the best"),
        ("min(ranked)", "ranked[0]", "first pair from the left"),
        ("min(ranked)", "min(ranked, key=lambda pair: (pair[0], -pair[1]))", "rightmost"),
        ("while ranked :=", "if ranked :=", "only one pair is joined"),
        ("    pieces = list(pieces)\n", "", "left as they were"),
        ("place : place + 2", "place : place + 1", ""),
        ("        _, place = min(ranked)  # of equal ranks the smallest place, which is the leftmost\n"
         "        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]\n",
         "        best, done, i = min(ranked)[0], [], 0\n"
         "        while i < len(pieces):\n"
         "            step = 2 if ranks.get(tuple(pieces[i:i + 2])) == best else 1\n"
         "            done.append(''.join(pieces[i:i + step]))\n"
         "            i += step\n"
         "        pieces = done\n",
         "all places of a pair"),
        ("    while ranked := [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) "
         "if pair in ranks]:\n",
         "    for pair in sorted(ranks, key=ranks.get):\n"
         "      while ranked := [(0, p) for p, two in enumerate(pairwise(pieces)) if two == pair]:\n",
         "gone through once"),
        ("    return pieces", "    return ''.join(pieces)", "a list"),
    ],
    "2.4": [
        ('if part != ""]', "if part]", "0 is an id"),
        ("key=len, reverse=True", "key=len", "shortest"),
        ("sorted(special, key=len, reverse=True)", "list(special)", "listed first"),
        ("sorted(special, key=len, reverse=True)", "list(special)[::-1]", "listed last"),
        ("sorted(special, key=len, reverse=True)", "sorted(special)", "shortest"),
        ("map(regex.escape, longest_first)", "longest_first", "'axb' is no token: tokens are plain text"),
        ("map(regex.escape, longest_first)", "special", "listed first"),
        ("special[match.group()]", "match.group()", "spelling"),
        (' if part != ""]', "]", "empty text"),
        ("[*parts, text[end:]]", "parts", "after the last token"),
        ("[text[end : match.start()], special", "[special", ""),
        ("[*parts, text[end:]] if part", "[*parts, text[end:]] if isinstance(part, int) and part",
         "between the tokens is lost"),
        ("[part for part in [*parts, text[end:]]",
         "[part for part in (p.strip() if isinstance(p, str) else p for p in [*parts, text[end:]])", "white space"),
        (' or r"(?!)"', "", "without alternatives"),
    ],
    "2.5": [
        ('"left": 0, "right": limit', '"left": limit, "right": 0', "exchanged"),
        ("first = max(first, 1)", "pass", "dropped with the beginning"),
        ("config.add_bos and ids[0]", "ids[0]", "does not ask"),
        (_TRUNCATED, "return ([config.bos_id, *ids[len(ids) - limit + 1 :]] if config.add_bos and not first"
         " else [*ids[:first], *ids[len(ids) - last :]])", "has none"),
        ("last = limit - first", "last = limit - min(first, limit // 2) if config.truncation == 'middle' else limit"
         " if config.truncation == 'left' else 0", "one token too long"),
        ('"middle": limit // 2', '"middle": (limit + 1) // 2', "odd token"),
        ("last = limit - first", "last = min(limit - first, limit // 2) if config.truncation == 'middle'"
         " else limit - first", "both ends"),
        ("ids[len(ids) - last :]", "ids[-last:]", ""),
        ("ids[len(ids) - last :]", "(ids[-last:] if config.truncation != 'right' else [])", "ids[-0:]"),
        (_TRUNCATED, "return list(ids)", "nothing is cut"),
        ("if config.truncation not in _CUTS:\n        raise", "if False:\n        raise", "RequestError"),
        ("the prompt has {len(ids)} tokens and the limit is {limit}; ", "the prompt is too long; ", "both lengths"),
    ],
    "2.6": [
        ("any(len(sequence) < width for sequence in sequences)",
         "len(set(map(len, sequences))) > 1", "filled too"),
        ('== "left"', '== "right"', "other side"),
        ("    return ids, mask", "    return ids, torch.ne(ids, config.pad_id).long()", "may have that id too"),
        ("    return ids, mask", "    return ids, 1 - mask", "at padding"),
        ("    return ids, mask", "    return ids, 1 - mask", "mask: got [[0]], expected [[1]]"),
        ("    return ids, mask", "    return ids + 1, mask", "ids: got [[6]], expected [[5]]"),
        ("    return ids, mask", "    return ids, torch.ones_like(ids)", "1 everywhere"),
        ("    return ids, mask", "    return ids, mask.float()", "dtype"),
        ("    return ids, mask", "    return ids, mask.bool()", "dtype"),
        ("    return ids, mask", "    return [ids, mask]", "tuple"),
        ("    return ids, mask", "    return ids, mask, mask", "two tensors"),
        ("        ids[row, start :", "        back = width - len(sequence) - start\n        ids[row, back :", ""),
        ("// multiple) * multiple", "// 1)", "left out"),
        ("-(-max(map(len, sequences), default=0) // multiple) * multiple",
         "(max(map(len, sequences)) // multiple + 1) * multiple", "made wider"),
        ("-(-max(map(len, sequences), default=0) // multiple) * multiple",
         "max(multiple, *map(len, sequences))", "not rounded up"),
        ("config.pad_id or 0", "0", "not pad_id"),
        ("        raise RequestError(", "        print(", "RequestError"),
    ],
    "2.7": [
        ('data.removeprefix(b" ")', 'data.lstrip(b" ")', "only one should"),
        ("if data and self._strip_space:",
         'if data.startswith(b" ") and self._strip_space:', "though text stood before"),
        ("if data and self._strip_space:", "if self._strip_space:", "without text counts as the beginning"),
        (_DECODE, "return data.decode('utf-8', 'replace')", "on its own"),
        (_DECODE, "return data.decode('utf-8', 'ignore')", "dropped"),
        ('errors="replace"', 'errors="ignore"', "vanish"),
        (_DECODE, "self._all = getattr(self, '_all', b'') + data\n        return ''", "until the end"),
        (_DECODE, "self._all = getattr(self, '_all', '') + self._decoder.decode(data)\n        return self._all",
         "all of the text so far"),
        (_DECODE, "self._decoder.decode(data)", "push gives None"),
        ("final=True", "final=False", "lost"),
        ('return self._decoder.decode(b"", final=True)', 'return ""', "half character at the end is lost"),
        ('return self._decoder.decode(b"", final=True)', "pass", "flush gives None"),
        ('(errors="replace")', "()", "`errors` has to say what stands for them"),
        (_DECODE, "self._data = getattr(self, '_data', b'') + data\n"
         "        try:\n"
         "            text, self._data = self._data.decode(), b''\n"
         "        except UnicodeDecodeError:\n"
         "            text = ''\n"
         "        return text", "all together or not at all"),
        ("            self.push(index)", "            pass", "prompt is forgotten"),
        (" if skip_special else frozenset()", "", "silent though"),
        ("frozenset(tokenizer.special.values())", "tokenizer.special", "never one of its keys"),
        ("frozenset(tokenizer.special.values()) if skip_special else frozenset()", "frozenset()", "spelling though"),
        ('data.removeprefix(b" "), False', 'data.removeprefix(b" "), True', "every token"),
        ("= tokenizer.strip_first_space", "= False", "first space stays"),
        ("= tokenizer.strip_first_space", "= True", "no strip_first_space"),
        ("            self.push(index)", "            self.push(index)\n"
         "        self._strip_space = tokenizer.strip_first_space", "began with the prompt"),
        ('self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")',
         'self.__class__._decoder = getattr(self.__class__, "_decoder", None) or '
         'codecs.getincrementaldecoder("utf-8")(errors="replace")', "belong to the class"),
        ("self._tokenizer.token_bytes(index)", "self._tokenizer.tokens[index] if index < 3 else b''", ""),
    ],
    "2.8": [
        ("_matched(stop, table, self._lengths[stop], character)",
         "(self._lengths[stop] + 1 if stop[self._lengths[stop]] == character else int(stop[0] == character))",
         "begins from zero"),
        ("        held, self._held", "        self._lengths = dict.fromkeys(self._stops, 0)\n        held, self._held",
         "on its own"),
        ("len(self._held) - max(self._lengths.values(), default=0))", "len(self._held))", "before it is complete"),
        ("max(self._lengths.values(), default=0)", "min(self._lengths.values(), default=0)", "has begun least"),
        ("max(self._lengths.values(), default=0)", "[0, *self._lengths.values()][-1]", "only the last stop string"),
        ("max(self._lengths.values(), default=0)", "max(0, max(self._lengths.values(), default=0) - 1)",
         "less is held"),
        ("max(self._lengths.values(), default=0))", "max(self._lengths.values(), default=0) - 1)", "more is held"),
        ("self._lengths[stop], character)", "0, character)", "forgotten with every character"),
        ("max(complete, key=len)", "complete[0]", "one listed first is taken"),
        ("start=held + 1", "start=1", "counted in the piece"),
        ("len(self._held) - max(self._lengths.values(), default=0))",
         "max(0, len(self._held) - max((len(stop) - 1 for stop in self._stops), default=0)))", "more is held back"),
        ("max(complete, key=len)", "min(complete, key=len)", "longest counts"),
        ("position if self._include else position - len(self.stopped)", "position - len(self.stopped)",
         "include=True"),
        ("position if self._include else position - len(self.stopped)", "position", "include is False"),
        ('        if self.stopped is not None:\n            return ""', "        if self.stopped is not None:\n"
         "            return text", "pieces that come after the stop"),
        ('        if self.stopped is not None:\n            return ""\n', "", "called again after 'x' is complete"),
        ('"" if self.stopped is not None else self._take', "self._take", "flush gives what was still held"),
        ("self._take(len(self._held))\n", '""\n', "lost at the end"),
        ("return self._take(position if self._include else position - len(self.stopped))",
         "return self._take(len(self._held))", "the rest of the piece"),
        ("                return self._take(position if", "                self._take(position if",
         "Leave the loop when"),
        ("if complete:\n                self.stopped = max(complete, key=len)\n                return "
         "self._take(position if self._include else position - len(self.stopped))",
         "if complete:\n                met = max(complete, key=len)\n                self._stops = {}\n"
         "                return self._take(position if self._include else position - len(met))",
         "`stopped` stays None"),
        ("if complete:", "if False:", "called again after 'x' is complete"),
        ("max(self._lengths.values(), default=0)", "max(self._lengths.values())", ""),
        ("checked_stops(stops)", "stops", "RequestError"),
    ],
}  # fmt: skip


STOPS_BY_SEARCH = """
class StopMatcher:
    def __init__(self, stops, include=False):
        if isinstance(stops, str) or "" in stops:
            raise RequestError("a list of texts, none of them empty")
        self.stops, self.include, self.text, self.given, self.stopped = stops, include, "", 0, None

    def push(self, text):
        if self.stopped is not None:
            return ""
        self.text += text
        places = [(self.text.find(s) + len(s), -len(s), s) for s in self.stops if s in self.text]
        if places:
            end, _, self.stopped = CHOICE
            return self.upto(end if self.include else end - len(self.stopped))
        held = [n for s in self.stops for n in range(1, len(s)) if self.text.endswith(s[:n])]
        return self.upto(len(self.text) - max(held, default=0))

    def flush(self):
        return "" if self.stopped is not None else self.upto(len(self.text))

    def upto(self, end):
        certain, self.given = self.text[self.given:end], max(end, self.given)
        return certain
"""


def test_a_stop_matcher_that_searches_the_text_again_passes():
    exercises.find("2.8").check(mutants.written("2.8", STOPS_BY_SEARCH.replace("CHOICE", "min(places)")))


@pytest.mark.parametrize(
    ("choice", "diagnosis"),
    [
        ("places[0]", "listed first"),
        ("min(places, key=lambda place: place[0] + place[1])", "begins first"),
    ],
)
def test_a_stop_matcher_that_searches_and_takes_the_wrong_stop_is_told_so(choice, diagnosis):
    with pytest.raises(CheckFailed, match=diagnosis):
        exercises.find("2.8").check(mutants.written("2.8", STOPS_BY_SEARCH.replace("CHOICE", choice)))


@pytest.mark.parametrize(
    ("piece", "instead", "diagnosis"),
    [
        ("max(held, default=0)", "0", "before it is complete"),
        ("max(held, default=0)", "min(len(self.text), max(map(len, self.stops), default=1) - 1)", "more is held back"),
        ("max(held, default=0)", "min(held, default=0)", "shortest end"),
        ('return "" if self.stopped', "return self.text[self.given :] if self.stopped", "flush gives what was still"),
        ("self.text += text", "self.text, self.given = text, 0", "searched on its own"),
        ("return self.upto(len(self.text) - max(held, default=0))", 'return ""', "nothing comes out until"),
    ],
)
def test_a_stop_matcher_that_searches_is_told_what_it_does_wrong(piece, instead, diagnosis):
    right = STOPS_BY_SEARCH.replace("CHOICE", "min(places)")
    assert piece in right
    with pytest.raises(CheckFailed, match=diagnosis):
        exercises.find("2.8").check(mutants.written("2.8", right.replace(piece, instead)))


STOPS_AT_FIRST_SIGHT = """
class StopMatcher:
    def __init__(self, stops, include=False):
        self.stops, self.stopped = checked_stops(stops), None

    def push(self, text):
        for stop in self.stops if self.stopped is None else ():
            if stop in text:
                self.stopped = stop
                return text[: text.index(stop) + len(stop) * INCLUDE]
        return text if self.stopped is None else ""

    def flush(self):
        return ""
"""


@pytest.mark.parametrize(("include", "diagnosis"), [("0", "include=True keeps"), ("1", "though include is False")])
def test_a_first_attempt_with_several_faults_is_told_the_one_that_its_case_shows(include, diagnosis):
    with pytest.raises(CheckFailed, match=diagnosis):
        exercises.find("2.8").check(mutants.written("2.8", STOPS_AT_FIRST_SIGHT.replace("INCLUDE", include)))


def test_a_first_attempt_that_sees_to_include_is_told_of_the_pieces_next():
    source = STOPS_AT_FIRST_SIGHT.replace("INCLUDE", "self.include").replace(
        "self.stops, self", "self.include, self.stops, self").replace("= checked", "= include, checked")  # fmt: skip
    with pytest.raises(CheckFailed, match="each piece is searched on its own; a stop string may lie across several"):
        exercises.find("2.8").check(mutants.written("2.8", source))


DECODER_BY_WHOLE = """
class IncrementalDecoder:
    def __init__(self, tokenizer, prompt_ids=(), skip_special=True):
        self.tokenizer, self.ids, self.skip_special = tokenizer, list(prompt_ids), skip_special
        self.given = len(self.certain())

    def certain(self):
        text = self.tokenizer.decode(self.ids, self.skip_special)
        return HELD

    def push(self, index):
        self.ids.append(index)
        text = self.certain()
        new, self.given = text[self.given :], len(text)
        return new

    def flush(self):
        return self.tokenizer.decode(self.ids, self.skip_special)[self.given :]
"""


@pytest.mark.parametrize(
    ("held", "diagnosis"),
    [
        ("text.rstrip('\\ufffd')", "written that character"),
        ("text", None),
        ("text.rstrip('\\ufffd')[: getattr(self, 'given', None)]", "until the end"),
    ],
)
def test_a_decoder_that_decodes_everything_again_is_told_what_it_does_wrong(held, diagnosis):
    with pytest.raises(CheckFailed, match=diagnosis):
        exercises.find("2.7").check(mutants.written("2.7", DECODER_BY_WHOLE.replace("HELD", held)))


@pytest.mark.parametrize("hunt_id", [hunt.id for hunt in exercises.hunts(2)])
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_function(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


def text_of(pieces):
    return b"".join(pieces).decode("utf-8", errors="replace")


def until_stop(pieces, stop):
    return "".join(pieces).split(stop)[0]


def chat_ids(text, tokenizer):
    return tokenizer.encode(text, special=True, add_bos=True)


def newest_that_fit(messages, count_tokens, limit):
    system = [message for message in messages if message["role"] == "system"]
    turns: list[list] = []
    for message in messages[len(system) :]:
        turns += [[]] if message["role"] == "user" else []
        turns[-1].append(message)
    while len(turns) > 1 and count_tokens([*system, *chain(*turns)]) > limit:
        turns.pop(0)
    return [*system, *chain(*turns)]


@pytest.mark.parametrize(
    ("hunt_id", "mended"), [("2.a", text_of), ("2.b", until_stop), ("2.c", chat_ids), ("2.d", newest_that_fit)]
)
def test_a_mended_function_ends_the_bug_hunt(hunt_id, mended):
    exercises.find_hunt(hunt_id).check(mended)


def begin_in_ids(text, tokenizer):
    ids = tokenizer.encode(text, special=True, add_bos=False)
    return ids if tokenizer.bos_id in ids else [tokenizer.bos_id, *ids]


def begin_removed(text, tokenizer):
    ids = tokenizer.encode(text, special=True, add_bos=False)
    if tokenizer.bos_id in ids:
        ids.remove(tokenizer.bos_id)
    return [tokenizer.bos_id, *ids]


@pytest.mark.parametrize(
    ("hunt_id", "mended", "diagnosis"),
    [("2.c", begin_in_ids, "as with `in`"), ("2.c", begin_removed, "as with `remove`")],
)
def test_a_wrong_repair_is_named(hunt_id, mended, diagnosis):
    with pytest.raises(CheckFailed, match=diagnosis):
        exercises.find_hunt(hunt_id).check(mended)
