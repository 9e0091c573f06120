"""The checks of 5.8 to 5.10 reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises
from llmfromscratch.course.checking import run_check
from llmfromscratch.course.failures import CheckFailed

_DRAWING = "[place for place, row in enumerate(rows) if row.params.temperature > 0]"
_EARLY = "    if not drawing:\n        return tokens\n"
_PARAMS = "[rows[place].params for place in drawing]"
_SHARPENED = "apply_temperature(logits[drawing], temperatures).log_softmax(dim=-1)"
_STREAMS = "[rows[place].stream for place in drawing]"
_TEMPERATURES = "torch.tensor([one.temperature for one in params], dtype=torch.float64)"
_PUT = "tokens[drawing] = draw_filtered(log_probabilities, params, numbers)"
_SUMS = "(scores.unsqueeze(-1) + log_probabilities)"
_BEST = "largest(total.unsqueeze(0), count)"
_WAYS = "[(value, place // vocab, place % vocab) for value, place in zip(values, places, strict=True)]"
_STEP = "automaton.arrows[at].get(byte) if at is not None else None"
_FITS = "len(text) > 0 and at is not None"
_WALK = f"        at: int | None = state\n        for byte in text:\n            at = {_STEP}\n"

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "5.8": [
        (f"drawing = {_DRAWING}", "drawing = []", "nothing is drawn"),
        (_DRAWING, "list(range(len(rows)))", "of equal ones the first"),
        (_STREAMS, "[row.stream for row in rows]", "take a number of their stream too"),
        (f"uniforms({_STREAMS})", "uniforms([row.stream for row in rows])[drawing]",
         "take a number of their stream too"),
        (f"uniforms({_STREAMS})", "uniforms([rows[drawing[0]].stream]).expand(len(drawing))", "first stream's number"),
        (_STREAMS, "[row.stream for row in rows[: len(drawing)]]", "the streams of the first rows"),
        (_STREAMS, "[random_stream(one.seed) for one in params]", "a new stream is made"),
        (f"uniforms({_STREAMS})", "torch.rand(len(drawing), dtype=torch.float64)", "own stream"),
        (f"uniforms({_STREAMS})", f"torch.cat([torch.rand(1, generator=one) for one in {_STREAMS}]).double()",
         "not for one float64 number"),
        ("numbers = uniforms", f"uniforms({_STREAMS})\n    numbers = uniforms", "two numbers"),
        (_TEMPERATURES, "torch.full((len(params),), params[0].temperature).double()",
         "the first row that draws is used"),
        (_TEMPERATURES, "torch.full((len(params),), rows[0].params.temperature).double()", "of the first row"),
        (_TEMPERATURES, "torch.tensor([row.params.temperature for row in rows[: len(params)]]).double()",
         "the temperatures of the first rows"),
        ("apply_temperature(logits[drawing], temperatures)", "logits[drawing]", "the temperature is not used"),
        ("apply_temperature(logits[drawing], temperatures)", "(logits[drawing] * temperatures.unsqueeze(-1))",
         "multiplied by the temperature"),
        ("apply_temperature(logits[drawing], temperatures)",
         "apply_temperature(apply_temperature(logits[drawing], temperatures), temperatures)", "applied twice"),
        (_PUT, "tokens[drawing] = draw(log_probabilities.exp(), numbers)", "the filters are not used"),
        (_PUT, "tokens[drawing] = draw_filtered(log_probabilities, params[:1] * len(drawing), numbers)",
         "the filters of the first row that draws"),
        (_PUT,
         "tokens[drawing] = draw_filtered(log_probabilities, [row.params for row in rows][: len(drawing)], numbers)",
         "the filters of the first rows"),
        (_PUT, "first = logits[drawing].log_softmax(-1)\n"
         "    for place, ids, left in survivors(first, params):\n"
         "        kept = torch.zeros(left.shape[0], logits.shape[1]).scatter(-1, ids, (left > 0).float()) > 0\n"
         "        log_probabilities[place] = log_probabilities[place].masked_fill(~kept, -torch.inf)\n"
         "        hot = log_probabilities[place].gather(-1, ids).double().exp()\n"
         "        drawn = draw(hot, numbers[place])\n"
         "        tokens[[drawing[one] for one in place]] = ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)",
         "before the temperature"),
        ("logits[drawing]", "logits[: len(drawing)]", "the logits of the first rows"),
        (_PUT, _PUT.replace("tokens[drawing]", "tokens[: len(drawing)]"), "put into the first rows"),
        (_PUT, "tokens[drawing] = log_probabilities.argmax(dim=-1)", "the most probable"),
        (".log_softmax(dim=-1)", "", "need a softmax first"),
        (".log_softmax(dim=-1)", ".softmax(dim=-1)", "where log-probabilities are asked for"),
        (_PUT + "\n    return tokens", "return draw_filtered(log_probabilities, params, numbers)",
         "every row gets a token"),
        (_PUT, f"{_PUT}\n    for row, token in zip(rows, tokens.tolist()):\n        row.token_ids.append(token)",
         "noted in the rows"),
        (_PUT + "\n    return tokens", f"{_PUT}\n    return tokens.tolist()", "a torch.Tensor"),
        (_PUT + "\n    return tokens", f"{_PUT}\n    return tokens.unsqueeze(-1)", "one number a row"),
        (_PUT + "\n    return tokens", f"{_PUT}\n    return tokens.int()", "dtype"),
        (_PUT + "\n    return tokens", _PUT, "`return` is missing"),
        (_DRAWING, f"{_DRAWING}[:5]", "in the engine's Sampler"),
        (_EARLY, "", "no streams to take numbers from"),
        ("row.params.temperature > 0", "row.temperature > 0", "one of its params"),
        (_PARAMS, "[row.params for row in rows]", ""),
        ("tokens = logits.argmax(dim=-1)", "tokens = logits.argmin(dim=-1)", ""),
        ("tokens = logits.argmax(dim=-1)",
         "tokens = logits.argmax(dim=-1)\n    logits -= logits.amax(-1, keepdim=True)",
         "left as they were"),
    ],
    "5.9": [
        (_SUMS, "log_probabilities", "the scores of the beams are not added"),
        (_SUMS, "scores.unsqueeze(-1).expand_as(log_probabilities)", "only the scores of the beams count"),
        (_SUMS, "(scores.unsqueeze(-1) + log_probabilities.exp())", "probabilities are added"),
        (_SUMS, f"{_SUMS}.exp()", "the score is a probability"),
        (_SUMS, "(scores.unsqueeze(-1) * log_probabilities)", "are multiplied"),
        (_SUMS, "(log_probabilities - scores.unsqueeze(-1))", "are taken off"),
        (_SUMS, "(scores[:6].unsqueeze(-1) + log_probabilities[:6])", "a search of three steps"),
        (_WAYS, _WAYS.replace("value, place //", "log_probabilities.flatten()[place].item(), place //"),
         "last token alone"),
        (_WAYS, _WAYS.replace("value, place //", "scores[place // vocab].item(), place //"), "before this token"),
        (_SUMS, "(scores[0] + log_probabilities[0])", "only the first beam"),
        (_BEST, "(one[:, :count] for one in total.unsqueeze(0).sort(stable=True))", "nearer to 0 are better"),
        (_BEST, "total.unsqueeze(0).topk(count, sorted=True)", "topk"),
        (_BEST, "(one[:, :count] for one in total.unsqueeze(0).sort(descending=True))", "stable=True"),
        (_SUMS, "(scores + log_probabilities)", "a column [beams, 1]"),
        (_BEST, "(one.flip(-1) for one in largest(total.unsqueeze(0), count))", "the worst first"),
        (_WAYS, f"sorted({_WAYS}, key=lambda way: way[1])", "in the order of the beams"),
        (_WAYS, _WAYS.replace("place // vocab, place % vocab", "place % vocab, place // vocab"), "are exchanged"),
        ("vocab = log_probabilities.shape[-1]", "vocab = len(scores)", "divided by the number of beams"),
        (_WAYS, _WAYS.replace("place % vocab", "place"), "the place in the whole table"),
        ("log_probabilities).flatten()", "log_probabilities).T.flatten()", "column by column"),
        ("count)", "len(scores))", "as many ways as there are beams"),
        ("count)", "count - 1)", "too few"),
        ("count)", "count + 1)", "too many"),
        (_WAYS, f"[list(way) for way in {_WAYS}]", "each way is a list"),
        ("best[0].tolist()", "best[0]", "the numbers are still tensors"),
        ("best[0].tolist() for best", "best[0] if best.is_floating_point() else best[0].tolist() for best",
         "the numbers are still tensors"),
        ("best[0].tolist() for best", "best[0].tolist() if best.is_floating_point() else best[0] for best",
         "the numbers are still tensors"),
        (f"return {_WAYS}", f"{_WAYS}", "`return` is missing"),
        ("    total =", "    scores -= scores.max()\n    total =", "left as they were"),
    ],
    "5.10": [
        ("for byte in text:", "for byte in text[:1]:", "only the first byte"),
        ("for byte in text:", "for byte in text[-1:]:", "only the last byte"),
        ("for byte in text:", "for byte in text[:-1]:", "the last byte is not looked at"),
        ("at is not None)", "at in automaton.accepting)", "has to end in an accepting state"),
        ("at is not None)", "at is not None and at not in automaton.accepting)", "may not end in an accepting state"),
        ("len(text) > 0 and ", "", "tokens without bytes are allowed"),
        (f"at = {_STEP}", "following = automaton.arrows[at].get(byte)\n            if following is None:\n"
         "                break\n            at = following", "breaks off still counts"),
        (f"at = {_STEP}", "at = automaton.arrows[at].get(byte, at)", "breaks off still counts"),
        (_WALK + f"        allowed.append({_FITS})\n",
         "        at = state\n        for byte in text:\n"
         f"            at = {_STEP}\n        allowed.append({_FITS})\n"
         "        state = state if at is None else at\n", "where the last one's ended"),
        (_WALK + f"        allowed.append({_FITS})\n",
         "        for byte in text:\n            state = automaton.arrows[state].get(byte)\n"
         "        allowed.append(len(text) > 0 and state is not None)\n", "led nowhere"),
        ("at: int | None = state", "at: int | None = 0", "begins in state 0"),
        ("if at is not None else None", "if at else None", "state 0 counts as nowhere"),
        ("for byte in text:\n            at =", "for number, byte in enumerate(text):\n            at = "
         "None if number and not at else", "state 0 counts as nowhere"),
        ("at is not None)", "bool(at))", "ends in state 0"),
        (_STEP, "automaton.arrows[state].get(byte) if at is not None else None", "looked up at `state` itself"),
        (_FITS, "len(text) > 0 and all(any(byte in one for one in automaton.arrows) for byte in text)", "somewhere"),
        (_FITS, f"state not in automaton.accepting and {_FITS}", "nothing is allowed where the text may end"),
        (_FITS, f"len(text) > 0 and (state in automaton.accepting or {_FITS})", "everything is allowed"),
        (_FITS, f"not ({_FITS})", ""),
        ("return torch.tensor(allowed, dtype=torch.bool)", "return ~torch.tensor(allowed, dtype=torch.bool)",
         "exchanged"),
        ("torch.tensor(allowed, dtype=torch.bool)", "torch.tensor(allowed).nonzero().flatten()", "these are the ids"),
        ("torch.tensor(allowed, dtype=torch.bool)", "allowed", "a list"),
        ("torch.tensor(allowed, dtype=torch.bool)", "torch.tensor(allowed).float()", "dtype"),
        (_STEP, "automaton.arrows[at][byte]", "raises KeyError"),
        (_STEP, "automaton.arrows[at].get(byte)", "led nowhere"),
        ("for byte in text:", "for byte in text.decode().encode():", "part of a character"),
        (_STEP, "automaton.arrows[at].setdefault(byte, None) if at is not None else None", "left as they were"),
    ],
}  # fmt: skip


# (exercise, a whole first attempt, words of the diagnosis)
AS_WRITTEN = [
    ("5.8", """
def choose(logits, rows):
    return torch.cat([draw_filtered(logits[n : n + 1].log_softmax(-1), [row.params], uniforms([row.stream]))
                      for n, row in enumerate(rows)])
""", ["the temperature is not used"]),
    ("5.9", """
def best_beams(scores, log_probabilities, count):
    ways = []
    for beam in range(len(scores)):
        token = int(log_probabilities[beam].argmax())
        ways.append((float(scores[beam] + log_probabilities[beam, token]), beam, token))
    return sorted(ways, reverse=True)[:count]
""", ["only the best token of each beam"]),
    *(("5.9", f"""
def best_beams(scores, log_probabilities, count):
    total = scores + log_probabilities
    values, places = total.flatten().topk(count)
    return {ways}
""", ["the numbers are still tensors", ".tolist()", "a column [beams, 1]"]) for ways in (
        "[(v, p // total.shape[-1], p % total.shape[-1]) for v, p in zip(values, places)]",
        "[(v, int(p) // total.shape[-1], int(p) % total.shape[-1]) for v, p in zip(values, places)]",
        "[(float(v), p // total.shape[-1], p % total.shape[-1]) for v, p in zip(values, places)]",
    )),
    ("5.10", """
def allowed_tokens(automaton, state, vocabulary):
    allowed = torch.zeros(len(vocabulary), dtype=torch.bool)
    for token, text in enumerate(vocabulary):
        for byte in text:
            allowed[token] = byte in automaton.arrows[state]
    return allowed
""", ["looked at"]),
    *(("5.10", f"""
def allowed_tokens(automaton, state, vocabulary):
    allowed = []
    for text in vocabulary:
{walk}
    return torch.tensor(allowed)
""", ["all of them begin at `state`", "a variable of your own"]) for walk in (
        """
        ok = len(text) > 0
        for byte in text:
            if byte not in automaton.arrows[state]:
                ok = False
                break
            state = automaton.arrows[state][byte]
        allowed.append(ok)
""", """
        ok = True
        for byte in text:
            if byte not in automaton.arrows[state]:
                ok = False
                break
            state = automaton.arrows[state][byte]
        allowed.append(ok)
""", """
        for byte in text:
            if byte not in automaton.arrows[state]:
                allowed.append(False)
                break
            state = automaton.arrows[state][byte]
        else:
            allowed.append(True)
""", """
        ok = len(text) > 0
        for byte in text:
            following = automaton.arrows[state].get(byte)
            if following is None:
                ok = False
                break
            state = following
        allowed.append(ok)
""", """
        for byte in text:
            state = automaton.arrows[state].get(byte) if state is not None else None
        allowed.append(len(text) > 0 and state is not None)
""", """
        for byte in text:
            if state is not None:
                state = automaton.arrows[state].get(byte)
        allowed.append(state is not None)
""", """
        ok = len(text) > 0
        for byte in text:
            if state is None:
                break
            state = automaton.arrows[state].get(byte)
        allowed.append(ok and state is not None)
""", """
        ok = len(text) > 0
        for byte in text:
            state = automaton.arrows[state].get(byte)
            if state is None:
                ok = False
                break
        allowed.append(ok)
""",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "source", "diagnosis"), AS_WRITTEN)
def test_a_whole_attempt_is_told_its_faults(exercise_id, source, diagnosis):
    with pytest.raises(Exception) as caught:  # what the learner's code raises goes through, with its meaning attached
        run_check(exercises.find(exercise_id), mutants.written(exercise_id, source))
    said = str(caught.value)
    assert isinstance(caught.value, CheckFailed) and all(words in said for words in diagnosis), said
    assert "all zeros" not in said


def test_a_result_that_is_right_in_parts_is_not_called_all_zeros():
    source = """
def allowed_tokens(automaton, state, vocabulary):
    return torch.tensor([len(text) == 1 and text[0] in automaton.arrows[state] for text in vocabulary])
"""
    with pytest.raises(CheckFailed) as caught:
        run_check(exercises.find("5.10"), mutants.written("5.10", source))
    assert "all zeros" not in str(caught.value)
    assert "tokens are refused that may come next" in str(caught.value)
