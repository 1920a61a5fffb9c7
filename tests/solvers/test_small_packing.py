"""Small packings are settled by trying every one, and a check that tries them again agrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.least_counts import cost_terms, least_counts
from batchbound.models.bounds.partition import refuted_by_trial
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.claims import Work
from batchbound.models.certificates.packings import packs
from batchbound.solvers.packing.partition import partition_bound, solve_partition
from batchbound.solvers.packing.small import MOST_ITEMS, settle_packing


def least_makespan(weights: list[int], machines: int) -> int:
    """Return the least largest load by trying every assignment."""
    return min(
        int(np.bincount(chosen, weights=weights).max())
        for chosen in itertools.product(range(machines), repeat=len(weights))
    )


@pytest.mark.parametrize("seed", range(30))
def test_items_fit_the_least_makespan_and_nothing_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machines = int(rng.integers(1, 4))
    weights = rng.integers(0, 30, rng.integers(1, 8))
    least = least_makespan(weights.tolist(), machines)
    for capacity in (least, least + 3):
        settled = settle_packing(weights, machines, capacity)
        assert settled is not None
        assert settled.assignment is not None
        assert int(np.bincount(settled.assignment, weights=weights).max()) <= capacity
        assert packs(weights.tolist(), machines, capacity, Work())
    if least > 0:
        settled = settle_packing(weights, machines, least - 1)
        assert settled is not None
        assert settled.assignment is None
        assert not packs(weights.tolist(), machines, least - 1, Work())


@pytest.mark.parametrize(("items", "machines"), [(9, 3), (10, 3), (12, 4), (14, 4), (13, 5)])
def test_a_dozen_items_are_proven_whatever_they_weigh(items: int, machines: int) -> None:
    for seed in range(5):
        weights = np.random.default_rng(seed).integers(20, 1000, items)
        found = solve_partition(weights, machines, seconds=20.0)
        assert found.optimal, (seed, found)
        assert partition_bound(weights, machines, 20.0).value == found.makespan


def test_its_bound_is_verified_as_a_bound_of_rounds_and_one_more_is_refuted() -> None:
    # Three slots of 15 hold 45 rounds, and the requests have 44; but 7s and 8s leave a slot at 14 or 15.
    weights = np.array([7, 7, 7, 7, 8, 8])
    problem = Problem(Workload.from_lengths([1] * 6, weights), CostModel(1.0, 0.0, 1.0, 0.0), 3)
    assert least_makespan(weights.tolist(), 3) == 15
    for capacity, proven in ((14, True), (15, False)):
        packing = refuted_by_trial(capacity)
        claims = {**least_counts(problem).claims, "rounds": {"at_least": packing.value, **packing.witness}}
        terms = cost_terms(problem, 2, packing.value)
        certificate = {"kind": "trivial", "slots": 3, **claims}
        violation = verify_bound(
            problem, Bound(sum(terms.values()), "fewest stages and rounds", terms, certificate)
        )
        assert (violation is None) == proven


def test_more_than_a_few_items_are_not_tried() -> None:
    assert settle_packing(np.full(MOST_ITEMS + 1, 3), 2, 100) is None
    weights = np.random.default_rng(0).integers(1, 10**6, MOST_ITEMS)
    assert settle_packing(weights, 6, int(weights.sum()) // 6 + 5) is None
