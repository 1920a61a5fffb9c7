"""Constructive heuristics for makespan bin packing (P||Cmax)."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def checked_weights(weights: IntArray, machines: int) -> IntArray:
    """Check an instance; return the weights as int64, shape (n,)."""
    array = np.asarray(weights)
    if array.ndim != 1:
        raise ValueError(f"weights: expected one dimension, got shape {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"weights: expected whole numbers, got dtype {array.dtype}")
    if array.size and int(array.min()) < 0:
        raise ValueError(f"weights[{int(array.argmin())}]: must not be negative, got {int(array.min())}")
    if machines < 1:
        raise ValueError(f"machines: must be at least 1, got {machines}")
    return array.astype(np.int64)


def machine_loads(weights: IntArray, assignment: IntArray, machines: int) -> IntArray:
    """Return the total weight on each machine, shape (machines,)."""
    loads = np.zeros(machines, dtype=np.int64)
    np.add.at(loads, assignment, weights)
    return loads


def longest_processing_time(weights: IntArray, machines: int) -> IntArray:
    """Return each item's machine by Graham's rule.

    The heaviest item goes first, always to the lightest machine. The largest load is at most 4/3 - 1/(3
    machines) times the optimum (Graham 1969).
    """
    weights = checked_weights(weights, machines)
    assignment = np.zeros(weights.size, dtype=np.int64)
    heap = [(0, machine) for machine in range(machines)]
    for item in np.argsort(-weights, kind="stable").tolist():
        load, machine = heap[0]
        assignment[item] = machine
        heapq.heapreplace(heap, (load + int(weights[item]), machine))
    return assignment


def first_fit_decreasing(weights: IntArray, machines: int, capacity: int) -> IntArray | None:
    """Return each item's machine, first fit decreasing, or None.

    It is None if the items need more machines of this capacity.
    """
    room = np.full(machines, capacity, dtype=np.int64)
    assignment = np.zeros(weights.size, dtype=np.int64)
    for item in np.argsort(-weights, kind="stable").tolist():
        weight = weights[item]
        machine = int((room >= weight).argmax())
        if room[machine] < weight:
            return None
        room[machine] -= weight
        assignment[item] = machine
    return assignment


def multifit(weights: IntArray, machines: int, iterations: int = 10) -> IntArray:
    """Return each item's machine by MULTIFIT.

    It is first fit decreasing under a bisected capacity, and never worse than longest processing time first.
    """
    weights = checked_weights(weights, machines)
    best = longest_processing_time(weights, machines)
    high = int(machine_loads(weights, best, machines).max())
    low = max(-(-int(weights.sum()) // machines), int(weights.max(initial=0)))
    for _ in range(iterations):
        if low >= high:
            break
        capacity = (low + high) // 2
        packed = first_fit_decreasing(weights, machines, capacity)
        if packed is None:
            low = capacity + 1
        else:
            best = packed
            high = int(machine_loads(weights, packed, machines).max())
    return best


def karmarkar_karp(weights: IntArray, machines: int) -> IntArray:
    """Return each item's machine by largest differencing (Karmarkar and Karp 1982).

    Every item starts as a partial solution of its own (one machine loaded, the others empty). The two
    partial solutions of widest spread are merged, heaviest machine of one on lightest of the other, until
    one is left.
    """
    weights = checked_weights(weights, machines)
    count = weights.size
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    # A partial solution lists, heaviest first, (load above its lightest machine, item set) of the machines
    # that hold anything: most hold one item, and a full vector of machines would cost O(n m).
    children: list[tuple[int, int]] = [(-1, -1)] * count
    heap: list[tuple[int, int, list[tuple[int, int]]]] = [
        (-int(weight), item, [(int(weight), item)]) for item, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    for tick in range(count, 2 * count - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        shared = max(0, len(first) + len(second) - machines)
        alone = len(first) - shared, len(second) - shared
        merged = first[: alone[0]] + second[: alone[1]]
        for (load, node), (other_load, other_node) in zip(
            first[alone[0] :], reversed(second[alone[1] :]), strict=True
        ):
            children.append((node, other_node))
            merged.append((load + other_load, len(children) - 1))
        merged.sort(reverse=True)
        lightest = merged[-1][0] if len(merged) == machines else 0
        heapq.heappush(
            heap, (lightest - merged[0][0], tick, [(load - lightest, node) for load, node in merged])
        )
    assignment = np.zeros(count, dtype=np.int64)
    for machine, root in enumerate(node for _, node in heap[0][2]):
        stack = [root]
        while stack:
            node = stack.pop()
            if node < count:
                assignment[node] = machine
            else:
                stack.extend(children[node])
    return assignment
