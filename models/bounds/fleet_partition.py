"""Sharing requests out over replicas of different speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ...data.costs.cost import FloatArray, IntArray

BISECTIONS = 12
"""Times that the time is halved in which all units fit."""


def least_loaded(costs: FloatArray, kind_of: IntArray, busy: FloatArray, order: IntArray) -> IntArray:
    """
    Return the replica of each unit when each goes where it would end first: Graham's rule, or a list's.

    Parameters
    ----------
    costs
        Seconds of each unit on each kind of replica, shape (kinds, units).
    kind_of
        The kind of each replica, shape (replicas,).
    busy
        Seconds each replica is busy already, shape (replicas,).
    order
        The units in the order they are placed, shape (units,); by decreasing cost for LPT.
    """
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


class LongestFirst:
    """
    Units placed by what replicas take in all, or their longest unit alone and what others add beside it.

    Parameters
    ----------
    costs, beside, alone
        Seconds of each unit on each kind of replica: its share of all there is, what it adds beside a longer
        one, and what the longest one takes before that, shape (kinds, units).
    kind_of
        The kind of each replica, shape (replicas,).
    """

    def __init__(self, costs: FloatArray, beside: FloatArray, alone: FloatArray, kind_of: IntArray) -> None:
        self._costs, self._beside, self._alone = costs[kind_of], beside[kind_of], alone[kind_of]
        self._order = np.lexsort((-costs.mean(axis=0), -alone.mean(axis=0))).tolist()

    def least_loaded(self, busy: FloatArray) -> IntArray:
        """Return the replica of each unit when each goes where it would end first, shape (units,)."""
        replica_of, _ = self._placed(busy, None)
        return replica_of

    def first_fit(self, busy: FloatArray) -> IntArray:
        """
        Return the replica of each unit when each goes to the first where it ends in time, shape (units,).

        That keeps long units together, so that fewer replicas wait for one. The time is the least at which
        all fit that bisection finds (MULTIFIT: Coffman, Garey and Johnson 1978).

        Parameters
        ----------
        busy
            Seconds each replica is busy already, shape (replicas,).
        """
        best, high = self._placed(busy, None)
        low = 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            fitting, latest = self._placed(busy, middle)
            if latest <= middle:
                best, high = fitting, latest
            else:
                low = middle
        return best

    def _placed(self, busy: FloatArray, limit: float | None) -> tuple[IntArray, float]:
        """Return the replica of each unit, and when the last one is done: infinite if one fits nowhere."""
        shared, added = busy.astype(np.float64), busy.astype(np.float64)
        longest, done = np.zeros(len(busy)), busy.astype(np.float64)
        replica_of = np.zeros(self._costs.shape[1], dtype=np.int64)
        for unit in self._order:
            alone, beside = self._alone[:, unit], self._beside[:, unit]
            by_longest = np.maximum(longest, alone) + added + beside
            ends = np.maximum(shared + self._costs[:, unit], by_longest)
            replica = int((ends <= limit).argmax()) if limit is not None else int(ends.argmin())
            if limit is not None and ends[replica] > limit:
                return replica_of, np.inf
            shared[replica] += self._costs[replica, unit]
            added[replica] += beside[replica]
            longest[replica] = max(longest[replica], alone[replica])
            done[replica] = ends[replica]
            replica_of[unit] = replica
        return replica_of, float(done.max())


def spread_groups(
    costs: FloatArray, kind_of: IntArray, busy: FloatArray, groups: Sequence[IntArray]
) -> IntArray:
    """
    Return the replica of each unit with no two of a group together, as far as there are replicas.

    Parameters
    ----------
    costs, kind_of, busy
        As of :func:`least_loaded`.
    groups
        The units of each group; together all units. Groups of most cost go first, and of each its dearest
        unit to the replica that would end first.
    """
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
