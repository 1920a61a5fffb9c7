"""The formulations against brute force, against each other, and against the referee."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.formulations.full_model import (
    UnsupportedProblemError,
    bins_needed,
    literal_model,
    read_schedule,
    repaired_model,
    write_schedule,
)
from batchbound.models.formulations.full_rows import PrefillLevel
from batchbound.models.formulations.named import packing_model
from batchbound.models.formulations.slot_free import (
    interval_model,
    list_schedule,
    read_slot_free,
    slot_free_model,
    write_slot_free,
)
from batchbound.solvers.backends.linear import solve_linear
from batchbound.solvers.mip import Formulation, _rule_schedule, solve_full
from batchbound.solvers.result import Limits, Status, StoppedBy

PAPER = CostModel.paper()
HERE = pytest.mark.usefixtures("solve_here")
LONG = Limits(seconds=120.0)
FORMULATIONS: tuple[Formulation, ...] = ("repaired", "slot-free")
EXACT: tuple[tuple[Formulation, str], ...] = (
    ("repaired", "highs"),
    ("slot-free", "highs"),
    ("slot-free", "cp-sat"),
)


def problem_of(prompts: list[int], answers: list[int], slots: int = 2, **more: Any) -> Problem:
    return Problem(Workload.from_lengths(prompts, answers), more.pop("cost", PAPER), slots, **more)


def random_problem(seed: int, count: int, **more: Any) -> Problem:
    rng = np.random.default_rng(seed)
    return problem_of(rng.integers(5, 120, count).tolist(), rng.integers(1, 9, count).tolist(), **more)


def least_makespan(problem: Problem) -> float:
    """
    Return the makespan of the best of all schedules, by the referee alone.

    Requests go into bins in every way; in a best schedule a bin starts when some request ends.
    """
    best = float("inf")
    count = len(problem)
    lengths = sorted({0, *problem.decode_steps.tolist()})
    for bin_of in itertools.product(range(count), repeat=count):
        bins = len(set(bin_of))
        if max(bin_of) + 1 == bins:
            for starts in starts_of_bins([0], bins, lengths):
                best = min(best, makespan_if_less(problem, bin_of, starts, best))
    return best


def starts_of_bins(starts: list[int], bins: int, lengths: list[int]) -> Iterator[list[int]]:
    if len(starts) == bins:
        yield starts
        return
    for at in sorted({a + n for a in starts for n in lengths if a + n >= starts[-1]}):
        yield from starts_of_bins([*starts, at], bins, lengths)


def makespan_if_less(problem: Problem, bin_of: Sequence[int], starts: list[int], best: float) -> float:
    end = max(starts[k] + n for k, n in zip(bin_of, problem.decode_steps.tolist(), strict=True))
    cost = problem.cost
    if end < starts[-1] or cost.prefill_base * len(starts) + cost.decode_base * end >= best:
        return best
    try:
        schedule = Schedule.from_bins(problem, bin_of, np.diff([*starts, end]))
    except ValueError:
        return best
    return schedule.makespan(problem) if schedule.check(problem) is None else best


@HERE
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 5), (1, 4), (2, 4)])
def test_repaired_and_slot_free_and_brute_force_agree(seed: int, count: int) -> None:
    problem = random_problem(seed, count)
    least = least_makespan(problem)
    for formulation, backend in EXACT:
        found = solve_full(problem, formulation, backend=backend, limits=LONG)
        assert found.status is Status.OPTIMAL, (formulation, backend)
        assert found.makespan == pytest.approx(least), (formulation, backend)
        assert found.bound is not None
        assert found.bound.seconds == pytest.approx(least)
        assert found.schedule is not None
        assert found.schedule.check(problem) is None
        assert found.gap == pytest.approx(0, abs=1e-6)


LIMITED: dict[str, dict[str, Any]] = {
    "a token cap": {"prefill_token_cap": 130},
    "a bend at which stages are worth splitting": {
        "cost": CostModel(0.005, 0.0001, 0.029, 0.0002, prefill_bend=60.5, prefill_per_token_beyond=0.0003)
    },
    "a floor and a bend": {
        "cost": CostModel(0.0, 0.0001, 0.029, 0.0, 0.02, prefill_bend=90.0, prefill_per_token_beyond=0.002)
    },
    "a floor under prefill stages": {"cost": CostModel(0.0, 0.00013, 0.029, 0.00021, prefill_floor=0.02)},
    "a price per KV token": {"cost": CostModel(0.025, 0.00013, 0.029, 0.00021, decode_per_kv_token=1e-5)},
}


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("more", LIMITED.values(), ids=LIMITED.keys())
def test_they_agree_too_with(more: dict[str, Any]) -> None:
    problem = random_problem(5, 4, **more)
    least = least_makespan(problem)
    for formulation, backend in EXACT:
        found = solve_full(problem, formulation, backend=backend, limits=LONG)
        assert found.status is Status.OPTIMAL
        assert found.makespan == pytest.approx(least), (formulation, backend)
        assert found.bound is not None
        assert found.bound.seconds == pytest.approx(least)


@HERE
def test_a_request_of_one_token_needs_a_slot_but_no_step() -> None:
    problem = problem_of([10, 10, 10, 10], [1, 1, 1, 4], prefill_emits_first_token=True)
    least = least_makespan(problem)
    for formulation in FORMULATIONS:
        found = solve_full(problem, formulation, backend="highs", limits=LONG)
        assert found.makespan == pytest.approx(least)
    with pytest.raises(UnsupportedProblemError, match="without a decode step"):
        solve_full(problem)


@HERE
@pytest.mark.slow
def test_intervals_keep_the_kv_capacity() -> None:
    """Both long requests together would hold 2 x 19 tokens in their last decode step; 36 keep them apart."""
    free = problem_of([10, 10, 10], [10, 10, 4], slots=3)
    tight = problem_of([10, 10, 10], [10, 10, 4], slots=3, kv_capacity=36)
    loose = problem_of([10, 10, 10], [10, 10, 4], slots=3, kv_capacity=57)
    found = solve_full(tight, limits=LONG)
    assert found.status is Status.OPTIMAL
    assert found.makespan == pytest.approx(least_makespan_on_grid(tight))
    assert found.makespan is not None
    assert found.makespan > least_makespan(free)
    assert solve_full(loose, limits=LONG).makespan == pytest.approx(least_makespan(free))
    for build in (repaired_model, literal_model, slot_free_model):
        with pytest.raises(UnsupportedProblemError, match="KV capacity"):
            build(tight)


def least_makespan_on_grid(problem: Problem) -> float:
    """Return the least makespan over all start steps: with memory, a bin may start when no request ends."""
    best = float("inf")
    horizon = int(problem.decode_steps.sum())
    for starts in itertools.product(range(horizon), repeat=len(problem)):
        if min(starts):
            continue
        times, bin_of = np.unique(starts, return_inverse=True)
        best = min(best, makespan_if_less(problem, bin_of.tolist(), times.tolist(), best))
    return best


@HERE
def test_the_printed_model_calls_optimal_what_the_referee_rejects() -> None:
    """Nothing in (1)-(25) ties decoding to its place: the optimum decodes before the prefill."""
    cost = CostModel(0.025, 0.00013, 0.029, 0.0)
    problem = problem_of([20, 20, 20, 20], [5, 1, 3, 3], cost=cost)
    exact = [PrefillLevel(20, cost.prefill_seconds(20)), PrefillLevel(40, cost.prefill_seconds(40))]
    full = literal_model(problem, bins=2, levels=exact)
    found = solve_linear(full.model, "highs", LONG)
    assert found.status is Status.OPTIMAL
    assert found.values is not None
    broken = read_schedule(full, found.values).check(problem)
    assert broken is not None
    assert broken.rule in ("every request finishes", "one request per slot")
    assert found.objective is not None
    # Slots of 5 + 1 and 3 + 3 decode steps are full with two prefill stages, which in truth takes three.
    assert found.objective == pytest.approx(least_makespan(problem) - 0.025)


@HERE
def test_the_printed_model_hands_over_no_schedule_that_breaks_a_rule() -> None:
    found = solve_full(problem_of([20, 20, 20, 20], [5, 1, 3, 3]), "literal", backend="highs", limits=LONG)
    assert (found.status, found.schedule, found.bound) == (Status.NO_SOLUTION, None, None)
    assert "calls optimal" in found.message
    assert "breaks a rule: " in found.message


@HERE
def test_the_printed_model_says_what_a_schedule_needs_when_all_fit_at_once() -> None:
    problem = problem_of([20, 30], [4, 4])
    found = solve_full(problem, "literal", backend="highs", limits=LONG)
    assert found.status is Status.FEASIBLE
    assert found.schedule is not None
    assert found.makespan == pytest.approx(least_makespan(problem))
    assert found.bound is None


def test_the_printed_model_takes_a_cost_that_is_steep_from_the_first_token_on() -> None:
    steep = CostModel(0.025, 0.0001, 0.029, 0.0, prefill_bend=0.0, prefill_per_token_beyond=0.0002)
    straight = CostModel(0.025, 0.0003, 0.029, 0.0)
    one, other = (
        literal_model(problem_of([20, 30], [4, 3], cost=cost), bins=2).model for cost in (steep, straight)
    )
    np.testing.assert_allclose(one.matrix.toarray(), other.matrix.toarray())


def test_a_schedule_is_a_start_of_each_formulation() -> None:
    problem = problem_of([10, 20, 20, 30, 10], [3, 5, 5, 2, 3], slots=2)
    start = list_schedule(problem)
    assert start is not None
    full, free = repaired_model(problem), slot_free_model(problem)
    for model, point in (
        (full.model, write_schedule(full, start)),
        (free.model, write_slot_free(free, start)),
    ):
        assert model.violation(model.rounded(point)) is None
        assert model.objective_value(point) == pytest.approx(start.makespan(problem))
    assert read_schedule(full, write_schedule(full, start)).makespan(problem) == pytest.approx(
        start.makespan(problem)
    )
    back = read_slot_free(free, write_slot_free(free, start))
    assert back.check(problem) is None
    assert back.makespan(problem) == pytest.approx(start.makespan(problem))


@pytest.mark.parametrize("seed", range(20))
def test_every_list_schedule_is_a_solution_of_the_repaired_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, slots = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    lengths = rng.integers(1, 5, count).tolist()
    problem = problem_of(rng.integers(5, 8, count).tolist(), lengths, slots=slots)
    start = list_schedule(problem)
    assert start is not None
    assert_solution_of_both(problem, start)


def assert_solution_of_both(problem: Problem, start: Schedule) -> None:
    full, free = repaired_model(problem), slot_free_model(problem)
    assert full.model.violation(full.model.rounded(write_schedule(full, start))) is None
    assert free.model.violation(free.model.rounded(write_slot_free(free, start))) is None


@pytest.mark.parametrize("more", LIMITED.values(), ids=LIMITED.keys())
@pytest.mark.parametrize("first", [False, True])
def test_what_a_backend_begins_from_is_a_solution_of_the_formulations_with(
    more: dict[str, Any], first: bool
) -> None:
    for seed in range(6):
        problem = random_problem(seed, 9, slots=3, prefill_emits_first_token=first, **more)
        assert_solution_of_both(problem, _rule_schedule(problem))


@HERE
def test_a_start_with_too_many_bins_is_refused() -> None:
    problem = problem_of([10, 10, 10], [2, 2, 2], slots=2)
    alone = Schedule([0, 1, 2], [0, 1, 0], [0, 2, 2])  # type: ignore[arg-type]
    assert alone.check(problem) is None
    assert bins_needed(problem) == 2
    with pytest.raises(ValueError, match="prefills in 3 bins, the model has 2"):
        solve_full(problem, "repaired", backend="highs", start=alone)
    with pytest.raises(ValueError, match="the start is not a schedule"):
        solve_full(problem, start=Schedule([0, 0, 0], [0, 1, 1], [2]))  # type: ignore[arg-type]


@HERE
@pytest.mark.slow
def test_ten_requests_on_three_slots_keep_a_checked_schedule_and_a_bound_at_a_work_limit() -> None:
    rng = np.random.default_rng(4)
    lengths = np.where(rng.random(10) < 0.5, 512, rng.integers(20, 512, 10)).tolist()
    problem = problem_of([68] * 10, lengths, slots=3)
    one, other = (solve_full(problem, limits=Limits(work=60, seconds=60.0)) for _ in range(2))
    assert one.stopped_by in (StoppedBy.WORK, StoppedBy.PROOF)
    assert one.schedule is not None
    assert one.schedule.check(problem) is None
    assert one.bound is not None
    assert one.makespan is not None
    assert one.bound.seconds <= one.makespan
    assert (one.makespan, one.bound.seconds) == (other.makespan, other.bound.seconds if other.bound else None)


@pytest.mark.slow
def test_ctrl_c_on_intervals_returns_the_best_schedule_so_far(
    press_ctrl_c: Callable[[str, float], None],
) -> None:
    rng = np.random.default_rng(1)
    problem = problem_of([68] * 30, rng.integers(20, 512, 30).tolist(), slots=6)
    press_ctrl_c("listen", 2.0)
    found = solve_full(problem, limits=Limits(seconds=60.0))
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.INTERRUPT)
    assert found.schedule is not None
    assert found.schedule.check(problem) is None
    assert found.seconds < 20


def test_costs_that_are_not_whole_are_rounded_so_that_a_bound_stays_one() -> None:
    cost = CostModel(0.0251234567899, 0.0, 0.0291234567899, 0.0)
    model = interval_model(problem_of([10, 10, 10], [2, 2, 2], cost=cost))
    assert (model.stage_cost, model.step_cost, model.unit) == (25123456, 29123456, 1e-9)
    assert interval_model(problem_of([10], [2])).stage_cost == 25


@HERE
@pytest.mark.slow
def test_a_cap_that_two_prompts_exceed_has_two_stages_at_one_time() -> None:
    problem = problem_of([10, 10], [3, 3], cost=CostModel(0.1, 0.0, 1.0, 0.0), prefill_token_cap=10)
    for formulation, backend in EXACT:
        found = solve_full(problem, formulation, backend=backend, limits=LONG)
        assert found.bound is not None
        assert [found.makespan, found.bound.seconds] == pytest.approx([3.2, 3.2]), backend


@HERE
@pytest.mark.slow
def test_a_bend_splits_stages_and_only_the_printed_model_has_no_equation_for_it() -> None:
    bent = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)
    problem = problem_of([10, 10], [2, 2], slots=2, cost=bent)
    apart = Schedule([0, 1], [0, 1], [0, 2])  # type: ignore[arg-type]
    together = Schedule([0, 0], [0, 1], [2])  # type: ignore[arg-type]
    assert (apart.makespan(problem), together.makespan(problem)) == (4.0, 13.0)
    for formulation, backend in EXACT:
        found = solve_full(problem, formulation, backend=backend, limits=LONG)
        assert found.bound is not None
        assert [found.makespan, found.bound.seconds] == pytest.approx([4.0, 4.0]), backend
    with pytest.raises(UnsupportedProblemError, match="bends at 10 tokens"):
        literal_model(problem)
    literal_model(replace(problem, prefill_token_cap=10))


def test_a_model_too_large_to_hold_is_refused_before_it_is_built() -> None:
    problem = Problem(generate("table3", 0), PAPER, 200)
    for build in (repaired_model, literal_model):
        with pytest.raises(UnsupportedProblemError, match="886,368,000 columns, more than 10,000,000"):
            build(problem)
    with pytest.raises(UnsupportedProblemError, match="so large a job has 19,195,800 columns"):
        slot_free_model(problem_of([10] * 2600, [2] * 2600, slots=140))
    with pytest.raises(UnsupportedProblemError, match="so large a job has 15,444,000 columns"):
        interval_model(problem_of([10] * 4000, [2] * 4000, slots=140))
    with pytest.raises(UnsupportedProblemError, match="so large a job has 13,190,000 columns"):
        packing_model(Problem(generate("table3", 0), PAPER, 10_000))
    with pytest.raises(UnsupportedProblemError, match="177,147,000 coefficients, more than 50,000,000"):
        literal_model(Problem(generate("table3", 0, 100), PAPER, 20))


def test_arrivals_have_no_equation() -> None:
    work = Workload(np.array(["a"]), np.array([3]), np.array([2]), arrival=np.array([1.0]))
    problem = Problem(work, PAPER, 1)
    for build in (repaired_model, literal_model, slot_free_model, interval_model):
        with pytest.raises(UnsupportedProblemError, match="arrival"):
            build(problem)
