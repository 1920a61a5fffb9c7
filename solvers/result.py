"""Limits of a solver, and its result."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING

from ..data.bound import Bound, gap_above
from ..data.files.shown import Shown, percentage, seconds
from ..data.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd


class Status(enum.StrEnum):
    """Schedule at the end, and its proof."""

    OPTIMAL = "optimal"
    """The solution in hand is proven best."""
    FEASIBLE = "feasible"
    """A solution is in hand, and a better one is not ruled out."""
    INFEASIBLE = "infeasible"
    """It is proven that there is no solution."""
    UNBOUNDED = "unbounded"
    """It is proven that the objective has no least value; of linear models only."""
    NO_SOLUTION = "no solution"
    """Nothing is in hand and nothing is ruled out."""


class StoppedBy(enum.StrEnum):
    """Why a solver stopped."""

    PROOF = "proof"
    """It had nothing left to prove."""
    TIME = "time"
    """The seconds of :class:`Limits` were up."""
    WORK = "work"
    """The work of :class:`Limits` was done."""
    INTERRUPT = "interrupt"
    """The user pressed Ctrl-C."""
    CRASH = "crash"
    """The solver raised an error or its process died."""
    HANG = "hang"
    """The solver's library did not load, and its process was killed."""
    GAP = "gap"
    """The gap asked for was reached."""
    STALLED = "no improvement"
    """There was no better schedule for the seconds given."""
    GAVE_UP = "gave up"
    """The solver ended of its own accord with nothing proven."""


@dataclass(frozen=True, slots=True)
class Limits:
    """
    When a solver has to stop.

    Parameters
    ----------
    seconds
        Wall-clock seconds, or None for no limit.
    work
        Units of the solver's own work (iterations, branch-and-bound nodes), or None for no limit. With one
        thread, the same work and the same seed give the same schedule; a bound that takes a search may
        differ, as that is given five seconds.
    threads
        Threads the solver may use.
    seed
        Seed of everything random in it.
    gap
        Gap to the proven bound, as a fraction of it, at which a search ends; None to continue to a proof.
    stalled
        Seconds without a better schedule after which a search ends; None to continue.

    Raises
    ------
    ValueError
        If a limit cannot be kept.
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


@dataclass(frozen=True, slots=True, repr=False)
class Result(Shown):
    """
    What a solver of the scheduling problem hands back.

    Parameters
    ----------
    status
        What is known.
    stopped_by
        Why the solver stopped.
    schedule
        The best schedule found, which the referee accepts, or None.
    makespan
        Its seconds by the problem's cost model, or None without a schedule.
    bound
        The best bound proven, or None if the solver proves none.
    seconds
        Wall-clock seconds spent.
    solver
        The solver's name.
    version
        The version of the solver, or of the library beneath it.
    message
        What else a person should know (why a solver crashed, why its answer was refused); empty if nothing.
    repeatable
        The best bound that a checker can derive again without the solver, or None if none is known.
    improvements
        Seconds and makespan of each better schedule, the last of them this one; empty from other solvers than
        the search.
    bounds
        Seconds and value of each better bound of the search.
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

    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield what was found and what is proven."""
        yield "Result", f"{self.status}, stopped by {self.stopped_by}"
        yield "makespan", seconds(self.makespan)
        yield "lower bound", None if self.bound is None else seconds(self.bound.seconds)
        yield "proven by", None if self.bound is None else self.bound.source
        yield "above the bound", percentage(self.gap)
        yield "solver", f"{self.solver}, {self.seconds:.2g} s"
        yield "message", self.message or None

    def to_frame(self) -> pd.DataFrame:
        """Return a data frame with seconds, makespan and bound at each change of either."""
        import pandas as pd

        return pd.DataFrame(self.trace, columns=["seconds", "makespan", "bound"])

    @property
    def trace(self) -> tuple[tuple[float, float, float], ...]:
        """Seconds, makespan and bound at each change of either; infinite and 0 before the first."""
        makespan, bound, points = math.inf, 0.0, list[tuple[float, float, float]]()
        changes = [(at, value, True) for at, value in self.improvements]
        for at, value, is_makespan in sorted([*changes, *((at, value, False) for at, value in self.bounds)]):
            makespan, bound = (value, bound) if is_makespan else (makespan, value)
            points.append((at, makespan, bound))
        return tuple(points)

    @property
    def gap(self) -> float | None:
        """Gap of the makespan to the bound, as a fraction of the bound; None without both."""
        return gap_above(self.makespan, None if self.bound is None else self.bound.proven)
