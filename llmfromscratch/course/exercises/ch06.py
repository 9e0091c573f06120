"""Chapter 6, optimization: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    acceptance_checks,
    drafts_clinic,
    fusing_checks,
    lookup_checks,
    online_softmax_checks,
    optimization_clinic,
    product_checks,
    roofline_checks,
    speculative_checks,
)

EXERCISES = [
    Exercise(
        id="6.1",
        object="llmfromscratch.optimization.decode_bytes",
        title="the floor",
        points=1,
        minutes=8,
        check=roofline_checks.check_decode_bytes,
        hints=(
            "Two sums: weights, which the context does not change, and stored numbers, which grow with it. The worked "
            "example above the cell has one layer's attention; what else is in a layer, and what comes after the last?",
            "Attention has four products: queries and output with num_heads * head_dim rows or columns, keys and "
            "values with num_kv_heads * head_dim. The feed-forward part has three of intermediate_size. The head has "
            "vocab_size rows. Every one of them has hidden_size on its other side.",
            "Stored for each token: in each layer a key and a value of num_kv_heads * head_dim numbers. Weights times "
            "weight_bytes, stored numbers times cache_bytes; the head once, all else times num_layers.",
        ),
    ),
    Exercise(
        id="6.2",
        object="llmfromscratch.optimization.fold_tile",
        title="attention in one pass",
        points=3,
        minutes=20,
        check=online_softmax_checks.check_fold_tile,
        hints=(
            "Do the three tiles of the example on paper, and write down top, total and mixed after each. When the 3 "
            "turns up, what happens to the two old sums, and by which factor?",
            "torch.maximum(top, scores.amax(dim=-1)) is the new top. Old sums shrink by exp(old top - new top); the "
            "tile's own powers are exp(score - new top). unsqueeze(-1) makes a column of one number for each row.",
            "Where the new top is still -inf, nothing was seen: take 0 in its place (masked_fill) before you subtract, "
            "and every power of -inf is 0. Return the new top as it is. mixed gets powers @ values, total the sum of "
            "the powers along the last dimension, each on top of the old one times the factor.",
        ),
    ),
    Exercise(
        id="6.3",
        object="llmfromscratch.optimization.fuse_rows",
        title="one product for three",
        points=1,
        minutes=6,
        check=fusing_checks.check_fuse_rows,
        hints=(
            "A row of a weight is one number of the result. Three results one behind the other: how do the rows lie?",
            "torch.cat(list(weights)) puts rows under rows. A slice of a tensor, fused[a:b], is a view: no copy.",
            "fused.split([how many rows each of the old had]) gives all the views at once. Return the pair "
            "(fused, list of views).",
        ),
    ),
    Exercise(
        id="6.4",
        object="llmfromscratch.optimization.fold_gain",
        title="fold the norm's weight",
        points=1,
        minutes=5,
        check=fusing_checks.check_fold_gain,
        hints=(
            "Write one number of W @ (g * x) as a sum. With which number of W does g[i] stand together?",
            "g[i] stands with column i. A tensor [rows, width] times one of [width] multiplies column by column.",
            "weight * gain, with the gain brought to the weight's dtype first (to): a float32 gain would make the "
            "result float32 as well. No `*=`: the weight is someone else's.",
        ),
    ),
    Exercise(
        id="6.5",
        object="llmfromscratch.optimization.multiply_rows",
        title="read at full speed",
        points=3,
        minutes=18,
        seconds=60,
        check=product_checks.check_multiply_rows,
        hints=(
            "Three loops: over the rows from first to before end, over the inputs, over the width. Before the last "
            "two, one more for each row: over the lines of the row that is AHEAD.",
            "range(0, width, per_line(weight)) goes through "
            "the first column of each line. prefetch(weight, row + AHEAD, column) asks for it, but not behind the last "
            "row, weight.shape[0] - 1. widen(weight[row, i]) is the number.",
            "total = np.float32(0) for each input; total += x[m, i] * widen(weight[row, i]); then output[m, row] = "
            "total. Beginning with 0.0 would make Numba keep the sum in float64. min(row + AHEAD, last) never asks "
            "behind the last row.",
        ),
    ),
    Exercise(
        id="6.6",
        object="llmfromscratch.optimization.bucket_of",
        title="shapes that stay",
        points=1,
        minutes=5,
        check=roofline_checks.check_bucket_of,
        hints=(
            "Begin with the smallest bucket. When is it good enough, and what is the next one?",
            "A while loop that doubles needs no logarithm, and no rounding.",
            "bucket = smallest; as long as bucket < count, double it. A bucket that is just as large as count holds "
            "it.",
        ),
    ),
    Exercise(
        id="6.7",
        object="llmfromscratch.optimization.lookup_draft",
        title="guess from the text",
        points=2,
        minutes=12,
        check=lookup_checks.check_lookup_draft,
        hints=(
            "Do the example by hand: [5, 6, 7, 8, 5, 6] ends with 5, 6. Where does that stand earlier, and what came "
            "next? And if only the 6 occurred earlier, without the 5 before it?",
            "Go through the places from the end to the beginning, and at each count backwards how many tokens agree "
            "with the ending: ids[end - 1 - length] == ids[-1 - length]. Stop at `longest`, and at the text's front.",
            "Begin with end = len(ids) - 1: the text up to there is an earlier one. Keep the place with the largest "
            "length, and only a larger one replaces it, so that of several the latest stays. ids[place : place + "
            "count] is the draft; [] where nothing was found.",
        ),
    ),
    Exercise(
        id="6.8",
        object="llmfromscratch.optimization.accept_greedy",
        title="keep what is right",
        points=1,
        minutes=6,
        check=acceptance_checks.check_accept_greedy,
        hints=(
            "Write drafts [4, 9, 3] under best [4, 8, 3, 6]. Which token of best answers to a text that really is the "
            "answer's, and which only to one with the wrong 9 in it?",
            "Count from the front how many drafts equal best at their own place, and stop at the first that does not.",
            "With `right` drafts that agree, the result is those and best[right]. If all agree, best[right] is the "
            "last of best, one more than there are drafts.",
        ),
    ),
    Exercise(
        id="6.9",
        object="llmfromscratch.optimization.accept_drafts",
        title="keep a drawn token",
        points=3,
        minutes=18,
        check=acceptance_checks.check_accept_drafts,
        hints=(
            "Two tokens, drafted 0.75 and 0.25, wanted 0.5 and 0.5. How often does a draft of the first have to be "
            "turned down, so that it comes in half of all cases? What has to come in its place then?",
            "One loop with enumerate over the drafts; drafted[place, draft] and wanted[place, draft] are the two "
            "numbers. (a - b).clamp(min=0) is what is left over. sampling.draw takes one row [1, vocab] and float64 "
            "[1], so torch.tensor([uniforms[-1]], dtype=torch.float64).",
            "Inside the loop only a rejection returns: the drafts before it and int(sampling.draw(...)) of what is "
            "left over at that place. Behind the loop all drafts stand, and the last row of wanted is drawn from, "
            "wanted[-1:].",
        ),
    ),
    Exercise(
        id="6.10",
        object="llmfromscratch.optimization.expected_tokens",
        title="what a pass gives",
        points=1,
        minutes=5,
        check=acceptance_checks.check_expected_tokens,
        hints=(
            "How probable is it that at least one token comes, at least two, at least three? An average of whole "
            "numbers is the sum of these.",
            "The first token always comes: acceptance**0. The last of drafts + 1 comes where all drafts stand.",
            "A sum over range(drafts + 1) of acceptance**place. The closed form with 1 - acceptance below the line "
            "needs a case of its own at 1.",
        ),
    ),
    Exercise(
        id="6.11",
        object="llmfromscratch.course.sketches.ch06.speculative_answer",
        title="the loop",
        points=3,
        minutes=20,
        seconds=30,
        check=speculative_checks.check_speculative_answer,
        hints=(
            "Begin with plain_answer. Three things change: the pass brings drafts behind what is new, all its logits "
            "come back, and afterwards something in the cache does not belong to the text.",
            "New are ids[cache.length(0):], in every pass, the first too. The row of the newest token, and one for "
            "each draft, are the last len(drafts) + 1 rows of the logits; argmax(dim=-1).tolist() makes `best` of "
            "them. With `left` tokens to go, no more than left - 1 drafts are of use.",
            "accepted = optimization.accept_greedy(drafts, best). One token of it is not in the cache, the model's "
            "own; so of the drafts len(accepted) - 1 stand, and the other len(drafts) + 1 - len(accepted) have to be "
            "rewound. Then ids += accepted, and the number is noted.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="6.a",
        title="a fast path that is slower",
        story=optimization_clinic.FAST_PATH_STORY,
        run=optimization_clinic.show_fast_path,
        broken=optimization_clinic.attend_once,
        check=optimization_clinic.check_fast_path,
    ),
    BugHunt(
        id="6.b",
        title="the GPU that waits",
        story=optimization_clinic.WAITING_STORY,
        run=optimization_clinic.show_waiting,
        broken=optimization_clinic.through_layers,
        check=optimization_clinic.check_waiting,
    ),
    BugHunt(
        id="6.c",
        title="right as long as it is short",
        story=optimization_clinic.RESCALING_STORY,
        run=optimization_clinic.show_rescaling,
        broken=optimization_clinic.attend_in_tiles,
        check=optimization_clinic.check_rescaling,
    ),
    BugHunt(
        id="6.d",
        title="what was rejected",
        story=drafts_clinic.REJECTED_STORY,
        run=drafts_clinic.show_rejected,
        broken=drafts_clinic.one_pass,
        check=drafts_clinic.check_rejected,
    ),
]
