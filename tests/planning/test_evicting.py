"""Plans that follow a policy which evicts requests, where that takes less than the best schedule."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import batchbound
from batchbound import Limits, Plan, make_plan
from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import POLICIES
from batchbound.heuristics.simulate import simulate
from batchbound.planning.evicting import following_plan

COST = CostModel(0.004, 1e-5, 0.006, 2e-5)
TWELVE = Problem(Workload.from_lengths([100] * 12, [128] * 12), COST, 12, kv_capacity=820)


def planned(problem: Problem) -> Plan:
    return make_plan(problem, limits=Limits(work=4))


@pytest.fixture(scope="module")
def twelve() -> Plan:
    return planned(TWELVE)


def drawn(seed: int) -> Problem:
    """Return a job of 2 to 40 requests whose KV capacity holds 1 to 4 of the longest."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 41))
    prompts = rng.integers(1, 100, count)
    lengths = np.maximum(1, rng.lognormal(3.5, 0.8, count)).astype(int)
    cost = replace(COST, prefill_base=float(rng.choice([0.004, 0.1])))
    capacity = int((prompts + lengths).max() * rng.uniform(1.05, 4))
    work = Workload.from_lengths(prompts.tolist(), lengths.tolist())
    return Problem(work, cost, int(rng.integers(2, 17)), kv_capacity=capacity)


def test_a_plan_follows_a_policy_that_takes_less_by_evicting_requests(twelve: Plan) -> None:
    plan = twelve
    assert plan.followed is not None
    assert plan.followed.evictions > 0
    assert plan.claim is not None
    assert plan.claim.seconds <= plan.seconds < plan.makespan
    assert batchbound.verify(plan) is None


@pytest.mark.slow
def test_no_plan_takes_longer_than_a_policy_that_evicts() -> None:
    for seed in range(3):
        problem = drawn(seed)
        plan, rules = planned(problem), [simulate(problem, name).makespan for name in POLICIES]
        assert plan.seconds <= min(rules) * (1 + 1e-9), seed
        assert batchbound.verify(plan) is None, seed


def test_without_evictions_a_plan_follows_its_schedule() -> None:
    assert planned(replace(TWELVE, kv_capacity=10_000)).followed is None
    schedule = make_plan(TWELVE, limits=Limits(work=4), evicting=False)
    assert schedule.followed is None
    assert following_plan(schedule, most_requests=1) is schedule


def test_what_a_followed_policy_is_said_to_take_is_simulated_again(twelve: Plan) -> None:
    plan = twelve
    assert plan.followed is not None
    assert plan.bound is not None
    false = {
        "no policy is called 'none'": replace(plan.followed, policy="none"),
        "simulated again": replace(plan.followed, seconds=plan.followed.seconds / 2),
        "without evictions": replace(plan.followed, bound=plan.bound),
    }
    for said, followed in false.items():
        assert said in str(batchbound.verify(replace(plan, followed=followed)))


def test_a_plan_that_follows_a_policy_is_written_read_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cost = tmp_path / "job.csv", tmp_path / "cost.json"
    job.write_text("input_tokens,output_tokens\n" + "100,128\n" * 12)
    cost.write_text(json.dumps({"batchbound_cost": 1, "cost": asdict(COST)}))
    path = str(tmp_path / "plan.json")
    words = [str(job), "--slots", "12", "--kv-capacity", "820", "--first-token", "decode"]
    assert main(["plan", *words, "--cost", str(cost), "--work", "4", "-o", path, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "the plan follows" in said.err
    assert found["bound_of"] == "every schedule, evicting or not"
    assert found["bound_s"] <= found["makespan_s"] < found["schedule_s"]
    assert found["status"] == "feasible"
    plan = Plan.load(path)
    assert plan.followed is not None
    assert plan.seconds == found["makespan_s"]
    assert main(["verify", path]) == 0
    told = capsys.readouterr().out
    assert "simulated again" in told
    assert "no schedule takes less than" in told
