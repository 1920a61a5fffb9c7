"""End of a proof, by the clock or by counted work."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

LEAST_LEFT = 1e-6
"""Least seconds left of a limit, which must be positive."""


@dataclass(slots=True)
class Work:
    """Work of linear programmes, as the seconds that it takes about."""

    seconds: float = 0.0
    a_programme: float = 0.005
    """Seconds of a programme of any size."""
    an_entry: float = 2e-5
    """Seconds of an entry that is not zero."""


class Deadline:
    """Seconds until a proof ends.

    seconds: Seconds left.
    work: Work that counts in place of the clock, so that a proof does not depend on speed.
    """

    def __init__(self, seconds: float, work: Work | None = None) -> None:
        self._work = work
        self._end = self._now + seconds

    @property
    def _now(self) -> float:
        return time.perf_counter() if self._work is None else self._work.seconds

    @property
    def left(self) -> float:
        """Seconds left; negative once they are over."""
        return self._end - self._now

    @property
    def solver_seconds(self) -> float:
        """Time limit for a solver; infinite where work counts."""
        return self.left if self._work is None else math.inf

    def within(self, seconds: float) -> Deadline:
        """Return an earlier deadline of the same clock."""
        return Deadline(min(seconds, self.left), self._work)

    def count(self, entries: int) -> None:
        """Count a programme with some entries, if work counts."""
        if self._work is not None:
            self._work.seconds += self._work.a_programme + self._work.an_entry * entries
