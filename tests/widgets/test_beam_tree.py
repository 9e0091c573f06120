"""The beam tree: its ways against an exhaustive ranking, its texts against the search, wrong choices of beams named."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from llmfromscratch import beam_search, kv_cache, sampling
from llmfromscratch.widgets import beam_tree, draw_beam_tree
from llmfromscratch.widgets.beam_record import CUT, DROPPED, ENDED, KEPT, Node, Tree, grow_tree
from llmfromscratch.widgets.beam_tree import _LOOKS, _look, _places, describe_beam_tree
from llmfromscratch.widgets.token_reading import byte_tokenizer
from tests.tiny_models import all_logits, tiny_model

pytestmark = pytest.mark.filterwarnings("error")
PROMPTS = ("the sea", "a dog\n")


@pytest.fixture(scope="module")
def llm():
    return SimpleNamespace(model=tiny_model(vocab_size=256, eos_token_id=[255]), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def tree(llm):
    return grow_tree(llm, "the sea", 3, 1.0, 4)


def log_probability(llm, prompt, token_ids):
    """Of an answer, from one pass over the whole text."""
    ids = llm.tokenizer.encode(prompt)
    rows = all_logits(llm.model, [*ids, *token_ids])[len(ids) - 1 : -1].double().log_softmax(-1)
    return float(rows[range(len(token_ids)), list(token_ids)].sum())


def answer_of(tree, column, node):
    """The tokens on the way to a node."""
    found = []
    while column >= 0:
        one = tree.columns[column][node]
        found.append(one.token_id)
        column, node = column - 1, one.parent
    return found[::-1]


def way_to(tree, column, node):
    """(column, node) of every token on the way to a node."""
    found = []
    while column >= 0:
        found.append((column, node))
        column, node = column - 1, tree.columns[column][node].parent
    return found


def boxes(figure):
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def test_every_node_has_the_log_probability_of_its_answer(llm, tree):
    for column, nodes in enumerate(tree.columns):
        for place, node in enumerate(nodes):
            expected = log_probability(llm, "the sea", answer_of(tree, column, place))
            assert node.score == pytest.approx(expected, abs=1e-4)


def test_a_step_keeps_the_best_ways_and_drops_the_next_best(llm, tree):
    answers = [[]]
    for column, nodes in enumerate(tree.columns):
        scored = sorted(
            ((log_probability(llm, "the sea", [*answer, token]), (*answer, token))
             for answer in answers for token in range(256)),
            reverse=True,
        )[: len(nodes)]  # fmt: skip
        shown = {tuple(answer_of(tree, column, place)) for place in range(len(nodes))}
        assert shown == {answer for _, answer in scored}
        dropped = {tuple(answer_of(tree, column, place)) for place, node in enumerate(nodes) if node.kind == CUT}
        assert dropped == {answer for _, answer in scored[-DROPPED:]}
        answers = [answer_of(tree, column, place) for place, node in enumerate(nodes) if node.kind == KEPT]


def test_the_texts_are_those_of_the_search_and_the_best_is_picked_out(llm, tree):
    found, _ = beam_search.beam_search(
        llm.model, kv_cache.ConcatKVCache(3), llm.tokenizer.encode("the sea"), 3, max_tokens=4, ends=tree.ends, n=3
    )
    assert list(tree.results) == found
    assert tuple(answer_of(tree, len(tree.best) - 1, tree.best[-1])) == found[0].token_ids
    assert all(tree.columns[n][node].kind != CUT for n, node in enumerate(tree.best))
    greedy = grow_tree(llm, "the sea", 1, 1.0, 4)
    assert tree.greedy == greedy.results[0] == greedy.greedy
    best = [
        box for box in boxes(draw_beam_tree(tree)) if to_hex(box.get_edgecolor()) == _LOOKS["best"]["edgecolor"].lower()
    ]
    assert len(best) == len(found[0].token_ids)


def test_a_full_stop_ends_a_text_and_the_length_penalty_compares_lengths(llm):
    first = grow_tree(llm, "the sea", 3, 0.0, 4, ends=()).columns[0][1].token_id
    for penalty in (0.0, 1.0, 2.0):
        tree = grow_tree(llm, "the sea", 3, penalty, 4, ends=[first])
        (ended,) = [node for node in tree.columns[0] if node.kind == ENDED]
        assert ended.token_id == first and ended.final == pytest.approx(ended.score)
        for result in tree.results:
            score = log_probability(llm, "the sea", result.token_ids)
            assert result.score == pytest.approx(score / len(result.token_ids) ** penalty, rel=1e-4)
            assert result.finished == (result.token_ids[-1] == first)
    assert grow_tree(llm, "the sea", 2, 1.0, 2).ends == (46, 255)  # the byte of a full stop, and the model's own end


def test_the_text_tells_each_step_and_the_texts_that_were_found(tree):
    lines = describe_beam_tree(tree).splitlines()
    assert lines[0] == "Beam search after “the sea”"
    assert lines[1] == (
        "3 beams, at most 4 tokens; a text ends with “.” or “<FF>”; texts are compared by their score = "
        "log-probability / length"
    )
    kept = ", ".join(f"{tree.label(node.token_id)!r} {node.score:.2f}" for node in tree.columns[0][:3])
    dropped = ", ".join(f"{tree.label(node.token_id)!r} {node.score:.2f}" for node in tree.columns[0][3:])
    assert lines[2] == f"Step 1: kept {kept}; dropped {dropped}"
    best = tree.results[0]
    assert lines[6] == f"1. “{tree.text(best.token_ids)}”  score {best.score:.3f}, cut after 4 tokens"
    assert lines[9].startswith("Greedy decoding finds ")


def test_columns_are_ordered_so_that_no_two_lines_cross(llm):
    for width in (2, 5):
        tree = grow_tree(llm, "a dog\n", width, 1.0, 6)
        _, spots = _places(tree)
        for column in range(1, len(tree.columns)):
            nodes = sorted(range(len(tree.columns[column])), key=lambda node: spots[column][node])
            starts = [spots[column - 1][tree.columns[column][node].parent] for node in nodes]
            assert starts == sorted(starts)
        for ys in spots:
            assert all(b - a > 0.4 for a, b in pairwise(sorted(ys)))  # boxes are 0.36 inches high


def test_kept_dead_dropped_and_best_boxes_are_drawn_for_what_they_are(tree):
    drawn = boxes(draw_beam_tree(tree))
    assert len(drawn) == sum(len(column) for column in tree.columns)
    counts = dict.fromkeys(_LOOKS, 0)
    for box in drawn:
        (name,) = [n for n, look in _LOOKS.items() if to_hex(box.get_facecolor()) == to_hex(look["facecolor"])]
        counts[name] += 1
    alive = set()  # what lies on the way to a text, or to the last step
    for column, nodes in enumerate(tree.columns):
        for place, node in enumerate(nodes):
            if node.kind == ENDED or (node.kind == KEPT and column == len(tree.columns) - 1):
                alive |= set(way_to(tree, column, place))
    kept = {(c, n) for c, nodes in enumerate(tree.columns) for n, node in enumerate(nodes) if node.kind == KEPT}
    dead = len(kept - alive)
    assert counts["dropped"] == DROPPED * len(tree.columns) and counts["died out"] == dead > 0
    assert (
        len({(look["linewidth"], str(look.get("linestyle"))) for look in _LOOKS.values()}) >= 3
    )  # not by colour alone


def test_every_node_of_a_line_that_dies_out_is_drawn_as_one():
    nodes = [Node(0, 1, -1.0, KEPT), Node(0, 2, -1.0, KEPT), Node(0, 3, -1.0, KEPT), Node(0, 4, -3.0, CUT)]
    second = [Node(0, 1, -2.0, KEPT), Node(1, 2, -2.0, KEPT), Node(2, 7, -2.0, ENDED, -1.0), Node(1, 3, -3.0, CUT)]
    third = [Node(0, 1, -3.0, KEPT), Node(1, 2, -4.0, CUT), Node(1, 5, -4.0, CUT)]
    tree = SimpleNamespace(columns=(nodes, second, third), best=(0, 0, 0))
    tree.goes_on = lambda column, node: Tree.goes_on(tree, column, node)
    looks = [[_look(tree, column, node) for node in range(len(tree.columns[column]))] for column in range(3)]
    assert looks == [
        ["best", "died out", "kept", "dropped"],
        ["best", "died out", "kept", "dropped"],
        ["best", "dropped", "dropped"],
    ]


def test_every_control_changes_the_picture(llm):
    view = beam_tree(llm, PROMPTS, steps=3)
    pictures = [view.png(), view.set(width=2).png(), view.set(length_penalty=0.5).png(), view.set(steps=4).png()]
    pictures.append(view.set(prompt=PROMPTS[1]).png())
    assert len(set(pictures)) == 5
    with pytest.raises(ValueError, match="width cannot be 6; expected a whole number from 1 to 5"):
        view.set(width=6)


def test_a_tree_is_grown_once_for_each_setting(llm, monkeypatch):
    view = beam_tree(llm, PROMPTS, steps=2)
    before = view.text()
    monkeypatch.setattr(sampling, "best_beams", None)
    assert view.text() == before and view.png()
    assert "cannot be drawn" in view.set(width=2).text()


# ---- learners' own -------------------------------------------------------------------------------------------------


def forgets_the_past(scores, log_probabilities, count):
    return sampling.best_beams(torch.zeros_like(scores), log_probabilities, count)


def each_beam_its_best(scores, log_probabilities, count):
    best = log_probabilities.max(-1)
    ways = [(float(scores[n] + best.values[n]), n, int(best.indices[n])) for n in range(len(scores))]
    rest = [
        way for way in sampling.best_beams(scores, log_probabilities, count) if way[1:] not in {w[1:] for w in ways}
    ]
    return (sorted(ways, reverse=True) + rest)[:count]


def worst_first(scores, log_probabilities, count):
    return sampling.best_beams(scores, log_probabilities, 3 * count)[::-1][:count]


def twice_the_same(scores, log_probabilities, count):
    total = scores.unsqueeze(-1) + log_probabilities
    best = int(total.argmax())
    return [(float(total.max()), best // total.shape[-1], best % total.shape[-1])] * count


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (forgets_the_past, "the log-probabilities of its answer add up to"),
        (each_beam_its_best, "which is more probable."),
        (worst_first, "Step 1 takes "),
        (twice_the_same, "Step 1 takes a way twice."),
    ],
)
def test_a_wrong_choice_of_beams_is_named_whether_given_or_built(llm, monkeypatch, wrong, said):
    right = beam_tree(llm, PROMPTS)
    given = beam_tree(llm, PROMPTS, best_beams=wrong)
    assert said in given.text() and said not in right.text()
    assert given.png() != right.png()
    genuine = sampling.best_beams
    monkeypatch.setattr(sampling, "best_beams", lambda *arguments: _with(genuine, wrong, arguments))
    assert said in beam_tree(llm, PROMPTS).text()


def _with(genuine, wrong, arguments):
    """The wrong function, whose own call of best_beams finds the right one."""
    replaced, sampling.best_beams = sampling.best_beams, genuine
    try:
        return wrong(*arguments)
    finally:
        sampling.best_beams = replaced


def test_a_right_choice_of_ones_own_draws_the_same_tree(llm):
    def mine(scores, log_probabilities, count):
        total = (scores.unsqueeze(-1) + log_probabilities).flatten()
        found = total.sort(descending=True, stable=True)
        places = found.indices[:count].tolist()
        return [(float(total[at]), at // 256, at % 256) for at in places]

    assert beam_tree(llm, PROMPTS, best_beams=mine).text() == beam_tree(llm, PROMPTS).text()


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ([(-1.0, 0, 999)] * 9, "best_beams gave beam 0, token 999; there are 1 beams (from 0) and 256 tokens."),
        ([(-1.0, 3, 9)] * 9, "best_beams gave beam 3, token 9;"),
        ([-1.0] * 9, "best_beams gave -1.0; (score, beam, token) was expected."),
    ],
)
def test_ways_that_are_none_are_a_sentence(llm, ways, said):
    assert said in beam_tree(llm, PROMPTS, best_beams=lambda *arguments: ways).text()


def test_what_is_not_yet_written_and_an_empty_prompt_are_said(llm):
    def best_beams(scores, log_probabilities, count):
        raise NotImplementedError

    text = beam_tree(llm, PROMPTS, best_beams=best_beams).text()
    assert text == "best_beams is not yet written; this figure is drawn with it."
    assert "There is nothing to continue" in beam_tree(llm, ("",)).text()


@pytest.mark.parametrize("prompt", ["$x_1$ \\frac\n", "你好 👩\u200d🚀", "word " * 30])
@pytest.mark.parametrize("width", [1, 5])
def test_any_prompt_is_drawn_without_a_warning(llm, prompt, width):
    view = beam_tree(llm, (prompt,), width=width, steps=8)
    assert view.png() and "cannot be drawn" not in view.text()


@pytest.mark.model
def test_beams_find_a_more_probable_text_than_greedy_decoding_on_the_real_model(smollm2_fp32):
    text = beam_tree(smollm2_fp32).text()
    assert "1. “␣red,␣orange,␣and␣yellow”" in text
    scores = [float(line.split("score ")[1].split(",")[0]) for line in text.splitlines() if "”  score " in line]
    assert scores[0] > scores[-1]  # that of greedy decoding stands last
