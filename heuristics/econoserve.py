"""EconoServe: prompts fill the iteration, answers fill the memory, and unused memory is lent."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappush, heapreplace

from .econoserve_settings import EconoServeSettings
from .guest_queue import GuestQueue
from .serving_policy import ServingState, Step
from .task_queue import TaskQueue


@dataclass(slots=True)
class _Changes:
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    swap_out: list[int] = field(default_factory=list)
    swap_in: list[int] = field(default_factory=list)


class EconoServe:
    """
    EconoServe's decision for one iteration (its Algorithm 1).

    Where the paper leaves the rule open: a prompt beyond the reserved memory is begun only if no answer waits
    and its own answer will fit; an answer longer than predicted asks for a block at a time, and when there is
    none it pauses in place, predicted to need ``padding`` of its length more (the paper's L_new, predicted
    minus generated, would be zero), at least a block; when everything left has paused so, the one that holds
    most is moved to the host.

    Parameters
    ----------
    settings
        Parts and sizes.
    """

    def __init__(self, settings: EconoServeSettings | None = None) -> None:
        self.settings = settings = EconoServeSettings() if settings is None else settings
        self._prompts = TaskQueue(ordered=settings.ordered)
        self._answers = TaskQueue(ordered=settings.ordered)
        # Prompts again, by what they need of a lent part.
        self._guests = GuestQueue()
        self._host: deque[int] = deque()
        self._away: dict[int, int] = {}
        self._partial: int | None = None
        self._target: dict[int, int] = {}
        # Blocks of requests between the start of their prompt and that of their answer.
        self._parked: dict[int, int] = {}
        self._parked_blocks = 0
        self._group_of: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self._groups = 0
        self._look = True
        self._lends_whole = settings.pipelined and settings.hosted == "requests"
        # Whether a part of a region may have become lendable since the last search.
        self._gaps = False

    def __call__(self, state: ServingState) -> Step:
        """Return the next iteration."""
        changes = _Changes()
        self._gaps |= bool(state.arrived or state.finished or state.prefilled)
        for request in state.arrived:
            prompt = int(state.prompt[request])
            self._prompts.push(request, prompt, float(state.deadline[request]), 0)
            if self._lends_whole:
                answer = self._predict(state, request)
                self._guests.push(request, prompt, answer, 2 * prompt // self.settings.forward_size)
        for request in state.finished:
            self._finish(request)
        for request in state.prefilled:
            if request in state.ledger.loans:
                # A guest as a whole goes on where its prompt was computed.
                self._join(request, changes, self._groups)
                self._groups += 1
            else:
                self._queue_answer(state, request, self._predict(state, request), again=False)
        self._make_room(state, changes)
        while self._host and self._call_back(state, changes, self._available(state)):
            pass
        if self._look or not self.settings.synced:
            self._select(state, changes)
        decodes = len(state.running) + len(changes.start) - len(changes.stop) - len(changes.swap_out)
        prefill = self._fill(state, self.settings.forward_size - decodes)
        if self._lends_whole and self._gaps:
            self._host_requests(state, changes, self.settings.forward_size - decodes, prefill)
        if decodes <= 0 and not prefill and (len(self._answers) or self._host):
            self._unlock(state, changes)
        return Step(
            prefill=prefill,
            start=changes.start,
            stop=changes.stop,
            swap_out=changes.swap_out,
            swap_in=changes.swap_in,
        )

    def _predict(self, state: ServingState, request: int) -> int:
        padded = math.ceil(int(state.predicted[request]) * (1 + self.settings.padding))
        return max(1, padded - int(state.generated[request]))

    def _more(self, state: ServingState, request: int) -> int:
        more = math.ceil(int(state.predicted[request]) * self.settings.padding)
        return max(more, state.ledger.block_tokens)

    def _queue_answer(self, state: ServingState, request: int, length: int, *, again: bool) -> None:
        most = state.ledger.blocks * state.ledger.block_tokens - int(state.held[request])
        length = max(1, min(length, most))
        self._target[request] = int(state.generated[request]) + length
        deadline = float(state.deadline[request])
        self._answers.push(request, length, deadline, int(state.held[request]), again=again)
        # The queue was exhausted when it was last looked at, or what paused may be grouped anew.
        self._look |= len(self._answers) == 1 or again

    def _finish(self, request: int) -> None:
        self._target.pop(request, None)
        self._unpark(request)
        self._leave_group(request)

    def _leave_group(self, request: int) -> None:
        group = self._group_of.pop(request, None)
        if group is not None:
            self._members[group] -= 1
            if not self._members[group]:
                del self._members[group]
                self._look = True

    def _unpark(self, request: int) -> None:
        self._parked_blocks -= self._parked.pop(request, 0)

    def _make_room(self, state: ServingState, changes: _Changes) -> None:
        """See to it that everyone running may write its next token, or stops."""
        ledger, running = state.ledger, state.running
        if not running.size:
            return
        short = running[state.held[running] + 1 > ledger.room[running]].tolist()
        for request in short:
            if request in changes.swap_out or state.held[request] < ledger.room[request]:
                continue
            guests = ledger.first_guests(request)
            for guest in guests:
                self._move_out(state, guest, changes)
            if guests:
                continue
            if request in ledger.loans:
                self._move_out(state, request, changes)
            elif self.settings.shortage == "offload":
                self._send(state, request, changes)
            elif self.settings.shortage == "pause" or not ledger.grow(request, int(state.held[request]) + 1):
                self._leave_group(request)
                changes.stop.append(request)
                self._queue_answer(state, request, self._more(state, request), again=True)

    def _move_out(self, state: ServingState, guest: int, changes: _Changes) -> None:
        """Move a guest that overstays to blocks of its own, or to the host."""
        for inner in state.ledger.guests_of(guest):
            self._move_out(state, inner, changes)
        held = int(state.held[guest])
        left = max(self._target[guest] - int(state.generated[guest]), 1)
        if state.ledger.settle(guest, held + left) or state.ledger.settle(guest, held + 1):
            return
        self._send(state, guest, changes)

    def _send(self, state: ServingState, request: int, changes: _Changes) -> None:
        self._leave_group(request)
        self._unpark(request)
        state.ledger.release(request)
        changes.swap_out.append(request)
        self._host.append(request)
        self._away[request] = int(state.held[request])

    def _call_back(self, state: ServingState, changes: _Changes, available: int) -> bool:
        """Let the first request on the host go on if the blocks are there, and return whether they were."""
        request = self._host[0]
        whole = state.ledger.blocks * state.ledger.block_tokens
        needed = min(self._away[request] + self._more(state, request), whole)
        if request in changes.swap_out or state.ledger.lacking(request, needed) > available:
            return False
        self._host.popleft()
        state.ledger.grow(request, needed)
        del self._away[request]
        changes.swap_in.append(request)
        changes.start.append(request)
        self._target[request] = int(state.generated[request]) + self._more(state, request)
        return True

    def _reserved(self, state: ServingState) -> int:
        return int(self.settings.reserved * state.ledger.blocks)

    def _available(self, state: ServingState, leaving: int = 0) -> int:
        """Return the blocks for answers: what is free, less what of the reserve is not in use."""
        kept = self._reserved(state) - (self._parked_blocks - leaving)
        return state.ledger.free - max(0, kept)

    def _select(self, state: ServingState, changes: _Changes) -> None:
        """Start answers until the memory is given away (line 2), and their guests (line 3)."""
        tokens = state.ledger.block_tokens
        hosts: list[int] = []
        full = False
        while len(self._answers) and not full:
            first = self._answers.fitting(self._available(state) * tokens)
            if first is None or not self._start(state, first, changes, hosts):
                break
            length = self._target[first] - int(state.generated[first])
            while self.settings.synced and (same := self._answers.equal(length)) is not None:
                if not self._start(state, same, changes, hosts, group=self._groups):
                    full = True
                    break
            self._groups += 1
        self._look = False
        if self.settings.pipelined and hosts and len(self._answers):
            self._lend(state, hosts, changes)

    def _start(
        self,
        state: ServingState,
        request: int,
        changes: _Changes,
        hosts: list[int],
        group: int | None = None,
    ) -> bool:
        ledger = state.ledger
        needed = int(state.prompt[request]) + self._target[request]
        needed = min(needed, ledger.blocks * ledger.block_tokens)
        if ledger.lacking(request, needed) > self._available(state, self._parked.get(request, 0)):
            return False
        ledger.grow(request, needed)
        self._begin(request, changes, self._groups if group is None else group)
        hosts.append(request)
        return True

    def _begin(self, request: int, changes: _Changes, group: int) -> None:
        self._answers.remove(request)
        self._unpark(request)
        self._gaps = True
        self._join(request, changes, group)

    def _join(self, request: int, changes: _Changes, group: int) -> None:
        self._group_of[request] = group
        self._members[group] = self._members.get(group, 0) + 1
        if request in changes.stop:
            changes.stop.remove(request)
        else:
            changes.start.append(request)

    def _lend(self, state: ServingState, hosts: list[int], changes: _Changes) -> None:
        """Give the second half of what is unused to an answer half as long, and so on in both halves."""
        regions = deque(
            (host, int(state.held[host]), int(state.prompt[host]) + self._target[host]) for host in hosts
        )
        while regions and len(self._answers):
            host, begin, end = regions.popleft()
            end = min(end, begin + self._target[host] - int(state.generated[host]))
            half = (end - begin) // 2
            # A buffer's share, but never less than a token: the guest ends before the host comes.
            guest = self._answers.closest(int(half * (1 - self.settings.buffer)))
            if guest is None:
                continue
            start = end - half
            self._begin(guest, changes, self._groups)
            state.ledger.lend(host, guest, start, half)
            inside = int(state.held[guest])
            regions.append((host, begin, start))
            regions.append((guest, inside, int(state.prompt[guest]) + self._target[guest]))
        self._groups += 1

    def _fill(self, state: ServingState, budget: int) -> list[tuple[int, int]]:
        """Choose prompts up to the target forward size (line 5); the last one may be a chunk."""
        prefill: list[tuple[int, int]] = []
        if self._partial is not None:
            begun, self._partial = self._partial, None
            budget = self._chunk(state, begun, budget, prefill)
        while budget > 0 and len(self._prompts) and self._partial is None:
            request = self._prompts.fitting(budget)
            if request is None:
                request = self._prompts.head()
            if request is None or not self._park(state, request):
                break
            self._take_prompt(request)
            budget = self._chunk(state, request, budget, prefill)
        return prefill

    def _take_prompt(self, request: int) -> None:
        self._prompts.remove(request)
        if self._lends_whole:
            self._guests.remove(request)

    def _host_requests(
        self, state: ServingState, changes: _Changes, budget: int, prefill: list[tuple[int, int]]
    ) -> None:
        """Lend what running requests have not used to requests that wait, the largest part first."""
        # Of whoever comes back from the host this state does not show what it will hold.
        ledger, away = state.ledger, {*changes.stop, *changes.swap_out, *changes.swap_in}
        budget -= sum(new for _, new in prefill)
        parts = [
            (int(state.held[host] - ledger.room[host]), host, int(state.held[host]))
            for host in (*state.running.tolist(), *changes.start)
            if host not in away
        ]
        heapify(parts)
        while parts and budget > 0 and self._partial is None:
            size, host, begin = -parts[0][0], *parts[0][1:]
            found = self._closest_guest(state, size)
            if found is None:
                break
            guest, needs, whole = found
            prompt = int(state.prompt[guest])
            if whole and prompt > budget:
                return
            if not whole:
                ledger.grow(guest, prompt)
            self._take_prompt(guest)
            self._target[guest] = answer = self._predict(state, guest)
            # What the part is larger than need be is shared between more time and more room.
            lent = (prompt if whole else 0) + answer + (size - needs) // 2
            ledger.lend(host, guest, begin + size - lent, lent)
            budget = self._chunk(state, guest, budget, prefill)
            heapreplace(parts, (lent - size, host, begin))
            heappush(parts, (prompt - int(ledger.room[guest]), guest, prompt))
        self._gaps = bool(parts) and (budget <= 0 or self._partial is not None)

    def _closest_guest(self, state: ServingState, tokens: int) -> tuple[int, int, bool] | None:
        """Return who fits a part best, what it needs of it, and whether as a whole, or None."""
        most = int(tokens * (1 - self.settings.buffer))
        if (found := self._guests.closest(most, whole=True)) is not None:
            return *found, True
        found = self._guests.closest(most, whole=False)
        if found is None or state.ledger.lacking(found[0], int(state.prompt[found[0]])) > state.ledger.free:
            return None
        return *found, False

    def _chunk(self, state: ServingState, request: int, budget: int, prefill: list[tuple[int, int]]) -> int:
        lacks = state.lacks(request)
        new = max(1, min(budget, lacks))
        if new < lacks:
            self._partial = request
        prefill.append((request, new))
        return budget - new

    def _park(self, state: ServingState, request: int) -> bool:
        ledger = state.ledger
        prompt = int(state.prompt[request])
        blocks = ledger.blocks_for(prompt)
        if self._parked_blocks + blocks > self._reserved(state):
            answer = self._predict(state, request)
            whole = min(ledger.blocks_for(prompt + answer), ledger.blocks)
            alone = ledger.free == ledger.blocks
            if len(self._answers) or whole > ledger.free or not (self.settings.beyond_reserve or alone):
                return False
        if blocks > ledger.free:
            return False
        ledger.grow(request, prompt)
        self._parked[request] = blocks
        self._parked_blocks += blocks
        return True

    def _unlock(self, state: ServingState, changes: _Changes) -> None:
        """Start something although the reserve is touched, at worst by moving others to the host."""
        ledger = state.ledger
        while (request := self._answers.head()) is not None:
            needed = min(
                int(state.prompt[request]) + self._target[request], ledger.blocks * ledger.block_tokens
            )
            if ledger.lacking(request, needed) <= ledger.free:
                ledger.grow(request, needed)
                self._begin(request, changes, self._groups)
                self._groups += 1
                return
            others = [other for other in self._answers.tasks() if other != request]
            if not others:
                break
            victim = max(others, key=lambda other: (int(state.held[other]), other))
            self._answers.remove(victim)
            if victim in changes.stop:
                changes.stop.remove(victim)
            self._send(state, victim, changes)
        if self._host:
            self._call_back(state, changes, ledger.free)
        self._look = True
