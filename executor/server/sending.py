"""Tasks that send a dispatch's requests and retry servers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ...data.arrays import IntArray
from ...data.readers.server_batch import Sent
from ..jobs.params import Patience
from .client import ServerClient
from .dispatch import Dispatch, Served

T = TypeVar("T")

_WAVE_SECONDS = 0.05
"""Seconds between the first waves of requests, each of as many as the slots; more may leave slots idle.

A server's front end takes a burst through each of its steps together. Meanwhile the engine draws tokens of
the first request alone.
"""

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""New Python objects between two garbage collections; more are faster and take more memory."""


@dataclass(frozen=True, slots=True)
class Outage:
    """State of an unreachable server.

    seconds: Seconds since the server last responded.
    attempts: Connections tried since then.
    given_up_in: Seconds until the run stops; None while other servers accept requests.
    over: True if the server is reachable again.
    """

    server: int
    seconds: float
    attempts: int
    given_up_in: float | None = None
    over: bool = False


class Sender:
    """Sender of the requests that a dispatch releases.

    sent: Returns a request as it is sent.
    slots: Requests that each server runs at a time; the first ones are sent before those that wait.
    patience: Waits between attempts to reach an unreachable server.
    on_outage: Called while a server is unreachable, first after ``outage_told_seconds``.

    Its ``unreachable`` is the seconds of each server's outages that are over, shape (servers,).
    """

    def __init__(
        self,
        dispatch: Dispatch,
        sent: Callable[[int], Sent],
        clients: Sequence[ServerClient],
        patience: Patience,
        wait: Callable[[int], float],
        on_outage: Callable[[Outage], None] = lambda _: None,
        *,
        slots: int,
    ) -> None:
        self._dispatch, self._sent, self._clients = dispatch, sent, clients
        self._patience, self._wait, self._on_outage = patience, wait, on_outage
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_served: Callable[[Sequence[Served]], None] = lambda _: None
        self._served: list[Served] = []
        self._changed = asyncio.Event()
        self._reviving: set[int] = set()
        self._mistake: BaseException | None = None
        self._slots, self._held_back = slots, deque[tuple[int, int]]()
        self._waves: asyncio.TimerHandle | None = None
        self.expired = False
        self.abandoned = 0
        self.unreachable = [0.0] * len(clients)

    async def run(
        self,
        order: Sequence[int] | IntArray,
        on_served: Callable[[Sequence[Served]], None],
        deadline: float | None = None,
    ) -> str | None:
        """Send requests; return the reason for an early stop, or None.

        on_served: Called with the outcomes of each turn of the event loop.
        deadline: Seconds after which requests without an outcome are ``expired``.
        """
        loop, dispatch = asyncio.get_running_loop(), self._dispatch
        end = math.inf if deadline is None else loop.time() + deadline
        self._on_served = on_served
        dispatch.begin(order, loop.time())
        first = dispatch.due(loop.time())
        await asyncio.gather(*(self._open(k, first) for k in range(len(self._clients))))
        thresholds = gc.get_threshold()
        try:
            # What the job holds is no garbage: looking through it took a fifth of the CPU time.
            gc.freeze()
            gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
            self._held_back += first
            self._wave()
            while dispatch.left:
                due = dispatch.due(loop.time())
                self._start_all(self._in_turn(due, len(due)))
                wakes = dispatch.wakes_at(loop.time())
                until = min(end, math.inf if wakes is None else wakes)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(None if until == math.inf else until):
                        await self._changed.wait()
                self._changed.clear()
                self.expired = loop.time() >= end
                if self._mistake is not None:
                    raise self._mistake
                stopped = dispatch.stopped(loop.time())
                if stopped is not None or self.expired:
                    return stopped
        finally:
            if self._waves is not None:
                self._waves.cancel()
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            self.abandoned = dispatch.flying
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._report()
        return dispatch.refused

    def counters_read(self, k: int, running: int | None, waiting: int | None) -> None:
        """Pass a reading of a server's counters to the dispatch."""
        self._dispatch.counters_read(k, running, waiting)
        self._changed.set()

    async def _open(self, k: int, first: Sequence[tuple[int, int]]) -> None:
        # Requests beyond these wait in the server's queue anyway.
        await self._clients[k].open(min(self._dispatch.in_flight, sum(server == k for _, server in first)))

    def _next(self, count: int) -> list[tuple[int, int]]:
        """Return the first requests of those to send."""
        return [self._held_back.popleft() for _ in range(min(count, len(self._held_back)))]

    def _in_turn(self, due: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
        """Return the due requests; others of earlier waves go before them while there are any."""
        if not self._held_back:
            return due
        self._held_back += due
        return self._next(count)

    def _wave(self) -> None:
        """Send the first requests in waves."""
        self._start_all(self._next(self._slots * len(self._clients)))
        if self._held_back:
            self._waves = asyncio.get_running_loop().call_later(_WAVE_SECONDS, self._wave)

    def _start_all(self, due: Sequence[tuple[int, int]]) -> None:
        for request, k in due:
            self._start(self._send(request, k))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # After a bug in a task, the run would otherwise wait for a reply for ever.
            self._mistake = task.exception()
            self._changed.set()

    async def _send(self, request: int, k: int) -> None:
        loop, dispatch = asyncio.get_running_loop(), self._dispatch
        while True:
            sent = loop.time()
            reply = await self._clients[k].send(self._sent(request))
            now = loop.time()
            served = dispatch.replied(request, k, sent, reply, now)
            if served and not self._served:
                loop.call_soon(self._report_or_stop)
            self._served += served
            if dispatch.down(k):
                self._revive(k, now)
            due = dispatch.due(now) if dispatch.stopped(now) is None else []
            due = self._in_turn(due, max(1, len(due)))
            if not due:
                self._changed.set()
                return
            (request, k), *rest = due
            self._start_all(rest)

    def _report(self) -> None:
        served, self._served = self._served, []
        if served:
            self._on_served(served)

    def _report_or_stop(self) -> None:
        try:
            self._report()
        except Exception as error:
            self._mistake = error
            self._changed.set()

    def _revive(self, k: int, now: float) -> None:
        if k not in self._reviving:
            self._reviving.add(k)
            self._start(self._revived(k, now))

    async def _revived(self, k: int, since: float) -> None:
        """Retry a server until it responds; report the outage."""
        loop, attempts = asyncio.get_running_loop(), 1
        told: asyncio.TimerHandle | None = None

        def tell(seconds: float) -> None:
            nonlocal told
            end = self._dispatch.given_up_at
            seconds_left = None if end is None else max(0.0, end - loop.time())
            self._on_outage(Outage(k, loop.time() - since, attempts, seconds_left))
            told = loop.call_later(10 * seconds, tell, 10 * seconds)

        told = loop.call_later(self._patience.outage_told_seconds, tell, self._patience.outage_told_seconds)
        quiet_until = told.when()
        try:
            while True:
                await asyncio.sleep(self._wait(attempts))
                attempts += 1
                if await self._clients[k].unreachable() is None:
                    break
        finally:
            if told is not None:
                told.cancel()
        self.unreachable[k] += loop.time() - since
        if loop.time() >= quiet_until:
            self._on_outage(Outage(k, loop.time() - since, attempts, over=True))
        self._reviving.discard(k)
        self._dispatch.revived(k)
        self._changed.set()


def run_until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGTERM and SIGINT cancel it first.

    A handler that raises between two steps of a coroutine would leave other coroutines unawaited.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    received: list[signal.Signals] = []
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        begun.append((loop, task))

        def stop(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number, handler in handlers.items():
            if callable(handler) and threading.current_thread() is threading.main_thread():
                loop.add_signal_handler(number, stop, number)
        return await work

    try:
        result = _run_anywhere(cancellable, begun)
    except asyncio.CancelledError:
        _handle(handlers, received)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    _handle(handlers, received)
    return result


def _run_anywhere(
    work: Callable[[], Coroutine[Any, Any, T]],
    begun: Sequence[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]],
) -> T:
    """Run a coroutine, in a thread of its own if this one runs an event loop, as a notebook does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1, "batchbound-servers") as pool:
        running = pool.submit(asyncio.run, work())
        try:
            return running.result()
        except BaseException:
            # An interrupt reaches this thread alone; the other one ends its requests first.
            for loop, task in begun:
                if not running.done():
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _handle(handlers: Mapping[signal.Signals, Any], received: Sequence[signal.Signals]) -> None:
    for number in received[:1]:
        handlers[number](number, None)
