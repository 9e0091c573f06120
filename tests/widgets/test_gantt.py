"""The Gantt chart: its bars against the records, its numbers against sums of their own, and wrong schedulers seen."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from serving_runs import (
    KeepsPlaces,
    LosesAToken,
    Starving,
    StaysInTheQueue,
    asked,
    continuous,
    play,
    simulated,
    static,
    workload,
)
from tiny_models import random_ids, tiny_model

from llmfromscratch import SamplingParams, kv_cache, sampling, scheduler
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.steps import StepRecord, WorkRecord
from llmfromscratch.widgets import draw_gantt, gantt
from llmfromscratch.widgets.gantt import LOOKS, describe_gantt
from llmfromscratch.widgets.gantt_rows import read_chart
from llmfromscratch.widgets.serving_run import ServingRun
from llmfromscratch.widgets.style import ALARM

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def runs():
    """The same requests under both schedulers, and with too little memory."""
    return {
        "static": simulated(static, workload()),
        "continuous": simulated(continuous, workload()),
        "tight": simulated(lambda cache: continuous(cache, 8, 64), workload(), num_blocks=17),
    }


def boxes(axes, what):
    """(left, right, middle) of the bars of one look."""
    found = next(one for one in axes.collections if isinstance(one, PolyCollection) and one.get_label() == what)
    corners = [path.vertices for path in found.get_paths()]
    return [(c[:, 0].min(), c[:, 0].max(), (c[:, 1].min() + c[:, 1].max()) / 2) for c in corners]


def seconds(axes, what, row):
    return sum(right - left for left, right, middle in boxes(axes, what) if middle == pytest.approx(row))


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_every_bar_is_as_long_as_the_records_say(runs):
    for name, run in runs.items():
        axes = draw_gantt({name: run}).axes[0]
        for row, request in enumerate(run.requests):
            mine = [(record, work) for record in run.steps for work in record.work
                    if work.request_id == request.request_id]  # fmt: skip
            useful = {"prefill": 0.0, "decode": 0.0}
            nothing = 0.0
            for record, work in mine:
                share = work.tokens / (work.tokens + work.padding) if work.phase != "idle" else 0
                time = record.end - record.start
                nothing += time * (1 - share)
                if work.phase != "idle":
                    useful[work.phase] += time * share
            assert seconds(axes, "prefill", row) == pytest.approx(useful["prefill"]), (name, row)
            assert seconds(axes, "decode", row) == pytest.approx(useful["decode"]), (name, row)
            assert seconds(axes, "computed for nothing", row) == pytest.approx(nothing), (name, row)
            assert seconds(axes, "waiting", row) == pytest.approx(request.queue_time, abs=1e-9), (name, row)


def test_bars_of_a_request_never_overlap_and_leave_no_gap_until_the_end(runs):
    for name, run in runs.items():
        for row in read_chart(ServingRun(run.requests, run.steps)).rows:
            for one, other in pairwise(row.pieces):
                assert other.start == pytest.approx(one.end, abs=1e-9), (name, row.number)
            assert row.pieces[0].start == pytest.approx(row.arrival)
            assert row.pieces[-1].end >= row.end - 1e-9


def test_preempted_requests_are_hatched_from_losing_their_memory_to_the_next_step_they_compute_in(runs):
    run = runs["tight"]
    axes = draw_gantt({"tight": run}).axes[0]
    lost = {request.request_id for request in run.requests if request.preemptions}
    assert lost
    for row, request in enumerate(run.requests):
        spent, since = 0.0, None
        for record in run.steps:
            if request.request_id in record.preempted:
                since = record.start
            if since is not None and any(work.request_id == request.request_id for work in record.work):
                spent, since = spent + record.start - since, None
        assert seconds(axes, "preempted", row) == pytest.approx(spent)
        assert (spent > 0) == (request.request_id in lost)
    assert f"preemptions: {sum(request.preemptions for request in run.requests)}" in describe_gantt(run)


def test_a_place_that_is_held_without_tokens_is_drawn():
    class Alternating(scheduler.ContinuousScheduler):
        turn = 0

        def schedule(self, now):
            self.turn += 1
            return [work for work in super().schedule(now) if (work.request.request_id + self.turn) % 2]

    run = play(lambda cache: Alternating(cache, 2), [asked(0, 4, 5), asked(1, 4, 5)])
    axes = draw_gantt(run).axes[0]
    for row, request in enumerate(run.requests):
        idle = sum(
            record.end - record.start
            for record in run.steps
            if any(work.request_id != row for work in record.work) and record.start < request.last_token
        )
        begun = min(record.start for record in run.steps if record.work[0].request_id == row)
        assert idle > 0.1
        assert seconds(axes, "place held, no tokens", row) == pytest.approx(idle - begun)


def test_the_engines_own_time_between_two_steps_belongs_to_the_step_and_a_long_pause_does_not():
    def drawn(pause):
        requests, _ = by_hand([PREFILL])
        requests[0].params = asked(7, 2, 2).params
        requests[0].record(0, 12.0 + pause)
        decode = WorkRecord(7, "decode", 1, 0)
        steps = [StepRecord(10.0, 11.0, (PREFILL,)), StepRecord(11.0 + pause, 12.0 + pause, (decode,))]
        axes = draw_gantt((requests, steps)).axes[0]
        return [seconds(axes, what, 0) for what in ("prefill", "decode", "place held, no tokens")]

    assert drawn(0.25) == pytest.approx([1.25, 1, 0])
    assert drawn(5.0) == pytest.approx([1, 1, 5])


def test_the_places_and_the_blocks_below_are_those_of_the_records(runs):
    for name, run in runs.items():
        _, places, blocks = draw_gantt({name: run}).axes
        start = min(request.arrival for request in run.requests)
        areas = [
            sum((c[:, 0].max() - c[:, 0].min()) * (c[:, 1].max() - c[:, 1].min())
                for c in (path.vertices for path in collection.get_paths()))
            for axes in (places, blocks) for collection in axes.collections
        ]  # fmt: skip
        rows = dict.fromkeys(("useful", "idle"), 0.0)
        held = 0.0
        for record in run.steps:
            idle = sum(work.phase == "idle" for work in record.work)
            rows["useful"] += (len(record.work) - idle) * (record.end - record.start)
            rows["idle"] += idle * (record.end - record.start)
            held += record.blocks_used * (record.end - record.start)
        assert areas == pytest.approx([rows["useful"], rows["idle"], held])
        assert places.get_xlim() == pytest.approx((0, run.steps[-1].end - start))
        assert [line.get_ydata()[0] for line in blocks.lines] == [run.steps[0].blocks_total]


def test_the_text_has_the_sums_of_the_records(runs):
    text = describe_gantt({"static": runs["static"]})
    run = runs["static"]
    work = [work for record in run.steps for work in record.work]
    useful = sum(one.tokens for one in work if one.phase != "idle")
    padding = sum(one.padding for one in work if one.phase != "idle")
    idle = sum(one.tokens + one.padding for one in work if one.phase == "idle")
    whole = useful + padding + idle
    share = 100 * (padding + idle) / whole
    assert f"tokens computed: {whole:,}, {share:.0f} % of them for nothing ({padding:,} padding, {idle:,} in" in text
    assert f"static: 12 requests in {run.seconds:.2f} s, {run.tokens_per_second:.1f} tokens per second" in text
    busy = sum(record.end - record.start for record in run.steps)
    mean = sum(len(record.work) * (record.end - record.start) for record in run.steps) / busy
    assert f"places in use: {mean:.1f} on average" in text
    assert f"at most {max(len(record.work) for record in run.steps)};" in text
    assert f"blocks in use: at most {max(record.blocks_used for record in run.steps)} of 512" in text
    ttft = sorted(request.first_token - request.arrival for request in run.requests)
    assert f"time to first token: mean {sum(ttft) / 12:.2f} s, p95 {ttft[11]:.2f} s" in text
    after = {}
    for request in run.requests:
        held = sum(record.end - record.start for record in run.steps for one in record.work
                   if one.request_id == request.request_id and one.phase == "idle")  # fmt: skip
        after |= {request.request_id: held} if held else {}
    longest = max(after, key=after.get)
    assert f"request {longest} longest, for {after[longest]:.2f} s" in text
    assert "!" not in text


def test_a_right_continuous_scheduler_computes_nothing_for_nothing(runs):
    text = describe_gantt({"continuous": runs["continuous"]})
    assert ", 0 % of them for nothing; preemptions: 0" in text
    assert "held after the end" not in text
    assert "!" not in text
    assert boxes(draw_gantt({"continuous": runs["continuous"]}).axes[0], "computed for nothing") == []


def test_a_window_shows_what_lies_in_it_and_its_numbers(runs):
    run = runs["static"]
    figure = draw_gantt(run, (1.0, 2.0))
    assert figure.axes[0].get_xlim() == (1.0, 2.0)
    start = min(request.arrival for request in run.requests)
    inside = [
        request.request_id for request in run.requests
        if request.arrival - start <= 2.0 and any(
            record.end - start > 1.0 for record in run.steps
            if any(work.request_id == request.request_id for work in record.work))
    ]  # fmt: skip
    assert names(figure.axes[0]) == [str(number) for number in inside]
    tokens = sum(work.tokens + work.padding for record in run.steps for work in record.work
                 if 1.0 <= record.start - start < 2.0)  # fmt: skip
    text = describe_gantt(run, (1.0, 2.0))
    assert f"tokens computed: {tokens:,}," in text
    assert text.startswith("From 1.00 s to 2.00 s after the first arrival")


def test_rows_are_in_the_order_of_arrival_or_of_the_end(runs):
    run = runs["continuous"]
    assert names(draw_gantt(run).axes[0]) == [str(number) for number in range(12)]
    by_end = sorted(run.requests, key=lambda request: request.last_token)
    assert names(draw_gantt(run, order="end").axes[0]) == [str(request.request_id) for request in by_end]
    with pytest.raises(ValueError, match="cannot be 'size'; expected one of arrival, end"):
        draw_gantt(run, order="size")


def test_every_control_changes_the_picture_and_the_text(runs):
    view = gantt(runs)
    pictures, texts = [], []
    for window in ((0, 5000), (1000, 3000), (1000, 3500)):
        for order in ("arrival", "end"):
            view.set(window=window, order=order)
            pictures.append(view.png())
            texts.append(view.text())
    assert len(set(pictures)) == len(set(texts)) == 6


def test_the_same_state_gives_the_same_bytes_and_runs_stand_on_one_axis_of_time(runs):
    assert gantt(runs).png() == gantt(runs).png()
    figure = draw_gantt(runs)
    assert len(figure.axes) == 9
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_the_unit_of_the_time_control_fits_the_run(runs):
    row = gantt(runs).view().children[0]
    assert row.children[0].description == "Time shown (ms)"
    long = simulated(continuous, workload(24, rate=0.5))
    row = gantt(long).view().children[0]
    assert row.children[0].description == "Time shown (s)"
    assert row.children[0].max >= long.seconds > row.children[0].max - 1


# ---- wrong schedulers --------------------------------------------------------------------------------------------


def wrong_rows(figure):
    labels = figure.axes[0].get_yticklabels()
    return [label.get_text() for label in labels if label.get_color() == ALARM]


def test_requests_that_keep_their_places_after_the_end_are_seen_and_named():
    run = play(lambda cache: KeepsPlaces(cache, 6), workload(6))
    text, figure = describe_gantt({"mine": run}, places=6), draw_gantt({"mine": run})
    assert "A place is held after the end by requests 0, 1, 2, 3, 4 and 5" in text
    assert re.search(r"! Request \d has ended at [\d.]+ m?s, keeps its place and has \d+ more to compute at", text)
    assert wrong_rows(figure) == ["0", "1", "2", "3", "4", "5"]
    for row, request in enumerate(run.requests):
        idle = run.steps[-1].end - request.last_token
        assert seconds(figure.axes[0], "computed for nothing", row) == pytest.approx(idle)
    assert any("keeps its place" in one.get_text() for one in figure.texts)


def test_requests_that_never_end_are_seen_and_named():
    run = play(lambda cache: Starving(cache, 6), workload())
    text, figure = describe_gantt(run), draw_gantt(run)
    assert "! Request 3 never ends: 0 of 41 tokens, never computed, still in the queue." in text
    assert "So it is with request 5." in text
    assert "mean never, p95 never" in text
    assert wrong_rows(figure) == ["3", "5"]
    end = run.steps[-1].end - min(request.arrival for request in run.requests)
    assert max(right for _, right, middle in boxes(figure.axes[0], "waiting") if middle == 3) == pytest.approx(end)
    assert names(draw_gantt(run, order="end").axes[0])[-2:] == ["3", "5"]


def test_a_request_that_computes_while_it_waits_is_seen_and_named():
    run = play(lambda cache: StaysInTheQueue(cache, 6), workload(), most=12)
    first = next(record for record in run.steps if any(work.request_id == 4 for work in record.work))
    when = 1000 * (first.start - run.requests[0].arrival)
    assert f"! Request 4 computes while it waits in the queue, first at {when:.0f} ms." in describe_gantt(run)
    assert "4" in wrong_rows(draw_gantt(run))


def test_a_token_that_is_lost_at_a_preemption_is_found():
    make = lambda kind: lambda cache: kind(cache, 8, 64)  # noqa: E731
    good, bad = (play(make(kind), workload(), num_blocks=17) for kind in (scheduler.ContinuousScheduler, LosesAToken))
    lost = next(request for request in bad.requests if request.preemptions)
    needed = lost.length - 1
    assert "!" not in describe_gantt(good)
    assert f"! Request {lost.request_id} has computed {needed - 1} tokens since it was preempted" in describe_gantt(bad)
    assert f"and its text needs {needed}" in describe_gantt(bad)
    assert str(lost.request_id) in wrong_rows(draw_gantt(bad))


def by_hand(*work, waiting=()):
    """A run of one request, two tokens of prompt and one of answer, with steps of a second."""
    request = asked(7, 2, 1, arrival=10.0)
    steps = [StepRecord(10.0 + n, 11.0 + n, tuple(one), waiting) for n, one in enumerate(work)]
    request.begin(10.0)
    request.record(0, steps[-1].end)
    request.end("length")
    return [request], steps


PREFILL = WorkRecord(7, "prefill", 2, 0)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (by_hand([PREFILL, PREFILL]), "Request 7 is twice in one step, first at 0 s."),
        (by_hand([PREFILL, WorkRecord(9, "decode", 1, 0)]), "The steps name request 9, not among the requests"),
        (by_hand([WorkRecord(7, "prefill", 1, 0)]), "Request 7 has computed 1 token, and its text needs 2."),
    ],
)
def test_what_cannot_be_right_in_a_record_is_said(run, said):
    assert f"! {said}" in describe_gantt({"mine": run})
    assert any(said[:30] in one.get_text() for one in draw_gantt({"mine": run}).texts)


def test_work_before_the_arrival_is_said():
    requests, steps = by_hand([PREFILL])
    requests.append(asked(3, 2, 1, arrival=5.0))
    requests[0].arrival = 12.0
    assert "Request 7 is in a step at 5.00 s, and arrives at 7.00 s." in describe_gantt((requests, steps))


def test_an_ended_request_in_the_queue_is_said():
    requests, steps = by_hand([PREFILL])
    steps.append(StepRecord(11.0, 12.0, (), waiting=(7,)))
    assert "Request 7 has ended at 1.00 s, and is in the queue at 1.00 s." in describe_gantt((requests, steps))


def test_a_request_that_vanished_is_said():
    requests, steps = by_hand([PREFILL])
    requests.append(asked(8, 2, 5, arrival=10.0))
    text = describe_gantt((requests, steps))
    assert "Request 8 never ends: 0 of 5 tokens, never computed, and not in the queue." in text


def test_aborted_requests_end_and_are_marked_but_not_wrong():
    requests = workload(4)
    requests.append(asked(4, 600, 5, arrival=0.4))
    run = simulated(continuous, requests, num_blocks=24)
    text, figure = describe_gantt(run), draw_gantt(run)
    assert requests[4].error
    assert "!" not in text
    assert f"  Aborted: request 4. The first: {requests[4].error}" in text
    assert "aborted" in [one.get_text() for one in figure.legends[0].get_texts()]


# ---- the real engine ---------------------------------------------------------------------------------------------


def test_the_steps_of_the_real_engine_are_drawn_as_those_of_a_simulation_are():
    network = tiny_model(num_hidden_layers=1)
    cache = kv_cache.PagedKVCache(kv_cache.CacheLayout.of(network.config, torch.float64), 12, block_size=4)
    clock, steps = iter(range(1000, 2000)), []
    planner = scheduler.ContinuousScheduler(cache, 3, 8)
    core = EngineCore(
        network, cache, planner, sampling.Sampler(), [], 96, clock=lambda: float(next(clock)), on_step=steps.append
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [scheduler.Request(n, random_ids(9, n), params, arrival=1000.0) for n in range(4)]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    run = ServingRun(requests, steps)
    text, axes = describe_gantt({"engine": (requests, steps)}), draw_gantt({"engine": run}).axes[0]
    assert "!" not in text
    assert "engine: 4 requests in" in text
    for row, request in enumerate(requests):
        whole = sum(seconds(axes, what, row) for what in LOOKS)
        assert whole == pytest.approx(request.last_token - request.arrival)


def test_a_cache_without_blocks_is_drawn_without_them():
    requests, steps = by_hand([PREFILL])
    assert "blocks" not in describe_gantt((requests, steps))
    drawn = draw_gantt((requests, steps))
    assert any("has no blocks" in one.get_text() for one in drawn.axes[2].texts)


# ---- form and manners --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({}, "There is no run to draw"),
        ({"a": ([], [])}, "The run 'a' has no requests"),
        ({"a": 5}, "The run 'a' is a int; expected what `simulate` returns"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_sentence(runs, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        gantt(runs)


def test_a_run_in_which_nothing_was_computed_is_drawn():
    text = describe_gantt(([asked(0, 3, 3)], []))
    assert "Request 0 never ends: 0 of 3 tokens, never computed, still in the queue." in text
    assert gantt(([asked(0, 3, 3)], [])).png().startswith(b"\x89PNG")


def test_of_too_many_requests_the_wrong_ones_are_shown_and_the_rest_is_spread():
    run = play(lambda cache: Starving(cache, 32), workload(150, rate=20.0), most=2000)
    figure = draw_gantt(run)
    assert {"3", "5"} <= set(names(figure.axes[0]))
    assert wrong_rows(figure) == ["3", "5"]
    assert figure.axes[0].get_ylim() == (47.5, -0.5)
    assert max(int(name) for name in names(figure.axes[0])) > 140
    assert any("48 of 150" in one.get_text() for one in figure.axes[0].texts)


def test_priorities_are_shown_where_they_differ():
    requests = [asked(0, 5, 5), asked(1, 5, 5, priority=2)]
    assert names(draw_gantt(simulated(continuous, requests)).axes[0]) == ["0 (p0)", "1 (p2)"]


def test_looks_that_touch_differ_in_hatch_height_or_lightness():
    def lightness(look):
        return sum(int(to_hex(look[0][0])[place : place + 2], 16) * weight
                   for place, weight in ((1, 0.3), (3, 0.59), (5, 0.11)))  # fmt: skip

    for one, other in combinations(LOOKS.values(), 2):
        assert one[0][1] != other[0][1] or abs(one[2] - other[2]) > 0.2 or abs(lightness(one) - lightness(other)) > 60


@pytest.mark.parametrize("window", [None, (0.5, 1.5)])
def test_no_labels_overlap_and_nothing_leaves_the_figure(runs, window):
    wrong = play(lambda cache: KeepsPlaces(cache, 6), workload(priorities=(0, 1)), 200)
    figure = draw_gantt(
        {**runs, "a name that is much too long to be shown whole in the title of a panel": wrong}, window
    )
    figure.draw_without_rendering()
    texts = [*figure.texts, *figure.legends[0].get_texts()]
    for axes in figure.axes:
        texts += [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label]
    texts += figure.axes[-1].get_xticklabels()
    drawn = [(one.get_text(), one.get_window_extent()) for one in texts if one.get_text()]
    low, high = figure.axes[0].get_xlim()
    inside = [box for text, box in drawn]
    for (text, one), (other_text, other) in combinations(drawn, 2):
        assert not one.padded(-1).overlaps(other.padded(-1)), (text, other_text)
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= -1 for box in inside)
    assert low < high


def test_figures_do_not_pile_up(runs):
    seen = [weakref.ref(draw_gantt(runs, (0.0, end))) for end in (1.0, 2.0, 3.0)]
    gc.collect()
    assert [figure for figure in seen if figure() is not None] == []
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
