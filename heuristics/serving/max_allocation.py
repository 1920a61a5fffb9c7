"""Baselines of EconoServe with the longest possible allocation."""

from __future__ import annotations

import heapq
from collections import deque

from .policy import ServingState, ServingStep


class Orca:
    """ORCA: first come, first served, a fixed batch with max-allocation.

    longest: Tokens of the longest possible sequence.
    batch: Most running requests.
    """

    def __init__(self, longest: int, batch: int = 8) -> None:
        self._longest, self._batch = longest, batch
        self._waiting: deque[int] = deque()
        self._active = 0

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        self._waiting += state.arrived
        self._active -= len(state.finished)
        prefill = []
        while self._waiting and self._active < self._batch:
            if not state.ledger.grow(self._waiting[0], self._longest):
                break
            request = self._waiting.popleft()
            prefill.append((request, state.lacks(request)))
            self._active += 1
        return ServingStep(prefill=prefill, start=state.prefilled)


class _Preemptive:
    """Policy of the best few requests; the others are swapped out."""

    def __init__(self, longest: int, batch: int | None) -> None:
        self._longest, self._batch = longest, batch
        self._queue: list[tuple[float, int, int]] = []
        self._active: dict[int, float] = {}
        self._away: set[int] = set()

    def _change(self, state: ServingState, leaving: list[int]) -> ServingStep:
        """Fill the slots; requests in ``leaving`` may return at once."""
        ledger = state.ledger
        places = ledger.blocks // ledger.blocks_for(self._longest)
        places = places if self._batch is None else min(places, self._batch)
        chosen: list[int] = []
        while self._queue and len(self._active) < places:
            key, _, request = heapq.heappop(self._queue)
            self._active[request] = key
            chosen.append(request)
        out = [request for request in leaving if request not in self._active]
        for request in out:
            ledger.release(request)
        prefill, swap_in, start = [], [], []
        for request in chosen:
            if request in leaving:
                continue
            ledger.grow(request, self._longest)
            if request in self._away:
                self._away.discard(request)
                swap_in.append(request)
                start.append(request)
            else:
                prefill.append((request, state.lacks(request)))
        self._away.update(out)
        begun = [request for request in state.prefilled if request in self._active]
        return ServingStep(prefill=prefill, start=begun + start, swap_out=out, swap_in=swap_in)


class ShortestRemaining(_Preemptive):
    """SRTF: requests with the fewest tokens left, with max-allocation."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest, None)

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        for request in state.finished:
            del self._active[request]
        for request in state.arrived:
            heapq.heappush(self._queue, (float(state.predicted[request]), request, request))
        leaving: list[int] = []
        if state.arrived and self._queue:
            remaining = {
                request: max(1.0, float(state.predicted[request] - state.generated[request]))
                for request in self._active
            }
            for key, _, _ in heapq.nsmallest(len(remaining), self._queue):
                longest = max(remaining, key=remaining.__getitem__, default=-1)
                if longest < 0 or remaining[longest] <= key:
                    break
                leaving.append(longest)
                heapq.heappush(self._queue, (remaining.pop(longest), longest, longest))
                del self._active[longest]
        return self._change(state, leaving)


class FastServe(_Preemptive):
    """FastServe: queues of falling priority, with a quantum each.

    A request that uses up its quantum moves to the next queue. Each quantum is twice the last. Skip-join: a
    request enters the first queue with a quantum for its prompt.
    """

    batch = 8
    """Most running requests."""
    levels, quantum = 5, 16
    """Number of queues, and the first quantum in generated tokens."""
    prompt_tokens = 128
    """Prompt tokens that count as one generated."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest, self.batch)
        self._until: dict[int, int] = {}
        self._turn = 0

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        for request in state.finished:
            del self._active[request]
        for request in state.arrived:
            level = 0
            weight = int(state.prompt[request]) // self.prompt_tokens
            while level < self.levels - 1 and self.quantum << level < weight:
                level += 1
            self._enter(request, level, 0)
        leaving = []
        for request in [r for r in self._active if state.generated[r] >= self._until[r]]:
            level = int(self._active.pop(request)) + 1
            self._enter(request, level, int(state.generated[request]))
            leaving.append(request)
        while self._queue and self._active:
            lowest = max(self._active, key=self._active.__getitem__)
            if self._queue[0][0] >= self._active[lowest] or len(leaving) >= len(self._queue):
                break
            level = int(self._active.pop(lowest))
            self._enter(lowest, level, int(state.generated[lowest]))
            leaving.append(lowest)
        return self._change(state, leaving)

    def _enter(self, request: int, level: int, generated: int) -> None:
        self._turn += 1
        heapq.heappush(self._queue, (float(level), self._turn, request))
        last = level >= self.levels - 1
        self._until[request] = 2**60 if last else generated + (self.quantum << level)
