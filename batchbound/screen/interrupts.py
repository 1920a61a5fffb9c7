"""Interrupts and SIGTERM as exceptions that are never lost."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Dropped: TypeAlias = sys.UnraisableHookArgs

AGAIN_AFTER = 0.01
"""Seconds after which a lost interrupt is sent again."""

_IMPORTS = "<frozen importlib._bootstrap>"

_ASKED = "the system asked the process to end (SIGTERM)"


@contextmanager
def terminating() -> Iterator[None]:
    """Turn SIGTERM into :class:`TerminatedError`, so that work stops cleanly."""
    from ..executor.models.faults import TerminatedError

    asked = False

    def stop() -> None:
        nonlocal asked
        asked = True
        raise TerminatedError(_ASKED)

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set signal handlers.
        yield
        return
    before = signal.signal(signal.SIGTERM, _after_imports(stop))
    try:
        yield
    except KeyboardInterrupt as error:
        # Code that catches a TerminatedError may raise a plain KeyboardInterrupt later.
        if asked and not isinstance(error, TerminatedError):
            raise TerminatedError(_ASKED) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def heeding() -> Iterator[None]:
    """Send an interrupt again if Python dropped its exception.

    Python prints and ignores an exception in a finalizer or a weak reference's callback. A Ctrl-C at such a
    moment would leave a traceback while the command continues. Modules in C drop exceptions during imports,
    so an interrupt waits until imports end.
    """
    before, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)

    def stop() -> None:
        raise KeyboardInterrupt

    # A process that ignores interrupts must keep doing so; only the main thread may set handlers.
    ours = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, _after_imports(stop))
    sys.unraisablehook = partial(_send_again, before)
    try:
        yield
    finally:
        sys.unraisablehook = before
        if ours:
            signal.signal(signal.SIGINT, handler)


def _send_again(otherwise: Callable[[Dropped], object], dropped: Dropped) -> None:
    from ..executor.models.faults import TerminatedError

    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        otherwise(dropped)
        return
    number = signal.SIGTERM if issubclass(dropped.exc_type, TerminatedError) else signal.SIGINT
    over = threading.Event()
    # Wait until this hook ends: it drops exceptions, too.
    _send(number, over.wait)
    over.set()


def _send(number: signal.Signals, wait: Callable[[], object] = lambda: None) -> None:
    def again() -> None:
        wait()
        time.sleep(AGAIN_AFTER)
        _thread.interrupt_main(number)

    threading.Thread(target=again, daemon=True).start()


def _after_imports(stop: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """Return a handler that stops at once, or after current imports."""
    outside = _imports(sys._getframe())

    def handler(number: int, frame: FrameType | None) -> None:
        if _imports(frame) > outside:
            _send(signal.Signals(number))
        else:
            stop()

    return handler


def _imports(frame: FrameType | None) -> int:
    """Count the unfinished imports in a frame's stack."""
    number = 0
    while frame is not None:
        number += frame.f_code.co_filename == _IMPORTS
        frame = frame.f_back
    return number
