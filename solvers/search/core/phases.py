"""Phases of the schedule search that run compiled."""

from __future__ import annotations

import math
from dataclasses import replace

from ....data.problem import Problem
from ....data.schedule import Schedule
from ..backward import slots_are_scarcer
from ..incumbent import Incumbent
from ..stage_split import stages_capped
from .library import Allowance, Parameters, library
from .parameters import CoreParameters, RuinParameters
from .plans import CompiledJob, countable


def compiled_search_applies(problem: Problem) -> bool:
    """Return whether the compiled searches can plan a problem, and are installed."""
    if problem.cost.decode_base <= 0 or not problem.rounds.any():
        return False
    return countable(problem) and library() is not None


class CompiledSearch:
    """
    The compiled searches one after another, each from the best schedule.

    Parameters
    ----------
    incumbent
        The best schedule of a problem to which :func:`compiled_search_applies`, and the limits.
    seed
        Draws the moves.
    """

    def __init__(self, incumbent: Incumbent, seed: int, parameters: CoreParameters | None = None) -> None:
        self._best, self._seed = incumbent, seed
        self._problem = incumbent.problem
        self._parameters = CoreParameters() if parameters is None else parameters
        self._job = CompiledJob(self._problem, memory=self._problem.memory_can_run_out)
        self._curved = self._problem.prefill_token_cap is not None or self._problem.reaches_bend

    def improve(self) -> None:
        """Search until the limits are used up."""
        if self._problem.memory_can_run_out:
            self._within_memory()
        else:
            parameters = self._parameters
            share = parameters.spans_curved_share if self._curved else parameters.spans_share
            self.spans(self._start, share)
            self.ruin(self._start, 1.0, parameters.ruin_improves)

    @property
    def _start(self) -> Schedule:
        schedule = self._best.schedule
        assert schedule is not None, "a search begins with a schedule"
        return schedule

    def _within_memory(self) -> None:
        parameters, problem = self._parameters, self._problem
        if len(problem) <= parameters.events_requests:
            self.orders(self._start, parameters.events_share)
        elif slots_are_scarcer(problem):
            self._spans_within_memory()
        self.ruin(self._start, 1.0, parameters.ruin)

    def _spans_within_memory(self) -> None:
        """Anneal spans that fill less of the memory each time, until they make a schedule."""
        parameters = self._parameters
        fill, schedule = parameters.spans.memory_share, self._start
        for attempt, share in enumerate(parameters.spans_memory_shares):
            heat = parameters.memory_heats[min(attempt, 1)]
            found = self.spans(schedule, share, fill=fill, heat=heat)
            if found is None:
                return
            if found.check(self._problem) is None:
                break
            fill, schedule = fill - parameters.memory_step, found
        else:
            # Start times mend what is short of memory, if that is little.
            self.ruin(schedule, 0.5, parameters.ruin_improves)

    def spans(
        self, start: Schedule, share: float, *, fill: float | None = None, heat: float = 1.0
    ) -> Schedule | None:
        """Anneal stage times and spans for a share of what is left; under memory some part of it is filled."""
        parameters, count = self._parameters, len(self._problem)
        spans = parameters.spans
        if count >= parameters.many_requests:
            bias = parameters.most_bias if count >= parameters.most_requests else parameters.many_bias
            spans = replace(spans, stage_bias=bias)
        if fill is not None:
            lowered = spans.balance_share - spans.memory_share + fill
            spans = replace(spans, memory_share=fill, balance_share=lowered)
        spans = replace(spans, hot_steps=heat * spans.hot_steps, hot_stages=heat * spans.hot_stages)
        allowance = self._allowance(share, parameters.moves_per_work)
        if self._curved or fill is not None:
            # Mean prompts promise what real ones do not keep.
            allowance = replace(allowance, enough=-math.inf)
        return self._run("core_spans", spans, allowance, start)

    def orders(self, start: Schedule, share: float) -> Schedule | None:
        """Anneal orders placed backward for a share of what is left."""
        moves = max(1, self._parameters.placed_per_work // len(self._problem))
        return self._run("core_events", self._parameters.events, self._allowance(share, moves), start)

    def ruin(self, start: Schedule, share: float, parameters: RuinParameters) -> Schedule | None:
        """Ruin and recreate start times for a share of what is left."""
        if start.rounds.sum() > self._parameters.most_steps:
            return None
        allowance = self._allowance(share, self._parameters.ruins_per_work)
        return self._run("core_ruin_recreate", parameters, allowance, start)

    def _allowance(self, share: float, moves_per_work: int) -> Allowance:
        """Return a share of what is left of the limits; every search draws from a seed of its own."""
        best = self._best
        self._seed += 1
        if math.isinf(best.most):
            moves = None
        else:
            work = max(0, math.ceil(share * (best.most - best.steps)))
            best.steps += work
            moves = work * moves_per_work
        return Allowance(share * best.left, moves, best.enough, self._seed)

    def _run(self, name: str, parameters: Parameters, allowance: Allowance, start: Schedule) -> Schedule | None:
        """Offer what a search finds, and return it; an interrupt is raised again after that."""
        best = self._best
        if best.proven or allowance.moves == 0 or allowance.seconds <= 0:
            return None
        found = self._job.search(name, parameters, allowance, start)
        schedule = self._job.schedule(found)
        if schedule is not None:
            schedule = stages_capped(self._problem, schedule)
            best.offer(schedule)
        if found.interrupted:
            raise KeyboardInterrupt
        return schedule
