"""The placement planner: its sums against closed forms, and plans that are wrong are shown to be."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from llmfromscratch import loading
from llmfromscratch.errors import CheckpointError
from llmfromscratch.placement import Placement
from llmfromscratch.widgets import draw_placement, placement_planner
from llmfromscratch.widgets.placement_review import PRESETS, in_words, module_parameters, review

SMALL = PRESETS["SmolLM2 135M"]
BUDGETS = {"GPU 0": 8e9, "GPU 1": 4e9, "CPU": 16e9}


def published_parameters(config):
    """Counted from the config by the textbook formula, not from a list of tensors."""
    width, ffn, heads, kv, size = (
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim,
    )  # fmt: skip
    layer = 2 * width * heads * size + 2 * width * kv * size + 3 * width * ffn + 2 * width
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * width + config.num_layers * layer + width


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("SmolLM2 135M", 134_515_008), ("Llama 2 7B", 6_738_415_616), ("Llama 2 70B", 68_976_648_192)],
)
def test_the_presets_have_the_published_numbers_of_parameters(name, parameters):
    config = PRESETS[name]
    assert published_parameters(config) == parameters
    assert sum(review(config, "int8", BUDGETS, place=lambda *_: {}).parameters.values()) == parameters


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 4)])
def test_the_bars_drawn_are_as_long_as_the_weights_are_big(dtype, bits):
    config = PRESETS["Llama 2 7B"]
    figure = draw_placement(config, dtype, {"A": 20e9, "B": 20e9})
    modules = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_zorder() == 2]
    # once in the bar of what is to be placed, once on its device
    assert sum(patch.get_width() for patch in modules) == pytest.approx(2 * published_parameters(config) * bits / 8)
    assert len(modules) == 2 * (32 + 3)


def test_what_is_used_and_left_adds_up_to_every_budget():
    plan = review(PRESETS["Llama 2 7B"], "bfloat16", BUDGETS)
    assert sum(plan.used(device) for device in BUDGETS) == plan.total == 2 * 6_738_415_616
    assert all(plan.used(device) + plan.left(device) == size for device, size in BUDGETS.items())
    assert all(plan.left(device) >= 0 for device in BUDGETS)
    assert plan.problems == []
    assert [module for modules in plan.where.values() for module in modules] == list(plan.sizes)


def test_the_text_gives_devices_layers_and_crossings():
    lines = placement_planner().text().splitlines()
    assert lines == [
        "Llama 2 7B: 6.74 billion parameters in bfloat16 are 13.5 GB of weights",
        "GPU 0: 8.0 GB of 8.0 GB used, 47.3 MB left: embedding, layers 0 to 18",
        "GPU 1: 3.6 GB of 4.0 GB used, 357.1 MB left: layers 19 to 27",
        "CPU: 1.9 GB of 16.0 GB used, 14.1 GB left: layers 28 to 31, norm, head",
        "The computation of a token changes the device 2 times.",
    ]


def test_every_control_changes_the_picture():
    form = placement_planner(SMALL, budgets={"GPU 0": 0.1e9, "GPU 1": 0.1e9, "CPU": 1e9})
    pictures = [form.png()]
    for change in ({"dtype": "int4"}, {"dtype": "float32"}, {"budget_0": 0.25e9}, {"budget_1": 0.0}, {"budget_2": 2e9},
                   {"model": "Llama 2 7B"}, {"model": "Llama 2 70B"}):  # fmt: skip
        pictures.append(form.set(**change).png())
    assert len(set(pictures)) == len(pictures)


def test_when_it_does_not_fit_picture_and_text_say_so_with_the_numbers():
    text = placement_planner().set(model="Llama 2 70B").text()
    assert "It does not fit: 138.0 GB of weights in 28.0 GB of memory, 110.0 GB short." in text
    axes = draw_placement(PRESETS["Llama 2 70B"], "bfloat16", BUDGETS).axes[0]
    (crossed,) = [patch for patch in axes.patches if not patch.get_fill()]
    assert crossed.get_x() == 28e9
    assert crossed.get_width() == pytest.approx(2 * 68_976_648_192 - 28e9)


def test_when_only_the_pieces_do_not_fit_it_says_that():
    config = PRESETS["Llama 2 7B"]
    budgets = {"A": 6.9e9, "B": 6.6e9}
    plan = review(config, "bfloat16", budgets)
    assert plan.total < sum(budgets.values())
    assert plan.refusal
    text = placement_planner(config, budgets=budgets).text()
    assert "It does not fit, though the sum would: modules are not cut, and layer 0 alone is 404.8 MB." in text


def test_a_device_without_memory_is_left_out_of_the_plan():
    asked = []

    def place(config, dtype, budgets):
        asked.append(dict(budgets))
        return loading.place_layers(config, dtype, budgets)

    assert "GPU 1: no memory" in placement_planner(SMALL, place=place).set(budget_1=0.0).text()
    assert asked[-1] == {"GPU 0": 8e9, "CPU": 16e9}


def _plan(change):
    def place(config, dtype, budgets):
        devices = dict.fromkeys(module_parameters(config), "GPU 0")
        change(devices)
        return devices

    return place


def _misplace(devices):
    devices["layers.4"] = "cuda:7"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda devices: devices.pop("layers.3"), "On no device: layer 3."),
        (_misplace, "cuda:7 has no memory to give, but gets layer 4."),
        (lambda devices: devices.update({"layers.30": "GPU 0"}), "Not part of the model: layers.30."),
    ],
)
def test_a_wrong_plan_is_named(change, said):
    form = placement_planner(SMALL, place=_plan(change))
    assert said in form.text()
    assert form.png() != placement_planner(SMALL, place=_plan(lambda devices: None)).png()


def test_a_plan_over_budget_is_crossed_out_beyond_it():
    budgets = {"GPU 0": 0.1e9, "CPU": 1e9}
    figure = draw_placement(SMALL, "bfloat16", budgets, place=_plan(lambda devices: None))
    total = 2 * 134_515_008
    (crossed,) = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert (crossed.get_x(), crossed.get_width()) == (0.1e9, pytest.approx(total - 0.1e9))
    text = placement_planner(SMALL, budgets=budgets, place=_plan(lambda devices: None)).text()
    assert "GPU 0 is over its budget: 269.0 MB in 100.0 MB, 169.0 MB too much." in text


def test_wrong_sizes_in_a_plan_are_found_by_counting_again():
    def place(config, dtype, budgets):
        right = loading.place_layers(config, dtype, budgets)
        return Placement(right.devices, dict(right.sizes) | {"layers.2": 5}, right.budgets)

    text = placement_planner(SMALL, place=place).text()
    assert "The plan's sizes are wrong, first layers.2: 5 bytes, counted 7,080,192 bytes." in text


def test_the_estimate_can_be_the_learners():
    text = placement_planner(SMALL, estimate=lambda count, dtype: count * 100).text()
    assert "are 13.5 GB of weights" in text
    assert "The plan's sizes are wrong" in text


@pytest.mark.parametrize(
    ("estimate", "said"),
    [(lambda *_: 0, "nothing to place"), (lambda *_: None, "The estimate for embed_tokens is None; expected"),
     (lambda *_: float("nan"), "is nan"), (lambda *_: -1, "is -1")],
)  # fmt: skip
def test_an_estimate_that_is_no_size_is_said(estimate, said):
    assert said in placement_planner(SMALL, estimate=estimate).text()


def test_the_reference_is_looked_up_when_drawing_so_that_a_built_module_counts(monkeypatch):
    form = placement_planner(SMALL)
    before = form.text()
    monkeypatch.setattr(loading, "place_layers", _plan(lambda devices: devices.pop("norm")))
    assert form.text() != before
    assert "On no device: norm." in form.text()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError(), "place is not yet written"),
        (CheckpointError("The config is odd."), "The config is odd."),
        (IndexError("list index out of range"), "IndexError: list index out of range (in place, line"),
    ],
)
def test_errors_of_the_learners_function_stand_in_the_pictures_place(error, said):
    def place(config, dtype, budgets):
        raise error

    assert said in placement_planner(SMALL, place=place).text()


def test_what_is_no_plan_is_said():
    assert "A plan says module -> device" in placement_planner(SMALL, place=lambda *_: None).text()


@pytest.mark.parametrize("budgets", [{}, dict.fromkeys("abcd", 1e9)])
def test_no_device_or_more_than_three_are_refused(budgets):
    with pytest.raises(ValueError, match="room for one to three devices"):
        placement_planner(budgets=budgets)


def test_modules_in_words_put_runs_together():
    assert in_words(["embed_tokens", "layers.0", "layers.1", "layers.2", "layers.5", "norm", "lm_head"]) == (
        "embedding, layers 0 to 2, layer 5, norm, head"
    )
    assert in_words([]) == "nothing"


@pytest.mark.parametrize("model", list(PRESETS))
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_no_texts_overlap_and_nothing_leaves_the_figure(model, dtype):
    figure = draw_placement(PRESETS[model], dtype, BUDGETS, name=model)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in [*axes.texts, *figure.texts] if text.get_text()]
    boxes += [axes.xaxis.get_label().get_window_extent(), figure.legends[0].get_window_extent()]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
