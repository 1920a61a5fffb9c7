"""Jobs of groups that share prompts: costs, bounds, certificates and plans, against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import mostly_slow, sharing, workload_of
from builders import schedule_of as plain_schedule
from tiny_optima import grouped_problem, optimum
from tiny_trees import least_engine_seconds, least_seconds

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.heuristics.loop import schedule_of
from batchbound.heuristics.queues.known_lengths import dispatch_of, known_schedule
from batchbound.heuristics.queues.ordered import group_by_group
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.fleet import fleet_bound
from batchbound.models.bounds.makespan import best_bound, difference_set_bound, trivial_bound
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.fleet import verify_fleet_bound
from batchbound.models.formulations.full_model import UnsupportedProblemError
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import Limits
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.solve import SOLVERS, solve

BY_TOKEN = CostModel(prefill_base=1.0, prefill_per_token=1.0, decode_base=1.0, decode_per_slot=0.0)
"""A second a stage, a prompt token and a decode step."""


def grouped_optimum(problem: Problem) -> float:
    """Return the fewest seconds of any schedule on our engine, by trying all."""
    return optimum(problem) if problem.tree is None else least_engine_seconds(problem)


def grouped(prefix_cache: int = 0, prefill_token_cap: int | None = None) -> Problem:
    """Two prompts of 10 and 4 tokens, the first to be completed three times and the second twice."""
    workload = workload_of([10, 4, 10, 4, 10], [2, 2, 2, 2, 2], group=[7, 3, 7, 3, 7]).with_shared_prompts()
    return Problem(workload, BY_TOKEN, 2, prefix_cache=prefix_cache, prefill_token_cap=prefill_token_cap)


def test_a_shared_prompt_is_computed_once() -> None:
    together = plain_schedule([0, 1, 0, 1, 2], [0, 0, 1, 1, 0], [2, 2, 2])
    # 9 shared by the first group and one for each of its requests, and so on.
    assert together.stage_tokens(grouped()).tolist() == [11, 5, 1]
    assert together.makespan(grouped()) == 3 + 17 + 6


def test_the_referee_caps_the_tokens_that_a_stage_computes() -> None:
    together = plain_schedule([0, 1, 0, 1, 2], [0, 0, 1, 1, 0], [2, 2, 2])
    assert together.check(grouped(prefill_token_cap=11)) is None
    violation = together.check(grouped(prefill_token_cap=10))
    assert violation is not None
    assert (violation.rule, violation.bin) == ("token cap of a prefill stage", 0)


@pytest.mark.parametrize("seed", range(60))
def test_the_simulator_computes_what_the_schedule_it_followed_does(seed: int) -> None:
    problem = grouped_problem(seed)
    trace = simulate(problem, policy_named("lpt-ski", problem))
    if trace.evictions:
        with pytest.raises(ValueError, match="the run has no schedule"):
            schedule_of(trace)
        return
    schedule = schedule_of(trace)
    computed = [stage.tokens for stage in trace.stages if stage.kind == "prefill"]
    assert computed == schedule.stage_tokens(problem).tolist()
    assert trace.makespan == pytest.approx(schedule.makespan(problem))


@pytest.mark.parametrize("batch", mostly_slow(range(5), fast=range(1)))
def test_no_bound_exceeds_the_optimum_of_a_tiny_grouped_problem(
    batch: int,
) -> None:
    for seed in range(30 * batch, 30 * batch + 30):
        problem = grouped_problem(seed)
        optimum = least_seconds(problem, evictions=False) if problem.tree else grouped_optimum(problem)
        bounds: list[Bound] = [trivial_bound(problem), difference_set_bound(problem), best_bound(problem)]
        bounds.append(proven_bound(problem, seconds=0.1))
        for bound in bounds:
            assert bound.seconds <= optimum + 1e-9, (seed, bound.source)
            assert sum(bound.terms.values()) == pytest.approx(bound.seconds)
            assert verify_bound(problem, bound) is None, (seed, bound.source)


@pytest.mark.parametrize("batch", mostly_slow(range(2), fast=()))
def test_plans_of_tiny_grouped_problems_are_valid_and_mostly_the_optimum(
    batch: int,
) -> None:
    optimal = 0
    for seed in range(14 * batch, 14 * batch + 14):
        problem = grouped_problem(seed)
        found = solve(problem, limits=Limits(work=40))
        optimum = grouped_optimum(problem)
        assert found.schedule is not None
        assert found.schedule.check(problem) is None
        assert found.makespan is not None
        assert found.makespan >= optimum - 1e-9
        optimal += found.makespan <= optimum + 1e-9
    assert optimal >= 10


def test_a_certificate_that_counts_a_shared_prompt_for_each_request_is_refuted() -> None:
    problem = grouped()
    alone = replace(problem, workload=replace(problem.workload, tree=None))
    bound = trivial_bound(alone)
    assert bound.seconds > trivial_bound(problem).seconds
    violation = verify_bound(problem, bound)
    assert violation is not None
    assert violation.rule == "terms are those of the costs"


def test_states_are_no_proof_where_prompts_are_shared() -> None:
    problem = grouped()
    terms = trivial_bound(problem).terms
    bound = Bound(sum(terms.values()), "exhaustive search", terms, {"kind": "states"})
    violation = verify_bound(problem, bound)
    assert violation is not None
    assert violation.rule == "states"


@pytest.mark.parametrize("solver", ["slot-free:cp-sat", "slot-free:highs", "repaired:highs", "literal:highs"])
def test_formulations_refuse_shared_prompts_by_name(solver: str) -> None:
    assert solver in SOLVERS
    with pytest.raises(UnsupportedProblemError, match="requests share"):
        solve(grouped(), solver, limits=Limits(seconds=1))


@pytest.mark.slow
def test_no_bound_exceeds_what_a_fleet_of_grouped_requests_takes() -> None:
    for seed in range(15):
        problem = grouped_problem(seed)
        fleet = Fleet.of(problem, 2)
        found = plan_fleet(fleet, limits=Limits(work=1))
        assert found.schedule.check(fleet) is None
        bound = fleet_bound(fleet)
        assert bound.seconds <= found.makespan * (1 + 1e-9), seed
        assert verify_fleet_bound(fleet, bound) is None, seed


def test_a_fleets_bound_counts_what_a_group_shares_once() -> None:
    fleet = Fleet.of(grouped(prefix_cache=100), 2)
    bound = fleet_bound(fleet)
    assert bound.terms["shared prompts"] == pytest.approx((9 + 3) / 2)
    more = replace(bound, terms={**bound.terms, "shared prompts": 18.0}, seconds=bound.seconds + 12.0)
    assert verify_fleet_bound(fleet, more) is not None


def test_groups_of_prompts_of_unlike_lengths_share_nothing() -> None:
    workload = workload_of([10, 4, 10, 5, 7], [1] * 5, group=[0, 1, 0, 1, 2]).with_shared_prompts()
    assert workload.tree is not None
    assert workload.tree.shared_tokens.tolist() == [9, 0, 9, 0, 0]


@pytest.mark.parametrize("name", ["lpt-ski", "fcfs", "lagrangian"])
def test_a_rule_without_the_loop_counts_shared_prompts_as_the_simulator_does(name: str) -> None:
    for seed in range(60):
        problem = replace(grouped_problem(seed), kv_capacity=None, prefill_token_cap=None)
        dispatch = dispatch_of(policy_named(name, problem))
        assert dispatch is not None
        trace, made = simulate(problem, policy_named(name, problem)), known_schedule(problem, dispatch)
        if trace.evictions:
            assert made is None
            continue
        assert made is not None
        assert made.makespan(problem) == pytest.approx(trace.makespan)
        for least, better in ((trace.makespan + 1e-6, True), (trace.makespan - 1e-6, False)):
            again = dispatch_of(policy_named(name, problem))
            assert again is not None
            assert (known_schedule(problem, again, least) is not None) is better


def test_groups_go_one_after_another_the_one_of_the_longest_request_first() -> None:
    workload = workload_of([5, 5, 5, 5, 9], [1, 4, 7, 2, 6], group=[0, 0, 1, 1, 2]).with_shared_prompts()
    assert group_by_group(Problem(workload, BY_TOKEN, 2)).tolist() == [2, 3, 4, 1, 0]


@pytest.mark.parametrize(("cache", "stages"), [(0, [9, 4]), (5, [9, 4])])
def test_a_pass_under_a_token_cap_counts_a_shared_prompt_once(cache: int, stages: list[int]) -> None:
    # A prompt of 5 tokens shared by eight requests of 1 each: four of them fit 9 tokens.
    problem = sharing([1] * 8, [0] * 8, 5, 8, prefill_token_cap=9, prefix_cache=cache)
    schedule = ski_rental_schedule(problem)
    assert schedule.stage_tokens(problem).tolist() == stages


def test_a_plan_keeps_groups_together_where_long_prompts_cannot_all_be_kept() -> None:
    rng = np.random.default_rng(0)
    prompts, outputs = np.full(160, 1000), rng.integers(10, 200, 160)
    group = np.arange(160) % 20
    workload = workload_of(prompts.tolist(), outputs.tolist(), group=group).with_shared_prompts()
    problem = Problem(workload, CostModel.paper(), 16, kv_capacity=12_000)
    found = search_schedule(problem, iterations=2)
    apart = ski_rental_schedule(problem)
    assert found.schedule.stage_tokens(problem).sum() < 0.6 * apart.stage_tokens(problem).sum()
    assert found.makespan < 0.95 * apart.makespan(problem)
