"""Sharing requests out over replicas of different speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ...data.costs.cost import FloatArray, IntArray


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
