"""Preemption by priority."""

from __future__ import annotations

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ..policy import State, Step
from .admission import Admission
from .ordered import Ordered
from .prefill_rules import PrefillFirst
from .queue_policy import QueuePolicy


def priority_order(problem: Problem) -> IntArray:
    """Order requests by priority, arrival and position, shape (requests,)."""
    workload = problem.workload
    return np.lexsort((workload.arrival, -workload.priority))


class PriorityPreemption:
    """Policy that preempts running requests for more urgent ones.

    A waiting request takes a slot only from one of strictly lower priority, so equals never alternate. An
    engine keeps the KV cache of an evicted request, which resumes where it stopped (BATON, "Preemptive
    scheduling"). If KV memory is short, admission evicts as for any policy.
    """

    def __init__(self, problem: Problem) -> None:
        self._priority = problem.workload.priority
        self._queue = Ordered(priority_order(problem))
        self.dispatch = QueuePolicy(self._queue, PrefillFirst(), Admission(problem))

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        evicted = self._preempted(state)
        if evicted:
            self._queue.put_back(evicted)
            return Step(decode_steps=0, evict=evicted)
        return self.dispatch(state)

    def _preempted(self, state: State) -> list[int]:
        waiting = -np.sort(-self._priority[state.waiting])[len(state.free_slots) :]
        running = state.running
        # Among equals the request that has decoded least leaves: it has the smallest KV cache to move.
        running = running[np.lexsort((state.decoded[running], self._priority[running]))]
        pairs = min(len(waiting), len(running))
        count = int(np.count_nonzero(waiting[:pairs] > self._priority[running[:pairs]]))
        preempted: list[int] = running[:count].tolist()
        return preempted
