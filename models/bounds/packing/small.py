"""Small packings, solved by trying every assignment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .heuristics import IntArray

MOST_ITEMS = 24
"""Items up to which every assignment is tried."""
MOST_STATES = 40_000
"""States after which the search gives up, in about 0.1 s."""

Loads = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """Result of a small packing.

    assignment: Machine of each item, shape (items,), or None if they do not fit.
    """

    assignment: IntArray | None


def settle_packing(weights: IntArray, machines: int, capacity: int) -> Settled | None:
    """Return whether items fit machines of a capacity; None if too many.

    Items go to machines in descending weight. All machines are equal, so only their sorted loads matter after
    each item. Idle room on machines that take no further item may not exceed the spare room.
    """
    order = np.argsort(-weights, kind="stable")
    heavy: list[int] = weights[order].tolist()
    spare = machines * capacity - sum(heavy)
    if len(heavy) > MOST_ITEMS:
        return None
    if spare < 0 or heavy[0] > capacity:
        return Settled(None)
    layers: list[dict[Loads, Loads]] = [{(0,) * machines: ()}]
    for weight in heavy:
        reached: dict[Loads, Loads] = {}
        for loads in layers[-1]:
            for at in range(machines):
                if loads[at] + weight > capacity or (at and loads[at] == loads[at - 1]):
                    continue
                after = tuple(sorted((*loads[:at], loads[at] + weight, *loads[at + 1 :])))
                idle = sum(capacity - load for load in after if capacity - load < heavy[-1])
                if idle <= spare:
                    reached.setdefault(after, loads)
        if len(reached) > MOST_STATES:
            return None
        if not reached:
            return Settled(None)
        layers.append(reached)
    return Settled(_traced(layers, order, machines))


def _traced(layers: list[dict[Loads, Loads]], order: IntArray, machines: int) -> IntArray:
    """Return an assignment that leads to the last loads."""
    path = [next(iter(layers[-1]))]
    for layer in reversed(layers[1:]):
        path.append(layer[path[-1]])
    assignment, loads = np.empty(len(order), dtype=np.int64), [0] * machines
    for item, before, after in zip(order.tolist(), path[::-1], path[-2::-1], strict=False):
        # One load of those before is gone, and one of those after is new; none for an item of no weight.
        left, new = list(before), list(after)
        for load in before:
            if load in new:
                new.remove(load)
                left.remove(load)
        machine = loads.index(left[0]) if left else 0
        loads[machine] = new[0] if new else loads[machine]
        assignment[item] = machine
    return assignment
