"""Stage times spread unevenly, and fractional slot flows made whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.solvers.search.baselines import simulated_schedule
from batchbound.solvers.search.params import SearchParams
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.stages.annealing import initial_times
from batchbound.solvers.search.stages.search import whole_slots
from batchbound.solvers.search.stages.slot_price import slot_price
from batchbound.solvers.search.stages.spans import LengthProfile, Spans
from batchbound.solvers.search.stages.times import StageCosts


def profile_of(decode_steps: list[int]) -> LengthProfile:
    return LengthProfile.of(np.array(decode_steps))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_spread_stages_rise_from_the_start_to_the_end_and_are_no_more_than_requests(
    decode_steps: list[int], slots: int
) -> None:
    profile = profile_of(decode_steps)
    costs = StageCosts(0.02, 0.03, slots, profile.longest)
    end = max(profile.longest, -(-sum(decode_steps) // slots))
    for times in initial_times(profile, costs, np.random.default_rng(0), 300):
        assert times[0] == 0
        assert times[-1] == end
        assert (np.diff(times) >= 0).all()
        assert len(times) - 1 <= max(len(decode_steps), -(-len(decode_steps) // slots))


def test_uneven_stages_need_fewer_slots_than_even_ones() -> None:
    decode_steps = np.random.default_rng(1).integers(20, 400, 200)
    profile = LengthProfile.of(decode_steps)
    end = -(-int(decode_steps.sum()) // 10)
    costs = StageCosts(0.02, 0.03, 10, profile.longest)
    uneven = next(initial_times(profile, costs, np.random.default_rng(0), 400))
    even = np.rint(np.linspace(0, end, len(uneven))).astype(np.int64)
    prices = [slot_price(times, profile) for times in (uneven, even)]
    assert prices[0] is not None
    assert prices[1] is not None
    assert prices[0].slots < prices[1].slots


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.lists(st.integers(1, 30), max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_price_of_stage_times_is_the_slots_that_a_flow_needs(
    lengths: list[int], inner: list[int]
) -> None:
    profile = profile_of(lengths)
    times = np.array([0, *sorted(inner), 30 + max(lengths)])
    spans = Spans.between(times, profile)
    entering = np.equal.outer(np.arange(1, len(times) - 1), spans.last).astype(float)
    leaving = np.equal.outer(np.arange(1, len(times) - 1), spans.first).astype(float)
    # Slots leave the first stage or wait there; no more leave a stage than have come to it so far.
    slots = np.zeros(len(spans)) + (spans.first == 0)
    waits = np.cumsum(leaving - entering, axis=0)
    enough = [(np.minimum(spans.decode_steps, profile.longest) >= length) * -1.0 for length in lengths]
    wanted = [-float(sum(other >= length for other in lengths)) for length in lengths]
    rows = np.vstack(
        [np.column_stack([waits, -np.ones(len(waits))]), *(np.append(row, 0.0) for row in enough)]
    )
    cost = np.append(slots, 1.0)
    least = linprog(cost, A_ub=rows, b_ub=np.concatenate([np.zeros(len(waits)), wanted]))
    price = slot_price(times, profile)
    assert price is not None
    assert price.slots == pytest.approx(least.fun, abs=1e-6)
    proven = slot_price(times, profile, most=0.5 * price.slots)
    assert proven is not None
    assert 0.5 * price.slots < proven.slots <= price.slots + 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_a_flow_made_whole_serves_every_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decode_steps = rng.integers(10, 300, 120)
    problem = Problem(Workload.from_lengths([1] * 120, decode_steps.tolist()), CostModel.paper(), 12)
    profile = LengthProfile.of(problem.decode_steps)
    end = int(1.02 * decode_steps.sum() / 12)
    times = np.concatenate(([0], np.sort(rng.integers(1, end, 34)), [end]))
    price = slot_price(times, profile)
    assert price is not None
    times = np.rint(times * max(1.0, price.slots / 12) * 1.01).astype(np.int64)
    flow = whole_slots(times, profile, 12, np.inf)
    assert flow is not None, "these seeds have a whole flow near the fractional one"
    spans, used = flow
    net = np.bincount(spans.first, used, len(times)) - np.bincount(spans.last, used, len(times))
    assert np.cumsum(net)[:-1].max() <= 12
    stage = spans.first[spans.of_requests(used, problem.decode_steps)]
    schedule = Schedule.from_bins(problem, stage, np.diff(times))
    assert schedule.check(problem) is None


@pytest.mark.slow
def test_lengths_that_all_differ_are_scheduled_better_than_by_any_rule() -> None:
    rng = np.random.default_rng(3)
    decode_steps = np.unique(rng.gamma(1.5, 300, 260).astype(np.int64) + 5)[:240]
    rng.shuffle(decode_steps)
    problem = Problem(
        Workload.from_lengths([1] * len(decode_steps), decode_steps.tolist()), CostModel.paper(), 24
    )
    rules = [simulated_schedule(problem, name, np.inf) for name in ("lpt", "lpt-ski", "threshold")]
    least = min(rule.makespan(problem) for rule in rules if rule is not None)
    found = search_schedule(problem, iterations=12, seed=0)
    assert found.schedule.check(problem) is None
    assert found.makespan < 0.99 * least
    assert len(SearchParams().patiences) == len(set(SearchParams().patiences))


@pytest.mark.slow
def test_the_same_work_gives_the_same_schedule_with_stages_by_the_dozen() -> None:
    problem = Problem(generate("sharegpt", 1, 200), CostModel.paper(), 16)
    one, other = (search_schedule(problem, iterations=15, seed=4).schedule for _ in range(2))
    assert np.array_equal(one.bin_of, other.bin_of)
    assert np.array_equal(one.decode_steps, other.decode_steps)


def test_spans_are_those_of_all_pairs_of_stages_that_no_shorter_one_replaces() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        times = np.sort(rng.integers(0, rng.integers(2, 60), rng.integers(2, 12)))
        profile = LengthProfile.of(rng.integers(1, rng.integers(2, 30), 4))
        expected = [
            (first, last, min(int(times[last] - times[first]), profile.longest))
            for first in range(len(times))
            for last in range(first + 1, len(times))
            if times[last] - times[first] >= profile.shortest
            and times[last - 1] - times[first] < profile.longest
        ]
        spans = Spans.between(times, profile)
        found = zip(spans.first.tolist(), spans.last.tolist(), spans.decode_steps.tolist(), strict=True)
        assert list(found) == expected
        assert Spans.number_between(times, profile) == len(expected)


def test_thousands_of_stages_are_not_listed_pair_by_pair() -> None:
    times = np.arange(1_000_000)
    assert Spans.number_between(times, LengthProfile.of(np.array([1, 3]))) == 2_999_994
    costs = StageCosts(1.0, 1.0, 1, 2)
    assert not list(initial_times(LengthProfile.of(np.full(5000, 2)), costs, np.random.default_rng(0), 1000))
