"""Phase that anneals stage times, and makes schedules of the best."""

from __future__ import annotations

import math

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ..incumbent import Budget, SearchRun
from .annealing import StageAnnealing
from .rounding import stretched, whole_slots
from .spans import Spans
from .times import StageCosts


def can_anneal_stage_times(problem: Problem) -> bool:
    """Return whether stage times can be annealed.

    Decode steps must cost something, and each request must take one.
    """
    return StageCosts.of(problem).decode_step > 0


def anneal_stage_times(run: SearchRun, budget: Budget) -> None:
    """Anneal stage times if they are few, and make schedules."""
    _StageTimes(run, budget).run()


class _StageTimes:
    """One annealing over stage times, with its schedules."""

    def __init__(self, run: SearchRun, budget: Budget) -> None:
        self._problem, self._rng, self._best, self._budget = run.problem, run.rng, run.best, budget
        self._values = run.params.stage_times
        self._attempt, self._reserve = 0, self._values.rounding_share

    def run(self) -> None:
        """Anneal, then make schedules of the best times."""
        budget = self._budget
        annealing = self._begun(StageCosts.of(self._problem, self._values))
        if annealing is None:
            return
        begun, next_rounding = budget.done, self._values.first_rounding
        while (done := budget.done) < 1.0 - self._reserve:
            self._best.steps += 1
            annealing.step((done - begun) / (1.0 - self._reserve - begun), lambda: budget.left <= 0)
            if self._clock >= next_rounding:
                next_rounding *= 2
                for times in annealing.walk.feasible()[:1]:
                    self._realise(times, annealing)
        for times in annealing.walk.feasible():
            self._realise(times, annealing)
        # A short walk may end where a part of a slot is lacking, and have met no better times with enough.
        self._realise(annealing.walk.times, annealing)

    @property
    def _clock(self) -> float:
        """Seconds since the search began, or their equivalent in steps."""
        best = self._best
        return best.elapsed if math.isinf(best.max_steps) else best.steps * self._values.step_seconds

    def _begun(self, costs: StageCosts) -> StageAnnealing | None:
        """Return an annealing from a start with few enough stages."""
        budget, annealing, values = self._budget, None, self._values
        start = budget.part(values.start_share)
        brief = budget.left <= values.brief_seconds
        widest = values.brief_spans if brief else values.most_spans
        most_stages = values.brief_stages if brief else len(self._problem)
        if len(self._problem) > most_stages * self._problem.slots:
            return None
        for spans in values.start_spans[brief:]:
            annealing = StageAnnealing.of(
                self._problem, costs, self._rng, lambda: start.over, (spans, widest)
            )
            if annealing is None:
                break
            if len(annealing.walk.times) > most_stages + 1:
                return None
            if self._realise(annealing.walk.times, annealing) or start.over:
                break
            if Spans.number_between(annealing.walk.times, annealing.profile) <= values.start_spans[-1]:
                break
        return annealing

    def _realise(self, times: IntArray, annealing: StageAnnealing) -> bool:
        """Offer a schedule with these stage times; return success.

        If whole slots are too few, a few more decode steps, spread evenly over the stages, make up for it.
        The next times are first stretched by a little less.
        """
        best, budget, values = self._best, self._budget, self._values
        for attempt in range(max(0, self._attempt - 1), values.stretches):
            steps = max(1.0, values.stretch * times[-1]) * 2.0 ** (attempt - 1) if attempt else 0.0
            later = stretched(times, steps)
            if budget.over or annealing.split.least_makespan(later) >= best.makespan:
                return False
            begun = best.elapsed
            schedule = self._schedule_for(later, annealing)
            if schedule is not None:
                self._attempt = attempt
                share = (best.elapsed - begun) / best.seconds
                self._reserve = min(values.rounding_share, values.roundings * share)
                best.offer(schedule)
                return True
        return False

    def _schedule_for(self, times: IntArray, annealing: StageAnnealing) -> Schedule | None:
        split, profile = annealing.split, annealing.profile
        flow = whole_slots(times, profile, self._problem.slots, self._rounding_seconds(), self._values)
        if flow is None:
            return None
        spans, used = flow
        return split.schedule(spans.first[spans.of_requests(used, split.rest.decode_steps)], np.diff(times))

    def _rounding_seconds(self) -> float:
        """Return the seconds for one attempt at whole slots."""
        if math.isinf(self._best.seconds):
            return math.inf
        return min(max(self._values.rounding_left * self._budget.left, 0.05), self._values.longest_rounding)
