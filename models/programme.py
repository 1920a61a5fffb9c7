"""Linear programmes, fractional or whole, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import highspy
import numpy as np

from ..data.arrays import FloatArray, IntArray

Entries = tuple[IntArray, IntArray, FloatArray | IntArray | float]
"""Entries of a matrix: rows, columns, and a number or numbers."""


STEPS, MANY_STEPS = 20, 1_000_000
"""Simplex steps after which a solution may be good enough, and without a limit."""

PRIMAL: Mapping[str, float | str] = MappingProxyType(
    {"presolve": "off", "solver": "simplex", "simplex_strategy": 4, "simplex_scale_strategy": 0}
)
"""Options of a primal simplex that starts from a given basis."""

LOWER, BASIC, ZERO = 0, 1, 3
"""Basis status: at the lower bound, in the basis, free outside."""

STATUS = tuple(highspy.HighsBasisStatus.__members__.values())
"""HiGHS's names for these numbers."""


class Optimum(NamedTuple):
    """Least cost, its point, and the dual value of each row."""

    cost: float
    x: FloatArray
    prices: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Programme:
    """Linear programme with limits of rows and of columns.

    cost: Cost of each column, shape (columns,).
    start, index, value: Entries of the rows in turn: where each row begins, shape (rows + 1,), and column and
    number of each entry, shape (entries,).
    low, high: Limits of the rows, infinite for none, shape (rows,).
    lower, upper: Limits of the columns, infinite for none, shape (columns,).
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
        """Return a programme; entries in one place are added up."""
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
        """Return the programme of a full matrix, with columns not negative."""
        row, column = np.nonzero(rows)
        return cls.of(cost, [(row, column, rows[row, column])], -np.inf, high)

    def solved(self, seconds: float = np.inf, *, interior: bool = False) -> Optimum | None:
        """Return the optimum, or None without one in time."""
        solver = self._run(seconds, solver="ipm" if interior else "choose")
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = solver.getSolution()
        return Optimum(solver.getObjectiveValue(), np.array(solution.col_value), np.array(solution.row_dual))

    def solved_from(self, basis: tuple[IntArray, IntArray], enough: float = -np.inf) -> FloatArray | None:
        """Return the columns of least cost, or of a cost below ``enough``.

        A primal simplex starts from a feasible basis: :data:`STATUS` of each column and of each row. The
        result is None if there is no optimum.
        """
        solver = self._solver(PRIMAL)
        start = highspy.HighsBasis()
        start.col_status, start.row_status = ([STATUS[status] for status in part.tolist()] for part in basis)
        start.valid = True
        solver.setBasis(start)
        steps = STEPS if np.isfinite(enough) else MANY_STEPS
        while True:
            solver.setOptionValue("simplex_iteration_limit", steps)
            _solve(solver)
            limited = solver.getModelStatus() == highspy.HighsModelStatus.kIterationLimit
            if not limited or solver.getObjectiveValue() < enough:
                break
            steps *= 2
        optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return np.array(solver.getSolution().col_value) if optimal or limited else None

    def solved_whole(
        self, whole: IntArray | None = None, seconds: float = np.inf, **options: float
    ) -> FloatArray | None:
        """Return the best whole values found, or None."""
        every = np.ones(len(self.cost), dtype=np.int64)
        solver = self._run(seconds, every if whole is None else whole, **options)
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return np.array(solver.getSolution().col_value)

    def give_to(self, solver: highspy.Highs, whole: IntArray | None = None) -> None:
        """Pass the programme to HiGHS."""
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
        """Return HiGHS after it has solved the programme."""
        solver = self._solver({"time_limit": max(0.0, seconds), **options}, whole)
        _solve(solver)
        return solver

    def _solver(self, options: Mapping[str, float | str], whole: IntArray | None = None) -> highspy.Highs:
        solver = SilentHighs()
        for name, value in {"threads": 1, **options}.items():
            solver.setOptionValue(name, value)
        self.give_to(solver, whole)
        return solver


def _solve(solver: highspy.Highs) -> None:
    if solver.run() == highspy.HighsStatus.kError:
        # Its threads belong to the process, and other users may have started more of them.
        solver.setOptionValue("threads", 0)
        solver.run()


class SilentHighs(highspy.Highs):
    """HiGHS that prints nothing.

    1.16 prints its name when callbacks are set, before any option applies.

    callbacks: True if callbacks will be set.
    """

    def __init__(self, *, callbacks: bool = False) -> None:
        self._with_callbacks = callbacks
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:
        """Set the callbacks if some will be used."""
        self.silent()
        if self._with_callbacks:
            super().enableCallbacks()  # type: ignore[no-untyped-call]
