"""Column generation for packing: patterns, and prices that refute a capacity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...deadline import Deadline
from ...programme import Entries, Programme
from .heuristics import IntArray
from .lower_bounds import PartitionBound, priced_bound

FloatArray = NDArray[np.float64]
Pattern = tuple[int, ...]

PRICE_SCALE = 1_000_000
"""Fraction to which prices are rounded down for a certificate."""
SMALLEST_GAIN = 1e-7
CELLS = 10_000
"""Cells of a knapsack that take as long as an entry of a programme."""
SMOOTHING = 0.7
"""Weight of the best prices when patterns are priced (Wentges 1997)."""


class PatternMaster:
    """Patterns for one capacity, until they suffice or it is refuted.

    The Gilmore-Gomory relaxation: the least number of patterns, fractions allowed, that cover every item. If
    it exceeds the machines, its prices refute the capacity.

    weights: Weight of each item, at most ``capacity``, shape (n,); items without weight are left out.
    capacity: Largest load allowed on a machine.
    """

    def __init__(self, weights: IntArray, machines: int, capacity: int) -> None:
        self.machines = machines
        self.capacity = capacity
        self.lengths, self.counts = np.unique(weights[weights > 0], return_counts=True)
        self.most = np.minimum(self.counts, capacity // self.lengths)
        self.patterns: list[Pattern] = [(kind,) for kind in range(len(self.lengths))]
        self._known = set(self.patterns)

    def refute(self, deadline: Deadline) -> PartitionBound | None:
        """Return the bound that refutes the capacity, or None."""
        best_prices: FloatArray = self.lengths / self.capacity
        best_bound = float(best_prices @ self.counts)
        master_prices: FloatArray | None = None
        weight = SMOOTHING
        prices = best_prices
        while deadline.left > 0:
            deadline.count(self.work // CELLS)
            dearest, offered = dear_patterns(self.lengths, self.most, self.capacity, prices)
            proven = float(prices @ self.counts) / dearest
            if proven > best_bound:
                best_prices, best_bound = prices / dearest, proven
            if best_bound > self.machines + SMALLEST_GAIN:
                bound = self._whole_prices(best_prices)
                if bound is not None:
                    return bound
            fresh = [pattern for pattern in offered if self._gains(pattern, master_prices)]
            self.patterns.extend(fresh)
            self._known.update(fresh)
            if fresh or master_prices is None:
                weight = SMOOTHING
                used, master_prices = self._solve_master()
                if used <= self.machines + SMALLEST_GAIN:
                    return None
            elif weight == 0:
                return None
            else:
                weight = weight / 2 if weight > 0.1 else 0.0
            prices = weight * best_prices + (1 - weight) * master_prices
        return None

    @property
    def work(self) -> int:
        """Return the size of one pricing knapsack."""
        return int(self.most.sum()) * self.capacity

    def assemble(self, weights: IntArray, seconds: float) -> IntArray | None:
        """Return an assignment made of the patterns, if found in time."""
        count, kinds = len(self.patterns), len(self.lengths)
        used = np.full(count, kinds), np.arange(count), 1.0
        low, high = np.append(self.counts, 0.0), np.append(np.full(kinds, np.inf), self.machines)
        programme = Programme.of(np.ones(count), [self._cover(), used], low, high)
        times = programme.solved_whole(seconds=seconds, mip_rel_gap=1.0)
        if times is None:
            return None
        waiting = {int(length): np.flatnonzero(weights == length).tolist() for length in self.lengths}
        assignment = np.zeros(len(weights), dtype=np.int64)
        machine = 0
        for pattern, number in zip(self.patterns, np.round(times).astype(int).tolist(), strict=True):
            for _ in range(number):
                for kind in pattern:
                    if waiting[int(self.lengths[kind])]:
                        assignment[waiting[int(self.lengths[kind])].pop()] = machine
                machine += 1
        return assignment

    def _gains(self, pattern: Pattern, prices: FloatArray | None) -> bool:
        if pattern in self._known:
            return False
        return prices is None or float(prices[list(pattern)].sum()) > 1 + SMALLEST_GAIN

    def _cover(self) -> Entries:
        """Return the items (rows) of each pattern (column)."""
        rows = np.concatenate([np.array(pattern) for pattern in self.patterns])
        columns = np.repeat(np.arange(len(self.patterns)), [len(pattern) for pattern in self.patterns])
        return rows, columns, 1.0

    def _solve_master(self) -> tuple[float, FloatArray]:
        """Return the fractional number of patterns and each kind's price."""
        counts = self.counts.astype(np.float64)
        programme = Programme.of(
            np.ones(len(self.patterns)), [self._cover()], counts, np.full(len(counts), np.inf)
        )
        optimum = programme.solved()
        assert optimum is not None, "a pattern of each kind alone covers all"
        return optimum.cost, optimum.prices

    def _whole_prices(self, prices: FloatArray) -> PartitionBound | None:
        """Return the bound of rounded prices, if they still refute the capacity."""
        whole = np.floor(np.maximum(prices, 0) * PRICE_SCALE).astype(np.int64)
        dearest = np.zeros(self.capacity + 1, dtype=np.int64)
        kinds = zip(self.lengths.tolist(), self.most.tolist(), whole.tolist(), strict=True)
        for length, copies, price in kinds:
            for _ in range(copies):
                dearest[length:] = np.maximum(dearest[length:], dearest[:-length] + price)
        limit = int(dearest[-1])
        if int(whole @ self.counts) <= self.machines * limit:
            return None
        return priced_bound("column generation prices", self.capacity, self.lengths, whole, limit)


def dear_patterns(
    lengths: IntArray, most: IntArray, capacity: int, prices: FloatArray
) -> tuple[float, list[Pattern]]:
    """Return the highest price, and a costly pattern for each item."""
    order = np.argsort(-prices / lengths, kind="stable")
    dearest = np.zeros(capacity + 1)
    steps: list[tuple[int, int, NDArray[np.bool_]]] = []
    for kind in order.tolist():
        length = int(lengths[kind])
        for _ in range(int(most[kind])):
            candidate = dearest[:-length] + prices[kind]
            better = candidate > dearest[length:] + 1e-12
            if not better.any():
                break
            dearest[length:] = np.where(better, candidate, dearest[length:])
            steps.append((kind, length, better))
    patterns = {_recovered(steps, capacity, ())}
    for kind, length in enumerate(lengths.tolist()):
        pattern = _recovered(steps, capacity - length, (kind,))
        if pattern.count(kind) <= most[kind]:
            patterns.add(pattern)
    return float(dearest[capacity]), sorted(patterns)


def _recovered(steps: list[tuple[int, int, NDArray[np.bool_]]], load: int, held: Pattern) -> Pattern:
    items = list(held)
    for kind, length, better in reversed(steps):
        if load >= length and better[load - length]:
            items.append(kind)
            load -= length
    return tuple(sorted(items))
