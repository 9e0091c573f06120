"""The checks of 5.8 to 5.10 accept what is right, however it is written: other ways than the reference's."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check

CHOOSE_ROW_BY_ROW = """
def choose(logits, rows):
    tokens = []
    for row_logits, row in zip(logits, rows):
        if row.params.temperature == 0:
            tokens.append(int(row_logits.argmax()))
            continue
        hot = apply_temperature(row_logits.unsqueeze(0), torch.tensor([row.params.temperature], dtype=torch.float64))
        tokens.append(int(draw_filtered(hot.log_softmax(dim=-1), [row.params], uniforms([row.stream]))[0]))
    return torch.tensor(tokens)
"""
CHOOSE_WITH_A_MASK = """
def choose(logits, rows):
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    draws = temperatures > 0
    result = logits.argmax(-1)
    if draws.any():
        some = [row for row, one in zip(rows, draws.tolist()) if one]
        hot = torch.log_softmax(apply_temperature(logits[draws], temperatures[draws]), -1)
        result[draws] = draw_filtered(hot, [row.params for row in some], uniforms([row.stream for row in some]))
    return result
"""
CHOOSE_IN_FLOAT32_THAT_SCATTERS = """
def choose(logits, rows):
    greedy = torch.argmax(logits, dim=1)
    places = torch.tensor([n for n, row in enumerate(rows) if row.params.temperature != 0.0], dtype=torch.int64)
    if places.numel() == 0:
        return greedy
    chosen = [rows[n] for n in places.tolist()]
    hot = apply_temperature(logits.index_select(0, places), torch.tensor([row.params.temperature for row in chosen]))
    drawn = draw_filtered(hot.log_softmax(-1), [row.params for row in chosen], uniforms([row.stream for row in chosen]))
    return greedy.scatter(0, places, drawn)
"""
CHOOSE_WITHOUT_THE_GIVEN_PARTS = """
def choose(logits, rows):
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    for n, row in enumerate(rows):
        params = row.params
        if not params.temperature:
            tokens[n] = logits[n].max(dim=-1).indices
            continue
        exact = logits[n].double()
        exact = ((exact - exact.max()) / max(params.temperature, 1e-300)).softmax(-1)
        number = torch.rand(1, dtype=torch.float64, generator=row.stream)
        if params.top_k or params.top_p < 1 or params.min_p:
            exact, ids = exact.sort(descending=True, stable=True)
            exact = apply_filters(exact.unsqueeze(0), [params])[0]
        else:
            ids = torch.arange(len(exact))
        tokens[n] = ids[draw(exact.unsqueeze(0), number)[0]]
    return tokens
"""
BEAMS_AS_A_SORTED_LIST = """
def best_beams(scores, log_probabilities, count):
    ways = []
    for beam, score in enumerate(scores.tolist()):
        for token, value in enumerate(log_probabilities[beam].tolist()):
            ways.append((score + value, beam, token))
    ways.sort(key=lambda way: -way[0])
    return ways[:count]
"""
BEAMS_BY_A_STABLE_SORT = """
def best_beams(scores, log_probabilities, count):
    beams, vocab = log_probabilities.shape
    table = scores[:, None] + log_probabilities
    order = torch.argsort(table.reshape(-1), descending=True, stable=True)[:count]
    return [(table[place // vocab, place % vocab].item(), *divmod(place, vocab)) for place in order.tolist()]
"""
BEAMS_BY_A_HEAP = """
def best_beams(scores, log_probabilities, count):
    from heapq import nsmallest
    from itertools import product
    beams, vocab = log_probabilities.shape
    sums = (scores.view(-1, 1) + log_probabilities).double().tolist()
    best = nsmallest(count, product(range(beams), range(vocab)), key=lambda at: (-sums[at[0]][at[1]], at))
    return [(sums[beam][token], beam, token) for beam, token in best]
"""
BEAMS_BEAM_BY_BEAM = """
def best_beams(scores, log_probabilities, count):
    found = []
    for beam in range(scores.shape[0]):
        values, tokens = largest((scores[beam] + log_probabilities[beam]).unsqueeze(0), count)
        found += [(v, beam, t) for v, t in zip(values[0].tolist(), tokens[0].tolist())]
    return sorted(found, key=lambda way: (-way[0], way[1], way[2]))[:count]
"""
TOKENS_BY_NEXT_STATE = """
def allowed_tokens(automaton, state, vocabulary):
    return torch.tensor([bool(text) and automaton.next_state(state, text) is not None for text in vocabulary])
"""
TOKENS_WITH_A_FLAG = """
def allowed_tokens(automaton, state, vocabulary):
    allowed = torch.zeros(len(vocabulary), dtype=torch.bool)
    for token, text in enumerate(vocabulary):
        at, fits = state, text != b""
        for byte in text:
            if byte not in automaton.arrows[at]:
                fits = False
                break
            at = automaton.arrows[at][byte]
        allowed[token] = fits
    return allowed
"""
TOKENS_BY_RECURSION = """
def allowed_tokens(automaton, state, vocabulary):
    def leads_on(at, text):
        return not text or (text[0] in automaton.arrows[at] and leads_on(automaton.arrows[at][text[0]], text[1:]))

    return torch.tensor([len(text) > 0 and leads_on(state, text) for text in vocabulary], dtype=torch.bool)
"""
TOKENS_BY_FOR_AND_ELSE = """
def allowed_tokens(automaton, state, vocabulary):
    found = [False] * len(vocabulary)
    for token, text in enumerate(vocabulary):
        at = state
        for byte in text:
            at = automaton.arrows[at].get(byte, -1)
            if at == -1:
                break
        else:
            found[token] = len(text) != 0
    return torch.as_tensor(found)
"""
ALTERNATIVES = [
    ("5.8", CHOOSE_ROW_BY_ROW),
    ("5.8", CHOOSE_WITH_A_MASK),
    ("5.8", CHOOSE_IN_FLOAT32_THAT_SCATTERS),
    ("5.8", CHOOSE_WITHOUT_THE_GIVEN_PARTS),
    ("5.9", BEAMS_AS_A_SORTED_LIST),
    ("5.9", BEAMS_BY_A_STABLE_SORT),
    ("5.9", BEAMS_BY_A_HEAP),
    ("5.9", BEAMS_BEAM_BY_BEAM),
    ("5.10", TOKENS_BY_NEXT_STATE),
    ("5.10", TOKENS_WITH_A_FLAG),
    ("5.10", TOKENS_BY_RECURSION),
    ("5.10", TOKENS_BY_FOR_AND_ELSE),
]


@pytest.mark.parametrize(("exercise_id", "source"), ALTERNATIVES)
def test_another_way_to_write_it_passes(exercise_id, source):
    run_check(exercises.find(exercise_id), mutants.written(exercise_id, source))
