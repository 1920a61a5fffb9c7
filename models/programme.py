"""Linear programmes, in fractions or in whole numbers, solved by HiGHS in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np

from ..data.arrays import FloatArray, IntArray

Entries = tuple[IntArray, IntArray, FloatArray | IntArray | float]
"""Rows and columns of a matrix, and a number for each or for all."""


class Optimum(NamedTuple):
    """The least cost, where it is, and by how much it rises with the limit of each row."""

    cost: float
    x: FloatArray
    prices: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Programme:
    """
    The least of a linear function between limits of rows and of columns.

    cost: Of each column, shape (columns,).
    start, index, value: The rows' entries one row after the other: where each row begins, shape (rows + 1,),
        and the column and the number of each entry, shape (entries,).
    low, high: Limits of the rows, infinite for none, shape (rows,).
    lower, upper: Limits of the columns, alike, shape (columns,).
    """

    cost: FloatArray
    start: IntArray
    index: IntArray
    value: FloatArray
    low: FloatArray
    high: FloatArray
    lower: FloatArray
    upper: FloatArray

    @classmethod
    def of(
        cls,
        cost: FloatArray,
        entries: Sequence[Entries],
        low: FloatArray | float,
        high: FloatArray,
        lower: FloatArray | float = 0.0,
        upper: FloatArray | float = np.inf,
    ) -> Programme:
        """Return a programme of the given entries; those in one place are added up."""
        row = np.concatenate([rows for rows, _, _ in entries])
        place = row * len(cost) + np.concatenate([columns for _, columns, _ in entries])
        number = np.concatenate([np.broadcast_to(value, rows.shape) for rows, _, value in entries])
        place, at = np.unique(place, return_inverse=True)
        value: FloatArray = np.bincount(at, weights=number, minlength=len(place)).astype(np.float64)
        start = np.searchsorted(place, len(cost) * np.arange(len(high) + 1))
        limits = (np.full(len(high), limit, dtype=np.float64) for limit in (low, high))
        columns = (np.full(len(cost), limit, dtype=np.float64) for limit in (lower, upper))
        return cls(cost, start, place % len(cost), value, *limits, *columns)

    @classmethod
    def within(cls, cost: FloatArray, rows: FloatArray, high: FloatArray) -> Programme:
        """Return the programme of a full matrix, shape (rows, columns), with columns not negative."""
        row, column = np.nonzero(rows)
        return cls.of(cost, [(row, column, rows[row, column])], -np.inf, high)

    def solved(self, seconds: float = np.inf, *, interior: bool = False) -> Optimum | None:
        """Return the optimum, or None if there is none or no time for it."""
        solver = self._run(seconds, solver="ipm" if interior else "choose")
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        found = solver.getSolution()
        return Optimum(solver.getObjectiveValue(), np.array(found.col_value), np.array(found.row_dual))

    def solved_whole(
        self, whole: IntArray | None = None, seconds: float = np.inf, **options: float
    ) -> FloatArray | None:
        """Return the best values found in whole numbers, or None if none are."""
        every = np.ones(len(self.cost), dtype=np.int64)
        solver = self._run(seconds, every if whole is None else whole, **options)
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return np.array(solver.getSolution().col_value)

    def give_to(self, solver: highspy.Highs, whole: IntArray | None = None) -> None:
        """Hand this over to HiGHS."""
        whole = np.zeros(len(self.cost), dtype=np.int64) if whole is None else whole
        taken = solver.passModel(
            len(self.cost),
            len(self.low),
            len(self.index),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            *(self.cost, self.lower, self.upper, self.low, self.high),
            *(self.start.astype(np.int32), self.index.astype(np.int32), self.value),
            whole.astype(np.int32),
        )
        if taken == highspy.HighsStatus.kError:
            raise ValueError("HiGHS refuses the programme: a number is beyond what it takes")

    def _run(self, seconds: float, whole: IntArray | None = None, **options: float | str) -> highspy.Highs:
        """Return HiGHS after it has solved this in one thread."""
        solver = SilentHighs()
        for name, value in {"threads": 1, "time_limit": max(0.0, seconds), **options}.items():
            solver.setOptionValue(name, value)
        self.give_to(solver, whole)
        if solver.run() == highspy.HighsStatus.kError:
            # Its threads are the process's, and as many as whoever else uses it has begun.
            solver.setOptionValue("threads", 0)
            solver.run()
        return solver


class SilentHighs(highspy.Highs):
    """
    HiGHS that prints nothing: 1.16 prints its name as callbacks are set, which comes before any option.

    callbacks: Whether some will be subscribed.
    """

    def __init__(self, *, callbacks: bool = False) -> None:
        self._with_callbacks = callbacks
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:
        """Set the callbacks if some are to be."""
        self.silent()
        if self._with_callbacks:
            super().enableCallbacks()  # type: ignore[no-untyped-call]
