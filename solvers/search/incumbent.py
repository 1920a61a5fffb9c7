"""Best schedule in hand, with the clock of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...data.problem import Problem
from ...data.schedule import Schedule
from .params import SearchParams
from .stage_split import split_stages

BETTER = 1e-12
"""Seconds by which a schedule must beat the incumbent."""


class TracePoint(NamedTuple):
    """Moment of a search: seconds, makespan and bound."""

    seconds: float
    makespan: float
    bound: float
    """Lower bound in seconds; 0 before it is proven."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stopping criteria of a search, and its callback for each better schedule."""

    gap: float = 0.0
    """Gap to the bound, as a fraction, at which the search ends."""
    stalled: float = math.inf
    """Seconds without a better schedule after which it ends."""
    on_improvement: Callable[[TracePoint], None] | None = None


class Incumbent:
    """Best schedule so far, with a clock that begins with it.

    Parameters
    ----------
    seconds
        Wall-clock limit of the search; None for no limit.
    steps
        Steps of the search; None for no limit.

    Attributes
    ----------
    steps
        Steps done, which the phases count.
    bound
        Seconds that no schedule goes below, as far as proven.
    offer_seconds
        Seconds that the last better schedule took to be offered.
    trace
        Seconds, makespan and bound of each better schedule, in order.
    """

    def __init__(
        self, problem: Problem, seconds: float | None, steps: int | None, stop: Stop | None = None
    ) -> None:
        self.problem = problem
        self.began = time.perf_counter()
        self.seconds = math.inf if seconds is None else seconds
        self.max_steps = math.inf if steps is None else steps
        self.steps = 0
        self.bound = 0.0
        self.offer_seconds = 0.0
        self.trace: list[TracePoint] = []
        self._stop = Stop() if stop is None else stop
        self._best: tuple[float, Schedule | None] = (math.inf, None)

    @property
    def makespan(self) -> float:
        """Seconds of the incumbent; infinite without one."""
        return self._best[0]

    @property
    def schedule(self) -> Schedule:
        """The incumbent, without idle decode steps."""
        assert self._best[1] is not None, "a search begins with a schedule"
        return self._best[1]

    @property
    def is_there(self) -> bool:
        """True if there is a schedule."""
        return self._best[1] is not None

    @property
    def elapsed(self) -> float:
        """Seconds since the clock began."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Seconds left, at least 0; infinite without a limit."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def proven(self) -> bool:
        """True if nothing better exists."""
        return self.makespan <= self.bound * (1.0 + BETTER)

    @property
    def good_enough(self) -> bool:
        """True if the requested gap is reached."""
        return self.makespan <= self.bound * (1.0 + max(BETTER, self._stop.gap))

    @property
    def stalled(self) -> bool:
        """True if no better schedule came for too long."""
        return bool(self.trace) and self.elapsed - self.trace[-1].seconds > self._stop.stalled

    @property
    def enough(self) -> float:
        """Makespan in seconds at which the search ends."""
        return self.bound * (1.0 + self._stop.gap)

    @property
    def patience(self) -> float:
        """Seconds until the search ends without a better schedule."""
        since = self.trace[-1].seconds if self.trace else self.elapsed
        return max(0.0, self._stop.stalled - (self.elapsed - since))

    @property
    def progress(self) -> float:
        """Share of the limits that is used; infinite at the end."""
        if self.good_enough or self.stalled:
            return math.inf
        return max(self.elapsed / self.seconds, self.steps / self.max_steps)

    def offer(self, schedule: Schedule) -> bool:
        """Keep a schedule if it is valid and better; return success."""
        begun = self.elapsed
        schedule = split_stages(self.problem, schedule.without_idle_steps(self.problem))
        makespan = schedule.makespan(self.problem)
        if makespan >= self.makespan - BETTER or schedule.check(self.problem) is not None:
            return False
        # One assignment: an interrupt leaves either the old incumbent or the new one.
        self._best = (makespan, schedule)
        self.trace.append(TracePoint(self.elapsed, makespan, self.bound))
        self.offer_seconds = self.elapsed - begun
        if self._stop.on_improvement is not None:
            self._stop.on_improvement(self.trace[-1])
        return True


class Budget:
    """Part of a search's limits."""

    def __init__(self, best: Incumbent, share: float) -> None:
        self._best, self._begun = best, best.progress
        # An infinite progress is over, whatever the share.
        self._end = self._begun + share * (1.0 - self._begun) if self._begun < 1.0 else self._begun

    @property
    def done(self) -> float:
        """Used share, from 0; at least 1 once it is over."""
        progress = self._best.progress
        return (progress - self._begun) / (self._end - self._begun) if progress < self._end else math.inf

    @property
    def over(self) -> bool:
        """True if it is used up."""
        return self._best.progress >= self._end

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        if math.isinf(self._best.seconds):
            return math.inf
        return max(0.0, self._end * self._best.seconds - self._best.elapsed)

    @property
    def steps_left(self) -> int | None:
        """Steps left, at least 1; None without a limit."""
        if math.isinf(self._best.max_steps):
            return None
        return max(1, math.ceil(self._end * self._best.max_steps - self._best.steps))

    def part(self, share: float) -> Budget:
        """Return a share of the rest."""
        part = Budget(self._best, 0.0)
        if part._begun < self._end:
            part._end = part._begun + share * (self._end - part._begun)
        return part


@dataclass(slots=True, eq=False)
class SearchRun:
    """State that the phases of a search share."""

    problem: Problem
    best: Incumbent
    rng: np.random.Generator
    params: SearchParams = field(default_factory=SearchParams)
