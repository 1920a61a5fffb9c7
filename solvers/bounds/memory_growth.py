"""Values of states that prove what the growth of what requests hold costs in decode steps and stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...data.bound import Bound
from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from ...models.bounds.least_counts import Counts, prefill_seconds
from ...models.bounds.memory_growth import Change, GrowthPrices, GrowthProof, GrowthStates, growth_bound

MOST_SLOTS = 24
"""Slots up to which this is worth while: the more requests run together, the less one end leaves empty."""

FINE = 5
"""Distances of the finest points in the tokens that a request grows by on average."""

LEAST_FINE = 75
"""Least of the finest points that the capacity is divided by."""

FEW_SLOTS = 8
"""Slots up to which the programme is small: the first of two numbers that go by slots holds for these."""

LEVEL = (8, 5)
"""Points of each distance, which doubles from level to level, the finest at the capacity; also by slots."""

CLASSES = (16, 10)
"""Lengths between which what a start gains is a straight line to the programme, and of ends; by slots."""

EACH_PLACE = 2
"""Every so many places where a start or an end may be worth most are in it from the beginning."""

WORTH_TRYING = 0.92
"""Steps in which a full memory reads all tokens, in those proven otherwise, from which more may be proven."""

SLOT_SECONDS = 0.05
"""Seconds for each request that can be under way that it takes to prove something, about."""

PARTS = 10**10
"""Parts of a step."""

LEAST_STAGE = 1e-3
"""Steps that a stage counts for at least where proofs are compared."""

FARTHEST = 10.0
"""Steps that a state may be worth beyond those in which a full memory reads all tokens."""

INWARDS = 0.4
"""How far from the best solution so far towards the programme's the next one is tried."""

VIOLATED = 1e-4
"""Steps by which a row has to be violated to be added."""

CLOSE = 1e-4
"""How near what is proven comes to what the programme allows at the end, as a share of that."""


def growing_bound(problem: Problem, counts: Counts, seconds: float) -> Bound | None:
    """
    Return the bound that growing keys and values give, or None where that is not looked for.

    The linear programme over values of states (:mod:`batchbound.models.bounds.memory_growth`), its rows added
    where they are violated (Kelley 1960). Any solution on the way, also a rounded one, is a proof.

    Parameters
    ----------
    problem
        A problem with a KV capacity.
    counts
        Its least stages and steps.
    seconds
        Limit, most of it of the linear programmes.
    """
    end, states = time.perf_counter() + seconds, GrowthStates.of(problem, counts.slots)
    if not 0 < states.slots <= MOST_SLOTS or problem.cost.decode_base == 0:
        return None
    if (
        SLOT_SECONDS * states.slots > seconds
        or states.tokens < WORTH_TRYING * counts.rounds * states.capacity
    ):
        return None
    programme, best = _Programme(states, _stage_price(problem, counts)), None
    inner, most = cast("FloatArray | None", None), -np.inf
    while (left := end - time.perf_counter()) > 0:
        outer = programme.solved(left)
        if outer is None:
            break
        # Between the best solution so far and the programme's rows cut more off (Ben-Ameur and Neto 2007).
        tried = [outer] if inner is None else [outer, inner + INWARDS * (outer - inner)]
        violated = False
        for solution in tried:
            prices = programme.prices(solution)
            whole = _whole(prices)
            proof = GrowthProof.of(states, whole)
            if (steps := programme.proven(proof)) > most:
                most, inner = steps, solution
            found = growth_bound(problem, counts, proof, whole)
            if best is None or found.seconds > best.seconds:
                best = found
            violated |= programme.add_violated(solution, prices)
        if not violated or most >= (1.0 - CLOSE) * programme.worth(outer):
            break
    return best


def _stage_price(problem: Problem, counts: Counts) -> float:
    """Return what a stage more costs at least, in steps."""
    if counts.stages >= len(problem):
        return 0.0
    few = prefill_seconds(problem, counts.stages)
    return max(0.0, float(few[-1] - few[0])) / (len(few) - 1) / problem.cost.decode_base


def _whole(prices: GrowthPrices) -> GrowthPrices:
    """Return prices in whole parts."""
    values = np.rint(PARTS * prices.values).astype(np.int64)
    return GrowthPrices(prices.points, int(PARTS * prices.token), values, int(PARTS * prices.end))


def _points(states: GrowthStates) -> IntArray:
    """Return points that lie the further apart the further they are below the capacity."""
    growth = int(states.last @ states.ends - states.first @ states.starts) / int(states.starts.sum())
    width = max(1, int(min(growth / FINE, states.capacity / LEAST_FINE)))
    points = [states.capacity + states.slots]
    while points[-1] > 0:
        points.append(points[-1] - width)
        if len(points) % LEVEL[states.slots > FEW_SLOTS] == 0:
            width *= 2
    return np.array(points[::-1], dtype=np.int64)


class _Programme:
    """
    The most that steps, and stages at a price, must come to by values between points.

    Parameters
    ----------
    states
        Of the problem.
    stage
        Steps that a stage counts for.
    """

    def __init__(self, states: GrowthStates, stage: float) -> None:
        self._states, self._stage, self._points = states, stage, _points(states)
        self._side = (states.slots + 1) * len(self._points)
        self._token, self._end = 2 * self._side, 2 * self._side + 1
        # No state is worth more steps than there are, about.
        self._farthest = FARTHEST + states.tokens / states.capacity
        self._rows = 0
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._right: list[FloatArray] = []
        columns, self._gains = self._end + 1, list[FloatArray]()
        worth = [np.zeros(columns)]
        worth[0][[self._token, self._end]] = states.tokens, 1.0
        for tokens, numbers in ((states.first, states.starts), (states.last, states.ends)):
            gains = _between(tokens, CLASSES[states.slots > FEW_SLOTS])
            self._gains.append(gains)
            worth.append(-(numbers @ gains))
        self._gained = np.cumsum([columns, *(gains.shape[1] for gains in self._gains)])
        self._worth = np.concatenate(worth)
        self._begin()

    def _begin(self) -> None:
        """Add rows for some numbers of requests and lengths, at some of the places."""
        prices = self.prices(np.zeros(len(self._worth)))
        for kind, change, which in self._changes():
            held = prices.places(change)
            some = range(1) if kind < 0 else np.flatnonzero(np.isin(which, self._gains[kind].argmax(axis=0)))
            for each in some:
                at = np.unique(held[each])
                if kind >= 0:
                    at = np.unique(
                        np.append(at[(change.active + each) % EACH_PLACE :: EACH_PLACE], at[[0, -1]])
                    )
                self._add(kind, change, which, np.full(len(at), each), at)

    def _changes(self) -> Iterator[tuple[int, Change, IntArray]]:
        """Yield the kind of gain, -1 for none, the change, and the lengths that may start or end."""
        states = self._states
        for change in (*states.steps(), *states.stages()):
            yield -1, change, np.zeros(1, dtype=np.int64)
        for kind, changes in enumerate((states.begun(), states.ended())):
            for can, change in changes:
                yield kind, change, can

    def _allowed(self, change: Change) -> float:
        """Return what a change may add, gains apart."""
        if change.more:
            return 0.0
        return 1.0 if change.is_step else self._stage

    def _add(self, kind: int, change: Change, lengths: IntArray, which: IntArray, held: IntArray) -> None:
        """Add the rows of a change where so much is held."""
        rows = self._rows + np.arange(len(held))
        after, active = held + change.tokens[which], change.active + change.more
        self._value(rows, change.before, change.active, held, -1.0)
        if active == 0 and change.more < 0:
            self._entries.append((rows, np.full(len(rows), self._end), np.ones(len(rows))))
        else:
            self._value(rows, change.after, active, after, 1.0)
        if change.is_step:
            self._entries.append((rows, np.full(len(rows), self._token), held.astype(np.float64)))
        if kind >= 0:
            gains = self._gains[kind][lengths[which]]
            row, column = np.nonzero(gains)
            self._entries.append((rows[row], self._gained[kind] + column, -gains[row, column]))
        self._right.append(np.full(len(rows), self._allowed(change)))
        self._rows += len(rows)

    def _value(self, rows: IntArray, side: int, active: int, held: IntArray, sign: float) -> None:
        """Add what states are worth to rows."""
        points = self._points
        place = np.clip(np.searchsorted(points, held, side="right") - 1, 0, len(points) - 2)
        part = (held - points[place]) / (points[place + 1] - points[place])
        first = side * self._side + active * len(points)
        self._entries.append((rows, first + place, sign * (1.0 - part)))
        self._entries.append((rows, first + place + 1, sign * part))

    def prices(self, solution: FloatArray) -> GrowthPrices:
        """Return the prices of a solution."""
        values = solution[: self._token].reshape(2, -1, len(self._points))
        prices = GrowthPrices(self._points, float(solution[self._token]), values, float(solution[self._end]))
        return replace(prices, values=prices.values / prices.scale, end=prices.end / prices.scale)

    def proven(self, proof: GrowthProof) -> float:
        """Return what a proof shows that steps, and stages at their price, come to."""
        return proof.worth / max(proof.step, proof.stage / max(self._stage, LEAST_STAGE), 1)

    def worth(self, solution: FloatArray) -> float:
        """Return what steps and stages would come to at least if no more rows were violated."""
        return float(self._worth @ solution)

    def add_violated(self, solution: FloatArray, prices: GrowthPrices) -> bool:
        """Add the rows that prices violate most, and return whether there were any."""
        before = self._rows
        for kind, change, lengths in self._changes():
            held = prices.places(change)
            added = prices.added(change, held)
            at = added.argmax(axis=1)
            over = added[np.arange(len(at)), at] - self._allowed(change)
            which = np.array([over.argmax()])
            if kind >= 0:
                over = (
                    over - self._gains[kind][lengths] @ solution[self._gained[kind] : self._gained[kind + 1]]
                )
                which = _greatest(over, self._gains[kind][lengths].argmax(axis=1))
            which = which[over[which] > VIOLATED]
            if len(which):
                self._add(kind, change, lengths, which, held[which, at[which]])
        return self._rows > before

    def solved(self, seconds: float) -> FloatArray | None:
        """Return the best solution, or None without any in time."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        rows, columns, entries = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        # scipy takes a sparse matrix here, its type stubs do not.
        matrix = cast(Any, csr_array((entries, (rows, columns)), shape=(self._rows, len(self._worth))))
        bounds = [(-self._farthest, self._farthest)] * len(self._worth)
        # All values may be moved alike, so that of the first state is none.
        bounds[:2] = [(0.0, 0.0)] * 2
        bounds[self._token] = bounds[self._end] = (0.0, self._farthest)
        found = linprog(
            -self._worth,
            A_ub=matrix,
            b_ub=np.concatenate(self._right),
            bounds=bounds,
            method="highs-ipm",
            options={"time_limit": seconds},
        )
        if found.x is None or found.status != 0:
            return None
        solution: FloatArray = found.x
        return solution


def _between(tokens: IntArray, classes: int) -> FloatArray:
    """Return the shares of lengths in some of them that they lie between, shape (tokens, classes)."""
    knots = tokens[np.unique(np.rint(np.linspace(0, len(tokens) - 1, classes)).astype(np.int64))]
    return np.array([np.interp(tokens, knots, row) for row in np.eye(len(knots))]).T


def _greatest(over: FloatArray, columns: IntArray) -> IntArray:
    """Return the place of the greatest of each column."""
    order = np.lexsort((over, columns))
    last: IntArray = order[np.append(np.flatnonzero(np.diff(columns[order])), len(order) - 1)]
    return last
