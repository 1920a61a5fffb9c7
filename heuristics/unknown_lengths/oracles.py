"""Policies told more than can be known: what they do not recover, no policy without foresight is known to."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ..queues.queue_policy import QueuedPolicy
from .lengths import Observed
from .queues import group_numbers
from .registry import by_groups


def told_tendencies(problem: Problem, tendency: FloatArray) -> QueuedPolicy:
    """
    Return the policy that is told from the start how long each group tends to be, the longest first.

    A policy has to learn it. What this one does not recover is chance within the groups. It is the order of
    lists by expected length, which is not the best for every draw, so that what it recovers is an estimate
    of what can be and no bound.

    problem: Its lengths are not read.
    tendency: Of each group, any number that grows with its lengths, shape (groups,).
    """
    return by_groups(problem, lambda _observed, _groups: tendency, scouts=0)


def told_lengths(problem: Problem, lengths: IntArray) -> QueuedPolicy:
    """
    Return the policy that is told which lengths each group has and not whose: most left on average first.

    That a group has a single long completion is told, too, which is foresight. What it recovers is an
    estimate and no bound, as of :func:`told_tendencies`.

    problem: Its lengths are not read.
    lengths: True ones, tokens, shape (requests,).
    """
    numbers, groups = group_numbers(problem)
    total = np.bincount(numbers, lengths, minlength=groups)
    count = np.bincount(numbers, minlength=groups)

    def left(observed: Observed, groups: int) -> FloatArray:
        group, tokens = observed.group[observed.ended], observed.tokens[observed.ended]
        gone = np.bincount(group, minlength=groups)
        rest = total - np.bincount(group, tokens, minlength=groups)
        return np.asarray(rest / np.maximum(count - gone, 1))

    return by_groups(problem, left, scouts=0)
