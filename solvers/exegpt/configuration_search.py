"""ExeGPT's branch and bound over configurations (Algorithm 1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[int, ...]
Evaluate = Callable[[Point], tuple[float, float]]
"""Returns latency (seconds) and throughput (requests a second) of a configuration; an infeasible one has
infinite latency."""


@dataclass(frozen=True, slots=True)
class Variable:
    """
    One whole-number control variable.

    name: What it controls.
    low, high: Its range, both included.
    rises: Whether latency and throughput rise with it, or fall.
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
        """Return the value at a step from the end where latency and throughput are low."""
        return self.low + step if self.rises else self.high - step


@dataclass(frozen=True, slots=True)
class Violations:
    """
    Where latency or throughput falls though every variable moves to raise it, among the evaluated points.

    pairs: Pairs of points of which one lies beyond the other in every variable.
    latency, throughput: Of them, those whose latency or throughput falls by more than the tolerance.
    worst_latency, worst_throughput: The largest fall, as a fraction.
    """

    pairs: int
    latency: int
    throughput: int
    worst_latency: float
    worst_throughput: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """
    What a configuration search found.

    best: Values of the variables; None if no configuration meets the bound. It is within the gap of every
        configuration of the grid *if* latency and throughput are monotone up to the tolerances.
    throughput: Of the best.
    evaluated: Configurations looked at.
    violations: Of monotonicity, among the evaluated points.
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
    r"""
    Return the configuration of most throughput within a latency bound (ExeGPT, Algorithm 1).

    A block of configurations can reach at most the throughput of its upper corner, and is of no use if its
    lower corner is too slow; the block of the largest upper end is split first. Where the paper splits on two
    variables, this takes any number: of the corners at which one variable alone is at its upper end, the one
    of most throughput within the bound names a variable, and the block is halved along the longest of the
    others ("vertically" if the best corner is top left); if none is within the bound, along its longest side.
    Our addition, exact under the same assumption: what bisection along each side shows to be too slow is cut
    off before a block is split, which saves evaluations where the bound runs across a long block.

    evaluate: Simulates a configuration; asked once for each.
    latency_bound: :math:`L_b`, seconds.
    gap: Of throughput, as a fraction: no better configuration is looked for that is better by less.
    throughput_tolerance, latency_tolerance: :math:`\epsilon_T` and :math:`\epsilon_L` as fractions of the
        best throughput and of the bound: blocks are kept although they seem worse, or too slow, by so much.
    at_least: Throughput already reached elsewhere: nothing that is no better is looked for.
    """
    tolerances = (throughput_tolerance, latency_tolerance)
    return _Search(evaluate, variables, latency_bound, gap, tolerances, at_least).run()


class _Search:
    """Blocks in steps: 0 where latency and throughput are low, rising with them."""

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
        # What a block's upper corner says is believed up to the first, and is worth a look beyond the second.
        self.slack = (1 + tolerances[0]) / (1 + gap)
        self.late = bound * (1 + tolerances[1]) if math.isfinite(bound) else bound
        self.seen: dict[Point, tuple[float, float]] = {}
        self.best: Point | None = None
        self.latency, self.throughput = math.inf, at_least

    def run(self) -> SearchResult:
        lowest = tuple(0 for _ in self.variables)
        highest = tuple(each.high - each.low for each in self.variables)
        queue: list[tuple[float, int, Point, Point]] = []
        self._add(queue, lowest, highest)
        while queue:
            upper, _, low, high = heapq.heappop(queue)
            if -upper * self.slack <= self.throughput:
                # The queue is sorted: no block left can be better.
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
        # Even a block whose best corner is known is split while tolerance leaves something beyond it.
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
        corner, most = None, -math.inf
        for side in sides:
            latency, throughput = self._at(_with(low, side, high[side]))
            if latency <= self.bound and throughput > most:
                corner, most = side, throughput
        others = [side for side in sides if side != corner] or sides
        return max(others, key=lambda side: high[side] - low[side])

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
        return tuple(each.value(at) for each, at in zip(self.variables, step, strict=True))


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
