"""Chapter 1, loading: its exercises and bug hunts."""

from __future__ import annotations

from llmfromscratch.course.exercise import BugHunt, Exercise
from llmfromscratch.course.exercises import loading_checks, loading_clinic, model_checks

EXERCISES = [
    Exercise(
        id="1.1",
        object="llmfromscratch.course.sketches.ch01.read_safetensors_header",
        title="read a safetensors header",
        points=2,
        minutes=10,
        check=loading_checks.check_header,
        hints=(
            'The first 8 bytes are a number: struct.unpack("<Q", eight_bytes) gives a tuple with it.',
            "Read exactly that many bytes next, decode them as UTF-8, and parse with json.loads. Compare 8 + length "
            "with the file's size before you trust it.",
            'For each entry but "__metadata__", add 8 + length to both numbers of entry["data_offsets"].',
        ),
    ),
    Exercise(
        id="1.2",
        object="llmfromscratch.loading.dequantize_q4_1",
        title="dequantize a Q4_1 block",
        points=3,
        minutes=15,
        check=loading_checks.check_q4_1,
        hints=(
            "Four steps: refuse what is not uint8 [n, 20]; read two float16 from the first four bytes; split the other "
            "sixteen into low and high halves; multiply and add.",
            "blocks[:, :4].contiguous().view(torch.float16) is [n, 2]: scale and minimum. `packed & 15` is the low "
            "half of every byte, `packed >> 4` the high one.",
            "torch.cat([low, high], dim=1) has the 32 codes in order; [n, 32] * [n, 1] + [n, 1] broadcasts over a row.",
        ),
    ),
    Exercise(
        id="1.3",
        object="llmfromscratch.loading.canonical_name",
        title="one name for each tensor",
        points=3,
        minutes=15,
        check=loading_checks.check_names,
        hints=(
            "In this order: is it a table to ignore? Then take off prefixes while there is one. Is it part of a layer? "
            "Is it one of the names outside the layers? Else return the name as it came.",
            "LAYER_PATTERN.fullmatch(bare).groups() gives (index, part, kind), and LAYER_NAMES translates the part.",
            'Outside the layers, bare.rpartition(".") separates the module from "weight" or "bias"; keep the original '
            "`name` in a variable of its own, since strangers must come back unchanged.",
        ),
    ),
    Exercise(
        id="1.4",
        object="llmfromscratch.loading.unpermute",
        title="undo the permutation",
        points=3,
        minutes=15,
        check=loading_checks.check_unpermute,
        hints=(
            "See the rows as a table with three indices: head, pair, and which of the two.",
            "The interleaved order is (head, pair, which of the two); the half-split order is (head, which, pair).",
            "weight.reshape(num_heads, pairs, 2, ...) then transpose(1, 2), then back to the old shape.",
        ),
    ),
    Exercise(
        id="1.5",
        object="llmfromscratch.loading.check_keys",
        title="the key report",
        points=3,
        minutes=15,
        check=loading_checks.check_key_report,
        hints=(
            "expected_shapes(config) gives all names; each of the three lists is one walk over names.",
            'Missing: expected but not found, except "lm_head.weight" where config.tie_word_embeddings holds. '
            "Wrong shape: in both, and tuple(found[name]) differs.",
            "wrong_shape holds (name, found, expected). Build three tuples, then KeyReport(missing, unexpected, "
            "wrong_shape, tied, probable_cause(missing, unexpected, wrong_shape, config)).",
        ),
    ),
    Exercise(
        id="1.6",
        object="llmfromscratch.model.RMSNorm",
        title="RMSNorm",
        points=2,
        minutes=8,
        check=model_checks.check_rms_norm,
        hints=(
            "The mean runs over the last dimension and keeps it, so that it broadcasts: mean(dim=-1, keepdim=True).",
            "torch.rsqrt(mean_square + self.eps) is one over the root; epsilon goes in before the root is taken.",
            "Make x float32 first where it is half precision (torch.promote_types(x.dtype, torch.float32) leaves "
            "float64 alone), and go back with .to(x.dtype) before you multiply with self.weight.",
        ),
    ),
    Exercise(
        id="1.7",
        object="llmfromscratch.model.rotate",
        title="rotary embedding",
        points=3,
        minutes=12,
        check=model_checks.check_rotate,
        hints=(
            "Cut every head into its two halves: x.chunk(2, dim=-1) gives `first` and `second`.",
            "cos and sin are [tokens, pairs], x is [tokens, heads, head_dim]: cos[:, None, :] fits every head.",
            "The new halves stand in the docstring; torch.cat joins them again. Bring cos and sin to x.dtype.",
        ),
    ),
    Exercise(
        id="1.8",
        object="llmfromscratch.model.FeedForward",
        title="the SwiGLU feed-forward layer",
        points=2,
        minutes=5,
        check=model_checks.check_feed_forward,
        hints=(
            "All three projections are there as self.gate_proj, self.up_proj and self.down_proj; call them.",
            "F.silu(z) is z * sigmoid(z); it belongs to the gate alone.",
            "Multiply the activated gate with up, number by number, and send the product through down.",
        ),
    ),
    Exercise(
        id="1.9",
        object="llmfromscratch.model.DecoderLayer",
        title="one decoder layer",
        points=3,
        minutes=10,
        check=model_checks.check_decoder_layer,
        seconds=60.0,
        hints=(
            "Two lines, one for each half of the layer: new stream = stream + part(norm(stream)).",
            "self.self_attn takes the normalized stream and then cos, sin, batch, cache, in this order.",
            "The second half starts from the result of the first: it normalizes and adds to *that*.",
        ),
    ),
    Exercise(
        id="1.10",
        object="llmfromscratch.model.Model",
        title="the whole model",
        points=4,
        minutes=15,
        check=model_checks.check_model,
        seconds=60.0,
        hints=(
            "In order: embed batch.token_ids; cos, sin from self.rotary(batch.positions); every layer of self.layers; "
            "pick rows; self.norm; self.lm_head.",
            "x[batch.logit_rows] picks the rows that need logits. The norm works row by row, so picking first is right "
            "and cheaper.",
            "device = next(layer.parameters()).device says where a layer lies; move x, cos and sin there before it.",
        ),
    ),
]

CLINIC = [
    BugHunt(
        id="1.a",
        title="fluent nonsense",
        story=loading_clinic.NONSENSE_STORY,
        run=loading_clinic.show_nonsense,
        broken=loading_clinic.settle_rows,
        check=loading_clinic.check_settle_rows,
        seconds=30.0,
    ),
    BugHunt(
        id="1.b",
        title="the norm that is right nearly everywhere",
        story=loading_clinic.NORM_STORY,
        run=loading_clinic.show_norm,
        broken=loading_clinic.normalize,
        check=loading_clinic.check_normalize,
    ),
    BugHunt(
        id="1.c",
        title="a prefix that swallows half the names",
        story=loading_clinic.PREFIX_STORY,
        run=loading_clinic.show_prefix,
        broken=loading_clinic.without_prefix,
        check=loading_clinic.check_without_prefix,
    ),
]
