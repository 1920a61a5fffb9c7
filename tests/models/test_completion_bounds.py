"""Bounds of total completion time and of the first K requests, against the optimum of any engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import mostly_slow, tree_of
from tiny_completions import KINDS, optimum, wrong_claims

from batchbound.data.iterations import EngineLimits, Sequences
from batchbound.data.objective import Aim, Goal, Objective, ObjectiveBound
from batchbound.models.bounds.completions import completion_bound, resources_of, shortest_first
from batchbound.models.certificates.completions import verify_completions

TOTAL = Goal(Objective("total"))


def first(count: int) -> Goal:
    return Goal(Objective("first", count))


def sequences(*pairs: tuple[int, int]) -> Sequences:
    return Sequences(np.array([p for p, _ in pairs]), np.array([a for _, a in pairs]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", mostly_slow(range(150), range(20)))
def test_no_bound_is_above_the_optimum_and_no_raised_claim_is_accepted(seed: int, kind: str) -> None:
    wrong, _, refused = wrong_claims(seed, kind)
    assert wrong == []
    assert refused >= 3


def test_the_total_is_that_of_shortest_first_where_slots_bind() -> None:
    # Two slots: 1 and 2 begin, 3 follows the 1 and ends at 4, 4 follows the 2 and ends at 6.
    work, limits = sequences((1, 4), (1, 1), (1, 3), (1, 2)), EngineLimits(2)
    bound = completion_bound(work, limits, TOTAL)
    assert (bound.value, bound.source) == (1 + 2 + 4 + 6, "shortest first")
    assert shortest_first(np.array([4, 1, 3, 2]), 2) == 13


def test_requests_that_fill_the_memory_follow_each_other() -> None:
    # Each holds 3 to 5 of 5 tokens, 12 in all: at a full memory 2.4 iterations, or 3 alone.
    work, limits = sequences((3, 3), (3, 3)), EngineLimits(2, 8, 5, 1)
    blocks, late = resources_of(work, limits)["KV"]
    assert blocks.tolist() == [2.4, 2.4]
    # Draws are 2.5, 1.5 and 0.5 iterations before the end.
    assert late[0] == pytest.approx((3 * 2.5 + 4 * 1.5 + 5 * 0.5) / 12)
    # Mean times of use 1.2 and 3.6, and 16 / 12 more to each end.
    assert completion_bound(work, limits, TOTAL).value == np.ceil(4.8 + 2 * 16 / 12)


def test_the_cheapest_requests_by_one_measure_are_no_bound() -> None:
    # The smaller area takes three iterations; the other request takes two.
    work, limits = sequences((1, 3), (3, 2)), EngineLimits(2, 8, 5, 1)
    assert completion_bound(work, limits, first(1)).value == 2


def test_a_shared_beginning_is_charged_to_all_that_draw_at_once() -> None:
    tree = tree_of([-1], [10], [0, 0, 0], [2, 2, 2])
    work, limits = Sequences(tree.prompt_tokens, np.array([1, 1, 1]), tree=tree), EngineLimits(3, 64, 14, 1)
    # Two fit at once: each holds 2 tokens of its own and half of 10.
    assert resources_of(work, limits)["KV"][0].tolist() == [7 / 14] * 3
    # All three share the 10 tokens that are computed once.
    assert resources_of(work, limits)["tokens"][0] == pytest.approx([(2 + 10 / 3) / 64] * 3)


def test_a_request_of_several_completions_ends_with_the_last() -> None:
    goal = Goal(Objective("total"), np.array([0, 0, 1]))
    work = sequences((1, 2), (1, 5), (1, 3))
    assert goal.value(np.array([2, 5, 3])) == 8
    assert completion_bound(work, EngineLimits(3), goal).value == 8
    assert Goal.of(Objective("groups", 1), np.arange(3), np.array([7, 7, -1])).item is not None


@pytest.mark.parametrize(
    ("certificate", "message"),
    [
        ({}, "readable"),
        ({"kind": "guess"}, "not"),
        ({"kind": "use", "weights": {"KV": 1.0}}, "no limit"),
        ({"kind": "use", "weights": {"slots": 0.7, "tokens": 0.7}}, "add up"),
        ({"kind": "use", "weights": {"slots": -1.0}}, "numbers from 0 to 1"),
        ({"kind": "use", "weights": {"luck": 1.0}}, "no resource"),
        ({"kind": "list"}, "sum alone"),
    ],
)
def test_a_certificate_that_proves_nothing_is_refused(certificate: dict[str, object], message: str) -> None:
    aim = Aim(first(1), ObjectiveBound(1, "?", certificate))
    assert message in str(verify_completions(sequences((1, 4), (1, 2)), EngineLimits(2), aim))


def test_a_bound_for_more_requests_than_there_are_is_refused() -> None:
    aim = Aim(first(3), ObjectiveBound(1, "?", {"kind": "longest"}))
    assert "there are 2 requests" in str(verify_completions(sequences((1, 4), (1, 2)), EngineLimits(2), aim))
    with pytest.raises(ValueError, match="3 are to be complete"):
        Goal.of(Objective("first", 3), np.arange(2), np.full(2, -1))


def test_larger_bounds_are_checked_too() -> None:
    rng = np.random.default_rng(3)
    work = Sequences(rng.integers(1, 400, 200), rng.integers(1, 300, 200))
    for limits in (EngineLimits(16, 128), EngineLimits(64, 512, 4096, 16)):
        for goal in (TOTAL, first(150), Goal(Objective("groups", 9), np.arange(200) % 20)):
            aim = Aim(goal, completion_bound(work, limits, goal))
            assert verify_completions(work, limits, aim) is None
            raised = replace(aim.bound, value=aim.bound.value + 1)
            assert "proves" in str(verify_completions(work, limits, Aim(goal, raised)))


def test_the_oracle_knows_that_order_matters() -> None:
    values = {kind: [optimum(seed, kind)[3] for seed in range(5)] for kind in KINDS}
    assert all(total >= one for total, one in zip(values["total"], values["first"], strict=True))


@pytest.mark.parametrize("text", ["first", "first:0", "total:3", "groups:-1", "soon"])
def test_a_text_that_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="none of makespan"):
        Objective.of(text)


def test_objectives_have_texts() -> None:
    for text in ("total", "first:80", "groups:3"):
        assert str(Objective.of(text)) == text
    assert Objective.of("makespan") is None
