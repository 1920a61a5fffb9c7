"""Given an order and groups, requests begin as early as they can, back from the end."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.solvers.exact.group_orders import GroupOrders, neighbours, started_at
from batchbound.solvers.exact.least_steps import Shapes
from batchbound.solvers.exact.request_sets import RequestSets

APART = {0: 0, 1: 1}
TOGETHER = {0: 0, 1: 0}


def orders(capacity: int, slots: int = 2) -> GroupOrders:
    """Return the orders of requests of 9 and 6 steps that hold 3 and 6 tokens at first, 11 at the end."""
    prompts = np.array([3, 6])
    problem = Problem(
        Workload.from_lengths(prompts, np.array([9, 6])), CostModel(4.0, 0.0, 1.0, 0.0), 2, kv_capacity=30
    )
    shapes = Shapes(problem.decode_steps, problem.kv_at_start, 2, 30)
    sets = RequestSets(problem, shapes, prompts)
    return GroupOrders(replace(shapes, slots=slots, capacity=capacity), sets, 1.0)


def test_a_request_begins_once_those_before_it_are_small_enough() -> None:
    # The first one holds 11 - u tokens in decode step u, so from the fourth on 11 more are 18.
    assert orders(18).over([0, 1], APART, 100) == {0: 9, 1: 10}
    assert orders(18).over([1, 0], APART, 100) == {1: 6, 0: 13}
    assert orders(22).over([0, 1], APART, 100) == {0: 9, 1: 6}
    assert orders(22, slots=1).over([0, 1], APART, 100) == {0: 9, 1: 15}


def test_what_shares_a_stage_is_over_at_once() -> None:
    # In the shorter one's last decode step the other holds 3 + 5 tokens beside its 11, whenever that is.
    assert orders(19).over([0, 1], TOGETHER, 100) == {0: 9}
    assert orders(18).over([0, 1], TOGETHER, 100) is None
    assert orders(19).seconds([0, 1], TOGETHER, 100) == 9 + 4
    assert orders(18).seconds([0, 1], APART, 100) == 10 + 2 * 4
    assert orders(18).seconds([0, 1], TOGETHER, 100) == math.inf


def test_a_group_that_never_fits_is_given_up_after_a_few_steps() -> None:
    steps: list[int] = []
    tight = orders(18)
    tight._tick = steps.append
    assert tight.over([0, 1], TOGETHER, 10**12) is None
    assert tight.over([1, 0], TOGETHER, 10**12) is None
    one_slot = orders(22, slots=1)
    one_slot._tick = steps.append
    assert one_slot.over([0, 1], TOGETHER, 10**12) is None
    assert sum(steps) <= 12


def test_nothing_may_begin_too_late() -> None:
    assert orders(22, slots=1).over([0, 1], APART, 8) is None


def test_the_seconds_of_groups_are_known_from_when_they_are_over() -> None:
    assert orders(18).seconds_until({0: 9, 1: 10}, APART) == 10 + 2 * 4
    assert orders(18).seconds_until(None, TOGETHER) == math.inf


def test_a_request_in_another_place_makes_an_order_better() -> None:
    assert orders(18).better([1, 0], APART, 100, 0.0) == [0, 1]
    assert orders(18).better([1, 0], APART, 100, 21.0) == [1, 0]
    assert sorted(neighbours([0, 1, 2])) == [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]]


def test_requests_are_started_in_the_steps_their_groups_are_over() -> None:
    assert started_at({0: 9}, TOGETHER) == {9: 0b11}
    assert started_at({0: 9, 1: 10}, APART) == {9: 0b1, 10: 0b10}
