"""Chapter 1's checks reject wrong solutions, and call the likely mistakes by their names."""

from __future__ import annotations

import inspect

import mutants
import pytest

# exercise: [(piece of the reference, what stands there instead, words of the diagnosis)]
MUTANTS: mutants.Mutants = {
    "1.1": [
        ("(8 + length + offset for", "(offset for", "count from the end of the header"),
        ("(8 + length + offset for", "(length + offset for", "8 bytes of the length are missing"),
        ("(8 + length + offset for", "(8 + offset for", "header's length is missing"),
        ('header.pop("__metadata__", None)', "pass", ""),
        ('tuple(entry["shape"])', 'entry["shape"]', "list"),
        ("begin, end)", "begin, end - begin)", "not its end"),
        ('"<Q", prefix', '">Q", prefix', ""),
        ("raise ValueError(f", "print(f", ""),
    ],
    "1.2": [
        ("packed & 15, packed >> 4", "packed >> 4, packed & 15", "halves of a byte are exchanged"),
        ("torch.cat([packed & 15, packed >> 4], dim=1)",
         "torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)", "16 places further"),
        ("+ minimum", "- minimum", "minimum is subtracted"),
        ("scale, minimum =", "minimum, scale =", "exchanged"),
        ("codes * scale + minimum", "(codes.float() - 8) * scale + minimum", "Q4_0"),
        ("codes * scale + minimum", "codes * scale", "minimum is missing"),
        ("codes * scale + minimum", "(codes + minimum) * scale", "sum is multiplied"),
        ("packed >> 4", "packed & 240", "masked"),
        (".float().split(1, dim=1)", ".split(1, dim=1)", "float16"),
        ("blocks.dtype != torch.uint8 or ", "", "CheckpointError"),
        ("raise CheckpointError(f", "print(f", ""),
    ],
    "1.3": [
        ("while prefix := next(", "if prefix := next(", "until none is left"),
        ("in LAYER_NAMES else name", "in LAYER_NAMES else None", "None"),
        ('("weight", "bias") else name', '("weight", "bias") else bare', "unchanged"),
        ('module, _, kind = bare.rpartition(".")', 'module, kind = bare.rsplit(".", 1)', "extra"),
        ("        return None\n", "        return name\n", "tables to ignore"),
        (".{kind}\" if part", ".weight\" if part", "bias"),
        ("bare = bare.removeprefix(prefix)", "break", "prefixes are left on"),
        ("layers.{index}.", "layers.0.", ""),
    ],
    "1.4": [
        ("num_heads, rows // num_heads // 2, 2,", "num_heads, 2, rows // num_heads // 2,", "way back"),
        ("num_heads, rows // num_heads // 2, 2,", "1, rows // 2, 2,", "one head"),
        ("pairs.transpose(1, 2)", "pairs", "no row has moved"),
        ("pairs.transpose(1, 2)", "pairs.flip(2).transpose(1, 2)", "halves are exchanged"),
        ("pairs.transpose(1, 2).reshape(weight.shape)", "pairs.transpose(1, 2)", "shape"),
        ("rows % (2 * num_heads)", "rows % num_heads", ""),
        ("raise CheckpointError(f", "print(f", ""),
    ],
    "1.5": [
        ('and not (tied and name == "lm_head.weight")', "", "tied head is no hole"),
        ('not (tied and name == "lm_head.weight")', 'name != "lm_head.weight"', "may not be absent"),
        ("tied = config.tie_word_embeddings", 'tied = "lm_head.weight" not in found', "from the config"),
        ("name for name in found if name not in expected", "name for name in () ", "left out of the report"),
        ("tuple(found[name]) != shape", "False", "shapes are not compared"),
        ("(name, tuple(found[name]), shape)", "(name, shape, tuple(found[name]))", "exchanged"),
        ("missing = tuple(name for name in expected if name not in found",
         "missing = tuple(name for name in sorted(expected) if name not in found", ""),
        ("unexpected = tuple(", "unexpected = list(", "list"),
        ("tied, probable_cause(missing, unexpected, wrong_shape, config)", 'tied, ""', "is given"),
        ("return KeyReport(missing, unexpected, wrong_shape, tied, ",
         "return (missing, unexpected, wrong_shape, tied, ",
         "KeyReport"),
    ],
    "1.6": [
        ("torch.rsqrt(mean_square + self.eps)", "1 / (torch.sqrt(mean_square) + self.eps)", "outside the root"),
        ("mean_square + self.eps", "mean_square", "epsilon is missing"),
        ("mean_square = wide", "wide = wide - wide.mean(dim=-1, keepdim=True)\n        mean_square = wide",
         "LayerNorm"),
        (".mean(dim=-1, keepdim=True)", ".sum(dim=-1, keepdim=True)", "summed"),
        (".mean(dim=-1, keepdim=True)", ".mean()", "all dimensions"),
        ("self.weight * ", "", "weight is missing"),
        (".to(x.dtype)", "", "bring the result back to the dtype of `x`"),
        ("torch.rsqrt(mean_square + self.eps)", "1 / (mean_square + self.eps)", "root is missing"),
        ("wide = x.to(torch.promote_types(x.dtype, torch.float32))", "wide = x", "float16"),
        ("self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)",
         "(self.weight * (wide * torch.rsqrt(mean_square + self.eps))).to(x.dtype)", "round first"),
    ],
    "1.7": [
        ("first, second = x.chunk(2, dim=-1)", "first, second = x[..., ::2], x[..., 1::2]", ""),
        ("first * cos - second * sin, second * cos + first * sin",
         "first * cos + second * sin, second * cos - first * sin", "the other way"),
        ("cos, sin = cos[:, None, :].to(x.dtype), sin", "sin, cos = cos[:, None, :].to(x.dtype), sin", "exchanged"),
        ("second * cos + first * sin], dim", "second], dim", "first half"),
        ("torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)", "x", "nothing is turned"),
        ("cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)", "cos[:, None, :], sin[:, None, :]", "dtype"),
        ("torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)",
         "torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)", ""),
    ],
    "1.8": [
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * F.silu(self.up_proj(x))", "gate and up"),
        ("F.silu(self.gate_proj(x))", "self.gate_proj(x).sigmoid()", "sigmoid alone"),
        ("F.silu(self.gate_proj(x))", "F.relu(self.gate_proj(x))", "ReLU"),
        ("F.silu(self.gate_proj(x))", "F.gelu(self.gate_proj(x))", "GELU"),
        ("F.silu(self.gate_proj(x)) *", "F.silu(self.gate_proj(x)) +", "added"),
        (" * self.up_proj(x)", "", "up is missing"),
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.silu(self.gate_proj(x) * self.up_proj(x))",
         "after the product"),
    ],
    "1.9": [
        ("x = x + self.self_attn", "x = self.self_attn", "attention's result replaces"),
        ("return x + self.mlp", "return self.mlp", "feed-forward's result replaces"),
        ("x = x + self.self_attn(", "y = x + self.self_attn(", ""),
        ("self.self_attn(self.input_layernorm(x),", "self.self_attn(x,", "attention reads the stream itself"),
        ("self.mlp(self.post_attention_layernorm(x))", "self.mlp(x)", "feed-forward reads the stream itself"),
        ("self.self_attn(self.input_layernorm(x),", "self.self_attn(self.post_attention_layernorm(x),", ""),
        ("cos, sin, batch, cache)\n", "sin, cos, batch, cache)\n", ""),
    ],
    "1.10": [
        ("[batch.logit_rows.to(self.norm.weight.device)]", "", "only batch.logit_rows"),
        ("x = self.norm(x.to(self.norm.weight.device)[", "x = (x.to(self.norm.weight.device)[", "norm before the head"),
        ("            x = layer(x, cos, sin, batch, cache)\n", "            pass\n", "layers are left out"),
        ("in self.layers:", "in self.layers[:-1]:", "last layer is left out"),
        ("return self.lm_head(x.to(self.lm_head.weight.device))",
         "return self.lm_head(x.to(self.lm_head.weight.device)).softmax(-1)", "probabilities"),
        ("batch.logit_rows.to(self.norm.weight.device)", "-1:", "one of its own"),
        ("self.rotary(batch.positions)", "self.rotary(torch.arange(len(batch.token_ids)))", "counted from 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("exercise_id", list(MUTANTS))
def test_the_reference_written_as_the_learners_own_passes(exercise_id):
    mutants.expect_pass(exercise_id)


@pytest.mark.parametrize(("exercise_id", "piece", "instead", "diagnosis"), mutants.cases_of(MUTANTS))
def test_a_mutant_is_rejected_with_the_right_diagnosis(exercise_id, piece, instead, diagnosis):
    mutants.expect_rejection(exercise_id, piece, instead, diagnosis)


@pytest.mark.parametrize("exercise_id", list(MUTANTS))
def test_the_engines_own_object_and_a_call_of_it_are_refused(exercise_id):
    mutants.expect_refusal_of_the_engines_own(exercise_id)


@pytest.mark.parametrize("exercise_id", list(MUTANTS))
def test_a_blank_is_not_yet_written(exercise_id):
    is_class = inspect.isclass(mutants.written(exercise_id, mutants.code_of(exercise_id)))
    mutants.expect_not_yet_written(exercise_id, ["forward"] if is_class else None)


def test_every_exercise_of_the_chapter_has_at_least_five_mutants():
    mutants.expect_enough(1, MUTANTS)
