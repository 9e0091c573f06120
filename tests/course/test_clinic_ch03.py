"""Chapter 3's bug hunts: each shows its symptom, a mended piece passes, a half repair is told what is wrong still."""

from __future__ import annotations

import hunts
import pytest
import torch

from llmfromscratch.batch import Batch
from llmfromscratch.course import exercises
from llmfromscratch.course.checking import contained
from llmfromscratch.course.failures import CheckFailed

_HUNTS = [hunt.id for hunt in exercises.hunts(3)]


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_piece(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


def repaired(hunt_id: str, pairs: list[tuple[str, str]]):
    return hunts.repaired(hunt_id, pairs, torch=torch, Batch=Batch)


_FEED = [("token, answer = ids[-1], []", "rest, answer = list(ids), []"), ("[token], cache", "rest, cache"),
         ("answer.append(token)", "answer.append(token)\n        rest = [token]")]  # fmt: skip
_COUNTED = [("position for _, ids, _ in parts for position in range(len(ids))",
             "position for _, ids, stored in parts for position in range(stored, stored + len(ids))")]  # fmt: skip
_ATTEND = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_MASKED = "torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()"
_GIVEN_BACK = "self.free.extend(self.tables[request])"
_ADDED = "        self.pages[table[-1]].append(token)"
_COPIED = """
        elif self.holders[table[-1]] > 1:
            self.holders[table[-1]] -= 1
            table[-1] = self.new_page(list(self.pages[table[-1]]))
""".strip("\n")
_FULL = "            table.append(self.new_page([]))\n"
_ROOM = "len(ids) >= taken + block_size"

MENDED = {
    "3.a": _FEED,
    "3.b": _COUNTED,
    "3.c": [(_ATTEND, _ATTEND.replace("is_causal=True", f"attn_mask={_MASKED}"))],
    "3.d": [(_GIVEN_BACK, "self.free.extend(self.tables.pop(request, []))")],
    "3.e": [(_FULL, f"{_FULL}{_COPIED}\n")],
    "3.f": [(_ROOM, "len(ids) > taken + block_size")],
}


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_mended_piece_ends_the_bug_hunt(hunt_id):
    exercises.find_hunt(hunt_id).check(repaired(hunt_id, MENDED[hunt_id]))


# hunt: [(pieces of the broken code with what stands there instead, words of the diagnosis)]
HALF = {
    "3.a": [
        ([("    for _ in", "    model(Batch.of([(0, list(ids), 0)]), cache)\n    for _ in")], "twice"),
        ([*_FEED, ("    for _", "    rest = [int(model(Batch.of([(0, rest, 0)]), cache)[0].argmax())]\n    for _")],
         "first new token is missing"),
        ([*_FEED, ("        rest = [token]", "        rest = [*ids, *answer]\n        cache.release(0)")],
         "what is the cache for"),
        ([*_FEED, ("    return answer", "    return [*ids, *answer]")], "the prompt comes out"),
        ([*_FEED, ("rest, answer = list(ids), []", "rest, answer = list(ids[:-1] or ids), []")], "never read"),
        ([("token, answer = ids[-1], []", "answer = []"), ("[token], cache", "[*ids, *answer], cache")],
         "at every step the whole text goes in"),
    ],
    "3.b": [
        ([(_COUNTED[0][0], "stored if len(ids) == 1 else p for _, ids, stored in parts for p in range(len(ids))")],
         "a chunk of several begins at 0"),
        ([(_COUNTED[0][0], "p for _, ids, stored in parts for p in range(stored, len(ids))")], "ends too early"),
        ([(f"[{_COUNTED[0][0]}]", "list(range(sum(len(p[1]) for p in parts)))")],
         "run on through the whole batch"),
        ([(_COUNTED[0][0], "parts[0][2] + p for _, ids, _ in parts for p in range(len(ids))")], "of the first request"),
        ([(_COUNTED[0][0], "stored for _, ids, stored in parts for p in ids")], "the position of the first"),
        ([(_COUNTED[0][0], "stored + p + 1 for _, ids, stored in parts for p in range(len(ids))")], "one too far"),
    ],
    "3.c": [
        ([("is_causal=True", "is_causal=len(queries) > 1")], "a chunk is not"),
        ([("is_causal=True", "is_causal=len(queries) == len(keys)")],
         "with tokens stored nothing is hidden"),
        ([("is_causal=True", "is_causal=False")], "nothing is hidden any more"),
        ([("is_causal=True", "attn_mask=" + _MASKED.replace("tril(k", "tril(1 + k"))], "one key too many"),
        ([("is_causal=True", "attn_mask=" + _MASKED.replace("tril(k", "tril(-1 + k"))], ""),
        ([("is_causal=True", "attn_mask=~" + _MASKED)], "the wrong way round"),
        ([("is_causal=True", "attn_mask=torch.ones(q.shape[1], k.shape[1]).tril().bool()")],
         "first row for the first token"),
    ],
    "3.d": [
        ([(_GIVEN_BACK, "self.free.extend(b for b in self.tables[request] if b not in self.free)")], "takes it away"),
        ([(_GIVEN_BACK, "self.free.extend(self.tables.pop(request))")], "raises an error"),
        ([(_GIVEN_BACK, "if request not in self.__dict__.setdefault('done', set()):\n"
           "            self.free.extend(self.tables[request])\n        self.done.add(request)")], "used again"),
        ([(_GIVEN_BACK, "self.tables.pop(request, None)")], "never come back"),
        ([(_GIVEN_BACK, "pass")], "never come back"),
    ],
    "3.e": [
        ([(_FULL, _FULL + _COPIED.replace("table[-1] = ", "") + "\n")], ""),
        ([(_FULL, f"{_FULL}{_COPIED}\n"), ("            table[-1] = self.new_page(list(self.pages[table[-1]]))\n",
           "            self.pages[self.new_page(list(self.pages[table[-1]]))].append(token)\n            return\n")],
         "still names the old one"),
        ([(_FULL, _FULL + _COPIED.replace("list(self.pages[table[-1]])", "self.pages[table[-1]]") + "\n")],
         "the same list"),
        ([(_FULL, _FULL + _COPIED.replace("list(self.pages[table[-1]])", "[]") + "\n")], "the new page is empty"),
        ([(_FULL, _FULL + _COPIED.replace("            self.holders[table[-1]] -= 1\n", "") + "\n")], "still counts"),
        ([(_FULL, _FULL + _COPIED.replace(" > 1", " > 0") + "\n")], "with every token"),
        ([("        if not table or", f"{_COPIED.replace('elif ', 'if table and ')}\n        if not table or")],
         "a full page is copied"),
        ([("== 4:", "== 4 or self.holders[table[-1]] > 1:")], "a fresh page is begun behind the shared one"),
        ([("list(self.tables[request])", "[self.new_page(list(self.pages[p])) for p in self.tables[request]]"),
          ("self.holders[page] += 1", "pass")], "every page is copied at the fork"),
    ],
    "3.f": [
        ([("    return taken", "    return min(taken, max(0, len(ids) - 1))")], "only whole blocks can be taken over"),
        ([("    return taken", "    return min(taken, len(ids) - 1)")], "only whole blocks can be taken over"),
        ([("    return taken", "    return taken if taken < len(ids) else 0")], "the blocks before the last"),
        ([("    return taken", "    return max(0, taken - block_size)")], "always given up"),
        ([(_ROOM, "len(ids) > taken + block_size + 1")], "one is enough"),
        ([("    return taken", "    return 0")], "nothing is taken over any more"),
    ],
}  # fmt: skip


def test_a_repair_that_fails_on_a_prompt_of_one_token_is_told_so():
    before = "    model(Batch.of([(0, ids[:-1], 0)]), cache)\n"
    mended = repaired("3.a", [("    for _ in", f"{before}    for _ in")])
    with pytest.raises(CheckFailed, match="a prompt of one token has nothing before its last one"):
        contained(lambda: exercises.find_hunt("3.a").check(mended), "3.a")


@pytest.mark.parametrize(
    ("hunt_id", "pairs", "diagnosis"), [(hunt, *half) for hunt, halves in HALF.items() for half in halves]
)
def test_a_half_repair_is_told_what_is_still_wrong(hunt_id, pairs, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        exercises.find_hunt(hunt_id).check(repaired(hunt_id, pairs))
    assert diagnosis in str(caught.value), str(caught.value)
