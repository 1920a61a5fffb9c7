"""Whether there is time for linear programmes: loading what solves them takes as long as many a limit."""

from __future__ import annotations

import sys

LOADING_SECONDS = 0.2
"""CPU seconds that the first linear programme of a process takes to load what solves it, about."""


def time_for_programmes(seconds: float) -> bool:
    """
    Return whether linear programmes are worth beginning.

    Parameters
    ----------
    seconds
        Seconds left for them.
    """
    return seconds > LOADING_SECONDS or "scipy.optimize" in sys.modules
