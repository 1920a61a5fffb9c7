"""States of the search back from the end, and which of them no other is ahead of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...data.arrays import FloatArray, IntArray
from .columns import BoolArray, Columns, any_of, first_of_equal, total
from .least_steps import AnyIntArray, Shapes
from .request_sets import RequestSets

GROUP_BITS = 14
"""Requests of a problem at most: their sets are numbered."""
DUE = 1 << GROUP_BITS
REQUEST = GROUP_BITS + 1
OVER = REQUEST + 4
COMPARED = 24
"""Neighbours that a state is compared with."""
ROUNDING = 1e-12
"""What rounding may change in a cost, relative to it."""


def packed(over: IntArray, who: IntArray, group: IntArray) -> IntArray:
    """Return what a slot serves as a number, the later over the larger; 0 is a free slot."""
    number: IntArray = (over << OVER) | (who << REQUEST) | group
    return number


def over_of(slots: IntArray) -> IntArray:
    """Return the decode step back at which each slot is free again, 0 for a free one."""
    over: IntArray = slots >> OVER
    return over


def group_of(slots: IntArray) -> IntArray:
    """Return the requests that share the stage of each slot's, a bit each."""
    group: IntArray = slots & (DUE - 1)
    return group


def request_of(slots: IntArray) -> IntArray:
    """Return the request that each slot serves."""
    who: IntArray = (slots >> REQUEST) & 15
    return who


def due_of(slots: IntArray) -> BoolArray:
    """Return whether another request has to join the group of each slot's."""
    due: BoolArray = (slots & DUE) > 0
    return due


def heads_of(slots: IntArray) -> BoolArray:
    """Return whether each slot serves the first request of its group."""
    group = group_of(slots)
    heads: BoolArray = (slots > 0) & (1 << request_of(slots) == (group & -group))
    return heads


@dataclass(frozen=True, slots=True, eq=False)
class EndStates(Columns):
    """
    States right after a request begins, back from the end, as columns.

    waiting: The requests that wait, a bit each, shape (states,).
    now: The decode step in which the last one begins, shape (states,).
    spent, stages, least: Seconds of the stages of what is over, the least seconds of all stages, and those of
        any schedule, shape (states,).
    soonest: The step from which on each request fits beside those under way, at the soonest, 0 for one that
        does not wait, shape (requests, states).
    slots: Of each request under way, the latest over first: the step back at which it is over, its number,
        whether another has to join its group, and the bits of its group, as :func:`packed`. Shape (slots,
        states).
    parent, request, joined: The state it came from (a row of the layer before), what begins, and the group it
        joins or 0, shape (states,).
    """

    waiting: IntArray
    now: IntArray
    spent: FloatArray
    stages: FloatArray
    least: FloatArray
    soonest: AnyIntArray
    slots: IntArray
    parent: IntArray
    request: IntArray
    joined: IntArray

    def __len__(self) -> int:
        return len(self.waiting)

    def first(self, number: int, rank: FloatArray) -> EndStates:
        """Return so many states of the lowest rank."""
        return self.take(np.argpartition(rank, number)[:number]) if len(self) > number else self

    @property
    def left(self) -> IntArray:
        """Decode steps left of what each slot serves, shape (slots, states)."""
        return np.where(self.slots > 0, over_of(self.slots) - self.now, 0)

    def distinct(self, seconds_per_step: float) -> EndStates:
        """Return the cheapest of each of the states that differ in no more than when they are reached."""
        relative = np.where(self.slots > 0, self.slots - (self.now << OVER), 0)
        rank = self.spent + seconds_per_step * self.now
        return self.take(first_of_equal([self.waiting, *relative], rank))


class Dominance:
    r"""
    Which states another one is ahead of.

    A state A is ahead of B, with the same requests waiting, if whatever follows B can follow A in the same
    steps, or all of it so many steps earlier, for no more seconds. A is moved back from its end by as many
    steps d as it is cheaper; then it holds at no time more slots and tokens than B. Groups are open for
    others to join: one that both have, with the same requests, is over in B no earlier and counts in A as
    delayed to then. Any other that is open in B may save at most the seconds of a stage of no tokens, as
    stages are convex in their tokens, so A has to be cheaper by those. A group of A that has to be joined
    must have to be in B.

    sets, shapes: The requests.
    seconds_per_round: Seconds of a decode step.
    """

    def __init__(self, sets: RequestSets, shapes: Shapes, seconds_per_step: float) -> None:
        self._sets, self._shapes, self._step = sets, shapes, seconds_per_step

    def ahead(self, states: EndStates, tick: Callable[[int], None]) -> EndStates:
        """Return the states that no neighbour is ahead of; the clock is looked at now and then."""
        heads, left = heads_of(states.slots), states.left
        stages = total(np.where(heads, self._sets.stages[group_of(states.slots)], 0.0))
        cost = states.spent + stages + self._step * states.now
        about = cost + self._step * total(left) / self._shapes.slots
        tick(0)
        order = np.lexsort((about, states.waiting))
        tick(0)
        ordered = _Compared.of(states.take(order), cost[order], left[:, order], self._sets, self._shapes)
        kept = np.ones(len(order), dtype=np.bool_)
        for by in range(1, COMPARED + 1):
            tick(0)
            rows = np.flatnonzero(kept)
            one, other = rows[:-by], rows[by:]
            same = ordered.waiting[one] == ordered.waiting[other]
            if not same.any():
                break
            one, other = one[same], other[same]
            slack = ordered.cost[other] * (1 + ROUNDING) - ordered.cost[one]
            longest = ordered.left[0, one] - np.maximum(0, slack // self._step)
            likely = np.flatnonzero((slack >= 0) & (longest <= ordered.left[0, other]))
            kept[self._behind(ordered, one[likely], other[likely], slack[likely])] = False
        return states.take(np.sort(order[kept]))

    def _behind(self, states: _Compared, one: IntArray, other: IntArray, slack: FloatArray) -> IntArray:
        """Return those of the others that the one beside them is ahead of, given how much cheaper it is."""
        until, aligned, saved = states.left[:, other], np.full((len(states.left), len(one)), -1), 0
        group, heads, due = states.group[:, one], states.heads[:, one], states.due[:, one]
        for at in range(len(until)):
            same = (group == states.group[at, other]) & (group > 0) & (~due | states.due[at, other])
            aligned = np.where(same, until[at], aligned)
            saved = saved + (states.open[at, other] & ~any_of(same & heads))
        slack = slack - self._sets.shared * saved
        both = aligned >= 0
        moved = np.maximum(0, states.left[:, one] - np.maximum(0, slack // self._step).astype(np.int64))
        ahead = (slack >= 0) & ~any_of(np.where(both, moved > aligned, due))
        moved = np.where(both, aligned, moved)
        rows = np.flatnonzero(ahead & ~any_of(moved > until[0]))
        fits = _holds_no_more(
            moved[:, rows], states.first[:, one[rows]], until[:, rows], states.first[:, other[rows]]
        )
        behind: IntArray = other[rows[fits]]
        return behind


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """
    What states are compared by, as columns.

    waiting, cost: The requests that wait, a bit each, and the seconds so far, with the stages of what is
        under way, shape (states,).
    left, first, group: Of each slot, the steps left, the tokens held in its first decode step and the
        requests of its group, shape (slots, states).
    heads, open, due: Whether it serves the first request of its group, such that another may, and whether one
        has to join, shape (slots, states).
    """

    waiting: IntArray
    cost: FloatArray
    left: IntArray
    first: IntArray
    group: IntArray
    heads: BoolArray
    open: BoolArray
    due: BoolArray

    @classmethod
    def of(
        cls, states: EndStates, cost: FloatArray, left: IntArray, sets: RequestSets, shapes: Shapes
    ) -> _Compared:
        slots, group, heads = states.slots, group_of(states.slots), heads_of(states.slots)
        open_to_others = heads & ((sets.joining[group] & states.waiting) > 0)
        first = shapes.first[request_of(slots)]
        return cls(states.waiting, cost, left, first, group, heads, open_to_others, due_of(slots))


def _holds_no_more(left: IntArray, first: IntArray, until: IntArray, first_then: IntArray) -> BoolArray:
    """
    Return whether requests use no more slots and tokens than others from now on.

    What they use more is most right before one of them is over: of slots, as long as it is not, the others
    only become fewer, and of tokens, with no more slots, they hold ever less than the others.

    left, until: Decode steps left of each, 0 for none, and of the others, shape (slots, pairs).
    first, first_then: Tokens that each holds in its first decode step, shape (slots, pairs).
    """
    fits = np.ones(left.shape[1], dtype=np.bool_)
    begun, begun_then = left + first, until + first_then
    for over in left:
        number, held = np.zeros(len(over), dtype=np.int8), np.zeros(len(over), dtype=np.int64)
        for at in range(len(left)):
            mine, its = left[at] >= over, until[at] >= over
            number += mine.view(np.int8) - its.view(np.int8)
            held += np.where(mine, begun[at] - over, 0) - np.where(its, begun_then[at] - over, 0)
        fits &= (over == 0) | ((number <= 0) & (held <= 0))
    return fits
