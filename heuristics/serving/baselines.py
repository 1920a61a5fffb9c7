"""Baselines of EconoServe with blocks as needed or as predicted."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from ...data.arrays import IntArray
from .policy import ServingState, ServingStep


def give_blocks(state: ServingState, going: IntArray) -> list[int]:
    """Give each generating request a block for its token.

    The oldest go first; the youngest, preempted for the others, are returned. The ledger of ``state`` is
    updated.
    """
    ledger, victims = state.ledger, list[int]()
    short = going[state.held[going] + 1 > ledger.room[going]].tolist()
    youngest: list[int] | None = None
    for request in sorted(short, key=lambda r: (state.arrival[r], r)):
        if request in victims:
            continue
        while not ledger.grow(request, int(state.held[request]) + 1):
            if youngest is None:
                youngest = sorted(going.tolist(), key=lambda r: (state.arrival[r], r))
            victim = youngest.pop()
            ledger.release(victim)
            victims.append(victim)
            if victim == request:
                break
    return victims


class _Swapped:
    """Requests on the host, first come, first served."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, int]] = []

    def put(self, state: ServingState, requests: list[int]) -> None:
        for request in requests:
            tokens = int(state.held[request])
            heapq.heappush(self.queue, (float(state.arrival[request]), request, tokens))

    def back(self, state: ServingState, spare: int, most: int) -> list[int]:
        """Return the requests that may return, with ``spare`` blocks left."""
        requests: list[int] = []
        while self.queue and len(requests) < most:
            _, request, tokens = self.queue[0]
            if state.ledger.lacking(request, tokens + 1) > state.ledger.free - spare:
                break
            heapq.heappop(self.queue)
            state.ledger.grow(request, tokens + 1)
            requests.append(request)
        return requests


class Vllm:
    """vLLM as the paper ran it: prompts first, blocks as needed.

    An iteration computes either prompts or generated tokens. New requests are admitted only while the host is
    empty. The youngest are swapped out. DistServe's second device is this rule on requests that arrive with
    their prompts computed.

    watermark: Share of the blocks an admission leaves free.
    received: True if requests arrive with their prompts computed, and wait on the host for room.
    """

    most_tokens, sequences = 2560, 256
    """Most prompt tokens of an iteration (one prompt always fits), and most requests."""

    def __init__(self, *, watermark: float = 0.01, received: bool = False) -> None:
        self._watermark, self._received = watermark, received
        self._waiting: deque[int] = deque()
        self._swapped = _Swapped()
        self._active = 0

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        if self._received:
            for request in state.arrived:
                heapq.heappush(
                    self._swapped.queue,
                    (float(state.arrival[request]), request, int(state.prompt[request])),
                )
        else:
            self._waiting += state.arrived
        self._active -= len(state.finished)
        spare = int(self._watermark * state.ledger.blocks)
        prefill = [] if self._swapped.queue else self._admit(state, spare)
        if prefill:
            return ServingStep(prefill=prefill, start=state.prefilled, decode=False)
        going = np.concatenate((state.running, np.array(state.prefilled, dtype=np.int64)))
        out = give_blocks(state, going)
        self._swapped.put(state, out)
        self._active -= len(out)
        # If nothing runs, the watermark must not block the last request.
        spare = spare if self._active else 0
        back = [] if out else self._swapped.back(state, spare, self.sequences - self._active)
        self._active += len(back)
        start = [request for request in state.prefilled if request not in out]
        return ServingStep(start=start + back, swap_out=out, swap_in=back)

    def _admit(self, state: ServingState, spare: int) -> list[tuple[int, int]]:
        tokens, ledger = 0, state.ledger
        prefill: list[tuple[int, int]] = []
        while self._waiting and self._active < self.sequences:
            request = self._waiting[0]
            prompt = int(state.prompt[request])
            full = prefill and tokens + prompt > self.most_tokens
            if full or ledger.lacking(request, prompt) > ledger.free - (spare if self._active else 0):
                break
            ledger.grow(request, prompt)
            self._waiting.popleft()
            prefill.append((request, prompt))
            tokens += prompt
            self._active += 1
        return prefill


class Sarathi:
    """Sarathi-Serve: every next token, and prompt chunks up to a target.

    Blocks are taken as needed; the youngest request is preempted and recomputed.

    forward_size: Tokens of an iteration.
    watermark: Share of the blocks an admission leaves free.
    """

    sequences = 128
    """Most running requests."""

    def __init__(self, forward_size: int, *, watermark: float = 0.01) -> None:
        self._forward, self._watermark = forward_size, watermark
        self._waiting: deque[int] = deque()
        self._partial: list[int] = []
        self._active = 0

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        self._waiting += state.arrived
        self._active -= len(state.finished)
        going = np.concatenate((state.running, np.array(state.prefilled, dtype=np.int64)))
        ledger = state.ledger
        dropped = give_blocks(state, going)
        self._waiting.extendleft(sorted(dropped, key=lambda r: -state.arrival[r]))
        self._active -= len(dropped)
        budget = self._forward - (len(going) - len(dropped))
        prefill: list[tuple[int, int]] = []
        for request in self._partial:
            prefill.append((request, state.chunk(request, budget)))
            budget -= prefill[-1][1]
        while self._waiting and budget > 0 and self._active < self.sequences and not dropped:
            request = self._waiting[0]
            # A request preempted in this very step has not lost its tokens yet.
            lacks = int(state.prompt[request] + state.generated[request])
            spare = int(self._watermark * ledger.blocks) if self._active else 0
            if ledger.lacking(request, lacks) > ledger.free - spare:
                break
            ledger.grow(request, lacks)
            self._waiting.popleft()
            self._active += 1
            prefill.append((request, min(budget, lacks)))
            budget -= prefill[-1][1]
        self._partial = [request for request, new in prefill if new < state.lacks(request)]
        start = [request for request in state.prefilled if request not in dropped]
        return ServingStep(prefill=prefill, start=start, drop=dropped)


class _Exact:
    """Exact allocation by the predicted need.

    A longer completion takes blocks or is swapped out.
    """

    def __init__(self, forward_size: int) -> None:
        self._forward = forward_size
        self._swapped = _Swapped()

    def _go_on(self, state: ServingState) -> tuple[list[int], list[int], list[int], int]:
        going = np.concatenate((state.running, np.array(state.prefilled, dtype=np.int64)))
        out = give_blocks(state, going)
        self._swapped.put(state, out)
        back = [] if out else self._swapped.back(state, 0, len(state.prompt))
        start = [request for request in state.prefilled if request not in out]
        return start + back, out, back, len(going) - len(out) + len(back)

    @staticmethod
    def _need(state: ServingState, request: int) -> int:
        whole = state.ledger.blocks * state.ledger.block_tokens
        return min(int(state.prompt[request] + state.predicted[request]), whole)


class MultiRes(_Exact):
    """MultiRes: repeatedly the request nearest to the resources left.

    Distances are Euclidean over shares of each resource; allocation is exact. The choice is linear in the
    queue per request, so quadratic in all.
    """

    def __init__(self, forward_size: int = 512) -> None:
        super().__init__(forward_size)
        self._ids: IntArray = np.empty(0, dtype=np.int64)

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        ledger = state.ledger
        if state.arrived:
            self._ids = np.concatenate((self._ids, np.array(state.arrived, dtype=np.int64)))
        start, out, back, decodes = self._go_on(state)
        prefill: list[tuple[int, int]] = []
        compute = self._forward - decodes
        while len(self._ids) and not self._swapped.queue:
            prompt = state.prompt[self._ids]
            memory = ledger.free * ledger.block_tokens
            blocks = -(-(prompt + state.predicted[self._ids]) // ledger.block_tokens)
            blocks = np.minimum(blocks, ledger.blocks) * ledger.block_tokens
            # A prompt above the forward size runs with the generated tokens only, or it would never run.
            fits = (blocks <= memory) & (prompt <= max(compute, 0))
            if not fits.any():
                alone = not prefill and not decodes and ledger.free == ledger.blocks
                if not alone:
                    fits = (blocks <= memory) & (prompt > self._forward) & (not prefill)
                else:
                    fits = blocks <= memory
            if not fits.any():
                break
            distance = ((prompt - compute) / self._forward) ** 2
            distance = distance + ((blocks - memory) / (ledger.blocks * ledger.block_tokens)) ** 2
            at = int(np.argmin(np.where(fits, distance, np.inf)))
            request = int(self._ids[at])
            self._ids = np.delete(self._ids, at)
            ledger.grow(request, self._need(state, request))
            prefill.append((request, int(state.prompt[request])))
            compute -= prefill[-1][1]
        return ServingStep(prefill=prefill, start=start, swap_out=out, swap_in=back)


class SyncCoupled(_Exact):
    """SyncCoupled: whole groups of equal predicted length, oldest first.

    New groups are admitted only when a group is done; allocation is exact for prompt and completion.

    forward_size: Most tokens of an iteration, generated ones included (one prompt always fits).
    """

    def __init__(self, forward_size: int = 512) -> None:
        super().__init__(forward_size)
        self._groups: dict[int, deque[int]] = {}
        self._prompts: deque[int] = deque()
        self._group_of: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self._count = 0
        self._look = True

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        for request in state.arrived:
            self._groups.setdefault(int(state.predicted[request]), deque()).append(request)
        for request in state.finished:
            group = self._group_of.pop(request)
            self._members[group] -= 1
            if not self._members[group]:
                del self._members[group]
                self._look = True
        start, out, back, decodes = self._go_on(state)
        if (self._look or not self._members) and self._groups and not self._swapped.queue:
            self._look = self._fill(state)
        prefill: list[tuple[int, int]] = []
        budget = self._forward - decodes
        while self._prompts and (budget >= state.prompt[self._prompts[0]] or not prefill):
            request = self._prompts.popleft()
            prefill.append((request, int(state.prompt[request])))
            budget -= prefill[-1][1]
        return ServingStep(prefill=prefill, start=start, swap_out=out, swap_in=back)

    def _fill(self, state: ServingState) -> bool:
        """Admit groups; return whether the queue emptied before the memory filled."""
        ledger = state.ledger
        for length in sorted(self._groups, key=lambda n: (state.arrival[self._groups[n][0]], n)):
            queue = self._groups[length]
            admitted = 0
            while queue and ledger.lacking(queue[0], self._need(state, queue[0])) <= ledger.free:
                request = queue.popleft()
                ledger.grow(request, self._need(state, request))
                self._prompts.append(request)
                self._group_of[request] = self._count
                admitted += 1
            if admitted:
                self._members[self._count] = admitted
                self._count += 1
            if queue:
                return False
            del self._groups[length]
        return True
