"""The strongest bound that some seconds of proof give, whatever solver makes the schedule."""

from __future__ import annotations

from ..data.bound import Bound
from ..data.problem import Problem
from ..models.bounds import best_bound
from ..models.least_counts import Counts, least_counts
from .partition import partition_bound

DEFAULT_SECONDS = 2.0
"""CPU seconds for what takes a search; most bounds need less than a tenth of it."""


def proven_bound(problem: Problem, seconds: float = DEFAULT_SECONDS) -> Bound:
    """
    Return the strongest valid bound found within a time limit.

    Beyond :func:`~batchbound.models.bounds.best_bound`, the rounds are at least the makespan of any packing
    of the requests over the slots, the hybrid paper's (26)-(30), which column generation bounds from below
    (Gilmore and Gomory 1961). Where a packing meets the cheap bounds, as with many requests a slot, there is
    nothing to add and it ends at once.

    Parameters
    ----------
    problem
        The problem bounded. Arrival times are left out, which only lowers the bound.
    seconds
        CPU seconds for the packing's bound.

    Returns
    -------
    Bound
        Its certificate holds all a checker needs: prices in place of the search.
    """
    return best_bound(problem, proven_counts(problem, seconds))


def proven_counts(problem: Problem, seconds: float = DEFAULT_SECONDS) -> Counts:
    """
    Return the fewest stages and rounds proven within a time limit.

    Parameters
    ----------
    problem
        The problem bounded.
    seconds
        CPU seconds for the packing's bound.
    """
    counts = least_counts(problem)
    return counts.with_packing(partition_bound(problem.rounds, counts.slots, seconds))
