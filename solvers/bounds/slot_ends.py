"""Prices that prove how much the first and the last requests of slots waste."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...models.bounds.slot_ends import PARTS, EndCase, EndPrices, EndWaste, SlotEnds

STEPS = 80
"""Steps of an ascent at most, with those that look for a start."""

STARTS = ((1.0, 0.1), (2.0, 0.1), (2.0, 0.25), (4.0, 0.25), (4.0, 0.5), (8.0, 0.5), (8.0, 1.0))
"""What an end value and an end request are worth where a first ascent starts, in charges of a value."""

SCALE = np.array([0.03, 0.5, 1.0, 0.1])
"""How far the share, and the prices of values, of end values and of end requests, move at a time."""

MOVED_SCALE = 4.0
"""The same of what single end values cost more or less."""

DEFLECTION = 1.5
"""How much of the last direction is added where the slope points back from it."""


def refute_case(
    ends: SlotEnds, case: EndCase, charge: int, near: Sequence[EndPrices], deadline: float
) -> tuple[EndWaste | None, bool]:
    """
    Return a waste that refutes a case, or None if none was found, and whether there was time to look for it.

    Subgradient ascent with the step that would reach the waste needed if it went straight (Polyak 1969), its
    directions deflected from going back and forth (Camerini, Fratta and Maffioli 1975).

    Parameters
    ----------
    ends
        What slots waste.
    case
        The case.
    charge
        A charge for a value to start from, in rounds, where no prices are near.
    near
        Prices for similar cases to start from, the most similar first.
    deadline
        Seconds (:func:`time.perf_counter`) at which it gives up.
    """
    mirror = _mirror(ends.longest, case.rounds)
    best: tuple[EndWaste, _Point] | None = None
    begun, steps = time.perf_counter(), 0
    for point in _points(near, ends.longest, charge, mirror):
        waste = ends.relaxed(point.prices(case.rounds, mirror))
        if case.refuted_by(waste):
            return waste, True
        if best is None or case.lacking(waste) < case.lacking(best[0]):
            best = waste, point
        steps += 1
        # What is cut off has proven nothing, so what may take all steps is not begun without time for them.
        now = time.perf_counter()
        left = 0 if near else STEPS - steps
        if now + left * (now - begun) / steps > deadline:
            return None, False
    assert best is not None, "there are prices to start from"
    waste, point = best
    while steps < STEPS and time.perf_counter() < deadline:
        point = point.ascended(ends, case, waste, mirror)
        waste = ends.relaxed(point.prices(case.rounds, mirror))
        if case.refuted_by(waste):
            return waste, True
        steps += 1
    return None, steps >= STEPS


def _points(near: Sequence[EndPrices], longest: int, charge: int, mirror: IntArray) -> list[_Point]:
    """Return where an ascent may start."""
    if near:
        return [_Point.of(prices, mirror) for prices in near]
    parts, level = max(1, charge) * PARTS, np.zeros(longest)
    return [
        _Point(filling, np.array([PARTS / 2, parts, by * parts, end * parts]), level)
        for filling in (False, True)
        for by, end in STARTS
    ]


def _mirror(longest: int, rounds: int) -> IntArray:
    """Return the end value that comes with each end value, 0 for none, shape (longest,)."""
    mirror: IntArray = (rounds - np.arange(longest)) % longest
    mirror[0] = 0
    return mirror


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """
    Prices in fractions of a part.

    Parameters
    ----------
    filling
        Whether the shortest requests fill gaps.
    common
        The share and the prices that :data:`SCALE` names, shape (4,).
    moved
        What end values cost more, shape (longest,).
    direction
        Where the last step went, if there was one, shape (4 + longest,).
    """

    filling: bool
    common: FloatArray
    moved: FloatArray
    direction: FloatArray | None = None

    @classmethod
    def of(cls, prices: EndPrices, mirror: IntArray) -> _Point:
        """Return the point of given prices, made for other rounds perhaps."""
        four = np.array([prices.share, prices.value, prices.end_value, prices.end], dtype=np.float64)
        return cls(prices.filling, four, _antisymmetric(prices.moved.astype(np.float64), mirror))

    def prices(self, rounds: int, mirror: IntArray) -> EndPrices:
        """Return the prices in whole parts."""
        share, value, end_value, end = np.rint(self.common).astype(np.int64).tolist()
        dearer = np.minimum(np.rint(np.maximum(self.moved, 0.0)).astype(np.int64), end_value)
        moved = dearer - np.where(mirror > 0, dearer[mirror], 0)
        return EndPrices(rounds, self.filling, share, value, end_value, end, moved)

    def ascended(self, ends: SlotEnds, case: EndCase, waste: EndWaste, mirror: IntArray) -> _Point:
        """Return the next point."""
        of = waste.prices
        left = of.rounds % ends.longest
        serving = 2 * of.end <= of.share * left
        filled = ends.filled if of.filling else 0
        slope = np.array(
            [
                waste.extra - filled - case.late + (0 if serving else ends.slots * left),
                waste.values - case.values,
                len(waste.end_values) - case.end_values,
                2 * ends.slots * serving - waste.ends,
            ],
            dtype=np.float64,
        )
        bought = np.zeros(ends.longest)
        bought[waste.end_values] = 1.0
        direction = np.concatenate((SCALE * slope, MOVED_SCALE * _antisymmetric(bought, mirror)))
        if self.direction is not None:
            back = -float(direction @ self.direction) / float(self.direction @ self.direction)
            direction = direction + max(0.0, DEFLECTION * back) * self.direction
        steepness = float(direction @ direction)
        if steepness == 0:
            return self
        step = case.lacking(waste) / steepness
        # Nothing wastes more than this, so beyond it prices only grow.
        most = PARTS * ends.longest
        all_waste = most * int(ends.number.sum())
        highest = np.array([PARTS, all_waste, all_waste, most])
        prices = np.clip(self.common + step * SCALE * direction[:4], 0.0, highest)
        moved = np.clip(self.moved + step * MOVED_SCALE * direction[4:], -prices[2], prices[2])
        return _Point(self.filling, prices, moved, direction)


def _antisymmetric(moved: FloatArray, mirror: IntArray) -> FloatArray:
    """Return half of what each end value has more than the one that comes with it, 0 where none does."""
    half: FloatArray = np.where(mirror > 0, (moved - moved[mirror]) / 2.0, 0.0)
    return half
