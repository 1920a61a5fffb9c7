"""The report of a plan that follows a policy is of that policy; contradictions are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import UNIT, problem_of

from batchbound.cli import main
from batchbound.data.plan import FollowedPolicy, Plan
from batchbound.heuristics.simulate import simulate
from batchbound.heuristics.simulator import KEEPS_KV
from batchbound.models.bounds.prove import evicting_bound
from batchbound.planning.plan import make_plan
from batchbound.solvers.result import Limits


@pytest.fixture
def followed(tmp_path: Path) -> Path:
    """A plan that follows first come, first served, which evicts."""
    problem = problem_of([4] * 4, [9, 8, 9, 8], 4, UNIT, kv_capacity=24)
    trace = simulate(problem, "fcfs", swap=KEEPS_KV)
    assert trace.evictions
    plan = make_plan(problem, limits=Limits(work=1))
    counts = trace.prefill_stages, trace.decode_steps, trace.evictions
    policy = FollowedPolicy("fcfs", trace.makespan, *counts, evicting_bound(problem))
    plan = replace(plan, followed=policy, maker=replace(plan.maker, status="feasible"))
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def edited(path: Path, **changes: Any) -> str:
    plan = json.loads(path.read_text())
    plan["followed"] |= changes
    path.write_text(json.dumps(plan))
    return str(path)


def test_the_followed_policy_is_simulated(followed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(followed), "--json"]) == 0
    report, plan = json.loads(capsys.readouterr().out), Plan.load(followed)
    policy = plan.followed
    assert policy is not None
    assert report["model_makespan_s"] == pytest.approx(policy.seconds)
    assert (report["evictions"], report["decode_steps"]) == (policy.evictions, policy.decode_steps)
    assert report["run_bound_s"] == pytest.approx(policy.bound.seconds)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "nobody"}, "plan.json: field 'followed.policy': no policy is called 'nobody'"),
        ({"seconds": 0.5}, "field 'followed.seconds': its bound is"),
    ],
)
def test_impossible_claims_of_a_followed_policy_are_refused(
    followed: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    assert main(["report", edited(followed, **changes)]) == 2
    assert said in capsys.readouterr().err


def test_a_bound_above_the_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    make_plan(problem_of([1, 1, 1], [1, 1, 4], 2, UNIT), limits=Limits(work=1)).save(path)
    assert main(["report", str(path)]) == 0
    plan = json.loads(path.read_text())
    plan["bound"]["seconds"] += 1.0
    path.write_text(json.dumps(plan))
    assert main(["report", str(path)]) == 2
    assert "field 'makespan_s': its bound is 7.0 s, above the plan's 6.0 s" in capsys.readouterr().err
