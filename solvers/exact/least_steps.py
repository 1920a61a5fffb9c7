"""The fewest decode steps that sets of requests take on their own, back from the end of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data.arrays import IntArray
from .columns import all_of, total
from .outcome import no_limit

AnyIntArray = NDArray[np.signedinteger[Any]]

NEVER = 2**27
"""A decode step that no schedule has."""
MOST_ROWS = 15_000
"""Ways to serve sets of one size from which larger sets are bounded by those they contain."""
HOPELESS = 4
"""How many times as many ways are not compared with each other any more."""
COMPARED = 8
"""Neighbours that a way to serve a set is compared with."""
FEW = 64
"""More than the requests of a problem whose sets are numbered."""


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """
    Requests of a step at least as they look back from the end: largest first, then a token less a step.

    decode_steps, first: Decode steps of each, and tokens of keys and values held in the first one, shape
        (requests,).
    slots, capacity: Requests and tokens that there is room for at a time.
    """

    decode_steps: IntArray
    first: IntArray
    slots: int
    capacity: int

    @property
    def peaks(self) -> IntArray:
        """Tokens held in the last decode step, shape (requests,)."""
        return self.first + self.decode_steps - 1

    @property
    def columns(self) -> int:
        """Requests that can be under way at a time, at most."""
        return min(self.slots, len(self.decode_steps))


def earliest(
    start: AnyIntArray, over: AnyIntArray, sizes: AnyIntArray, room: AnyIntArray, free: AnyIntArray | int
) -> AnyIntArray:
    """
    Return the first step back from which another request fits, :data:`NEVER` for none; shape (states,).

    start: Decode steps from which on it may be, shape (states,).
    over: The decode step back at which each request under way is over, the latest first, -1 for none, shape
        (slots, states).
    sizes: The tokens that each would hold in step 0 if it held a token more in each step before, 0 for those
        that are counted in ``room`` and ``free``, shape (slots, states).
    room, free: Tokens that the others may hold, and how many of them there may be, shape (states,).
    """
    live = over > start
    held = np.cumsum(np.where(live, sizes, 0), axis=0, dtype=over.dtype)
    number = np.cumsum(live & (sizes > 0), axis=0, dtype=over.dtype)
    found = np.where(room >= 0, np.maximum(start, over[0]), NEVER)
    for last in range(len(over)):
        # While those up to this one are under way: what they hold falls by their number in a decode step.
        begin = start if last + 1 == len(over) else np.maximum(start, over[last + 1])
        lacking = held[last] - room
        shrunk = np.ceil(lacking / np.maximum(number[last], 1)).astype(over.dtype)
        none = np.where(lacking <= 0, begin, NEVER)
        at = np.maximum(begin, np.where(number[last] > 0, shrunk, none))
        found = np.where((number[last] <= free) & (at < over[last]), at, found)
    return found


def in_order(over: IntArray, who: IntArray, *others: IntArray) -> list[IntArray]:
    """Return columns of what is under way, the latest over first, as many as before less one."""
    order = np.argsort(-(over * FEW + who), axis=0)[:-1]
    return [np.take_along_axis(column, order, axis=0) for column in (over, who, *others)]


def least_steps(shapes: Shapes, tick: Callable[[int], None] = no_limit) -> IntArray:
    """
    Return the fewest steps in which each set of requests can be served with nothing else, or a lower bound.

    A set is a number, a bit for each request. Back from the end a request that fits in a step fits in the
    next ones (it and all others only shrink), so some order in which each request begins as early as it can,
    and none before the one before it, takes the fewest steps. Orders are followed request by request for all
    sets at once. Of two ways to serve the same set one is dropped if the other is nowhere behind it: its last
    request begins no later, and slot by slot it is over no later and holds no more until then. Larger sets
    take at least the decode steps of those they contain.

    shapes: The requests.
    tick: Called again and again with no steps; raises LimitReachedError where there is no time left.
    """
    count, columns = len(shapes.decode_steps), shapes.columns
    sets = np.arange(1 << count)
    least = np.zeros(1 << count, dtype=np.int64)
    done = now = np.zeros(1, dtype=np.int64)
    over, who = np.full((columns, 1), -1), np.zeros((columns, 1), dtype=np.int64)
    for size in range(1, count + 1):
        parts = []
        for request in range(count):
            tick(0)
            parts.append(_with(request, shapes, done, now, over, who))
        done, now = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        over, who = (np.concatenate([part[place] for part in parts], axis=1) for place in (2, 3))
        decode_steps = np.full(1 << count, NEVER)
        np.minimum.at(decode_steps, done, over[0])
        least = np.where(decode_steps < NEVER, decode_steps, least)
        # Of too many, those ahead of others are too many as well, mostly.
        if size == count or len(done) > HOPELESS * MOST_ROWS:
            break
        tick(0)
        kept = _kept(done, now, over, shapes.first[who])
        if len(kept) > MOST_ROWS:
            break
        done, now, over, who = done[kept], now[kept], over[:, kept], who[:, kept]
    for request in range(count):
        having = sets[(sets >> request) & 1 == 1]
        least[having] = np.maximum(least[having], least[having ^ (1 << request)])
    return least


def _with(
    request: int, shapes: Shapes, done: IntArray, now: IntArray, over: IntArray, who: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return ways to serve sets with one more request, which begins last."""
    rows = np.flatnonzero((done >> request) & 1 == 0)
    over, who = over[:, rows], who[:, rows]
    sizes = np.where(over > now[rows], shapes.first[who] + over - 1, 0)
    room = np.full(len(rows), shapes.capacity - shapes.peaks[request])
    begin = earliest(now[rows], over, sizes, room, shapes.slots - 1)
    live = over > begin
    over = np.concatenate((np.where(live, over, -1), (begin + shapes.decode_steps[request])[None]))
    who = np.concatenate((np.where(live, who, 0), np.full((1, len(rows)), request)))
    over, who = in_order(over, who)
    return done[rows] | 1 << request, begin, over, who


def _kept(done: IntArray, now: IntArray, over: IntArray, first: IntArray) -> IntArray:
    """Return the rows of ways that no neighbour is ahead of everywhere."""
    live = over > now
    over, reach = np.where(live, over, now), np.where(live, over + first, 0)
    order = np.lexsort((total(over) + now, done))
    done, now, over, reach = done[order], now[order], over[:, order], reach[:, order]
    behind: NDArray[np.bool_] = np.zeros(len(order), dtype=np.bool_)
    for by in range(1, min(COMPARED + 1, len(order))):
        one = np.flatnonzero((done[by:] == done[:-by]) & ~behind[by:] & ~behind[:-by])
        other = one + by
        ahead = (now[one] <= now[other]) & all_of(over[:, one] <= over[:, other])
        ahead &= all_of(reach[:, one] <= reach[:, other])
        behind[other[ahead]] = True
    kept: IntArray = order[~behind]
    return kept
