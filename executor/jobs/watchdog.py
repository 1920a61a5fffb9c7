"""Watchdog for device calls that hang without an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self


class Watchdog:
    """Watchdog that calls ``on_stall`` after a long silence, once.

    The call comes from another thread. The main thread may hang in a device call that no exception reaches,
    so ``on_stall`` should end the process.
    """

    def __init__(self, seconds: float, on_stall: Callable[[], None]) -> None:
        self._seconds, self._on_stall = seconds, on_stall
        self._alive_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def alive(self) -> None:
        """Note a sign of life."""
        # Waking the thread here would cost more than a short stage.
        self._alive_at = time.monotonic()

    def _watch(self) -> None:
        seconds_left = self._seconds
        while not self._over.wait(seconds_left):
            seconds_left = self._alive_at + self._seconds - time.monotonic()
            if seconds_left <= 0:
                self._on_stall()
                return
