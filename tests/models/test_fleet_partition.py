"""Levelling of replicas keeps every unit, ends no later, and relieves the replica of the longest unit."""

from __future__ import annotations

import numpy as np

from batchbound.data.arrays import IntArray
from batchbound.models.bounds.fleet_partition import Ends


def ends_of(costs: list[float], beside: list[float], alone: list[float], replicas: int) -> Ends:
    """Return the prices of units on equal replicas."""
    rows = np.array([costs]), np.array([beside]), np.array([alone])
    return Ends(rows[0], rows[1], rows[2], np.zeros(replicas, dtype=np.int64))


def test_units_move_until_replicas_end_together() -> None:
    ends = ends_of([1.0] * 6, [0.0] * 6, [0.0] * 6, 3)
    shares = [np.arange(6), np.arange(0), np.arange(0)]
    levelled = ends.levelled(shares, np.zeros(3), np.random.default_rng(0), 100)
    assert [ends.of(k, units) for k, units in enumerate(levelled)] == [2.0, 2.0, 2.0]


def test_a_replica_that_takes_longer_than_its_units_cost_serves_fewer() -> None:
    ends = ends_of([1.0] * 6, [0.0] * 6, [0.0] * 6, 2)
    shares = [np.arange(3), np.arange(3, 6)]
    levelled = ends.levelled(shares, np.array([2.0, 0.0]), np.random.default_rng(0), 100)
    assert [len(units) for units in levelled] == [2, 4]


def test_the_longest_unit_has_less_beside_it() -> None:
    # It takes 10 s alone, and each other one adds a second there, or costs two elsewhere.
    ends = ends_of([4.0] + [2.0] * 8, [0.0] + [1.0] * 8, [10.0] + [0.0] * 8, 2)
    shares = [np.arange(5), np.arange(5, 9)]
    levelled = ends.levelled(shares, np.zeros(2), np.random.default_rng(0), 100)
    assert sorted(len(units) for units in levelled) == [3, 6]
    assert [ends.of(k, units) for k, units in enumerate(levelled)] == [12.0, 12.0]


def test_levelling_keeps_all_units_and_ends_no_later() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        replicas, units = int(rng.integers(2, 5)), int(rng.integers(1, 12))
        costs, beside, alone = rng.uniform(0, 2, (3, units)).tolist()
        ends = ends_of(costs, beside, alone, replicas)
        replica_of = rng.integers(0, replicas, units)
        shares: list[IntArray] = [np.flatnonzero(replica_of == k) for k in range(replicas)]
        beyond = rng.uniform(0, 1, replicas)
        levelled = ends.levelled(shares, beyond, rng, 50)
        assert sorted(np.concatenate(levelled).tolist()) == list(range(units))
        before, after = (
            max(beyond[k] + ends.of(k, share[k]) for k in range(replicas)) for share in (shares, levelled)
        )
        assert after <= before
