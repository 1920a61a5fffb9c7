"""Serving requests as they arrive: what a policy sees before an iteration, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from .kv_ledger import KvLedger


@dataclass(slots=True, eq=False)
class ServingState:
    """
    The device as it stands before an iteration.

    The simulator keeps it; a policy reads it and promises keys and values in the ledger, nothing else.

    prompt: Prompt tokens of each request, shape (requests,).
    predicted: Completion tokens of each request as predicted, shape (requests,); the true number shows at the
        end.
    arrival, deadline: Seconds after the start, shape (requests,).
    ledger: Who may hold how much.
    generated: Completion tokens each request has, shape (requests,).
    held: Tokens of keys and values each has on the device, shape (requests,); one behind prompt and
        completion while it generates.
    running: Requests that generate a token each iteration, in the order they began.
    arrived, prefilled, finished: What happened since the policy was last asked: requests that came, whose
        prompt was completed (and are not finished), and whose completion was completed.
    """

    prompt: IntArray
    predicted: IntArray
    arrival: FloatArray
    deadline: FloatArray
    ledger: KvLedger
    generated: IntArray
    held: IntArray
    running: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    arrived: list[int] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    time: float = 0.0

    def lacks(self, request: int) -> int:
        """Return the tokens a request that is not generating has yet to compute before its next one."""
        return int(self.prompt[request] + self.generated[request] - self.held[request])

    def chunk(self, request: int, budget: int) -> int:
        """Return how many of these fit into a budget of tokens, at least one."""
        return max(1, min(budget, self.lacks(request)))


@dataclass(frozen=True, slots=True)
class ServingStep:
    """
    What changes with the next iteration; whoever is running and not named goes on.

    prefill: Requests that are not running, each with how many of the tokens it lacks are computed.
    start: Requests that generate from this iteration on. Their prompt is done.
    stop: Running requests that pause and keep their keys and values on the device.
    swap_out, swap_in: Requests whose keys and values go to the host's memory (their blocks are released
        already), or come back (they have room again).
    drop: Requests whose keys and values are given up (their blocks are released already): prompt and
        completion so far are computed anew.
    decode: Whether running requests generate in this iteration; if not, they sit it out.
    resume: Requests that take up blocks they had given up, each with the tokens whose KV cache stands in them
        (:meth:`~.kv_ledger.KvLedger.resume` has given them back already).
    """

    prefill: Sequence[tuple[int, int]] = ()
    start: Sequence[int] = ()
    stop: Sequence[int] = ()
    swap_out: Sequence[int] = ()
    swap_in: Sequence[int] = ()
    drop: Sequence[int] = ()
    decode: bool = True
    resume: Sequence[tuple[int, int]] = ()


class ServingPolicy(Protocol):
    """Decides the next iteration."""

    def __call__(self, state: ServingState) -> ServingStep:
        """Return what changes; if nothing then runs, the device waits for the next arrival."""
        ...
