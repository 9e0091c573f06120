"""The oracles of chapter 4's checks are right beyond the cases that learners see: they agree with the engine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import (
    admission_checks,
    batching_checks,
    planner_runs,
    scheduler_checks,
    serving_checks,
    serving_clinic,
    serving_stage,
)
from llmfromscratch.course.sketches import ch04

ENGINE = learner_engine.reference("scheduler")
ROWS = st.tuples(st.integers(1, 12), st.integers(0, 4), st.integers(0, 12))


def scenes(waiting: bool):
    """Planners with one to four requests that run, and up to three that wait; memory is tight."""

    @st.composite
    def drawn(draw):
        numbers = draw(st.permutations(range(1, 8)))
        running = []
        for number in numbers[: draw(st.integers(0 if waiting else 1, 4))]:
            prompt, known, stored = draw(ROWS)
            running.append(serving_stage.Row(number, prompt, known, min(stored, prompt + known - 1)))
        queue = [serving_stage.Row(number, *draw(ROWS)[:2]) for number in numbers[4 : draw(st.integers(4, 7))]]
        needed = sum(-(-row.stored // 4) for row in running)
        elders = draw(st.permutations([row.number for row in running]))
        blocks, budget = needed + draw(st.integers(0, 4)), draw(st.integers(1, 12))
        places = draw(st.integers(1, 6))
        return serving_stage.Scene(blocks, tuple(running), tuple(queue), tuple(elders), budget, places)

    return drawn()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=1, max_size=9))
def test_the_batch_run_step_by_step_wastes_what_the_formula_says(requests):
    prompts, answers = (list(side) for side in zip(*requests, strict=True))
    assert batching_checks._step_by_step(prompts, answers) == ch04.static_waste(prompts, answers)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 8))
def test_picking_the_shortest_gives_the_buckets(lengths, size):
    assert batching_checks._picked()(lengths, size) == ch04.buckets(lengths, size)


@settings(deadline=None)  # the first call waits for the import
@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=5))
def test_the_rectangle_filled_by_columns_is_the_padded_step(rows):
    specs = [(prompt, known, min(stored, prompt + known - 1), ended) for (prompt, known, stored), ended in rows]
    assert batching_checks._stepped(ENGINE.padded_step, specs) == batching_checks._column_by_column(specs)


@settings(deadline=None)
@given(scenes(waiting=False), st.integers(1, 12), st.data())
def test_counting_blocks_finds_who_gives_way(scene, tokens, data):
    number = data.draw(st.sampled_from(scene.running)).number
    counted = scheduler_checks._roomed(scheduler_checks._by_counting, scene, number, tokens)
    assert scheduler_checks._roomed(ENGINE.make_room, scene, number, tokens) == counted


@settings(deadline=None)
@given(scenes(waiting=False), st.data())
def test_dealing_out_tokens_plans_what_the_engine_plans(scene, data):
    number = data.draw(st.sampled_from(scene.running)).number
    dealt = scheduler_checks._planned(scheduler_checks.token_by_token, scene, number)
    assert scheduler_checks._planned(ENGINE.plan_next, scene, number) == dealt


@settings(deadline=None)
@given(scenes(waiting=True))
def test_the_queue_emptied_from_its_front_is_the_engines_admission(scene):
    emptied = admission_checks._admitted(admission_checks._from_the_front, scene)
    assert admission_checks._admitted(ENGINE.admit, scene) == emptied


@pytest.mark.parametrize("seed", range(40, 60))
def test_the_engine_keeps_every_rule_of_a_whole_run(seed):
    blocks, budget = 6 + seed % 9, 3 + seed % 9
    load = planner_runs.random_load("", seed, 25, blocks, budget=budget, shared=seed % 3 * 6)
    assert planner_runs.Run(ENGINE, load).trouble() == ""


@pytest.mark.parametrize("service", serving_checks._SERVICES, ids=lambda service: service.told[:60])
def test_the_loop_without_a_model_serves_what_the_sketch_serves(service):
    assert serving_checks._served(ch04.serve, service) == serving_checks._served(serving_checks._without_model, service)


def test_among_the_services_are_preemptions_and_every_way_to_end():
    ended, preempted = set(), 0
    for service in serving_checks._SERVICES:
        cache, planner, requests = service.opened()
        serving_checks._without_model(None, cache, planner, requests, service.end_tokens)
        for request in requests:
            text = serving_stage.answer(request.prompt_token_ids, len(request.token_ids))
            assert request.token_ids == text
            full = len(text) == request.params.max_tokens
            ended.add((request.finish_reason, full))
            preempted += request.preemptions
    assert ended == {("length", True), ("stop", False), ("stop", True), ("abort", False)} and preempted > 1


def test_a_lost_or_doubled_token_changes_what_the_model_says():
    text = serving_stage.prompt_of(3, 9) + serving_stage.answer(serving_stage.prompt_of(3, 9), 20)
    said = serving_stage.answer(text, 6)
    for place in range(len(text)):
        assert serving_stage.answer(text[:place] + text[place + 1 :], 6) != said
        assert serving_stage.answer(text[: place + 1] + text[place:], 6) != said


@given(
    st.lists(st.sampled_from("ABCD"), unique=True, max_size=4),
    st.lists(st.integers(1, 30), max_size=4),
    st.integers(4, 20),
)
def test_the_budget_of_the_bug_hunt_is_dealt_out_to_the_last_token(decoding, prompts, budget):
    waiting = [(f"P{number}", tokens) for number, tokens in enumerate(prompts)]
    plan = serving_clinic._dealt(decoding, waiting, budget)
    assert sum(plan.values()) == min(budget, len(decoding) + sum(prompts))
    assert all(plan[name] == 1 for name in decoding) and 0 not in plan.values()
