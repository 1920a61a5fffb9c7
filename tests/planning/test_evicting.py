"""Plans that evict no request, against runs that may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchbound.cli import main
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.workload import Workload
from batchbound.planning.evicting import evicting_run

TWO = Problem(Workload.from_lengths([1, 1], [85, 77]), CostModel(0.0, 0.0, 0.001, 0.0002), 16, kv_capacity=86)


def test_a_run_that_evicts_has_the_bound_of_schedules_that_may() -> None:
    found = evicting_run(TWO)
    assert found is not None
    assert found.evictions == 1
    assert found.bound.seconds <= found.seconds
    assert found.gap >= 0


def test_without_evictions_there_is_nothing_to_compare() -> None:
    roomy = Problem(TWO.workload, TWO.cost, 16, kv_capacity=1000)
    assert evicting_run(roomy) is None
    assert evicting_run(TWO, most_requests=1) is None


def test_a_plan_says_where_a_rule_that_evicts_takes_less(
    public_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, plan = public_data / "inputs" / "planning", str(tmp_path / "plan.json")
    words = ["plan", str(jobs / "evict_12.csv"), "--slots", "12", "--kv-capacity", "820", "--first-token"]
    words += [
        "decode",
        "--cost",
        str(jobs / "evict_12.cost.json"),
        "--time-limit",
        "0.2",
        "-o",
        plan,
        "--json",
    ]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "less than this plan's" in said.err
    found = json.loads(said.out)
    assert found["bound_of"] == "every schedule that evicts no request"
    assert found["evicting"]["bound_s"] <= found["evicting"]["makespan_s"] < found["makespan_s"]
    assert main(["verify", plan]) == 0
    assert "no schedule that evicts no request takes less than" in capsys.readouterr().out
