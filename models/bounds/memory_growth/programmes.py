"""Linear programmes for values of states that prove memory growth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ...deadline import Deadline
from ...programme import Entries, Programme
from ..argument import Argument, Curve, Known, Task
from ..least_counts import ALL_ON
from ..params import BoundParams
from .closed_form import closed_form
from .states import (
    CLOSED,
    OPEN,
    GrowthPrices,
    GrowthProof,
    GrowthStates,
    Transition,
    gained,
    growth_curve,
)

MOST_SLOTS = 1024
"""Slots up to which the argument is tried."""

FEW_SLOTS = 8
"""Slots up to which each number of requests has its own values."""

FINE = 5
"""Points of the first grid in a request's average growth."""

LEAST_FINE = 75
"""Least points of the first grid in the capacity."""

STEPS_OF = 24
"""Numbers of requests with steps in the first linear programme."""

EACH_PLACE = 2
"""Stride of the places with starts and ends in the first programme."""

WORTH_TRYING = 0.5
"""Least share of the known steps that a full memory must need."""

CURVE_SECONDS, CURVE_SLOT_SECONDS, CURVE_LENGTH_SECONDS = 0.005, 2e-4, 5e-5
"""Seconds of a closed-form proof: fixed, per slot, per length."""

FIRST_SECONDS, SLOT_SECONDS = 0.05, 5e-4
"""Seconds of the first grid: fixed, and per slot."""

MORE = 1e-3
"""Relative gain of a grid for which the next one is tried."""

LONGER = 4
"""Ratio of seconds between one grid and the one before."""

PARTS = 10**10
"""Parts of a step."""

LEAST_STAGE = 1e-3
"""Least steps per stage when proofs are compared."""

FARTHEST = 10.0
"""Steps that a state may be worth, beyond those of a full memory."""

INWARDS = 0.4
"""Distance from the best solution to the next trial, as a share."""

VIOLATED = 1e-4
"""Steps by which a row has to be violated to be added."""

CLOSE = 5e-4
"""Relative distance between proof and programme at which a grid ends."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Grid of points; values and gains are linear between them.

    numbers: Parts that the numbers of running requests are divided into.
    finer: Divisor of the finest distance of the first grid.
    level: Points at each distance. The distance doubles from level to level and is finest at the capacity.
    classes: Lengths of starts, and of ends, in the programme; the proof takes each length as it is.
    """

    numbers: int
    finer: int
    level: int
    classes: int

    def active(self, slots: int) -> IntArray:
        parts = self.numbers if slots > FEW_SLOTS else slots
        numbers = np.rint(np.linspace(1, max(2, slots), parts + 1)).astype(np.int64)
        return np.append(0, np.unique(numbers))

    def points(self, states: GrowthStates) -> IntArray:
        """Return points, denser towards the capacity."""
        growth = int(states.last @ states.ends - states.first @ states.starts) / int(states.starts.sum())
        width = max(1, int(min(growth / FINE, states.capacity / LEAST_FINE)) // self.finer)
        points = [states.capacity + states.slots]
        while points[-1] > 0:
            points.append(points[-1] - width)
            if len(points) % self.level == 0:
                width *= 2
        return np.array(points[::-1], dtype=np.int64)


GRIDS = (
    _Grid(1, 1, 6, 10),
    _Grid(2, 2, 8, 12),
    _Grid(2, 4, 12, 16),
    _Grid(4, 8, 12, 24),
    _Grid(8, 16, 16, 30),
)


class GrowthBound(Argument):
    """Search for values of states that prove memory growth.

    Values in closed form come first (:mod:`.closed_form`); they are enough for a short limit where memory and
    slots are full together. Linear programmes over the values (:mod:`.states`) follow, on one grid after the
    other, with rows added where they are violated (Kelley 1960). Every solution on the way is a proof, even a
    rounded one. The search compares proofs by what they add to the counts alone.
    """

    name, part, lists_claims = "memory_growth", "growth", False
    kind = source = "growth"

    def __init__(self, params: BoundParams, seconds: float) -> None:
        self._params, self._seconds = params, seconds
        self._done = False

    counts_whole_prompts = True

    @classmethod
    def of(cls, task: Task) -> Self | None:
        """Return the search if memory can run out."""
        if not task.problem.memory_can_run_out:
            return None
        return cls(task.params, task.seconds * (1.0 if task.memory_binds else task.params.growth_share))

    def prove(self, known: Known, deadline: Deadline) -> Curve | None:
        """Return the curve of the best proof, once."""
        if self._done:
            return None
        self._done = True
        return growing_curve(known.with_curves(()), deadline.within(self._seconds), self._params)


def growing_curve(counted: Known, deadline: Deadline, params: BoundParams = ALL_ON) -> Curve | None:
    """Return the curve of memory growth, if it is tried."""
    problem, counts = counted.problem, counted.counts
    seconds, states = deadline.left, GrowthStates.of(problem, counts.slots)
    if not 0 < states.slots <= MOST_SLOTS or problem.cost.decode_base == 0:
        return None
    if states.tokens < WORTH_TRYING * counts.decode_steps * states.capacity:
        return None
    search, lengths = _Search(counted, states), len(states.first) + len(states.last)
    if seconds > CURVE_SECONDS + CURVE_SLOT_SECONDS * states.slots + CURVE_LENGTH_SECONDS * lengths:
        search.prove(closed_form(counted, states))
    if not params.growth_programmes or seconds < FIRST_SECONDS + SLOT_SECONDS * states.slots:
        return search.best
    # From no solution again: a longer limit goes through the grids of a shorter one, then through more.
    programmes = _Search(counted, states)
    programmes.follow_grids(deadline)
    proofs = [each for each in (search, programmes) if each.best is not None]
    return max(proofs, key=lambda each: each.seconds).best if proofs else None


class _Search:
    """Best curve so far, and the solution behind it."""

    def __init__(self, counted: Known, states: GrowthStates) -> None:
        self._counted, self._states = counted, states
        self._stage = _stage_price(counted)
        self._inner: GrowthPrices | None = None
        self._most = -np.inf
        self.best: Curve | None = None
        self.seconds = counted.seconds
        """Seconds that the best curve and the counts prove."""
        self.longest = 0.0
        """Seconds of the longest programme."""

    def follow_grids(self, deadline: Deadline) -> None:
        """Solve the programmes of ever finer grids, while they gain."""
        known = self.seconds
        for grid in GRIDS:
            self.follow(grid, deadline)
            if self.best is None or self.seconds <= (1.0 + MORE) * known:
                break
            if LONGER * self.longest > deadline.left:
                break
            known = self.seconds

    def follow(self, grid: _Grid, deadline: Deadline) -> None:
        """Solve a grid's programme until its limit is proven."""
        programme = _Programme(self._states, self._stage, grid)
        inner = None if self._inner is None else programme.solution(self._inner)
        while (seconds := deadline.left) > 0:
            outer = programme.solved(deadline)
            if outer is None:
                return
            self.longest = max(self.longest, seconds - deadline.left)
            # Between the best solution so far and this one rows cut more off (Ben-Ameur and Neto 2007).
            tried = [outer] if inner is None else [outer, inner + INWARDS * (outer - inner)]
            violated = []
            for solution in tried:
                proof, whole = self.prove(programme.prices(solution))
                if (steps := programme.proven(proof)) > self._most:
                    self._most, self._inner, inner = steps, whole, solution
                violated.append(programme.add_violated(solution))
            if not violated[0] or self._most >= (1.0 - CLOSE) * programme.worth(outer):
                return

    def prove(self, prices: GrowthPrices) -> tuple[GrowthProof, GrowthPrices]:
        """Prove whole prices, and keep the curve if it is best."""
        whole = _whole(prices)
        proof = GrowthProof.of(self._states, whole)
        curve = growth_curve(proof, whole, self._counted.stages)
        seconds = self._counted.with_curves([curve]).seconds
        if self.best is None or seconds > self.seconds:
            self.best, self.seconds = curve, seconds
        return proof, whole


def _stage_price(known: Known) -> float:
    few = known.prefill
    if len(few) < 2:
        return 0.0
    return max(0.0, float(few[-1] - few[0])) / (len(few) - 1) / known.problem.cost.decode_base


def _whole(prices: GrowthPrices) -> GrowthPrices:
    apart = np.diff(prices.active)[:, None]
    first = np.rint(PARTS * prices.values[:, :1]).astype(np.int64)
    steps = apart * np.rint(PARTS * np.diff(prices.values, axis=1) / apart).astype(np.int64)
    values = np.concatenate((first, first + steps.cumsum(axis=1)), axis=1)
    return replace(prices, token=int(PARTS * prices.token), values=values, end=int(PARTS * prices.end))


class _Programme:
    """Linear programme for the most steps that state values prove.

    stage: Steps that a stage counts for.
    grid: Points with straight lines between their values.
    """

    def __init__(self, states: GrowthStates, stage: float, grid: _Grid) -> None:
        self._states, self._stage = states, stage
        self._active, self._points = grid.active(states.slots), grid.points(states)
        self._side = len(self._active) * len(self._points)
        self._token, self._end = 2 * self._side, 2 * self._side + 1
        # No state is worth more steps than there are, about.
        self._farthest = FARTHEST + states.tokens / states.capacity
        self._rows = 0
        self._entries: list[Entries] = []
        self._right: list[FloatArray] = []
        columns, self._gains = self._end + 1, list[FloatArray]()
        worth = [np.zeros(columns)]
        worth[0][[self._token, self._end]] = states.tokens, 1.0
        for tokens, numbers in ((states.first, states.starts), (states.last, states.ends)):
            gains = _between(tokens, grid.classes)
            self._gains.append(gains)
            worth.append(-(numbers @ gains))
        self._gained = np.cumsum([columns, *(gains.shape[1] for gains in self._gains)])
        self._worth = np.concatenate(worth)
        self._begin()

    def _begin(self) -> None:
        """Add the first rows, for some numbers, lengths and places."""
        prices = self.prices(np.zeros(len(self._worth)))
        stepped = {*self._active.tolist(), *range(1, self._states.slots, 1 + self._states.slots // STEPS_OF)}
        for kind, move, which in self._moves():
            if move.is_step and move.active not in stepped:
                continue
            places = prices.places(move)
            some = range(1) if kind < 0 else np.flatnonzero(np.isin(which, self._gains[kind].argmax(axis=0)))
            for candidate in some:
                at = np.unique(places[candidate])
                if kind >= 0:
                    at = np.unique(
                        np.append(at[(move.active + candidate) % EACH_PLACE :: EACH_PLACE], at[[0, -1]])
                    )
                self._add(kind, move, which, np.full(len(at), candidate), at)

    def _moves(self) -> Iterator[tuple[int, Transition, IntArray]]:
        """Yield the kind of gain (-1 for none), move and lengths."""
        states, active = self._states, self._active
        for move in (*states.steps(), *states.stages(active)):
            yield -1, move, np.zeros(1, dtype=np.int64)
        for kind, moves in enumerate((states.begun(active), states.ended(active))):
            for can, move in moves:
                yield kind, move, can

    def _allowed(self, move: Transition) -> float:
        """Return how much a move may add, apart from gains."""
        if move.more:
            return 0.0
        return 1.0 if move.is_step else self._stage

    def _add(self, kind: int, move: Transition, lengths: IntArray, which: IntArray, held: IntArray) -> None:
        rows = self._rows + np.arange(len(held))
        after, active = held + move.tokens[which], move.active + move.more
        self._value(rows, move.before, move.active, held, -1.0)
        if active == 0 and move.more < 0:
            self._entries.append((rows, np.full(len(rows), self._end), np.ones(len(rows))))
        else:
            self._value(rows, move.after, active, after, 1.0)
        if move.is_step:
            self._entries.append((rows, np.full(len(rows), self._token), held.astype(np.float64)))
        if kind >= 0:
            gains = self._gains[kind][lengths[which]]
            row, column = np.nonzero(gains)
            self._entries.append((rows[row], self._gained[kind] + column, -gains[row, column]))
        self._right.append(np.full(len(rows), self._allowed(move)))
        self._rows += len(rows)

    def _value(self, rows: IntArray, side: int, active: int, held: IntArray, sign: float) -> None:
        """Add the values of states to rows."""
        points = self._points
        place = np.clip(np.searchsorted(points, held, side="right") - 1, 0, len(points) - 2)
        part = (held - points[place]) / (points[place + 1] - points[place])
        row = min(int(np.searchsorted(self._active, active, side="right")), len(self._active) - 1)
        share = (active - self._active[row - 1]) / (self._active[row] - self._active[row - 1])
        for neighbour, weight in ((row - 1, 1.0 - share), (row, share)):
            if weight:
                first = side * self._side + neighbour * len(points)
                self._entries.append((rows, first + place, sign * weight * (1.0 - part)))
                self._entries.append((rows, first + place + 1, sign * weight * part))

    def prices(self, solution: FloatArray) -> GrowthPrices:
        values = solution[: self._token].reshape(2, -1, len(self._points))
        token, end = float(solution[self._token]), float(solution[self._end])
        prices = GrowthPrices(self._active, self._points, token, values, end)
        return replace(prices, values=prices.values / prices.scale, end=prices.end / prices.scale)

    def solution(self, prices: GrowthPrices) -> FloatArray:
        tokens = np.clip(self._points, *prices.points[[0, -1]])
        rows = [
            prices.at(side, active, tokens) for side in (CLOSED, OPEN) for active in self._active.tolist()
        ]
        gains = [
            [gain[shares.argmax()] for shares in lengths.T]
            for lengths, gain in zip(self._gains, gained(self._states, prices), strict=True)
        ]
        prices_alone = [prices.token, prices.end * prices.scale]
        return np.concatenate((*rows, prices_alone, *gains)) / PARTS

    def proven(self, proof: GrowthProof) -> float:
        """Return the proven sum of steps and priced stages."""
        return proof.worth / max(proof.step, proof.stage / max(self._stage, LEAST_STAGE), 1)

    def worth(self, solution: FloatArray) -> float:
        """Return the sum that a solution would prove without violated rows."""
        return float(self._worth @ solution)

    def add_violated(self, solution: FloatArray) -> bool:
        """Add each length's most violated row; return whether there was one."""
        before, prices = self._rows, self.prices(solution)
        for kind, move, lengths in self._moves():
            places = prices.places(move)
            added = prices.added(move, places)
            at = added.argmax(axis=1)
            over = added[np.arange(len(at)), at] - self._allowed(move)
            if kind >= 0:
                gains = solution[self._gained[kind] : self._gained[kind + 1]]
                over -= self._gains[kind][lengths] @ gains
            which = np.flatnonzero(over > VIOLATED)
            if len(which):
                self._add(kind, move, lengths, which, places[which, at[which]])
        return self._rows > before

    def solved(self, deadline: Deadline) -> FloatArray | None:
        """Return the best solution in time, or None."""
        farthest = np.full(len(self._worth), self._farthest)
        lower, upper = -farthest, farthest
        # A common shift of all values changes nothing, so the first state has none.
        lower[:2] = upper[:2] = 0.0
        lower[[self._token, self._end]] = 0.0
        programme = Programme.of(
            -self._worth, self._entries, -np.inf, np.concatenate(self._right), lower, upper
        )
        deadline.count(len(programme.index))
        optimum = programme.solved(deadline.solver_seconds, interior=True)
        return None if optimum is None else optimum.x


def _between(tokens: IntArray, classes: int) -> FloatArray:
    """Return each length's shares of two classes, shape (tokens, classes)."""
    knots = tokens[np.unique(np.rint(np.linspace(0, len(tokens) - 1, classes)).astype(np.int64))]
    return np.array([np.interp(tokens, knots, row) for row in np.eye(len(knots))]).T
