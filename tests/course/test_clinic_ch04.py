"""Chapter 4's bug hunts: each shows its symptom, a mended piece passes, a half repair is told what is wrong still."""

from __future__ import annotations

import hunts
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.failures import CheckFailed

_HUNTS = [hunt.id for hunt in exercises.hunts(4)]


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_piece(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


_SPLIT = "        stretches = [self.text[number * size : (number + 1) * size] for number in range(len(self.blocks))]\n"
_JOINED = "        self.text = [token for stretch in stretches for token in stretch]\n"
_GIVEN_BACK = "        free.extend(self.blocks)\n"
_CHOSEN = "max(waiting, key=lambda one: (one.priority, now - one.arrival))"
_BACK = "sum(self.left[name] == 0 for name in finished)"
_ENOUGH = "        if left <= 0:\n            break\n"
_WHOLE = "        plan[name] = tokens\n        left -= tokens\n"
_PART = "        plan[name] = min(tokens, left)\n        left -= plan[name]\n"

# hunt: repairs, each of which ends it
MENDED = {
    "4.a": [
        [(_SPLIT, ""), (_JOINED, "")],
        [("range(len(self.blocks))]", "range(len(self.text) // size + 1)]")],
        [(_JOINED, f"{_JOINED.rstrip()} + self.text[len(self.blocks) * size :]\n")],
    ],
    "4.b": [
        [("(one.priority, now - one.arrival)", "one.priority * patience + now - one.arrival")],
        [("(one.priority, now - one.arrival)", "one.priority + (now - one.arrival) / patience")],
        [("(one.priority, now - one.arrival)", "(one.priority * patience - one.arrival, -one.arrival)")],
        [(f"return {_CHOSEN}", "oldest = waiting[0]\n"
          "    soon = [one for one in waiting if one.arrival - oldest.arrival < patience]\n"
          f"    return {_CHOSEN.replace('waiting', 'soon')}")],
    ],
    "4.c": [
        [(_BACK, "len(finished)")],
        [(f"        self.free += {_BACK}\n", ""), ("            del self.left[name]\n",
                                                "            del self.left[name]\n            self.free += 1\n")],
    ],
    "4.d": [
        [(_WHOLE, _PART)],
        [(_ENOUGH, "        tokens = min(tokens, left)\n        if tokens < 1:\n"
          "            break\n")],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("hunt_id", "pairs"), [(hunt, pairs) for hunt, repairs in MENDED.items() for pairs in repairs])
def test_a_mended_piece_ends_the_bug_hunt(hunt_id, pairs):
    exercises.find_hunt(hunt_id).check(hunts.repaired(hunt_id, pairs))


# hunt: [(pieces of the broken code with what stands there instead, words of the diagnosis)]
HALF = {
    "4.a": [
        ([("range(len(self.blocks))]", "range(len(self.blocks) - 1)]")], ""),
        ([(_SPLIT, ""), (_JOINED, "        self.text = self.text[:-1]\n")], "every time"),
        ([(_SPLIT, ""), (_JOINED, "        self.text = self.text + self.text[-1:]\n")], "twice"),
        ([(_SPLIT, ""), (_JOINED, "        self.text = self.text[: len(self.blocks) * size + 1]\n")],
         "one token behind"),
        ([("range(len(self.blocks))]", "range(len(self.blocks) + 1)]")], "a whole block is kept"),
        ([("range(len(self.blocks))]", "range(len(self.text) // size)]")], "fills no block"),
        ([(_SPLIT, ""), (_JOINED, ""), (_GIVEN_BACK, "")], "are not given back"),
        ([(_SPLIT, ""), (_JOINED, ""), (f"{_GIVEN_BACK}        self.blocks = []\n", _GIVEN_BACK)],
         "still names them"),
        ([(_SPLIT, f"        self.grow(free)\n{_SPLIT}")], "where none is free"),
        ([(_SPLIT, ""), (_JOINED, ""), (f"{_GIVEN_BACK}        self.blocks = []\n", "        return\n")],
         "nothing is given back"),
    ],
    "4.b": [
        ([(_CHOSEN, "min(waiting, key=lambda one: one.arrival)")], "priority is not heeded"),
        ([(_CHOSEN, "min(waiting, key=lambda one: (one.priority, one.arrival))")], "priority is not heeded"),
        ([("now - one.arrival)", "one.arrival)")], "the oldest has to go first"),
        ([("(one.priority, now - one.arrival)", "one.priority * now - one.arrival")], "against priority"),
        ([("(one.priority, now - one.arrival)", "one.priority + min(0.9, (now - one.arrival) / patience)")],
         "against priority"),
        ([("(one.priority, now - one.arrival)", "one.priority / patience + now - one.arrival")],
         "priority is not heeded"),
        ([("(one.priority, now - one.arrival)", "(one.priority + (now - one.arrival) // patience, -one.arrival)")],
         "B did not come `patience` seconds after A"),
        ([(f"return {_CHOSEN}", "oldest = min(waiting, key=lambda one: one.arrival)\n"
           f"    if now - oldest.arrival >= patience:\n        return oldest\n    return {_CHOSEN}")],
         "however long both have waited"),
        ([(f"return {_CHOSEN}", "old = [one for one in waiting if now - one.arrival >= patience]\n"
           f"    return min(old, key=lambda one: one.arrival) if old else {_CHOSEN}")],
         "however long both have waited"),
        ([(f"return {_CHOSEN}", "oldest = waiting[0]\n"
           "    soon = [one for one in waiting if one.arrival - oldest.arrival <= patience]\n"
           f"    return {_CHOSEN.replace('waiting', 'soon')}")], "exactly `patience` seconds later"),
    ],
    "4.c": [
        ([(_BACK, f"{_BACK} + sum(name in end_tokens_of for name in finished)")], "comes back twice"),
        ([(_BACK, "min(1, len(finished))")], "only one place"),
        ([(f"        self.free += {_BACK}\n", "")], "no place comes back"),
        ([(_BACK, "sum(name in end_tokens_of for name in finished)")], "only those with their end token"),
        ([("self.free > 0", "True")], "not looked at any more"),
        ([(_BACK, "len(end_tokens_of)")], "as many places come back as there are end tokens"),
        ([(_BACK, f"{_BACK} + len(end_tokens_of)")], "comes back twice"),
        ([(_BACK, "len(self.left)")], "everybody who runs"),
        ([(_BACK, _BACK.replace("==", "!="))], "turned round"),
        ([(" or name in end_tokens_of]", "]")], "not heeded"),
    ],
    "4.d": [
        ([(_ENOUGH, "        if tokens > left:\n            continue\n")], "is skipped"),
        ([(_ENOUGH, "        if tokens > left:\n            break\n")], "ends the step"),
        ([(_WHOLE, _PART.replace("min(tokens, left)", "min(tokens, budget)"))], "in all"),
        ([(_WHOLE, "        plan[name] = min(tokens, left)\n")], "not lowered"),
        ([(_WHOLE, _PART.replace("left)", "left, 1)"))], "only one token"),
        ([(_WHOLE, _PART + "        break\n")], "only the first prompt"),
        ([(_WHOLE, "        new = min(tokens, (budget - len(decoding)) // len(prompts))\n        if new:\n"
           "            plan[name] = new\n        left -= new\n")], "an equal share"),
        ([(_WHOLE, "        plan[name] = min(tokens, max(1, (budget - len(decoding)) // len(prompts)))\n"
           "        left -= plan[name]\n")], "an equal share"),
        ([(_WHOLE, _PART), ("budget - len(plan)", "budget")], "not counted in the budget"),
        ([(_WHOLE, _PART), (_ENOUGH, "")], "0 tokens appears"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("hunt_id", "pairs", "diagnosis"), [(hunt, *half) for hunt, halves in HALF.items() for half in halves]
)
def test_a_half_repair_is_told_what_is_still_wrong(hunt_id, pairs, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        exercises.find_hunt(hunt_id).check(hunts.repaired(hunt_id, pairs))
    assert diagnosis in str(caught.value), str(caught.value)
