"""Policies told more than can be known: of groups, and never of a single request."""

from __future__ import annotations

import numpy as np
from builders import UNIT, workload_of

from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.oracles import told_lengths, told_tendencies
from batchbound.heuristics.unknown_lengths.registry import without_lengths

LENGTHS = np.array([2, 3, 9, 1, 4, 5])
PROBLEM = Problem(workload_of([1] * 6, LENGTHS.tolist(), group=[0, 0, 1, 1, 2, 2]), UNIT, 1)


def order(trace: Trace) -> list[int]:
    found: list[int] = np.argsort(trace.prefilled).tolist()
    return found


def test_groups_come_by_their_tendency_from_the_first_stage_on() -> None:
    policy = told_tendencies(without_lengths(PROBLEM), np.array([0.0, 1.0, 2.0]))
    assert order(simulate(without_lengths(PROBLEM), policy, LENGTHS)) == [4, 5, 2, 3, 0, 1]


def test_groups_come_by_what_is_left_of_them_and_equals_by_arrival() -> None:
    # The second has 10 in two, and 1 in one after its 9; the third 9 in two, 5 and then nothing.
    policy = told_lengths(without_lengths(PROBLEM), LENGTHS)
    assert order(simulate(without_lengths(PROBLEM), policy, LENGTHS)) == [2, 4, 5, 0, 1, 3]


def test_which_of_a_group_is_long_is_not_told() -> None:
    swapped = LENGTHS[[0, 1, 3, 2, 4, 5]]
    policy = told_lengths(without_lengths(PROBLEM), swapped)
    assert order(simulate(without_lengths(PROBLEM), policy, swapped))[0] == 2
