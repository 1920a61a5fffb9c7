"""Preemption at the end of a job."""

from __future__ import annotations

import numpy as np

from ...data.lengths.remaining import RemainingLengths
from ...data.problem import Problem
from ..policy import Policy, State, Step
from .admission import Admission
from .prefill_rules import Opportunity, SkiRental


class TailPreemption:
    """Policy that ends a job with the longest remaining first.

    The request that starts last may turn out the longest, and predictions cannot prevent it. But a request
    that has decoded long has little left, as no completion exceeds the longest. So at the end, running
    requests with little left are evicted in favour of those that may have much left.

    policy: Policy before the end.
    problem: Problem with the lengths as predicted.
    remaining: Expected remaining length by decode steps done.
    share: The end begins when at most ``share`` times the slots wait.
    margin: Decode steps by which a waiting request must have more left than a running one to take its slot.
    patience: Threshold of the ski-rental rule for free slots.
    """

    def __init__(
        self,
        policy: Policy,
        problem: Problem,
        remaining: RemainingLengths,
        *,
        share: float,
        margin: int,
        patience: float,
    ) -> None:
        self._policy = policy
        self._remaining = remaining
        self._few = share * problem.slots
        self._margin = margin
        self._rule = SkiRental(patience)
        self._admission = Admission(problem)
        self._ending = False
        self._idle = self._idling = self._asked = 0

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        self._ending = self._ending or int(np.count_nonzero(state.waiting)) <= self._few
        return self._end(state) if self._ending else self._policy(state)

    def _end(self, state: State) -> Step:
        evicted = self._admission.overflowing(state)
        if evicted:
            return Step(decode_steps=0, evict=evicted)
        self._idle += self._idling * (state.steps_done - self._asked)
        self._asked, self._idling = state.steps_done, 0
        decode_steps = min(self._admission.steps_that_fit(state), max(1, self._margin // 2))
        waiting, running, free = np.flatnonzero(state.waiting), state.running, state.free_slots
        if not waiting.size:
            return Step(decode_steps=self._admission.steps_that_fit(state))
        left = self._remaining.tokens(waiting, state.decoded[waiting])
        most = np.argsort(-left, kind="stable")
        waiting, left = waiting[most], left[most]
        running_left = self._remaining.tokens(running, state.decoded[running])
        least = np.argsort(running_left, kind="stable")
        rivals = left[len(free) : len(free) + len(least)]
        swapped = int(np.count_nonzero(rivals > running_left[least[: len(rivals)]] + self._margin))
        parked = running[least[:swapped]]
        if swapped:
            # Room for the waiting requests is only known once the slots are free.
            return Step(decode_steps=0, evict=parked.tolist())
        requests: list[int] = waiting[: len(free)].tolist()
        count, full = self._admission.fitting(state, requests)
        if not count:
            return Step(decode_steps=decode_steps)
        requests = requests[:count]
        if running.size:
            wait = self._rule(state.problem, Opportunity.of(state, requests, self._idle, full))
            if wait > 0:
                self._idling = count
                return Step(decode_steps=min(wait, decode_steps))
        self._idle = 0
        self._admission.enter(requests)
        return Step(prefill=requests, slots=free[:count].tolist(), decode_steps=0)
