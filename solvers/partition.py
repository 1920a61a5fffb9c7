"""Makespan bin packing, the hybrid paper's (26)-(30): the fullest slot as light as can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..models.partition_bounds import dual_feasible_bound, lifted_bound
from ..models.partition_heuristics import (
    IntArray,
    checked_weights,
    karmarkar_karp,
    longest_processing_time,
    machine_loads,
    multifit,
)
from .partition_search import Resplit

CONSTRUCTIONS: tuple[Callable[[IntArray, int], IntArray], ...] = (
    longest_processing_time,
    multifit,
    karmarkar_karp,
)


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """
    An assignment of items to machines and what is proven about it.

    Parameters
    ----------
    assignment
        Machine of each item, int64, shape (n,).
    makespan
        Largest machine load.
    bound
        No assignment has a smaller makespan.
    source
        Which argument proves the bound.
    witness
        What a checker needs to repeat that argument, JSON-able.
    seconds
        CPU seconds spent.
    """

    assignment: IntArray
    makespan: int
    bound: int
    source: str
    seconds: float
    witness: Mapping[str, object] = field(default_factory=dict)

    @property
    def optimal(self) -> bool:
        """
        Return whether the makespan is proven optimal.

        Returns
        -------
        bool
            True when makespan and bound meet.
        """
        return self.makespan == self.bound

    @property
    def gap(self) -> float:
        """
        Return the relative gap.

        Returns
        -------
        float
            (makespan - bound) / makespan, 0 for an empty instance.
        """
        return (self.makespan - self.bound) / self.makespan if self.makespan else 0.0


def solve_partition(
    weights: IntArray, machines: int, seconds: float = 10.0, seed: int = 0
) -> PartitionResult:
    """
    Return the best assignment found, proven optimal where time allows.

    Bounds and constructive heuristics first, then re-splits of pairs of machines towards the bound, then
    (only when a gap is left) column generation, which lifts the bound and assembles an assignment from its
    patterns.

    Parameters
    ----------
    weights
        Weight of each item (rounds of each request), shape (n,), not negative.
    machines
        Number of machines (slots), at least 1.
    seconds
        CPU seconds after which it stops with what it has; the constructive heuristics always run.
    seed
        Seed of the local search.

    Returns
    -------
    PartitionResult
        The assignment, its makespan and the proven bound.

    Raises
    ------
    ValueError
        If a weight is negative or not whole, or there is no machine.
    """
    started = time.process_time()
    weights = checked_weights(weights, machines)
    rng = np.random.default_rng(seed)

    def left() -> float:
        return max(0.0, seconds - (time.process_time() - started))

    bound = lifted_bound(weights, machines)
    best, makespan = longest_processing_time(weights, machines), 0
    makespan = int(machine_loads(weights, best, machines).max())
    for construct in CONSTRUCTIONS[1:]:
        if makespan > bound.value:
            candidate = construct(weights, machines)
            reached = int(machine_loads(weights, candidate, machines).max())
            if reached < makespan:
                best, makespan = candidate, reached
    if makespan > bound.value:
        bound = dual_feasible_bound(weights, machines, bound.value, makespan) or bound
    share = 0.1
    target = bound.value
    while makespan > bound.value and target < makespan and left() > 0:
        search = Resplit(weights, best, machines, target, rng)
        search.run(min(left(), share * seconds))
        reached = max(search.loads)
        if reached < makespan:
            best, makespan = search.assignment(), reached
        target = max(target + 1, (target + makespan) // 2)
    return PartitionResult(
        best, makespan, bound.value, bound.source, time.process_time() - started, bound.witness
    )
