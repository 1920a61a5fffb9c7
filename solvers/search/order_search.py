"""The search over the orders in which a construction takes requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...data.costs.cost import FloatArray
from ...data.problem import Problem
from ...data.schedule import Schedule
from ...heuristics.queues.ordered import longest_first
from .constructive import ski_rental_schedule


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Settings of the construction: requests are taken by rising keys, shape (requests,)."""

    keys: FloatArray
    patience: float
    burst: int

    def changed(self, rng: np.random.Generator, slots: int) -> _Order:
        """Return the settings with some keys, the patience and the burst changed a little."""
        noise = 0.5 ** rng.integers(0, 8) * rng.standard_normal(len(self.keys))
        touched = rng.random(len(self.keys)) < rng.choice([0.0, 0.02, 0.2, 1.0])
        factors = np.exp(0.4 * rng.standard_normal(2))
        burst = int(np.clip(round(self.burst * factors[1]), 1, slots))
        return _Order(
            np.where(touched, self.keys + noise, self.keys), self.patience * float(factors[0]), burst
        )


class OrderSearch:
    """Searches the order in which requests are taken, the patience and the burst, by random changes."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self._problem, self._rng = problem, rng
        ranks = np.empty(len(problem))
        ranks[longest_first(problem)] = np.linspace(0.0, 1.0, len(problem))
        mixed = rng.random(len(problem))
        slots = problem.slots
        self._first = [
            _Order(keys, patience, burst)
            for burst in (slots, max(1, slots // 8), max(1, slots // 16))
            for keys in (ranks, mixed)
            for patience in (0.5, 1.5, 5.0)
        ]
        self._best, self._least, self._steps = self._first[0], np.inf, 0

    def step(self) -> Schedule:
        """Return the schedule of the next order."""
        changed = self._steps >= len(self._first)
        order = self._best.changed(self._rng, self._problem.slots) if changed else self._first[self._steps]
        self._steps += 1
        schedule = ski_rental_schedule(
            self._problem,
            order=np.argsort(order.keys, kind="stable"),
            patience=order.patience,
            burst=order.burst,
        )
        makespan = schedule.makespan(self._problem)
        if makespan <= self._least:
            self._best, self._least = order, makespan
        return schedule
