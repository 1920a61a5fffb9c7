r"""
Values of states that prove what growing keys and values cost, without a linear programme.

Let x be the room left of the capacity C. With k requests under way a step that reads all but x of it may add
x / C to the value of the state, so that up to a full memory the value can rise along the parabola
:math:`-x (x + k) / (2 k C)`. An end at a full memory that leaves room for L tokens loses what that is at L,
by itself; beside a prefill stage, which fills the room again, it loses :math:`\mu L`, and a start of a tokens
gains :math:`\mu a`. So closed states are worth the greater of the parabola and the line :math:`-\mu x`, and
open ones the line that lies nowhere below; how far above it lies at most is what a stage adds.
"""

from __future__ import annotations

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from ...models.bounds.least_counts import Counts, prefill_seconds
from ...models.bounds.memory_growth import GrowthPrices, GrowthStates

POINTS = 160
"""Points on the parabola at least, but for many slots."""

POINTS_OF_MANY, MANY_SLOTS = 60, 32
"""Those of more slots than this, of which none has a parabola of its own either."""

TRIED = 60
"""Rooms tried at which the line is as steep as the parabola."""


def curved_prices(problem: Problem, counts: Counts, states: GrowthStates) -> GrowthPrices:
    """
    Return prices, in parts of a step, with the line that proves most.

    Parameters
    ----------
    problem
        A problem with a KV capacity, whose rounds cost something.
    counts
        Its least stages and steps.
    states
        Of the problem, with a slot at least.
    """
    steep = _steep(problem, counts, states)
    slots, capacity = states.slots, states.capacity
    few = slots <= MANY_SLOTS
    # The parabola and the line meet at twice the room at which they are as steep.
    points = _points(states, min(2 * steep, capacity), POINTS if few else POINTS_OF_MANY)
    room = (capacity - points).astype(np.float64)
    line = -_slope(states, steep) * np.maximum(room, 0.0)
    # An end leaves a request less, whose parabola falls sooner.
    active = np.unique([0, 1, max(1, slots - 1), max(2, slots)] if few else [0, 1, max(2, slots)])
    least = max(1, slots - 1) if few else slots
    closed = np.array([np.maximum(_parabola(states, max(least, k), room), line) for k in active.tolist()])
    closed[0] = line
    above = -_slope(states, steep) * room + float((closed - line).max())
    values = np.stack((closed, np.maximum(closed, above)))
    # With nothing under way at the end the state is worth what it was at the start.
    prices = GrowthPrices(active, points, 1.0 / capacity, values, float(line[0]))
    scale = prices.scale
    return GrowthPrices(active, points, 1.0 / capacity, values / scale, float(line[0]) / scale)


def _parabola(states: GrowthStates, active: int, room: FloatArray) -> FloatArray:
    """Return what states of so many requests are worth by the room left."""
    room = np.maximum(room, 0.0)
    worth: FloatArray = -room * (room + active) / (2.0 * active * states.capacity)
    return worth


def _slope(states: GrowthStates, steep: int) -> float:
    """Return how steep the parabola of all slots is where there is so much room."""
    return (2 * steep + states.slots) / (2.0 * states.slots * states.capacity)


def _steep(problem: Problem, counts: Counts, states: GrowthStates) -> int:
    """Return the room at which the line is as steep as the parabola for the most to be proven, about."""
    stages = np.arange(counts.stages, len(problem) + 1)
    prefill = prefill_seconds(problem, counts.stages)
    lost = -_parabola(states, max(1, states.slots - 1), states.last.astype(np.float64))
    best, most = 1, -np.inf
    for steep in np.unique(np.geomspace(1, max(1, states.capacity // 2), TRIED).astype(np.int64)).tolist():
        slope = _slope(states, steep)
        rounds = states.tokens / states.capacity + states.ends @ np.minimum(lost, slope * states.last)
        rounds -= slope * (states.starts @ states.first)
        stage = slope * steep + float(_parabola(states, states.slots, np.array([float(steep)]))[0])
        steps = np.maximum(counts.rounds, rounds - stage * stages)
        seconds = float((prefill + problem.cost.decode_base * steps).min())
        if seconds > most:
            best, most = steep, seconds
    return best


def _points(states: GrowthStates, room: int, least: int) -> IntArray:
    """Return points up to some room at distances of a power of two, and ever further apart beyond."""
    apart = 1
    while room >= 2 * apart * least:
        apart *= 2
    rooms, beyond = list(range(0, room + apart, apart)), apart
    while rooms[-1] < states.capacity:
        rooms.append(rooms[-1] + beyond)
        beyond *= 2
    over = apart
    while over < states.slots:
        over *= 2
    return states.capacity - np.array([*rooms[::-1], -over], dtype=np.int64)
