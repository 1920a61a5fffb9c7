"""A time limit that is over before the search begins: a schedule comes out all the same."""

from __future__ import annotations

import importlib
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.lengths.prediction_error import parse_prediction_error
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.plan import make_plan
from batchbound.planning.uncertain import make_robust_plan
from batchbound.solvers.result import Limits

OVER = Limits(seconds=1e-9)


@pytest.mark.parametrize("count", [12, 60])
@pytest.mark.parametrize("kv_capacity", [None, 2000])
def test_a_plan_comes_out_when_the_bound_alone_takes_longer(count: int, kv_capacity: int | None) -> None:
    problem = Problem(generate("table3", 0, count), CostModel.paper(), 5, kv_capacity=kv_capacity)
    plan = make_plan(problem, limits=OVER)
    assert plan.schedule.check(problem) is None
    assert plan.bound is not None
    assert plan.bound.seconds <= plan.makespan * (1 + 1e-12)


def test_a_plan_for_predicted_lengths_comes_out_as_well() -> None:
    problem = Problem(generate("table3", 0, 20), CostModel.paper(), 5)
    plan = make_robust_plan(problem, parse_prediction_error("0.3"), limits=OVER)
    assert plan.schedule.check(plan.problem) is None


@pytest.mark.parametrize("solver", ["search", "slot-free:cp-sat"])
def test_what_is_proven_of_a_problem_is_proven_once(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def counted(problem: Problem, *_: object, **__: object) -> Bound:
        asked.append(problem)
        return best_bound(problem)

    for module in ("batchbound.planning.plan", "batchbound.models.bounds.prove"):
        monkeypatch.setattr(importlib.import_module(module), "proven_bound", counted)
    # Too little time for a proof by CP-SAT.
    problem = Problem(generate("table3", 0, 20), CostModel.paper(), 6)
    plan = make_plan(problem, solver=solver, limits=Limits(seconds=0.05))
    assert len(asked) == 1
    assert plan.bound is not None
    assert plan.bound.certificate["kind"] != "solver"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seconds": "1"}, r"Limits.seconds is '1'; it must be positive and finite"),
        ({"seconds": Decimal("0.1")}, r"Limits.seconds is Decimal\('0.1'\); it must be positive"),
        ({"work": 2.0}, r"Limits.work is 2.0; it must be a whole number"),
        ({"seed": None}, r"Limits.seed is None; it must be a whole number"),
        ({"threads": "1"}, r"Limits.threads is '1'; it must be a whole number"),
    ],
)
def test_a_limit_that_is_no_number_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Limits(**given)


def test_a_limit_may_be_a_number_of_numpys() -> None:
    limits = Limits(seconds=np.float32(0.5), work=np.int64(3), seed=np.int64(1))  # type: ignore[arg-type]
    assert limits == Limits(seconds=0.5, work=3, seed=1)
