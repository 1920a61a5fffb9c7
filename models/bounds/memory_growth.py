r"""
Decode steps and prefill stages that KV memory takes because what requests hold grows, and falls as they end.

The tokens held are never at the capacity for long: with k requests under way they rise by k a step until one
ends, and a request that begins holds less than one that ends. Let B be the tokens that k requests read in
the step to come. Every schedule is a walk over states (B, k) from (0, 0) back to it, closed but in a prefill
stage: a step leads from any state to (B + k, k), closed; a stage opens a closed state; in an open one a start
leads to (B + a, k + 1), in a closed one an end to (B - a - n, k - 1), for a request of n steps that reads a
tokens in its first. With any values V of closed and U of open states, a price p of a token read, and

.. math::
    \rho = \max_{B, k} \; p B + V(B + k, k) - \min(V(B, k), U(B, k)), \qquad
    \sigma = \max(0, \max_{B, k} U(B, k) - V(B, k)),

each step adds at most :math:`\rho` to p times the tokens read and to the value, and each stage at most
:math:`\sigma`. The walk begins and ends with nothing under way, where the state may be worth F at the end if
that is no less than V(0, 0). So with W the tokens read over the whole job, R steps and S stages of any
schedule have

.. math:: \rho R + \sigma S \ge p W + F - V(0, 0) - \sum_i \max_{B, k} (U(B + a_i, k + 1) - U(B, k))
    - \sum_i \max_{B, k} (V(B - a_i - n_i, k - 1) - V(B, k)).

Values are linear in the tokens held between some points, and in k between some numbers. So the maxima are
taken where either of their terms has a point and, of starts, ends and stages between two such numbers, at the
least and the most requests; there all the tokens are allowed for that any number between may hold.
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

from ...data.bound import Bound
from ...data.costs.cost import IntArray
from ...data.problem import Problem
from .least_counts import Counts, cost_terms, prefill_seconds

Values = npt.NDArray[Any]

CLOSED, OPEN = 0, 1
"""Sides of a state: before a prefill stage, and in one."""

LARGEST = 2**62
"""A number that 64 bits hold with room for a sum."""


@dataclass(frozen=True, slots=True)
class Change:
    """
    What leads from states to others.

    Parameters
    ----------
    active
        Requests under way before.
    more
        Requests that start or, negative, end.
    before, after
        Sides of the state.
    tokens
        What each request that may start or end adds, negative for an end; of a step what all add, shape (n,).
    span
        Tokens held before, at least and at most, each of shape (n,).
    """

    active: int
    more: int
    before: int
    after: int
    tokens: IntArray
    span: tuple[IntArray, IntArray]

    @property
    def is_step(self) -> bool:
        """Whether it is a decode step."""
        return self.more == 0 and self.after == CLOSED


@dataclass(frozen=True, eq=False)
class GrowthPrices:
    """
    What tokens read and states are worth: whole parts for a proof, parts of a step while it is sought.

    Parameters
    ----------
    active
        Numbers of requests under way between which values are straight lines, from 0 and 1 on, ascending,
        shape (numbers,). The last is no less than the slots.
    points
        Tokens between which they are, ascending, shape (points,). The first is at most 0, the last no less
        than the capacity and the slots.
    token
        Of each token read in a step, not negative.
    values
        Of a state, divided by ``scale``: for closed and for open ones, shape (2, numbers, points). Those of
        numbers between are whole where they are.
    end
        Of the state with nothing under way at the end, divided by ``scale``.
    """

    active: IntArray
    points: IntArray
    token: Any
    values: Values
    end: Any

    @cached_property
    def scale(self) -> int:
        """The least multiple of the distances between points."""
        return math.lcm(*np.unique(np.diff(self.points)).tolist())

    @cached_property
    def rows(self) -> Values:
        """Values for each number of requests under way, shape (2, active[-1] + 1, points)."""
        apart = np.diff(self.active)
        gaps, steps = apart[:, None], np.diff(self.values, axis=1)
        each = steps // gaps if self.values.dtype.kind == "i" else steps / gaps
        grown: Values = np.repeat(each, apart, axis=1).cumsum(axis=1)
        return np.concatenate((self.values[:, :1], self.values[:, :1] + grown), axis=1)

    @cached_property
    def at_end(self) -> Any:
        """What nothing under way is worth at the end, no less than at the start."""
        return max(self.end * self.scale, self.at_start)

    @property
    def at_start(self) -> Any:
        """What nothing under way is worth at the start."""
        return self.at(CLOSED, 0, np.zeros(1, dtype=np.int64)).item()

    def at(self, side: int, active: int, held: IntArray) -> Values:
        """Return what states of so many requests are worth, by the tokens held."""
        place = np.clip(np.searchsorted(self.points, held, side="right") - 1, 0, len(self.points) - 2)
        row, left, right = self.rows[side, active], self.points[place], self.points[place + 1]
        worth: Values = row[place] * (right - held) + row[place + 1] * (held - left)
        worth *= self.scale // (right - left)
        return worth

    def places(self, change: Change) -> IntArray:
        """Return where a change can be worth most: points and ends of the span, shape (n, places)."""
        least, most = (each[:, None] for each in change.span)
        moved = self.points - change.tokens[:, None]
        near = np.concatenate((np.broadcast_to(self.points, moved.shape), moved), axis=1)
        places: IntArray = np.clip(near, least, most)
        return places

    def added(self, change: Change, held: IntArray) -> Values:
        """Return what a change adds where so much is held, shape (n, places)."""
        active = change.active + change.more
        added: Values = -self.at(change.before, change.active, held)
        if active == 0 and change.more < 0:
            added += self.at_end
        else:
            added += self.at(change.after, active, held + change.tokens[:, None])
        return added + self.token * held if change.is_step else added

    def most(self, change: Change) -> Values:
        """Return what a change adds at most, for each that may start or end, shape (n,)."""
        added: Values = self.added(change, self.places(change)).max(axis=1)
        return added


@dataclass(frozen=True, slots=True, eq=False)
class GrowthStates:
    """
    The states that a job's requests can be in.

    Parameters
    ----------
    capacity
        Tokens of keys and values held at most.
    first, last
        What requests with a step read in their first, and hold after their last: all different ones.
    starts, ends
        How many requests have each of them.
    least, most
        Tokens that so many requests read at least and at most, shape (slots + 1,).
    tokens
        Read over the whole job.
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
        """Return the states of a problem with a KV capacity, on no more slots than requests."""
        assert problem.kv_capacity is not None
        running = problem.rounds > 0
        first = problem.kv_at_start[running]
        last, none = first + problem.rounds[running], np.zeros(1, dtype=np.int64)
        slots = min(slots, len(first))
        least = np.concatenate((none, np.cumsum(np.sort(first))[:slots]))
        most = np.concatenate((none, np.cumsum(np.sort(last)[::-1])[:slots]))
        (first, starts), (last, ends) = (np.unique(each, return_counts=True) for each in (first, last))
        return cls(problem.kv_capacity, first, last, starts, ends, least, most, problem.kv_token_rounds)

    @property
    def slots(self) -> int:
        """Most requests under way."""
        return len(self.least) - 1

    def steps(self) -> Iterator[Change]:
        """Yield the decode steps of each number of requests, after a stage or without one."""
        for active in range(1, self.slots + 1):
            least = self.least[active : active + 1]
            span = least, np.minimum(self.capacity, self.most[active : active + 1] - active)
            if span[0] <= span[1]:
                for side in (CLOSED, OPEN):
                    yield Change(active, 0, side, CLOSED, np.array([active]), span)

    def _between(self, active: IntArray) -> Iterator[tuple[int, int]]:
        """Yield the least and the most requests, apart from one that starts or ends, between two numbers."""
        for low, high in pairwise(active.tolist()):
            if low < self.slots:
                yield low, min(high, self.slots) - 1

    def stages(self, active: IntArray) -> Iterator[Change]:
        """Yield the prefill stages before which some numbers of requests are under way."""
        for low, high in self._between(active):
            span = self.least[low : low + 1], np.minimum(self.capacity - self.first[:1], self.most[high])
            if span[0] <= span[1]:
                for number in {low, high}:
                    yield Change(number, 0, CLOSED, OPEN, np.zeros(1, dtype=np.int64), span)

    def begun(self, active: IntArray) -> Iterator[tuple[IntArray, Change]]:
        """Yield which of the different first tokens can be added to some numbers of requests, and how."""
        for low, high in self._between(active):
            most = np.minimum(self.capacity - self.first, self.most[high])
            can = np.flatnonzero(most >= self.least[low])
            span = np.full(len(can), self.least[low]), most[can]
            for number in {low, high} if len(can) else ():
                yield can, Change(number, 1, OPEN, OPEN, self.first[can], span)

    def ended(self, active: IntArray) -> Iterator[tuple[IntArray, Change]]:
        """Yield which of the different last tokens can be left by an end to some numbers, and how."""
        for low, high in self._between(active):
            least = self.last + self.least[low]
            most = np.minimum(self.capacity + high + 1, self.last + self.most[high])
            can = np.flatnonzero(most >= least)
            for number in {low, high} if len(can) else ():
                yield can, Change(number + 1, -1, CLOSED, CLOSED, -self.last[can], (least[can], most[can]))


def gained(states: GrowthStates, prices: GrowthPrices) -> tuple[IntArray, IntArray]:
    """Return what the different starts, and ends, add at most by whole prices."""
    least = np.iinfo(np.int64).min
    gains = np.full(len(states.first), least), np.full(len(states.last), least)
    changes = states.begun(prices.active), states.ended(prices.active)
    for kind, gain in zip(changes, gains, strict=True):
        for can, change in kind:
            gain[can] = np.maximum(gain[can], prices.most(change))
    return gains


@dataclass(frozen=True, slots=True)
class GrowthProof:
    """
    Numbers of any schedule: steps times ``step`` and stages times ``stage`` are ``worth`` at least.

    Parameters
    ----------
    worth, step, stage
        In the same parts, the last two not negative.
    """

    worth: int
    step: int
    stage: int

    @classmethod
    def of(cls, states: GrowthStates, prices: GrowthPrices) -> GrowthProof:
        """Return what whole prices prove."""
        step = max((int(prices.most(change)[0]) for change in states.steps()), default=0)
        stage = max((int(prices.most(change)[0]) for change in states.stages(prices.active)), default=0)
        worth = prices.token * states.tokens
        worth += prices.at_end - prices.at_start if states.slots else 0
        for numbers, gains in zip((states.starts, states.ends), gained(states, prices), strict=True):
            worth -= sum(
                int(each) * int(number) for each, number in zip(gains.tolist(), numbers.tolist(), strict=True)
            )
        return cls(worth, max(0, step), max(0, stage))

    def steps(self, stages: IntArray) -> IntArray:
        """Return the decode steps of any schedule with so many prefill stages, at least."""
        if self.step == 0:
            return np.zeros_like(stages)
        # Solutions on the way to the best one may be worth more than whole numbers of 64 bits hold.
        wide = abs(self.worth) + self.stage * int(stages.max(initial=0)) > LARGEST
        left = -((self.stage * (stages.astype(object) if wide else stages) - self.worth) // self.step)
        least: IntArray = np.clip(left, 0, LARGEST).astype(np.int64)
        return least


def growth_bound(problem: Problem, counts: Counts, proof: GrowthProof, prices: GrowthPrices) -> Bound:
    """
    Return the bound that whole prices prove, over all numbers of prefill stages.

    Parameters
    ----------
    problem
        A problem with a KV capacity.
    counts
        The least stages and steps.
    proof
        What the prices prove of the problem's states on the slots of the counts.
    prices
        Whole parts.
    """
    stages = np.arange(counts.stages, len(problem) + 1)
    steps = np.maximum(counts.rounds, proof.steps(stages))
    seconds = prefill_seconds(problem, counts.stages) + problem.cost.decode_base * steps
    cheapest = int(seconds.argmin())
    terms = cost_terms(problem, int(stages[cheapest]), int(steps[cheapest]))
    values = dict(zip(("closed", "open"), prices.values.tolist(), strict=True))
    numbers = {"active": prices.active.tolist(), "points": prices.points.tolist()}
    growth = {**numbers, "token": prices.token, "end": prices.end, **values}
    certificate = {"kind": "growth", "slots": counts.slots, **counts.claims, "growth": growth}
    return Bound(sum(terms.values()), "growing keys and values", terms, certificate)
