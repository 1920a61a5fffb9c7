"""Stage times that an annealing may start from: many annealed at once by a bound on the slots they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....data.costs.cost import FloatArray, IntArray
from .slot_flow import LengthProfile, Spans
from .slot_price import SlotPrice, slot_price, slots_at_least
from .times import StageCosts

WALKS = 64
"""Walks at once: each step of all costs little more than of one."""

BRIEF, FULL = 30, 200
"""Steps by which numbers of stages are compared, and those of the best: with more, the bound misleads."""

RATIO = 1.25
"""Ratio of neighbouring numbers of stages that are compared."""

WORSE = 3
"""Numbers of stages one after the other that are no better, after which no more are compared."""

MOST_SPANS = 60
"""Spans between stages up to which this is tried: with more, a walk priced step by step is as good sooner."""

ROUNDS, PRICED, BETWEEN, WARM = 10, 3, 20, 0.002
"""
How often slots needed are found, of how many stage times, the steps between, and their temperature.

Prices that come of it join the bound, which is then right there and nearly so beside.
"""

KEPT = 8
"""Stage times that are handed out."""

PASSED = np.array([0.0, 0.1, 0.4])
"""What a slot's time is worth for passing a stage, in times of the mean interval, in each of the prices."""

KINK = 0.9
"""As of :meth:`StageCosts.guide`."""

HOT, LEAST_HOT, COOLED = 0.01, 2.0, 0.02
"""Temperature at first, as a share of all rounds and in rounds, and what is left of it at the end."""

THINNED = 50
"""Steps after which the better half of the walks takes the place of the other."""

UNEVEN = 0.5
"""How far a stage is from its place among evenly spread ones at first, in their distances."""

FITTED, ALONE, LATER = 0.4, 0.45, 0.7
"""Draws up to which a span is fitted to a length, one stage is moved, and all later stages are."""

ROW = 3
"""Most intervals in a row of a span that is fitted."""


def rough_times(
    profile: LengthProfile, costs: StageCosts, rng: np.random.Generator, late: Callable[[], bool]
) -> list[IntArray]:
    """
    Return stage times that need few slots by a bound, of the most promising numbers of stages.

    Any prices of a slot's time bound the slots that stage times need
    (:func:`~batchbound.solvers.search.stages.slot_price.slots_at_least`). Where each round is worth as much,
    and each stage passed a little beside, that bound comes within some per cent of the linear programme for a
    hundredth of its time. The best are priced, and annealed on with these prices in the bound. Where many
    stages are better there are none.

    Parameters
    ----------
    profile
        The requests' lengths; starts a stage are not limited.
    costs
        What a stage and a round cost, and the slots.
    rng
        Draws times and moves.
    late
        Whether to end with what there is.
    """
    annealing = _Annealing(profile, costs, rng, late)
    by_stages: dict[int, _Walks] = {}
    for stages in _numbers(profile, costs):
        walks = annealing.drawn(stages)
        if Spans.number_between(walks.times[0], profile) > MOST_SPANS or late():
            break
        by_stages[stages] = annealing.annealed(walks, BRIEF)
        best = min(by_stages, key=lambda each: by_stages[each].least)
        if len([each for each in by_stages if each > best]) >= WORSE:
            break
    best = min(by_stages, key=lambda each: by_stages[each].least, default=0)
    if best == max(by_stages, default=0):
        # More stages than are compared here may be better.
        return []
    found: list[tuple[float, IntArray]] = []
    for stages in (best, best + 1, best - 1):
        if late() or stages < min(by_stages):
            break
        walks = by_stages.get(stages) or annealing.drawn(stages)
        found += annealing.priced(annealing.annealed(walks, FULL))
    return [times for _, times in sorted(found, key=lambda each: each[0])[:KEPT]]


def _numbers(profile: LengthProfile, costs: StageCosts) -> list[int]:
    """Return the numbers of stages to compare, from the fewest that the slots allow."""
    numbers = [max(1, -(-profile.requests // costs.slots))]
    while (more := max(numbers[-1] + 1, round(RATIO * numbers[-1]))) <= profile.requests:
        numbers.append(more)
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Walks:
    """Stage times of many walks, shape (walks, stages + 1), and what each is worth by the bound."""

    times: IntArray
    guide: FloatArray

    @property
    def least(self) -> float:
        """The best guide."""
        return float(self.guide.min())

    def best(self, count: int) -> list[IntArray]:
        """Return the best stage times, each once."""
        order = np.argsort(self.guide, kind="stable")
        return list({self.times[k].tobytes(): self.times[k] for k in order}.values())[:count]


class _Annealing:
    """Walks over the stage times of a problem; parameters are those of :func:`rough_times`."""

    def __init__(
        self, profile: LengthProfile, costs: StageCosts, rng: np.random.Generator, late: Callable[[], bool]
    ) -> None:
        self._profile, self._costs, self._rng, self._late = profile, costs, rng, late
        self._lengths = np.flatnonzero(np.diff(profile.at_most, prepend=0))
        worked = int(np.diff(profile.at_most, prepend=0) @ np.arange(profile.longest + 1))
        self._end = max(profile.longest, -(-worked // costs.slots))
        self._values = np.zeros((0, 0))

    def priced(self, walks: _Walks) -> list[tuple[float, IntArray]]:
        """Return what stage times are worth by the slots they need, whose prices bound the next ones'."""
        found: dict[bytes, tuple[float, IntArray]] = {}
        near: SlotPrice | None = None
        self._values = np.zeros((0, walks.times.shape[1]))
        for _ in range(ROUNDS):
            new = [times for times in walks.best(PRICED + len(found)) if times.tobytes() not in found]
            for times in new[:PRICED]:
                near = slot_price(times, self._profile, near)
                if near is not None:
                    worth = float(self._costs.guide(times, near.slots, KINK))
                    found[times.tobytes()] = worth, times
                    self._values = np.concatenate((self._values, near.value[None]))
            if self._late() or not new:
                break
            walks = self.annealed(_Walks(walks.times, self._guide(walks.times)), BETWEEN, WARM)
        self._values = np.zeros((0, 0))
        return list(found.values())

    def drawn(self, stages: int) -> _Walks:
        """Return stages spread unevenly over the rounds needed."""
        shift = self._rng.uniform(-UNEVEN, UNEVEN, (WALKS, stages - 1))
        times = np.zeros((WALKS, stages + 1), dtype=np.int64)
        times[:, 1:-1] = np.sort(np.rint((np.arange(1, stages) + shift) / stages * self._end), axis=1)
        times[:, -1] = self._end
        return _Walks(times, self._guide(times))

    def annealed(self, walks: _Walks, steps: int, hot: float = HOT) -> _Walks:
        """Return the walks after some steps."""
        times, guide = walks.times.copy(), walks.guide.copy()
        hot = self._costs.round * hot * max(LEAST_HOT / HOT, self._end)
        best, least = times[guide.argmin()].copy(), guide.min()
        for step in range(steps):
            if self._late():
                break
            changed = self._moved(times)
            worth = self._guide(changed)
            taken = worth < guide + hot * COOLED ** (step / steps) * self._rng.exponential(size=WALKS)
            times[taken], guide[taken] = changed[taken], worth[taken]
            if guide.min() < least:
                best, least = times[guide.argmin()].copy(), guide.min()
            if step % THINNED == THINNED - 1:
                better, worse = np.split(np.argsort(guide, kind="stable"), 2)
                times[worse], guide[worse] = times[better], guide[better]
        worst = guide.argmax()
        times[worst], guide[worst] = best, least
        return _Walks(times, guide)

    def _guide(self, times: IntArray) -> FloatArray:
        """Return what stage times cost, slots that they need by the bound at a price."""
        stages = times.shape[1] - 1
        passed = PASSED[:, None, None] * (times[:, -1:] / stages) * np.arange(stages + 1)
        values = (times + passed) / (times + passed)[:, :, -1:]
        if len(self._values):
            kept = np.broadcast_to(self._values[:, None], (len(self._values), *times.shape))
            values = np.concatenate((values, kept))
        slots = slots_at_least(times, values, np.zeros((len(values), 1, stages)), self._profile)
        return self._costs.guide(times, slots, KINK)

    def _moved(self, times: IntArray) -> IntArray:
        """Return the times of each walk with a stage, all later ones or some in a row moved, if in order."""
        rng, stages, row = self._rng, times.shape[1] - 1, np.arange(WALKS)
        first, other = rng.integers(1, stages + 1, (2, WALKS))
        kind = rng.random(WALKS)
        last = np.select([kind < ALONE, kind < LATER], [first, stages], np.maximum(first, other))
        shift = np.maximum(1, np.rint(np.exp(rng.normal(0.9, 1.0, WALKS)))).astype(np.int64)
        shift *= rng.choice([-1, 1], WALKS)
        # A span as long as a request a little longer or shorter than it holds.
        opens = rng.integers(0, stages, WALKS)
        closes = np.minimum(stages, opens + rng.integers(1, ROW + 1, WALKS))
        rounds = times[row, closes] - times[row, opens]
        near = np.searchsorted(self._lengths, rounds) + rng.integers(-2, 3, WALKS)
        wanted = self._lengths[np.clip(near, 0, len(self._lengths) - 1)]
        fitted = rng.random(WALKS) < FITTED
        shift = np.where(fitted, wanted - rounds, shift)
        first = np.where(fitted, closes, first)
        last = np.where(fitted, np.where(rng.random(WALKS) < 0.5, closes, stages), last)
        column = np.arange(stages + 1)
        moved = times + np.where((column >= first[:, None]) & (column <= last[:, None]), shift[:, None], 0)
        fits = (np.diff(moved, axis=1) >= 0).all(axis=1) & (moved[:, -1] >= self._end)
        return np.where(fits[:, None], moved, times)
