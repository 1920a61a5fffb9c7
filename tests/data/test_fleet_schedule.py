"""The fleet's referee finds every rule a fleet's schedule breaks, and says where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, schedule_of, workload_of

from batchbound.data.fleet import Fleet, FleetSchedule, Groups, Replica
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import MOST_SLOTS

# Two replicas of one slot; requests 0 and 2 are a group, 1 and 3 another, 4 is alone.
WORKLOAD = workload_of([1] * 5, [2, 1, 1, 2, 1], group=[7, 8, 7, 8, -1])
FLEET = Fleet(WORKLOAD, (Replica(UNIT, 1), Replica(UNIT, 1, busy=2.5)))
FIRST = schedule_of([0, 1, 2], [0, 0, 0], [2, 1, 1])
SECOND = schedule_of([0, 1], [0, 0], [1, 2])
TOGETHER = FleetSchedule(np.array([0, 1, 0, 1, 0]), (FIRST, SECOND))
SPREAD = FleetSchedule(np.array([0, 0, 1, 1, 0]), (FIRST, schedule_of([0, 1], [0, 0], [1, 2])))


def test_a_schedule_that_breaks_no_rule_passes() -> None:
    assert TOGETHER.check(FLEET) is None
    assert TOGETHER.check(FLEET, "together") is None
    assert SPREAD.check(FLEET, "spread") is None
    assert SPREAD.members(1).tolist() == [2, 3]
    # Five seconds of decode steps and three of stages less the busy ones: 3 + 4 on the first, 2.5 + 2 + 3.
    assert TOGETHER.finishes(FLEET) == (7.0, 7.5)
    assert TOGETHER.makespan(FLEET) == 7.5


@pytest.mark.parametrize(
    ("schedule", "groups", "message"),
    [
        (
            FleetSchedule(np.array([0, 1, 0, 1]), (FIRST, SECOND)),
            "any",
            "every request is scheduled: replica_of has shape (4,) for 5 requests",
        ),
        (
            FleetSchedule(np.array([0, 1, 0, 1, 0]), (FIRST,)),
            "any",
            "every replica has a schedule: 1 schedules for 2 replicas",
        ),
        (
            FleetSchedule(np.array([0, 1, 2, 1, 0]), (FIRST, SECOND)),
            "any",
            "every request is scheduled: on replica 2 of 2 (request 2)",
        ),
        (
            FleetSchedule(np.array([0, -1, 0, 1, 0]), (FIRST, SECOND)),
            "any",
            "every request is scheduled: on replica -1 of 2 (request 1)",
        ),
        (
            FleetSchedule(np.array([0, 1, 0, 1, 0]), (FIRST, None)),
            "any",
            "every request is scheduled: replica 1 has requests and no schedule (request 1)",
        ),
        (
            FleetSchedule(np.array([0, 0, 0, 0, 0]), (FIRST, SECOND)),
            "any",
            "every request is scheduled: replica 0: every request is scheduled:"
            " bin_of has shape (3,) for 5 requests",
        ),
        (
            FleetSchedule(
                np.zeros(5, dtype=np.int64), (schedule_of([0, 1, 2, 3, 4], [0] * 5, [2, 1, 1, 2, 1]), SECOND)
            ),
            "any",
            "every replica has its own schedule: replica 1 has a schedule, no request",
        ),
        (
            FleetSchedule(np.array([0, 1, 0, 1, 0]), (FIRST, schedule_of([0, 1], [0, 0], [1, 1]))),
            "any",
            "every request finishes: replica 1: every request finishes: needs 2 decode steps, 1 are left"
            " (request 1, slot 0, bin 1)",
        ),
        (
            SPREAD,
            "together",
            "a group stays together: replica 0 has 1 of 2 requests of group 7 (request 0)",
        ),
        (
            TOGETHER,
            "spread",
            "a group is spread: replica 0 has 2 of 2 requests of group 7 (request 0)",
        ),
    ],
)
def test_each_rule_that_is_broken_is_named(schedule: FleetSchedule, groups: Groups, message: str) -> None:
    assert str(schedule.check(FLEET, groups)) == message


def test_a_group_larger_than_the_fleet_is_spread_evenly() -> None:
    fleet = Fleet(workload_of([1] * 3, [1] * 3, group=[5, 5, 5]), FLEET.replicas)
    two, one = schedule_of([0, 1], [0, 0], [1, 1]), schedule_of([0], [0], [1])
    assert FleetSchedule(np.array([1, 0, 1]), (one, two)).check(fleet, "spread") is None
    three = schedule_of([0, 1, 2], [0, 0, 0], [1, 1, 1])
    refused = FleetSchedule(np.array([0, 0, 0]), (three, None)).check(fleet, "spread")
    assert str(refused) == "a group is spread: replica 0 has 3 of 3 requests of group 5 (request 0)"


def test_an_idle_replica_needs_no_schedule() -> None:
    alone = schedule_of([0, 1, 2, 3, 4], [0] * 5, [2, 1, 1, 2, 1])
    schedule = FleetSchedule(np.zeros(5, dtype=np.int64), (alone, None))
    assert schedule.check(FLEET) is None
    assert schedule.finishes(FLEET) == (12.0, 2.5)


def test_a_replica_refuses_limits_that_none_has() -> None:
    assert Replica(UNIT, MOST_SLOTS).slots == MOST_SLOTS
    with pytest.raises(ValueError, match="slots is 1000001; it must be at most 1,000,000"):
        Replica(UNIT, MOST_SLOTS + 1)
    with pytest.raises(ValueError, match="kv_capacity is 0; it must be at least 1"):
        Replica(UNIT, 1, kv_capacity=0)
    with pytest.raises(ValueError, match=r"busy is -1\.0; it must be seconds"):
        Replica(UNIT, 1, busy=-1.0)


def test_a_replica_is_free_at_some_time_and_a_fleet_has_one() -> None:
    with pytest.raises(ValueError, match="busy is inf; it must be seconds, not negative"):
        Replica(UNIT, 1, busy=float("inf"))
    with pytest.raises(ValueError, match=r"^a fleet has at least one replica$"):
        Fleet(WORKLOAD, ())


def test_a_fleets_problems_have_its_requests_its_limits_and_its_first_tokens() -> None:
    limits: dict[str, Any] = {"kv_capacity": 40, "prefill_token_cap": 20, "max_position": 30}
    problem = problem_of([1, 2], [3, 4], 3, UNIT, prefill_emits_first_token=True, **limits)
    fleet = Fleet.of(problem, 2)
    assert fleet.replicas == (Replica(UNIT, 3, **limits),) * 2
    for each in (fleet.problem(), fleet.problem(1)):
        assert each.workload is problem.workload
        assert (each.cost, each.slots, each.prefill_emits_first_token) == (UNIT, 3, True)
        assert {name: getattr(each, name) for name in limits} == limits
    assert fleet.problem_of(1, [1]).decode_steps.tolist() == [3]
    other = fleet.with_output_tokens([5, 6])
    assert other.workload.output_tokens.tolist() == [5, 6]
    assert (other.replicas, other.prefill_emits_first_token) == (fleet.replicas, True)
    alone = FleetSchedule.of(schedule_of([0, 0], [0, 1], [3]))
    assert alone.replica_of.tolist() == [0, 0]
    assert alone.check(Fleet.of(problem, 1)) is None


def test_a_fleets_problem_is_that_of_its_first_replica_unless_another_is_asked_for() -> None:
    fleet = Fleet(WORKLOAD, (Replica(UNIT, 3), Replica(UNIT, 4)))
    assert fleet.problem().slots == 3
    assert fleet.problem(1).slots == 4


def test_no_finish_is_told_of_a_fleet_whose_replicas_are_not_those_of_the_schedule() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        FleetSchedule(TOGETHER.replica_of, (FIRST,)).finishes(FLEET)


def test_a_fleets_schedule_shares_no_memory_and_cannot_be_changed() -> None:
    given = np.array([0, 1, 0, 1, 0], dtype=np.int32)
    schedule = FleetSchedule(given, (FIRST, SECOND))  # type: ignore[arg-type]
    given[0] = 1
    assert schedule.replica_of.tolist() == [0, 1, 0, 1, 0]
    assert schedule.replica_of.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        schedule.replica_of[0] = 1


def test_a_replica_after_an_idle_one_is_judged() -> None:
    short = FleetSchedule(np.ones(5, dtype=np.int64), (None, schedule_of([0] * 5, [0] * 5, [7])))
    assert str(short.check(FLEET)).startswith("one request per slot: replica 1: ")


def test_groups_are_told_apart_whatever_their_names() -> None:
    fleet = Fleet(workload_of([1] * 6, [1] * 6, group=[0, 0, 1, 1, 2, 2]), FLEET.replicas)
    three = schedule_of([0, 1, 2], [0, 0, 0], [1, 1, 1])
    apart = FleetSchedule(np.array([0, 1, 0, 1, 0, 1]), (three, three))
    assert apart.check(fleet, "spread") is None
    assert str(apart.check(fleet, "together")) == (
        "a group stays together: replica 0 has 1 of 2 requests of group 0 (request 0)"
    )


def test_each_replica_computes_the_beginnings_of_its_own_requests() -> None:
    tree = PrefixTree.of_prompts([[1, 2, 3], [1, 2, 4], [1, 2, 5], [6]])
    problem = problem_of([3, 3, 3, 1], [1] * 4, 2)
    problem = replace(problem, workload=problem.workload.with_tree(tree))
    fleet = Fleet.of(problem, 2)
    shares = FleetSchedule(
        np.array([0, 0, 1, 1]), (schedule_of([0, 0], [0, 1], [1]), schedule_of([0, 0], [0, 1], [1]))
    )
    assert shares.check(fleet) is None
    tokens = [
        schedule.stage_tokens(fleet.problem_of(k, shares.members(k))).tolist()
        for k, schedule in enumerate(shares.schedules)
        if schedule is not None
    ]
    assert tokens == [[2 + 1 + 1], [2 + 1 + 1]]
