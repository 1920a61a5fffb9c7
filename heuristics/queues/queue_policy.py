"""A policy put together from a queue discipline, a prefill rule and an admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...data.arrays import IntArray
from ..policy import State, Step
from .admission import Admission
from .prefill_rules import Opportunity, PrefillRule


class Queue(Protocol):
    """Decides which waiting request a free slot takes."""

    def propose(self, state: State, free: IntArray) -> tuple[list[int], list[int]]:
        """
        Return the requests the free slots would take now, in order, and the slot of each; takes nothing.

        free: The free slots, ascending; at least one.
        """
        ...

    def take(self, requests: Sequence[int]) -> None:
        """Note that these proposed requests are prefilled."""
        ...

    def put_back(self, requests: Sequence[int]) -> None:
        """Note that these requests were evicted and wait again."""
        ...


class QueuedPolicy(Protocol):
    """A policy whose queue can be told of requests that others put back."""

    @property
    def queue(self) -> Queue:
        """The queue it serves."""
        ...

    def __call__(self, state: State) -> Step:
        """Return what to do next."""
        ...


class QueuePolicy:
    """
    Serves a queue on free slots whenever a prefill rule says so, within the limits.

    queue: Which waiting request a free slot takes.
    rule: When to start a prefill stage. It is not asked when nothing runs.
    admission: How many requests fit.
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
        """Return what to do next."""
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
        # Another stage may follow at once (a token cap, completions of one token), so decoding is not
        # promised.
        return Step(prefill=requests, slots=slots, decode_steps=0)
