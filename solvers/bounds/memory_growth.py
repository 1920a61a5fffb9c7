"""Values of states that prove how many decode steps the growth of what requests hold costs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ...data.costs.cost import FloatArray, IntArray
from ...data.problem import Problem
from ...models.bounds.memory_growth import GrowthPrices, GrowthStates, growth_rounds
from ...models.bounds.partition import PartitionBound

FEW_SLOTS = 8
"""Slots up to which the programme is small."""

POINTS = (48, 32)
"""Points of the grid, for few slots and for more."""

CLASSES = (24, 12)
"""Classes of starts, and of ends, that the programme tells apart, for few slots and for more."""

WORTH_TRYING = 0.92
"""Steps in which a full memory reads all tokens, in those proven otherwise, from which more may be proven."""

MOST_SLOTS = 24
"""Slots up to which this is worth while: the more requests run together, the less one end leaves empty."""

EVENT_SECONDS = 3e-5
"""Seconds that one start or end of a length takes for each number of requests, about."""

EVENTS_SHARE = 0.25
"""The share of the time that all of them take at most."""

PARTS = 10_000_000
"""Parts of a step."""


def growth_bound(problem: Problem, slots: int, rounds: int, seconds: float) -> PartitionBound | None:
    """
    Return the decode steps that growing keys and values need at least, or None where that shows no more.

    The linear programme over values of states on a grid (:mod:`batchbound.models.bounds.memory_growth`), of
    which any solution, also a rounded one, is a proof.

    Parameters
    ----------
    problem
        A problem with a KV capacity.
    slots
        Requests that are ever in progress together.
    rounds
        Decode steps proven otherwise.
    seconds
        Limit, most of it of the linear programme.
    """
    states = GrowthStates.of(problem, slots)
    if not 0 < states.slots <= MOST_SLOTS or states.tokens < WORTH_TRYING * rounds * states.capacity:
        return None
    events = states.slots * (len(np.unique(states.first)) + len(np.unique(states.last)))
    if EVENT_SECONDS * events > EVENTS_SHARE * seconds:
        return None
    found = _Programme(states).solved(seconds - EVENT_SECONDS * events)
    if found is None:
        return None
    claim = {
        "kind": "growing keys and values",
        "gap": found.gap,
        "token": found.token,
        "values": found.values.tolist(),
    }
    bound = PartitionBound(growth_rounds(states, found), "growing keys and values", claim)
    return bound if bound.value > rounds else None


class _Programme:
    """The greatest number of steps that values on a grid prove, its rows collected place by place."""

    def __init__(self, states: GrowthStates) -> None:
        self._states = states
        points, classes = (of[states.slots > FEW_SLOTS] for of in (POINTS, CLASSES))
        self._gap = max(1, -(-(states.capacity + states.slots) // (points - 1)))
        self._points = -(-(states.capacity + states.slots) // self._gap) + 1
        self._token = (states.slots + 1) * self._points
        self._columns = self._token + 1
        self._worth: dict[int, float] = {self._token: float(states.tokens)}
        self._rows = 0
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []
        self._right: list[FloatArray] = []
        for active in range(1, states.slots + 1):
            held = states.points(states.steps(active), active, self._gap)
            self._change(active, active, held, active, self._token, held.astype(np.float64), 1.0)
        for tokens, sign in ((states.first, 1), (states.last, -1)):
            for members in np.array_split(tokens, min(classes, len(np.unique(tokens)))):
                if len(members):
                    self._event(members, sign)

    def _event(self, members: IntArray, sign: int) -> None:
        """Let starts or ends of a class of requests be worth no more than a variable says."""
        states, column = self._states, self._columns
        self._columns += 1
        self._worth[column] = -float(len(members))
        for tokens in np.unique(members[[0, len(members) // 2, -1]]).tolist():
            for active in range(states.slots) if sign > 0 else range(1, states.slots + 1):
                span = states.starts(active, tokens) if sign > 0 else states.ends(active, tokens)
                held = states.points(span, sign * tokens, self._gap)
                self._change(active, active + sign, held, sign * tokens, column, -np.ones(len(held)), 0.0)

    def _change(
        self, before: int, after: int, held: IntArray, shift: int, column: int, by: FloatArray, most: float
    ) -> None:
        """Add the rows: what a change adds to the value, and a multiple of a column, are at most so much."""
        rows = self._rows + np.arange(len(held))
        for active, tokens, sign in ((after, held + shift, 1.0), (before, held, -1.0)):
            point, beyond = np.divmod(tokens, self._gap)
            part = beyond / self._gap
            at = active * self._points + point
            following = np.minimum(at + 1, (active + 1) * self._points - 1)
            self._entries += [(rows, at, sign * (1.0 - part)), (rows, following, sign * part)]
        self._entries.append((rows, np.full(len(held), column), by))
        self._right.append(np.full(len(held), most))
        self._rows += len(held)

    def solved(self, seconds: float) -> GrowthPrices | None:
        """Return the best prices, rounded to whole parts, or None without any in time."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        rows, columns, entries = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        # scipy takes a sparse matrix here, its type stubs do not.
        matrix = cast(Any, csr_array((entries, (rows, columns)), shape=(self._rows, self._columns)))
        worth = np.zeros(self._columns)
        for column, each in self._worth.items():
            worth[column] = -each
        bounds: list[tuple[float | None, float | None]] = [(None, None)] * self._columns
        bounds[self._token] = (0.0, None)
        # All values may be moved alike, so the first is none.
        bounds[0] = (0.0, 0.0)
        found = linprog(
            worth,
            A_ub=matrix,
            b_ub=np.concatenate(self._right),
            bounds=bounds,
            method="highs-ipm",
            options={"time_limit": seconds},
        )
        if found.x is None or found.status != 0:
            return None
        values = np.rint(PARTS / self._gap * found.x[: self._token]).astype(np.int64)
        token = int(np.floor(PARTS * found.x[self._token]))
        return GrowthPrices(self._gap, token, values.reshape(-1, self._points))
