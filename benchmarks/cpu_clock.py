"""The seconds that a benchmark's limits count."""

from __future__ import annotations

import time


def limit_cpu_seconds() -> None:
    """
    Make limits count this process's CPU seconds from now on.

    On a machine that others share a search then has the time it would have on a core of its own.
    """
    for clock in ("monotonic", "perf_counter"):
        setattr(time, clock, time.process_time)
