"""vLLM's rule since version 1: chunked prefill."""

from __future__ import annotations

from collections import deque

import numpy as np

from .policy import ServingState, ServingStep


class ChunkedPrefill:
    """Policy of running requests first, then new ones (vLLM, version 1).

    Running requests come in order of admission, each with all the tokens it lacks, up to the budget. If
    blocks run out, the request admitted last is preempted and recomputed. Without a preemption, waiting
    requests are admitted in order while sequences and budget allow and all their tokens would fit at once
    (``scheduler_reserve_full_isl``).

    batched_tokens: Most tokens of an iteration.
    sequences: Most running requests.

    Raises ValueError if an iteration has no room for a token of every sequence.
    """

    def __init__(self, batched_tokens: int, sequences: int) -> None:
        if batched_tokens < sequences:
            raise ValueError(f"{batched_tokens} tokens an iteration are fewer than {sequences} sequences")
        self._tokens, self._sequences = batched_tokens, sequences
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        """Running requests, in order of admission."""
        self._partial: int | None = None
        """The last of them, if its prompt is incomplete."""
        self.preemptions = 0
        """Preemptions so far."""

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        self._waiting += state.arrived
        for request in state.finished:
            self._running.remove(request)
        dropped = self._make_room(state)
        budget = self._tokens - len(self._running)
        prefill: list[tuple[int, int]] = []
        if self._partial is not None:
            request, budget = self._partial, budget + 1
            new = min(state.lacks(request), budget)
            if state.ledger.grow(request, int(state.held[request]) + new):
                prefill.append((request, new))
                self._partial = request if new < state.lacks(request) else None
                budget -= new
            else:
                self._drop(state, dropped)
        resumed = [] if dropped else self._admit(state, budget, prefill)
        self._waiting.extendleft(dropped)
        start = [request for request in state.prefilled if request not in dropped]
        return ServingStep(prefill=prefill, start=start, drop=dropped, resume=resumed)

    def _make_room(self, state: ServingState) -> list[int]:
        """Give generating requests room; return the preempted ones."""
        ledger, dropped = state.ledger, list[int]()
        ids = np.array(self._running, dtype=np.int64)
        for request in ids[state.held[ids] + 1 > ledger.room[ids]].tolist():
            while request not in (*dropped, self._partial) and not ledger.grow(
                request, int(state.held[request]) + 1
            ):
                self._drop(state, dropped)
        return dropped

    def _drop(self, state: ServingState, dropped: list[int]) -> None:
        victim = self._running.pop()
        state.ledger.release(victim, tokens=int(state.held[victim]))
        dropped.append(victim)
        self.preemptions += 1
        if victim == self._partial:
            self._partial = None

    def _admit(
        self, state: ServingState, budget: int, prefill: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Add chunks of new requests; return resumed requests' cached tokens."""
        ledger, resumed = state.ledger, list[tuple[int, int]]()
        while self._waiting and budget > 0 and len(self._running) < self._sequences:
            request = self._waiting[0]
            known = int(state.prompt[request] + state.generated[request])
            cached = ledger.cached_tokens(request, known)
            new = min(known - cached, budget)
            if ledger.blocks_for(known) > ledger.free:
                break
            self._running.append(self._waiting.popleft())
            if ledger.resume(request, known):
                resumed.append((request, cached))
            ledger.grow(request, cached + new)
            prefill.append((request, new))
            self._partial = request if cached + new < known else None
            budget -= new
        return resumed
