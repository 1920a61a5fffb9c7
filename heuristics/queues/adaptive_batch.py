"""Batch size by memory (MICO)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem
from ..policy import UNTIL_CHANGE, State, Step
from .admission import Admission
from .ordered import Ordered
from .prefill_rules import SkiRental
from .queue_policy import QueuePolicy

THRESHOLD = 0.95
"""Share of the KV capacity at which the batch shrinks."""

RESUME = 0.85
"""Share of the KV capacity below which it may grow again."""


def smallest_first(problem: Problem) -> IntArray:
    """Order requests by peak KV tokens, ascending, shape (requests,)."""
    return np.argsort(problem.kv_peak, kind="stable")


class AdaptiveBatch:
    """MICO's adaptive batch size (section 3.5.2).

    As many requests run as their predicted KV cache allows, smallest first. If predictions were too short and
    memory fills up to a threshold, the requests with most left are offloaded to host memory. They resume
    before any other once memory is free again.

    problem: Problem with the lengths as predicted; without a KV capacity only the slots limit the batch.
    threshold, resume: Shares of the capacity at which the batch shrinks, and below which it may grow again.

    Raises ValueError if the shares are not in this order between 0 and 1.
    """

    def __init__(self, problem: Problem, *, threshold: float = THRESHOLD, resume: float = RESUME) -> None:
        if not 0 < resume <= threshold <= 1:
            raise ValueError(f"resume {resume} and threshold {threshold} are not in order between 0 and 1")
        self._most, self._enough = None, 0
        if problem.kv_capacity is not None:
            # A request that runs alone may have all of it.
            self._most = max(int(threshold * problem.kv_capacity), int(problem.kv_peak.max()))
            self._enough = min(int(resume * problem.kv_capacity), self._most)
            problem = replace(problem, kv_capacity=self._most)
        self._decode_steps = problem.decode_steps
        self._held_at_start = problem.kv_at_start
        self._queue = Ordered(smallest_first(problem))
        self.dispatch = QueuePolicy(self._queue, SkiRental(), Admission(problem))
        self._shrunk = False

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        if self._most is None:
            return self.dispatch(state)
        running = state.running
        if state.kv_held > self._most and len(running) > 1:
            parked = self._parked(state)
            self._queue.put_back(parked)
            self._shrunk = True
            return Step(decode_steps=0, evict=parked)
        until = UNTIL_CHANGE if len(running) < 2 else (self._most - state.kv_held) // len(running) + 1
        if self._shrunk and len(running) and state.kv_held > self._enough:
            return Step(decode_steps=until)
        self._shrunk = False
        step = self.dispatch(state)
        if step.prefill or step.evict:
            return step
        return Step(decode_steps=min(step.decode_steps, until))

    def _parked(self, state: State) -> list[int]:
        """Return the requests to offload; one always stays."""
        running = state.running
        steps_left = np.maximum(1, self._decode_steps[running] - state.decoded[running])
        order = running[np.argsort(-steps_left, kind="stable")]
        kv_tokens = np.cumsum(self._held_at_start[order] + state.decoded[order])
        count = 1 + int(np.searchsorted(kv_tokens, state.kv_held - self._enough, side="left"))
        parked: list[int] = order[: min(count, len(order) - 1)].tolist()
        return parked
