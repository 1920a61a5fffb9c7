r"""Values of states in closed form, without a linear programme.

Let x be the room left of the capacity C. With k running requests a step that reads all but x of it may add
x / C to the value of the state, so up to a full memory the value can rise along the parabola
:math:`-x (x + k) / (2 k C)`. An end at a full memory that leaves room for L tokens loses the parabola's value
at L; next to a prefill stage, which fills the room again, it loses :math:`\mu L`, and a start of a tokens
gains :math:`\mu a`. So closed states are worth the greater of the parabola and the line :math:`-\mu x`, and
open ones the lowest parallel line that is nowhere below. A stage adds the largest distance between that line
and the values.
"""

from __future__ import annotations

import numpy as np

from ....data.arrays import FloatArray, IntArray
from ..argument import Known
from .states import GrowthPrices, GrowthStates

POINTS = 160
"""Least points on the parabola, unless slots are many."""

POINTS_OF_MANY, MANY_SLOTS = 60, 32
"""Least points for more slots than this."""

TRIED = 60
"""Rooms to try for the line's slope."""


def closed_form(known: Known, states: GrowthStates) -> GrowthPrices:
    """Return closed-form prices, in parts of a step."""
    steep = _steep(known, states)
    slots, capacity = states.slots, states.capacity
    few = slots <= MANY_SLOTS
    # The parabola and the line meet at twice the room at which they are as steep.
    points = _points(states, min(2 * steep, capacity), POINTS if few else POINTS_OF_MANY)
    room = (capacity - points).astype(np.float64)
    line = -_slope(states, steep) * np.maximum(room, 0.0)
    # After an end one request less runs, and its parabola falls sooner.
    active = np.unique([0, 1, max(1, slots - 1), max(2, slots)] if few else [0, 1, max(2, slots)])
    fewest = max(1, slots - 1) if few else slots
    closed = np.array([np.maximum(_parabola(states, max(fewest, k), room), line) for k in active.tolist()])
    closed[0] = line
    above = -_slope(states, steep) * room + float((closed - line).max())
    values = np.stack((closed, np.maximum(closed, above)))
    # With no request running at the end the state is worth what it was at the start.
    prices = GrowthPrices(active, points, 1.0 / capacity, values, float(line[0]))
    scale = prices.scale
    return GrowthPrices(active, points, 1.0 / capacity, values / scale, float(line[0]) / scale)


def _parabola(states: GrowthStates, active: int, room: FloatArray) -> FloatArray:
    room = np.maximum(room, 0.0)
    worth: FloatArray = -room * (room + active) / (2.0 * active * states.capacity)
    return worth


def _slope(states: GrowthStates, steep: int) -> float:
    return (2 * steep + states.slots) / (2.0 * states.slots * states.capacity)


def _steep(known: Known, states: GrowthStates) -> int:
    """Return roughly the room with the slope that proves most."""
    lost = -_parabola(states, max(1, states.slots - 1), states.last.astype(np.float64))
    best, steepest = 1, -np.inf
    for steep in np.unique(np.geomspace(1, max(1, states.capacity // 2), TRIED).astype(np.int64)).tolist():
        slope = _slope(states, steep)
        decode_steps = states.tokens / states.capacity + states.ends @ np.minimum(lost, slope * states.last)
        decode_steps -= slope * (states.starts @ states.first)
        stage = slope * steep + float(_parabola(states, states.slots, np.array([float(steep)]))[0])
        steps = np.maximum(known.steps, decode_steps - stage * known.stages)
        seconds = float((known.prefill + known.problem.cost.decode_base * steps).min())
        if seconds > steepest:
            best, steepest = steep, seconds
    return best


def _points(states: GrowthStates, room: int, least: int) -> IntArray:
    """Return points, denser towards small rooms."""
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
