"""Interface of policies: their state and their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.problem import Problem

FREE = -1
"""Value of :attr:`State.slot_request` for a free slot."""


@dataclass(slots=True, eq=False)
class State:
    """State of the job, which policies only read.

    problem: Problem with the lengths as planned (known or predicted).
    time: Seconds after the job's start.
    steps_done: Decode steps run so far.
    slot_request: Request in each slot, :data:`FREE` for none, shape (slots,).
    waiting: True for arrived requests that neither run nor are finished, shape (requests,).
    decoded: Decode steps of each request so far, shape (requests,).
    finished: Requests that finished since the last call of the policy, in order.
    kv_held: Tokens of KV cache held by the running requests, beginnings that they share once.
    apart: Requests that were evicted: back from the host, they share nothing.
    unarrived: Number of requests that have not arrived yet.
    """

    problem: Problem
    time: float
    steps_done: int
    slot_request: IntArray
    waiting: npt.NDArray[np.bool_]
    decoded: IntArray
    finished: list[int] = field(default_factory=list)
    kv_held: int = 0
    apart: set[int] = field(default_factory=set)
    unarrived: int = 0

    @property
    def free_slots(self) -> IntArray:
        """The free slots, in ascending order."""
        return np.flatnonzero(self.slot_request == FREE)

    @property
    def running(self) -> IntArray:
        """The running requests, in the order of their slots."""
        running: IntArray = self.slot_request[self.slot_request != FREE]
        return running


@dataclass(frozen=True, slots=True)
class Step:
    """Next step: evict, prefill, then decode.

    The step ends early when a request finishes or arrives.

    prefill: Requests to prefill together in one stage, in the order of their layout.
    slots: Free slot of each, as many as ``prefill``.
    decode_steps: Most decode steps to run afterwards; 0 for another prefill stage at once.
    evict: Running requests to return to the queue first. They keep their tokens but not their KV cache, so
        prompt and tokens are prefilled again.
    """

    prefill: Sequence[int] = ()
    slots: Sequence[int] = ()
    decode_steps: int = 1
    evict: Sequence[int] = ()


class Policy(Protocol):
    """Function from the state to the next step, fresh for every run."""

    def __call__(self, state: State) -> Step:
        """Return the next step."""
        ...


UNTIL_CHANGE = 2**62
"""Decode until a request finishes or arrives."""
