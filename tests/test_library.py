"""What a notebook imports from the package itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

import batchbound
from batchbound import CostModel, Limits, Problem, Workload


def problem() -> Problem:
    return Problem(Workload.from_lengths([3, 5, 2, 4], [9, 4, 7, 2]), CostModel.paper(), 2)


@pytest.mark.parametrize("name", batchbound.__all__)
def test_every_public_name_is_there(name: str) -> None:
    if name in ("LLM", "rollout_function"):
        pytest.importorskip("transformers", reason="the engine extra is not installed")
    assert getattr(batchbound, name) is not None
    assert name in dir(batchbound)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        getattr(batchbound, "plann")  # noqa: B009


def test_a_plan_is_made_simulated_reported_and_verified() -> None:
    plan = batchbound.plan(problem(), limits=Limits(seconds=0.3))
    assert batchbound.verify(plan) is None
    trace = batchbound.simulate(problem(), batchbound.policy_named("fcfs", problem()))
    assert plan.makespan <= trace.makespan + 1e-9
    report = batchbound.report(plan, [trace])
    assert report.requests == 4
    assert batchbound.solve(problem(), limits=Limits(seconds=0.3)).makespan == pytest.approx(plan.makespan)


def test_a_bound_above_the_plan_is_refused() -> None:
    plan = batchbound.plan(problem(), limits=Limits(seconds=0.3))
    assert plan.bound is not None
    doubled = replace(plan, bound=replace(plan.bound, seconds=plan.bound.seconds * 2))
    assert batchbound.verify(doubled) is not None
