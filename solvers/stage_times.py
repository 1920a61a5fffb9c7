"""Annealing over the rounds at which prefill stages happen."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..data.cost import FloatArray, IntArray
from .slot_flow import LengthProfile, SlotPrice, slot_price, slots_at_least

LACKING, SPARE = 1.15, 0.85
"""Worth of a slot lacking and of one to spare, in shares of all rounds; the kink draws to the slots given."""

RUN, REST, FITTED = 0.45, 0.65, 0.8
"""Draws from which a run of stages, all later stages, and a stage made to fit a request are moved."""

PRICES_KEPT = 8
"""Recent slot prices that screen candidates."""

FEASIBLE_KEPT = 24
"""Cheapest stage times kept for rounding to whole slots."""

CANDIDATES = 256
"""Stage times screened at a time."""

PRICED = 6
"""Candidates of one screening that may be priced before new ones are drawn."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """
    What stages and rounds cost, and the slots there are.

    Parameters
    ----------
    stage, round
        Seconds of one more prefill stage and of one more decode round, as far as a schedule can save them.
    slots
        Slots there are.
    """

    stage: float
    round: float
    slots: int

    def seconds(self, times: IntArray) -> FloatArray:
        """Return the seconds of stages and rounds for times of shape (..., stages + 1)."""
        seconds = self.stage * (times.shape[-1] - 1) + self.round * times[..., -1]
        return np.asarray(seconds, dtype=np.float64)

    def guide(self, times: IntArray, slots: FloatArray | float) -> FloatArray:
        """Return the same with slots lacking or spare priced in rounds; ``slots`` are those needed."""
        excess = (np.asarray(slots) - self.slots) / self.slots
        worth = np.where(excess > 0, LACKING * excess, SPARE * excess)
        return np.asarray(self.seconds(times) + self.round * times[..., -1] * worth, dtype=np.float64)


class StageTimesSearch:
    """
    An annealing walk over stage times whose every step is screened by slot prices before it is solved.

    Pricing a candidate takes a linear programme. Prices made for earlier candidates bound the slots of the
    next ones from below (:func:`~batchbound.solvers.slot_flow.slots_at_least`), hundreds at a time, and
    those that the walk would refuse even at this bound are never solved.

    Parameters
    ----------
    profile
        The requests' lengths.
    costs
        What stages and rounds cost.
    times
        Where the walk starts: rounds of the stages and the end, not decreasing, shape (stages + 1,).
    rng
        Draws the candidates.

    Attributes
    ----------
    times
        Where the walk is.
    priced
        Linear programmes solved.
    """

    def __init__(
        self, profile: LengthProfile, costs: StageCosts, times: IntArray, rng: np.random.Generator
    ) -> None:
        self._profile = profile
        self._costs = costs
        self._rng = rng
        self._prices: deque[SlotPrice] = deque(maxlen=PRICES_KEPT)
        self.times = times
        self.priced = 0
        self._feasible: list[tuple[float, int, IntArray]] = []
        self._at = self._price(times)

    def _price(self, times: IntArray) -> float:
        """Return the guide at ``times`` and keep its prices."""
        self.priced += 1
        price = slot_price(times, self._profile)
        if price is None:
            return np.inf
        self._prices.append(price)
        if price.slots <= self._costs.slots + 1e-6:
            heapq.heappush(self._feasible, (-float(self._costs.seconds(times)), self.priced, times))
            if len(self._feasible) > FEASIBLE_KEPT:
                heapq.heappop(self._feasible)
        return float(self._costs.guide(times, price.slots))

    def feasible(self) -> list[IntArray]:
        """Return the cheapest times met that need no more slots than there are, cheapest first."""
        return [times for _, _, times in sorted(self._feasible, key=lambda entry: (-entry[0], entry[1]))]

    def restart(self, times: IntArray) -> None:
        """Continue the walk from other times."""
        if len(times) != len(self.times):
            self._prices.clear()
        self.times = times
        self._at = self._price(times)

    def step(self, temperature: float) -> None:
        """
        Screen one set of candidates and move to the first one accepted, if any is.

        Parameters
        ----------
        temperature
            Seconds of cost that a step typically may lose.
        """
        kind = self._rng.random()
        if kind < 0.9 or len(self.times) < 4:
            times = moved(self.times, self._profile, self._rng, CANDIDATES)
            values = np.stack([price.value for price in self._prices])[:, None, :]
            starts = np.stack([price.start for price in self._prices])[:, None, :]
        elif kind < 0.95:
            times, values, starts = self._with_one_less()
        else:
            times, values, starts = self._with_one_more()
        if not len(times):
            return
        limit = self._at + temperature * self._rng.exponential(size=len(times))
        floor = slots_at_least(times, values, starts, self._profile)
        for candidate in np.flatnonzero(self._costs.guide(times, floor) <= limit)[:PRICED]:
            chosen = times[candidate]
            if len(chosen) != len(self.times) and len(self._prices[0].value) != len(chosen):
                kept = [
                    SlotPrice(
                        np.nan, value[min(candidate, len(value) - 1)], start[min(candidate, len(start) - 1)]
                    )
                    for value, start in zip(values, starts, strict=True)
                ]
                before, self._prices = self._prices, deque(kept, maxlen=PRICES_KEPT)
                at = self._price(chosen)
                if at <= limit[candidate]:
                    self.times, self._at = chosen, at
                    return
                self._prices = before
                continue
            at = self._price(chosen)
            if at <= limit[candidate]:
                self.times, self._at = chosen, at
                return

    def _with_one_less(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return the times without each of the inner stages, and the prices without it."""
        stages = len(self.times) - 1
        out = np.arange(1, stages)
        keep = np.array([np.delete(np.arange(stages + 1), k) for k in out])
        values = np.stack([price.value[keep] for price in self._prices])
        starts = np.stack([price.start[keep[:, :-1]] for price in self._prices])
        return self.times[keep], values, starts

    def _with_one_more(self) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return the times with one stage more, and the prices with its value between its neighbours'."""
        end = int(self.times[-1])
        new = self._rng.integers(0, end + 1, CANDIDATES)
        place = np.searchsorted(self.times[1:-1], new, side="right") + 1
        column = np.arange(len(self.times) + 1)
        source = column[None, :] - (column[None, :] >= place[:, None])
        times = self.times[source]
        row = np.arange(len(new))
        times[row, place] = new
        gap = np.maximum(self.times[place] - self.times[place - 1], 1)
        share = (new - self.times[place - 1]) / gap
        values, starts = [], []
        for price in self._prices:
            value = price.value[source]
            value[row, place] = price.value[place - 1] + share * (price.value[place] - price.value[place - 1])
            values.append(value)
            starts.append(price.start[source[:, :-1]])
        return times, np.stack(values), np.stack(starts)


def moved(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """
    Return neighbours of the given stage times.

    One stage, a run of stages or all stages from one on are shifted a little, or one stage is moved to
    where its span to another one has exactly the rounds that some request needs.

    Parameters
    ----------
    times
        Rounds of the stages and the end, shape (stages + 1,).
    profile
        The requests' lengths.
    rng
        Draws the moves.
    count
        Neighbours drawn; those out of order are left out.

    Returns
    -------
    IntArray
        Shape (at most count, stages + 1).
    """
    stages = len(times) - 1
    column = np.arange(stages + 1)
    one, other = rng.integers(1, stages + 1, (2, count))
    shift = np.maximum(1, np.rint(np.exp(rng.normal(0.9, 1.0, count)))).astype(np.int64)
    shift *= rng.choice([-1, 1], count)
    kind = rng.random(count)
    low = np.where(kind < RUN, one, np.minimum(one, other))
    high = np.select([kind < RUN, kind < REST], [one, np.maximum(one, other)], stages)
    neighbours = times + np.where((column >= low[:, None]) & (column <= high[:, None]), shift[:, None], 0)
    fitted = np.flatnonzero((kind >= FITTED) & (one < stages))
    anchor = times[rng.integers(0, stages + 1, len(fitted))]
    wanted = np.searchsorted(profile.at_most, rng.integers(0, profile.requests, len(fitted)), side="right")
    neighbours[fitted] = times
    neighbours[fitted, one[fitted]] = anchor + wanted * rng.choice([-1, 1], len(fitted))
    neighbours[fitted] = np.sort(neighbours[fitted], axis=1)
    valid = (np.diff(neighbours, axis=1) >= 0).all(axis=1) & (neighbours[:, 0] == 0)
    return neighbours[valid]
