"""Makespan bin packing, the hybrid paper's (26)-(30)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ...deadline import Deadline
from .heuristics import (
    IntArray,
    checked_weights,
    karmarkar_karp,
    longest_processing_time,
    machine_loads,
    multifit,
)
from .local_search import Resplit
from .lower_bounds import PartitionBound, lifted_bound, refuted_by_trial
from .patterns import PatternMaster

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
        rest, new = list(before), list(after)
        for load in before:
            if load in new:
                new.remove(load)
                rest.remove(load)
        machine = loads.index(rest[0]) if rest else 0
        loads[machine] = new[0] if new else loads[machine]
        assignment[item] = machine
    return assignment


CONSTRUCTIVE = (longest_processing_time, multifit, karmarkar_karp)
FIRST_RESPLIT = 1.0
"""Seconds for splitting pairs of machines before slower methods."""
LARGEST_KNAPSACK = 20_000_000
"""Items times capacity up to which column generation is tried."""
SMALL_KNAPSACK = 400_000
"""Items times capacity up to which integer programming comes first."""


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """Assignment of items to machines, and its proof.

    assignment: Machine of each item, int64, shape (n,).
    makespan: Largest machine load.
    bound: Lower bound on it.
    source: Name of the bound's argument.
    witness: Data with which a checker repeats that argument, as JSON values.
    """

    assignment: IntArray
    makespan: int
    bound: int
    source: str
    seconds: float
    witness: Mapping[str, object] = field(default_factory=dict)

    @property
    def optimal(self) -> bool:
        """Return whether the makespan is proven optimal."""
        return self.makespan == self.bound

    @property
    def gap(self) -> float:
        """Return the relative gap."""
        return (self.makespan - self.bound) / self.makespan if self.makespan else 0.0


def solve_partition(
    weights: IntArray, machines: int, seconds: float = 10.0, seed: int = 0
) -> PartitionResult:
    """Pack items onto machines; prove the optimum if time allows.

    Bounds and constructive heuristics come first; a small packing is then settled by trying every one.
    Otherwise pairs of machines are split towards the bound. If a gap is left, column generation lifts the
    bound and assembles an assignment from its patterns.
    """
    weights = checked_weights(weights, machines)
    search = _Search(weights, machines, Deadline(seconds), seed)
    search.construct()
    search.settle()
    search.resplit(search.bound.value, max(0.1 * seconds, FIRST_RESPLIT))
    knapsack = search.master(search.bound.value).work
    if knapsack <= LARGEST_KNAPSACK:
        search.price_out()
    if knapsack <= SMALL_KNAPSACK:
        search.assemble()
    search.close_in()
    bound = search.bound
    return PartitionResult(
        search.best,
        search.makespan,
        bound.value,
        bound.source,
        search.seconds - search.deadline.left,
        bound.witness,
    )


def packed_full(
    weights: IntArray, machines: int, tries: int, rng: np.random.Generator, seconds: float = math.inf
) -> IntArray:
    """Return each item's machine in a good packing, without proof.

    It improves the best quick heuristic by splits of pairs.
    """
    began = time.perf_counter()

    def most(assignment: IntArray) -> int:
        return int(machine_loads(weights, assignment, machines).max())

    best = min((rule(weights, machines) for rule in CONSTRUCTIVE[:2]), key=most)
    makespan, bound = most(best), lifted_bound(weights, machines).value
    step = makespan - bound
    while step and makespan > bound and (seconds_left := seconds - (time.perf_counter() - began)) > 0:
        search = Resplit(weights, best, machines, max(bound, makespan - step), rng)
        reached = search.run(seconds_left, tries)
        best = min(best, search.assignment(), key=most)
        makespan = most(best)
        step = min(step if reached else step // 2, makespan - bound)
    return best


def priced_packing(
    weights: IntArray, machines: int, at_least: int, deadline: Deadline
) -> PartitionBound | None:
    """Return the bound of column generation, if above a known one."""
    search = _Search(checked_weights(weights, machines), machines, deadline, seed=0)
    if search.master(max(at_least, search.bound.value)).work > LARGEST_KNAPSACK:
        return None
    search.construct()
    if search.bound.value < at_least:
        search.bound = PartitionBound(at_least, "known", {})
    search.price_out()
    return search.bound if search.bound.value > at_least else None


class _Search:
    """Best assignment and bound so far, and steps that improve them."""

    def __init__(self, weights: IntArray, machines: int, deadline: Deadline, seed: int) -> None:
        self.weights = weights
        self.machines = machines
        self.deadline, self.seconds = deadline, deadline.left
        self.rng = np.random.default_rng(seed)
        self.bound = lifted_bound(weights, machines)
        self.best = CONSTRUCTIVE[0](weights, machines)
        self.makespan = int(machine_loads(weights, self.best, machines).max())

    def open(self) -> bool:
        return self.makespan > self.bound.value and self.deadline.left > 0

    def accept(self, assignment: IntArray) -> None:
        makespan = int(machine_loads(self.weights, assignment, self.machines).max())
        if makespan < self.makespan:
            self.best, self.makespan = assignment, makespan

    def construct(self) -> None:
        for heuristic in CONSTRUCTIVE[1:]:
            if self.makespan > self.bound.value:
                self.accept(heuristic(self.weights, self.machines))

    def settle(self) -> None:
        """Settle a small packing; halve the gap each time."""
        while self.open():
            capacity = (self.bound.value + self.makespan - 1) // 2
            settled = settle_packing(self.weights, self.machines, capacity)
            if settled is None:
                return
            if settled.assignment is None:
                self.bound = refuted_by_trial(capacity)
            else:
                self.accept(settled.assignment)

    def resplit(self, target: int, seconds: float) -> bool:
        """Return whether splits of pairs reach the target."""
        if not self.open():
            return False
        search = Resplit(self.weights, self.best, self.machines, target, self.rng)
        search.run(min(seconds, self.deadline.left))
        self.accept(search.assignment())
        return self.makespan <= target

    def price_out(self) -> None:
        """Raise the bound to the first capacity that prices cannot refute."""
        unrefuted = self.makespan
        while self.open() and self.bound.value < unrefuted:
            capacity = (self.bound.value + unrefuted) // 2
            refuted = self.master(capacity).refute(self.deadline)
            if refuted is None:
                unrefuted = capacity
            else:
                self.bound = refuted

    def close_in(self) -> None:
        """Lower the makespan by splits, in smaller steps after a failure."""
        step = self.makespan
        while self.open():
            step = max(1, min(step, (self.makespan - self.bound.value) // 2))
            # The shortest step gets all the time there is.
            seconds = 0.1 * self.seconds if step > 1 else self.seconds
            if not self.resplit(self.makespan - step, seconds):
                step //= 2

    def assemble(self) -> None:
        """Assemble assignments from patterns; halve the gap each time."""
        failed = self.bound.value - 1
        while self.open() and failed + 1 < self.makespan:
            capacity = failed + 1 if failed < self.bound.value else (failed + self.makespan) // 2
            master = self.master(capacity)
            master.refute(self.deadline)
            assembled = master.assemble(self.weights, max(0.0, 0.4 * self.deadline.left))
            if assembled is None:
                failed = capacity
            else:
                self.accept(assembled)

    def master(self, capacity: int) -> PatternMaster:
        return PatternMaster(self.weights, self.machines, capacity)
