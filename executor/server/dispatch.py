"""Dispatch of requests to servers, as a state machine without I/O."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...data.arrays import IntArray
from ...data.readers.server_batch import ServerBatch, ServerRequest
from ...heuristics.serving.in_flight import queue_of, running_of
from ..jobs.params import RunParams
from .reply import Kind, Reply

_LONG = 10**6
"""Assumed tokens of a completion of unknown length."""

_BURST = 64
"""Completions beyond the usual number to send at once; more load a server with new connections."""


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one request, by its last attempt."""

    request: int
    server: int
    reply: Reply
    sent: float
    finished: float


class _Queue:
    """Requests in flight on a server; those beyond the slots wait."""

    def __init__(self, slots: int | None) -> None:
        self._slots, self._running_weight = slots, 0
        self._running: dict[int, int] = {}
        self.running_since: dict[int, float] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        self.waiting_tokens = 0

    def add(self, request: int, weight: int, tokens: int, now: float) -> None:
        self._waiting[request] = weight, tokens
        self.waiting_tokens += tokens
        self._admit(now)

    def remove(self, request: int, now: float) -> None:
        if request in self._running:
            self._running_weight -= self._running.pop(request)
            del self.running_since[request]
        else:
            self.waiting_tokens -= self._waiting.pop(request)[1]
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self._waiting:
            request = next(iter(self._waiting))
            weight, tokens = self._waiting[request]
            if self._running and self._slots is not None and self._running_weight + weight > self._slots:
                return
            del self._waiting[request]
            self.waiting_tokens -= tokens
            self._running[request], self.running_since[request] = weight, now
            self._running_weight += weight


class _Server:
    def __init__(self, room: int, slots: int | None, params: RunParams) -> None:
        self.most, self.held, self.flying, self.sequences = room, 0, 0, 0
        self.slots, self.ever = slots, params.most_in_flight * room
        self.spare = min(self.ever, room + _BURST)
        self.queue, self._params = _Queue(slots), params
        self.down = self.was_down = self.too_long = self.completed = False
        self.paused_until = self.broke_at = self.told_until = 0.0
        self.breaks = 0

    @property
    def alone(self) -> bool:
        """True if requests are sent singly, to find one that crashes."""
        return self.breaks >= self._params.patience.breaks_before_alone

    def takes(self, weight: int, now: float) -> bool:
        """Return whether a request of some completions can be sent."""
        if self.down or now < self.paused_until:
            return False
        if self.flying == 0:
            return True
        limit = self.spare if self._queue_is_short(weight) else self.most
        return not self.alone and self.held + weight <= limit

    def _queue_is_short(self, weight: int) -> bool:
        """Return whether the queue could run empty before a new request."""
        if self.slots is None or self.held + weight <= self.most:
            return False
        return self.queue.waiting_tokens < self._params.queue_iterations * self.slots


class _Lane:
    """Requests to send for the first time, in order."""

    def __init__(self, order: IntArray) -> None:
        # A view of an array: a list would hold a Python object a row.
        self._left = order.data

    def __len__(self) -> int:
        return len(self._left)

    @property
    def left(self) -> memoryview[int]:
        """All requests left."""
        return self._left

    def next(self, *, from_end: bool) -> int:
        """Return the first request, or the last one."""
        return self._left[-1 if from_end else 0]

    def take(self, *, from_end: bool) -> None:
        """Leave out the first request, or the last one."""
        self._left = self._left[:-1] if from_end else self._left[1:]

    def drop(self, among: npt.NDArray[np.bool_]) -> int:
        """Leave out all requests among some; return how many they were."""
        waiting = np.asarray(self._left)
        rest = waiting[~among[waiting]]
        self._left = rest.data
        return len(waiting) - len(rest)


class Dispatch:
    """Release of requests to the least loaded server.

    A failed request returns to its place in the order. An unreachable server gets no request until it
    responds; its requests go to any server. Requests of an endpoint and model that a server refuses alike,
    before any completion, are dropped without an outcome.

    servers: Number of replicas.
    in_flight: Completions in flight on each server, as far as they are expected to run. With ``slots`` it
        rises while a server's queue is empty or short, up to ``most_in_flight`` times.
    params: Retries, and the length of a server's queue.
    rng: Random source of the waits.
    proven: True if the servers completed requests of this job before, so a failure is the request's own.
    slots: Completions that each server decodes at a time; None keeps ``in_flight`` constant.
    on_wait: Called with a server's position, its reply and a long wait in seconds, once for each wait.
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
        self._home: IntArray | None = None
        self._after: IntArray | None = None
        self._on_wait = on_wait
        self._servers = [_Server(in_flight, slots, params) for _ in range(servers)]
        batch = ServerBatch.of(requests)
        tokens = np.where(batch.stated > 0, batch.stated, batch.caps) * batch.choices
        # Views of arrays: lists would hold a Python object a row.
        self._choices, self._tokens = batch.choices.data, tokens.data
        self._weight = {n: running_of(n, params.running_share) for n in np.unique(batch.choices).tolist()}
        largest = max(self._weight.values(), default=1)
        self._step = 0 if slots is None else queue_of(slots, largest)
        self._slots, self._usual = slots, 0
        self._rank = np.zeros(0, dtype=np.int64).data
        self._lanes: list[_Lane] = []
        self._again: list[tuple[int, int]] = []
        self._later: list[tuple[float, int, int]] = []
        self._failed: dict[int, int] = {}
        self._broke: dict[int, int] = {}
        self._reached = self._begun = 0.0
        self._held_back: list[Served] = []
        self._answered = self._proven = proven
        self._kind, self._kinds = batch.kind.data, batch.kinds
        self._alike: dict[tuple[int, str], set[int]] = {}
        self._completed: set[int] = set()
        self._dropped: dict[int, str] = {}
        self.left = self.retries = 0

    def begin(self, order: Sequence[int] | IntArray, now: float) -> None:
        """Start with the requests to release, in order."""
        self._begun = self._reached = now
        self._follow(np.array(order, dtype=np.int64), np.ones(len(self._choices), dtype=np.bool_))
        self.left = len(order)

    def send_ahead(self) -> None:
        """Let the queue grow to half the slots with the first replies.

        The order must be final. A slow server or client then leaves fewer slots idle.
        """
        if self._slots is not None:
            self._usual = self._slots + max(self._step, self._slots // 2)

    def keep_homes(self, home: IntArray | None) -> None:
        """Send each request to its own server; to be called before the job begins.

        A server with free slots and no request of its own takes the last one of another.

        home: Server of each request, shape (requests,); None for any server.
        """
        self._home = home

    def send_after(self, order: IntArray, after: IntArray | None) -> None:
        """Send each request only after a number of outcomes, or when nothing is in flight.

        order: All requests of the job, those included that an earlier run completed.
        after: Outcomes before each of them, shape (requests,); None for no wait.
        """
        self._after = None if after is None else after[np.argsort(order)]

    def due(self, now: float) -> list[tuple[int, int]]:
        """Return the pairs (request, server) to send now."""
        while self._later and self._later[0][0] <= now:
            _, rank, request = heapq.heappop(self._later)
            heapq.heappush(self._again, (rank, request))
        pairs = []
        while (pair := self._next_pair(now)) is not None:
            first, k = pair
            choices = self._choices[first]
            if self._again and self._again[0][1] == first:
                heapq.heappop(self._again)
            else:
                lane, from_end = self._lane_of(k)
                lane.take(from_end=from_end)
            server = self._servers[k]
            server.held += self._weight[choices]
            server.flying += 1
            server.sequences += choices
            server.queue.add(first, choices, self._tokens[first] or _LONG * choices, now)
            pairs.append((first, k))
        return pairs

    def wakes_at(self, now: float) -> float | None:
        """Return the time of the next action without a reply, or None."""
        times = [at for at, _, _ in self._later[:1]]
        if any(self._first(k) is not None for k in range(len(self._servers))):
            times += [server.paused_until for server in self._servers if server.paused_until > now]
        if self._out:
            times.append(self._reached + self._patience.outage_seconds)
        return min(times, default=None)

    def replied(self, request: int, k: int, sent: float, reply: Reply, now: float) -> list[Served]:
        """Process a reply; return the outcomes that it makes final."""
        served = self._judge(request, k, sent, reply, now)
        self._note_alike(request, reply)
        if served is None:
            return []
        self.left -= 1
        if self._kind[request] in self._dropped and reply.kind is not Kind.ANSWERED:
            return []
        self._answered |= reply.kind is Kind.ANSWERED
        self._held_back.append(served)
        if not self._answered and self.left:
            return []
        certain, self._held_back = self._held_back, []
        return certain

    def stopped(self, now: float) -> str | None:
        """Return the reason to end the job early, or None."""
        if len(self._held_back) >= self._patience.hopeless_requests:
            why = self._held_back[-1].reply.message
            return f"the first {len(self._held_back)} requests all failed: {why}"
        out = now - self._reached
        if out < self._patience.outage_seconds or not self._out:
            return None
        if any(server.too_long for server in self._servers):
            return f"no server took a request for {out:.0f} s, as they asked to wait longer (--outage)"
        return f"no server could be reached for {out:.0f} s"

    @property
    def refused(self) -> str | None:
        """Return why requests were dropped, as all of their endpoint and model are refused, or None."""
        return " ".join(self._dropped.values()) or None

    def counters_read(self, k: int, running: int | None, waiting: int | None) -> None:
        """Raise the number in flight on a server with an empty queue.

        A reading counts if a completion arrived since the last change, or if the server has started
        everything sent to it. Otherwise requests are still in transit.
        """
        server = self._servers[k]
        first = self._first(k)
        if not self._step or waiting != 0 or first is None or server.down:
            return
        trusted = server.completed or (running or 0) >= server.sequences
        weight = self._weight[self._choices[first]]
        if trusted and server.held + weight > server.most:
            largest = min(server.ever, server.most + self._step)
            server.most, server.completed = largest, server.completed and largest == server.most

    def down(self, k: int) -> bool:
        """Return whether a server counts as unreachable."""
        return self._servers[k].down

    def revived(self, k: int) -> None:
        """Note that a server is reachable again."""
        self._servers[k].down = False

    def reorder(self, order: Sequence[int] | IntArray) -> None:
        """Release the remaining requests in another order."""
        fresh = np.zeros(len(self._choices), dtype=np.bool_)
        for lane in self._lanes:
            fresh[np.asarray(lane.left)] = True
        self._follow(np.asarray(order, dtype=np.int64), fresh)
        self._again = [(self._rank[request], request) for _, request in self._again]
        heapq.heapify(self._again)
        self._later = [(at, self._rank[request], request) for at, _, request in self._later]
        heapq.heapify(self._later)

    def running(self, now: float) -> dict[int, float]:
        """Return the seconds that each running request has run."""
        running = [server.queue.running_since for server in self._servers]
        return {request: now - since for since_of in running for request, since in since_of.items()}

    @property
    def given_up_at(self) -> float | None:
        """Time at which the job ends without a reachable server, or None."""
        return self._reached + self._patience.outage_seconds if self._out else None

    @property
    def flying(self) -> int:
        """Requests in flight on all servers."""
        return sum(server.flying for server in self._servers)

    @property
    def in_flight(self) -> int:
        """Largest number of completions in flight on a server so far."""
        return max(server.most for server in self._servers)

    @property
    def interrupted(self) -> list[bool]:
        """True for each server that was unreachable at some time."""
        return [server.was_down for server in self._servers]

    def _follow(self, order: IntArray, fresh: npt.NDArray[np.bool_]) -> None:
        """Set the order, of which ``fresh`` requests are to be sent for the first time."""
        rank = np.zeros(len(fresh), dtype=np.int64)
        rank[order] = np.arange(len(order))
        self._rank, waiting = rank.data, order[fresh[order]]
        if self._home is None:
            self._lanes = [_Lane(waiting)]
        else:
            homes = self._home[waiting]
            self._lanes = [_Lane(waiting[homes == k]) for k in range(len(self._servers))]

    def _lane_of(self, k: int) -> tuple[_Lane, bool]:
        """Return the lane that a server takes its next request from, and whether from its end."""
        if len(self._lanes) == 1:
            return self._lanes[0], False
        lane = self._lanes[k]
        if len(lane) or not self._is_idle(k):
            return lane, False
        return max(self._lanes, key=len), True

    def _is_idle(self, k: int) -> bool:
        """Return whether a server has free slots, for requests of others."""
        server = self._servers[k]
        return server.held < (self._slots or server.most)

    def _first(self, k: int) -> int | None:
        """Return the first request that a server may get, or None."""
        lane, from_end = self._lane_of(k)
        fresh = lane.next(from_end=from_end) if len(lane) else None
        if fresh is not None and self._is_early(fresh):
            fresh = None
        if self._again and (fresh is None or self._again[0][0] < self._rank[fresh]):
            return self._again[0][1]
        return fresh

    def _is_early(self, request: int) -> bool:
        """Return whether a request is to wait for more outcomes."""
        if self._after is None or not any(server.flying for server in self._servers):
            return False
        return len(self._choices) - self.left < int(self._after[request])

    def _next_pair(self, now: float) -> tuple[int, int] | None:
        """Return the next request, and the server with the fewest completions that takes it, or None."""
        pair: tuple[int, int] | None = None
        for k, server in enumerate(self._servers):
            first = self._first(k)
            if first is None or (pair is not None and server.held >= self._servers[pair[1]].held):
                continue
            if server.takes(self._weight[self._choices[first]], now):
                pair = first, k
        return pair

    @property
    def _out(self) -> bool:
        return all(server.down or server.too_long for server in self._servers)

    def _judge(self, request: int, k: int, sent: float, reply: Reply, now: float) -> Served | None:
        """Return a request's outcome, or None to send it again."""
        server, kind = self._servers[k], reply.kind
        weight = self._weight[self._choices[request]]
        server.held -= weight
        server.spare = min(server.ever, server.spare + weight)
        server.flying -= 1
        server.sequences -= self._choices[request]
        server.queue.remove(request, now)
        server.too_long = (reply.wait or 0.0) > self._patience.outage_seconds
        if kind is not Kind.UNREACHABLE and not server.too_long:
            self._reached = now
        served = Served(request, k, reply, sent - self._begun, now - self._begun)
        if kind in (Kind.ANSWERED, Kind.REFUSED):
            server.breaks, server.completed = 0, True
            server.most = max(server.most, min(self._usual, server.most + weight))
            return served
        if kind is Kind.UNREACHABLE:
            self._mark_down(server)
            wait: float | None = 0.0
        elif kind is Kind.BROKEN:
            wait = self._wait_of_broken(request, server, sent, now)
        else:
            wait = self._wait_of_busy(request, k, reply, now)
        if wait is None or self._kind[request] in self._dropped:
            return served
        self.retries += 1
        heapq.heappush(self._later, (now + wait, self._rank[request], request))
        return None

    def _note_alike(self, request: int, reply: Reply) -> None:
        """Drop the requests of an endpoint and model that the server refuses alike from the first on."""
        kind = self._kind[request]
        if reply.kind is Kind.ANSWERED:
            self._completed.add(kind)
        if not reply.mend or self._proven or kind in self._completed or kind in self._dropped:
            return
        alike = self._alike.setdefault((kind, reply.mend), set())
        alike.add(request)
        if len(alike) < self._patience.alike_requests:
            return
        endpoint, model = self._kinds[kind]
        of_model = "" if model is None else f" of model {model!r}"
        self._dropped[kind] = (
            f"requests{of_model} to {endpoint} are all refused: {reply.message}. {reply.mend}"
        )
        self._drop(kind)

    def _drop(self, kind: int) -> None:
        """Leave the waiting requests of a kind without an outcome."""
        dropped = sum(lane.drop(np.asarray(self._kind) == kind) for lane in self._lanes)
        again = [entry for entry in self._again if self._kind[entry[1]] != kind]
        later = [entry for entry in self._later if self._kind[entry[2]] != kind]
        self.left -= dropped + len(self._again) - len(again) + len(self._later) - len(later)
        self._again, self._later = again, later
        heapq.heapify(self._again)
        heapq.heapify(self._later)
        self._held_back = [served for served in self._held_back if self._kind[served.request] != kind]

    def _wait_of_broken(self, request: int, server: _Server, sent: float, now: float) -> float | None:
        """Return the wait after a broken connection.

        It is None if the request crashes the server each time.
        """
        if server.alone and server.flying == 0:
            broke = self._broke[request] = self._broke.get(request, 0) + 1
            if broke >= self._patience.breaks_alone:
                return None
        if sent >= server.broke_at:
            server.breaks, server.broke_at = server.breaks + 1, now
        return self._patience.wait(1, self._rng)

    def _wait_of_busy(self, request: int, k: int, reply: Reply, now: float) -> float | None:
        """Return the wait for a busy server; None after the last attempt."""
        failed = self._failed[request] = self._failed.get(request, 0) + 1
        patience = self._patience
        if failed >= (patience.timed_out_attempts if reply.kind is Kind.TIMED_OUT else patience.attempts):
            return None
        if reply.wait is None:
            wait = patience.wait(failed, self._rng)
        else:
            wait = min(reply.wait, patience.outage_seconds)
            self._tell_wait(k, reply, now, wait)
        self._hold(self._servers[k], reply, now + wait)
        return wait

    def _hold(self, server: _Server, reply: Reply, until: float) -> None:
        """Pause a server, or mark it as down."""
        if reply.status in (502, 504) or (reply.status == 503 and reply.wait is None):
            self._mark_down(server)  # a proxy replied for a server that is gone
        elif reply.status in (429, 503, 529):
            server.paused_until = max(server.paused_until, until)

    def _tell_wait(self, k: int, reply: Reply, now: float, wait: float) -> None:
        server, long = self._servers[k], self._patience.longest_backoff_seconds
        if self._on_wait is not None and wait > long and now + wait > server.told_until + long:
            server.told_until = now + wait
            self._on_wait(k, reply, wait)

    def _mark_down(self, server: _Server) -> None:
        server.down = server.was_down = True
