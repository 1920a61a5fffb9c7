"""The intervals between prefill stages: requests are held for whole ones, of which few stages leave few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import IntArray

PARTS = 65536
"""Parts of a round in which prices are counted, so that they are whole numbers."""


@dataclass(frozen=True, slots=True)
class IntervalPrices:
    """
    Prices (Lagrange multipliers) that prove a number of rounds, in parts of a round.

    Parameters
    ----------
    interval
        What a request is charged for each interval that it is held for.
    spans
        What is charged for each span of one interval, of two in a row, and so on, that requests are held for,
        one at least; longer spans are free.
    round
        What is charged beside for each round of a span of one interval.
    """

    interval: int
    spans: tuple[int, ...]
    round: int

    @property
    def witness(self) -> Mapping[str, object]:
        """What a checker needs to repeat the argument."""
        return {"interval": self.interval, "spans": list(self.spans), "round": self.round}

    def rounds(self, charged: int, slots: int, stages: int) -> int:
        """
        Return the fewest decode steps in which requests can be held.

        Parameters
        ----------
        charged
            The least that all requests come to with what is charged, in parts of a round
            (:meth:`StageIntervals.solved`).
        slots, stages
            Slots there are, and prefill stages.
        """
        given = slots * stages * self.interval
        given += sum(price * max(0, stages - more) for more, price in enumerate(self.spans))
        return max(0, -(-(charged - given) // (slots * PARTS + self.round)))


@dataclass(frozen=True, slots=True)
class IntervalSolution:
    """
    What requests are held for at some prices.

    Parameters
    ----------
    prices
        The prices.
    charged
        What all requests come to with what is charged, in parts of a round: no schedule has less.
    held
        Rounds that requests are held for, in all.
    intervals
        Intervals that they are held for, in all.
    spans
        Different spans of one interval, of two, and so on.
    short
        Rounds of the different spans of one interval.
    """

    prices: IntervalPrices
    charged: int
    held: int
    intervals: int
    spans: tuple[int, ...]
    short: int


class StageIntervals:
    r"""
    What requests are held for if that is whole intervals between stages, at prices.

    Let :math:`0 = x_0 \le \dots \le x_S = R` be the rounds of S stages and the end, and an interval what lies
    between two that follow one another. A slot that serves a request of n rounds from one stage on is held to
    a later one, or to the end: for a span of m intervals in a row, of n rounds at least. Nothing starts
    within an interval, so J slots are held for J S intervals and J R rounds at most. Of spans of m intervals
    there are S - m + 1, and those of one interval come to R rounds.

    Charge each request g for each interval, and each span that requests are held for :math:`u_m` if it has m
    intervals and, if it has one, r for each of its rounds, all of them not negative. Then what all are held
    for and charged is

    .. math:: L(g, u, r) \le J R + g J S + \sum_m u_m (S - m + 1) + r R

    at most, and at least what it comes to where every length may be rounded up to any span for these charges.
    The requests of a span are then neighbours by length, as any is as well held for a shorter span that is
    long enough, so a shortest path finds that least. Fewer points, slots that stay empty and spans without
    requests only lower the left or raise the right side.

    Parameters
    ----------
    lengths
        Distinct lengths, ascending, positive, shape (distinct,).
    counts
        How many requests have each, shape (distinct,).
    slots
        Slots J there are.
    """

    def __init__(self, lengths: IntArray, counts: IntArray, slots: int) -> None:
        self.lengths, self.slots = lengths, slots
        self._below = np.concatenate(([0], np.cumsum(counts)))

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return int(self._below[-1])

    def solved(self, prices: IntervalPrices) -> IntervalSolution:
        """Return what requests are held for at the least with what is charged."""
        size, below, free = len(self.lengths), self._below, len(prices.spans)
        intervals = np.arange(1, free + 2)
        fixed = np.array([*prices.spans, 0])
        least = np.zeros(size + 1, dtype=np.int64)
        before, kinds = np.zeros(size + 1, dtype=np.int64), np.zeros(size + 1, dtype=np.int64)
        for i, length in enumerate(self.lengths.tolist(), start=1):
            each = length * PARTS + intervals * prices.interval
            costs = least[:i] - each[:, None] * below[:i]
            start = costs.argmin(axis=1)
            whole = costs[intervals - 1, start] + each * below[i] + fixed
            whole[0] += prices.round * length
            kind = int(whole.argmin())
            least[i], before[i], kinds[i] = whole[kind], start[kind], kind
        held, in_all, spans, short, i = 0, 0, [0] * (free + 1), 0, size
        while i:
            length, kind, number = int(self.lengths[i - 1]), int(kinds[i]), int(below[i] - below[before[i]])
            held, in_all = held + number * length, in_all + number * (kind + 1)
            spans[kind] += 1
            short += length if kind == 0 else 0
            i = int(before[i])
        return IntervalSolution(prices, int(least[size]), held, in_all, tuple(spans[:free]), short)
