"""The schedule search: the least makespan found within a time limit, lengths known."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from .constructive import longest_first, ski_rental_schedule
from .slot_flow import stages_of_requests, whole_slots
from .stage_annealing import FEW, StageAnnealing
from .stage_split import split_stages
from .stage_times import StageCosts
from .token_caps import stages_within_cap

PATIENCE = (0.5, 0.25, 0.35, 0.7, 1.0, 1.4, 2.0)
"""Settings of the ski-rental rule tried first."""

START_SHARE = 0.3
"""The share of what is left of the limits after which the annealing looks for no better start."""

STRETCHES = (0, 1, 2, 4, 8)
"""Rounds by which stage times are stretched until whole slots are enough."""

LONGEST_ROUNDING = 2.0
"""Seconds allowed to turn one set of stage times into whole slots."""

ROUNDING_SHARE = 0.08
"""Most of the time that is kept for turning the last stage times into a schedule."""

ROUNDINGS = 12
"""Seconds kept for that, in times of what the last one took."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleSearchOutcome:
    """
    What a schedule search found.

    Parameters
    ----------
    schedule
        The best schedule, which keeps every rule of the problem, without idle rounds.
    makespan
        Its seconds.
    iterations
        Steps of the search done.
    improvements
        Seconds since the search began and the makespan found then, in order.
    fractional
        The least of that and of the seconds of stage times met at which fractions of slots suffice: what the
        makespan has above it is lost by making slots whole, or by a token cap.
    """

    schedule: Schedule
    makespan: float
    iterations: int
    improvements: tuple[tuple[float, float], ...]
    fractional: float


def search_schedule(
    problem: Problem,
    *,
    seconds: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    start: Schedule | None = None,
    enough: float = 0.0,
) -> ScheduleSearchOutcome:
    """
    Return the best schedule found, never worse than ``start``.

    Starts from LPT order with the ski-rental rule. Without a binding KV capacity, it then anneals over the
    rounds at which prefill stages happen, with the slots needed at given stages as a linear programme
    (findings: the slot flow); with one, it searches the order in which requests are taken.

    Parameters
    ----------
    problem
        The problem scheduled. Arrival times count in the makespan but do not steer the search.
    seconds
        Wall-clock limit; None for no limit.
    iterations
        Steps of the search; with this limit and no other the outcome is the same for the same seed.
    seed
        Draws the moves.
    start
        A schedule to improve on.
    enough
        Seconds, a proven bound say, at which the search ends: nothing better exists.

    Raises
    ------
    ValueError
        If no limit is given, or ``start`` breaks a rule of the problem.
    """
    if seconds is None and iterations is None:
        raise ValueError("a schedule search needs a limit: seconds or iterations")
    search = _Search(problem, seconds, iterations, seed, enough)
    if start is not None:
        violation = start.check(problem)
        if violation is not None:
            raise ValueError(f"the start schedule breaks a rule: {violation}")
        search.offer(start)
    search.construct()
    if problem.kv_capacity is not None and _can_fill(problem, problem.kv_capacity):
        search.reorder(1.0)
    else:
        search.reorder(0.5 if len(problem) <= FEW else 0.0)
        if not search.anneal():
            search.reorder(1.0)
    return search.outcome()


def _can_fill(problem: Problem, capacity: int) -> bool:
    """Return whether as many requests as there are slots could hold more than the capacity."""
    largest = np.sort(problem.kv_peak)[::-1][: problem.slots]
    return int(largest.sum()) > capacity


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Settings of the construction: requests are taken by rising keys, shape (requests,)."""

    keys: FloatArray
    patience: float
    burst: int

    def changed(self, rng: np.random.Generator, slots: int) -> _Order:
        """Return the settings with some keys, the patience and the burst changed a little."""
        noise = 0.5 ** rng.integers(0, 8) * rng.standard_normal(len(self.keys))
        touched = rng.random(len(self.keys)) < rng.choice([0.0, 0.02, 0.2, 1.0])
        factors = np.exp(0.4 * rng.standard_normal(2))
        burst = int(np.clip(round(self.burst * factors[1]), 1, slots))
        return _Order(
            np.where(touched, self.keys + noise, self.keys), self.patience * float(factors[0]), burst
        )


class _Search:
    """The incumbent, the limits, and the phases that improve it."""

    def __init__(
        self, problem: Problem, seconds: float | None, iterations: int | None, seed: int, enough: float
    ) -> None:
        self._problem = problem
        self._began = time.monotonic()
        self._seconds = np.inf if seconds is None else seconds
        self._most = np.inf if iterations is None else iterations
        self._enough = enough * (1.0 + 1e-12)
        self._iterations = 0
        self._rng = np.random.default_rng(seed)
        self._schedule: Schedule | None = None
        self._makespan = np.inf
        self._improvements: list[tuple[float, float]] = []
        self._fractional = np.inf
        self._attempt = 0
        self._reserve = ROUNDING_SHARE

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def _progress(self) -> float:
        """How much of the limits is used up, 0 to 1 and beyond; all, once nothing better exists."""
        if self._makespan <= self._enough:
            return np.inf
        return max(self._elapsed / self._seconds, self._iterations / self._most)

    def offer(self, schedule: Schedule) -> bool:
        """Keep a schedule that is valid and better than the incumbent, and return whether it was."""
        schedule = split_stages(self._problem, schedule.without_idle_rounds(self._problem))
        makespan = schedule.makespan(self._problem)
        if makespan >= self._makespan - 1e-12 or schedule.check(self._problem) is not None:
            return False
        self._schedule, self._makespan = schedule, makespan
        self._improvements.append((self._elapsed, makespan))
        return True

    def outcome(self) -> ScheduleSearchOutcome:
        """Return what was found."""
        assert self._schedule is not None
        fractional = min(self._makespan, self._fractional)
        return ScheduleSearchOutcome(
            self._schedule, self._makespan, self._iterations, tuple(self._improvements), fractional
        )

    def construct(self) -> None:
        """Try the ski-rental rule at several settings."""
        for patience in PATIENCE:
            self.offer(ski_rental_schedule(self._problem, patience=patience))
            if self._progress > 0.5:
                return

    def reorder(self, share: float) -> None:
        """
        Search the order in which requests are taken, the patience and the burst, by random changes.

        Parameters
        ----------
        share
            The share of the limits to use up.
        """
        ranks = np.empty(len(self._problem))
        ranks[longest_first(self._problem)] = np.linspace(0.0, 1.0, len(self._problem))
        mixed = self._rng.random(len(self._problem))
        slots = self._problem.slots
        plans = [
            _Order(keys, patience, burst)
            for burst in (slots, max(1, slots // 8), max(1, slots // 16))
            for keys in (ranks, mixed)
            for patience in (0.5, 1.5, 5.0)
        ]
        best, at = plans[0], np.inf
        while self._progress < share:
            plan = (
                plans[self._iterations] if self._iterations < len(plans) else best.changed(self._rng, slots)
            )
            self._iterations += 1
            order = np.argsort(plan.keys, kind="stable")
            schedule = ski_rental_schedule(
                self._problem, order=order, patience=plan.patience, burst=plan.burst
            )
            makespan = schedule.makespan(self._problem)
            self.offer(schedule)
            if makespan <= at:
                best, at = plan, makespan

    def anneal(self) -> bool:
        """Anneal over the stage times and return whether they were few enough; make schedules of the best."""
        costs = self._costs()
        if costs.round == 0 or self._progress >= 1.0:
            return True
        late = self._progress + START_SHARE * (1.0 - self._progress)
        annealing = StageAnnealing.of(self._problem, costs, self._rng, lambda: self._progress > late)
        if annealing is None:
            return False
        begun, next_rounding = self._progress, 0.3
        while self._progress < 1.0 - self._reserve:
            self._iterations += 1
            done = (self._progress - begun) / (1.0 - self._reserve - begun)
            annealing.step(done, lambda: self._elapsed > self._seconds)
            if done >= next_rounding:
                next_rounding = done + 0.2
                for times in annealing.walk.feasible()[:1]:
                    self._realise(times, annealing)
        for times in annealing.walk.feasible():
            self._fractional = min(self._fractional, annealing.split.least_makespan(times))
            self._realise(times, annealing)
        # A short walk may end where a part of a slot is lacking, and have met no better times with enough.
        self._realise(annealing.walk.times, annealing)
        return True

    def _costs(self) -> StageCosts:
        """Return what a stage and a round cost beyond what every schedule pays."""
        assert self._schedule is not None
        cost = self._problem.cost
        tokens = float(self._problem.prompt_tokens.sum()) / max(1, self._schedule.prefill_stages())
        floor = max(0.0, cost.prefill_floor - cost.prefill_base - cost.prefill_per_token * tokens)
        return StageCosts(cost.prefill_base + floor, cost.decode_base, self._problem.slots)

    def _rounding_seconds(self) -> float:
        """Return the seconds for one attempt at whole slots; no limit if time does not limit the search."""
        if np.isinf(self._seconds):
            return self._seconds
        return min(max(0.2 * (self._seconds - self._elapsed), 0.05), LONGEST_ROUNDING)

    def _realise(self, times: IntArray, annealing: StageAnnealing) -> bool:
        """
        Offer a schedule with these stage times, if there is one, and return whether it is better.

        Where whole slots are too few though fractions of them suffice, a few rounds more, spread evenly over
        the stages, make up for it. The next times are first stretched by a little less than was needed.
        """
        split, profile = annealing.split, annealing.profile
        for attempt in range(max(0, self._attempt - 1), len(STRETCHES)):
            more = np.rint(np.linspace(0, STRETCHES[attempt], len(times)))
            stretched = times + more.astype(np.int64)
            if self._progress >= 1.0 or split.least_makespan(stretched) >= self._makespan:
                return False
            allowed = self._rounding_seconds()
            begun = self._elapsed
            if self._problem.prefill_token_cap is None:
                flow = whole_slots(stretched, profile, self._problem.slots, allowed)
                bin_of = None if flow is None else stages_of_requests(*flow, split.rest.rounds)
            else:
                bin_of = stages_within_cap(split.rest, stretched, profile, allowed)
            if bin_of is not None:
                self._attempt = attempt
                self._reserve = min(ROUNDING_SHARE, ROUNDINGS * (self._elapsed - begun) / self._seconds)
                return self.offer(split.schedule(bin_of, np.diff(stretched)))
        return False
