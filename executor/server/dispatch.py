"""Dispatch of requests to servers in a plan's order, with retries and failover."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from ...data.readers.server_batch import ServerRequest
from ..jobs.params import RunParams
from .client import Kind, Reply, ServerClient

_LONG = 10**6
"""Tokens of a completion whose length is unknown."""


def in_flight_of(slots: int) -> int:
    """
    Return the number of completions to keep in flight on a server.

    As many as there are slots would leave each slot empty from one completion until the next request comes;
    a few that wait in the server's queue fill it at once.
    """
    return slots + max(4, slots // 8)


@dataclass(frozen=True, slots=True)
class Served:
    """
    What became of one request.

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


class _Server:
    def __init__(self, client: ServerClient, room: int, slots: int | None, params: RunParams) -> None:
        self.client, self.most, self.held, self.flying = client, room, 0, 0
        self.slots, self.ever, self.sent = slots, params.most_in_flight * room, dict[int, int]()
        self._params = params
        self.down = self.was_down = False
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
        most = self.ever if self._queue_is_short() else self.most
        return self.flying == 0 or (not self.alone and self.held + weight <= most)

    def _queue_is_short(self) -> bool:
        """Return whether what waits is done so soon that the way to the client takes longer."""
        if self.slots is None or self.held < self.most:
            return False
        # In the order they were sent, those beyond the slots wait.
        return sum(list(self.sent.values())[self.slots :]) < self._params.queue_iterations * self.slots


class Dispatch:
    """
    Sends requests in order, the next one wherever there is room, until each has its outcome.

    A request that failed goes back to its place in the order. A server that cannot be reached gets no request
    until it is reachable again; its requests go to the others, or back to it.

    clients: The servers: replicas of one another.
    in_flight: Completions in flight on each; up to four times as many where ``slots`` is given and those that
        wait are so short that they would be done before others come.
    params: Retries, and the length of a server's queue.
    rng: Of the waits.
    proven: Whether requests of this job were completed before, so that failures are their own.
    slots: Completions that each server works on at a time; None to keep to ``in_flight``.
    on_wait: Called with a server's position, its reply and the seconds it asks to wait, once a wait, where
        that is longer than any of ours. It is waited for all the same: the server knows when its limit ends.
    """

    def __init__(
        self,
        requests: Sequence[ServerRequest],
        clients: Sequence[ServerClient],
        in_flight: int,
        params: RunParams,
        rng: random.Random,
        *,
        proven: bool = False,
        slots: int | None = None,
        on_wait: Callable[[int, Reply, float], None] | None = None,
    ) -> None:
        self._requests, self._patience, self._rng = requests, params.patience, rng
        self._on_wait = on_wait
        self._servers = [_Server(client, in_flight, slots, params) for client in clients]
        self._ready: list[tuple[int, int]] = []
        self._later: list[tuple[float, int, int]] = []
        self._rank: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        self._broke: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A server that is back again is put in as None, so that the wait for a reply ends.
        self._replies: asyncio.Queue[tuple[int, int, float, Reply] | None] = asyncio.Queue()
        self._reached = self._begun = 0.0
        self._held_back: list[Served] = []
        self._answered = proven
        self._mistake: BaseException | None = None
        self.retries = 0

    async def run(self, order: Sequence[int], on_served: Callable[[Served], None]) -> str | None:
        """Serve requests, and return why it stopped early, or None when each has its outcome."""
        loop = asyncio.get_running_loop()
        self._begun = self._reached = loop.time()
        self._ready = [(rank, request) for rank, request in enumerate(order)]
        self._rank = {request: rank for rank, request in self._ready}
        left = len(self._ready)
        try:
            while left:
                self._release(loop.time())
                got = await self._next(loop.time())
                if self._mistake is not None:
                    raise self._mistake
                served = None if got is None else self._judge(*got, loop.time())
                if served is not None:
                    left -= 1
                    self._tell(served, on_served, last=not left)
                if len(self._held_back) >= self._patience.hopeless_requests:
                    why = self._held_back[-1].reply.message
                    return f"the first {len(self._held_back)} requests all failed: {why}"
                out = loop.time() - self._reached
                if out > self._patience.outage_seconds and all(server.down for server in self._servers):
                    return f"no server could be reached for {out:.0f} s"
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return None

    def queue_ran_empty(self, k: int, most: int) -> None:
        """
        Keep more in flight on a server that was seen without a request waiting while some are left to send.

        The way to the client and back takes it longer than its queue lasts, so that slots stand empty.
        """
        server = self._servers[k]
        if self._ready and not server.down and server.held >= server.most < most:
            server.most = min(most, 2 * server.most)
            self._replies.put_nowait(None)

    def reorder(self, order: Sequence[int]) -> None:
        """Send what is left in another order."""
        self._rank = {request: rank for rank, request in enumerate(order)}
        self._ready = [(self._rank[request], request) for _, request in self._ready]
        heapq.heapify(self._ready)
        self._later = [(at, self._rank[request], request) for at, _, request in self._later]
        heapq.heapify(self._later)

    @property
    def in_flight(self) -> int:
        """Completions kept in flight on a server, at the most so far."""
        return max(server.most for server in self._servers)

    @property
    def interrupted(self) -> list[bool]:
        """Whether each server was unreachable at some time, and may have restarted."""
        return [server.was_down for server in self._servers]

    def _tell(self, served: Served, on_served: Callable[[Served], None], *, last: bool) -> None:
        self._answered |= served.reply.kind is Kind.ANSWERED
        self._held_back.append(served)
        if self._answered or last:
            for one in self._held_back:
                on_served(one)
            self._held_back.clear()

    def _release(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, rank, request = heapq.heappop(self._later)
            heapq.heappush(self._ready, (rank, request))
        while self._ready:
            request = self._ready[0][1]
            weight = self._requests[request].choices
            able = [k for k, server in enumerate(self._servers) if server.takes(weight, now)]
            if not able:
                return
            heapq.heappop(self._ready)
            k = min(able, key=lambda one: self._servers[one].held)
            self._servers[k].held += weight
            self._servers[k].flying += 1
            self._servers[k].sent[request] = weight * (self._requests[request].expected_tokens or _LONG)
            self._start(self._send(request, k))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: without this, the run would wait for a reply for ever.
            self._mistake = task.exception()
            self._replies.put_nowait(None)

    async def _send(self, request: int, k: int) -> None:
        sent = asyncio.get_running_loop().time()
        reply = await self._servers[k].client.send(self._requests[request])
        self._replies.put_nowait((request, k, sent, reply))

    async def _revive(self, server: _Server) -> None:
        failures = 1
        while server.down:
            await asyncio.sleep(self._patience.wait(failures, self._rng))
            failures += 1
            server.down = not await server.client.reachable()
            self._replies.put_nowait(None)

    async def _next(self, now: float) -> tuple[int, int, float, Reply] | None:
        """Return the next reply; None when a wait is over first."""
        waits = [at for at, _, _ in self._later[:1]]
        if self._ready:
            waits += [server.paused_until for server in self._servers if server.paused_until > now]
        try:
            async with asyncio.timeout(None if not waits else max(0.0, min(waits) - now)):
                return await self._replies.get()
        except TimeoutError:
            return None

    def _judge(self, request: int, k: int, sent: float, reply: Reply, now: float) -> Served | None:
        """Return the outcome of a request, or None if it is to be sent again."""
        server, kind = self._servers[k], reply.kind
        server.held -= self._requests[request].choices
        server.flying -= 1
        del server.sent[request]
        served = Served(request, k, reply, sent - self._begun, now - self._begun)
        if kind is not Kind.UNREACHABLE:
            self._reached = now
        if kind in (Kind.ANSWERED, Kind.REFUSED):
            server.breaks = 0
            return served
        wait = 0.0
        if kind is Kind.UNREACHABLE:
            self._mark_down(server)
        elif kind is Kind.BROKEN:
            if server.alone and server.flying == 0:
                broke = self._broke[request] = self._broke.get(request, 0) + 1
                if broke >= self._patience.breaks_alone:
                    return served
            if sent >= server.broke_at:
                server.breaks, server.broke_at = server.breaks + 1, now
            wait = self._patience.wait(1, self._rng)
        else:
            failed = self._failed[request] = self._failed.get(request, 0) + 1
            patience = self._patience
            if failed >= (patience.attempts if kind is Kind.BUSY else patience.timed_out_attempts):
                return served
            if reply.wait is None:
                wait = self._patience.wait(failed, self._rng)
            else:
                wait = reply.wait
                self._tell_wait(k, reply, now, wait)
            self._hold(server, reply, now + wait)
        self.retries += 1
        heapq.heappush(self._later, (now + wait, self._rank[request], request))
        return None

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
        if not server.down:
            server.down = server.was_down = True
            self._start(self._revive(server))
