"""Loans of memory to requests that end before it is needed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...data.arrays import IntArray
from .econoserve.queue import TaskQueue
from .econoserve.sizes import EconoServeSizes
from .policy import ServingState, ServingStep


class KvForecast:
    """Test of whether one more request fits until its end.

    Each request grows by a token an iteration and frees all at its end, so memory is scarcest just before an
    end. Memory promised for later is lent to requests that will have ended by then. This is EconoServe's KVC
    pipelining (section 3.2) without fixed places for guests, nested to any depth. If no request may stay
    longer than predicted, the peak is that of R. Gong et al.'s Past-Future scheduler (2025).

    capacity: Tokens that may be held.
    held: Tokens each holds, shape (requests,).
    rest: Tokens each will still generate, shape (requests,).
    stay: Iterations each may still be there, at least ``rest``, shape (requests,).
    """

    def __init__(self, capacity: int, held: IntArray, rest: IntArray, stay: IntArray) -> None:
        self._capacity = capacity
        self.promised = int(held.sum() + rest.sum())
        """Sum of the tokens all hold at their ends."""
        self._held, self._rest, self._stay = held.tolist(), rest.tolist(), stay.tolist()
        # Free tokens by iterations from now, filled on demand; and a lower bound of it at any time.
        self._free: IntArray | None = None
        self._least = capacity - self.promised

    def add(self, held: int, rest: int, stay: int) -> None:
        """Add a request."""
        self.promised += held + rest
        self._least -= held + rest
        if self._free is None:
            self._held.append(held)
            self._rest.append(rest)
            self._stay.append(stay)
            return
        free = self._until(stay)
        free[:rest] -= np.arange(held, held + rest)
        free[rest : stay + 1] -= held + rest

    def fits(self, held: int, rest: int, stay: int) -> bool:
        """Return whether one more request fits until its end."""
        peak = held + rest
        if peak <= self._least:
            return True
        free = self._until(stay)
        self._least = int(free[free.argmin()])
        if peak <= self._least:
            return True
        # For such short arrays, numpy counts in a third of the time that a minimum takes.
        if np.count_nonzero(free[rest : stay + 1] < peak):
            return False
        return not np.count_nonzero(free[:rest] < np.arange(held, peak))

    def may_fit(self, held: IntArray, rest: IntArray, stay: IntArray) -> NDArray[np.bool_]:
        """Return False for requests that clearly do not fit, each tested alone.

        held, rest: KV tokens of each request now, and tokens left to generate, shape (requests,).
        stay: Iterations until each request must be gone, shape (requests,).
        """
        if not len(rest):
            return np.zeros(0, dtype=np.bool_)
        free = self._until(int(stay.max()))
        growing = np.minimum.accumulate(free[: rest.max()] - np.arange(rest.max()))
        may: NDArray[np.bool_] = held <= np.minimum(
            growing[rest - 1], np.minimum(free[rest], free[stay]) - rest
        )
        return may

    def _until(self, end: int) -> IntArray:
        """Return the free tokens of the next ``end`` iterations."""
        free = self._count() if self._free is None else self._free
        if len(free) <= end:
            free = np.append(free, np.full(2 * end - len(free) + 1, self._capacity))
        self._free = free
        return free

    def _count(self) -> IntArray:
        columns = (self._held, self._rest, self._stay)
        kv_tokens, rest, stay = (np.array(column, dtype=np.int64) for column in columns)
        after = stay + 1
        last = int(after.max(initial=0))
        taken = np.bincount(after, kv_tokens + rest, last + 1).astype(np.int64)
        # Each request that still generates takes one more token an iteration.
        taken[1:] -= (len(rest) - np.cumsum(np.bincount(rest, minlength=last + 1)))[:-1]
        taken[0] -= kv_tokens.sum()
        free: IntArray = self._capacity + np.cumsum(taken)
        return free


_TRIED = 8
"""Most lengths to search for one that fits."""
_LISTED = 8
"""Requests to check one by one before a vector test of all."""


class Pipelined:
    """Scheduler of this project, which lends all unused memory.

    Its order, its sizes and the idea of lending are EconoServe's (section 3.2). A request is promised its
    predicted need, but only from the time it needs it. Until then, a request predicted to end in time may run
    in that memory, prompt and completion (:class:`KvForecast`). Blocks are taken one at a time.

    The first request in EconoServe's order begins if it fits. Otherwise, with deadlines, one of the smallest
    begins, as it ends soonest; without, the largest that fits, as it fills best. A completion longer than
    predicted continues, in the reserve's blocks as well. If blocks run out, the request that began last moves
    to the host.

    sizes: Memory kept free. A completion begins when its prompt is done.
    """

    def __init__(self, sizes: EconoServeSizes | None = None) -> None:
        self._sizes = EconoServeSizes() if sizes is None else sizes
        self._prompts = TaskQueue(ordered=True)
        """Requests not begun, by prompt and predicted completion together."""
        self._host: dict[int, int] = {}
        """Requests on the host, with the tokens each held."""
        self._partial: int | None = None
        """The request with a partly computed prompt."""
        self._end: IntArray = np.zeros(0, dtype=np.int64)
        """Tokens of each completion as predicted now, shape (requests,)."""
        self._look = False
        """True if a request arrived or ended since the last failed search."""
        self._begun: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """True for requests that have begun, shape (requests,)."""
        self._waiting: IntArray = np.zeros(0, dtype=np.int64)
        """Requests without a deadline as sorted last, largest first; some may have begun since."""
        self._came: list[int] = []
        """Requests without a deadline that arrived since."""
        self._candidates: IntArray | None = None
        """Requests without a deadline that may fit in this iteration; None before the search."""

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        if not len(self._end):
            self._end = np.zeros(len(state.prompt), dtype=np.int64)
            self._begun = np.zeros(len(state.prompt), dtype=np.bool_)
        for request in state.arrived:
            answer = max(1, math.ceil(int(state.predicted[request]) * (1 + self._sizes.padding)))
            self._end[request] = answer
            length = int(state.prompt[request]) + answer
            self._prompts.push(request, length, float(state.deadline[request]), 0)
            if not math.isfinite(state.deadline[request]):
                self._came.append(request)
        self._look |= bool(state.arrived or state.finished)
        going, sent = self._make_room(state)
        back = [] if sent else self._call_back(state, going)
        going = np.append(going, np.array(back, dtype=np.int64))
        prefill = self._fill(state, going)
        started = [request for request in state.prefilled if request not in sent]
        return ServingStep(prefill, start=started + back, swap_out=sent, swap_in=back)

    def _make_room(self, state: ServingState) -> tuple[IntArray, list[int]]:
        """Make room for tokens; return generating and evicted requests."""
        ledger = state.ledger
        going = np.append(state.running, np.array(state.prefilled, dtype=np.int64))
        self._extend(state, going)
        sent: list[int] = []
        rest = len(going)
        for request in going[state.held[going] + 1 > ledger.room[going]].tolist():
            while request not in sent and not ledger.grow(request, int(state.held[request]) + 1):
                # The last one in is a guest in memory promised to the others.
                rest -= 1
                guest = int(going[rest])
                self._send(state, guest)
                sent.append(guest)
        return going[:rest], sent

    def _extend(self, state: ServingState, going: IntArray) -> None:
        """Raise predictions that completions exceed."""
        over = going[state.generated[going] >= self._end[going]]
        padding = np.ceil(state.predicted[over] * self._sizes.padding).astype(np.int64)
        self._end[over] = state.generated[over] + np.maximum(padding, 1)

    def _send(self, state: ServingState, request: int) -> None:
        state.ledger.release(request)
        self._host[request] = int(state.held[request])

    def _call_back(self, state: ServingState, going: IntArray) -> list[int]:
        """Return the requests on the host that fit again, in order."""
        back: list[int] = []
        ledger = state.ledger
        alone = not going.size and self._partial is None
        for request, tokens in tuple(self._host.items()):
            reserved = 0 if alone and not back else int(self._sizes.reserved * ledger.blocks)
            if ledger.lacking(request, tokens + 1) > ledger.free - reserved:
                break
            ledger.grow(request, tokens + 1)
            del self._host[request]
            back.append(request)
        return back

    def _fill(self, state: ServingState, going: IntArray) -> list[tuple[int, int]]:
        prefill: list[tuple[int, int]] = []
        budget = self._sizes.forward_size - len(going)
        if self._partial is not None:
            partial, self._partial = self._partial, None
            budget = self._chunk(state, partial, budget, prefill)
        # No request begins before those on the host have returned.
        if self._host or not self._look:
            return prefill
        begun = np.array([request for request, _ in prefill], dtype=np.int64)
        forecast = self._forecast(state, np.append(going, begun))
        self._candidates = None
        while budget > 0 and self._partial is None:
            request = self._next(state, forecast)
            if request is None:
                self._look = False
                break
            self._begin(state, request, forecast)
            budget = self._chunk(state, request, budget, prefill)
        return prefill

    def _forecast(self, state: ServingState, there: IntArray) -> KvForecast:
        ledger = state.ledger
        capacity = int(ledger.blocks * ledger.block_tokens * (1 - self._sizes.reserved))
        kv_tokens = np.maximum(state.held[there], state.prompt[there]) + ledger.block_tokens // 2
        rest = np.maximum(self._end[there] - state.generated[there], 1)
        return KvForecast(capacity, kv_tokens, rest, self._stays(rest))

    def _stay(self, rest: int) -> int:
        """Return how many iterations a request may stay."""
        return math.ceil(rest * (1 + self._sizes.buffer))

    def _stays(self, rest: IntArray) -> IntArray:
        stays: IntArray = np.ceil(rest * (1 + self._sizes.buffer)).astype(np.int64)
        return stays

    def _next(self, state: ServingState, forecast: KvForecast) -> int | None:
        queue = self._prompts
        first = queue.head()
        if first is None or self._fits(state, first, forecast):
            return first
        if not math.isfinite(state.deadline[first]):
            return self._largest(state, forecast)
        shortest = queue.shortest(_TRIED)
        return next((request for request in shortest if self._fits(state, request, forecast)), None)

    def _largest(self, state: ServingState, forecast: KvForecast) -> int | None:
        """Return the oldest of the largest requests that fit, or None."""
        if self._candidates is None:
            self._list(state)
            self._candidates = self._that_may(state, forecast, self._waiting)
        # Memory only gets scarcer within an iteration: a request that does not fit now never will.
        while len(self._candidates):
            some, self._candidates = self._candidates[:_LISTED], self._candidates[_LISTED:]
            some = some[~self._begun[some]]
            tried: list[int] = some.tolist()
            for at, request in enumerate(tried):
                if self._fits(state, request, forecast):
                    self._candidates = np.append(some[at + 1 :], self._candidates)
                    return request
            self._candidates = self._that_may(state, forecast, self._candidates)
        return None

    def _list(self, state: ServingState) -> None:
        if self._came:
            ids = np.append(self._waiting, np.array(self._came, dtype=np.int64))
            ids.sort()
            ids = ids[np.argsort(state.arrival[ids], kind="stable")]
            self._waiting = ids[np.argsort(-(state.prompt[ids] + self._end[ids]), kind="stable")]
            self._came = []
        self._waiting = self._waiting[~self._begun[self._waiting]]

    def _that_may(self, state: ServingState, forecast: KvForecast, ids: IntArray) -> IntArray:
        tokens, prompt, rest = state.ledger.block_tokens, state.prompt[ids], self._end[ids]
        kv_tokens = prompt + tokens // 2
        return ids[
            forecast.may_fit(kv_tokens, rest, self._stays(rest)) & (prompt <= state.ledger.free * tokens)
        ]

    def _fits(self, state: ServingState, request: int, forecast: KvForecast) -> bool:
        ledger, prompt = state.ledger, int(state.prompt[request])
        if ledger.blocks_for(prompt) > ledger.free:
            return False
        kv_tokens, rest = prompt + ledger.block_tokens // 2, int(self._end[request])
        return forecast.fits(kv_tokens, rest, self._stay(rest)) or ledger.free == ledger.blocks

    def _begin(self, state: ServingState, request: int, forecast: KvForecast) -> None:
        ledger, prompt = state.ledger, int(state.prompt[request])
        self._prompts.remove(request)
        self._begun[request] = True
        ledger.grow(request, prompt)
        kv_tokens, rest = prompt + ledger.block_tokens // 2, int(self._end[request])
        forecast.add(kv_tokens, rest, self._stay(rest))
        # Promised tokens beyond the capacity.
        beyond = forecast.promised - ledger.blocks * ledger.block_tokens
        ledger.lent_tokens += min(max(beyond, 0), prompt + int(self._end[request]))

    def _chunk(self, state: ServingState, request: int, budget: int, prefill: list[tuple[int, int]]) -> int:
        new = state.chunk(request, budget)
        if new == budget and new < state.lacks(request):
            self._partial = request
        prefill.append((request, new))
        return budget - new
