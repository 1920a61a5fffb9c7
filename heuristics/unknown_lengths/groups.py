"""Groups of requests, such as the completions of one prompt."""

from __future__ import annotations

import numpy as np

from ...data.arrays import IntArray
from ...data.problem import Problem

LEAST_SHARE = 0.05
"""Least intraclass correlation for an order of groups."""

SURE = 0.5
"""Least probability of that correlation."""


def group_numbers(problem: Problem) -> tuple[IntArray, int]:
    """Return each request's group from zero, and their number."""
    number = problem.workload.group_numbers()
    return number, int(number.max()) + 1


def has_groups(problem: Problem) -> bool:
    """Return whether any group has two requests."""
    numbers, groups = group_numbers(problem)
    return groups < len(numbers)


def place_in_group(group: IntArray) -> IntArray:
    """Return each request's position in its group, same shape."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered, side="left")
    return place
