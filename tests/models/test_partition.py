"""Bin packing over slots, against brute force and at the hybrid paper's size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from builders import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.least_counts import cost_terms
from batchbound.models.bounds.makespan import trivial_bound
from batchbound.models.bounds.packing.heuristics import (
    IntArray,
    first_fit_decreasing,
    karmarkar_karp,
    longest_processing_time,
    machine_loads,
    multifit,
)
from batchbound.models.bounds.packing.local_search import Resplit, subset_of_sum, subset_sums
from batchbound.models.bounds.packing.lower_bounds import lifted_bound, packing_bound
from batchbound.models.bounds.packing.partition import packed_full, solve_partition
from batchbound.models.bounds.packing.patterns import PatternMaster
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.deadline import Deadline

Construction = Callable[[IntArray, int], IntArray]
CONSTRUCTIONS: list[Construction] = [longest_processing_time, multifit, karmarkar_karp]

weight_lists = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def smallest_makespan(weights: list[int], machines: int) -> int:
    """Least makespan by trying every assignment, machines in the order of their first item."""
    best = sum(weights)

    def place(item: int, loads: list[int]) -> None:
        nonlocal best
        if max(loads, default=0) >= best:
            return
        if item == len(weights):
            best = max(loads)
            return
        for machine in range(len(loads)):
            place(item + 1, [load + weights[item] * (k == machine) for k, load in enumerate(loads)])
        if len(loads) < machines:
            place(item + 1, [*loads, weights[item]])

    place(0, [])
    return best


def cut50(seed: int, requests: int = 1319) -> IntArray:
    """Output lengths of the hybrid paper's Table III: half of them cut at 512, the rest a truncated gamma."""
    rng = np.random.default_rng(seed)
    gamma = rng.gamma(1.5114, 136.178, 4 * requests)
    outputs = np.clip(np.round(gamma[gamma < 511.5][:requests]), 1, 511).astype(np.int64)
    outputs[rng.random(requests) < 0.5] = 512
    return outputs


@pytest.mark.parametrize("construct", CONSTRUCTIONS)
@given(weights=weight_lists, machines=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_construction_places_every_item_within_its_guarantee(
    construct: Construction, weights: list[int], machines: int
) -> None:
    array = np.array(weights, dtype=np.int64)
    assignment = construct(array, machines)
    assert assignment.shape == array.shape
    assert assignment.min() >= 0
    assert assignment.max() < machines
    loads = machine_loads(array, assignment, machines)
    assert loads.sum() == array.sum()
    assert loads.max() <= 4 / 3 * smallest_makespan(weights, machines)


@given(weights=weight_lists, machines=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_solver_finds_and_proves_the_optimum_of_small_instances(
    weights: list[int], machines: int
) -> None:
    array = np.array(weights, dtype=np.int64)
    optimum = smallest_makespan(weights, machines)
    result = solve_partition(array, machines, seconds=0.3)
    assert result.bound <= optimum <= result.makespan
    assert machine_loads(array, result.assignment, machines).max() == result.makespan
    assert result.makespan == optimum


@given(weights=weight_lists, machines=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_no_partition_bound_exceeds_the_optimum(weights: list[int], machines: int) -> None:
    array = np.array(weights, dtype=np.int64)
    optimum = smallest_makespan(weights, machines)
    assert lifted_bound(array, machines).value <= optimum


@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=8), capacity=st.integers(12, 20))
@settings(max_examples=100, deadline=None)
def test_no_packing_needs_fewer_bins_than_its_bound(weights: list[int], capacity: int) -> None:
    needed, _ = packing_bound(np.array(weights, dtype=np.int64), capacity)
    bins = next(k for k in range(1, len(weights) + 1) if smallest_makespan(weights, k) <= capacity)
    assert needed <= bins


def test_graham_s_worst_case_is_met_by_his_rule_and_solved_by_the_solver() -> None:
    weights = np.array([5, 5, 4, 4, 3, 3, 3])
    assert machine_loads(weights, longest_processing_time(weights, 3), 3).max() == 11
    result = solve_partition(weights, 3)
    assert (result.makespan, result.optimal) == (9, True)


def test_more_machines_than_there_is_memory_for_leave_the_heaviest_item() -> None:
    assert lifted_bound(np.array([3, 7, 5]), 2**31 - 1).value == 7


def test_the_lifted_bound_sees_a_machine_that_must_take_three() -> None:
    # Seven items of 10 on three machines: one machine holds three of them, though the mean load is 24.
    weights = np.array([10] * 7 + [1] * 2)
    bound = lifted_bound(weights, 3)
    assert bound.value == 30
    assert bound.source == "pigeonhole"


def test_first_fit_decreasing_says_when_the_capacity_is_too_small() -> None:
    assert first_fit_decreasing(np.array([6, 6, 6]), 2, capacity=11) is None
    packed = first_fit_decreasing(np.array([6, 6, 5]), 2, capacity=11)
    assert packed is not None
    assert packed.tolist() == [0, 1, 0]


def test_subset_sums_are_the_bits_of_an_integer() -> None:
    assert subset_sums([2, 3]) == 0b101101
    assert sorted(subset_of_sum([0, 1, 2], [2, 3, 4], 6)) == [0, 2]
    with pytest.raises(ValueError, match="no subset of 2 items sums to 4"):
        subset_of_sum([0, 1], [2, 3], 4)


def test_a_resplit_never_loses_an_item() -> None:
    weights = cut50(3, requests=130)
    search = Resplit(
        weights, longest_processing_time(weights, 20), 20, target=0, rng=np.random.default_rng(0)
    )
    assert not search.run(seconds=0.05)
    assert machine_loads(weights, search.assignment(), 20).tolist() == search.loads
    assert sum(search.loads) == weights.sum()


def test_a_packing_without_a_proof_is_as_good_as_a_proven_one_and_the_same_for_the_same_seed() -> None:
    weights = cut50(3, requests=130)
    packed = packed_full(weights, 20, tries=100, rng=np.random.default_rng(0))
    proven = solve_partition(weights, 20, seconds=10.0)
    assert proven.optimal
    assert machine_loads(weights, packed, 20).max() <= proven.makespan + 1
    again = packed_full(weights, 20, tries=100, rng=np.random.default_rng(0))
    assert packed.tolist() == again.tolist()


def test_prices_refute_a_capacity_that_simple_bounds_do_not() -> None:
    # Mean load 12, and no machine can hold two items of 7 or any three of these within 12.
    weights = np.array([7, 7, 7, 5, 5, 5])
    master = PatternMaster(weights, machines=3, capacity=11)
    bound = master.refute(Deadline(5.0))
    assert bound is not None
    assert bound.value == 12
    assert PatternMaster(weights, machines=3, capacity=12).refute(Deadline(5.0)) is None


def test_patterns_assemble_into_an_assignment() -> None:
    weights = np.array([7, 7, 7, 5, 5, 5, 0])
    master = PatternMaster(weights, machines=3, capacity=12)
    assert master.refute(Deadline(5.0)) is None
    assignment = master.assemble(weights, seconds=5.0)
    assert assignment is not None
    assert machine_loads(weights, assignment, 3).tolist() == [12, 12, 12]


def test_generated_prices_convince_the_checker() -> None:
    rng = np.random.default_rng([4, 225, 0])
    outputs = np.maximum(1, np.round(rng.normal(100, 20, 400))).astype(np.int64)
    problem = Problem(Workload.from_lengths(np.ones(400), outputs), CostModel.paper(), slots=178)
    result = solve_partition(problem.decode_steps, 178, seconds=10.0)
    assert result.source == "column generation prices"
    assert result.optimal
    trivial = trivial_bound(problem)
    certificate = {**trivial.certificate, "decode_steps": {"at_least": result.bound, **result.witness}}
    terms = cost_terms(problem, 3, result.bound)
    bound = Bound(sum(terms.values()), trivial.source, terms, certificate)
    assert bound.seconds > trivial.seconds
    assert verify_bound(problem, bound) is None


@pytest.mark.parametrize("seed", mostly_slow(range(10), fast=range(2)))
def test_the_papers_size_is_proven_optimal(seed: int) -> None:
    assert solve_partition(cut50(seed), 200, seconds=120.0).optimal


def test_the_same_seed_gives_the_same_assignment() -> None:
    weights = cut50(7, requests=400)
    first, second = (solve_partition(weights, 60, seed=5) for _ in range(2))
    assert first.optimal
    assert first.assignment.tolist() == second.assignment.tolist()


def test_an_empty_instance_costs_nothing() -> None:
    result = solve_partition(np.zeros(0, dtype=np.int64), 3)
    assert (result.makespan, result.bound, result.gap, result.optimal) == (0, 0, 0.0, True)


@pytest.mark.parametrize(
    ("weights", "machines", "message"),
    [
        (np.array([1, -2]), 2, r"weights\[1\]: must not be negative, got -2"),
        (np.array([1.5]), 2, "whole numbers"),
        (np.array([[1]]), 2, "one dimension"),
        (np.array([1]), 0, "machines: must be at least 1"),
    ],
)
def test_a_senseless_instance_is_refused(weights: IntArray, machines: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_partition(weights, machines)
