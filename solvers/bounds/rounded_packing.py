"""Prices that refute a number of rounds when lengths are rounded up to few values."""

from __future__ import annotations

import time

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...models.bounds.rounded_packing import RoundedPacking, cheapest_rounding
from ...models.programme import Programme
from ..packing.patterns import PRICE_SCALE, SMALLEST_GAIN, Pattern, dear_patterns

ENTRY_SECONDS = 4e-9
"""Seconds that a knapsack takes for each item that it may hold and round of its capacity, about."""

SMOOTHING = 0.5
"""Weight of the best prices so far where the next patterns and roundings are made."""


def refute_rounds(
    lengths: IntArray, counts: IntArray, slots: int, values: int, capacity: int, seconds: float
) -> RoundedPacking | None:
    """
    Return why lengths rounded up to few values do not fit so many rounds, or None if nothing was found.

    The master programme looks for prices at which every rounding met so far is worth more than the slots
    can hold of any pattern met so far; a knapsack finds the next pattern, shortest paths the next rounding
    (column generation on both sides of the packing (26)-(30), Gilmore and Gomory 1961).

    Parameters
    ----------
    lengths, counts
        Distinct lengths, ascending and positive, and the requests of each, shape (distinct,).
    slots
        Slots there are.
    values
        Values that lengths may be rounded up to beside the longest.
    capacity
        Rounds to refute.
    seconds
        Seconds after which it gives up; at once where they are too few for one knapsack.
    """
    deadline = time.perf_counter() + seconds
    most = capacity // lengths
    if ENTRY_SECONDS * capacity * int(most.sum()) > seconds:
        return None
    patterns: set[Pattern] = {(kind,) * int(number) for kind, number in enumerate(most.tolist())}
    roundings: dict[bytes, IntArray] = {}
    best_prices: FloatArray = lengths / capacity
    best, weight, prices = 0.0, SMOOTHING, best_prices
    while time.perf_counter() < deadline:
        dearest, offered = dear_patterns(lengths, most, capacity, prices)
        worth, become = cheapest_rounding(counts, prices, values)
        if worth / dearest > best:
            best, best_prices = worth / dearest, prices / dearest
        if best > slots + SMALLEST_GAIN:
            proof = _in_whole_numbers(lengths, counts, slots, values, capacity, best_prices)
            if proof is not None:
                return proof
        known = len(patterns) + len(roundings)
        patterns.update(offered)
        roundings[become.tobytes()] = become
        if len(patterns) + len(roundings) == known:
            if weight == 0:
                return None
            weight = weight / 2 if weight > 0.1 else 0.0
        else:
            weight = SMOOTHING
        most_worth, master_prices = _master(patterns, list(roundings.values()))
        if most_worth <= slots + SMALLEST_GAIN:
            return None
        prices = weight * best_prices + (1 - weight) * master_prices
    return None


def _master(patterns: set[Pattern], roundings: list[IntArray]) -> tuple[float, FloatArray]:
    """Return the most that the cheapest rounding can be worth with no pattern above 1, and the prices."""
    kinds = len(roundings[0])
    held = np.zeros((len(patterns), kinds))
    for row, pattern in enumerate(sorted(patterns)):
        np.add.at(held[row], list(pattern), 1.0)
    fits = np.column_stack((held, np.zeros(len(held))))
    worth = np.column_stack((-np.array(roundings), np.ones(len(roundings))))
    found = Programme.within(
        np.append(np.zeros(kinds), -1.0),
        np.concatenate((fits, worth)),
        np.append(np.ones(len(held)), np.zeros(len(roundings))),
    ).solved()
    assert found is not None, "prices of 0 satisfy every row, and patterns bound them"
    return -found.cost, found.x[:kinds]


def _in_whole_numbers(
    lengths: IntArray, counts: IntArray, slots: int, values: int, capacity: int, prices: FloatArray
) -> RoundedPacking | None:
    """Return the proof that the prices make once rounded down to whole numbers, if they still do."""
    whole = np.floor(np.maximum(prices, 0.0) * PRICE_SCALE).astype(np.int64)
    dearest = np.zeros(capacity + 1, dtype=np.int64)
    for length, price in zip(lengths.tolist(), whole.tolist(), strict=True):
        for _ in range(capacity // length):
            dearest[length:] = np.maximum(dearest[length:], dearest[:-length] + price)
    limit = int(dearest[-1])
    if round(cheapest_rounding(counts, whole, values)[0]) <= slots * limit:
        return None
    return RoundedPacking(values, capacity, tuple(lengths.tolist()), tuple(whole.tolist()), limit)
