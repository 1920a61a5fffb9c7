"""Dispatch of requests to servers in a plan's order: a state machine without tasks and I/O."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...data.readers.server_batch import ServerBatch, ServerRequest
from ..jobs.params import RunParams, running_of
from .reply import Kind, Reply

_LONG = 10**6
"""Tokens of a completion whose length is unknown."""


def queue_of(slots: int, largest: int = 1) -> int:
    """Return the completions to keep waiting on a server: at least those of one request."""
    return max(4, slots // 8, largest)


def in_flight_of(slots: int, largest: int = 1) -> int:
    """
    Return the number of completions to keep in flight on a server.

    As many as there are slots would leave each slot empty from one completion until the next request comes;
    a few that wait in the server's queue fill it at once.

    largest: Completions of one request that are expected to run, at most.
    """
    return slots + queue_of(slots, largest)


@dataclass(frozen=True, slots=True)
class Served:
    """
    Outcome of one request.

    request: Its position.
    server: The server of the last attempt.
    reply: The last attempt.
    sent, finished: Seconds after the start, of the last attempt.
    """

    request: int
    server: int
    reply: Reply
    sent: float
    finished: float


class _Queue:
    """Requests in flight on a server, in the order they were sent: those beyond the slots wait."""

    def __init__(self, slots: int | None) -> None:
        self._slots, self._running_weight = slots, 0
        self._running: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        self.waiting_tokens = 0

    def add(self, request: int, weight: int, tokens: int) -> None:
        """Note that a request was sent, with its completions and the tokens of all of them."""
        self._waiting[request] = weight, tokens
        self.waiting_tokens += tokens
        self._admit()

    def remove(self, request: int) -> None:
        """Note that a request has ended; the next ones that wait take its slots."""
        if request in self._running:
            self._running_weight -= self._running.pop(request)
        else:
            self.waiting_tokens -= self._waiting.pop(request)[1]
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            request = next(iter(self._waiting))
            weight, tokens = self._waiting[request]
            if self._running and self._slots is not None and self._running_weight + weight > self._slots:
                return
            del self._waiting[request]
            self.waiting_tokens -= tokens
            self._running[request] = weight
            self._running_weight += weight


class _Server:
    def __init__(self, room: int, slots: int | None, params: RunParams) -> None:
        self.most, self.held, self.flying, self.sequences = room, 0, 0, 0
        self.slots, self.ever = slots, params.most_in_flight * room
        self.queue, self._params = _Queue(slots), params
        self.down = self.was_down = self.too_long = self.completed = False
        self.paused_until = self.broke_at = self.told_until = 0.0
        self.breaks = 0

    @property
    def alone(self) -> bool:
        """Whether requests go one at a time, to find the one that breaks the server."""
        return self.breaks >= self._params.patience.breaks_before_alone

    def takes(self, weight: int, now: float) -> bool:
        """Return whether a request of that many completions can be sent now."""
        if self.down or now < self.paused_until:
            return False
        if self.flying == 0:
            return True
        most = self.ever if self._queue_is_short(weight) else self.most
        return not self.alone and self.held + weight <= most

    def _queue_is_short(self, weight: int) -> bool:
        """Return whether the queue ends so soon that the way to the client takes longer."""
        if self.slots is None or self.held + weight <= self.most:
            return False
        return self.queue.waiting_tokens < self._params.queue_iterations * self.slots


class Dispatch:
    """
    Releases requests in order, the next one wherever there is room, until each has its outcome.

    A request that failed goes back to its place in the order. A server that cannot be reached gets no request
    until it is reachable again; its requests go to the others, or back to it.

    servers: Number of servers: replicas of one another.
    in_flight: Completions in flight on each; of a request with several those that are expected to run. Where
        ``slots`` is given the number rises, at most to ``most_in_flight`` times as many, while a server's
        queue is seen to be empty or is short.
    params: Retries, and the length of a server's queue.
    rng: Of the waits.
    proven: Whether requests of this job were completed before, so that failures are their own.
    slots: Completions that each server works on at a time; None to keep to ``in_flight``.
    on_wait: Called with a server's position, its reply and the seconds it asks to wait, once a wait, where
        that is longer than any of ours.
    """

    def __init__(
        self,
        requests: Sequence[ServerRequest],
        servers: int,
        in_flight: int,
        params: RunParams,
        rng: random.Random,
        *,
        proven: bool = False,
        slots: int | None = None,
        on_wait: Callable[[int, Reply, float], None] | None = None,
    ) -> None:
        self._patience, self._rng = params.patience, rng
        self._on_wait = on_wait
        self._servers = [_Server(in_flight, slots, params) for _ in range(servers)]
        batch = ServerBatch.of(requests)
        self._choices = batch.choices.tolist()
        self._tokens = (np.where(batch.stated > 0, batch.stated, batch.caps) * batch.choices).tolist()
        self._weight = [running_of(choices, params.running_share) for choices in self._choices]
        largest = max(self._weight, default=1)
        self._step = 0 if slots is None else queue_of(slots, largest)
        self._ready: list[tuple[int, int]] = []
        self._later: list[tuple[float, int, int]] = []
        self._rank: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        self._broke: dict[int, int] = {}
        self._reached = self._begun = 0.0
        self._held_back: list[Served] = []
        self._answered = proven
        self.left = self.retries = 0

    def begin(self, order: Sequence[int], now: float) -> None:
        """Take the requests to release, in order."""
        self._begun = self._reached = now
        self._ready = [(rank, request) for rank, request in enumerate(order)]
        self._rank = {request: rank for rank, request in self._ready}
        self.left = len(self._ready)

    def due(self, now: float) -> list[tuple[int, int]]:
        """Return the requests to send now, in order, each with its server."""
        while self._later and self._later[0][0] <= now:
            _, rank, request = heapq.heappop(self._later)
            heapq.heappush(self._ready, (rank, request))
        found = []
        while self._ready:
            request = self._ready[0][1]
            weight = self._weight[request]
            able = [k for k, server in enumerate(self._servers) if server.takes(weight, now)]
            if not able:
                break
            heapq.heappop(self._ready)
            k = min(able, key=lambda one: self._servers[one].held)
            server = self._servers[k]
            server.held += weight
            server.flying += 1
            choices = self._choices[request]
            server.sequences += choices
            server.queue.add(request, choices, self._tokens[request] or _LONG * choices)
            found.append((request, k))
        return found

    def wakes_at(self, now: float) -> float | None:
        """Return when something is due without a reply, or None."""
        times = [at for at, _, _ in self._later[:1]]
        if self._ready:
            times += [server.paused_until for server in self._servers if server.paused_until > now]
        if self._out:
            times.append(self._reached + self._patience.outage_seconds)
        return min(times, default=None)

    def replied(self, request: int, k: int, sent: float, reply: Reply, now: float) -> list[Served]:
        """Take a reply, and return the outcomes that are certain by it."""
        served = self._judge(request, k, sent, reply, now)
        if served is None:
            return []
        self.left -= 1
        self._answered |= reply.kind is Kind.ANSWERED
        self._held_back.append(served)
        if not self._answered and self.left:
            return []
        certain, self._held_back = self._held_back, []
        return certain

    def stopped(self, now: float) -> str | None:
        """Return why the job ends early, or None."""
        if len(self._held_back) >= self._patience.hopeless_requests:
            why = self._held_back[-1].reply.message
            return f"the first {len(self._held_back)} requests all failed: {why}"
        out = now - self._reached
        if not self._out or out < self._patience.outage_seconds:
            return None
        if any(server.too_long for server in self._servers):
            return f"no server took a request for {out:.0f} s, as they asked to wait longer (--outage)"
        return f"no server could be reached for {out:.0f} s"

    def counters_read(self, k: int, running: int | None, waiting: int | None) -> None:
        """
        Keep a few more in flight on a server that was seen without a request waiting.

        The way to the client and back takes longer than the queue lasts, or fewer completions of a request
        run than is expected. A reading is trusted if a completion has arrived since the number last
        changed, or the server has begun all that was sent: otherwise requests are still on the way.
        """
        server = self._servers[k]
        if not self._step or waiting != 0 or not self._ready or server.down:
            return
        trusted = server.completed or (running or 0) >= server.sequences
        weight = self._weight[self._ready[0][1]]
        if trusted and server.held + weight > server.most:
            most = min(server.ever, server.most + self._step)
            server.most, server.completed = most, server.completed and most == server.most

    def down(self, k: int) -> bool:
        """Return whether a server is taken to be unreachable."""
        return self._servers[k].down

    def revived(self, k: int) -> None:
        """Note that a server is reachable again."""
        self._servers[k].down = False

    def reorder(self, order: Sequence[int]) -> None:
        """Release the remaining requests in another order."""
        self._rank = {request: rank for rank, request in enumerate(order)}
        self._ready = [(self._rank[request], request) for _, request in self._ready]
        heapq.heapify(self._ready)
        self._later = [(at, self._rank[request], request) for at, _, request in self._later]
        heapq.heapify(self._later)

    @property
    def given_up_at(self) -> float | None:
        """When the job ends if no server takes a request before; None while one does."""
        return self._reached + self._patience.outage_seconds if self._out else None

    @property
    def in_flight(self) -> int:
        """Completions kept in flight on a server, at the most so far."""
        return max(server.most for server in self._servers)

    @property
    def interrupted(self) -> list[bool]:
        """Whether each server was unreachable at some time, and may have restarted."""
        return [server.was_down for server in self._servers]

    @property
    def _out(self) -> bool:
        """Whether no server takes requests."""
        return all(server.down or server.too_long for server in self._servers)

    def _judge(self, request: int, k: int, sent: float, reply: Reply, now: float) -> Served | None:
        """Return the outcome of a request, or None if it is to be sent again."""
        server, kind = self._servers[k], reply.kind
        server.held -= self._weight[request]
        server.flying -= 1
        server.sequences -= self._choices[request]
        server.queue.remove(request)
        server.too_long = (reply.wait or 0.0) > self._patience.outage_seconds
        if kind is not Kind.UNREACHABLE and not server.too_long:
            self._reached = now
        served = Served(request, k, reply, sent - self._begun, now - self._begun)
        if kind in (Kind.ANSWERED, Kind.REFUSED):
            server.breaks, server.completed = 0, True
            return served
        if kind is Kind.UNREACHABLE:
            self._mark_down(server)
            wait: float | None = 0.0
        elif kind is Kind.BROKEN:
            wait = self._wait_of_broken(request, server, sent, now)
        else:
            wait = self._wait_of_busy(request, k, reply, now)
        if wait is None:
            return served
        self.retries += 1
        heapq.heappush(self._later, (now + wait, self._rank[request], request))
        return None

    def _wait_of_broken(self, request: int, server: _Server, sent: float, now: float) -> float | None:
        """Return the seconds until the next attempt; None if the request breaks the server each time."""
        if server.alone and server.flying == 0:
            broke = self._broke[request] = self._broke.get(request, 0) + 1
            if broke >= self._patience.breaks_alone:
                return None
        if sent >= server.broke_at:
            server.breaks, server.broke_at = server.breaks + 1, now
        return self._patience.wait(1, self._rng)

    def _wait_of_busy(self, request: int, k: int, reply: Reply, now: float) -> float | None:
        """Return the seconds until the next attempt; None after the last one."""
        failed = self._failed[request] = self._failed.get(request, 0) + 1
        patience = self._patience
        if failed >= (patience.attempts if reply.kind is Kind.BUSY else patience.timed_out_attempts):
            return None
        if reply.wait is None:
            wait = patience.wait(failed, self._rng)
        else:
            wait = min(reply.wait, patience.outage_seconds)
            self._tell_wait(k, reply, now, wait)
        self._hold(self._servers[k], reply, now + wait)
        return wait

    def _hold(self, server: _Server, reply: Reply, until: float) -> None:
        """Send a server nothing for a while where its status says so."""
        if reply.status in (502, 504) or (reply.status == 503 and reply.wait is None):
            self._mark_down(server)  # a proxy without its server
        elif reply.status in (429, 503, 529):
            server.paused_until = max(server.paused_until, until)

    def _tell_wait(self, k: int, reply: Reply, now: float, wait: float) -> None:
        """Report a long wait that a server asks for, unless one of about that end was reported."""
        server, long = self._servers[k], self._patience.longest_backoff_seconds
        if self._on_wait is not None and wait > long and now + wait > server.told_until + long:
            server.told_until = now + wait
            self._on_wait(k, reply, wait)

    def _mark_down(self, server: _Server) -> None:
        server.down = server.was_down = True
