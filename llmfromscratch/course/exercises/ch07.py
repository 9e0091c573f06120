"""Chapter 7, quantization: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import (
    calibration_checks,
    calibration_clinic,
    compensation_checks,
    damage_checks,
    frame_checks,
    matrix_checks,
    packed_product_checks,
    quantization_clinic,
    rounding_checks,
    row_checks,
)

EXERCISES = [
    Exercise(
        id="7.1",
        object="llmfromscratch.quantization.grid_of",
        title="a grid for a group",
        points=2,
        minutes=12,
        check=rounding_checks.check_grid_of,
        hints=(
            "Two bits make four levels. How many steps lie between the first and the last? Draw them for the numbers "
            "1, 2 and 7, and then, symmetric, for -6, 1 and 3 in three bits, with a level at 0.",
            "amin(dim=-1) and amax(dim=-1) look at each group by itself. Symmetric: abs() first; of 2**bits levels one "
            "is 0 and 2**(bits - 1) - 1 lie above it, so the number largest in size is that many steps away.",
            "groups.float() first. torch.where(scales == 0, 1, scales) leaves no 0 to divide by. Symmetric, "
            "2**(bits - 1) levels lie below 0, so the minimum is that many scales below it; otherwise it is amin.",
        ),
    ),
    Exercise(
        id="7.2",
        object="llmfromscratch.quantization.codes_of",
        title="the nearest level",
        points=1,
        minutes=5,
        check=rounding_checks.check_codes_of,
        hints=(
            "Levels at 1, 3, 5 and 7: which code has 4.8, which 9? What did you do to the number before you rounded?",
            "value = minimum + scale * code; solve it for the code. unsqueeze(-1) makes a column of one number "
            "for each group, so that it meets all numbers of its group.",
            "round() what comes out, then clamp(0, the last code), and only then to(torch.uint8): a number that was "
            "not kept within the grid before would wrap around.",
        ),
    ),
    Exercise(
        id="7.3",
        object="llmfromscratch.quantization.quantize",
        title="a whole matrix",
        points=1,
        minutes=8,
        check=matrix_checks.check_quantize,
        hints=(
            "Everything is there: grids_of(weight, bits, group, symmetric) gives the grid of every group as it will be "
            "stored, codes_of the codes of one part. What is left is to cut the columns, and to put the codes together "
            "again.",
            "weight.split(size, dim=1) gives the groups of columns, the last one shorter where it has to be. The grids "
            "are [rows, groups]: column i of them belongs to part i.",
            "codes_of(part, scales[:, i], minimums[:, i], bits) for each part; torch.cat along dim=1. Where group is "
            "None, it is the width, for split and for the Quantized that you return.",
        ),
    ),
    Exercise(
        id="7.4",
        object="llmfromscratch.quantization.pack_int4",
        title="two codes in a byte",
        points=1,
        minutes=5,
        check=matrix_checks.check_pack_int4,
        hints=(
            "Write down bytes 0, 1 and 15 of a row of 64 columns, and byte 16: which two columns does each hold?",
            "A row is blocks of 32, and a block two halves of 16. view takes it apart that way, [rows, blocks, 2, 16], "
            "and unbind(dim=2) gives both halves. << 4 moves a code into the upper half of a byte, | joins the two.",
            "low | (high << 4) is [rows, blocks, 16]; flatten(1) makes rows of it. All of it stays uint8.",
        ),
    ),
    Exercise(
        id="7.5",
        object="llmfromscratch.quantization.multiply_int8_rows",
        title="read half the bytes",
        points=3,
        minutes=18,
        seconds=60,
        check=packed_product_checks.check_multiply_int8_rows,
        hints=(
            "It is chapter 6's product with two differences: what is read is a code, and one number a row tells what "
            "the codes of that row are worth. Where does that number stand in the sum, and can it stand before it?",
            "Three loops: over the rows from first to before end, over the inputs, over the width; and one more for "
            "each row, over range(0, width, per_line(codes)), that calls prefetch(codes, row + AHEAD, column), but "
            "never behind the last row, codes.shape[0] - 1.",
            "total = np.float32(0) for each input; total += x[m, i] * np.float32(codes[row, i]); then output[m, row] = "
            "total * scales[row]. min(row + AHEAD, last) never asks behind the last row.",
        ),
    ),
    Exercise(
        id="7.6",
        object="llmfromscratch.quantization.quantize_rows",
        title="activations too",
        points=1,
        minutes=6,
        check=row_checks.check_quantize_rows,
        hints=(
            "A vector whose largest number in size is 2.54: what is a step worth, so that this number becomes 127?",
            "x.float().abs().amax(dim=-1) is the largest size of each row. A scale of 0 has to become 1, and "
            "unsqueeze(-1) makes the scales a column for the division.",
            "round() before to(torch.int8), which would cut. Codes first, scales second; the scales stay [rows].",
        ),
    ),
    Exercise(
        id="7.7",
        object="llmfromscratch.quantization.divergence",
        title="how far the answers moved",
        points=1,
        minutes=6,
        check=damage_checks.check_divergence,
        hints=(
            "Two outcomes, p = (1/2, 1/2) and q = (1/4, 3/4): write down both terms of the sum, and add them. Which of "
            "the two models says how often an outcome comes?",
            "x.float().log_softmax(dim=-1) gives log-probabilities; their exponential is the probability. The sum goes "
            "over the vocabulary, so that one number is left for each token.",
            "With ours and theirs the two log-softmaxes, every term is ours.exp() times their difference, ours first; "
            "sum(dim=-1).",
        ),
    ),
    Exercise(
        id="7.8",
        object="llmfromscratch.quantization.awq_scale",
        title="protect what is loud",
        points=3,
        minutes=20,
        check=calibration_checks.check_awq_scale,
        hints=(
            "Take one α first. What are the factors, what is rounded, and what has to happen to it after rounding, so "
            "that it may be compared with the weight as it came? Then put a loop around it.",
            "size is moments.diagonal().sqrt() where none is given; torch.where(size > 0, size, the smallest that is "
            "above 0) takes care of dead columns, and there may be none alive. For step from 0 to steps, both of them: "
            "size ** (step / steps), divided by the root of its largest times its smallest.",
            "quantize(weight * scale, bits, group).dequantize() / scale is what the product will see; "
            "output_error(weight, it, moments) is what it costs. Keep the factors with the smallest error, and only a "
            "smaller one replaces them.",
        ),
    ),
    Exercise(
        id="7.9",
        object="llmfromscratch.quantization.gptq",
        title="let the others make up for it",
        points=3,
        minutes=25,
        seconds=30,
        check=compensation_checks.check_gptq,
        hints=(
            "Write it without blocks and from left to right first: for each column, its codes, what rounding has lost, "
            "and what all columns after it are told. With two columns that see the same, the second gets all of it.",
            "Take the damped moments in float64, in the order of the columns; torch.cholesky_inverse of their "
            "torch.linalg.cholesky is their inverse, torch.linalg.cholesky(inverse, upper=True) the factor. Row "
            "`place` of it says what the columns from `place` on are told, and its own number there what the loss is "
            "divided by.",
            "column = order[place] names the column whose turn it is: it says which grid (column // group) and where "
            "the codes go, codes[:, column]. error = (left[:, place] - rounded) / factor[place, place]; then "
            "left[:, place:] -= error[:, None] * factor[place, place:]. A block tells those beyond it in "
            "one product at its end.",
        ),
    ),
    Exercise(
        id="7.10",
        object="llmfromscratch.quantization.key_frame",
        title="a frame for keys",
        points=1,
        minutes=6,
        check=frame_checks.check_key_frame,
        hints=(
            "One channel of one head had the keys 1, 2 and 6. Which number lies halfway between the ends, and how far "
            "is it from there to each end?",
            "The tokens are the first dimension: amax(dim=0) and amin(dim=0) of keys.float() are [kv_heads, head_dim].",
            "Half of the sum is the middle, half of the difference the spread; torch.where(spread == 0, 1, spread) for "
            "a channel that never changes.",
        ),
    ),
    Exercise(
        id="7.11",
        object="llmfromscratch.quantization.choose_bits",
        title="bits for a budget",
        points=2,
        minutes=15,
        check=damage_checks.check_choose_bits,
        hints=(
            "Do the worked example on paper, then with the first part ten times as large. What does a step cost, what "
            "does it win, and which steps may be taken at all?",
            "Begin with min(part) of each, and what that spends; raise ValueError if it is too much already. Then, in "
            "a loop: list every step of every part, to any of its larger numbers of bits, that fits and makes the "
            "damage smaller; end where the list is empty.",
            "A step costs sizes[part] * (bits - now), and what it wins is divided by that. max over tuples "
            "(rate, -part, bits) takes the first part of equals. Then add the cost to what is spent.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="7.a",
        title="wrong where it is square",
        story=quantization_clinic.AXIS_STORY,
        run=quantization_clinic.show_axis,
        broken=quantization_clinic.int8_product,
        check=quantization_clinic.check_axis,
    ),
    BugHunt(
        id="7.b",
        title="groups on one side of zero",
        story=quantization_clinic.ZERO_STORY,
        run=quantization_clinic.show_zero,
        broken=quantization_clinic.to_codes,
        check=quantization_clinic.check_zero,
    ),
    BugHunt(
        id="7.c",
        title="right while it is narrow",
        story=quantization_clinic.SUM_STORY,
        run=quantization_clinic.show_sum,
        broken=quantization_clinic.product_of_codes,
        check=quantization_clinic.check_sum,
    ),
    BugHunt(
        id="7.d",
        title="perfect on what it has seen",
        story=calibration_clinic.TEXT_STORY,
        run=calibration_clinic.show_text,
        broken=calibration_clinic.calibration_windows,
        check=calibration_clinic.check_text,
    ),
    BugHunt(
        id="7.e",
        title="small weights come back wrong",
        story=calibration_clinic.HALF_STORY,
        run=calibration_clinic.show_half,
        broken=calibration_clinic.dequantized,
        check=calibration_clinic.check_half,
    ),
]
