"""Annealing walk over the times of prefill stages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ....data.problem import Problem
from .parameters import STANDARD, StageTimeParameters
from .slot_price import SlotPrice, slot_price, slots_at_least
from .spans import LengthProfile, Spans


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of stages and decode steps, and the slots."""

    stage: float
    """Seconds of one more prefill stage."""
    decode_step: float
    """Seconds of one more decode step."""
    slots: int
    least: int = 0
    """Decode steps of the longest request."""
    lift: float = 0.0
    """Excess of a stage's least cost over its base, in seconds."""
    tokens: float = 0.0
    """Seconds of all prompt tokens, which count in that least cost."""
    values: StageTimeParameters = STANDARD

    @classmethod
    def of(cls, problem: Problem, values: StageTimeParameters = STANDARD) -> StageCosts:
        """Return a problem's costs, without the bend."""
        cost = problem.cost
        return cls(
            cost.prefill_base,
            cost.decode_base,
            problem.slots,
            int(problem.decode_steps.max()),
            max(0.0, cost.prefill_floor - cost.prefill_base),
            cost.prefill_per_token * float(problem.prompt_tokens.sum()),
            values,
        )

    @property
    def dearest(self) -> float:
        """Seconds of a stage with few tokens."""
        return self.stage + self.lift

    def seconds(self, times: IntArray) -> FloatArray:
        """Return the seconds of stage times of shape (..., stages + 1)."""
        stages = times.shape[-1] - 1
        lifted = np.maximum(
            0.0, self.lift * stages - self.tokens * np.array(self.values.uneven_stages)
        ).mean()
        seconds = self.stage * stages + lifted + self.decode_step * times[..., -1]
        return np.asarray(seconds, dtype=np.float64)

    def slots_within(self, times: IntArray, limit: float, kink: float) -> float:
        """Return the slots at which the guide reaches ``limit``.

        times: Shape (stages + 1,).
        """
        end = int(times[-1])
        worth = (limit - float(self.seconds(times))) / self.decode_step
        if worth > 0:
            excess = worth / (1.0 + kink)
        else:
            spare, largest = -worth / (1.0 - kink), max(end - self.least, 0)
            excess = -(spare if spare <= largest else largest + (spare - largest) / self.values.idle_worth)
        return self.slots * (1.0 + excess / max(end, 1))

    def guide(self, times: IntArray, slots: FloatArray | float, kink: float) -> FloatArray:
        """Return the seconds, with a penalty for missing and spare slots.

        times: Shape (..., stages + 1).
        slots: Slots needed, shape (...).
        kink: Extra price of a missing slot, and discount of a spare one, as a share of all decode steps, 0 to
            1; larger keeps the walk near the given number of slots.
        """
        # At least one step, so that infinitely many slots have an infinite price.
        end = times[..., -1]
        excess = (np.asarray(slots) - self.slots) / self.slots * np.maximum(end, 1)
        spare = np.maximum(-excess, 0.0)
        saved = np.minimum(spare, np.maximum(end - self.least, 0))
        less = (kink - 1.0) * (saved + self.values.idle_worth * (spare - saved))
        worth = np.where(excess > 0, (1.0 + kink) * excess, less)
        return np.asarray(self.seconds(times) + self.decode_step * worth, dtype=np.float64)


class StageTimesSearch:
    """Annealing walk that screens stage times before it prices them.

    Pricing a candidate takes a linear programme. Prices made for earlier candidates bound the slots of the
    next ones (:func:`~batchbound.solvers.search.stages.slot_price.slots_at_least`). Candidates that the walk
    would refuse even at this bound are never priced.

    times: Present stage times: decode steps of the stages and the end, not decreasing, shape (stages + 1,).
    rng: Draws the candidates.
    slots: Slots needed there, infinite if no number is enough.
    priced: Number of linear programmes solved.
    """

    def __init__(
        self, profile: LengthProfile, costs: StageCosts, times: IntArray, rng: np.random.Generator
    ) -> None:
        self._profile, self._costs, self._rng = profile, costs, rng
        self._params = costs.values
        self._feasible: list[tuple[float, int, IntArray]] = []
        self.priced = 0
        self.times = times
        price = self._price(times)
        self.slots = np.inf if price is None else price.slots
        self._values = np.empty((0, len(times))) if price is None else price.value[None]
        """Prices made for recent stage times, the oldest first, shape (prices, stages + 1)."""

    def feasible(self) -> list[IntArray]:
        """Return the cheapest stage times within the slots, cheapest first."""
        by_cost = sorted(self._feasible, key=lambda entry: (-entry[0], entry[1]))
        return list({times.tobytes(): times for _, _, times in by_cost}.values())

    def step(self, temperature: float, kink: float, out_of_time: Callable[[], bool] = lambda: False) -> None:
        """Move to the first candidate that is accepted, if any.

        temperature: Seconds of cost that a step typically may lose.
        kink: As for :meth:`StageCosts.guide`.
        out_of_time: Asked before every linear programme.
        """
        neighbours = self._neighbours()
        times = neighbours.times
        at = float(self._costs.guide(self.times, self.slots, kink))
        limit = at + temperature * self._rng.exponential(size=len(times))
        priced = 0
        for begin in range(0, len(times), self._params.screened):
            alive = np.arange(begin, min(begin + self._params.screened, len(times)))
            alive = self._passing(neighbours.times, neighbours.values, alive, limit, kink)
            while len(alive) and priced < self._params.priced and not out_of_time():
                chosen, alive = alive[0], alive[1:]
                priced += 1
                largest = self._costs.slots_within(times[chosen], limit[chosen], kink)
                price = self._price(times[chosen], largest)
                if price is None:
                    continue
                neighbours = neighbours.with_price(price, self._params.prices_kept)
                if price.slots <= largest:
                    self.times, self.slots = times[chosen], price.slots
                    self._values = neighbours.of(chosen)
                    return
                alive = self._passing(times, price.value[None, None], alive, limit, kink)
        if times.shape[1] == len(self.times):
            self._values = neighbours.of(0)

    def _price(self, times: IntArray, most: float = np.inf) -> SlotPrice | None:
        """Return the price of stage times; keep those with enough slots.

        Prices that prove more than ``most`` slots, and more than there are, are not improved further.
        """
        self.priced += 1
        price = slot_price(times, self._profile, max(most, self._costs.slots + 1e-3))
        if price is not None and price.slots <= self._costs.slots + 1e-6:
            heapq.heappush(self._feasible, (-float(self._costs.seconds(times)), self.priced, times))
            if len(self._feasible) > self._params.feasible_kept:
                heapq.heappop(self._feasible)
        return price

    def _passing(
        self, times: IntArray, values: FloatArray, alive: IntArray, limit: FloatArray, kink: float
    ) -> IntArray:
        """Return the candidates that the prices do not rule out."""
        if not len(alive):
            return alive
        if values.shape[1] > 1:
            values = values[:, alive]
        floor = slots_at_least(times[alive], values, self._profile)
        return alive[self._costs.guide(times[alive], floor, kink) <= limit[alive]]

    def _neighbours(self) -> _Neighbours:
        kind = self._rng.random()
        if kind < self._params.resize_moves / 2 and len(self.times) > 3:
            return self._with_one_less()
        if kind < self._params.resize_moves:
            return self._with_one_more()
        times = moved(self.times, self._profile, self._rng, self._params.candidates, self._params)
        return _Neighbours(times, self._values[:, None, :])

    def _with_one_less(self) -> _Neighbours:
        """Return the times without each inner stage, with their prices."""
        stages = len(self.times) - 1
        keep = np.array([np.delete(np.arange(stages + 1), k) for k in self._rng.permutation(stages - 1) + 1])
        return _Neighbours(self.times[keep], self._values[:, keep])

    def _with_one_more(self) -> _Neighbours:
        """Return the times with one more stage, with their prices."""
        new = self._rng.integers(0, int(self.times[-1]) + 1, self._params.candidates)
        place = np.searchsorted(self.times[1:-1], new, side="right") + 1
        column = np.arange(len(self.times) + 1)
        source = column - (column >= place[:, None])
        times = self.times[source]
        row = np.arange(len(new))
        times[row, place] = new
        before, after = self.times[place - 1], self.times[place]
        share = (new - before) / np.maximum(after - before, 1)
        values = self._values[:, source]
        low, high = self._values[:, place - 1], self._values[:, place]
        values[:, row, place] = low + share * (high - low)
        return _Neighbours(times, values)


@dataclass(frozen=True, slots=True, eq=False)
class _Neighbours:
    """Candidates (candidates, stages + 1) with prices.

    Prices have shape (prices, candidates or 1, stages + 1).
    """

    times: IntArray
    values: FloatArray

    def with_price(self, price: SlotPrice, kept: int) -> _Neighbours:
        """Add the price of a refused candidate, which holds for all."""
        value = np.broadcast_to(price.value, (1, *self.values.shape[1:]))
        return _Neighbours(self.times, np.concatenate((self.values[-kept + 1 :], value)))

    def of(self, candidate: int) -> FloatArray:
        """Return a candidate's prices, shape (prices, stages + 1)."""
        return self.values[:, min(candidate, self.values.shape[1] - 1)]


def moved(
    times: IntArray,
    profile: LengthProfile,
    rng: np.random.Generator,
    count: int,
    values: StageTimeParameters = STANDARD,
) -> IntArray:
    """Return neighbours of stage times, shape (at most count, stages + 1).

    Most stretch or shrink one span to the decode steps of a request a little longer or shorter, since nothing
    changes between these. The others shift one stage, a run of stages or all stages from one on a little.

    times: Decode steps of the stages and the end, shape (stages + 1,).
    count: Neighbours to draw; those out of order are left out.
    """
    stretched = int(values.stretch_moves * count)
    shifted = _shifted(times, rng, count - stretched, values)
    neighbours = np.concatenate((shifted, _stretched(times, profile, rng, stretched)))
    valid = (np.diff(neighbours, axis=1) >= 0).all(axis=1) & (neighbours[:, 0] == 0)
    chosen: IntArray = rng.permutation(neighbours[valid])
    return chosen


def _shifted(times: IntArray, rng: np.random.Generator, count: int, values: StageTimeParameters) -> IntArray:
    """Shift some stages by a few steps, shape (count, stages + 1)."""
    stages = len(times) - 1
    first, second = rng.integers(1, stages + 1, (2, count))
    shift = np.maximum(1, np.rint(np.exp(rng.normal(0.9, 1.0, count)))).astype(np.int64)
    shift *= rng.choice([-1, 1], count)
    kind = rng.random(count)
    low = np.where(kind < values.run_moves, first, np.minimum(first, second))
    high = np.select(
        [kind < values.run_moves, kind < values.rest_moves], [first, np.maximum(first, second)], stages
    )
    return _with_shift(times, low, high, shift)


def _stretched(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """Fit one span to a slightly longer or shorter request."""
    stages = len(times) - 1
    spans = Spans.between(times, profile)
    lengths = np.flatnonzero(np.diff(profile.at_most, prepend=0))
    if not len(spans):
        return np.empty((0, stages + 1), dtype=np.int64)
    span = rng.integers(0, len(spans), count)
    first, last = spans.first[span], spans.last[span]
    decode_steps = times[last] - times[first]
    rank = np.searchsorted(lengths, decode_steps, side="right") - 1
    slack = decode_steps > lengths[rank]
    steps = rng.geometric(0.5, count)
    wanted = np.where(rng.random(count) < 0.5, rank + steps, rank - steps + slack)
    shift = lengths[np.clip(wanted, 0, len(lengths) - 1)] - decode_steps
    # What moves: the closing stage, all from it on, the opening stage, all between them, or a run.
    kind = rng.integers(0, 5, count)
    until = np.maximum(last, rng.integers(1, stages + 1, count))
    low = np.choose(kind, [last, last, np.maximum(first, 1), first + 1, last])
    high = np.choose(kind, [last, np.full(count, stages), first, last, until])
    return _with_shift(times, low, high, np.where(kind == 2, -shift, shift))


def _with_shift(times: IntArray, low: IntArray, high: IntArray, shift: IntArray) -> IntArray:
    """Shift stages ``low`` to ``high``, shape (shifts, stages + 1)."""
    column = np.arange(len(times))
    shifted: IntArray = times + np.where(
        (column >= low[:, None]) & (column <= high[:, None]), shift[:, None], 0
    )
    return shifted
