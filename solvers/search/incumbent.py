"""The best schedule in hand, and how much of a search's limits is used up."""

from __future__ import annotations

import math
import time

from ...data.problem import Problem
from ...data.schedule import Schedule
from .stage_split import split_stages

BETTER = 1e-12
"""Seconds by which a schedule has to be better than the incumbent."""


class Incumbent:
    """
    The best schedule offered so far, on a clock that begins with it.

    Parameters
    ----------
    seconds
        Wall-clock limit of the search; None for no limit.
    steps
        Steps of the search; None for no limit.

    Attributes
    ----------
    makespan
        Seconds of the incumbent; infinite without one.
    steps
        Steps done, which the searches count.
    enough
        Seconds, a proven bound say, at which nothing better exists.
    improvements
        Seconds since the clock began and the makespan found then, in order.
    """

    def __init__(self, problem: Problem, seconds: float | None, steps: int | None) -> None:
        self.problem = problem
        self.began = time.perf_counter()
        self.seconds = math.inf if seconds is None else seconds
        self.most = math.inf if steps is None else steps
        self.steps = 0
        self.enough = 0.0
        self.improvements: list[tuple[float, float]] = []
        self._best: tuple[float, Schedule | None] = (math.inf, None)

    @property
    def makespan(self) -> float:
        """Seconds of the incumbent; infinite without one."""
        return self._best[0]

    @property
    def schedule(self) -> Schedule | None:
        """The incumbent, without idle rounds, or None without one."""
        return self._best[1]

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
        """Whether nothing better exists."""
        return self.makespan <= self.enough * (1.0 + BETTER)

    @property
    def progress(self) -> float:
        """The share of the limits that is used up, 0 to 1 and beyond; infinite once nothing better exists."""
        if self.proven:
            return math.inf
        return max(self.elapsed / self.seconds, self.steps / self.most)

    def offer(self, schedule: Schedule) -> bool:
        """Keep a schedule that is valid and better than the incumbent, and return whether it was."""
        schedule = split_stages(self.problem, schedule.without_idle_rounds(self.problem))
        makespan = schedule.makespan(self.problem)
        if makespan >= self.makespan - BETTER or schedule.check(self.problem) is not None:
            return False
        # One assignment: an interrupt leaves either the old incumbent or the new one.
        self._best = (makespan, schedule)
        self.improvements.append((self.elapsed, makespan))
        return True
