r"""Argument that the KV cache is not always full.

With k running requests the tokens held rise by k a step until one ends. A request that begins holds less than
one that ends. Let B be the tokens that k requests read in the next step. Every schedule is a walk over
states (B, k) from (0, 0) back to it. States are open within a prefill stage and closed otherwise. A step
leads from any state to (B + k, k), closed. A stage opens a closed state. In an open state a start leads to
(B + a, k + 1); in a closed one an end leads to (B - a - n, k - 1), for a request of n steps that reads a
tokens in its first. Take any values V of closed and U of open states and a price p of a token read, and let

.. math::
    \rho = \max_{B, k} \; p B + V(B + k, k) - \min(V(B, k), U(B, k)), \qquad
    \sigma = \max(0, \max_{B, k} U(B, k) - V(B, k)).

Each step adds at most :math:`\rho` to p times the tokens read and to the value, and each stage at most
:math:`\sigma`. The walk begins and ends with no request running; there the state may be worth F at the end
if that is no less than V(0, 0). So with W the tokens read over the whole job, R steps and S stages of any
schedule have

.. math:: \rho R + \sigma S \ge p W + F - V(0, 0) - \sum_i \max_{B, k} (U(B + a_i, k + 1) - U(B, k))
    - \sum_i \max_{B, k} (V(B - a_i - n_i, k - 1) - V(B, k)).

Values are linear in the tokens held between some points, and in k between some numbers. So the maxima are
taken where either of their terms has a point. For starts, ends and stages between two numbers, only the least
and the most requests are tried. They are tried with all the tokens that any number between may hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ....data.arrays import IntArray
from ....data.problem import Problem
from ..argument import LARGEST, Curve, exact

Values = npt.NDArray[Any]

CLOSED, OPEN = 0, 1
"""Sides of a state: before a prefill stage, and in one."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A step, stage, start or end, and the states before it.

    active: Running requests before.
    more: Requests that start or, negative, end.
    before, after: Sides of the state.
    tokens: Tokens that each possible request adds, negative for an end, or all requests in a step, shape
        (n,).
    span: Tokens held before, at least and at most, each of shape (n,).
    """

    active: int
    more: int
    before: int
    after: int
    tokens: IntArray
    span: tuple[IntArray, IntArray]

    @property
    def is_step(self) -> bool:
        """True for a decode step."""
        return self.more == 0 and self.after == CLOSED


@dataclass(frozen=True, eq=False)
class GrowthPrices:
    """Values of tokens read and of states.

    They are whole parts for a proof, and parts of a step during the search.

    active: Numbers of running requests between which values are linear, from 0 and 1 on, ascending, shape
        (numbers,). The last is no less than the slots.
    points: Tokens between which values are linear, ascending, shape (points,). The first is at most 0, the
        last no less than the capacity and the slots.
    token: Value of each token read in a step, not negative.
    values: Values of closed and of open states, divided by ``scale``, shape (2, numbers, points). If they are
        whole, so are the values at the numbers between.
    end: Value of the state with no request running at the end, divided by ``scale``.
    """

    active: IntArray
    points: IntArray
    token: Any
    values: Values
    end: Any

    @cached_property
    def scale(self) -> int:
        """Least common multiple of the distances between points."""
        return math.lcm(*np.unique(np.diff(self.points)).tolist())

    @cached_property
    def rows(self) -> Values:
        """Values by number of running requests, shape (2, active[-1] + 1, points)."""
        apart = np.diff(self.active)
        gaps, steps = apart[:, None], np.diff(self.values, axis=1)
        slopes = steps // gaps if self.values.dtype.kind == "i" else steps / gaps
        grown: Values = np.repeat(slopes, apart, axis=1).cumsum(axis=1)
        return np.concatenate((self.values[:, :1], self.values[:, :1] + grown), axis=1)

    @cached_property
    def at_end(self) -> Any:
        """Value of no running request at the end."""
        return max(self.end * self.scale, self.at_start)

    @property
    def at_start(self) -> Any:
        """Value of no running request at the start."""
        return self.at(CLOSED, 0, np.zeros(1, dtype=np.int64)).item()

    def at(self, side: int, active: int, held: IntArray) -> Values:
        """Return the values of states by the tokens held."""
        place = np.clip(np.searchsorted(self.points, held, side="right") - 1, 0, len(self.points) - 2)
        row, lower, right = self.rows[side, active], self.points[place], self.points[place + 1]
        worth: Values = row[place] * (right - held) + row[place + 1] * (held - lower)
        worth *= self.scale // (right - lower)
        return worth

    def places(self, move: Transition) -> IntArray:
        """Return the points and ends where a move can be worth most."""
        low, high = (column[:, None] for column in move.span)
        moved = self.points - move.tokens[:, None]
        near = np.concatenate((np.broadcast_to(self.points, moved.shape), moved), axis=1)
        places: IntArray = np.clip(near, low, high)
        return places

    def added(self, move: Transition, held: IntArray) -> Values:
        """Return the value that a move adds, shape (n, places)."""
        active = move.active + move.more
        added: Values = -self.at(move.before, move.active, held)
        if active == 0 and move.more < 0:
            added += self.at_end
        else:
            added += self.at(move.after, active, held + move.tokens[:, None])
        return added + self.token * held if move.is_step else added

    def most(self, move: Transition) -> Values:
        """Return the most that a move adds for each request, shape (n,)."""
        added: Values = self.added(move, self.places(move)).max(axis=1)
        return added


@dataclass(frozen=True, slots=True, eq=False)
class GrowthStates:
    """States that a job's requests can be in.

    capacity: Most tokens in the KV cache.
    first, last: Distinct numbers of tokens read in a first step, and held after a last one.
    starts, ends: Number of requests with each of them.
    least, most: Fewest and most tokens that 0, 1, ... running requests read, shape (slots + 1,).
    tokens: Tokens read over the whole job.
    """

    capacity: int
    first: IntArray
    last: IntArray
    starts: IntArray
    ends: IntArray
    least: IntArray
    most: IntArray
    tokens: int

    @classmethod
    def of(cls, problem: Problem, slots: int) -> GrowthStates:
        """Return the states of a problem with a KV capacity."""
        assert problem.kv_capacity is not None
        running = problem.decode_steps > 0
        first = problem.kv_at_start[running]
        last, none = first + problem.decode_steps[running], np.zeros(1, dtype=np.int64)
        slots = min(slots, len(first))
        least = np.concatenate((none, np.cumsum(np.sort(first))[:slots]))
        most = np.concatenate((none, np.cumsum(np.sort(last)[::-1])[:slots]))
        (first, starts), (last, ends) = (np.unique(times, return_counts=True) for times in (first, last))
        return cls(problem.kv_capacity, first, last, starts, ends, least, most, problem.kv_token_steps)

    @property
    def slots(self) -> int:
        """Most running requests."""
        return len(self.least) - 1

    def steps(self) -> Iterator[Transition]:
        """Yield the decode steps of each number of requests."""
        for active in range(1, self.slots + 1):
            least = self.least[active : active + 1]
            span = least, np.minimum(self.capacity, self.most[active : active + 1] - active)
            if span[0] <= span[1]:
                for side in (CLOSED, OPEN):
                    yield Transition(active, 0, side, CLOSED, np.array([active]), span)

    def _between(self, active: IntArray) -> Iterator[tuple[int, int]]:
        """Yield the least and most other requests between two numbers."""
        for low, high in pairwise(active.tolist()):
            if low < self.slots:
                yield low, min(high, self.slots) - 1

    def stages(self, active: IntArray) -> Iterator[Transition]:
        """Yield the prefill stages before which some requests run."""
        for low, high in self._between(active):
            span = self.least[low : low + 1], np.minimum(self.capacity - self.first[:1], self.most[high])
            if span[0] <= span[1]:
                for number in {low, high}:
                    yield Transition(number, 0, CLOSED, OPEN, np.zeros(1, dtype=np.int64), span)

    def begun(self, active: IntArray) -> Iterator[tuple[IntArray, Transition]]:
        """Yield the possible starts for some numbers of requests."""
        for low, high in self._between(active):
            largest = np.minimum(self.capacity - self.first, self.most[high])
            can = np.flatnonzero(largest >= self.least[low])
            span = np.full(len(can), self.least[low]), largest[can]
            for number in {low, high} if len(can) else ():
                yield can, Transition(number, 1, OPEN, OPEN, self.first[can], span)

    def ended(self, active: IntArray) -> Iterator[tuple[IntArray, Transition]]:
        """Yield the possible ends for some numbers of requests."""
        for low, high in self._between(active):
            smallest = self.last + self.least[low]
            largest = np.minimum(self.capacity + high + 1, self.last + self.most[high])
            can = np.flatnonzero(largest >= smallest)
            for number in {low, high} if len(can) else ():
                yield (
                    can,
                    Transition(
                        number + 1, -1, CLOSED, CLOSED, -self.last[can], (smallest[can], largest[can])
                    ),
                )


def gained(states: GrowthStates, prices: GrowthPrices) -> tuple[IntArray, IntArray]:
    """Return the most that starts, and ends, add by whole prices."""
    lowest = np.iinfo(np.int64).min
    gains = np.full(len(states.first), lowest), np.full(len(states.last), lowest)
    moves = states.begun(prices.active), states.ended(prices.active)
    for kind, gain in zip(moves, gains, strict=True):
        for can, move in kind:
            gain[can] = np.maximum(gain[can], prices.most(move))
    return gains


@dataclass(frozen=True, slots=True)
class GrowthProof:
    """Inequality that the steps and stages of every schedule fulfil.

    worth, step, stage: ``step`` times the steps and ``stage`` times the stages are at least ``worth``.
    """

    worth: int
    step: int
    stage: int

    @classmethod
    def of(cls, states: GrowthStates, prices: GrowthPrices) -> GrowthProof:
        """Return the proof of whole prices."""
        step = max((int(prices.most(move)[0]) for move in states.steps()), default=0)
        stage = max((int(prices.most(move)[0]) for move in states.stages(prices.active)), default=0)
        worth = prices.token * states.tokens
        worth += prices.at_end - prices.at_start if states.slots else 0
        for numbers, gains in zip((states.starts, states.ends), gained(states, prices), strict=True):
            worth -= sum(
                int(gain) * int(number) for gain, number in zip(gains.tolist(), numbers.tolist(), strict=True)
            )
        return cls(worth, max(0, step), max(0, stage))

    def steps(self, stages: IntArray) -> IntArray:
        """Return the least decode steps for each number of stages."""
        if self.step == 0:
            return np.zeros_like(stages)
        stages = exact(stages, abs(self.worth) + self.stage * int(stages.max(initial=0)))
        needed = -((self.stage * stages - self.worth) // self.step)
        least: IntArray = np.clip(needed, 0, LARGEST).astype(np.int64)
        return least


def growth_curve(proof: GrowthProof, prices: GrowthPrices, stages: IntArray) -> Curve:
    """Return the curve of whole prices, with its claim."""
    values = dict(zip(("closed", "open"), prices.values.tolist(), strict=True))
    numbers = {"active": prices.active.tolist(), "points": prices.points.tolist()}
    claim = {**numbers, "token": prices.token, "end": prices.end, **values}
    return Curve("growth", proof.steps(stages), claim)
