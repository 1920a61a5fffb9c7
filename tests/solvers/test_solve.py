"""One call for every solver: what goes in and what comes out."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchbound.comparing.runner import compare
from batchbound.data.bound import Bound
from batchbound.data.costs.cost import CostModel
from batchbound.data.problem import Problem
from batchbound.data.readers.generators import generate
from batchbound.data.schedule import Schedule
from batchbound.data.workload import Workload
from batchbound.heuristics.registry import policy_named
from batchbound.heuristics.simulate import simulate
from batchbound.models.bounds.makespan import best_bound
from batchbound.models.bounds.params import BoundParams
from batchbound.models.bounds.prove import proven_bound
from batchbound.models.formulations.slot_free import list_schedule
from batchbound.planning.plan import make_plan
from batchbound.solvers import Limits, mip, solve
from batchbound.solvers.backends.linear import LinearResult
from batchbound.solvers.backends.worker import Outcome
from batchbound.solvers.result import Status, StoppedBy
from batchbound.solvers.search.constructive import ski_rental_schedule
from batchbound.solvers.solve import _with_slots_of_use


def job(count: int, slots: int, first: bool = False) -> Problem:
    return Problem(generate("table3", 2, count), CostModel.paper(), slots, prefill_emits_first_token=first)


def arriving(problem: Problem) -> Problem:
    """The same requests, one a second."""
    return replace(
        problem, workload=replace(problem.workload, arrival=np.arange(len(problem), dtype=np.float64))
    )


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["search", "lpt-ski", "exact"])
def test_arrivals_are_ignored(solver: str) -> None:
    problem = job(7, 2)
    there = solve(problem, solver, limits=Limits(work=200))
    found = solve(arriving(problem), solver, limits=Limits(work=200))
    assert found.makespan == there.makespan
    assert found.gap == there.gap


@pytest.mark.slow
def test_a_plan_and_a_comparison_ignore_them_too() -> None:
    problem = job(20, 4)
    limits = Limits(work=5)
    plan = make_plan(arriving(problem), limits=limits)
    assert plan.makespan == make_plan(problem, limits=limits).makespan
    assert not plan.problem.workload.arrival.any()
    rows = compare({"late": arriving(problem), "there": problem}, ["search", "policy:fcfs"], limits).rows
    assert [row.value for row in rows[:2]] == [row.value for row in rows[2:]]


@pytest.mark.parametrize(("count", "slots"), [(9, 3), (60, 10)])
def test_improvements_fall_to_the_makespan_within_the_time_taken(count: int, slots: int) -> None:
    found = solve(job(count, slots), limits=Limits(seconds=0.5))
    seconds, makespans = zip(*found.improvements, strict=True)
    assert makespans[-1] == found.makespan
    assert list(makespans) == sorted(set(makespans), reverse=True)
    assert list(seconds) == sorted(seconds)
    assert 0.0 <= seconds[0] <= seconds[-1] <= found.seconds


@pytest.mark.parametrize(
    ("solver", "maker"),
    [
        ("exact", "batchbound.solvers.solve.solve_small"),
        ("slot-free:cp-sat", "batchbound.solvers.mip.run_in_worker"),
        ("repaired:highs", "batchbound.solvers.mip.run_in_worker"),
    ],
)
def test_the_bound_takes_its_share_of_a_solvers_time_and_no_more(
    solver: str, maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):  # nothing is wrong: it only ends the solver here
        pass

    asked: list[Any] = []

    def bounded(problem: Problem, seconds: float, _: BoundParams) -> Bound:
        asked.append(seconds)
        begun = time.perf_counter()
        time.sleep(0.05)
        asked.append(time.perf_counter() - begun)
        return best_bound(problem)

    def made(*given: Any, **named: Any) -> None:
        # A worker loads its library meanwhile.
        named.get("meanwhile", lambda: None)()
        limits = [each.seconds for each in given if isinstance(each, Limits)]
        asked.append(named["seconds"] if "seconds" in named else limits[0] if limits else given[-1])
        raise Made

    # Modules, and a function of the same name in one of them: the text would name that one.
    monkeypatch.setattr(importlib.import_module("batchbound.models.bounds.prove"), "proven_bound", bounded)
    module, name = maker.rsplit(".", 1)
    monkeypatch.setattr(importlib.import_module(module), name, made)
    with pytest.raises(Made):
        solve(job(30, 5), solver, limits=Limits(seconds=10.0))
    share, took, left = asked
    assert share == pytest.approx(3.0)
    assert 0.0 < left <= (10.0 - took if solver == "exact" else 10.0)


def test_a_model_that_takes_longer_to_build_than_the_limit_is_not_waited_for() -> None:
    # Its 2.2 million rows take several seconds.
    problem = job(200, 20)
    found = solve(problem, "repaired:highs", limits=Limits(seconds=1e-3))
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TIME)
    assert found.message == "its limit came before the model was built"
    assert not found.started
    assert found.makespan == mip._rule_schedule(problem).makespan(problem)
    assert found.bound is not None


def test_without_a_start_every_linear_backend_begins_from_the_better_of_two_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = job(30, 5)
    given: list[Schedule] = []

    def found_nothing(module: str, function: str, task: tuple[Any, ...], *_: Any, **__: Any) -> Outcome:
        given.append(task[-1])
        return Outcome(None, {}, StoppedBy.TIME, 1.0)

    monkeypatch.setattr(mip, "run_in_worker", found_nothing)
    found = solve(problem, "slot-free:highs", limits=Limits(seconds=10.0))
    listed = list_schedule(problem)
    assert listed is not None
    least = min(listed.makespan(problem), ski_rental_schedule(problem).makespan(problem))
    assert [given[0].makespan(problem), found.makespan] == [least, least]
    assert (found.status, found.message) == (
        Status.FEASIBLE,
        "its limit came before the model was built",
    )
    row = compare({"job": problem}, "slot-free:highs", Limits(seconds=10.0)).rows[0]
    # The rule's makespan is not the solver's.
    assert (row.value, row.bound, row.status, row.message) == (None, None, "not started", found.message)
    plan = make_plan(problem, solver="slot-free:highs", limits=Limits(seconds=10.0))
    assert plan.maker.message == plan.to_json()["maker"]["message"] == found.message
    assert "message" not in make_plan(problem, limits=Limits(work=5)).to_json()["maker"]
    solve(problem, "literal:highs", limits=Limits(seconds=10.0))
    assert given[-1] is None
    asked_from = solve(problem, limits=Limits(work=5)).schedule
    found = solve(problem, "slot-free:highs", limits=Limits(seconds=10.0), initial=asked_from)
    assert (given[-1], found.schedule) == (asked_from, asked_from)
    assert found.message == "its limit came before the model was built"


@pytest.mark.parametrize("limit", [{}, {"prefill_token_cap": 300}, {"kv_capacity": 2500}])
def test_what_a_formulation_begins_from_is_no_worse_than_longest_first(limit: dict[str, int]) -> None:
    problem = replace(Problem(generate("table3", 0, 60), CostModel.paper(), 10), **limit)  # type: ignore[arg-type]
    start = mip._rule_schedule(problem)
    assert start.check(problem) is None
    for policy in ("lpt", "lpt-ski"):
        simulated = simulate(problem, policy_named(policy, problem)).makespan
        assert start.makespan(problem) <= simulated * (1 + 1e-9), policy


def test_a_worse_schedule_of_a_backend_does_not_take_the_place_of_the_start() -> None:
    problem = Problem(Workload.from_lengths([5, 5], [3, 2]), CostModel.paper(), slots=2)
    apart, together = (
        Schedule(np.array([0, 1]), np.array([0, 1]), np.array([1, 2])),
        Schedule(np.array([0, 0]), np.array([0, 1]), np.array([3])),
    )
    found = LinearResult(Status.FEASIBLE, StoppedBy.TIME, None, None, 99.0, 0.0, "highs", "1")
    judged = mip._judged(problem, proven_bound(problem), "highs", found, (apart, together))
    assert judged.schedule is together
    assert judged.message == "the backend's bound is above a checked schedule"
    assert judged.bound is not None
    assert judged.makespan is not None
    assert judged.bound.seconds <= judged.makespan


@pytest.mark.parametrize("solver", ["search", "lpt-ski", "exact", "repaired:highs"])
def test_a_start_that_breaks_a_rule_is_refused_by_every_solver(solver: str) -> None:
    problem = Problem(Workload.from_lengths([5, 5], [3, 2]), CostModel.paper(), slots=1)
    together = Schedule(np.array([0, 0]), np.array([0, 0]), np.array([3]))
    with pytest.raises(ValueError, match="the start is not a schedule of this problem: one request per slot"):
        solve(problem, solver, limits=Limits(work=10), initial=together)


def test_a_poor_solution_of_a_backend_loses_the_steps_in_which_nothing_decodes() -> None:
    problem = Problem(Workload.from_lengths([5, 5], [3, 2]), CostModel.paper(), slots=2)
    idle = Schedule(np.array([0, 1]), np.array([0, 1]), np.array([9, 9]))
    assert idle.check(problem) is not None
    found = LinearResult(Status.FEASIBLE, StoppedBy.TIME, None, None, None, 0.0, "highs", "1")
    worse = Schedule(np.array([0, 1]), np.array([0, 1]), np.array([3, 2]))
    judged = mip._judged(problem, proven_bound(problem), "highs", found, (idle, worse))
    assert judged.schedule is not None
    assert judged.schedule.check(problem) is None
    assert judged.schedule.decode_steps.sum() == problem.decode_steps.sum()


def test_slots_beyond_any_use_take_no_time() -> None:
    many = Problem(Workload.from_lengths([5], [5]), CostModel.paper(), 10**6)
    assert _with_slots_of_use(many, None).slots == 1_000
    found = solve(many, limits=Limits(work=2))
    assert found.schedule is not None
    assert found.schedule.check(many) is None
    last = Schedule(np.array([0]), np.array([999_999]), found.schedule.decode_steps)
    assert _with_slots_of_use(many, last) is many
    few = replace(many, slots=900)
    assert _with_slots_of_use(few, None) is few


def test_a_job_beyond_any_schedule_is_refused_in_words() -> None:
    endless = Problem(Workload.from_lengths([5, 5], [60_000_000, 60_000_000]), CostModel.paper(), 1)
    with pytest.raises(ValueError, match="no schedule of at most 100,000,000 decode steps"):
        solve(endless, limits=Limits(work=2))


@pytest.mark.parametrize("limit", ["kv_capacity", "prefill_token_cap", "max_position"])
def test_a_limit_that_no_number_holds_is_refused_by_name(limit: str) -> None:
    limits: dict[str, Any] = {limit: 2**63}
    with pytest.raises(ValueError, match=f"{limit} is 9223372036854775808; it must be at most"):
        Problem(Workload.from_lengths([5], [5]), CostModel.paper(), 1, **limits)
