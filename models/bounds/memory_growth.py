r"""
Decode steps that KV memory takes because what requests hold grows while they run, and falls as they end.

The tokens held are never at the capacity for long: with k requests under way they rise by k a step until one
ends, and a request that begins holds less than one that ends. Let B be the tokens that k requests read in
the step to come. Every schedule is a walk over states (B, k) from (0, 0) back to it: a step leads to
(B + k, k), a start to (B + a, k + 1) and an end to (B - a - n, k - 1), for a request of n steps that reads a
tokens in its first. With any values V of the states and a price p of a token read, and

.. math:: \rho = \max_{B, k} \; p B + V(B + k, k) - V(B, k),

each step adds at most :math:`\rho` to p times the tokens read and to V. V ends where it began, so that with
W the tokens read over the whole job

.. math:: \rho R \ge p W - \sum_i \max_{B, k} (V(B + a_i, k + 1) - V(B, k))
    - \sum_i \max_{B, k} (V(B - a_i - n_i, k - 1) - V(B, k))

for the number R of steps of any schedule. V is linear between the points of a grid, so that the maxima are
taken where either of its two terms has a point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import IntArray
from ...data.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class GrowthPrices:
    """
    What tokens read and states are worth, in whole parts.

    Parameters
    ----------
    gap
        Tokens between neighbouring points of the grid, which begins at 0.
    token
        Parts for each token read in a step, not negative.
    values
        Parts of a state, divided by ``gap``: row k for k requests under way, shape (slots + 1, points). The
        last point lies at the capacity and the slots, or beyond.
    """

    gap: int
    token: int
    values: IntArray

    def at(self, active: int, held: IntArray) -> IntArray:
        """Return the parts of states of one number of requests, in whole parts for every number of tokens."""
        point, beyond = np.divmod(held, self.gap)
        row = self.values[active]
        value: IntArray = row[point] * (self.gap - beyond) + row[np.minimum(point + 1, len(row) - 1)] * beyond
        return value


@dataclass(frozen=True, slots=True, eq=False)
class GrowthStates:
    """
    The states that a job's requests can be in.

    Parameters
    ----------
    capacity
        Tokens of keys and values held at most.
    first, last
        What each request with a step reads in its first, and holds after its last, ascending by themselves.
    least, most
        Tokens that so many requests read at least and at most, shape (slots + 1,).
    tokens
        Read over the whole job.
    """

    capacity: int
    first: IntArray
    last: IntArray
    least: IntArray
    most: IntArray
    tokens: int

    @classmethod
    def of(cls, problem: Problem, slots: int) -> GrowthStates:
        """Return the states of a problem with a KV capacity, on no more slots than requests."""
        assert problem.kv_capacity is not None
        running = problem.rounds > 0
        first, rounds = problem.kv_at_start[running], problem.rounds[running]
        last, none = np.sort(first + rounds), np.zeros(1, dtype=np.int64)
        slots = min(slots, len(first))
        least = np.concatenate((none, np.cumsum(np.sort(first))[:slots]))
        most = np.concatenate((none, np.cumsum(last[::-1])[:slots]))
        return cls(problem.kv_capacity, np.sort(first), last, least, most, problem.kv_token_rounds)

    @property
    def slots(self) -> int:
        """Most requests under way."""
        return len(self.least) - 1

    def steps(self, active: int) -> tuple[int, int]:
        """Return the tokens that so many requests read in a step, at least and at most."""
        return int(self.least[active]), min(self.capacity, int(self.most[active]) - active)

    def starts(self, active: int, first: int) -> tuple[int, int]:
        """Return the tokens of so many requests as one more starts, at least and at most."""
        return int(self.least[active]), min(self.capacity - first, int(self.most[active]))

    def ends(self, active: int, last: int) -> tuple[int, int]:
        """Return the tokens of so many requests as one of them ends, at least and at most."""
        others = active - 1
        return last + int(self.least[others]), min(self.capacity + active, last + int(self.most[others]))

    def points(self, span: tuple[int, int], shift: int, gap: int) -> IntArray:
        """Return where a change by so many tokens can be worth most within a span: at points and its ends."""
        least, most = span
        if least > most:
            return np.zeros(0, dtype=np.int64)
        grid = np.arange(0, most + abs(shift) + gap, gap)
        near = np.concatenate((grid, grid - shift, span))
        points: IntArray = np.unique(near[(near >= least) & (near <= most)])
        return points


def growth_rounds(states: GrowthStates, prices: GrowthPrices) -> int:
    """
    Return the decode steps that every schedule has at least by these prices, 0 where they prove nothing.

    Parameters
    ----------
    states
        Of the problem.
    prices
        Any.
    """
    step = 0
    for active in range(1, states.slots + 1):
        held = states.points(states.steps(active), active, prices.gap)
        if len(held):
            more = prices.token * held + prices.at(active, held + active) - prices.at(active, held)
            step = max(step, int(more.max()))
    worth = prices.token * states.tokens
    for tokens, sign in ((states.first, 1), (states.last, -1)):
        for each, number in zip(*np.unique(tokens, return_counts=True), strict=True):
            worth -= int(number) * _most_gained(states, prices, int(each), sign)
    return max(0, -(-worth // step)) if step > 0 else 0


def _most_gained(states: GrowthStates, prices: GrowthPrices, tokens: int, sign: int) -> int:
    """Return what a start (sign 1) or an end (sign -1) of a request can be worth at most."""
    gained = []
    for active in range(states.slots) if sign > 0 else range(1, states.slots + 1):
        span = states.starts(active, tokens) if sign > 0 else states.ends(active, tokens)
        held = states.points(span, sign * tokens, prices.gap)
        if len(held):
            more = prices.at(active + sign, held + sign * tokens) - prices.at(active, held)
            gained.append(int(more.max()))
    return max(gained)
