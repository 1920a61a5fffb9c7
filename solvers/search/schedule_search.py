"""Schedule search: baselines, then a table of phases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...data.problem import MOST_STEPS, Problem
from ...data.schedule import Schedule
from .baselines import Baseline, baselines
from .constructive import ski_rental_schedule
from .incumbent import Budget, Incumbent, SearchRun, Stop, TracePoint
from .params import ParamsError, SearchParams
from .phases import PHASES, Phase


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleSearchOutcome:
    """Result of a schedule search."""

    schedule: Schedule
    """Best valid schedule, without idle decode steps."""
    makespan: float
    """Seconds of that schedule."""
    iterations: int
    """Steps of all phases."""
    trace: tuple[TracePoint, ...]
    """Each better schedule, in order."""


def search_schedule(
    problem: Problem,
    *,
    seconds: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    start: Schedule | None = None,
    params: SearchParams | None = None,
    enough: float = 0.0,
) -> ScheduleSearchOutcome:
    """Return the best schedule found, never worse than ``start``.

    problem: Problem to schedule. Arrival times count in the makespan but do not steer the search.
    seconds: Wall-clock limit; None for no limit.
    iterations: Steps of the search; with this limit alone, the outcome depends only on the seed.
    enough: Seconds, such as a proven bound, at which the search ends.

    Raises ValueError if no limit is given, or ``start`` breaks a rule of the problem.
    """
    search = ScheduleSearch(problem, seconds=seconds, iterations=iterations, seed=seed, params=params)
    search.begin(start)
    search.improve(enough)
    return search.outcome()


class ScheduleSearch:
    """Search in two parts: baselines, and phases that improve on them.

    Between the two there is time to prove a bound. Raises ValueError if no limit is given, or a phase is
    unknown.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        seconds: float | None = None,
        iterations: int | None = None,
        seed: int = 0,
        params: SearchParams | None = None,
        stop: Stop | None = None,
    ) -> None:
        if seconds is None and iterations is None:
            raise ValueError("a schedule search needs a limit: seconds or iterations")
        self._params = SearchParams() if params is None else params
        _refuse_unknown(self._params)
        self.incumbent = Incumbent(problem, seconds, iterations, stop)
        self._run = SearchRun(problem, self.incumbent, np.random.default_rng(seed), self._params)
        self._problem = problem

    def begin(self, start: Schedule | None = None) -> None:
        """Offer the given schedule and the baselines.

        The baselines are a fixed set by size, then others in a share of the limits. Raises ValueError if
        ``start`` breaks a rule of the problem, or every schedule is too long.
        """
        best, params = self.incumbent, self._params
        if start is not None:
            if (violation := start.check(self._problem)) is not None:
                raise ValueError(f"the start schedule breaks a rule: {violation}")
            best.offer(start)
            if not params.baseline_requests and not params.baseline_share:
                return
        late_at = math.inf
        rules, constructions = baselines(self._problem, lambda: best.elapsed > late_at, params)
        for baseline in rules:
            self._offer(baseline)
        late_at = params.baseline_share * best.seconds if params.baseline_share else 0.0
        for baseline in constructions:
            if best.elapsed > late_at:
                break
            self._offer(baseline)
        if not best.is_there:
            best.offer(ski_rental_schedule(self._problem))
        if not best.is_there:
            what = f"no schedule of at most {MOST_STEPS:,} decode steps was found: plan a part of the job"
            raise ValueError(what)

    def _offer(self, baseline: Baseline) -> None:
        schedule = baseline(self.incumbent.makespan)
        if schedule is not None:
            self.incumbent.offer(schedule)

    def improve(self, bound: float = 0.0) -> None:
        """Run the phases until the limits or a proven bound are reached."""
        best = self.incumbent
        best.bound = bound
        phases = [phase for phase in PHASES if self._is_on(phase)]
        for number, phase in enumerate(phases, start=1):
            budget = Budget(best, self._share(phase) if number < len(phases) else 1.0)
            if not budget.over:
                phase.improve(self._run, budget)

    def _share(self, phase: Phase) -> float:
        usual, seconds_left = self._params.share if phase.share is None else phase.share, self.incumbent.left
        rest = self._params.rest_seconds.get(phase.name, math.inf)
        if rest < seconds_left < math.inf:
            usual = max(usual, 1.0 - rest / seconds_left)
        return self._params.shares.get(phase.name, usual)

    def _is_on(self, phase: Phase) -> bool:
        return phase.name not in self._params.off and phase.applies(self._problem, self._params)

    def outcome(self) -> ScheduleSearchOutcome:
        """Return the result of the search."""
        best = self.incumbent
        return ScheduleSearchOutcome(best.schedule, best.makespan, best.steps, tuple(best.trace))


def _refuse_unknown(params: SearchParams) -> None:
    names = [phase.name for phase in PHASES]
    for name in (*params.off, *params.shares, *params.rest_seconds):
        if name not in names:
            raise ParamsError(f"there is no phase {name!r}; choose from {', '.join(names)}")
