"""Annealing over the rounds at which prefill stages happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....data.costs.cost import FloatArray, IntArray
from ....data.problem import Problem
from .slot_flow import LengthProfile, Spans
from .slot_price import SlotPrice, slot_price, slots_at_least, slots_by_lengths

RUN, REST, FITTED = 0.45, 0.65, 0.8
"""Draws from which a run of stages, all later stages, and a stage made to fit a request are moved."""

STRETCHED = 0.7
"""Share of the moves that stretch or shrink one span to the rounds of the next requests."""

PRICES_KEPT = 24
"""Slot prices that screen candidates."""

RESIZED = 0.25
"""Share of the steps that try one stage more or less."""

FEASIBLE_KEPT = 24
"""Cheapest stage times kept for rounding to whole slots."""

CANDIDATES, SCREENED = 96, 8
"""Stage times drawn at a time, and those of them screened at a time: mostly an early one is accepted."""

GENEROUS = 2.0
"""Temperature at which lengths alone refuse candidates, in times of the walk's own."""

IDLE = 0.05
"""What a slot to spare is worth where no round can be saved for it, as a share of its rounds."""

UNEVEN = np.array([0.3, 0.6, 0.9, 1.2, 2.0])
"""Prompt tokens of a stage, in times of the mean stage: a few stages are far from it."""

PRICED = 6
"""Candidates of one draw that may be priced before new ones are drawn."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """
    What stages and rounds cost, and the slots there are.

    Parameters
    ----------
    stage, round
        Seconds of one more prefill stage and of one more decode step, as far as a schedule can save them.
    slots
        Slots there are.
    least
        Rounds that no schedule is shorter than: those of the longest request.
    lift
        Seconds by which the least of a stage is above its base: what a stage of few prompt tokens costs more.
    tokens
        Seconds of all prompt tokens, which count towards that least.
    """

    stage: float
    round: float
    slots: int
    least: int = 0
    lift: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of(cls, problem: Problem) -> StageCosts:
        """Return those of a problem; a bend is left out of account."""
        cost = problem.cost
        return cls(
            cost.prefill_base,
            cost.decode_base,
            problem.slots,
            int(problem.rounds.max()),
            max(0.0, cost.prefill_floor - cost.prefill_base),
            cost.prefill_per_token * float(problem.prompt_tokens.sum()),
        )

    @property
    def dearest(self) -> float:
        """Seconds of a stage that hardly prefills a token."""
        return self.stage + self.lift

    def seconds(self, times: IntArray) -> FloatArray:
        """Return the seconds of stages and rounds for times of shape (..., stages + 1)."""
        stages = times.shape[-1] - 1
        lifted = np.maximum(0.0, self.lift * stages - self.tokens * UNEVEN).mean()
        seconds = self.stage * stages + lifted + self.round * times[..., -1]
        return np.asarray(seconds, dtype=np.float64)

    def guide(self, times: IntArray, slots: FloatArray | float, kink: float) -> FloatArray:
        """
        Return the same with slots lacking or to spare priced in rounds.

        Parameters
        ----------
        times
            Shape (..., stages + 1).
        slots
            The slots needed, shape (...).
        kink
            How much more than its share of all rounds a slot lacking costs, and how much less one to spare is
            worth, as a share of that, 0 to 1: what draws to the slots given.
        """
        # At least one round, so that no slots will do at a price without end, and not at one of nothing.
        end = times[..., -1]
        excess = (np.asarray(slots) - self.slots) / self.slots * np.maximum(end, 1)
        spare = np.maximum(-excess, 0.0)
        saved = np.minimum(spare, np.maximum(end - self.least, 0))
        worth = np.where(excess > 0, (1.0 + kink) * excess, (kink - 1.0) * (saved + IDLE * (spare - saved)))
        return np.asarray(self.seconds(times) + self.round * worth, dtype=np.float64)

    def slots_within(self, times: IntArray, limit: float, kink: float) -> float:
        """Return the slots needed at which the guide of ``times``, shape (stages + 1,), is ``limit``."""
        end = int(times[-1])
        worth = (limit - float(self.seconds(times))) / self.round
        if worth > 0:
            excess = worth / (1.0 + kink)
        else:
            spare, most = -worth / (1.0 - kink), max(end - self.least, 0)
            excess = -(spare if spare <= most else most + (spare - most) / IDLE)
        return self.slots * (1.0 + excess / max(end, 1))


class StageTimesSearch:
    """
    An annealing walk over stage times whose every step is screened by slot prices before it is solved.

    Pricing a candidate takes a linear programme. Prices made for earlier candidates bound the slots of the
    next ones from below (:func:`~batchbound.solvers.search.stages.slot_price.slots_at_least`), hundreds at a
    time, and those that the walk would refuse even at this bound are never solved.

    Parameters
    ----------
    times
        Where the walk starts: rounds of the stages and the end, not decreasing, shape (stages + 1,).
    rng
        Draws the candidates.
    by_lengths
        Whether candidates of as many stages are refused by how lengths are rounded up, before any prices.
        That makes a long walk quicker; a short one, far from its end, has more to gain elsewhere.

    Attributes
    ----------
    times
        Where the walk is.
    slots
        The slots needed there, infinite if no number is enough.
    priced
        Linear programmes solved.
    """

    def __init__(
        self,
        profile: LengthProfile,
        costs: StageCosts,
        times: IntArray,
        rng: np.random.Generator,
        by_lengths: bool = False,
    ) -> None:
        self._profile = profile
        self._costs = costs
        self._rng = rng
        self._by_lengths = by_lengths
        self._feasible: list[tuple[float, int, IntArray]] = []
        self.priced = 0
        self.restart(times)

    def restart(self, times: IntArray) -> None:
        """Continue the walk from other times."""
        self.times = times
        stages = len(times) - 1
        self._pool = _PricePool(np.empty((0, stages + 1)), np.empty((0, stages)))
        price = self._price(times)
        self.slots = np.inf
        if price is not None:
            self._pool = self._pool.with_price(price)
            self.slots = price.slots

    def feasible(self) -> list[IntArray]:
        """Return the cheapest times met that need no more slots than there are, cheapest first."""
        by_cost = sorted(self._feasible, key=lambda entry: (-entry[0], entry[1]))
        return list({times.tobytes(): times for _, _, times in by_cost}.values())

    def step(self, temperature: float, kink: float, out_of_time: Callable[[], bool] = lambda: False) -> None:
        """
        Screen candidates in the order drawn and move to the first one accepted, if any is.

        Parameters
        ----------
        temperature
            Seconds of cost that a step typically may lose.
        kink
            How slots lacking or to spare are priced (:meth:`StageCosts.guide`).
        out_of_time
            Asked before every linear programme.
        """
        neighbours = self._promising(self._neighbours(), temperature, kink)
        times = neighbours.times
        at = float(self._costs.guide(self.times, self.slots, kink))
        limit = at + temperature * self._rng.exponential(size=len(times))
        priced = 0
        for begin in range(0, len(times), SCREENED):
            alive = np.arange(begin, min(begin + SCREENED, len(times)))
            alive = self._passing(neighbours, slice(None), alive, limit, kink)
            while len(alive) and priced < PRICED and not out_of_time():
                chosen, alive = alive[0], alive[1:]
                priced += 1
                most = self._costs.slots_within(times[chosen], limit[chosen], kink)
                price = self._price(times[chosen], neighbours.here(chosen), most)
                if price is None:
                    continue
                if price.slots <= most:
                    self.times, self.slots = times[chosen], price.slots
                    self._pool = neighbours.pool(chosen).with_price(price)
                    return
                neighbours = neighbours.with_price(price)
                alive = self._passing(neighbours, slice(-2, -1), alive, limit, kink)
        if times.shape[1] == len(self.times):
            self._pool = neighbours.pool(0)

    def _price(
        self, times: IntArray, near: SlotPrice | None = None, most: float = np.inf
    ) -> SlotPrice | None:
        """
        Return the price of ``times``, which are kept if there are slots enough.

        Beyond ``most`` slots, and those there are, the first prices that prove so much will do.
        """
        self.priced += 1
        price = slot_price(times, self._profile, near, max(most, self._costs.slots + 1e-3))
        if price is not None and price.slots <= self._costs.slots + 1e-6:
            heapq.heappush(self._feasible, (-float(self._costs.seconds(times)), self.priced, times))
            if len(self._feasible) > FEASIBLE_KEPT:
                heapq.heappop(self._feasible)
        return price

    def _passing(
        self, neighbours: _Neighbours, prices: slice, alive: IntArray, limit: FloatArray, kink: float
    ) -> IntArray:
        """Return those of the candidates ``alive`` that the given prices do not rule out."""
        if not len(alive):
            return alive
        values, starts = neighbours.values[prices], neighbours.starts[prices]
        if values.shape[1] > 1:
            values, starts = values[:, alive], starts[:, alive]
        floor = slots_at_least(neighbours.times[alive], values, starts, self._profile)
        return alive[self._costs.guide(neighbours.times[alive], floor, kink) <= limit[alive]]

    def _promising(self, neighbours: _Neighbours, temperature: float, kink: float) -> _Neighbours:
        """
        Return the neighbours that the walk would accept if lengths alone decided, at a higher temperature.

        Where requests' lengths are rounded up to more, hardly any candidate turns out to need as few slots
        (delayed acceptance: Christen and Fox, 2005). One stage more or less changes more than this.
        """
        times = neighbours.times
        if not self._by_lengths or times.shape[1] != len(self.times):
            return neighbours
        slots = slots_by_lengths(np.concatenate((self.times[None], times)), self._profile)
        at = float(self._costs.guide(self.times, slots[0], kink))
        limit = at + GENEROUS * temperature * self._rng.exponential(size=len(times))
        return neighbours.only(np.flatnonzero(self._costs.guide(times, slots[1:], kink) <= limit))

    def _neighbours(self) -> _Neighbours:
        kind = self._rng.random()
        if kind < RESIZED / 2 and len(self.times) > 3:
            return self._with_one_less()
        if kind < RESIZED:
            return self._with_one_more()
        times = moved(self.times, self._profile, self._rng, CANDIDATES)
        return _Neighbours(times, self._pool.values[:, None, :], self._pool.starts[:, None, :])

    def _with_one_less(self) -> _Neighbours:
        """Return the times without each of the inner stages, and the prices without it."""
        stages = len(self.times) - 1
        keep = np.array([np.delete(np.arange(stages + 1), k) for k in self._rng.permutation(stages - 1) + 1])
        return _Neighbours(self.times[keep], self._pool.values[:, keep], self._pool.starts[:, keep[:, :-1]])

    def _with_one_more(self) -> _Neighbours:
        """Return the times with one stage more, and the prices with its value between its neighbours'."""
        end = int(self.times[-1])
        anywhere = self._rng.integers(0, end + 1, CANDIDATES // 2)
        fitting = _fitting(self.times, self._profile, self._rng, CANDIDATES - len(anywhere))
        new = np.clip(np.concatenate((anywhere, fitting)), 0, end)
        self._rng.shuffle(new)
        place = np.searchsorted(self.times[1:-1], new, side="right") + 1
        column = np.arange(len(self.times) + 1)
        source = column - (column >= place[:, None])
        times = self.times[source]
        row = np.arange(len(new))
        times[row, place] = new
        before, after = self.times[place - 1], self.times[place]
        share = (new - before) / np.maximum(after - before, 1)
        values = self._pool.values[:, source]
        low, high = self._pool.values[:, place - 1], self._pool.values[:, place]
        values[:, row, place] = low + share * (high - low)
        return _Neighbours(times, values, self._pool.starts[:, source[:, :-1]])


@dataclass(frozen=True, slots=True, eq=False)
class _PricePool:
    """
    Prices made for recent stage times: values (prices, stages + 1), starts (prices, stages).

    The last one is that of where the walk is, of the others the oldest comes first.
    """

    values: FloatArray
    starts: FloatArray

    def with_price(self, price: SlotPrice) -> _PricePool:
        """Return the pool with the price of where the walk is now, without the oldest one if it is full."""
        values, starts = self.values[-PRICES_KEPT + 1 :], self.starts[-PRICES_KEPT + 1 :]
        return _PricePool(
            np.concatenate((values, price.value[None])), np.concatenate((starts, price.start[None]))
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Neighbours:
    """Candidates (candidates, stages + 1), and the prices for each: (prices, candidates or 1, ...)."""

    times: IntArray
    values: FloatArray
    starts: FloatArray

    def only(self, kept: IntArray) -> _Neighbours:
        """Return those of the candidates."""
        if self.values.shape[1] == 1:
            return _Neighbours(self.times[kept], self.values, self.starts)
        return _Neighbours(self.times[kept], self.values[:, kept], self.starts[:, kept])

    def with_price(self, price: SlotPrice) -> _Neighbours:
        """Return the same with the price of a refused candidate, which holds for all of them."""
        place = max(len(self.values) - 1, 0)
        value = np.broadcast_to(price.value, (1, *self.values.shape[1:]))
        start = np.broadcast_to(price.start, (1, *self.starts.shape[1:]))
        return _Neighbours(
            self.times,
            np.concatenate((self.values[:place], value, self.values[place:])),
            np.concatenate((self.starts[:place], start, self.starts[place:])),
        )

    def here(self, candidate: int) -> SlotPrice | None:
        """Return the price of where the walk is, for one of the candidates."""
        if not len(self.values):
            return None
        at = min(candidate, self.values.shape[1] - 1)
        return SlotPrice(0.0, self.values[-1, at], self.starts[-1, at])

    def pool(self, candidate: int) -> _PricePool:
        """Return the prices for one of the candidates."""
        at = min(candidate, self.values.shape[1] - 1)
        return _PricePool(self.values[-PRICES_KEPT:, at], self.starts[-PRICES_KEPT:, at])


def _fitting(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """Return rounds at which a stage's span to another stage is exactly what some request needs."""
    anchor = times[rng.integers(0, len(times), count)]
    wanted = np.searchsorted(profile.at_most, rng.integers(0, profile.requests, count), side="right")
    fitting: IntArray = anchor + wanted * rng.choice([-1, 1], count)
    return fitting


def moved(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """
    Return neighbours of the given stage times.

    Most stretch or shrink one span to the rounds of a request a little longer or shorter, since nothing
    changes between these. In the others one stage, a run of stages or all stages from one on are shifted a
    little, or one stage is moved to where its span to another one has exactly the rounds that some request
    needs.

    Parameters
    ----------
    times
        Rounds of the stages and the end, shape (stages + 1,).
    rng
        Draws the moves.
    count
        Neighbours drawn; those out of order are left out.

    Returns
    -------
    IntArray
        Shape (at most count, stages + 1).
    """
    stretched = int(STRETCHED * count)
    shifted = _shifted(times, profile, rng, count - stretched)
    neighbours = np.concatenate((shifted, _stretched(times, profile, rng, stretched)))
    valid = (np.diff(neighbours, axis=1) >= 0).all(axis=1) & (neighbours[:, 0] == 0)
    kept: IntArray = rng.permutation(neighbours[valid])
    return kept


def _shifted(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """Return times with some stages shifted by a few rounds, or one stage moved to fit a request."""
    stages = len(times) - 1
    one, other = rng.integers(1, stages + 1, (2, count))
    shift = np.maximum(1, np.rint(np.exp(rng.normal(0.9, 1.0, count)))).astype(np.int64)
    shift *= rng.choice([-1, 1], count)
    kind = rng.random(count)
    low = np.where(kind < RUN, one, np.minimum(one, other))
    high = np.select([kind < RUN, kind < REST], [one, np.maximum(one, other)], stages)
    neighbours = _with_shift(times, low, high, shift)
    fitted = np.flatnonzero((kind >= FITTED) & (one < stages))
    neighbours[fitted] = times
    neighbours[fitted, one[fitted]] = _fitting(times, profile, rng, len(fitted))
    neighbours[fitted] = np.sort(neighbours[fitted], axis=1)
    return neighbours


def _stretched(times: IntArray, profile: LengthProfile, rng: np.random.Generator, count: int) -> IntArray:
    """Return times with one span as long as a request a little longer or shorter than it held."""
    stages = len(times) - 1
    spans = Spans.between(times, profile)
    lengths = np.flatnonzero(np.diff(profile.at_most, prepend=0))
    if not len(spans):
        return np.empty((0, stages + 1), dtype=np.int64)
    span = rng.integers(0, len(spans), count)
    first, last = spans.first[span], spans.last[span]
    rounds = times[last] - times[first]
    held = np.searchsorted(lengths, rounds, side="right") - 1
    slack = rounds > lengths[held]
    steps = rng.geometric(0.5, count)
    wanted = np.where(rng.random(count) < 0.5, held + steps, held - steps + slack)
    shift = lengths[np.clip(wanted, 0, len(lengths) - 1)] - rounds
    # What moves: the closing stage, all from it on, the opening stage, all between them, or a run.
    kind = rng.integers(0, 5, count)
    until = np.maximum(last, rng.integers(1, stages + 1, count))
    low = np.choose(kind, [last, last, np.maximum(first, 1), first + 1, last])
    high = np.choose(kind, [last, np.full(count, stages), first, last, until])
    return _with_shift(times, low, high, np.where(kind == 2, -shift, shift))


def _with_shift(times: IntArray, low: IntArray, high: IntArray, shift: IntArray) -> IntArray:
    """Return the times with stages ``low`` to ``high`` shifted, shape (shifts, stages + 1)."""
    column = np.arange(len(times))
    shifted: IntArray = times + np.where(
        (column >= low[:, None]) & (column <= high[:, None]), shift[:, None], 0
    )
    return shifted
