"""Policies with foresight, which show what others could gain."""

from __future__ import annotations

import numpy as np

from ...data.arrays import FloatArray, IntArray
from ...data.problem import Problem
from ..queues.queue_policy import QueuedPolicy
from .lengths import Observed
from .queues import group_numbers
from .registry import by_groups


def told_tendencies(problem: Problem, tendency: FloatArray) -> QueuedPolicy:
    """Return the policy that knows the order of groups' mean lengths.

    Other policies have to learn it, and chance within the groups remains. List order by expected length is
    not the best for every draw, so its gain is an estimate and no bound.

    problem: Its lengths are not read.
    tendency: For each group, any number that grows with its lengths, shape (groups,).
    """
    return by_groups(problem, lambda _observed, _groups: tendency, scouts=0)


def told_lengths(problem: Problem, lengths: IntArray) -> QueuedPolicy:
    """Return the policy that knows each group's set of lengths.

    It does not know their order within the group, and serves the most expected first. Its gain is an estimate
    and no bound.

    problem: Its lengths are not read.
    lengths: True lengths, tokens, shape (requests,).
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
