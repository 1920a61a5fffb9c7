"""Number of completions to keep in flight on a server."""

from __future__ import annotations

import math

RUNNING_SHARE = 0.25
"""Share of a request's completions that run in flight, by default."""


def running_of(choices: int, share: float = RUNNING_SHARE) -> int:
    """Return how many completions of a request count as in flight."""
    return 1 if choices == 1 else min(choices, math.ceil(choices * share))


def queue_of(slots: int, largest: int = 1) -> int:
    """Return the number of completions to queue on a server.

    It is at least one request's.
    """
    return max(4, slots // 8, largest)


def in_flight_of(slots: int, largest: int = 1) -> int:
    """Return the number of completions to keep in flight on a server.

    A few more than the slots wait in the server's queue, so that a freed slot is filled at once. ``largest``
    is the most completions of one request that are expected to run.
    """
    return slots + queue_of(slots, largest)
