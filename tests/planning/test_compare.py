"""Solvers side by side: measurements, tables, profiles, own solvers and linear models."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchbound.cli import main
from batchbound.comparing.result import (
    NOT_APPLICABLE,
    NOT_INSTALLED,
    OPTIMAL_UNEVICTED,
    Comparison,
    Measurement,
)
from batchbound.comparing.runner import OwnLinearSolver, compare
from batchbound.data.bound import Bound, gap_above
from batchbound.data.costs.cost import CostModel
from batchbound.data.fleet import Fleet
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.readers.requests import read_workload
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.models.bounds.prove import evicting_bound
from batchbound.models.formulations.full_model import repaired_model
from batchbound.models.formulations.linear_files import read_mps, write_mps
from batchbound.models.formulations.linear_model import LinearModel
from batchbound.planning.fleet import make_fleet_plan
from batchbound.solvers.backends.backend import Backend
from batchbound.solvers.backends.linear import LinearResult
from batchbound.solvers.result import Limits, Result, Status, StoppedBy
from batchbound.solvers.search.constructive import ski_rental_schedule


def small(seed: int, count: int = 12) -> Problem:
    return Problem(generate("table3", seed, count), CostModel.paper(), 4)


def given(problem: Problem, limits: Limits) -> Result:
    """A user's own solver: requests as they come."""
    schedule = ski_rental_schedule(problem, order=np.arange(len(problem)))
    makespan = schedule.makespan(problem)
    return Result(Status.FEASIBLE, StoppedBy.FINISHED, schedule, makespan, None, 0.5, "given", "mine 1")


@pytest.mark.parametrize("solvers", [given, [given], ["search", given]])
def test_an_own_solver_without_a_label_is_refused_with_the_mend(solvers: Any) -> None:
    with pytest.raises(TypeError, match=r"has no label; give it one: \{'mine': ...\}"):
        compare({"one": small(0)}, solvers)


def row(instance: str, solver: str, value: float | None, seconds: float = 1.0, **more: object) -> Measurement:
    status = "no solution" if value is None else "optimal"
    return Measurement(instance, solver, value, None, None, seconds, status, "proof", "1", **more)  # type: ignore[arg-type]


def test_every_solver_meets_every_instance_and_gaps_are_to_the_best_bound() -> None:
    instances = {"a": small(0), "b": small(1)}
    done: list[str] = []
    comparison = compare(
        instances,
        {"search": "search", "fcfs": "policy:fcfs", "mine": given},
        Limits(seconds=0.2),
        on_done=lambda row: done.append(row.solver),
    )
    assert [(r.instance, r.solver) for r in comparison.rows] == [
        (i, s) for i in "ab" for s in ("search", "fcfs", "mine")
    ]
    assert done == ["search", "fcfs", "mine"] * 2
    for r in comparison.rows:
        assert r.value is not None
        bound = next(o.bound for o in comparison.rows if o.instance == r.instance and o.bound is not None)
        assert r.gap == pytest.approx(r.value / bound - 1)
        assert r.improvements[-1][1] == pytest.approx(r.value)
    assert comparison.rows[2].version == "mine 1"


def test_an_own_solver_may_return_a_schedule_alone_and_the_comparison_prints_as_a_table() -> None:
    def alone(problem: Problem, limits: Limits) -> Schedule:
        return ski_rental_schedule(problem, order=np.arange(len(problem)))

    comparison = compare({"a": small(0)}, {"alone": alone, "given": given}, Limits(seconds=0.1))
    ours, theirs = comparison.rows
    assert ours.value == theirs.value
    assert ours.status == "feasible"
    assert "  alone " in str(comparison)


def test_an_own_solver_that_breaks_a_rule_is_found_out() -> None:
    def silent(problem: Problem, limits: Limits) -> Schedule:
        zeros = np.zeros(len(problem), dtype=np.int64)
        return Schedule(zeros, zeros, np.array([1000]))

    with pytest.raises(ValueError, match="the schedule of 'silent' for 'a' breaks a rule"):
        compare({"a": small(0)}, {"silent": silent}, Limits(seconds=0.1))

    def wrong(problem: Problem, limits: Limits) -> Result:
        zeros = np.zeros(len(problem), dtype=np.int64)
        schedule = Schedule(zeros, zeros, np.array([1000]))
        return Result(Status.OPTIMAL, StoppedBy.PROOF, schedule, 1.0, None, 0.1, "wrong", "1")

    with pytest.raises(ValueError, match="the schedule of 'wrong' for 'a' breaks a rule"):
        compare({"a": small(0)}, {"wrong": wrong}, Limits(seconds=0.1))


def test_an_own_bound_above_a_schedule_that_breaks_no_rule_is_found_out() -> None:
    def sure(problem: Problem, limits: Limits) -> Result:
        return replace(given(problem, limits), bound=Bound(1e6, "a guess", {}, {}))

    with pytest.raises(ValueError, match=r"the bound of 'sure' for 'a', 1e\+06, is above what 'ours' found"):
        compare({"a": small(0)}, {"ours": "search", "sure": sure}, Limits(work=1))


def test_an_own_solver_that_returns_nothing_is_named() -> None:
    with pytest.raises(TypeError, match="'mine' returned NoneType"):
        compare({"a": small(0)}, {"mine": lambda problem, limits: None})  # type: ignore[dict-item,return-value]


def test_a_run_that_evicts_is_judged_by_the_bound_of_schedules_that_may() -> None:
    # Both run at first, and one gives way: shorter than one after the other, which is proven the least.
    problem = Problem(
        Workload.from_lengths([1, 1], [85, 77]), CostModel(0.0, 0.0, 0.001, 0.0002), 16, kv_capacity=86
    )
    best, rule = compare({"a": problem}, ["search", "policy:fcfs"], Limits(work=1)).rows
    assert best.gap == 0
    assert rule.evictions == 1
    assert rule.value is not None
    assert best.bound is not None
    assert rule.value < best.bound
    assert rule.bound == evicting_bound(problem).seconds <= rule.value
    assert rule.gap == gap_above(rule.value, rule.bound)
    assert best.status == OPTIMAL_UNEVICTED
    assert best.bound_source.endswith("of schedules that evict no request")
    *_, remark = str(Comparison((best, rule))).splitlines()
    assert remark == f"  policy:fcfs, evictions: 1; its gap is to {rule.bound:.3f}, a bound that allows them"


def test_a_schedule_that_beats_the_best_known_is_told() -> None:
    rows = (
        row("a", "best known", 4.0),
        row("a", "x", 3.0),
        row("a", "y", 3.5),
        row("a", "z", 2.0, evictions=1),
    )
    *_, beaten = str(Comparison(rows)).splitlines()
    assert beaten == "  x beats the library's best known by 1.000 (25.00%)"
    assert "beats" not in str(Comparison((rows[0], row("a", "x", 4.0), rows[3])))


def test_a_solver_without_its_library_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "installed", False)
    missing, served = compare({"a": small(0)}, ["slot-free:cp-sat", "policy:lpt"], Limits(seconds=0.1)).rows
    assert (missing.status, missing.value) == (NOT_INSTALLED, None)
    assert "pip install '.[solvers]'" in missing.message
    assert Comparison((missing, served)).ratios() == {"slot-free:cp-sat": [], "policy:lpt": [1.0]}


def test_one_solver_is_named_as_it_is() -> None:
    (found,) = compare({"a": small(0)}, "policy:lpt").rows
    assert found.solver == "policy:lpt"


def test_an_unknown_solver_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="there is no solver 'magic'"):
        compare({"a": small(0)}, ["magic"])


@pytest.mark.usefixtures("solve_here")
def test_a_linear_model_goes_to_the_backends_and_to_nobody_else() -> None:
    model = repaired_model(small(0, 2)).model
    comparison = compare({"model": model, "job": small(0)}, ["scip", "policy:fcfs"], Limits(seconds=30.0))
    found = {(r.instance, r.solver): r for r in comparison.rows}
    assert found["model", "scip"].value is not None
    assert found["model", "policy:fcfs"].status == NOT_APPLICABLE
    assert found["job", "scip"].status == NOT_APPLICABLE
    assert found["job", "policy:fcfs"].status == "feasible"


KNAPSACK = """NAME  KNAPSACK
OBJSENSE
    MAX
ROWS
 N  PROFIT
 L  CAPACITY
COLUMNS
    M  'MARKER'  'INTORG'
    X1  PROFIT  10  CAPACITY  5
    X2  PROFIT  13  CAPACITY  7
    X3  PROFIT  7  CAPACITY  4
    M  'MARKER'  'INTEND'
RHS
    RHS  CAPACITY  11
ENDATA
"""


def first_only(model: LinearModel, limits: Limits) -> LinearResult:
    """A user's own solver of linear models: take the first thing, and claim nothing."""
    return LinearResult(
        Status.FEASIBLE, StoppedBy.FINISHED, np.eye(model.columns)[0], -99.0, None, 0.1, "mine", "mine 2"
    )


@pytest.mark.slow
def test_a_users_script_compares_own_solvers_on_own_files(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("id,input_tokens,output_tokens\na,10,20\nb,30,5\nc,12,40\n")
    (tmp_path / "knapsack.mps").write_text(KNAPSACK)
    job = read_workload(tmp_path / "lengths.csv").workload
    comparison = compare(
        {"job": Problem(job, CostModel.paper(), 2), "knapsack": read_mps(tmp_path / "knapsack.mps")},
        {"search": "search", "given": given, "highs": "highs", "first": OwnLinearSolver(first_only)},
        Limits(seconds=20.0, work=20),
    )
    found = {(r.instance, r.solver): r for r in comparison.rows}
    # Of 10 + 7 and 13, no more: profits are maximised, so their negatives are what is compared.
    assert found["knapsack", "highs"].value == pytest.approx(-20)
    assert found["knapsack", "highs"].gap == 0.0
    assert found["knapsack", "first"].value == -10
    assert found["knapsack", "first"].gap == pytest.approx(0.5)
    assert found["knapsack", "first"].version == "mine 2"
    assert found["job", "first"].status == found["knapsack", "given"].status == NOT_APPLICABLE
    assert found["job", "search"].bound_source
    assert comparison.ratios("seconds")["highs"] == [1.0]
    assert "-20.000 (highs)" in comparison.to_markdown()
    for name in ("profile.png", "time.svg"):
        (comparison.plot_profile if name == "profile.png" else comparison.plot_over_time)(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000


def test_an_own_linear_solver_that_breaks_a_rule_is_found_out(tmp_path: Path) -> None:
    def greedy(model: LinearModel, limits: Limits) -> LinearResult:
        return replace(first_only(model, limits), values=np.ones(model.columns))

    (tmp_path / "knapsack.mps").write_text(KNAPSACK)
    with pytest.raises(ValueError, match="the values of 'greedy' for 'knapsack' break a rule"):
        compare({"knapsack": read_mps(tmp_path / "knapsack.mps")}, {"greedy": OwnLinearSolver(greedy)})


def test_a_fleet_is_planned_by_search_and_by_no_other_solver() -> None:
    fleet, limits = Fleet.of(small(0), 2), Limits(work=1)
    searched, other = compare({"f": fleet}, ["search", "highs"], limits).rows
    plan = make_fleet_plan(fleet, limits=limits)
    assert plan.bound is not None
    assert (searched.instance, searched.solver, searched.value) == ("f", "search", plan.makespan)
    assert searched.bound is not None
    assert 0 < searched.bound <= plan.makespan
    assert (searched.bound_source, searched.version) == (plan.bound.source, plan.maker.version)
    assert other.value is None
    assert "takes the problem of one machine, not a fleet" in other.message


def test_instances_a_solver_cannot_be_asked_for_do_not_count_against_it() -> None:
    refused = replace(row("b", "x", None), status=NOT_APPLICABLE)
    comparison = Comparison((row("a", "x", 2.0), row("a", "y", 3.0), refused, row("b", "y", 5.0)))
    assert comparison.ratios() == {"x": [1.0], "y": [1.5, 1.0]}


def test_performance_ratios_are_over_the_best_and_infinite_where_unsolved() -> None:
    rows = (row("a", "x", 2.0, 8.0), row("a", "y", 3.0, 2.0), row("b", "x", None), row("b", "y", 5.0))
    comparison = Comparison(rows)
    assert comparison.ratios() == {"x": [1.0, math.inf], "y": [1.5, 1.0]}
    assert comparison.ratios("seconds") == {"x": [4.0, math.inf], "y": [1.0, 1.0]}


def test_tables_say_what_is_known_and_leave_out_the_rest() -> None:
    comparison = Comparison((row("a|b", "x", None), row("a|b", "y", 2.5, message="so, so")))
    table = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert [entry["value"] for entry in table] == ["", "2.5"]
    assert table[1]["message"] == "so, so"
    lines = comparison.to_markdown().splitlines()
    assert lines[2] == "| a\\|b | x |  |  |  | 1.00 | no solution | 1 |"
    assert len(lines) == 4


def test_the_screen_has_one_bound_an_instance_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "table3:0:12", "table3:1:12", "--slots", "4", "--solvers", "policy:lpt,policy:fcfs"]
    assert main([*words, "--time-limit", "0.2", "--threads", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == ["table3"] * 2
    assert len(lines) == 8
    assert max(map(len, lines)) <= 80
    # An option that no solver obeys is a remark.
    assert err == "batchbound: --time-limit, --threads: no effect on policy:lpt, policy:fcfs\n"


def test_the_command_writes_tables_and_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("t.csv", "t.md", "profile.png", "time.svg")]
    options = zip(("--csv", "--markdown", "--profile", "--over-time"), map(str, files), strict=True)
    words = ["compare", "table3:0:12", "table3:1:12", "--slots", "4", "--time-limit", "0.2"]
    assert main([*words, *(word for option in options for word in option), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 6
    assert files[0].read_text().count("\n") == 7
    assert files[1].read_text().startswith("| instance | solver |")
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in files[3].read_bytes()


@pytest.mark.usefixtures("solve_here")
def test_the_command_takes_an_mps_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.mps"
    write_mps(repaired_model(small(0, 3)).model, path)
    assert main(["compare", str(path), "--solvers", "scip", "--time-limit", "5"]) == 0
    assert "  scip  " in capsys.readouterr().out
    assert main(["compare", str(path), "--solvers", "scip", "--slots", "4"]) == 2
    assert "--slots has no effect on linear models. Leave it out." in capsys.readouterr().err


def test_the_command_says_why_a_solver_has_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "table3:0:3", "--solvers", "highs"]) == 0
    assert "table3:0:3, highs: highs takes linear models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--solvers", "magic"], "there is no solver 'magic'"),
        (["--profile", "profile.txt"], "profile.txt: is not an image file"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["compare", "table3:0:5", *words])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("solve_here")
def test_a_formulation_that_cannot_say_the_problem_is_a_row_not_an_end() -> None:
    problem = Problem(Workload.from_lengths([3, 3, 3], [4, 4, 4]), CostModel.paper(), slots=3, kv_capacity=10)
    refused, served = compare({"tight": problem}, ["slot-free:highs", "lpt-ski"], Limits(seconds=1)).rows
    assert refused.value is None
    assert "KV" in refused.message
    assert served.value is not None
