"""What an order of requests and their groups cost, back from the end, and better orders."""

from __future__ import annotations

import math

from .least_rounds import NEVER, Shapes
from .request_sets import PRECISION, RequestSets

Order = list[int]
"""Requests in the order in which they begin, back from the end."""
Groups = dict[int, int]
"""The first request of the group of each."""


class GroupOrders:
    """
    What orders and groups cost when each request begins, back from the end, as early as it can.

    Parameters
    ----------
    shapes, sets
        The requests.
    seconds_per_round
        Seconds of a round.
    """

    def __init__(self, shapes: Shapes, sets: RequestSets, seconds_per_round: float) -> None:
        self._rounds, self._first = shapes.rounds.tolist(), shapes.first.tolist()
        self._slots, self._capacity = shapes.slots, shapes.capacity
        self._sets, self._round = sets, seconds_per_round

    def over(self, order: Order, groups: Groups, most: int) -> dict[int, int] | None:
        """Return the least rounds back at which groups are over, or None if one begins after so many."""
        over, begins, place = dict.fromkeys(groups.values(), 0), [0] * (len(order) + 1), 0
        while place < len(order):
            request, before = order[place], order[:place]
            group = groups[request]
            now = max(begins[place], over[group] - self._rounds[request])
            while now <= most and (step := self._until_it_fits(request, now, before, over, groups)):
                now += step
            if now > most:
                return None
            place += 1
            begins[place] = now
            if now + self._rounds[request] > over[group]:
                over[group] = now + self._rounds[request]
                # Those before the first of the group begin as they did.
                place = next((at for at, other in enumerate(before) if groups[other] == group), place)
        return over

    def seconds(self, order: Order, groups: Groups, most: int) -> float:
        """Return the seconds of rounds and stages, infinity where a request begins after so many rounds."""
        return self.seconds_until(self.over(order, groups, most), groups)

    def seconds_until(self, over: dict[int, int] | None, groups: Groups) -> float:
        """Return the seconds of rounds and stages where groups are over in given rounds back."""
        if over is None:
            return math.inf
        stages = sum(float(self._sets.stages[together]) for together in started_at(over, groups).values())
        return self._round * max(over.values()) + stages

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
        """Return 0 if a request fits that begins in a round, else so many rounds in which it does not."""
        group = groups[request]
        ends = max(over[group], now + self._rounds[request])
        held: int = self._first[request] + ends - 1 - now
        number, soonest = 1, NEVER
        for other in before:
            mine = groups[other] == group
            until = ends if mine else over[groups[other]]
            if until > now:
                held += self._first[other] + until - 1 - now
                number += 1
                soonest = soonest if mine else min(soonest, until - now)
        if number <= self._slots and held <= self._capacity:
            return 0
        if number > self._slots:
            return soonest
        # Each holds a token less in the next round, but those of a group that it delays.
        return min(soonest, -(-(held - self._capacity) // number))


def neighbours(order: Order) -> list[Order]:
    """Return the orders with one request in another place."""
    found = []
    for at, request in enumerate(order):
        rest = order[:at] + order[at + 1 :]
        found += [[*rest[:to], request, *rest[to:]] for to in range(len(order)) if to not in (at, at - 1)]
    return found


def started_at(over: dict[int, int], groups: Groups) -> dict[int, int]:
    """Return the requests that are started in each round, back from the end, a bit each."""
    started: dict[int, int] = {}
    for request, group in groups.items():
        started[over[group]] = started.get(over[group], 0) | 1 << request
    return started
