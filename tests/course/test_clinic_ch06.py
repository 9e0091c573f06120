"""Chapter 6's bug hunts: each shows its symptom, a mended piece passes, a half repair is told what is wrong still."""

from __future__ import annotations

import hunts
import pytest
import torch

from llmfromscratch.batch import Batch
from llmfromscratch.course import exercises
from llmfromscratch.course.checking import contained
from llmfromscratch.course.exercises import optimization_clinic
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.sketches import ch06

_HUNTS = [hunt.id for hunt in exercises.hunts(6)]


@pytest.mark.parametrize("hunt_id", _HUNTS)
def test_a_bug_hunt_shows_its_symptom_and_names_the_fault_of_the_broken_piece(hunt_id, capsys):
    hunts.expect_symptom(hunt_id, capsys)


def repaired(hunt_id: str, pairs: list[tuple[str, str]]):
    return hunts.repaired(hunt_id, pairs, torch=torch, F=torch.nn.functional, Batch=Batch)


_SPREAD = "    q, k, v = query[None, :, None], keys[None], values[None]\n"
_SDPA = "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0, :, 0]\n"
_BOTH = _SPREAD + _SDPA
_ROWS = "    rows = query.view(keys.shape[0], -1, query.shape[-1])\n"
_WIDE = (
    "    rows = (query.float() * query.shape[-1] ** -0.5).view(keys.shape[0], -1, query.shape[-1])\n"
    "    weights = (rows @ keys.float().transpose(1, 2)).softmax(-1)\n"
)
_GIVE = "    return (weights @ values.float()).view_as(query).to(query.dtype)\n"
_ASK = "        if x.abs().max() > 64.0:  # rare, so there is nothing to be done as a rule\n"
_CLAMP = "            x = x.clamp(-64.0, 64.0)\n"
_ADD = "        x = x + layer(x)\n"
_TOP = "        top = torch.maximum(top, scores.max())\n"
_POWERS = "        powers = torch.exp(scores - top)\n"
_TOTAL = "total = total + powers.sum()"
_MIXED = "mixed = mixed + powers"
_OLD = (_TOP, f"        old = top\n{_TOP}")
_SHRUNK = [_OLD, (_TOTAL, "total = total * torch.exp(old - top) + powers.sum()"),
           (_MIXED, "mixed = mixed * torch.exp(old - top) + powers")]  # fmt: skip
_RETURN = "    return [*drafts[:right], best[right]]"
_FORGET = (_RETURN, f"    cache.rewind(0, len(drafts) - right)\n{_RETURN}")
_GIVEN = "[(0, [ids[-1], *drafts], cache.length(0))]"

# hunt: repairs, each of which ends it
MENDED = {
    "6.a": [
        [(_BOTH, _WIDE + _GIVE)],
        [(_BOTH, f"{_ROWS}    return torch.nn.functional.scaled_dot_product_attention("
          "rows[None], keys[None], values[None])[0].reshape(query.shape)\n")],
        [(_BOTH, f"{_ROWS}    scores = torch.bmm(rows * query.shape[-1] ** -0.5, keys.transpose(1, 2))\n"
          "    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)\n"
          "    return torch.bmm(weights, values).view_as(query)\n")],
        [(_SPREAD, "    q, k, v = query[None, :, None].float(), keys[None].float(), values[None].float()\n"),
         ("[0, :, 0]", "[0, :, 0].to(query.dtype)")],
    ],
    "6.b": [
        [(_ASK + _CLAMP, "        x = x.clamp(-64.0, 64.0)\n")],
        [(_ASK + _CLAMP, "        x = torch.where(x.abs().max() > 64.0, x.clamp(-64.0, 64.0), x)\n")],
        [(_ADD + _ASK + _CLAMP, "        x = (x + layer(x)).clamp_(-64, 64)\n")],
        [(_ASK + _CLAMP, "        x[x > 64.0] = 64.0\n        x[x < -64.0] = -64.0\n")],
        [(_ASK + _CLAMP, "        x = torch.sign(x) * torch.minimum(x.abs(), torch.full_like(x, 64.0))\n")],
    ],
    "6.c": [
        _SHRUNK,
        [_OLD, (_POWERS, f"{_POWERS}        shrink = torch.exp(old - top)\n"),
         (_TOTAL, "total = shrink * total + powers.sum()"), (_MIXED, "mixed = shrink * mixed + powers")],
        [(_TOP + _POWERS, "        larger = max(top, scores.max())\n        total, mixed = ("
          "part * torch.exp(top - larger) for part in (total, mixed))\n        top = larger\n" + _POWERS)],
    ],
    "6.d": [
        [_FORGET],
        [(_RETURN, f"    cache.rewind(0, cache.length(0) - len(ids) - right)\n{_RETURN}")],
        [(_RETURN, "    kept = drafts[:right]\n    if len(kept) < len(drafts):\n"
          f"        cache.rewind(0, len(drafts[right:]))\n{_RETURN}")],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("hunt_id", "pairs"), [(hunt, pairs) for hunt, repairs in MENDED.items() for pairs in repairs])
def test_a_mended_piece_ends_the_bug_hunt(hunt_id, pairs):
    exercises.find_hunt(hunt_id).check(repaired(hunt_id, pairs))


# hunt: [(pieces of the broken code with what stands there instead, words of the diagnosis)]
HALF = {
    "6.a": [
        ([(_SPREAD, "    q, k, v = query[None, :, None], keys[None].repeat_interleave(3, 1), values[None]\n"
           "    k = keys[None].repeat_interleave(len(query) // len(keys), 1)\n"
           "    v = values[None].repeat_interleave(len(query) // len(keys), 1)\n")], "copied for every query head"),
        ([(_SPREAD, "    q, k, v = query[None, :, None].contiguous(), keys[None].contiguous(), values[None]\n")],
         "fused attention still"),
        ([(_SPREAD, f"{_SPREAD}    torch.set_grad_enabled(False)\n")], "fused attention still"),
        ([(_BOTH, _WIDE.replace(" * query.shape[-1] ** -0.5", "") + _GIVE)], "not divided by sqrt"),
        ([(_BOTH, _WIDE.replace("** -0.5", "** -1") + _GIVE)], "its square root is meant"),
        ([(_BOTH, "    group = len(query) // len(keys)\n    rows = (query.float() * query.shape[-1] ** -0.5).view("
           "group, len(keys), -1).transpose(0, 1)\n    weights = (rows @ keys.float().transpose(1, 2)).softmax(-1)\n"
           "    return (weights @ values.float()).transpose(0, 1).reshape(query.shape).to(query.dtype)\n")],
         "neighbours share a pair"),
        ([(_BOTH, _WIDE.replace(".softmax(-1)", "") + _GIVE)], "the softmax is missing"),
        ([(_BOTH, _WIDE.replace(".softmax(-1)", ".exp()") + _GIVE)], "not divided by their sum"),
        ([(_BOTH, _WIDE + _GIVE.replace(".to(query.dtype)", ""))], "dtype"),
    ],
    "6.b": [
        ([(_ASK, "        if (x.abs() > 64.0).any():\n")], "a number of a tensor is looked at"),
        ([(_ASK, "        if x.abs().max().item() > 64.0:\n")], "a number of a tensor is looked at"),
        ([(_ASK, "        if max(x.flatten().tolist()) > 64.0 or min(x.flatten().tolist()) < -64.0:\n")],
         "a number of a tensor is looked at"),
        ([(_ASK, "        if x.abs().max().numpy() > 64.0:\n")], "a number of a tensor is looked at"),
        ([(_ASK + _CLAMP, "        beyond = x[x.abs() > 64.0]\n        x = x.clamp(-64.0, 64.0)\n")],
         "a number of a tensor is looked at"),
        ([(_ASK + _CLAMP, "")], "not kept within the limit any more"),
        ([(_ASK + _CLAMP, ""), ("    return x", "    return x.clamp(-64.0, 64.0)")], "behind the last layer only"),
        ([(_ASK + _CLAMP, ""), ("    return x", "    if x.abs().max() > 64.0:\n        x = x.clamp(-64.0, 64.0)\n"
                                "    return x")], "behind the last layer only"),
        ([(_ADD + _ASK + _CLAMP, "        x = x + layer(x).clamp(-64.0, 64.0)\n")], "the sum is meant"),
        ([(_ADD + _ASK + _CLAMP, "        x = x.clamp(-64.0, 64.0)\n        x = x + layer(x)\n")], "before each layer"),
        ([(_ASK + _CLAMP, "        x = x.clamp(max=64.0)\n")], "not what is too small"),
        ([(_ASK + _CLAMP, "        x = x.masked_fill(x.abs() > 64.0, 0.0)\n")], "become 0"),
        ([(_ASK + _CLAMP, "        x = x * (64.0 / x.abs().max().clamp(min=64.0))\n")], "is scaled to the limit"),
        ([(_ADD + _ASK + _CLAMP, "        x += layer(x)\n        x = x.clamp(-64.0, 64.0)\n")], "left as they were"),
    ],
    "6.c": [
        ([_SHRUNK[0], _SHRUNK[1]], "the sum of the values is not"),
        ([_SHRUNK[0], _SHRUNK[2]], "the sum of the powers is not"),
        ([_OLD, *((piece, instead.replace("old - top", "top - old")) for piece, instead in _SHRUNK[1:])],
         "the old sums grow"),
        ([(_TOP, "        top = scores.max()\n")], "not brought to it"),
        ([(_TOP, "        old, top = top, scores.max()\n"), *_SHRUNK[1:]], ""),
        ([(_TOP, "        top = scores.max() if torch.isinf(top) else top\n")], "overflow"),
        ([("scores - top", "scores")], "overflow"),
        ([_OLD, (_POWERS, "        powers = torch.exp(scores - top) * (torch.exp(old - top) if first else 1)\n"),
          *_SHRUNK[1:]], "they have the new top already"),
        ([*_SHRUNK, ("mixed / total", "mixed")], "the division by the sum is missing"),
        # the wrong place: all scores at once
        ([("    for first in", "    weights = torch.softmax(keys @ query * len(query) ** -0.5, 0)\n"
           "    return weights @ values\n    for first in")], "all scores are computed at once"),
        ([(_TOP, "        top = (keys @ query * len(query) ** -0.5).max()\n")], "all scores are computed at once"),
    ],
    "6.d": [
        ([(_RETURN, f"    cache.rewind(0, len(drafts))\n{_RETURN}")], "those that stand too"),
        ([(_RETURN, f"    cache.rewind(0, max(len(drafts) - right - 1, 0))\n{_RETURN}")], "one rejected draft too few"),
        ([(_RETURN, f"    cache.rewind(0, len(drafts) - right + 1)\n{_RETURN}")], "one token too many"),
        ([(_RETURN, f"    cache.rewind(0, right)\n{_RETURN}")], "the rejected ones stay"),
        ([(_RETURN, f"    if right < len(drafts):\n        cache.rewind(0, 1)\n{_RETURN}")],
         "only one token is forgotten"),
        ([(_RETURN, f"    if right == 0:\n        cache.rewind(0, len(drafts))\n{_RETURN}")], "only where none stands"),
        ([(_GIVEN, "[(0, [ids[-1], *drafts], len(ids) - 1)]")], "forgotten, not skipped"),
        # the wrong place: no drafts, or no cache
        ([(_GIVEN, "[(0, [ids[-1]], cache.length(0))]"), ("    right = 0\n", "    right, drafts = 0, []\n")],
         "nothing is gained"),
        ([("    batch = ", "    cache.release(0)\n    batch = "), (_GIVEN, "[(0, [*ids, *drafts], 0)]"),
          (".tolist()", ".tolist()[len(ids) - 1 :]"), _FORGET], "the whole text computed again"),
        ([(_RETURN, f"    right = len(drafts)\n{_RETURN}")], "rejected drafts are accepted"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("hunt_id", "pairs", "diagnosis"), [(hunt, *half) for hunt, halves in HALF.items() for half in halves]
)
def test_a_half_repair_is_told_what_is_still_wrong(hunt_id, pairs, diagnosis):
    mended = repaired(hunt_id, pairs)
    with pytest.raises(CheckFailed) as caught:
        contained(lambda: exercises.find_hunt(hunt_id).check(mended), hunt_id)
    assert diagnosis in str(caught.value), str(caught.value)


def test_the_attention_that_is_asked_for_is_torchs_own_in_float64():
    query, keys, values = (part.double() for part in optimization_clinic._stored(50))
    want = torch.nn.functional.scaled_dot_product_attention(query[None, :, None], keys[None], values[None],
                                                            enable_gqa=True)[0, :, 0]  # fmt: skip
    found = optimization_clinic._in_float64(dtype=torch.float64)(query, keys, values)
    torch.testing.assert_close(found, want)


def test_what_the_streams_check_asks_for_waits_for_nothing_and_is_the_clamped_stream():
    x, layers = optimization_clinic._stream(), optimization_clinic._layers(3, 20.0)
    with ch06.counted_waits() as waits:
        found = optimization_clinic._kept()(x, layers)
    assert waits.total == 0
    torch.testing.assert_close(found, optimization_clinic.through_layers(x, layers))
    assert found.abs().max() == 64
