"""What quantization costs, in numbers: against transformers' logits and straight loops; and who is on the frontier."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import SHAPES, VOCAB, all_logits, ours, random_ids, save_tiny, tiny_model, transformers_model

from llmfromscratch import LLM, evaluation, kv_cache, quantization, quiz, scoring
from llmfromscratch.errors import RequestError, TokenizerError
from llmfromscratch.evaluation import Frontier, Reference, Table, Variant, damage, frontier, perplexity, windows
from llmfromscratch.sensitivity import PRODUCTS, sensitivity

TEXT = random_ids(70, 3)
CACHES = ("paged", "static", "concat", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def tied_model(tied: bool = True):
    """As a checkpoint is loaded: a tied head is the embedding's own memory."""
    network = tiny_model(dtype=torch.float32, tie_word_embeddings=tied)
    if tied:
        network.lm_head.weight = network.embed_tokens.weight
    return network


def llm_of(folder, **options) -> LLM:
    room = {"kv_cache_memory": 4_000_000} if options.get("kv_cache", "paged") in ("paged", "static") else {}
    return LLM(folder, dtype="float32", **room, **options)


def damaged(network, amount: float = 0.05):
    """The same network with a little noise in its weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.layers.parameters():
            weight.add_(amount * torch.randn(weight.shape, generator=generator).to(weight))
    return network


def transformers_logs(network, ids) -> torch.Tensor:
    with torch.inference_mode():
        return network(input_ids=torch.tensor([list(ids)])).logits[0].double().log_softmax(dim=-1)


# ---- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "size", "stride"), [(70, 16, 8), (70, 16, 5), (64, 16, 16), (65, 16, 16), (9, 16, 4)]
)
def test_every_token_that_can_be_predicted_counts_once_and_has_context(length, size, stride):
    ids = list(range(length))
    found = windows(ids, size, stride)
    counted = [token for each in found for token in each.ids[each.first :]]
    lost = set(range(0, length, stride)) if stride == size else {0}  # nothing in its window predicts a first token
    assert counted == [token for token in ids if token not in lost]
    for place, each in enumerate(found):
        assert each.ids == tuple(ids[place * stride : place * stride + size])
        assert each.first >= (1 if place == 0 else max(1, size - stride))


@pytest.mark.parametrize("sizes", [(1, 1), (16, 0), (16, 17), (2.5, 1), (16, "8")])
def test_sizes_that_cannot_be_meant_are_refused(sizes):
    with pytest.raises(RequestError, match="a size is at least 2, a stride 1 to size"):
        windows(TEXT, *sizes)


@pytest.mark.parametrize("ids", [[], [4]])
def test_a_text_too_short_gets_a_sentence(ids):
    with pytest.raises(RequestError, match=f"the text has {len(ids)} tokens; nothing predicts the first"):
        windows(ids)
    with pytest.raises(RequestError, match="give at least 2"):
        perplexity(tiny_model(), ids)


# ---- perplexity --------------------------------------------------------------------------------------------------


def looped_perplexity(network, size: int, stride: int) -> float:
    """Each token from the window in which it is new, read by transformers; one window after the other, by hand."""
    surprises, done = [], 1
    for start in range(0, len(TEXT), stride):
        part = TEXT[start : start + size]
        logs = transformers_logs(network, part)
        for place in range(1, len(part)):
            if start + place >= done:
                surprises.append(-float(logs[place - 1, part[place]]))
                done = start + place + 1
        if start + size >= len(TEXT):
            break
    return math.exp(sum(surprises) / len(surprises))


@pytest.mark.parametrize("shape", SHAPES)
def test_sliding_perplexity_is_that_of_transformers_window_by_window(shape):
    network = transformers_model(shape)
    for size, stride in ((16, 8), (20, 7), (70, 35)):
        assert perplexity(ours(network), TEXT, size, stride) == pytest.approx(
            looped_perplexity(network, size, stride), rel=1e-4
        )


def test_in_one_window_it_is_the_perplexity_that_an_engine_reports(folder):
    network = tiny_model(dtype=torch.float32)
    assert perplexity(network, TEXT) == pytest.approx(scoring.perplexity(scoring.prompt_logprobs(network, TEXT)))
    llm, text = llm_of(folder), "Some bytes of text, and more of them: 012345."
    assert perplexity(llm, text) == pytest.approx(llm.perplexity(text), rel=1e-5)


def test_more_context_changes_the_number():
    assert len({round(perplexity(tiny_model(), TEXT, 16, stride), 6) for stride in (1, 8, 16)}) == 3


def test_a_model_that_knows_nothing_is_surprised_as_by_its_vocabulary():
    network = tiny_model()
    network.lm_head.weight = torch.nn.Parameter(torch.zeros_like(network.lm_head.weight))
    assert perplexity(network, TEXT) == pytest.approx(VOCAB)


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_damage_is_what_transformers_logits_say(shape):
    one, other = transformers_model(shape), transformers_model(shape)
    mine = damaged(ours(other))
    other.load_state_dict({f"{'' if name == 'lm_head.weight' else 'model.'}{name}": weight
                           for name, weight in mine.state_dict().items()})  # fmt: skip
    p, q = transformers_logs(one, TEXT)[:-1], transformers_logs(other, TEXT)[:-1]
    targets = torch.tensor(TEXT[1:])[:, None]
    found = damage(ours(one), mine, TEXT)
    assert found.tokens == len(TEXT) - 1
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0 < found.top1 < 1
    assert found.reference_perplexity == pytest.approx(math.exp(-float(p.gather(1, targets).mean())), rel=1e-4)
    assert found.perplexity == pytest.approx(math.exp(-float(q.gather(1, targets).mean())), rel=1e-4)
    assert found.ratio == pytest.approx(found.perplexity / found.reference_perplexity)


def test_the_direction_is_from_the_reference_to_the_other():
    one, other = tiny_model(), damaged(tiny_model(), 0.2)
    assert damage(one, other, TEXT).kl != pytest.approx(damage(other, one, TEXT).kl, rel=1e-2)


def test_a_kept_reference_says_the_same_and_needs_its_model_no_more():
    one, other = tiny_model(), damaged(tiny_model(), 0.02)
    expected = damage(one, other, TEXT, 16, 8)
    kept = Reference(one, TEXT, 16, 8)
    damaged(one, 5.0)
    found = damage(kept, other)
    assert found.kl == pytest.approx(expected.kl, abs=1e-5)
    assert (found.top1, found.perplexity, found.tokens) == (expected.top1, pytest.approx(expected.perplexity), 69)
    assert found.reference_perplexity == pytest.approx(expected.reference_perplexity) == pytest.approx(kept.perplexity)
    assert (kept.tokens, kept.nbytes) == (69, 69 * VOCAB * 2)


def test_nothing_is_damaged_by_nothing():
    found = damage(tiny_model(), tiny_model(), TEXT)
    assert (found.kl, found.top1, found.ratio) == (pytest.approx(0, abs=1e-6), 1.0, 1.0)
    assert str(found).endswith("over 69 tokens")


def test_rows_of_a_tensor_are_windows():
    one, other = tiny_model(), damaged(tiny_model())
    rows = torch.tensor(TEXT).view(5, 14)
    each = [damage(one, other, row.tolist()) for row in rows]
    found = damage(one, other, rows)
    assert found.tokens == 5 * 13
    assert found.kl == pytest.approx(sum(one.kl for one in each) / 5)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("layers", ["plain", "fused"])
def test_an_engine_of_any_parts_reads_as_its_network_does(folder, kind, layers):
    llm, plain = llm_of(folder, kv_cache=kind, layers=layers), llm_of(folder, kv_cache="none", layers="plain")
    found = damage(plain.model, llm, TEXT, 32, 16)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.top1 == 1.0
    assert damage(plain, llm, TEXT, 32, 16).kl == pytest.approx(0, abs=1e-6)
    assert damage(llm, llm, TEXT).kl == 0  # the same engine on both sides waits for nobody


def test_what_the_cache_rounds_is_damage(folder, monkeypatch):
    llm, write = llm_of(folder), kv_cache.PagedKVCache.write
    before = damage(llm.model, llm, TEXT).kl
    monkeypatch.setattr(
        kv_cache.PagedKVCache, "write",
        lambda self, layer, keys, values, batch: write(self, layer, keys.round(), values.round(), batch),
    )  # fmt: skip
    plain = llm_of(folder, layers="plain", attention="plain")
    assert damage(llm.model, plain, TEXT).kl > before + 0.01


@pytest.mark.parametrize("kind", ["paged", "static"])
def test_reading_leaves_the_cache_as_it_was(folder, kind):
    llm = llm_of(folder, kv_cache=kind)
    answer = llm.generate("Once upon", None)[0].token_ids
    free = llm.cache.num_free_blocks if kind == "paged" else len(llm.cache.free_rows)
    kept = len(llm.cache.index.blocks) if kind == "paged" else 0
    perplexity(llm, TEXT, 32, 8)
    quiz.accuracy(llm, quiz.QUESTIONS[:2])
    assert free == (llm.cache.num_free_blocks if kind == "paged" else len(llm.cache.free_rows))
    assert kept == (len(llm.cache.index.blocks) if kind == "paged" else 0)  # no prefixes of texts that nobody asked
    assert getattr(llm.cache, "prefix_sharing", True)
    assert llm.generate("Once upon", None)[0].token_ids == answer


def test_memory_holds_the_logits_of_one_window(monkeypatch):
    held = []
    original = evaluation.logits_of

    def watched(side, window):
        logits = original(side, window)
        held.append(logits.shape[0])
        return logits

    monkeypatch.setattr(evaluation, "logits_of", watched)
    damage(tiny_model(), tiny_model(), TEXT, 16, 8)
    assert max(held) == 15
    assert sum(held) == 2 * 69


def test_a_learners_divergence_is_the_one_that_counts(monkeypatch):
    monkeypatch.setattr(quantization, "divergence", lambda logits, other: torch.full((len(logits),), 0.25))
    assert damage(tiny_model(), tiny_model(), TEXT).kl == 0.25


def test_what_cannot_be_compared_gets_a_sentence(folder):
    one = tiny_model()
    with pytest.raises(RequestError, match="give a text, unless the reference is a Reference"):
        damage(one, one)
    with pytest.raises(RequestError, match="give a text, unless the reference is a Reference"):
        damage(Reference(one, TEXT), one, TEXT)
    with pytest.raises(RequestError, match="the reference has 97 tokens to choose from, the other 259"):
        damage(one, llm_of(folder), TEXT)
    with pytest.raises(RequestError, match="longer than the context, 96"):
        perplexity(one, random_ids(200), 128)
    with pytest.raises(RequestError, match="the text holds 97"):
        perplexity(one, [97, 3])
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        perplexity(one, "a text")
    one.norm.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN or infinite"):
        perplexity(one, TEXT)


# ---- sensitivity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_each_part_is_rounded_alone_and_put_back(tied):
    network = tied_model(tied)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    found = sensitivity(network, TEXT, bits=(4, 2))
    names = [f"layers.{layer}.{part}" for layer in range(3) for part in PRODUCTS]
    assert list(found.damage) == [*names, "embed_tokens", *([] if tied else ["lm_head"])]
    assert found.sizes["layers.0.mlp.up_proj"] == 40 * 36
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert (network.embed_tokens.weight is network.lm_head.weight) == tied
    for name in ("layers.0.self_attn.k_proj", "layers.2.mlp.down_proj", *list(found.damage)[21:]):
        for bits in (4, 2):
            other = tied_model(tied)
            weight = other.get_submodule(name).weight
            rounded = quantization.quantize(weight.detach(), bits, 32).dequantize()
            holders = [name] if not tied or name != "embed_tokens" else [name, "lm_head"]
            for holder in holders:
                other.get_submodule(holder).weight = torch.nn.Parameter(rounded)
            assert found.damage[name][bits] == pytest.approx(damage(network, other, TEXT).kl, rel=1e-3, abs=1e-7), name


def test_eight_bits_are_symmetric_rows():
    network, other = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    name = "layers.1.mlp.gate_proj"
    weight = other.get_submodule(name).weight
    weight.data = quantization.quantize(weight.detach(), 8, None, symmetric=True).dequantize()
    found = sensitivity(network, TEXT, bits=(8,), parts=("mlp.gate_proj",))
    assert len(found.damage) == 3
    assert found.damage[name][8] == pytest.approx(damage(network, other, TEXT).kl, rel=0.02, abs=1e-7)


def test_it_is_what_bits_are_chosen_by():
    found = sensitivity(tiny_model(dtype=torch.float32), TEXT, bits=(16, 8, 3))
    sizes = list(found.sizes.values())
    chosen = quantization.choose_bits(list(found.damage.values()), sizes, 5 * sum(sizes))
    assert {3, 8} <= set(chosen) <= {3, 8, 16}
    assert all(each[16] == 0 for each in found.damage.values())
    assert sum(size * bits for size, bits in zip(sizes, chosen, strict=True)) <= 5 * sum(sizes)
    assert found.bits == (16, 8, 3)
    (worst, kl), *_ = found.worst(3)
    assert kl == max(each[3] for each in found.damage.values())
    assert f"most of it {worst} {kl:.4f}" in str(found)


def test_what_cannot_be_tried_gets_a_sentence(folder):
    with pytest.raises(RequestError, match="parts are \\['attention'\\]; choose some of self_attn.q_proj"):
        sensitivity(tiny_model(), TEXT, parts=("attention",))
    for bits in ((), (1,), (9,), (4.0,)):
        with pytest.raises(RequestError, match="give whole numbers from 2 to 8, or 16"):
            sensitivity(tiny_model(), TEXT, bits=bits)
    network = tiny_model()
    network.layers[1].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(RequestError, match="layers.1.mlp.up_proj has no float weight"):
        sensitivity(network, TEXT)


# ---- the quiz ----------------------------------------------------------------------------------------------------

ASKED = quiz.Question("What is 1 + 1?", ("3", "two", "10", "a quarter of a dozen"), 1)


def mean_log_probability(network, start: str, answer: str, encode) -> float:
    ids, begin = encode(start + answer), len(encode(start))
    logs = all_logits(network, ids).double().log_softmax(dim=-1)
    return sum(float(logs[place - 1, ids[place]]) for place in range(begin, len(ids))) / (len(ids) - begin)


@pytest.mark.parametrize("kind", CACHES)
def test_an_answers_score_is_its_mean_log_probability(folder, kind):
    llm = llm_of(folder, kv_cache=kind, **({"max_requests": 2} if kind == "static" else {}))
    plain = llm_of(folder, kv_cache="none", layers="plain")
    found = quiz.accuracy(llm, [ASKED, quiz.Question("Sure?", ("yes", "no"))])
    for place, answer in enumerate(ASKED.answers):
        expected = mean_log_probability(
            plain.model, "Question: What is 1 + 1?\nAnswer:", f" {answer}", plain.tokenizer.encode
        )
        assert found.scores[0][place] == pytest.approx(expected, abs=1e-4)
    assert found.chosen[0] == max(range(4), key=lambda place: found.scores[0][place])
    assert found.right == tuple(place == right for place, right in zip(found.chosen, (1, 0), strict=True))
    assert found.share == sum(found.right) / 2
    assert str(found).splitlines()[0] == f"{sum(found.right)} of 2 right ({found.share:.0%})"


def test_a_letter_that_joins_the_answer_to_the_question_counts_as_the_answers():
    assert quiz._common([5, 6, 7], [5, 6, 7, 8]) == 3
    assert quiz._common([5, 6, 7], [5, 6, 9, 8]) == 2  # a token that spans both
    assert quiz._common([5, 6], [5, 6]) == 1  # something must be left to score


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("What?", "give quiz.Question"),
        (quiz.Question(" ", ("a", "b")), "its text is ' '"),
        (quiz.Question("Who?", ("a",)), "at least 2, all different"),
        (quiz.Question("Who?", ("a", "a")), "at least 2, all different"),
        (quiz.Question("Who?", ("a", "")), "none of them empty"),
        (quiz.Question("Who?", "ab"), "give texts"),
        (quiz.Question("Who?", ("a", "b"), 2), "the place of the right answer, 0 to 1"),
        (quiz.Question("Who?", ("a", "b"), "a"), "the place of the right answer, 0 to 1"),
    ],
)
def test_a_question_that_cannot_be_asked_gets_a_sentence(folder, question, said):
    with pytest.raises(RequestError, match="question 2 cannot be asked") as refused:
        quiz.accuracy(llm_of(folder), [ASKED, question])
    assert said in str(refused.value)


def test_no_questions_are_no_quiz(folder):
    with pytest.raises(RequestError, match="there are no questions"):
        quiz.accuracy(llm_of(folder), [])


def test_forty_questions_are_sound_and_the_right_answers_stand_everywhere_equally():
    assert len({each.text for each in quiz.QUESTIONS}) == 40
    for each in quiz.QUESTIONS:
        assert len(set(each.answers)) == 4
    assert [sum(each.right == place for each in quiz.QUESTIONS) for place in range(4)] == [10] * 4


@pytest.mark.model
def test_the_real_model_knows_far_more_than_a_guess(smollm2_fp32):
    found = quiz.accuracy(smollm2_fp32)
    assert 0.55 <= found.share <= 0.8, str(found)


# ---- variants ----------------------------------------------------------------------------------------------------

FOUR = [
    Variant("bf16", 269_000_000, 150.0, 0.0, 1.0, 29.0, 0.75),
    Variant("int8", 135_000_000, 250.0, 0.003, 0.97, 29.1, 0.75),
    Variant("int4", 84_000_000, 260.0, 0.26, 0.8, 36.0, 0.7),
    Variant("awq", 84_000_000, 255.0, 0.08, 0.9, 31.0, None),
]


def test_dominated_is_who_has_somebody_no_worse_in_both_and_better_in_one():
    assert frontier(FOUR) == Frontier(
        {"bf16": None, "int8": None, "int4": "awq", "awq": None},
        {"bf16": None, "int8": None, "int4": None, "awq": None},
    )
    twins = [Variant("a", 5, 1.0, 0.1), Variant("b", 5, 1.0, 0.1), Variant("c", 6, 0.5, 0.1)]
    assert frontier(twins).by_size == {"a": None, "b": None, "c": "a"}
    assert frontier(twins).by_speed == {"a": None, "b": None, "c": "a"}
    assert frontier([Variant("a", 5), Variant("b", 5, None, 0.1)]) == Frontier({"b": None}, {})


def test_the_frontier_is_what_pairwise_comparison_leaves():
    dice = torch.Generator().manual_seed(0)
    points = [(str(i), *torch.randint(6, (2,), generator=dice).tolist()) for i in range(40)]
    left = set()
    for name, cost, harm in points:
        better = [(c, h) for _, c, h in points if (cost >= c and harm > h) or (cost > c and harm >= h)]
        left |= set() if better else {name}
    found = evaluation.dominated(points)
    assert {name for name, above in found.items() if above is None} == left
    assert all(above in left for above in found.values() if above is not None)


def test_a_table_says_it_in_text_and_in_markdown():
    assert str(Table(FOUR)).splitlines() == [
        "variant     MB  of first  tok/s      KL   top-1  perplexity  quiz  dominated by",
        "bf16     269.0      100%    150       0  100.0%       29.00   75%",
        "int8     135.0       50%    250  0.0030   97.0%       29.10   75%",
        "int4      84.0       31%    260    0.26   80.0%       36.00   70%  size: awq",
        "awq       84.0       31%    255  0.0800   90.0%       31.00     –",
    ]
    lines = Table(FOUR)._repr_markdown_().splitlines()
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    assert lines[4] == "| int4 | 84.0 | 31% | 260 | 0.26 | 80.0% | 36.00 | 70% | size: awq |"
    with pytest.raises(RequestError, match="several variants are called 'bf16'"):
        Table([FOUR[0], FOUR[0]])


def test_a_table_leaves_out_what_nobody_measured_and_says_by_whom_a_variant_is_beaten_in_what():
    table = Table([Variant("large", 100, 50, 0.1), Variant("slow, small", 40, 10, 0.01), Variant("fast", 90, 90, 0.1)])
    assert str(table).splitlines() == [
        "variant       MB  of first  tok/s      KL  dominated by",
        "large        0.0      100%     50     0.1  size: slow, small; speed: fast",
        "slow, small  0.0       40%     10  0.0100",
        "fast         0.0       90%     90     0.1  size: slow, small",
    ]
    assert table._repr_markdown_().splitlines()[1] == "| --- | ---: | ---: | ---: | ---: | --- |"


def test_weights_that_share_memory_count_once():
    network = tied_model()
    expected = 4 * sum(weight.numel() for name, weight in network.state_dict().items() if name != "lm_head.weight")
    assert evaluation.weight_bytes(network) == expected
    network.register_buffer("view", network.embed_tokens.weight.detach()[3:9])
    assert evaluation.weight_bytes(network) == expected
    network.register_buffer("own", torch.zeros(10, dtype=torch.uint8))
    assert evaluation.weight_bytes(network) == expected + 10


def test_a_variant_is_measured_in_all_columns(folder):
    llm = llm_of(folder)
    found = evaluation.measure("same", llm, Reference(llm, TEXT), [ASKED], tokens=8)
    assert (found.name, found.bytes) == ("same", evaluation.weight_bytes(llm.model))
    assert found.kl == pytest.approx(0, abs=1e-5)
    assert found.top1 == 1
    assert found.tokens_per_second > 0
    assert found.quiz in (0.0, 1.0)
    assert evaluation.measure("fast", llm, Reference(llm, TEXT), None, 0) == Variant(
        "fast", found.bytes, None, found.kl, 1.0, found.perplexity, None
    )
    with pytest.raises(RequestError, match="at least 2, not 1"):
        evaluation.measure_speed(llm, tokens=1)
