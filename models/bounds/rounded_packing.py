"""Lengths rounded up to few values and packed over the slots, taken together: what prices prove."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray, IntArray

MOST_WORK = 1_000_000
"""Values times distinct lengths squared up to which this is tried: a checker repeats it in plain Python."""


@dataclass(frozen=True, slots=True)
class RoundedPacking:
    """
    A proof that lengths rounded up to so few values do not fit the slots in so many rounds.

    However the lengths are rounded up, the prices of what they become add up to more than ``slots`` times
    ``limit``, and no set of lengths that fits into a slot's rounds is priced above ``limit``.

    Parameters
    ----------
    values
        Values that lengths may be rounded up to beside the longest.
    capacity
        Rounds of a slot: with no more values than those, a schedule has more rounds than these.
    lengths, prices
        Distinct lengths and the price of each.
    limit
        Price of the dearest set of lengths that fits into a slot.
    """

    values: int
    capacity: int
    lengths: tuple[int, ...]
    prices: tuple[int, ...]
    limit: int

    @property
    def witness(self) -> Mapping[str, object]:
        """What a checker needs to repeat the argument."""
        return {
            "values": self.values,
            "capacity": self.capacity,
            "lengths": list(self.lengths),
            "prices": list(self.prices),
            "limit": self.limit,
        }


def cheapest_rounding(counts: IntArray, prices: FloatArray | IntArray, values: int) -> tuple[float, IntArray]:
    """
    Return the least price of all lengths rounded up to few of them, and how many become each.

    Parameters
    ----------
    counts, prices
        Requests of each distinct length, ascending, and its price, shape (distinct,).
    values
        Values beside the longest, not negative.

    Returns
    -------
    tuple of float and IntArray
        The price, and the requests rounded up to each length, shape (distinct,).
    """
    size = len(counts)
    below = np.concatenate(([0], np.cumsum(counts)))
    # arc[j, i]: the price of rounding lengths j..i-1 up to length i-1.
    arc = (below[None, :] - below[:, None]) * np.concatenate(([0], prices))[None, :].astype(np.float64)
    arc[np.tril_indices(size + 1)] = np.inf
    least, chosen = np.full(size + 1, np.inf), []
    least[0] = 0.0
    for _ in range(min(values + 1, size)):
        reached = least[:, None] + arc
        before = reached.argmin(axis=0)
        reach = reached[before, np.arange(size + 1)]
        # A length reached with fewer values stays reached.
        stays = least <= reach
        chosen.append(np.where(stays, -1, before))
        least = np.where(stays, least, reach)
    become, at = np.zeros(size, dtype=np.int64), size
    for before in reversed(chosen):
        if before[at] >= 0:
            become[at - 1] = below[at] - below[before[at]]
            at = int(before[at])
    return float(least[size]), become
