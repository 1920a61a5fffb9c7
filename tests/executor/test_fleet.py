"""A fleet: its bound and certificate, its plan, and what it does in simulated time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.expectation import Tail
from batchbound.data.files.record import plain, record
from batchbound.data.fleet import Fleet, FleetSchedule, Replica
from batchbound.data.lengths.prediction_error import MeasuredError
from batchbound.data.lengths.remaining import RemainingLengths
from batchbound.data.problem import Problem, ProblemError
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.dispatch import dispatch
from batchbound.heuristics.fleet.policy import FleetPolicy, choose_fleet_policy, serve_with_backoff
from batchbound.heuristics.fleet.simulation import longest_first_policy, simulate_fleet
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.fleet import fleet_bound, work_bound
from batchbound.models.bounds.makespan import best_bound
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits

UNIT = CostModel(0.0, 0.0, 1.0, 0.0)
"""A decode step takes a second, all else is free."""

COSTS = st.sampled_from(
    [
        UNIT,
        CostModel.paper(),
        CostModel(1.0, 0.1, 2.0, 0.5, prefill_floor=1.5, decode_per_kv_token=0.01),
        CostModel(0.5, 0.1, 2.0, 0.5, prefill_bend=15.0, prefill_per_token_beyond=0.2),
    ]
)


def work(answers: list[int], prompt: int = 10) -> Workload:
    return Workload.from_lengths([prompt] * len(answers), answers)


def test_two_replicas_of_one_slot_share_the_steps() -> None:
    fleet = Fleet(work([3, 3, 2, 2, 2]), (Replica(UNIT, 1),) * 2)
    bound = fleet_bound(fleet)
    assert bound.seconds == pytest.approx(6)
    result = plan_fleet(fleet, limits=Limits(seconds=0.1))
    assert result.schedule.check(fleet) is None
    # The decode steps are 12, and no two sets of these requests have six each but 3 + 3 and 2 + 2 + 2.
    assert result.makespan in (6, 7)


@pytest.mark.parametrize("other", [Replica(CostModel.paper(), 1), Replica(UNIT, 1)])
def test_work_that_takes_a_replica_no_time_is_planned(other: Replica) -> None:
    # The only token of each comes from a prefill stage that costs nothing.
    replicas = (Replica(UNIT, 1, busy=2.5), other)
    result = plan_fleet(Fleet(work([1, 1]), replicas, True), limits=Limits(seconds=0.1))
    assert result.makespan == pytest.approx(2.5)


def test_one_long_request_bounds_a_large_fleet() -> None:
    fleet = Fleet(work([100, 1]), (Replica(UNIT, 4),) * 8)
    bound = fleet_bound(fleet)
    assert bound.seconds == 100
    assert bound.source == "the longest request"
    assert verify_fleet_bound(fleet, bound) is None


def test_a_fleet_of_one_has_the_bound_of_its_problem() -> None:
    problem = Problem(work([5, 9, 4, 4]), CostModel.paper(), 2)
    bound = fleet_bound(Fleet.of(problem, 1))
    assert bound == best_bound(problem)
    assert verify_fleet_bound(Fleet.of(problem, 1), bound) is None


def test_a_request_must_fit_every_replica() -> None:
    with pytest.raises(ProblemError, match="max_position"):
        Fleet(work([5, 50]), (Replica(UNIT, 1), Replica(UNIT, 1, max_position=20)))


def replicas() -> st.SearchStrategy[Replica]:
    return st.builds(
        Replica,
        cost=COSTS,
        slots=st.integers(1, 2),
        kv_capacity=st.sampled_from([None, 12]),
        prefill_token_cap=st.sampled_from([None, 7]),
        busy=st.sampled_from([0.0, 2.5]),
    )


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    fleet_replicas=st.lists(replicas(), min_size=1, max_size=2),
    first=st.booleans(),
)
def test_no_fleet_beats_its_bound(
    optimal_makespan: Callable[[Problem], float],
    lengths: list[tuple[int, int]],
    fleet_replicas: list[Replica],
    first: bool,
) -> None:
    fleet = Fleet(Workload.from_lengths(*zip(*lengths, strict=True)), tuple(fleet_replicas), first)
    best = np.inf
    for way in product(range(len(fleet_replicas)), repeat=len(lengths)):
        ends = [replica.busy for replica in fleet_replicas]
        for k in set(way):
            ends[k] += optimal_makespan(fleet.problem_of(k, np.flatnonzero(np.array(way) == k)))
        best = min(best, max(ends))
    bound = fleet_bound(fleet)
    assert bound.seconds <= best + 1e-9
    assert verify_fleet_bound(fleet, bound) is None
    result = plan_fleet(fleet, limits=Limits(seconds=0.1))
    assert result.schedule.check(fleet) is None
    assert result.makespan >= best - 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_no_fleet_beats_the_bound_of_its_longest_request(
    optimal_makespan: Callable[[Problem], float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.append(rng.integers(2, 5, 3), 9)
    cost = CostModel(0.1, 0.01, 1.0, float(rng.choice([0.1, 0.4])))
    fleet = Fleet(work(lengths.tolist(), 3), (Replica(cost, 2), Replica(cost, 2, busy=float(seed % 2))))
    best = np.inf
    for way in product(range(2), repeat=len(lengths)):
        ends = [replica.busy for replica in fleet.replicas]
        for k in set(way):
            ends[k] += optimal_makespan(fleet.problem_of(k, np.flatnonzero(np.array(way) == k)))
        best = min(best, max(ends))
    bound = fleet_bound(fleet)
    assert bound.seconds <= best + 1e-9
    assert verify_fleet_bound(fleet, bound) is None


def test_long_requests_are_kept_together_where_others_cost_little_beside_them() -> None:
    # A step takes a second for one request or two. The four long ones fit two replicas, and the short ones
    # take the other: 100 steps each, where a long one on each of three would leave the last with 100 as well
    # as twenty of the short.
    fleet = Fleet(work([100] * 4 + [10] * 20), (Replica(UNIT, 2),) * 3)
    result = plan_fleet(fleet, limits=Limits(work=1))
    assert result.makespan == 100.0
    assert result.status == "optimal"


def test_a_long_request_has_fewer_beside_it_than_others_have_alone() -> None:
    # Two slots a replica; beside the long one another adds only a quarter of a second a step.
    cost = replace(UNIT, decode_per_slot=0.25)
    fleet = Fleet(work([40] + [4] * 20), (Replica(cost, 2),) * 2)
    result = plan_fleet(fleet, limits=Limits(work=1))
    beside = np.bincount(result.schedule.replica_of[1:], minlength=2)[result.schedule.replica_of[0]]
    # With m of them there it takes 40 + (40 + 4 m) / 4 seconds, and the other 2 (20 - m) steps of 1.5.
    assert result.makespan == 53.0
    assert beside == 3


def test_the_slots_of_every_replica_are_packed_full_in_few_stages() -> None:
    # One replica takes all of 300 in two stages, and the other all of 200 in three: 600 steps each.
    cost = CostModel(1.0, 0.0, 1.0, 0.0)
    fleet = Fleet(work([300, 300, 200, 200, 200] * 2), (Replica(cost, 2),) * 2)
    assert plan_fleet(fleet, limits=Limits(work=20)).makespan == 603.0


def test_much_work_and_little_prompt_goes_beside_a_long_request() -> None:
    # Beside the long one slots are idle for most of its steps, and each prompt takes its time all the same.
    workload = Workload.from_lengths([10] + [300] * 40 + [3000] * 40, [1600] + [180] * 40 + [60] * 40)
    result = plan_fleet(Fleet(workload, (Replica(CostModel.paper(), 4),) * 2), limits=Limits(work=20))
    assert result.gap is not None
    assert result.gap < 0.02
    beside = result.schedule.replica_of[1:] == result.schedule.replica_of[0]
    assert beside[:40].sum() > beside[40:].sum()


def test_shares_that_are_given_stay() -> None:
    # As many short requests on either replica as long ones would take eleven steps.
    fleet = Fleet(work([1] * 4 + [9] * 4), (Replica(UNIT, 2),) * 2)
    given = np.repeat([0, 1], 4)
    result = plan_fleet(fleet, limits=Limits(work=5), shares=given)
    assert (result.schedule.replica_of == given).all()
    assert result.makespan == 18.0


def test_a_forged_certificate_is_refuted() -> None:
    fleet = Fleet(work([5, 9, 4, 4]), (Replica(CostModel.paper(), 2), Replica(UNIT, 2)))
    bound = fleet_bound(fleet)
    assert verify_fleet_bound(fleet, bound) is None
    higher = replace(bound, seconds=bound.seconds * 1.1)
    assert verify_fleet_bound(fleet, higher) is not None
    higher = replace(higher, terms={"requests": higher.seconds})
    assert "proves" in str(verify_fleet_bound(fleet, higher))
    for change in ({"weights": [1.0, 1.0]}, {"weights": [1.0]}, {"kind": "faith"}, {"stage_by": "luck"}):
        forged = replace(bound, certificate={**bound.certificate, **change})
        assert verify_fleet_bound(fleet, forged) is not None
    assert verify_fleet_bound(fleet, Bound(1.0, "printed", {"all": 1.0}, bound.certificate, valid=False))


def test_a_certificate_survives_its_file() -> None:
    fleet = Fleet(work([5, 9, 4, 4] * 9), (Replica(CostModel.paper(), 2), Replica(CostModel.paper(), 4)))
    read = record(Bound, json.loads(json.dumps(plain(fleet_bound(fleet)))))
    assert verify_fleet_bound(fleet, read) is None


@pytest.mark.slow
def test_a_plan_of_unlike_replicas_ends_together() -> None:
    fast = CostModel(0.0125, 0.000065, 0.0145, 0.000105)
    fleet = Fleet(generate("table3", 0, 600), (Replica(fast, 15), Replica(CostModel.paper(), 30, busy=3.0)))
    result = plan_fleet(fleet, limits=Limits(work=1))
    assert result.schedule.check(fleet) is None
    ends = result.schedule.finishes(fleet)
    assert max(ends) - min(ends) < 0.03 * max(ends)
    assert result.gap is not None
    assert result.gap < 0.04
    again = record(FleetSchedule, json.loads(json.dumps(plain(result.schedule))))
    assert again.makespan(fleet) == result.makespan


@pytest.mark.slow
def test_a_plan_respects_memory() -> None:
    fleet = Fleet(generate("table3", 1, 120), (Replica(CostModel.paper(), 40, kv_capacity=6000),) * 2)
    result = plan_fleet(fleet, limits=Limits(work=1))
    assert result.schedule.check(fleet) is None
    assert verify_fleet_bound(fleet, result.bound) is None


@pytest.mark.parametrize("keep", ["together", "spread"])
def test_a_plan_keeps_groups_as_the_user_says(keep: str) -> None:
    fleet = Fleet(generate("table3", 2, 60), (Replica(CostModel.paper(), 8),) * 3)
    groups = list(np.arange(60).reshape(20, 3))
    result = plan_fleet(fleet, limits=Limits(seconds=0.1), groups=groups, keep=keep)  # type: ignore[arg-type]
    found = {len(set(result.schedule.replica_of[group].tolist())) for group in groups}
    assert found == ({1} if keep == "together" else {3})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_no_worse_than_any_rule_whose_replicas_take_over_from_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = 1 + 2 * (seed % 2)
    group = np.repeat(np.arange(10), size)
    prompts = np.repeat(rng.integers(5, 200, 10), size)
    workload = Workload.from_lengths(prompts, 1 + rng.integers(0, 40, len(group)))
    workload = replace(workload, group=group).with_shared_prompts()
    held = int((prompts + workload.output_tokens).max())
    fast = Replica(CostModel.paper(), slots=2, kv_capacity=2 * held if seed % 3 == 0 else None)
    fleet = Fleet(workload, (fast, replace(fast, slots=3, busy=0.4)), prefill_emits_first_token=True)
    plan = plan_fleet(fleet, limits=Limits(work=20))
    assert plan.schedule.check(fleet) is None
    for name in ("fcfs", "fcfs-ski", "lpt", "lpt-ski", "algorithm1", "packing-algorithm1", "threshold"):
        ran = simulate_fleet(fleet, dispatch(fleet, "lpt"), policy=partial(policy_named, name))
        if not any(trace.evictions for trace in ran.traces):
            assert plan.makespan <= ran.makespan + 1e-9, name


def test_completions_of_a_prompt_stay_together_where_each_replica_would_compute_it() -> None:
    # Two prompts of 99 tokens, two completions each: one by one, each replica would compute both prompts.
    workload = Workload.from_lengths(np.full(4, 99), np.array([8, 4, 8, 4]))
    workload = replace(workload, group=np.array([0, 0, 1, 1])).with_shared_prompts()
    dear = CostModel(prefill_base=1.0, prefill_per_token=1.0, decode_base=1.0, decode_per_slot=0.0)
    replica = Replica(dear, slots=2, prefix_cache=200)
    plan = plan_fleet(
        Fleet(workload, (replica, replica), prefill_emits_first_token=True), limits=Limits(work=1)
    )
    assert plan.makespan == pytest.approx(1 + 100 + 7)


def test_the_referee_finds_what_a_schedule_leaves_out() -> None:
    fleet = Fleet(work([2, 2]), (Replica(UNIT, 1),) * 2)
    one = Schedule(np.array([0]), np.array([0]), np.array([2]))
    assert FleetSchedule(np.array([0, 1]), (one, one)).check(fleet) is None
    for wrong in (
        FleetSchedule(np.array([0]), (one, one)),
        FleetSchedule(np.array([0, 1]), (one,)),
        FleetSchedule(np.array([0, 2]), (one, one)),
        FleetSchedule(np.array([0, 1]), (one, None)),
        FleetSchedule(np.array([0, 0]), (one, one)),
        FleetSchedule(np.array([0, 1]), (one, Schedule(np.array([0]), np.array([0]), np.array([1])))),
    ):
        assert wrong.check(fleet) is not None


@pytest.mark.parametrize("capacity", [None, 4000])
def test_a_simulated_fleet_of_one_is_the_simulator(capacity: int | None) -> None:
    problem = Problem(generate("table3", 3, 150), CostModel.paper(), 20, kv_capacity=capacity)
    truth = np.maximum(1, problem.workload.output_tokens // 2 + 20)
    alone = simulate(problem, policy_named("lpt-ski", problem), truth)
    run = simulate_fleet(Fleet.of(problem, 1), np.zeros(150, dtype=np.int64), truth)
    assert run.makespan == pytest.approx(alone.makespan)
    assert run.traces[0].stages == alone.stages
    assert run.traces[0].evictions == alone.evictions


def test_a_dry_replica_takes_what_waits_at_the_one_that_ends_last() -> None:
    fleet = Fleet(work([5] * 8), (Replica(UNIT, 1),) * 2)
    everything_on_one = np.zeros(8, dtype=np.int64)
    assert simulate_fleet(fleet, everything_on_one, backoff=False).makespan == 40
    run = simulate_fleet(fleet, everything_on_one)
    assert run.makespan == 20
    assert np.bincount(run.replica_of).tolist() == [4, 4]


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_request_that_is_put_back_goes_on_anywhere_where_it_stopped(dispatched: bool) -> None:
    problem = Problem(generate("table3", 5, 80), CostModel.paper(), 20, kv_capacity=2500)
    truth = problem.workload.output_tokens
    fleet = Fleet.of(problem, 2).with_output_tokens(np.maximum(1, truth // 3))
    run = simulate_fleet(fleet, np.zeros(80, dtype=np.int64) if dispatched else None, truth)
    assert sum(trace.evictions for trace in run.traces) > 0
    served = sorted(name for trace in run.traces for name in trace.ids)
    assert served == sorted(problem.workload.ids.tolist())
    tokens = {name: n for trace in run.traces for name, n in zip(trace.ids, trace.tokens, strict=True)}
    assert [tokens[name] for name in problem.workload.ids] == truth.tolist()
    decoded = [stage.tokens for trace in run.traces for stage in trace.stages if stage.kind == "decode"]
    assert sum(decoded) == truth.sum()


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25),
    count=st.integers(1, 3),
    backoff=st.booleans(),
    central=st.booleans(),
    busy=st.sampled_from([0.0, 0.3]),
)
def test_a_simulated_fleet_answers_everything_once_and_not_below_its_bound(
    lengths: list[tuple[int, int]], count: int, backoff: bool, central: bool, busy: float
) -> None:
    predicted, truth = np.array(lengths).T
    replica = Replica(CostModel.paper(), 2)
    fleet = Fleet(Workload.from_lengths([5] * len(lengths), predicted), (replica,) * count)
    fleet = replace(fleet, replicas=(replace(replica, busy=busy), *fleet.replicas[1:]))
    dispatched = dispatch(fleet, "mico")
    run = simulate_fleet(fleet, None if central else dispatched, truth, backoff=backoff)
    assert sorted(name for trace in run.traces for name in trace.ids) == sorted(fleet.workload.ids.tolist())
    assert run.makespan >= fleet_bound(fleet.with_output_tokens(truth)).seconds - 1e-9
    if not backoff and not central:
        assert run.replica_of.tolist() == dispatched.tolist()


def test_one_queue_for_all_needs_no_backoff() -> None:
    fleet = Fleet(work([5] * 8), (Replica(UNIT, 1),) * 2)
    assert simulate_fleet(fleet, None, backoff=False).makespan == 20


def test_the_policy_of_a_fleet_follows_what_the_error_allows() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(1, 60, 300)
    fleet = Fleet(work(truth.tolist()), (Replica(CostModel.paper(), 8),) * 2)
    policy, replica_of = choose_fleet_policy(fleet, MeasuredError(truth, truth), samples=2)
    assert policy.order == "longest-first"
    assert len(policy.compared) == 8
    run = serve_with_backoff(fleet, replica_of, policy, truth)
    assert (
        run.makespan < simulate_fleet(fleet, replica_of, truth, policy=FleetPolicy("as-given", 0.5)).makespan
    )


def test_the_shortest_may_be_served_first() -> None:
    fleet = Fleet(work([1, 9, 5]), (Replica(UNIT, 1),))
    run = simulate_fleet(fleet, np.zeros(3, dtype=np.int64), policy=FleetPolicy("shortest-first"))
    assert run.traces[0].finished.tolist() == [1, 15, 6]
    run = simulate_fleet(fleet, np.zeros(3, dtype=np.int64), policy=longest_first_policy)
    assert run.traces[0].finished.tolist() == [15, 9, 14]


def test_what_remains_follows_what_an_answer_has_outlived() -> None:
    # Predicted 10 tokens: nine of ten answers have 10, one has 100.
    error = MeasuredError(np.full(1000, 10), np.where(np.arange(1000) % 10 == 0, 100, 10))
    remaining = RemainingLengths.of(error, np.full(4, 10))
    left = remaining.tokens(np.arange(4), np.array([0, 9, 10, 99]))
    assert left[0] == pytest.approx(19, rel=0.1)
    assert left[1] == pytest.approx(10, rel=0.2)
    assert left[2:].tolist() == [90, 1]
    assert remaining.tokens(np.array([0]), np.array([500])).tolist() == [1]


def test_near_predictions_are_told_apart_by_kinds() -> None:
    truth = np.arange(1, 2001)
    remaining = RemainingLengths.of(MeasuredError(truth, truth), truth)
    assert len(remaining.mean) <= 32
    assert (np.diff(remaining.tokens(truth - 1, np.zeros(2000, dtype=np.int64))) >= 0).all()


def test_parking_ends_a_job_of_unforeseeable_lengths_together() -> None:
    # Nothing tells the answers apart but what they have outlived; none has more than 100 tokens.
    rng = np.random.default_rng(0)
    truth = np.minimum(100, 1 + rng.exponential(20, 600).astype(np.int64))
    past = np.minimum(100, 1 + rng.exponential(20, 4000).astype(np.int64))
    error = MeasuredError(np.full(4000, 20), past)
    fleet = Fleet(work([20] * 600), (Replica(UNIT, 8),) * 2)
    remaining = RemainingLengths.of(error, fleet.workload.output_tokens)
    bound = fleet_bound(fleet.with_output_tokens(truth))
    parking = FleetPolicy("shortest-first", 0.0, Tail(10.0, 5, remaining))
    there = dispatch(fleet, "round-robin")
    gaps = [
        bound.gap(serve_with_backoff(fleet, there, policy, truth).makespan)
        for policy in (parking, FleetPolicy("shortest-first", 0.0))
    ]
    assert 0 <= gaps[0] < 0.5 * gaps[1]


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25),
    share=st.sampled_from([0.5, 3.0, 100.0]),
    margin=st.integers(1, 9),
    capacity=st.sampled_from([None, 60]),
)
def test_parking_answers_everything_once(
    lengths: list[tuple[int, int]], share: float, margin: int, capacity: int | None
) -> None:
    predicted, truth = np.array(lengths).T
    fleet = Fleet(work(predicted.tolist(), 3), (Replica(CostModel.paper(), 2, kv_capacity=capacity),) * 2)
    remaining = RemainingLengths.of(MeasuredError(predicted, truth), predicted)
    policy = FleetPolicy("shortest-first", 0.5, Tail(share, margin, remaining))
    run = serve_with_backoff(fleet, dispatch(fleet), policy, truth)
    assert sorted(name for trace in run.traces for name in trace.ids) == sorted(fleet.workload.ids.tolist())
    true, parked = fleet.with_output_tokens(truth), any(trace.evictions for trace in run.traces)
    # What is parked may end in another slot, which no schedule of the fleet's bound does.
    assert run.makespan >= (work_bound(true) if parked else fleet_bound(true)).seconds - 1e-9
