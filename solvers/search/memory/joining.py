"""
Schedules of a dozen requests under scarce KV memory: an order, and how far each is put off to share a stage.

They are put back from the end (:class:`~.request_profile.RequestProfile`). In :mod:`~.insertion` one reach
serves all; here each request has its own, and stages cost what their tokens do: of few requests, which of
them wait for one another decides.
"""

from __future__ import annotations

import numpy as np

from ....data.problem import Problem
from ....data.schedule import Schedule
from ..backward import schedule_backwards
from .request_profile import RequestProfile, running_requests

MOST_JOINED = 16
"""Requests up to which each has a reach of its own: of more, too few are tried for it in a second."""

REACHES = (0.0, 1 / 16, 1 / 4, np.inf)
"""Rounds that a request may be put off to share a stage, as shares of the longest one's."""

HOT, COLD = 0.02, 0.0004
"""Temperatures at the start and the end, as shares of the rounds of slots packed full."""

STAGE_HOT = 0.5
"""The first at least, in costs of a stage."""

REACH_CHANGED = 0.3
"""How often a reach changes, not the order."""

WALKS = 2
"""Times that it cools down."""


class JoiningAnnealing:
    """
    An annealing walk over the orders and reaches of few requests.

    Parameters
    ----------
    problem
        The problem scheduled, with a KV capacity, whose rounds cost something, some request taking one.
    rng
        Draws the moves.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self._problem, self._rng = problem, rng
        self._running, rows, self._requests = running_requests(problem)
        self._stages = dict[int, float]()
        self._order = np.argsort(-rows[0], kind="stable").tolist()
        self._reach = [0.0] * len(self._order)
        self._rounds = float(rows[0].sum()) / problem.slots
        self._longest = int(rows[0].max())
        self._now = self._least = np.inf

    def step(self, done: float) -> Schedule | None:
        """
        Try a change, and return its schedule if that is the best one met so far.

        Parameters
        ----------
        done
            The share of the walk that is over, 0 to 1.
        """
        rng, order, reach = self._rng, list(self._order), list(self._reach)
        one, other = rng.integers(len(order), size=2).tolist()
        kind = rng.random()
        if kind < REACH_CHANGED:
            reach[one] = REACHES[int(rng.integers(len(REACHES)))] * self._longest
        elif kind < (1 + REACH_CHANGED) / 2:
            order[one], order[other] = order[other], order[one]
        else:
            order.insert(other, order.pop(one))
        stage = self._stage(sum(prompt for _, _, prompt in self._requests) // len(order))
        hot = max(HOT * self._rounds * self._problem.cost.decode_base, STAGE_HOT * stage)
        loss = hot * (COLD / HOT) ** (WALKS * done % 1.0) * rng.exponential()
        placed = self._placed(order, reach, self._now + loss)
        if placed is None:
            return None
        starts, self._now = placed
        self._order, self._reach = order, reach
        if self._now >= self._least:
            return None
        self._least = self._now
        return schedule_backwards(self._problem, self._running, np.array(starts))

    def _placed(self, order: list[int], reach: list[float], most: float) -> tuple[list[int], float] | None:
        """Return each one's start, counted back from the end, and the cost; None beyond so much."""
        profile, starts, stages = RequestProfile(self._problem), [0] * len(order), 0.0
        for request in order:
            rounds, peak, prompt = self._requests[request]
            start = starts[request] = rounds + profile.put(rounds, peak, prompt, reach[request])
            tokens = profile.stages[start]
            stages += self._stage(tokens) - (self._stage(tokens - prompt) if tokens > prompt else 0.0)
            cost = stages + self._problem.cost.decode_base * profile.rounds
            if cost > most:
                return None
        return starts, cost

    def _stage(self, tokens: int) -> float:
        """Return the seconds of a stage of so many prompt tokens."""
        if tokens not in self._stages:
            self._stages[tokens] = float(self._problem.cost.prefill_seconds(np.array([tokens]))[0])
        return self._stages[tokens]
