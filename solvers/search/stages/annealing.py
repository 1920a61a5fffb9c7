"""Annealing over the times of prefill stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np

from ....data.arrays import IntArray
from ....data.problem import Problem
from ..constructive import ski_rental_schedule
from .initial_times import initial_times
from .level_split import LevelSplit
from .slot_price import slot_price
from .spans import LengthProfile, Spans
from .times import StageCosts, StageTimesSearch


class StageAnnealing:
    """Walk over stage times that cools down once.

    rng: Draws the moves.
    split: The problem's full levels and the rest, whose stage times are annealed.
    start: Initial stage times of the rest.
    """

    def __init__(
        self,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        split: LevelSplit,
        profile: LengthProfile,
        start: IntArray,
    ) -> None:
        self._costs, self._values = costs, costs.values
        self._few = len(problem) <= self._values.few_requests
        self._hot, self._steps = self._values.hot if self._few else self._values.cold, 0
        self.split, self.profile = split, profile
        self.walk = StageTimesSearch(profile, costs, start, rng)

    @classmethod
    def of(
        cls,
        problem: Problem,
        costs: StageCosts,
        rng: np.random.Generator,
        late: Callable[[], bool],
        most_spans: tuple[int, int],
    ) -> StageAnnealing | None:
        """Begin from the cheapest of several starts; None without one.

        late: Returns True if no further start may be tried.
        """
        split = LevelSplit.of(problem)
        profile = LengthProfile.of(split.rest.decode_steps)
        about, widest = most_spans
        spread = initial_times(profile, costs, rng, about)
        most = min(widest, about + about // 2), widest
        start = _start_times(split.rest, profile, costs, spread, late, most)
        return None if start is None else cls(problem, costs, rng, split, profile, start)

    def step(self, done: float, late: Callable[[], bool]) -> None:
        """Take a step of the walk.

        done: Share of the annealing that is over, 0 to 1.
        late: Returns True if the step has to end at once.
        """
        self._steps += 1
        values = self._values
        if self._steps == values.timed_steps and not self._few:
            expected = values.timed_steps / max(done, 1e-9)
            self._hot = min(values.hot, max(values.cold, values.hot * expected / values.long_walk))
        temperature = self._hot * (values.cold / self._hot) ** min(1.0, done)
        self.walk.step(self._costs.dearest * temperature, values.kink, late)


def _start_times(
    problem: Problem,
    profile: LengthProfile,
    costs: StageCosts,
    spread: Iterator[IntArray],
    late: Callable[[], bool],
    most_spans: tuple[int, int],
) -> IntArray | None:
    """Return the cheapest stage times, scaled to the slots; None without any."""
    constructed: list[IntArray] = []
    for patience in costs.values.start_patiences:
        if late() and constructed:
            break
        constructed.append(np.asarray(ski_rental_schedule(problem, patience=patience).starts))
    pairs = zip_longest(islice(spread, costs.values.start_numbers), constructed)
    tried = [times for pair in pairs for times in pair if times is not None]
    sizes = [Spans.number_between(times, profile) for times in tried]
    # Constructed stages may have many more spans than spread ones, and take as much longer to price.
    few = [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[0]]
    priceable = few or [times for times, size in zip(tried, sizes, strict=True) if size <= most_spans[1]]
    if not priceable:
        return None
    best = _cheapest(priceable, profile, costs, late)
    price = slot_price(best, profile)
    if price is None:
        return best
    # As long as the given slots need: the walk then has no lack of slots to make up for first.
    end = max(profile.longest, math.ceil(best[-1] * price.slots / costs.slots * costs.values.start_scale))
    scaled: IntArray = np.rint(best * (end / best[-1])).astype(np.int64)
    return scaled


def _cheapest(
    tried: Sequence[IntArray], profile: LengthProfile, costs: StageCosts, late: Callable[[], bool]
) -> IntArray:
    """Return the stage times of least penalised cost."""
    best, least = tried[-1], np.inf
    for times in tried:
        price = slot_price(times, profile)
        if (
            price is not None
            and (seconds := float(costs.guide(times, price.slots, costs.values.kink))) < least
        ):
            best, least = times, seconds
        if late():
            break
    return best
