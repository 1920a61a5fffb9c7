"""Exchanges between replicas: sooner done each time, until none helps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchbound.data.arrays import FloatArray, IntArray
from batchbound.models.bounds import fleet_partition
from batchbound.models.bounds.fleet_partition import Exchanges

Costs = tuple[FloatArray, FloatArray, FloatArray]


def drawn(rng: np.random.Generator) -> tuple[Costs, IntArray, FloatArray, IntArray]:
    """Return costs of units on one or two kinds of replicas, the kinds, what is busy, and some shares."""
    kinds, units, replicas = int(rng.integers(1, 3)), int(rng.integers(2, 9)), int(rng.integers(2, 5))
    beside = rng.uniform(0, 2, (kinds, units))
    alone = rng.choice([0.0, 1.0, 3.0, 8.0], (kinds, units)) + rng.uniform(0, 1, (kinds, units))
    costs = beside + alone / rng.integers(1, 5)
    kind_of = rng.integers(0, kinds, replicas)
    return (costs, beside, alone), kind_of, rng.uniform(0, 2, replicas), rng.integers(0, replicas, units)


def ends(costs: Costs, kind_of: IntArray, busy: FloatArray, replica_of: IntArray) -> list[float]:
    """Return when each replica is done."""
    found = []
    for replica, kind in enumerate(kind_of.tolist()):
        share, beside, alone = (each[kind, replica_of == replica] for each in costs)
        found.append(busy[replica] + max(share.sum(), beside.sum() + alone.max(initial=0.0)))
    return found


def neighbours(replica_of: IntArray, last: int, replicas: int) -> list[IntArray]:
    """Return the shares with a unit of the last replica moved, or exchanged for another's."""
    found = []
    for unit in np.flatnonzero(replica_of == last).tolist():
        for replica in range(replicas):
            found.append(replica_of.copy())
            found[-1][unit] = replica
        for other in np.flatnonzero(replica_of != last).tolist():
            found.append(replica_of.copy())
            found[-1][[unit, other]] = replica_of[[other, unit]]
    return found


@pytest.mark.parametrize("pairs", [3, 10_000])
def test_exchanges_end_where_none_helps(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_partition, "MOST_PAIRS", pairs)
    rng = np.random.default_rng(1)
    for _ in range(150):
        costs, kind_of, busy, before = drawn(rng)
        after = Exchanges(*costs, kind_of).improved(before, busy, lambda: False)
        done = ends(costs, kind_of, busy, after)
        assert max(done) <= max(ends(costs, kind_of, busy, before)) + 1e-12
        last = int(np.argmax(done))
        for other in neighbours(after, last, len(busy)):
            moved = np.flatnonzero(other != after)
            touched = [last, *after[moved], *other[moved]]
            there = ends(costs, kind_of, busy, other)
            assert max(there[k] for k in touched) >= max(done) * (1 - 1e-8)


def test_exchanges_come_near_the_best_of_all_shares() -> None:
    rng, above = np.random.default_rng(2), []
    for _ in range(40):
        costs, kind_of, busy, before = drawn(rng)
        units = costs[0].shape[1]
        if len(busy) ** units > 3000:
            continue
        every = itertools.product(range(len(busy)), repeat=units)
        best = min(max(ends(costs, kind_of, busy, np.array(each))) for each in every)
        after = Exchanges(*costs, kind_of).improved(before, busy, lambda: False)
        above.append(max(ends(costs, kind_of, busy, after)) / best)
        assert above[-1] >= 1 - 1e-12
    assert np.mean(above) < 1.05


def test_nothing_is_exchanged_once_it_is_late() -> None:
    costs, kind_of, busy, before = drawn(np.random.default_rng(3))
    after = Exchanges(*costs, kind_of).improved(before, busy, lambda: True)
    assert (after == before).all()
