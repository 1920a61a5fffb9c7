from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from builders import Watched
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.arrays import IntArray
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.trace import Trace
from batchbound.data.workload import Workload, numbered_ids
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.policy import UNTIL_CHANGE
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.algorithm1 import SortingPreemptive
from batchbound.heuristics.queues.assignment import Assigned, round_robin
from batchbound.heuristics.queues.ordered import Ordered, arrival_order, longest_first
from batchbound.heuristics.queues.prefill_rules import (
    Lagrangian,
    Opportunity,
    PacedSkiRental,
    PrefillFirst,
    PrefillRule,
    SkiRental,
    Threshold,
)
from batchbound.heuristics.queues.queue_policy import QueuePolicy
from batchbound.heuristics.registry import POLICIES, policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.packing.partition import solve_partition

ADMITS_BY_THE_NEXT_STEP = ("fcfs", "learned")
"""Policies that reserve no memory for planned lengths, so that it may run out."""

COST = CostModel(prefill_base=10.0, prefill_per_token=1.0, decode_base=2.0, decode_per_slot=0.5)


def problem_of(inputs: list[int], outputs: list[int], slots: int, **limits: int) -> Problem:
    return Problem(Workload.from_lengths(inputs, outputs), COST, slots, **limits)  # type: ignore[arg-type]


@st.composite
def problems(draw: st.DrawFn, arrivals: bool = True) -> Problem:
    count = draw(st.integers(1, 14))
    emits = draw(st.booleans())
    inputs = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    arrival = None
    if arrivals and draw(st.booleans()):
        arrival = np.array(
            draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)), dtype=np.float64
        )
    workload = Workload(numbered_ids(count), np.array(inputs), np.array(outputs), arrival)  # type: ignore[arg-type]
    cost = CostModel(
        prefill_base=draw(st.sampled_from([0.0, 3.0, 20.0])),
        prefill_per_token=0.3,
        decode_base=draw(st.sampled_from([0.0, 2.0])),
        decode_per_slot=draw(st.sampled_from([0.0, 0.5])),
        prefill_floor=draw(st.sampled_from([0.0, 5.0])),
        decode_per_kv_token=draw(st.sampled_from([0.0, 0.01])),
        prefill_bend=9.0,
        prefill_per_token_beyond=draw(st.sampled_from([0.0, 0.2])),
    )
    most = max(a + b for a, b in zip(inputs, outputs, strict=True))
    capacity = draw(st.none() | st.integers(most, 3 * most))
    cap = draw(st.none() | st.integers(max(inputs), 3 * max(inputs)))
    return Problem(
        workload,
        cost,
        draw(st.integers(1, 5)),
        kv_capacity=capacity,
        prefill_token_cap=cap,
        prefill_emits_first_token=emits,
    )


def assert_served(problem: Problem, trace: Trace, outputs: IntArray | None = None) -> None:
    expected = problem.workload.output_tokens if outputs is None else outputs
    assert trace.tokens.tolist() == expected.tolist()
    assert (trace.prefilled >= problem.workload.arrival).all()
    assert (trace.first_token > trace.prefilled - 1e-9).all()
    assert (trace.finished >= trace.first_token - 1e-9).all()
    assert trace.makespan == pytest.approx(trace.finished.max())


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None)
@given(problem=problems())
def test_every_policy_serves_every_request_by_a_schedule_the_referee_accepts(
    name: str, problem: Problem
) -> None:
    trace = simulate(problem, Watched(policy_named(name, problem)))
    assert_served(problem, trace)
    if name in ADMITS_BY_THE_NEXT_STEP and trace.evictions:
        assert problem.kv_capacity is not None
        return
    assert trace.evictions == 0
    schedule = schedule_of(trace)
    assert schedule.check(problem) is None
    assert schedule.makespan(problem) == pytest.approx(trace.makespan, abs=1e-9)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(problem=problems(), data=st.data())
def test_every_policy_serves_every_request_when_lengths_are_not_as_told(
    name: str, problem: Problem, data: st.DataObject
) -> None:
    count = len(problem)
    outputs = np.array(data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count)))
    assert_served(problem, simulate(problem, Watched(policy_named(name, problem)), outputs), outputs)


def test_first_come_first_served_prefills_the_moment_a_slot_falls_free() -> None:
    problem = problem_of([1, 1, 1, 1], [2, 4, 5, 1], slots=2)
    schedule = schedule_of(simulate(problem, policy_named("fcfs", problem)))
    assert schedule.bin_of.tolist() == [0, 0, 1, 2]
    assert schedule.slot_of.tolist() == [0, 1, 0, 1]
    assert schedule.decode_steps.tolist() == [2, 2, 3]


def test_a_slot_with_its_own_list_idles_when_it_is_done() -> None:
    problem = problem_of([1] * 4, [1, 1, 3, 3], slots=2)
    policy = policy_named("packing", problem, np.array([0, 0, 1, 1]))
    assert schedule_of(simulate(problem, policy)).slot_of.tolist() == [0, 0, 1, 1]


def test_algorithm_1_serves_its_own_list_longest_first_then_helps_the_busiest_slot() -> None:
    # Slot 0 owns 0 and 1; slot 1 owns 2 (7 tokens with its prompt), 3, 4 and 5; slot 2 owns 6.
    problem = problem_of([1] * 7, [1, 2, 6, 4, 5, 3, 2], slots=3)
    policy = QueuePolicy(
        SortingPreemptive(problem, [0, 0, 1, 1, 1, 1, 2]), PrefillFirst(), Admission(problem)
    )
    schedule = schedule_of(simulate(problem, policy))
    # 1, 2 and 6 start; after two decode steps slot 0 takes its own 0 and slot 2, done, slot 1's longest: 4.
    assert schedule.bin_of.tolist() == [1, 0, 0, 2, 1, 3, 0]
    assert schedule.slot_of.tolist() == [0, 0, 1, 0, 2, 1, 2]


@pytest.mark.parametrize(
    ("rule", "waits"),
    [
        (PrefillFirst(), 0),
        # 10 s a stage, an idle slot-step at 2 s / 4 slots: 20 slot-steps, half of them by patience.
        (SkiRental(1.0), 20),
        (SkiRental(0.5), 10),
        # The stage's token counts too: more than 11 s, at 1 s a slot-step, or 0.5 s.
        (Lagrangian("decode_step"), 12),
        (Lagrangian("token"), 23),
        # More than 22 tokens: four of the first decode step, and three of each that follows.
        (Lagrangian("literal"), 7),
    ],
)
def test_a_free_slot_waits_as_long_as_the_rule_says(rule: PrefillRule, waits: int) -> None:
    problem = problem_of([1] * 6, [1, 40, 40, 40, 5, 5], slots=4)
    policy = QueuePolicy(Ordered(arrival_order(problem)), rule, Admission(problem))
    assert schedule_of(simulate(problem, policy)).decode_steps[0] == 1 + waits


def test_the_lagrangian_rule_waits_for_a_change_where_a_decode_step_costs_next_to_nothing() -> None:
    problem = Problem(Workload.from_lengths([1, 1], [1, 1]), CostModel(10.0, 0.0, 0.0, 1e-320), 2)
    assert Lagrangian()(problem, Opportunity(joining=1, tokens=1, unstarted=1, idle=0)) == UNTIL_CHANGE


def test_the_last_request_waits_for_nobody() -> None:
    problem = problem_of([1] * 5, [1, 40, 40, 40, 5], slots=4)
    policy = QueuePolicy(Ordered(arrival_order(problem)), SkiRental(1.0), Admission(problem))
    assert schedule_of(simulate(problem, policy)).decode_steps.tolist() == [1, 39]


def test_idle_slot_steps_add_up_over_slots() -> None:
    problem = problem_of([1] * 7, [1, 4, 40, 40, 5, 5, 5], slots=4)
    policy = QueuePolicy(Ordered(arrival_order(problem)), SkiRental(0.5), Admission(problem))
    # One slot idles for three steps, then two until ten slot-steps are reached or passed: four decode steps.
    assert schedule_of(simulate(problem, policy)).decode_steps[0] == 4 + 4


def test_a_threshold_waits_for_enough_free_slots_but_not_for_more_than_wait() -> None:
    problem = problem_of([1] * 7, [1, 2, 3, 9, 3, 3, 3], slots=4)
    two = QueuePolicy(Ordered(arrival_order(problem)), Threshold(share=0.5), Admission(problem))
    schedule = schedule_of(simulate(problem, two))
    assert schedule.decode_steps.tolist() == [2, 1, 6]
    assert np.bincount(schedule.bin_of).tolist() == [4, 2, 1]
    one = QueuePolicy(Ordered(arrival_order(problem)), Threshold(count=1), Admission(problem))
    assert np.bincount(schedule_of(simulate(problem, one)).bin_of).tolist() == [4, 1, 1, 1]


def test_a_stage_that_the_token_cap_fills_never_waits() -> None:
    problem = problem_of([5] * 6, [9] * 6, slots=6, prefill_token_cap=10)
    schedule = schedule_of(simulate(problem, policy_named("lpt-ski", problem)))
    assert schedule.decode_steps.tolist() == [0, 0, 9]


def test_known_lengths_leave_room_for_what_running_requests_will_grow_to() -> None:
    problem = problem_of([4, 4], [4, 4], slots=2, kv_capacity=10)
    schedule = schedule_of(simulate(problem, policy_named("lpt", problem)))
    assert schedule.decode_steps.tolist() == [4, 4]


def test_room_is_counted_at_the_steps_it_is_needed_not_as_a_sum_of_peaks() -> None:
    # 0 holds at most 4 and is gone when 1 reaches its 10: the peaks sum to 14, never more than 10 are held.
    problem = problem_of([3, 3], [2, 8], slots=2, kv_capacity=10)
    assert schedule_of(simulate(problem, policy_named("lpt", problem))).decode_steps.tolist() == [8]


def test_first_come_first_served_evicts_the_newest_when_memory_runs_out() -> None:
    problem = problem_of([4, 4], [4, 4], slots=2, kv_capacity=10)
    trace = simulate(problem, policy_named("fcfs", problem))
    assert trace.evictions == 1
    assert [(stage.kind, stage.decode_steps, stage.active) for stage in trace.stages] == [
        ("prefill", 0, 2),
        ("decode", 2, 2),
        ("decode", 2, 1),
        ("prefill", 0, 1),
        ("decode", 2, 1),
    ]


def test_requests_are_served_by_arrival_when_they_come_over_time() -> None:
    arrival = np.array([30.0, 0.0, 10.0])
    workload = Workload(numbered_ids(3), np.array([1, 1, 1]), np.array([4, 4, 4]), arrival)
    problem = Problem(workload, COST, 1)
    for name in POLICIES:
        trace = simulate(problem, policy_named(name, problem))
        assert np.argsort(trace.prefilled).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: policy_named("sjf", p), "no policy is called 'sjf'"),
        (lambda p: policy_named("fcfs", p, round_robin(p)), "'fcfs' takes no assignment"),
        (lambda p: Assigned(p, [0]), r"has shape \(1,\) for 2 requests"),
        (lambda p: Assigned(p, [0, 2]), "request 1 is assigned to slot 2 of 2"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused(make: Callable[[Problem], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(problem_of([1, 1], [1, 1], slots=2))


@pytest.mark.slow
def test_table_3_comes_out_as_published_and_as_measured() -> None:
    reached: dict[str, list[float]] = {name: [] for name in ("fcfs", "algorithm1", "packed", "lpt-ski")}
    utilization: list[float] = []
    for seed in range(4):
        problem = Problem(generate("table3", seed), CostModel.paper(), 200)
        packed = solve_partition(problem.decode_steps, problem.slots).assignment
        for name in reached:
            policy = "packing-algorithm1" if name == "packed" else name
            assignment = packed if name == "packed" else None
            trace = simulate(problem, policy_named(policy, problem, assignment))
            schedule = schedule_of(trace)
            assert schedule.check(problem) is None
            assert schedule.makespan(problem) == pytest.approx(trace.makespan, abs=1e-9)
            # Seeds differ in how much there is to do; per slot-step of work they are alike.
            reached[name].append(trace.makespan / problem.decode_steps.sum() * 1319 * 344.83)
            if name == "fcfs":
                utilization.append(schedule.utilization(problem))
    assert np.mean(reached["fcfs"]) == pytest.approx(200.4, abs=1.5)
    assert np.mean(utilization) == pytest.approx(0.807, abs=0.006)
    assert np.mean(reached["algorithm1"]) == pytest.approx(191.7, abs=1.5)
    assert np.mean(reached["packed"]) == pytest.approx(181.5, abs=1.5)
    assert np.mean(reached["lpt-ski"]) == pytest.approx(175.2, abs=1.0)


def test_longest_first_is_by_decode_steps() -> None:
    assert longest_first(problem_of([1, 9, 1], [3, 1, 5], slots=1)).tolist() == [2, 0, 1]


def urgent_problem(priority: list[int], arrival: list[float], outputs: list[int], slots: int) -> Problem:
    workload = Workload(
        numbered_ids(len(outputs)),
        np.ones(len(outputs), dtype=np.int64),
        np.array(outputs),
        np.array(arrival),
        priority=np.array(priority),
    )
    return Problem(workload, CostModel(0.0, 0.0, 1.0, 0.0), slots)


def test_an_urgent_request_takes_the_slot_of_the_least_urgent() -> None:
    problem = urgent_problem([1, 0, 2], [0.0, 0.0, 3.0], [10, 10, 4], slots=2)
    trace = simulate(problem, policy_named("priority", problem))
    assert trace.finished.tolist() == [10.0, 14.0, 7.0]
    assert trace.evictions == 1


def test_equals_and_less_urgent_requests_preempt_nobody() -> None:
    problem = urgent_problem([1, 1, 0], [0.0, 2.0, 2.0], [5, 5, 5], slots=1)
    trace = simulate(problem, policy_named("priority", problem))
    assert trace.finished.tolist() == [5.0, 10.0, 15.0]
    assert trace.evictions == 0


def test_a_preempted_request_goes_on_before_its_equals_begin() -> None:
    problem = urgent_problem([0, 0, 5], [0.0, 0.0, 2.0], [6, 6, 3], slots=1)
    trace = simulate(problem, policy_named("priority", problem))
    assert trace.finished.tolist() == [9.0, 15.0, 5.0]


def test_the_paced_rule_waits_only_where_another_request_ends_in_time() -> None:
    workload = Workload.from_lengths(input_tokens=[4] * 9, output_tokens=[5] * 9)
    problem = Problem(workload, CostModel(0.5, 0.0, 0.4, 0.0), slots=4)
    # An idle slot costs 0.1 s a step, a stage of its own 0.5 s: of that, 0.35 s count.
    stage = Opportunity(joining=1, tokens=4, unstarted=5, idle=0, running=3, pace=0.5)
    assert PacedSkiRental()(problem, stage) == 5
    assert PacedSkiRental()(problem, replace(stage, pace=0.25)) == 0
    assert PacedSkiRental()(problem, replace(stage, joining=2, tokens=8)) == 0
    assert PacedSkiRental()(problem, replace(stage, pace=0.0)) == 0


def test_a_floor_that_the_prompts_exceed_saves_nothing() -> None:
    cost = CostModel(0.0, 0.1, 0.4, 0.0, prefill_floor=1.0)
    assert Opportunity(joining=1, tokens=4, unstarted=5, idle=0).saving(cost) == pytest.approx(1.0)
    assert Opportunity(joining=1, tokens=20, unstarted=5, idle=0).saving(cost) == 0.0
