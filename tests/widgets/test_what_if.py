"""The what-if form: its numbers against simulations of their own, and what it says about queues that grow."""

from __future__ import annotations

import gc
import math
import re
import sys
import weakref
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from serving_runs import KeepsPlaces

from llmfromscratch import scheduler, simulation
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.scheduler import ContinuousScheduler, StaticScheduler
from llmfromscratch.simulation import CostModel, Workload
from llmfromscratch.widgets import draw_what_if, what_if
from llmfromscratch.widgets.serving_run import in_time
from llmfromscratch.widgets.what_if import _LOOKS, describe_what_if
from llmfromscratch.widgets.what_if_run import Question, answer, find_capacity

pytestmark = pytest.mark.filterwarnings("error")
SMALL = Workload(count=60, prompt_tokens=(16, 200), output_tokens=(16, 120), seed=3)


def question(make=ContinuousScheduler, load=1.5, blocks=256, **settings):
    if make is ContinuousScheduler:
        settings = {"max_requests": 16, "max_batch_tokens": 512, "policy": "first come, first served"} | settings
    return Question(make, settings, replace(SMALL, rate=load), CostModel(), blocks)


def outcome(*arguments, **settings):
    return answer(question(*arguments, **settings), find_capacity)


def simulated(load=1.5, blocks=256, places=16, budget=512):
    requests = replace(SMALL, rate=load).requests()
    return simulation.simulate(lambda cache: ContinuousScheduler(cache, places, budget), requests, num_blocks=blocks)


def values(run, measure):
    found = sorted(getattr(request, measure) for request in run.requests if getattr(request, measure) is not None)
    return found[math.ceil(0.95 * len(found)) - 1]


def cards(figure):
    """name -> value, from the row of numbers."""
    texts = [one.get_text() for one in figure.texts]
    names = ["throughput", "time to first token, p95", "time per output token, p95", "longest gap, p95", "preemptions",
             "longest queue"]  # fmt: skip
    return {name: texts[texts.index(name) + 1] for name in names}


@pytest.mark.parametrize("settings", [{}, {"load": 5.0, "blocks": 48}, {"places": 2}, {"budget": 32, "load": 3.0}])
def test_the_numbers_are_those_of_the_simulation(settings):
    run = simulated(**settings)
    names = {"places": "max_requests", "budget": "max_batch_tokens"}
    found = outcome(**{names.get(name, name): value for name, value in settings.items()})
    assert found.tokens_per_second == pytest.approx(run.tokens_per_second)
    assert found.preemptions == sum(request.preemptions for request in run.requests)
    assert found.percentile("ttft", 0.95) == values(run, "ttft") == run.ttft(0.95)
    assert found.percentile("tpot", 0.95) == values(run, "tpot")
    shown = cards(draw_what_if(found))
    assert shown["throughput"] == f"{run.tokens_per_second:.1f} tokens/s"
    assert shown["preemptions"] == str(found.preemptions)
    assert f"throughput: {run.tokens_per_second:.1f} tokens per second" in describe_what_if(found)
    assert f"preemptions: {found.preemptions}\n" in describe_what_if(found)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (ContinuousScheduler, {}),
        (ContinuousScheduler, {"load": 5.0, "blocks": 48, "max_batch_tokens": 64}),
        (StaticScheduler, {"load": 3.0, "max_requests": 4}),
    ],
)
def test_the_longest_gap_is_that_of_the_times_at_which_tokens_were_recorded(monkeypatch, make, settings):
    times, record = {}, scheduler.Request.record

    def noted(request, token, now):
        times.setdefault(request.request_id, []).append(now)
        record(request, token, now)

    monkeypatch.setattr(scheduler.Request, "record", noted)
    found = answer(question(make, **settings), lambda _: 1.0)
    gaps = {one: max(b - a for a, b in pairwise(moments)) for one, moments in times.items() if len(moments) > 1}
    assert found.preemptions > 0 or "blocks" not in settings
    assert found.longest_gaps() == gaps
    high = sorted(gaps.values())[math.ceil(0.95 * len(gaps)) - 1]
    assert found.percentile_of_gaps(0.95) == high
    assert "longest time between two tokens of a request: p50" in describe_what_if(found)
    assert cards(draw_what_if(found))["longest gap, p95"] == in_time(high)


def test_a_larger_budget_lengthens_the_longest_gap_under_the_load_that_learners_see_first():
    gaps = []
    for budget in (64, 128, 256, 512, 1024, 2048):
        text = what_if(ContinuousScheduler).set(max_batch_tokens=budget).text()
        number, unit = re.search(r"two tokens of a request: p50 [\d.]+ m?s, p95 ([\d.]+) (m?s)", text).groups()
        gaps.append(float(number) / (1000 if unit == "ms" else 1))
        assert "The queue does not grow" in text
    assert gaps == sorted(gaps) and gaps[-1] > 5 * gaps[0]


def test_where_the_simulation_stopped_no_gap_is_known():
    assert "a request: p50 none, p95 none" in what_if(KeepsPlaces, SMALL).text()


def test_the_queue_is_who_has_arrived_and_has_not_begun():
    found = outcome(load=5.0)
    run = simulated(load=5.0)
    for moment, count in found.waiting():
        assert count == sum(request.arrival <= moment < request.first_scheduled for request in run.requests)
    for moment, count in found.being_served():
        assert count == sum(request.first_scheduled <= moment < request.last_token for request in run.requests)
    most = max(count for _, count in found.waiting())
    assert most > 10
    assert cards(draw_what_if(found))["longest queue"] == f"{most} requests"
    last = max(request.arrival for request in run.requests)
    start = run.requests[0].arrival
    samples = [start + (last - start) * (n + 0.5) / 4000 for n in range(4000)]
    mean = sum(sum(r.arrival <= at < r.first_scheduled for r in run.requests) for at in samples) / 4000
    assert found.mean_waiting() == pytest.approx(mean, rel=0.01)


def test_the_use_of_limits_is_that_of_the_steps():
    found = outcome(load=5.0, blocks=64)
    used = found.use_of_limits()
    for step, (places, blocks, budget) in enumerate(zip(*used.values(), strict=True)):
        record = found.run.steps[step]
        assert places[2] == len(record.work) / 16
        assert blocks[2] == record.blocks_used / 64
        assert budget[2] == sum(work.tokens for work in record.work) / 512
    assert all(share <= 1 for steps in used.values() for *_, share in steps)
    waited = [record for record in found.run.steps if record.waiting]
    seconds = sum(record.end - record.start for record in waited)
    blocks = sum(record.blocks_used / 64 * (record.end - record.start) for record in waited) / seconds
    assert f"{100 * blocks:.0f} % of the blocks" in describe_what_if(found)


@pytest.mark.parametrize("settings", [{}, {"blocks": 48}, {"max_requests": 4}, {"policy": "shortest first"}])
def test_above_the_capacity_the_queue_grows_with_the_number_of_requests_and_below_it_does_not(settings):
    most = find_capacity(question(**settings))

    def longest(load, count):
        asked = question(load=load, **settings)
        asked = replace(asked, workload=replace(asked.workload, count=count))
        return max(number for _, number in answer(asked, lambda _: most).waiting())

    assert longest(2 * most, 240) > 1.6 * longest(2 * most, 120) > 40
    assert longest(0.6 * most, 240) < 15


def test_how_fast_the_queue_grows_is_said_rightly():
    asked = question(load=6.0)
    found = answer(replace(asked, workload=replace(asked.workload, count=300)), lambda _: find_capacity(asked))
    middle, last = found.run.requests[150].arrival, found.run.requests[-1].arrival

    def waiting(at):
        return sum(request.arrival <= at < request.first_scheduled for request in found.run.requests)

    grown = (waiting(last) - waiting(middle)) / (last - middle)
    arrived = 149 / (last - middle)  # a second, in truth: arrivals are drawn at random
    assert arrived - grown == pytest.approx(found.capacity, rel=0.1)
    text = describe_what_if(found)
    assert f"The queue grows without end: at most {found.capacity:.2f} requests a second can be served, and 6" in text
    assert f"Each second it is longer by {6 - found.capacity:.2f}." in text


def test_the_picture_has_the_queue_and_where_it_leads():
    found = outcome(load=6.0)
    lines = draw_what_if(found).axes[0].lines
    stairs = dict(zip(*(lines[0].get_xdata(), lines[0].get_ydata()), strict=True))
    start = found.run.requests[0].arrival
    assert all(stairs[moment - start] == count for moment, count in found.waiting()[:-1])
    last = found.last_arrival
    straight = [[0, 0], [last, (6 - found.capacity) * last]]
    assert any(line.get_xydata().tolist() == straight for line in lines)
    below = outcome(load=0.5)
    assert not any(len(line.get_xydata()) == 2 and line.get_ydata()[0] == 0 and line.get_ydata()[1] > 1
                   for line in draw_what_if(below).axes[0].lines)  # fmt: skip


def test_a_load_that_can_be_served_is_said_to_be():
    text = describe_what_if(outcome(load=0.5))
    assert "The queue does not grow for ever: at most" in text
    assert "near the limit" not in text
    most = find_capacity(question())
    assert "near the limit" in describe_what_if(outcome(load=0.95 * most))


def test_capacity_does_not_depend_on_the_load_and_one_place_serves_one_after_the_other():
    asked = question(max_requests=1)
    assert find_capacity(asked) == find_capacity(replace(asked, workload=replace(SMALL, rate=4.0)))
    cost = CostModel()
    seconds = sum(
        cost.fixed * len(request.token_ids or range(request.params.max_tokens))
        + cost.per_token * (len(request.prompt_token_ids) + request.params.max_tokens - 1)
        for request in SMALL.requests()
    )
    assert find_capacity(asked) == pytest.approx(60 / seconds, rel=0.03)


def test_refused_requests_are_named_and_do_not_count_as_load():
    found = outcome(load=6.0, blocks=8)
    refused = [request for request in SMALL.requests() if len(request.prompt_token_ids) > 128]
    assert found.offered == pytest.approx(6.0 * (60 - len(refused)) / 60)
    text = describe_what_if(found)
    assert "are aborted: request" in text
    assert "the whole cache holds 128" in text
    assert f"and {found.offered:.2f} arrive that can fit" in text


# ---- controls ----------------------------------------------------------------------------------------------------


def controls(form):
    return [live.description for live in form.view().children[0].children]


def test_a_control_is_given_to_every_argument_that_the_scheduler_takes():
    load, blocks = "Load (requests per second)", "Blocks of 16 tokens"
    places = "Places (max_requests)"
    assert controls(what_if(ContinuousScheduler, SMALL)) == [
        load, blocks, places, "Tokens a step (max_batch_tokens)", "Who goes first (policy)"]  # fmt: skip
    assert controls(what_if(StaticScheduler, SMALL)) == [load, blocks, places, "Batches of like prompts (bucket)"]
    assert controls(what_if(lambda cache: StaticScheduler(cache, 4), SMALL)) == [load, blocks]


def test_an_argument_that_nobody_sets_is_refused():
    with pytest.raises(ValueError, match=re.escape("what_if cannot set 'size'; it calls make_scheduler(cache, ...)")):
        what_if(lambda cache, size: None, SMALL)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (ContinuousScheduler, [{"load": 4.0}, {"num_blocks": 48}, {"max_requests": 4}, {"max_batch_tokens": 64},
                               {"policy": "shortest first"}]),
        (StaticScheduler, [{"load": 4.0}, {"num_blocks": 96}, {"max_requests": 4}, {"bucket": True}]),
    ],
)  # fmt: skip
def test_every_control_changes_the_picture_and_the_text(make, changes):
    start = {"load": 3.0, "num_blocks": 128}
    pictures, texts = set(), set()
    for change in [{}, *changes]:
        view = what_if(make, SMALL).set(**{**start, **change})
        pictures.add(view.png())
        texts.add(view.text())
    assert len(pictures) == len(texts) == len(changes) + 1


def test_moving_the_load_costs_one_simulation_and_coming_back_none(monkeypatch):
    calls = []
    real = simulation.simulate
    monkeypatch.setattr(simulation, "simulate", lambda *a, **k: calls.append(1) or real(*a, **k))
    view = what_if(ContinuousScheduler, SMALL)
    view.png()
    assert len(calls) == 2
    view.set(load=3.0).png()
    view.text()
    assert len(calls) == 3
    view.set(load=0.75).png()
    assert len(calls) == 3
    view.set(max_requests=8).png()
    assert len(calls) == 5


def test_beside_a_changed_state_stand_the_numbers_of_the_first_one():
    first, second = outcome(), outcome(load=4.0)
    plain = [one.get_text() for one in draw_what_if(first).texts]
    assert not any(text.startswith("at first") for text in plain)
    beside = [one.get_text() for one in draw_what_if(second, first).texts if one.get_text().startswith("at first")]
    assert beside == [f"at first {value}" for value in cards(draw_what_if(first)).values()]


def test_the_same_state_gives_the_same_bytes():
    assert what_if(ContinuousScheduler, SMALL).png() == what_if(ContinuousScheduler, SMALL).png()


def test_policies_are_looked_up_when_it_runs_so_that_a_built_module_counts(monkeypatch):
    before = what_if(ContinuousScheduler, SMALL).set(load=4.0).text()

    class LastComeFirst:
        ageing = 10.0

        def key(self, request):
            return -request.arrival

    monkeypatch.setattr(scheduler, "FirstComeFirstServed", LastComeFirst)
    after = what_if(ContinuousScheduler, SMALL).set(load=4.0).text()
    assert before != after


# ---- wrong schedulers --------------------------------------------------------------------------------------------


def test_a_scheduler_that_keeps_places_is_stopped_and_what_it_did_is_shown():
    view = what_if(KeepsPlaces, SMALL)
    text = view.text()
    assert "! The simulation stopped: after" in text
    assert "of 60 never end: request" in text
    assert "p95 never" in text
    assert "not known: the simulation did not come to its end" in text
    assert view.png().startswith(b"\x89PNG")


def test_a_scheduler_that_never_ends_is_not_run_a_second_time(monkeypatch):
    calls = []
    real = simulation.simulate
    monkeypatch.setattr(simulation, "simulate", lambda *a, **k: calls.append(1) or real(*a, **k))
    what_if(KeepsPlaces, SMALL).text()
    assert len(calls) == 1


def test_a_scheduler_that_plans_nothing_is_stopped():
    class Idle(ContinuousScheduler):
        def schedule(self, now):
            return []

    text = what_if(Idle, SMALL).text()
    assert "! The simulation stopped: the scheduler plans nothing, and 1 requests wait, 0 run." in text
    assert "! 60 of 60 never end" in text


def test_a_scheduler_that_admits_one_at_a_time_shows_as_a_queue():
    class OneByOne(ContinuousScheduler):
        def schedule(self, now):
            held, self.waiting = (self.waiting, []) if self.running else (self.waiting[1:], self.waiting[:1])
            plan = super().schedule(now)
            self.waiting += held
            return plan

    right, wrong = what_if(ContinuousScheduler, SMALL), what_if(OneByOne, SMALL)
    assert "does not grow for ever" in right.text()
    assert "The queue grows without end" in wrong.text()
    assert right.png() != wrong.png()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError(), "schedule is not yet written; this figure is drawn with it."),
        (OutOfMemory("No block is free."), "No block is free."),
        (KeyError("plan"), "The figure cannot be drawn. KeyError: 'plan' (in schedule, line"),
    ],
)
def test_what_a_scheduler_raises_is_a_sentence_in_the_pictures_place(error, said):
    class Raising(ContinuousScheduler):
        def schedule(self, now):
            raise error

    assert what_if(Raising, SMALL).text().startswith(said)


# ---- manners -----------------------------------------------------------------------------------------------------


def test_limits_differ_in_their_dashes():
    assert len({str(dashes) for _, dashes in _LOOKS.values()}) == len(_LOOKS)


@pytest.mark.parametrize("settings", [{}, {"load": 0.25}, {"load": 6.0, "blocks": 8}, {"load": 1.9, "max_requests": 1}])
def test_no_labels_overlap_and_nothing_leaves_the_figure(settings):
    figure = draw_what_if(outcome(**settings), outcome())
    figure.draw_without_rendering()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, *axes.get_legend().get_texts(), axes.yaxis.label, axes.xaxis.label]
        low, high = axes.get_ylim()
        texts += [one for at, one in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= at <= high]
    drawn = [(one.get_text(), one.get_window_extent()) for one in texts if one.get_text()]
    for (text, one), (other_text, other) in combinations(drawn, 2):
        assert not one.overlaps(other), (text, other_text)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= -1 for _, box in drawn)


def test_figures_do_not_pile_up():
    found = outcome()
    seen = [weakref.ref(draw_what_if(found)) for _ in range(3)]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
