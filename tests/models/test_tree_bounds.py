"""Bounds of shared beginnings, against the optimum of the most permissive engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_instances
from builders import UNIT, mostly_slow, tree_of
from tiny_trees import (
    least_computed,
    least_seconds,
    stage_job,
    tiny_job,
    wrong_claims,
    wrong_fleet_claims,
    wrong_plans,
    wrong_stage_claims,
)

from batchbound.data.iterations import EngineLimits, IterationBound, Sequences
from batchbound.data.prefix_tree import PrefixTree
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.iterations import held_blocks, iteration_bound
from batchbound.models.bounds.least_counts import least_counts, two_requests
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.bounds.tree_area import tree_area
from batchbound.models.certificates.beginnings import Beginnings
from batchbound.models.certificates.checker import verify_bound
from batchbound.models.certificates.iterations import verify_iterations
from batchbound.models.formulations.full_model import UnsupportedProblemError, refuse_shared
from batchbound.solvers.exact.compiled_search import can_list_states

KV = {"kind": "KV"}


@pytest.mark.parametrize("seed", mostly_slow(range(300), range(20)))
def test_no_bound_is_above_the_optimum_of_any_engine(seed: int) -> None:
    assert wrong_claims(seed) == []


@pytest.mark.parametrize("seed", mostly_slow(range(200), range(15)))
def test_no_bound_of_stages_is_above_the_optimum(seed: int) -> None:
    assert wrong_stage_claims(seed) == []


@pytest.mark.parametrize("seed", mostly_slow(range(200), range(25)))
def test_plans_their_referee_and_their_bounds_hold_of_our_engine(seed: int) -> None:
    assert wrong_plans(seed) == []


@pytest.mark.parametrize("seed", mostly_slow(range(200), range(25)))
def test_bounds_and_plans_of_fleets_hold_of_every_way_to_share_requests_out(seed: int) -> None:
    assert wrong_fleet_claims(seed) == []


def test_arguments_about_whole_prompts_would_prove_more_than_is_true() -> None:
    wrong = 0
    for seed in range(60):
        problem = stage_job(seed)
        whole = proven_bound(replace(problem, workload=replace(problem.workload, tree=None)), repeatable=True)
        wrong += whole.seconds > least_seconds(problem, evictions=False) * (1 + 1e-9)
    assert wrong > 10


def test_a_claim_about_whole_prompts_is_refused_where_beginnings_are_held_once() -> None:
    tree = tree_of([-1], [10], [0, 0, 0], [1, 1, 1])
    workload = Workload.from_lengths(tree.prompt_tokens, [4, 4, 4])
    problem = Problem(workload.with_tree(tree), UNIT, 3, kv_capacity=25)
    bound = proven_bound(problem, repeatable=True)
    proven: Any = bound.certificate["decode_steps"]
    assert proven["at_least"] == 4
    # Of three whole prompts of 11 to 14 tokens, one runs at a time.
    steps = least_counts(replace(problem, workload=replace(problem.workload, tree=None))).decode_steps
    assert steps > 4
    for certificate in (
        {"kind": "trivial", "decode_steps": {"at_least": steps, "kind": "KV tokens over capacity"}},
        {"kind": "growth", "growth": {}},
    ):
        forged = replace(bound, certificate={**bound.certificate, **certificate})
        assert "counts whole prompts" in str(verify_bound(problem, forged))


def test_two_requests_are_kept_apart_by_what_they_do_not_share() -> None:
    # The pairs below one node share 6 and 4 tokens, the others none.
    tree = tree_of([-1, 0, -1], [4, 2, 5], [1, 1, 0, 2], [2, 2, 3, 1])
    workload = Workload.from_lengths(tree.prompt_tokens, [6, 6, 6, 1]).with_tree(tree)
    # Two that share 6 tokens hold at most 8 + 5 + 8 + 5 - 6 = 20; with 17 they overlap in 3 of 6 steps.
    problem = Problem(workload, UNIT, 4, kv_capacity=17)
    steps, pair = two_requests(problem, 17)
    claim = {"kind": "two requests", "requests": pair}
    # Those of 8 and 7 tokens that share 4 hold 11 in their first steps and may overlap in one step less.
    assert (steps, pair) == (10, [0, 2])
    bound = proven_bound(problem, repeatable=True)
    for more, refused in ((0, False), (1, True)):
        certificate = {**bound.certificate, "decode_steps": {"at_least": steps + more, **claim}}
        assert (verify_bound(problem, replace(bound, certificate=certificate)) is not None) == refused


def test_solvers_that_count_whole_prompts_refuse_shared_beginnings() -> None:
    tree = tree_of([-1], [10], [0, 0, 0], [1, 1, 1])
    workload = Workload.from_lengths(tree.prompt_tokens, [4, 4, 4])
    problem = Problem(workload.with_tree(tree), UNIT, 3, kv_capacity=25)
    assert can_list_states(replace(problem, workload=replace(problem.workload, tree=None)))
    assert not can_list_states(problem)
    with pytest.raises(UnsupportedProblemError, match="prompts that requests share"):
        refuse_shared(problem)


def test_a_unit_coarser_than_the_engines_proves_more_than_is_true() -> None:
    wrong = 0
    for seed in range(60):
        job = tiny_job(seed)
        coarse = job.rows(2 * job.unit)
        wrong += int((coarse.prompt - coarse.cached).sum()) > least_computed(job)
    assert wrong > 10


def test_what_a_longer_prompt_may_reuse_of_generated_tokens_is_not_counted() -> None:
    # The second prompt repeats the first, its completion of four tokens, and one token more.
    prompts, output = [[1, 2], [1, 2, 3, 4, 5, 6, 7]], np.array([4, 1])
    tree = PrefixTree.of_prompts(prompts)
    assert tree.reused(output)[0].tolist() == [0, 2 + 4 - 1]
    # With units of two tokens, four are reused: the last drawn token was never computed.
    assert PrefixTree.of_prompts(prompts, unit=2).reused(output)[0].tolist() == [0, 4]


def test_a_system_prompt_is_charged_while_a_request_below_it_draws() -> None:
    # One beginning of 10 tokens, four requests with a token of their own that draw two tokens: 1 + 2 each.
    tree, output = tree_of([-1], [10], [0] * 4, [1] * 4), np.array([2] * 4)
    assert tree_area(tree, output, EngineLimits(4, kv_tokens=14, block_tokens=1)) == 3
    # In blocks of two: five of the beginning, and one block of its own at each of eight draws.
    assert tree_area(tree, output, EngineLimits(4, kv_tokens=14, block_tokens=2)) == 4


def test_without_nodes_the_area_is_that_of_whole_prompts() -> None:
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(2, 60, 40), rng.integers(1, 30, 40)
    tree = PrefixTree.of_groups(prompt, np.full(40, -1), np.zeros(40))
    for size in (1, 4, 16):
        limits = EngineLimits(40, kv_tokens=200, block_tokens=size)
        blocks = -(-held_blocks(Sequences(prompt, output), limits) // (limits.blocks or 1))
        assert tree_area(tree, output, limits) == max(blocks, int(output.max()), -(-int(output.sum()) // 40))


@pytest.mark.parametrize(
    ("beginning", "rows", "own", "output", "capacity", "slots", "flat", "area"),
    [(4000, 1000, 100, 60, 16_000, 256, 501, 648), (2100, 3200, 70, 60, 12_000, 256, 1676, 1931)],
)
def test_the_area_of_many_requests_below_a_beginning_is_above_that_of_one_completion(
    beginning: int, rows: int, own: int, output: int, capacity: int, slots: int, flat: int, area: int
) -> None:
    groups = 1 if rows == 1000 else 8
    leaf = np.arange(rows) % groups
    tree = PrefixTree(np.full(groups, -1), np.full(groups, beginning), leaf, np.full(rows, own))
    limits = EngineLimits(slots, kv_tokens=capacity, block_tokens=1)
    drawn = np.full(rows, output)
    cached = np.full(rows, beginning)
    cached[:groups] = 0
    counted = held_blocks(Sequences(tree.prompt_tokens, drawn, cached), limits)
    assert -(-counted // capacity) == flat
    assert tree_area(tree, drawn, limits) == area
    bound = iteration_bound(Sequences(tree.prompt_tokens, drawn, tree=tree), limits)
    assert (bound.iterations, bound.source) == (area, "KV")


def test_a_forged_tree_proves_nothing_of_the_prompts() -> None:
    prompts = [[1, 2, 3, k] for k in range(4, 9)]
    output, limits = np.full(5, 6), EngineLimits(5, 64, 20, 1)
    forged = PrefixTree.of_groups([4] * 5, [-1] * 5, [0] * 5)
    bound = iteration_bound(Sequences(np.full(5, 4), output, tree=forged), limits, kinds=("KV",))
    true = PrefixTree.of_prompts(prompts)
    rows = Sequences(np.full(5, 4), output, tree=true)
    assert iteration_bound(rows, limits, kinds=("KV",)).iterations < bound.iterations
    violation = verify_iterations(rows, limits, bound)
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


def test_a_coarser_unit_than_the_plan_states_is_no_tree_of_its_prompts() -> None:
    prompts = [[1, 2, 3, 4, 5, k] for k in range(6)]
    fine, coarse = PrefixTree.of_prompts(prompts), PrefixTree.of_prompts(prompts, unit=4)
    output, limits = np.ones(6, dtype=np.int64), EngineLimits(1, 1)
    claim = iteration_bound(Sequences(np.full(6, 6), output, tree=coarse), limits)
    assert claim.iterations == 4 + 6 * 2
    assert verify_iterations(Sequences(np.full(6, 6), output, tree=fine), limits, claim) is not None


@pytest.mark.parametrize("kind", ["KV", "tokens", "slots", "longest", "packing"])
def test_one_more_iteration_than_proven_is_refused(kind: str) -> None:
    tree = tree_of([-1, 0], [8, 4], [1, 1, 0, -1], [2, 3, 1, 5], unit=4)
    rows = Sequences(tree.prompt_tokens, np.array([3, 4, 2, 5]), tree=tree)
    limits = EngineLimits(2, 4, 32, 4) if kind == "KV" else EngineLimits(2, 4)
    bound = iteration_bound(rows, limits, kinds=(kind,))
    assert bound.iterations > 0
    assert verify_iterations(rows, limits, bound) is None
    assert verify_iterations(rows, limits, replace(bound, iterations=bound.iterations + 1)) is not None


def test_drafts_leave_fewer_draws_to_a_beginning() -> None:
    tree = tree_of([-1], [10], [0] * 4, [1] * 4)
    rows = Sequences(tree.prompt_tokens, np.array([4] * 4), tree=tree)
    limits = EngineLimits(4, 64, 14, 1)
    bound = iteration_bound(rows, limits, drafts=1, kinds=("KV",))
    assert bound.iterations == 3
    assert verify_iterations(rows, limits, bound, drafts=1) is None
    alone = IterationBound(iteration_bound(rows, limits, kinds=("KV",)).iterations, "KV", KV)
    assert verify_iterations(rows, limits, alone, drafts=1) is not None


def test_prompts_of_different_owners_share_nothing() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    again = Beginnings.of_prompts(prompts, ["a", "b", "a"], 1)
    tree = PrefixTree.of_prompts(prompts, ["a", "b", "a"])
    assert again.lengths() == tree.prompt_tokens.tolist()
    assert sum(again.reused([1, 1, 1])[0]) == int(tree.reused(np.ones(3, np.int64))[0].sum()) == 2


def test_brute_force_over_kinds_of_jobs_tries_trees() -> None:
    present, tight, wrong = zip(*map(tiny_instances.KINDS["trees"], range(6)), strict=True)
    assert all(present)
    assert any(tight)
    assert wrong == ([],) * 6
