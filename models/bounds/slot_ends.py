"""What the first and the last request of each slot waste: they have few times to end and to start at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import IntArray

PARTS = 16
"""Parts of a round in which prices are counted, so that they are whole numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class EndPrices:
    """
    Prices (Lagrange multipliers) that prove a waste, in parts of a round.

    Parameters
    ----------
    rounds
        The decode steps R that they are made for.
    filling
        Whether the shortest requests count as filling gaps.
    share
        How much of an end request's waste counts as such, 0 to :data:`PARTS`; the rest as any request's.
    value, end_value
        The charge for each value that any request, and that an end request, can be rounded up to.
    end
        The reward for each end request.
    moved
        What each end value costs beside ``end_value``, shape (longest,), where v is at v. The values v and
        R - v, modulo the longest request, come together: what one costs more, the other costs less.
    """

    rounds: int
    filling: bool
    share: int
    value: int
    end_value: int
    end: int
    moved: IntArray

    @property
    def witness(self) -> Mapping[str, object]:
        """What a checker needs to repeat the argument."""
        dearer = np.flatnonzero(self.moved > 0)
        return {
            "rounds": self.rounds,
            "filling": self.filling,
            "share": self.share,
            "value": self.value,
            "end_value": self.end_value,
            "end": self.end,
            "dearer": [[int(v), int(self.moved[v])] for v in dearer],
        }


@dataclass(frozen=True, slots=True, eq=False)
class EndWaste:
    """
    A waste that holds for any numbers of values, linear in them.

    Parameters
    ----------
    prices
        The prices that prove it.
    constant
        The waste with no values at all, in parts of a round.
    values, ends, extra
        A solution at these prices: values bought, end requests taken, and rounds that these waste beyond
        what any request would, less those filled.
    end_values
        The end values that it bought.
    """

    prices: EndPrices
    constant: int
    values: int
    ends: int
    extra: int
    end_values: IntArray

    def parts(self, values: int, end_values: int, late: int) -> int:
        """
        Return the waste that is proven, in parts of a round.

        Parameters
        ----------
        values
            Most values below the longest request that requests are rounded up to.
        end_values
            Most values for end requests, the first ones and the last ones together.
        late
            Rounds that requests as long as the longest are held too long, at least.
        """
        of = self.prices
        bought = of.value * values + of.end_value * end_values
        return self.constant - bought + (PARTS - of.share) * late


@dataclass(frozen=True, slots=True)
class EndCase:
    """
    So many rounds with no more values than these, to be refuted.

    Parameters
    ----------
    rounds
        Decode steps.
    needed
        The least waste, in rounds, that does not fit into them.
    values, end_values, late
        As in :meth:`EndWaste.parts`.
    """

    rounds: int
    needed: int
    values: int
    end_values: int
    late: int

    def lacking(self, waste: EndWaste) -> int:
        """Return the parts of a round by which what is proven falls short of the waste needed."""
        return self.needed * PARTS - waste.parts(self.values, self.end_values, self.late)

    def refuted_by(self, waste: EndWaste) -> bool:
        """Return whether a waste does: it is a whole number, so a part of the last round will do."""
        return waste.prices.rounds == self.rounds and self.lacking(waste) < PARTS


class SlotEnds:
    r"""
    The waste of slots whose first and last requests have few values to be rounded up to.

    With S + 1 points (start times and end), of which :math:`x_0 = 0` and the end is R, let M be the longest
    request's rounds. In each slot that serves a request shorter than M, consider the first such one, of n
    rounds: before it come j of M, after it the next request starts at a point :math:`x_b`. The slot has
    wasted :math:`x_b - j M - n` rounds by then, whenever in between it did, which is n rounded up to M or to
    a value of :math:`V = \{x_b \bmod M\}`, of which there are no more than points between the first and
    the last. In the same way, what is wasted from the last one on is that one rounded up to
    :math:`U = \{(R - x_a) \bmod M\}`. So of the requests two of each slot, the end requests, have V and U
    where all others have all differences of points, and they have those too: each is rounded up to whatever
    is larger, a difference or an end value. And :math:`v \in V` says that :math:`R - v \in U` modulo M.

    - A slot with one request shorter than M wastes :math:`R - n` modulo M, and one with none R modulo M.
    - Requests of the shortest length q may fill gaps: with i of them before it too, the first of the others
      is rounded up by i q less. So they count q less each, and the first and the last are those of the
      others.
    - Requests of M held too long are counted in what comes before the first and after the last one already.
      A share :math:`\pi` of the one argument and :math:`1 - \pi` of the other, which counts them beside
      every request's rounding up to a difference, is as true as both.

    The least waste comes from the longest request down, by the least difference and the least end value that
    are bought so far, at prices for both and a reward for each end request (Lagrangian relaxation).

    Parameters
    ----------
    lengths
        Distinct lengths, ascending, positive, at least two, shape (distinct,).
    counts
        How many requests have each, shape (distinct,).
    slots
        Slots there are.
    """

    def __init__(self, lengths: IntArray, counts: IntArray, slots: int) -> None:
        self.longest, self.shortest = int(lengths[-1]), int(lengths[0])
        self.number = np.zeros(self.longest + 1, dtype=np.int64)
        self.number[lengths] = counts
        self.slots = slots

    @property
    def filled(self) -> int:
        """Rounds that the shortest requests can fill."""
        return self.shortest * int(self.number[self.shortest])

    def at_rest(self, prices: EndPrices) -> int:
        """Return what the slots themselves add to the waste at these prices, in parts of a round."""
        filled = self.filled if prices.filling else 0
        left = prices.share * (prices.rounds % self.longest)
        return self.slots * min(2 * prices.end, left) - prices.share * filled

    def relaxed(self, prices: EndPrices) -> EndWaste:
        """Return the waste that prices prove."""
        share, rest, left = prices.share, PARTS - prices.share, prices.rounds % self.longest
        # The values bought so far that are still worth a thought, ascending, and the least cost with each.
        values = end_values = np.array([self.longest])
        least = np.zeros((1, 1), dtype=np.int64)
        steps: list[_Step] = []
        for n in range(self.longest - 1, self.shortest - 1, -1):
            count = int(self.number[n])
            charge = prices.end_value + int(prices.moved[n])
            steps.append(_Step(n, count > 0, values, end_values, least))
            values, end_values, least = steps[-1].bought(prices.value, charge)
            if count:
                held = values - n
                if prices.filling and n == self.shortest:
                    least += (rest * count * held)[:, None]
                else:
                    alone = rest * held + share * np.maximum(held, (left - n) % self.longest) - 2 * prices.end
                    cost = np.maximum(held[:, None], end_values - n) * share
                    cost += (rest * held - prices.end)[:, None]
                    np.minimum(cost, np.minimum(PARTS * held, alone)[:, None], out=cost)
                    least += count * cost
                # What costs no less than smaller values is no better from here on.
                low = np.minimum.accumulate(np.minimum.accumulate(least, axis=0), axis=1)
                worth = np.ones(least.shape, dtype=np.bool_)
                worth[1:] &= least[1:] < low[:-1]
                worth[:, 1:] &= least[:, 1:] < low[:, :-1]
                kept, kept_ends = worth.any(axis=1), worth.any(axis=0)
                values, end_values, least = values[kept], end_values[kept_ends], least[kept][:, kept_ends]
        return self._traced(prices, steps, values, end_values, least)

    def _traced(
        self,
        prices: EndPrices,
        steps: list[_Step],
        values: IntArray,
        end_values: IntArray,
        least: IntArray,
    ) -> EndWaste:
        """Return the solution of the least cost, step by step back to the longest request."""
        row, column = np.unravel_index(int(least.argmin()), least.shape)
        value, end_value = int(values[row]), int(end_values[column])
        bought, ends, extra, bought_ends = 0, 0, 0, []
        share, left = prices.share, prices.rounds % self.longest
        for step in reversed(steps):
            n, count = step.length, int(self.number[step.length])
            held = value - n
            if prices.filling and n == self.shortest:
                extra -= count * held
            elif count:
                beyond = max(0, end_value - n - held)
                alone = max(0, (left - n) % self.longest - held)
                _, taken, more = min(
                    (0, 0, 0),
                    (share * beyond - prices.end, 1, beyond),
                    (share * alone - 2 * prices.end, 2, alone),
                )
                ends, extra = ends + count * taken, extra + count * more
            new_value, new_end = step.has_value and value == n, end_value == n
            bought += new_value
            if new_end:
                bought_ends.append(n)
            value, end_value = step.before(value, end_value)
        constant = int(least[row, column]) + self.at_rest(prices)
        return EndWaste(prices, constant, bought, ends, extra, np.array(bought_ends, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """
    The choice at one length: to buy it as a value or as an end value, in front of those bought before.

    Parameters
    ----------
    length
        The length, in rounds.
    has_value
        Whether it may be bought as a value for any request; as one for end requests it may always be.
    values, end_values
        The last values bought before, ascending.
    least
        The least cost with each of them, shape (values, end values).
    """

    length: int
    has_value: bool
    values: IntArray
    end_values: IntArray
    least: IntArray

    def bought(self, charge: int, end_charge: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the values, the end values and the least costs with the length in front of them, or not."""
        own = int(self.has_value)
        costs = np.empty((len(self.values) + own, len(self.end_values) + 1), dtype=np.int64)
        costs[own:, 1:] = self.least
        costs[own:, 0] = self.least.min(axis=1) + end_charge
        if own:
            costs[0] = costs[1:].min(axis=0) + charge
        new = np.array([self.length])
        values = np.concatenate((new, self.values)) if own else self.values
        return values, np.concatenate((new, self.end_values)), costs

    def before(self, value: int, end_value: int) -> tuple[int, int]:
        """Return the values from which the cheapest way led to these."""
        new_value, new_end = self.has_value and value == self.length, end_value == self.length
        least = self.least if new_value else self.least[self.values == value]
        least = least if new_end else least[:, self.end_values == end_value]
        row, column = np.unravel_index(int(least.argmin()), least.shape)
        return (
            int(self.values[row]) if new_value else value,
            int(self.end_values[column]) if new_end else end_value,
        )
