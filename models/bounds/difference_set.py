"""The difference-set bound: few prefill stages leave few lengths of time a slot can be held for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...data.bound import Bound
from ...data.costs.cost import IntArray
from ...data.problem import Problem
from .least_counts import Counts, cost_terms, least_counts, prefill_seconds
from .stage_intervals import IntervalSolution


def useful_differences(stages: int, longest: int, rounds: int) -> int:
    r"""
    Return how many differences below the longest request S start times and the end can have between them.

    Let M be the longest request's decode steps and :math:`x_0 < \dots < x_D` the distinct start times and the
    end, D <= S. No gap between neighbours need exceed M: after a longer one everything has finished, and what
    follows moves forward. So there is a chain of points from :math:`r_0 = x_0` to the end:
    :math:`r_{j + 1}` is the last point less than M after :math:`r_j`, or the next point, M after it, if there
    is none. Points after :math:`r_{j + 1}` are at least M after :math:`r_j`. Hence chain points two or more
    steps apart, C(m, 2) pairs for m steps, differ by M at least. Any other point, between :math:`r_j` and
    :math:`r_{j + 1}` say, differs by M at least from all of the chain but :math:`r_j`, :math:`r_{j + 1}` and
    :math:`r_{j + 2}`: from m - 2 points or more. There are m > R / M steps, or each of them is M and nothing
    lies between. The pairs left of C(D + 1, 2) are most with D = S and m as small as can be.

    Parameters
    ----------
    stages
        Prefill stages S.
    longest
        Decode steps M of the longest request.
    rounds
        A lower bound on the decode steps R.
    """
    steps = rounds // longest + 1
    far = steps * (steps - 1) // 2 + max(0, stages - steps) * max(0, steps - 2)
    return max(0, (stages + 1) * stages // 2 - far)


@dataclass(slots=True)
class RoundUp:
    r"""
    Least waste of rounding lengths up to few values, bounded from below for every number of values at once.

    The largest length is a value for free. For a charge :math:`\lambda` per further value let
    :math:`\phi(\lambda)` be the least waste plus charges. With k values the waste W(k) is at least
    :math:`\phi(\lambda) - \lambda k`, and since the cost of rounding a run of lengths up to its last is
    Monge, W is convex and some whole :math:`\lambda` attains W(k).

    Parameters
    ----------
    lengths
        Distinct lengths, ascending, positive, shape (distinct,).
    counts
        How many requests have each, shape (distinct,).
    """

    lengths: IntArray
    counts: IntArray
    charged: dict[int, tuple[int, int]] = field(default_factory=dict)

    def relaxed(self, charge: int) -> tuple[int, int]:
        """
        Return the least waste plus charges, and how many values it pays for.

        Parameters
        ----------
        charge
            Waste charged per value beyond the largest length, not negative.

        Returns
        -------
        tuple of int
            The relaxed optimum and the charged values of one solution.
        """
        if charge in self.charged:
            return self.charged[charge]
        size = len(self.lengths)
        below = np.concatenate(([0], np.cumsum(self.counts)))
        work = np.concatenate(([0], np.cumsum(self.counts * self.lengths)))
        # reach[j]: least cost with the j shortest lengths rounded up; the arc j -> i rounds lengths j..i-1
        # to i-1.
        reach = np.zeros(size + 1, dtype=np.int64)
        values = np.zeros(size + 1, dtype=np.int64)
        offset = np.zeros(size + 1, dtype=np.int64)
        for i in range(1, size + 1):
            last = self.lengths[i - 1]
            cost = offset[:i] - last * below[:i]
            j = int(cost.argmin())
            reach[i] = cost[j] + last * below[i] - work[i] + charge
            values[i] = values[j] + 1
            offset[i] = reach[i] + work[i]
        result = int(reach[size]) - charge, int(values[size]) - 1
        self.charged[charge] = result
        return result

    def least_waste(self, values: int) -> int:
        """
        Return the least waste with that many values beyond the largest length.

        Parameters
        ----------
        values
            Number of further values, not negative.

        Returns
        -------
        int
            Total rounds by which lengths are rounded up.
        """
        if values >= len(self.lengths) - 1:
            return 0
        # A charge above any waste buys no value, charge 0 buys them all: the number bought falls with the
        # charge.
        low, high = 0, int(self.lengths[-1]) * int(self.counts.sum()) + 1
        for charge, (_, bought) in self.charged.items():
            if bought > values:
                low = max(low, charge)
            else:
                high = min(high, charge)
        while high - low > 1:
            middle = (low + high) // 2
            if self.relaxed(middle)[1] > values:
                low = middle
            else:
                high = middle
        return self.certified_waste(values, [low, high])

    def certified_waste(self, values: int, charges: list[int]) -> int:
        """
        Return the waste that given charges prove for a number of values.

        Parameters
        ----------
        values
            Number of values beyond the largest length.
        charges
            Charges to use.

        Returns
        -------
        int
            The largest of the relaxed optima less the charges of ``values`` values, not negative.
        """
        return max([0, *(self.relaxed(charge)[0] - charge * values for charge in charges)])


def difference_set_bound(problem: Problem, counts: Counts | None = None) -> Bound:
    """
    Return the bound that the number of differences between start times puts on slot time.

    Parameters
    ----------
    problem
        The problem bounded. Arrival times are left out, which only lowers the bound.
    counts
        The least stages and rounds to start from, if more is known than
        :func:`~batchbound.models.bounds.least_counts.least_counts` finds.

    Returns
    -------
    Bound
        As :meth:`Differences.bound` gives it, without what takes a search.
    """
    return Differences(problem, least_counts(problem) if counts is None else counts).bound()


@dataclass(frozen=True, slots=True)
class CheapestCounts:
    """
    The stages and rounds that cost least of those that the differences allow.

    Parameters
    ----------
    stages, rounds
        The counts.
    values
        The most values below the longest request that lengths can be rounded up to there.
    """

    stages: int
    rounds: int
    values: int


class Differences:
    r"""
    What few differences between start times waste, and the bound that this gives.

    A slot that serves request i from stage a is filled again at a later stage b, or not before the end: it
    is held for a difference of two of the S + 1 points (start times and end) that is at least n_i.
    Intervals prolonged to the next point overlap no more than before, since nothing starts in between, so
    all prolonged lengths fit into J R slot rounds. With k values for the differences below the longest
    request M (:func:`useful_differences`; every longer difference is taken as M), rounding up wastes W(k)
    at least, hence

    .. math:: R(S) \ge \lceil (\sum_i n_i + W(k(S))) / J \rceil .

    Requests are held for whole intervals between stages
    (:class:`~batchbound.models.bounds.stage_intervals.StageIntervals`), which ``intervals`` price.

    The makespan with S stages is at least the cost of S stages and R(S) rounds; the bound is the least over
    S. Requests of no rounds are prefilled but hold no slot; stages that share a start time, token caps, KV
    capacity and slots that stay empty only mean fewer differences or more waste, so all of them keep the
    bound valid.

    Parameters
    ----------
    problem
        The problem bounded. Arrival times are left out, which only lowers the bound.
    counts
        The least stages and rounds to start from.

    Attributes
    ----------
    intervals
        Solutions at prices of the intervals between stages.
    """

    def __init__(self, problem: Problem, counts: Counts) -> None:
        work = problem.rounds[problem.rounds > 0]
        self.lengths, self.numbers = np.unique(work, return_counts=True)
        self.intervals: list[IntervalSolution] = []
        self._problem = problem
        self._counts = counts
        self._round_up = RoundUp(self.lengths, self.numbers)
        self._work, self._longest = int(work.sum()), max(1, int(work.max(initial=0)))
        self._charge_of: dict[int, int] = {}
        self._charges: list[int] = []

    @property
    def slots(self) -> int:
        """Slots that can be in use."""
        return self._counts.slots

    def bound(self) -> Bound:
        """
        Return the bound that the least waste and the intervals prove.

        Returns
        -------
        Bound
            Its certificate lists the charges (Lagrange multipliers) from which a checker re-derives W by
            shortest paths, and the prices of intervals.
        """
        cheapest = self.cheapest()
        terms = cost_terms(self._problem, cheapest.stages, cheapest.rounds)
        certificate = {
            "kind": "difference set",
            "slots": self._counts.slots,
            **self._counts.claims,
            "charges": self._charges,
            "intervals": [solution.prices.witness for solution in self.intervals],
        }
        source = "difference set and intervals" if self.intervals else "difference set"
        return Bound(sum(terms.values()), source, terms, certificate)

    def cheapest(self) -> CheapestCounts:
        """Return the stages and rounds that cost least of those that the differences allow."""
        prefill, fewest = prefill_seconds(self._problem, self._counts.stages), self._counts.stages
        decode = self._problem.cost.decode_base
        best: CheapestCounts | None = None
        least = np.inf
        for at in np.argsort(prefill, kind="stable").tolist():
            stages, seconds = fewest + at, float(prefill[at])
            if seconds + decode * self._counts.rounds >= least:
                break
            rounds, values = self._rounds(stages)
            while seconds + decode * rounds < least and self._tighten(values):
                rounds, values = self._rounds(stages)
            if seconds + decode * rounds < least:
                least, best = seconds + decode * rounds, CheapestCounts(stages, rounds, values)
        assert best is not None, "every problem has a request, so some number of stages is possible"
        return best

    def _rounds(self, stages: int) -> tuple[int, int]:
        """Return the rounds that so many stages need, and the values that lengths are rounded up to."""
        slots, known = self._counts.slots, self._counts.rounds
        values = useful_differences(stages, self._longest, known)
        waste = self._round_up.certified_waste(values, self._charges)
        priced = [each.prices.rounds(each.charged, slots, stages) for each in self.intervals]
        return max([known, -(-(self._work + waste) // slots), *priced]), values

    def _tighten(self, values: int) -> bool:
        """Add the charge that proves the waste for so many values, and return whether it was missing."""
        if values in self._charge_of:
            return False
        waste = self._round_up.least_waste(values)
        charges = self._round_up.charged
        tight = [c for c in charges if self._round_up.certified_waste(values, [c]) == waste]
        self._charge_of[values] = tight[0] if tight else 0
        self._charges = sorted(set(self._charge_of.values()))
        return True
