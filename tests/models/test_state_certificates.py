"""That no schedule of a small problem is cheaper is judged by following all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import UNIT, limited_problem, problem_of, steps_of

from batchbound.data.problem import Problem
from batchbound.models.certificates.claims import RefutedError, Work
from batchbound.models.certificates.states import check_no_cheaper

LESS = r"'states', 'a schedule takes less'"


@pytest.mark.parametrize("batch", range(6))
def test_the_optimum_holds_and_a_little_more_does_not(
    batch: int, optimal_makespan: Callable[[Problem], float]
) -> None:
    for seed in range(1000 + 20 * batch, 1020 + 20 * batch):
        problem = limited_problem(seed, most=4)
        optimum = optimal_makespan(problem)
        check_no_cheaper(problem, optimum * (1 - 1e-9), Work())
        if optimum > 0:
            with pytest.raises(RefutedError, match=LESS):
                check_no_cheaper(problem, optimum * (1 + 1e-6), Work())


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (2004, 4350),
        (2011, 15390),
        (2031, 1410),
        (2037, 15750),
        (2041, 6480),
        (2042, 1320),
        (2054, 4800),
        (2089, 7710),
    ],
)
def test_the_check_takes_no_more_steps_than_it_needs_and_is_refused_with_one_less(
    seed: int, steps: int, optimal_makespan: Callable[[Problem], float]
) -> None:
    problem = limited_problem(seed)
    optimum = optimal_makespan(problem)
    assert steps_of(lambda work: check_no_cheaper(problem, optimum * (1 - 1e-9), work)) == steps


@pytest.mark.parametrize(("capacity", "steps"), [(19, 840), (18, 4140)])
def test_only_the_ends_of_requests_are_tried_where_the_capacity_just_holds_what_the_slots_can_hold(
    capacity: int, steps: int
) -> None:
    # The three of most tokens hold 7, 7 and 5 in their last decode step.
    lengths = [3, 3, 1, 1], [5, 5, 5, 5]
    problem = problem_of(*lengths, slots=3, cost=UNIT, kv_capacity=capacity, prefill_token_cap=8)
    assert steps_of(lambda work: check_no_cheaper(problem, 12 * (1 - 1e-9), work)) == steps


def test_prompts_that_only_slots_keep_apart_are_not_told_apart() -> None:
    # One slot serves six of the long ones; the other the five others beside them, and then the short ones in
    # nine stages, the first of which is the last of the first slot's.
    problem = problem_of(range(1, 21), [280] * 11 + [1] * 9, slots=2, cost=UNIT)
    check_no_cheaper(problem, (6 * 280 + 6 + 8) * (1 - 1e-9), Work(100_000))
    with pytest.raises(RefutedError, match=LESS):
        check_no_cheaper(problem, (6 * 280 + 6 + 8) * (1 + 1e-9), Work(100_000))


@pytest.mark.parametrize(
    "never",
    [{"kv_capacity": 19}, {"cost": replace(UNIT, prefill_bend=8.0, prefill_per_token_beyond=1.0)}],
)
def test_limits_that_never_matter_cost_the_check_no_steps(never: dict[str, Any]) -> None:
    def steps(**limits: Any) -> int:
        problem = problem_of([3, 3, 1, 1], [5, 5, 5, 5], slots=3, **{"cost": UNIT, **limits})
        return steps_of(lambda work: check_no_cheaper(problem, 12 * (1 - 1e-9), work))

    assert steps(**never) == steps()


def test_a_prompt_needs_room_beside_what_others_hold_even_if_it_is_done_at_once() -> None:
    # The fourth has one step fewer than the first holds its slot for, and may join it when two others end;
    # the fifth has no steps, and its prompt of six then has no room beside the five tokens of the first.
    lengths = {"prompts": [2, 1, 1, 1, 6], "outputs": [5, 3, 3, 3, 1]}
    tight = problem_of(**lengths, slots=3, cost=UNIT, kv_capacity=11, prefill_emits_first_token=True)
    roomy = problem_of(**lengths, slots=3, cost=UNIT, kv_capacity=12, prefill_emits_first_token=True)
    check_no_cheaper(tight, 7 * (1 - 1e-9), Work())
    check_no_cheaper(roomy, 6 * (1 - 1e-9), Work())
    with pytest.raises(RefutedError, match=LESS):
        check_no_cheaper(roomy, 7 * (1 - 1e-9), Work())
