"""Phase that anneals stage times, and makes schedules of the best."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....data.problem import Problem
from ....data.schedule import Schedule
from ....models.programme import Programme
from ..incumbent import Budget, SearchRun
from .annealing import StageAnnealing
from .parameters import STANDARD, StageTimeParameters
from .spans import LengthProfile, Spans
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


def stretched(times: IntArray, decode_steps: float) -> IntArray:
    """Return stage times with more steps, spread evenly."""
    return times + np.rint(np.linspace(0, decode_steps, len(times))).astype(np.int64)


def whole_slots(
    times: IntArray,
    profile: LengthProfile,
    slots: int,
    seconds: float,
    values: StageTimeParameters = STANDARD,
) -> tuple[Spans, IntArray] | None:
    """Return a whole flow of slots that serves every request, or None.

    The fractional flow that holds slots for the fewest decode steps is rounded up or down in each span. If
    that gives no flow, whole numbers are searched farther from it for few spans.

    times: Decode steps of the stages and the end, not decreasing, shape (stages + 1,).
    seconds: Time limit.

    The result is the spans, and the slots in each, shape (spans,).
    """
    end = time.perf_counter() + seconds
    spans = Spans.between(times, profile)
    if not spans.hold(profile):
        return None
    rank, at_least = spans.demand(profile)
    stages, ranks = len(times) - 1, len(at_least)
    entries = spans.flow(rank, stages, ranks)
    balance = np.zeros(stages + 1 + ranks)
    balance[0], balance[stages] = slots, -slots
    columns = len(spans) + stages + ranks
    lower = np.zeros(columns)
    lower[-ranks:] = at_least
    whole = np.ones(columns, dtype=np.int64)
    whole[-ranks:] = 0
    holding = np.zeros(columns)
    holding[: len(spans)] = spans.decode_steps
    programme = Programme.of(holding, entries, balance, balance, lower)
    optimum = programme.solved(seconds, interior=True)
    if optimum is None:
        return None
    fractional = optimum.x[: len(spans)]
    for lowest, greatest in _boxes(fractional, lower, values):
        seconds_left = end - time.perf_counter()
        if seconds_left <= 0:
            break
        boxed = replace(programme, cost=np.zeros(columns), lower=lowest, upper=greatest)
        solution = boxed.solved_whole(whole, seconds_left, mip_max_nodes=values.rounding_nodes)
        if solution is not None:
            return spans, np.rint(solution[: len(spans)]).astype(np.int64)
    return None


def _boxes(
    fractional: FloatArray, lower: FloatArray, values: StageTimeParameters
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield lower and upper bounds on a whole flow, each pair wider."""
    spans, infinite = len(fractional), np.full(len(lower), np.inf)
    nearest, above, wider = lower.copy(), infinite.copy(), infinite.copy()
    nearest[:spans] = np.floor(fractional + 1e-7)
    above[:spans], wider[:spans] = np.ceil(fractional - 1e-7), nearest[:spans] + 1.0
    yield nearest, above
    if spans <= values.some_spans:
        yield nearest, wider
    if spans <= values.few_spans:
        yield lower, infinite
