"""One search for the library, the command line and comparisons: what it starts from and how it ends."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mostly_slow

from batchbound.cli import INTERRUPTED, main
from batchbound.comparing.result import NOT_APPLICABLE
from batchbound.comparing.runner import compare
from batchbound.data.costs.cost import CostModel
from batchbound.data.files.record import plain
from batchbound.data.fleet import Fleet, Replica
from batchbound.data.plan import Plan
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.workload import Workload
from batchbound.heuristics.queues.ordered import arrival_order, longest_first
from batchbound.heuristics.registry import POLICIES
from batchbound.judging import verify
from batchbound.models.bounds.makespan import best_bound
from batchbound.planning.fleet import make_fleet_plan
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits, solve
from batchbound.solvers.fleet import plan_fleet
from batchbound.solvers.result import StoppedBy
from batchbound.solvers.search.baselines import IN_ONE_PASS, baselines, simulated_schedule
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.search.schedule_search import ScheduleSearch

BENT = CostModel(0.02, 1e-4, 0.03, 2e-4, 0, 0, 500, 1e-3)
PROBLEMS = {
    "free": Problem(generate("table3", 0, 40), CostModel.paper(), 12),
    "capped": Problem(generate("table3", 1, 40), CostModel.paper(), 8, prefill_token_cap=400),
    "scarce": Problem(generate("sharegpt", 2, 40), CostModel.paper(), 24, kv_capacity=6_000),
    "both": Problem(
        generate("sharegpt", 3, 40), CostModel.paper(), 16, kv_capacity=6_000, prefill_token_cap=3_000
    ),
    "few": Problem(generate("table3", 4, 14), CostModel.paper(), 5, prefill_emits_first_token=True),
    "bend": Problem(generate("table3", 5, 30), BENT, 12),
}
MORE = {
    "bend and capped": Problem(generate("table3", 6, 30), BENT, 12, prefill_token_cap=700),
    "bend and scarce": Problem(generate("sharegpt", 6, 30), BENT, 24, kv_capacity=6_000),
    "bend and both": Problem(
        generate("sharegpt", 7, 30), BENT, 16, kv_capacity=7_000, prefill_token_cap=3_000
    ),
    "first tokens": Problem(generate("table3", 7, 35), CostModel.paper(), 8, prefill_emits_first_token=True),
    "first tokens and scarce": Problem(
        generate("sharegpt", 8, 35), CostModel.paper(), 20, kv_capacity=6_000, prefill_emits_first_token=True
    ),
    "very scarce": Problem(generate("sharegpt", 9, 30), CostModel.paper(), 32, kv_capacity=4_500),
    "many slots": Problem(generate("table3", 8, 70), CostModel.paper(), 64),
    "tight cap": Problem(generate("table3", 9, 30), CostModel.paper(), 16, prefill_token_cap=200),
}
_PAPER = Replica(CostModel.paper(), 8)
FLEETS = {
    "replicas": Fleet.of(PROBLEMS["free"], 3),
    "replicas and capped": Fleet.of(PROBLEMS["capped"], 2),
    "replicas and scarce": Fleet.of(PROBLEMS["scarce"], 2),
    "replicas and a bend": Fleet.of(PROBLEMS["bend"], 2),
    "unlike replicas": Fleet(generate("table3", 10, 40), (_PAPER, Replica(BENT, 4, busy=2.0))),
    "replicas of unlike memory": Fleet(
        generate("sharegpt", 10, 30), (replace(_PAPER, kv_capacity=5_000), replace(_PAPER, kv_capacity=9_000))
    ),
}


@pytest.fixture(autouse=True)
def quick_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that take seconds have tests of their own."""
    bounds = importlib.import_module("batchbound.models.bounds.prove")
    monkeypatch.setattr(bounds, "proven_bound", lambda problem, *_, **__: best_bound(problem))


@pytest.mark.parametrize("name", mostly_slow([*PROBLEMS, *MORE], fast=("free", "both", "bend")))
def test_plan_solve_and_compare_find_the_same_schedule_at_the_same_work(name: str) -> None:
    problem, limits = (PROBLEMS | MORE)[name], Limits(work=4, seed=3)
    plan, found = make_plan(problem, limits=limits), solve(problem, limits=limits)
    assert found.schedule is not None
    for column in ("bin_of", "slot_of", "decode_steps"):
        assert np.array_equal(getattr(plan.schedule, column), getattr(found.schedule, column))
    assert compare({name: problem}, ["search"], limits).rows[0].value == plan.makespan == found.makespan


@pytest.mark.slow
@pytest.mark.parametrize("name", FLEETS)
def test_plan_solve_and_compare_find_the_same_schedules_of_replicas_at_the_same_work(name: str) -> None:
    fleet, limits = FLEETS[name], Limits(work=5, seed=3)
    plan, found = make_fleet_plan(fleet, limits=limits), plan_fleet(fleet, limits=limits)
    assert found.schedule.check(fleet) is None
    assert np.array_equal(plan.shares.replica_of, found.schedule.replica_of)
    assert compare({name: fleet}, ["search"], limits).rows[0].value == plan.makespan == found.makespan
    assert found.makespan == found.schedule.makespan(fleet)


def test_a_comparison_says_which_solvers_take_no_fleet() -> None:
    rows = compare({"fleet": FLEETS["replicas"]}, ["search", "lpt-ski", "policy:lpt"], Limits(work=1)).rows
    assert [row.status == NOT_APPLICABLE for row in rows] == [False, True, True]
    assert "takes the problem of one machine, not a fleet" in rows[1].message


def test_a_fleet_of_one_has_the_plan_of_its_problem() -> None:
    for problem in (PROBLEMS["free"], PROBLEMS["scarce"]):
        limits = Limits(work=6, seed=3)
        plan = make_fleet_plan(Fleet.of(problem, 1), limits=limits)
        assert plan.makespan == solve(problem, limits=limits).makespan


@pytest.mark.slow
def test_another_process_finds_the_same_schedule_at_the_same_work(tmp_path: Path) -> None:
    for number, options in enumerate(
        (
            ["table3:7:40", "--slots", "9"],
            ["sharegpt:7:30", "--slots", "16", "--kv-capacity", "5000"],
            ["table3:7:40", "--slots", "9", "--replicas", "2"],
        )
    ):
        files = [str(tmp_path / f"{number}-{k}.json") for k in range(2)]
        words = ["plan", *options, "--work", "6", "--seed", "2", "-o"]
        assert main([*words, files[0]]) == 0
        command = [sys.executable, "-m", "batchbound", *words, files[1]]
        subprocess.run(command, check=True, capture_output=True)
        one, other = (Plan.load(file).shares for file in files)
        assert plain(one) == plain(other)


@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_that_could_be_run_instead_is_better(name: str) -> None:
    problem = PROBLEMS[name]
    rules = [simulated_schedule(problem, policy, np.inf) for policy in POLICIES]
    least = min(rule.makespan(problem) for rule in rules if rule is not None)
    found = solve(problem, limits=Limits(work=1))
    assert found.makespan is not None
    assert found.makespan <= least + 1e-12


@pytest.mark.parametrize("name", ["free", "few"])
def test_one_pass_makes_the_schedules_of_policies_where_nothing_is_limited(name: str) -> None:
    problem = PROBLEMS[name]
    orders = {"lpt": longest_first(problem), "fcfs": arrival_order(problem)}
    for policy in IN_ONE_PASS:
        order, patience = orders[policy.split("-")[0]], 0.5 if policy.endswith("ski") else 0.0
        made = ski_rental_schedule(problem, order=order, patience=patience).without_idle_steps(problem)
        served = simulated_schedule(problem, policy, np.inf)
        assert served is not None
        assert made.makespan(problem) == pytest.approx(served.makespan(problem))


def test_a_stage_is_full_when_the_cap_lets_no_waiting_request_join() -> None:
    # Prompts of 3 under a cap of 5 go one by one: waiting for a second one only idles the other slots.
    problem = Problem(
        Workload.from_lengths([3] * 12, [2] * 12), CostModel(0.01, 0.01, 0.001, 0.0), 4, prefill_token_cap=5
    )
    fcfs = simulated_schedule(problem, "fcfs", np.inf)
    assert fcfs is not None
    # The last request of a stage fills the slots, not the cap, and may wait: hence the one per cent.
    assert ski_rental_schedule(problem, patience=50.0).makespan(problem) <= 1.01 * fcfs.makespan(problem)


def test_a_pass_goes_on_only_while_there_is_time() -> None:
    problem, asked = PROBLEMS["scarce"], list[int]()

    def late_at_third_stage() -> bool:
        asked.append(1)
        return len(asked) == 3

    last = baselines(problem, late_at_third_stage)[1][-1]
    assert last(np.inf) is None
    assert len(asked) == 3
    in_time = baselines(problem, lambda: False)[1][-1](np.inf)
    assert in_time is not None
    assert in_time.check(problem) is None


def test_a_schedule_is_in_hand_before_the_bound_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("batchbound.solvers.solve"), "bound_within", interrupted)
    problem = PROBLEMS["free"]
    found = solve(problem)
    assert found.stopped_by is StoppedBy.INTERRUPT
    assert found.schedule is not None
    assert found.schedule.check(problem) is None
    assert found.bound is not None
    assert found.bound.seconds <= found.schedule.makespan(problem)


def test_no_rows_are_compared_where_numpy_turns_an_interrupt_into_a_type_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unique = np.unique

    def along_no_axis(values: Any, **more: Any) -> Any:
        assert more.get("axis") is None
        return unique(values, **more)

    monkeypatch.setattr(np, "unique", along_no_axis)
    assert solve(PROBLEMS["scarce"], limits=Limits(work=5)).schedule is not None


@pytest.mark.parametrize(
    ("solver", "interrupted"),
    [
        ("exact", "models.bounds.prove.proven_bound"),
        ("exact", "solvers.exact.small.search_exactly"),
        ("search", "solvers.exact.small.search_exactly"),
        ("fleet", "solvers.search.schedule_search.ScheduleSearch.improve"),
        pytest.param("fleet", "solvers.fleet._FleetSearch.try_rules", marks=pytest.mark.slow),
    ],
)
def test_what_an_interrupt_ends_hands_back_its_best_schedule(
    solver: str, interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"batchbound.{interrupted}", interrupt)
    few = PROBLEMS["few"]
    if solver == "fleet":
        plan = make_fleet_plan(FLEETS["replicas"], limits=Limits(work=2))
    elif solver == "search":
        scarce = Problem(few.workload.select(range(8)), few.cost, few.slots, kv_capacity=700)
        plan = make_plan(scarce, limits=Limits(seconds=30))
    else:
        plan = make_plan(few, solver=solver, limits=Limits(seconds=30))
    assert plan.maker.stopped_by == StoppedBy.INTERRUPT
    assert verify(plan) is None


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_plan_that_is_interrupted_is_written(
    asked: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), asked)
        time.sleep(60.0)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(ScheduleSearch, "improve", interrupted)
    try:
        status = main(["plan", "table3:0:60", "--slots", "8", "-o", str(tmp_path / "plan.json")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == INTERRUPTED
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.schedule.check(plan.problem) is None
    assert plan.maker.stopped_by == StoppedBy.INTERRUPT
    assert "interrupted" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(
    "options",
    [
        ["--slots", "auto", "--kv-capacity", "9000"],
        ["--slots", "8", "--replicas", "2", "--length-error", "0.3"],
    ],
)
def test_work_is_refused_where_it_limits_nothing(options: list[str], tmp_path: Path) -> None:
    assert main(["plan", "table3:0:40", *options, "--work", "5", "-o", str(tmp_path / "plan.json")]) == 2


def test_a_time_limit_is_refused_where_it_limits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "table3:0:40", "--slots", "8", "--replicas", "2", "--length-error", "0.3"]
    assert main([*words, "--time-limit", "3"]) == 2
    assert "--time-limit has no effect with --replicas and --length-error" in capsys.readouterr().err


def test_an_interrupt_ends_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ScheduleSearch, "improve", interrupted)
    rows = compare({"one": PROBLEMS["free"], "other": PROBLEMS["few"]}, ["search", "policy:lpt"]).rows
    assert [row.solver for row in rows] == ["search"]
    assert rows[0].stopped_by == StoppedBy.INTERRUPT
