"""Small packings are settled by trying every one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchbound.models.bounds.packing.partition import MOST_ITEMS, settle_packing, solve_partition


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
    if least > 0:
        settled = settle_packing(weights, machines, least - 1)
        assert settled is not None
        assert settled.assignment is None


@pytest.mark.parametrize(("items", "machines"), [(9, 3), (10, 3), (12, 4), (14, 4), (13, 5)])
def test_a_dozen_items_are_proven_whatever_they_weigh(items: int, machines: int) -> None:
    for seed in range(5):
        weights = np.random.default_rng(seed).integers(20, 1000, items)
        found = solve_partition(weights, machines, seconds=20.0)
        assert found.optimal, (seed, found)


def test_more_than_a_few_items_are_not_tried() -> None:
    assert settle_packing(np.full(MOST_ITEMS + 1, 3), 2, 100) is None
    weights = np.random.default_rng(0).integers(1, 10**6, MOST_ITEMS)
    assert settle_packing(weights, 6, int(weights.sum()) // 6 + 5) is None
