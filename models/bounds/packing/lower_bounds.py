"""Lower bounds on bin packing over machines (P||Cmax), with witnesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .heuristics import IntArray, checked_weights

MOST_THRESHOLDS = 256
"""Most thresholds per family of dual feasible functions."""


@dataclass(frozen=True, slots=True)
class PartitionBound:
    """Proven lower bound on the largest machine load.

    witness: Data with which a checker repeats the argument: ``kind`` and its numbers, as JSON values.
    """

    value: int
    source: str
    witness: Mapping[str, object]


def lifted_bound(weights: IntArray, machines: int) -> PartitionBound:
    """Return the best average over sub-instances that machines cannot escape.

    However the ``l`` heaviest items are spread over ``m`` machines, some ``k`` of the machines hold
    together at least ``k * (l // m) + min(k, l % m)`` of them, hence at least the sum of that many lightest
    ones among the ``l`` (Haouari, Gharbi and Jemmali 2006). ``k = m, l = n`` is the mean load, ``k = 1``
    the pigeonhole bound, and ``k = l = 1`` the heaviest item. For each ``k`` only the ``l = q m + k`` and
    ``l = n`` can be best: between them another item enters the ``l`` without entering the sum, or enters
    both.
    """
    heavy = np.sort(checked_weights(weights, machines))[::-1]
    if heavy.size == 0:
        return PartitionBound(0, "no items", {"kind": "lifted", "heaviest": 0, "machines": 1})
    # Machines beyond the items stay empty, and the formula is the same without them.
    machines = min(machines, heavy.size)
    prefix = np.concatenate(([0], np.cumsum(heavy)))
    last = np.full(machines, heavy.size)
    chosen = np.concatenate((np.arange(1, heavy.size + 1), last))
    group = np.concatenate((np.arange(heavy.size) % machines + 1, np.arange(1, machines + 1)))
    items = group * (chosen // machines) + np.minimum(group, chosen % machines)
    values = -((prefix[chosen - items] - prefix[chosen]) // group)
    best = int(values[::-1].argmax())
    heaviest, subset = int(chosen[::-1][best]), int(group[::-1][best])
    source = "mean load" if (heaviest, subset) == (heavy.size, machines) else "lifted sub-instance"
    if subset == 1:
        source = "pigeonhole"
    witness = {"kind": "lifted", "heaviest": heaviest, "machines": subset}
    return PartitionBound(int(values[::-1][best]), source, witness)


def mean_or_longest(weights: IntArray, machines: int) -> PartitionBound:
    """Return the larger of the mean load and the heaviest item.

    Both are sub-instances of :func:`lifted_bound`.
    """
    weights = checked_weights(weights, machines)
    mean, heaviest = -(-int(weights.sum()) // machines), int(weights.max(initial=0))
    if mean >= heaviest and weights.size >= machines:
        claim = {"kind": "lifted", "heaviest": weights.size, "machines": machines}
        return PartitionBound(mean, "mean load", claim)
    return PartitionBound(heaviest, "heaviest item", {"kind": "lifted", "heaviest": 1, "machines": 1})


def priced_bound(
    source: str, capacity: int, lengths: IntArray, prices: IntArray, limit: int
) -> PartitionBound:
    """Return the bound of prices that refute a capacity."""
    witness = {
        "kind": "prices",
        "capacity": int(capacity),
        "lengths": [int(length) for length in lengths],
        "prices": [int(price) for price in prices],
        "limit": int(limit),
    }
    return PartitionBound(int(capacity) + 1, source, witness)


def refuted_by_trial(capacity: int) -> PartitionBound:
    """Return the bound of a capacity that no packing fits."""
    return PartitionBound(capacity + 1, "every packing", {"kind": "every packing", "capacity": capacity})


def packing_bound(weights: IntArray, capacity: int) -> tuple[int, Mapping[str, object]]:
    """Bound the bins of some capacity; return it with its prices."""
    lengths, counts = np.unique(weights, return_counts=True)
    needed, best = -(-int(lengths @ counts) // capacity), (lengths, capacity)
    for prices, limits in _price_families(lengths, capacity):
        bins = -(-(prices @ counts) // limits)
        if int(bins.max()) > needed:
            at = int(bins.argmax())
            needed, best = int(bins[at]), (prices[at], int(limits[at]))
    return needed, priced_bound("", capacity, lengths, *best).witness


def _price_families(lengths: IntArray, capacity: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield families of dual feasible functions: prices, limits.

    Their prices refute a capacity ``C`` of bins under two conditions: no items that fit in ``C`` are priced
    above a limit, and all items together are priced above the limit times the bins. Tried are, for every
    threshold ``t <= C / 2`` that matters (Martello and Toth's L2; Fekete and Schepers 2001; limit in
    brackets):

    - ``L2``: items above ``C - t`` count ``C``, items below ``t`` count 0, the rest their weight [C];
    - ``rounded``: items above ``C / 2`` count ``2 (C // t) - 2 ((C - w) // t)``, an exact half ``C // t``,
      smaller ones ``2 (w // t)`` [2 (C // t)];
    - ``multiple``, k = 1..12: ``k w`` where ``(k + 1) w / C`` is whole, else ``C`` times its floor [k C].
    """
    thresholds = np.unique(np.concatenate((lengths, capacity - lengths + 1, [1])))
    thresholds = thresholds[(thresholds >= 1) & (2 * thresholds <= capacity)]
    thresholds = thresholds[:: len(thresholds) // MOST_THRESHOLDS + 1, None]
    row = lengths[None, :]
    if len(thresholds):
        two_level = np.where(row > capacity - thresholds, capacity, np.where(row < thresholds, 0, row))
        yield two_level, np.full(len(thresholds), capacity)
        whole = capacity // thresholds
        rounded = 2 * (row // thresholds)
        rounded = np.where(2 * row > capacity, 2 * whole - 2 * ((capacity - row) // thresholds), rounded)
        yield np.where(2 * row == capacity, whole, rounded), 2 * whole[:, 0]
    factors = np.arange(1, 13)[:, None]
    scaled = (factors + 1) * row
    multiple = np.where(scaled % capacity == 0, factors * row, (scaled // capacity) * capacity)
    yield multiple, factors[:, 0] * capacity
