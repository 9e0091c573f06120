"""Chapter 5, sampling: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    beam_checks,
    choosing_checks,
    drawing_checks,
    filter_checks,
    grammar_checks,
    sampling_clinic,
    stream_checks,
)

EXERCISES = [
    Exercise(
        id="5.1",
        object="llmfromscratch.sampling.draw",
        title="draw one",
        points=2,
        minutes=12,
        check=drawing_checks.check_draw,
        hints=(
            "Draw the line for the example: 0.2, then nothing, then 0.5, then 0.3. At which places of the line does "
            "the answer change? Those places are a running sum.",
            "cumsum(dim=-1) is the running sum, in float64; torch.searchsorted finds for each row where a number would "
            "be put in. Its `right` decides what happens when the number is exactly at a border.",
            "The target of a row is its number times the last entry of its running sum, as a column [rows, 1]; "
            "searchsorted(..., right=True) steps over columns of probability 0. If you divide by the sum instead, the "
            "last entry may end below a number just under 1: no place further than the last column with a probability.",
        ),
    ),
    Exercise(
        id="5.2",
        object="llmfromscratch.course.sketches.ch05.gumbel_draw",
        title="draw without a sum",
        points=1,
        minutes=6,
        check=drawing_checks.check_gumbel_draw,
        hints=(
            "One random number for every logit, not one for every row. Which of the sums is the largest?",
            "torch.log twice, with a minus each time; clamp(min=...) is a floor for a uniform of 0; argmax along the "
            "last dimension.",
            "The logarithm of a uniform is negative, so its minus is positive and has a logarithm too. Add what comes "
            "out, with its sign, to the logits as they are: no softmax.",
        ),
    ),
    Exercise(
        id="5.3",
        object="llmfromscratch.sampling.apply_temperature",
        title="temperature",
        points=1,
        minutes=6,
        check=drawing_checks.check_apply_temperature,
        hints=(
            "Two steps: what is the largest logit of each row after it was taken off, and what does division do to it?",
            "amax(dim=-1, keepdim=True) is the largest of each row; unsqueeze(-1) makes a column of the temperatures, "
            "one for each row; clamp(min=...) keeps them away from 0.",
            "torch.finfo(torch.float32) has .tiny and .max, the limits to clamp to. Temperatures in float64 have to "
            "get the dtype of the logits (to), or the result is float64 as well.",
        ),
    ),
    Exercise(
        id="5.4",
        object="llmfromscratch.sampling.keep_top_k",
        title="the top k",
        points=1,
        minutes=6,
        check=filter_checks.check_keep_top_k,
        hints=(
            "The row is ranked already, so the values do not matter: only the places do.",
            "torch.arange(...) numbers the places; compared with a column of k's it gives a table of True and False.",
            "A place stays if it is below the k of its row, or (|) if that k is 0.",
        ),
    ),
    Exercise(
        id="5.5",
        object="llmfromscratch.sampling.keep_top_p",
        title="the top p",
        points=2,
        minutes=12,
        check=filter_checks.check_keep_top_p,
        hints=(
            "For each candidate ask: how much probability stands before it? Take the example and write these four "
            "numbers down.",
            "cumsum(dim=-1) counts the candidate itself as well. The running sum one place further to the right, with "
            "0 at the front, does not.",
            "torch.nn.functional.pad(sums, (1, -1)) puts a 0 in front and drops the last. A candidate stays while what "
            "stands before it is below the p of its row.",
        ),
    ),
    Exercise(
        id="5.6",
        object="llmfromscratch.sampling.apply_penalties",
        title="penalties",
        points=2,
        minutes=15,
        check=filter_checks.check_apply_penalties,
        hints=(
            "Three separate steps, in the order of the text. Only the first asks for the sign of a logit, and only the "
            "last two look at `counts`.",
            "torch.where(condition, a, b) chooses element by element; unsqueeze(-1) makes columns of the strengths; "
            "(counts > 0) is 1 or 0 in a product.",
            "where(logits > 0, divided, multiplied) is the repelled table; where(seen, repelled, logits) takes it for "
            "what was seen. Then subtract presence times (counts > 0), and frequency times counts.",
        ),
    ),
    Exercise(
        id="5.7",
        object="llmfromscratch.sampling.uniforms",
        title="seeds in a batch",
        points=1,
        minutes=5,
        check=stream_checks.check_uniforms,
        hints=(
            "Each stream is asked once. Which order do the numbers come out in?",
            "torch.rand(1, generator=stream, dtype=...) takes one number of a stream.",
            "A list of such tensors of one number, joined by torch.cat. float32 has too few numbers between 0 and 1 "
            "for a vocabulary with rare tokens.",
        ),
    ),
    Exercise(
        id="5.8",
        object="llmfromscratch.sampling.choose",
        title="choose",
        points=4,
        minutes=25,
        check=choosing_checks.check_choose,
        hints=(
            "Begin as if all were greedy. Then find the rows that draw, and put what they draw over what you have.",
            "A list of places chooses rows of a tensor: logits[places], and tokens[places] = ... puts back. "
            "rows[place].params.temperature, rows[place].stream. No row draws? Then there is nothing more to do.",
            "For the drawing rows: apply_temperature with a float64 tensor of their temperatures, log_softmax(dim=-1), "
            "uniforms of their streams, and draw_filtered with their params.",
        ),
    ),
    Exercise(
        id="5.9",
        object="llmfromscratch.sampling.best_beams",
        title="beams",
        points=3,
        minutes=15,
        check=beam_checks.check_best_beams,
        hints=(
            "There are beams x vocab ways. Give each its score in one table; where the best of them stand in it says "
            "which beam and which token they are.",
            "unsqueeze(-1) adds a score to a whole row; flatten() lays the rows one behind the other; largest (or a "
            "stable sort) puts equals in the order of their places. What are // and % of a place?",
            "place // vocab is the beam, place % vocab the token. largest wants rows: give it flatten().unsqueeze(0), "
            "and take row 0 of what it gives. tolist() makes plain numbers.",
        ),
    ),
    Exercise(
        id="5.10",
        object="llmfromscratch.course.sketches.ch05.allowed_tokens",
        title="only what parses",
        points=3,
        minutes=15,
        check=grammar_checks.check_allowed_tokens,
        hints=(
            "Walk one token by hand: b'5-' from the state after '555'. At which byte does it lead nowhere?",
            "automaton.arrows[state] is a dict from byte to next state; .get(byte) gives None where there is no arrow. "
            "Going through a bytes object gives numbers. Every token begins at the same state.",
            "For each token: at = state; for each of its bytes at = automaton.arrows[at].get(byte), as long as there "
            "is a state to go on from. It is allowed if the walk never broke off, and if there was something to walk.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="5.a",
        title="a small p",
        story=sampling_clinic.NUCLEUS_STORY,
        run=sampling_clinic.show_nucleus,
        broken=sampling_clinic.nucleus,
        check=sampling_clinic.check_nucleus,
    ),
    BugHunt(
        id="5.b",
        title="the penalty that feeds the loop",
        story=sampling_clinic.PENALTY_STORY,
        run=sampling_clinic.show_penalty,
        broken=sampling_clinic.penalize,
        check=sampling_clinic.check_penalty,
    ),
    BugHunt(
        id="5.c",
        title="the neighbour's luck",
        story=sampling_clinic.STREAM_STORY,
        run=sampling_clinic.show_streams,
        broken=sampling_clinic.SharedSampler,
        check=sampling_clinic.check_streams,
    ),
    BugHunt(
        id="5.d",
        title="the order of two lines",
        story=sampling_clinic.ORDER_STORY,
        run=sampling_clinic.show_order,
        broken=sampling_clinic.filtered,
        check=sampling_clinic.check_order,
    ),
]
