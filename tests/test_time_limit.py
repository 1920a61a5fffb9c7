"""A time limit that is over before the search begins: a schedule comes out all the same."""

from __future__ import annotations

import pytest

from batchbound.data.cost import CostModel
from batchbound.data.generators import generate
from batchbound.data.prediction_error import parse_prediction_error
from batchbound.data.problem import Problem
from batchbound.planning import make_plan
from batchbound.robust import make_robust_plan
from batchbound.solvers.result import Limits

OVER = Limits(seconds=1e-9)


@pytest.mark.parametrize("count", [12, 60])
@pytest.mark.parametrize("kv_capacity", [None, 2000])
def test_a_plan_comes_out_when_the_bound_alone_takes_longer(count: int, kv_capacity: int | None) -> None:
    problem = Problem(generate("table3", 0, count), CostModel.paper(), 5, kv_capacity=kv_capacity)
    plan = make_plan(problem, limits=OVER)
    assert plan.schedule.check(problem) is None
    assert plan.bound is not None
    assert plan.bound.seconds <= plan.makespan


def test_a_plan_for_predicted_lengths_comes_out_as_well() -> None:
    problem = Problem(generate("table3", 0, 20), CostModel.paper(), 5)
    plan = make_robust_plan(problem, parse_prediction_error("0.3"), limits=OVER)
    assert plan.schedule.check(plan.problem) is None
