"""Notices when a run stands still: a device call that never comes back raises nothing by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self


class Watchdog:
    """
    Calls for help once if too long passes without a sign of life.

    The call comes from a thread of its own: the main one may be inside a device call that no exception
    reaches, so all that helps is to end the process.

    Parameters
    ----------
    seconds
        How long a run may stand still.
    on_stall
        Called when it did.
    """

    def __init__(self, seconds: float, on_stall: Callable[[], None]) -> None:
        self._seconds, self._on_stall = seconds, on_stall
        self._alive, self._over = False, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def alive(self) -> None:
        """Note a sign of life."""
        with self._changed:
            self._alive = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                self._alive = False
                if not self._changed.wait_for(lambda: self._alive or self._over, self._seconds):
                    self._on_stall()
                    return
