"""Chapter 5's bug hunts: each shows its symptom, a mended piece passes, a half repair is told what is wrong still."""

from __future__ import annotations

import hunts
import pytest
import torch

from llmfromscratch.course import exercises
from llmfromscratch.course.exercises import sampling_clinic
from llmfromscratch.course.failures import CheckFailed

_HUNTS = [hunt.id for hunt in exercises.hunts(5)]


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_piece(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


def repaired(hunt_id: str, pairs: list[tuple[str, str]]):
    return hunts.repaired(hunt_id, pairs, torch=torch)


_KEPT = "return ids[ranked.cumsum(dim=0) <= p]"
_LOOP = "    for token in set(said):\n        logits[token] /= strength\n"
_ONE = "        self.generator = torch.Generator()\n"
_SEEDED = "        self.generator.manual_seed(seed)\n"
_OWN = [(_ONE, "        self.streams = {}\n"),
        (_SEEDED, "        self.streams[name] = torch.Generator().manual_seed(seed)\n"),
        ("generator=self.generator", "generator=self.streams[name]")]  # fmt: skip
_RANKED = "logits.softmax(dim=-1).sort"
_LEFT = "    left[kept] = logits[kept] / temperature\n"
_GIVEN = "    return left.softmax(dim=-1)"
_FIRST = "    ranked, ids ="


def seeded(with_what: str) -> list[tuple[str, str]]:
    """Streams of their own, with another seed."""
    return [(piece, instead.replace("manual_seed(seed)", f"manual_seed({with_what})")) for piece, instead in _OWN]


# hunt: repairs, each of which ends it
MENDED = {
    "5.a": [
        [(_KEPT, "return ids[ranked.cumsum(dim=0) - ranked < p]")],
        [(_KEPT, "return ids[: int((ranked.cumsum(dim=0) < p).sum()) + 1]")],
        [(_KEPT, "return ids[torch.nn.functional.pad(ranked.cumsum(dim=0), (1, -1)) < p]")],
        [(_KEPT, "kept, reached = [], 0.0\n    for token, value in zip(ids.tolist(), ranked.tolist()):\n"
          "        if reached >= p:\n            break\n        kept.append(token)\n        reached += value\n"
          "    return torch.tensor(kept)")],
    ],
    "5.b": [
        [(_LOOP, "    for token in set(said):\n"
          "        logits[token] *= 1 / strength if logits[token] > 0 else strength\n")],
        [(_LOOP, "    ids = torch.tensor(sorted(set(said)), dtype=torch.int64)\n    old = logits[ids]\n"
          "    logits[ids] = torch.where(old > 0, old / strength, old * strength)\n")],
    ],
    "5.c": [
        _OWN,
        [*_OWN[:2], ("int(torch.multinomial(row, 1, generator=self.generator))",
                     "int(torch.searchsorted(row.double().cumsum(0), row.double().sum() * torch.rand(1, generator="
                     "self.streams[name], dtype=torch.float64), right=True))")],
        [(_ONE, "        self.served = {}\n"), (_SEEDED, "        self.served[name] = [seed, 0]\n"),
         ("        return {",
          "        for name in distributions:\n            self.served[name][1] += 1\n        return {"),
         ("generator=self.generator", "generator=torch.Generator().manual_seed(self.served[name][0] * 10007 + "
          "self.served[name][1])")],
    ],
    "5.d": [
        [(_RANKED, "(logits / temperature).softmax(dim=-1).sort")],
        [(_FIRST, f"    logits = logits / temperature\n{_FIRST}"), (_LEFT, "    left[kept] = logits[kept]\n")],
        [(_FIRST, f"    probabilities = (logits / temperature).softmax(dim=-1)\n{_FIRST}"),
         (_RANKED, "probabilities.sort"), ("torch.full_like(logits, -torch.inf)", "torch.zeros_like(logits)"),
         (_LEFT, "    left[kept] = probabilities[kept]\n"), (_GIVEN, "    return left / left.sum()")],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("hunt_id", "pairs"), [(hunt, pairs) for hunt, repairs in MENDED.items() for pairs in repairs])
def test_a_mended_piece_ends_the_bug_hunt(hunt_id, pairs):
    exercises.find_hunt(hunt_id).check(repaired(hunt_id, pairs))


# hunt: [(pieces of the broken code with what stands there instead, words of the diagnosis)]
HALF = {
    "5.a": [
        ([(_KEPT, "return ids[: max(1, int((ranked.cumsum(dim=0) <= p).sum()))]")], "unless nothing would be left"),
        ([(_KEPT, "kept = ids[ranked.cumsum(dim=0) <= p]\n    return kept if len(kept) else ids")],
         "where nothing is left all are kept"),
        ([(_KEPT, "return ids[ranked.cumsum(dim=0) <= max(p, ranked[0])]")], "unless nothing would be left"),
        ([("<= p", "< p")], "with which p is reached exactly"),
        ([(_KEPT, "return ids[: int((ranked.cumsum(dim=0) <= p).sum()) + 1]")], "it is too many"),
        ([(_KEPT, "return ids[ranked.cumsum(dim=0) - ranked <= p]")], "it is too many"),
        ([(_KEPT, "return ids[ranked.cumsum(dim=0) <= p + ranked[0]]")], "p is raised"),
        ([(_KEPT, "return ids[: int((ranked.cumsum(dim=0) <= p).sum()) + 2]")], "two tokens more"),
        ([("descending=True", "descending=False"), (_KEPT, "return ids[ranked.cumsum(dim=0) - ranked < p]")],
         "the least probable tokens come first"),
        ([(_KEPT, "return ids[ranked.cumsum(dim=0) - ranked >= p]")], "are exchanged"),
        ([(_KEPT, "return ranked.cumsum(dim=0) - ranked < p")], "asked for are ids"),
    ],
    "5.b": [
        ([("/= strength", "*= strength")], "it is the positive ones that become likelier"),
        ([("        logits[token] /=", "        if logits[token] > 0:\n            logits[token] /=")],
         "negative logits are left as they are"),
        ([("/= strength", "*= strength if logits[token] > 0 else 1 / strength")], "the wrong way round"),
        ([("logits[token] /= strength", "logits[token] = abs(logits[token]) / strength")], "loses its sign"),
        ([("logits[token] /= strength", "logits[token] = max(logits[token], 0.0) / strength")], "is set to 0"),
        ([("logits[token] /= strength", "logits[token] = min(logits[token] / strength, logits[token] * strength)")],
         "for a strength above 1 only"),
        ([("logits[token] /= strength", "logits[token] -= torch.tensor(strength).log()")], "something is taken off"),
        ([("logits[token] /= strength", "logits[token] -= (strength - 1) * abs(logits[token])")],
         "something is taken off"),
        ([("set(said)", "said"), ("/= strength", "*= 1 / strength if logits[token] > 0 else strength")], "said twice"),
        ([("set(said)", "range(len(logits))"), ("/= strength", "*= 1 / strength if logits[token] > 0 else strength")],
         "nobody said"),
        ([("logits.clone()", "logits - logits.max()"), ("/= strength", "*= strength")], "are shifted to 0"),
        ([("logits.clone()", "logits - logits.min()")], "shifted to 0 and above"),
        ([("logits.clone()", "logits - logits.min().clamp(max=0)")], "shifted to 0 and above"),
        ([("    logits = logits.clone()\n", "    low = logits.min()\n    logits = logits - low\n"),
          ("return logits", "return logits + low")], "and shifted back"),
        ([("/= strength", "-= strength")], "something is taken off"),
        ([("/= strength", "-= strength - 1")], "something is taken off"),
        ([("logits[token] /= strength", "logits[token] = logits[token] / strength if logits[token] > 0 else "
           "logits[token] - strength")], "something is taken off"),
        ([("logits[token] /= strength", "logits[token] = logits[token] / strength if logits[token] > 0 else "
           "logits[token] - (strength - 1)")], "something is taken off"),
        ([("    logits = logits.clone()\n", ""),
          ("/= strength", "*= 1 / strength if logits[token] > 0 else strength")], "left as they were"),
    ],
    "5.c": [
        ([("distributions.items()", "sorted(distributions.items())")], "a generator that others use"),
        ([(_SEEDED, "        if not hasattr(self, 'begun'):\n            self.begun = True\n            "
           "self.generator.manual_seed(seed)\n")], "a generator that others use"),
        ([(_SEEDED, "        torch.manual_seed(seed)\n"), (", generator=self.generator", "")], "belongs to everybody"),
        ([*_OWN[:2], ("generator=self.generator", "generator=torch.Generator().manual_seed("
                      "self.streams[name].initial_seed())")], "the stream begins again"),
        ([(_ONE, "        self.streams, self.seeds = {}, {}\n"),
          (_SEEDED, "        self.streams.setdefault(seed, torch.Generator().manual_seed(seed))\n"
           "        self.seeds[name] = seed\n"), ("self.generator)", "self.streams[self.seeds[name]])")],
         "with the same seed share a stream"),
        (seeded("seed + ord(name[0])"), "the name counts"),
        (seeded("seed + len(self.streams)"), "a generator that others use"),
        ([(_ONE, "        self.seeds, self.now = {}, 0\n"), (_SEEDED, "        self.seeds[name] = seed\n"),
          ("        return {", "        self.now += 1\n        return {"),
          ("generator=self.generator", "generator=torch.Generator().manual_seed(self.seeds[name] * 99 + self.now)")],
         "when a request begins"),
        ([*_OWN, ("        return {", "        for name, stream in self.streams.items():\n"
                  "            if name not in distributions:\n                torch.rand(1, generator=stream)\n"
                  "        return {")], "a step that it is not in"),
        (seeded("7"), "the seed is not used"),
        ([("torch.multinomial(row, 1, generator=self.generator)", "row.argmax()")], "nothing is drawn"),
        ([*_OWN[:2], ("torch.multinomial(row, 1, generator=self.generator)",
                      "torch.randint(len(row), (1,), generator=self.streams[name])")],
         "do not follow the distribution"),
        ([*_OWN, ("        return {name: int(", "        return {name: (")], "an int, for each request"),
    ],
    "5.d": [
        ([(_FIRST, f"    logits = logits / temperature\n{_FIRST}")], "once more behind it"),
        ([(_RANKED, "(logits / temperature).softmax(dim=-1).sort"), (_LEFT, "    left[kept] = logits[kept]\n")],
         "is then forgotten"),
        ([(_LEFT, "    left[kept] = logits[kept]\n")], "not used at all"),
        ([(_RANKED, "(logits * temperature).softmax(dim=-1).sort"),
          (_LEFT, "    left[kept] = logits[kept] * temperature\n")], "logits are multiplied"),
        ([(_RANKED, "(logits / temperature).softmax(dim=-1).sort"),
          (_LEFT, "    left[kept] = logits[kept] * temperature\n")], "the logits in it are multiplied"),
        ([(_RANKED, "(logits.softmax(dim=-1) / temperature).sort")], "p is bent"),
        ([("- ranked < p", "- ranked < p ** (1 / temperature)")], "p is bent"),
        ([("- ranked < p", "- ranked < p * temperature")], "p is bent"),
        ([("- ranked < p", "- ranked < 2")], "top-p has no effect"),
        ([(_FIRST, f"    probabilities = (logits / temperature).softmax(dim=-1)\n{_FIRST}"),
          (_RANKED, "probabilities.sort"), ("torch.full_like(logits, -torch.inf)", "torch.zeros_like(logits)"),
          (_LEFT, "    left[kept] = probabilities[kept]\n"), (_GIVEN, "    return left")], "does not sum to 1"),
        ([(_FIRST, f"    logits /= temperature\n{_FIRST}"), (_LEFT, "    left[kept] = logits[kept]\n")],
         "left as they were"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("hunt_id", "pairs", "diagnosis"), [(hunt, *half) for hunt, halves in HALF.items() for half in halves]
)
def test_a_half_repair_is_told_what_is_still_wrong(hunt_id, pairs, diagnosis):
    with pytest.raises(CheckFailed) as caught:
        exercises.find_hunt(hunt_id).check(repaired(hunt_id, pairs))
    assert diagnosis in str(caught.value), str(caught.value)


def test_the_nucleus_and_the_order_that_are_asked_for_are_the_engines():
    generator = torch.Generator().manual_seed(5)
    for number in range(30):
        logits = torch.randn(24, generator=generator) * 2
        temperature, p = 0.3 + 0.1 * number, 0.2 + 0.025 * number
        engines = sampling_clinic.engines_distribution(logits, temperature, p)
        asked = sampling_clinic._by_temperature_then_p(logits, temperature, p)
        torch.testing.assert_close(asked, engines.float())
        kept = sampling_clinic._until_reached((logits / temperature).softmax(-1), p)
        assert sorted(kept.tolist()) == engines.nonzero().flatten().tolist()


def test_order_and_penalty_that_are_asked_for_are_those_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, generator=torch.Generator().manual_seed(6)) * 3
    for temperature, p in ((0.5, 0.8), (1.0, 0.9), (2.5, 0.6)):
        hot = TemperatureLogitsWarper(temperature)(None, logits[None])
        theirs = TopPLogitsWarper(p)(None, hot).softmax(-1)[0]
        torch.testing.assert_close(sampling_clinic._by_temperature_then_p(logits, temperature, p), theirs)
    said = [3, 1, 4, 1, 5, 9, 2, 6]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([said]), logits[None].clone())[0]
    torch.testing.assert_close(sampling_clinic._moved(logits, said, 1.3), theirs)
