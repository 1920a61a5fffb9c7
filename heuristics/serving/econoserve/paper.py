"""EconoServe: prompts fill iterations, completions fill the memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from ..kv_ledger import KvLedger
from ..policy import ServingState, ServingStep
from .queue import TaskQueue
from .sizes import EconoServeSizes


class PromptReserve:
    """Reserved blocks, and how many each request uses."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._blocks: dict[int, int] = {}
        self._taken = 0

    def holds(self, ledger: KvLedger, blocks: int) -> bool:
        """Return whether ``blocks`` more blocks are within the reserve."""
        return self._taken + blocks <= int(self._share * ledger.blocks)

    def enter(self, request: int, blocks: int) -> None:
        """Count ``blocks`` more for a request."""
        self._blocks[request] = self._blocks.get(request, 0) + blocks
        self._taken += blocks

    def leave(self, request: int) -> None:
        """Forget a request's blocks."""
        self._taken -= self._blocks.pop(request, 0)

    def free_beyond(self, ledger: KvLedger, leaving: int | None = None) -> int:
        """Return the free blocks beyond the unused reserve.

        ``leaving`` counts as gone.
        """
        reserved = int(self._share * ledger.blocks) - self._taken
        reserved += 0 if leaving is None else self._blocks.get(leaving, 0)
        return ledger.free - max(0, reserved)


class SyncedGroups:
    """Groups of requests, with their members and ends."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self._next = 0

    def new(self) -> int:
        """Return an empty group."""
        self._next += 1
        return self._next

    def join(self, request: int, group: int) -> None:
        """Add a request that is in no group."""
        self._of[request] = group
        self._members[group] = self._members.get(group, 0) + 1

    def leave(self, request: int) -> bool:
        """Remove a request; return whether its group is done."""
        group = self._of.pop(request, None)
        if group is None:
            return False
        self._members[group] -= 1
        if self._members[group]:
            return False
        del self._members[group]
        return True


@dataclass(slots=True)
class _Changes:
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)


class EconoServe:
    """EconoServe's decision for one iteration (its Algorithm 1).

    A prompt takes the reserve or memory that completions left (section 3.3.1). A completion longer than
    predicted takes the reserve, a block at a time (3.3.2). A guest that stays too long moves to host memory
    (3.2).

    One rule is open in the paper: the reserve has no block for a completion longer than predicted. Here it
    pauses in place, and its prediction grows by ``padding`` of its length, at least a block. (The paper's
    L_new, predicted minus generated, would be zero.) If all requests left have paused, the one that holds
    most moves to the host.

    sizes: Memory kept free.
    synced: True to start completions of equal predicted length as a group, and the next group when one is
        done (``-SD``); False to start completions at every iteration (``-D``).
    ordered: True if both queues are in EconoServe's order (``-SDO``) instead of that of arrival.
    lending: True to lend promised but unused memory to completions with computed prompts (full EconoServe).
    """

    def __init__(
        self,
        sizes: EconoServeSizes | None = None,
        *,
        synced: bool = True,
        ordered: bool = True,
        lending: bool = True,
    ) -> None:
        self._sizes = sizes = EconoServeSizes() if sizes is None else sizes
        self._synced, self._lending = synced, lending
        self._prompts = TaskQueue(ordered=ordered)
        self._answers = TaskQueue(ordered=ordered)
        self._host: deque[int] = deque()
        self._away: dict[int, int] = {}
        self._partial: int | None = None
        self._target: dict[int, int] = {}
        self._reserve = PromptReserve(sizes.reserved)
        self._groups = SyncedGroups()
        self._look = True

    def __call__(self, state: ServingState) -> ServingStep:
        """Return the next iteration."""
        changes = _Changes()
        for request in state.arrived:
            self._prompts.push(request, int(state.prompt[request]), float(state.deadline[request]), 0)
        for request in state.finished:
            self._finish(request)
        for request in state.prefilled:
            self._queue_answer(state, request, self._predict(state, request), again=False)
        self._make_room(state, changes)
        while self._host and self._call_back(state, changes, self._available(state)):
            pass
        if self._look or not self._synced:
            self._select(state, changes)
        decodes = len(state.running) + len(changes.start) - len(changes.stop) - len(changes.swap_out)
        prefill = self._fill(state, self._sizes.forward_size - decodes)
        if decodes <= 0 and not prefill and (len(self._answers) or self._host):
            self._unlock(state, changes)
        return ServingStep(
            prefill=prefill,
            start=changes.start,
            stop=changes.stop,
            swap_out=changes.swap_out,
            swap_in=changes.swap_in,
        )

    def _predict(self, state: ServingState, request: int) -> int:
        padded = math.ceil(int(state.predicted[request]) * (1 + self._sizes.padding))
        return max(1, padded - int(state.generated[request]))

    def _more(self, state: ServingState, request: int) -> int:
        """Return the extra length of a completion beyond its prediction."""
        padding = math.ceil(int(state.predicted[request]) * self._sizes.padding)
        return max(padding, state.ledger.block_tokens)

    def _queue_answer(self, state: ServingState, request: int, length: int, *, again: bool) -> None:
        largest = state.ledger.blocks * state.ledger.block_tokens - int(state.held[request])
        length = max(1, min(length, largest))
        self._target[request] = int(state.generated[request]) + length
        deadline = float(state.deadline[request])
        self._answers.push(request, length, deadline, int(state.held[request]), again=again)
        # The queue was empty at its last use, or paused completions may form new groups.
        self._look |= len(self._answers) == 1 or again

    def _finish(self, request: int) -> None:
        self._target.pop(request, None)
        self._reserve.leave(request)
        self._look |= self._groups.leave(request)

    def _make_room(self, state: ServingState, changes: _Changes) -> None:
        """Make room for each running request's token, or stop it."""
        ledger, running = state.ledger, state.running
        if not running.size:
            return
        short = running[state.held[running] + 1 > ledger.room[running]].tolist()
        for request in short:
            if request in changes.swap_out or state.held[request] < ledger.room[request]:
                continue
            guests = ledger.first_guests(request)
            for guest in guests:
                if guest in ledger.loans:
                    self._move_out(state, guest, changes)
            if guests:
                continue
            if request in ledger.loans:
                self._move_out(state, request, changes)
            elif not self._extend(state, request):
                self._look |= self._groups.leave(request)
                changes.stop.append(request)
                self._queue_answer(state, request, self._more(state, request), again=True)

    def _extend(self, state: ServingState, request: int) -> bool:
        """Give a longer completion a reserved block; return success."""
        more = int(state.held[request]) + 1
        if not self._reserve.holds(state.ledger, 1) or not state.ledger.grow(request, more):
            return False
        self._reserve.enter(request, 1)
        return True

    def _move_out(self, state: ServingState, guest: int, changes: _Changes) -> None:
        """Move an overdue guest, with its own guests, to the host."""
        for inner in state.ledger.guests_of(guest):
            self._move_out(state, inner, changes)
        self._send(state, guest, changes)

    def _send(self, state: ServingState, request: int, changes: _Changes) -> None:
        self._look |= self._groups.leave(request)
        self._reserve.leave(request)
        state.ledger.release(request)
        changes.swap_out.append(request)
        self._host.append(request)
        self._away[request] = int(state.held[request])

    def _call_back(self, state: ServingState, changes: _Changes, available: int) -> bool:
        """Resume the first request on the host if it fits."""
        request, ledger = self._host[0], state.ledger
        if request in changes.swap_out:
            return False
        more = self._more(state, request)
        needed = min(self._away[request] + more, ledger.blocks * ledger.block_tokens)
        if ledger.lacking(request, needed) > available:
            return False
        ledger.grow(request, needed)
        self._host.popleft()
        del self._away[request]
        changes.swap_in.append(request)
        changes.start.append(request)
        self._target[request] = int(state.generated[request]) + more
        return True

    def _available(self, state: ServingState, leaving: int | None = None) -> int:
        return self._reserve.free_beyond(state.ledger, leaving)

    def _select(self, state: ServingState, changes: _Changes) -> None:
        """Start completions (line 2) and their guests (line 3)."""
        tokens = state.ledger.block_tokens
        hosts: list[int] = []
        full = False
        while len(self._answers) and not full:
            first, group = self._answers.fitting(self._available(state) * tokens), self._groups.new()
            if first is None or not self._start(state, first, changes, hosts, group):
                break
            length = self._target[first] - int(state.generated[first])
            while self._synced and (same := self._answers.equal(length)) is not None:
                if not self._start(state, same, changes, hosts, group):
                    full = True
                    break
        self._look = False
        if self._lending:
            self._lend_halves(state, hosts, changes)

    def _start(
        self, state: ServingState, request: int, changes: _Changes, hosts: list[int], group: int
    ) -> bool:
        ledger = state.ledger
        needed = int(state.prompt[request]) + self._target[request]
        needed = min(needed, ledger.blocks * ledger.block_tokens)
        if ledger.lacking(request, needed) > self._available(state, request):
            return False
        ledger.grow(request, needed)
        self._begin(request, changes, group)
        hosts.append(request)
        return True

    def _begin(self, request: int, changes: _Changes, group: int) -> None:
        self._answers.remove(request)
        self._reserve.leave(request)
        self._groups.join(request, group)
        if request in changes.stop:
            changes.stop.remove(request)
        else:
            changes.start.append(request)

    def _lend_halves(self, state: ServingState, hosts: list[int], changes: _Changes) -> None:
        """Lend the second half of unused memory, recursively.

        Guests are no longer than l/2 - b, l/4 - b, ..., b being the buffer's share of l, the outermost host's
        predicted length (section 3.2).
        """
        group = self._groups.new()
        regions = deque[tuple[int, int, int, float]]()
        for host in hosts:
            length = self._target[host] - int(state.generated[host])
            end = int(state.prompt[host]) + self._target[host]
            regions.append((host, int(state.held[host]), end, self._sizes.buffer * length))
        while regions and len(self._answers):
            host, begin, end, buffer = regions.popleft()
            end = min(end, begin + self._target[host] - int(state.generated[host]))
            half = (end - begin) // 2
            guest = self._answers.closest(int(half - buffer))
            if guest is None:
                continue
            start = end - half
            self._begin(guest, changes, group)
            state.ledger.lend(host, guest, start, half)
            inside = int(state.held[guest])
            regions.append((host, begin, start, buffer))
            regions.append((guest, inside, int(state.prompt[guest]) + self._target[guest], buffer))

    def _fill(self, state: ServingState, budget: int) -> list[tuple[int, int]]:
        """Choose prompts up to the target forward size (line 5)."""
        prefill: list[tuple[int, int]] = []
        if self._partial is not None:
            begun, self._partial = self._partial, None
            budget = self._chunk(state, begun, budget, prefill)
        while budget > 0 and len(self._prompts) and self._partial is None:
            request = self._prompts.fitting(budget)
            if request is None:
                request = self._prompts.head()
            if request is None or not self._admit(state, request):
                break
            self._prompts.remove(request)
            budget = self._chunk(state, request, budget, prefill)
        return prefill

    def _chunk(self, state: ServingState, request: int, budget: int, prefill: list[tuple[int, int]]) -> int:
        new = state.chunk(request, budget)
        if new < state.lacks(request):
            self._partial = request
        prefill.append((request, new))
        return budget - new

    def _admit(self, state: ServingState, request: int) -> bool:
        ledger, prompt = state.ledger, int(state.prompt[request])
        blocks = ledger.blocks_for(prompt)
        inside = self._reserve.holds(ledger, blocks)
        outside = blocks <= self._available(state) or ledger.free == ledger.blocks
        if blocks > ledger.free or not (inside or outside):
            return False
        ledger.grow(request, prompt)
        if inside:
            self._reserve.enter(request, blocks)
        return True

    def _unlock(self, state: ServingState, changes: _Changes) -> None:
        """Start a request in the reserve, after moving others if needed."""
        ledger = state.ledger
        while (request := self._answers.head()) is not None:
            needed = min(
                int(state.prompt[request]) + self._target[request], ledger.blocks * ledger.block_tokens
            )
            if ledger.lacking(request, needed) <= ledger.free:
                ledger.grow(request, needed)
                self._begin(request, changes, self._groups.new())
                return
            waiting = [other for other in self._answers.tasks() if other != request]
            if not waiting:
                break
            victim = max(waiting, key=lambda other: (int(state.held[other]), other))
            self._answers.remove(victim)
            if victim in changes.stop:
                changes.stop.remove(victim)
            self._send(state, victim, changes)
        if self._host:
            self._call_back(state, changes, ledger.free)
        self._look = True
