"""Profiles: events by hand add up as they must, counts against closed forms, slow parts are found where they are."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from llmfromscratch import LLM, SamplingParams, compiled_decode, compiled_layers, model, optimization, profile_events
from llmfromscratch.errors import RequestError
from llmfromscratch.machine_limits import Limits
from llmfromscratch.profile_events import KINDS, Sums, add_up, corrected, kind_of_module
from llmfromscratch.profiling import DECODE, PREFILL, Cost, Profile, StepProfile, profile, roofline
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.filterwarnings("error")
LIMITS = Limits(50e9, {"float32": 2e11, "bfloat16": 8e11}, "cpu, 2 threads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", device="cpu", layers="plain", attention="plain")


def event(name, start, end, thread=1, kernels=(), device="cpu"):
    """An event of torch's profiler; times in microseconds."""
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), thread=thread, device_type=device,
        kernels=[SimpleNamespace(duration=duration) for duration in kernels],
    )  # fmt: skip


def times(*events, end=100):
    """Kind -> microseconds of a step from 0 to `end`, without zeros."""
    sums = add_up([event("profile::step", 0, end), *events])
    assert sum(sums.seconds.values()) == pytest.approx(end / 1e6)
    return {kind: round(1e6 * seconds, 6) for kind, seconds in sums.seconds.items() if abs(seconds) > 1e-12}


# ---- adding up ---------------------------------------------------------------------------------------------------


def test_inside_a_hook_only_operations_count_and_the_rest_is_python():
    found = times(
        event("profile::products", 10, 50),
        event("aten::linear", 20, 40),
        event("aten::addmm", 25, 35),  # inside the one before: counted once
        event("aten::add", 60, 65),
    )
    assert found == {"products": 20, "other": 5, "Python": 75}


def test_the_innermost_label_decides():
    found = times(
        event("profile::attention", 10, 90),
        event("aten::mul", 12, 15),
        event("profile::products", 20, 40),
        event("aten::linear", 22, 38),
        event("aten::bmm", 50, 80),
    )
    assert found == {"attention": 33, "products": 16, "Python": 51}


def test_a_label_of_the_engines_own_without_operations_is_a_kernel_and_counts_as_a_whole():
    assert times(event("llm::product", 10, 50)) == {"products": 40, "Python": 60}
    with_operation = times(event("llm::norm", 10, 50), event("aten::pow", 12, 20), event("aten::mean", 20, 30))
    assert with_operation == {"norms": 18, "Python": 82}


def test_a_kernel_that_is_launched_among_operations_counts_too():
    found = times(
        event("llm::head", 10, 90),
        event("aten::empty", 12, 15),
        event("profile::kernel", 20, 80),
        event("aten::to", 82, 85),
    )
    assert found == {"head": 66, "Python": 34}


def test_a_compiled_graph_counts_as_a_whole_even_with_operations_in_it():
    assert times(event("llm::graph", 10, 90), event("aten::mm", 20, 30)) == {"graph": 80, "Python": 20}


def test_a_label_inside_a_kernel_takes_its_time_from_it():
    assert times(event("llm::graph", 10, 90), event("llm::norm", 20, 30)) == {"graph": 70, "norms": 10, "Python": 20}


def test_what_runs_in_other_threads_or_outside_the_step_is_not_counted():
    assert times(event("aten::add", 10, 20, thread=2), event("aten::add", 90, 110)) == {"Python": 100}


def test_on_an_accelerator_the_time_of_kernels_counts_and_not_that_of_launching_them():
    found = times(
        event("profile::products", 10, 30),
        event("aten::linear", 12, 20, kernels=[40]),
        event("llm::norm", 30, 35, kernels=[6, 4]),
        event("a kernel", 50, 90, device="cuda"),
    )
    assert found == {"products": 40, "norms": 10, "Python": 50}


def test_what_events_cost_is_taken_off_where_it_fell(monkeypatch):
    monkeypatch.setattr(
        profile_events, "event_prices", lambda: {"operation": 1e-6, "label": 4e-6, "hook": 6e-6}
    )  # fmt: skip
    sums = add_up([
        event("profile::step", 0, 100), event("profile::products", 10, 50), event("aten::linear", 20, 40),
        event("aten::addmm", 25, 35), event("aten::t", 36, 37),
    ])  # fmt: skip
    assert sums.costs == {("Python", "hook"): 1, ("Python", "operation"): 1, ("products", "operation"): 2}
    # 20 - 2 of the product and 80 - 6 - 1 of Python are left: 91, and 91 is what the step takes alone
    found = corrected(sums, 91e-6)
    assert {kind: round(1e6 * seconds, 6) for kind, seconds in found.items() if seconds} == {
        "products": 18, "Python": 73,
    }  # fmt: skip


def test_whatever_is_taken_off_the_kinds_add_up_to_the_step_and_none_is_below_zero(monkeypatch):
    monkeypatch.setattr(profile_events, "event_prices", lambda: {"operation": 1e-6, "label": 4e-6, "hook": 6e-6})
    sums = Sums({"norms": 5e-6, "products": 50e-6, "Python": 45e-6}, {("norms", "operation"): 9, ("Python", "hook"): 5})
    found = corrected(sums, 40e-6)
    assert sum(found.values()) == pytest.approx(40e-6)
    assert found["norms"] == 0
    assert found["products"] / found["Python"] == pytest.approx(50 / 15)
    # a compiled layer that took 30 when nobody watched: its stages share that out, and Python has the rest
    found = corrected(sums, 40e-6, {"_call": 30e-6})
    assert found == pytest.approx({"norms": 0, "products": 30e-6, "Python": 10e-6}, abs=1e-9)


def test_the_profiler_writes_nothing_to_stderr():
    code = "from llmfromscratch.profile_events import event_prices; print(sorted(event_prices()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("['hook', 'label', 'operation']", "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("layers.3.self_attn", "attention"), ("layers.3.self_attn.q_proj", "products"), ("layers.0.mlp", "products"),
     ("layers.0.self_attn.q_norm", "norms"), ("layers.0.input_layernorm", "norms"), ("norm", "norms"),
     ("lm_head", "head"), ("layers", None), ("embed_tokens", None), ("", None)],
)  # fmt: skip
def test_modules_are_known_by_their_canonical_names(name, kind):
    assert kind_of_module(name) == kind


# ---- whole profiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"layers": "plain", "attention": "plain"}, {"layers": "fused", "attention": "plain"}, {"kv_cache": "none"},
    {"layers": "plain", "attention": "compiled"}, {"layers": "compiled"}, {"speculative": "lookup"},
], ids=str)  # fmt: skip
def test_the_kinds_of_a_step_add_up_to_its_time(folder, settings):
    found = profile(LLM(folder, dtype="float32", device="cpu", **settings), prompt_tokens=20, steps=2)
    for step in (found.prefill, found.decode):
        assert sum(cost.seconds for cost in step.costs.values()) == pytest.approx(step.seconds)
        assert list(step.costs) == [kind for kind in KINDS if kind in step.costs]
        assert step.costs.keys() >= {"products", "attention", "norms", "head", "sampling", "other", "Python"}
        assert all(cost.seconds > 0 for cost in step.costs.values())
        assert step.watched > 0


def test_tokens_and_context_are_those_of_the_engines_batches(llm):
    found = profile(llm, prompt_tokens=20, context=30, streams=3, steps=2)
    assert (found.prefill.name, found.prefill.tokens, found.prefill.context) == (PREFILL, 60, 60)
    assert (found.decode.name, found.decode.tokens, found.decode.gained) == (DECODE, 3, 3)
    assert 93 <= found.decode.context <= 3 * 37
    assert found.decode.dtype == "float32"
    assert found.prefill.speed == pytest.approx(60 / found.prefill.seconds)
    assert found.decode.speed == pytest.approx(3 / found.decode.seconds)


def test_a_prompt_that_is_cut_into_chunks_is_profiled_whole(folder):
    cut = LLM(folder, dtype="float32", device="cpu", layers="plain", attention="plain", max_batch_tokens=8)
    found = profile(cut, prompt_tokens=20, steps=2).prefill
    assert (found.tokens, found.context) == (20, 20)
    one_pass = sum(weight.nbytes for name, weight in cut.model.named_parameters() if "_proj" in name)
    assert found.costs["products"].nbytes == 3 * one_pass


def test_the_bytes_of_a_decode_step_are_those_of_the_closed_form(llm):
    step = profile(llm, prompt_tokens=20, steps=2).decode
    counted = sum(step.costs[kind].nbytes for kind in ("products", "attention", "head"))
    assert counted == optimization.decode_bytes(llm.config, step.context, 4, 4)
    # each weight is multiplied and added once; of each key and value so is every component, for every query head
    config = llm.config
    weights = optimization.decode_bytes(config, 0, 1, 0)
    looked = config.num_layers * config.num_heads * config.head_dim * step.context
    assert sum(step.costs[kind].operations for kind in ("products", "attention", "head")) == 2 * weights + 4 * looked


def test_the_operations_of_a_prompt_count_the_pairs_that_see_each_other(llm):
    config, costs = llm.config, profile(llm, prompt_tokens=20, steps=2).prefill.costs
    pairs = sum(key <= query for query in range(20) for key in range(20))
    assert costs["attention"].operations == 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    assert costs["cache"].nbytes == 20 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    assert costs["head"].operations == 2 * config.vocab_size * config.hidden_size  # one row needs logits
    layer_norms, last = 2 * config.num_layers * 20 * config.hidden_size, config.hidden_size
    assert costs["norms"].operations == 4 * (layer_norms + last)
    assert costs["sampling"].nbytes == 4 * config.vocab_size


def work(seconds=0.004):
    """Products for so long."""
    size, end = torch.ones(200, 200), time.perf_counter() + seconds
    while time.perf_counter() < end:
        size @ size


@pytest.mark.parametrize(
    ("kind", "owner"),
    [("norms", "RMSNorm"), ("products", "FeedForward"), ("head", None), ("attention", "Attention"),
     ("other", "RotaryEmbedding")],
)  # fmt: skip
def test_a_slow_module_is_seen_in_the_kind_it_belongs_to(llm, monkeypatch, kind, owner):
    owner = getattr(model, owner) if owner else llm.model.lm_head  # by name: a class may have been loaded anew
    before = owner.forward
    monkeypatch.setattr(owner, "forward", lambda *given, **named: (work(), before(*given, **named))[1])
    # of 4 ms in at least one call a step; without, none takes half a millisecond
    assert profile(llm, prompt_tokens=8, steps=3).decode.costs[kind].seconds > 0.0015


def test_a_slow_cache_a_slow_rotation_and_a_slow_sampler_are_seen(llm, monkeypatch):
    slow = (("cache", llm.cache, "read"), ("cache", model, "rotate"), ("sampling", llm.sampler, "sample"))
    for kind, owner, method in slow:
        before = getattr(owner, method)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda *given, before=before: (work(), before(*given))[1])
            assert profile(llm, prompt_tokens=8, steps=3).decode.costs[kind].seconds > 0.0015


def test_time_in_which_nothing_is_computed_is_pythons(llm, monkeypatch):
    before = model.RMSNorm.forward
    monkeypatch.setattr(model.RMSNorm, "forward", lambda *given: (time.sleep(0.004), before(*given))[1])
    costs = profile(llm, prompt_tokens=8, steps=2).decode.costs
    assert costs["Python"].seconds > 7 * 0.004 > costs["norms"].seconds


def test_a_compiled_kernel_is_no_python(folder, monkeypatch):
    fast = LLM(folder, dtype="float32", device="cpu", layers="compiled")
    before = compiled_layers._call_all
    monkeypatch.setattr(compiled_layers, "_call_all", lambda *given: (time.sleep(0.02), before(*given))[1])
    costs = profile(fast, prompt_tokens=8, steps=2).decode.costs
    # all layers are one call, which computes (here: sleeps) where torch sees nothing
    inside = sum(costs[kind].seconds for kind in ("products", "attention", "norms", "cache"))
    assert inside > 0.02
    assert inside > 3 * costs["Python"].seconds


def test_the_slowdown_by_the_profiler_is_measured_and_said(llm):
    step = profile(llm, prompt_tokens=20, steps=3).decode
    assert step.slowdown == pytest.approx(step.watched / step.seconds - 1)
    text = str(StepProfile("decode step", step.costs, 0.02, 0.025, 1, 1, 128, "float32"))
    assert text.endswith("50 tokens/s; under the profiler the step takes 25 % longer, which is taken off")
    text = str(StepProfile("decode step", step.costs, 0.02, 0.0199, 1, 1, 128, "float32"))
    assert text.endswith("50 tokens/s; under the profiler the step takes no longer")


def test_a_profile_leaves_the_engine_as_it_was(llm):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    before, network = llm.generate([[5, 6, 7]], params)[0].token_ids, llm.core.model
    launch, rotate = compiled_decode.launch, model.rotate
    profile(llm, prompt_tokens=8, steps=2)
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == before
    assert llm.core.model is network is llm.model
    assert (compiled_decode.launch, model.rotate) == (launch, rotate)
    assert {"read", "write"}.isdisjoint(vars(llm.cache))
    for module in llm.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not llm.core.has_work


def test_a_step_that_fails_is_an_error_and_leaves_the_engine_as_it_was(llm, monkeypatch):
    def fails(*given):
        raise ArithmeticError("seven is missing")

    with monkeypatch.context() as patch:
        patch.setattr(model.FeedForward, "forward", fails)
        with pytest.raises(RequestError, match="a step that was to be profiled failed: .*seven is missing"):
            profile(llm, prompt_tokens=8, steps=2)
        patch.setattr(model.FeedForward, "forward", lambda *given: fails.missing)
        patch.setattr(model.RMSNorm, "forward", lambda *given: _raise(NotImplementedError()))
        with pytest.raises(NotImplementedError):
            profile(llm, prompt_tokens=8, steps=2)
    assert not llm.core.has_work
    assert not any(module._forward_hooks for module in llm.model.modules())
    assert profile(llm, prompt_tokens=8, steps=2).decode.tokens == 1


def _raise(error):
    raise error


def test_an_engine_at_work_is_not_profiled(llm):
    pieces = llm.stream([3, 4], SamplingParams(max_tokens=5, ignore_eos=True))
    next(pieces)
    with pytest.raises(RequestError, match="requests are in flight"):
        profile(llm)
    pieces.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0; it must be a whole number of at least 1"),
        ({"streams": True}, "streams is True"),
        ({"context": 2.5}, "context is 2.5"),
        ({"context": 94}, "the profile needs 110 tokens a request, and there is room for 96"),
    ],
)
def test_what_cannot_be_profiled_is_refused(llm, arguments, said):
    with pytest.raises(RequestError, match=said):
        profile(llm, **{"prompt_tokens": 8, **arguments})


# ---- tables and rooflines ----------------------------------------------------------------------------------------


def by_hand(name=DECODE, dtype="bfloat16", scale=1.0):
    costs = {
        "products": Cost(0.0125 * scale, 212e6, 0.212e9), "head": Cost(0.0025, 57e6, 57e6),
        "cache": Cost(0.0005, 24e3), "Python": Cost(0.0045),
    }  # fmt: skip
    seconds = sum(cost.seconds for cost in costs.values())
    return StepProfile(name, costs, seconds, 1.1 * seconds, 1, 1, 128, dtype, "2 threads")


def test_the_table_has_milliseconds_shares_bytes_and_rates():
    assert str(by_hand()).splitlines() == [
        "decode step, 1 token at 128 of context, bfloat16, 2 threads: 20.0 ms",
        "            ms  share     MB   GB/s  GFLOP  GFLOP/s",
        "products  12.5   62 %    212   17.0   0.21     17.0",
        "head       2.5   12 %   57.0   22.8  0.057     22.8",
        "cache      0.5    2 %  0.024  0.048",
        "Python     4.5   22 %",
        "all       20.0  100 %    269   13.5   0.27     13.5",
        "50 tokens/s; under the profiler the step takes 10 % longer, which is taken off",
    ]
    assert str(Profile(by_hand(PREFILL), by_hand())).count("\n\n") == 1


def test_the_roofline_holds_each_kind_against_memory_and_processor():
    dots = {dot.kind: dot for dot in roofline(by_hand(), LIMITS).dots}
    assert list(dots) == ["products", "head", "whole"]
    products = dots["products"]
    assert products.least == pytest.approx(212e6 / 50e9)
    assert products.bound == "memory"
    assert products.intensity == pytest.approx(1.0)
    assert products.speed == pytest.approx(0.212e9 / 0.0125)
    assert products.reached == pytest.approx(212e6 / 50e9 / 0.0125)
    assert dots["whole"].cost.seconds == pytest.approx(0.02)
    many = StepProfile(PREFILL, {"products": Cost(0.05, 212e6, 128 * 0.212e9)}, 0.05, 0.05, 128, 1, 128, "bfloat16")
    computing = roofline(many, LIMITS).dots[0]
    assert (computing.bound, computing.least) == ("computing", pytest.approx(128 * 0.212e9 / 8e11))


def test_the_roofline_is_a_table_too():
    assert str(roofline(by_hand(), LIMITS)).splitlines() == [
        "cpu, 2 threads: memory is read at 50 GB/s; products reach float32 200 GFLOP/s, bfloat16 800 GFLOP/s; "
        "in bfloat16, below 16 operations a byte memory is the limit",
        "                       ops/byte    ms  at least  reached  limited by",
        "decode step, products       1.0  12.5       4.2     34 %      memory",
        "decode step, head           1.0   2.5       1.1     46 %      memory",
        "decode step, whole          1.0  20.0       5.4     27 %      memory",
    ]


def test_a_roofline_takes_one_dtype_that_the_limits_know():
    with pytest.raises(ValueError, match="steps of one dtype, and these have bfloat16, float32"):
        roofline([by_hand(), by_hand(dtype="float32")], LIMITS)
    with pytest.raises(ValueError, match="the peak in float64 was not measured"):
        roofline(by_hand(dtype="float64"), LIMITS)
    both = roofline(Profile(by_hand(PREFILL), by_hand()), LIMITS)
    assert [dot.step for dot in both.dots] == [PREFILL] * 3 + [DECODE] * 3


@pytest.mark.model
def test_most_of_a_token_of_the_real_model_goes_into_its_products(smollm2_fp32):
    step = profile(smollm2_fp32, prompt_tokens=32, steps=2).decode
    assert step.costs["products"].nbytes == 106_168_320 * 4  # 30 layers of 3,538,944 weights
    assert step.costs["head"].nbytes == 49152 * 576 * 4
    assert sum(cost.seconds for cost in step.costs.values()) == pytest.approx(step.seconds)
    assert max(step.costs, key=lambda kind: step.costs[kind].seconds) == "products"
