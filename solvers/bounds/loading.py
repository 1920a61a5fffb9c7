"""Whether there is time for linear programmes: loading what solves them takes as long as many a limit."""

from __future__ import annotations

import sys

LOADING_SECONDS = 0.35
"""CPU seconds that the first linear programme of a process takes to load what solves it: 0.2 to 0.45."""


def time_for_programmes(seconds: float) -> bool:
    """
    Return whether linear programmes are worth beginning.

    Parameters
    ----------
    seconds
        Seconds left for them.
    """
    return seconds > LOADING_SECONDS or "scipy.optimize" in sys.modules
