"""What a policy sees and what it answers: the seam between deciding and doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..data.arrays import IntArray
from ..data.problem import Problem

FREE = -1
"""What :attr:`State.slot_request` holds for a free slot."""


@dataclass(slots=True, eq=False)
class State:
    """
    The job as it stands, kept up to date by the loop; a policy reads it and changes nothing.

    problem: The problem, with the lengths as planned (known or predicted).
    time: Seconds after the job's start.
    rounds_done: Decode steps run so far.
    slot_request: The request in each slot, :data:`FREE` for none, shape (slots,).
    waiting: Whether each request has arrived and is neither running nor finished, shape (requests,).
    decoded: Decode steps each request has had so far, shape (requests,).
    finished: The requests that finished since the policy was last asked, in order.
    kv_held: Tokens of keys and values held by the running requests.
    unarrived: Requests that have not arrived yet.
    """

    problem: Problem
    time: float
    steps_done: int
    slot_request: IntArray
    waiting: npt.NDArray[np.bool_]
    decoded: IntArray
    finished: list[int] = field(default_factory=list)
    kv_held: int = 0
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
    """
    What to do next: put these back, prefill those, then decode.

    The engine comes back early when a request finishes or arrives.

    prefill: Requests to prefill together in one stage, in the order they are laid out.
    slots: The free slot each of them takes; as many as ``prefill``.
    decode_steps: Decode at most this many decode steps afterwards; 0 for another prefill stage at once.
    evict: Running requests to put back into the queue first. Their tokens are kept, their keys and values are
        not: they are prefilled again, prompt and tokens.
    """

    prefill: Sequence[int] = ()
    slots: Sequence[int] = ()
    decode_steps: int = 1
    evict: Sequence[int] = ()


class Policy(Protocol):
    """Decides the next step from the state; made afresh for every run."""

    def __call__(self, state: State) -> Step:
        """Return what to do next."""
        ...


UNTIL_CHANGE = 2**62
"""For :attr:`Step.decode_steps`: decode until a request finishes or arrives."""
