"""Where a run stands in its plan, and when it will be done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.problem import Problem
from ...data.schedule import Schedule
from ...data.trace import Stage
from ...heuristics.simulate import remaining_schedule


@dataclass(frozen=True, slots=True)
class Standing:
    """
    Where a run stands.

    Parameters
    ----------
    done, planned
        Planned seconds done, those of an earlier, interrupted run among them, and of the whole plan.
    slowdown
        Measured seconds for each planned one in this run.
    left
        Seconds that what is left takes at that pace.
    gap
        How far above the bound the run will be, in model seconds, if the rest goes as planned; None where it
        has left the plan, or nothing is proven.
    """

    done: float
    planned: float
    slowdown: float
    left: float
    gap: float | None


class PlanClock:
    """
    Tells planned seconds by the stages that a run ran and the requests it finished.

    Between two planned ends of requests the clock follows the cost model; a run that finishes requests
    sooner, as completions end before their caps, is moved on to where the plan would have finished as many.

    Parameters
    ----------
    problem, schedule
        The plan.
    left
        Requests that this run serves, ascending; another run has completed the others.
    bound
        Proven model seconds of the whole plan, or None.
    """

    def __init__(
        self, problem: Problem, schedule: Schedule, left: npt.ArrayLike, bound: float | None = None
    ) -> None:
        kept = np.asarray(left, dtype=np.int64)
        self._cost, self._bound = problem.cost, bound if len(kept) == len(problem) else None
        self._planned = schedule.makespan(problem)
        if len(kept) < len(problem):
            problem, schedule = remaining_schedule(problem, schedule, kept)
        self._rest = schedule.makespan(problem)
        self._before = max(0.0, self._planned - self._rest)
        self._ends = np.append(np.sort(schedule.finishes(problem)), self._rest)
        self._at = self._modelled = self._charged = 0.0

    @property
    def begin(self) -> Standing:
        """Where the run stands before its first stage."""
        return Standing(self._before, self._planned, 1.0, self._rest, None)

    def after(self, stage: Stage, finished: int) -> Standing:
        """
        Return where the run stands after a stage.

        Parameters
        ----------
        stage
            What ran last.
        finished
            Requests that this run has finished.
        """
        self._modelled += stage.model_seconds(self._cost, overheads=False)
        self._charged += stage.model_seconds(self._cost)
        reached = float(self._ends[finished - 1]) if finished else 0.0
        coming = float(self._ends[min(finished, len(self._ends) - 1)])
        self._at = max(self._at, min(max(self._modelled, reached), coming))
        slowdown = stage.end / self._at if self._at else 1.0
        gap = None
        if self._bound and abs(self._modelled - self._at) <= 1e-6 * self._rest:
            gap = (self._charged + self._rest - self._at) / self._bound - 1
        left = slowdown * (self._rest - self._at)
        return Standing(self._before + self._at, self._before + self._rest, slowdown, left, gap)
