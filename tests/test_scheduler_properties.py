"""Whatever arrives or is aborted, however small the cache: requests end once, in bounded steps, with their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from acting_engine import Engine, answer, paged, request
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import kv_cache, scheduler, simulation
from llmfromscratch.errors import OutOfMemory


@dataclass(frozen=True)
class Arrival:
    """One request of a load. gap: steps since the one before. aborted: in which step after its arrival, if ever."""

    gap: int
    prompt: list[int]
    max_tokens: int
    priority: int
    aborted: int | None


@dataclass(frozen=True)
class Limits:
    """Of a scheduler and its cache."""

    num_blocks: int
    block_size: int
    max_requests: int
    budget: int
    ageing: float

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size


ARRIVALS = st.builds(
    Arrival,
    gap=st.integers(0, 4),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),  # of two ids: many begin alike
    max_tokens=st.integers(1, 8),
    priority=st.integers(-1, 2),
    aborted=st.none() | st.none() | st.integers(0, 12),
)
LOADS = st.lists(ARRIVALS, min_size=1, max_size=8)
LIMITS = st.builds(
    Limits,
    num_blocks=st.integers(1, 8),
    block_size=st.integers(1, 4),
    max_requests=st.integers(1, 5),
    budget=st.integers(1, 9),
    ageing=st.sampled_from([0.0, 1.0, 5.0, 1e9]),
)
POLICIES = st.sampled_from(["arrival", "shortest", "prefix"])


def policy_of(name, cache, ageing):
    if name == "shortest":
        return scheduler.ShortestFirst(seconds_per_token=1.0, ageing=ageing)
    if name == "prefix":
        return scheduler.LongestPrefixMatch(cache, seconds_per_token=1.0, ageing=ageing)
    return scheduler.FirstComeFirstServed(ageing)


class Watched(Engine):
    """An engine that holds every step against the promises of a scheduler."""

    def __init__(self, cache, make_scheduler, load: list[Arrival], limits: Limits):
        super().__init__(cache, make_scheduler)
        self.limits, self.load = limits, load
        self.requests: list[scheduler.Request] = []
        self.aborted: set[int] = set()
        self.ends: dict[int, tuple] = {}

    def run_load(self, most: int) -> int:
        """Runs all of it; returns the number of steps that computed something."""
        arrivals, at = [], 0
        for number, one in enumerate(self.load):
            at += one.gap
            arrivals.append((at, one, request(number, one.prompt, one.max_tokens, float(at), one.priority)))
        self.requests = [new for _, _, new in arrivals]
        steps = 0
        while steps <= most and (self.busy or self.now <= at):
            for arrived, one, new in arrivals:
                if arrived == self.now:
                    self.add_or_fail(new)
                if one.aborted is not None and arrived + one.aborted == self.now and not new.ended:
                    self.scheduler.abort(new, "nobody listens any more")
                    self.aborted.add(new.request_id)
                    self.cache.audit()
            steps += bool(self.watched_step())
        assert steps <= most, "more steps than there can be"
        return steps

    def add_or_fail(self, new: scheduler.Request) -> None:
        try:
            self.scheduler.add(new)
        except OutOfMemory as error:
            self.scheduler.abort(new, str(error))

    def watched_step(self) -> list[scheduler.Work]:
        running = [one for one in self.scheduler.running if not one.ended]
        oldest = min(running, key=self.age, default=None)
        waiting = list(self.scheduler.waiting)
        plan = self.step()
        begun = [one for one in waiting if one not in self.scheduler.waiting and one.error is None]
        assert oldest is None or oldest.state is not scheduler.State.PREEMPTED, "the oldest lost its memory"
        assert plan or not self.busy, "an empty step although there is something to do"
        assert len({work.request for work in plan}) == len(plan)
        assert len({work.request for work in plan} | set(self.scheduler.running)) <= self.limits.max_requests
        assert set(self.cache.block_tables) == {one.request_id for one in self.scheduler.running}
        for one in self.requests:
            if one.ended:
                end = (one.state, one.finish_reason, tuple(one.token_ids))
                assert self.ends.setdefault(one.request_id, end) == end, "it ended twice"
                assert one not in self.scheduler.waiting
        self.check_order(begun)
        return plan

    def check_order(self, begun: list[scheduler.Request]) -> None:
        """For the scheduler at hand to say."""

    def age(self, one: scheduler.Request) -> tuple[float, int]:
        """Worked out anew here: the time of arrival, `ageing` earlier for each level of priority."""
        return one.arrival - one.params.priority * self.limits.ageing, one.request_id

    def check_ends(self, room_for_the_last: int) -> None:
        """room_for_the_last: tokens of cache that the last token of an answer needs."""
        for one in self.requests:
            prompt, most = len(one.prompt_token_ids), one.params.max_tokens
            assert one.ended
            assert one.token_ids == answer(one.prompt_token_ids, len(one.token_ids))
            if one.request_id in self.aborted:
                assert (one.state, one.error) == (scheduler.State.ABORTED, "nobody listens any more")
            elif prompt + most - 1 + room_for_the_last <= self.limits.capacity:
                assert (one.state, one.finish_reason) == (scheduler.State.FINISHED, "length"), one.error
                assert len(one.token_ids) == most
            else:
                assert (one.state, one.finish_reason) == (scheduler.State.ABORTED, "abort")
                assert f"holds {self.limits.capacity}." in one.error
        assert self.held_blocks() == 0
        assert not self.cache.block_tables


class WatchedContinuous(Watched):
    def check_order(self, begun):
        plan = self.history[-1]
        assert all(work.tokens >= 1 and work.padding == 0 for work in plan)
        assert sum(work.tokens for work in plan) <= self.limits.budget
        if self.scheduler.policy == scheduler.FirstComeFirstServed(self.limits.ageing) and begun:
            left = [self.age(one) for one in self.scheduler.waiting]
            assert max(map(self.age, begun)) < min(left, default=(math.inf, 0)), "somebody was overtaken"
        for one in self.requests:
            if one.state is scheduler.State.ABORTED and one.error != "nobody listens any more":
                room = self.limits.capacity - len(one.prompt_token_ids)
                assert len(one.token_ids) == max(0, room + 1), "it was given up before its memory was full"


def most_steps(load: list[Arrival], limits: Limits, displacements: int) -> int:
    """Steps that decode give a token each, for good. A step in which nobody decodes computes a chunk of the oldest's
    text, which is lost only if somebody older is let in before it is done; so a text is begun as the oldest's once for
    each request, and once more for each displacement."""
    tokens = sum(one.max_tokens for one in load)
    longest = max(len(one.prompt) + one.max_tokens for one in load)
    return tokens + (len(load) + displacements) * math.ceil(longest / limits.budget)


def watch_continuous(cache, load, limits, policy="arrival"):
    def make(cache):
        order = policy_of(policy, cache, limits.ageing)
        return scheduler.ContinuousScheduler(cache, limits.max_requests, limits.budget, order)

    engine = WatchedContinuous(cache, make, load, limits)
    # in the order of arrival only newcomers can be older than who runs; other orders may let anybody in late
    engine.run_load(most_steps(load, limits, len(load) if policy == "arrival" else len(load) ** 2))
    engine.check_ends(room_for_the_last=0)
    return engine


@settings(deadline=None, max_examples=500)
@given(LOADS, LIMITS, POLICIES, st.booleans())
def test_continuous_batching_keeps_its_promises_on_a_paged_cache(load, limits, policy, sharing):
    watch_continuous(paged(limits.num_blocks, limits.block_size, sharing), load, limits, policy)


@settings(deadline=None, max_examples=1500)
@given(LOADS, LIMITS, POLICIES)
def test_continuous_batching_keeps_its_promises_in_a_simulation(load, limits, policy):
    watch_continuous(simulation.SimulatedCache(limits.num_blocks, limits.block_size), load, limits, policy)


@settings(deadline=None, max_examples=60)
@given(LOADS, LIMITS)
def test_the_same_load_gives_the_same_run(load, limits):
    def plans():
        engine = watch_continuous(simulation.SimulatedCache(limits.num_blocks, limits.block_size), load, limits)
        return [[(work.request.request_id, work.start, work.tokens) for work in plan] for plan in engine.history]

    assert plans() == plans()


@settings(deadline=None, max_examples=400)
@given(LOADS, LIMITS, st.booleans(), st.booleans())
def test_static_batching_keeps_its_promises_on_a_paged_cache(load, limits, bucket, sharing):
    def make(cache):
        return scheduler.StaticScheduler(cache, limits.max_requests, bucket)

    engine = Watched(paged(limits.num_blocks, limits.block_size, sharing), make, load, limits)
    engine.run_load(sum(one.max_tokens for one in load))  # every step gives somebody a token
    engine.check_ends(room_for_the_last=1)  # a row that has ended still computes one token beside the others
    computed = sum(work.tokens + work.padding for plan in engine.history for work in plan)
    planner = engine.scheduler
    assert planner.useful_tokens + planner.padding_tokens + planner.idle_tokens == computed


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_simulated_cache_has_room_exactly_when_the_paged_one_has(data):
    blocks, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    caches = [simulation.SimulatedCache(blocks, size), paged(blocks, size, prefix_sharing=False)]
    assert caches[0].capacity == caches[1].capacity == blocks * size
    for _ in range(data.draw(st.integers(1, 12))):
        number, tokens = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 6))
        if data.draw(st.booleans()):
            outcomes = [takes(cache, number, tokens) for cache in caches]
            assert outcomes[0] == outcomes[1]
        else:
            for cache in caches:
                cache.release(number)
        assert len({cache.length(number) for cache in caches}) == 1
        assert len({cache.allocator.num_available for cache in caches}) == 1
        for cache in caches:
            cache.audit()


def takes(cache, number: int, tokens: int) -> bool:
    """Whether a request can compute so many tokens more; they are computed."""
    try:
        cache.reserve(number, tokens)
    except OutOfMemory:
        return False
    one = request(number, cache.length(number) + tokens)
    Engine(cache, lambda _: None).compute([scheduler.Work(one, cache.length(number), tokens)])
    return True


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=6), st.integers(1, 4))
def test_a_prefix_that_is_found_is_the_one_that_would_be_matched_and_finding_changes_nothing(prompts, size):
    cache = paged(6 * 14, size)  # so large that nothing is evicted
    for number, prompt in enumerate(prompts):
        before = (list(cache.allocator.kept), cache.prefix_query_tokens, dict(cache.block_tables))
        found = cache.find_prefix(prompt)
        assert (list(cache.allocator.kept), cache.prefix_query_tokens, dict(cache.block_tables)) == before
        assert found == cache.match_prefix(number, prompt)
        assert found == longest_shared(prompt, prompts[:number], size)
        cache.reserve(number, len(prompt) - found)
        one = scheduler.Request(number, prompt, request(0, 1).params)
        Engine(cache, lambda _: None).compute([scheduler.Work(one, found, len(prompt) - found)])
        cache.release(number)


def longest_shared(prompt, earlier, size) -> int:
    """Whole blocks at the front of a prompt that an earlier one had too; the last token is never among them."""
    shared = [
        next((at for at, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other)))
        for other in earlier
    ]
    return min(max(shared, default=0), len(prompt) - 1) // size * size


def test_the_caches_without_sharing_find_nothing():
    caches = [kv_cache.NoKVCache(1), kv_cache.ConcatKVCache(1), kv_cache.StaticKVCache(paged(1).layout, 2, 16)]
    assert [cache.find_prefix([1, 2, 3]) for cache in caches] == [0, 0, 0]
    assert [cache.capacity for cache in caches] == [None, None, 16]
