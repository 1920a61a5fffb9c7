"""What a problem derives from its requests, by hand, and which requests it refuses by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import problem_of, tree_of

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import MOST_SLOTS, Problem, ProblemError
from batchbound.data.workload import Workload


def test_the_first_token_at_prefill_is_a_step_less_and_a_token_held_more() -> None:
    paper = problem_of([3, 5], [1, 4], 2)
    assert paper.decode_steps.tolist() == [1, 4]
    assert paper.kv_at_start.tolist() == [3, 5]
    assert paper.kv_peak.tolist() == [3, 8]
    assert paper.kv_token_steps == 3 + (5 + 6 + 7 + 8)
    engine = problem_of([3, 5], [1, 4], 2, prefill_emits_first_token=True)
    assert engine.decode_steps.tolist() == [0, 3]
    assert engine.kv_at_start.tolist() == [4, 6]
    assert engine.kv_peak.tolist() == [3, 8], "a request that is done at prefill holds its prompt only"
    assert engine.kv_token_steps == 6 + 7 + 8


@pytest.mark.parametrize(
    ("limit", "least", "what"),
    [
        ("max_position", 9, "prompt and .* take 9 tokens"),
        ("kv_capacity", 8, "its KV cache takes 8 tokens at the end"),
        ("prefill_token_cap", 5, "its prompt takes 5 tokens"),
    ],
)
def test_a_request_that_fits_no_limit_is_named(limit: str, least: int, what: str) -> None:
    enough: dict[str, Any] = {limit: least}
    assert getattr(problem_of([3, 5], [1, 4], 2, **enough), limit) == least
    with pytest.raises(
        ProblemError, match=rf"request '1': {what}, more than {limit} = {least - 1}"
    ) as refused:
        problem_of([3, 5], [1, 4], 2, **{**enough, limit: least - 1})
    assert (refused.value.request, refused.value.limit, refused.value.allowed) == (1, limit, least - 1)


def test_what_is_kept_for_prompts_is_named_beside_the_kv_capacity_that_it_was_taken_from() -> None:
    with pytest.raises(ProblemError, match="more than kv_capacity = 7 without prefix_cache = 40 "):
        problem_of([3, 5], [1, 4], 2, kv_capacity=7, prefix_cache=40)


@pytest.mark.parametrize("limit", ["slots", "kv_capacity", "prefill_token_cap", "max_position"])
def test_a_limit_below_one_is_refused(limit: str) -> None:
    given: dict[str, Any] = {"slots": 1, limit: 0}
    with pytest.raises(ValueError, match=rf"{limit} is 0; it must be at least 1"):
        problem_of([1], [1], **given)


@pytest.mark.parametrize("limit", ["slots", "kv_capacity", "prefill_token_cap", "prefix_cache"])
def test_a_limit_is_a_whole_number(limit: str) -> None:
    given: dict[str, Any] = {"slots": 1, limit: 2.5}
    with pytest.raises(ValueError, match=rf"{limit} is 2.5; it must be a whole number"):
        problem_of([1], [1], **given)
    assert type(getattr(problem_of([1], [1], **{**given, limit: np.int64(2)}), limit)) is int


def test_slots_beyond_any_device_are_refused() -> None:
    assert problem_of([1], [1], MOST_SLOTS).slots == MOST_SLOTS
    with pytest.raises(ValueError, match="it must be at most 1,000,000"):
        problem_of([1], [1], MOST_SLOTS + 1)


@pytest.mark.parametrize(
    ("bend", "beyond", "cap", "reached"),
    [
        (9, 0.1, None, True),
        (10, 0.1, None, False),
        (9, 0.0, None, False),
        (9, 0.1, 9, False),
        (8, 0.1, 9, True),
    ],
)
def test_a_bend_matters_where_a_stage_can_reach_it(
    bend: float, beyond: float, cap: int | None, reached: bool
) -> None:
    cost = CostModel(1.0, 0.0, 1.0, 0.0, prefill_bend=bend, prefill_per_token_beyond=beyond)
    assert problem_of([4, 6], [1, 1], 2, cost, prefill_token_cap=cap).reaches_bend == reached


def test_arrivals_can_be_left_out() -> None:
    problem = problem_of([1, 1], [1, 1], 2, arrival=[0.0, 3.0])
    assert problem.without_arrivals().workload.arrival.tolist() == [0.0, 0.0]
    there = problem_of([1], [1], 1)
    assert there.without_arrivals() is there


def test_a_tree_takes_the_place_of_whole_prompts() -> None:
    tree = tree_of([-1], [4], [0, 0, -1], [2, 1, 3])
    workload = Workload.from_lengths([6, 5, 3], [2, 2, 2])
    problem = Problem(workload.with_tree(tree), CostModel(1.0, 0.0, 1.0, 0.0), 2, kv_capacity=12)
    assert problem.own_tokens.tolist() == [2, 1, 3]
    assert problem.prompt_pieces.tolist() == [2, 1, 3, 4]
    assert not problem.holds_whole_prompts
    assert Problem(workload, problem.cost, 2).holds_whole_prompts
    # Two requests of eight tokens at most, or twelve; and a token to come for each.
    assert problem.pages == 12 + 2
    assert replace(problem, kv_capacity=None, prefix_cache=3).pages == 16 + 2 + 3
    with pytest.raises(ValueError, match="of prompts with other lengths"):
        workload.select([0, 1]).with_tree(tree)
