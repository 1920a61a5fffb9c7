"""A run in stretches: between them its clock stands still, and something else can be measured."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from batchbound.data.arrays import FloatArray
from batchbound.data.trace import Trace


class PausedClock:
    """
    A clock that stands still between stretches; it begins standing.

    Parameters
    ----------
    clock
        That goes on all the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = [clock()]
        self._lost = [0.0]
        self._stands_at: float | None = self._begun[0]

    def __call__(self) -> float:
        """Return the seconds."""
        now = self._clock() if self._stands_at is None else self._stands_at
        return now - self._lost[-1]

    def go_on(self) -> None:
        """End a pause."""
        assert self._stands_at is not None
        now = self._clock()
        self._begun.append(self._stands_at)
        self._lost.append(self._lost[-1] + now - self._stands_at)
        self._stands_at = None

    def stand(self) -> None:
        """Begin a pause."""
        self._stands_at = self._clock()

    def read_at(self, times: FloatArray) -> FloatArray:
        """Return what this clock showed when the other one showed ``times``."""
        begun, lost = np.array(self._begun), np.array(self._lost)
        last = np.maximum(0, np.searchsorted(begun, times, side="right") - 1)
        # Within a pause it shows the time at which the pause began.
        return np.asarray(np.maximum(times - lost[last], begun[last] - lost[np.maximum(0, last - 1)]))


class PausedRun:
    """
    A run that goes on when it is told to.

    Parameters
    ----------
    serving
        Yields each request as it finishes, and returns the trace.
    clock
        Of the run's engine.
    requests
        In all.
    """

    def __init__(self, serving: Generator[object, None, Trace], clock: PausedClock, requests: int) -> None:
        self._serving, self._clock, self._requests = serving, clock, requests
        self._finished = 0
        self.trace: Trace | None = None
        """Once it is over."""

    def go_on(self, share: float) -> None:
        """Go on until such a share of the requests is finished; to the end if that is 1."""
        self._clock.go_on()
        try:
            while self.trace is None and (share >= 1 or self._finished < share * self._requests):
                next(self._serving)
                self._finished += 1
        except StopIteration as done:
            self.trace = done.value
        self._clock.stand()
