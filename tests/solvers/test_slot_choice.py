"""The number of slots, chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.planning.plan import make_plan
from batchbound.solvers import slot_choice
from batchbound.solvers.result import Limits
from batchbound.solvers.slot_choice import WORTH_A_SLOT, choose_slots


def test_equal_requests_get_as_many_slots_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    # All numbers of slots are tried, however slow the machine.
    monkeypatch.setattr(slot_choice, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    # Each holds 10 + 9 tokens in its last decode step: five fit in 100.
    problem = Problem(Workload.from_lengths([10] * 20, [10] * 20), CostModel.paper(), 1, kv_capacity=100)
    best = choose_slots(problem, seconds=0.5)[0]
    assert best.slots == 5
    assert best.schedule.check(replace(problem, slots=5)) is None


def test_the_fewest_slots_of_the_fast_ones_come_first() -> None:
    problem = Problem(generate("table3", 0, 120), CostModel.paper(), 1, kv_capacity=8000)
    trials = choose_slots(problem, seconds=0.4)
    least = min(trial.makespan for trial in trials)
    close = [trial.slots for trial in trials if trial.makespan <= least * (1 + WORTH_A_SLOT)]
    assert trials[0].slots == min(close)
    for trial in trials:
        sized = replace(problem, slots=trial.slots)
        assert trial.schedule.check(sized) is None
        assert trial.bound <= trial.makespan
        assert trial.schedule.kv_tokens(sized).max() <= 8000


def test_the_command_chooses_slots_and_the_plan_keeps_within_memory(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "table3:0:40", "--slots", "auto", "--kv-capacity", "6000", "--time-limit", "0.2"]
    assert main([*words, "-o", str(path)]) == 0
    plan = Plan.load(path)
    assert 1 < plan.problem.slots <= 80
    assert plan.schedule.kv_tokens(plan.problem).max() <= 6000


@pytest.mark.slow
def test_a_plan_within_memory_is_no_worse_than_the_policy_that_keeps_to_it() -> None:
    # Short answers with long prompts: what a later request that fits takes, the next one lacks.
    rng = np.random.default_rng(3)
    prompts = np.where(rng.random(150) < 0.2, 600, 30)
    problem = Problem(
        Workload.from_lengths(prompts, rng.integers(5, 60, 150)), CostModel.paper(), 16, kv_capacity=2000
    )
    policy = simulate(problem, policy_named("lpt-ski", problem))
    plan = make_plan(problem, limits=Limits(work=1))
    assert plan.schedule.check(problem) is None
    assert plan.makespan <= policy.makespan + 1e-9


def test_slots_are_chosen_together_with_what_to_follow(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "table3:1:16", "--slots", "auto", "--kv-capacity", "4000", "--time-limit", "0.1"]
    assert main([*words, "--length-error", "0.3", "--longest-completion", "512", "-o", str(path)]) == 0
    plan = Plan.load(path)
    assert plan.expected is not None
    assert len({name.rsplit(", ", 1)[1] for name in plan.expected.compared}) > 1


def test_slots_are_not_chosen_without_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "table3:0:9", "--slots", "auto", "-o", str(tmp_path / "plan.json")]) == 2
    assert "--kv-capacity" in capsys.readouterr().err


def test_a_single_request_takes_one_slot() -> None:
    problem = Problem(Workload.from_lengths([3], [4]), CostModel.paper(), 7, kv_capacity=10)
    assert [trial.slots for trial in choose_slots(problem, seconds=0.1)] == [1]
    assert np.isfinite(choose_slots(problem, seconds=0.1)[0].makespan)
