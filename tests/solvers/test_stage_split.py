"""Prefill stages beyond the bend of their cost, as one and as several."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from builders import sharing

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.prove import proven_bound
from batchbound.solvers.search.schedule_search import search_schedule
from batchbound.solvers.search.stage_split import split_stages, stages_capped

BENT = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)


def one_stage(prompts: list[int], cost: CostModel) -> tuple[Problem, Schedule]:
    problem = Problem(Workload.from_lengths(prompts, [2] * len(prompts)), cost, len(prompts))
    alone = np.zeros(len(prompts), dtype=np.int64)
    return problem, Schedule(alone, np.arange(len(prompts)), np.array([2]))


def test_a_stage_beyond_the_bend_becomes_stages_that_reach_it() -> None:
    problem, together = one_stage([6, 4, 7, 3], BENT)
    assert together.makespan(problem) == 1 + 10 + 2
    split = split_stages(problem, together)
    assert split.stage_tokens(problem).tolist() == [10, 10]
    assert split.decode_steps.tolist() == [0, 2]
    assert split.check(problem) is None
    assert split.makespan(problem) == 1 + 1 + 2


def test_a_stage_stays_whole_where_another_costs_more_than_the_bend() -> None:
    problem, together = one_stage([6, 7], BENT)
    cheap = CostModel(4.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)
    assert split_stages(problem, together).stage_tokens(problem).tolist() == [7, 6]
    problem, together = one_stage([6, 7], cheap)
    assert split_stages(problem, together).stage_tokens(problem).tolist() == [13]


def test_prompts_that_do_not_divide_evenly_stay_together_where_that_is_less() -> None:
    # In halves of 10 tokens two stages would take 16 s in place of 18; of 19 and 1 they take 8 + 17.
    problem, together = one_stage([19, 1], CostModel(8.0, 0.0, 1.0, 0.0, 0.0, 0.0, 10.0, 1.0))
    assert split_stages(problem, together).stage_tokens(problem).tolist() == [20]


def test_a_stage_of_few_prompts_is_split_into_parts_of_as_many() -> None:
    # Tokens alone would fill three stages of 8 in 9 s; prompts of 6 take 11 s in three and 10 s in two.
    cost = CostModel(3.0, 0.0, 1.0, 0.0, prefill_bend=10.0, prefill_per_token_beyond=1.0)
    problem, together = one_stage([6] * 4, cost)
    assert split_stages(problem, together).stage_tokens(problem).tolist() == [12, 12]


def test_bins_without_requests_and_costs_without_a_bend_are_left_alone() -> None:
    problem, _ = one_stage([6, 4, 7, 3], BENT)
    waiting = Schedule(np.array([1, 1, 1, 1]), np.arange(4), np.array([0, 2]))
    assert split_stages(problem, waiting).stage_tokens(problem).tolist() == [0, 10, 10]
    problem, together = one_stage([6, 4, 7, 3], CostModel.paper())
    assert split_stages(problem, together) is together


@pytest.mark.slow
def test_the_search_mostly_finds_the_optimum_of_tiny_problems_with_a_bend(
    optimal_makespan: Callable[[Problem], float],
) -> None:
    optimal = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        work = Workload.from_lengths(rng.integers(3, 9, 5), rng.integers(1, 6, 5))
        problem = Problem(work, BENT, int(rng.integers(2, 5)))
        found, least = search_schedule(problem, iterations=100, seed=0), optimal_makespan(problem)
        assert found.schedule.check(problem) is None
        assert proven_bound(problem, 0.2).seconds - 1e-9 <= least <= found.makespan + 1e-9
        optimal += found.makespan == pytest.approx(least)
    # Prompts are spread evenly over the parts of a stage, which is not always the best.
    assert optimal >= 9


def of_two_groups(own: int, shared: int, cost: CostModel, cap: int | None, cache: int = 0) -> Problem:
    limits = {"prefill_token_cap": cap, "prefix_cache": cache}
    return sharing([own] * 4, [0, 1, 0, 1], shared, 4, cost, **limits)


def test_requests_that_share_a_prompt_stay_together_as_their_stage_is_split() -> None:
    # Two groups of 5 tokens shared and 1 each: 14 tokens in one stage, 7 each in two.
    problem, together = (
        of_two_groups(1, 5, BENT, None),
        Schedule(np.zeros(4, int), np.arange(4), np.ones(1, int)),
    )
    split = split_stages(problem, together)
    assert split.stage_tokens(problem).tolist() == [7, 7]
    assert split.makespan(problem) == together.makespan(problem) - 3


@pytest.mark.parametrize(
    ("own", "cache", "tokens"),
    [
        # Both requests of a group fit a stage with the prompt they share.
        (1, 0, [7, 7]),
        # Of 3 tokens for itself each request has a stage; those after the first find the prompt.
        (3, 0, [8, 3, 8, 3]),
        (3, 10, [8, 3, 8, 3]),
    ],
)
def test_a_shared_prompt_counts_once_under_the_cap(own: int, cache: int, tokens: list[int]) -> None:
    problem = of_two_groups(own, 5, CostModel.paper(), 8, cache)
    capped = stages_capped(problem, Schedule(np.zeros(4, int), np.arange(4), np.ones(1, int)))
    assert capped.check(problem) is None
    assert sorted(capped.stage_tokens(problem).tolist()) == sorted(tokens)


def test_a_shared_prompt_that_is_kept_counts_no_more() -> None:
    # The first stage computes both prompts; those after it find them.
    problem = of_two_groups(2, 4, CostModel.paper(), 12, 8)
    schedule = Schedule(np.array([0, 0, 1, 1]), np.arange(4), np.array([0, 1]))
    capped = stages_capped(problem, schedule)
    assert capped.stage_tokens(problem).tolist() == [12, 4]


def test_a_stage_beyond_the_cap_is_made_as_few_as_hold_its_prompts() -> None:
    # Of at most five tokens: 3 with 2, twice; the stage after them stays whole.
    workload = Workload.from_lengths([3, 3, 2, 2, 4], [4, 4, 4, 4, 2])
    problem = Problem(workload, CostModel.paper(), slots=4, prefill_token_cap=5)
    schedule = Schedule(np.array([0, 0, 0, 0, 1]), np.array([0, 1, 2, 3, 0]), np.array([4, 2]))
    assert schedule.check(problem) is not None
    capped = stages_capped(problem, schedule)
    assert capped.check(problem) is None
    assert capped.prefill_stages() == 3
    assert capped.decode_steps.sum() == 6


def test_without_a_cap_no_stage_is_split() -> None:
    problem = Problem(Workload.from_lengths([3, 3], [4, 4]), CostModel.paper(), slots=2)
    schedule = Schedule(np.zeros(2, np.int64), np.arange(2), np.array([4]))
    assert stages_capped(problem, schedule) is schedule
