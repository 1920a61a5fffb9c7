from __future__ import annotations

import numpy as np
import pytest
from builders import Watched
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload, numbered_ids
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.queues.admission import Admission
from batchbound.heuristics.queues.ordered import Ordered
from batchbound.heuristics.queues.prefill_rules import PrefillFirst, PrefillRule, SkiRental, Threshold
from batchbound.heuristics.queues.queue_policy import QueuePolicy
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.replay_and_repair import Replay
from batchbound.heuristics.simulate import remaining_schedule, simulate

COST = CostModel(prefill_base=10.0, prefill_per_token=1.0, decode_base=2.0, decode_per_slot=0.5)


def problem_of(outputs: list[int], slots: int) -> Problem:
    return Problem(Workload.from_lengths([1] * len(outputs), outputs), COST, slots)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A random problem and a schedule of it: any order, any rule, whatever the limits are."""
    count = draw(st.integers(1, 14))
    inputs = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    arrival = None
    if draw(st.booleans()):
        times = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
        arrival = np.array(times, dtype=np.float64)
    workload = Workload(numbered_ids(count), np.array(inputs), np.array(outputs), arrival)  # type: ignore[arg-type]
    most = max(a + b for a, b in zip(inputs, outputs, strict=True))
    problem = Problem(
        workload,
        CostModel(3.0, 0.3, 2.0, draw(st.sampled_from([0.0, 0.5])), 5.0, draw(st.sampled_from([0.0, 0.01]))),
        draw(st.integers(1, 5)),
        kv_capacity=draw(st.none() | st.integers(most, 3 * most)),
        prefill_token_cap=draw(st.none() | st.integers(max(inputs), 3 * max(inputs))),
        prefill_emits_first_token=draw(st.booleans()),
    )
    order = np.array(draw(st.permutations(range(count))))
    rules: list[PrefillRule] = [PrefillFirst(), SkiRental(0.5), SkiRental(2.0), Threshold(0.7)]
    rule = draw(st.sampled_from(rules))
    plan = schedule_of(simulate(problem, QueuePolicy(Ordered(order), rule, Admission(problem))))
    assert plan.check(problem) is None
    return problem, plan


@settings(max_examples=50, deadline=None)
@given(plan=plans())
def test_a_plan_is_followed_to_the_step_while_lengths_are_as_planned(plan: tuple[Problem, Schedule]) -> None:
    problem, schedule = plan
    trace = simulate(problem, Watched(Replay(schedule, problem)))
    followed = schedule_of(trace)
    assert followed.bin_of.tolist() == schedule.bin_of.tolist()
    assert followed.slot_of.tolist() == schedule.slot_of.tolist()
    assert followed.decode_steps.tolist() == schedule.decode_steps.tolist()
    assert trace.makespan == pytest.approx(schedule.makespan(problem), abs=1e-9)
    if not problem.workload.arrival.any():
        assert sum(stage.kind == "decode" for stage in trace.stages) == schedule.changes(problem)


@settings(max_examples=30, deadline=None)
@given(plan=plans(), data=st.data())
def test_a_plan_that_lets_slots_idle_on_purpose_is_followed_too(
    plan: tuple[Problem, Schedule], data: st.DataObject
) -> None:
    problem, schedule = plan
    delays = data.draw(st.lists(st.integers(0, 5), min_size=schedule.bins, max_size=schedule.bins))
    later = Schedule(schedule.bin_of, schedule.slot_of, schedule.decode_steps + np.array(delays))
    assume(later.check(problem) is None)
    trace = simulate(problem, Watched(Replay(later, problem)))
    followed = schedule_of(trace)
    assert followed.bin_of.tolist() == later.bin_of.tolist()
    assert followed.slot_of.tolist() == later.slot_of.tolist()
    if later.active(problem).all():
        assert followed.decode_steps.tolist() == later.decode_steps.tolist()
        assert trace.makespan == pytest.approx(later.makespan(problem), abs=1e-9)
    else:
        assert trace.makespan <= later.makespan(problem) + 1e-9


@settings(max_examples=50, deadline=None)
@given(plan=plans(), data=st.data())
def test_every_request_is_served_within_the_limits_when_lengths_turn_out_different(
    plan: tuple[Problem, Schedule], data: st.DataObject
) -> None:
    problem, schedule = plan
    count = len(problem)
    outputs = np.array(data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count)))
    trace = simulate(problem, Watched(Replay(schedule, problem)), outputs)
    assert trace.tokens.tolist() == outputs.tolist()
    assert trace.makespan == pytest.approx(trace.finished.max())


def test_bins_without_requests_or_steps_are_followed() -> None:
    problem = problem_of([3, 3, 2], slots=3)
    schedule = Schedule(np.array([0, 1, 3]), np.array([0, 1, 2]), np.array([0, 1, 0, 2, 0]))
    assert schedule.check(problem) is None
    trace = simulate(problem, Replay(schedule, problem))
    assert [(stage.kind, stage.decode_steps, stage.active) for stage in trace.stages] == [
        ("prefill", 0, 1),
        ("prefill", 0, 1),
        ("decode", 1, 2),
        ("prefill", 0, 1),
        ("decode", 2, 3),
    ]
    assert trace.makespan == pytest.approx(schedule.makespan(problem))


def test_completions_of_the_prefill_stage_alone_hold_no_more_than_their_prompts() -> None:
    problem = Problem(
        Workload.from_lengths([10, 4, 3], [1, 1, 2]),
        COST,
        3,
        kv_capacity=17,
        prefill_emits_first_token=True,
    )
    plan = Schedule.from_bins(problem, [0, 0, 0], [1])
    assert plan.check(problem) is None
    trace = simulate(problem, Replay(plan, problem))
    assert trace.prefill_stages == 1
    assert trace.makespan == pytest.approx(plan.makespan(problem))
    assert simulate(problem, policy_named("lpt", problem)).prefill_stages == 1


def test_completions_that_outgrow_the_one_token_planned_give_way_once() -> None:
    problem = Problem(
        Workload.from_lengths([10, 4], [1, 1]), COST, 2, kv_capacity=15, prefill_emits_first_token=True
    )
    plan = Schedule.from_bins(problem, [0, 0], [0])
    trace = simulate(problem, Replay(plan, problem), np.array([4, 3]))
    assert (trace.evictions, trace.prefill_stages) == (1, 2)


def test_steps_in_which_nothing_runs_are_left_out() -> None:
    problem = problem_of([2, 2], slots=1)
    schedule = Schedule(np.array([0, 1]), np.array([0, 0]), np.array([5, 4]))
    assert simulate(problem, Replay(schedule, problem)).decode_steps == 4


def test_a_slot_free_early_takes_the_longest_request_when_idling_has_cost_enough() -> None:
    # Planned: 0 then 2 in slot 0, 1 then 3 in slot 1, refilled together in decode step 30.
    problem = problem_of([30, 30, 5, 9], slots=2)
    schedule = Schedule(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([30, 9]))
    trace = simulate(problem, Replay(schedule, problem), np.array([10, 30, 5, 9]))
    followed = schedule_of(trace)
    # Slot 0 idles from round 10; 10 s * 0.5 at 2 s / 2 slots are five slot-steps. The last waits for nobody.
    assert followed.starts[followed.bin_of].tolist() == [0, 0, 24, 15]
    assert followed.slot_of.tolist() == [0, 1, 0, 0]


def test_a_slot_free_early_rides_along_with_a_planned_stage() -> None:
    problem = problem_of([30, 12, 5, 9], slots=2)
    schedule = Schedule(np.array([0, 0, 2, 1]), np.array([0, 1, 0, 1]), np.array([12, 18, 5]))
    trace = simulate(problem, Replay(schedule, problem), np.array([10, 12, 5, 9]))
    followed = schedule_of(trace)
    assert followed.bin_of.tolist() == [0, 0, 1, 1]
    assert followed.decode_steps.tolist() == [12, 9]


def test_the_successor_of_a_request_that_overruns_goes_elsewhere() -> None:
    problem = problem_of([4, 4, 4, 4], slots=2)
    schedule = Schedule(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([4, 4]))
    followed = schedule_of(simulate(problem, Replay(schedule, problem), np.array([40, 4, 4, 4])))
    assert followed.slot_of.tolist() == [0, 1, 1, 1]


def test_a_plan_for_another_problem_is_refused() -> None:
    problem = problem_of([2, 2], slots=1)
    with pytest.raises(ValueError, match="the schedule is of 1 requests, the problem has 2"):
        Replay(Schedule(np.array([0]), np.array([0]), np.array([2])), problem)
    with pytest.raises(ValueError, match="the schedule uses slot 1 of 1"):
        Replay(Schedule(np.array([0, 0]), np.array([0, 1]), np.array([2])), problem)


@settings(max_examples=40, deadline=None)
@given(plan=plans(), data=st.data())
def test_what_is_left_of_a_plan_is_a_schedule_that_can_be_replayed(
    plan: tuple[Problem, Schedule], data: st.DataObject
) -> None:
    problem, schedule = plan
    keep = data.draw(st.lists(st.integers(0, len(problem) - 1), min_size=1, unique=True))
    left, rest = remaining_schedule(problem, schedule, keep)
    assert left.workload.ids.tolist() == problem.workload.ids[keep].tolist()
    assert rest.check(left) is None
    assert simulate(left, Replay(rest, left)).makespan == pytest.approx(rest.makespan(left), abs=1e-9)


def test_nothing_done_leaves_the_plan_as_it_was() -> None:
    problem = problem_of([2, 9, 4], slots=2)
    schedule = Schedule(np.array([0, 0, 2]), np.array([0, 1, 0]), np.array([3, 2, 4]))
    left, rest = remaining_schedule(problem, schedule, [0, 1, 2])
    assert rest.makespan(left) == pytest.approx(schedule.makespan(problem))
    assert rest.slot_of.tolist() == [0, 1, 0]
    assert rest.decode_steps.tolist() == [5, 4]


def test_a_job_that_is_half_done_is_planned_afresh_where_that_is_shorter() -> None:
    problem = Problem(generate("table3", 0), CostModel.paper(), 200)
    plan = schedule_of(simulate(problem, policy_named("lpt-ski", problem)))
    start = plan.starts[plan.bin_of]
    keep = np.flatnonzero(start + problem.decode_steps > plan.starts[-1] // 2)
    left, rest = remaining_schedule(problem, plan, keep)
    fresh = simulate(left, policy_named("lpt-ski", left)).makespan
    assert rest.makespan(left) <= fresh + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.2, 1.0])
def test_a_repaired_plan_is_no_worse_than_deciding_afresh_on_the_same_predictions(error: float) -> None:
    replayed, fresh, served_in_order = [], [], []
    for seed in range(3):
        workload = generate("table3", seed)
        true = workload.output_tokens
        noise = np.random.default_rng(seed).normal(0, error, len(true))
        predicted = np.maximum(1, np.rint(true * np.exp(noise))).astype(np.int64)
        problem = Problem(workload.with_output_tokens(predicted), CostModel.paper(), 200)
        # A plan unlike longest first: the same rule on a shuffled order.
        order = np.random.default_rng(seed).permutation(len(problem))
        shuffled = QueuePolicy(Ordered(order), SkiRental(), Admission(problem))
        for make_plan in (policy_named("lpt-ski", problem), shuffled):
            plan = schedule_of(simulate(problem, make_plan))
            replayed.append(simulate(problem, Replay(plan, problem), true).makespan)
        fresh.append(simulate(problem, policy_named("lpt-ski", problem), true).makespan)
        served_in_order.append(simulate(problem, policy_named("fcfs", problem), true).makespan)
    assert np.mean(replayed[::2]) <= 1.002 * np.mean(fresh)
    assert np.mean(replayed[1::2]) <= 1.01 * np.mean(fresh)
    assert np.mean(replayed) < np.mean(served_in_order)


@pytest.mark.slow
def test_a_repaired_plan_keeps_to_its_order_where_memory_is_scarce() -> None:
    workload = generate("table3", 0)
    noise = np.random.default_rng(0).normal(0, 0.2, len(workload))
    predicted = np.maximum(1, np.rint(workload.output_tokens * np.exp(noise))).astype(np.int64)
    problem = Problem(workload.with_output_tokens(predicted), CostModel.paper(), 200, kv_capacity=60_000)
    plan = schedule_of(simulate(problem, policy_named("fcfs-ski", problem)))
    fresh = simulate(problem, policy_named("fcfs-ski", problem), workload.output_tokens)
    trace = simulate(problem, Watched(Replay(plan, problem)), workload.output_tokens)
    assert trace.makespan < 1.01 * fresh.makespan
