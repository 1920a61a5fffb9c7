"""Admission to prefill stages, and eviction from a full KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...data.arrays import IntArray
from ...data.kept_beginnings import CountedAhead, HeldBeginnings
from ...data.problem import Problem
from ..policy import FREE, UNTIL_CHANGE, State

FULL_STAGE = 0.95
"""Share of the token cap at which waiting would save no stage."""

Reserve = Literal["future", "present"]
"""KV tokens to keep free: a request's peak, or its next step."""

WATERMARK = 0.01
"""Share of the capacity that ``"present"`` keeps free, as vLLM does."""


class Admission:
    """Token cap and KV capacity, as a policy applies them.

    problem: The problem, with the lengths as planned.
    reserve: ``"future"`` admits a request only if all running requests fit when grown to their planned
        lengths, so nothing is evicted while lengths are as planned. ``"present"`` checks only the next decode
        step, as vLLM does, and relies on eviction.
    """

    def __init__(self, problem: Problem, reserve: Reserve = "future") -> None:
        self._problem = problem
        self.cap = problem.prefill_token_cap
        self.capacity = problem.kv_capacity
        self._alone = problem.held_alone
        self._whole = problem.prompt_tokens - problem.held_alone
        self._emitted = int(problem.prefill_emits_first_token)
        self.reserve: Reserve = reserve
        self.room_at_entry = 0 if self.capacity is None else int(self.capacity * (1 - WATERMARK))
        self._ahead = None if problem.tree is None else CountedAhead(problem)
        self._entered = np.zeros(len(problem), dtype=np.int64)
        self._entries = 0

    def fitting(self, state: State, requests: Sequence[int]) -> tuple[int, bool]:
        """Return how many requests fit a stage, and if it is full.

        A lone request always fits if nothing runs: no wait could make more room. A full stage ends at the
        token cap, so waiting could not enlarge it.

        requests: Waiting requests in queue order.
        """
        count, full = len(requests), False
        if not count or (self.cap is None and self.capacity is None):
            return count, full
        chosen = np.asarray(requests, dtype=np.int64)
        if self.cap is not None:
            tokens = self._computed(state, chosen)
            count = max(1, int(np.searchsorted(tokens, self.cap, side="right")))
            full = bool(count < len(chosen) or tokens[-1] >= FULL_STAGE * self.cap)
        if self.capacity is not None:
            kv_tokens = self._fitting_kv(state, chosen[:count])
            full = full and kv_tokens == count
            count = kv_tokens
        if not count and not state.running.size:
            count = 1
        return count, full

    def _computed(self, state: State, chosen: IntArray) -> IntArray:
        """Return a stage's tokens for each number of its first requests."""
        again = self._entered[chosen] > 0
        if self._ahead is not None:
            counted = self._ahead.tokens(chosen.tolist(), state.running.tolist())
            return np.cumsum(counted + np.where(again, state.decoded[chosen], 0))
        return np.cumsum(self._problem.prompt_tokens[chosen] + np.where(again, state.decoded[chosen], 0))

    def _held(self, state: State, requests: IntArray) -> IntArray:
        """Return the tokens that requests hold for themselves in their coming steps."""
        kv_tokens: IntArray = self._alone[requests] + state.decoded[requests] + self._emitted
        if state.apart:
            kv_tokens += np.where(np.isin(requests, [*state.apart]), self._whole[requests], 0)
        return kv_tokens

    def _shared(self, state: State, chosen: IntArray) -> IntArray:
        """Return the shared tokens held with the first 0, 1, ... chosen requests, shape (chosen + 1,)."""
        if self._ahead is None:
            return np.zeros(len(chosen) + 1, dtype=np.int64)
        shared = HeldBeginnings(self._problem)
        shared.count([request for request in state.running.tolist() if request not in state.apart], 1)
        tokens = [shared.tokens]
        for request in chosen.tolist():
            shared.count([request] if request not in state.apart else (), 1)
            tokens.append(shared.tokens)
        return np.array(tokens, dtype=np.int64)

    def _fitting_kv(self, state: State, chosen: IntArray) -> int:
        assert self.capacity is not None
        kv_tokens, shared = self._held(state, chosen), self._shared(state, chosen)
        more = np.cumsum(kv_tokens) + shared[1:] - shared[0]
        if self.reserve == "present":
            return int(np.searchsorted(state.kv_held + more, self.room_at_entry, side="right"))
        # The stage holds prompts alone, and a completion of one token leaves when it ends.
        now = state.kv_held + more - self._emitted * np.arange(1, len(chosen) + 1)
        count = int(np.searchsorted(now, self.capacity, side="right"))
        running = state.running
        kv_tokens = np.concatenate((self._held(state, running), kv_tokens))
        steps_left = self._steps_left(state, np.concatenate((running, chosen)))
        if int((kv_tokens + np.maximum(steps_left, 1) - 1).sum()) + shared[-1] <= self.capacity:
            return count
        low, high = 0, count
        probe = min(1, high)
        while low < high:
            size = len(running) + probe
            # Shared tokens are held to the end at most.
            if _peak(kv_tokens[:size], steps_left[:size]) + shared[probe] <= self.capacity:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    def _steps_left(self, state: State, requests: IntArray) -> IntArray:
        remaining: IntArray = self._problem.decode_steps[requests] - state.decoded[requests]
        # A completion that outgrew its planned length runs for at least one more step.
        begun = (state.decoded[requests] > 0) | (self._entered[requests] > 0)
        remaining[(remaining <= 0) & begun] = 1
        return remaining

    def enter(self, requests: Sequence[int]) -> None:
        """Record that some requests are prefilled now, in this order."""
        if self._ahead is not None:
            self._ahead.begin(requests)
        for request in requests:
            self._entries += 1
            self._entered[request] = self._entries

    def overflowing(self, state: State) -> list[int]:
        """Return the newest requests to evict; one always stays."""
        if self.capacity is None or state.kv_held <= self.capacity:
            return []
        running = state.running
        newest_first = running[np.argsort(-self._entered[running])]
        kv_tokens = self._held(state, newest_first)
        over = state.kv_held - self.capacity
        count = 1 + int(np.searchsorted(np.cumsum(kv_tokens), over, side="left"))
        evicted: list[int] = newest_first[: min(count, len(running) - 1)].tolist()
        return evicted

    def steps_that_fit(self, state: State) -> int:
        """Return the decode steps until KV memory overflows."""
        if self.capacity is None:
            return UNTIL_CHANGE
        active = int((state.slot_request != FREE).sum())
        if active <= 1:
            return UNTIL_CHANGE
        return max(1, (self.capacity - state.kv_held) // active + 1)


def _peak(held: IntArray, left: IntArray) -> int:
    """Return the peak of KV tokens for held and remaining tokens."""
    last_first = np.argsort(-left)
    left, held = left[last_first], held[last_first]
    steps_in = np.arange(1, len(left) + 1) * (left - 1)
    return int((np.cumsum(held) + steps_in)[left > 0].max(initial=0))
