"""Interface of serving policies: their state and their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...data.arrays import FloatArray, IntArray
from .kv_ledger import KvLedger


@dataclass(slots=True, eq=False)
class ServingState:
    """State of the device before an iteration.

    The simulator updates it. A policy reads it and only promises KV memory in the ledger.

    prompt: Prompt tokens of each request, shape (requests,).
    predicted: Predicted completion tokens, shape (requests,); the true number shows at the end.
    arrival, deadline: Seconds after the start, shape (requests,).
    ledger: Promised KV memory.
    generated: Completion tokens each request has, shape (requests,).
    held: KV tokens on the device, shape (requests,); one less than prompt and completion while it generates.
    running: Requests that generate a token each iteration, in the order they began.
    arrived, prefilled, finished: Arrivals, completed prompts (of unfinished requests) and completions since
    the last call.
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
        """Return the tokens to compute before a request can generate."""
        return int(self.prompt[request] + self.generated[request] - self.held[request])

    def chunk(self, request: int, budget: int) -> int:
        """Return how many missing tokens fit a budget, at least one."""
        return max(1, min(budget, self.lacks(request)))


@dataclass(frozen=True, slots=True)
class ServingStep:
    """Next iteration; running requests not named here continue.

    prefill: Requests that do not run, each with the number of its missing tokens to compute.
    start: Requests that generate from this iteration on. Their prompt is done.
    stop: Running requests that pause and keep their KV cache on the device.
    swap_out, swap_in: Requests that move to the host (their blocks are released already), or return (they
    have room again).
    drop: Requests that lose their KV cache (their blocks are released already); prompt and completion so far
        are recomputed.
    decode: True if running requests generate in this iteration; else they pause.
    resume: Requests that take their old blocks again, each with the cached tokens
        (:meth:`~.kv_ledger.KvLedger.resume` was called already).
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
    """Function from the state to the next iteration."""

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the changes before the next iteration.

        If nothing runs then, the device waits for the next arrival.
        """
        ...
