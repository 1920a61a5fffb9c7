"""Orders of groups by others, and by more than can be known."""

from __future__ import annotations

import numpy as np
import pytest
from builders import UNIT, workload_of
from group_orders import ORDERS, longest_seen, moving_average, told_lengths, told_tendencies

from batchbound.data.problem import Problem
from batchbound.data.trace import Trace
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.unknown_lengths.lengths import Observed
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


def test_scouts_start_one_of_each_group_and_then_the_group_that_showed_the_longest() -> None:
    # Groups 0, 1, 2 show 2, 6 and 4 decode steps; one slot, so that each ends before the next begins.
    problem = Problem(workload_of([1] * 7, [2, 2, 2, 6, 6, 4, 4], group=[0, 0, 0, 1, 1, 2, 2]), UNIT, 1)
    trace = simulate(problem, ORDERS["scouts"](problem))
    assert np.argsort(trace.prefilled).tolist() == [0, 3, 5, 4, 6, 1, 2]


def test_a_group_whose_scout_still_runs_counts_as_the_longest() -> None:
    seen = Observed(np.array([0, 0, 1]), np.array([5, 9, 30]), np.array([True, True, False]))
    assert longest_seen(seen, 3).tolist() == [9.0, np.inf, np.inf]


def test_the_moving_average_gives_a_tenth_to_the_newest_and_128_to_the_unknown() -> None:
    seen = Observed(np.array([0, 0, 0, 1]), np.array([10, 20, 40, 7]), np.ones(4, dtype=np.bool_))
    assert moving_average(seen, 3) == pytest.approx([0.9 * (0.9 * 10 + 2) + 4, 7, 128])
    many = Observed(
        np.zeros(12, dtype=np.int64), np.array([10] * 10 + [1000] * 2), np.ones(12, dtype=np.bool_)
    )
    assert moving_average(many, 1) == pytest.approx([10])
