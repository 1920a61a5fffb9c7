"""The system's request to end, turned into an exception like Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminating() -> Iterator[None]:
    """Turn the system's request to end into :class:`TerminatedError`, so that work stops cleanly."""
    from ..executor.models.faults import TerminatedError

    def stop(*_: object) -> None:
        raise TerminatedError("the system asked the process to end (SIGTERM)")

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may say what a signal does.
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
