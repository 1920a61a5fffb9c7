"""Bounds from differences of stage times: the checker derives just what their certificates prove."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import UNIT, problem_of, steps_of, verified_within

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.models.bounds.difference_set import useful_differences
from batchbound.models.bounds.makespan import difference_set_bound, trivial_bound
from batchbound.models.certificates.checker import (
    _near_in_chain,
    verify_bound,
)


def tiny_problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 12))
    outputs, prompts = rng.integers(1, 12, count), rng.integers(1, 7, count)
    cost = CostModel(
        prefill_base=float(rng.choice([0.0, 0.5, 2.0, 5.0])),
        prefill_per_token=float(rng.choice([0.0, 0.1])),
        decode_base=float(rng.choice([0.5, 1.0])),
        decode_per_slot=float(rng.choice([0.0, 0.2])),
        prefill_floor=float(rng.choice([0.0, 0.0, 3.0])),
        decode_per_kv_token=float(rng.choice([0.0, 0.01])),
        prefill_bend=float(rng.choice([0.0, 4.0, 9.0])),
        prefill_per_token_beyond=float(rng.choice([0.0, 0.0, 0.3])),
    )
    return problem_of(
        prompts.tolist(),
        outputs.tolist(),
        int(rng.integers(1, 5)),
        cost,
        kv_capacity=int((prompts + outputs).max() + rng.integers(0, 12)) if rng.random() < 0.3 else None,
        prefill_token_cap=int(prompts.max() + rng.integers(0, 6)) if rng.random() < 0.3 else None,
        prefill_emits_first_token=bool(rng.random() < 0.3),
    )


def is_proven_and_no_more(problem: Problem, bound: Bound) -> None:
    """The checker derives just the seconds of the code that made the bound: it shares none with it."""
    assert verify_bound(problem, bound) is None
    share = 1 + 1e-6
    terms = dict(bound.terms) | {"prefill stages": bound.terms["prefill stages"] + bound.seconds * 1e-6}
    higher = replace(bound, seconds=bound.seconds * share, terms=terms)
    violation = verify_bound(problem, higher)
    assert violation is not None
    assert violation.rule == "the certificate proves the bound"


@pytest.mark.parametrize("batch", range(4))
def test_the_checker_derives_what_the_differences_prove_and_no_more(batch: int) -> None:
    for seed in range(60 * batch, 60 * batch + 60):
        problem = tiny_problem(seed)
        for bound in (trivial_bound(problem), difference_set_bound(problem)):
            is_proven_and_no_more(problem, bound)


# Differences at work: six lengths on three slots, two stages leave two differences below the longest.
APART = problem_of([1] * 6, [1, 2, 3, 4, 5, 6], 3, UNIT)


def difference(**changes: Any) -> Bound:
    bound = difference_set_bound(replace(APART, cost=replace(UNIT, prefill_base=100.0)))
    return replace(bound, certificate={**bound.certificate, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"charges": [-1]}, "charges: charges is -1, less than 0"),
        ({"charges": 3}, "a certificate is readable: charges is 3, not a list"),
        ({"charges": [1.5]}, "a certificate is readable: charges is 1.5, not a whole number"),
        ({"charges": []}, "the certificate proves the bound"),
    ],
)
def test_claims_of_differences_are_judged(changes: dict[str, Any], message: str) -> None:
    problem = replace(APART, cost=replace(UNIT, prefill_base=100.0))
    assert verify_bound(problem, difference()) is None
    assert str(verify_bound(problem, difference(**changes))).startswith(message)


def test_claims_of_differences_are_checked_in_just_these_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(APART, cost=replace(UNIT, prefill_base=100.0))
    assert steps_of(verified_within(problem, difference(), monkeypatch)) == 19


def test_requests_of_no_steps_leave_stages_alone() -> None:
    problem = problem_of([1] * 3, [1] * 3, 2, UNIT, prefill_emits_first_token=True)
    bound = difference_set_bound(problem)
    assert bound.seconds == bound.terms["prefill stages"] == 2
    is_proven_and_no_more(problem, bound)


def test_the_checker_counts_near_pairs_of_points_as_the_prover_does_by_code_of_its_own() -> None:
    for stages, longest in itertools.product(range(1, 12), range(1, 4)):
        for decode_steps in range(longest, 4 * longest + 2):
            assert _near_in_chain(stages, longest, decode_steps) == useful_differences(
                stages, longest, decode_steps
            )


def placements(stages: int, gap: int, decode_steps: int) -> Iterator[list[int]]:
    """Yield all points that begin at 0, end in so many decode steps or later, and leave no gap above one."""
    for intervals in itertools.product(range(1, gap + 1), repeat=stages):
        points = [0, *itertools.accumulate(intervals)]
        if points[-1] >= decode_steps:
            yield points


@pytest.mark.parametrize(("stages", "gap"), [(1, 3), (2, 3), (3, 2), (3, 4), (4, 3), (5, 2), (5, 3)])
def test_no_points_have_more_near_pairs_than_the_checker_counts(stages: int, gap: int) -> None:
    met = 0
    for decode_steps in range(gap, stages * gap + 1):
        near = max(
            sum(b - a < gap for a, b in itertools.combinations(points, 2))
            for points in placements(stages, gap, decode_steps)
        )
        assert near <= _near_in_chain(stages, gap, decode_steps)
        met += near == _near_in_chain(stages, gap, decode_steps)
    assert met
