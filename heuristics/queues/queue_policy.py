"""Policy of a queue, a prefill rule and an admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...data.arrays import IntArray
from ..policy import State, Step
from .admission import Admission
from .prefill_rules import Opportunity, PrefillRule


class Queue(Protocol):
    """Choice of the waiting request that a free slot takes."""

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """Return the requests that free slots would take, and their slots.

        free: Free slots, ascending; at least one.
        """
        ...

    def take(self, requests: Sequence[int]) -> None:
        """Record that these proposed requests are prefilled."""
        ...

    def put_back(self, requests: Sequence[int]) -> None:
        """Record that these requests were evicted and wait again."""
        ...


class QueuedPolicy(Protocol):
    """Policy with a queue that also accepts evicted requests."""

    @property
    def queue(self) -> Queue:
        """The queue it serves."""
        ...

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        ...


class QueuePolicy:
    """Policy that serves a queue when a rule allows.

    queue: Order of the waiting requests.
    rule: Start of a prefill stage; not used while nothing runs.
    admission: Number of requests that fit.
    """

    def __init__(self, queue: Queue, rule: PrefillRule, admission: Admission) -> None:
        self.queue = queue
        self.rule = rule
        self.admission = admission
        self._idle = 0
        self._idling = 0
        self._asked = 0
        self._decoded = 0

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        evicted = self.admission.overflowing(state)
        if evicted:
            self.queue.put_back(evicted)
            return Step(decode_steps=0, evict=evicted)
        self._idle += self._idling * (state.steps_done - self._asked)
        self._asked, self._idling = state.steps_done, 0
        decode_steps = self.admission.steps_that_fit(state)
        free = state.free_slots
        if not free.size:
            return Step(decode_steps=decode_steps)
        requests, slots = self.queue.propose(state, free)
        count, full = self.admission.fitting(state, requests)
        if not count:
            return Step(decode_steps=decode_steps)
        requests, slots = requests[:count], slots[:count]
        wait = 0
        if len(free) < state.problem.slots:
            decoded = int(state.decoded.sum()) - self._decoded
            wait = self.rule(state.problem, Opportunity.of(state, requests, self._idle, full, decoded))
        if wait > 0:
            self._idling = count
            return Step(decode_steps=min(wait, decode_steps))
        self._idle, self._decoded = 0, int(state.decoded.sum())
        self.queue.take(requests)
        self.admission.enter(requests)
        # Another stage may follow at once (token cap, completions of one token): decoding is not promised.
        return Step(prefill=requests, slots=slots, decode_steps=0)
