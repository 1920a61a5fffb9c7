"""Bounds of runs that compute shared beginnings once are checked by other code, and forged ones refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.models.bounds.conversations import counted_bound
from batchbound.models.certificates.computed_once import verify_counted_bound

COSTS = {
    "affine": CostModel(1.0, 0.1, 1.0, 0.05),
    "with reads": CostModel(1.0, 0.1, 1.0, 0.05, decode_per_kv_token=0.01),
}


def problem_of(cost: CostModel) -> Problem:
    """Return five prompts of ten tokens, of which eight are the same in all."""
    return Problem(Workload.from_lengths([10] * 5, [3, 9, 4, 7, 5]), cost, slots=2)


@pytest.mark.parametrize("evictions", [False, True])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
def test_the_counts_are_derived_again_and_raised_ones_are_refused(cost: CostModel, evictions: bool) -> None:
    problem = problem_of(cost)
    bound = counted_bound(problem, 18, evictions=evictions)
    assert verify_counted_bound(problem, 18, bound) is None
    assert verify_counted_bound(problem, 17, bound) is not None
    for name, seconds in bound.terms.items():
        terms = {**bound.terms, name: seconds + 0.5}
        raised = replace(bound, seconds=bound.seconds + 0.5, terms=terms)
        assert verify_counted_bound(problem, 18, raised) is not None, name
    assert verify_counted_bound(problem, 18, replace(bound, certificate={})) is not None


def test_fewer_computed_tokens_prove_less() -> None:
    problem = problem_of(COSTS["affine"])
    assert counted_bound(problem, 18).seconds < counted_bound(problem, 50).seconds
