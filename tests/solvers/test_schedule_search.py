"""The schedule search: construction, slot flow, annealing over stage times, limits."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.makespan import best_bound
from batchbound.solvers.search.constructive import Memory, ski_rental_schedule
from batchbound.solvers.search.params import SearchParams
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.stages import annealing as stage_annealing
from batchbound.solvers.search.stages import search as stage_search
from batchbound.solvers.search.stages.annealing import StageAnnealing
from batchbound.solvers.search.stages.parameters import StageTimeParameters
from batchbound.solvers.search.stages.search import whole_slots
from batchbound.solvers.search.stages.slot_price import (
    SlotPrice,
    slot_price,
    slots_at_least,
    slots_by_lengths,
)
from batchbound.solvers.search.stages.spans import LengthProfile, Spans
from batchbound.solvers.search.stages.times import StageCosts, StageTimesSearch, moved

SMALL = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=14)


def problem_of(
    lengths: list[tuple[int, int]], slots: int, cost: CostModel | None = None, **limits: int | bool | None
) -> Problem:
    prompts, answers = zip(*lengths, strict=True)
    workload = Workload.from_lengths(prompts, answers)
    return Problem(workload, cost or CostModel.paper(), slots, **limits)  # type: ignore[arg-type]


def batch_like(seed: int, count: int, slots: int, **limits: int | None) -> Problem:
    """Answers of which half reach the cap of 512 tokens, as in the hybrid paper's Table III."""
    rng = np.random.default_rng(seed)
    answers = np.where(
        rng.random(count) < 0.5, 512, np.clip(rng.gamma(1.5, 130.0, count), 1, 511).astype(int)
    )
    prompts = np.clip(rng.lognormal(4.16, 0.35, count), 1, 400).astype(int)
    return problem_of(list(zip(prompts.tolist(), answers.tolist(), strict=True)), slots, None, **limits)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    lengths = draw(SMALL)
    first = draw(st.booleans())
    peak = max(p + n for p, n in lengths)
    capacity = draw(st.none() | st.integers(peak, 3 * peak))
    cap = draw(st.none() | st.integers(9, 30))
    return problem_of(
        lengths,
        draw(st.integers(1, 4)),
        kv_capacity=capacity,
        prefill_token_cap=cap,
        prefill_emits_first_token=first,
    )


@given(problems(), st.sampled_from([0.0, 0.5, 3.0]), st.none() | st.integers(1, 3))
def test_the_ski_rental_schedule_keeps_every_rule(
    problem: Problem, patience: float, burst: int | None
) -> None:
    schedule = ski_rental_schedule(problem, patience=patience, burst=burst).without_idle_steps(problem)
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) >= best_bound(problem).seconds - 1e-9


def test_a_patient_rule_opens_fewer_stages() -> None:
    problem = batch_like(0, 400, 40)
    stages = [ski_rental_schedule(problem, patience=p).prefill_stages() for p in (0.1, 0.5, 4.0)]
    assert stages == sorted(stages, reverse=True)
    assert stages[0] > stages[-1]


def test_longest_first_with_ski_rental_is_within_two_percent_of_the_bound() -> None:
    problem = batch_like(1, 1319, 200)
    assert best_bound(problem).gap(ski_rental_schedule(problem).makespan(problem)) < 0.02


def test_a_free_step_cost_waits_for_everything_to_finish() -> None:
    cost = CostModel(1.0, 0.0, 0.0, 0.0)
    schedule = ski_rental_schedule(problem_of([(1, 3), (1, 1), (1, 1), (1, 1)], 2, cost))
    assert schedule.decode_steps.tolist() == [3, 1]


def test_memory_counts_what_running_requests_will_still_take() -> None:
    problem = problem_of([(4, 6), (4, 6), (4, 2)], 3, kv_capacity=14)
    memory = Memory(problem, 14)
    assert memory.hold(0, 0)  # holds 4 tokens now, 9 in its last decode step
    assert not memory.hold(1, 0)  # 9 + 9 in decode step 6
    assert memory.hold(2, 0)  # 5 + 5 in decode step 2, then it is gone
    assert not memory.hold(1, 0)
    memory.advance(6)
    assert memory.hold(1, 6)


def test_four_requests_of_two_steps_need_two_slots_in_two_stages() -> None:
    profile = LengthProfile.of(np.array([2, 2, 2, 2]))
    price = slot_price(np.array([0, 2, 4]), profile)
    assert price is not None
    assert price.slots == pytest.approx(2.0)
    assert slot_price(np.array([0, 1]), profile) is None


def test_a_request_between_two_span_lengths_takes_the_longer_one() -> None:
    profile = LengthProfile.of(np.array([3, 3, 2]))
    price = slot_price(np.array([0, 2, 4]), profile)
    assert price is not None
    assert price.slots == pytest.approx(2.5)  # a slot for each 3, half of one for the 2


def test_lengths_alone_fill_the_shortest_spans_that_hold_them() -> None:
    profile = LengthProfile.of(np.array([1, 2, 2, 3]))
    # Spans of 2, 3 and 5 steps hold 1, 2 and 2 in the first and 3 in the second; 2 steps do not hold 3.
    assert slots_by_lengths(np.array([[0, 2, 5]]), profile) == pytest.approx([9 / 5])
    assert slots_by_lengths(np.array([[0, 1, 2], [0, 0, 0]]), profile).tolist() == [np.inf, np.inf]


def random_times(rng: np.random.Generator, longest: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(rng.integers(0, longest + 1, rng.integers(1, 7)))))


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_prices_made_elsewhere_never_ask_for_more_slots_than_are_needed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = LengthProfile.of(rng.integers(0, 9, 12))
    times = random_times(rng, profile.longest)
    others = moved(times, profile, rng, 6)
    price = slot_price(times, profile)
    if price is None:
        return
    bounds = slots_at_least(others, price.value[None, None], profile)
    bounds = np.maximum(bounds, slots_by_lengths(others, profile))
    itself = slots_at_least(times[None], price.value[None, None], profile)
    assert itself[0] == pytest.approx(price.slots)
    for other, bound in zip(others, bounds, strict=True):
        needed = slot_price(other, profile)
        assert needed is None or bound <= needed.slots + 1e-6


@settings(deadline=None)  # the first example loads the solvers
@given(st.integers(0, 10**6))
def test_whole_slots_serve_every_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    decode_steps = rng.integers(1, 9, 12)
    profile = LengthProfile.of(decode_steps)
    times = random_times(rng, profile.longest)
    price = slot_price(times, profile)
    slots = 12 if price is None else int(np.ceil(price.slots - 1e-6)) + 1
    flow = whole_slots(times, profile, slots, 5.0)
    if flow is None:
        return
    spans, used = flow
    stage = spans.first[spans.of_requests(used, decode_steps)]
    starts = times[stage]
    assert (starts + decode_steps <= times[-1]).all()
    running = [(starts <= r) & (r < starts + decode_steps) for r in range(int(times[-1]))]
    assert max(int(now.sum()) for now in running) <= slots


def test_neighbouring_times_start_at_zero_and_never_decrease() -> None:
    profile = LengthProfile.of(np.array([3, 7, 12]))
    neighbours = moved(np.array([0, 3, 10, 12]), profile, np.random.default_rng(0), 200)
    assert len(neighbours) > 50
    assert (neighbours[:, 0] == 0).all()
    assert (np.diff(neighbours, axis=1) >= 0).all()


def test_many_prices_bound_the_slots_as_the_best_of_them_does() -> None:
    problem = batch_like(7, 200, 20)
    profile = LengthProfile.of(problem.decode_steps)
    times = np.asarray(ski_rental_schedule(problem).starts)
    others = moved(times, profile, np.random.default_rng(1), 12)
    prices = [price for each in others[:4] if (price := slot_price(each, profile)) is not None]
    values = np.array([price.value for price in prices])[:, None]
    alone = [slots_at_least(others, values[[k]], profile) for k in range(len(prices))]
    assert np.ptp(alone, axis=0).max() > 0, "else one price would do"
    assert slots_at_least(others, values, profile) == pytest.approx(np.max(alone, axis=0))
    # The same prices given for each candidate apart.
    each = np.repeat(values, len(others), axis=1)
    assert slots_at_least(others, each, profile) == pytest.approx(np.max(alone, axis=0))


@pytest.mark.parametrize(("kink", "lacking", "spare"), [(0.0, 2.0, 2.0), (0.5, 3.0, 1.0), (0.9, 3.8, 0.2)])
def test_a_kink_makes_slots_lacking_dearer_and_slots_to_spare_cheaper(
    kink: float, lacking: float, spare: float
) -> None:
    costs, times = StageCosts(stage=1.0, decode_step=2.0, slots=10), np.array([0, 4, 10])
    assert float(costs.seconds(times)) == 22.0
    assert float(costs.guide(times, 11.0, kink)) == pytest.approx(22.0 + lacking)
    assert float(costs.guide(times, 9.0, kink)) == pytest.approx(22.0 - spare)


def test_annealing_changes_the_number_of_stages() -> None:
    problem = batch_like(2, 60, 10)
    profile = LengthProfile.of(problem.decode_steps)
    start = np.linspace(0, 5 * 512, 21).astype(np.int64)
    walk = StageTimesSearch(profile, StageCosts(0.025, 0.029, 10), start, np.random.default_rng(0))
    sizes = set()
    for _ in range(40):
        walk.step(0.02, 0.15)
        sizes.add(len(walk.times))
    assert len(sizes) > 1
    assert walk.feasible()


@pytest.mark.slow
def test_the_search_is_mostly_optimal_on_tiny_problems(
    optimal_makespan: Callable[[Problem], float],
) -> None:
    stage = CostModel.paper().prefill_base
    optimal = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        lengths = list(zip(rng.integers(1, 9, 6).tolist(), rng.integers(1, 7, 6).tolist(), strict=True))
        kinds: list[dict[str, int | bool]] = [
            {},
            {"prefill_token_cap": 12},
            {"kv_capacity": 26},
            {"prefill_emits_first_token": True},
        ]
        problem = problem_of(lengths, 2 + seed % 2, None, **kinds[seed % 4])
        found = search_schedule(problem, iterations=80, seed=seed)
        optimum = optimal_makespan(problem)
        assert found.schedule.check(problem) is None
        assert optimum - 1e-9 <= found.makespan <= optimum + 1.5 * stage
        optimal += found.makespan <= optimum + 1e-9
    assert optimal >= 8


@settings(max_examples=8, deadline=None)
@given(problems(), st.integers(0, 3))
def test_the_search_never_returns_less_than_its_start(problem: Problem, seed: int) -> None:
    start = ski_rental_schedule(problem, patience=0.0, burst=1)
    found = search_schedule(problem, iterations=4, seed=seed, start=start)
    assert found.schedule.check(problem) is None
    assert found.makespan <= start.makespan(problem) + 1e-12
    assert found.makespan == pytest.approx(found.schedule.makespan(problem))


@pytest.mark.parametrize("limits", [{}, {"prefill_token_cap": 600}, {"kv_capacity": 3000}])
def test_the_same_seed_and_work_give_the_same_schedule(limits: dict[str, int]) -> None:
    problem = batch_like(3, 40, 16, **limits)
    first, second = (search_schedule(problem, iterations=6, seed=5).schedule for _ in range(2))
    assert first.bin_of.tolist() == second.bin_of.tolist()
    assert first.decode_steps.tolist() == second.decode_steps.tolist()


def test_prompt_tokens_count_towards_the_least_of_the_stages_that_hold_them() -> None:
    costs = StageCosts(stage=1.0, decode_step=2.0, slots=10, lift=9.0, tokens=100.0)
    seconds = [float(costs.seconds(np.arange(stages + 1))) - 2.0 * stages for stages in (2, 4, 100)]
    assert seconds[:2] == [2.0, pytest.approx(4.0 + (36 - 30) / 5)]
    assert seconds[2] == pytest.approx(100.0 + 900 - 100)


def test_stages_that_hold_their_tokens_for_nothing_are_not_taken_for_free_without_end() -> None:
    rng = np.random.default_rng(3)
    decode_steps, prompts = rng.integers(20, 400, 60), rng.integers(100, 200, 60)
    cost = CostModel(0.0, 0.01 / 256, 0.001, 0.0, prefill_floor=0.01)
    problem = Problem(Workload.from_lengths(prompts, decode_steps), cost, 8)
    # The best rule takes 1.910 s.
    assert search_schedule(problem, iterations=60).makespan < 1.905


def test_the_search_improves_on_longest_first_with_ski_rental() -> None:
    problem = batch_like(4, 120, 20)
    found = search_schedule(problem, iterations=60, seed=0)
    assert found.makespan < ski_rental_schedule(problem).makespan(problem)
    times, makespans, _ = zip(*found.trace, strict=True)
    assert list(times) == sorted(times)
    assert list(makespans) == sorted(makespans, reverse=True)
    assert makespans[-1] == found.makespan


def test_full_levels_of_equal_requests_are_left_as_they_are() -> None:
    problem = problem_of([(1, 5)] * 6, 2)
    found = search_schedule(problem, iterations=20, seed=0)
    assert found.schedule.decode_steps.tolist() == [5, 5, 5]
    assert found.makespan == pytest.approx(best_bound(problem).seconds)


def test_a_start_is_good_enough_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def priced(times: IntArray, profile: LengthProfile) -> SlotPrice | None:
        asked.append(len(times))
        return slot_price(times, profile)

    monkeypatch.setattr(stage_annealing, "slot_price", priced)
    problem = batch_like(4, 120, 20)
    rng, costs = np.random.default_rng(0), StageCosts(0.1, 0.03, 20)
    StageAnnealing.of(problem, costs, rng, lambda: False, (400, 4000))
    # Constructed stages and some spread unevenly, then the best of them once more for how long it is.
    assert len(asked) == len(costs.values.start_patiences) + costs.values.start_numbers + 1
    asked.clear()
    StageAnnealing.of(problem, costs, rng, lambda: True, (400, 4000))
    assert len(asked) == 2


def test_where_whole_slots_fall_short_the_times_are_stretched(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []

    def falling_short(
        times: IntArray, profile: LengthProfile, slots: int, seconds: float, values: StageTimeParameters
    ) -> tuple[Spans, IntArray] | None:
        ends.append(int(times[-1]))
        return None if len(ends) <= 2 else whole_slots(times, profile, slots, seconds, values)

    monkeypatch.setattr(stage_search, "whole_slots", falling_short)
    problem = batch_like(4, 120, 20)
    found = search_schedule(problem, iterations=60, seed=0)
    assert ends[:3] == [ends[0], ends[0] + 1, ends[0] + 2], "at least a decode step, then twice as many"
    assert found.schedule.check(problem) is None
    assert found.makespan < ski_rental_schedule(problem).makespan(problem)


def test_the_search_stops_at_its_time_limit() -> None:
    problem = batch_like(5, 300, 40)
    begun = time.monotonic()
    search_schedule(problem, seconds=0.3, seed=0)
    assert time.monotonic() - begun < 20.0, "without its limit it would not end at all"


def test_a_search_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        search_schedule(batch_like(6, 10, 2))


def test_a_start_that_breaks_a_rule_is_refused() -> None:
    start = ski_rental_schedule(problem_of([(1, 4), (1, 4)], 2))
    with pytest.raises(ValueError, match="breaks a rule"):
        search_schedule(problem_of([(1, 4), (1, 4)], 1), iterations=1, start=start)


def test_the_search_ends_when_nothing_better_exists() -> None:
    problem = problem_of([(3, 4), (5, 4)], 2)
    only = search_schedule(problem, iterations=1)
    found = search_schedule(problem, iterations=10_000, enough=only.makespan)
    assert found.iterations == 0
    assert found.makespan == only.makespan


def test_steps_in_which_nothing_decodes_are_dropped_wherever_they_are() -> None:
    problem = problem_of([(1, 3), (1, 2), (1, 1)], 2, prefill_emits_first_token=True)
    idle = Schedule(np.array([0, 1, 2]), np.array([0, 1, 0]), np.array([4, 2, 3]))
    assert idle.active(problem).tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0]
    dense = idle.without_idle_steps(problem)
    assert dense.decode_steps.tolist() == [2, 1, 0]
    assert dense.check(problem) is None
    assert dense.stage_tokens(problem).tolist() == idle.stage_tokens(problem).tolist()


@pytest.mark.parametrize(("seed", "steps"), [(3, 30), (7, 120)])
@pytest.mark.parametrize("emits", [False, True])
def test_the_last_improvement_is_a_schedule_that_decodes_in_every_step(
    seed: int, steps: int, emits: bool
) -> None:
    workload = generate("table3", seed, 12)
    problem = Problem(workload, CostModel.paper(), 4, prefill_emits_first_token=emits)
    found = search_schedule(problem, iterations=steps, seed=0)
    assert (found.schedule.active(problem) > 0).all()
    assert found.trace[-1][1] == found.makespan


@pytest.mark.slow
def test_no_step_is_idle_before_a_last_stage_of_requests_that_never_decode() -> None:
    lengths = [(1, length) for length in (9, 7, 6, 4, 3, 1, 1, 1)]
    problem = problem_of(lengths, 2, prefill_emits_first_token=True)
    for seed in range(4):
        found = search_schedule(problem, iterations=20, seed=seed)
        assert (found.schedule.active(problem) > 0).all()


@pytest.mark.slow
def test_a_walk_that_meets_no_times_with_slots_enough_ends_in_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StageTimesSearch, "feasible", lambda self: [])
    problem = Problem(generate("table3", 1, 100), CostModel.paper(), 20)
    constructed = [ski_rental_schedule(problem, patience=patience) for patience in SearchParams().patiences]
    found = search_schedule(problem, iterations=100, seed=1)
    assert found.makespan < min(schedule.makespan(problem) for schedule in constructed)
    assert found.schedule.check(problem) is None
