"""The strongest bound that some seconds of proof give, whatever solver makes the schedule."""

from __future__ import annotations

import time

import numpy as np

from ..data.bound import Bound
from ..data.problem import Problem
from ..models.bounds import best_bound
from ..models.difference_bound import cheapest_counts
from ..models.least_counts import PRICED_WORK, Counts, least_counts
from ..models.rounded_packing import MOST_WORK, RoundedPacking
from .partition import partition_bound
from .rounded_packing import refute_rounds

DEFAULT_SECONDS = 2.0
"""CPU seconds for what takes a search; most bounds need less than a tenth of it."""


def proven_bound(problem: Problem, seconds: float = DEFAULT_SECONDS) -> Bound:
    """
    Return the strongest valid bound found within a time limit.

    Beyond :func:`~batchbound.models.bounds.best_bound`, the rounds are at least the makespan of any packing
    of the requests over the slots, the hybrid paper's (26)-(30), which column generation bounds from below
    (Gilmore and Gomory 1961). Where a packing meets the cheap bounds, as with many requests a slot, there is
    nothing to add and it ends at once. In small problems, lengths rounded up to the differences that the
    cheapest number of stages has are packed in the same way, again and again until that no longer adds a
    round.

    Parameters
    ----------
    problem
        The problem bounded. Arrival times are left out, which only lowers the bound.
    seconds
        CPU seconds for the packings' bounds.

    Returns
    -------
    Bound
        Its certificate holds all a checker needs: prices in place of the search.
    """
    deadline = time.process_time() + seconds
    counts = proven_counts(problem, seconds)
    lengths, numbers = np.unique(problem.rounds[problem.rounds > 0], return_counts=True)
    refuted: list[RoundedPacking] = []
    while len(lengths):
        cheapest = cheapest_counts(problem, counts, refuted)
        values, rounds = cheapest.values, cheapest.rounds
        if values * len(lengths) ** 2 > MOST_WORK or rounds * len(lengths) > PRICED_WORK:
            break
        left = deadline - time.process_time()
        proof = refute_rounds(lengths, numbers, counts.slots, values, rounds, left)
        if proof is None:
            break
        told = [old for old in refuted if old.values > values or old.capacity > rounds]
        refuted = [*told, proof]
    plain = best_bound(problem, counts)
    return max(plain, best_bound(problem, counts, refuted), key=lambda bound: bound.seconds)


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
