"""The schedule search: the least makespan found within a time limit, lengths known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..data.cost import FloatArray, IntArray
from ..data.problem import Problem
from ..data.schedule import Schedule
from ..models.least_counts import cost_terms
from .constructive import longest_first, ski_rental_schedule
from .slot_flow import LengthProfile, stages_of_requests, whole_slots
from .slot_price import slot_price
from .stage_split import split_stages
from .stage_times import StageCosts, StageTimesSearch
from .token_caps import stages_within_cap

PATIENCE = (0.5, 0.25, 0.35, 0.7, 1.0, 1.4, 2.0)
"""Settings of the ski-rental rule tried first."""

HOT, COLD = 0.5, 0.04
"""Temperatures at the start and the end of a long annealing, in costs of a prefill stage."""

LONG = 2000
"""Steps from which an annealing is long; a shorter one starts colder in proportion."""

CYCLE, SHORT_CYCLE = 1000, 40
"""Steps after which the annealing is hot again, and the same for few requests."""

SCATTERED = 30
"""Steps for each stage from which a problem with full levels is annealed from scattered stages."""

SCATTERED_HOT = 0.15
"""Temperature at the start of that: where it is hotter, the walk strays to twice as many stages."""

TRIALS, TRIAL_STEPS, TRIAL_SHARE = 4, 250, 0.08
"""Short annealings of which the best goes on, the steps of each, and the most of all that it takes."""

KINK, TIGHT, TIGHTENING = 0.15, 0.9, 6
"""How slots lacking or to spare are priced at first (:meth:`StageCosts.guide`), in its end, and how late."""

DRAWS = 24
"""Scattered stages drawn, of which the best are the start."""

SCATTERED_LENGTH = 1.012
"""Their end, in times of the rounds that the requests would fill."""

FRESH = 0.75
"""The share of the time in which it then begins anew; in the rest it goes on from the best times met."""

TIMED = 4
"""Steps after which the annealing judges how many there will be."""

STRETCHES = (0, 1, 2, 4, 8)
"""Rounds by which stage times are stretched until whole slots are enough."""

LONGEST_ROUNDING = 2.0
"""Seconds allowed to turn one set of stage times into whole slots."""

ROUNDING_SHARE = 0.08
"""Most of the time that is kept for turning the last stage times into a schedule."""

ROUNDINGS = 12
"""Seconds kept for that, in times of what the last one took."""

START_PATIENCE = (8.0, 4.0, 2.0, 1.0, 0.5)
"""Settings of the ski-rental rule whose stage times the annealing may start from."""

FEW = 40
"""Requests up to which orders are searched too: stage times alone leave much to chance in small problems."""

MANY = 500
"""Requests from which on how their lengths are rounded up says which stage times need few slots."""


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleSearchOutcome:
    """
    What a schedule search found.

    Parameters
    ----------
    schedule
        The best schedule, which keeps every rule of the problem, without rounds after its last request.
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
        search.anneal()
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


@dataclass(frozen=True, slots=True)
class _Cooling:
    """
    How an annealing cools, once or in cycles.

    Parameters
    ----------
    hot
        Temperature at the start of each cycle, in costs of a prefill stage.
    tight
        The kink at the end of each cycle. A walk drawn to the slots given no more than at first now and then
        ends beside them, at times that are far from a schedule.
    ends
        Where each cycle ends, in shares of the annealing.
    """

    hot: float
    tight: float = KINK
    ends: tuple[float, ...] = (1.0,)

    @classmethod
    def in_cycles(cls, steps: float, few: bool) -> _Cooling:
        """Return that of an annealing of so many steps, of few requests or of many."""
        cycles = max(1, round(steps / (SHORT_CYCLE if few else CYCLE)))
        hot = HOT if few else min(HOT, max(COLD, HOT * steps / LONG))
        return cls(hot, ends=tuple(np.linspace(0.0, 1.0, cycles + 1)[1:].tolist()))

    @classmethod
    def with_trials(cls, steps: float) -> _Cooling:
        """Return that of an annealing of so many steps from the best of some short ones."""
        share = min(TRIAL_SHARE, TRIAL_STEPS / steps)
        return cls(SCATTERED_HOT, TIGHT, (*(share * np.arange(1, TRIALS + 1)).tolist(), 1.0))

    def at(self, done: float, cycle: int) -> tuple[float, float]:
        """Return the temperature and the kink after a share of the annealing."""
        begin = self.ends[cycle - 1] if cycle else 0.0
        cooled = min(1.0, (done - begin) / (self.ends[cycle] - begin))
        return self.hot * (COLD / self.hot) ** cooled, KINK + (self.tight - KINK) * cooled**TIGHTENING

    def over(self, done: float, cycle: int) -> bool:
        """Return whether a cycle, if it isn't the last one, has come to its end."""
        return done >= self.ends[cycle] and cycle + 1 < len(self.ends)


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

    def anneal(self) -> None:
        """Anneal over the stage times, and make schedules of the best ones."""
        costs = self._costs()
        if costs.round == 0 or self._progress >= 1.0:
            return
        split = _Split.of(self._problem)
        profile = LengthProfile.of(split.rest.rounds, self._starts_per_stage())
        start = _start_times(split.rest, profile, costs)
        walk = StageTimesSearch(profile, costs, start, self._rng)
        few = len(self._problem) <= FEW
        cooling, cycle, scattered = _Cooling(HOT if few else COLD), 0, False
        tried: list[tuple[float, IntArray]] = []
        begun, first = self._progress, self._iterations
        next_rounding = 0.3
        while self._progress < 1.0 - self._reserve:
            self._iterations += 1
            done = (self._progress - begun) / (1.0 - self._reserve - begun)
            if self._iterations - first == TIMED:
                steps, stages = TIMED / max(done, 1e-9), len(start)
                scattered = steps >= SCATTERED * stages and len(split.levels) > 0 and not few
                cooling = _Cooling.with_trials(steps) if scattered else _Cooling.in_cycles(steps, few)
                if scattered:
                    split = _Split.of(self._problem, spare=1)
                    profile = LengthProfile.of(split.rest.rounds)
                    start = _scattered(split.rest, profile, costs, stages, self._rng)
                    many = len(self._problem) >= MANY
                    walk = StageTimesSearch(profile, costs, start, self._rng, by_lengths=many)
            if cooling.over(done, cycle):
                cycle += 1
                again = start
                if scattered:
                    tried.append((float(costs.guide(walk.times, walk.slots, TIGHT)), walk.times))
                    again = (
                        _scattered(split.rest, profile, costs, len(start), self._rng)
                        if cycle < TRIALS
                        else min(tried, key=lambda each: each[0])[1]
                    )
                elif done > FRESH:
                    again = next(iter(walk.feasible()), walk.times)
                walk.restart(again)
            temperature, kink = cooling.at(done, cycle)
            walk.step(costs.stage * temperature, kink, lambda: self._elapsed > self._seconds)
            if done >= next_rounding:
                next_rounding = done + 0.2
                for times in walk.feasible()[:1]:
                    self._realise(times, profile, split)
        for times in walk.feasible():
            self._fractional = min(self._fractional, split.least_makespan(self._problem, times))
            self._realise(times, profile, split)
        # A short walk may end where a part of a slot is lacking, and have met no better times with enough.
        self._realise(walk.times, profile, split)

    def _costs(self) -> StageCosts:
        """Return what a stage and a round cost beyond what every schedule pays."""
        assert self._schedule is not None
        cost = self._problem.cost
        tokens = float(self._problem.prompt_tokens.sum()) / max(1, self._schedule.prefill_stages())
        floor = max(0.0, cost.prefill_floor - cost.prefill_base - cost.prefill_per_token * tokens)
        return StageCosts(cost.prefill_base + floor, cost.decode_base, self._problem.slots)

    def _starts_per_stage(self) -> float | None:
        cap = self._problem.prefill_token_cap
        return None if cap is None else float(max(1, int(cap / self._problem.prompt_tokens.mean())))

    def _rounding_seconds(self) -> float:
        """Return the seconds for one attempt at whole slots; no limit if time does not limit the search."""
        if np.isinf(self._seconds):
            return self._seconds
        return min(max(0.2 * (self._seconds - self._elapsed), 0.05), LONGEST_ROUNDING)

    def _realise(self, times: IntArray, profile: LengthProfile, split: _Split) -> bool:
        """
        Offer a schedule with these stage times, if there is one, and return whether it is better.

        Where whole slots are too few though fractions of them suffice, a few rounds more, spread evenly over
        the stages, make up for it. The next times are first stretched by a little less than was needed.
        """
        for attempt in range(max(0, self._attempt - 1), len(STRETCHES)):
            more = np.rint(np.linspace(0, STRETCHES[attempt], len(times)))
            stretched = times + more.astype(np.int64)
            if self._progress >= 1.0 or split.least_makespan(self._problem, stretched) >= self._makespan:
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
                return self.offer(split.schedule(self._problem, bin_of, np.diff(stretched)))
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """
    A head of full levels, every slot busy with a longest request in each, and the rest of the problem.

    Levels waste nothing, and leave a problem whose stage times are far fewer.

    Parameters
    ----------
    levels
        Requests of each level, shape (levels, slots).
    rest
        The problem without them.
    others
        The requests of the rest, shape (requests of the rest,).
    """

    levels: IntArray
    rest: Problem
    others: IntArray

    @classmethod
    def of(cls, problem: Problem, spare: int = 0) -> _Split:
        """
        Return the problem split so that the rest has at least one longest request beside some levels.

        Parameters
        ----------
        problem
            The problem split.
        spare
            Full levels left to the rest.
        """
        longest = np.flatnonzero(problem.rounds == problem.rounds.max())
        levels = (len(longest) - 1) // problem.slots - spare
        if levels < 1 or problem.prefill_token_cap is not None:
            return cls(np.empty((0, problem.slots), dtype=np.int64), problem, np.arange(len(problem)))
        head = longest[: levels * problem.slots]
        others = np.setdiff1d(np.arange(len(problem)), head)
        rest = Problem(
            problem.workload.select(others),
            problem.cost,
            problem.slots,
            prefill_emits_first_token=problem.prefill_emits_first_token,
        )
        return cls(head.reshape(levels, problem.slots), rest, others)

    def least_makespan(self, problem: Problem, times: IntArray) -> float:
        """Return the least seconds of the whole problem's schedules, given the stage times of the rest."""
        levels = len(self.levels)
        stages, rounds = levels + len(times) - 1, levels * int(problem.rounds.max()) + int(times[-1])
        return sum(cost_terms(problem, stages, rounds).values())

    def schedule(self, problem: Problem, bin_of: IntArray, rounds: IntArray) -> Schedule:
        """Return the whole schedule, given that of the rest."""
        levels = len(self.levels)
        bins = np.empty(len(problem), dtype=np.int64)
        bins[self.levels] = np.arange(levels)[:, None]
        bins[self.others] = bin_of + levels
        full = np.full(levels, problem.rounds.max())
        return Schedule.from_bins(problem, bins, np.concatenate((full, rounds)))


def _start_times(problem: Problem, profile: LengthProfile, costs: StageCosts) -> IntArray:
    """Return the stage times of a ski-rental schedule from which the annealing has least to make up for."""
    tried = [
        np.asarray(ski_rental_schedule(problem, patience=patience).starts) for patience in START_PATIENCE
    ]
    return _cheapest(tried, profile, costs)


def _scattered(
    problem: Problem, profile: LengthProfile, costs: StageCosts, count: int, rng: np.random.Generator
) -> IntArray:
    """Return the best of some draws of so many stage times, most in the middle half of the time needed."""
    end = int(SCATTERED_LENGTH * problem.rounds.sum() / problem.slots)
    inner = np.sort(rng.integers(end // 4, 3 * end // 4 + 1, (DRAWS, count - 2)), axis=1)
    return _cheapest([np.concatenate(([0], each, [end])) for each in inner], profile, costs)


def _cheapest(tried: Sequence[IntArray], profile: LengthProfile, costs: StageCosts) -> IntArray:
    """Return the stage times with the least guide, the last ones if none of them serves every request."""
    best, least = tried[-1], np.inf
    for times in tried:
        price = slot_price(times, profile)
        if price is not None and (seconds := float(costs.guide(times, price.slots, KINK))) < least:
            best, least = times, seconds
    return best
