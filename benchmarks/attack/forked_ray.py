"""
Stands in for Ray on one machine: an actor is a fork of the driver.

It starts in milliseconds instead of seconds, so that hundreds of fleets can be killed. The driver's and the
replicas' code is what runs on Ray; only how calls travel is not Ray's. It has what ``RayFleet`` uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from .children import fork

_LENGTH = struct.Struct("<Q")
_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG: Ray's workers end with their driver, too."""


class RayActorError(Exception):
    """The actor died."""


class GetTimeoutError(Exception):
    """No answer came in time."""


class RayTaskError(Exception):
    """A call failed in the actor."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@dataclass(eq=False)
class Reply:
    """What comes back of one call: its values as they arrive; a stream is read one by one."""

    actor: Actor
    values: deque[tuple[str, Any]] = field(default_factory=deque)

    def ready(self) -> bool:
        """Tell whether there is something to take."""
        return bool(self.values) or self.actor.dead

    def __iter__(self) -> Reply:
        return self

    def __next__(self) -> Reply:
        while not self.ready():
            _pump(1.0)
        if self.values and self.values[0][0] == "end":
            raise StopIteration
        one = Reply(self.actor)
        if self.values:
            one.values.append(self.values.popleft())
        return one


class Method:
    """A method of an actor, to be called from afar."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def options(self, **_: object) -> Method:
        """Return itself: a method that yields is a stream."""
        return self

    def remote(self, *args: Any) -> Reply:
        """Call it, and return what will hold the reply."""
        return self._actor.call(self._name, args)


class Actor:
    """An object in a process of its own."""

    live: ClassVar[list[Actor]] = []

    def __init__(self, kind: type, args: tuple[Any, ...]) -> None:
        self._ours, theirs = socket.socketpair()
        self._received, self.dead = bytearray(), False
        self._calls: dict[int, Reply] = {}
        self._number = 0
        self.process = fork()
        if not self.process:
            _become(kind, args, theirs, [one._ours for one in (*Actor.live, self)])
        theirs.close()
        self._ours.setblocking(False)
        Actor.live.append(self)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def fileno(self) -> int:
        """Return the channel's number, for ``select``."""
        return self._ours.fileno()

    def call(self, name: str, args: tuple[Any, ...]) -> Reply:
        """Send a call; a dead actor's reply says so."""
        reply, self._number = Reply(self), self._number + 1
        self._calls[self._number] = reply
        if self.dead:
            return reply
        try:
            self._ours.setblocking(True)
            self._ours.sendall(_framed((self._number, name, args)))
            self._ours.setblocking(False)
        except OSError:
            self.end()
        return reply

    def take(self) -> None:
        """Take what has arrived; a frame that is not whole yet waits."""
        try:
            while received := self._ours.recv(1 << 20):
                self._received += received
            self.dead = True
        except BlockingIOError:
            pass
        except OSError:
            self.dead = True
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            number, kind, value = pickle.loads(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
            self._calls[number].values.append((kind, value))
        if self.dead:
            self.end()

    def end(self) -> None:
        """Kill the process, and forget it."""
        self.dead = True
        if self in Actor.live:
            Actor.live.remove(self)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
            self._ours.close()


def _framed(value: object) -> bytes:
    body = pickle.dumps(value)
    return _LENGTH.pack(len(body)) + body


def _become(kind: type, args: tuple[Any, ...], channel: socket.socket, foreign: list[socket.socket]) -> None:
    """Be the actor until the driver closes the channel."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for one in foreign:
            one.close()
        lock = threading.Lock()

        def say(number: int, what: str, value: object) -> None:
            try:
                with lock:
                    channel.sendall(_framed((number, what, value)))
            except OSError:
                # The driver is gone.
                os._exit(0)

        def serve(one: Any, number: int, name: str, given: tuple[Any, ...]) -> None:
            try:
                value = getattr(one, name)(*given)
                if hasattr(value, "__next__"):
                    for item in value:
                        say(number, "value", item)
                    say(number, "end", None)
                else:
                    say(number, "value", value)
            except BaseException as error:
                say(number, "error", error)

        reader = channel.makefile("rb")
        actor = kind(*args)
        while head := reader.read(_LENGTH.size):
            number, name, given = pickle.loads(reader.read(_LENGTH.unpack(head)[0]))
            threading.Thread(target=serve, args=(actor, number, name, given), daemon=True).start()
        status = 0
    finally:
        os._exit(status)


def _pump(timeout: float) -> None:
    live = list(Actor.live)
    for one in select.select(live, [], [], timeout)[0] if live else ():
        one.take()


def wait(
    replies: Sequence[Reply], num_returns: int = 1, timeout: float | None = None
) -> tuple[list[Reply], list[Reply]]:
    """Wait until some replies have something to tell."""
    until = None if timeout is None else time.monotonic() + timeout
    _pump(0)
    while True:
        ready = [one for one in replies if one.ready()][:num_returns]
        left = 1.0 if until is None else until - time.monotonic()
        if len(ready) >= num_returns or left <= 0:
            return ready, [one for one in replies if one not in ready]
        _pump(min(left, 1.0))


def get(reply: Reply, timeout: float | None = None) -> Any:
    """Return what a call gave."""
    if not wait([reply], timeout=timeout)[0]:
        raise GetTimeoutError
    if not reply.values:
        raise RayActorError("the actor died")
    kind, value = reply.values[0]
    if kind == "error":
        raise RayTaskError(value)
    return value


def remote(**_: object) -> Callable[[type], Any]:
    """Make a class one of actors."""

    class Remote:
        def __init__(self, kind: type) -> None:
            self._kind = kind

        def remote(self, *args: Any) -> Actor:
            return Actor(self._kind, args)

    return Remote


def shutdown() -> None:
    """End all actors."""
    for one in list(Actor.live):
        one.end()


def install() -> None:
    """Put this module in Ray's place, in this process."""
    module: Any = ModuleType("ray")
    module.exceptions = ModuleType("ray.exceptions")
    for error in (RayActorError, RayTaskError, GetTimeoutError):
        setattr(module.exceptions, error.__name__, error)
    module.is_initialized = lambda: False
    module.init = lambda **_: None
    module.cluster_resources = dict
    module.kill = Actor.end
    module.wait, module.get, module.remote, module.shutdown = wait, get, remote, shutdown
    sys.modules["ray"] = module
