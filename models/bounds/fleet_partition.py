"""Sharing requests out over replicas of different speed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from ...data.arrays import FloatArray, IntArray

BISECTIONS = 12
"""Times that the time is halved in which all units fit."""

MOST_PAIRS = 10_000
"""Pairs of units looked at for an exchange at a time."""

WORTH = 1e-9
"""Share of its time by which the last replica has to be done sooner."""

SAVING = 1.0
"""Worth of an exchange from which both replicas gain, as a multiple of the later one's gain."""


def least_loaded(costs: FloatArray, kind_of: IntArray, busy: FloatArray, order: IntArray) -> IntArray:
    """Return the replica of each unit when each goes where it would end first: Graham's rule, or a list's."""
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
    Placement by the whole work of a replica, or by its longest unit alone plus the additions of the others.

    costs, beside, alone: Seconds of each unit on each kind of replica: its share of all there is, what it
        adds beside a longer one, and what the longest one takes before that, shape (kinds, units).
    kind_of: The kind of each replica, shape (replicas,).
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


class Exchanges:
    """
    Units moved or exchanged between the replica that is done last and any other, while it is done sooner.

    Each replica takes what its units take in all, or its longest unit alone and what others add beside it:
    units of little work beside much else go well where a long one leaves slots idle, and the other way round.

    costs, beside, alone, kind_of: As of :class:`LongestFirst`.
    """

    def __init__(self, costs: FloatArray, beside: FloatArray, alone: FloatArray, kind_of: IntArray) -> None:
        self._costs = np.stack((costs, beside))
        self._alone, self._kind_of = alone, kind_of

    def improved(self, replica_of: IntArray, busy: FloatArray, late: Callable[[], bool]) -> IntArray:
        """Return the replica of each unit, shape (units,), once no move or exchange helps or it is late."""
        replica_of = replica_of.copy()
        for saving in (SAVING, 0.0):
            while self._exchange(replica_of, busy, saving, late):
                pass
        return replica_of

    def _exchange(
        self, replica_of: IntArray, busy: FloatArray, saving: float, late: Callable[[], bool]
    ) -> bool:
        """Move a unit of the last replica, for another or for none, and return whether that helps."""
        loads = busy + self._sums(replica_of, len(busy))
        longest, alone = self._longest(replica_of, len(busy))
        ends = np.maximum(loads[0], loads[1] + alone[0])
        last = int(ends.argmax())
        of_last = np.flatnonzero(replica_of == last)
        some = 1 + len(of_last) * (len(replica_of) - len(of_last)) // MOST_PAIRS
        for begin in range(min(some, len(of_last))):
            if late():
                return False
            found = self._best(of_last[begin::some], replica_of, loads, longest, alone, saving)
            if found is not None:
                unit, replica, other = found
                replica_of[unit] = replica
                if other >= 0:
                    replica_of[other] = last
                return True
        return False

    def _best(
        self,
        mine: IntArray,
        replica_of: IntArray,
        loads: FloatArray,
        longest: IntArray,
        alone: FloatArray,
        saving: float,
    ) -> tuple[int, int, int] | None:
        """Return the best of some units of the last replica to move, where to, and for which one or -1."""
        ends = np.maximum(loads[0], loads[1] + alone[0])
        last = int(replica_of[mine[0]])
        own, others = self._kind_of[last], np.flatnonzero(replica_of != last)
        row = mine[:, None]
        lighter = loads[:, last, None, None] - self._costs[:, own, row]
        left_here = np.where(row == longest[last], alone[1, last], alone[0, last])
        best, found = 0.0, None
        for kind in np.unique(self._kind_of).tolist():
            # Columns: each unit elsewhere, in exchange for one here, then each other replica, for none.
            there = np.flatnonzero((self._kind_of == kind) & (np.arange(len(ends)) != last))
            its = others[self._kind_of[replica_of[others]] == kind]
            to = np.concatenate((replica_of[its], there))
            its = np.concatenate((its, np.full(len(there), -1)))
            one = its >= 0
            here = lighter + np.where(one, self._costs[:, own, its], 0.0)[:, None]
            left_there = np.where(one & (its == longest[to]), alone[1, to], alone[0, to])
            heavier = (loads[:, to] - np.where(one, self._costs[:, kind, its], 0.0))[:, None]
            heavier = heavier + self._costs[:, kind, row]
            alone_here = np.maximum(left_here, np.where(one, self._alone[own, its], 0.0))
            ends_here = np.maximum(here[0], here[1] + alone_here)
            ends_there = np.maximum(heavier[0], heavier[1] + np.maximum(left_there, self._alone[kind, row]))
            later = np.maximum(ends_here, ends_there)
            worth = ends[last] - later + saving * (ends[last] + ends[to] - ends_here - ends_there)
            worth[later >= ends[last] * (1 - WORTH)] = 0.0
            if worth.max(initial=0.0) > best:
                i, j = divmod(int(worth.argmax()), len(its))
                best, found = worth[i, j], (int(mine[i]), int(to[j]), int(its[j]))
        return found

    def _sums(self, replica_of: IntArray, replicas: int) -> FloatArray:
        """Return what the units of each replica cost, and what they add, shape (2, replicas)."""
        unit = np.arange(len(replica_of))
        costs = self._costs[:, self._kind_of[replica_of], unit]
        return np.array([np.bincount(replica_of, each, replicas) for each in costs])

    def _longest(self, replica_of: IntArray, replicas: int) -> tuple[IntArray, FloatArray]:
        """Return the longest unit of each replica, -1 if none, and what it and the next take alone."""
        alone = self._alone[self._kind_of[replica_of], np.arange(len(replica_of))]
        by_replica = np.lexsort((alone, replica_of))
        ends = np.cumsum(np.bincount(replica_of, minlength=replicas))
        number = np.diff(ends, prepend=0)
        longest, seconds = np.full(replicas, -1), np.zeros((2, replicas))
        for rank in range(2):
            there = number > rank
            units = by_replica[ends[there] - 1 - rank]
            seconds[rank, there] = alone[units]
            if not rank:
                longest[there] = units
        return longest, seconds


def spread_groups(
    costs: FloatArray, kind_of: IntArray, busy: FloatArray, groups: Sequence[IntArray]
) -> IntArray:
    """Return the replica of each unit with no two of a group together, as far as there are replicas."""
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
