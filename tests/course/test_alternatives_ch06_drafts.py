"""Chapter 6's checks of drafts accept what is right, however it is written."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check

LOOKUP_BY_LENGTH = """
def lookup_draft(token_ids, longest, count):
    n = len(token_ids)
    for length in range(min(longest, n - 1), 0, -1):
        for first in range(n - length - 1, -1, -1):
            if token_ids[first : first + length] == token_ids[n - length :]:
                return token_ids[first + length : first + length + count]
    return []
"""
LOOKUP_BY_TABLE = """
def lookup_draft(token_ids, longest, count):
    for length in range(longest, 0, -1):
        seen = {}
        for end in range(length, len(token_ids)):
            seen[tuple(token_ids[end - length : end])] = end
        place = seen.get(tuple(token_ids[-length:]))
        if place is not None and len(token_ids) > length:
            return list(token_ids[place:][:count])
    return list()
"""
LOOKUP_BY_SORTING = """
def lookup_draft(token_ids, longest, count):
    def agree(end):
        back = 0
        while back < longest and back < end and token_ids[end - back - 1] == token_ids[len(token_ids) - back - 1]:
            back += 1
        return back

    ranked = sorted(range(1, len(token_ids)), key=lambda end: (agree(end), end))
    return token_ids[ranked[-1] :][:count] if ranked and agree(ranked[-1]) else []
"""
GREEDY_WITH_ZIP = """
def accept_greedy(drafts, best):
    kept = []
    for draft, token in zip(drafts, best):
        if draft != token:
            break
        kept.append(draft)
    kept.append(best[len(kept)])
    return kept
"""
GREEDY_BY_SLICE = """
def accept_greedy(drafts, best):
    wrong = [place for place in range(len(drafts)) if drafts[place] != best[place]]
    return list(best[: (wrong[0] if wrong else len(drafts)) + 1])
"""
GREEDY_BY_RECURSION = """
def accept_greedy(drafts, best):
    if not drafts or drafts[0] != best[0]:
        return [best[0]]
    return [drafts[0], *accept_greedy(drafts[1:], best[1:])]
"""
GREEDY_WITH_TENSORS = """
def accept_greedy(drafts, best):
    same = torch.tensor(drafts, dtype=torch.int64) == torch.tensor(best[:-1], dtype=torch.int64)
    right = int(same.long().cumprod(0).sum())
    return drafts[:right] + [best[right]]
"""
REJECTION_BY_RATIO = """
def accept_drafts(drafts, drafted, wanted, uniforms):
    tokens = []
    for place in range(len(drafts)):
        draft = drafts[place]
        q, p = drafted[place, draft].item(), wanted[place, draft].item()
        if uniforms[place] < p / q:
            tokens.append(draft)
            continue
        rest = torch.clamp(wanted[place] - drafted[place], min=0)
        rest = rest / rest.sum()
        return tokens + sampling.draw(rest[None], torch.tensor(uniforms[-1:], dtype=torch.float64)).tolist()
    return tokens + sampling.draw(wanted[-1][None], torch.tensor(uniforms[-1:], dtype=torch.float64)).tolist()
"""
REJECTION_DRAWN_BY_HAND = """
def accept_drafts(drafts, drafted, wanted, uniforms):
    def drawn(weights):
        target, reached, last = uniforms[-1] * sum(weights), 0.0, 0
        for token, weight in enumerate(weights):
            reached += weight
            last = token if weight > 0 else last
            if reached > target:
                return token
        return last

    for place, (draft, have, want) in enumerate(zip(drafts, drafted.tolist(), wanted.tolist())):
        if not uniforms[place] * have[draft] < want[draft]:
            return drafts[:place] + [drawn([max(w - h, 0.0) for w, h in zip(want, have)])]
    return drafts + [drawn(wanted[len(drafts)].tolist())]
"""
REJECTION_AT_ONCE = """
def accept_drafts(drafts, drafted, wanted, uniforms):
    k = len(drafts)
    ids = torch.tensor(drafts, dtype=torch.int64).unsqueeze(1)
    have, want = drafted.gather(1, ids)[:, 0], wanted[:k].gather(1, ids)[:, 0]
    stands = torch.tensor(uniforms[:k], dtype=torch.float64) * have < want
    right = int(stands.long().cumprod(0).sum())
    rest = wanted[right] if right == k else torch.relu(wanted[right] - drafted[right])
    token = sampling.draw(rest.view(1, -1), torch.tensor([uniforms[k]], dtype=torch.float64))
    return [*drafts[:right], token.item()]
"""
AVERAGE_IN_CLOSED_FORM = """
def expected_tokens(acceptance, drafts):
    if acceptance == 1:
        return drafts + 1
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
"""
AVERAGE_FROM_BEHIND = """
def expected_tokens(acceptance, drafts):
    total = 1.0
    for _ in range(drafts):
        total = 1 + acceptance * total
    return total
"""
AVERAGE_BY_ENDS = """
def expected_tokens(acceptance, drafts):
    stops = sum((stand + 1) * acceptance**stand * (1 - acceptance) for stand in range(drafts))
    return stops + (drafts + 1) * acceptance**drafts
"""
LOOP_THAT_CUTS_WHAT_IS_ACCEPTED = """
def speculative_answer(network, cache, prompt_ids, count, propose):
    answer, gained = [], []
    while len(answer) < count:
        text = list(prompt_ids) + answer
        drafts = list(propose(text))
        new = text[cache.length(0) :]
        logits = network(Batch.of([(0, new + drafts, cache.length(0))], all_logits=True), cache)
        best = logits.argmax(-1)[len(new) - 1 :].tolist()
        accepted = optimization.accept_greedy(drafts, best)[: count - len(answer)]
        cache.rewind(0, len(drafts) - (len(accepted) - 1))
        answer = answer + accepted
        gained = gained + [len(accepted)]
    return answer, gained
"""
LOOP_THAT_COUNTS_BY_ITSELF = """
def speculative_answer(network, cache, prompt_ids, count, propose):
    ids, gained, stored = list(prompt_ids), [], 0
    goal = len(ids) + count
    while len(ids) < goal:
        drafts = list(propose(ids[:]))
        drafts = drafts[: goal - len(ids) - 1]
        part = (0, ids[stored:] + drafts, stored)
        best = [int(row.argmax()) for row in network(Batch.of([part], all_logits=True), cache)]
        best = best[-1 - len(drafts) :]
        right = 0
        while right < len(drafts) and drafts[right] == best[right]:
            right += 1
        ids.extend(drafts[:right] + [best[right]])
        stored = len(ids) - 1
        cache.rewind(0, cache.length(0) - stored)
        gained.append(right + 1)
    return ids[-count:] if count else [], gained
"""
ALTERNATIVES = {
    "6.7": [LOOKUP_BY_LENGTH, LOOKUP_BY_TABLE, LOOKUP_BY_SORTING],
    "6.8": [GREEDY_WITH_ZIP, GREEDY_BY_SLICE, GREEDY_BY_RECURSION, GREEDY_WITH_TENSORS],
    "6.9": [REJECTION_BY_RATIO, REJECTION_DRAWN_BY_HAND, REJECTION_AT_ONCE],
    "6.10": [AVERAGE_IN_CLOSED_FORM, AVERAGE_FROM_BEHIND, AVERAGE_BY_ENDS],
    "6.11": [LOOP_THAT_CUTS_WHAT_IS_ACCEPTED, LOOP_THAT_COUNTS_BY_ITSELF],
}


@pytest.mark.parametrize(
    ("exercise_id", "source"), [(exercise, source) for exercise, sources in ALTERNATIVES.items() for source in sources]
)
def test_another_right_way_passes(exercise_id, source):
    run_check(exercises.find(exercise_id), mutants.written(exercise_id, source))
