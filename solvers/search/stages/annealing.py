"""The annealing over stage times: where it starts, how it cools, and where it starts again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np

from ....data.costs.cost import IntArray
from ....data.problem import Problem
from ..constructive import ski_rental_schedule
from .level_split import LevelSplit
from .rough_times import rough_times
from .slot_flow import LengthProfile, Spans
from .slot_price import slot_price
from .spread import spread_times
from .times import StageCosts, StageTimesSearch

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
"""The share of the time in which cycles begin from the starts; later ones go on from the best times met."""

TIMED = 4
"""Steps after which the annealing judges how many there will be."""

START_PATIENCE = (8.0, 4.0, 2.0, 1.0, 0.5)
"""Settings of the ski-rental rule whose stage times the annealing may start from."""

SPREAD = 5
"""Numbers of stages spread unevenly that the annealing may start from."""

ENOUGH = 1.001
"""Times of the rounds that stages need by their price: lengths are whole, and so not scaled like times."""

FEW = 40
"""Requests of a small problem: cycles are short and hot, and its search tries orders of the requests too."""

MANY = 500
"""Requests from which on how their lengths are rounded up says which stage times need few slots."""


@dataclass(frozen=True, slots=True)
class Cooling:
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
    def in_cycles(cls, steps: float, few: bool) -> Cooling:
        """Return that of an annealing of so many steps, of few requests or of many."""
        cycles = max(1, round(steps / (SHORT_CYCLE if few else CYCLE)))
        hot = HOT if few else min(HOT, max(COLD, HOT * steps / LONG))
        return cls(hot, ends=tuple(np.linspace(0.0, 1.0, cycles + 1)[1:].tolist()))

    @classmethod
    def with_trials(cls, steps: float) -> Cooling:
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


class StageAnnealing:
    """
    A walk over the stage times of a problem that cools, begins again, and at last goes on from its best.

    Where there are many steps for each stage, a problem with full levels is annealed from the best of some
    short annealings, each from stages scattered at random. How many steps there will be is judged after some.

    Parameters
    ----------
    rng
        Draws the moves.
    split
        The problem's full levels and the rest, whose stage times are annealed.
    starts
        Stage times of the rest: where the walk begins, and where its next cycles may.
    lacking
        Whether slots that the start lacks are to be made up for before all else.

    Attributes
    ----------
    split, profile
        As given, until more of the problem is annealed.
    """

    def __init__(
        self,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        split: LevelSplit,
        profile: LengthProfile,
        starts: Sequence[IntArray],
        *,
        lacking: bool = False,
    ) -> None:
        self._problem, self._costs, self._rng = problem, costs, rng
        self._few = len(problem) <= FEW
        self._cooling, self._cycle, self._steps = Cooling(HOT if self._few else COLD), 0, 0
        self._scattered, self._lacking = False, lacking
        self._tried: list[tuple[float, IntArray]] = []
        self.split, self.profile, self._starts = split, profile, starts
        by_lengths = len(problem) >= MANY
        self.walk = StageTimesSearch(profile, costs, starts[0], rng, by_lengths=by_lengths)

    @classmethod
    def of(
        cls,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        late: Callable[[], bool],
        most_spans: tuple[int, int],
    ) -> StageAnnealing | None:
        """
        Return an annealing from the best stages of some, or None if all have too many to be priced.

        Parameters
        ----------
        problem, costs, rng
            As of the class.
        late
            Whether no further start is to be tried.
        most_spans
            Spans between stages that are spread unevenly, about, and those of any start at most.
        """
        split = LevelSplit.of(problem)
        profile = LengthProfile.of(split.rest.rounds, _starts_per_stage(problem))
        about, widest = most_spans
        spread = spread_times(profile, costs, rng, about)
        most = min(widest, about + about // 2), widest
        rough = rough_times(profile, costs, rng, late) if profile.starts_per_stage is None else []
        start = _start_times(split.rest, profile, costs, rough, spread, late, most)
        if start is None:
            return None
        starts = [start, *(each for each in rough if each is not start)]
        return cls(problem, costs, rng, split, profile, starts, lacking=any(start is each for each in rough))

    def step(self, done: float, late: Callable[[], bool]) -> None:
        """
        Do a step of the walk.

        Parameters
        ----------
        done
            The share of the annealing that is over, 0 to 1.
        late
            Whether the step has to end as it is.
        """
        self._steps += 1
        if self._steps == TIMED:
            self._judge(TIMED / max(done, 1e-9))
        if self._cooling.over(done, self._cycle):
            self._cycle += 1
            self.walk.restart(self._again(done))
        temperature, kink = self._cooling.at(done, self._cycle)
        self._lacking = self._lacking and not self.walk.feasible()
        self.walk.step(self._costs.dearest * temperature, TIGHT if self._lacking else kink, late)

    def _judge(self, steps: float) -> None:
        """Choose how to anneal in so many steps."""
        levels, few = len(self.split.levels), self._few
        self._scattered = steps >= SCATTERED * len(self._starts[0]) and levels > 0 and not few
        if not self._scattered:
            self._cooling = Cooling.in_cycles(steps, few)
            return
        self._cooling = Cooling.with_trials(steps)
        self.split = LevelSplit.of(self._problem, spare=1)
        self.profile = LengthProfile.of(self.split.rest.rounds)
        self._starts = [self._scatter()]
        many = len(self._problem) >= MANY
        self.walk = StageTimesSearch(self.profile, self._costs, self._starts[0], self._rng, by_lengths=many)

    def _again(self, done: float) -> IntArray:
        """Return the stage times from which the next cycle begins."""
        walk = self.walk
        if self._scattered:
            self._tried.append((float(self._costs.guide(walk.times, walk.slots, TIGHT)), walk.times))
            return self._scatter() if self._cycle < TRIALS else min(self._tried, key=lambda each: each[0])[1]
        if done <= FRESH:
            return self._starts[self._cycle % len(self._starts)]
        return next(iter(walk.feasible()), walk.times)

    def _scatter(self) -> IntArray:
        """Return the best of some draws of stage times, most in the middle half of the time needed."""
        problem, count = self.split.rest, len(self._starts[0])
        end = int(SCATTERED_LENGTH * problem.rounds.sum() / problem.slots)
        inner = np.sort(self._rng.integers(end // 4, 3 * end // 4 + 1, (DRAWS, count - 2)), axis=1)
        drawn = [np.concatenate(([0], each, [end])) for each in inner]
        return _cheapest(drawn, self.profile, self._costs, lambda: False)


def _starts_per_stage(problem: Problem) -> float | None:
    """Return how many requests a stage starts at most, by its token cap."""
    cap = problem.prefill_token_cap
    return None if cap is None else float(max(1, int(cap / problem.prompt_tokens.mean())))


def _start_times(
    problem: Problem,
    profile: LengthProfile,
    costs: StageCosts,
    rough: list[IntArray],
    spread: Iterator[IntArray],
    late: Callable[[], bool],
    most_spans: tuple[int, int],
) -> IntArray | None:
    """Return the stage times from which there is least to make up for, or None if all have too many."""
    constructed: list[IntArray] = []
    for patience in START_PATIENCE:
        if late() and constructed:
            break
        constructed.append(np.asarray(ski_rental_schedule(problem, patience=patience).starts))
    capped = profile.starts_per_stage is not None
    some = islice(spread, 0 if capped else SPREAD)
    pairs = zip_longest(some, constructed)
    tried = [*rough, *(times for pair in pairs for times in pair if times is not None)]
    sizes = [Spans.number_between(times, profile) for times in tried]
    # Those of a construction may have many more spans than the ones spread, and take as much longer.
    few = [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[0] and not capped]
    priceable = few or [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[1]]
    if not priceable:
        return None
    best = _cheapest(priceable, profile, costs, late)
    price = None if capped or any(best is each for each in rough) else slot_price(best, profile)
    if price is None:
        return best
    # As long as the slots given need: what is lacking of them, or to spare, is made up for at once.
    end = max(profile.longest, math.ceil(best[-1] * price.slots / costs.slots * ENOUGH))
    scaled: IntArray = np.rint(best * (end / best[-1])).astype(np.int64)
    return scaled


def _cheapest(
    tried: Sequence[IntArray], profile: LengthProfile, costs: StageCosts, late: Callable[[], bool]
) -> IntArray:
    """Return the stage times with the least guide, the last ones if none of them serves every request."""
    best, least = tried[-1], np.inf
    for times in tried:
        price = slot_price(times, profile)
        if price is not None and (seconds := float(costs.guide(times, price.slots, KINK))) < least:
            best, least = times, seconds
        if late():
            break
    return best
