"""Difference-set bound: few stages leave few distinct holding times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from ...data.arrays import IntArray
from ..deadline import Deadline
from .argument import Argument, Curve, Known, Task, exact
from .least_counts import Counts


def useful_differences(stages: int, longest: int, decode_steps: int) -> int:
    r"""Return the most useful differences between S start times and the end.

    Let M be the longest request's decode steps and :math:`x_0 < \dots < x_D` the distinct start times and the
    end, D <= S. No gap between neighbours need exceed M: after a longer one everything has finished, and what
    follows moves forward. So there is a chain of points from :math:`r_0 = x_0` to the end:
    :math:`r_{j + 1}` is the last point less than M after :math:`r_j`, or the next point, M after it, if there
    is none. Points after :math:`r_{j + 1}` are at least M after :math:`r_j`. Hence chain points two or more
    steps apart, C(m, 2) pairs for m steps, differ by M at least. Any other point, between :math:`r_j` and
    :math:`r_{j + 1}` say, differs by M at least from all of the chain but :math:`r_j`, :math:`r_{j + 1}` and
    :math:`r_{j + 2}`: from m - 2 points or more. There are m > R / M steps, where R is a lower bound on the
    steps (``decode_steps``), or each of them is M and nothing lies between. The pairs left of C(D + 1, 2)
    are most with D = S and m as small as can be.
    """
    return int(_useful(np.array([stages]), longest, decode_steps)[0])


def _useful(stages: IntArray, longest: int, decode_steps: int) -> IntArray:
    steps = decode_steps // longest + 1
    far = steps * (steps - 1) // 2 + np.maximum(0, stages - steps) * max(0, steps - 2)
    useful: IntArray = np.maximum(0, (stages + 1) * stages // 2 - far)
    return useful


@dataclass(slots=True)
class RoundUp:
    r"""Least waste of rounding lengths up to few values.

    The largest length is a value for free. For a charge :math:`\lambda` per further value let
    :math:`\phi(\lambda)` be the least waste plus charges. With k values the waste W(k) is at least
    :math:`\phi(\lambda) - \lambda k`. The cost of rounding a run of lengths up to its last is Monge, so W is
    convex and some whole :math:`\lambda` attains W(k).

    lengths: Distinct lengths, ascending, positive, shape (distinct,).
    counts: Number of requests of each length, shape (distinct,).
    """

    lengths: IntArray
    counts: IntArray
    charged: dict[int, tuple[int, int]] = field(default_factory=dict)

    def relaxed(self, charge: int) -> tuple[int, int]:
        """Return the least waste plus charges, and the values used."""
        if charge in self.charged:
            return self.charged[charge]
        size = len(self.lengths)
        below = np.concatenate(([0], np.cumsum(self.counts)))
        work = np.concatenate(([0], np.cumsum(self.counts * self.lengths)))
        # reach[j]: least cost of rounding up the j shortest lengths. Arc j -> i raises lengths j..i-1 to
        # length i-1.
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
        """Return the least waste with some values beyond the largest length."""
        return self.certified_waste(values, self.charge(values))

    def charge(self, values: int) -> int:
        """Return a charge that proves the least waste of some values."""
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
        return max(low, high, key=lambda charge: self.certified_waste(values, charge))

    def certified_waste(self, values: int, charge: int) -> int:
        """Return the waste that a charge proves for some values."""
        return max(0, self.relaxed(charge)[0] - charge * values)


class DifferenceBound(Argument):
    r"""Argument that few differences between start times waste slot time.

    A slot that serves request i from stage a is filled again at a later stage b, or not before the end: it
    is held for a difference of two of the S + 1 points (start times and end) that is at least n_i.
    Intervals prolonged to the next point overlap no more than before, since nothing starts in between, so
    all prolonged lengths fit into J R slot-steps. With k values for the differences below the longest
    request M (:func:`useful_differences`; every longer difference is taken as M), rounding up wastes W(k)
    at least (:class:`RoundUp`), hence

    .. math:: R(S) \ge \lceil (\sum_i n_i + W(k(S))) / J \rceil .

    Requests of no decode steps are prefilled but hold no slot. Stages that share a start time, token caps, KV
    capacity and empty slots only mean fewer differences or more waste, so the bound stays valid.
    """

    name, part = "difference_set", "charges"
    kind = source = "difference set"

    def __init__(self, lengths: IntArray, numbers: IntArray, counts: Counts) -> None:
        self._counts, self._work, self._longest = counts, int(lengths @ numbers), int(lengths[-1])
        self._round_up = RoundUp(lengths, numbers)
        self._curves: dict[int, Curve] = {}

    @classmethod
    def of(cls, task: Task) -> Self | None:
        """Return the search if there are decode steps."""
        return cls(*task.lengths, task.counts) if len(task.lengths[0]) else None

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return the curve of the charge that proves most."""
        values = useful_differences(known.cheapest[0], self._longest, self._counts.decode_steps)
        if values not in self._curves:
            self._curves[values] = self._curve(known.stages, self._round_up.charge(values))
        curve = self._curves[values]
        return curve if curve.steps[known.place] > known.cheapest[1] else None

    def _curve(self, stages: IntArray, charge: int) -> Curve:
        values = _useful(stages, self._longest, self._counts.decode_steps)
        waste = self._round_up.relaxed(charge)[0] - charge * exact(values, charge * int(values.max()))
        steps = -(-(self._work + np.maximum(0, waste)) // self._counts.slots)
        return Curve(self.part, steps.astype(np.int64), charge)
