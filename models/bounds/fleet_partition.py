"""Division of requests over replicas of different speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ...data.arrays import FloatArray, IntArray

MOST_TRIES = 20
"""Most moves and exchanges, as a multiple of those that fail in a row."""

EXCHANGED = 0.75
"""Share of tries that exchange two units; the others move one."""

WORTH = 1e-4
"""Least relative gain in the last replica's time."""


def least_loaded(costs: FloatArray, kind_of: IntArray, busy: FloatArray, order: IntArray) -> IntArray:
    """Return each unit's replica by list scheduling, where it ends first."""
    heaps: list[list[tuple[float, int]]] = [[] for _ in range(len(costs))]
    for replica, kind in enumerate(kind_of.tolist()):
        heaps[kind].append((float(busy[replica]), replica))
    for heap in heaps:
        heapq.heapify(heap)
    present = [kind for kind, heap in enumerate(heaps) if heap]
    seconds = [row.tolist() for row in costs]
    replica_of = np.empty(costs.shape[1], dtype=np.int64)
    for unit in order.tolist():
        best = present[0]
        if len(present) > 1:
            best = min(present, key=lambda kind: heaps[kind][0][0] + seconds[kind][unit])
        load, replica = heaps[best][0]
        heapq.heapreplace(heaps[best], (load + seconds[best][unit], replica))
        replica_of[unit] = replica
    return replica_of


class Ends:
    """Ends of replicas, as a bound by the prices of their units.

    A replica takes the sum of ``costs`` at least, and the largest ``alone`` plus the sum of ``beside``.

    costs: Seconds of each unit's share on each kind of replica, shape (kinds, units).
    beside: Seconds that a unit adds next to a longer one, same shape.
    alone: Further seconds of a unit that is the longest, same shape.
    kind_of: Kind of each replica, shape (replicas,).
    """

    def __init__(self, costs: FloatArray, beside: FloatArray, alone: FloatArray, kind_of: IntArray) -> None:
        self._prices = np.stack((costs, beside, alone))
        self._kind_of = kind_of

    def of(self, replica: int, units: IntArray) -> float:
        """Return the seconds of a replica that serves some units."""
        costs, beside, alone = self._prices[:, self._kind_of[replica], units]
        return float(max(costs.sum(), alone.max(initial=0.0) + beside.sum()))

    def levelled(
        self, shares: list[IntArray], beyond: FloatArray, rng: np.random.Generator, tries: int
    ) -> list[IntArray]:
        """Move and exchange units so that the last replica ends sooner.

        shares: Units of each replica.
        beyond: Seconds of each replica beyond its units' prices, shape (replicas,).
        tries: Moves and exchanges that may fail in a row.
        """
        shares, failed = list(shares), 0
        ends = beyond + [self.of(k, units) for k, units in enumerate(shares)]
        for _ in range(MOST_TRIES * tries):
            if failed == tries:
                break
            failed += 1
            last = int(ends.argmax())
            first = int(rng.integers(len(shares)))
            if first == last or not shares[last].size:
                continue
            leaving = rng.choice(shares[last], 1)
            coming = shares[first][:0]
            if shares[first].size and rng.random() < EXCHANGED:
                coming = rng.choice(shares[first], 1)
            here = np.append(shares[last][shares[last] != leaving], coming)
            there = np.append(shares[first][~np.isin(shares[first], coming)], leaving)
            later = beyond[last] + self.of(last, here), beyond[first] + self.of(first, there)
            if max(later) < ends[last] * (1.0 - WORTH):
                (ends[last], ends[first]), failed = later, 0
                shares[last], shares[first] = here, there
        return [np.sort(units) for units in shares]


def spread_groups(
    costs: FloatArray, kind_of: IntArray, busy: FloatArray, groups: Sequence[IntArray]
) -> IntArray:
    """Return each unit's replica, with groups spread apart if possible."""
    mean = costs.mean(axis=0)
    loads = busy.astype(np.float64).copy()
    replica_of = np.empty(costs.shape[1], dtype=np.int64)
    for members in sorted(groups, key=lambda group: -float(mean[group].sum())):
        dearest = members[np.argsort(-mean[members], kind="stable")]
        for first in range(0, len(dearest), len(loads)):
            free = np.ones(len(loads), dtype=np.bool_)
            for unit in dearest[first : first + len(loads)].tolist():
                ends = np.where(free, loads + costs[kind_of, unit], np.inf)
                replica = int(ends.argmin())
                free[replica] = False
                loads[replica] = ends[replica]
                replica_of[unit] = replica
    return replica_of
