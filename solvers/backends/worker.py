"""One process per solve, as a solver's library may crash or hang.

The parent starts a fresh interpreter in its own session, sends it the task over a pipe, and collects its
reports. At the deadline, or on Ctrl-C, the task is asked to stop. If it does not, it is killed with all its
children. Earlier reports are kept. A worker without its parent ends itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import IO

from ..result import StoppedBy

logger = logging.getLogger(__name__)

START_UP_SECONDS = 60.0
"""Seconds to import a library, which no limit counts; larger tolerates slower disks."""
GRACE_SECONDS = 1.5
"""Seconds for an interrupted solver to report its best solution."""
GRACE_AT_LIMIT = (0.08, 0.08)
"""The same at a limit: seconds, and share of the limit."""

_BOOT = """
import sys, pickle
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
sys.path[:] = pickle.loads(channel.recv_bytes())
from batchbound.solvers.backends.worker import serve
serve(channel)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a task.

    answer: Return value of the task, or None if it did not finish.
    reports: Last value reported under each name.
    stopped_by: None if the task ended by itself, else the reason.
    seconds: Wall-clock seconds since the library was loaded; of the worker's start if it was not.
    message: Error of a crash; else empty.
    """

    answer: object
    reports: Mapping[str, object]
    stopped_by: StoppedBy | None
    seconds: float
    message: str = ""


@dataclass(slots=True)
class Desk:
    """A task's channel to its parent: reports, and requests to stop.

    send: Sends a message to the parent.
    seconds: Wall-clock limit from :meth:`ready` on, or None.
    deadline: Time of the monotonic clock when the task must be done, or None.
    """

    send: Callable[[tuple[str, object]], None]
    seconds: float | None
    deadline: float | None = field(init=False)
    _read: Callable[[object], object] | None = None
    _stop: Callable[[], None] | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._count()

    def ready(self) -> None:
        """Report that the library is imported; the limit counts from now on."""
        self.send(("ready", self._count()))

    def _count(self) -> float:
        """Let the limit begin now; return the time."""
        now = time.monotonic()
        self.deadline = None if self.seconds is None else now + self.seconds
        return now

    def read_incumbents(self, read: Callable[[object], object]) -> None:
        """Convert each incumbent before it is reported.

        Those that ``read`` turns into None are skipped.
        """
        self._read = read

    def report(self, name: str, value: object) -> None:
        """Report a value, in place of the last one of this name."""
        if name == "incumbent" and self._read is not None and (value := self._read(value)) is None:
            return
        self.send(("report", (name, value)))

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0.01; None without a limit."""
        return None if self.deadline is None else max(0.01, self.deadline - time.monotonic())

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` from another thread when the task should stop."""
        self._stop = stop
        if self._stopping.is_set():
            stop()

    @property
    def stopping(self) -> bool:
        """True if the task was asked to stop."""
        return self._stopping.is_set()

    def what_stopped(self, work: int | None) -> StoppedBy | None:
        """Return the limit that stopped a solver which does not name it.

        Without a limit of ``work`` it was the time, even a little early: CP-SAT stops early.
        """
        if self.stopping:
            return StoppedBy.INTERRUPT
        remaining = self.remaining()
        if remaining is not None and (work is None or remaining < 0.05):
            return StoppedBy.TIME
        return None if work is None else StoppedBy.WORK

    def stop(self) -> None:
        """Ask the task to stop."""
        self._stopping.set()
        if self._stop is not None:
            self._stop()


def run_in_worker(
    module: str,
    function: str,
    task: tuple[object, ...],
    seconds: float | None,
    *,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Call a function in another process and return the outcome.

    module, function: Names of the function, which takes the task's entries and a :class:`Desk`.
    task: Picklable arguments.
    seconds: Wall-clock limit from the import of the library on, or None.
    meanwhile: Function to call here while the worker starts, which takes up to a second.

    Raises KeyboardInterrupt on a second Ctrl-C while the task reports its best.
    """
    begun = time.monotonic()
    here, there = Pipe()
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log"), "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, str(there.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": folder},
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        call = _Call(here, seconds)
        try:
            with here:
                messages = ([path for path in sys.path if path], (module, function, task, seconds))
                call.hold(messages, meanwhile)
        finally:
            _kill(process.pid)
            process.wait()
        message = call.message
        if call.stopped_by is StoppedBy.CRASH and not message:
            message = _last_words(process.returncode, log)
    logger.debug("%s.%s ended: %s %s", module, function, call.stopped_by, message)
    since = begun if call.ready is None else call.ready
    return Outcome(call.answer, call.reports, call.stopped_by, time.monotonic() - since, message)


class _Call:
    """The parent's side of a task."""

    def __init__(self, channel: Connection, seconds: float | None) -> None:
        self.channel, self.seconds = channel, seconds
        self.grace = GRACE_AT_LIMIT[0] + GRACE_AT_LIMIT[1] * (seconds or 0.0)
        self.ready: float | None = None
        self.deadline: float | None = time.monotonic() + START_UP_SECONDS
        self.answer: object = None
        self.reports: dict[str, object] = {}
        self.stopped_by: StoppedBy | None = None
        self.message = ""
        self.asked = False

    def hold(self, messages: Sequence[object], meanwhile: Callable[[], None]) -> None:
        """Send the task, and listen until the worker ends."""
        try:
            for message in messages:
                self.send(message)
        except KeyboardInterrupt:
            # The message may be half sent, so the worker cannot be asked to stop; nor has it begun.
            self.stopped_by = StoppedBy.INTERRUPT
        else:
            try:
                meanwhile()
            except KeyboardInterrupt:
                self._ask(StoppedBy.INTERRUPT)
            self.listen()

    def send(self, value: object) -> None:
        # If a worker died at its start, listen() finds out, as it reads its last messages.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send_bytes(pickle.dumps(value))

    def listen(self) -> None:
        while True:
            try:
                if not self._next():
                    return
            except KeyboardInterrupt:
                if self.stopped_by is StoppedBy.INTERRUPT:
                    raise
                self._ask(StoppedBy.INTERRUPT)
            except (EOFError, ConnectionResetError):
                if self.stopped_by is not StoppedBy.INTERRUPT:
                    self.stopped_by = StoppedBy.CRASH
                return

    def _next(self) -> bool:
        wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        if self.channel.poll(wait):
            return self._take(pickle.loads(self.channel.recv_bytes()))
        if not self.asked:
            self._ask(StoppedBy.HANG if self.ready is None else StoppedBy.TIME)
            return True
        if self.stopped_by is StoppedBy.HANG:
            self.message = f"its library did not load within {START_UP_SECONDS:g} s"
        elif self.stopped_by is StoppedBy.TIME:
            self.message = "it did not stop at its limit, and was ended"
        return False

    def _ask(self, why: StoppedBy) -> None:
        self.asked = True
        self.stopped_by = why
        self.deadline = time.monotonic() + (GRACE_SECONDS if why is StoppedBy.INTERRUPT else self.grace)
        self.send("stop")

    def _take(self, message: tuple[str, object]) -> bool:
        kind, value = message
        if kind == "ready":
            assert isinstance(value, float)
            self.ready = value
            if not self.asked:
                self.deadline = None if self.seconds is None else value + self.seconds
            return True
        if kind == "report":
            assert isinstance(value, tuple)
            self.reports[value[0]] = value[1]
            return True
        if kind == "error":
            self.stopped_by, self.message = StoppedBy.CRASH, str(value)
        else:
            self.answer = value
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _last_words(code: int, log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"the solver's process ended with {ended}" + (f": {lines[-1]}" if lines else "")


def serve(channel: Connection) -> None:
    """Run the one task that arrives on ``channel``, as a worker."""
    # The parent handles a terminal's Ctrl-C; children of ours install their own handlers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, function, task, seconds = pickle.loads(channel.recv_bytes())
    lock = threading.Lock()

    def send(message: tuple[str, object]) -> None:
        with lock:
            channel.send_bytes(pickle.dumps(message))

    desk = Desk(send, seconds)
    threading.Thread(target=_heed, args=(channel, desk), daemon=True).start()
    try:
        answer = getattr(importlib.import_module(module), function)(*task, desk)
    except Exception as error:
        traceback.print_exc()
        send(("error", f"{type(error).__name__}: {error}"))
    else:
        send(("answer", answer))
    sys.stdout.flush()
    # Some libraries abort in their destructors after the result is sent.
    os._exit(0)


def _heed(channel: Connection, desk: Desk) -> None:
    try:
        channel.recv_bytes()
        desk.stop()
        channel.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)
