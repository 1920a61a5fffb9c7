"""Limits of a solver, and its result."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeVar

from ..data.bound import Bound, gap_above
from ..data.figures import percentage, seconds
from ..data.files.shown import Shown
from ..data.schedule import Schedule
from ..models.deadline import LEAST_LEFT

if TYPE_CHECKING:
    import pandas as pd


Value = TypeVar("Value")


class Status(enum.StrEnum):
    """Status of a solution and its proof."""

    OPTIMAL = "optimal"
    """A solution exists and is proven best."""
    FEASIBLE = "feasible"
    """A solution exists, and a better one may exist."""
    INFEASIBLE = "infeasible"
    """No solution exists, with proof."""
    UNBOUNDED = "unbounded"
    """The objective of a linear model has no least value, with proof."""
    NO_SOLUTION = "no solution"
    """No solution was found, and none is ruled out."""


class StoppedBy(enum.StrEnum):
    """Reason why a solver stopped."""

    PROOF = "proof"
    """Nothing was left to prove."""
    TIME = "time"
    """The seconds of :class:`Limits` were over."""
    WORK = "work"
    """The work of :class:`Limits` was done."""
    INTERRUPT = "interrupt"
    """The user pressed Ctrl-C."""
    CRASH = "crash"
    """The solver raised an error or its process died."""
    HANG = "hang"
    """The solver's library did not load, and its process was killed."""
    GAP = "gap"
    """The requested gap was reached."""
    STALLED = "no improvement"
    """No better schedule came for the given seconds."""
    FINISHED = "finished"
    """The solver ended by itself, without a proof."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Stopping criteria of a solver.

    Parameters
    ----------
    seconds
        Wall-clock seconds, or None for no limit.
    work
        Units of the solver's own work (iterations, branch-and-bound nodes), or None for no limit. With one
        thread, the same work and seed give the same schedule. The bound may differ, as it has a time limit.
    threads
        Threads the solver may use.
    seed
        Seed of all random numbers.
    gap
        Gap to the bound, as a fraction, at which a search ends; None to continue to a proof.
    stalled
        Seconds without a better schedule after which a search ends; None to continue.

    Raises
    ------
    ValueError
        If a limit is out of range.
    """

    seconds: float | None = None
    work: int | None = None
    threads: int = 1
    seed: int = 0
    gap: float | None = None
    stalled: float | None = None

    def __post_init__(self) -> None:
        for name in ("work", "threads", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, Integral) or (value is None and name == "work")):
                raise ValueError(f"Limits.{name} is {value!r}; it must be a whole number")
        if self.seconds is not None and not (isinstance(self.seconds, Real) and 0 < self.seconds < math.inf):
            raise ValueError(f"Limits.seconds is {self.seconds!r}; it must be positive and finite, or None")
        for name in ("gap", "stalled"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 <= float(value) < math.inf):
                raise ValueError(f"Limits.{name} is {value!r}; it must be finite and at least 0, or None")
        if self.work is not None and self.work < 1:
            raise ValueError(f"Limits.work is {self.work}; it must be at least 1, or None")
        if self.threads < 1:
            raise ValueError(f"Limits.threads is {self.threads}; it must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"Limits.seed is {self.seed}; it must be from 0 to {2**31 - 1}")

    def part(self, share: float) -> Limits:
        """Return a share of the seconds and of the work."""
        seconds = None if self.seconds is None else share * self.seconds
        work = None if self.work is None else max(1, math.floor(share * self.work))
        return replace(self, seconds=seconds, work=work)

    def left(self, begun: float, work: int = 0) -> Limits:
        """Return what is left of the limits, at least a little.

        begun: Time of ``time.perf_counter`` at which the seconds began.
        work: Work that is done.
        """
        elapsed = time.perf_counter() - begun
        seconds = None if self.seconds is None else max(LEAST_LEFT, self.seconds - elapsed)
        return replace(self, seconds=seconds, work=None if self.work is None else max(1, self.work - work))

    def noted(self, seconds: float) -> float | None:
        """Return the seconds of a search for its plan; None under a work limit alone."""
        return None if self.seconds is None and self.work is not None else seconds


def ended(stopped_by: str) -> str:
    """Say how a solver ended, by its :class:`StoppedBy`."""
    return stopped_by if stopped_by == StoppedBy.FINISHED else f"stopped by {stopped_by}"


def despite_interrupt(function: Callable[[], Value]) -> tuple[Value, bool]:
    """Return a quick function's value, and whether Ctrl-C was pressed meanwhile."""
    try:
        return function(), False
    except KeyboardInterrupt:
        return function(), True


@dataclass(frozen=True, slots=True, repr=False)
class Result(Shown):
    """Result of a solver.

    Parameters
    ----------
    status
        Status of the schedule and its proof.
    stopped_by
        Reason for the end.
    schedule
        Best valid schedule found, or None.
    makespan
        Seconds of the schedule by the problem's cost model, or None.
    bound
        Best lower bound, or None if the solver proves none.
    seconds
        Wall-clock seconds spent.
    solver
        Name of the solver.
    version
        Version of the solver, or of its library.
    message
        Remark for the user, such as the reason of a crash; may be empty.
    repeatable
        Best bound that a checker can derive again without the solver, or None.
    improvements
        Seconds and makespan of each better schedule, up to the last; empty for solvers other than ``search``.
    bounds
        Seconds and value of each better bound of ``search``.
    bound_of
        The schedules that bound and status hold for.
    started
        False if a solver's library was not loaded or its model not built; the schedule is then the rule's
        that it would have begun from.
    """

    status: Status
    stopped_by: StoppedBy
    schedule: Schedule | None
    makespan: float | None
    bound: Bound | None
    seconds: float
    solver: str
    version: str
    message: str = ""
    repeatable: Bound | None = None
    improvements: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()
    bound_of: str = ""
    started: bool = True

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield the schedule's and the bound's figures."""
        yield "Result", f"{self.status}, {ended(self.stopped_by)}"
        yield "makespan", seconds(self.makespan)
        yield "lower bound", None if self.bound is None else seconds(self.bound.seconds)
        yield "bound of", None if self.bound is None else self.bound_of or None
        yield "proven by", None if self.bound is None else self.bound.source
        yield "above the bound", percentage(self.gap)
        yield "solver", f"{self.solver}, {self.seconds:.2g} s"
        yield "message", self.message or None

    def to_frame(self) -> pd.DataFrame:
        """Return seconds, makespan and bound at each change, as a data frame."""
        import pandas as pd

        return pd.DataFrame(self.trace, columns=["seconds", "makespan", "bound"])

    @property
    def trace(self) -> tuple[tuple[float, float, float], ...]:
        """Seconds, makespan and bound at each change, at first infinite and 0."""
        makespan, bound, points = math.inf, 0.0, list[tuple[float, float, float]]()
        changes = [(at, value, True) for at, value in self.improvements]
        for at, value, is_makespan in sorted([*changes, *((at, value, False) for at, value in self.bounds)]):
            makespan, bound = (value, bound) if is_makespan else (makespan, value)
            points.append((at, makespan, bound))
        return tuple(points)

    @property
    def gap(self) -> float | None:
        """Gap to the bound, as a fraction; None without a bound."""
        return gap_above(self.makespan, None if self.bound is None else self.bound.proven)
