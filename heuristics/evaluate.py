"""What a policy reaches when completions turn out longer or shorter than planned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..data.costs.cost import FloatArray, IntArray
from ..data.problem import Problem
from .policy import Policy
from .simulate import simulate


def replayed_makespans(problem: Problem, make: Callable[[], Policy], truths: IntArray) -> FloatArray:
    """
    Return the makespan of a policy for each set of true lengths, seconds, shape (samples,).

    Parameters
    ----------
    problem
        The problem with the lengths as planned, which is all the policy knows beforehand.
    make
        Returns a fresh policy.
    truths
        The true lengths, tokens, shape (samples, requests).
    """
    return np.array([simulate(problem, make(), truth).makespan for truth in truths])
