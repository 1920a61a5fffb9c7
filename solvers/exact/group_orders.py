"""Cost of an order of requests and their groups, back from the end, and better orders."""

from __future__ import annotations

import math
from collections.abc import Callable

from .least_steps import NEVER, Shapes
from .outcome import no_limit
from .request_sets import PRECISION, RequestSets

Order = list[int]
"""Requests in the order in which they begin, back from the end."""
Groups = dict[int, int]
"""The first request of the group of each."""


class GroupOrders:
    """
    The cost of orders and groups when each request begins, back from the end, as early as it can.

    tick: Counts the steps of a search, and raises at its limits.
    """

    def __init__(
        self,
        shapes: Shapes,
        sets: RequestSets,
        seconds_per_step: float,
        tick: Callable[[int], None] = no_limit,
    ) -> None:
        self._decode_steps, self._first = shapes.decode_steps.tolist(), shapes.first.tolist()
        self._slots, self._capacity = shapes.slots, shapes.capacity
        self._sets, self._step, self._tick = sets, seconds_per_step, tick

    def over(self, order: Order, groups: Groups, most: int) -> dict[int, int] | None:
        """Return the least steps back at which groups are over, or None if one begins after ``most``."""
        over, begins, place = dict.fromkeys(groups.values(), 0), [0] * (len(order) + 1), 0
        while place < len(order):
            request, before = order[place], order[:place]
            group = groups[request]
            now = max(begins[place], over[group] - self._decode_steps[request])
            while now <= most and (step := self._until_it_fits(request, now, before, over, groups)):
                self._tick(1)
                if step >= NEVER:
                    return None
                now += step
            if now > most:
                return None
            place += 1
            begins[place] = now
            if now + self._decode_steps[request] > over[group]:
                over[group] = now + self._decode_steps[request]
                # Requests before the first of the group begin as they did.
                place = next((at for at, other in enumerate(before) if groups[other] == group), place)
        return over

    def seconds(self, order: Order, groups: Groups, most: int) -> float:
        """Return the seconds of steps and stages, infinity where a request begins after so many steps."""
        return self.seconds_until(self.over(order, groups, most), groups)

    def seconds_until(self, over: dict[int, int] | None, groups: Groups) -> float:
        """Return the seconds of decode steps and stages of groups that are over at given steps back."""
        if over is None:
            return math.inf
        stages = sum(float(self._sets.stages[together]) for together in started_at(over, groups).values())
        return self._step * max(over.values()) + stages

    def better(self, order: Order, groups: Groups, most: int, goal: float) -> Order:
        """Return an order that no request in another place makes better, or one no worse than a goal."""
        least, improved = self.seconds(order, groups, most), True
        while improved and least > goal:
            improved = False
            for moved in neighbours(order):
                seconds = self.seconds(moved, groups, most)
                if seconds < least * (1 - PRECISION):
                    order, least, improved = moved, seconds, True
                    break
        return order

    def _until_it_fits(
        self, request: int, now: int, before: Order, over: dict[int, int], groups: Groups
    ) -> int:
        """
        Return 0 if a request fits that begins in a step, else a number of steps in which it does not.

        Once all other groups are over, and its own is delayed with it, nothing shrinks any more: the number
        is then :data:`NEVER`.
        """
        group = groups[request]
        ends = max(over[group], now + self._decode_steps[request])
        held: int = self._first[request] + ends - 1 - now
        number, soonest, shrinking = 1, NEVER, 0
        for other in before:
            mine = groups[other] == group
            until = ends if mine else over[groups[other]]
            if until > now:
                held += self._first[other] + until - 1 - now
                number += 1
                shrinking += not mine
                soonest = soonest if mine else min(soonest, until - now)
        if number <= self._slots and held <= self._capacity:
            return 0
        if not shrinking and ends == now + self._decode_steps[request]:
            # Only its own group is there, delayed by each step that the request waits.
            return NEVER
        if number > self._slots:
            return soonest
        # Each holds a token less in the next step, but those of a group that it delays.
        return min(soonest, -(-(held - self._capacity) // number))


def neighbours(order: Order) -> list[Order]:
    """Return the orders with one request in another place."""
    found = []
    for at, request in enumerate(order):
        rest = order[:at] + order[at + 1 :]
        found += [[*rest[:to], request, *rest[to:]] for to in range(len(order)) if to not in (at, at - 1)]
    return found


def started_at(over: dict[int, int], groups: Groups) -> dict[int, int]:
    """Return the requests that are started in each decode step, back from the end, a bit each."""
    started: dict[int, int] = {}
    for request, group in groups.items():
        started[over[group]] = started.get(over[group], 0) | 1 << request
    return started
