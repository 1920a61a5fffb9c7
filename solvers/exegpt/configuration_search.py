"""ExeGPT's branch and bound over configurations (Algorithm 1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[int, ...]
Evaluate = Callable[[Point], tuple[float, float]]
"""Latency (s) and throughput (requests/s) at a point; infinite latency if infeasible."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Whole-number control variable.

    low, high: Its range, both included.
    rises: True if latency and throughput rise with it, False if they fall.

    Raises ValueError if the range is empty.
    """

    name: str
    low: int
    high: int
    rises: bool = True

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"{self.name} ranges from {self.low} to {self.high}: nothing")

    def value(self, step: int) -> int:
        """Return the value at a step from the end of low latency."""
        return self.low + step if self.rises else self.high - step


@dataclass(frozen=True, slots=True)
class Violations:
    """Violations of monotonicity among the evaluated points.

    pairs: Pairs of points with one beyond the other in every variable.
    latency, throughput: Pairs in which it falls by more than the tolerance.
    worst_latency, worst_throughput: Largest fall, as a fraction.
    """

    pairs: int
    latency: int
    throughput: int
    worst_latency: float
    worst_throughput: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a configuration search.

    best: Values of the variables; None if no configuration meets the bound. They are within the gap of the
        optimum if latency and throughput are monotone up to the tolerances.
    evaluated: Number of simulated configurations.
    violations: Violations of monotonicity among them.
    """

    best: Point | None
    throughput: float
    evaluated: int
    violations: Violations


def branch_and_bound(
    evaluate: Evaluate,
    variables: Sequence[Variable],
    latency_bound: float,
    *,
    gap: float = 0.0,
    throughput_tolerance: float = 0.0,
    latency_tolerance: float = 0.0,
    at_least: float = -math.inf,
) -> SearchResult:
    r"""Find the highest throughput under a latency bound (ExeGPT, Algorithm 1).

    A block of configurations can reach at most the throughput of its upper corner, and is useless if its
    lower corner is too slow. The block of the largest upper bound is split first.

    The paper splits on two variables; this takes any number. The corners with one variable at its upper end
    are compared: the one of most throughput within the bound names a variable. The block is halved along the
    longest of the others ("vertically" if the best corner is top left). If no corner is within the bound, it
    is halved along its longest side.

    Our addition is exact under the same assumption. Before a split, bisection along each side cuts off
    configurations that are too slow. This saves evaluations where the bound crosses a long block.

    evaluate: Simulates a configuration; called once for each.
    latency_bound: :math:`L_b`, seconds.
    gap: Relative improvement of throughput below which the search ends.
    throughput_tolerance, latency_tolerance: :math:`\epsilon_T` and :math:`\epsilon_L` as fractions of the
    best throughput and of the bound.
    at_least: Throughput already reached; only better configurations are searched for.
    """
    tolerances = (throughput_tolerance, latency_tolerance)
    return _Search(evaluate, variables, latency_bound, gap, tolerances, at_least).run()


class _Search:
    """Blocks in steps from 0, where latency and throughput are low."""

    def __init__(
        self,
        evaluate: Evaluate,
        variables: Sequence[Variable],
        bound: float,
        gap: float,
        tolerances: tuple[float, float],
        at_least: float,
    ) -> None:
        self.evaluate, self.variables, self.bound = evaluate, variables, bound
        self.tolerances = tolerances
        # Slack of an upper corner's throughput, and latency beyond which a lower corner is too slow.
        self.slack = (1 + tolerances[0]) / (1 + gap)
        self.late = bound * (1 + tolerances[1]) if math.isfinite(bound) else bound
        self.seen: dict[Point, tuple[float, float]] = {}
        self.best: Point | None = None
        self.latency, self.throughput = math.inf, at_least

    def run(self) -> SearchResult:
        lowest = tuple(0 for _ in self.variables)
        highest = tuple(variable.high - variable.low for variable in self.variables)
        queue: list[tuple[float, int, Point, Point]] = []
        self._add(queue, lowest, highest)
        while queue:
            upper, _, low, high = heapq.heappop(queue)
            if -upper * self.slack <= self.throughput:
                # The queue is sorted: no remaining block can be better.
                break
            side = self._side(low, high)
            middle = (low[side] + high[side]) // 2
            self._add(queue, low, _with(high, side, middle))
            self._add(queue, _with(low, side, middle + 1), high)
        return SearchResult(
            None if self.best is None else self._values(self.best),
            -math.inf if self.best is None else self.throughput,
            len(self.seen),
            _violations(self.seen, self.tolerances),
        )

    def _add(self, queue: list[tuple[float, int, Point, Point]], low: Point, high: Point) -> None:
        if not self._early(low):
            return
        high = self._reduced(low, high)
        latency, throughput = self._at(high)
        met = latency <= self.bound and math.isfinite(latency)
        # Even a block with a known best corner is split while the tolerance leaves candidates beyond it.
        if low != high and throughput * self.slack > self.throughput and (not met or self.tolerances[0] > 0):
            heapq.heappush(queue, (-throughput, len(self.seen), low, high))

    def _reduced(self, low: Point, high: Point) -> Point:
        for side in range(len(low)):
            first, last = low[side], high[side]
            if first == last or self._early(_with(low, side, last)):
                continue
            while last - first > 1:
                middle = (first + last) // 2
                if self._early(_with(low, side, middle)):
                    first = middle
                else:
                    last = middle
            high = _with(high, side, first)
        return high

    def _early(self, step: Point) -> bool:
        latency, _ = self._at(step)
        return latency <= self.late and math.isfinite(latency)

    def _side(self, low: Point, high: Point) -> int:
        sides = [side for side in range(len(low)) if high[side] > low[side]]
        corner, widest = None, -math.inf
        for side in sides:
            latency, throughput = self._at(_with(low, side, high[side]))
            if latency <= self.bound and throughput > widest:
                corner, widest = side, throughput
        candidates = [side for side in sides if side != corner] or sides
        return max(candidates, key=lambda side: high[side] - low[side])

    def _at(self, step: Point) -> tuple[float, float]:
        known = self.seen.get(step)
        if known is None:
            known = self.seen[step] = self.evaluate(self._values(step))
            latency, throughput = known
            met = latency <= self.bound and math.isfinite(latency)
            if met and (throughput, -latency) > (self.throughput, -self.latency):
                self.best, self.latency, self.throughput = step, latency, throughput
        return known

    def _values(self, step: Point) -> Point:
        return tuple(variable.value(at) for variable, at in zip(self.variables, step, strict=True))


def _with(point: Point, side: int, value: int) -> Point:
    return (*point[:side], value, *point[side + 1 :])


def _violations(seen: dict[Point, tuple[float, float]], tolerances: tuple[float, float]) -> Violations:
    if not seen:
        return Violations(0, 0, 0, 0.0, 0.0)
    steps = np.array(list(seen))
    reached = np.array(list(seen.values()))
    below = np.asarray((steps[:, None, :] <= steps[None, :, :]).all(axis=2))
    np.fill_diagonal(below, False)
    falls, counts = [], []
    for column, tolerance in ((0, tolerances[1]), (1, tolerances[0])):
        values = reached[:, column]
        with np.errstate(invalid="ignore", divide="ignore"):
            fall = np.where(below & np.isfinite(values)[None, :], 1 - values[None, :] / values[:, None], 0.0)
        fall = np.nan_to_num(fall, nan=0.0, neginf=0.0, posinf=1.0)
        falls.append(max(0.0, float(fall.max())))
        counts.append(int((fall > tolerance + 1e-12).sum()))
    return Violations(int(below.sum()), counts[0], counts[1], falls[0], falls[1])
