"""Chapter 4's checks accept what is right, however it is written: other ways than the reference's."""

from __future__ import annotations

import mutants
import pytest

from llmfromscratch.course import exercises

STATIC_WASTE = """
def static_waste(prompts, answers):
    needed = 0
    for prompt, answer in zip(prompts, answers):
        needed += prompt + (answer - 1)
    rows, columns = len(prompts), sorted(prompts)[-1] + sorted(answers)[-1] - 1
    return needed, rows * columns
"""
BUCKETS = """
def buckets(lengths, size):
    groups = []
    for length, place in sorted((length, place) for place, length in enumerate(lengths)):
        if not groups or len(groups[-1]) >= size:
            groups.append([])
        groups[-1].append(place)
    return groups
"""
PADDED_STEP = """
def padded_step(rows, cache):
    if not rows:
        return []
    plan, width = [], 0
    for row in rows:
        tokens = len(row.ids[cache.length(row.request_id):]) if row.finish_reason is None else 0
        width = max(width, tokens)
        plan.append((row, tokens))
    return [Work(request=row, start=cache.length(row.request_id), tokens=tokens, padding=width - tokens)
            for row, tokens in plan]
"""
SERVE = """
def serve(network, cache, plan, requests, end_tokens=()):
    for request in requests:
        plan.add(request)
    now = 0
    while True:
        work = plan.schedule(float(now))
        if not work:
            return now
        now += 1
        parts, wanted = [], []
        for one in work:
            if one.tokens == 0:
                continue
            end = one.start + one.tokens
            parts.append((one.request.request_id, one.request.ids[one.start:end], one.start))
            wanted.append(one.tokens - 1 if one.completes else None)
        logits = network(Batch.of(parts, logits_at=wanted), cache)
        tokens = logits.argmax(dim=-1).tolist()
        done = [one.request for one in work if one.completes]
        for request, token in zip(done, tokens):
            request.record(token, float(now))
        for request, token in zip(done, tokens):
            if token in set(end_tokens):
                plan.finish(request, "stop")
            elif len(request.token_ids) >= request.params.max_tokens:
                plan.finish(request, "length")
"""
SERVE_WITH_A_CLOCK_IN_WHOLE_NUMBERS = """
def serve(network, cache, plan, requests, end_tokens=()):
    now = 0
    for request in requests:
        plan.add(request)
    work = plan.schedule(now)
    while work:
        busy = [one for one in work if one.tokens]
        parts = [(w.request.request_id, w.request.ids[w.start : w.start + w.tokens], w.start) for w in busy]
        logits = network(Batch.of(parts), cache)
        now += 1
        for one, row in zip(busy, logits):
            if not one.completes:
                continue
            token = row.argmax().item()
            one.request.record(token, now)
            if token in end_tokens:
                plan.finish(one.request, "stop")
            elif len(one.request.token_ids) >= one.request.params.max_tokens:
                plan.finish(one.request, "length")
        work = plan.schedule(now)
    return now
"""
FIRST_COME_IN_WHOLE_SECONDS = """
@dataclass(frozen=True)
class FirstComeFirstServed:
    ageing: float = 10.0

    def key(self, request):
        key = request.arrival - self.ageing * request.params.priority
        return int(key) if key == int(key) else key
"""
FIRST_COME = """
@dataclass(frozen=True)
class FirstComeFirstServed:
    ageing: float = 10.0

    def key(self, request):
        head_start = self.ageing * request.params.priority
        return request.arrival - head_start
"""
MAKE_ROOM = """
def make_room(planner, request, tokens):
    granted = False
    while not granted:
        try:
            planner.cache.reserve(request.request_id, tokens)
            granted = True
        except OutOfMemory:
            youngest = sorted(planner.running, key=planner.seniority)[-1]
            planner.preempt(youngest)
            if request not in planner.running:
                break
    return granted
"""
MAKE_ROOM_RECURSIVELY = """
def make_room(planner, request, tokens):
    try:
        planner.cache.reserve(request.request_id, tokens)
    except OutOfMemory:
        last = max(planner.running, key=lambda one: planner.seniority(one))
        planner.preempt(last)
        return False if last is request else make_room(planner, request, tokens)
    return True
"""
PLAN_NEXT = """
def plan_next(planner, request):
    done = planner.cache.length(request.request_id)
    todo = request.ids[done : done + planner.budget]
    if not make_room(planner, request, len(todo)):
        return
    planner.plan.update({request.request_id: Work(request=request, start=done, tokens=len(todo))})
    planner.budget = planner.budget - len(todo)
"""
PLAN_NEXT_BY_STATE = """
def plan_next(planner, request):
    start = planner.cache.length(request.request_id)
    if request.state is State.DECODING:
        tokens = 1
    else:
        tokens = min(len(request.prompt_token_ids) + len(request.token_ids) - start, planner.budget)
    if make_room(planner, request, tokens):
        planner.budget -= tokens
        planner.plan[request.request_id] = Work(request, start, tokens)
"""
ADMIT = """
def admit(planner, now):
    for request in list(planner.waiting):
        if planner.budget < 1 or len(planner.running) >= planner.max_requests:
            break
        found = planner.cache.match_prefix(request.request_id, request.ids)
        try:
            planner.cache.reserve(request.request_id, len(request.ids[found:]))
        except OutOfMemory:
            planner.cache.release(request.request_id)
            break
        planner.begin(request, now, found)
        plan_next(planner, request)
"""


@pytest.mark.parametrize(
    ("exercise_id", "source"),
    [
        ("4.1", STATIC_WASTE),
        ("4.2", BUCKETS),
        ("4.3", PADDED_STEP),
        ("4.4", SERVE),
        ("4.4", SERVE_WITH_A_CLOCK_IN_WHOLE_NUMBERS),
        ("4.5", FIRST_COME),
        ("4.5", FIRST_COME_IN_WHOLE_SECONDS),
        ("4.6", MAKE_ROOM),
        ("4.6", MAKE_ROOM_RECURSIVELY),
        ("4.7", PLAN_NEXT),
        ("4.7", PLAN_NEXT_BY_STATE),
        ("4.8", ADMIT),
    ],
)
def test_what_is_right_passes_in_another_way_too(exercise_id, source):
    exercises.find(exercise_id).check(mutants.written(exercise_id, source))
